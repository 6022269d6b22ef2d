"""A host tier's memory, had in the background: what there is when the machine has no more, or pins none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from sglcache.memory import filling
from sglcache.memory.filling import Filler, pinned_pages
from sglcache.memory.geometry import Geometry
from sglcache.memory.pools import HostPools


@pytest.fixture(params=["page_first", "layer_first"])
def pools(request: pytest.FixtureRequest, geometry: Geometry, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostPools]:
    monkeypatch.setattr(filling, "CHUNK_BYTES", 1)
    pools = HostPools(replace(geometry, num_shards=1, host_pages=12, host_layout=request.param))
    yield pools
    pools.close()


def filled(pools: HostPools, refused: int) -> tuple[list[int], Filler]:
    """What it tells, where the machine refuses to pin that range, counted from 0."""
    told: list[int] = []
    asked: list[int] = []

    def pin(address: int, num_bytes: int) -> bool:
        asked.append(address)
        return len(asked) <= refused

    filler = Filler(pools.shards, told.append, pin=pin)
    filler._thread.join()
    return told, filler


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_where_no_more_is_pinned_it_says_how_many_pages_there_are(pools: HostPools, refused: int) -> None:
    told, filler = filled(pools, refused)
    if refused and not pinned_pages(pools.shards):  # they are pinned in one piece, and that was not refused
        assert (told, filler.short) == ([12], None)
    else:
        assert filler.short is not None
        assert filler.short[:2] == (told[-1] if told else 0, 12)
        assert "can't be pinned" in filler.short.why


def test_where_all_is_pinned_nothing_is_short(pools: HostPools) -> None:
    told, filler = filled(pools, 99)
    assert (told[-1], filler.short) == (12, None)
