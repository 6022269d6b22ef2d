"""Each check of `sglcache fsck` finds nothing in what is sound, and what was planted in what is not."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglcache.client import fsck
from sglcache.core.index import HOST
from sglcache.core.l3 import Shelf
from sglcache.errors import BadRequest
from sglcache.memory.pools import DevicePools
from sglcache.server import checks
from sglcache.storage.file import FileStore
from sglcache.testing import lives
from sglcache.testing.daemon import Daemon
from sglcache.testing.lives import Lives
from sglcache.wire import control

pytestmark = pytest.mark.survive


def found_by(check: Callable[[list[str]], Iterator[int]]) -> list[str]:
    found: list[str] = []
    assert sum(check(found)) >= 0
    return found


@pytest.fixture
def world() -> Lives:
    """With pages on the host, companions, and everything told and noted."""
    world = lives.run(7, lives=2, steps=150, kind="unified", roomy=True)
    world.cut()
    assert world.journal.num_held(0) > 4
    return world


def test_what_random_programs_leave_is_sound(world: Lives) -> None:
    for seed, kind in enumerate(("full", "swa", "mamba", "unified")):
        one = world if kind == "unified" else lives.run(seed, lives=2, kind=kind)
        one.cut()
        assert found_by(lambda found, one=one: checks.books(one.index, found)) == []  # type: ignore[misc]
        assert found_by(lambda found, one=one: checks.digests(one.index, found)) == []  # type: ignore[misc]
        assert found_by(lambda found, one=one: checks.journal(one.index, one.journal, found)) == []  # type: ignore[misc]


def test_a_digest_that_is_off_is_found(world: Lives) -> None:
    log = world.index.log
    assert log is not None
    tally = next(tally for tally in log.tallies.values() if tally.count)
    tally.total ^= 1
    assert "with the sum" in found_by(lambda found: checks.digests(world.index, found))[0]
    tally.total ^= 1
    tally.count += 1
    assert found_by(lambda found: checks.digests(world.index, found))


def test_books_that_are_off_are_found(world: Lives) -> None:
    world.index.pools[0].cached += 1
    assert found_by(lambda found: checks.books(world.index, found))


def spoil_seqs(world: Lives, slot: int) -> None:
    world.journal._tables[0].clear(np.array([slot]))


def spoil_tokens(world: Lives, slot: int) -> None:
    table = world.journal._tables[0]
    rows = table.rows[[slot]].copy()
    rows["tokens"] += 1
    table.put(np.array([slot]), table.seqs[[slot]], rows)


def spoil_owner(world: Lives, slot: int) -> None:
    table = world.journal._tables[0]
    rows = table.rows[[slot]].copy()
    rows["owner"] = slot
    table.put(np.array([slot]), table.seqs[[slot]], rows)


def spoil_check(world: Lives, slot: int) -> None:
    world.journal._tables[0].rows["tokens"][slot] ^= 1


def spoil_more(world: Lives, slot: int) -> None:
    """A row of a slot that holds nothing."""
    table = world.journal._tables[0]
    place = np.flatnonzero(table.seqs == 0)[:1]
    world.journal._last_seq += 1
    table.number(place, np.array([world.journal._last_seq], np.uint64))
    table.put(place, table.seqs[place], table.rows[[slot]].copy())


def spoil_name(world: Lives, slot: int) -> None:
    world.journal._named.clear()


def spoil_companion(world: Lives, slot: int) -> None:
    table = next(table for table in world.journal._tables[1:] if table.seqs.any())
    table.clear(np.flatnonzero(table.seqs)[:1])


@pytest.mark.parametrize(
    "spoil", [spoil_seqs, spoil_tokens, spoil_owner, spoil_check, spoil_more, spoil_name, spoil_companion]
)
def test_a_journal_that_says_something_else_is_found(world: Lives, spoil: Callable[[Lives, int], None]) -> None:
    node = next(node for node in world.index.tree.nodes() if node.cells[HOST] and not node.writing >> HOST & 1)
    spoil(world, int(np.frombuffer(node.cells[HOST], "<i4")[0]))
    assert found_by(lambda found: checks.journal(world.index, world.journal, found))


def test_a_shelf_that_is_not_the_store_s_is_found() -> None:
    shelf = Shelf()
    for number in range(5):
        shelf.add(bytes([number]) * 16, None)
    held = {bytes([number]) * 16 for number in range(5)}

    class Store(FileStore):
        def __init__(self) -> None: ...

        def __contains__(self, digest: bytes) -> bool:
            return digest in held

        def stats(self) -> Any:
            return SimpleNamespace(num_pages=len(held))

    tier = SimpleNamespace(name="DISK")
    below: Any = SimpleNamespace(store=Store(), broken=False, ready=True, busy=False, tier=tier)
    index: Any = SimpleNamespace(l3=SimpleNamespace(shelf=shelf))
    assert found_by(lambda found: checks.third(index, below, found)) == []
    held.pop()
    assert len(found_by(lambda found: checks.third(index, below, found))) == 2
    below.busy = True
    with pytest.raises(checks.NotNow):
        found_by(lambda found: checks.third(index, below, found))


def test_a_session_without_anyone_is_found(world: Lives) -> None:
    world.index.open_session(1)
    attached: Any = SimpleNamespace(sessions=[], members=set())
    assert "nobody is attached" in "".join(found_by(lambda found: checks.sessions(world.index, attached, found)))


def test_a_member_whose_descriptors_are_something_else_is_found(world: Lives) -> None:
    pipe = os.pipe()
    try:
        member: Any = SimpleNamespace(
            session=1, gone=False, pidfd=pipe[0], pid=1, touches=True, ring=None, load_doorbell=pipe[1]
        )
        attached: Any = SimpleNamespace(sessions=[], members={1: member}.values())
        world.index.sessions.clear()
        assert len(found_by(lambda found: checks.sessions(world.index, attached, found))) == 3
    finally:
        for fd in pipe:
            os.close(fd)


def test_a_descriptor_that_nobody_owns_is_found() -> None:
    attached: Any = SimpleNamespace(members=())

    def open_ones() -> dict[str, int]:
        """What is open without an owner, by what it is; of tests before this one some may be."""
        words = found_by(lambda found: checks.descriptors(attached, 0, 0, found))
        return {each.partition(" descriptors of ")[2].split()[0]: int(each.split()[0]) for each in words}

    before = open_ones()
    pidfd, memfd = os.pidfd_open(os.getpid()), os.memfd_create("sglcache-leaked")
    try:
        assert open_ones() == {what: before.get(what, 0) + 1 for what in ("processes", "pieces")}
    finally:
        os.close(pidfd)
        os.close(memfd)


def test_memory_that_is_not_as_configured_is_found() -> None:
    geometry = checks_geometry()
    pools = DevicePools(geometry)
    try:
        assert found_by(lambda found: checks.pools_as_configured(pools, geometry.num_pages, True, found)) == []
        assert found_by(lambda found: checks.pools_as_configured(pools, geometry.num_pages + 1, True, found))
        pool = pools.shards[0]
        ours, pool.fd = pool.fd, os.memfd_create("sglcache-unsealed", os.MFD_ALLOW_SEALING)
        os.ftruncate(pool.fd, pool.num_bytes)
        assert fcntl.fcntl(pool.fd, fcntl.F_GET_SEALS) == 0
        found = found_by(lambda found: checks.pools_as_configured(pools, geometry.num_pages, True, found))
        assert "can be resized" in found[0]
        os.close(pool.fd)
        pool.fd = ours
    finally:
        pools.close()


def checks_geometry() -> Any:
    from sglcache.memory.geometry import Geometry

    return Geometry.from_wire(control.Geometry(4, 8, 2, 2, 8, 8, "float16", "page_first", 1, 8, "page_first", 0, 0))


def test_a_socket_that_lets_others_in_is_found(tmp_path: Any) -> None:
    path = tmp_path / "socket"
    assert "nobody can attach" in found_by(lambda found: checks.private(path, found))[0]
    path.touch(0o600)
    assert found_by(lambda found: checks.private(path, found)) == []
    path.chmod(0o660)
    assert "lets others in" in found_by(lambda found: checks.private(path, found))[0]


# -- on a live daemon -----------------------------------------------------------------------------------


def sglcache(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglcache", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_live_daemon_is_proved_with_all_that_it_has(lend: Callable[..., Daemon], tmp_path: Any) -> None:
    third = {"kind": "file", "path": str(tmp_path / "l3"), "size": "64 MB"}
    with Daemon(tmp_path / "daemon", storage=third) as daemon, daemon.client() as client:
        for number in range(8):
            with client.acquire(range(100 * number, 100 * number + 64), cache_salt=str(number % 3)) as lease:
                lease.commit()
        daemon.settle()
        with daemon.observer() as observer:
            results = fsck.fsck(observer, mirror=True)
        assert {each.name: each.result for each in results} == dict.fromkeys((*control.CHECKS, fsck.MIRROR), fsck.OK)
        assert all(each.checked for each in results)
        done = sglcache("fsck", "--socket", daemon.socket, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        told = json.loads(done.stdout)
        assert told["ok"]
        assert [each["name"] for each in told["ranks"][0]["checks"]] == list(control.CHECKS)
        with daemon.observer() as observer, pytest.raises(BadRequest, match="use books"):
            observer.check("everything")
    assert sglcache("fsck", "--socket", daemon.socket).returncode == 69


def test_what_is_wrong_is_told_and_is_an_exit_status(lend: Callable[..., Daemon], tmp_path: Any) -> None:
    plant = "import os\nos.memfd_create('sglcache-leaked')\n"
    with Daemon(tmp_path, prelude=plant) as daemon:
        os.chmod(daemon.socket, 0o660)
        done = sglcache("fsck", "--socket", daemon.socket)
        assert done.returncode == 1
        assert "lets others in" in done.stdout
        assert "have an owner" in done.stdout
