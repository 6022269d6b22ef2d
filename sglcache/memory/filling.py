"""The host pools' memory, had in the background: a daemon serves at once, and its host tier grows as memory is there.

A memfd costs memory as it is written. So the first copies to the host wait for the kernel to find pages and clear them,
and memory that the machine has not got is noticed when a copy hits it. With `host.populate` a thread has all of it
beforehand, some pages at a time, the same ones in every part's pool; after each chunk the index is told how many are
usable, and until then it does not give out their slots. (On a CUDA device the same thread will pin them: a card's copy
engines reach only pinned memory at full speed.)
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from sglcache.memory.pools import Pool

logger = logging.getLogger("sglcache.host")

CHUNK_BYTES = 256 << 20  # of all parts: a tenth of a second or so
MAX_CHUNKS = 64


class Filler:
    """Has the memory of `pools`, which are alike, on a thread of its own, from construction on.

    `ready(num_pages)` is called there whenever the first so many pages of every pool are usable; it must not raise.
    """

    def __init__(self, pools: Sequence[Pool], ready: Callable[[int], None]) -> None:
        self._pools = pools
        self._ready = ready
        self._closed = False
        self.error: OSError | None = None  # the machine has no more: what was there until then is all there will be
        self._thread = threading.Thread(target=self._run, name="sglcache-filler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop after the chunk that is under way. Harmless when repeated."""
        self._closed = True
        self._thread.join()

    def _run(self) -> None:
        total = self._pools[0].num_pages
        chunk = chunk_pages(total, sum(pool.placement.page_bytes for pool in self._pools))
        for first in range(0, total, chunk):
            stop = min(first + chunk, total)
            for pool in self._pools:
                if self._closed:
                    return
                try:
                    pool.populate(first, stop)
                except OSError as exc:
                    self.error = exc
                    logger.error(
                        "the host tier has %d of %d pages and gets no more: %s; lower host.size, or give the machine "
                        "more memory",
                        first,
                        total,
                        exc,
                    )
                    return
            self._ready(stop)


def chunk_pages(num_pages: int, page_bytes: int) -> int:
    """Pages to have at once: of CHUNK_BYTES, or more, that there be no more than MAX_CHUNKS."""
    return max(1, CHUNK_BYTES // page_bytes, -(-num_pages // MAX_CHUNKS))
