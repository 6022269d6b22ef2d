"""Token slots of a paged pool, handed out as SGLang's allocators do it: for runners whose scheduler thinks in these.

What is the cache's the daemon hands out, by leases; this is a library of its own, for pages that a runner manages
itself: a pool beside the daemon's, or the pages of one lease (`pages`). Slots and the order in which pages come back
are those of SGLang 0.5.17 to 0.5.23. What is refused here they let pass, and trip over later: a double free, a count
that is no multiple of a page, numbers that contradict one another.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy.typing as npt

from sglcache.errors import BadRequest, DoubleFree, extras

with extras():
    import torch
    from torch import Tensor

Ints = Tensor | npt.NDArray[Any] | Sequence[int]
"""Integers in one dimension, of any width, on any device."""

FREE, TAKEN, GOING = 0, 1, 2  # states of a page; GOING: named in the open group, and free when it ends
SHOWN = 8  # slots that an error names
MAX_LENGTH = (1 << 31) - 1  # tokens of one request: sums of these stay far from int64's end


class TokenToKVPoolAllocator:
    """Owns the pages of a pool: each is free, or somebody's. Slot `page * page_size + offset` is one token's KV.

    A slot is named by the page it lies in: a free of any slot frees its whole page. Pages are handed out from the head
    of `free_pages`. With page_size 1 what is freed goes to its end, in the order given; otherwise to its head, in
    ascending order. With `need_sort` it waits in `release_pages` until an allocation needs more than `free_pages` has:
    then both become one list, ascending. (SGLang joins them by an upper bound of the need, so a little earlier.)

    What does not fit is answered with None; what is refused raises. Either way everything is as it was. Slots go in
    as integers of any width and come out as int64, on `device`. Not thread-safe.
    """

    def __init__(
        self,
        size: int,
        page_size: int = 1,
        *,
        pages: Ints | None = None,
        device: torch.device | str = "cpu",
        need_sort: bool = False,
        strict: bool = False,
    ) -> None:
        """`size`: tokens; what is not a whole page is left out. BadRequest: that is none, or `pages` are not as many.

        `pages`: the page ids to hand out, in this order, each once. None: 1, 2, ..., since page 0 is the padding page,
        which is nobody's: tokens that only fill a batch are written there, so buffers have size + page_size rows.
        `strict`: refuse a `last_loc` that can't be one, at the price of a look at it (SGLang's debug mode).
        """
        size, page_size = as_count(size, "size"), as_count(page_size, "page_size")
        if page_size < 1 or size < page_size:
            raise BadRequest(f"{size} token slots hold no page of {page_size}", size=size, page_size=page_size)
        self.size = size
        self.page_size = page_size
        self.num_pages = size // page_size
        self.device = torch.device(device)
        self.need_sort = need_sort
        self.strict = strict
        # Whoever builds this in inference mode must be able to use it outside.
        with torch.inference_mode(False):
            ids = torch.arange(1, self.num_pages + 1) if pages is None else self._ints(pages, "pages").clone()
            self._pages = ids.to(self.device)
            if len(ids) != self.num_pages or int(ids.min()) < 0 or len(_distinct(ids)) != len(ids):
                raise BadRequest(
                    f"{self.num_pages} pages are needed, each once; got {len(ids)}: {ids[:SHOWN].tolist()}"
                )
            self._limit = int(ids.max()) + 1
            # uint8 [limit + 1]: the state of each page; the last entry stands for all that is no page of ours.
            self._state = torch.zeros(self._limit + 1, dtype=torch.uint8, device=self.device)
            # int64 [limit * page_size]: when each slot was last named in a free, by a clock that counts slots.
            self._named = torch.full((self._limit * page_size,), -1, dtype=torch.int64, device=self.device)
            self._clock = 0
            self.clear()

    def clear(self) -> None:
        """Everything is free again, in the order of the beginning; an open group is dropped."""
        self._free = _PageRing(self._pages, self.num_pages)
        self._staged: list[Tensor] = []  # with need_sort: what was freed
        self._num_staged = 0
        self._group: _Group | None = None
        self._state.zero_()

    @property
    def free_pages(self) -> Tensor:
        """int64: what is handed out next, in order. A copy."""
        return self._free.ids()

    @property
    def release_pages(self) -> Tensor:
        """int64: with `need_sort`, what was freed since the lists were last joined, in order. A copy."""
        return torch.cat([*self._staged, self._pages[:0]])

    def available_size(self) -> int:
        """Tokens that would find a page; what an open group has freed is not among them."""
        return (len(self._free) + self._num_staged) * self.page_size

    def __repr__(self) -> str:
        group = "" if self._group is None else ", a group is open"
        return (
            f"TokenToKVPoolAllocator({self.available_size()} of {self.num_pages * self.page_size} slots available, "
            f"pages of {self.page_size}{group})"
        )

    # -- handing out ----------------------------------------------------------------------------------------

    def alloc(self, need_size: int) -> Tensor | None:
        """int64 [need_size]: slots of whole pages, page by page. None: there are not so many.

        BadRequest: not a multiple of the page size.
        """
        need_size = as_count(need_size, "need_size")
        num_pages, rest = divmod(need_size, self.page_size)
        if rest or need_size < 0:
            raise BadRequest(
                f"alloc({need_size}) is no number of whole pages of {self.page_size}; alloc_extend takes any",
                need_size=need_size,
                page_size=self.page_size,
            )
        if not self._fits(num_pages):
            return None
        return self._slots_of(self._take(num_pages))

    def alloc_extend(self, prefix_lens: Ints, seq_lens: Ints, last_loc: Ints, extend_num_tokens: int) -> Tensor | None:
        """int64 [extend_num_tokens]: slots of positions prefix_lens[i]..seq_lens[i] of each request, one after another.

        `last_loc[i]` is the slot of position prefix_lens[i] - 1 (-1: there is none). The slots behind it are used up to
        the end of the prefix's last page, then new pages, in the order of the requests. None: there are not so many.
        BadRequest: the lengths contradict one another; if `strict`, too, a last_loc does not lie in its page as the end
        of the prefix does, or a page that would be gone on in is nobody's, or is gone on in by two requests.
        """
        prefix, seq = self._ints(prefix_lens, "prefix_lens"), self._ints(seq_lens, "seq_lens")
        last, size = self._ints(last_loc, "last_loc"), self.page_size
        extend_num_tokens = as_count(extend_num_tokens, "extend_num_tokens")
        count = len(prefix)
        if not count == len(seq) == len(last):
            raise BadRequest(f"prefix_lens, seq_lens and last_loc are of {count}, {len(seq)} and {len(last)} requests")
        had = (prefix + (size - 1)).div(size, rounding_mode="floor")  # pages that each request has
        new = (seq + (size - 1)).div(size, rounding_mode="floor") - had
        facts = [
            new.sum(),
            (seq - prefix).sum(),
            ((prefix < 0) | (seq < prefix)).sum(),
            (seq > MAX_LENGTH).sum(),
        ]
        if self.strict:
            facts += self._wrong_ends(prefix, seq, last)
        num_new, num_tokens, *wrong = torch.stack(facts).tolist()
        for number, what in zip(wrong, _CONTRADICTIONS, strict=False):
            if number:
                raise BadRequest(f"of {count} requests {number} {what}")
        if num_tokens != extend_num_tokens:
            raise BadRequest(f"extend_num_tokens = {extend_num_tokens}, and the requests extend by {num_tokens}")
        if not self._fits(num_new):
            return None
        which, positions = spread(prefix, seq, extend_num_tokens)
        ordinals = positions.div(size, rounding_mode="floor")  # of the page in its request
        first = new.cumsum(0) - new + count - had  # where a request's page 0 would stand in `table`
        goes_on = ordinals < had[which]
        entries = torch.where(goes_on, which, first[which] + ordinals)
        offsets = torch.where(goes_on, positions, positions % size)
        # Nothing is taken before everything else has gone well.
        # To a position, where its request's last page goes on; to an offset, the start of a new page.
        table = torch.cat([last + 1 - prefix, self._take(num_new) * size])
        return table[entries] + offsets

    def alloc_decode(self, seq_lens: Ints, last_loc: Ints) -> Tensor | None:
        """int64 [batch]: a slot for the last of each request's `seq_lens[i]` tokens, as `alloc_extend` by one."""
        seq = self._ints(seq_lens, "seq_lens")
        return self.alloc_extend(seq - 1, seq, last_loc, len(seq))

    # -- taking back ------------------------------------------------------------------------------------------

    def free(self, slots: Ints) -> None:
        """Free each page that one of the slots lies in. In a group, at its end.

        DoubleFree: a page is free already, or was never handed out, or a slot is named twice, here or in this group.
        """
        slots = self._ints(slots, "slots")
        if len(slots):
            pages = slots.div(self.page_size, rounding_mode="floor")
            self._name(slots, pages)
            self._let_go(pages if self.page_size == 1 else _distinct(pages), in_order=False)

    def free_page_ids(self, pages: Ints) -> None:
        """As `free` of all slots of these pages, which go back in the order given."""
        pages = self._ints(pages, "pages").clone()
        if len(pages):
            slots = self._slots_of(pages)
            self._name(slots, pages.repeat_interleave(self.page_size))
            self._let_go(pages, in_order=True)

    def free_segment(self, slots: Ints, start_pos: int) -> None:
        """As `free` of a part of a request's row, which begins at position `start_pos`; pages go back in row order.

        BadRequest: it is no such part: its slots do not lie in pages as its positions do.
        """
        self.free_segments([(slots, start_pos)])

    def free_segments(self, segments: Iterable[tuple[Ints, int]]) -> None:
        """As `free_segment` of each (slots, start_pos) of one request, ascending; all or nothing.

        A page in which one ends and another begins goes with the first.
        """
        size, end, last_page = self.page_size, 0, self._pages[:0]
        all_slots, page_lists, wrong = [], [], []
        for values, start in segments:
            slots, start = self._ints(values, "slots"), as_count(start, "start_pos")
            if not len(slots):
                continue
            if start < end:
                raise BadRequest(f"a segment at position {start} follows one that ends at {end}; segments ascend")
            offset = start % size
            # The first slot, and those at which a page begins: one of each page.
            pages = torch.cat([slots[:1], slots[size - offset :: size]]).div(size, rounding_mode="floor")
            positions = torch.arange(offset, offset + len(slots), device=self.device)
            wrong.append(slots != pages[positions // size] * size + positions % size)
            if end and start // size == (end - 1) // size:
                wrong.append(pages[:1] != last_page)
                last_page, pages = pages[-1:], pages[1:]
            else:
                last_page = pages[-1:]
            all_slots.append(slots)
            page_lists.append(pages)
            end = start + len(slots)
        if not all_slots:
            return
        slots, pages = torch.cat(all_slots), torch.cat(page_lists)
        if bool(torch.cat(wrong).any()) or len(_distinct(pages)) != len(pages):
            raise BadRequest(f"slots {slots[:SHOWN].tolist()}.. are no part of a row of pages of {size} tokens")
        self._name(slots, slots.div(size, rounding_mode="floor"))
        for pages in page_lists:
            self._let_go(pages, in_order=True)

    def free_group_begin(self) -> None:
        """From here to the group's end, what is freed is one free: checked at once, and done at the end.

        BadRequest: a group is open.
        """
        if self._group is not None:
            raise BadRequest("a free group is open; groups do not nest")
        self._group = _Group(self._clock)

    def free_group_end(self) -> None:
        """Free what the group named. BadRequest: none is open."""
        if self._group is None:
            raise BadRequest("no free group is open")
        group, self._group = self._group, None
        if group.loose:
            pages = torch.cat(group.loose)
            self._give(pages if self.page_size == 1 else pages.sort().values)
        if group.in_order:
            self._give(torch.cat(group.in_order))

    # -- inside -----------------------------------------------------------------------------------------------

    def _ints(self, values: Ints, what: str) -> Tensor:
        return as_ints(values, what).to(self.device)

    def _slots_of(self, pages: Tensor) -> Tensor:
        offsets = torch.arange(self.page_size, device=self.device)
        return (pages[:, None] * self.page_size + offsets).flatten()

    def _known(self, pages: Tensor) -> Tensor:
        """Page ids as indices of `_state`, whatever they are."""
        return torch.where((pages < 0) | (pages > self._limit), self._limit, pages)

    def _fits(self, num_pages: int) -> bool:
        return num_pages <= len(self._free) + self._num_staged

    def _wrong_ends(self, prefix: Tensor, seq: Tensor, last: Tensor) -> list[Tensor]:
        """How many requests have a `last_loc` that can't be, in three ways."""
        goes_on = (prefix % self.page_size != 0) & (seq > prefix)  # in a page that is not full,
        page = last.div(self.page_size, rounding_mode="floor")  # which is this one
        others = torch.arange(-1 - len(last), -1, device=self.device)  # each like none
        entered = torch.where(goes_on, page, others).sort().values
        return [
            ((last + 1 - prefix) % self.page_size != 0).sum(),
            (goes_on & (self._state[self._known(page)] != TAKEN)).sum(),
            (entered[1:] == entered[:-1]).sum(),
        ]

    def _take(self, num_pages: int) -> Tensor:
        if num_pages > len(self._free):
            self._free = _PageRing(torch.cat([self._free.ids(), *self._staged]).sort().values, self.num_pages)
            self._staged, self._num_staged = [], 0
        pages = self._free.take(num_pages)
        self._state[pages] = TAKEN
        return pages

    def _name(self, slots: Tensor, pages: Tensor) -> None:
        """Have each slot named, `pages[i]` being the page of `slots[i]`. DoubleFree: see `free`."""
        wrong = self._state[self._known(pages)] == FREE
        if bool(wrong.any()):
            raise self._double_free(slots, wrong, "are nobody's: they were freed before, or never handed out")
        before = self._named[slots]
        now = torch.arange(self._clock, self._clock + len(slots), device=self.device)
        self._named[slots] = now
        # Of a slot that stands here twice, one of the two finds the other's time.
        wrong = (self._named[slots] != now) | (before >= (self._clock if self._group is None else self._group.begun))
        if bool(wrong.any()):
            self._named[slots] = before
            raise self._double_free(slots, wrong, "are named twice")
        self._clock += len(slots)

    @staticmethod
    def _double_free(slots: Tensor, wrong: Tensor, what: str) -> DoubleFree:
        found = slots[wrong]
        shown = found[:SHOWN].tolist()
        more = "" if len(found) <= SHOWN else f" and {len(found) - SHOWN} more"
        return DoubleFree(f"slots {shown}{more} {what}; nothing was freed", slots=shown, num_slots=len(found))

    def _let_go(self, pages: Tensor, *, in_order: bool) -> None:
        """Of pages that were named, each once: free them now, or at the group's end."""
        if self._group is None:
            self._give(pages)
            return
        pages = pages[self._state[pages] == TAKEN]  # without those that the group has already, by other slots of theirs
        self._state[pages] = GOING
        (self._group.in_order if in_order and self.page_size > 1 else self._group.loose).append(pages)

    def _give(self, pages: Tensor) -> None:
        self._state[pages] = FREE
        if self.need_sort:
            self._staged.append(pages)
            self._num_staged += len(pages)
        elif self.page_size == 1:
            self._free.append(pages)
        else:
            self._free.prepend(pages)


_CONTRADICTIONS = (
    "have a prefix below 0, or longer than the sequence",
    f"have a sequence of more than {MAX_LENGTH} tokens",
    "have a last_loc that does not lie in its page as the end of the prefix does",
    "would go on in a page that is nobody's, or freed in the open group",
    "would go on in another's page",
)


def as_ints(values: Ints, what: str) -> Tensor:
    """int64 [n], perhaps the caller's own tensor. BadRequest: something else than integers in one dimension."""
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as exc:  # by what it is that torch can't read
        raise BadRequest(f"{what} can't be read as integers: {exc}; integers in one dimension are needed") from None
    number = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    if tensor.dim() != 1 or (len(tensor) and not number):
        raise BadRequest(f"{what} are {tensor.dtype} {list(tensor.shape)}; integers in one dimension are needed")
    return tensor.to(torch.int64)


def as_count(value: object, what: str) -> int:
    """A number of tokens, or a position: whatever is an integer, numpy's and torch's too. BadRequest: it is none."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        pass
    raise BadRequest(f"{what}={value!r} is no integer", argument=what)


def spread(starts: Tensor, stops: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The numbers starts[i]..stops[i] of each i, one after another: int64 [total] of i, and int64 [total] of these."""
    numbers = torch.arange(total, device=starts.device)
    ends = (stops - starts).cumsum(0)
    which = torch.searchsorted(ends, numbers, right=True)
    return which, numbers + (stops - ends)[which]


def _distinct(pages: Tensor) -> Tensor:
    """Each once, ascending."""
    found: Tensor = torch.unique(pages)
    return found


class _Group:
    """A free group: since when, and the pages that it frees."""

    def __init__(self, begun: int) -> None:
        self.begun = begun
        self.loose: list[Tensor] = []  # by slots: they go back in ascending order, behind the others
        self.in_order: list[Tensor] = []


class _PageRing:
    """Page ids in a row that is taken from at the head and added to at both ends, at the cost of what is moved."""

    def __init__(self, pages: Tensor, capacity: int) -> None:
        with torch.inference_mode(False):
            self._ids = torch.empty(capacity, dtype=torch.int64, device=pages.device)
        self._head, self._count = 0, 0
        self.append(pages)

    def __len__(self) -> int:
        return self._count

    def ids(self) -> Tensor:
        return self._ids[self._at(self._head, self._count)]

    def take(self, count: int) -> Tensor:
        assert 0 <= count <= self._count, f"take({count}) of {self._count}"
        pages = self._ids[self._at(self._head, count)]
        self._head += count
        self._count -= count
        return pages

    def append(self, pages: Tensor) -> None:
        self._put(self._head + self._count, pages)

    def prepend(self, pages: Tensor) -> None:
        self._head -= len(pages)
        self._put(self._head, pages)

    def _put(self, start: int, pages: Tensor) -> None:
        self._count += len(pages)
        assert self._count <= len(self._ids), f"{self._count} pages of {len(self._ids)}"
        self._ids[self._at(start, len(pages))] = pages

    def _at(self, start: int, count: int) -> Tensor:
        return torch.arange(start, start + count, device=self._ids.device) % len(self._ids)
