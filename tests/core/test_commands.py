"""Commands that are wrong, late or doubled get a typed error and change nothing; waiting for room; early events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sglcache.core import index as index_module
from sglcache.core.effects import Extended, Grant
from sglcache.core.index import Index, IndexConfig
from sglcache.core.key import ROOT, pack
from sglcache.errors import BadRequest, Changed, NoSpace, SessionEnded, SglcacheError, UnknownLease, UnknownSession
from sglcache.testing.model import LeaseModel
from sglcache.testing.rig import Rig, Runner
from sglcache.units import LeaseId, SessionId, Tier
from sglcache.wire.control import Extension


def rig(**config: Any) -> tuple[Rig, Runner]:
    made = Rig(**{"page_size": 4, "num_pages": 16, **config})
    return made, made.open_session()


def lease_of(r: Rig, runner: Runner, tokens: list[int], **options: Any) -> LeaseModel:
    lease = r.acquire(runner, tokens, **options)
    assert isinstance(lease, LeaseModel), repr(lease)
    return lease


ONE = pack([1])


def extend_one(index: Index, session: SessionId, lease: LeaseId, tokens: bytes, *more: int) -> None:
    """One lease; what is its result if it is an error is raised here."""
    extended = index.extend(session, 1, [Extension(lease, tokens, *more)])
    if extended is not None and isinstance(error := extended.results[0], SglcacheError):
        raise error


WRONG: dict[str, tuple[type[SglcacheError], Callable[[Index, SessionId, LeaseId], object]]] = {
    "acquire of nothing": (BadRequest, lambda i, s, _: i.acquire(s, 1, b"")),
    "acquire of part of a token": (BadRequest, lambda i, s, _: i.acquire(s, 1, b"\1\0\0")),
    "negative reserve": (BadRequest, lambda i, s, _: i.acquire(s, 1, ONE, reserve=-1)),
    "negative limit": (BadRequest, lambda i, s, _: i.acquire(s, 1, ONE, limit=-1)),
    "unknown session": (UnknownSession, lambda i, _s, _: i.acquire(SessionId(999), 1, ONE)),
    "unknown lease": (UnknownLease, lambda i, s, _: extend_one(i, s, LeaseId(999), ONE)),
    "extend by part of a token": (BadRequest, lambda i, s, lease: extend_one(i, s, lease, b"\1")),
    "extend with negative reserve": (BadRequest, lambda i, s, lease: extend_one(i, s, lease, ONE, -1)),
    "commit of more than there is": (BadRequest, lambda i, s, lease: i.commit(s, 1, lease, 50, tokens=99)),
    "commit of less than nothing": (BadRequest, lambda i, s, lease: i.commit(s, 1, lease, 50, tokens=-1)),
    "a ticket twice": (BadRequest, lambda i, s, lease: i.commit(s, 1, lease, 1)),
    "a release with an old ticket": (BadRequest, lambda i, s, lease: i.release(s, 1, lease, 0)),
    "a shard that is none": (BadRequest, lambda i, s, _: i.event_done(s, 5, 7)),
    "a negative shard": (BadRequest, lambda i, s, _: i.event_done(s, 5, -1)),
    "a dead shard that is none": (BadRequest, lambda i, s, _: i.shard_gone(s, 7)),
    "pin of part of a token": (BadRequest, lambda i, s, _: i.pin(s, b"\1", ROOT, "me", 1.0)),
    "pin of an unknown session": (UnknownSession, lambda i, _s, _: i.pin(SessionId(999), ONE, ROOT, "me", 1.0)),
    "peek at part of a token": (BadRequest, lambda i, _s, _: i.peek(b"\1")),
    "more than the pool": (NoSpace, lambda i, s, _: i.acquire(s, 1, pack([3] * 400))),
    "more reserve than the pool": (NoSpace, lambda i, s, _: i.acquire(s, 1, ONE, reserve=400)),
    "extension beyond the pool": (NoSpace, lambda i, s, lease: extend_one(i, s, lease, pack([3] * 400))),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_command_changes_nothing(name: str) -> None:
    r, runner = rig()
    lease = lease_of(r, runner, list(range(12)))
    r.commit(runner, lease)
    kind, command = WRONG[name]
    result = r.turn(lambda: command(r.index, runner.id, LeaseId(lease.number)))  # and that nothing changed
    assert type(result) is kind
    r.commit(runner, lease)
    r.release(runner, lease)
    r.settle()


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_a_tier_that_is_none_is_not_cleared(tier: Tier) -> None:
    r, _ = rig()
    assert isinstance(r.turn(lambda: r.index.clear(tier)), BadRequest)


def test_no_space_tells_the_numbers() -> None:
    r, runner = rig()
    lease = lease_of(r, runner, list(range(32)))
    r.commit(runner, lease)
    lease_of(r, runner, [9] * 12)
    with pytest.raises(NoSpace) as caught:
        r.index.acquire(runner.id, 1, pack([8] * 24))
    e = caught.value
    assert (e.tier, e.need, e.free, e.cached, e.locked) == ("DEVICE", 6, 5, 8, 8)


def test_a_doubled_or_late_release_harms_nobody() -> None:
    r, runner = rig()
    lease = lease_of(r, runner, list(range(12)))
    r.release(runner, lease, done=False)
    again = r.turn(lambda: r.index.release(runner.id, 99, LeaseId(lease.number), 50))
    assert isinstance(again, UnknownLease)
    assert isinstance(r.turn(lambda: extend_one(r.index, runner.id, LeaseId(lease.number), ONE)), UnknownLease)
    r.events_done(runner)
    assert r.index.stats().pools[0].free == 16
    assert isinstance(r.turn(lambda: r.index.release(runner.id, 99, LeaseId(lease.number), 51)), UnknownLease)


def test_events_may_come_before_their_commands_but_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "MAX_EVENTS_AHEAD", 4)
    r, runner = rig()
    for ticket in range(1000, 1004):
        r.index.event_done(runner.id, ticket)
    assert isinstance(r.turn(lambda: r.index.event_done(runner.id, 1004)), BadRequest)
    r.index.event_done(runner.id, 1003)  # again: no news


def test_a_commit_of_two_shards_waits_for_both() -> None:
    r, _ = rig()
    runner = r.open_session(2)
    lease = lease_of(r, runner, list(range(8)))
    item = r.commit(runner, lease, done=False)
    r.event_done(runner, item, 1)
    assert r.peek(range(8)) == (0, 0)
    r.event_done(runner, item, 0)
    assert r.peek(range(8)) == (8, 8)


def test_commits_take_effect_in_the_order_of_their_session() -> None:
    r, one = rig()
    two = r.open_session()
    first, second = lease_of(r, one, [1] * 8), lease_of(r, one, [2] * 8)
    other = lease_of(r, two, [3] * 8)
    a, b = r.commit(one, first, done=False), r.commit(one, second, done=False)
    c = r.commit(two, other, done=False)
    r.event_done(one, b, 0)
    assert r.peek([2] * 8) == (0, 0)
    r.event_done(two, c, 0)
    assert r.peek([3] * 8) == (8, 8), "another session's does not wait"
    r.event_done(one, a, 0)
    assert r.peek([1] * 8) == r.peek([2] * 8) == (8, 8)


# -- waiting for room: one node is evicted in a slice ----------------------------------------------------------


def crowd(r: Rig, runner: Runner) -> None:
    """Fill the pool with nodes of one page."""
    for first in range(16):
        lease = lease_of(r, runner, [100 + first] * 4)
        r.commit(runner, lease)
        r.release(runner, lease)


def test_an_acquire_that_needs_much_room_waits_and_is_answered() -> None:
    r, runner = rig(evict_slice=2)
    crowd(r, runner)
    assert r.acquire(runner, [1] * 40) is None
    assert r.acquire(runner, [2] * 20) is None, "whoever comes later waits behind it"
    assert isinstance(r.acquire(runner, [3] * 8), NoSpace), "what is promised is not given twice"
    assert r.peek([100] * 4) == (0, 0)
    slices = 1
    while r.step():
        slices += 1
    grants = [wake.result for wake in r.wakes if isinstance(wake.result, Grant)]
    assert [len(grant.slots) // 4 for grant in grants] == [10, 5]
    assert slices >= 6
    r.settle()


def test_what_an_acquire_matched_stays_while_it_waits() -> None:
    r, runner = rig(evict_slice=1)
    crowd(r, runner)
    assert r.acquire(runner, [100] * 4 + [1] * 32) is None
    r.steps()
    (grant,) = [wake.result for wake in r.wakes if isinstance(wake.result, Grant)]
    assert grant.matched_tokens == 4
    r.settle()


def test_an_extend_waits_and_is_answered() -> None:
    r, runner = rig(evict_slice=1)
    lease = lease_of(r, runner, [1] * 4)
    for first in range(15):
        each = lease_of(r, runner, [100 + first] * 4)
        r.commit(runner, each)
        r.release(runner, each)
    assert r.extend(runner, lease, [2] * 20) is None
    refused = r.turn(lambda: extend_one(r.index, runner.id, LeaseId(lease.number), ONE))
    assert isinstance(refused, BadRequest), "one at a time"
    r.commit(runner, lease)
    r.steps()
    assert len(lease.table) == 6
    r.commit(runner, lease)
    r.release(runner, lease)
    r.settle()


def test_a_release_overtakes_an_extend_that_waits() -> None:
    r, runner = rig(evict_slice=1)
    lease = lease_of(r, runner, [1] * 4)
    for first in range(15):
        each = lease_of(r, runner, [100 + first] * 4)
        r.commit(runner, each)
        r.release(runner, each)
    assert r.extend(runner, lease, [2] * 20) is None
    r.release(runner, lease)
    assert [type(wake.result) for wake in r.wakes[-2:]] != [Grant, Grant]
    (extended,) = [wake.result for wake in r.wakes if isinstance(wake.result, Extended)]
    assert isinstance(extended.results[0], Changed)
    r.settle()


@pytest.mark.parametrize("extend", [True, False])
def test_the_end_of_a_session_answers_those_who_wait(extend: bool) -> None:
    r, other = rig(evict_slice=1)
    runner = r.open_session()
    lease = lease_of(r, runner, [1] * 4)
    for first in range(15):
        each = lease_of(r, other, [100 + first] * 4)
        r.commit(other, each)
        r.release(other, each)
    waits = r.extend(runner, lease, [2] * 20) if extend else r.acquire(runner, [100] * 4 + [2] * 20)
    assert waits is None
    r.end_session(runner)
    assert isinstance(r.wakes[-1].result, SessionEnded)
    assert r.index.stats().num_waiting == 0
    r.shard_gone(runner, 0)
    r.settle()


def test_whoever_waits_may_be_refused_in_the_end() -> None:
    """What it counted on was locked meanwhile."""
    r, runner = rig(evict_slice=1)
    crowd(r, runner)
    assert r.acquire(runner, [1] * 60) is None
    for first in range(4, 16):
        r.pin(runner, pack([100 + first] * 4), ROOT, "owner", 9.0)
    r.steps()
    assert isinstance(r.wakes[-1].result, NoSpace)
    assert r.index.stats().num_leases == 0
    r.settle()


def test_events_of_refused_commands_are_forgotten() -> None:
    """Workers record a ticket whether or not its command was refused; a long session must not fill up with these."""
    index = Index(IndexConfig(page_size=1, num_pages=8, events=False))
    session = index.open_session()
    grant = index.acquire(session, 1, pack([1, 2, 3]))
    assert grant is not None
    for ticket in range(1, 2000, 2):
        with pytest.raises(BadRequest):
            index.commit(session, 2, grant.lease, ticket, tokens=99)
        index.event_done(session, ticket)
        index.commit(session, 3, grant.lease, ticket + 1)
        index.event_done(session, ticket + 1)
    assert len(index.sessions[session].events) <= 257
