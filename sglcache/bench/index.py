"""The index on a real trace: the cost of a request, through the same calls as the daemon makes.

Each request is acquire, commit with its event done already, the copies it leads to (done at once: no bytes move here),
release with its event done, and the cut of its events, encoded; effects are drained after every command, as in a
turn of the daemon. All laws are on. The allocator and the cycle collector are set as the daemon sets them, and the
heap has been touched, as in a process that has run for a while: the first use of memory is the kernel's time.

The timed parts, in microseconds per request: `acquire_us`, `extend_us`, `commit_us` (with the copies' acks),
`release_us`, `take_encode_us` (every drain and cut, so also what a drain has to cut before it: the hashing and
encoding). `total_us` is their sum with the collector's ticks; `cpu_us` is this thread's CPU time over the same. The
trace's tokens are made outside of it, some hundred requests ahead.

A prompt is computed whole, or in parts (`hybrid.parts`): each is an extend and a commit, and behind each the tree keeps
what its kind keeps, a window of the part's last pages, the state at its end. A runner's own state, which it works in
beside those that it commits, is not counted.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from sglcache.bench import trace as traces
from sglcache.bench.harness import Row, Summary, compare, run_json
from sglcache.bench.hybrid import KINDS, floor, parts
from sglcache.core.effects import Committed, Copy, Effect, Extended, Grant, Publish, Result, Wake
from sglcache.core.encoding import PLAIN, Format
from sglcache.core.eviction import Policy
from sglcache.core.index import Index, IndexConfig
from sglcache.core.limits import MAX_TENANTS, Limits
from sglcache.core.resources import Companion, MambaState, SlidingWindow
from sglcache.errors import ConfigError, SglcacheError
from sglcache.server.allocator import keep_large_buffers
from sglcache.server.collector import Collector
from sglcache.units import LeaseId, SessionId
from sglcache.wire.control import Extension

TOUCHED_MIB = 64  # of heap
AHEAD = 600  # requests whose tokens are made before the clock runs on
HIT_SHARE = 0.5  # a request is a hit if at least so much of its prompt was matched, else a miss
COMPARED = ("total_us", "p50_us", "p99_us", "cpu_us", "cpu_p50_us")
SAME_WORK = ("requests", "page_size", "events", "chunk_tokens")  # of two rows that are compared
SAME_KIND = ("kind", "window", "window_tokens", "state_slots")


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
    kind: str = "full"  # of KINDS
    chunk_tokens: int = 0  # 0: a prompt is computed whole
    window: int = 128  # tokens that a query sees
    window_tokens: int | None = None  # capacity; None: a quarter of capacity_tokens
    state_slots: int = 256  # capacity
    fixed_tokens: bool = False  # events have each token in five bytes: see `Format`
    tenants: int = 0  # that requests are of in turn, each with a floor of half its share of a tier; 0: there are none

    def limits(self) -> dict[str, Limits] | None:
        """Of each tenant; None: there are none."""
        device, host = (tokens // self.page_size for tokens in (self.capacity_tokens, self.host_tokens))
        parts = 2 * self.tenants
        return {
            str(number): Limits(device_floor=device // parts, host_floor=host // parts)
            for number in range(self.tenants)
        } or None

    @property
    def keeps_window(self) -> bool:
        return KINDS[self.kind][0]

    @property
    def keeps_states(self) -> bool:
        return KINDS[self.kind][1]

    @property
    def window_capacity(self) -> int:
        """Tokens."""
        if not self.keeps_window:
            return 0
        return self.capacity_tokens // 4 if self.window_tokens is None else self.window_tokens

    def companions(self) -> tuple[Companion, ...]:
        """What the tree keeps beside full KV. On the host in the proportion of full KV."""
        made: list[Companion] = []
        host = self.host_tokens / self.capacity_tokens
        if self.keeps_window:
            pages = self.window_capacity // self.page_size
            made.append(Companion(SlidingWindow(-(-self.window // self.page_size)), pages, int(pages * host)))
        if self.keeps_states:
            made.append(Companion(MambaState(), self.state_slots, int(self.state_slots * host)))
        return tuple(made)


class Timed(NamedTuple):
    """One request: seconds of each part, and what came of it."""

    acquire_s: float
    extend_s: float
    commit_s: float
    release_s: float
    take_encode_s: float
    total_s: float
    cpu_s: float
    matched_tokens: int
    full_tokens: int  # that full KV alone would have matched


class Work(NamedTuple):
    """How prompts are computed."""

    page_size: int
    chunk_tokens: int = 0
    window: int = 0  # tokens; 0: no window is kept
    state: int | None = None  # the number of the companion that keeps states
    tenants: int = 0  # that prompts are of, in turn

    @property
    def num_states(self) -> int:
        """Own states that a part needs."""
        return int(self.state is not None)


class Driver:
    """One runner's session on an index, and what the daemon does around it: drains, copies (done at once), cuts.

    Effects are kept until `settle` or `counted` looks at them, outside the time that is measured.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self.session: SessionId = index.open_session()
        self.ticket = 0
        self.tenant: str | None = None  # of the next request
        self.effects: list[Effect] = []
        self.num_events = self.num_blocks = self.wire_bytes = self.num_batches = 0
        self.num_copies = self.num_slices = 0
        self.take_s = 0.0  # spent in drains and cuts since `counted`
        self._two_tiers = index.config.host_pages > 0
        self.cut()
        self.effects.clear()  # the first batch of a life is not the trace's
        self.take_s = 0.0

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

    def acquire(self, tokens: bytes, room: int | None = None, spare: Sequence[int] = ()) -> Grant:
        """With `step`s and their drains where one slice of eviction is not enough. NoSpace as the index."""
        grant = self.index.acquire(self.session, 1, tokens, room=room, spare=spare, tenant=self.tenant)
        self.pump()
        if grant is None:
            woken = self._stepped()
            assert isinstance(woken, Grant), woken
            grant = woken
        return grant

    def extend(self, lease: LeaseId, upto: int, spare: tuple[int, ...] = ()) -> Extended:
        """Pages for the first `upto` tokens. As `acquire`."""
        extended = self.index.extend(self.session, 1, [Extension(lease, upto=upto, spare=spare)])
        self.pump()
        if extended is None:
            woken = self._stepped()
            assert isinstance(woken, Extended), woken
            extended = woken
        (result,) = extended.results
        if isinstance(result, SglcacheError):
            raise result
        return extended

    def _stepped(self) -> Result:
        """What whoever waits for room is told in the end."""
        while True:
            self.num_slices += 1
            self.index.step()
            self.pump()
            last = self.effects[-1] if self.effects else None
            if isinstance(last, Wake):
                if isinstance(last.result, SglcacheError):
                    raise last.result
                return last.result

    def commit(
        self,
        lease: LeaseId,
        tokens: int | None = None,
        ends: Sequence[tuple[int, int, int]] = (),
        floor: int | None = None,
    ) -> Committed:
        self.ticket += 1
        self.index.commit(self.session, 2, lease, self.ticket, tokens=tokens, ends=ends, floor=floor, done=0)
        self.pump()
        for effect in reversed(self.effects):
            if isinstance(effect, Wake) and isinstance(effect.result, Committed):
                return effect.result
        raise AssertionError("a commit whose event is done has no answer")

    def commit_whole(self, lease: LeaseId) -> None:
        """All of it, and the answer is not looked at."""
        self.ticket += 1
        self.index.commit(self.session, 2, lease, self.ticket, done=0)
        self.pump()

    def release(self, lease: LeaseId) -> None:
        self.ticket += 1
        self.index.release(self.session, 3, lease, self.ticket, done=0)
        self.pump()

    def cut(self) -> None:
        started = time.perf_counter()
        while not self.index.cut(0.0):
            pass
        self.take_s += time.perf_counter() - started
        self.pump()


class Lap:
    """Seconds since the last one, without those that the driver spent in drains and cuts meanwhile."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.at, self._take = time.perf_counter(), driver.take_s

    def __call__(self) -> float:
        now, take = time.perf_counter(), self._driver.take_s
        lap = now - self.at - (take - self._take)
        self.at, self._take = now, take
        return lap


def measure(driver: Driver, collector: Collector, prompts: Iterator[bytes], work: Work) -> Iterator[Timed]:
    """Run each prompt through; the consumer's time between two requests is not counted."""
    clock, cpu = time.perf_counter, time.thread_time
    whole = not (work.chunk_tokens or work.window or work.num_states)
    for number, tokens in enumerate(prompts):
        if work.tenants:
            driver.tenant = str(number % work.tenants)
        cpu_start = cpu()
        start = clock()
        if whole:  # as few of our own steps as there can be: they are a twentieth of what is measured
            grant = driver.acquire(tokens)
            acquired, take_acquired = clock(), driver.take_s
            driver.commit_whole(grant.lease)
            committed, take_committed = clock(), driver.take_s
            acquire_s, extend_s = acquired - start - take_acquired, 0.0
            commit_s = committed - acquired - (take_committed - take_acquired)
        else:
            grant, acquire_s, extend_s, commit_s = in_parts(driver, tokens, work)
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
            acquire_s,
            extend_s,
            commit_s,
            released - committed - (take_released - take_committed),
            take,
            end - start,
            cpu_end - cpu_start,
            grant.matched_tokens,
            grant.reaches[0] if grant.reaches else grant.matched_tokens,
        )


def in_parts(driver: Driver, tokens: bytes, work: Work) -> tuple[Grant, float, float, float]:
    """Acquire, then for each part what it needs and a commit; the grant, and seconds in acquire, extends, commits."""
    lap = Lap(driver)
    length, state = len(tokens) // 4, work.state
    end = length - length % work.page_size
    step = max(1, work.chunk_tokens // work.page_size) * work.page_size if work.chunk_tokens else None
    one = () if state is None else (*[0] * state, 1)
    grant = driver.acquire(tokens, room=step, spare=one)
    acquire_s, extend_s, commit_s = lap(), 0.0, 0.0
    lease, known = grant.lease, grant.matched_tokens
    reach = grant.reaches[0] if grant.reaches else known
    granted = length if step is None else known + step
    slots = b"" if state is None else grant.shares[state].slots
    for stop in parts(known, reach, end, work.chunk_tokens, work.page_size):
        if stop > granted or (state is not None and not slots):
            granted = length if stop == end else max(granted, stop)
            extended = driver.extend(lease, granted, () if slots else one)
            if state is not None and not slots:
                slots = extended.shares[0][state]
            extend_s += lap()
        ends = [(state, stop, int.from_bytes(slots[:4], "little"))] if state is not None and stop > known else []
        given_up = floor(stop, work.window, work.page_size) if work.window else None
        committed = driver.commit(lease, stop, ends, given_up)
        if state is not None:
            slots = committed.shares[state].slots
        commit_s += lap()
        known = stop
    return grant, acquire_s, extend_s, commit_s


def build(options: Options, format: Format = PLAIN) -> tuple[Index, Work]:
    """The index of these options, and how prompts are computed on it. ConfigError: it would hold nothing."""
    num_pages = options.capacity_tokens // options.page_size
    if num_pages < 1:
        raise ConfigError(f"--capacity-tokens {options.capacity_tokens} hold no page of {options.page_size} tokens")
    if options.tenants >= MAX_TENANTS:
        raise ConfigError(f"--tenants {options.tenants}: there can be {MAX_TENANTS - 1} beside the default one")
    companions = options.companions()
    index = Index(
        IndexConfig(
            page_size=options.page_size,
            num_pages=num_pages,
            host_pages=options.host_tokens // options.page_size,
            events=options.events,
            hash_name=options.hash_name,
            format=format,
            eviction=Policy(options.policy),
            host_eviction=Policy(options.host_policy),
            companions=companions,
            tenants=options.limits(),
        )
    )
    window = options.window if options.keeps_window else 0
    state = len(companions) - 1 if options.keeps_states else None
    return index, Work(options.page_size, options.chunk_tokens, window, state, options.tenants)


def run(options: Options) -> Row:
    """One measurement in this process, as one row."""
    index, work = build(options, Format(fixed_tokens=options.fixed_tokens))
    keep_large_buffers()
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
            timed += measure(driver, collector, iter(batch), work)
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
    reached = sum(each.full_tokens for each in timed)
    total = Summary.of([each.total_s * 1e6 for each in timed])
    cpu = Summary.of([each.cpu_s * 1e6 for each in timed])
    hits: list[float] = []
    misses: list[float] = []
    for each, length in zip(timed, lengths, strict=True):
        (hits if each.matched_tokens >= HIT_SHARE * length else misses).append(each.total_s * 1e6)
    counters = index.stats().counters
    return {
        "system": f"sglcache-{importlib.metadata.version('sglcache')}",
        "kind": options.kind,
        "page_size": page_size,
        "events": options.events,
        "hash": options.hash_name if options.events else None,
        "fixed_tokens": options.fixed_tokens,
        "policy": options.policy,
        "host_policy": options.host_policy if options.host_tokens else None,
        "capacity_tokens": options.capacity_tokens,
        "host_tokens": options.host_tokens,
        "window": options.window if options.keeps_window else 0,
        "window_tokens": options.window_capacity,
        "state_slots": options.state_slots if options.keeps_states else 0,
        "chunk_tokens": options.chunk_tokens,
        "tenants": options.tenants,
        "requests": count,
        "tokens": aligned,
        "hit_rate": round(matched / aligned, 4) if aligned else 0.0,
        "full_reach": round(reached / aligned, 4) if aligned else 0.0,
        "acquire_us": round(sum(each.acquire_s for each in timed) / count * 1e6, 1),
        "extend_us": round(sum(each.extend_s for each in timed) / count * 1e6, 1),
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


def against(ours: list[str], peer: str | None, pairs: int, full: list[str] | None = None) -> Row:
    """Run commands in turn, each time in a fresh process; all print rows of `run`'s kind. `full`: of full KV alone.

    A peer's row needs `total_us`, `p50_us`, `p99_us` and `hit_rate`; where it has `cpu_us` (its thread's CPU time over
    the timed parts) that is compared too. `ratios` are the peer's over ours, `full_ratios` ours over those of full KV.
    ConfigError if a row is of another size of work: what both say of it must agree.
    """
    commands: dict[str, str | list[str]] = {"ours": ours}
    if full is not None:
        commands["full"] = full
    if peer is not None:
        commands["peer"] = peer
    rows: dict[str, list[Row]] = {name: [] for name in commands}
    for _ in range(pairs):
        for name, command in commands.items():
            row = run_json(command)
            rows[name].append(row)
            for field in SAME_WORK + (SAME_KIND if name == "peer" else ()):
                if field in row and row[field] != rows["ours"][0].get(field, row[field]):
                    raise ConfigError(f"the {name} ran with {field} = {row[field]}, we with {rows['ours'][0][field]}")
    result: Row = {
        "pairs": pairs,
        **rows,
        "hit_rate": {name: each[0].get("hit_rate") for name, each in rows.items()},
    }
    if full is not None:
        result["full_ratios"] = compare(rows["full"], rows["ours"], COMPARED)
    if peer is not None:
        result["ratios"] = compare(rows["ours"], rows["peer"], COMPARED)
    return result
