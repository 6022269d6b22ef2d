"""A router's ears, for tests: what is on a stream, number by number, and what replay has of it."""

from __future__ import annotations

import socket
import time
from collections import deque
from types import TracebackType
from typing import Self

import zmq

from sglcache.wire.events import AllBlocksCleared, Batch, Event, decode_batch

END = b"\xff" * 8
WITHIN_S = 20.0


class Listener:
    """Subscribed from construction on, but for the moment that connecting takes: see `await_batch`."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.IPV6, int("[" in endpoint))
        self.sub.setsockopt(zmq.RECONNECT_IVL, 20)
        self.sub.subscribe("")
        self.sub.connect(endpoint)
        self.heard: list[tuple[int, Batch]] = []
        self._events: deque[tuple[int, Event]] = deque()  # heard and not given out yet

    def await_batch(self, within_s: float = WITHIN_S) -> tuple[int, Batch]:
        """The next one; a heartbeat is one."""
        assert self.sub.poll(int(within_s * 1000)), f"no batch within {within_s} s, after {self.heard[-3:]}"
        _, seq, payload = self.sub.recv_multipart()
        number, batch = int.from_bytes(seq, "big"), decode_batch(payload)
        self.heard.append((number, batch))
        self._events.extend((number, event) for event in batch.events)
        return number, batch

    def await_event(self, kind: type[Event], within_s: float = WITHIN_S) -> tuple[int, Event]:
        """The next of its kind, with its number; those of other kinds before it are passed over."""
        deadline = time.monotonic() + within_s
        while True:
            while self._events:
                number, event = self._events.popleft()
                if type(event) is kind:
                    return number, event
            self.await_batch(deadline - time.monotonic())

    def pull(self) -> None:
        """Take in what is there."""
        while self.sub.poll(0):
            self.await_batch()

    def assert_unbroken(self) -> None:
        """No number was left out or came twice, and nothing was cleared."""
        seqs = [seq for seq, _ in self.heard]
        assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))
        assert not any(type(event) is AllBlocksCleared for _, batch in self.heard[1:] for event in batch.events)

    def close(self) -> None:
        self.context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def replayed(endpoint: str, start: int) -> list[tuple[int, Batch]]:
    """What replay answers from that number on."""
    return [(number, decode_batch(payload)) for number, payload in payloads(endpoint, start)]


def payloads(endpoint: str, start: int) -> list[tuple[int, bytes]]:
    """The same, as it is on the wire."""
    context = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IPV6, int("[" in endpoint))
        dealer.connect(endpoint)
        dealer.send_multipart([b"", start.to_bytes(8, "big")])
        batches = []
        while True:
            assert dealer.poll(int(WITHIN_S * 1000)), "no end of the replay"
            _, _, seq, payload = dealer.recv_multipart()
            if seq == END:
                return batches
            batches.append((int.from_bytes(seq, "big"), payload))
    finally:
        context.destroy(linger=0)


def free_ports(*counts: int) -> list[int]:
    """For each count the first of so many neighbouring ports that nobody on 127.0.0.1 has just now."""
    bases: list[int] = []
    for count in counts:
        for _ in range(1000):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                base = int(probe.getsockname()[1])
            near = any(base < other + 64 and other < base + 64 for other in bases)
            if not near and all(map(_is_free, range(base, base + count))):
                bases.append(base)
                break
        else:
            raise AssertionError(f"no {count} free ports beside each other")
    return bases


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            return False
    return True
