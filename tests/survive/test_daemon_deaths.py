"""A rank that is killed, as its runners and routers see it: a typed answer to everything, and the way to its next life.

Real processes: the supervisor starts the rank again. A21 is a restart between two calls of a runner.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from sglcache.client import Client, Lease
from sglcache.client.client import REATTACH_S, Event
from sglcache.client.mirror import Mirror
from sglcache.errors import (
    Changed,
    ClosedError,
    DaemonRestarted,
    SessionEnded,
    SglcacheError,
    Unavailable,
    UnknownSession,
)
from sglcache.server.supervisor import Timing
from sglcache.testing.daemon import Daemon, until

pytestmark = pytest.mark.survive

TOKENS = range(64)
WINDOW = {"size": 16, "num_layers": 1, "num_tokens": 1024}
MAMBA = {"num_layers": 1, "states": [{"name": "h", "shape": [8], "dtype": "float32"}], "num_slots": 16}
QUICK = {"first_wait": 0.01, "longest_wait": 0.01}  # it dies often here


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("rank"), timing=QUICK, window=WINDOW, mamba=MAMBA) as daemon:
        yield daemon


@pytest.fixture
def client(served: Daemon) -> Iterator[Client]:
    with served.client(name="survivor") as client:
        yield client


def restart(daemon: Daemon) -> None:
    daemon.next_life(daemon.kill_rank())


def put(client: Client, tokens: range, value: int) -> None:
    with client.acquire(tokens, states=1) as lease:
        client.pool.array[lease.slots] = value
        commit(lease)


def commit(lease: Lease) -> None:
    assert lease.mamba is not None
    lease.commit(states=[(len(lease.tokens), lease.mamba.slots[0])])  # without one no match ends there


def test_a_restart_between_two_calls_is_noticed_by_the_first_of_them_and_by_routers(
    served: Daemon, client: Client
) -> None:
    """A21."""
    with served.admin() as admin:
        stream = admin.status()["stream"]
        admin.clear()
    put(client, TOKENS, 1)
    lease = client.acquire(TOKENS)
    epoch = client.epoch
    with Mirror(stream["endpoint"], stream["replay_endpoint"]) as mirror:
        until(lambda: mirror.step(0.05) is not None and len(mirror.hashes("GPU")) == 16)
        restart(served)
        started = time.monotonic()
        with pytest.raises(DaemonRestarted) as caught:
            client.peek(TOKENS)
        assert time.monotonic() - started < 1.0, "no hang"
        assert (caught.value.code, caught.value.epoch) == ("daemon_restarted", epoch)
        assert isinstance(caught.value, Unavailable)
        for verb in (client.ping, lease.commit, lease.release, lambda: lease.slots, lambda: client.acquire(TOKENS)):
            with pytest.raises(DaemonRestarted):
                verb()
        client.reattach()
        assert client.epoch > epoch
        assert served.info["ranks"][0]["epoch"] < client.epoch == served.epoch
        seq = client.digest()["seq"]
        assert mirror.catch_up(seq, 10.0)
        device = {tier: count for tier, (count, _) in client.digest()["tiers"].items()}["DEVICE"]
        assert device == 0, "nothing of the device outlives a rank"
        assert mirror.hashes("GPU") == set(), "what was told by the old life is not believed any more"
        matched = client.peek(TOKENS)
        assert matched.device_tokens == 0
        put(client, TOKENS, 2)
        assert mirror.catch_up(client.digest()["seq"], 10.0)
        until(lambda: mirror.step(0.05) is not None and len(mirror.hashes("GPU")) == 16)


def test_a_next_life_is_waited_for_for_longer_than_it_is_put_off() -> None:
    assert Timing().longest_wait + 10 < REATTACH_S, "it has to start as well"


def test_what_was_begun_before_a_death_ends_with_it_whenever_it_is_waited_for(served: Daemon, client: Client) -> None:
    lease = client.acquire(TOKENS)
    answered = client.acquire_begin(range(100, 140))
    until(lambda: answered.done)
    held = client._ring.reserve() if client._ring is not None else (0, 0)  # a commit that can't take effect
    begun = lease.commit_begin(event=Event(*held))
    client.ping()
    restart(served)
    until(lambda: begun.done)
    for _ in range(2):
        with pytest.raises(DaemonRestarted):
            begun.wait()
    client.reattach()
    with pytest.raises(DaemonRestarted):
        begun.wait()
    late = answered.wait()
    assert late.id, "its answer had come"
    for verb in (late.release, late.commit, lambda: late.slots, lambda: late.window, lambda: late.mamba):
        with pytest.raises(DaemonRestarted):
            verb()
    assert client.poll() == []
    served.settle()


VERBS: dict[str, Callable[[Client, object], object]] = {
    "slots": lambda client, lease: lease.slots,  # type: ignore[attr-defined]
    "extend": lambda client, lease: lease.extend(reserve=4),  # type: ignore[attr-defined]
    "extend of a batch": lambda client, lease: client.extend([(lease, [1])]),
    "commit": lambda client, lease: lease.commit(),  # type: ignore[attr-defined]
    "commit with an event": lambda client, lease: lease.commit(event=client.record()),  # type: ignore[attr-defined]
    "release": lambda client, lease: lease.release(),  # type: ignore[attr-defined]
    "release, heard": lambda client, lease: lease.release(wait=True),  # type: ignore[attr-defined]
    "abort": lambda client, lease: lease.abort(),  # type: ignore[attr-defined]
    "cancel": lambda client, lease: lease.cancel(),  # type: ignore[attr-defined]
    "the end of its block": lambda client, lease: lease.__exit__(None, None, None),  # type: ignore[attr-defined]
}


def test_a_lease_of_an_earlier_life_stays_dead_and_sends_nothing(served: Daemon, client: Client) -> None:
    leases = [client.acquire(TOKENS) for _ in VERBS]
    restart(served)
    client.reattach()
    own = client.acquire(TOKENS)  # it may have the very number that one of the dead had
    with served.observer() as observer:
        before = {name: observer.status()["counters"][name] for name in ("commits", "requests", "request_tokens")}
        for verb, lease in zip(VERBS.values(), leases, strict=True):
            sent = client._connection._request, client._ticket
            with pytest.raises(DaemonRestarted):
                verb(client, lease)
            assert (client._connection._request, client._ticket) == sent, "no frame was made for it"
        after = observer.status()
        assert {name: after["counters"][name] for name in before} == before
        assert after["gauges"]["num_leases"] == 1
    own.commit()
    own.release(wait=True)


def test_views_of_the_old_pools_are_never_the_new_ones(served: Daemon, client: Client) -> None:
    put(client, TOKENS, 7)
    pools = (lambda: client.pool, lambda: client.window.pool, lambda: client.mamba.pool)  # type: ignore[union-attr]
    views = [pool() for pool in pools]
    array = views[0].array
    slots = client.acquire(TOKENS).slots
    restart(served)
    for pool in pools:
        with pytest.raises(DaemonRestarted):  # though no call has met the loss yet
            pool()
    client.reattach()
    assert np.all(array[slots] == 7), "what a user holds is the old memory, whole, and in nobody's hands"
    array[:] = 9
    for pool, old in zip(pools, views, strict=True):
        with pytest.raises(ClosedError):
            _ = old.array
        assert pool() is not old
    lease = client.acquire(range(200, 264))
    assert not np.any(client.pool.array == 9), "who writes the old memory writes nothing of the new"
    lease.release(wait=True)


def test_a_scheduler_and_its_workers_come_back_with_a_new_token(served: Daemon) -> None:
    with served.client(role="scheduler") as scheduler, served.worker(scheduler.token, 0) as worker:
        token = scheduler.token
        lease = scheduler.acquire(TOKENS)
        restart(served)
        with pytest.raises(DaemonRestarted):
            until(lambda: worker.record(1) is None)
        with pytest.raises(UnknownSession):
            worker.reattach(token)
        scheduler.reattach()
        assert scheduler.token != token
        worker.reattach(scheduler.token)
        assert worker.epoch == scheduler.epoch == served.epoch
        with pytest.raises(DaemonRestarted):
            lease.commit_begin()
        again = scheduler.acquire(TOKENS, states=1)
        worker.pool.array[again.slots] = 3
        begun, released = again.commit_begin(), again.release_begin()
        for pending in (begun, released):
            worker.record(pending.ticket)
        assert begun.wait().committed_tokens == 64
        released.wait()


def test_a_session_that_was_ended_while_the_daemon_lives_is_left_and_followed_by_another(
    served: Daemon, client: Client
) -> None:
    lease = client.acquire(range(90_000, 90_064))  # of which nothing outlives any life
    epoch = client.epoch
    with served.admin() as admin:
        [session] = admin.status()["sessions"]
        admin.evict_session(session["session"])
        with pytest.raises(SessionEnded):
            client.acquire(TOKENS)
        assert served.pool()["fenced"] == 16
        client.reattach()
        assert client.epoch == epoch
        until(lambda: served.pool()["fenced"] == 0)
        [session] = admin.status()["sessions"]
        assert not session["ended"], "its goodbye was enough"
    with pytest.raises(SessionEnded):
        lease.release()
    client.acquire(TOKENS).release(wait=True)


def test_where_nothing_is_wrong_nothing_is_done(served: Daemon, client: Client) -> None:
    with client.acquire(TOKENS) as lease:
        token, pool = client.token, client.pool
        client.reattach()
        assert (client.token, client.pool) == (token, pool)
        lease.commit()


def test_without_a_next_life_it_says_so_and_can_be_tried_again(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "one")
    client = daemon.client()
    lease = client.acquire(TOKENS)
    daemon.kill()
    for _ in range(2):
        with pytest.raises(DaemonRestarted):
            client.ping()
        with pytest.raises(Unavailable, match=r"no next life within 0\.05 s") as caught:
            client.reattach(timeout_s=0.05)
        assert caught.value.code == "unavailable"
    with Daemon(tmp_path / "one", pool={"num_tokens": 4 * 128}) as other:
        with pytest.raises(Changed, match="num_pages was 256 and is 128") as refused:
            client.reattach()
        assert refused.value.differ == ["num_pages", "pools"]
        until(lambda: not other.status()["sessions"])
        with pytest.raises(DaemonRestarted):
            client.ping()
    with Daemon(tmp_path / "one", host={"num_tokens": 4 * 64}) as daemon:  # no matter of a runner's
        client.reattach()
        client.acquire(TOKENS).release(wait=True)
        with pytest.raises(DaemonRestarted):
            lease.release()
        client.close()
    with pytest.raises(ClosedError):
        client.reattach()


def test_events_of_an_earlier_life_say_nothing_of_what_was_read_in_this_one(served: Daemon, client: Client) -> None:
    """Else pages that a lease still names would be free: the old life's answers had higher numbers."""
    for number in range(5):
        put(client, range(1000 * number, 1000 * number + 8), 1)
    old = client.record()
    assert old.seen == 5
    restart(served)
    client.reattach()
    put(client, TOKENS, 1)
    lease = client.acquire(range(500, 516))
    twin = client.acquire(range(500, 516), states=1)
    commit(twin)
    begun = lease.commit_begin()  # the tree has the twin's pages: ours are duplicates, named until it is waited for
    until(lambda: begun.done)
    assert served.pool()["leased"] == 4
    client.acquire(range(700, 708)).release_begin(event=old).wait()
    assert served.pool()["leased"] == 4, "nobody has read of them"
    begun.wait()
    for each in (lease, twin):
        each.release(wait=True)


def test_every_error_of_a_lost_daemon_is_typed_for_observers_and_admins_as_well(served: Daemon) -> None:
    with served.observer() as observer, served.admin() as admin:
        restart(served)
        for looker in (observer, admin):
            with pytest.raises(DaemonRestarted):
                looker.status()
            with pytest.raises(SglcacheError):
                looker.clear()
            looker.reattach()
            assert looker.status()["epoch"] == served.epoch
        assert admin.clear("device") == {"DEVICE": 0}
