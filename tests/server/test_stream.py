"""The stream of a real daemon: whoever comes, whenever, has what the index has; and how it is told is configured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from sglcache import config as configuration
from sglcache.client import Client
from sglcache.client.mirror import Mirror
from sglcache.errors import BadRequest, ConfigError
from sglcache.server.plan import kv_events, plan
from sglcache.testing.daemon import Daemon, until

END = b"\xff" * 8
RING = 1 << 16  # the smallest there is


@pytest.fixture
def small_ring(lend: Callable[..., Daemon]) -> Daemon:
    return lend(events={"ring_size": f"{RING} B"})


def put(client: Client, tokens: list[int], **namespace: Any) -> None:
    with client.acquire(tokens, **namespace) as lease:
        lease.wait_loaded()
        lease.commit()


def churn(client: Client, rounds: int = 200) -> None:
    """More than a small ring holds: prompts that share a beginning, in a pool too small for them."""
    for number in range(rounds):
        put(client, [*range(number % 7 * 1000, number % 7 * 1000 + 64), *range(number * 100, number * 100 + 40)])


def truth(daemon: Daemon) -> dict[str, set[int]]:
    with daemon.observer() as observer:
        return {medium: set(observer.dump(tier).hashes) for tier, medium in MEDIA.items()}


MEDIA = {"DEVICE": "GPU", "HOST": "CPU_PINNED"}


def sums(hashes: set[int]) -> list[int]:
    return [len(hashes), sum(hashes) % (1 << 64)]


def ask(endpoint: str, start: int) -> list[list[bytes]]:
    """All frames of a replay, without its END."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(endpoint)
        dealer.send_multipart([b"", start.to_bytes(8, "big")])
        return list(iter(dealer.recv_multipart, [b"", b"", END, b""]))


def mirror_of(daemon: Daemon) -> Mirror:
    stream = daemon.info["stream"]
    return Mirror(stream["endpoint"], stream["replay_endpoint"])


def test_who_joins_after_the_ring_has_turned_over_is_exact_and_so_is_the_digest(small_ring: Daemon) -> None:
    with small_ring.client() as client:
        before = client.status()["stream"]["snapshots_done"]
        churn(client)
        small_ring.settle()
        assert client.status()["stream"]["ring_first_seq"] > client.epoch, "the ring has all: this shows nothing"
        with mirror_of(small_ring) as mirror:
            digest = client.digest()
            assert mirror.catch_up(digest["seq"], 10.0)
            exact = truth(small_ring)
            assert {medium: mirror.hashes(medium) for medium in MEDIA.values()} == exact
            assert digest["tiers"] == {tier: sums(exact[medium]) for tier, medium in MEDIA.items()}
            assert client.status()["stream"]["snapshots_done"] == before + 1


def test_who_joins_in_the_middle_of_a_storm_is_exact_in_the_end(small_ring: Daemon) -> None:
    with small_ring.client() as client, contextlib.ExitStack() as stack:
        joined = []
        for number in range(6):
            joined.append(stack.enter_context(mirror_of(small_ring)))
            churn(client, 40 + number)
        small_ring.settle()
        last = client.digest()["seq"]
        exact = truth(small_ring)
        for mirror in joined:
            assert mirror.catch_up(last, 20.0)
            assert {medium: mirror.hashes(medium) for medium in MEDIA.values()} == exact


def test_an_announcement_sets_right_who_can_t_ask(small_ring: Daemon) -> None:
    """A subscriber without replay that came late, as RadixView is one."""
    with small_ring.client() as client:
        churn(client, 50)
        small_ring.settle()
        with Mirror(small_ring.info["stream"]["endpoint"]) as late:
            until(lambda: client.status()["stream"]["subscriptions"] == 1)
            client.announce()
            until(lambda: not client.digest()["announcing"])
            assert late.catch_up(client.digest()["seq"], 10.0)
            assert {medium: late.hashes(medium) for medium in MEDIA.values()} == truth(small_ring)


def test_announcing_by_itself(tmp_path: Path) -> None:
    with Daemon(tmp_path, events={"announce_every_s": 0.2}) as daemon, daemon.client() as client:
        put(client, list(range(40)))
        daemon.settle()
        with Mirror(daemon.info["stream"]["endpoint"]) as late:
            until(lambda: late.step(0.05) is not None and len(late.hashes("GPU")) == 10)


def test_without_events_there_is_nothing_to_announce(lend: Callable[..., Daemon]) -> None:
    with lend(events={"enabled": False}).client() as client:
        with pytest.raises(BadRequest, match="events are off"):
            client.announce()
        assert client.digest()["tiers"] == {}


@pytest.mark.parametrize("encoding", ["map", "array", "superset"])
def test_the_encoding_is_that_of_the_live_stream_of_replay_and_of_snapshots(tmp_path: Path, encoding: str) -> None:
    format = {"encoding": encoding, "token_ids": "none", "cache_salt": "hashed", "topic": "kv@{rank}@{model}"}
    with Daemon(tmp_path, events=format) as daemon, daemon.client() as client:
        put(client, list(range(8)), cache_salt="secret")
        daemon.settle()
        stream = daemon.info["stream"]
        for start in (0, client.epoch):
            events = []
            for frames in ask(stream["replay_endpoint"], start):
                assert frames[1] == b"kv@0@test"
                assert b"secret" not in frames[3]
                events += msgspec.msgpack.decode(frames[3])[1]
            kinds = [event[0] if encoding == "array" else event["type"] for event in events]
            assert kinds == ["AllBlocksCleared", "BlockStored", "BlockStored"]
            stored = events[1]
            assert (stored[3] if encoding == "array" else stored["token_ids"]) == []
            assert ("lora_name" in stored) is (encoding == "superset")


def test_topics_name_host_model_and_rank() -> None:
    events = {"topic": "{{kv}}@{model}@{rank}@{dp_rank}@{pp_rank}"}
    made = configuration.parse({"model_name": "m", "events": events, "parallel": {"dp_size": 2, "pp_size": 3}})
    seats = plan(made)
    assert [seat.topic for seat in seats if seat.offset in (0, 5)] == ["{kv}@m@0@0@0", "{kv}@m@5@1@2"]
    block = kv_events(made, seats)
    assert block is not None
    assert block["topic"] == "{kv}@m@", "a prefix, as ZMQ subscribes, that is every rank's"
    with pytest.raises(ConfigError, match=r"events\.topic"):
        configuration.parse({"events": {"topic": "{pod}"}})
