"""How long a single call can hold the loop: the index with many nodes cached, in its worst moments.

The index is filled with nodes of one page, half of them children of the root and half of one prompt. Then: small
requests that each evict a few nodes, long prompts that must evict tens of thousands, long hits, prompts that end
inside a node, copies to a second tier where there is one, and a clear. Every call is timed by itself, and so are the
collector's ticks between them, which is when the daemon's cycle collector runs: it never runs inside a call.

On a shared machine the CPU is taken away for milliseconds in the middle of any call, and a million calls meet that
often. But the program is the same in every run, call by call: it is run `repeats` times and each call counts with the
quickest of its runs. (The collector's ticks need not fall on the same call: of them the run with the least maximum
counts.) `max_us` is by the wall's clock, `max_cpu_us` by this thread's own; `raw_max_us` is the wall's
clock at its worst in any run, the machine's doings included.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from sglcache.bench.harness import Row, quantile
from sglcache.bench.index import touch_heap
from sglcache.core.effects import Copy, Effect, Grant, Wake
from sglcache.core.eviction import Policy
from sglcache.core.index import Index, IndexConfig
from sglcache.errors import SglcacheError
from sglcache.server.allocator import keep_large_buffers
from sglcache.server.collector import Collector

T = TypeVar("T")

ROOM = 4096  # pages beside those of the nodes
VOCAB = 128_000


class Options(NamedTuple):
    """What `bench stall` is told."""

    num_nodes: int = 200_000
    page_size: int = 16
    two_tiers: bool = False
    events: bool = True
    requests: int = 10_000  # of the steady part
    repeats: int = 3
    policy: str = "lru"


class Clock:
    """Times calls by kind, seconds, in their order."""

    def __init__(self) -> None:
        self.walls: dict[str, array[float]] = {}
        self.cpus: dict[str, array[float]] = {}

    def call(self, kind: str, function: Callable[..., T], *args: Any) -> T:
        cpu_start = time.thread_time()
        start = time.perf_counter()
        result = function(*args)
        wall = time.perf_counter() - start
        cpu = time.thread_time() - cpu_start
        if kind not in self.walls:
            self.walls[kind], self.cpus[kind] = array("d"), array("d")
        self.walls[kind].append(wall)
        self.cpus[kind].append(cpu)
        return result


def quickest(runs: list[array[float]], *, aligned: bool) -> npt.NDArray[np.float64]:
    """Each call's least time over the runs; where calls don't correspond, the run with the least maximum."""
    if aligned and len({len(run) for run in runs}) == 1:
        least: npt.NDArray[np.float64] = np.stack([np.frombuffer(run) for run in runs]).min(axis=0)
        return least
    return np.frombuffer(min(runs, key=max))


def rows(clocks: list[Clock]) -> dict[str, Row]:
    """By kind of call, microseconds, of one part in all runs."""
    table = {}
    for kind in clocks[0].walls:
        aligned = kind != "collect"
        walls = np.sort(quickest([clock.walls[kind] for clock in clocks], aligned=aligned)) * 1e6
        cpus = quickest([clock.cpus[kind] for clock in clocks], aligned=aligned) * 1e6
        table[kind] = {
            "calls": len(walls),
            "p50_us": round(float(quantile(walls, 0.5)), 1),
            "p999_us": round(float(quantile(walls, 0.999)), 1),
            "max_us": round(float(walls[-1]), 1),
            "max_cpu_us": round(float(cpus.max()), 1),
            "raw_max_us": round(max(max(clock.walls[kind]) for clock in clocks) * 1e6, 1),
        }
    return table


class Runner:
    """A session whose every call is timed."""

    def __init__(self, index: Index, clock: Clock, collector: Collector) -> None:
        self.index, self.clock, self.collector = index, clock, collector
        self.session = index.open_session()
        self.ticket = 0

    def call(self, kind: str, function: Callable[..., T], *args: Any) -> T:
        return self.clock.call(kind, function, *args)

    def request(self, tokens: bytes) -> Grant:
        """Acquire, commit, release, cut, in the daemon's order."""
        index, call = self.index, self.call
        grant = call("acquire", index.acquire, self.session, 1, tokens)
        wake = self.pump()
        while grant is None:
            call("step", index.step)
            wake = self.pump()
            if isinstance(wake, Wake):
                if isinstance(wake.result, SglcacheError):
                    raise wake.result
                assert isinstance(wake.result, Grant), wake
                grant = wake.result
        self.ticket += 1
        index.event_done(self.session, self.ticket)
        call("commit", index.commit, self.session, 2, grant.lease, self.ticket)
        self.pump()
        self.ticket += 1
        index.event_done(self.session, self.ticket)
        call("release", index.release, self.session, 3, grant.lease, self.ticket)
        self.pump()
        self.cut()
        return grant

    def cut(self) -> None:
        while not self.call("cut", self.index.cut, 0.0):
            self.pump()
        self.pump()

    def pump(self) -> Effect | None:
        """Drain, and answer the copies; the last Wake."""
        index, call = self.index, self.call
        wake = None
        while True:
            effects = call("drain", index.drain, 0.0)
            while index.held:
                call("cut", index.cut, 0.0)
                effects += call("drain", index.drain, 0.0)
            call("collect", self.collector.tick)
            copies = 0
            for effect in effects:
                if isinstance(effect, Wake):
                    wake = effect
                elif isinstance(effect, Copy):
                    call("copy_done", index.copy_done, effect.ticket)
                    copies += 1
            if not copies:
                return wake


def run(options: Options) -> Row:
    """The longest call of all, and by part and kind."""
    keep_large_buffers()
    runs = [_program(options) for _ in range(options.repeats)]
    parts = {name: rows([run[1][name] for run in runs]) for name in runs[0][1]}
    worst = {
        which: max((row[which], part, kind) for part, table in parts.items() for kind, row in table.items())
        for which in ("max_us", "max_cpu_us", "raw_max_us")
    }
    return {
        "nodes": runs[0][0],
        "page_size": options.page_size,
        "tiers": 1 + options.two_tiers,
        "events": options.events,
        "policy": options.policy,
        "repeats": options.repeats,
        "max_us": worst["max_us"][0],
        "max_in": list(worst["max_us"][1:]),
        "max_cpu_us": worst["max_cpu_us"][0],
        "max_cpu_in": list(worst["max_cpu_us"][1:]),
        "raw_max_us": worst["raw_max_us"][0],
        "parts": parts,
    }


def _program(options: Options) -> tuple[int, dict[str, Clock]]:
    """Fill, then each worst moment: the number of nodes, and the clock of each part."""
    size = options.page_size
    num_pages = options.num_nodes + ROOM
    index = Index(
        IndexConfig(
            page_size=size,
            num_pages=num_pages,
            host_pages=num_pages if options.two_tiers else 0,
            events=options.events,
            eviction=Policy(options.policy),
            host_eviction=Policy(options.policy),
        )
    )
    rng = np.random.default_rng(0)

    def draw(pages: int) -> bytes:
        return rng.integers(0, VOCAB, pages * size, dtype=np.uint32).tobytes()

    base, end, long_hit = draw(1), draw(1), draw(ROOM // 2)
    collector = Collector()
    parts: dict[str, Clock] = {}
    runner = Runner(index, Clock(), collector)
    call = runner.call

    def part(name: str) -> None:
        parts[name] = runner.clock
        runner.clock = Clock()

    collector.start()
    try:
        for number in range(options.num_nodes):
            runner.request(draw(1) if number & 1 else base + draw(1))
        nodes = index.stats().num_nodes
        part("fill")
        touch_heap()
        for _ in range(options.requests):
            runner.request(draw(4))
        part("small requests, each evicting a few nodes")
        for _ in range(200):
            runner.request(long_hit)
        part("long hits")
        for pages in range(ROOM // 2 - 1, ROOM // 2 - 100, -1):
            runner.request(long_hit[: pages * size * 4] + end)
        part("prompts that end inside a node")
        for _ in range(3):
            runner.request(draw(num_pages // 10))
        part("prompts that evict a tenth of the pool")
        for number in range(num_pages // 4):
            runner.request(draw(1) if number & 1 else base + draw(1))
        part("filling again")
        runner.request(draw(num_pages // 2))
        part("a prompt that evicts half of the pool")
        call("clear", index.clear)
        runner.cut()
        while call("step", index.step):
            runner.pump()
        part("clear")
    finally:
        collector.stop()
    return nodes, parts
