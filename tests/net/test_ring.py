"""The one store of batches: bounded in bytes, and honest about what has left it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglcache.net.ring import ENTRY_OVERHEAD, Entry, Ring

PAYLOAD = b"x" * 100
COST = len(PAYLOAD) + ENTRY_OVERHEAD


def batch(seq: int) -> Entry:
    return Entry(seq, PAYLOAD, False)


def beat(seq: int) -> Entry:
    return Entry(seq, b"beat", True)


def numbers(ring: Ring) -> list[int]:
    seqs, seq = [], 0
    while (entry := ring.at(seq)) is not None:
        seqs.append(entry.seq)
        seq = entry.seq + 1
    return seqs


def test_it_holds_the_newest_batches_that_fit() -> None:
    ring = Ring(3 * COST)
    evicted = [ring.append(batch(seq)) for seq in range(5)]
    assert evicted == [[], [], [], [batch(0)], [batch(1)]]
    assert numbers(ring) == [2, 3, 4]
    assert (ring.first_seq, len(ring), ring.num_bytes) == (2, 3, 3 * COST)


def test_a_batch_larger_than_the_ring_stays_until_the_next() -> None:
    ring = Ring(COST)
    ring.append(batch(1))
    large = Entry(2, bytes(10_000), False)
    assert ring.append(large) == [batch(1)]
    assert ring.at(0) == large
    assert ring.append(batch(3)) == [large]


def test_a_run_of_heartbeats_is_one_entry() -> None:
    ring = Ring(10 * COST)
    for entry in (batch(1), beat(2), beat(3), beat(4), batch(5), beat(6)):
        ring.append(entry)
    assert numbers(ring) == [1, 4, 5, 6]
    assert ring.num_bytes == 2 * COST + 2 * (4 + ENTRY_OVERHEAD)


def test_a_heartbeat_leaves_with_the_batch_before_it() -> None:
    ring = Ring(2 * COST)
    for entry in (batch(1), beat(2), batch(3)):
        ring.append(entry)
    assert numbers(ring) == [3]


def test_at_finds_the_oldest_not_below() -> None:
    ring = Ring(10 * COST)
    for seq in (10, 20, 30):
        ring.append(batch(seq))
    assert [entry and entry.seq for entry in map(ring.at, (0, 10, 11, 30, 31))] == [10, 10, 20, 30, None]
    assert Ring(1).at(0) is None
    assert Ring(1).first_seq is None


def test_numbers_that_do_not_rise_are_our_own_bug() -> None:
    ring = Ring(COST)
    ring.append(batch(5))
    with pytest.raises(AssertionError, match="batch 5 after 5"):
        ring.append(batch(5))


def test_a_long_life_leaves_nothing_behind() -> None:
    ring = Ring(50 * COST)
    for seq in range(10_000):
        ring.append(batch(seq))
    assert numbers(ring) == list(range(9_950, 10_000))
    assert len(ring._entries) < 1_200


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 400)), max_size=60), st.integers(1, 2000))
def test_what_it_holds_is_a_tail_of_the_stream(program: list[tuple[bool, int]], max_bytes: int) -> None:
    ring = Ring(max_bytes)
    stream: list[Entry] = []
    gone: list[Entry] = []
    for seq, (is_beat, size) in enumerate(program):
        entry = Entry(seq, bytes(size), is_beat)
        gone += ring.append(entry)
        if stream and stream[-1].heartbeat and is_beat:
            stream.pop()
        stream.append(entry)
        held = stream[-len(ring) :]
        assert numbers(ring) == [entry.seq for entry in held]
        assert ring.num_bytes == sum(len(entry.payload) + ENTRY_OVERHEAD for entry in held)
        assert ring.num_bytes <= max_bytes or len(ring) == 1
        assert not (gone and held[0].heartbeat and len(held) > 1)
        lost = {entry.seq for entry in stream} - {entry.seq for entry in held}
        assert {entry.seq for entry in gone} >= lost
