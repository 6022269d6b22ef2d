"""What a lookup costs through the real daemon and client, against what the sockets alone cost.

One operation is acquire and release of a cached prompt as a runner makes them: the release is sent and not waited for,
and what comes next is behind it. Beside it two echoes of the same four frame sizes on a bare uvloop unix socket server,
in a process of its own as the daemon is, with a blocking client that does nothing but send and receive. They run in
blocks, in turn; p50 of each block, ratio of the medians. `waited_p50_us` is of the same with a release that is waited
for, which is two round trips, as the echoes are.

A server that answers at once is a floor that nothing with work to do can come near: the kernel hands the processor
over, while a peer that waits for some microseconds has gone to sleep. So a third one runs in turn, the same echo with
a server that spins, before each answer, for as long as the index takes for the same operation in this process
(`index_acquire_us`, `index_release_us`). `ratio_busy` against it is what daemon and client add to sockets and index.
`instructions` are Python's (see `opcodes`).

Run as a module with a socket's path, four sizes and two times, this file is that echo server.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from sglcache.bench.daemon import Daemon
from sglcache.bench.harness import BenchError, Comparison, Row, Summary
from sglcache.bench.index import Driver
from sglcache.core.index import Index, IndexConfig
from sglcache.wire import control
from sglcache.wire.control import HEADER

if TYPE_CHECKING:
    from sglcache.client import Client, Lease

START_S = 20.0
RECV_BYTES = 1 << 16


class Options(NamedTuple):
    """What `bench rpc` is told."""

    tokens: int = 2048
    page_size: int = 16
    pairs: int = 15  # blocks of each
    operations: int = 500  # in a block
    warm_up: int = 500
    events: bool = True


class Sizes(NamedTuple):
    """Bytes of the four frames, with their headers."""

    acquire: int
    granted: int
    release: int
    done: int


def run(options: Options) -> Row:
    """Both in turn. BenchError if the prompt was not served from the cache."""
    from sglcache.client import Client

    tokens = np.random.default_rng(0).integers(0, 128_000, options.tokens, dtype=np.uint32)
    matched = options.tokens // options.page_size * options.page_size
    overrides = [f"pool.page_size={options.page_size}", f"events.enabled={str(options.events).lower()}"]
    with Daemon(overrides) as daemon:
        daemon.wait_healthy()
        with Client(daemon.socket, name="bench") as client:
            with client.acquire(tokens) as lease:
                lease.commit()
            with client.acquire(tokens) as lease:
                if lease.matched_tokens != matched or lease.host_tokens:
                    raise BenchError(
                        f"{lease.matched_tokens} tokens matched and {lease.host_tokens} on the host: {lease}"
                    )
                sizes = sizes_of(tokens.tobytes(), lease)
            work = _index_seconds(options, tokens.tobytes())
            with (
                echo_server(sizes, (0.0, 0.0)) as bare,
                echo_server(sizes, work) as busy,
                connected(*bare) as bare_server,
                connected(*busy) as busy_server,
            ):
                operations = (
                    ours(client, tokens),
                    echoes(bare_server, sizes),
                    echoes(busy_server, sizes),
                    _waited(client, tokens),
                )
                for operation in operations:
                    _block(operation, options.warm_up)
                instructions = _instructions(options, client, tokens)
                rounds: list[list[Summary]] = [[] for _ in operations]
                for _ in range(options.pairs):
                    for blocks, operation in zip(rounds, operations, strict=True):
                        blocks.append(_block(operation, options.operations))
    own, bare_p50s, busy_p50s, waited = ([block.p50 * 1e6 for block in blocks] for blocks in rounds)
    # The other way round than Comparison's other / ours: here the echo is the floor.
    ratio, ratio_busy = Comparison.of(bare_p50s, own), Comparison.of(busy_p50s, own)
    ratio_waited = Comparison.of(bare_p50s, waited)
    return {
        "tokens": options.tokens,
        "page_size": options.page_size,
        "events": options.events,
        "frame_bytes": list(sizes),
        "pairs": options.pairs,
        "operations": options.operations,
        "p50_us": round(ratio.other, 1),
        "p99_us": round(float(np.median([block.p99 * 1e6 for block in rounds[0]])), 1),
        "echo_p50_us": round(ratio.ours, 1),
        "echo_p99_us": round(float(np.median([block.p99 * 1e6 for block in rounds[1]])), 1),
        "ratio": round(ratio.ratio, 3),
        "ratio_least": round(ratio.least, 3),
        "ratio_most": round(ratio.most, 3),
        "index_acquire_us": round(work[0] * 1e6, 1),
        "index_release_us": round(work[1] * 1e6, 1),
        "busy_echo_p50_us": round(ratio_busy.ours, 1),
        "ratio_busy": round(ratio_busy.ratio, 3),
        "ratio_busy_least": round(ratio_busy.least, 3),
        "ratio_busy_most": round(ratio_busy.most, 3),
        "instructions": sum(instructions.values()),
        **{f"instructions_{name}": count for name, count in instructions.items()},
        "waited_p50_us": round(ratio_waited.other, 1),
        "ratio_waited": round(ratio_waited.ratio, 3),
        "blocks_p50_us": [round(each, 1) for each in own],
        "echo_blocks_p50_us": [round(each, 1) for each in bare_p50s],
    }


def _block(operation: Callable[[], object], count: int) -> Summary:
    clock = time.perf_counter
    seconds = []
    for _ in range(count):
        start = clock()
        operation()
        seconds.append(clock() - start)
    return Summary.of(seconds)


def _instructions(options: Options, client: Client, tokens: object) -> dict[str, int]:
    """Python's, of one operation: of the client, of the daemon beside the index, and of the index."""
    from sglcache.bench import opcodes

    daemon = opcodes.of_daemon(options.tokens, options.page_size)["release and acquire"]
    index = daemon.by_part["core"]
    return {
        "client": sum(each.total for each in opcodes.of_client(client, tokens).values()),
        "daemon": daemon.total - index,
        "index": index,
    }


def _index_seconds(options: Options, packed: bytes) -> tuple[float, float]:
    """Medians of acquire and release of the cached prompt, with their drains, in an index of this process."""
    driver = Driver(Index(IndexConfig(page_size=options.page_size, num_pages=1 << 16, events=options.events)))
    lease = driver.acquire(packed).lease
    driver.commit(lease)
    driver.release(lease)
    driver.cut()
    clock = time.perf_counter
    acquires, releases = [], []
    for _ in range(options.warm_up + options.operations):
        start = clock()
        lease = driver.acquire(packed).lease
        middle = clock()
        driver.release(lease)
        releases.append(clock() - middle)
        acquires.append(middle - start)
        driver.counted()
    return Summary.of(acquires).p50, Summary.of(releases).p50


def ours(client: Client, tokens: object) -> Callable[[], None]:
    """Acquire and release, as a runner does."""
    acquire = client.acquire

    def operation() -> None:
        acquire(tokens).release()  # type: ignore[arg-type]

    return operation


def _waited(client: Client, tokens: object) -> Callable[[], None]:
    acquire = client.acquire

    def operation() -> None:
        acquire(tokens).release(wait=True)  # type: ignore[arg-type]

    return operation


def sizes_of(packed: bytes, lease: Lease) -> Sizes:
    """As the frames are after some thousand operations: numbers of three bytes."""
    n = 5000
    slots = np.asarray(lease.slots, np.int32).tobytes()
    frames = (
        control.Acquire(n, packed),
        control.Granted(n, n, lease.matched_tokens, 0, slots),
        control.Release(0, n, n, 1, generation=n),
        control.Done(n),
    )
    return Sizes(*(HEADER + len(control.encode(frame)) for frame in frames))


# -- the bare echo ------------------------------------------------------------------------------------


class Echo(asyncio.Protocol):
    """Answers a frame of one size with a frame of another, after so many seconds of spinning."""

    def __init__(self, replies: dict[int, tuple[bytes, float]]) -> None:
        self.replies = replies
        self.rest = b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none of its subclasses

    def data_received(self, data: bytes) -> None:
        assert self.transport is not None
        data = self.rest + data if self.rest else data
        while len(data) >= HEADER and len(data) >= (size := HEADER + int.from_bytes(data[:HEADER], "big")):
            reply, work_s = self.replies[size]
            if work_s:
                end = time.perf_counter() + work_s
                while time.perf_counter() < end:
                    pass
            self.transport.write(reply)
            data = data[size:]
        self.rest = data


def frame(size: int) -> bytes:
    """`size` bytes in all: a header that tells the truth, and zeros."""
    return (size - HEADER).to_bytes(HEADER, "big") + bytes(size - HEADER)


def echoes(connection: socket.socket, sizes: Sizes) -> Callable[[], None]:
    """Two round trips."""
    acquire, release = frame(sizes.acquire), frame(sizes.release)
    send, recv = connection.send, connection.recv

    def operation() -> None:
        for out, back in ((acquire, sizes.granted), (release, sizes.done)):
            if send(out) != len(out):
                raise BenchError("the echo's socket was full")
            while back:
                part = recv(RECV_BYTES)
                if not part:
                    raise BenchError("the echo server went away")
                back -= len(part)

    return operation


@contextlib.contextmanager
def echo_server(sizes: Sizes, work_s: tuple[float, float]) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """An echo server in a process of its own: where, and who. `work_s`: what it spins before each of its answers."""
    with tempfile.TemporaryDirectory(prefix="sglcache-echo-") as folder:
        path = Path(folder) / "echo.sock"
        process = subprocess.Popen(
            [sys.executable, "-m", "sglcache.bench.rpc", str(path), *map(str, [*sizes, *work_s])]
        )
        try:
            yield path, process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


@contextlib.contextmanager
def connected(path: Path, process: subprocess.Popen[bytes] | None = None) -> Iterator[socket.socket]:
    """To the echo server there, once it serves. BenchError: it does not."""
    deadline = time.monotonic() + START_S
    with socket.socket(socket.AF_UNIX) as connection:
        while True:
            try:
                connection.connect(str(path))
                break
            except OSError:
                if (process is not None and process.poll() is not None) or time.monotonic() > deadline:
                    raise BenchError("the echo server did not start") from None
                time.sleep(0.01)
        yield connection


async def _serve(path: str, replies: dict[int, tuple[bytes, float]]) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    server = await loop.create_unix_server(lambda: Echo(replies), path)
    await ended.wait()
    server.close()


def main(path: str, sizes: Sizes, work_s: tuple[float, float]) -> None:
    """Serve until SIGTERM."""
    import uvloop

    uvloop.run(
        _serve(path, {sizes.acquire: (frame(sizes.granted), work_s[0]), sizes.release: (frame(sizes.done), work_s[1])})
    )
    os._exit(0)  # whoever is still attached is not waited for


if __name__ == "__main__":
    main(sys.argv[1], Sizes(*map(int, sys.argv[2:6])), (float(sys.argv[6]), float(sys.argv[7])))
