"""What SGLang's allocators give, to the last slot, and what this one refuses where they don't."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sglcache.errors import BadRequest, DoubleFree, SglcacheError
from sglcache.memory.allocator import TokenToKVPoolAllocator


def t(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def listed(slots: Tensor | None) -> list[int]:
    assert slots is not None
    assert (slots.dtype, slots.dim()) == (torch.int64, 1)
    return slots.tolist()


def span(start: int, stop: int) -> list[int]:
    return list(range(start, stop))


def lists(allocator: TokenToKVPoolAllocator) -> tuple[list[int], list[int], int]:
    return allocator.free_pages.tolist(), allocator.release_pages.tolist(), allocator.available_size()


# -- SGLang's vectors ---------------------------------------------------------------------------------------


def test_tokens_are_handed_out_first_in_first_out() -> None:
    allocator = TokenToKVPoolAllocator(5)
    assert listed(allocator.alloc(3)) == [1, 2, 3]
    assert allocator.alloc(3) is None
    allocator.free(t(1, 2, 3))
    assert lists(allocator) == ([4, 5, 1, 2, 3], [], 5)


def test_tokens_that_wait_are_sorted_in_when_they_are_needed() -> None:
    allocator = TokenToKVPoolAllocator(5, need_sort=True)
    allocator.alloc(3)
    allocator.free(t(3, 1, 2))
    assert lists(allocator) == ([4, 5], [3, 1, 2], 5)
    assert listed(allocator.alloc(4)) == [1, 2, 3, 4]
    assert lists(allocator) == ([5], [], 1)


def test_pages_are_handed_out_whole() -> None:
    allocator = TokenToKVPoolAllocator(10, 4)
    assert lists(allocator) == ([1, 2], [], 8)
    assert listed(allocator.alloc(8)) == span(4, 12)
    assert allocator.alloc(4) is None
    assert lists(allocator) == ([], [], 0)


def test_an_extend_fills_a_page_then_takes_whole_ones_then_begins_one() -> None:
    allocator = TokenToKVPoolAllocator(40, 4)
    out = allocator.alloc_extend(t(3, 0, 8), t(6, 5, 9), t(6, -1, 23), 9)
    assert listed(out) == [7, 4, 5, 8, 9, 10, 11, 12, 16]
    assert allocator.free_pages[0] == 5


def test_a_decode_begins_a_page_or_goes_on_in_one() -> None:
    allocator = TokenToKVPoolAllocator(40, 4)
    allocator.alloc(16)
    assert listed(allocator.alloc_decode(t(7, 9), t(7, 35))) == [8, 20]
    assert allocator.free_pages.tolist() == [6, 7, 8, 9, 10]


@pytest.mark.parametrize("need_sort", [False, True])
def test_a_group_frees_at_its_end(need_sort: bool) -> None:
    allocator = TokenToKVPoolAllocator(40, 4, need_sort=need_sort)
    allocator.alloc(16)
    allocator.free_group_begin()
    allocator.free(t(12, 13, 14, 15))
    allocator.free_segment(t(4, 5, 6, 7), 0)
    assert allocator.available_size() == 24
    allocator.free_group_end()
    assert allocator.available_size() == 32
    if need_sort:
        assert lists(allocator)[:2] == (span(5, 11), [3, 1])
    else:
        assert lists(allocator)[:2] == ([1, 3, *span(5, 11)], [])


def test_pages_freed_by_slots_go_back_ascending_and_those_of_a_segment_as_they_stand() -> None:
    allocator = TokenToKVPoolAllocator(24, 4)
    allocator.alloc(24)
    allocator.free(t(20, 8, 9, 12))
    assert allocator.free_pages.tolist() == [2, 3, 5]
    allocator.free_segment(t(24, 25, 26, 27, 4, 5), 8)
    assert allocator.free_pages.tolist() == [6, 1, 2, 3, 5]
    allocator.free_page_ids(t(4))
    assert allocator.free_pages.tolist() == [4, 6, 1, 2, 3, 5]


def test_segments_that_share_a_page_give_it_once() -> None:
    allocator = TokenToKVPoolAllocator(24, 4)
    row = listed(allocator.alloc(16))
    allocator.free_segments([(t(*row[:6]), 0), (t(), 6), (t(*row[6:9]), 6), (t(*row[13:]), 13)])
    assert allocator.free_pages.tolist() == [4, 3, 1, 2, 5, 6]  # each segment goes to the head, one after another


@pytest.mark.parametrize("page_size", [1, 4])
def test_clear_is_the_beginning(page_size: int) -> None:
    allocator = TokenToKVPoolAllocator(10, page_size, need_sort=True)
    start = lists(allocator)
    allocator.alloc(8)
    allocator.free(t(page_size))
    allocator.free_group_begin()
    allocator.free(t(2 * page_size))
    allocator.clear()
    assert lists(allocator) == start
    allocator.free_group_begin()  # none is open
    with pytest.raises(DoubleFree):
        allocator.free(t(2 * page_size))


# -- what does not fit ----------------------------------------------------------------------------------------


def test_what_does_not_fit_takes_nothing() -> None:
    allocator = TokenToKVPoolAllocator(16, 4, need_sort=True)
    row = listed(allocator.alloc_extend(t(0), t(7), t(-1), 7))
    other = listed(allocator.alloc(4))
    allocator.free(t(other[0]))
    before = lists(allocator)
    assert before == ([4], [3], 8)
    assert allocator.alloc(12) is None
    assert allocator.alloc_extend(t(7, 0), t(9, 8), t(row[-1], -1), 10) is None
    assert allocator.alloc_decode(t(1, 1, 1), t(-1, -1, -1)) is None
    assert lists(allocator) == before, "not even sorted"
    assert listed(allocator.alloc_extend(t(7, 0), t(8, 8), t(row[-1], -1), 9)) == [11, *span(12, 20)]


def test_only_what_is_needed_must_fit() -> None:
    """SGLang's first check is by an upper bound; a batch that goes on in its pages needs none."""
    allocator = TokenToKVPoolAllocator(8, 4)
    row = listed(allocator.alloc_extend(t(0, 0), t(1, 1), t(-1, -1), 2))
    assert row == [4, 8]
    assert allocator.available_size() == 0
    assert listed(allocator.alloc_extend(t(1, 1), t(4, 3), t(4, 8), 5)) == [5, 6, 7, 9, 10]


def test_a_call_for_nothing_gives_nothing() -> None:
    allocator = TokenToKVPoolAllocator(8, 4)
    assert listed(allocator.alloc(0)) == []
    assert listed(allocator.alloc_extend(t(), t(), t(), 0)) == []
    assert listed(allocator.alloc_extend(t(0, 0), t(0, 0), t(-1, -1), 0)) == []
    assert listed(allocator.alloc_decode(t(), t())) == []
    for call in (allocator.free, allocator.free_page_ids):
        call(t())
        call([])
    allocator.free_segment(t(), 3)
    allocator.free_segments([])
    allocator.free_group_begin()
    allocator.free_group_end()
    assert lists(allocator) == ([1, 2], [], 8)


# -- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(
    ("slots", "named"),
    [
        ([8, 20], [20]),  # freed before
        ([8, 8], [8]),  # here twice
        ([24], [24]),  # never handed out
        ([0], [0]),  # the padding page
        ([-1], [-1]),
        ([4000], [4000]),
        ([-(1 << 62)], [-(1 << 62)]),
    ],
)
def test_a_double_free_is_refused_and_frees_nothing(page_size: int, slots: list[int], named: list[int]) -> None:
    allocator = TokenToKVPoolAllocator(32, page_size)
    allocator.alloc(20)
    allocator.free(t(20))
    before = lists(allocator)
    with pytest.raises(DoubleFree, match="nothing was freed") as caught:
        allocator.free(t(*slots))
    assert (caught.value.slots, caught.value.num_slots) == (named, len(named))
    assert lists(allocator) == before
    allocator.free(t(8))
    assert lists(allocator)[2] == before[2] + page_size


def test_a_double_free_travels_as_itself() -> None:
    error = SglcacheError.from_code("double_free", "twice", {"slots": [3]})
    assert isinstance(error, DoubleFree)
    assert isinstance(error, BadRequest)


def test_an_error_of_many_slots_shows_some() -> None:
    allocator = TokenToKVPoolAllocator(100)
    with pytest.raises(DoubleFree, match=r"\[1, 2, 3, 4, 5, 6, 7, 8\] and 42 more are nobody's"):
        allocator.free(t(*span(1, 51)))


def test_in_a_group_a_slot_is_freed_once_and_a_page_by_any_of_its_slots() -> None:
    allocator = TokenToKVPoolAllocator(16, 4)
    allocator.alloc(12)
    allocator.free_group_begin()
    allocator.free(t(4, 8))
    with pytest.raises(DoubleFree):
        allocator.free(t(12, 8))
    allocator.free(t(9, 12))
    allocator.free_segment(t(13, 14, 15), 1)
    allocator.free_group_end()
    assert lists(allocator) == ([1, 2, 3, 4], [], 16)
    with pytest.raises(DoubleFree):
        allocator.free(t(10))


def test_the_caller_may_reuse_what_it_freed_with() -> None:
    for page_size in (1, 4):
        allocator = TokenToKVPoolAllocator(24, page_size)
        allocator.alloc(24)
        allocator.free_group_begin()
        for call, slots in ((allocator.free, t(4)), (allocator.free_page_ids, t(2)), (allocator.free_segment, t(12))):
            call(slots, *([0] if call == allocator.free_segment else []))
            slots.zero_()
        allocator.free_group_end()
        assert sorted(lists(allocator)[0]) == sorted({4 // page_size, 2, 12 // page_size})


@pytest.mark.parametrize("count", [5, 3, -4, -1])
def test_a_count_that_is_no_number_of_pages_is_refused(count: int) -> None:
    allocator = TokenToKVPoolAllocator(16, 4)
    with pytest.raises(BadRequest, match="whole pages") as caught:
        allocator.alloc(count)
    assert caught.value.need_size == count
    assert lists(allocator)[2] == 16


def test_groups_do_not_nest() -> None:
    allocator = TokenToKVPoolAllocator(16, 4)
    with pytest.raises(BadRequest, match="no free group"):
        allocator.free_group_end()
    allocator.free_group_begin()
    assert "a group is open" in repr(allocator)
    with pytest.raises(BadRequest, match="do not nest"):
        allocator.free_group_begin()
    allocator.free_group_end()
    assert repr(allocator) == "TokenToKVPoolAllocator(16 of 16 slots available, pages of 4)"


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((t(4), t(3), t(7), -1), "longer than the sequence"),
        ((t(-1), t(1), t(6), 2), "below 0"),
        ((t(3), t(5), t(7), 2), "as the end of the prefix does"),
        ((t(0), t(5), t(4), 5), "as the end of the prefix does"),
        ((t(2), t(5), t(9), 3), "nobody's"),  # a page that is free
        ((t(2), t(5), t(1), 3), "nobody's"),  # the padding page
        ((t(2), t(5), t(-3), 3), "nobody's"),
        ((t(2, 2), t(3, 4), t(5, 5), 3), "another's"),
        ((t(2), t(5), t(5), 4), "extend by 3"),
        ((t(2), t(5, 6), t(5), 3), "of 1, 2 and 1 requests"),
    ],
)
def test_an_extend_that_contradicts_itself_is_refused(arguments: Any, match: str) -> None:
    allocator = TokenToKVPoolAllocator(16, 4, strict=True)
    allocator.alloc(4)
    before = lists(allocator)
    with pytest.raises(BadRequest, match=match):
        allocator.alloc_extend(*arguments)
    assert lists(allocator) == before
    assert listed(allocator.alloc_extend(t(2, 2), t(5, 2), t(5, 5), 3)) == [6, 7, 8], (
        "one of them goes on, the other not"
    )


def test_a_page_that_an_open_group_frees_is_not_gone_on_in() -> None:
    allocator = TokenToKVPoolAllocator(16, 4, strict=True)
    row = listed(allocator.alloc_extend(t(0), t(2), t(-1), 2))
    allocator.free_group_begin()
    allocator.free(t(row[0]))
    with pytest.raises(BadRequest, match="nobody's, or freed in the open group"):
        allocator.alloc_decode(t(3), t(row[-1]))


@pytest.mark.parametrize(
    "segments",
    [
        [([4, 5, 6, 7, 8], 1)],  # it begins elsewhere
        [([4, 5, 7, 6], 0)],
        [([4, 5, 6, 11, 8], 0)],  # two pages at one place
        [([6, 7, 4, 5], 2)],  # one page at two
        [([8, 9], 4), ([4, 5, 6, 7], 0)],  # not ascending
        [([4, 5], 0), ([5, 6], 1)],  # one on another
        [([4, 5], 0), ([10, 11], 2)],  # not of one row
    ],
)
def test_what_is_no_part_of_a_row_is_refused(segments: list[tuple[list[int], int]]) -> None:
    allocator = TokenToKVPoolAllocator(16, 4)
    allocator.alloc(12)
    with pytest.raises(BadRequest):
        allocator.free_segments([(t(*slots), start) for slots, start in segments])
    assert lists(allocator) == ([4], [], 4)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: TokenToKVPoolAllocator(0), "hold no page"),
        (lambda: TokenToKVPoolAllocator(3, 4), "hold no page"),
        (lambda: TokenToKVPoolAllocator(3, 0), "hold no page"),
        (lambda: TokenToKVPoolAllocator(8, 4, pages=[1]), "2 pages are needed"),
        (lambda: TokenToKVPoolAllocator(8, 4, pages=[1, 1]), "each once"),
        (lambda: TokenToKVPoolAllocator(8, 4, pages=[1, -1]), "2 pages are needed"),
        (lambda: TokenToKVPoolAllocator(2, pages=torch.tensor([[1, 2]])), "one dimension"),
        (lambda: TokenToKVPoolAllocator(8).free(torch.tensor([1.0])), "float32"),
        (lambda: TokenToKVPoolAllocator(8).free(torch.tensor([True])), "bool"),
        (lambda: TokenToKVPoolAllocator(8).free(torch.tensor(1)), "one dimension"),
    ],
)
def test_what_makes_no_sense_is_a_bad_request(make: Callable[[], object], match: str) -> None:
    with pytest.raises(BadRequest, match=match):
        make()


# -- what goes in and what comes out ----------------------------------------------------------------------------


def test_pages_of_ones_own_may_be_any() -> None:
    """As those of a lease: page 0 is one like another, and the order is theirs."""
    table = np.array([7, 0, 3], np.int32)
    allocator = TokenToKVPoolAllocator(12, 4, pages=table)
    table[:] = 9
    assert listed(allocator.alloc_extend(t(0), t(6), t(-1), 6)) == [28, 29, 30, 31, 0, 1]
    assert listed(allocator.alloc_extend(t(6), t(9), t(1), 3)) == [2, 3, 12]
    allocator.free(t(0, 28))
    with pytest.raises(DoubleFree):
        allocator.free(t(4))  # a page between them
    assert lists(allocator) == ([0, 7], [], 8)
    allocator.clear()
    assert lists(allocator) == ([7, 0, 3], [], 12)


@pytest.mark.parametrize("kind", [torch.int32, torch.int16, torch.uint8, np.int32, list])
def test_slots_may_be_integers_of_any_width(kind: Any) -> None:
    """A row of `req_to_token` is int32."""

    def ints(*values: int) -> Any:
        if kind is list:
            return list(values)
        return torch.tensor(values, dtype=kind) if isinstance(kind, torch.dtype) else np.array(values, kind)

    allocator = TokenToKVPoolAllocator(16, 4)
    assert listed(allocator.alloc_extend(ints(0), ints(6), t(-1), 6)) == span(4, 10)
    assert listed(allocator.alloc_decode(ints(7), ints(9))) == [10]
    allocator.free_segment(ints(*span(4, 8)), 0)
    allocator.free(ints(8, 9))
    assert listed(allocator.alloc(16))[:8] == span(8, 12) + span(4, 8)


def test_what_was_handed_out_does_not_change_later() -> None:
    allocator = TokenToKVPoolAllocator(4)
    out = allocator.alloc(3)
    kept = listed(out)
    for _ in range(5):
        allocator.free(t(*kept))
        kept = listed(allocator.alloc(3))
    assert listed(out) == [1, 2, 3]
    pages = allocator.free_pages
    pages.zero_()
    assert 0 not in allocator.free_pages


def test_inference_mode_makes_no_difference() -> None:
    with torch.inference_mode():
        allocator = TokenToKVPoolAllocator(16, 4, need_sort=True)
        row = listed(allocator.alloc(16))
        allocator.free(t(*row))
        allocator.alloc(4)  # the lists are joined
    allocator.free(t(4))
    allocator.alloc(16)
    with torch.inference_mode():
        allocator.free_segment(t(*row[4:8]), 4)
        allocator.clear()
    assert listed(allocator.alloc(16)) == row


def test_a_step_of_a_large_batch_is_a_handful_of_operations() -> None:
    """No loop over tokens, pages or requests: the number of operations does not depend on how many there are."""

    class Counter(torch.overrides.TorchFunctionMode):
        count = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    def operations(batch: int, length: int) -> int:
        allocator = TokenToKVPoolAllocator(1 << 16, 4)
        zeros, lens = torch.zeros(batch, dtype=torch.int64), torch.full((batch,), length)
        with Counter() as counter:
            out = allocator.alloc_extend(zeros, lens, zeros - 1, batch * length)
            assert out is not None
            last = out.view(batch, length)[:, -1]
            more = allocator.alloc_decode(lens + 1, last)
            assert more is not None
            allocator.free(torch.cat([out, more]))
            whole = allocator.alloc(batch * length)
            assert whole is not None
            allocator.free_segment(whole, 0)
        return counter.count

    assert operations(2, 8) == operations(128, 256)


@pytest.mark.gpu
def test_slots_come_out_where_the_pool_is() -> None:
    allocator = TokenToKVPoolAllocator(40, 4, device="cuda", need_sort=True)
    out = allocator.alloc_extend(t(0, 0), t(6, 3), t(-1, -1), 9)
    assert out is not None
    assert out.device.type == "cuda"
    assert listed(out) == [*span(4, 10), 12, 13, 14]
    assert listed(allocator.alloc_decode(t(7), out[5:6])) == [10]
    allocator.free_segments([(out[:6], 0)])
    allocator.free(out[6:].cpu())
    with pytest.raises(DoubleFree):
        allocator.free(out[:1])
    assert listed(allocator.alloc(40)) == span(4, 44)


@pytest.mark.parametrize("count", [16.0, np.float32(16), torch.tensor(16.0), "16", None, True])
def test_what_is_no_count_is_refused_and_takes_nothing(count: Any) -> None:
    allocator = TokenToKVPoolAllocator(1024, 16)
    before = allocator.free_pages.tolist()
    for refused in (
        lambda: allocator.alloc(count),
        lambda: allocator.alloc_extend([0], [16], [-1], count),
        lambda: TokenToKVPoolAllocator(count),
        lambda: TokenToKVPoolAllocator(1024, count),
        lambda: allocator.free_segment([16], count),
    ):
        with pytest.raises(BadRequest, match="is no integer"):
            refused()
    assert (allocator.available_size(), allocator.free_pages.tolist()) == (1024, before)


@pytest.mark.parametrize("count", [np.int32(16), np.uint64(16), torch.tensor(16)])
def test_a_count_may_be_any_integer(count: Any) -> None:
    allocator = TokenToKVPoolAllocator(1024, 16)
    first, second = allocator.alloc(count), allocator.alloc_extend([0], [16], [-1], count)
    assert first is not None
    assert second is not None
    assert (first.tolist(), second.tolist()) == (list(range(16, 32)), list(range(32, 48)))


@pytest.mark.parametrize("slots", [None, [2**70], [None], "16", [[16], [17, 18]], object()])
def test_slots_that_are_no_integers_are_refused_and_nothing_changes(slots: Any) -> None:
    allocator = TokenToKVPoolAllocator(1024, 16)
    allocator.alloc(32)
    before = allocator.free_pages.tolist()
    for refused in (
        lambda: allocator.free(slots),
        lambda: allocator.free_page_ids(slots),
        lambda: allocator.free_segment(slots, 0),
        lambda: allocator.alloc_extend(slots, [16], [-1], 16),
        lambda: allocator.alloc_extend([0], slots, [-1], 16),
        lambda: allocator.alloc_extend([0], [16], slots, 16),
        lambda: allocator.alloc_decode(slots, [-1]),
        lambda: TokenToKVPoolAllocator(16, 16, pages=[slots]),
    ):
        with pytest.raises(BadRequest):
            refused()
    assert (allocator.available_size(), allocator.free_pages.tolist()) == (992, before)


@pytest.mark.parametrize(("prefix", "seq"), [(2**63 - 17, 2**63 - 1), (0, 2**31), (-(2**63), 2**62)])
def test_lengths_that_overflow_are_refused_and_take_nothing(prefix: int, seq: int) -> None:
    allocator = TokenToKVPoolAllocator(1024, 16)
    with pytest.raises(BadRequest, match="of 1 requests 1 have a"):
        allocator.alloc_extend([prefix], [seq], [-1], 16)
    assert allocator.available_size() == 1024
