"""What runner, daemon and supervisor say to each other, over unix sockets."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import random
import select
import shutil
import socket
import struct
import tempfile
import threading
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from sglcache.client import Client, connection
from sglcache.client.connection import Pending
from sglcache.client.lease import Lease
from sglcache.config import LimitsConfig
from sglcache.core import invariants
from sglcache.core.effects import Copy
from sglcache.core.index import Index, IndexConfig
from sglcache.core.reuse import Reuse
from sglcache.errors import ConfigError, ProtocolError, SglcacheError, UnknownSession
from sglcache.memory.mapping import create_memfd
from sglcache.memory.rings import LoadRing
from sglcache.server import checks
from sglcache.server.channel import Answer as RankAnswer
from sglcache.server.channel import Ask, Beat, Channel, Drain, Failed, Keep, Long, Ready, Refusal, Start
from sglcache.server.child import Child
from sglcache.server.collector import Collector
from sglcache.server.explaining import Explaining
from sglcache.server.limits import Limits
from sglcache.server.listener import Listener, Peer
from sglcache.server.loads import Loads
from sglcache.server.numbers import Numbers
from sglcache.server.owner import Owner
from sglcache.server.plan import Seat
from sglcache.server.sessions import ADMIN, HANDLERS, OBSERVER, RUNNER, SCHEDULER, Member, Offer, Sessions
from sglcache.testing.fuzz import Decoder
from sglcache.units import SessionId
from sglcache.wire import control
from sglcache.wire.events import decode_batch

PAGE = 4  # tokens
PAGES = 64
TOKENS = struct.pack("<40I", *range(40))
GEOMETRY = control.Geometry(PAGE, PAGES, 2, 2, 8, 8, "float16", "page_first", 1, 128, "page_first", 0, 0)
encode = msgspec.msgpack.encode


def commands() -> list[control.Frame]:
    """One of each, with all its fields."""
    return [
        control.Acquire(1, TOKENS, "l", "x", "s", "chat", "t", 1, 40, 8, None, None, "none", 1.0),
        control.Acquire(2, TOKENS),
        control.Extend(3, [control.Extension(1, TOKENS[:16], 4, 60), control.Extension(2)]),
        control.Commit(4, 1, 1, 0, 20, 0, 1),
        control.Commit(5, 2, 2, 0, None, 0, 1, ((0, 8, 1),), 4),
        control.Release(6, 1, 3, 0, False, 0, 1),
        control.Cancel(7, 2),
        control.Recorded(1, 0, 1),
        control.Peek(8, TOKENS, "l"),
        control.Prefetch(9, TOKENS, None, None, None, "timeout", 0.1),
        control.Pin(10, TOKENS, "me", 5.0),
        control.Unpin(11, "me"),
        control.Clear(12, "HOST"),
        control.Ping(13),
        control.Status(14, True),
        control.Dump(15, "DEVICE"),
        control.Digest(16),
        control.Announce(17),
        control.SetTenant(19, "t", 8, "50%", None, "none"),
        control.Bye(18, 0, 1),
        control.EvictSession(19, 2, True),
        control.Check(20, "books"),
        control.Acquire(21, TOKENS, tenant="t", wait_s=0.01),
        control.Extend(22, [control.Extension(1, TOKENS)], 0.01),
        control.Reuse(23),
        control.Acquire(24, TOKENS, request_id="mine"),
        control.Explain(25, TOKENS, "l", None, None, 40),
        control.Explain(26, name="mine"),
        control.Explain(27, last=3),
    ]


def answers() -> list[control.Frame]:
    """One of each."""
    return [
        control.Granted(1, 1, 8, 4, bytes(16), (0, 1), ((0, bytes(4), None),), (8,)),
        control.Extended(2, [bytes(8), control.Fault("no_space", "no room", {"need": 1})], [(bytes(4),)]),
        control.CommitDone(3, 8, 0, bytes(8), 1, 1, ((0, bytes(4), 1),)),
        control.Done(4, {"matched_tokens": 8, "pages": {"DEVICE": 1}}),
        control.Failure(5, "no_space", "no room", {"need": 1, "free": 0}),
        control.Failure(0, "protocol", "no", {}),
    ]


class Loop(asyncio.SelectorEventLoop):
    """A loop that is turned by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[BaseException] = []
        self.set_exception_handler(
            lambda _, context: self.errors.append(context.get("exception") or AssertionError(context))
        )

    def turn(self, times: int = 1) -> None:
        """AssertionError, or whatever a callback raised."""
        for _ in range(times):
            self.call_soon(self.stop)
            self.run_forever()
        if self.errors:
            raise self.errors.pop()


class _Wire:
    """As much of a transport as a `Connection` asks for; what was written is kept."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.closed = False

    def set_write_buffer_limits(self, _: int) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...

    def is_closing(self) -> bool:
        return self.closed

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    abort = close


class Commands(Decoder):
    """The commands of a live connection, in any pieces: sessions, owner and index of a rank, over no socket.

    Beside it a runner holds a lease and goes on; the books are proved.
    """

    name = "commands"
    weight = 1.5
    form = "frames"
    words = (
        b"\xc4\x10",
        b"\x94",
        b"\xc0",
        b"\xa6DEVICE",
        b"\xa4HOST",
        *(type(each).__name__.encode() for each in commands()),
    )

    def __init__(self) -> None:
        super().__init__()
        self.corpus = [encode(each) for each in commands()]
        self.folder = Path(tempfile.mkdtemp())
        self.loop = Loop()
        self.now = 0.0
        numbers = self.numbers = Numbers(self.folder / "state.json", lambda: 1)
        index = self.index = Index(
            IndexConfig(page_size=PAGE, num_pages=PAGES, host_pages=2 * PAGES, first_seq=numbers.first, departures=16)
        )
        self.copies: list[Copy] = []
        self.owner = Owner(
            index,
            self.loop,
            stream=self,
            submit=self.copies.append,
            loads=Loads(4),
            numbers=numbers,
            collector=Collector(1 << 30),
            max_delay_s=0.0,
            heartbeat_s=3600.0,
        )
        self.ring = LoadRing(4, 2)
        offer = Offer(1, "fuzz", GEOMETRY, [], 0, 0, 1, 1)
        self.sessions = Sessions(
            self.owner,
            self.ring,
            offer,
            lambda _: {},
            dict,
            Limits(LimitsConfig()),
            Explaining(self.owner, 8, 1 << 16),
            lambda name, written: [],
            self.checks,
            Reuse(self.index.keys, 1, 64, 3600.0),
        )
        self.sessions.evict = self.evict  # type: ignore[method-assign]
        self.owner.start()
        self.good, self.wire = self.attach()
        self.say(self.good, control.Acquire(1, struct.pack("<8I", *range(9000, 9008)), cache_salt="good"))
        self.bad: Member | None = None

    def append(self, seq: int, payload: bytes, heartbeat: bool = False) -> None:
        """The stream: what is told must be readable."""
        decode_batch(payload)

    def attach(self, role: str = RUNNER) -> tuple[Member, _Wire]:
        ours, theirs = socket.socketpair()
        theirs.close()
        peer = Peer(ours, os.getpid(), os.pidfd_open(os.getpid()))
        if role == RUNNER:
            fd = create_memfd("fuzz", 64)
            os.pwrite(fd, b"\xff" * 63, 0)  # every event is done
            peer.fds = [fd, os.eventfd(0)]
        try:
            member = self.sessions._attach(peer, control.Hello(control.PROTOCOL, "fuzz", role, num_events=7))
        finally:
            peer.close()
        wire = _Wire()
        member.connection_made(cast(asyncio.BaseTransport, wire))
        return member, wire

    def checks(self) -> Mapping[str, checks.Check]:
        return {
            "books": lambda found: checks.books(self.index, found),
            "digests": lambda found: checks.digests(self.index, found),
        }

    def evict(self, id: SessionId, kill: bool, why: str) -> dict[str, Any]:
        """As an admin may, but for the one who is to go on; and the process is ours, so nothing is killed."""
        if id == self.good.id:
            raise UnknownSession("it is not for you")
        return Sessions.evict(self.sessions, id, False, why)

    def say(self, member: Member, command: control.Frame) -> None:
        member.data_received(control.frame(command))

    def die(self, member: Member) -> None:
        """Its socket ends, and its process."""
        member.connection_lost(None)
        if member.session is not None and not member.gone:
            self.sessions._died(member)

    def feed(self, data: bytes) -> None:
        pieces = random.Random(zlib.crc32(data))
        if self.bad is None:
            self.bad, self.bad_wire = self.attach(pieces.choice((*[RUNNER] * 8, SCHEDULER, OBSERVER, ADMIN, ADMIN)))
        member, wire = self.bad, self.bad_wire
        rest = data
        while rest:
            size = len(rest) if pieces.random() < 0.7 else pieces.randrange(1, len(rest) + 1)
            member.data_received(rest[:size])
            rest = rest[size:]
        self.loop.turn(2)
        while self.copies:
            self.owner.copied(self.copies.pop(0).ticket, pieces.random() < 0.9)
        if self.owner._expiring is not None and pieces.random() < 0.05:
            self.index.expire(1e18)
            self.owner.pins_changed()
        written, wire.written = bytes(wire.written), bytearray()
        thrown_out = wire.closed
        if thrown_out or member._rest is not None or not member.handlers or pieces.random() < 0.02:
            self.die(member)
            self.bad = None
        if thrown_out:
            last = None
            while written:
                size = int.from_bytes(written[:4], "big")
                last, written = written[4 : 4 + size], written[4 + size :]
            failure = msgspec.msgpack.decode(last or b"", type=control.Answer)
            assert isinstance(failure, control.Failure), f"thrown out with {failure}"
            raise SglcacheError.from_code(failure.code, failure.message, failure.facts)

    def check(self) -> None:
        if self.bad is not None:
            self.die(self.bad)
            self.bad = None
        self.loop.turn(3)
        while self.copies:
            self.owner.copied(self.copies.pop(0).ticket, True)
        found = invariants.check(self.index)
        assert not found, found
        for pool in self.index.pools:
            assert not pool.fenced, f"{pool.fenced} pages are fenced, and nobody holds them"
        leases = list(self.index.leases.values())
        assert len(leases) == 1, f"{len(leases)} leases, and one is held"
        self.wire.written.clear()
        self.say(self.good, control.Ping(77))
        answer = msgspec.msgpack.decode(self.wire.written[4:], type=control.Answer)
        assert answer == control.Done(77), f"a runner beside it was answered {answer}"

    def close(self) -> None:
        self.owner.close()
        self.sessions.close()
        self.ring.close()
        self.numbers.close()
        self.loop.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Hellos(Decoder):
    """The first frame, with its descriptors, on a raw socket."""

    name = "hello"
    weight = 0.4
    form = "frames"
    words = (b"runner", b"worker", b"observer", b"scheduler", b"\xa5Hello")

    def __init__(self) -> None:
        super().__init__()
        self.corpus = [
            encode(control.Hello(control.PROTOCOL, "fuzz", role, bytes(16), 0, 7)) for role in (*HANDLERS, "runner")
        ]
        self.loop = Loop()
        self.said: list[control.Hello] = []
        self.listener = Listener(self.loop, Path("/nonexistent"), self.welcome)

    def welcome(self, peer: Peer, hello: control.Hello) -> None:
        self.said.append(hello)
        peer.close()

    def feed(self, data: bytes) -> None:
        dice = random.Random(zlib.crc32(data))
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            self.listener.hear(ours)
            fds = [0] * dice.choice((0, 2, 2, 3, 10))
            rest = data[:100_000] or b"\0"
            theirs.setblocking(False)
            while rest:
                size = dice.randrange(1, len(rest) + 1) if dice.random() < 0.3 else len(rest)
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
                try:
                    sent = theirs.sendmsg([rest[:size]], rights)
                except OSError:  # it closed, or its buffer is full of what is not read
                    break
                fds, rest = [], rest[sent:]
                self.loop.turn()
            for hearing in list(self.listener.hearing):
                hearing.expired()
            if self.said:
                self.said.clear()
                return
            theirs.setblocking(True)
            got = theirs.recv(1 << 16)
        refusal = msgspec.msgpack.decode(got[4:], type=control.Welcome | control.Refusal)
        assert isinstance(refusal, control.Refusal), refusal
        raise SglcacheError.from_code(refusal.code, refusal.message, refusal.facts)

    def close(self) -> None:
        self.listener.close()
        self.loop.close()


class _Daemon:
    """Listens on a unix socket, and answers the next connection with given bytes and descriptors."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "daemon.sock"
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.bind(os.fspath(self.path))
        self.sock.listen(8)

    def answer(self, data: bytes, fds: Sequence[int], then: list[socket.socket]) -> threading.Thread:
        """It says no more once the other side has spoken again or is gone, or if the first frame is not whole."""
        # A client that lost its connection asked once more who serves: that one is not the next to be answered.
        while select.select([self.sock], [], [], 0)[0]:
            self.sock.accept()[0].close()

        def work() -> None:
            sock, _ = self.sock.accept()
            sock.recv(4096)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            with contextlib.suppress(OSError):
                sent = sock.sendmsg([data[:1]], rights) if data else 0
                sock.sendall(data[sent:])
                if len(data) >= 4 + int.from_bytes(data[:4], "big"):  # who was welcomed says goodbye
                    sock.recv(4096)
                sock.shutdown(socket.SHUT_WR)
            then.append(sock)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread


class Welcomes(Decoder):
    """A daemon's first answer, by a client."""

    name = "welcome"
    weight = 0.02
    form = "msgpack"
    words = (b"page_first", b"layer_first", b"float16", b"window", b"mamba")

    def __init__(self) -> None:
        super().__init__()
        window = control.CompanionHandle("window", GEOMETRY, [control.PoolHandle(0, 1 << 16, 1)], 8)
        state = control.StateGeometry(
            8, 2, (control.StateForm("conv", (2, 4), "float32"),), "page_first", 1, 0, "page_first"
        )
        mamba = control.CompanionHandle("mamba", state, [control.PoolHandle(0, 1 << 16, 1)], 0, 8)
        pool = control.PoolHandle(0, 1 << 16, 0)
        cards: list[control.Pool] = [
            control.CudaPoolHandle(0, 1 << 16, 0, bytes(16), 2 << 20),
            control.CudaIpcHandle(0, 1 << 16, bytes(16), bytes(64), 0),
        ]
        self.corpus = [
            encode(control.Welcome(control.PROTOCOL, 1, "1", bytes(16), GEOMETRY, [first], 4, 0, 0, 1, 1, companions))
            for first in (pool, *cards)
            for companions in ([], [window], [mamba], [window, mamba])
        ] + [encode(control.Refusal("no_space", "no", {"need": 1}))]
        self.folder = Path(tempfile.mkdtemp())
        self.daemon = _Daemon(self.folder)
        self.memfd, self.bell = create_memfd("fuzz", 1 << 16), os.eventfd(0)
        # A client that finds its connection at an end asks once more who serves, and nobody here answers that.
        connection.PROBE_TIMEOUT_S = 1.0

    def feed(self, data: bytes) -> None:
        dice = random.Random(zlib.crc32(data))
        num_pools = dice.randrange(4)
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            told = msgspec.msgpack.decode(data, type=control.Welcome)
            if dice.random() < 0.8:
                num_pools = len(told.pools) + sum(len(each.pools) for each in told.companions)
        fds = [self.memfd] * min(num_pools + 1, 250) + [self.bell]
        data = len(data).to_bytes(4, "big") + data
        if dice.random() < 0.1:  # another's words, or too many
            data = data[: dice.randrange(len(data) + 1)] if dice.random() < 0.5 else data * 2
        kept: list[socket.socket] = []
        thread = self.daemon.answer(data, fds, kept)
        try:
            client = Client(self.daemon.path, name="fuzz")
            try:
                _ = client.pools
                for pool in (client.window, client.mamba):
                    if pool is not None:
                        _ = pool.pools
            except ConfigError:
                pass
            finally:
                client.close()
        finally:
            thread.join()
            for each in kept:
                each.close()

    def close(self) -> None:
        self.daemon.sock.close()
        for fd in (self.memfd, self.bell):
            with contextlib.suppress(OSError):
                os.close(fd)
        shutil.rmtree(self.folder, ignore_errors=True)


class Answers(Decoder):
    """A daemon's answers, by a client that has begun one thing of each kind and waits for what is answered."""

    name = "answers"
    weight = 0.05
    form = "frames"
    words = (b"no_space", b"message", b"self", b"matched_tokens")

    def __init__(self) -> None:
        super().__init__()
        self.corpus = [encode(each) for each in answers()]
        for request in (2, 3):
            facts = {"device_tokens": 8, "matched_tokens": 8, "reaches": [8], "fetched_tokens": 0}
            self.corpus.append(encode(control.Done(request, facts)))
        self.folder = Path(tempfile.mkdtemp())
        self.daemon = _Daemon(self.folder)
        self.welcome = control.frame(control.Welcome(control.PROTOCOL, 1, "1", b"", GEOMETRY, [], 4, 0, 0, 1, 1))
        self.memfd = create_memfd("fuzz", 4096)
        self.client: Client | None = None
        self.there: socket.socket | None = None

    def attach(self) -> tuple[Client, socket.socket]:
        found: list[Client] = []
        thread = threading.Thread(target=lambda: found.append(Client(self.daemon.path, name="fuzz")), daemon=True)
        thread.start()
        sock, _ = self.daemon.sock.accept()
        sock.recv(4096)
        bell = os.eventfd(0)
        sock.sendmsg([self.welcome], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self.memfd, bell]))])
        os.close(bell)
        thread.join()
        sock.setblocking(False)
        return found[0], sock

    def detach(self) -> None:
        if self.client is not None and self.there is not None:
            # Without a goodbye: nobody would answer it, nor whether the daemon serves on where the connection is lost.
            self.client._let_go("detached")
            self.there.close()
            self.client = self.there = None

    def feed(self, data: bytes) -> None:
        if self.client is None or self.there is None:
            self.client, self.there = self.attach()
        client, there = self.client, self.there
        connection = client._connection
        try:
            connection._request = 0
            begun: list[Pending[Any]] = [
                client.acquire_begin(TOKENS),
                client.peek_begin(TOKENS),
                client.prefetch_begin(TOKENS),
            ]
            with contextlib.suppress(BlockingIOError):
                there.sendall(data[:150_000] or b"\0")
                there.recv(1 << 16)
            before = None
            with connection.lock:
                while before != len(connection._rest):
                    before = len(connection._rest)
                    connection.pull()
            client.poll()
            for pending in begun:
                if pending.done and isinstance(lease := pending.wait(), Lease):
                    _ = lease.slots, lease.tokens, lease.reaches
            if connection._rest or len(connection._answers) > 64:
                self.detach()
        except SglcacheError:
            if connection.over or zlib.crc32(data) % 16 == 0:
                self.detach()
            raise

    def check(self) -> None:
        """A new client is served as ever."""
        self.detach()
        client, there = self.attach()
        pending = client.acquire_begin(TOKENS)
        there.send(control.frame(control.Granted(pending.request, 1, 0, 0, bytes(40))))
        assert pending.wait().matched_tokens == 0
        there.close()
        client._let_go("over")

    def close(self) -> None:
        self.detach()
        self.daemon.sock.close()
        os.close(self.memfd)
        shutil.rmtree(self.folder, ignore_errors=True)


class Channels(Decoder):
    """What a rank says to its supervisor, with descriptors: the supervisor's record of it takes it, or it is killed."""

    name = "channel"
    weight = 0.4
    form = "msgpack"
    words = (b"Ready", b"Beat", b"Keep", b"Failed", b"stream", b"endpoint")

    def __init__(self) -> None:
        super().__init__()
        seat = Seat(0, 0, 0, "/run/rank-0.sock", "tcp://127.0.0.1:1", None, "")
        words: list[Any] = [
            Start({"pool": {"page_size": 4}}, seat, None, 0, 0, [], 20, 0.5),
            Ask(1, "facts"),
            Drain(),
            Ready({"stream": {"endpoint": "tcp://127.0.0.1:9", "replay_endpoint": None}, "pid": 1}),
            Ready({"stream": None}),
            Beat("ok", 10, {"DEVICE": (1, 2)}),
            RankAnswer(1, {"a": [1]}),
            RankAnswer(1, None, Refusal("bad_request", "no", {"a": 1})),
            Long(5),
            Failed("config", "no", {"path": "a"}),
            Keep("pool"),
        ]
        self.corpus = [encode(word) for word in words]
        self.loop = Loop()
        self.begin()

    def begin(self) -> None:
        ours, theirs = Channel.pair()
        self.rank, self.channel = theirs, ours
        self.killed = False
        seat = Seat(0, 0, 0, "/run/rank-0.sock", "tcp://127.0.0.1:1", None, "")
        child = self.child = Child(seat, 10.0, lambda _: None, lambda _: None)
        child._channel = ours
        child.kill = self.kill  # type: ignore[method-assign]
        ours.watch(self.loop, child.hear)

    def kill(self) -> None:
        self.killed = True

    def end(self) -> None:
        self.channel.close()
        self.rank.close()
        self.child.close()

    def feed(self, data: bytes) -> None:
        fds = [0] * (zlib.crc32(data) % 3)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self.rank.sendmsg([data[: 150 << 10] or b"\0"], rights, socket.MSG_DONTWAIT)
        except OSError:
            return
        self.loop.turn()
        self.child.describe()
        assert len(self.child._kept) <= 64
        if self.killed:
            self.end()
            self.begin()
            raise ProtocolError("it was killed for that")

    def close(self) -> None:
        self.end()
        self.loop.close()
