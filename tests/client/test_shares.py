"""What a lease says of its window and its states, whatever order answers are waited for in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglcache.client.shares import Shares, StateShare, WindowShare
from sglcache.wire.control import WireShare


def packed(slots: Sequence[int]) -> bytes:
    return np.array(slots, "<i4").tobytes()


def window(first: int, slots: Sequence[int] = ()) -> WireShare:
    return first, packed(slots), None


def states(slots: Sequence[int], source: int | None = None) -> WireShare:
    return 0, packed(slots), source


def share(first: int, slots: Sequence[int]) -> tuple[Shares, WindowShare]:
    shares = Shares(("window",), (window(first, slots),))
    of = shares.of["window"]
    assert isinstance(of, WindowShare)
    return shares, of


def state_share(slots: Sequence[int], source: int | None = None) -> tuple[Shares, StateShare]:
    shares = Shares(("mamba",), (states(slots, source),))
    of = shares.of["mamba"]
    assert isinstance(of, StateShare)
    return shares, of


def said(of: WindowShare) -> tuple[int, list[int]]:
    return of.first_page, of.slots.tolist()


def test_a_commit_takes_from_the_front_what_was_slid_past() -> None:
    shares, of = share(3, [30, 31, 32, 33])
    before = of.slots
    shares.hear(1, (window(5),))
    assert said(of) == (3, [30, 31, 32, 33]), "not before it was waited for"
    shares.apply(1)
    assert said(of) == (5, [32, 33])
    assert before.tolist() == [30, 31, 32, 33], "an array that was handed out stays"
    assert of.table.tolist() == [-1] * 5 + [32, 33]


def test_a_commit_that_slid_past_all_leaves_none() -> None:
    shares, of = share(0, [1, 2])
    shares.hear(1, (window(2),))
    shares.apply(1)
    assert said(of) == (2, [])
    shares.grow((packed([7]),))
    assert said(of) == (2, [7])


def test_a_commit_names_other_pages_and_what_came_since_stays() -> None:
    shares, of = share(0, [1, 2, 3, 4])
    shares.hear(1, (window(2, [13, 4]),))
    shares.grow((packed([5]),))
    shares.apply(1)
    assert said(of) == (2, [13, 4, 5])


def test_of_commits_that_are_waited_for_in_another_order_the_earlier_counts_first() -> None:
    shares, of = share(0, [1, 2, 3, 4])
    shares.hear(1, (window(1, [12, 3, 4]),))
    shares.hear(2, (window(1),))
    shares.hear(3, (window(3),))
    shares.apply(2)
    assert said(of) == (1, [12, 3, 4])
    shares.apply(1)
    assert said(of) == (1, [12, 3, 4])
    shares.apply(3)
    assert said(of) == (3, [4])


def test_a_state_that_was_committed_is_no_more_the_leases() -> None:
    shares, of = state_share([4, 5, 6], source=9)
    assert (of.slots.tolist(), of.source) == ([4, 5, 6], 9)
    shares.hear(1, (states([4, 6]),))
    assert (of.slots.tolist(), of.source) == ([4, 5, 6], 9), "not before it was waited for"
    shares.apply(1)
    assert (of.slots.tolist(), of.source) == ([4, 6], None)


def test_states_that_an_extend_brought_meanwhile_stay() -> None:
    shares, of = state_share([4, 5])
    shares.hear(1, (states([5]),))
    shares.grow((packed([8, 2]),))
    shares.hear(2, (states([8]),))
    shares.apply(1)
    assert of.slots.tolist() == [5, 8, 2]
    shares.apply(2)
    assert of.slots.tolist() == [8]


def test_a_slot_that_was_given_away_may_come_back() -> None:
    """Committed, evicted, and the lease's again by an extend, all before the commit was waited for."""
    shares, of = state_share([4])
    shares.hear(1, (states([]),))
    shares.grow((packed([4]),))
    shares.apply(1)
    assert of.slots.tolist() == [4]


def test_both_kinds_side_by_side() -> None:
    shares = Shares(("window", "mamba"), (window(0, [1, 2]), states([3])))
    shares.grow((packed([5]), b""))
    shares.hear(1, (window(1), states([])))
    shares.apply(1)
    one, other = shares.of["window"], shares.of["mamba"]
    assert isinstance(one, WindowShare)
    assert isinstance(other, StateShare)
    assert (said(one), other.slots.tolist()) == ((1, [2, 5]), [])
