"""A member's side of pools on cards: the pools mapped, and events and loads as words that streams write and wait for.

The rings are those of a CPU (`memory/rings.py`): an event is done once its word is so much. On a card the word is
written by the stream that the work is in, behind it (cuStreamWriteValue64), and a stream can wait for a load's word
(cuStreamWaitValue64). So nothing is opened by the other side, a wait for what was not recorded yet waits, and whatever
writes the word, a CPU too, ends the wait. **Not run on a card yet.**

A stream that waits for a daemon that died would wait for ever: so a thread watches the connection once streams wait for
loads, and when the daemon is dead it says of those that they failed. It touches no word of others: the ring is
everybody's, and a daemon that lives has only let go of us.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Mapping

from sglcache.errors import ConfigError, extras
from sglcache.memory.cuda_driver import CAN_WRITE_WORDS, CudaError, LibCuda
from sglcache.memory.cuda_pools import CardBytes, open_pool
from sglcache.memory.mapping import WORD_BYTES
from sglcache.memory.rings import EventRing, LoadRingReader
from sglcache.wire import control

MANY = 4096  # words that are remembered before those that are done are let go of

Streams = Callable[[], Mapping[int, int]]
"""By the number of each card that a member has pools on, the stream (a CUstream, as an integer) that its work is in."""

CardHandle = control.CudaPoolHandle | control.CudaIpcHandle


def told_of(welcome: control.Welcome) -> list[control.Pool]:
    """Every pool that a member maps."""
    return [*welcome.pools, *(pool for each in welcome.companions for pool in each.pools)]


def on_cards(welcome: control.Welcome) -> list[CardHandle]:
    """Of these those on cards."""
    return [handle for handle in told_of(welcome) if not isinstance(handle, control.PoolHandle)]


class Cards:
    """The cards that one member's pools are on, in this process."""

    def __init__(
        self, pools: list[CardHandle], ring: EventRing, loads: LoadRingReader, streams: Streams | None = None
    ) -> None:
        """`streams`: where the member's work is; None: torch's current stream of each card.

        ConfigError: this process does not see a pool's card, or has no driver. CudaError.
        """
        self._driver = LibCuda()
        self._given = streams
        self.check(pools)
        self._ring = ring
        self._watch: _Watch | None = None
        self.join(pools, loads)
        with self._driver.on(self.devices[0]):
            self._events_at = self._driver.register(ring.address, ring.num_events * WORD_BYTES)

    def check(self, pools: list[CardHandle]) -> None:
        """ConfigError: this process does not see a pool's card, or its driver is too old, or its torch sees none."""
        for handle in pools:
            device = self._driver.device_of(handle.device_uuid)
            if not self._driver.attribute(device, CAN_WRITE_WORDS):
                raise ConfigError(
                    f"card {device}'s driver can't have streams write words (CUDA 11.7 or later); update it",
                    device=device,
                )
        if self._given is None:
            self._streams(self._devices(pools))

    def join(self, pools: list[CardHandle], loads: LoadRingReader) -> None:
        """A life's pools, which were checked, and loads, from now on."""
        self.devices = self._devices(pools)
        self._loads = loads
        with self._driver.on(self.devices[0]):
            self._loads_at = self._driver.register(loads.address, loads.num_words * WORD_BYTES)

    def leave(self) -> None:
        """This life's loads and pools are of no use any more, once the streams have done with them: they are waited
        for. (A load of a daemon that lives ends, whoever is gone, and the others are given up.)
        """
        # Of a context that is broken nothing is done any more; where streams are not known nothing of ours is in them.
        with contextlib.suppress(CudaError, ConfigError):
            streams = self._streams(self.devices)
            for device in self.devices:
                with self._driver.on(device):
                    self._driver.synchronize(streams[device])
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        with contextlib.suppress(CudaError), self._driver.on(self.devices[0]):
            self._driver.unpin(self._loads.address)

    def close(self) -> None:
        """After `leave`."""
        with contextlib.suppress(CudaError), self._driver.on(self.devices[0]):
            self._driver.unpin(self._ring.address)

    def open(self, handle: CardHandle, fd: int | None) -> CardBytes:
        """A pool, mapped. `fd` stays the caller's."""
        return open_pool(self._driver, handle, fd)

    def record(self) -> tuple[int, int]:
        """An event behind all that is in the streams now. Busy: all events are held back."""
        streams, first = self._streams(self.devices), self.devices[0]  # first: it may say that there are none
        event, generation = self._ring.reserve()
        for device in self.devices[1:]:
            with self._driver.on(device):
                end = self._driver.event()
                self._driver.record(end, streams[device])
            with self._driver.on(first):
                self._driver.wait_event(streams[first], end)
            with self._driver.on(device):
                self._driver.release((), (end,))  # what it stands for is waited for all the same
        with self._driver.on(first):
            self._driver.write_value(streams[first], self._events_at + event * WORD_BYTES, generation)
        self._ring.hand_over(event, generation)
        return event, generation

    def wait_loaded(self, load: tuple[int, int], layers: range, sock: socket.socket) -> None:
        """Have the streams wait for these layers of a load. `sock`: the connection, which hangs up with the daemon."""
        slot, generation = load
        words = [self._loads.word(slot, layer) for layer in layers]
        if self._watch is None:
            self._watch = _Watch(sock, self._loads)
        self._watch.add(words, generation)
        streams = self._streams(self.devices)
        for device in self.devices:
            with self._driver.on(device):
                for word in words:
                    self._driver.wait_value(streams[device], self._loads_at + word * WORD_BYTES, generation)

    def _devices(self, pools: list[CardHandle]) -> list[int]:
        return sorted({self._driver.device_of(handle.device_uuid) for handle in pools})

    def _streams(self, devices: list[int]) -> Mapping[int, int]:
        """Where the work is now. ConfigError: that is not known."""
        if self._given is not None:
            given = self._given()
            if missing := [device for device in devices if device not in given]:
                raise ConfigError(
                    f"`streams` has none of card {missing[0]}, which this client has a pool on; it has {sorted(given)}",
                    device=missing[0],
                )
            return given
        with extras():
            import torch
        if not torch.cuda.is_available():
            raise ConfigError(
                "the pool is on a card, and this process's torch sees none: install torch with CUDA, or say where your "
                "work is by `streams`"
            )
        return {device: int(torch.cuda.current_stream(device).cuda_stream) for device in devices}


class _Watch:
    """Of a life's loads those that streams wait for: given up once the daemon is dead."""

    def __init__(self, sock: socket.socket, loads: LoadRingReader) -> None:
        self._loads = loads
        self._lock = threading.Lock()
        self._waited: dict[int, int] = {}  # generation, by word
        self._over = False
        self._fds = [os.dup(sock.fileno()), os.eventfd(0, os.EFD_CLOEXEC)]
        # Who the daemon is; none where its process can't be seen from here. Then the hang-up has to do.
        pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        with contextlib.suppress(OSError):
            if pid:
                self._fds.append(os.pidfd_open(pid))
        self._thread = threading.Thread(target=self._run, name="sglcache-watch", daemon=True)
        self._thread.start()

    def add(self, words: list[int], generation: int) -> None:
        with self._lock:
            if len(self._waited) > MANY:
                self._waited = {each: its for each, its in self._waited.items() if self._loads.is_open(each, its)}
            self._waited.update(dict.fromkeys(words, generation))
            if self._over:
                self._give_up()

    def stop(self) -> None:
        os.eventfd_write(self._fds[1], 1)
        self._thread.join()
        for fd in self._fds:
            os.close(fd)

    def _run(self) -> None:
        hung_up, end, *process = self._fds
        poll = select.poll()
        poll.register(hung_up, select.POLLRDHUP)
        poll.register(end, select.POLLIN)
        ready = {fd for fd, _ in poll.poll()}
        if end not in ready and process:
            poll.unregister(hung_up)
            poll.register(process[0], select.POLLIN)
            ready = {fd for fd, _ in poll.poll()}
        if end not in ready:
            with self._lock:
                self._over = True
                self._give_up()

    def _give_up(self) -> None:
        for word, generation in self._waited.items():
            self._loads.give_up(word, generation)
        self._waited = {}
