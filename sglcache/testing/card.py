"""A card, as tests and `scripts/gpu_probe.py` need it: kernels of ours, timed events, events of other processes.

The kernels are kernels.cu; what is loaded is kernels.ptx, made from it, which the card's driver compiles. They are what
a runner would do, in a process without torch. **Not run on a card yet.**
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cached_property
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sglcache.memory.cuda_driver import (
    EVENT_DISABLE_TIMING,
    HOST_REGISTER_DEVICEMAP,
    HOST_REGISTER_PORTABLE,
    NOT_READY,
    STREAM_NON_BLOCKING,
    LibCuda,
)

EVENT_INTERPROCESS: Final = 4
EVENT_HANDLE_BYTES: Final = 64
THREADS: Final = 256  # of a block
WORD: Final = 8  # bytes

# Each kernel's parameters, as kernels.cu has them: all of 8 bytes.
KERNELS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "sgl_fill": ("u64* dst", "u64 value", "u64 words"),
        "sgl_spin_ns": ("u64 ns",),
        "sgl_scribble": ("u64* dst", "u64 words", "u64 ns"),
        "sgl_wait_flag": ("volatile u64* flag", "u64 value"),
        "sgl_count": ("u64* dst", "u64 words", "u64 begin"),
        "sgl_copy": ("u64* dst", "const u64* src", "u64 words"),
        "sgl_gather": (
            "u8* dst",
            "const u8* src",
            "const u64* dst_offsets",
            "const u64* src_offsets",
            "u64 chunk_bytes",
            "u64 num_chunks",
        ),
        "sgl_burn": ("f32* sink", "u64 iterations"),
    }
)

# CUdevice_attribute: what the daemon's use of a card rests on.
ATTRIBUTES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "compute_major": 75,
        "compute_minor": 76,
        "multiprocessors": 16,
        "copy_engines": 40,
        "kernel_time_limit": 17,
        "compute_mode": 20,
        "virtual_memory": 102,
        "posix_fds": 103,
        "stream_words_64": 122,
        "host_register": 99,
        "host_pointers_for_registered": 91,
        "ipc_events": 125,
        "mps": 133,
    }
)


class _EventHandle(ctypes.Structure):
    """CUipcEventHandle, which is passed by value."""

    _fields_ = (("bytes", ctypes.c_ubyte * EVENT_HANDLE_BYTES),)


class Card(LibCuda):
    """The calling thread's device, and the kernels on it."""

    def __init__(self, device: int = 0, library: Any = None) -> None:
        super().__init__(library)
        self.device = device
        self.use(device)

    # -- what it is ----------------------------------------------------------------------------------------------

    def name(self) -> str:
        text = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", text, ctypes.c_int(len(text)), self._number)
        return text.value.decode()

    def driver_version(self) -> str:
        """The newest version of CUDA that the driver has, such as 13.0."""
        version = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        return f"{version.value // 1000}.{version.value % 1000 // 10}"

    def fact(self, name: str) -> int:
        """One of `ATTRIBUTES`; 0 also where the driver does not know it."""
        return self.attribute(self.device, ATTRIBUTES[name])

    # -- streams and events --------------------------------------------------------------------------------------

    def stream_of(self, priority: int, flags: int = STREAM_NON_BLOCKING) -> int:
        """A new stream; the lower the number, the earlier its kernels run."""
        stream = ctypes.c_void_p()
        self.call("cuStreamCreateWithPriority", ctypes.byref(stream), ctypes.c_uint(flags), ctypes.c_int(priority))
        return stream.value or 0

    def priorities(self) -> tuple[int, int]:
        """(least, greatest)."""
        least, greatest = ctypes.c_int(), ctypes.c_int()
        self.call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
        return least.value, greatest.value

    def is_busy(self, stream: int) -> bool:
        return self.call("cuStreamQuery", ctypes.c_void_p(stream), also=NOT_READY) == NOT_READY

    def timed_event(self) -> int:
        event = ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(0))
        return event.value or 0

    def seconds_between(self, start: int, end: int) -> float:
        """Of two timed events that are done, by the card's clock."""
        ms = ctypes.c_float()
        self.call("cuEventElapsedTime", ctypes.byref(ms), ctypes.c_void_p(start), ctypes.c_void_p(end))
        return ms.value / 1e3

    def shared_event(self) -> int:
        """One that another process can open, by its `event_handle`."""
        event, flags = ctypes.c_void_p(), ctypes.c_uint(EVENT_INTERPROCESS | EVENT_DISABLE_TIMING)
        self.call("cuEventCreate", ctypes.byref(event), flags)
        return event.value or 0

    def event_handle(self, event: int) -> bytes:
        handle = _EventHandle()
        self.call("cuIpcGetEventHandle", ctypes.byref(handle), ctypes.c_void_p(event))
        return bytes(handle.bytes)

    def open_event(self, handle: bytes) -> int:
        """Not in the process that made it."""
        event, given = ctypes.c_void_p(), _EventHandle((ctypes.c_ubyte * EVENT_HANDLE_BYTES)(*handle))
        self.call("cuIpcOpenEventHandle", ctypes.byref(event), given)
        return event.value or 0

    # -- memory --------------------------------------------------------------------------------------------------

    def alloc_host(self, num_bytes: int) -> int:
        """Pinned memory of the driver's own, which devices have at the same address."""
        address, flags = ctypes.c_void_p(), ctypes.c_uint(HOST_REGISTER_PORTABLE | HOST_REGISTER_DEVICEMAP)
        self.call("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(num_bytes), flags)
        return address.value or 0

    def free_host(self, address: int) -> None:
        self.call("cuMemFreeHost", ctypes.c_void_p(address))

    def copy_one(self, dst: int, src: int, num_bytes: int, stream: int) -> None:
        """Enqueue one copy, from and to wherever."""
        arguments = (ctypes.c_uint64(dst), ctypes.c_uint64(src), ctypes.c_size_t(num_bytes), ctypes.c_void_p(stream))
        self.call("cuMemcpyAsync", *arguments)

    def read(self, address: int, words: int) -> npt.NDArray[np.uint64]:
        """What is there now: waits for no stream but its own."""
        into = np.empty(words, np.uint64)
        self.copy_one(into.ctypes.data, address, into.nbytes, self._own)
        self.synchronize(self._own)
        return into

    def write(self, address: int, words: npt.NDArray[np.uint64]) -> None:
        """As `read`."""
        words = np.ascontiguousarray(words, np.uint64)
        self.copy_one(address, words.ctypes.data, words.nbytes, self._own)
        self.synchronize(self._own)

    # -- kernels -------------------------------------------------------------------------------------------------

    def load(self) -> int:
        """Have the kernels compiled and loaded anew; the module's handle. `launch` does it by itself, once."""
        text = files("sglcache.testing").joinpath("kernels.ptx").read_bytes() + b"\0"
        module = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(text))
        return module.value or 0

    def launch(self, kernel: str, *arguments: int, stream: int, blocks: int = 1, threads: int = 1) -> None:
        """Enqueue one of `KERNELS`."""
        function = self._functions[kernel]
        values = [ctypes.c_uint64(argument) for argument in arguments]
        assert len(values) == len(KERNELS[kernel]), f"{kernel} takes {KERNELS[kernel]}"
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        shape = (blocks, 1, 1, threads, 1, 1, 0)  # grid, block, shared memory
        handles = (ctypes.c_void_p(stream), pointers, ctypes.c_void_p(None))
        self.call("cuLaunchKernel", ctypes.c_void_p(function), *(ctypes.c_uint(size) for size in shape), *handles)

    def fill(self, dst: int, value: int, words: int, stream: int) -> None:
        self.launch("sgl_fill", dst, value, words, stream=stream, blocks=self.blocks(words), threads=THREADS)

    def count(self, dst: int, words: int, begin: int, stream: int) -> None:
        self.launch("sgl_count", dst, words, begin, stream=stream, blocks=self.blocks(words), threads=THREADS)

    def copy_words(self, dst: int, src: int, words: int, stream: int) -> None:
        self.launch("sgl_copy", dst, src, words, stream=stream, blocks=self.blocks(words), threads=THREADS)

    def spin(self, seconds: float, stream: int) -> None:
        self.launch("sgl_spin_ns", int(seconds * 1e9), stream=stream)

    def wait_flag(self, flag: int, value: int, stream: int) -> None:
        """A kernel that looks at the word until it is so much: a processor of the card is busy meanwhile."""
        self.launch("sgl_wait_flag", flag, value, stream=stream)

    def scribble(self, dst: int, words: int, seconds: float, stream: int) -> None:
        shape = {"blocks": min(32, self.blocks(words)), "threads": THREADS}
        self.launch("sgl_scribble", dst, words, int(seconds * 1e9), stream=stream, **shape)

    def blocks(self, words: int) -> int:
        """So many that the whole card is at it, and no more than there is to do."""
        return max(1, min(8 * self.multiprocessors, -(-words // THREADS)))

    @cached_property
    def multiprocessors(self) -> int:
        return self.fact("multiprocessors") or 1

    # -- inside --------------------------------------------------------------------------------------------------

    @cached_property
    def _number(self) -> ctypes.c_int:
        number = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(self.device))
        return number

    @cached_property
    def _own(self) -> int:
        return self.stream()

    @cached_property
    def _functions(self) -> dict[str, int]:
        module, functions = self.load(), {}
        for name in KERNELS:
            function = ctypes.c_void_p()
            self.call("cuModuleGetFunction", ctypes.byref(function), ctypes.c_void_p(module), name.encode())
            functions[name] = function.value or 0
        return functions
