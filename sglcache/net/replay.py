"""What a request for past batches gets, message by message, for as long as its reader takes.

    the ring has all from `start` on  ─►  these, through the number that was the last when it was asked
    older, 0, or of another life      ─►  a snapshot: a frame has the number of the batch before it, first that of the
                                          last one there was; what happens meanwhile comes in between, as it is
    the ring left the reader behind   ─►  a snapshot from there: its AllBlocksCleared starts the reader anew

So a reader is told everything or told anew, and never part of it. Batches come before frames, so a reader that can keep
up with the stream gets to the end of a snapshot as well, however long that is. Nothing is kept for a reader but where
it is: one frame of a snapshot is made when its reader can take it. One snapshot is made at a time, first come first
served; who does not take what is his while others wait goes to the end of the queue, and starts anew.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from sglcache.core.histograms import Histogram
from sglcache.net.ring import Entry, Ring

PATIENCE_S = 5.0  # what a reader whose turn it is may take for a frame while others wait


class Pause(Enum):
    """There is more to send, and not now."""

    AGAIN = "a slice of work is done"
    LATER = "it is another's turn"


class Source(Protocol):
    """A snapshot in the making: each frame tells what is so when it is made."""

    def next(self) -> bytes | None:
        """The next frame's payload, one slice of work; empty: not yet; None: that was all."""

    def close(self) -> None:
        """No more of it. Idempotent."""


class Turns:
    """Who may make a snapshot: one at a time. `source` begins one; None: there is none to be had."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.source: Callable[[], Source] | None = None
        self.num_begun = self.num_done = 0
        self.duration = Histogram()  # seconds from a snapshot's begin to its last frame, as fast as its reader takes it
        self.clock = clock
        self._queue: deque[Replay] = deque()
        self._since = 0.0  # when the first one last got on

    def mine(self, replay: Replay) -> bool:
        """Whether it is this one's turn; it is in the queue from now on."""
        if replay not in self._queue:
            self._queue.append(replay)
            if len(self._queue) == 1:
                self._since = self.clock()
        first = self._queue[0]
        if first is not replay and self.clock() > self._since + PATIENCE_S:
            self._queue.rotate(-1)
            first.start_over()
            self._since = self.clock()
        return self._queue[0] is replay

    def got_on(self) -> None:
        self._since = self.clock()

    def leave(self, replay: Replay) -> None:
        """It is done, or its reader is gone. Idempotent."""
        if replay in self._queue:
            self._queue.remove(replay)
            self._since = self.clock()


class Replay:
    """What one request gets before its END: all from number `start` on. Of what is still to come, nothing."""

    def __init__(self, ring: Ring, turns: Turns, start: int) -> None:
        self.num_ends = 1  # requests that it answers
        self._ring, self._turns = ring, turns
        self._next = self._first(start)
        self._until = ring.last_seq if ring.last_seq is not None else -2
        self._entry: Entry | None = None
        self._walking = False  # the snapshot is not over
        self._source: Source | None = None
        self._began = 0.0  # the snapshot

    def peek(self) -> Entry | Pause | None:
        """The next message; the same until `advance`. None: that was all."""
        if self._entry is not None:
            return self._entry
        lost = (self._walking or self._next <= self._until) and not self._ring.has_from(self._next)
        if lost and self._turns.source is not None:
            self.start_over()
            self._walking = True
        if self._walking:
            found = self._from_snapshot(self._turns.source)
            if found is not None:
                return found
        entry = self._ring.at(self._next)
        if entry is None or entry.seq > self._until:  # past it all is live
            return None
        if lost and entry.heartbeat and entry.seq == self._ring.first_seq:
            return None  # it would hide what was lost before it
        self._entry = entry
        return entry

    def advance(self) -> None:
        """It was sent."""
        assert self._entry is not None
        if self._walking:
            self._turns.got_on()
        if self._entry.seq >= self._next:  # not a frame
            self._next = self._entry.seq + 1
            self._ring.pin(self, self._next)
        self._entry = None

    @property
    def is_making(self) -> bool:
        """A snapshot is under way: the next message may be work."""
        return self._source is not None

    def merge(self, start: int) -> None:
        """Answer another request of the same reader: what it wants is sent before the END of both."""
        self.num_ends += 1
        last = self._ring.last_seq
        if last is not None and not self._walking:
            self._until = last
            self._next = min(self._next, self._first(start))

    def start_over(self) -> None:
        """Let go of a snapshot that is under way; the next one begins when it is this one's turn."""
        if self._source is not None:
            self._source.close()
            self._source = None
            self._ring.unpin(self)

    def close(self) -> None:
        """It is over, or its reader is gone. Idempotent."""
        self.start_over()
        self._ring.unpin(self)
        self._turns.leave(self)

    def _first(self, start: int) -> int:
        """0 is nobody's number: who asks for it knows nothing, and a snapshot is the shortest way to all."""
        return start if start or self._turns.source is None else -1

    def _from_snapshot(self, begin: Callable[[], Source] | None) -> Entry | Pause | None:
        """A frame; None: it is over, and the ring has what followed."""
        assert begin is not None
        if not self._turns.mine(self):
            return Pause.LATER
        last = self._ring.last_seq
        assert last is not None, "a life without a first batch"
        if self._source is None:
            self._turns.num_begun += 1
            self._next = last + 1
            self._ring.pin(self, self._next)
            self._source = begin()
            self._began = self._turns.clock()
        elif (batch := self._ring.at(self._next)) is not None:
            self._entry = batch
            return batch
        payload = self._source.next()
        if payload is None:
            self.start_over()
            self._walking = False
            self._until = last
            self._ring.pin(self, self._next)
            self._turns.num_done += 1
            self._turns.duration.observe(self._turns.clock() - self._began)
            self._turns.leave(self)
            return None
        if not payload:
            return Pause.AGAIN
        self._entry = Entry(self._next - 1, payload, False)
        return self._entry
