"""Pools that can't fill up on this host are told of at the start, not hours later."""

from __future__ import annotations

from pathlib import Path

from sglcache.config import load
from sglcache.memory.geometry import Geometry
from sglcache.server import room


def of_example() -> list[Geometry]:
    config = load(Path(__file__).parents[2] / "configs" / "dp2-pp2.toml")
    return [Geometry.of(config.for_stage(pp_rank)) for _, pp_rank in config.parallel.local()]


def test_all_pools_of_all_ranks_count() -> None:
    assert room.wanted(of_example()) == 10.5 * (1 << 30)
    shards = Geometry(page_size=4, num_pages=10, num_layers=1, num_kv_heads=2, head_dim=8, num_shards=2, host_pages=5)
    assert room.wanted([shards]) == (10 + 5) * 2 * 1 * 4 * 2 * 8 * 2


def test_too_little_is_told_with_both_numbers_and_the_remedy() -> None:
    assert room.too_little(of_example(), int(10.5 * (1 << 30))) is None
    told = room.too_little(of_example(), 8 << 30)
    assert told is not None
    assert "10.5 GiB when they are full, and 8.0 GiB are there; lower pool.num_tokens" in told


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    everything = room.there(limit)
    assert everything > 1 << 20
    for text, have in (("max\n", everything), ("1048576\n", 1 << 20), (f"{everything * 2}\n", everything)):
        limit.write_text(text)
        assert room.there(limit) == have
