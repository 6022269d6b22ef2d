"""How large the journal of a host tier is: without numpy, for who only weighs it (`journal` writes it)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from sglcache.memory.geometry import Form

HEAD_BYTES = 4096
SEQ_BYTES = 8
PAGE_ROW_BYTES = 32  # and its tokens, an even number of them: rows are whole words of eight bytes
COMPANION_ROW_BYTES = 24
CHUNK_BYTES = 40  # of a name
NAME_ROW_BYTES = 16 + CHUNK_BYTES
NAMES_PER_SLOT = 2  # chunks; what is not used costs no memory
FEW_NAMES = 4096
SUM_BYTES = 16  # of a slot: of which sequence, and the sum of its page's bytes


class Shape(NamedTuple):
    """What the rows are of."""

    span: int  # tokens of a page and, with bigram keys, the one behind it
    num_slots: Sequence[int]  # of the host pools: full KV's, then each companion's
    by_end: Sequence[bool] = (False,)  # likewise
    over: int = 0  # of the span, the tokens behind the page: 1 with bigram keys

    @classmethod
    def of(cls, page_size: int, bigram: bool, forms: Sequence[Form]) -> Shape:
        """`forms`: of full KV, and then of each companion."""
        from sglcache.memory.geometry import StateGeometry

        return cls(
            page_size + bigram,
            [form.host_pages for form in forms],
            [isinstance(form, StateGeometry) for form in forms],
            int(bigram),
        )

    @property
    def num_chunks(self) -> int:
        return NAMES_PER_SLOT * self.num_slots[0] + FEW_NAMES

    @property
    def tables(self) -> list[tuple[int, int]]:
        """(rows, bytes of each beside its sequence), in the order in which they lie there; the last are names."""
        page = PAGE_ROW_BYTES + 4 * (self.span + self.span % 2)
        rows = [page, *[COMPANION_ROW_BYTES] * (len(self.num_slots) - 1), NAME_ROW_BYTES]
        return list(zip((*self.num_slots, self.num_chunks), rows, strict=True))

    @property
    def num_bytes(self) -> int:
        """Of the whole; memory is taken as rows are written."""
        rows = sum(count * (SEQ_BYTES + size) for count, size in self.tables)
        return HEAD_BYTES + rows + SUM_BYTES * sum(self.num_slots)

    @property
    def slot_bytes(self) -> list[int]:
        """What a slot that holds something takes, of full KV, with names, and then of each companion."""
        page, *companions, name = (SEQ_BYTES + size for _, size in self.tables)
        return [SUM_BYTES + each for each in (page + NAMES_PER_SLOT * name, *companions)]
