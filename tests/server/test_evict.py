"""What an operator sees of sessions, and ending one that is not needed any more (laws 8 and 9)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sglcache.errors import Forbidden, SessionEnded, UnknownSession
from sglcache.memory.rings import EventRing
from sglcache.testing.daemon import Daemon, Puppet, until

pytestmark = pytest.mark.survive

TOKENS = "list(range(64))"  # 16 pages


@pytest.fixture
def runner(daemon: Daemon) -> Iterator[Puppet]:
    with Puppet(daemon.socket) as puppet:
        puppet.do("cache = Client(socket, name='a runner')")
        yield puppet


def the_session(daemon: Daemon) -> dict[str, Any]:
    [session] = daemon.status()["sessions"]
    found: dict[str, Any] = session
    return found


def run(daemon: Daemon, *words: str) -> tuple[int, Any]:
    """A command with --json: its exit status, and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "sglcache", *words, "--socket", str(daemon.socket), "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_session_says_what_it_holds_of_each_pool_and_what_it_waits_for(daemon: Daemon) -> None:
    ring = EventRing(8)
    with daemon.client(name="x", ring=ring) as client:
        lease = client.acquire(range(64), reserve=40)
        lease.commit(32)
        client.pin(range(16), "me", 60)
        held = ring.reserve()
        pending = lease.commit_begin(event=client.record()._replace(event=held[0], generation=held[1]))
        until(lambda: the_session(daemon)["oldest_event"] is not None)
        session = the_session(daemon)
        assert session["members"] == [
            {
                "role": "runner",
                "name": "x",
                "pid": os.getpid(),
                "shard": 0,
                "connected": True,
                "alive": True,
                "waits": 1,
                "unanswered": 1,
            }
        ]
        assert (session["leases"], session["pins"], session["pinned_pages"], session["waiting"]) == (1, 1, 4, 0)
        assert session["pages"] == [
            {"resource": "full", "tier": "DEVICE", "leased": 18, "fenced": 0, "locked": 8},
        ]
        assert (session["oldest_event"]["ticket"], session["oldest_event"]["shards"]) == (pending.ticket, [0])
        before = session["oldest_event"]["age_s"]
        until(lambda: the_session(daemon)["oldest_event"]["age_s"] > before)
        assert session["idle_s"] <= session["age_s"]
        assert [session[key] for key in ("ended", "why", "fenced_by")] == [False, None, []]
        ring.complete(*held)
        pending.wait()
        assert the_session(daemon)["oldest_event"] is None
        lease.release()


def test_what_all_sessions_hold_is_what_the_pools_say_in_every_resource(lend: Callable[..., Daemon]) -> None:
    daemon = lend(
        window={"size": 16, "num_layers": 1, "num_tokens": 256},
        mamba={"num_layers": 1, "states": [{"name": "h", "shape": [8], "dtype": "float32"}], "num_slots": 8},
    )
    with daemon.client() as one, daemon.client() as two:
        first = one.acquire(range(64), states=1)
        first.commit(states=[(64, first.mamba.slots[0])] if first.mamba is not None else ())
        second, third = two.acquire(range(80), states=2), two.acquire(range(100, 140), states=1)
        daemon.settle()
        status = daemon.status()
        for pool in status["pools"]:
            rows = [
                row
                for session in status["sessions"]
                for row in session["pages"]
                if (row["resource"], row["tier"]) == (pool["resource"], pool["tier"])
            ]
            assert sum(row["leased"] for row in rows) == pool["leased"], pool
            assert (sum(row["locked"] for row in rows) > 0) == (pool["locked"] > 0), pool
        assert len({row["resource"] for session in status["sessions"] for row in session["pages"]}) == 3
        for lease in (first, second, third):
            lease.release(wait=True)


def test_an_evicted_runner_that_lives_keeps_its_pages_fenced_until_it_says_goodbye(
    daemon: Daemon, runner: Puppet
) -> None:
    runner.do(f"lease = cache.acquire({TOKENS}); lease.commit(32)")
    number = the_session(daemon)["session"]
    with daemon.admin() as admin:
        done = admin.evict_session(number)
        assert not done["was_ended"]
        [holder] = done["must_end"]
        assert (holder["pid"], holder["why"]) == (runner.pid, "alive")
        for _ in range(2):
            session = the_session(daemon)
            assert (session["ended"], session["leases"]) == (True, 1)
            assert session["fenced_by"] == [holder]
            assert "evicted" in session["why"]
            assert daemon.pool()["fenced"] == 8
            assert admin.evict_session(number)["was_ended"], "once more changes nothing"
    for verb in (f"cache.acquire({TOKENS})", "lease.commit()", "cache.ping()", "lease.extend(reserve=4)"):
        with pytest.raises(SessionEnded, match="evicted it"):
            runner.do(verb)
    runner.do("cache.close()")  # its word that it writes no more
    until(lambda: daemon.pool()["fenced"] == 0)
    with daemon.observer() as observer:
        assert observer.peek(range(64)).matched_tokens == 32, "what it committed stays"


def test_a_hung_runner_keeps_its_pages_and_an_eviction_with_kill_gets_them_back(daemon: Daemon, runner: Puppet) -> None:
    runner.do(f"lease = cache.acquire({TOKENS})")
    os.kill(runner.pid, signal.SIGSTOP)
    session = the_session(daemon)
    assert (session["members"][0]["alive"], session["pages"][0]["leased"]) == (True, 16), "to hang is not to be dead"
    number = str(session["session"])

    code, told = run(daemon, "evict-session", number)
    assert (code, told["fenced_pages"]) == (1, 16)
    assert [each["pid"] for each in told["fenced_by"]] == [runner.pid]
    assert daemon.pool()["fenced"] == 16

    code, told = run(daemon, "evict-session", number, "--kill")
    assert (code, told["fenced_pages"], told["killed"]) == (0, 0, [runner.pid])
    assert runner.process.wait(10) == -signal.SIGKILL
    pool = daemon.pool()
    assert (pool["fenced"], pool["leased"]) == (0, 0)
    [reclaim] = [each for each in daemon.status()["reclaims"] if each["pid"] == runner.pid]
    assert 0 <= reclaim["freed_at"] - reclaim["died_at"] < 0.1


def test_who_wants_to_evict_must_be_an_admin_and_name_a_session_that_there_is(daemon: Daemon, runner: Puppet) -> None:
    number = the_session(daemon)["session"]
    with daemon.observer() as observer, daemon.client() as other:
        for client in (observer, other):
            with pytest.raises(Forbidden, match="an admin may"):
                client.evict_session(number)
        for change in (observer.clear, observer.announce):
            with pytest.raises(Forbidden, match="a runner, a scheduler or an admin may") as caught:
                change()
            assert caught.value.may == ["runner", "scheduler", "admin"]
    with daemon.admin() as admin:
        with pytest.raises(UnknownSession, match="sglcache sessions"):
            admin.evict_session(1 << 40)
        with pytest.raises(Forbidden, match="a runner or a scheduler may"):
            admin.acquire(range(64))
        assert admin.pools == []
    runner.do("cache.ping()")


def test_sessions_are_listed_for_people_and_programs(daemon: Daemon, runner: Puppet) -> None:
    code, told = run(daemon, "sessions")
    assert code == 0
    assert [session["members"][0]["name"] for session in told["sessions"]] == ["a runner"]
    runner.do(f"lease = cache.acquire({TOKENS}); cache._connection._sock.close()")
    until(lambda: daemon.pool()["fenced"] == 16)
    done = subprocess.run(
        [sys.executable, "-m", "sglcache", "sessions", "--socket", str(daemon.socket)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "socket closed" in done.stdout
    assert "device 16 fenced" in done.stdout
    assert f"runner a runner (pid {runner.pid}) lives, and may still write" in done.stdout
