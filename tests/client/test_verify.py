"""`sglcache verify` on real daemons: content with a right one, however busy, and exact about what a wrong one did."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglcache.client import Client
from sglcache.client.verify import BlockNote, RankReport, describe, name, verify
from sglcache.compiled import VARIABLE
from sglcache.errors import Unavailable
from sglcache.net.curve import make_keys
from sglcache.testing.daemon import Daemon, until

pytestmark = pytest.mark.daemons

TOKENS = [list(range(start, start + 12)) for start in (0, 100, 200)]


def put(client: Client, tokens: list[int], **namespace: Any) -> None:
    with client.acquire(tokens, **namespace) as lease:
        lease.wait_loaded()
        lease.commit()


def check(daemon: Daemon, **options: Any) -> RankReport:
    with daemon.observer() as observer:
        return verify(observer, **{"duration_s": 0.2, "timeout_s": 10.0, **options})


def planted(line: str) -> str:
    """What a daemon runs first: the function `wrong` in the place of a method `real`, from the second call on."""
    owner, method, body = line.split("|")
    module, cls = owner.rsplit(".", 1)
    return (
        f"from {module} import {cls}\n"
        f"real, calls = {cls}.{method}, []\n"
        f"def wrong(self, *a, **k):\n"
        f"    calls.append(1)\n"
        f"    {body}\n"
        f"{cls}.{method} = wrong\n"
    )


@pytest.fixture
def wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Daemon]]:
    monkeypatch.setenv(VARIABLE, "1")  # what is put in the place of a method is called there
    daemons: list[Daemon] = []

    def build(line: str) -> Daemon:
        daemons.append(Daemon(tmp_path, prelude=planted(line)))
        return daemons[-1]

    yield build
    for daemon in daemons:
        daemon.stop()


def test_a_right_daemon_is_equal_block_by_block(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        with daemon.client() as client:
            for tokens in TOKENS:
                put(client, tokens, cache_salt="s", lora="a")
            daemon.settle()
            report = check(daemon)
        assert (report.ok, report.full, report.from_the_start, report.digests > 1) == (True, True, True, True)
        assert {tier: (each.blocks, each.equal) for tier, each in report.tiers.items()} == {
            "device": (9, True),
            "host": (9, True),
        }


def test_it_is_content_with_a_daemon_that_is_hammered(tmp_path: Path) -> None:
    """A small ring and small pools: most joins get a snapshot, and blocks come and go all the time."""
    with Daemon(tmp_path, events={"ring_size": "64 KiB"}) as daemon:
        stop = threading.Event()

        def hammer() -> None:
            with daemon.client() as client:
                number = 0
                while not stop.is_set():
                    number += 1
                    put(client, [*range(number % 7 * 1000, number % 7 * 1000 + 64), *range(number, number + 40)])

        thread = threading.Thread(target=hammer)
        thread.start()
        try:
            until(lambda: daemon.status(prove=False)["stream"]["ring_first_seq"] > daemon.epoch)
            reports = [check(daemon, duration_s=0.5) for _ in range(4)]
        finally:
            stop.set()
            thread.join()
        assert [report.problems for report in reports] == [[], [], [], []]
        assert all(report.digests for report in reports)
        assert all(each.equal for report in reports for each in report.tiers.values())


def test_every_rank_is_checked_and_the_command_says_so(tmp_path: Path) -> None:
    with Daemon(tmp_path, parallel={"dp_size": 2}) as daemon:
        ran = run(daemon, "--json", "--duration", "0.2")
        assert ran.returncode == 0
        told = json.loads(ran.stdout)
        assert told["ok"]
        assert [(rank["rank"], rank["ok"], rank["full"]) for rank in told["ranks"]] == [
            (0, True, True),
            (1, True, True),
        ]
        ran = run(daemon, "--rank", "1", "--duration", "0.2")
        assert ran.returncode == 0
        assert "device   0 blocks, equal block by block at number" in ran.stdout


def run(daemon: Daemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglcache", "verify", "--socket", str(daemon.socket), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_removal_that_was_never_told_is_found_by_the_dump(wrong: Callable[[str], Daemon]) -> None:
    """The daemon's digest counts what it tells, and knows of it no more than the stream does."""
    daemon = wrong("sglcache.core.eventlog.EventLog|removed|return real(self, *a, **k) if len(calls) != 2 else None")
    with daemon.client() as client:
        for tokens in TOKENS:
            put(client, tokens)
        daemon.settle()
        client.clear("device")
        until(lambda: daemon.pool()["cached"] == 0)
    report = check(daemon, full=True)
    device, host = report.tiers["device"], report.tiers["host"]
    assert (device.num_missing, device.num_extra, host.equal) == (0, 3, True)
    assert report.problems == [
        f"DEVICE: at number {device.seq} the mirror lacks 0 of the index's 0 blocks and has 3 that it should not"
    ]
    told = sorted(device.extra, key=lambda note: note.tokens)
    assert [note.tokens for note in told] == [(100, 101, 102, 103), (104, 105, 106, 107), (108, 109, 110, 111)]
    assert (told[0].parent, told[1].parent) == (None, told[0].hash)
    assert told[0].elsewhere == ("HOST",)
    assert f"extra    {name(told[0].hash)} at the root, tokens 100,101,102,103,.., also in HOST" in describe(report)


def test_a_store_that_was_never_told_is_found_and_named(wrong: Callable[[str], Daemon]) -> None:
    daemon = wrong(
        "sglcache.core.eventlog.EventLog|stored|real(self, *a, **k); self._records.pop() if len(calls) == 4 else None"
    )
    with daemon.client() as client:
        for tokens in TOKENS[:2]:
            put(client, tokens, cache_salt="s")
            daemon.settle()
    report = check(daemon)
    host = report.tiers["host"]
    assert (host.num_missing, host.num_extra, report.tiers["device"].equal) == (3, 0, True)
    assert sorted(note.tokens for note in host.missing)[0] == (100, 101, 102, 103)
    assert all(note.known and note.cache_salt == "s" and note.elsewhere == ("DEVICE",) for note in host.missing)


def test_an_event_that_says_something_else_is_found_by_digest(wrong: Callable[[str], Daemon]) -> None:
    daemon = wrong(
        "sglcache.core.encoding.MapEncoding|removed|return real(self, a[0], 'DISK' if len(calls) == 1 else a[1])"
    )
    with daemon.client() as client:
        put(client, TOKENS[0])
        daemon.settle()
        client.clear("device")
        until(lambda: daemon.pool()["cached"] == 0)
    report = check(daemon)
    assert report.problems[0].startswith("DEVICE: as of number ")
    assert "the daemon has told of 0 blocks with the sum 0000000000000000, the mirror has 3" in report.problems[0]
    assert report.tiers["device"].num_extra == 3


def test_a_batch_that_is_lost_for_good_is_a_problem(wrong: Callable[[str], Daemon]) -> None:
    daemon = wrong("sglcache.net.publisher.Publisher|append|return None if len(calls) == 3 else real(self, *a, **k)")
    with daemon.client() as client:
        for tokens in TOKENS:
            put(client, tokens)
            daemon.settle()
    report = check(daemon)
    assert "the stream lost 1 times what no replay brought back" in report.problems[-1]


def test_where_the_start_is_gone_what_is_there_is_compared(tmp_path: Path) -> None:
    with Daemon(tmp_path, events={"ring_size": "64 KiB"}) as daemon, daemon.client() as client:
        put(client, TOKENS[0])
        assert check(daemon).from_the_start
        number = 0
        while client.status()["stream"]["ring_first_seq"] == client.epoch:
            number += 1
            put(client, list(range(number, number + 64)))
        daemon.settle()
        report = check(daemon)
        assert (report.ok, report.full, report.from_the_start) == (True, True, False)
        assert "from a snapshot on" in describe(report)


def test_without_events_there_is_nothing_to_verify(lend: Callable[..., Daemon]) -> None:
    daemon = lend(events={"enabled": False})
    with pytest.raises(Unavailable, match=r"events\.enabled"):
        check(daemon)
    ran = run(daemon)
    assert (ran.returncode, ran.stdout) == (69, "")
    assert ran.stderr.startswith("error[unavailable]: the daemon publishes no events")


def test_a_stream_that_cannot_be_reached_is_a_problem_with_its_addresses(lend: Callable[..., Daemon]) -> None:
    with lend().observer() as observer:
        status = observer.status()
        status["stream"]["endpoint"] = status["stream"]["replay_endpoint"] = "tcp://127.0.0.1:1"

        class Elsewhere:
            def status(self) -> Any:
                return status

            digest = observer.digest
            dump = observer.dump

        report = verify(Elsewhere(), duration_s=0, timeout_s=0.3)  # type: ignore[arg-type]
        assert "has heard nothing" in report.problems[0]
        assert "can tcp://127.0.0.1:1 and tcp://127.0.0.1:1 be reached" in report.problems[0]


def test_a_block_of_which_nothing_is_known_has_its_hash() -> None:
    assert str(BlockNote(-1)) == "f" * 16
    assert str(BlockNote(5, True, lora_name="a")) == "0000000000000005 at the root, tokens withheld, lora 'a'"


def test_a_stream_with_keys_is_read_with_keys(tmp_path: Path) -> None:
    for folder, who in (("daemon", "rank"), ("readers", "router"), ("strangers", "stranger")):
        make_keys(tmp_path / folder, who)
    events = {
        "curve_key_file": str(tmp_path / "daemon" / "rank.key_secret"),
        "curve_allow_dir": str(tmp_path / "readers"),
    }
    server_key = str(tmp_path / "daemon" / "rank.key")
    ours = str(tmp_path / "readers" / "router.key_secret")
    with Daemon(tmp_path / "d", events=events, http={"enabled": True, "port": 0}) as daemon:
        keys = ("--curve-server-key", server_key, "--curve-key-file", ours)
        assert run(daemon, "--duration", "0.2", *keys).returncode == 0
        examined = doctor(daemon, *keys)
        assert (examined.returncode, examined.stderr) == (0, "")
        stranger = str(tmp_path / "strangers" / "stranger.key_secret")
        for wrong in ((), keys[:2], (*keys[:3], stranger)):
            ran = run(daemon, "--timeout", "0.5", *wrong)
            assert ran.returncode == 1
            assert "has heard nothing" in ran.stdout
        ran = run(daemon, *keys[2:])
        assert (ran.returncode, ran.stdout) == (2, "")
        assert "whom to trust" in ran.stderr


def doctor(daemon: Daemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglcache", "doctor", "events", "--socket", str(daemon.socket), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
