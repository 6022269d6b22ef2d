"""The command line with a real daemon: what a person does on the first day."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sglcache import Client
from sglcache.bench import trace as traces
from sglcache.bench.replay import conversations
from sglcache.testing.daemon import until

pytestmark = pytest.mark.daemons

FREE_PORTS = ("events.endpoint=tcp://127.0.0.1:0", "events.replay_endpoint=tcp://127.0.0.1:0", "http.port=0")


class Daemon:
    """`sglcache serve` in a process of its own, in a folder of its own."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self.socket = folder / "rank-0.sock"
        self.environ = {**os.environ, "SGLCACHE_SOCKET": str(self.socket), "XDG_STATE_HOME": str(folder / "state")}
        options = [option for setting in settings for option in ("--set", setting)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sglcache", "serve", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environ,
        )
        self.screen: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.screen.append(line.rstrip())
            if line.startswith("Ctrl-C"):
                break

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "sglcache", *args],
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
            env=self.environ,
        )

    def status(self) -> dict[str, Any]:
        done = self.run("status", "--json")
        assert done.returncode == 0, done
        facts: dict[str, Any] = json.loads(done.stdout)
        return facts

    def stop(self) -> tuple[int, str]:
        """Its exit code and what it said on stderr."""
        self.process.send_signal(signal.SIGTERM)
        _, stderr = self.process.communicate(timeout=30)
        return self.process.returncode, stderr


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    served = Daemon(tmp_path_factory.mktemp("daemon"), *FREE_PORTS, "pool.num_tokens=131072", "watch.loop_stall_s=30")
    yield served
    code, stderr = served.stop()
    assert (code, stderr) == (0, "")
    assert not served.socket.exists()


@pytest.fixture
def empty(daemon: Daemon) -> Daemon:
    assert daemon.run("clear").returncode == 0
    return daemon


def test_the_first_screen_says_where_everything_is(daemon: Daemon) -> None:
    screen = "\n".join(daemon.screen)
    facts = daemon.status()
    assert facts["stream"]["endpoint"] in screen
    assert facts["stream"]["replay_endpoint"] in screen
    assert facts["http"] in screen
    assert str(daemon.socket) in screen
    assert "8,192 pages of 16 tokens: 131,072 tokens, 32 MiB" in screen
    assert "16,384 pages of 16 tokens: 262,144 tokens, 64 MiB" in screen
    assert "replay --verify" in screen


def test_ping_and_status_say_that_all_is_well(daemon: Daemon) -> None:
    assert daemon.run("ping").stdout.startswith("ok: ")
    done = daemon.run("status")
    assert done.returncode == 0
    assert "every page is in one place, and the counts add up" in done.stdout
    assert "8,192" in done.stdout
    assert "proof" not in daemon.run("status", "--no-prove").stdout


def test_http_tells_the_same_as_the_control_socket(daemon: Daemon) -> None:
    facts = daemon.status()
    with urllib.request.urlopen(f"{facts['http']}/health") as answer:
        assert json.load(answer)["status"] == "ok"
    with urllib.request.urlopen(f"{facts['http']}/server_info") as answer:
        info = json.load(answer)
    assert [(rank["epoch"], rank["pid"]) for rank in info["ranks"]] == [(facts["epoch"], facts["pid"])]
    assert info["kv_events"] == {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": int(facts["stream"]["endpoint"].rpartition(":")[2]),
        "topic": "",
        "block_size": 16,
        "dp_size": 1,
        "replay_endpoint_port_base": int(facts["stream"]["replay_endpoint"].rpartition(":")[2]),
    }
    with urllib.request.urlopen(f"{facts['http']}/metrics") as answer:
        assert b'sglcache_pool_pages{rank="0",resource="full",tier="device"} 8192.0' in answer.read()


def test_a_replay_verifies_every_page_and_the_mirror_equals_the_index(empty: Daemon) -> None:
    """The pool holds a fifth of what the trace writes: pages are evicted, and come back from the host."""
    done = empty.run("replay", "--verify", "--limit", "150", "--json")
    assert done.returncode == 0, done
    report = json.loads(done.stdout)
    assert report["ok"]
    assert report["requests"] == 150
    assert report["hit_rate"] > 0.2
    assert report["shared_tokens"] > 0, "no page went from one client to the other"
    assert report["host_tokens"] > 0, "no page came back from the host"
    assert report["verified_tokens"] >= report["matched_tokens"]
    assert report["events"]["BlockRemoved"] > 0
    assert report["payload_bytes"] > 0
    for tier in ("device", "host"):
        assert report["tiers"][tier]["index_blocks"] == report["tiers"][tier]["mirror_blocks"] > 0
    assert empty.status()["violations"] == []


def test_why_pages_left_is_in_the_metrics_and_in_the_status(empty: Daemon) -> None:
    """A20: a device too small for the trace is short of room, and a clear is no shortage."""

    def removed() -> dict[tuple[str, str], int]:
        with urllib.request.urlopen(f"{empty.status()['http']}/metrics") as answer:
            families = text_string_to_metric_families(answer.read().decode())
        (family,) = (family for family in families if family.name == "sglcache_removed_pages")
        return {(it.labels["tier"], it.labels["reason"]): int(it.value) for it in family.samples}

    before = removed()
    assert empty.run("replay", "--limit", "150").returncode == 0
    until(lambda: empty.status()["gauges"]["num_copies"] == 0)
    after = removed()
    cached = {pool["tier"].lower(): pool["cached"] for pool in empty.status()["pools"]}
    assert after["device", "demoted"] > before["device", "demoted"]
    assert {key: count for key, count in after.items() if key[1] == "cleared"} == {
        key: count for key, count in before.items() if key[1] == "cleared"
    }
    assert empty.run("clear").returncode == 0
    cleared = removed()
    assert {key: cleared[key] - after[key] for key in cleared} == {
        key: cached[key[0]] if key[1] == "cleared" else 0 for key in cleared
    }
    told = empty.run("status").stdout
    for tier, kept in (("device", "demoted"), ("host", "unbacked")):
        evicted, moved, dropped = (cleared[tier, reason] for reason in ("evicted", kept, "cleared"))
        line = f"removed   from the {tier}: {evicted:,} pages evicted, {moved:,} {kept}, {dropped:,} cleared"
        assert line in told


def test_a_replay_finds_a_page_with_wrong_bytes(empty: Daemon, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f"{json.dumps(record)}\n" for record in conversations(1)))
    prompt = next(traces.requests(trace)).tokens
    with Client(empty.socket) as cache, cache.acquire(prompt) as lease:
        cache.pool.pages.numpy()[lease.slots] = 0
        lease.commit()
    done = empty.run("replay", "--trace", str(trace), "--verify")
    assert done.returncode == 1
    assert "request 0: matched page 0" in done.stdout
    assert f"does not hold token {prompt[0]} at position 0" in done.stdout
    assert empty.run("replay", "--trace", str(trace)).returncode == 0, "without --verify nobody looks"


SMALL_AND_DISK = ("model_name=m", "pool.num_tokens=65536", "host.num_tokens=65536", "storage.kind=file")
FETCHED = ("storage.prefetch_policy=wait_complete", "storage.prefetch_threshold=16")


def test_a_replay_on_a_daemon_of_its_own_verifies_what_comes_from_the_disk(tmp_path: Path) -> None:
    """The second finds what the first has stored."""
    settings = (*SMALL_AND_DISK, *FETCHED, f"storage.path={tmp_path / 'store'}")
    options = [option for setting in settings for option in ("--set", setting)]
    command = [sys.executable, "-m", "sglcache", "replay", "--verify", "--limit", "40", "--rate", "40", "--json"]
    for _ in range(2):
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=False, timeout=100)
        assert done.returncode == 0, done
        report = json.loads(done.stdout)
        assert report["ok"]
        assert report["wall_s"] >= 39 / 40, "faster than it was to be"
        assert report["tiers"]["disk"]["index_blocks"] == report["tiers"]["disk"]["mirror_blocks"] > 0
        assert sum(report["hit_tokens"].values()) == report["matched_tokens"] <= report["verified_tokens"]
    assert report["hit_tokens"]["third"] > 0


def test_a_replay_finds_wrong_bytes_that_come_from_the_disk(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f"{json.dumps(record)}\n" for record in conversations(1)))
    prompt = next(traces.requests(trace)).tokens
    served = Daemon(tmp_path, *FREE_PORTS, *SMALL_AND_DISK, *FETCHED, f"storage.path={tmp_path / 'store'}")
    try:
        with Client(served.socket) as cache:
            with cache.acquire(prompt) as lease:
                cache.pool.pages.numpy()[lease.slots] = 0
                lease.commit()
            until(lambda: cache.status()["gauges"]["num_copies"] == 0)
            cache.clear()
            done = served.run("replay", "--trace", str(trace), "--verify", "--json")
            assert done.returncode == 1
            assert "request 0: matched page 0" in json.loads(done.stdout)["problems"][0]
            assert cache.status()["counters"]["prefetched_pages"] > 0
    finally:
        assert served.stop()[0] == 0


def test_a_replay_takes_one_daemon(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sglcache", "replay", "--set", "pool.page_size=64"]
    done = subprocess.run([*command, "--socket", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--set starts a daemon; it goes without --socket and --rank" in done.stderr
    done = subprocess.run([*command, "--set", "pool.pages=64"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error[config]: ")


def test_a_trace_that_is_none_is_told_by_file_and_line(daemon: Daemon, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("no trace\n")
    done = daemon.run("replay", "--trace", str(trace))
    assert done.returncode == 2
    assert done.stderr.startswith(f"error[config]: {trace}:1: ")


def test_clear_says_what_it_dropped_or_what_holds_it(empty: Daemon) -> None:
    with Client(empty.socket) as cache:
        lease = cache.acquire(np.arange(64, dtype=np.uint32))
        lease.commit()
        done = empty.run("clear", "--wait", "0")
        assert done.returncode == 1
        assert done.stderr.startswith("error[busy]: ")
        lease.release()
    assert json.loads(empty.run("clear", "--tier", "host", "--json").stdout) == {"pages": {"HOST": 4}}
    assert empty.run("clear", "--tier", "device").stdout == "dropped 4 pages of device\n"
    assert empty.run("clear").returncode == 0


def test_watch_prints_what_is_cached_as_json_lines(empty: Daemon) -> None:
    with Client(empty.socket) as cache, cache.acquire(np.arange(32, dtype=np.uint32)) as lease:
        lease.commit()
    done = empty.run("watch", "--limit", "2", "--medium", "GPU")
    assert done.returncode == 0, done
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 2
    assert all(line["seq"] >= empty.status()["epoch"] for line in lines)
    assert lines[0]["type"] == "AllBlocksCleared"


def test_a_second_daemon_is_refused_by_the_key_it_wants(daemon: Daemon, tmp_path: Path) -> None:
    facts = daemon.status()
    port = facts["http"].rpartition(":")[2]
    wanted = (
        (f"events.endpoint={facts['stream']['endpoint']}", "events.endpoint"),
        (f"http.port={port}", f"http.port = {port}"),
        (f"control.socket={daemon.socket}", str(daemon.socket)),
    )
    for setting, told in wanted:
        second = Daemon(tmp_path, *FREE_PORTS, setting)
        _, stderr = second.process.communicate(timeout=30)
        assert second.process.returncode == 2, stderr
        assert stderr.startswith("error["), stderr
        assert told in stderr
        assert "Traceback" not in stderr
    assert daemon.run("ping").returncode == 0


def test_without_events_there_is_nothing_to_watch_and_the_rest_works(tmp_path: Path) -> None:
    quiet = Daemon(tmp_path, "events.enabled=false", "http.enabled=false", "host.pool_ratio=0")
    try:
        assert quiet.run("replay", "--verify", "--limit", "5", "--clients", "1").returncode == 0
        assert "stream    off" in quiet.run("status").stdout
        done = quiet.run("watch")
        assert done.returncode == 69
        assert "set events.enabled = true" in done.stderr
    finally:
        assert quiet.stop() == (0, "")
