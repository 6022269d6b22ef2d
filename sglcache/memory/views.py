"""A runner's side of a device pool: the same bytes, seen as K and V of each layer.

The tensors are torch's, which is loaded when the first of them is asked for: who takes `array` can do without.
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


class KVViews:
    """Tensors, or an array, on one shard's device pool.

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
        region = map_shared(fd, geometry.pool_bytes)
        array = np.frombuffer(memoryview(region), dtype=np.uint8).reshape(geometry.num_pages, geometry.page_bytes)
        self._array: npt.NDArray[np.uint8] | None = array
        self._tensors: tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]] | None = None

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """uint8 [num_pages, page_bytes], contiguous, as numpy's."""
        return self._open()

    @property
    def pages(self) -> Tensor:
        """uint8 [num_pages, page_bytes], contiguous."""
        return self._torch()[0]

    @property
    def k(self) -> tuple[Tensor, ...]:
        """Per layer: [num_pages, page_size, shard_heads, head_dim] of the geometry's dtype; strided over pages."""
        return self._torch()[1]

    @property
    def v(self) -> tuple[Tensor, ...]:
        """As `k`."""
        return self._torch()[2]

    def close(self) -> None:
        """Let go of the mapping, which goes with the last tensor or array made from it: those you kept stay good.

        Harmless when repeated, and in a forked child, where there is nothing to unmap.
        """
        self._array = self._tensors = None

    def _open(self) -> npt.NDArray[np.uint8]:
        if self._array is None:
            raise ClosedError("the views are closed")
        if os.getpid() != self._pid:
            raise ClosedError("the views belong to the parent of this forked process; attach anew")
        return self._array

    def _torch(self) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        array, geometry = self._open(), self.geometry
        if self._tensors is None:
            with extras():
                import torch
            # Whoever first asks for the pool in inference mode must be able to write it outside.
            with torch.inference_mode(False):
                pages = torch.from_numpy(array)
                # [num_pages, 2 (k, v), num_layers, page_size, shard_heads, head_dim]
                both = pages.view(getattr(torch, geometry.dtype)).view(geometry.num_pages, *geometry.page_shape)
                self._tensors = (
                    pages,
                    tuple(both[:, 0, layer] for layer in range(geometry.num_layers)),
                    tuple(both[:, 1, layer] for layer in range(geometry.num_layers)),
                )
        return self._tensors
