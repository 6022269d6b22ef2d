from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from sglcache.errors import BadRequest, ClosedError, ConfigError, NotInstalled
from sglcache.memory.geometry import Geometry
from sglcache.memory.pools import DevicePools
from sglcache.memory.token_pools import MHATokenToKVPool, MLATokenToKVPool
from sglcache.memory.views import KVViews

PAGES, SIZE, LAYERS, HEADS, DIM = 6, 4, 3, 2, 8


def mapped(layout: str, **form: Any) -> KVViews:
    """The last shard of a daemon's pool as a runner maps it; the daemon's side of it is gone."""
    form = {"page_size": SIZE, "num_pages": PAGES, "num_layers": LAYERS, "dtype": "float32", **form}
    geometry = Geometry(layout=layout, **form)
    pools = DevicePools(geometry)
    views = KVViews(pools.shards[-1].fd, geometry, geometry.num_shards - 1)
    pools.close()
    return views


def layer_first(k_dim: int = DIM, v_dim: int = DIM) -> KVViews:
    return mapped("layer_first", num_kv_heads=HEADS, head_dim=k_dim, v_head_dim=v_dim)


def page_first(k_dim: int = DIM, v_dim: int = DIM) -> KVViews:
    return mapped("page_first", num_kv_heads=HEADS, head_dim=k_dim, v_head_dim=v_dim)


def latents(layout: str = "layer_first", rank: int = 5, rope: int = 2) -> KVViews:
    return mapped(layout, kv_lora_rank=rank, qk_rope_head_dim=rope, num_shards=2)


@pytest.fixture(params=[("page_first", 1), ("page_first", 4), ("layer_first", 4)], ids=str)
def views(request: pytest.FixtureRequest) -> KVViews:
    """The second of two shards, with pages of one token and of four."""
    layout, page_size = request.param
    form = {"page_size": page_size, "num_kv_heads": 2 * HEADS, "head_dim": DIM, "num_shards": 2}
    return mapped(layout, dtype="float16", **form)


LOC = torch.tensor([9, 2, 23, 16])


def rows(heads: int = HEADS, dim: int = DIM, seed: int = 0) -> Tensor:
    return torch.randn(len(LOC), heads, dim, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("v_dim", [DIM, 5])
@pytest.mark.parametrize("form", [layer_first, page_first])
def test_what_is_written_to_a_slot_lies_at_its_page_and_offset_in_any_layout(form: Any, v_dim: int) -> None:
    pool = MHATokenToKVPool(form(v_dim=v_dim), start_layer=10)
    k, v = rows(), rows(dim=v_dim, seed=1)
    pool.set_kv_buffer(11, LOC, k, v)
    for n, slot in enumerate(LOC.tolist()):
        assert torch.equal(pool.get_key_pages(11)[slot // SIZE, slot % SIZE], k[n])
        assert torch.equal(pool.get_value_pages(11)[slot // SIZE, slot % SIZE], v[n])
    assert sum(int(pages.count_nonzero()) for pages in pool.views.k) == k.numel(), "and nothing else"
    assert sum(int(pages.count_nonzero()) for pages in pool.views.v) == v.numel()


def test_the_flat_views_are_sglangs_shapes_and_the_same_memory() -> None:
    pool = MHATokenToKVPool(layer_first(v_dim=5))
    assert pool.is_flat
    k, v = pool.get_kv_buffer(2)
    assert (k.shape, v.shape) == ((PAGES * SIZE, HEADS, DIM), (PAGES * SIZE, HEADS, 5))
    pool.set_kv_buffer(2, LOC, rows(), rows(dim=5))
    assert torch.equal(k[LOC], rows())
    assert torch.equal(pool.get_value_buffer(2)[LOC], rows(dim=5))
    k[7] = 3
    assert (pool.get_key_pages(2)[1, 3] == 3).all()


def test_a_daemons_pool_is_flat_with_pages_of_one_token_and_else_says_what_it_would_take(views: KVViews) -> None:
    pool = MHATokenToKVPool(views)
    assert (pool.size, pool.page_size) == (PAGES * views.geometry.page_size, views.geometry.page_size)
    assert (pool.head_num, pool.head_dim, pool.v_head_dim) == (HEADS, DIM, DIM)
    assert (pool.layer_num, pool.start_layer, pool.end_layer) == (LAYERS, 0, LAYERS - 1)
    assert (pool.dtype, pool.device) == (torch.float16, torch.device("cpu"))
    assert pool.is_flat == (views.geometry.page_size == 1 or views.geometry.layout == "layer_first")
    loc = LOC % pool.size
    pool.set_kv_buffer(1, loc, rows(), rows(seed=1))  # float32, and converted
    if pool.is_flat:
        assert pool.get_key_buffer(1).shape == (pool.size, HEADS, DIM)
        assert torch.equal(pool.get_key_buffer(1)[loc], rows().half())
        assert torch.equal(pool.get_value_buffer(1)[loc], rows(seed=1).half())
    else:
        for call in (pool.get_key_buffer, pool.get_value_buffer, pool.get_kv_buffer):
            with pytest.raises(ConfigError, match=r"page_first.*layer_first.*page_size = 1") as caught:
                call(1)
            assert (caught.value.path, caught.value.layout) == ("pool.layout", "page_first")
    pages, offsets = loc // pool.page_size, loc % pool.page_size
    assert torch.equal(views.k[1][pages, offsets], rows().half())
    assert torch.equal(views.v[1][pages, offsets], rows(seed=1).half())


def test_a_closed_view_is_closed_here_too(views: KVViews) -> None:
    pool = MHATokenToKVPool(views)
    views.close()
    for call in (pool.get_key_pages, pool.get_value_pages):
        with pytest.raises(ClosedError):
            call(0)
    with pytest.raises(ClosedError):
        pool.set_kv_buffer(0, LOC[:0], rows()[:0], rows()[:0])


def test_layers_are_the_models_numbers_or_its_modules() -> None:
    class Attention:
        layer_id = 12

    pool = MHATokenToKVPool(layer_first(), start_layer=10)
    pool.set_kv_buffer(Attention(), LOC, rows(), rows())
    assert torch.equal(pool.get_key_buffer(12)[LOC], rows())
    assert torch.equal(pool.get_value_buffer(Attention())[LOC], rows())
    for layer in (9, 13, -1):
        with pytest.raises(BadRequest, match=r"10\.\.12"):
            pool.get_key_buffer(layer)


@pytest.mark.parametrize(
    ("k", "v"),
    [
        ((4, HEADS, DIM + 1), (4, HEADS, DIM)),
        ((4, HEADS, DIM), (4, HEADS, 1)),
        ((4, HEADS, DIM), (4, 1, DIM)),
        ((4, 1, DIM), (4, 1, DIM)),
        ((3, HEADS, DIM), (3, HEADS, DIM)),
        ((4, HEADS, DIM), (3, HEADS, DIM)),
    ],
)
@pytest.mark.parametrize("form", [layer_first, page_first])
def test_rows_of_another_shape_are_refused_and_not_broadcast(form: Any, k: Any, v: Any) -> None:
    pool = MHATokenToKVPool(form())
    with pytest.raises(BadRequest):
        pool.set_kv_buffer(0, LOC, torch.ones(k), torch.ones(v))
    assert not any(pages.any() for pages in (*pool.views.k, *pool.views.v))


def test_getters_wait_for_the_loads_of_the_batch_in_their_layer() -> None:
    waited: list[tuple[tuple[int, int], int]] = []
    pool = MHATokenToKVPool(layer_first(), start_layer=10, wait=lambda load, layer: waited.append((load, layer)))
    pool.get_kv_buffer(10)
    assert waited == []
    pool.wait_for([(3, 1), None, (4, 7)])
    pool.set_kv_buffer(11, LOC, rows(), rows())
    assert waited == [], "who writes does not wait"
    pool.get_key_buffer(11)
    pool.get_value_pages(12)
    assert waited == [((3, 1), 1), ((4, 7), 1), ((3, 1), 2), ((4, 7), 2)]
    pool.wait_for([])
    pool.get_kv_buffer(10)
    assert len(waited) == 4
    with pytest.raises(BadRequest, match="without `wait`"):
        MHATokenToKVPool(layer_first()).wait_for([(3, 1)])


def test_a_padding_page_is_named_by_who_holds_it() -> None:
    assert MHATokenToKVPool(layer_first()).padding_slot is None
    pool = MHATokenToKVPool(layer_first(), padding_page=0)
    assert (pool.padding_slot, pool.size) == (0, (PAGES - 1) * SIZE)
    assert MHATokenToKVPool(page_first(), padding_page=2).padding_slot == 8
    for page in (-1, PAGES):
        with pytest.raises(BadRequest, match="padding_page"):
            MHATokenToKVPool(layer_first(), padding_page=page)


def test_flat_views_taken_in_inference_mode_are_written_outside() -> None:
    form = layer_first()
    with torch.inference_mode():
        pool = MHATokenToKVPool(form)
        buffer = pool.get_key_buffer(0)
        pool.set_kv_buffer(0, LOC, rows(), rows())
    buffer[0] = 1
    assert torch.equal(buffer[LOC], rows())


@pytest.mark.parametrize("module", ["allocator", "rows", "token_pools"])
def test_without_torch_the_import_says_what_to_install(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not there
    for name in ("allocator", module):
        monkeypatch.delitem(sys.modules, f"sglcache.memory.{name}", raising=False)
    with pytest.raises(NotInstalled, match="this needs torch"):
        importlib.import_module(f"sglcache.memory.{module}")


# -- latents ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_a_latent_row_is_written_whole_or_in_its_parts(layout: str) -> None:
    pool = MLATokenToKVPool(latents(layout), kv_lora_rank=5, qk_rope_head_dim=2, start_layer=1)
    whole, parts = rows(1, 7), rows(1, 7, seed=1)
    pool.set_kv_buffer(1, LOC, whole, whole[..., :5])
    pool.set_mla_kv_buffer(2, LOC, parts[..., :5], parts[..., 5:])
    for layer, wrote in ((1, whole), (2, parts)):
        latent, rope = pool.get_mla_kv_buffer(layer, LOC, torch.float64)
        assert torch.equal(torch.cat([latent, rope], 2), wrote.double())
        assert torch.equal(pool.get_key_pages(layer)[LOC // SIZE, LOC % SIZE], wrote)
    if layout == "page_first":
        with pytest.raises(ConfigError, match="page_first"):
            pool.get_value_buffer(1)
        return
    key, value = pool.get_kv_buffer(1)
    assert (key.shape, value.shape) == ((PAGES * SIZE, 1, 7), (PAGES * SIZE, 1, 5))
    assert torch.equal(key[LOC], whole)
    assert torch.equal(value[LOC], whole[..., :5])
    assert value.data_ptr() == key.data_ptr()


def test_latents_that_are_not_the_pools_are_refused() -> None:
    with pytest.raises(ConfigError, match="one head of 7, and the pool has 1 of 8") as caught:
        MLATokenToKVPool(latents(rank=6), 5, 2)
    assert caught.value.path == "pool.kv_lora_rank"
    with pytest.raises(BadRequest, match=r"holds no kv; it has pool\.k and pool\.v"):
        MLATokenToKVPool(layer_first(k_dim=7), 5, 2)
    with pytest.raises(BadRequest, match=r"holds no k; it has pool\.kv"):
        MHATokenToKVPool(latents())
    pool = MLATokenToKVPool(latents(), 5, 2)
    for wrong in ((rows(1, 4), rows(1, 3)), (rows(1, 5), rows(1, 2)[:2]), (rows(1, 5), rows(1, 1))):
        with pytest.raises(BadRequest):
            pool.set_mla_kv_buffer(0, LOC, *wrong)
    with pytest.raises(BadRequest):
        pool.set_kv_buffer(0, LOC, rows(1, 5))
    assert not pool.views.kv[0].any()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_eight_bits_are_written_converted_and_read(layout: str, dtype: str) -> None:
    pool = MHATokenToKVPool(mapped(layout, num_kv_heads=HEADS, head_dim=DIM, v_head_dim=5, dtype=dtype))
    assert pool.dtype.itemsize == 1
    pool.set_kv_buffer(1, LOC, rows(), rows(dim=5))
    for pages, wrote in ((pool.get_key_pages(1), rows()), (pool.get_value_pages(1), rows(dim=5))):
        found = pages[LOC // SIZE, LOC % SIZE]
        assert torch.equal(found.view(torch.uint8), wrote.to(pool.dtype).view(torch.uint8))
    latent = MLATokenToKVPool(mapped(layout, kv_lora_rank=5, qk_rope_head_dim=2, dtype=dtype), 5, 2)
    latent.set_mla_kv_buffer(0, LOC, rows(1, 5), rows(1, 2))
    found, rope = latent.get_mla_kv_buffer(0, LOC, torch.float32)
    assert torch.equal(found, rows(1, 5).to(latent.dtype).float())
    assert torch.equal(rope, rows(1, 2).to(latent.dtype).float())
