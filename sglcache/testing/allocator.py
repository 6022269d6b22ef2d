"""Random programs over a token-to-KV allocator, and what they must come to by a model with nothing clever in it.

The model is a set of slots and two lists, moved a token at a time. It says of every call what is returned, what is
refused, and how the lists stand after it; of a refused one, that nothing has changed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from sglcache.errors import BadRequest, DoubleFree
from sglcache.memory.allocator import TokenToKVPoolAllocator
from sglcache.testing.machine import DrawnChooser
from sglcache.testing.programs import Chooser, SeededChooser


class Refused(Exception):
    """The model would not do that; nothing was changed."""


class AllocatorModel:
    """What an allocator must do. `taken` are the slots of all pages that are not free."""

    def __init__(self, page_size: int, pages: Sequence[int], need_sort: bool = False, strict: bool = True) -> None:
        self.page_size = page_size
        self.pages = list(pages)
        self.need_sort = need_sort
        self.strict = strict
        self.clear()

    def clear(self) -> None:
        self.free_pages = list(self.pages)
        self.release_pages: list[int] = []
        self.taken: set[int] = set()
        self._no_group()

    def _no_group(self) -> None:
        self.in_group = False
        self.named: set[int] = set()  # slots
        self.loose: list[int] = []  # pages that were freed by slots
        self.in_order: list[int] = []  # and those that were freed by segments or ids

    def free_group_begin(self) -> None:
        if self.in_group:
            raise Refused
        self.in_group = True

    def free_group_end(self) -> None:
        if not self.in_group:
            raise Refused
        loose, in_order = self.loose, self.in_order
        self._no_group()
        self._give(sorted(loose) if self.page_size > 1 else loose)
        self._give(in_order)

    def slots(self, page: int) -> list[int]:
        return [page * self.page_size + offset for offset in range(self.page_size)]

    def available_size(self) -> int:
        return (len(self.free_pages) + len(self.release_pages)) * self.page_size

    def _need(self, count: int) -> bool:
        if count > len(self.free_pages) + len(self.release_pages):
            return False
        if count > len(self.free_pages):
            self.free_pages = sorted(self.free_pages + self.release_pages)
            self.release_pages = []
        return True

    def _take(self) -> int:
        page = self.free_pages.pop(0)
        self.taken |= set(self.slots(page))
        return page

    def alloc(self, count: int) -> list[int] | None:
        if count < 0 or count % self.page_size:
            raise Refused
        if not self._need(count // self.page_size):
            return None
        return [slot for _ in range(count // self.page_size) for slot in self.slots(self._take())]

    def alloc_extend(self, prefix: list[int], seq: list[int], last: list[int]) -> list[int] | None:
        size, entered, need = self.page_size, set(), 0
        for start, stop, slot in zip(prefix, seq, last, strict=True):
            if not 0 <= start <= stop or (self.strict and (slot + 1 - start) % size):
                raise Refused
            if self.strict and start % size and stop > start:
                page = slot // size
                if page in self.loose + self.in_order or slot not in self.taken or page in entered:
                    raise Refused
                entered.add(page)
            need += len({position // size for position in range(start, stop)} - {(start - 1) // size if start else -1})
        if not self._need(need):
            return None
        out = []
        for start, stop, slot in zip(prefix, seq, last, strict=True):
            for position in range(start, stop):
                slot = self._take() * size if position % size == 0 else slot + 1
                out.append(slot)
        return out

    def alloc_decode(self, seq: list[int], last: list[int]) -> list[int] | None:
        return self.alloc_extend([length - 1 for length in seq], seq, last)

    def free_page_ids(self, pages: list[int]) -> None:
        self.free([slot for page in pages for slot in self.slots(page)], list(pages))

    def free(self, slots: list[int], in_order: list[int] | None = None) -> None:
        """`in_order`: the pages of these slots, when they go back as they stand."""
        if len(set(slots)) < len(slots) or not set(slots) <= self.taken - self.named:
            raise Refused
        pages = [slot // self.page_size for slot in slots]
        if self.page_size > 1:
            pages = sorted(set(pages)) if in_order is None else in_order
        if not self.in_group:
            self._give(pages)
            return
        self.named |= set(slots)
        going = self.loose + self.in_order
        where = self.loose if in_order is None or self.page_size == 1 else self.in_order
        where += [page for page in pages if page not in going]

    def _give(self, pages: list[int]) -> None:
        for page in pages:
            self.taken -= set(self.slots(page))
        if self.need_sort:
            self.release_pages += pages
        elif self.page_size == 1:
            self.free_pages += pages
        else:
            self.free_pages = pages + self.free_pages

    def free_segments(self, segments: list[tuple[list[int], int]]) -> None:
        size = self.page_size
        row: dict[int, int] = {}  # the page at each page's place
        lists: list[list[int]] = []
        end = 0
        for slots, start in segments:
            if not slots:
                continue
            if start < end:
                raise Refused
            end = start + len(slots)
            lists.append([])
            for position, slot in enumerate(slots, start):
                if position // size not in row:
                    row[position // size] = slot // size
                    lists[-1].append(slot // size)
                if slot != row[position // size] * size + position % size:
                    raise Refused
        if len(set(row.values())) < len(row):
            raise Refused
        named = [slot for slots, _ in segments for slot in slots]
        if self.page_size == 1 or self.in_group:
            self.free(named, [page for pages in lists for page in pages])
            return
        if not set(named) <= self.taken:
            raise Refused
        for pages in lists:
            self._give(pages)


class Twin(Protocol):
    """Another allocator that must do the same, where nothing is refused."""

    @property
    def whole_segments(self) -> bool:
        """A segment may begin only where a page does."""
        ...

    def do(self, call: str, *arguments: Any) -> list[int] | None: ...

    def free_pages(self) -> list[int]: ...


class AllocatorProgram:
    """An allocator, its model, and requests that take and give slots; some of what they do is wrong."""

    def __init__(self, choose: Chooser, twin: Callable[[int, int], Twin] | None = None, **fixed: Any) -> None:
        """`twin`: made by size and page size. `fixed`: page_size, num_pages, need_sort, own_pages, strict."""
        drawn = {
            "page_size": choose.item((1, 4, 2, 16)),
            "num_pages": choose.integer(1, 12),
            "need_sort": choose.integer(0, 2) == 2,
            "own_pages": choose.integer(0, 3) == 3,
            "strict": choose.integer(0, 3) < 3,
            **fixed,
        }
        self.page_size = drawn["page_size"]
        count = drawn["num_pages"]
        size = count * self.page_size + choose.integer(0, self.page_size - 1)
        pages = list(range(1, count + 1))
        if drawn["own_pages"]:
            pages = random.Random(choose.integer(0, 99)).sample(range(2 * count), count)
        options = {name: drawn[name] for name in ("need_sort", "strict")}
        own = pages if drawn["own_pages"] else None
        self.real = TokenToKVPoolAllocator(size, self.page_size, pages=own, **options)
        self.model = AllocatorModel(self.page_size, pages, **options)
        self.twin = twin(size, self.page_size) if twin else None
        self.rows: list[list[int]] = []  # a request's slots, by position
        self.gone: list[int] = []  # slots that were somebody's
        self.actions: tuple[tuple[int, Callable[[Chooser], object]], ...] = (
            (4, self.admit),
            (6, self.extend),
            (6, self.decode),
            (2, self.alloc),
            (5, self.finish),
            (3, self.shorten),
            (3, self.group),
            (4, self.free_anything),
            (4, self.wrong_free),
            (2, self.wrong_extend),
            (2, self.wrong_segments),
            (1, self.clear),
        )
        self._deck = [action for weight, action in self.actions for _ in range(weight)]

    def step(self, choose: Chooser) -> None:
        choose.item(self._deck)(choose)

    # -- what is done to both -----------------------------------------------------------------------------

    def do(self, call: str, *arguments: Any) -> list[int] | None:
        """Have it done by all, and compare. It must not be refused."""
        found, error = self.attempt(call, *arguments)
        assert error is None, f"{call}{arguments} was refused: {error}"
        return found

    def attempt(self, call: str, *arguments: Any) -> tuple[list[int] | None, BadRequest | None]:
        """Have it done by all, or refused by all, and compare: what came of it."""
        what = f"{call}{arguments}"
        expected, refused = None, False
        try:
            expected = getattr(self.model, call)(*arguments)
        except Refused:
            refused = True
        found, error = None, None
        try:
            found = self._real(call, *arguments)
        except BadRequest as raised:
            error = raised
        assert (error is not None) == refused, f"{what} was {'not ' if refused else ''}refused: {error}"
        assert (None if found is None else found.tolist()) == expected, what
        assert found is None or found.dtype == torch.int64, what
        if self.twin is not None and not refused:
            assert self.twin.do(call, *arguments) == expected, f"{what} of the twin"
        self.compare(what)
        return expected, error

    def _real(self, call: str, *arguments: Any) -> torch.Tensor | None:
        real = self.real
        if call == "alloc_extend":
            prefix, seq, last = map(tensor, arguments)
            return real.alloc_extend(prefix, seq, last, sum(arguments[1]) - sum(arguments[0]))
        if call == "free_segments":
            segments = [(tensor(slots), start) for slots, start in arguments[0]]
            if len(segments) == 1:
                real.free_segment(*segments[0])
            else:
                real.free_segments(segments)
            return None
        made = [tensor(each) if isinstance(each, list) else each for each in arguments]
        found: torch.Tensor | None = getattr(real, call)(*made)
        for each in made:
            if isinstance(each, torch.Tensor):
                each.fill_(-7)  # the caller may use it again
        return found

    def compare(self, after: str) -> None:
        """The lists are the model's; each page is in one place."""
        real, model = self.real, self.model
        assert real.free_pages.tolist() == model.free_pages, after
        assert real.release_pages.tolist() == model.release_pages, after
        assert real.available_size() == model.available_size(), after
        taken = sorted({slot // self.page_size for slot in model.taken})
        assert sorted(model.free_pages + model.release_pages + taken) == sorted(model.pages), after
        if self.twin is not None:
            assert self.twin.free_pages() == model.free_pages, f"the twin after {after}"

    # -- what requests do ---------------------------------------------------------------------------------

    def admit(self, choose: Chooser) -> None:
        """Prompts of new requests, together."""
        self._extend([[] for _ in range(choose.integer(1, 3))], choose, 3 * self.page_size)

    def extend(self, choose: Chooser) -> None:
        """Running requests, chunk by chunk, and a new one among them."""
        self._extend([*self._some(choose), []], choose, 3 * self.page_size)

    def _extend(self, rows: list[list[int]], choose: Chooser, most: int) -> None:
        counts = [choose.integer(0, most) for _ in rows]
        prefix, last = [len(row) for row in rows], [row[-1] if row else -1 for row in rows]
        out = self.do("alloc_extend", prefix, [a + b for a, b in zip(prefix, counts, strict=True)], last)
        self._grow(rows, counts, out)

    def decode(self, choose: Chooser) -> None:
        """A token of each request of a batch."""
        rows = self._some(choose)
        out = self.do("alloc_decode", [len(row) + 1 for row in rows], [row[-1] if row else -1 for row in rows])
        self._grow(rows, [1] * len(rows), out)

    def _grow(self, rows: list[list[int]], counts: list[int], out: list[int] | None) -> None:
        if out is None:
            return
        out = list(out)
        for row, count in zip(rows, counts, strict=True):
            row += out[:count]
            del out[:count]
        self.rows += [row for row in rows if row and not any(row is other for other in self.rows)]

    def alloc(self, choose: Chooser) -> None:
        count = choose.integer(-1, len(self.model.pages) + 1) * self.page_size + choose.item((0, 0, 0, 1, -1))
        out, _ = self.attempt("alloc", count)
        if out:
            self.rows.append(out)

    def finish(self, choose: Chooser) -> None:
        """A request gives everything back, in one of the ways there are."""
        if not self.rows:
            return
        row = self.rows.pop(choose.integer(0, len(self.rows) - 1))
        size = self.page_size
        how = choose.integer(0, 4)
        if how == 0:
            self.do("free", row)
        elif how == 1:  # one slot of each page, in any order
            chosen = [choose.item(row[start : start + size]) for start in range(0, len(row), size)]
            self.do("free", random.Random(choose.integer(0, 9)).sample(chosen, len(chosen)))
        elif how == 2:
            self.do("free_page_ids", [slot // size for slot in row[::size]])
        elif how == 3:
            self.do("free_segments", [(row, 0)])
        else:
            cuts = sorted(choose.integer(0, len(row)) for _ in range(2))
            if self.twin is not None and self.twin.whole_segments:
                cuts = [cut // size * size for cut in cuts]
            cuts = [0, *cuts, len(row)]
            self.do("free_segments", [(row[a:b], a) for a, b in pairwise(cuts)])
        self.gone += row

    def shorten(self, choose: Chooser) -> None:
        """A request gives back the pages behind some position (rejected drafts); what was in the last stays its own."""
        if not self.rows:
            return
        row = choose.item(self.rows)
        keep = choose.integer(1, len(row))
        first = -(-keep // self.page_size) * self.page_size
        if len(row) > first:
            self.do("free_segments", [(row[first:], first)])
            self.gone += row[first:]
        del row[keep:]

    def group(self, choose: Chooser) -> None:
        """Open or close a free group; sometimes the one that can't be."""
        wrong = choose.integer(0, 5) == 5
        _, error = self.attempt("free_group_begin" if self.model.in_group == wrong else "free_group_end")
        assert (error is not None) == wrong

    # -- what nobody should do ------------------------------------------------------------------------------

    def free_anything(self, choose: Chooser) -> None:
        """Slots at random: the model says whether that is refused. Requests that lose a page by it end."""
        most = (max(self.model.pages) + 2) * self.page_size
        slots = [choose.integer(-1, most) for _ in range(choose.integer(0, 3))]
        if self.twin is not None and self.model.in_group:
            return  # SGLang does not mind a page that is freed twice in a group
        _, error = self.attempt("free", slots)
        if error is not None:
            return
        pages = {slot // self.page_size for slot in slots}
        for row in list(self.rows):
            if pages & {slot // self.page_size for slot in row}:
                self.rows.remove(row)
                rest = [page for page in dict.fromkeys(slot // self.page_size for slot in row) if page not in pages]
                self.do("free_page_ids", rest)
                self.gone += row

    def wrong_free(self, choose: Chooser) -> None:
        """Free what was freed before, or twice at once."""
        gone = [slot for slot in self.gone if slot not in self.model.taken or slot in self.model.named]
        slots = [choose.item(gone)] if gone else []
        if self.rows and choose.integer(0, 1):
            row = choose.item(self.rows)
            slots += row
            if not gone or choose.integer(0, 1):
                slots.insert(choose.integer(0, len(slots)), row[choose.integer(0, len(row) - 1)])
        if not slots:
            return
        if choose.integer(0, 2):
            _, error = self.attempt("free", slots)
        else:
            _, error = self.attempt("free_page_ids", [slot // self.page_size for slot in slots])
        assert isinstance(error, DoubleFree), f"a double free of {slots} was done"

    def wrong_extend(self, choose: Chooser) -> None:
        """A batch of requests and one that is wrong: its lengths, its last slot, or that it is there twice."""
        rows = [*self._some(choose), choose.item(self.rows) if self.rows else []]
        prefix, last = [len(row) for row in rows], [row[-1] if row else -1 for row in rows]
        seq = [length + choose.integer(0, self.page_size) for length in prefix]
        what = choose.integer(0, 3) if self.model.strict else 1  # nobody looks at the others
        if what == 0:
            last[-1] += choose.item((1, -1, self.page_size, -self.page_size, 99 * self.page_size))
        elif what == 1:
            seq[-1] = prefix[-1] - choose.integer(1, 2)
        elif what == 2:
            prefix[-1] -= choose.integer(1, self.page_size + 1)
        elif self.gone:
            last[-1] = choose.item(self.gone)
            prefix[-1] = last[-1] % self.page_size + 1
            seq[-1] = prefix[-1] + 1
        before = set(self.model.taken)
        out, _ = self.attempt("alloc_extend", prefix, seq, last)
        if out is not None:  # it was not that wrong: these pages are given back
            fresh = [slot for slot in out if slot not in before]
            self.do("free_page_ids", list(dict.fromkeys(slot // self.page_size for slot in fresh)))

    def wrong_segments(self, choose: Chooser) -> None:
        """Parts of a row that stand elsewhere, or out of order, or are of two rows, or hold a page at two places."""
        if not self.rows or self.twin is not None:
            return
        row = choose.item(self.rows)
        at = choose.integer(0, len(row) - 1)
        part = row[at:]
        what = choose.integer(0, 4)
        if what == 4:
            page = row[: self.page_size]
            segments = [(page[at:] + page[:at], at)]
        elif what == 0:
            segments = [(part, at + choose.item((1, -1, self.page_size)))]
        elif what == 1:
            segments = [(part, at), (row[:at], 0)]
        elif what == 2:
            segments = [(row[:at], 0), (choose.item(self.rows)[at:], at)]
        else:
            segments = [(part[::-1], at)]
        before = sorted({slot // self.page_size for slot in self.model.taken})
        _, error = self.attempt("free_segments", segments)
        if error is not None:
            return
        named = {slot // self.page_size for slots, _ in segments for slot in slots}
        assert named <= set(before)
        for other in list(self.rows):
            pages = list(dict.fromkeys(slot // self.page_size for slot in other))
            if named & set(pages):
                self.rows.remove(other)
                self.do("free_page_ids", [page for page in pages if page not in named])
                self.gone += other

    def clear(self, choose: Chooser) -> None:
        if choose.integer(0, 3) == 3:
            self.do("clear")
            self.gone += [slot for row in self.rows for slot in row]
            self.rows.clear()

    def _some(self, choose: Chooser) -> list[list[int]]:
        return [row for row in self.rows if choose.integer(0, 1)]


def tensor(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def run(seed: int, steps: int = 60, **fixed: Any) -> AllocatorProgram:
    """One program, the same each time."""
    choose = SeededChooser(seed)
    program = AllocatorProgram(choose, **fixed)
    for _ in range(steps):
        program.step(choose)
    return program


class AllocatorMachine(RuleBasedStateMachine):
    """The same under hypothesis, which shrinks what it finds."""

    program: AllocatorProgram

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.program = AllocatorProgram(DrawnChooser(data))

    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        self.program.admit(DrawnChooser(data))

    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        self.program.extend(DrawnChooser(data))

    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        self.program.decode(DrawnChooser(data))

    @rule(data=st.data())
    def alloc(self, data: st.DataObject) -> None:
        self.program.alloc(DrawnChooser(data))

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.program.finish(DrawnChooser(data))

    @rule(data=st.data())
    def shorten(self, data: st.DataObject) -> None:
        self.program.shorten(DrawnChooser(data))

    @rule(data=st.data())
    def group(self, data: st.DataObject) -> None:
        self.program.group(DrawnChooser(data))

    @rule(data=st.data())
    def free_anything(self, data: st.DataObject) -> None:
        self.program.free_anything(DrawnChooser(data))

    @rule(data=st.data())
    def wrong_free(self, data: st.DataObject) -> None:
        self.program.wrong_free(DrawnChooser(data))

    @rule(data=st.data())
    def wrong_extend(self, data: st.DataObject) -> None:
        self.program.wrong_extend(DrawnChooser(data))

    @rule(data=st.data())
    def wrong_segments(self, data: st.DataObject) -> None:
        self.program.wrong_segments(DrawnChooser(data))

    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        self.program.clear(DrawnChooser(data))
