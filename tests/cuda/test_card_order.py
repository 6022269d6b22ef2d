"""No byte moves unordered (law 8), where the order is that of streams: cases A10 and A11, and loads that streams wait
for.

What holds a stream back is a kernel that waits for a word (`Gate`); what holds the rank's copies back is the driver in
software. A card can't be told to, and there the same tests show less.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from worlds import World, check, evict, heartbeats, ids, put, until

from sglcache.bench.contents import Contents
from sglcache.client import Client, Lease
from sglcache.client.mirror import Mirror
from sglcache.errors import BadRequest, NoSpace
from sglcache.testing.cards import CardArray, Gate, Port, Scratch
from sglcache.testing.daemon import Daemon

Lend = Callable[..., Daemon]

P, PAGES = 4, 16
TOKENS = range(1000, 1000 + PAGES * P)
TINY = {"pool": {"num_tokens": P * PAGES}, "host": {"num_tokens": P * 8}}


@pytest.fixture
def other(world: World) -> Iterator[Port]:
    """Another runner's streams."""
    with contextlib.closing(Port()) as port:
        yield port


class Kernel:
    """A kernel that reads a lease's pages, all of them or some layers', once the port's stream has come to it."""

    def __init__(self, port: Port, client: Client) -> None:
        """Of page_first."""
        self.port = port
        self.pages: list[list[CardArray]] = [list(each) for each in port.layers(client.pool)]
        self.num_bytes = client.geometry.page_bytes
        self.scratch = Scratch(port, client.geometry.num_pages * self.num_bytes)

    def launch(self, lease: Lease, layer: int | None = None) -> None:
        for number, slot in enumerate(lease.slots.tolist()):
            for each in range(len(self.pages)) if layer is None else [layer]:
                for plane in self.pages[each]:
                    at = number * self.num_bytes + plane.offset
                    self.scratch.take(plane, slot, num_bytes=plane.strides[1] * plane.shape[1], at=at)

    def found(self, num_pages: int) -> np.ndarray:
        """What it has read: uint8 [num_pages, page_bytes]."""
        return self.scratch.read(self.num_bytes)[:num_pages]

    def close(self) -> None:
        self.scratch.close()


@contextlib.contextmanager
def kernel(port: Port, client: Client) -> Iterator[Kernel]:
    with contextlib.closing(Kernel(port, client)) as made:
        yield made


def pages_of(port: Port, client: Client, lease: Lease) -> np.ndarray:
    """What its pages hold behind all that is in the stream: uint8 [num_pages, page_bytes]."""
    with kernel(port, client) as reader:
        reader.launch(lease)
        return reader.found(len(lease.slots))


def test_a_commit_is_not_there_before_its_stream_has_come_to_it(world: World, lend: Lend) -> None:
    """A11: nobody hears of it, matches it or copies it; then the host has what the stream wrote last."""
    daemon = lend(**world.sections())
    stream = daemon.info["stream"]
    with (
        Mirror(stream["endpoint"], stream["replay_endpoint"]) as mirror,
        daemon.observer() as observer,
        world.client(daemon) as client,
        Gate(world.port) as gate,
    ):
        lease = client.acquire(TOKENS)
        gate.hold()
        world.contents(client).write(lease, ids(TOKENS), 0, len(TOKENS))
        begun = lease.commit_begin()
        client.ping()
        heartbeats(daemon)
        assert mirror.catch_up(observer.digest()["seq"], 10.0)
        assert observer.peek(TOKENS).matched_tokens == 0
        assert not mirror.hashes("GPU")
        assert not mirror.hashes("CPU_PINNED")
        assert not begun.done
        assert observer.status()["gauges"]["num_copies"] == 0
        gate.open()
        assert begun.wait().committed_tokens == len(TOKENS)
        lease.release()
        daemon.settle()
        assert mirror.catch_up(observer.digest()["seq"], 10.0)
        assert len(mirror.hashes("GPU")) == len(mirror.hashes("CPU_PINNED")) == PAGES
        evict(daemon, world.port, client)
        check(world.port, client, TOKENS, host_tokens=len(TOKENS))


@pytest.mark.daemons
def test_so_it_is_however_long_the_kernels_take(world: World, lend: Lend) -> None:
    """A11, again and again: the host's bytes are always the last."""
    daemon, rng = lend(**world.sections(host={"num_tokens": P * 2048})), random.Random(11)
    every = [range(10_000 * n, 10_000 * n + 4 * P) for n in range(1, 151)]
    with world.client(daemon) as client:
        contents = world.contents(client)
        for tokens in every:
            with client.acquire(tokens, wait_s=10) as lease:
                contents.write(lease, ids(tokens) + 1, 0, len(tokens))  # what must not be copied
                world.port.spin(rng.random() * 0.004)
                contents.write(lease, ids(tokens), 0, len(tokens))
                lease.commit_begin()
        client.ping()
        evict(daemon, world.port, client)
        for tokens in every:
            check(world.port, client, tokens, host_tokens=len(tokens))


@pytest.mark.daemons
def test_pages_are_not_given_away_while_a_kernel_reads_them(world: World, lend: Lend, other: Port) -> None:
    daemon = lend(**world.sections(**TINY))
    mine = range(5000, 5000 + PAGES * P)
    with (
        world.client(daemon) as reader,
        daemon.client(streams=other.streams) as writer,
        kernel(world.port, reader) as reading,
        Gate(world.port) as gate,
    ):
        lease = reader.acquire(mine)
        world.contents(reader).write(lease, ids(mine), 0, len(mine))
        before, slots = pages_of(world.port, reader, lease), lease.slots
        gate.hold()
        reading.launch(lease)
        lease.release()
        for _ in range(3):
            with pytest.raises(NoSpace):
                writer.acquire(TOKENS, wait_s=0.02)
        waiting = writer.acquire_begin(TOKENS, wait_s=10)
        writer.ping()
        assert not waiting.done
        gate.open()
        with waiting.wait() as got:
            assert sorted(got.slots) == sorted(slots), "its pages"
            Contents(writer, other.layers).write(got, ids(TOKENS), 0, len(TOKENS))
            other.finish()
        assert np.array_equal(reading.found(PAGES), before)


@pytest.mark.daemons
def test_a_load_does_not_overtake_the_last_use_of_its_pages(world: World, lend: Lend, other: Port) -> None:
    daemon = lend(**world.sections(**TINY))
    loaded, mine = range(7000, 7000 + 8 * P), range(5000, 5000 + PAGES * P)
    with (
        world.client(daemon) as reader,
        daemon.client(streams=other.streams) as loader,
        kernel(world.port, reader) as reading,
        Gate(world.port) as gate,
    ):
        put(other, loader, loaded)
        evict(daemon, other, loader)
        lease = reader.acquire(mine)
        world.contents(reader).write(lease, ids(mine), 0, len(mine))
        before = pages_of(world.port, reader, lease)
        gate.hold()
        reading.launch(lease)
        lease.release()
        waiting = loader.acquire_begin(loaded, wait_s=10)
        loader.ping()
        heartbeats(daemon)
        assert not waiting.done
        gate.open()
        with waiting.wait() as got:
            assert got.host_tokens == len(loaded)
            got.wait_loaded()
            Contents(loader, other.layers).check_match(got, ids(loaded))
        assert np.array_equal(reading.found(PAGES), before)


# -- loads that streams wait for -----------------------------------------------------------------------------------


def test_a_stream_that_waits_before_the_copy_began_does_wait(world: World, lend: Lend) -> None:
    """The trap of events between processes: waiting for what was not recorded yet is no wait."""
    daemon = lend(**world.sections())
    with world.client(daemon) as client, kernel(world.port, client) as reading:
        put(world.port, client, TOKENS)
        with client.acquire(TOKENS) as lease:
            right = pages_of(world.port, client, lease)
        evict(daemon, world.port, client)
        with world.copies_held(daemon):
            lease = client.acquire(TOKENS)
            assert lease.host_tokens == len(TOKENS)
            for layer in range(client.geometry.load_layers):
                lease.wait_loaded(layer, on_stream=True)
                reading.launch(lease, layer)
            if world.soft is not None:
                heartbeats(daemon)
                assert world.port.is_busy()
        assert np.array_equal(reading.found(PAGES), right)
        lease.wait_loaded()  # it did not fail
        lease.release()


DEEP = {
    "pool": {"page_size": 16, "num_tokens": 16 * 128, "num_layers": 4, "num_kv_heads": 8, "head_dim": 128},
    "host": {"num_tokens": 16 * 128},
}


@pytest.mark.daemons
def test_layers_are_there_one_after_the_other(world: World, lend: Lend) -> None:
    """A stream computes with the first while the last are on their way."""
    slow = {"SOFTCUDA_SLOW_NS_PER_MB": "10000000"}
    daemon = lend(**world.sections(environment=slow, **DEEP))
    tokens = range(64 * 16)
    with world.client(daemon) as client, kernel(world.port, client) as reading:
        put(world.port, client, tokens)
        with client.acquire(tokens) as lease:
            right = pages_of(world.port, client, lease)
        evict(daemon, world.port, client)
        lease = client.acquire(tokens)
        assert lease.load is not None
        slot, generation = lease.load
        ends = []
        for layer in range(4):
            lease.wait_loaded(layer, on_stream=True)
            reading.launch(lease, layer)
            ends.append(client.record())
        loads, ring = client._loads, client._ring
        assert loads is not None
        assert ring is not None
        until(lambda: ring._words[ends[0].event] >= ends[0].generation)
        if world.soft is not None:
            assert not loads.done(slot, generation, 3), "the first was read when the last was not there"
        until(lambda: ring._words[ends[3].event] >= ends[3].generation)
        assert np.array_equal(reading.found(64), right)
        lease.release()


@pytest.mark.daemons
def test_on_stream_is_for_cards(lend: Lend) -> None:
    daemon = lend()
    with daemon.client() as client:
        with client.acquire(TOKENS) as lease:
            lease.commit()
        daemon.settle()
        with daemon.admin() as admin:
            admin.clear("device")
        with client.acquire(TOKENS) as lease, pytest.raises(BadRequest, match="no stream reads"):
            lease.wait_loaded(on_stream=True)


@pytest.mark.daemons
def test_host_pages_are_not_given_away_while_they_are_read(world: World, lend: Lend) -> None:
    """A10: what is written meanwhile does not come to the host for want of room; the load's bytes are right."""
    soft = world.only_software()
    daemon = lend(**world.sections(pool={"num_tokens": P * 64}, host={"num_tokens": P * 8}))
    loaded = range(7000, 7000 + 8 * P)
    with world.client(daemon) as client:
        put(world.port, client, loaded)
        evict(daemon, world.port, client)
        with soft.hold_copies(daemon.pid):
            lease = client.acquire(loaded)
            assert lease.host_tokens == len(loaded)
            put(world.port, client, range(9000, 9000 + 8 * P))
            heartbeats(daemon)
            assert daemon.pool("HOST")["cached"] == 8
            with daemon.observer() as observer:
                assert observer.peek(loaded).matched_tokens == len(loaded)
        lease.wait_loaded()
        world.contents(client).check_match(lease, ids(loaded))
        lease.release()


@pytest.mark.daemons
@pytest.mark.parametrize("last", [0, 1])
def test_an_event_of_two_cards_is_behind_both(world: World, lend: Lend, last: int) -> None:
    world.need(cards=2)
    daemon = lend(**world.sections(pool={"num_shards": 2, "gpus": [0, 1]}))
    with (
        world.client(daemon) as client,
        daemon.observer() as observer,
        Gate(world.port) as gate,
    ):
        lease = client.acquire(TOKENS)
        gate.hold(last)
        world.contents(client).write(lease, ids(TOKENS), 0, len(TOKENS))
        begun = lease.commit_begin()
        client.ping()
        heartbeats(daemon)
        assert not begun.done
        assert observer.peek(TOKENS).matched_tokens == 0
        gate.open()
        begun.wait()
        lease.release()
        evict(daemon, world.port, client)
        with world.copies_held(daemon):
            lease = client.acquire(TOKENS)
            lease.wait_loaded(on_stream=True)
            assert world.soft is None or (world.port.is_busy(0) and world.port.is_busy(1))
        world.contents(client).check_match(lease, ids(TOKENS))
        lease.release()


# -- many rounds ---------------------------------------------------------------------------------------------------


@pytest.mark.daemons
@pytest.mark.parametrize("seed", [1, 2])
def test_no_page_is_ever_stale(world: World, lend: Lend, other: Port, seed: int) -> None:
    """Two runners, whose streams are late by random times, in two small tiers: each hit holds what it should."""
    rng = random.Random(seed)
    daemon = lend(**world.sections(pool={"num_tokens": P * 24}, host={"num_tokens": P * 32}))
    ports, found = (world.port, other), 0
    with world.client(daemon) as first, daemon.client(streams=other.streams) as second:
        clients = (first, second)
        contents = [Contents(client, port.layers) for client, port in zip(clients, ports, strict=True)]
        live: list[tuple[int, Lease, range]] = []
        for _ in range(900):
            who = rng.randrange(2)
            port, client = ports[who], clients[who]
            stem = 1000 * rng.randrange(1, 9)
            tokens = range(stem, stem + P * rng.randrange(1, 9))
            try:
                lease = client.acquire(tokens, wait_s=rng.choice((0, 0.05)))
            except NoSpace:
                while live:
                    live.pop()[1].release()
                continue
            if lease.load is not None:
                lease.wait_loaded(on_stream=rng.random() < 0.7)
            if rng.random() < 0.5:
                contents[who].check_match(lease, ids(tokens))
                found += lease.matched_tokens
            if rng.random() < 0.3:
                port.spin(rng.random() * 0.002)
            contents[who].write(lease, ids(tokens), lease.matched_tokens, len(tokens))
            if rng.random() < 0.8:
                lease.commit_begin()
            if rng.random() < 0.3:
                port.spin(rng.random() * 0.002)
            live.append((who, lease, tokens))
            while len(live) > rng.randrange(3):
                live.pop(rng.randrange(len(live)))[1].release()
        for _, lease, _ in live:
            lease.release()
    counters = daemon.settle()["counters"]
    assert found > 2000
    assert counters["load_pages"] > 300, counters
