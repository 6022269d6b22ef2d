"""How many of Python's instructions an acquire and a release execute, on each side: the same on every machine.

Times depend on the machine and on what else it does. The instructions of the interpreter that a command's way through
client and daemon takes do not, and on both sides most of the time goes into them; so they can be held by a test.

The daemon's side is the real one from the socket to the index, in this process: connection, session, turn and index on
an event loop (uvloop) of their own, which runs only while a command is served. The client's is counted on a client
that is attached to a daemon.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
import uvloop

from sglcache.bench.harness import BenchError, Row
from sglcache.client import Client
from sglcache.config import Config
from sglcache.core.index import Index, IndexConfig
from sglcache.memory.geometry import Geometry
from sglcache.memory.rings import EventRing, LoadRing
from sglcache.server import connection
from sglcache.server.collector import Collector
from sglcache.server.explaining import Explaining
from sglcache.server.limits import Limits
from sglcache.server.listener import Peer
from sglcache.server.loads import Loads
from sglcache.server.numbers import Numbers
from sglcache.server.owner import Owner
from sglcache.server.sessions import Offer, Sessions
from sglcache.wire import control

PACKAGE = str(Path(__file__).parents[1]) + os.sep
WARM_UP = 8
TURNS = 10_000  # of a loop that does not come to what it was asked for


class Counts(NamedTuple):
    """Of one command, or of a few that came together."""

    by_part: Counter[str]  # instructions, by package of sglcache
    by_function: Counter[str]
    calls: Counter[str]  # how often each function was called

    @property
    def total(self) -> int:
        return self.by_part.total()


def counted(work: Callable[[], object]) -> Counts:
    """The instructions of ours that `work` executes, in this thread. Whoever traces it already sees nothing of it."""
    by_code: Counter[CodeType] = Counter()
    entries: Counter[CodeType] = Counter()

    def within(frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode":
            by_code[frame.f_code] += 1
        return within

    def entered(frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE) or frame.f_code.co_filename == __file__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        entries[frame.f_code] += 1
        return within

    before, turn_s = sys.gettrace(), connection.TURN_S
    connection.TURN_S = 60.0  # what is traced takes longer, and is to be served in one turn as it would be
    sys.settrace(entered)
    try:
        work()
    finally:
        sys.settrace(before)
        connection.TURN_S = turn_s
    by_part: Counter[str] = Counter()
    by_function: Counter[str] = Counter()

    for code, count in by_code.items():
        module = code.co_filename.removeprefix(PACKAGE)
        by_part[module.split(os.sep)[0].removesuffix(".py")] += count
        by_function[_name(code)] += count
    return Counts(by_part, by_function, Counter({_name(code): count for code, count in entries.items()}))


def calls(work: Callable[[], object]) -> Counter[str]:
    """The functions of C that `work` calls in this thread, by name: system calls are among them."""
    names: Counter[str] = Counter()

    def called(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            names[argument.__name__] += 1

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        work()
    finally:
        sys.setprofile(before)
    return names


class Served:
    """A runner's connection to an index, without a daemon around it. Owns all of it from construction to `close`."""

    def __init__(self, tokens: int = 2048, page_size: int = 16) -> None:
        self.tokens = np.random.default_rng(0).integers(0, 128_000, tokens, dtype=np.uint32).tobytes()
        self.loop = uvloop.new_event_loop()
        self.folder = tempfile.TemporaryDirectory(prefix="sglcache-bench-")
        self.numbers = Numbers(Path(self.folder.name) / "state.json", lambda: 1)
        self.index = Index(IndexConfig(page_size=page_size, num_pages=1 << 16, first_seq=self.numbers.first))
        self.owner = Owner(
            self.index,
            self.loop,
            stream=_Nowhere(),
            submit=_nothing,
            loads=Loads(1),
            numbers=self.numbers,
            collector=Collector(1 << 30),
            heartbeat_s=3600.0,  # neither this nor a cut falls into what is counted
            max_delay_s=3600.0,
        )
        config = Config()
        self.load_ring = LoadRing(1, 1)
        offer = Offer(1, "", Geometry.of(config).to_wire(), [], 0, 0, 1, 1)
        explaining = Explaining(self.owner, config.observe.requests, config.observe.max_size)
        limits = Limits(config.limits)
        self.sessions = Sessions(self.owner, self.load_ring, offer, _facts, dict, limits, explaining, _refuse)
        self.ring = EventRing(64)
        self.request = self.ticket = 0
        ours, self.socket = socket.socketpair()
        ours.setblocking(False)
        self.socket.setblocking(False)
        peer = Peer(ours, os.getpid(), os.pidfd_open(os.getpid()))
        peer.fds = [os.dup(self.ring.fd), os.dup(self.ring.doorbell)]
        self.owner.start()
        self.sessions.welcome(peer, control.Hello(control.PROTOCOL, "bench", "runner", num_events=64))
        (self.member,) = self.sessions.members
        self._until(lambda: self.member.transport is not None)
        self.socket.recv(1 << 16)

    def acquire(self) -> bytes:
        self.request += 1
        return control.frame(control.Acquire(self.request, self.tokens))

    def commit(self, lease: int) -> bytes:
        self.request += 1
        self.ticket += 1
        event, generation = self.ring.record_unrung()
        return control.frame(control.Commit(self.request, lease, self.ticket, 0, None, event, generation))

    def release(self, lease: int) -> bytes:
        self.ticket += 1
        event, generation = self.ring.record_unrung()
        return control.frame(control.Release(0, lease, self.ticket, 0, False, event, generation))

    def serve(self, *commands: bytes) -> list[Any]:
        """Send frames in one piece, and let the loop run until it has served them; the answers."""
        turns = self.owner.num_turns
        self.socket.send(b"".join(commands))
        self._until(lambda: self.owner.num_turns > turns)
        self._until(lambda: True)
        try:
            data = self.socket.recv(1 << 20)
        except BlockingIOError:
            return []
        answers = []
        while data:
            stop = control.HEADER + int.from_bytes(data[: control.HEADER], "big")
            answers.append(_decode(data[control.HEADER : stop]))
            data = data[stop:]
        return answers

    def settle(self) -> None:
        """Nothing is left to be told on the stream."""
        self.owner.flush()

    def _until(self, done: Callable[[], bool]) -> None:
        for _ in range(TURNS):
            self.loop.run_until_complete(asyncio.sleep(0))
            if done():
                return
        raise BenchError("a command was not served")

    def close(self) -> None:
        self.sessions.close()
        self._until(lambda: not self.sessions.members)
        self.owner.close()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()
        self.socket.close()
        self.ring.close()
        self.load_ring.close()
        self.numbers.close()
        self.folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def of_daemon(tokens: int = 2048, page_size: int = 16) -> dict[str, Counts]:
    """The daemon's side, for a cached prompt: an acquire, a release, and both in one piece, as they come from a runner
    that does nothing between a release and its next acquire. And a commit of all of a fresh prompt."""
    with Served(tokens, page_size) as served:
        (grant,) = served.serve(served.acquire())
        commit = served.commit(grant.lease)
        found = {"commit": counted(lambda: served.serve(commit))}
        served.serve(served.release(grant.lease))
        served.settle()
        for _ in range(WARM_UP):
            (grant,) = served.serve(served.acquire())
            served.serve(served.release(grant.lease))
        acquire, answers = served.acquire(), []
        found["acquire"] = counted(lambda: answers.extend(served.serve(acquire)))
        release = served.release(answers[0].lease)
        found["release"] = counted(lambda: served.serve(release))
        (grant,) = served.serve(served.acquire())
        both = served.release(grant.lease), served.acquire()
        found["release and acquire"] = counted(lambda: served.serve(*both))
        return found


def of_client(client: Client, tokens: object) -> dict[str, Counts]:
    """Of a client's side, for a prompt that is cached; `client` does not spin."""
    for _ in range(WARM_UP):
        client.acquire(tokens).release()  # type: ignore[arg-type]
    leases: list[Any] = []
    found = {"acquire": counted(lambda: leases.append(client.acquire(tokens)))}  # type: ignore[arg-type]
    found["release"] = counted(lambda: leases[0].release())
    return found


def told(counts: dict[str, Counts]) -> Row:
    """By command, in all and by part."""
    return {name: {"all": each.total, **dict(each.by_part.most_common())} for name, each in counts.items()}


def _name(code: CodeType) -> str:
    return f"{code.co_filename.removeprefix(PACKAGE)} {code.co_qualname}"


_decode = msgspec.msgpack.Decoder(control.Answer).decode


class _Nowhere:
    def append(self, seq: int, payload: bytes, heartbeat: bool = False) -> None: ...


def _nothing(copy: object) -> None: ...


def _facts(prove: bool) -> dict[str, Any]:
    return {}


def _refuse(name: str, written: object) -> list[dict[str, Any]]:
    raise BenchError("there are no tenants here")
