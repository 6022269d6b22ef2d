"""A runner that is killed at each point of its journey: what it held comes back, exactly, and nobody else notices.

Laws 8 and 9. Real processes, and SIGKILL. A point is what the runner was about when it was killed; what it had given to
the cache by then stays.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglcache.client import Client
from sglcache.errors import Busy, SessionEnded
from sglcache.testing import copies
from sglcache.testing.daemon import Daemon, Puppet, until

pytestmark = pytest.mark.survive

WITHIN_S = 0.1  # of the loop's hearing of the death, by its own clock
P, PAGES = 4, 256
KEPT = range(10_000, 10_064)  # 16 pages of somebody who is not there any more
TOKENS = "list(range(64))"  # 16 pages
SHARDS = 4

# A child that no hook of Python's has seen: it has the socket, the rings and the pools' descriptors, as its parent had.
NASTY_CHILD = """
child = ctypes.CDLL(None).fork()
if child == 0:
    ctypes.CDLL(None).pause()
    ctypes.CDLL(None)._exit(0)
"""


@dataclass
class Scene:
    """A daemon whose copies and reads may be held, and the puppets of one death."""

    daemon: Daemon
    backups: Path  # its copies to the host go on while this file is there
    loads: Path
    reads: copies.Gate
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def puppet(self) -> Puppet:
        return self.stack.enter_context(Puppet(self.daemon.socket))

    def runner(self) -> Puppet:
        puppet = self.puppet()
        puppet.do("cache = Client(socket)")
        return puppet

    def group(self) -> tuple[Puppet, list[Puppet]]:
        """A scheduler and a worker for each shard, all processes."""
        scheduler = self.puppet()
        scheduler.do("cache = Client(socket, role='scheduler')")
        token = scheduler.ask("cache.token.hex()")
        workers = [self.puppet() for _ in range(SHARDS)]
        for shard, worker in enumerate(workers):
            worker.do(f"member = Worker(bytes.fromhex('{token}'), {shard}, socket)")
        return scheduler, workers

    def put(self, tokens: range, value: int) -> None:
        with self.daemon.client() as client, client.acquire(tokens) as lease:
            for pool in client.pools:
                pool.array[lease.slots] = value
            lease.commit()

    def empty(self) -> None:
        with self.daemon.admin() as admin:

            def done() -> bool:
                try:
                    admin.clear()
                    admin.clear("disk")
                except Busy:
                    return False
                return True

            until(done)

    def open(self) -> None:
        self.backups.touch()
        self.loads.touch()
        self.reads.open()

    def facts(self) -> dict[str, Any]:
        with self.daemon.observer() as observer:
            return observer.status()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Path, Path, copies.Gate]]:
    folder = tmp_path_factory.mktemp("deaths")
    backups, loads, reads = folder / "backups", folder / "loads", copies.Gate(folder / "reads")
    for gate in (backups, loads):
        gate.touch()
    with Daemon(
        folder,
        prelude=copies.gate(backups, "backup") + copies.gate(loads, "load") + reads.prelude,
        pool={"num_tokens": P * PAGES, "num_kv_heads": SHARDS, "num_shards": SHARDS},
        storage={"kind": "file", "path": str(folder / "l3"), "prefetch_threshold": 4},
    ) as daemon:
        yield daemon, backups, loads, reads


@pytest.fixture
def scene(daemon: tuple[Daemon, Path, Path, copies.Gate]) -> Iterator[Scene]:
    scene = Scene(*daemon)
    scene.empty()
    scene.put(KEPT, 7)
    scene.daemon.settle()
    with scene.stack:
        try:
            yield scene
        finally:
            scene.open()
    until(lambda: not scene.facts()["sessions"])
    scene.daemon.settle()


def gauge(scene: Scene, name: str) -> int:
    found: int = scene.facts()["gauges"][name]
    return found


def device(facts: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = next(pool for pool in facts["pools"] if pool["tier"] == "DEVICE")
    return found


# -- the points: each leads a runner there; the puppet to kill, and the tokens of TOKENS that the cache has then -----

Point = Callable[[Scene], tuple[Puppet, int]]


def registered_only(scene: Scene) -> tuple[Puppet, int]:
    return scene.runner(), 0


def leasing(scene: Scene) -> tuple[Puppet, int]:
    runner = scene.runner()
    runner.do(f"leases = [cache.acquire({TOKENS}, reserve=40), cache.acquire(list({list(KEPT)}) + {TOKENS})]")
    return runner, 0


def amid_a_frame(scene: Scene) -> tuple[Puppet, int]:
    runner = scene.runner()
    runner.do(f"lease = cache.acquire({TOKENS}); cache._connection._sock.send(b'\\0\\0\\1\\0half')")
    return runner, 0


def with_commands_that_nobody_has_waited_for(scene: Scene) -> tuple[Puppet, int]:
    runner = scene.runner()
    runner.do("begun = [cache.acquire_begin(list(range(i, i + 20))) for i in range(100, 2100, 100)]; cache.ping()")
    return runner, 0


def fill(scene: Scene, runner: Puppet) -> None:
    """Every page is in use, or cached and not let go by its copy to the host."""
    scene.backups.unlink()
    runner.do(f"lease = cache.acquire({TOKENS}); lease.commit(32)")
    rest = P * (PAGES - 2 * 16 - 16 + 16 - 16)
    runner.do(f"other = cache.acquire(list(range(20_000, 20_000 + {rest}))); other.commit(); other.release(wait=True)")
    assert device(scene.facts())["free"] < 40


def amid_an_extend(scene: Scene) -> tuple[Puppet, int]:
    """It waits for room that only copies of ours hold."""
    runner = scene.runner()
    fill(scene, runner)
    runner.do(f"begun = lease.extend_begin(reserve={P * 120})")
    until(lambda: gauge(scene, "num_waiting") == 1)
    return runner, 32


def waiting_for_room(scene: Scene) -> tuple[Puppet, int]:
    runner = scene.runner()
    fill(scene, runner)
    runner.do(f"begun = cache.acquire_begin(list(range(40_000, 40_000 + {P * 120})))")
    until(lambda: gauge(scene, "num_waiting") == 1)
    return runner, 32


def amid_a_commit(scene: Scene) -> tuple[Puppet, int]:
    """Its event is not done, so its bytes need not be there."""
    runner = scene.runner()
    runner.do(f"lease = cache.acquire({TOKENS}); lease.commit(32)")
    runner.do("from sglcache.client.client import Event")
    runner.do("begun = lease.commit_begin(event=Event(*cache._ring.reserve())); cache.ping()")
    assert scene.facts()["sessions"][0]["oldest_event"]["shards"] == [0]
    return runner, 32


def amid_a_release(scene: Scene) -> tuple[Puppet, int]:
    runner = scene.runner()
    runner.do(f"lease = cache.acquire({TOKENS}); lease.commit(32)")
    runner.do("from sglcache.client.client import Event")
    runner.do("begun = lease.release_begin(event=Event(*cache._ring.reserve())); cache.ping()")
    return runner, 32


def amid_a_load_back(scene: Scene) -> tuple[Puppet, int]:
    """The copy into its pages goes on: they are free once it is over, and not before."""
    with scene.daemon.admin() as admin:
        admin.clear("device")
    scene.loads.unlink()
    runner = scene.runner()
    runner.do(f"lease = cache.acquire({list(KEPT)} + {TOKENS})")
    assert runner.ask("lease.host_tokens") == 64
    return runner, 0


def amid_a_write_through(scene: Scene) -> tuple[Puppet, int]:
    scene.backups.unlink()
    runner = scene.runner()
    runner.do(f"lease = cache.acquire({TOKENS}); [pool.array.__setitem__(lease.slots, 3) for pool in cache.pools]")
    runner.do("lease.commit()")
    until(lambda: gauge(scene, "num_copies") > 0)
    return runner, 64


def forked(scene: Scene) -> tuple[Puppet, int]:
    """The child holds the socket, the rings and the pools: its parent's death is enough."""
    runner = scene.runner()
    runner.do(f"lease = cache.acquire({TOKENS}); lease.commit(16)")
    runner.do(NASTY_CHILD)
    child = runner.ask("child")
    scene.stack.callback(os.kill, child, signal.SIGKILL)
    return runner, 16


def holding_pins(scene: Scene) -> tuple[Puppet, int]:
    runner = scene.runner()
    runner.do(f"lease = cache.acquire({TOKENS}); lease.commit(); lease.release(wait=True)")
    runner.do(f"cache.pin({TOKENS}, 'me', 60); cache.pin({TOKENS}, 'me too', 60); cache.pin({list(KEPT)}, 'me', 60)")
    assert gauge(scene, "pinned_pages") == 48
    return runner, 64


def waiting_for_the_third_tier(scene: Scene) -> tuple[Puppet, int]:
    until(lambda: scene.facts()["third"]["num_pages"] == 16)
    with scene.daemon.admin() as admin:
        admin.clear()
    scene.reads.shut()
    runner = scene.runner()
    runner.do(f"begun = cache.acquire_begin({list(KEPT)}, prefetch='wait_complete')")
    until(lambda: gauge(scene, "num_waiting") == 1)
    scene.reads.wait()
    return runner, 0


POINTS: list[Point] = [
    registered_only,
    leasing,
    amid_a_frame,
    with_commands_that_nobody_has_waited_for,
    amid_an_extend,
    waiting_for_room,
    amid_a_commit,
    amid_a_release,
    amid_a_load_back,
    amid_a_write_through,
    forked,
    holding_pins,
    waiting_for_the_third_tier,
]
HELD_UP: list[Point] = [amid_a_load_back]
"""Where bytes are moving into the dead one's pages: these come back when that is over."""
IDLE: list[Point] = [registered_only, waiting_for_room, holding_pins, waiting_for_the_third_tier]
"""Where no page is fenced: the end of the socket, which comes before that of the process, is enough to forget it."""


def kill(puppet: Puppet) -> None:
    pidfd = puppet.kill()
    assert select.select([pidfd], [], [], 10.0)[0], "it did not die"
    os.close(pidfd)


def reclaimed(scene: Scene, puppet: Puppet) -> float:
    """Wait until all that it had is free; seconds between the loop's hearing of the death and that."""
    found: list[dict[str, float]] = []

    def there() -> bool:
        found[:] = [each for each in scene.facts()["reclaims"] if each["pid"] == puppet.pid]
        return bool(found)

    until(there)
    return found[0]["freed_at"] - found[0]["died_at"]


def check_whole(scene: Scene, committed: int) -> None:
    """The books are right, nothing is anybody's, and what was committed before the death is all that is there."""
    facts = scene.daemon.settle()
    assert facts["sessions"] == []
    assert {name: facts["gauges"][name] for name in ("num_sessions", "num_leases", "num_waiting", "pinned_pages")} == {
        "num_sessions": 0,
        "num_leases": 0,
        "num_waiting": 0,
        "pinned_pages": 0,
    }
    for pool in facts["pools"]:
        assert (pool["leased"], pool["fenced"], pool["locked"]) == (0, 0, 0), pool
        assert pool["free"] + pool["cached"] == pool["total"], pool
    with scene.daemon.client() as client:  # another attaches at once
        assert client.peek(range(64)).matched_tokens == committed
        check_kept(client)
        everything = client.acquire(range(50_000, 50_000 + P * PAGES))  # each page can be had
        assert len(set(everything.slots.tolist())) == PAGES
        everything.release(wait=True)


def check_kept(client: Client) -> None:
    """What others had committed matches, with all its bytes."""
    with client.acquire(KEPT, prefetch="wait_complete") as lease:
        lease.wait_loaded()
        assert lease.matched_tokens == len(KEPT)
        for pool in client.pools:
            assert np.all(pool.array[lease.slots] == 7)


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.__name__)
def test_what_a_runner_held_comes_back_wherever_it_dies(scene: Scene, point: Point) -> None:
    victim, committed = point(scene)
    ended = scene.facts()["counters"]["sessions_ended"]
    kill(victim)
    if point in IDLE:
        assert until(lambda: scene.facts()["sessions"] == []) < 1.0
    elif point in HELD_UP:
        until(lambda: device(scene.facts())["fenced"] > 0)
        [session] = scene.facts()["sessions"]
        assert [each["why"] for each in session["fenced_by"]] == ["load"]
        assert device(scene.facts())["fenced"] == 32, "the copy writes into them still"
        scene.open()
        reclaimed(scene, victim)
    else:
        assert reclaimed(scene, victim) < WITHIN_S
    scene.open()
    assert scene.facts()["counters"]["sessions_ended"] == ended + 1
    check_whole(scene, committed)


# -- groups: nothing comes back before the last who may write is dead ------------------------------------------------


def lead(scheduler: Puppet, workers: list[Puppet], commit: bool = True) -> None:
    scheduler.do(f"lease = cache.acquire({TOKENS}); begun = lease.commit_begin(32)")
    if commit:
        for worker in workers:
            worker.do(f"member.record({scheduler.ask('begun.ticket')})")
        scheduler.do("begun.wait()")


def still_fenced(scene: Scene, pages: int, pids: set[int]) -> None:
    until(lambda: device(scene.facts())["fenced"] == pages)
    [session] = scene.facts()["sessions"]
    assert session["ended"]
    assert {each["pid"] for each in session["fenced_by"]} == pids


@pytest.mark.parametrize("first", range(SHARDS))
def test_when_one_worker_of_four_dies_pages_wait_for_the_other_three(scene: Scene, first: int) -> None:
    scheduler, workers = scene.group()
    lead(scheduler, workers)
    alive = [*workers[first:], *workers[:first]]
    while alive:
        victim = alive.pop(0)
        kill(victim)
        if alive:
            still_fenced(scene, 8, {worker.pid for worker in alive})
            with pytest.raises(SessionEnded, match=f"worker of shard {first} "):
                scheduler.do("lease.commit_begin().wait()")
    assert reclaimed(scene, victim) < WITHIN_S
    scheduler.do("cache.close()")
    check_whole(scene, 32)


def test_when_a_scheduler_dies_pages_wait_for_all_its_workers(scene: Scene) -> None:
    """By their deaths, or by their word that they have written their last."""
    scheduler, workers = scene.group()
    lead(scheduler, workers)
    kill(scheduler)
    still_fenced(scene, 8, {worker.pid for worker in workers})
    for worker in workers[:2]:
        with pytest.raises(SessionEnded, match=f"scheduler .*pid {scheduler.pid}"):
            worker.do("member.ping()")
        worker.do("member.close()")
    still_fenced(scene, 8, {worker.pid for worker in workers[2:]})
    kill(workers[2])
    still_fenced(scene, 8, {workers[3].pid})
    kill(workers[3])
    assert reclaimed(scene, workers[3]) < WITHIN_S
    check_whole(scene, 32)


def test_a_commit_that_some_shards_have_recorded_is_none_when_one_dies(scene: Scene) -> None:
    scheduler, workers = scene.group()
    lead(scheduler, workers, commit=False)
    ticket = scheduler.ask("begun.ticket")
    for worker in workers[:3]:
        worker.do(f"member.record({ticket}); member.ping()")
    until(lambda: scene.facts()["sessions"][0]["oldest_event"]["shards"] == [3])
    kill(workers[3])
    with pytest.raises(SessionEnded):
        scheduler.do("begun.wait()")
    still_fenced(scene, 16, {worker.pid for worker in workers[:3]})
    for worker in workers[:3]:
        kill(worker)
    assert reclaimed(scene, workers[2]) < WITHIN_S
    scheduler.do("cache.close()")
    check_whole(scene, 0)


# -- cases ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("registered_only", [False, True])
def test_a07_a_killed_client_leaves_nothing_behind_and_a_new_one_attaches_at_once(
    scene: Scene, registered_only: bool
) -> None:
    runner = scene.runner()
    descriptors = len(os.listdir(f"/proc/{scene.daemon.pid}/fd"))
    if not registered_only:
        runner.do(f"lease = cache.acquire({TOKENS}); lease.commit(); lease.release(wait=True)")
        runner.do("lock = cache.acquire(list(range(16))); orphan = cache.acquire(list(range(200, 212)))")
        scene.daemon.settle()
        assert {name: device(scene.facts())[name] for name in ("locked", "leased")} == {"locked": 4, "leased": 3}
    ended, freed = scene.facts()["counters"]["sessions_ended"], device(scene.facts())["free"]
    kill(runner)
    assert until(lambda: scene.facts()["sessions"] == []) < 1.0
    facts = scene.facts()
    assert facts["counters"]["sessions_ended"] == ended + 1
    assert device(facts)["free"] == freed + (0 if registered_only else 3)
    until(lambda: len(os.listdir(f"/proc/{scene.daemon.pid}/fd")) < descriptors)
    check_whole(scene, 0 if registered_only else 64)


def test_a08_no_pin_or_hit_that_came_to_nothing_stays_with_ends_doubled_and_runners_killed(scene: Scene) -> None:
    """While another works. At the end all of the host can be had by who comes then."""
    one, two = list(range(64)), list(range(30_000, 30_064))
    scene.put(range(64), 3)
    scene.daemon.settle()
    with scene.daemon.client() as client, scene.daemon.client() as other:
        victims = [scene.runner() for _ in range(10)]
        for number in range(100):
            dies = number % 10 == 9
            if dies:
                victim = victims.pop()
                victim.do(f"cache.pin({TOKENS}, 'me', 60); lease = cache.acquire({TOKENS})")
            client.pin(one, f"request {number}", 60)
            other.pin(one, f"request {number}", 60)  # of the same name and pages, and not the same
            lease = client.acquire(one)
            with other.acquire(two) as busy:
                busy.commit()
            if dies:
                kill(victim)
                until(lambda: gauge(scene, "num_leases") == 1)
            lease.cancel()
            lease.cancel()
            assert client.unpin(f"request {number}") == 16
            assert client.unpin(f"request {number}") == 0
            assert gauge(scene, "pinned_pages") == 16, "the other's"
            assert other.unpin(f"request {number}") == 16
        assert gauge(scene, "pinned_pages") == 0
        new = range(60_000, 60_000 + P * PAGES)  # twice that is the host
        for tokens in (new, range(70_000, 70_000 + P * PAGES)):
            with client.acquire(tokens) as lease:
                lease.commit()
            scene.daemon.settle()
        with scene.daemon.admin() as admin:
            admin.clear("device")
        assert client.peek(new).matched_tokens == len(new)
    scene.daemon.settle()
