"""What a stream says, in a few letters; and ports to say it at."""

from __future__ import annotations

import random
import socket
from typing import Any

from sglcache.wire.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, Event, encode_batch

CLEARED = AllBlocksCleared()


def stored(*hashes: int, parent: int | None = None, medium: str = "GPU", **extra: Any) -> BlockStored:
    return BlockStored(
        list(hashes), parent, [t for h in hashes for t in (abs(h), abs(h) + 1)], 2, None, medium, **extra
    )


def removed(*hashes: int, medium: str = "GPU") -> BlockRemoved:
    return BlockRemoved(list(hashes), medium)


def batch(*events: Event, rank: int | None = 0, ts: float = 0.0) -> Batch:
    return Batch(ts, list(events), rank)


def payload(*events: Event, rank: int | None = 0, ts: float = 0.0) -> bytes:
    return encode_batch(batch(*events, rank=rank, ts=ts))


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody had a moment ago."""
    while True:
        base = random.randrange(20_000, 32_000)
        socks = [socket.socket() for _ in range(count)]
        try:
            for offset, sock in enumerate(socks):
                sock.bind(("127.0.0.1", base + offset))
            return base
        except OSError:
            continue
        finally:
            for sock in socks:
                sock.close()
