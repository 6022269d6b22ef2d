"""The command line with a daemon of several ranks: which one a command means, and what it says of all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglcache import Client, Worker
from sglcache.errors import BadRequest
from sglcache.testing.daemon import Daemon, until

pytestmark = pytest.mark.daemons

TOKENS = list(range(64))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(
        tmp_path_factory.mktemp("daemon"), dp_size=2, pp_size=2, timing={"beat": 0.05, "stuck": 1.0, "first_wait": 1.0}
    ) as daemon:
        yield daemon


@pytest.fixture
def whole(daemon: Daemon) -> Daemon:
    until(lambda: daemon.ask("/health")["status"] == "ok", 30.0)
    return daemon


def run(daemon: Daemon, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sglcache", *args],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={**os.environ, "SGLCACHE_SOCKET": str(daemon.socket), "COLUMNS": "200"},
    )


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines()]


def test_ping_asks_all_or_the_one_that_is_named(whole: Daemon) -> None:
    done = run(whole, "ping")
    assert done.returncode == 0, done
    assert [line.partition(" µs")[0].rpartition(" ")[0] for line in lines(done.stdout)] == [
        f"rank {offset}: ok:" for offset in range(4)
    ]
    for rank in ("2", "0,1"):
        assert run(whole, "ping", "--rank", rank).stdout.startswith("rank 2: ok: ")


@pytest.mark.parametrize(
    ("rank", "told"),
    [
        ("7", "this host has the ranks 0 (0,0), 1 (1,0), 2 (0,1), 3 (1,1)"),
        ("0,2", "this host has the ranks 0 (0,0)"),
        ("one", "write an offset, such as 3, or dp_rank,pp_rank"),
        ("1,", "write an offset"),
        ("-1", "write an offset"),
    ],
)
def test_a_rank_that_is_none_is_wrong_usage(whole: Daemon, rank: str, told: str) -> None:
    done = run(whole, "ping", "--rank", rank)
    assert done.returncode == 2
    assert told in done.stderr


def test_status_shows_all_in_a_table_and_proves_each(whole: Daemon) -> None:
    done = run(whole, "status")
    assert done.returncode == 0, done
    rows = [line.split() for line in lines(done.stdout) if line[:1].isdigit()]
    assert [" ".join(row[:4]) for row in rows] == ["0 0 0 ok", "1 1 0 ok", "2 0 1 ok", "3 1 1 ok"]
    assert [int(row[4]) for row in rows] == [rank.pid for rank in whole.ranks]
    assert max(map(len, done.stdout.splitlines())) <= 80, "it fits a terminal"
    assert all(row[-1] == "right" for row in rows)
    assert "right" not in run(whole, "status", "--no-prove").stdout
    facts = json.loads(run(whole, "status", "--json").stdout)
    assert [rank["violations"] for rank in facts["ranks"]] == [[]] * 4


def test_status_of_one_is_told_at_length(whole: Daemon) -> None:
    done = run(whole, "status", "--rank", "1,1")
    assert done.returncode == 0
    assert f"rank 3, pid {whole.rank(3).pid}: ok" in done.stdout
    assert "every page is in one place" in done.stdout
    assert json.loads(run(whole, "status", "--rank", "3", "--json").stdout)["rank"] == 3


def test_a_rank_is_also_found_by_its_own_socket(whole: Daemon) -> None:
    done = run(whole, "status", "--json", "--socket", str(whole.rank(2).socket))
    assert json.loads(done.stdout)["rank"] == 2


def test_a_client_finds_its_rank_by_the_same_rule(whole: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLCACHE_SOCKET", str(whole.socket))
    for offset, rank in enumerate(((0, 0), (1, 0), (0, 1), (1, 1))):
        with Client(rank=rank, dp_size=2, role="observer") as client:
            assert client.status()["rank"] == offset


@pytest.mark.parametrize(
    ("rank", "dp_size", "there"),
    [((0, 1), None, "dp 1, pp 0"), ((0, 1), 1, "dp 1, pp 0"), ((0, 0), 4, "dp 0, pp 0"), ((3, 0), None, "dp 1, pp 1")],
)
@pytest.mark.parametrize("role", ["runner", "scheduler", "observer"])
def test_another_rank_than_the_one_asked_for_is_refused_by_both_names(
    whole: Daemon,
    monkeypatch: pytest.MonkeyPatch,
    rank: tuple[int, int],
    dp_size: int | None,
    there: str,
    role: str,
) -> None:
    monkeypatch.setenv("SGLCACHE_SOCKET", str(whole.socket))
    asked = f"dp {rank[0]}, pp {rank[1]}"
    with pytest.raises(BadRequest, match=rf"rank \({asked}\).* is rank \({there}\) of dp_size 2, pp_size 2") as caught:
        Client(rank=rank, dp_size=dp_size, role=role)
    assert caught.value.facts["dp_size"] == 2
    assert not [each for offset in range(4) for each in whole.rank(offset).status()["sessions"] if not each["ended"]]


@pytest.mark.parametrize(
    ("rank", "dp_size"), [((-1, 1), 2), ((2, 0), 2), ((0, -1), 2), ((0, 0), 0), ((0,), 2), (("0", 0), 2), ((0, 0), 2.0)]
)
def test_a_rank_that_there_cannot_be_is_refused(
    whole: Daemon, monkeypatch: pytest.MonkeyPatch, rank: Any, dp_size: Any
) -> None:
    monkeypatch.setenv("SGLCACHE_SOCKET", str(whole.socket))
    with pytest.raises(BadRequest) as caught:
        Client(rank=rank, dp_size=dp_size)
    assert caught.value.facts["argument"] == "rank"
    with pytest.raises(BadRequest):
        Worker(b"x" * 16, 0, rank=rank, dp_size=dp_size)


def test_a_rank_is_held_to_its_name_where_its_socket_is_named_too(whole: Daemon) -> None:
    third = whole.rank(2).socket
    with Client(third, (0, 1)) as client, Client(third) as other, Client(third, (0, 1), dp_size=2) as both:
        assert client.rank == other.rank == both.rank == (0, 1)
    with Client(third, role="scheduler") as scheduler:
        with Worker(scheduler.token, 0, third, (0, 1)) as worker:
            assert worker.rank == (0, 1)
        with pytest.raises(BadRequest, match="is rank"):
            Client(third, (1, 0))


def test_clear_drops_on_all_ranks_or_on_one_and_a_busy_one_keeps_nobody_else_from_it(whole: Daemon) -> None:
    for rank in whole.ranks:
        with rank.client() as client, client.acquire(TOKENS) as lease:
            lease.commit()
        rank.settle()
    done = run(whole, "clear", "--rank", "1,0", "--json")
    assert json.loads(done.stdout) == {"pages": {"DEVICE": 16, "HOST": 16}}
    with whole.rank(0).client() as client, client.acquire(TOKENS):
        done = run(whole, "clear", "--wait", "0")
        assert done.returncode == 1
        assert done.stderr.startswith("error[busy]: rank 0: ")
        assert lines(done.stdout) == [
            "rank 1: dropped 0 pages of device, 0 pages of host",
            "rank 2: dropped 16 pages of device, 16 pages of host",
            "rank 3: dropped 16 pages of device, 16 pages of host",
        ]
    assert json.loads(run(whole, "clear", "--json").stdout)["ranks"][0] == {
        "rank": 0,
        "pages": {"DEVICE": 16, "HOST": 16},
    }


def test_a_replay_is_of_one_rank_and_a_watch_of_one_or_all(whole: Daemon) -> None:
    before = whole.rank(3).status()["counters"]["requests"]
    done = run(whole, "replay", "--rank", "1,1", "--limit", "3", "--clients", "1", "--verify")
    assert done.returncode == 0, done
    assert whole.rank(3).status()["counters"]["requests"] > before
    done = run(whole, "watch", "--rank", "3", "--limit", "1")
    assert done.returncode == 0, done
    line = json.loads(done.stdout)
    assert line["rank"] == 3
    assert whole.rank(3).epoch <= line["seq"] <= whole.rank(3).row["stream"]["last_seq"]
    for rank in whole.ranks:  # a stream begins with AllBlocksCleared, and has nothing more if nothing is cached
        with rank.admin() as admin:
            admin.clear()
    done = run(whole, "watch", "--limit", "4")
    assert sorted(json.loads(line)["rank"] for line in lines(done.stdout)) == [0, 1, 2, 3]


def test_a_rank_that_is_away_is_in_the_table_with_its_reason(whole: Daemon) -> None:
    for command, words in (
        (["status", "--no-prove"], "rank 1: pid {} was killed by SIGKILL"),
        (["status", "--rank", "1", "--no-prove"], "pid {} was killed by SIGKILL"),
    ):
        died = whole.rank(1).kill_rank()  # each time anew: a machine under load is slow to ask
        until(lambda: whole.rank(1).row["state"] == "waiting")
        done = run(whole, *command)
        assert done.returncode == 1
        assert words.format(died) in done.stdout
        whole.rank(1).next_life(died)
    assert run(whole, "ping").returncode == 0
    restarts = whole.rank(1).row["restarts"]
    assert f", {restarts} restarts" in run(whole, "status", "--rank", "1").stdout


def test_a_rank_that_hangs_holds_no_status_up(whole: Daemon) -> None:
    pid = whole.rank(2).pid
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: whole.rank(2).row["state"] == "stuck")
        done = run(whole, "status", "--no-prove")
        assert done.returncode == 1
        assert "rank 2 has given no sign of life for " in done.stdout
        assert [line.split()[3] for line in lines(done.stdout) if line[:1].isdigit()] == ["ok", "ok", "stuck", "ok"]
    finally:
        os.kill(pid, signal.SIGCONT)


# -- serve ------------------------------------------------------------------------------------------------

FREE_PORTS = ("events.endpoint=tcp://127.0.0.1:0", "events.replay_endpoint=tcp://127.0.0.1:0", "http.port=0")


def serve(folder: Path, *settings: str, check: bool = False) -> subprocess.Popen[str]:
    options = [option for setting in (*FREE_PORTS, *settings) for option in ("--set", setting)]
    return subprocess.Popen(
        [sys.executable, "-m", "sglcache", "check" if check else "serve", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "SGLCACHE_SOCKET": str(folder / "s"), "XDG_STATE_HOME": str(folder / "state")},
    )


def test_the_first_screen_says_where_each_rank_is(tmp_path: Path) -> None:
    process = serve(tmp_path, "parallel.dp_size=2", "parallel.stages=[{num_tokens = 64, host_num_tokens = 0}]")
    assert process.stdout is not None
    screen = []
    for line in process.stdout:
        screen.append(line.strip())
        if line.startswith("Ctrl-C"):
            break
    process.send_signal(signal.SIGINT)
    rest, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr, rest) == (0, "", "drained and stopped\n")
    assert screen[0].endswith("2 ranks of 2 replicas, 1 stages each")
    assert f"rank 0   dp 0, pp 0: {tmp_path / 's'}" in screen
    assert f"rank 1   dp 1, pp 0: {tmp_path / 's-1'}" in screen
    assert sum(line.startswith("device 4 pages of 16 tokens: 64 tokens") for line in screen) == 2
    assert sum(line.startswith("tcp://127.0.0.1:") for line in screen) == 2


@pytest.mark.parametrize("check", [True, False])
def test_ranks_that_overlap_are_wrong_configuration(tmp_path: Path, check: bool) -> None:
    overlap = ("parallel.dp_size=2", "events.endpoint=tcp://127.0.0.1:7000", "events.replay_endpoint=tcp://*:7001")
    process = serve(tmp_path, *overlap, check=check)
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout) == (2, "")
    assert stderr.startswith(
        "error[config]: events.endpoint: tcp://127.0.0.1:7001 of rank 1 (dp 1, pp 0) is events.rep"
    )


def test_a_rank_that_cannot_start_is_serves_exit_status(tmp_path: Path) -> None:
    process = serve(tmp_path, f"state.dir={tmp_path / 'file'}", "parallel.dp_size=2")
    (tmp_path / "file").touch()
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 2
    assert stderr.startswith("error[config]: rank ")
    assert ": state.dir: the state file " in stderr
    assert "name a folder that this user may write to" in stderr
