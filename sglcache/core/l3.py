"""L3 below the host: what is put there, what is known to be there, and how it comes back.

The tree has no nodes for it. Two journeys go through the host pool, and each page of either is checked against its
tokens by the storage part, so a hash alone decides nothing.

**Down.** What a write-through has brought to the host is put into L3: the path is pinned on the host until the store is
over. Stores that wait may hold a share of the pool at most; what comes beyond is counted, and stored later.

**Up.** An acquire whose match ends before its tokens do may have the rest fetched, as may a request of its own
(`Prefetch`): its digests are made by the cut, in slices; L3 is asked how many leading pages it has (an exact one has
told us); host pages are taken for these, within a quota; parts are fetched, and each that is right, and all before it,
joins the tree on the host alone, by one rule: where the tree has a ready cell, keep it. What is beyond the quota is
fetched once that has joined. Then whoever waits acquires,
and finds a host hit like any other. Who waits has a deadline; what comes later is for others. A page under a fetch is
in nobody's hands until the fetch is over, cancelled or not.

A part that does not come whole ends it: what L3 lacks, what is corrupt or another's, and a store that is away, are all
misses.

**Told of**: an exact store's pages are DISK, and as in every tier of ours a change is told once, where it is made
(`Shelf`). Another store's are EXTERNAL: at most that a put of ours succeeded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from mypy_extensions import mypyc_attr

from sglcache.core.departures import Cause
from sglcache.core.effects import Cancel, Fetch, Grant, Prefetched, Probe, Result, Run, Store
from sglcache.core.key import Namespace
from sglcache.core.slots import SLOT_BYTES
from sglcache.core.tenants import Tally
from sglcache.errors import SglcacheError
from sglcache.units import SessionId, TicketId, Tier

if TYPE_CHECKING:
    from sglcache.core.encoding import Extras
    from sglcache.core.index import Index
    from sglcache.core.leases import Session
    from sglcache.core.tree import Node

DEVICE, HOST = 0, 1
WRITING = 1 << HOST
FOR_EVER = float("inf")
ALL = 1 << 62
CHANGES = 1000  # pages that came or went, of which one call takes notice; a millisecond
STORE_PART = 512  # pages of one store
MAX_SKIPPED = 10_000  # ends of paths that are remembered to be stored later
SEGMENT = 1024  # pages of a shelf that a walk sees at once


@dataclass(frozen=True)
class L3Config:
    """Sizes in pages."""

    exact: bool = True  # it says what it holds and of all that goes: DISK; else EXTERNAL
    tell: bool = False  # routers are told
    threshold: int = 1  # fewer are not fetched
    prefetch_quota: int = 0  # of the host pool, under fetches at once; 0: half of it
    store_quota: int = 0  # of the host pool, held by stores that wait; 0: a quarter of it
    part: int = 32  # fetched in one go

    @property
    def tier(self) -> Tier:
        return Tier.DISK if self.exact else Tier.EXTERNAL


class Held(NamedTuple):
    """What a walk says of a page that L3 holds."""

    before: bytes | None
    tokens: bytes
    namespace: Namespace
    extras: Extras


class Shelf:
    """The digests of the pages that an exact store holds, and, where routers are told, what is said of them.

    The order of coming has parents first, and what comes back from under its children takes its old place. A walk is a
    bookmark in it, which sees a segment at once.
    """

    def __init__(self) -> None:
        self._pages: dict[bytes, tuple[int, Held | None]] = {}  # by digest; the number of its segment
        self._segments: dict[int, dict[bytes, None]] = {}
        self._alive: dict[int, int] = {}  # of a segment's pages, those that are held
        self._places: dict[bytes, int] = {}  # of pages that went from under their children
        self._next = 0

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._pages

    def add(self, digest: bytes, held: Held | None) -> int:
        """The number of its segment."""
        number = self._places.pop(digest, self._next)
        segment = self._segments.get(number)
        if segment is None or (digest not in segment and len(segment) >= SEGMENT):
            number = self._next = self._next + 1
            segment = self._segments[number] = {}
            self._alive[number] = 0
        segment.setdefault(digest)
        self._alive[number] += 1
        self._pages[digest] = number, held
        return number

    def remove(self, digest: bytes, comes_back: bool = False) -> tuple[int, Held | None]:
        """What it was, and in which segment. KeyError: it is not there. `comes_back`: its children stay."""
        number, held = self._pages.pop(digest)
        alive = self._alive[number] = self._alive[number] - 1
        segment = self._segments[number]
        if comes_back:
            self._places[digest] = number
        else:
            del segment[digest]
        if not alive and number != self._next:
            for each in segment:
                self._places.pop(each, None)
            del self._segments[number], self._alive[number]
        return number, held

    def after(self, number: int) -> tuple[int, list[tuple[bytes, Held]]] | None:
        """The first segment behind `number` and what is to be told of its pages; None at the end."""
        following = next((each for each in self._segments if each > number), None)
        if following is None:
            return None
        if following == self._next:  # what comes from now on is behind it
            self._next += 1
        pages = [(digest, held) for digest in self._segments[following] if (held := self._held(digest)) is not None]
        return following, pages

    def digests_after(self, number: int) -> tuple[int, list[bytes]] | None:
        """The first segment behind `number`, and the pages in it that are held; None at the end. Changes nothing."""
        following = next((each for each in self._segments if each > number), None)
        if following is None:
            return None
        return following, [digest for digest in self._segments[following] if digest in self._pages]

    def _held(self, digest: bytes) -> Held | None:
        return self._pages.get(digest, (0, None))[1]


@dataclass(eq=False)
class Storing:
    """A path of the host on its way down; it pins `end`."""

    end: Node
    num_pages: int
    parts: int = 0  # stores that are not over


@dataclass(eq=False, kw_only=True)
class _Change:
    """Pages that an exact store holds now where the mask says so, or that it holds no longer."""

    run: Run | None = None
    mask: bytes = b""
    digests: bytes = b""
    bad: bool = False
    done: int = 0  # pages of it


@dataclass(eq=False)
class Part:
    """Pages of a prefetch under one fetch."""

    ticket: TicketId
    num_pages: int
    slots: bytes
    right: int | None = None  # leading pages that are, once it is over
    fenced: bool = False  # it was cancelled, and may still be written


@dataclass(eq=False)
class Waiter:
    """A request that waits for a prefetch, at most until `until`, on the caller's clock."""

    session: Session
    request: int
    until: float
    go_on: Callable[[int], Grant | Prefetched | None]  # given the pages that came; None: it waits for something else


@dataclass(eq=False)
class Prefetch:
    """Pages that are to follow the anchor, which it pins: where the match ended, and then what has come."""

    namespace: Namespace
    anchor: Node | None  # None: a root
    device_end: Node | None  # of its pin there
    host_end: Node | None  # likewise; the anchor, unless that is still on its way to the host
    tokens: bytes  # of the pages that are wanted and not in the tree yet, as a run
    waiters: list[Waiter]
    kept: bool  # it goes on though nobody waits
    digests: bytes = b""  # of the same pages
    before: bytes | None = None  # the digest of the page that they follow
    probe: TicketId | None = None
    parts: deque[Part] = field(default_factory=deque)
    slots: bytes = b""  # of pages that are right, and not in the tree yet
    left: int = 0  # pages that are there as well, and are asked for when these are in the tree
    came: int = 0  # pages that were not in the tree
    gap: bool = False  # a part did not come whole: what comes behind it is of no use
    broken: bool = False  # there was a gap, or nobody waits any more: it ends as soon as it can
    over: bool = False
    tenant: int = 0  # who is charged with its pages
    ahead: Prefetch | None = None  # that fetches the same first page: it begins once that has come as far as it does
    behind: list[Prefetch] = field(default_factory=list)  # those that wait so for this one


@mypyc_attr(allow_interpreted_subclasses=True)
class L3:
    """The third tier of one index."""

    def __init__(self, index: Index, config: L3Config) -> None:
        self.index = index
        self.config = config
        self.tier = config.tier
        host_pages = index.config.host_pages
        self.prefetch_quota = config.prefetch_quota or max(1, host_pages // 2)
        self.store_quota = config.store_quota or max(1, host_pages // 4)
        self.shelf = Shelf()
        self.storing: dict[int, Storing] = {}  # by id()
        self.stores: dict[TicketId, tuple[Storing, Run]] = {}
        self._changes: deque[_Change] = deque()  # of what it holds, in order, not taken notice of yet
        self.held_by_stores = 0  # pages of the host
        self._skipped: dict[Node, int] = {}  # what found no room among the stores: so many pages up to an end
        self._flying: set[bytes] = set()  # digests of pages on their way to an exact store
        self.prefetches: list[Prefetch] = []
        self.fetching = 0  # pages of the host
        self._by_ticket: dict[TicketId, Prefetch] = {}
        self._by_digest: dict[bytes, Prefetch] = {}
        self._retold = ALL  # while it tells again, the last of the shelf's segments that was told

    @property
    def num_busy(self) -> int:
        """Stores and prefetches that are not over."""
        return len(self.storing) + len(self.prefetches)

    # -- down ---------------------------------------------------------------------------------------------------------

    def backed_up(self, end: Node, num_pages: int) -> None:
        """So many pages up to `end` have just come to the host from the device."""
        if self.held_by_stores + num_pages > self.store_quota and self.storing:
            self.index.counters["l3_pages_skipped"] += num_pages
            if len(self._skipped) == MAX_SKIPPED:
                del self._skipped[next(iter(self._skipped))]
            self._skipped[end] = num_pages
            return
        self._offer(end, num_pages)

    def catch_up_with_host(self) -> None:
        """Store what is on the host alone and was not stored by the life that brought it there."""
        index = self.index
        offered = 0
        for node in index.tree.nodes():
            if node.cells[HOST] is None or node.cells[DEVICE] is not None or node.writing:
                continue
            if offered == MAX_SKIPPED:
                return  # what is not stored now is when it comes to the host again
            offered += 1
            self.backed_up(node, node.num_bytes // index.page_bytes)

    def _offer(self, end: Node, num_pages: int) -> None:
        index = self.index
        self.held_by_stores += num_pages
        index.orders[HOST].pin(end)
        storing = Storing(end, num_pages)
        self.storing[id(storing)] = storing
        assert index.log is not None
        index.log.name(end, storing)

    def _retry(self) -> None:
        """What was skipped, now that there is room among the stores; once each."""
        skipped = self._skipped
        while skipped:
            end = next(iter(skipped))
            num_pages = skipped[end]
            gone = end.parent is None or not _ready(end)
            if not gone and self.storing and self.held_by_stores + num_pages > self.store_quota:
                return
            del skipped[end]
            if not gone:
                self.index.counters["l3_stores_retried"] += 1
                self._offer(end, num_pages)
                return

    def forget(self, node: Node | None = None) -> None:
        """This node leaves the tree, or all do."""
        if node is None:
            self._skipped.clear()
        else:
            self._skipped.pop(node, None)

    def _store(self, storing: Storing) -> None:
        """The digests are there."""
        index, size = self.index, self.index.hasher.size
        # Splits may have made more nodes of it, and merges may have joined the first with what is before it.
        nodes: list[Node] = []
        node: Node | None = storing.end
        num_pages = 0
        while num_pages < storing.num_pages or self._lacks(node):
            assert node is not None
            nodes.append(node)
            num_pages += node.num_bytes // index.page_bytes
            node = node.parent
        nodes.reverse()
        run = self._run_of(nodes)
        first, last = num_pages - storing.num_pages, num_pages
        if self.config.exact:
            missing = [i for i in range(last) if not self._knows(run.digests[i * size : (i + 1) * size])]
            if not missing:
                self._stored(storing)
                return
            first, last = missing[0], missing[-1] + 1
            self._flying.update(run.digests[i * size : (i + 1) * size] for i in range(first, last))
        slots = b"".join([node.cells[HOST] for node in nodes])
        index.counters["l3_store_pages"] += last - first
        for start in range(first, last, STORE_PART):
            stop = min(last, start + STORE_PART)
            ticket, part = TicketId(index.new_id()), self._part(run, start, stop)
            self.stores[ticket] = storing, part
            storing.parts += 1
            index.emit(Store(ticket, part, slots[start * SLOT_BYTES : stop * SLOT_BYTES]))

    def _knows(self, digest: bytes) -> bool:
        return digest in self.shelf or digest in self._flying

    def _lacks(self, node: Node | None) -> bool:
        """An exact store has no page without the one before it: what was skipped, or went, goes with what follows."""
        if not self.config.exact or node is None or node.parent is None:
            return False
        hashes = node.hashes
        assert isinstance(hashes, bytes), "a chain was reached before the one it builds on"
        return not self._knows(hashes[-self.index.hasher.size :])

    def stored(self, ticket: TicketId, mask: bytes, removed: bytes) -> None:
        """A store is over: a byte a page, 1 where it is there now; and what went to make room."""
        self.removed(removed)
        if ticket not in self.stores:
            return
        storing, run = self.stores.pop(ticket)
        size = self.index.hasher.size
        self.index.counters["l3_stores_failed"] += mask.count(0)
        self._flying.difference_update(run.digests[at : at + size] for at in range(0, len(run.digests), size))
        self._changes.append(_Change(run=run, mask=mask))
        self.catch_up()
        storing.parts -= 1
        if not storing.parts:
            self._stored(storing)

    def _stored(self, storing: Storing) -> None:
        index = self.index
        index.moved()
        del self.storing[id(storing)]
        self.held_by_stores -= storing.num_pages
        index.orders[HOST].unpin(storing.end)
        index.tree.merge(storing.end)
        index.backups.let_go()
        self._retry()

    # -- what it holds ------------------------------------------------------------------------------------------------

    def found(self, runs: list[Run]) -> None:
        """What it held already when this life began, parents first."""
        size = self.index.hasher.size
        self._changes += [_Change(run=run, mask=b"\x01" * (len(run.digests) // size)) for run in runs]
        self.catch_up()

    def removed(self, digests: bytes, bad: bool = False) -> None:
        """What it no longer holds, children first; or a page that was `bad`, whose children stay."""
        if digests:
            self._changes.append(_Change(digests=digests, bad=bad))
            self.catch_up()

    @property
    def behind(self) -> bool:
        """There is more to take notice of than one call does."""
        return bool(self._changes)

    def catch_up(self) -> None:
        """A slice of what came or went, in order. Until all is, a fetch of what is gone is a miss like any other."""
        left, size, changes = CHANGES, self.index.hasher.size, self._changes
        while changes and left > 0:
            change = changes[0]
            start = change.done
            if change.run is not None:
                stop = min(len(change.mask), start + left)
                self._add(self._part(change.run, start, stop), change.mask[start:stop])
                over = stop == len(change.mask)
            else:
                stop = min(len(change.digests) // size, start + left)
                self._remove(change.digests[start * size : stop * size], change.bad)
                over = stop * size == len(change.digests)
            left -= stop - start
            change.done = stop
            if over:
                changes.popleft()

    def _remove(self, digests: bytes, bad: bool) -> None:
        size, told = self.index.hasher.size, []
        for at in range(0, len(digests), size):
            digest = digests[at : at + size]
            if digest in self.shelf:
                self.index.version += 1
                segment, held = self.shelf.remove(digest, comes_back=bad)
                if held is not None and segment <= self._retold:
                    told.append(digest)
        if told:
            assert self.index.log is not None
            self.index.log.run_removed(self.tier, b"".join(told[::-1]))  # as a path: the cut goes from its end

    def _add(self, run: Run, mask: bytes) -> None:
        """Pages are there: of each neighbouring few that were not, an event."""
        index, size, page_bytes = self.index, self.index.hasher.size, self.index.page_bytes
        extras = index.known_by(run.namespace) if self.config.tell and index.telling else None
        over, exact = index.keys.over, self.config.exact
        first = None
        for i in range(len(mask) + 1):
            digest = run.digests[i * size : (i + 1) * size]
            new = i < len(mask) and mask[i] == 1 and not (exact and digest in self.shelf)
            if new and exact:
                held = None
                if extras is not None:
                    before = run.digests[(i - 1) * size : i * size] if i else run.before
                    tokens = run.tokens[i * page_bytes : (i + 1) * page_bytes + over]
                    held = Held(before, tokens, run.namespace, extras)
                index.version += 1
                new = self.shelf.add(digest, held) <= self._retold  # else it has its turn
            if new:
                first = i if first is None else first
            elif first is not None:
                if extras is not None:
                    assert index.log is not None
                    part = self._part(run, first, i)
                    index.log.run_stored(self.tier, part.tokens, part.digests, part.before, extras)
                first = None

    def tell_again(self) -> Iterator[None]:
        """After AllBlocksCleared: what it holds all the same, a slice at a time. Until its turn nothing is told."""
        self._retold = 0
        return self._retell()

    def _retell(self) -> Iterator[None]:
        log = self.index.log
        assert log is not None
        while (segment := self.shelf.after(self._retold)) is not None:
            self._retold, pages = segment
            for digest, held in pages:
                log.run_stored(self.tier, held.tokens, digest, held.before, held.extras)
            yield
        self._retold = ALL

    @property
    def retelling(self) -> bool:
        return self._retold != ALL

    def snapshot(self, number: int) -> tuple[int, list[tuple[bytes, Held]]] | None:
        """For who is told from the beginning: the pages of the segment behind that one; None at the end.

        What is still to be told again is left out: a later batch has it.
        """
        segment = self.shelf.after(number)
        return None if segment is None or segment[0] > self._retold else segment

    # -- up -----------------------------------------------------------------------------------------------------------

    def worth_it(self, num_pages: int) -> bool:
        """Whether so many pages that no tier above has are to be looked for."""
        return num_pages >= max(1, self.config.threshold) and (not self.config.exact or len(self.shelf) > 0)

    def want(
        self, namespace: Namespace, path: list[Node], tokens: bytes, waiter: Waiter | None, tenant: int = 0
    ) -> None:
        """Look for the pages of `tokens` behind a matched path. Without a waiter it goes on by itself. `tenant`: who is
        charged with them."""
        index = self.index
        anchor = path[-1] if path else None
        device = next((node for node in reversed(path) if node.cells[DEVICE] is not None), None)
        host = index.host_end(path)
        waiters = [] if waiter is None else [waiter]
        prefetch = Prefetch(namespace, anchor, device, host, tokens, waiters, kept=waiter is None, tenant=tenant)
        index.orders[DEVICE].pin(device)
        index.orders[HOST].pin(host)
        index.moved()
        self.prefetches.append(prefetch)
        index.counters["prefetches"] += 1
        assert index.log is not None
        index.log.wanted(anchor, namespace, tokens, prefetch)

    def named(self, whose: object, digests: bytes) -> None:
        """A cut brings the digests that were asked for."""
        if isinstance(whose, Storing):
            self._store(whose)
            return
        prefetch = whose
        assert isinstance(prefetch, Prefetch)
        if prefetch.over:
            return
        prefetch.digests = digests
        if prefetch.anchor is not None:
            assert isinstance(prefetch.anchor.hashes, bytes), "a chain was reached before the one it builds on"
            prefetch.before = prefetch.anchor.hashes[-self.index.hasher.size :]
        self._look(prefetch)

    def _look(self, prefetch: Prefetch) -> None:
        """Find out how much of what it wants is there, and have that fetched; behind who does so already, if any."""
        digests, size = prefetch.digests, self.index.hasher.size
        if not digests:
            self._go_on(prefetch)
            return
        other = self._by_digest.get(digests[:size])
        if other is not None:
            prefetch.ahead = other
            other.behind.append(prefetch)
            return
        self._by_digest[digests[:size]] = prefetch
        count = len(digests) // size
        if not self.config.exact:
            prefetch.probe = TicketId(self.index.new_id())
            self._by_ticket[prefetch.probe] = prefetch
            self.index.emit(Probe(prefetch.probe, self._wanted(prefetch, 0, count)))
            return
        self._fetch(
            prefetch, next((i for i in range(count) if digests[i * size : (i + 1) * size] not in self.shelf), count)
        )

    def probed(self, ticket: TicketId, num_pages: int) -> None:
        """So many leading pages are there."""
        prefetch = self._by_ticket.pop(ticket, None)
        if prefetch is None:
            return
        prefetch.probe = None
        self._fetch(prefetch, 0 if prefetch.broken else num_pages)

    def _fetch(self, prefetch: Prefetch, there: int) -> None:
        """Take host pages for what is there, as many as may be had at once, and have them read."""
        index, least = self.index, max(1, self.config.threshold)
        pool, anchor = index.pools[HOST], prefetch.anchor
        prefetch.left = 0
        num_pages = min(there, self.prefetch_quota - self.fetching)
        if num_pages < least or anchor is None or anchor.cells[HOST] is not None:
            pass
        elif not index.backups.send(anchor, whole=True):  # what comes hangs on what is on the host
            num_pages = 0
        tenants, tenant = index.tenants, prefetch.tenant
        if index.departures is not None:
            session = prefetch.waiters[0].session.id if prefetch.waiters else None
            index.departures.cause = Cause("prefetch", session, tenant)
        if tenants is None:
            num_pages = min(num_pages, pool.free + pool.evictable)
            if num_pages >= least and not index.evict(HOST, num_pages):
                num_pages = min(num_pages, pool.free)
        else:
            num_pages = min(num_pages, tenants.left(tenant, Tally(), tier=HOST))
            if num_pages >= least and not index.evict(HOST, num_pages, tenant, num_pages):
                num_pages = min(num_pages, tenants.free(HOST, tenant))
        if num_pages < least:
            index.counters["prefetches_declined"] += there >= least
            self._go_on(prefetch)
            return
        slots = pool.take(num_pages)
        prefetch.left = there - num_pages
        pool.leased += num_pages
        self.fetching += num_pages
        if tenants is not None:
            tenants.lease(HOST, tenant, num_pages)
        index.counters["prefetch_pages"] += num_pages
        index.moved()
        for first in range(0, num_pages, self.config.part):
            last = min(num_pages, first + self.config.part)
            part = Part(TicketId(index.new_id()), last - first, slots[first * SLOT_BYTES : last * SLOT_BYTES])
            self._by_ticket[part.ticket] = prefetch
            prefetch.parts.append(part)
            index.emit(Fetch(part.ticket, self._wanted(prefetch, first, last), part.slots))

    def fetched(self, ticket: TicketId, num_pages: int, removed: bytes) -> None:
        """A fetch is over, and nothing of it moves any more: so many leading pages are right in their slots."""
        self.removed(removed)
        prefetch = self._by_ticket.pop(ticket, None)
        if prefetch is None:
            return
        self.index.moved()
        pool = self.index.pools[HOST]
        over = next(part for part in prefetch.parts if part.ticket == ticket)
        over.right = num_pages
        if over.fenced:
            over.fenced = False
            pool.fenced -= over.num_pages
            pool.leased += over.num_pages
        while prefetch.parts and (right := prefetch.parts[0].right) is not None:
            part = prefetch.parts.popleft()
            if prefetch.gap:
                right = 0
            elif right < part.num_pages:
                prefetch.gap = True
            at = right * SLOT_BYTES
            prefetch.slots += part.slots[:at]
            self._give(prefetch, part.slots[at:])
        if prefetch.gap:
            self._break(prefetch)
        self._go_on(prefetch)

    def unblocked(self) -> None:
        """A write-through is over: what has to hang on its pages may be able to now."""
        for prefetch in list(self.prefetches):
            if prefetch.over:
                continue  # with one that it was behind
            self._settle(prefetch)
            if prefetch.slots:
                self._go_on(prefetch)

    def _settle(self, prefetch: Prefetch) -> None:
        """If what was matched has come to the host as a whole, hold it there."""
        anchor = prefetch.anchor
        if anchor is not prefetch.host_end and anchor is not None and _ready(anchor):
            self.index.orders[HOST].pin(anchor, prefetch.host_end)
            prefetch.host_end = anchor

    def _go_on(self, prefetch: Prefetch) -> None:
        """Have in the tree what can be; serve who waits once nothing more will come; end it when nothing can."""
        if prefetch.slots:
            self._adopt(prefetch)
        if prefetch.slots:
            return
        pending = bool(prefetch.parts or prefetch.probe is not None or prefetch.ahead is not None)
        if not pending and not prefetch.broken and prefetch.left:
            self._fetch(prefetch, prefetch.left)  # what went beyond the quota, now that the first of it is in the tree
            return
        behind: list[Prefetch] = []
        if prefetch.broken or not pending:
            self._serve(prefetch, lambda waiter: True)
            self._no_more_join(prefetch)
            behind, prefetch.behind = prefetch.behind, []
        if not pending:
            self._end(prefetch)
        for each in behind:
            each.ahead = None
        for each in behind:
            self._settle(each)
            left = len(each.digests)
            self._pass(each)
            each.came += min(prefetch.came, (left - len(each.digests)) // self.index.hasher.size)
            self._look(each)

    def _pass(self, prefetch: Prefetch) -> None:
        """Move its anchor on over what has come to the host since."""
        index, tree = self.index, self.index.tree
        space = tree.spaces.get(prefetch.namespace)
        if prefetch.anchor is not prefetch.host_end or space is None:
            return
        before = node = prefetch.anchor if prefetch.anchor is not None else space.root
        tokens, page_bytes = prefetch.tokens, index.page_bytes
        start, end = 0, len(prefetch.digests) // index.hasher.size * page_bytes
        while start < end:
            child = tree.child(node, tokens, start)
            if child is None or not _ready(child):
                break
            if not (start + child.num_bytes <= end and tokens.startswith(child.key, start)):
                child = tree.split(child, tree.common_pages(child.key, tokens, start, end))
            self._name(prefetch, child, start)
            start += child.num_bytes
            node = child
        if node is before:
            return
        index.orders[HOST].pin(node, prefetch.host_end)
        prefetch.anchor = prefetch.host_end = node
        self._less(prefetch, start // page_bytes)
        index.moved()

    def _name(self, prefetch: Prefetch, node: Node, start: int) -> None:
        """A node on the way of what is fetched has digests, as what hangs on it has: those of the text from `start` on.

        Where routers are not told of it, nobody has asked for them before.
        """
        if node.hashes is None:
            size, page_bytes = self.index.hasher.size, self.index.page_bytes
            node.hashes = prefetch.digests[start // page_bytes * size : (start + node.num_bytes) // page_bytes * size]

    def _adopt(self, prefetch: Prefetch) -> None:
        """Put what has come into the tree, on the host alone, as far as what it hangs on is there.

        One rule: where the tree has a ready cell, keep it; where it has none, adopt the newcomer's; and under one that
        is being written wait for the end of that.
        """
        index, tree = self.index, self.index.tree
        order, page_bytes = index.orders[HOST], index.page_bytes
        anchor = prefetch.anchor
        slots, tokens = prefetch.slots, prefetch.tokens
        if anchor is not prefetch.host_end:
            assert anchor is not None
            if not anchor.writing & WRITING:  # its copy failed: there is nothing to hang on
                prefetch.slots = b""
                self._give(prefetch, slots)
                prefetch.gap = True
                self._break(prefetch)
            return
        node = anchor if anchor is not None else index.space(prefetch.namespace).root
        start, end = 0, len(slots) // SLOT_BYTES * page_bytes
        doubled: list[bytes] = []
        new: list[Node] = []
        while start < end:
            at = start // page_bytes * SLOT_BYTES
            child = tree.child(node, tokens, start)
            if child is None:
                first = start // page_bytes * index.hasher.size
                node = tree.add(node, tokens, start, end)
                node.cells[HOST] = slots[at:]
                node.hashes = prefetch.digests[first : end // page_bytes * index.hasher.size]
                new.append(node)
                start = end
                break
            if not (start + child.num_bytes <= end and tokens.startswith(child.key, start)):
                child = tree.split(child, tree.common_pages(child.key, tokens, start, end))
            if child.writing & WRITING:
                break
            self._name(prefetch, child, start)
            start += child.num_bytes
            mine = slots[at : start // page_bytes * SLOT_BYTES]
            if child.cells[HOST] is None:
                child.cells[HOST] = mine
                new.append(child)
            else:
                doubled.append(mine)
            node = child
        num_pages = start // page_bytes
        if not num_pages:
            return
        lost = b"".join(doubled)
        count = num_pages - len(lost) // SLOT_BYTES
        pool = index.pools[HOST]
        pool.leased -= count
        self.fetching -= count
        pool.cached += count
        self._give(prefetch, lost)
        if index.tenants is not None:
            index.tenants.lease(HOST, prefetch.tenant, -count)
            index.tenants.belongs(new, HOST, prefetch.tenant)
        order.pin(node, prefetch.host_end)
        prefetch.anchor = prefetch.host_end = node
        prefetch.slots = slots[num_pages * SLOT_BYTES :]
        self._less(prefetch, num_pages)
        prefetch.came += count
        index.counters["prefetched_pages"] += count
        index.moved()
        for each in new:
            index.change(HOST, each, True)

    def _less(self, prefetch: Prefetch, num_pages: int) -> None:
        """Of what it wants the first so many pages are in the tree, up to its anchor."""
        size = self.index.hasher.size
        prefetch.before = prefetch.digests[(num_pages - 1) * size : num_pages * size]
        prefetch.tokens = prefetch.tokens[num_pages * self.index.page_bytes :]
        prefetch.digests = prefetch.digests[num_pages * size :]

    def _break(self, prefetch: Prefetch) -> None:
        """Nothing more is wanted. What is under way ends soon; until then its pages are in nobody's hands."""
        if prefetch.broken:
            return
        prefetch.broken = True
        pool = self.index.pools[HOST]
        for part in prefetch.parts:
            if part.right is None:
                part.fenced = True
                pool.leased -= part.num_pages
                pool.fenced += part.num_pages
                self.index.emit(Cancel(part.ticket))
        if prefetch.probe is not None:
            self.index.emit(Cancel(prefetch.probe))
        self._no_more_join(prefetch)
        ahead, prefetch.ahead = prefetch.ahead, None
        if ahead is not None:
            ahead.behind.remove(prefetch)
            if self._forsaken(ahead):
                self._break(ahead)
                self._go_on(ahead)
        self.index.moved()

    def _no_more_join(self, prefetch: Prefetch) -> None:
        for digest, each in list(self._by_digest.items()):
            if each is prefetch:
                del self._by_digest[digest]

    def _end(self, prefetch: Prefetch) -> None:
        prefetch.over = True
        index = self.index
        self.prefetches.remove(prefetch)
        self._no_more_join(prefetch)
        index.orders[HOST].unpin(prefetch.host_end)
        index.orders[DEVICE].unpin(prefetch.device_end)
        for node in {prefetch.host_end, prefetch.device_end}:
            if node is not None and node.parent is not None:
                index.tree.merge(node)
        index.moved()
        index.backups.let_go()

    def _give(self, prefetch: Prefetch, slots: bytes) -> None:
        """Back to the host's free list."""
        pool, count = self.index.pools[HOST], len(slots) // SLOT_BYTES
        pool.leased -= count
        self.fetching -= count
        pool.give(slots)
        if self.index.tenants is not None:
            self.index.tenants.lease(HOST, prefetch.tenant, -count)

    # -- who waits ----------------------------------------------------------------------------------------------------

    def expire(self, now: float) -> int:
        """Whoever has waited long enough goes on with what there is; how many."""
        return sum(self._leave(prefetch, lambda waiter: waiter.until <= now) for prefetch in list(self.prefetches))

    def session_ended(self, session: Session) -> None:
        for prefetch in list(self.prefetches):
            self._leave(prefetch, lambda waiter: waiter.session is session)

    def waits(self, session: SessionId, request: int) -> bool:
        """Whether this request waits for a prefetch."""
        return any(
            waiter.request == request and waiter.session.id == session
            for prefetch in self.prefetches
            for waiter in prefetch.waiters
        )

    def withdraw(self, session: Session, request: int, error: SglcacheError) -> bool:
        """Whether this request waits here; then it does so no longer, and is answered with the error."""
        for prefetch in list(self.prefetches):
            for waiter in prefetch.waiters:
                if waiter.session is session and waiter.request == request:

                    def give_up(came: int) -> None:
                        raise error

                    waiter.go_on = give_up
                    self._leave(prefetch, lambda each: each is waiter)  # noqa: B023  # called at once
                    return True
        return False

    @property
    def next_deadline(self) -> float | None:
        ends = (waiter.until for prefetch in self.prefetches for waiter in prefetch.waiters)
        return min((end for end in ends if end != FOR_EVER), default=None)

    @property
    def num_waiting(self) -> int:
        return sum(len(prefetch.waiters) for prefetch in self.prefetches)

    def _leave(self, prefetch: Prefetch, whom: Callable[[Waiter], bool]) -> int:
        """These wait no longer. When nobody is left what is under way is cancelled, unless it was to go on."""
        count = self._serve(prefetch, whom)
        if count and self._forsaken(prefetch):
            self._break(prefetch)
            self._go_on(prefetch)
        return count

    def _forsaken(self, prefetch: Prefetch) -> bool:
        """Nobody wants it any more."""
        return not (prefetch.waiters or prefetch.behind or prefetch.kept)

    def _serve(self, prefetch: Prefetch, whom: Callable[[Waiter], bool]) -> int:
        """These go on with what there is now."""
        served = [waiter for waiter in prefetch.waiters if whom(waiter)]
        prefetch.waiters = [waiter for waiter in prefetch.waiters if not whom(waiter)]
        index = self.index
        for waiter in served:
            result = self._next(waiter, prefetch.came)
            if result is not None:
                index.wake(waiter.session, waiter.request, result)
        return len(served)

    def _next(self, waiter: Waiter, came: int) -> Result | None:
        if waiter.session.ended:
            return waiter.session.over()
        try:
            return waiter.go_on(came)
        except SglcacheError as error:
            return error

    # -- runs ---------------------------------------------------------------------------------------------------------

    def _run_of(self, nodes: list[Node]) -> Run:
        """Neighbours on one path whose digests are known."""
        index = self.index
        above = nodes[0].parent
        assert above is not None
        before = None
        if above.parent is not None:
            assert isinstance(above.hashes, bytes), "a chain was reached before the one it builds on"
            before = above.hashes[-index.hasher.size :]
        tokens = b"".join([*[node.key[: node.num_bytes] for node in nodes[:-1]], nodes[-1].key])
        return Run(nodes[0].space.namespace, before, b"".join([node.hashes for node in nodes]), tokens)  # type: ignore[misc]

    def _wanted(self, prefetch: Prefetch, first: int, last: int) -> Run:
        run = Run(prefetch.namespace, prefetch.before, prefetch.digests, prefetch.tokens)
        return self._part(run, first, last)

    def _part(self, run: Run, first: int, last: int) -> Run:
        size, page_bytes, over = self.index.hasher.size, self.index.page_bytes, self.index.keys.over
        before = run.digests[(first - 1) * size : first * size] if first else run.before
        return Run(
            run.namespace,
            before,
            run.digests[first * size : last * size],
            run.tokens[first * page_bytes : last * page_bytes + over],
        )


def _ready(node: Node) -> bool:
    return node.cells[HOST] is not None and not node.writing & WRITING
