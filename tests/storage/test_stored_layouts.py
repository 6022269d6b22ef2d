"""A payload says nothing of the pool it came from: what was stored from one layout is fetched into the other."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from shelf import PAGE, file_store, identity, never, run

from sglcache.memory.geometry import Geometry, moves
from sglcache.memory.pools import HostPools
from sglcache.server.third import pages_of
from sglcache.storage.host import HostPages

FORMS = {
    "heads": {"num_kv_heads": 4, "head_dim": 8, "v_head_dim": 4, "num_shards": 2},
    "replicas": {"num_kv_heads": 2, "head_dim": 8, "num_shards": 4},
    "latents": {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "num_shards": 2},
}


def host(form: str, layout: str) -> tuple[HostPools, HostPages]:
    geometry = Geometry(
        page_size=PAGE,
        num_pages=1,
        num_layers=3,
        host_pages=6,
        host_layout=layout,
        **FORMS[form],
    )
    pools = HostPools(geometry)
    return pools, pages_of(geometry, pools)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("src", "dst"), [("page_first", "layer_first"), ("layer_first", "page_first")])
def test_what_was_stored_from_one_layout_is_fetched_into_the_other(
    tmp_path: Path, form: str, src: str, dst: str
) -> None:
    pools, pages = host(form, src)
    for pool in pools.shards:
        pool.buffer[:] = np.frombuffer(os.urandom(pool.num_bytes), np.uint8)
    others, other = host(form, dst)
    who = identity(payload_bytes=pages.payload_bytes)
    it = run(range(3 * PAGE))
    store = file_store(tmp_path, pages, identity=who)
    assert store.put(it, [4, 0, 2], never).mask == b"\1" * 3
    store.close()
    store = file_store(tmp_path, other, identity=who)
    assert store.get(it, [1, 2, 3], never).num_pages == 3
    store.close()
    for a, b in ((4, 1), (0, 2), (2, 3)):
        assert b"".join(pages.views(a)) == b"".join(other.views(b))
    for mine, its in zip(pools.shards, others.shards, strict=True):
        for src_region, dst_region in moves(mine.placement, its.placement):
            for a, b in ((4, 1), (0, 2), (2, 3)):
                assert mine.rows(src_region)[a].tobytes() == its.rows(dst_region)[b].tobytes()
    del mine, its
    for made in (pools, others):
        made.close()
