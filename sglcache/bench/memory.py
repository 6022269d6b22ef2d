"""What the index itself weighs: bytes per cached page, and per node, beyond the tokens, slots and digests.

Counted by tracemalloc, which sees every block that Python asks for (with the collector's header, without the
allocator's rounding): all that is allocated once the index is full and its events are cut, less what was before the
index existed. So free lists, tables and queues count too. Payload is what any index must keep of a page: 4 bytes a
token, 4 a slot in each tier, and the digest.

Two shapes of the same number of pages, long runs and runs of one page, give the cost of a page and of a node:
`bytes = page_bytes * pages + node_bytes * nodes`.
"""

from __future__ import annotations

import gc
import tracemalloc
from typing import NamedTuple

import numpy as np

from sglcache.bench.harness import Row
from sglcache.bench.index import Driver
from sglcache.core.eviction import Policy
from sglcache.core.hashing import hasher
from sglcache.core.index import Index, IndexConfig
from sglcache.core.slots import SLOT_BYTES

RUNS = (1, 4, 64, 1024)  # pages in a node


class Options(NamedTuple):
    """What `bench memory` is told."""

    num_pages: int = 1 << 16
    page_size: int = 16
    two_tiers: bool = False
    events: bool = True
    policy: str = "lru"


def run(options: Options) -> Row:
    """Every shape, and from the two extreme ones the cost of a page and of a node."""
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start()
    try:
        shapes = [measure(options, run) for run in RUNS]
    finally:
        if not tracing:
            tracemalloc.stop()
    short, long = shapes[0], shapes[-1]
    pages = short["pages"]
    assert pages == long["pages"], (short, long)
    node_bytes = (short["beyond_bytes"] - long["beyond_bytes"]) / (short["nodes"] - long["nodes"])
    return {
        "counted_by": "tracemalloc",
        "page_size": options.page_size,
        "tiers": 1 + options.two_tiers,
        "events": options.events,
        "policy": options.policy,
        "node_bytes": round(node_bytes, 1),
        "page_bytes": round((long["beyond_bytes"] - node_bytes * long["nodes"]) / pages, 2),
        "shapes": shapes,
    }


def measure(options: Options, run: int) -> Row:
    """Fill an index with nodes of `run` pages each that share nothing."""
    page_size = options.page_size
    rng = np.random.default_rng(run)
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    index = Index(
        IndexConfig(
            page_size=page_size,
            num_pages=options.num_pages,
            host_pages=options.num_pages if options.two_tiers else 0,
            events=options.events,
            eviction=Policy(options.policy),
            host_eviction=Policy(options.policy),
        )
    )
    gc.collect()
    empty = tracemalloc.get_traced_memory()[0] - before
    driver = Driver(index)
    for number in range(options.num_pages // run):
        tokens = rng.integers(0, 1 << 32, run * page_size, dtype=np.uint32)
        tokens[0] = number  # no two alike
        lease = driver.acquire(tokens.tobytes()).lease
        driver.commit(lease)
        driver.release(lease)
        driver.cut()
        driver.counted()
        del tokens
    gc.collect()
    total = tracemalloc.get_traced_memory()[0] - before
    stats = index.stats()
    pages = stats.pools[0].cached
    digest = hasher(index.config.hash_name).size if options.events else 0
    payload = pages * (page_size * 4 + SLOT_BYTES * len(stats.pools) + digest)
    return {
        "run_pages": run,
        "pages": pages,
        "nodes": stats.num_nodes,
        "payload_bytes": payload,
        "total_bytes": total,
        "empty_bytes": empty,
        "beyond_bytes": total - payload,
        "beyond_per_page": round((total - payload) / pages, 2),
        "beyond_per_node": round((total - payload) / stats.num_nodes, 1),
    }
