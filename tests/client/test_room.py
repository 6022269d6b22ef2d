"""Pages for a part of the tokens, matches that were agreed on, a batch's extends, and leases that go back unused."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from sglcache.client import Client, Extension
from sglcache.errors import BadRequest, Changed, NoSpace, UnknownLease
from sglcache.testing.daemon import Daemon, Puppet

TOKENS = list(range(64))  # 16 pages
PAGES = 256


@pytest.fixture
def daemon(lend: Callable[..., Daemon]) -> Daemon:
    return lend()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with daemon.client() as client:
        yield client


def put(client: Client, tokens: object) -> None:
    with client.acquire(tokens) as lease:  # type: ignore[arg-type]
        lease.commit()


# -- pages for a part ---------------------------------------------------------------------------------------


def test_a_million_tokens_are_prefilled_in_chunks_as_far_as_a_small_pool_goes(daemon: Daemon, client: Client) -> None:
    """And what was computed before it was preempted is a hit when it comes back."""
    prompt = np.arange(1_000_000, dtype=np.uint32)
    put(client, prompt[:100])
    lease = client.acquire(prompt, limit=len(prompt) - 1, room=128)
    computed = lease.matched_tokens
    assert (computed, len(lease.slots)) == (100, 57)
    while computed + 128 <= 4 * PAGES:
        stop = computed + 128
        lease.extend(upto=stop)
        for k, v in zip(client.pool.k, client.pool.v, strict=True):
            pages = lease.slots[computed // 4 : stop // 4].tolist()
            k[pages], v[pages] = 1.0, 2.0
        with pytest.raises(BadRequest) as caught:
            lease.commit(stop + 1)
        assert (caught.value.have, caught.value.room) == (1_000_000, stop)
        assert lease.commit(stop).committed_tokens == stop
        computed = stop
    assert computed == 100 + 128 * 7
    with pytest.raises(NoSpace) as no_space:
        lease.extend(upto=computed + 128)
    assert (no_space.value.need, no_space.value.free) == (32, 7)
    lease.release()
    with client.acquire(prompt, room=0) as lease:
        assert lease.matched_tokens == computed
        assert len(lease.slots) == computed // 4
        assert daemon.pool()["leased"] == 0


def test_room_is_beyond_the_match_and_never_beyond_what_was_asked(client: Client) -> None:
    put(client, TOKENS[:32])
    for options, pages in (
        ({"room": 0}, 8),
        ({"room": 1}, 9),
        ({"room": 5}, 10),
        ({"room": 1000}, 16),
        ({"room": 1000, "reserve": 9}, 19),
        ({"room": 0, "limit": 10}, 2),
        ({"room": 8, "exact": 16}, 6),
    ):
        with client.acquire(TOKENS, **options) as lease:  # type: ignore[arg-type]
            assert len(lease.slots) == pages, options


def test_a_commit_without_a_number_is_of_what_has_pages(client: Client) -> None:
    with client.acquire(TOKENS, room=10) as lease:
        assert lease.commit().committed_tokens == 12
        lease.extend(upto=31)
        assert lease.commit(31).committed_tokens == 28
        lease.extend()
        assert lease.commit().committed_tokens == 64


# -- matches that were agreed on ------------------------------------------------------------------------------


def test_an_exact_match_or_changed_with_the_number(daemon: Daemon, client: Client) -> None:
    put(client, TOKENS[:32])
    with pytest.raises(Changed) as caught:
        client.acquire(TOKENS, exact=48)
    assert (caught.value.exact, caught.value.matched_tokens) == (48, 32)
    assert daemon.pool()["leased"] == 0
    for exact in (32, 16, 0):
        with client.acquire(TOKENS, exact=exact) as lease:
            assert lease.matched_tokens == exact
    for options in ({"exact": 3}, {"exact": 68}, {"exact": 8, "limit": 8}):
        with pytest.raises(BadRequest, match="exact"):
            client.acquire(TOKENS, **options)  # type: ignore[arg-type]


# -- a batch ------------------------------------------------------------------------------------------------


def test_a_step_of_a_batch_is_one_command(daemon: Daemon, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    leases = [client.acquire([n] * (4 + n % 4)) for n in range(40)]
    turns = daemon.status()["counters"]["turns"]
    before = [lease.slots.tolist() for lease in leases]
    for step in range(4):
        assert client.extend([(lease, [100 + step]) for lease in leases]) == [None] * 40
    assert daemon.status()["counters"]["turns"] - turns < 40
    for n, lease in enumerate(leases):
        assert lease.tokens.tolist() == [n] * (4 + n % 4) + [100, 101, 102, 103]
        assert lease.slots.tolist()[: len(before[n])] == before[n]
        assert len(lease.slots) == -(-len(lease.tokens) // 4)
    every = np.concatenate([lease.slots for lease in leases])
    assert len(np.unique(every)) == len(every)
    for lease in leases:
        lease.release()


def test_of_a_batch_those_go_on_for_whom_there_is_room(daemon: Daemon, client: Client) -> None:
    """What is preempted for the others is the runner's choice; then it asks for those alone."""
    leases = [client.acquire([n] * 4 * 40) for n in range(5)]
    results = client.extend([Extension(lease, [9] * 4 * (20 + n)) for n, lease in enumerate(leases)])
    assert [None if error is None else error.need for error in results] == [None, None, 22, 23, 24]
    assert isinstance(results[2], NoSpace)
    assert (results[2].free, results[2].promised) == (56, 41)
    assert [len(lease.slots) for lease in leases] == [60, 61, 40, 40, 40]
    assert [len(lease.tokens) for lease in leases] == [240, 244, 160, 160, 160]
    leases[4].release(wait=True)
    assert client.extend([(leases[2], [9] * 88), (leases[3], [9] * 92)]) == [None, None]
    for lease in leases[:4]:
        lease.release()


def test_an_item_that_is_wrong_costs_the_others_nothing(daemon: Daemon, client: Client) -> None:
    one, other, gone = (client.acquire([n] * 4) for n in range(3))
    gone.release()
    results = client.extend([(gone, [5]), (one, [5]), (one, [6]), (other, [5] * 4, 0, 4)])
    assert [type(each) for each in results] == [UnknownLease, type(None), BadRequest, type(None)]
    assert (one.tokens.tolist(), other.tokens.tolist()) == ([0] * 4 + [5], [1] * 4 + [5] * 4)
    assert (len(one.slots), len(other.slots)) == (2, 1)
    assert client.extend([]) == []
    one.release()
    other.release()


# -- unused -------------------------------------------------------------------------------------------------


def test_a_lease_that_nobody_was_told_of_goes_back_at_once(daemon: Daemon, client: Client) -> None:
    lease = client.acquire(TOKENS)
    lease.cancel()
    lease.cancel()
    lease.release()
    assert daemon.pool()["leased"] == 0
    with pytest.raises(UnknownLease):
        lease.commit()


def test_a_cancel_that_comes_too_late_is_refused(daemon: Daemon) -> None:
    with daemon.client(role="scheduler") as scheduler, Puppet(daemon.socket) as puppet:
        puppet.do(f"worker = Worker(bytes.fromhex('{scheduler.token.hex()}'), 0, socket)")
        lease = scheduler.acquire(TOKENS)
        lease.commit_begin()
        with pytest.raises(BadRequest, match="commits"):
            lease.cancel()
        assert not lease.ended
        fresh = scheduler.acquire([1] * 4)
        fresh.cancel()  # no worker need say anything, and no commit before it be done
        assert daemon.pool()["leased"] == 16
        puppet.process.kill()
    daemon.settle()


def test_a_cancel_waits_for_what_is_being_loaded(daemon: Daemon, client: Client) -> None:
    prompt = range(4 * 200)
    put(client, prompt)
    daemon.settle()
    client.clear("DEVICE")
    lease = client.acquire(prompt)
    assert lease.host_tokens == 800
    lease.cancel()
    assert client.peek(prompt).device_tokens == 800, "what was loaded is the cache's"
    assert daemon.pool()["leased"] == 0
