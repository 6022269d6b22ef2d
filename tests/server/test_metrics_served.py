"""What real daemons tell is what the catalogue has, promtool finds nothing wrong with it or with the alerts, and a real
Prometheus scrapes it, answers every query of the dashboard, and raises the alert for what is planted."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sglcache.client.mirror import Mirror
from sglcache.server import catalogue
from sglcache.testing import copies
from sglcache.testing.daemon import Daemon, until

pytestmark = pytest.mark.metrics
ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
TOOLS = Path(os.environ.get("PROMETHEUS", "/nowhere"))
HTTP = {"enabled": True, "port": 0}
P = 4
STATES = [{"name": "conv", "shape": [4, 3], "dtype": "float16"}]
MAX_SERIES = 2600  # of a rank: docs/metrics.md
# With nothing there they have no sample, and no daemon is made here to have them.
NEVER = {"sglcache_third_missed_pages"}
RARE = {"Pages moved and missed", "Bandwidth while copying"}  # panels of which a query may have nothing to show


def promtool(*arguments: str, stdin: str = "") -> str:
    done = subprocess.run([TOOLS / "promtool", *arguments], input=stdin, capture_output=True, text=True, cwd=DEPLOY)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as page:
        text: str = page.read().decode()
    return text


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies to the host go on while it is there, and fail where `gate.fail` is, too."""
    path = tmp_path_factory.mktemp("gate") / "gate"
    path.touch()
    return path


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, gate: Path) -> Iterator[Daemon]:
    """With a third tier, tenants and a scrubber."""
    folder = tmp_path_factory.mktemp("metrics")
    with Daemon(
        folder / "daemon",
        prelude=copies.gate(gate, "backup"),
        pool={"num_tokens": P * 64},
        host={"num_tokens": P * 128, "scrub_rate": "1 GB"},
        storage={
            "kind": "file",
            "path": str(folder / "l3"),
            "prefetch_threshold": P,
            "prefetch_policy": "wait_complete",
        },
        tenants={"a": {"device_ceiling": "50%"}},
        http=HTTP,
    ) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(
        tmp_path_factory.mktemp("hybrid"),
        window={"size": 2 * P, "num_layers": 3, "num_tokens": 48 * P},
        mamba={"num_layers": 2, "states": STATES, "num_slots": 8, "interval": 16},
        http=HTTP,
    ) as daemon:
        yield daemon


def work(daemon: Daemon) -> None:
    """So much that pages leave both tiers, some come back from each, and a reader has a snapshot."""
    with daemon.client() as client:
        for _ in range(2):
            for number in range(12):
                with client.acquire(
                    range(1000 * number, 1000 * number + 16 * P), tenant="a" if number % 2 else None
                ) as lease:
                    lease.wait_loaded()
                    lease.commit()
            daemon.settle()
            until(lambda: not any((daemon.status(prove=False)["third"] or {"queued": {}})["queued"].values()))
    stream = daemon.status(prove=False)["stream"]
    with Mirror(stream["endpoint"], stream["replay_endpoint"]) as mirror:
        assert mirror.catch_up(stream["next_seq"] - 1, 10.0)


def labels_told(*daemons: Daemon) -> dict[str, dict[str, set[str]]]:
    """By sample-less name, the values of each label."""
    found: dict[str, dict[str, set[str]]] = {}
    for each in daemons:
        for family in text_string_to_metric_families(read(each.info["http"] + "/metrics")):
            values = found.setdefault(family.name, defaultdict(set))
            for sample in family.samples:
                for label, value in sample.labels.items():
                    values[label].add(value)
    return found


def test_promtool_finds_the_alerts_right_and_each_fires_when_it_should() -> None:
    assert "SUCCESS" in promtool("check", "rules", "alerts.yml")
    assert promtool("test", "rules", "alerts_test.yml", "alerts_day_test.yml").count("SUCCESS") == 2


def test_what_daemons_tell_is_what_the_catalogue_has(daemon: Daemon, hybrid: Daemon) -> None:
    work(daemon)
    with hybrid.client() as client:  # its own window and states come and go
        for number in range(20):
            client.acquire(range(1000 * number, 1000 * number + 8 * P)).cancel()
    told = labels_told(daemon, hybrid)
    listed = {name: metric for metric in catalogue.catalogue() for name in [metric.name.removesuffix("_total")]}
    assert set(told) == set(listed)
    for name, labels in told.items():
        known = {**listed[name].labels, **({"le": []} if listed[name].kind == "histogram" else {})}
        assert set(labels) == set(known) or (name in NEVER and not labels), name
        for label, values in labels.items():
            if label not in catalogue.OPEN:
                assert values <= set(known[label]), f"{name} {label}"
    for each in (daemon, hybrid):
        text = read(each.info["http"] + "/metrics")
        assert promtool("check", "metrics", stdin=text) == ""
        assert sum(not line.startswith("#") for line in text.splitlines()) < MAX_SERIES


def test_what_left_each_tier_is_what_came_and_is_not_there(daemon: Daemon) -> None:
    """Over all reasons: no page leaves without one, and none is counted twice."""
    status = daemon.settle()
    device, host = (pool["cached"] for pool in status["pools"])
    counters, third = status["counters"], status["third"]
    left: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(read(daemon.info["http"] + "/metrics")):
        if family.name == "sglcache_third_request_seconds":
            asked = {each.labels["kind"]: each.value for each in family.samples if each.name.endswith("_count")}
        if family.name == "sglcache_removed_pages":
            for sample in family.samples:
                left[sample.labels["tier"]] += sample.value
    assert left["device"] > 0
    assert left["host"] > 0
    # What is loaded to the device, or fetched to the host, was nowhere there; nobody else was at it meanwhile.
    assert counters["committed_pages"] - left["device"] == device
    assert counters["backup_pages"] + counters["prefetched_pages"] - left["host"] == host
    assert asked["store"] > 0
    assert asked["fetch"] > 0
    assert third["stored_pages"] - left["third"] == third["num_pages"]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    return port


class Prometheus:
    """A real one, over these daemons, twice a second."""

    def __init__(self, folder: Path, daemons: list[Daemon]) -> None:
        targets = [each.info["http"].removeprefix("http://") for each in daemons]
        (folder / "prometheus.yml").write_text(
            json.dumps(
                {
                    "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
                    "rule_files": [str(DEPLOY / "alerts.yml")],
                    "scrape_configs": [{"job_name": "sglcache", "static_configs": [{"targets": targets}]}],
                }
            )
        )
        self.url = f"http://127.0.0.1:{free_port()}"
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    TOOLS / "prometheus",
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={self.url.removeprefix('http://')}",
                    "--log.level=warn",
                ],
                stdout=log,
                stderr=log,
                cwd=folder,
            )

    def ask(self, path: str, **parameters: str) -> Any:
        answer = json.loads(read(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"))
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[Any]:
        found: list[Any] = self.ask("query", query=expression)["result"]
        return found

    def ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        with contextlib.suppress(OSError):
            return bool(self.query("count(sglcache_acquires_total) == 2"))
        return False

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory, daemon: Daemon, hybrid: Daemon) -> Iterator[Prometheus]:
    found = Prometheus(tmp_path_factory.mktemp("prometheus"), [daemon, hybrid])
    try:
        until(found.ready, 30.0)
        yield found
    finally:
        found.close()


def test_prometheus_has_no_complaint_and_every_panel_shows_something(daemon: Daemon, prometheus: Prometheus) -> None:
    work(daemon)
    times = "timestamp(sglcache_command_seconds_count{command='acquire',outcome='ok'})"
    first = float(prometheus.query(f"max({times})")[0]["value"][1])
    until(lambda: float(prometheus.query(f"max({times})")[0]["value"][1]) > first + 1.0, 20.0)
    rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    until(lambda: all(each["health"] == "up" for each in prometheus.ask("targets")["activeTargets"]), 10.0)
    until(
        lambda: {rule["health"] for group in prometheus.ask("rules")["groups"] for rule in group["rules"]} == {"ok"},
        20.0,
    )
    assert len(rules) == 25
    board = json.loads((DEPLOY / "grafana" / "sglcache.json").read_text())
    empty = []
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$__rate_interval", "1m")
            query = re.sub(r"\$(instance|rank|resource|tenant)", ".*", query)
            if not prometheus.query(query) and panel["title"] not in RARE:
                empty.append((panel["title"], query))
    assert [title for title, query in empty if "> 0" not in query] == []


def test_a_copy_that_fails_raises_its_alert(gate: Path, daemon: Daemon, prometheus: Prometheus) -> None:
    assert not prometheus.query('ALERTS{alertname="SglcacheCopiesFail"}')
    gate.with_name("gate.fail").touch()
    with daemon.client() as client, client.acquire(range(90_000, 90_000 + 4 * P)) as lease:
        lease.commit()
    until(lambda: bool(prometheus.query('ALERTS{alertname="SglcacheCopiesFail", alertstate="firing"}')), 20.0)
    firing = {
        each["labels"]["alertname"]: each for each in prometheus.ask("alerts")["alerts"] if each["state"] == "firing"
    }
    assert set(firing) == {"SglcacheCopiesFail"}
    told = firing["SglcacheCopiesFail"]["annotations"]
    assert "copies of rank 0 fail (backup)" in told["summary"]
    assert told["runbook_url"] == "docs/metrics.md#sglcachecopiesfail"
