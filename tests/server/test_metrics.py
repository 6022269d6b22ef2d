"""The metrics page tells what the index and the publisher count, all of it, under names that keep the rules."""

from __future__ import annotations

import re

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from sglcache.core.companions import PRUNED
from sglcache.core.histograms import Histogram
from sglcache.core.index import LEFT, Index, IndexConfig
from sglcache.core.limits import Limits
from sglcache.core.resources import Companion, MambaState, SlidingWindow
from sglcache.core.tenants import TenantStats
from sglcache.net.publisher import PublisherStats
from sglcache.server.metrics import COUNTERS, GAUGES, OF_COMPANIONS, STREAM, TENANTS, of_lives, of_rank
from sglcache.server.metrics import page as joined

STREAM_STATS = PublisherStats(
    **dict.fromkeys(PublisherStats.__dataclass_fields__, 7)  # type: ignore[arg-type]
)


def page(index: Index, stream: PublisherStats | None = STREAM_STATS) -> str:
    return joined([of_rank(3, index.stats(), stream, {"version": "1"})]).decode()


def samples(text: str) -> dict[tuple[str, ...], float]:
    """By name and label values (in the order of the labels' names), the rank's apart."""
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("rank") == "3", sample
            found[sample.name, *(labels[name] for name in sorted(labels))] = sample.value
    return found


def test_every_number_of_the_index_and_the_publisher_is_on_the_page() -> None:
    stats = Index(IndexConfig(page_size=4, num_pages=8, host_pages=8)).stats()
    assert {key for key, *_ in COUNTERS} - set(PRUNED) == set(stats.counters)
    assert {field for field, *_ in GAUGES} == set(stats._fields) - {"pools", "counters", "tenants"}
    text = {"endpoint", "replay_endpoint", "ring_first_seq"}
    assert {field for field, *_ in STREAM} == set(PublisherStats.__dataclass_fields__) - text


def test_every_number_of_a_tenant_is_on_the_page_and_without_tenants_no_word_of_them() -> None:
    assert {field for field, *_ in TENANTS} == set(TenantStats._fields) - {"tenant", "tier", "cached"}
    index = Index(IndexConfig(page_size=4, num_pages=8, tenants={"a": Limits(device_floor=2, device_ceiling=3)}))
    index.acquire(index.open_session(), 1, bytes(4 * 12), tenant="a")
    found = samples(page(index))
    assert found["sglcache_tenant_floor_pages", "a", "device"] == 2
    assert found["sglcache_tenant_ceiling_pages", "a", "device"] == 3
    assert ("sglcache_tenant_ceiling_pages", "default", "device") not in found
    assert found["sglcache_tenant_charged_pages", "a", "device"] == 3
    assert "sglcache_tenant" not in page(Index(IndexConfig(page_size=4, num_pages=8)))


def test_the_states_of_the_pages_add_up_to_the_pool() -> None:
    index = Index(IndexConfig(page_size=4, num_pages=8, host_pages=6))
    session = index.open_session()
    index.acquire(session, 1, bytes(4 * 12))
    found = samples(page(index))
    for tier, total in (("device", 8), ("host", 6)):
        states = {key[2]: value for key, value in found.items() if key[0] == "sglcache_pages" and key[3] == tier}
        assert sum(states.values()) == total == found["sglcache_pool_pages", "full", tier]
        assert states["leased"] == (3 if tier == "device" else 0)
    assert found["sglcache_acquires_total",] == 1
    assert found["sglcache_acquire_tokens_total",] == 12
    assert found["sglcache_stream_sent_batches_total",] == 7


def test_pages_that_left_are_one_family_by_tier_and_reason() -> None:
    """A20: whoever adds them up over the reasons has what left, and what was lost is `evicted` alone."""
    index = Index(IndexConfig(page_size=4, num_pages=8, host_pages=6))
    for number, name in enumerate(name for reasons in LEFT for name in reasons):
        index.counters[name] = 1 << number
    index.counters["corrupt_pages"] = 64
    found = {key[1:]: value for key, value in samples(page(index)).items() if key[0] == "sglcache_removed_pages_total"}
    assert found == {
        ("evicted", "full", "device"): 1,
        ("demoted", "full", "device"): 2,
        ("cleared", "full", "device"): 4,
        ("evicted", "full", "host"): 8,
        ("unbacked", "full", "host"): 16,
        ("cleared", "full", "host"): 32,
        ("corrupt", "full", "host"): 64,
    }


COMPANIONS = (Companion(SlidingWindow(2), 6, 5), Companion(MambaState(), 4, 3))


def test_every_number_of_a_companion_stands_beside_full_kvs_under_its_name() -> None:
    index = Index(IndexConfig(page_size=4, num_pages=8, host_pages=7, companions=COMPANIONS))
    names = {name for name, *_ in OF_COMPANIONS}
    expected = {f"{resource}_{name}" for resource in ("window", "mamba") for name in names}
    assert {key for key, *_ in COUNTERS} | expected == set(index.stats().counters)
    for number, key in enumerate(sorted(expected), 1001):
        index.counters[key] = number
    found = samples(page(index))
    told = [value for key, value in found.items() if {"window", "mamba"} & set(key) and value > 1000]
    assert sorted(told) == list(range(1001, 1001 + len(expected)))
    assert {key[1:]: value for key, value in found.items() if key[0] == "sglcache_pool_pages"} == {
        ("full", "device"): 8,
        ("full", "host"): 7,
        ("window", "device"): 6,
        ("window", "host"): 5,
        ("mamba", "device"): 4,
        ("mamba", "host"): 3,
    }
    assert found["sglcache_pages", "window", "free", "device"] == 6
    left = found["sglcache_removed_pages_total", "evicted", "mamba", "host"]
    assert left == index.counters["mamba_evicted_host_slots"]


def test_with_events_off_there_is_no_stream_to_tell_of() -> None:
    text = page(Index(IndexConfig(page_size=4, num_pages=8, events=False)), None)
    assert "sglcache_stream" not in text
    assert "sglcache_pages" in text


def test_names_and_help_keep_the_rules() -> None:
    families = list(text_string_to_metric_families(page(Index(IndexConfig(page_size=4, num_pages=8)))))
    assert len(families) > 30
    for family in families:
        assert re.fullmatch(r"sglcache_[a-z_]+", family.name)
        assert family.documentation.endswith(".")
        assert not family.name.endswith("_total"), "the suffix is the sample's"


def test_several_ranks_stand_on_one_page_each_family_once() -> None:
    index = Index(IndexConfig(page_size=4, num_pages=8))
    ranks = [of_rank(rank, index.stats(), STREAM_STATS, {"version": "1"}) for rank in (0, 2)]
    # As it comes through the channel.
    ranks = msgspec.msgpack.decode(msgspec.msgpack.encode(ranks))
    lives = of_lives({0: (True, 0), 1: (False, 4), 2: (True, 0)})
    text = joined([lives, *ranks]).decode()
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]
    assert len(names) == len(set(names))
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert [found["sglcache_rank_up", str(rank)] for rank in range(3)] == [1, 0, 1]
    assert [found["sglcache_rank_restarts_total", str(rank)] for rank in range(3)] == [0, 4, 0]
    assert found["sglcache_stream_sent_batches_total", "0"] == found["sglcache_stream_sent_batches_total", "2"] == 7
    assert ("sglcache_stream_sent_batches_total", "1") not in found


def test_a_histogram_is_told_as_buckets_that_add_up() -> None:
    histogram = Histogram((0.5, 1.0))
    for value in (0.1, 0.5, 0.7, 3.0):
        histogram.observe(value)
    index = Index(IndexConfig(page_size=4, num_pages=8))
    told = of_rank(3, index.stats(), None, {}, observed={"copies": [({"direction": "load"}, histogram.observed())]})
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(told))  # as it comes through the channel
    found = {key: value for key, value in samples(joined([told]).decode()).items() if "copy_seconds" in key[0]}
    assert found == {
        ("sglcache_copy_seconds_bucket", "load", "0.5"): 2,
        ("sglcache_copy_seconds_bucket", "load", "1.0"): 3,
        ("sglcache_copy_seconds_bucket", "load", "+Inf"): 4,
        ("sglcache_copy_seconds_count", "load"): 4,
        ("sglcache_copy_seconds_sum", "load"): 4.3,
    }
