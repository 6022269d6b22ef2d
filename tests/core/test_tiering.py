"""The second tier: what is copied to the host, when, and what comes back."""

from __future__ import annotations

from typing import Any

import pytest

from sglcache.core import invariants
from sglcache.core.effects import Copy, Grant, Wake
from sglcache.core.index import DEVICE, HOST, Index, IndexConfig
from sglcache.core.tiering import WritePolicy
from sglcache.errors import ConfigError
from sglcache.testing.journeys import acquire, brief, evict, hashes, ids, new_events, put, rig
from sglcache.testing.model import LeaseModel
from sglcache.testing.rig import Rig, Runner, pack

ONE = ids(1, 16)


def writes_back(**config: Any) -> tuple[Rig, Runner]:
    return rig(**{"num_pages": 4, "host_pages": 16, "write_policy": WritePolicy("write_back"), **config})


def wait_for(r: Rig, tokens: list[int]) -> LeaseModel:
    """A lease for which something must be copied first."""
    assert r.acquire(r.open_session(), tokens) is None
    r.steps()
    (waits,) = r.waiting
    assert waits.acquired is not None
    return waits.acquired


# -- write_through ----------------------------------------------------------------------------------------------------


def test_chunks_are_written_through_as_they_are_committed() -> None:
    r, one = rig(host_pages=16)
    lease = acquire(r, one, ONE)
    for tokens in (4, 12, 16):
        r.commit(one, lease, tokens)
    assert [len(copy.src_slots) // 4 for copy in r.copies] == [1, 2, 1]
    r.copies_done()
    assert brief(new_events(r))[1:] == [
        ("Stored", "GPU", hashes(r, ONE), None),
        ("Stored", "CPU_PINNED", hashes(r, ONE), None),
    ]


def test_what_found_no_room_is_sent_as_soon_as_there_is_some() -> None:
    """A lease holds all of the host; the next commit's pages wait for its release, and need no other request."""
    r, one = rig(num_pages=16, host_pages=4)
    put(r, one, ONE)
    lease = acquire(r, one, ONE)
    put(r, one, ids(101, 108))
    counters = r.index.counters
    assert (counters["backup_pages_skipped"], len(r.copies)) == (2, 1)
    assert not r.more
    r.release(one, lease)
    assert r.more
    r.steps()
    r.copies_done()
    assert (counters["backup_pages_skipped"], counters["backups_retried"]) == (2, 1)
    new_events(r)
    evict(r, one, 16 - r.model.num_free(DEVICE))
    assert r.peek(ids(101, 108)) == (0, 8)
    assert r.peek(ONE) == (0, 0)  # which made room for it


def test_what_is_tried_again_takes_no_room_from_others_for_a_part_of_it() -> None:
    """Else three that do not fit would make room for a part of each out of the others' parts, for ever."""
    r, one = rig(page_size=1, num_pages=40, host_pages=8)
    put(r, one, range(100, 106))
    held = acquire(r, one, range(100, 106))  # and 2 pages are left on the host
    for first in (200, 300, 400):
        whole = acquire(r, one, range(first, first + 4))
        r.commit(one, whole)
        half = r.acquire(one, range(first, first + 4), limit=2)  # two nodes, of which the first would fit
        assert isinstance(half, LeaseModel)
        r.cancel(one, half)
        r.release(one, whole)
    put(r, one, [77])  # the end of its copy is a reason to try again
    for _ in range(10):
        r.steps()
        r.copies_done()
    assert len(r.copies) < 5
    assert not r.more
    r.release(one, held)
    for _ in range(10):
        r.steps()
        r.copies_done()
    assert not r.in_flight()
    assert r.index.backups.num_skipped == 0


def test_of_a_prompt_that_the_host_can_never_hold_as_much_is_copied_as_fits() -> None:
    r, one = rig(num_pages=16, host_pages=4)
    put(r, one, ids(101, 108))
    put(r, one, ids(1, 24))
    assert r.peek(ids(1, 24)) == (24, 24)
    assert len(r.model.slot[HOST]) == 4
    assert r.index.backups.num_skipped == 0
    assert not r.more
    evict(r, one, 16 - r.model.num_free(DEVICE))
    assert r.peek(ids(1, 24)) == (0, 16)
    r.settle()


def test_of_a_prompt_that_the_host_can_never_hold_as_much_is_written_back_as_fits() -> None:
    r, one = writes_back(num_pages=6, host_pages=4)
    put(r, one, ids(1, 24))
    wait_for(r, ids(101, 124))
    r.copies_done()
    r.steps()
    assert not r.waiting
    assert r.peek(ids(1, 24)) == (0, 16)
    r.settle()


def test_what_was_evicted_meanwhile_is_not_tried_again() -> None:
    r, one = rig(num_pages=6, host_pages=4)
    put(r, one, ONE)
    lease = acquire(r, one, ONE)
    put(r, one, ids(101, 108))
    evict(r, one, 2)
    assert r.index.backups.num_skipped == 0
    r.release(one, lease)
    assert not r.more


# -- write_through_selective ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_the_selective_policy_copies_with_the_hit_that_it_asks_for(threshold: int) -> None:
    r, one = rig(host_pages=16, write_policy=WritePolicy("write_through_selective", threshold))
    for hit in range(1, threshold + 1):
        assert not r.copies
        put(r, one, ONE if hit < threshold else ids(1, 8) + ids(101, 108))
    assert [len(copy.src_slots) // 4 for copy in r.copies] == [2 if threshold > 1 else 4]
    r.settle()


def test_a_request_that_commits_nothing_is_a_hit_too() -> None:
    r, one = rig(host_pages=16, write_policy=WritePolicy("write_through_selective", 2))
    put(r, one, ONE)
    r.release(one, acquire(r, one, ONE))
    r.copies_done()
    assert brief(new_events(r))[-1] == ("Stored", "CPU_PINNED", hashes(r, ONE), None)


def test_chunks_of_one_request_are_one_hit() -> None:
    r, one = rig(host_pages=16, write_policy=WritePolicy("write_through_selective", 2))
    lease = acquire(r, one, ONE)
    for tokens in (4, 8, 12, 16):
        r.commit(one, lease, tokens)
    r.release(one, lease)
    assert not r.copies


# -- write_back -------------------------------------------------------------------------------------------------------


def test_a_page_is_on_the_host_before_it_is_not_on_the_device() -> None:
    r, one = writes_back()
    put(r, one, ONE)
    assert not r.copies
    new_events(r)
    lease = wait_for(r, ids(101, 108))
    (copy,) = r.in_flight()
    assert new_events(r) == []
    r.copy_done(copy)
    r.steps()
    assert not lease.waiting
    h = hashes(r, ONE)
    assert brief(new_events(r)) == [("Stored", "CPU_PINNED", h, None), ("Removed", "GPU", h)]
    assert r.peek(ONE) == (0, 16)
    r.settle()


def test_no_more_is_copied_than_has_to_go() -> None:
    r, one = writes_back(num_pages=8)
    for first in (1, 101, 201, 301):
        put(r, one, ids(first, first + 7))
    wait_for(r, ids(901, 909))
    assert [len(copy.pages) for copy in r.in_flight()] == [2, 2]
    r.settle()


def test_what_is_on_the_host_already_goes_at_once() -> None:
    r, one = writes_back()
    put(r, one, ONE)
    wait_for(r, ids(101, 116))
    r.settle()
    back = acquire(r, one, ONE)
    r.copies_done()
    r.release(one, back)
    copies = len(r.copies)
    assert isinstance(r.acquire(one, ids(201, 216)), LeaseModel)
    assert len(r.copies) == copies
    r.settle()


def test_whom_somebody_uses_meanwhile_stays() -> None:
    r, one = writes_back(num_pages=9)
    put(r, one, ONE)
    put(r, one, ids(101, 116))
    wait_for(r, ids(201, 212))
    (copy,) = r.in_flight()
    # It comes behind the one that waits, and so does its match: pinned at once, answered later.
    assert r.acquire(one, [*ONE, 99]) is None
    r.copy_done(copy)
    assert r.peek(ONE) == (16, 16)
    r.settle()


def test_a_copy_that_fails_is_no_reason_to_stay() -> None:
    r, one = writes_back(host_pages=4)
    put(r, one, ONE)
    lease = wait_for(r, ids(101, 108))
    r.copy_done(r.in_flight()[0], ok=False)
    r.steps()
    assert not lease.waiting
    assert r.peek(ONE) == (0, 0)
    assert not r.model.slot[HOST]
    r.settle()


def test_a_host_without_room_is_no_reason_to_wait() -> None:
    """What a lease holds there can't be evicted."""
    r, one = writes_back(num_pages=6, host_pages=4)
    put(r, one, ONE)
    other = wait_for(r, ids(101, 116))
    r.copies_done()
    r.steps()
    r.release(r.runners[other.session.number], other)
    held = acquire(r, one, ONE)
    r.copies_done()
    put(r, one, ids(201, 208))
    copies = len(r.copies)
    assert isinstance(r.acquire(one, ids(301, 308)), LeaseModel)
    assert len(r.copies) == copies
    assert r.peek(ids(201, 208)) == (0, 0)
    r.release(one, held)
    r.settle()


def test_a_clear_copies_nothing() -> None:
    r, one = writes_back()
    put(r, one, ONE)
    r.clear(None)
    assert not r.copies
    assert r.peek(ONE) == (0, 0)


# -- a host tier that grows -------------------------------------------------------------------------------------------


def test_host_pages_are_used_as_they_are_ready_and_what_waited_is_sent_then() -> None:
    """The host's memory is had in the background: at first it has none, and a prompt is told of on the device alone."""
    index = Index(IndexConfig(page_size=4, num_pages=16, host_pages=8, host_ready=0))
    session = index.open_session()
    for number, tokens in enumerate((ONE, ids(101, 108))):
        grant = index.acquire(session, 2 * number, pack(tokens))
        assert isinstance(grant, Grant)
        index.commit(session, 2 * number + 1, grant.lease, number + 1)
        index.event_done(session, number + 1)
    assert (index.pools[HOST].total, index.counters["backup_pages_skipped"]) == (0, 6)
    sent = []
    for ready in (1, 3, 8):
        index.host_ready(ready)
        assert index.busy
        while index.step():
            pass
        assert invariants.check(index) == []
        sent += [len(effect.src_slots) // 4 for effect in index.drain() if isinstance(effect, Copy)]
        assert sum(sent) <= ready
        pool = index.pools[HOST]
        assert (pool.total, pool.free + pool.cached) == (ready, ready)
    assert sent == [2, 4]
    index.host_ready(7)  # memory that was given is not taken back
    assert index.pools[HOST].total == 8
    with pytest.raises(AssertionError):
        index.host_ready(9)


def test_a_clear_leaves_a_growing_host_tier_the_size_that_it_had() -> None:
    index = Index(IndexConfig(page_size=4, num_pages=16, host_pages=8, host_ready=3))
    index.clear(None)
    assert index.pools[HOST].total == 3
    index.host_ready(8)
    assert (index.pools[HOST].total, index.pools[HOST].free) == (8, 8)
    assert invariants.check(index) == []


# -- load-back --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("threshold", "matched"), [(0, 16), (16, 16), (17, 0)])
def test_a_host_hit_below_the_threshold_is_computed_again(threshold: int, matched: int) -> None:
    r, one = rig(num_pages=4, host_pages=16, load_back_threshold=threshold)
    put(r, one, ONE)
    evict(r, one, 4)
    new_events(r)
    assert r.peek(ONE) == (0, matched)
    lease = acquire(r, one, ONE)
    assert lease.matched * 4 == matched
    r.commit(one, lease)
    r.copies_done()
    r.release(one, lease)
    assert brief(new_events(r)) == [("Stored", "GPU", hashes(r, ONE), None)]  # revived, and told of, either way
    r.settle()


def test_loads_beyond_the_quota_are_computed_again() -> None:
    r, one = rig(num_pages=12, host_pages=16, load_back_quota=5)
    for first in (1, 101):
        put(r, one, ids(first, first + 15))
    evict(r, one, 8)
    first = acquire(r, one, ONE)
    second = acquire(r, one, ids(101, 116))
    assert (first.matched, second.matched) == (4, 0)
    assert r.index.counters["loads_declined"] == 1
    r.copies_done()
    assert r.peek(ids(101, 116)) == (0, 16)
    r.settle()


# -- the rest ---------------------------------------------------------------------------------------------------------


def test_an_eviction_beside_its_own_path_takes_nothing_from_a_lease() -> None:
    """The sibling that goes leaves a single child, which joins its parent: both are the lease's."""
    r, one = rig(num_pages=6)
    put(r, one, ids(1, 8))
    put(r, one, ids(1, 4) + ids(101, 108))
    lease = acquire(r, one, ids(1, 8) + ids(201, 212))
    assert (lease.matched, len(lease.table)) == (2, 5)
    r.settle()


def test_a_policy_that_there_is_none_of_is_refused() -> None:
    with pytest.raises(ConfigError, match="write_through_selective, write_back"):
        WritePolicy("write_around")


# -- the traces of SGLang's HiRadixCache (0.5.19), page size 2, with our events beside --------------------------------


def test_the_worked_trace_of_write_through() -> None:
    """Ours differ in three places: a commit that revives says so (their 6 says nothing), a load is told when its bytes
    are there (their 7 at submission), and so every removal has its store (their 8 removes what was not announced)."""
    r, one = rig(page_size=2, num_pages=8, host_pages=8, hash_name="sha256")
    A, B, C, D = (  # noqa: N806
        3817746824117602890,
        -4216701448867210342,
        5371148316746243504,
        -1109091013351789073,
    )
    put(r, one, [1, 2, 3, 4], ack=False)
    assert brief(new_events(r))[1:] == [("Stored", "GPU", [A, B], None)]
    put(r, one, ids(1, 6), ack=False)
    assert brief(new_events(r)) == [("Stored", "GPU", [C], B)]
    put(r, one, [1, 2, 9, 9], ack=False)
    assert brief(new_events(r)) == [("Stored", "GPU", [D], A)]
    assert r.index.pools[DEVICE].locked == 4
    r.copies_done()
    assert brief(new_events(r)) == [("Stored", "CPU_PINNED", [A, B, C], None), ("Stored", "CPU_PINNED", [D], A)]
    assert r.index.pools[DEVICE].locked == 0
    evict(r, one, 4)
    assert brief(new_events(r)) == [("Removed", "GPU", [B, C, D, A])]  # B and C are one node by now
    assert r.peek(ids(1, 6)) == (0, 6)
    lease = acquire(r, one, [1, 2, 3, 4])
    assert lease.matched == 2  # loaded, not computed
    assert brief(new_events(r)) == []
    r.copies_done()
    r.release(one, lease)
    assert brief(new_events(r)) == [("Stored", "GPU", [A, B], None)]
    lease = acquire(r, one, ids(1, 6))
    assert brief(new_events(r)) == []
    r.copies_done()
    r.release(one, lease)
    assert brief(new_events(r)) == [("Stored", "GPU", [C], B)]
    evict(r, one, 3)
    assert brief(new_events(r)) == [("Removed", "GPU", [B, C, A])]
    r.clear(None)
    assert brief(new_events(r)) == [("AllBlocksCleared", None, None)]


def test_what_leaves_after_a_copy_that_came_to_nothing_is_what_was_sent_whatever_it_was_joined_with() -> None:
    """Two leaves are demoted, and the second hangs on the copy of the first. That fails, the first goes, and what is
    left of the branch becomes one node while the second's copy is still under way."""
    back = WritePolicy("write_back")
    index = Index(IndexConfig(page_size=1, num_pages=4, host_pages=8, write_policy=back))
    session = index.open_session()
    for ticket, tokens in ((1, ids(1, 3)), (3, [1, 2, 4])):
        grant = index.acquire(session, ticket, pack(tokens))
        assert isinstance(grant, Grant)
        index.commit(session, ticket, grant.lease, ticket)
        index.release(session, ticket + 1, grant.lease, ticket + 1)
        index.event_done(session, ticket)
        index.event_done(session, ticket + 1)
    index.drain()
    assert index.acquire(session, 5, pack(ids(50, 51))) is None
    first, second = [effect for effect in index.drain() if isinstance(effect, Copy)]
    index.copy_done(first.ticket, ok=False)
    assert invariants.check(index) == []
    index.copy_done(second.ticket)
    while index.step():
        pass
    assert invariants.check(index) == []
    (wake,) = [effect for effect in index.drain() if isinstance(effect, Wake)]
    assert isinstance(wake.result, Grant)
    assert index.peek(pack([1, 2, 4])).matched_tokens == 2, "the page that was sent has left, and no other"
