"""Geometries for hypothesis: heads and latents, types, layouts, shards that split heads or share them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from sglcache.memory.geometry import ITEM_BYTES, LAYOUTS, Form, Geometry, StateGeometry
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
