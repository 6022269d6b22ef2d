"""The threads that move pages between host memory and a store. The daemon's loop calls `Engine`; nothing here waits.

Three lanes, each first in, first out: probes have a thread; fetches have some; and one thread stores, discards and
clears. So a fetch waits for no store, nor a probe for either; and since one thread makes all changes and tells of them,
completions say what a store holds in the order in which it came to be so: whoever applies each as it comes, `removed`
before `mask`, knows an exact store's content.

**One completion for each ticket**, through `done`: on the lane's thread, or, for what had not begun, within `cancel` or
`close`. It comes after the last byte has moved: a fetch writes into no slot, and a store reads none, once it is done.
A bad page that a fetch met is thrown away by the lane that stores; that completion has ticket NO_TICKET and kind
"discard", and is the only one that nobody asked for.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable
from queue import SimpleQueue
from typing import Literal, NamedTuple

from sglcache.core.effects import Run
from sglcache.errors import BadRequest, ClosedError, SglcacheError, StorageError
from sglcache.storage.page import Reason
from sglcache.storage.store import Got, Store

log = logging.getLogger(__name__)

Kind = Literal["probe", "fetch", "store", "clear", "discard"]
KINDS: tuple[Kind, ...] = ("probe", "fetch", "store", "clear", "discard")
NO_TICKET = -1
INTERRUPT_S = 0.75  # of a close's time, that a store has to come back when it is interrupted


class Done(NamedTuple):
    """What became of a ticket."""

    ticket: int
    kind: Kind
    num_pages: int = (
        0  # probe: leading pages there. fetch: leading pages that are right in their slots. store: new pages
    )
    mask: bytes = b""  # store: a byte a page; 1: it is there now
    removed: bytes = b""  # digests, joined, of what an exact store no longer holds, in order
    reason: Reason | None = None  # why it stopped before its end
    error: SglcacheError | None = None  # the caller's mistake, or ours; what a store lacks or can't do is a `reason`


class Counters:
    """What the engine has done since it was made: for each kind, and for misses by their reason. Numbers that rise."""

    def __init__(self) -> None:
        self.jobs: Counter[Kind] = Counter()
        self.pages: Counter[Kind] = Counter()  # probe: there. fetch: right. store: new. else: gone
        self.bytes: Counter[Kind] = Counter()
        self.seconds: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)  # at work, of all threads
        self.reasons: dict[Kind, Counter[Reason]] = {kind: Counter() for kind in KINDS}  # jobs that stopped for it
        self.missed: dict[Kind, Counter[Reason]] = {kind: Counter() for kind in KINDS}  # pages asked for, for it
        self.errors = 0


class _Job:
    __slots__ = ("began", "cancelled", "digest", "finished", "kind", "run", "slots", "ticket")

    def __init__(
        self, ticket: int, kind: Kind, run: Run | None = None, slots: bytes = b"", digest: bytes = b""
    ) -> None:
        self.ticket, self.kind, self.run, self.digest = ticket, kind, run, digest
        self.slots = array("i", slots)
        self.began = self.finished = self.cancelled = False

    def stopped(self) -> bool:
        return self.cancelled


class Engine:
    """The lanes of one open store, which it closes with itself.

    `done` must not raise or wait; from the storage threads it is for the loop's `call_soon_threadsafe`. Tickets are the
    caller's, each in use once at a time. A slot is an int32; those of a ticket are the engine's until its completion.
    """

    def __init__(
        self,
        store: Store,
        done: Callable[[Done], None],
        *,
        num_fetchers: int = 2,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._store = store
        self.counters = Counters()
        self._done = done
        self._clock = clock
        self._lock = threading.Lock()  # around the tables of jobs and the counters; never while a store works
        self._jobs: dict[int, _Job] = {}
        self._closed = False
        self._probes: SimpleQueue[_Job | None] = SimpleQueue()
        self._fetches: SimpleQueue[_Job | None] = SimpleQueue()
        self._stores: SimpleQueue[_Job | None] = SimpleQueue()
        lanes = [("probe", self._probes)] + [(f"fetch-{number}", self._fetches) for number in range(num_fetchers)]
        # Daemon threads: one that hangs in the disk's driver must not keep the process.
        self._readers = [
            threading.Thread(target=self._serve, args=(lane,), name=f"sglcache-{name}", daemon=True)
            for name, lane in lanes
        ]
        self._writer = threading.Thread(target=self._write, name="sglcache-store", daemon=True)
        for thread in (*self._readers, self._writer):
            thread.start()

    # -- what the loop calls ------------------------------------------------------------------------------

    def probe(self, ticket: int, run: Run) -> None:
        """How many leading pages of the run are there?"""
        self._submit(self._probes, _Job(ticket, "probe", run))

    def fetch(self, ticket: int, run: Run, slots: bytes) -> None:
        """Read the run's pages into these slots (packed int32, one a page), up to the first that is not right."""
        self._submit(self._fetches, _Job(ticket, "fetch", run, slots))

    def store(self, ticket: int, run: Run, slots: bytes) -> None:
        """Store the run's pages from these slots, up to the first that fails."""
        self._submit(self._stores, _Job(ticket, "store", run, slots))

    def clear(self, ticket: int) -> None:
        """Forget all pages of this identity, behind what is to be stored before it."""
        self._submit(self._stores, _Job(ticket, "clear"))

    def cancel(self, ticket: int) -> None:
        """Have it stop before its next page. Its completion comes as ever: at once, here, if it had not begun.

        What it did until then counts. A ticket that is done, or unknown, is nobody's.
        """
        with self._lock:
            job = self._jobs.get(ticket)
            if job is None:
                return
            job.cancelled = True
            waiting = not job.began and self._finish(job)
        if waiting:
            self._done(Done(ticket, job.kind, mask=_nothing(job), reason="cancelled"))

    def queued(self) -> dict[Kind, int]:
        """Tickets that are not done, by kind."""
        with self._lock:
            count = Counter(job.kind for job in self._jobs.values())
        return {kind: count[kind] for kind in KINDS}

    def close(self, deadline_s: float) -> bool:
        """Stop: what has not begun is done with ClosedError, what has stops at its next page. Then the store closes.

        False if that took longer: a thread hangs, whose ticket's completion comes when it goes on, if it does. It is
        left, and the process may end all the same. Harmless when repeated.
        """
        end = time.monotonic() + deadline_s
        with self._lock:
            first, self._closed = not self._closed, True
            left = [job for job in self._jobs.values() if not job.began]
            for job in self._jobs.values():
                job.cancelled = True
            left = [job for job in left if self._finish(job)]
        error = ClosedError("the storage part is closed")
        for job in left:
            self._done(Done(job.ticket, job.kind, mask=_nothing(job), reason="cancelled", error=error))
        if first:
            self._probes.put(None)
            for _ in self._readers[1:]:
                self._fetches.put(None)
            self._stores.put(None)
        self._writer.join(max(deadline_s / 2, deadline_s - INTERRUPT_S))
        if self._writer.is_alive():
            self._store.interrupt()
            self._writer.join(max(0.0, end - time.monotonic()))
        return not self._writer.is_alive()

    # -- the threads --------------------------------------------------------------------------------------

    def _submit(self, lane: SimpleQueue[_Job | None], job: _Job) -> None:
        with self._lock:
            if self._closed:
                raise ClosedError("the storage part is closed")
            if job.ticket in self._jobs or job.ticket < 0:
                raise BadRequest(f"ticket {job.ticket} is in use, or below 0", ticket=job.ticket)
            self._jobs[job.ticket] = job
        lane.put(job)

    def _finish(self, job: _Job) -> bool:
        """Under the lock: whether this is who completes it."""
        if job.finished:
            return False
        job.finished = True
        self._jobs.pop(job.ticket, None)
        return True

    def _serve(self, lane: SimpleQueue[_Job | None]) -> None:
        while (job := lane.get()) is not None:
            self._perform(job)

    def _write(self) -> None:
        self._serve(self._stores)
        for reader in self._readers:
            reader.join()
        try:
            self._store.close()
        except Exception:
            log.exception("the store %s did not close well", self._store.name)

    def _perform(self, job: _Job) -> None:
        with self._lock:
            if job.finished:
                return
            job.began = True
        started = self._clock()
        bad = b""
        try:
            done, bad = self._work(job)
        except SglcacheError as exc:
            done = Done(job.ticket, job.kind, mask=_nothing(job), reason="failed", error=exc)
        except Exception as exc:
            log.exception("the store %s failed at a %s", self._store.name, job.kind)
            error = StorageError(f"{job.kind} failed: {exc!r}", ticket=job.ticket)
            error.__cause__ = exc
            done = Done(job.ticket, job.kind, mask=_nothing(job), reason="failed", error=error)
        with self._lock:
            self._count(job, done, self._clock() - started)
            self._finish(job)
            discard = bool(bad) and not self._closed
        self._done(done)
        if discard:
            self._stores.put(_Job(NO_TICKET, "discard", digest=bad))

    def _work(self, job: _Job) -> tuple[Done, bytes]:
        """The store's answer as a completion, and a digest to be discarded."""
        ticket, kind, run, store = job.ticket, job.kind, job.run, self._store
        if kind == "clear":
            num_pages, gone, left, why = store.clear()
            error = None
            if left != 0:
                rest = f"{left} pages" if left is not None else "what it holds"
                error = StorageError(
                    f"the third tier: {num_pages} pages were removed, but {rest} could not be ({why}), and its next "
                    "start may find them again; mend that, and clear it again",
                    removed=num_pages,
                    left=left,
                )
            return Done(ticket, kind, num_pages, removed=gone, reason="failed" if error else None, error=error), b""
        if kind == "discard":
            gone = store.discard(job.digest)
            return Done(ticket, kind, len(gone) // store.form.digest_bytes, removed=gone), b""
        assert run is not None, kind
        if kind == "probe":
            return Done(ticket, kind, store.exists(run)), b""
        if len(job.slots) != (num_pages := store.form.num_pages(run)):
            raise BadRequest(f"{len(job.slots)} slots for {num_pages} pages", ticket=ticket)
        if kind == "fetch":
            got: Got = store.get(run, job.slots, job.stopped)
            return Done(ticket, kind, got.num_pages, reason=got.reason), got.bad
        put = store.put(run, job.slots, job.stopped)
        return Done(ticket, kind, put.new_pages, put.mask, put.removed, put.reason), b""

    def _count(self, job: _Job, done: Done, seconds: float) -> None:
        counters, kind = self.counters, job.kind
        counters.jobs[kind] += 1
        counters.pages[kind] += done.num_pages
        counters.seconds[kind] += seconds
        counters.errors += done.error is not None
        if kind in ("fetch", "store"):
            counters.bytes[kind] += done.num_pages * self._store.form.payload_bytes
        if done.reason is not None:
            counters.reasons[kind][done.reason] += 1
            right = done.mask.count(1) if kind == "store" else done.num_pages
            lost = max(len(job.slots) - right, 0)
            if kind == "fetch" and done.reason != "cancelled" and lost:
                counters.missed[kind][done.reason] += 1
                if lost > 1:  # these may be as good as ever
                    counters.missed[kind]["behind"] += lost - 1
            else:
                counters.missed[kind][done.reason] += lost


def _nothing(job: _Job) -> bytes:
    return bytes(len(job.slots)) if job.kind == "store" else b""
