"""What is stuck is seen: in /health with its age, in status, metrics and the log; and it stalls nobody else."""

from __future__ import annotations

import os
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglcache.client import Client
from sglcache.core.index import Index, IndexConfig
from sglcache.errors import NoSpace
from sglcache.server import metrics
from sglcache.server.watch import WORDS, Stalls, in_words
from sglcache.testing import copies
from sglcache.testing.daemon import Daemon, Puppet, until
from sglcache.wire import control

pytestmark = pytest.mark.survive
P = 4
PAGES = 32
FAST = dict.fromkeys(("copy_s", "event_s", "room_s", "fenced_s", "answer_s", "stream_s", "reader_s", "numbers_s"), 0.3)
SOON_OVER = """
from sglcache.server import watch
watch.STALL_TOLD_S = 1.0
"""

STUCK = """
import os
from sglcache.net.publisher import Publisher
send = Publisher._send_live
Publisher._send_live = lambda self, entry: not os.path.exists({path!r}) and send(self, entry)
from sglcache.errors import ConfigError
from sglcache.server.numbers import Numbers
reserve = Numbers.reserve
Numbers.low = lambda self, seq: True
def refused(self, seq):
    if os.path.exists({path!r} + ".numbers"):
        raise ConfigError("planted")
    return reserve(self, seq)
Numbers.reserve = refused
"""


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("watch") / "gate"


@pytest.fixture(scope="module")
def slow(gate: Path) -> Iterator[Daemon]:
    """32 pages; copies to the host wait for `gate`, and the stream while there is `stream`."""
    with Daemon(
        gate.parent / "daemon",
        prelude=copies.gate(gate, "backup") + SOON_OVER + STUCK.format(path=str(gate.with_name("stream"))),
        timing={"beat": 0.05},
        pool={"num_tokens": P * PAGES},
        host={"num_tokens": P * 64},
        http={"enabled": True, "port": 0},
        limits={"copy_wait_s": 0.2},
        watch={**FAST, "loop_stall_s": 0.5},
    ) as daemon:
        yield daemon


@pytest.fixture
def daemon(slow: Daemon, gate: Path) -> Iterator[Daemon]:
    gate.touch()
    until(lambda: slow.ask("/health")["status"] == "ok")
    yield slow
    gate.touch()


def prompt(number: int, num_pages: int) -> range:
    return range(1000 * number, 1000 * number + P * num_pages)


def put(client: Client, number: int, num_pages: int) -> None:
    with client.acquire(prompt(number, num_pages)) as lease:
        lease.commit()


def troubles(daemon: Daemon) -> dict[str, dict[str, Any]]:
    return {each["what"]: each for each in daemon.ask("/health")["ranks"][0].get("troubles", ())}


def degraded(daemon: Daemon, what: str) -> dict[str, Any]:
    """Wait until /health says so; the trouble."""
    until(lambda: what in troubles(daemon))
    health = daemon.ask("/health")
    assert health["status"] == "degraded"
    assert health["serving"]
    assert WORDS[what] in health["reason"]
    return troubles(daemon)[what]


def well(daemon: Daemon, what: str) -> None:
    """Wait until it is over, and the log has said both, once."""
    until(lambda: daemon.ask("/health")["status"] == "ok")
    said = daemon.said()
    assert said.count(f"sglcache.watch: {WORDS[what]} for ") >= 1
    assert said.count(": " + WORDS[what] + "\n") == said.count(f"sglcache.watch: {WORDS[what]} for ")


def test_a_stuck_copy_makes_health_degraded_and_holds_up_who_needs_its_room_alone(daemon: Daemon, gate: Path) -> None:
    gate.unlink()
    with daemon.client() as client, daemon.client() as other:
        put(client, 1, 20)
        trouble = degraded(daemon, "backup")
        assert trouble["age_s"] > 0.3
        assert trouble["facts"] == {"in_flight": 1}
        with pytest.raises(NoSpace) as waited:
            client.acquire(prompt(2, 16))
        assert waited.value.waited_s >= 0.2
        assert waited.value.in_copies == 20
        with pytest.raises(NoSpace) as at_once:
            client.acquire(prompt(2, 16))
        assert "waited_s" not in at_once.value.facts
        assert at_once.value.copy == waited.value.copy
        for number in range(3, 10):
            other.acquire(prompt(number, 2)).cancel()  # all else goes on
        with urllib.request.urlopen(daemon.info["http"] + "/health", timeout=5) as page:
            assert page.status == 200, "it serves"
        with urllib.request.urlopen(daemon.info["http"] + "/metrics", timeout=5) as page:
            text = page.read().decode()
        assert 'sglcache_trouble{rank="0",what="backup"} 1.0' in text
        age = next(
            line
            for line in text.splitlines()
            if line.startswith("sglcache_oldest_in_flight_seconds") and "backup" in line
        )
        assert float(age.rpartition(" ")[2]) > 0.3
        assert 'sglcache_loop_stall_seconds_bucket{le="0.001",rank="0"}' in text
        assert any(each["what"] == "backup" for each in client.status()["troubles"])
        gate.touch()
        daemon.settle()
        put(client, 2, 16)
    well(daemon, "backup")


def test_an_event_that_is_never_done_is_seen_with_its_session(daemon: Daemon) -> None:
    with daemon.client() as client:
        lease = client.acquire(prompt(1, 2))
        ring = client._ring
        assert ring is not None
        event, generation = ring.reserve()
        with client._connection.lock:
            client._ticket += 1
            lease_id = lease.id
            client._connection.send(control.Commit(99, lease_id, client._ticket, 0, None, event, generation))
            client._connection.ignore(99)
        trouble = degraded(daemon, "event")
        assert trouble["facts"]["ticket"] == client._ticket
        assert "answer" in troubles(daemon)
        ring.complete(event, generation)
        client.ping()
        lease.release()
    well(daemon, "event")


def test_who_waits_for_room_is_seen_and_that_every_lease_waits(daemon: Daemon) -> None:
    with daemon.client() as client:
        leases = [client.acquire(prompt(number, 16)) for number in (1, 2)]
        waits = [lease.extend_begin(reserve=P, wait_s=60) for lease in leases]
        trouble = degraded(daemon, "room")
        assert trouble["facts"] == {"waiting": 2, "every_lease_waits": 2}
        for each in waits:
            each.cancel()
        for lease in leases:
            lease.abort()
    well(daemon, "room")


def test_pages_that_stay_fenced_are_seen(daemon: Daemon) -> None:
    """The socket of a runner is at its end, and its process lives."""
    with Puppet(daemon.socket) as puppet:
        puppet.do("client = Client(socket); lease = client.acquire(list(range(12))); client._connection._sock.close()")
        trouble = degraded(daemon, "fenced")
        assert trouble["facts"]["leases"] == 1
        (session,) = [each["session"] for each in daemon.status()["sessions"] if each["ended"]]
        assert trouble["facts"]["session"] == session
    well(daemon, "fenced")


def test_a_stream_that_does_not_leave_is_seen(daemon: Daemon, gate: Path) -> None:
    flag = gate.with_name("stream")
    flag.touch()
    with daemon.client() as client:
        put(client, 1, 2)
        assert degraded(daemon, "stream")["facts"]["behind"] > 0
        flag.unlink()
        until(lambda: "stream" not in troubles(daemon))


def test_numbers_that_cannot_be_reserved_are_seen(daemon: Daemon, gate: Path) -> None:
    flag = gate.with_name("stream.numbers")
    flag.touch()
    with daemon.client() as client:
        put(client, 1, 2)
        assert degraded(daemon, "numbers")["facts"]["why"] == "planted"
        flag.unlink()
        put(client, 2, 2)
        until(lambda: "numbers" not in troubles(daemon))


def test_a_loop_that_stands_still_is_told_of_after_it(daemon: Daemon) -> None:
    pid = daemon.pid
    os.kill(pid, signal.SIGSTOP)
    until(lambda: daemon.ask("/health")["ranks"][0]["state"] == "stuck")
    os.kill(pid, signal.SIGCONT)
    assert degraded(daemon, "loop")["age_s"] > 0.5
    with daemon.observer() as client:
        assert client.status()["loop"]["longest_s"] > 0.5
    well(daemon, "loop")


def test_every_kind_of_trouble_has_words_and_a_page_of_metrics_has_them() -> None:
    assert in_words("backup", 12.34, {"in_flight": 2}) == "a copy to the host is in flight for 12.3 s (in_flight 2)"

    class Loop:
        """Time that a test makes."""

        now = 0.0
        due: Callable[[], None]

        def time(self) -> float:
            return self.now

        def call_at(self, when: float, call: Callable[[], None]) -> None:
            self.due = call

    loop = Loop()
    stalls = Stalls(loop, 0.5)  # type: ignore[arg-type]
    stalls.start()
    for late in (0.0, 0.004, 0.7):
        loop.now = stalls._due + late
        loop.due()
    facts = stalls.facts()
    assert sum(facts["counts"]) == 3
    assert facts["longest_s"] == pytest.approx(0.7)
    assert stalls.last == (loop.now, pytest.approx(0.7))
    stats, observed = (
        Index(IndexConfig(page_size=4, num_pages=8)).stats(),
        {"stalls": [({}, stalls.histogram.observed())]},
    )
    told = metrics.of_rank(
        0, stats, None, {}, oldest=dict.fromkeys(WORDS, 0.0), troubles=["load"], longest_stall_s=0.7, observed=observed
    )
    text = metrics.page([told]).decode()
    assert 'sglcache_loop_stall_seconds_bucket{le="0.005",rank="0"} 2.0' in text
    assert 'sglcache_loop_stall_seconds_count{rank="0"} 3.0' in text
    assert 'sglcache_trouble{rank="0",what="load"} 1.0' in text
