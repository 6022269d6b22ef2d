"""A runner's side of a device pool: the same bytes, seen as K and V of each layer, or as latents.

The tensors are torch's, which is loaded when the first of them is asked for: who takes `array` or `layers` can do
without.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sglcache.errors import BadRequest, ClosedError, extras
from sglcache.memory.geometry import Geometry
from sglcache.memory.mapping import map_shared

if TYPE_CHECKING:
    from torch import Tensor


Bytes = npt.NDArray[np.uint8]


class KVViews:
    """Tensors, or arrays, on one shard's device pool.

    Writes are seen by every process that maps it, at once and uncopied. Index the first axis with a lease's slots;
    write only to pages of a lease of yours that are not committed.

    `fd` is the shard's memfd; it stays the caller's, who may close it at once. ProtocolError if it does not fit the
    geometry. After `close`, and in a forked child, every property raises ClosedError; a tensor that was taken before
    the fork ends the child when touched (see `mapping`). Without torch, the tensors raise NotInstalled.
    """

    def __init__(self, fd: int, geometry: Geometry, shard: int = 0) -> None:
        if not 0 <= shard < geometry.num_shards:
            raise BadRequest(f"shard {shard} of {geometry.num_shards}", shard=shard, num_shards=geometry.num_shards)
        self.geometry = geometry
        self.shard = shard
        self._pid = os.getpid()
        self._placement = geometry.placement()
        region = map_shared(fd, geometry.pool_bytes)
        self._buffer: Bytes | None = np.frombuffer(memoryview(region), dtype=np.uint8)
        self._tensors: tuple[tuple[Tensor, ...], ...] | None = None

    @property
    def layers(self) -> tuple[tuple[Bytes, ...], ...]:
        """As numpy's, in any layout. Per layer K and V, or latents: uint8 [num_pages, page_size, bytes of a token]."""
        buffer, geometry = self._open().data, self.geometry
        return tuple(
            tuple(
                np.ndarray(
                    (geometry.num_pages, geometry.page_size, plane.token_bytes),
                    np.uint8,
                    buffer,
                    region.offset,
                    (region.page_stride, plane.token_bytes, 1),
                )
                for plane, region in zip(geometry.planes, regions, strict=True)
            )
            for regions in self._placement.layers
        )

    @property
    def array(self) -> Bytes:
        """uint8 [num_pages, page_bytes], contiguous, as numpy's. ConfigError: not in the layout layer_first."""
        self._placement.page()
        return self._open().reshape(self.geometry.num_pages, self.geometry.page_bytes)

    @property
    def pages(self) -> Tensor:
        """uint8 [num_pages, page_bytes], contiguous. ConfigError: not in the layout layer_first."""
        with extras():
            import torch
        with torch.inference_mode(False):
            return torch.from_numpy(self.array)

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
        """Let go of the mapping, which goes with the last tensor or array made from it: those you kept stay good.

        Harmless when repeated, and in a forked child, where there is nothing to unmap.
        """
        self._buffer = self._tensors = None

    def _open(self) -> Bytes:
        if self._buffer is None:
            raise ClosedError("the views are closed")
        if os.getpid() != self._pid:
            raise ClosedError("the views belong to the parent of this forked process; attach anew")
        return self._buffer

    def _plane(self, name: str) -> tuple[Tensor, ...]:
        buffer, planes = self._open(), self.geometry.planes
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
                flat = torch.from_numpy(buffer).view(dtype)
                self._tensors = tuple(
                    tuple(
                        flat.as_strided(
                            (self.geometry.num_pages, page_size, plane.heads, plane.dim),
                            (regions[number].page_stride // item, plane.heads * plane.dim, plane.dim, 1),
                            regions[number].offset // item,
                        )
                        for regions in self._placement.layers
                    )
                    for number, plane in enumerate(planes)
                )
        return self._tensors[names.index(name)]
