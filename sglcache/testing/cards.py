"""Pages on cards, for who has no torch: read and written through the driver, in a stream, as a runner's kernels would.

`Port` is a process's way there. Its `layers` are, of a pool's view, what `view.layers` are of shared memory: so what
writes and checks pages (`bench.contents`) does not know where they lie.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from sglcache.memory.cuda_pools import CardBytes
from sglcache.memory.views import KVViews, StateViews
from sglcache.testing.card import WORD, Card

STAGING_BYTES: Final = 4 << 20
MAX_BATCH: Final = 4096  # ranges of one call

Words = npt.NDArray[np.uint64]


class Port:
    """Of each card that this process sees one stream, in whose order all is read and written. One thread at a time.

    Writes are enqueued, so an event that is recorded behind them may be done later; reads wait. What is read or to be
    written lies in between in pinned memory.
    """

    def __init__(self) -> None:
        """ConfigError: there is no driver."""
        self.cards = [Card(device) for device in range(Card().num_devices())]
        self.cards[0].use(0)
        self._streams = {card.device: self._stream(card) for card in self.cards}
        self._staging = np.frombuffer(mmap.mmap(-1, STAGING_BYTES), np.uint8)
        self._used = 0
        assert self.cards[0].pin(self._staging.ctypes.data, STAGING_BYTES), "4 MiB can't be pinned"

    def streams(self) -> Mapping[int, int]:
        """For a client: its work is in these."""
        return self._streams

    def stream(self, device: int = 0) -> int:
        return self._streams[device]

    def card(self, view: KVViews | StateViews) -> Card:
        """The one that a view's pool is on."""
        return self.cards[_bytes(view).device]

    def layers(self, view: KVViews | StateViews) -> Sequence[Sequence[CardArray]]:
        """Of each layer K and V, latents, or a state's arrays, as `view.layers`."""
        memory = _bytes(view)
        return view.shaped(lambda shape, offset, strides: CardArray(self, memory, shape, offset, strides))

    def spin(self, seconds: float, device: int = 0) -> None:
        """Enqueue a kernel that takes so long."""
        card = self.cards[device]
        with card.on(device):
            card.spin(seconds, self._streams[device])

    def is_busy(self, device: int = 0) -> bool:
        card = self.cards[device]
        with card.on(device):
            return card.is_busy(self._streams[device])

    def finish(self) -> None:
        """Wait until all that was enqueued is done."""
        for card in self.cards:
            with card.on(card.device):
                card.synchronize(self._streams[card.device])

    def rest(self) -> None:
        """As `finish`: and what lies in between is of no use any more."""
        self.finish()
        self._used = 0

    def close(self) -> None:
        """Let go of the streams, once they are empty, and of the memory. What was made of it is of no use any more."""
        self.finish()
        for card in self.cards:
            with card.on(card.device):
                card.release([self._streams[card.device]], [])
        with self.cards[0].on(0):
            self.cards[0].unpin(self._staging.ctypes.data)

    def write(self, device: int, addresses: Words, rows: npt.NDArray[np.uint8]) -> None:
        """Enqueue: rows[i] to addresses[i]. uint8 [n, row_bytes]."""
        row_bytes = rows.shape[1]
        for at in range(0, len(rows), step := max(1, STAGING_BYTES // row_bytes)):
            part = np.ascontiguousarray(rows[at : at + step])
            start = self._take(part.nbytes)
            self._staging[start : start + part.nbytes] = part.reshape(-1)
            there = addresses[at : at + step]
            self._copy(device, there, self._address(start, len(part), row_bytes), row_bytes)

    def read(self, device: int, addresses: Words, row_bytes: int) -> npt.NDArray[np.uint8]:
        """What is there behind all that was enqueued: uint8 [n, row_bytes]."""
        found = np.empty((len(addresses), row_bytes), np.uint8)
        for at in range(0, len(addresses), step := max(1, STAGING_BYTES // row_bytes)):
            part = found[at : at + step]
            start = self._take(part.nbytes)
            self._copy(device, self._address(start, len(part), row_bytes), addresses[at : at + step], row_bytes)
            card = self.cards[device]
            with card.on(device):
                card.synchronize(self._streams[device])
            part[:] = self._staging[start : start + part.nbytes].reshape(part.shape)
        return found

    def _take(self, num_bytes: int) -> int:
        """Where in the memory in between there is room for so many."""
        if self._used + num_bytes > STAGING_BYTES:
            self.rest()
        start = self._used
        self._used += num_bytes
        return start

    def _address(self, start: int, count: int, row_bytes: int) -> Words:
        return np.uint64(self._staging.ctypes.data + start) + np.arange(count, dtype=np.uint64) * np.uint64(row_bytes)

    def _copy(self, device: int, dst: Words, src: Words, row_bytes: int) -> None:
        size = np.uint64(row_bytes)
        joined = (np.diff(dst) == size) & (np.diff(src) == size)
        first = np.flatnonzero(np.concatenate(([True], ~joined))) if len(dst) else np.zeros(0, np.int64)
        sizes = np.diff(np.append(first, len(dst))).astype(np.uint64) * size
        card = self.cards[device]
        with card.on(device):
            for at in range(0, len(first), MAX_BATCH):
                here = first[at : at + MAX_BATCH]
                card.copy(dst[here], src[here], sizes[at : at + MAX_BATCH], self._streams[device])

    def _stream(self, card: Card) -> int:
        with card.on(card.device):
            return card.stream()


class Gate:
    """Holds streams back: what is put into one behind `hold` waits until `open`. Opened once, it stays so.

    Meanwhile no more than `STAGING_BYTES` may be written, and nothing read.
    """

    def __init__(self, port: Port) -> None:
        self._port = port
        port.rest()
        with port.cards[0].on(0):
            self._address = port.cards[0].alloc_host(WORD)
        self._word = ctypes.c_uint64.from_address(self._address)
        self._word.value = 0

    def hold(self, device: int = 0) -> None:
        card = self._port.cards[device]
        with card.on(device):
            card.launch("sgl_wait_flag", self._address, 1, stream=self._port.stream(device))

    def open(self) -> None:
        self._word.value = 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.open()
        self._port.finish()
        with self._port.cards[0].on(0):
            self._port.cards[0].free_host(self._address)


class Scratch:
    """Memory of a card's own, into which kernels of a port's stream read pages."""

    def __init__(self, port: Port, num_bytes: int, device: int = 0) -> None:
        """A multiple of 8."""
        self._port, self._card, self._num_bytes = port, port.cards[device], num_bytes
        with self._card.on(device):
            address = self._card.alloc(num_bytes)
        assert address is not None, f"card {device} has not {num_bytes} bytes left"
        self.address = address

    def take(self, array: CardArray, *index: int, num_bytes: int | None = None, at: int = 0) -> None:
        """Enqueue a kernel that copies so much (None: a row) from there, to `at`."""
        words = (num_bytes or array.row_bytes) // WORD
        with self._card.on(self._card.device):
            stream = self._port.stream(self._card.device)
            self._card.copy_words(self.address + at, array.address(*index), words, stream)

    def read(self, row_bytes: int) -> npt.NDArray[np.uint8]:
        """What it has, once all that was enqueued is done: uint8 [n, row_bytes]."""
        starts = np.arange(self.address, self.address + self._num_bytes, row_bytes, dtype=np.uint64)
        return self._port.read(self._card.device, starts, row_bytes)

    def close(self) -> None:
        self._port.finish()
        with self._card.on(self._card.device):
            self._card.free(self.address)


class CardArray:
    """Bytes of a pool on a card, as an array whose rows (its last axis) are read and written a set at a time.

    It keeps the pool mapped.
    """

    def __init__(
        self,
        port: Port,
        memory: CardBytes,
        shape: tuple[int, ...],
        offset: int,
        strides: tuple[int, ...],
        dtype: npt.DTypeLike = np.uint8,
    ) -> None:
        self.port = port
        self.memory = memory
        self.shape = shape
        self.offset = offset
        self.strides = strides
        self.dtype = np.dtype(dtype)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] * self.itemsize

    def address(self, *index: int) -> int:
        """Where a row, or what is below a part of an index, begins."""
        return self.memory.address + self.offset + sum(i * s for i, s in zip(index, self.strides, strict=False))

    def view(self, dtype: npt.DTypeLike, /) -> CardArray:
        """The same bytes, rows of another type."""
        size = np.dtype(dtype).itemsize
        shape, strides = (*self.shape[:-1], self.row_bytes // size), (*self.strides[:-1], size)
        return CardArray(self.port, self.memory, shape, self.offset, strides, dtype)

    def __getitem__(self, key: Any, /) -> npt.NDArray[Any]:
        addresses, shape = self._rows(key)
        found = self.port.read(self.memory.device, addresses, self.row_bytes)
        return found.view(self.dtype).reshape(*shape, self.shape[-1])

    def __setitem__(self, key: Any, value: Any, /) -> None:
        addresses, shape = self._rows(key)
        whole = np.broadcast_to(np.asarray(value, self.dtype), (*shape, self.shape[-1]))
        rows = np.ascontiguousarray(whole).reshape(-1, self.shape[-1]).view(np.uint8)
        self.port.write(self.memory.device, addresses, rows)

    def _rows(self, key: Any) -> tuple[Words, tuple[int, ...]]:
        """The rows' addresses, and the shape that they have: of integers, or arrays of them, for the first axes."""
        keys = list(np.broadcast_arrays(*(key if isinstance(key, tuple) else (key,))))
        for axis, (each, length) in enumerate(zip(keys, self.shape[:-1], strict=False)):
            assert not each.size or (each.min() >= 0 and each.max() < length), f"axis {axis} has {length}, not {each}"
        places = sum(each.astype(np.int64) * stride for each, stride in zip(keys, self.strides, strict=False))
        for length, stride in zip(self.shape[len(keys) : -1], self.strides[len(keys) : -1], strict=True):
            places = np.asarray(places)[..., None] + np.arange(length) * stride
        found = np.asarray(places)
        return (found.reshape(-1) + (self.memory.address + self.offset)).astype(np.uint64), found.shape


def _bytes(view: KVViews | StateViews) -> CardBytes:
    memory = view.memory
    assert isinstance(memory, CardBytes), "the pool is shared memory"
    return memory
