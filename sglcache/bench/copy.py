"""How fast the copy engine moves pages, against plain memcpys of as many bytes: in as many threads, or a card's own.

All of it is one process, started as a rank is (its memcpys go past the caches), between pools as a rank has them: the
device's in memfds or on a card, the host's in memfds, every page touched, and pinned for a card. Engine and memcpys
run in turn. A ratio is the memcpys' time over the engine's: 1 is as fast, and the engine's times are from `submit` to
`done` as another thread hears of it. A load goes layer by layer. Before anything is timed a copy of each kind is made
and its bytes are looked at.

    dense       one run of pages on both sides
    runs        as a pool in use has them: runs of 8 pages, in any order, on both sides
    scattered   every page anywhere, on both sides

On a card there are two plain memcpys, both cuMemcpyAsync as large as can be: `memcpy` is between it and memory of
cuMemHostAlloc, which is what a card does at best; `registered` is between it and the host pool, which is pinned by
cuMemHostRegister, so that what is lost by that is apart from what is lost by the engine.

Run as a module with options as JSON, this file is that process.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from sglcache import config as configs
from sglcache.bench.hand import CardReach, Reach, SharedReach, page_of, sample, write_page
from sglcache.bench.harness import BenchError, Comparison, Row, in_turn, rounds, run_ours
from sglcache.console import complain, exit_code
from sglcache.errors import SglcacheError
from sglcache.memory.cpu_engine import default_threads
from sglcache.memory.cuda_pools import CudaPool
from sglcache.memory.engine import LoadPlace, Transfer
from sglcache.memory.filling import Filler, pinned_pages
from sglcache.memory.geometry import FULL, Geometry
from sglcache.memory.pools import Pool, ResourcePools
from sglcache.server.allocator import copy_past_caches
from sglcache.server.devices import devices_of
from sglcache.testing.card import WORD, Card
from sglcache.units import TicketId, Tier

RUN_S = 1800.0
WAIT_S = 120.0
RUN_PAGES = 8
SMALL_REPEATS = 15
SHAPES = ("dense", "runs", "scattered")

Slots = npt.NDArray[np.int32]
BACKUP, LOAD, BOTH = "backup", "load", "both"
Plain = Callable[[int, str], float]
"""(num_bytes, way): seconds of plain memcpys of so many bytes that way; of BOTH, of so many each way at once."""


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
    device: str = "cpu"  # or cuda
    shapes: tuple[str, ...] = SHAPES
    both_shapes: tuple[str, ...] = ("dense",)  # of both directions at once


def run(options: Options, timeout_s: float = RUN_S) -> Row:
    """Measure in a process that was started as a rank is. BenchError: a size holds no page, or it failed.

    ConfigError: there is no such device.
    """
    command = [sys.executable, "-m", "sglcache.bench.copy", json.dumps(options._asdict())]
    return run_ours(command, timeout_s, copy_past_caches(os.environ))


class Floor(Protocol):
    """What the engine is measured beside, and how its pools are looked at."""

    plain: Mapping[str, Plain]  # by name; `memcpy` first
    reach: Reach  # of the device's pool

    @property
    def facts(self) -> Row:
        """Of who copies."""
        ...

    def close(self) -> None: ...


class Threads:
    """memcpys in the engine's number of threads."""

    def __init__(self, device: Pool, host: Pool, threads: int) -> None:
        self._device, self._host, self._threads = device.address, host.address, threads
        self._workers = ThreadPoolExecutor(2 * threads)
        self.reach: Reach = SharedReach()
        self.plain: Mapping[str, Plain] = {"memcpy": self._memcpys}
        self.facts: Row = {"threads": threads}

    def close(self) -> None:
        self._workers.shutdown()

    def _memcpys(self, num_bytes: int, way: str) -> float:
        a, b = self._device, self._host
        share = num_bytes // self._threads
        begun = time.perf_counter()
        over = []
        for number in range(self._threads):
            if way != LOAD:
                over.append(self._workers.submit(ctypes.memmove, b + number * share, a + number * share, share))
            if way != BACKUP:
                at = num_bytes + number * share
                over.append(self._workers.submit(ctypes.memmove, a + at, b + at, share))
        for each in over:
            each.result(WAIT_S)
        return time.perf_counter() - begun


class CopyEngines:
    """A card's own, by cuMemcpyAsync."""

    def __init__(self, device: CudaPool, host: Pool, most_bytes: int) -> None:
        """`most_bytes`: of one direction."""
        self._card = card = Card(device.device)
        self.reach: Reach = CardReach(card)
        self._device, self._most = device.address, most_bytes
        self._streams = card.stream(), card.stream()
        self._pinned = card.alloc_host(2 * most_bytes)
        # One copy may not reach over from one pinned range into the next.
        span = pinned_pages([host]) * host.placement.page_bytes
        self.plain: Mapping[str, Plain] = {
            "memcpy": partial(self._copies, self._pinned, 0),
            "registered": partial(self._copies, host.address, span),
        }
        self.facts: Row = {
            "card": card.name(),
            "driver": card.driver_version(),
            "batched": card.batched_by or "one by one",
        }

    def close(self) -> None:
        self._card.free_host(self._pinned)
        self._card.release(self._streams, ())

    def _copies(self, host: int, span: int, num_bytes: int, way: str) -> float:
        card, (down, up) = self._card, self._streams
        begun = time.perf_counter()
        if way != LOAD:
            for at, size in pieces(0, num_bytes, span):
                card.copy_one(host + at, self._device + at, size, down)
        if way != BACKUP:
            for at, size in pieces(num_bytes, num_bytes, span):
                card.copy_one(self._device + at, host + at, size, up)
        for stream in self._streams:
            card.synchronize(stream)
        return time.perf_counter() - begun


def pieces(start: int, num_bytes: int, span: int) -> list[tuple[int, int]]:
    """(start, size) of what lies between multiples of `span`; 0: all is one."""
    if not span:
        return [(start, num_bytes)]
    edges = [start, *range((start // span + 1) * span, start + num_bytes, span), start + num_bytes]
    return [(a, b - a) for a, b in pairwise(edges)]


class Bench:
    """Pools, an engine between them, and plain memcpys."""

    def __init__(self, options: Options) -> None:
        self.pairs = options.pairs
        self.page_bytes = self._geometry(options, 1).page_bytes
        self.sizes = [(size << 20) // self.page_bytes for size in options.sizes_mib]
        if not all(self.sizes):
            raise BenchError(f"a page has {self.page_bytes:,} bytes; give --size more than that")
        config = self._config(options, 2 * max(self.sizes))  # so that there is an anywhere
        self.geometry = Geometry.of(config)
        devices = devices_of(config, 0, 0)
        self.pools = ResourcePools(FULL, self.geometry, make=devices.pool)
        self.device, self.host = self.pools.device, self.pools.host
        self._done: SimpleQueue[tuple[TicketId, bool, Any]] = SimpleQueue()
        self._layers: SimpleQueue[float] = SimpleQueue()
        self.engine = devices.engine(
            config,
            [self.pools],
            lambda *told: self._done.put(told),
            lambda *told: self._layers.put(time.perf_counter()),
            lambda error: self._done.put((TicketId(0), False, error)),
        )
        self._ticket = self._written = 0
        filled = threading.Event()
        filler = Filler(
            self.host.shards,
            lambda num_pages: filled.set() if num_pages == self.geometry.host_pages else None,
            [cast("Sequence[Pool]", self.device.shards)] if not devices.pins else (),
            devices.pin if devices.pins else None,
        )
        if not filled.wait(WAIT_S):
            raise BenchError(f"the host pool's memory was not there after {WAIT_S:.0f} s: {filler.short}")
        filler.close()
        device, host = cast("Pool | CudaPool", self.device.shards[0]), self.host.shards[0]
        self.floor: Floor
        if isinstance(device, CudaPool):
            self.floor = CopyEngines(device, host, max(self.sizes) * self.page_bytes)
        else:
            self.floor = Threads(device, host, options.threads or default_threads())
        self._sides: dict[Tier, tuple[Pool | CudaPool, Reach]] = {
            Tier.DEVICE: (device, self.floor.reach),
            Tier.HOST: (host, SharedReach()),
        }

    def close(self) -> None:
        self.floor.close()
        self.engine.close()
        self.pools.close()

    def slots(self, count: int, shape: str) -> Slots:
        """So many pages of a pool, the same ones each time."""
        num_pages = self.geometry.num_pages
        if shape == "dense":
            return np.arange(count, dtype=np.int32)
        rng = np.random.default_rng(count)
        size = 1 if shape == "scattered" else max(1, min(RUN_PAGES, num_pages // 2))
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
        seconds = self._copy(self._pair(count, shape))
        while not self._layers.empty():
            self._layers.get()
        return seconds

    def first_layer(self, count: int, shape: str) -> tuple[float, float]:
        """Seconds until a load's first step is told of, and its last."""
        begun = time.perf_counter()
        self._copy([self._transfer(Tier.HOST, Tier.DEVICE, count, shape)])
        times = [self._layers.get() - begun for _ in range(self._layers.qsize())]
        return times[0], times[-1]

    def plain(self, num_bytes: int, way: str) -> dict[str, Callable[[], float]]:
        """The plain memcpys, by name."""
        return {name: partial(memcpy, num_bytes, way) for name, memcpy in self.floor.plain.items()}

    def prove(self, count: int, shape: str) -> int:
        """Copy, each way alone and both at once, and look at the pages; how many. BenchError: one is wrong."""
        kinds = (
            [self._transfer(Tier.DEVICE, Tier.HOST, count, shape)],
            [self._transfer(Tier.HOST, Tier.DEVICE, count, shape)],
            self._pair(count, shape),
        )
        return sum(self._proved(transfers, shape) for transfers in kinds)

    def _proved(self, transfers: Sequence[Transfer], shape: str) -> int:
        looked = []
        for transfer in transfers:
            src, dst = (np.frombuffer(each, np.int32).tolist() for each in (transfer.src_slots, transfer.dst_slots))
            pool, reach = self._sides[transfer.src]
            for at in sample(len(src)):
                self._written += 1
                write_page(reach, pool.placement, pool.address, src[at], self._written << 32)
                looked.append((transfer.dst, dst[at], self._written << 32))
        self.floor.reach.finish()
        self._copy(transfers)
        while not self._layers.empty():
            self._layers.get()
        right = np.arange(self.page_bytes // WORD, dtype=np.uint64)
        for tier, slot, begin in looked:
            pool, reach = self._sides[tier]
            if not np.array_equal(page_of(reach, pool.placement, pool.address, slot), right + np.uint64(begin)):
                raise BenchError(f"{shape}: page {slot} of {tier.name} is not what was copied to it")
        return len(looked)

    def _pair(self, count: int, shape: str) -> list[Transfer]:
        """Both ways, of pages apart, as the index sees to it."""
        if shape == "dense":
            ways = ((Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DEVICE))
            return [self._transfer(*way, count, shape, number * count) for number, way in enumerate(ways)]
        every = self.slots(2 * count, shape)
        down, up = every[:count], every[count:]
        return [self._of(Tier.DEVICE, Tier.HOST, down, down[::-1]), self._of(Tier.HOST, Tier.DEVICE, up, up[::-1])]

    def _transfer(self, src: Tier, dst: Tier, count: int, shape: str, behind: int = 0) -> Transfer:
        slots = self.slots(count, shape)
        if shape == "dense":
            there = slots = slots + np.int32(behind)
        else:
            there = np.roll(slots, count // 3)
        return self._of(src, dst, slots, there)

    def _of(self, src: Tier, dst: Tier, slots: Slots, there: Slots) -> Transfer:
        self._ticket += 1
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

    def _config(self, options: Options, num_pages: int) -> configs.Config:
        tokens = num_pages * options.page_size
        pool = {
            "device": options.device,
            "untried": options.device == "cuda",
            "page_size": options.page_size,
            "num_tokens": tokens,
            "num_layers": options.num_layers,
            "num_kv_heads": options.num_kv_heads,
            "head_dim": options.head_dim,
            "layout": options.layout,
        }
        host = {"num_tokens": tokens, "layout": options.host_layout, "copy_threads": options.threads}
        return configs.parse({"pool": pool, "host": host})

    def _geometry(self, options: Options, num_pages: int) -> Geometry:
        return Geometry.of(self._config(options, num_pages))


def measure(options: Options) -> Row:
    """In this process, whatever its environment."""
    with closing(Bench(options)) as bench:
        row: Row = {
            **bench.floor.facts,
            "page_bytes": bench.page_bytes,
            "layouts": f"{options.layout} to {options.host_layout}",
            "pages_proved": sum(bench.prove(min(bench.sizes), shape) for shape in options.shapes),
            "cases": [_case(bench, count, shape) for count in bench.sizes for shape in options.shapes],
            "both_directions": [_both(bench, count, shape) for count in bench.sizes for shape in options.both_shapes],
            "first_layer": [_first_layer(bench, count) for count in bench.sizes],
        }
        row["half"] = _half(bench, max(bench.sizes))
        row["one_page"] = _one_page(bench)
        return row


def _case(bench: Bench, count: int, shape: str) -> Row:
    num_bytes = count * bench.page_bytes
    row: Row = {"mib": num_bytes >> 20, "slots": shape}
    for name, copy in ((BACKUP, bench.backup), (LOAD, bench.load)):
        row[name] = _against(partial(copy, count, shape), bench.plain(num_bytes, name), bench.pairs, num_bytes)
    return row


def _both(bench: Bench, count: int, shape: str) -> Row:
    num_bytes = count * bench.page_bytes
    both = _against(partial(bench.both, count, shape), bench.plain(num_bytes, BOTH), bench.pairs, 2 * num_bytes)
    return {"mib": num_bytes >> 20, "slots": shape, "both": both}


def _against(ours: Callable[[], float], plain: Mapping[str, Callable[[], float]], pairs: int, num_bytes: int) -> Row:
    """Ratios of the first of the plain ones are `ratio`, those of another are named."""
    calls = [ours, *plain.values()]
    for call in calls:
        call()
    mine, *others = rounds(calls, pairs)
    row: Row = {"gb_s": num_bytes / statistics.median(mine) / 1e9}
    for number, (name, its) in enumerate(zip(plain, others, strict=True)):
        comparison = Comparison.of(mine, its)
        prefix = f"{name}_" if number else ""
        row[f"{name}_gb_s"] = num_bytes / comparison.other / 1e9
        row |= {
            f"{prefix}ratio": comparison.ratio,
            f"{prefix}ratio_least": comparison.least,
            f"{prefix}ratio_most": comparison.most,
        }
    return row


def _first_layer(bench: Bench, count: int) -> Row:
    """As shares of the time of the memcpys of all of it."""
    num_bytes = count * bench.page_bytes
    plain = next(iter(bench.plain(num_bytes, LOAD).values()))
    layers, memcpys = in_turn(lambda: bench.first_layer(count, "dense"), plain, bench.pairs)
    first, last = (statistics.median(each) for each in zip(*layers, strict=True))
    memcpy = statistics.median(memcpys)
    return {"mib": num_bytes >> 20, "first_ms": first * 1e3, "last_ms": last * 1e3, "memcpy_ms": memcpy * 1e3}


def _one_page(bench: Bench) -> Row:
    """µs: what a copy takes however small it is."""
    found: Row = {}
    for name, copy in ((BACKUP, bench.backup), (LOAD, bench.load)):
        plain = next(iter(bench.plain(bench.page_bytes, name).values()))
        comparison = Comparison.of(*in_turn(partial(copy, 1, "dense"), plain, 2 * SMALL_REPEATS))
        found[name] = {"us": comparison.ours * 1e6, "memcpy_us": comparison.other * 1e6}
    return found


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
    told: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in words.items()}
    try:
        print(json.dumps(measure(Options(**told))))
    except SglcacheError as error:
        complain(error, as_json=True)
        sys.exit(exit_code(error))
