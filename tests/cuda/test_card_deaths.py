"""Whoever dies, with pages on cards: a runner while its kernels write, a worker, the rank, the supervisor.

Laws 8, 9 and 12, on real processes and SIGKILL. What a process has of a card goes with it, and not before.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import JUNK, World, check, evict, heartbeats, ids, put, until

from sglcache.client import Client
from sglcache.errors import ConfigError, DaemonRestarted, NoSpace, SessionEnded
from sglcache.testing.cards import CardArray, Gate
from sglcache.testing.daemon import Daemon, Puppet

pytestmark = pytest.mark.daemons

P, PAGES = 4, 16
TOKENS = range(1000, 1000 + PAGES * P)
QUICK = {"first_wait": 0.01, "longest_wait": 0.05}
SMALL = {"pool": {"num_tokens": P * PAGES}, "host": {"num_tokens": P * 64}}

RUNNER = """
cache = Client(socket, streams=port.streams)
contents = Contents(cache, port.layers)
"""
SCRIBBLE = """
view = cache.pool
size = cache.geometry.page_bytes
with card.on(0):
    for slot in lease.slots.tolist():
        stream = card.stream()
        card.scribble(view.memory.address + slot * size, size // 8, 60.0, stream)
"""


@pytest.fixture(scope="module")
def served(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """It dies often here, and everything that it had is gone in the end."""
    before = world.used()
    with world.daemon(tmp_path_factory.mktemp("rank"), timing=QUICK, **SMALL) as daemon:
        yield daemon
    gc.collect()
    until(lambda: world.is_back(before))


@pytest.fixture(autouse=True)
def _nothing_leaks(world: World, served: Daemon) -> Iterator[None]:
    """Of this process's descriptors, and of a card's memory: one pool is the rank's. And nothing is cached before."""
    served.settle()
    with served.admin() as admin:
        admin.clear()
    gc.collect()
    descriptors, used = len(os.listdir("/proc/self/fd")), world.used()
    yield
    gc.collect()
    until(lambda: world.is_back(used) and len(os.listdir("/proc/self/fd")) <= descriptors)


@contextlib.contextmanager
def runner(world: World, daemon: Daemon) -> Iterator[Puppet]:
    with world.puppet(daemon) as puppet:
        puppet.do(RUNNER)
        yield puppet


# -- runners -------------------------------------------------------------------------------------------------------


def test_pages_that_a_dead_session_s_kernel_writes_are_nobody_s_until_its_process_is_gone(
    world: World, served: Daemon
) -> None:
    """The socket is gone, and the process is not: its kernel writes on."""
    with runner(world, served) as puppet, world.client(served) as client:
        puppet.do(f"lease = cache.acquire(list(range({8 * P})))")
        slots = puppet.ask("lease.slots.tolist()")
        puppet.do(SCRIBBLE)
        puppet.do("import socket as s; s.socket(fileno=os.dup(cache.fileno())).shutdown(s.SHUT_RDWR)")
        until(lambda: served.pool()["fenced"] == 8)
        pages = whole(world, client)
        until(lambda: (pages[slots] != JUNK).all(), 5.0)
        rest = range(2000, 2000 + 8 * P)
        for number in range(20):
            with pytest.raises(NoSpace):
                client.acquire(range(3000, 3000 + 9 * P))
            tokens = range(rest.start + 1000 * number, rest.stop + 1000 * number)
            put(world.port, client, tokens)
            check(world.port, client, tokens, host_tokens=0)
        assert served.pool()["fenced"] == 8
        pidfd = puppet.kill()
        assert select.select([pidfd], [], [], 10)[0]
        os.close(pidfd)
        until(lambda: served.pool()["fenced"] == 0)
        put(world.port, client, TOKENS)
        check(world.port, client, TOKENS, host_tokens=0)


def whole(world: World, client: Client) -> CardArray:
    """The pool's pages, each a row of words."""
    memory, size = client.pool.memory, client.geometry.page_bytes
    array = CardArray(world.port, memory, (client.geometry.num_pages, size), 0, (size, 1))
    return array.view("<u8")


def test_a_runner_s_death_frees_what_its_kernel_wrote_and_what_it_had_of_the_card(world: World, served: Daemon) -> None:
    for _ in range(3):
        with runner(world, served) as puppet, world.client(served) as client:
            puppet.do(f"lease = cache.acquire(list(range({PAGES * P})))")
            puppet.do(SCRIBBLE)
            os.close(puppet.kill())
            lease = client.acquire(TOKENS, wait_s=10)
            contents = world.contents(client)
            contents.write(lease, ids(TOKENS), 0, len(TOKENS))
            lease.commit()
            for _ in range(5):
                contents.check_pages("written", lease, ids(TOKENS), len(TOKENS))
            lease.release()


def test_a_worker_s_death_ends_the_session_and_its_pages_wait_for_the_others(world: World, served: Daemon) -> None:
    with runner(world, served) as puppet, world.client(served, role="scheduler") as scheduler:
        puppet.do("cache.close()")
        token = scheduler.token.hex()
        puppet.do(f"cache = Worker(bytes.fromhex('{token}'), 0, socket, streams=port.streams)")
        lease = scheduler.acquire(TOKENS)
        puppet.do("class Lease: pass")
        puppet.do(f"lease = Lease(); lease.slots = np.array({lease.slots.tolist()})")
        puppet.do(SCRIBBLE)
        os.close(puppet.kill())
        with pytest.raises(SessionEnded):
            until(lambda: scheduler.ping() is not None)
        until(lambda: served.pool()["fenced"] == 0)
        scheduler.reattach()
        with world.worker(served, scheduler.token, 0) as worker:
            lease = scheduler.acquire(TOKENS)
            world.contents(worker).write(lease, ids(TOKENS), 0, len(TOKENS))
            begun = lease.commit_begin()
            worker.record(begun.ticket)
            begun.wait()
            world.contents(worker).check_pages("written", lease, ids(TOKENS), len(TOKENS))
            released = lease.release_begin()
            worker.record(released.ticket)


def test_a_client_that_leaves_while_its_streams_wait_for_a_load_waits_for_them(world: World, served: Daemon) -> None:
    """The words that they look at are the driver's until then: else the process would lose the card."""
    with runner(world, served) as puppet:
        with world.client(served) as client:
            put(world.port, client, TOKENS)
            evict(served, world.port, client)
        with world.copies_held(served):
            puppet.do(f"lease = cache.acquire(list(range({TOKENS.start}, {TOKENS.stop})))")
            puppet.do("lease.wait_loaded(on_stream=True)")
            puppet.begin("cache.close()")
            until(lambda: not served.status()["sessions"] or served.status()["sessions"][0]["ended"])
        puppet.finish()
        puppet.do(
            "port.finish(); cache = Client(socket, streams=port.streams); contents = Contents(cache, port.layers)"
        )
        puppet.do(f"lease = cache.acquire(list(range({TOKENS.start}, {TOKENS.stop})))")
        puppet.do(f"lease.wait_loaded(); contents.check_match(lease, ids({TOKENS.start}, {TOKENS.stop}))")


def test_a_pool_is_let_go_of_without_waiting_where_its_last_tensor_was(world: World, served: Daemon) -> None:
    """That may be in a collector's run, amid what the kernels wait for."""
    used = world.used()
    with world.client(served) as client:
        rows = whole(world, client)
    with Gate(world.port) as gate:
        gate.hold()
        rows[0] = 1
        del rows, client
        gc.collect()
        assert world.port.is_busy(), "nobody waited"
        gate.open()
        until(lambda: world.is_back(used))
        world.port.finish()


def test_pages_of_whoever_left_come_back_when_its_kernels_are_done_and_not_before(world: World, served: Daemon) -> None:
    """Its process lives on: the event of its goodbye is enough."""
    with runner(world, served) as puppet:
        puppet.do(f"lease = cache.acquire(list(range({8 * P})))")
        puppet.do("from sglcache.testing.cards import Gate; gate = Gate(port); gate.hold()")
        puppet.do("contents.write(lease, ids(0, 8), 0, 8)")
        puppet.do("import threading; closing = threading.Thread(target=cache.close); closing.start()")
        until(lambda: served.pool()["fenced"] == 8)
        heartbeats(served)
        assert served.pool()["fenced"] == 8
        puppet.do("gate.open(); closing.join()")
        until(lambda: served.pool()["fenced"] == 0)


def test_a_fork_of_a_runner_touches_no_card(world: World, served: Daemon) -> None:
    with runner(world, served) as puppet:
        puppet.do(f"stop = {8 * P}; lease = cache.acquire(list(range(stop))); pool = cache.pool")
        puppet.do("contents.write(lease, ids(0, stop), 0, stop)")
        puppet.do("""
child = os.fork()
if child == 0:
    code = 1
    try:
        cache.ping()
    except sglcache.errors.ClosedError:
        del pool, contents, lease, cache
        import gc
        gc.collect()
        code = 0
    os._exit(code)
""")
        assert puppet.ask("os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])") == 0
        puppet.do("lease.commit(); contents.check_pages('written', lease, ids(0, stop), stop)")
        puppet.do("lease.release(wait=True)")


def test_a_pool_stays_mapped_until_what_was_launched_on_it_is_done(world: World, served: Daemon) -> None:
    """Whoever drops the last tensor need not have waited for its kernels."""
    with runner(world, served) as puppet:
        puppet.do("rows = port.layers(cache.pool)[0][0]; cache.close()")
        puppet.do("port.spin(0.2); rows[0, 0] = 1; del rows, contents, cache; import gc; gc.collect()")
        puppet.do("port.finish()")


# -- the rank ------------------------------------------------------------------------------------------------------


def test_streams_that_wait_for_a_load_go_on_when_the_rank_is_dead(world: World, served: Daemon) -> None:
    with world.client(served) as client:
        put(world.port, client, TOKENS)
        evict(served, world.port, client)
        with world.copies_held(served):
            lease = client.acquire(TOKENS)
            assert lease.host_tokens == len(TOKENS)
            lease.wait_loaded(on_stream=True)
            assert world.soft is None or world.port.is_busy()
            pid = served.kill_rank()
            until(lambda: not world.port.is_busy())
        for verb in (lease.wait_loaded, lease.commit, lambda: client.wait_loaded((0, 1))):
            with pytest.raises(DaemonRestarted):
                verb()
        served.next_life(pid)
        client.reattach()
        check(world.port, client, TOKENS, host_tokens=len(TOKENS))


def test_the_next_life_has_new_pools_and_the_old_are_whoever_s_has_them(world: World, served: Daemon) -> None:
    """An old pool's memory goes with the last who looks at it, and not before."""
    used = world.used()
    with world.client(served) as client:
        put(world.port, client, TOKENS)
        served.settle()
        lease = client.acquire(TOKENS)
        array, slots = whole(world, client), lease.slots
        before = array[slots]
        served.next_life(served.kill_rank())
        with pytest.raises(DaemonRestarted):
            client.ping()
        client.reattach()
        check(world.port, client, TOKENS, host_tokens=len(TOKENS))
        put(world.port, client, range(5000, 5000 + 8 * P))
        assert np.array_equal(array[slots], before), "what is still looked at is as it was"
        assert array.memory.address != client.pool.memory.address
        assert world.soft is None or world.used() == used + client._welcome.pools[0].mapped_bytes  # type: ignore[union-attr]
        array[slots] = JUNK
        check(world.port, client, TOKENS)
        del array, lease
        gc.collect()
        until(lambda: world.is_back(used))
        check(world.port, client, TOKENS)


@pytest.fixture
def full(world: World, tmp_path: Path) -> Iterator[tuple[Daemon, Client]]:
    """A daemon on a card with room for one pool, and a runner whose TOKENS are on the host as well."""
    world.only_software()
    room = {"SOFTCUDA_MEMORY": str(world.used() + (3 << 20))}
    with (
        world.daemon(tmp_path, environment=room, timing=QUICK, **SMALL) as daemon,
        world.client(daemon) as client,
    ):
        put(world.port, client, TOKENS)
        daemon.settle()
        yield daemon, client


def test_a_next_life_that_finds_the_card_full_says_so_and_comes_once_it_is_not(
    world: World, full: tuple[Daemon, Client]
) -> None:
    """Its host tier is there again, too: what a runner keeps of the old pool costs the device's pages alone."""
    daemon, client = full
    kept: list[Any] = [client.pool.memory]
    pid = daemon.kill_rank()
    until(lambda: "does not fit on card 0" in daemon.said(), 20.0)
    assert "pool.size" in daemon.said()
    assert daemon.row["state"] != "ok"
    with pytest.raises(DaemonRestarted):
        client.ping()
    client.close()
    kept.clear()
    gc.collect()
    daemon.next_life(pid)
    with world.client(daemon) as again:
        check(world.port, again, TOKENS, host_tokens=len(TOKENS))


def test_a_next_life_finds_the_room_of_a_runner_that_waits_for_it(world: World, full: tuple[Daemon, Client]) -> None:
    """It kept the dead life's pool by its descriptor, until there was a next life, which it kept from being."""
    daemon, client = full
    daemon.kill_rank()
    gc.collect()
    client.reattach(20.0)
    check(world.port, client, TOKENS, host_tokens=len(TOKENS))


def test_a_next_life_on_a_card_that_the_runner_does_not_see_is_told_and_can_be_left(
    world: World, tmp_path: Path
) -> None:
    world.need(cards=2)
    soft = world.only_software()
    tokens = f"list(range({8 * P}))"
    daemon = world.daemon(tmp_path, **SMALL)
    with world.puppet(daemon, {**soft.environment, "CUDA_VISIBLE_DEVICES": "0"}) as puppet:
        puppet.do(RUNNER + f"lease = cache.acquire({tokens}); contents.write(lease, ids(0, 32), 0, 32); lease.commit()")
        daemon.stop()
        with world.daemon(tmp_path, **{**SMALL, "pool": {**SMALL["pool"], "gpus": [1]}}):
            for _ in range(2):
                with pytest.raises(DaemonRestarted):
                    puppet.do("cache.ping()")
                with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
                    puppet.do("cache.reattach()")
        with world.daemon(tmp_path, **SMALL):
            puppet.do("cache.reattach(); lease = cache.acquire([*range(32)])")
            puppet.do(
                "contents = Contents(cache, port.layers); contents.write(lease, ids(0, 32), 0, 32); lease.commit()"
            )
            puppet.do("contents.check_pages('written', lease, ids(0, 32), 32); lease.release(wait=True)")


def test_the_supervisor_s_death_is_the_rank_s_and_gives_all_back(world: World, tmp_path: Path) -> None:
    used = world.used()
    daemon = world.daemon(tmp_path, **SMALL)
    with runner(world, daemon) as puppet:
        puppet.do(
            f"lease = cache.acquire(list(range({8 * P}))); view = cache.pool; contents.write(lease, ids(0, 8), 0, 8)"
        )
        assert not world.is_back(used) or world.soft is None
        daemon.kill()
        with pytest.raises(DaemonRestarted):
            puppet.do("cache.ping()")
        puppet.do("cache.close(); del view, cache, contents, lease; import gc; gc.collect()")
        until(lambda: world.is_back(used))


def test_a_rank_that_is_asked_to_end_gives_all_back(world: World, served: Daemon) -> None:
    with world.client(served) as client:
        put(world.port, client, TOKENS)
        served.next_life(served.kill_rank(signal.SIGTERM))
        with pytest.raises(DaemonRestarted):
            client.ping()
        client.reattach()
        put(world.port, client, TOKENS)
        check(world.port, client, TOKENS)
