"""The pattern notices what a cache could get wrong with a page."""

from __future__ import annotations

import numpy as np
import pytest

from sglcache.bench.pattern import Bytes, Pattern, StatePattern

TOKENS = np.arange(1000, 1080, dtype=np.uint32)
SLOTS = np.array([7, 2, 5, 0, 3], dtype=np.int32)


def planes(page_size: int = 16, num_layers: int = 3, rows: tuple[int, ...] = (24, 24)) -> list[list[Bytes]]:
    """Of eight pages, in one buffer, a page after the other: as a runner maps them."""
    buffer = np.zeros((8, num_layers, page_size * sum(rows)), np.uint8)
    ends = np.cumsum([page_size * row for row in rows])
    return [
        [
            buffer[:, layer, end - page_size * row : end].reshape(8, page_size, row)
            for row, end in zip(rows, ends, strict=True)
        ]
        for layer in range(num_layers)
    ]


@pytest.fixture
def pages() -> list[list[Bytes]]:
    return planes()


@pytest.fixture
def pattern(pages: list[list[Bytes]]) -> Pattern:
    written = Pattern(pages)
    written.write(SLOTS, TOKENS, 0, 80)
    return written


def test_what_was_written_is_found_again_in_any_pieces(pattern: Pattern, pages: list[list[Bytes]]) -> None:
    assert pattern.check(SLOTS, TOKENS, 0, 80) is None
    assert pattern.check(SLOTS, TOKENS, 5, 61) is None
    before = np.array(pages)
    for start, stop in ((0, 1), (1, 33), (33, 80)):
        pattern.write(SLOTS, TOKENS, start, stop)
    assert (np.array(pages) == before).all()


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


def test_one_changed_byte_is_noticed_with_its_layer_and_plane(pattern: Pattern, pages: list[list[Bytes]]) -> None:
    pages[2][1][SLOTS[3], 9, 23] ^= 1
    assert pattern.check(SLOTS, TOKENS, 0, 80) == (3 * 16 + 9, 1057, 0, 2, 1)
    pages[1][0][SLOTS[3], 9, 0] ^= 1
    assert pattern.check(SLOTS, TOKENS, 0, 80) == (3 * 16 + 9, 1057, 0, 1, 0), "the first layer that is wrong"


def test_layers_k_and_v_and_parts_all_differ(pattern: Pattern, pages: list[list[Bytes]]) -> None:
    page = np.array(pages)[:, :, SLOTS[0]].reshape(6, -1)
    assert len(np.unique(page, axis=0)) == 6
    other = planes()
    Pattern(other, part=1).write(SLOTS, TOKENS, 0, 80)
    assert not (np.array(other) == np.array(pages))[:, :, SLOTS].all(axis=-1).any()


@pytest.mark.parametrize("rows", [(1,), (2, 1), (6, 4), (64,), (3, 64)])
def test_any_rows_will_do(rows: tuple[int, ...]) -> None:
    pattern = Pattern(planes(4, 2, rows))
    slots = np.arange(8, dtype=np.int32)
    pattern.write(slots, TOKENS, 0, 32)
    assert pattern.check(slots, TOKENS, 0, 32) is None
    assert pattern.check(slots, TOKENS + np.uint32(1), 0, 32) is not None


# -- states ------------------------------------------------------------------------------------------------


def arrays(num_layers: int = 3, sizes: tuple[int, ...] = (30, 64)) -> list[list[Bytes]]:
    """Of eight slots, in one buffer, a slot after the other: as a runner maps them."""
    buffer = np.zeros((8, num_layers, sum(sizes)), np.uint8)
    ends = np.cumsum(sizes)
    return [
        [buffer[:, layer, end - size : end] for size, end in zip(sizes, ends, strict=True)]
        for layer in range(num_layers)
    ]


def test_a_state_is_of_all_the_tokens_before_it_and_of_its_slot_alone() -> None:
    slots = arrays()
    pattern = StatePattern(slots)
    pattern.write(5, TOKENS)
    assert pattern.check(5, TOKENS) is None
    assert pattern.check(4, TOKENS) is not None
    for other in (TOKENS[:-1], TOKENS[1:], TOKENS[::-1]):
        assert pattern.check(5, other) is not None
    pattern.write(4, TOKENS[:-1])
    assert pattern.check(5, TOKENS) is None, "another slot was written"


def test_one_changed_byte_of_a_state_is_noticed_with_its_layer_and_array() -> None:
    slots = arrays()
    pattern = StatePattern(slots)
    pattern.write(5, TOKENS)
    slots[2][1][5, 63] ^= 1
    assert pattern.check(5, TOKENS) == (2, 1, 63)
    slots[2][0][5, 29] ^= 1
    assert pattern.check(5, TOKENS) == (2, 0, 29), "the first array that is wrong"


def test_layers_arrays_and_parts_of_states_all_differ() -> None:
    slots, other = arrays(sizes=(32, 32)), arrays(sizes=(32, 32))
    StatePattern(slots).write(5, TOKENS)
    StatePattern(other, part=1).write(5, TOKENS)
    rows = [array[5].tobytes() for layer in (*slots, *other) for array in layer]
    assert len(set(rows)) == len(rows) == 12
