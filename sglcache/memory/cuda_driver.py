"""CUDA's driver API, as far as pools, copies and events need it, by ctypes: `libcuda.so.1` comes with a card's driver.

No package stands between: cuda-bindings would want lists of Python integers where a batch of copies is three arrays of
addresses, a step of Python per page. **Not run on a card yet.**

Source of the signatures: cuda.h of CUDA 12.8 and 13.0. cuMemcpyBatchAsync came with 12.8, and lost its `failIdx` with
13.0, whose library has the new form under the name cuMemcpyBatchAsync_v2, and the old one beside it. Where there is
neither (older drivers), the copies are enqueued one by one.

Handles, addresses, streams and events are Python integers. What is about a
device's memory or streams is for a thread that has said `use`, or is within `on`.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import UUID

import numpy as np
import numpy.typing as npt

from sglcache.errors import ConfigError, TransferError

SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NO_DEVICE, NOT_READY = 0, 1, 2, 100, 600  # CUresult
# Of cuMemHostRegister: this memory can't be had pinned (no more of it, no such kind, not allowed); the card is well.
NOT_PINNED = frozenset({OUT_OF_MEMORY, INVALID_VALUE, 800, 801})
STREAM_NON_BLOCKING, EVENT_DISABLE_TIMING = 1, 2
HOST_REGISTER_PORTABLE, HOST_REGISTER_DEVICEMAP = 1, 2
SRC_ACCESS_ORDER_STREAM = 1  # CUmemcpySrcAccessOrder: a source is read when the stream has come to the copy
ALLOCATION_PINNED, LOCATION_DEVICE, HANDLE_POSIX_FD, ACCESS_READ_WRITE = 1, 1, 1, 3  # of the CUmem... enumerations
GRANULARITY_RECOMMENDED = 1
IPC_LAZY_PEER_ACCESS = 1
STREAM_WAIT_GEQ = 0  # until (int64)(word - value) >= 0: cyclic, and signed
UUID_BYTES, IPC_HANDLE_BYTES = 16, 64
CAN_MAP, CAN_EXPORT_FD, CAN_WRITE_WORDS, HAS_MPS = 102, 103, 122, 133  # CUdevice_attribute

Words = npt.NDArray[np.uint64]


class CudaError(TransferError):
    """A call of the driver API failed. Nothing of this process's on a card makes sense any more."""

    code = "cuda"

    def __init__(self, message: str, /, **facts: Any) -> None:
        super().__init__(message, **{"fatal": True, **facts})


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes; the location hints are for managed memory alone."""

    _fields_ = (
        ("src_access_order", ctypes.c_int),
        ("src_hint", _Location),
        ("dst_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("bytes", ctypes.c_ubyte * IPC_HANDLE_BYTES),)


class LibCuda:
    """The `Driver` of `cuda_engine`. ConfigError: this machine has no CUDA driver, or none that sees a card."""

    batch_flags = 0  # CUmemcpyFlags of batched copies

    def __init__(self, library: Any = None) -> None:
        """`library`: by default the machine's."""
        try:
            self._lib = library or ctypes.CDLL("libcuda.so.1")
        except OSError as exc:
            raise ConfigError(
                f'pool.device = "cuda", and this machine has no CUDA driver: {exc}; install NVIDIA\'s, or give the '
                'container its cards, or write pool.device = "cpu"'
            ) from exc
        self._batch, self._tells_index = self._find_batch()
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._lock = threading.RLock()  # a collector may let go of a pool in the midst of it
        if code := int(self._lib.cuInit(ctypes.c_uint(0))):
            raise ConfigError(
                "the CUDA driver sees no card: the machine has none, or CUDA_VISIBLE_DEVICES hides them"
                if code == NO_DEVICE
                else f"the CUDA driver does not start: cuInit says {self.named(code)}; nvidia-smi may know why",
                call="cuInit",
                result=code,
            )

    @property
    def batched_by(self) -> str | None:
        """The driver's call that copies many ranges at once; None: it has none, and they go one by one."""
        return self._batch

    def use(self, device: int) -> None:
        """Have the calling thread speak of this device, from now on."""
        self.call("cuCtxSetCurrent", self._context(device))

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        """As `use`, for as long as this lasts: for a thread that is another's, whose torch may speak of another one."""
        self.call("cuCtxPushCurrent_v2", self._context(device))
        with self._undoing("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p())):
            yield
        self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def stream(self) -> int:
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(STREAM_NON_BLOCKING))
        return stream.value or 0

    def event(self) -> int:
        event = ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(EVENT_DISABLE_TIMING))
        return event.value or 0

    def copy(self, dst: Words, src: Words, sizes: Words, stream: int) -> None:
        dst, src, sizes = (np.ascontiguousarray(each, np.uint64) for each in (dst, src, sizes))
        if self._batch is None:
            for to, start, num_bytes in zip(dst.tolist(), src.tolist(), sizes.tolist(), strict=True):
                copied = (ctypes.c_uint64(to), ctypes.c_uint64(start), ctypes.c_size_t(num_bytes))
                self.call("cuMemcpyAsync", *copied, ctypes.c_void_p(stream))
            return
        attributes = _Attributes(src_access_order=SRC_ACCESS_ORDER_STREAM, flags=self.batch_flags)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        tail = (ctypes.byref(failed),) if self._tells_index else ()
        self.call(
            self._batch,
            *(ctypes.c_void_p(each.ctypes.data) for each in (dst, src, sizes)),
            ctypes.c_size_t(len(sizes)),
            ctypes.byref(attributes),
            ctypes.byref(first),  # the attributes are those of every copy from this one on
            ctypes.c_size_t(1),
            *tail,
            ctypes.c_void_p(stream),
        )

    def record(self, event: int, stream: int) -> None:
        self.call("cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))

    def done(self, event: int) -> bool:
        return self.call("cuEventQuery", ctypes.c_void_p(event), also=NOT_READY) == SUCCESS

    def pin(self, address: int, num_bytes: int) -> bool:
        arguments = (ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_uint(HOST_REGISTER_PORTABLE))
        return self.call("cuMemHostRegister_v2", *arguments, also=NOT_PINNED) == SUCCESS

    def unpin(self, address: int) -> None:
        self.call("cuMemHostUnregister", ctypes.c_void_p(address))

    def synchronize(self, stream: int) -> None:
        """Block until all that is in the stream is done."""
        self.call("cuStreamSynchronize", ctypes.c_void_p(stream))

    def finish(self) -> None:
        """Block until all of this process's work on the thread's device is done."""
        self.call("cuCtxSynchronize")

    def release(self, streams: Sequence[int], events: Sequence[int]) -> None:
        for stream in streams:
            self.call("cuStreamDestroy_v2", ctypes.c_void_p(stream))
        for event in events:
            self.call("cuEventDestroy_v2", ctypes.c_void_p(event))

    # -- devices ----------------------------------------------------------------------------------------------

    def num_devices(self) -> int:
        """That this process may see: CUDA_VISIBLE_DEVICES selects and numbers them."""
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def uuid(self, device: int) -> bytes:
        """16 bytes, the same in every process, whatever number it has the device by."""
        number, found = ctypes.c_int(), (ctypes.c_ubyte * UUID_BYTES)()
        self.call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(device))
        self.call("cuDeviceGetUuid_v2", ctypes.byref(found), number)
        return bytes(found)

    def device_of(self, uuid: bytes) -> int:
        """This process's number of a device. ConfigError: it does not see it."""
        count = self.num_devices()
        for device in range(count):
            if self.uuid(device) == uuid:
                return device
        raise ConfigError(
            f"the pool is on the card GPU-{UUID(bytes=uuid)}, and this process sees {count}, that one not among them; "
            "give it that one by CUDA_VISIBLE_DEVICES",
            uuid=str(UUID(bytes=uuid)),
        )

    def attribute(self, device: int, attribute: int) -> int:
        """What a device says of itself; 0: this driver does not know the question."""
        number, found = ctypes.c_int(), ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(device))
        self.call("cuDeviceGetAttribute", ctypes.byref(found), ctypes.c_int(attribute), number, also=INVALID_VALUE)
        return found.value

    def free_bytes(self) -> tuple[int, int]:
        """(free, total) of the thread's device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    # -- memory that other processes can map -----------------------------------------------------------------

    def granularity(self, device: int) -> int:
        """Of what `create` and `map` take a multiple."""
        found, properties = ctypes.c_size_t(), _properties(device)
        how = ctypes.c_int(GRANULARITY_RECOMMENDED)
        self.call("cuMemGetAllocationGranularity", ctypes.byref(found), ctypes.byref(properties), how)
        return found.value

    def create(self, num_bytes: int, device: int) -> int | None:
        """A handle of device memory, which is nowhere yet; None: the device has not so much left."""
        handle, properties = ctypes.c_uint64(), _properties(device)
        size, flags = ctypes.c_size_t(num_bytes), ctypes.c_uint64(0)
        arguments = (ctypes.byref(handle), size, ctypes.byref(properties), flags)
        code = self.call("cuMemCreate", *arguments, also=OUT_OF_MEMORY)
        return handle.value if code == SUCCESS else None

    def export(self, handle: int) -> int:
        """A descriptor of the memory, the caller's. Whoever has one keeps the memory."""
        fd = ctypes.c_int(-1)
        arguments = (ctypes.byref(fd), ctypes.c_uint64(handle), ctypes.c_int(HANDLE_POSIX_FD), ctypes.c_uint64(0))
        self.call("cuMemExportToShareableHandle", *arguments)
        return fd.value

    def import_fd(self, fd: int) -> int:
        """A handle of memory that another process exported. `fd` stays the caller's, who may close it at once."""
        handle = ctypes.c_uint64()
        self.call(
            "cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fd), ctypes.c_int(HANDLE_POSIX_FD)
        )
        return handle.value

    def map(self, handle: int, num_bytes: int, device: int) -> int:
        """Where the memory is, for this process's kernels and copies on `device`. The handle may be released then."""
        address, size = ctypes.c_uint64(), ctypes.c_size_t(num_bytes)
        none, zero = ctypes.c_size_t(0), ctypes.c_uint64(0)
        self.call("cuMemAddressReserve", ctypes.byref(address), size, none, zero, zero)
        access = _Access(_Location(LOCATION_DEVICE, device), ACCESS_READ_WRITE)
        with self._undoing("cuMemAddressFree", address, size):
            self.call("cuMemMap", address, size, none, ctypes.c_uint64(handle), zero)
            with self._undoing("cuMemUnmap", address, size):
                self.call("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))
        return address.value

    def unmap(self, address: int, num_bytes: int) -> None:
        for name in ("cuMemUnmap", "cuMemAddressFree"):
            self.call(name, ctypes.c_uint64(address), ctypes.c_size_t(num_bytes))

    def release_memory(self, handle: int) -> None:
        """The memory goes with the last mapping, handle or descriptor of any process."""
        self.call("cuMemRelease", ctypes.c_uint64(handle))

    # -- the same, by the older way -----------------------------------------------------------------------------

    def alloc(self, num_bytes: int) -> int | None:
        """Plain memory of the thread's device; None: it has not so much left."""
        address = ctypes.c_uint64()
        code = self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes), also=OUT_OF_MEMORY)
        return address.value if code == SUCCESS else None

    def free(self, address: int) -> None:
        self.call("cuMemFree_v2", ctypes.c_uint64(address))

    def ipc_handle(self, address: int) -> bytes:
        """Of the allocation that begins there: 64 bytes, of which another process has it mapped."""
        handle = _Handle()
        self.call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle.bytes)

    def open_ipc(self, handle: bytes) -> int:
        """Where another process's allocation begins in this one. Not in the process that made it."""
        address, given = ctypes.c_uint64(), _Handle((ctypes.c_ubyte * IPC_HANDLE_BYTES)(*handle))
        self.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(IPC_LAZY_PEER_ACCESS))
        return address.value

    def size_of(self, address: int) -> int:
        """Bytes of the allocation that begins there, of this process or another's."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        return size.value

    def close_ipc(self, address: int) -> None:
        self.call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    # -- words in shared memory, which streams write and wait for ------------------------------------------------

    def register(self, address: int, num_bytes: int) -> int:
        """Pin this process's memory; where its devices have it. `unpin` ends it."""
        flags = ctypes.c_uint(HOST_REGISTER_PORTABLE | HOST_REGISTER_DEVICEMAP)
        self.call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), flags)
        there = ctypes.c_uint64()
        self.call("cuMemHostGetDevicePointer_v2", ctypes.byref(there), ctypes.c_void_p(address), ctypes.c_uint(0))
        return there.value

    def write_value(self, stream: int, address: int, value: int) -> None:
        """The stream writes the uint64 once all that is in it now is done, and can be seen by others."""
        arguments = (ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint64(value), ctypes.c_uint(0))
        self.call("cuStreamWriteValue64_v2", *arguments)

    def wait_value(self, stream: int, address: int, value: int) -> None:
        """What is put into the stream from now on waits until the uint64 is `value` or up to 2**63 - 1 more."""
        arguments = (ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint64(value))
        self.call("cuStreamWaitValue64_v2", *arguments, ctypes.c_uint(STREAM_WAIT_GEQ))

    def wait_event(self, stream: int, event: int) -> None:
        """What is put into the stream from now on waits for what was recorded last; for nothing, if nothing was."""
        self.call("cuStreamWaitEvent", ctypes.c_void_p(stream), ctypes.c_void_p(event), ctypes.c_uint(0))

    # -- inside -----------------------------------------------------------------------------------------------

    def _context(self, device: int) -> ctypes.c_void_p:
        """The device's primary one, which torch's kernels in this process share. It stays, for the process's life."""
        with self._lock:
            if (context := self._contexts.get(device)) is None:
                number, context = ctypes.c_int(), ctypes.c_void_p()
                self.call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(device))
                self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
                self._contexts[device] = context
            return context

    def _find_batch(self) -> tuple[str | None, bool]:
        """The batched copy's name, and whether it wants to tell which copy failed."""
        for name, tells in (("cuMemcpyBatchAsync_v2", False), ("cuMemcpyBatchAsync", True)):
            if hasattr(self._lib, name):
                return name, tells
        return None, False

    def call(self, name: str, *arguments: Any, also: int | frozenset[int] = SUCCESS) -> int:
        """The result, which is success or `also`, or one of them; CudaError for any other."""
        code = int(getattr(self._lib, name)(*arguments))
        if code != SUCCESS and code != also and not (isinstance(also, frozenset) and code in also):
            raise CudaError(
                f"{name}: {self.named(code)}; this process has lost the card, and must end", call=name, result=code
            )
        return code

    @contextlib.contextmanager
    def _undoing(self, name: str, *arguments: Any) -> Iterator[None]:
        """What goes wrong within is followed by this call, and told of whatever that says."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(CudaError):
                self.call(name, *arguments)
            raise

    def named(self, code: int) -> str:
        """A CUresult as people look for it."""
        text = ctypes.c_char_p()
        self._lib.cuGetErrorName(code, ctypes.byref(text))
        return f"{(text.value or b'unknown').decode()} ({code})"


def _properties(device: int) -> _Properties:
    """Of memory that can be exported."""
    return _Properties(
        type=ALLOCATION_PINNED, handle_types=HANDLE_POSIX_FD, location=_Location(LOCATION_DEVICE, device)
    )
