"""Device pools on CUDA cards: made by the rank, mapped by runners. **Not run on a card yet.**

Two ways, by `pool.export`:

    fd    memory of cuMemCreate, exported as a file descriptor. Whoever has the descriptor keeps the memory, and nobody
          else does: so it outlives no process that has it mapped, and each maps it where it likes
    ipc   plain memory and its legacy IPC handle, for drivers that export no descriptors (WSL, some sandboxes). A runner
          that has opened one may keep a dead daemon's memory, and what it may do with it then is undefined

A device has one number in each process (CUDA_VISIBLE_DEVICES), so a handle names it by its UUID.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from sglcache.errors import ConfigError, ProtocolError
from sglcache.memory.cuda_driver import (
    CAN_EXPORT_FD,
    CAN_MAP,
    HAS_MPS,
    IPC_HANDLE_BYTES,
    UUID_BYTES,
    CudaError,
    LibCuda,
)
from sglcache.memory.geometry import Placement
from sglcache.wire import control

if TYPE_CHECKING:
    from torch import Tensor

# CUresult: an argument makes no sense (INVALID_VALUE, _DEVICE, _CONTEXT, MAP_FAILED, OPERATING_SYSTEM, INVALID_HANDLE)
# to a driver that is well otherwise.
REFUSALS = frozenset({1, 101, 201, 205, 304, 400})

Export = Literal["fd", "ipc"]


class CardBytes:
    """Bytes of a device that this process has mapped; unmapped when the last tensor made from it is gone.

    What implements `__cuda_array_interface__` (version 3) can be had as a tensor without a copy.
    """

    def __init__(
        self, driver: LibCuda, device: int, address: int, num_bytes: int, unmap: Callable[[], None] | None
    ) -> None:
        """`unmap` is called on the device; None: it is another's to unmap."""
        self.device = device
        self.address = address
        self.num_bytes = num_bytes
        if unmap is not None:
            # Not at exit: the driver takes the context apart itself, and may have done so already.
            weakref.finalize(self, _let_go, driver, device, unmap).atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    @property
    def flat(self) -> Tensor:
        """uint8 [num_bytes], on the device."""
        import torch

        return torch.as_tensor(self, device=f"cuda:{self.device}")

    @property
    def buffer(self) -> NoReturn:
        raise ConfigError(
            "the pool is on a card, where numpy can't see it; take its tensors: `k` and `v`, `kv`, `states` or `pages`"
        )


def check_card(driver: LibCuda, device: int, export: Export) -> None:
    """ConfigError: a pool on this card can't be had, or not safely."""
    if driver.attribute(device, HAS_MPS):
        raise ConfigError(
            f"card {device} is served by MPS, where a dead runner's kernels may go on after its process is gone; "
            "end MPS (echo quit | nvidia-cuda-mps-control), or give the daemon and its runners another card",
            path="pool.gpus",
            value=device,
        )
    if export == "fd" and not (driver.attribute(device, CAN_MAP) and driver.attribute(device, CAN_EXPORT_FD)):
        raise ConfigError(
            f'card {device} exports no descriptors of its memory; write pool.export = "ipc"',
            path="pool.export",
            value=export,
        )


class CudaPool:
    """A rank's pool on a device. What is in it at first is anything.

    ConfigError: the device has not so much memory left, and how much it has.
    """

    def __init__(self, placement: Placement, driver: LibCuda, device: int, export: Export = "fd") -> None:
        self.placement = placement
        self.device = device
        self.export = export
        self.fd = -1
        self._driver = driver
        self._closed = False
        self._uuid = driver.uuid(device)
        with driver.on(device):
            step = driver.granularity(device) if export == "fd" else 1
            self.mapped_bytes = -(-max(placement.num_bytes, 1) // step) * step
            made = driver.create(self.mapped_bytes, device) if export == "fd" else driver.alloc(self.mapped_bytes)
            if made is None:
                raise self._too_large(*driver.free_bytes())
            self._handle = b""
            if export == "ipc":
                self.address = made
                self._handle = driver.ipc_handle(made)
                return
            try:
                self.fd = driver.export(made)
                self.address = driver.map(made, self.mapped_bytes, device)
            except BaseException:
                if self.fd >= 0:
                    os.close(self.fd)
                with contextlib.suppress(CudaError):  # the first error is the one to tell of
                    driver.release_memory(made)
                raise
            driver.release_memory(made)  # the descriptor and the mapping keep it

    @property
    def num_pages(self) -> int:
        return self.placement.num_pages

    @property
    def num_bytes(self) -> int:
        return self.placement.num_bytes

    @property
    def fds(self) -> list[int]:
        """What a handle of it needs beside it."""
        return [self.fd] if self.fd >= 0 else []

    def handle(self, shard: int, fd_index: int) -> control.Pool:
        """As it is told of to a member, whose Welcome's descriptor `fd_index` is `fds`'s."""
        if self.export == "fd":
            return control.CudaPoolHandle(shard, self.num_bytes, fd_index, self._uuid, self.mapped_bytes)
        return control.CudaIpcHandle(shard, self.num_bytes, self._uuid, self._handle, 0)

    def close(self) -> None:
        """Let go of it: it is gone with the last process that has it mapped. Harmless when repeated."""
        if self._closed:
            return
        self._closed = True
        # After an error of CUDA every call fails, and the process's end lets go of it.
        with contextlib.suppress(CudaError), self._driver.on(self.device):
            if self.export == "ipc":
                self._driver.free(self.address)
            else:
                self._driver.unmap(self.address, self.mapped_bytes)
        for fd in self.fds:
            os.close(fd)
        self.fd = -1

    def _too_large(self, free: int, total: int) -> ConfigError:
        return ConfigError(
            f"pool.size: a pool of {self.mapped_bytes} bytes does not fit on card {self.device}, which has {free} of "
            f"{total} bytes free; lower pool.size, or end what holds the rest (nvidia-smi shows it: a runner of a "
            "daemon that died holds its pool until it lets go of it)",
            path="pool.size",
            need=self.mapped_bytes,
            free=free,
            total=total,
            device=self.device,
        )


def open_pool(driver: LibCuda, handle: control.CudaPoolHandle | control.CudaIpcHandle, fd: int | None) -> CardBytes:
    """A pool that a daemon told of, mapped here. `fd`: of the first kind, stays the caller's.

    ProtocolError: the handle makes no sense. ConfigError: this process does not see the device.
    """
    if len(handle.device_uuid) != UUID_BYTES:
        raise ProtocolError(f"a device's UUID has {UUID_BYTES} bytes, not {len(handle.device_uuid)}")
    if handle.num_bytes < 0:  # where no layer keeps every token there are none
        raise ProtocolError(f"a pool of {handle.num_bytes} bytes")
    device = driver.device_of(handle.device_uuid)
    with driver.on(device):
        try:
            if isinstance(handle, control.CudaIpcHandle):
                return _open_ipc(driver, handle, device)
            return _open_fd(driver, handle, fd, device)
        except CudaError as exc:
            call, result = exc.facts["call"], exc.facts["result"]
            if result not in REFUSALS:
                raise
            why = f"{call} says {driver.named(result)}"
            raise ProtocolError(f"the pool that the daemon told of can't be mapped: {why}") from exc


def _open_fd(driver: LibCuda, handle: control.CudaPoolHandle, fd: int | None, device: int) -> CardBytes:
    if fd is None or handle.mapped_bytes < handle.num_bytes:
        raise ProtocolError(f"a pool of {handle.num_bytes} bytes is to be {handle.mapped_bytes} of a descriptor")
    memory, size = driver.import_fd(fd), handle.mapped_bytes
    try:
        address = driver.map(memory, size, device)
    except BaseException:
        with contextlib.suppress(CudaError):
            driver.release_memory(memory)
        raise
    driver.release_memory(memory)
    return CardBytes(driver, device, address, handle.num_bytes, lambda: driver.unmap(address, size))


def _open_ipc(driver: LibCuda, handle: control.CudaIpcHandle, device: int) -> CardBytes:
    if len(handle.handle) != IPC_HANDLE_BYTES:
        raise ProtocolError(f"an IPC handle has {IPC_HANDLE_BYTES} bytes, not {len(handle.handle)}")
    base = driver.open_ipc(handle.handle)
    size = driver.size_of(base)
    if not 0 <= handle.offset <= size - handle.num_bytes:
        driver.close_ipc(base)
        raise ProtocolError(f"a pool of {handle.num_bytes} bytes is to be at {handle.offset} of {size}")
    return CardBytes(driver, device, base + handle.offset, handle.num_bytes, lambda: driver.close_ipc(base))


def _let_go(driver: LibCuda, device: int, unmap: Callable[[], None]) -> None:
    """Not by this thread: a collector's may be any, at any moment, and kernels may wait for what it is to do next.

    Without `threading`, whose locks it may hold.
    """
    with contextlib.suppress(RuntimeError):  # the interpreter ends, and the process with it
        _thread.start_new_thread(_unmap, (driver, device, unmap))


def _unmap(driver: LibCuda, device: int, unmap: Callable[[], None]) -> None:
    # Of a context that is broken, or being taken apart, there is nothing to let go of.
    with contextlib.suppress(CudaError), driver.on(device):
        driver.finish()  # kernels may be at it still: who drops a tensor need not have waited for them
        unmap()
