"""The memory that a rank owns: per tier and shard one memfd of pages, mapped. Which page is whose, the core knows.

On a CPU a rank moves pages and never looks into them, so it does without torch, whose import is most of a cold start.
`pages` is a torch tensor for whoever asks for it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from sglcache.errors import ClosedError
from sglcache.memory.geometry import Geometry
from sglcache.memory.mapping import create_memfd, map_shared

if TYPE_CHECKING:
    from torch import Tensor

Rows = np.ndarray[Any, np.dtype[np.void]]  # [num_pages], each item one page


class Pool:
    """One shard's pages of one tier, zero at first. Nothing is touched at start: memory is taken page by page."""

    def __init__(self, name: str, num_pages: int, page_bytes: int) -> None:
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.fd = create_memfd(name, self.num_bytes)
        try:
            region = map_shared(self.fd, self.num_bytes)
        except BaseException:
            os.close(self.fd)
            raise
        self._rows: Rows | None = np.ndarray(num_pages, np.dtype(f"V{page_bytes}"), memoryview(region))

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def rows(self) -> Rows:
        """void [num_pages], an item a page, on the shared memory. ClosedError once closed."""
        if self._rows is None:
            raise ClosedError("the pool is closed")
        return self._rows

    @property
    def pages(self) -> Tensor:
        """uint8 [num_pages, page_bytes], CPU, contiguous, on the shared memory. ClosedError once closed."""
        import torch

        return torch.from_numpy(self.rows.view(np.uint8).reshape(self.num_pages, self.page_bytes))

    def close(self) -> None:
        """Close the descriptor and let go of the mapping, which goes with the last array or tensor made from it.

        Harmless when repeated.
        """
        if self._rows is not None:
            self._rows = None
            os.close(self.fd)


class Pools:
    """One tier of a rank: `shards[i]` is shard i's pool. Without pages, no shards."""

    def __init__(self, name: str, num_pages: int, geometry: Geometry) -> None:
        shards: list[Pool] = []
        try:
            for shard in range(geometry.num_shards if num_pages else 0):
                shards.append(Pool(f"{name}-{shard}", num_pages, geometry.page_bytes))
        except BaseException:
            for pool in shards:
                pool.close()
            raise
        self.shards = tuple(shards)

    def close(self) -> None:
        for pool in self.shards:
            pool.close()


class DevicePools(Pools):
    """What runners map. On a CPU: memfds."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__("sglcache-device", geometry.num_pages, geometry)


class HostPools(Pools):
    """The second tier, which nobody but the rank sees."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__("sglcache-host", geometry.host_pages, geometry)
