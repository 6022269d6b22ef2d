"""Every metric that a daemon can tell, as the table of docs/metrics.md: `python -m sglcache.server.catalogue`.

It is made of what makes the page (`metrics.of_rank`), from ranks that have everything there is: so nothing can be told
that is not in the table, and a label's values are listed because they come from the closed sets that the code has.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sglcache.core.forecast import Sizes, forecast
from sglcache.core.histograms import Histogram
from sglcache.core.index import Index, IndexConfig
from sglcache.core.key import Keys
from sglcache.core.limits import Limits
from sglcache.core.resources import Companion, MambaState, SlidingWindow
from sglcache.core.reuse import Reuse
from sglcache.memory.engine import NAMES, LaneStats
from sglcache.memory.scrub import ScrubStats
from sglcache.net.publisher import PublisherStats
from sglcache.server import latencies, metrics, reuse
from sglcache.server.watch import WORDS
from sglcache.storage.engine import KINDS
from sglcache.storage.page import REASONS

OPEN = {
    "rank": "0, 1, ...",
    "tenant": "the names of `[tenants]`",
    "version": "",
    "hash": "",
    "model_name": "",
    "le": "a bound",
}
"""Labels whose values are no closed set: there are as many as ranks, or tenants (64 at most), or one."""
ORDER = {name: place for place, name in enumerate(("rank", "resource", "tier", "tenant", "direction", "command"))}


class Metric(NamedTuple):
    name: str  # with the suffix of its samples; a histogram's without
    kind: str
    labels: dict[str, list[str]]  # the values of each
    text: str


def families() -> list[metrics.Family]:
    """As of a page on which everything is that can be; numbers mean nothing."""
    index = Index(
        IndexConfig(
            page_size=4,
            num_pages=8,
            host_pages=8,
            companions=(Companion(SlidingWindow(2), 8, 8), Companion(MambaState(), 8, 8)),
        )
    )
    shared = Index(IndexConfig(page_size=4, num_pages=8, host_pages=8, tenants={"NAME": Limits(device_ceiling=8)}))
    seen = Histogram().observed()
    observed: latencies.Observations = {
        "commands": [*latencies.CommandTimes().observed(latencies.WORK)],
        "waits": [*latencies.CommandTimes().observed(latencies.WAIT)],
        "copies": [({"direction": name}, seen) for name in NAMES.values()],
        "third": [({"kind": kind}, seen) for kind in ("store", "fetch", "probe")],
    }
    observed |= {key: [({"tier": tier}, seen) for tier in latencies.TIERS] for key in ("lifetimes", "idle")}
    observed |= {key: [({}, seen)] for key in ("events", "delays", "snapshots", "stalls")}
    third: dict[str, Any] = {
        **{key: 1 for key, *_ in metrics.THIRD},
        **{key: 1 for key, _ in metrics.THIRD_LEFT},
        **{key: dict.fromkeys(REASONS, 1) for key in ("not_stored", "misses")},
        "queued": dict.fromkeys(KINDS, 1),
    }
    info = {"version": "1", "hash": "sha256", "model_name": "m"}
    told = metrics.of_rank(
        0,
        index.stats()._replace(tenants=shared.stats().tenants),
        PublisherStats(**dict.fromkeys(PublisherStats.__dataclass_fields__, 1)),  # type: ignore[arg-type]
        info,
        lanes=[LaneStats(name, 1, 1, 1, 1.0, 1, 1, 1.0) for name in NAMES.values()],
        tiers=dict.fromkeys(latencies.TIERS, (1, 1)),
        third=third,
        oldest=dict.fromkeys(WORDS, 0.0),
        longest_stall_s=0.0,
        scrub={**ScrubStats(1, 1, 1, 1, 1.0, 1.0)._asdict(), "mismatches": 1},
        observed=observed,
    )
    follows = Reuse(Keys(4, False), 1, 16, 1.0)
    sizes = Sizes(8, 1, 8, 1, 8, 1)
    reused = reuse.families({"rank": "0"}, follows, forecast(follows.curve(0.0), sizes))
    return [*metrics.of_lives({0: (True, 0)}), *told, *reused]


def catalogue() -> list[Metric]:
    """All of them, by name."""
    found: dict[str, Metric] = {}
    for name, text, kind, samples in families():
        suffix = {"counter": "_total", "info": "_info"}.get(kind, "")
        metric = found.setdefault(name, Metric(name + suffix, kind, {}, text))
        for labels, _ in samples:
            for label, value in labels.items():
                values = metric.labels.setdefault(label, [])
                if value not in values:
                    values.append(value)
    return sorted(found.values())


def table() -> str:
    """Markdown: every metric."""
    lines = ["| metric | kind | labels | what it says |", "|---|---|---|---|"]
    for name, kind, labels, text in catalogue():
        told = ", ".join(f"`{each}`" for each in sorted(labels, key=lambda each: ORDER.get(each, len(ORDER))))
        lines.append(f"| `{name}` | {kind} | {told} | {text} |")
    return "\n".join(lines)


def labels() -> str:
    """Markdown: every label, and its values."""
    values: dict[str, list[str]] = {}
    for metric in catalogue():
        for label, each in metric.labels.items():
            known = values.setdefault(label, [])
            known += [value for value in each if value not in known]
    lines = ["| label | values |", "|---|---|"]
    for label in sorted(values, key=lambda each: (ORDER.get(each, len(ORDER)), each)):
        if (told := OPEN.get(label)) is None:
            told = ", ".join(f"`{value}`" for value in sorted(values[label]))
        if told:
            lines.append(f"| `{label}` | {told} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(f"{labels()}\n\n{table()}")
