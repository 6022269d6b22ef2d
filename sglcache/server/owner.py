"""The event loop's side of the index: the turn, and everything that goes on by itself between commands.

    commands of one read ─► Index ─► drain ─► rows to the journal
                                              batches to the publisher
                                              load-backs to the copy engine
                                              answers, one write a connection
                                              write-throughs to the copy engine

That order is the order of the world: a batch that says a page is gone leaves before the page is granted to anyone, and
an answer leaves after the load that it promises was submitted. Nobody is promised a write-through, and its thread would
take the interpreter from the answers. Where telling of removals takes more than a slice the
index is `held`: then every answer of every connection waits with it.

What goes on by itself: cuts of the event queue, heartbeats, slices of long work, pins that run out, the cycle
collector, and numbers bought ahead. All of it on the loop's thread, which alone touches the index (law 2).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from sglcache.core.effects import Copy, Effect, Journal, Publish, Wake
from sglcache.core.index import Index
from sglcache.core.journal import Entry
from sglcache.errors import BadRequest, TransferError
from sglcache.server.collector import Collector
from sglcache.server.latencies import CommandTimes
from sglcache.server.loads import Loads
from sglcache.server.numbers import Numbers
from sglcache.server.third import ThirdTier
from sglcache.units import TicketId

logger = logging.getLogger("sglcache.owner")

COLLECT_MASK = 63  # the collector looks every 64 turns


class Stream(Protocol):
    """Where batches go; it never waits."""

    def append(self, seq: int, payload: bytes, heartbeat: bool = False) -> None: ...


class Outbox(Protocol):
    """A connection with answers to write."""

    def flush(self) -> None: ...


class Owner:
    """Owns the index, its timers and what its effects lead to."""

    def __init__(
        self,
        index: Index,
        loop: asyncio.AbstractEventLoop,
        *,
        stream: Stream | None,
        submit: Callable[[Copy], None],
        loads: Loads,
        numbers: Numbers,
        collector: Collector,
        max_delay_s: float = 0.001,
        heartbeat_s: float = 1.0,
        announce_every_s: float = 0.0,
        third: ThirdTier | None = None,
        note: Callable[[Sequence[Entry]], None] | None = None,
        clock: Callable[[], float] = time.time,
        lost: Callable[[BaseException], None] | None = None,
    ) -> None:
        """`lost(error)`: a copy failed and with it a device; end the rank."""
        self.index = index
        self.loop = loop
        self.stream = stream
        self.submit = submit
        self.loads = loads
        self.numbers = numbers
        self.collector = collector
        self.third = third
        self.note = note
        self.max_delay_s = max_delay_s
        self.heartbeat_s = heartbeat_s
        self.announce_every_s = announce_every_s
        self.clock = clock
        self._lost = lost
        self.failed = False
        """Nothing is let out any more, to nobody. Any thread may set it: see `fail`."""
        self.wake: Callable[[Wake], None] = _nobody  # the sessions' part takes it over
        self.times = CommandTimes()
        self.dirty: list[Outbox] = []  # connections with answers of this turn
        self._backups: list[Copy] = []  # write-throughs of this turn
        self.afterwards: Callable[[], None] | None = None  # work that no answer waits for: once these are written
        self.num_turns = 0
        self.num_copies = 0  # submitted and not done
        self.idle = asyncio.Event()  # set while num_copies is 0
        self.idle.set()
        self._cutting: asyncio.Handle | None = None
        self._hurrying = False  # `_cutting` is for the next turn
        self._working = False
        self._resuming = False
        self._expiring: asyncio.TimerHandle | None = None
        self._beating: asyncio.TimerHandle | None = None
        self._announcing: asyncio.Handle | None = None
        self._announcing_again: asyncio.TimerHandle | None = None
        self._buying: asyncio.Future[None] | None = None
        self._published_at = 0.0
        self.numbers_fail: str | None = None  # why numbers can't be reserved ahead, while they can't
        self._closed = False

    def start(self) -> None:
        """Tell the stream that a life begins, and keep it alive from now on."""
        if self.stream is not None:
            self._cut()
            self._beat()
            if self.announce_every_s:
                self._announcing_again = self.loop.call_later(self.announce_every_s, self._announce_again)

    def cancel(self) -> None:
        """Start nothing by ourselves any more."""
        self._closed = True
        for handle in (
            self._cutting,
            self._expiring,
            self._beating,
            self._announcing,
            self._announcing_again,
        ):
            if handle is not None:
                handle.cancel()

    def fail(self) -> None:
        """What the pages hold is not known any more: let nothing out from this moment on (law 12). From any thread."""
        self.failed = True

    def close(self) -> None:
        """Put the last of what happened on the stream, and stop every timer. Idempotent."""
        if self._closed:
            return
        self.cancel()
        while not self.failed and not self.index.cut(self.clock()):
            self._dispatch()
        self._dispatch()

    # -- the turn -----------------------------------------------------------------------------------------

    def begin_turn(self) -> float:
        """Tell the index what time it is, and the caller. Call it before each batch of calls to the index."""
        now = self.index.now = self.loop.time()
        return now

    def end_turn(self) -> None:
        """Let out what the commands since the last turn led to. Call it after each batch of calls to the index.

        After the close nothing is let out any more: who would carry it out is going, too.
        """
        if self.failed or self._closed:
            return
        index = self.index
        if index.still:
            if self.dirty:
                self._write()
        else:
            if effects := index.drain(self.clock()):
                self._carry_out(effects)
            if index.busy and not self._working:
                self._working = True
                self.loop.call_soon(self._step)
            if index.held:
                if not self._resuming:
                    self._resuming = True
                    self.loop.call_soon(self._resume)
                return
            if self.dirty:
                self._write()
            if self._backups:
                backups, self._backups = self._backups, []
                for copy in backups:
                    self.submit(copy)
            if self._cutting is None and index.uncut and not self._closed:
                self._cutting = self.loop.call_later(self.max_delay_s, self._cut)
        if self.afterwards is not None:
            self.afterwards()
        self.num_turns = turns = self.num_turns + 1
        if not turns & COLLECT_MASK:
            self.collector.tick()

    def _write(self) -> None:
        dirty = self.dirty
        if len(dirty) == 1:
            dirty.pop().flush()
            return
        self.dirty = []
        for outbox in dirty:
            outbox.flush()

    def _dispatch(self) -> None:
        if not self.failed:
            self._carry_out(self.index.drain(self.clock()))

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Wake):
                self.wake(effect)
            elif isinstance(effect, Publish):
                self._publish(effect)
            elif isinstance(effect, Journal):
                assert self.note is not None, "nobody keeps a journal"
                self.note(effect.entries)
            elif isinstance(effect, Copy):
                self.num_copies += 1
                self.idle.clear()
                if effect.lease is None:
                    self._backups.append(effect)
                else:
                    self.submit(effect)
            else:
                assert self.third is not None, f"there is no third tier for {effect}"
                self.third.submit(effect)

    def _resume(self) -> None:
        self._resuming = False
        self.end_turn()

    def _step(self) -> None:
        """A slice of the index's long work; the turn's end sees whether there is more."""
        self._working = False
        self.begin_turn()
        self.index.step()
        self.end_turn()
        self.collector.sliced()

    # -- the stream ---------------------------------------------------------------------------------------

    def _publish(self, batch: Publish) -> None:
        assert self.stream is not None
        if self.failed:  # another thread said so, in the midst of a turn
            return
        if batch.seq > self.numbers.reserved:
            self.numbers.reserve(batch.seq)  # the thread below has not come round: rather wait than break law 6
        self.stream.append(batch.seq, batch.payload, heartbeat=batch.num_events == 0)
        self._published_at = self.loop.time()
        if self._buying is None and self.numbers.low(batch.seq):
            self._buying = self.loop.run_in_executor(None, self.numbers.reserve, batch.seq)
            self._buying.add_done_callback(self._bought)

    def _bought(self, buying: asyncio.Future[None]) -> None:
        self._buying = None
        error = None if buying.cancelled() else buying.exception()
        why = None if error is None else str(error)
        if why is not None and why != self.numbers_fail:
            logger.error("sequence numbers can't be reserved ahead: %s", why)
        self.numbers_fail = why

    def _cut(self) -> None:
        self._cutting = None
        self._hurrying = False
        self.begin_turn()
        whole = self.index.cut(self.clock())
        if not whole:
            self._cutting = self.loop.call_soon(self._cut)
        if self.third is not None:
            self.pins_changed()  # who waited for digests waits for something else by now
        self.end_turn()
        if not whole:
            self.collector.sliced()

    def flush(self) -> None:
        """Cut all that is queued, now."""
        while not self.index.cut(self.clock()):
            self._dispatch()
        self.end_turn()

    def hurry(self) -> None:
        """Cut in the next turn, not when `max_delay_s` is over: someone waits for what is queued."""
        if self._hurrying or self._closed:
            return
        self._hurrying = True
        if self._cutting is not None:
            self._cutting.cancel()
        self._cutting = self.loop.call_soon(self._cut)

    def announce(self) -> None:
        """Tell all that is cached anew, among the batches of what goes on, a frame a turn. BadRequest: no events."""
        if self.stream is None:
            raise BadRequest("events are off: there is no stream to tell it on; set events.enabled")
        self.index.announce()
        if self._announcing is None and not self._closed:
            self._announcing = self.loop.call_soon(self._announce_slice)

    def _announce_slice(self) -> None:
        self._announcing = None
        if self.index.announce_slice(self.clock()):
            self._announcing = self.loop.call_soon(self._announce_slice)
            if self.index.announcement_waits:
                self.hurry()
        self.end_turn()

    def _announce_again(self) -> None:
        self._announcing_again = self.loop.call_later(self.announce_every_s, self._announce_again)
        if not self.index.announcing:
            self.announce()

    def _beat(self) -> None:
        due = self._published_at + self.heartbeat_s
        if self.loop.time() >= due:
            self.index.cut(self.clock(), heartbeat=True)
            self.end_turn()
            due = self.loop.time() + self.heartbeat_s
        self._beating = self.loop.call_at(due, self._beat)

    # -- copies -------------------------------------------------------------------------------------------

    def copied(self, ticket: TicketId, ok: bool, error: TransferError | None = None) -> None:
        """The copy engine's word, on the loop's thread: the copy is over.

        On a CPU a failure costs the pages of that copy; where it means that a device is lost, the rank ends.
        """
        if self.failed:
            return
        if error is not None and error.facts.get("fatal"):
            self.fail()
            assert self._lost is not None, "nobody ends the rank"
            self._lost(error)
            return
        if error is not None:
            logger.error("%s", error.message, exc_info=error.__cause__)
        self.num_copies -= 1
        if self.num_copies == 0:
            self.idle.set()
        self.loads.end(ticket, ok)
        self.begin_turn()
        self.index.copy_done(ticket, ok)
        self.end_turn()

    def host_ready(self, num_pages: int) -> None:
        """So many pages of the host tier have memory now, on the loop's thread."""
        if not self._closed:
            self.begin_turn()
            self.index.host_ready(num_pages)
            self.end_turn()

    # -- the third tier ------------------------------------------------------------------------------------

    def third_asked(self) -> None:
        """Somebody waits for it, by now or soon: find out what for, and for how long."""
        self.hurry()
        self.pins_changed()

    def third_done(self) -> None:
        """Something of it is over, and the index has heard of it."""
        self.pins_changed()
        self.end_turn()

    # -- pins ---------------------------------------------------------------------------------------------

    def pins_changed(self) -> None:
        """Set the timer to the pin that runs out first, or to who has waited for the third tier long enough."""
        if self._expiring is not None:
            self._expiring.cancel()
            self._expiring = None
        if (at := self.index.next_expiry) is not None and not self._closed:
            self._expiring = self.loop.call_at(at, self._expire)

    def _expire(self) -> None:
        # uvloop rounds to milliseconds, and may be early by one.
        self.index.expire(self.begin_turn() + 0.001)
        self.pins_changed()
        self.end_turn()


def _nobody(wake: Wake) -> None:
    raise AssertionError(f"nobody is there to be told of {wake}")
