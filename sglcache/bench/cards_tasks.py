"""What the processes of `bench cards` are asked to do on a card: tasks of `Actor`s, beside a real daemon.

runner     attaches, writes KV by kernels, waits for loads in its stream: first tokens, and how late events are seen
feeder     attaches, and keeps the daemon copying as fast as it can. It has no work on the card: the words of its
           events are written by its CPU
decoder    attaches to nothing and decodes: a model that the copies may slow down (`testing/probe`)
"""

from __future__ import annotations

import ctypes
import itertools
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from sglcache.bench.copy import BACKUP
from sglcache.bench.hand import CardReach, Hand, sample
from sglcache.bench.harness import BenchError, Row
from sglcache.client import Client
from sglcache.client.client import Event
from sglcache.client.lease import Lease
from sglcache.errors import ConfigError
from sglcache.memory.cuda_driver import CudaError
from sglcache.memory.rings import EventRing
from sglcache.testing.probe.stage import Here

NUM_EVENTS: Final = 4096
WAIT_S: Final = 60.0
PAUSE_S: Final = 0.002
COPIES: Final = 6  # in flight before the feeder makes no more: the card is never without
LOADS: Final = 3  # prompts that are on their way back at once
CHUNK: Final = 512  # tokens of a prefill's kernels
COLD, L1, L2 = "cold", "L1", "L2"
# The numbers of prompts: those that are loaded back are the first.
ASKED, WRITTEN, LATE = 1 << 20, 2 << 20, 3 << 20

Tokens = npt.NDArray[np.uint32]


class Feed(NamedTuple):
    """What the feeder copies."""

    tokens: int  # of a prompt
    kept: int  # prompts that are loaded back, in turns: more than the device has room for


def prompt(number: int, tokens: int) -> Tokens:
    """No two of them share a page."""
    made = np.arange(tokens, dtype=np.uint32)
    made[0] = (1 << 24) + number
    return made


def describe(here: Here) -> Row:
    """The card and its driver; or the `error` that there is none."""
    try:
        card = here.card
        free, total = card.free_bytes()
    except CudaError as exc:
        return {"error": f"the CUDA driver has no card for this process: {exc.message.partition(';')[0]}"}
    except ConfigError as exc:
        return {"error": exc.message.partition(", and ")[2] or exc.message}
    return {
        "name": card.name(),
        "uuid": f"GPU-{card.uuid(here.device).hex()}",
        "cuda": card.driver_version(),
        "multiprocessors": card.multiprocessors,
        "copy_engines": card.fact("copy_engines"),
        "memory_gib": total / 2**30,
        "free_gib": free / 2**30,
        "batched_by": card.batched_by or "none: one by one",
    }


# -- the runner ----------------------------------------------------------------------------------------------------


def attach(here: Here, socket: str) -> None:
    here.kept["ring"] = ring = EventRing(NUM_EVENTS)
    here.kept["hand"] = Hand(socket, here.card, name="bench cards", ring=ring)


def detach(here: Here) -> None:
    here.kept.pop("hand").close()


def spoil(here: Here) -> None:
    """After the device was cleared."""
    here.kept["hand"].spoil()


def first_token(here: Here, number: int, tokens: int, source: str, rate: float) -> dict[str, float]:
    """ms from the acquire: to its answer, until the first layer of what is cached can be read by the stream, until
    all of it can, and until all of the prompt is computed.

    What is not cached is computed at `rate` tokens a second, by a kernel that waits and one that writes, in chunks. Of
    what is cached the pages are looked at afterwards. BenchError: they are wrong, or `source` is not where it was.
    """
    hand: Hand = here.kept["hand"]
    card, stream = here.card, _stream(hand)
    page_size, whole = hand.client.geometry.page_size, prompt(number, tokens)
    events = [card.event() for _ in range(3)]
    begun = time.perf_counter()
    lease = hand.client.acquire(whole, limit=tokens - 1)
    answered = time.perf_counter()
    expected = 0 if source == COLD else (tokens - 1) // page_size * page_size
    if (lease.matched_tokens, lease.host_tokens) != (expected, expected if source == L2 else 0):
        raise BenchError(f"{source}: {lease} with {lease.host_tokens} tokens on the host, of {expected}")
    lease.wait_loaded(0, on_stream=True)
    card.record(events[0], stream)
    lease.wait_loaded(on_stream=True)
    card.record(events[1], stream)
    for at in range(lease.matched_tokens, tokens, CHUNK):
        stop = min(at + CHUNK, tokens)
        card.spin((stop - at) / rate, stream)
        hand.fill(lease.slots[at // page_size : -(-stop // page_size)], number, at // page_size)
    card.record(events[2], stream)
    first, last, token = (_when(here, event) for event in events)
    lease.wait_loaded()
    hand.check(lease.slots[: tokens // page_size], number, source)
    card.release((), events)
    lease.commit()
    lease.release(wait=True)
    times = {"answer": answered, "first_layer": first, "all_layers": last, "token": token}
    return {name: 1e3 * (at - begun) for name, at in times.items()}


def plain_load(here: Here, num_bytes: int, repeats: int) -> float:
    """ms of one cuMemcpyAsync to the device, from memory of cuMemHostAlloc. BenchError: there is no room."""
    card, times = here.card, []
    there = card.alloc(num_bytes)
    if there is None:
        raise BenchError(f"the card has no {num_bytes:,} bytes left for a plain memcpy")
    pinned = card.alloc_host(num_bytes)
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        card.copy_one(there, pinned, num_bytes, here.stream)
        card.synchronize(here.stream)
        times.append(1e3 * (time.perf_counter() - begun))
    card.free_host(pinned)
    card.free(there)
    return statistics.median(times[1:])


def lateness(here: Here, busy_s: float, repeats: int) -> dict[str, list[float]]:
    """Commits whose event is written by the stream behind a kernel of so many seconds: ms from the word being there, as
    this process sees it, to the commit's answer; and of a ping's round trip, in turn."""
    hand: Hand = here.kept["hand"]
    client, ring = hand.client, here.kept["ring"]
    words = np.ctypeslib.as_array((ctypes.c_uint64 * NUM_EVENTS).from_address(ring.address))
    fresh = here.kept.setdefault("fresh", itertools.count(LATE))
    late, pings = [], []
    for _ in range(repeats):
        lease = client.acquire(prompt(next(fresh), client.geometry.page_size))
        if busy_s:
            here.card.spin(busy_s, _stream(hand))
        event = client.record()
        pending = lease.commit_begin(event=event)
        deadline, seen, answered = time.perf_counter() + WAIT_S, 0.0, 0.0
        while not (seen and answered):
            if not seen and words[event.event] >= event.generation:
                seen = time.perf_counter()
            if not answered and pending in client.poll():
                answered = time.perf_counter()
            if time.perf_counter() > deadline:
                raise BenchError(f"a commit was not answered within {WAIT_S:g} s")
        pending.wait()
        lease.release(wait=True)
        late.append(1e3 * (answered - seen))
        begun = time.perf_counter()
        client.ping()
        pings.append(1e3 * (time.perf_counter() - begun))
    return {"late": late, "ping": pings}


def _stream(hand: Hand) -> int:
    assert isinstance(hand.reach, CardReach), "the daemon's pools are not on a card"
    return hand.reach.stream


def _when(here: Here, event: int) -> float:
    """When it was seen to be done."""
    deadline = time.perf_counter() + WAIT_S
    while not here.card.done(event):
        if time.perf_counter() > deadline:
            raise BenchError(f"a stream did not come to an event within {WAIT_S:g} s")
    return time.perf_counter()


# -- the feeder ----------------------------------------------------------------------------------------------------


def prepare_feed(here: Here, socket: str, feed: Feed) -> None:
    """Have the host hold the prompts that are loaded back, those that new ones have pushed out as well."""
    here.kept["socket"] = socket
    here.kept.setdefault("numbers", itertools.count(WRITTEN))
    with Hand(socket, here.card, name="bench cards") as hand:
        for number in range(feed.kept):
            whole = prompt(number, feed.tokens)
            if hand.client.peek(whole).matched_tokens < feed.tokens:
                with hand.client.acquire(whole, wait_s=WAIT_S) as lease:
                    hand.fill(lease.slots, number)
                    lease.commit()
        _quiet(hand.client, 0)


def run_feed(here: Here, ways: tuple[str, ...], feed: Feed, until: float) -> Row:
    """Copy those ways at once until the monotonic clock says so; what came of it."""
    numbers, streams = here.kept["numbers"], {here.device: here.stream}
    given: Row = {"written": 0, "loaded": 0, "not_on_the_host": 0}
    failed: list[Exception] = []

    def one(way: str) -> None:
        try:
            ring = EventRing(NUM_EVENTS)
            with Client(here.kept["socket"], name=f"bench cards, {way}", ring=ring, streams=streams.copy) as client:
                if way == BACKUP:
                    _write(client, ring, numbers, feed, until, given)
                else:
                    _load(client, ring, here.kept, feed, until, given)
                _quiet(client, 0)
        except Exception as exc:
            failed.append(exc)

    threads = [threading.Thread(target=one, args=(way,)) for way in ways]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return given


def check_feed(here: Here, feed: Feed) -> int:
    """Whether the prompts that were loaded back are what was written before; how many pages were looked at."""
    looked = 0
    with Hand(here.kept["socket"], here.card, name="bench cards") as hand:
        for number in sample(feed.kept, 4):
            with hand.client.acquire(prompt(number, feed.tokens), wait_s=WAIT_S) as lease:
                lease.wait_loaded()
                if lease.matched_tokens != feed.tokens:
                    raise BenchError(f"of a prompt that is loaded back {lease.matched_tokens} tokens are there")
                looked += hand.check(lease.slots, number, "loaded back beside a runner")
    return looked


def _write(client: Client, ring: EventRing, numbers: Any, feed: Feed, until: float, given: Row) -> None:
    """New prompts: each is copied to the host with its commit. What is in them is of no matter."""
    while time.monotonic() < until or not given["written"]:
        lease = client.acquire(prompt(next(numbers), feed.tokens), wait_s=WAIT_S)
        lease.commit_begin(event=_now(ring))
        lease.release(event=_now(ring))
        given["written"] += 1
        _quiet(client, COPIES)


def _load(client: Client, ring: EventRing, kept: dict[str, Any], feed: Feed, until: float, given: Row) -> None:
    """Prompts that only the host has, since others were used meanwhile."""
    loading: deque[Lease] = deque()

    def settle() -> None:
        lease = loading.popleft()
        lease.wait_loaded()
        lease.release(event=_now(ring))

    while time.monotonic() < until or not given["loaded"]:
        if not given["loaded"] and given["not_on_the_host"] > 2 * feed.kept:
            raise BenchError("no prompt was on the host alone")
        number = kept["turn"] = (kept.get("turn", 0) + 1) % feed.kept
        lease = client.acquire(prompt(number, feed.tokens), wait_s=WAIT_S)
        given["loaded" if lease.host_tokens == feed.tokens else "not_on_the_host"] += 1
        loading.append(lease)
        if len(loading) == LOADS:
            settle()
    while loading:
        settle()


def _now(ring: EventRing) -> Event:
    """Written by this CPU, not by a stream."""
    return Event(*ring.record())


def _quiet(client: Client, most: int) -> None:
    """Wait until no more copies than so many are in flight."""
    _until(lambda: client.status()["gauges"]["num_copies"] <= most)


def _until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        if time.monotonic() > deadline:
            raise BenchError(f"the daemon did not come to rest within {WAIT_S:.0f} s")
        time.sleep(PAUSE_S)
