"""The slots of one (resource, tier): integers 0..total-1, packed as int32, each in exactly one state (law 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

SLOT_BYTES: Final = 4
CRUMB_BYTES = 64 * SLOT_BYTES  # shorter runs are joined: a stack of them would cost a step each


class SlotPool:
    """Counts and free list of one (resource, tier). `free + fenced + leased + cached == total` after every command.

    Who holds a slot is known to the holder alone (a node, a lease); the pool knows how many are held in which way,
    and `invariants.check` compares the two.
    """

    __slots__ = (
        "_crumbs",
        "_left",
        "_run",
        "_runs",
        "_virgin",
        "cached",
        "fenced",
        "free",
        "leased",
        "locked",
        "total",
    )

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self.cached = 0
        self.fenced = 0
        self.leased = 0
        self.locked = 0  # of the cached ones; an attribute, not a state
        # Where free slots lie, in the order they are taken: small runs as one buffer; long runs as they came back, the
        # current one used from its end; then numbers that were never used. What was used last is the warmest.
        self._crumbs = bytearray()
        self._run = b""
        self._left = 0  # bytes of _run that are still free
        self._runs: list[bytes] = []
        self._virgin = 0

    @property
    def evictable(self) -> int:
        return self.cached - self.locked

    def take(self, count: int, behind: Sequence[bytes] = ()) -> bytes:
        """`count` free slots, int32, behind those runs. The caller has made sure that there are so many."""
        free = self.free - count
        assert free >= 0, f"take({count}) from {self.free} free slots"
        self.free = free
        need = count * SLOT_BYTES
        taken: list[bytes | memoryview] = [*behind]
        crumbs = self._crumbs
        if crumbs and need:
            if len(crumbs) <= need:
                piece = bytes(crumbs)
                crumbs.clear()
            else:
                piece = bytes(crumbs[-need:])
                del crumbs[-need:]
            need -= len(piece)
            taken.append(piece)
        left = self._left
        while need > left:
            if left:
                taken.append(self._run if left == len(self._run) else memoryview(self._run)[:left])
                need -= left
            if not self._runs:
                self._run, left = b"", 0
                break
            self._run = self._runs.pop()
            left = len(self._run)
        if left:
            if need:
                end = left
                left -= need
                # a view of what is short takes longer than a copy
                taken.append(self._run[left:end] if need < CRUMB_BYTES * 16 else memoryview(self._run)[left:end])
        elif need:
            first = self._virgin
            self._virgin = first + need // SLOT_BYTES
            taken.append(np.arange(first, self._virgin, dtype="<i4").tobytes())
        self._left = left
        return b"".join(taken)

    def give(self, slots: bytes) -> None:
        """Back to the free list. The caller has uncounted them."""
        size = len(slots)
        self.free += size // SLOT_BYTES
        if size < CRUMB_BYTES:
            self._crumbs += slots
        else:
            self._runs.append(slots)

    def adopt(self, slots: npt.NDArray[np.int64]) -> None:
        """Of a pool of which nothing was taken yet: these, all different, are cached."""
        if len(slots):
            stop = int(slots.max()) + 1
            assert stop <= self.total, f"adopt({stop - 1}) into {self!r}"
            assert self.free == self.total, f"{self!r} has been taken from"
            free = np.ones(stop, bool)
            free[slots] = False
            self._virgin = stop
            self._runs.append(np.flatnonzero(free).astype("<i4")[::-1].tobytes())
            self.free -= len(slots)
            self.cached += len(slots)

    def free_slots(self) -> bytes:
        """A copy of the free list, for proofs."""
        virgin = np.arange(self._virgin, self.total, dtype="<i4").tobytes()
        return b"".join([self._crumbs, *self._runs, self._run[: self._left], virgin])

    def __repr__(self) -> str:
        return (
            f"SlotPool(total={self.total}, free={self.free}, fenced={self.fenced}, leased={self.leased}, "
            f"cached={self.cached}, locked={self.locked})"
        )
