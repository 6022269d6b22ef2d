"""Several ranks under one supervisor, with real processes: each lives and dies by itself, and all end together."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from streams import Listener, replayed

from sglcache import paths
from sglcache.errors import Unavailable
from sglcache.testing.daemon import Daemon, DaemonError, until
from sglcache.wire.events import AllBlocksCleared, BlockStored

pytestmark = pytest.mark.daemons

TOKENS = list(range(64))
QUICK = {"beat": 0.05, "stuck": 1.0, "answer": 5.0}  # a loaded machine answers slowly, and pauses

# Plants what a rank does where it is built: `offset` is its offset.
AT_BUILD = """
from sglcache.server import rank
build = rank.build
def planted(it, loop):
    offset = it.seat.offset
    {statements}
    return build(it, loop)
rank.build = planted
"""


def planted(statements: str) -> str:
    return AT_BUILD.format(statements=statements.replace("\n", "\n    "))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Two replicas of two stages, of which the second has another size. The tests of it may kill ranks."""
    stages = [{}, {"num_layers": 3, "num_tokens": 4 * 64, "host_num_tokens": 4 * 32}]
    with Daemon(
        tmp_path_factory.mktemp("four"),
        dp_size=2,
        pp_size=2,
        timing=QUICK,
        parallel={"stages": stages},
        events={"heartbeat_s": 0.1},
        http={"enabled": True, "port": 0},
    ) as daemon:
        yield daemon


@pytest.fixture
def whole(four: Daemon) -> Daemon:
    until(lambda: four.ask("/health")["status"] == "ok", 30.0)
    return four


@pytest.fixture
def listen() -> Iterator[contextlib.ExitStack]:
    """For subscribers of a test, which a failure shall not leave open."""
    with contextlib.ExitStack() as stack:
        yield stack


def get(daemon: Daemon, page: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"{daemon.info['http']}{page}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def up(daemon: Daemon) -> dict[str, float]:
    status, text = get(daemon, "/metrics")
    assert status == 200
    return {
        sample.labels["rank"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "sglcache_rank_up"
    }


def commit(daemon: Daemon, offset: int, tokens: list[int]) -> None:
    with daemon.rank(offset).client() as client, client.acquire(tokens) as lease:
        lease.commit()


# -- all of them ------------------------------------------------------------------------------------------


def test_every_rank_serves_at_its_own_place(whole: Daemon) -> None:
    rows = whole.ask()["ranks"]
    assert [(row["rank"], row["dp_rank"], row["pp_rank"]) for row in rows] == [
        (0, 0, 0),
        (1, 1, 0),
        (2, 0, 1),
        (3, 1, 1),
    ]
    assert len({row["pid"] for row in rows} | {whole.process.pid}) == 5
    assert len({row["socket"] for row in rows}) == len({row["stream"]["endpoint"] for row in rows}) == 4
    for row in rows:
        status = whole.rank(row["rank"]).status()
        assert (status["pid"], status["epoch"], status["dp_rank"]) == (row["pid"], row["epoch"], row["dp_rank"])
        assert (status["http"], status["state"]) == (whole.info["http"], "ok")
        geometry = row["geometry"]
        stage = (geometry["num_layers"], geometry["num_pages"], geometry["host_pages"])
        assert stage == ((3, 64, 32) if row["pp_rank"] else (2, 256, 512))


def test_one_server_info_is_for_all(whole: Daemon) -> None:
    info = whole.ask()
    assert (info["dp_size"], info["pp_size"], info["pid"]) == (2, 2, whole.process.pid)
    assert info["kv_events"] is None, "the system chose four ports: there is no base"
    assert [(row["rank"], row["dp_rank"], row["pp_rank"]) for row in info["pipeline_endpoints"]] == [
        (2, 0, 1),
        (3, 1, 1),
    ]
    for row in info["pipeline_endpoints"]:
        stream = info["ranks"][row["rank"]]["stream"]
        assert (row["endpoint"], row["replay_endpoint"]) == (stream["endpoint"], stream["replay_endpoint"])


def test_a_batch_bears_its_ranks_offset(whole: Daemon) -> None:
    for offset in range(4):
        with Listener(whole.rank(offset).row["stream"]["endpoint"]) as stream:
            assert stream.await_batch()[1].attn_dp_rank == offset


def test_metrics_have_a_rank_label_and_each_family_once(whole: Daemon) -> None:
    commit(whole, 2, TOKENS)
    _, text = get(whole, "/metrics")
    kinds = [line for line in text.splitlines() if line.startswith("# TYPE ")]
    assert len(kinds) == len(set(kinds)) > 30
    commits = {
        sample.labels["rank"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "sglcache_commits_total"
    }
    assert set(commits) == {"0", "1", "2", "3"}
    assert commits["2"] >= 1
    assert up(whole) == dict.fromkeys("0123", 1.0)


def test_the_supervisor_loads_nothing_that_a_rank_could_die_of(whole: Daemon) -> None:
    whole.ask()
    get(whole, "/metrics")
    maps = Path(f"/proc/{whole.process.pid}/maps").read_text()
    for library in ("torch", "zmq", "numpy", "uvloop"):
        assert library not in maps, f"{library} is in the supervisor"


def test_without_http_what_serves_the_pages_is_not_loaded_before_somebody_asks(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        maps = Path(f"/proc/{daemon.process.pid}/maps")
        assert "aiohttp" not in maps.read_text()
        assert daemon.ask("/health")["status"] == "ok"
        assert "aiohttp" in maps.read_text()


def test_log_lines_say_whose_they_are(whole: Daemon) -> None:
    for offset in range(4):
        assert f"INFO rank {offset} sglcache.rank: serving " in whole.said()


# -- one of them ------------------------------------------------------------------------------------------


def test_a_killed_rank_comes_back_and_the_others_notice_nothing(whole: Daemon, listen: contextlib.ExitStack) -> None:
    before = {row["rank"]: row for row in whole.ask()["ranks"]}
    streams = {offset: listen.enter_context(Listener(before[offset]["stream"]["endpoint"])) for offset in range(4)}
    for stream in streams.values():
        stream.await_batch()
    with whole.rank(0).client() as neighbour, whole.rank(1).client() as victim:
        held = neighbour.acquire(TOKENS)
        held.commit()
        with victim.acquire(TOKENS) as lease:
            lease.commit()
        streams[1].await_event(BlockStored)
        died = whole.rank(1).kill_rank()
        with pytest.raises(Unavailable):
            victim.ping()
        life = whole.rank(1).next_life(died)
        with held:  # the same session, the same lease
            assert neighbour.peek(TOKENS).matched_tokens == 64
    last = streams[1].heard[-1][0]

    assert life["epoch"] > last
    assert life["restarts"] == before[1]["restarts"] + 1
    assert life["last_exit"]["pid"] == died
    assert life["last_exit"]["why"] == "was killed by SIGKILL"
    assert life["stream"]["endpoint"] == before[1]["stream"]["endpoint"], "a port of the system's choice is kept"
    first_seq, first = replayed(life["stream"]["replay_endpoint"], life["epoch"])[0]
    assert first_seq == life["epoch"]
    assert [type(event) for event in first.events] == [AllBlocksCleared, BlockStored], "and what survived"
    assert first.events[1].medium == "CPU_PINNED"
    while streams[1].await_batch()[0] < life["epoch"]:  # the subscriber finds it again
        pass
    commit(whole, 1, TOKENS)
    while streams[1].await_event(BlockStored)[0] < life["epoch"]:  # what the first life told is still unread
        pass

    now = {row["rank"]: row for row in whole.ask()["ranks"]}
    for offset in (0, 2, 3):
        assert {key: now[offset][key] for key in ("pid", "epoch", "restarts")} == {
            key: before[offset][key] for key in ("pid", "epoch", "restarts")
        }
        streams[offset].await_batch()
        streams[offset].pull()
        streams[offset].assert_unbroken()


def test_while_it_is_away_health_says_so_and_its_numbers_are_missing(tmp_path: Path) -> None:
    with Daemon(
        tmp_path, dp_size=2, timing={**QUICK, "first_wait": 600.0}, http={"enabled": True, "port": 0}
    ) as daemon:
        assert get(daemon, "/health")[0] == 200
        pid = daemon.rank(1).kill_rank()
        until(lambda: get(daemon, "/health")[0] == 503)
        health = daemon.ask("/health")
        assert health["status"] == "degraded"
        assert "rank 1 is waiting for its next start in " in health["reason"]
        assert f"pid {pid} was killed by SIGKILL" in health["reason"]
        assert health["ranks"][0]["state"] == "ok"
        assert health["ranks"][1]["pid"] is None
        assert up(daemon) == {"0": 1.0, "1": 0.0}
        assert 'sglcache_commits_total{rank="1"}' not in get(daemon, "/metrics")[1]
        info = daemon.ask()
        assert info["ranks"][1]["stream"]["endpoint"] == daemon.info["ranks"][1]["stream"]["endpoint"]
        daemon.rank(0).status()


def test_a_rank_that_is_told_to_end_ends_well_and_comes_back(whole: Daemon) -> None:
    pid = whole.rank(3).kill_rank(signal.SIGTERM)
    assert whole.rank(3).next_life(pid)["last_exit"]["why"] == "ended with 0"


def test_a_terminals_interrupt_is_the_supervisors_alone(whole: Daemon) -> None:
    """Ctrl-C goes to the whole process group: a rank that obeyed it would not be told to drain."""
    pid = whole.rank(0).pid
    os.kill(pid, signal.SIGINT)
    whole.rank(0).status()
    assert whole.rank(0).pid == pid


def test_a_rank_that_hangs_is_told_of_within_the_deadline_and_is_well_again_after_it(whole: Daemon) -> None:
    row = whole.rank(2).row
    os.kill(row["pid"], signal.SIGSTOP)
    try:
        took = until(lambda: get(whole, "/health")[0] == 503, 5.0)
        assert took < QUICK["stuck"] + 1.5
        health = whole.ask("/health")
        assert health["status"] == "degraded"
        assert "rank 2 is stuck: no sign of life for" in health["reason"]
        assert health["ranks"][2]["silent_s"] >= QUICK["stuck"]
        assert [rank["state"] for rank in health["ranks"]] == ["ok", "ok", "stuck", "ok"]
        started = time.monotonic()
        info = whole.ask()
        assert up(whole) == {"0": 1.0, "1": 1.0, "2": 0.0, "3": 1.0}
        assert time.monotonic() - started < 2.0
        assert info["ranks"][2]["epoch"] == row["epoch"], "what is known of it is told"
        whole.rank(0).status()
        until(lambda: "rank 2 (dp 0, pp 1) is stuck" in whole.said())  # who looks now and then has seen it, too
    finally:
        os.kill(row["pid"], signal.SIGCONT)
    until(lambda: get(whole, "/health")[0] == 200, 5.0)
    after = whole.rank(2).row
    assert (after["pid"], after["epoch"], after["restarts"]) == (row["pid"], row["epoch"], row["restarts"])
    until(lambda: "rank 2 (dp 0, pp 1) is alive again" in whole.said())


def test_a_rank_that_has_just_hung_holds_a_page_up_no_longer_than_its_deadline(tmp_path: Path) -> None:
    """Before its silence is long enough to be told from a pause it is still asked."""
    with Daemon(tmp_path, dp_size=2, timing={"stuck": 600.0, "answer": 0.3}) as daemon:
        os.kill(daemon.rank(1).pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            info = daemon.ask()
            assert time.monotonic() - started < 2.0
            assert [row["epoch"] for row in info["ranks"]] == [row["epoch"] for row in daemon.info["ranks"]]
        finally:
            os.kill(daemon.rank(1).pid, signal.SIGCONT)


# -- lives ------------------------------------------------------------------------------------------------


def test_deaths_in_a_row_wait_longer_up_to_a_bound_and_a_healthy_life_forgets_them(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    prelude = planted(f"import os\nassert offset != 1 or not os.path.exists({str(flag)!r}), 'planted'")
    timing = {**QUICK, "first_wait": 0.05, "longest_wait": 0.2, "healthy": 0.5}
    with Daemon(tmp_path, dp_size=2, prelude=prelude, timing=timing) as daemon:
        neighbour = daemon.rank(0).pid

        def waits() -> list[str]:
            lines = [line for line in daemon.said().splitlines() if "it starts again in" in line]
            assert all("rank 1 (dp 1, pp 0)" in line for line in lines)
            return [line.rpartition(" in ")[2] for line in lines]

        flag.touch()
        pid = daemon.rank(1).kill_rank()
        until(lambda: len(waits()) >= 5, 30.0)
        assert waits()[:5] == ["0.05 s", "0.1 s", "0.2 s", "0.2 s", "0.2 s"]
        assert "ended with 70: AssertionError: planted" in daemon.rank(1).row["last_exit"]["why"]
        flag.unlink()
        life = daemon.rank(1).next_life(pid)
        back = time.monotonic()
        until(lambda: time.monotonic() - back > timing["healthy"])
        seen = len(waits())
        daemon.rank(1).next_life(daemon.rank(1).kill_rank())
        assert waits()[seen:] == ["0.05 s"]
        assert daemon.rank(1).row["restarts"] == life["restarts"] + 1
        assert daemon.rank(0).pid == neighbour


def test_numbers_go_on_over_lives_whatever_the_clock_and_the_state_file_do(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.write_text("2000000000000000000")
    prelude = f"import time\ntime.time_ns = lambda: int(open({str(clock)!r}).read())"
    last = 0
    for _ in range(2):  # lives of the supervisor
        with Daemon(tmp_path, dp_size=2, prelude=prelude, timing=QUICK) as daemon:
            for lost in (False, True):  # lives of the rank
                rank = daemon.rank(1)
                assert rank.epoch > last
                commit(daemon, 1, TOKENS)
                until(lambda rank=rank: rank.row["stream"]["last_seq"] > rank.epoch)
                # The supervisor knows the numbers that were bought once a beat has come.
                until(lambda rank=rank: rank.row["stream"]["batches_sent"] > 1)
                last = rank.row["stream"]["last_seq"]
                clock.write_text("1000000000000000000")
                pid = rank.kill_rank()
                if lost:
                    with contextlib.suppress(FileNotFoundError):
                        (tmp_path / "rank-1.json").unlink()
                assert rank.next_life(pid)["epoch"] > last
            last = daemon.rank(1).row["stream"]["last_seq"]


def test_what_a_life_has_kept_with_the_supervisor_is_the_next_ones(tmp_path: Path) -> None:
    """The seam for memory that outlives a rank: a descriptor goes up, and down again at the next start."""
    prelude = planted(
        "import os\n"
        "if 'pages' in it.kept:\n"
        "    print('KEPT', offset, os.pread(it.kept['pages'], 99, 0).decode(), sorted(it.kept), flush=True)\n"
        "else:\n"
        "    fd = os.memfd_create('pages'); os.write(fd, b'written by the first life')\n"
        "    assert it.keep('pages', fd) and it.keep('gone', fd) and it.keep('gone', None)\n"
        "    os.close(fd)"
    )
    with Daemon(tmp_path, dp_size=2, prelude=prelude, timing=QUICK) as daemon:
        for count in (1, 2):
            daemon.rank(1).next_life(daemon.rank(1).kill_rank())
            assert daemon.said().count("KEPT 1 written by the first life ['pages', 'sglcache-") == count
        assert "KEPT 0" not in daemon.said()
        ours = {f"/memfd:sglcache-{name} (deleted)": 2 for name in ("host-0", "journal")}
        assert held(daemon.process.pid) == {"/memfd:pages (deleted)": 2, "anon_inode:[pidfd]": 2, **ours}


def held(pid: int) -> Counter[str]:
    """What a process has open, but sockets, which come and go with who asks, and what every process has."""
    links: Counter[str] = Counter()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            links[os.readlink(f"/proc/{pid}/fd/{fd}")] += 1
    return Counter({link: count for link, count in links.items() if "memfd" in link or "pidfd" in link})


def test_no_rank_outlives_a_killed_supervisor_not_even_one_that_hangs(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, dp_size=2)
    os.kill(daemon.rank(1).pid, signal.SIGSTOP)
    daemon.kill()  # waits for the ranks
    with Daemon(tmp_path, dp_size=2) as second:  # nothing is held any more
        second.rank(1).status()


def test_a_rank_ends_with_the_channel_where_the_kernel_sends_no_signal(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, prelude="from sglcache.server import rank; rank.PR_SET_PDEATHSIG = 0")
    daemon.kill()
    assert "the supervisor is gone" in daemon.said()


# -- the start --------------------------------------------------------------------------------------------


def starts(folder: Path) -> list[int]:
    """How often each rank was started, by the log."""
    text = (folder / "daemon.log").read_text()
    return [text.count(f"rank {offset} (dp {offset}, pp 0) starts") for offset in range(2)]


@pytest.mark.parametrize("key", ["endpoint", "replay_endpoint"])
def test_a_taken_port_of_one_rank_stops_the_start_at_once_by_name(tmp_path: Path, key: str) -> None:
    from streams import free_ports

    base, other = free_ports(2, 2)
    with socket.create_server(("127.0.0.1", base + 1)):
        events = {"endpoint": f"tcp://127.0.0.1:{other}", "replay_endpoint": f"tcp://127.0.0.1:{other + 50}"}
        events[key] = f"tcp://127.0.0.1:{base}"
        with pytest.raises(DaemonError) as caught:
            Daemon(tmp_path, dp_size=2, events=events)
    told = str(caught.value)
    assert f"ConfigError: rank 1 (dp 1, pp 0): events.{key}: can't bind tcp://127.0.0.1:{base + 1}" in told
    assert "Address already in use" in told
    assert starts(tmp_path) == [1, 1]
    assert not paths.supervisor_path(tmp_path / "rank-0.sock").exists()
    assert "rank 0 sglcache.rank: drained" in told or "rank 0 sglcache.rank: serving" not in told


def test_a_rank_that_breaks_at_the_start_stops_it_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(
        DaemonError, match=r"StartError: rank 1 .*: it ended with 70: ZeroDivisionError: .*, before it s"
    ):
        Daemon(tmp_path, dp_size=2, prelude=planted("1 // (1 - offset)"))
    assert starts(tmp_path) == [1, 1]


def test_a_rank_that_says_nothing_at_the_start_stops_it_too(tmp_path: Path) -> None:
    with pytest.raises(
        DaemonError, match=r"StartError: rank 0 \(dp 0, pp 0\): it ended with 3, before it served; the log says why"
    ):
        Daemon(tmp_path, prelude="import sys; sys.exit(3)")


def test_a_port_that_was_taken_between_two_lives_is_waited_for(tmp_path: Path) -> None:
    timing = {**QUICK, "first_wait": 0.5, "longest_wait": 0.5}
    with Daemon(tmp_path, dp_size=2, timing=timing) as daemon:
        port = int(daemon.rank(1).row["stream"]["endpoint"].rpartition(":")[2])
        pid = daemon.rank(1).kill_rank()
        with socket.create_server(("127.0.0.1", port)):
            until(lambda: "Address already in use" in daemon.ask("/health").get("reason", ""))
            assert (
                f"ended with 78: events.endpoint: can't bind tcp://127.0.0.1:{port}" in daemon.ask("/health")["reason"]
            )
        daemon.rank(1).next_life(pid)


def test_two_daemons_may_not_count_in_one_state_folder(tmp_path: Path) -> None:
    with Daemon(tmp_path / "a", state={"dir": str(tmp_path)}) as first:
        with pytest.raises(
            DaemonError,
            match=r"ConfigError: rank 0 \(dp 0, pp 0\): a live daemon counts its event stream in .*rank-0\.json",
        ):
            Daemon(tmp_path / "b", state={"dir": str(tmp_path)})
        first.status()


def test_hosts_or_daemons_may_share_it_where_their_ranks_differ(tmp_path: Path) -> None:
    shared: dict[str, Any] = {"state": {"dir": str(tmp_path)}, "dp_size": 2}
    with (
        Daemon(tmp_path / "a", parallel={"dp_ranks": [0]}, **shared) as first,
        Daemon(tmp_path / "b", parallel={"dp_ranks": [1]}, **shared) as second,
    ):
        assert [daemon.info["ranks"][0]["rank"] for daemon in (first, second)] == [0, 1]
        assert second.socket.name == "rank-0.sock-1"
        second.status()


def test_a_second_daemon_of_the_same_sockets_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    with Daemon(tmp_path) as first:
        with pytest.raises(DaemonError, match="ConfigError: a live daemon has"):
            Daemon(tmp_path)
        assert first.said().count(" starts, pid ") == 1
        first.status()


# -- the end ----------------------------------------------------------------------------------------------


def test_a_signal_drains_every_rank(tmp_path: Path) -> None:
    slow = """
import threading
from sglcache.memory.engine import CopyEngine
submit = CopyEngine.submit
CopyEngine.submit = lambda self, *job: threading.Timer(0.3, submit, (self, *job)).start()
"""
    daemon = Daemon(tmp_path, dp_size=2, prelude=slow)
    with daemon.rank(0).client() as one, daemon.rank(1).client() as other:
        for client in (one, other):
            client.acquire(TOKENS).commit()
        pids = [rank.pid for rank in daemon.ranks]
        # As systemd does: the signal goes to every process of the service.
        for pid in (*pids, daemon.process.pid):
            os.kill(pid, signal.SIGTERM)
        assert daemon.process.wait(30) == 0
    for offset in range(2):
        assert f"rank {offset} sglcache.rank: drained" in daemon.said()
        assert not daemon.rank(offset).socket.exists()
    assert "still in flight" not in daemon.said()
    assert not paths.supervisor_path(daemon.socket).exists()


def test_health_says_draining_while_it_drains(tmp_path: Path) -> None:
    hold = "from sglcache.memory.engine import CopyEngine\nCopyEngine.submit = lambda self, *job: None"
    daemon = Daemon(tmp_path, prelude=hold, http={"enabled": True, "port": 0})
    with daemon.client() as client:
        client.acquire(TOKENS).commit()
        daemon.process.send_signal(signal.SIGTERM)
        until(lambda: daemon.ask("/health")["status"] == "draining")
        assert get(daemon, "/health")[0] == 503
        assert daemon.stop(signal.SIGTERM) == 128 + signal.SIGTERM


def test_a_rank_that_hangs_does_not_hold_up_the_end_for_ever(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, dp_size=2, timing={"drain": 0.5})
    os.kill(daemon.rank(1).pid, signal.SIGSTOP)
    assert daemon.stop() == 70
    assert "rank 1 (dp 1, pp 0) has not ended after 0.5 s; it is killed" in daemon.said()
    assert "rank 0 sglcache.rank: drained" in daemon.said()


def test_the_end_does_not_wait_for_a_rank_that_waits(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, dp_size=2, timing={"first_wait": 600.0})
    daemon.rank(1).kill_rank()
    until(lambda: daemon.rank(1).row["state"] == "waiting")
    assert daemon.stop() == 0


def test_systemd_is_told_when_it_serves_and_when_it_stops(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(10)
        with Daemon(tmp_path, dp_size=2, env={"NOTIFY_SOCKET": str(tmp_path / "notify")}) as daemon:
            assert manager.recv(4096) == b"READY=1\nSTATUS=serving 2 ranks"
            for rank in daemon.ranks:
                assert b"NOTIFY_SOCKET" not in Path(f"/proc/{rank.pid}/environ").read_bytes()
        assert manager.recv(4096) == b"STOPPING=1"


# -- endpoints of several ranks ---------------------------------------------------------------------------


def test_an_ipc_endpoint_has_a_path_for_each_rank(tmp_path: Path) -> None:
    events = {"endpoint": f"ipc://{tmp_path}/kv", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    with Daemon(tmp_path, dp_size=2, events=events) as daemon:
        for offset, name in enumerate(("kv", "kv-1")):
            with Listener(f"ipc://{tmp_path}/{name}") as stream:
                assert stream.await_batch()[1].attn_dp_rank == offset
        daemon.rank(1).next_life(daemon.rank(1).kill_rank())  # a dead rank's path is taken over
        epoch = daemon.rank(1).epoch
        assert replayed(f"ipc://{tmp_path}/replay-1", epoch)[0][0] == epoch
        assert daemon.ask()["kv_events"] is None
    assert not [path for path in tmp_path.iterdir() if path.is_socket()], "a stop takes all of them along"


def test_ipv6_serves_routers_and_browsers(tmp_path: Path, ipv6: bool) -> None:
    if not ipv6:
        pytest.skip("this host has no IPv6")
    events = {"endpoint": "tcp://[::1]:0", "replay_endpoint": "tcp://[::1]:0"}
    http = {"enabled": True, "host": "::1", "port": 0}
    with Daemon(tmp_path, dp_size=2, events=events, http=http) as daemon:
        assert get(daemon, "/health")[0] == 200
        for row in daemon.info["ranks"]:
            with Listener(row["stream"]["endpoint"]) as stream:
                assert stream.await_batch()[1].attn_dp_rank == row["rank"]
            assert replayed(row["stream"]["replay_endpoint"], row["epoch"])[0][0] == row["epoch"]
