"""What is cached, told from the beginning: for who joins late, or has lost more than the ring of batches still has.

A snapshot is taken over an index that goes on changing, a frame at a time, for as long as its reader takes. Note the
number S of the last batch, tell the frames, then every batch from S + 1 on, and the reader has exactly what the index
has. Why that is so, for a page and a tier:

* Present from S to the end: the walk meets it. Its parent was met before, or is told of by a later batch.
* Its presence has changed since S: a later batch says how it ended, and storing twice is storing once.
* New, and its digest still a promise: its record is in no batch up to S, so a later one has it. It is left out.

The same frames among the live batches, each under the next number, are a new beginning for everyone.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from sglcache.core.encoding import Extras, Group
from sglcache.core.eventlog import Frame, Run
from sglcache.core.tree import Node, Tree, Walk
from sglcache.units import Tier

if TYPE_CHECKING:
    from sglcache.core.eventlog import EventLog
    from sglcache.core.l3 import L3, Held


LOOK_COST = 10  # of a node of which nothing is told, in the units of the log's slice
TELL_COST = 100  # of one of which something is, beside its pages
FRAME_TOKENS = 1 << 14  # in a frame: a reader that does not read has a queue of frames, which must not be large


class Snapshot:
    """AllBlocksCleared, then BlockStored for what is published, parents first. Owns a walk until its end."""

    def __init__(self, log: EventLog, tree: Tree, l3: L3 | None = None) -> None:
        """`l3`: one whose pages are told of, too, behind those of the tree."""
        self._log = log
        # Full KV first, and of companions those that are told of.
        self._cells = [
            (c, Tier(c % tree.T), None if c < tree.T else log.group(c // tree.T))
            for c in range(tree.C)
            if c < tree.T or log.group(c // tree.T) is not None
        ]
        self._walk = Walk(tree)
        self._max_blocks = min(log.max_blocks, max(1, FRAME_TOKENS * 4 // log.page_weight))
        self._l3 = l3
        self._segment = 0  # of its shelf, the last that was looked at
        self._below: deque[tuple[bytes, Held]] = deque()  # of that, what is still to be told
        self._told = b""  # the last digest told of a node that did not fit into a frame
        self._begun = False
        self._full_cuts: int | None = None  # that there had been when the walk came to its end

    @property
    def waits(self) -> bool:
        """All is told, and some of it may be in no batch yet: it is not over before all that was queued has been cut.

        Else a reader would be ahead of the number that it has reached.
        """
        return self._full_cuts == self._log.num_full_cuts and self._log.pending

    def next(self) -> Frame | None:
        """The next frame, of one slice of work, maybe empty; None at the end."""
        building = _Frame(self._log)
        if not self._begun:
            self._begun = True
            building.clear()
        elif self._walk.peek() is None and not self._more_below():
            if self._full_cuts is None:
                self._full_cuts = self._log.num_full_cuts
            if self.waits:
                return Frame([], 0, 0)
            self.close()
            return None
        budget = self._log.slice
        while building.num_blocks < self._max_blocks and budget > 0:
            node = self._walk.peek()
            if node is None:
                if not self._more_below():
                    break
                self._tell_below(building)
                budget -= TELL_COST + self._log.cost(1)
                continue
            before = building.num_blocks
            self._tell(node, building)
            blocks = building.num_blocks - before
            budget -= TELL_COST + self._log.cost(blocks) if blocks else LOOK_COST
        return building.close()

    def payload(self, ts: float) -> bytes | None:
        """The next frame as a batch stamped `ts` (unix seconds); nothing where a slice told of nothing."""
        frame = self.next()
        if frame is None:
            return None
        return self._log.payload(ts, frame) if frame.num_events else b""

    def close(self) -> None:
        """No more of it. Idempotent."""
        self._walk.close()

    def _more_below(self) -> bool:
        """Something of L3 is to be told, and nothing else."""
        while not self._below and self._l3 is not None and not self._walk.over:
            segment = self._l3.snapshot(self._segment)
            if segment is None:
                self._l3 = None
                break
            self._segment, pages = segment
            self._below.extend(pages)
        return bool(self._below)

    def _tell_below(self, building: _Frame) -> None:
        """One page, if it is still there."""
        digest, held = self._below.popleft()
        assert self._l3 is not None
        if digest in self._l3.shelf:
            building.add(self._l3.tier, digest, held.tokens, held.before, held.extras)

    def _tell(self, node: Node, building: _Frame) -> None:
        hashes, extras = node.hashes, node.space.extras
        places = [
            (tier, group) for c, tier, group in self._cells if node.cells[c] is not None and not node.writing >> c & 1
        ]
        if not isinstance(hashes, bytes) or extras is None or not places:
            self._walk.advance(node)
            return
        size, keys = self._log.hasher.size, self._log.keys
        num_pages = len(hashes) // size
        start = _page_of(self._told, hashes, size) + 1 if self._told else 0
        self._told = b""
        room = (self._max_blocks - building.num_blocks) // len(places)
        stop = min(num_pages, start + max(1, room))
        if start:
            parent: bytes | None = hashes[(start - 1) * size : start * size]
        else:
            assert node.parent is not None
            above = node.parent.hashes
            assert above is None or isinstance(above, bytes), "a chain was reached before the one it builds on"
            parent = None if above is None else above[-size:]
        digests = hashes[start * size : stop * size]
        tokens = node.key[start * keys.page_bytes : stop * keys.page_bytes + keys.over]
        if digests:
            for tier, group in places:
                if group is None or not group.by_end:
                    building.add(tier, digests, tokens, parent, extras, group)
                elif stop == num_pages:
                    before = digests[-2 * size : -size] or parent
                    building.add(tier, digests[-size:], tokens[-keys.page_bytes - keys.over :], before, extras, group)
        if stop < num_pages:
            self._told = digests[-size:]
        else:
            self._walk.advance(node)


def _page_of(digest: bytes, hashes: bytes, size: int) -> int:
    """Which page of a node has this digest; -1: none, for it was split since, and what comes is told from its start."""
    at = hashes.find(digest)
    while at % size and at >= 0:
        at = hashes.find(digest, at + 1)
    return at // size


class _Frame:
    """A frame in the making: one open run a tier and group, which a node joins that goes on where the last ended."""

    def __init__(self, log: EventLog) -> None:
        self.num_blocks = 0
        self._log = log
        self._events: list[bytes] = []
        self._num_events = 0
        self._runs: dict[tuple[Tier, Group | None], Run] = {}

    def clear(self) -> None:
        self._events.extend(self._log.encoding.cleared())
        self._num_events += 1

    def add(
        self,
        tier: Tier,
        digests: bytes,
        tokens: bytes,
        parent: bytes | None,
        extras: Extras,
        group: Group | None = None,
    ) -> None:
        size = self._log.hasher.size
        run = self._runs.get((tier, group))
        if run is None or parent is None or run.digests[-1][-size:] != parent or run.extras != extras:
            self._end((tier, group))
            run = self._runs[tier, group] = Run(True, tier, parent, extras, group)
        run.digests.append(digests)
        run.tokens.append((tokens, 0, len(tokens)))
        run.num_blocks += len(digests) // size
        self.num_blocks += len(digests) // size

    def close(self) -> Frame:
        for place in list(self._runs):
            self._end(place)
        return Frame(self._events, self._num_events, self.num_blocks)

    def _end(self, place: tuple[Tier, Group | None]) -> None:
        run = self._runs.pop(place, None)
        if run is not None:
            self._events.extend(self._log.encode(run))
            self._num_events += 1
