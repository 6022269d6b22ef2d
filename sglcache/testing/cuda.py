"""A CUDA driver in software: streams whose work is done when a test says so, on memory of this process."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from sglcache.memory.cuda_driver import CudaError

Words = npt.NDArray[np.uint64]


class FakeDriver:
    """`Driver` of `cuda_engine`. Each stream is a queue of work; `run` does some, as a card would at its own pace.

    With `eager`, work is done as it is enqueued. `calls` has (thread, device, what) of every call, in order.
    """

    def __init__(self, *, eager: bool = False, broken: str | None = None) -> None:
        self.eager = eager
        self.calls: list[tuple[str, int, str]] = []
        self.batches: list[tuple[int, int]] = []  # (device, ranges)
        self.pinned: dict[int, int] = {}
        self.pinnable = 1 << 62  # bytes of one range
        self.broken = broken  # the next call of this name fails, and all after it
        self.streams: dict[int, deque[Callable[[], None]]] = {}
        self.device_of: dict[int, int] = {}
        self._devices: dict[int, int] = {}  # by thread
        self._recorded: dict[int, int] = {}
        self._over: dict[int, int] = {}
        self._lock = threading.RLock()

    def run(self, device: int, count: int | None = None) -> int:
        """Do the next `count` pieces of work (None: all) of each of the device's streams; how many were done."""
        num_done = 0
        with self._lock:
            for stream, work in self.streams.items():
                if self.device_of[stream] == device:
                    for _ in range(len(work) if count is None else min(count, len(work))):
                        work.popleft()()
                        num_done += 1
        return num_done

    def use(self, device: int) -> None:
        self._devices[threading.get_ident()] = device
        self._called("use")

    def stream(self) -> int:
        self._called("stream")
        with self._lock:
            stream = len(self.streams) + 1
            self.streams[stream] = deque()
            self.device_of[stream] = self._devices[threading.get_ident()]
            return stream

    def event(self) -> int:
        self._called("event")
        with self._lock:
            event = len(self._recorded) + 1
            self._recorded[event] = self._over[event] = 0
            return event

    def copy(self, dst: Words, src: Words, sizes: Words, stream: int) -> None:
        self._called("copy")
        self.batches.append((self.device_of[stream], len(sizes)))
        ranges = list(zip(dst.tolist(), src.tolist(), sizes.tolist(), strict=True))

        def work() -> None:
            for to, start, num_bytes in ranges:
                ctypes.memmove(to, start, num_bytes)

        self._enqueue(stream, work)

    def record(self, event: int, stream: int) -> None:
        self._called("record")
        with self._lock:
            self._recorded[event] += 1
            number = self._recorded[event]
        self._enqueue(stream, lambda: self._over.__setitem__(event, number))

    def done(self, event: int) -> bool:
        self._called("done")
        return self._over[event] == self._recorded[event]

    def pin(self, address: int, num_bytes: int) -> bool:
        self._called("pin")
        if num_bytes > self.pinnable:
            return False
        self.pinned[address] = num_bytes
        return True

    def unpin(self, address: int) -> None:
        self._called("unpin")
        del self.pinned[address]

    def release(self, streams: Sequence[int], events: Sequence[int]) -> None:
        self._called("release")
        with self._lock:
            for stream in streams:
                assert not self.streams.pop(stream), "work was left in the stream"
            for event in events:
                del self._recorded[event]

    def _enqueue(self, stream: int, work: Callable[[], None]) -> None:
        with self._lock:
            if self.eager:
                work()
            else:
                self.streams[stream].append(work)

    def _called(self, what: str) -> None:
        device = self._devices[threading.get_ident()]
        if what != "done":
            self.calls.append((threading.current_thread().name, device, what))
        if self.broken in (what, "all"):
            self.broken = "all"
            raise CudaError(f"{what}: CUDA_ERROR_ILLEGAL_ADDRESS (700)", call=what)
