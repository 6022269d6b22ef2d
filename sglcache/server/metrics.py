"""`/metrics`: what the ranks count anyway, read when a scraper asks. Nothing here is on a command's path.

Names say the unit; a counter ends in `_total`. Every sample has the label `rank`, the port offset: a rank tells its
families as data (`of_rank`), and the supervisor puts those of all ranks on one page (`page`), each family once, as the
format wants it. Pages are counted as law 4 states them: free + fenced + leased + cached = the pool. What there is of
each resource has the label `resource`: full, and of a hybrid model's tree window and mamba; what is called pages there
is slots of states of the last.

Prometheus's library is loaded with the first page, by the supervisor alone: a rank's loop must not stall for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:  # the supervisor does without the core
    from sglcache.core.histograms import Observed
    from sglcache.core.index import IndexStats
    from sglcache.memory.engine import LaneStats


class Family(NamedTuple):
    """One metric, by all its labels."""

    name: str  # without the suffix that its kind gives the samples
    text: str
    kind: Literal["gauge", "counter", "info", "histogram"]
    samples: list[tuple[dict[str, str], Any]]  # a number each; of a histogram an `Observed`


LEFT = "sglcache_removed_pages"
FULL = {"resource": "full"}
WHY_LEFT = (
    "Cached pages that left a tier: evicted to make room, and no tier has them; demoted to make room on the device, "
    "the host has them; unbacked to make room on the host, the device has them; cleared by a clear; pruned, since a "
    "window or a state has gone that a match would need; corrupt, their bytes, or those of what they hung on, being "
    "wrong."
)

# The index's counters: its name for one, ours, the labels that tell it from its siblings, the help.
COUNTERS: tuple[tuple[str, str, dict[str, str], str], ...] = (
    ("requests", "sglcache_acquires", {}, "Acquires that were granted."),
    ("request_tokens", "sglcache_acquire_tokens", {}, "Tokens that granted acquires asked for."),
    ("matched_tokens", "sglcache_matched_tokens", {}, "Tokens that granted acquires found cached, in any tier."),
    ("host_matched_tokens", "sglcache_host_matched_tokens", {}, "Of the matched tokens, those loaded from the host."),
    (
        "l3_matched_tokens",
        "sglcache_third_matched_tokens",
        {},
        "Of the matched tokens, those that acquires waited for the third tier to bring to the host.",
    ),
    ("refused", "sglcache_no_space", {}, "Acquires and extends refused: locks left too few pages."),
    ("commits", "sglcache_commits", {}, "Commits that took effect."),
    (
        "committed_pages",
        "sglcache_committed_pages",
        FULL,
        "Pages that commits, and loads from the host, gave to the index.",
    ),
    (
        "duplicate_pages",
        "sglcache_duplicate_pages",
        FULL,
        "Pages that were to be given to it, and that the index had from another already.",
    ),
    ("evicted_nodes", "sglcache_evicted_nodes", {}, "Runs of pages taken off a tier to make room."),
    ("evicted_device_pages", LEFT, {**FULL, "tier": "device", "reason": "evicted"}, WHY_LEFT),
    ("demoted_pages", LEFT, {**FULL, "tier": "device", "reason": "demoted"}, WHY_LEFT),
    ("cleared_device_pages", LEFT, {**FULL, "tier": "device", "reason": "cleared"}, WHY_LEFT),
    ("evicted_host_pages", LEFT, {**FULL, "tier": "host", "reason": "evicted"}, WHY_LEFT),
    ("unbacked_pages", LEFT, {**FULL, "tier": "host", "reason": "unbacked"}, WHY_LEFT),
    ("cleared_host_pages", LEFT, {**FULL, "tier": "host", "reason": "cleared"}, WHY_LEFT),
    ("corrupt_pages", LEFT, {**FULL, "tier": "host", "reason": "corrupt"}, WHY_LEFT),
    ("pruned_device_pages", LEFT, {**FULL, "tier": "device", "reason": "pruned"}, WHY_LEFT),
    ("pruned_host_pages", LEFT, {**FULL, "tier": "host", "reason": "pruned"}, WHY_LEFT),
    ("backup_pages", "sglcache_backup_pages", FULL, "Pages sent to the host."),
    ("backup_pages_skipped", "sglcache_backup_skipped_pages", FULL, "Pages not sent to the host for want of room."),
    ("backups_retried", "sglcache_backup_retries", {}, "Paths without room on the host that were sent later."),
    ("backups_failed", "sglcache_copies_failed", {"direction": "backup"}, "Copies between tiers that failed."),
    ("load_pages", "sglcache_load_pages", FULL, "Pages loaded back from the host."),
    ("loads_failed", "sglcache_copies_failed", {"direction": "load"}, "Copies between tiers that failed."),
    ("loads_declined", "sglcache_loads_declined", {}, "Host hits beyond the quota, to be computed again."),
    ("l3_store_pages", "sglcache_third_store_pages", {}, "Pages sent to the third tier."),
    (
        "l3_stores_failed",
        "sglcache_third_store_failed_pages",
        {},
        "Of the pages sent to the third tier, those it did not take.",
    ),
    (
        "l3_pages_skipped",
        "sglcache_third_skipped_pages",
        {},
        "Pages not sent to the third tier: too many waited to be stored.",
    ),
    (
        "l3_stores_retried",
        "sglcache_third_store_retries",
        {},
        "Paths not sent to the third tier at first that were sent later.",
    ),
    ("prefetches", "sglcache_prefetches", {}, "Times that the third tier was to be looked into for a request."),
    (
        "prefetches_declined",
        "sglcache_prefetches_declined",
        {},
        "Looks into the third tier that were not begun, for the host had no room.",
    ),
    ("prefetch_pages", "sglcache_prefetch_pages", {}, "Pages that the third tier was asked for."),
    ("prefetched_pages", "sglcache_prefetched_pages", {}, "Pages that came to the host from the third tier."),
    ("unpublished_pages", "sglcache_unpublished_pages", {}, "Pages of namespaces that routers can't be told of."),
    ("sessions_ended", "sglcache_sessions_ended", {}, "Sessions of model runners that are over."),
    ("splits", "sglcache_node_splits", {}, "Nodes of the tree cut in two."),
    ("merges", "sglcache_node_merges", {}, "Nodes of the tree joined with their only child."),
    ("batches", "sglcache_event_batches", {}, "Batches cut for the event stream, heartbeats included."),
    ("blocks_stored", "sglcache_event_blocks", {"event": "stored"}, "Blocks that the event stream told of."),
    ("blocks_removed", "sglcache_event_blocks", {"event": "removed"}, "Blocks that the event stream told of."),
    ("all_blocks_cleared", "sglcache_event_clears", {}, "AllBlocksCleared events."),
)

# The index's counters of each companion, behind its name and an underscore: the family of full KV's, the labels beside
# `resource`.
OF_COMPANIONS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("committed_slots", "sglcache_committed_pages", {}),
    ("duplicate_slots", "sglcache_duplicate_pages", {}),
    ("evicted_device_slots", LEFT, {"tier": "device", "reason": "evicted"}),
    ("demoted_slots", LEFT, {"tier": "device", "reason": "demoted"}),
    ("evicted_host_slots", LEFT, {"tier": "host", "reason": "evicted"}),
    ("unbacked_slots", LEFT, {"tier": "host", "reason": "unbacked"}),
    ("cleared_device_slots", LEFT, {"tier": "device", "reason": "cleared"}),
    ("cleared_host_slots", LEFT, {"tier": "host", "reason": "cleared"}),
    ("corrupt_slots", LEFT, {"tier": "host", "reason": "corrupt"}),
    ("backup_slots", "sglcache_backup_pages", {}),
    ("backup_slots_skipped", "sglcache_backup_skipped_pages", {}),
    ("load_slots", "sglcache_load_pages", {}),
)

# Gauges of the index: a field of IndexStats, our name, the help.
GAUGES: tuple[tuple[str, str, str], ...] = (
    ("num_sessions", "sglcache_sessions", "Model runners attached."),
    ("num_leases", "sglcache_leases", "Leases held, fenced ones included."),
    ("num_fenced_leases", "sglcache_fenced_leases", "Leases of ended sessions whose last use is not known to be over."),
    ("num_waiting", "sglcache_waiting_requests", "Requests that wait for room, or for the third tier."),
    ("num_copies", "sglcache_copies", "Copies between all tiers that are on their way, the third included."),
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


# The copy engine's numbers for a direction, by a field of LaneStats: ours, whether it only grows, the help.
COPIES: tuple[tuple[str, str, bool, str], ...] = (
    ("bytes", "sglcache_copied_bytes", True, "Bytes written by copies between tiers, of every shard."),
    ("seconds", "sglcache_copying_seconds", True, "Seconds in which a copy between tiers was in flight."),
    ("in_flight", "sglcache_copies_in_flight", False, "Copies between tiers that are submitted and not over."),
    ("oldest_s", "sglcache_oldest_copy_seconds", False, "Age of the oldest copy in flight; 0: there is none."),
)


# A tenant's on a tier, by a field of TenantStats: ours, whether it only grows, the help.
TENANTS: tuple[tuple[str, str, bool, str], ...] = (
    ("floor", "sglcache_tenant_floor_pages", False, "Pages of a tenant that are not evicted for others."),
    ("ceiling", "sglcache_tenant_ceiling_pages", False, "Pages that a tenant may have; without one it is missing."),
    ("charged", "sglcache_tenant_charged_pages", False, "Pages that a tenant has, cached, leased and fenced."),
    ("locked", "sglcache_tenant_locked_pages", False, "Cached pages of a tenant that are in use or pinned."),
    ("taken", "sglcache_tenant_taken_pages", True, "Pages of a tenant evicted to make room for others."),
    (
        "broken",
        "sglcache_tenant_broken_pages",
        True,
        "Pages of a tenant evicted for others below its floor: they hung on another's, and nothing else could go.",
    ),
    ("skipped", "sglcache_tenant_skipped_pages", True, "Pages not copied to a tier since the limits left no room."),
)
# The third tier's, by its name for one in `ThirdTier.facts`: ours, whether it only grows, the help.
THIRD: tuple[tuple[str, str, bool, str], ...] = (
    ("ready", "sglcache_third_ready", False, "1 once it is known what the third tier held before this life."),
    ("connected", "sglcache_third_connected", False, "1 while the third tier can be asked; else all in it is a miss."),
    (
        "broken",
        "sglcache_third_broken",
        False,
        "1 if the third tier can't be opened or read: it is left alone, all is a miss.",
    ),
    ("writable", "sglcache_third_writable", False, "1 unless the last page to be stored could not be written."),
    (
        "spared",
        "sglcache_third_spared_acquires",
        True,
        "Acquires that did not ask the third tier, for it did not answer others.",
    ),
    ("num_pages", "sglcache_third_pages", False, "Pages that the third tier holds."),
    ("num_bytes", "sglcache_third_bytes", False, "Bytes that the third tier's pages take."),
    ("max_bytes", "sglcache_third_max_bytes", False, "Bytes that the third tier's pages may take."),
)
# Why pages left it, by its name for one: the reason, of `LEFT`.
THIRD_LEFT = (("evicted_pages", "evicted"), ("discarded_pages", "corrupt"), ("cleared_pages", "cleared"))
# Of what goes to it and comes from it, by direction: the part of the names there, ours, the help.
THIRD_MOVED: tuple[tuple[str, str, str], ...] = (
    ("pages", "sglcache_third_moved_pages", "Pages stored in the third tier, and fetched from it."),
    ("bytes", "sglcache_third_moved_bytes", "Bytes of pages stored in the third tier, and fetched from it."),
    ("seconds", "sglcache_third_moving_seconds", "Seconds that threads stored pages, and fetched them, added up."),
)
THIRD_MISSED = "Pages that were to be fetched, or to be stored, and were not, by what was wrong with the first of them."
THIRD_QUEUED = "Work for the third tier that is not over."

# What looks through the host tier, by its name for one in `Scrubbing.facts`: ours, whether it only grows, the help.
SCRUB: tuple[tuple[str, str, bool, str], ...] = (
    ("pages", "sglcache_scrubbed_pages", True, "Host pages looked at for whether their bytes have changed."),
    ("bytes", "sglcache_scrubbed_bytes", True, "Bytes of the host pages that were looked at."),
    (
        "compared_pages",
        "sglcache_scrub_compared_pages",
        True,
        "Host pages looked at whose bytes were known from before.",
    ),
    ("mismatches", "sglcache_scrub_mismatches", True, "Host pages whose bytes had changed by themselves."),
    ("rounds", "sglcache_scrub_rounds", True, "Times that the whole host tier was looked through."),
    (
        "round_age_s",
        "sglcache_scrub_round_age_seconds",
        False,
        "Since the whole host tier was last looked through; missing before the first time.",
    ),
    ("seconds", "sglcache_scrubbing_seconds", True, "Seconds of a processor that looking through the host tier took."),
)

# Distributions, by their keys in `latencies.of_rank`: ours, the help. All are of seconds.
HISTOGRAMS: tuple[tuple[str, str, str], ...] = (
    (
        "commands",
        "sglcache_command_seconds",
        "From reading a command to writing its answer, where that was in the turn that served it: work, and no wait.",
    ),
    (
        "waits",
        "sglcache_command_wait_seconds",
        "From reading a command to writing its answer, where that was later: it waited for an event, a copy, room, the "
        "third tier, or long work.",
    ),
    (
        "events",
        "sglcache_runner_event_wait_seconds",
        "From when a runner names an event, with a commit or release, to its end, for each shard; none if it was over.",
    ),
    ("copies", "sglcache_copy_seconds", "From a copy's submission to its end, between tiers; of those that went well."),
    (
        "third",
        "sglcache_third_request_seconds",
        "From asking the third tier to its answer: to store pages, to fetch them, or to probe what it has.",
    ),
    ("delays", "sglcache_stream_delay_seconds", "From a batch's cut to its being sent on the live stream."),
    ("snapshots", "sglcache_snapshot_seconds", "From a snapshot's begin to its last frame, as its reader took it."),
    (
        "lifetimes",
        "sglcache_page_lifetime_seconds",
        "From when a page came to the cache to when it left a tier to make room.",
    ),
    (
        "idle",
        "sglcache_page_idle_seconds",
        "From when a page was last let go of, by a request or a pin, to when it left a tier to make room.",
    ),
    ("stalls", "sglcache_loop_stall_seconds", "How late the event loop comes to a timer."),
)


def of_rank(
    rank: int,
    index: IndexStats,
    stream: object | None,
    info: dict[str, str],
    lanes: Sequence[LaneStats] = (),
    tiers: Mapping[str, tuple[int, int]] | None = None,
    third: Mapping[str, Any] | None = None,
    oldest: Mapping[str, float] | None = None,
    troubles: Iterable[str] = (),
    longest_stall_s: float | None = None,
    slow_readers: int = 0,
    scrub: Mapping[str, Any] | None = None,
    observed: Mapping[str, Sequence[tuple[dict[str, str], Observed]]] | None = None,
) -> list[Family]:
    """A rank's families: of the index, of the publisher (None: events are off), `info`, which is constant text, of the
    copy engine by direction, of memory by tier (bytes that are ready, and all), and of the third tier (None: there is
    none; of what only its store's master knows, None too), and of what `watch` sees: by kind the age of the oldest
    thing in flight, the kinds that are in trouble, and how long the loop stood still at most; of what looks through
    the host tier (None: nothing does); and what was `observed`, by the keys of `HISTOGRAMS`.
    """
    own = {"rank": str(rank)}
    families = [Family("sglcache_build", "What runs.", "info", [({**own, **info}, 1)])]
    families += _pools(own, index)
    families += [Family(name, text, "gauge", [(own, getattr(index, field))]) for field, name, text in GAUGES]
    families += _counters(own, index)
    families += _tenants(own, index)
    for field, name, grows, text in COPIES:
        samples = [({**own, "direction": lane.name}, float(getattr(lane, field))) for lane in lanes]
        families.append(Family(name, text, "counter" if grows else "gauge", samples))
    for name, place, text in (
        ("sglcache_memory_ready_bytes", 0, "Memory of a tier that is there to be used."),
        ("sglcache_memory_bytes", 1, "Memory of a tier, all that there will be."),
    ):
        pairs = (tiers or {}).items()
        samples = [({**own, "tier": tier.lower()}, float(pair[place])) for tier, pair in pairs]
        families.append(Family(name, text, "gauge", samples))
    if third is not None:
        families += _third(own, third)
    for key, name, grows, text in SCRUB:
        if scrub is not None and (value := scrub[key]) is not None:
            families.append(Family(name, text, "counter" if grows else "gauge", [(own, float(value))]))
    if longest_stall_s is not None:
        families += _watch(own, oldest or {}, set(troubles), longest_stall_s)
    for key, name, text in HISTOGRAMS:
        if observed is not None and key in observed:
            families.append(Family(name, text, "histogram", [({**own, **labels}, of) for labels, of in observed[key]]))
    families.append(
        Family("sglcache_slow_readers", "Peers thrown out: they read no answers.", "counter", [(own, slow_readers)])
    )
    if stream is not None:
        for field, name, grows, text in STREAM:
            if (value := getattr(stream, field)) is not None:
                families.append(Family(name, text, "counter" if grows else "gauge", [(own, value)]))
    return families


def _watch(
    own: dict[str, str], oldest: Mapping[str, float], troubles: set[str], longest_stall_s: float
) -> Iterator[Family]:
    ages = [({**own, "what": what}, age_s) for what, age_s in oldest.items()]
    text = "Age of the oldest thing in flight, by kind; 0: there is none."
    yield Family("sglcache_oldest_in_flight_seconds", text, "gauge", ages)
    flags = [({**own, "what": what}, float(what in troubles)) for what in oldest]
    yield Family("sglcache_trouble", "1 while something of that kind does not get on: see /health.", "gauge", flags)
    text = "The longest time in this life that the event loop came late to a timer."
    yield Family("sglcache_longest_loop_stall_seconds", text, "gauge", [(own, longest_stall_s)])


def _counters(own: dict[str, str], index: IndexStats) -> Iterable[Family]:
    """Those that this index has."""
    families: dict[str, Family] = {}
    for key, name, labels, text in COUNTERS:
        if key in index.counters:
            family = families.setdefault(name, Family(name, text, "counter", []))
            family.samples.append(({**own, **labels}, index.counters[key]))
    for resource in dict.fromkeys(pool.resource for pool in index.pools if pool.resource != FULL["resource"]):
        for key, name, labels in OF_COMPANIONS:
            sample = {**own, "resource": resource, **labels}, index.counters[f"{resource}_{key}"]
            families[name].samples.append(sample)
    return families.values()


def _pools(own: dict[str, str], index: IndexStats) -> Iterator[Family]:
    size = Family("sglcache_pool_pages", "Pages in the pool of a resource on a tier.", "gauge", [])
    states = Family("sglcache_pages", "Pages by state; the states add up to the pool.", "gauge", [])
    locked = Family("sglcache_locked_pages", "Of the cached pages, those in use or pinned.", "gauge", [])
    for pool in index.pools:
        labels = {**own, "resource": pool.resource, "tier": pool.tier.name.lower()}
        size.samples.append((labels, pool.total))
        for state in ("free", "fenced", "leased", "cached"):
            states.samples.append(({**labels, "state": state}, getattr(pool, state)))
        locked.samples.append((labels, pool.locked))
    return iter((size, states, locked))


def _tenants(own: dict[str, str], index: IndexStats) -> Iterator[Family]:
    """None where there are none."""
    if index.tenants:
        for field, name, grows, text in TENANTS:
            samples = [
                ({**own, "tenant": each.tenant, "tier": each.tier.name.lower()}, float(value))
                for each in index.tenants
                if (value := getattr(each, field)) is not None
            ]
            yield Family(name, text, "counter" if grows else "gauge", samples)


def _third(own: dict[str, str], facts: Mapping[str, Any]) -> Iterator[Family]:
    for key, name, grows, text in THIRD:
        if (value := facts.get(key)) is not None:
            yield Family(name, text, "counter" if grows else "gauge", [(own, float(value))])
    left = [
        ({**own, **FULL, "tier": "third", "reason": reason}, float(value))
        for key, reason in THIRD_LEFT
        if (value := facts.get(key)) is not None
    ]
    yield Family(LEFT, WHY_LEFT, "counter", left)
    for key, name, text in THIRD_MOVED:
        samples = [({**own, "direction": way}, float(facts.get(f"{way}_{key}", 0))) for way in ("stored", "fetched")]
        yield Family(name, text, "counter", samples)
    missed = [
        ({**own, "direction": way, "reason": reason}, float(count))
        for way, key in (("stored", "not_stored"), ("fetched", "misses"))
        for reason, count in facts.get(key, {}).items()
    ]
    yield Family("sglcache_third_missed_pages", THIRD_MISSED, "counter", missed)
    queued = [({**own, "kind": kind}, float(count)) for kind, count in facts["queued"].items()]
    yield Family("sglcache_third_queue", THIRD_QUEUED, "gauge", queued)


def of_lives(ranks: Mapping[int, tuple[bool, int]]) -> list[Family]:
    """What the supervisor knows of each rank, even where it is away: whether it serves, and its lives but the first."""
    up = Family("sglcache_rank_up", "1 while the rank serves; else its other samples are missing.", "gauge", [])
    restarts = Family(
        "sglcache_rank_restarts", "Lives of the rank but the first, under this supervisor.", "counter", []
    )
    for rank, (serves, count) in ranks.items():
        up.samples.append(({"rank": str(rank)}, serves))
        restarts.samples.append(({"rank": str(rank)}, count))
    return [up, restarts]


def page(parts: Iterable[Iterable[Any]]) -> bytes:
    """The page that Prometheus reads, of families (as tuples, or lists that came through a channel)."""
    from prometheus_client import CollectorRegistry, Metric, generate_latest

    suffixes = {"gauge": "", "counter": "_total", "info": "_info"}
    families: dict[str, Metric] = {}
    for name, text, kind, samples in (family for part in parts for family in part):
        family = families.setdefault(name, Metric(name, text, kind))
        for labels, value in samples:
            if kind != "histogram":
                family.add_sample(name + suffixes[kind], labels, float(value))
                continue
            bounds, counts, seen = value
            total = 0
            for most, count in zip([*map(repr, bounds), "+Inf"], counts, strict=True):
                total += count
                family.add_sample(f"{name}_bucket", {**labels, "le": most}, float(total))
            family.add_sample(f"{name}_count", labels, float(total))
            family.add_sample(f"{name}_sum", labels, seen)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Fixed(families.values()))
    return generate_latest(registry)


class _Fixed:
    """As a prometheus_client collector."""

    def __init__(self, families: Iterable[Any]) -> None:
        self._families = families

    def describe(self) -> Iterable[Any]:
        return []

    def collect(self) -> Iterable[Any]:
        return self._families
