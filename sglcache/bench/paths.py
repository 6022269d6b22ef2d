"""The hot paths that are one process's own work, each beside the least that it comes down to.

    python -m sglcache.bench.paths acquire [--operations N] [--json | --seconds S]

An operation is of a prompt of 2,048 tokens in pages of 16. Path and floor run in turn in this process, an operation of
each, and the row has the median of both. A floor is written down as plainly as Python has it, in the same types: what
has to be looked up, compared, copied, hashed or packed whatever is built around it. `--seconds` does nothing but the
path for so long, for a profiler.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import ormsgpack
import xxhash

from sglcache.bench.harness import Row
from sglcache.bench.index import Driver, touch_heap
from sglcache.client.picture import Picture
from sglcache.core.effects import Publish
from sglcache.core.index import Index, IndexConfig
from sglcache.server.allocator import keep_large_buffers
from sglcache.wire.events import decode_batch

PAGE, TOKENS = 16, 2048
PAGE_BYTES = PAGE * 4
PAGES = TOKENS // PAGE
CACHED = 200  # prompts that are there from the start

Step = tuple[float, float]  # seconds of the path and of its floor


def prompt(number: int) -> bytes:
    """Tokens that no other number begins with."""
    tokens = np.random.default_rng(number).integers(0, 128_000, TOKENS, dtype=np.uint32)
    tokens[0] = number
    return tokens.tobytes()


class World:
    """An index with some prompts cached, as a rank has it, and what the floors keep instead."""

    def __init__(self) -> None:
        self.driver = Driver(Index(IndexConfig(PAGE, 4 * CACHED * PAGES)))
        self.prompts = [prompt(number) for number in range(CACHED)]
        self.table: dict[bytes, tuple[bytes, bytes]] = {}
        for tokens in self.prompts:
            lease = self.driver.acquire(tokens)
            self.table[tokens[:PAGE_BYTES]] = (bytes(bytearray(tokens)), bytes(bytearray(lease.slots)))
            self.driver.commit_whole(lease.lease)
            self.driver.release(lease.lease)
            self.driver.cut()
        self.batches = [each.payload for each in self.driver.effects if isinstance(each, Publish)]
        self.driver.effects.clear()
        self.fresh = CACHED

    def new(self) -> bytes:
        self.fresh += 1
        return prompt(self.fresh)


def acquire(world: World) -> Iterator[Step]:
    """A cached prompt is found, pinned, and its page table made. Floor: one look-up, one comparison, one copy."""
    index, session, clock, table = world.driver.index, world.driver.session, time.perf_counter, world.table
    while True:
        for tokens in world.prompts:
            start = clock()
            grant = index.acquire(session, 1, tokens)
            middle = clock()
            known, slots = table[tokens[:PAGE_BYTES]]
            same = tokens.startswith(known)
            reply = bytearray(slots)
            end = clock()
            assert grant is not None
            assert same
            assert grant.slots == reply
            index.cancel(session, 2, grant.lease)
            world.driver.pump()
            world.driver.counted()
            yield middle - start, end - middle


def commit(world: World) -> Iterator[Step]:
    """A computed prompt becomes a node. Floor: its tokens and slots are copied, and one entry is made."""
    driver, clock, table = world.driver, time.perf_counter, dict(world.table)
    index, session = driver.index, driver.session
    while True:
        tokens = world.new()
        grant = driver.acquire(tokens)
        driver.ticket += 1
        start = clock()
        index.commit(session, 2, grant.lease, driver.ticket)
        index.event_done(session, driver.ticket)
        middle = clock()
        table[tokens[:PAGE_BYTES]] = (bytes(bytearray(tokens)), bytes(bytearray(grant.slots)))
        end = clock()
        driver.pump()
        driver.release(grant.lease)
        driver.cut()
        driver.counted()
        yield middle - start, end - middle


def release(world: World) -> Iterator[Step]:
    """A lease ends and its pages may be evicted. Floor: an entry goes, and what it named is last in an order."""
    driver, clock = world.driver, time.perf_counter
    index, session = driver.index, driver.session
    leases: dict[int, bytes] = {}
    order: dict[bytes, None] = dict.fromkeys(world.prompts)
    while True:
        for tokens in world.prompts:
            grant = driver.acquire(tokens)
            leases[grant.lease] = tokens
            driver.ticket += 1
            start = clock()
            index.release(session, 3, grant.lease, driver.ticket)
            index.event_done(session, driver.ticket)
            middle = clock()
            last = leases.pop(grant.lease)
            del order[last]
            order[last] = None
            end = clock()
            driver.pump()
            driver.counted()
            yield middle - start, end - middle


def cut(world: World) -> Iterator[Step]:
    """A commit's event: hashed, encoded, numbered. Floor: xxh3_128 of each page after the last, ormsgpack of all."""
    driver, clock, digest = world.driver, time.perf_counter, xxhash.xxh3_128_digest
    index, session, option = driver.index, driver.session, ormsgpack.OPT_SERIALIZE_NUMPY
    while True:
        tokens = world.new()
        grant = driver.acquire(tokens)
        driver.ticket += 1
        index.commit(session, 2, grant.lease, driver.ticket)
        index.event_done(session, driver.ticket)
        start = clock()
        while not index.cut(0.0):
            pass
        effects = index.drain(0.0)
        middle = clock()
        last, digests = b"", []
        for at in range(0, TOKENS * 4, PAGE_BYTES):
            last = digest(last + tokens[at : at + PAGE_BYTES])
            digests.append(last)
        hashes = np.frombuffer(b"".join(digests), ">i8")[::2].astype("<i8")
        made = ormsgpack.packb(hashes, option=option) + ormsgpack.packb(np.frombuffer(tokens, "<u4"), option=option)
        end = clock()
        payload = next(each.payload for each in effects if isinstance(each, Publish))
        assert made[-TOKENS * 2 :] in payload, "the same bytes are told"
        driver.release(grant.lease)
        driver.cut()
        driver.counted()
        yield middle - start, end - middle


def mirror(world: World) -> Iterator[Step]:
    """A batch of 128 blocks into a router's picture. Floor: it is unpacked, and an entry made for each block."""
    clock = time.perf_counter
    while True:
        picture = Picture()
        held: dict[int, bytes] = {}
        for payload in world.batches:
            start = clock()
            for event in decode_batch(payload).events:
                picture.apply(event, 0)
            middle = clock()
            _, events, _ = ormsgpack.unpackb(payload)
            for event in events:
                tokens = np.array(event["token_ids"], np.uint32).tobytes()
                for number, block_hash in enumerate(event["block_hashes"]):
                    held[block_hash] = tokens[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]
            end = clock()
            yield middle - start, end - middle


def match(world: World) -> Iterator[Step]:
    """A router asks its picture for a prompt. Floor: a look-up for each block, under its parent and its tokens."""
    clock = time.perf_counter
    picture = Picture()
    children: dict[bytes, bytes] = {}
    for payload in world.batches:
        for event in decode_batch(payload).events:
            picture.apply(event, 0)
    for number, tokens in enumerate(world.prompts):
        parent = bytes(8)
        for at in range(0, TOKENS * 4, PAGE_BYTES):
            name = (number << 16 | at).to_bytes(8, "big")
            children[parent + tokens[at : at + PAGE_BYTES]] = name
            parent = name
    while True:
        for tokens in world.prompts:
            start = clock()
            found = picture.longest_match(tokens)
            middle = clock()
            parent, blocks = bytes(8), 0
            for at in range(0, TOKENS * 4, PAGE_BYTES):
                child = children.get(parent + tokens[at : at + PAGE_BYTES])
                if child is None:
                    break
                parent = child
                blocks += 1
            end = clock()
            assert found[0].tokens == blocks * PAGE == TOKENS
            yield middle - start, end - middle


PATHS: dict[str, Callable[[World], Iterator[Step]]] = {
    "acquire": acquire,
    "commit": commit,
    "release": release,
    "cut": cut,
    "mirror": mirror,
    "match": match,
}


class Options(NamedTuple):
    """What is measured, how often."""

    path: str
    operations: int = 2000
    warm_up: int = 200


def run(options: Options) -> Row:
    """Medians, in microseconds an operation."""
    steps = _steps(options.path)
    for _ in range(options.warm_up):
        next(steps)
    gc.collect()
    gc.freeze()
    both = [next(steps) for _ in range(options.operations)]
    path, floor = (statistics.median(each) * 1e6 for each in zip(*both, strict=True))
    return {"path": options.path, "operations": options.operations, "today_us": path, "floor_us": floor}


def spin(path: str, seconds: float) -> None:
    """Do it again and again, for a profiler."""
    end = time.monotonic() + seconds
    steps = _steps(path)
    while time.monotonic() < end:
        next(steps)


def _steps(path: str) -> Iterator[Step]:
    keep_large_buffers()
    touch_heap()
    return PATHS[path](World())


def main(words: list[str]) -> Any:
    parser = argparse.ArgumentParser()
    parser.add_argument("path", choices=list(PATHS))
    parser.add_argument("--operations", type=int, default=2000)
    parser.add_argument("--seconds", type=float)
    options = parser.parse_args(words)
    if options.seconds is not None:
        return spin(options.path, options.seconds)
    return print(json.dumps(run(Options(options.path, options.operations, options.operations // 10))))


if __name__ == "__main__":
    main(sys.argv[1:])
