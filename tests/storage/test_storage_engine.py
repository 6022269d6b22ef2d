"""The threads: one completion a ticket, none of it early, and a store that hangs or fails is nobody else's trouble."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from shelf import PAGE, bytes_of, file_store, fill, held, identity, memory, pages_of, run, write

from sglcache.core.effects import Run
from sglcache.errors import BadRequest, ClosedError, StorageError
from sglcache.storage.engine import NO_TICKET, Done, Engine
from sglcache.storage.page import Form
from sglcache.storage.store import Cleared, Got, Put, Stats, Stop

WAIT_S = 20.0


class Held:
    """A store that does nothing until it is let, page by page."""

    name, exact = "held", True

    def __init__(self) -> None:
        self.form = Form(identity())
        self.entered: Queue[str] = Queue()
        self.gate = threading.Semaphore(0)
        self.error: Exception | None = None
        self.closed = threading.Event()
        self.interrupted = threading.Event()
        self.touched = 0

    def pass_(self, what: str) -> None:
        self.entered.put(what)
        assert self.gate.acquire(timeout=WAIT_S)
        if self.error is not None:
            raise self.error

    def open(self) -> None:
        pass

    def exists(self, run: Run) -> int:
        self.pass_("exists")
        return 1

    def put(self, run: Run, slots: Sequence[int], stop: Stop) -> Put:
        for page in range(len(slots)):
            if stop():
                return Put(b"\1" * page + bytes(len(slots) - page), page, b"", "cancelled")
            self.pass_(f"put {page}")
            self.touched += 1
        return Put(b"\1" * len(slots), len(slots))

    def get(self, run: Run, slots: Sequence[int], stop: Stop) -> Got:
        for page in range(len(slots)):
            if stop():
                return Got(page, "cancelled")
            self.pass_(f"get {page}")
            self.touched += 1
        return Got(len(slots))

    def discard(self, digest: bytes) -> bytes:
        return digest

    def listing(self) -> Iterator[list[Run]]:
        yield from ()

    def clear(self) -> Cleared:
        self.pass_("clear")
        return Cleared()

    def stats(self) -> Stats:
        return Stats()

    def interrupt(self) -> None:
        self.interrupted.set()

    def close(self) -> None:
        self.closed.set()


class Desk:
    """Where completions come in."""

    def __init__(self, store: Any, **options: Any) -> None:
        self.done: Queue[Done] = Queue()
        self.engine = Engine(store, self.done.put, **options)

    def next(self) -> Done:
        return self.done.get(timeout=WAIT_S)


@pytest.fixture
def store() -> Iterator[Held]:
    made = Held()
    yield made
    for _ in range(1000):
        made.gate.release()


def slots(num_pages: int) -> bytes:
    return b"".join(slot.to_bytes(4, "little") for slot in range(num_pages))


FOUR = run(range(4 * PAGE))


def test_what_is_stored_is_probed_and_fetched_with_its_bytes(tmp_path: Path) -> None:
    pages = memory()
    desk = Desk(file_store(tmp_path, pages))
    it = run(range(8 * PAGE))
    write(pages, it)
    desk.engine.store(1, it, slots(8))
    assert desk.next() == Done(1, "store", 8, b"\1" * 8)
    desk.engine.probe(2, it)
    assert desk.next() == Done(2, "probe", 8)
    for slot in range(8):
        fill(pages, slot, bytes(pages.payload_bytes))
    desk.engine.fetch(3, it, slots(8))
    assert desk.next() == Done(3, "fetch", 8)
    assert [held(pages, slot) for slot in range(8)] == [bytes_of(digest) for digest in pages_of(it)]
    desk.engine.clear(4)
    done = desk.next()
    assert (done.num_pages, sorted(pages_of(Run(it.namespace, None, done.removed, b"")))) == (8, sorted(pages_of(it)))
    counters = desk.engine.counters
    assert dict(counters.pages) == {"store": 8, "probe": 8, "fetch": 8, "clear": 8}
    assert counters.bytes["fetch"] == counters.bytes["store"] == 8 * pages.payload_bytes
    assert all(counters.seconds[kind] > 0 for kind in ("store", "probe", "fetch", "clear"))
    assert desk.engine.close(WAIT_S)
    file_store(tmp_path, pages).close()  # the folder is free again


def test_a_bad_page_is_missed_and_then_told_of_as_removed_by_itself(tmp_path: Path) -> None:
    pages = memory()
    made = file_store(tmp_path, pages)
    desk = Desk(made)
    write(pages, FOUR)
    desk.engine.store(1, FOUR, slots(4))
    desk.next()
    bad = pages_of(FOUR)[2]
    Path(made._file(bad)).write_bytes(b"")
    desk.engine.fetch(2, FOUR, slots(4))
    assert [desk.next(), desk.next()] == [
        Done(2, "fetch", 2, reason="short"),
        Done(NO_TICKET, "discard", 1, removed=bad),
    ]
    assert desk.engine.counters.missed["fetch"] == {"short": 1, "behind": 1}
    desk.engine.fetch(3, FOUR, slots(4))
    assert desk.next() == Done(3, "fetch", 2, reason="missing")
    desk.engine.close(WAIT_S)


def test_a_fetch_and_a_probe_wait_for_no_store(store: Held) -> None:
    desk = Desk(store)
    desk.engine.store(1, FOUR, slots(4))
    assert store.entered.get(timeout=WAIT_S) == "put 0"
    desk.engine.fetch(2, FOUR, slots(4))
    assert store.entered.get(timeout=WAIT_S) == "get 0"
    desk.engine.probe(3, FOUR)
    assert store.entered.get(timeout=WAIT_S) == "exists"
    assert desk.engine.queued() == {"probe": 1, "fetch": 1, "store": 1, "clear": 0, "discard": 0}


def test_each_lane_is_first_in_first_out(store: Held) -> None:
    desk = Desk(store, num_fetchers=1)
    for ticket in range(5):
        desk.engine.fetch(ticket, run(range(PAGE)), slots(1))
        desk.engine.store(10 + ticket, run(range(PAGE)), slots(1))
    for _ in range(10):
        store.gate.release()
    done = [desk.next() for _ in range(10)]
    assert [each.ticket for each in done if each.kind == "fetch"] == [0, 1, 2, 3, 4]
    assert [each.ticket for each in done if each.kind == "store"] == [10, 11, 12, 13, 14]


@pytest.mark.parametrize("kind", ["fetch", "store"])
def test_a_cancel_stops_before_the_next_page_and_completes_after_the_last_byte(store: Held, kind: str) -> None:
    desk = Desk(store)
    getattr(desk.engine, kind)(1, FOUR, slots(4))
    store.entered.get(timeout=WAIT_S)
    store.gate.release()
    store.entered.get(timeout=WAIT_S)
    desk.engine.cancel(1)
    desk.engine.cancel(1)
    assert desk.done.empty()  # a page is on its way
    store.gate.release()
    done = desk.next()
    assert (done.ticket, done.reason, store.touched) == (1, "cancelled", 2)
    assert done.num_pages == 2
    assert done.mask == (b"\1\1\0\0" if kind == "store" else b"")
    desk.engine.cancel(1)
    desk.engine.cancel(77)
    assert desk.done.empty()


def test_a_cancel_of_what_has_not_begun_completes_at_once_although_the_store_hangs(store: Held) -> None:
    desk = Desk(store, num_fetchers=1)
    desk.engine.fetch(1, FOUR, slots(4))
    store.entered.get(timeout=WAIT_S)
    desk.engine.fetch(2, FOUR, slots(4))
    desk.engine.cancel(2)
    assert desk.next() == Done(2, "fetch", 0, reason="cancelled")
    desk.engine.fetch(2, FOUR, slots(4))  # the ticket is free again
    for _ in range(8):
        store.gate.release()
    assert [desk.next(), desk.next()] == [Done(1, "fetch", 4), Done(2, "fetch", 4)]
    assert desk.done.empty()


@pytest.mark.parametrize("error", [RuntimeError("broken"), StorageError("broken")])
def test_a_store_that_raises_is_an_error_of_that_ticket_alone(store: Held, error: Exception) -> None:
    desk = Desk(store)
    store.error = error
    desk.engine.store(1, FOUR, slots(4))
    desk.engine.fetch(2, FOUR, slots(4))
    desk.engine.probe(3, FOUR)
    desk.engine.clear(4)
    for _ in range(4):
        store.gate.release()
    done = {each.ticket: each for each in (desk.next() for _ in range(4))}
    assert all(isinstance(each.error, StorageError) and each.reason == "failed" for each in done.values())
    assert done[1].mask == bytes(4)
    assert desk.engine.counters.errors == 4
    assert desk.engine.counters.missed["fetch"] == {"failed": 1, "behind": 3}
    store.error = None
    desk.engine.probe(3, FOUR)
    store.gate.release()
    assert desk.next() == Done(3, "probe", 1)


def test_a_ticket_that_is_in_use_and_slots_that_do_not_fit_are_refused(store: Held) -> None:
    desk = Desk(store)
    desk.engine.store(1, FOUR, slots(4))
    for wrong in (1, -1):
        with pytest.raises(BadRequest):
            desk.engine.probe(wrong, FOUR)
    desk.engine.fetch(2, FOUR, slots(3))
    assert isinstance(desk.next().error, BadRequest)


def test_close_completes_everything_once_and_closes_the_store_last(store: Held) -> None:
    desk = Desk(store, num_fetchers=1)
    for ticket in range(3):
        desk.engine.fetch(ticket, FOUR, slots(4))
        desk.engine.store(10 + ticket, FOUR, slots(4))
    store.entered.get(timeout=WAIT_S)
    store.entered.get(timeout=WAIT_S)
    assert not desk.engine.close(0.01)  # two pages are on their way
    assert store.interrupted.is_set()
    assert not store.closed.is_set()
    early = [desk.next() for _ in range(4)]
    assert all(isinstance(each.error, ClosedError) and each.num_pages == 0 for each in early)
    for call in (lambda: desk.engine.probe(5, FOUR), lambda: desk.engine.clear(6)):
        with pytest.raises(ClosedError):
            call()
    assert desk.done.empty()
    store.gate.release()
    store.gate.release()
    assert desk.engine.close(WAIT_S)
    late = [desk.next(), desk.next()]
    assert [each.reason for each in late] == ["cancelled", "cancelled"]
    assert sorted(each.ticket for each in early + late) == [0, 1, 2, 10, 11, 12]
    assert store.closed.is_set()
    assert desk.engine.close(0)


@pytest.mark.parametrize("seed", range(4))
def test_completions_in_their_order_tell_what_an_exact_store_holds(tmp_path: Path, seed: int) -> None:
    """Stores that evict, fetches that meet bad pages, cancels: whoever applies each completion as it comes is right."""
    rng = random.Random(seed)
    pages = memory()
    made = file_store(tmp_path, pages, max_bytes=24 * 4096, low_water=0.7)
    desk = Desk(made)
    runs: dict[int, Run] = {}
    open_: set[int] = set()
    truth: set[bytes] = set()
    # A slot a page, and the same whoever asks: fetches and stores of one page move the same bytes.
    slot: dict[bytes, int] = {}

    def apply(done: Done) -> None:
        removed = pages_of(Run(FOUR.namespace, None, done.removed, b""))
        assert len(set(removed)) == len(removed)
        assert truth >= set(removed), "a page was removed that was not there"
        truth.difference_update(removed)
        if done.kind == "store":
            truth.update(digest for digest, there in zip(pages_of(runs[done.ticket]), done.mask, strict=True) if there)
        if done.ticket != NO_TICKET:
            open_.remove(done.ticket)

    for ticket in range(300):
        it = run([token for page in range(rng.randint(1, 5)) for token in [rng.randint(0, 1)] * PAGE])
        runs[ticket] = it
        for digest in pages_of(it):
            if digest not in slot:
                slot[digest] = len(slot)
                fill(pages, slot[digest], bytes_of(digest))
        packed = b"".join(slot[digest].to_bytes(4, "little") for digest in pages_of(it))
        open_.add(ticket)
        rng.choice([desk.engine.store, desk.engine.store, desk.engine.fetch])(ticket, it, packed)
        if rng.random() < 0.1:
            desk.engine.cancel(rng.choice(sorted(open_)))
        if rng.random() < 0.1 and truth:
            path = Path(made._file(rng.choice(sorted(truth))))
            if path.exists():
                path.write_bytes(b"bad")
                for digest in list(slot):  # a fetch of what was half written put anything there
                    fill(pages, slot[digest], bytes_of(digest))
        while len(open_) > 8:
            apply(desk.next())
    while open_:
        apply(desk.next())
    stop: Callable[[], bool] = lambda: desk.engine.close(WAIT_S)  # noqa: E731
    assert stop()
    while not desk.done.empty():
        apply(desk.next())
    assert {digest for digest in slot if digest in made._order} == truth
