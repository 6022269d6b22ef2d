"""What one client may take of a rank, through real sockets: waits with deadlines, pipelines, answers that are read."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglcache.client import Client, Lease
from sglcache.errors import BadRequest, Busy, Cancelled, NoSpace, ProtocolError, SessionEnded, TooSlow
from sglcache.testing.daemon import Daemon, until
from sglcache.wire import control

pytestmark = pytest.mark.survive

P = 4
PAGES = 32
LIMITS: dict[str, Any] = {
    "max_waiting": 4,
    "max_waiting_per_session": 3,
    "max_connections": 12,
    "max_sessions": 6,
    "max_leases_per_session": 20,
    "max_pipelined": 256,
    "slow_reader_s": 0.3,
    "max_wait_s": 20.0,
    "max_events": 8192,
    "max_pin_ttl_s": 60.0,
}


@pytest.fixture
def small(lend: Callable[..., Daemon]) -> Daemon:
    return lend(pool={"num_tokens": P * PAGES}, host={"num_tokens": 0}, limits=LIMITS)


@pytest.fixture
def client(small: Daemon) -> Iterator[Client]:
    with small.client() as client:
        yield client


def prompt(number: int, num_pages: int) -> range:
    return range(1000 * number, 1000 * number + P * num_pages)


def flood(client: Client, commands: list[control.Frame]) -> None:
    """Send, and read nothing."""
    sock = client._connection._sock
    sock.settimeout(0.05)
    data = b"".join(map(control.frame, commands))
    with contextlib.suppress(TimeoutError):
        sock.sendall(data)
    sock.settimeout(None)


# -- waiting for room ----------------------------------------------------------------------------------------------


def test_an_acquire_waits_for_room_and_gets_it(small: Daemon, client: Client) -> None:
    held = client.acquire(prompt(1, 30))
    with small.client() as other:
        waits = other.acquire_begin(prompt(2, 10), wait_s=10)
        assert other.peek(prompt(1, 30)).matched_tokens == 0, "others' commands go on"
        assert not waits.done
        held.release()
        with waits.wait() as lease:
            assert len(lease.slots) == 10


def test_a_deadline_is_kept_and_says_who_holds_what(small: Daemon, client: Client) -> None:
    with client.acquire(prompt(1, 30)), small.client() as other:
        began = time.monotonic()
        with pytest.raises(NoSpace) as refused:
            other.acquire(prompt(2, 10), wait_s=0.1)
        took = time.monotonic() - began
    error = refused.value
    assert 0.1 <= took < 2.0
    assert error.waited_s >= 0.1
    assert (error.need, error.free, error.leased, error.place, error.waiting) == (10, 2, 30, 1, 0)
    assert [(each["leases"], each["pages"]) for each in error.holders] == [(1, 30)]


def test_without_a_wait_it_is_refused_at_once_as_configured(client: Client) -> None:
    with client.acquire(prompt(1, 30)), pytest.raises(NoSpace) as refused:
        client.acquire(prompt(2, 10))
    assert "waited_s" not in refused.value.facts


def test_a_wait_can_be_cancelled(client: Client) -> None:
    with client.acquire(prompt(1, 30)) as held:
        waits = client.acquire_begin(prompt(2, 10), wait_s=10)
        waits.cancel()
        with pytest.raises(Cancelled):
            waits.wait()
        done = client.acquire_begin(prompt(1, 1))
        done.cancel()
        done.wait().cancel()
        with client.acquire(prompt(4, 1)):
            growing = held.extend_begin(reserve=P * 2, wait_s=10)
            growing.cancel()
            with pytest.raises(Cancelled):
                growing.wait()
        held.extend(reserve=P * 2)


def test_an_extend_waits_for_room_for_all_of_its_batch(small: Daemon, client: Client) -> None:
    with small.client() as other:
        held = other.acquire(prompt(1, 28))
        leases = [client.acquire(prompt(number, 1)) for number in (2, 3)]
        batch: list[tuple[Lease, Any, int]] = [(lease, (), 2 * P) for lease in leases]
        waits = client.extend_begin(batch, wait_s=10)
        assert not waits.done
        held.release()
        assert waits.wait() == [None, None]
        again = other.acquire(prompt(4, 24))
        first, second = client.extend([(lease, (), 4 * P) for lease in leases], wait_s=0.05)
        assert first is None, "each for itself, once it is late"
        assert isinstance(second, NoSpace)
        again.release()


def test_what_waits_beyond_the_bounds_is_busy_at_once(small: Daemon, client: Client) -> None:
    with client.acquire(prompt(1, 32)):
        waits = [client.acquire_begin(prompt(number, 1), wait_s=10) for number in (2, 3, 4)]
        with pytest.raises(Busy) as mine:
            client.acquire(prompt(5, 1), wait_s=10)
        assert mine.value.waiting_of_session == 3
        with small.client() as other, small.client() as third:
            last = other.acquire_begin(prompt(6, 1), wait_s=10)
            with pytest.raises(Busy) as all_:
                third.acquire(prompt(7, 1), wait_s=10)
            assert (all_.value.waiting, all_.value.max_waiting) == (4, 4)
            last.cancel()
            with pytest.raises(Cancelled):
                last.wait()
        for each in waits:
            each.cancel()
            with pytest.raises(Cancelled):
                each.wait()


def test_who_waits_and_dies_is_out_of_line(small: Daemon, client: Client) -> None:
    with client.acquire(prompt(1, 32)) as held:
        dead, other = small.client(), small.client()
        dead.acquire_begin(prompt(2, 32), wait_s=10)
        until(lambda: small.status(prove=False)["gauges"]["num_waiting"] == 1)
        waits = other.acquire_begin(prompt(3, 32), wait_s=10)
        dead._let_go("gone, without a word")
        until(lambda: small.status(prove=False)["gauges"]["num_waiting"] == 1)
        held.release()
        waits.wait().release()
        other.close()


# -- how many -------------------------------------------------------------------------------------------------------


def test_leases_sessions_connections_and_events_are_counted(small: Daemon, client: Client) -> None:
    leases = [client.acquire(prompt(number, 1)) for number in range(20)]
    with pytest.raises(Busy) as refused:
        client.acquire(prompt(99, 1))
    assert refused.value.max_leases == 20
    for lease in leases:
        lease.release()
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(small.client())
        with pytest.raises(Busy, match="max_sessions"):
            small.client()
        for _ in range(6):
            stack.enter_context(small.observer())
        with pytest.raises(Busy, match=f"pid {os.getpid()} has 12") as full, small.observer():
            pass
        assert full.value.max_connections == 12
        assert full.value.holders == [{"pid": os.getpid(), "connections": 12}]
        # An operator's process, which has none, has a place.
        command = [sys.executable, "-m", "sglcache", "ping", "--socket", str(small.socket)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)


def test_a_pin_lasts_no_longer_and_keeps_no_more_than_is_given(client: Client) -> None:
    with client.acquire(prompt(1, 20)) as lease:
        lease.commit()
    with pytest.raises(BadRequest, match="max_pin_ttl_s"):
        client.pin(prompt(1, 1), "me", 61)
    with pytest.raises(NoSpace) as refused:
        client.pin(prompt(1, 20), "me", 10)
    assert (refused.value.need, refused.value.pinned, refused.value.max_pinned) == (20, 0, 16)
    assert client.pin(prompt(1, 16), "me", 10) == 16 * P
    client.unpin("me")


# -- pipelines, and who does not read ------------------------------------------------------------------------------


def test_a_pipeline_without_end_is_not_read_beyond_its_bound_and_all_of_it_is_answered(
    small: Daemon, client: Client
) -> None:
    """Its answers wait for an event; meanwhile 20,000 commands are sent."""
    lease = client.acquire(prompt(1, 1))
    ring = client._ring
    assert ring is not None
    event, generation = ring.reserve()
    last = 3000
    commands: list[control.Frame] = [
        control.Commit(number, lease.id, number, 0, None, event, generation) for number in range(1000, last)
    ]
    thread = threading.Thread(target=client._connection._sock.sendall, args=(b"".join(map(control.frame, commands)),))
    client._ticket = last
    thread.start()
    with small.observer() as other:
        until(lambda: _unanswered(other) >= 256)
        for _ in range(20):
            assert _unanswered(other) <= 256
        assert small.status()["gauges"]["num_leases"] == 1
    ring.complete(event, generation)
    with client._connection.lock:
        for number in range(1000, last):
            client._connection.wait(number)
    thread.join()
    lease.release()


def _unanswered(observer: Client) -> int:
    return max(each["unanswered"] for session in observer.status()["sessions"] for each in session["members"])


def test_a_client_that_never_reads_is_thrown_out_and_nobody_else_waits(small: Daemon, client: Client) -> None:
    rude = small.client()
    rude._connection._request = 4000  # what it asks later is not what it floods with
    before = small.status(prove=False)["counters"]["slow_readers"]
    flood(rude, [control.Status(number) for number in range(1, 4000)])
    slowest = 0.0
    deadline = time.monotonic() + 20
    while small.status(prove=False)["counters"]["slow_readers"] == before:
        began = time.perf_counter()
        client.ping()
        slowest = max(slowest, time.perf_counter() - began)
        assert time.monotonic() < deadline, "it was not thrown out"
    assert slowest < 1.0
    with pytest.raises(TooSlow, match="has read nothing for") as told:
        rude.ping()
    assert told.value.unsent_bytes > 0
    rude._let_go("thrown out")


def test_it_is_thrown_out_when_the_time_is_over_and_not_twice_as_late(lend: Callable[..., Daemon]) -> None:
    slow_reader_s = 1.0
    daemon = lend(pool={"num_tokens": P * PAGES}, host={"num_tokens": 0}, limits={"slow_reader_s": slow_reader_s})
    with daemon.observer() as other:
        rude = daemon.client()
        rude._connection._request = 4000
        began = time.monotonic()
        flood(rude, [control.Status(number) for number in range(1, 4000)])
        until(lambda: other.status(prove=False)["counters"]["slow_readers"] == 1)
        assert slow_reader_s <= time.monotonic() - began < 1.6 * slow_reader_s  # the flood takes its time, too
        with pytest.raises(TooSlow):
            rude.ping()
        rude._let_go("thrown out")


def test_who_was_thrown_out_for_what_is_no_frame_is_told_so(small: Daemon) -> None:
    rude = small.client()
    rude._connection._sock.sendall(b"\0\0\0\4nope")
    with pytest.raises(ProtocolError, match="no command"):
        rude.ping()
    rude._let_go("thrown out")


def test_a_connection_that_ends_without_a_word_is_no_death_of_a_daemon_that_serves_on(small: Daemon) -> None:
    lost = small.client()
    lost._connection._sock.shutdown(socket.SHUT_RDWR)
    with pytest.raises(SessionEnded, match="its log says why; reattach") as told:
        lost.ping()
    assert told.value.epoch == lost.epoch
    lost.reattach()
    lost.ping()
    lost.close()


def test_ten_thousand_frames_of_one_hold_off_a_single_one_of_another_for_milliseconds(
    small: Daemon, client: Client
) -> None:
    with small.client() as other:
        client.ping()
        other.ping()
        first = other._connection._request + 1
        peeks = [control.Peek(number, bytes(64)) for number in range(first, first + 10_000)]
        data = b"".join(map(control.frame, peeks))
        sender = threading.Thread(target=other._connection._sock.sendall, args=(data,))
        sender.start()
        waits = []
        for _ in range(50):
            began = time.perf_counter()
            client.ping()
            waits.append(time.perf_counter() - began)
        sender.join()
        waits.sort()
        assert waits[len(waits) // 2] < 0.05
        with other._connection.lock:
            for peek in peeks:
                other._connection.wait(peek.request)
        other._connection._request = peeks[-1].request


# -- expensive commands -----------------------------------------------------------------------------------------------


def test_of_expensive_commands_one_of_a_kind_is_under_way_for_a_connection(small: Daemon, client: Client) -> None:
    flood(client, [control.Status(1001, True), control.Status(1002, True), control.Dump(1003, "DEVICE")])
    with client._connection.lock:
        with pytest.raises(Busy) as refused:
            client._connection.wait(1002)
        first = client._connection.wait(1001)
        client._connection.wait(1003)
    assert refused.value.what == "proof"
    assert isinstance(first, control.Done)
    assert first.facts["violations"] == []
    assert client.status(prove=True)["violations"] == []


def test_who_leaves_in_the_midst_of_a_proof_leaves_nothing_under_way(small: Daemon, tmp_path: Path) -> None:
    for _ in range(12):
        rude = small.client(role="observer")
        flood(rude, [control.Status(1, True)])
        rude._let_go("gone")
    until(lambda: not small.status(prove=True)["violations"])
