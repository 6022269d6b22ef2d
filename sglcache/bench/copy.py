"""How fast the copy engine moves pages, against plain memcpys of as many bytes in as many threads.

All of it is one process, started as a rank is (its memcpys go past the caches), between pools as a rank has them:
memfds, every page touched. Engine and memcpy run in turn. A ratio is the memcpys' time over the engine's: 1 is as fast,
and the engine's times are from `submit` to `done` as another thread hears of it. A load goes layer by layer.

    dense       one run of pages on both sides
    runs        as a pool in use has them: runs of 8 pages, in any order, on both sides
    scattered   every page anywhere, on both sides

Run as a module with options as JSON, this file is that process.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sglcache.bench.harness import BenchError, Comparison, Row, in_turn, run_json
from sglcache.memory.cpu_engine import CpuEngine, default_threads
from sglcache.memory.engine import LoadPlace, Transfer, ways_of
from sglcache.memory.geometry import Geometry
from sglcache.memory.pools import HostPools, Pools, make_memfd_pool
from sglcache.server.allocator import copy_past_caches
from sglcache.units import TicketId, Tier

WAIT_S = 60.0
RUN_PAGES = 8
SMALL_REPEATS = 15
SHAPES = ("dense", "runs", "scattered")

Slots = npt.NDArray[np.int32]


class Options(NamedTuple):
    """What `bench copy` is told. By default the pages are those of 16 tokens of Llama-3.1-8B: 2 MiB."""

    sizes_mib: tuple[int, ...] = (64, 256)
    page_size: int = 16
    num_layers: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    layout: str = "page_first"
    host_layout: str = "page_first"
    threads: int = 0  # of each direction; 0: as a rank has by default
    pairs: int = 7


def run(options: Options) -> Row:
    """Measure in a process that was started as a rank is. BenchError: a size holds no page, or it failed."""
    command = [sys.executable, "-m", "sglcache.bench.copy", json.dumps(options._asdict())]
    return run_json(command, env=copy_past_caches(os.environ))


class Bench:
    """Pools, an engine between them, and plain memcpys."""

    def __init__(self, options: Options) -> None:
        self.threads = options.threads or default_threads()
        self.pairs = options.pairs
        one = Geometry(
            page_size=options.page_size,
            num_pages=1,
            num_layers=options.num_layers,
            num_kv_heads=options.num_kv_heads,
            head_dim=options.head_dim,
        )
        self.sizes = [(size << 20) // one.page_bytes for size in options.sizes_mib]
        if not all(self.sizes):
            raise BenchError(f"a page has {one.page_bytes:,} bytes; give --size more than that")
        num_pages = 2 * max(self.sizes)  # so that there is an anywhere
        self.geometry = Geometry(
            page_size=options.page_size,
            num_pages=num_pages,
            num_layers=options.num_layers,
            num_kv_heads=options.num_kv_heads,
            head_dim=options.head_dim,
            layout=options.layout,
            host_layout=options.host_layout,
            host_pages=num_pages,
        )
        self.page_bytes = self.geometry.page_bytes
        self.device, self.host = (
            Pools("device", 1, self.geometry.placement(), make_memfd_pool),
            HostPools(self.geometry),
        )
        self.device.shards[0].buffer[:] = 3
        self.host.shards[0].buffer[:] = 5
        self._done: SimpleQueue[tuple[TicketId, bool, Any]] = SimpleQueue()
        self._layers: SimpleQueue[float] = SimpleQueue()
        self.engine = CpuEngine(
            ways_of(self.geometry, self.device.shards, self.host.shards),
            lambda *told: self._done.put(told),
            lambda *told: self._layers.put(time.perf_counter()),
            num_threads=self.threads,
        )
        self._workers = ThreadPoolExecutor(2 * self.threads)
        self._ticket = 0

    def close(self) -> None:
        self.engine.close()
        self._workers.shutdown()
        self.device.close()
        self.host.close()

    def slots(self, count: int, shape: str) -> Slots:
        """So many pages of a pool, the same ones each time."""
        num_pages = self.geometry.num_pages
        if shape == "dense":
            return np.arange(count, dtype=np.int32)
        rng = np.random.default_rng(count)
        size = 1 if shape == "scattered" else RUN_PAGES
        starts = rng.permutation(num_pages // size)[: -(-count // size)] * size
        return (starts[:, None] + np.arange(size)).reshape(-1)[:count].astype(np.int32)

    def backup(self, count: int, shape: str) -> float:
        return self._copy([self._transfer(Tier.DEVICE, Tier.HOST, count, shape)])

    def load(self, count: int, shape: str) -> float:
        """Layer by layer."""
        seconds = self._copy([self._transfer(Tier.HOST, Tier.DEVICE, count, shape)])
        while not self._layers.empty():
            self._layers.get()
        return seconds

    def both(self, count: int, shape: str) -> float:
        pairs = ((Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DEVICE))
        # Pages apart, as the index sees to it: the load's are those behind.
        seconds = self._copy([self._transfer(*pair, count, shape, num * count) for num, pair in enumerate(pairs)])
        while not self._layers.empty():
            self._layers.get()
        return seconds

    def first_layer(self, count: int, shape: str) -> tuple[float, float]:
        """Seconds until a load's first step is told of, and its last."""
        begun = time.perf_counter()
        self._copy([self._transfer(Tier.HOST, Tier.DEVICE, count, shape)])
        times = [self._layers.get() - begun for _ in range(self._layers.qsize())]
        return times[0], times[-1]

    def plain(self, num_bytes: int, ways: int = 1) -> float:
        """memcpys of so many bytes, in the engine's number of threads; `ways` 2: back as well, at the same time."""
        a, b = self.device.shards[0].address, self.host.shards[0].address
        share = num_bytes // self.threads
        begun = time.perf_counter()
        over = []
        for number in range(self.threads):
            over.append(self._workers.submit(ctypes.memmove, b + number * share, a + number * share, share))
            if ways == 2:
                at = num_bytes + number * share
                over.append(self._workers.submit(ctypes.memmove, a + at, b + at, share))
        for each in over:
            each.result(WAIT_S)
        return time.perf_counter() - begun

    def _transfer(self, src: Tier, dst: Tier, count: int, shape: str, behind: int = 0) -> Transfer:
        self._ticket += 1
        slots = self.slots(count, shape)
        if shape == "dense":
            there = slots = slots + np.int32(behind)
        else:
            there = np.roll(slots, count // 3) if behind == 0 else slots[::-1]
        load = LoadPlace(0, 1) if dst is Tier.DEVICE else None
        return Transfer(TicketId(self._ticket), src, dst, slots.tobytes(), there.tobytes(), load)

    def _copy(self, transfers: Sequence[Transfer]) -> float:
        begun = time.perf_counter()
        for transfer in transfers:
            self.engine.submit(transfer)
        for _ in transfers:
            ticket, ok, error = self._done.get(timeout=WAIT_S)
            if not ok:
                raise BenchError(f"copy {ticket} failed: {error}")
        return time.perf_counter() - begun


def measure(options: Options) -> Row:
    """In this process, whatever its environment."""
    with closing(Bench(options)) as bench:
        row: Row = {
            "threads": bench.threads,
            "page_bytes": bench.page_bytes,
            "layouts": f"{options.layout} to {options.host_layout}",
            "cases": [_case(bench, count, shape) for count in bench.sizes for shape in SHAPES],
            "both_directions": [_both(bench, count) for count in bench.sizes],
            "first_layer": [_first_layer(bench, count) for count in bench.sizes],
        }
        row["half"] = _half(bench, max(bench.sizes))
        return row


def _case(bench: Bench, count: int, shape: str) -> Row:
    num_bytes = count * bench.page_bytes
    row: Row = {"mib": num_bytes >> 20, "slots": shape}
    for name, copy in (("backup", bench.backup), ("load", bench.load)):
        row[name] = _against(partial(copy, count, shape), partial(bench.plain, num_bytes), bench.pairs, num_bytes)
    return row


def _both(bench: Bench, count: int) -> Row:
    num_bytes = count * bench.page_bytes
    ours, plain = partial(bench.both, count, "dense"), partial(bench.plain, num_bytes, 2)
    both = _against(ours, plain, bench.pairs, 2 * num_bytes)
    return {"mib": num_bytes >> 20, "slots": "dense", "both": both}


def _against(ours: Callable[[], float], plain: Callable[[], float], pairs: int, num_bytes: int) -> Row:
    ours(), plain()
    comparison = Comparison.of(*in_turn(ours, plain, pairs))
    return {
        "gb_s": num_bytes / comparison.ours / 1e9,
        "memcpy_gb_s": num_bytes / comparison.other / 1e9,
        "ratio": comparison.ratio,
        "ratio_least": comparison.least,
        "ratio_most": comparison.most,
    }


def _first_layer(bench: Bench, count: int) -> Row:
    """As shares of the time of the memcpys of all of it."""
    num_bytes = count * bench.page_bytes
    layers, plain = in_turn(lambda: bench.first_layer(count, "dense"), lambda: bench.plain(num_bytes), bench.pairs)
    first, last = (statistics.median(each) for each in zip(*layers, strict=True))
    memcpy = statistics.median(plain)
    return {"mib": num_bytes >> 20, "first_ms": first * 1e3, "last_ms": last * 1e3, "memcpy_ms": memcpy * 1e3}


def _half(bench: Bench, most: int) -> Row:
    """The smallest size that reaches half of the bandwidth of the largest, both directions; of one page and doubled."""
    found: Row = {}
    for name, copy in (("backup", bench.backup), ("load", bench.load)):
        counts = [1 << power for power in range(most.bit_length())]
        rates = {}
        for count in counts:
            repeats = max(bench.pairs, min(SMALL_REPEATS, most // count))
            rates[count] = count / statistics.median(copy(count, "runs") for _ in range(repeats))
        reached = [count for count in counts if rates[count] >= rates[counts[-1]] / 2]
        found[name] = {
            "half_at_kib": (reached[0] * bench.page_bytes) >> 10,
            "of_mib": counts[-1] * bench.page_bytes >> 20,
        }
    return found


if __name__ == "__main__":
    words = json.loads(sys.argv[1])
    print(json.dumps(measure(Options(**{**words, "sizes_mib": tuple(words["sizes_mib"])}))))
