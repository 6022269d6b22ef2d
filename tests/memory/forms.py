"""Forms for hypothesis: heads and latents, types, layouts, shards that split heads or share them, states; and pools."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from sglcache.memory.geometry import ITEM_BYTES, LAYOUTS, Form, Geometry, Placement, StateGeometry
from sglcache.memory.pools import DevicePools, HostPools, Pool
from sglcache.units import Tier
from sglcache.wire.control import StateForm


@st.composite
def geometries(draw: st.DrawFn, least_layers: int = 1) -> Geometry:
    """Small ones, with a host tier."""
    width = st.integers(1, 6)
    row: dict[str, Any]
    if draw(st.booleans()):
        row = {"kv_lora_rank": draw(width), "qk_rope_head_dim": draw(st.integers(0, 4))}
        row["num_shards"] = draw(st.integers(1, 4))
    else:
        heads, shards = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (2, 4), (3, 3), (4, 2), (6, 3), (2, 6)]))
        row = {"num_kv_heads": heads, "num_shards": shards, "head_dim": draw(width), "v_head_dim": draw(width)}
    return Geometry(
        page_size=draw(st.sampled_from([1, 2, 4])),
        num_pages=draw(st.integers(1, 7)),
        num_layers=draw(st.integers(least_layers, 4)),
        host_pages=draw(st.integers(1, 7)),
        dtype=draw(st.sampled_from(sorted(ITEM_BYTES))),
        layout=draw(st.sampled_from(LAYOUTS)),
        host_layout=draw(st.sampled_from(LAYOUTS)),
        **row,
    )


@st.composite
def state_geometries(draw: st.DrawFn) -> StateGeometry:
    """Small ones, of arrays whose elements differ in size."""
    num_shards = draw(st.integers(1, 3))
    rest = st.lists(st.integers(1, 3), max_size=2)
    states = tuple(
        StateForm(name, (num_shards * draw(st.integers(1, 3)), *draw(rest)), draw(st.sampled_from(sorted(ITEM_BYTES))))
        for name in ("conv", "ssm", "third")[: draw(st.integers(1, 3))]
    )
    return StateGeometry(
        num_pages=draw(st.integers(1, 7)),
        num_layers=draw(st.integers(1, 4)),
        states=states,
        layout=draw(st.sampled_from(LAYOUTS)),
        num_shards=num_shards,
        host_pages=draw(st.integers(1, 7)),
        host_layout=draw(st.sampled_from(LAYOUTS)),
    )


def forms() -> st.SearchStrategy[Form]:
    """Of any resource, pages without bytes among them."""
    return st.one_of(geometries(least_layers=0), state_geometries())


class Resource:
    """One resource's pools in both tiers, and what a copy of its pages must come to."""

    def __init__(self, form: Form, name: str, seed: int) -> None:
        self.form = form
        self.name = name
        self.device, self.host = DevicePools(form, name), HostPools(form, name)
        for number, pool in enumerate((*self.device.shards, *self.host.shards)):
            pool.buffer[:] = np.random.default_rng([seed, number]).integers(0, 256, pool.num_bytes, np.uint8)

    def pools(self, tier: Tier) -> tuple[Pool, ...]:
        return self.device.shards if tier is Tier.DEVICE else self.host.shards

    def expected(self, src: Tier, dst: Tier, slots: Mapping[Tier, Sequence[int]]) -> list[np.ndarray]:
        """The target pools' bytes once slots[src] are copied to slots[dst], one by one."""
        found = [pool.buffer.copy() for pool in self.pools(dst)]
        for i, j in self.form.pairs(src, dst):
            source, target = self.pools(src)[i], self.pools(dst)[j]
            for a, b in zip(slots[src], slots[dst], strict=True):
                for here, there in zip(pieces(source.placement, a), pieces(target.placement, b), strict=True):
                    found[j][there] = source.buffer[here]
        return found

    def is_as(self, dst: Tier, found: list[np.ndarray]) -> bool:
        return all(np.array_equal(pool.buffer, each) for pool, each in zip(self.pools(dst), found, strict=True))

    def close(self) -> None:
        self.device.close()
        self.host.close()


def pieces(placement: Placement, page: int) -> list[slice]:
    regions = (region for layer in placement.layers for region in layer)
    return [slice(region.start(page), region.start(page) + region.num_bytes) for region in regions]


def packed(slots: Sequence[int]) -> bytes:
    return array("i", slots).tobytes()


@st.composite
def hybrids(draw: st.DrawFn) -> list[Form]:
    """The forms of a rank's resources, pages of tokens first."""
    return [draw(geometries(least_layers=0)), *draw(st.lists(forms(), max_size=2))]


def draw_slots(data: st.DataObject, form: Form) -> dict[Tier, list[int]]:
    """By tier, equally many, without repeats; perhaps none."""
    count = data.draw(st.integers(0, min(form.num_pages, form.host_pages)))
    sizes = {Tier.DEVICE: form.num_pages, Tier.HOST: form.host_pages}
    return {tier: data.draw(st.permutations(range(size)))[:count] for tier, size in sizes.items()}
