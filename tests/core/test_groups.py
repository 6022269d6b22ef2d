"""Windows and states on the stream: who follows the groups has what the index has, and knows what a match will be."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from sglcache.client.picture import Picture
from sglcache.core.effects import Committed, Copy, Effect, Extended, Grant, Publish, Result, Wake
from sglcache.core.encoding import Format, Group
from sglcache.core.hashing import block_hash
from sglcache.core.index import Index, IndexConfig
from sglcache.core.resources import Companion, MambaState, SlidingWindow
from sglcache.errors import NoSpace, SglcacheError
from sglcache.testing.rig import pack
from sglcache.units import LeaseId, TicketId, Tier
from sglcache.wire.control import Extension
from sglcache.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, decode_batch, is_full

PAGE = 2
WINDOW, STATE = Group(1, "sliding_window", 3 * PAGE), Group(2, "mamba", by_end=True)
KINDS = {
    "swa": ((WINDOW,), lambda n, h: (Companion(SlidingWindow(3), n, h),)),
    "mamba": ((STATE._replace(number=1),), lambda n, h: (Companion(MambaState(), n // 3, h // 3),)),
    "unified": (
        (WINDOW, STATE),
        lambda n, h: (Companion(SlidingWindow(3), n, h), Companion(MambaState(), n // 3, h // 3)),
    ),
}


class World:
    """Some runners at once on a small index, copies that end when they like, and two who follow the stream."""

    def __init__(self, kind: str, seed: int, host: bool, **config: Any) -> None:
        self.rng = random.Random(seed)
        self.groups, companions = KINDS[kind]
        self.index = Index(
            IndexConfig(
                PAGE,
                40,
                host_pages=60 if host else 0,
                format=Format(groups=self.groups),
                companions=companions(24, 30 if host else 0),
                max_batch_blocks=4,
                **config,
            )
        )
        self.session = self.index.open_session()
        self.windows = {group.number: group.window for group in self.groups}
        self.picture, self.plain = Picture(self.windows), Picture()
        self.ticket = 0
        self.request = 1
        self.leases: dict[LeaseId, Work] = {}
        self.copies: list[TicketId] = []
        self.told: list[Event] = []
        self.asked: list[bytes] = [b""]

    def drain(self) -> list[Effect]:
        index = self.index
        while not index.cut(0.0):
            pass
        effects = index.drain(0.0)
        for effect in effects:
            if isinstance(effect, Copy):
                self.copies.append(effect.ticket)
            elif isinstance(effect, Publish):
                for event in decode_batch(effect.payload).events:
                    self.told.append(event)
                    self.picture.apply(event, 0)
                    self.plain.apply(event, 0)
        return effects

    def step(self) -> None:
        rng = self.rng
        what = rng.random()
        if self.copies and what < 0.25:
            self.index.copy_done(self.copies.pop(rng.randrange(len(self.copies))), rng.random() < 0.9)
        elif self.leases and what < 0.7:
            work = rng.choice(list(self.leases.values()))
            if work.done < work.end and rng.random() < 0.85:
                self.commit(work)
            else:
                del self.leases[work.lease]
                self.finish(self.index.release, work.lease)
                self.answer(None)
        else:
            self.acquire()
        self.drain()

    def acquire(self) -> None:
        rng = self.rng
        old = rng.choice(self.asked)
        tokens = old[: 4 * rng.randrange(len(old) // 4 + 1)] + pack(
            rng.randrange(3) for _ in range(rng.randrange(1, 20))
        )
        tokens = tokens[: 4 * 30]
        known = self.index.peek(tokens)
        try:
            grant = self.answer(self.index.acquire(self.session, self.request, tokens, spare=self.spare))
        except NoSpace:
            return
        assert isinstance(grant, Grant)
        assert grant.matched_tokens <= known.matched_tokens
        self.asked = [*self.asked[-20:], tokens]
        while grant.load in self.copies:  # its commits would wait for that
            self.index.copy_done(self.copies.pop(0))
            self.drain()
        self.leases[grant.lease] = Work(grant, len(tokens) // 4 // PAGE * PAGE, self.states(grant.shares))

    @property
    def spare(self) -> tuple[int, ...]:
        return tuple(int(group.by_end) for group in self.groups)

    def states(self, shares: Any) -> bytes:
        return shares[-1].slots if self.groups[-1].by_end else b""

    def commit(self, work: Work) -> None:
        rng, number = self.rng, len(self.groups) - 1
        stop = min(work.end, work.done + PAGE * rng.randrange(1, 6))
        ends = []
        if self.groups[-1].by_end:
            if not work.slots:
                items = [Extension(work.lease, spare=self.spare)]
                extended = self.answer(self.index.extend(self.session, self.request, items))
                assert isinstance(extended, Extended)
                if not isinstance(extended.results[0], bytes):
                    return
                work.slots = extended.shares[0][number]
            if rng.random() < 0.7:
                ends = [(number, stop, int.from_bytes(work.slots[:4], "little"))]
        floor = max(0, stop - 3 * PAGE) if rng.random() < 0.5 else None
        self.finish(self.index.commit, work.lease, tokens=stop, ends=ends, floor=floor)
        committed = self.answer(None)
        assert isinstance(committed, Committed)
        work.done = stop
        work.slots = self.states(committed.shares)

    def finish(self, command: Any, lease: LeaseId, **more: Any) -> None:
        self.ticket += 1
        command(self.session, self.request, lease, self.ticket, **more)
        self.index.event_done(self.session, self.ticket)

    def answer(self, result: Result | None) -> Result:
        """The answer to the last request, once it is there."""
        request, self.request = self.request, self.request + 1
        effects = self.drain()
        while result is None:
            for effect in effects:
                if isinstance(effect, Wake) and effect.request == request:
                    result = effect.result
            if result is None:  # it takes more than a slice, or waits for copies
                if not self.index.step() and self.copies:
                    self.index.copy_done(self.copies.pop(0))
                effects = self.drain()
        if isinstance(result, SglcacheError):
            raise result
        return result

    # -- what must hold ---------------------------------------------------------------------------------

    def held(self) -> dict[tuple[int, Tier], set[int]]:
        """By group and tier, from the cells: group 0 is full KV."""
        index, found = self.index, dict[tuple[int, Tier], set[int]]()
        size = index.hasher.size
        for c in range(index.tree.C):
            number, tier = divmod(c, index.T)
            here = found.setdefault((number, Tier(tier)), set())
            by_end = number > 0 and self.groups[number - 1].by_end
            for node in index.tree.nodes():
                if node.cells[c] is not None and not node.writing >> c & 1:
                    digests = node.hashes
                    assert isinstance(digests, bytes)
                    hashes = [block_hash(digests[at : at + size]) for at in range(0, len(digests), size)]
                    here.update(hashes[-1:] if by_end else hashes)
        return found

    def check(self) -> None:
        for (number, tier), hashes in self.held().items():
            if number:
                assert self.picture.group_hashes(number, tier) == hashes, f"group {number}, {tier.name}"
            else:
                assert self.picture.hashes(tier) == self.plain.hashes(tier) == hashes
        for tier, digest in self.index.digest().items():
            assert self.picture.digests().get(tier.medium, (0, 0)) == digest
        for tokens in self.asked:
            peeked = self.index.peek(tokens)
            match = self.picture.longest_match(tokens).get(0, self.picture.no_match)
            assert match.reusable == peeked.matched_tokens
            assert match.tokens == (peeked.reaches[0] if peeked.reaches else 0)
        late = Picture(self.windows)
        for payload in iter(snapshot(self.index)):
            for event in decode_batch(payload).events:
                late.apply(event, 0)
        for (number, tier), hashes in self.held().items():
            assert (late.group_hashes(number, tier) if number else late.hashes(tier)) == hashes


class Work:
    """One lease, and how far it is."""

    def __init__(self, grant: Grant, end: int, slots: bytes) -> None:
        self.lease, self.done, self.end, self.slots = grant.lease, grant.matched_tokens, end, slots


def snapshot(index: Index) -> list[bytes]:
    taken = index.snapshot()
    payloads = []
    while (payload := taken.payload(0.0)) is not None:
        payloads.append(payload)
    return [payload for payload in payloads if payload]


@pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("kind", KINDS)
def test_who_follows_the_groups_has_what_the_index_has(kind: str, host: bool) -> None:
    seen = set()
    for seed in range(12):
        world = World(kind, seed, host)
        for number in range(150):
            world.step()
            if number % 10 == 0:
                world.check()
        world.check()
        seen |= {
            (type(event), getattr(event, "group_idx", None), getattr(event, "medium", None)) for event in world.told
        }
    for group in world.groups:
        for what in (BlockStored, BlockRemoved):
            for medium in ("GPU", "CPU_PINNED")[: 1 + host]:
                assert (what, group.number, medium) in seen, f"never seen: {what.__name__} of {group} on {medium}"


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_groups_the_stream_tells_of_full_kv_and_of_nothing_else(kind: str) -> None:
    world = World(kind, 1, True)
    plain = World(kind, 1, True)
    log = plain.index.log
    assert log is not None
    log.groups = ()
    for _ in range(300):
        world.step()
        plain.step()
    told = [event for event in world.told if isinstance(event, AllBlocksCleared) or is_full(event)]
    assert blocks(told) == blocks(plain.told)
    assert world.picture.digests() == plain.picture.digests()
    assert len(told) < len(world.told)


def blocks(events: list[Event]) -> Counter[Any]:
    """Block by block: how events are joined and parted is another matter, and with it the order of a removal's."""
    found: Counter[Any] = Counter()
    for event in events:
        if not isinstance(event, AllBlocksCleared):
            found.update((type(event), event.medium, each) for each in event.block_hashes)
    return found
