"""A trace laid over a configuration: what its tiers would hit, and what more of one would add; no daemon, no bytes.

The prompts go through `core.reuse` one after the other, each committed at once, for one rank of the configuration. With
`simulate` they go through an index of that configuration as well, by the same calls as a daemon's: what it finds stands
beside the forecast. A trace has the tokens of prompts and only the number of those that were answered, so an answer is
seen where the next turn's prompt brings it back.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from sglcache.bench import trace as traces
from sglcache.bench.index import Driver
from sglcache.config import Config
from sglcache.core.forecast import forecast
from sglcache.core.index import Index, IndexConfig
from sglcache.core.key import ROOT, Keys
from sglcache.core.reuse import Reuse
from sglcache.core.tiering import WritePolicy
from sglcache.errors import ConfigError
from sglcache.memory.geometry import Geometry
from sglcache.server.rank import policy_of
from sglcache.server.reuse import sizes_of

MAX_PAGES = 8 << 20  # that are followed: some 100 bytes each
FOR_EVER = 1e15  # seconds of the window


class Options(NamedTuple):
    """What `sglcache plan --trace` is told."""

    trace: Path
    config: Config
    limit: int | None = None  # requests; None: all
    sample_tokens: int = 0  # about one page in so many is followed; 0: each is
    simulate: bool = False


def plan(options: Options, advance: Callable[[int], None] = lambda done: None) -> dict[str, Any]:
    """The forecast, with `trace`, and `simulated`, which is None unless it was asked for. `advance(requests done)`.

    Prompts that the device has no room for are `refused`: a daemon would not grant them, and they are left out.

    ConfigError: no request in the file, or what is wrong with it.
    """
    config = options.config.for_stage(0)
    shape, page_size = Geometry.of(config), config.pool.page_size
    keys = Keys(page_size, config.pool.bigram)
    reuse = Reuse(keys, max(1, options.sample_tokens // page_size), MAX_PAGES, FOR_EVER)
    simulation = Simulation(config, shape) if options.simulate else None
    began, ended, refused = None, 0.0, 0
    for number, request in enumerate(traces.requests(options.trace, options.limit)):
        tokens, now = request.tokens.tobytes(), request.arrival_ms / 1000
        began = now if began is None else began
        ended = max(ended, now)
        if not number % 16:
            advance(number)
        if -(-len(request.tokens) // page_size) > shape.num_pages:
            refused += 1
            continue
        run = reuse.asked(tokens, ROOT, 0, 0, ended)
        reuse.committed(run, keys.whole(len(tokens)), _nothing, ended)
        if simulation is not None:
            simulation.serve(tokens)
    if began is None:
        raise ConfigError(f"{options.trace}: there is no request in it", path=str(options.trace))
    curve = reuse.curve(ended)._replace(seconds=ended - began)
    return {
        "trace": str(options.trace),
        "refused": refused,
        **forecast(curve, sizes_of(config, shape), real=False),
        "simulated": simulation.told() if simulation is not None else None,
    }


def _nothing(start: int) -> bytes | None:
    return None  # a trace has no tokens behind a prompt


class Simulation:
    """An index of a configuration, and one runner on it."""

    def __init__(self, config: Config, shape: Geometry) -> None:
        index = Index(
            IndexConfig(
                page_size=shape.page_size,
                num_pages=shape.num_pages,
                host_pages=shape.host_pages,
                events=False,
                bigram=config.pool.bigram,
                eviction=policy_of(config.eviction, config.eviction.device),
                host_eviction=policy_of(config.eviction, config.eviction.host),
                write_policy=WritePolicy(config.host.write_policy, config.host.write_threshold),
                load_back_threshold=config.host.load_back_threshold,
                load_back_quota=-(-config.host.load_back_quota // shape.page_size),
            )
        )
        self._driver = Driver(index)
        self._tokens = 0

    def serve(self, tokens: bytes) -> None:
        """A request from its acquire to its release."""
        driver = self._driver
        self._tokens += len(tokens) >> 2
        grant = driver.acquire(tokens)
        driver.commit_whole(grant.lease)
        driver.release(grant.lease)
        driver.effects.clear()

    def told(self) -> dict[str, Any]:
        counters = self._driver.index.counters
        found = counters["matched_tokens"] / max(1, self._tokens)
        on_host = counters["host_matched_tokens"] / max(1, self._tokens)
        return {"all": found, "device": found - on_host, "host": on_host}
