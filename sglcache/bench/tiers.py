"""What a second tier costs and gives a runner, through the real daemon and client.

**A load-back.** Of a prompt that only the host has: from the acquire to its answer, to the first layer that is
readable, and to the last, beside a plain memcpy of as many bytes in this process, in turn.

**A write-through.** Acquire, commit and release of new prompts, with a host tier that takes each of them, and without
one, in turn, two daemons beside each other: what the runner waits for, not the copy, which goes on behind it. Between
prompts the runner is busy with something else for a while (asleep): one that does nothing but commit would in the end
wait for the copies.
"""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sglcache.bench.daemon import Daemon
from sglcache.bench.harness import BenchError, Comparison, Row, in_turn

if TYPE_CHECKING:
    from sglcache.client import Client

WAIT_S = 30.0


class Options(NamedTuple):
    """What `bench tiers` is told. By default the pages are those of Llama-3.1-8B: 128 KiB a token."""

    tokens: int = 1024  # of the prompt that is loaded
    page_size: int = 16
    num_layers: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    pairs: int = 9
    operations: int = 20  # prompts of a block of write-throughs, of 8 pages each
    compute_ms: float = 20.0  # between them


class _Times(NamedTuple):
    """Seconds since the acquire was sent."""

    answer: float
    first: float
    last: float


def run(options: Options) -> Row:
    """Both. BenchError: the daemon did not do what is to be timed."""
    return {"load_back": _load_back(options), "write_through": _write_through(options)}


def _load_back(options: Options) -> Row:
    num_pages = -(-options.tokens // options.page_size)
    with _daemon(options, 2 * num_pages, 4 * num_pages) as client:
        geometry = client.geometry
        prompts = [np.arange(num_pages * options.page_size, dtype=np.uint32) + (n << 24) for n in range(3)]
        for prompt in prompts:  # each pushes an earlier one off the device
            _put(client, prompt)
        num_bytes = num_pages * geometry.page_bytes
        one, other = (np.ones(num_bytes, np.uint8) for _ in range(2))
        turn = 0

        def load() -> _Times:
            nonlocal turn
            for _ in prompts:  # the one that was used the longest ago: the host alone has it
                prompt = prompts[turn % len(prompts)]
                turn += 1
                begun = time.perf_counter()
                lease = client.acquire(prompt)
                answer = time.perf_counter() - begun
                if lease.host_tokens == len(prompt):
                    lease.wait_loaded(0)
                    first = time.perf_counter() - begun
                    lease.wait_loaded()
                    last = time.perf_counter() - begun
                    lease.release(wait=True)
                    return _Times(answer, first, last)
                lease.wait_loaded()
                lease.release(wait=True)
            raise BenchError(f"no prompt of {len(prompts)} was on the host alone")

        def plain() -> float:
            begun = time.perf_counter()
            ctypes.memmove(other.ctypes.data, one.ctypes.data, num_bytes)
            return time.perf_counter() - begun

        load(), plain()
        loads, memcpys = in_turn(load, plain, options.pairs)
    answer, first, last = (statistics.median(each) for each in zip(*loads, strict=True))
    memcpy = statistics.median(memcpys)
    return {
        "mib": num_bytes >> 20,
        "layers": geometry.num_layers,
        "answer_ms": answer * 1e3,
        "first_layer_ms": first * 1e3,
        "last_layer_ms": last * 1e3,
        "memcpy_ms": memcpy * 1e3,
        "last_over_memcpy": last / memcpy,
        "first_over_last": first / last,
    }


def _write_through(options: Options) -> Row:
    pages = 8
    room = 2 * options.operations * pages
    turn = 0
    with _daemon(options, room, room) as with_host, _daemon(options, room, 0) as without:

        def block(client: Client) -> tuple[float, float]:
            """Medians of an acquire and of a commit, in seconds."""
            nonlocal turn
            acquires, commits = [], []
            for _ in range(options.operations):
                turn += 1
                tokens = np.arange(pages * options.page_size, dtype=np.uint32) + (turn << 12)
                a = time.perf_counter()
                lease = client.acquire(tokens)
                b = time.perf_counter()
                lease.commit()
                commits.append(time.perf_counter() - b)
                acquires.append(b - a)
                lease.release(wait=True)
                time.sleep(options.compute_ms / 1e3)
            return statistics.median(acquires), statistics.median(commits)

        block(with_host), block(without)
        ours, other = in_turn(lambda: block(with_host), lambda: block(without), options.pairs)
        backups = with_host.status()["counters"]["backup_pages"]
    if backups < options.operations * pages:
        raise BenchError(f"the host tier took {backups} pages; nothing was written through")
    row: Row = {"pages": pages, "mib": pages * with_host.geometry.page_bytes >> 20}
    for number, name in enumerate(("acquire", "commit")):
        comparison = Comparison.of([each[number] for each in other], [each[number] for each in ours])
        row[name] = {
            "with_host_us": comparison.other * 1e6,
            "without_us": comparison.ours * 1e6,
            "ratio": comparison.ratio,
            "ratio_least": comparison.least,
            "ratio_most": comparison.most,
        }
    return row


def _put(client: Client, prompt: np.ndarray) -> None:
    with client.acquire(prompt) as lease:
        lease.wait_loaded()
        client.pool.array[lease.slots] = 7
        lease.commit()
    deadline = time.monotonic() + WAIT_S
    while client.status()["gauges"]["num_copies"]:
        if time.monotonic() > deadline:
            raise BenchError(f"a prompt was not on the host after {WAIT_S:.0f} s")
        time.sleep(0.001)


@contextlib.contextmanager
def _daemon(options: Options, num_pages: int, host_pages: int) -> Iterator[Client]:
    """A daemon with so many pages, all of them touched, and a client of it."""
    from sglcache.client import Client

    settings = {
        "pool.page_size": options.page_size,
        "pool.num_tokens": num_pages * options.page_size,
        "pool.num_layers": options.num_layers,
        "pool.num_kv_heads": options.num_kv_heads,
        "pool.head_dim": options.head_dim,
        "host.num_tokens": host_pages * options.page_size,
        "host.populate": "true" if host_pages else "false",
    }
    with Daemon([f"{key}={value}" for key, value in settings.items()]) as daemon:
        daemon.wait_healthy()
        with Client(daemon.socket) as client:
            client.pool.array[:] = 0
            deadline = time.monotonic() + WAIT_S
            while any(each["ready_bytes"] < each["bytes"] for each in client.status()["memory"].values()):
                if time.monotonic() > deadline:
                    raise BenchError(f"the host tier's memory was not there after {WAIT_S:.0f} s")
                time.sleep(0.01)
            yield client
