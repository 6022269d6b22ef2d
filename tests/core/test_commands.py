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


# -- waiting for copies of ours ----------------------------------------------------------------------------------


def commit_and_release(r: Rig, runner: Runner, tokens: list[int]) -> None:
    lease = lease_of(r, runner, tokens)
    r.commit(runner, lease)
    r.release(runner, lease)


def answers(r: Rig, kind: type[Any]) -> list[Any]:
    return [wake.result for wake in r.wakes if isinstance(wake.result, kind)]


def test_who_is_locked_out_by_our_own_copy_waits_for_its_end() -> None:
    r, runner = rig(num_pages=8, host_pages=16)
    commit_and_release(r, runner, list(range(24)))
    assert r.acquire(runner, [1] * 32) is None
    assert not r.step(), "there is nothing to do but wait"
    assert r.index.stats().num_waiting == 1
    r.copies_done()
    assert r.index.busy
    r.steps()
    (grant,) = answers(r, Grant)
    assert len(grant.slots) // 4 == 8
    r.settle()


def test_what_runners_lock_is_not_waited_for() -> None:
    r, runner = rig(num_pages=8, host_pages=16)
    held = lease_of(r, runner, list(range(24)))
    r.commit(runner, held)
    assert isinstance(r.acquire(runner, [1] * 12), NoSpace), "the lease holds it, whether the copy ends or not"
    r.release(runner, held)
    assert r.acquire(runner, [1] * 12) is None
    r.settle()


def test_nobody_overtakes_who_waits_for_a_copy_and_no_more_is_promised_than_there_is() -> None:
    r, runner = rig(num_pages=8, host_pages=16)
    commit_and_release(r, runner, list(range(24)))
    assert r.acquire(runner, [1] * 24) is None
    assert r.acquire(runner, [2] * 4) is None, "there is a free page, but somebody waits"
    assert isinstance(r.acquire(runner, [3] * 8), NoSpace)
    assert isinstance(r.acquire(runner, range(24)), LeaseModel), "who needs none waits for nobody"
    r.release(runner, next(lease for lease in runner.session.leases if not lease.waiting))
    r.copies_done()
    r.steps()
    assert [len(grant.slots) // 4 for grant in answers(r, Grant)] == [6, 1]
    r.settle()


def test_who_waits_for_a_copy_is_refused_once_it_is_over_and_there_is_no_room() -> None:
    r, runner = rig(num_pages=8, host_pages=16)
    commit_and_release(r, runner, list(range(24)))
    assert r.acquire(runner, [1] * 24) is None
    assert r.acquire(runner, [2] * 4) is None
    r.pin(runner, pack(range(24)), ROOT, "owner", 9.0)
    assert not r.step()
    r.copies_done()
    r.steps()
    (error,) = answers(r, NoSpace)
    assert (error.need, error.free, error.locked, error.promised) == (6, 2, 6, 1)
    (grant,) = answers(r, Grant)
    assert len(grant.slots) // 4 == 1, "and those behind it go on"
    r.settle()


def test_a_copy_that_fails_ends_too() -> None:
    r, runner = rig(num_pages=8, host_pages=16)
    commit_and_release(r, runner, list(range(24)))
    assert r.acquire(runner, [1] * 32) is None
    r.copy_done(r.in_flight()[0], ok=False)
    r.steps()
    assert len(answers(r, Grant)) == 1
    r.settle()


def test_a_wait_for_a_copy_ends_with_its_session() -> None:
    r, other = rig(num_pages=8, host_pages=16)
    runner = r.open_session()
    commit_and_release(r, other, list(range(24)))
    assert r.acquire(runner, [1] * 24) is None
    assert r.acquire(other, [2] * 4) is None
    r.end_session(runner)
    assert isinstance(r.wakes[-1].result, SessionEnded)
    assert r.index.busy, "those behind it need not wait for the copy"
    r.steps()
    assert len(answers(r, Grant)) == 1
    r.settle()


# -- extends of many leases -----------------------------------------------------------------------------------------


def test_extends_of_a_batch_are_each_for_themselves_in_order() -> None:
    r, runner = rig(num_pages=8)
    leases = [lease_of(r, runner, [n] * 4) for n in range(5)]
    two, one = pack([9] * 8), pack([9] * 4)
    extended = r.extend_all(
        runner,
        [(leases[0], two, 0, None), (leases[1], two, 0, None), (leases[2], one, 0, None), (leases[3], b"", 0, None)],
    )
    assert isinstance(extended, Extended)
    kinds = [len(each) // 4 if isinstance(each, bytes) else type(each) for each in extended.results]
    assert kinds == [2, NoSpace, 1, 0], "the second finds one page left, and the third does with that"
    error = extended.results[1]
    assert isinstance(error, NoSpace)
    assert (error.need, error.free, error.promised) == (2, 3, 2)
    assert [len(lease.tokens) // 4 for lease in leases] == [12, 4, 8, 4, 4]
    r.settle()


def test_a_lease_is_extended_once_by_a_command() -> None:
    r, runner = rig()
    lease = lease_of(r, runner, [1] * 4)
    extended = r.extend_all(runner, [(lease, pack([2] * 4), 0, None), (lease, pack([3] * 4), 0, None)])
    assert isinstance(extended, Extended)
    assert [type(each) for each in extended.results] == [bytes, BadRequest]
    assert "stands twice in one extend; give all its tokens in one item" in str(extended.results[1])
    assert isinstance(r.extend(runner, lease, [3] * 4), bytes)
    r.settle()


def test_of_a_batch_that_waits_those_are_refused_that_do_not_fit_in_the_end() -> None:
    r, runner = rig(num_pages=10, host_pages=16)
    leases = [lease_of(r, runner, [n] * 4) for n in range(3)]
    commit_and_release(r, runner, list(range(100, 124)))
    assert r.extend_all(runner, [(lease, pack([9] * 4 * n), 0, None) for n, lease in enumerate(leases, 1)]) is None
    r.pin(runner, pack(range(100, 120)), ROOT, "owner", 9.0)
    r.copies_done()
    r.steps()
    (extended,) = answers(r, Extended)
    assert [type(each) for each in extended.results] == [bytes, NoSpace, NoSpace]
    assert isinstance(r.extend(runner, leases[1], [9] * 4), bytes), "it was left as it was"
    r.settle()


def test_a_batch_that_waits_goes_on_without_what_was_released() -> None:
    r, runner = rig(num_pages=8, host_pages=16)
    one, other = lease_of(r, runner, [1] * 4), lease_of(r, runner, [2] * 4)
    commit_and_release(r, runner, list(range(100, 124)))
    assert r.extend_all(runner, [(one, pack([9] * 8), 0, None), (other, pack([9] * 8), 0, None)]) is None
    r.release(runner, one)
    assert answers(r, Extended) == []
    r.copies_done()
    r.steps()
    (extended,) = answers(r, Extended)
    assert [type(each) for each in extended.results] == [Changed, bytes]
    r.settle()


# -- matches that were agreed on, pages for a part, and back at once -------------------------------------------------


def test_an_exact_match_or_none() -> None:
    r, runner = rig(num_pages=32)
    commit_and_release(r, runner, list(range(24)))
    assert lease_of(r, runner, list(range(24)), exact=16).matched == 4, "no more than was agreed on"
    changed = r.acquire(runner, range(32), exact=28)
    assert isinstance(changed, Changed)
    assert (changed.exact, changed.matched_tokens) == (28, 24)
    assert lease_of(r, runner, list(range(32)), exact=24).matched == 6
    assert lease_of(r, runner, list(range(32)), exact=0).matched == 0
    r.settle()


@pytest.mark.parametrize("host_pages", [0, 64])
def test_a_prompt_larger_than_the_pool_is_computed_chunk_by_chunk_until_there_is_no_room(host_pages: int) -> None:
    r, runner = rig(num_pages=16, host_pages=host_pages)
    prompt = list(range(100_000))
    commit_and_release(r, runner, prompt[:10])
    lease = lease_of(r, runner, prompt, room=8)
    assert (lease.matched, len(lease.table)) == (2, 4)
    upto = 16
    while True:
        r.copies_done()
        r.commit(runner, lease)
        assert r.peek(prompt) == (upto, upto)
        beyond = r.turn(lambda: r.index.commit(runner.id, 1, LeaseId(lease.number), 99, tokens=upto + 1))  # noqa: B023
        assert isinstance(beyond, BadRequest)
        assert beyond.room == upto
        extended = r.extend(runner, lease, b"", upto=upto + 12)
        if isinstance(extended, NoSpace):
            break
        upto += 12
    assert upto == 64
    r.release(runner, lease)
    assert r.peek(prompt) == (64, 64), "what was computed is a hit later"
    r.settle()


def test_an_extend_takes_no_page_away() -> None:
    r, runner = rig()
    lease = lease_of(r, runner, list(range(40)), room=20)
    assert r.extend(runner, lease, b"", upto=4) == b""
    assert r.extend(runner, lease, b"", upto=1000) != b""
    assert len(lease.table) == 10
    r.settle()


def test_what_nobody_was_told_of_is_given_back_at_once() -> None:
    """With commits of others before it that wait for their events, and for nobody's."""
    r, runner = rig(num_pages=8)
    busy = lease_of(r, runner, [1] * 16)
    item = r.commit(runner, busy, done=False)
    fresh = lease_of(r, runner, [2] * 16)
    assert r.cancel(runner, fresh) is True
    lease_of(r, runner, [3] * 16)
    used = r.turn(lambda: r.index.cancel(runner.id, 99, LeaseId(busy.number)))
    assert isinstance(used, BadRequest), "its workers were told of a ticket"
    r.event_done(runner, item, 0)
    r.settle()


def test_a_cancel_waits_for_what_is_being_loaded() -> None:
    r, runner = rig(num_pages=8, host_pages=16)
    for first in (0, 100):
        lease = lease_of(r, runner, list(range(first, first + 32)))
        r.commit(runner, lease)
        r.copies_done()
        r.release(runner, lease)
    lease = lease_of(r, runner, list(range(32)))
    assert r.cancel(runner, lease) is False
    assert isinstance(r.turn(lambda: r.index.cancel(runner.id, 99, LeaseId(lease.number))), UnknownLease)
    r.copies_done()
    assert lease.over
    assert r.peek(range(32)) == (32, 32), "what was loaded stays"
    r.settle()


def journey(done: int | None, heard: bool) -> tuple[list[Any], Any]:
    """Acquire, commit and release, each with its event done: what left, and what is there then."""
    index = Index(IndexConfig(page_size=4, num_pages=16))
    session = index.open_session()
    left: list[Any] = []

    def finish(ticket: int) -> None:
        if done is None:
            index.event_done(session, ticket)
        left.extend(index.drain(0.0))

    grant = index.acquire(session, 1, pack(range(9)))
    assert grant is not None
    index.commit(session, 2, grant.lease, 1, done=done)
    finish(1)
    index.release(session, 3 if heard else None, grant.lease, 2, done=done)
    finish(2)
    return left, (index.stats(), index.sessions[session].events, index.sessions[session].last_done)


def test_an_event_may_be_done_with_its_command() -> None:
    assert journey(0, heard=True) == journey(None, heard=True)


def test_who_asks_for_no_answer_to_a_release_has_none() -> None:
    heard, unheard = journey(None, heard=True), journey(None, heard=False)
    assert [type(effect).__name__ for effect in heard[0][len(unheard[0]) :]] == ["Wake"]
    assert unheard[0] == heard[0][:-1]
    assert unheard[1] == heard[1]
