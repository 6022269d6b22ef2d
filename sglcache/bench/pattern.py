"""The bytes that a runner which computes nothing writes in place of KV, so that any misplaced page is noticed.

K and V of a token are a function of its id, its position, the layer, K or V, the shard, and the place within the
row. So a page that holds another prefix's tokens, or the right ones at another position, or another layer's, or one
that a copy has put elsewhere, or half of one, does not match. One function makes them, for writing and for checking;
it works on whole runs of tokens, and there is no Python per token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.unsignedinteger[Any]]
SCRATCH_BYTES = 8 << 20  # what one step makes at a time

# Odd multipliers with well-mixed bits (of xxHash32 and murmur3).
_TOKEN, _POSITION, _MIX, _PLANE, _ROW = (
    np.uint32(c) for c in (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1)
)


class Shape(NamedTuple):
    """One shard's part of a page_first page: [2 (k, v), num_layers, page_size, row_bytes]."""

    page_size: int
    num_layers: int
    row_bytes: int  # heads of the shard * dim * bytes per element
    shard: int = 0

    @property
    def page_bytes(self) -> int:
        return 2 * self.num_layers * self.page_size * self.row_bytes


class Mismatch(NamedTuple):
    """The first token that is not as it was written."""

    position: int
    token: int
    slot: int
    layer: int
    part: str  # "k" or "v"


class Pattern:
    """Writes and checks runs of tokens in one shard's pool."""

    def __init__(self, pages: npt.NDArray[np.uint8], shape: Shape) -> None:
        """`pages`: uint8 [num_pages, page_bytes], the mapped pool."""
        assert pages.shape[1] == shape.page_bytes, f"{pages.shape} is not a pool of {shape}"
        width = next(width for width in (4, 2, 1) if shape.row_bytes % width == 0)
        self.shape = shape
        self.word = np.dtype(f"<u{width}")
        self.row_words = shape.row_bytes // width
        self.pool = pages.view(self.word).reshape(  # [num_pages, 2, num_layers, page_size, row_words]
            pages.shape[0], 2, shape.num_layers, shape.page_size, self.row_words
        )
        planes = np.arange(1, 2 * shape.num_layers + 1, dtype=np.uint32) + np.uint32(shape.shard << 16)
        self._planes = (planes * _PLANE).reshape(2, shape.num_layers)
        self._row = np.arange(self.row_words, dtype=np.uint32) * _ROW
        self._step = max(1, SCRATCH_BYTES // (2 * shape.num_layers * self.row_words * 4))

    def values(self, tokens: npt.NDArray[np.uint32], first: int) -> Words:
        """What tokens at positions first, first + 1, ... hold: [n, 2, num_layers, row_words]."""
        positions = np.arange(first, first + len(tokens), dtype=np.uint32)
        mixed = (tokens * _TOKEN) ^ (positions * _POSITION)
        mixed ^= mixed >> np.uint32(16)
        mixed *= _MIX
        planes = (mixed[:, None, None] ^ self._planes) * _PLANE
        planes ^= planes >> np.uint32(15)
        words = planes[..., None] + self._row
        if self.word.itemsize < 4:
            words >>= np.uint32(32 - 8 * self.word.itemsize)
        made: Words = words.astype(self.word, copy=False)
        return made

    def write(self, slots: npt.NDArray[np.int32], tokens: npt.NDArray[np.uint32], start: int, stop: int) -> None:
        """Fill in tokens[start:stop]; `slots` is the page table from position 0."""
        for at in range(start, stop, self._step):
            upto = min(at + self._step, stop)
            pages, offsets = self._place(slots, at, upto)
            self.pool[pages, :, :, offsets, :] = self.values(tokens[at:upto], at)

    def check(
        self, slots: npt.NDArray[np.int32], tokens: npt.NDArray[np.uint32], start: int, stop: int
    ) -> Mismatch | None:
        """The first of tokens[start:stop] that is not there as written; None if all are."""
        for at in range(start, stop, self._step):
            upto = min(at + self._step, stop)
            pages, offsets = self._place(slots, at, upto)
            wrong = self.pool[pages, :, :, offsets, :] != self.values(tokens[at:upto], at)
            if wrong.any():
                token, part, layer, _ = (int(axis[0]) for axis in np.nonzero(wrong))
                position = at + token
                slot = int(slots[position // self.shape.page_size])
                return Mismatch(position, int(tokens[position]), slot, layer, "kv"[part])
        return None

    def _place(
        self, slots: npt.NDArray[np.int32], start: int, stop: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        positions = np.arange(start, stop)
        pages, offsets = np.divmod(positions, self.shape.page_size)
        return slots[pages], offsets
