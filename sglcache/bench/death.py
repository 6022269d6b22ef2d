"""How soon a killed runner's pages are free: from SIGKILL until they are all on the free list again.

A process forks runners, which attach by themselves, take leases and write into every page; each is killed alone,
through a descriptor of it. Three moments are seen, all on CLOCK_MONOTONIC: when that descriptor is readable here
(`dead_ms`), when the rank's loop was told of the death by its own (`heard_ms`), and when all was free (`freed_ms`, from
then on); `total_ms` is from the signal to the last of these. What lies before the rank hears of it is the kernel's: to
end the process, unmap its pages, and wake who waits. The rank may be told before this process is.

Run as a module with a socket, leases and their tokens, this file is that process: for each line that it reads it forks
a runner, and prints its pid once it holds its leases.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

import numpy as np

from sglcache.bench.daemon import Daemon
from sglcache.bench.hand import CardReach, Hand, on_device
from sglcache.bench.harness import BenchError, Row, Summary

if TYPE_CHECKING:
    from sglcache.client import Client

WAIT_S = 10.0
PAUSE_S = 0.002
BUSY_S = 5.0  # that a killed runner's kernel would have gone on
LLAMA = ("pool.num_layers=32", "pool.num_kv_heads=8", "pool.head_dim=128", "pool.dtype=bfloat16")
FIELDS = ("dead_ms", "heard_ms", "freed_ms", "total_ms")


class Options(NamedTuple):
    """What `bench death` is told."""

    samples: int = 200
    leases: int = 8
    lease_tokens: int = 2048
    page_size: int = 16
    events: bool = True
    device: str = "cpu"  # or cuda
    pool_gib: float = 0.0  # of pages of Llama-3.1-8B; 0: small pages, twice what a runner holds, and a host tier


def run(options: Options) -> Row:
    """One after the other. BenchError: one did not die, or its pages did not come back, within some seconds."""
    from sglcache.client import Client

    pages = options.leases * -(-options.lease_tokens // options.page_size)
    overrides = [
        f"pool.page_size={options.page_size}",
        *_pool(options, pages),
        f"events.enabled={str(options.events).lower()}",
        *on_device(options.device),
    ]
    samples: dict[str, list[float]] = {name: [] for name in FIELDS}
    with Daemon(overrides) as daemon:
        daemon.wait_healthy()
        with (
            Client(daemon.socket, role="observer", name="bench") as observer,
            _nursery(daemon.socket, options) as (
                ask,
                answers,
            ),
        ):
            free = _free(observer)
            for _ in range(options.samples):
                ask.write("\n")
                ask.flush()
                pid = int(answers.readline() or 0)
                if not pid or free - _free(observer) != pages:
                    raise BenchError(f"a runner holds {free - _free(observer)} pages, not {pages}")
                for name, value in _kill(observer, pid).items():
                    samples[name].append(value)
                if _free(observer) != free:
                    raise BenchError(f"{_free(observer)} of {free} pages are free after a death")
    return {
        "samples": options.samples,
        "leases": options.leases,
        "pages": pages,
        "page_size": options.page_size,
        "events": options.events,
        "device": options.device,
        "pool_gib": options.pool_gib,
        **{name: Summary.of(values)._asdict() for name, values in samples.items()},
    }


def _pool(options: Options, pages: int) -> list[str]:
    if not options.pool_gib:
        return [f"pool.num_tokens={2 * pages * options.page_size}"]
    size = int(options.pool_gib * (1 << 30))
    return [*LLAMA, f"pool.size={size} B", "host.num_tokens=0"]


def _free(observer: Client) -> int:
    pools = observer.status()["pools"]
    return int(next(pool["free"] for pool in pools if (pool["resource"], pool["tier"]) == ("full", "DEVICE")))


def _kill(observer: Client, pid: int) -> dict[str, float]:
    """Milliseconds."""
    pidfd = os.pidfd_open(pid)
    try:
        start = time.monotonic()
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        if not select.select([pidfd], [], [], WAIT_S)[0]:
            raise BenchError(f"pid {pid} did not die within {WAIT_S:g} s")
        dead = time.monotonic()
    finally:
        os.close(pidfd)
    while time.monotonic() < dead + WAIT_S:
        time.sleep(PAUSE_S)  # nothing is asked while the rank is at it
        for each in observer.status()["reclaims"]:
            if each["pid"] == pid and each["freed_at"] > start:
                seconds = (
                    dead - start,
                    each["died_at"] - start,
                    each["freed_at"] - each["died_at"],
                    each["freed_at"] - start,
                )
                return {name: 1e3 * value for name, value in zip(FIELDS, seconds, strict=True)}
    raise BenchError(f"what pid {pid} held was not free within {WAIT_S:g} s of its death")


@contextmanager
def _nursery(socket: Path, options: Options) -> Iterator[tuple[IO[str], IO[str]]]:
    """A process that forks runners: what to ask it on, and where it answers."""
    words = [str(socket), str(options.leases), str(options.lease_tokens)]
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.stdin, process.stdout
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def _raise_runners(socket: str, leases: int, lease_tokens: int) -> None:
    """For each line a runner, forked before it attaches."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    for number, _ in enumerate(sys.stdin, 1):
        if os.fork():
            continue
        hand = Hand(socket, name="bench death")
        for i in range(leases):
            first = (number * leases + i) * lease_tokens
            lease = hand.client.acquire(np.arange(first, first + lease_tokens, dtype=np.uint32))
            hand.fill(lease.slots, number)
        hand.reach.finish()
        if isinstance(hand.reach, CardReach):
            hand.reach.card.spin(BUSY_S, hand.reach.stream)
        print(os.getpid(), flush=True)
        signal.pause()


if __name__ == "__main__":
    _raise_runners(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
