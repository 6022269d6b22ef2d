"""Cases of indexes with companions, one at a time: A09, SGLang's traces with the values that are right here, states at
branches, and what is given back on every way out.

Where a value differs from what SGLang 0.5.17 or 0.5.23 gives for the same commands, the test says so and why.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from sglcache.core.key import ROOT
from sglcache.core.resources import Companion, MambaState, SlidingWindow
from sglcache.core.tiering import WritePolicy
from sglcache.errors import NoSpace
from sglcache.testing.hybrid import Hybrid
from sglcache.testing.hybrid_model import FULL, Lease, Runner, pack
from sglcache.units import Tier

WINDOW, STATE = 1, 1  # the number of the resource where it is the only companion


def swa(window: int = 2, slots: int = 64, *, page_size: int = 1, num_pages: int = 64, **more: Any) -> Hybrid:
    companion = Companion(SlidingWindow(window), slots, more.pop("host_slots", 0))
    return Hybrid(page_size=page_size, num_pages=num_pages, companions=(companion,), **more)


def mamba(slots: int = 16, per_path: int = 0, *, page_size: int = 1, num_pages: int = 64, **more: Any) -> Hybrid:
    companion = Companion(MambaState(per_path), slots, more.pop("host_slots", 0))
    return Hybrid(page_size=page_size, num_pages=num_pages, companions=(companion,), **more)


def unified(window: int = 2, slots: int = 64, states: int = 16, **more: Any) -> Hybrid:
    two = more.get("host_pages", 0)
    companions = (
        Companion(SlidingWindow(window), slots, two),
        Companion(MambaState(), states, states if two else 0),
    )
    return Hybrid(**{"page_size": 1, "num_pages": 64, "companions": companions, **more})


def acquired(world: Hybrid, runner: Runner, tokens: Iterable[int], **how: Any) -> Lease:
    lease = world.acquire(runner, tokens, **how)
    assert isinstance(lease, Lease), f"{lease!r}"
    return lease


def put(
    world: Hybrid, runner: Runner, tokens: Iterable[int], ends: Sequence[tuple[int, int]] = (), **how: Any
) -> Lease:
    """A whole journey; `ends`: (resource, tokens) of the states to be committed."""
    floor = how.pop("floor", None)
    lease = acquired(world, runner, tokens, states=len(ends), **how)
    own = {r: list(lease.states[r]) for r in world.by_end}
    states = [(r, at // world.page_size, own[r].pop(0)) for r, at in ends]
    world.commit(runner, lease, ends=states, floor=floor)
    world.read_replies(runner)
    world.release(runner, lease)
    if world.config.events:
        world.cut()
    return lease


def matched(world: Hybrid, tokens: Iterable[int]) -> int:
    return world.peek(tokens)[1]


def pressed(world: Hybrid, runner: Runner, r: int, count: int) -> None:
    """Have `count` slots of a resource evicted at least, by somebody who then changes his mind."""
    c = world.cell(r, 0)
    need = world.index.pools[c].free + count
    fresh = range(1 << 20, (1 << 20) + (1 if world.kinds[r].by_end else need) * world.page_size)
    lease = acquired(world, runner, fresh, states=need if world.kinds[r].by_end else 0)
    world.cancel(runner, lease)
    world.cut()


def told(world: Hybrid) -> list[tuple[str, list[int]]]:
    """What the stream has said since it was last asked: (stored or removed, tokens of one-token pages)."""
    world.cut()
    found = []
    for batch in world.subscriber.batches:
        for event in batch:
            if event["type"] != "AllBlocksCleared":
                pages = [world.book.by_hash[each] for each in event["block_hashes"]]
                tokens = [int.from_bytes(page.tokens[:4], "little") for page in pages]
                found.append((event["type"].removeprefix("Block").lower(), tokens))
    world.subscriber.batches.clear()
    world.subscriber.batches.append([])
    return found


# -- A09 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page_size", "window"), [(4, 2), (16, 1)], ids=["P4", "P16"])
def test_a_window_pool_loses_no_page_over_thousands_of_tombstones(page_size: int, window: int) -> None:
    """Tombstones are made, their slots reused, they are filled again, and pages are evicted: thousands of times.

    After each step the sums of both pools are right, no slot has two owners, and each holds its name (`Hybrid.check`).
    """
    size = page_size // 4
    world = swa(window, 16, page_size=page_size, num_pages=64, events=False, proof=False)
    runner = world.open_session()
    chance = random.Random(9)
    long = range(1, 32 * size + 1)
    for k in range(2000):
        put(world, runner, long, floor=24 * size)
        put(world, runner, range(k * 1000 + 1000, k * 1000 + 1000 + 16 * size))
        put(world, runner, long, limit=0)
        assert matched(world, long) == 32 * size
        if chance.randrange(2):
            pressed(world, runner, WINDOW, chance.randrange(1, 12))
        world.proof = k % 50 == 0
    world.proof = True
    world.settle()


# -- SGLang's traces --------------------------------------------------------------------------------------------------


def cached(world: Hybrid, r: int) -> int:
    return world.index.pools[world.cell(r, 0)].cached


def reaches(world: Hybrid, last: int) -> list[int]:
    """What of the tokens 1..n a match would find, for each n."""
    return [matched(world, range(1, n + 1)) for n in range(1, last + 1)]


def test_the_trace_of_swa_radix_cache() -> None:
    """SWARadixCache 0.5.17, window 2, pages of one token.

    It is the same there, but that one eviction takes the window of all of 1..4, which are one node; here what was
    slid past goes first, then what no match at the end needs, page by page. Its rule looks at gaps and the end
    alone, ours at every page; with a window and nothing else the two find the same ends.
    """
    world = swa(2, 12, num_pages=16)
    runner = world.open_session()
    told(world)
    put(world, runner, range(1, 5))
    assert told(world) == [("stored", [1, 2, 3, 4])]
    put(world, runner, range(1, 7))
    assert told(world) == [("stored", [5, 6])]
    pressed(world, runner, WINDOW, 4)
    assert told(world) == []  # companions are silent
    assert cached(world, WINDOW) == 2  # of 1..4 it is gone
    assert reaches(world, 6) == [0, 0, 0, 0, 0, 6]
    put(world, runner, range(1, 8))
    assert told(world) == [("stored", [7])]
    put(world, runner, range(1, 11), floor=8)
    assert told(world) == [("stored", [8, 9, 10])]
    assert reaches(world, 10) == [0, 0, 0, 0, 0, 6, 7, 7, 7, 10]  # token 8's window was given up
    before = cached(world, FULL), cached(world, WINDOW)
    pressed(world, runner, FULL, 1)
    assert told(world) == [("removed", [9, 10, 8])]  # the leaf, and the tombstone above it
    assert (before[0] - cached(world, FULL), before[1] - cached(world, WINDOW)) == (3, 2)
    world.clear(Tier.DEVICE)
    world.steps()
    assert sorted(token for _, tokens in told(world) for token in tokens) == [1, 2, 3, 4, 5, 6, 7]
    world.settle()


def test_the_trace_of_the_unified_tree_with_a_window() -> None:
    """UnifiedRadixCache 0.5.23, window 2, pages of one token.

    The same there, but that what was slid past goes first, and but for the end: tokens 1..5 stay announced after
    all of the window is gone, though no request can hit them; here the last page that a match can end in takes what is
    above it along, so routers are told of nothing that is no hit.
    """
    world = swa(2, 12, num_pages=16)
    runner = world.open_session()
    put(world, runner, range(1, 5))
    put(world, runner, range(1, 9))
    assert reaches(world, 8) == [1, 2, 3, 4, 5, 6, 7, 8]
    told(world)
    pressed(world, runner, WINDOW, 1)
    assert told(world) == []
    assert cached(world, WINDOW) == 7
    assert reaches(world, 8) == [1, 2, 3, 4, 4, 4, 7, 8]  # there 1 and 2 have lost theirs
    pressed(world, runner, WINDOW, 7)
    assert reaches(world, 8) == [0] * 8
    ((what, tokens),) = told(world)
    assert (what, sorted(tokens)) == ("removed", [1, 2, 3, 4, 5, 6, 7, 8])  # there 7, 8 and 6
    put(world, runner, range(1, 7))
    assert told(world) == [("stored", [1, 2, 3, 4, 5, 6])]  # there 6 alone: it has 1..5
    assert matched(world, range(1, 7)) == 6
    world.settle()


# -- windows ----------------------------------------------------------------------------------------------------------


def test_a_window_that_is_less_than_a_page_asks_for_the_last_page() -> None:
    world = swa(1, 8, page_size=4, num_pages=16)
    runner = world.open_session()
    put(world, runner, range(16), floor=11)  # token 11 is in page 2, so two pages lie wholly before it
    assert [matched(world, range(4 * n)) for n in range(5)] == [0, 0, 0, 12, 16]
    world.settle()


def test_a_match_needs_all_pages_of_its_window_at_any_end() -> None:
    world = swa(3, 16, num_pages=16)
    runner = world.open_session()
    put(world, runner, range(8), floor=4)
    assert [matched(world, range(n)) for n in range(9)] == [0, 0, 0, 0, 0, 0, 0, 7, 8]
    lease = acquired(world, runner, range(10))
    assert (lease.matched, lease.first[WINDOW]) == (8, 5)
    assert sorted(lease.views[WINDOW]) == [5, 6, 7, 8, 9]
    world.settle()


def test_a_sequence_shorter_than_the_window_needs_all_of_its_pages() -> None:
    world = swa(4, 16, num_pages=16)
    runner = world.open_session()
    put(world, runner, range(3))
    assert [matched(world, range(n)) for n in range(4)] == [0, 1, 2, 3]
    put(world, runner, range(100, 103), floor=1)
    assert matched(world, range(100, 103)) == 0
    world.settle()


def test_a_commit_fills_the_tombstones_that_it_passes() -> None:
    """With the newcomer's window pages, and the tree's own of Full."""
    world = swa(2, 32, num_pages=32)
    runner = world.open_session()
    put(world, runner, range(8), floor=6)
    assert matched(world, range(5)) == 0
    first = dict(world.seen.ready[FULL])
    put(world, runner, range(6), limit=0)
    assert [matched(world, range(n)) for n in range(9)] == list(range(9))
    assert world.seen.ready[FULL] == first
    world.settle()


def test_a_long_prompt_goes_through_a_window_pool_that_it_does_not_fit_in() -> None:
    """Chunk by chunk: what was slid past is cached, and evicted as more is needed."""
    world = swa(2, 6, num_pages=64)
    runner = world.open_session()
    lease = acquired(world, runner, range(60), room=4)
    while lease.num_pages < 60:
        world.commit(runner, lease)
        assert len(lease.views[WINDOW]) == 2
        world.extend(runner, [(lease, b"", 0, lease.num_pages + 4, 0)])
        world.steps()
    world.commit(runner, lease)
    world.release(runner, lease)
    assert matched(world, range(60)) == 60
    refused = world.acquire(runner, range(100, 107))
    assert isinstance(refused, NoSpace)
    assert refused.resource == "window"
    world.settle()


# -- states -----------------------------------------------------------------------------------------------------------


def test_a_state_at_a_branch_makes_the_next_of_its_kind_a_hit() -> None:
    """The difference between what Full reaches and the match tells a runner where to commit one."""
    world = mamba()
    runner = world.open_session()
    put(world, runner, range(8), [(STATE, 8)])
    assert world.peek([0, 1, 2, 3, 20, 21]) == (0, 0, (4, 0))
    lease = acquired(world, runner, [0, 1, 2, 3, 20, 21], states=2)
    assert (lease.matched, lease.reaches) == (0, (4, 0))
    assert lease.sources[STATE] is None
    one, two = lease.states[STATE]
    world.commit(runner, lease, ends=[(STATE, 4, one), (STATE, 6, two)])
    assert lease.states[STATE] == []
    world.release(runner, lease)
    assert world.peek([0, 1, 2, 3, 30]) == (4, 4, (4, 4))
    third = acquired(world, runner, [0, 1, 2, 3, 30], states=1)
    assert third.matched == 4
    assert third.sources[STATE] == one
    world.settle()


def test_a_split_leaves_the_state_with_the_lower_half() -> None:
    world = mamba()
    runner = world.open_session()
    put(world, runner, range(8), [(STATE, 8)])
    put(world, runner, [0, 1, 2, 3, 20], [(STATE, 5)])
    assert matched(world, range(8)) == 8
    assert matched(world, range(7)) == 0
    assert matched(world, range(4)) == 0
    world.settle()


def test_a_state_that_the_tree_has_stays_the_leases() -> None:
    world = mamba(4)
    runner = world.open_session()
    put(world, runner, range(4), [(STATE, 4)])
    lease = acquired(world, runner, range(6), states=1, limit=0)
    (slot,) = lease.states[STATE]
    world.commit(runner, lease, 4, ends=[(STATE, 4, slot)])
    assert lease.states[STATE] == [slot]
    world.commit(runner, lease, ends=[(STATE, 6, slot)])
    assert lease.states[STATE] == []
    world.release(runner, lease)
    assert matched(world, range(6)) == 6
    world.settle()


def test_a_path_keeps_so_many_states_and_the_deepest_of_them() -> None:
    world = mamba(16, 2)
    runner = world.open_session()
    put(world, runner, range(8), [(STATE, at) for at in (2, 4, 6, 8)])
    assert [matched(world, range(n)) for n in (2, 4, 6, 8)] == [0, 0, 6, 8]
    world.settle()


def test_a_leaf_without_its_state_goes_and_routers_are_told() -> None:
    world = mamba(4)
    runner = world.open_session()
    put(world, runner, range(8), [(STATE, 4)])
    told(world)
    assert {page.depth for page in world.seen.ready[FULL]} == {0, 1, 2, 3}  # what lies behind the state is no hit
    pressed(world, runner, STATE, 1)
    ((what, tokens),) = told(world)
    assert (what, sorted(tokens)) == ("removed", [0, 1, 2, 3])
    world.settle()


def test_the_state_that_was_used_least_recently_goes_first() -> None:
    world = mamba(4)
    runner = world.open_session()
    for first in (0, 100, 200):
        put(world, runner, range(first, first + 4), [(STATE, 4)])
    lease = acquired(world, runner, range(4))
    world.release(runner, lease)
    pressed(world, runner, STATE, 1)
    assert [matched(world, range(first, first + 4)) for first in (0, 100, 200)] == [4, 0, 4]
    world.settle()


def test_what_a_lease_has_slid_past_goes_before_what_a_match_needs() -> None:
    world = swa(2, 12, num_pages=40)
    runner = world.open_session()
    lease = acquired(world, runner, range(10), room=4)
    for upto in (7, 10):
        world.commit(runner, lease)
        world.extend(runner, [(lease, b"", 0, upto, 0)])
    world.commit(runner, lease)
    world.release(runner, lease)
    pressed(world, runner, WINDOW, 8)
    assert matched(world, range(10)) == 10
    world.settle()


@pytest.mark.parametrize("step", [10, 4, 1], ids=["whole", "in chunks", "page by page"])
def test_ends_of_prompts_outlive_what_others_have_slid_past(step: int) -> None:
    """All that there is room for, but for what a prompt needs while it is computed.

    Of parts that are longer than a window each has an end, and of parts of several pages there is one page more, for
    who asks for the same again.
    """
    window, slots, length = 2, 32, 10
    world = swa(window, slots, num_pages=400)
    runner = world.open_session()
    prompts = [[100 * number + each for each in range(length)] for number in range(24)]
    for tokens in prompts:
        lease = acquired(world, runner, tokens, room=step)
        for upto in range(step, length + step, step):
            world.commit(runner, lease)
            world.extend(runner, [(lease, b"", 0, min(length, upto + step), 0)])
        world.commit(runner, lease)
        world.read_replies(runner)
        world.release(runner, lease)
    there = [matched(world, tokens) == length for tokens in prompts]
    pages = {10: 3, 4: 9, 1: 2}[step]  # that are worth it, of a prompt
    kept = (slots - min(length, window + step)) // pages
    assert there[-kept:] == [True] * kept
    world.settle()


def test_a_branch_that_others_come_back_to_is_kept_like_any_end() -> None:
    world = swa(2, 16, num_pages=400)
    runner = world.open_session()
    shared = list(range(6))
    for number in range(12):
        tokens = [*shared, *(100 * (number + 1) + each for each in range(6))]
        lease = acquired(world, runner, tokens, room=12 if number == 0 else 6)
        assert (lease.matched, lease.reaches[FULL]) == ((0, 0) if number == 0 else (0, 6) if number == 1 else (6, 6))
        if number == 1:  # it learns that there is a branch, and ends a part there
            world.commit(runner, lease, tokens=6)
        world.extend(runner, [(lease, b"", 0, 12, 0)])
        world.commit(runner, lease)
        world.read_replies(runner)
        world.release(runner, lease)
        pressed(world, runner, WINDOW, 4 if number else 10)  # of the first its end is left
    world.settle()


def test_a_hit_that_leaves_no_room_for_what_is_behind_it_is_none() -> None:
    world = swa(2, 2)
    runner = world.open_session()
    put(world, runner, range(2))
    assert matched(world, range(3)) == 2
    lease = acquired(world, runner, range(3), room=1)
    assert lease.matched == 0
    world.release(runner, lease)
    world.settle()
    world = mamba(2, host_pages=32, host_slots=8)
    runner = world.open_session()
    put(world, runner, range(4), [(STATE, 4)])
    world.settle()
    runner = world.open_session()
    lease = acquired(world, runner, range(6), states=2)
    assert lease.matched == 0, "two of its own and one to read are three"
    world.release(runner, lease)
    world.settle()


WAYS_OUT = ("release", "abort", "cancel", "death", "death with a commit under way")


@pytest.mark.parametrize("tiers", [1, 2])
@pytest.mark.parametrize("way", WAYS_OUT)
def test_what_a_lease_took_to_write_on_comes_back_on_every_way_out(way: str, tiers: int) -> None:
    """A hit's state is read, and written on in a slot of the lease's own; with two tiers it is loaded first."""
    world = unified(host_pages=32 if tiers == 2 else 0)
    runner, other = world.open_session(), world.open_session()
    put(world, runner, range(8), [(2, 8)])
    if tiers == 2:
        world.quieten()
        for r in (2, WINDOW, FULL):
            while any(page.depth < 8 for page in world.seen.ready[world.cell(r, 0)]):
                pressed(world, runner, r, 1)
                world.quieten()
    lease = acquired(world, other, range(12), states=2)
    assert lease.matched == 8
    assert (lease.load is not None) is (tiers == 2)
    assert len(lease.own[2]) == 2 + (tiers == 2)
    if way == "cancel":
        world.cancel(other, lease)
    elif way.startswith("death"):
        if way != "death":
            item = world.plan_commit(other, lease, ends=[(2, 10, lease.states[2][0])])
            world.issue(other)
            assert item.issued
        world.die(other)
    else:
        world.release(other, lease, discard=way == "abort")
    world.quieten()
    assert lease.over
    for pool in world.index.stats().pools:
        assert (pool.leased, pool.fenced, pool.locked) == (0, 0, 0)
    assert matched(world, range(12)) == 8
    world.settle()


@pytest.mark.parametrize("short", ["full", "window", "mamba"])
def test_a_lease_gets_all_that_it_needs_or_nothing(short: str) -> None:
    """One pool is full of what others hold; the other two are free, and stay so."""
    sizes = {"full": 10, "window": 10, "mamba": 3, short: {"full": 6, "window": 6, "mamba": 1}[short]}
    companions = (Companion(SlidingWindow(2), sizes["window"]), Companion(MambaState(), sizes["mamba"]))
    world = Hybrid(page_size=1, num_pages=sizes["full"], companions=companions)
    runner = world.open_session()
    lease = acquired(world, runner, range(4), states=1)
    before = [(pool.resource, pool.free, pool.leased) for pool in world.index.stats().pools]
    refused = world.acquire(runner, range(100, 104), states=1)
    assert isinstance(refused, NoSpace)
    assert refused.resource == short
    assert [(pool.resource, pool.free, pool.leased) for pool in world.index.stats().pools] == before
    extended = world.extend(runner, [(lease, pack(range(4)), 0, None, 2)])
    assert isinstance(extended.results[0], NoSpace)  # type: ignore[attr-defined]
    assert [(pool.resource, pool.free, pool.leased) for pool in world.index.stats().pools] == before
    world.release(runner, lease)
    assert isinstance(world.acquire(runner, range(100, 104), states=1), Lease)
    world.settle()


def test_each_of_many_extends_is_for_itself() -> None:
    """In order: one that finds too little of a companion beside those before it is refused, and no other."""
    world = Hybrid(page_size=1, num_pages=40, companions=(Companion(SlidingWindow(2), 10), Companion(MambaState(), 3)))
    runner = world.open_session()
    one, two, three = (acquired(world, runner, range(at, at + 2)) for at in (0, 10, 20))
    result = world.extend(
        runner, [(one, pack(range(3)), 0, None, 2), (two, pack(range(2)), 0, None, 0), (three, b"", 0, None, 1)]
    )
    first, second, third = result.results  # type: ignore[attr-defined]
    assert isinstance(second, NoSpace)
    assert second.resource == "window"
    assert (len(first), third) == (12, b"")
    assert [len(lease.states[2]) for lease in (one, two, three)] == [2, 0, 1]
    world.settle()


@pytest.mark.parametrize("scarce", ["window", "mamba"])
def test_an_acquire_waits_for_room_in_one_resource(scarce: str) -> None:
    """What it needs is locked by a copy of ours alone: it is served when that is over."""
    companions = (
        Companion(SlidingWindow(2), 6 if scarce == "window" else 40, 40),
        Companion(MambaState(), 2 if scarce == "mamba" else 40, 40),
    )
    world = Hybrid(page_size=1, num_pages=40, host_pages=40, companions=companions)
    runner = world.open_session()
    put(world, runner, range(6), [(2, 4), (2, 6)])
    assert world.in_flight()
    assert world.acquire(runner, range(100, 106), states=2) is None
    world.steps()
    (waits,) = world.waiting
    assert not world.index.busy
    for copy in world.in_flight():
        world.copy_done(copy)
    world.steps()
    assert not world.waiting
    assert waits.lease is not None
    assert not waits.lease.waiting
    world.settle()


@pytest.mark.parametrize("scarce", ["window", "mamba"])
def test_an_acquire_waits_for_room_that_is_on_its_own_path(scarce: str) -> None:
    """Pages before the window that is needed, a state before the one to go on from: copies of ours alone lock them."""
    companions = (
        Companion(SlidingWindow(2), 6 if scarce == "window" else 40, 40),
        Companion(MambaState(), 3 if scarce == "mamba" else 40, 40),
    )
    world = Hybrid(page_size=1, num_pages=40, host_pages=40, companions=companions)
    runner = world.open_session()
    put(world, runner, range(6), [(2, 2), (2, 4), (2, 6)])
    assert world.in_flight()
    assert world.acquire(runner, [*range(6), *range(100, 104)], states=2) is None
    with pytest.raises(AssertionError, match=r"NoSpace"):
        acquired(world, runner, [*range(6), *range(200, 206)], states=3)
    for copy in world.in_flight():
        world.copy_done(copy)
    (waits,) = world.waiting
    world.steps()
    assert not world.waiting
    assert waits.lease is not None
    assert not waits.lease.waiting
    world.settle()


# -- the host ---------------------------------------------------------------------------------------------------------


def test_what_is_on_the_host_alone_comes_back_whole() -> None:
    """Full, the window's last pages and the state of the end, by one copy."""
    world = unified(2, 16, 4, num_pages=16, host_pages=32)
    runner = world.open_session()
    put(world, runner, range(8), [(2, 8)])
    world.quieten()
    put(world, runner, range(100, 116), [(2, 16)])
    world.quieten()
    assert world.peek(range(8)) == (0, 8, (8, 8, 8))
    lease = acquired(world, runner, range(8), states=1)
    assert lease.load is not None
    assert sorted(lease.loading[WINDOW]) == [6, 7]
    assert sorted(lease.loading[2]) == [7]
    world.quieten()
    assert world.peek(range(8)) == (8, 8, (8, 8, 8))
    world.settle()


def test_two_that_load_the_same_state_end_with_one() -> None:
    world = mamba(8, num_pages=32, host_pages=32, host_slots=8)
    runner = world.open_session()
    put(world, runner, range(8), [(STATE, 8)])
    world.quieten()
    pressed(world, runner, STATE, 1)
    while world.peek(range(8))[0]:
        pressed(world, runner, FULL, 1)
    one, two = (acquired(world, runner, range(8), states=1) for _ in range(2))
    assert (one.load is None, two.load is None) == (False, False)
    world.quieten()
    assert one.sources != two.sources
    world.commit(runner, one)
    world.commit(runner, two)
    assert world.peek(range(8)) == (8, 8, (8, 8))
    world.settle()


def test_a_hosts_companion_goes_with_its_full_and_not_before_the_match_is_cut() -> None:
    world = mamba(8, num_pages=32, host_pages=8, host_slots=8)
    runner = world.open_session()
    put(world, runner, range(8), [(STATE, 8)])
    world.quieten()
    while world.peek(range(8))[0]:
        pressed(world, runner, FULL, 1)
    assert matched(world, range(8)) == 8
    put(world, runner, range(100, 108), [(STATE, 8)])  # which takes the host
    world.quieten()
    assert matched(world, range(8)) == 0
    assert all(page.namespace == ROOT for page in world.seen.ready[world.cell(STATE, 1)])
    assert len(world.seen.ready[world.cell(STATE, 1)]) == 1
    world.settle()


def test_a_state_that_comes_late_is_copied_alone() -> None:
    """Where Full is on the host already."""
    world = mamba(8, num_pages=32, host_pages=32, host_slots=8)
    runner = world.open_session()
    put(world, runner, range(8), [(STATE, 8)])
    world.quieten()
    put(world, runner, [0, 1, 2, 3, 20], [(STATE, 4), (STATE, 5)])
    copies = world.in_flight()
    assert sum(len(part.names) for copy in copies for part in copy.parts if part.resource == STATE) == 2
    assert sum(len(part.names) for copy in copies for part in copy.parts if part.resource == FULL) == 1
    world.quieten()
    assert {page.depth for page in world.seen.ready[world.cell(STATE, 1)]} == {3, 4, 7}
    world.settle()


@pytest.mark.parametrize("kind", ["window", "mamba"])
def test_what_is_being_loaded_stays_on_the_host_until_it_is_there(kind: str) -> None:
    """Others' copies need all that the host has of it meanwhile."""
    if kind == "window":
        world = swa(2, 24, num_pages=24, host_pages=40, host_slots=4)
    else:
        world = mamba(4, num_pages=24, host_pages=40, host_slots=1)
    runner = world.open_session()
    ends = [(STATE, 4)] if kind == "mamba" else []
    put(world, runner, range(4), ends)
    world.quieten()
    pressed(world, runner, FULL, 4)
    assert world.peek(range(4))[:2] == (0, 4)
    lease = acquired(world, runner, range(4))
    assert lease.load is not None
    put(world, runner, range(200, 204), ends)
    load = next(copy for copy in world.in_flight() if not copy.to_host)
    for copy in world.in_flight():
        if copy is not load:
            world.copy_done(copy)
    world.steps()
    world.copy_done(load)  # it reads what it should
    world.settle()


def test_each_companion_tells_how_far_it_alone_would_reach() -> None:
    world = unified(2)
    runner = world.open_session()
    lease = acquired(world, runner, range(8), states=1)
    # A state where the window is gone, and a window without a state: while somebody holds what no match can end in.
    world.commit(runner, lease, ends=[(2, 4, lease.states[2][0])], floor=5)
    assert world.peek(range(8)) == (0, 0, (8, 8, 4))
    put(world, runner, range(7), [(2, 7)])
    assert world.peek(range(8)) == (7, 7, (8, 8, 7))
    world.settle()


# -- write_back -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["window", "mamba"])
@pytest.mark.parametrize("ok", [True, False], ids=["copied", "the copy fails"])
def test_under_write_back_a_companion_leaves_the_device_when_it_is_on_the_host(kind: str, ok: bool) -> None:
    """Who needs its room waits for that. A copy that fails is no reason to stay."""
    how = {"host_pages": 32, "host_slots": 16, "write_policy": WritePolicy("write_back")}
    world = swa(2, 4, **how) if kind == "window" else mamba(1, **how)
    runner = world.open_session()
    put(world, runner, range(4), [] if kind == "window" else [(STATE, 4)])
    assert cached(world, 1) == (4 if kind == "window" else 1)
    asked = world.acquire(runner, range(100, 104), states=int(kind == "mamba"))
    assert asked is None, "it waits for the copy"
    assert matched(world, range(4)) == 4
    while world.copies:
        for copy in list(world.copies.values()):
            world.copy_done(copy, ok)
        world.steps()
    assert not world.waiting
    assert cached(world, 1) == 0
    assert matched(world, range(4)) == (4 if ok else 0)
    assert world.index.peek(pack(range(4))).device_tokens == 0
    world.settle()
