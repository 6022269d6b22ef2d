"""Mooncake's store as the third tier: pages of many hosts, found by all of them.

The client library lives in a process of its own (mooncake_process.py, which says why); here is what the rank sees of
it. Calls go there in batches, and wait for the answer or for the process's death. A batch that is not answered in
`PATIENCE * rpc_timeout_s` is the process's end: a new one takes its place, after a wait that doubles. While the master
does not answer all is missed at once. So nothing here hangs for longer, and a slot is written by nobody after its call.

Not exact: Mooncake evicts by itself, and a host that dies takes its pages with it.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from queue import SimpleQueue

import msgspec

from sglcache.core.effects import Run
from sglcache.core.key import ROOT
from sglcache.errors import BadRequest, ConfigError, NotInstalled, ProtocolError
from sglcache.storage.host import HostPages
from sglcache.storage.mooncake_words import (
    MAX_WORD,
    Answer,
    Ask,
    Close,
    FromProcess,
    Loaded,
    Options,
    Start,
    State,
    ToProcess,
    What,
    from_process,
)
from sglcache.storage.page import Form, Identity, Reason
from sglcache.storage.store import Cleared, Got, Put, Stats, Stop

log = logging.getLogger(__name__)

BATCH_BYTES = 16 << 20
BATCH_PAGES = 128
LOAD_S = 20.0  # for the library to be loaded
CLOSE_S = 4.0
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 15.0  # before the next process
GOOD_S = 30.0  # a process that lived so long begins the waits anew
TICK_S = 0.25
LAUNCH = (sys.executable, "-m", "sglcache.storage.mooncake_process")
PATIENCE = 8
RPC_TIMEOUT = "MC_RPC_TIMEOUT_MS"  # the client's environment; 30 s without it
LIBRARIES = "libibverbs1 libcurl4 libnuma1"


class _Waiting:
    """An Ask under way."""

    __slots__ = ("answer", "deadline")

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.answer: SimpleQueue[Answer | None] = SimpleQueue()  # None: the process is dead


class MooncakeStore:
    """A `Store` in Mooncake. `pages` must be memfds; `num_threads` calls go on at once."""

    name = "mooncake"
    exact = False

    def __init__(
        self,
        options: Options,
        identity: Identity,
        pages: HostPages,
        *,
        num_threads: int = 4,
        rpc_timeout_s: float = 5.0,
        launch: Sequence[str] = LAUNCH,
        env: Mapping[str, str] | None = None,
    ) -> None:
        if pages.payload_bytes != identity.payload_bytes:
            raise BadRequest(f"pages of {pages.payload_bytes} bytes, and an identity of {identity.payload_bytes}")
        if len(pages.fds) != len(pages.regions):
            raise BadRequest("Mooncake's process can map host pages only where they are memfds")
        self.form = Form(identity)
        self._pages = pages
        # The client gives a call to its master up by itself, which costs no more than misses. To end it costs the pages
        # that are in its memory, so it comes last.
        self._timeout_s = PATIENCE * rpc_timeout_s
        self._launch = list(launch)
        self._env = {RPC_TIMEOUT: str(max(1, int(rpc_timeout_s * 1000))), **os.environ, **(env or {})}
        self._start = Start(
            options,
            identity,
            pages.num_pages,
            list(pages.fds),
            [region.nbytes for region in pages.regions],
            [(*piece,) for piece in pages.pieces],
            num_threads,
        )
        self.batch_pages = max(1, min(BATCH_PAGES, BATCH_BYTES // max(1, identity.payload_bytes)))
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # around what is under way; held for no I/O
        self._sending = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}
        self._connection: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._connected = False
        self._ending = threading.Event()
        self._loaded: SimpleQueue[Loaded] = SimpleQueue()
        self._lives = 0
        # One thread for all lives: the kernel ends a process with the thread that started it.
        self._keeper = threading.Thread(target=self._keep, name="sglcache-mooncake", daemon=True)

    # -- a Store ------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Start the process and see that it can load the library. It looks for the master by itself.

        NotInstalled: the library is not there. ConfigError: it can't be loaded.
        """
        self._keeper.start()
        try:
            loaded = self._loaded.get(timeout=LOAD_S)
        except Exception:  # queue.Empty: the machine is slow
            log.warning("Mooncake's process takes long to start")
            return
        if loaded.error is None:
            return
        self.close()
        if loaded.missing:
            raise NotInstalled(
                f"storage.kind = mooncake needs Mooncake's client ({loaded.error}); pip install 'sglcache[mooncake]'",
                module="mooncake",
                extra="mooncake",
            )
        raise ConfigError(
            f"storage: Mooncake's client can't be loaded: {loaded.error}; on Debian and Ubuntu: apt-get install "
            f"{LIBRARIES}",
            path="storage.kind",
        )

    def exists(self, run: Run) -> int:
        num_pages = self.form.num_pages(run)
        for first in range(0, num_pages, BATCH_PAGES):
            part = self.form.part(run, first, BATCH_PAGES)
            answer = self._ask("exists", part, b"")
            if answer.num_pages < self.form.num_pages(part):
                return first + answer.num_pages
        return num_pages

    def put(self, run: Run, slots: Sequence[int], stop: Stop) -> Put:
        num_pages = self.form.num_pages(run)
        mask, new = bytearray(), 0
        reason: Reason | None = None
        for first in range(0, num_pages, self.batch_pages):
            if stop():
                reason = "cancelled"
                break
            part, here = self._slice(run, slots, first)
            answer = self._ask("put", part, here)
            mask += answer.mask
            new += answer.num_pages
            reason = answer.reason
            if reason is not None:
                break
        return Put(bytes(mask.ljust(num_pages, b"\0")), new, b"", reason)

    def get(self, run: Run, slots: Sequence[int], stop: Stop) -> Got:
        num_pages = self.form.num_pages(run)
        for first in range(0, num_pages, self.batch_pages):
            if stop():
                return Got(first, "cancelled")
            answer = self._ask("get", *self._slice(run, slots, first))
            if answer.reason is not None:
                return Got(first + answer.num_pages, answer.reason, answer.bad)
        return Got(num_pages)

    def discard(self, digest: bytes) -> bytes:
        self._ask("discard", Run(ROOT, None, digest, b""), b"")
        return b""

    def listing(self) -> Iterator[list[Run]]:
        yield from ()

    def clear(self) -> Cleared:
        """Remove the pages of this identity, of all hosts, as far as the master lets go of them."""
        answer = self._ask("clear", Run(ROOT, None, b"", b""), b"")
        return Cleared() if answer.reason is None else Cleared(left=None, why="Mooncake's master did not do it")

    def stats(self) -> Stats:
        return Stats(connected=self._connected)

    def interrupt(self) -> None:
        """End the process, and with it all calls."""
        self._ending.set()
        with self._lock:
            process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Leave the store; at once, whatever its process does. Harmless when repeated."""
        self._ending.set()
        self._say(Close(), 0.1)
        if self._keeper.is_alive():
            self._keeper.join(CLOSE_S)
        if self._keeper.is_alive():
            self.interrupt()
            self._keeper.join(CLOSE_S)

    # -- asking -------------------------------------------------------------------------------------------

    def _slice(self, run: Run, slots: Sequence[int], first: int) -> tuple[Run, bytes]:
        here = array("i", slots[first : first + self.batch_pages])
        for slot in here:
            if not 0 <= slot < self._pages.num_pages:
                raise BadRequest(f"slot {slot} is not in 0..{self._pages.num_pages - 1}", slot=slot)
        return self.form.part(run, first, len(here)), here.tobytes()

    def _ask(self, what: What, run: Run, slots: bytes) -> Answer:
        """Wait for the process's answer, or its death."""
        number = next(self._numbers)
        ask = Ask(number, what, (*run.namespace,), run.before, run.digests, run.tokens, slots)
        waiting = _Waiting(time.monotonic() + self._timeout_s)
        failed = Answer(number, reason="failed", mask=bytes(len(slots) // 4) if what == "put" else b"")
        with self._lock:
            if not self._connected:
                return failed
            self._waiting[number] = waiting
        if not self._say(ask, self._timeout_s):
            with self._lock:
                self._waiting.pop(number, None)
            return failed
        answer = waiting.answer.get()
        if answer is None:
            return failed
        num_pages = 1 if what == "discard" else self.form.num_pages(run)
        if not 0 <= answer.num_pages <= num_pages or (what == "put" and len(answer.mask) != num_pages):
            return failed  # that answers something else
        return answer

    def _say(self, word: ToProcess, timeout_s: float) -> bool:
        """Whether it went out. To a process that is stopped it waits, until that is killed for being late."""
        connection = self._connection
        if connection is None or not self._sending.acquire(timeout=timeout_s):
            return False
        try:
            connection.send_bytes(msgspec.msgpack.encode(word))
        except OSError:
            return False
        finally:
            self._sending.release()
        return True

    # -- the process --------------------------------------------------------------------------------------

    def _keep(self) -> None:
        wait = FIRST_WAIT_S
        while not self._ending.is_set():
            began = time.monotonic()
            try:
                code, said = self._live()
            except OSError as exc:
                code, said = None, [str(exc)]
            if self._ending.is_set():
                break
            if time.monotonic() - began > GOOD_S:
                wait = FIRST_WAIT_S
            log.warning("Mooncake's process ended (%s); a new one follows in %.1f s. It said: %s", code, wait, said)
            self._ending.wait(wait)
            wait = min(2 * wait, LONGEST_WAIT_S)

    def _live(self) -> tuple[int | None, list[str]]:
        """One process, from its start to its end; its exit code and last words."""
        ours, theirs = socket.socketpair()
        tail: deque[str] = deque(maxlen=8)
        with theirs:
            process = subprocess.Popen(
                [*self._launch, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno(), *self._pages.fds, *self._pages.holds],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._env,
            )
        self._lives += 1
        listener = threading.Thread(target=_listen, args=(process, tail), name="sglcache-mooncake-log", daemon=True)
        listener.start()
        connection = Connection(ours.detach())
        with self._lock:
            self._process, self._connection = process, connection
        self._say(self._start, self._timeout_s)
        if self._ending.is_set():
            self._say(Close(), self._timeout_s)
        try:
            self._hear(process, connection)
        finally:
            with self._lock:
                self._connection, self._connected = None, False
            process.kill()
            process.wait()
            connection.close()
            listener.join(CLOSE_S)
            with self._lock:  # nobody writes into a slot any more
                waiting, self._waiting = self._waiting, {}
            for each in waiting.values():
                each.answer.put(None)
        return process.returncode, list(tail)

    def _hear(self, process: subprocess.Popen[bytes], connection: Connection) -> None:
        """Take what the process says until it ends, or is late, or has not gone CLOSE_S after it was told to."""
        gone_by = None
        while True:
            try:
                if connection.poll(TICK_S):
                    self._take(from_process(connection.recv_bytes(MAX_WORD)))
                    continue
            except (EOFError, OSError):
                return
            except ProtocolError as exc:
                log.error("Mooncake's process is ended: %s", exc.message)
                return
            now = time.monotonic()
            with self._lock:
                late = [number for number, each in self._waiting.items() if each.deadline < now]
            if late:
                log.warning("Mooncake did not answer in %.0f s; its process is ended", self._timeout_s)
                return
            if self._ending.is_set():
                gone_by = gone_by or now + CLOSE_S / 2
                if now > gone_by:
                    return

    def _take(self, word: FromProcess) -> None:
        if isinstance(word, Loaded):
            self._loaded.put(word)
        elif isinstance(word, State):
            log.info("Mooncake's master %s", "can be asked" if word.connected else "does not answer")
            with self._lock:
                self._connected = word.connected
        else:
            with self._lock:
                waiting = self._waiting.pop(word.number, None)
            if waiting is not None:
                waiting.answer.put(word)


def _listen(process: subprocess.Popen[bytes], tail: deque[str]) -> None:
    """The library writes to its standard error, a lot of it."""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            text = line.decode(errors="replace").rstrip()
            log.debug("mooncake: %s", text)
            if text[:1] in "EFWT":
                tail.append(text)
