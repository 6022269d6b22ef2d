"""The allocator against its model, in any program; and bugs planted in it, each of which the programs must notice."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from sglcache.memory import allocator
from sglcache.memory.allocator import TokenToKVPoolAllocator
from sglcache.testing.allocator import AllocatorMachine, run
from sglcache.testing.planting import plant

NUM_PROGRAMS = 150  # most bugs are caught by the first few

SETTINGS = settings(
    max_examples=60,
    stateful_step_count=40,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.timeout(300)
def test_any_program_under_hypothesis() -> None:
    run_state_machine_as_test(AllocatorMachine, settings=SETTINGS)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("need_sort", [False, True])
def test_any_seeded_program(page_size: int, need_sort: bool) -> None:
    for seed in range(40):
        run(seed, page_size=page_size, need_sort=need_sort)


class Bug(NamedTuple):
    name: str
    method: str
    old: str
    new: str
    owner: Any = TokenToKVPoolAllocator


JOIN = """\
if num_pages > len(self._free):
            ids = torch.cat([self._free.ids(), *self._staged]).sort().values
            self._free, self._staged, self._num_staged = _PageRing(ids, self.num_pages), [], 0
        return """

BUGS = [
    # -- freeing
    Bug("a double free goes unnoticed", "_name", "[self._known(pages)] == FREE", "[self._known(pages)] > GOING"),
    Bug("what is no page is taken for one", "_known", "pages > self._limit", "pages < 0"),
    Bug("a slot may be named twice in a call", "_name", "(self._named[slots] != now) | ", ""),
    Bug("a slot may be named twice in a group", "_name", "(before >= ", "(before > (1 << 60) + "),
    Bug("a refused free counts as one in its group", "_name", "self._named[slots] = before", "pass"),
    Bug("the clock stands still", "_name", "self._clock += len(slots)", "pass"),
    Bug("what is freed stays taken", "_give", "self._state[pages] = FREE", "pass"),
    Bug("pages go back as their slots stand", "free", "_distinct(pages)", "pages"),
    Bug("pages go to the end", "_give", "self._free.prepend(pages)", "self._free.append(pages)"),
    Bug("tokens go to the head", "_give", "self._free.append(pages)", "self._free.prepend(pages)"),
    Bug("what is freed does not wait", "_give", "if self.need_sort:", "if False:"),
    Bug("what waits is not counted", "_give", "self._num_staged += len(pages)", "pass"),
    # -- groups
    Bug("a group frees at once", "_let_go", "if self._group is None:", "if True:"),
    Bug("a group frees a page twice", "_let_go", "pages = pages[self._state[pages] == TAKEN]", "pages = pages.clone()"),
    Bug("a group does not mark its pages", "_let_go", "self._state[pages] = GOING", "pass"),
    Bug("a group holds on to the caller's ids", "free_page_ids", ".clone()", ""),
    Bug("a group's pages go back unsorted", "free_group_end", "pages.sort().values", "pages"),
    Bug("a group's tokens are sorted", "free_group_end", "pages if self.page_size == 1 else ", ""),
    Bug("a group forgets its segments", "free_group_end", "if group.in_order:", "if False:"),
    Bug("a group sorts its segments, too", "_let_go", "if in_order and self.page_size > 1", "if False"),
    Bug("a group takes tokens of segments for segments", "_let_go", "in_order and self.page_size > 1", "in_order"),
    Bug("groups nest", "free_group_begin", "self._group is not None", "False"),
    Bug("a group remembers the last one", "free_group_begin", "_Group(self._clock)", "_Group(0)"),
    # -- segments
    Bug("a segment may lie anywhere", "free_segments", "bool(torch.cat(wrong).any()) or ", ""),
    Bug("a row may have a page twice", "free_segments", " or len(_distinct(pages)) != len(pages)", ""),
    Bug("segments may descend", "free_segments", "if start < end:", "if False:"),
    Bug("a page between segments goes twice", "free_segments", "if end and start // size == (end - 1) // size", "if 0"),
    Bug("it goes with neither", "free_segments", "last_page, pages = pages[-1:], pages[1:]", "pages = pages[:0]"),
    Bug("segments go as one", "free_segments", "for pages in page_lists:", "for pages in [pages]:"),
    Bug("a first page is left behind", "free_segments", "slots[:1], ", "slots[:0], "),
    # -- handing out
    Bug("a count is rounded down", "alloc", "rest or ", ""),
    Bug("a count may be negative", "alloc", " or need_size < 0", ""),
    Bug("one page is always kept", "_fits", "<=", "<"),
    Bug("what waits can't be had", "_fits", " + self._num_staged", ""),
    Bug("what waits is not available", "available_size", " + self._num_staged", ""),
    Bug("what is joined is not sorted", "_take", ".sort().values", ""),
    Bug("what is joined waits on", "_take", "self._staged, self._num_staged = [], 0", "pass"),
    Bug("the lists are joined each time", "_take", "if num_pages > len(self._free):", "if self._num_staged:"),
    Bug("what is handed out stays free", "_take", "self._state[pages] = TAKEN", "pass"),
    Bug("the lists are joined for what does not fit", "_fits", "return ", JOIN),
    # -- extending
    Bug("a full page is gone on in", "alloc_extend", "ordinals < had[which]", "ordinals <= had[which]"),
    Bug("a page more than needed", "alloc_extend", 'rounding_mode="floor") - had', 'rounding_mode="floor") - had + 1'),
    Bug("requests get each other's pages", "alloc_extend", "new.cumsum(0) - new + count", "0 * new + count"),
    Bug("a page is gone on in from its start", "alloc_extend", "last + 1 - prefix", "last - last % size"),
    Bug("lengths are not looked at", "alloc_extend", "((prefix < 0) | (seq < prefix)).sum()", "0 * new.sum()"),
    Bug("nobody is strict", "alloc_extend", "if self.strict:", "if False:"),
    Bug("a last slot may lie anywhere", "_wrong_ends", "% self.page_size != 0).sum()", "% self.page_size > 99).sum()"),
    Bug("a page may be anybody's", "_wrong_ends", "!= TAKEN", "> GOING"),
    Bug("a freed page is gone on in", "_wrong_ends", "!= TAKEN", "== FREE"),
    Bug("two may go on in one page", "_wrong_ends", "(entered[1:] == entered[:-1])", "(entered[1:] < entered[:-1])"),
    Bug("who stands still counts", "_wrong_ends", " & (seq > prefix)", ""),
    Bug("a decode is of the next token", "alloc_decode", "seq - 1, seq,", "seq, seq + 1,"),
    # -- the beginning
    Bug("clear leaves what waits", "clear", "_staged: list[Tensor] = []", "_staged = self.__dict__.get('_staged', [])"),
    Bug("clear leaves what is taken", "clear", "self._state.zero_()", "pass"),
    Bug("clear leaves the group", "clear", ": _Group | None = None", " = self.__dict__.get('_group')"),
    # -- the ring
    Bug("the ring gives out too little", "take", "self._head += count", "self._head += count - 1", allocator._PageRing),
    Bug("the ring's head does not move back", "prepend", "self._head -= len(pages)", "pass", allocator._PageRing),
    Bug("the ring appends at its head", "append", "self._head + self._count", "self._head", allocator._PageRing),
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_planted_bug_is_caught(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, bug.owner, bug.method, bug.old, bug.new)
    for seed in range(NUM_PROGRAMS):
        try:
            run(seed)
        except Exception:
            return
    pytest.fail(f"{NUM_PROGRAMS} programs did not notice that {bug.name}")
