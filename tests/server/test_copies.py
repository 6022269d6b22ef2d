"""Copies between tiers through a real daemon: order, layers, memory, what hangs, and what /health and status say."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sglcache.client import Client, Lease
from sglcache.errors import TransferError
from sglcache.memory.rings import EventRing
from sglcache.server.watch import WORDS
from sglcache.testing import copies
from sglcache.testing.daemon import Daemon, until

pytestmark = pytest.mark.daemons

P = 4  # tokens of a page


def fill(client: Client, lease: Lease, value: float) -> None:
    slots = lease.slots.tolist()
    for layer, (k, v) in enumerate(zip(client.pool.k, client.pool.v, strict=True)):
        k[slots] = value + layer
        v[slots] = -value - layer


def holds(client: Client, lease: Lease, value: float, layer: int | None = None) -> bool:
    slots = lease.slots.tolist()
    return all(
        bool((client.pool.k[each][slots] == value + each).all())
        and bool((client.pool.v[each][slots] == -value - each).all())
        for each in (range(client.geometry.num_layers) if layer is None else [layer])
    )


def put(client: Client, tokens: list[int], value: float) -> None:
    with client.acquire(tokens) as lease:
        fill(client, lease, value)
        lease.commit()


def prompt(number: int, num_pages: int) -> list[int]:
    first = 1_000 * number
    return list(range(first, first + P * num_pages))


def copies_of(daemon: Daemon, name: str) -> dict[str, float]:
    found: dict[str, float] = next(lane for lane in daemon.status()["copies"] if lane["name"] == name)
    return found


# -- A10: the host pages of a load-back stay while it reads them --------------------------------------------


@pytest.fixture
def gate(folder: Path) -> Path:
    return folder / "gate"


def crowd(client: Client, tokens: list[int]) -> None:
    """Have others leave the device for it, and leave nothing."""
    client.acquire(tokens).release(wait=True)


@pytest.fixture
def small(folder: Path, gate: Path) -> Iterator[Daemon]:
    """16 pages on the device, 8 on the host; loads wait for the gate, layer by layer."""
    with Daemon(
        folder,
        prelude=copies.gate(gate, "load"),
        pool={"num_tokens": P * 16, "num_layers": 3},
        host={"num_tokens": P * 8},
    ) as daemon:
        yield daemon


def test_host_pages_are_not_given_away_while_a_load_back_reads_them(small: Daemon, gate: Path) -> None:
    wanted = prompt(1, 4)
    with small.client() as client:
        put(client, wanted, 5)
        small.settle()
        put(client, prompt(2, 4), 6)
        small.settle()
        crowd(client, prompt(3, 14))
        small.settle()
        assert client.peek(wanted)[:2] == (0, len(wanted)), "on the host alone"
        before = small.pool("HOST")
        lease = client.acquire(wanted)
        assert lease.host_tokens == len(wanted)
        # Others need all that the host has while the copy stands.
        for number in range(4, 12):
            put(client, prompt(number, 8), number)
        # Their backups go on or are skipped; the four pages are locked, and what is there are still their bytes.
        assert small.pool("HOST")["locked"] >= 4
        assert small.pool("HOST")["total"] == before["total"] == 8
        assert small.status()["gauges"]["num_copies"] >= 1
        gate.touch()
        lease.wait_loaded()
        assert holds(client, lease, 5)
        lease.release()
    small.settle()
    assert small.pool("HOST")["locked"] == 0


def test_a_load_back_that_fails_gives_every_lock_back_and_the_host_page_is_good(small: Daemon, gate: Path) -> None:
    wanted = prompt(1, 4)
    with small.client() as client:
        put(client, wanted, 5)
        small.settle()
        crowd(client, prompt(3, 14))
        small.settle()
        lease = client.acquire(wanted)
        assert lease.host_tokens == len(wanted)
        gate.with_name("gate.fail").touch()
        (gate.parent / "gate.0").touch()
        with pytest.raises(TransferError):
            lease.wait_loaded(0)
        lease.abort()
        gate.touch()
        small.settle()
        assert small.pool("HOST")["locked"] == 0
        assert copies_of(small, "load")["failed"] == 1
        gate.with_name("gate.fail").unlink()
        with client.acquire(wanted) as again:
            again.wait_loaded()
            assert holds(client, again, 5)


# -- layer by layer -----------------------------------------------------------------------------------------


def test_a_layer_is_readable_while_the_next_is_held_back(small: Daemon, gate: Path) -> None:
    wanted = prompt(1, 4)
    with small.client() as client:
        put(client, wanted, 5)
        small.settle()
        crowd(client, prompt(3, 14))
        small.settle()
        lease = client.acquire(wanted)
        loads = client._loads
        assert loads is not None
        assert lease.load is not None
        for layer in range(3):
            assert not loads.done(*lease.load, layer)
            (gate.parent / f"gate.{layer}").touch()
            lease.wait_loaded(layer)
            assert holds(client, lease, 5, layer)
            assert [loads.done(*lease.load, each) for each in range(3)] == [each <= layer for each in range(3)]
            if layer < 2:
                assert small.status()["gauges"]["num_copies"] == 1, "the load's ack is after its last layer"
        small.settle()
        lease.release()
        assert client.peek(wanted)[:2] == (len(wanted), len(wanted))


def test_a_worker_computes_with_the_first_layers_while_the_last_are_on_their_way(small: Daemon, gate: Path) -> None:
    wanted = prompt(1, 4)
    with small.client() as client:
        put(client, wanted, 5)
        small.settle()
        crowd(client, prompt(3, 14))
        small.settle()
    with small.client(role="scheduler") as scheduler, small.worker(scheduler.token, 0) as worker:
        lease = scheduler.acquire(wanted)
        assert lease.load is not None
        (gate.parent / "gate.0").touch()
        worker.wait_loaded(lease.load, 0)
        slots = lease.slots.tolist()
        assert bool((worker.pool.k[0][slots] == 5).all())
        gate.touch()
        worker.wait_loaded(lease.load)
        released = lease.release_begin()
        worker.record(released.ticket)
        released.wait()


# -- A11: a copy to the host begins after the runner's event ------------------------------------------------


class Late(EventRing):
    """Events of a runner that writes late: `compute` runs between what is sent and what is done."""

    def __init__(self, num_events: int = 64) -> None:
        super().__init__(num_events)
        self.held: list[tuple[int, int]] = []

    def record_unrung(self) -> tuple[int, int]:
        event = self.reserve()
        self.held.append(event)
        return event

    def let_go(self) -> None:
        for event in self.held:
            self.complete(*event)
        self.held.clear()


@pytest.mark.parametrize("layouts", [("page_first", "page_first"), ("layer_first", "page_first")], ids="-".join)
def test_what_a_runner_writes_after_its_commit_was_sent_is_what_the_host_has(
    folder: Path, layouts: tuple[str, str]
) -> None:
    rounds, events = 60, Late()
    with (
        Daemon(
            folder,
            pool={"num_tokens": P * 16, "layout": layouts[0]},
            host={"num_tokens": P * 4 * (rounds + 4), "layout": layouts[1]},
        ) as daemon,
        daemon.client(ring=events) as client,
    ):
        for number in range(rounds):
            lease = client.acquire(prompt(number, 4))
            fill(client, lease, 999)  # what was there before the kernel is over
            pending = lease.commit_begin()
            assert not pending.done
            assert client.peek(prompt(number, 4))[:2] == (0, 0), "no tier has what is not written"
            fill(client, lease, number)
            events.let_go()
            pending.wait()
            lease.release()
            events.let_go()
        daemon.settle()
        assert copies_of(daemon, "backup")["pages"] == 4 * rounds
        wrong = []
        for number in range(rounds - 4):  # the last ones are on the device still
            lease = client.acquire(prompt(number, 4))
            assert lease.matched_tokens == P * 4
            lease.wait_loaded()
            if not holds(client, lease, number):
                wrong.append(number)
            lease.release()
            events.let_go()
        assert wrong == []
        assert copies_of(daemon, "load")["pages"] >= 4 * (rounds - 8)


# -- what hangs ---------------------------------------------------------------------------------------------


def test_a_copy_that_hangs_keeps_its_pages_and_its_age_is_told(folder: Path) -> None:
    gate = folder / "backups"
    with (
        Daemon(folder, prelude=copies.gate(gate, "backup"), http={"enabled": True, "port": 0}) as daemon,
        daemon.client() as client,
    ):
        put(client, prompt(1, 8), 5)
        until(lambda: copies_of(daemon, "backup")["oldest_s"] > 0.05)
        lane = copies_of(daemon, "backup")
        assert (lane["in_flight"], lane["copies"], lane["bytes"]) == (1, 0, 0)
        assert daemon.pool("DEVICE")["locked"] == 8
        with urllib.request.urlopen(f"{daemon.info['http']}/metrics") as answer:
            page = answer.read().decode()
        assert 'sglcache_copies_in_flight{direction="backup",rank="0"} 1.0' in page
        assert 'sglcache_copied_bytes_total{direction="load",rank="0"} 0.0' in page
        assert 'sglcache_memory_ready_bytes{rank="0",tier="host"}' in page
        # Loads and commits go on meanwhile.
        put(client, prompt(2, 8), 6)
        gate.touch()
        daemon.settle()
        lane = copies_of(daemon, "backup")
        assert (lane["in_flight"], lane["oldest_s"], lane["pages"]) == (0, 0, 16)
        assert lane["bytes"] == 16 * P * client.geometry.token_bytes


def test_a_drain_does_not_wait_for_a_copy_that_hangs_for_ever(folder: Path) -> None:
    prelude = f"""{copies.gate(folder / "never", "backup")}
from sglcache.server import rank
rank.DRAIN_S = rank.CLOSE_S = 0.2
"""
    daemon = Daemon(folder, prelude=prelude)
    with daemon.client() as client:
        put(client, prompt(1, 8), 5)
    assert daemon.stop() == 0
    assert "1 copies and 0 stores are still in flight" in daemon.said()
    assert "a copy is still being made" in daemon.said()


# -- the host tier's memory ---------------------------------------------------------------------------------


HOLD_MEMORY = """
def plant(path):
    import os, threading
    from sglcache.memory import filling
    from sglcache.memory.pools import Pool
    filling.CHUNK_BYTES = 1
    filling.MAX_CHUNKS = 4
    populate = Pool.populate
    def held(self, first, stop):
        while not os.path.exists(f"{path}.{first}"):
            threading.Event().wait(0.002)
        if os.path.exists(path + ".fail"):
            raise OSError(12, "planted")
        populate(self, first, stop)
    Pool.populate = held
"""


def memory(daemon: Daemon) -> tuple[int, int]:
    host = daemon.status()["memory"]["HOST"]
    return host["ready_bytes"], host["bytes"]


def test_a_daemon_serves_at_once_and_its_host_tier_grows(folder: Path) -> None:
    path = folder / "memory"
    with (
        Daemon(
            folder,
            prelude=f"{HOLD_MEMORY}\nplant({str(path)!r})\n",
            host={"num_tokens": P * 16, "populate": True},
            http={"enabled": True, "port": 0},
        ) as daemon,
        daemon.client() as client,
    ):
        total = 16 * P * client.geometry.token_bytes
        assert memory(daemon) == (0, total)
        assert daemon.row["tiers"]["HOST"] == {"ready_bytes": 0, "bytes": total}
        put(client, prompt(1, 6), 5)
        assert daemon.settle()["counters"]["backup_pages_skipped"] == 6
        (folder / "memory.0").touch()
        until(lambda: memory(daemon) == (total // 4, total))
        assert daemon.pool("HOST")["cached"] == 0, "it holds four pages; the prompt has six"
        (folder / "memory.4").touch()
        until(lambda: memory(daemon) == (total // 2, total))
        # What found no room is tried again, without anybody asking.
        until(lambda: daemon.pool("HOST")["cached"] == 6)
        for first in (8, 12):
            (folder / f"memory.{first}").touch()
        until(lambda: memory(daemon) == (total, total))
        until(lambda: daemon.row["tiers"]["HOST"]["ready_bytes"] == total)
        assert daemon.pool("HOST")["total"] == 16
        until(lambda: daemon.ask("/health")["ranks"][0]["tiers"]["DEVICE"]["ready_bytes"] > 0)


def test_memory_that_the_machine_has_not_got_leaves_a_smaller_tier(folder: Path) -> None:
    path = folder / "memory"
    with (
        Daemon(
            folder, prelude=f"{HOLD_MEMORY}\nplant({str(path)!r})\n", host={"num_tokens": P * 16, "populate": True}
        ) as daemon,
        daemon.client() as client,
    ):
        (folder / "memory.0").touch()
        until(lambda: daemon.pool("HOST")["total"] == 4)
        (folder / "memory.fail").touch()
        (folder / "memory.4").touch()
        until(lambda: "the host tier has 4 of 16 pages and gets no more" in daemon.said())
        until(lambda: WORDS["memory"] in daemon.ask("/health").get("reason", ""))
        facts = daemon.ask("/health")["ranks"][0]["troubles"][0]["facts"]
        assert (facts["pages"], facts["of"], "planted" in facts["why"]) == (4, 16, True)
        put(client, prompt(1, 4), 5)
        assert daemon.settle()["state"] == "ok"
        assert daemon.pool("HOST")["cached"] == 4


def test_a_daemon_ends_while_memory_is_still_being_had(folder: Path) -> None:
    slow = "from sglcache.memory import filling\nfilling.CHUNK_BYTES = 1\n"
    with Daemon(folder, prelude=slow, host={"num_tokens": P * 4096, "populate": True}) as daemon:
        assert daemon.status()["memory"]["DEVICE"]["ready_bytes"] > 0


def test_the_bytes_of_a_populated_tier_come_back(folder: Path) -> None:
    with (
        Daemon(
            folder, pool={"num_tokens": P * 16}, host={"num_tokens": P * 64, "populate": True, "copy_threads": 2}
        ) as daemon,
        daemon.client() as client,
    ):
        until(lambda: daemon.pool("HOST")["total"] == 64)
        for number in range(6):
            put(client, prompt(number, 8), number)
            daemon.settle()
        for number in range(6):
            with client.acquire(prompt(number, 8)) as lease:
                assert lease.matched_tokens == P * 8
                lease.wait_loaded()
                assert holds(client, lease, number)
                assert np.unique(lease.slots).size == 8
