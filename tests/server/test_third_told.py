"""What operators see of the third tier and of the write policies: status, /metrics, /server_info, check, clear."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from below import ONE, daemon_over, drop, files, forget, put, right, stored, third_of
from prometheus_client.parser import text_string_to_metric_families

from sglcache.config import load
from sglcache.errors import ConfigError
from sglcache.server import room
from sglcache.testing.daemon import Daemon, until

pytestmark = pytest.mark.daemons


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "sglcache", *args], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("told")


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    """That has stored 16 pages, fetched 10 of them, and met a bad one."""
    with daemon_over(folder, http={"enabled": True, "port": 0}) as daemon:
        with daemon.client() as client:
            put(client, ONE, 7)
            stored(daemon, 16)
            victim = min(files(folder), key=lambda path: path.stat().st_mtime_ns)
            forget(client)
            with client.acquire(ONE) as lease:
                right(client, lease, 7)
            drop(client, "device")
            with client.acquire(ONE) as lease:
                assert lease.matched_tokens == 64
                right(client, lease, 7)
            forget(client)
            victim.write_bytes(b"no page")
            with client.acquire(ONE) as lease:
                assert lease.matched_tokens < 64
            until(lambda: third_of(daemon)["discarded_pages"] == 1)
        yield daemon


def test_the_status_says_how_the_third_tier_is(daemon: Daemon) -> None:
    with daemon.client() as client:
        third = client.status()["third"]
    assert (third["kind"], third["ready"], third["connected"], third["medium"]) == ("file", True, True, "DISK")
    assert (third["num_pages"], third["stored_pages"], third["discarded_pages"]) == (15, 16, 1)
    assert third["max_bytes"] == 64 << 30
    assert third["fetched_pages"] >= 16
    assert sum(third["misses"].values()) > 0
    assert not any(third["queued"].values())


def test_the_status_for_people_has_hits_by_tier_and_the_third_tier(daemon: Daemon) -> None:
    done = run("status", "--socket", str(daemon.socket))
    assert done.returncode == 0, done.stderr
    said = done.stdout
    counters = daemon.status()["counters"]
    host, below = counters["host_matched_tokens"], counters["l3_matched_tokens"]
    assert below >= 64
    assert host - below == 64
    assert f"{host - below:,} on the host, {below:,} on the third tier" in said
    assert "third     file, ready; 15 pages, 60 KiB of 64 GiB; told of as DISK" in said
    assert "16 pages stored" in said
    assert "not fetched: " in said
    assert "1 bad ones thrown away" in said
    assert "backups   " in said
    assert max(len(line) for line in said.splitlines() if line.startswith("     ")) <= 120


def test_the_metrics_say_it_too(daemon: Daemon) -> None:
    with urllib.request.urlopen(f"{daemon.info['http']}/metrics") as answer:
        text = answer.read().decode()
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "rank"}
            found[sample.name, *(labels[key] for key in sorted(labels))] = sample.value
    status = daemon.status()
    third, counters = status["third"], status["counters"]
    assert found["sglcache_third_pages",] == 15
    assert found["sglcache_third_connected",] == found["sglcache_third_ready",] == 1
    assert found["sglcache_third_max_bytes",] == 64 << 30
    assert found["sglcache_third_moved_pages_total", "stored"] == 16
    assert found["sglcache_third_moved_pages_total", "fetched"] == third["fetched_pages"]
    assert found["sglcache_third_moved_bytes_total", "stored"] == third["stored_bytes"] > 0
    assert found["sglcache_third_moving_seconds_total", "fetched"] > 0
    assert sum(
        value for key, value in found.items() if key[0] == "sglcache_third_missed_pages_total" and key[1] == "fetched"
    ) == sum(third["misses"].values())
    assert found["sglcache_third_queue", "fetch"] == 0
    assert found["sglcache_removed_pages_total", "corrupt", "full", "third"] == 1
    assert found["sglcache_prefetched_pages_total",] == counters["prefetched_pages"]
    assert found["sglcache_third_matched_tokens_total",] == counters["l3_matched_tokens"]


def test_server_info_says_what_is_told_and_whose_pages_they_are(daemon: Daemon, folder: Path) -> None:
    third = daemon.ask()["ranks"][0]["third"]
    assert third == {"kind": "file", "medium": "DISK", "fingerprint": third["fingerprint"]}
    assert (folder / "l3" / "rank-0" / third["fingerprint"]).is_dir()


def test_a_daemon_without_a_third_tier_says_so(tmp_path: Path) -> None:
    with Daemon(tmp_path / "d") as daemon:
        assert daemon.status()["third"] is None
        assert daemon.ask()["ranks"][0]["third"] is None
        done = run("clear", "--tier", "disk", "--socket", str(daemon.socket))
        assert done.returncode == 2
        assert "there is no tier 'DISK' to clear here; use DEVICE or HOST" in done.stderr
        assert "third  " not in run("status", "--socket", str(daemon.socket)).stdout


def test_the_third_tier_is_cleared_by_its_name_alone(tmp_path: Path) -> None:
    with daemon_over(tmp_path) as daemon, daemon.client() as client:
        put(client, ONE, 7)
        stored(daemon, 16)
        assert run("clear", "--socket", str(daemon.socket)).stdout == "dropped 16 pages of device, 16 pages of host\n"
        assert third_of(daemon)["num_pages"] == 16
        done = run("clear", "--tier", "disk", "--socket", str(daemon.socket))
        assert (done.stdout, files(tmp_path)) == ("dropped 16 pages of disk\n", [])


def test_verify_on_the_command_line_compares_it(daemon: Daemon) -> None:
    done = run("verify", "--socket", str(daemon.socket), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"disk": {' in done.stdout


# -- check -------------------------------------------------------------------------------------------------------------


def options(path: Path, **more: Any) -> list[str]:
    pairs = {"model_name": "m", "storage.kind": "file", "storage.path": path, **more}
    return [f"{key}={value}" for key, value in pairs.items()]


def test_check_counts_what_the_third_tier_takes_of_the_disk(tmp_path: Path) -> None:
    args = [part for option in options(tmp_path / "new", **{"storage.size": "1 MiB"}) for part in ("--set", option)]
    done = run("check", *args, "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["disk"]["path"] == str(tmp_path / "new")
    assert (facts["disk"]["want"], facts["disk"]["used"]) == (1 << 20, 0)
    assert facts["disk"]["free"] > 0
    assert not (tmp_path / "new").exists()  # nothing is made
    said = run("check", *args).stdout
    assert f"third tier of rank 0: {tmp_path}/new/rank-0, 1.049 MB (1 MiB) at most: some 128 pages of 4,096 B" in said
    assert "of the disk: 1.049 MB (1 MiB); 0 B used" in said


def test_check_warns_of_a_disk_that_is_too_small(tmp_path: Path) -> None:
    config = load(None, options(tmp_path, **{"storage.size": "900 TB"}))
    (warning,) = room.served(config, room.Machine(room.Limit(1 << 50, "RAM")))
    assert "storage.size lets the ranks store 900 TB" in warning
    (tmp_path / "page").write_bytes(bytes(10_000))
    found = room.disk(config)
    assert found is not None
    assert found.used >= 10_000
    small = load(None, options(tmp_path, **{"storage.size": "1 MiB"}))
    hasty = room.disk(small, patient=False)  # which has room enough however much is there
    assert hasty is not None
    assert (hasty.used, hasty.warnings) == (0, [])
    assert found._replace(want=found.used + found.free).warnings == []
    assert len(found._replace(want=found.used + found.free + 1).warnings) == 1


def test_check_refuses_a_folder_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is no folder; give a folder that this user may write"):
        room.disk(load(None, options(tmp_path / "file" / "pages")))


def test_check_counts_the_memory_that_mooncakes_clients_take() -> None:
    pairs = ["model_name=m", "storage.kind=mooncake", "storage.master=h:1", "storage.segment_size=3 GiB"]
    weighed = room.weigh(load(None, [*pairs, "parallel.dp_size=2"]))
    assert weighed.store_bytes == 2 * ((3 << 30) + (64 << 20))
    assert weighed.ram_bytes == weighed.device_bytes + weighed.host_bytes + weighed.store_bytes
    with pytest.raises(ConfigError, match=r"Mooncake's clients 6\.577 GB"):
        weighed.refuse(room.Machine(room.Limit(7 << 30, "RAM")))
    done = run("check", *(part for pair in pairs for part in ("--set", pair)), "--ram", "1 TB")
    assert "third tier: Mooncake at h:1, 3.288 GB (3.062 GiB) of this host's RAM for its clients" in done.stdout


def test_a_folder_that_cannot_be_written_is_told_of_with_its_reason_until_it_can(tmp_path: Path) -> None:
    with daemon_over(tmp_path, http={"enabled": True, "port": 0}) as daemon, daemon.client() as client:
        put(client, ONE, 7)
        stored(daemon, 16)
        (tmp_path / "l3").rename(tmp_path / "moved")
        (tmp_path / "l3").write_text("in the way")
        put(client, range(101, 165), 8)
        until(lambda: not third_of(daemon)["writable"])
        daemon.settle()
        said = " ".join(run("status", "--socket", str(daemon.socket)).stdout.split())
        assert "NOT WRITABLE since 20" in said
        assert f"{tmp_path}/l3" in said
        with urllib.request.urlopen(f"{daemon.info['http']}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        assert [float(line.split()[1]) for line in lines if line.startswith("sglcache_third_writable{")] == [0.0]
        (tmp_path / "l3").unlink()
        put(client, range(201, 265), 9)
        until(lambda: third_of(daemon)["writable"] and third_of(daemon)["num_pages"] == 16)
        forget(client)
        with client.acquire(range(201, 265)) as lease:
            assert lease.matched_tokens == 64
            right(client, lease, 9)


def test_check_refuses_what_cannot_be_written_whatever_its_mode_says(tmp_path: Path) -> None:
    """Nobody may make a folder in /proc, not even who may write everywhere."""
    done = run("check", *[part for option in options(Path("/proc/x")) for part in ("--set", option)])
    assert done.returncode == 2
    assert "/proc can't be written (No such file or directory)" in done.stderr
    (tmp_path / "rank-0").write_text("")
    with pytest.raises(ConfigError, match=r"rank-0 is no folder"):
        room.disk(load(None, options(tmp_path)))


def test_check_says_that_a_daemon_has_the_folder(tmp_path: Path) -> None:
    with daemon_over(tmp_path):
        done = run("check", *[part for option in options(tmp_path / "l3") for part in ("--set", option)])
        assert (done.returncode, "rank-0 is in use by a daemon that runs" in done.stdout) == (0, True)
    found = room.disk(load(None, options(tmp_path / "l3")))
    assert found is not None
    assert found.in_use == ()
    assert sorted(path.name for path in (tmp_path / "l3").iterdir()) == ["rank-0"]  # nothing is left of the trial
