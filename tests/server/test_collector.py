from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from sglcache.server.collector import Collector


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector(every=1_000)
    collector.start()
    yield collector
    collector.stop()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


class Cycle:
    alive = 0

    def __init__(self) -> None:
        self.self = self
        Cycle.alive += 1

    def __del__(self) -> None:
        Cycle.alive -= 1


def test_young_garbage_is_collected_and_only_when_it_is_time(collector: Collector) -> None:
    gc.collect(0)
    Cycle()
    collector.tick()
    assert (collector.num_collections, Cycle.alive) == (0, 1)
    keep = [[] for _ in range(2_000)]  # type: ignore[var-annotated]
    collector.tick()
    assert (collector.num_collections, Cycle.alive) == (1, 0)
    del keep


def test_what_survived_is_never_walked_again(collector: Collector) -> None:
    before = gc.get_freeze_count()
    keep = [[] for _ in range(5_000)]  # type: ignore[var-annotated]
    collector.tick()
    assert gc.get_freeze_count() >= before + 5_000
    assert len(gc.get_objects()) < 1_000
    del keep


def test_new_ones_are_not_let_grow_where_as_many_old_ones_go(collector: Collector) -> None:
    old = [[] for _ in range(50_000)]  # type: ignore[var-annotated]
    collector.tick()
    new: list[list[int]] = []
    for _ in range(100):  # a cache that is full: Python's own count does not rise
        del old[-500:]
        new += [[] for _ in range(490)]
        assert gc.get_count()[0] < 1_000
        collector.tick()
        assert len(gc.get_objects(generation=0)) < 4 * 500


def test_long_work_is_followed_by_a_collection_whatever_the_count(collector: Collector) -> None:
    for _ in range(10):
        keep = [[] for _ in range(900)]  # type: ignore[var-annotated]
        collector.sliced()
        assert len(gc.get_objects(generation=0)) < 2 * 1_000
    assert collector.num_collections == 5
    del keep
