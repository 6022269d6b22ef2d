"""Whatever a runner writes through its views is what it reads after a write-through, an eviction and a load-back."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from forms import geometries, state_geometries
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglcache.errors import BadRequest, ClosedError, ConfigError, TransferError
from sglcache.memory.cpu_engine import CpuEngine
from sglcache.memory.engine import LoadPlace, Transfer, ways_of
from sglcache.memory.geometry import Geometry, StateGeometry
from sglcache.memory.pools import DevicePools, HostPools
from sglcache.memory.views import KVViews, StateViews
from sglcache.units import TicketId, Tier
from sglcache.wire.control import StateForm


def planes_of(views: KVViews) -> list[Sequence[Tensor]]:
    return [getattr(views, plane.name) for plane in views.geometry.planes]


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def packed(slots: Sequence[int]) -> bytes:
    return array("i", slots).tobytes()


@settings(deadline=None)
@given(geometry=geometries(), data=st.data())
def test_every_byte_comes_back_to_every_shard_in_any_form(geometry: Geometry, data: st.DataObject) -> None:
    with contextlib.closing(DevicePools(geometry)) as device, contextlib.closing(HostPools(geometry)) as host:
        go_round(geometry, data, device, host)


def go_round(geometry: Geometry, data: st.DataObject, device: DevicePools, host: HostPools) -> None:
    every = [KVViews(pool.fd, geometry, shard) for shard, pool in enumerate(device.shards)]
    count = data.draw(st.integers(0, min(geometry.num_pages, geometry.host_pages)))
    there, between, back = (
        data.draw(st.permutations(range(size)))[:count]
        for size in (geometry.num_pages, geometry.host_pages, geometry.num_pages)
    )
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    wrote: list[list[list[Tensor]]] = []  # of each shard, plane, layer: [count, page_size, heads, dim], as bytes
    for shard, views in enumerate(every):
        if shard % geometry.num_replicas:
            mine = wrote[-1]  # the same as its neighbour's
        else:
            mine = [
                [
                    torch.randint(0, 256, as_bytes(pages[: len(there)]).shape, dtype=torch.uint8, generator=generator)
                    for pages in plane
                ]
                for plane in planes_of(views)
            ]
        wrote.append(mine)
        for plane, rows in zip(planes_of(views), mine, strict=True):
            for pages, row in zip(plane, rows, strict=True):
                pages[list(there)] = row.view(pages.dtype)

    answers: list[tuple[TicketId, bool, TransferError | None]] = []

    def copy(ticket: int, src: Tier, dst: Tier, src_slots: Sequence[int], dst_slots: Sequence[int]) -> None:
        engine = CpuEngine(
            ways_of(geometry, device.shards, host.shards), lambda *answer: answers.append(answer), lambda *told: None
        )
        place = LoadPlace(0, 1) if dst is Tier.DEVICE else None
        engine.submit(Transfer(TicketId(ticket), src, dst, packed(src_slots), packed(dst_slots), place))
        engine.close()

    copy(1, Tier.DEVICE, Tier.HOST, there, between)
    for pool in device.shards:
        pool.buffer[:] = 0xEE  # others' bytes
    copy(2, Tier.HOST, Tier.DEVICE, between, back)
    assert answers == [(1, True, None), (2, True, None)]

    others = sorted(set(range(geometry.num_pages)) - set(back))
    for views, mine in zip(every, wrote, strict=True):
        for number, (plane, rows) in enumerate(zip(planes_of(views), mine, strict=True)):
            for layer, (pages, row) in enumerate(zip(plane, rows, strict=True)):
                assert torch.equal(as_bytes(pages[list(back)]), row)
                assert (as_bytes(pages[others]) == 0xEE).all(), "and nothing else was touched"
                array_ = views.layers[layer][number]
                assert np.array_equal(array_[list(back)].reshape(-1), row.numpy().reshape(-1)), "as numpy's, too"


@given(geometry=geometries())
def test_views_have_the_shapes_that_are_stated_and_share_no_byte(geometry: Geometry) -> None:
    device = DevicePools(geometry)
    views = KVViews(device.shards[-1].fd, geometry, geometry.num_shards - 1)
    item = getattr(torch, geometry.dtype).itemsize
    for plane, tensors in zip(geometry.planes, planes_of(views), strict=True):
        assert len(tensors) == geometry.num_layers
        for tensor in tensors:
            assert tensor.shape == (geometry.num_pages, geometry.page_size, plane.heads, plane.dim)
            assert tensor.dtype == getattr(torch, geometry.dtype)
            of_a_page = geometry.page_size * plane.token_bytes
            page_stride = geometry.page_bytes if geometry.layout == "page_first" else of_a_page
            assert tensor.stride() == (page_stride // item, plane.heads * plane.dim, plane.dim, 1)
            if geometry.layout == "layer_first":
                assert tensor.is_contiguous(), "the flat [slots, heads, dim] of SGLang"
            raw = tensor.view(torch.uint8)
            raw += 1
    assert (device.shards[-1].buffer == 1).all(), "all planes are all bytes, each once"
    assert views.layers[0][0].ctypes.data == planes_of(views)[0][0].data_ptr(), "the same memory"
    device.close()


@given(geometry=state_geometries())
def test_states_have_the_shapes_that_are_stated_and_share_no_byte(geometry: StateGeometry) -> None:
    with contextlib.closing(DevicePools(geometry, "mamba")) as device:
        views = StateViews(device.shards[-1].fd, geometry, geometry.num_shards - 1)
        assert list(views.states) == [state.name for state in geometry.states]
        for number, state in enumerate(geometry.states):
            shape = (state.shape[0] // geometry.num_shards, *state.shape[1:])
            for layer, tensor in enumerate(views.states[state.name]):
                assert tensor.shape == (geometry.num_pages, *shape)
                assert tensor.dtype == getattr(torch, state.dtype)
                assert tensor[0].is_contiguous(), "a slot's array is one run"
                raw = tensor.view(torch.uint8) if tensor.dim() > 1 else tensor
                raw += 1
                array_ = views.layers[layer][number]
                assert array_.shape == (geometry.num_pages, tensor[0].numel() * tensor.element_size())
                assert array_.ctypes.data == tensor.data_ptr(), "the same memory"
                assert (array_ == 1).all()
            assert len(views.states[state.name]) == geometry.num_layers
        buffer = device.shards[-1].buffer
        exact = sum(each.size for layer in views.layers for each in layer)
        assert buffer.max() == 1
        assert int(buffer.sum()) == exact, "no byte is in two arrays"
        views.close()
        with pytest.raises(ClosedError):
            _ = views.states


def test_a_slot_that_is_written_by_its_names_comes_back_from_the_host_in_any_layout() -> None:
    states = (StateForm("conv", (6, 3), "bfloat16"), StateForm("ssm", (2, 5), "float32"))
    geometry = StateGeometry(4, 3, states, "layer_first", 2, 3, "page_first")
    with (
        contextlib.closing(DevicePools(geometry, "mamba")) as device,
        contextlib.closing(HostPools(geometry, "mamba")) as host,
    ):
        every = [StateViews(pool.fd, geometry, shard) for shard, pool in enumerate(device.shards)]
        wrote = {}
        for views in every:
            for name, layers in views.states.items():
                for layer, tensor in enumerate(layers):
                    wrote[views.shard, name, layer] = torch.randn(tensor[2].shape).to(tensor.dtype)
                    tensor[2] = wrote[views.shard, name, layer]
        full = Geometry(page_size=4, num_pages=8, num_layers=0, host_pages=8, head_dim=8)
        with contextlib.closing(DevicePools(full)) as pages, contextlib.closing(HostPools(full)) as names:
            ways = ways_of(full, pages.shards, names.shards)
            ways += ways_of(geometry, device.shards, host.shards, "mamba")
            for src, dst, slots in ((Tier.DEVICE, Tier.HOST, (2, 1)), (Tier.HOST, Tier.DEVICE, (1, 3))):
                answers: list[bool] = []
                engine = CpuEngine(ways, lambda ticket, ok, error: answers.append(ok), lambda *told: None)  # noqa: B023
                more = [("mamba", packed(slots[:1]), packed(slots[1:]))]
                engine.submit(Transfer(TicketId(1), src, dst, packed([0]), packed([5]), None, more))
                engine.close()
                assert answers == [True]
        for views in every:
            for name, layers in views.states.items():
                for layer, tensor in enumerate(layers):
                    assert torch.equal(tensor[3], wrote[views.shard, name, layer])
                    assert not tensor[:2].any()


HEADS = Geometry(page_size=4, num_pages=8, num_layers=2, num_kv_heads=2, head_dim=3)
LATENTS = Geometry(page_size=4, num_pages=8, num_layers=2, kv_lora_rank=5, qk_rope_head_dim=2)


@pytest.mark.parametrize(
    ("geometry", "wrong", "right"), [(HEADS, ["kv"], r"pool\.k and pool\.v"), (LATENTS, ["k", "v"], r"pool\.kv")]
)
def test_a_plane_that_the_pool_has_not_is_refused_by_name(geometry: Geometry, wrong: list[str], right: str) -> None:
    device = DevicePools(geometry)
    views = KVViews(device.shards[0].fd, geometry)
    for name in wrong:
        with pytest.raises(BadRequest, match=f"holds no {name}; it has {right}"):
            getattr(views, name)
    device.close()


def test_pages_as_a_whole_are_to_be_had_where_they_are_whole() -> None:
    for layout in ("page_first", "layer_first"):
        geometry = Geometry(page_size=4, num_pages=8, num_layers=2, num_kv_heads=2, head_dim=3, layout=layout)
        device = DevicePools(geometry)
        views = KVViews(device.shards[0].fd, geometry)
        for get in (lambda v=views: v.array, lambda v=views: v.pages, lambda d=device: d.shards[0].pages):
            if layout == "page_first":
                assert get().shape == (8, geometry.page_bytes)
            else:
                with pytest.raises(ConfigError, match=r'pool\.layout = "page_first"'):
                    get()
        device.close()
