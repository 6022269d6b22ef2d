"""Cold start: from the launch of `sglcache serve` to the first /health that says ok, with a pool of a given size.

The process is new each time; the files of Python and torch are in the page cache after the first, which is told apart.

With stored pages: a file store that has so many, and without one, in turn. Then there is a second moment, when what it
has is known, and told on the stream; requests are served from the first.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from sglcache.bench.daemon import POLL_S, Daemon
from sglcache.bench.harness import BenchError, Comparison, Row
from sglcache.client import Client
from sglcache.config import load
from sglcache.core.effects import Run
from sglcache.core.hashing import hasher
from sglcache.core.key import ROOT
from sglcache.memory.geometry import Geometry
from sglcache.memory.pools import HostPools
from sglcache.server.third import ThirdTier

READY_S = 120.0
RUN_PAGES = 256  # of a path in the store


class Options(NamedTuple):
    """What `bench start` is told."""

    pool_gib: float = 1.0
    repeats: int = 7
    stored_pages: int = 0


def run(options: Options) -> Row:
    """Seconds of each start, the first by itself, and the median of the others; with stored pages, beside these."""
    plain = ["model_name=bench", f"pool.size={int(options.pool_gib * 2**30)} B"]
    geometry = Geometry.of(load(None, plain))
    with ExitStack() as stack:
        seconds, with_store, told = [], [], []
        if options.stored_pages:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sglcache-bench-"))
            stored = [*plain, "storage.kind=file", f"storage.path={folder}"]
            _fill(stored, options.stored_pages)
        for _ in range(options.repeats):
            with Daemon(plain) as daemon:
                seconds.append(daemon.wait_healthy())
            if options.stored_pages:
                with Daemon(stored) as daemon:
                    with_store.append(daemon.wait_healthy())
                    told.append(_wait_told(daemon, options.stored_pages))
    later = seconds[1:] or seconds
    row: Row = {
        "pool_bytes": geometry.pool_bytes,
        "repeats": options.repeats,
        "first_s": round(seconds[0], 3),
        "median_s": round(statistics.median(later), 3),
        "least_s": round(min(later), 3),
        "most_s": round(max(later), 3),
        "starts_s": [round(each, 3) for each in seconds],
    }
    if options.stored_pages:
        ratio = Comparison.of(later, with_store[1:] or with_store)
        row |= {
            "stored_pages": options.stored_pages,
            "stored_median_s": round(ratio.other, 3),
            "stored_ratio": round(ratio.ratio, 3),
            "stored_pairs": [round(ratio.least, 3), round(ratio.most, 3)],
            "told_median_s": round(statistics.median(told[1:] or told), 3),
        }
    return row


def _fill(settings: Sequence[str], num_pages: int) -> None:
    """So many pages into the first rank's store, in runs that begin at the root. The daemon is not there meanwhile."""
    config = load(None, [*settings, "pool.size=1 MiB", f"host.num_tokens={RUN_PAGES * load(None).pool.page_size}"])
    geometry = Geometry.of(config)
    host = HostPools(geometry)
    store = ThirdTier(config, geometry, host, 0, 0).store
    try:
        store.open()
        page_bytes = 4 * geometry.page_size
        for first in range(0, num_pages, RUN_PAGES):
            count = min(RUN_PAGES, num_pages - first)
            words = range(first * geometry.page_size, (first + count) * geometry.page_size)
            tokens = np.array(words, "<u4").tobytes()
            run = Run(ROOT, None, hasher(config.events.hash).chain(b"", tokens, page_bytes), tokens)
            if (put := store.put(run, range(count), lambda: False)).new_pages != count:
                raise BenchError(f"{put.new_pages} of {count} pages were stored")
    finally:
        store.close()
        host.close()


def _wait_told(daemon: Daemon, num_pages: int) -> float:
    """Seconds from the launch until all that is stored is known to the index."""
    with Client(daemon.socket, role="observer", name="bench") as observer:
        while (waited := time.perf_counter() - daemon.started) < READY_S:
            third = observer.status()["third"]
            if third["ready"]:
                if third["num_pages"] != num_pages:
                    raise BenchError(f"{num_pages} pages were stored, and {third['num_pages']} found")
                return time.perf_counter() - daemon.started
            time.sleep(POLL_S)
    raise BenchError(f"the third tier was not ready after {waited:.0f} s")
