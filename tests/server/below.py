"""Daemons with a third tier for tests: in a folder that outlives them, with pages whose every byte is known."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sglcache.client import Client, Lease
from sglcache.client.mirror import Mirror
from sglcache.errors import Busy
from sglcache.testing.daemon import Daemon, Served, until

SMALL = {"kind": "file", "prefetch_threshold": 4, "prefetch_policy": "wait_complete"}
ONE = range(1, 65)  # 16 pages


def daemon_over(folder: Path, name: str = "daemon", **sections: Any) -> Daemon:
    storage = {**SMALL, "path": str(folder / "l3"), **sections.pop("storage", {})}
    return Daemon(folder / name, storage=storage, **sections)


def put(client: Client, tokens: Any, value: int, **options: Any) -> None:
    """Compute what the cache lacks: each page's bytes follow from `value` and its number."""
    with client.acquire(tokens, **options) as lease:
        lease.wait_loaded()
        for i in range(lease.matched_tokens // 4, len(lease.slots)):
            write(client, lease.slots[i], value, i)
        lease.commit()


def write(client: Client, slot: int, value: int, page: int) -> None:
    for pool in client.pools:
        for layer in pool.layers:
            for plane in layer:
                plane[slot] = byte_of(value, page)


def byte_of(value: int, page: int) -> int:
    return (value * 31 + page) % 251


def right(client: Client, lease: Lease, value: int) -> None:
    """Every byte of what matched is what was computed."""
    lease.wait_loaded()
    for i in range(lease.matched_tokens // 4):
        for pool in client.pools:
            for layer in pool.layers:
                for plane in layer:
                    assert np.all(plane[lease.slots[i]] == byte_of(value, i)), f"page {i} holds something else"


def check(client: Client, tokens: Any, value: int, matched: int, **options: Any) -> None:
    """So many tokens match, and every byte of them is right."""
    with client.acquire(tokens, **options) as lease:
        assert lease.matched_tokens == matched
        right(client, lease, value)


def third_of(rank: Served) -> dict[str, Any]:
    found: dict[str, Any] = rank.status(prove=False)["third"]
    return found


def stored(rank: Served, num_pages: int) -> None:
    """Wait until so many pages have gone down, and nothing is under way."""
    until(lambda: third_of(rank)["num_pages"] == num_pages)
    rank.settle()
    assert third_of(rank)["num_pages"] == num_pages


def forget(client: Client) -> None:
    """What the device and the host have goes."""
    drop(client)
    assert client.peek(ONE).matched_tokens == 0


def drop(client: Client, tier: str | None = None) -> None:
    """Clear it, once what holds it, such as the end of a lease that was just released, is over."""

    def done() -> bool:
        try:
            client.clear(tier)
        except Busy:
            return False
        return True

    until(done)
    until(lambda: all(not pool["cached"] for pool in client.status()["pools"] if tier in (None, pool["tier"].lower())))


def idle(rank: Served) -> dict[str, Any]:
    """Once nothing is under way nothing is held by anyone; the status then."""
    until(lambda: not rank.status(prove=False)["sessions"])
    status = rank.settle()
    for pool in status["pools"]:
        assert (pool["fenced"], pool["leased"], pool["locked"]) == (0, 0, 0), pool
    assert not any(status["third"]["queued"].values())
    return status


def files(folder: Path) -> list[Path]:
    """Of the pages that are in a store's folder."""
    return sorted(path for path in (folder / "l3").rglob("??/*") if path.is_file())


@contextlib.contextmanager
def watching(rank: Served, since: int = 0) -> Iterator[Mirror]:
    """A mirror of the rank's stream."""
    stream = rank.status(prove=False)["stream"]
    with Mirror(stream["endpoint"], stream["replay_endpoint"], since=since) as mirror:
        yield mirror


def same(rank: Served, mirror: Mirror, tiers: tuple[str, ...] = ("DEVICE", "HOST", "DISK")) -> dict[str, set[int]]:
    """The mirror has what the index has, tier by tier; the blocks."""
    rank.settle()
    with rank.observer() as observer:
        dumps = {tier: observer.dump(tier) for tier in tiers}
        seq = observer.digest()["seq"]
        assert mirror.catch_up(seq, 10.0)
        assert mirror.exact
        assert mirror.check_digest(seq, observer.digest()["tiers"]) == []
    for tier, dump in dumps.items():
        assert set(dump.hashes) == mirror.hashes(MEDIA[tier]), tier
        assert len(dump.hashes) == len(set(dump.hashes))
    return {tier: set(dump.hashes) for tier, dump in dumps.items()}


MEDIA = {"DEVICE": "GPU", "HOST": "CPU_PINNED", "DISK": "DISK"}
