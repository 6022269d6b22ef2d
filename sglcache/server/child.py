"""A rank as the supervisor has it: its seat, which stays, and the process in it, which comes and goes.

What is known of a rank here is what it said through its channel. Nothing waits for it: a rank that hangs is known by
its silence, and what it is asked is a future that may never be done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from sglcache.errors import SglcacheError
from sglcache.server.allocator import copy_past_caches
from sglcache.server.channel import (
    About,
    Answer,
    Ask,
    Beat,
    Bound,
    Channel,
    Drain,
    Failed,
    Keep,
    Ready,
    Start,
    Tenants,
    Word,
)
from sglcache.server.plan import Seat
from sglcache.server.watch import Trouble

logger = logging.getLogger("sglcache.supervisor")

KILL_S = 5.0  # that the kernel has to end a process
MAX_KEPT = 240  # descriptors of one rank
SIGNALS = (signal.SIGTERM, signal.SIGINT)  # the supervisor's; a rank gets them once it can act on them


class Child:
    """One rank. Owned by the supervisor's loop.

    `state`: starting, ok, draining, waiting (for its next life) or ended. `changed` is called when it is ready, and
    `died` when its process is dead, reaped and let go of, with `last_exit` and `failure` saying how.
    """

    def __init__(
        self, seat: Seat, stuck_s: float, changed: Callable[[Child], None], died: Callable[[Child], None]
    ) -> None:
        """`stuck_s`: of silence, after which it is said to be stuck."""
        self.seat = seat  # with the endpoints as bound, once they are known
        self.stuck_s = stuck_s
        self.state = "starting"
        self.since = time.monotonic()  # it is so
        self.restarts = 0
        self.next_at = 0.0  # while waiting
        self.facts: dict[str, Any] | None = None  # of the newest life that was ready
        self.last_exit: dict[str, Any] | None = None
        self.failure: Failed | None = None  # this life's last words
        self.process: subprocess.Popen[bytes] | None = None
        self._changed = changed
        self._died = died
        self._channel: Channel | None = None
        self._pidfd = -1
        self._says = ""  # what it calls its own state
        self._heard_at = 0.0
        self._tiers: dict[str, tuple[int, int]] = {}
        self._troubles: list[Trouble] = []
        self._floor = 0  # numbers of its stream up to this one may have been used
        self._kept: dict[str, int] = {}  # descriptors for later lives
        self._tenants: dict[str, dict[str, int | str]] = {}  # limits for later lives
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._num_questions = 0

    def become(self, state: str) -> None:
        self.state, self.since = state, time.monotonic()

    # -- the life in it -----------------------------------------------------------------------------------

    def spawn(self, launch: Sequence[str], config: dict[str, Any], http: str | None, beat_s: float) -> None:
        """Start a life. OSError: there is no process, descriptor or memory to be had."""
        ours, theirs = Channel.pair()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the process inherits that, and unblocks them
        try:
            self.process = subprocess.Popen(
                [*launch, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=copy_past_caches({name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"}),
            )
            self._pidfd = os.pidfd_open(self.process.pid)
        except OSError:
            ours.close()
            if self.process is not None:
                self.process.kill()
                self.process.wait(KILL_S)
                self.process = None
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        self.failure = None
        self._tiers, self._troubles = {}, []
        self._channel = ours
        self._heard_at = time.monotonic()
        self.become("starting")
        loop = asyncio.get_running_loop()
        ours.watch(loop, self.hear)
        loop.add_reader(self._pidfd, self._ended)
        level = logging.getLogger().getEffectiveLevel()
        start = Start(
            config, self.seat, http, self.restarts, self._floor, list(self._kept), level, beat_s, self._tenants
        )
        if not ours.send(start, list(self._kept.values())):
            self.process.kill()  # it would wait for ever
        logger.info("%s starts, pid %d", self.seat, self.process.pid)

    def drain(self) -> None:
        """Have it end in good order; one that has no process has ended."""
        if self._channel is None:
            self.become("ended")
        else:
            self.become("draining")
            self._channel.send(Drain())

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()

    def close(self) -> None:
        """Leave no process and no descriptor behind."""
        if self.process is not None:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that the kernel can't end yet
                self.process.wait(KILL_S)
            self._forget()
        for fd in self._kept.values():
            os.close(fd)
        self._kept.clear()

    def _ended(self) -> None:
        process = self.process
        assert process is not None
        self.hear()  # its last words
        code = process.wait()
        why = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        if self.failure is not None:
            why += f": {self.failure.message}"
        self.last_exit = {"pid": process.pid, "status": code, "why": why, "at": round(time.time(), 3)}
        self._forget()
        self._died(self)

    def _forget(self) -> None:
        self.process = None
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        assert self._channel is not None
        self._channel.close()
        self._channel = None

    # -- what it says -------------------------------------------------------------------------------------

    def hear(self) -> None:
        """Take in what it has said."""
        channel = self._channel
        if channel is None:
            return
        try:
            while (heard := channel.receive()) is not None:
                self._heard_at = time.monotonic()
                self._heard(*heard)
        except EOFError:
            channel.unwatch()  # its pidfd says the rest
        except msgspec.DecodeError as exc:
            logger.error("%s says what nobody understands (%s); it is killed", self.seat, exc)
            channel.unwatch()
            self.kill()

    def _heard(self, word: Word, fds: list[int]) -> None:
        """DecodeError: it has not what it must have."""
        try:
            self._take_in(word, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _take_in(self, word: Word, fds: list[int]) -> None:
        match word:
            case Ready(facts):
                self._ready(facts)
            case Beat(state, reserved, tiers, troubles):
                self._says = state
                self._troubles = troubles
                self._tiers = tiers
                self._floor = max(self._floor, reserved)
            case Answer(question, body, refusal):
                if (future := self._questions.pop(question, None)) is not None and not future.done():
                    if refusal is None:
                        future.set_result(body)
                    else:
                        future.set_exception(SglcacheError.from_code(*msgspec.structs.astuple(refusal)))
            case Failed():
                self.failure = word
            case Keep(name):
                self._keep(name, fds)
            case Tenants(tenants):
                self._tenants = tenants
            case _:
                raise msgspec.DecodeError(f"a rank does not say {type(word).__name__}")

    def _ready(self, facts: dict[str, Any]) -> None:
        stream = msgspec.convert(facts.get("stream"), Bound | None)
        self.facts = facts
        if stream is not None:
            self.seat = msgspec.structs.replace(
                self.seat, endpoint=stream.endpoint, replay_endpoint=stream.replay_endpoint
            )
        if self.state == "starting":
            self._says = "ok"
            self.become("ok")
        self._changed(self)

    def _keep(self, name: str, fds: list[int]) -> None:
        """Take the first of `fds`, if there is one, in the place of what is held by this name."""
        if name in self._kept:
            os.close(self._kept.pop(name))
        if fds and len(self._kept) < MAX_KEPT:
            self._kept[name] = fds.pop(0)
        elif fds:
            logger.error("%s wants more than %d descriptors kept: not %s", self.seat, MAX_KEPT, name)

    def ask(self, about: About, params: Mapping[str, Any] = {}) -> asyncio.Future[Any] | None:
        """Its answer, some time, or the SglcacheError that it refuses with; None: there is nobody to ask, or nobody who
        listens. Cancel it to wait no longer."""
        self.hear()
        if self.state not in ("ok", "draining") or self.stuck or self._channel is None:
            return None
        self._questions = {number: future for number, future in self._questions.items() if not future.done()}
        self._num_questions += 1
        if not self._channel.send(Ask(self._num_questions, about, dict(params))):
            return None
        future = asyncio.get_running_loop().create_future()
        self._questions[self._num_questions] = future
        return future

    # -- telling ------------------------------------------------------------------------------------------

    def silent_s(self) -> float:
        """Since its last sign of life."""
        return time.monotonic() - self._heard_at

    @property
    def stuck(self) -> bool:
        """Not while it drains: to let go of its pools takes a while, and it has a deadline."""
        return self.state == "ok" and self.silent_s() > self.stuck_s

    def describe(self) -> dict[str, Any]:
        """How it is, as /health and /server_info say it."""
        self.hear()  # what came while this process itself was held up
        state = "stuck" if self.stuck else self._says if self.state == "ok" else self.state
        told: dict[str, Any] = {
            "rank": self.seat.offset,
            "dp_rank": self.seat.dp_rank,
            "pp_rank": self.seat.pp_rank,
            "state": state,
            "pid": self.process.pid if self.process is not None else None,
            "restarts": self.restarts,
        }
        if self._tiers:
            told["tiers"] = {
                name: {"ready_bytes": ready, "bytes": total} for name, (ready, total) in self._tiers.items()
            }
        if self._troubles and state == "ok":
            told["troubles"] = [msgspec.structs.asdict(trouble) for trouble in self._troubles]
        if state == "stuck":
            told["silent_s"] = round(self.silent_s(), 1)
        if state == "waiting":
            told["starts_in_s"] = round(max(0.0, self.next_at - time.monotonic()), 1)
        if self.last_exit is not None:
            told["last_exit"] = self.last_exit
        return told
