"""What a rank tells of reuse: its tiers' sizes put to `core.forecast`, for people, and as families for `/metrics`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sglcache.config import Config
from sglcache.core.forecast import Sizes, forecast
from sglcache.core.index import Index
from sglcache.core.reuse import Reuse
from sglcache.errors import BadRequest
from sglcache.memory.geometry import Geometry
from sglcache.server.metrics import Family
from sglcache.server.room import file_bytes

OFF = "no page is followed to tell of reuse; set observe.reuse_sample_tokens, such as 8192, and start the daemon anew"


def made(config: Config, index: Index) -> Reuse | None:
    """What follows an index's pages; None: it is turned off."""
    observe = config.observe
    if not observe.reuse_sample_tokens:
        return None
    sample = max(1, observe.reuse_sample_tokens // config.pool.page_size)
    return Reuse(index.keys, sample, observe.reuse_pages, observe.reuse_window_s, index.now)


def sizes_of(config: Config, shape: Geometry, used: int = 0) -> Sizes:
    """The tiers of one rank; `used` of the device's pages are leased or fenced."""
    page = shape.page_bytes * shape.num_shards
    on_host = shape.page_bytes * shape.num_parts
    third = 0
    if config.storage.kind == "file" and shape.host_pages:
        third = file_bytes(on_host, shape.page_size)
    return Sizes(
        max(0, shape.num_pages - used),
        page,
        shape.host_pages,
        on_host if shape.host_pages else 0,
        config.storage.size // third if third else 0,
        third,
        config.host.write_policy,
    )


def told(reuse: Reuse | None, config: Config, shape: Geometry, index: Index, now: float) -> dict[str, Any]:
    """The forecast of now. BadRequest: nothing is followed."""
    if reuse is None:
        raise BadRequest(OFF)
    pool = index.pools[0]
    return {
        **forecast(reuse.curve(now), sizes_of(config, shape, pool.leased + pool.fenced)),
        "companions": [each.resource.name for each in index.config.companions],
    }


def families(own: dict[str, str], reuse: Reuse, facts: Mapping[str, Any]) -> Iterator[Family]:
    """`facts`: as `told`. A sample for each tier and step of memory, and a histogram: nothing grows with the cache."""
    text = (
        "Share of the tokens asked for that would be found in any tier with so many GiB more of one, of the last "
        "observe.reuse_window_s; with 0 more, as it is."
    )
    samples = [({**own, "tier": "device", "extra_gib": "0"}, facts["hit_rate"])]
    samples += [
        ({**own, "tier": row["tier"], "extra_gib": str(row["extra_gib"])}, row["hit_rate"]) for row in facts["more"]
    ]
    yield Family("sglcache_reuse_hit_ratio", text, "gauge", samples)
    text = "As sglcache_reuse_hit_ratio, of what would be found on the device, and need no copy."
    samples = [({**own, "tier": "device", "extra_gib": "0"}, facts["device_hit_rate"])]
    samples += [
        ({**own, "tier": row["tier"], "extra_gib": str(row["extra_gib"])}, row["device_hit_rate"])
        for row in facts["more"]
        if row["tier"] == "device"
    ]
    yield Family("sglcache_reuse_device_hit_ratio", text, "gauge", samples)
    text = "Share of the tokens asked for that had been asked for before: what room for everything would find."
    yield Family("sglcache_reuse_ceiling_ratio", text, "gauge", [(own, facts["ceiling"])])
    yield Family("sglcache_reuse_looks", "Followed pages asked for, in the window.", "gauge", [(own, facts["looks"])])
    text = "Pages that are followed to tell of reuse, each for so many as sglcache_reuse_weight says."
    yield Family("sglcache_reuse_tracked_pages", text, "gauge", [(own, reuse.tracked)])
    yield Family("sglcache_reuse_weight", "Pages that a followed one stands for.", "gauge", [(own, reuse.weight)])
    text = "Seconds since a followed page was last asked for, when it is asked for again."
    yield Family("sglcache_reuse_gap_seconds", text, "histogram", [(own, reuse.gaps.observed())])
