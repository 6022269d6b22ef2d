"""Which pages a store holds, how they hang together, and which of them goes next. Digests and numbers, no I/O.

**Order.** The page that goes next is the least recently used of those that no other page hangs on, and a page counts as
used when anything behind it was, even if that is gone: so a parent is always fresher than its children, and no
eviction leaves a page without the one before it. A use costs a page one store of a number; the order is put right when
a victim is asked for.

A page may be lost for another reason (its file was bad). Then those behind it stay, without a parent, and have one
again when it comes back.

Rows are numbers; per page there are five numbers in arrays, the digest, and its place in one table. None of it is
looked at by the cycle collector, which else would stop the whole process for a store of a million pages.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable

import numpy as np

NONE = -1  # no row; as a parent: the first page of its namespace
LOST = -2  # as a parent: it is not there

_ROW_BITS = 32


class Order:
    """Rows of pages. `tick` rises from use to use."""

    def __init__(self, digest_bytes: int) -> None:
        self.num_bytes = 0
        self.tick = 0
        self._size = digest_bytes
        self._rows: dict[bytes, int] = {}
        self._digests = bytearray()  # by row, like all below
        self._parent = array("i")
        self._children = array("i")  # how many pages hang on it
        self._used = array("q")
        self._bytes = array("q")
        self._number = array("q")  # of the catalog; rises
        self._queued = bytearray()  # 1: it stands in the heap
        self._free: list[int] = []
        self._heap: list[
            int
        ] = []  # used << 32 | row; what is not a leaf, or was used since, is put right when it is met
        self._orphans: dict[bytes, list[bytes]] = {}  # of a lost page: those behind it

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._rows

    def row(self, digest: bytes) -> int:
        return self._rows.get(digest, NONE)

    def digest(self, row: int) -> bytes:
        return bytes(self._digests[row * self._size : (row + 1) * self._size])

    def parent(self, row: int) -> int:
        return self._parent[row]

    def number(self, row: int) -> int:
        return self._number[row]

    def used(self, row: int) -> int:
        return self._used[row]

    def by_number(self) -> list[int]:
        """All rows, in the order in which their pages came."""
        rows = np.fromiter(self._rows.values(), np.int64, len(self._rows))
        numbers = np.array(self._number, np.int64)
        sorted_rows: list[int] = rows[np.argsort(numbers[rows], kind="stable")].tolist()
        return sorted_rows

    def add(self, digest: bytes, parent: int, num_bytes: int, number: int, used: int) -> int:
        """A page that is not there yet; its row. `parent` is a row, or NONE."""
        row = self._free.pop() if self._free else len(self._parent)
        if row == len(self._parent):
            self._digests += digest
            self._queued.append(0)
            for column in (self._parent, self._children, self._used, self._bytes, self._number):
                column.append(0)
        else:
            self._digests[row * self._size : (row + 1) * self._size] = digest
        self._rows[digest] = row
        self._parent[row], self._children[row], self._used[row] = parent, 0, used
        self._bytes[row], self._number[row] = num_bytes, number
        self.num_bytes += num_bytes
        self.tick = max(self.tick, used)
        if parent >= 0:
            self._children[parent] += 1
        for orphan in self._orphans.pop(digest, ()):
            child = self.row(orphan)
            if child != NONE and self._parent[child] == LOST:
                self._parent[child] = row
                self._children[row] += 1
        self._queue(row)
        return row

    def use(self, rows: Iterable[int], tick: int) -> None:
        used = self._used
        for row in rows:
            used[row] = tick

    def victim(self, keep: int = NONE) -> int:
        """The row that goes next, which stays; NONE: there is none but `keep`."""
        heap, kept, found = self._heap, False, NONE
        while heap and found == NONE:
            entry = heapq.heappop(heap)
            row = entry & ((1 << _ROW_BITS) - 1)
            self._queued[row] = 0
            if self._number[row] == 0 or self._children[row]:
                continue  # the row is free, or no leaf
            if entry >> _ROW_BITS != self._used[row]:
                self._queue(row)
            elif row == keep:
                kept = True
            else:
                found = row
        if kept:
            self._queue(keep)
        if found != NONE:
            self._queue(found)
        return found

    def remove(self, row: int) -> bytes:
        """The page is gone; its digest. Those behind it lose their parent."""
        digest = self.digest(row)
        if self._children[row]:
            parents = np.array(self._parent, np.int32)
            children = np.flatnonzero(parents == row).tolist()
            self._orphans.setdefault(digest, []).extend(map(self.digest, children))
            for child in children:
                self._parent[child] = LOST
        parent = self._parent[row]
        if parent >= 0:
            self._children[parent] -= 1
            self._used[parent] = max(self._used[parent], self._used[row])
            self._queue(parent)
        del self._rows[digest]
        self.num_bytes -= self._bytes[row]
        self._parent[row], self._children[row], self._number[row], self._bytes[row] = NONE, 0, 0, 0
        self._free.append(row)
        return digest

    def _queue(self, row: int) -> None:
        if not self._children[row] and not self._queued[row]:
            self._queued[row] = 1
            heapq.heappush(self._heap, self._used[row] << _ROW_BITS | row)
