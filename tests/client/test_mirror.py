"""A picture kept from the stream: exact after any program and any repairable loss, never more than the truth."""

from __future__ import annotations

import random
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from sglcache.client.mirror import Block, Mirror, MirrorState
from sglcache.errors import ClosedError
from sglcache.net.endpoints import parse
from sglcache.net.publisher import Entry, Publisher
from sglcache.units import Tier
from sglcache.wire.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, Event, encode_batch

ANY = parse("tcp://127.0.0.1:0")
CLEARED = AllBlocksCleared()
PATIENCE_S = 10.0


def stored(*hashes: int, parent: int | None = None, medium: str = "GPU", **extra: str) -> BlockStored:
    return BlockStored(list(hashes), parent, [t for h in hashes for t in (h, h + 1)], 2, None, medium, **extra)


def removed(*hashes: int, medium: str = "GPU") -> BlockRemoved:
    return BlockRemoved(list(hashes), medium)


def batch(*events: Event, rank: int | None = 0) -> Batch:
    return Batch(0.0, list(events), rank)


# -- the bookkeeping ----------------------------------------------------------------------------------


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
    assert state.blocks("GPU") == {5: Block(3, (5, 6), "a", "s"), 7: Block(5, (7, 8), "a", "s")}


def test_no_medium_means_gpu_and_no_rank_means_0(state: MirrorState) -> None:
    state.apply(11, batch(BlockStored([1], None, [], 2, None), rank=None))
    assert state.blocks(Tier.DEVICE) == {1: Block(None, (), None, None)}
    state.apply(12, batch(BlockRemoved([1]), rank=None))
    assert state.hashes("GPU") == set()


def test_a_clear_empties_every_tier_of_that_rank_only(state: MirrorState) -> None:
    state.apply(11, batch(stored(1), stored(1, medium="CPU_PINNED")))
    state.apply(12, batch(stored(1), rank=1))
    state.apply(13, batch(CLEARED))
    assert (state.hashes("GPU"), state.hashes("CPU_PINNED"), state.hashes("GPU", 1)) == (set(), set(), {1})


def test_storing_twice_is_once_and_removing_the_unknown_is_nothing(state: MirrorState) -> None:
    state.apply(11, batch(stored(1), stored(1), removed(1), removed(1), removed(9)))
    assert state.hashes("GPU") == set()


def test_a_number_seen_before_is_ignored_unless_replayed(state: MirrorState) -> None:
    state.apply(11, batch(stored(1)))
    assert state.apply(11, batch(removed(1))) == []
    assert state.apply(10, batch(CLEARED)) == []
    assert (state.hashes("GPU"), state.stale_batches, state.next_seq) == ({1}, 2, 12)
    assert state.apply(11, batch(stored(1)), replayed=True) == [stored(1)]
    assert (state.hashes("GPU"), state.next_seq, state.exact) == ({1}, 12, True)


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


def test_a_loss_empties_the_picture_until_it_is_exact_again(state: MirrorState) -> None:
    state.apply(11, batch(stored(1)))
    assert state.apply(15, batch(stored(2)), replayed=True) == [CLEARED, stored(2)]
    assert (state.hashes("GPU"), state.next_seq, state.exact, state.losses) == ({2}, 16, False, 1)
    state.apply(16, batch(CLEARED))
    assert state.exact


def test_numbers_missing_before_a_replayed_heartbeat_were_heartbeats(state: MirrorState) -> None:
    state.apply(11, batch(stored(1)))
    assert state.apply(15, batch(), replayed=True) == []
    assert (state.hashes("GPU"), state.next_seq, state.exact) == ({1}, 16, True)


def test_a_snapshot_all_under_one_number_is_exact(state: MirrorState) -> None:
    state.apply(11, batch(stored(1, 2)))
    for event in (CLEARED, stored(5), stored(6, parent=5), stored(5, medium="CPU_PINNED")):
        state.apply(40, batch(event), replayed=True)
    state.apply(41, batch(removed(6)), replayed=True)
    assert state.apply(42, batch()) == []
    assert (state.hashes("GPU"), state.hashes("CPU_PINNED"), state.exact) == ({5}, {5}, True)


def test_the_first_batch_alone_is_no_picture() -> None:
    state = MirrorState()
    assert state.apply(10, batch(stored(1))) is None
    assert state.next_seq is None
    assert state.apply(10, batch(stored(1)), replayed=True) == [CLEARED, stored(1)]
    assert (state.exact, state.losses) == (False, 0)


# -- with sockets -------------------------------------------------------------------------------------


class Daemon(Publisher):
    """A publisher that loses what it is told to lose on its way to subscribers, and whose truth is known."""

    lose_live = False
    break_off = 0  # the first reader gets nothing from this number on
    broken = b""

    def __init__(self, first_seq: int = 1_000_000, **options: int) -> None:
        super().__init__(ANY, ANY, **options)  # type: ignore[arg-type]
        self.truth = MirrorState()
        self.seq = first_seq - 1
        self.say(CLEARED)

    def say(self, *events: Event) -> int:
        self.seq += 1
        said = batch(*events)
        self.truth.apply(self.seq, said)
        self.append(self.seq, encode_batch(said), heartbeat=not events)
        return self.seq

    def _send_live(self, entry: Entry) -> bool:
        return self.lose_live or super()._send_live(entry)

    def _send_reply(self, router: zmq.Socket[bytes], identity: bytes, entry: Entry | None) -> None:
        if self.break_off:
            self.broken = self.broken or identity
            if identity == self.broken and (entry is None or entry.seq >= self.break_off):
                raise zmq.Again  # for ever
        super()._send_reply(router, identity, entry)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    daemon = Daemon()
    yield daemon
    daemon.close(linger_s=0)


@pytest.fixture
def join() -> Iterator[Callable[..., Mirror]]:
    mirrors: list[Mirror] = []

    def build(daemon: Publisher, replay: bool = True, **options: float) -> Mirror:
        replay_endpoint = daemon.replay_endpoint if replay else None
        before = daemon.stats().subscriptions
        mirrors.append(Mirror(daemon.endpoint, replay_endpoint, **options))  # type: ignore[arg-type]
        serve(daemon, lambda: daemon.stats().subscriptions == before + 1)
        return mirrors[-1]

    yield build
    for mirror in mirrors:
        mirror.close()


def serve(daemon: Publisher, until: Callable[[], bool]) -> None:
    """Be the daemon's loop until something is so."""
    deadline = time.monotonic() + PATIENCE_S
    while not until():
        assert time.monotonic() < deadline, f"waited in vain: {daemon.stats()}"
        if not daemon.service():
            select.select(daemon.filenos, [], [], 0.002)


def catch_up(daemon: Daemon, mirror: Mirror) -> None:
    serve(daemon, lambda: mirror.catch_up(daemon.seq, 0.002))


def assert_exact(daemon: Daemon, mirror: Mirror) -> None:
    catch_up(daemon, mirror)
    assert mirror.state.exact
    for tier in Tier:
        assert mirror.state.blocks(tier) == daemon.truth.blocks(tier)


def test_a_late_joiner_is_exact_without_waiting_for_news(daemon: Daemon, join: Callable[..., Mirror]) -> None:
    daemon.say(stored(1, 2, 3))
    daemon.say(removed(2))
    mirror = join(daemon)
    assert_exact(daemon, mirror)
    assert mirror.hashes(Tier.DEVICE) == {1, 3}
    daemon.say(stored(4))
    assert_exact(daemon, mirror)
    assert (mirror.replays, mirror.state.losses) == (1, 0)


def test_a_gap_is_repaired_when_the_next_number_shows_it(daemon: Daemon, join: Callable[..., Mirror]) -> None:
    mirror = join(daemon)
    daemon.say(stored(1))
    assert_exact(daemon, mirror)
    daemon.lose_live = True
    daemon.say(removed(1))
    daemon.say(stored(2))
    daemon.lose_live = False
    daemon.say()
    assert_exact(daemon, mirror)
    assert (mirror.hashes("GPU"), mirror.replays, mirror.state.losses) == ({2}, 2, 0)


def test_lost_heartbeats_are_no_loss(daemon: Daemon, join: Callable[..., Mirror]) -> None:
    mirror = join(daemon)
    daemon.say(stored(1))
    assert_exact(daemon, mirror)
    daemon.lose_live = True
    for _ in range(5):
        daemon.say()
    daemon.lose_live = False
    daemon.say(stored(2))
    assert_exact(daemon, mirror)
    assert mirror.state.losses == 0


def test_without_replay_a_gap_is_a_loss_until_the_next_clear(daemon: Daemon, join: Callable[..., Mirror]) -> None:
    mirror = join(daemon, replay=False)
    daemon.say(stored(1))
    catch_up(daemon, mirror)
    assert (mirror.hashes("GPU"), mirror.state.exact) == ({1}, False)
    daemon.lose_live = True
    daemon.say(removed(1))
    daemon.lose_live = False
    daemon.say(stored(2))
    catch_up(daemon, mirror)
    assert (mirror.hashes("GPU"), mirror.state.losses) == ({2}, 1)
    daemon.say(CLEARED)
    daemon.say(stored(3))
    assert_exact(daemon, mirror)


def test_what_the_ring_no_longer_has_is_a_loss_and_never_a_false_block(join: Callable[..., Mirror]) -> None:
    daemon = Daemon(ring_bytes=2000)
    try:
        mirror = join(daemon)
        daemon.say(*(stored(h) for h in range(20, 24)))
        assert_exact(daemon, mirror)
        daemon.lose_live = True
        for h in range(20, 24):
            daemon.say(removed(h), stored(h + 1000))
        for h in range(100, 120):
            daemon.say(stored(h))
        daemon.lose_live = False
        daemon.say(stored(200))
        catch_up(daemon, mirror)
        assert not mirror.state.exact
        assert 200 in mirror.hashes("GPU")
        assert mirror.hashes("GPU") < daemon.truth.hashes("GPU")
    finally:
        daemon.close(linger_s=0)


def test_a_daemons_next_life_is_followed(daemon: Daemon, join: Callable[..., Mirror]) -> None:
    mirror = join(daemon)
    daemon.say(stored(1))
    assert_exact(daemon, mirror)
    daemon.append(2_000_000, encode_batch(batch(CLEARED, stored(7))))
    daemon.append(2_000_001, encode_batch(batch(stored(8, parent=7))))
    serve(daemon, lambda: mirror.catch_up(2_000_001, 0.002))
    assert (mirror.hashes("GPU"), mirror.state.exact, mirror.replays) == ({7, 8}, True, 1)


def test_an_answer_that_breaks_off_is_asked_for_again_from_where_it_is_safe(
    daemon: Daemon, join: Callable[..., Mirror]
) -> None:
    for h in range(5):
        daemon.say(stored(h))
    daemon.break_off = 1_000_003
    mirror = join(daemon, replay_timeout_s=0.1)
    serve(daemon, lambda: bool(mirror.step(0.002)) or mirror.state.next_seq == 1_000_003)
    assert not mirror.synced
    assert_exact(daemon, mirror)
    assert mirror.replays == 2


def test_bad_messages_are_counted_and_a_bad_batch_is_a_loss(daemon: Daemon, join: Callable[..., Mirror]) -> None:
    mirror = join(daemon)
    daemon.say(stored(1))
    assert_exact(daemon, mirror)
    for frames in ([b"one"], [b"", b"short", b""], [b"", b"", b"", b""]):
        daemon._pub.send_multipart(frames)
    daemon.seq += 1
    daemon.append(daemon.seq, b"\xc1")
    daemon.say(stored(2))
    catch_up(daemon, mirror)
    assert mirror.bad_messages == 4
    assert (mirror.hashes("GPU"), mirror.state.exact, mirror.state.losses) == ({2}, False, 1)


def test_follow_gives_each_fact_with_its_number_and_ends_when_idle(daemon: Daemon, join: Callable[..., Mirror]) -> None:
    mirror = join(daemon)
    daemon.say(stored(1), removed(1))
    daemon.say()
    catch_up(daemon, mirror)
    daemon.say(stored(2))
    daemon.say(stored(3))
    assert list(mirror.follow(timeout_s=0.2)) == [(1_000_003, stored(2)), (1_000_004, stored(3))]
    mirror.close()
    with pytest.raises(ClosedError):
        mirror.step(0)


@pytest.mark.parametrize("seed", range(5))
def test_after_any_program_with_any_losses_it_is_exact(seed: int, join: Callable[..., Mirror]) -> None:
    rng = random.Random(seed)
    daemon = Daemon()
    try:
        mirror = join(daemon)
        told: dict[str, set[int]] = {}
        for _ in range(300):
            daemon.lose_live = rng.random() < 0.2
            events: list[Event] = []
            for _ in range(rng.choice((0, 1, 1, 3))):
                medium = rng.choice(("GPU", "CPU_PINNED"))
                hashes = rng.sample(range(50), rng.choice((1, 2, 5)))
                roll = rng.random()
                events.append(CLEARED if roll < 0.02 else (stored if roll < 0.6 else removed)(*hashes, medium=medium))
            daemon.say(*events)
            daemon.service()
            if rng.random() < 0.3:
                tell(told, mirror.step(0))
        daemon.lose_live = False
        daemon.say()
        serve(daemon, lambda: tell(told, mirror.step(0.002)) or mirror.catch_up(daemon.seq, 0))
        assert_exact(daemon, mirror)
        assert {medium: told.get(medium, set()) for medium in ("GPU", "CPU_PINNED")} == {
            medium: mirror.hashes(medium) for medium in ("GPU", "CPU_PINNED")
        }
        assert mirror.replays > 1
        assert mirror.state.losses == 0
    finally:
        daemon.close(linger_s=0)


def tell(told: dict[str, set[int]], facts: list[tuple[int, Event]]) -> bool:
    """Keep a second picture from the facts alone, as a user of `follow` would."""
    for _, event in facts:
        if isinstance(event, AllBlocksCleared):
            told.clear()
        elif isinstance(event, BlockStored):
            told.setdefault(event.medium or "GPU", set()).update(event.block_hashes)
        else:
            told.setdefault(event.medium or "GPU", set()).difference_update(event.block_hashes)
    return False


def test_it_loads_neither_torch_nor_the_index() -> None:
    program = (
        "import sys, sglcache.client.mirror, sglcache.wire.events\n"
        "heavy = ('torch', 'numpy', 'ormsgpack', 'sglcache.core')\n"
        "print([name for name in sys.modules if name.startswith(heavy)])"
    )
    root = Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
