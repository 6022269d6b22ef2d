"""The daemon's first process: it starts every rank of this host, starts again those that die, and answers HTTP for all.

    bind HTTP ─► start the ranks, all at once ─► all ready: serve ─► SIGTERM or SIGINT: Drain to all ─► all have ended

Laws:

* A start is all or nothing: a rank that can't start, for its configuration or whatever, ends it, with the reason.
* Later a rank's death is its own: it is started again, after a wait that doubles from death to death and is forgotten
  once a life was healthy for long; nothing of the others' is touched. What the system chose for a rank (port 0) is the
  next life's as well, so that who follows the stream finds it.
* Nothing here waits for a rank. Ranks say by themselves that they are alive; one that hangs is known by its silence.
* No rank outlives this process (`rank.serve` sees to it), however that ends.

Descriptors that a rank has kept here (`channel.Keep`) go to its next life: what they are is no business of this file.
Neither torch nor zmq nor numpy is loaded here: what dies with a rank shall not take this process along.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from sglcache import paths
from sglcache.config import Config
from sglcache.errors import ConfigError, SglcacheError, StartError
from sglcache.server import doors
from sglcache.server.channel import About, Answer, Ask, Beat, Channel, Drain, Failed, Keep, Ready, Start, Word
from sglcache.server.notify import notify
from sglcache.server.plan import Seat, kv_events, plan
from sglcache.wire import control

if TYPE_CHECKING:
    from sglcache.server.indexers import Indexers

logger = logging.getLogger("sglcache.supervisor")

EXIT_FAILED = 70  # sysexits' EX_SOFTWARE: a rank did not end in good order
KILL_S = 5.0  # that the kernel has to end a process
MAX_KEPT = 64  # descriptors of one rank
PACKAGE_ROOT = Path(__file__).parents[2]
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Timing(NamedTuple):
    """Seconds."""

    beat: float = 0.5  # between two signs of life
    stuck: float = 2.0  # of silence, after which a rank is said to be stuck
    answer: float = 1.0  # that a rank has for a question
    drain: float = 15.0  # that the ranks have to end; their copies alone may take 10
    first_wait: float = 0.1  # before the start after a first death
    longest_wait: float = 30.0
    healthy: float = 60.0  # a life of so long forgets the deaths before it


class Child:
    """One rank: its seat, and the life in it."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat  # with the endpoints as bound, once they are known
        self.state = "starting"  # then ok, draining, waiting (for its next life) or ended
        self.says = ""  # what it calls its own state
        self.restarts = 0
        self.deaths = 0  # in a row, none of them after a healthy life
        self.facts: dict[str, Any] | None = None  # of the newest life that was ready
        self.floor = 0
        self.kept: dict[str, int] = {}  # descriptors for later lives; owned here
        self.last_exit: dict[str, Any] | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.pidfd = -1
        self.channel: Channel | None = None
        self.failure: Failed | None = None  # this life's last words
        self.since = time.monotonic()  # of `state`
        self.heard_at = 0.0
        self.next_at = 0.0  # while waiting
        self.timer: asyncio.TimerHandle | None = None
        self.was_stuck = False

    def become(self, state: str) -> None:
        self.state, self.since = state, time.monotonic()

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None else None

    def silent_s(self) -> float:
        """Since its last sign of life."""
        return time.monotonic() - self.heard_at


class Supervisor:
    """Owns the ranks of one host. `run` is its life."""

    def __init__(
        self,
        config: Config,
        *,
        launch: Sequence[str] | None = None,
        timing: Timing = Timing(),  # noqa: B008  # immutable
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """ConfigError: the ranks can't be there side by side. `launch`: the command that a descriptor is added to."""
        self.config = config
        self.timing = timing
        self.clock = wall_clock
        self.children = [Child(seat) for seat in plan(config)]
        self.launch = list(launch) if launch is not None else _launch()
        self.state = "starting"  # then ok, draining
        self.url: str | None = None
        self._started_at = time.monotonic()
        self._error: SglcacheError | None = None  # why the start failed
        self._code = 0
        self._stop = False  # SIGTERM or SIGINT was there
        self._changed = asyncio.Event()  # something that `main` may wait for
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._num_questions = 0
        self._signals: list[int] = []
        self._indexers: Indexers | None = None

    # -- the life -----------------------------------------------------------------------------------------

    def run(self, ready: Callable[[dict[str, Any]], None] = lambda info: None) -> int:
        """All of it, in this process; `ready` gets /server_info once every rank serves. The exit status.

        ConfigError: it can't be had as it is configured. StartError: a rank ended before it served.
        """
        return asyncio.run(self.main(ready))

    async def main(self, ready: Callable[[dict[str, Any]], None]) -> int:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._unexpected)
        with contextlib.ExitStack() as undo:
            socks = self._bind(undo)
            for number in SIGNALS:
                loop.add_signal_handler(number, self._signalled, number)
            undo.callback(self._let_go)
            for child in self.children:
                self._spawn(child)
            from sglcache.server.http import HttpServer  # not before the ranks are on their way: it takes 0.2 s

            server = HttpServer(self, socks)
            await server.start()
            if self.config.events.enabled and self.config.events.dynamo_indexers:
                from sglcache.server.indexers import Indexers

                self._indexers = Indexers(self.config)
                self._tell_indexers()
            try:
                await self._until(lambda: self.state == "ok")
                if self.state == "ok" and not self._stop:
                    ready(await self.server_info())
                    notify(f"READY=1\nSTATUS=serving {len(self.children)} ranks")
                    self._watch_silence(loop)
                    await self._until(lambda: False)
                await self._drain()
            finally:
                if self._indexers is not None:
                    await self._indexers.close()
                await server.stop()
        if self._error is not None:
            raise self._error
        return self._code

    def _bind(self, undo: contextlib.ExitStack) -> list[Any]:
        """The sockets for HTTP, before anything is started."""
        path = paths.supervisor_path(Path(self.children[0].seat.socket))
        sock, lock = doors.unix(path, "control.socket")
        undo.callback(doors.close, sock, path, lock)
        self.path = path
        socks = [sock]
        http = self.config.http
        if http.enabled:
            sock = doors.tcp(http.host, http.port, "http.port")
            undo.callback(sock.close)
            self.url = doors.url(http.host, sock.getsockname()[1])
            socks.append(sock)
        return socks

    async def _until(self, so: Callable[[], bool]) -> None:
        """Wait for it, for a signal, or for the start to fail."""
        while not (so() or self._stop or self._error):
            self._changed.clear()
            await self._changed.wait()

    async def _drain(self) -> None:
        """Have every rank end, in good order while there is time."""
        self.state = "draining"
        notify("STOPPING=1")
        for child in self.children:
            if child.timer is not None:
                child.timer.cancel()
            if child.process is None:
                child.become("ended")
            elif child.channel is not None:
                child.become("draining")
                child.channel.send(Drain())
        try:
            async with asyncio.timeout(self.timing.drain):
                while any(child.process is not None for child in self.children):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            self._code = EXIT_FAILED
            for child in self.children:
                if child.process is not None:
                    logger.error("%s has not ended after %g s; it is killed", child.seat, self.timing.drain)
        logger.info("drained")

    def _let_go(self) -> None:
        """Leave no process and no descriptor behind."""
        for child in self.children:
            if child.timer is not None:
                child.timer.cancel()
            if child.process is not None:
                child.process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # a process that the kernel can't end yet
                    child.process.wait(KILL_S)
                self._forget(child)
            for fd in child.kept.values():
                os.close(fd)
            child.kept.clear()

    def _signalled(self, number: int) -> None:
        if self._stop:
            for child in self.children:
                if child.process is not None:
                    child.process.kill()
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            os._exit(128 + number)
        logger.info("%s: draining; another ends this at once", signal.Signals(number).name)
        self._stop = True
        self._changed.set()

    def _unexpected(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is None or isinstance(error, OSError):
            logger.warning("%s", context.get("message"), exc_info=error)
            return
        logger.critical("%s", context.get("message"), exc_info=error)
        self._code, self._stop = EXIT_FAILED, True
        self._changed.set()

    # -- a rank's lives -----------------------------------------------------------------------------------

    def _spawn(self, child: Child) -> None:
        ours, theirs = Channel.pair()
        # The rank gets its signals once it can act on them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            environ = {name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"}
            child.process = subprocess.Popen(
                [*self.launch, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environ,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        child.timer = None
        child.failure = None
        child.channel = ours
        child.pidfd = os.pidfd_open(child.process.pid)
        child.become("starting")
        child.heard_at = time.monotonic()
        loop = asyncio.get_running_loop()
        ours.watch(loop, lambda: self._hear(child))
        loop.add_reader(child.pidfd, self._ended, child)
        start = Start(
            self.config.model_dump(mode="json"),
            child.seat,
            self.url,
            child.restarts,
            child.floor,
            list(child.kept),
            logging.getLogger().getEffectiveLevel(),
            self.timing.beat,
        )
        if not ours.send(start, list(child.kept.values())):
            child.process.kill()  # it would wait for ever
        logger.info("%s starts, pid %d", child.seat, child.process.pid)

    def _hear(self, child: Child) -> None:
        """Take in what the rank has said."""
        channel = child.channel
        try:
            while channel is not None and (heard := channel.receive()) is not None:
                child.heard_at = time.monotonic()
                self._heard(child, *heard)
        except EOFError:
            assert channel is not None
            channel.unwatch()  # its pidfd says the rest
        except msgspec.DecodeError as exc:
            logger.error("%s says what nobody understands (%s); it is killed", child.seat, exc)
            assert channel is not None
            assert child.process is not None
            channel.unwatch()
            child.process.kill()

    def _heard(self, child: Child, word: Word, fds: list[int]) -> None:
        match word:
            case Ready(facts):
                self._ready(child, facts)
            case Beat(state, reserved):
                child.says = state
                child.floor = max(child.floor, reserved)
            case Answer(question, body):
                if (future := self._questions.pop(question, None)) is not None and not future.done():
                    future.set_result(body)
            case Failed():
                child.failure = word
            case Keep(name):
                if name in child.kept:
                    os.close(child.kept.pop(name))
                if fds and len(child.kept) < MAX_KEPT:
                    child.kept[name] = fds.pop()
                elif fds:
                    logger.error("%s wants more than %d descriptors kept: not %s", child.seat, MAX_KEPT, name)
        for fd in fds:
            os.close(fd)

    def _ready(self, child: Child, facts: dict[str, Any]) -> None:
        child.facts = facts
        stream = facts["stream"]
        if stream is not None:
            child.seat = msgspec.structs.replace(
                child.seat, endpoint=stream["endpoint"], replay_endpoint=stream["replay_endpoint"]
            )
        if child.state == "starting":
            child.become("ok")
            child.says = "ok"
        if child.restarts:
            logger.warning("%s is back, pid %s, epoch %d", child.seat, child.pid, facts["epoch"])
        if self.state == "starting" and all(each.state == "ok" for each in self.children):
            self.state = "ok"
        self._tell_indexers()
        self._changed.set()

    def _tell_indexers(self) -> None:
        if self.state == "ok" and self._indexers is not None:
            self._indexers.register([each.seat for each in self.children])

    def _ended(self, child: Child) -> None:
        """The rank's process is dead."""
        process, state, failure = child.process, child.state, child.failure
        assert process is not None
        self._hear(child)  # its last words
        failure = child.failure
        code = process.wait()
        lived = time.monotonic() - child.since
        self._forget(child)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        child.last_exit = {
            "pid": process.pid,
            "status": code,
            "why": f"{how}: {failure.message}" if failure is not None else how,
            "at": round(self.clock(), 3),
        }
        if self.state == "draining":
            child.become("ended")
            if code and self._error is None:
                logger.error("%s %s while draining", child.seat, how)
                self._code = EXIT_FAILED
        elif self.state == "starting" and not child.restarts:
            child.become("ended")
            self._error = self._error or self._refusal(child, how, failure)
        else:
            child.deaths = 1 if state == "ok" and lived >= self.timing.healthy else child.deaths + 1
            wait_s = min(self.timing.first_wait * 2.0 ** min(child.deaths - 1, 60), self.timing.longest_wait)
            logger.error("%s %s; it starts again in %g s", child.seat, child.last_exit["why"], wait_s)
            child.become("waiting")
            child.next_at = child.since + wait_s
            child.timer = asyncio.get_running_loop().call_later(wait_s, self._again, child)
        self._changed.set()

    def _again(self, child: Child) -> None:
        child.restarts += 1
        try:
            self._spawn(child)
        except OSError as exc:  # no process, no descriptor, no memory
            logger.error("%s can't be started: %s; trying again in %g s", child.seat, exc, self.timing.longest_wait)
            child.restarts -= 1
            child.timer = asyncio.get_running_loop().call_later(self.timing.longest_wait, self._again, child)

    def _forget(self, child: Child) -> None:
        """The process is dead: let go of what there is of it."""
        child.process = None
        asyncio.get_running_loop().remove_reader(child.pidfd)
        os.close(child.pidfd)
        child.pidfd = -1
        if child.channel is not None:
            child.channel.close()
            child.channel = None

    def _refusal(self, child: Child, how: str, failure: Failed | None) -> SglcacheError:
        where = f"{child.seat}: " if len(self.children) > 1 else ""
        if failure is None:
            return StartError(f"{where}it {how} before it served; the log says why", rank=child.seat.offset)
        if failure.code == ConfigError.code:
            return ConfigError(where + failure.message, **failure.facts)
        return StartError(f"{where}it {how} before it served: {failure.message}", rank=child.seat.offset)

    def _watch_silence(self, loop: asyncio.AbstractEventLoop) -> None:
        """Log when a rank falls silent, and when it is heard again."""
        for child in self.children:
            stuck = self._stuck(child)
            if stuck and not child.was_stuck:
                logger.error("%s is stuck: no sign of life for %.1f s", child.seat, child.silent_s())
            elif child.was_stuck and not stuck and child.state == "ok":
                logger.warning("%s is alive again", child.seat)
            child.was_stuck = stuck
        loop.call_later(self.timing.beat, self._watch_silence, loop)

    # -- telling ------------------------------------------------------------------------------------------

    def _stuck(self, child: Child) -> bool:
        return child.state in ("ok", "draining") and child.silent_s() > self.timing.stuck

    def _state(self, child: Child) -> dict[str, Any]:
        """How a rank is, as /health and /server_info say it."""
        if child.channel is not None:
            self._hear(child)  # what came while this process itself was held up
        stuck = self._stuck(child)
        state: dict[str, Any] = {
            "rank": child.seat.offset,
            "dp_rank": child.seat.dp_rank,
            "pp_rank": child.seat.pp_rank,
            "state": "stuck" if stuck else child.says if child.state == "ok" else child.state,
            "pid": child.pid,
            "restarts": child.restarts,
        }
        if stuck:
            state["silent_s"] = round(child.silent_s(), 1)
        if child.state == "waiting":
            state["starts_in_s"] = round(max(0.0, child.next_at - time.monotonic()), 1)
        if child.last_exit is not None:
            state["last_exit"] = child.last_exit
        return state

    def health(self) -> dict[str, Any]:
        ranks = [self._state(child) for child in self.children]
        bad = [state for state in ranks if state["state"] != "ok"]
        status = self.state if self.state != "ok" else "degraded" if bad else "ok"
        health: dict[str, Any] = {"status": status, "uptime_s": round(time.monotonic() - self._started_at, 3)}
        if bad:
            health["reason"] = "; ".join(map(_in_words, bad))
        return {**health, "ranks": ranks}

    async def server_info(self) -> dict[str, Any]:
        facts = await self._ask("facts")
        config, seats = self.config, [child.seat for child in self.children]
        parallel = config.parallel
        ranks = []
        for child, told in zip(self.children, facts, strict=True):
            known = (
                told or child.facts or {"socket": child.seat.socket, "epoch": None, "geometry": None, "stream": None}
            )
            ranks.append({**known, **self._state(child)})
        return {
            "version": importlib.metadata.version("sglcache"),
            "protocol": control.PROTOCOL,
            "model_name": config.model_name,
            "page_size": config.pool.page_size,
            "dp_size": parallel.dp_size,
            "pp_size": parallel.pp_size,
            "hash": config.events.hash,
            "kv_events": kv_events(config, seats),
            "pipeline_endpoints": [
                {
                    "rank": seat.offset,
                    "dp_rank": seat.dp_rank,
                    "pp_rank": seat.pp_rank,
                    "endpoint": seat.endpoint,
                    "replay_endpoint": seat.replay_endpoint,
                }
                for seat in seats
                if seat.pp_rank > 0 and seat.endpoint is not None
            ],
            "pid": os.getpid(),
            "http": self.url,
            "ranks": ranks,
        }

    async def digest(self) -> dict[str, Any]:
        """What a mirror of each rank must have, as of the number `seq` of its stream; nothing of one that is away."""
        digests = await self._ask("digest")
        return {
            "ranks": [
                {"rank": child.seat.offset, "dp_rank": child.seat.dp_rank, "pp_rank": child.seat.pp_rank, **digest}
                for child, digest in zip(self.children, digests, strict=True)
                if digest is not None
            ]
        }

    async def metrics(self) -> bytes:
        from sglcache.server import metrics

        families = await self._ask("metrics")
        offsets = [child.seat.offset for child in self.children]
        lives = metrics.LivesCollector(
            dict(zip(offsets, (each is not None for each in families), strict=True)),
            dict(zip(offsets, (child.restarts for child in self.children), strict=True)),
        )
        return metrics.page([metrics.packed(lives), *filter(None, families)])

    async def _ask(self, about: About) -> list[Any]:
        """What each rank answers; None of one that does not, in time."""
        asked: list[asyncio.Future[Any] | None] = []
        for child in self.children:
            if child.channel is not None:
                self._hear(child)
            self._num_questions += 1
            reachable = child.state in ("ok", "draining") and not self._stuck(child)
            if reachable and child.channel is not None and child.channel.send(Ask(self._num_questions, about)):
                future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                self._questions[self._num_questions] = future
                asked.append(future)
            else:
                asked.append(None)
        waited = [future for future in asked if future is not None]
        if waited:
            await asyncio.wait(waited, timeout=self.timing.answer)
        self._questions = {n: future for n, future in self._questions.items() if future not in waited}
        return [future.result() if future is not None and future.done() else None for future in asked]


def _in_words(state: dict[str, Any]) -> str:
    words = f"rank {state['rank']} is {state['state']}"
    if "silent_s" in state:
        words += f": no sign of life for {state['silent_s']} s"
    if state["state"] == "waiting":
        words += f" for its next start in {state['starts_in_s']} s: pid {state['last_exit']['pid']}"
        words += f" {state['last_exit']['why']}"
    return words


def _launch() -> list[str]:
    """The command of a rank: this Python and this package, whatever lies in the working directory.

    Only where the package itself was found there, as in a checkout that is not installed, it has to be again.
    """
    from_here = sys.path and Path(sys.path[0] or ".").resolve() == PACKAGE_ROOT
    return [sys.executable, *([] if from_here else ["-P"]), "-m", "sglcache.server"]


def run(config: Config, ready: Callable[[dict[str, Any]], None] = lambda info: None) -> int:
    """Be the daemon in this process until a signal. The exit status; ConfigError, StartError: it can't start."""
    return Supervisor(config).run(ready)
