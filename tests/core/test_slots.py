"""The free list: every number is somewhere exactly once, whatever was taken and given, in pieces or whole."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sglcache.core import slots
from sglcache.core.slots import SlotPool


def numbers(*runs: bytes) -> list[int]:
    return np.frombuffer(b"".join(runs), "<i4").tolist()


def test_a_new_pool_is_free() -> None:
    pool = SlotPool(5)
    assert (pool.total, pool.free, pool.fenced, pool.leased, pool.cached, pool.locked) == (5, 5, 0, 0, 0, 0)
    assert sorted(numbers(pool.free_slots())) == [0, 1, 2, 3, 4]


def test_taking_more_than_is_free_takes_nothing() -> None:
    pool = SlotPool(3)
    pool.take(2)
    with pytest.raises(AssertionError):
        pool.take(2)
    assert pool.free == 1
    assert len(numbers(pool.free_slots())) == 1


def test_taking_none_gives_nothing() -> None:
    pool = SlotPool(3)
    assert numbers(pool.take(0)) == []
    assert pool.free == 3


def test_the_warmest_slots_are_taken_first() -> None:
    """What came back last was used last, and is handed on before what was never touched."""
    pool = SlotPool(10)
    first = pool.take(4)
    pool.give(first)
    assert sorted(numbers(pool.take(4))) == sorted(numbers(first))


@pytest.mark.parametrize("crumb", [0, 8, 64, 1 << 20])
@pytest.mark.parametrize("seed", range(8))
def test_no_slot_is_lost_or_doubled(seed: int, crumb: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "CRUMB_BYTES", crumb)
    rng = random.Random(seed)
    pool = SlotPool(300)
    held: list[bytes] = []
    for _ in range(300):
        if held and rng.random() < 0.5:
            run = held.pop(rng.randrange(len(held)))
            cut = rng.randrange(len(run) // 4 + 1) * 4  # given back in two parts, as splits do
            pool.give(run[:cut])
            pool.give(run[cut:])
        else:
            count = rng.randrange(min(pool.free, 90) + 1)
            run = pool.take(count)
            assert len(run) == 4 * count
            held.append(run)
        assert pool.free == len(pool.free_slots()) // 4
        assert sorted(numbers(*held, pool.free_slots())) == list(range(300))
