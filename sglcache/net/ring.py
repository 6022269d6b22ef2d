"""The newest batches of a stream, in memory: what the live stream and every replay are read from."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

ENTRY_OVERHEAD = 160  # bytes of Python objects around a payload


class Entry(NamedTuple):
    seq: int
    payload: bytes
    heartbeat: bool


class Ring:
    """The newest batches, oldest first, at most `max_bytes` of them; the newest one stays whatever its size.

    A run of heartbeats is one entry, the last. So a hole in the numbers before a heartbeat is heartbeats, and a
    hole before any other entry is loss: a heartbeat whose predecessor has left the ring leaves with it.

    Who reads may pin where it has got to. For its sake the ring grows to twice `max_bytes`, and not beyond.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.born: int | None = None  # the first number of this life
        self._entries: list[Entry] = []
        self._seqs: list[int] = []  # of the entries, for bisecting
        self._head = 0  # where the living ones start; the lists are cut now and then
        self._lost = -1  # the highest number that has left the ring
        self._pins: dict[object, int] = {}

    def __len__(self) -> int:
        return len(self._entries) - self._head

    @property
    def first_seq(self) -> int | None:
        return self._seqs[self._head] if len(self) else None

    @property
    def last_seq(self) -> int | None:
        return self._seqs[-1] if len(self) else None

    def append(self, entry: Entry) -> list[Entry]:
        """Add the newest; what left the ring for it. Numbers rise."""
        entries, seqs = self._entries, self._seqs
        if len(self):
            last = entries[-1]
            assert entry.seq > last.seq, f"batch {entry.seq} after {last.seq}"
            if entry.heartbeat and last.heartbeat:
                entries.pop()
                seqs.pop()
                self.num_bytes -= len(last.payload) + ENTRY_OVERHEAD
        else:
            self.born = entry.seq
        entries.append(entry)
        seqs.append(entry.seq)
        self.num_bytes += len(entry.payload) + ENTRY_OVERHEAD
        if self.num_bytes <= self.max_bytes and not (self._lost >= 0 and entries[self._head].heartbeat):
            return []
        return self._evict()

    def at(self, seq: int) -> Entry | None:
        """The oldest entry numbered `seq` or higher."""
        place = bisect_left(self._seqs, seq, self._head)
        return self._entries[place] if place < len(self._entries) else None

    def has_from(self, seq: int) -> bool:
        """Whether all from number `seq` on is there."""
        return self.born is not None and seq >= self.born and seq > self._lost

    def pin(self, owner: object, seq: int) -> None:
        """Keep what `owner` has still to read, from `seq` on, as far as there is room."""
        self._pins[owner] = seq

    def unpin(self, owner: object) -> None:
        """Of one that has no pin nothing."""
        self._pins.pop(owner, None)

    def _evict(self) -> list[Entry]:
        entries, head = self._entries, self._head
        newest = len(entries) - 1
        pinned = min(self._pins.values(), default=None)
        while head < newest:
            entry = entries[head]
            if self.num_bytes <= self.max_bytes and not (entry.heartbeat and (head > self._head or self._lost >= 0)):
                break
            if pinned is not None and entry.seq >= pinned and self.num_bytes <= 2 * self.max_bytes:
                break
            self.num_bytes -= len(entry.payload) + ENTRY_OVERHEAD
            head += 1
        evicted = entries[self._head : head]
        if evicted:
            self._lost = evicted[-1].seq
        self._head = head
        if head > 1024 and head > len(entries) // 2:
            del entries[:head], self._seqs[:head]
            self._head = 0
        return evicted
