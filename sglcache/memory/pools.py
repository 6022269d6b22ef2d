"""The memory that a rank owns: on the device a pool for each shard, on the host one for each part, mapped.

On a CPU both are memfds; on cards the device's are `cuda_pools`'.

Which page is whose, the core knows; where its bytes lie, `geometry`. On a CPU a rank moves pages and never looks into
them, so it does without torch, whose import is most of a cold start. `pages` is a torch tensor for whoever asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from sglcache.errors import ClosedError
from sglcache.memory.geometry import FULL, Form, Placement, Region, moves
from sglcache.memory.mapping import create_memfd, map_shared, populate
from sglcache.units import Tier
from sglcache.wire import control

if TYPE_CHECKING:
    from torch import Tensor

Rows = np.ndarray[Any, np.dtype[np.void]]  # [num_pages], each item one page's bytes of a region


Source = Callable[[str, int], int]
"""Gives a descriptor of so many bytes by a name; it is the caller's."""


class Pool:
    """A buffer of pages, zero at first. Nothing is touched at start: memory is taken as it is written, or populated."""

    def __init__(self, name: str, placement: Placement, source: Source = create_memfd) -> None:
        """`source`: of its memory, which may hold what another life of the rank has written."""
        self.placement = placement
        self.fd = source(name, self.num_bytes)
        try:
            region = map_shared(self.fd, self.num_bytes, ours=True)
        except BaseException:
            os.close(self.fd)
            raise
        self._buffer: npt.NDArray[np.uint8] | None = np.frombuffer(memoryview(region), np.uint8)

    @property
    def num_pages(self) -> int:
        return self.placement.num_pages

    @property
    def num_bytes(self) -> int:
        return self.placement.num_bytes

    @property
    def buffer(self) -> npt.NDArray[np.uint8]:
        """uint8 [num_bytes], the shared memory. ClosedError once closed."""
        if self._buffer is None:
            raise ClosedError("the pool is closed")
        return self._buffer

    @property
    def address(self) -> int:
        """Where the buffer begins in this process. ClosedError once closed."""
        return int(self.buffer.ctypes.data)

    @property
    def fds(self) -> list[int]:
        """What `handle` needs beside it."""
        return [self.fd]

    def handle(self, shard: int, fd_index: int) -> control.Pool:
        """As it is told of to a member, whose Welcome's descriptor `fd_index` is `fds`'s."""
        return control.PoolHandle(shard, self.num_bytes, fd_index)

    def rows(self, region: Region) -> Rows:
        """void [num_pages], strided, an item a page's bytes of the region, on the shared memory."""
        item = np.dtype(f"V{region.num_bytes}")
        return np.ndarray(self.num_pages, item, self.buffer.data, region.offset, (region.page_stride,))

    def populate(self, first: int, stop: int) -> None:
        """Have the memory of pages first..stop-1 now, whatever they hold. OSError: the machine won't give it."""
        for region, _ in moves(self.placement, self.placement):
            start = region.start(first)
            populate(self.address + start, region.start(stop - 1) + region.num_bytes - start)

    @property
    def pages(self) -> Tensor:
        """uint8 [num_pages, page_bytes], CPU, on the shared memory. ConfigError where pages are not in one piece."""
        import torch

        self.placement.page()
        return torch.from_numpy(self.buffer.reshape(self.num_pages, self.placement.page_bytes))

    def close(self) -> None:
        """Close the descriptor and let go of the mapping, which goes with the last array or tensor made from it.

        Harmless when repeated.
        """
        if self._buffer is not None:
            self._buffer = None
            os.close(self.fd)


class DevicePool(Protocol):
    """What a rank knows of a shard's pool, wherever that is."""

    placement: Placement

    @property
    def num_bytes(self) -> int: ...

    @property
    def fds(self) -> list[int]: ...

    def handle(self, shard: int, fd_index: int) -> control.Pool: ...

    def close(self) -> None: ...


P = TypeVar("P", bound=DevicePool, covariant=True)
MakeDevicePool = Callable[[int, str, Placement], DevicePool]
"""(shard, name, placement): a shard's pool."""


class Pools(Generic[P]):
    """One tier of one resource of a rank. Without pages, no pools."""

    def __init__(self, name: str, count: int, placement: Placement, make: Callable[[int, str, Placement], P]) -> None:
        shards: list[P] = []
        try:
            for number in range(count if placement.num_pages else 0):
                shards.append(make(number, f"{name}-{number}", placement))
        except BaseException:
            for pool in shards:
                pool.close()
            raise
        self.shards = tuple(shards)

    def close(self) -> None:
        for pool in self.shards:
            pool.close()


def make_memfd_pool(shard: int, name: str, placement: Placement) -> Pool:
    """Shared memory, new and zero."""
    return Pool(name, placement)


class DevicePools(Pools[DevicePool]):
    """What runners map: a pool for each shard."""

    def __init__(self, form: Form, resource: str = FULL, make: MakeDevicePool = make_memfd_pool) -> None:
        super().__init__(_name("device", resource), form.num_shards, form.placement(Tier.DEVICE), make)


class HostPools(Pools[Pool]):
    """The second tier, which nobody but the rank sees: a pool for each part."""

    def __init__(self, form: Form, resource: str = FULL, source: Source = create_memfd) -> None:
        def make(shard: int, name: str, placement: Placement) -> Pool:
            return Pool(name, placement, source)

        super().__init__(_name("host", resource), form.num_parts, form.placement(Tier.HOST), make)


class ResourcePools:
    """What a rank has of one resource, in both tiers."""

    def __init__(
        self, name: str, form: Form, source: Source = create_memfd, make: MakeDevicePool = make_memfd_pool
    ) -> None:
        """`source`: of the host's memory; `make`: the device's."""
        self.name = name
        self.form = form
        self.device = DevicePools(form, name, make)
        try:
            self.host = HostPools(form, name, source)
        except BaseException:
            self.device.close()
            raise

    def close(self) -> None:
        self.device.close()
        self.host.close()


def _name(tier: str, resource: str) -> str:
    """Of the memfds, for people who look at a process's maps."""
    return f"sglcache-{tier}" if resource == FULL else f"sglcache-{tier}-{resource}"
