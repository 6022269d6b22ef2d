"""What more than one question asks of its processes: pools of device memory, words in shared memory, and their bytes.

A task is a function of `Here`, run in an actor. What it makes it keeps under a name, for later tasks.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from sglcache.testing.card import WORD
from sglcache.testing.probe.stage import Here

Words = npt.NDArray[np.uint64]
Tell = Callable[[str, Any], None]

PIECE_BYTES: Final = 1 << 20  # of what is read back at once
PIECES: Final = 128  # of a large pool; a small one is read whole
RING_BYTES: Final = 999 * WORD  # of the shared words: no whole number of pages, as of a ring


class Pool(NamedTuple):
    """Device memory, as one process has it."""

    address: int
    num_bytes: int

    @property
    def words(self) -> int:
        return self.num_bytes // WORD


class Shared:
    """A memfd, mapped: words that a processor reads and writes."""

    def __init__(self, fd: int, num_bytes: int = RING_BYTES) -> None:
        self.map = mmap.mmap(fd, num_bytes)
        self.words = memoryview(self.map).cast("Q")
        self.array = np.frombuffer(self.map, np.uint64)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.num_bytes = num_bytes


def new_shared(num_bytes: int = RING_BYTES) -> int:
    fd = os.memfd_create("sglcache-probe", os.MFD_CLOEXEC)
    os.truncate(fd, num_bytes)
    return fd


def rounded(here: Here, num_bytes: int) -> int:
    """Up to what the card allots."""
    granularity = here.card.granularity(here.device)
    return max(granularity, -(-num_bytes // granularity) * granularity)


class Times:
    """Seconds between the calls of `mark`."""

    def __init__(self) -> None:
        self.took: dict[str, float] = {}
        self._last = time.monotonic()

    def mark(self, name: str) -> None:
        now = time.monotonic()
        self.took[name], self._last = now - self._last, now


# -- tasks ---------------------------------------------------------------------------------------------------------


def free_bytes(here: Here) -> tuple[int, int]:
    return here.card.free_bytes()


def make_pool(here: Here, name: str, num_bytes: int) -> dict[str, float]:
    """Create, export, map and release, as a daemon; the descriptor goes with the answer. MemoryError: no room."""
    num_bytes = rounded(here, num_bytes)
    times = Times()
    handle = here.card.create(num_bytes, here.device)
    times.mark("create")
    if handle is None:
        raise MemoryError(f"no {num_bytes:,} bytes left")
    here.give.append(here.card.export(handle))
    times.mark("export")
    address = here.card.map(handle, num_bytes, here.device)
    times.mark("map")
    here.card.release_memory(handle)
    times.mark("release")
    here.kept[name] = Pool(address, num_bytes)
    return times.took


def map_pool(here: Here, name: str, num_bytes: int) -> dict[str, float]:
    """As another process exported it."""
    num_bytes = rounded(here, num_bytes)
    times = Times()
    handle = here.card.import_fd(here.got[0])
    times.mark("import")
    address = here.card.map(handle, num_bytes, here.device)
    times.mark("map")
    here.card.release_memory(handle)
    times.mark("release")
    here.kept[name] = Pool(address, num_bytes)
    return times.took


def drop_pool(here: Here, name: str) -> dict[str, float]:
    pool = here.kept.pop(name)
    times = Times()
    here.card.unmap(pool.address, pool.num_bytes)
    times.mark("unmap")
    return times.took


def count_into(here: Here, name: str, begin: int) -> None:
    """Word i of the pool is begin + i, by a kernel."""
    pool = here.kept[name]
    here.card.count(pool.address, pool.words, begin, here.stream)
    here.card.synchronize(here.stream)


def fill_pool(here: Here, name: str, value: int) -> None:
    pool = here.kept[name]
    here.card.fill(pool.address, value, pool.words, here.stream)
    here.card.synchronize(here.stream)


def pieces(pool: Pool) -> list[tuple[int, int]]:
    """(first word, words) of what is read of it: all, or pieces from its begin to its end."""
    size = PIECE_BYTES // WORD
    whole = [(first, min(size, pool.words - first)) for first in range(0, pool.words, size)]
    if len(whole) <= PIECES:
        return whole
    return [whole[at] for at in np.linspace(0, len(whole) - 1, PIECES).astype(int).tolist()]


def wrong_words(here: Here, name: str, begin: int) -> int:
    """How many words, of those that were looked at, are not what `count_into` put there."""
    pool, wrong = here.kept[name], 0
    for first, words in pieces(pool):
        found = here.card.read(pool.address + first * WORD, words)
        wrong += int(np.count_nonzero(found != np.arange(begin + first, begin + first + words, dtype=np.uint64)))
    return wrong


def words_not(here: Here, name: str, value: int) -> int:
    """How many words, of those that were looked at, are not `value`."""
    pool = here.kept[name]
    found = (here.card.read(pool.address + first * WORD, words) for first, words in pieces(pool))
    return sum(int(np.count_nonzero(each != value)) for each in found)


def share_words(here: Here, name: str) -> bool:
    """Map and register words, in place of those of that name; whether the device has them at the same address."""
    shared = Shared(here.got[0])
    if (old := here.kept.get(name)) is not None:
        here.card.unpin(old.address)  # before it is unmapped: the next mapping may get its address
    here.kept[name] = shared
    here.kept[name + "@"] = here.card.register(shared.address, shared.num_bytes)
    return bool(here.kept[name + "@"] == shared.address)


def word(here: Here, name: str, index: int) -> int:
    """Where the device has that word."""
    return int(here.kept[name + "@"]) + index * WORD


def stream_is_busy(here: Here) -> bool:
    return here.card.is_busy(here.stream)


def ready(here: Here) -> float:
    """Begin with CUDA and compile the kernels; seconds."""
    began = time.monotonic()
    here.card.spin(0, here.stream)
    here.card.synchronize(here.stream)
    return time.monotonic() - began


def poll(words: memoryview, index: int, least: int) -> None:
    """Until the word is that much. Without end: whoever asked has one."""
    while words[index] < least:
        for _ in range(64):
            if words[index] >= least:
                return
        os.sched_yield()
