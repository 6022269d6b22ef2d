"""A runner's side of a device pool: the same bytes, seen as K and V of each layer, as latents, or as states.

The tensors are torch's, which is loaded when the first of them is asked for: who takes `array` or `layers` can do
without.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from sglcache.errors import BadRequest, ClosedError, ProtocolError, extras
from sglcache.memory.geometry import ITEM_BYTES, Form, Geometry, StateGeometry
from sglcache.memory.mapping import map_shared

if TYPE_CHECKING:
    from torch import Tensor


Array = npt.NDArray[np.uint8]
T = TypeVar("T")
Make = Callable[[tuple[int, ...], int, tuple[int, ...]], T]
"""(shape, offset in the pool, strides in bytes): an array of a pool's bytes, whose last axis has no gaps."""


class Bytes(Protocol):
    """A shard's pool, wherever it is, mapped until the last tensor or array made from it is gone."""

    num_bytes: int

    @property
    def device(self) -> int | None:
        """The card's number in this process; None: shared memory."""
        ...

    @property
    def address(self) -> int: ...

    @property
    def buffer(self) -> Array:
        """uint8 [num_bytes]. ConfigError: this process's CPU can't see it."""
        ...

    @property
    def flat(self) -> Tensor:
        """uint8 [num_bytes], on its device."""
        ...


class SharedBytes:
    """Of a memfd."""

    device = None

    def __init__(self, fd: int, num_bytes: int) -> None:
        """ProtocolError: the memfd is not as it should be."""
        self.num_bytes = num_bytes
        self.buffer: Array = np.frombuffer(memoryview(map_shared(fd, num_bytes)), dtype=np.uint8)

    @property
    def address(self) -> int:
        return int(self.buffer.ctypes.data)

    @property
    def flat(self) -> Tensor:
        import torch

        return torch.from_numpy(self.buffer)


def _arrays(memory: Bytes) -> Make[Array]:
    buffer = memory.buffer.data
    return lambda shape, offset, strides: np.ndarray(shape, np.uint8, buffer, offset, strides)


class Views:
    """Tensors, or arrays, on one shard's device pool.

    Writes are seen by every process that maps it, at once and uncopied. Index the first axis with a lease's slots;
    write only to pages of a lease of yours that are not committed.

    `memory` is the shard's memfd, which stays the caller's, who may close it at once; or a card's, mapped.
    ProtocolError if it does not fit the form. After `close`, and in a forked child, every property raises ClosedError;
    a tensor that was taken before the fork ends the child when touched (see `mapping`). Without torch, the tensors
    raise NotInstalled; of a card's memory there are no arrays: ConfigError.
    """

    def __init__(self, memory: int | Bytes, form: Form, shard: int = 0) -> None:
        if not 0 <= shard < form.num_shards:
            raise BadRequest(f"shard {shard} of {form.num_shards}", shard=shard, num_shards=form.num_shards)
        self.shard = shard
        self._pid = os.getpid()
        self._shape = (form.num_pages, form.page_bytes)
        self.placement = form.placement()
        """Where the pages' pieces lie in the pool."""
        if isinstance(memory, int):
            memory = SharedBytes(memory, form.pool_bytes)
        if memory.num_bytes < form.pool_bytes:
            raise ProtocolError(f"a pool of {memory.num_bytes} bytes, {form.pool_bytes} are needed")
        self._memory: Bytes | None = memory

    @property
    def array(self) -> Array:
        """uint8 [num_pages, page_bytes], contiguous, as numpy's. ConfigError: not in the layout layer_first."""
        self.placement.page()
        return self._open().buffer.reshape(self._shape)

    @property
    def memory(self) -> Bytes:
        """The pool's bytes. ClosedError."""
        return self._open()

    @property
    def pages(self) -> Tensor:
        """uint8 [num_pages, page_bytes], contiguous. ConfigError: not in the layout layer_first."""
        self.placement.page()
        memory = self._open()
        with extras():
            import torch
        with torch.inference_mode(False):
            return memory.flat[: math.prod(self._shape)].view(self._shape)

    @property
    def device(self) -> int | None:
        """The number, in this process, of the card that the pool is on; None: it is shared memory."""
        return self._open().device

    @property
    def address(self) -> int:
        """Where the pool begins in this process, for kernels and copies that are given addresses."""
        return self._open().address

    def close(self) -> None:
        """Let go of the mapping, which goes with the last tensor or array made from it: those you kept stay good.

        Harmless when repeated, and in a forked child, where there is nothing to unmap.
        """
        self._memory = None

    def _open(self) -> Bytes:
        if self._memory is None:
            raise ClosedError("the views are closed")
        if os.getpid() != self._pid:
            raise ClosedError("the views belong to the parent of this forked process; attach anew")
        return self._memory


class KVViews(Views):
    """Of a pool of tokens: K and V, or latents."""

    def __init__(self, memory: int | Bytes, geometry: Geometry, shard: int = 0) -> None:
        super().__init__(memory, geometry, shard)
        self.geometry = geometry
        self._tensors: tuple[tuple[Tensor, ...], ...] | None = None

    @property
    def layers(self) -> tuple[tuple[Array, ...], ...]:
        """As numpy's, in any layout. Per layer K and V, or latents: uint8 [num_pages, page_size, bytes of a token]."""
        return self.shaped(_arrays(self._open()))

    def shaped(self, make: Make[T]) -> tuple[tuple[T, ...], ...]:
        """As `layers`, of what `make` makes."""
        geometry = self.geometry
        return tuple(
            tuple(
                make(
                    (geometry.num_pages, geometry.page_size, plane.token_bytes),
                    region.offset,
                    (region.page_stride, plane.token_bytes, 1),
                )
                for plane, region in zip(geometry.planes, regions, strict=True)
            )
            for regions in self.placement.layers
        )

    @property
    def k(self) -> tuple[Tensor, ...]:
        """Per layer: [num_pages, page_size, shard_heads, head_dim] of the geometry's dtype; strided over pages.

        BadRequest: the pool holds latents.
        """
        return self._plane("k")

    @property
    def v(self) -> tuple[Tensor, ...]:
        """As `k`: [num_pages, page_size, shard_heads, v_head_dim]."""
        return self._plane("v")

    @property
    def kv(self) -> tuple[Tensor, ...]:
        """Per layer the latents, each behind it the rotated key: [num_pages, page_size, 1, kv_lora_rank +
        qk_rope_head_dim], strided over pages. BadRequest: the pool holds K and V.
        """
        return self._plane("kv")

    def close(self) -> None:
        super().close()
        self._tensors = None

    def _plane(self, name: str) -> tuple[Tensor, ...]:
        memory, planes = self._open(), self.geometry.planes
        names = [plane.name for plane in planes]
        if name not in names:
            raise BadRequest(f"this pool holds no {name}; it has {' and '.join(f'pool.{it}' for it in names)}")
        if self._tensors is None:
            with extras():
                import torch
            dtype = getattr(torch, self.geometry.dtype)
            item, page_size = dtype.itemsize, self.geometry.page_size
            # Whoever first asks for the pool in inference mode must be able to write it outside.
            with torch.inference_mode(False):
                flat = memory.flat.view(dtype)
                self._tensors = tuple(
                    tuple(
                        flat.as_strided(
                            (self.geometry.num_pages, page_size, plane.heads, plane.dim),
                            (regions[number].page_stride // item, plane.heads * plane.dim, plane.dim, 1),
                            regions[number].offset // item,
                        )
                        for regions in self.placement.layers
                    )
                    for number, plane in enumerate(planes)
                )
        return self._tensors[names.index(name)]


class StateViews(Views):
    """Of a pool of states: each named array of each layer, by slot."""

    def __init__(self, memory: int | Bytes, geometry: StateGeometry, shard: int = 0) -> None:
        super().__init__(memory, geometry, shard)
        self.geometry = geometry
        self._states: dict[str, tuple[Tensor, ...]] | None = None

    @property
    def layers(self) -> tuple[tuple[Array, ...], ...]:
        """As numpy's, in any layout. Per layer each array in the states' order: uint8 [num_slots, bytes of it]."""
        return self.shaped(_arrays(self._open()))

    def shaped(self, make: Make[T]) -> tuple[tuple[T, ...], ...]:
        """As `layers`, of what `make` makes."""
        geometry = self.geometry
        sizes = [math.prod(geometry.shard_shape(it)) * ITEM_BYTES[it.dtype] for it in geometry.states]
        return tuple(
            tuple(
                make((geometry.num_pages, size), region.offset, (region.page_stride, 1))
                for size, region in zip(sizes, regions, strict=True)
            )
            for regions in self.placement.layers
        )

    @property
    def states(self) -> Mapping[str, tuple[Tensor, ...]]:
        """By name, per layer: [num_slots, *shape] of its dtype, the shard's part of the shape; strided over slots."""
        memory, geometry = self._open(), self.geometry
        if self._states is None:
            with extras():
                import torch
            found: dict[str, tuple[Tensor, ...]] = {}
            with torch.inference_mode(False):
                for number, state in enumerate(geometry.states):
                    dtype, shape = getattr(torch, state.dtype), geometry.shard_shape(state)
                    flat = memory.flat.view(dtype)
                    inner = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
                    regions = [each[number] for each in self.placement.layers]
                    found[state.name] = tuple(
                        flat.as_strided(
                            (geometry.num_pages, *shape),
                            (region.page_stride // dtype.itemsize, *inner),
                            region.offset // dtype.itemsize,
                        )
                        for region in regions
                    )
            self._states = found
        return self._states

    def close(self) -> None:
        super().close()
        self._states = None
