"""A rank's life: signals, drains, numbers over lives, and the stop that is forced by what nobody expected."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from sglcache.errors import ConfigError, Unavailable
from sglcache.server import rank as ranks
from sglcache.testing.daemon import Daemon, DaemonError, until
from sglcache.wire.events import AllBlocksCleared, decode_batch

pytestmark = pytest.mark.daemons

TOKENS = list(range(64))

HOLD_COPIES = """
from sglcache.memory.engine import CopyEngine
held = []
CopyEngine.submit = lambda self, ticket, *move: held.append(ticket)
"""
SLOW_COPIES = """
import threading
from sglcache.memory.engine import CopyEngine
submit = CopyEngine.submit
CopyEngine.submit = lambda self, *job: threading.Timer(0.2, submit, (self, *job)).start()
"""
BROKEN_PEEK = """
from sglcache.core.index import Index
def peek(self, *arguments):
    raise ZeroDivisionError("planted")
Index.peek = peek
"""
OLD_CLOCK = """
import time
time.time_ns = lambda: 1_000_000_000
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_ends_with_0(folder: Path, number: int) -> None:
    daemon = Daemon(folder)
    client = daemon.client()
    with client.acquire(TOKENS) as lease:
        lease.commit()
    assert daemon.stop(number) == 0
    assert not daemon.socket.exists()
    with pytest.raises(Unavailable):
        client.ping()
    with pytest.raises(Unavailable):
        daemon.client()
    client.close()


def test_a_drain_waits_for_copies_in_flight_and_takes_nobody_new(folder: Path) -> None:
    daemon = Daemon(folder, prelude=SLOW_COPIES)
    with daemon.client() as client:
        client.acquire(TOKENS).commit()
        assert daemon.status()["gauges"]["num_copies"] == 1
        daemon.process.send_signal(signal.SIGTERM)
        until(lambda: not daemon.socket.exists())
        assert daemon.process.poll() is None, "it did not wait"
        with pytest.raises(Unavailable):
            daemon.client()
        assert daemon.stop(0) == 0
    assert "still in flight" not in daemon.said()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(folder: Path, number: int) -> None:
    daemon = Daemon(folder, prelude=HOLD_COPIES)
    with daemon.client() as client:
        client.acquire(TOKENS).commit()
        daemon.process.send_signal(signal.SIGTERM)
        until(lambda: not daemon.socket.exists())
        assert daemon.process.poll() is None
        assert daemon.stop(number) == 128 + number


def test_a_drain_has_an_end(folder: Path) -> None:
    daemon = Daemon(folder, prelude=HOLD_COPIES + "from sglcache.server import rank; rank.DRAIN_S = 0.1")
    with daemon.client() as client:
        client.acquire(TOKENS).commit()
        assert daemon.stop() == 0
    assert "1 copies and 0 stores are still in flight" in daemon.said()


def test_what_nobody_expected_ends_the_rank_and_its_next_life_announces_itself(folder: Path) -> None:
    with Daemon(folder, prelude=BROKEN_PEEK) as daemon:
        client = daemon.client()
        with pytest.raises(Unavailable):
            client.peek(TOKENS)
        client.close()
        life = daemon.next_life(daemon.info["ranks"][0]["pid"])
        assert life["epoch"] > daemon.info["epoch"]
        assert life["restarts"] == 1
        assert life["last_exit"]["status"] == ranks.EXIT_FAILED
        assert life["last_exit"]["why"] == "ended with 70: ZeroDivisionError: planted"
        assert daemon.status(prove=False)["restarts"] == 1
        assert "ZeroDivisionError: planted" in daemon.said()


def test_numbers_rise_over_lives_even_if_the_clock_steps_back(folder: Path) -> None:
    last = 0
    for prelude in ("", OLD_CLOCK, OLD_CLOCK, ""):
        with Daemon(folder, prelude=prelude) as daemon, daemon.client() as client:
            assert daemon.info["epoch"] > last
            with client.acquire(TOKENS) as lease:
                lease.commit()
            until(lambda: client.status()["stream"]["last_seq"] > daemon.info["epoch"])
            last = daemon.status()["stream"]["last_seq"]


def test_a_life_begins_with_all_cleared_and_beats_when_idle(folder: Path) -> None:
    zmq = pytest.importorskip("zmq")
    with Daemon(folder, events={"heartbeat_s": 0.05}) as daemon:
        context = zmq.Context()
        request = context.socket(zmq.DEALER)
        request.connect(daemon.info["stream"]["replay_endpoint"])
        until(lambda: daemon.status()["stream"]["last_seq"] >= daemon.info["epoch"] + 3)
        request.send_multipart([b"", daemon.info["epoch"].to_bytes(8, "big")])
        batches = []
        while (frames := request.recv_multipart())[2] != b"\xff" * 8:
            batches.append((int.from_bytes(frames[2], "big"), decode_batch(frames[3])))
        context.destroy(linger=0)
        assert batches[0][0] == daemon.info["epoch"]
        assert [type(event) for event in batches[0][1].events] == [AllBlocksCleared]
        assert batches[-1][1].events == []


def test_with_events_off_nothing_is_bound_or_told(lend: Callable[..., Daemon]) -> None:
    daemon = lend(events={"enabled": False})
    with daemon.client() as client:
        assert daemon.info["stream"] is None
        assert daemon.info["kv_events"] is None
        with client.acquire(TOKENS) as lease:
            lease.commit()
        assert client.peek(TOKENS).matched_tokens == 64
        assert client.dump("device").hashes == []


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"http": {"enabled": True, "host": "203.0.113.1", "port": 1}}, r"http\.host = 203"),
        ({"events": {"endpoint": "tcp://203.0.113.1:5557"}}, "events.endpoint"),
        ({"control": {"socket": "/proc/nowhere/socket"}}, "control.socket|control socket"),
        ({"state": {"dir": "/proc/nowhere"}}, "state file"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(
    folder: Path, sections: dict[str, dict[str, object]], message: str
) -> None:
    with pytest.raises(DaemonError, match=message):
        Daemon(folder, **sections)


def test_http_tells_the_same_rank(folder: Path) -> None:
    import json
    import urllib.request

    with Daemon(folder, http={"enabled": True, "port": 0}) as daemon:
        url = daemon.info["http"]
        with urllib.request.urlopen(f"{url}/health") as answer:
            assert json.load(answer)["status"] == "ok"
        with urllib.request.urlopen(f"{url}/server_info") as answer:
            info = json.load(answer)
        assert [rank["epoch"] for rank in info["ranks"]] == [daemon.info["epoch"]]
        assert info["kv_events"]["block_size"] == 4
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            assert b'sglcache_pages{rank="0",resource="full",state="free",tier="device"} 256.0' in answer.read()


def test_a_state_file_that_makes_no_sense_is_not_worked_around(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglcache import config

    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    (folder / "sglcache").mkdir()
    state = folder / "sglcache" / "rank-0.json"
    state.write_text("nonsense")
    plain = config.parse({"control": {"socket": str(folder / "socket")}})
    with pytest.raises(ConfigError):
        ranks._numbers(plain, folder / "socket", 0, 0)
    state.unlink()
    held = ranks._numbers(plain, folder / "socket", 0, 0)
    assert held.path == state
    with pytest.raises(ConfigError, match="a live daemon"):  # nor is another daemon's
        ranks._numbers(plain, folder / "socket", 0, 0)
    held.close()
    # A folder that can't be written is: a container's home mostly isn't there.
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    beside = ranks._numbers(plain, folder / "socket", 0, 7)
    assert beside.path == folder / "rank-0.json"
    assert beside.first > 7
    beside.close()
