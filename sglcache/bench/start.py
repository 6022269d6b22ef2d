"""Cold start: from the launch of `sglcache serve` to the first /health that says ok, with a pool of a given size.

The process is new each time; the files of Python and torch are in the page cache after the first, which is told apart.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

from sglcache.bench.daemon import Daemon
from sglcache.bench.harness import Row
from sglcache.config import load
from sglcache.memory.geometry import Geometry


class Options(NamedTuple):
    """What `bench start` is told."""

    pool_gib: float = 1.0
    repeats: int = 7


def run(options: Options) -> Row:
    """Seconds of each start, the first by itself, and the median of the others."""
    size = f"{int(options.pool_gib * 2**30)} B"
    geometry = Geometry.of(load(None, [f"pool.size={size}"]))
    seconds = []
    for _ in range(options.repeats):
        with Daemon([f"pool.size={size}"]) as daemon:
            seconds.append(daemon.wait_healthy())
    later = seconds[1:] or seconds
    return {
        "pool_bytes": geometry.pool_bytes,
        "repeats": options.repeats,
        "first_s": round(seconds[0], 3),
        "median_s": round(statistics.median(later), 3),
        "least_s": round(min(later), 3),
        "most_s": round(max(later), 3),
        "starts_s": [round(each, 3) for each in seconds],
    }
