"""The pattern notices what a cache could get wrong with a page."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from sglcache.bench.pattern import Pattern, Shape

TOKENS = np.arange(1000, 1080, dtype=np.uint32)
SLOTS = np.array([7, 2, 5, 0, 3], dtype=np.int32)


def pool(shape: Shape) -> npt.NDArray[np.uint8]:
    return np.zeros((8, shape.page_bytes), dtype=np.uint8)


@pytest.fixture
def pattern() -> Pattern:
    shape = Shape(page_size=16, num_layers=3, row_bytes=24)
    written = Pattern(pool(shape), shape)
    written.write(SLOTS, TOKENS, 0, 80)
    return written


def test_what_was_written_is_found_again_in_any_pieces(pattern: Pattern) -> None:
    assert pattern.check(SLOTS, TOKENS, 0, 80) is None
    assert pattern.check(SLOTS, TOKENS, 5, 61) is None
    before = pattern.pool.copy()
    for start, stop in ((0, 1), (1, 33), (33, 80)):
        pattern.write(SLOTS, TOKENS, start, stop)
    assert (pattern.pool == before).all()


def test_a_page_of_another_slot_is_noticed(pattern: Pattern) -> None:
    swapped = SLOTS.copy()
    swapped[[1, 2]] = swapped[[2, 1]]
    wrong = pattern.check(swapped, TOKENS, 0, 80)
    assert wrong is not None
    assert (wrong.position, wrong.slot) == (16, 5)


def test_the_same_tokens_at_another_position_are_noticed(pattern: Pattern) -> None:
    wrong = pattern.check(SLOTS[1:], TOKENS[16:], 0, 16)
    assert wrong is not None
    assert wrong.position == 0


def test_another_token_is_noticed(pattern: Pattern) -> None:
    other = TOKENS.copy()
    other[40] += 1
    wrong = pattern.check(SLOTS, other, 0, 80)
    assert wrong is not None
    assert (wrong.position, wrong.token) == (40, 1041)


def test_one_changed_byte_is_noticed_with_its_layer_and_part(pattern: Pattern) -> None:
    pages = pattern.pool.view(np.uint8).reshape(8, 2, 3, 16, 24)
    pages[SLOTS[3], 1, 2, 9, 23] ^= 1
    wrong = pattern.check(SLOTS, TOKENS, 0, 80)
    assert wrong is not None
    assert wrong == (3 * 16 + 9, 1057, 0, 2, "v")


def test_layers_k_and_v_and_shards_all_differ(pattern: Pattern) -> None:
    planes = pattern.values(TOKENS, 0).reshape(80, 6, -1)
    assert len(np.unique(planes[0], axis=0)) == 6
    other = Pattern(pool(pattern.shape), pattern.shape._replace(shard=1))
    assert not (other.values(TOKENS, 0) == pattern.values(TOKENS, 0)).all(axis=-1).any()


@pytest.mark.parametrize("row_bytes", [1, 2, 6, 64])
def test_any_row_will_do(row_bytes: int) -> None:
    shape = Shape(page_size=4, num_layers=1, row_bytes=row_bytes)
    pattern = Pattern(pool(shape), shape)
    slots = np.arange(8, dtype=np.int32)
    pattern.write(slots, TOKENS, 0, 32)
    assert pattern.check(slots, TOKENS, 0, 32) is None
    assert pattern.check(slots, TOKENS + np.uint32(1), 0, 32) is not None
