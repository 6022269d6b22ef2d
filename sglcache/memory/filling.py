"""The host pools' memory, had in the background: a daemon serves at once, and its host tier grows as memory is there.

A memfd costs memory as it is written. So the first copies to the host wait for the kernel to find pages and clear them,
and memory that the machine has not got is noticed when a copy hits it. With `host.populate` a thread has all of it
beforehand, some pages at a time, the same ones in every part's pool; after each chunk the index is told how many are
usable, and until then it does not give out their slots. Nothing of another resource is on the host without a page of
the first: so those pools are filled whole before the first's, and the index need not be told of them.

For cards the same thread has the memory pinned, since their copy engines reach only such memory at full speed. A copy
may not reach over from one pinned range into the next: so ranges end between pages, at multiples of `pinned_pages`.
"""

from __future__ import annotations

import errno
import logging
import math
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from sglcache.errors import TransferError
from sglcache.memory.geometry import Region, moves
from sglcache.memory.pools import Pool

logger = logging.getLogger("sglcache.host")

CHUNK_BYTES = 256 << 20  # of all parts: a tenth of a second or so
MAX_CHUNKS = 64


class Short(NamedTuple):
    """The machine has no more memory for these pools than for so many of their pages."""

    num_pages: int
    of: int
    why: str


class Filler:
    """Has the memory of `pools`, which are alike, on a thread of its own, from construction on.

    `ready(num_pages)` is called there whenever the first so many pages of every pool are usable; it must not raise.
    `before`: pools of other resources, by resource.
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        ready: Callable[[int], None],
        before: Sequence[Sequence[Pool]] = (),
        pin: Callable[[int, int], bool] | None = None,
    ) -> None:
        """`pin(address, num_bytes)`: have it pinned; False: the machine won't; an exception: nothing will be."""
        self._pools = pools
        self._ready = ready
        self._before = before
        self._pin = pin
        self._closed = False
        self.bytes_before = 0  # of the pools before, what is there; another thread may look
        self.short: Short | None = None  # what was there until then is all there will be; another thread may look
        self._thread = threading.Thread(target=self._run, name="sglcache-filler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop after the chunk that is under way. Harmless when repeated."""
        self._closed = True
        self._thread.join()

    def _run(self) -> None:
        for pools in self._before:
            for _, num_bytes in self._fill(pools):
                self.bytes_before += num_bytes
        for stop, _ in self._fill(self._pools):
            self._ready(stop)

    def _fill(self, pools: Sequence[Pool]) -> Iterator[tuple[int, int]]:
        """Have their memory, a chunk at a time; so many pages there are then, and the chunk's bytes."""
        total, page_bytes = pools[0].num_pages, sum(pool.placement.page_bytes for pool in pools)
        pinned = pinned_pages(pools) if self._pin is not None else 0
        at_the_end = self._pin is not None and not pinned
        chunk = pinned or chunk_pages(total, page_bytes)
        for first in range(0, total, chunk):
            stop = min(first + chunk, total)
            for pool in pools:
                if self._closed or self.short is not None:
                    return
                try:
                    pool.populate(first, stop)
                    if self._pin is not None and (stop == total or not at_the_end):
                        _pin(self._pin, pool, 0 if at_the_end else first, stop)
                except TransferError:
                    return  # a card is lost, and the rank ends for it
                except OSError as exc:
                    there = first if pools is self._pools and not at_the_end else 0
                    self.short = Short(there, self._pools[0].num_pages, str(exc))
                    logger.error(
                        "the host tier has %d of %d pages and gets no more: %s; lower host.size, or give the machine "
                        "more memory",
                        *self.short,
                    )
                    return
            if not at_the_end:
                yield stop, (stop - first) * page_bytes
        if at_the_end:
            yield total, total * page_bytes


def pinned_pages(pools: Sequence[Pool]) -> int:
    """Of how many pages each range is that is pinned as one; 0: of all.

    Of several, where a page is in one piece: then as many as there can be in a chunk, so that each begins with a page
    of the system's.
    """
    if not pools or len(_pieces(pools[0])) != 1:
        return 0
    total, page_bytes = pools[0].num_pages, pools[0].placement.page_bytes
    chunk = chunk_pages(total, sum(pool.placement.page_bytes for pool in pools))
    step = mmap.PAGESIZE // math.gcd(page_bytes, mmap.PAGESIZE)
    chunk = -(-chunk // step) * step
    return chunk if chunk < total else 0


def _pin(pin: Callable[[int, int], bool], pool: Pool, first: int, stop: int) -> None:
    pieces = _pieces(pool)
    if len(pieces) == 1:
        start, end = (pieces[0].start(page) for page in (first, stop))
    else:
        start, end = 0, pool.num_bytes
    if end > start and not pin(pool.address + start, end - start):
        raise OSError(errno.ENOMEM, f"{end - start} bytes can't be pinned")


def _pieces(pool: Pool) -> list[Region]:
    """Of each page."""
    return [region for region, _ in moves(pool.placement, pool.placement)]


def chunk_pages(num_pages: int, page_bytes: int) -> int:
    """Pages to have at once: of CHUNK_BYTES, or more, that there be no more than MAX_CHUNKS."""
    return max(1, CHUNK_BYTES // max(1, page_bytes), -(-num_pages // MAX_CHUNKS))
