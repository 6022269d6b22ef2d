"""What a lease says of its window and its states, whatever order answers are waited for in."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from sglcache.client.shares import Shares, StateShare, WindowShare
from sglcache.core import invariants
from sglcache.core.effects import Committed, Wake
from sglcache.core.effects import Share as CoreShare
from sglcache.core.index import Index, IndexConfig
from sglcache.core.leases import ByEnd, ByPage
from sglcache.core.resources import Companion, MambaState, SlidingWindow
from sglcache.wire.control import Extension, WireShare


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


# -- against an index ---------------------------------------------------------------------------------------


class Runner:
    """A session with one lease, of which it hears late and in any order."""

    def __init__(self, index: Index, tokens: Sequence[int], states: int, room: int) -> None:
        self.index, self.tokens = index, packed(tokens)
        self.session = index.open_session()
        grant = index.acquire(self.session, 0, self.tokens, room=room, spare=(0, states))
        assert grant is not None
        self.lease = grant.lease
        self.shares = Shares(("window", "mamba"), tuple(wire(grant.shares)))
        self.request = self.ticket = self.done = self.committed = 0
        self.replies: list[int] = []  # of commits that took effect and were not waited for
        self.promised: set[int] = set()  # slots of states that are in a commit

    @property
    def window(self) -> WindowShare:
        share = self.shares.of["window"]
        assert isinstance(share, WindowShare)
        return share

    @property
    def mamba(self) -> StateShare:
        share = self.shares.of["mamba"]
        assert isinstance(share, StateShare)
        return share

    def step(self, rng: random.Random) -> None:
        """One thing, any."""
        self.request += 1
        what = rng.randrange(4)
        have = len(self.index.leases[self.lease].slots) // 4
        if what == 0:
            item = Extension(self.lease, b"", 0, 4 * (have + rng.randrange(4)), (0, rng.randrange(2)))
            extended = self.index.extend(self.session, self.request, [item])
            assert extended is not None
            if isinstance(extended.results[0], bytes):
                self.shares.grow(extended.shares[0])
        elif what == 1:
            pages = min(have, len(self.tokens) // 16)
            pages = rng.randint(min(self.committed, pages), pages)
            free = [int(slot) for slot in self.mamba.slots if int(slot) not in self.promised]
            ends = [(1, 4 * pages, free[0])] if free and pages > self.committed else []
            self.promised |= {slot for _, _, slot in ends}
            self.committed = max(self.committed, pages)
            self.ticket += 1
            floor = rng.choice([None, 4 * rng.randint(0, len(self.tokens) // 16)])
            self.index.commit(
                self.session, self.request, self.lease, self.ticket, tokens=4 * pages, ends=ends, floor=floor
            )
        elif what == 2 and self.done < self.ticket:
            self.done += 1
            self.index.event_done(self.session, self.done)
        elif self.replies:
            self.wait(rng.choice(self.replies))

    def hear(self, committed: Committed) -> None:
        self.shares.hear(committed.reply, tuple(wire(committed.shares)))
        self.replies.append(committed.reply)

    def wait(self, reply: int) -> None:
        self.shares.apply(reply)
        self.replies.remove(reply)
        self.promised &= set(self.mamba.slots.tolist())

    def agrees(self) -> bool:
        """Whether it knows what the index does."""
        by_page, by_end = self.index.leases[self.lease].parts
        assert isinstance(by_page, ByPage)
        assert isinstance(by_end, ByEnd)
        told = said(self.window)
        truth = by_page.first, np.frombuffer(bytes(by_page.slots), "<i4").tolist()
        own = sorted(self.mamba.slots.tolist())
        return told == truth and own == sorted(np.frombuffer(bytes(by_end.slots), "<i4").tolist())


def wire(shares: Sequence[CoreShare]) -> list[WireShare]:
    return [(share.first, share.slots, share.source) for share in shares]


def test_whoever_has_waited_for_all_knows_what_the_index_does() -> None:
    """Runners that commit the same prompts side by side, hear late, and wait in any order."""
    renamed = 0
    for seed in range(150):
        rng = random.Random(seed)
        companions = (Companion(SlidingWindow(2), 48), Companion(MambaState(), 16))
        index = Index(IndexConfig(page_size=4, num_pages=80, companions=companions, events=False))
        prompt = [rng.randrange(3) for _ in range(72)]
        tails = [[*prompt[: rng.choice([40, 56, 72])], *([number] * 8)] for number in range(3)]
        runners = [Runner(index, tokens, 1, room=rng.choice([4, 12, 24])) for tokens in tails]
        by_session = {runner.session: runner for runner in runners}
        for _ in range(80):
            rng.choice(runners).step(rng)
            for effect in index.drain():
                if isinstance(effect, Wake) and isinstance(effect.result, Committed):
                    renamed += bool(effect.result.shares[0].slots)
                    by_session[effect.session].hear(effect.result)
            for runner in runners:
                assert runner.replies or runner.agrees(), f"seed {seed}"
        for runner in runners:
            while runner.replies:
                runner.wait(rng.choice(runner.replies))
            assert runner.agrees(), f"seed {seed}"
        assert invariants.check(index) == []
    assert renamed > 100, "hardly anybody had another's pages"
