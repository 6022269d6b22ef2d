"""How one process tells another that bytes are there, on a CPU: a word in shared memory, then a doorbell.

A ring is uint64 words in a memfd with one writer. A word holds the generation that is done, and only rises. The
writer stores the word, then adds 1 to an eventfd: who drains the doorbell first and reads the word then never
misses one. (Words and page bytes are plain stores. x86-64 keeps their order; elsewhere the doorbell's system calls
do, for who looks only when it rang.)

Descriptors: what an object keeps, it owns and closes; a memfd that it is given to map stays the caller's.
"""

from __future__ import annotations

import errno
import os
import select
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

from sglcache.errors import BadRequest, Busy, ClosedError, ProtocolError, TransferError
from sglcache.memory.mapping import WORD_BYTES, address_of, create_memfd, map_words

MAX_EVENTS = 1 << 20  # of a ring that a runner offers
FAILED = (1 << 63) - 1  # in place of a generation: the load went wrong. A stream's wait for one ends with it, too


class EventRing:
    """A runner's events: `fd` and `doorbell` go to the daemon at hello, an (event, generation) with each command.

    On a CPU work is done when it was written, so `record` is all a runner needs. `reserve` and `complete` are its two
    halves: between them the event is held back. One thread at a time; in a forked child, `close` alone.
    """

    def __init__(self, num_events: int) -> None:
        self.num_events = num_events
        self.fd = create_memfd("sglcache-events", num_events * WORD_BYTES)
        try:
            self._words = map_words(self.fd, num_events)
            self.doorbell = _doorbell()
        except BaseException:
            os.close(self.fd)
            raise
        self._generations = [0] * num_events
        self._free = deque(range(num_events))
        self._handed_over: deque[tuple[int, int]] = deque()  # what another completes, in the order of handing over
        self._closed = False

    @property
    def address(self) -> int:
        """Where event 0's word is in this process; the others follow, 8 bytes each. ClosedError."""
        if self._closed:
            raise ClosedError("the event ring is closed")
        return address_of(self._words)

    def reserve(self) -> tuple[int, int]:
        """Take an event of a new generation, to be completed. Busy if all are held; ClosedError once closed.

        A held event is not given out again: else a later generation's end would pass for its own.
        """
        if self._closed:
            raise ClosedError("the event ring is closed")
        if not self._free:
            self._take_back()
        if not self._free:
            raise Busy(f"all {self.num_events} events are held back; complete one", events=self.num_events)
        event = self._free.popleft()
        self._generations[event] += 1
        return event, self._generations[event]

    def complete(self, event: int, generation: int) -> None:
        """Everything written so far is there: tell the daemon. BadRequest for what is not reserved; ClosedError."""
        if self._closed:
            raise ClosedError("the event ring is closed")
        if self._generations[event] != generation or self._words[event] >= generation:
            raise BadRequest(f"event {event} of generation {generation} is not reserved", event=event)
        self._words[event] = generation
        os.eventfd_write(self.doorbell, 1)
        self._free.append(event)

    def hand_over(self, event: int, generation: int) -> None:
        """Have another complete it: who writes its word, such as a stream, and rings no doorbell."""
        self._handed_over.append((event, generation))

    def _take_back(self) -> None:
        """What was handed over and is complete can be reserved again."""
        while self._handed_over:
            event, generation = self._handed_over[0]
            if self._words[event] < generation:
                return
            self._handed_over.popleft()
            self._free.append(event)

    def record(self) -> tuple[int, int]:
        """Reserve and complete."""
        event, generation = self.reserve()
        self.complete(event, generation)
        return event, generation

    def record_unrung(self) -> tuple[int, int]:
        """As `record`, without the doorbell: for an event that the daemon is told of next, and looks at then."""
        free = self._free
        if self._closed or not free:
            self.reserve()  # says why there is none
        event = free.popleft()
        generations = self._generations
        generations[event] = generation = generations[event] + 1
        self._words[event] = generation
        free.append(event)
        return event, generation

    def close(self) -> None:
        """Close both descriptors, this process's own, and unmap. Harmless when repeated, and in a forked child."""
        if not self._closed:
            self._closed = True
            self._words = memoryview(b"")
            os.close(self.fd)
            os.close(self.doorbell)


class EventRingReader:
    """The daemon's end of a runner's ring. Owns `doorbell` (readable when something was completed); not `fd`.

    The runner is not trusted: ProtocolError, with nothing taken, for descriptors that are not what they should be.
    """

    def __init__(self, fd: int, doorbell: int, num_events: int) -> None:
        if not 1 <= num_events <= MAX_EVENTS:
            raise ProtocolError(f"an event ring of {num_events} events: 1 to {MAX_EVENTS}", events=num_events)
        _check_doorbell(doorbell)
        self._words = map_words(fd, num_events)
        self.doorbell = doorbell
        self.num_events = num_events

    def drain(self) -> None:
        """Unring the doorbell; then look at every event that is waited for. Never blocks."""
        _drain(self.doorbell)

    def done(self, event: int, generation: int) -> bool:
        """Whether all that the runner wrote before this event is there.

        BadRequest for an event that is not in the ring, or generation 0, which would be done before it began.
        """
        if not 0 <= event < self.num_events or generation < 1:
            raise BadRequest(
                f"event {event} of generation {generation}: the ring has {self.num_events}, of generations from 1",
                event=event,
                num_events=self.num_events,
            )
        return bool(self._words[event] >= generation)

    def close(self) -> None:
        """Close the doorbell and unmap. Harmless when repeated."""
        if self.doorbell >= 0:
            os.close(self.doorbell)
            self.doorbell = -1
            self._words = memoryview(b"")


class LoadRing:
    """The daemon's word on loads from the host: per load slot and layer the generation that is readable, or FAILED.

    One ring for all members; a doorbell for each, since draining it is the member's alone. Any thread may `write`, one
    at a time to each slot: what copies says what is there, without the event loop between.
    """

    def __init__(self, num_slots: int, num_layers: int) -> None:
        self.num_slots = num_slots
        self.num_layers = num_layers
        self.fd = create_memfd("sglcache-loads", num_slots * num_layers * WORD_BYTES)
        try:
            self._words = map_words(self.fd, num_slots * num_layers)
        except BaseException:
            os.close(self.fd)
            raise
        self._doorbells: set[int] = set()
        self._closed = False
        self._lock = threading.Lock()  # a number that was a doorbell may be another's descriptor a moment later

    def join(self) -> int:
        """A new member's doorbell, to be sent to it. It stays the ring's."""
        doorbell = _doorbell()
        with self._lock:
            self._doorbells.add(doorbell)
        return doorbell

    def leave(self, doorbell: int) -> None:
        """The member is gone: close its doorbell here."""
        with self._lock:
            self._doorbells.remove(doorbell)
            os.close(doorbell)

    def write(
        self,
        slot: int,
        generation: int,
        first: int = 0,
        stop: int | None = None,
        *,
        doorbells: Iterable[int] | None = None,
    ) -> None:
        """Layers first..stop-1 (None: to the last) of the load in `slot` are readable; FAILED: they never will be.

        Then ring `doorbells`, or every member's. Never blocks. A slot that FAILED is best not used again: a later
        generation would tell a waiter who looks late that its own load went well. Once closed it does nothing.
        """
        stop = self.num_layers if stop is None else stop
        assert 0 <= slot < self.num_slots, f"load slot {slot} of {self.num_slots}"
        assert 0 <= first < stop <= self.num_layers, f"layers {first}..{stop - 1} of {self.num_layers}"
        row = slot * self.num_layers
        with self._lock:
            if self._closed:
                return
            self._words[row + first : row + stop] = memoryview(array("Q", [generation]) * (stop - first))
            for doorbell in self._doorbells if doorbells is None else doorbells:
                with suppress(BlockingIOError):  # a member filled the counter: it is rung
                    os.eventfd_write(doorbell, 1)

    def close(self) -> None:
        """Close every descriptor and unmap. Harmless when repeated."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._words = memoryview(b"")
                os.close(self.fd)
                while self._doorbells:
                    os.close(self._doorbells.pop())


class LoadRingReader:
    """A member's end of the load ring. Owns `doorbell`; not `fd`. ProtocolError if they are not what they should be.

    One thread at a time, since waiting drains the doorbell; in a forked child, `close` alone.
    """

    def __init__(self, fd: int, doorbell: int, num_slots: int, num_layers: int) -> None:
        _check_doorbell(doorbell)
        self._words = map_words(fd, num_slots * num_layers)
        self._num_slots = num_slots
        self._num_layers = num_layers
        self.doorbell = doorbell

    @property
    def num_words(self) -> int:
        return self._num_slots * self._num_layers

    @property
    def address(self) -> int:
        """Where word 0 is in this process; the others follow, 8 bytes each. ClosedError."""
        if self.doorbell < 0:
            raise ClosedError("the load ring is closed")
        return address_of(self._words)

    def word(self, slot: int, layer: int) -> int:
        """The number of the word that tells of this layer. BadRequest; ClosedError."""
        if self.doorbell < 0:
            raise ClosedError("the load ring is closed")
        if not (0 <= slot < self._num_slots and 0 <= layer < self._num_layers):
            raise BadRequest(f"layer {layer} of {self._num_layers} in load slot {slot} of {self._num_slots}")
        return slot * self._num_layers + layer

    def give_up(self, word: int, generation: int) -> None:
        """The daemon is gone, and writes nothing more: a load of ours failed, and no stream waits for it."""
        if self.doorbell >= 0 and self._words[word] < generation:
            self._words[word] = FAILED

    def is_open(self, word: int, generation: int) -> bool:
        """Whether it is still waited for."""
        return self.doorbell >= 0 and self._words[word] < generation

    def done(self, slot: int, generation: int, layer: int) -> bool:
        """Whether this layer of the load is readable.

        TransferError if the load failed: the hit is not there, release the lease. BadRequest for a slot or layer that
        is not; ClosedError.
        """
        word = self._words[self.word(slot, layer)]
        if word == FAILED:
            raise TransferError("the load from the host failed; release the lease and acquire anew", slot=slot)
        return bool(word >= generation)

    def wait(self, slot: int, generation: int, layer: int, extra_fd: int, timeout_s: float | None = None) -> bool:
        """Block until this layer is readable: True. Until `extra_fd` is readable or hung up, or time is up: False.

        With False nothing was lost: the caller looks at its socket and may wait again. Errors as `done`.
        """
        if self.done(slot, generation, layer):
            return True
        poll = select.poll()
        poll.register(self.doorbell, select.POLLIN)
        poll.register(extra_fd, select.POLLIN | select.POLLRDHUP)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            ready = poll.poll(None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000)
            _drain(self.doorbell)
            if self.done(slot, generation, layer):
                return True
            if not ready or any(fd == extra_fd for fd, _ in ready):
                return False

    def close(self) -> None:
        """Close the doorbell, this process's own, and unmap. Harmless when repeated, and in a forked child."""
        if self.doorbell >= 0:
            os.close(self.doorbell)
            self.doorbell = -1
            self._words = memoryview(b"")


def _doorbell() -> int:
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


def _check_doorbell(fd: int) -> None:
    """ProtocolError for what is no eventfd: a read of it could block, or never end."""
    try:
        kind = os.readlink(f"/proc/self/fd/{fd}")
    except OSError as exc:
        raise ProtocolError(f"descriptor {fd} is not open") from exc
    if kind != "anon_inode:[eventfd]":
        raise ProtocolError(f"descriptor {fd} is {kind}, not an eventfd")
    with open(f"/proc/self/fdinfo/{fd}") as lines:
        if any(line.split() == ["eventfd-semaphore:", "1"] for line in lines):
            raise ProtocolError(f"the eventfd {fd} is a semaphore: a read would leave it rung")
    os.set_blocking(fd, False)


def _drain(doorbell: int) -> None:
    """Never blocks, though who has the other end may have made it blocking again: both ends are one open file."""
    with suppress(BlockingIOError):
        try:
            os.preadv(doorbell, [bytearray(8)], -1, os.RWF_NOWAIT)
        except OSError as exc:
            if exc.errno != errno.EOPNOTSUPP:
                raise
            os.set_blocking(doorbell, False)  # before Linux 5.8
            os.eventfd_read(doorbell)
