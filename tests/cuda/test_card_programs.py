"""Random programs of a runner on cards: whatever was committed, evicted and loaded, a hit holds what was written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worlds import World, evict, ids

from sglcache.client import Client, Lease
from sglcache.errors import NoSpace
from sglcache.testing.daemon import Daemon

pytestmark = pytest.mark.daemons

Lend = Callable[..., Daemon]

P = 4
SMALL = {"pool": {"num_tokens": P * 16}, "host": {"num_tokens": P * 20}}
LATE_S = 0.002

stems = st.sampled_from([1000, 2000, 3000])
pages = st.integers(1, 8)
steps = st.one_of(
    st.tuples(st.just("acquire"), stems, pages, st.booleans()),
    st.tuples(st.just("commit"), st.integers(0, 3), pages, st.booleans()),
    st.tuples(st.just("extend"), st.integers(0, 3), pages, st.booleans()),
    st.tuples(st.just("release"), st.integers(0, 3), st.just(0), st.booleans()),
    st.tuples(st.just("evict"), st.just(0), st.just(0), st.booleans()),
)


class Program:
    """Leases by the order in which they were taken, each with its prompt."""

    def __init__(self, world: World, daemon: Daemon, client: Client) -> None:
        self.world, self.daemon, self.client = world, daemon, client
        self.contents = world.contents(client)
        self.live: list[tuple[Lease, range]] = []
        self.given: dict[int, int] = {}  # by lease, the tokens that are the cache's: nobody writes them again

    def acquire(self, stem: int, count: int, on_stream: bool) -> None:
        tokens = range(stem, stem + P * count)
        try:
            lease = self.client.acquire(tokens)
        except NoSpace:
            return
        self.live.append((lease, tokens))
        self.given[lease.id] = lease.matched_tokens
        if lease.load is not None:
            lease.wait_loaded(on_stream=on_stream)
        self.contents.check_match(lease, ids(tokens))

    def extend(self, which: int, count: int, late: bool) -> None:
        if which < len(self.live):
            lease, tokens = self.live[which]
            longer = range(tokens.start, tokens.stop + P * count)
            try:
                lease.extend(range(tokens.stop, longer.stop))
            except NoSpace:
                return
            self.live[which] = lease, longer

    def commit(self, which: int, count: int, late: bool) -> None:
        """Behind a kernel that writes other bytes first, and one that takes its time."""
        if which < len(self.live):
            lease, tokens = self.live[which]
            start, stop = self.given[lease.id], min(P * count, len(tokens))
            if late:
                self.contents.write(lease, ids(tokens) + 1, start, len(tokens))
                self.world.port.spin(LATE_S)
            self.contents.write(lease, ids(tokens), start, len(tokens))
            if start < stop:
                lease.commit(stop)
                self.given[lease.id] = stop
                self.contents.check_pages("committed", lease, ids(tokens), stop)

    def release(self, which: int, _: int, late: bool) -> None:
        if which < len(self.live):
            if late:
                self.world.port.spin(LATE_S)
            self.live.pop(which)[0].release()

    def evict(self, *_: object) -> None:
        if not self.live:
            evict(self.daemon, self.world.port, self.client)

    def end(self) -> None:
        while self.live:
            self.release(0, 0, False)
        evict(self.daemon, self.world.port, self.client)
        for stem in (1000, 2000, 3000):
            tokens = range(stem, stem + 8 * P)
            with self.client.acquire(tokens, wait_s=10) as lease:
                lease.wait_loaded()
                self.contents.check_match(lease, ids(tokens))
        evict(self.daemon, self.world.port, self.client)
        with self.daemon.admin() as admin:
            admin.clear()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=st.lists(steps, min_size=4, max_size=24))
def test_a_hit_holds_what_was_written(world: World, lend: Lend, program: list[tuple[str, int, int, bool]]) -> None:
    daemon = lend(**world.sections(**SMALL))
    with world.client(daemon) as client:
        running = Program(world, daemon, client)
        for name, *arguments in program:
            getattr(running, name)(*arguments)
        running.end()
