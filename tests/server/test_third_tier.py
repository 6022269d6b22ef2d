"""The third tier through a real daemon: what was computed is found again after everything above it has gone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from below import ONE, check, daemon_over, drop, files, forget, idle, put, right, stored, third_of, write

from sglcache.errors import BadRequest, Busy, SessionEnded, StorageError
from sglcache.testing.copies import Gate
from sglcache.testing.daemon import Daemon, Puppet, until

pytestmark = pytest.mark.daemons

LONG = 60.0


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with daemon_over(tmp_path) as daemon:
        yield daemon


def test_what_left_both_tiers_above_comes_back_byte_for_byte(daemon: Daemon) -> None:
    with daemon.client() as client:
        put(client, ONE, 7)
        stored(daemon, 16)
        forget(client)
        check(client, ONE, 7, 64)
        third = third_of(daemon)
        assert (third["fetched_pages"], third["misses"]) == (16, {})
        check(client, ONE, 7, 64)  # it is above again, and nothing is fetched twice
        assert third_of(daemon)["fetched_pages"] == 16
    idle(daemon)


# -- how long who asks waits -------------------------------------------------------------------------------------------


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "shut")


@pytest.fixture
def slow(tmp_path: Path, gate: Gate) -> Iterator[Daemon]:
    """Whose reads can be held, and that has stored ONE and then forgotten it above."""
    with daemon_over(tmp_path, prelude=gate.prelude) as daemon:
        with daemon.client() as client:
            put(client, ONE, 7)
            stored(daemon, 16)
            forget(client)
        yield daemon
        gate.open()
        idle(daemon)


@pytest.mark.parametrize("options", [{"prefetch": "none"}, {"prefetch": "best_effort"}])
def test_who_does_not_wait_goes_on_at_once(slow: Daemon, gate: Gate, options: dict[str, Any]) -> None:
    with slow.client() as client:
        with gate.held():
            check(client, ONE, 7, 0, **options)
        if options["prefetch"] == "none":
            assert slow.settle()["counters"]["prefetches"] == 0
            return
        # What it did not wait for has come for others.
        until(lambda: client.peek(ONE).matched_tokens == 64)
        with gate.held():
            check(client, ONE, 7, 64)


def test_who_waits_until_a_deadline_goes_on_with_what_there_is(slow: Daemon, gate: Gate) -> None:
    with slow.client() as client:
        with gate.held():
            started = time.monotonic()
            check(client, ONE, 7, 0, prefetch="timeout", prefetch_timeout_s=0.2)
            assert 0.19 < time.monotonic() - started < LONG / 4
        check(client, ONE, 7, 64, prefetch="timeout", prefetch_timeout_s=LONG)


def test_who_waits_for_all_of_it_has_all_of_it(slow: Daemon, gate: Gate) -> None:
    with slow.client() as client, slow.client() as other:
        with gate.held():
            pending = client.acquire_begin(ONE, prefetch="wait_complete")
            gate.wait()
            put(other, range(1000, 1032), 3)  # which nothing holds up
            assert not pending.done
        lease = pending.wait()
        assert lease.matched_tokens == 64
        right(client, lease, 7)
        lease.release()


@pytest.mark.parametrize(
    ("storage", "matched"),
    [
        ({"prefetch_policy": "none"}, 0),
        ({"prefetch_policy": "best_effort"}, 0),
        ({"prefetch_policy": "wait_complete"}, 64),
        ({"prefetch_policy": "timeout", "prefetch_timeout_s": LONG}, 64),
        ({"prefetch_policy": "timeout", "prefetch_timeout_s": 0.0, "prefetch_timeout_per_ki_token_s": 1024.0}, 64),
        ({"prefetch_policy": "wait_complete", "prefetch_threshold": 65}, 0),
    ],
)
def test_an_acquire_that_does_not_say_does_as_the_configuration_says(
    tmp_path: Path, storage: dict[str, Any], matched: int
) -> None:
    gate = Gate(tmp_path / "shut")
    with daemon_over(tmp_path, storage=storage, prelude=gate.prelude) as daemon, daemon.client() as client:
        put(client, ONE, 7)
        stored(daemon, 16)
        forget(client)
        if matched:
            check(client, ONE, 7, matched)
        else:
            with gate.held():
                check(client, ONE, 7, 0)
            daemon.settle()
        check(client, ONE, 7, 64 if storage.get("prefetch_threshold", 4) <= 64 else 0, prefetch="wait_complete")


def test_a_wait_that_nobody_knows_of_is_refused(daemon: Daemon) -> None:
    with daemon.client() as client:
        with pytest.raises(BadRequest, match="none, best_effort, timeout, wait_complete"):
            client.acquire(ONE, prefetch="soon")
        put(client, ONE, 7)


def test_a_page_that_is_fetched_late_lands_in_nobodys_page(slow: Daemon, gate: Gate) -> None:
    """The fetch is held, the deadline passes, the whole host pool is filled by others; then the late bytes come."""
    others = [range(10_000 * number, 10_000 * number + 4 * size) for number, size in enumerate([64] * 7 + [48], 1)]
    with slow.client() as client:
        with gate.held():
            check(client, ONE, 7, 0, prefetch="timeout", prefetch_timeout_s=0.3)
            gate.wait()
            assert slow.pool("HOST")["fenced"] == 16  # they are in nobody's hands
            for number, tokens in enumerate(others):
                put(client, tokens, number)
            until(lambda: slow.pool("HOST")["free"] == 0)
        until(lambda: slow.pool("HOST")["fenced"] == 0)
        slow.settle()
        drop(client, "device")
        for number, tokens in enumerate(others):
            assert client.peek(tokens)[:2] == (0, len(tokens))
            check(client, tokens, number, len(tokens))
        check(client, ONE, 7, 64)


def test_a_session_that_dies_while_it_waits_leaves_nothing_behind(slow: Daemon, gate: Gate) -> None:
    with Puppet(slow.socket) as puppet:
        puppet.do("client = Client(socket)")
        with gate.held():
            puppet.begin("client.acquire(range(1, 65), prefetch='wait_complete')")
            gate.wait()
            puppet.kill()
            until(lambda: slow.pool("HOST")["fenced"] == 16)
            assert slow.status(prove=False)["gauges"]["num_waiting"] == 0
    idle(slow)
    with slow.client() as client:
        check(client, ONE, 7, 64)


def test_who_closes_its_client_while_it_waits_is_told(slow: Daemon, gate: Gate) -> None:
    with slow.client() as client, gate.held():
        pending = client.acquire_begin(ONE, prefetch="wait_complete")
        gate.wait()
        client.close()
        with pytest.raises(SessionEnded):
            pending.wait()
    idle(slow)


# -- asking ahead ------------------------------------------------------------------------------------------------------


def test_a_prefetch_brings_a_prompt_to_the_host_ahead_of_its_request(slow: Daemon, gate: Gate) -> None:
    with slow.client() as client:
        assert client.prefetch(ONE) == (64, 64)
        assert client.peek(ONE)[:2] == (0, 64)
        assert client.prefetch(ONE) == (64, 0)
        assert client.prefetch(range(5000, 5064)) == (0, 0)
        with gate.held():
            check(client, ONE, 7, 64)  # no read is needed
        counters = slow.settle()["counters"]
        assert (counters["prefetch_pages"], counters["prefetched_pages"]) == (16, 16)
        assert counters["requests"] == 2


def test_a_prefetch_that_is_not_waited_for_any_longer_goes_on(slow: Daemon, gate: Gate) -> None:
    with slow.client() as client:
        with gate.held():
            assert client.prefetch(ONE, policy="timeout", timeout_s=0.05) == (0, 0)
            gate.wait()
            assert slow.pool("HOST")["fenced"] == 0
        until(lambda: client.peek(ONE)[:2] == (0, 64))
        check(client, ONE, 7, 64)


def test_a_prompt_longer_than_the_host_pool_is_fetched_as_far_as_it_goes(tmp_path: Path) -> None:
    """As much as the host pool holds, in fetches of half of it at most; the rest is computed, and is right as well."""
    with daemon_over(tmp_path, host={"num_tokens": 4 * 64}) as daemon, daemon.client() as client:
        tokens = range(1, 4 * 128 + 1)
        with client.acquire(tokens, reserve=0) as lease:
            for i in range(128):
                write(client, lease.slots[i], 9, i)
            for upto in range(64, 513, 64):  # chunk by chunk, so that each finds room on the host
                lease.commit(upto)
        daemon.settle()
        there = third_of(daemon)["num_pages"]
        assert 0 < there <= 128
        drop(client)
        with client.acquire(tokens) as lease:
            assert lease.matched_tokens == 4 * min(there, 64)
            right(client, lease, 9)
    assert files(tmp_path)


# -- clearing ----------------------------------------------------------------------------------------------------------


def test_a_clear_of_the_third_tier_is_its_own(daemon: Daemon, tmp_path: Path) -> None:
    with daemon.client() as client:
        put(client, ONE, 7)
        stored(daemon, 16)
        assert client.clear("disk") == {"DISK": 16}
        assert (third_of(daemon)["num_pages"], files(tmp_path)) == (0, [])
        assert client.peek(ONE)[:2] == (64, 64)
        assert client.clear("disk") == {"DISK": 0}
        forget(client)
        check(client, ONE, 7, 0)
        put(client, ONE, 8)
        stored(daemon, 16)
        forget(client)
        check(client, ONE, 8, 64)


def test_a_tier_that_this_daemon_has_not_is_refused_with_those_that_it_has(daemon: Daemon) -> None:
    with daemon.client() as client:
        for tier in ("external", "l3", ""):
            for verb in (client.clear, client.dump):
                with pytest.raises(BadRequest, match=r"use DEVICE, HOST or DISK$") as caught:
                    verb(tier)
                assert caught.value.facts["tier"] == tier.upper()


def test_a_tier_of_a_daemon_without_it_or_that_nobody_is_told_of_is_refused_likewise(tmp_path: Path) -> None:
    with Daemon(tmp_path / "one", host={"num_tokens": 0}) as daemon, daemon.client() as client:
        for tier in ("host", "disk"):
            for verb in (client.clear, client.dump):
                with pytest.raises(BadRequest, match=r"no tier .*use DEVICE$"):
                    verb(tier)
    with daemon_over(tmp_path, events={"enabled": False}) as daemon, daemon.client() as client:
        until(lambda: third_of(daemon)["ready"])  # it is known that the folder is empty
        assert client.clear("disk") == {"DISK": 0}
        with pytest.raises(BadRequest, match=r"DISK.*use DEVICE or HOST$"):
            client.dump("disk")


def test_a_clear_is_busy_while_something_is_fetched_or_stored(tmp_path: Path) -> None:
    reads, writes = Gate(tmp_path / "reads"), Gate(tmp_path / "writes", "write")
    with daemon_over(tmp_path, prelude=reads.prelude + writes.prelude) as daemon, daemon.client() as client:
        with writes.held():
            put(client, ONE, 7)
            writes.wait()
            with pytest.raises(Busy, match="1 copies in flight"):
                client.clear()
            assert client.peek(ONE)[:2] == (64, 64)
        stored(daemon, 16)
        forget(client)
        with reads.held():
            pending = client.acquire_begin(ONE)
            reads.wait()
            with pytest.raises(Busy, match="1 copies in flight"):
                client.clear()
        with pending.wait() as lease:
            assert lease.matched_tokens == 64
            right(client, lease, 7)
    assert len(files(tmp_path)) == 16


def test_who_asked_for_a_clear_may_be_gone_when_it_is_done(tmp_path: Path) -> None:
    """It stands behind a store that is held; who asked is killed meanwhile."""
    writes = Gate(tmp_path / "writes", "write")
    with daemon_over(tmp_path, prelude=writes.prelude) as daemon, daemon.client() as client:
        with writes.held(), Puppet(daemon.socket) as puppet:
            put(client, ONE, 7)
            writes.wait()
            puppet.do("client = Client(socket, role='admin')")
            puppet.begin("client.clear('disk')")
            until(lambda: third_of(daemon)["queued"]["clear"] == 1)
            puppet.kill()
        until(lambda: not any(third_of(daemon)["queued"].values()))
        daemon.settle()
        assert (third_of(daemon)["num_pages"], files(tmp_path)) == (0, [])
        assert daemon.row["restarts"] == 0


UNREADABLE = """
from sglcache.storage.file import FileStore
def listing(self):
    raise RuntimeError("planted: the index can't be read")
    yield
FileStore.listing = listing
"""


def test_what_cannot_be_told_of_is_left_alone_and_nobody_waits_for_it(tmp_path: Path) -> None:
    with daemon_over(tmp_path, prelude=UNREADABLE) as daemon:
        with daemon.client() as client:
            until(lambda: third_of(daemon)["broken"])
            put(client, ONE, 7)
            daemon.settle()
            forget(client)
            check(client, ONE, 7, 0, prefetch="wait_complete")
            assert client.prefetch(ONE) == (0, 0)
        idle(daemon)


HELD_FAST = """
import errno, os
from sglcache.storage import disk
real = disk.Disk.unlink
def unlink(self, path):
    if os.path.exists({mark!r}):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), path)
    return real(self, path)
disk.Disk.unlink = unlink
"""


def test_a_clear_that_could_not_remove_fails_with_what_is_left(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with daemon_over(tmp_path, prelude=HELD_FAST.format(mark=str(mark))) as daemon, daemon.client() as client:
        put(client, ONE, 7)
        stored(daemon, 16)
        mark.touch()
        with pytest.raises(StorageError, match=r"0 pages were removed, but 16 pages could not be .*not permitted"):
            client.clear("disk")
        assert (third_of(daemon)["num_pages"], len(files(tmp_path))) == (0, 16)
        forget(client)
        check(client, ONE, 7, 0)
        mark.unlink()
        assert client.clear("disk") == {"DISK": 16}
        assert files(tmp_path) == []
