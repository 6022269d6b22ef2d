"""What the core wants done. It does nothing itself: effects leave by one queue, in the order of the world."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sglcache.core.journal import Entry
from sglcache.core.key import Namespace
from sglcache.errors import SglcacheError
from sglcache.units import LeaseId, Seq, SessionId, TicketId, Tier


class Part(NamedTuple):
    """What a copy takes of a companion; slots as a Copy's."""

    resource: str
    src_slots: bytes  # int32 [n]
    dst_slots: bytes  # int32 [n]


class Copy(NamedTuple):
    """Copy pages between two tiers, every shard of them; then call `Index.copy_done(ticket, ok)`, once for all of it.

    Copies of one direction complete in the order they were queued. `src_slots` and `dst_slots` are page
    slots of the source and target pool, packed int32, of equal length, free of repeats; with companions' `more`
    there may be none.
    """

    ticket: TicketId
    resource: str
    src: Tier
    dst: Tier
    src_slots: bytes  # int32 [n]
    dst_slots: bytes  # int32 [n]
    lease: LeaseId | None  # the lease whose host hit is loaded; None for a write-through
    more: tuple[Part, ...] = ()  # of companions: of a load they are there before its first layer


class Journal(NamedTuple):
    """Note this of the host tier, before any other effect of the same drain is carried out."""

    entries: list[Entry]


class Run(NamedTuple):
    """Neighbouring pages of one namespace, as L3 knows them."""

    namespace: Namespace
    before: bytes | None  # digest of the page before the first; None: the first is the first of its namespace
    digests: bytes  # joined
    tokens: bytes  # uint32 of all pages; with bigram keys one more token behind (see `Keys`)


class Store(NamedTuple):
    """Put host pages into L3, from their slots; then call `Index.stored`."""

    ticket: TicketId
    run: Run
    slots: bytes  # int32 [n], of the host pool


class Probe(NamedTuple):
    """Find out how many leading pages L3 has; then call `Index.probed`."""

    ticket: TicketId
    run: Run


class Fetch(NamedTuple):
    """Read pages out of L3 into host slots; then, when no byte of it moves any more, call `Index.fetched`."""

    ticket: TicketId
    run: Run
    slots: bytes  # int32 [n], of the host pool


class Cancel(NamedTuple):
    """Let a probe or a fetch end soon: nobody waits for it."""

    ticket: TicketId


class Publish(NamedTuple):
    """One encoded batch of the event stream, numbered."""

    seq: Seq
    payload: bytes
    num_events: int
    num_blocks: int  # stored and removed together


class Share(NamedTuple):
    """What a lease has of a companion.

    By page (a window): `slots` are of the lease's pages from `first` on, to the end of its table. By end (a state):
    they are its own, which it may write, and from `source` it reads, and no more, the state with which its match ends.
    """

    resource: str
    first: int  # by page: a page of the lease's table; by end: 0
    slots: bytes  # int32 [n], of the device
    source: int | None = None  # by end; None: there is none, it begins with nothing


class Grant(NamedTuple):
    """The answer to acquire.

    `slots[i]` is where page i of the lease's tokens lives on the device: the hit first, then what is being
    loaded from the host, then fresh pages.
    """

    lease: LeaseId
    matched_tokens: int  # served from the device and the host together; a multiple of the page size
    host_tokens: int  # of them, those that come from the host: readable once the load's events are done
    slots: bytes  # int32 [num_pages], the whole page table
    load: TicketId | None  # the load-back's ticket where host_tokens > 0
    shares: tuple[Share, ...] = ()  # of each companion
    reaches: tuple[int, ...] = ()  # tokens that Full would match, then each companion with it; the match is of all


class Extended(NamedTuple):
    """The answer to extend: what became of each of its items, in their order.

    Bytes: it took effect, and these are the slots of its new pages, int32, to be put at the end of its lease's page
    table; there may be none. An error: nothing of this item did.
    """

    results: list[bytes | SglcacheError]
    shares: Sequence[tuple[bytes, ...]] = ()  # with companions: the new slots of each, for each item; () for an error


class Committed(NamedTuple):
    """The answer to commit, given when it took effect.

    From `first_page` on, `slots` are the canonical pages, or nothing where the lease's own are: where one
    differs, use the canonical one from now on; the own one stays yours until a command that was sent after you
    read this (its `seen` is at least `reply`) is done.
    """

    lease: LeaseId
    committed_tokens: int
    first_page: int
    slots: bytes  # int32 [n], canonical, for pages first_page..first_page+n-1; empty: all are as they were
    num_duplicates: int
    reply: int  # this answer's number in its session, from 1
    shares: tuple[Share, ...] = ()  # as they are now; by page: no slots where all that are left are as they were


class Released(NamedTuple):
    """The answer to release and cancel, given when the last use was over and everything was given back."""

    lease: LeaseId


class Prefetched(NamedTuple):
    """The answer to prefetch, given when what L3 has is on the host, or will not be."""

    matched_tokens: int  # that a match would find now
    fetched_tokens: int  # of them, those that came from L3


Result = Grant | Extended | Committed | Released | Prefetched | SglcacheError


class Wake(NamedTuple):
    """Answer the request `request` of the session: it waited for an event, a copy or room."""

    session: SessionId
    request: int
    result: Result


Effect = Copy | Journal | Publish | Wake | Store | Probe | Fetch | Cancel
