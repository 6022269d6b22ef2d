"""What a request says of its priority, from the client to what is evicted."""

from __future__ import annotations

from pathlib import Path

from sglcache.testing.daemon import Daemon

PAGES = 64


def test_what_a_request_of_a_higher_priority_has_used_is_kept(tmp_path: Path) -> None:
    sections = {"pool": {"num_tokens": 4 * PAGES}, "eviction": {"device": "priority"}, "host": {"num_tokens": 0}}
    with Daemon(tmp_path, **sections) as daemon, daemon.client() as client:
        for first, priority in ((0, 0), (100, 2), (200, -1), (300, 1)):
            with client.acquire(range(first, first + 64), priority=priority) as lease:
                lease.commit()
        left = []
        for _ in range(4):
            client.acquire(range(1000, 1004), reserve=4 * (PAGES // 4) * (len(left) + 1) - 4).cancel()
            left.append([first for first in (0, 100, 200, 300) if client.peek(range(first, first + 64)).matched_tokens])
        assert left == [[0, 100, 300], [100, 300], [100], []]
        assert daemon.status()["gauges"]["num_leases"] == 0
