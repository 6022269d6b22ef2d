from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglcache.errors import BadRequest, DoubleFree
from sglcache.memory.rows import ReqToTokenPool, token_slots


def t(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def table(*pages: int) -> Any:
    return np.array(pages, np.int32)  # as lease.slots


@pytest.fixture
def rows() -> ReqToTokenPool:
    """Two requests: row 3 has pages 7 and 2, of which 7 is the cache's; row 2 has page 5."""
    rows = ReqToTokenPool(3, 15, 4, padding_slot=36)
    assert rows.alloc(2) == [2, 3]
    rows.write_table(3, table(7, 2), 4)
    rows.write_table(2, table(5))
    return rows


def test_a_page_table_as_token_slots() -> None:
    slots = token_slots(table(7, 0, 2), 4)
    assert (slots.dtype, slots.tolist()) == (torch.int64, [28, 29, 30, 31, 0, 1, 2, 3, 8, 9, 10, 11])
    assert token_slots(table(7, 0, 2), 4, 3, 9).tolist() == [31, 0, 1, 2, 3, 8]
    assert token_slots(table(7, 0), 1).tolist() == [7, 0]
    assert token_slots(table(), 4).tolist() == []
    assert token_slots(table(2**31 - 1), 4, 3).tolist() == [2**33 - 1], "int64 before it is multiplied"
    for span in ((-1, 3), (3, 2), (0, 13)):
        with pytest.raises(BadRequest):
            token_slots(table(7, 0, 2), 4, *span)


def test_rows_are_int32_with_padding_where_there_is_no_page(rows: ReqToTokenPool) -> None:
    assert (rows.req_to_token.dtype, rows.req_to_token.shape) == (torch.int32, (4, 16))
    assert rows.req_to_token[3].tolist() == [28, 29, 30, 31, 8, 9, 10, 11, *[36] * 8]
    assert rows.req_to_token[[0, 1]].eq(36).all()
    rows.write_table(3, table(1))
    assert rows.req_to_token[3].tolist() == [4, 5, 6, 7, *[36] * 12]
    with pytest.raises(BadRequest, match="the cache's"):
        rows.alloc_decode(t(3), t(4))  # what was protected is, until it is said otherwise
    rows.write_table(3, table(1), 3)
    assert rows.alloc_decode(t(3), t(4)) is not None
    rows.free(3)
    assert rows.req_to_token[3].eq(36).all()


def test_extend_and_decode_read_off_where_the_next_positions_lie(rows: ReqToTokenPool) -> None:
    out = rows.alloc_extend(t(3, 2), t(4, 0), t(6, 3), 5)
    assert out is not None
    assert (out.dtype, out.tolist()) == (torch.int64, [8, 9, 20, 21, 22])
    decoded = rows.alloc_decode([3, 2], [7, 4])
    assert decoded is not None
    assert decoded.tolist() == [10, 23]
    assert rows.last_loc(t(3, 2), t(5, 0)).tolist() == [8, -1]
    assert rows.alloc_extend(t(), t(), t(), 0) is not None


def test_without_a_page_the_answer_is_none_for_all(rows: ReqToTokenPool) -> None:
    assert rows.alloc_decode(t(3, 2), t(8, 5)) is None
    assert (rows.room(3), rows.room(2)) == (8, 4)
    rows.write_table(2, table(5, 9))
    decoded = rows.alloc_decode(t(3, 2), t(8, 5))
    assert decoded is not None
    assert decoded.tolist() == [11, 36]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((t(3), t(3), t(6), 3), "the cache's"),
        ((t(1), t(0), t(1), 1), "nobody's"),
        ((t(0), t(0), t(1), 1), "nobody's"),
        ((t(-1), t(0), t(1), 1), "nobody's"),
        ((t(4), t(0), t(1), 1), "nobody's"),
        ((t(3), t(6), t(5), -1), "longer than the sequence"),
        ((t(2), t(-1), t(2), 3), "below 0"),
        ((t(3), t(4), t(6), 3), "extend by 2"),
        ((t(3, 2), t(4), t(6), 2), "of 2, 1 and 1 requests"),
    ],
)
def test_what_contradicts_itself_or_writes_the_caches_pages_is_refused(
    rows: ReqToTokenPool, arguments: Any, match: str
) -> None:
    with pytest.raises(BadRequest, match=match):
        rows.alloc_extend(*arguments)
    assert rows.alloc_extend(t(3), t(2), t(2), 0) is not None, "nothing is written by this"


def test_rows_are_taken_whole_and_given_back_once(rows: ReqToTokenPool) -> None:
    assert repr(rows) == "ReqToTokenPool(1 of 3 rows free, 16 tokens each)"
    assert rows.alloc(2) is None
    assert rows.available_size() == 1
    for wrong in ([3, 3], [2, 1], 0, 4, -1):
        with pytest.raises(DoubleFree, match="nothing was freed"):
            rows.free(wrong)
    assert rows.available_size() == 1
    rows.free([2, 3])
    assert rows.available_size() == 3
    with pytest.raises(DoubleFree):
        rows.free(3)
    with pytest.raises(BadRequest, match="nobody's"):
        rows.room(3)
    assert rows.alloc() == [3]
    assert rows.room(3) == 0
    assert rows.alloc(0) == []
    with pytest.raises(BadRequest):
        rows.alloc(-1)


def test_a_table_that_does_not_fit_is_not_written(rows: ReqToTokenPool) -> None:
    before = rows.req_to_token.clone()
    for wrong in ((3, table(1, 2, 3, 4, 5), 0), (3, table(1), 5), (3, table(1), -1), (3, table(1 << 29), 0)):
        with pytest.raises(BadRequest):
            rows.write_table(*wrong)
    with pytest.raises(BadRequest, match="nobody's"):
        rows.write_table(1, table(1))
    assert torch.equal(rows.req_to_token, before)
    for wrong_size in ((0, 4, 4), (1, 0, 4), (1, 4, 0)):
        with pytest.raises(BadRequest):
            ReqToTokenPool(*wrong_size)


def test_rows_made_in_inference_mode_are_written_outside() -> None:
    with torch.inference_mode():
        rows = ReqToTokenPool(2, 8, 4)
    assert rows.alloc(1) == [2]
    rows.write_table(2, table(1))
    rows.free(2)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_any_batch_reads_what_its_tables_say(data: st.DataObject) -> None:
    page_size = data.draw(st.sampled_from([1, 2, 4]))
    count = data.draw(st.integers(1, 5))
    rows = ReqToTokenPool(count, 8 * page_size, page_size)
    tables = {row: data.draw(st.lists(st.integers(0, 99), max_size=8)) for row in rows.alloc(count) or ()}
    starts = {}
    for row, pages in tables.items():
        starts[row] = data.draw(st.integers(0, len(pages) * page_size))
        rows.write_table(row, table(*pages), starts[row])
    batch = data.draw(st.lists(st.sampled_from(sorted(tables)), max_size=6))
    prefix, seq, expected, fits = [], [], [], True
    for row in batch:
        start = data.draw(st.integers(starts[row], 8 * page_size))
        stop = data.draw(st.integers(start, 8 * page_size + 1))
        prefix.append(start)
        seq.append(stop)
        fits = fits and stop <= len(tables[row]) * page_size
        if fits:
            expected += [tables[row][p // page_size] * page_size + p % page_size for p in range(start, stop)]
    out = rows.alloc_extend(batch, prefix, seq, sum(seq) - sum(prefix))
    assert (None if out is None else out.tolist()) == (expected if fits else None)
