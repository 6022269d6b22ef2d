"""The journal of a rank's host tier: what each host slot holds, in memory that outlives the process.

It is no log but a table, a row a slot, so it never grows, needs no compaction, and is read in one pass: what a page
is costs a row where it comes and eight bytes where it goes. Its life is that of its descriptor, not of the machine:
nothing is flushed, since the death of a process loses no store that it made, and a machine that goes down takes the
pages along.

    page 0              head: what the rows are rows of, and which sequences count
    rows of full KV     [slots of the host] sequences; then check, owner's sequence, tenant, owner, name, tokens
    rows of companions  [slots] sequences; then check, owner's sequence, owner
    names               [chunks] of namespaces: sequences; then check, next, size, bytes
    sums                of each resource [slots] sequences; then sums of the pages' bytes (`scrub`)

Laws:

* One writer, the rank. A sequence number is given once in a life, and the next life goes on above all that are still
  there: a row says who owns it by slot and number, so what was written of a slot's earlier page, and was not taken away
  with it, is never taken for the next one's.
* A row that was being written when the process died is no row: `check` covers all of it, its sequence and the slot's
  number. Eight bytes aligned are written at once, so a row that was being taken away is either there or not.
* Rows are noted before what follows from them is done (`core.effects.Journal`): a page's row after its bytes are there,
  its end before its slot is handed on. So at any moment the rows that are right tell of pages whose bytes are whole.
* A sum is of the page that had its sequence, so what becomes of the slot makes it void. Another thread writes them, a
  slot's sequence behind its sum; a life has those of the pages that it took over and no others (`taken`).
* What it was written for decides whether it counts: another geometry, another boot of the machine, other pools, a life
  that stopped trusting its own books (`distrust`) or that died while it took these very rows make it as good as empty.
"""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from sglcache.core.journal import HOST, Absent, Cleared, Entry, Present, key_of
from sglcache.core.key import Namespace
from sglcache.core.restore import NOBODY, Restored, Rows, Survivors
from sglcache.memory.journal_form import CHUNK_BYTES, HEAD_BYTES, SEQ_BYTES, SUM_BYTES, Shape

if TYPE_CHECKING:
    from sglcache.core.index import Index
    from sglcache.core.tree import Node
    from sglcache.memory.mapping import Region

logger = logging.getLogger("sglcache.journal")

MAGIC = b"sglcjrn2"
HEAD = struct.Struct("<8sQQ32s")  # magic, floor, taking, what it is of
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

U64 = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.int32]


def _page_row(span: int) -> np.dtype[Any]:
    return np.dtype(
        [
            ("check", "<u8"),
            ("owner_seq", "<u8"),
            ("tenant", "<u8"),
            ("owner", "<i4"),
            ("name", "<i4"),
            ("tokens", "<u4", (span + span % 2,)),  # rows are whole words of eight bytes
        ]
    )


_COMPANION = np.dtype([("check", "<u8"), ("owner_seq", "<u8"), ("owner", "<i4"), ("pad", "<i4")])
_NAME = np.dtype([("check", "<u8"), ("next", "<i4"), ("size", "<i4"), ("text", "u1", (CHUNK_BYTES,))])


class _Table:
    """Rows of one kind in shared memory, an index each. A row is there if its sequence is not 0 and its check right.

    The sequences lie by themselves: to look through them all touches no other memory.
    """

    def __init__(self, buffer: npt.NDArray[np.uint8], count: int, kind: np.dtype[Any], salt: int) -> None:
        self.seqs: U64 = buffer[: count * SEQ_BYTES].view("<u8")
        self.rows = buffer[count * SEQ_BYTES :].view(kind)
        self.words = buffer[count * SEQ_BYTES :].view("<u8").reshape(count, kind.itemsize // 8)
        rng = np.random.Generator(np.random.PCG64(salt))
        # A word that changes alone changes the sum, its factor being odd; several do but once in 2**64 or so.
        self._factors = rng.integers(0, 1 << 63, kind.itemsize // 8, np.uint64) * np.uint64(2) + np.uint64(1)
        self._factors[0] = 0  # the check itself
        self._place, self._seq = rng.integers(0, 1 << 63, 2, np.uint64) * np.uint64(2) + np.uint64(1)

    def number(self, places: npt.NDArray[Any], seqs: U64) -> None:
        """Give these rows their sequences; they are none before `put`."""
        self.seqs[places] = seqs

    def put(self, places: npt.NDArray[Any], seqs: U64, rows: npt.NDArray[Any]) -> None:
        """Write rows that have been given their numbers."""
        words = rows.view("<u8").reshape(len(rows), -1)
        words[:, 0] = self._sums(places, seqs, words)
        self.words[places] = words  # as words: field by field it takes several times as long

    def clear(self, places: npt.NDArray[Any]) -> None:
        self.seqs[places] = 0

    def right(self, places: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Which of these are rows, whole."""
        seqs, words = self.seqs[places], self.words[places]
        found: npt.NDArray[np.bool_] = np.logical_and(seqs != 0, words[:, 0] == self._sums(places, seqs, words))
        return found

    def _sums(self, places: npt.NDArray[Any], seqs: U64, words: U64) -> U64:
        sums: U64 = words @ self._factors + places.astype(np.uint64) * self._place + seqs * self._seq
        return sums ^ (sums >> np.uint64(29))


class _Sums(NamedTuple):
    """Of a resource's slots."""

    seqs: U64  # of the page whose sum it is; 0: none
    sums: U64


class Journal:
    """The tables in one mapping, and who writes them. Make one, `load`, put what it has into an index, `taken`."""

    def __init__(self, region: Region, shape: Shape, identity: bytes) -> None:
        """`identity`: what else must be as it was for the rows to count; see `identity_of`."""
        self.shape = shape
        self._head = memoryview(region).cast("B")[:HEAD_BYTES]
        self._of = hashlib.sha256(
            msgspec.msgpack.encode([list(shape.num_slots), list(shape.by_end), shape.span]) + identity
        )
        buffer = np.frombuffer(memoryview(region), np.uint8)
        at = HEAD_BYTES
        self._tables: list[_Table] = []
        kinds = [_page_row(shape.span), *[_COMPANION] * (len(shape.num_slots) - 1), _NAME]
        for number, ((count, size), kind) in enumerate(zip(shape.tables, kinds, strict=True)):
            assert size == kind.itemsize, f"{kind} is {size} bytes"
            stop = at + count * (SEQ_BYTES + kind.itemsize)
            self._tables.append(_Table(buffer[at:stop], count, kind, number))
            at = stop
        self._names = self._tables.pop()
        self._sums: list[_Sums] = []
        for count in shape.num_slots:
            words = buffer[at : at + count * SUM_BYTES].view("<u8")
            self._sums.append(_Sums(words[:count], words[count:]))
            at += count * SUM_BYTES
        self._last_seq = 0
        self._floor = 0  # rows up to this number are none
        self.num_found = 0  # pages that lives before have left, whole or not
        self.num_rows = 0  # written in this life
        self.num_unnamed = 0  # pages left out, since their namespace found no place
        self._tenants: dict[str, int] = {}  # by name
        self._refs: dict[Namespace, list[int]] = {}  # first chunk, its sequence, rows that name it
        self._named: dict[int, Namespace] = {}  # by slot
        self._chunks: list[int] = []  # given back
        self._next_chunk = 0

    # -- another life's -------------------------------------------------------------------------------------------

    def load(self) -> Survivors | None:
        """What the lives before have left; None, with the reason in the log, if nothing of it counts.

        Either way it is this life's from now on: see `taken`.
        """
        magic, floor, taking, of = HEAD.unpack_from(self._head)
        self._floor = floor
        new = not any(self._head[: HEAD.size])
        why = ""
        if magic != MAGIC:
            why = "it is no journal"
        elif of != self._of.digest():
            why = "it is of other pools, another geometry or another boot"
        elif taking:
            why = "the life before died while it took what is there"
        self._last_seq = floor
        if why:
            if not new:
                logger.warning("the journal is not taken, and the host tier begins empty: %s", why)
            if not new:
                for table in (*self._tables, self._names):
                    table.clear(np.flatnonzero(table.seqs))
                for sums in self._sums:
                    sums.seqs[:] = 0  # the numbers begin again
            self._last_seq = 0
            self._write_head(0)
            return None
        self._write_head(floor, taking=1)
        self.num_found = int((self._tables[0].seqs > floor).sum())
        tables = [(table, self._whole(table)) for table in self._tables]
        self._last_seq = max([floor, *[int(table.seqs[places].max()) for table, places in tables if len(places)]])
        names = self._read_names()
        full, places = tables[0]
        heads = places[full.rows["owner"][places] == NOBODY]
        namespaces: dict[int, Namespace] = {}
        for slot in heads.tolist():
            row = full.rows[slot]
            known = names.get((int(row["name"]), int(row["owner_seq"])))
            if known is not None:
                namespaces[slot] = known
        return Survivors(
            _rows(full, places),
            np.ascontiguousarray(full.rows["tokens"][places, : self.shape.span]),
            namespaces,
            full.rows["tenant"][places],
            [_rows(table, places) for table, places in tables[1:]],
        )

    def taken(self, survivors: Survivors | None, restored: Restored | None) -> None:
        """What of it is in the index again: all other rows are none any more. From here on `note`."""
        if survivors is None or restored is None:
            return
        for table, slots in zip(self._tables, restored.slots, strict=True):
            stays = np.zeros(len(table.rows), bool)
            stays[slots] = True
            table.clear(np.flatnonzero((table.seqs != 0) & ~stays))
        for table, sums in zip(self._tables, self._sums, strict=True):
            # The numbers of rows that are gone may be given again.
            sums.seqs[np.flatnonzero((sums.seqs != 0) & (sums.seqs != table.seqs))] = 0
        full = self._tables[0]
        used: set[int] = set()
        rows = full.rows
        for slot in restored.slots[0].tolist():
            if rows["owner"][slot] != NOBODY:
                continue
            namespace = survivors.namespaces[slot]
            first, seq = int(rows["name"][slot]), int(rows["owner_seq"][slot])
            self._named[slot] = namespace
            held = self._refs.setdefault(namespace, [first, seq, 0])
            held[2] += 1
            used.update(self._chain(first))
        there = np.flatnonzero(self._names.seqs != 0)
        self._next_chunk = int(there[-1]) + 1 if len(there) else 0
        self._chunks = [chunk for chunk in range(self._next_chunk) if chunk not in used]
        self._names.clear(np.asarray(self._chunks, np.int64))
        self._write_head(self._floor)

    def distrust(self) -> None:
        """What the index holds is not known: nothing that was noted counts, now or in a later life."""
        self._write_head(self._last_seq)

    def _whole(self, table: _Table) -> npt.NDArray[np.int64]:
        """Rows that are right and count."""
        places = np.flatnonzero(table.seqs > self._floor)
        parts = [part[table.right(part)] for part in np.array_split(places, len(places) // 65536 + 1)]
        return np.concatenate(parts)

    def _read_names(self) -> dict[tuple[int, int], Namespace]:
        """By first chunk and sequence."""
        table = self._names
        places = self._whole(table)
        right = set(places.tolist())
        found: dict[tuple[int, int], Namespace] = {}
        for first in places.tolist():
            size, seq = int(table.rows["size"][first]), int(table.seqs[first])
            if size < 0:
                continue  # it goes on with another's
            text, chunk = bytearray(), first
            while len(text) < size and chunk in right and int(table.seqs[chunk]) == seq:
                text += table.rows["text"][chunk].tobytes()
                chunk = int(table.rows["next"][chunk])
            if len(text) >= size:
                try:
                    found[first, seq] = Namespace(*_decode_name(bytes(text[:size])))
                except msgspec.DecodeError:
                    logger.warning("a namespace in the journal can't be read; its pages are not taken")
        return found

    def _chain(self, first: int) -> Iterable[int]:
        table = self._names
        seq = table.seqs[first]
        chunk = first
        while chunk >= 0 and table.seqs[chunk] == seq:
            yield chunk
            chunk = int(table.rows["next"][chunk])

    def _write_head(self, floor: int, taking: int = 0) -> None:
        self._floor = floor
        HEAD.pack_into(self._head, 0, MAGIC, floor, taking, self._of.digest())

    # -- this life's ----------------------------------------------------------------------------------------------

    def note(self, entries: Sequence[Entry]) -> None:
        """Write down what became of the host tier, in this order."""
        batch: list[Present] = []
        for each in entries:
            if type(each) is Present:
                if batch and batch[0].resource != each.resource:
                    self._put(batch)
                    batch = []
                batch.append(each)
                continue
            if batch:
                self._put(batch)
                batch = []
            if type(each) is Absent:
                self._clear(each)
            else:
                assert type(each) is Cleared
                self._write_head(self._last_seq)
                self._refs.clear()
                self._named.clear()
                self._chunks = []
                self._next_chunk = 0
        if batch:
            self._put(batch)

    def _put(self, batch: Sequence[Present]) -> None:
        """Rows of one resource."""
        resource = batch[0].resource
        table, full = self._tables[resource], self._tables[0]
        slots: Slots = np.frombuffer(b"".join([each.slots for each in batch]), "<i4")
        count = len(slots)
        first = self._last_seq + 1
        self._last_seq += count
        self.num_rows += count
        rows = np.zeros(count, table.rows.dtype)
        seqs = np.arange(first, first + count, dtype=np.uint64)
        table.number(slots, seqs)
        if resource:
            owners = np.frombuffer(b"".join([each.owners for each in batch]), "<i4")
            rows["owner"] = owners
            rows["owner_seq"] = full.seqs[owners]
            table.put(slots, seqs, rows)
            return
        owners = rows["owner"]
        owners[1:] = slots[:-1]
        owner_seqs = rows["owner_seq"]
        owner_seqs[1:] = seqs[:-1]
        tokens = rows["tokens"]
        span = self.shape.span
        at = 0
        left_out: list[int] = []
        for each in batch:
            pages = len(each.slots) >> 2
            stop = at + pages
            run = np.frombuffer(each.tokens, "<u4")
            size = len(run) // pages
            tokens[at:stop, :size] = run[: pages * size].reshape(pages, size)
            if span > size:  # bigram: the one behind is the first of the next page
                tokens[at : stop - 1, size] = tokens[at + 1 : stop, 0]
                tokens[stop - 1, size] = run[-1]
            if each.tenant:
                rows["tenant"][at:stop] = self._tenant(each.tenant)
            if each.owners:
                above = int.from_bytes(each.owners, "little")
                owners[at] = above
                owner_seqs[at] = table.seqs[above]
            else:
                assert each.namespace is not None
                owners[at] = NOBODY
                name = self._name(each.namespace, int(slots[at]))
                if name is None:
                    left_out.append(at)
                else:
                    rows["name"][at], owner_seqs[at] = name
            at = stop
        table.put(slots, seqs, rows)
        if left_out:
            self.num_unnamed += len(left_out)
            table.clear(slots[left_out])

    def _tenant(self, name: str) -> int:
        key = self._tenants.get(name)
        if key is None:
            key = self._tenants[name] = key_of(name)
        return key

    def _clear(self, absent: Absent) -> None:
        slots = np.frombuffer(absent.slots, "<i4")
        self._tables[absent.resource].clear(slots)
        if not absent.resource and self._named:
            # Only the first page of a run can be the first of its namespace.
            namespace = self._named.pop(int(slots[0]), None)
            if namespace is not None:
                held = self._refs[namespace]
                held[2] -= 1
                if not held[2]:
                    del self._refs[namespace]
                    chunks = list(self._chain(held[0]))
                    self._names.clear(np.asarray(chunks))
                    self._chunks += chunks

    def _name(self, namespace: Namespace, slot: int) -> tuple[int, int] | None:
        """Where the namespace stands, as (first chunk, sequence), now also for this slot. None: there is no room."""
        held = self._refs.get(namespace)
        if held is None:
            text = _encode_name(list(namespace))
            count = -(-len(text) // CHUNK_BYTES)
            fresh = max(0, count - len(self._chunks))
            if self._next_chunk + fresh > self.shape.num_chunks:
                return None
            chunks = [self._chunks.pop() for _ in range(count - fresh)]
            chunks += range(self._next_chunk, self._next_chunk + fresh)
            self._next_chunk += fresh
            self._last_seq += 1
            rows = np.zeros(count, _NAME)
            seqs = np.full(count, self._last_seq, np.uint64)
            rows["next"] = [*chunks[1:], -1]
            rows["size"] = -1
            rows["size"][0] = len(text)
            padded = text.ljust(count * CHUNK_BYTES, b"\0")
            rows["text"] = np.frombuffer(padded, np.uint8).reshape(count, CHUNK_BYTES)
            self._names.number(np.asarray(chunks), seqs)
            self._names.put(np.asarray(chunks), seqs, rows)
            held = self._refs[namespace] = [chunks[0], self._last_seq, 0]
        held[2] += 1
        self._named[slot] = namespace
        return held[0], held[1]

    # -- looking --------------------------------------------------------------------------------------------------

    def rows_of(self, resource: int, slots: npt.NDArray[Any]) -> Rows:
        """What it has of these slots; a sequence of 0 where that is nothing, or nothing right."""
        table = self._tables[resource]
        right = table.right(slots) & (table.seqs[slots] > self._floor)
        rows = _rows(table, slots.astype(np.int64))
        return rows._replace(seqs=np.where(right, rows.seqs, np.uint64(0)))

    def tokens_at(self, slots: npt.NDArray[Any]) -> bytes:
        """The tokens of these pages, joined as a run is."""
        tokens = self._tables[0].rows["tokens"][slots]
        size = self.shape.span - self.shape.over
        run: bytes = tokens[:, :size].tobytes() + tokens[-1, size : self.shape.span].tobytes()
        return run

    def name_at(self, slot: int) -> Namespace | None:
        """The namespace of which this slot's page is the first."""
        return self._named.get(slot)

    def num_held(self, resource: int) -> int:
        """Slots with a row."""
        return int((self._tables[resource].seqs > self._floor).sum())

    def tokens_of(self, slots: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
        """What it has of these slots' pages, [n, span]; of one without a row, anything."""
        found: npt.NDArray[np.uint32] = self._tables[0].rows["tokens"][slots, : self.shape.span]
        return found

    def namespace_of(self, slot: int) -> Namespace | None:
        """Of a first page; None: it is none, or has no row."""
        return self._named.get(slot)

    def seq_of(self, resource: int, slot: int) -> int:
        """The sequence of a slot's row, 0 if there is none. Any thread may look: it is one aligned load."""
        seq = int(self._tables[resource].seqs[slot])
        return seq if seq > self._floor else 0

    def used(self, resource: int, first: int, stop: int) -> list[int]:
        """Of the slots first..stop-1, those with a row, in order. Any thread may look."""
        found: list[int] = (np.flatnonzero(self._tables[resource].seqs[first:stop] > self._floor) + first).tolist()
        return found

    # -- sums: the scrubber's thread alone --------------------------------------------------------------------------

    def sum_of(self, resource: int, slot: int, seq: int) -> int | None:
        """What was worked out for the page that has this sequence; None: nothing yet."""
        sums = self._sums[resource]
        return int(sums.sums[slot]) if int(sums.seqs[slot]) == seq else None

    def put_sum(self, resource: int, slot: int, seq: int, value: int) -> None:
        """What its bytes, `value` of 64 bits, are from now on compared with, in this life and the next ones."""
        sums = self._sums[resource]
        sums.seqs[slot] = 0
        sums.sums[slot] = value
        sums.seqs[slot] = seq


def identity_of(*facts: Any) -> bytes:
    """Facts by which memory is known again: of the model and its pages, of the pools (by inode), of the boot."""
    return msgspec.msgpack.encode([BOOT_ID.read_text().strip() if BOOT_ID.exists() else "", *facts])


def _rows(table: _Table, places: npt.NDArray[np.int64]) -> Rows:
    rows = table.rows
    return Rows(places, table.seqs[places], rows["owner"][places].astype(np.int64), rows["owner_seq"][places])


_encode_name = msgspec.msgpack.Encoder().encode
_decode_name = msgspec.msgpack.Decoder(tuple[str | None, str | None, str | None]).decode


def slices(index: Index, book: Journal, found: list[str], max_nodes: int = 1000) -> Iterator[None]:
    """Hold the journal against the index in slices of `max_nodes`: every page that is on the host has its row and no
    other slot has one. What is wrong is appended, in words. Void if `index.revision` changed meanwhile.

    Of an index of which all that is to be noted was noted.
    """
    tree = index.tree
    told = [0] * len(book.shape.num_slots)
    seqs: dict[Node, int] = {}  # of each node's last page; 0: it has no place in the journal
    for number, node in enumerate(tree.nodes(), 1):
        parent = node.parent
        assert parent is not None
        run = node.cells[HOST]
        if run is None or node.writing >> HOST & 1:
            continue
        slots = np.frombuffer(run, "<i4")
        rows = book.rows_of(0, slots)
        if parent.parent is None:
            above, above_seq = NOBODY, int(rows.owner_seqs[0])
            if not rows.seqs[0] and book.num_unnamed:
                seqs[node] = 0
                continue
            if book.name_at(int(slots[0])) != node.space.namespace:
                found.append(f"{node!r}: the journal has it in another namespace")
        else:
            above, above_seq = int(np.frombuffer(parent.cells[HOST], "<i4")[-1]), seqs.get(parent, -1)
            if not above_seq:
                seqs[node] = 0
                continue
        seqs[node] = int(rows.seqs[-1])
        told[0] += len(slots)
        right = rows.seqs > 0
        right &= rows.owners == np.concatenate(([above], slots[:-1]))
        right &= rows.owner_seqs == np.concatenate((np.array([above_seq], np.uint64), rows.seqs[:-1]))
        if not right.all() or book.tokens_at(slots) != node.key:
            found.append(f"{node!r}: the journal has not what its host slots {slots[~right][:8].tolist()} hold")
        for resource in range(1, len(told)):
            c = resource * index.T + HOST
            if node.cells[c] is None or node.writing >> c & 1:
                continue
            held = np.frombuffer(node.cells[c], "<i4")
            told[resource] += len(held)
            owners = slots[-1:] if tree.by_end[c] else slots
            rows_ = book.rows_of(resource, held)
            wrong = (rows_.seqs == 0) | (rows_.owners != owners) | (rows_.owner_seqs != rows.seqs[-len(owners) :])
            if wrong.any():
                found.append(f"{node!r}: the journal has not what its slots {held[wrong][:8].tolist()} of {c} hold")
        if number % max_nodes == 0:
            yield
    for resource, count in enumerate(told):
        if (rows_held := book.num_held(resource)) != count and not book.num_unnamed:
            found.append(f"the journal has {rows_held} rows of resource {resource}, and {count} slots hold something")
