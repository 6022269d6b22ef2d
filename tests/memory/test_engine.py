from __future__ import annotations

import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from forms import Resource, draw_slots, hybrids
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_facts import mapped

from sglcache.errors import ClosedError, TransferError
from sglcache.memory import cpu_engine
from sglcache.memory import engine as engines
from sglcache.memory.cpu_engine import CpuEngine, Part, copy_rows, plan
from sglcache.memory.engine import BACKUP, LOAD, LoadPlace, Transfer, Way, ways_of
from sglcache.memory.geometry import Form, Geometry, Placement, StateGeometry
from sglcache.memory.pools import DevicePools, HostPools, Pool
from sglcache.testing.daemon import until
from sglcache.units import TicketId, Tier
from sglcache.wire.control import StateForm

Answer = tuple[TicketId, bool, TransferError | None]
Told = tuple[LoadPlace, int, int]
ONE, TWO, THREE = TicketId(1), TicketId(2), TicketId(3)


def packed(*slots: int) -> bytes:
    return array("i", slots).tobytes()


def backup(ticket: int, src: Sequence[int], dst: Sequence[int]) -> Transfer:
    return Transfer(TicketId(ticket), Tier.DEVICE, Tier.HOST, packed(*src), packed(*dst))


def load(ticket: int, src: Sequence[int], dst: Sequence[int], place: LoadPlace | None = None) -> Transfer:
    return Transfer(TicketId(ticket), Tier.HOST, Tier.DEVICE, packed(*src), packed(*dst), place)


def fill(pool: Pool, seed: int = 0) -> np.ndarray:
    """Random bytes into every page; a copy of them."""
    pool.buffer[:] = np.random.default_rng(seed).integers(0, 256, pool.num_bytes, np.uint8)
    return pool.buffer.copy()


class Rig:
    """An engine between pools, and what it told."""

    def __init__(self, device: Sequence[Pool], host: Sequence[Pool], num_threads: int = 1) -> None:
        self.answers: SimpleQueue[Answer] = SimpleQueue()
        self.told: SimpleQueue[Told] = SimpleQueue()
        ways = [Way(BACKUP, list(zip(device, host, strict=True))), Way(LOAD, list(zip(host, device, strict=True)))]
        self.engine = CpuEngine(
            ways,
            lambda *answer: self.answers.put(answer),
            lambda *told: self.told.put(told),
            num_threads=num_threads,
        )

    def do(self, *transfers: Transfer) -> list[Answer]:
        for transfer in transfers:
            self.engine.submit(transfer)
        return [self.answers.get(timeout=10) for _ in transfers]


class Gate:
    """In place of `cpu_engine.move`: pieces wait until they are let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open: dict[str, threading.Semaphore] = {"backup": threading.Semaphore(0), "load": threading.Semaphore(0)}
        self.waiting = 0
        self.error: Exception | None = None
        self._move = cpu_engine.move
        monkeypatch.setattr(cpu_engine, "move", self)

    def __call__(self, way: Way, *rest: object) -> object:
        self.waiting += 1
        assert self.open[way.name].acquire(timeout=30)
        if self.error is not None:
            raise self.error
        return self._move(way, *rest)  # type: ignore[arg-type]


@pytest.fixture
def pools() -> Iterator[Callable[..., list[Pool]]]:
    """Makes pools of so many pages of so many bytes, two by default."""
    made: list[Pool] = []

    def make(num_pages: int, page_bytes: int, count: int = 2) -> list[Pool]:
        new = [Pool(f"test-{len(made)}", Placement.whole(num_pages, page_bytes)) for _ in range(count)]
        made.extend(new)
        return new

    yield make
    for each in made:
        each.close()


@pytest.fixture
def rig(pools: Callable[..., list[Pool]]) -> Iterator[tuple[Rig, Pool, Pool]]:
    """An engine between two pools of four pages."""
    a, b = pools(4, 8)
    rig = Rig([a], [b])
    yield rig, a, b
    rig.engine.close()


# -- bytes ----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)  # a loaded machine may take its time
@given(
    forms=hybrids(),
    num_threads=st.sampled_from([1, 3]),
    step=st.sampled_from([1, 200, 1 << 20]),
    piece=st.sampled_from([1, 100, 1 << 20]),
    call=st.sampled_from([0, 16, 1 << 20]),
    staging=st.sampled_from([1, 100, 4096]),
    data=st.data(),
)
def test_a_copy_moves_what_it_names_and_nothing_else_however_it_is_cut(
    forms: list[Form], num_threads: int, step: int, piece: int, call: int, staging: int, data: st.DataObject
) -> None:
    slots = [draw_slots(data, form) for form in forms]
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        for name, value in (("PIECE_BYTES", piece), ("SPLIT_BYTES", piece), ("CALL_BYTES", call)):
            patch.setattr(cpu_engine, name, value)
        patch.setattr(cpu_engine, "STAGING_BYTES", staging)
        patch.setattr(engines, "STEP_BYTES", step)
        resources = [
            stack.enter_context(closing(Resource(form, f"r{number}", number))) for number, form in enumerate(forms)
        ]
        answers: list[Answer] = []
        told: list[Told] = []
        there_first: list[bool] = []
        for src, dst in (BACKUP, LOAD):
            expected = [each.expected(src, dst, mine) for each, mine in zip(resources, slots, strict=True)]

            def hear(*each: Any, dst: Tier = dst, expected: list[Any] = expected) -> None:
                told.append(each)
                others = zip(resources[1:], expected[1:], strict=True)
                there_first.append(all(resource.is_as(dst, found) for resource, found in others))

            engine = CpuEngine(
                [way for it in resources for way in ways_of(it.form, it.device.shards, it.host.shards, it.name)],
                lambda *answer: answers.append(answer),
                hear,
                num_threads=num_threads,
            )
            place = LoadPlace(3, 7) if dst is Tier.DEVICE else None
            first, *more = ((packed(*mine[src]), packed(*mine[dst])) for mine in slots)
            parts = [(it.name, *each) for it, each in zip(resources[1:], more, strict=True)]
            engine.submit(Transfer(ONE, src, dst, *first, place, parts))
            assert engine.close(timeout_s=30)
            assert all(it.is_as(dst, found) for it, found in zip(resources, expected, strict=True))
            (lane,) = (lane for lane in engine.stats() if lane.copies)
            assert lane.pages == len(slots[0][dst])
            assert lane.bytes == sum(
                len(mine[dst]) * it.form.page_bytes * len(it.form.pairs(src, dst))
                for it, mine in zip(resources, slots, strict=True)
            )
        assert answers == [(ONE, True, None)] * 2
        # Every layer once, in order, and one where there are none; what else goes with the load was there before.
        assert [place for place, _, _ in told] == [LoadPlace(3, 7)] * len(told)
        layers = list(range(max(1, forms[0].num_layers)))
        assert [layer for _, first, stop in told for layer in range(first, stop)] == layers
        assert all(there_first)


@given(
    pairs=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, unique_by=lambda pair: pair[1]),
    page_bytes=st.sampled_from([1, 1000, 1 << 14, 1 << 16, 1 << 21]),
)
def test_a_plan_has_every_pair_once_in_runs_that_go_up_by_one(pairs: list[tuple[int, int]], page_bytes: int) -> None:
    src, dst = (np.array(side, np.int32) for side in zip(*pairs, strict=True))
    how = plan(src, dst, page_bytes)
    assert sorted(zip(how.src.tolist(), how.dst.tolist(), strict=True)) == sorted(pairs)
    assert [page for first, stop in how.runs for page in range(first, stop)] == list(range(len(pairs)))
    for first, stop in how.runs:
        assert np.array_equal(how.src[first:stop], how.src[first] + np.arange(stop - first)) or how.staged
        if not how.scatter and not how.staged:
            assert np.array_equal(how.dst[first:stop], how.dst[first] + np.arange(stop - first))


def test_a_plan_takes_what_moves_bytes_once_with_the_fewest_calls() -> None:
    up, down = np.arange(64, dtype=np.int32), np.arange(64, dtype=np.int32)[::-1].copy()
    apart = np.arange(64, dtype=np.int32) * 2
    assert plan(down, down, 100).runs == [(0, 64)]
    assert not plan(down, down, 100).scatter
    assert plan(up, down, 4096).scatter
    assert plan(up, down, 4096).runs == [(0, 64)]
    assert plan(apart, down, 4096).staged
    large = plan(apart, down, 1 << 21)  # a call for each is nothing beside so many bytes
    assert (large.scatter, large.staged, len(large.runs)) == (False, False, 64)


def test_a_page_larger_than_the_buffer_is_copied_whole(
    pools: Callable[..., list[Pool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_engine, "CALL_BYTES", 1 << 40)  # so that all is staged
    a, b = pools(4, cpu_engine.STAGING_BYTES + 7)
    source = fill(a).reshape(4, -1)
    rig = Rig([a], [b])
    assert rig.do(backup(1, (3, 0), (0, 2))) == [(ONE, True, None)]
    target = b.buffer.reshape(4, -1)
    assert np.array_equal(target[[0, 2]], source[[3, 0]])
    assert not target[[1, 3]].any()
    rig.engine.close()


# -- order ----------------------------------------------------------------------------------------------------


def test_a_copy_that_is_held_delays_no_copy_of_the_other_direction(
    rig: tuple[Rig, Pool, Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, (one, _, _) = Gate(monkeypatch), rig
    one.engine.submit(backup(1, (0,), (0,)))
    gate.open["load"].release()
    assert one.do(load(2, (1,), (1,))) == [(TWO, True, None)]
    gate.open["backup"].release()
    assert one.answers.get(timeout=10) == (ONE, True, None)


def test_copies_of_a_direction_are_told_of_in_the_order_of_submission(
    pools: Callable[..., list[Pool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = [threading.Event() for _ in range(4)]
    move = cpu_engine.move

    def held(way: Way, layers: tuple[int, int], part: Part, staging: np.ndarray) -> np.ndarray:
        assert gates[part.src[0]].wait(30)
        return move(way, layers, part, staging)

    monkeypatch.setattr(cpu_engine, "move", held)
    a, b = pools(4, 8)
    source = fill(a).reshape(4, -1)
    rig = Rig([a], [b], num_threads=2)
    for number in range(4):
        rig.engine.submit(backup(number, (number,), (number,)))
    for number in (1, 2, 3):  # beside the first, on the other thread
        gates[number].set()
    until(lambda: bool((b.buffer.reshape(4, -1)[1:] == source[1:]).all()))
    assert rig.answers.empty()
    gates[0].set()
    assert [rig.answers.get(timeout=10)[0] for _ in range(4)] == [0, 1, 2, 3]
    rig.engine.close()


def test_a_load_is_told_of_layer_by_layer_as_each_is_there_for_every_shard(
    monkeypatch: pytest.MonkeyPatch, geometry: Geometry
) -> None:
    monkeypatch.setattr(engines, "STEP_BYTES", 1)
    gate = Gate(monkeypatch)
    device, host = DevicePools(geometry), HostPools(geometry)
    for pool in host.shards:
        fill(pool)
    answers: SimpleQueue[Answer] = SimpleQueue()
    told: SimpleQueue[Told] = SimpleQueue()
    engine = CpuEngine(
        ways_of(geometry, device.shards, host.shards), lambda *it: answers.put(it), lambda *it: told.put(it)
    )
    engine.submit(load(1, (5, 2), (0, 7), LoadPlace(4, 9)))
    for layer in range(geometry.num_layers):
        assert told.empty()
        gate.open["load"].release()
        assert told.get(timeout=10) == (LoadPlace(4, 9), layer, layer + 1)
        for shard, pool in zip(device.shards, host.shards, strict=True):
            for each in range(geometry.num_layers):
                there = [
                    np.array_equal(
                        shard.rows(shard.placement.layers[each][plane])[[0, 7]],
                        pool.rows(pool.placement.layers[each][plane])[[5, 2]],
                    )
                    for plane in range(2)
                ]
                assert there == [each <= layer] * 2
    assert answers.get(timeout=10) == (ONE, True, None)
    engine.close()
    device.close()
    host.close()


def test_small_layers_share_a_step_and_large_ones_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    device, host = Placement.of("page_first", 4, 6, [1 << 10] * 2), Placement.of("layer_first", 4, 6, [1 << 10] * 2)

    class Memory:
        def __init__(self, placement: Placement) -> None:
            self.placement = placement

    way = Way(LOAD, [(Memory(host), Memory(device))])
    assert way.page_bytes == 6 << 11
    assert way.steps(1) == [(0, 6)]
    monkeypatch.setattr(engines, "STEP_BYTES", 4 << 12)
    assert way.steps(2) == [(0, 4), (4, 6)]
    assert way.steps(8) == [(layer, layer + 1) for layer in range(6)]


def test_what_goes_with_a_load_is_there_before_its_first_layer_is_told(
    monkeypatch: pytest.MonkeyPatch, geometry: Geometry
) -> None:
    monkeypatch.setattr(engines, "STEP_BYTES", 1)
    move, held, moved = cpu_engine.move, threading.Semaphore(0), []

    def slow(way: Way, layers: tuple[int, int], part: Part, staging: np.ndarray) -> np.ndarray:
        if way.resource == "mamba":
            assert held.acquire(timeout=30)
        try:
            return move(way, layers, part, staging)
        finally:
            moved.append(way.resource)

    monkeypatch.setattr(cpu_engine, "move", slow)
    state = StateGeometry(4, 2, (StateForm("ssm", (2, 3), "float32"),), num_shards=2, host_pages=3)
    with closing(Resource(geometry, "full", 1)) as full, closing(Resource(state, "mamba", 2)) as mamba:
        answers: SimpleQueue[Answer] = SimpleQueue()
        told: SimpleQueue[Told] = SimpleQueue()
        ways = [way for it in (full, mamba) for way in ways_of(it.form, it.device.shards, it.host.shards, it.name)]
        engine = CpuEngine(ways, lambda *it: answers.put(it), lambda *it: told.put(it), num_threads=2)
        expected = mamba.expected(*LOAD, {Tier.DEVICE: [3], Tier.HOST: [1]})
        engine.submit(load(1, (5,), (0,), LoadPlace(0, 1))._replace(more=[("mamba", packed(1), packed(3))]))
        until(lambda: len(moved) == geometry.num_layers)
        assert moved == ["full"] * geometry.num_layers, "the layers are there before the state"
        assert told.empty()
        held.release()
        assert answers.get(timeout=10) == (ONE, True, None)
        assert mamba.is_as(Tier.DEVICE, expected)
        assert [told.get_nowait() for _ in range(3)] == [(LoadPlace(0, 1), layer, layer + 1) for layer in range(3)]
        # A state alone, of a prompt whose pages are all on the device.
        engine.submit(load(2, (), (), LoadPlace(0, 2))._replace(more=[("mamba", packed(0), packed(1))]))
        held.release()
        assert answers.get(timeout=10) == (TWO, True, None)
        assert told.get_nowait() == (LoadPlace(0, 2), 0, 3)
        assert engine.close()


def test_a_load_of_nothing_is_told_before_its_end_whatever_ends_meanwhile(
    monkeypatch: pytest.MonkeyPatch, geometry: Geometry
) -> None:
    """Else its load slot would be another's by the time that it is written."""
    gate, over = Gate(monkeypatch), engines.Lane.over
    events: list[tuple[str, int]] = []

    def slow(lane: engines.Lane, flight: engines.Flight, step: int | None, error: Exception | None = None) -> None:
        if step is None:  # the load of nothing was cut: now the copy before it ends, on the other thread
            gate.open["load"].release()
            until(lambda: ("done", 1) in events)
        over(lane, flight, step, error)

    monkeypatch.setattr(engines.Lane, "over", slow)
    with closing(Resource(replace(geometry, num_layers=0), "full", 1)) as full:
        state = StateGeometry(4, 2, (StateForm("ssm", (2, 3), "float32"),), num_shards=2, host_pages=3)
        with closing(Resource(state, "mamba", 2)) as mamba:
            ways = [way for it in (full, mamba) for way in ways_of(it.form, it.device.shards, it.host.shards, it.name)]
            engine = CpuEngine(
                ways,
                lambda ticket, ok, error: events.append(("done", ticket)),
                lambda place, first, stop: events.append(("loaded", place.generation)),
                num_threads=2,
            )
            engine.submit(load(1, (0,), (0,), LoadPlace(0, 1))._replace(more=[("mamba", packed(0), packed(1))]))
            until(lambda: gate.waiting == 1)
            engine.submit(load(2, (1,), (1,), LoadPlace(1, 2)))
            until(lambda: ("done", 2) in events)
            assert events == [("loaded", 1), ("done", 1), ("loaded", 2), ("done", 2)]
            assert engine.close()


def test_a_part_that_fails_fails_the_copy_and_no_layer_is_told(geometry: Geometry) -> None:
    state = StateGeometry(4, 2, (StateForm("ssm", (2, 3), "float32"),), num_shards=2, host_pages=3)
    with closing(Resource(geometry, "full", 1)) as full, closing(Resource(state, "mamba", 2)) as mamba:
        answers: SimpleQueue[Answer] = SimpleQueue()
        told: SimpleQueue[Told] = SimpleQueue()
        ways = [way for it in (full, mamba) for way in ways_of(it.form, it.device.shards, it.host.shards, it.name)]
        engine = CpuEngine(ways, lambda *it: answers.put(it), lambda *it: told.put(it))
        engine.submit(load(1, (5,), (0,), LoadPlace(0, 1))._replace(more=[("mamba", packed(3), packed(3))]))
        ticket, ok, error = answers.get(timeout=10)
        assert (ticket, ok, error is not None and "slots 3..3 of a pool of 3" in error.message) == (ONE, False, True)
        assert told.empty()
        assert engine.close()


# -- failures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("src", "dst", "why"),
    [
        ((0, 9), (0, 1), "slots 0..9 of a pool of 4 pages"),
        ((0, 1), (0, -1), "slots -1..0"),
        ((0, 1), (0,), "2 source slots, 1 target"),
    ],
)
def test_a_wrong_copy_fails_alone_and_touches_nothing(
    rig: tuple[Rig, Pool, Pool], src: tuple[int, ...], dst: tuple[int, ...], why: str
) -> None:
    one, a, b = rig
    source = fill(a).reshape(4, -1)
    first, second = one.do(backup(1, src, dst), backup(2, (2,), (3,)))
    ticket, ok, error = first
    assert (ticket, ok) == (ONE, False)
    assert isinstance(error, TransferError)
    assert why in error.message
    assert error.ticket == ONE
    assert error.__cause__ is not None
    assert second == (TWO, True, None)
    target = b.buffer.reshape(4, -1)
    assert not target[:3].any()
    assert np.array_equal(target[3], source[2])
    stats = one.engine.stats()[0]
    assert (stats.copies, stats.pages, stats.bytes, stats.failed, stats.in_flight) == (1, 1, 8, 1, 0)


def test_pools_that_do_not_match_make_no_way(pools: Callable[..., list[Pool]]) -> None:
    (a,), (b,) = pools(4, 8, 1), pools(4, 16, 1)
    with pytest.raises(ValueError, match="pages of 8 bytes to pages of 16"):
        Way(BACKUP, [(a, b)])


def test_a_copy_between_pools_that_are_closed_fails(rig: tuple[Rig, Pool, Pool]) -> None:
    one, _, b = rig
    b.close()
    ((ticket, ok, error),) = one.do(backup(1, (0,), (0,)))
    assert (ticket, ok) == (ONE, False)
    assert error is not None
    assert isinstance(error.__cause__, ClosedError)


def test_a_load_that_fails_tells_of_no_layer_after_it_and_ends_once(
    monkeypatch: pytest.MonkeyPatch, geometry: Geometry
) -> None:
    monkeypatch.setattr(engines, "STEP_BYTES", 1)
    gate = Gate(monkeypatch)
    device, host = DevicePools(geometry), HostPools(geometry)
    answers: SimpleQueue[Answer] = SimpleQueue()
    told: SimpleQueue[Told] = SimpleQueue()
    ways = ways_of(geometry, device.shards, host.shards)
    engine = CpuEngine(ways, lambda *it: answers.put(it), lambda *it: told.put(it))
    engine.submit(load(1, (0,), (0,), LoadPlace(0, 1)))
    gate.open["load"].release()
    assert told.get(timeout=10) == (LoadPlace(0, 1), 0, 1)
    gate.error = MemoryError("planted")
    gate.open["load"].release(10)
    ticket, ok, error = answers.get(timeout=10)
    assert (ticket, ok, error is not None and "planted" in error.message) == (ONE, False, True)
    assert told.empty()
    assert engine.close(timeout_s=10)
    assert answers.empty()
    device.close()
    host.close()


# -- accounts -------------------------------------------------------------------------------------------------


def test_the_accounts_say_what_was_copied_and_how_old_the_oldest_copy_is(
    rig: tuple[Rig, Pool, Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, (one, _, _) = Gate(monkeypatch), rig
    one.engine.submit(backup(1, (0, 1), (0, 1)))
    one.engine.submit(backup(2, (2,), (2,)))
    until(lambda: one.engine.stats()[0].oldest_s > 0.01)
    there, back = one.engine.stats()
    assert (there.name, there.in_flight, there.copies, there.bytes) == ("backup", 2, 0, 0)
    assert there.seconds >= there.oldest_s > 0.01
    assert (back.name, back.in_flight, back.oldest_s, back.seconds) == ("load", 0, 0.0, 0.0)
    gate.open["backup"].release(2)
    one.answers.get(timeout=10)
    one.answers.get(timeout=10)
    there = one.engine.stats()[0]
    assert (there.in_flight, there.copies, there.pages, there.bytes, there.oldest_s) == (0, 2, 3, 24, 0.0)
    assert one.engine.stats()[0].seconds == there.seconds, "and stands still while nothing is copied"


# -- the end --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [1, 3])
def test_closing_finishes_what_is_queued_and_joins(pools: Callable[..., list[Pool]], num_threads: int) -> None:
    a, b = pools(4, 8)
    rig = Rig([a], [b], num_threads)
    for number in range(50):
        rig.engine.submit(backup(number, (0,), (1,)))
    assert rig.engine.close()
    assert rig.engine.close()
    assert [rig.answers.get(timeout=10)[0] for _ in range(50)] == list(range(50))
    assert not any(thread.name.startswith("sglcache-") for thread in threading.enumerate())
    with pytest.raises(ClosedError):
        rig.engine.submit(backup(1, (0,), (1,)))


def test_closing_without_finishing_drops_what_has_not_begun(
    rig: tuple[Rig, Pool, Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, (one, a, b) = Gate(monkeypatch), rig
    source = fill(a).reshape(4, -1)
    one.engine.submit(backup(1, (0,), (0,)))
    one.engine.submit(backup(2, (1,), (1,)))
    until(lambda: gate.waiting == 1)
    ended: list[bool] = []
    closer = threading.Thread(target=lambda: ended.append(one.engine.close(finish=False, timeout_s=30)))
    closer.start()
    until(lambda: one.engine.lanes[BACKUP].dropped)
    gate.open["backup"].release(2)
    closer.join()
    assert ended == [True]
    target = b.buffer.reshape(4, -1)
    assert np.array_equal(target[0], source[0])
    assert not target[1].any()
    assert one.answers.empty(), "nobody is there to be told"


def test_a_close_does_not_wait_for_a_copy_that_hangs_beyond_its_time(
    rig: tuple[Rig, Pool, Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, (one, _, _) = Gate(monkeypatch), rig
    one.engine.submit(backup(1, (0,), (0,)))
    until(lambda: gate.waiting == 1)
    assert one.engine.close(timeout_s=0.01) is False
    assert one.engine.stats()[0].in_flight == 1
    gate.open["backup"].release()
    assert one.engine.close(timeout_s=30) is True
    assert one.answers.empty(), "what ends after the time is not told of"


def test_an_idle_engine_keeps_no_pool_mapped() -> None:
    a, b = (Pool(f"test-idle-{name}", Placement.whole(4, 8)) for name in "ab")
    rig = Rig([a], [b])
    rig.do(backup(1, (0,), (1,)), backup(2, (9,), (1,)))  # one goes well, one does not
    a.close()
    b.close()
    deadline = time.monotonic() + 5  # the thread may still be on its way from `done` to the queue
    while mapped("test-idle-a") + mapped("test-idle-b") and time.monotonic() < deadline:
        pass
    assert mapped("test-idle-a") == mapped("test-idle-b") == 0
    rig.engine.close()


@pytest.mark.parametrize("way", ["runs", "scatter", "staged"])
def test_numpy_lets_go_of_the_lock_while_pages_move(pools: Callable[..., list[Pool]], way: str) -> None:
    """The loop's thread turns while a copy thread is inside a numpy call: law 2 counts on it."""
    a, b = pools(8, 1 << 20)
    up, other = np.arange(8, dtype=np.int32), np.array([5, 0, 3, 7, 1, 6, 2, 4], np.int32)
    how = plan(up, up if way == "runs" else other, 1 << 20)._replace(scatter=way == "scatter", staged=way == "staged")
    src, dst = (it.rows(it.placement.page()) for it in (a, b))
    staging = np.empty(1 << 21, np.uint8)
    turned, asleep = threading.Event(), threading.Event()

    def turn() -> None:
        asleep.set()
        started.wait()
        turned.set()

    started = threading.Event()
    loop = threading.Thread(target=turn)
    interval = sys.getswitchinterval()
    loop.start()
    asleep.wait()
    try:
        sys.setswitchinterval(1000)  # now only who lets go of the lock by itself lets others run
        started.set()
        for _ in range(1000):
            copy_rows(src, dst, how, staging)
            if turned.is_set():
                break
        seen = turned.is_set()
    finally:
        sys.setswitchinterval(interval)
    loop.join()
    assert seen


def test_an_engine_without_a_host_tier_has_no_thread() -> None:
    geometry = Geometry(page_size=4, num_pages=8, num_layers=2, num_kv_heads=2, head_dim=3)
    device, host = DevicePools(geometry), HostPools(geometry)
    before = threading.active_count()
    engine = CpuEngine(ways_of(geometry, device.shards, host.shards), print, print)
    assert threading.active_count() == before
    assert engine.stats() == []
    assert engine.close()
    device.close()
    host.close()


def test_pages_are_torch_tensors_for_who_asks(pools: Callable[..., list[Pool]]) -> None:
    (a,) = pools(4, 8, 1)
    assert a.pages.shape == (4, 8)
    a.pages[2] = 7
    assert torch.equal(a.pages[2], torch.full((8,), 7, dtype=torch.uint8))
    assert a.buffer[16:24].tolist() == [7] * 8
