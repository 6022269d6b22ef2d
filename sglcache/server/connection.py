"""One control connection: frames in, answers out, and not more of either than the loop and the peer can take.

A turn serves at most `MAX_TURN` frames of a connection, or as many as `TURN_S` are enough for, then others get theirs.
A peer that does not read its answers is not read from, nor is one with too many commands that have no answer: what it
sends stays in its own socket. So what a connection takes of our memory is bounded: a frame that is not whole, a turn's
worth of frames, and answers up to `max_unsent`. A peer that takes none of its answers for `slow_reader_s`, or has more
than that waiting, is thrown out. What is no frame of the protocol ends the connection, after a `Failure` that says why,
and has done nothing (law 11).
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec

from sglcache.config import LimitsConfig
from sglcache.errors import Forbidden, ProtocolError, SglcacheError, TooSlow, with_article
from sglcache.server.latencies import Asked
from sglcache.server.owner import Owner
from sglcache.wire import control
from sglcache.wire.control import HEADER, MAX_FRAME

MAX_TURN = 64  # frames of one connection in one turn
TURN_S = 0.0005  # after which no further one is begun
WRITE_HIGH_WATER = 1 << 20  # bytes of answers that wait for a peer to read before it is no longer read from
CLOSE_S = 5.0  # what a peer gets to read why it was thrown out
LOOKS = 8  # at a peer that does not read, in `slow_reader_s`

C = TypeVar("C", bound="Connection")
Handler = Callable[[C, Any], None]
Handlers = dict[type, Handler[C]]

DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_decode = msgspec.msgpack.Decoder(control.Command).decode
_encode = control.encode
_size = struct.Struct(">I").unpack_from
_clock = time.perf_counter


class Connection(asyncio.Protocol):
    """`handlers` decides, by the command's type, what this peer may do now; it may change between two frames."""

    def __init__(self, owner: Owner, limits: LimitsConfig) -> None:
        self.owner = owner
        self.limits = limits
        self._max_pipelined = limits.max_pipelined
        self.num_unanswered = 0  # commands that have no answer yet
        self.num_answered = 0
        self.handlers: Handlers[Any] = {}
        self.role = ""
        self.transport: asyncio.Transport | None = None
        self.lost = False  # the socket is at its end
        self._out = b""  # a turn's answers: few, so that joining them as they come costs nothing
        self._rest: bytearray | None = None  # what is not a whole frame yet, or not served yet
        self._backlog = False  # whole frames in `_rest` wait for their turn
        self._blocked = False  # the peer does not read
        self._full = False  # too many commands have no answer
        self._patience: asyncio.TimerHandle | None = None  # while it does not read
        self._written = 0  # bytes, all in all
        self._taken = 0  # of these, those that it had taken when it was last looked
        self._took_at = 0.0  # when it was first seen to have taken so many
        self._closing = False  # no more commands are taken
        self._ending = False  # the turn's answers are the last thing to be said
        self._reading = True
        self.heard_at = owner.loop.time()  # when the last command came; at first, when it attached
        self._times = owner.times.of
        self._arrived = 0.0  # when what is served was read; while it is served `_turn` is the same
        self._turn = 0.0
        self._asked: dict[int, Asked] = {}  # by request, commands that have no answer yet
        self._answered: list[Asked] = []  # since the last answers were written

    # -- out ----------------------------------------------------------------------------------------------

    def reply(self, answer: control.Answer) -> None:
        """Queue an answer; the turn writes it."""
        self.num_unanswered -= 1
        self.num_answered += 1
        if (asked := self._asked.pop(answer.request, None)) is not None:
            if type(answer) is control.Failure:
                asked = asked[0].refused, asked[1]
            self._answered.append(asked)
        if self._full:
            self._make_room()
        payload = _encode(answer)
        out = self._out
        if out:
            self._out = out + len(payload).to_bytes(HEADER, "big") + payload
        else:
            self._out = len(payload).to_bytes(HEADER, "big") + payload
            self.owner.dirty.append(self)

    def no_reply(self, command: control.Frame, *, refused: bool = False) -> None:
        """In place of `reply`: it was served, or refused, and has no answer."""
        self.num_unanswered -= 1
        if type(command) is control.Release:
            times = self._times[control.Release]
            (times.refused if refused else times).work.observe(_clock() - self._turn)
        if self._full:
            self._make_room()

    def _make_room(self) -> None:
        if self.num_unanswered < self._max_pipelined:
            self._full = False
            self.owner.loop.call_soon(self._resume)

    def fail(self, request: int, error: SglcacheError) -> None:
        self.reply(control.Failure(request, error.code, error.message, error.facts))

    def forbidden(self, command: control.Frame) -> SglcacheError:
        """Why there is no handler for this command."""
        return Forbidden(
            f"{with_article(self.role)} may not send {with_article(type(command).__name__)}", role=self.role
        )

    def flush(self) -> None:
        out = self._out
        self._out = b""
        transport = self.transport
        if transport is not None:
            transport.write(out)
            self._written += len(out)
            now, turn = _clock(), self._turn
            for times, arrived in self._answered:
                (times.work if arrived == turn else times.wait).observe(now - arrived)
            self._answered = []
            if self._blocked and not self._closing and transport.get_write_buffer_size() > self.limits.max_unsent:
                self._too_slow("has not read")
            if self._ending:
                self.transport = None
                transport.close()
                self.owner.loop.call_later(CLOSE_S, transport.abort)

    def throw_out(self, error: SglcacheError) -> None:
        """Tell the peer why, as a failure of request 0, and close. What it sent beyond that is not looked at."""
        if self._closing:
            return
        self._closing = self._ending = True
        self._rest = None
        self.fail(0, error)

    def abort(self) -> None:
        """Close at once. `connection_lost` follows."""
        self._closing = True
        if self.transport is not None:
            self.transport.abort()

    # -- in -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(WRITE_HIGH_WATER)
        if self._closing:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        rest = self._rest
        if not self._backlog:  # what is left of an earlier read came with that; no more is read meanwhile
            self._arrived = _clock()
        if rest is not None:
            rest += data
            if not self._backlog:
                self._serve(rest)
        elif self._reading and len(data) > HEADER and _size(data)[0] == len(data) - HEADER:
            # One whole frame, and nothing waits: what comes mostly, by a way as short as can be.
            owner = self.owner
            self.heard_at = owner.begin_turn()
            self._turn = self._arrived
            self._take(data[HEADER:])
            owner.end_turn()
            self._turn = 0.0
            if self._full or not self._reading:
                self._flow()
        else:
            self._serve(data)

    def _serve(self, data: bytes | bytearray) -> None:
        """Serve the whole frames of `data`, at most a turn's worth, and keep the rest."""
        at, size, left = 0, len(data), MAX_TURN
        self.heard_at = self.owner.begin_turn()
        self._turn = self._arrived
        end = _clock() + TURN_S
        while size - at >= HEADER:
            start = at + HEADER
            stop = start + _size(data, at)[0]
            if stop > size:
                if (num_bytes := stop - start) > MAX_FRAME:
                    self._protocol(f"a frame of {num_bytes} bytes; at most {MAX_FRAME} are taken", num_bytes=num_bytes)
                break
            if self._full or self._blocked:
                self._backlog = True  # `reply` or `resume_writing` comes back to it
                break
            if left == 0 or (left != MAX_TURN and _clock() > end):
                self._backlog = True
                self.owner.loop.call_soon(self._resume)
                break
            left -= 1
            at = stop
            self._take(data[start:stop])
            if self._closing:
                break
        if self._closing or at == size:
            self._rest = None
        elif at or not isinstance(data, bytearray):
            self._rest = bytearray(memoryview(data)[at:])
        else:
            self._rest = data
        self.owner.end_turn()
        self._turn = 0.0
        if self._backlog or self._full or not self._reading:
            self._flow()

    def _take(self, payload: bytes | bytearray) -> None:
        """Do what a frame says, or say why not."""
        try:
            command = _decode(payload)
        except DECODE_ERRORS as exc:
            self._protocol(f"a frame that is no command: {exc}")
            return
        self.num_unanswered = unanswered = self.num_unanswered + 1
        if unanswered >= self._max_pipelined:
            self._full = True
        kind, request = type(command), command.request
        if request:
            self._asked[request] = self._times[kind], self._turn
        handler = self.handlers.get(kind)
        try:
            if handler is None:
                raise self.forbidden(command)
            handler(self, command)
        except SglcacheError as error:
            if request is None:  # it has no answer to put it in
                self.throw_out(error)
            elif not request and kind is control.Release:
                self.no_reply(command, refused=True)
            else:
                self.fail(request, error)

    def _protocol(self, message: str, **facts: Any) -> None:
        self.throw_out(ProtocolError(message, **facts))

    def _resume(self) -> None:
        if self._blocked or self._full:  # `resume_writing` or `reply` comes back to it
            return
        self._backlog = False
        if self._rest is not None and not self._closing:
            self._serve(self._rest)
        self._flow()

    def pause_writing(self) -> None:
        self._blocked = True
        if self._patience is None:
            self._look_whether_it_reads()
        self._flow()

    def _look_whether_it_reads(self) -> None:
        """Again and again, while there is more for it than it should leave unread."""
        transport = self.transport
        if transport is None or not self._blocked or self._closing:
            self._patience = None
            return
        loop, limit = self.owner.loop, self.limits.slow_reader_s
        taken, now = self._written - transport.get_write_buffer_size(), loop.time()
        if self._patience is None or taken > self._taken:
            self._taken, self._took_at = taken, now
        elif now - self._took_at >= limit:
            self._patience = None
            self._too_slow(f"has read nothing for {limit:g} s")
            return
        self._patience = loop.call_later(limit / LOOKS, self._look_whether_it_reads)

    def _too_slow(self, how: str) -> None:
        transport = self.transport
        assert transport is not None
        unsent = transport.get_write_buffer_size()
        self.throw_out(TooSlow(f"the peer {how}: {unsent} bytes of answers wait for it", unsent_bytes=unsent))
        self.owner.end_turn()  # it has `CLOSE_S` to come to its senses, read all of that, and why it ended

    def resume_writing(self) -> None:
        self._blocked = False
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        if self._backlog:
            self.owner.loop.call_soon(self._resume)
        self._flow()

    def stop_reading(self) -> None:
        """Take no more commands, for good; answers that are owed still go out."""
        self._closing = True
        self._flow()

    def _flow(self) -> None:
        reading = not (self._backlog or self._blocked or self._full or self._closing)
        if reading is not self._reading and self.transport is not None and not self.transport.is_closing():
            self._reading = reading
            if reading:
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.transport = None
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        self._rest = None
        self._out = b""
        self._closing = True
