"""Cold start: from the launch of `sglcache serve` to the first /health that says ok, with a pool of a given size.

The process is new each time; the files of Python and torch are in the page cache after the first, which is told apart.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

from sglcache.bench.daemon import Daemon
from sglcache.bench.harness import Row
from sglcache.config import PoolConfig


class Options(NamedTuple):
    """What `bench start` is told."""

    pool_gib: float = 1.0
    repeats: int = 7


def run(options: Options) -> Row:
    """Seconds of each start, the first by itself, and the median of the others."""
    pool = PoolConfig()
    token_bytes = 2 * pool.num_layers * pool.num_kv_heads * pool.head_dim * 2  # K and V; float16
    num_tokens = int(options.pool_gib * 2**30) // token_bytes
    seconds = []
    for _ in range(options.repeats):
        with Daemon([f"pool.num_tokens={num_tokens}"]) as daemon:
            seconds.append(daemon.wait_healthy())
    later = seconds[1:] or seconds
    return {
        "pool_bytes": num_tokens // pool.page_size * pool.page_size * token_bytes,
        "repeats": options.repeats,
        "first_s": round(seconds[0], 3),
        "median_s": round(statistics.median(later), 3),
        "least_s": round(min(later), 3),
        "most_s": round(max(later), 3),
        "starts_s": [round(each, 3) for each in seconds],
    }
