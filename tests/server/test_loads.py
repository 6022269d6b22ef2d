"""Load-backs: slots of the load ring, what a runner waits for, and loads that fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sglcache.client import Client, Lease
from sglcache.core.effects import Grant
from sglcache.errors import SessionEnded, TransferError
from sglcache.memory.engine import LoadPlace
from sglcache.server.loads import Load, Loads
from sglcache.testing import copies
from sglcache.testing.daemon import Daemon, until
from sglcache.units import LeaseId, SessionId, TicketId

PAGES = 64
PROMPT = list(range(4 * 40))  # 40 of 64 pages


def grant(ticket: int) -> Grant:
    return Grant(LeaseId(ticket), 8, 8, b"", TicketId(ticket))


def told(num_slots: int) -> tuple[Loads, list[tuple[Load, bool]]]:
    loads = Loads(num_slots)
    news: list[tuple[Load, bool]] = []
    loads.tell = lambda load, ok: news.append((load, ok))
    return loads, news


def test_each_use_of_a_slot_has_a_higher_generation() -> None:
    loads, news = told(2)
    seen: dict[int, int] = {}
    for ticket in range(10):
        load = loads.begin(SessionId(1), ticket, grant(ticket))
        assert load.place is not None
        assert load.place.generation > seen.get(load.place.slot, 0)
        seen[load.place.slot] = load.place.generation
        loads.end(TicketId(ticket), True)
        assert news.pop() == (load, True)


def test_a_load_without_a_slot_is_told_of_when_it_is_over() -> None:
    loads, news = told(1)
    first = loads.begin(SessionId(1), 1, grant(1))
    second = loads.begin(SessionId(2), 2, grant(2))
    assert (first.place, second.place, loads.num_parked) == (LoadPlace(0, 1), None, 1)
    loads.end(TicketId(2), True)
    assert news == [(second, True)]
    loads.end(TicketId(1), True)
    assert loads.begin(SessionId(1), 3, grant(3)).place == (0, 2)


def test_a_slot_whose_load_failed_is_not_used_again() -> None:
    loads, news = told(2)
    first = loads.begin(SessionId(1), 1, grant(1))
    loads.end(TicketId(1), False)
    assert news == [(first, False)]
    second = loads.begin(SessionId(1), 2, grant(2))
    assert first.place is not None
    assert second.place is not None
    assert second.place.slot != first.place.slot
    assert loads.begin(SessionId(1), 3, grant(3)).place is None


def test_copy_and_answer_name_one_slot_whichever_asks_first() -> None:
    loads, news = told(2)
    place = loads.place(TicketId(1))
    load = loads.begin(SessionId(1), 1, grant(1))
    assert (load.place, loads.place(TicketId(1))) == (place, place)
    loads.end(TicketId(1), True)
    assert news == [(load, True)]


def test_a_load_that_nobody_was_promised_gives_its_slot_back() -> None:
    loads, news = told(1)
    loads.place(TicketId(1))
    assert loads.place(TicketId(2)) is None
    loads.end(TicketId(2), True)
    loads.end(TicketId(1), True)
    assert news == []
    assert loads.place(TicketId(3)) == (0, 2)


def test_tickets_of_other_copies_are_nothing_to_it() -> None:
    loads, news = told(1)
    loads.end(TicketId(7), True)
    assert news == []


# -- a real daemon ------------------------------------------------------------------------------------------


@pytest.fixture
def gate(folder: Path) -> Path:
    """While it is not there, nothing is loaded."""
    return folder / "gate"


@pytest.fixture(params=[8], ids=lambda slots: f"{slots} slots")
def daemon(folder: Path, gate: Path, request: pytest.FixtureRequest) -> Iterator[Daemon]:
    with Daemon(
        folder,
        prelude=copies.gate(gate, "load"),
        pool={"num_tokens": 4 * PAGES},
        host={"num_tokens": 4 * 512},
        control={"num_load_slots": request.param},
    ) as daemon:
        yield daemon


def put(daemon: Daemon, client: Client, tokens: list[int], value: float) -> None:
    """Commit a prompt with known bytes, and have it on the host."""
    with client.acquire(tokens) as lease:
        fill(client, lease, value)
        lease.commit()
    daemon.settle()


def fill(client: Client, lease: Lease, value: float) -> None:
    for layer, (k, v) in enumerate(zip(client.pool.k, client.pool.v, strict=True)):
        k[lease.slots.tolist()] = value + layer
        v[lease.slots.tolist()] = -value - layer


def holds(client: Client, lease: Lease, value: float) -> bool:
    slots = lease.slots.tolist()
    return all(
        bool((k[slots] == value + layer).all()) and bool((v[slots] == -value - layer).all())
        for layer, (k, v) in enumerate(zip(client.pool.k, client.pool.v, strict=True))
    )


def demote(daemon: Daemon, client: Client) -> None:
    """Put PROMPT into both tiers, then push it off the device."""
    put(daemon, client, PROMPT, 5)
    put(daemon, client, list(range(1000, 1000 + 4 * 60)), 9)
    assert client.peek(PROMPT)[:2] == (0, len(PROMPT))


def test_a_host_hit_is_readable_once_the_ring_says_so(daemon: Daemon, gate: Path) -> None:
    with daemon.client() as client:
        demote(daemon, client)
        lease = client.acquire(PROMPT)
        assert (lease.matched_tokens, lease.host_tokens) == (len(PROMPT), len(PROMPT))
        assert lease.load is not None
        loads = client._loads
        assert loads is not None
        assert not loads.done(*lease.load, 0)
        gate.touch()
        for layer in range(client.geometry.num_layers):
            lease.wait_loaded(layer)
        lease.wait_loaded()
        assert holds(client, lease, 5)
        lease.release()
        assert daemon.status()["counters"]["load_pages"] == 40
        # It is the tree's now: the next hit needs no load.
        with client.acquire(PROMPT) as again:
            assert (again.matched_tokens, again.host_tokens, again.load) == (len(PROMPT), 0, None)
            again.wait_loaded()


def test_workers_wait_for_what_the_scheduler_was_granted(daemon: Daemon, gate: Path) -> None:
    with daemon.client() as client:
        demote(daemon, client)
    with daemon.client(role="scheduler") as scheduler, daemon.worker(scheduler.token, 0) as worker:
        lease = scheduler.acquire(PROMPT)
        assert lease.load is not None
        gate.touch()
        worker.wait_loaded(lease.load)
        released = lease.release_begin()
        worker.record(released.ticket)
        released.wait()


def test_a_dead_daemon_is_noticed_while_waiting(folder: Path, gate: Path) -> None:
    from sglcache.errors import Unavailable

    daemon = Daemon(
        folder, prelude=copies.gate(gate, "load"), pool={"num_tokens": 4 * PAGES}, host={"num_tokens": 2048}
    )
    with daemon.client() as client:
        demote(daemon, client)
        lease = client.acquire(PROMPT)
        daemon.kill()
        with pytest.raises(Unavailable):
            lease.wait_loaded()


@pytest.mark.parametrize("daemon", [1], indirect=True, ids=["1 slot"])
def test_a_load_beyond_the_slots_is_answered_when_it_is_there(daemon: Daemon, gate: Path) -> None:
    halves = [list(range(2000 + 100 * i, 2000 + 100 * i + 4 * 15)) for i in range(2)]
    with daemon.client() as one, daemon.client() as other:
        for value, half in enumerate(halves):
            put(daemon, one, half, 3 + value)
        put(daemon, one, list(range(1000, 1000 + 4 * 62)), 9)
        first = one.acquire(halves[0])
        assert first.load is not None
        begun = other.acquire_begin(halves[1])
        until(lambda: one.status()["counters"]["loads_parked"] == 1)
        assert not begun.done
        gate.touch()
        lease = begun.wait()
        assert (lease.matched_tokens, lease.host_tokens, lease.load) == (60, 60, None)
        lease.wait_loaded()
        assert holds(other, lease, 4)
        first.wait_loaded()
        assert holds(one, first, 3)
        lease.release()
        first.release()


def test_a_load_that_fails_is_told_to_who_waits_and_the_rank_goes_on(daemon: Daemon, gate: Path) -> None:
    with daemon.client() as client:
        demote(daemon, client)
        gate.with_name("gate.fail").touch()
        gate.touch()
        lease = client.acquire(PROMPT)
        with pytest.raises(TransferError):
            lease.wait_loaded()
        with pytest.raises(TransferError):
            lease.commit()
        lease.abort()
        gate.with_name("gate.fail").unlink()
        # The host's copy is good, and is tried again.
        with client.acquire(PROMPT) as lease:
            lease.wait_loaded()
            assert holds(client, lease, 5)
    status = daemon.settle()
    assert status["counters"]["loads_failed"] == 1
    assert status["state"] == "ok"
    assert "planted" in daemon.said()


@pytest.mark.parametrize("daemon", [1], indirect=True, ids=["1 slot"])
def test_a_failed_load_that_has_no_slot_ends_its_session(daemon: Daemon, gate: Path) -> None:
    with daemon.client() as client:
        demote(daemon, client)
        gate.with_name("gate.fail").touch()
        gate.touch()
        lease = client.acquire(PROMPT)
        with pytest.raises(TransferError):
            lease.wait_loaded()
        lease.abort()
        with pytest.raises((TransferError, SessionEnded)):
            client.acquire(PROMPT)


def test_pages_on_their_way_to_a_dead_runner_wait_for_the_copy(daemon: Daemon, gate: Path) -> None:
    from sglcache.testing.daemon import Puppet

    with Puppet(daemon.socket) as puppet:
        with daemon.client() as client:
            demote(daemon, client)
        puppet.do(f"cache = Client(socket); lease = cache.acquire(list(range({len(PROMPT)})))")
        puppet.process.kill()
        until(lambda: daemon.pool()["fenced"] == 40)
        assert daemon.status()["gauges"]["num_copies"] == 1
        gate.touch()
        until(lambda: daemon.pool()["fenced"] == 0)
    with daemon.client() as client, client.acquire(PROMPT) as lease:
        lease.wait_loaded()
        assert holds(client, lease, 5)
        assert np.unique(lease.slots).size == 40
