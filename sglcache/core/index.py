"""The index: every command of the daemon, and what follows from it. Start here.

Sans-IO and single-threaded (laws 1 to 3): commands are method calls, results are returned or leave as `Wake`, and
what is to be done in the world leaves through `drain`. Around it: `tree` (nodes), `eviction` (locks, who goes first),
`slots` (free lists and counts), `leases` (who holds what), `eventlog` (what routers are told), `invariants`
(the proof).

Presence of a page in a tier changes in `change` and nowhere else, and `change` is what emits (law 5).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from mypy_extensions import mypyc_attr

from sglcache.core import hashing, journal
from sglcache.core.companions import PRUNED, Companions, Need
from sglcache.core.departures import Cause, Departures
from sglcache.core.effects import (
    Committed,
    Copy,
    Effect,
    Extended,
    Grant,
    Journal,
    Part,
    Prefetched,
    Publish,
    Released,
    Result,
    Run,
    Share,
    Wake,
)
from sglcache.core.encoding import PLAIN, Extras, Format
from sglcache.core.eventlog import EventLog
from sglcache.core.eviction import LRU, Policy
from sglcache.core.histograms import AGES, Histogram
from sglcache.core.key import ROOT, TOKEN_BYTES, Keys, Namespace
from sglcache.core.l3 import FOR_EVER, L3, L3Config, Waiter
from sglcache.core.leases import Lease, Operation, Pin, Session, Ticket
from sglcache.core.limits import Limits
from sglcache.core.line import Line, Patience, Standing
from sglcache.core.resources import Companion, Full, Resource
from sglcache.core.shares import Shared
from sglcache.core.slots import SLOT_BYTES, SlotPool
from sglcache.core.snapshot import Snapshot
from sglcache.core.tenants import NO_COPIES, NOBODY, Copied, Tally, Tenants, TenantStats
from sglcache.core.tiering import WRITE_THROUGH, Backups, WritePolicy
from sglcache.core.tree import Node, Space, Tree
from sglcache.errors import (
    BadRequest,
    Busy,
    Cancelled,
    Changed,
    NoSpace,
    SglcacheError,
    TransferError,
    UnknownLease,
    UnknownSession,
)
from sglcache.units import LeaseId, SessionId, TicketId, Tier
from sglcache.wire.control import Extension

_new = tuple.__new__  # of what every request is answered with: a NamedTuple's own is a Python function around this
DEVICE: Final = 0  # Full's cells have their tiers' numbers; a companion's are T, 2T, ... further on, T tiers each
HOST: Final = 1
TIERS = tuple(Tier)
MAX_EVENTS_AHEAD = 1 << 16  # tickets reported done before their command came
STALE_EVENTS = 256
MERGE_LIMIT = 16  # nodes joined by one command
NUM_HOLDERS = 5  # sessions that a refusal names


@dataclass(frozen=True)
class IndexConfig:
    """What an index is built for. Sizes are in pages; `page_size` is tokens in a page."""

    page_size: int
    num_pages: int
    host_pages: int = 0  # 0: one tier
    host_ready: int | None = None  # of them, how many may be used at first; None: all
    hash_name: str = "xxh3_128"
    events: bool = True
    first_seq: int = 1
    rank: int = 0
    max_batch_blocks: int = 4096
    format: Format = PLAIN  # of the events
    bigram: bool = False  # see `Keys`
    eviction: Policy = LRU  # which pages of the device go first
    host_eviction: Policy = LRU
    write_policy: WritePolicy = WRITE_THROUGH  # what is copied to the host, and when
    load_back_threshold: int = 0  # tokens: a host hit of fewer is computed again
    load_back_quota: int = 0  # pages that may be on their way from the host at once; 0: as many as there are
    l3: L3Config | None = None  # below the host; it needs one, and no companions
    companions: tuple[Companion, ...] = ()  # resources beside Full
    journal: bool = False  # tell a journal of the host tier
    tenants: Mapping[str, Limits] | None = None  # by name; None: there are none, and nobody's name matters
    max_waiting: int = 1024  # commands that may wait for room, in all
    max_waiting_of_session: int = 256
    max_leases: int = 1 << 24  # of one session
    max_pinned_fraction: float = 1.0  # of a tier's pages, that pins may keep from eviction
    max_pins: int = 1 << 16  # of one session
    evict_slice: int = 500  # victims of lru that a call may take, a third of others': 1 ms, 2 where memory is cold
    now: float = 0.0  # see `Index.now`
    departures: int = 0  # runs of pages that left a tier, and are remembered for `explain`
    departed_bytes: int = 64 << 20  # of tokens and digests, that these keep
    cut_slice: int = 15_000  # units of about 0.1 µs that a cut may take at once: 2 ms


class Peeked(NamedTuple):
    """How far a match would reach."""

    device_tokens: int
    matched_tokens: int  # device and host together
    reaches: tuple[int, ...] = ()  # with companions: see `Grant`


class PoolStats(NamedTuple):
    """One (resource, tier), in slots: free + fenced + leased + cached == total; locked is part of cached."""

    resource: str
    tier: Tier
    total: int
    free: int
    fenced: int
    leased: int
    cached: int
    locked: int


class IndexStats(NamedTuple):
    """Gauges now, and counters since the start."""

    pools: list[PoolStats]
    num_nodes: int
    num_spaces: int
    num_sessions: int
    num_leases: int
    num_fenced_leases: int
    num_waiting: int
    num_copies: int
    pinned_pages: int
    counters: dict[str, int]
    tenants: Sequence[TenantStats] = ()


class DumpedNode(NamedTuple):
    """One node as `walk` tells of it."""

    namespace: Namespace
    parent_digest: bytes | None
    tokens: bytes  # and with bigram keys the one behind them
    digests: bytes  # joined
    tiers: tuple[Tier, ...]  # where all of its pages are


# The nodes that agree with a key whole, the one that agrees in part, and in how many bytes.
Match = tuple[list[Node], Node | None, int]


class Whereabouts(NamedTuple):
    """What a slot holds."""

    namespace: Namespace
    end: int  # tokens from the prompt's first to the page's last


class _Growth(NamedTuple):
    """What one lease gets by an extend that has been found to be right."""

    lease: Lease
    tokens: bytes
    num_fresh: int
    spare: Sequence[int] = ()
    more: Sequence[int] = ()  # slots of each companion


class _NotYet(Exception):
    """There is no room yet for the first in line. Nothing was changed."""

    def __init__(self, need: tuple[int, ...], refusal: NoSpace) -> None:
        super().__init__()
        self.need = need
        self.aside = _at_ceiling(refusal)


def _at_ceiling(refusal: NoSpace) -> bool:
    """Its tenant's own ceiling is in the way, whatever others do."""
    return bool(refusal.facts.get("at_ceiling"))


@dataclass(slots=True, eq=False)
class _Beside:
    """What those extends of one command get that come before the next, and what was looked up for them."""

    more: list[int]  # slots of each companion
    tally: Tally | None  # where there are tenants: with what is promised to those who wait
    need: int = 0  # pages
    looked: list[int] = field(default_factory=list)  # pages to be had now, and when copies of ours are over
    copied: list[Copied] = field(default_factory=list)

    def add(self, tenant: int, num_fresh: int, slots: Sequence[int]) -> None:
        self.need += num_fresh
        self.more = [one + other for one, other in zip(self.more, slots, strict=True)]
        if self.tally is not None:
            self.tally.add(tenant, num_fresh)


@dataclass(slots=True, eq=False)
class _Waiting:
    """An acquire, or the extends of one command, for which more must be evicted than a slice, or a copy of ours end."""

    request: int
    session: Session
    num_fresh: int  # pages, of all its growths together
    judged: int  # how many write-throughs were over when it was last found that there can be room
    lease: Lease | None = None  # an acquire's; it has its pins
    end: Node | None = None  # where an acquire's match ends
    growths: Sequence[_Growth | SglcacheError] = ()  # an extend's: what will be, and what was refused already
    total: int = 0  # an acquire's: pages of its table
    spare: Sequence[int] = ()
    more: Sequence[int] = ()  # slots of each companion, as `num_fresh`
    patience: Patience | None = None
    standing: Standing | None = None  # while it is in line: extends alone, who have no pins
    again: Standing | None = None  # an acquire's, that may stand in line: as what
    counted: tuple[int, int] = (0, 0)  # an acquire's: tokens that were counted as matched, and those from the host

    @property
    def deadline(self) -> float:
        return FOR_EVER if self.patience is None else self.patience.copies

    @property
    def wants(self) -> list[tuple[int, int]]:
        """`num_fresh`, by (tenant, pages), in the order in which they are taken."""
        if self.lease is not None:
            return [(self.lease.tenant, self.num_fresh)]
        return _wants(self.growths) or [(0, 0)]


def _wants(growths: Sequence[_Growth | SglcacheError]) -> list[tuple[int, int]]:
    """By (tenant, pages), in order."""
    found: list[tuple[int, int]] = []
    for growth in growths:
        if isinstance(growth, _Growth):
            tenant, num_pages = growth.lease.tenant, growth.num_fresh
            if found and found[-1][0] == tenant:
                num_pages += found.pop()[1]
            found.append((tenant, num_pages))
    return found


# What a page that leaves a tier is counted as: to make room, and the other tier does not have it; to make room, and the
# other has it; by a clear. What leaves the host since its bytes are wrong is `corrupt_pages`.
LEFT = (
    ("evicted_device_pages", "demoted_pages", "cleared_device_pages"),
    ("evicted_host_pages", "unbacked_pages", "cleared_host_pages"),
)
COUNTERS = (
    "requests",
    "request_tokens",
    "matched_tokens",
    "host_matched_tokens",
    "l3_matched_tokens",
    "commits",
    "committed_pages",
    "duplicate_pages",
    "evicted_nodes",
    *(name for reasons in LEFT for name in reasons),
    "corrupt_pages",
    "backup_pages",
    "backup_pages_skipped",
    "backups_retried",
    "backups_failed",
    "load_pages",
    "loads_failed",
    "loads_declined",
    "l3_store_pages",
    "l3_stores_failed",
    "l3_pages_skipped",
    "l3_stores_retried",
    "prefetches",
    "prefetches_declined",
    "prefetch_pages",
    "prefetched_pages",
    "refused",
    "unpublished_pages",
    "sessions_ended",
)


@mypyc_attr(allow_interpreted_subclasses=True)
class Index:
    """The radix cache of one rank."""

    def __init__(self, config: IndexConfig) -> None:
        self.config = config
        self.keys = Keys(config.page_size, config.bigram)
        self.page_bytes = self.keys.page_bytes
        self.hasher = hashing.hasher(config.hash_name)
        self.pools = [SlotPool(config.num_pages)]
        if config.host_pages:
            self.pools.append(SlotPool(config.host_pages if config.host_ready is None else config.host_ready))
        self.T = num_tiers = len(self.pools)
        self.resources: list[Resource] = [Full()] * num_tiers
        policies = [config.eviction, config.host_eviction][:num_tiers]
        write_policy = config.write_policy
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.companions: Companions | None = None
        if config.companions:
            assert config.l3 is None, "L3 knows Full alone"
            self.companions = Companions(self, config.companions, num_tiers)
            self.pools += Companions.pools(config.companions, num_tiers)
            self.resources += [each.resource for each in config.companions for _ in range(num_tiers)]
            self.counters |= dict.fromkeys(Companions.counters(config.companions), 0)
        shared = None if config.tenants is None else Shared
        self.tree = Tree(
            self.keys, list(self.resources), self.pools, policies, hits=write_policy.selective, shared=shared
        )
        self.tree.now = config.now
        self.orders = self.tree.orders
        self.tenants: Tenants | None = None if config.tenants is None else Tenants(self, config.tenants)
        self._by_use = self.tree.facts.by_use
        self.telling = config.events
        self.journal: list[journal.Entry] | None = [] if config.journal and num_tiers > HOST else None
        self.log: EventLog | None = None
        if config.events or config.l3 is not None:
            self.log = EventLog(
                self.hasher,
                self.keys,
                format=config.format,
                first_seq=config.first_seq,
                rank=config.rank,
                max_blocks=config.max_batch_blocks,
                slice=config.cut_slice,
                quiet=not config.events,
            )
        self.l3: L3 | None = None if config.l3 is None else L3(self, config.l3)
        self.lifetimes = [Histogram(AGES) for _ in range(num_tiers)]  # of pages of Full that make room on a tier
        self.idle_times = [Histogram(AGES) for _ in range(num_tiers)]
        self.version = 0  # rises with every change of presence
        self._moves = 0  # rises with everything else that a proof looks at
        self.sessions: dict[SessionId, Session] = {}
        self.leases: dict[LeaseId, Lease] = {}
        self.backups = Backups(self, write_policy)
        self.writes = self.backups.writes  # device to host, in the order they were sent
        self.loads: dict[TicketId, Ticket] = {}
        self.held = False  # removals are not on the stream yet: no page may be handed on
        self._next_id = 1
        self._effects: list[Effect] = []
        self._waiting: deque[_Waiting] = deque()
        self._late = 0  # of those in line, who is being refused because its time is over
        self._stuck: tuple[int, ...] | None = None  # the revision at which the first of them had to wait for a copy
        self.line = Line(config.max_waiting, config.max_waiting_of_session)  # who waits for what others lock
        self._tried: tuple[int, ...] | None = None  # the revision at which there was no room for the first in line
        self._distrusted = -1  # so many copies were over when somebody had waited too long for the next
        self._clearing: list[list[int]] = []  # [cell, pages still to evict]
        self._graves: list[Any] = []  # nodes, and tables of them, of trees that were dropped whole
        self._ts = 0.0
        self.departures: Departures | None = None
        if config.departures:
            self.departures = Departures(self, config.departures, config.departed_bytes)
            self.tree.remembers = True
        self._known_by: dict[Extras, Space] = {}  # what routers know a namespace by, and the one that has it
        self._announcement: Snapshot | None = None
        self._telling_again: Iterator[None] | None = None

    @property
    def now(self) -> float:
        """The time of this turn, in seconds on the caller's clock: it never goes back. What happens is stamped with it;
        nothing is decided by it."""
        return self.tree.now

    @now.setter
    def now(self, now: float) -> None:
        self.tree.now = now

    # -- sessions -----------------------------------------------------------------------------------------

    def open_session(self, num_shards: int = 1) -> SessionId:
        """A new session whose tickets are done when `num_shards` events are."""
        session = Session(SessionId(self.new_id()), num_shards)
        self.sessions[session.id] = session
        return session.id

    def end_session(self, session: SessionId, why: str = "a member died or left") -> None:
        """The session takes no more commands: its leases are fenced, commits that wait are dropped, pins let go.

        Its pages come back by `shard_gone` of every shard, or each lease's by the event of its release. Idempotent.
        """
        s = self.sessions.get(session)
        if s is None or s.ended:
            return
        s.ended, s.why = True, why
        self._moves += 1
        self.counters["sessions_ended"] += 1
        error = s.over()
        for waiting in [w for w in self._waiting if w.session is s]:
            self._leave_queue(waiting)
            self.wake(s, waiting.request, error)
            if waiting.lease is not None:
                self._give_back(waiting.lease, used=False)
        for standing in self.line.of(s):
            self._leave_line(standing)
            self.wake(s, standing.request, error)
        for lease in s.leases.values():
            if lease.cancelling is not None:
                self.wake(s, lease.cancelling, error)
        for op in s.queue:
            if op.request is not None:
                self.wake(s, op.request, error)
                op.request = None
        s.queue = deque(op for op in s.queue if op.release)
        for owner in list(s.pins):
            self._unpin(s, owner)
        pool = self.pools[DEVICE]
        for lease in s.leases.values():
            own = len(lease.own_slots) // SLOT_BYTES
            pool.leased -= own
            pool.fenced += own
            if self.companions is not None and lease.parts:
                self.companions.fence(lease)
        self._settle(s)
        if self.l3 is not None:
            self.l3.session_ended(s)

    def shard_gone(self, session: SessionId, shard: int) -> None:
        """No use of that shard's pages by this session is left: the kernel says so, or its last event. Idempotent."""
        s = self.sessions.get(session)
        if s is None:
            return
        self._shard(s, shard)
        self.end_session(session)
        s.gone |= 1 << shard
        self._settle(s)

    def event_done(self, session: SessionId, ticket: int, shard: int = 0) -> None:
        """That shard's event for `ticket` is done; it may come before the command that names the ticket."""
        s = self.sessions.get(session)
        if s is None or ticket <= s.last_done:
            return
        events = s.events
        if shard or s.all_shards != 1:
            self._shard(s, shard)
        if not events:
            events[ticket] = 1 << shard
        elif len(events) >= MAX_EVENTS_AHEAD and ticket not in events:
            raise BadRequest(f"{len(events)} tickets are done ahead of their commands", tickets=len(events))
        else:
            events[ticket] = events.get(ticket, 0) | 1 << shard
        if s.ended:
            self._settle(s)
        elif s.queue:
            self._pump(s)

    # -- a runner's journey ---------------------------------------------------------------------------------

    def acquire(
        self,
        session: SessionId,
        request: int,
        tokens: bytes,
        namespace: Namespace = ROOT,
        *,
        limit: int | None = None,
        reserve: int = 0,
        exact: int | None = None,
        room: int | None = None,
        session_id: str | None = None,
        priority: int = 0,
        fetch: float | None = None,
        spare: Sequence[int] = (),
        tenant: str | None = None,
        patience: Patience | None = None,
        in_turn: bool = False,
    ) -> Grant | None:
        """Match, pin, evict, allocate: one command (law 7).

        `tokens` is packed uint32; at most `limit` of them are matched, or, with `exact`, so many and no others:
        `Changed` if it is fewer, with the number. There are pages for all of them and `reserve` more, or, with `room`,
        for the match and so many beyond it at most. With bigram keys a match needs the token behind it, too, so it
        never is all of them; whatever is counted here is tokens all the same.

        None: it takes more than one slice of eviction, or the end of write-throughs that alone lock what is needed;
        `step` goes on with it and `Wake` brings the answer. `NoSpace` if locks leave too little, or others wait for
        room already; with `patience` None, too, and then it stands in line until there is room (see `line`): `Wake`
        brings the answer, `NoSpace` when its time is over. `in_turn` is for the line: it is the first, and goes on or
        raises `_NotYet`. Of an error, nothing is changed. `priority` is for the policy of that name: what a request of
        a higher one has used is kept longer.

        `fetch`: have what L3 has of the rest brought to the host first, and wait for that until then, on the caller's
        clock (inf: to its end; 0: not at all, it comes for others). None too, while it waits; then `Wake`.

        With companions whose pools are too small for a hit and what is wanted beside it, there is no hit.

        `spare`: of each companion that is by end, how many slots of its own it gets; of one by page it gets one for
        each page behind the match. It gets what it needs of all resources, or nothing.

        `tenant` is charged with the pages; None, or a name that is not configured: `tenants.DEFAULT`. `NoSpace` too if
        its ceiling, or the floors of others, leave too little.
        """
        s = self._session(session)
        tenants = self.tenants
        number = 0 if tenants is None else tenants.number(tenant)
        companions = self.companions
        if companions is not None:
            companions.check_spare(spare)
        elif spare:
            raise BadRequest("there are no companions to have spare slots of", spare=list(spare))
        if len(s.leases) >= self.config.max_leases:
            raise Busy(
                f"session {s.id} has {len(s.leases)} leases, and no more are given; release some, or raise "
                "limits.max_leases_per_session",
                leases=len(s.leases),
                max_leases=self.config.max_leases,
            )
        length = len(tokens)
        page_bytes, over = self.page_bytes, self.keys.over
        if (
            length % TOKEN_BYTES
            or length == 0
            or reserve < 0
            or (limit is not None and limit < 0)
            or (room is not None and room < 0)
        ):
            raise BadRequest(
                f"acquire needs at least one token, whole uint32s, limit, reserve and room >= 0; got {length} bytes, "
                f"limit {limit}, reserve {reserve}, room {room}"
            )
        if exact is not None:
            if limit is not None or not 0 <= exact * TOKEN_BYTES <= length - over or exact * TOKEN_BYTES % page_bytes:
                raise BadRequest(
                    f"exact needs whole pages of {self.config.page_size} of the {(length - over) // TOKEN_BYTES} "
                    f"tokens that can be matched, and no limit; got exact {exact}, limit {limit}"
                )
            limit = exact
        end = length - over if limit is None else min(length - over, limit * TOKEN_BYTES)
        end -= end % page_bytes
        space = self.tree.spaces.get(namespace)
        path: list[Node] = []
        partial: Node | None = None
        at = 0
        if space is not None and end:
            path, partial, at = self._match(space.root, tokens, end)
        agreement = None
        if companions is not None:
            agreement = companions.agree(path, partial, at)
            best = agreement.everywhere
            if best > agreement.device and not self._worth_loading((best - agreement.device) // page_bytes):
                best = agreement.device
            path, partial, at = companions.cut(path, partial, at, best)
        on_device = len(path)
        matched_bytes = at
        for node in path:
            matched_bytes += node.num_bytes
        device_bytes = matched_bytes
        if self.T > HOST:  # else there is nothing but what the device has
            if partial is not None and partial.cells[DEVICE] is None:
                device_bytes -= at
            while on_device and path[on_device - 1].cells[DEVICE] is None:
                on_device -= 1
                device_bytes -= path[on_device].num_bytes
        rest = None
        if fetch is not None and self.l3 is not None and exact is None:
            if self.l3.worth_it((end - matched_bytes) // page_bytes):
                rest = path.copy(), partial, at, tokens[matched_bytes : end + over]
            if rest is not None and fetch > 0:
                acquire = functools.partial(
                    self.acquire,
                    session,
                    request,
                    tokens,
                    namespace,
                    limit=limit,
                    reserve=reserve,
                    room=room,
                    session_id=session_id,
                    priority=priority,
                    tenant=tenant,
                    patience=patience,
                )
                again = functools.partial(self._acquire_again, acquire, matched_bytes // TOKEN_BYTES)
                self._fetch_rest(namespace, *rest, Waiter(s, request, fetch, again), number)
                return None
        if (
            matched_bytes != device_bytes
            and agreement is None
            and not self._worth_loading((matched_bytes - device_bytes) // page_bytes)
        ):
            del path[on_device:]
            if partial is not None and partial.cells[DEVICE] is None:
                partial, at = None, 0
            matched_bytes = device_bytes
        if exact is not None and matched_bytes != end:
            raise Changed(
                f"{exact} tokens were to be matched, and {matched_bytes // TOKEN_BYTES} would be now; agree on fewer",
                exact=exact,
                matched_tokens=matched_bytes // TOKEN_BYTES,
            )
        have = length + reserve * TOKEN_BYTES
        if room is not None:
            have = min(have, matched_bytes + room * TOKEN_BYTES)
        total = -(-have // page_bytes)
        num_fresh = total - device_bytes // page_bytes
        others = self._waiting or self.line
        crowded = num_fresh > self.pools[DEVICE].free or bool(others and num_fresh > 0)
        if tenants is not None and num_fresh:
            crowded = crowded or tenants.over(DEVICE, number, num_fresh)
        needs: Sequence[Need] = ()
        more: Sequence[int] = ()
        if companions is not None:
            needs = companions.needs(path, partial, at, device_bytes // page_bytes, total, spare)
            if matched_bytes and exact is None and companions.never(needs):
                path, partial, at, on_device = [], None, 0, 0  # it would wait for itself for ever: there is no hit
                device_bytes = matched_bytes = 0
                assert agreement is not None
                agreement = agreement._replace(device=0)
                have = length + reserve * TOKEN_BYTES
                if room is not None:
                    have = min(have, room * TOKEN_BYTES)
                num_fresh = total = -(-have // page_bytes)
                needs = companions.needs(path, partial, at, 0, total, spare)
            more = [need.num_slots for need in needs]
            crowded = crowded or companions.crowded(more) or bool(any(more) and others)
        standing = None
        if crowded:
            if patience is not None and patience.room is not None:
                retry = functools.partial(
                    self.acquire,
                    session,
                    request,
                    tokens,
                    namespace,
                    limit=limit if exact is None else None,
                    reserve=reserve,
                    exact=exact,
                    room=room,
                    session_id=session_id,
                    priority=priority,
                    fetch=0.0 if fetch == 0 else None,
                    spare=spare,
                    tenant=tenant,
                    patience=patience,
                    in_turn=True,
                )
                standing = Standing(request, s, patience, (num_fresh, *more), retry, num_bytes=length, tenant=number)
            try:
                if not in_turn and (num_fresh or any(more)) and self.line.holds_up(number):
                    raise self._no_space(num_fresh, self.pools[DEVICE].locked, "wait, too, or try again later")
                self._refuse(num_fresh, path, partial, at, number)
                for i, need in enumerate(needs) if needs else ():
                    self._refuse_slots(i, need)
            except NoSpace as refusal:
                if standing is None or self._never((total, *more)):
                    self.counters["refused"] += 1
                    raise
                if in_turn:
                    raise _NotYet(standing.need, refusal) from refusal
                standing.aside = _at_ceiling(refusal)
                self._stand(standing)
                return None
        head = None
        if partial is not None:
            head = self.tree.split(partial, at)
            path.append(head)
            if head.cells[DEVICE] is not None:
                on_device = len(path)
        if rest is not None:
            there, short, cut, wanted = rest
            if head is not None:
                there, short = path.copy(), None
            self._fetch_rest(namespace, there, short, cut, wanted, None, number)
        counters = self.counters
        counters["requests"] += 1
        counters["request_tokens"] += length // TOKEN_BYTES
        counters["matched_tokens"] += matched_bytes // TOKEN_BYTES
        near = device_bytes if agreement is None else min(agreement.device, matched_bytes)
        if matched_bytes != near:
            counters["host_matched_tokens"] += (matched_bytes - near) // TOKEN_BYTES
        id: Any = self._next_id
        self._next_id = id + 1
        lease = Lease(id, s, namespace, tokens)
        if session_id is not None:
            lease.session_id = session_id
        if priority:
            lease.priority = priority
        if number:
            lease.tenant = number
        s.leases[id] = self.leases[id] = lease
        if path:
            if on_device:
                lease.node = path[on_device - 1]
                self.orders[DEVICE].pin(lease.node)
            if self.T > HOST:
                lease.host_node = self.host_end(path)
                self.orders[HOST].pin(lease.host_node)
        lease.committed = lease.reported = device_bytes // page_bytes
        if agreement is not None:
            assert companions is not None
            path = companions.open(lease, path, agreement)
        if crowded and (self._waiting or not self._make_room("acquire", s, [(number, num_fresh)], more)):
            lease.waiting = True
            last = path[-1] if path else None
            over = self.backups.num_over
            waiting = _Waiting(request, s, num_fresh, over, lease, last, total=total, spare=spare, more=more)
            waiting.patience, waiting.again = patience, standing
            waiting.counted = matched_bytes // TOKEN_BYTES, (matched_bytes - near) // TOKEN_BYTES
            self._waiting.append(waiting)
            return None
        if path and (crowded or agreement is not None):
            return self._grant(lease, num_fresh, *self._path(lease, path[-1]), total, spare)
        if on_device == len(path):
            return self._grant(lease, num_fresh, path, (), total, spare)
        return self._grant(lease, num_fresh, path[:on_device], path[on_device:], total, spare)

    def _acquire_again(self, acquire: Callable[[], Grant | None], had: int, came: int) -> Grant | None:
        """At the end of a wait for L3, which began with a match of so many tokens, and brought so many pages."""
        counters = self.counters
        before = counters["matched_tokens"]
        grant = acquire()
        more = max(0, counters["matched_tokens"] - before - had)
        counters["l3_matched_tokens"] += min(came * self.config.page_size, more)
        return grant

    def extend(
        self, session: SessionId, request: int, items: Sequence[Extension], patience: Patience | None = None
    ) -> Extended | None:
        """Append tokens to leases; their page tables grow as needed, each item for itself, in order.

        A lease gets pages for all its tokens and `reserve` more, or, with `upto`, for so many of them at most; it never
        loses one. An item that is wrong, or for which there is no room beside those before it, or before which others
        wait to extend, has its error for a result, and changes nothing; the others take effect. None: as acquire, and
        then all of them wait.

        With `patience` they stand in line, together, until there is room for all; when their time is over each that has
        room takes effect, if it is their turn, and the others have `NoSpace`.
        """
        s = self._session(session)
        pool = self.pools[DEVICE]
        growths: list[_Growth | SglcacheError] = []
        beside, line = self._beside(), self.line
        waits = patience is not None and patience.room is not None
        refusal: NoSpace | None = None  # of the first for which there is no room yet
        for item in items:
            slots: list[int] = []
            try:
                lease, num_fresh = self._growth(s, item, growths)
                if self.companions is not None:
                    slots = self.companions.growth(num_fresh, item.spare)
                wanting = num_fresh or any(slots)  # most steps of a decode want no page
                try:
                    if wanting:
                        if line.extends.size and line.extends_hold_up(lease.tenant):
                            raise self._no_space(num_fresh, pool.locked, "wait, too, or try again later", beside.need)
                        self._refuse_growth(lease.tenant, num_fresh, slots, beside)
                except NoSpace as error:
                    sums = (one + other for one, other in zip(beside.more, slots, strict=True))
                    never = self._never((beside.need + num_fresh, *sums)) or self._never((lease.num_pages + num_fresh,))
                    if not waits or never:
                        self.counters["refused"] += 1
                        raise
                    refusal = refusal or error
            except SglcacheError as error:
                growths.append(error)
                continue
            lease.extending = True
            if wanting:
                beside.add(lease.tenant, num_fresh, slots)
            growths.append(_Growth(lease, item.tokens, num_fresh, item.spare, slots))
        need, more = beside.need, beside.more
        if not (need or any(more)):
            return self._extended(growths)
        waiting = _Waiting(request, s, need, self.backups.num_over, growths=growths, more=more, patience=patience)
        if refusal is not None:
            assert patience is not None
            standing = waiting.standing = Standing(request, s, patience, (need, *more), extends=waiting)
            standing.aside = _at_ceiling(refusal)
            standing.tenant = waiting.wants[0][0]
            try:
                self._stand(standing)
            except Busy:
                self._let_grow(waiting)
                raise
            return None
        crowded = need > pool.free or (need > 0 and bool(self._waiting))
        wants = [(0, need)] if self.tenants is None else _wants(growths)
        if self.tenants is not None:
            crowded = crowded or self.tenants.crowded(wants)
        if self.companions is not None:
            crowded = crowded or self.companions.crowded(more) or (any(more) and bool(self._waiting))
        if crowded and (self._waiting or not self._make_room("extend", s, wants, more)):
            self._waiting.append(waiting)
            return None
        return self._extended(growths)

    def withdraw(self, session: SessionId, request: int) -> bool:
        """Have a command of the session that waits, for room, for a copy or for L3, wait no longer: it is answered
        `Cancelled`, and changes nothing. False: none of that number waits; it was answered, or will be at once."""
        s = self._session(session)
        error = Cancelled("the request was withdrawn while it waited")
        for standing in self.line.of(s):
            if standing.request == request:
                self._leave_line(standing)
                if standing.extends is not None:
                    self._let_grow(standing.extends)
                self.wake(s, request, error)
                return True
        for waiting in self._waiting:
            if waiting.session is s and waiting.request == request:
                self._leave_queue(waiting)
                self._let_grow(waiting)
                self.wake(s, request, error)
                if waiting.lease is not None:
                    self._give_back(waiting.lease, used=False)
                return True
        return self.l3 is not None and self.l3.withdraw(s, request, error)

    def waits_for(self, session: SessionId, request: int) -> str:
        """What a command of the session that is not answered waits for: third_tier, room (that others lock), or
        making_room."""
        if self.l3 is not None and self.l3.waits(session, request):
            return "third_tier"
        s = self.sessions.get(session)
        if s is not None and any(standing.request == request for standing in self.line.of(s)):
            return "room"
        return "making_room"

    def commit(
        self,
        session: SessionId,
        request: int,
        lease: LeaseId,
        ticket: int,
        *,
        seen: int = 0,
        tokens: int | None = None,
        ends: Sequence[tuple[int, int, int]] = (),
        floor: int | None = None,
        done: int | None = None,
    ) -> None:
        """Give the whole pages of the first `tokens` tokens to the tree when `ticket` is done; then Wake(Committed).

        None: of all that have pages. BadRequest for more than that. With bigram keys a page has a name once the lease
        has the token behind it: of these tokens those pages, and the last one with a later commit.

        With companions the lease keeps of those by page the last that a match would need, and what lies beyond. `ends`:
        (companion, tokens, slot), of one by end: the lease's own slot has the state at the end of so many tokens, whole
        pages, and is the tree's from then on, if that has none there. `floor`: the lease's own pages of companions that
        lie wholly before that token are given up first, and are free. `done`: that shard's event for it is done.
        """
        s = self._session(session)
        held = self._lease(s, lease)
        page_size = self.config.page_size
        have, room = held.num_bytes // TOKEN_BYTES, len(held.slots) // SLOT_BYTES * page_size
        if tokens is None:
            tokens = min(have, room)
        elif not 0 <= tokens <= min(have, room):
            raise BadRequest(
                f"commit of {tokens} tokens; the lease has {have}, and pages for {room}; extend it first",
                tokens=tokens,
                have=have,
                room=room,
            )
        num_pages = tokens // page_size
        if self.keys.bigram:
            num_pages = min(num_pages, self.keys.whole(held.num_bytes) // self.page_bytes)
        op = Operation(request, held, ticket, seen, num_pages, False)
        if self.companions is not None:
            if floor is not None and not 0 <= floor <= have:
                raise BadRequest(f"floor {floor} is not in 0..{have}, the lease's tokens", floor=floor, have=have)
            before = [each for each in s.queue if each.lease is held]
            promised = {(i, slot) for each in before for i, _, slot in each.ends}
            end = max([num_pages, held.committed, *[each.num_pages for each in before]])
            op.ends = self.companions.check_ends(held, ends, end, promised)
            op.floor = (floor or 0) // page_size
        elif ends or floor is not None:
            raise BadRequest("nothing here keeps windows or states: leave states and floor out", ends=len(ends))
        self._ticket(s, ticket)
        if done is not None:
            s.events[ticket] = s.events.get(ticket, 0) | 1 << done
        s.queue.append(op)
        if s.events:
            self._pump(s)

    def release(
        self,
        session: SessionId,
        request: int | None,
        lease: LeaseId,
        ticket: int,
        *,
        seen: int = 0,
        discard: bool = False,
        done: int | None = None,
    ) -> None:
        """End the lease when `ticket` is done; then Wake(Released). It takes no command from now on.

        Request None: nobody is told. `discard`: commits of it that have not taken effect don't. `done`: that shard's
        event for it is done already.
        """
        s = self._session(session)
        held = self._lease(s, lease)
        self._ticket(s, ticket)
        self._take_no_more(held)
        if discard:
            for op in s.queue:
                if op.lease is held and op.request is not None:
                    self.wake(s, op.request, Changed("the lease was discarded before this commit took effect"))
                    op.lease = op.request = None
        if done is not None:
            s.events[ticket] = s.events.get(ticket, 0) | 1 << done
        s.queue.append(Operation(request, held, ticket, seen, 0, True))
        if s.events:
            self._pump(s)

    def cancel(self, session: SessionId, request: int, lease: LeaseId) -> bool:
        """Give a lease back at once whose pages nobody has touched or was told of: there is no event to wait for.

        False: once its load-back is over, and then Wake(Released). BadRequest if commits of it wait for their events:
        then somebody was told. As after a release, it takes no command from now on.
        """
        s = self._session(session)
        held = self._lease(s, lease)
        if any(op.lease is held for op in s.queue):
            raise BadRequest(f"lease {lease} has commits under way, so its pages are in use: release it", lease=lease)
        self._take_no_more(held)
        if held.load is not None:
            held.cancelling = request
            return False
        self._give_back(held, used=False)
        return True

    def prefetch(
        self,
        session: SessionId,
        request: int,
        tokens: bytes,
        namespace: Namespace = ROOT,
        until: float = FOR_EVER,
        tenant: str | None = None,
    ) -> Prefetched | None:
        """Bring to the host what L3 has of `tokens` behind what is cached. None: it is looked for; then `Wake`, when it
        is there, or will not be, or at `until`, on the caller's clock (0: at once, here): what is under way goes on."""
        s = self._session(session)
        if len(tokens) % TOKEN_BYTES:
            raise BadRequest(f"packed tokens are uint32: {len(tokens)} bytes is no multiple of 4")
        had = self._reach(tokens, namespace)
        if self.l3 is None or not self.l3.worth_it((self.keys.whole(len(tokens)) - had) // self.page_bytes):
            return Prefetched(had // TOKEN_BYTES, 0)
        space = self.tree.spaces.get(namespace)
        path: list[Node] = []
        partial, at = None, 0
        if space is not None:
            path, partial, at = self._match(space.root, tokens, self.keys.whole(len(tokens)))
        rest = tokens[had : self.keys.whole(len(tokens)) + self.keys.over]

        def tell(came: int) -> Prefetched:
            has = self._reach(tokens, namespace)
            return Prefetched(has // TOKEN_BYTES, min(came * self.config.page_size, max(0, has - had) // TOKEN_BYTES))

        waiter = Waiter(s, request, until, tell) if until > 0 else None
        number = 0 if self.tenants is None else self.tenants.number(tenant)
        self._fetch_rest(namespace, path, partial, at, rest, waiter, number)
        self.l3.prefetches[-1].kept = True
        return None if waiter is not None else Prefetched(had // TOKEN_BYTES, 0)

    def _reach(self, tokens: bytes, namespace: Namespace) -> int:
        """Bytes of a sequence that are cached in some tier of the tree."""
        space = self.tree.spaces.get(namespace)
        if space is None:
            return 0
        path, partial, at = self._match(space.root, tokens, self.keys.whole(len(tokens)))
        return sum(node.num_bytes for node in path) + (at if partial is not None else 0)

    # -- L3: what its effects lead to ------------------------------------------------------------------------

    def stored(self, ticket: TicketId, mask: bytes, removed: bytes = b"") -> None:
        """A `Store` is over. `mask`: a byte a page, 1: L3 has it now. `removed`: digests, joined, that an exact L3
        no longer holds, in order. An unknown ticket is no error; likewise below."""
        assert self.l3 is not None
        self.l3.stored(ticket, mask, removed)

    def probed(self, ticket: TicketId, num_pages: int) -> None:
        """A `Probe` is over: L3 has so many leading pages."""
        assert self.l3 is not None
        self.l3.probed(ticket, num_pages)

    def fetched(self, ticket: TicketId, num_pages: int, removed: bytes = b"") -> None:
        """A `Fetch` is over, and nothing of it moves any more: so many leading pages are right in their slots."""
        assert self.l3 is not None
        self.l3.fetched(ticket, num_pages, removed)

    def l3_found(self, runs: list[Run]) -> None:
        """What an exact L3 held already, parents first, in pieces."""
        assert self.l3 is not None
        self.l3.found(runs)

    def l3_complete(self) -> None:
        """All that an exact L3 held was told: what the host has from an earlier life, and L3 has not, is stored now."""
        assert self.l3 is not None
        self.l3.catch_up_with_host()

    def l3_removed(self, digests: bytes, bad: bool = False) -> None:
        """What an exact L3 no longer holds, by no doing of an effect; of what was `bad` the children stay."""
        assert self.l3 is not None
        self.l3.removed(digests, bad)

    # -- looking, pinning, clearing -------------------------------------------------------------------------

    def peek(self, tokens: bytes, namespace: Namespace = ROOT) -> Peeked:
        """How far a match would reach. Mutates nothing, not even the order of eviction."""
        if len(tokens) % TOKEN_BYTES:
            raise BadRequest(f"packed tokens are uint32: {len(tokens)} bytes is no multiple of 4")
        space = self.tree.spaces.get(namespace)
        if space is None:
            return Peeked(0, 0, () if self.companions is None else (0,) * (1 + len(self.companions.kinds)))
        path, partial, at = self._match(space.root, tokens, self.keys.whole(len(tokens)))
        if self.companions is not None:
            both, near, reaches = self.companions.agree(path, partial, at)
            if both > near and not self._worth_loading((both - near) // self.page_bytes, now=False):
                both = near
            return Peeked(near // TOKEN_BYTES, both // TOKEN_BYTES, reaches)
        device = matched = 0
        for node in path:
            matched += node.num_bytes
            if node.cells[DEVICE] is not None:
                device = matched
        if partial is not None:
            matched += at
            if partial.cells[DEVICE] is not None:
                device = matched
        if not self._worth_loading((matched - device) // self.page_bytes, now=False):
            matched = device
        return Peeked(device // TOKEN_BYTES, matched // TOKEN_BYTES)

    def pin(self, session: SessionId, tokens: bytes, namespace: Namespace, owner: str, expires_at: float) -> int:
        """Keep what is cached of `tokens` from eviction until `unpin`, `expire` or the session's end; its tokens.

        Busy: the session has `max_pins`. NoSpace: pins would keep more than `max_pinned_fraction` of a tier's pages.
        """
        s = self._session(session)
        if len(tokens) % TOKEN_BYTES:
            raise BadRequest(f"packed tokens are uint32: {len(tokens)} bytes is no multiple of 4")
        mine = sum(map(len, s.pins.values()))
        if mine >= self.config.max_pins:
            raise Busy(
                f"session {s.id} has {mine} pins, and may have {self.config.max_pins}; unpin some, or raise "
                "limits.max_pins",
                pins=mine,
                max_pins=self.config.max_pins,
            )
        space = self.tree.spaces.get(namespace)
        if space is None:
            return 0
        path, partial, at = self._match(space.root, tokens, self.keys.whole(len(tokens)))
        if self.companions is not None:
            best = self.companions.agree(path, partial, at).everywhere
            path, partial, at = self.companions.cut(path, partial, at, best)
        self._refuse_pin(path, partial, at)
        if partial is not None:
            path.append(self.tree.split(partial, at))
        if not path:
            return 0
        device = next((node for node in reversed(path) if node.cells[DEVICE] is not None), None)
        nodes = (device,) if self.T == 1 else (device, self.host_end(path))
        self._moves += 1
        for c, node in enumerate(nodes):
            self.orders[c].pin(node)
        num_bytes = sum(node.num_bytes for node in path)
        places = () if self.companions is None else self.companions.pin(path, nodes)
        s.pins.setdefault(owner, []).append(Pin(nodes, expires_at, num_bytes // self.page_bytes, places))
        return num_bytes // TOKEN_BYTES

    def _refuse_pin(self, path: Sequence[Node], partial: Node | None, at: int) -> None:
        """Unless it may be pinned what matches. Changes nothing."""
        nodes = [*path, partial] if partial is not None else [*path]
        counts = [node.num_bytes // self.page_bytes for node in path] + [at // self.page_bytes]
        bound = self._pinned_pages()  # of what is pinned twice this counts both
        for c, pool in enumerate(self.pools[: self.T]):
            most = int(pool.total * self.config.max_pinned_fraction)
            there = [node.cells[c] is not None and not node.writing >> c & 1 for node in nodes]
            end = len(nodes) - next((i for i, is_there in enumerate(reversed(there)) if is_there), len(nodes))
            if bound + sum(counts[:end]) <= most:
                continue
            pinned, seen = self._pinned_nodes(c)
            more = sum(count for node, count in zip(nodes[:end], counts, strict=False) if node not in seen)
            if more and pinned + more > most:
                tier = Tier(c).name
                raise NoSpace(
                    f"{tier}: a pin of {more} pages more; {pinned} of {pool.total} are pinned, and {most} may be; "
                    "unpin some, or raise limits.max_pinned_fraction",
                    resource=self.resources[c].name,
                    tier=tier,
                    need=more,
                    pinned=pinned,
                    max_pinned=most,
                    total=pool.total,
                )

    def _pinned_nodes(self, c: int) -> tuple[int, set[Node]]:
        """What pins keep in a tier, each page once: how many pages, and the nodes."""
        seen: set[Node] = set()
        pages = 0
        for s in self.sessions.values():
            for pins in s.pins.values():
                for pin in pins:
                    node = pin.nodes[c]
                    while node is not None and node.parent is not None and node not in seen:
                        seen.add(node)
                        pages += node.num_bytes // self.page_bytes
                        node = node.parent
        return pages, seen

    def unpin(self, session: SessionId, owner: str) -> int:
        """Let go of what this session pinned for `owner`; the pages. Of nothing is no error, and touches no other's."""
        s = self.sessions.get(session)
        return 0 if s is None else self._unpin(s, owner)

    def expire(self, now: float) -> int:
        """Let go of every pin whose time is over, have whoever waited for L3 so long go on, and refuse who waited so
        long for room; how many.

        `now` is on the clock that `pin` and `acquire` were given."""
        count = 0
        for s in self.sessions.values():
            for owner, pins in list(s.pins.items()):
                over = [pin for pin in pins if pin.expires_at <= now]
                if over:
                    count += len(over)
                    s.pins[owner] = [pin for pin in pins if pin.expires_at > now]
                    if not s.pins[owner]:
                        del s.pins[owner]
                    self._let_go(over)
        if self.l3 is not None:
            count += self.l3.expire(now)
        return count + self._expire_waiting(now)

    @property
    def next_expiry(self) -> float | None:
        every = [pin.expires_at for s in self.sessions.values() for pins in s.pins.values() for pin in pins]
        every += [waiting.deadline for waiting in self._waiting if waiting.deadline != FOR_EVER]
        if (deadline := self.line.next_deadline) is not None and deadline != FOR_EVER:
            every.append(deadline)
        if self.l3 is not None and (deadline := self.l3.next_deadline) is not None:
            every.append(deadline)
        return min(every, default=None)

    def clear(self, tier: Tier | None = None) -> dict[Tier, int]:
        """Drop every cached page of a tier, or of all (then AllBlocksCleared); the pages of each.

        `Busy`, with what holds it, and nothing changed while a lease, a copy or a pin is live. A single tier goes
        by Removed, in slices: `step` does the rest.
        """
        fenced = sum(pool.fenced for pool in self.pools)
        pinned = self._pinned_pages()
        copies = len(self.writes) + len(self.loads) + (self.l3.num_busy if self.l3 is not None else 0)
        if self.leases or copies or pinned or fenced:
            raise Busy(
                f"not cleared: {len(self.leases)} leases, {copies} copies in flight, "
                f"{pinned} pinned and {fenced} fenced pages hold it; release them and clear again",
                leases=len(self.leases),
                copies=copies,
                pinned_pages=pinned,
                fenced_pages=fenced,
                locked_pages={Tier(c).name: pool.locked for c, pool in enumerate(self.pools[: self.T])},
            )
        if tier is not None:
            if tier >= self.T:
                raise BadRequest(f"there is no {Tier(tier).name} tier to clear", tier=Tier(tier).name)
            pages = self.pools[tier].cached
            if pages:
                self._clearing.append([int(tier), pages])
                self._clear_slice()
            return {tier: pages}
        cleared = {Tier(c): pool.cached for c, pool in enumerate(self.pools[: self.T])}
        for reasons, pool in zip(LEFT, self.pools[: self.T], strict=False):
            self.counters[reasons[2]] += pool.cached
        if self.companions is not None:
            self.companions.clear()
        self.pools[:] = [SlotPool(pool.total) for pool in self.pools]
        if self.journal is not None:
            self.journal.append(journal.Cleared())
        self._graves += self.tree.drop_all()
        if self.departures is not None:
            self.departures.cleared()
        self.backups.forget()
        if self.l3 is not None:
            self.l3.forget()
        self._clearing.clear()
        self.version += 1
        if self.log is not None and self.telling:
            self.log.cleared()
            if self.l3 is not None and self.l3.config.tell:
                self._telling_again = self.l3.tell_again()  # it holds what it held
        return cleared

    # -- copies -----------------------------------------------------------------------------------------------

    def copy_done(self, ticket: TicketId, ok: bool = True) -> None:
        """The copy is over: nothing of it is read or written any more. An unknown ticket is no error.

        Write-throughs take effect in the order they were sent, parents first, whatever order their acks come in.
        """
        load = self.loads.pop(ticket, None)
        if load is not None:
            self._loaded(load, ok)
            return
        self.backups.done(ticket, ok)

    def host_ready(self, num_pages: int) -> None:
        """The first `num_pages` host pages are usable now. What found no room is tried again.

        Fewer than before is no news: a life may begin with more.
        """
        pool = self.pools[HOST]
        assert num_pages <= self.config.host_pages, f"{num_pages} after {pool!r}"
        if num_pages <= pool.total:
            return
        self._moves += 1
        pool.free += num_pages - pool.total
        pool.total = num_pages
        self.backups.let_go()

    def expel(self, resource: int, slot: int) -> bool:
        """The bytes of this host slot are wrong: let the page go, and on the host whatever hangs on it.

        Of a companion (`resource` from 1 on) that page alone goes. What the device has stays there, and routers are
        told as of an eviction. False, with nothing changed: a lease, a pin, a copy or a store holds something of it, or
        it is being written. True also where no page is in the slot, which then serves nobody.
        """
        c = resource * self.T + HOST
        place = self._at_slot(c, slot)
        if place is None:
            return True
        node, page = place
        if resource:
            assert self.companions is not None
            return self.companions.expel(c, node, page)
        tree, C = self.tree, self.tree.C  # noqa: N806
        cells = range(HOST, C, self.T)
        going = [node]  # parents first
        for each in going:
            if each.writing or any(each.cells[cell] is not None and each.cells[C + cell] for cell in cells):
                return False
            going += [child for child in tree.children(each) if child.cells[HOST] is not None]
        if page:
            tree.split(node, page * self.page_bytes)
        gone: list[tuple[Node, Node]] = []
        for each in reversed(going):
            if each.parent is not None:  # else it has joined its last child, which is yet to come
                gone.append((each, each.parent))
                self.drop(HOST, each, corrupt=True)
        if self.companions is not None:  # not before: what is to go is not to be pruned
            for each, parent in gone:
                self.companions.dropped(each, parent)
        self.backups.let_go()
        return True

    def whereabouts(self, resource: int, slot: int) -> Whereabouts | None:
        """Of the page in a host slot; None: there is none. Walks the whole tree."""
        c = resource * self.T + HOST
        place = self._at_slot(c, slot)
        if place is None:
            return None
        node, page = place
        num_bytes = node.num_bytes if self.tree.by_end[c] else (page + 1) * self.page_bytes
        up = node.parent
        while up is not None:
            num_bytes += up.num_bytes
            up = up.parent
        return Whereabouts(node.space.namespace, num_bytes // TOKEN_BYTES)

    def _at_slot(self, c: int, slot: int) -> tuple[Node, int] | None:
        """The node that has this slot in a cell, and which of its pages that is. Walks the whole tree."""
        packed = slot.to_bytes(SLOT_BYTES, "little")
        for node in self.tree.nodes():
            run = node.cells[c]
            if run is None:
                continue
            at = run.find(packed)
            while at >= 0:
                if at % SLOT_BYTES == 0:
                    return node, at // SLOT_BYTES
                at = run.find(packed, at + 1)
        return None

    # -- the turn -----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One slice of long work: who waits for room, a clear's evictions, the teardown of a dropped tree.

        False: there is none, or none that could get on before something else happens (see `busy`).
        """
        if self._waiting and self._stuck != self.revision:
            self._serve_waiting()
        elif self.line and self._tried != self.revision:
            self._serve_line()
        elif self.backups.due:
            self.backups.retry()
        elif self.l3 is not None and self.l3.behind:
            self.l3.catch_up()
        elif self._telling_again is not None:
            if next(self._telling_again, self) is self:
                self._telling_again = None
        elif self.tenants is not None and self.tenants.trimming:
            self.tenants.trim()
        elif self._clearing:
            self._clear_slice()
        elif self._graves:
            self._bury()
        return self.busy

    @property
    def busy(self) -> bool:
        """Whether `step` would get on: not with who waits for room where it depends on a copy that is under way."""
        waits = self._waiting and self._stuck != self.revision
        behind = self.l3 is not None and self.l3.behind
        telling = self._telling_again is not None
        line = self.line and self._tried != self.revision
        trimming = self.tenants is not None and self.tenants.trimming
        return bool(
            waits or line or self.backups.due or behind or telling or trimming or self._clearing or self._graves
        )

    @property
    def still(self) -> bool:
        """There is nothing to `drain`, to cut or to go on with: a turn that leaves the index so has no more to ask.

        False says nothing.
        """
        log, line = self.log, self.line
        return not (
            self._effects
            or (log is not None and (log.pending or log.removals or log.published))
            or self.journal
            or self._waiting
            or line.extends.size
            or line.acquires.size
            or self.backups.due
            or self._clearing
            or self._graves
            or self._telling_again is not None
            or self.l3 is not None
            or self.tenants is not None
        )

    def cut(self, ts: float, heartbeat: bool = False) -> bool:
        """Put what is queued on the stream, numbered, stamped `ts` (unix seconds); False: a slice was used up."""
        self._ts = ts
        if self.log is None:
            return True
        done = self.log.cut(ts, heartbeat=heartbeat and self.telling)
        if self.log.named:
            assert self.l3 is not None
            named, self.log.named = self.log.named, []
            for whose, digests in named:
                self.l3.named(whose, digests)
        self.held = self.log.removals > 0
        return done

    def drain(self, ts: float | None = None) -> list[Effect]:
        """The effects so far, what the journal is to note and then batches first, in order.

        A removal is on the stream before anyone hears of the page it freed: what removals are queued is cut first.
        If that takes more than a slice `held` is set, and everything but batches stays until a later `drain`.
        """
        log = self.log
        effects = self._effects
        if log is None and not self.journal:
            if effects:
                self._effects = []
                return effects
            return []  # the list goes on
        published: list[Effect] = []
        if self.journal:
            published.append(Journal(self.journal))
            self.journal = []
        if log is not None:
            if log.removals:
                self.cut(self._ts if ts is None else ts)
            if log.published:
                published += log.published
                log.published = []
        if effects and not self.held:
            self._effects = []
            if not published:
                return effects
            published += effects
        return published

    @property
    def next_seq(self) -> int:
        """The number of the next batch."""
        return self.config.first_seq if self.log is None else self.log.next_seq

    @property
    def revision(self) -> tuple[int, ...]:
        """Equal before and after means that nothing of the books has changed: slots, locks, nodes, leases."""
        return self.version, self._moves, self._next_id, self.tree.num_splits, self.tree.num_merges

    @property
    def uncut(self) -> bool:
        """Whether something waits for a cut."""
        return self.log is not None and self.log.pending

    # -- telling ------------------------------------------------------------------------------------------------

    def stats(self) -> IndexStats:
        log = self.log
        more = {
            "splits": self.tree.num_splits,
            "merges": self.tree.num_merges,
            "batches": log.num_batches if log else 0,
            "blocks_stored": log.num_stored if log else 0,
            "blocks_removed": log.num_removed if log else 0,
            "all_blocks_cleared": log.num_cleared if log else 0,
        }
        return IndexStats(
            [
                PoolStats(
                    self.resources[c].name, Tier(c % self.T), p.total, p.free, p.fenced, p.leased, p.cached, p.locked
                )
                for c, p in enumerate(self.pools)
            ],
            self.tree.num_nodes,
            len(self.tree.spaces),
            len(self.sessions),
            len(self.leases),
            sum(lease.session.ended for lease in self.leases.values()),
            len(self._waiting) + len(self.line) + (self.l3.num_waiting if self.l3 is not None else 0),
            len(self.writes) + len(self.loads) + (self.l3.num_busy if self.l3 is not None else 0),
            self._pinned_pages(),
            {**self.counters, **more},
            () if self.tenants is None else self.tenants.stats(),
        )

    def snapshot(self) -> Snapshot:
        """What is cached and published, as frames, over an index that goes on changing. Close it."""
        assert self.log is not None, "there is no stream to tell it on"
        return Snapshot(self.log, self.tree, self._told_below)

    def announce(self) -> bool:
        """Tell all of it on the stream, anew and under fresh numbers: AllBlocksCleared, then what is cached.

        `announce_slice` does it. False: it was under way, and begins anew.
        """
        running, self._announcement = self._announcement, self.snapshot()
        if running is not None:
            running.close()
        return running is None

    def announce_slice(self, ts: float) -> bool:
        """The next frame of an announcement as a batch; True while there is more."""
        if self._announcement is None:
            return False
        assert self.log is not None
        frame = self._announcement.next()
        if frame is None:
            self._announcement = None
            return False
        if frame.num_events:
            self.log.announce(ts, frame)
        return True

    @property
    def announcing(self) -> bool:
        """A reader of the stream has only part of what is cached until this is over."""
        return self._announcement is not None or self._telling_again is not None

    @property
    def announcement_waits(self) -> bool:
        """For a cut of all that is queued, and for nothing else."""
        return self._announcement is not None and self._announcement.waits

    def digest(self) -> dict[Tier, tuple[int, int]]:
        """By tier, what who has read all batches before `next_seq` must have: blocks, the sum of hashes mod 2**64."""
        if self.log is None or not self.telling:
            return {}
        tallies = self.log.tallies
        return {tier: (tallies[tier].count, tallies[tier].total) for tier in self.told_tiers}

    @property
    def told_tiers(self) -> list[Tier]:
        """Those of which routers are told exactly."""
        below = self._told_below
        return [*(Tier(c) for c in range(self.T)), *([below.tier] if below is not None else [])]

    @property
    def _told_below(self) -> L3 | None:
        """L3, if routers are told exactly what it holds."""
        l3 = self.l3
        return l3 if l3 is not None and self.telling and l3.config.tell and l3.config.exact else None

    @property
    def retelling(self) -> bool:
        """What L3 holds is being told anew, and it is not over."""
        return self._telling_again is not None

    def walk(self, max_nodes: int = 2000) -> Iterator[list[DumpedNode]]:
        """Every node that is published, parents first, `max_nodes` at a time; then what L3 has, a page a node, some
        hundred at a time. The caller watches `version`.

        What is queued must have been cut. With events off there are no digests and nothing is told.
        """
        size = self.hasher.size
        out: list[DumpedNode] = []
        for count, node in enumerate(self.tree.nodes(), 1):
            hashes = node.hashes
            if isinstance(hashes, bytes) and node.space.extras is not None:
                parent = node.parent
                assert parent is not None
                before = parent.hashes
                tiers = tuple(Tier(c) for c in range(self.T) if node.cells[c] is not None and not node.writing >> c & 1)
                digest = before[-size:] if isinstance(before, bytes) else None
                out.append(DumpedNode(node.space.namespace, digest, node.key, hashes, tiers))
            if count % max_nodes == 0:
                yield out
                out = []
        yield out
        below, number = self._told_below, 0
        while below is not None and (segment := below.snapshot(number)) is not None:
            number, pages = segment
            yield [
                DumpedNode(held.namespace, held.before, held.tokens, digest, (below.tier,)) for digest, held in pages
            ]

    # -- inside: matching ------------------------------------------------------------------------------------

    def _match(self, node: Node, key: bytes, end: int) -> Match:
        """Walk down the pages in `key[:end]`. Every node there is is present in some tier. Changes nothing."""
        path: list[Node] = []
        start = 0
        span = self.tree.span
        while start < end:
            children = node.children
            if children is None:
                break
            child: Node | None
            if type(children) is Node:
                child = children
            else:
                child = children.get(key[start : start + span])  # type: ignore[union-attr]
                if child is None:
                    break
            run = child.key
            stop = start + child.num_bytes
            if stop <= end and key.startswith(run, start):
                path.append(child)
                node = child
                start = stop
                continue
            at = self.tree.common_pages(run, key, start, end)
            if at:
                return path, child, at
            break
        return path, None, 0

    def _fetch_rest(
        self,
        namespace: Namespace,
        path: list[Node],
        partial: Node | None,
        at: int,
        tokens: bytes,
        waiter: Waiter | None,
        tenant: int,
    ) -> None:
        """Have L3 asked for the pages of `tokens`, behind what matched."""
        assert self.l3 is not None
        if partial is not None:
            path.append(self.tree.split(partial, at))
        self.l3.want(namespace, path, tokens, waiter, tenant)

    def _worth_loading(self, num_pages: int, now: bool = True) -> bool:
        """Whether a host hit of so many pages is to be loaded, as far as its size says, and `now` is none too many."""
        config = self.config
        if num_pages * config.page_size < config.load_back_threshold:
            return False
        quota = config.load_back_quota
        if not now or not quota or num_pages + sum(load.num_pages for load in self.loads.values()) <= quota:
            return True
        self.counters["loads_declined"] += 1
        return False

    def host_end(self, path: list[Node]) -> Node | None:
        """The deepest node of a path whose bytes are on the host."""
        bit = 1 << HOST
        for node in reversed(path):
            if node.cells[HOST] is not None and not node.writing & bit:
                return node
        return None

    def set_tenant(self, name: str, changes: Mapping[str, int | None]) -> None:
        """Change these limits of a tenant, fields of `Limits` in pages, or make it. What is above a lowered ceiling
        goes in slices (`step`). BadRequest: there are no tenants, or they can't be so; nothing is changed."""
        if self.tenants is None:
            raise BadRequest("there are no tenants here: put a [tenants] section into the configuration")
        self._moves += 1
        self.tenants.set(name, changes)
        self._stuck = None
        self.backups.let_go()

    def _refuse(self, num_fresh: int, path: list[Node], partial: Node | None, at: int, tenant: int) -> None:
        """`NoSpace` unless `num_fresh` pages can be had once the matched path is pinned. Changes nothing."""
        if self.tenants is not None:
            self._refuse_tenant(num_fresh, path, partial, at, tenant, self._tally(), [])
            return
        room = self._room(path, partial, at)
        if num_fresh > room and num_fresh > room + self._in_copies(path, partial, at):
            locked = self.pools[DEVICE].locked + self._pinned(path, partial, at)
            raise self._no_space(num_fresh, locked, "release a lease or grow the pool")

    def _refuse_tenant(
        self,
        num_fresh: int,
        path: Sequence[Node],
        partial: Node | None,
        at: int,
        tenant: int,
        promised: Tally,
        copied: list[Copied],
    ) -> None:
        """As `_refuse`, where there are tenants, beside pages that are promised. `copied`: kept for the next item."""
        tenants = self.tenants
        assert tenants is not None
        if not num_fresh or (
            promised.total + num_fresh <= self.pools[DEVICE].free
            and not tenants.over(DEVICE, tenant, promised.of(tenant) + num_fresh)
        ):
            return
        nodes = [(node, node.num_bytes // self.page_bytes) for node in path]
        if partial is not None:
            nodes.append((partial, at // self.page_bytes))
        pinned = tenants.unlocked(DEVICE, nodes)
        if num_fresh > tenants.left(tenant, promised, pinned):
            if not copied:
                copied.append(self._copied(path, partial, at))
            if num_fresh > tenants.left(tenant, promised, pinned, copied[0]):
                raise self._no_room(tenant, num_fresh, promised, pinned, "release a lease, or raise the limit")

    def _no_room(
        self,
        tenant: int,
        need: int,
        promised: Tally,
        pinned: Mapping[int, int],
        remedy: str,
        copied: Copied = NO_COPIES,
    ) -> NoSpace:
        """A tenant's: its ceiling, the floors of others or locks leave too little."""
        tenants, pool = self.tenants, self.pools[DEVICE]
        assert tenants is not None
        share = tenants.shares[DEVICE][tenant]
        locked = share.locked + pinned.get(tenant, 0)
        facts = tenants.facts(tenant, need, promised, locked)
        others = promised.total - self.promised(0)
        error = self._no_space(need, pool.locked + sum(pinned.values()), remedy, others)
        error.facts.update(facts)
        if need > tenants.headroom(DEVICE, tenant, pinned, copied) - promised.of(tenant):
            error.facts["at_ceiling"] = True
            if share.ceiling is not None and need > share.ceiling:
                remedy = "it never may have so many: raise its device_ceiling, or ask for fewer pages at once"
            error.message = (
                f"tenant {tenants.names[tenant]!r}: need {need} pages; its ceiling on {self.resources[DEVICE].name}/"
                f"DEVICE is {share.ceiling}, it has {share.charged}, {locked} of these cached and locked, "
                f"{share.leased} leased or fenced, and {promised.of(tenant)} are promised; {remedy}"
            )
        elif facts["kept_by_floors"]:
            error.message += f" (tenant {tenants.names[tenant]!r}; the floors of others keep {facts['kept_by_floors']})"
        error.args = (error.message,)
        return error

    def _tally(self) -> Tally:
        """Pages that those who wait will get."""
        tally = Tally()
        for waiting in self._waiting:
            for number, num_pages in waiting.wants:
                tally.add(number, num_pages)
        return tally

    def _copied(self, path: Sequence[Node], partial: Node | None, at: int) -> Copied:
        """As `_in_copies`, by tenant, and what of it leaves with the copies' end."""
        copied = Copied({}, {})
        if not self._distrusts:
            self._locked_by_copies(path, partial, at, copied)
        return copied

    def _refuse_slots(self, i: int, need: Need, before: int = 0) -> None:
        """As `_refuse`, of a companion; `before`: what others of the same command get of it."""
        companions = self.companions
        assert companions is not None
        room = companions.room(i, need.pinned) - before
        if need.num_slots > max(room, 0) and (
            self._distrusts or need.num_slots > room + companions.in_copies(i, need.held)
        ):
            c = companions.kinds[i].device
            locked = self.pools[c].locked + need.pinned
            raise self._no_space(need.num_slots, locked, "release a lease or grow the pool", before, c)

    def _beside(self) -> _Beside:
        """Nothing of a command yet."""
        more = [] if self.companions is None else [0] * len(self.companions.kinds)
        return _Beside(more, None if self.tenants is None else self._tally())

    def _refuse_growth(self, tenant: int, num_fresh: int, slots: Sequence[int], beside: _Beside) -> None:
        """As `_refuse`, of an extend, beside those of its command that come before it."""
        pool, need, looked = self.pools[DEVICE], beside.need, beside.looked
        if beside.tally is not None:
            self._refuse_tenant(num_fresh, (), None, 0, tenant, beside.tally, beside.copied)
        elif num_fresh and (need + num_fresh > pool.free or self._waiting):
            if not looked:
                looked.append(self._room((), None, 0))
            if need + num_fresh > looked[0] and len(looked) == 1:
                looked.append(self._in_copies((), None, 0))
            if need + num_fresh > sum(looked):
                raise self._no_space(num_fresh, pool.locked, "release a lease or grow the pool", need)
        for i, count in enumerate(slots):
            self._refuse_slots(i, Need(count, 0, {}), beside.more[i])

    def _never(self, need: Sequence[int]) -> bool:
        """So much there is not, whoever lets go of what; `need` of the resources, Full first."""
        return any(count > pool.total for count, (_, pool) in zip(need, self._device_pools, strict=False))

    @property
    def _distrusts(self) -> bool:
        """Somebody has waited too long for a copy, and none has ended since: nobody else waits for one."""
        return self._distrusted == self.backups.num_over

    def promised(self, r: int) -> int:
        """Slots of a resource that those who wait will get: they come first."""
        if not self._waiting:
            return 0
        if r == 0:
            return sum(waiting.num_fresh for waiting in self._waiting)
        return sum(waiting.more[r - 1] for waiting in self._waiting)

    def _room(self, path: Sequence[Node], partial: Node | None, at: int) -> int:
        """Pages that can be had now once the matched path is pinned; below 0 if more than that is promised.

        Exact, since locks are whole paths: whatever is cached and not locked can be evicted, leaf by leaf.
        """
        pool = self.pools[DEVICE]
        pinned = self._pinned(path, partial, at)
        # Those who wait already have their pins, and come first.
        return pool.free + pool.evictable - pinned - self.promised(0)

    def _pinned(self, path: Sequence[Node], partial: Node | None, at: int) -> int:
        """Pages of the matched path that nothing locks yet."""
        lock = len(self.pools) + DEVICE
        pinned = 0
        for node in path:
            if node.cells[DEVICE] is not None and not node.cells[lock]:
                pinned += len(node.cells[DEVICE]) // SLOT_BYTES
        if partial is not None and partial.cells[DEVICE] is not None and not partial.cells[lock]:
            pinned += at // self.page_bytes
        return pinned

    def _in_copies(self, path: Sequence[Node], partial: Node | None, at: int) -> int:
        """Pages that nothing but write-throughs of ours locks, those of the matched path not counted.

        They can be evicted once the copies are over, which is in a moment; every other lock is a runner's to let go.
        None where that moment has become too long.
        """
        return 0 if self._distrusts else self._locked_by_copies(path, partial, at)

    def _locked_by_copies(
        self, path: Sequence[Node], partial: Node | None, at: int, by_tenant: Copied | None = None
    ) -> int:
        """The same, however long that takes. `by_tenant` is filled with it, where there are tenants."""
        counts: dict[Node, int] = {}  # of the nodes on their paths: how many copies end at it, and below it
        below: dict[Node, int] = {}  # how many of its children have not been added to it
        linked: set[Node] = set()
        for ticket in self.writes:
            node = ticket.end
            assert node is not None
            counts[node] = counts.get(node, 0) + 1
            while node not in linked:
                linked.add(node)
                up = node.parent
                assert up is not None
                if up.parent is None:
                    break
                counts.setdefault(up, 0)
                below[up] = below.get(up, 0) + 1
                node = up
        lock = len(self.pools) + DEVICE
        matched = set(path)
        pages = 0
        ready = [node for node in counts if node not in below]
        leaving = self._leaving() if by_tenant is not None else ()
        while ready:
            node = ready.pop()
            count = counts[node]
            if node.cells[lock] == count and node not in matched:
                num_pages = len(node.cells[DEVICE]) // SLOT_BYTES
                if node is partial:
                    num_pages -= at // self.page_bytes
                pages += num_pages
                if by_tenant is not None:
                    assert self.tenants is not None
                    tenant = node.cells[self.tenants.place[DEVICE]]
                    for found in (by_tenant.pages, by_tenant.gone)[: 1 + (node in leaving)]:
                        found[tenant] = found.get(tenant, 0) + num_pages
            up = node.parent
            if up in below:
                counts[up] += count
                below[up] -= 1
                if not below[up]:
                    ready.append(up)
        return pages

    def _leaving(self) -> set[Node]:
        """Those that leave the device with the end of a copy."""
        found: set[Node] = set()
        for ticket in self.writes:
            if ticket.demote:
                assert ticket.end is not None
                found.update(self.backups.sent(ticket.end, ticket.demote))
        return found

    def _no_space(self, need: int, locked: int, remedy: str, promised: int = 0, c: int = DEVICE) -> NoSpace:
        """`promised`: to those of the same command that come before, beside those who wait. `c`: a device's cell."""
        promised += self.promised(c // self.T)
        pool = self.pools[c]
        name = self.resources[c].name
        what = "slots" if c else "pages"
        if need > pool.total:
            remedy = f"it never has so many: grow the pool, or ask for fewer {what} at once"
        more: dict[str, Any] = {}
        if self._distrusts and self.writes:
            ticket = self.writes[0].id
            more = {"copy": ticket, "in_copies": self._locked_by_copies((), None, 0)}
            remedy = f"copy {ticket} to the host does not end, and {more['in_copies']} pages wait for it; {remedy}"
        others = len(self.line) - self._late
        if others:
            remedy = f"{others} {'other waits' if others == 1 else 'others wait'} for room; {remedy}"
        return NoSpace(
            f"{name}/DEVICE: need {need} {what}; of {pool.total}, {pool.free} are free, {pool.cached} cached and "
            f"{locked} of these locked, {pool.leased} leased, {pool.fenced} fenced, {promised} promised; {remedy}",
            resource=name,
            tier=Tier.DEVICE.name,
            need=need,
            free=pool.free,
            cached=pool.cached,
            locked=locked,
            leased=pool.leased,
            fenced=pool.fenced,
            promised=promised,
            total=pool.total,
            waiting=others,
            **more,
        )

    # -- inside: granting ------------------------------------------------------------------------------------

    def _grant(
        self,
        lease: Lease,
        num_fresh: int,
        on_device: Sequence[Node],
        on_host: Sequence[Node],
        total: int,
        spare: Sequence[int],
    ) -> Grant:
        """Take the pages, which are free by now; start the load-back of what the match found on the host alone.

        With companions a load is of all resources at once.
        """
        pool = self.pools[DEVICE]
        table = pool.take(num_fresh, [node.cells[DEVICE] for node in on_device])
        pool.leased += num_fresh
        if self.tenants is not None:
            self.tenants.lease(DEVICE, lease.tenant, num_fresh)
        if lease.waiting:
            lease.waiting = False
        lease.slots = table
        size = self.config.page_size
        device_tokens = lease.committed * size
        shares: tuple[Share, ...] = ()
        parts: tuple[Part, ...] = ()
        if self.companions is not None:
            shares, parts = self.companions.grant(lease, on_device, on_host, total, spare)
        elif not on_host:
            return _new(Grant, (lease.id, device_tokens, 0, table, None, (), ()))
        if not on_host and not parts:
            return Grant(lease.id, device_tokens, 0, table, None, shares, lease.reaches)
        source = b"".join([node.cells[HOST] for node in on_host])
        num_pages = len(source) // SLOT_BYTES
        end = on_host[-1] if on_host else on_device[-1]
        load = lease.load = Ticket(TicketId(self.new_id()), Tier.DEVICE, end, num_pages, lease)
        self.loads[load.id] = load
        self.counters["load_pages"] += num_pages
        name = self.resources[DEVICE].name
        start = lease.committed * SLOT_BYTES
        target = table[start : start + len(source)]
        self._effects.append(Copy(load.id, name, Tier.HOST, Tier.DEVICE, source, target, lease.id, parts))
        matched = device_tokens + num_pages * size
        host_tokens = num_pages * size if self.companions is None else matched - lease.from_device
        return Grant(lease.id, matched, host_tokens, table, load.id, shares, lease.reaches)

    def _growth(self, s: Session, item: Extension, before: Sequence[_Growth | SglcacheError]) -> tuple[Lease, int]:
        """Whom an item extends, and by how many pages; `before` it in its command are these. Changes nothing."""
        lease, tokens, reserve, upto, spare = item
        held = self._lease(s, LeaseId(lease))
        if self.companions is not None:
            self.companions.check_spare(spare)
        elif spare:
            raise BadRequest("there are no companions to have spare slots of", spare=list(spare))
        if len(tokens) % TOKEN_BYTES or reserve < 0 or (upto is not None and upto < 0):
            raise BadRequest(
                f"extend needs whole uint32s, reserve and upto >= 0; got {len(tokens)} bytes, reserve {reserve}, "
                f"upto {upto}"
            )
        if held.extending:
            if any(isinstance(growth, _Growth) and growth.lease is held for growth in before):
                raise BadRequest(
                    f"lease {lease} stands twice in one extend; give all its tokens in one item, or send two commands",
                    lease=lease,
                )
            raise BadRequest(f"lease {lease} has an extend under way; wait for its answer", lease=lease)
        have = held.num_bytes + len(tokens) + reserve * TOKEN_BYTES
        if upto is not None:
            have = min(have, upto * TOKEN_BYTES)
        return held, max(0, -(-have // self.page_bytes) - held.num_pages)

    def _extended(self, growths: Sequence[_Growth | SglcacheError]) -> Extended:
        """Take the pages, which are free by now."""
        self._moves += 1
        pool = self.pools[DEVICE]
        results: list[bytes | SglcacheError] = []
        shares: list[tuple[bytes, ...]] = []
        for growth in growths:
            if isinstance(growth, SglcacheError):
                results.append(growth)
                shares.append(())
                continue
            lease, tokens, num_fresh, spare, _ = growth
            lease.append(tokens)
            lease.extending = False
            if self.companions is not None:
                shares.append(self.companions.grow(lease, num_fresh, spare))
            fresh = b""
            if num_fresh:
                fresh = pool.take(num_fresh)
                pool.leased += num_fresh
                if self.tenants is not None:
                    self.tenants.lease(DEVICE, lease.tenant, num_fresh)
                lease.append_slots(fresh)
            results.append(fresh)
        return Extended(results, shares if self.companions is not None else ())

    # -- inside: waiting for room ------------------------------------------------------------------------------

    def _make_room(self, what: str, s: Session, wants: Sequence[tuple[int, int]], more: Sequence[int]) -> bool:
        """Evict until so many pages, by (tenant, pages), and slots of companions, are free; False: a slice was used up,
        or copies of ours lock what is needed. It is for that, of this session."""
        if self.departures is not None:
            self.departures.cause = Cause(what, s.id, wants[0][0])
        if self.tenants is not None:
            if self.tenants.short(wants) or not self.tenants.make_room(wants):
                return False
        else:
            pool = self.pools[DEVICE]
            ((_, num_pages),) = wants
            if num_pages > pool.free + pool.evictable or not self.evict(DEVICE, num_pages):
                return False
        return self.companions is None or self.companions.make_room(more)

    def _serve_waiting(self) -> None:
        """A slice for the first of those who wait: nobody overtakes it."""
        waiting = self._waiting[0]
        pool = self.pools[DEVICE]
        if self._short(waiting):
            # Others were served, or locked what there was: can there be room yet? Asked anew after each copy's end.
            if not self.writes or waiting.judged != self.backups.num_over:
                waiting.judged = self.backups.num_over
                if not self._shed(waiting):
                    return
            if self._short(waiting):
                self._stuck = self.revision
                return
        what = "extend" if waiting.lease is None else "acquire"
        if self._make_room(what, waiting.session, waiting.wants, waiting.more):
            self._leave_queue(waiting)
            self._served(waiting)
        elif self.tenants is not None:
            if self.tenants.stuck(waiting.wants) or (
                self.companions is not None and self.companions.coming(waiting.more)
            ):
                self._stuck = self.revision
        elif waiting.num_fresh > pool.free and (
            pool.free + self.backups.demoting >= waiting.num_fresh or not pool.evictable
        ):
            self._stuck = self.revision  # all that it takes is on its way
        elif self.companions is not None and self.companions.coming(waiting.more):
            self._stuck = self.revision

    def _short(self, waiting: _Waiting) -> bool:
        """More is wanted than can be had now."""
        if self.tenants is not None and self.tenants.short(waiting.wants):
            return True
        pools = zip(self._device_pools, (waiting.num_fresh, *waiting.more), strict=True)
        return any(need > pool.free + pool.evictable for (_, pool), need in pools)

    @property
    def _device_pools(self) -> list[tuple[int, SlotPool]]:
        """(cell, pool) of each resource."""
        return [(c, self.pools[c]) for c in range(0, len(self.pools), self.T)]

    def _shed(self, waiting: _Waiting) -> bool:
        """Refuse what will find too little room once copies of ours are over: of several extends each for itself, in
        order; or have it stand in line, if it may. False: all of it."""
        remedy = "others were served or locked meanwhile; try again"
        copying = [self._in_copies((), None, 0)]
        if self.companions is not None:
            kinds = range(len(self.companions.kinds))
            copying += [0 if self._distrusts else self.companions.in_copies(i) for i in kinds]
        pools = self._device_pools
        rooms = [pool.free + pool.evictable + count for (_, pool), count in zip(pools, copying, strict=True)]
        tenants, tally = self.tenants, Tally()
        copied = NO_COPIES if tenants is None else self._copied((), None, 0)
        lease = waiting.lease
        if lease is not None and tenants is not None:
            rooms[0] = tenants.left(lease.tenant, tally, NOBODY, copied)
        if lease is not None:
            for (c, pool), need, room in zip(pools, (waiting.num_fresh, *waiting.more), rooms, strict=True):
                if need > room:
                    if tenants is not None and c == DEVICE:
                        error = self._no_room(lease.tenant, need, tally, NOBODY, remedy, copied)
                    else:
                        # What it was promised itself is no reason.
                        error = self._no_space(need, pool.locked, remedy, -need, c)
                    if self._back_in_line(waiting, error):
                        return False
                    self._leave_queue(waiting)
                    self.counters["refused"] += 1
                    self.wake(waiting.session, waiting.request, error)
                    self._give_back(lease, used=False)
                    return False
            return True
        for growth in waiting.growths:
            if isinstance(growth, _Growth):
                needs = (growth.num_fresh, *growth.more)
                if tenants is not None:
                    rooms[0] = tenants.left(growth.lease.tenant, tally, NOBODY, copied) if growth.num_fresh else 0
                for (c, pool), need, room in zip(pools, needs, rooms, strict=True):
                    if need > room:
                        if tenants is not None and c == DEVICE:
                            error = self._no_room(growth.lease.tenant, need, tally, NOBODY, remedy, copied)
                        else:
                            error = self._no_space(need, pool.locked, remedy, -need, c)
                        if self._back_in_line(waiting, error):
                            return False
                        self.counters["refused"] += 1
                        self._fail_growth(waiting, growth, error)
                        break
                else:
                    tally.add(growth.lease.tenant, growth.num_fresh)
                    rooms = [room - need for room, need in zip(rooms, needs, strict=True)]
        return any(isinstance(growth, _Growth) for growth in waiting.growths)

    def _fail_growth(self, waiting: _Waiting, growth: _Growth, error: SglcacheError) -> None:
        """Not this one of the extends that wait together; those that are left go on waiting, if there are any."""
        growth.lease.extending = False
        waiting.num_fresh -= growth.num_fresh
        waiting.more = [whole - its for whole, its in zip(waiting.more, growth.more, strict=True)]
        waiting.growths = [error if each is growth else each for each in waiting.growths]
        self._stuck = self._tried = None
        if not any(isinstance(each, _Growth) for each in waiting.growths):
            self._leave_queue(waiting)
            self.wake(waiting.session, waiting.request, self._extended(waiting.growths))

    def _served(self, waiting: _Waiting) -> None:
        """There is room, and it has left the queue: its answer."""
        lease, end = waiting.lease, waiting.end
        if lease is None:
            self.wake(waiting.session, waiting.request, self._extended(waiting.growths))
            return
        grant = self._grant(lease, waiting.num_fresh, *self._path(lease, end), waiting.total, waiting.spare)
        self.wake(waiting.session, waiting.request, grant)

    def _path(self, lease: Lease, end: Node | None) -> tuple[list[Node], list[Node]]:
        """The path that a lease has pinned up to `end`: on the device, and on the host alone.

        Since it was matched splits have made more nodes of it, and evictions beside it fewer; the end is still the end.
        """
        on_device: list[Node] = []
        on_host: list[Node] = []
        nodes = on_host
        while end is not None and end.parent is not None:
            if end is lease.node:
                nodes = on_device
            nodes.append(end)
            end = end.parent
        return on_device[::-1], on_host[::-1]

    def _leave_queue(self, waiting: _Waiting) -> None:
        if waiting.standing is not None:
            self._leave_line(waiting.standing)
            return
        self._waiting.remove(waiting)
        self._stuck = None

    # -- inside: in line for room that others lock ------------------------------------------------------------------

    def _stand(self, standing: Standing) -> None:
        """Busy: there are too many."""
        self.line.stand(standing)
        self._tried = None

    def _back_in_line(self, waiting: _Waiting, refusal: NoSpace) -> bool:
        """Have one that waited for copies of ours stand at the head of the line; False: it may not, or that is full.

        An acquire gives back its pins, which were to keep what it had matched: whoever stands in line holds nothing.
        """
        patience, lease = waiting.patience, waiting.lease
        if patience is None or patience.room is None:
            return False
        standing = waiting.again
        if standing is None:
            standing = Standing(waiting.request, waiting.session, patience, (), extends=waiting)
            standing.tenant = waiting.wants[0][0]
        standing.need = (waiting.num_fresh, *waiting.more)
        standing.aside = _at_ceiling(refusal)
        try:
            self.line.stand(standing, first=True)
        except Busy:
            return False
        self._waiting.remove(waiting)
        self._stuck = self._tried = None
        if lease is None:
            waiting.standing = standing
            return True
        matched, from_host = waiting.counted  # it is counted when its turn comes
        self.counters["requests"] -= 1
        self.counters["request_tokens"] -= standing.num_bytes // TOKEN_BYTES
        self.counters["matched_tokens"] -= matched
        self.counters["host_matched_tokens"] -= from_host
        self._give_back(lease, used=False)
        return True

    def _leave_line(self, standing: Standing, served: bool = False) -> None:
        self.line.leave(standing, served)
        self._tried = None
        if standing.extends is not None:
            standing.extends.standing = None

    def _serve_line(self) -> None:
        """Is there room for the first in line, now that something has changed? Nobody behind it is looked at.

        With tenants: nor behind the first of each tenant whose own ceiling is in its way."""
        for first in self.line.firsts():
            try:
                if first.retry is None:
                    self._refuse_growths(first.extends)
                    grant = None
                else:
                    grant = first.retry()
            except _NotYet as still:
                first.need, first.aside = still.need, still.aside
                if still.aside:
                    continue
                break
            except SglcacheError as error:  # it can't be any more, whoever lets go of what
                self._leave_line(first)
                self.wake(first.session, first.request, error)
                return
            self._leave_line(first, served=True)
            if first.retry is None:
                self._admit(first.extends)
            elif grant is not None:
                self.wake(first.session, first.request, grant)
            return
        self._tried = self.revision

    def _refuse_growths(self, waiting: _Waiting) -> None:
        """_NotYet unless there is room for all of them."""
        beside = self._beside()
        for growth in waiting.growths:
            if isinstance(growth, _Growth):
                tenant = growth.lease.tenant
                try:
                    self._refuse_growth(tenant, growth.num_fresh, growth.more, beside)
                except NoSpace as refusal:
                    raise _NotYet((waiting.num_fresh, *waiting.more), refusal) from refusal
                beside.add(tenant, growth.num_fresh, growth.more)

    def _admit(self, waiting: _Waiting) -> None:
        """Extends that have left the line: there is room for them, now or when copies of ours are over."""
        if self._waiting or not self._make_room("extend", waiting.session, waiting.wants, waiting.more):
            self._waiting.append(waiting)
        else:
            self.wake(waiting.session, waiting.request, self._extended(waiting.growths))

    def _let_grow(self, waiting: _Waiting) -> None:
        """The leases of extends that come to nothing can be extended again."""
        for growth in waiting.growths:
            if isinstance(growth, _Growth):
                growth.lease.extending = False

    def _expire_waiting(self, now: float) -> int:
        """Refuse who has waited long enough: in line, or for a copy of ours; how many."""
        if not (self.line or self._waiting):
            return 0
        late = self.line.late(now)
        if late and self._tried != self.revision:
            self._serve_line()  # the first has its last try
            late = [standing for standing in late if standing in self.line]
        told = self._held()
        for standing in late:
            self._late = 1  # it is in line still while it is told how many others are
            place = self.line.place(standing)
            if standing.retry is None:
                self._turn_away(standing, now, {**told, "place": place})
                continue
            need, locked = standing.need[0], self.pools[DEVICE].locked
            error = self._waited(self._no_space(need, locked, "release a lease or grow the pool"), standing, now, told)
            error.facts["place"] = place
            self._leave_line(standing)
            self.counters["refused"] += 1
            self.wake(standing.session, standing.request, error)
        self._late = 0
        over = [waiting for waiting in self._waiting if waiting.deadline <= now]
        if over and self.writes:
            self._distrusted = self.backups.num_over
        for waiting in over:
            self._give_up(waiting, now, told)
        return len(late) + len(over)

    def _turn_away(self, standing: Standing, now: float, told: dict[str, Any]) -> None:
        """Extends whose time is over: each for itself if it is their turn, else those that need no room."""
        waiting: _Waiting = standing.extends
        first = self.line.first is standing
        beside = self._beside()
        refused: list[tuple[_Growth, NoSpace]] = []
        for growth in waiting.growths:
            if not isinstance(growth, _Growth):
                continue
            tenant = growth.lease.tenant
            try:
                if not first and (growth.num_fresh or any(growth.more)):
                    raise self._no_space(growth.num_fresh, self.pools[DEVICE].locked, "release a lease", beside.need)
                self._refuse_growth(tenant, growth.num_fresh, growth.more, beside)
            except NoSpace as error:
                refused.append((growth, self._waited(error, standing, now, told)))
                continue
            beside.add(tenant, growth.num_fresh, growth.more)
        for growth, refusal in refused:
            self.counters["refused"] += 1
            self._fail_growth(waiting, growth, refusal)
        if waiting.standing is not None:
            self._leave_line(standing)
            self._admit(waiting)

    def _give_up(self, waiting: _Waiting, now: float, told: dict[str, Any]) -> None:
        """Who waits for a copy of ours that does not end in time."""
        assert waiting.patience is not None
        lease, remedy = waiting.lease, "try again later, or restart the rank"
        pool = self.pools[DEVICE]
        if lease is not None:
            self._leave_queue(waiting)
            self.counters["refused"] += 1
            error = self._waited(self._no_space(waiting.num_fresh, pool.locked, remedy), waiting, now, told)
            self.wake(waiting.session, waiting.request, error)
            self._give_back(lease, used=False)
            return
        for growth in waiting.growths:
            if isinstance(growth, _Growth) and (growth.num_fresh or any(growth.more)):
                self.counters["refused"] += 1
                refusal = self._no_space(growth.num_fresh, pool.locked, remedy, -growth.num_fresh)
                self._fail_growth(waiting, growth, self._waited(refusal, waiting, now, told))
        if waiting in self._waiting:
            self._leave_queue(waiting)
            self.wake(waiting.session, waiting.request, self._extended(waiting.growths))

    def _waited(self, error: NoSpace, who: Standing | _Waiting, now: float, told: dict[str, Any]) -> NoSpace:
        """The refusal of one that waited: how long, and who holds what."""
        assert who.patience is not None
        waited_s = max(0.0, now - who.patience.since)
        largest = ", ".join(f"session {each['session']} {each['pages']}" for each in told["holders"])
        words = f"{error.message}; it waited {waited_s:.3g} s"
        if largest:
            words += f"; pages in leases: {largest}"
        return NoSpace(words, **error.facts, **told, waited_s=waited_s)

    def _held(self) -> dict[str, Any]:
        """Who holds most, for a refusal: pages in the tables of leases, shared ones with each."""
        holders = [
            {
                "session": s.id,
                "leases": len(s.leases),
                "pages": sum(lease.num_pages for lease in s.leases.values()),
                "pinned_pages": sum(pin.num_pages for pins in s.pins.values() for pin in pins),
                "ended": s.ended,
            }
            for s in self.sessions.values()
            if s.leases or s.pins
        ]
        holders = [each for each in holders if each["pages"] or each["pinned_pages"]]
        holders.sort(key=lambda each: (each["pages"], each["pinned_pages"]), reverse=True)
        return {"holders": holders[:NUM_HOLDERS]}

    @property
    def oldest_wait(self) -> float | None:
        """Since when the one waits that has waited longest, for room or for a copy of ours, on the caller's clock."""
        waits = [standing.patience.since for standing in self.line]
        waits += [waiting.patience.since for waiting in self._waiting if waiting.patience is not None]
        return min(waits, default=None)

    def _take_no_more(self, lease: Lease) -> None:
        """It is being given back: no command from now on, and an extend of it that waits comes to nothing."""
        lease.releasing = True
        if lease.extending:
            for waiting in [*self._waiting, *[each.extends for each in self.line.extends]]:
                for growth in waiting.growths:
                    if isinstance(growth, _Growth) and growth.lease is lease:
                        error = Changed("the lease was released before there was room to extend it")
                        self._fail_growth(waiting, growth, error)
                        return

    # -- inside: committing ----------------------------------------------------------------------------------

    def _pump(self, s: Session) -> None:
        """Apply the session's operations whose tickets are done, in order."""
        queue = s.queue
        while queue:
            op = queue[0]
            if s.events.get(op.ticket, 0) != s.all_shards:
                return
            lease = op.lease
            if lease is not None and lease.load is not None:
                return  # its own copy still writes these pages
            queue.popleft()
            s.last_done = ticket = op.ticket
            events = s.events
            del events[ticket]
            if events and len(events) > STALE_EVENTS:  # of tickets whose command was refused: nobody will ask for them
                s.events = {number: mask for number, mask in events.items() if number > ticket}
            if op.seen and s.with_duplicates:
                self._drop_duplicates(s, op.seen)
            if lease is None:
                continue
            if op.release:
                self._give_back(lease)
                if op.request is not None:
                    self.wake(s, op.request, _new(Released, (lease.id,)))
                continue
            assert op.request is not None
            if lease.failed:
                self.wake(s, op.request, TransferError("the lease's load-back failed: abort it and acquire anew"))
            else:
                self.wake(s, op.request, self._commit(lease, op))

    def _commit(self, lease: Lease, op: Operation) -> Committed:
        s = lease.session
        self.counters["commits"] += 1
        companions = self.companions
        news = 0  # pages, the last ones, of which companions have come
        if companions is None:
            duplicates = self._adopt(lease, op.num_pages)
        else:
            before = lease.committed
            self._moves += 1  # locks, and slots of the lease's own, whether pages of Full come or not
            if op.floor:
                companions.give_up(lease, op.floor)
            duplicates = self._adopt(lease, op.num_pages)
            news = companions.adopt(lease, before, s.num_replies + 1)
            news = max(news, companions.put_ends(lease, op.ends))
            companions.slide(lease, before)
        if self._by_use:
            self._use(lease)
        if self.T > HOST:
            self.backups.used(lease.node)
            if news and not self.backups.policy.on_eviction:
                assert companions is not None
                assert lease.node is not None
                companions.back_up(lease.node, news)
        s.num_replies = reply = s.num_replies + 1
        lost = len(duplicates)
        if duplicates:
            lease.duplicates.append((reply, duplicates))
        if lease.duplicates:
            for i, (number, slots) in enumerate(lease.duplicates):
                if number == 0:  # found by a load-back; this is the first answer that can say so
                    lease.duplicates[i] = (reply, slots)
                    lost += len(slots)
            s.with_duplicates[lease.id] = lease
        if companions is not None and companions.number_duplicates(lease, reply):
            s.with_duplicates[lease.id] = lease
        first = lease.reported
        lease.reported = committed = lease.committed
        canonical = b""
        if lease.renamed:
            lease.renamed = False
            canonical = bytes(lease.slots[first * SLOT_BYTES : committed * SLOT_BYTES])
        return _new(
            Committed,
            (
                lease.id,
                committed * self.config.page_size,
                first,
                canonical,
                lost // SLOT_BYTES,
                reply,
                () if companions is None else companions.shares(lease),
            ),
        )

    def _adopt(self, lease: Lease, num_pages: int) -> bytes:
        """Give the lease's pages up to `num_pages` to the tree; the slots that the tree already had better ones for.

        One rule: where the tree has a ready cell, keep it; where it has none, adopt the newcomer's. The lease's pin
        moves to the new end.
        """
        committed = lease.committed
        if num_pages <= committed:
            return b""
        self._moves += 1
        page_bytes = self.page_bytes
        tree, pool = self.tree, self.pools[DEVICE]
        key, start = lease.text(committed * page_bytes)
        left_out = committed * page_bytes - start
        end = num_pages * page_bytes - left_out
        slots = lease.slots
        before = lease.node
        node = before if before is not None else self.space(lease.namespace).root
        duplicates: list[bytes] = []
        better: list[tuple[int, bytes]] = []  # (byte of the page table, slots) where the tree had them
        changed: list[Node] = []
        while start < end:
            at = (left_out + start) // page_bytes * SLOT_BYTES
            child = tree.child(node, key, start)
            if child is None:
                node = tree.add(node, key, start, end)
                node.cells[DEVICE] = bytes(slots[at : num_pages * SLOT_BYTES])
                changed.append(node)
                break
            if not (start + child.num_bytes <= end and key.startswith(child.key, start)):
                child = tree.split(child, tree.common_pages(child.key, key, start, end))
            start += child.num_bytes
            mine = bytes(slots[at : (left_out + start) // page_bytes * SLOT_BYTES])
            run = child.cells[DEVICE]
            if run is None:
                child.cells[DEVICE] = mine
                changed.append(child)
            else:
                duplicates.append(mine)
                better.append((at, run))
            node = child
        if self.tenants is not None:
            self.tenants.belongs(changed, DEVICE, lease.tenant)
        self.orders[DEVICE].pin(node, before)
        lease.node = node
        given = num_pages - committed
        lost = 0
        if better:
            lost = sum(map(len, duplicates)) // SLOT_BYTES
            table = slots if isinstance(slots, bytearray) else bytearray(slots)
            for at, run in better:
                table[at : at + len(run)] = run
            lease.slots = table
            lease.renamed = True
            self.counters["duplicate_pages"] += lost
        adopted = given - lost
        pool.leased -= adopted
        pool.cached += adopted
        if self.tenants is not None:
            self.tenants.lease(DEVICE, lease.tenant, -adopted)
        self.counters["committed_pages"] += adopted
        lease.committed = num_pages
        for each in changed:
            self.change(DEVICE, each, True, lease.session_id)
        return b"".join(duplicates) if better else b""

    def _drop_duplicates(self, s: Session, seen: int) -> None:
        """Pages of which the session has read, before the event that is done now, that there are better ones."""
        pool = self.pools[DEVICE]
        for lease in list(s.with_duplicates.values()):
            kept = []
            for number, slots in lease.duplicates:
                if 0 < number <= seen:
                    self._moves += 1
                    pool.leased -= len(slots) // SLOT_BYTES
                    pool.give(slots)
                    if self.tenants is not None:
                        self.tenants.lease(DEVICE, lease.tenant, -(len(slots) // SLOT_BYTES))
                else:
                    kept.append((number, slots))
            lease.duplicates = kept
            left = self.companions is not None and self.companions.drop_duplicates(lease, seen)
            if not kept and not left:
                del s.with_duplicates[lease.id]

    # -- inside: giving back ---------------------------------------------------------------------------------

    def _give_back(self, lease: Lease, used: bool = True) -> None:
        """Exactly what it took: its own slots to the free list, its pins let go. The end of every lease.

        `used`: for the policies that count hits it is one of what it matched, if it has not committed.
        """
        s = lease.session
        pool = self.pools[DEVICE]
        self._moves += 1
        own = lease.own_slots
        if own:
            count = len(own) // SLOT_BYTES
            if s.ended:
                pool.fenced -= count
            else:
                pool.leased -= count
            pool.give(own)
            if self.tenants is not None:
                self.tenants.lease(DEVICE, lease.tenant, -count)
        if used and self._by_use:
            self._use(lease)
        orders = self.orders
        companions = self.companions
        now = self.tree.now
        if companions is not None and lease.parts:
            companions.give_back(lease)
        if self.T > HOST:
            if used and self.backups.policy.selective:
                self.backups.used(lease.node)
            if lease.host_node is not None:
                lease.host_node.used = now
                orders[HOST].unpin(lease.host_node)
                self.backups.let_go()
        node = lease.node
        if node is not None:
            node.used = now
            orders[DEVICE].unpin(node)
            self.tree.merge(node, MERGE_LIMIT)
        if companions is not None:
            companions.prune(lease.node)
            companions.prune(lease.host_node)
        del self.leases[lease.id]
        del s.leases[lease.id]
        if s.with_duplicates:
            s.with_duplicates.pop(lease.id, None)

    def _use(self, lease: Lease) -> None:
        """A request counts once for each node that it has in the tree: with its commits, or when it is over."""
        self.tree.used(lease.node, lease.counted, lease.priority)
        lease.counted = lease.node

    def _settle(self, s: Session) -> None:
        """Give back what an ended session no longer uses."""
        if s.gone == s.all_shards:
            s.queue.clear()
            for lease in list(s.leases.values()):
                if lease.load is None:
                    self._give_back(lease)
        else:
            for op in list(s.queue):
                held = op.lease
                assert held is not None
                done = s.events.get(op.ticket, 0) | s.gone
                if done == s.all_shards and held.load is None:
                    s.queue.remove(op)
                    self._give_back(held)
        if s.gone == s.all_shards and not s.leases:
            del self.sessions[s.id]

    def _unpin(self, s: Session, owner: str) -> int:
        pins = s.pins.pop(owner, [])
        self._let_go(pins)
        return sum(pin.num_pages for pin in pins)

    def _let_go(self, pins: list[Pin]) -> None:
        self._moves += 1
        for pin in pins:
            if self.companions is not None:
                self.companions.unpin(pin.places)
            for c in reversed(range(len(pin.nodes))):
                if (node := pin.nodes[c]) is not None:
                    node.used = self.tree.now
                    self.orders[c].unpin(node)
            if self.companions is not None:
                for node in pin.nodes:
                    self.companions.prune(node)
        if pins:
            self.backups.let_go()

    def _pinned_pages(self) -> int:
        return sum(pin.num_pages for s in self.sessions.values() for pins in s.pins.values() for pin in pins)

    # -- inside: presence ------------------------------------------------------------------------------------

    def change(self, c: int, node: Node, present: bool, session_id: str | None = None) -> None:
        """The node's pages are in this tier from now on, or are no longer. The one place that says so."""
        self.version += 1
        if self.telling or self.journal is not None:
            self.tell(c, node, present, session_id)

    def tell(self, c: int, node: Node, present: bool, session_id: str | None = None) -> None:
        """Have the journal and routers know that a cell is there from now on, or no longer.

        Of a companion's routers are told if it has a group.
        """
        resource, tier = (0, c) if c < self.T else divmod(c, self.T)
        if tier == HOST and self.journal is not None:
            payer = "" if self.tenants is None or resource else self.tenants.payer(HOST, node)
            self.journal.append(journal.entry(resource, self.tree.by_end[c], c, node, present, payer))
        log = self.log
        if log is None or not self.telling:
            return
        if node.space.extras is None:
            if not resource:
                self.counters["unpublished_pages"] += node.num_bytes // self.page_bytes
        elif present:
            log.stored(node, TIERS[tier], session_id, resource)
        else:
            log.removed(node, TIERS[tier], resource)

    def evict(self, c: int, num_pages: int, tenant: int = 0, extra: int = 0) -> bool:
        """Evict, in the policy's order, until `num_pages` are free; False: a slice was used up before, or it takes the
        end of copies that are under way, or was begun here: where that is the policy, pages are copied as they go.

        With tenants it is for one of them, which is to be charged with `extra` pages more: see `tenants`."""
        companions = self.companions
        if c >= self.T:
            assert companions is not None
            return companions.evict(c, num_pages)
        if self.tenants is not None:
            return self.tenants.evict(c, num_pages, tenant, extra)
        pool, order = self.pools[c], self.orders[c]
        left, effort = self.config.evict_slice, order.effort
        backups = self.backups
        copying = c == DEVICE and backups.policy.on_eviction and self.T > HOST
        while pool.free + (backups.demoting if copying else 0) < num_pages:
            if left <= 0:
                return False
            left -= effort
            node = order.victim()
            if node is None:
                if not pool.evictable:
                    assert copying, f"nothing to evict: {pool}, {num_pages} wanted"
                    return False
            elif not (copying and node.cells[HOST] is None and backups.demote(node)):
                if companions is None:
                    self.drop(c, node)
                    continue
                parent = node.parent
                self.drop(c, node)
                companions.dropped(node, parent)
        return pool.free >= num_pages

    def drop(self, c: int, node: Node, cleared: bool = False, pruned: bool = False, corrupt: bool = False) -> None:
        """Take an unlocked cell from a node, which has no descendant with one; the node goes with its last cell.

        `cleared`: by a clear, not to make room; `pruned`: nor for that, but since it is of no use any more; `corrupt`:
        its bytes, or those of a page that it hangs on, are wrong.
        """
        tree, pool = self.tree, self.pools[c]
        cells = node.cells
        run = cells[c]
        if self.companions is not None:
            self.companions.drop_with(c, node, not cleared, corrupt)
        self.change(c, node, False)
        departures = self.departures
        payer = 0 if departures is None or self.tenants is None else node.cells[self.tenants.place[c]]
        self.orders[c].unlink(node)
        cells[c] = None
        parent = node.parent
        assert parent is not None
        if node.used > parent.used:
            parent.used = node.used
        pages = len(run) // SLOT_BYTES
        pool.cached -= pages
        pool.give(run)
        kept = self.T > HOST and cells[1 - c] is not None
        counters = self.counters
        if pruned:
            counters[PRUNED[c]] += pages
        elif corrupt:
            counters["corrupt_pages"] += pages
        else:
            counters[LEFT[c][2 if cleared else kept]] += pages
            if not cleared:
                counters["evicted_nodes"] += 1
                now = tree.now
                self.lifetimes[c].observe(now - node.born, pages)
                self.idle_times[c].observe(now - node.used, pages)
        if departures is not None:
            reason = "pruned" if pruned else "corrupt" if corrupt else "cleared" if cleared else "evicted"
            departures.left(node, c, pages, reason, kept, payer)
        if kept:
            return
        if self.T > HOST:
            self.backups.forget(node)
        if self.l3 is not None:
            self.l3.forget(node)
        tree.remove(node)
        if parent.parent is not None and type(parent.children) is Node:
            tree.merge(parent.children, 1)

    def space(self, namespace: Namespace) -> Space:
        space = self.tree.spaces.get(namespace)
        if space is None:
            extras = None
            if self.log is not None:
                extras = self.config.format.extras(namespace)
            space = Space(namespace, hashing.seed(namespace) if self.log is not None else b"", extras, self.keys.over)
            self.tree.spaces[namespace] = space
            if extras is not None:
                # Routers can't tell two namespaces apart that they know by the same: they are told of the first.
                known = self._known_by.get(extras)
                if known is None or self.tree.spaces.get(known.namespace) is not known:
                    self._known_by[extras] = space
                else:
                    space.extras = None
        return space

    def known_by(self, namespace: Namespace) -> Extras | None:
        """By which fields routers are told of pages of a namespace that L3 has; None: not at all."""
        extras = self.config.format.extras(namespace)
        known = None if extras is None else self._known_by.get(extras)
        if known is None or known.namespace == namespace or self.tree.spaces.get(known.namespace) is not known:
            return extras
        return None

    # -- inside: load-back -----------------------------------------------------------------------------------

    def _loaded(self, ticket: Ticket, ok: bool) -> None:
        """A load-back's ack: its pages are the tree's if the lease still stands."""
        lease = ticket.lease
        assert lease is not None
        self._moves += 1
        lease.load = None
        s = lease.session
        if not ok:
            self.counters["loads_failed"] += 1
            lease.failed = True
        elif not s.ended:
            before = lease.committed
            duplicates = self._adopt(lease, before + ticket.num_pages)
            if duplicates:
                lease.duplicates.append((0, duplicates))
            if self.companions is not None:
                self.companions.adopt(lease, before, 0)
                self.companions.loaded(lease)
        if lease.cancelling is not None:
            self._give_back(lease, used=False)
            if not s.ended:
                self.wake(s, lease.cancelling, Released(lease.id))
        if s.ended:
            self._settle(s)
        else:
            self._pump(s)

    # -- inside: long work, small things ------------------------------------------------------------------------

    def _clear_slice(self) -> None:
        job = self._clearing[0]
        c = job[0]
        left = self.config.evict_slice
        pool, order = self.pools[c], self.orders[c]
        while job[1] > 0 and left > 0:
            left -= order.effort
            node = order.victim()
            if node is None:
                if not pool.evictable:
                    job[1] = 0
                continue
            before, parent = pool.cached, node.parent
            self.drop(c, node, cleared=True)
            if self.companions is not None:
                self.companions.dropped(node, parent)
            job[1] -= before - pool.cached
        if job[1] <= 0:
            self._clearing.pop(0)

    def _bury(self) -> None:
        """Take a dropped tree apart, a slice at a time: no cycle is left, and no cascade of deallocation."""
        graves = self._graves
        for _ in range(self.config.evict_slice):
            if not graves:
                return
            grave = graves[-1]
            if type(grave) is list:  # of an order of eviction
                if grave:
                    grave.pop()
                else:
                    graves.pop()
                continue
            if type(grave) is Node:
                node = graves.pop()
            elif type(grave) is dict:
                node = grave.popitem()[1] if grave else None
            else:
                node = grave.pop()
            if node is None:
                graves.pop()
                continue
            if type(node) is Space:
                node = node.root
            if node.children is not None:
                graves.append(node.children)
            if node.parent is not None:
                del node.ahead, node.behind
            node.parent = node.children = None
            node.cells = []
            node.space = self.tree.nowhere

    def moved(self) -> None:
        """The books have changed in what is no presence."""
        self._moves += 1

    def emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    def new_id(self) -> int:
        number = self._next_id
        self._next_id = number + 1
        return number

    def _session(self, session: SessionId) -> Session:
        s = self.sessions.get(session)
        if s is None:
            raise UnknownSession(f"there is no session {session}", session=session)
        if s.ended:
            raise s.over()
        return s

    def _lease(self, s: Session, lease: LeaseId) -> Lease:
        held = s.leases.get(lease)
        if held is None or held.releasing or held.waiting:
            raise UnknownLease(f"lease {lease} was released or is not this session's", lease=lease)
        return held

    def _shard(self, s: Session, shard: int) -> None:
        if not 0 <= shard < s.all_shards.bit_length():
            raise BadRequest(f"shard {shard} of a session with {s.all_shards.bit_length()}", shard=shard)

    def _ticket(self, s: Session, ticket: int) -> None:
        if ticket <= s.last_ticket:
            raise BadRequest(f"ticket {ticket} after {s.last_ticket}: numbers rise", ticket=ticket, last=s.last_ticket)
        s.last_ticket = ticket

    def wake(self, s: Session, request: int, result: Result) -> None:
        self._effects.append(_new(Wake, (s.id, request, result)))


__all__ = ["DEVICE", "HOST", "DumpedNode", "Index", "IndexConfig", "IndexStats", "Peeked", "PoolStats", "Publish"]
