"""The hand of a runner that computes nothing: it writes pages and looks at them, on a card or in shared memory.

A page's words count up from a number that tells it from all others, so that one that is in a wrong place, or half
there, is seen. On a card kernels write and copies read, in one stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sglcache.bench.harness import BenchError
from sglcache.client import Client
from sglcache.memory.geometry import Placement
from sglcache.testing.card import WORD, Card

SAMPLE = 64  # pages that are looked at of many
PIECE_WORDS = 1 << 20  # that numpy counts at once

Words = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.int32]


class Reach(Protocol):
    """Memory as words of 8 bytes, by addresses."""

    def count(self, address: int, words: int, begin: int) -> None:
        """Word i becomes begin + i, some time before `finish` returns."""

    def read(self, address: int, words: int) -> Words: ...

    def finish(self) -> None: ...


class SharedReach:
    """Of memory that this process's CPU sees."""

    def count(self, address: int, words: int, begin: int) -> None:
        for at in range(0, words, PIECE_WORDS):
            size = min(PIECE_WORDS, words - at)
            self.read(address + at * WORD, size)[:] = np.arange(begin + at, begin + at + size, dtype=np.uint64)

    def read(self, address: int, words: int) -> Words:
        """The memory itself."""
        return np.ctypeslib.as_array((ctypes.c_uint64 * words).from_address(address))

    def finish(self) -> None:
        pass


class CardReach:
    """Of a card's memory, in one of its streams."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.stream = card.stream()

    def count(self, address: int, words: int, begin: int) -> None:
        self.card.count(address, words, begin, self.stream)

    def read(self, address: int, words: int) -> Words:
        return self.card.read(address, words)

    def finish(self) -> None:
        self.card.synchronize(self.stream)


def page_of(reach: Reach, placement: Placement, address: int, slot: int) -> Words:
    """All that a page has, piece after piece, whatever the layout."""
    parts = [reach.read(address + start, (stop - start) // WORD) for start, stop in placement.ranges(slot)]
    return np.concatenate(parts) if len(parts) != 1 else parts[0]


def write_page(reach: Reach, placement: Placement, address: int, slot: int, begin: int) -> None:
    """As `page_of` reads it: the page's words count up from `begin`."""
    for start, stop in placement.ranges(slot):
        reach.count(address + start, (stop - start) // WORD, begin)
        begin += (stop - start) // WORD


def sample(count: int, most: int = SAMPLE) -> list[int]:
    """Of so many the first, the last, and some between."""
    found: list[int] = np.unique(np.linspace(0, count - 1, min(count, most)).astype(int)).tolist()
    return found


class Hand:
    """A client whose pages lie one behind another (page_first), and what is in them.

    Page i of a table is told by a prompt's number and by i.
    """

    def __init__(self, socket: Path | str, card: Card | None = None, **options: Any) -> None:
        """`card`: this process's, where it has one already. `options` are the client's."""
        self.client = Client(socket, streams=self._streams, **options)
        device = self.client.pool.device
        self.reach: Reach = SharedReach() if device is None else CardReach(card or Card(device))

    @property
    def page_words(self) -> int:
        return self.client.geometry.page_bytes // WORD

    def fill(self, slots: Slots, prompt: int, first: int = 0) -> None:
        """Write pages `first` on of a prompt into these slots; neighbours by one kernel."""
        size, address = self.page_words, self.client.pool.address
        self.client.pool.placement.page()
        for at, stop in runs(slots):
            begin = self._begin(prompt) + (first + at) * size
            self.reach.count(address + int(slots[at]) * size * WORD, (stop - at) * size, begin)

    def spoil(self) -> None:
        """Write over every page of the pool, of which nobody holds any: else what comes back to a page that had it
        before seems right even if nothing came."""
        pool = self.client.pool
        self.reach.count(pool.address, pool.placement.num_bytes // WORD, 0)
        self.reach.finish()

    def check(self, slots: Slots, prompt: int, what: str, most: int = SAMPLE) -> int:
        """How many of a prompt's pages were looked at. BenchError: one is not what `fill` wrote."""
        size, pool = self.page_words, self.client.pool
        looked = sample(len(slots), most) if len(slots) else []
        for at in looked:
            found = page_of(self.reach, pool.placement, pool.address, int(slots[at]))
            begin = self._begin(prompt) + at * size
            if not np.array_equal(found, np.arange(begin, begin + size, dtype=np.uint64)):
                raise BenchError(f"{what}: page {at} of {len(slots)} (slot {slots[at]}) is not what was written")
        return len(looked)

    def close(self) -> None:
        self.client.close()

    def __enter__(self) -> Hand:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside -----------------------------------------------------------------------------------------------

    def _begin(self, prompt: int) -> int:
        return (prompt + 1) << 40

    def _streams(self) -> dict[int, int]:
        """Where this client's events are written. Asked for only where its pools are on cards."""
        assert isinstance(self.reach, CardReach), "the pool is shared memory"
        return {self.reach.card.device: self.reach.stream}


def runs(slots: Slots) -> Iterator[tuple[int, int]]:
    """(start, stop) of the stretches of a table whose slots are neighbours, in order."""
    cuts = np.flatnonzero(np.diff(slots) != 1) + 1
    edges: Sequence[int] = [0, *cuts.tolist(), len(slots)] if len(slots) else []
    yield from pairwise(edges)


def on_device(device: str) -> list[str]:
    """Settings of a daemon whose pools are there."""
    return ["pool.device=cuda", "pool.untried=true"] if device == "cuda" else []
