"""The slots of one (resource, tier): integers 0..total-1, packed as int32, each in exactly one state (law 4)."""

from __future__ import annotations

import numpy as np

SLOT_BYTES = 4


class SlotPool:
    """Counts and free list of one (resource, tier). `free + fenced + leased + cached == total` after every command.

    Who holds a slot is known to the holder alone (a node, a lease); the pool knows how many are held in which way,
    and `invariants.check` compares the two.
    """

    __slots__ = ("_free", "cached", "fenced", "leased", "locked", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.cached = 0
        self.fenced = 0
        self.leased = 0
        self.locked = 0  # of the cached ones; an attribute, not a state
        # A stack: the slot that was used last is the warmest.
        self._free = bytearray(np.arange(total - 1, -1, -1, dtype="<i4").tobytes())

    @property
    def free(self) -> int:
        return len(self._free) // SLOT_BYTES

    @property
    def evictable(self) -> int:
        return self.cached - self.locked

    def take(self, count: int) -> bytes:
        """`count` free slots, int32. The caller has made sure that there are so many, and counts them."""
        if count == 0:
            return b""
        size = count * SLOT_BYTES
        free = self._free
        assert size <= len(free), f"take({count}) from {len(free) // SLOT_BYTES} free slots"
        taken = bytes(free[-size:])
        del free[-size:]
        return taken

    def give(self, slots: bytes) -> None:
        """Back to the free list. The caller has uncounted them."""
        self._free += slots

    def free_slots(self) -> bytes:
        """A copy of the free list, for proofs."""
        return bytes(self._free)

    def __repr__(self) -> str:
        return (
            f"SlotPool(total={self.total}, free={self.free}, fenced={self.fenced}, leased={self.leased}, "
            f"cached={self.cached}, locked={self.locked})"
        )
