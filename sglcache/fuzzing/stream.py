"""What a router reads, and asks for: events, replays, and where they are."""

from __future__ import annotations

import contextlib
import io
import os
import random
import zlib
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import zmq

from sglcache.client.discovery import Server, decode_json, server_of
from sglcache.client.follower import Follower
from sglcache.errors import ProtocolError
from sglcache.net import endpoints
from sglcache.net.publisher import END_SEQ, Publisher
from sglcache.testing.fuzz import Decoder
from sglcache.wire.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, encode_batch

PAGE = 4  # tokens
encode = msgspec.msgpack.encode


def batches() -> list[bytes]:
    """Of every form."""
    stored = BlockStored([11, 12], None, list(range(8)), PAGE, None, "GPU", "s", "chat", "lora")
    pairs = BlockStored([13], 12, [(1, 2), (2, 3), (3, 4), (4, 5)], PAGE, None, "CPU_PINNED")
    window = BlockStored([11], None, [], PAGE, None, "GPU", group_idx=1, kv_cache_spec_kind="sliding_window")
    wide = {
        "type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1 << 40] * 4,
        "block_size": 4, "lora_id": None,
    }  # fmt: skip
    old: list[Any] = ["BlockStored", [21], None, list(range(4)), 4, None, "GPU", {"cache_salt": "s"}]
    return [
        encode_batch(Batch(1.0, [AllBlocksCleared()], 0)),
        encode_batch(Batch(2.0, [stored, pairs, window], 0)),
        encode_batch(Batch(3.0, [BlockRemoved([11, 99], "GPU"), BlockRemoved([13], "CPU_PINNED")], 0)),
        encode_batch(Batch(4.0, [], 0)),
        encode([5.0, [old, ["BlockRemoved", [21], "GPU"], ["AllBlocksCleared"]], 0]),
        encode([6.0, [{"type": "BlockMoved", "what": 1}, stored], None]),
        encode([7.0, [wide], 1]),
    ]  # fmt: skip


EVENT_WORDS = (
    b"BlockStored",
    b"BlockRemoved",
    b"AllBlocksCleared",
    b"block_hashes",
    b"token_ids",
    b"group_idx",
    b"\xc0",
)


class Events(Decoder):
    """Batches of the stream, by a mirror: live and replayed, their numbers as bad as their bytes.

    Taken in or not, what is matched afterwards is right or nothing, and a clean start makes it exact again.
    """

    name = "events"
    weight = 3
    form = "msgpack"
    words = EVENT_WORDS

    def __init__(self) -> None:
        super().__init__()
        self.corpus = batches()
        self.begin()

    def begin(self) -> None:
        self.follower = Follower(groups={})
        self.seq = 100

    def feed(self, data: bytes) -> None:
        dice = random.Random(zlib.crc32(data))
        follower = self.follower
        seq = (
            self.seq
            if dice.random() < 0.8
            else dice.choice((0, 1, self.seq - 1, self.seq + 3, (1 << 63), (1 << 64) - 1))
        )
        before = follower.bad_messages
        if dice.random() < 0.6:
            follower.live(seq, data)
        else:
            follower.replayed(seq, data)
            if dice.random() < 0.3:
                follower.end_replay()
            elif dice.random() < 0.1:
                follower.lost_replay()
        self.seq = max(1, min((follower.state.next_seq or self.seq) + 1, 1 << 40))
        picture = follower.state.picture
        if not any(held.withheld for held in picture._ranks.values()):
            for match in picture.longest_match(range(8), cache_salt="s", lora_name="lora").values():
                assert 0 <= match.tokens <= 8, match
        if dice.random() < 0.01 or len(picture.ranks) > 64:
            self.check()
        if follower.bad_messages > before:
            raise ProtocolError("it was no batch")

    def check(self) -> None:
        """Whatever it is told then: a first batch and what follows is taken in."""
        follower = self.follower
        follower.live(1 << 50, batches()[0])
        if not follower.synced:
            follower.end_replay()
        follower.live(
            (1 << 50) + 1, encode_batch(Batch(1e300, [BlockStored([1], None, [1, 2, 3, 4], 4, None, "GPU")], 0))
        )
        if follower.synced and follower.state.exact:
            assert follower.state.hashes("GPU") == {1}, follower.state.hashes("GPU")
        for held in follower.state.picture._ranks.values():
            for name, tier in held.tiers.items():
                assert held.sums[name] == sum(tier) & (1 << 64) - 1, "a digest is off"
                for key in tier.values():
                    held.unpack(key)
        self.begin()


class SubscribeScript(Decoder):
    """Batches of the stream, by scripts/subscribe.py, where this is a checkout."""

    name = "subscribe"
    weight = 0.2
    form = "msgpack"
    words = EVENT_WORDS
    path: ClassVar[Path] = Path(__file__).parents[2] / "scripts" / "subscribe.py"

    def __init__(self) -> None:
        super().__init__()
        import runpy
        from argparse import Namespace as Arguments

        self.corpus = batches()
        self.script = runpy.run_path(os.fspath(self.path))
        self.arguments = [Arguments(raw=False, json=as_json, heartbeats=True) for as_json in (False, True)]
        self.seen = self.script["Seen"]()

    def feed(self, data: bytes) -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            for arguments in self.arguments:
                events = self.script["read"](arguments, (7, data, False), self.seen)
            self.script["_starts_anew"](data)
            self.script["_is_another_life"](3, data, data)
        if events is None:
            raise ProtocolError("it was no batch")


class Replays(Decoder):
    """Requests for a replay, of any number of frames and any size, by the rank's ROUTER."""

    name = "replays"
    weight = 0.1
    form = "msgpack"  # a list of the frames

    def __init__(self) -> None:
        super().__init__()
        number = (5).to_bytes(8, "big")
        self.corpus = [
            encode(each) for each in ([b"", number], [number], [b"", b"", number], [b"", bytes(8)], [b"x"] * 40)
        ]
        self.publisher = Publisher(
            endpoints.parse("tcp://127.0.0.1:0"), endpoints.parse("tcp://127.0.0.1:0"), replay_hwm=1000
        )
        for seq in range(3, 12):
            self.publisher.append(seq, batches()[3])
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.dealer = self.connect()
        self.live = self.context.socket(zmq.XSUB)
        self.live.setsockopt(zmq.LINGER, 0)
        self.live.connect(self.publisher.endpoint)

    def connect(self) -> zmq.Socket[bytes]:
        assert self.publisher.replay_endpoint is not None
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(self.publisher.replay_endpoint)
        return dealer

    def feed(self, data: bytes) -> None:
        frames: list[bytes] = []
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            found = msgspec.msgpack.decode(data)
            frames = (
                [each if isinstance(each, bytes) else repr(each).encode()[:5000] for each in found]
                if isinstance(found, list)
                else []
            )
        before = self.publisher.stats().malformed_requests
        with contextlib.suppress(zmq.Again):
            self.dealer.send_multipart(frames or [data[:5000]], zmq.NOBLOCK)
            if zlib.crc32(data) % 4 == 0:
                self.live.send(data[:5000], zmq.NOBLOCK)
        self.publisher.service()
        if any(len(frame) > 4096 for frame in frames or [data[:5000]]):
            # libzmq ends that connection. Not at once: 4.3.5 aborts where a socket is closed that is in the midst of a
            # message just when its peer goes (session_base.cpp, clean_pipes).
            self.dealer.close(linger=1000)
            self.dealer = self.connect()
        with contextlib.suppress(zmq.Again):
            while True:
                self.dealer.recv_multipart(zmq.NOBLOCK)
        if self.publisher.stats().malformed_requests > before:
            raise ProtocolError("it was no request")

    def check(self) -> None:
        """Another reader gets what it asks for, to the end."""
        with self.connect() as dealer:
            dealer.send_multipart([b"", (5).to_bytes(8, "big")])
            got: list[bytes] = []
            while not got or got[-1] != END_SEQ:
                self.publisher.service()
                if dealer.poll(1):
                    got.append(dealer.recv_multipart()[-2])
            assert [int.from_bytes(each, "big") for each in got[:-1]] == list(range(5, 12)), got

    def close(self) -> None:
        self.publisher.close(linger_s=0)
        self.context.destroy(linger=0)


class ServerInfo(Decoder):
    """What a server's GET /server_info says, by a mirror and `sglcache doctor`."""

    name = "server_info"
    weight = 1.5
    form = "json"
    words = (b"kv_events", b"null", b"groups", b"65535", b"1e400")

    def __init__(self) -> None:
        super().__init__()
        block = {
            "endpoint_host": "*", "endpoint_port_base": 5557, "block_size": 4, "dp_size": 2, "topic": "",
            "publisher": "zmq", "replay_endpoint_port_base": 5657,
        }  # fmt: skip
        info = {
            "kv_events": block,
            "hash": "xxh3_128",
            "bigram": False,
            "groups": [{"group_idx": 1, "kind": "sliding_window", "window": 8}],
            "ranks": [{"rank": 2, "pp_rank": 1, "stream": {"endpoint": "tcp://*:5559", "replay_endpoint": None}}],
        }
        import json

        self.corpus = [json.dumps(info).encode(), json.dumps({"kv_events": block}).encode(), b"{}"]

    def feed(self, data: bytes) -> None:
        server: Server = server_of("http://127.0.0.1:1", decode_json(data))
        _ = server.bigram, server.groups, server.later_stages
        assert len(server.sources) <= 65535
