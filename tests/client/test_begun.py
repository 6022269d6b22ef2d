"""What is begun and waited for later: order, looking without waiting, named events, and what an answer frees."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglcache.client import Client, Event, Lease, Pending
from sglcache.errors import (
    BadRequest,
    Busy,
    Changed,
    ClosedError,
    NoSpace,
    SessionEnded,
    Unavailable,
    UnknownLease,
)
from sglcache.memory.rings import EventRing
from sglcache.testing import copies
from sglcache.testing.daemon import Daemon, Puppet, until

TOKENS = list(range(64))  # 16 pages
PAGES = 256


class Held(EventRing):
    """A runner's events, each done when the test says so."""

    def __init__(self, num_events: int = 64) -> None:
        super().__init__(num_events)
        self.held: dict[tuple[int, int], None] = {}

    def record_unrung(self) -> tuple[int, int]:
        event = self.reserve()
        self.held[event] = None
        return event

    def let_go(self, event: Event | None = None) -> None:
        """One event, or all that are held."""
        for each in list(self.held) if event is None else [event[:2]]:
            del self.held[each]
            self.complete(*each)


@pytest.fixture
def daemon(lend: Callable[..., Daemon]) -> Daemon:
    return lend()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with daemon.client() as client:
        yield client


def count_writes(client: Client, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of each write to the socket from now on."""
    sizes: list[int] = []
    send = client._connection._send_some

    def counted(data: bytes, flags: int = 0) -> int:
        sizes.append(len(data))
        return send(data, flags)

    monkeypatch.setattr(client._connection, "_send_some", counted)
    return sizes


# -- begun ------------------------------------------------------------------------------------------------


def test_every_verb_can_be_begun_and_waited_for_in_any_order(client: Client) -> None:
    peeked = client.peek_begin(TOKENS)
    acquired = [client.acquire_begin([n, *TOKENS], limit=8, reserve=4) for n in range(5)]
    leases = [pending.wait() for pending in reversed(acquired)][::-1]
    assert peeked.wait() == (0, 0, (0,))
    assert [lease.tokens[0] for lease in leases] == [0, 1, 2, 3, 4]
    assert all(len(lease.slots) == 18 for lease in leases)
    begun: list[Pending[Any]] = []
    for lease in leases:
        begun += [lease.extend_begin([7] * 3), lease.commit_begin(), lease.extend_begin(reserve=9)]
    ends = [leases[0].release_begin(), leases[1].abort_begin()]
    again = client.peek_begin([0, *TOKENS, 7, 7, 7])
    assert again.wait().matched_tokens == 68
    for pending in [*ends, *reversed(begun)]:
        pending.wait()
    for lease in leases[2:]:
        assert (len(lease.slots), len(lease.tokens)) == (20, 68)
        lease.release()


def test_what_was_begun_together_is_one_write_each_and_no_round_trip(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = count_writes(client, monkeypatch)
    received: list[int] = []
    receive = client._connection._receive

    def counted(flags: int = 0) -> bytes:
        received.append(flags)
        return receive(flags)

    monkeypatch.setattr(client._connection, "_receive", counted)
    peeks = [client.peek_begin([n, *TOKENS]) for n in range(20)]
    queue = [client.acquire_begin([n, *TOKENS], limit=4) for n in range(10)]
    assert len(sizes) == 30
    assert received == []
    assert [pending.wait() for pending in peeks] == [(0, 0, (0,))] * 20
    for pending in queue:
        pending.wait().release()
    assert len(received) < 30


def test_what_was_refused_raises_each_time_it_is_waited_for(client: Client) -> None:
    too_much, exact = client.acquire_begin(range(4 * 300)), client.acquire_begin(TOKENS, exact=32)
    for _ in range(2):
        with pytest.raises(NoSpace):
            too_much.wait()
        with pytest.raises(Changed):
            exact.wait()
    lease = client.acquire(TOKENS)
    lease.release()
    late: list[Pending[Any]] = [lease.extend_begin([1]), lease.commit_begin(), lease.release_begin()]
    for pending in late:
        with pytest.raises(UnknownLease):
            pending.wait()


def test_answers_overtake_each_other_and_nothing_is_waited_for_to_see_them(tmp_path: Path) -> None:
    """An acquire that waits for room, until a copy of ours is over, and others that need none."""
    gate = tmp_path / "gate"
    with Daemon(tmp_path / "daemon", prelude=copies.gate(gate, "backup")) as daemon, daemon.client() as client:
        assert client.poll() == []
        with client.acquire(range(4 * 200)) as lease:
            lease.commit()
        crowded = client.acquire_begin(range(10_000, 10_000 + 4 * 100))
        behind = client.acquire_begin([5] * 8)
        hit = client.acquire_begin(range(40), room=0)
        peeked = client.peek_begin(range(40))
        news: list[Pending[Any]] = []
        while len(news) < 2:
            select.select([client], [], [], 10)
            news += client.poll()
        assert news == [hit, peeked]
        assert (hit.done, peeked.done, crowded.done, behind.done) == (True, True, False, False)
        assert client.poll() == []
        assert client.status()["gauges"]["num_waiting"] == 2
        gate.touch()
        while len(news) < 4:
            assert select.select([client], [], [], 10)[0]
            news += client.poll()
        assert news[2:] == [crowded, behind], "first come, first served"
        assert [len(pending.wait().slots) for pending in (crowded, behind, hit)] == [100, 2, 10]
        assert daemon.settle()["counters"]["refused"] == 0
        assert client.poll() == []
        for each in (crowded, behind, hit):
            each.wait().release()
    daemon.stop()


def test_who_waits_for_a_copy_that_is_of_no_use_is_refused_with_the_numbers(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    limits = {"max_pinned_fraction": 1.0}
    with (
        Daemon(tmp_path / "daemon", prelude=copies.gate(gate, "backup"), limits=limits) as daemon,
        daemon.client() as client,
    ):
        with client.acquire(range(4 * 200)) as lease:
            lease.commit()
        crowded = client.acquire_begin(range(10_000, 10_000 + 4 * 100))
        client.pin(range(4 * 200), "me", 60)
        assert not crowded.done
        gate.touch()
        with pytest.raises(NoSpace) as caught:
            crowded.wait()
        assert (caught.value.need, caught.value.free, caught.value.locked) == (100, 56, 200)
        client.unpin("me")


def test_a_poll_tells_of_each_answer_once_and_not_of_what_was_waited_for(client: Client) -> None:
    first, second, third = (client.peek_begin([n]) for n in range(3))
    third.wait()
    assert client.poll() == [first, second]
    assert client.poll() == []
    assert first.wait() == second.wait() == (0, 0, (0,))
    fourth, fifth = client.peek_begin([3]), client.peek_begin([4])
    fifth.wait()
    fourth.wait()
    assert client.poll() == []


def test_looking_is_not_waiting_for_another_thread(daemon: Daemon) -> None:
    """One thread sleeps for its answer, and keeps the others from the socket; what it finds there is theirs."""
    ring = Held()
    with daemon.client(ring=ring) as client:
        lease = client.acquire(TOKENS)
        commit = lease.commit_begin()
        thread = threading.Thread(target=commit.wait)
        peeked = client.peek_begin(TOKENS)
        thread.start()
        until(lambda: peeked.done)
        assert client.poll() == [peeked]
        assert not commit.done
        ring.let_go()
        thread.join()
        assert commit.wait().committed_tokens == 64
        lease.release()
        ring.let_go()
        client._ring = None  # its goodbye needs no event
    daemon.settle()


def test_what_was_begun_ends_with_the_connection(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    ring = Held()
    client = daemon.client(ring=ring)
    lease = client.acquire(TOKENS)
    answered, commit = client.peek_begin(TOKENS), lease.commit_begin()
    until(lambda: answered.done)
    daemon.kill()
    until(lambda: commit.done)
    for _ in range(2):
        with pytest.raises(Unavailable):
            commit.wait()
        with pytest.raises(Unavailable):
            client.poll()
    assert answered.wait() == (0, 0, (0,))
    client.close()
    assert commit.done
    for use in (commit.wait, client.poll, client.fileno, lambda: client.peek_begin(TOKENS)):
        with pytest.raises(ClosedError):
            use()


def test_what_was_begun_ends_with_the_session(daemon: Daemon) -> None:
    with daemon.client(role="scheduler") as scheduler, Puppet(daemon.socket) as puppet:
        puppet.do(f"worker = Worker(bytes.fromhex('{scheduler.token.hex()}'), 0, socket)")
        commit = scheduler.acquire(TOKENS).commit_begin()
        puppet.process.kill()
        assert select.select([scheduler], [], [], 10)[0]
        assert scheduler.poll() == [commit]
        with pytest.raises(SessionEnded):
            commit.wait()
    until(lambda: daemon.status()["sessions"] == [])


def test_what_a_frame_can_not_carry_is_refused_and_the_connection_goes_on(client: Client) -> None:
    with pytest.raises(BadRequest, match="16777216"):
        client.peek(np.zeros(1 << 22, np.uint32))
    with client.acquire(TOKENS) as lease:
        with pytest.raises(BadRequest, match="upto"):
            lease.extend(upto=-1)
        with pytest.raises(BadRequest, match="tokens"):
            lease.commit(-1)
        with pytest.raises(BadRequest, match="1024"):
            client.extend([(lease,)] * 1025)
        lease.commit()


# -- named events -------------------------------------------------------------------------------------------


def test_a_command_names_an_event_that_was_recorded_before_later_work(daemon: Daemon) -> None:
    """The overlap: batch 2 runs when the results of batch 1 are committed, and is not waited for."""
    ring = Held()
    with daemon.client(ring=ring) as client:
        one, two = client.acquire(TOKENS), client.acquire([9, *TOKENS])
        after_batch_1 = client.record()
        after_batch_2 = client.record()
        commit, release = one.commit_begin(event=after_batch_1), one.release_begin(event=after_batch_1)
        other = two.commit_begin(event=after_batch_2)
        ring.let_go(after_batch_1)
        assert commit.wait().committed_tokens == 64
        release.wait()
        assert not other.done
        ring.let_go(after_batch_2)
        assert other.wait().committed_tokens == 64
        two.abort(wait=True, event=after_batch_2)
        client._ring = None
    daemon.settle()


def twins(daemon: Daemon, client: Client, first: int) -> Lease:
    """A lease whose pages another runner commits before it does: it will have 16 duplicates."""
    tokens = range(first, first + 64)
    lease = client.acquire(tokens)
    with daemon.client() as other, other.acquire(tokens) as better:
        better.commit()
    return lease


def test_an_event_from_before_an_answer_was_read_gives_nothing_back(daemon: Daemon) -> None:
    """A batch that was enqueued between the two reads the old pages, and the event says nothing of it."""
    with daemon.client() as client:
        lease = twins(daemon, client, 1000)
        before = client.record()
        assert lease.commit().num_duplicates == 16
        lease.commit(event=before)
        assert daemon.pool()["leased"] == 16
        lease.commit()
        assert daemon.pool()["leased"] == 0
        lease.release()


def test_an_answer_that_was_not_waited_for_gives_nothing_back(daemon: Daemon) -> None:
    """Its lease still names the old pages, whatever answers after it were read, and whoever took it off the socket."""
    with daemon.client() as client:
        one, two = twins(daemon, client, 2000), twins(daemon, client, 3000)
        old = one.slots.tolist()
        first, second = one.commit_begin(), two.commit_begin()
        assert second.wait().num_duplicates == 16
        assert first.done
        two.commit()
        two.commit()
        assert one.slots.tolist() == old
        assert daemon.pool()["leased"] == 32
        assert first.wait().num_duplicates == 16
        assert one.slots.tolist() != old
        two.commit()
        assert daemon.pool()["leased"] == 0
        one.release()
        two.release()


def test_an_answer_of_no_use_holds_nothing_back(daemon: Daemon) -> None:
    """Its lease has ended, and nobody waits for it."""
    with daemon.client() as client:
        one, two = twins(daemon, client, 4000), twins(daemon, client, 5000)
        one.commit_begin()
        one.release()
        assert two.commit().num_duplicates == 16
        two.commit()
        assert daemon.pool()["leased"] == 0
        two.release()


def test_tokens_and_pages_of_an_extend_come_in_order_whatever_is_waited_for_first(daemon: Daemon) -> None:
    """An extend's answer from before a commit names no page that the commit has replaced since."""
    with daemon.client() as client:
        lease = twins(daemon, client, 6000)
        more = lease.extend_begin([1] * 4)
        commit = lease.commit_begin()
        last = lease.extend_begin([2] * 8)
        commit.wait()
        last.wait()
        more.wait()
        assert lease.tokens.tolist() == [*range(6000, 6064), *[1] * 4, *[2] * 8]
        assert len(set(lease.slots.tolist())) == 19
        with daemon.client() as other, other.acquire(range(6000, 6064)) as better:
            assert lease.slots[:16].tolist() == better.slots.tolist()
        lease.commit()
        assert daemon.pool()["leased"] == 0
        lease.release()


def test_the_ring_is_asked_before_a_command_is_numbered(daemon: Daemon) -> None:
    ring = Held(1)
    with daemon.client(ring=ring) as client:
        lease = client.acquire(TOKENS)
        event = client.record()
        with pytest.raises(Busy):
            lease.commit_begin()
        commit = lease.commit_begin(event=event)
        assert commit.ticket == 1
        ring.let_go()
        commit.wait()
        lease.abort()
        client._ring = None
        ring.let_go()
    daemon.settle()
