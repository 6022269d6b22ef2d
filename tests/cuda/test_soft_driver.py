"""The driver in software does what CUDA's would: each law that tests of cards stand on."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from softcuda import PREFIX, Process, SoftCuda, cards, compiled, sweep

from sglcache.memory.cuda_driver import CudaError, LibCuda
from sglcache.testing.daemon import until

MIB = 1 << 20
HEADER = Path("/usr/local/cuda/include/cuda.h")
INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, NO_DEVICE, INVALID_DEVICE = 1, 2, 3, 100, 101
INVALID_IMAGE, INVALID_CONTEXT, MAP_FAILED, INVALID_PTX, INVALID_HANDLE, NOT_FOUND = 200, 201, 205, 218, 400, 500
NOT_READY, ILLEGAL_ADDRESS, CONTEXT_IS_DESTROYED, MISALIGNED = 600, 700, 709, 716
ALREADY_REGISTERED, NOT_REGISTERED, LAUNCH_FAILED, NOT_PERMITTED, NOT_SUPPORTED = 712, 713, 719, 800, 801

Words = npt.NDArray[np.uint64]


def u64(number: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(number)


class Card:
    """A card in this process: LibCuda on a driver of its own, and what tests want beside it."""

    def __init__(self, soft: SoftCuda, **settings: Any) -> None:
        self.library = soft.load(**settings)
        self.cuda = LibCuda(self.library)
        self.cuda.use(0)
        self._kept = soft.kept

    def code(self, call: str, *arguments: Any) -> int:
        """What a call answers."""
        return int(getattr(self.library, call)(*arguments))

    def memory(self, num_bytes: int = 2 * MIB, device: int = 0) -> int:
        """Device memory that others could map."""
        handle = self.cuda.create(num_bytes, device)
        assert handle is not None
        try:
            return self.cuda.map(handle, num_bytes, device)
        finally:
            self.cuda.release_memory(handle)

    def pinned(self, *numbers: int, words: int = 512) -> Words:
        """Words of the host that streams may write and wait for, and copies copy."""
        array = np.ndarray((words,), np.uint64, mmap.mmap(-1, words * 8))
        array[: len(numbers)] = numbers
        assert self.cuda.register(array.ctypes.data, array.nbytes) == array.ctypes.data
        self._kept.append(array)
        return array

    def stream(self, flags: int = 1) -> int:
        stream = ctypes.c_void_p()
        assert self.code("cuStreamCreate", ctypes.byref(stream), flags) == 0
        return stream.value or 0

    def event(self, flags: int = 2) -> int:
        event = ctypes.c_void_p()
        assert self.code("cuEventCreate", ctypes.byref(event), flags) == 0
        return event.value or 0

    def batch(self, dst: Words, src: Words, sizes: Words, stream: int | None) -> int:
        """The answer to one batch of copies."""
        attributes = (ctypes.c_int * 6)(1)  # in the stream's order
        arrays = [ctypes.c_void_p(each.ctypes.data) for each in (dst, src, sizes)]
        first, one, count = ctypes.c_size_t(0), ctypes.c_size_t(1), ctypes.c_size_t(len(sizes))
        tail = (count, attributes, ctypes.byref(first), one, ctypes.c_void_p(stream))
        return self.code("cuMemcpyBatchAsync_v2", *arrays, *tail)

    def copy(self, dst: int, src: int, num_bytes: int, stream: int | None) -> int:
        """The answer to one copy."""
        return self.code("cuMemcpyAsync", u64(dst), u64(src), ctypes.c_size_t(num_bytes), ctypes.c_void_p(stream))

    def query(self, stream: int | None) -> int:
        return self.code("cuStreamQuery", ctypes.c_void_p(stream))

    def wait(self, stream: int, cell: Words, value: int) -> None:
        self.cuda.wait_value(stream, cell.ctypes.data, value)

    def write(self, stream: int, cell: Words, value: int) -> None:
        self.cuda.write_value(stream, cell.ctypes.data, value)

    @contextlib.contextmanager
    def held(self, stream: int | None) -> Iterator[None]:
        """What is put into the stream in here waits until this is over, and the stream has come to it by then.

        As far as it can be done at once it is, for whoever asks the driver next: its lock is not let go of in between.
        """
        cells = self.pinned()
        self.wait(stream or 0, cells[0:], 1)
        self.write(stream or 0, cells[1:], 1)
        yield
        cells[0] = 1
        until(lambda: bool(cells[1] == 1))

    def load(self, text: str) -> int:
        module = ctypes.c_void_p()
        assert self.code("cuModuleLoadData", ctypes.byref(module), text.encode()) == 0
        return module.value or 0

    def kernel(self, name: str, num_params: int) -> int:
        params = ", ".join(f".param .u64 p{i}" for i in range(num_params))
        function = ctypes.c_void_p()
        module = ctypes.c_void_p(self.load(ptx(f".visible .entry {name}({params}) {{ ret; }}")))
        assert self.code("cuModuleGetFunction", ctypes.byref(function), module, name.encode()) == 0
        return function.value or 0

    def launch(self, stream: int | None, name: str, *arguments: int) -> int:
        values = [u64(each) for each in arguments]
        pointers = (ctypes.c_void_p * max(1, len(values)))(*(ctypes.addressof(each) for each in values))
        function = ctypes.c_void_p(self.kernel(name, len(arguments)))
        return self.code("cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, ctypes.c_void_p(stream), pointers, None)

    def bytes_of(self, address: int, num_words: int) -> Words:
        """Device memory as it is now, which only here a host can look at."""
        return np.ctypeslib.as_array((ctypes.c_uint64 * num_words).from_address(address))


def ptx(body: str) -> str:
    return f"// by hand\n.version 8.0\n.target sm_90\n.address_size 64\n{body}\n"


def words(*numbers: int) -> Words:
    return np.array(numbers, np.uint64)


@pytest.fixture
def card(soft_cuda: SoftCuda) -> Card:
    return Card(soft_cuda)


@contextlib.contextmanager
def calling(call: Any, *arguments: Any) -> Iterator[list[int]]:
    """A call in a thread of its own, on the first card, that has to come back when this is over; its answer, then."""
    answers: list[int] = []

    def main() -> None:
        card: Card = call.__self__
        card.cuda.use(0)
        answers.append(call(*arguments))

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    yield answers
    thread.join(10)
    assert not thread.is_alive(), f"{call.__name__}{arguments} did not come back"


# -- the library -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not HEADER.exists(), reason=f"the prototypes are checked against {HEADER}, which is not here")
def test_its_prototypes_are_those_of_cudas_header(tmp_path: Path) -> None:
    compiled(tmp_path / "none", "-DWITH_CUDA_H", "-Wmissing-prototypes", "-fsyntax-only", f"-I{HEADER.parent}")


def test_what_is_asked_before_it_is_initialised_or_without_a_context_says_so(
    soft_cuda: SoftCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in soft_cuda.environment.items():
        monkeypatch.setenv(key, value)
    library = soft_cuda.copy()
    number = ctypes.c_int()
    assert library.cuDeviceGetCount(ctypes.byref(number)) == NOT_INITIALIZED
    cuda = LibCuda(library)
    assert library.cuDeviceGetCount(ctypes.byref(number)) == 0
    assert number.value == 1
    assert library.cuStreamCreate(ctypes.byref(ctypes.c_void_p()), 1) == INVALID_CONTEXT
    assert library.cuCtxSynchronize() == INVALID_CONTEXT
    handle = cuda.create(2 * MIB, 0)  # is no context's
    cuda.release_memory(handle or 0)
    cuda.use(0)
    assert library.cuCtxSynchronize() == 0


def test_a_context_is_a_threads(card: Card) -> None:
    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.append(card.code("cuCtxSynchronize")))
    thread.start()
    thread.join(10)
    assert answers == [INVALID_CONTEXT]


def test_a_thread_gets_its_own_context_back(two_cards: SoftCuda) -> None:
    card, number = Card(two_cards), ctypes.c_int(-1)
    with card.cuda.on(1):
        card.code("cuCtxGetDevice", ctypes.byref(number))
        assert number.value == 1
    card.code("cuCtxGetDevice", ctypes.byref(number))
    assert number.value == 0
    popped = ctypes.c_void_p()
    assert card.code("cuCtxPopCurrent_v2", ctypes.byref(popped)) == 0
    assert card.code("cuCtxPopCurrent_v2", ctypes.byref(popped)) == INVALID_CONTEXT


def test_errors_have_their_names(card: Card) -> None:
    text = ctypes.c_char_p()
    assert card.code("cuGetErrorName", ILLEGAL_ADDRESS, ctypes.byref(text)) == 0
    assert text.value == b"CUDA_ERROR_ILLEGAL_ADDRESS"
    assert card.code("cuGetErrorString", ILLEGAL_ADDRESS, ctypes.byref(text)) == 0
    assert text.value == b"an illegal memory access was encountered"
    assert card.code("cuGetErrorName", 4321, ctypes.byref(text)) == INVALID_VALUE


@pytest.mark.parametrize(("attribute", "value"), [(16, 16), (102, 1), (103, 1), (122, 1), (123, 1), (125, 1), (88, 0)])
def test_a_card_can_what_is_wanted_of_it(card: Card, attribute: int, value: int) -> None:
    found = ctypes.c_int(-1)
    assert card.code("cuDeviceGetAttribute", ctypes.byref(found), attribute, 0) == 0
    assert found.value == value


def test_cards_are_the_same_in_every_process_and_numbered_as_each_sees_them(two_cards: SoftCuda) -> None:
    first, second = (LibCuda(two_cards.load()).uuid(device) for device in (0, 1))
    assert first != second
    named = f"GPU-{second[:4].hex()}-{second[4:6].hex()}-{second[6:8].hex()}-{second[8:10].hex()}-{second[10:].hex()}"
    for visible, seen in (("1,0", [second, first]), ("1", [second]), (named, [second]), ("0,7,1", [first])):
        cuda = LibCuda(two_cards.load(CUDA_VISIBLE_DEVICES=visible))
        assert [cuda.uuid(device) for device in range(cuda.num_devices())] == seen
    with Process(two_cards, CUDA_VISIBLE_DEVICES="1,0") as other:
        assert other.run("cuda.uuid(0)") == second
    for visible in ("", "-1", "0,0"):
        two_cards.load(NO_DEVICE, CUDA_VISIBLE_DEVICES=visible)


def test_a_forked_process_has_no_cuda(soft_cuda: SoftCuda) -> None:
    with Process(soft_cuda) as parent:
        parent.run("address = cuda.map(cuda.create(2 << 20, 0), 2 << 20, 0)")
        code = """
        pid = os.fork()
        if pid == 0:
            os._exit(cuda._lib.cuInit(0) + 10 * cuda._lib.cuDeviceGetCount(ctypes.byref(ctypes.c_int())))
        os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        """
        assert parent.run(code) == 11 * NOT_INITIALIZED


# -- copies ------------------------------------------------------------------------------------------------------------


def test_bytes_go_to_a_card_and_back(card: Card) -> None:
    cuda, there, stream = card.cuda, card.memory(), card.stream()
    host, back = card.pinned(*range(512)), card.pinned()
    event = cuda.event()
    cuda.copy(words(there), words(host.ctypes.data), words(host.nbytes), stream)
    cuda.copy(words(back.ctypes.data), words(there), words(host.nbytes), stream)
    cuda.record(event, stream)
    until(lambda: cuda.done(event))
    assert (back == host).all()


def test_a_copy_is_done_when_its_event_is_and_not_by_the_call(card: Card, soft_cuda: SoftCuda) -> None:
    there, stream, host = card.memory(), card.stream(), card.pinned(7, 8)
    event = card.cuda.event()
    with soft_cuda.hold_copies():
        with card.held(stream):
            assert card.batch(words(there), words(host.ctypes.data), words(16), stream) == 0
            card.cuda.record(event, stream)
        assert not card.cuda.done(event)
        assert card.query(stream) == NOT_READY
        host[1] = 9  # the source is read when the stream comes to it
        assert card.bytes_of(there, 2).tolist() == [0, 0]
    until(lambda: card.cuda.done(event))
    assert card.bytes_of(there, 2).tolist() == [7, 9]


def test_a_stream_is_in_order_and_waits_for_no_other(card: Card) -> None:
    gate, seen = card.pinned(), card.pinned()
    first, second = card.stream(), card.stream()
    with card.held(first):
        card.wait(first, gate, 1)
        card.write(first, seen[0:], 5)
    card.write(second, seen[1:], 6)
    card.cuda.synchronize(second)
    assert seen[:2].tolist() == [0, 6]
    assert card.query(first) == NOT_READY
    gate[0] = 1
    card.cuda.synchronize(first)
    assert seen[:2].tolist() == [5, 6]
    assert card.query(first) == 0


def test_a_copy_that_leaves_its_memory_is_refused(card: Card) -> None:
    there, other, stream = card.memory(), card.memory(), card.stream()
    three = np.ndarray((3 * 512,), np.uint64, mmap.mmap(-1, 3 * 4096))
    both = three[512:]
    for half in (both[:512], both[512:]):
        card.cuda.register(half.ctypes.data, half.nbytes)
    host = both.ctypes.data
    assert card.copy(there, host, 4096, stream) == 0
    assert card.copy(there, other, 4096, stream) == 0
    for dst, src, size in (
        (there, host + 4088, 16),  # over the end of one registered range into the next
        (there, host - 8, 16),  # out of pageable memory into it
        (there + 2 * MIB - 8, host, 16),  # over the end of the memory
        (there, 0, 8),
        (1 << 60, host, 8),  # nowhere
        (there + 2 * MIB, host, 8),
    ):
        assert card.copy(dst, src, size, stream) == INVALID_VALUE, (dst, src, size)
        assert card.batch(words(there, dst), words(host, src), words(8, size), stream) == INVALID_VALUE
    plain = np.zeros(8, np.uint64)
    call = ("cuMemcpyHtoDAsync_v2", u64(plain.ctypes.data), ctypes.c_void_p(host), ctypes.c_size_t(8))
    assert card.code(*call, ctypes.c_void_p(stream)) == INVALID_VALUE, "its target must be CUDA's"
    card.cuda.synchronize(stream)


def test_a_batch_wants_a_stream_of_its_own_and_bytes(card: Card) -> None:
    there, stream, host = card.memory(), card.stream(), card.pinned().ctypes.data
    assert card.batch(words(there), words(host), words(8), None) == INVALID_VALUE
    assert card.batch(words(there), words(host), words(0), stream) == INVALID_VALUE
    assert card.batch(words(), words(), words(), stream) == INVALID_VALUE
    assert card.batch(words(there), words(host), words(8), 12345) == INVALID_HANDLE
    assert card.batch(words(there), words(host), words(8), stream) == 0


class Older:
    """A driver without what came later."""

    def __init__(self, library: ctypes.CDLL, *without: str) -> None:
        self._library = library
        self._without = without

    def __getattr__(self, name: str) -> Any:
        if name in self._without:
            raise AttributeError(name)
        return getattr(self._library, name)


@pytest.mark.parametrize("without", [(), ("cuMemcpyBatchAsync_v2",), ("cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync")])
def test_older_drivers_copy_too(card: Card, without: tuple[str, ...]) -> None:
    cuda, there, host, back = LibCuda(Older(card.library, *without)), card.memory(), card.pinned(5, 6), card.pinned()
    stream = cuda.stream()
    cuda.copy(words(there, there + 64), words(host.ctypes.data, host.ctypes.data + 8), words(8, 8), stream)
    cuda.copy(words(back.ctypes.data, back.ctypes.data + 8), words(there + 64, there), words(8, 8), stream)
    cuda.synchronize(stream)
    assert back[:2].tolist() == [6, 5]
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        cuda.copy(words(there, 8), words(host.ctypes.data, there), words(8, 8), stream)


def test_a_batch_says_which_copy_is_wrong(card: Card) -> None:
    there, host, stream, failed = card.memory(), card.pinned().ctypes.data, card.stream(), ctypes.c_size_t()
    for sizes, at in (((8, 8, 4097), 2), ((8, 0, 8), 1), ((8, 8, 8), 2**64 - 1)):
        arrays = [words(there, there, there), words(host, host, host), words(*sizes)]
        addresses = [ctypes.c_void_p(each.ctypes.data) for each in arrays]
        tail = ((ctypes.c_int * 6)(1), ctypes.byref(ctypes.c_size_t(0)), ctypes.c_size_t(1), ctypes.byref(failed))
        card.code("cuMemcpyBatchAsync", *addresses, ctypes.c_size_t(3), *tail, ctypes.c_void_p(stream))
        assert failed.value == at


def test_a_copy_of_pageable_memory_is_over_when_its_call_is(card: Card, soft_cuda: SoftCuda) -> None:
    there, stream, host = card.memory(), card.stream(), np.arange(8, dtype=np.uint64)
    with soft_cuda.hold_copies(), calling(card.copy, there, host.ctypes.data, 64, stream) as answers:
        until(lambda: card.query(stream) == NOT_READY)
        assert answers == []
        (soft_cuda.state / "hold-copies").unlink()
        until(lambda: answers == [0])
        (soft_cuda.state / "hold-copies").touch()
    assert card.bytes_of(there, 8).tolist() == list(range(8))


def test_memory_says_where_it_begins(card: Card) -> None:
    there, base, size = card.memory(), ctypes.c_uint64(), ctypes.c_size_t()
    find = ("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size))
    assert card.code(*find, u64(there + 100)) == 0
    assert (base.value, size.value) == (there, 2 * MIB)
    assert card.code(*find, u64(there + 2 * MIB)) == NOT_FOUND


def test_what_is_set_is_set_in_order(card: Card) -> None:
    there, stream = card.memory(), card.stream()
    assert card.code("cuMemsetD8Async", u64(there), 0xAB, ctypes.c_size_t(4096), ctypes.c_void_p(stream)) == 0
    assert card.code("cuMemsetD32Async", u64(there + 4), 7, ctypes.c_size_t(1), ctypes.c_void_p(stream)) == 0
    card.cuda.synchronize(stream)
    assert card.bytes_of(there, 2).tolist() == [0x00000007_ABABABAB, 0xABABABAB_ABABABAB]
    call = ("cuMemsetD8_v2", u64(there), 0, ctypes.c_size_t(2 * MIB + 1))
    assert card.code(*call) == INVALID_VALUE


def test_slow_copies_take_their_time(soft_cuda: SoftCuda) -> None:
    card = Card(soft_cuda, SOFTCUDA_SLOW_NS_PER_MB=20_000_000)
    there, stream, host = card.memory(), card.stream(), card.pinned(words=MIB // 8)
    start, end = card.event(0), card.event(0)
    card.cuda.record(start, stream)
    assert card.copy(there, host.ctypes.data, MIB, stream) == 0
    card.cuda.record(end, stream)
    card.cuda.synchronize(stream)
    took = ctypes.c_float()
    call = (ctypes.byref(took), ctypes.c_void_p(start), ctypes.c_void_p(end))
    assert card.code("cuEventElapsedTime_v2", *call) == card.code("cuEventElapsedTime", *call) == 0
    assert took.value >= 20


# -- memory ------------------------------------------------------------------------------------------------------------


def test_memory_is_made_in_whole_grains(card: Card) -> None:
    cuda = card.cuda
    assert cuda.granularity(0) == 2 * MIB
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        cuda.create(3 * MIB, 0)
    with pytest.raises(CudaError, match="INVALID_DEVICE"):
        cuda.create(2 * MIB, 1)
    handle = cuda.create(4 * MIB, 0) or 0
    address, nothing = ctypes.c_uint64(), u64(0)
    reserve = ("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(8 * MIB), ctypes.c_size_t(4 * MIB))
    assert card.code(*reserve, nothing, nothing) == 0
    assert address.value % (4 * MIB) == 0

    def mapped(at: int, num_bytes: int, offset: int = 0) -> int:
        size, start = ctypes.c_size_t(num_bytes), ctypes.c_size_t(offset)
        return card.code("cuMemMap", u64(at), size, start, u64(handle), nothing)

    base = address.value
    assert mapped(base + 4096, 2 * MIB) == INVALID_VALUE
    assert mapped(base, 6 * MIB) == INVALID_VALUE, "more than there is"
    assert mapped(base, 2 * MIB, 2 * MIB) == INVALID_VALUE, "only from its beginning"
    assert mapped(base + 6 * MIB, 4 * MIB) == INVALID_VALUE, "over the reservation's end"
    assert mapped(base, 4 * MIB) == 0
    assert mapped(base + 2 * MIB, 2 * MIB) == INVALID_VALUE, "something is there"
    assert mapped(base + 4 * MIB, 4 * MIB) == 0, "twice, elsewhere"
    stream, host = card.stream(), card.pinned(5)
    assert card.copy(base, host.ctypes.data, 8, stream) == INVALID_VALUE, "there is no access yet"
    access = (ctypes.c_int * 3)(1, 0, 3)
    assert card.code("cuMemSetAccess", u64(base), ctypes.c_size_t(2 * MIB), access, ctypes.c_size_t(1)) == INVALID_VALUE
    assert card.code("cuMemSetAccess", u64(base), ctypes.c_size_t(8 * MIB), access, ctypes.c_size_t(1)) == 0
    assert card.copy(base, host.ctypes.data, 8, stream) == 0
    card.cuda.synchronize(stream)
    assert card.bytes_of(base + 4 * MIB, 1).tolist() == [5], "it is the same memory"
    assert card.code("cuMemAddressFree", u64(base), ctypes.c_size_t(8 * MIB)) == INVALID_VALUE
    assert card.code("cuMemUnmap", u64(base), ctypes.c_size_t(2 * MIB)) == INVALID_VALUE
    for at in (base, base + 4 * MIB):
        assert card.code("cuMemUnmap", u64(at), ctypes.c_size_t(4 * MIB)) == 0
    assert card.code("cuMemAddressFree", u64(base), ctypes.c_size_t(8 * MIB)) == 0
    cuda.release_memory(handle)
    assert card.code("cuMemRelease", u64(handle)) == INVALID_VALUE


def test_access_is_a_devices(two_cards: SoftCuda) -> None:
    card = Card(two_cards)
    there, host, stream = card.memory(), card.pinned(5), card.stream()
    assert card.copy(there, host.ctypes.data, 8, stream) == 0
    with card.cuda.on(1):
        theirs = card.stream()
        assert card.copy(there, host.ctypes.data, 8, theirs) == INVALID_VALUE


@pytest.mark.parametrize("how", ["reserved", "mapped", "unmapped"])
def test_memory_that_may_not_be_touched_faults(soft_cuda: SoftCuda, how: str) -> None:
    with Process(soft_cuda) as process:
        process.send(
            f"""
            size, none, zero = ctypes.c_size_t(2 << 20), ctypes.c_size_t(0), ctypes.c_uint64(0)
            address = ctypes.c_uint64()
            cuda.call("cuMemAddressReserve", ctypes.byref(address), size, none, zero, zero)
            if "{how}" == "mapped":
                cuda.call("cuMemMap", address, size, none, ctypes.c_uint64(cuda.create(2 << 20, 0)), zero)
            if "{how}" == "unmapped":
                address = ctypes.c_uint64(cuda.map(cuda.create(2 << 20, 0), 2 << 20, 0))
                ctypes.memset(address.value, 1, 8)
                cuda.call("cuMemUnmap", address, size)
            ctypes.memset(address.value, 1, 8)
            """
        )
        assert process.wait() == -signal.SIGSEGV


def test_another_process_maps_what_was_exported(card: Card, soft_cuda: SoftCuda) -> None:
    handle = card.cuda.create(2 * MIB, 0) or 0
    fd = card.cuda.export(handle)
    mine, stream = card.cuda.map(handle, 2 * MIB, 0), card.stream()
    with Process(soft_cuda) as other:
        other.run("there = cuda.map(cuda.import_fd(fds[0]), 2 << 20, 0)", fd)
        assert card.launch(stream, "sgl_count", mine, 4, 10) == 0
        card.cuda.synchronize(stream)
        read = "host = np.zeros(4, np.uint64); cuda.call('cuMemcpyDtoH_v2', ctypes.c_void_p(host.ctypes.data), "
        assert other.run(read + "ctypes.c_uint64(there), ctypes.c_size_t(32)); host.tolist()") == [10, 11, 12, 13]
    os.close(fd)


def test_a_descriptor_that_is_no_memory_of_a_card_is_refused(card: Card, tmp_path: Path) -> None:
    handle = card.cuda.create(2 * MIB, 0) or 0
    (tmp_path / "file").touch()
    for fd in (os.memfd_create("x"), os.open(tmp_path / "file", os.O_RDWR), *os.pipe(), 987):
        with pytest.raises(CudaError, match="INVALID_VALUE"):
            card.cuda.import_fd(fd)
        with contextlib.suppress(OSError):
            os.close(fd)
    fd = card.cuda.export(handle)
    again = card.cuda.import_fd(fd)  # as often as one likes, also where it is from
    os.close(fd)
    assert again != handle
    there = card.cuda.map(again, 2 * MIB, 0)
    for each in (handle, again):
        card.cuda.release_memory(each)
    card.bytes_of(there, 1)[0] = 1


def test_memory_is_exported_where_it_was_made_for_that(card: Card) -> None:
    properties = (ctypes.c_int * 8)(1, 0, 1)  # pinned, with no handle, of a device: the first
    handle, fd = ctypes.c_uint64(), ctypes.c_int(-1)
    create = (ctypes.byref(handle), ctypes.c_size_t(2 * MIB), properties, u64(0))
    assert card.code("cuMemCreate", *create) == 0
    assert card.code("cuMemExportToShareableHandle", ctypes.byref(fd), handle, 1, u64(0)) == INVALID_VALUE
    properties[1] = 8  # a fabric's
    assert card.code("cuMemCreate", *create) == NOT_SUPPORTED
    properties[:3] = 1, 1, 3  # of the host
    assert card.code("cuMemCreate", *create) == INVALID_VALUE


def test_plain_memory_is_freed_once_all_that_is_queued_is_done(card: Card) -> None:
    there, gate, stream, other = card.cuda.alloc(64) or 0, card.pinned(), card.stream(), card.stream()
    card.wait(stream, gate, 1)
    assert card.copy(there, gate.ctypes.data, 64, stream) == 0
    with calling(card.code, "cuMemFree_v2", u64(there)) as answers:
        assert card.launch(other, "sgl_spin_ns", 5_000_000) == 0
        card.cuda.synchronize(other)
        assert answers == []
        gate[0] = 1
    assert answers == [0]
    card.cuda.synchronize(stream)


def test_the_budget_is_a_cards_over_all_processes(soft_cuda: SoftCuda) -> None:
    card = Card(soft_cuda, SOFTCUDA_MEMORY=8 * MIB)
    with Process(soft_cuda, SOFTCUDA_MEMORY=8 * MIB) as other:
        assert card.cuda.free_bytes() == (8 * MIB, 8 * MIB)
        handle = card.cuda.create(6 * MIB, 0) or 0
        assert other.run("cuda.free_bytes()") == (2 * MIB, 8 * MIB)
        assert other.run("cuda.create(4 << 20, 0)") is None
        assert other.run("cuda.alloc(3 << 20)") is None
        assert other.run("cuda.alloc(9 << 20)") is None
        assert other.run("cuda.create(2 << 20, 0)") is not None
        assert card.cuda.free_bytes() == (0, 8 * MIB)
        card.cuda.release_memory(handle)
        assert card.cuda.free_bytes() == (6 * MIB, 8 * MIB)
        address = card.cuda.alloc(5 * MIB) or 0
        card.cuda.free(address)
        assert card.cuda.free_bytes() == (6 * MIB, 8 * MIB)
        other.kill()
    assert card.cuda.free_bytes() == (8 * MIB, 8 * MIB)


def test_memory_stays_until_the_last_who_has_it_is_gone(card: Card, soft_cuda: SoftCuda) -> None:
    free = lambda: card.cuda.free_bytes()[0]  # noqa: E731
    all_of_it = free()
    with Process(soft_cuda) as owner, Process(soft_cuda) as mapper:
        owner.run("handle = cuda.create(2 << 20, 0); fd = cuda.export(handle); give.append(fd)")
        (fd,) = owner.fds  # of a process that maps nothing
        mapper.run("imported = cuda.import_fd(fds[0]); os.close(fds[0])", fd)
        mapper.run("there = cuda.map(imported, 2 << 20, 0); cuda.release_memory(imported)")
        owner.kill()
        os.close(fd)
        assert free() == all_of_it - 2 * MIB, "the mapping has it"
        mapper.run("cuda.unmap(there, 2 << 20)")
        assert free() == all_of_it
        mapper.run("fd = cuda.export(cuda.create(2 << 20, 0)); give.append(fd)")
        (fd,) = mapper.fds
        mapper.kill()
    assert free() == all_of_it - 2 * MIB, "the descriptor has it"
    handle = card.cuda.import_fd(fd)
    os.close(fd)
    assert free() == all_of_it - 2 * MIB
    card.cuda.release_memory(handle)
    assert free() == all_of_it


def test_plain_memory_is_shared_by_its_handle(card: Card, soft_cuda: SoftCuda) -> None:
    cuda, all_of_it = card.cuda, card.cuda.free_bytes()[0]
    with Process(soft_cuda) as owner:
        owner.run("address = cuda.alloc(10000); ctypes.memset(address, 5, 16)")
        handle = owner.run("cuda.ipc_handle(address)")
        assert len(handle) == 64
        there = cuda.open_ipc(handle)
        assert cuda.open_ipc(handle) == there, "once for a context"
        assert card.bytes_of(there, 1).tolist() == [0x0505050505050505]
        cuda.close_ipc(there)
        card.bytes_of(there, 1)[0] = 7
        assert owner.run("ctypes.string_at(address, 8)") == (7).to_bytes(8, "little")
        for wrong in ("cuda.open_ipc(cuda.ipc_handle(address))", "cuda.ipc_handle(address + 512)"):
            with pytest.raises(AssertionError, match="INVALID"):
                owner.run(wrong)
        owner.kill()
        assert cuda.free_bytes()[0] == all_of_it - 10000, "who has opened it has it"
        cuda.close_ipc(there)
    assert cuda.free_bytes()[0] == all_of_it
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        cuda.open_ipc(handle)
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        cuda.ipc_handle(card.memory())  # memory of the other kind


def test_a_killed_processs_streams_write_no_more(card: Card, soft_cuda: SoftCuda) -> None:
    handle = card.cuda.create(2 * MIB, 0) or 0
    fd, mine = card.cuda.export(handle), card.cuda.map(handle, 2 * MIB, 0)
    cells = card.bytes_of(mine, 8)
    with Process(soft_cuda) as other:
        other.run("there = cuda.map(cuda.import_fd(fds[0]), 2 << 20, 0); stream = cuda.stream()", fd)
        text = ptx(".visible .entry sgl_scribble(.param .u64 a, .param .u64 b, .param .u64 c) { ret; }")
        other.run(
            f"""
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            cuda.call("cuModuleLoadData", ctypes.byref(module), {text.encode()!r})
            cuda.call("cuModuleGetFunction", ctypes.byref(function), module, b"sgl_scribble")
            values = [ctypes.c_uint64(each) for each in (there, 8, 60 * 10**9)]
            pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(each) for each in values))
            cuda.call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, ctypes.c_void_p(stream), pointers, None)
            """
        )
        until(lambda: cells[7] > 1000)
        other.kill()
    last = int(cells[0])
    assert int(cells[7]) in (last, last - 1)
    cells[:] = 0
    assert card.launch(None, "sgl_spin_ns", 1_000_000) == 0
    assert card.code("cuCtxSynchronize") == 0
    assert cells.tolist() == [0] * 8
    os.close(fd)


def test_memory_is_unmapped_once_nothing_that_runs_uses_it(card: Card) -> None:
    there, stream, event = card.memory(), card.stream(), card.cuda.event()
    cells = card.bytes_of(there, 1)
    assert card.launch(stream, "sgl_scribble", there, 1, 30_000_000) == 0
    card.cuda.record(event, stream)
    until(lambda: cells[0] > 0)
    card.cuda.unmap(there, 2 * MIB)
    assert card.cuda.done(event)


# -- the host's memory -------------------------------------------------------------------------------------------------


def test_host_memory_is_registered_once(card: Card) -> None:
    array = card.pinned()
    pin = ("cuMemHostRegister_v2", ctypes.c_void_p(array.ctypes.data + 64), ctypes.c_size_t(64), 1)
    assert card.code(*pin) == ALREADY_REGISTERED
    card.cuda.unpin(array.ctypes.data)
    assert card.code("cuMemHostUnregister", ctypes.c_void_p(array.ctypes.data)) == NOT_REGISTERED
    assert card.code(*pin) == 0
    nowhere = ctypes.c_void_p(1 << 60)
    assert card.code("cuMemHostRegister_v2", nowhere, ctypes.c_size_t(4096), 1) == INVALID_VALUE


def test_host_memory_is_a_devices_where_that_was_asked_for(card: Card) -> None:
    array, stream, there = np.ndarray((512,), np.uint64, mmap.mmap(-1, 4096)), card.stream(), ctypes.c_uint64()
    address = array.ctypes.data
    pointer = ("cuMemHostGetDevicePointer_v2", ctypes.byref(there), ctypes.c_void_p(address), 0)
    write = ("cuStreamWriteValue64_v2", ctypes.c_void_p(stream), u64(address), u64(1), 0)
    assert card.code(*write) == INVALID_VALUE
    card.cuda.pin(address, 4096)
    assert (card.code(*pointer), card.code(*write)) == (INVALID_VALUE, INVALID_VALUE)
    card.cuda.unpin(address)
    assert card.cuda.register(address, 4096) == address
    assert card.code(*write) == 0
    card.cuda.synchronize(stream)
    assert array[0] == 1
    pinned = ctypes.c_void_p()
    assert card.code("cuMemHostAlloc", ctypes.byref(pinned), ctypes.c_size_t(4096), 0) == 0
    write = ("cuStreamWriteValue64_v2", ctypes.c_void_p(stream), u64(pinned.value or 0), u64(1), 0)
    assert card.code(*write) == 0
    assert card.code("cuMemFreeHost", pinned) == 0
    assert card.code(*write) == INVALID_VALUE
    assert card.code("cuMemFreeHost", ctypes.c_void_p(address)) == INVALID_VALUE


def test_memory_that_was_pinned_for_one_card_is_pageable_for_another(two_cards: SoftCuda) -> None:
    card = Card(two_cards)
    arrays = [np.ndarray((512,), np.uint64, mmap.mmap(-1, 4096)) for _ in range(2)]
    for flags, array in enumerate(arrays):
        pin = ("cuMemHostRegister_v2", ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(4096), flags)
        assert card.code(*pin) == 0
    with card.cuda.on(1):
        there, stream, event = card.memory(device=1), card.stream(), card.cuda.event()
        assert card.copy(there, arrays[0].ctypes.data, 4096, stream) == 0
        assert card.query(stream) == 0, "over when the call was"
        with two_cards.hold_copies():
            assert card.copy(there, arrays[1].ctypes.data, 4096, stream) == 0
            card.cuda.record(event, stream)
            assert not card.cuda.done(event)
        card.cuda.synchronize(stream)


# -- streams and events ------------------------------------------------------------------------------------------------


def test_stream_0_is_in_order_with_the_streams_that_block(card: Card) -> None:
    gates, seen = card.pinned(), card.pinned()
    blocking, apart = card.stream(0), card.stream(1)
    with card.held(blocking):
        card.wait(0, gates[0:], 1)
        card.write(0, seen[0:], 1)
        card.write(blocking, seen[1:], 2)
        card.wait(blocking, gates[1:], 1)
        card.write(0, seen[2:], 3)
    card.write(apart, seen[3:], 4)
    card.cuda.synchronize(apart)
    assert card.query(None) == card.query(blocking) == NOT_READY
    assert seen[:4].tolist() == [0, 0, 0, 4], "stream 0 is first, with what came before"
    gates[0] = 1
    until(lambda: bool(seen[1] == 2))
    assert card.query(None) == card.query(blocking) == NOT_READY
    assert seen[:3].tolist() == [1, 2, 0], "and waits for what came between"
    gates[1] = 1
    assert card.code("cuCtxSynchronize") == 0
    assert seen[:3].tolist() == [1, 2, 3]


def test_a_destroyed_stream_ends_what_is_in_it(card: Card) -> None:
    gate, seen, stream = card.pinned(), card.pinned(), card.stream()
    card.wait(stream, gate, 1)
    card.write(stream, seen, 7)
    assert card.code("cuStreamDestroy_v2", ctypes.c_void_p(stream)) == 0
    assert card.code("cuStreamDestroy_v2", ctypes.c_void_p(stream)) == INVALID_HANDLE
    assert card.query(stream) == INVALID_HANDLE
    gate[0] = 1
    until(lambda: seen[0] == 7)


def test_an_event_that_was_never_recorded_is_no_wait(card: Card) -> None:
    gate, seen = card.pinned(), card.pinned()
    event, first, second = card.cuda.event(), card.stream(), card.stream()
    assert card.cuda.done(event)
    card.cuda.wait_event(second, event)
    card.write(second, seen, 1)
    card.cuda.synchronize(second)
    assert seen[0] == 1
    with card.held(second), card.held(first):
        card.wait(first, gate, 1)
        card.cuda.record(event, first)
        card.cuda.wait_event(second, event)
        card.write(second, seen, 2)
    assert not card.cuda.done(event)
    assert card.query(second) == NOT_READY
    assert seen[0] == 1
    gate[0] = 1
    card.cuda.synchronize(second)
    assert seen[0] == 2


def test_a_wait_is_for_what_was_recorded_when_it_was_asked_for(card: Card) -> None:
    gates, seen, event = card.pinned(), card.pinned(), card.cuda.event()
    first, second = card.stream(), card.stream()
    card.wait(first, gates[0:], 1)
    card.cuda.record(event, first)
    card.cuda.wait_event(second, event)
    card.write(second, seen, 1)
    card.wait(first, gates[1:], 1)
    card.cuda.record(event, first)  # again, and later
    gates[0] = 1
    card.cuda.synchronize(second)
    assert seen[0] == 1
    assert not card.cuda.done(event)
    gates[1] = 1
    assert card.code("cuEventSynchronize", ctypes.c_void_p(event)) == 0
    assert card.cuda.done(event)


def test_events_tell_the_time_between_them(card: Card) -> None:
    gate, stream, took = card.pinned(), card.stream(), ctypes.c_float()
    start, end, silent = card.event(0), card.event(0), card.event(2)

    def elapsed(first: int, last: int) -> int:
        return card.code("cuEventElapsedTime_v2", ctypes.byref(took), ctypes.c_void_p(first), ctypes.c_void_p(last))

    assert elapsed(start, end) == INVALID_HANDLE, "never recorded"
    card.cuda.record(start, stream)
    card.cuda.record(silent, stream)
    assert card.launch(stream, "sgl_spin_ns", 3_000_000) == 0
    card.wait(stream, gate, 1)
    card.cuda.record(end, stream)
    assert elapsed(start, end) == NOT_READY
    gate[0] = 1
    card.cuda.synchronize(stream)
    assert elapsed(start, end) == 0
    assert 3 <= took.value < 10_000
    assert elapsed(silent, end) == INVALID_HANDLE


def test_an_event_is_recorded_in_a_stream_of_its_context(two_cards: SoftCuda) -> None:
    card = Card(two_cards)
    event, gate, seen = card.cuda.event(), card.pinned(), card.pinned()
    mine = card.stream()
    with card.cuda.on(1):
        theirs = card.stream()
    assert card.code("cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(theirs)) == INVALID_HANDLE
    with card.held(theirs), card.held(mine):
        card.wait(mine, gate, 1)
        card.cuda.record(event, mine)
        card.cuda.wait_event(theirs, event)  # another card may wait for it
        card.write(theirs, seen, 1)
    assert card.query(theirs) == NOT_READY
    assert seen[0] == 0
    gate[0] = 1
    card.cuda.synchronize(theirs)
    assert seen[0] == 1


def open_event(handle: bytes) -> str:
    """Python, for a process that opens an event of another."""
    return f"""
        class Handle(ctypes.Structure):
            _fields_ = (("bytes", ctypes.c_ubyte * 64),)
        event, stream = ctypes.c_void_p(), cuda.stream()
        given = Handle((ctypes.c_ubyte * 64)(*{handle!r}))
        cuda.call("cuIpcOpenEventHandle", ctypes.byref(event), given)
        event = event.value
        cells = np.ndarray((512,), np.uint64, mmap.mmap(-1, 4096))
        cuda.register(cells.ctypes.data, 4096)
    """


def test_another_process_waits_for_an_event(card: Card, soft_cuda: SoftCuda) -> None:
    handle, gate, stream = (ctypes.c_ubyte * 64)(), card.pinned(), card.stream()
    event = card.event(2 | 4)
    assert card.code("cuIpcGetEventHandle", handle, ctypes.c_void_p(event)) == 0
    with Process(soft_cuda) as other:
        other.run(open_event(bytes(handle)))
        step = """
            cuda.wait_value(stream, cells.ctypes.data + 16, {0})
            cuda.write_value(stream, cells.ctypes.data + 24, {0})
            cuda.wait_event(stream, event)
            cuda.write_value(stream, cells.ctypes.data, {0})
            cells[2] = {0}
            while cells[3] != {0}:
                pass
        """
        other.run(step.format(1))
        other.run("cuda.synchronize(stream)")  # never recorded: it waits for nothing
        card.wait(stream, gate, 1)
        card.cuda.record(event, stream)
        other.run(step.format(2))
        assert other.run("(cuda.done(event), int(cells[0]))") == (False, 1)
        card.wait(stream, gate, 2)
        card.cuda.record(event, stream)
        gate[0] = 1
        other.run("cuda.synchronize(stream)")  # for the first record alone
        assert other.run("(cuda.done(event), int(cells[0]))") == (False, 2)
        gate[0] = 2
        other.run("cuda.call('cuEventSynchronize', ctypes.c_void_p(event))")
        assert other.run("cuda.done(event)") is True
        other.run("cuda.record(event, stream); cuda.synchronize(stream)")  # it may record it, too
        assert card.cuda.done(event)


def test_an_events_wait_ends_with_the_process_that_recorded_it(card: Card, soft_cuda: SoftCuda) -> None:
    with Process(soft_cuda) as owner, Process(soft_cuda) as other:
        handle = owner.run(
            """
            event, handle, stream = ctypes.c_void_p(), (ctypes.c_ubyte * 64)(), cuda.stream()
            cells = np.ndarray((512,), np.uint64, mmap.mmap(-1, 4096))
            cuda.register(cells.ctypes.data, 4096)
            cuda.call("cuEventCreate", ctypes.byref(event), 6)
            cuda.call("cuIpcGetEventHandle", handle, event)
            cuda.wait_value(stream, cells.ctypes.data, 1)
            cuda.record(event.value, stream)
            bytes(handle)
            """
        )
        other.run(open_event(handle))
        other.run("cuda.wait_event(stream, event)")
        assert other.run("cuda.done(event)") is False
        owner.kill()
        other.run("cuda.synchronize(stream)")
        assert other.run("cuda.done(event)") is True


def test_an_event_is_shared_where_it_was_made_for_that(card: Card) -> None:
    handle, event = (ctypes.c_ubyte * 64)(), ctypes.c_void_p()
    assert card.code("cuEventCreate", ctypes.byref(event), 4) == INVALID_VALUE, "with its timing disabled"
    assert card.code("cuIpcGetEventHandle", handle, ctypes.c_void_p(card.event(2))) == INVALID_HANDLE
    assert card.code("cuIpcGetEventHandle", handle, ctypes.c_void_p(card.event(6))) == 0

    class Handle(ctypes.Structure):
        _fields_ = (("bytes", ctypes.c_ubyte * 64),)

    opened = ctypes.byref(ctypes.c_void_p())
    assert card.code("cuIpcOpenEventHandle", opened, Handle(handle)) == INVALID_CONTEXT, "in another process"
    assert card.code("cuIpcOpenEventHandle", opened, Handle((ctypes.c_ubyte * 64)(1))) == INVALID_VALUE


@pytest.mark.parametrize(
    ("at", "value", "met"),
    [(5, 5, True), (6, 5, True), (4, 5, False), (2**63 - 1, 5, True), (2**64 - 1, 5, False), (1, 2**64 - 1, True)],
)
def test_a_stream_waits_for_a_word_that_may_wrap_around(card: Card, at: int, value: int, met: bool) -> None:
    cell, seen, stream = card.pinned(at), card.pinned(), card.stream()
    with card.held(stream):
        card.wait(stream, cell, value)
        card.write(stream, seen, 1)
    assert card.query(stream) == (0 if met else NOT_READY)
    assert seen[0] == met
    cell[0] = value
    card.cuda.synchronize(stream)


@pytest.mark.parametrize("width", [32, 64])
def test_a_stream_waits_for_equality_and_for_bits(card: Card, width: int) -> None:
    cell, stream = card.pinned(0), card.stream()
    word = cell.view(np.uint32 if width == 32 else np.uint64)
    at, on, number = u64(cell.ctypes.data), ctypes.c_void_p(stream), ctypes.c_uint32 if width == 32 else u64
    sign, ones = 1 << (width - 1), (1 << width) - 1
    for flags, value, before, after in ((0, 3, sign + 3, sign + 2), (1, 7, 8, 7), (2, 6, 9, 4), (3, 1, ones, 2)):
        word[0] = before
        with card.held(stream):
            assert card.code(f"cuStreamWaitValue{width}_v2", on, at, number(value), flags) == 0
        assert card.query(stream) == NOT_READY
        word[0] = after
        card.cuda.synchronize(stream)
    assert card.code(f"cuStreamWriteValue{width}_v2", on, at, number(5), 0) == 0
    card.cuda.synchronize(stream)
    assert word[:2].tolist() == [5, 0]
    wait = f"cuStreamWaitValue{width}_v2"
    assert card.code(wait, on, u64(at.value + 2), number(1), 0) == INVALID_VALUE
    assert card.code(wait, on, at, number(1), 8) == INVALID_VALUE
    assert card.code(wait, on, at, number(1), 1 << 30) == NOT_SUPPORTED
    assert card.code(wait, on, u64(at.value + 4), number(0), 0) == (0 if width == 32 else INVALID_VALUE)


def test_a_stream_waits_for_what_another_process_writes(card: Card, soft_cuda: SoftCuda) -> None:
    fd = os.memfd_create("ring")
    os.truncate(fd, 4096)
    cells = np.ndarray((512,), np.uint64, mmap.mmap(fd, 4096))
    card.cuda.register(cells.ctypes.data, 4096)
    stream = card.stream()
    with Process(soft_cuda) as other:
        other.run("cells = np.ndarray((512,), np.uint64, mmap.mmap(fds[0], 4096)); stream = cuda.stream()", fd)
        other.run("cuda.register(cells.ctypes.data, 4096)")
        with card.held(stream):
            card.wait(stream, cells, 3)
            card.write(stream, cells[1:], 4)
        assert card.query(stream) == NOT_READY
        assert cells[1] == 0
        other.run("cuda.write_value(stream, cells.ctypes.data, 3); cuda.wait_value(stream, cells.ctypes.data + 8, 4)")
        other.run("cuda.synchronize(stream)")
        assert other.run("cells[:2].tolist()") == [3, 4]
    os.close(fd)


def test_a_host_function_runs_in_its_turn_and_calls_no_cuda(card: Card) -> None:
    gate, stream, told = card.pinned(), card.stream(), []
    called = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: told.append((data, card.code("cuCtxSynchronize"))))
    with card.held(stream):
        card.wait(stream, gate, 1)
        assert card.code("cuLaunchHostFunc", ctypes.c_void_p(stream), called, ctypes.c_void_p(42)) == 0
    assert card.query(stream) == NOT_READY
    assert told == []
    gate[0] = 1
    card.cuda.synchronize(stream)
    assert told == [(42, NOT_PERMITTED)]


# -- kernels -----------------------------------------------------------------------------------------------------------


def test_kernels_do_what_their_names_say(card: Card) -> None:
    there, other, stream = card.memory(), card.memory(), card.stream()
    gate = card.pinned()
    offsets = card.pinned(64, 0, 16, 32)  # two of the target's, two of the source's
    assert card.launch(stream, "sgl_fill", there, 9, 16) == 0
    assert card.launch(stream, "sgl_count", there, 8, 100) == 0
    assert card.launch(stream, "sgl_copy", other, there, 10) == 0
    card.cuda.synchronize(stream)
    assert card.bytes_of(other, 11).tolist() == [*range(100, 108), 9, 9, 0]
    assert card.launch(stream, "sgl_gather", there, other, offsets.ctypes.data, offsets.ctypes.data + 16, 16, 2) == 0
    card.cuda.synchronize(stream)
    assert card.bytes_of(there, 10).tolist() == [104, 105, *range(102, 108), 102, 103]
    assert card.launch(stream, "sgl_burn", other, 1000) == 0
    assert card.launch(stream, "sgl_wait_flag", gate.ctypes.data, 2**64 - 1) == 0  # cyclic: 0 is more
    assert card.launch(stream, "sgl_scribble", there, 4, 1_000_000) == 0
    assert card.launch(stream, "sgl_wait_flag", gate.ctypes.data, 3) == 0
    until(lambda: card.bytes_of(there, 1)[0] > 0)
    assert card.query(stream) == NOT_READY
    gate[0] = 4
    card.cuda.synchronize(stream)
    assert len(set(card.bytes_of(there, 4).tolist())) == 1, "alone in it, it ends with a whole round"


def test_arguments_are_read_during_the_call_and_may_come_in_one_piece(card: Card) -> None:
    there, gate, stream = card.memory(), card.pinned(), card.stream()
    buffer, size = (ctypes.c_uint64 * 3)(there, 7, 2), ctypes.c_size_t(24)
    extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(buffer), 2, ctypes.addressof(size), None)
    card.wait(stream, gate, 1)
    call = (ctypes.c_void_p(card.kernel("sgl_fill", 3)), 1, 1, 1, 1, 1, 1, 0, ctypes.c_void_p(stream))
    assert card.code("cuLaunchKernel", *call, None, extra) == 0
    buffer[1] = 8
    gate[0] = 1
    card.cuda.synchronize(stream)
    assert card.bytes_of(there, 3).tolist() == [7, 7, 0]
    assert card.code("cuLaunchKernel", *call, None, None) == INVALID_VALUE


def test_a_module_has_the_kernels_that_its_text_declares(card: Card) -> None:
    params = ".param .u64 .ptr .global a,\n.param .b64 b, .param .s64 c"
    module = card.load(ptx(f"/* .visible .entry sgl_no( */ .visible .entry sgl_fill(\n {params})\n{{ ret; }}"))
    function = ctypes.c_void_p()
    find = ("cuModuleGetFunction", ctypes.byref(function), ctypes.c_void_p(module))
    assert card.code(*find, b"sgl_fill") == 0
    assert card.code(*find, b"sgl_no") == NOT_FOUND
    assert card.launch(None, "unheard_of") == NOT_SUPPORTED
    assert card.launch(None, "sgl_spin_ns", 1, 2) == INVALID_IMAGE, "with other parameters than its own"
    launch = ("cuLaunchKernel", function, 1, 1, 1)
    assert card.code(*launch, 2048, 1, 1, 0, None, None, None) == INVALID_VALUE
    assert card.code("cuModuleUnload", ctypes.c_void_p(module)) == 0
    assert card.code(*launch, 1, 1, 1, 0, None, None, None) == INVALID_HANDLE
    assert card.code("cuModuleLoadData", ctypes.byref(function), b"int main() { return 0; }") == INVALID_PTX


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("offset", "code"), [(2 * MIB - 8, ILLEGAL_ADDRESS), (4, MISALIGNED)])
def test_a_kernel_that_goes_astray_breaks_its_context(card: Card, offset: int, code: int) -> None:
    there, gate, stream, event = card.memory(), card.pinned(), card.stream(), card.cuda.event()
    card.wait(stream, gate, 1)
    assert card.launch(stream, "sgl_fill", there + offset, 1, 2) == 0
    card.cuda.record(event, stream)
    gate[0] = 1
    assert card.code("cuStreamSynchronize", ctypes.c_void_p(stream)) == code
    assert card.code("cuEventQuery", ctypes.c_void_p(event)) == code, "and it is never done"
    assert card.code("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(8)) == code


def test_what_is_queued_and_has_lost_its_memory_breaks_the_context(card: Card) -> None:
    gate, stream, there = card.pinned(), card.stream(), card.memory()
    card.wait(stream, gate, 1)
    assert card.copy(there, gate.ctypes.data, 8, stream) == 0
    card.cuda.unmap(there, 2 * MIB)
    gate[0] = 1
    assert card.code("cuStreamSynchronize", ctypes.c_void_p(stream)) == ILLEGAL_ADDRESS


def test_a_gather_that_goes_astray_breaks_its_context(card: Card) -> None:
    there, offsets, stream = card.memory(), card.pinned(0, 2 * MIB - 8), card.stream()
    at = offsets.ctypes.data
    assert card.launch(stream, "sgl_gather", there, there, at, at + 8, 16, 1) == 0
    assert card.code("cuStreamSynchronize", ctypes.c_void_p(stream)) == ILLEGAL_ADDRESS


def test_a_wait_for_a_word_that_is_no_longer_there_breaks_the_context(card: Card) -> None:
    gate, stream = card.pinned(), card.stream()
    with card.held(stream):
        card.wait(stream, gate, 1)
    card.cuda.unpin(gate.ctypes.data)
    assert card.code("cuStreamSynchronize", ctypes.c_void_p(stream)) == ILLEGAL_ADDRESS


def test_a_call_fails_from_its_nth_time_on_and_the_context_with_it(two_cards: SoftCuda) -> None:
    card = Card(two_cards, SOFTCUDA_FAIL="cuMemcpyBatchAsync_v2:3:700,cuMemHostRegister_v2:2:2")
    gate, there, stream = card.pinned(5), card.memory(), card.stream()
    pin = ("cuMemHostRegister_v2", ctypes.c_void_p(there), ctypes.c_size_t(8), 1)
    assert [card.code(*pin) for _ in range(2)] == [OUT_OF_MEMORY] * 2, "which breaks nothing"
    event = card.cuda.event()
    copy = (words(there), words(gate.ctypes.data), words(8), stream)
    assert [card.batch(*copy) for _ in range(2)] == [0, 0]
    card.wait(stream, gate, 6)
    card.cuda.record(event, stream)
    assert [card.batch(*copy) for _ in range(2)] == [ILLEGAL_ADDRESS] * 2
    for call in ("cuCtxSynchronize", "cuEventQuery", "cuStreamQuery", "cuStreamSynchronize", "cuEventDestroy_v2"):
        assert card.code(call, ctypes.c_void_p(event)) == ILLEGAL_ADDRESS, call
    assert card.code("cuMemUnmap", u64(there), ctypes.c_size_t(2 * MIB)) == ILLEGAL_ADDRESS
    with card.cuda.on(1):
        assert card.code("cuCtxSynchronize") == 0, "the other card's is as it was"
    with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):
        card.cuda.stream()


def test_another_card_does_not_wait_for_a_broken_one(two_cards: SoftCuda) -> None:
    card = Card(two_cards)
    there, gate, seen, stream, event = card.memory(), card.pinned(), card.pinned(), card.stream(), card.cuda.event()
    card.wait(stream, gate, 1)
    assert card.launch(stream, "sgl_fill", there, 1, MIB) == 0
    card.cuda.record(event, stream)
    with card.cuda.on(1):
        theirs = card.stream()
        card.cuda.wait_event(theirs, event)
        card.write(theirs, seen, 1)
        gate[0] = 1
        card.cuda.synchronize(theirs)
    assert seen[0] == 1
    assert card.code("cuEventQuery", ctypes.c_void_p(event)) == ILLEGAL_ADDRESS


def test_the_next_call_fails_as_it_is_told(card: Card, soft_cuda: SoftCuda) -> None:
    with Process(soft_cuda) as other:
        soft_cuda.fail("cuEventCreate", 2, other.pid)
        card.cuda.event()
        with pytest.raises(AssertionError, match="OUT_OF_MEMORY"):
            other.run("cuda.event()")
        assert isinstance(other.run("cuda.event()"), int), "once"
        soft_cuda.fail("cuEventCreate", LAUNCH_FAILED)
        with pytest.raises(CudaError, match="LAUNCH_FAILED"):
            card.cuda.event()
        assert isinstance(other.run("cuda.event()"), int), "one process had it"
        with pytest.raises(CudaError, match="LAUNCH_FAILED"):
            card.cuda.stream()


def test_a_context_that_is_released_takes_all_with_it(card: Card) -> None:
    all_of_it = card.cuda.free_bytes()[0]
    gate, seen, stream = card.pinned(), card.pinned(), card.stream()
    assert card.cuda.alloc(4 * MIB)
    card.wait(stream, gate, 1)
    card.write(stream, seen, 1)
    assert card.code("cuDevicePrimaryCtxRelease_v2", 0) == 0
    gate[0] = 1
    assert card.code("cuDevicePrimaryCtxRelease_v2", 0) == INVALID_CONTEXT
    assert card.code("cuStreamSynchronize", ctypes.c_void_p(stream)) == CONTEXT_IS_DESTROYED
    fresh = LibCuda(card.library)
    fresh.use(0)
    assert fresh.free_bytes()[0] == all_of_it
    assert card.query(stream) == INVALID_HANDLE
    assert seen[0] == 0
    assert fresh.register(gate.ctypes.data, gate.nbytes) == gate.ctypes.data, "nothing is registered any more"


def test_cards_by_other_names_are_other_cards(libcuda: Path, soft_cuda: SoftCuda) -> None:
    """Tests beside one another share nothing."""
    mine = Card(soft_cuda)
    with cards(libcuda) as others:
        theirs = Card(others)
        mine.memory()
        assert theirs.cuda.free_bytes()[0] - mine.cuda.free_bytes()[0] == 2 * MIB
        with pytest.raises(CudaError, match="INVALID_VALUE"):
            theirs.cuda.import_fd(mine.cuda.export(mine.cuda.create(2 * MIB, 0) or 0))


def test_what_killed_tests_left_is_removed(tmp_path: Path) -> None:
    folders = {name: tmp_path / f"{PREFIX}{name}" for name in ("runs", "left", "young")}
    for folder in folders.values():
        folder.mkdir()
        (folder / "owner").touch()
    for name in ("runs", "left"):
        os.utime(folders[name] / "owner", (0, 0))
    with (folders["runs"] / "owner").open() as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        sweep(tmp_path)
    assert [name for name, folder in folders.items() if folder.exists()] == ["runs", "young"]
