"""What left, when, and for whom room was made: bounded memory of the index for those who ask why (see `explain`).

An entry is of a run of pages that left a cell at once, and names it as everything in the core does: (end node, pages).
That stays exact whatever becomes of the tree. A split leaves the end with the tail. A node that was joined to
another says where its end is in that (`Node.was`: the other, and bytes before its end), and one that left the tree what
it hung on, and keeps its tokens. So a run of the past is compared with a prompt token by token up to the root
(`Trace`), never by a hash. A clear of the whole tree ends all that.

Bounded by number, and in bytes by what nodes that left keep. Entries go in the order in which they came, and a node
leaves before what it hangs on: so whatever an entry needs is there while it is.

Where it is off there is none of this: no node has `was`, and nothing is called.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sglcache.core.tree import Node

if TYPE_CHECKING:
    from sglcache.core.index import Index
    from sglcache.core.key import Namespace
    from sglcache.core.leases import Ticket
    from sglcache.units import TicketId

ENTRY_BYTES = 512  # what an entry and its node take beside tokens and digests, about
MAX_NOTES = 1024


class Cause(NamedTuple):
    """For whom room was made."""

    what: str  # acquire, extend, backup, prefetch, ceiling, or nothing
    session: int | None = None
    tenant: int = 0


NOBODY = Cause("")


class Departure(NamedTuple):
    """So many pages, up to the end of `node`, left a cell."""

    number: int  # rises by one
    at: float  # seconds, on the index's clock; likewise below
    cell: int
    reason: str  # evicted, cleared, pruned (of no use any more), corrupt
    node: Node
    num_pages: int
    born: float
    used: float
    hits: int | None  # None: nobody counts them
    kept: bool  # the other tier had them
    cause: Cause
    payer: int  # the tenant that was charged with them
    num_bytes: int  # that this entry keeps


class Note(NamedTuple):
    """So many pages, up to the end of `node`, were to be copied to the host, and were not."""

    number: int  # of departures before it
    at: float
    why: str  # no_room, failed
    node: Node
    num_pages: int


class Departures:
    """Those of one index."""

    def __init__(self, index: Index, count: int, num_bytes: int) -> None:
        """At most `count` entries, which keep `num_bytes` of nodes that left at most."""
        self._index = index
        self.count = count
        self.max_bytes = num_bytes
        self.entries: deque[Departure] = deque()
        self.notes: deque[Note] = deque(maxlen=min(count, MAX_NOTES))
        self.num_bytes = 0
        self.total = 0  # so far
        self.cause = NOBODY  # of what leaves now
        self.causes: dict[TicketId, Cause] = {}  # of what leaves at the end of a copy
        self.begun = index.now  # what was there before is not known
        self.cleared_at: float | None = None  # that was by a clear of all
        self.forgot_at: float | None = None  # when the last one left that is no longer among the entries

    def left(self, node: Node, c: int, num_pages: int, reason: str, kept: bool, payer: int = 0) -> None:
        """A cell of `node` is gone. Call it before the node leaves the tree, which it does if its last one is gone."""
        index = self._index
        cells, facts = node.cells, index.tree.facts
        num_bytes = ENTRY_BYTES
        if c < index.T and not kept:
            assert node.parent is not None
            node.was = node.parent
            num_bytes += node.num_bytes + (len(node.hashes) if isinstance(node.hashes, bytes) else 0)
        self.total += 1
        self.num_bytes += num_bytes
        self.entries.append(
            Departure(
                self.total,
                index.now,
                c,
                reason,
                node,
                num_pages,
                node.born,
                node.used,
                cells[facts.hits] if facts.hits else None,
                kept,
                self.cause if reason == "evicted" else NOBODY,
                payer,
                num_bytes,
            )
        )
        while len(self.entries) > self.count or self.num_bytes > self.max_bytes:
            oldest = self.entries.popleft()
            self.num_bytes -= oldest.num_bytes
            self.forgot_at = oldest.at

    def not_copied(self, why: str, end: Node, num_pages: int) -> None:
        self.notes.append(Note(self.total, self._index.now, why, end, num_pages))

    def sent(self, ticket: Ticket) -> None:
        """What leaves with the end of this copy does so for whom room is made now."""
        self.causes[ticket.id] = self.cause

    def copied(self, ticket: Ticket) -> None:
        self.cause = self.causes.pop(ticket.id, NOBODY)

    def cleared(self) -> None:
        """The whole tree was dropped, and with it what entries hang on."""
        self.entries.clear()
        self.notes.clear()
        self.num_bytes = 0
        self.begun = self.cleared_at = self._index.now
        self.forgot_at = None

    @property
    def known_since(self) -> float:
        """Whatever left after that is among the entries."""
        return self.begun if self.forgot_at is None else self.forgot_at


class Trace:
    """Where nodes, of the tree and of the past, lie on a prompt; all in bytes of its tokens.

    Walk the entries from the newest to the oldest: what a node hung on left after it, and so is met before it. The tree
    may change meanwhile; where nodes were joined, `live` is to be told the match anew.
    """

    def __init__(self, index: Index, namespace: Namespace, tokens: bytes, end: int) -> None:
        """`end`: of its whole pages."""
        self._index = index
        self._namespace = namespace
        self._tokens = tokens
        self._end = end
        self._spans: dict[Node, tuple[int, int]] = {}  # a node's end, and how far it agrees with the prompt
        self._beside: set[Node] = set()  # left the tree, and are no part of the prompt

    def live(self, path: Sequence[Node], partial: Node | None, at: int) -> None:
        """What a match of the prompt in the tree has found."""
        depth = 0
        for node in path:
            depth += node.num_bytes
            self._spans[node] = depth, depth
        if partial is not None:
            self._spans[partial] = depth + partial.num_bytes, depth + at

    def range_of(self, node: Node, num_pages: int) -> tuple[int, int] | None:
        """Which part of the prompt the last `num_pages` up to the end of a node are; None: no part of it."""
        where = _stands(node)
        left = num_pages * self._index.page_bytes
        past = 0  # the run's end, seen from the end of the node that is looked at
        while where is not None:
            up, distance = where
            past -= distance
            if (span := self._span(up)) is not None:
                end = span[0] + past
                start, end = end - left, min(end, span[1])
                return (start, end) if start < end else None
            past += up.num_bytes
            if past >= left:
                return None
            where = _above(up)
        return None

    def at(self, node: Node, distance: int) -> int | None:
        """Where the place so many bytes before a node's end is on the prompt; None: nowhere."""
        where = _stands(node)
        while where is not None:
            up, before = where
            distance += before
            if (span := self._span(up)) is not None:
                place = span[0] - distance
                return place if place <= span[1] else None
            if distance < up.num_bytes:
                return None
            distance -= up.num_bytes
            where = _above(up)
        return None

    def _span(self, node: Node) -> tuple[int, int] | None:
        """Of one that left the tree it is found out once."""
        found = self._spans.get(node)
        if found is not None or node.parent is not None or node in self._beside:
            return found
        above = node.was
        assert not isinstance(above, tuple)
        place = self.at(above, 0) if above.num_bytes else 0
        span = self._index.tree.span
        if (
            place is not None
            and place < self._end
            and self._tokens.startswith(node.first(span), place)  # which says no of most
            and node.space.namespace == self._namespace
        ):
            same = self._index.tree.common_pages(node.key, self._tokens, place, self._end)
            if same:
                found = self._spans[node] = place + node.num_bytes, place + same
                return found
        self._beside.add(node)
        return None


def _stands(node: Node) -> tuple[Node, int] | None:
    """A node that is in the tree, or was when it left, and how many bytes before its end the end of `node` is; None: it
    is a root, or its tree was dropped."""
    distance = 0
    while node.parent is None:
        was = getattr(node, "was", None)
        if was is None:
            return None
        if not isinstance(was, tuple):
            break
        node = was[0]
        distance += was[1]
    return node, distance


def _above(node: Node) -> tuple[Node, int] | None:
    """The same of what such a node hangs on, or hung on."""
    if node.parent is not None:
        return _stands(node.parent)
    assert not isinstance(node.was, tuple)
    return _stands(node.was)


def backwards(found: Sequence[Departure], slice: int) -> Iterator[list[Departure]]:
    """From the newest, so many at a time."""
    for stop in range(len(found), 0, -slice):
        yield list(reversed(found[max(0, stop - slice) : stop]))
