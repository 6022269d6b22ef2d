"""The first frame: who may attach, and what is said to who may not. Whatever comes, the daemon lives and forgets it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
import resource
import select
import socket as sockets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from sglcache.client import Client
from sglcache.errors import BadRequest, Busy, ConfigError, Forbidden, ProtocolError, SessionEnded, UnknownSession
from sglcache.memory.rings import EventRing
from sglcache.server import listener as listeners
from sglcache.server.listener import Listener, Peer
from sglcache.testing.daemon import Daemon, DaemonError, until
from sglcache.wire import control
from sglcache.wire.control import Hello

FIRST = msgspec.msgpack.Decoder(control.Welcome | control.Refusal)


@contextmanager
def dialled(daemon: Daemon) -> Iterator[sockets.socket]:
    with sockets.socket(sockets.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(os.fspath(daemon.socket))
        yield sock


def said(sock: sockets.socket) -> control.Welcome | control.Refusal:
    """The answer to a hello; its descriptors are closed."""
    data, fds, _, _ = sockets.recv_fds(sock, 1 << 16, 16)
    for fd in fds:
        os.close(fd)
    return FIRST.decode(data[4:])


def answer(daemon: Daemon, frame: bytes, fds: list[int] = []) -> control.Welcome | control.Refusal:  # noqa: B006
    with dialled(daemon) as sock:
        sockets.send_fds(sock, [frame], fds)
        first = said(sock)
        if isinstance(first, control.Refusal):
            with contextlib.suppress(ConnectionResetError):  # what was sent beyond the hello was not read
                assert sock.recv(1) == b"", "a refused connection is closed"
        return first


def refusal(daemon: Daemon, frame: bytes, fds: list[int] = []) -> control.Refusal:  # noqa: B006
    first = answer(daemon, frame, fds)
    assert isinstance(first, control.Refusal), f"it was welcomed: {first}"
    return first


@pytest.fixture
def ring() -> Iterator[EventRing]:
    ring = EventRing(8)
    yield ring
    ring.close()


def hello(role: str, protocol: int = control.PROTOCOL, num_events: int = 0, **more: object) -> bytes:
    return control.frame(Hello(protocol, "test", role, num_events=num_events, **more))  # type: ignore[arg-type]


# -- the socket ---------------------------------------------------------------------------------------


def test_the_socket_is_the_users_alone(tmp_path: Path) -> None:
    with Daemon(tmp_path / "made" / "by" / "it") as daemon:
        assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o600
        assert stat.S_IMODE(daemon.socket.parent.stat().st_mode) & 0o077 == 0 or daemon.socket.parent == daemon.folder
    assert not daemon.socket.exists()


def test_a_second_daemon_is_refused_and_a_dead_ones_socket_replaced(tmp_path: Path) -> None:
    first = Daemon(tmp_path)
    with pytest.raises(DaemonError, match="a live daemon has"):
        Daemon(tmp_path)
    first.status()
    first.kill()
    assert first.socket.exists()
    with Daemon(tmp_path) as second:
        second.status()


def test_a_drained_daemon_leaves_no_lock_behind(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        daemon.status()
    assert not list(tmp_path.glob("*.lock"))
    assert not list(tmp_path.glob("*.sock*"))


def test_what_is_no_socket_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "rank-0.sock").write_text("precious")
    with pytest.raises(DaemonError, match="is no socket"):
        Daemon(tmp_path)
    assert (tmp_path / "rank-0.sock").read_text() == "precious"


# -- hellos that are welcome -----------------------------------------------------------------------------


def test_a_welcome_tells_the_geometry_and_brings_the_pools(daemon: Daemon, ring: EventRing) -> None:
    with dialled(daemon) as sock:
        sockets.send_fds(sock, [hello("runner", num_events=8)], [ring.fd, ring.doorbell])
        data, fds, _, _ = sockets.recv_fds(sock, 1 << 16, 16)
        first = FIRST.decode(data[4:])
        assert isinstance(first, control.Welcome)
        assert first.protocol == control.PROTOCOL
        assert first.epoch == daemon.info["epoch"]
        assert len(first.session) == 16
        assert len(fds) == len(first.pools) + 2
        [pool] = first.pools
        assert os.fstat(fds[pool.fd_index]).st_size == pool.num_bytes
        for fd in fds:
            os.close(fd)


@pytest.mark.parametrize("num_shards", [251, 252, 1024])
def test_a_runner_gets_as_many_pools_as_there_are_shards(tmp_path: Path, num_shards: int) -> None:
    pool = {"num_kv_heads": 1, "num_shards": num_shards, "num_layers": 1, "num_tokens": 64}
    with Daemon(tmp_path, pool=pool, host={"num_tokens": 0}) as daemon:
        with daemon.client() as client:
            ids = [pool.shard for pool in client.pools]
            assert ids == list(range(num_shards))
            with client.acquire(range(8)) as lease:
                for shard, views in enumerate(client.pools):
                    views.k[0][lease.slots.tolist()] = float(shard)
                lease.commit()
        # Each is a pool of its own, in its place.
        with daemon.client() as client, client.acquire(range(9)) as lease:
            assert lease.matched_tokens == 8
            pages = lease.slots[:2].tolist()
            for shard, views in enumerate(client.pools):
                assert (views.k[0][pages] == float(shard)).all()


def test_a_hello_may_come_in_pieces_with_the_first_command_behind_it(daemon: Daemon) -> None:
    frames = hello("observer") + control.frame(control.Ping(7))
    with dialled(daemon) as sock:
        for i in range(len(frames)):
            sock.sendall(frames[i : i + 1])
        first = said_exactly(sock)
        assert isinstance(first, control.Welcome)
        done = msgspec.msgpack.decode(frame_of(sock), type=control.Done)
        assert done.request == 7


def frame_of(sock: sockets.socket) -> bytes:
    size = int.from_bytes(sock.recv(4, sockets.MSG_WAITALL), "big")
    return sock.recv(size, sockets.MSG_WAITALL)


def said_exactly(sock: sockets.socket) -> control.Welcome | control.Refusal:
    return FIRST.decode(frame_of(sock))


# -- and those that are not ------------------------------------------------------------------------------


def test_another_version_is_told_both_numbers(daemon: Daemon) -> None:
    refused = refusal(daemon, hello("observer", protocol=control.PROTOCOL + 1))
    assert refused.code == ProtocolError.code
    assert refused.facts == {"daemon": control.PROTOCOL, "client": control.PROTOCOL + 1}


def test_a_hello_of_another_form_is_told_the_version_too(daemon: Daemon) -> None:
    body = msgspec.msgpack.encode(["Hello", control.PROTOCOL + 1, {"all": "new"}])
    refused = refusal(daemon, len(body).to_bytes(4, "big") + body)
    assert refused.code == ProtocolError.code
    assert refused.facts["client"] == control.PROTOCOL + 1


@pytest.mark.parametrize(
    "frame",
    [
        b"\x00\x00\x00\x00",
        b"GET / HTTP/1.1\r\n\r\n",
        (1 << 20).to_bytes(4, "big"),
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x04\xde\xad\xbe\xef",
        control.frame(control.Ping(1)),
        control.frame(Hello(control.PROTOCOL, "x" * 300, "observer")),
        control.frame(Hello("1", "x", "observer")),  # type: ignore[arg-type]
    ],
    ids=["empty", "http", "oversized", "huge", "garbage", "a command", "a long name", "a version that is text"],
)
def test_what_is_no_hello_is_refused(daemon: Daemon, frame: bytes) -> None:
    assert refusal(daemon, frame).code == ProtocolError.code


def test_random_bytes_are_refused(daemon: Daemon) -> None:
    rng = random.Random(1)
    for _ in range(200):
        body = rng.randbytes(rng.randrange(64))
        assert refusal(daemon, len(body).to_bytes(4, "big") + body).code == ProtocolError.code


@pytest.mark.parametrize("role", ["", "Runner", "root"])
def test_an_unknown_role_is_refused(daemon: Daemon, role: str) -> None:
    assert refusal(daemon, hello(role)).code == BadRequest.code


def test_descriptors_are_what_the_role_needs(daemon: Daemon, ring: EventRing) -> None:
    for role, fds in (
        ("runner", []),
        ("runner", [ring.fd]),
        ("runner", [ring.fd, ring.doorbell, ring.fd]),
        ("observer", [ring.fd]),
        ("scheduler", [ring.fd, ring.doorbell]),
        ("runner", [ring.doorbell, ring.fd]),
        ("runner", [ring.fd] * 100),
    ):
        assert refusal(daemon, hello(role, num_events=8), fds).code == ProtocolError.code


@pytest.mark.parametrize("num_events", [0, 9, 1 << 19])
def test_a_ring_holds_as_many_events_as_it_says(daemon: Daemon, ring: EventRing, num_events: int) -> None:
    refused = refusal(daemon, hello("runner", num_events=num_events), [ring.fd, ring.doorbell])
    assert refused.code == ProtocolError.code


def test_memory_that_its_sender_could_shrink_is_refused(daemon: Daemon, ring: EventRing) -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    assert "F_SEAL_SHRINK" in refusal(daemon, hello("runner", num_events=8), [fd, ring.doorbell]).message
    os.close(fd)


def test_a_doorbell_that_could_block_is_refused(daemon: Daemon, ring: EventRing) -> None:
    reader, writer = os.pipe()
    assert "eventfd" in refusal(daemon, hello("runner", num_events=8), [ring.fd, reader]).message
    os.close(reader)
    os.close(writer)


def test_a_worker_needs_a_session_that_takes_it(daemon: Daemon) -> None:
    with pytest.raises(UnknownSession):
        daemon.worker(b"x" * 16, 0)
    with pytest.raises(UnknownSession):
        daemon.worker(b"", 0)
    with daemon.client() as runner, pytest.raises(Forbidden):
        daemon.worker(runner.token, 0)
    with daemon.client(role="scheduler") as scheduler:
        with pytest.raises(BadRequest):
            daemon.worker(scheduler.token, 1)
        with daemon.worker(scheduler.token, 0):
            with pytest.raises(BadRequest, match="taken"):
                daemon.worker(scheduler.token, 0)
            scheduler.close()
            with pytest.raises(SessionEnded):
                daemon.worker(scheduler.token, 0)


def test_who_leaves_before_the_hello_is_forgotten(daemon: Daemon) -> None:
    before = num_descriptors(daemon)
    for part in (b"", b"\x00\x00", hello("observer")[:-1]):
        with dialled(daemon) as sock:
            sock.sendall(part)
    until(lambda: num_descriptors(daemon) <= before)


def test_refusals_leak_no_descriptor(daemon: Daemon, ring: EventRing) -> None:
    before = num_descriptors(daemon)
    for _ in range(20):
        refusal(daemon, hello("runner", num_events=9), [ring.fd, ring.doorbell])
        refusal(daemon, hello("worker", num_events=8), [ring.fd, ring.doorbell])
        refusal(daemon, b"\xff\xff\xff\xff", [ring.fd, ring.doorbell])
    until(lambda: num_descriptors(daemon) <= before)


def test_descriptors_of_every_wrong_kind_are_refused_and_closed(daemon: Daemon, ring: EventRing) -> None:
    """In the place of the ring and of the doorbell; and the daemon lives, whatever their sender does later."""
    before = num_descriptors(daemon)
    unsealed, sealed, small = (os.memfd_create(name, os.MFD_ALLOW_SEALING) for name in ("u", "s", "e"))
    for fd in (unsealed, sealed):
        os.ftruncate(fd, 1 << 40)  # huge, and no page of it is there
    fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    fcntl.fcntl(small, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    pipe, pair = os.pipe(), sockets.socketpair()
    kinds = [
        *pipe, *(each.fileno() for each in pair), os.open("/", os.O_RDONLY), os.open("/dev/zero", os.O_RDWR),
        os.pidfd_open(os.getpid()), select.epoll().fileno(), unsealed, sealed, small,
    ]  # fmt: skip
    for fd in kinds:
        assert refusal(daemon, hello("runner", num_events=8), [fd, ring.doorbell]).code in ("protocol", "config")
        assert refusal(daemon, hello("runner", num_events=8), [ring.fd, fd]).code == "protocol"
    os.ftruncate(unsealed, 0)
    until(lambda: num_descriptors(daemon) <= before)
    for each in pair:
        each.close()
    for fd in set(kinds) - {each for each in kinds if not _is_open(each)}:
        os.close(fd)
    with daemon.client() as client:
        client.ping()


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_process_of_another_user_is_refused_though_the_files_would_let_it() -> None:
    """The socket's mode keeps others out; where somebody has changed it, the kernel's word on who connects does."""
    with tempfile.TemporaryDirectory(prefix="sglcache-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        with Daemon(folder) as daemon:
            assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o600
            assert as_nobody(daemon.socket) == "no way in"
            daemon.socket.chmod(0o666)
            assert as_nobody(daemon.socket) == "forbidden"
            with daemon.client() as client:
                client.ping()


def as_nobody(path: Path) -> str:
    """What a process of user 65534 is told there, in a word."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        word = "nothing"
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            with sockets.socket(sockets.AF_UNIX) as sock:
                sock.connect(os.fspath(path))
                with contextlib.suppress(BrokenPipeError):
                    sock.sendall(hello("observer"))
                first = FIRST.decode(sock.recv(1 << 16)[4:])
            word = first.code if isinstance(first, control.Refusal) else "welcome"
        except PermissionError:
            word = "no way in"
        except BaseException as exc:
            word = repr(exc)
        finally:
            os.write(writer, word.encode())
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with open(reader) as told:
        return told.read()


def num_descriptors(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.pid}/fd"))


# -- too many --------------------------------------------------------------------------------------------


def test_who_finds_too_many_that_say_nothing_is_told_who_they_are(daemon: Daemon) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(listeners.MAX_WAITING):
            sock = stack.enter_context(sockets.socket(sockets.AF_UNIX))
            sock.connect(os.fspath(daemon.socket))
        with pytest.raises(Busy, match=f"have not said hello \\(pid {os.getpid()} has 256\\)") as told:
            daemon.client()
        assert told.value.silent == told.value.max_silent == listeners.MAX_WAITING
        assert told.value.holders == [{"pid": os.getpid(), "connections": listeners.MAX_WAITING}]
    until(lambda: _attaches(daemon))


def _attaches(daemon: Daemon) -> bool:
    try:
        with daemon.observer():
            return True
    except Busy:
        return False


def test_a_daemon_without_descriptors_says_so_and_is_in_trouble_until_it_has_one(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, daemon.client() as first:
        _, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        for more in range(5):  # whichever of a connection's descriptors is the one too many
            limit = 1 + max(map(int, os.listdir(f"/proc/{daemon.pid}/fd"))) + more
            resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (limit, hard))
            crowd = contextlib.ExitStack()
            with pytest.raises(Busy, match="file descriptors") as told:  # noqa: PT012
                while True:
                    crowd.enter_context(daemon.client())
            assert told.value.max_descriptors == limit
            until(lambda: "descriptors" in troubles(first))
            crowd.close()
            resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (hard, hard))
            until(lambda: "descriptors" not in troubles(first))
        first.ping()


def troubles(client: Client) -> list[str]:
    return [trouble["what"] for trouble in client.status()["troubles"]]


# -- pieces, in this process -----------------------------------------------------------------------------


def test_a_silent_peer_is_refused_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "HELLO_TIMEOUT_S", 0.01)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        listener = Listener(loop, tmp_path / "socket", lambda peer, hello: None)
        listener.open()
        sock = sockets.socket(sockets.AF_UNIX)
        sock.setblocking(False)
        await loop.sock_connect(sock, os.fspath(tmp_path / "socket"))
        refused = FIRST.decode((await loop.sock_recv(sock, 4096))[4:])
        assert isinstance(refused, control.Refusal)
        assert refused.code == ProtocolError.code
        assert await loop.sock_recv(sock, 1) == b""
        assert not listener.hearing
        sock.close()
        listener.close()
        listener.close()

    asyncio.run(main())


def test_many_that_are_refused_alike_are_one_line_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listeners, "HELLO_TIMEOUT_S", 0.01)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        listener = Listener(loop, tmp_path / "socket", lambda peer, hello: None)
        listener.open()
        crowd = [sockets.socket(sockets.AF_UNIX) for _ in range(20)]
        for sock in crowd:
            sock.setblocking(False)
            await loop.sock_connect(sock, os.fspath(tmp_path / "socket"))
        for sock in crowd:
            assert await loop.sock_recv(sock, 4096)
            sock.close()
        listener.close()

    asyncio.run(main())
    lines = [record.getMessage() for record in caplog.records if record.name == "sglcache.listener"]
    assert lines == [f"refused 20 connections (pid {os.getpid()} has 20): no hello within 0.01 s"]


def test_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = sockets.socketpair(sockets.AF_UNIX)
    with ours, theirs:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(Forbidden, match="12345"):
            listeners.identify(ours)


@pytest.mark.parametrize("old_kernel", [False, True])
def test_a_peers_process_is_known_by_a_descriptor(monkeypatch: pytest.MonkeyPatch, old_kernel: bool) -> None:
    if old_kernel:
        monkeypatch.setattr(listeners, "SO_PEERPIDFD", 12345)  # no such option
    ours, theirs = sockets.socketpair(sockets.AF_UNIX)
    with theirs:
        peer: Peer = listeners.identify(ours)
        with open(f"/proc/self/fdinfo/{peer.pidfd}") as file:
            assert f"Pid:\t{os.getpid()}\n" in file.read()
        assert not os.get_inheritable(peer.pidfd)
        peer.close()


def test_a_peer_whose_death_could_not_be_seen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a PID namespace out of sight a peer's number is 0, and an old kernel gives no descriptor of it."""
    monkeypatch.setattr(listeners, "SO_PEERPIDFD", 12345)  # no such option
    monkeypatch.setattr(listeners, "_CREDENTIALS", Zeroed())
    ours, theirs = sockets.socketpair(sockets.AF_UNIX)
    with ours, theirs, pytest.raises(Forbidden, match="PID namespace"):
        listeners.identify(ours)


class Zeroed:
    """struct ucred, as such a peer's is."""

    size = 12

    def unpack(self, packed: bytes) -> tuple[int, int, int]:
        return (0, os.geteuid(), os.getegid())


def test_a_path_that_no_socket_can_have_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        for path in (tmp_path / ("x" * 200), Path("/proc/nowhere/socket")):
            listener = Listener(loop, path, lambda peer, hello: None)
            with pytest.raises(ConfigError):
                listener.open()
            listener.close()

    asyncio.run(main())


def test_what_a_role_may_not_do_is_said_in_english(daemon: Daemon) -> None:
    with daemon.observer() as observer, pytest.raises(Forbidden, match="an observer may not send an Acquire"):
        observer.acquire([1, 2, 3, 4])
