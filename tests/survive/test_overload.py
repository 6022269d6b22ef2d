"""What is stuck, pinned, cleared or flooded while others work: they go on, and every byte is right.

The names (A05, ...) are those of the collection of reported faults that the cases were written from; their quiet forms
are in tests/core and tests/server.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from load import P, Work, check, prompt, put

from sglcache.bench import faults
from sglcache.client import Client
from sglcache.client.mirror import Mirror
from sglcache.errors import Busy, NoSpace
from sglcache.testing import copies
from sglcache.testing.daemon import Daemon, Puppet, until
from sglcache.wire import control

pytestmark = pytest.mark.survive

MEDIA = {"DEVICE": "GPU", "HOST": "CPU_PINNED"}
PROMPT_S = 2.0  # what a request may take on a machine that others use, too, while nothing concerns it

# The publisher's socket takes nothing while a file is there.
STUCK_STREAM = """
import os
from sglcache.net.publisher import Publisher
send = Publisher._send_live
Publisher._send_live = lambda self, entry: not os.path.exists({path!r}) and send(self, entry)
"""

# The store's disk does not answer while a file is there.
STUCK_DISK = """
import os, time
from sglcache.storage.file import FileStore
def hold(name):
    real = getattr(FileStore, name)
    def held(self, *arguments):
        while os.path.exists({path!r}):
            time.sleep(0.005)
        return real(self, *arguments)
    setattr(FileStore, name, held)
hold("put"), hold("get")
"""


def exact(daemon: Daemon, mirror: Mirror) -> bool:
    with daemon.observer() as observer:
        assert mirror.catch_up(observer.digest()["seq"], 20.0)
        return all(mirror.hashes(medium) == set(observer.dump(tier).hashes) for tier, medium in MEDIA.items())


def health(daemon: Daemon) -> dict[str, dict[str, Any]]:
    page = daemon.ask("/health")
    troubles = {each["what"]: each for each in page["ranks"][0].get("troubles", ())}
    assert (page["status"] == "ok") is not bool(troubles), page
    return troubles


# -- A05 ------------------------------------------------------------------------------------------------------------


def test_a05_a_subscriber_that_never_reads_and_a_stuck_publisher_delay_nobody(tmp_path: Path) -> None:
    flag = tmp_path / "stuck"
    daemon = Daemon(
        tmp_path / "daemon",
        events={"ring_size": "64 KiB", "hwm": 4},
        timing={"beat": 0.05},
        watch={"stream_s": 0.2},
        prelude=STUCK_STREAM.format(path=str(flag)),
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    deaf = context.socket(zmq.SUB)
    deaf.setsockopt(zmq.RCVHWM, 1)
    deaf.subscribe("")
    stream = daemon.status()["stream"]
    deaf.connect(stream["endpoint"])
    client = daemon.client()
    with Work(daemon.socket) as work, Mirror(stream["endpoint"], stream["replay_endpoint"]) as mirror:
        before = _slowest_of(client, 100, 2000)
        flag.touch()
        stuck = _slowest_of(client, 1000, 10_000)
        assert "stream" in health(daemon), "it is seen"
        assert client.status()["stream"]["batches_skipped"] > 0, "and what is lost is counted"
        flag.unlink()
        until(lambda: "stream" not in health(daemon))
        work._over.set()
        until(lambda: daemon.status(prove=False)["gauges"]["num_leases"] == 0)
        daemon.settle()
        until(lambda: exact(daemon, mirror))
        assert mirror.replays > 1
        assert stuck < before * 5 + 0.2, f"99 of 100 requests took {stuck:.4f} s; before {before:.4f}"
    assert work.slowest_s < PROMPT_S
    flag.touch()
    _slowest_of(client, 300, 30_000)
    client.close()
    began = time.monotonic()
    assert daemon.stop() == 0, daemon.said()
    assert time.monotonic() - began < 10.0
    context.destroy(linger=0)


def _slowest_of(client: Client, count: int, first: int) -> float:
    """What 99 of 100 puts of one page took at most."""
    took = []
    for number in range(first, first + count):
        began = time.perf_counter()
        put(client, number, 1, wait_s=5.0)
        took.append(time.perf_counter() - began)
    return sorted(took)[count * 99 // 100]


# -- A08 ------------------------------------------------------------------------------------------------------------


def test_a08_no_pin_outlives_its_request_while_others_work(tmp_path: Path) -> None:
    with Daemon(tmp_path, pool={"num_tokens": P * 64}, host={"num_tokens": P * 16}) as daemon:
        keeper, one = daemon.client(), daemon.client()
        with Work(daemon.socket) as work:
            for number in range(100):
                put(one, 1, 4, wait_s=5.0)
                # Of what is in neither tier by now nothing is pinned, and that is no error.
                pinned = keeper.pin(prompt(1, 4), f"other {number}", 60)
                if number % 10 == 9:
                    with Puppet(daemon.socket) as puppet:
                        puppet.do(f"client = Client(socket); client.pin(list(range(1000, 1016)), 'r{number}', 60)")
                        os.close(puppet.kill())
                else:
                    mine = one.pin(prompt(1, 4), f"r{number}", 60)
                    assert (one.unpin(f"r{number}") > 0) is (mine > 0)
                    if number % 2:
                        assert one.unpin(f"r{number}") == 0, "a second end is nothing"
                until(lambda kept=pinned // P: one.status()["gauges"]["pinned_pages"] == kept)  # type: ignore[misc]
                assert keeper.unpin(f"other {number}") == pinned // P
                assert one.status()["gauges"]["pinned_pages"] == 0
        assert work.slowest_s < PROMPT_S
        daemon.settle()
        put(one, 9, 16)
        daemon.settle()
        told = one.peek(prompt(9, 16))
        assert told.matched_tokens == 16 * P
        with one.acquire(range(50_000, 50_000 + P * 64)) as crowd:
            crowd.release()
        assert one.peek(prompt(9, 16))[:2] == (0, 16 * P), "all of the new ones are on the host"
        keeper.close()
        one.close()


# -- A10 ------------------------------------------------------------------------------------------------------------


def test_a10_host_pages_that_a_load_reads_stay_while_others_need_all_of_them(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with Daemon(
        tmp_path / "daemon",
        prelude=copies.gate(gate, "load"),
        pool={"num_tokens": P * 16},
        host={"num_tokens": P * 8},
    ) as daemon:
        with daemon.client() as client:
            put(client, 1, 4)
            daemon.settle()
            client.acquire(prompt(2, 16)).cancel()
            assert client.peek(prompt(1, 4))[:2] == (0, 4 * P)
            lease = client.acquire(prompt(1, 4))
            assert lease.host_tokens == 4 * P
            # Of so many that none comes again: a hit on the host would wait for the same gate, and so would its client.
            with Work(daemon.socket, clients=3, prompts=1_000_000) as work:
                until(lambda: sum(work.done) > 300)
                assert daemon.pool("HOST")["locked"] >= 4
                assert daemon.status(prove=False)["counters"]["backup_pages"] > 8
                gate.touch()
                check(client, lease, 1)
                lease.release()
                until(lambda: sum(work.done) > 400)
            assert work.slowest_s < 6.0
        daemon.settle()
        assert daemon.pool("HOST")["locked"] == 0


# -- A22 ------------------------------------------------------------------------------------------------------------


def test_a22_a_clear_does_all_or_nothing_whatever_goes_on(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    with Daemon(tmp_path / "daemon", prelude=copies.gate(gate, "backup")) as daemon:
        stream = daemon.status()["stream"]
        with daemon.client() as client, Mirror(stream["endpoint"], stream["replay_endpoint"]) as mirror:
            put(client, 1, 4)
            daemon.settle()
            lease = client.acquire(prompt(1, 2))
            gate.unlink()
            put(client, 2, 2)
            with Work(daemon.socket) as work:
                until(lambda: sum(work.done) > 50)
                for _ in range(50):
                    with pytest.raises(Busy) as busy:
                        client.clear()
                    assert busy.value.leases >= 1
                    assert busy.value.copies >= 1
                    assert busy.value.locked_pages["DEVICE"] >= 4
                    assert client.peek(prompt(1, 4)).matched_tokens == 4 * P, "nothing was cleared"
                lease.release()
                gate.touch()
                cleared, held = 0, [1]
                deadline = time.monotonic() + 3
                while not cleared and time.monotonic() < deadline:
                    try:
                        cleared = sum(client.clear().values())
                    except Busy as still:
                        held.append(still.leases + still.copies + still.pinned_pages + still.fenced_pages)
                assert min(held) > 0, "what refuses says what holds it"
                until(lambda: sum(work.done) > 100)
            assert work.slowest_s < PROMPT_S
            daemon.settle()
            assert sum(client.clear().values()) > 0
            until(lambda: daemon.pool()["free"] == daemon.pool()["total"])
            assert daemon.pool("HOST")["free"] == daemon.pool("HOST")["total"]
            assert client.peek(prompt(1, 4)).matched_tokens == 0
            assert exact(daemon, mirror)


# -- a third tier that hangs ------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Daemon, Path]]:
    flag = tmp_path / "hangs"
    with Daemon(
        tmp_path / "daemon",
        prelude=STUCK_DISK.format(path=str(flag)),
        timing={"beat": 0.05},
        storage={
            "kind": "file",
            "path": str(tmp_path / "l3"),
            "prefetch_threshold": 4,
            "prefetch_policy": "wait_complete",
        },
        limits={"max_wait_s": 1.0},
        watch={"storage_s": 0.3},
        pool={"num_tokens": P * 64},
        host={"num_tokens": P * 64},
    ) as daemon:
        yield daemon, flag
        flag.unlink(missing_ok=True)


def test_a_disk_that_hangs_holds_up_nobody_beyond_a_deadline_and_is_seen(disk: tuple[Daemon, Path]) -> None:
    daemon, flag = disk
    with daemon.client() as client:
        put(client, 1, 8)
        until(lambda: daemon.status(prove=False)["third"]["num_pages"] == 8)
        client.acquire(prompt(3, 64)).cancel()
        until(lambda: _cleared(client, "HOST"))
        assert client.peek(prompt(1, 8)).matched_tokens == 0
        flag.touch()
        with Work(daemon.socket, prompts=30) as work:
            began = time.monotonic()
            client.acquire(prompt(1, 8), wait_s=5).release()
            assert 0.9 < time.monotonic() - began < 4.0, "wait_complete has a deadline, too"
            until(lambda: {"fetch", "store"} <= set(health(daemon)))
            until(lambda: sum(work.done) > 200)
            flag.unlink()
            until(lambda: not health(daemon), 20.0)
        assert work.slowest_s < 4.0
        daemon.settle(30.0)


def _cleared(client: Client, tier: str) -> bool:
    try:
        client.clear(tier)
    except Busy:
        return False
    return True


# -- floods ------------------------------------------------------------------------------------------------------------


def test_a_flood_of_frames_and_a_thousand_connections_hold_up_nobody(tmp_path: Path) -> None:
    with Daemon(tmp_path, limits={"slow_reader_s": 1.0, "max_connections": 300}) as daemon:
        with Work(daemon.socket) as work:
            rude = [daemon.client(role="observer") for _ in range(4)]
            data = b"".join(control.frame(control.Status(number)) for number in range(1, 20_000))
            senders = [threading.Thread(target=_send, args=(each, data)) for each in rude]
            for sender in senders:
                sender.start()
            crowd: list[Client] = []
            for _ in range(1000):
                with contextlib.suppress(Busy):
                    crowd.append(daemon.client(role="observer"))
            assert 250 < len(crowd) < 300
            for each in crowd:
                each.close()
            until(lambda: sum(work.done) > 100)
            for sender in senders:
                sender.join()
            for each in rude:
                each._let_go("over")
        assert work.slowest_s < 2 * PROMPT_S
        daemon.settle()


def _send(client: Client, data: bytes) -> None:
    """And read nothing, until it is thrown out."""
    with contextlib.suppress(OSError):
        client._connection._sock.sendall(data)


def test_the_benchmark_of_faults_has_a_figure_for_each() -> None:
    names = ("runner-killed", "connections", "flood")
    row = faults.run(faults.Options(pages=2000, connections=20, frames=500, faults=names))
    assert set(row["faults"]) == set(names)
    for each in row["faults"].values():
        assert 0 < each["ping_p50_ms"] <= each["ping_max_ms"] < 5000
        assert 0 < each["longest_stall_ms"] < 5000


# -- room ---------------------------------------------------------------------------------------------------------


def test_many_clients_that_want_more_than_there_is_all_get_on_and_in_turns(tmp_path: Path) -> None:
    """Eight clients with prompts of a third of the pool each, and one that wants nearly all of it."""
    with Daemon(tmp_path, pool={"num_tokens": P * 48}, host={"num_tokens": P * 48}) as daemon:
        with Work(daemon.socket, clients=8, prompts=24, num_pages=16) as work, daemon.client() as large:
            for number in range(5):
                put(large, 100 + number, 46, wait_s=30.0)
            done = list(work.done)
            until(lambda: all(now > before for now, before in zip(work.done, done, strict=True)))
        assert work.refused == 0, "everybody's turn comes well within its deadline"
        daemon.settle()


def test_a_client_that_is_stopped_in_line_and_killed_holds_up_nobody(tmp_path: Path) -> None:
    with (
        Daemon(tmp_path, pool={"num_tokens": P * 32}, host={"num_tokens": 0}) as daemon,
        daemon.client() as client,
        Puppet(daemon.socket) as puppet,
    ):
        held = client.acquire(prompt(1, 30))
        puppet.do("client = Client(socket); waits = client.acquire_begin(list(range(120)), wait_s=60)")
        until(lambda: daemon.status(prove=False)["gauges"]["num_waiting"] == 1)  # it was only sent
        os.kill(puppet.pid, signal.SIGSTOP)
        with pytest.raises(NoSpace):
            client.acquire(prompt(2, 2), wait_s=0.1)
        held.release()
        until(lambda: daemon.pool()["leased"] == 30)
        with pytest.raises(NoSpace) as refused:
            client.acquire(prompt(2, 4), wait_s=0.1)
        assert refused.value.holders[0]["pages"] == 30
        os.close(puppet.kill())
        client.acquire(prompt(2, 4), wait_s=10).release()
