"""Pages of 1 to 256 tokens, and prompts of a million: they work, and what they cost grows as they do.

What is counted is steps of the interpreter, by its trace: loops and calls, not time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import FrameType
from typing import Any

import numpy as np
import pytest

from sglcache.core import invariants
from sglcache.core.effects import Copy, Grant
from sglcache.core.eviction import Policy
from sglcache.core.index import DEVICE, Index, IndexConfig
from sglcache.core.leases import Lease
from sglcache.testing.programs import run
from sglcache.units import LeaseId, Tier
from sglcache.wire.control import Extension

MILLION = 1 << 20
SIZES = (1, 2, 3, 7, 16, 64, 100, 256)


@pytest.mark.parametrize("bigram", [False, True])
@pytest.mark.parametrize("page_size", SIZES)
def test_any_program_with_pages_of_any_size(page_size: int, bigram: bool) -> None:
    for seed in range(4):
        run(seed, steps=80, page_size=page_size, bigram=bigram)


class Steps:
    """How many there were."""

    def __init__(self) -> None:
        self.count = 0

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        self.count += 1
        return self.trace


@contextmanager
def counted() -> Iterator[Steps]:
    steps, before = Steps(), sys.gettrace()
    sys.settrace(steps.trace)
    try:
        yield steps
    finally:
        sys.settrace(before)


def prompt(num_tokens: int) -> bytes:
    return np.random.default_rng(0).integers(0, 1 << 17, num_tokens, dtype=np.uint32).tobytes()


class Journey:
    """A runner's, with all that a daemon does around it."""

    def __init__(self, num_tokens: int, page_size: int, **config: Any) -> None:
        num_pages = -(-num_tokens // page_size) + 8
        if config.pop("two_tiers", False):
            config["host_pages"] = num_pages
        self.index = Index(IndexConfig(page_size, num_pages, **config))
        self.session = self.index.open_session()
        self.ticket = 0
        self.pump()

    def pump(self) -> None:
        index = self.index
        while index.uncut or index.held:
            index.cut(0.0)
        for effect in index.drain():
            if isinstance(effect, Copy):
                index.copy_done(effect.ticket)
        while index.uncut:
            index.cut(0.0)
        index.drain()

    def acquire(self, tokens: bytes, **options: int) -> Grant:
        grant = self.index.acquire(self.session, 1, tokens, **options)
        assert grant is not None
        return grant

    def extend(self, lease: LeaseId, tokens: bytes = b"", upto: int | None = None) -> None:
        assert self.index.extend(self.session, 1, [Extension(lease, tokens, 0, upto)]) is not None

    def commit(self, lease: LeaseId, tokens: int | None = None) -> None:
        self.ticket += 1
        self.index.commit(self.session, 1, lease, self.ticket, tokens=tokens)
        self.index.event_done(self.session, self.ticket)
        self.pump()

    def release(self, lease: LeaseId) -> None:
        self.ticket += 1
        self.index.release(self.session, 1, lease, self.ticket)
        self.index.event_done(self.session, self.ticket)
        self.pump()

    def whole(self, tokens: bytes, chunk: int) -> int:
        """Compute what is not cached, a chunk at a time; the tokens that were."""
        num_tokens = len(tokens) // 4
        grant = self.acquire(tokens, room=chunk)
        for end in range(grant.matched_tokens + chunk, num_tokens + chunk, chunk):
            end = min(end, num_tokens)
            self.extend(grant.lease, upto=end)
            self.commit(grant.lease, end)
        self.release(grant.lease)
        return grant.matched_tokens


@pytest.mark.parametrize(
    ("page_size", "chunk", "config"),
    [
        (1, MILLION, {}),
        (1, 8192, {"two_tiers": True}),
        (16, MILLION, {"two_tiers": True}),
        (16, 8192, {}),
        (16, 8192, {"two_tiers": True, "bigram": True}),
        (64, 8192, {"events": False, "eviction": Policy("tlru"), "host_eviction": Policy("lfu"), "two_tiers": True}),
        (256, 8192, {"two_tiers": True, "hash_name": "sha256"}),
    ],
)
def test_a_prompt_of_a_million_tokens_costs_twice_as_much_as_half_of_it(
    page_size: int, chunk: int, config: dict[str, Any]
) -> None:
    counts = []
    for num_tokens in (MILLION // 4, MILLION // 2, MILLION):
        tokens = prompt(num_tokens)
        journey = Journey(num_tokens, page_size, **config)
        with counted() as steps:
            assert journey.whole(tokens, chunk) == 0
            again = journey.whole(tokens, chunk)
        counts.append(steps.count)
        named = (num_tokens - bool(config.get("bigram"))) // page_size * page_size
        assert again == journey.index.peek(tokens).matched_tokens == named
        if config.get("events", True):
            tiers = (Tier.DEVICE, Tier.HOST) if config.get("two_tiers") else (Tier.DEVICE,)
            told = journey.index.digest()
            assert [told[tier][0] for tier in tiers] == [named // page_size] * len(tiers)
    assert invariants.check(journey.index) == []
    for less, more in pairwise(counts):
        assert more < 2.1 * less, counts


@pytest.mark.parametrize("two_tiers", [False, True])
def test_who_decodes_behind_a_million_tokens_pays_for_what_is_new(two_tiers: bool) -> None:
    """A token a step, a commit a page; neither tokens nor page table are copied for it."""
    journey = Journey(MILLION + 4096, 16, two_tiers=two_tiers)
    grant = journey.acquire(prompt(MILLION))
    journey.commit(grant.lease)
    lease: Lease = journey.index.leases[grant.lease]
    counts = []
    tables = set()
    for step in range(2048):
        with counted() as steps:
            journey.extend(grant.lease, b"\1\0\0\0")
            if step % 16 == 15:
                journey.commit(grant.lease)
        counts.append(steps.count)
        tables.add(id(lease.slots))
        assert len(lease._tokens) <= 4 * 16 or step < 15
    assert len(tables) == 1
    begin, end = sum(counts[:512]), sum(counts[-512:])
    assert end < 1.5 * begin, (begin, end)
    assert journey.index.pools[DEVICE].cached == (MILLION + 2048) // 16
    journey.release(grant.lease)
    assert invariants.check(journey.index) == []


def test_what_was_copied_piece_by_piece_is_a_few_nodes() -> None:
    """Though its lease holds it all the time; each byte was joined a bounded number of times."""
    journey = Journey(MILLION, 16, two_tiers=True)
    tokens = prompt(MILLION)
    grant = journey.acquire(tokens, room=2048)
    most = 0
    for end in range(2048, MILLION + 1, 2048):
        journey.extend(grant.lease, upto=end)
        journey.commit(grant.lease, end)
        most = max(most, journey.index.stats().num_nodes)
    assert most < 12
    journey.release(grant.lease)
    assert journey.index.stats().num_nodes < 4
