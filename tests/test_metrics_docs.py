"""docs/metrics.md, the dashboard and the alerts name the metrics that there are; a page has a bound."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from sglcache.core.limits import MAX_TENANTS
from sglcache.server import catalogue, metrics

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DOC = (ROOT / "docs" / "metrics.md").read_text()
METRICS = {metric.name: metric for metric in catalogue.catalogue()}
OUTSIDE = {"instance", "job"}  # the scraper's
SERIES, OF_A_TENANT = 1600, 14  # of a rank, as docs/metrics.md says

SELECTOR = re.compile(r"\b(sglcache_[a-z0-9_]+)\s*(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
GROUPING = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def of_dashboard(board: Any) -> Iterator[str]:
    """Every query, those of variables too."""
    for panel in board["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    for each in board["templating"]["list"]:
        if each["type"] == "query":
            yield re.sub(r"label_values\((.*), (\w+)\)", r"sum by (\2) (\1)", each["definition"])


def metric_of(name: str) -> catalogue.Metric | None:
    for suffix in ("", "_bucket", "_sum", "_count"):
        metric = METRICS.get(name.removesuffix(suffix)) if name.endswith(suffix) else None
        if metric is not None and (metric.kind == "histogram") == bool(suffix):
            return metric
    return None


def wrong(query: str) -> list[str]:
    """What a query names that no daemon tells."""
    found, known = [], set(OUTSIDE)
    for name, matchers in SELECTOR.findall(query):
        metric = metric_of(name)
        if metric is None:
            found.append(f"there is no {name}")
            continue
        labels = {**metric.labels, **({"le": []} if name.endswith("_bucket") else {})}
        known |= labels.keys()
        for label, how, value in MATCHER.findall(matchers):
            if label not in labels and label not in OUTSIDE:
                found.append(f"{name} has no label {label}")
            elif label in labels and label not in catalogue.OPEN and not value.startswith("$"):
                for each in value.split("|") if "~" in how else [value]:
                    if each not in labels[label]:
                        found.append(f"{label} of {name} is never {each}")
    for labels_of in GROUPING.findall(query):
        for label in filter(None, (each.strip() for each in labels_of.split(","))):
            if label not in known:
                found.append(f"nothing in {query} has a label {label}")
    return found


def test_the_document_has_what_the_code_has() -> None:
    remedy = "make it anew: python -m sglcache.server.catalogue"
    assert catalogue.table() in DOC, remedy
    assert catalogue.labels() in DOC, remedy


def test_a_query_that_names_what_there_is_not_is_told() -> None:
    assert wrong('sum by (le) (rate(sglcache_copy_seconds_bucket{direction="load"}[5m]))') == []
    assert wrong("sglcache_no_such") == ["there is no sglcache_no_such"]
    assert wrong("sglcache_copy_seconds") == ["there is no sglcache_copy_seconds"], (
        "a histogram has no sample of its name"
    )
    assert wrong('sglcache_rank_up{tier="host"}') == ["sglcache_rank_up has no label tier"]
    assert wrong('sglcache_trouble{what!~"corrupt|rust"}') == ["what of sglcache_trouble is never rust"]
    assert wrong("sum by (peer) (sglcache_rank_up)") == ["nothing in sum by (peer) (sglcache_rank_up) has a label peer"]


def test_every_query_of_the_dashboard_and_the_alerts_names_what_there_is() -> None:
    board = json.loads((DEPLOY / "grafana" / "sglcache.json").read_text())
    queries = [*of_dashboard(board), *(rule["expr"] for rule in alerts())]
    assert len(queries) > 80
    assert [each for query in queries for each in wrong(query)] == []


def test_the_dashboard_is_what_its_script_makes_and_panels_do_not_lie_on_each_other() -> None:
    spec = importlib.util.spec_from_file_location("dashboard", ROOT / "scripts" / "dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    board = json.loads((DEPLOY / "grafana" / "sglcache.json").read_text())
    assert board == script.dashboard(), "make it anew: scripts/dashboard.py > deploy/grafana/sglcache.json"
    cells = [
        (x, y)
        for each in board["panels"]
        for x in range(each["gridPos"]["x"], each["gridPos"]["x"] + each["gridPos"]["w"])
        for y in range(each["gridPos"]["y"], each["gridPos"]["y"] + each["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < script.WIDTH


def test_each_alert_says_what_it_is_and_where_it_is_explained_and_has_a_test_of_its_own() -> None:
    rules, tests = alerts(), "".join(path.read_text() for path in DEPLOY.glob("alerts*_test.yml"))
    rows = dict(re.findall(r'^\| <a id="(\w+)"></a>(\w+) \|', DOC, re.MULTILINE))
    assert rows == {rule["alert"].lower(): rule["alert"] for rule in rules}
    for rule in rules:
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        assert rule["annotations"]["runbook_url"] == f"docs/metrics.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert f"{rule['alert']} | {rule['labels']['severity']} |" in DOC.replace("</a>", ""), rule["alert"]
        assert re.search(rf"\b{rule['alert']}\b", tests)


def test_a_page_has_a_bound_and_no_label_that_grows_with_use() -> None:
    """However many sessions, requests, peers and namespaces there were: none of them is a label, and what is a label
    has the values that are listed. So a rank has as many series as one that has everything, and tenants theirs."""
    assert set(catalogue.OPEN) & {label for metric in METRICS.values() for label in metric.labels} == {
        "rank",
        "tenant",
        "version",
        "hash",
        "model_name",
    }
    counts = {"tenant": 0, "rest": 0}
    for family in text_string_to_metric_families(metrics.page([catalogue.families()]).decode()):
        for sample in family.samples:
            counts["tenant" if "tenant" in sample.labels else "rest"] += 1
    assert counts["rest"] <= SERIES
    assert counts["tenant"] <= 2 * OF_A_TENANT, "two tenants: NAME, and the default"
    told = SERIES + MAX_TENANTS * OF_A_TENANT
    assert f"tells {SERIES:,} series and each tenant {OF_A_TENANT}" in DOC.replace("\n", " ")
    assert told <= int(re.findall(r"no more than ([0-9,]+)", DOC)[0].replace(",", ""))


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_names_are_prometheus_and_help_stands_alone(metric: catalogue.Metric) -> None:
    assert re.fullmatch(r"sglcache_[a-z]+(_[a-z]+)*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert not re.search(r"_(ms|us|kb|mb|kib|mib|percent|milliseconds)(_|$)", metric.name), "base units"
    assert metric.kind != "histogram" or metric.name.endswith("_seconds")
    assert metric.text.endswith(".")
    assert not re.search(r"\b(Of these|of these|Likewise)\b", metric.text), "who reads it sees no other's"
    assert not {"session", "request", "peer", "pid", "namespace"} & set(metric.labels)
