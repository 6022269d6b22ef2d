from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_facts import in_child

from sglcache.errors import BadRequest, Busy, ClosedError, ProtocolError, TransferError
from sglcache.memory.mapping import create_memfd
from sglcache.memory.rings import FAILED, MAX_EVENTS, EventRing, EventRingReader, LoadRing, LoadRingReader


def rung(doorbell: int) -> bool:
    return bool(select.select([doorbell], [], [], 0)[0])


def reader_of(ring: EventRing) -> EventRingReader:
    return EventRingReader(ring.fd, os.dup(ring.doorbell), ring.num_events)


# -- events -------------------------------------------------------------------------------------------


def test_a_recorded_event_is_done_and_rings() -> None:
    with closing(EventRing(4)) as ring, closing(reader_of(ring)) as reader:
        event, generation = ring.record()
        assert rung(reader.doorbell)
        reader.drain()
        reader.drain()  # an idle doorbell never blocks
        assert not rung(reader.doorbell)
        assert reader.done(event, generation)
        assert not reader.done(event, generation + 1)


def test_a_reserved_event_is_held_back_until_it_is_completed() -> None:
    with closing(EventRing(4)) as ring, closing(reader_of(ring)) as reader:
        held = ring.reserve()
        for _ in range(20):  # others go round the ring meanwhile
            assert reader.done(*ring.record())
        assert not reader.done(*held)
        ring.complete(*held)
        assert reader.done(*held)


def test_a_ring_of_held_events_is_busy_not_wrong() -> None:
    with closing(EventRing(2)) as ring:
        first = ring.reserve()
        ring.reserve()
        with pytest.raises(Busy) as caught:
            ring.reserve()
        assert caught.value.events == 2
        ring.complete(*first)
        assert ring.reserve() == (first[0], first[1] + 1)


def test_an_event_is_completed_once_and_only_if_reserved() -> None:
    with closing(EventRing(2)) as ring:
        event, generation = ring.record()
        for wrong in (generation, generation + 1):
            with pytest.raises(BadRequest):
                ring.complete(event, wrong)


@given(num_events=st.integers(1, 5), steps=st.lists(st.integers(0, 9), max_size=60))
def test_an_event_is_done_if_and_only_if_it_was_completed(num_events: int, steps: list[int]) -> None:
    with closing(EventRing(num_events)) as ring, closing(reader_of(ring)) as reader:
        held: list[tuple[int, int]] = []
        completed: set[tuple[int, int]] = set()
        for step in steps:
            if step < 6 and len(held) < num_events:
                held.append(ring.reserve())
            elif held:
                done = held.pop(step % len(held))
                ring.complete(*done)
                completed.add(done)
            assert all(reader.done(*event) for event in completed)
            assert not any(reader.done(*event) for event in held)


def test_a_closed_ring_says_so() -> None:
    ring = EventRing(1)
    held = ring.reserve()
    ring.close()
    ring.close()
    with pytest.raises(ClosedError):
        ring.record()
    with pytest.raises(ClosedError):
        ring.complete(*held)


def test_the_reader_takes_no_event_that_is_not_there() -> None:
    with closing(EventRing(3)) as ring, closing(reader_of(ring)) as reader:
        for event, generation in ((3, 1), (-1, 1), (1 << 62, 1), (0, 0)):
            with pytest.raises(BadRequest):
                reader.done(event, generation)


def test_the_reader_takes_no_descriptor_that_could_hurt_it() -> None:
    with closing(EventRing(3)) as ring:
        unsealed = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(unsealed, 24)
        read, write = os.pipe()
        wrong = [
            (ring.fd, read, 3),  # a read could block
            (ring.fd, unsealed, 3),  # or never end
            (unsealed, ring.doorbell, 3),  # could be shrunk under us
            (ring.doorbell, ring.doorbell, 3),
            (ring.fd, ring.doorbell, 4),
            (ring.fd, ring.doorbell, 0),
            (ring.fd, ring.doorbell, MAX_EVENTS + 1),
        ]
        for fd, doorbell, num_events in wrong:
            with pytest.raises(ProtocolError):
                EventRingReader(fd, doorbell, num_events)
        for fd in (unsealed, read, write):
            os.close(fd)
        with pytest.raises(ProtocolError, match="not open"):
            EventRingReader(ring.fd, read, 3)


def test_a_doorbell_that_came_blocking_does_not_block_the_reader() -> None:
    fd = create_memfd("events", 8)
    with closing(EventRingReader(fd, os.eventfd(0, os.EFD_CLOEXEC), 1)) as reader:
        reader.drain()
    os.close(fd)


def test_a_doorbell_that_is_made_blocking_later_does_not_block_the_reader() -> None:
    """Its other end is the same open file: whoever has that can change its flags at any time."""
    fd = create_memfd("events", 8)
    theirs = os.eventfd(0, os.EFD_CLOEXEC)
    with closing(EventRingReader(fd, os.dup(theirs), 1)) as reader:
        os.set_blocking(theirs, True)
        assert os.get_blocking(reader.doorbell)
        reader.drain()
        os.eventfd_write(theirs, 3)
        reader.drain()
        reader.drain()
    os.close(fd)
    os.close(theirs)


def test_a_semaphore_is_no_doorbell() -> None:
    """Each read takes one from it: with a large number in it the loop would have no other work."""
    fd = create_memfd("events", 8)
    doorbell = os.eventfd(1 << 20, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
    with open(f"/proc/self/fdinfo/{doorbell}") as lines:
        if "eventfd-semaphore" not in lines.read():
            pytest.skip("this kernel does not tell")
    with pytest.raises(ProtocolError, match="semaphore"):
        EventRingReader(fd, doorbell, 1)
    os.close(fd)
    os.close(doorbell)


def test_a_forked_child_cannot_complete_its_parents_events() -> None:
    with closing(EventRing(1)) as ring, closing(reader_of(ring)) as reader:
        held = ring.reserve()
        assert in_child(lambda: ring.complete(*held)) == -signal.SIGSEGV
        assert not reader.done(*held)
        assert in_child(ring.close) == 0
        ring.complete(*held)
        assert reader.done(*held)


# -- loads --------------------------------------------------------------------------------------------


class Rig:
    """A load ring of 2 slots and 3 layers, two members, and a control socket's two ends."""

    def __init__(self, stack: ExitStack) -> None:
        self.ring = stack.enter_context(closing(LoadRing(2, 3)))
        self.doorbells = [self.ring.join(), self.ring.join()]
        self.members = [
            stack.enter_context(closing(LoadRingReader(self.ring.fd, os.dup(doorbell), 2, 3)))
            for doorbell in self.doorbells
        ]
        self.sock, self.peer = socket.socketpair()
        stack.enter_context(self.sock)
        stack.enter_context(self.peer)

    def wait(self, member: int, slot: int, generation: int, layer: int, timeout_s: float | None = None) -> bool:
        return self.members[member].wait(slot, generation, layer, self.sock.fileno(), timeout_s)


@pytest.fixture
def rig() -> Iterator[Rig]:
    with ExitStack() as stack:
        yield Rig(stack)


def test_a_written_layer_is_readable_by_every_member_and_no_other_layer_is(rig: Rig) -> None:
    rig.ring.write(1, 5, 2, 3)
    for member in (0, 1):
        assert rig.wait(member, 1, 5, 2)
        assert not rig.wait(member, 1, 6, 2, timeout_s=0)
        assert not rig.wait(member, 1, 5, 1, timeout_s=0)
        assert not rig.wait(member, 0, 5, 2, timeout_s=0)


def test_all_layers_are_written_at_once(rig: Rig) -> None:
    rig.ring.write(0, 3)
    assert all(rig.wait(0, 0, 3, layer) for layer in range(3))
    assert not rig.members[0].done(1, 1, 0)


def test_waiting_layer_by_layer_blocks_until_each_is_written(rig: Rig) -> None:
    asked, written = threading.Semaphore(0), []

    def load() -> None:
        for layer in range(3):
            asked.acquire()
            written.append(layer)
            rig.ring.write(0, 1, layer, layer + 1)

    thread = threading.Thread(target=load)
    thread.start()
    for layer in range(3):
        assert not rig.members[0].done(0, 1, layer)
        asked.release()
        assert rig.wait(0, 0, 1, layer)
        assert written == list(range(layer + 1))
    thread.join()


def test_a_ring_for_another_slot_does_not_end_the_wait(rig: Rig) -> None:
    rig.ring.write(1, 1)
    rig.ring.write(0, 1, 0, 1)
    assert not rig.wait(0, 0, 1, 1, timeout_s=0.01)


def test_a_readable_or_closed_socket_ends_the_wait_and_loses_nothing(rig: Rig) -> None:
    rig.peer.send(b"x")
    assert not rig.wait(0, 0, 1, 0)
    rig.sock.recv(1)
    rig.ring.write(0, 1)
    assert rig.wait(0, 0, 1, 0)
    rig.peer.close()
    assert not rig.wait(0, 0, 2, 0)
    assert rig.wait(0, 0, 1, 2)  # what is there is there


def test_the_load_wins_over_a_socket_that_is_ready_too(rig: Rig) -> None:
    rig.peer.close()
    rig.ring.write(0, 1)
    assert rig.wait(0, 0, 1, 0)


def test_a_failed_load_wakes_its_waiter_with_an_error(rig: Rig) -> None:
    rig.ring.write(0, FAILED)
    with pytest.raises(TransferError):
        rig.wait(0, 0, 1, 0)
    rig.ring.write(1, 1)
    assert rig.wait(0, 1, 1, 0)


def test_only_the_named_doorbells_are_rung(rig: Rig) -> None:
    rig.ring.write(0, 1, doorbells=rig.doorbells[:1])
    assert [rung(doorbell) for doorbell in rig.doorbells] == [True, False]
    rig.ring.write(0, 2)
    assert [rung(doorbell) for doorbell in rig.doorbells] == [True, True]


def test_a_member_that_never_looks_does_not_block_the_daemon(rig: Rig) -> None:
    os.eventfd_write(rig.doorbells[0], (1 << 64) - 2)  # the counter is full
    rig.ring.write(0, 1)
    assert rig.wait(1, 0, 1, 0)
    assert rig.wait(0, 0, 1, 0)


def test_a_member_that_left_is_not_rung(rig: Rig) -> None:
    rig.ring.leave(rig.doorbells[0])
    rig.ring.write(0, 1)
    assert not rung(rig.members[0].doorbell)
    assert rung(rig.doorbells[1])


def test_a_load_that_cannot_be_is_refused(rig: Rig) -> None:
    for slot, layer in ((2, 0), (-1, 0), (0, 3), (0, -1)):
        with pytest.raises(BadRequest):
            rig.members[0].done(slot, 1, layer)
    with pytest.raises(ProtocolError):
        LoadRingReader(rig.ring.fd, rig.doorbells[0], 3, 3)
    rig.members[0].close()
    with pytest.raises(ClosedError):
        rig.wait(0, 0, 1, 0)
