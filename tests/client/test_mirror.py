"""A mirror at real sockets: exact after any program and any loss, never more than the truth, and bounded."""

from __future__ import annotations

import json
import random
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from told import CLEARED, batch, payload, removed, stored

from sglcache.client.mirror import Curve, Disagreement, Fact, Match, Mirror, MirrorState, Source
from sglcache.client.picture import Digest
from sglcache.errors import BadRequest, ClosedError, ConfigError
from sglcache.net.endpoints import parse
from sglcache.net.publisher import Publisher
from sglcache.net.ring import Entry
from sglcache.units import Tier
from sglcache.wire.events import AllBlocksCleared, BlockStored, Event, decode_batch

ANY = parse("tcp://127.0.0.1:0")
PATIENCE_S = 10.0


class Telling:
    """A snapshot of what a daemon holds, one block a frame, of what is there when its turn comes."""

    def __init__(self, truth: MirrorState) -> None:
        self.truth = truth
        self.begun = False
        self.told: set[tuple[Tier, int]] = set()

    def next(self) -> bytes | None:
        if not self.begun:
            self.begun = True
            return payload(CLEARED, rank=self.truth.rank)
        for tier in Tier:
            for block_hash, block in self.truth.blocks(tier).items():
                if (tier, block_hash) not in self.told:
                    self.told.add((tier, block_hash))
                    event = stored(block_hash, parent=block.parent, medium=tier.medium)
                    return payload(event, rank=self.truth.rank)
        return None

    def close(self) -> None:
        pass


class Daemon(Publisher):
    """A publisher that loses what it is told to lose on its way to subscribers, and whose truth is known."""

    lose_live = False
    break_off = 0  # the first reader gets nothing from this number on
    broken = b""

    def __init__(self, first_seq: int = 1_000_000, snapshots: bool = True, rank: int = 0, **options: Any) -> None:
        super().__init__(ANY, ANY, **options)
        self.truth = MirrorState(rank)
        self.seq = first_seq - 1
        if snapshots:
            self.snapshot = lambda: Telling(self.truth)
        self.say(CLEARED)

    def say(self, *events: Event) -> int:
        self.seq += 1
        said = payload(*events, rank=self.truth.rank)
        self.truth.apply(self.seq, decode_batch(said))
        self.append(self.seq, said, heartbeat=not events)
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
def make() -> Iterator[Callable[..., Daemon]]:
    made: list[Daemon] = []

    def build(**options: Any) -> Daemon:
        made.append(Daemon(**options))
        return made[-1]

    yield build
    for daemon in made:
        daemon.close(linger_s=0)


@pytest.fixture
def daemon(make: Callable[..., Daemon]) -> Daemon:
    return make()


@pytest.fixture
def join() -> Iterator[Callable[..., Mirror]]:
    mirrors: list[Mirror] = []

    def build(daemon: Publisher, replay: bool = True, **options: Any) -> Mirror:
        before = daemon.stats().subscriptions
        mirrors.append(Mirror(daemon.endpoint, daemon.replay_endpoint if replay else None, **options))
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
    assert mirror.exact
    for tier in Tier:
        assert dict(mirror.blocks(tier)) == dict(daemon.truth.blocks(tier))


# -- joining, and what is lost ------------------------------------------------------------------------


def test_a_late_joiner_is_exact_without_waiting_for_news(daemon: Daemon, join: Callable[..., Mirror]) -> None:
    daemon.say(stored(1, 2, 3))
    daemon.say(removed(2))
    mirror = join(daemon)
    assert_exact(daemon, mirror)
    assert mirror.hashes(Tier.DEVICE) == {1, 3}
    daemon.say(stored(4))
    assert_exact(daemon, mirror)
    assert (mirror.replays, mirror.losses) == (1, 0)


def test_who_joins_before_there_is_anything_hears_of_it(daemon: Daemon, join: Callable[..., Mirror]) -> None:
    mirror = join(daemon)
    assert_exact(daemon, mirror)
    assert mirror.hashes("GPU") == set()


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
    assert (mirror.hashes("GPU"), mirror.replays, mirror.losses) == ({2}, 2, 0)


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
    assert mirror.losses == 0


def test_without_replay_a_gap_is_a_loss_until_the_next_clear(daemon: Daemon, join: Callable[..., Mirror]) -> None:
    mirror = join(daemon, replay=False)
    daemon.say(stored(1))
    catch_up(daemon, mirror)
    assert (mirror.hashes("GPU"), mirror.exact) == ({1}, False)
    daemon.lose_live = True
    daemon.say(removed(1))
    daemon.lose_live = False
    daemon.say(stored(2))
    catch_up(daemon, mirror)
    assert (mirror.hashes("GPU"), mirror.losses) == ({2}, 1)
    daemon.say(CLEARED)
    daemon.say(stored(3))
    assert_exact(daemon, mirror)


def outrun_the_ring(daemon: Daemon, mirror: Mirror) -> None:
    """Lose more than the ring keeps, removals of what is known among it."""
    daemon.say(*(stored(h) for h in range(20, 24)))
    catch_up(daemon, mirror)
    daemon.lose_live = True
    for h in range(20, 24):
        daemon.say(removed(h), stored(h + 1000))
    for h in range(100, 120):
        daemon.say(stored(h))
    daemon.lose_live = False
    daemon.say(stored(200))


def test_what_the_ring_no_longer_has_comes_as_a_snapshot(
    make: Callable[..., Daemon], join: Callable[..., Mirror]
) -> None:
    daemon = make(ring_bytes=2000)
    mirror = join(daemon)
    outrun_the_ring(daemon, mirror)
    assert_exact(daemon, mirror)
    assert daemon.stats().snapshots_done >= 1
    assert mirror.losses == 0


def test_where_there_is_no_snapshot_it_is_a_loss_and_never_a_false_block(
    make: Callable[..., Daemon], join: Callable[..., Mirror]
) -> None:
    daemon = make(ring_bytes=2000, snapshots=False)
    mirror = join(daemon)
    outrun_the_ring(daemon, mirror)
    catch_up(daemon, mirror)
    assert not mirror.exact
    assert 200 in mirror.hashes("GPU")
    assert mirror.hashes("GPU") < daemon.truth.hashes("GPU")


def test_a_daemons_next_life_is_followed(daemon: Daemon, join: Callable[..., Mirror]) -> None:
    mirror = join(daemon)
    daemon.say(stored(1))
    assert_exact(daemon, mirror)
    daemon.append(2_000_000, payload(CLEARED, stored(7)))
    daemon.append(2_000_001, payload(stored(8, parent=7)))
    serve(daemon, lambda: mirror.catch_up(2_000_001, 0.002))
    assert (mirror.hashes("GPU"), mirror.exact, mirror.replays) == ({7, 8}, True, 1)


def test_all_that_is_told_anew_on_the_live_stream_is_a_picture_again(
    daemon: Daemon, join: Callable[..., Mirror]
) -> None:
    mirror = join(daemon, replay=False)
    daemon.say(stored(2, parent=1))
    catch_up(daemon, mirror)
    assert not mirror.exact
    for events in ((CLEARED, stored(5)), (stored(6, parent=5),), (removed(6), stored(9)), (stored(2, parent=1),)):
        daemon.say(*events)
    assert_exact(daemon, mirror)
    assert mirror.hashes("GPU") == {5, 9, 2}


def test_an_answer_that_breaks_off_is_asked_for_again_from_where_it_is_safe(
    make: Callable[..., Daemon], join: Callable[..., Mirror]
) -> None:
    daemon = make(snapshots=False)
    for h in range(5):
        daemon.say(stored(h))
    daemon.break_off = 1_000_003
    mirror = join(daemon, replay_timeout_s=0.1)
    serve(daemon, lambda: bool(mirror.step(0.002)) or mirror.state.next_seq == 1_000_003)
    assert not mirror.synced
    assert_exact(daemon, mirror)
    assert mirror.replays == 2


def test_while_no_answer_comes_what_waits_is_bounded_and_nothing_is_lost(
    daemon: Daemon, join: Callable[..., Mirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglcache.client.follower.MAX_WAITING", 50)
    monkeypatch.setattr("sglcache.net.replay.PATIENCE_S", 0.5)
    daemon.break_off = 1
    mirror = join(daemon, replay_timeout_s=0.1)
    serve(daemon, lambda: daemon.broken != b"")
    for h in range(500):
        daemon.say(stored(h))
        mirror.step(0)
        assert len(mirror._first.follower._waiting) <= 50
    assert_exact(daemon, mirror)
    assert mirror.losses == 0


def test_who_gets_no_answer_asks_ever_more_patiently(daemon: Daemon, join: Callable[..., Mirror]) -> None:
    """The daemon may have others to answer first, and who asks anew goes to the end of the queue."""
    began = time.monotonic()
    mirror = join(daemon, replay_timeout_s=0.01)
    asked: list[int] = []
    while len(asked) < 6:
        if not asked or mirror.replays > len(asked):
            asked.append(mirror._first._patience)
        mirror.step(0.001)
    assert asked == [1, 2, 4, 8, 16, 32]
    assert time.monotonic() - began > 0.01 * sum(asked[:-1])
    assert_exact(daemon, mirror)


def test_bad_messages_are_counted_and_a_bad_batch_is_made_up_for(daemon: Daemon, join: Callable[..., Mirror]) -> None:
    mirror = join(daemon)
    daemon.say(stored(1))
    assert_exact(daemon, mirror)
    for frames in ([b"one"], [b"", b"short", b""], [b"", b"", b"", b""]):
        daemon._pub.send_multipart(frames)
    daemon.seq += 1
    daemon.append(daemon.seq, b"\xc1")
    daemon.truth.apply(daemon.seq, batch())
    daemon.say(stored(2))
    assert_exact(daemon, mirror)
    assert (mirror.bad_messages, mirror.losses) == (4, 1)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ring_bytes", [1 << 26, 3000])
def test_after_any_program_with_any_losses_it_is_exact(
    seed: int, ring_bytes: int, make: Callable[..., Daemon], join: Callable[..., Mirror]
) -> None:
    rng = random.Random(seed)
    daemon = make(ring_bytes=ring_bytes)
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
    assert mirror.losses == 0


def tell(told: dict[str, set[int]], facts: list[Fact]) -> bool:
    """Keep a second picture from the facts alone, as a user of `follow` would."""
    for _, _, event in facts:
        if isinstance(event, AllBlocksCleared):
            told.clear()
        elif isinstance(event, BlockStored):
            told.setdefault(event.medium or "GPU", set()).update(event.block_hashes)
        else:
            told.setdefault(event.medium or "GPU", set()).difference_update(event.block_hashes)
    return False


# -- another engine's publisher -----------------------------------------------------------------------


class Engine:
    """SGLang's publisher: numbers from 0, a ring, three frames in a reply, no snapshot, no clear at the start."""

    def __init__(self, ports: tuple[int, int] = (0, 0)) -> None:
        self.context = zmq.Context()
        self.pub, self.router = self.context.socket(zmq.XPUB), self.context.socket(zmq.ROUTER)
        for sock, port in zip((self.pub, self.router), ports, strict=True):
            sock.bind(f"tcp://127.0.0.1:{port or '*'}")
        self.endpoints = [sock.getsockopt_string(zmq.LAST_ENDPOINT) for sock in (self.pub, self.router)]
        self.ring: list[bytes] = []

    @property
    def ports(self) -> tuple[int, int]:
        live, replay = (int(endpoint.rsplit(":", 1)[1]) for endpoint in self.endpoints)
        return live, replay

    @property
    def subscribed(self) -> bool:
        return bool(self.pub.poll(0)) and self.pub.recv() == b"\1"

    def say(self, *events: Event) -> None:
        said = payload(*events, rank=None, ts=time.time())
        self.pub.send_multipart([b"", len(self.ring).to_bytes(8, "big"), said])
        self.ring.append(said)

    def serve(self, mirror: Mirror, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not until():
            assert time.monotonic() < deadline, "waited in vain"
            mirror.step(0.002)
            if self.router.poll(0):
                identity, _, start = self.router.recv_multipart()
                for seq in range(int.from_bytes(start, "big"), len(self.ring)):
                    self.router.send_multipart([identity, b"", seq.to_bytes(8, "big"), self.ring[seq]])
                self.router.send_multipart([identity, b"", b"\xff" * 8, b""])

    def close(self) -> None:
        self.context.destroy(linger=0)


def test_an_engine_that_restarts_at_0_is_another_life() -> None:
    """A21, of a publisher whose numbers go back: nothing of the old life stays, and the new one is followed."""
    engine = Engine()
    try:
        with Mirror(*engine.endpoints, replay_timeout_s=0.5) as mirror:
            engine.serve(mirror, lambda: engine.subscribed)
            for h in range(1, 6):
                engine.say(stored(h))
            engine.serve(mirror, lambda: mirror.hashes("GPU") == {1, 2, 3, 4, 5})
            assert mirror.exact
            engine.close()
            engine = Engine(engine.ports)
            engine.say(stored(11))  # nobody hears it: the connection is not there again
            engine.serve(mirror, lambda: engine.subscribed)
            engine.say(stored(12))
            engine.serve(mirror, lambda: mirror.hashes("GPU") == {11, 12} and mirror.synced)  # the replay's END, too
            assert mirror.exact
            assert mirror.state.next_seq == 2
    finally:
        engine.close()


# -- reading ------------------------------------------------------------------------------------------


def test_follow_gives_each_fact_with_its_number_and_ends_when_idle(daemon: Daemon, join: Callable[..., Mirror]) -> None:
    mirror = join(daemon)
    daemon.say(stored(1), removed(1))
    daemon.say()
    catch_up(daemon, mirror)
    daemon.say(stored(2))
    daemon.say(stored(3))
    facts = [Fact(1_000_003, 0, stored(2)), Fact(1_000_004, 0, stored(3))]
    assert list(mirror.follow(timeout_s=0.2)) == facts
    mirror.close()
    with pytest.raises(ClosedError):
        mirror.step(0)


def test_a_mirror_can_stop_at_a_number(daemon: Daemon, join: Callable[..., Mirror]) -> None:
    mirror = join(daemon)
    for h in range(1, 9):
        daemon.say(stored(h))
    catch_up(daemon, mirror)
    for h in range(9, 20):
        daemon.say(stored(h))
    serve(daemon, lambda: mirror.catch_up(1_000_012, 0.01, stop=True))
    assert (mirror.state.next_seq, mirror.hashes("GPU")) == (1_000_013, set(range(1, 13)))
    serve(daemon, lambda: mirror.catch_up(1_000_015, 0.01, stop=True))
    assert (mirror.state.next_seq, mirror.hashes("GPU")) == (1_000_016, set(range(1, 16)))
    assert_exact(daemon, mirror)


def test_a_mirror_that_shall_stop_at_a_number_that_it_missed_asks_for_it(
    daemon: Daemon, join: Callable[..., Mirror]
) -> None:
    mirror = join(daemon)
    catch_up(daemon, mirror)
    daemon.lose_live = True
    missed = daemon.say(stored(1))
    daemon.lose_live = False
    daemon.say(stored(2))
    serve(daemon, lambda: mirror.catch_up(missed, 0.01, stop=True))
    assert_exact(daemon, mirror)


def test_a_digest_is_held_against_the_picture_of_its_number(daemon: Daemon, join: Callable[..., Mirror]) -> None:
    mirror = join(daemon)
    first = daemon.say(stored(1, 5), stored(5, medium="CPU_PINNED"))
    catch_up(daemon, mirror)
    second = daemon.say(removed(5))
    daemon.say()
    catch_up(daemon, mirror)
    assert mirror.check_digest(first, {"DEVICE": [2, 6], "HOST": [1, 5]}) == []
    assert mirror.check_digest(second, {"DEVICE": [1, 1], "HOST": [1, 5], "DISK": [0, 0]}) == []
    assert mirror.check_digest(second, {"DEVICE": [2, 6], "HOST": [1, 5]}) == [
        Disagreement("DEVICE", Digest(2, 6), Digest(1, 1))
    ]
    assert mirror.check_digest(daemon.seq + 1, {"DEVICE": [1, 1]}) is None
    assert mirror.check_digest(1, {"DEVICE": [1, 1]}) is None


def test_a_match_is_by_rank_and_tier(make: Callable[..., Daemon]) -> None:
    daemons = [make(), make(first_seq=5, rank=1)]
    sources = [Source(each.endpoint, each.replay_endpoint, "", rank) for rank, each in enumerate(daemons)]
    with Mirror.of(sources) as mirror:
        daemons[0].say(stored(1, 2), stored(1, medium="CPU_PINNED"))
        daemons[1].say(stored(1))
        for daemon in daemons:
            serve(daemon, lambda d=daemon: mirror.catch_up(d.seq, 0.002, d.truth.rank))  # type: ignore[misc]
        assert mirror.longest_match([1, 2, 2, 3]) == {
            0: Match(4, {"GPU": 4, "CPU_PINNED": 2}),
            1: Match(2, {"GPU": 2}),
        }
        assert mirror.longest_match([9, 9], tier=Tier.HOST) == {0: Match(0, {}), 1: Match(0, {})}
        assert (mirror.ranks, mirror.exact, mirror.synced) == ([0, 1], True, True)
        assert (mirror.hashes("GPU", 0), mirror.hashes("GPU", 1)) == ({1, 2}, {1})
        with pytest.raises(BadRequest, match="rank 2 is not followed"):
            mirror.hashes("GPU", 2)


def test_a_stream_on_every_interface_is_dialled_on_this_host(daemon: Daemon) -> None:
    """A daemon in a container binds so, and tells those beside it what it has bound."""
    daemon.say(stored(1))
    endpoint, replay_endpoint = (text.replace("127.0.0.1", "*") for text in (daemon.endpoint, daemon.replay_endpoint))
    with Mirror(endpoint, replay_endpoint) as mirror:
        catch_up(daemon, mirror)
        assert_exact(daemon, mirror)


@pytest.mark.parametrize("endpoint", ["somewhere", "tcp://127.0.0.1:0", "inproc://here"])
def test_what_can_not_be_dialled_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="endpoint"):
        Mirror(endpoint)


def test_two_streams_of_one_rank_are_refused(daemon: Daemon) -> None:
    with pytest.raises(BadRequest, match="two streams of rank 0"):
        Mirror.of([Source(daemon.endpoint), Source(daemon.endpoint)])


# -- CURVE --------------------------------------------------------------------------------------------


def test_with_the_servers_key_the_stream_is_read_and_without_it_is_not(tmp_path: Path) -> None:
    public, secret = zmq.curve_keypair()
    context = zmq.Context()
    try:
        router, pub = context.socket(zmq.ROUTER), context.socket(zmq.XPUB)
        for sock in (router, pub):
            sock.curve_server, sock.curve_secretkey = True, secret
            sock.bind("tcp://127.0.0.1:*")
        endpoints = [sock.getsockopt_string(zmq.LAST_ENDPOINT) for sock in (pub, router)]
        wrong = zmq.curve_keypair()[0].decode()
        with (
            Mirror(*endpoints, curve=Curve(wrong)) as stranger,
            Mirror(*endpoints) as plain,
            Mirror(*endpoints, curve=Curve(public.decode())) as mirror,
        ):
            assert pub.poll(PATIENCE_S * 1000)
            assert pub.recv() == b"\1"
            assert router.poll(PATIENCE_S * 1000)
            identity, _, start = router.recv_multipart()
            assert start == bytes(8)
            router.send_multipart([identity, b"", b"", (5).to_bytes(8, "big"), payload(CLEARED, stored(1))])
            router.send_multipart([identity, b"", b"", b"\xff" * 8, b""])
            pub.send_multipart([b"", (6).to_bytes(8, "big"), payload(stored(2))])
            assert mirror.catch_up(6, PATIENCE_S)
            assert mirror.hashes("GPU") == {1, 2}
            for other in (stranger, plain):
                other.step(0)
                assert (other.batches, other.synced) == (0, False)
    finally:
        context.destroy(linger=0)


def test_what_is_no_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="Z85"):
        Mirror("tcp://127.0.0.1:1", curve=Curve("too short"))


# -- what it needs ------------------------------------------------------------------------------------


def test_it_loads_neither_torch_nor_numpy_nor_the_index() -> None:
    program = (
        "import json, sys, sglcache.client.mirror, sglcache.wire.events\n"
        "with sglcache.client.mirror.Mirror('tcp://127.0.0.1:1', hash_name='sha256') as mirror:\n"
        "    mirror.step(0)\n"
        "    mirror.longest_match([1, 2, 3])\n"
        "heavy = ('torch', 'numpy', 'ormsgpack', 'xxhash', 'pydantic', 'aiohttp', 'sglcache.core')\n"
        "print(json.dumps([name for name in sys.modules if name.startswith(heavy)]))"
    )
    root = Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == []
