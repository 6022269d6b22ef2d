from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from kernel_facts import in_child, mapped

from sglcache.errors import BadRequest, ClosedError, ConfigError, NotInstalled, ProtocolError
from sglcache.memory import pools as pools_module
from sglcache.memory.geometry import Geometry, Placement
from sglcache.memory.mapping import create_memfd
from sglcache.memory.pools import DevicePools, HostPools, Pool, Source
from sglcache.memory.views import KVViews

NAME = "sglcache-device-0"


@pytest.fixture
def pools(geometry: Geometry) -> Iterator[DevicePools]:
    pools = DevicePools(geometry)
    yield pools
    pools.close()


def test_each_shard_has_all_pages_and_nothing_is_touched(geometry: Geometry, pools: DevicePools) -> None:
    host = HostPools(geometry)
    for tier, num_pages in ((pools, 8), (host, 6)):
        assert len(tier.shards) == 2
        for pool in tier.shards:
            assert pool.pages.shape == (num_pages, geometry.page_bytes)
            assert pool.pages.dtype == torch.uint8
            assert os.fstat(pool.fd).st_size == pool.num_bytes == num_pages * geometry.page_bytes
            assert os.fstat(pool.fd).st_blocks == 0
    host.close()


def test_without_host_pages_there_is_no_host_pool(geometry: Geometry) -> None:
    assert HostPools(replace(geometry, host_pages=0)).shards == ()


def test_pages_without_bytes_are_pools_that_take_nothing(geometry: Geometry) -> None:
    names = replace(geometry, num_layers=0)
    pools, host = DevicePools(names), HostPools(names)
    assert (len(pools.shards), len(host.shards)) == (2, 2)
    views = KVViews(pools.shards[1].fd, names, 1)
    for pool, num_pages in ((pools.shards[0], 8), (host.shards[0], 6)):
        assert (pool.num_pages, pool.num_bytes, len(pool.buffer)) == (num_pages, 0, 0)
        assert pool.pages.shape == (num_pages, 0)
        pool.populate(0, num_pages)
    assert (views.k, views.v, views.layers) == ((), (), ())
    assert views.array.shape == views.pages.shape == (8, 0)
    pools.close()
    host.close()


def test_the_memory_of_each_resource_is_known_by_its_name(geometry: Geometry) -> None:
    window = DevicePools(geometry, "window")
    assert mapped("sglcache-device-window-1") == 1
    window.close()
    host = HostPools(geometry, "mamba")
    assert mapped("sglcache-host-mamba-0") == 1
    host.close()


def test_a_closed_pool_says_so_and_is_unmapped_with_its_last_tensor(pools: DevicePools) -> None:
    page = pools.shards[0].pages[3]
    pools.close()
    pools.close()
    with pytest.raises(ClosedError):
        _ = pools.shards[0].pages
    assert page.fill_(4).sum() == 4 * len(page)
    assert mapped(NAME) == 1
    del page
    assert mapped(NAME) == 0


def test_a_tier_that_fails_halfway_leaves_nothing(geometry: Geometry, monkeypatch: pytest.MonkeyPatch) -> None:
    created: list[Pool] = []

    class Second(Pool):
        def __init__(self, name: str, placement: Placement, source: Source = create_memfd) -> None:
            if created:
                raise ConfigError("no more")
            super().__init__(name, placement, source)
            created.append(self)

    monkeypatch.setattr(pools_module, "Pool", Second)
    with pytest.raises(ConfigError):
        DevicePools(geometry)
    assert mapped(NAME) == 0  # and conftest counts the descriptors


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_views_are_the_pages_bytes_in_the_stated_order(geometry: Geometry, dtype: str) -> None:
    geometry = replace(geometry, dtype=dtype)
    pools = DevicePools(geometry)
    views = KVViews(pools.shards[1].fd, geometry, shard=1)
    assert len(views.k) == len(views.v) == geometry.num_layers
    for layer in range(geometry.num_layers):
        for which, tensor in enumerate((views.k[layer], views.v[layer])):
            assert tensor.shape == (8, 4, 2, 8)
            assert tensor.dtype == getattr(torch, dtype)
            tensor.fill_(10 * which + layer + 1)

    pages = pools.shards[1].pages.view(tensor.dtype).view(8, 3, 2, 4, 2, 8)
    expected = torch.tensor([[1, 11], [2, 12], [3, 13]], dtype=tensor.dtype).view(1, 3, 2, 1, 1, 1)
    assert torch.equal(pages, expected.expand_as(pages))  # so K and V of all layers cover every byte
    assert torch.equal(views.pages, pools.shards[1].pages)
    assert (views.device, views.address) == (None, views.array.ctypes.data)
    assert not pools.shards[0].pages.any()
    pools.close()


def test_a_page_table_writes_its_pages_and_no_other(geometry: Geometry, pools: DevicePools) -> None:
    views = KVViews(pools.shards[0].fd, geometry)
    views.v[2][torch.tensor([6, 1])] = 1.0
    touched = pools.shards[0].pages.any(dim=1).nonzero().flatten().tolist()
    assert touched == [1, 6]


def test_without_torch_the_bytes_are_there_and_a_tensor_says_what_to_install(
    geometry: Geometry, pools: DevicePools, monkeypatch: pytest.MonkeyPatch
) -> None:
    views = KVViews(pools.shards[0].fd, geometry)
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not there
    views.array[3] = 7
    with pytest.raises(NotInstalled, match=r"this needs torch, .*pip install 'sglcache\[runner\]'"):
        _ = views.k
    monkeypatch.undo()
    assert views.pages[3].tolist() == [7] * geometry.page_bytes
    assert views.pages.data_ptr() == views.array.ctypes.data


def test_views_outlive_the_pool_and_the_descriptor(geometry: Geometry, pools: DevicePools) -> None:
    views = KVViews(pools.shards[0].fd, geometry)
    pools.close()
    views.k[0].fill_(2)
    assert views.k[0].sum() == 2 * views.k[0].numel()


def test_kept_tensors_stay_good_after_close_and_the_last_one_unmaps(geometry: Geometry, pools: DevicePools) -> None:
    views = KVViews(pools.shards[0].fd, geometry)
    pools.close()
    kept = views.k[1][2:4]
    views.close()
    views.close()
    for name in ("k", "v", "pages", "array"):
        with pytest.raises(ClosedError):
            getattr(views, name)
    kept.fill_(3)
    assert mapped(NAME) == 1
    del kept
    assert mapped(NAME) == 0


def test_a_forked_child_is_refused_and_cannot_write(geometry: Geometry, pools: DevicePools) -> None:
    views = KVViews(pools.shards[0].fd, geometry)
    kept = views.k[0]

    def refused() -> bool:
        with pytest.raises(ClosedError, match="forked"):
            _ = views.k
        views.close()
        return mapped(NAME) == 0

    assert in_child(refused) == 0
    assert in_child(lambda: kept.fill_(1)) == -signal.SIGSEGV
    assert not views.pages.any()


def test_what_does_not_fit_the_geometry_is_not_viewed(geometry: Geometry, pools: DevicePools) -> None:
    with pytest.raises(ProtocolError, match="are needed"):
        KVViews(pools.shards[0].fd, replace(geometry, num_pages=9))
    with pytest.raises(BadRequest, match="shard 2 of 2"):
        KVViews(pools.shards[0].fd, geometry, shard=2)


def test_views_made_in_inference_mode_can_be_written_outside(geometry: Geometry) -> None:
    pools = DevicePools(geometry)
    with torch.inference_mode():
        views = KVViews(pools.shards[0].fd, geometry)
        assert not views.k[0].any()
    views.k[0][0] = 1
    assert views.k[0][0].all()
    views.close()
    pools.close()
