"""The code in docs/engines.md drives real daemons: what two engines' schedulers would do, checked page by page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglcache.memory.rings import EventRing
from sglcache.testing.daemon import Daemon

PAGE = Path(__file__).parents[1] / "docs" / "engines.md"
TP = 2
PAGE_SIZE = 4


def code(which: int) -> dict[str, Any]:
    """What the page's n-th program defines."""
    scope: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[which], scope)
    return scope


class Stage:
    """A daemon, the scheduler's client of it, and a worker for each shard, with events that come late."""

    def __init__(self, folder: Path, stack: ExitStack, num_pages: int, **options: Any) -> None:
        sections = {"pool": {"num_shards": TP, "num_tokens": PAGE_SIZE * num_pages, "page_size": PAGE_SIZE}, **options}
        self.daemon = stack.enter_context(Daemon(folder, **sections))
        self.client = stack.enter_context(self.daemon.client(role="scheduler"))
        self.rings = [EventRing(4096) for _ in range(TP)]
        self.workers = [
            stack.enter_context(self.daemon.worker(self.client.token, shard, ring=self.rings[shard]))
            for shard in range(TP)
        ]

    def write(self, tokens: list[int], start: int, stop: int, slots: Any) -> None:
        """The KV of a position is its token, in every layer and shard; a prompt's are read before."""
        for worker in self.workers:
            k = worker.pool.k[0]
            for position in range(stop):
                row = k[int(slots[position // PAGE_SIZE]), position % PAGE_SIZE]
                if position >= start:
                    row[:] = tokens[position]
                assert float(row[0, 0]) == tokens[position], f"position {position} of {tokens[:8]}.."

    def check(self, tokens: list[int]) -> int:
        """What is cached of it is right; how much that is."""
        with self.daemon.client() as reader, reader.acquire(tokens, room=0) as lease:
            lease.wait_loaded()
            for pool in reader.pools:
                for position in range(lease.matched_tokens):
                    row = pool.k[0][int(lease.slots[position // PAGE_SIZE]), position % PAGE_SIZE]
                    assert float(row[0, 0]) == tokens[position]
            return lease.matched_tokens


class Request:
    """What the engine knows of one. Its model's next token depends on the length alone."""

    def __init__(self, prompt: list[int], num_new: int) -> None:
        self.id = id(self)
        self.tokens = list(prompt)
        self.most = len(prompt) + num_new
        self.num_computed_tokens = 0

    def token(self, position: int) -> int:
        return self.tokens[position] if position < len(self.tokens) else (position * 7 + self.tokens[0]) % 256

    def take(self, token: int) -> None:
        self.tokens.append(token)

    @property
    def done(self) -> bool:
        return len(self.tokens) >= self.most


class Workers:
    """The engine's own way to its processes: they do in order what they are told, one batch behind."""

    def __init__(self, stages: list[Stage]) -> None:
        self.stages = stages
        self.events: dict[tuple[int, int, int], Any] = {}  # (batch, stage, shard)
        self.to_compute: list[Any] = []
        self.overlaps = 0

    def run(self, batch: Any) -> None:
        for other in self.to_compute:
            self._compute(other)
        self.to_compute = [batch]
        for n, stage in enumerate(self.stages):
            for shard, worker in enumerate(stage.workers):
                ring = stage.rings[shard]
                event = ring.reserve()  # done when the batch is
                self.events[batch.number, n, shard] = (worker, ring, event)

    def _compute(self, batch: Any) -> None:
        for part in batch.parts:
            tokens = [part.request.token(position) for position in range(part.stop)]
            for n, stage in enumerate(self.stages):
                if part.loads[n] is not None:
                    for worker in stage.workers:
                        worker.wait_loaded(part.loads[n])
                stage.write(tokens, part.start, part.stop, part.slots[n])
        for n, stage in enumerate(self.stages):
            for shard in range(len(stage.workers)):
                _, ring, event = self.events[batch.number, n, shard]
                ring.complete(*event)

    def sampled(self, batch: Any) -> dict[Any, int]:
        if batch in self.to_compute:
            self.to_compute.remove(batch)
            self._compute(batch)
        else:
            self.overlaps += 1  # it was computed while we launched another
        return {part.request: part.request.token(part.stop) for part in batch.parts}

    def record(self, stage: int, ticket: int, number: int) -> None:
        from sglcache.client import Event

        for shard, worker in enumerate(self.stages[stage].workers):
            known = self.events.get((number, stage, shard))
            worker.record(ticket, Event(*known[2]) if known else None)


def serve(scheduler: Any, queue: list[Request], most: int = 400) -> int:
    """Until all are done; how many batches that took."""
    for steps in range(most):
        scheduler.admit(queue)
        scheduler.step(queue)
        if not (queue or scheduler.running or any(batch.parts for batch in scheduler.under_way)):
            return steps
    raise AssertionError(f"{len(queue)} wait and {len(scheduler.running)} run after {most} steps")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def prompt(seed: int, num_tokens: int) -> list[int]:
    return list(map(int, np.random.default_rng(seed).integers(0, 256, num_tokens)))


@pytest.mark.timeout(240)
def test_an_overlap_scheduler_over_two_stages_of_two_shards(tmp_path: Path, stack: ExitStack) -> None:
    """Shared prefixes, a prompt of many chunks, more than fits: everything that is cached at the end is right."""
    engine = code(0)
    stages = [Stage(tmp_path / str(n), stack, pages) for n, pages in enumerate((160, 128))]
    workers = Workers(stages)
    scheduler = engine["Scheduler"]([stage.client for stage in stages], workers, chunk=16)
    for round in range(3):
        shared = prompt(1, 90)
        requests = [Request(shared[: 30 * n] + prompt(10 * round + n, 20 + 13 * n), 12 + n) for n in range(4)]
        requests.append(Request(prompt(2, 260), 5))
        serve(scheduler, list(requests))
        for request in requests:
            assert request.done
            for stage in stages:
                stage.check(request.tokens)
        assert stages[0].check(requests[-1].tokens) > 250
    assert workers.overlaps > 20
    for stage in stages:
        status = stage.daemon.settle()
        assert status["gauges"]["num_leases"] == 0
        assert status["counters"]["matched_tokens"] > 500
        assert status["counters"]["duplicate_pages"] > 0, "two computed the same at once, and share it"
        assert (stage.daemon.pool()["leased"], stage.daemon.pool()["locked"]) == (0, 0)
    assert stages[1].daemon.status()["counters"]["refused"] > 0, "and the smaller pool had not room for all"


class BlockEngine:
    """vLLM's schedule(), in short: a budget of tokens a step, drafts behind each, and who came last is preempted."""

    DRAFTS = 2
    BUDGET = 32
    MOST = 4

    def __init__(self, stage: Stage, manager: Any, tickets: list[int]) -> None:
        self.stage, self.manager, self.tickets = stage, manager, tickets
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preempted = 0
        self.hits: list[int] = []

    def schedule(self) -> list[tuple[Request, int]]:
        budget, step = self.BUDGET, []
        for request in list(self.running):
            count = min(budget, len(request.tokens) - request.num_computed_tokens)
            if request in self.running and count and self.allocate(request, count):
                step.append((request, count))
                budget -= count
        while self.waiting and budget and len(self.running) < self.MOST and not self.num_preempted:
            request = self.waiting[0]
            hit = self.manager.get_computed_blocks(request)
            count = min(budget, len(request.tokens) - hit)
            if self.manager.allocate_slots(request, count, self.DRAFTS) is None:
                break
            self.hits.append(request.num_computed_tokens)
            self.running.append(self.waiting.pop(0))
            step.append((request, count))
            budget -= count
        return [(request, count) for request, count in step if request in self.running]

    def allocate(self, request: Request, count: int) -> bool:
        while self.manager.allocate_slots(request, count, self.DRAFTS) is None:
            victim = self.running.pop()
            self.manager.free(victim)
            self.waiting.insert(0, victim)
            self.num_preempted += 1
            self.record()
            if victim is request:
                return False
        return True

    def step(self) -> None:
        for request, count in self.schedule():
            lease, start = self.manager.leases[request.id], request.num_computed_tokens
            if lease.load is not None:
                for worker in self.stage.workers:
                    worker.wait_loaded(lease.load)
            stop = start + count
            assert len(lease.slots) * PAGE_SIZE >= stop + (self.DRAFTS if stop == len(request.tokens) else 0)
            self.stage.write([request.token(position) for position in range(stop)], start, stop, lease.slots)
            request.num_computed_tokens = stop
            if stop == len(request.tokens):
                request.take(request.token(stop))
            self.manager.cache_blocks(request, min(stop, len(lease.tokens)))
            if request.done:
                self.running.remove(request)
                self.manager.free(request)
                self.num_preempted = 0
        self.record()
        for pending in self.stage.client.poll():
            pending.wait()

    def record(self) -> None:
        for ticket in self.tickets:
            for worker in self.stage.workers:
                worker.record(ticket)
        self.tickets.clear()


def test_a_block_manager_with_preemption_and_drafts(tmp_path: Path, stack: ExitStack) -> None:
    stage = Stage(tmp_path, stack, 48)
    tickets: list[int] = []
    engine = BlockEngine(stage, code(1)["KVCacheManager"](stage.client, tickets.append), tickets)
    requests = [Request(prompt(5, 40) + prompt(n, 30), 20) for n in range(6)]
    engine.waiting += requests
    preempted = 0
    for _ in range(400):
        engine.step()
        preempted = max(preempted, engine.num_preempted)
        if not (engine.waiting or engine.running):
            break
    assert all(request.done for request in requests)
    assert preempted > 0
    assert max(engine.hits) > 40
    stage.daemon.settle()
    assert stage.check(requests[-1].tokens) > 80
    assert engine.manager.reset_prefix_cache()["DEVICE"] > 0
