"""The thread that moves pages between pools in this process's memory.

Everything per page happens in numpy with the interpreter's lock let go; Python runs once per few MiB. The bytes move
twice, through a small buffer: neither numpy nor torch gathers and scatters in one. What a pool's pages are like is told
by `geometry.moves`: a pair of regions after the other, so any layout goes to any other. (numpy, and not torch's
index_select and index_copy_, since it takes a page of any size as one item, and is faster by a fifth.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from sglcache.errors import ClosedError, TransferError
from sglcache.memory.geometry import moves
from sglcache.memory.pools import Pool, Rows
from sglcache.units import TicketId

STAGING_BYTES = 4 << 20

Done = Callable[[TicketId, bool, TransferError | None], None]
_Job = tuple[TicketId, Sequence[Pool], Sequence[Pool], bytes, bytes]


class Copier:
    """Copies in the order of submission, one at a time; `done(ticket, ok, error)` is called for each, in that order.

    `done` runs on the copier's thread and must not raise. With ok, every pool's bytes are there; else `error` says
    why, and the target pages hold anything. The queue is as long as the caller lets it grow. The caller also sees to
    it that nobody else writes the source pages, or touches the target pages, of a copy on its way.
    """

    def __init__(self, done: Done) -> None:
        self._done = done
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._staging = np.empty(STAGING_BYTES, np.uint8)
        self._closed = False
        self._dropping = False
        # A daemon thread: a process that fails before close() shall end, not wait.
        self._thread = threading.Thread(target=self._run, name="sglcache-copier", daemon=True)
        self._thread.start()

    def submit(
        self, ticket: TicketId, src: Sequence[Pool], dst: Sequence[Pool], src_slots: bytes, dst_slots: bytes
    ) -> None:
        """Queue a copy of page src_slots[i] of src[n] to page dst_slots[i] of dst[n], for each i and each pair n.

        A pool may be there more than once, as the source of what several shards have alike. Slots are packed int32,
        equally many, without repeats in `dst_slots`. ClosedError after `close`.
        """
        if self._closed:
            raise ClosedError("the copier is closed")
        self._jobs.put((ticket, src, dst, src_slots, dst_slots))

    def close(self, *, finish: bool = True) -> None:
        """End the thread and wait for it: after all that is queued, or after the copy that is running.

        What is dropped gets no `done`. Harmless when repeated.
        """
        self._dropping |= not finish
        self._closed = True
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and not self._dropping:
            self._perform(job)

    def _perform(self, job: _Job) -> None:
        ticket, src, dst, src_slots, dst_slots = job
        try:
            self._copy(src, dst, src_slots, dst_slots)
        except Exception as exc:
            error = TransferError(f"copy {ticket} failed: {exc}", ticket=ticket)
            error.__cause__ = exc
            self._done(ticket, False, error)
        else:
            self._done(ticket, True, None)

    def _copy(self, src: Sequence[Pool], dst: Sequence[Pool], src_slots: bytes, dst_slots: bytes) -> None:
        src_index = np.frombuffer(src_slots, "<i4")
        dst_index = np.frombuffer(dst_slots, "<i4")
        if len(src_index) != len(dst_index):
            raise ValueError(f"{len(src_index)} source slots, {len(dst_index)} target slots")
        for src_pool, dst_pool in zip(src, dst, strict=True):
            pairs = moves(src_pool.placement, dst_pool.placement)
            _check_slots(src_index, src_pool)
            _check_slots(dst_index, dst_pool)
            for src_region, dst_region in pairs:
                self._copy_rows(src_pool.rows(src_region), dst_pool.rows(dst_region), src_index, dst_index)

    def _copy_rows(
        self, src: Rows, dst: Rows, src_index: npt.NDArray[np.int32], dst_index: npt.NDArray[np.int32]
    ) -> None:
        num_bytes = src.itemsize
        chunk = max(1, STAGING_BYTES // num_bytes)
        if self._staging.nbytes < num_bytes:
            self._staging = np.empty(num_bytes, np.uint8)
        staging = self._staging[: chunk * num_bytes].view(src.dtype)
        for first in range(0, len(src_index), chunk):
            here = slice(first, first + chunk)
            if src.flags.c_contiguous:
                rows = staging[: len(src_index[here])]
                np.take(src, src_index[here], out=rows, mode="clip")  # "raise" would buffer it once more
            else:  # of which take would make a contiguous copy first, all of the pool
                rows = src[src_index[here]]
            dst[dst_index[here]] = rows


def _check_slots(slots: npt.NDArray[np.int32], pool: Pool) -> None:
    if len(slots) and not (slots.min() >= 0 and slots.max() < pool.num_pages):
        raise IndexError(f"slots {slots.min()}..{slots.max()} of a pool of {pool.num_pages} pages")
