"""A runner that dies: what it held comes back when the kernel says so, and what it committed stays (laws 8 and 9)."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator

import pytest

from sglcache.errors import SessionEnded
from sglcache.testing.daemon import Daemon, Puppet, until

WITHIN_S = 0.1  # of the pidfd's word
TOKENS = "list(range(64))"  # 16 pages

# A child that no hook of Python's has seen: it has the socket, the rings and the pool's descriptor, as its parent had.
NASTY_CHILD = """
child = ctypes.CDLL(None).fork()
if child == 0:
    ctypes.CDLL(None).pause()
    ctypes.CDLL(None)._exit(0)
"""


@pytest.fixture
def runner(daemon: Daemon) -> Iterator[Puppet]:
    with Puppet(daemon.socket) as puppet:
        puppet.do("cache = Client(socket)")
        yield puppet


def await_death(pidfd: int) -> None:
    assert select.select([pidfd], [], [], 10.0)[0], "it did not die"
    os.close(pidfd)


def test_what_a_dead_runner_held_is_free_and_what_it_committed_still_matches(daemon: Daemon, runner: Puppet) -> None:
    runner.do(f"lease = cache.acquire({TOKENS}, reserve=40); lease.commit(32)")
    daemon.settle()
    pool = daemon.pool()
    assert (pool["cached"], pool["leased"]) == (8, 18)
    with daemon.observer() as observer:
        await_death(runner.kill())
        took = until(lambda: observer.status()["gauges"]["num_leases"] == 0)
        assert took < WITHIN_S
        assert observer.peek(range(64)).matched_tokens == 32
    pool = daemon.pool()
    assert (pool["cached"], pool["leased"], pool["fenced"], pool["locked"]) == (8, 0, 0, 0)


@pytest.mark.parametrize("commit_first", [False, True])
def test_a_forked_child_keeps_nothing(daemon: Daemon, runner: Puppet, commit_first: bool) -> None:
    """It holds the other end of the socket and never says a word: the parent's death is enough."""
    runner.do(f"lease = cache.acquire({TOKENS})")
    if commit_first:
        runner.do("lease.commit()")
    runner.do(NASTY_CHILD)
    child = runner.ask("child")
    try:
        daemon.settle()
        with daemon.observer() as observer:
            await_death(runner.kill())
            took = until(lambda: observer.status()["gauges"]["num_leases"] == 0)
            assert took < WITHIN_S
            assert observer.peek(range(64)).matched_tokens == (64 if commit_first else 0)
        assert os.path.exists(f"/proc/{child}"), "the child lives"
        until(lambda: daemon.status()["sessions"] == [])
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_child_cannot_write_into_its_dead_parents_pages(daemon: Daemon, runner: Puppet) -> None:
    """The mapping is not the child's: to touch it ends the child, not another runner's pages."""
    runner.do(f"lease = cache.acquire({TOKENS}); pages = cache.pool.pages")
    runner.do(
        "child = ctypes.CDLL(None).fork()\n"
        "if child == 0:\n"
        "    pages[0, 0] = 1\n"
        "    ctypes.CDLL(None)._exit(0)\n"
        "status = os.waitpid(child, 0)[1]"
    )
    assert runner.ask("os.waitstatus_to_exitcode(status)") == -signal.SIGSEGV
    runner.do("lease.release()")


def test_the_sockets_end_alone_frees_nothing(daemon: Daemon, runner: Puppet) -> None:
    """Its process lives and may still write: the pages wait, fenced, for its death."""
    runner.do(f"lease = cache.acquire({TOKENS}); cache._connection.close()")
    until(lambda: daemon.pool()["fenced"] == 16)
    [session] = daemon.status()["sessions"]
    assert session["ended"]
    [member] = session["members"]
    assert not member["connected"]
    await_death(runner.kill())
    until(lambda: daemon.pool()["fenced"] == 0)


def test_the_sockets_end_is_enough_where_nothing_was_held(daemon: Daemon, runner: Puppet) -> None:
    runner.do(f"cache.acquire({TOKENS}).release(); cache._connection.close()")
    until(lambda: daemon.status()["sessions"] == [])


def test_a_death_right_after_the_hello_leaves_nothing(daemon: Daemon, runner: Puppet) -> None:
    await_death(runner.kill())
    until(lambda: daemon.status()["sessions"] == [])
    before = len(os.listdir(f"/proc/{daemon.pid}/fd"))
    for _ in range(5):
        with Puppet(daemon.socket) as puppet:
            puppet.do("cache = Client(socket)")
            await_death(puppet.kill())
    until(lambda: daemon.status()["sessions"] == [])
    until(lambda: len(os.listdir(f"/proc/{daemon.pid}/fd")) <= before)


def test_pins_die_with_their_session(daemon: Daemon, runner: Puppet) -> None:
    runner.do(f"lease = cache.acquire({TOKENS}); lease.commit(); lease.release()")
    runner.do(f"cache.pin({TOKENS}, 'me', 60)")
    assert daemon.settle()["gauges"]["pinned_pages"] == 16
    await_death(runner.kill())
    until(lambda: daemon.status()["gauges"]["pinned_pages"] == 0)


def test_a_runner_that_shares_a_prefix_is_not_touched_by_the_others_death(daemon: Daemon, runner: Puppet) -> None:
    with Puppet(daemon.socket) as other:
        other.do("cache = Client(socket)")
        runner.do(f"lease = cache.acquire({TOKENS}); cache.pool.k[0][lease.slots.tolist()] = 7; lease.commit()")
        other.do(f"lease = cache.acquire({TOKENS})")
        assert other.ask("lease.matched_tokens") == 64
        await_death(runner.kill())
        until(lambda: daemon.status()["gauges"]["num_leases"] == 1)
        assert other.ask("bool((cache.pool.k[0][lease.slots.tolist()] == 7).all())")
        assert daemon.pool()["locked"] == 16
        other.do("lease.release(); cache.close()")


def test_a_schedulers_death_ends_its_session(daemon: Daemon) -> None:
    with Puppet(daemon.socket) as scheduler:
        scheduler.do("cache = Client(socket, role='scheduler')")
        with daemon.worker(bytes.fromhex(scheduler.ask("cache.token.hex()")), 0) as worker:
            scheduler.do(f"lease = cache.acquire({TOKENS})")
            await_death(scheduler.kill())
            with pytest.raises(SessionEnded):
                until(lambda: worker.ping() is not None)
            # The worker may still write, until it says goodbye.
            assert daemon.pool()["fenced"] == 16
        until(lambda: daemon.pool()["fenced"] == 0)
