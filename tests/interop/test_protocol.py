"""The stream and its replay as a stranger's sockets see them: frames, numbers, requests good and bad.

Nothing here is ours but the daemon; it needs no consumer that would have to be installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from socket import gethostname
from typing import Any, NamedTuple

import msgspec
import pytest
import zmq

from sglcache.testing.daemon import Daemon, until

END = [b"", b"", b"\xff" * 8, b""]
HEARD_MS = 10_000


class Seen(NamedTuple):
    """What a subscriber had live, and the daemon that sent it, which is idle now."""

    daemon: Daemon
    batches: dict[int, bytes]

    @property
    def first(self) -> int:
        return min(self.batches)

    @property
    def replay(self) -> str:
        endpoint: str = self.daemon.info["stream"]["replay_endpoint"]
        return endpoint


@contextmanager
def connected(kind: int, endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        yield socket


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """Some commits, evictions and a clear, as they came; no heartbeat comes between."""
    with ExitStack() as opened:
        events = {"heartbeat_s": 60, "topic": "kv"}
        daemon = opened.enter_context(Daemon(tmp_path_factory.mktemp("daemon"), events=events))
        subscriber = opened.enter_context(connected(zmq.SUB, daemon.info["stream"]["endpoint"]))
        subscriber.subscribe("")
        until(lambda: daemon.status(prove=False)["stream"]["subscriptions"] == 1)
        with daemon.client() as client:
            for number in range(60):
                with client.acquire(range(number, number + 40), cache_salt="t" if number % 3 else None) as lease:
                    lease.wait_loaded()
                    lease.commit()
        daemon.settle()
        with daemon.admin() as admin:
            admin.clear()
        last = daemon.status()["stream"]["last_seq"]
        batches: dict[int, bytes] = {}
        while last not in batches:
            assert subscriber.poll(HEARD_MS)
            topic, seq, payload = subscriber.recv_multipart()
            assert topic == b"kv"
            assert len(seq) == 8
            batches[int.from_bytes(seq, "big")] = payload
        yield Seen(daemon, batches)


def number(seq: int) -> bytes:
    return seq.to_bytes(8, "big")


class Asker:
    """A DEALER, which sends what it is told to."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket

    def ask(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def answer(self) -> list[list[bytes]]:
        """Every message before the END, as frames."""
        messages = []
        while True:
            assert self.socket.poll(HEARD_MS), f"no END after {len(messages)} messages"
            messages.append(self.socket.recv_multipart())
            if messages[-1] == END:
                return messages[:-1]


@pytest.fixture
def asker(seen: Seen) -> Iterator[Asker]:
    with connected(zmq.DEALER, seen.replay) as socket:
        yield Asker(socket)


def test_batches_are_arrays_of_three_with_an_integer_rank_and_their_numbers_have_no_hole(seen: Seen) -> None:
    assert list(seen.batches) == list(range(seen.first, seen.first + len(seen.batches)))
    kinds = set()
    for payload in seen.batches.values():
        ts, events, rank = msgspec.msgpack.decode(payload)
        assert type(ts) is float
        assert type(rank) is int
        kinds |= {event["type"] for event in events}
        assert all(event["medium"] in ("GPU", "CPU_PINNED") for event in events if event["type"] != "AllBlocksCleared")
    assert kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}


@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_a_replay_is_what_was_live_from_the_number_asked_for(place: float, seen: Seen, asker: Asker) -> None:
    start = seen.first + round(place * (len(seen.batches) - 1))
    asker.ask(b"", number(start))
    expected = [[b"", b"kv", number(seq), payload] for seq, payload in seen.batches.items() if seq >= start]
    assert asker.answer() == expected


def test_a_replay_from_the_future_is_its_end(seen: Seen, asker: Asker) -> None:
    for start in (max(seen.batches) + 1, (1 << 63) - 1, (1 << 64) - 1):
        asker.ask(b"", number(start))
        assert asker.answer() == []


def test_a_replay_from_the_lifes_first_number_begins_with_the_life(seen: Seen, asker: Asker) -> None:
    asker.ask(b"", number(seen.daemon.info["epoch"]))
    events = [event for frames in asker.answer() for event in msgspec.msgpack.decode(frames[-1])[1]]
    assert events[0] == {"type": "AllBlocksCleared"}
    assert len(events) > len(seen.batches)


@pytest.mark.parametrize(
    "request_frames",
    [
        [b""],
        [b"", b""],
        [b"", b"abc"],
        [b"", b"\0" * 9],
        [b"", b"", b"\0" * 8],
        [b"", b"\0" * 8, b"\0" * 8],
        [b"", msgspec.msgpack.encode({"start_seq": 0})],
    ],
)
def test_after_a_malformed_request_a_good_one_is_answered(
    request_frames: list[bytes], seen: Seen, asker: Asker
) -> None:
    before = seen.daemon.status()["stream"]
    asker.ask(*request_frames)
    asker.ask(b"", number(seen.first))
    assert asker.answer() == []  # the malformed one's: a reader that waits for an END is not left waiting
    assert len(asker.answer()) == len(seen.batches)
    after = seen.daemon.status()["stream"]
    assert after["malformed_requests"] == before["malformed_requests"] + 1
    assert after["replay_requests"] == before["replay_requests"] + 1


def test_a_message_beyond_every_limit_costs_nobody_else_anything(seen: Seen, asker: Asker) -> None:
    """It costs its sender the connection."""
    with connected(zmq.DEALER, seen.replay) as stranger:
        stranger.send_multipart([b"", b"x" * (2 << 20)])
        asker.ask(b"", number(seen.first))
        assert len(asker.answer()) == len(seen.batches)


def test_readers_at_once_each_get_all_of_it(seen: Seen) -> None:
    with ExitStack() as opened:
        askers = [Asker(opened.enter_context(connected(zmq.DEALER, seen.replay))) for _ in range(8)]
        for asker in askers:
            asker.ask(b"", number(seen.first))
        for asker in askers:
            assert [frames[-1] for frames in asker.answer()] == list(seen.batches.values())


def test_a_request_without_the_delimiter_is_a_request(seen: Seen, asker: Asker) -> None:
    """AIBrix sends it so."""
    asker.ask(number(seen.first))
    assert len(asker.answer()) == len(seen.batches)


def test_a_req_socket_reads_the_first_message_alone(seen: Seen) -> None:
    """vLLM's example asks with one. What it reads unpacks as its later form does: topic, number, payload."""
    with connected(zmq.REQ, seen.replay) as req:
        for start in (seen.first, max(seen.batches)):  # and it can ask again
            req.send(number(start))
            assert req.poll(HEARD_MS)
            assert req.recv_multipart() == [b"kv", number(start), seen.batches[start]]
            assert not req.poll(200)


# The events as vLLM's own reader types them since its events became maps: lora_name and medium have no default there.


class VllmEvent(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class VllmStored(VllmEvent, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class VllmRemoved(VllmEvent, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class VllmCleared(VllmEvent, tag="AllBlocksCleared"):
    pass


class VllmBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[VllmStored | VllmRemoved | VllmCleared]
    data_parallel_rank: int | None = None


def test_vllms_types_miss_lora_name_in_sglangs_maps(seen: Seen) -> None:
    (payload, *_) = (payload for payload in seen.batches.values() if b"BlockStored" in payload)
    with pytest.raises(msgspec.ValidationError, match="lora_name"):
        msgspec.msgpack.decode(payload, type=VllmBatch)


def test_the_superset_suits_vllms_types(tmp_path: Path) -> None:
    with ExitStack() as opened:
        daemon = opened.enter_context(Daemon(tmp_path, events={"encoding": "superset"}))
        with daemon.client() as client, client.acquire(range(40), cache_salt="t") as lease:
            lease.commit()
        daemon.settle()
        with daemon.admin() as admin:
            admin.clear("host")
            admin.clear()
        asker = Asker(opened.enter_context(connected(zmq.DEALER, daemon.info["stream"]["replay_endpoint"])))
        asker.ask(b"", number(daemon.info["epoch"]))
        batches = [msgspec.msgpack.decode(frames[-1], type=VllmBatch) for frames in asker.answer()]
        kinds = {type(event) for batch in batches for event in batch.events}
        assert kinds == {VllmStored, VllmRemoved, VllmCleared}


def test_windows_and_states_suit_vllms_types_and_have_the_kinds_that_it_knows(tmp_path: Path) -> None:
    model = {
        "window": {"size": 8, "num_layers": 1, "num_tokens": 64},
        "mamba": {"num_layers": 1, "num_slots": 4, "states": [{"name": "ssm", "shape": [8], "dtype": "float32"}]},
    }
    with ExitStack() as opened:
        daemon = opened.enter_context(Daemon(tmp_path, **model, events={"encoding": "superset", "groups": True}))
        with daemon.client() as client:
            for first in range(8):
                with client.acquire(range(first, first + 40), states=1) as lease:
                    assert lease.mamba is not None
                    lease.commit(states=[(40, int(lease.mamba.slots[0]))])
        daemon.settle()
        asker = Asker(opened.enter_context(connected(zmq.DEALER, daemon.info["stream"]["replay_endpoint"])))
        asker.ask(b"", number(daemon.info["epoch"]))
        batches = [msgspec.msgpack.decode(frames[-1], type=VllmBatch) for frames in asker.answer()]
    stored = {
        (event.group_idx, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window)
        for batch in batches
        for event in batch.events
        if isinstance(event, VllmStored)
    }
    assert stored == {(None, None, None), (1, "sliding_window", 8), (2, "mamba", None)}
    removed = {event.group_idx for batch in batches for event in batch.events if isinstance(event, VllmRemoved)}
    assert removed == {None, 1, 2}


def test_ranks_that_dial_a_subscriber_that_binds_are_told_apart_by_their_topics(tmp_path: Path) -> None:
    """llm-d's way: one subscriber, and topics of the form kv@pod@model."""
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        port = subscriber.bind_to_random_port("tcp://127.0.0.1")
        subscriber.subscribe("kv@")
        events = {"mode": "connect", "endpoint": f"tcp://127.0.0.1:{port}", "topic": "kv@{host}-{rank}@{model}"}
        with Daemon(tmp_path, dp_size=2, events={**events, "heartbeat_s": 0.2}) as daemon:
            told: dict[bytes, set[int]] = {}
            while len(told) < 2:
                assert subscriber.poll(HEARD_MS)
                topic, _, payload = subscriber.recv_multipart()
                told.setdefault(topic, set()).add(msgspec.msgpack.decode(payload)[2])
            host = gethostname()
            assert told == {f"kv@{host}-{rank}@test".encode(): {rank} for rank in range(2)}
            assert daemon.info["kv_events"] is None  # nobody can dial it
