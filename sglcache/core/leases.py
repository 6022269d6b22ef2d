"""Who holds what: sessions, their leases and tickets, and pins. Plain records; `index.py` moves them.

A lease goes one way: (waiting for room) → live → releasing → gone, or at any point, when its session ends,
→ fenced → gone. What it owns is counted in the device pool as leased, from the session's end on as fenced; it comes
back in one place (`Index._give_back`), exactly once, whichever way led there (law 9).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from sglcache.core.key import Namespace
from sglcache.core.slots import SLOT_BYTES
from sglcache.core.tree import Node
from sglcache.errors import SessionEnded
from sglcache.units import LeaseId, SessionId, TicketId, Tier

if TYPE_CHECKING:
    from sglcache.core.reuse import Run


class ByPage:
    """What a lease has of a companion by page: slots of its pages from `first` on, and locks on those of the tree."""

    __slots__ = ("duplicates", "ends", "first", "host_pages", "needless", "owned", "pinned", "renamed", "slots")

    def __init__(self, first: int) -> None:
        self.first = first
        self.slots = bytearray()  # int32, of pages first.. to the end of the lease's table
        self.owned: list[tuple[int, int]] = []  # ranges of pages whose slots are the lease's, in order
        self.pinned = first  # pages from here on, as far as the lease has committed, are locked on the device
        self.host_pages = 0  # and so many up to `host_node` on the host
        self.duplicates: list[tuple[int, bytes]] = []  # as a Lease's
        self.renamed = False
        self.needless = first  # pages from here on that were let go of are of no use to a match
        self.ends: tuple[int, ...] = ()  # pages: of the match, and of what Full alone would have matched

    def span(self, start: int, stop: int) -> bytes:
        """The slots of these pages."""
        return bytes(self.slots[(start - self.first) * SLOT_BYTES : (stop - self.first) * SLOT_BYTES])

    @property
    def own(self) -> bytes:
        """Every slot that is the lease's and not the tree's."""
        return b"".join([*[self.span(*each) for each in self.owned], *[slots for _, slots in self.duplicates]])


class ByEnd:
    """What a lease has of a companion by end: slots of its own, and a lock on the one with which its match ended."""

    __slots__ = ("host_source", "loading", "slots", "source")

    def __init__(self) -> None:
        self.slots = bytearray()  # int32
        self.source: Node | None = None  # locked on the device
        self.host_source: Node | None = None  # and on the host
        self.loading = b""  # the slot of a source that comes from the host, until it is the tree's

    @property
    def own(self) -> bytes:
        """Every slot that is the lease's and not the tree's."""
        return bytes(self.slots) + self.loading


class Lease:
    """A runner's claim on a page table: a pinned cached prefix, then pages of its own.

    The table may end before the tokens do: what lies beyond it has no page yet.
    """

    # What a lease begins with; an instance holds only what differs.
    session_id: str | None = None  # of the request, for the events; nothing else looks at it
    priority = 0  # of the request, for the policies of eviction that ask for it
    tenant = 0  # who is charged with its pages: see `tenants`
    counted: Node | None = None  # where the part of its path ends that has been told that it was used
    slots: bytes | bytearray = b""  # int32 [num_pages]: the page table as the runner last heard it
    node: Node | None = None  # where the device pin ends, `committed` pages deep; None: at the root
    host_node: Node | None = None  # where the host pin ends
    committed = 0  # pages from here on are the lease's own
    reported = 0  # pages whose canonical slots the runner knows
    renamed = False  # the tree's pages stand in `slots` where the runner still knows its own
    load: Ticket | None = None
    failed = False  # the load-back went wrong: what was computed on it must not be committed
    waiting = False  # for room: it has a pin and no page yet
    extending = False  # for room for more of them
    releasing = False
    cancelling: int | None = None  # the request that is answered when the load-back is over and all is given back
    parts: Sequence[ByPage | ByEnd] = ()  # of each companion
    from_device = 0  # tokens that it would have matched without a load
    reaches: tuple[int, ...] = ()  # see `Grant`
    reuse: Run | None = None  # who follows its pages; nothing here looks at it
    _base = 0  # the byte of the sequence with which `_tokens` begins
    _more: list[bytes] | None = None

    def __init__(self, id: LeaseId, session: Session, namespace: Namespace, tokens: bytes) -> None:
        self.id = id
        self.session = session
        self.namespace = namespace
        self._tokens = tokens
        self.num_bytes = len(tokens)
        self.duplicates: list[tuple[int, bytes]] = []  # (number of the reply that named better ones, slots)

    def text(self, start: int) -> tuple[bytes, int]:
        """The tokens from byte `start` of the sequence on: uint32 little-endian, and where in it they begin.

        What is before them is not asked for again, and may be left out: else a prompt that is committed chunk by chunk
        would be copied as often.
        """
        if self._more:
            self._tokens = b"".join([self._tokens[start - self._base :], *self._more])
            self._base = start
            self._more = None
        return self._tokens, start - self._base

    def since(self, start: int) -> bytes | None:
        """The tokens from byte `start` on, without letting go of any; None: some of them were let go of."""
        if start < self._base:
            return None
        return b"".join([self._tokens[start - self._base :], *(self._more or ())])

    def append(self, tokens: bytes) -> None:
        """More tokens, joined when someone asks: decoding brings one a step, and a long context isn't copied for it."""
        if tokens:
            if self._more is None:
                self._more = []
            self._more.append(tokens)
            self.num_bytes += len(tokens)

    def append_slots(self, slots: bytes) -> None:
        """More pages; the table is copied for the first of them, and not for each."""
        if type(self.slots) is bytes:
            self.slots = bytearray(self.slots)
        self.slots += slots

    @property
    def num_pages(self) -> int:
        return len(self.slots) // SLOT_BYTES

    @property
    def own_slots(self) -> bytes:
        """Every slot that the lease owns and the tree does not."""
        own = bytes(self.slots[self.committed * SLOT_BYTES :])
        return b"".join([own, *[slots for _, slots in self.duplicates]]) if self.duplicates else own

    def __repr__(self) -> str:
        return f"Lease({self.id}, {self.num_bytes // 4} tokens, {self.committed} of {self.num_pages} pages committed)"


class Operation:
    """A commit or release that waits for its ticket, in its session's order."""

    __slots__ = ("ends", "floor", "lease", "num_pages", "release", "request", "seen", "ticket")

    # Of a commit where there are companions, and not set elsewhere:
    ends: Sequence[tuple[int, int, bytes]]  # (companion, pages, the slot with the state of that end)
    floor: int  # pages of companions before it are not given to the tree

    def __init__(
        self, request: int | None, lease: Lease | None, ticket: int, seen: int, num_pages: int, release: bool
    ) -> None:
        self.request = request  # None: nobody is told
        self.lease = lease  # None: it was discarded, and only its ticket is waited for
        self.ticket = ticket
        self.seen = seen
        self.num_pages = num_pages
        self.release = release


class Session:
    """One runner: a scheduler's commands in order, and `num_shards` members whose events complete them."""

    __slots__ = (
        "all_shards",
        "ended",
        "events",
        "gone",
        "id",
        "last_done",
        "last_ticket",
        "leases",
        "num_replies",
        "pins",
        "queue",
        "why",
        "with_duplicates",
    )

    def __init__(self, id: SessionId, num_shards: int) -> None:
        self.id = id
        self.all_shards = (1 << num_shards) - 1
        self.events: dict[int, int] = {}  # ticket → mask of the shards whose event is done
        self.last_ticket = -1  # the highest number sent
        self.last_done = -1  # the highest number applied
        self.queue: deque[Operation] = deque()
        self.leases: dict[LeaseId, Lease] = {}
        self.with_duplicates: dict[LeaseId, Lease] = {}
        self.pins: dict[str, list[Pin]] = {}
        self.num_replies = 0
        self.ended = False
        self.why = ""  # it ended
        self.gone = 0  # mask of the shards whose uses are over for good

    def over(self) -> SessionEnded:
        """What whoever asks for something gets once it has ended."""
        return SessionEnded(f"the session ended: {self.why}; reattach()", session=self.id)


class Pin(NamedTuple):
    """What an owner keeps from eviction until `expires_at`, on the caller's clock."""

    nodes: tuple[Node | None, ...]  # per tier, where the pin ends
    expires_at: float
    num_pages: int
    places: tuple[tuple[int, Node, int], ...] = ()  # of companions: cell, where it ends, bytes


class Ticket:
    """A copy of ours on its way. It pins both tiers' paths; `end` and `num_pages` name the range that was sent."""

    __slots__ = (
        "cancelled",
        "demote",
        "demoted",
        "depth",
        "dst",
        "end",
        "fenced",
        "fenced_more",
        "id",
        "kept",
        "lease",
        "num_pages",
        "ok",
        "ranges",
    )

    def __init__(self, id: TicketId, dst: Tier, end: Node | None, num_pages: int, lease: Lease | None) -> None:
        self.id = id
        self.dst = dst
        self.end = end
        self.num_pages = num_pages
        self.lease = lease
        self.ok: bool | None = None  # the ack, once it came
        self.cancelled = False
        self.demote = 0  # pages, the last of them, that leave the device when it is over
        # Of a companion: cell, node, bytes of its path and slots that leave the device when it is over.
        self.demoted: tuple[int, Node, int, int] | None = None
        self.fenced = b""  # target slots of a cancelled copy that is still being written
        self.depth = 0  # bytes from the root to the end; known where there are ranges
        self.ranges: Sequence[tuple[int, int, int]] = ()  # of companions: (host cell, from, to), bytes from the root
        self.kept: Sequence[tuple[int, Node, int]] = ()  # of a cancelled one: (device cell, end, bytes) that it reads
        self.fenced_more: Sequence[tuple[int, bytes]] = ()  # (host cell, slots), as `fenced`
