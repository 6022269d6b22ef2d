"""One stream's messages in order, whatever is lost of them: numbers, gaps, snapshots and lives, without a socket."""

from __future__ import annotations

from typing import Any

import pytest
from told import CLEARED, batch, payload, removed, stored

from sglcache.client import follower as follower_module
from sglcache.client.follower import Fact, Follower
from sglcache.client.picture import Block, Digest
from sglcache.client.state import KEPT_DIGESTS, MirrorState
from sglcache.units import Tier
from sglcache.wire.events import BlockRemoved, BlockStored, Event

# -- the state ----------------------------------------------------------------------------------------


@pytest.fixture
def state() -> MirrorState:
    state = MirrorState()
    assert state.apply(10, batch(CLEARED)) == [CLEARED]
    return state


def test_blocks_are_held_by_rank_and_tier(state: MirrorState) -> None:
    state.apply(11, batch(stored(1, 2), stored(2, parent=1, medium="CPU_PINNED"), stored(3, medium="DISK")))
    state.apply(12, batch(removed(2)))
    state.apply(13, batch(stored(1), rank=1))
    assert [state.hashes(tier) for tier in Tier] == [{1}, {2}, {3}, set()]
    assert state.hashes("GPU", rank=1) == {1}
    assert state.exact


def test_a_block_knows_its_parent_tokens_and_namespace(state: MirrorState) -> None:
    state.apply(11, batch(stored(5, 7, parent=3, lora_name="a", cache_salt="s")))
    assert dict(state.blocks("GPU")) == {5: Block(3, (5, 6), "a", "s"), 7: Block(5, (7, 8), "a", "s")}


def test_no_medium_means_gpu_and_no_rank_means_the_streams() -> None:
    state = MirrorState(rank=3)
    state.apply(10, batch(CLEARED, rank=None))
    state.apply(11, batch(BlockStored([1], None, [], 2, None), rank=None))
    assert dict(state.blocks(Tier.DEVICE)) == dict(state.blocks("GPU", 3)) == {1: Block(None, (), None, None)}
    state.apply(12, batch(BlockRemoved([1]), rank=3))
    assert state.hashes("GPU") == set()


def test_a_clear_empties_every_tier_of_that_rank_only(state: MirrorState) -> None:
    state.apply(11, batch(stored(1), stored(1, medium="CPU_PINNED")))
    state.apply(12, batch(stored(1), rank=1))
    state.apply(13, batch(CLEARED))
    assert (state.hashes("GPU"), state.hashes("CPU_PINNED"), state.hashes("GPU", 1)) == (set(), set(), {1})


def test_storing_twice_is_once_and_removing_the_unknown_is_nothing(state: MirrorState) -> None:
    state.apply(11, batch(stored(1), stored(1), removed(1), removed(1), removed(9)))
    assert state.hashes("GPU") == set()


def test_a_number_seen_before_is_ignored(state: MirrorState) -> None:
    state.apply(11, batch(stored(1)))
    assert not state.apply(11, batch(removed(1)))
    assert not state.apply(10, batch(CLEARED))
    assert not state.apply(11, batch(removed(1)), replayed=True)
    assert (state.hashes("GPU"), state.stale_batches, state.next_seq, state.exact) == ({1}, 3, 12, True)


def test_a_gap_is_told_and_changes_nothing(state: MirrorState) -> None:
    state.apply(11, batch(stored(1)))
    assert state.apply(13, batch(removed(1))) is None
    assert state.apply(13, batch()) is None  # a heartbeat tells of a loss, too
    assert (state.hashes("GPU"), state.next_seq, state.exact) == ({1}, 12, True)
    state.apply(12, batch(), replayed=True)
    assert state.apply(13, batch(removed(1))) == [removed(1)]


def test_a_new_life_with_higher_numbers_needs_no_replay(state: MirrorState) -> None:
    state.apply(11, batch(stored(1)))
    assert state.apply(1000, batch(CLEARED, stored(2))) == [CLEARED, stored(2)]
    assert (state.hashes("GPU"), state.next_seq, state.exact, state.losses) == ({2}, 1001, True, 0)


def test_a_life_that_begins_at_0_needs_no_clear() -> None:
    """SGLang numbers each life from 0, and sends none."""
    state = MirrorState()
    assert state.apply(0, batch(stored(1))) == [CLEARED, stored(1)]
    assert (state.hashes("GPU"), state.exact) == ({1}, True)


def test_a_loss_empties_the_picture_until_it_is_exact_again(state: MirrorState) -> None:
    state.apply(11, batch(stored(1)))
    assert state.apply(15, batch(stored(2)), replayed=True) == [CLEARED, stored(2)]
    assert (state.hashes("GPU"), state.next_seq, state.exact, state.losses) == ({2}, 16, False, 1)
    state.apply(16, batch(stored(3), CLEARED, stored(4)))  # wherever in a batch it comes
    assert (state.hashes("GPU"), state.exact) == ({4}, True)


def test_numbers_missing_before_a_replayed_heartbeat_were_heartbeats(state: MirrorState) -> None:
    state.apply(11, batch(stored(1)))
    assert state.apply(15, batch(), replayed=True) == []
    assert (state.hashes("GPU"), state.next_seq, state.exact) == ({1}, 16, True)


def test_a_snapshot_all_under_one_number_is_exact_at_the_replays_end(state: MirrorState) -> None:
    state.apply(11, batch(stored(1, 2)))
    for event in (CLEARED, stored(5), stored(6, parent=5), stored(5, medium="CPU_PINNED")):
        state.apply(40, batch(event), replayed=True)
        assert (state.snapshot, state.exact) == (40, False)
    state.apply(41, batch(removed(6)), replayed=True)
    assert not state.exact  # the snapshot may have been ahead of 41, too
    state.end_replay()
    assert (state.exact, state.next_seq, state.snapshot) == (True, 42, None)
    assert state.apply(42, batch()) == []
    assert (state.hashes("GPU"), state.hashes("CPU_PINNED")) == ({5}, {5})


def test_a_snapshot_may_begin_again_under_a_higher_number(state: MirrorState) -> None:
    for seq, events in ((40, (CLEARED, stored(5))), (41, (stored(6),)), (60, (CLEARED,)), (60, (stored(7),))):
        state.apply(seq, batch(*events), replayed=True)
    state.end_replay()
    assert (state.hashes("GPU"), state.next_seq, state.exact, state.losses) == ({7}, 61, True, 0)


def test_a_snapshot_of_another_life_may_have_lower_numbers(state: MirrorState) -> None:
    state.apply(11, batch(stored(1)))
    state.apply(3, batch(CLEARED, stored(2)), replayed=True)
    state.apply(3, batch(stored(4)), replayed=True)
    state.end_replay()
    assert (state.hashes("GPU"), state.next_seq, state.exact) == ({2, 4}, 4, True)


def test_what_is_lost_of_a_snapshot_is_not_made_up_for_by_its_end(state: MirrorState) -> None:
    state.apply(40, batch(CLEARED, stored(5)), replayed=True)
    state.apply(45, batch(stored(6)), replayed=True)
    state.end_replay()
    assert (state.hashes("GPU"), state.exact, state.losses) == ({6}, False, 1)


def test_the_first_batch_alone_is_no_picture() -> None:
    state = MirrorState()
    assert state.apply(10, batch(stored(1))) is None
    assert state.next_seq is None
    assert state.apply(10, batch(stored(1)), replayed=True) == [CLEARED, stored(1)]
    assert (state.exact, state.losses) == (False, 0)


def test_digests_are_kept_by_number(state: MirrorState) -> None:
    state.apply(11, batch(stored(1, -2)))
    state.apply(12, batch())
    state.apply(13, batch(removed(-2), stored(1, medium="CPU_PINNED")))
    two = {"GPU": Digest(2, (1 << 64) - 1)}
    assert [state.digests_at(seq) for seq in range(9, 15)] == [
        None,
        {},
        two,
        two,
        {"GPU": Digest(1, 1), "CPU_PINNED": Digest(1, 1)},
        None,
    ]


def test_digests_of_a_picture_that_is_not_exact_are_not_given(state: MirrorState) -> None:
    state.apply(15, batch(stored(2)), replayed=True)
    assert state.digests_at(15) is None
    state.apply(20, batch(CLEARED, stored(3)), replayed=True)
    state.apply(21, batch(stored(4)), replayed=True)
    assert state.digests_at(21) is None
    state.end_replay()
    assert (state.digests_at(20), state.digests_at(21)) == (None, {"GPU": Digest(2, 7)})


def test_old_digests_go(state: MirrorState) -> None:
    for seq in range(11, 11 + KEPT_DIGESTS):
        state.apply(seq, batch(stored(seq)))
    assert state.digests_at(10) is None
    assert state.digests_at(11) == {"GPU": Digest(1, 11)}


# -- following ----------------------------------------------------------------------------------------


class Stream:
    """A follower, and what it is told, as short as can be."""

    def __init__(self, can_ask: bool = True) -> None:
        self.follower = Follower(can_ask=can_ask)
        self.facts: list[Fact] = []

    def live(self, seq: int, *events: Event, ts: float = 0.0) -> None:
        self.facts += self.follower.live(seq, payload(*events, ts=ts))

    def replayed(self, seq: int, *events: Event, ts: float = 0.0) -> None:
        self.facts += self.follower.replayed(seq, payload(*events, ts=ts))

    def end(self) -> None:
        self.facts += self.follower.end_replay()

    @property
    def gpu(self) -> set[int]:
        return self.follower.state.hashes("GPU")

    @property
    def now(self) -> tuple[Any, ...]:
        """What is held, the next number, whether that is all, and from where a replay is wanted."""
        state = self.follower.state
        return self.gpu, state.next_seq, state.exact, self.follower.asked_from


@pytest.fixture
def stream() -> Stream:
    """At number 11 of a life that began at 10, with block 1."""
    stream = Stream()
    assert stream.now == (set(), None, False, 0)
    stream.replayed(10, CLEARED, ts=10)
    stream.replayed(11, stored(1), ts=11)
    stream.end()
    assert stream.now == ({1}, 12, True, None)
    return stream


def test_live_batches_wait_for_the_replay_that_is_asked_for_at_the_start() -> None:
    stream = Stream()
    stream.live(11, stored(1))
    stream.live(12, stored(2))
    assert stream.now == (set(), None, False, 0)
    stream.replayed(10, CLEARED)
    stream.replayed(10, stored(7))
    stream.replayed(11, stored(1))
    stream.end()
    assert stream.now == ({7, 1, 2}, 13, True, None)
    assert stream.facts[-1] == Fact(12, 0, stored(2))


def test_a_gap_is_asked_for_and_what_comes_meanwhile_waits(stream: Stream) -> None:
    stream.live(14, stored(4))
    stream.live(15, removed(1))
    assert stream.now == ({1}, 12, True, 12)
    stream.replayed(12, stored(2))
    stream.replayed(14, stored(4))
    assert stream.follower.state.losses == 1  # 13 is not there, and is no heartbeat
    stream.end()
    assert stream.now == ({4}, 16, False, None)


def test_an_answer_that_ends_before_the_gap_does_is_a_loss(stream: Stream) -> None:
    stream.live(14, stored(4))
    stream.end()
    assert stream.now == ({4}, 15, False, None)
    assert stream.facts[-2:] == [Fact(14, 0, CLEARED), Fact(14, 0, stored(4))]


def test_without_replay_a_gap_is_a_loss_at_once() -> None:
    stream = Stream(can_ask=False)
    stream.live(10, stored(1))
    stream.live(12, stored(2))
    assert stream.now == ({2}, 13, False, None)
    stream.live(13, CLEARED)
    assert stream.now == (set(), 14, True, None)


def test_a_clear_makes_whatever_is_missing_before_it_not_matter(stream: Stream) -> None:
    stream.live(20, CLEARED, stored(2))
    assert stream.now == ({2}, 21, True, None)


def test_a_clear_makes_a_replay_not_matter(stream: Stream) -> None:
    """The answer may never come: its teller died, and this is the next one's beginning."""
    stream.live(14, stored(4))
    assert not stream.follower.synced
    stream.live(900, CLEARED)
    stream.live(901, stored(9))
    assert stream.now == ({9}, 902, True, None)


def test_a_clear_that_a_snapshot_is_past_does_not_end_it(stream: Stream) -> None:
    stream.live(14, stored(4))
    stream.replayed(30, CLEARED, stored(8))
    stream.live(20, CLEARED)
    stream.replayed(30, stored(9))
    stream.end()
    assert stream.now == ({8, 9}, 31, True, None)


def test_a_replay_that_is_lost_goes_on_from_where_it_was(stream: Stream) -> None:
    stream.live(20, stored(4))
    stream.replayed(12, stored(2))
    requests = stream.follower.requests
    stream.follower.lost_replay()
    assert (stream.follower.asked_from, stream.follower.requests) == (13, requests + 1)


def test_a_snapshot_that_is_lost_is_asked_for_whole(stream: Stream) -> None:
    stream.live(20, stored(4))
    stream.replayed(20, CLEARED, stored(2))
    stream.follower.lost_replay()
    assert stream.now == ({2}, 21, False, 0)
    stream.replayed(25, CLEARED, stored(4))
    stream.end()
    assert stream.now == ({4}, 26, True, None)


def test_numbers_that_go_back_are_another_life(stream: Stream) -> None:
    stream.live(12, stored(2))
    stream.live(3, stored(3))
    assert stream.now == (set(), None, False, 0)
    assert stream.follower.restarts == 1
    assert stream.facts[-1].event == CLEARED
    stream.replayed(0, stored(5))
    stream.replayed(1, stored(6))
    stream.replayed(2)
    stream.end()
    assert stream.now == ({5, 6, 3}, 4, True, None)


def test_a_life_that_begins_again_at_0_is_seen_by_its_first_batch(stream: Stream) -> None:
    stream.live(12, stored(2))
    stream.live(0, stored(3))
    stream.live(1, stored(4))
    assert stream.now == ({3, 4}, 2, True, None)


def test_a_batch_that_was_replayed_is_no_other_life(stream: Stream) -> None:
    stream.live(10, CLEARED, ts=10)
    stream.live(11, stored(1), ts=11)
    stream.live(12, stored(2), ts=12)
    assert stream.now == ({1, 2}, 13, True, None)
    assert (stream.follower.restarts, stream.follower.state.stale_batches) == (0, 2)


def test_a_low_number_that_is_younger_than_all_that_is_known_is_another_life(stream: Stream) -> None:
    """The first that is heard live: nothing tells from the numbers alone that they went back."""
    stream.live(5, stored(5), ts=50)
    assert stream.now == (set(), None, False, 0)
    stream.replayed(0, stored(6), ts=40)
    for seq in range(1, 6):
        stream.replayed(seq, ts=40 + seq)
    stream.end()
    assert stream.now == ({6}, 6, True, None)
    assert stream.follower.restarts == 1


def test_what_waited_for_a_replay_may_be_younger_than_its_frames() -> None:
    """A snapshot's frames share one number and whatever time its teller gives them."""
    stream = Stream()
    stream.live(40, stored(1), ts=100)
    stream.replayed(41, CLEARED, ts=0)
    stream.replayed(41, stored(1), ts=0)
    stream.end()
    assert (stream.now, stream.follower.restarts) == (({1}, 42, True, None), 0)
    stream.live(41, stored(2), ts=101)
    assert (stream.now, stream.follower.restarts) == (({1}, 42, True, None), 0)


def test_what_waits_is_bounded_and_what_is_dropped_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "MAX_WAITING", 3)
    stream = Stream()
    for seq in range(11, 16):
        stream.live(seq, stored(seq))
    assert len(stream.follower._waiting) == 2
    stream.replayed(10, CLEARED)
    stream.end()
    assert stream.now == (set(), 11, True, 11)
    for seq in range(11, 16):
        stream.replayed(seq, stored(seq))
    stream.end()
    assert stream.now == (set(range(11, 16)), 16, True, None)


def test_what_waits_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "MAX_WAITING_BYTES", 1000)
    stream = Stream()
    for seq in range(11, 100):
        stream.live(seq, stored(seq))
        assert stream.follower._waiting_bytes == sum(len(each) for _, each in stream.follower._waiting) <= 1000
    assert stream.follower._waiting


def test_a_live_batch_that_cannot_be_read_is_a_loss_that_a_snapshot_makes_up_for(stream: Stream) -> None:
    stream.facts += stream.follower.live(12, b"\xc1")
    assert stream.now == (set(), 13, False, 0)
    stream.live(13, stored(3))
    stream.replayed(13, CLEARED, stored(1, 2, 3))
    stream.end()
    assert stream.now == ({1, 2, 3}, 14, True, None)
    assert (stream.follower.bad_messages, stream.follower.state.losses) == (1, 1)


def test_a_batch_that_a_ring_gives_again_is_not_asked_for_for_ever(stream: Stream) -> None:
    stream.facts += stream.follower.live(12, b"\xc1")
    for seq, events in ((10, (CLEARED,)), (11, (stored(1),))):
        stream.replayed(seq, *events)
    stream.facts += stream.follower.replayed(12, b"\xc1")
    stream.live(13, stored(3))
    stream.end()
    assert stream.now == ({3}, 14, False, None)


def test_a_stale_batch_that_cannot_be_read_is_no_loss(stream: Stream) -> None:
    stream.facts += stream.follower.live(11, b"\xc1")
    assert stream.now == ({1}, 12, True, None)


def test_what_is_said_is_told_with_number_and_rank() -> None:
    stream = Stream(can_ask=False)
    stream.facts += stream.follower.live(5, payload(CLEARED, stored(1), rank=2))
    assert stream.facts == [Fact(5, 2, CLEARED), Fact(5, 2, stored(1))]
