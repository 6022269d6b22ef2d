"""Cases from other systems' bug reports, as a router sees them: a real daemon, its stream, and a mirror.

The names (A05, ...) are those of the collection they were written from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from sglcache.client import Client
from sglcache.client.mirror import Fact, Match, Mirror
from sglcache.testing.daemon import Daemon, until
from sglcache.units import Tier
from sglcache.wire.events import AllBlocksCleared, BlockStored

PATIENCE_S = 15.0
TOPIC = "kv@10.0.0.5@m1"
END = [b"", b"", b"\xff" * 8, b""]
TIERS = (Tier.DEVICE, Tier.HOST)


def put(client: Client, tokens: list[int], **namespace: Any) -> None:
    with client.acquire(tokens, **namespace) as lease:
        lease.wait_loaded()
        lease.commit()


def mirror_of(daemon: Daemon, **options: Any) -> Mirror:
    stream = daemon.info["ranks"][0]["stream"]
    return Mirror(stream["endpoint"], stream["replay_endpoint"], **options)


def assert_exact(daemon: Daemon, mirror: Mirror) -> None:
    with daemon.observer() as observer:
        digest = observer.digest()
        assert mirror.catch_up(digest["seq"], PATIENCE_S), f"at {mirror.state.next_seq}, not at {digest['seq']}"
        assert mirror.check_digest(digest["seq"], digest["tiers"]) == []
        assert {tier: mirror.hashes(tier) for tier in TIERS} == {
            tier: set(observer.dump(tier).hashes) for tier in TIERS
        }


def test_a05_who_does_not_read_loses_and_is_made_whole_while_nobody_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue of 4 batches and a small ring; two subscribers sleep through 1,000 puts, and one of them wakes up.

    They are of 20 MB on the stream: the kernel has buffers, too.
    """
    monkeypatch.setattr("sglcache.client.mirror.LIVE_HWM", 4)
    pool = {"page_size": 16, "num_tokens": 16 * 256, "num_layers": 1, "num_kv_heads": 1, "head_dim": 1}
    events = {"ring_size": "64 KiB", "hwm": 4, "max_delay_ms": 0.0}
    daemon = Daemon(tmp_path, pool=pool, host={"num_tokens": 16 * 256}, events=events)
    try:
        with mirror_of(daemon) as sleeper, mirror_of(daemon) as mirror, daemon.client() as client:
            for each in (sleeper, mirror):
                assert each.catch_up(client.digest()["seq"], PATIENCE_S)
            until(lambda: daemon.status()["stream"]["subscriptions"] == 2)
            taken = []
            for number in range(1000):
                started = time.perf_counter()
                put(client, list(range((1 << 20) + number * 2048, (1 << 20) + (number + 1) * 2048)))
                taken.append(time.perf_counter() - started)
            daemon.settle()
            stream = client.status()["stream"]
            assert stream["ring_first_seq"] > mirror.state.next_seq, "the ring has all: this shows nothing"
            replays = mirror.replays
            assert_exact(daemon, mirror)
            assert mirror.replays > replays
            assert mirror.losses == 0
            assert sorted(taken)[990] < 1.0, "a put waited for a reader"
            started = time.monotonic()
            assert daemon.stop() == 0  # the sleeper is still there
            assert time.monotonic() - started < 10.0
    finally:
        daemon.kill()


class Asker:
    """Sockets that ask for replays in any form."""

    def __init__(self, daemon: Daemon) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sockets: list[zmq.Socket[bytes]] = []
        self.endpoint = daemon.info["ranks"][0]["stream"]["replay_endpoint"]

    def socket(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        self.sockets.append(self.context.socket(kind))
        self.sockets[-1].connect(endpoint)
        return self.sockets[-1]

    def ask(self, *frames: bytes, kind: int = zmq.DEALER) -> zmq.Socket[bytes]:
        sock = self.socket(kind, self.endpoint)
        sock.send_multipart(frames)
        return sock

    def answer(self, *frames: bytes) -> list[list[bytes]]:
        """Through its END."""
        sock = self.ask(*frames)
        messages: list[list[bytes]] = []
        while not messages or messages[-1] != END:
            assert sock.poll(PATIENCE_S * 1000), f"no END after {messages}"
            messages.append(sock.recv_multipart())
        assert not sock.poll(50), "something came after the END"
        return messages


@pytest.fixture
def replaying(lend: Callable[..., Daemon]) -> Iterator[tuple[Daemon, Asker]]:
    daemon = lend(events={"topic": TOPIC, "heartbeat_s": 60.0})
    asker = Asker(daemon)
    yield daemon, asker
    asker.context.destroy(linger=0)


def test_a06_what_is_replayed_is_what_was_live_however_it_is_asked_for(replaying: tuple[Daemon, Asker]) -> None:
    daemon, asker = replaying
    stream = daemon.info["ranks"][0]["stream"]
    sub = asker.socket(zmq.SUB, stream["endpoint"])
    sub.subscribe("kv@")
    until(lambda: daemon.status(prove=False)["stream"]["subscriptions"] == 1)
    with daemon.client() as client:
        for number in range(3):
            put(client, [number * 4 + each for each in range(4)])
            daemon.settle()
        last = client.digest()["seq"]
    live: list[list[bytes]] = []
    while not live or int.from_bytes(live[-1][1], "big") < last:
        assert sub.poll(PATIENCE_S * 1000)
        live.append(sub.recv_multipart())
    assert {frames[0] for frames in live} == {TOPIC.encode()}
    start = live[2][1]
    wanted = [[b"", *frames] for frames in live[2:]]
    assert asker.answer(b"", start) == [*wanted, END]  # (a)
    assert asker.answer(start) == [*wanted, END]  # (c) without the delimiter
    assert asker.answer(b"", (last + 1).to_bytes(8, "big")) == [END]  # (d)
    req = asker.ask(start, kind=zmq.REQ)  # (b) can read the first message, which is a batch, and no more
    assert req.poll(PATIENCE_S * 1000)
    assert req.recv_multipart() == live[2]


def test_a06_a_start_that_the_ring_has_left_behind_gets_a_snapshot_and_the_picture_is_exact(tmp_path: Path) -> None:
    with Daemon(tmp_path, events={"topic": TOPIC, "ring_size": "64 KiB"}) as daemon, daemon.client() as client:
        number = 0
        while client.status()["stream"]["ring_first_seq"] < client.epoch + 20:
            number += 1
            put(client, list(range(number * 100, number * 100 + 40)))
        daemon.settle()
        for since in (client.epoch, client.epoch + 5, 0):  # (e)
            with mirror_of(daemon, topic=TOPIC, since=since) as mirror:
                assert_exact(daemon, mirror)
                assert (mirror.exact, mirror.losses) == (True, 0)
                assert mirror.state.first_seq is not None
                assert mirror.state.first_seq > client.epoch + 20


def test_a06_who_subscribes_to_another_topic_hears_nothing_live(replaying: tuple[Daemon, Asker]) -> None:
    daemon, _ = replaying
    with mirror_of(daemon, topic="kv@10.0.0.6") as mirror, daemon.client() as client:
        assert mirror.catch_up(client.digest()["seq"], PATIENCE_S)
        put(client, [1, 2, 3, 4])
        assert not mirror.catch_up(client.digest()["seq"] + 1, 0.2)


def test_a18_a_lora_and_a_salt_of_one_name_are_never_each_others(lend: Callable[..., Daemon]) -> None:
    tokens = list(range(1, 9))
    daemon = lend()
    with daemon.client() as client, mirror_of(daemon) as mirror:
        put(client, tokens, lora="X")
        daemon.settle()
        assert_exact(daemon, mirror)
        assert mirror.longest_match(tokens, lora_name="X")[0].tokens == 8
        assert mirror.longest_match(tokens, cache_salt="X")[0] == Match(0, {})
        assert client.peek(tokens, cache_salt="X").matched_tokens == 0
        before = mirror.hashes(Tier.DEVICE)
        put(client, tokens, cache_salt="X")
        put(client, tokens, lora="a", cache_salt="bc")
        put(client, tokens, lora="ab", cache_salt="c")
        put(client, tokens, cache_salt="a\0b")
        put(client, tokens, cache_salt="")
        daemon.settle()
        assert_exact(daemon, mirror)
        held = mirror.hashes(Tier.DEVICE)
        assert len(held) == 12, "each namespace has its own hashes"
        assert before < held
        for lora, salt in ((None, "X"), ("a", "bc"), ("ab", "c"), (None, "a\0b"), (None, ""), (None, None)):
            assert mirror.longest_match(tokens, lora_name=lora, cache_salt=salt)[0].tokens == 8
        for lora, salt in (("ab", "bc"), ("a", "c"), ("abc", None), (None, "abc"), (None, "a"), ("a", "b")):
            assert mirror.longest_match(tokens, lora_name=lora, cache_salt=salt)[0].tokens == 0
        told = {block.cache_salt for block in mirror.blocks(Tier.DEVICE).values()}
        assert told == {None, "X", "bc", "c", "a\0b"}, "an empty salt is none on the wire, too"


def follow(mirror: Mirror, facts: list[Fact], until_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not until_so():
        assert time.monotonic() < deadline, "waited in vain"
        facts += mirror.step(0.05)


@pytest.mark.parametrize("keep", [True, False], ids=["the host tier survives", "nothing survives"])
def test_a21_a_restart_empties_the_picture_before_anything_new_is_told(tmp_path: Path, keep: bool) -> None:
    """The daemon dies and is back within a moment, and the mirror stays connected all the time."""
    tokens = list(range(1, 17))
    left = 16 if keep else 0
    with (
        Daemon(tmp_path, events={"heartbeat_s": 0.1}, host={"keep": keep}) as daemon,
        mirror_of(daemon) as mirror,
    ):
        with daemon.client() as client:
            put(client, tokens)
            daemon.settle()
            epoch = client.epoch
        assert_exact(daemon, mirror)
        assert mirror.longest_match(tokens)[0].tokens == 16
        daemon.next_life(daemon.kill_rank())
        facts: list[Fact] = []
        with daemon.client() as client:
            assert client.epoch > epoch
            follow(mirror, facts, lambda: any(isinstance(fact.event, AllBlocksCleared) for fact in facts))
            assert client.peek(tokens)[:2] == (0, left)
            assert_exact(daemon, mirror)
            assert not mirror.hashes("GPU")
            assert mirror.longest_match(tokens)[0].tokens == left
            put(client, tokens[:8])
            daemon.settle()
            follow(mirror, facts, lambda: len(mirror.hashes("GPU")) == 2)
        assert_exact(daemon, mirror)
        assert mirror.state.next_seq is not None
        assert mirror.state.next_seq > client.epoch
        first = next(fact for fact in facts if isinstance(fact.event, BlockStored))
        assert first.seq >= client.epoch
        assert mirror.losses == 0
