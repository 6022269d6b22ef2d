"""The host pools' memory, had in the background: a daemon serves at once, and its host tier grows as memory is there.

A memfd costs memory as it is written. So the first copies to the host wait for the kernel to find pages and clear them,
and memory that the machine has not got is noticed when a copy hits it. With `host.populate` a thread has all of it
beforehand, some pages at a time, the same ones in every part's pool; after each chunk the index is told how many are
usable, and until then it does not give out their slots. Nothing of another resource is on the host without a page of
the first: so those pools are filled whole before the first's, and the index need not be told of them. (On a CUDA device
the same thread will pin them: a card's copy engines reach only pinned memory at full speed.)
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence

from sglcache.memory.pools import Pool

logger = logging.getLogger("sglcache.host")

CHUNK_BYTES = 256 << 20  # of all parts: a tenth of a second or so
MAX_CHUNKS = 64


class Filler:
    """Has the memory of `pools`, which are alike, on a thread of its own, from construction on.

    `ready(num_pages)` is called there whenever the first so many pages of every pool are usable; it must not raise.
    `before`: pools of other resources, by resource.
    """

    def __init__(
        self, pools: Sequence[Pool], ready: Callable[[int], None], before: Sequence[Sequence[Pool]] = ()
    ) -> None:
        self._pools = pools
        self._ready = ready
        self._before = before
        self._closed = False
        self.bytes_before = 0  # of the pools before, what is there; another thread may look
        self.error: OSError | None = None  # the machine has no more: what was there until then is all there will be
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
        chunk = chunk_pages(total, page_bytes)
        for first in range(0, total, chunk):
            stop = min(first + chunk, total)
            for pool in pools:
                if self._closed or self.error is not None:
                    return
                try:
                    pool.populate(first, stop)
                except OSError as exc:
                    self.error = exc
                    logger.error(
                        "the host tier has %d of %d pages and gets no more: %s; lower host.size, or give the machine "
                        "more memory",
                        first if pools is self._pools else 0,
                        self._pools[0].num_pages,
                        exc,
                    )
                    return
            yield stop, (stop - first) * page_bytes


def chunk_pages(num_pages: int, page_bytes: int) -> int:
    """Pages to have at once: of CHUNK_BYTES, or more, that there be no more than MAX_CHUNKS."""
    return max(1, CHUNK_BYTES // max(1, page_bytes), -(-num_pages // MAX_CHUNKS))
