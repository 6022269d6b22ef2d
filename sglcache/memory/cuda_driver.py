"""CUDA's driver API, as far as copies need it, through ctypes: `libcuda.so.1` comes with every card's driver.

No package stands between: cuda-bindings would want lists of Python integers where a batch of copies is three arrays of
addresses, a step of Python per page. Not run on a card yet.

Source of the signatures: cuda.h of CUDA 12.8 and 13.0. cuMemcpyBatchAsync came with 12.8, and lost its `failIdx` with
13.0, whose library has the new form under the name cuMemcpyBatchAsync_v2, and the old one beside it. Where there is
neither (older drivers), the copies are enqueued one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sglcache.errors import ConfigError, TransferError

SUCCESS, NOT_READY = 0, 600  # CUresult
STREAM_NON_BLOCKING, EVENT_DISABLE_TIMING, HOST_REGISTER_PORTABLE = 1, 2, 1
SRC_ACCESS_ORDER_STREAM = 1  # CUmemcpySrcAccessOrder: a source is read when the stream has come to the copy

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


class LibCuda:
    """The `Driver` of `cuda_engine`. ConfigError: this machine has no CUDA driver."""

    def __init__(self, library: Any = None) -> None:
        """`library`: by default the machine's."""
        try:
            self._lib = library or ctypes.CDLL("libcuda.so.1")
        except OSError as exc:
            raise ConfigError(f'pool.device = "cuda", and this machine has no CUDA driver: {exc}') from exc
        self._batch, self._tells_index = self._find_batch()
        self._contexts: dict[int, int] = {}
        self._call("cuInit", ctypes.c_uint(0))

    def use(self, device: int) -> None:
        """The device's primary context, which torch's kernels in this process would share."""
        number = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(device))
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
        self._call("cuCtxSetCurrent", context)

    def stream(self) -> int:
        stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(STREAM_NON_BLOCKING))
        return stream.value or 0

    def event(self) -> int:
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(EVENT_DISABLE_TIMING))
        return event.value or 0

    def copy(self, dst: Words, src: Words, sizes: Words, stream: int) -> None:
        dst, src, sizes = (np.ascontiguousarray(each, np.uint64) for each in (dst, src, sizes))
        if self._batch is None:
            for to, start, num_bytes in zip(dst.tolist(), src.tolist(), sizes.tolist(), strict=True):
                copied = (ctypes.c_uint64(to), ctypes.c_uint64(start), ctypes.c_size_t(num_bytes))
                self._call("cuMemcpyAsync", *copied, ctypes.c_void_p(stream))
            return
        attributes, first = _Attributes(src_access_order=SRC_ACCESS_ORDER_STREAM), ctypes.c_size_t(0)
        failed = ctypes.c_size_t(0)
        tail = (ctypes.byref(failed),) if self._tells_index else ()
        self._call(
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
        self._call("cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))

    def done(self, event: int) -> bool:
        return self._call("cuEventQuery", ctypes.c_void_p(event), also=NOT_READY) == SUCCESS

    def pin(self, address: int, num_bytes: int) -> None:
        flags = ctypes.c_uint(HOST_REGISTER_PORTABLE)
        self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), flags)

    def unpin(self, address: int) -> None:
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def release(self, streams: Sequence[int], events: Sequence[int]) -> None:
        for stream in streams:
            self._call("cuStreamDestroy_v2", ctypes.c_void_p(stream))
        for event in events:
            self._call("cuEventDestroy_v2", ctypes.c_void_p(event))

    def _find_batch(self) -> tuple[str | None, bool]:
        """The batched copy's name, and whether it wants to tell which copy failed."""
        for name, tells in (("cuMemcpyBatchAsync_v2", False), ("cuMemcpyBatchAsync", True)):
            if hasattr(self._lib, name):
                return name, tells
        return None, False

    def _call(self, name: str, *arguments: Any, also: int = SUCCESS) -> int:
        """The result, which is success or `also`; CudaError for any other."""
        code = int(getattr(self._lib, name)(*arguments))
        if code not in (SUCCESS, also):
            text = ctypes.c_char_p()
            self._lib.cuGetErrorName(code, ctypes.byref(text))
            said = (text.value or b"unknown").decode()
            raise CudaError(f"{name}: {said} ({code}); the rank ends, and its next life begins empty", call=name)
        return code
