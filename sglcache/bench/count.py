"""How many of the interpreter's instructions a request takes in the index: what can be held without a clock.

As it is written, not compiled, the index is Python, and where nothing is hashed or encoded nine tenths of its time are
the interpreter's. So this count goes with the time, and unlike it is the same on every machine with the same minor
version of Python. What C does meanwhile (hashes, encodings, comparisons) is not in it: `bench index` has the time of
all.

Prompts are drawn by a seed: all begin alike, a third goes on where one before it ended, the others are new; the pool is
small, so that each request evicts about as much as it brings. Growth is counted in the indexes of `bench match`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from sglcache.bench import match
from sglcache.bench.harness import BenchError, Row
from sglcache.bench.index import Driver
from sglcache.compiled import FORM, VARIABLE
from sglcache.core.effects import Grant, Wake
from sglcache.core.index import Index, IndexConfig

T = TypeVar("T")

PARTS = ("acquire", "commit", "release", "cut")


class Options(NamedTuple):
    """What `bench count` is told."""

    page_size: int = 64
    events: bool = False
    requests: int = 40  # that are counted
    before: int = 120  # that fill the pool
    capacity_tokens: int = 1 << 16
    pages: tuple[int, ...] = (2_000, 100_000)  # that are cached where growth is counted; none: it is not
    seed: int = 0


def counted(call: Callable[..., T], *args: Any) -> tuple[int, T]:
    """Instructions of Python functions that run in the call, and its result."""
    count = 0

    def at(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        if event == "opcode":
            count += 1
        return at

    def enter(frame: FrameType, event: str, arg: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return at

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        result = call(*args)
    finally:
        sys.settrace(before)
    return count, result


def run(options: Options) -> Row:
    """Instructions a request, part by part; and for each page of a match, by how many pages are cached.

    BenchError: the core is compiled, and takes none.
    """
    if FORM.compiled:
        raise BenchError(
            f"instructions of Python are counted, and the core is compiled; {VARIABLE}=1 sglcache bench count"
        )
    row: Row = {
        "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "page_size": options.page_size,
        "events": options.events,
        "requests": options.requests,
        **_requests(options),
    }
    if options.pages:
        sizes = [_growth(pages, options) for pages in options.pages]
        row |= {"growth": round(sizes[-1]["page"] / sizes[0]["page"], 3), "sizes": sizes}
    return row


def _requests(options: Options) -> Row:
    page_size = options.page_size
    index = Index(IndexConfig(page_size, options.capacity_tokens // page_size, events=options.events))
    session = index.open_session()
    rng = np.random.default_rng(options.seed)
    first = rng.integers(0, 128_000, 512, dtype="<u4")
    earlier = [first]
    sums = dict.fromkeys(PARTS, 0)
    matched = tokens = 0
    for number in range(options.before + options.requests):
        stem = earlier[-1 - int(rng.integers(0, 8)) % len(earlier)] if number % 3 == 0 else first
        prompt = np.concatenate([stem[:4096], rng.integers(0, 128_000, int(rng.integers(256, 4096)), dtype="<u4")])
        earlier.append(prompt)
        key, ticket = prompt.tobytes(), 2 * number
        grant: Grant | None

        def acquire(key: bytes = key) -> Grant | None:
            return index.acquire(session, 1, key)

        def commit(grant: Grant, ticket: int = ticket) -> None:
            index.commit(session, 2, grant.lease, ticket, done=0)

        def release(grant: Grant, ticket: int = ticket + 1) -> None:
            index.release(session, 3, grant.lease, ticket, done=0)

        def cut() -> None:
            while not index.cut(0.0):
                pass
            index.drain(0.0)

        count = counted if number >= options.before else _uncounted
        counts = []
        taken, grant = count(acquire)
        counts.append(taken)
        while grant is None:
            index.step()
            for effect in index.drain(0.0):
                if isinstance(effect, Wake) and isinstance(effect.result, Grant):
                    grant = effect.result
        counts += [count(call, grant)[0] for call in (commit, release)] + [count(cut)[0]]
        if number >= options.before:
            matched, tokens = matched + grant.matched_tokens, tokens + len(prompt)
            for part, each in zip(PARTS, counts, strict=True):
                sums[part] += each
    means = {part: round(total / options.requests, 1) for part, total in sums.items()}
    return {**means, "total": round(sum(sums.values()) / options.requests, 1), "hit_rate": round(matched / tokens, 4)}


def _uncounted(call: Callable[..., T], *args: Any) -> tuple[int, T]:
    return 0, call(*args)


def _growth(num_pages: int, options: Options) -> Row:
    world = match.World(num_pages, match.Options(page_size=options.page_size))
    driver: Driver = world.driver
    rng = np.random.default_rng(options.seed)
    total = pages = 0
    for family, way in rng.integers(0, (world.families, 2**match.DEPTH), (options.requests, 2)).tolist():
        key = world.request(family, way)

        def hit(key: bytes = key) -> int:
            grant = world.index.acquire(driver.session, 1, key)
            assert grant is not None
            world.index.cancel(driver.session, 2, grant.lease)
            return grant.matched_tokens

        count, matched = counted(hit)
        assert matched * 4 == len(key), "everything is cached"
        total, pages = total + count, pages + matched // options.page_size
    return {"cached_pages": world.index.pools[0].cached, "page": round(total / pages, 2)}
