"""Reported faults of other publishers, as inputs to a real daemon, each with its right result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from sglcache.client import Client
from sglcache.client.mirror import Mirror
from sglcache.errors import BadRequest, Unavailable
from sglcache.testing.daemon import Daemon, until

MEDIA = {"DEVICE": "GPU", "HOST": "CPU_PINNED"}
END = [b"", b"", b"\xff" * 8, b""]
TOPIC = "kv@10.0.0.5@m1"

# The publisher's socket takes nothing while a file is there.
STUCK = """
import os
from sglcache.net.publisher import Publisher
send = Publisher._send_live
Publisher._send_live = lambda self, entry: not os.path.exists({path!r}) and send(self, entry)
"""


def put(client: Client, tokens: Any, **namespace: Any) -> None:
    with client.acquire(tokens, **namespace) as lease:
        lease.wait_loaded()
        lease.commit()


def exact(daemon: Daemon, mirror: Mirror) -> bool:
    with daemon.observer() as observer:
        assert mirror.catch_up(observer.digest()["seq"], 10.0)
        return all(mirror.hashes(medium) == set(observer.dump(tier).hashes) for tier, medium in MEDIA.items())


def test_a_stuck_publisher_delays_nobody_and_what_is_lost_is_counted_shown_and_healed(tmp_path: Path) -> None:
    """A05: elsewhere a full queue blocks the engine for ever, and shutdown fails, too."""
    flag = tmp_path / "stuck"
    events = {"ring_size": "64 KiB"}
    daemon = Daemon(tmp_path / "daemon", events=events, prelude=STUCK.format(path=str(flag)))
    client = daemon.client()
    stream = daemon.status()["stream"]
    with Mirror(stream["endpoint"], stream["replay_endpoint"]) as mirror:
        put(client, range(4))
        daemon.settle()
        assert exact(daemon, mirror)
        flag.touch()
        for number in range(1000):
            put(client, range(1000 + 4 * number, 1004 + 4 * number))
        assert client.status()["stream"]["batches_skipped"] > 0
        flag.unlink()
        daemon.settle()
        assert exact(daemon, mirror)
        assert mirror.replays > 1, "the gap was seen, and asked for"
    flag.touch()
    for number in range(1000):
        put(client, range(9000 + 4 * number, 9004 + 4 * number))
    client.close()
    started = time.monotonic()
    assert daemon.stop() == 0, daemon.said()
    assert time.monotonic() - started < 10.0


@pytest.fixture
def dealers() -> Iterator[Any]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    asked: list[zmq.Socket[bytes]] = []

    def ask(endpoint: str, *frames: bytes, kind: int = zmq.DEALER) -> zmq.Socket[bytes]:
        asked.append(context.socket(kind))
        asked[-1].connect(endpoint)
        asked[-1].send_multipart(frames)
        return asked[-1]

    yield ask
    context.destroy(linger=0)


def answer(sock: zmq.Socket[bytes]) -> list[list[bytes]]:
    messages = []
    while True:
        assert sock.poll(10_000), f"silence after {len(messages)} messages"
        messages.append(sock.recv_multipart())
        if messages[-1] == END:
            return messages[:-1]


def test_replay_is_the_live_frames_again_whoever_asks(tmp_path: Path, dealers: Any) -> None:
    """A06: topic, number and payload as they were live, one end, and an answer to whatever is asked."""
    with (
        Daemon(tmp_path, events={"topic": TOPIC, "ring_size": "64 KiB", "heartbeat_s": 60.0}) as daemon,
        daemon.client() as client,
    ):
        stream = daemon.status()["stream"]
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        with context, context.socket(zmq.SUB) as sub:
            sub.subscribe("kv@")
            sub.connect(stream["endpoint"])
            until(lambda: client.status()["stream"]["subscriptions"] == 1)
            live: list[list[bytes]] = []
            for number in range(6):
                put(client, range(4 * number, 4 * number + 4))
                until(lambda told=number + 1: client.digest()["tiers"]["HOST"][0] == told)  # type: ignore[misc]
            last = client.digest()["seq"].to_bytes(8, "big")
            while not live or live[-1][1] != last:
                assert sub.poll(10_000)
                live.append(sub.recv_multipart())
        assert len(live) >= 6
        third = live[2][1]
        replay = stream["replay_endpoint"]
        want = [[b"", *frames] for frames in live[2:]]
        assert all(frames[0] == TOPIC.encode() for frames in live)
        assert answer(dealers(replay, b"", third)) == want
        assert answer(dealers(replay, third)) == want, "without the delimiter"
        req = dealers(replay, third, kind=zmq.REQ)
        assert req.poll(10_000)
        assert req.recv_multipart() == want[0][1:], "a REQ socket reads the first message, and no more"
        after = (int.from_bytes(live[-1][1], "big") + 1).to_bytes(8, "big")
        assert answer(dealers(replay, b"", after)) == []
        for number in range(400):
            put(client, range(4 * number, 4 * number + 40))
        daemon.settle()
        assert client.status()["stream"]["ring_first_seq"] > int.from_bytes(third, "big")
        frames = answer(dealers(replay, b"", third))
        events = [event for each in frames for event in msgspec.msgpack.decode(each[3])[1]]
        assert events[0] == {"type": "AllBlocksCleared"}
        picture: dict[str, set[int]] = {medium: set() for medium in MEDIA.values()}
        for event in events[1:]:
            change = picture[event["medium"]].update if event["type"] == "BlockStored" else None
            (change or picture[event["medium"]].difference_update)(event["block_hashes"])
        with daemon.observer() as observer:
            assert picture == {medium: set(observer.dump(tier).hashes) for tier, medium in MEDIA.items()}


def test_namespaces_are_three_and_none_is_another(lend: Callable[..., Daemon]) -> None:
    """A18, on the wire as in the cache: a lora X is no salt X, no two parts join to one, and an empty one is none."""
    daemon = lend(events={"heartbeat_s": 60.0})
    with daemon.client() as client:
        tokens = list(range(8))
        put(client, tokens, lora="X")
        assert client.peek(tokens, cache_salt="X").matched_tokens == 0
        put(client, tokens, cache_salt="a", extra_key="bc")
        assert client.peek(tokens, cache_salt="ab", extra_key="c").matched_tokens == 0
        put(client, tokens, cache_salt="X")
        put(client, tokens)
        assert client.peek(tokens, cache_salt="").matched_tokens == 8, "an empty salt is none"
        put(client, tokens, cache_salt="a\0b")
        assert client.peek(tokens, cache_salt="a").matched_tokens == 0
        with pytest.raises(BadRequest, match="cache_salt"):
            client.peek(tokens, cache_salt="s" * 10_000)
        daemon.settle()
        stream = client.status()["stream"]
        with Mirror(stream["endpoint"], stream["replay_endpoint"]) as mirror:
            assert exact(daemon, mirror)
            known = [(block.lora_name, block.cache_salt) for block in mirror.blocks("GPU").values()]
            assert sorted(set(known), key=str) == sorted(
                [("X", None), (None, "X"), (None, None), (None, "a\0b")], key=str
            )
            assert len(mirror.hashes("GPU")) == 8, "two of each, and of the extra_key's none"


def test_a_router_is_set_right_by_a_restart_within_a_second(tmp_path: Path) -> None:
    """A21: the new life's first batch empties the picture, its epoch is another, and the old client knows."""
    with Daemon(tmp_path) as daemon:
        stream = daemon.status()["stream"]
        client = daemon.client()
        put(client, range(16))
        daemon.settle()
        with Mirror(stream["endpoint"], stream["replay_endpoint"]) as mirror:
            assert exact(daemon, mirror)
            assert len(mirror.hashes("GPU")) == 4
            rank = daemon.rank(0)
            before = rank.epoch
            rank.next_life(rank.kill_rank())
            with pytest.raises(Unavailable):
                client.acquire(list(range(16)))
            client.close()
            assert exact(daemon, mirror)
            assert mirror.hashes("GPU") == set()
            assert len(mirror.hashes("CPU_PINNED")) == 4
            with daemon.client() as again:
                assert again.epoch > before
                assert again.peek(range(16))[:2] == (0, 16)
                put(again, range(16))
            daemon.settle()
            assert exact(daemon, mirror)
            assert len(mirror.hashes("GPU")) == 4


def test_what_an_idle_daemon_does_by_itself_is_told_without_waiting_for_others(lend: Callable[..., Daemon]) -> None:
    """Copies' ends and clears, with the next heartbeat a minute away: nothing else comes to take them along."""
    daemon = lend(events={"heartbeat_s": 60.0})
    with daemon.client() as client:
        stream = client.status()["stream"]
        with Mirror(stream["endpoint"], stream["replay_endpoint"]) as mirror:
            put(client, range(16))
            until(lambda: mirror.step(0.05) is not None and len(mirror.hashes("CPU_PINNED")) == 4)
            daemon.settle()
            with daemon.admin() as admin:
                admin.clear("HOST")
                until(lambda: mirror.step(0.05) is not None and not mirror.hashes("CPU_PINNED"))
                admin.clear()
            until(lambda: mirror.step(0.05) is not None and not mirror.hashes("GPU"))
