"""The third tier through a real daemon: what was computed is found again after everything above it has gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglcache.client import Client
from sglcache.testing.daemon import Daemon, until

SMALL = {"kind": "file", "prefetch_threshold": 4, "prefetch_policy": "wait_complete"}
ONE = range(1, 65)  # 16 pages


def daemon_over(folder: Path, name: str = "daemon", **sections: Any) -> Daemon:
    storage = {**SMALL, "path": str(folder / "l3"), **sections.pop("storage", {})}
    return Daemon(folder / name, storage=storage, **sections)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with daemon_over(tmp_path) as daemon:
        yield daemon


def put(client: Client, tokens: Any, value: int, **options: Any) -> None:
    """Compute what the cache lacks: each page's bytes follow from `value` and its number."""
    with client.acquire(tokens, **options) as lease:
        lease.wait_loaded()
        for i in range(lease.matched_tokens // 4, len(lease.slots)):
            write(client, lease.slots[i], value, i)
        lease.commit()


def write(client: Client, slot: int, value: int, page: int) -> None:
    for layer in client.pool.layers:
        for plane in layer:
            plane[slot] = (value * 31 + page) % 251


def check(client: Client, tokens: Any, value: int, matched: int, **options: Any) -> None:
    """So many tokens match, and every byte of them is right."""
    with client.acquire(tokens, **options) as lease:
        lease.wait_loaded()
        assert lease.matched_tokens == matched
        for i in range(matched // 4):
            for layer in client.pool.layers:
                for plane in layer:
                    assert np.all(plane[lease.slots[i]] == (value * 31 + i) % 251), f"page {i} holds something else"


def stored(daemon: Daemon, num_pages: int) -> None:
    """Wait until so many pages have gone down."""
    until(lambda: daemon.status(prove=False)["third"]["num_pages"] == num_pages)
    daemon.settle()
    assert daemon.status()["third"]["num_pages"] == num_pages


def clear(client: Client) -> None:
    """What the device and the host have goes."""
    client.clear()
    assert client.peek(ONE).matched_tokens == 0


def test_what_left_both_tiers_above_comes_back_byte_for_byte(daemon: Daemon) -> None:
    with daemon.client() as client:
        put(client, ONE, 7)
        stored(daemon, 16)
        clear(client)
        check(client, ONE, 7, 64)
        third = daemon.status()["third"]
        assert (third["fetched_pages"], third["misses"]) == (16, {})
        check(client, ONE, 7, 64)  # it is above again, and nothing is fetched twice
        assert daemon.status()["third"]["fetched_pages"] == 16


UNREADABLE = """
from sglcache.storage.file import FileStore
def listing(self):
    raise RuntimeError("planted: the index can't be read")
    yield
FileStore.listing = listing
"""


def test_what_cannot_be_told_of_is_left_alone_and_nobody_waits_for_it(tmp_path: Path) -> None:
    with daemon_over(tmp_path, prelude=UNREADABLE) as daemon, daemon.client() as client:
        until(lambda: daemon.status(prove=False)["third"]["broken"])
        put(client, ONE, 7)
        daemon.settle()
        clear(client)
        check(client, ONE, 7, 0, prefetch="wait_complete")
        assert client.prefetch(ONE) == (0, 0)
        assert daemon.pool("HOST")["leased"] == 0
