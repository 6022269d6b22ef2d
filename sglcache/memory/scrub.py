"""The host tier's memory, looked through again and again: a page whose bytes have changed by themselves is found.

A thread goes round the slots of every resource at so many bytes a second, takes the sum of each page's bytes, in all
parts' pools and whatever the layout, and compares it with the sum of the last time. Sums lie in the journal, so they
outlive a rank: a life checks what it took over against what the lives before saw.

What a slot holds may change at any moment, and nobody is asked: the journal's sequence of the slot is looked at before
and after, and if it is not the same the sum is of nothing. Sequences are given once (`journal`), a page's comes after
its bytes are there and goes before another's are written; so a sum that differs under the same sequence is of memory
that nobody was to write. What went bad before a page was looked at the first time is not seen.

The thread leaves the interpreter to others: it hashes a piece at a time, rests after each step, and takes no more than
a tenth of a processor, however small the pages and whatever the rate.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import xxhash

from sglcache.memory.geometry import moves
from sglcache.memory.journal import Journal
from sglcache.memory.pools import ResourcePools

logger = logging.getLogger("sglcache.scrub")

STEP_S = 0.02  # the bytes of so long are looked at in one go
STEP_WORK_S = 0.002  # or as many as can be in so long: of small pages fewer
PIECE_BYTES = 1 << 20  # hashed at once: a tenth of a millisecond or so, in which nobody else may have the interpreter
BLOCK_SLOTS = 1 << 16  # looked through at once for those that hold something
LEAST_ROUND_S = 1.0  # a host tier that holds little is not looked at all the time
CATCH_UP_S = 0.1  # what rests that took too long may be made up for
REST = 9.0  # times as long as the work took


class ScrubStats(NamedTuple):
    """Of one life."""

    pages: int  # looked at; one that went meanwhile, or was new, too
    bytes: int
    compared_pages: int  # of them, those whose sum was known
    rounds: int
    round_age_s: float | None  # since the last whole round ended; None: none has
    seconds: float  # of a processor


class Scrubber:
    """Looks through the host pools of `resources` on a thread of its own, from `start` on.

    `bad(resource, slot, seq)` is called there, once for each page whose bytes have changed; `failed(error)` if the
    thread itself ends. Neither may raise.
    """

    def __init__(
        self,
        resources: Sequence[ResourcePools],
        journal: Journal,
        rate: int,
        bad: Callable[[int, int, int], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """`rate`: bytes a second, at least 1. `journal`: of these pools, with what an earlier life left taken."""
        self._parts = [[_Part(pool) for pool in each.host.shards] for each in resources]
        self._slots = [each.form.host_pages for each in resources]
        self._page_bytes = [sum(part.num_bytes for part in parts) for parts in self._parts]
        self._journal = journal
        self._rate = rate
        self._bad = bad
        self._failed = failed
        self._ending = threading.Event()
        self._told: dict[tuple[int, int], int] = {}  # by resource and slot, the sequence under which it was bad
        self._budget = 0.0  # bytes of this step
        self._num_pages = self._num_bytes = self._num_compared = self._num_rounds = 0
        self._round_at: float | None = None
        self._cpu_s = 0.0
        self._due = 0.0  # when the bytes so far are to have taken their time
        self._worked = 0.0  # of the thread's time, when the last rest began
        self._thread = threading.Thread(target=self._run, name="sglcache-scrubber", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop after the piece that is under way, and let go of the pools. Harmless when repeated."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()
        self._parts = []

    def stats(self) -> ScrubStats:
        """From any thread."""
        ended = self._round_at
        age_s = None if ended is None else time.monotonic() - ended
        return ScrubStats(
            self._num_pages, self._num_bytes, self._num_compared, self._num_rounds, age_s, round(self._cpu_s, 6)
        )

    def _run(self) -> None:
        try:
            self._worked = time.thread_time()
            while not self._ending.is_set():
                began = time.monotonic()
                self._round()
                if self._ending.is_set():
                    return
                self._num_rounds += 1
                self._round_at = time.monotonic()
                self._rest()
                self._ending.wait(LEAST_ROUND_S - (time.monotonic() - began))
        except BaseException as exc:
            self._failed(exc)

    def _round(self) -> None:
        """Every slot of every resource that holds something, once."""
        journal = self._journal
        self._budget = self._rate * STEP_S
        for resource, num_slots in enumerate(self._slots):
            if not self._page_bytes[resource]:
                continue  # pages that are names alone
            for first in range(0, num_slots, BLOCK_SLOTS):
                for slot in journal.used(resource, first, min(first + BLOCK_SLOTS, num_slots)):
                    self._look(resource, slot)
                    if self._budget <= 0 or time.thread_time() - self._worked > STEP_WORK_S:
                        self._rest()
                    if self._ending.is_set():
                        return

    def _rest(self) -> None:
        """As long as the bytes since the last rest are to take, and long enough for everybody else."""
        now = time.thread_time()
        took, self._worked = now - self._worked, now
        self._cpu_s += took
        spent = self._rate * STEP_S - self._budget
        self._budget = self._rate * STEP_S
        clock = time.monotonic()
        self._due = max(self._due, clock - CATCH_UP_S) + spent / self._rate
        self._ending.wait(max(0.0, self._due - clock, REST * took))

    def _look(self, resource: int, slot: int) -> None:
        journal = self._journal
        seq = journal.seq_of(resource, slot)
        if not seq:
            return  # it went since
        value = self._sum(resource, slot)
        num_bytes = self._page_bytes[resource]
        self._budget -= num_bytes
        self._num_pages += 1
        self._num_bytes += num_bytes
        known = journal.sum_of(resource, slot, seq)
        if value is None or journal.seq_of(resource, slot) != seq:
            return
        if known is None:
            journal.put_sum(resource, slot, seq, value)
            return
        self._num_compared += 1
        if known != value and self._told.get((resource, slot)) != seq:
            self._told[resource, slot] = seq
            self._bad(resource, slot, seq)

    def _sum(self, resource: int, slot: int) -> int | None:
        """Of its page's bytes, part by part, in the order in which they lie there; None: we are to end."""
        state = xxhash.xxh3_64()
        ending = self._ending
        for part in self._parts[resource]:
            for offset, stride, num_bytes in part.regions:
                start = offset + slot * stride
                stop = start + num_bytes
                for at in range(start, stop, PIECE_BYTES):
                    if ending.is_set():
                        return None
                    state.update(part.buffer[at : min(at + PIECE_BYTES, stop)])
        return state.intdigest()


class _Part:
    """One pool, as its pages' bytes lie in it."""

    def __init__(self, pool: Any) -> None:
        regions = [region for region, _ in moves(pool.placement, pool.placement)]
        self.buffer: memoryview = pool.buffer.data
        self.regions = [(each.offset, each.page_stride, each.num_bytes) for each in regions]
        self.num_bytes = sum(each.num_bytes for each in regions)
