"""The flat reference model: what must be true of an index, without a tree.

Pages are looked up in plain dicts, holds are counted page by page, and a slot is a key into a dict of owners. Where
the index has a choice (when to start a write-through, where one node ends and the next begins) the model does not
choose: it is told what was seen and checks that the choice was allowed. Everything else it predicts exactly.

Of all that could be evicted at a moment the one that went had the smallest key: `Model.key` is each policy's as it is
written down, from facts of single pages, and all candidates are compared each time.

All violations raise AssertionError; the model never repairs itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sglcache.core.eviction import LOWEST, LRU, Policy
from sglcache.core.tiering import WRITE_THROUGH, WritePolicy
from sglcache.testing.pages import Book, NamespaceTuple, Page, ancestry

DEVICE, HOST = 0, 1


@dataclass(eq=False, repr=False)
class Item:
    """A commit or release of a session, in the order of its tickets."""

    kind: str  # "commit" or "release"
    lease: LeaseModel
    ticket: int
    request: int
    pages: int = 0  # a commit's: whole pages of the lease's sequence
    whole: bool = False  # a commit's: of all that had pages when it was planned
    seen: int = 0  # the highest reply number that the runner had read when it sent this
    discard: bool = False
    issued: bool = False  # the command was sent (its event may be done before)
    dropped: bool = False  # a commit that a discarding release overtook
    applied: bool = False
    done: set[int] = field(default_factory=set)  # shards whose event is done

    def __repr__(self) -> str:
        state = "sent" if self.issued else "not sent"
        return (
            f"<{self.kind} {self.ticket} of lease {self.lease.number}, {state}, events done on {self.done or 'none'}>"
        )


@dataclass(eq=False)
class Duplicate:
    """A page of a lease's own that the tree did not want; the runner may still read it."""

    slot: int
    page: Page
    reply: int  # the number of the answer that named a better one; 0: none did yet


@dataclass(eq=False, repr=False)
class LeaseModel:
    """What a runner holds: its page table, which slots of it are its own, and how far it pins the tree."""

    number: int
    session: SessionModel
    namespace: NamespaceTuple
    tokens: bytes
    path: tuple[Page, ...]
    table: list[int]  # page i of the sequence lies in table[i]: canonical where committed
    owned: set[int]  # slots the lease must give back
    pinned: int  # pages of the path that it holds on the device
    host_pinned: int  # pages of the path that it holds on the host
    session_id: str | None  # of the request, for the events
    priority: int  # of the request, for the policy of that name
    matched: int  # pages found at acquire, device and host; what lies between `pinned` and them is loaded
    known: int = 0  # pages whose canonical slots its runner was told
    num_fresh: int = 0  # while it waits for room: pages it still needs
    waiting: bool = False  # an acquire that has its holds and no page yet
    load: int | None = None  # ticket of the load that is on its way
    broken: bool = False  # its load failed: what was computed on top of it is garbage
    duplicates: list[Duplicate] = field(default_factory=list)
    release: Item | None = None
    cancelling: int | None = None  # the request of a cancel that waits for the load
    over: bool = False  # everything was given back
    counted: int = 0  # pages of the path that were told that it used them
    tenant: int = 0  # who pays for its pages

    def __repr__(self) -> str:
        return (
            f"<lease {self.number} of session {self.session.number}: {self.pinned} of {len(self.table)} pages pinned>"
        )


@dataclass(eq=False)
class SessionModel:
    """One runner: its leases and the order of what it sent."""

    number: int
    shards: int
    items: list[Item] = field(default_factory=list)  # not applied yet, by ticket
    leases: list[LeaseModel] = field(default_factory=list)  # not over yet
    owners: list[str] = field(default_factory=list)  # who pinned, in the order in which they came
    replies: int = 0  # commits answered
    ended: bool = False
    gone: set[int] = field(default_factory=set)

    def all_done(self, item: Item) -> bool:
        return len(item.done) == self.shards

    def all_over(self, item: Item) -> bool:
        """For a session that ended: each shard's event is done, or the shard is gone."""
        return len(item.done | self.gone) == self.shards


@dataclass(eq=False)
class CopyModel:
    """A copy on its way, and what it holds until its ack."""

    ticket: int
    source: int  # tier
    target: int
    pages: tuple[Page, ...]
    source_slots: tuple[int, ...]
    target_slots: tuple[int, ...]
    lease: LeaseModel | None
    held: list[tuple[int, tuple[Page, ...]]]  # (tier, whole path)
    cancelled: bool = False  # what it hangs on failed
    begun: int = 0  # when: its pages are as old as that


class Asks(NamedTuple):
    """For whom something goes where there are tenants, and how things were then, counted anew from nodes and leases."""

    tenant: int
    own: bool  # it would have come over its ceiling
    needed: bool  # and if not, there were too few free pages
    whose: dict[Page, int]  # who pays for each page that nobody held
    spare: dict[int, int]  # of those that nobody held, what a tenant had beyond its floor


class Eviction(NamedTuple):
    """A node left a tier, or is to leave it."""

    tier: int
    node: tuple[Page, ...]
    candidates: list[tuple[Page, ...]]  # all nodes that were unlocked leaves of the tier then, this one among them
    wakes: int  # answers of the same turn that were given before
    leaving: bool = False  # it stays until a copy of it is over
    left: bool = False  # that copy is over
    cleared: bool = False  # it went by a clear
    asks: Asks | None = None  # where there are tenants, for whom


@dataclass(eq=False)
class PinModel:
    session: SessionModel
    owner: str
    held: list[tuple[int, tuple[Page, ...]]]
    expires_at: float


class Model:
    """State of a whole index as a flat table; methods are what happened, in order."""

    def __init__(
        self,
        book: Book,
        *,
        num_pages: int,
        host_pages: int,
        policies: Sequence[Policy] = (LRU, LRU),
        write_policy: WritePolicy = WRITE_THROUGH,
        load_back_threshold: int = 0,
        load_back_quota: int = 0,
    ) -> None:
        self.book = book
        self.write_policy = write_policy
        self.load_back_threshold = load_back_threshold
        self.load_back_quota = load_back_quota
        self.policies = policies  # of a tier
        self.total = (num_pages, host_pages)
        self.slot: tuple[dict[Page, int], dict[Page, int]] = ({}, {})  # pages present in a tier -> where
        self.page: tuple[dict[int, Page], dict[int, Page]] = ({}, {})  # the same, turned round
        self.writing: dict[Page, int] = {}  # pages on their way to the host -> host slot
        self.owner: dict[int, LeaseModel] = {}  # device slot -> the lease it must come back from
        self.holds: tuple[Counter[Page], Counter[Page]] = (Counter(), Counter())
        self.stamp: tuple[dict[Page, int], dict[Page, int]] = ({}, {})  # when the last hold let go
        self.created: tuple[dict[Page, int], dict[Page, int]] = ({}, {})  # when it came to the tier
        # While it is in any tier: how often, for whom at most, and how deep in pages its branch ever was.
        self.hits: Counter[Page] = Counter()
        self.priority: dict[Page, int] = {}
        self.history: dict[Page, int] = {}
        self.sessions: dict[int, SessionModel] = {}
        self.leases: dict[int, LeaseModel] = {}  # live ones of live sessions: those that take commands
        self.fenced: list[LeaseModel] = []  # of ended sessions, not given back yet
        self.copies: dict[int, CopyModel] = {}
        self.host_fenced: set[int] = set()  # targets of cancelled copies that may still be written
        self.fetched: dict[int, int] = {}  # host slots of fetches from L3, and who pays
        self.pins: list[PinModel] = []
        self.clock = 0
        # How often a page's presence in a tier changed since the last clear of all; against Subscriber.said.
        self.changes: Counter[tuple[int, Page]] = Counter()
        self.clears = 0
        self.stored_for: dict[Page, list[str | None]] = {}  # whose session_id each storing on the device must name
        # The change that freed a slot: (clears, tier, page, number of that change). Who gets the slot next
        # must not hear of it before the stream has said so.
        self.freed_by: tuple[dict[int, tuple[int, Page, int]], dict[int, tuple[int, Page, int]]] = ({}, {})
        self.left: Counter[tuple[int, str]] = Counter()  # pages that left a tier, by the reason
        # With tenants, by number: who pays for a page, on its way to the host or there; and (floor, ceiling) of a tier.
        self.payer: tuple[dict[Page, int], dict[Page, int]] = ({}, {})
        self.limits: list[tuple[tuple[int, int | None], tuple[int, int | None]]] = []
        self.leaving: set[Page] = set()  # from the device, with the end of a copy
        self.most: dict[tuple[int, int], int] = {}  # what (tier, tenant) may be charged with that is above its ceiling

    # -- holds and the order of eviction --------------------------------------------------------------

    def hold(self, tier: int, path: Iterable[Page]) -> None:
        for page in path:
            self.holds[tier][page] += 1

    def let_go(self, tier: int, path: Iterable[Page]) -> None:
        """One holder lets go of a whole path at once: what nobody holds now was last used now."""
        self.clock += 1
        holds = self.holds[tier]
        for page in path:
            holds[page] -= 1
            assert holds[page] >= 0, f"the model itself let go of {page} twice"
            if not holds[page]:
                del holds[page]
                self.stamp[tier][page] = self.clock

    def evictable(self, tier: int) -> list[Page]:
        """Present and held by nobody."""
        return [page for page in self.slot[tier] if page not in self.holds[tier] and page not in self.writing]

    def in_copies(self, keep: Iterable[Page] = ()) -> int:
        """Pages on the device that write-throughs hold and nobody else: they can be evicted when these are over."""
        return len(self.only_copies(keep))

    # -- tenants --------------------------------------------------------------------------------------

    def charged(self, tier: int, tenant: int) -> int:
        """Pages that it pays for."""
        return sum(payer == tenant for payer in self.payer[tier].values()) + self._leased(tier, tenant)

    def _leased(self, tier: int, tenant: int) -> int:
        if tier == HOST:
            return sum(payer == tenant for payer in self.fetched.values())
        return sum(lease.tenant == tenant for lease in self.owner.values())

    def room(self, tier: int, tenant: int, keep: Iterable[Page] = (), later: bool = False) -> tuple[int, int]:
        """Pages that can be had for a tenant that keeps these, by the floors of others and by its own ceiling; `later`:
        once all write-throughs are over."""
        held = set(self.holds[tier]) | set(keep)
        over = self.only_copies(keep) if later else set()
        unlocked = {page for page in self.slot[tier] if page not in held or page in over}
        room, headroom = self.num_free(tier) + len(unlocked), 1 << 62
        for number, limits in enumerate(self.limits):
            floor, ceiling = limits[tier]
            mine = {page for page, payer in self.payer[tier].items() if payer == number}
            locked = self._leased(tier, number) + len(mine - unlocked)
            if number == tenant:
                headroom = headroom if ceiling is None else ceiling - locked
                continue
            go = mine & self.leaving if tier == DEVICE else set()
            gone = go & over
            room -= max(0, min(len(mine & unlocked - gone), floor - locked + len(go) - len(gone)))
        return room, headroom

    def only_copies(self, keep: Iterable[Page] = ()) -> set[Page]:
        """Pages on the device that write-throughs hold and nobody else."""
        held = Counter(
            page
            for copy in self.copies.values()
            if copy.target == HOST
            for tier, path in copy.held
            if tier == DEVICE
            for page in path
        )
        return {page for page, count in held.items() if self.holds[DEVICE][page] == count} - set(keep)

    def limits_may_be(self, limits: Sequence[tuple[tuple[int, int | None], tuple[int, int | None]]]) -> bool:
        for tier in (DEVICE, HOST):
            of_tier = [each[tier] for each in limits]
            if any(floor < 0 or (ceiling is not None and ceiling < floor) for floor, ceiling in of_tier):
                return False
            if self.total[tier] and sum(floor for floor, _ in of_tier) > self.total[tier]:
                return False
        return True

    def check_ceilings(self) -> None:
        """Nobody is above, or not more than when the ceiling was lowered."""
        for number, limits in enumerate(self.limits):
            for tier in (DEVICE, HOST):
                ceiling = limits[tier][1]
                charged = self.charged(tier, number)
                if ceiling is None or charged <= ceiling:
                    self.most.pop((tier, number), None)
                    continue
                most = self.most.get((tier, number), ceiling)
                assert charged <= most, f"tenant {number} has {charged} pages of tier {tier}; its ceiling is {ceiling}"
                self.most[tier, number] = charged

    def num_locked(self, tier: int) -> int:
        return sum(page in self.holds[tier] for page in self.slot[tier])

    def num_free(self, tier: int) -> int:
        """Slots that are nobody's."""
        used = len(self.slot[tier])
        used += len(self.owner) if tier == DEVICE else len(self.writing) + len(self.host_fenced) + len(self.fetched)
        return self.total[tier] - used

    # -- presence -------------------------------------------------------------------------------------

    def put(self, tier: int, page: Page, slot: int, now: int, created: int | None = None) -> None:
        """none -> present; `now` is the same for all pages of a path that come together."""
        assert page not in self.slot[tier], f"{page} is in tier {tier} already"
        assert slot not in self.page[tier], f"slot {slot} of tier {tier} holds {self.page[tier].get(slot)} already"
        parent = page.parent
        assert parent is None or parent in self.slot[tier], f"{page} came to tier {tier} before its parent"
        self.slot[tier][page] = slot
        self.page[tier][slot] = page
        self.changes[tier, page] += 1
        self.created[tier][page] = now if created is None else created
        if page not in self.holds[tier]:
            self.stamp[tier][page] = now

    def drop(self, tier: int, page: Page) -> None:
        """present -> none."""
        slot = self.slot[tier].pop(page)
        del self.page[tier][slot]
        self.stamp[tier].pop(page, None)
        del self.created[tier][page]
        del self.payer[tier][page]
        if not self.anywhere(page):
            self.hits.pop(page, None)
            self.priority.pop(page, None)
            self.history.pop(page, None)
        self.changes[tier, page] += 1
        self.freed_by[tier][slot] = (self.clears, page, self.changes[tier, page])

    def anywhere(self, page: Page) -> bool:
        return page in self.slot[DEVICE] or page in self.slot[HOST]

    def used(self, lease: LeaseModel) -> None:
        """A request counts once for each page that it has in the tree."""
        for page in lease.path[lease.counted : lease.pinned]:
            self.hits[page] += 1
            self.priority[page] = max(lease.priority, self.priority.get(page, lease.priority))
        lease.counted = max(lease.counted, lease.pinned)

    # -- matching -------------------------------------------------------------------------------------

    def match(self, path: Sequence[Page], limit: int | None = None, *, now: bool = False) -> tuple[int, int]:
        """(pages on the device, pages on the device and then those of the host that are worth loading).

        `now`: with the loads that are under way.
        """
        on_device, matched = self.reach(path, limit)
        num_pages = matched - on_device
        loading = sum(len(copy.pages) for copy in self.copies.values() if copy.target == DEVICE) if now else 0
        few = num_pages * (self.book.page_bytes // 4) < self.load_back_threshold
        many = now and self.load_back_quota and loading + num_pages > self.load_back_quota
        return (on_device, on_device) if few or many else (on_device, matched)

    def reach(self, path: Sequence[Page], limit: int | None = None) -> tuple[int, int]:
        """(pages on the device, pages on the device and then the host) of a sequence."""
        most = len(path) if limit is None else min(len(path), limit // (self.book.page_bytes // 4))
        on_device = 0
        while on_device < most and path[on_device] in self.slot[DEVICE]:
            on_device += 1
        matched = on_device
        while matched < most and path[matched] in self.slot[HOST]:
            matched += 1
        return on_device, matched

    # -- eviction -------------------------------------------------------------------------------------

    def evicted(self, tier: int, evictions: Sequence[Eviction], need: int | None) -> None:
        """Nodes left a tier one after the other, to make room. `need`: how many pages had to go (None: unknown).

        Checked: nobody held them; no child stays without its parent; none went without need; nothing else was due
        before them.
        """
        gone = [page for eviction in evictions for page in eviction.node if not eviction.leaving]
        if need is not None and gone:
            last = len(evictions[-1].node)
            assert len(gone) - last < need, f"{len(gone)} pages were evicted from tier {tier} where {need} had to go"
        parents = Counter(page.parent for page in self.slot[tier])
        for eviction in evictions:
            for page in eviction.node:
                assert page not in self.holds[tier], f"{page} was evicted from tier {tier} while it is held"
                assert tier == DEVICE or page not in self.writing
            below = parents[eviction.node[-1]]
            assert not below, f"{eviction.node[-1]} was evicted from tier {tier} before its children"
            if eviction.asks is not None:
                self._check_tenants(tier, eviction, eviction.asks)
            elif not eviction.left:
                self._check_order(tier, eviction)
            if eviction.leaving:
                self.leaving.update(eviction.node)
                continue
            for page in reversed(eviction.node):
                parents[page.parent] -= 1
                kept = page in self.slot[1 - tier]
                self.left[tier, "cleared" if eviction.cleared else "kept" if kept else "evicted"] += 1
                self.drop(tier, page)

    def _check_order(self, tier: int, eviction: Eviction) -> None:
        """What went had the smallest key of all evictable leaves."""
        assert eviction.node in eviction.candidates, f"{eviction.node} went, and is not among {eviction.candidates}"
        keys = {node: self.key(tier, node) for node in eviction.candidates}
        least = min(keys.values())
        assert keys[eviction.node] == least, (
            f"tier {tier}, {self.policies[tier]}: {eviction.node} of key {keys[eviction.node]} went before "
            f"{[(node, key) for node, key in keys.items() if key == least]}"
        )

    def _check_tenants(self, tier: int, eviction: Eviction, asks: Asks) -> None:
        """It went by the policy's order among those that may be taken for the tenant; or, if there were none, it was
        below one that may be."""
        assert asks.own or asks.needed, f"{eviction.node} was evicted for tenant {asks.tenant} for no reason"

        def may_go(page: Page) -> bool:
            whose = asks.whose[page]
            return whose == asks.tenant or (not asks.own and asks.spare[whose] > 0)

        whose = asks.whose[eviction.node[-1]]
        for page in eviction.node:
            assert asks.whose[page] == whose, f"{eviction.node} is one node, and several pay for it"
            assert asks.whose[page] == self.payer[tier][page], f"{page}: {asks.whose[page]} pays in tier {tier}"
        first = [node for node in eviction.candidates if may_go(node[-1])]
        if first:
            self._check_order(tier, eviction._replace(candidates=first))
            size, spare = len(eviction.node), asks.spare[whose]
            assert whose == asks.tenant or size <= spare, (
                f"{size} pages of tenant {whose} went from tier {tier} for tenant {asks.tenant}; it can spare {spare}"
            )
            return
        assert eviction.node in eviction.candidates
        above = [page for page in ancestry(eviction.node[0]) if page in asks.whose]
        assert any(map(may_go, above)), (
            f"{eviction.node} of tenant {whose} went from tier {tier} for tenant {asks.tenant}, for nothing"
        )

    def key(self, tier: int, node: Sequence[Page]) -> tuple[int, ...]:
        """What SGLang's policy of that name sorts a leaf by (evict_policy.py), smallest first."""
        policy, last = self.policies[tier], node[-1]
        access, creation = self.stamp[tier][last], self.created[tier][last]
        size = self.book.page_bytes // 4
        match policy.name:
            case "lru":
                return (access,)
            case "lfu":
                key: tuple[int, ...] = self.hits[last], access
            case "fifo":
                key = (creation,)
            case "mru":
                key = (-access,)
            case "filo":
                key = (-creation,)
            case "priority":
                key = self.priority.get(last, LOWEST), access
            case "slru":
                key = 1 if self.hits[last] >= policy.protected_threshold else 0, access
            case "tlru":
                budget = max(self.history[last] * size + policy.next_prompt_estimate - policy.threshold, 0)
                key = -1 if node[0].depth * size >= budget else 0, access
            case _:
                raise AssertionError(policy)
        facts = {
            (
                self.created[tier][page] if policy.name in ("fifo", "filo") else self.stamp[tier][page],
                self.hits[page] if policy.name in ("lfu", "slru") else 0,
                self.priority.get(page, LOWEST) if policy.name == "priority" else 0,
                self.history[page] if policy.name == "tlru" else 0,
            )
            for page in node
        }
        assert len(facts) == 1, f"tier {tier}: {node} is one node, and its pages are {facts}"
        return key

    # -- leases ---------------------------------------------------------------------------------------

    def opened(self, lease: LeaseModel) -> None:
        """A match was made: what it found is held from now on, whether there is room for the rest yet or not."""
        lease.session.leases.append(lease)
        self.hold(DEVICE, lease.path[: lease.pinned])
        self.hold(HOST, lease.path[: lease.host_pinned])

    def granted(self, lease: LeaseModel, number: int) -> None:
        assert number not in self.leases
        lease.number, lease.waiting, lease.num_fresh, lease.known = number, False, 0, lease.pinned
        for slot in lease.owned:
            self._take(slot, lease)
        self.leases[number] = lease

    def grown(self, lease: LeaseModel, slots: Iterable[int]) -> None:
        for slot in slots:
            self._take(slot, lease)
            lease.owned.add(slot)
            lease.table.append(slot)

    def _take(self, slot: int, lease: LeaseModel) -> None:
        assert 0 <= slot < self.total[DEVICE], f"slot {slot} is none"
        assert slot not in self.page[DEVICE], f"slot {slot} was handed out while it holds {self.page[DEVICE][slot]}"
        assert slot not in self.owner, f"slot {slot} was handed out while it is lease {self.owner[slot].number}'s"
        self.owner[slot] = lease

    def _give_back(self, lease: LeaseModel, used: bool = True) -> None:
        if used:
            self.used(lease)
        for slot in lease.owned:
            del self.owner[slot]
        lease.owned.clear()
        lease.duplicates.clear()
        self.let_go(HOST, lease.path[: lease.host_pinned])
        self.let_go(DEVICE, lease.path[: lease.pinned])
        lease.over = True
        lease.session.leases.remove(lease)

    def refused(self, lease: LeaseModel) -> None:
        """There will be no room for it: the holds go, and nothing else was taken."""
        assert lease.waiting
        self._give_back(lease, used=False)

    def cancelled(self, lease: LeaseModel) -> None:
        """Nobody has touched its pages: they are free at once, or when its load is over."""
        assert lease.load is None, f"{lease} was given back while its load is on its way"
        if lease in self.fenced:
            self.fenced.remove(lease)
        self._give_back(lease, used=False)
        self.leases.pop(lease.number, None)

    def _adopt(self, lease: LeaseModel, end: int, reply: int) -> None:
        """The lease's own pages up to `end` go to the tree where it has none; where it has, they are duplicates."""
        self.clock += 1
        path = lease.path[:end]
        if end > lease.pinned and not all(map(self.anywhere, path)):
            self._deepened(path)
        for i in range(lease.pinned, end):
            page, own = lease.path[i], lease.table[i]
            assert own in lease.owned
            there = self.slot[DEVICE].get(page)
            self.hold(DEVICE, [page])
            if there is not None:
                lease.duplicates.append(Duplicate(own, page, reply))
                lease.table[i] = there
            else:
                lease.owned.remove(own)
                del self.owner[own]
                self.payer[DEVICE][page] = lease.tenant
                self.put(DEVICE, page, own, self.clock)
                self.stored_for.setdefault(page, []).append(lease.session_id)
        lease.pinned = max(lease.pinned, end)

    def _deepened(self, path: Sequence[Page]) -> None:
        """Something at the end of it is new."""
        for page in path:
            self.history[page] = max(len(path), self.history.get(page, 0))

    def committed(self, item: Item, pages: int, first_page: int, slots: Sequence[int], lost: int, reply: int) -> None:
        """A commit took effect: adopt what is new, count what is there already."""
        lease, session = item.lease, item.lease.session
        self._may_apply(item)
        assert not lease.broken, f"what was computed on a load that failed was committed: {item}"
        session.replies += 1
        assert reply == session.replies, f"reply {reply} where the session's next is {session.replies}"
        own = list(lease.table)
        self._adopt(lease, item.pages, reply)
        self.used(lease)
        for duplicate in lease.duplicates:
            duplicate.reply = duplicate.reply or reply
        assert pages == lease.pinned, f"{pages} pages are said to be committed, {lease.pinned} are"
        assert first_page == lease.known, f"the answer starts at page {first_page}, the runner knows {lease.known}"
        assert list(slots) == lease.table[first_page:pages], (
            f"canonical slots {list(slots)} from page {first_page}; they are {lease.table[first_page:pages]}, "
            f"the lease's own were {own[first_page:pages]}"
        )
        fresh = [d for d in lease.duplicates if d.reply == reply]
        assert lost == len(fresh), f"{lost} duplicates were told, {len(fresh)} are new"
        lease.known = max(lease.known, lease.pinned)
        self._applied(item)

    def commit_failed(self, item: Item) -> None:
        """The answer to a commit on top of a load that went wrong: nothing of it is cached."""
        self._may_apply(item)
        assert item.lease.broken
        self._applied(item)

    def released(self, item: Item) -> None:
        self._may_apply(item)
        self._give_back(item.lease)
        self.leases.pop(item.lease.number, None)
        self._applied(item)

    def _may_apply(self, item: Item) -> None:
        session = item.lease.session
        what = f"{item.kind} {item.ticket} of session {session.number}"
        assert item.issued, f"{what} took effect before it was sent"
        assert not item.applied, f"{what} took effect twice"
        assert not item.dropped, f"{what} was discarded and took effect"
        assert not session.ended, f"{what} took effect after the session's end"
        assert session.all_done(item), f"{what} took effect with events done on {item.done} of {session.shards} shards"
        assert item.lease.load is None, f"{what} took effect while the lease's load is on its way"
        before = [i.ticket for i in session.items if i.ticket < item.ticket]
        assert not before, f"{what} took effect before {before}"

    def _applied(self, item: Item) -> None:
        session = item.lease.session
        item.applied = True
        session.items = [i for i in session.items if i.ticket > item.ticket]
        # The runner sent this after it had read replies up to `seen`: nothing older is read by it any more.
        for lease in session.leases:
            for duplicate in [d for d in lease.duplicates if 0 < d.reply <= item.seen]:
                lease.duplicates.remove(duplicate)
                lease.owned.remove(duplicate.slot)
                del self.owner[duplicate.slot]

    def settle(self, session: SessionModel) -> None:
        """A discarded commit is done, and nothing else, when its turn comes and its events are done."""
        while session.items and session.items[0].dropped and session.all_done(session.items[0]):
            self._applied(session.items[0])

    def overdue(self) -> list[Item]:
        """What must have taken effect by now: its events are done and nothing before it waits."""
        late: list[Item] = []
        for session in self.sessions.values():
            if session.ended:
                continue
            item = session.items[0] if session.items else None
            if item is not None and item.issued and session.all_done(item) and item.lease.load is None:
                late.append(item)
        return late

    # -- death ----------------------------------------------------------------------------------------

    def ended(self, session: SessionModel) -> None:
        """No command more. What its leases took and pin stays theirs, fenced, until their last use is over."""
        if session.ended:
            return
        session.ended = True
        for lease in list(session.leases):
            self.leases.pop(lease.number, None)
            if lease.waiting:
                self.refused(lease)
            else:
                self.fenced.append(lease)
        for pin in [pin for pin in self.pins_in_order() if pin.session is session]:
            self.unpin(pin)

    def reap(self) -> None:
        """Take back what ended sessions can't use any more: all shards gone, or the release's event done."""

        def turn(lease: LeaseModel) -> int:
            """Of leases that end at once, the first released was used least recently; the dead's go as they came."""
            dead = len(lease.session.gone) == lease.session.shards
            return 0 if dead or lease.release is None else lease.release.ticket

        for lease in sorted(self.fenced, key=turn):
            session, release = lease.session, lease.release
            over = len(session.gone) == session.shards
            if release is not None and release.issued and session.all_over(release):
                over = True
            if over and lease.load is None:
                self.fenced.remove(lease)
                self._give_back(lease)

    # -- copies, pins, clear --------------------------------------------------------------------------

    def copying(self, copy: CopyModel) -> None:
        """A copy was asked for. What it reads, and the paths above, must not go before its ack."""
        assert copy.ticket not in self.copies
        for page, slot in zip(copy.pages, copy.source_slots, strict=True):
            there = self.slot[copy.source].get(page)
            assert there == slot, f"{page} is to be read from {slot}, it lies in {there}"
        if copy.target == HOST:
            taken = set(self.writing.values()) | self.host_fenced
            for page, slot in zip(copy.pages, copy.target_slots, strict=True):
                assert 0 <= slot < self.total[HOST]
                assert page not in self.slot[HOST], f"{page} is in the host already"
                assert page not in self.writing, f"{page} is on its way to the host already"
                assert slot not in self.page[HOST], f"host slot {slot} holds {self.page[HOST].get(slot)}"
                assert slot not in taken, f"host slot {slot} is being written"
                parent = page.parent
                ok = parent is None or parent in self.slot[HOST] or parent in self.writing
                assert ok, f"{page} goes to the host without its parent"
                self.writing[page] = slot
                self.payer[HOST][page] = self.payer[DEVICE][page]
        for tier, path in copy.held:
            self.hold(tier, path)
        self.clock += 1
        copy.begun = self.clock
        self.copies[copy.ticket] = copy

    def write_through_over(self, copy: CopyModel, ok: bool) -> None:
        """The ack of a copy to the host took effect; of one that failed, so do all that hang on its pages.

        What hangs on it may still be being written: its target slots stay fenced until its own ack.
        """
        del self.copies[copy.ticket]
        self.leaving.difference_update(copy.pages)
        if copy.cancelled:
            for slot in copy.target_slots:
                self.host_fenced.remove(slot)
        else:
            self.clock += 1
            for page, slot in zip(copy.pages, copy.target_slots, strict=True):
                del self.writing[page]
                if ok:
                    self.put(HOST, page, slot, self.clock, copy.begun)
                else:
                    del self.payer[HOST][page]
            if not ok:
                failed = set(copy.pages)
                for other in reversed(self.copies.values()):
                    if other.target == HOST and not other.cancelled and failed & set(ancestry(other.pages[-1])):
                        other.cancelled = True
                        self.host_fenced.update(other.target_slots)
                        for page in other.pages:
                            del self.writing[page], self.payer[HOST][page]
                        for tier, path in [held for held in other.held if held[0] == HOST]:
                            self.let_go(tier, path)
                            other.held.remove((tier, path))
        for tier, path in copy.held:
            self.let_go(tier, path)

    def touched(self, path: Iterable[Page]) -> None:
        """Room was made beside a path of the host, and nothing came of it: it was used all the same."""
        path = list(path)
        self.hold(HOST, path)
        self.let_go(HOST, path)

    def should_have_been_copied(self, path: Sequence[Page]) -> list[Page]:
        """Pages that a request has used, that the host lacks and should have, and that it has free room for."""
        if self.write_policy.on_eviction:
            return []
        least = self.write_policy.threshold if self.write_policy.selective else 0
        missing = [
            page
            for page in path
            if page not in self.slot[HOST] and page not in self.writing and self.hits[page] >= least
        ]
        return missing if len(missing) <= self.num_free(HOST) else []

    def adopt_fetched(self, pages: Sequence[Page], slots: Sequence[int]) -> None:
        """What came from L3 joins a path of the host, and is held with it; of doubles the slot was given back."""
        self.clock += 1
        if not all(map(self.anywhere, pages)):
            self._deepened(ancestry(pages[-1]))
        for page, slot in zip(pages, slots, strict=True):
            assert page not in self.writing, f"{page} came from L3 while it was written"
            if page in self.slot[HOST]:
                assert slot not in self.fetched, f"slot {slot} of {page} is nobody's"
            else:
                self.payer[HOST][page] = self.fetched.pop(slot)
                self.put(HOST, page, slot, self.clock)
        self.hold(HOST, pages)

    def load_over(self, copy: CopyModel, ok: bool) -> None:
        del self.copies[copy.ticket]
        lease = copy.lease
        assert lease is not None
        lease.load = None
        lease.broken |= not ok
        if ok and not lease.session.ended:
            self._adopt(lease, lease.matched, 0)
        for tier, path in copy.held:
            self.let_go(tier, path)
        if lease.cancelling is not None:
            self.cancelled(lease)
        self.reap()

    def pin(self, pin: PinModel) -> None:
        for tier, path in pin.held:
            self.hold(tier, path)
        self.pins.append(pin)
        if pin.owner not in pin.session.owners:
            pin.session.owners.append(pin.owner)

    def pins_in_order(self) -> list[PinModel]:
        """In the order in which they go where several go at once: by session, by owner, by age."""
        sessions = list(self.sessions.values())
        return sorted(self.pins, key=lambda pin: (sessions.index(pin.session), pin.session.owners.index(pin.owner)))

    def unpin(self, pin: PinModel) -> None:
        self.pins.remove(pin)
        if not any(other.session is pin.session and other.owner == pin.owner for other in self.pins):
            pin.session.owners.remove(pin.owner)
        for tier, path in pin.held:
            self.let_go(tier, path)

    def cleared(self) -> None:
        """AllBlocksCleared: every page of every tier is gone at once."""
        for tier in (DEVICE, HOST):
            for page in list(self.slot[tier]):
                self.left[tier, "cleared"] += 1
                self.drop(tier, page)
        self.changes.clear()
        self.clears += 1

    def all_busy(self) -> bool:
        """Whether something live holds up a clear."""
        return bool(self.copies or self.pins or any(session.leases for session in self.sessions.values()))
