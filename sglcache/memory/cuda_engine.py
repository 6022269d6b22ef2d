"""The copy engine of CUDA devices: batches of memcpys for the cards' own copy engines, and an event behind each step.

**It has not run on a card yet.** What it asks of the driver, in which order, and what it makes of the answers is held
by tests against a driver in software (`testing/cuda.py`); the calls themselves are `cuda_driver`'s.

    submit ─► a thread per device, which alone calls CUDA ─► a stream for each direction:
              batch of step 0 · event · batch of step 1 · event ...
              events in order ─► the lane: a step is over when it is on every device

A batch is what one step copies on one device: ranges of bytes, joined where pages are neighbours on both sides, built
by numpy without a step of Python per page, and handed to the driver as three arrays. These are memcpys since a card's
copy engines run beside the runner's kernels; a gather kernel of another process would take turns with decode.

**Order.** The core submits a copy to the host when the pages' commit took effect, so the runner's events of every shard
are done; and one to the device for pages whose last use is over. Hence no stream waits for another's event here, and
a direction's copies run in the order of submission, since they share a stream. A layer of a load is told of when its
event is done on every device: then its bytes are in the device's memory, for every process that has it mapped.

**Fail stop.** After an error of CUDA a context is of no use, and what the pages hold is not known. `lost` is called
once, with the error; nothing is told of any more.

**Pinned memory.** Host memory must be pinned before a card copies from it at full speed; `pin` has a device's thread do
it. A copy may not reach over from one pinned range into the next, so ranges are not joined over a multiple of `span`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from sglcache.memory.engine import CopyEngine, Direction, Done, Flight, Lane, Loaded, Memory, Slots, Way
from sglcache.memory.geometry import Placement, Region

POLL_S = 0.0002  # between looks at events, while there are any
MAX_BATCH = 4096  # ranges in one call

Words = npt.NDArray[np.uint64]


class Driver(Protocol):
    """What is asked of CUDA. Each call may raise `CudaError`, after which none makes sense.

    Streams and events are numbers; a device's are its thread's.
    """

    def use(self, device: int) -> None:
        """Have the calling thread speak of this device."""

    def stream(self) -> int:
        """A new one, which waits for no other."""
        ...

    def event(self) -> int:
        """A new one."""
        ...

    def copy(self, dst: Words, src: Words, sizes: Words, stream: int) -> None:
        """Enqueue copies of sizes[i] bytes from address src[i] to dst[i], in no order among themselves."""

    def record(self, event: int, stream: int) -> None:
        """`event` is done once all that is in the stream now is."""

    def done(self, event: int) -> bool: ...

    def pin(self, address: int, num_bytes: int) -> bool:
        """For every device's copies. False: the machine won't have so much pinned."""
        ...

    def unpin(self, address: int) -> None: ...

    def release(self, streams: Sequence[int], events: Sequence[int]) -> None:
        """Let go of these."""


class CudaMemory(NamedTuple):
    """A pool that a driver reaches."""

    placement: Placement
    address: int
    device: int | None  # None: host memory
    span: int = 0  # pages that were pinned as one range; 0: all are one


def ranges(
    src: Slots, dst: Slots, src_region: Region, dst_region: Region, spans: tuple[int, int] = (0, 0)
) -> tuple[Words, Words, Words]:
    """(target, source, size) of the ranges that copy these regions of page src[i] to page dst[i], as offsets.

    Neighbours on both sides are joined where nothing lies between their bytes, not over a multiple of its side's span.
    """
    order = np.argsort(src, kind="stable")
    src, dst = src[order], dst[order]
    joined = np.zeros(max(0, len(src) - 1), np.bool_)
    if len(src) and all(region.page_stride == region.num_bytes for region in (src_region, dst_region)):
        joined = (np.diff(src) == 1) & (np.diff(dst) == 1)
        for slots, span in ((src, spans[0]), (dst, spans[1])):
            if span:
                joined &= slots[1:] % span != 0
    first = np.flatnonzero(np.concatenate(([True], ~joined))) if len(src) else np.zeros(0, np.int64)
    counts = np.diff(np.append(first, len(src)))
    starts = [
        (region.offset + slots[first].astype(np.int64) * region.page_stride).astype(np.uint64)
        for region, slots in ((dst_region, dst), (src_region, src))
    ]
    return starts[0], starts[1], (counts * src_region.num_bytes).astype(np.uint64)


class _Job(NamedTuple):
    lane: Lane
    flight: Flight


class _Pin(NamedTuple):
    address: int
    num_bytes: int
    over: Future[bool]


class _Mark(NamedTuple):
    """The event behind a step."""

    event: int
    lane: Lane
    flight: Flight
    step: int


class CudaEngine(CopyEngine):
    """Copies between the memory of CUDA devices and pinned host memory."""

    def __init__(
        self,
        ways: Sequence[Way],
        done: Done,
        loaded: Loaded,
        *,
        driver: Driver,
        lost: Callable[[BaseException], None],
    ) -> None:
        """`ways` of `CudaMemory`. `lost(error)` is called once, on a device's thread: end the rank."""
        super().__init__(ways, done, loaded)
        self._lost = lost
        self._losing = threading.Lock()
        self.error: BaseException | None = None
        numbers = sorted({_device_of(pair) for way in ways for pair in way.pairs})
        self._devices = [_Device(self, number, driver, list(self.lanes.values())) for number in numbers]

    def pin(self, address: int, num_bytes: int) -> bool:
        """Pin host memory, for all devices, until the engine is closed; False: the machine won't. Blocks.

        Errors as the driver's.
        """
        over: Future[bool] = Future()
        self._devices[0].queue.put(_Pin(address, num_bytes, over))
        return over.result()

    def fail(self, error: BaseException) -> None:
        """A device's thread is told that the card is lost."""
        with self._losing:
            if self.error is not None:
                return
            self.error = error
            self._drop()
        self._lost(error)

    def _begin(self, lane: Lane, flight: Flight) -> None:
        serving = [[device for device in self._devices if device.serves(run.way)] for run in flight.runs]
        flight.left = [len(serving[step.run]) for step in flight.steps]
        for device in self._devices:
            if any(device in each for each in serving):
                device.queue.put(_Job(lane, flight))

    def _end(self, deadline: float | None) -> bool:
        for device in self._devices:
            device.queue.put(None)
        return all(device.join(deadline) for device in self._devices)


class _Device:
    """A device's thread. All that calls the driver is here."""

    def __init__(self, engine: CudaEngine, number: int, driver: Driver, lanes: Sequence[Lane]) -> None:
        self.engine = engine
        self.number = number
        self.driver = driver
        self.queue: SimpleQueue[_Job | _Pin | None] = SimpleQueue()
        self._directions = [lane.direction for lane in lanes if any(self.serves(way) for way in lane.ways)]
        self._streams: dict[Direction, int] = {}
        self._marks: dict[Direction, deque[_Mark]] = {direction: deque() for direction in self._directions}
        self._events: list[int] = []  # to be recorded anew
        self._pinned: list[int] = []
        self._ending = False
        self._thread = threading.Thread(target=self._run, name=f"sglcache-cuda-{number}", daemon=True)
        self._thread.start()

    def serves(self, way: Way) -> bool:
        return any(_device_of(pair) == self.number for pair in way.pairs)

    def join(self, deadline: float | None) -> bool:
        self._thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.driver.use(self.number)
            self._streams = {direction: self.driver.stream() for direction in self._directions}
            self._serve()
            if self.engine.error is None:
                for address in self._pinned:
                    self.driver.unpin(address)
                self.driver.release(list(self._streams.values()), self._events)
        except BaseException as exc:
            self.engine.fail(exc)
        if self.engine.error is not None:
            self._refuse(self.engine.error)

    def _serve(self) -> None:
        """Until the end was said and every event is done, or a device is lost."""
        while not self._ending or any(self._marks.values()):
            if self.engine.error is not None:
                return
            try:
                job = self.queue.get(timeout=POLL_S) if self._ending or any(self._marks.values()) else self.queue.get()
            except Empty:
                pass
            else:
                match job:
                    case _Job(lane, flight):
                        self._enqueue(lane, flight)
                    case _Pin(address, num_bytes, over):
                        try:
                            pinned = self.driver.pin(address, num_bytes)
                        except BaseException as exc:
                            over.set_exception(exc)
                            raise
                        if pinned:
                            self._pinned.append(address)
                        over.set_result(pinned)
                    case None:
                        self._ending = True
                del job
            self._look()

    def _enqueue(self, lane: Lane, flight: Flight) -> None:
        if lane.dropped:
            return
        try:
            slots = flight.slots()
        except (ValueError, IndexError) as exc:  # no device has it begun
            lane.over(flight, None, exc)
            return
        stream = self._streams[lane.direction]
        for number, (run, first, stop) in enumerate(flight.steps):
            way = flight.runs[run].way
            if not self.serves(way):
                continue
            dsts, srcs, sizes = self._batch(way, first, stop, *slots[run])
            for at in range(0, len(sizes), MAX_BATCH):
                here = slice(at, at + MAX_BATCH)
                self.driver.copy(dsts[here], srcs[here], sizes[here], stream)
            event = self._events.pop() if self._events else self.driver.event()
            self.driver.record(event, stream)
            self._marks[lane.direction].append(_Mark(event, lane, flight, number))

    def _batch(self, way: Way, first: int, stop: int, src: Slots, dst: Slots) -> tuple[Words, Words, Words]:
        """(target, source, size) of all ranges of these layers on this device: addresses."""
        parts: list[tuple[Words, Words, Words]] = []
        for src_pool, dst_pool, pairs in way.moves(first, stop):
            a, b = cast(CudaMemory, src_pool), cast(CudaMemory, dst_pool)
            if _device_of((a, b)) != self.number:
                continue
            for src_region, dst_region in pairs:
                there, here, sizes = ranges(src, dst, src_region, dst_region, (a.span, b.span))
                parts.append((there + np.uint64(b.address), here + np.uint64(a.address), sizes))
        if not parts:  # pages without bytes
            return np.zeros(0, np.uint64), np.zeros(0, np.uint64), np.zeros(0, np.uint64)
        dsts, srcs, sizes = (np.concatenate(each) for each in zip(*parts, strict=True))
        return dsts, srcs, sizes

    def _look(self) -> None:
        """Tell of the steps that are done: each direction's in order."""
        for marks in self._marks.values():
            while marks and self.driver.done(marks[0].event):
                event, lane, flight, step = marks.popleft()
                self._events.append(event)
                lane.over(flight, step)

    def _refuse(self, error: BaseException) -> None:
        """Nobody shall wait for ever for memory to be pinned."""
        while not self._ending:
            job = self.queue.get()
            self._ending = job is None
            if isinstance(job, _Pin):
                job.over.set_exception(error)


def _device_of(pair: tuple[Memory, Memory]) -> int:
    """Of the one side that is a device's."""
    (device,) = {side.device for side in cast("tuple[CudaMemory, CudaMemory]", pair) if side.device is not None}
    return device
