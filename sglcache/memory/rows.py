"""A lease's pages as token slots: a row for each request, as SGLang's `req_to_token` has it.

A lease has its pages before its tokens: what it matched, then what it may write (`reserve`, `room`). So extending and
decoding are handed nothing; they read off where the next positions lie. A row is written anew when its lease's
`slots` are: after acquire, extend and commit.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglcache.errors import BadRequest, DoubleFree, extras
from sglcache.memory.allocator import Ints, as_count, as_ints, spread

with extras():
    import torch
    from torch import Tensor

MAX_INT32 = (1 << 31) - 1


def token_slots(table: Ints, page_size: int, start: int = 0, stop: int | None = None) -> Tensor:
    """int64 [stop - start]: where positions start..stop lie, by a page table such as `lease.slots`.

    A token's slot is page * page_size + offset. `stop` None: to the end of the last page. BadRequest: beyond that.
    """
    pages = as_ints(table, "pages")
    room = len(pages) * page_size
    stop = room if stop is None else stop
    if not 0 <= start <= stop <= room:
        raise BadRequest(f"positions {start}..{stop} of {len(pages)} pages of {page_size}", room=room)
    positions = torch.arange(start, stop, device=pages.device)
    return pages[positions // page_size] * page_size + positions % page_size


class ReqToTokenPool:
    """Rows of token slots: position p of the request with row r lies in slot `req_to_token[r, p]`.

    `req_to_token` is int32 [size + 1, max_context_len], on `device`; row 0 is the padding row, nobody's. What has no
    page is `padding_slot` there. Not thread-safe.
    """

    def __init__(
        self,
        size: int,
        max_context_len: int,
        page_size: int,
        *,
        padding_slot: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """`size`: of requests at a time. `max_context_len` is raised to whole pages.

        `padding_slot`: where tokens that only fill a batch are written; a page of yours, see docs/sglang.md.
        """
        if size < 1 or max_context_len < 1 or page_size < 1:
            raise BadRequest(f"{size} rows of {max_context_len} tokens in pages of {page_size} are none")
        self.size = size
        self.page_size = page_size
        self.max_context_len = -(-max_context_len // page_size) * page_size
        self.padding_slot = padding_slot
        self.device = torch.device(device)
        with torch.inference_mode(False):
            shape = (size + 1, self.max_context_len)
            self.req_to_token = torch.full(shape, padding_slot, dtype=torch.int32, device=self.device)
            # int64 [2, size + 1]: of each row, the positions that have pages, and how many of these are not its own to
            # write; -1: nobody's row.
            self._bounds = torch.full((2, size + 1), -1, dtype=torch.int64, device=self.device)
        # The same once more: to read these waits for no device.
        self._room = [-1] * (size + 1)
        self._protected = [-1] * (size + 1)
        self._free_rows = list(range(1, size + 1))

    def available_size(self) -> int:
        return len(self._free_rows)

    def alloc(self, need_size: int = 1) -> list[int] | None:
        """So many rows, without pages yet. None: there are not so many, and none is taken."""
        if need_size < 0:
            raise BadRequest(f"alloc({need_size}) of rows")
        if need_size > len(self._free_rows):
            return None
        at = len(self._free_rows) - need_size
        rows, self._free_rows = self._free_rows[at:], self._free_rows[:at]
        for row in rows:
            self._set(row, 0, 0)
        return rows

    def free(self, rows: int | Sequence[int]) -> None:
        """Give rows back; their slots are forgotten. DoubleFree: one is nobody's, or named twice; nothing was freed."""
        rows = [rows] if isinstance(rows, int) else list(rows)
        if wrong := [row for n, row in enumerate(rows) if not self._is_taken(row) or row in rows[:n]]:
            raise DoubleFree(f"rows {wrong} are nobody's, or named twice; nothing was freed", rows=wrong)
        for row in rows:
            self.req_to_token[row] = self.padding_slot
            self._set(row, -1, -1)
        self._free_rows += rows

    def room(self, row: int) -> int:
        """How many positions of this row have pages. BadRequest: it is nobody's."""
        if not self._is_taken(row):
            raise BadRequest(f"row {row} is nobody's", row=row)
        return self._room[row]

    def write_table(self, row: int, table: Ints, protected_len: int | None = None) -> None:
        """Write a lease's `slots` into its row. BadRequest: more than `max_context_len`; nothing was written.

        `protected_len`: the first so many positions are the cache's, and not to be written: what the lease matched,
        and what was committed since. None: as many as before.
        """
        room = self.room(row)
        protected_len = self._protected[row] if protected_len is None else protected_len
        slots = token_slots(table, self.page_size)
        if len(slots) > self.max_context_len or not 0 <= protected_len <= len(slots):
            raise BadRequest(
                f"a table of {len(slots)} token slots, {protected_len} of them protected, for a row of "
                f"{self.max_context_len}",
                room=room,
            )
        if len(slots) and int(slots.max()) > MAX_INT32:
            raise BadRequest(f"slot {int(slots.max())} does not fit the rows, which are int32")
        self.req_to_token[row, : len(slots)] = slots.to(self.device, torch.int32)
        self.req_to_token[row, len(slots) : room] = self.padding_slot
        self._set(row, len(slots), protected_len)

    def alloc_extend(self, rows: Ints, prefix_lens: Ints, seq_lens: Ints, extend_num_tokens: int) -> Tensor | None:
        """int64 [extend_num_tokens]: slots of positions prefix_lens[i]..seq_lens[i] of each row, one after another.

        None: a row has no page for one of them: extend its lease, write its table, and ask again (`room` says which).
        BadRequest: a row is nobody's, the lengths contradict one another, or a position is protected.
        """
        row, prefix, seq = (
            as_ints(values, what).to(self.device)
            for values, what in ((rows, "rows"), (prefix_lens, "prefix_lens"), (seq_lens, "seq_lens"))
        )
        extend_num_tokens = as_count(extend_num_tokens, "extend_num_tokens")
        if not len(row) == len(prefix) == len(seq):
            raise BadRequest(f"rows, prefix_lens and seq_lens are of {len(row)}, {len(prefix)} and {len(seq)} requests")
        known = (row >= 1) & (row <= self.size)
        room, protected = self._bounds[:, torch.where(known, row, 0)]
        none, wrong, written, short, num_tokens = torch.stack(
            [
                (room < 0).sum(),
                ((prefix < 0) | (seq < prefix)).sum(),
                ((prefix < protected) & (prefix < seq)).sum(),
                (seq > room).sum(),
                (seq - prefix).sum(),
            ]
        ).tolist()
        for number, what in (
            (none, "have a row that is nobody's"),
            (wrong, "have a prefix below 0, or longer than the sequence"),
            (written, "would write what is the cache's"),
        ):
            if number:
                raise BadRequest(f"of {len(row)} requests {number} {what}")
        if num_tokens != extend_num_tokens:
            raise BadRequest(f"extend_num_tokens = {extend_num_tokens}, and the requests extend by {num_tokens}")
        if short:
            return None
        which, positions = spread(prefix, seq, extend_num_tokens)
        return self.req_to_token[row[which], positions].to(torch.int64)

    def alloc_decode(self, rows: Ints, seq_lens: Ints) -> Tensor | None:
        """int64 [batch]: the slot of the last of each row's `seq_lens[i]` tokens, as `alloc_extend` by one."""
        seq = as_ints(seq_lens, "seq_lens")
        return self.alloc_extend(rows, seq - 1, seq, len(seq))

    def last_loc(self, rows: Ints, prefix_lens: Ints) -> Tensor:
        """int64 [batch]: the slot of each row's position prefix_lens[i] - 1; -1 where there is none."""
        row = as_ints(rows, "rows").to(self.device)
        prefix = as_ints(prefix_lens, "prefix_lens").to(self.device)
        return torch.where(prefix > 0, self.req_to_token[row, (prefix - 1).clamp(min=0)].to(torch.int64), -1)

    def __repr__(self) -> str:
        return f"ReqToTokenPool({len(self._free_rows)} of {self.size} rows free, {self.max_context_len} tokens each)"

    def _is_taken(self, row: int) -> bool:
        return 1 <= row <= self.size and self._room[row] >= 0

    def _set(self, row: int, room: int, protected_len: int) -> None:
        self._room[row], self._protected[row] = room, protected_len
        self._bounds[0, row], self._bounds[1, row] = room, protected_len
