"""Thousands of bad inputs for every decoder, and raw bytes for every socket of a daemon that others go on using."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from sglcache import paths
from sglcache.client import Client
from sglcache.fuzzing.control import commands
from sglcache.fuzzing.decoders import DECODERS
from sglcache.testing import fuzz
from sglcache.testing.daemon import Daemon, until
from sglcache.wire import control

pytestmark = pytest.mark.survive

INPUTS = 4_000


@pytest.mark.parametrize("decoder", DECODERS, ids=lambda decoder: decoder.name)
def test_bad_input_is_taken_or_refused(decoder: type[fuzz.Decoder]) -> None:
    fuzz.run(decoder, max(20, int(INPUTS * decoder.weight)), seed=11)


REQUEST = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
HTTP = [
    REQUEST,
    b"GET /server_info HTTP/1.0\r\n\r\n",
    b"POST /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nabcde" + REQUEST,
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n",
    b"GET /digest HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
]
LENGTHS = (b"Content-Length: -1\r\n", b"Content-Length: 99999999999\r\n")
WORDS = (b"\r\n", *LENGTHS, b"%00", b"\xff", b"A" * 20_000, b"HTTP/9.9")
NULL = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
SOCKET_TYPE = b"\x05READY\x0bSocket-Type\x00\x00\x00"
ZMTP = [  # 3.0: a greeting, READY, and a subscription or a request
    NULL + b"\x04\x19" + SOCKET_TYPE + b"\x03SUB\x00\x01\x01",
    NULL + b"\x04\x1c" + SOCKET_TYPE + b"\x06DEALER\x01\x00\x00\x08" + bytes(8),
]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon"), http={"enabled": True, "port": 0}) as daemon:
        yield daemon


def tcp(url: str) -> Callable[[], socket.socket]:
    parts = urlsplit(url)
    return lambda: socket.create_connection((parts.hostname or "", parts.port or 0), 10)


def unix(path: Path) -> Callable[[], socket.socket]:
    def connect() -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(10)
        sock.connect(os.fspath(path))
        return sock

    return connect


def places(daemon: Daemon) -> dict[str, tuple[Callable[[], socket.socket], list[bytes], fuzz.Form]]:
    hello = control.frame(control.Hello(control.PROTOCOL, "fuzz", "observer"))
    frames = [hello + b"".join(map(control.frame, commands()[first:])) for first in range(0, 18, 3)]
    return {
        "control": (unix(daemon.socket), frames, "bytes"),
        "http": (tcp(daemon.info["http"]), HTTP, "bytes"),
        "http on a unix socket": (unix(paths.supervisor_path(daemon.socket)), HTTP, "bytes"),
        "stream": (tcp(daemon.info["stream"]["endpoint"]), ZMTP, "bytes"),
        "replay": (tcp(daemon.info["stream"]["replay_endpoint"]), ZMTP, "bytes"),
    }


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("name", ["control", "http", "http on a unix socket", "stream", "replay"])
def test_raw_bytes_end_their_connection_and_nobody_else_s(daemon: Daemon, name: str) -> None:
    """A runner beside them goes on; afterwards no descriptor is left, hardly any memory, and the books are right."""
    connect, corpus, form = places(daemon)[name]
    mutator = fuzz.Mutator(4, corpus, form, WORDS)
    pids = (daemon.pid, daemon.process.pid)
    with daemon.client() as client:
        work(client, 0)
        daemon.settle()
        daemon.ask("/health")
        before = [descriptors(pid) for pid in pids]
        memory = [resident(pid) for pid in pids]
        for number in range(600):
            talk(connect, mutator.input(number), random.Random(number))
            if number % 20 == 0:
                work(client, number)
        work(client, 1)
        assert daemon.ask("/health")["status"] == "ok"
        until(lambda: [descriptors(pid) for pid in pids] <= before, 30)
        for pid, had in zip(pids, memory, strict=True):
            assert resident(pid) - had < 64 << 20
    daemon.settle()


def talk(connect: Callable[[], socket.socket], data: bytes, rng: random.Random) -> None:
    with contextlib.suppress(OSError), connect() as sock:
        while data:
            size = len(data) if rng.random() < 0.7 else rng.randrange(1, len(data) + 1)
            sock.sendall(data[:size])
            data = data[size:]
        if rng.random() < 0.5:
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(0.05 if rng.random() < 0.9 else 0.5)
            while sock.recv(1 << 16):
                pass


def work(client: Client, number: int) -> None:
    """What a well-behaved runner does, and gets."""
    tokens = [number * 100 + each for each in range(32)]
    lease = client.acquire(tokens)
    lease.commit()
    lease.release()
    assert client.peek(tokens).matched_tokens == 32


def test_a_length_takes_no_memory_before_its_bytes_come(daemon: Daemon) -> None:
    """Of frames that are said to be 16 MiB, by many at once."""
    hello = control.frame(control.Hello(control.PROTOCOL, "fuzz", "observer"))
    before = resident(daemon.pid)
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            sock = stack.enter_context(unix(daemon.socket)())
            sock.sendall(hello)
            answer: Any = sock.recv(1 << 16)
            assert b"Welcome" in answer
            sock.sendall(control.MAX_FRAME.to_bytes(4, "big") + msgspec.msgpack.encode(["Ping"]))
        with daemon.observer() as observer:
            observer.ping()
        assert resident(daemon.pid) - before < 32 << 20
