"""What a match costs for each page that it finds, in a small index and in a large one.

Both hold families of conversations: from a first part on, each part has two continuations, and a request is the whole
way to a last one. So a match walks over several nodes, some of them with a table of children, and the root's table
grows with the index. Requests are drawn at random, so a large index is cold where a small one is warm. Each is acquire
(match, pin and the reply's page table) and cancel; the indexes are measured in turn, block by block.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from sglcache.bench.harness import Row, Summary
from sglcache.bench.index import Driver, touch_heap
from sglcache.core.index import Index, IndexConfig
from sglcache.server.allocator import keep_large_buffers
from sglcache.server.collector import Collector

PART_PAGES = 4
DEPTH = 6  # parts of a request
FAMILY_PAGES = PART_PAGES * (2 ** (DEPTH + 1) - 2)


class Options(NamedTuple):
    """What `bench match` is told."""

    pages: tuple[int, ...] = (100_000, 1_000_000)
    page_size: int = 16
    blocks: int = 9
    requests: int = 400  # in a block


class World:
    """An index of so many pages, and its requests."""

    def __init__(self, num_pages: int, options: Options) -> None:
        self.page_size = options.page_size
        self.families = max(1, num_pages // FAMILY_PAGES)
        # A block is committed as a whole, beside nothing; the rest of the room is not used.
        self.index = Index(
            IndexConfig(options.page_size, self.families * FAMILY_PAGES + PART_PAGES * DEPTH, events=False)
        )
        self.driver = Driver(self.index)
        self.part = np.random.default_rng(0).integers(0, 1 << 32, PART_PAGES * options.page_size, dtype=np.uint32)
        for family in range(self.families):
            for last in range(2 ** (DEPTH - 1)):
                for way in (2 * last, 2 * last + 1):
                    lease = self.driver.acquire(self.request(family, way)).lease
                    self.driver.commit(lease)
                    self.driver.release(lease)
                    self.driver.counted()

    def request(self, family: int, way: int) -> bytes:
        """The way to last part `way` of 2**DEPTH: each part is told apart by its first token."""
        tokens = np.tile(self.part, DEPTH).reshape(DEPTH, -1)
        tokens[:, 0] = [(family << DEPTH + 1) + (1 << depth) + (way >> DEPTH - depth) for depth in range(1, DEPTH + 1)]
        return tokens.tobytes()

    def measure(self, requests: list[bytes]) -> tuple[float, float]:
        """Seconds, and of them this thread's, for each page that was matched."""
        index, session = self.index, self.driver.session
        matched = 0
        start, cpu = time.perf_counter(), time.thread_time()
        for tokens in requests:
            grant = index.acquire(session, 1, tokens)
            assert grant is not None
            matched += grant.matched_tokens
            index.cancel(session, 2, grant.lease)
        wall, cpu = time.perf_counter() - start, time.thread_time() - cpu
        assert matched * 4 == sum(map(len, requests)), "everything is cached"
        pages = matched // self.page_size
        return wall / pages, cpu / pages


def run(options: Options) -> Row:
    """Nanoseconds a page by size of the index, and the most over the least."""
    keep_large_buffers()
    collector = Collector()
    collector.start()
    try:
        worlds = [World(pages, options) for pages in options.pages]
        touch_heap()
        rng = np.random.default_rng(1)
        times: list[list[tuple[float, float]]] = [[] for _ in worlds]
        for block in range(options.blocks + 1):
            for world, mine in zip(worlds, times, strict=True):
                draws = rng.integers(0, (world.families, 2**DEPTH), (options.requests, 2)).tolist()
                measured = world.measure([world.request(family, way) for family, way in draws])
                if block:  # the first is for nothing
                    mine.append(measured)
    finally:
        collector.stop()
    sizes = [
        {
            "cached_pages": world.index.pools[0].cached,
            "nodes": world.index.stats().num_nodes,
            "page_ns": round(Summary.of([wall * 1e9 for wall, _ in mine]).p50, 1),
            "page_cpu_ns": round(Summary.of([cpu * 1e9 for _, cpu in mine]).p50, 1),
        }
        for world, mine in zip(worlds, times, strict=True)
    ]
    return {
        "page_size": options.page_size,
        "pages_matched": PART_PAGES * DEPTH,
        "requests": options.requests * options.blocks,
        "ratio": round(sizes[-1]["page_ns"] / sizes[0]["page_ns"], 2),
        "cpu_ratio": round(sizes[-1]["page_cpu_ns"] / sizes[0]["page_cpu_ns"], 2),
        "sizes": sizes,
    }
