"""The daemon's first process: it starts every rank of this host, starts again those that die, and answers HTTP for all.

    bind HTTP ─► start the ranks, all at once ─► all ready: serve ─► SIGTERM or SIGINT: Drain to all ─► all have ended

Laws:

* A start is all or nothing: a rank that can't start, for its configuration or whatever, ends it, with the reason.
* Later a rank's death is its own: it is started again, after a wait that doubles from death to death and is forgotten
  once a life was healthy for long; nothing of the others' is touched. What the system chose for a rank (port 0) is the
  next life's as well, so that who follows the stream finds it.
* Nothing here waits for a rank. Ranks say by themselves that they are alive; one that hangs is known by its silence.
* No rank outlives this process (`rank.serve` sees to it), however that ends. A second signal ends all at once.

Descriptors that a rank has kept here (`channel.Keep`) go to its next life: what they are is no business of this part.
Neither torch nor zmq nor numpy is loaded here: what a rank dies of shall not take this process along.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sglcache import paths
from sglcache.config import Config
from sglcache.errors import ConfigError, NotInstalled, SglcacheError, StartError
from sglcache.server import doors, room
from sglcache.server.child import SIGNALS, Child
from sglcache.server.notify import notify
from sglcache.server.pages import RankPages
from sglcache.server.plan import plan

if TYPE_CHECKING:
    from sglcache.server.http import HttpServer
    from sglcache.server.indexers import Indexers

logger = logging.getLogger("sglcache.supervisor")

EXIT_FAILED = 70  # sysexits' EX_SOFTWARE: a rank did not end in good order
PACKAGE_ROOT = Path(__file__).parents[2]


class Timing(NamedTuple):
    """Seconds."""

    beat: float = 0.5  # between two signs of life
    stuck: float = 2.0  # of silence, after which a rank is said to be stuck
    answer: float = 1.0  # that a rank has for a question
    drain: float = 15.0  # that the ranks have to end; their copies alone may take 10
    first_wait: float = 0.1  # before the start after a first death
    longest_wait: float = 30.0
    healthy: float = 60.0  # a life of so long forgets the deaths before it


class Supervisor:
    """Owns the ranks of one host. `run` is its life."""

    def __init__(self, config: Config, *, launch: Sequence[str] | None = None, timing: Timing | None = None) -> None:
        """ConfigError: the ranks can't be there side by side. `launch`: the command that a descriptor is added to."""
        self.config = config
        self.launch = list(launch) if launch is not None else python("-m", "sglcache.server")
        self.timing = timing or Timing()
        self.children = [Child(seat, self.timing.stuck, self._ready, self._died) for seat in plan(config)]
        self.path = paths.supervisor_path(Path(self.children[0].seat.socket))
        self.state = "starting"  # then ok, draining
        self._url: str | None = None
        self._error: SglcacheError | None = None  # why the start failed
        self._code = 0
        self._stop = False  # a signal was there, or an error of our own
        self._changed = asyncio.Event()  # something that `main` may wait for
        self._deaths = dict.fromkeys((child.seat.offset for child in self.children), 0)  # in a row
        self._waiting: dict[int, asyncio.TimerHandle] = {}  # for the next life, by offset
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
        for warning in room.served(self.config, room.machine()):
            logger.warning("%s", warning)
        with contextlib.ExitStack() as undo:
            socks = self._bind(undo)
            for number in SIGNALS:
                loop.add_signal_handler(number, self._signalled, number)
            for child in self.children:
                undo.callback(child.close)
                try:
                    self._spawn(child)
                except OSError as exc:
                    raise StartError(f"{child.seat} can't be started: {exc}", rank=child.seat.offset) from exc
            pages = RankPages(self.config, self.children, self._url, lambda: self.state, self.timing.answer)
            serving = loop.create_task(self._serve(pages, socks))
            serving.add_done_callback(self._serves)
            if self.config.http.enabled:
                await serving
            if self.config.events.enabled and self.config.events.dynamo_indexers:
                from sglcache.server.indexers import Indexers

                self._indexers = Indexers(self.config)
                self._tell_indexers()
            try:
                await self._until(lambda: self.state == "ok")
                if self.state == "ok" and not self._stop:
                    ready(await pages.server_info())
                    notify(f"READY=1\nSTATUS=serving {len(self.children)} ranks")
                    self._watch_silence(loop, set())
                    await self._until(lambda: False)
                await self._drain()
            finally:
                if self._indexers is not None:
                    await self._indexers.close()
                if not serving.done():
                    serving.cancel()
                elif serving.exception() is None:
                    await serving.result().stop()
        if self._error is not None:
            raise self._error
        return self._code

    def _bind(self, undo: contextlib.ExitStack) -> list[socket.socket]:
        """The sockets for HTTP, before anything is started."""
        sock, lock = doors.unix(self.path, "control.socket")
        undo.callback(doors.close, sock, self.path, lock)
        socks = [sock]
        http = self.config.http
        if http.enabled:
            socks.append(undo.enter_context(doors.tcp(http.host, http.port, "http")))
            self._url = doors.url(http.host, socks[-1].getsockname()[1])
        return socks

    async def _serve(self, pages: RankPages, socks: Sequence[socket.socket]) -> HttpServer:
        """Serve the pages: at once with `[http]`, else from the first question on; few ask the unix socket, or none."""
        if not self.config.http.enabled:
            await _visitor(socks[0])
        from sglcache.server.http import HttpServer  # not before the ranks are on their way: it takes 0.2 s

        server = HttpServer(pages, socks, self.config.http.names)
        await server.start()
        return server

    def _serves(self, task: asyncio.Task[HttpServer]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._unexpected(task.get_loop(), {"message": "the pages can't be served", "exception": error})

    async def _until(self, so: Callable[[], bool]) -> None:
        """Wait for it, for a signal, or for the start to fail."""
        while not (so() or self._stop or self._error):
            self._changed.clear()
            await self._changed.wait()

    async def _drain(self) -> None:
        """Have every rank end, in good order while there is time."""
        self.state = "draining"
        notify("STOPPING=1")
        for timer in self._waiting.values():
            timer.cancel()
        for child in self.children:
            child.drain()
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

    def _signalled(self, number: int) -> None:
        if self._stop:
            for child in self.children:
                child.kill()
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

    # -- the ranks' lives ---------------------------------------------------------------------------------

    def _spawn(self, child: Child) -> None:
        child.spawn(self.launch, self.config.model_dump(mode="json", exclude_unset=True), self._url, self.timing.beat)

    def _ready(self, child: Child) -> None:
        if child.restarts:
            logger.warning("%s is back, pid %s", child.seat, child.process.pid if child.process is not None else None)
        if self.state == "starting" and all(each.state == "ok" for each in self.children):
            self.state = "ok"
        self._tell_indexers()
        self._changed.set()

    def _tell_indexers(self) -> None:
        if self.state == "ok" and self._indexers is not None:
            self._indexers.register([each.seat for each in self.children])

    def _died(self, child: Child) -> None:
        assert child.last_exit is not None
        why = child.last_exit["why"]
        if self.state == "draining":
            if child.last_exit["status"] and self._error is None:
                logger.error("%s %s while draining", child.seat, why)
                self._code = EXIT_FAILED
            child.become("ended")
        elif self.state == "starting":
            self._error = self._error or self._refusal(child)
            child.become("ended")
        else:
            healthy = child.state == "ok" and time.monotonic() - child.since >= self.timing.healthy
            deaths = self._deaths[child.seat.offset] = 1 if healthy else self._deaths[child.seat.offset] + 1
            wait_s = min(self.timing.first_wait * 2.0 ** min(deaths - 1, 60), self.timing.longest_wait)
            logger.error("%s, pid %d, %s; it starts again in %g s", child.seat, child.last_exit["pid"], why, wait_s)
            self._wait(child, wait_s)
        self._changed.set()

    def _wait(self, child: Child, wait_s: float) -> None:
        child.become("waiting")
        child.next_at = child.since + wait_s
        self._waiting[child.seat.offset] = asyncio.get_running_loop().call_later(wait_s, self._again, child)

    def _again(self, child: Child) -> None:
        child.restarts += 1
        try:
            self._spawn(child)
        except OSError as exc:
            logger.error("%s can't be started: %s", child.seat, exc)
            child.restarts -= 1
            self._wait(child, self.timing.longest_wait)

    def _refusal(self, child: Child) -> SglcacheError:
        """Why there is no start, of a rank that ended before it served."""
        assert child.last_exit is not None
        where = f"{child.seat}: "
        failure = child.failure
        if failure is not None and failure.code in (ConfigError.code, NotInstalled.code):
            return SglcacheError.from_code(failure.code, where + failure.message, failure.facts)
        log = "" if failure is not None else "; the log says why"
        return StartError(f"{where}it {child.last_exit['why']}, before it served{log}", rank=child.seat.offset)

    def _watch_silence(self, loop: asyncio.AbstractEventLoop, silent: set[int]) -> None:
        """Log when a rank falls silent, and when it is heard again; `silent`: those that are known to be."""
        for child in self.children:
            offset = child.seat.offset
            if child.stuck and offset not in silent:
                logger.error("%s is stuck: no sign of life for %.1f s", child.seat, child.silent_s())
                silent.add(offset)
            elif offset in silent and not child.stuck:
                silent.remove(offset)
                if child.state == "ok":
                    logger.warning("%s is alive again", child.seat)
        loop.call_later(self.timing.beat, self._watch_silence, loop, silent)


async def _visitor(sock: socket.socket) -> None:
    """Wait until somebody connects; whoever listens then has him to accept."""
    loop, came = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, came.set)
    try:
        await came.wait()
    finally:
        loop.remove_reader(sock)


def python(*arguments: str) -> list[str]:
    """A command of this Python and this package, whatever lies in the working directory.

    Only where the package itself was found there, as in a checkout that is not installed, it has to be again.
    """
    from_here = sys.path and Path(sys.path[0] or ".").resolve() == PACKAGE_ROOT
    return [sys.executable, *([] if from_here else ["-P"]), *arguments]
