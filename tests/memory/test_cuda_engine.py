"""What the CUDA engine asks of a driver, in which order, and what it tells: against a driver in software."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from forms import Resource, draw_slots, hybrids, packed
from hypothesis import given, settings
from hypothesis import strategies as st

from sglcache.errors import ConfigError, TransferError
from sglcache.memory import cuda_driver, cuda_engine
from sglcache.memory import engine as engines
from sglcache.memory.cuda_driver import CudaError, LibCuda
from sglcache.memory.cuda_engine import CudaEngine, CudaMemory, ranges
from sglcache.memory.engine import BACKUP, LOAD, LoadPlace, Transfer, Way, ways_of
from sglcache.memory.geometry import Form, Geometry, Region, StateGeometry
from sglcache.testing.cuda import FakeDriver
from sglcache.testing.daemon import until
from sglcache.units import TicketId, Tier
from sglcache.wire.control import StateForm

Answer = tuple[TicketId, bool, TransferError | None]
Told = tuple[LoadPlace, int, int]


class Rig:
    """An engine over a driver in software: shard n is device n's."""

    def __init__(self, *forms: Form, eager: bool = False, broken: str | None = None) -> None:
        self.resources = [Resource(form, f"r{number}", number) for number, form in enumerate(forms)]
        self.device, self.host = self.resources[0].device, self.resources[0].host
        self.num_devices = max(form.num_shards for form in forms)
        self.driver = FakeDriver(eager=eager, broken=broken)
        self.answers: SimpleQueue[Answer] = SimpleQueue()
        self.told: SimpleQueue[Told] = SimpleQueue()
        self.lost: list[BaseException] = []
        ways: list[Way] = []
        for it in self.resources:
            shards = [CudaMemory(pool.placement, pool.address, number) for number, pool in enumerate(it.device.shards)]
            parts = [CudaMemory(pool.placement, pool.address, None) for pool in it.host.shards]
            ways += ways_of(it.form, shards, parts, it.name)
        self.engine = CudaEngine(
            ways,
            lambda *answer: self.answers.put(answer),
            lambda *told: self.told.put(told),
            driver=self.driver,
            lost=self.lost.append,
        )

    def backup(self, ticket: int, src: Sequence[int], dst: Sequence[int]) -> None:
        self.engine.submit(Transfer(TicketId(ticket), Tier.DEVICE, Tier.HOST, packed(src), packed(dst)))

    def load(self, ticket: int, src: Sequence[int], dst: Sequence[int], place: LoadPlace | None = None) -> None:
        self.engine.submit(Transfer(TicketId(ticket), Tier.HOST, Tier.DEVICE, packed(src), packed(dst), place))

    def enqueued(self, count: int) -> None:
        """Wait until so many events were recorded."""
        until(lambda: sum(what == "record" for _, _, what in self.driver.calls) == count)

    def close(self) -> None:
        self.driver.eager = True
        for device in range(self.num_devices):
            self.driver.run(device)
        assert self.engine.close(timeout_s=30)
        for each in self.resources:
            each.close()


@pytest.fixture
def rig(geometry: Geometry) -> Iterator[Rig]:
    """Two shards on two devices, three layers."""
    with closing(Rig(geometry)) as rig:
        yield rig


@settings(deadline=None, max_examples=60)
@given(forms=hybrids(), batch=st.sampled_from([1, 3, 4096]), step=st.sampled_from([1, 1 << 20]), data=st.data())
def test_every_byte_goes_where_it_should_and_no_other_is_touched(
    forms: list[Form], batch: int, step: int, data: st.DataObject
) -> None:
    slots = [draw_slots(data, form) for form in forms]
    with pytest.MonkeyPatch.context() as patch, closing(Rig(*forms, eager=True)) as rig:
        patch.setattr(cuda_engine, "MAX_BATCH", batch)
        patch.setattr(engines, "STEP_BYTES", step)
        for src, dst in (BACKUP, LOAD):
            expected = [each.expected(src, dst, mine) for each, mine in zip(rig.resources, slots, strict=True)]
            place = LoadPlace(0, 1) if dst is Tier.DEVICE else None
            first, *more = ((packed(mine[src]), packed(mine[dst])) for mine in slots)
            parts = [(it.name, *each) for it, each in zip(rig.resources[1:], more, strict=True)]
            rig.engine.submit(Transfer(TicketId(1), src, dst, *first, place, parts))
            assert rig.answers.get(timeout=10) == (1, True, None)
            assert all(it.is_as(dst, found) for it, found in zip(rig.resources, expected, strict=True))
        assert all(count <= batch for _, count in rig.driver.batches)
        told = [rig.told.get() for _ in range(rig.told.qsize())]
        layers = list(range(max(1, forms[0].num_layers)))
        assert [layer for _, first, stop in told for layer in range(first, stop)] == layers


def test_neighbours_are_one_range_but_not_over_the_end_of_what_was_pinned_as_one() -> None:
    dense, other = Region(64, 16, 16), Region(0, 16, 16)
    src, dst = np.array([4, 5, 6, 7, 9], np.int32), np.array([0, 1, 2, 3, 4], np.int32)

    def made(*arguments: Any) -> list[tuple[int, ...]]:
        return list(zip(*(each.tolist() for each in ranges(*arguments)), strict=True))

    assert made(src, dst, dense, other) == [(0, 128, 64), (64, 208, 16)]
    assert made(src[::-1], dst[::-1], dense, other) == [(0, 128, 64), (64, 208, 16)]
    assert made(src, dst, dense, other, (6, 0)) == [(0, 128, 32), (32, 160, 32), (64, 208, 16)]
    assert made(src, dst, dense, other, (0, 3)) == [(0, 128, 48), (48, 176, 16), (64, 208, 16)]
    apart = Region(0, 48, 16)  # a layer of pages that are whole: other layers lie between
    assert [size for *_, size in made(src, dst, apart, other)] == [16] * 5
    assert made(src[:0], dst[:0], dense, other) == []


def test_one_thread_speaks_of_a_device_and_no_other_calls_the_driver(rig: Rig) -> None:
    rig.driver.eager = True
    rig.backup(1, (0, 1), (0, 1))
    rig.load(2, (0,), (5,))
    rig.engine.pin(4096, 4096)
    for _ in range(2):
        assert rig.answers.get(timeout=10)[1]
    rig.engine.close()
    by_thread = {thread: device for thread, device, _ in rig.driver.calls}
    assert by_thread == {"sglcache-cuda-0": 0, "sglcache-cuda-1": 1}
    assert rig.driver.calls[0][2] == "use"
    assert rig.driver.pinned == {}, "and what was pinned is not, at the end"


def test_a_copy_is_done_when_every_device_has_done_it(rig: Rig) -> None:
    rig.backup(1, (0, 1), (0, 1))
    rig.enqueued(2)
    rig.driver.run(0)
    until(lambda: not any(rig.engine._devices[0]._marks.values()))
    assert rig.answers.empty()
    assert rig.engine.stats()[0].in_flight == 1
    rig.driver.run(1)
    assert rig.answers.get(timeout=10) == (1, True, None)


def test_a_layer_is_told_of_when_its_event_is_done_on_every_device(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "STEP_BYTES", 1)
    rig.load(1, (0, 3), (2, 6), LoadPlace(5, 8))
    rig.enqueued(2 * 3)
    for layer in range(3):
        rig.driver.run(1, 2)  # a batch and its event
        assert rig.told.empty()
        rig.driver.run(0, 2)
        assert rig.told.get(timeout=10) == (LoadPlace(5, 8), layer, layer + 1)
        assert rig.answers.empty() or layer == 2
    assert rig.answers.get(timeout=10) == (1, True, None)


def test_the_two_directions_have_streams_of_their_own(rig: Rig) -> None:
    rig.backup(1, (0,), (0,))
    rig.load(2, (1,), (1,))
    rig.enqueued(4)
    for device in rig.engine._devices:
        work = rig.driver.streams[device._streams[LOAD]]
        while work:
            work.popleft()()
    assert rig.answers.get(timeout=10) == (2, True, None)
    assert rig.answers.empty()


def test_of_latents_one_device_is_copied_and_all_are_loaded() -> None:
    geometry = Geometry(
        page_size=4, num_pages=8, num_layers=2, kv_lora_rank=6, qk_rope_head_dim=2, num_shards=3, host_pages=4
    )
    with closing(Rig(geometry, eager=True)) as rig:
        rig.backup(1, (7,), (2,))
        assert rig.answers.get(timeout=10)[1]
        assert [device for device, _ in rig.driver.batches] == [0]
        rig.load(2, (2,), (1,))
        assert rig.answers.get(timeout=10)[1]
        assert sorted(device for device, _ in rig.driver.batches[1:]) == [0, 1, 2]
        whole = rig.device.shards[0].pages
        for pool in rig.device.shards:
            assert (pool.pages[1] == whole[7]).all()


def test_what_goes_with_a_load_is_copied_where_it_is_and_is_there_before_the_first_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Latents leave the card of one shard, states those of all; a load of both goes to all."""
    monkeypatch.setattr(engines, "STEP_BYTES", 1)
    latents = Geometry(4, 8, 2, kv_lora_rank=6, qk_rope_head_dim=2, num_shards=3, host_pages=4)
    states = StateGeometry(4, 2, (StateForm("ssm", (3, 2), "float32"),), num_shards=3, host_pages=3)
    with closing(Rig(latents, states)) as rig:
        rig.engine.submit(
            Transfer(TicketId(1), *BACKUP, packed((7,)), packed((2,)), more=[("r1", packed((3,)), packed((1,)))])
        )
        rig.enqueued(3 + 1)
        for device in range(3):
            rig.driver.run(device)
        assert rig.answers.get(timeout=10) == (1, True, None)
        more = [("r1", packed((1,)), packed((0,)))]
        rig.engine.submit(Transfer(TicketId(2), *LOAD, packed((2,)), packed((1,)), LoadPlace(5, 8), more))
        rig.enqueued(4 + 3 * (1 + 2))
        for device in (0, 1):
            rig.driver.run(device)
        until(lambda: not any(marks for it in rig.engine._devices[:2] for marks in it._marks.values()))
        assert rig.told.empty(), "a state is not on every card yet"
        rig.driver.run(2, 2)  # a batch and its event
        until(lambda: len(rig.engine._devices[2]._marks[LOAD]) == 2)
        assert rig.told.empty()
        rig.driver.run(2)
        assert [rig.told.get(timeout=10) for _ in range(2)] == [(LoadPlace(5, 8), 0, 1), (LoadPlace(5, 8), 1, 2)]
        assert rig.answers.get(timeout=10) == (2, True, None)
        for shard, part in zip(rig.resources[1].device.shards, rig.resources[1].host.shards, strict=True):
            assert (shard.pages[0] == part.pages[1]).all()
            assert (part.pages[1] == shard.pages[3]).all()


def test_a_wrong_copy_fails_alone_and_reaches_no_driver(rig: Rig) -> None:
    rig.driver.eager = True
    rig.backup(1, (0, 99), (0, 1))
    rig.backup(2, (0,), (0,))
    ticket, ok, error = rig.answers.get(timeout=10)
    assert (ticket, ok) == (1, False)
    assert error is not None
    assert "slots 0..99 of a pool of 8 pages" in error.message
    assert rig.answers.get(timeout=10) == (2, True, None)
    assert rig.lost == []


@pytest.mark.parametrize("call", ["copy", "record", "done", "pin", "stream", "use"])
def test_an_error_of_cuda_is_told_once_and_nothing_after_it(geometry: Geometry, call: str) -> None:
    rig = Rig(geometry, broken=call if call in ("stream", "use") else None)  # or before there is anything to be done
    rig.driver.broken = call
    if call == "pin":
        with pytest.raises(CudaError):
            rig.engine.pin(0, 4096)
    else:
        rig.backup(1, (0,), (0,))
    until(lambda: bool(rig.lost))
    (error,) = rig.lost
    assert isinstance(error, CudaError)
    assert error.code == "cuda"
    rig.backup(2, (1,), (1,))
    with pytest.raises(CudaError):
        rig.engine.pin(0, 4096)
    rig.close()
    assert len(rig.lost) == 1
    assert rig.answers.empty()


# -- the calls ------------------------------------------------------------------------------------------------


class Library:
    """In place of libcuda: notes what it is called with, and answers as told."""

    def __init__(self, *missing: str, answers: dict[str, int] | None = None) -> None:
        self.missing = missing
        self.answers = answers or {}
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        if name in self.missing:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            if name == "cuGetErrorName":
                ctypes.cast(arguments[1], ctypes.POINTER(ctypes.c_char_p))[0] = b"CUDA_ERROR_ILLEGAL_ADDRESS"
            return self.answers.get(name, 0)

        return call


WORDS = tuple(np.array(each, np.uint64) for each in ([64, 128], [1 << 40, 7], [16, 32]))


@pytest.mark.parametrize(
    ("missing", "name", "count"),
    [
        ((), "cuMemcpyBatchAsync_v2", 8),
        (("cuMemcpyBatchAsync_v2",), "cuMemcpyBatchAsync", 9),
    ],
)
def test_a_batch_is_three_arrays_and_one_set_of_attributes(missing: tuple[str, ...], name: str, count: int) -> None:
    library = Library(*missing)
    LibCuda(library).copy(*WORDS, 77)
    called, arguments = library.calls[-1]
    assert (called, len(arguments)) == (name, count)
    for argument, words in zip(arguments, WORDS, strict=False):
        assert list((ctypes.c_uint64 * 2).from_address(argument.value)) == words.tolist()
    assert arguments[3].value == 2
    attributes = arguments[4]._obj
    assert (attributes.src_access_order, attributes.flags, ctypes.sizeof(attributes)) == (1, 0, 24)
    assert (arguments[5]._obj.value, arguments[6].value, arguments[-1].value) == (0, 1, 77)


def test_without_a_batched_copy_ranges_are_enqueued_one_by_one() -> None:
    library = Library("cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync")
    LibCuda(library).copy(*WORDS, 77)
    copied = [tuple(each.value for each in arguments) for name, arguments in library.calls if name == "cuMemcpyAsync"]
    assert copied == [(64, 1 << 40, 16, 77), (128, 7, 32, 77)]


def test_an_event_that_is_not_ready_is_no_error() -> None:
    assert LibCuda(Library(answers={"cuEventQuery": cuda_driver.NOT_READY})).done(5) is False
    assert LibCuda(Library()).done(5) is True
    with pytest.raises(
        CudaError, match=r"cuEventQuery: CUDA_ERROR_ILLEGAL_ADDRESS \(700\); this process has lost the card"
    ):
        LibCuda(Library(answers={"cuEventQuery": 700})).done(5)


def test_a_machine_without_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", no)
    with pytest.raises(ConfigError, match=r"libcuda\.so\.1"):
        LibCuda()


def test_a_closed_engine_leaves_no_thread(geometry: Geometry) -> None:
    Rig(geometry).close()
    assert not any(thread.name.startswith("sglcache-cuda") for thread in threading.enumerate())
