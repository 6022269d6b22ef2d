"""L3 below the host, path by path: what is put there, how it comes back, who waits, and what routers are told."""

from __future__ import annotations

from typing import Any

import pytest

from sglcache.core.effects import Fetch, Prefetched, Probe, Store
from sglcache.core.index import DEVICE, HOST
from sglcache.core.key import ROOT, Namespace
from sglcache.core.l3 import FOR_EVER, SEGMENT, Held, L3Config, Shelf
from sglcache.core.tiering import WritePolicy
from sglcache.errors import Busy
from sglcache.testing.journeys import acquire, brief, evict, hashes, ids, new_events, pages, put, rig
from sglcache.testing.model import LeaseModel
from sglcache.testing.rig import Rig, Runner
from sglcache.testing.third import Op
from sglcache.units import Tier

ONE = ids(1, 16)  # 4 pages
TWO = [*ids(1, 8), *ids(101, 124)]  # 2 of them the same, and 6 more


def below(**config: Any) -> tuple[Rig, Runner]:
    """With an exact L3 of which routers are told; `l3` may say otherwise."""
    l3 = L3Config(**{"tell": True, "store_quota": 64, **config.pop("l3", {})})
    return rig(**{"host_pages": 64, "l3": l3, **config})


def had(*prompts: list[int], **config: Any) -> tuple[Rig, Runner]:
    """The same, and these were stored by an earlier life."""
    r, one = below(**config)
    for tokens in prompts:
        r.l3_had(pages(r, tokens))
    return r, one


def wait(r: Rig, runner: Runner, tokens: list[int], until: float = FOR_EVER, **options: Any) -> None:
    """An acquire that waits for L3, and has it asked."""
    assert r.acquire(runner, tokens, fetch=until, **options) is None
    r.cut()


def ops(r: Rig, kind: type) -> list[Op]:
    return [op for op in r.l3.ops.values() if isinstance(op.effect, kind)]


def fetches(r: Rig) -> list[int]:
    """Pages of each fetch that is under way."""
    return [len(op.pages) for op in ops(r, Fetch)]


def leases(r: Rig, runner: Runner) -> list[LeaseModel]:
    return [lease for lease in runner.session.leases if not lease.waiting]


def answered(r: Rig, runner: Runner) -> LeaseModel:
    """The one lease that a runner was given; waiting is over."""
    r.steps()
    (lease,) = leases(r, runner)
    return lease


def forget(r: Rig) -> None:
    """The tree does; and what it is told of the tier below anew."""
    r.clear(None)
    r.steps()
    r.cut()


# -- down --------------------------------------------------------------------------------------------------------------


def test_what_has_come_to_the_host_is_stored_and_held_there_meanwhile() -> None:
    r, one = below()
    put(r, one, ONE)
    assert (r.index.pools[HOST].locked, r.l3.ops) == (4, {})  # its digests are still to be made
    r.cut()
    (store,) = ops(r, Store)
    assert (len(store.pages), r.index.pools[HOST].locked) == (4, 4)
    new_events(r)
    r.l3_done(store)
    assert brief(new_events(r)) == [("Stored", "DISK", hashes(r, ONE), None)]
    assert r.index.pools[HOST].locked == 0
    r.settle()


def test_what_it_has_is_not_stored_again_and_told_of_once() -> None:
    r, one = below()
    put(r, one, ONE)
    r.cut()
    r.all_l3_done()
    new_events(r)
    put(r, one, TWO)
    r.cut()
    (store,) = ops(r, Store)
    assert len(store.pages) == 6
    r.l3_done(store)
    h = hashes(r, TWO)
    assert brief(new_events(r))[-1] == ("Stored", "DISK", h[2:], h[1])
    forget(r)
    put(r, one, TWO)
    r.cut()
    assert not r.l3.ops
    assert r.index.counters["l3_store_pages"] == 10
    r.settle()


def test_what_a_store_found_no_room_for_is_not_told_of() -> None:
    r, one = below()
    put(r, one, ONE)
    r.cut()
    new_events(r)
    r.l3_done(ops(r, Store)[0], right=3)
    assert brief(new_events(r)) == [("Stored", "DISK", hashes(r, ONE)[:3], None)]
    assert r.index.counters["l3_stores_failed"] == 1
    r.settle()


def test_what_goes_for_a_store_is_told_before_what_came() -> None:
    r, one = had(ids(201, 208))
    old = pages(r, ids(201, 208))
    put(r, one, ONE)
    r.cut()
    new_events(r)
    r.l3_done(ops(r, Store)[0], evict=[old[1]])
    assert brief(new_events(r)) == [
        ("Removed", "DISK", [old[1].hash]),
        ("Stored", "DISK", hashes(r, ONE), None),
    ]
    r.settle()


def test_stores_beyond_their_share_are_counted_and_stored_once_there_is_room() -> None:
    r, one = below(l3={"store_quota": 6})
    for first in (1, 101, 201):
        put(r, one, ids(first, first + 15))
    r.cut()
    assert (len(ops(r, Store)), r.index.counters["l3_pages_skipped"]) == (1, 8)
    assert r.index.l3 is not None
    assert r.index.l3.held_by_stores == 4
    for retried in (1, 2):  # once there is room
        r.l3_done(ops(r, Store)[0])
        r.cut()
        assert (len(ops(r, Store)), r.index.counters["l3_stores_retried"]) == (1, retried)
        assert r.index.l3.held_by_stores == 4
    r.all_l3_done()
    assert r.index.l3.held_by_stores == 0
    assert len(r.l3.pages) == 12
    r.settle()


def test_one_store_may_be_larger_than_their_share() -> None:
    """Else a long prompt never was stored."""
    r, one = below(l3={"store_quota": 2})
    put(r, one, ONE)
    r.cut()
    assert [len(op.pages) for op in ops(r, Store)] == [4]
    r.settle()


@pytest.mark.parametrize("policy", ["write_through_selective", "write_back"])
def test_what_the_policy_does_not_copy_to_the_host_is_not_stored(policy: str) -> None:
    r, one = below(num_pages=8, write_policy=WritePolicy(policy))
    put(r, one, ONE)
    r.cut()
    assert not r.l3.ops
    if policy == "write_back":
        assert r.acquire(one, ids(101, 132)) is None
        r.steps()
        r.copies_done()
        r.steps()
    else:
        put(r, one, ONE)
    r.cut()
    assert [len(op.pages) for op in ops(r, Store)] == [4]
    r.settle()


def test_a_split_while_it_is_stored_changes_nothing() -> None:
    """A12's second run: the write of L3 stalls, and the prompt is cut in two meanwhile."""
    r, one = below()
    prompt, other = ids(1, 32), [*ids(1, 16), *ids(201, 216)]
    put(r, one, prompt)
    r.cut()
    (store,) = ops(r, Store)
    put(r, one, other)
    r.cut()
    new_events(r)
    r.l3_done(store)
    assert brief(new_events(r)) == [("Stored", "DISK", hashes(r, prompt), None)]
    r.all_l3_done()
    told = brief(new_events(r))
    assert told == [("Stored", "DISK", hashes(r, other)[4:], hashes(r, other)[3])]
    assert all(pool.locked == 0 for pool in r.index.pools)
    forget(r)
    for tokens in (prompt, other):
        wait(r, one, tokens)
        r.all_l3_done()
        r.steps()
    assert [lease.matched for lease in leases(r, one)] == [8, 8]
    r.settle()


# -- up ----------------------------------------------------------------------------------------------------------------


def test_what_only_l3_has_is_on_the_host_before_the_acquire_is_answered() -> None:
    r, one = had(ONE)
    new_events(r)
    wait(r, one, [*ONE, 99])
    assert fetches(r) == [4]
    assert r.index.pools[HOST].leased == 4
    r.all_l3_done()
    assert brief(new_events(r)) == [("Stored", "CPU_PINNED", hashes(r, ONE), None)]
    lease = answered(r, one)
    assert (lease.matched, lease.pinned) == (4, 0)
    r.copies_done()
    assert r.peek(ONE) == (16, 16)
    r.settle()


def test_what_the_tree_has_is_not_fetched() -> None:
    r, one = had(TWO)
    put(r, one, ids(1, 8))
    new_events(r)
    wait(r, one, TWO)
    assert fetches(r) == [6]
    r.all_l3_done()
    h = hashes(r, TWO)
    assert ("Stored", "CPU_PINNED", h[2:], h[1]) in brief(new_events(r))
    assert answered(r, one).matched == 8
    r.settle()


@pytest.mark.parametrize(("threshold", "asked"), [(4, True), (5, False)])
def test_fewer_pages_than_the_threshold_are_computed(threshold: int, asked: bool) -> None:
    r, one = had(ONE, l3={"threshold": threshold})
    assert (r.acquire(one, ONE, fetch=FOR_EVER) is None) is asked
    r.settle()


def test_an_empty_l3_is_not_asked() -> None:
    r, one = below()
    assert acquire(r, one, ONE).matched == 0
    assert isinstance(r.acquire(one, ONE, fetch=FOR_EVER), LeaseModel)
    r.settle()


def test_what_l3_has_fewer_pages_of_than_the_threshold_is_not_fetched() -> None:
    r, one = had(ids(1, 8), l3={"threshold": 3})
    wait(r, one, ONE)
    assert not r.l3.ops
    assert answered(r, one).matched == 0
    r.settle()


def test_an_l3_that_is_not_exact_is_asked_first() -> None:
    r, one = had(ids(1, 8), l3={"exact": False})
    wait(r, one, ONE)
    (probe,) = ops(r, Probe)
    assert len(probe.pages) == 4
    assert r.index.pools[HOST].leased == 0
    r.l3_done(probe)
    assert fetches(r) == [2]
    r.all_l3_done()
    assert answered(r, one).matched == 2
    r.settle()


def test_a_gap_in_the_middle_ends_it_there() -> None:
    """Three parts; the second does not come whole, the third does, before it."""
    r, one = had(ids(1, 24), l3={"part": 2})
    wait(r, one, ids(1, 24))
    first, second, third = ops(r, Fetch)
    r.l3_done(third)
    assert r.peek(ids(1, 24)) == (0, 0)  # nothing comes before what is before it
    r.l3_done(first)
    assert r.peek(ids(1, 24)) == (0, 8)
    r.l3_done(second, right=1)
    assert r.peek(ids(1, 24)) == (0, 12)
    assert answered(r, one).matched == 3
    r.settle()


def test_what_is_under_way_behind_a_gap_is_cancelled_and_nobodys_until_it_is_over() -> None:
    r, one = had(ids(1, 24), l3={"part": 2})
    wait(r, one, ids(1, 24))
    first, second, third = ops(r, Fetch)
    r.l3_done(first)
    r.l3_done(second, right=0)
    assert third.cancelled
    assert answered(r, one).matched == 2
    pool = r.index.pools[HOST]
    assert (pool.fenced, pool.leased) == (2, 0)
    r.l3_done(third)  # all of it came, and is of no use
    assert (pool.fenced, pool.leased, r.peek(ids(1, 24))) == (0, 0, (0, 8))
    r.settle()


def test_two_requests_for_the_same_pages_fetch_them_once() -> None:
    r, one = had(ONE)
    two = r.open_session()
    wait(r, one, ONE)
    wait(r, two, ONE)
    assert fetches(r) == [4]
    r.all_l3_done()
    assert [answered(r, runner).matched for runner in (one, two)] == [4, 4]
    assert r.index.counters["prefetch_pages"] == 4
    r.settle()


def test_two_requests_that_begin_alike_fetch_what_is_alike_once_and_each_its_own() -> None:
    """The second waits for the first's pages, and then for those that it alone wants."""
    r, one = had(ONE, TWO)
    two = r.open_session()
    wait(r, one, ONE)
    wait(r, two, TWO)
    assert fetches(r) == [4]
    r.l3_done(ops(r, Fetch)[0])
    assert answered(r, one).matched == 4
    assert fetches(r) == [6]
    assert not leases(r, two)
    r.all_l3_done()
    assert answered(r, two).matched == 8
    assert r.index.counters["prefetch_pages"] == 10
    r.settle()


def test_who_comes_behind_another_keeps_its_own_deadline() -> None:
    r, one = had(ONE, TWO)
    two = r.open_session()
    wait(r, one, ONE, until=9.0)
    wait(r, two, TWO, until=5.0)
    r.expire(5.0)
    assert answered(r, two).matched == 0
    assert not ops(r, Fetch)[0].cancelled
    r.all_l3_done()
    assert answered(r, one).matched == 4
    r.settle()


def test_what_somebody_waits_behind_goes_on_without_its_own() -> None:
    r, one = had(ONE, TWO)
    two = r.open_session()
    wait(r, one, ONE, until=5.0)
    wait(r, two, TWO, until=9.0)
    r.expire(5.0)
    assert answered(r, one).matched == 0
    (fetch,) = ops(r, Fetch)
    assert not fetch.cancelled
    r.all_l3_done()
    assert answered(r, two).matched == 8
    r.settle()


def test_once_nobody_waits_behind_it_either_it_is_cancelled() -> None:
    r, one = had(ONE, TWO)
    two = r.open_session()
    wait(r, one, ONE, until=5.0)
    wait(r, two, TWO, until=9.0)
    (fetch,) = ops(r, Fetch)
    r.expire(5.0)
    r.expire(9.0)
    assert fetch.cancelled
    assert r.index.pools[HOST].fenced == 4
    r.settle()


def test_who_waits_behind_a_gap_looks_for_itself() -> None:
    r, one = had(ONE)
    two = r.open_session()
    wait(r, one, ONE)
    wait(r, two, ONE)
    r.l3_done(ops(r, Fetch)[0], right=1)  # a disk that could not be read for a moment
    assert answered(r, one).matched == 1
    assert fetches(r) == [3]
    r.all_l3_done()
    assert answered(r, two).matched == 4
    r.settle()


def test_who_waits_behind_a_fetch_that_hangs_does_not_hang_with_its_rest() -> None:
    """The first part had a gap, the second does not end: what waits behind looks for itself, into pages of its own."""
    r, one = had(ONE, l3={"part": 2})
    two = r.open_session()
    wait(r, one, ONE)
    wait(r, two, ONE)
    first, hangs = ops(r, Fetch)
    r.l3_done(first, right=0)
    assert answered(r, one).matched == 0
    mine = [op for op in ops(r, Fetch) if op is not hangs]
    assert [len(op.pages) for op in mine] == [2, 2]
    for op in mine:
        r.l3_done(op)
    assert answered(r, two).matched == 4
    r.l3_done(hangs)
    r.settle()


def test_what_is_computed_meanwhile_stays_and_what_comes_then_goes_back() -> None:
    r, one = had(ONE)
    two = r.open_session()
    wait(r, one, ONE)
    put(r, two, ONE)
    (fetch,) = ops(r, Fetch)
    new_events(r)
    r.l3_done(fetch)
    assert new_events(r) == []
    assert r.index.pools[HOST].leased == 0
    lease = answered(r, one)
    assert (lease.matched, lease.pinned) == (4, 4)
    assert r.index.counters["prefetched_pages"] == 0
    r.settle()


def test_what_begins_alike_and_goes_on_otherwise_is_not_taken_for_what_was_fetched() -> None:
    """It was committed meanwhile, as one node that ends before what was fetched does."""
    r, one = had(ONE)
    two = r.open_session()
    wait(r, one, ONE)
    put(r, two, [*ids(1, 4), *ids(101, 108)])
    r.l3_done(ops(r, Fetch)[0])
    assert answered(r, one).matched == 4
    assert r.index.counters["prefetched_pages"] == 3  # the first was computed as well
    assert r.peek(ONE) == (4, 16)
    r.settle()


@pytest.mark.parametrize("length", [4, 8, 16])
def test_what_hangs_on_what_was_computed_meanwhile_gives_it_its_digests(length: int) -> None:
    """Nothing else would: routers are not told of this namespace, and it is not stored."""
    secret = Namespace(extra_key="secret")
    r, one = below(write_policy=WritePolicy("write_back"))
    r.l3_had(pages(r, ONE, secret))
    two = r.open_session()
    wait(r, one, ONE, namespace=secret)
    put(r, two, ids(1, length), secret)
    (fetch,) = ops(r, Fetch)
    r.l3_done(fetch)
    assert answered(r, one).matched == 4
    r.settle()


def test_what_hangs_on_a_copy_under_way_waits_for_its_end() -> None:
    r, one = had(TWO)
    lease = acquire(r, one, ids(1, 8))
    r.commit(one, lease)
    (copy,) = r.in_flight()
    two = r.open_session()
    wait(r, two, TWO)
    (fetch,) = ops(r, Fetch)
    r.l3_done(fetch)
    assert r.index.pools[HOST].leased == 6  # there, and not in the tree
    assert not leases(r, two)
    r.copy_done(copy)
    assert r.index.pools[HOST].leased == 0
    assert answered(r, two).matched == 8
    r.settle()


def test_if_that_copy_fails_what_was_fetched_goes_back() -> None:
    r, one = had(TWO)
    lease = acquire(r, one, ids(1, 8))
    r.commit(one, lease)
    (copy,) = r.in_flight()
    two = r.open_session()
    wait(r, two, TWO)
    r.l3_done(ops(r, Fetch)[0])
    r.copy_done(copy, ok=False)
    assert r.index.pools[HOST].leased == 0
    assert answered(r, two).matched == 2  # which the device has
    r.settle()


def test_what_hangs_on_the_device_alone_is_copied_to_the_host_first() -> None:
    """Under write_back; a prefix must be on the host as a whole."""
    r, one = had(TWO, write_policy=WritePolicy("write_back"))
    put(r, one, ids(1, 8))
    assert not r.copies
    wait(r, one, TWO)
    (copy,) = r.in_flight()
    assert len(copy.pages) == 2
    r.l3_done(ops(r, Fetch)[0])
    assert not leases(r, one)
    r.copy_done(copy)
    assert answered(r, one).matched == 8
    assert r.peek(TWO)[1] == 32
    r.settle()


def test_a_match_that_is_waited_on_is_not_evicted() -> None:
    r, one = had(TWO, num_pages=8, host_pages=8, l3={"prefetch_quota": 6})
    put(r, one, ids(1, 8))
    two = r.open_session()
    wait(r, one, TWO)
    put(r, two, ids(301, 324))
    assert r.peek(ids(1, 8)) == (8, 8)
    r.all_l3_done()
    assert answered(r, one).matched == 8
    r.settle()


def test_fetches_hold_no_more_of_the_host_than_their_share() -> None:
    r, one = had(ids(1, 24), ids(101, 124), l3={"prefetch_quota": 8})
    wait(r, one, ids(1, 24))
    wait(r, one, ids(101, 124))
    assert fetches(r) == [6, 2]
    r.l3_done(ops(r, Fetch)[1])
    assert fetches(r) == [6, 2]  # its first 2 are in the tree; the next are asked for in their stead
    r.all_l3_done()
    r.steps()
    assert [lease.matched for lease in leases(r, one)] == [6, 6]
    assert r.index.l3 is not None
    assert r.index.l3.fetching == 0
    r.settle()


def test_what_there_is_no_room_for_is_declined_and_counted() -> None:
    r, one = had(ONE, ids(101, 116), l3={"prefetch_quota": 5, "threshold": 4})
    wait(r, one, ONE)
    wait(r, one, ids(101, 116))
    assert fetches(r) == [4]
    assert r.index.counters["prefetches_declined"] == 1
    (lease,) = leases(r, one)
    assert lease.matched == 0
    r.settle()


def test_a_host_that_is_in_use_declines_a_fetch_whole() -> None:
    r, one = had(ids(101, 116), host_pages=4, num_pages=16)
    put(r, one, ONE)
    lease = acquire(r, one, ONE)  # which pins all of the host
    wait(r, one, ids(101, 116))
    assert not ops(r, Fetch)
    assert r.index.counters["prefetches_declined"] == 1
    assert len(leases(r, one)) == 2
    r.release(one, lease)
    r.settle()


# -- who waits ---------------------------------------------------------------------------------------------------------


def test_at_its_deadline_a_request_goes_on_with_what_has_come() -> None:
    r, one = had(ONE, l3={"part": 2})
    wait(r, one, ONE, until=5.0)
    first, second = ops(r, Fetch)
    r.l3_done(first)
    r.expire(4.9)
    assert not leases(r, one)
    r.expire(5.0)
    assert answered(r, one).matched == 2
    assert second.cancelled
    pool = r.index.pools[HOST]
    assert (pool.fenced, pool.leased) == (2, 0)
    r.l3_done(second, right=1)
    assert (pool.fenced, pool.leased) == (0, 0)
    r.settle()


def test_no_late_byte_lands_in_a_page_that_was_given_away() -> None:
    """A fetch outlives its deadline; others fill the host meanwhile. `Rig` writes its bytes at its end."""
    r, one = had(ONE, host_pages=8, num_pages=64)
    wait(r, one, ONE, until=5.0)
    r.expire(5.0)
    for first in (101, 201, 301):
        put(r, one, ids(first, first + 15))
    r.l3_done(ops(r, Fetch)[0])
    assert r.index.pools[HOST].fenced == 0
    r.settle()


def test_who_does_not_wait_at_all_has_it_fetched_for_others() -> None:
    r, one = had(ONE)
    lease = r.acquire(one, ONE, fetch=0.0)
    assert isinstance(lease, LeaseModel)
    assert lease.matched == 0
    r.cut()
    assert fetches(r) == [4]
    r.expire(100.0)
    r.all_l3_done()
    assert r.peek(ONE) == (0, 16)
    r.settle()


@pytest.mark.parametrize("when", ["named", "asked", "probed", "fetched"])
def test_the_end_of_a_session_is_the_end_of_its_waiting(when: str) -> None:
    r, one = had(ONE, l3={"exact": when != "probed"})
    assert r.acquire(one, ONE, fetch=FOR_EVER) is None
    if when != "named":
        r.cut()
    r.end_session(one)
    if r.l3.ops:
        assert all(op.cancelled for op in r.l3.ops.values())
    r.cut()
    r.all_l3_done()
    assert r.index.l3 is not None
    assert r.index.l3.num_busy == 0
    assert r.index.pools[HOST].fenced == r.index.pools[HOST].leased == 0
    r.settle()


def test_one_session_ends_and_another_has_what_both_waited_for() -> None:
    r, one = had(ONE)
    two = r.open_session()
    wait(r, one, ONE)
    wait(r, two, ONE)
    r.die(one)
    assert not ops(r, Fetch)[0].cancelled
    r.all_l3_done()
    assert answered(r, two).matched == 4
    r.settle()


def test_who_waits_is_next_deadline_away() -> None:
    r, one = had(ONE)
    wait(r, one, ONE, until=7.0)
    assert r.index.next_expiry == 7.0
    r.all_l3_done()
    assert r.index.next_expiry is None
    r.settle()


def test_a_prefetch_asks_ahead_and_goes_on_when_nobody_waits() -> None:
    r, one = had(ONE)
    r.prefetch(one, ONE, ROOT, 5.0)
    r.cut()
    (fetch,) = ops(r, Fetch)
    r.expire(5.0)
    assert not fetch.cancelled
    r.l3_done(fetch)
    assert r.peek(ONE) == (0, 16)
    assert r.index.prefetch(one.id, 1 << 20, b"", ROOT) == Prefetched(0, 0)
    r.settle()


def test_a_lease_that_is_answered_late_may_find_no_room() -> None:
    r, one = had(ONE, num_pages=4)
    two = r.open_session()
    wait(r, one, ONE)
    held = acquire(r, two, ids(301, 316))
    r.all_l3_done()
    assert not leases(r, one)  # refused: `Rig` checks the numbers
    r.release(two, held)
    r.settle()


# -- told of -----------------------------------------------------------------------------------------------------------


def test_what_an_earlier_life_stored_is_told_of_when_it_is_found() -> None:
    r, one = had(ONE, TWO)
    h, g = hashes(r, ONE), hashes(r, TWO)
    assert brief(new_events(r))[1:] == [("Stored", "DISK", h, None), ("Stored", "DISK", g[2:], g[1])]
    assert r.index.digest()[Tier.DISK][0] == 10
    r.settle()
    del one


def test_what_goes_goes_as_a_path_of_which_a_cut_takes_the_end_first() -> None:
    r, _ = had(ONE)
    new_events(r)
    r.l3_lost(pages(r, ONE)[1])
    assert brief(new_events(r)) == [("Removed", "DISK", hashes(r, ONE)[1:])]
    r.settle()


def test_only_what_came_from_l3_counts_as_a_hit_there() -> None:
    """Of three more pages that match at the end of a wait somebody has computed two."""
    r, one = had(ids(1, 12))
    two = r.open_session()
    put(r, two, ids(1, 4))
    wait(r, one, ids(1, 16))
    put(r, two, ids(1, 16))  # that takes no time
    (fetch,) = ops(r, Fetch)
    r.l3_done(fetch)
    assert answered(r, one).matched == 4
    assert r.index.counters["l3_matched_tokens"] == 0
    forget_all(r)
    wait(r, one, ids(1, 16))
    wait(r, two, ids(1, 16))
    r.all_l3_done()
    r.steps()
    assert r.index.counters["l3_matched_tokens"] == 2 * 12
    r.settle()


def forget_all(r: Rig) -> None:
    for runner in list(r.runners.values()):
        for lease in list(runner.session.leases):
            r.release(runner, lease)
    r.cut()
    r.all_l3_done()
    for page in reversed(pages(r, ids(1, 16))[3:]):
        if page in r.l3.pages:
            r.l3_lost(page)
    forget(r)


def test_namespaces_are_apart_and_routers_know_them() -> None:
    r, one = below()
    salted = Namespace.of(None, None, "salt")
    put(r, one, ONE)
    put(r, one, ONE, salted)
    r.cut()
    r.all_l3_done()
    assert len(r.l3.pages) == 8
    forget(r)
    wait(r, one, ONE, namespace=salted)
    (fetch,) = ops(r, Fetch)
    assert {page.namespace for page in fetch.pages} == {tuple(salted)}
    r.settle()


def test_a_clear_of_all_tells_again_what_l3_has_all_the_same() -> None:
    r, one = below()
    put(r, one, ONE)
    r.cut()
    r.all_l3_done()
    new_events(r)
    r.clear(None)
    r.steps()
    assert brief(new_events(r)) == [
        ("AllBlocksCleared", None, None),
        ("Stored", "DISK", hashes(r, ONE), None),
    ]
    r.settle()


def test_what_changes_while_all_is_told_again_is_told_once() -> None:
    """More than a segment: the first is told, then pages of both come and go, then the second is."""
    r, one = below()
    many = [pages(r, [n, n, n, n]) for n in range(SEGMENT + 10)]
    for path in many:
        r.l3_had(path)
    new_events(r)
    r.clear(None)
    assert r.index.retelling
    r.step()
    r.cut()
    r.l3_lost(many[0][0])  # told, and now it is not
    r.l3_lost(many[SEGMENT + 5][0])  # never told, and never will be
    r.l3_had(pages(r, ids(50_001, 50_004)))
    r.steps()
    assert not r.index.retelling
    events = brief(new_events(r))
    assert sum(len(e[2]) for e in events if e[0] == "Stored") == SEGMENT + 10
    assert [e[2] for e in events if e[0] == "Removed"] == [[many[0][0].hash]]
    r.check_mirror()
    r.settle()
    del one


def test_what_goes_while_a_snapshot_is_told_is_not_in_it() -> None:
    r, one = had(ONE, ids(101, 108), max_batch_blocks=1)
    r.cut()
    snapshot = r.index.snapshot()
    assert snapshot.next() is not None  # AllBlocksCleared, and the first page; the rest is chosen
    told = 0
    for page in reversed(pages(r, ONE)[1:]):
        r.l3_lost(page)
    r.cut()
    while (frame := snapshot.next()) is not None:
        told += frame.num_blocks
    assert told == 2
    r.settle()
    del one


def test_a_store_of_which_routers_are_not_told_is_not_in_the_digest() -> None:
    r, one = below(l3={"tell": False})
    put(r, one, ONE)
    r.cut()
    r.all_l3_done()
    assert {event[1] for event in brief(new_events(r))[1:]} == {"GPU", "CPU_PINNED"}
    assert Tier.DISK not in r.index.digest()
    assert Tier.DISK not in r.index.told_tiers
    r.settle()


def test_an_l3_that_is_not_exact_is_told_of_as_a_hint() -> None:
    r, one = below(l3={"exact": False})
    put(r, one, ONE)
    r.cut()
    r.all_l3_done()
    assert brief(new_events(r))[-1] == ("Stored", "EXTERNAL", hashes(r, ONE), None)
    assert Tier.EXTERNAL not in r.index.digest()
    r.settle()


def test_a_clear_says_that_l3_is_at_work_and_changes_nothing() -> None:
    r, one = had(ids(101, 116))
    put(r, one, ONE)
    r.cut()
    wait(r, one, ids(101, 116))
    refused = r.clear(None)
    assert isinstance(refused, Busy)
    assert "2 copies in flight" in refused.message
    assert r.peek(ONE) == (16, 16)
    r.all_l3_done()
    r.settle()
    assert r.clear(None) == {Tier.DEVICE: 8, Tier.HOST: 8}
    assert len(r.l3.pages) == 8


def test_a_bad_page_goes_from_under_its_children_and_comes_back_to_its_place() -> None:
    """Of the shelf: a walk, as after a clear, still has parents first."""
    shelf = Shelf()
    names = [bytes([n]) * 16 for n in range(4)]
    for before, name in zip([None, *names], names, strict=False):
        shelf.add(name, held(before))
    shelf.remove(names[1], comes_back=True)
    assert [digest for digest, _ in walked(shelf)] == [names[0], names[2], names[3]]
    shelf.add(names[1], held(names[0]))
    assert [digest for digest, _ in walked(shelf)] == names


def test_a_page_that_went_for_good_comes_back_as_the_last() -> None:
    shelf = Shelf()
    for n in (1, 2, 3):
        shelf.add(bytes([n]), held(None))
    shelf.remove(bytes([1]))
    shelf.add(bytes([1]), held(None))
    assert [digest for digest, _ in walked(shelf)] == [bytes([2]), bytes([3]), bytes([1])]


def test_a_shelf_keeps_nothing_of_what_is_gone() -> None:
    shelf = Shelf()
    names = [n.to_bytes(4, "big") for n in range(3 * SEGMENT)]
    for name in names:
        shelf.add(name, held(None))
    for name in names:
        shelf.remove(name, comes_back=int.from_bytes(name, "big") % 2 == 0)
    assert len(shelf) == 0
    assert len(shelf._segments) <= 1
    assert len(shelf._places) <= SEGMENT


def held(before: bytes | None) -> Held:
    return Held(before, b"", ROOT, (None, None))


def walked(shelf: Shelf) -> list[tuple[bytes, Held]]:
    number, found = 0, []
    while (segment := shelf.after(number)) is not None:
        number, some = segment
        found += some
    return found


# -- A02, A10, A14 -----------------------------------------------------------------------------------------------------


def test_a02_host_pages_refilled_from_l3_are_announced() -> None:
    r, one = below(num_pages=4, host_pages=8)
    put(r, one, ONE)
    r.cut()
    r.all_l3_done()
    r.clear(Tier.DEVICE)
    r.clear(Tier.HOST)
    r.steps()
    new_events(r)
    r.prefetch(one, ONE, ROOT, FOR_EVER)
    r.cut()
    r.all_l3_done()
    h = hashes(r, ONE)
    assert brief(new_events(r)) == [("Stored", "CPU_PINNED", h, None)]
    lease = acquire(r, one, ONE)
    r.copies_done()
    r.release(one, lease)
    assert brief(new_events(r)) == [("Stored", "GPU", h, None)]
    evict(r, one, 4)
    assert brief(new_events(r)) == [("Removed", "GPU", h)]
    assert r.peek(ONE) == (0, 16)
    r.settle()
    assert len(r.subscriber.present[DEVICE]) == 0
    assert len(r.subscriber.present[HOST]) == 4


def test_a10_host_pages_that_are_being_stored_or_loaded_are_not_evicted() -> None:
    r, one = below(num_pages=16, host_pages=8)
    put(r, one, ONE)
    r.cut()
    (store,) = ops(r, Store)
    evict(r, one, 16 - r.model.num_free(DEVICE))
    lease = acquire(r, one, ONE)
    for first in (101, 201):
        put(r, one, ids(first, first + 15), ack=False)
    held = [copy for copy in r.in_flight() if copy.lease is not None]
    assert r.index.counters["backup_pages"] + r.index.counters["backup_pages_skipped"] == 12
    r.l3_done(store)  # `Rig` looks at the bytes
    for copy in held:
        r.copy_done(copy)
    r.copies_done()
    r.release(one, lease)
    r.settle()
