"""What `hybrid` compares an index with: what is present, expanded to pages; what a match is; what runners have.

Nothing here knows a tree. A page is named by its namespace and all tokens up to its end, a state by the last page of
what it is the state of.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sglcache.core.index import Index
from sglcache.core.key import Namespace
from sglcache.testing.pages import Book, Page, ancestry
from sglcache.units import SessionId

FULL = 0  # the first resource
DEVICE, HOST = 0, 1  # tiers
Places = dict[Page, int]  # what is present -> its slot


def unpack(slots: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(slots) // 4}i", slots))


def pack(tokens: Iterable[int]) -> bytes:
    ids = list(tokens)
    return struct.pack(f"<{len(ids)}I", *ids)


class Kind(NamedTuple):
    """A resource as the model needs it."""

    name: str
    by_end: bool
    window: int  # pages; of what is by end, nothing
    total: tuple[int, int]  # slots by tier


# -- what there is ----------------------------------------------------------------------------------------------------


@dataclass
class Shown:
    """A node, expanded to pages."""

    pages: tuple[Page, ...]
    present: tuple[bool, ...]  # by cell, ready or on its way
    locks: tuple[int, ...]  # by cell
    writing: bool
    is_leaf: bool = True


@dataclass
class Seen:
    """Everything that is present, by cell; see `core` for their numbers. A state is where its last page is."""

    ready: list[Places]
    writing: list[Places]
    locked: list[set[Page]]
    nodes: list[Shown]

    def unlocked(self, c: int) -> set[Page]:
        """What could be evicted."""
        return self.ready[c].keys() - self.locked[c]


Known = dict[tuple[Namespace | Page, bytes], tuple[Page, ...]]  # by what is before it, and its tokens


def look(index: Index, book: Book, kinds: Sequence[Kind], num_tiers: int, known: Known) -> Seen:
    """The one look behind the index's face. `known`: the pages of nodes that were seen before."""
    cells = len(kinds) * num_tiers
    seen = Seen([{} for _ in range(cells)], [{} for _ in range(cells)], [set() for _ in range(cells)], [])
    last: dict[object, tuple[Page, Shown]] = {}
    for node in index.tree.nodes():
        above = last.get(node.parent)
        name = (above[0] if above else node.space.namespace, node.key)
        pages = known.get(name)
        if pages is None:
            pages = known[name] = book.path(node.space.namespace, node.key, above[0] if above else None)
        shown = Shown(
            pages,
            tuple(node.cells[c] is not None for c in range(cells)),
            tuple(node.cells[cells + c] for c in range(cells)),
            node.writing != 0,
        )
        if above:
            above[1].is_leaf = False
        last[node] = pages[-1], shown
        seen.nodes.append(shown)
        for c in range(cells):
            if node.cells[c] is None:
                continue
            slots = unpack(node.cells[c])
            names = pages[-1:] if kinds[c // num_tiers].by_end else pages
            assert len(slots) == len(names), f"{node!r}, cell {c}: {len(slots)} slots for {len(names)}"
            places = seen.writing[c] if node.writing >> c & 1 else seen.ready[c]
            for page, slot in zip(names, slots, strict=True):
                assert page not in places, f"{page} is in two nodes"
                places[page] = slot
            if node.cells[cells + c]:
                seen.locked[c].update(names)
    return seen


# -- what a match is --------------------------------------------------------------------------------------------------


class Reached(NamedTuple):
    """In pages."""

    matched: int  # where all agree, on the device and the host together
    device: int  # where all agree, on the device alone
    on_device: int  # pages of Full on the device, of the path
    reaches: tuple[int, ...]  # Full alone, then each companion with Full


class Oracle:
    """What a match is, by the rule of each resource as it is written down, page by page."""

    def __init__(self, kinds: Sequence[Kind], num_tiers: int) -> None:
        self.kinds = kinds
        self.num_tiers = num_tiers

    def has(self, seen: Seen, r: int, page: Page, tiers: Sequence[int]) -> bool:
        return any(page in seen.ready[r * self.num_tiers + t] for t in tiers)

    def may_end(self, seen: Seen, r: int, path: Sequence[Page], n: int, tiers: Sequence[int]) -> bool:
        """Whether companion r lets a match end behind n pages."""
        kind = self.kinds[r]
        first = n - 1 if kind.by_end else n - min(kind.window, n)
        return all(self.has(seen, r, page, tiers) for page in path[max(0, first) : n])

    def reach(self, seen: Seen, path: Sequence[Page]) -> Reached:
        tiers = range(self.num_tiers)
        companions = range(1, len(self.kinds))
        on_device = 0
        while on_device < len(path) and path[on_device] in seen.ready[FULL]:
            on_device += 1
        full = on_device
        while full < len(path) and self.has(seen, FULL, path[full], tiers[HOST:]):
            full += 1

        def longest(most: int, which: Iterable[int], tiers: Sequence[int]) -> int:
            return max(n for n in range(most + 1) if all(self.may_end(seen, r, path, n, tiers) for r in which))

        return Reached(
            longest(full, companions, tiers),
            longest(on_device, companions, [DEVICE]),
            on_device,
            (full, *(longest(full, [r], tiers) for r in companions)) if companions else (),
        )

    def is_useful(self, seen: Seen, node: Shown) -> bool:
        """Whether a match can end in this node."""
        path = ancestry(node.pages[-1])
        tiers = range(self.num_tiers)
        return any(
            all(self.may_end(seen, r, path, n, tiers) for r in range(1, len(self.kinds)))
            for n in range(len(path) - len(node.pages) + 1, len(path) + 1)
        )


# -- what runners have ------------------------------------------------------------------------------------------------


class End(NamedTuple):
    """A state that a commit brings."""

    resource: int
    pages: int  # of which it is the state
    slot: int


@dataclass(eq=False)
class Sent:
    """A commit or release, in its session's order."""

    lease: Lease
    ticket: int
    request: int
    release: bool
    pages: int = 0  # of a commit
    ends: tuple[End, ...] = ()
    floor: int | None = None  # tokens
    seen: int = 0
    discard: bool = False
    issued: bool = False
    dropped: bool = False  # a commit that a discarding release overtook
    done: set[int] = field(default_factory=set)  # shards

    def __repr__(self) -> str:
        what = "release" if self.release else f"commit of {self.pages} pages, states {self.ends}, floor {self.floor}"
        return f"<{what}, ticket {self.ticket} of lease {self.lease.number}, sent {self.issued}, done {self.done}>"


class Duplicate(NamedTuple):
    """A slot of a lease's own that the tree did not want; the runner may still read it."""

    resource: int
    slot: int
    page: Page


@dataclass(eq=False)
class Lease:
    """What a runner holds, as it knows it itself."""

    runner: Runner
    namespace: Namespace
    tokens: bytes
    path: tuple[Page, ...]
    matched: int
    on_device: int  # pages of Full that the match found there
    need: list[int]  # by resource: slots of its own that it needs for a grant
    there: list[set[Page]]  # by resource: of what the match needs, what was on the device
    reaches: tuple[int, ...]  # tokens
    from_device: int  # pages that would match without a load
    number: int = 0
    waiting: bool = False
    views: list[dict[int, int]] = field(default_factory=list)  # by resource, if by page: page of the table -> slot
    filled: list[set[int]] = field(default_factory=list)  # of these, which have their bytes
    num_pages: int = 0
    first: list[int] = field(default_factory=list)  # by resource: the first page of the view
    states: list[list[int]] = field(default_factory=list)  # by resource, if by end: its own
    sources: list[int | None] = field(default_factory=list)
    own: list[set[int]] = field(default_factory=list)  # by resource: what it must give back
    committed: int = 0  # pages
    told: int = 0  # of them, those whose canonical slots it knows
    computed: int = 0  # pages that have their bytes
    load: int | None = None
    loading: list[dict[int, int]] = field(default_factory=list)  # by resource: page -> slot that the load brings
    broken: bool = False
    duplicates: dict[Duplicate, int] = field(default_factory=dict)  # -> the reply that told of it, 0: none yet
    extending: Waits | None = None
    release: Sent | None = None
    cancelling: int | None = None
    stopped: set[int] = field(default_factory=set)  # shards that touch it no more
    over: bool = False

    def __repr__(self) -> str:
        return f"<lease {self.number}: {self.committed} of {self.num_pages} pages committed, matched {self.matched}>"


class Pinned(NamedTuple):
    owner: str
    until: float
    path: tuple[Page, ...]  # that matched


@dataclass(eq=False)
class Runner:
    id: SessionId
    shards: int
    next_ticket: int = 1
    read: int = 0
    replies: int = 0
    planned: list[Sent] = field(default_factory=list)  # has a ticket, is not sent
    items: list[Sent] = field(default_factory=list)  # have not taken effect
    leases: list[Lease] = field(default_factory=list)
    pins: list[Pinned] = field(default_factory=list)
    ended: bool = False
    gone: set[int] = field(default_factory=set)


@dataclass(eq=False)
class Growing:
    lease: Lease
    tokens: bytes
    need: list[int]


@dataclass(eq=False)
class Waits:
    """An acquire or extend that has no answer yet."""

    request: int
    lease: Lease | None = None
    items: list[Growing] = field(default_factory=list)
    promised: list[Growing] = field(default_factory=list)  # of these, those that room may be kept for


class Moved(NamedTuple):
    """What a copy moves of one resource."""

    resource: int
    names: tuple[Page, ...]
    source: list[int]
    target: list[int]


@dataclass(eq=False)
class Copying:
    ticket: int
    to_host: bool
    parts: list[Moved]
    lease: Lease | None
    ok: bool | None = None
    cancelled: bool = False
