"""How old pages were, and how long unused, when they made room: each page once, by tier; what is cleared made none."""

from __future__ import annotations

from typing import Any

from sglcache.core.effects import Copy
from sglcache.core.histograms import Histogram
from sglcache.core.index import DEVICE, HOST, Index, IndexConfig

P = 4


def tokens(number: int, num_pages: int) -> bytes:
    return b"".join((number * 1000 + i).to_bytes(4, "little") for i in range(P * num_pages))


class Runner:
    """Requests one after the other, at times that the test says; copies end at once."""

    def __init__(self, **config: Any) -> None:
        self.index = Index(IndexConfig(page_size=P, **config))
        self.session = self.index.open_session()
        self.ticket = 0

    def request(self, number: int, num_pages: int, came: float, left: float) -> None:
        index = self.index
        index.now = came
        grant = index.acquire(self.session, number, tokens(number, num_pages))
        assert grant is not None
        self.done(grant.lease, index.commit)
        index.now = left
        self.done(grant.lease, index.release)

    def done(self, lease: Any, verb: Any) -> None:
        self.ticket += 1
        verb(self.session, 1, lease, self.ticket)
        self.index.event_done(self.session, self.ticket)
        for effect in self.index.drain():
            if isinstance(effect, Copy):
                self.index.copy_done(effect.ticket)


def seen(histogram: Histogram) -> tuple[int, float]:
    return sum(histogram.counts), histogram.total


def test_a_page_that_makes_room_has_an_age_and_a_time_unused() -> None:
    runner = Runner(num_pages=4)
    runner.request(1, 3, came=10, left=30)
    runner.request(2, 4, came=100, left=101)
    assert seen(runner.index.lifetimes[DEVICE]) == (3, 3 * 90)
    assert seen(runner.index.idle_times[DEVICE]) == (3, 3 * 70)
    counts = runner.index.lifetimes[DEVICE].counts
    assert counts[runner.index.lifetimes[DEVICE].bounds.index(100.0)] == 3
    runner.index.now = 500
    runner.index.clear()
    assert seen(runner.index.lifetimes[DEVICE])[0] == 3, "a clear makes no room"


def test_each_tier_has_its_own_and_a_hit_makes_a_page_less_idle_and_no_younger() -> None:
    runner = Runner(num_pages=4, host_pages=8)
    runner.request(1, 2, came=10, left=20)
    runner.request(1, 2, came=50, left=60)
    runner.request(2, 4, came=100, left=110)  # demotes the first
    assert seen(runner.index.lifetimes[DEVICE]) == (2, 2 * 90)
    assert seen(runner.index.idle_times[DEVICE]) == (2, 2 * 40)
    assert seen(runner.index.lifetimes[HOST]) == (0, 0.0)
    runner.request(3, 4, came=200, left=210)  # its copy takes the first's place on the host
    assert seen(runner.index.lifetimes[HOST]) == (2, 2 * 190)
    assert seen(runner.index.idle_times[HOST]) == (2, 2 * 140)
