"""(b) What is in order: by events of another process, and by words in shared memory that streams write and wait for.

Words are uint64 in a memfd, which each process maps and registers for itself. The asker has it mapped, too, and is the
third process, without CUDA.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

from sglcache.testing.card import THREADS, WORD
from sglcache.testing.probe.sizes import Sizes
from sglcache.testing.probe.stage import Actor, Here, Stage
from sglcache.testing.probe.tasks import (
    RING_BYTES,
    Shared,
    Tell,
    make_pool,
    map_pool,
    new_shared,
    poll,
    ready,
    share_words,
    stream_is_busy,
    word,
)

LARGEST: Final = 2**63 - 1  # what a ring says of an event that failed: no wait outlasts it
MINUS_ONE: Final = 2**64 - 1


@contextlib.contextmanager
def words(*actors: Actor, num_bytes: int = RING_BYTES) -> Iterator[Shared]:
    """Shared words, "ring" for each of these and the asker."""
    fd = new_shared(num_bytes)
    try:
        for actor in actors:
            actor.hand([fd], share_words, "ring")
        yield Shared(fd, num_bytes)
    finally:
        os.close(fd)


# -- events --------------------------------------------------------------------------------------------------------


def events(stage: Stage, tell: Tell, sizes: Sizes) -> None:
    """B's stream waits for an event of A's: before it was recorded, and after."""
    a, b = stage.actor("A"), stage.actor("B")
    a.ask(ready)
    b.ask(ready)
    b.ask(open_shared_event, a.ask(make_shared_event))
    b.ask(wait_for_event)
    b.begin(finish_stream)
    tell("b.unrecorded_is_no_op", b.has_answered(sizes.answer_s))
    b.result()
    enqueued = a.ask(spin_and_record, sizes.spin_s)
    b.ask(wait_for_event)
    done = b.ask(finish_stream)
    tell("b.event_waits", done - enqueued > 0.8 * sizes.spin_s)


def make_shared_event(here: Here) -> bytes:
    here.kept["event"] = here.card.shared_event()
    return here.card.event_handle(here.kept["event"])


def open_shared_event(here: Here, handle: bytes) -> None:
    here.kept["event"] = here.card.open_event(handle)


def wait_for_event(here: Here) -> None:
    here.card.wait_event(here.stream, here.kept["event"])


def spin_and_record(here: Here, seconds: float) -> float:
    began = time.monotonic()
    here.card.spin(seconds, here.stream)
    here.card.record(here.kept["event"], here.stream)
    return began


def finish_stream(here: Here) -> float:
    here.card.synchronize(here.stream)
    return time.monotonic()


# -- words ---------------------------------------------------------------------------------------------------------


def stream_words(stage: Stage, tell: Tell, sizes: Sizes) -> None:
    """A's stream writes a word and B's waits for it; and what a store of a processor does to a stream that waits."""
    a, b = stage.actor("A"), stage.actor("B")
    a.ask(ready)
    b.ask(ready)
    with words(a, b) as ring:
        began = a.ask(spin_and_write, sizes.spin_s, 0, 1)
        seen = stage.until(lambda: ring.words[0] == 1, sizes.spin_s + sizes.answer_s)
        tell("b.word_seen", seen and time.monotonic() - began > 0.8 * sizes.spin_s)

        def waits(index: int, value: int) -> Callable[[], bool]:
            """B's stream waits for that, and then writes the next word; whether it still waits."""
            b.ask(wait_and_write, index, value, index + 1)

            def still() -> bool:
                stage.sleep(sizes.still_s)
                return ring.words[index + 1] == 0 and b.ask(stream_is_busy)

            return still

        def released(index: int) -> bool:
            return stage.until(lambda: ring.words[index + 1] == 1, sizes.answer_s)

        still = waits(2, 5)
        waited = still()
        a.ask(spin_and_write, 0.0, 2, 4)
        less = still()
        a.ask(spin_and_write, 0.0, 2, 5)
        tell("b.word_waits", waited and less and released(2))

        still = waits(4, 1)
        waited = still()
        ring.words[4] = 1
        tell("b.store_releases", waited and released(4))

        still = waits(6, 1000)
        waited = still()
        ring.words[6] = LARGEST
        tell("b.largest_releases", waited and released(6))

        still = waits(8, 1000)
        ring.words[8] = MINUS_ONE
        tell("b.minus_one_waits", still())
        ring.words[8] = 1000
        released(8)


def spin_and_write(here: Here, seconds: float, index: int, value: int) -> float:
    began = time.monotonic()
    if seconds:
        here.card.spin(seconds, here.stream)
    here.card.write_value(here.stream, word(here, "ring", index), value)
    return began


def wait_and_write(here: Here, index: int, value: int, then: int) -> None:
    here.card.wait_value(here.stream, word(here, "ring", index), value)
    here.card.write_value(here.stream, word(here, "ring", then), 1)


# -- latency -------------------------------------------------------------------------------------------------------


def latencies(stage: Stage, tell: Tell, sizes: Sizes) -> None:
    """From enqueuing a write to the word seen by processors, and from a processor's store to a stream's next write."""
    a, b = stage.actor("A"), stage.actor("B")
    a.ask(ready)
    b.ask(ready)
    with words(a, b):
        b.begin(pong, sizes.pings)
        enqueued, own = a.ask(ping, sizes.pings)
        seen = b.result()
        tell("b.write_to_own_us", spread([end - start for start, end in zip(enqueued, own, strict=True)]))
        tell("b.write_to_other_us", spread([end - start for start, end in zip(enqueued, seen, strict=True)]))
        tell("b.store_to_stream_us", spread(b.ask(store_and_see, sizes.pings)))
        tell("b.write_call_us", round(a.ask(cost_of_writes, sizes.pings), 2))


def spread(seconds: list[float]) -> dict[str, float]:
    """µs."""
    cuts = statistics.quantiles(seconds, n=100)
    return {"p50": round(cuts[49] * 1e6, 1), "p99": round(cuts[98] * 1e6, 1)}


def ping(here: Here, rounds: int) -> tuple[list[float], list[float]]:
    ring, enqueued, own = here.kept["ring"].words, [], []
    there = word(here, "ring", 0)
    for number in range(1, rounds + 1):
        enqueued.append(time.monotonic())
        here.card.write_value(here.stream, there, number)
        poll(ring, 0, number)
        own.append(time.monotonic())
        poll(ring, 1, number)
    return enqueued, own


def pong(here: Here, rounds: int) -> list[float]:
    ring, seen = here.kept["ring"].words, []
    for number in range(1, rounds + 1):
        poll(ring, 0, number)
        seen.append(time.monotonic())
        ring[1] = number
    return seen


def store_and_see(here: Here, rounds: int) -> list[float]:
    ring, took = here.kept["ring"].words, []
    waited, written = word(here, "ring", 2), word(here, "ring", 3)
    for number in range(1, rounds + 1):
        here.card.wait_value(here.stream, waited, number)
        here.card.write_value(here.stream, written, number)
        time.sleep(0.00005)  # so that the card has come to the wait
        began = time.monotonic()
        ring[2] = number
        poll(ring, 3, number)
        took.append(time.monotonic() - began)
    return took


def cost_of_writes(here: Here, rounds: int) -> float:
    """µs of the call alone."""
    there = word(here, "ring", 4)
    began = time.monotonic()
    for number in range(1, rounds + 1):
        here.card.write_value(here.stream, there, number)
    took = time.monotonic() - began
    here.card.synchronize(here.stream)
    return took / rounds * 1e6


# -- bytes behind a word -------------------------------------------------------------------------------------------

WRITTEN, ARMED, CHECKED, LOADED, READ = range(5)  # the words of the stress: a round's number each


def stale_pages(stage: Stage, tell: Tell, sizes: Sizes) -> None:
    """The daemon's pool, a runner that writes and reads it, and words alone between them: how many words are old?

    Stored: a kernel of the runner writes a page and its stream a word; the daemon sees the word and enqueues a copy.
    Waited: as stored, but the daemon's stream was already waiting for the word, with the copy behind it.
    Loaded: a copy of the daemon fills a page, and when its event is done the daemon stores a word, for which a stream
    of the runner was already waiting, with a kernel that reads the page behind it.
    """
    daemon, runner = stage.actor("daemon"), stage.actor("runner")
    daemon.ask(ready)
    runner.ask(ready)
    daemon.ask(make_pool, "pool", sizes.pages * sizes.page)
    with daemon.given() as fds:
        runner.hand(fds, map_pool, "pool", sizes.pages * sizes.page)
    host = new_shared(sizes.page)
    daemon.hand([host], pin_page, sizes.page)
    os.close(host)
    for kind in ("stored", "waited"):
        with words(daemon, runner):
            daemon.begin(copy_what_was_written, sizes, kind == "waited")
            runner.ask(write_pages, sizes)
            tell(f"b.stale_{kind}", daemon.result())
    with words(daemon, runner):
        daemon.begin(load_pages, sizes)
        tell("b.stale_loaded", runner.ask(read_what_was_loaded, sizes))
        daemon.result()
    tell("b.rounds", sizes.rounds)


def pin_page(here: Here, num_bytes: int) -> None:
    shared = Shared(here.got[0], num_bytes)
    here.card.register(shared.address, num_bytes)
    here.kept["host"] = shared


def page_of(here: Here, sizes: Sizes, number: int) -> int:
    return int(here.kept["pool"].address) + number % sizes.pages * sizes.page


def write_pages(here: Here, sizes: Sizes) -> None:
    ring = here.kept["ring"].words
    for number in range(1, sizes.rounds + 1):
        poll(ring, ARMED, number)
        # Every other time by one warp, which is long at it: a word that came too early would be seen meanwhile.
        shape = {"blocks": 1, "threads": 32} if number % 2 else {"blocks": 64, "threads": THREADS}
        arguments = (page_of(here, sizes, number), number, sizes.page // WORD)
        here.card.launch("sgl_fill", *arguments, stream=here.stream, **shape)
        here.card.write_value(here.stream, word(here, "ring", WRITTEN), number)
        poll(ring, CHECKED, number)


def copy_what_was_written(here: Here, sizes: Sizes, in_stream: bool) -> int:
    ring, host, stale = here.kept["ring"].words, here.kept["host"], 0
    event = here.card.event()
    for number in range(1, sizes.rounds + 1):
        if in_stream:
            here.card.wait_value(here.stream, word(here, "ring", WRITTEN), number)
        else:
            ring[ARMED] = number
            poll(ring, WRITTEN, number)
        copy_page(here, host.address, page_of(here, sizes, number), sizes.page)
        here.card.record(event, here.stream)
        ring[ARMED] = number
        while not here.card.done(event):
            os.sched_yield()
        stale += int(np.count_nonzero(host.array != number))
        ring[CHECKED] = number
    return stale


def load_pages(here: Here, sizes: Sizes) -> None:
    ring, host = here.kept["ring"].words, here.kept["host"]
    event = here.card.event()
    for number in range(1, sizes.rounds + 1):
        host.array[:] = number
        poll(ring, ARMED, number)
        copy_page(here, page_of(here, sizes, number), host.address, sizes.page)
        here.card.record(event, here.stream)
        while not here.card.done(event):
            os.sched_yield()
        ring[LOADED] = number
        poll(ring, CHECKED, number)


def read_what_was_loaded(here: Here, sizes: Sizes) -> int:
    ring, num_words, stale = here.kept["ring"].words, sizes.page // WORD, 0
    into = here.card.alloc(sizes.page)
    if into is None:
        raise MemoryError("no room for a page")
    for number in range(1, sizes.rounds + 1):
        here.card.wait_value(here.stream, word(here, "ring", LOADED), number)
        here.card.copy_words(into, page_of(here, sizes, number), num_words, here.stream)
        here.card.write_value(here.stream, word(here, "ring", READ), number)
        ring[ARMED] = number
        poll(ring, READ, number)
        stale += int(np.count_nonzero(here.card.read(into, num_words) != number))
        ring[CHECKED] = number
    return stale


def copy_page(here: Here, dst: int, src: int, num_bytes: int) -> None:
    """As the copy engine does."""
    dsts, srcs, size = (np.array([each], np.uint64) for each in (dst, src, num_bytes))
    here.card.copy(dsts, srcs, size, here.stream)


# -- what a stream that waits holds up -----------------------------------------------------------------------------


def beside_a_wait(stage: Stage, tell: Tell, sizes: Sizes) -> None:
    """One stream waits for a word. How many others of its process stand still, and which calls do not come back?"""
    for key, env in (("b.streams_held", {}), ("b.streams_held_32", {"CUDA_DEVICE_MAX_CONNECTIONS": "32"})):
        b = stage.actor("B", env)
        b.ask(ready)
        with words(b) as ring:
            b.begin(wait_beside_others, sizes.streams)
            stage.until(all_ran(ring, sizes.streams), sizes.answer_s)
            tell(key, sum(ring.words[number] == 0 for number in range(1, 1 + sizes.streams)))
            ring.words[0] = 1
            b.result()
            freed = stage.until(all_ran(ring, sizes.streams), sizes.answer_s)
            assert freed, "streams stand still though nothing is waited for any more"
        b.kill()
    c = stage.actor("C", {"CUDA_MODULE_LOADING": "LAZY"})  # as it is by default, and in torch
    c.ask(ready)
    held = list[str]()
    tell("b.calls_held", held)  # and what comes into it
    with words(c) as ring:
        for number, (name, call) in enumerate(CALLS.items(), 1):
            c.ask(wait_for_word, 0, number)
            c.begin(call, sizes)
            if not c.has_answered(sizes.answer_s):
                held.append(name)
            ring.words[0] = number
            c.result()
            with c.given():
                c.ask(finish_stream)


def all_ran(ring: Shared, streams: int) -> Callable[[], bool]:
    return lambda: all(ring.words[number] for number in range(1, 1 + streams))


def wait_for_word(here: Here, index: int, value: int) -> None:
    here.card.wait_value(here.stream, word(here, "ring", index), value)


def wait_beside_others(here: Here, count: int) -> None:
    """Word 0 is waited for; word i is written by the i-th of the other streams, after a kernel."""
    card = here.card
    others = [card.stream() for _ in range(count)]
    scratch = card.alloc(WORD)
    assert scratch is not None
    card.wait_value(here.stream, word(here, "ring", 0), 1)
    for number, stream in enumerate(others, 1):
        card.fill(scratch, number, 1, stream)
        card.write_value(stream, word(here, "ring", number), 1)


def call_alloc(here: Here, sizes: Sizes) -> None:
    here.kept["plain"] = here.card.alloc(sizes.page)


def call_free(here: Here, sizes: Sizes) -> None:
    here.card.free(here.kept["plain"])


def call_pool(here: Here, sizes: Sizes) -> None:
    make_pool(here, "pool", sizes.page)


def call_register(here: Here, sizes: Sizes) -> None:
    here.got.append(new_shared(sizes.page))
    pin_page(here, sizes.page)


def call_unregister(here: Here, sizes: Sizes) -> None:
    here.card.unpin(here.kept["host"].address)


def call_stream(here: Here, sizes: Sizes) -> None:
    here.kept["other"] = here.card.stream()


def call_copy(here: Here, sizes: Sizes) -> None:
    """On another stream, to its end."""
    pool = here.kept["pool"]
    words = here.card.read(pool.address, 1)
    here.card.write(pool.address, words)


def call_event(here: Here, sizes: Sizes) -> None:
    event = here.card.event()
    here.card.record(event, here.kept["other"])
    while not here.card.done(event):
        os.sched_yield()
    here.card.release([], [event])


def call_load(here: Here, sizes: Sizes) -> None:
    here.card.load()


def call_launch(here: Here, sizes: Sizes) -> None:
    """Of a kernel that has not run before, which is loaded with that."""
    here.card.launch("sgl_burn", here.kept["pool"].address, 1, stream=here.kept["other"])
    here.card.synchronize(here.kept["other"])


CALLS: Final[dict[str, Callable[[Here, Sizes], Any]]] = {
    "cuMemAlloc": call_alloc,
    "cuMemFree": call_free,
    "cuMemCreate, cuMemMap": call_pool,
    "cuMemHostRegister": call_register,
    "cuMemHostUnregister": call_unregister,
    "cuStreamCreate": call_stream,
    "a copy on another stream": call_copy,
    "an event on another stream": call_event,
    "a kernel's first launch": call_launch,
    "cuModuleLoadData": call_load,
}
