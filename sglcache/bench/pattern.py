"""The bytes that a runner which computes nothing writes in place of KV, so that any misplaced page or state is noticed.

What a token's KV is is a function of its id, its position, the layer, K or V, the shard, and the place within the
row. So a page that holds another prefix's tokens, or the right ones at another position, or another layer's, or one
that a copy has put elsewhere, or half of one, does not match. One function makes them, for writing and for checking;
it works on whole runs of tokens, and there is no Python per token. A state's bytes are a function of all tokens before
it, the layer, the array, the shard, and the place within the array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.unsignedinteger[Any]]


class Rows(Protocol):
    """uint8 [num_pages, page_size, bytes of a token], or [num_slots, bytes]: numpy's, or what is read and written as
    they are, rows at a time, wherever it lies (`testing.cards`).
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]: ...
    def view(self, dtype: str, /) -> Any: ...
    def __getitem__(self, key: Any, /) -> Any: ...
    def __setitem__(self, key: Any, value: Any, /) -> None: ...


SCRATCH_BYTES = 8 << 20  # what one step makes at a time

# Odd multipliers with well-mixed bits (of xxHash32 and murmur3).
_TOKEN, _POSITION, _MIX, _PLANE, _ROW = (
    np.uint32(c) for c in (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1)
)


class Mismatch(NamedTuple):
    """The first token that is not as it was written."""

    position: int
    token: int
    slot: int
    layer: int
    plane: int  # of the layer: 0 is K or latents, 1 is V


class Pattern:
    """Writes and checks runs of tokens in one shard's pool."""

    def __init__(self, layers: Sequence[Sequence[Rows]], part: int = 0) -> None:
        """`layers`: of each layer its planes, uint8 [num_pages, page_size, bytes of a token], the mapped pool.

        `part`: what tells this shard's bytes from other shards', and those of one resource from another's; of replicas
        it is the same.
        """
        self.page_size = layers[0][0].shape[1]
        self._planes = [
            _Plane(number, plane, planes[plane], part)
            for number, planes in enumerate(layers)
            for plane in range(len(planes))
        ]
        widest = max(plane.words.shape[2] for plane in self._planes)
        self._step = max(1, SCRATCH_BYTES // (widest * 4))

    def write(self, slots: npt.NDArray[np.int32], tokens: npt.NDArray[np.uint32], start: int, stop: int) -> None:
        """Fill in tokens[start:stop]; `slots` is the page table from position 0."""
        for at in range(start, stop, self._step):
            upto = min(at + self._step, stop)
            pages, offsets = self._place(slots, at, upto)
            mixed = _mix(tokens[at:upto], at)
            for plane in self._planes:
                plane.words[pages, offsets] = plane.values(mixed)

    def check(
        self, slots: npt.NDArray[np.int32], tokens: npt.NDArray[np.uint32], start: int, stop: int
    ) -> Mismatch | None:
        """The first of tokens[start:stop] that is not there as written; None if all are."""
        for at in range(start, stop, self._step):
            upto = min(at + self._step, stop)
            pages, offsets = self._place(slots, at, upto)
            mixed = _mix(tokens[at:upto], at)
            found = []
            for plane in self._planes:
                wrong = (plane.words[pages, offsets] != plane.values(mixed)).any(axis=1)
                if wrong.any():
                    found.append((at + int(wrong.argmax()), plane.layer, plane.plane))
            if found:
                position, layer, which = min(found)
                slot = int(slots[position // self.page_size])
                return Mismatch(position, int(tokens[position]), slot, layer, which)
        return None

    def _place(
        self, slots: npt.NDArray[np.int32], start: int, stop: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        positions = np.arange(start, stop)
        pages, offsets = np.divmod(positions, self.page_size)
        return slots[pages], offsets


class WrongState(NamedTuple):
    """The first byte of a state that is not as it was written."""

    layer: int
    array: int  # of the layer
    byte: int


class StatePattern:
    """Writes and checks states in one shard's pool."""

    def __init__(self, layers: Sequence[Sequence[Rows]], part: int = 0) -> None:
        """`layers`: of each layer its arrays, uint8 [num_slots, bytes of it], the mapped pool; `part` as above."""
        self._arrays = [
            (layer, number, array, np.uint32((16 * layer + number + 1 + (part << 16)) * int(_PLANE) & 0xFFFFFFFF))
            for layer, arrays in enumerate(layers)
            for number, array in enumerate(arrays)
        ]
        widest = max(array.shape[1] for _, _, array, _ in self._arrays)
        self._places = np.arange(-(-widest // 4), dtype=np.uint32) * _ROW

    def write(self, slot: int, tokens: npt.NDArray[np.uint32]) -> None:
        """The state behind these tokens, all of a sequence's first."""
        seeds = _seeds(tokens)
        for _, _, array, own in self._arrays:
            array[slot] = self._bytes(seeds, own, array.shape[1])

    def check(self, slot: int, tokens: npt.NDArray[np.uint32]) -> WrongState | None:
        """The first byte that is not as it was written behind these tokens; None if all are."""
        seeds = _seeds(tokens)
        for layer, number, array, own in self._arrays:
            wrong = array[slot] != self._bytes(seeds, own, array.shape[1])
            if wrong.any():
                return WrongState(layer, number, int(wrong.argmax()))
        return None

    def _bytes(self, seeds: npt.NDArray[np.uint32], own: np.uint32, num_bytes: int) -> Bytes:
        words = (self._places[: -(-num_bytes // 4)] ^ seeds[0]) * _TOKEN
        words ^= seeds[1] ^ own
        words ^= words >> np.uint32(16)
        words *= _MIX
        made: Bytes = words.view(np.uint8)[:num_bytes]
        return made


def _seeds(tokens: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    return np.frombuffer(xxhash.xxh3_64_digest(tokens.tobytes()), np.uint32)


class _Plane:
    """K, V or latents of one layer."""

    def __init__(self, layer: int, plane: int, pages: Rows, part: int) -> None:
        self.layer, self.plane = layer, plane
        row_bytes = pages.shape[2]
        width = next(
            width for width in (4, 2, 1) if row_bytes % width == 0 and not any(s % width for s in pages.strides[:2])
        )
        self.words = pages.view(f"<u{width}")  # [num_pages, page_size, row_words]
        self._seed = np.uint32((2 * layer + plane + 1 + (part << 16)) * int(_PLANE) & 0xFFFFFFFF)
        self._row = np.arange(self.words.shape[2], dtype=np.uint32) * _ROW

    def values(self, mixed: npt.NDArray[np.uint32]) -> Words:
        """What tokens hold here: [n, row_words]."""
        seeds = (mixed ^ self._seed) * _PLANE
        seeds ^= seeds >> np.uint32(15)
        words = seeds[:, None] + self._row
        if (width := self.words.itemsize) < 4:
            words >>= np.uint32(32 - 8 * width)
        made: Words = words.astype(self.words.dtype, copy=False)
        return made


def _mix(tokens: npt.NDArray[np.uint32], first: int) -> npt.NDArray[np.uint32]:
    """Tokens at positions first, first + 1, ..., each with its position: uint32 [n]."""
    mixed = (tokens * _TOKEN) ^ (np.arange(first, first + len(tokens), dtype=np.uint32) * _POSITION)
    mixed ^= mixed >> np.uint32(16)
    mixed *= _MIX
    return mixed
