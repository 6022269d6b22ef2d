"""How far a router's estimate is from what a runner then finds, on a real trace, by what the tree keeps beside full KV.

Before each request two pictures are asked that follow the events exactly: one knows full KV, which is what a router is
told by default; the other knows windows and states as well (`events.groups`). Then the request is served as in
`bench index`, and the index says what it matched. With full KV alone both are right. A window or a state that is gone
makes the first one promise too much; it never promises too little.

Nothing is timed. Tokens are withheld from the stream, so that a picture goes by hashes: that is much faster here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sglcache.bench import index as bench_index
from sglcache.bench import trace as traces
from sglcache.bench.harness import Row, Summary
from sglcache.bench.hybrid import KINDS
from sglcache.bench.index import Driver, in_parts
from sglcache.client.hashes import named
from sglcache.client.picture import Picture
from sglcache.core.effects import Publish
from sglcache.core.encoding import Format, Group
from sglcache.errors import ConfigError
from sglcache.wire.events import decode_batch


class Options(NamedTuple):
    """What `bench estimate` is told."""

    base: bench_index.Options  # of every kind; `kind`, `window` and `events` are set here
    windows: tuple[int, ...] = (128, 4096)


def run(options: Options) -> Row:
    """A row for each kind, and for each window where it has one."""
    kinds = []
    for kind, (keeps_window, _) in KINDS.items():
        for window in options.windows if keeps_window else options.windows[:1]:
            kinds.append(_measure(options.base._replace(kind=kind, window=window, events=True)))
    base = options.base
    return {
        "page_size": base.page_size,
        "capacity_tokens": base.capacity_tokens,
        "host_tokens": base.host_tokens,
        "chunk_tokens": base.chunk_tokens,
        "requests": kinds[0]["requests"],
        "kinds": kinds,
    }


def _measure(options: bench_index.Options) -> Row:
    groups = tuple(
        Group(number, *what)
        for number, what in enumerate(
            [("sliding_window", options.window, False)] * options.keeps_window
            + [("mamba", None, True)] * options.keeps_states,
            1,
        )
    )
    index, work = bench_index.build(options, Format(withhold_tokens=True, groups=groups))
    hashes = named(options.hash_name)
    of_full, of_all = Picture(), Picture({group.number: group.window for group in groups})
    driver = Driver(index)
    found: list[int] = []
    by_full: list[int] = []
    by_all: list[int] = []
    num_tokens = 0
    for request in traces.requests(options.trace, options.limit):
        tokens = request.tokens.tobytes()
        known = of_all.longest_match(tokens, block_hashes=hashes).get(0, of_all.no_match)
        by_full.append(of_full.longest_match(tokens, block_hashes=hashes).get(0, of_full.no_match).tokens)
        by_all.append(known.reusable or 0)
        grant, *_ = in_parts(driver, tokens, work)
        found.append(grant.matched_tokens)
        num_tokens += len(request.tokens) // options.page_size * options.page_size
        driver.release(grant.lease)
        driver.cut()
        for effect in driver.effects:
            if isinstance(effect, Publish):
                for event in decode_batch(effect.payload).events:
                    of_full.apply(event, 0)
                    of_all.apply(event, 0)
        driver.counted()
    if not found:
        raise ConfigError(f"{options.trace}: no request to measure")
    over = np.array(by_full) - np.array(found)
    wrong = over[over != 0]
    summary = Summary.of([float(each) for each in wrong])
    return {
        "kind": options.kind,
        "window": work.window,
        "requests": len(found),
        "hit_rate": round(sum(found) / num_tokens, 4),
        "estimated": round(sum(by_full) / num_tokens, 4),
        "wrong_requests": round(len(wrong) / len(found), 4),
        "too_few": int((over < 0).sum()),
        "mean_over": round(summary.mean, 1),
        "p50_over": round(summary.p50, 1),
        "p99_over": round(summary.p99, 1),
        "with_groups": round(sum(by_all) / num_tokens, 4),
        "wrong_with_groups": sum(a != b for a, b in zip(by_all, found, strict=True)),
    }
