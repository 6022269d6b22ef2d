"""The index on a real trace: the cost of a request, through the same calls as the daemon makes.

Each request is acquire, commit with its event done, the copies it leads to (done at once: no bytes move here),
release with its event done, and the cut of its events, encoded; effects are drained after every command, as in a
turn of the daemon. All laws are on. The allocator and the cycle collector are set as the daemon sets them, and the
heap has been touched, as in a process that has run for a while: the first use of memory is the kernel's time.

The timed parts, in microseconds per request: `acquire_us`, `commit_us` (with the copies' acks), `release_us`,
`take_encode_us` (every drain and cut, so also what a drain has to cut before it: the hashing and encoding). `total_us`
is their sum with the collector's ticks; `cpu_us` is this thread's CPU time over the same. The trace's tokens are made
outside of it, some hundred requests ahead.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from sglcache.bench import trace as traces
from sglcache.bench.harness import Row, Summary, compare, in_turn, run_json
from sglcache.core.effects import Copy, Effect, Grant, Publish, Wake
from sglcache.core.eviction import Policy
from sglcache.core.index import Index, IndexConfig
from sglcache.errors import ConfigError, SglcacheError
from sglcache.server.allocator import keep_large_buffers
from sglcache.server.collector import Collector
from sglcache.units import LeaseId, SessionId

TOUCHED_MIB = 64  # of heap
AHEAD = 600  # requests whose tokens are made before the clock runs on
HIT_SHARE = 0.5  # a request is a hit if at least so much of its prompt was matched, else a miss
COMPARED = ("total_us", "p50_us", "p99_us", "cpu_us", "cpu_p50_us")


class Options(NamedTuple):
    """What `bench index` is told."""

    trace: Path
    page_size: int = 64
    limit: int | None = None  # requests; None: all
    capacity_tokens: int = 2_000_000
    host_tokens: int = 0  # 0: one tier
    events: bool = False
    hash_name: str = "xxh3_128"
    policy: str = "lru"
    host_policy: str = "lru"


class Timed(NamedTuple):
    """One request: seconds of each part, and what came of it."""

    acquire_s: float
    commit_s: float
    release_s: float
    take_encode_s: float
    total_s: float
    cpu_s: float
    matched_tokens: int


class Driver:
    """One runner's session on an index, and what the daemon does around it: drains, copies (done at once), cuts.

    Effects are kept until `settle` or `counted` looks at them, outside the time that is measured.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self.session: SessionId = index.open_session()
        self.ticket = 0
        self.effects: list[Effect] = []
        self.num_events = self.num_blocks = self.wire_bytes = self.num_batches = 0
        self.num_copies = self.num_slices = 0
        self.take_s = 0.0  # spent in drains and cuts since `counted`
        self._two_tiers = index.config.host_pages > 0
        self.cut()
        self.effects.clear()  # the first batch of a life is not the trace's

    def counted(self) -> None:
        """Add up what the effects so far were, and forget them."""
        for effect in self.effects:
            if isinstance(effect, Publish):
                self.num_batches += 1
                self.num_events += effect.num_events
                self.num_blocks += effect.num_blocks
                self.wire_bytes += len(effect.payload)
            elif isinstance(effect, Copy):
                self.num_copies += 1
        self.effects.clear()
        self.take_s = 0.0

    def pump(self) -> None:
        """Drain until nothing is held back and every copy is done."""
        index, clock = self.index, time.perf_counter
        while True:
            started = clock()
            effects = index.drain(0.0)
            while index.held:
                index.cut(0.0)
                effects += index.drain(0.0)
            self.take_s += clock() - started
            self.effects += effects
            if not self._two_tiers:
                return
            copies = [effect for effect in effects if type(effect) is Copy]
            if not copies:
                return
            for copy in copies:
                index.copy_done(copy.ticket)

    def acquire(self, tokens: bytes) -> Grant:
        """With `step`s and their drains where one slice of eviction is not enough. NoSpace as the index."""
        grant = self.index.acquire(self.session, 1, tokens)
        self.pump()
        while grant is None:
            self.num_slices += 1
            self.index.step()
            self.pump()
            last = self.effects[-1] if self.effects else None
            if isinstance(last, Wake):
                if isinstance(last.result, SglcacheError):
                    raise last.result
                assert isinstance(last.result, Grant), last
                grant = last.result
        return grant

    def commit(self, lease: LeaseId) -> None:
        self.ticket += 1
        self.index.commit(self.session, 2, lease, self.ticket)
        self.index.event_done(self.session, self.ticket)
        self.pump()

    def release(self, lease: LeaseId) -> None:
        self.ticket += 1
        self.index.release(self.session, 3, lease, self.ticket)
        self.index.event_done(self.session, self.ticket)
        self.pump()

    def cut(self) -> None:
        started = time.perf_counter()
        while not self.index.cut(0.0):
            pass
        self.take_s += time.perf_counter() - started
        self.pump()


def measure(driver: Driver, collector: Collector, prompts: Iterator[bytes]) -> Iterator[Timed]:
    """Run each prompt through; the consumer's time between two requests is not counted."""
    clock, cpu = time.perf_counter, time.thread_time
    for tokens in prompts:
        cpu_start = cpu()
        start = clock()
        grant = driver.acquire(tokens)
        acquired, take_acquired = clock(), driver.take_s
        driver.commit(grant.lease)
        committed, take_committed = clock(), driver.take_s
        driver.release(grant.lease)
        released, take_released = clock(), driver.take_s
        driver.cut()
        collector.tick()
        end = clock()
        cpu_end = cpu()
        take = driver.take_s
        driver.counted()
        yield Timed(
            acquired - start - take_acquired,
            committed - acquired - (take_committed - take_acquired),
            released - committed - (take_released - take_committed),
            take,
            end - start,
            cpu_end - cpu_start,
            grant.matched_tokens,
        )


def run(options: Options) -> Row:
    """One measurement in this process, as one row."""
    num_pages = options.capacity_tokens // options.page_size
    if num_pages < 1:
        raise ConfigError(f"--capacity-tokens {options.capacity_tokens} hold no page of {options.page_size} tokens")
    keep_large_buffers()
    index = Index(
        IndexConfig(
            page_size=options.page_size,
            num_pages=num_pages,
            host_pages=options.host_tokens // options.page_size,
            events=options.events,
            hash_name=options.hash_name,
            eviction=Policy(options.policy),
            host_eviction=Policy(options.host_policy),
        )
    )
    driver = Driver(index)
    collector = Collector()
    requests = traces.requests(options.trace, options.limit)
    timed: list[Timed] = []
    lengths: list[int] = []
    collector.start()
    try:
        while batch := [request.tokens.tobytes() for request in islice(requests, AHEAD)]:
            touch_heap()
            lengths += [len(tokens) // 4 for tokens in batch]
            timed += measure(driver, collector, iter(batch))
    finally:
        collector.stop()
    if not timed:
        raise ConfigError(f"{options.trace}: no request to measure")
    return _row(options, index, driver, timed, lengths)


def touch_heap(mib: int = TOUCHED_MIB) -> None:
    """Have the kernel map so much, and leave it to the allocator (which `keep_large_buffers` has told to keep it)."""
    del [bytearray(b"x") * (1 << 20) for _ in range(mib)][:]


def _row(options: Options, index: Index, driver: Driver, timed: list[Timed], lengths: list[int]) -> Row:
    count, page_size = len(timed), options.page_size
    aligned = sum(length // page_size * page_size for length in lengths)
    matched = sum(each.matched_tokens for each in timed)
    total = Summary.of([each.total_s * 1e6 for each in timed])
    cpu = Summary.of([each.cpu_s * 1e6 for each in timed])
    hits: list[float] = []
    misses: list[float] = []
    for each, length in zip(timed, lengths, strict=True):
        (hits if each.matched_tokens >= HIT_SHARE * length else misses).append(each.total_s * 1e6)
    counters = index.stats().counters
    return {
        "system": f"sglcache-{importlib.metadata.version('sglcache')}",
        "page_size": page_size,
        "events": options.events,
        "hash": options.hash_name if options.events else None,
        "policy": options.policy,
        "host_policy": options.host_policy if options.host_tokens else None,
        "capacity_tokens": options.capacity_tokens,
        "host_tokens": options.host_tokens,
        "requests": count,
        "tokens": aligned,
        "hit_rate": round(matched / aligned, 4) if aligned else 0.0,
        "acquire_us": round(sum(each.acquire_s for each in timed) / count * 1e6, 1),
        "commit_us": round(sum(each.commit_s for each in timed) / count * 1e6, 1),
        "release_us": round(sum(each.release_s for each in timed) / count * 1e6, 1),
        "take_encode_us": round(sum(each.take_encode_s for each in timed) / count * 1e6, 1),
        "total_us": round(total.mean, 1),
        "cpu_us": round(cpu.mean, 1),
        "p50_us": round(total.p50, 1),
        "cpu_p50_us": round(cpu.p50, 1),
        "p99_us": round(total.p99, 1),
        "max_us": round(total.max, 1),
        "hit_requests": _kind(hits),
        "miss_requests": _kind(misses),
        "event_count": driver.num_events,
        "blocks": driver.num_blocks,
        "wire_bytes": driver.wire_bytes,
        "batches": driver.num_batches,
        "nodes": index.stats().num_nodes,
        "evicted_nodes": counters["evicted_nodes"],
        "evicted_pages": counters["evicted_device_pages"] + counters["demoted_pages"],
        "sliced_evictions": driver.num_slices,
        "copies": driver.num_copies,
    }


def _kind(micros: list[float]) -> Row:
    summary = Summary.of(micros)
    return {
        "requests": summary.samples,
        "mean_us": round(summary.mean, 1),
        "p50_us": round(summary.p50, 1),
        "p99_us": round(summary.p99, 1),
    }


def against(ours: list[str], peer: str, pairs: int) -> Row:
    """Run two commands in turn, each time in a fresh process; both print rows of `run`'s kind.

    A peer's row needs `total_us`, `p50_us`, `p99_us` and `hit_rate`; where it has `cpu_us` (its thread's CPU time over
    the timed parts) that is compared too. Ratios are the peer's over ours. BenchError if a row is of another size of
    work: requests, page size and events must agree.
    """
    own_rows, peer_rows = in_turn(lambda: run_json(ours), lambda: run_json(peer), pairs)
    for row in peer_rows:
        for field in ("requests", "page_size", "events"):
            if field in row and row[field] != own_rows[0][field]:
                raise ConfigError(f"the peer ran with {field} = {row[field]}, we with {own_rows[0][field]}")
    return {
        "pairs": pairs,
        "ours": own_rows,
        "peer": peer_rows,
        "hit_rate": {"ours": own_rows[0]["hit_rate"], "peer": peer_rows[0].get("hit_rate")},
        "ratios": compare(own_rows, peer_rows, COMPARED),
    }
