"""What a request for past batches gets: all, or a new beginning, and never a part. Without sockets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglcache.net.replay import PATIENCE_S, Pause, Replay, Turns
from sglcache.net.ring import ENTRY_OVERHEAD, Entry, Ring

ENTRY = 100 + ENTRY_OVERHEAD  # bytes in the ring


@dataclass
class World:
    """A counter as the state that is published: batch n says that the state is n. A frame says what it is now."""

    ring: Ring
    now: float = 0.0
    frames: int = 3
    closed: int = 0
    open: int = 0
    turns: Turns = field(init=False)

    def __post_init__(self) -> None:
        self.turns = Turns(lambda: self.now)
        self.turns.source = lambda: Frames(self)

    def publish(self, count: int = 1) -> None:
        for _ in range(count):
            seq = (self.ring.last_seq or 99) + 1
            self.ring.append(Entry(seq, bytes(100), False))

    def ask(self, start: int) -> Replay:
        return Replay(self.ring, self.turns, start)


class Frames:
    def __init__(self, world: World) -> None:
        self.world = world
        self.made: Iterator[bytes | None] = iter([b"cleared", b"", *[b"frame"] * (world.frames - 1), None])
        world.open += 1

    def next(self) -> bytes | None:
        return next(self.made)

    def close(self) -> None:
        self.world.open -= 1


def world(ring_entries: int = 4, publish: int = 6) -> World:
    made = World(Ring(ring_entries * ENTRY))
    made.publish(publish)
    return made


def read(replay: Replay, most: int = 1000) -> list[tuple[int, bytes]]:
    """What it sends until it is over or says that it is another's turn."""
    got: list[tuple[int, bytes]] = []
    for _ in range(most):
        entry = replay.peek()
        if entry is Pause.AGAIN:
            continue
        if entry is None or isinstance(entry, Pause):
            break
        got.append((entry.seq, entry.payload[:7]))
        replay.advance()
    return got


def test_what_the_ring_has_comes_from_the_ring() -> None:
    """Six batches, 100 to 105, of which it has the last four."""
    assert [seq for seq, _ in read(world().ask(103))] == [103, 104, 105]
    assert [seq for seq, _ in read(world().ask(102))] == [102, 103, 104, 105]


@pytest.mark.parametrize("start", [101, 100, 7, 0], ids=["older", "oldest", "another life", "nothing"])
def test_what_is_older_gets_a_snapshot_numbered_by_the_last_batch(start: int) -> None:
    made = world()
    assert read(made.ask(start)) == [(105, b"cleared"), (105, b"frame"), (105, b"frame")]
    assert made.open == 0


def test_zero_is_a_snapshot_even_if_the_ring_has_all() -> None:
    assert read(world(10).ask(0))[0] == (105, b"cleared")
    assert read(world(10).ask(100))[0][0] == 100


@pytest.mark.parametrize("start", [106, 1 << 63])
def test_what_is_to_come_is_nothing(start: int) -> None:
    assert read(world().ask(start)) == []


def test_before_the_first_batch_there_is_nothing() -> None:
    assert read(world(publish=0).ask(0)) == []


def test_what_happens_during_a_snapshot_comes_in_between_under_its_own_numbers() -> None:
    """So who reads as fast as things happen gets to the end, however much there is to tell."""
    made = world()
    replay = made.ask(0)
    assert read(replay, 1) == [(105, b"cleared")]
    made.publish(2)
    assert [(seq, payload == b"frame") for seq, payload in read(replay, 4)] == [
        (106, False),
        (107, False),
        (107, True),
    ]
    made.publish()
    assert [seq for seq, _ in read(replay)] == [108, 108]
    made.publish()
    assert read(replay) == [], "what came after it is live"


def test_the_ring_keeps_what_a_slow_reader_of_a_snapshot_needs_up_to_twice_its_size() -> None:
    made = world(4)
    replay = made.ask(0)
    read(replay, 1)
    made.publish(7)
    assert [seq for seq, _ in read(replay)] == [*range(106, 113), 112, 112]
    replay.close()
    made.publish()
    assert len(made.ring) == 4


def test_a_snapshot_that_the_ring_leaves_behind_begins_anew() -> None:
    """More happens than the ring may keep: what was told is worth nothing, and the new Cleared says so."""
    made = world(4)
    replay = made.ask(0)
    assert read(replay, 1) == [(105, b"cleared")]
    made.publish(20)
    assert read(replay) == [(125, b"cleared"), (125, b"frame"), (125, b"frame")]
    assert (made.turns.num_begun, made.turns.num_done, made.open) == (2, 1, 0)


def test_a_reader_of_the_ring_that_it_leaves_behind_starts_anew() -> None:
    """It may not get 103 and then 120, as if there had been nothing between."""
    made = world(4)
    replay = made.ask(103)
    assert [seq for seq, _ in read(replay, 1)] == [103]
    made.publish(20)
    assert read(replay)[0] == (125, b"cleared")


def test_one_snapshot_at_a_time_first_come_first_served() -> None:
    made = world()
    first, second = made.ask(0), made.ask(0)
    assert read(first, 1) == [(105, b"cleared")]
    assert second.peek() is Pause.LATER
    read(first)
    assert read(second, 1) == [(105, b"cleared")]


def test_the_next_has_its_turn_when_the_first_reader_dies() -> None:
    made = world()
    first, second = made.ask(0), made.ask(0)
    read(first, 1)
    assert second.peek() is Pause.LATER
    first.close()
    first.close()
    assert len(read(second)) == 3
    assert made.open == 0


def test_who_does_not_read_goes_to_the_end_of_the_queue_and_starts_anew() -> None:
    made = world()
    first, second = made.ask(0), made.ask(0)
    read(first, 1)
    assert second.peek() is Pause.LATER
    made.now = PATIENCE_S + 1
    assert len(read(second)) == 3
    made.publish()
    assert read(first) == [(106, b"cleared"), (106, b"frame"), (106, b"frame")]


def test_who_does_not_read_keeps_his_turn_while_nobody_waits() -> None:
    made = world()
    first = made.ask(0)
    read(first, 1)
    made.now = 100 * PATIENCE_S
    assert [payload for _, payload in read(first)] == [b"frame", b"frame"]


def test_a_merged_request_is_answered_before_the_end_of_both() -> None:
    made = world(10)
    replay = made.ask(104)
    made.publish()
    replay.merge(102)
    replay.merge(1 << 64)
    assert [seq for seq, _ in read(replay)] == [102, 103, 104, 105, 106]
    assert replay.num_ends == 3


@given(
    st.lists(st.tuples(st.sampled_from(["publish", "read", "ask", "beat", "close"]), st.integers(0, 7)), max_size=80),
    st.integers(2, 6),
)
def test_any_reader_gets_all_or_a_new_beginning(steps: list[tuple[str, int]], entries: int) -> None:
    """A picture that is the last number it stands for: right at the end of every answer, and never with a hole."""
    made = world(entries)
    readers: dict[int, tuple[Replay, list[int | None]]] = {}
    for what, number in steps:
        match what:
            case "publish":
                made.publish(number)
            case "beat":
                made.ring.append(Entry((made.ring.last_seq or 0) + 1, b"", True))
            case "ask" if number not in readers:
                start = (made.ring.last_seq or 0) - 2 * number if number else 0
                readers[number] = (made.ask(start), [start - 1 if start else None])
            case "read" if number in readers:
                _follow(made, *readers[number], most=number)
            case "close" if number in readers:
                readers.pop(number)[0].close()
    for replay, picture in readers.values():
        while not _follow(made, replay, picture, most=1000):
            made.now += PATIENCE_S + 1
        replay.close()
    assert made.open == 0


def _follow(made: World, replay: Replay, picture: list[int | None], most: int) -> bool:
    """Read; whether it is over."""
    for _ in range(most):
        entry = replay.peek()
        if entry is None:
            assert picture[0] is not None
            assert picture[0] >= replay._until or made.ring.at(picture[0] + 1).heartbeat  # type: ignore[union-attr]
            return True
        if entry is Pause.LATER:
            return False
        if isinstance(entry, Pause):
            continue
        if entry.payload == b"cleared":
            picture[0] = entry.seq
        elif entry.payload == b"frame":
            assert entry.seq == picture[0]
        else:
            assert picture[0] is not None
            assert entry.heartbeat or entry.seq == picture[0] + 1, f"{entry.seq} after {picture[0]}"
            picture[0] = entry.seq
        replay.advance()
    return False
