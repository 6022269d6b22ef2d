from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from sglcache.errors import ConfigError
from sglcache.memory.geometry import Geometry
from sglcache.wire import control

LLAMA_8B = Geometry(page_size=16, num_pages=1000, num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")


def test_a_page_of_llama_8b_is_two_mebibytes() -> None:
    assert LLAMA_8B.page_bytes == 2 << 20
    assert LLAMA_8B.pool_bytes == 1000 * (2 << 20)
    assert LLAMA_8B.host_pool_bytes == 0
    assert LLAMA_8B.page_shape == (2, 32, 16, 8, 128)


def test_shards_share_the_heads_and_have_all_pages() -> None:
    sharded = replace(LLAMA_8B, num_shards=4, host_pages=10)
    assert sharded.page_shape == (2, 32, 16, 2, 128)
    assert sharded.page_bytes * 4 == LLAMA_8B.page_bytes
    assert sharded.pool_bytes * 4 == LLAMA_8B.pool_bytes
    assert sharded.host_pool_bytes == 10 * sharded.page_bytes


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"page_size": 0}, "pool.page_size"),
        ({"num_pages": 0}, "pool.num_pages"),
        ({"num_pages": 1 << 31}, "pool.num_pages"),
        ({"num_layers": -1}, "pool.num_layers"),
        ({"num_kv_heads": 0}, "pool.num_kv_heads"),
        ({"num_shards": 3}, "pool.num_shards"),
        ({"num_shards": 16}, "pool.num_shards"),
        ({"head_dim": 0}, "pool.head_dim"),
        ({"host_pages": -1}, "pool.host_pages"),
        ({"dtype": "int8"}, "pool.dtype"),
        ({"layout": "layer_first"}, "pool.layout"),
        ({"page_size": 1 << 20}, "pool.page_size"),
    ],
)
def test_a_form_that_cannot_be_is_refused_by_its_key(changes: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError, match=path) as caught:
        replace(LLAMA_8B, **changes)
    assert caught.value.path == path


def test_it_survives_the_wire() -> None:
    geometry = replace(LLAMA_8B, num_shards=2, host_pages=7)
    frame = msgspec.msgpack.decode(control.encode(geometry.to_wire()), type=control.Geometry)
    assert Geometry.from_wire(frame) == geometry


@pytest.mark.parametrize("module", ["geometry", "mapping", "rings"])
def test_sizes_and_rings_need_no_torch(module: str) -> None:
    code = f"import sys, sglcache.memory.{module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
