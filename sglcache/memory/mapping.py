"""Shared memory that lives as long as its last user, and that a forked child does not get.

A memfd is made and mapped here, for pools and rings alike. The mapping is not `mmap.mmap`, for two reasons:
that keeps a duplicate of the descriptor, which a forked child would inherit; and its close() unmaps under the
tensors made by `torch.frombuffer`, which hold the object but not its buffer.

Laws:

* A region is unmapped when the last memoryview or tensor made from it is gone; never sooner, by no call.
* It is not mapped in a forked child (MADV_DONTFORK): the last use of a page is over when its owner is dead,
  whoever it forked. A child that keeps a tensor from before the fork and touches it is ended by SIGSEGV; there is
  no way to make such an access raise, and zeros instead would be a lie. Dropping it in the child is harmless.
* Nobody can shrink a mapped memfd and so have us killed by SIGBUS: what is not sealed is not mapped.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from typing import TYPE_CHECKING

from sglcache.errors import ConfigError, ProtocolError, because

if TYPE_CHECKING:
    Region = ctypes.Array[ctypes.c_uint8]

WORD_BYTES = 8  # rings are made of uint64

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
MADV_POPULATE_WRITE = 23  # linux/mman.h, from 5.14 on; Python 3.11 does not name it

_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def create_memfd(name: str, num_bytes: int) -> int:
    """A sealed memfd of zeros, the caller's to close. No page of it is touched: it costs memory as it is written.

    ConfigError if the system won't have it.
    """
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as exc:
        why = because(exc, "this system must have memfd_create")
        raise ConfigError(f"cannot create shared memory {name!r}: {why}") from exc
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except (OSError, OverflowError) as exc:
        os.close(fd)
        raise ConfigError(f"cannot size shared memory {name!r} to {num_bytes} bytes: {exc}; ask for less") from exc
    return fd


def map_shared(fd: int, num_bytes: int, ours: bool = False) -> Region:
    """Map the first `num_bytes` of a memfd, readable and writable. `fd` stays the caller's, who may close it at once.

    `ours`: it may be a file that nobody but this daemon can reach, which has no seals.

    Of 0 bytes nothing is mapped. ProtocolError if it is no memfd, too small, or could still be shrunk; ConfigError if
    there is no address space.
    """
    if not ours:
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as exc:
            raise ProtocolError(f"descriptor {fd} is not a memfd") from exc
        if not seals & fcntl.F_SEAL_SHRINK:
            raise ProtocolError(f"the memfd {fd} is not sealed against shrinking (F_SEAL_SHRINK)")
    if (size := os.fstat(fd).st_size) < num_bytes:
        raise ProtocolError(f"the memfd {fd} holds {size} bytes, {num_bytes} are needed", size=size, need=num_bytes)
    if not num_bytes:
        return (ctypes.c_uint8 * 0)()
    address = _libc.mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == _MAP_FAILED:
        raise ConfigError(f"cannot map {num_bytes} bytes: {os.strerror(ctypes.get_errno())}; ask for less")
    # A core dump would otherwise hold every page: a memfd counts as anonymous memory there.
    for advice in (mmap.MADV_DONTFORK, mmap.MADV_DONTDUMP):
        if _libc.madvise(address, num_bytes, advice) != 0:
            error = os.strerror(ctypes.get_errno())
            _libc.munmap(address, num_bytes)
            raise ConfigError(f"madvise({advice}) on {num_bytes} bytes: {error}")
    region = (ctypes.c_uint8 * num_bytes).from_address(address)
    # Not at exit: threads may still be copying, and the kernel unmaps in any case.
    weakref.finalize(region, _unmap, address, num_bytes, os.getpid()).atexit = False
    return region


def populate(address: int, num_bytes: int) -> None:
    """Have the memory of this part of a mapping now, as if each byte were written with what it holds. OSError: no.

    The interpreter's lock is let go meanwhile. On a kernel before 5.14 nothing happens.
    """
    start = address - address % mmap.PAGESIZE
    while _libc.madvise(start, address + num_bytes - start, MADV_POPULATE_WRITE) != 0:
        code = ctypes.get_errno()
        if code == errno.EINVAL:
            return
        if code not in (errno.EAGAIN, errno.EINTR):
            raise OSError(code, os.strerror(code))


def map_words(fd: int, num_words: int) -> memoryview:
    """Map a memfd as a memoryview of uint64 [num_words], an item one aligned load or store. Errors as `map_shared`."""
    return memoryview(map_shared(fd, num_words * WORD_BYTES)).cast("B").cast("Q")


def address_of(words: memoryview) -> int:
    """Where the memory behind a writable view begins."""
    return ctypes.addressof(ctypes.c_uint8.from_buffer(words))


def _unmap(address: int, num_bytes: int, pid: int) -> None:
    # In a forked child the addresses were never ours, and may be another's by now.
    if os.getpid() == pid:
        _libc.munmap(address, num_bytes)
