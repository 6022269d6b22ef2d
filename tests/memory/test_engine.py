from __future__ import annotations

import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_facts import mapped

from sglcache.errors import ClosedError, TransferError
from sglcache.memory import copier as copier_module
from sglcache.memory.copier import Copier
from sglcache.memory.geometry import Geometry, Placement
from sglcache.memory.pools import DevicePools, HostPools, Pool
from sglcache.units import TicketId

Answer = tuple[TicketId, bool, TransferError | None]
Make = Callable[[str, int, int], Pool]
ONE, TWO, THREE = TicketId(1), TicketId(2), TicketId(3)


def packed(*slots: int) -> bytes:
    return array("i", slots).tobytes()


def fill(pool: Pool) -> torch.Tensor:
    """Random bytes into every page; a copy of them."""
    pool.pages.random_(0, 256)
    return pool.pages.clone()


@pytest.fixture
def answers() -> SimpleQueue[Answer]:
    return SimpleQueue()


@pytest.fixture
def copier(answers: SimpleQueue[Answer]) -> Iterator[Copier]:
    copier = Copier(lambda ticket, ok, error: answers.put((ticket, ok, error)))
    yield copier
    copier.close()


@pytest.fixture
def pool() -> Iterator[Make]:
    made: list[Pool] = []

    def make(name: str, num_pages: int, page_bytes: int) -> Pool:
        made.append(Pool(name, Placement.whole(num_pages, page_bytes)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_copy_is_done_when_every_shard_has_the_bytes(
    geometry: Geometry, copier: Copier, answers: SimpleQueue[Answer]
) -> None:
    device, host = DevicePools(geometry), HostPools(geometry)
    sources = [fill(pool) for pool in device.shards]
    copier.submit(ONE, device.shards, host.shards, packed(7, 0, 3), packed(1, 5, 2))
    assert answers.get() == (ONE, True, None)
    for source, pool in zip(sources, host.shards, strict=True):
        expected = torch.zeros_like(pool.pages)
        expected[[1, 5, 2]] = source[[7, 0, 3]]
        assert torch.equal(pool.pages, expected)
    device.close()
    host.close()


@settings(deadline=None)  # a loaded machine may take its time
@given(data=st.data(), page_bytes=st.sampled_from([1, 4, 24, 64]), staging=st.sampled_from([1, 64, 100, 4096]))
def test_copies_move_what_they_name_and_nothing_else(data: st.DataObject, page_bytes: int, staging: int) -> None:
    num_pages = 10
    slots = st.permutations(range(num_pages))
    moves = data.draw(st.lists(st.tuples(slots, slots, st.integers(0, num_pages)), max_size=4))
    a, b = Pool("a", Placement.whole(num_pages, page_bytes)), Pool("b", Placement.whole(num_pages, page_bytes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copier_module, "STAGING_BYTES", staging)
        model = [fill(a), fill(b)]
        answers: list[Answer] = []
        copier = Copier(lambda *answer: answers.append(answer))
        for number, (src, dst, count) in enumerate(moves):  # there and back in turn
            pair = (a, b) if number % 2 == 0 else (b, a)
            copier.submit(TicketId(number), pair[:1], pair[1:], packed(*src[:count]), packed(*dst[:count]))
            model[1 - number % 2][dst[:count]] = model[number % 2][src[:count]]
        copier.close()
        assert answers == [(number, True, None) for number in range(len(moves))]
        assert torch.equal(a.pages, model[0])
        assert torch.equal(b.pages, model[1])
    a.close()
    b.close()


def test_a_page_larger_than_the_buffer_is_copied_whole(
    copier: Copier, answers: SimpleQueue[Answer], pool: Make
) -> None:
    a, b = pool("a", 2, copier_module.STAGING_BYTES + 7), pool("b", 2, copier_module.STAGING_BYTES + 7)
    source = fill(a)
    copier.submit(ONE, [a], [b], packed(1, 0), packed(0, 1))
    assert answers.get() == (ONE, True, None)
    assert torch.equal(b.pages, source[[1, 0]])


@pytest.mark.parametrize(
    ("src", "dst", "why"),
    [
        ((0, 9), (0, 1), "slots 0..9 of a pool of 4 pages"),
        ((0, 1), (0, -1), "slots -1..0"),
        ((0, 1), (0,), "2 source slots, 1 target"),
    ],
)
def test_a_wrong_copy_fails_alone_and_touches_nothing(
    copier: Copier,
    answers: SimpleQueue[Answer],
    pool: Make,
    src: tuple[int, ...],
    dst: tuple[int, ...],
    why: str,
) -> None:
    a, b = pool("a", 4, 8), pool("b", 4, 8)
    source = fill(a)
    copier.submit(ONE, [a], [b], packed(*src), packed(*dst))
    copier.submit(TWO, [a], [b], packed(2), packed(3))
    ticket, ok, error = answers.get()
    assert (ticket, ok) == (ONE, False)
    assert isinstance(error, TransferError)
    assert why in error.message
    assert error.ticket == ONE
    assert error.__cause__ is not None
    assert answers.get() == (TWO, True, None)
    assert not b.pages[:3].any()
    assert torch.equal(b.pages[3], source[2])


def test_pools_that_do_not_match_fail(copier: Copier, answers: SimpleQueue[Answer], pool: Make) -> None:
    a, b, c = pool("a", 4, 8), pool("b", 4, 16), pool("c", 4, 8)
    copier.submit(ONE, [a], [b], packed(0), packed(0))
    copier.submit(TWO, [a], [c, c], packed(0), packed(0))
    c.close()
    copier.submit(THREE, [a], [c], packed(0), packed(0))
    assert [answers.get()[:2] for _ in range(3)] == [(ONE, False), (TWO, False), (THREE, False)]


def test_closing_finishes_what_is_queued_and_joins(pool: Make) -> None:
    a, b = pool("a", 4, 8), pool("b", 4, 8)
    answers: list[Answer] = []
    copier = Copier(lambda *answer: answers.append(answer))
    for number in range(50):
        copier.submit(TicketId(number), [a], [b], packed(0), packed(1))
    copier.close()
    copier.close()
    assert [ticket for ticket, *_ in answers] == list(range(50))
    assert not any(thread.name == "sglcache-copier" for thread in threading.enumerate())
    with pytest.raises(ClosedError):
        copier.submit(ONE, [a], [b], packed(0), packed(1))


def test_closing_without_finishing_drops_what_has_not_begun(pool: Make) -> None:
    a, b = pool("a", 4, 8), pool("b", 4, 8)
    source = fill(a)
    begun, go = threading.Event(), threading.Event()
    answers: list[Answer] = []

    def done(*answer: object) -> None:
        answers.append(answer)  # type: ignore[arg-type]
        begun.set()
        go.wait()

    copier = Copier(done)
    copier.submit(ONE, [a], [b], packed(0), packed(0))
    copier.submit(TWO, [a], [b], packed(1), packed(1))
    begun.wait()
    closer = threading.Thread(target=copier.close, kwargs={"finish": False})
    closer.start()
    while not copier._closed:
        copier.submit(THREE, [a], [b], b"", b"")
    go.set()
    closer.join()
    assert [ticket for ticket, *_ in answers] == [ONE]
    assert torch.equal(b.pages[0], source[0])
    assert not b.pages[1].any()


def test_an_idle_copier_keeps_no_pool_mapped(copier: Copier, answers: SimpleQueue[Answer]) -> None:
    a, b = Pool("test-idle-a", Placement.whole(4, 8)), Pool("test-idle-b", Placement.whole(4, 8))
    for number, slots in enumerate((packed(0), packed(9))):  # one goes well, one does not
        copier.submit(TicketId(number), [a], [b], slots, packed(1))
        answers.get()
    a.close()
    b.close()
    del a, b
    deadline = time.monotonic() + 5  # the thread may still be on its way from `done` to the queue
    while mapped("test-idle-a") + mapped("test-idle-b") and time.monotonic() < deadline:
        pass
    assert mapped("test-idle-a") == mapped("test-idle-b") == 0


@pytest.mark.parametrize("operation", ["take", "get", "put"])
def test_numpy_lets_go_of_the_lock_while_pages_move(pool: Make, operation: str) -> None:
    """The loop's thread turns while the copier is inside a numpy call: law 2 counts on it."""
    index = np.arange(8, dtype=np.int32)
    pools = (pool(name, 8, 1 << 20) for name in "ab")
    src, dst = (it.rows(it.placement.page()) for it in pools)
    strided = np.ndarray(8, "V1048575", src.data, 1, src.strides)
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
            if operation == "take":
                np.take(src, index, out=dst, mode="clip")
            elif operation == "get":
                strided[index]
            else:
                dst[index] = src
            if turned.is_set():
                break
        seen = turned.is_set()
    finally:
        sys.setswitchinterval(interval)
    loop.join()
    assert seen
