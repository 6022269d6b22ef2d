"""How long a rank's event loop stands still while something goes wrong beside it, and what another client feels of it.

For each fault a daemon of its own, in which a timer of 1 ms looks how late it comes, and a client of another process's
session that asks for one answer after the other (`ping`). The fault happens meanwhile; then both are asked for the
longest. What can only be had by planting it (a copy or a disk that hangs, a publisher that sends nothing) is planted in
the daemon. `quiet` is no fault: what the machine itself adds. `longest_own_ms` is what the loop's own work had of a
stall, at most: the processor's time of its thread meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sglcache.bench.harness import BenchError, Row
from sglcache.client import Client
from sglcache.errors import Busy, NoSpace, SglcacheError
from sglcache.testing import copies
from sglcache.testing.daemon import Daemon, Puppet, until
from sglcache.wire import control

P = 16
SECONDS = 2.0  # that a fault lasts which does not end by itself

PRELUDE = """
import os, time
from sglcache.server import watch
watch.TICK_S = 0.001
from sglcache.net.publisher import Publisher
send = Publisher._send_live
Publisher._send_live = lambda self, entry: not os.path.exists({stream!r}) and send(self, entry)
from sglcache.storage.file import FileStore
put = FileStore.put
def held(self, *arguments):
    while os.path.exists({disk!r}):
        time.sleep(0.005)
    return put(self, *arguments)
FileStore.put = held
"""


class Options(NamedTuple):
    """What `bench stall --fault` is told."""

    pages: int = 100_000  # of the device
    connections: int = 1000
    frames: int = 10_000  # pipelined at once
    faults: tuple[str, ...] = ()  # ; none: all


class Scene(NamedTuple):
    """A daemon in which something is about to go wrong, and the files that hold things up while they are there."""

    daemon: Daemon
    options: Options
    gate: Path  # of copies to the host: they wait until it is there
    stream: Path
    disk: Path


class Probe(threading.Thread):
    """One answer after the other, and what each took."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__(daemon=True)
        self.client = daemon.client(role="observer", name="probe")
        self.over = threading.Event()
        self.waits: list[float] = []

    def run(self) -> None:
        while not self.over.is_set():
            began = time.perf_counter()
            self.client.ping()
            self.waits.append(time.perf_counter() - began)
            time.sleep(0.001)  # it is to see stalls, not to be the load

    def finish(self) -> list[float]:
        self.over.set()
        self.join()
        self.client.close()
        return sorted(self.waits)


def run(options: Options) -> Row:
    """For each fault: the loop's longest stall, and the probe's round trips, in milliseconds."""
    names = options.faults or tuple(FAULTS)
    return {"pages": options.pages, "faults": {name: _measure(name, options) for name in names}}


def _measure(name: str, options: Options) -> Row:
    with tempfile.TemporaryDirectory(prefix="sglcache-bench-") as folder:
        root = Path(folder)
        gate, stream, disk = root / "gate", root / "stream", root / "disk"
        gate.touch()
        prelude = PRELUDE.format(stream=str(stream), disk=str(disk)) + copies.gate(gate, "backup")
        with Daemon(
            root / "daemon",
            prelude=prelude,
            pool={"page_size": P, "num_tokens": P * options.pages},
            host={"num_tokens": P * min(options.pages, 20_000)},
            storage={"kind": "file", "path": str(root / "pages"), "size": "1 GiB"},
            limits={"max_connections": options.connections + 100, "slow_reader_s": 1.0},
        ) as daemon:
            probe = Probe(daemon)
            probe.start()
            began = time.perf_counter()
            FAULTS[name](Scene(daemon, options, gate, stream, disk))
            seconds = time.perf_counter() - began
            for flag in (stream, disk):
                flag.unlink(missing_ok=True)
            gate.touch()
            waits = probe.finish()
            loop = daemon.status(prove=False)["loop"]
    return {
        "seconds": round(seconds, 2),
        "longest_stall_ms": round(1e3 * loop["longest_s"], 2),
        "longest_own_ms": round(1e3 * loop["longest_own_s"], 2),
        "ping_p50_ms": round(1e3 * waits[len(waits) // 2], 3),
        "ping_p99_ms": round(1e3 * waits[len(waits) * 99 // 100], 2),
        "ping_max_ms": round(1e3 * waits[-1], 2),
    }


def _prompt(number: int, num_pages: int) -> bytes:
    return np.arange(number * 10_000, number * 10_000 + P * num_pages, dtype=np.uint32).tobytes()


def _work(client: Client, seconds: float = SECONDS, first: int = 1000) -> None:
    """Requests of eight pages, one after the other."""
    end, number = time.monotonic() + seconds, first
    while time.monotonic() < end:
        number += 1
        with contextlib.suppress(NoSpace), client.acquire(_prompt(number, 8)) as lease:
            lease.commit()


def _quiet(scene: Scene) -> None:
    with scene.daemon.client() as client:
        _work(client)


def _killed(scene: Scene) -> None:
    pages = scene.options.pages
    with Puppet(scene.daemon.socket) as puppet:
        puppet.do(
            f"client = Client(socket); leases = [client.acquire(np.arange({P} * {pages // 100}, dtype='u4') + 1000000"
            f" * n) for n in range(100)]"
        )
        os.close(puppet.kill())
        until(lambda: _pool(scene.daemon)["free"] >= pages // 100 * 100, 30.0)


def _copy(scene: Scene) -> None:
    """Copies hang; then all of them go on at once."""
    scene.gate.unlink()
    with scene.daemon.client() as client:
        _work(client)
        scene.gate.touch()
        _work(client, first=50_000)


def _disk(scene: Scene) -> None:
    scene.disk.touch()
    with scene.daemon.client() as client:
        _work(client)
        scene.disk.unlink()
        _work(client, first=50_000)


def _subscriber(scene: Scene) -> None:
    """A publisher that sends nothing, a subscriber that reads nothing."""
    import zmq

    with zmq.Context() as context, context.socket(zmq.SUB) as deaf, scene.daemon.client() as client:
        deaf.setsockopt(zmq.RCVHWM, 1)
        deaf.setsockopt(zmq.LINGER, 0)
        deaf.subscribe("")
        deaf.connect(scene.daemon.info["stream"]["endpoint"])
        scene.stream.touch()
        _work(client)
        scene.stream.unlink()
        _work(client, first=50_000)


def _connections(scene: Scene) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(scene.options.connections):
            stack.enter_context(scene.daemon.client(role="observer"))


def _clear(scene: Scene) -> None:
    with scene.daemon.client() as client:
        for number in range(scene.options.pages // 16 * 9 // 10):
            with client.acquire(_prompt(number, 16)) as lease:
                lease.commit()

        def cleared() -> bool:
            with contextlib.suppress(Busy):
                client.clear()
                return True
            return False

        until(cleared, 60.0)
        _work(client)


def _flood(scene: Scene) -> None:
    """Frames that are read as fast as they are answered, and ones whose answers nobody reads."""
    with scene.daemon.client() as client, scene.daemon.client(role="observer") as rude:
        tokens = _prompt(1, 64)
        peeks = [control.Peek(number, tokens) for number in range(1000, 1000 + scene.options.frames)]
        sender = threading.Thread(target=_send, args=(client, b"".join(map(control.frame, peeks))))
        deaf = threading.Thread(
            target=_send,
            args=(rude, b"".join(control.frame(control.Status(n)) for n in range(1, scene.options.frames))),
        )
        sender.start()
        deaf.start()
        with client._connection.lock:
            for peek in peeks:
                client._connection.wait(peek.request)
        sender.join()
        deaf.join()
        rude._connection._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _send(client: Client, data: bytes) -> None:
    with contextlib.suppress(OSError):
        client._connection._sock.sendall(data)


def _pool(daemon: Daemon) -> dict[str, Any]:
    try:
        status = daemon.status(prove=False)
    except SglcacheError as exc:
        raise BenchError(f"the daemon does not answer: {exc.message}") from exc
    return next(pool for pool in status["pools"] if (pool["resource"], pool["tier"]) == ("full", "DEVICE"))


FAULTS: dict[str, Callable[[Scene], None]] = {
    "quiet": _quiet,
    "runner-killed": _killed,
    "copy-stuck": _copy,
    "disk-stuck": _disk,
    "subscriber-stuck": _subscriber,
    "connections": _connections,
    "clear": _clear,
    "flood": _flood,
}
