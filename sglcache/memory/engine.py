"""What moves pages between two tiers, whatever the device: the order of copies, their accounts, and their end.

An engine knows pools and page numbers, and nothing of the cache: which copy may begin is the core's to say. It submits
a copy to the host when the pages' commit took effect, which is when the runner's event was done on every shard; and one
to the device for pages in no one's hands but a lease's, whose last use is over. So no copy waits here for another, and
none of one direction for one of the other: a long write-through never delays a load-back.

    submit ─► lane of its direction ─► steps, each some layers ─► loaded(load, first, stop), one step after the other
                                                              └─► done(ticket, ok, error), one copy after the other

A copy is one step, or with a load slot several, of `STEP_BYTES` or a layer each, in the layers' order: a runner
computes with the first layers while the last are on their way. Pages of other resources that go with a copy
(`Transfer.more`) are its first steps, whole, and nothing is told of them: who hears of the first layer has them. What
the machine does at once, and in which threads, is the engine's own affair (`cpu_engine`, `cuda_engine`); what is heard
of it is in order: `loaded` by layer, `done` by submission. A copy that hangs holds back what was submitted after it in
its direction, and its age says so.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from sglcache.core.histograms import Histogram, Observed
from sglcache.errors import ClosedError, TransferError
from sglcache.memory.geometry import FULL, Form, Placement, Region, moves
from sglcache.units import TicketId, Tier

STEP_BYTES = 4 << 20  # of all shards: half a millisecond or so, worth a step of its own and its doorbells

Slots = npt.NDArray[np.int32]
Direction = tuple[Tier, Tier]
Done = Callable[[TicketId, bool, TransferError | None], None]
Loaded = Callable[["LoadPlace", int, int], None]

BACKUP: Direction = (Tier.DEVICE, Tier.HOST)
LOAD: Direction = (Tier.HOST, Tier.DEVICE)
NAMES: Mapping[Direction, str] = {BACKUP: "backup", LOAD: "load"}


class Memory(Protocol):
    """A pool, as far as all engines see it; each asks for more."""

    @property
    def placement(self) -> Placement: ...


class LoadPlace(NamedTuple):
    """Where a runner learns that layers of a load are there: a slot of the load ring, and the slot's generation."""

    slot: int
    generation: int


class Transfer(NamedTuple):
    """Pages to copy from one tier to the other, of every shard: of the first resource, and what else goes with them."""

    ticket: TicketId
    src: Tier
    dst: Tier
    src_slots: bytes  # int32 [n]
    dst_slots: bytes  # int32 [n], without repeats
    load: LoadPlace | None = None  # layer by layer, each told of
    more: Sequence[tuple[str, bytes, bytes]] = ()  # (resource, src_slots, dst_slots), of others than the first


class Way:
    """One direction of a resource: the pools that a page is copied between, and the regions of each layer."""

    def __init__(self, direction: Direction, pairs: Sequence[tuple[Memory, Memory]], resource: str = FULL) -> None:
        """`pairs`: (source, target) for each copy that a page takes; a source may stand in several.

        ValueError: their pages are not of the same pieces.
        """
        self.direction = direction
        self.resource = resource
        self.name = NAMES[direction]
        self.pairs = tuple(pairs)
        self._placements = [(src.placement, dst.placement) for src, dst in pairs]
        self._moves: dict[tuple[int, int], list[list[tuple[Region, Region]]]] = {}
        self.num_layers = len(self._placements[0][0].layers)
        self.layer_bytes = [
            sum(src.num_bytes for each in self._placements for src, _ in moves(*each, (layer,)))
            for layer in range(self.num_layers)
        ]
        """Of one page, all shards."""

    @property
    def page_bytes(self) -> int:
        """Of one page, all shards."""
        return sum(self.layer_bytes)

    def steps(self, num_pages: int) -> list[tuple[int, int]]:
        """The layers of each step of a load of so many pages, as (first, stop).

        Without layers there is one step all the same, so that somebody can be told of the load.
        """
        found: list[tuple[int, int]] = [] if self.num_layers else [(0, 1)]
        first, num_bytes = 0, 0
        for layer, each in enumerate(self.layer_bytes):
            num_bytes += each * num_pages
            if num_bytes >= STEP_BYTES or layer == self.num_layers - 1:
                found.append((first, layer + 1))
                first, num_bytes = layer + 1, 0
        return found

    def moves(self, first: int, stop: int) -> list[tuple[Memory, Memory, list[tuple[Region, Region]]]]:
        """What to copy of each page for these layers: pool by pool, the regions."""
        if (found := self._moves.get((first, stop))) is None:
            layers = range(first, min(stop, self.num_layers))
            found = [moves(*placements, layers) for placements in self._placements]
            self._moves[first, stop] = found  # of many layers it takes longer than a piece of the copy
        return [(*pools, regions) for pools, regions in zip(self.pairs, found, strict=True)]


class LaneStats(NamedTuple):
    """One direction. Counters since the start; a copy that failed is in `failed` alone, until then in `in_flight`."""

    name: str  # backup, load
    copies: int
    pages: int  # of the first resource
    bytes: int  # written, every shard's, of all resources
    seconds: float  # in which at least one was in flight: bytes / seconds is what the engine made of the machine
    failed: int
    in_flight: int
    oldest_s: float  # age of the copy that has been in flight the longest; 0: there is none


class Run(NamedTuple):
    """What a copy has of one resource."""

    way: Way
    src_slots: bytes
    dst_slots: bytes

    @property
    def num_pages(self) -> int:
        return len(self.dst_slots) // 4


class Step(NamedTuple):
    """Layers first..stop-1 of one of a flight's runs."""

    run: int
    first: int
    stop: int


class Flight:
    """A copy on its way. Owned by its lane, whose lock guards what is not constant."""

    def __init__(self, transfer: Transfer, ways: Sequence[Way], at: float) -> None:
        """`ways`: the direction's, by resource, the first one first. KeyError: `more` is of none of them."""
        self.transfer = transfer
        first, by_name = ways[0], {way.resource: way for way in ways}
        self.runs = [Run(by_name[resource], src, dst) for resource, src, dst in transfer.more]
        last = len(self.runs)
        self.runs.append(Run(first, transfer.src_slots, transfer.dst_slots))
        self.num_pages = self.runs[last].num_pages
        self.num_bytes = sum(run.num_pages * run.way.page_bytes for run in self.runs)
        self.at = at
        self.steps = [Step(number, 0, run.way.num_layers) for number, run in enumerate(self.runs[:last])]
        layers = [(0, first.num_layers)] if transfer.load is None else first.steps(self.num_pages)
        self.steps += [Step(last, *each) for each in layers]
        self.left = [1] * len(
            self.steps
        )  # pieces of each step that are not over; the engine sets them before it begins
        self.told = 0  # steps
        self.error: Exception | None = None

    def slots(self) -> list[tuple[Slots, Slots]]:
        """Source and target pages of each run. ValueError, IndexError: they are not those of these pools."""
        found = []
        for run in self.runs:
            src, dst = (np.frombuffer(each, "<i4") for each in (run.src_slots, run.dst_slots))
            if len(src) != len(dst):
                raise ValueError(f"{len(src)} source slots, {len(dst)} target slots")
            for pools in run.way.pairs:
                for slots, pool in zip((src, dst), pools, strict=True):
                    num_pages = pool.placement.num_pages
                    if len(slots) and not (slots.min() >= 0 and slots.max() < num_pages):
                        raise IndexError(f"slots {slots.min()}..{slots.max()} of a pool of {num_pages} pages")
            found.append((src, dst))
        return found


class Lane:
    """The copies of one direction in the order of their submission, and what became of them. Thread-safe."""

    def __init__(self, ways: Sequence[Way], done: Done, loaded: Loaded) -> None:
        """`ways`: of this direction, those of the first resource first."""
        self.ways = tuple(ways)
        self.direction = ways[0].direction
        self.name = ways[0].name
        self._done = done
        self._loaded = loaded
        self._lock = threading.RLock()  # `done` and `loaded` run under it: in order
        self._flights: deque[Flight] = deque()
        self._busy_since = 0.0
        self._seconds = 0.0
        self._copies = self._pages = self._bytes = self._failed = 0
        self._latency = Histogram()
        self.dropped = False  # nothing is told any more

    def add(self, transfer: Transfer) -> Flight:
        flight = Flight(transfer, self.ways, time.monotonic())
        with self._lock:
            if not self._flights:
                self._busy_since = flight.at
            self._flights.append(flight)
        return flight

    def over(self, flight: Flight, step: int | None, error: Exception | None = None) -> None:
        """A piece of that step is over, well or not; None: all of the copy is."""
        with self._lock:
            flight.error = flight.error or error
            if step is None:
                flight.left = [0] * len(flight.left)
            else:
                flight.left[step] -= 1
            self._tell_layers(flight)
            while self._flights and not any(self._flights[0].left):
                self._end(self._flights.popleft())

    def _tell_layers(self, flight: Flight) -> None:
        load = flight.transfer.load
        while flight.told < len(flight.steps) and not flight.left[flight.told]:
            run, first, stop = flight.steps[flight.told]
            last = run == len(flight.runs) - 1
            if load is not None and last and flight.error is None and not self.dropped:
                self._loaded(load, first, stop)
            flight.told += 1

    def _end(self, flight: Flight) -> None:
        now = time.monotonic()
        self._seconds += now - self._busy_since
        self._busy_since = now
        ticket, error = flight.transfer.ticket, flight.error
        if error is None:
            self._copies += 1
            self._latency.observe(now - flight.at)
            self._pages += flight.num_pages
            self._bytes += flight.num_bytes
        else:
            self._failed += 1
        if self.dropped:
            return
        if error is None:
            self._done(ticket, True, None)
        else:
            fatal = isinstance(error, TransferError) and bool(error.facts.get("fatal"))
            failed = TransferError(f"copy {ticket} ({self.name}) failed: {error}", ticket=ticket, fatal=fatal)
            failed.__cause__ = error
            self._done(ticket, False, failed)

    def stats(self) -> LaneStats:
        with self._lock:
            now, flights = time.monotonic(), self._flights
            return LaneStats(
                self.name,
                self._copies,
                self._pages,
                self._bytes,
                self._seconds + (now - self._busy_since if flights else 0.0),
                self._failed,
                len(flights),
                now - flights[0].at if flights else 0.0,
            )

    def latency(self) -> Observed:
        """Seconds from a copy's submission to its end, of those that went well."""
        with self._lock:
            return self._latency.observed()


class CopyEngine(ABC):
    """Copies in both directions. One thread calls it; the callbacks are called by the engine's own.

    `done(ticket, ok, error)` is called once for each copy, in the order of submission of its direction. With ok, the
    bytes of every shard are there; else `error` says why, and the target pages hold anything; if it is `fatal`, all
    pages of a device do, and the rank has to end. Either way nothing of the copy is read or written any more.
    `loaded(load, first, stop)` before that, for layers first..stop-1 of a load, in order. Both must not raise, nor
    wait.
    """

    def __init__(self, ways: Sequence[Way], done: Done, loaded: Loaded) -> None:
        """`ways` of all resources, those of the first before all others."""
        by_direction: dict[Direction, list[Way]] = {}
        for way in ways:
            by_direction.setdefault(way.direction, []).append(way)
        self.lanes = {direction: Lane(each, done, loaded) for direction, each in by_direction.items()}
        self._closed = False

    def submit(self, transfer: Transfer) -> None:
        """Queue a copy of page src_slots[i] to page dst_slots[i], for each i, of every pair of pools; so with `more`.

        The queue is as long as the caller lets it grow. The caller sees to it that nobody writes the source pages, or
        touches the target pages, until it is over. ClosedError after `close`.
        """
        if self._closed:
            raise ClosedError("the copy engine is closed")
        lane = self.lanes[transfer.src, transfer.dst]
        self._begin(lane, lane.add(transfer))

    def close(self, *, finish: bool = True, timeout_s: float | None = None) -> bool:
        """End: after all that is queued, or after what has begun; False: something is still running after that time.

        What is dropped is not told of, nor is anything once the time is up. Harmless when repeated.
        """
        self._closed = True
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if not finish:
            self._drop()
        ended = self._end(deadline)
        for lane in self.lanes.values():
            lane.dropped = True
        return ended

    def stats(self) -> list[LaneStats]:
        return [lane.stats() for lane in self.lanes.values()]

    def _drop(self) -> None:
        for lane in self.lanes.values():
            lane.dropped = True

    @abstractmethod
    def _begin(self, lane: Lane, flight: Flight) -> None:
        """Have it done, some time, by another thread."""

    @abstractmethod
    def _end(self, deadline: float | None) -> bool:
        """Begin nothing that was dropped, and wait for the rest; False: the deadline (monotonic) came first."""


def ways_of(form: Form, device: Sequence[Memory], host: Sequence[Memory], resource: str = FULL) -> list[Way]:
    """Both directions of a resource, between the pools of its shards and its parts; none without a host tier."""
    if not host:
        return []
    tiers = {Tier.DEVICE: device, Tier.HOST: host}
    return [
        Way((src, dst), [(tiers[src][i], tiers[dst][j]) for i, j in form.pairs(src, dst)], resource)
        for src, dst in (BACKUP, LOAD)
    ]
