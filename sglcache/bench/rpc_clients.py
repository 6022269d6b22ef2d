"""Acquire and release by several clients at once, each a process of its own, beside as many clients of a bare echo.

The operation, the echo and its frames are those of `rpc`. All clients of a side run for a while together, then those of
the other side, in turn; what each of their operations took is put together, so p99.9 is of all of them.

Run as a module this file is one client: `ours SOCKET TOKENS` or `echo SOCKET SIZE SIZE SIZE SIZE`. It says that it is
ready, and for each number of seconds that it reads it runs so long and writes, as float64 in one frame, what each took.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sglcache.bench import rpc
from sglcache.bench.daemon import Daemon
from sglcache.bench.harness import BenchError, Row, quantile

BLOCK_S = 0.5
WARM_UP_S = 0.2
HEADER = 8


class Options(NamedTuple):
    """What `bench rpc --clients` is told."""

    clients: tuple[int, ...] = (1, 2, 4, 8, 16)
    tokens: int = 2048
    page_size: int = 16
    pairs: int = 5  # blocks of each
    block_s: float = BLOCK_S
    events: bool = True


class Runner:
    """A client process. Its owner closes it."""

    def __init__(self, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sglcache.bench.rpc_clients", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ready(self) -> None:
        assert self.process.stdout is not None
        if self.process.stdout.read(1) != b"r":
            raise BenchError(f"a client ended with {self.process.wait()} before it was ready")

    def begin(self, seconds: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"%f\n" % seconds)
        self.process.stdin.flush()

    def end(self) -> npt.NDArray[np.float64]:
        """Seconds of each operation."""
        assert self.process.stdout is not None
        size = int.from_bytes(self.process.stdout.read(HEADER), "little")
        times = np.frombuffer(self.process.stdout.read(size), np.float64)
        if not size or len(times) * 8 != size:
            raise BenchError(f"a client ended with {self.process.wait()} while it was measured")
        return times

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


class Side:
    """Blocks of one kind of clients."""

    def __init__(self, runners: Sequence[Runner]) -> None:
        self.runners = runners
        self.rates: list[float] = []  # operations a second, by block
        self.times: list[npt.NDArray[np.float64]] = []

    def block(self, seconds: float, counts: bool = True) -> None:
        for runner in self.runners:
            runner.begin(seconds)
        parts = [runner.end() for runner in self.runners]
        if counts:
            self.rates.append(sum(map(len, parts)) / seconds)
            self.times += parts

    def told(self, prefix: str = "") -> Row:
        ordered = np.sort(np.concatenate(self.times)) * 1e6
        quantiles = {"p50_us": 0.5, "p99_us": 0.99, "p999_us": 0.999}
        return {
            f"{prefix}per_s": round(float(np.median(self.rates))),
            **{f"{prefix}{name}": round(quantile(ordered, q), 1) for name, q in quantiles.items()},
            f"{prefix}max_us": round(float(ordered[-1]), 1),
        }


def run(options: Options) -> Row:
    """For each number of clients: operations a second and what one takes, ours and the echo's."""
    packed = _tokens(options.tokens)
    overrides = [f"pool.page_size={options.page_size}", f"events.enabled={str(options.events).lower()}"]
    with Daemon(overrides) as daemon:
        daemon.wait_healthy()
        from sglcache.client import Client

        with Client(daemon.socket, name="bench") as client:
            with client.acquire(packed) as lease:
                lease.commit()
            with client.acquire(packed) as lease:
                sizes = rpc.sizes_of(packed, lease)
            with rpc.echo_server(sizes, (0.0, 0.0)) as (path, process):
                with rpc.connected(path, process):
                    pass
                rows = [_measure(number, options, daemon.socket, path, sizes) for number in options.clients]
            facts = client.status()
    return {
        "tokens": options.tokens,
        "page_size": options.page_size,
        "events": options.events,
        "frame_bytes": list(sizes),
        "pairs": options.pairs,
        "block_s": options.block_s,
        "collections": facts["counters"]["collections"],
        "longest_stall_ms": round(1e3 * facts["loop"]["longest_s"], 2),
        "rows": rows,
    }


def _measure(number: int, options: Options, socket: Path, echo: Path, sizes: rpc.Sizes) -> Row:
    with contextlib.ExitStack() as stack:
        sides = []
        for arguments in (("ours", socket, options.tokens), ("echo", echo, *sizes)):
            runners = [Runner(*arguments) for _ in range(number)]
            for runner in runners:
                stack.callback(runner.close)
            sides.append(Side(runners))
        for side in sides:
            for runner in side.runners:
                runner.ready()
        for side in sides:
            side.block(WARM_UP_S, counts=False)
        for _ in range(options.pairs):
            for side in sides:
                side.block(options.block_s)
    own, bare = sides
    told = {**own.told(), **bare.told("echo_")}
    return {
        "clients": number,
        **told,
        "ratio": round(told["p50_us"] / told["echo_p50_us"], 2),
        "ratio_per_s": round(told["echo_per_s"] / told["per_s"], 2),
    }


def _tokens(number: int) -> bytes:
    return np.random.default_rng(0).integers(0, 128_000, number, dtype=np.uint32).tobytes()


# -- one client -----------------------------------------------------------------------------------------------


def _loop(operation: Callable[[], object]) -> None:
    clock, out = time.perf_counter, sys.stdout.buffer
    operation()
    out.write(b"r")
    out.flush()
    for line in sys.stdin:
        times = array("d")
        now = clock()
        end = now + float(line)
        while now < end:
            began = now
            operation()
            now = clock()
            times.append(now - began)
        payload = times.tobytes()
        out.write(len(payload).to_bytes(HEADER, "little") + payload)
        out.flush()


def main(kind: str, path: str, *numbers: str) -> None:
    """One client, until its stdin ends."""
    if kind == "ours":
        from sglcache.client import Client

        with Client(path, name="bench") as client:
            _loop(rpc.ours(client, _tokens(int(numbers[0]))))
    else:
        with rpc.connected(Path(path)) as connection:
            _loop(rpc.echoes(connection, rpc.Sizes(*map(int, numbers))))


if __name__ == "__main__":
    main(*sys.argv[1:])
