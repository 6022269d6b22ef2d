"""Every hash on a real daemon's stream is what its tokens make it: an outsider computes it from the payloads alone.

The outsider has msgpack, hashlib and xxhash, and no code of the daemon's: a block's name is the first 8 bytes, as a
big-endian signed integer, of H(digest of the block before ‖ its tokens as uint32 LE), of bigrams both of each pair.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import xxhash
from streams import payloads

from sglcache.client import Client
from sglcache.testing.daemon import Daemon, until

HASHES: dict[str, Callable[[bytes], bytes]] = {
    "xxh3_128": lambda data: xxhash.xxh3_128(data).digest(),
    "sha256": lambda data: hashlib.sha256(data).digest(),
}
FIELDS = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
PAGES = 48  # of the device; twice as many of the host


class Stream(NamedTuple):
    page_size: int
    hash_name: str
    bigram: bool
    encoding: str


# Each page size with each hash and with both kinds of keys, which are with each hash.
STREAMS = (
    Stream(1, "xxh3_128", bigram=False, encoding="map"),
    Stream(1, "sha256", bigram=True, encoding="array"),
    Stream(16, "xxh3_128", bigram=True, encoding="map"),
    Stream(16, "sha256", bigram=False, encoding="array"),
    Stream(64, "xxh3_128", bigram=True, encoding="array"),
    Stream(64, "sha256", bigram=False, encoding="superset"),
    Stream(256, "xxh3_128", bigram=False, encoding="array"),
    Stream(256, "sha256", bigram=True, encoding="map"),
)


class Outsider:
    """Names every block that the stream tells of, and knows what it was told of before."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.digests: dict[int, bytes] = {}
        self.stored = 0
        self.removed = 0
        self.media: set[str] = set()

    def hear(self, payload: bytes) -> None:
        for raw in msgspec.msgpack.decode(payload)[1]:
            event = raw if isinstance(raw, dict) else self._of_array(raw)
            if event["type"] == "BlockStored":
                self._name(event)
            elif event["type"] == "BlockRemoved":
                assert event["block_hashes"]
                assert set(event["block_hashes"]) <= self.digests.keys()
                self.removed += len(event["block_hashes"])

    def _of_array(self, values: list[Any]) -> dict[str, Any]:
        if values[0] == "BlockRemoved":
            return {"type": values[0], "block_hashes": values[1]}
        return dict(zip(FIELDS, values, strict=len(values) > 1))

    def _name(self, event: dict[str, Any]) -> None:
        size, bigram = self.stream.page_size, self.stream.bigram
        hashes, tokens, parent = event["block_hashes"], event["token_ids"], event["parent_block_hash"]
        assert event["block_size"] == size
        assert len(tokens) == len(hashes) * size > 0
        words = np.array(tokens, "<u4")
        assert words.ndim == 1 + bigram
        if bigram:
            assert words.shape[1] == 2
            assert (words[1:, 0] == words[:-1, 1]).all(), "a pair begins where the one before it ended"
        digest = b"" if parent is None else self.digests[parent]
        for at, named in enumerate(hashes):
            digest = HASHES[self.stream.hash_name](digest + words[at * size : (at + 1) * size].tobytes())
            assert named == int.from_bytes(digest[:8], "big", signed=True)
            self.digests[named] = digest
        self.stored += len(hashes)
        self.media.add(event["medium"])


def work(client: Client, page_size: int) -> None:
    """Prompts that share beginnings, go on where others ended, and come back; more of them than the device holds."""
    choose = random.Random(page_size)
    prompts: list[list[int]] = []
    for _ in range(24):
        base = choose.choice(prompts) if prompts and choose.random() < 0.7 else []
        kept = base[: choose.randint(0, len(base))]
        fresh = choose.choices(
            (0, 1, 127, 128, 65_535, 65_536, 0xFFFFFFFF, 151_643), k=choose.randint(1, 6 * page_size)
        )
        prompts.append((kept + fresh)[: PAGES // 2 * page_size])
        tokens = prompts[-1]
        with client.acquire(tokens) as lease:
            lease.wait_loaded()
            for part in (len(tokens) // 2, len(tokens)):
                lease.commit(part)


@pytest.mark.parametrize("stream", STREAMS, ids=lambda it: f"{it.page_size}-{it.hash_name}-{it.bigram}-{it.encoding}")
def test_every_hash_is_that_of_its_tokens(tmp_path: Path, stream: Stream) -> None:
    tokens = PAGES * stream.page_size
    sections: dict[str, dict[str, Any]] = {
        "pool": {"page_size": stream.page_size, "num_tokens": tokens, "bigram": stream.bigram},
        "host": {"num_tokens": 2 * tokens},
        "events": {"hash": stream.hash_name, "encoding": stream.encoding},
    }
    with Daemon(tmp_path, **sections) as daemon:
        with daemon.client() as client:
            work(client, stream.page_size)
        status = daemon.settle()
        until(lambda: daemon.status()["stream"]["last_seq"] >= status["stream"]["next_seq"] - 1)
        facts = daemon.status()
        whole, late = Outsider(stream), Outsider(stream)
        for outsider, start in ((whole, facts["epoch"]), (late, 0)):
            for _, payload in payloads(facts["stream"]["replay_endpoint"], start):
                outsider.hear(payload)
        cached = {pool["tier"]: pool["cached"] for pool in facts["pools"]}
    counters = facts["counters"]
    assert (whole.stored, whole.removed) == (counters["blocks_stored"], counters["blocks_removed"])
    assert whole.removed > 0
    assert late.stored == sum(cached.values()), "a snapshot tells of all that is cached"
    assert late.digests.items() <= whole.digests.items()
    assert whole.media == late.media == {"GPU", "CPU_PINNED"}
