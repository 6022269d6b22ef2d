"""The slots of one (resource, tier): integers 0..total-1, packed as int32, each in exactly one state (law 4)."""

from __future__ import annotations

import numpy as np

SLOT_BYTES = 4


class SlotPool:
    """Counts and free list of one (resource, tier). `free + fenced + leased + cached == total` after every command.

    Who holds a slot is known to the holder alone (a node, a lease); the pool knows how many are held in which way,
    and `invariants.check` compares the two.
    """

    __slots__ = ("_left", "_run", "_runs", "cached", "fenced", "free", "leased", "locked", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self.cached = 0
        self.fenced = 0
        self.leased = 0
        self.locked = 0  # of the cached ones; an attribute, not a state
        # A stack of runs as they came back, the top one used from its end: the slots used last are the warmest,
        # and a slot is copied once on its way out. Lowest numbers first out of a new pool.
        self._runs: list[bytes] = []
        self._run = np.arange(total - 1, -1, -1, dtype="<i4").tobytes()
        self._left = len(self._run)  # bytes of _run that are still free

    @property
    def evictable(self) -> int:
        return self.cached - self.locked

    def take(self, count: int) -> list[bytes]:
        """`count` free slots, int32, in pieces. The caller has made sure that there are so many, and counts them."""
        assert count <= self.free, f"take({count}) from {self.free} free slots"
        self.free -= count
        need = count * SLOT_BYTES
        left = self._left
        taken = []
        while need > left:
            taken.append(self._run[:left])
            need -= left
            self._run = self._runs.pop()
            left = len(self._run)
        taken.append(self._run[left - need : left])
        self._left = left - need
        return taken

    def give(self, slots: bytes) -> None:
        """Back to the free list. The caller has uncounted them."""
        if slots:
            self.free += len(slots) // SLOT_BYTES
            self._runs.append(slots)

    def free_slots(self) -> bytes:
        """A copy of the free list, for proofs."""
        return b"".join([*self._runs, self._run[: self._left]])

    def __repr__(self) -> str:
        return (
            f"SlotPool(total={self.total}, free={self.free}, fenced={self.fenced}, leased={self.leased}, "
            f"cached={self.cached}, locked={self.locked})"
        )
