"""Sessions of a scheduler and workers over two shards, and events that are held back."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sglcache.client import Client, Lease, Pending, Worker
from sglcache.errors import BadRequest, Busy, Changed, Forbidden, NoSpace, SessionEnded
from sglcache.memory.rings import EventRing
from sglcache.testing.daemon import Daemon, Puppet, until

TOKENS = list(range(64))  # 16 pages


@pytest.fixture
def daemon(lend: Callable[..., Daemon]) -> Daemon:
    return lend(pool={"num_shards": 2})


class Held(EventRing):
    """A runner's events, each done when the test says so."""

    def __init__(self, num_events: int = 16) -> None:
        super().__init__(num_events)
        self.held: list[tuple[int, int]] = []

    def record_unrung(self) -> tuple[int, int]:
        self.held.append(self.reserve())
        return self.held[-1]

    def let_go(self, which: int = 0) -> None:
        self.complete(*self.held.pop(which))


class Rig:
    """A scheduler and its two workers, in this process."""

    def __init__(self, daemon: Daemon, rings: list[EventRing | None] | None = None) -> None:
        self.scheduler = daemon.client(role="scheduler")
        self.workers = [
            daemon.worker(self.scheduler.token, shard, ring=ring) for shard, ring in enumerate(rings or [None, None])
        ]

    def record(self, pending: Pending[Any]) -> None:
        for worker in self.workers:
            worker.record(pending.ticket)

    def close(self) -> None:
        for member in (*self.workers, self.scheduler):
            member.close()


@pytest.fixture
def rig(daemon: Daemon) -> Iterator[Rig]:
    rig = Rig(daemon)
    yield rig
    rig.close()


def cached(scheduler: Client, tokens: list[int] = TOKENS) -> int:
    return scheduler.peek(tokens).device_tokens


# -- attaching ----------------------------------------------------------------------------------------


def test_each_worker_maps_its_own_shard_and_the_scheduler_none(rig: Rig) -> None:
    assert rig.scheduler.pools == []
    assert [worker.pool.shard for worker in rig.workers] == [0, 1]
    rig.workers[0].pool.k[0][3] = 1
    rig.workers[1].pool.k[0][3] = 2
    assert float(rig.workers[0].pool.k[0][3].sum()) * 2 == float(rig.workers[1].pool.k[0][3].sum())


def test_nothing_is_granted_before_every_worker_is_there(daemon: Daemon) -> None:
    with daemon.client(role="scheduler") as scheduler, contextlib.ExitStack() as workers:
        for attached in (0, 1):
            with pytest.raises(Forbidden) as caught:
                scheduler.acquire(TOKENS)
            assert (caught.value.attached, caught.value.shards) == (attached, 2)
            workers.enter_context(daemon.worker(scheduler.token, 1 - attached))
        scheduler.acquire(TOKENS)
        # The scheduler's end is not its workers': they may still write.
        scheduler.close()
        assert daemon.pool()["fenced"] == 16


# -- recorded, in all orders ------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(["commit", "worker 0", "worker 1"])), ids=" ".join)
def test_a_commit_takes_effect_when_the_last_shard_has_recorded(rig: Rig, order: tuple[str, ...]) -> None:
    """Whoever is first: a worker may have recorded before the scheduler's own command arrives."""
    scheduler = rig.scheduler
    lease = scheduler.acquire(TOKENS)
    ticket = 1
    for step, who in enumerate(order):
        assert cached(scheduler) == 0, f"cached after {order[:step]}"
        if who == "commit":
            begun = lease.commit_begin()
            assert begun.ticket == ticket
        else:
            worker = rig.workers[int(who[-1])]
            worker.record(ticket)
            barrier(worker)
    assert begun.wait().committed_tokens == len(TOKENS)
    assert cached(scheduler) == len(TOKENS)
    end(rig, lease)


def barrier(worker: Worker) -> None:
    """Everything this worker has sent was taken in."""
    worker.ping()


def end(rig: Rig, lease: Lease) -> None:
    pending = lease.release_begin()
    rig.record(pending)
    pending.wait()


@pytest.mark.parametrize("order", list(itertools.permutations([(1, 0), (1, 1), (2, 0), (2, 1)])), ids=str)
def test_commits_take_effect_in_the_schedulers_order(rig: Rig, order: tuple[tuple[int, int], ...]) -> None:
    """Two commits of one lease, and each shard's events in any order: a prefix is cached before what follows it."""
    scheduler = rig.scheduler
    lease = scheduler.acquire(TOKENS)
    first, second = lease.commit_begin(32), lease.commit_begin(64)
    assert (first.ticket, second.ticket) == (1, 2)
    done = {1: set(), 2: set()}  # type: ignore[var-annotated]
    for ticket, shard in order:
        rig.workers[shard].record(ticket)
        barrier(rig.workers[shard])
        done[ticket].add(shard)
        expected = 0 if len(done[1]) < 2 else 32 if len(done[2]) < 2 else 64
        assert cached(scheduler) == expected
    second.wait()
    first.wait()
    end(rig, lease)


def test_a_release_waits_for_every_shard(daemon: Daemon, rig: Rig) -> None:
    lease = rig.scheduler.acquire(TOKENS)
    pending = lease.release_begin()
    rig.workers[0].record(pending.ticket)
    barrier(rig.workers[0])
    assert daemon.pool()["leased"] == 16
    assert not pending.done
    rig.workers[1].record(pending.ticket)
    pending.wait()
    assert daemon.pool()["leased"] == 0


@pytest.mark.parametrize("verb", ["commit", "release", "abort"])
def test_what_would_wait_for_a_ticket_that_nobody_knows_is_refused(daemon: Daemon, rig: Rig, verb: str) -> None:
    """By the name of the verb that gives the ticket out; and the lease is as it was."""
    lease = rig.scheduler.acquire(TOKENS)
    with pytest.raises(Forbidden, match=f"{verb}_begin"):
        getattr(lease, verb)()
    assert daemon.pool()["leased"] == 16
    assert not lease.ended
    pending = lease.commit_begin()
    assert pending.ticket == 1
    rig.record(pending)
    assert pending.wait().committed_tokens == 64
    end(rig, lease)


def test_a_with_statement_of_a_scheduler_is_refused_and_leaks_nothing(daemon: Daemon, rig: Rig) -> None:
    """Its end would have to wait for a ticket. A lease whose pages nobody can know goes back; another stays."""
    with pytest.raises(Forbidden, match="release_begin"), rig.scheduler.acquire(TOKENS):
        raise AssertionError("unreachable")
    assert daemon.pool()["leased"] == 0
    lease = rig.scheduler.acquire(TOKENS)
    told = lease.slots.tolist()
    with pytest.raises(Forbidden, match="release_begin"), lease:
        raise AssertionError("unreachable")
    assert daemon.pool()["leased"] == len(told) == 16
    end(rig, lease)


def test_an_abort_drops_commits_and_waits_for_every_shard(daemon: Daemon, rig: Rig) -> None:
    lease = rig.scheduler.acquire(TOKENS)
    commit, abort = lease.commit_begin(), lease.abort_begin()
    with pytest.raises(Changed):
        commit.wait()
    rig.record(commit)
    rig.workers[0].record(abort.ticket)
    barrier(rig.workers[0])
    assert daemon.pool()["leased"] == 16
    rig.workers[1].record(abort.ticket)
    abort.wait()
    assert daemon.pool()["leased"] == 0
    assert cached(rig.scheduler) == 0


def test_a_worker_names_the_moment_that_a_ticket_is_for(daemon: Daemon) -> None:
    """It is a batch ahead when it learns of the ticket, and that batch is not waited for."""
    rings = [Held(), Held()]
    rig = Rig(daemon, [*rings])
    lease = rig.scheduler.acquire(TOKENS)
    moment = rig.scheduler.record()
    first = [worker.record() for worker in rig.workers]
    for worker in rig.workers:
        worker.record()  # the next batch
    commit = lease.commit_begin(event=moment)
    for worker, event in zip(rig.workers, first, strict=True):
        worker.record(commit.ticket, event)
    rings[0].let_go()
    barrier(rig.workers[1])
    assert not commit.done
    rings[1].let_go()
    assert commit.wait().committed_tokens == 64
    for worker in rig.workers:
        worker._ring = None  # their goodbye needs no event
    rig.close()


def test_the_same_record_twice_counts_once(daemon: Daemon, rig: Rig) -> None:
    lease = rig.scheduler.acquire(TOKENS)
    pending = lease.release_begin()
    rig.workers[0].record(pending.ticket)
    rig.workers[0].record(pending.ticket)
    barrier(rig.workers[0])
    assert daemon.pool()["leased"] == 16
    rig.workers[1].record(pending.ticket)
    pending.wait()


def test_an_event_that_is_not_in_the_ring_ends_its_worker_and_the_session(daemon: Daemon, rig: Rig) -> None:
    from sglcache.wire import control

    worker = rig.workers[0]
    with worker._connection.lock:
        worker._connection.send(control.Recorded(1, 1 << 20, 1))
    with pytest.raises(BadRequest):
        worker.ping()
    with pytest.raises(SessionEnded):
        rig.scheduler.ping()


# -- events that are held back --------------------------------------------------------------------------------


def test_a_commit_waits_for_its_event(daemon: Daemon) -> None:
    ring = Held()
    with daemon.client(ring=ring) as runner:
        lease = runner.acquire(TOKENS)
        pending = lease.commit_begin()
        assert cached(runner) == 0
        ring.let_go()
        pending.wait()
        assert cached(runner) == 64
        daemon.settle()  # a copy of ours is a lock, too
        released = lease.release_begin()
        assert daemon.pool()["locked"] == 16
        ring.let_go()
        released.wait()
        assert daemon.pool()["locked"] == 0
        runner._ring = None  # its goodbye needs no event


def test_sessions_do_not_wait_for_each_others_events(daemon: Daemon) -> None:
    """Two runners compute the same prompt; the one that began later is done first."""
    slow, fast = Held(), Held()
    with daemon.client(ring=slow) as one, daemon.client(ring=fast) as other:
        leases = [one.acquire(TOKENS), other.acquire(TOKENS)]
        begun = [lease.commit_begin() for lease in leases]
        own = leases[0].slots.tolist()
        fast.let_go()
        assert begun[1].wait().num_duplicates == 0
        slow.let_go()
        assert begun[0].wait().num_duplicates == 16
        # The loser reads the winner's pages from now on; its own are its own until it has said so.
        assert leases[0].slots.tolist() == leases[1].slots.tolist() != own
        assert daemon.pool()["leased"] == 16
        for runner, lease, ring in zip((one, other), leases, (slow, fast), strict=True):
            released = lease.release_begin()
            ring.let_go()
            released.wait()
            runner._ring = None
        assert daemon.pool()["leased"] == 0


def test_events_may_be_done_out_of_order_and_take_effect_in_order(daemon: Daemon) -> None:
    ring = Held()
    with daemon.client(ring=ring) as runner:
        lease = runner.acquire(TOKENS)
        begun = [lease.commit_begin(tokens) for tokens in (16, 32, 48, 64)]
        for which, expected in ((3, 0), (1, 0), (0, 32), (0, 64)):
            ring.let_go(which)
            until(lambda expected=expected: cached(runner) == expected)  # type: ignore[misc]
        for pending in reversed(begun):
            pending.wait()
        released = lease.release_begin()
        ring.let_go()
        released.wait()
        runner._ring = None


def test_more_events_than_the_ring_has_are_refused_here(daemon: Daemon) -> None:
    ring = Held(2)
    with daemon.client(ring=ring) as runner:
        lease = runner.acquire(TOKENS)
        begun = [lease.commit_begin(16), lease.commit_begin(32)]
        with pytest.raises(Busy):
            lease.commit_begin(48)
        for pending in begun:
            ring.let_go()
            pending.wait()
        runner._ring = None


def test_a_discarded_commit_never_takes_effect(daemon: Daemon) -> None:
    ring = Held()
    with daemon.client(ring=ring) as runner:
        lease = runner.acquire(TOKENS)
        pending = lease.commit_begin()
        gone = lease.abort_begin()
        with pytest.raises(Changed):
            pending.wait()
        ring.let_go()
        ring.let_go()
        gone.wait()
        assert cached(runner) == 0
        runner._ring = None


def test_a_commit_whose_event_never_came_is_dropped_at_the_end_of_the_session(daemon: Daemon) -> None:
    with Puppet(daemon.socket) as puppet:
        puppet.do(HOLD + "lease = cache.acquire(range(64)); lease.commit_begin(); cache.ping()")
        puppet.process.kill()
        until(lambda: daemon.status()["sessions"] == [])
    with daemon.observer() as observer:
        assert observer.peek(TOKENS).matched_tokens == 0


# -- the end ------------------------------------------------------------------------------------------


HOLD = """
ring, held = EventRing(4), []
def record_unrung():
    held.append(ring.reserve())
    return held[-1]
ring.record_unrung = record_unrung
cache = Client(socket, ring=ring)
"""


def test_a_release_whose_event_comes_after_the_sessions_end_gives_its_pages_back(daemon: Daemon) -> None:
    """The socket is gone and the process lives: the event that was named still counts, and no other."""
    with Puppet(daemon.socket) as puppet:
        puppet.do(HOLD + "released, kept = cache.acquire(range(64)), cache.acquire(range(1, 69))")
        puppet.do("released.release_begin(); kept.commit_begin(); cache.ping(); cache._connection.close()")
        until(lambda: daemon.pool()["fenced"] == 16 + 17)
        puppet.do("ring.complete(*held.pop(0))")
        until(lambda: daemon.pool()["fenced"] == 17)
        puppet.do("ring.complete(*held.pop(0))")  # a commit's: it was dropped, and its lease was not released
        assert daemon.pool()["fenced"] == 17
    until(lambda: daemon.status()["sessions"] == [])


def test_a_killed_worker_ends_the_session_once(daemon: Daemon) -> None:
    before = sessions_ended(daemon)
    with daemon.client(role="scheduler") as scheduler, Puppet(daemon.socket) as one, Puppet(daemon.socket) as other:
        for shard, puppet in enumerate((one, other)):
            puppet.do(f"worker = Worker(bytes.fromhex('{scheduler.token.hex()}'), {shard}, socket)")
        lease = scheduler.acquire(TOKENS)
        first = lease.commit_begin(32)
        for puppet in (one, other):
            puppet.do(f"worker.record({first.ticket})")
        first.wait()
        pending = lease.commit_begin()
        one.do(f"worker.record({pending.ticket})")
        daemon.settle()

        one.process.kill()

        with pytest.raises(SessionEnded):
            pending.wait()
        for _ in range(2):
            with pytest.raises(SessionEnded):
                scheduler.acquire(TOKENS)
        with pytest.raises(SessionEnded):
            other.do("worker.ping()")
        # The other worker may still write.
        assert sessions_ended(daemon) == before + 1
        assert daemon.pool()["fenced"] == 8
        other.do("worker.close()")
        until(lambda: daemon.pool()["fenced"] == 0)
        assert sessions_ended(daemon) == before + 1
        assert scheduler_view(daemon) == 32


def sessions_ended(daemon: Daemon) -> int:
    return int(daemon.status()["counters"]["sessions_ended"])


def scheduler_view(daemon: Daemon) -> int:
    with daemon.observer() as observer:
        return observer.peek(TOKENS).device_tokens


def test_a_second_death_changes_nothing(daemon: Daemon) -> None:
    before = sessions_ended(daemon)
    with daemon.client(role="scheduler") as scheduler, Puppet(daemon.socket) as one, Puppet(daemon.socket) as other:
        for shard, puppet in enumerate((one, other)):
            puppet.do(f"worker = Worker(bytes.fromhex('{scheduler.token.hex()}'), {shard}, socket)")
        scheduler.acquire(TOKENS)
        one.process.kill()
        other.process.kill()
        until(lambda: daemon.pool()["fenced"] + daemon.pool()["leased"] == 0)
        assert sessions_ended(daemon) == before + 1


def test_a_workers_farewell_ends_the_session_and_frees_its_shard_only(daemon: Daemon) -> None:
    rig = Rig(daemon)
    rig.scheduler.acquire(TOKENS)
    rig.workers[0].close()
    with pytest.raises(SessionEnded):
        rig.scheduler.ping()
    assert daemon.pool()["fenced"] == 16
    rig.workers[1].close()
    assert daemon.pool()["fenced"] == 0
    rig.close()
    assert daemon.status()["sessions"] == []


def test_a_farewell_whose_event_is_held_back_frees_nothing_yet(daemon: Daemon) -> None:
    ring = Held()
    runner = daemon.client(ring=ring)
    runner.acquire(TOKENS)
    with runner._connection.lock:
        from sglcache.wire import control

        event, generation = ring.reserve()
        runner._connection.send(control.Bye(99, event, generation))
        runner._connection.wait(99)
    runner._connection.close()
    until(lambda: daemon.pool()["fenced"] == 16)
    ring.complete(event, generation)
    until(lambda: daemon.pool()["fenced"] == 0)
    until(lambda: daemon.status()["sessions"] == [])


def test_after_its_farewell_a_member_says_nothing(daemon: Daemon) -> None:
    from sglcache.wire import control

    runner = daemon.client()
    with runner._connection.lock:
        runner._connection.send(control.Bye(98))
        runner._connection.send(control.Acquire(99, b"\0" * 4))
        runner._connection.wait(98)
        with pytest.raises(Forbidden):
            runner._connection.wait(99)
    runner.close()


def test_a_runner_of_all_shards_maps_them_all(daemon: Daemon) -> None:
    with daemon.client() as runner:
        assert [pool.shard for pool in runner.pools] == [0, 1]
        with pytest.raises(BadRequest, match="pools"):
            _ = runner.pool
        with runner.acquire(TOKENS) as lease:
            for number, pool in enumerate(runner.pools):
                pool.v[1][lease.slots.tolist()] = number
            lease.commit()


def test_errors_have_their_types_and_numbers(daemon: Daemon) -> None:
    with daemon.client() as runner:
        with pytest.raises(NoSpace) as caught:
            runner.acquire(range(4 * 257))
        assert (caught.value.need, caught.value.free, caught.value.tier) == (257, 256, "DEVICE")
