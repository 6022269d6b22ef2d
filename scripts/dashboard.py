#!/usr/bin/env python3
"""deploy/grafana/sglcache.json, of which a person writes what is here: rows of panels, each a title and its queries.

    scripts/dashboard.py > deploy/grafana/sglcache.json

A test holds that the file is what this makes, and another that each query names only metrics and labels that there are.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

WIDTH, HEIGHT = 24, 8  # of Grafana's grid; of a panel
SELECT = 'instance=~"$instance", rank=~"$rank"'
RATE = "$__rate_interval"


class Panel(NamedTuple):
    title: str
    unit: str
    queries: list[tuple[str, str]]  # (PromQL, legend)
    text: str  # what to make of it
    stack: bool = False
    kind: str = "timeseries"
    width: int = 8


def one(name: str, **labels: str) -> str:
    """A selector for the chosen daemons and ranks; a label's value is a regular expression."""
    more = "".join(f', {label}=~"{value}"' for label, value in labels.items())
    return f"{name}{{{SELECT}{more}}}"


def rate(name: str, **labels: str) -> str:
    return f"rate({one(name, **labels)}[{RATE}])"


def total(expression: str, *by: str) -> str:
    return f"sum by ({', '.join(by)}) ({expression})" if by else f"sum({expression})"


def quantiles(name: str, *by: str, of: tuple[float, ...] = (0.5, 0.99), **labels: str) -> list[tuple[str, str]]:
    legend = "".join(f" {{{{{each}}}}}" for each in by)
    inner = total(rate(f"{name}_bucket", **labels), "le", *by)
    return [(f"histogram_quantile({q}, {inner})", f"p{q * 100:g}{legend}") for q in of]


def share(part: str, whole: str) -> str:
    return f"{total(part)} / {total(whole)}"


TOKENS = rate("sglcache_acquire_tokens_total")
ROWS: list[tuple[str, list[Panel]]] = [
    (
        "Serving",
        [
            Panel("Ranks that serve", "none", [(total(one("sglcache_rank_up")), "")], "", kind="stat", width=4),
            Panel(
                "Hit rate",
                "percentunit",
                [(share(rate("sglcache_matched_tokens_total"), TOKENS), "")],
                "Of the tokens that granted acquires asked for, those found cached.",
                kind="stat",
                width=4,
            ),
            Panel("Runners", "none", [(total(one("sglcache_sessions")), "")], "", kind="stat", width=4),
            Panel(
                "Troubles",
                "none",
                [(total(one("sglcache_trouble")), "")],
                "Kinds of things that do not get on; /health says which and whose.",
                kind="stat",
                width=4,
            ),
            Panel(
                "Restarts, a day",
                "none",
                [(f"sum(increase({one('sglcache_rank_restarts_total')}[1d]))", "")],
                "",
                kind="stat",
                width=4,
            ),
            Panel("Version", "none", [(one("sglcache_build_info"), "{{version}}")], "", kind="stat", width=4),
        ],
    ),
    (
        "Hits",
        [
            Panel(
                "Tokens found, by tier",
                "percentunit",
                [
                    (
                        f"({total(rate('sglcache_matched_tokens_total'))} - "
                        f"{total(rate('sglcache_host_matched_tokens_total'))}) / {total(TOKENS)}",
                        "device",
                    ),
                    (
                        f"({total(rate('sglcache_host_matched_tokens_total'))} - "
                        f"{total(rate('sglcache_third_matched_tokens_total'))}) / {total(TOKENS)}",
                        "host",
                    ),
                    (share(rate("sglcache_third_matched_tokens_total"), TOKENS), "third"),
                ],
                "Of the tokens asked for. What the third tier brings comes by the host, and is told apart.",
                stack=True,
            ),
            Panel(
                "Tokens",
                "none",
                [(total(TOKENS), "asked for"), (total(rate("sglcache_matched_tokens_total")), "found cached")],
                "A second.",
            ),
            Panel(
                "Requests",
                "reqps",
                [
                    (total(rate("sglcache_acquires_total")), "granted"),
                    (total(rate("sglcache_no_space_total")), "refused: no space"),
                    (total(rate("sglcache_loads_declined_total")), "host hits not loaded"),
                ],
                "Refused means that leases and pins left too few pages.",
            ),
        ],
    ),
    (
        "Pools",
        [
            Panel(
                "Device pages",
                "none",
                [
                    (
                        total(one("sglcache_pages", tier="device", resource="$resource"), "state"),
                        "{{state}}",
                    )
                ],
                "The states add up to the pool. Fenced: a dead session's, and still in use.",
                stack=True,
            ),
            Panel(
                "Host pages",
                "none",
                [(total(one("sglcache_pages", tier="host", resource="$resource"), "state"), "{{state}}")],
                "Likewise.",
                stack=True,
            ),
            Panel(
                "Cached, and held",
                "none",
                [
                    (total(one("sglcache_locked_pages", resource="$resource"), "tier"), "in use, {{tier}}"),
                    (total(one("sglcache_pinned_pages")), "pinned"),
                ],
                "Cached pages that can't be evicted.",
            ),
        ],
    ),
    (
        "What leaves, and how old",
        [
            Panel(
                "Pages that left, by reason",
                "none",
                [
                    (
                        total(rate("sglcache_removed_pages_total", resource="$resource"), "tier", "reason"),
                        "{{tier}}: {{reason}}",
                    )
                ],
                "A second. Lost is what is evicted; what is demoted or unbacked is in another tier.",
                stack=True,
            ),
            Panel(
                "Age when it made room",
                "s",
                quantiles("sglcache_page_lifetime_seconds", "tier", of=(0.1, 0.5, 0.9)),
                "Since a page came to the cache.",
            ),
            Panel(
                "Idle when it made room",
                "s",
                quantiles("sglcache_page_idle_seconds", "tier", of=(0.1, 0.5, 0.9)),
                "Since the last use. Shorter than a conversation's pauses: the tier is too small.",
            ),
        ],
    ),
    (
        "Would more memory help",
        [
            Panel(
                "Hit rate with so many GiB more",
                "percentunit",
                [
                    (
                        f"avg by (tier, extra_gib) ({one('sglcache_reuse_hit_ratio')})",
                        "{{tier}} + {{extra_gib}} GiB",
                    ),
                    (f"avg({one('sglcache_reuse_ceiling_ratio')})", "room for everything"),
                ],
                "Of the tokens asked for, estimated from a sample of the pages; `sglcache plan` says it in words.",
                width=12,
            ),
            Panel(
                "Gap between two uses of a page",
                "s",
                quantiles("sglcache_reuse_gap_seconds", of=(0.1, 0.5, 0.9)),
                "Of pages that come back. Set it against how idle pages were that made room.",
                width=12,
            ),
        ],
    ),
    (
        "Latency",
        [
            Panel(
                "Commands, work",
                "s",
                quantiles("sglcache_command_seconds", "command", outcome="ok"),
                "From reading a command to writing its answer, where nothing was waited for.",
            ),
            Panel(
                "Commands, waits",
                "s",
                quantiles("sglcache_command_wait_seconds", "command", outcome="ok"),
                "Likewise where something was: an event of the runner, a copy, room, the third tier.",
            ),
            Panel(
                "Runner's events, and the loop",
                "s",
                [
                    *((query, f"event {legend}") for query, legend in quantiles("sglcache_runner_event_wait_seconds")),
                    *((query, f"loop late {legend}") for query, legend in quantiles("sglcache_loop_stall_seconds")),
                ],
                "How long the events that commits name take, and how late the event loop comes to its timers.",
            ),
            Panel(
                "Answers, by kind",
                "ops",
                [
                    (
                        f"{total(rate('sglcache_command_seconds_count'), 'command', 'outcome')} + "
                        f"{total(rate('sglcache_command_wait_seconds_count'), 'command', 'outcome')}",
                        "{{command}} {{outcome}}",
                    )
                ],
                "A second.",
                width=12,
            ),
            Panel(
                "Waiting, and oldest in flight",
                "s",
                [(f"max by (what) ({one('sglcache_oldest_in_flight_seconds')}) > 0", "{{what}}")],
                "The age of the oldest thing of each kind.",
                width=12,
            ),
        ],
    ),
    (
        "Copies",
        [
            Panel(
                "Copies",
                "s",
                quantiles("sglcache_copy_seconds", "direction", of=(0.5, 0.95)),
                "From the submission of a copy to its end.",
            ),
            Panel(
                "Bandwidth while copying",
                "Bps",
                [
                    (
                        f"{total(rate('sglcache_copied_bytes_total'), 'direction')} / "
                        f"{total(rate('sglcache_copying_seconds_total'), 'direction')}",
                        "{{direction}}",
                    )
                ],
                "Bytes for each second in which a copy was in flight: what the machine gives.",
            ),
            Panel(
                "In flight, failed, skipped",
                "none",
                [
                    (total(one("sglcache_copies_in_flight"), "direction"), "in flight {{direction}}"),
                    (total(rate("sglcache_copies_failed_total"), "direction"), "failed {{direction}}, a second"),
                    (total(rate("sglcache_backup_skipped_pages_total")), "pages without room on the host, a second"),
                ],
                "",
            ),
        ],
    ),
    (
        "Event stream",
        [
            Panel(
                "Batches and blocks",
                "none",
                [
                    (total(rate("sglcache_stream_sent_batches_total")), "batches"),
                    (total(rate("sglcache_event_blocks_total"), "event"), "blocks {{event}}"),
                    (total(rate("sglcache_stream_skipped_batches_total")), "batches lost to live readers"),
                ],
                "A second.",
            ),
            Panel(
                "Delay and snapshots",
                "s",
                [
                    *((query, f"cut to sent {legend}") for query, legend in quantiles("sglcache_stream_delay_seconds")),
                    *((query, f"snapshot {legend}") for query, legend in quantiles("sglcache_snapshot_seconds")),
                ],
                "From a batch's cut to its being sent; from a snapshot's begin to its last frame.",
            ),
            Panel(
                "Readers",
                "none",
                [
                    (total(one("sglcache_stream_subscriptions")), "subscriptions"),
                    (total(one("sglcache_replay_readers")), "readers of a replay"),
                    (f"sum(increase({one('sglcache_snapshots_begun_total')}[10m]))", "snapshots begun, 10 min"),
                ],
                "",
            ),
        ],
    ),
    (
        "Third tier",
        [
            Panel(
                "Requests to it",
                "s",
                quantiles("sglcache_third_request_seconds", "kind", of=(0.5, 0.95)),
                "From asking it to its answer.",
            ),
            Panel(
                "Pages moved and missed",
                "none",
                [
                    (total(rate("sglcache_third_moved_pages_total"), "direction"), "{{direction}}"),
                    (
                        total(rate("sglcache_third_missed_pages_total"), "direction", "reason"),
                        "not {{direction}}: {{reason}}",
                    ),
                ],
                "A second.",
            ),
            Panel(
                "Filled",
                "percentunit",
                [(share(one("sglcache_third_bytes"), one("sglcache_third_max_bytes")), "of its bytes")],
                "",
            ),
        ],
    ),
    (
        "Tenants",
        [
            Panel(
                "Pages charged",
                "none",
                [
                    (
                        total(one("sglcache_tenant_charged_pages", tenant="$tenant"), "tenant", "tier"),
                        "{{tenant}}, {{tier}}",
                    )
                ],
                "Cached, leased and fenced.",
                width=12,
            ),
            Panel(
                "Pages taken for others",
                "none",
                [
                    (
                        total(rate("sglcache_tenant_taken_pages_total", tenant="$tenant"), "tenant", "tier"),
                        "{{tenant}}, {{tier}}",
                    ),
                    (
                        total(rate("sglcache_tenant_broken_pages_total", tenant="$tenant"), "tenant", "tier"),
                        "below its floor: {{tenant}}, {{tier}}",
                    ),
                ],
                "A second.",
                width=12,
            ),
        ],
    ),
    (
        "Troubles and lives",
        [
            Panel(
                "Troubles",
                "none",
                [(f"max by (rank, what) ({one('sglcache_trouble')}) > 0", "rank {{rank}}: {{what}}")],
                "docs/metrics.md says what to do about each.",
            ),
            Panel(
                "Restarts",
                "none",
                [(total(f"increase({one('sglcache_rank_restarts_total')}[{RATE}])", "rank"), "rank {{rank}}")],
                "",
            ),
            Panel(
                "Host tier looked through",
                "s",
                [
                    (
                        f"max by (rank) ({one('sglcache_scrub_round_age_seconds')})",
                        "age of the last round, rank {{rank}}",
                    ),
                    (total(one("sglcache_scrub_mismatches_total")), "pages that changed by themselves"),
                ],
                "",
            ),
        ],
    ),
]

SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def variable(name: str, query: str, label: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
        "sort": 1,
    }


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        found.append(
            {"type": "row", "title": title, "collapsed": False, "gridPos": place(0, y, WIDTH, 1), "panels": []}
        )
        y += 1
        x, height = 0, HEIGHT
        for panel in row:
            height = HEIGHT // 2 if panel.kind == "stat" else HEIGHT
            if x + panel.width > WIDTH:
                x, y = 0, y + height
            found.append(drawn(panel, place(x, y, panel.width, height)))
            x += panel.width
        y += height
    for number, each in enumerate(found, 1):
        each["id"] = number
    return found


def place(x: int, y: int, w: int, h: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": w, "h": h}


def drawn(panel: Panel, where: dict[str, int]) -> dict[str, Any]:
    told: dict[str, Any] = {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": where,
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": query, "legendFormat": legend or "__auto"}
            for i, (query, legend) in enumerate(panel.queries)
        ],
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
    }
    if panel.kind == "stat":
        named = panel.title == "Version"
        told["options"] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "textMode": "name" if named else "value"}
    else:
        custom: dict[str, Any] = {"showPoints": "never", "fillOpacity": 60 if panel.stack else 0}
        if panel.stack:
            custom["stacking"] = {"mode": "normal"}
        told["fieldConfig"]["defaults"]["custom"] = custom
        told["options"] = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    return told


def dashboard() -> dict[str, Any]:
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return {
        "uid": "sglcache",
        "title": "sglcache",
        "description": "A KV cache server. What each metric says: docs/metrics.md.",
        "tags": ["sglcache"],
        "schemaVersion": 38,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                source,
                variable("instance", "label_values(sglcache_rank_up, instance)", "Daemon"),
                variable("rank", 'label_values(sglcache_rank_up{instance=~"$instance"}, rank)', "Rank"),
                variable("resource", 'label_values(sglcache_pool_pages{instance=~"$instance"}, resource)', "Resource"),
                variable(
                    "tenant", 'label_values(sglcache_tenant_charged_pages{instance=~"$instance"}, tenant)', "Tenant"
                ),
            ]
        },
        "panels": panels(),
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))
