"""Faults that people who run KV cache servers reported, each as its input and the right result.

The names (A01, ...) are those of the collection they were written from. Two checks go with every case: a mirror built
from the stream equals the index in each tier, and each pool's slots add up; `Rig` makes the second after each command.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from sglcache.core import hashing
from sglcache.core.index import DEVICE, HOST, LEFT
from sglcache.core.key import ROOT, Namespace
from sglcache.errors import Busy, SglcacheError
from sglcache.testing.journeys import acquire, brief, evict, hashes, ids, new_events, pages, put, rig
from sglcache.testing.rig import Rig, pack
from sglcache.units import TicketId, Tier

# -- A01: whatever verb frees a page, the stream says so, once ----------------------------------------------


def test_a01_eviction_tells_of_what_is_not_shared() -> None:
    r, one = rig(num_pages=16)
    two = r.open_session()
    put(r, one, ids(1, 16))
    put(r, two, ids(1, 8) + ids(101, 108))
    new_events(r)
    evict(r, one, 2)
    assert brief(new_events(r)) == [("Removed", "GPU", hashes(r, ids(1, 16))[2:])]
    assert r.peek(ids(1, 16)) == (8, 8)
    assert r.peek(ids(1, 8) + ids(101, 108)) == (16, 16)


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_a01_clearing_a_tier_tells_each_block_once(tier: Tier) -> None:
    r, one = rig(host_pages=16)
    put(r, one, ids(1, 16))
    put(r, one, ids(1, 8) + ids(101, 108))
    new_events(r)
    assert r.clear(tier) == {tier: 6}
    r.steps()
    events = new_events(r)
    assert {e["type"] for e in events} == {"BlockRemoved"}
    assert {e["medium"] for e in events} == {tier.medium}
    told = Counter(h for e in events for h in e["block_hashes"])
    assert told == Counter(set(hashes(r, ids(1, 16)) + hashes(r, ids(1, 8) + ids(101, 108))))
    assert len(r.subscriber.present[1 - tier]) == 6


def test_a01_clearing_all_tells_it_in_one_event() -> None:
    r, one = rig(host_pages=16)
    put(r, one, ids(1, 16))
    new_events(r)
    r.clear()
    r.steps()
    assert new_events(r) == [{"type": "AllBlocksCleared"}]
    assert not any(r.subscriber.present)


def test_a01_the_end_of_a_session_frees_its_own_pages_and_no_cached_one() -> None:
    r, one = rig()
    two = r.open_session()
    put(r, one, ids(1, 16))
    put(r, two, ids(1, 8) + ids(101, 108))
    lease = acquire(r, one, ids(1, 16) + ids(50, 57))
    r.commit(one, lease, done=False)  # its event never comes
    new_events(r)
    r.die(one)
    assert new_events(r) == []
    assert r.peek(ids(1, 16) + ids(50, 57)) == (16, 16)
    assert r.index.stats().pools[0].free == 64 - 6


# -- A03: parents ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [20, 4])
def test_a03_the_first_new_block_names_the_last_stored_one(size: int) -> None:
    """P=4: 8 tokens, then 20 that start with them, at once or as inserts of 4 tokens."""
    r, one = rig(host_pages=16)
    h = hashes(r, ids(1, 20))
    put(r, one, ids(1, 8), ack=False)
    r.copies_done()
    assert brief(new_events(r))[1:] == [("Stored", "GPU", h[:2], None), ("Stored", "CPU_PINNED", h[:2], None)]
    lease = acquire(r, one, ids(1, 20))
    for end in range(8 + min(size, 12), 21, size):
        r.commit(one, lease, end)
    assert brief(new_events(r)) == [("Stored", "GPU", h[2:], h[1])]
    r.copies_done()
    assert brief(new_events(r)) == [("Stored", "CPU_PINNED", h[2:], h[1])]
    r.release(one, lease)


def test_a03_five_inserts_of_one_block_each() -> None:
    r, one = rig(host_pages=16)
    h = hashes(r, ids(1, 20))
    told = []
    for end in range(4, 21, 4):
        put(r, one, ids(1, end))
        told += brief(new_events(r))
    want: list[tuple[Any, ...]] = []
    for i in range(5):
        want += [("Stored", medium, [h[i]], h[i - 1] if i else None) for medium in ("GPU", "CPU_PINNED")]
    assert told[1:] == want


# -- A04: reading says nothing ------------------------------------------------------------------------------


def test_a04_no_match_emits_anything() -> None:
    r, one = rig()
    put(r, one, ids(1, 8))
    assert brief(new_events(r))[1:] == [("Stored", "GPU", hashes(r, ids(1, 8)), None)]
    seq = r.index.next_seq
    index = r.index
    for n in range(1000):
        assert index.peek(pack(ids(1, 8)))[:2] == (8, 8)
        assert index.peek(pack(ids(9, 16)))[:2] == (0, 0)
        if n < 10:
            assert r.peek(ids(1, 6)) == (4, 4)
            lease = acquire(r, one, ids(1, 6))  # splits the node
            r.release(one, lease, discard=True)
    assert index.stats().counters["splits"] > 0
    assert not index.uncut
    assert new_events(r) == []
    assert index.next_seq == seq


# -- A07: a client that is killed ---------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2])
def test_a07_the_dead_keep_nothing(shards: int) -> None:
    r, other = rig(num_pages=40)
    runner = r.open_session(shards)
    put(r, runner, ids(1, 64))
    acquire(r, runner, ids(1, 16))  # a lock on 4 pages
    lease = acquire(r, runner, ids(201, 212))  # 3 pages that it never inserts
    r.commit(runner, lease, done=False)
    assert r.index.stats().pools[0].locked == 4
    r.end_session(runner)
    device = r.index.stats().pools[0]
    assert (device.free, device.fenced, device.locked) == (40 - 16 - 3, 3, 4), "it may still read and write them"
    for shard in range(shards):
        r.shard_gone(runner, shard)
    device = r.index.stats().pools[0]
    assert (device.free, device.fenced, device.leased, device.locked) == (40 - 16, 0, 0, 0)
    assert r.index.stats().num_sessions == 1
    assert r.peek(ids(1, 64)) == (64, 64)
    assert r.index.stats().counters["sessions_ended"] == 1
    new_events(r)
    put(r, other, ids(301, 460))  # all 40 pages can be had
    new_events(r)


def test_a07_death_before_the_first_request() -> None:
    r, _ = rig()
    r.die(r.open_session(2))
    assert r.index.stats().num_sessions == 1
    assert r.index.stats().pools[0].free == 64


# -- A08: pins of requests that come to nothing ---------------------------------------------------------------


def test_a08_no_pin_outlives_its_request() -> None:
    r, one = rig(host_pages=8)
    put(r, one, ids(1, 16))
    keeper = r.open_session()
    for n in range(100):
        runner = r.open_session() if n % 10 == 9 else one
        assert r.pin(keeper, ids(1, 16), ROOT, f"other {n}", 1e9) == 16
        assert r.pin(runner, ids(1, 16), ROOT, f"request {n}", 1e9) == 16
        if runner is one:
            assert r.unpin(one, f"request {n}") == 4
            if n % 2:
                assert r.unpin(one, f"request {n}") == 0
        else:
            r.die(runner)
        assert r.index.stats().pinned_pages == 4, "another request's pin on the same pages stays"
        assert r.unpin(keeper, f"other {n}") == 4
        assert r.index.stats().pinned_pages == 0
    put(r, one, ids(101, 132))  # 8 pages: all of the host
    assert set(r.model.slot[HOST]) == set(pages(r, ids(101, 132)))
    new_events(r)


def test_a08_a_lease_that_never_loads_gives_the_host_back() -> None:
    r, one = rig(num_pages=8, host_pages=8)
    put(r, one, ids(1, 16))
    evict(r, one, 4)
    for n in range(20):
        lease = acquire(r, one, ids(1, 16))
        assert lease.load is not None
        if n % 2:
            r.release(one, lease, discard=True)  # before the copy is over: it waits for it
            r.copies_done()
        else:
            r.copies_done()
            r.release(one, lease, discard=True)
        evict(r, one, 4)
    put(r, one, ids(101, 132))
    assert set(r.model.slot[HOST]) == set(pages(r, ids(101, 132)))
    new_events(r)


# -- A12: a split while a copy runs ---------------------------------------------------------------------------


def test_a12_a_split_during_a_backup_loses_nothing() -> None:
    r, one = rig(num_pages=24, host_pages=32)
    put(r, one, ids(1, 32), ack=False)
    put(r, one, ids(1, 16) + ids(201, 216), ack=False)
    assert [len(copy.pages) for copy in r.in_flight()] == [8, 4]
    new_events(r)
    h, other = hashes(r, ids(1, 32)), hashes(r, ids(1, 16) + ids(201, 216))
    r.copies_done()
    assert brief(new_events(r)) == [("Stored", "CPU_PINNED", h, None), ("Stored", "CPU_PINNED", other[4:], h[3])]
    assert all(pool.locked == 0 for pool in r.index.stats().pools)
    evict(r, one, 12)
    assert r.peek(ids(1, 32)) == (0, 32)
    lease = acquire(r, one, ids(1, 32))
    assert lease.matched == 8
    r.copies_done()
    assert brief(new_events(r))[-1] == ("Stored", "GPU", h, None)
    r.release(one, lease)


def test_a12_a_child_of_a_copy_under_way_is_told_after_it() -> None:
    """Acks in the wrong order; parents first on the stream all the same."""
    r, one = rig(host_pages=16)
    lease = acquire(r, one, ids(1, 16))
    r.commit(one, lease, 8)
    r.commit(one, lease, 16)
    new_events(r)
    first, second = r.in_flight()
    r.copy_done(second)
    assert new_events(r) == []
    r.copy_done(first)
    assert brief(new_events(r)) == [("Stored", "CPU_PINNED", hashes(r, ids(1, 16)), None)]
    r.release(one, lease)


@pytest.mark.parametrize("early", [True, False])
def test_a12_a_child_of_a_copy_that_failed_is_not_told(early: bool) -> None:
    """Its target may still be written when the parent's failure comes: it is fenced until its own ack."""
    r, one = rig(host_pages=16)
    lease = acquire(r, one, ids(1, 16))
    r.commit(one, lease, 8)
    r.commit(one, lease, 16)
    new_events(r)
    first, second = r.in_flight()
    if early:
        r.copy_done(second)
    r.copy_done(first, ok=False)
    assert r.index.stats().pools[1].fenced == (0 if early else 2)
    if not early:
        r.copy_done(second)
    assert new_events(r) == []
    assert r.index.stats().pools[1].free == 16
    r.commit(one, lease)  # passes over them again: tried again
    r.copies_done()
    assert brief(new_events(r)) == [("Stored", "CPU_PINNED", hashes(r, ids(1, 16)), None)]
    r.release(one, lease)


# -- A13: equal pages at different places ---------------------------------------------------------------------


def test_a13_repeated_tokens_are_different_blocks() -> None:
    r, one = rig(num_pages=8)
    put(r, one, [7] * 16)
    _, stored = new_events(r)
    h = stored["block_hashes"]
    assert len(set(h)) == 4
    assert stored["parent_block_hash"] is None
    put(r, one, [7] * 8 + [9] * 8)
    (more,) = new_events(r)
    assert more["parent_block_hash"] == h[1]
    assert len(more["block_hashes"]) == 2
    assert more["token_ids"] == [9] * 8
    evict(r, one, 6)
    told = [value for event in new_events(r) for value in event["block_hashes"]]
    assert Counter(told) == Counter([*h, *more["block_hashes"]])
    assert r.subscriber.present[0] == set()


# -- A17: namespaces ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hash_name", ["xxh3_128", "sha256"])
def test_a17_salts_are_apart_in_the_tree_the_hashes_and_on_the_wire(hash_name: str) -> None:
    r, one = rig(num_pages=8, hash_name=hash_name)
    spaces = {"a": Namespace(cache_salt="a"), "b": Namespace(cache_salt="b"), None: ROOT}
    for space in spaces.values():
        put(r, one, ids(1, 8), space)
    events = new_events(r)[1:]
    assert [event.get("cache_salt") for event in events] == ["a", "b", None]
    assert "cache_salt" not in events[2], "no salt is no key, not an empty one"
    told = [value for event in events for value in event["block_hashes"]]
    assert len(set(told)) == 6
    bare = hashing.hasher(hash_name).chain(b"", pack(ids(1, 8)), 16)
    size = len(bare) // 2
    assert events[2]["block_hashes"] == [hashing.block_hash(bare[:size]), hashing.block_hash(bare[size:])]
    evict(r, one, 2)
    assert brief(new_events(r)) == [("Removed", "GPU", hashes(r, ids(1, 8), spaces["a"]))]
    assert r.subscriber.present[0] == {*pages(r, ids(1, 8), spaces["b"]), *pages(r, ids(1, 8))}
    assert r.peek(ids(1, 8), Namespace(cache_salt="c")) == (0, 0)
    assert r.peek(ids(1, 8), Namespace(lora="b")) == (0, 0)
    assert r.peek(ids(1, 8), Namespace(extra_key="b")) == (0, 0)
    assert r.peek(ids(1, 8), spaces["b"]) == (8, 8)


def test_a17_what_routers_could_not_tell_apart_is_not_published() -> None:
    r, one = rig(num_pages=8, host_pages=8)
    new_events(r)
    put(r, one, ids(1, 8), Namespace(extra_key="k", cache_salt="a"))
    evict(r, one, 2)
    assert new_events(r) == []
    assert r.index.stats().counters["unpublished_pages"] == 6, "stored twice, removed once, two pages each"
    assert r.peek(ids(1, 8), Namespace(extra_key="k", cache_salt="a")) == (0, 8)


# -- A19: how much is said ------------------------------------------------------------------------------------


def test_a19_a_long_prompt_is_one_event_and_so_is_its_removal() -> None:
    r, one = rig(page_size=1, num_pages=4096)
    put(r, one, ids(1, 4096))
    _, stored = new_events(r)
    assert len(stored["block_hashes"]) == 4096
    assert stored["token_ids"] == ids(1, 4096)
    evict(r, one, 1)
    (gone,) = new_events(r)
    assert gone["block_hashes"] == stored["block_hashes"]


@pytest.mark.parametrize("num_pages", [1024, 2048, 8192])
def test_a19_work_grows_with_the_pages_and_not_faster(num_pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: each page is hashed once in its life, whatever happens to it."""
    calls = Counter[str]()
    plain = hashing.HASHERS["xxh3_128"]

    def count(data: bytes) -> bytes:
        calls["digest"] += 1
        return plain.digest(data)

    monkeypatch.setitem(hashing.HASHERS, "xxh3_128", plain._replace(digest=count))
    r, one = rig(page_size=16, num_pages=num_pages, host_pages=num_pages, cut_slice=100_000_000)
    lease = acquire(r, one, ids(1, num_pages * 16))
    for end in range(num_pages * 4, num_pages * 16 + 1, num_pages * 4):
        r.commit(one, lease, end)
        r.cut()
    r.copies_done()
    r.release(one, lease)
    evict(r, one, 1)
    r.peek(ids(1, num_pages * 16))
    r.cut()
    assert calls["digest"] == num_pages
    # four commits, four acks that join, and one removal, in events of at most 4,096 blocks
    assert len(r.subscriber.events) <= 1 + 4 * (1 + num_pages // 4096) + 2 * (1 + num_pages // 4096)


def test_a19_a_mixed_batch_keeps_its_order_and_merges_nothing_that_differs() -> None:
    """2 GPU stores, a CPU store, a salted store, a remove, a store, a clear: queued together, cut once."""
    r, one = rig(num_pages=8, host_pages=8)
    index, model = r.index, r.model
    r.cut()
    salted = Namespace(cache_salt="s")
    batches = len(r.subscriber.batches)

    # The rig cuts what a page's new owner must not hear too early, so this goes past it.
    def journey(tokens: list[int], namespace: Namespace, ticket: int, ack: bool = False) -> None:
        grant = index.acquire(one.id, 1, pack(tokens), namespace)
        assert grant is not None
        index.event_done(one.id, ticket)
        index.commit(one.id, 2, grant.lease, ticket)
        if ack:
            index.copy_done(index.writes[0].id)
        index.event_done(one.id, ticket + 1)
        index.release(one.id, 3, grant.lease, ticket + 1)

    journey(ids(1, 8), ROOT, 1)
    journey([50] * 4, ROOT, 3)
    index.copy_done(index.writes[0].id)
    journey(ids(1, 8), salted, 5)
    while index.writes:
        index.copy_done(index.writes[0].id, ok=False)
    grant = index.acquire(one.id, 4, pack([9] * 16))  # 4 pages where 3 are free
    assert grant is not None
    index.event_done(one.id, 7)
    index.commit(one.id, 5, grant.lease, 7)
    index.copy_done(index.writes[0].id, ok=False)
    index.event_done(one.id, 8)
    index.release(one.id, 6, grant.lease, 8)
    index.clear()
    publish = index.drain(1.5)[0]
    events = msgspec.msgpack.decode(publish.payload)[1]  # type: ignore[union-attr]
    h, nine = hashes(r, ids(1, 8)), hashes(r, [9] * 16)
    assert brief(events) == [
        ("Stored", "GPU", h, None),
        ("Stored", "GPU", hashes(r, [50] * 4), None),
        ("Stored", "CPU_PINNED", h, None),
        ("Stored", "GPU", hashes(r, ids(1, 8), salted), None),
        ("Removed", "GPU", h),
        ("Stored", "GPU", nine, None),
        ("AllBlocksCleared", None, None),
    ]
    assert [event.get("cache_salt") for event in events] == [None, None, None, "s", None, None, None]
    for event in events:
        if event["type"] == "BlockStored":
            assert len(event["token_ids"]) == 4 * len(event["block_hashes"])
    r.subscriber.apply(publish)  # type: ignore[arg-type]
    assert len(r.subscriber.batches) == batches + 1
    assert not any(r.subscriber.present)
    assert not model.slot[DEVICE]


def test_a19_stores_of_two_requests_that_follow_each_other_are_one_event() -> None:
    r, one = rig()
    put(r, one, ids(1, 8))
    put(r, one, ids(1, 16))
    assert brief(new_events(r))[1:] == [("Stored", "GPU", hashes(r, ids(1, 16)), None)]


# -- A22: clear -----------------------------------------------------------------------------------------------


def left(r: Rig) -> dict[str, int]:
    """How many pages were counted as having left a tier, by what is not 0."""
    counters = r.index.stats().counters
    return {name: counters[name] for reasons in LEFT for name in reasons if counters[name]}


def test_a20_of_every_page_that_left_a_tier_the_reason_is_counted() -> None:
    r, one = rig(num_pages=4, host_pages=4)
    put(r, one, ids(1, 16))
    lease = acquire(r, one, ids(1, 8) + [4_000_000_000] * 8)  # h3 and h4 must go, h1 and h2 are in use
    assert left(r) == {"demoted_pages": 2}
    events = brief(new_events(r))
    h = hashes(r, ids(1, 16))
    told = [("Stored", "GPU", h, None), ("Stored", "CPU_PINNED", h, None), ("Removed", "GPU", h[2:])]
    assert events[1:] == told, "on the host before it is off the device"
    r.cancel(one, lease)
    put(r, one, ids(101, 104))  # its copy to the host takes the place of h4, and a node goes as a whole
    assert left(r) == {"demoted_pages": 2, "evicted_host_pages": 2}
    assert r.clear() == {Tier.DEVICE: 3, Tier.HOST: 3}
    assert left(r) == {
        "demoted_pages": 2,
        "evicted_host_pages": 2,
        "cleared_device_pages": 3,
        "cleared_host_pages": 3,
    }


def test_a20_what_the_host_lets_go_of_is_not_lost_while_the_device_has_it() -> None:
    r, one = rig(num_pages=8, host_pages=2)
    put(r, one, ids(1, 8))
    put(r, one, ids(101, 108))
    assert left(r) == {"unbacked_pages": 2}
    evict(r, one, 2)
    assert left(r) == {"unbacked_pages": 2, "evicted_device_pages": 2}
    assert r.index.stats().counters["evicted_nodes"] == 2


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_a20_a_cleared_tier_was_not_short_of_room(tier: Tier) -> None:
    r, one = rig(num_pages=16, host_pages=16, evict_slice=1)
    for first in (1, 101, 201):
        put(r, one, ids(first, first + 7))
    r.clear(tier)
    put(r, one, ids(301, 308))
    r.steps()
    assert left(r) == {f"cleared_{tier.name.lower()}_pages": 6}
    assert r.index.stats().counters["evicted_nodes"] == 0


def test_a22_a_clear_does_all_or_says_what_holds_it() -> None:
    r, one = rig(host_pages=16)
    put(r, one, ids(1, 16))
    lease = acquire(r, one, ids(1, 8))  # 2 pages
    put(r, one, ids(101, 108), ack=False)  # 2 pages, their copy held back
    new_events(r)
    for tier in (None, Tier.DEVICE, Tier.HOST):
        busy = r.clear(tier)
        assert isinstance(busy, Busy)
        assert (busy.leases, busy.copies, busy.pinned_pages, busy.fenced_pages) == (1, 1, 0, 0)
        assert busy.locked_pages == {"DEVICE": 4, "HOST": 4}
    assert new_events(r) == []
    assert r.peek(ids(1, 16)) == (16, 16)
    (late,) = r.in_flight()
    r.copies_done()
    r.release(one, lease)
    new_events(r)
    assert r.clear() == {Tier.DEVICE: 6, Tier.HOST: 6}
    r.steps()
    assert new_events(r) == [{"type": "AllBlocksCleared"}]
    for pool in r.index.stats().pools:
        assert pool.free == pool.total
    r.turn(lambda: r.index.copy_done(TicketId(late.ticket)))  # a late ack brings nothing back
    assert new_events(r) == []
    assert r.index.stats().num_nodes == 0


def test_a22_a_pin_and_a_fence_hold_a_clear_too() -> None:
    r, one = rig()
    two = r.open_session(2)
    put(r, one, ids(1, 16))
    r.pin(one, ids(1, 8), ROOT, "owner", 5.0)
    busy = r.clear()
    assert isinstance(busy, SglcacheError)
    assert busy.pinned_pages == 2
    assert r.expire(5.0) == 1
    acquire(r, two, ids(201, 212))
    r.end_session(two)
    busy = r.clear()
    assert isinstance(busy, SglcacheError)
    assert busy.fenced_pages == 3
    r.shard_gone(two, 0)
    assert isinstance(r.clear(), SglcacheError), "one of two shards still lives"
    r.shard_gone(two, 1)
    assert r.clear() == {Tier.DEVICE: 4}
    new_events(r)


# -- found by the programs of test_laws -------------------------------------------------------------------------


def test_a_commit_tells_of_the_duplicates_that_its_load_found() -> None:
    """Two leases load the same host pages; the slower one's answer said 0 duplicates and named other pages."""
    r, one = rig(num_pages=16, host_pages=8)
    put(r, one, ids(1, 8))
    evict(r, one, 2)
    fast, slow = acquire(r, one, ids(1, 8)), acquire(r, one, ids(1, 8))
    r.copies_done()
    r.commit(one, slow)
    told = r.wakes[-1].result
    assert getattr(told, "num_duplicates", None) == 2
    assert len(slow.duplicates) == 2
    r.read_replies(one)
    r.commit(one, slow)  # sent after the answer was read: its duplicates come back
    assert not slow.duplicates
    r.release(one, slow)
    r.release(one, fast)
    new_events(r)


def test_a_removal_in_several_batches_takes_children_first() -> None:
    """A node longer than a batch: its first pages left in the first batch, their children in the next."""
    r, one = rig(num_pages=16, max_batch_blocks=3)
    put(r, one, ids(1, 32))
    r.cut()
    evict(r, one, 1)
    r.cut()
    gone = [
        value for event in r.subscriber.events if event["type"] == "BlockRemoved" for value in event["block_hashes"]
    ]
    h = hashes(r, ids(1, 32))
    assert gone == [*h[5:8], *h[2:5], *h[:2]]
