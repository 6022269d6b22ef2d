"""`/metrics`: what the ranks count anyway, read when a scraper asks. Nothing here is on a command's path.

Names say the unit; a counter ends in `_total`. Every sample has the label `rank`, the port offset: a rank makes its
families and sends them as data (`packed`), and the supervisor puts those of all ranks on one page (`page`), each family
once, as the format wants it. Pages are counted as law 4 states them: free + fenced + leased + cached = the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:  # the supervisor, which makes the page, does without the core
    from sglcache.core.index import IndexStats

# The index's counters: its name for one, ours, the labels that tell it from its siblings, the help.
COUNTERS: tuple[tuple[str, str, dict[str, str], str], ...] = (
    ("requests", "sglcache_acquires", {}, "Acquires that were granted."),
    ("request_tokens", "sglcache_acquire_tokens", {}, "Tokens that granted acquires asked for."),
    ("matched_tokens", "sglcache_matched_tokens", {}, "Tokens that granted acquires found cached, in any tier."),
    ("host_matched_tokens", "sglcache_host_matched_tokens", {}, "Of the matched tokens, those loaded from the host."),
    ("refused", "sglcache_no_space", {}, "Acquires and extends refused: locks left too few pages."),
    ("commits", "sglcache_commits", {}, "Commits that took effect."),
    ("committed_pages", "sglcache_committed_pages", {}, "Pages that commits gave to the index."),
    ("duplicate_pages", "sglcache_duplicate_pages", {}, "Committed pages that the index had from another already."),
    ("evicted_nodes", "sglcache_evicted_nodes", {}, "Runs of pages taken off a tier to make room."),
    ("evicted_device_pages", "sglcache_evicted_pages", {"tier": "device"}, "Pages taken off a tier to make room."),
    ("evicted_host_pages", "sglcache_evicted_pages", {"tier": "host"}, "Pages taken off a tier to make room."),
    ("demoted_pages", "sglcache_demoted_pages", {}, "Pages evicted from the device that stayed on the host."),
    ("backup_pages", "sglcache_backup_pages", {}, "Pages sent to the host."),
    ("backup_pages_skipped", "sglcache_backup_skipped_pages", {}, "Pages not sent to the host for want of room."),
    ("backups_failed", "sglcache_copies_failed", {"direction": "backup"}, "Copies between tiers that failed."),
    ("load_pages", "sglcache_load_pages", {}, "Pages loaded back from the host."),
    ("loads_failed", "sglcache_copies_failed", {"direction": "load"}, "Copies between tiers that failed."),
    ("unpublished_pages", "sglcache_unpublished_pages", {}, "Pages of namespaces that routers can't be told of."),
    ("sessions_ended", "sglcache_sessions_ended", {}, "Sessions of model runners that are over."),
    ("splits", "sglcache_node_splits", {}, "Nodes of the tree cut in two."),
    ("merges", "sglcache_node_merges", {}, "Nodes of the tree joined with their only child."),
    ("batches", "sglcache_event_batches", {}, "Batches cut for the event stream, heartbeats included."),
    ("blocks_stored", "sglcache_event_blocks", {"event": "stored"}, "Blocks that the event stream told of."),
    ("blocks_removed", "sglcache_event_blocks", {"event": "removed"}, "Blocks that the event stream told of."),
    ("all_blocks_cleared", "sglcache_event_clears", {}, "AllBlocksCleared events."),
)

# Gauges of the index: a field of IndexStats, our name, the help.
GAUGES: tuple[tuple[str, str, str], ...] = (
    ("num_sessions", "sglcache_sessions", "Model runners attached."),
    ("num_leases", "sglcache_leases", "Leases held, fenced ones included."),
    ("num_fenced_leases", "sglcache_fenced_leases", "Leases of ended sessions whose last use is not known to be over."),
    ("num_waiting", "sglcache_waiting_requests", "Requests that wait for an eviction in slices."),
    ("num_copies", "sglcache_copies", "Copies between tiers that are on their way."),
    ("pinned_pages", "sglcache_pinned_pages", "Pages that owners keep from eviction."),
    ("num_nodes", "sglcache_nodes", "Nodes of the tree."),
    ("num_spaces", "sglcache_namespaces", "Namespaces with anything cached."),
)

# The publisher's numbers, by its name for one: ours, whether it only grows, the help.
STREAM: tuple[tuple[str, str, bool, str], ...] = (
    ("last_seq", "sglcache_stream_last_seq", False, "Number of the newest batch."),
    ("batches_sent", "sglcache_stream_sent_batches", True, "Batches put on the live stream, heartbeats included."),
    ("bytes_sent", "sglcache_stream_sent_bytes", True, "Payload bytes put on the live stream, once for all readers."),
    ("batches_skipped", "sglcache_stream_skipped_batches", True, "Batches that left the ring before they were sent."),
    ("subscriptions", "sglcache_stream_subscriptions", False, "Subscriptions that are live."),
    ("replay_requests", "sglcache_replay_requests", True, "Well-formed requests for a replay."),
    ("malformed_requests", "sglcache_replay_malformed_requests", True, "Requests for a replay that made no sense."),
    (
        "merged_requests",
        "sglcache_replay_merged_requests",
        True,
        "Requests of a reader with many waiting, answered with these.",
    ),
    ("snapshots_begun", "sglcache_snapshots_begun", True, "Snapshots begun for readers older than the ring."),
    ("snapshots_done", "sglcache_snapshots_done", True, "Snapshots told to their end."),
    ("replayed_batches", "sglcache_replay_batches", True, "Batches sent as answers to a replay request."),
    ("readers", "sglcache_replay_readers", False, "Readers of a replay that have not had its end yet."),
    ("ring_batches", "sglcache_ring_batches", False, "Batches kept for replay."),
    ("ring_bytes", "sglcache_ring_bytes", False, "Bytes of memory that the kept batches take."),
)


class RankCollector(Collector):
    """Makes the metric families of one rank. Keeps nothing between scrapes."""

    def __init__(self, rank: int, read: Callable[[], tuple[IndexStats, object | None]], info: dict[str, str]) -> None:
        """`read` gives the index's numbers and the publisher's (None: events are off); `info` is constant text."""
        self.rank = str(rank)
        self.read = read
        self.info = info

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not read the rank, which may not stand yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        index, stream = self.read()
        build = InfoMetricFamily("sglcache_build", "What runs.", labels=["rank"])
        build.add_metric([self.rank], self.info)
        yield build
        yield from self._pools(index)
        for field, name, text in GAUGES:
            yield self._gauge(name, text, getattr(index, field))
        yield from self._counters(index.counters)
        if stream is not None:
            yield from self._stream(stream)

    def _pools(self, index: IndexStats) -> Iterator[Metric]:
        where = ["rank", "resource", "tier"]
        size = GaugeMetricFamily("sglcache_pool_pages", "Pages in the pool.", labels=where)
        states = GaugeMetricFamily(
            "sglcache_pages", "Pages by state; the states add up to the pool.", labels=[*where, "state"]
        )
        locked = GaugeMetricFamily(
            "sglcache_locked_pages", "Of the cached pages, those in use or pinned.", labels=where
        )
        for pool in index.pools:
            labels = [self.rank, pool.resource, pool.tier.name.lower()]
            size.add_metric(labels, pool.total)
            for state in ("free", "fenced", "leased", "cached"):
                states.add_metric([*labels, state], getattr(pool, state))
            locked.add_metric(labels, pool.locked)
        return iter((size, states, locked))

    def _counters(self, counters: dict[str, int]) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily] = {}
        for key, name, labels, text in COUNTERS:
            if name not in families:
                families[name] = CounterMetricFamily(name, text, labels=["rank", *labels])
            families[name].add_metric([self.rank, *labels.values()], counters.get(key, 0))
        return iter(families.values())

    def _stream(self, stream: object) -> Iterator[Metric]:
        for field, name, grows, text in STREAM:
            value: Any = getattr(stream, field)
            if value is None:
                continue
            if grows:
                family = CounterMetricFamily(name, text, labels=["rank"])
                family.add_metric([self.rank], value)
                yield family
            else:
                yield self._gauge(name, text, value)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["rank"])
        family.add_metric([self.rank], value)
        return family


class LivesCollector(Collector):
    """What the supervisor knows of the ranks: there even where a rank is not."""

    def __init__(self, up: Mapping[int, bool], restarts: Mapping[int, int]) -> None:
        self.up = up
        self.restarts = restarts

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            "sglcache_rank_up", "1 while the rank serves; else its other samples are missing.", labels=["rank"]
        )
        for rank, serves in self.up.items():
            up.add_metric([str(rank)], serves)
        restarts = CounterMetricFamily(
            "sglcache_rank_restarts", "Lives of the rank beyond its first, under this supervisor.", labels=["rank"]
        )
        for rank, count in self.restarts.items():
            restarts.add_metric([str(rank)], count)
        return iter((up, restarts))


def packed(collector: Collector) -> list[Any]:
    """The collector's families as data: [name, help, type, [[sample's name, labels, value], ...]] each."""
    return [
        [it.name, it.documentation, it.type, [[sample.name, sample.labels, sample.value] for sample in it.samples]]
        for it in collector.collect()
    ]


def page(parts: Iterable[list[Any]]) -> bytes:
    """The page that Prometheus reads, of what `packed` made; families of one name are joined."""
    families: dict[str, Metric] = {}
    for name, text, kind, samples in (family for part in parts for family in part):
        family = families.setdefault(name, Metric(name, text, kind))
        for sample, labels, value in samples:
            family.add_sample(sample, labels, value)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Fixed(families.values()))
    return generate_latest(registry)


class _Fixed(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        return self._families
