"""The copy engine of a CPU: threads, and numpy, which lets go of the interpreter's lock while bytes move.

Each direction has threads of its own. A copy is cut into pieces, and each thread takes the next one, of whichever copy:
so one large copy has all threads of its direction, and many small ones share them.

**Bytes move once where that can be had.** Python runs once per run of pages, not per page, so how the pages of a copy
lie decides what is cheapest (`plan`):

    runs      both sides go up by one for a while: one strided copy a run. Pages that are large are runs by themselves
    scatter   the source lies in long runs, the target anywhere: numpy's `dst[slots] = run`
    staged    neither: gathered into a small buffer, and scattered from there. The bytes move twice

The order of the pages within a copy is nobody's business, so they are sorted first. Single pages of 64 KiB and more,
anywhere on both sides, are runs of one: measured with the interpreter idle and with the loop's thread busy in it, that
is one and a half times to twice as fast as staging them, and takes no more from the loop.

**Past the caches.** glibc's memcpy writes past them only for sizes near theirs; below, each line of the target is read
before it is written, and of pages that this process never looks at that is traffic for nothing. A process that copies
pages is therefore started with another limit (`server/allocator.py`); measured, pieces of 64 KiB to 2 MiB are then
copied one and a half times as fast, which is as fast as a plain memcpy of all of it.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue
from typing import NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from sglcache.memory.engine import CopyEngine, Done, Flight, Lane, Loaded, Memory, Slots, Way
from sglcache.memory.geometry import Region
from sglcache.memory.pools import Rows

STAGING_BYTES = 1 << 20  # fits in a core's own cache
PIECE_BYTES = 32 << 20  # what a thread takes at once, at most: so long a close waits
SPLIT_BYTES = 1 << 20  # below twice that a step is not cut for more threads
CALL_BYTES = 32 << 10  # what moves in the time of one call from Python


class Buffer(Memory, Protocol):
    """A pool that this process has mapped."""

    def rows(self, region: Region) -> Rows: ...


class Plan(NamedTuple):
    """How to copy the pages src[i] to dst[i]: (first, stop) of each run, of both sides or, scattered, of the source."""

    src: Slots
    dst: Slots
    runs: list[tuple[int, int]]
    scatter: bool
    staged: bool

    @property
    def num_pages(self) -> int:
        return len(self.src)


def plan(src: Slots, dst: Slots, page_bytes: int) -> Plan:
    """The cheapest way, for regions of so many bytes. Equally many slots, in any order."""
    order = np.argsort(src, kind="stable")
    src, dst = src[order], dst[order]
    num_bytes = len(src) * page_bytes
    together = (np.diff(src) == 1) & (np.diff(dst) == 1)
    both, source = _runs(together), _runs(np.diff(src) == 1)
    costs = (
        len(both) * CALL_BYTES + num_bytes,
        len(source) * CALL_BYTES + num_bytes,
        2.5 * num_bytes + 2 * CALL_BYTES * (1 + num_bytes // STAGING_BYTES),
    )
    cheapest = costs.index(min(costs))
    return Plan(src, dst, both if cheapest == 0 else source, cheapest == 1, cheapest == 2)


def _runs(joined: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """(first, stop) of the runs of a row whose item i + 1 goes on where item i ends, if joined[i]."""
    ends = np.flatnonzero(~joined) + 1
    bounds = [0, *ends.tolist(), len(joined) + 1]
    return list(itertools.pairwise(bounds))


class Part:
    """Some of a copy's pages, src[i] to dst[i], and how to copy regions of each size; the same for every layer."""

    def __init__(self, src: Slots, dst: Slots) -> None:
        self.src = src
        self.dst = dst
        self._plans: dict[int, Plan] = {}

    def plan(self, num_bytes: int) -> Plan:
        """Two threads may make it at once, and it is the same."""
        if (found := self._plans.get(num_bytes)) is None:
            found = self._plans[num_bytes] = plan(self.src, self.dst, num_bytes)
        return found


class _Piece(NamedTuple):
    """What a thread does at once: some pages of some layers, between all pools."""

    flight: Flight
    step: int
    part: Part


class CpuEngine(CopyEngine):
    """Copies between pools in this process's memory, on threads."""

    def __init__(self, ways: Sequence[Way], done: Done, loaded: Loaded, *, num_threads: int = 1) -> None:
        """`num_threads`: of each direction."""
        super().__init__(ways, done, loaded)
        self._lanes = [_Threads(lane, num_threads) for lane in self.lanes.values()]
        self._by_lane = {id(each.lane): each for each in self._lanes}

    def _begin(self, lane: Lane, flight: Flight) -> None:
        self._by_lane[id(lane)].queue.put(flight)

    def _end(self, deadline: float | None) -> bool:
        for each in self._lanes:
            each.queue.put(None)
        return all(each.join(deadline) for each in self._lanes)


class _Threads:
    """The threads of one direction."""

    def __init__(self, lane: Lane, num_threads: int) -> None:
        self.lane = lane
        self.queue: SimpleQueue[Flight | None] = SimpleQueue()
        self._taking = threading.Lock()
        self._pieces: deque[_Piece] = deque()
        self._num_threads = num_threads
        name = f"sglcache-{lane.name}"
        # Daemon threads: a process that fails before close() shall end, not wait.
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True) for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def join(self, deadline: float | None) -> bool:
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        staging = np.empty(STAGING_BYTES, np.uint8)
        while (piece := self._take()) is not None:
            flight, number, part = piece
            error = None
            try:
                if flight.error is None and not self.lane.dropped:
                    step = flight.steps[number]
                    staging = move(flight.runs[step.run].way, (step.first, step.stop), part, staging)
            except Exception as exc:
                error = exc
            self.lane.over(flight, number, error)
            del piece, flight, part, error  # an idle thread keeps no pool mapped

    def _take(self) -> _Piece | None:
        """The next piece, of the copy that was submitted first; None: this is the end. Blocks."""
        with self._taking:
            while not self._pieces:
                flight = self.queue.get()
                if flight is None:
                    self.queue.put(None)  # for the next thread
                    return None
                try:
                    self._cut(flight)
                except Exception as exc:
                    self.lane.over(flight, None, exc)
            return self._pieces.popleft()

    def _cut(self, flight: Flight) -> None:
        """Into pieces, all of them of sound slots."""
        slots = []
        for src, dst in flight.slots():
            order = np.argsort(src, kind="stable")  # so that a cut between pieces breaks one run at most
            slots.append((src[order], dst[order]))
        parts: dict[tuple[int, int], list[Part]] = {}
        pieces, left = [], []
        for number, (run, first, stop) in enumerate(flight.steps):
            src, dst = slots[run]
            num_bytes = len(src) * sum(flight.runs[run].way.layer_bytes[first:stop])
            count = max(-(-num_bytes // PIECE_BYTES), min(self._num_threads, num_bytes // SPLIT_BYTES), 1)
            count = min(count, len(src)) if num_bytes else 0
            left.append(count)
            if (run, count) not in parts:
                ends = [each * len(src) // count for each in range(count + 1)] if count else [0]
                parts[run, count] = [Part(src[here:end], dst[here:end]) for here, end in itertools.pairwise(ends)]
            pieces += [_Piece(flight, number, part) for part in parts[run, count]]
        if pieces:
            flight.left = left
            self._pieces.extend(pieces)
        else:  # and until that is told something is left: whatever ends now, this is not told of as over
            self.lane.over(flight, None)


def move(way: Way, layers: tuple[int, int], part: Part, staging: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Copy these layers of a part's pages, between all pools. The staging buffer, which may have grown."""
    for src_pool, dst_pool, pairs in way.moves(*layers):
        for src_region, dst_region in pairs:
            num_bytes = src_region.num_bytes
            if staging.nbytes < num_bytes:
                staging = np.empty(num_bytes, np.uint8)
            copy_rows(_rows(src_pool, src_region), _rows(dst_pool, dst_region), part.plan(num_bytes), staging)
    return staging


def copy_rows(src: Rows, dst: Rows, how: Plan, staging: npt.NDArray[np.uint8]) -> None:
    """Copy item how.src[i] to item how.dst[i]. `staging` holds an item at least."""
    if how.staged:
        _copy_staged(src, dst, how, staging)
    elif how.scatter:
        for first, stop in how.runs:
            start = how.src[first]
            dst[how.dst[first:stop]] = src[start : start + stop - first]
    else:
        # As bytes: numpy keeps the interpreter's lock for fewer than 500 items, however large one is.
        src_bytes, dst_bytes = src[:, None].view(np.uint8), dst[:, None].view(np.uint8)
        firsts = [first for first, _ in how.runs]
        starts, targets = how.src[firsts].tolist(), how.dst[firsts].tolist()
        for start, target, (first, stop) in zip(starts, targets, how.runs, strict=True):
            count = stop - first
            dst_bytes[target : target + count] = src_bytes[start : start + count]


def _copy_staged(src: Rows, dst: Rows, how: Plan, staging: npt.NDArray[np.uint8]) -> None:
    item = src.itemsize
    chunk = staging.nbytes // item
    buffer = staging[: chunk * item].view(src.dtype)
    for first in range(0, how.num_pages, chunk):
        here = slice(first, first + chunk)
        if src.flags.c_contiguous:
            rows = buffer[: len(how.src[here])]
            np.take(src, how.src[here], out=rows, mode="clip")  # "raise" would buffer it once more
        else:  # of which take would make a contiguous copy first, all of the pool
            rows = src[how.src[here]]
        dst[how.dst[here]] = rows


def _rows(pool: Memory, region: Region) -> Rows:
    return cast(Buffer, pool).rows(region)


def default_threads() -> int:
    """Of each direction: a quarter of the cores that this process may use, 4 at most, 1 at least."""
    return max(1, min(4, len(os.sched_getaffinity(0)) // 4))
