"""Waiting in line for room that others lock: whose turn it is, who may not overtake, deadlines, bounds, withdrawal."""

from __future__ import annotations

from typing import Any

import pytest

from sglcache.core.effects import Extended, Grant, Wake
from sglcache.core.index import Index, IndexConfig
from sglcache.core.key import ROOT, pack
from sglcache.core.line import Patience
from sglcache.core.resources import Companion, SlidingWindow
from sglcache.core.tenants import Limits
from sglcache.core.tiering import WritePolicy
from sglcache.errors import Busy, Cancelled, Changed, NoSpace, SessionEnded, SglcacheError
from sglcache.testing.model import LeaseModel
from sglcache.testing.rig import Rig, Runner
from sglcache.units import SessionId, Tier
from sglcache.wire.control import Extension

P = 4
FOR_EVER = float("inf")


def rig(num_pages: int = 10, **config: Any) -> Rig:
    return Rig(page_size=P, num_pages=num_pages, waits=True, **config)


def prompt(number: int, num_pages: int) -> range:
    return range(1000 * number, 1000 * number + P * num_pages)


def take(r: Rig, runner: Runner, number: int, num_pages: int, **options: Any) -> LeaseModel:
    lease = r.acquire(runner, prompt(number, num_pages), **options)
    assert isinstance(lease, LeaseModel), repr(lease)
    return lease


def wait(r: Rig, runner: Runner, number: int, num_pages: int, until: float = FOR_EVER) -> int:
    """An acquire that stands in line; its request."""
    assert r.acquire(runner, prompt(number, num_pages), wait=until) is None
    return r.next_request


def grow(r: Rig, runner: Runner, lease: LeaseModel, num_pages: int, until: float = FOR_EVER) -> int:
    assert r.extend_all(runner, [(lease, b"", num_pages * P, None)], wait=until) is None
    return r.next_request


def served(r: Rig, since: int = 0) -> list[int]:
    """Requests that were granted, in order, of those answered since."""
    return [wake.request for wake in r.wakes[since:] if isinstance(wake.result, Grant | Extended)]


def refusal(r: Rig, request: int) -> SglcacheError:
    (result,) = [wake.result for wake in r.wakes if wake.request == request]
    assert isinstance(result, SglcacheError), f"{result!r}"
    return result


def test_sessions_take_turns_and_each_in_its_order() -> None:
    r = rig()
    one, two, three = (r.open_session() for _ in range(3))
    held = [take(r, one, number, 1) for number in range(10)]
    first = [wait(r, one, 100 + n, 1) for n in range(3)]
    second = [wait(r, two, 200 + n, 1) for n in range(2)]
    third = [wait(r, three, 300, 1)]
    for lease in held:
        r.release(one, lease)
        r.steps()
    assert served(r) == [first[0], second[0], third[0], first[1], second[1], first[2]]
    r.settle()


def test_a_large_one_at_the_head_is_not_starved_by_small_ones() -> None:
    r = rig()
    one, two = r.open_session(), r.open_session()
    held = [take(r, one, number, 1) for number in range(10)]
    large = wait(r, two, 50, 8)
    for round_, lease in enumerate(held[:8]):
        small = r.acquire(one, prompt(60 + round_, 1))
        assert isinstance(small, NoSpace), "there may be room for it, but it would overtake"
        assert small.waiting == 1
        r.release(one, lease)
        r.steps()
    assert served(r) == [large]
    r.settle()


def test_what_needs_no_room_is_not_held_up() -> None:
    r = rig()
    one, two = r.open_session(), r.open_session()
    lease = take(r, one, 1, 2)
    r.commit(one, lease)
    take(r, one, 2, 8)
    wait(r, two, 3, 4)
    assert isinstance(r.acquire(two, list(prompt(1, 2))), LeaseModel), "all of it is cached"
    r.settle()


def test_an_extend_goes_before_the_acquires_that_wait_for_its_lease() -> None:
    r = rig()
    one, two = r.open_session(), r.open_session()
    growing = take(r, one, 1, 4)
    other = take(r, one, 2, 6)
    waits = wait(r, two, 3, 8)
    asked = grow(r, one, growing, 2)
    r.release(one, other)
    r.steps()
    assert served(r) == [asked]
    r.release(one, growing)
    r.steps()
    assert served(r) == [asked, waits]
    r.settle()


def test_an_extend_does_not_overtake_an_extend() -> None:
    r = rig()
    one, two = r.open_session(), r.open_session()
    mine, others = take(r, one, 1, 4), take(r, two, 2, 5)
    asked = grow(r, one, mine, 3)
    refused = r.extend(two, others, b"", reserve=P)
    assert isinstance(refused, NoSpace), "there is a page, and another waits for more"
    assert isinstance(r.extend(two, others, b""), bytes)
    r.release(two, others)
    r.steps()
    assert served(r) == [asked]
    r.settle()


def test_a_deadline_refuses_with_the_numbers_as_of_then() -> None:
    r = rig()
    one, two = r.open_session(), r.open_session()
    r.expire(5.0)
    take(r, one, 1, 10)
    early, late = wait(r, two, 2, 4, until=7.0), wait(r, two, 3, 4, until=9.0)
    assert r.index.next_expiry == 7.0
    assert r.index.oldest_wait == 5.0
    r.expire(6.5)
    assert len(r.line) == 2
    r.expire(7.25)
    error = refusal(r, early)
    assert isinstance(error, NoSpace)
    assert (error.waited_s, error.place, error.waiting, error.need, error.leased) == (2.25, 1, 1, 4, 10)
    assert error.holders == [{"session": one.id, "leases": 1, "pages": 10, "pinned_pages": 0, "ended": False}]
    assert "it waited 2.25 s" in error.message
    r.expire(9.0)
    assert isinstance(refusal(r, late), NoSpace)
    r.settle()


def test_the_first_has_a_last_try_at_its_deadline() -> None:
    r = rig()
    one, two = r.open_session(), r.open_session()
    lease = take(r, one, 1, 10)
    waits = wait(r, two, 2, 4, until=1.0)
    r.release(one, lease)
    r.expire(1.0)
    assert served(r) == [waits]
    r.settle()


def test_at_their_deadline_extends_take_what_there_is_if_it_is_their_turn() -> None:
    r = rig()
    one, two = r.open_session(), r.open_session()
    leases = [take(r, one, n, 2) for n in range(3)]
    others = take(r, two, 9, 2)
    assert r.extend_all(one, [(lease, b"", P, None) for lease in leases], wait=3.0) is None
    behind = grow(r, two, others, 1, until=3.0)
    r.expire(3.0)
    mine, second = (wake.result for wake in r.wakes[-2:])
    assert isinstance(mine, Extended)
    assert [isinstance(each, bytes) for each in mine.results] == [True, True, False]
    assert isinstance(second, Extended)
    assert r.wakes[-1].request == behind
    assert isinstance(second.results[0], NoSpace)
    r.settle()


def test_an_extend_out_of_turn_takes_nothing_at_its_deadline() -> None:
    r = rig()
    one, two = r.open_session(), r.open_session()
    mine, others = take(r, one, 1, 4), take(r, two, 2, 5)
    grow(r, one, mine, 3)
    grow(r, two, others, 1, until=3.0)
    r.expire(3.0)
    assert len(r.line) == 1
    r.settle()


def test_what_there_never_is_is_refused_at_once() -> None:
    r = rig()
    one = r.open_session()
    lease = take(r, one, 1, 6)
    assert isinstance(r.acquire(one, prompt(2, 11), wait=FOR_EVER), NoSpace)
    assert isinstance(r.extend_all(one, [(lease, b"", 5 * P, None)], wait=FOR_EVER), Extended)
    assert not len(r.line)
    wait(r, one, 3, 10)
    r.settle()


def test_a_bounded_number_may_wait_and_what_is_beyond_is_busy() -> None:
    r = rig(max_waiting=3, max_waiting_of_session=2)
    one, two, three = (r.open_session() for _ in range(3))
    lease = take(r, one, 1, 10)
    wait(r, one, 2, 1)
    wait(r, one, 3, 1)
    mine = r.acquire(one, prompt(4, 1), wait=FOR_EVER)
    assert isinstance(mine, Busy)
    assert (mine.waiting, mine.waiting_of_session, mine.max_waiting_of_session) == (2, 2, 2)
    wait(r, two, 5, 1)
    assert isinstance(r.acquire(three, prompt(6, 1), wait=FOR_EVER), Busy)
    assert isinstance(r.extend_all(one, [(lease, b"", 0, None)], wait=FOR_EVER), Extended), "of nothing there is enough"
    full = r.turn(lambda: r.index.extend(one.id, 99, [], Patience(0.0, FOR_EVER)))
    assert isinstance(full, Extended)
    r.settle()


def test_extends_that_find_the_line_full_can_be_sent_again() -> None:
    r = rig(max_waiting=1)
    one, two = r.open_session(), r.open_session()
    mine, others = take(r, one, 1, 5), take(r, two, 2, 5)
    grow(r, one, mine, 1)
    assert isinstance(r.extend_all(two, [(others, b"", P, None)], wait=FOR_EVER), Busy)
    r.release(one, mine)
    r.steps()
    assert isinstance(r.extend(two, others, b"", reserve=P), bytes)
    r.settle()


def test_who_is_withdrawn_waits_no_longer_wherever_it_waits() -> None:
    r = rig()
    one, two = r.open_session(), r.open_session()
    mine = take(r, one, 1, 10)
    acquire = wait(r, two, 2, 1)
    assert r.withdraw(two, acquire)
    assert isinstance(refusal(r, acquire), Cancelled)
    assert not r.withdraw(two, acquire), "once"
    other = wait(r, two, 3, 1)
    assert r.turn(lambda: r.index.withdraw(one.id, other)) is False, "it is another's"
    r.release(one, mine)
    r.settle()


def test_a_lease_can_be_extended_again_when_its_extend_was_withdrawn() -> None:
    r = rig()
    one = r.open_session()
    mine, others = take(r, one, 1, 5), take(r, one, 2, 5)
    asked = grow(r, one, mine, 1)
    assert r.withdraw(one, asked)
    r.release(one, others)
    r.steps()
    assert isinstance(r.extend(one, mine, b"", reserve=P), bytes)
    r.settle()


def test_a_release_overtakes_its_leases_extend_and_who_is_next_goes_on() -> None:
    r = rig()
    one, two = r.open_session(), r.open_session()
    mine, others = take(r, one, 1, 5), take(r, two, 2, 5)
    asked, behind = grow(r, one, mine, 2), grow(r, two, others, 1)
    r.release(one, mine)
    r.steps()
    (result,) = [wake.result for wake in r.wakes if wake.request == asked]
    assert isinstance(result, Extended)
    assert isinstance(result.results[0], Changed)
    assert served(r)[-1] == behind
    r.settle()


def test_a_sessions_end_takes_it_out_of_line() -> None:
    r = rig()
    one, two, three = (r.open_session() for _ in range(3))
    held = take(r, one, 1, 10)
    dead, alive = wait(r, two, 2, 10), wait(r, three, 3, 10)
    r.die(two)
    assert isinstance(refusal(r, dead), SessionEnded)
    r.release(one, held)
    r.steps()
    assert served(r) == [alive]
    r.settle()


def test_all_who_hold_pages_may_wait_for_more_and_their_deadlines_end_it() -> None:
    r = rig()
    one, two = r.open_session(), r.open_session()
    mine, others = take(r, one, 1, 5), take(r, two, 2, 5)
    grow(r, one, mine, 1, until=4.0)
    grow(r, two, others, 1, until=5.0)
    r.steps()
    assert len(r.line) == 2
    assert r.index.stats().num_waiting == 2
    r.expire(4.0)
    r.release(one, mine)
    r.steps()
    assert not len(r.line)
    r.settle()


# -- copies that do not end -------------------------------------------------------------------------------------


def copying(r: Rig, runner: Runner) -> None:
    """Half of the pool is locked by a copy to the host alone, the other half leased."""
    lease = take(r, runner, 1, 5)
    r.commit(runner, lease)
    r.release(runner, lease)
    assert r.in_flight()
    take(r, runner, 2, 5)


def test_who_waits_for_a_copy_that_does_not_end_is_refused_and_the_next_is_at_once() -> None:
    r = rig(host_pages=16)
    one = r.open_session()
    copying(r, one)
    assert r.acquire(one, prompt(3, 2), copies=2.0) is None
    waits = r.next_request
    r.steps()
    r.expire(1.0)
    assert len(r.waiting) == 1
    r.expire(2.0)
    error = refusal(r, waits)
    assert isinstance(error, NoSpace)
    assert error.in_copies == 5
    assert error.copy == r.in_flight()[0].ticket
    at_once = r.acquire(one, prompt(3, 2), copies=9.0)
    assert isinstance(at_once, NoSpace), "nobody else waits for it"
    assert at_once.copy == error.copy
    assert "does not end" in at_once.message
    r.copies_done()
    take(r, one, 3, 2)
    r.settle()


def test_a_copy_that_does_not_end_holds_up_who_needs_its_room_and_nobody_else() -> None:
    r = rig(num_pages=12, host_pages=16)
    one, two = r.open_session(), r.open_session()
    copying(r, one)
    assert r.acquire(one, prompt(3, 4), copies=1.0) is None
    r.expire(1.0)
    for number in range(4, 10):
        lease = take(r, two, number, 2)
        r.release(two, lease, discard=True)
    r.copies_done()
    r.settle()


def test_under_write_back_a_copy_that_does_not_end_is_no_reason_to_wait_for_ever() -> None:
    r = rig(host_pages=16, write_policy=WritePolicy("write_back"))
    one = r.open_session()
    lease = take(r, one, 1, 10)
    r.commit(one, lease)
    r.release(one, lease)
    assert r.acquire(one, prompt(2, 4), copies=1.0) is None
    waits = r.next_request
    r.steps()
    r.expire(1.0)
    assert isinstance(refusal(r, waits), NoSpace)
    r.copies_done()
    r.settle()


# -- pins ---------------------------------------------------------------------------------------------------------


def test_pins_may_keep_a_part_of_each_tier_and_no_more() -> None:
    r = rig(host_pages=10, max_pinned_fraction=0.5, max_pins=3)
    one = r.open_session()
    for number in (1, 2, 3):
        lease = take(r, one, number, 3)
        r.commit(one, lease)
        r.release(one, lease)
        r.copies_done()
    assert r.pin(one, prompt(1, 3), ROOT, "a", 9.0) == 3 * P
    assert r.pin(one, prompt(1, 3), ROOT, "b", 9.0) == 3 * P, "the same pages are pinned once"
    refused = r.turn(lambda: r.index.pin(one.id, pack(prompt(2, 3)), ROOT, "a", 9.0))
    assert isinstance(refused, NoSpace)
    assert (refused.need, refused.pinned, refused.max_pinned, refused.tier) == (3, 3, 5, "DEVICE")
    assert r.pin(one, prompt(2, 2), ROOT, "c", 9.0) == 2 * P
    busy = r.turn(lambda: r.index.pin(one.id, pack(prompt(1, 1)), ROOT, "d", 9.0))
    assert isinstance(busy, Busy)
    assert (busy.pins, busy.max_pins) == (3, 3)
    r.expire(9.0)
    assert r.index.stats().pinned_pages == 0
    r.settle()


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_of_a_tier_of_which_nothing_may_be_pinned_nothing_is(tier: Tier) -> None:
    r = rig(host_pages=10 if tier is Tier.HOST else 0, max_pinned_fraction=0.0)
    one = r.open_session()
    lease = take(r, one, 1, 3)
    r.commit(one, lease)
    refused = r.turn(lambda: r.index.pin(one.id, pack(prompt(1, 3)), ROOT, "a", 9.0))
    assert isinstance(refused, NoSpace)
    r.copies_done()
    r.settle()


# -- tenants ------------------------------------------------------------------------------------------------------


def test_a_tenant_at_its_ceiling_holds_up_itself_alone() -> None:
    index = Index(IndexConfig(page_size=P, num_pages=10, events=False, tenants={"a": Limits(device_ceiling=4)}))
    one, two = index.open_session(), index.open_session()
    patience = Patience(0.0, FOR_EVER)

    def ask(session: SessionId, request: int, num_pages: int, **options: Any) -> Grant | None:
        return index.acquire(session, request, pack(prompt(request, num_pages)), **options)

    def answers() -> list[int]:
        while index.step():
            pass
        return [effect.request for effect in index.drain() if isinstance(effect, Wake)]

    held = ask(one, 1, 4, tenant="a")
    assert held is not None
    assert ask(one, 2, 2, tenant="a", patience=patience) is None
    assert answers() == []
    assert ask(two, 3, 3) is not None, "others' room is not what it waits for"
    with pytest.raises(NoSpace):
        ask(two, 4, 1, tenant="a")
    assert ask(two, 5, 5, patience=patience) is None
    assert answers() == []
    with pytest.raises(NoSpace):
        ask(one, 6, 1)
    index.event_done(one, 1)
    index.release(one, 7, held.lease, 1)
    assert answers() == [7, 2, 5]


# -- companions ---------------------------------------------------------------------------------------------------


def test_who_lacks_slots_of_a_companion_alone_waits_in_line_for_them_too() -> None:
    window = Companion(SlidingWindow(2), 6, 0)
    index = Index(IndexConfig(page_size=P, num_pages=20, events=False, companions=(window,)))
    one, two = index.open_session(), index.open_session()
    patience = Patience(0.0, FOR_EVER)
    held = index.acquire(one, 1, pack(prompt(1, 4)))
    assert held is not None
    with pytest.raises(NoSpace) as refused:
        index.acquire(two, 2, pack(prompt(2, 4)))
    assert refused.value.resource == "window"
    assert index.acquire(two, 3, pack(prompt(3, 4)), patience=patience) is None
    assert index.extend(one, 4, [Extension(held.lease, b"", 3 * P)], patience) is None, "before it, and it waits, too"
    assert index.withdraw(one, 4)
    index.event_done(one, 1)
    index.release(one, 5, held.lease, 1)
    while index.step():
        pass
    answers = {effect.request: effect.result for effect in index.drain() if isinstance(effect, Wake)}
    assert isinstance(answers[4], Cancelled)
    granted = answers[3]
    assert isinstance(granted, Grant)
    assert len(granted.slots) == 4 * 4
    assert len(granted.shares[0].slots) == 4 * 4


def overtaken(r: Rig, one: Runner, two: Runner, until: float = FOR_EVER) -> tuple[int, LeaseModel]:
    """An acquire that waits for the end of a copy alone, and a hit that locks what the copy lets go of."""
    lease = take(r, one, 1, 6)
    r.commit(one, lease)
    r.release(one, lease)
    waits = wait(r, two, 3, 8, until)
    assert not len(r.line), "there will be room when the copy is over"
    return waits, take(r, one, 1, 6)


def test_who_waits_for_a_copy_that_others_then_profit_from_goes_to_the_head_of_the_line() -> None:
    """Not refused before its time: there was to be room, and others, who needed none, came to the pages first."""
    r = rig(host_pages=20)
    one, two, three = (r.open_session() for _ in range(3))
    waits, hit = overtaken(r, one, two)
    r.copies_done()
    r.steps()
    assert r.line.first is not None
    assert r.line.first.request == waits
    later = wait(r, three, 4, 1)
    assert r.line.first.request == waits, "it came first"
    r.release(one, hit)
    r.steps()
    r.copies_done()
    r.steps()
    assert served(r)[:1] == [waits]
    assert r.line.find(later) is not None or later in served(r)
    requests = r.index.counters["requests"]
    assert requests == 4 - (r.line.find(later) is not None), "what stood in line is counted once"
    r.settle()


def test_its_deadline_is_that_of_the_line() -> None:
    r = rig(host_pages=20)
    one, two = r.open_session(), r.open_session()
    waits, hit = overtaken(r, one, two, until=5.0)
    r.copies_done()
    r.steps()
    r.expire(4.9)
    assert r.line.find(waits) is not None
    r.expire(5.0)
    assert isinstance(refusal(r, waits), NoSpace)
    r.release(one, hit)
    r.settle()


def test_where_the_line_is_full_it_is_refused() -> None:
    r = rig(host_pages=20, max_waiting=1)
    one, two, three = (r.open_session() for _ in range(3))
    other = take(r, three, 7, 2)
    waits, hit = overtaken(r, one, two)
    wait(r, three, 4, 9)
    r.copies_done()
    r.steps()
    assert isinstance(refusal(r, waits), NoSpace)
    r.release(one, hit)
    r.release(three, other)
    r.settle()


def test_extends_that_wait_for_a_copy_go_to_the_head_of_the_line_together() -> None:
    r = rig(host_pages=20)
    one, two = r.open_session(), r.open_session()
    lease = take(r, one, 1, 6)
    r.commit(one, lease)
    r.release(one, lease)
    growing = take(r, two, 3, 2)
    asked = grow(r, two, growing, 6)
    assert not len(r.line)
    hit = take(r, one, 1, 6)
    r.copies_done()
    r.steps()
    assert r.line.find(asked) is not None
    r.release(one, hit)
    r.steps()
    assert served(r) == [asked]
    r.settle()


def test_who_goes_back_in_line_is_before_those_who_came_to_it_meanwhile() -> None:
    r = rig(host_pages=20)
    one, two, three = (r.open_session() for _ in range(3))
    waits, hit = overtaken(r, one, two)
    later = wait(r, three, 4, 9)
    r.copies_done()
    r.steps()
    assert [each.request for each in r.line.everyone] == [waits, later]
    r.release(one, hit)
    r.steps()
    assert served(r)[:1] == [waits]
    r.settle()
