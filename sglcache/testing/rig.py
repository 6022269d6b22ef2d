"""An index, runners that misuse nothing but leave no law untried, memory that shows it, and the model beside them.

Every method of `Rig` is one turn of a server's loop: a command, what leaves by `drain`, and then everything that can
be checked from outside: the model's prediction, slot by slot; law 4's sums; `invariants.check`; the stream against
the truth; and every page that anyone may read, byte for byte (a page's bytes are the Page itself).

Runners are as nasty as a correct one can be: they scribble over fresh pages as soon as they have them, write the
right bytes at the last moment (when their event is done), and read old pages until the last moment too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from sglcache.core import invariants
from sglcache.core.effects import (
    Cancel,
    Committed,
    Copy,
    Effect,
    Extended,
    Fetch,
    Grant,
    Prefetched,
    Probe,
    Publish,
    Released,
    Store,
    Wake,
)
from sglcache.core.index import LEFT, Index, IndexConfig, _Waiting
from sglcache.core.key import ROOT, Namespace
from sglcache.core.leases import Lease, Pin, Ticket
from sglcache.core.line import Patience, Standing
from sglcache.core.tiering import Backups
from sglcache.core.tree import Node
from sglcache.errors import BadRequest, Busy, Cancelled, Changed, NoSpace, SglcacheError
from sglcache.testing.model import (
    DEVICE,
    HOST,
    Asks,
    CopyModel,
    Eviction,
    Item,
    LeaseModel,
    Model,
    PinModel,
    SessionModel,
)
from sglcache.testing.pages import TOKEN_BYTES, Book, Page, ancestry
from sglcache.testing.queue import InLine, Queue
from sglcache.testing.stamps import Stamps
from sglcache.testing.still import is_still
from sglcache.testing.subscriber import Subscriber
from sglcache.testing.third import FakeL3, Op, Step, WatchedL3
from sglcache.units import LeaseId, SessionId, TicketId, Tier
from sglcache.wire.control import Extension

T = TypeVar("T")
Seen = tuple[dict[Page, int], dict[Page, int]]  # per tier: the pages that are ready, and their slots
PARTS = 2  # shards of the pools; a session with one shard writes both in one go


def pack(tokens: Iterable[int]) -> bytes:
    """Token ids as the core takes them."""
    return np.array(list(tokens), "<u4").tobytes()


def unpack_slots(slots: bytes) -> list[int]:
    found: list[int] = np.frombuffer(slots, "<i4").tolist()
    return found


@dataclass(eq=False)
class Runner:
    """One session as its processes live it. Its `SessionModel` is what the index may know of it."""

    session: SessionModel
    next_ticket: int = 1
    read: int = 0  # the highest reply number that was read
    planned: list[Item] = field(default_factory=list)  # has a ticket; the command is not sent yet
    computed: dict[LeaseModel, dict[int, int]] = field(default_factory=dict)  # shard -> pages that have their bytes
    stopped: dict[LeaseModel, set[int]] = field(default_factory=dict)  # shards that touch the lease no more
    views: dict[LeaseModel, list[int]] = field(default_factory=dict)  # where its own writes go

    @property
    def id(self) -> SessionId:
        return SessionId(self.session.number)


@dataclass(eq=False)
class Growing:
    """One item of an extend: what its lease is to get, or the kind of error that it is to get instead."""

    lease: LeaseModel
    tokens: bytes
    fresh: int
    error: type[SglcacheError] | None = None


@dataclass(eq=False)
class Waits:
    """An acquire or extend that has no answer yet."""

    request: int
    acquired: LeaseModel | None = None
    growing: list[Growing] = field(default_factory=list)
    # By tenant, pages that could be had when there were fewest (see Model.room): what fits in these is not refused.
    least: dict[int, tuple[int, int]] = field(default_factory=dict)
    at_once: bool = False  # it has only just begun to wait: who waits before it has no say yet
    copies: float = float("inf")  # how long it may wait for the end of a copy
    line: InLine | None = None  # as what it may stand in line, if others come to what a copy lets go of

    @property
    def num_fresh(self) -> int:
        return sum(fresh for _, fresh in self.wants)

    @property
    def wants(self) -> list[tuple[int, int]]:
        """(tenant, pages), in order."""
        if self.acquired is not None:
            return [(self.acquired.tenant, self.acquired.num_fresh)]
        return [(each.lease.tenant, each.fresh) for each in self.growing if each.error is None]


@dataclass(eq=False)
class Fetching:
    """An acquire, or a prefetch, that waits for L3."""

    session: SessionModel
    path: tuple[Page, ...]
    make: Callable[[], tuple[LeaseModel, int]] | None  # an acquire's lease, and the pages it needs, as of now
    until: float
    patience: Patience | None = None


class Watched(Index):
    """An index whose evictions are seen one by one, with what else could have gone at that moment."""

    def __init__(self, config: IndexConfig, book: Book) -> None:
        super().__init__(config)
        self._book = book
        self.evictions: list[Eviction] = []
        self.touched: list[tuple[int, tuple[Page, ...]]] = []  # (answers before, path of the host): see Model.touched
        self.happened: list[Eviction | Step] = []  # all of it, in order
        self._asks: tuple[int, int, int, int] | None = None  # for whom room is made: tier, pages, tenant, extra
        self.stamps = Stamps()
        self.backups = self.watched = WatchedBackups(self, config.write_policy)
        self.writes = self.backups.writes
        if config.l3 is not None:
            self.l3 = WatchedL3(self, config.l3)

    def drop(self, c: int, node: Node, cleared: bool = False, pruned: bool = False, corrupt: bool = False) -> None:
        self._note(c, node, left=self.watched.leaving, cleared=cleared)
        super().drop(c, node, cleared, pruned, corrupt)

    def evict(self, c: int, num_pages: int, tenant: int = 0, extra: int = 0) -> bool:
        before, self._asks = self._asks, (c, num_pages, tenant, extra)
        try:
            return super().evict(c, num_pages, tenant, extra)
        finally:
            self._asks = before

    def change(self, c: int, node: Node, present: bool, session_id: str | None = None) -> None:
        if present:
            self.stamps.came(self.path(node), node.num_bytes // self.page_bytes, self.now)
        else:
            kept = self.T > 1 and node.cells[1 - c] is not None
            self.stamps.left(c, self.path(node), node.num_bytes // self.page_bytes, self.now, kept)
        super().change(c, node, present, session_id)

    def clear(self, tier: Tier | None = None) -> dict[Tier, int]:
        cleared = super().clear(tier)
        if tier is None:
            self.stamps.cleared()
        return cleared

    def _give_back(self, lease: Lease, used: bool = True) -> None:
        self._accessed((lease.node, lease.host_node))
        super()._give_back(lease, used)

    def _let_go(self, pins: list[Pin]) -> None:
        for pin in pins:
            self._accessed(pin.nodes)
        super()._let_go(pins)

    def _accessed(self, ends: Sequence[Node | None]) -> None:
        for c, end in enumerate(ends):
            if end is not None:
                self.stamps.accessed(c, self.path(end), self.now)

    def leaving(self) -> set[Page]:
        """Pages that leave the device with the end of a copy."""
        return {
            page
            for ticket in self.writes
            if ticket.demote and ticket.end is not None
            for page in self.path(ticket.end)[-ticket.demote :]
        }

    def _counted(self, c: int, paths: dict[Node, tuple[Page, ...]]) -> Asks:
        """What there is of each tenant, from nodes and leases and no counter."""
        assert self._asks is not None
        assert self.tenants is not None
        tier, num_pages, tenant, extra = self._asks
        assert tier == c, f"room is made in tier {tier}, and a node of {c} goes"
        count = len(self.tenants.names)
        whose: dict[Page, int] = {}
        unlocked, charged, left = [0] * count, [0] * count, [0] * count
        leaving = self.leaving() if c == DEVICE else set()
        place, lock = self.tenants.place[c], len(self.pools) + c
        for node, path in paths.items():
            if node.cells[c] is not None:
                pages, payer = path[-(node.num_bytes // self.page_bytes) :], node.cells[place]
                charged[payer] += len(pages)
                left[payer] += len(leaving.intersection(pages))
                if not node.cells[lock]:
                    whose.update(dict.fromkeys(pages, payer))
                    unlocked[payer] += len(pages)
        if c == DEVICE:
            for lease in self.leases.values():
                charged[lease.tenant] += len(lease.own_slots) // 4
        elif self.l3 is not None:
            for prefetch in self.l3.prefetches:
                slots = len(prefetch.slots) + sum(len(part.slots) for part in prefetch.parts)
                charged[prefetch.tenant] += slots // 4
        spare = {}
        for payer in range(count):
            held = charged[payer] - unlocked[payer] - left[payer]
            floor = self.tenants.limits[self.tenants.names[payer]].of(c)[0]
            spare[payer] = unlocked[payer] - max(0, min(unlocked[payer], floor - held))
        ceiling = self.tenants.limits[self.tenants.names[tenant]].of(c)[1]
        own = ceiling is not None and charged[tenant] - left[tenant] + extra > ceiling
        needed = self.pools[c].free + (len(leaving) if c == DEVICE else 0) < num_pages
        return Asks(tenant, own, needed, whose, spare)

    def _leave_line(self, standing: Standing, served: bool = False) -> None:
        super()._leave_line(standing, served)
        if served:
            self.happened.append(Step(self.num_wakes, "turn", request=standing.request))

    def _admit(self, waiting: _Waiting) -> None:
        if not (self.happened and self.happened[-1] == Step(self.num_wakes, "turn", request=waiting.request)):
            self.happened.append(Step(self.num_wakes, "turn", request=waiting.request))
        super()._admit(waiting)

    def _back_in_line(self, waiting: _Waiting, refusal: NoSpace) -> bool:
        back = super()._back_in_line(waiting, refusal)
        if back:
            self.happened.append(Step(self.num_wakes, "back", request=waiting.request))
        return back

    def path(self, node: Node) -> tuple[Page, ...]:
        """All pages up to the end of `node`."""
        nodes = []
        up: Node | None = node
        while up is not None and up.parent is not None:
            nodes.append(up)
            up = up.parent
        path: tuple[Page, ...] = ()
        for each in reversed(nodes):
            path += tuple(self._book.path(each.space.namespace, each.key, path[-1] if path else None))
        return path

    @property
    def num_wakes(self) -> int:
        return sum(isinstance(effect, Wake) for effect in self._effects)

    def _note(self, c: int, node: Node, **how: Any) -> None:
        lock = len(self.pools) + c
        paths: dict[Node, tuple[Page, ...]] = {}
        parents: set[Node | None] = set()
        for each in self.tree.nodes():
            last = paths[each.parent][-1] if each.parent in paths else None
            paths[each] = self._book.path(each.space.namespace, each.key, last)
            if each.cells[c] is not None:
                parents.add(each.parent)
        leaves = [
            path
            for each, path in paths.items()
            if each.cells[c] is not None and not each.cells[lock] and each not in parents
        ]
        asks = None
        if self.tenants is not None and not how.get("left") and not how.get("cleared"):
            asks = self._counted(c, paths)
        eviction = Eviction(c, paths[node], leaves, self.num_wakes, asks=asks, **how)
        self.evictions.append(eviction)
        self.happened.append(eviction)


class WatchedBackups(Backups):
    """The same of what is to leave the device with the end of a copy."""

    index: Watched
    leaving = False

    def demote(self, victim: Node) -> bool:
        evictions = self.index.evictions
        self.index._note(DEVICE, victim, leaving=True)
        note = len(evictions) - 1
        begun = super().demote(victim)
        if not begun:
            self.index.happened.remove(evictions.pop(note))
        return begun

    def _demoted(self, ticket: Ticket) -> None:
        self.leaving = True
        super()._demoted(ticket)
        self.leaving = False

    def send(self, end: Node, *, demote: bool = False, again: bool = False, whole: bool = False) -> bool:
        index = self.index
        evictions, writes = len(index.evictions), len(self.writes)
        done = super().send(end, demote=demote, again=again, whole=whole)
        made_room = any(each.tier == HOST for each in index.evictions[evictions:])
        if made_room and len(self.writes) == writes:
            up: Node | None = end
            while up is not None and up.parent is not None and up.cells[HOST] is None:
                up = up.parent
            if up is not None and up.parent is not None:
                index.touched.append((index.num_wakes, index.path(up)))
        return done


class Rig:
    """One index under test. `config` as IndexConfig's fields; `waits`: programs have commands wait for room."""

    def __init__(self, *, checks: bool = True, waits: bool = False, **config: Any) -> None:
        self.waits = waits
        self.config = IndexConfig(**config)
        self.page_size = self.config.page_size
        self.book = Book(self.page_size, self.config.hash_name, self.config.bigram)
        self.index = Watched(self.config, self.book)
        tenants = self.index.tenants
        self.tenants = [] if tenants is None else list(tenants.names)  # by number
        self.model = Model(
            self.book,
            num_pages=self.config.num_pages,
            host_pages=self.config.host_pages,
            policies=(self.config.eviction, self.config.host_eviction),
            write_policy=self.config.write_policy,
            load_back_threshold=self.config.load_back_threshold,
            load_back_quota=self.config.load_back_quota,
        )
        if tenants is not None:
            self.model.limits = [(each.of(DEVICE), each.of(HOST)) for each in tenants.limits.values()]
        self.subscriber = Subscriber(
            self.book,
            page_size=self.page_size,
            first_seq=self.config.first_seq,
            rank=self.config.rank,
            max_batch_blocks=self.config.max_batch_blocks,
        )
        self.runners: dict[int, Runner] = {}
        # memory[tier][part][slot]: a Page, whole, or anything else
        sizes = (self.config.num_pages, self.config.host_pages)
        self.memory: list[list[list[object]]] = [[["never written"] * n for _ in range(PARTS)] for n in sizes]
        self.acks: list[tuple[CopyModel, bool]] = []  # acks of write-throughs that wait for an earlier one's
        self.waiting: list[Waits] = []
        self.line = Queue()  # who waits for room that others lock
        self.time = 0.0  # on the callers' clock
        self.withdrawing = 0  # the request that is being withdrawn
        self._distrusted = False  # somebody has waited too long for a copy, and none has ended since
        self._expiring = False
        self._turned_away = 0  # by that
        self._was_first: InLine | None = None  # in line, before that
        self._fits_all = True
        self.cancels: dict[int, LeaseModel] = {}  # requests of cancels that were not answered
        self.l3 = FakeL3(self.book)
        self.fetching: dict[int, Fetching] = {}  # requests that wait for L3
        self.left: set[int] = set()  # that did, and are answered with an error or no lease
        self._answered: dict[int, object] = {}
        self.asked: dict[int, Item] = {}  # requests of commits and releases that were not answered
        self._places: tuple[dict[Page, int], ...] = ({}, {})  # what was cached after the last turn
        self._version = 0
        self.clearing = [0, 0]  # pages of a tier that a clear has still to drop
        self.next_request = 1
        self.now = 0.0
        self.failed = False  # a check failed: nothing after it is worth a look
        self.copies: list[Copy] = []  # every one that was asked for
        self.wakes: list[Wake] = []
        self._checks = checks
        self.turn(lambda: None)

    # -- one turn -------------------------------------------------------------------------------------

    def turn(
        self,
        command: Callable[[], T],
        then: Callable[[T | SglcacheError], None] | None = None,
        need: int | None = 0,
        asks: bool = False,
    ) -> T | SglcacheError:
        """Run a command and look at everything. `need`: pages the device has to find for it (None: unknown).

        `asks`: they are for its own answer, so they go before `then`.
        """
        try:
            return self._turn(command, then, need, asks)
        except AssertionError:
            self.failed = True
            raise

    def _turn(
        self,
        command: Callable[[], T],
        then: Callable[[T | SglcacheError], None] | None,
        need: int | None,
        asks: bool,
    ) -> T | SglcacheError:
        before = self._fingerprint()
        self.index.now += 1
        self.index.evictions.clear()
        self.index.touched.clear()
        self.index.happened.clear()
        result: T | SglcacheError
        try:
            result = command()
        except SglcacheError as exc:
            result = exc
        if isinstance(result, SglcacheError):
            assert self._fingerprint() == before, f"{result!r} changed something"
        self._emptied: set[int] = set()
        self._seen = self._early = 0
        during = len(self.index.happened)
        effects = self._drain()
        seen = observe(self.index, self.book)
        places = (dict(seen[DEVICE]), dict(seen[HOST]))
        assert places == self._places or self.index.version != self._version, (
            "what is cached changed, `version` did not"
        )
        self._places, self._version = places, self.index.version
        # What a grant takes was evicted before it, what a commit's copy takes before the commit's answer.
        if (self.index.l3 is not None and not asks) or self.tenants:
            need = None  # a turn of any kind may serve who waited for it; of tenants it is another question
        if asks:
            early = self.index.happened[:during]
            alone = [each for each in early if isinstance(each, Eviction) and each.tier == DEVICE]
            if len(alone) == len(early):
                self._evicted(DEVICE, alone, need)
            else:  # of each tier for the other: in order
                for each in early:
                    if isinstance(each, Eviction):
                        self._evicted(each.tier, [each], None)
                    else:
                        self._stepped(each)
            self._seen = self._early = during
        elif self.index.l3 is None and not self._expiring:
            self._take_victims(DEVICE, 0, need)
        if then is not None:
            then(result)
        if self._expiring and self.index.l3 is None:
            self._take_victims(DEVICE, 0, need)  # for who waits in line: what was pinned may go by now
        self._take_effects([effect for effect in effects if not isinstance(effect, Publish)], seen)
        for session in self.model.sessions.values():
            if not session.ended:
                self.model.settle(session)
        self.model.reap()
        self.check(seen)
        return result

    def _take_effects(self, effects: Sequence[Effect], seen: Seen) -> None:
        """Answers in order; what was evicted for one, and what it had copied, came just before it."""
        copies: list[Copy] = []
        wakes = 0
        self._answered = {effect.request: effect.result for effect in effects if isinstance(effect, Wake)}
        for effect in effects:
            if isinstance(effect, Copy):
                copies.append(effect)
                continue
            if isinstance(effect, Store | Probe | Fetch | Cancel):
                self._before(wakes, copies)  # what it needs was made ready
                self._asked_l3(effect)
                continue
            assert isinstance(effect, Wake)
            self._before(wakes, copies)
            self._woken(effect, seen, copies)
            wakes += 1
            for copy in copies:
                self._asked(copy)
            copies.clear()
        self._before(wakes, copies)
        for copy in copies:
            self._asked(copy)
        for waits in self.waiting:
            waits.at_once = False

    def _before(self, wakes: int, copies: Sequence[Copy]) -> None:
        """What was evicted since the answer before, and what L3's part did."""
        if wakes and wakes not in self._emptied and self.index.l3 is None:
            self._emptied.add(wakes)
            self._take_victims(DEVICE, wakes, None)
        need: int | None = sum(len(copy.dst_slots) // 4 for copy in copies if copy.dst == Tier.HOST)
        if self.config.evict_slice < self.config.host_pages or self.index.l3 is not None or self.tenants:
            need = None  # where a slice is not enough for all that is to be copied, some of it is
        happened = self.index.happened
        gone: list[Eviction] = []
        while self._seen < len(happened) and happened[self._seen].wakes <= wakes:
            each = happened[self._seen]
            self._seen += 1
            if not isinstance(each, Eviction):
                self._evicted(HOST, gone, need)
                gone = []
                self._stepped(each)
            elif each.tier == HOST:
                gone.append(each)
            elif self.index.l3 is not None and self._seen > self._early and not each.left:
                self._evicted(DEVICE, [each], None)
        self._evicted(HOST, gone, need)
        for when, path in self.index.touched:
            if when == wakes:
                self.model.touched(path)
        self.index.touched[:] = [each for each in self.index.touched if each[0] != wakes]

    def _fingerprint(self) -> object:
        index = self.index
        stats = index.stats()
        return index.version, index.next_seq, stats.pools, stats.num_leases, stats.num_copies, stats.pinned_pages

    def _drain(self) -> list[Effect]:
        """What leaves, as a server takes it: while `held`, cut and ask again."""
        effects: list[Effect] = []
        self.now += 1
        still = is_still(self.index)
        while True:
            part = self.index.drain(self.now)
            assert not (still and part), f"still, and yet {part} left"
            kinds = [isinstance(effect, Publish) for effect in part]
            assert kinds == sorted(kinds, reverse=True), "a batch left behind something else"
            for effect in part:
                if isinstance(effect, Publish):
                    self.subscriber.apply(effect)
            effects += part
            if not self.index.held:
                return effects
            assert all(kinds), f"held, and yet {part} left"
            self.now += 1
            self.index.cut(self.now)

    def _take_victims(self, tier: int, wakes: int, need: int | None) -> None:
        gone = [each for each in self.index.evictions if each.tier == tier and each.wakes == wakes and not each.left]
        self._evicted(tier, gone, need)

    def _evicted(self, tier: int, evictions: Sequence[Eviction], need: int | None) -> None:
        if not evictions:
            return
        if self.clearing[tier]:
            self.clearing[tier] = max(0, self.clearing[tier] - sum(len(each.node) for each in evictions))
            need = None
        elif need is not None:
            need -= self.model.num_free(tier)
            assert not any(each.cleared for each in evictions), "called cleared, and went to make room"
        self.model.evicted(tier, evictions, need)

    def _stepped(self, step: Step) -> None:
        """What L3's part of the index did."""
        model = self.model
        if step.kind == "hold":
            model.hold(step.tier, step.pages)
        elif step.kind == "let go":
            model.let_go(step.tier, step.pages)
        elif step.kind == "adopt":
            model.adopt_fetched(step.pages, step.slots)
        elif step.kind == "free":
            for slot in step.slots:
                del model.fetched[slot]
        elif step.kind == "turn":
            self._turn_comes(step.request)
        elif step.kind == "back":
            self._goes_back(step.request)
        else:
            assert step.kind == "serve"
            self._serve(step.request)

    def _serve(self, request: int) -> None:
        """A request waits for L3 no longer: it is answered now, or waits for room."""
        asked = self.fetching.pop(request)
        result = self._answered.get(request)
        if asked.session.ended:
            self.left.add(request)
            return
        if isinstance(result, Cancelled):
            assert request == self.withdrawing
            self.left.add(request)
            return
        if asked.make is None:
            reach = self.model.reach(asked.path)[1] * self.page_size
            assert isinstance(result, Prefetched), f"{result!r}"
            assert result.matched_tokens == reach, f"{result}, and {reach} tokens are cached"
            self.left.add(request)
            return
        lease, fresh = asked.make()
        short = fresh > 0 and (len(self.line) > 0 or fresh > self._room_later(lease.path[: lease.pinned], lease.tenant))
        patience = asked.patience
        waited = isinstance(result, NoSpace) and "waited_s" in result.facts  # for room, too, if only for this moment
        if isinstance(result, SglcacheError) and not waited:
            self._check_refusal(result, short, fresh + lease.pinned, patience, asked.session)
            self.left.add(request)
            return
        if short:
            assert result is None or waited, f"{result!r}"
            assert patience is not None
            self._stands(request, asked.session, patience, make=asked.make, num_bytes=len(lease.tokens))
            return
        self.model.opened(lease)
        lease.num_fresh = fresh
        lease.waiting = True
        line = self._in_line(request, asked.session, patience, make=asked.make, num_bytes=len(lease.tokens))
        self.waiting.append(Waits(request, lease, at_once=True, copies=_copies(patience), line=line))

    # -- in line for room -------------------------------------------------------------------------------

    def _patience(self, wait: float | None, copies: float | None) -> Patience | None:
        if wait is None and copies is None:
            return None
        return Patience(self.time, wait, float("inf") if copies is None else copies)

    def _in_line(self, request: int, session: SessionModel, patience: Patience | None, **what: Any) -> InLine | None:
        """As what it may stand in line; None: it may not."""
        if patience is None or patience.room is None:
            return None
        return InLine(request, session, patience.since, patience.room, patience.copies, **what)

    def _stands(self, request: int, session: SessionModel, patience: Patience, **what: Any) -> None:
        each = self._in_line(request, session, patience, **what)
        assert each is not None, "it stands in line, and was not to wait"
        self.line.add(each)

    def _goes_back(self, request: int) -> None:
        """It waited for a copy, and others came to what that let go of: it is the first in line again."""
        waits = next(each for each in self.waiting if each.request == request)
        assert waits is self.waiting[0], f"{waits} is not the first to be looked at"
        assert waits.line is not None, f"{waits} was not to stand in line"
        lease = waits.acquired
        if lease is not None:
            room = min(self._room(lease.tenant, later=True))
            assert lease.num_fresh > room, f"{waits} stands in line, and {room} pages can be had"
            self.model.refused(lease)
        elif not self.tenants:
            room = self._room_later()
            assert waits.num_fresh > room, f"{waits} stands in line, and {room} pages can be had"
        self.waiting.remove(waits)
        self.line.add_first(waits.line)

    def _check_refusal(
        self, error: SglcacheError, short: bool, total: int, patience: Patience | None, session: SessionModel
    ) -> None:
        """It was answered at once that there is no room."""
        assert short, f"{error!r}"
        waits = patience is not None and patience.room is not None and total <= self.config.num_pages
        assert isinstance(error, Busy if waits else NoSpace), f"{error!r}"
        if waits:
            full = len(self.line) >= self.config.max_waiting
            assert full or self.line.of(session) >= self.config.max_waiting_of_session, f"{error!r}"
        else:
            assert error.waiting == len(self.line)

    def _turn_comes(self, request: int) -> None:
        """There is room for one in line: it goes on as any other that waits for a slice, or for a copy."""
        each = self.line.find(request)
        assert each is not None, f"it is the turn of {request}, which stands in no line"
        first = each is self.line.first
        self._fits_all = True
        if each.make is not None:
            assert first, f"{each} overtook {self.line.first}"
            lease, fresh = each.make()
            later = self._room_later(lease.path[: lease.pinned])
            assert fresh <= max(0, later), f"it is the turn of {each}, which needs {fresh} pages of {later}"
            self.model.opened(lease)
            lease.num_fresh = fresh
            lease.waiting = True
            waits = Waits(request, lease, at_once=True, copies=each.copies, line=each)
        else:
            late = self._expiring and each.until <= self.time
            if not self._fit(each, first):
                assert late, f"{each} went on in part before its time was over"
                self._turned_away += 1
            waits = Waits(request, growing=each.growing, at_once=True, copies=each.copies, line=each)
            waits.least = {0: self._room(0, later=True)}
            # What has no room was refused before.
            if any(growing.error is NoSpace for growing in each.growing):
                waits.least = {0: (0, 0)}
        self.line.remove(each, served=first and self._fits_all)
        self.waiting.append(waits)

    def _fit(self, each: InLine, first: bool) -> bool:
        """Whether there is room for all that an extend in line is to get; what has none will be refused."""
        room, need = self._room_later(), 0
        self._fits_all = True
        for growing in each.growing:
            if growing.error is None:
                if growing.fresh and (need + growing.fresh > room or not first):
                    growing.error = NoSpace
                    self._fits_all = False
                else:
                    need += growing.fresh
        return self._fits_all

    def _left_line(self, each: InLine, result: object) -> None:
        """One in line was answered, and it was not its turn."""
        first = each is self.line.first
        place = self.line.place(each)
        self._fits_all = True
        if isinstance(result, Cancelled):
            assert each.request == self.withdrawing
        elif each.make is None and not each.session.ended:
            assert isinstance(result, Extended), f"{result!r}"
            if self._expiring and each.until <= self.time:
                self._fit(each, first)
                self._turned_away += 1
            assert all(growing.error is not None for growing in each.growing), f"{result!r} of {each}"
            self._extended(each.growing, result.results, {})
        elif not each.session.ended:
            assert each.make is not None
            lease, fresh = each.make()
            if isinstance(result, NoSpace):
                late = self._expiring and each.until <= self.time
                assert late or fresh + lease.pinned > self.config.num_pages, f"{result!r} of {each}"
                had_room = fresh <= self._room_later(lease.path[: lease.pinned])
                assert each is not self._was_first or not had_room, f"{result!r} of {each}"
                if late:
                    self._turned_away += 1
                    assert result.waited_s == self.time - each.since
                    assert result.place == place, f"{result!r}; {each} has place {place}"
                    assert result.waiting == len(self.line) - 1, "others"
            else:
                assert isinstance(result, Changed), f"{result!r} of {each}"
        self.line.remove(each, served=False)

    def withdraw(self, runner: Runner, request: int) -> bool:
        """Have a request wait no longer, for whatever it does."""
        waits = request in [each.request for each in self.waiting] or self.line.find(request) is not None
        self.withdrawing = request

        def then(result: bool | SglcacheError) -> None:
            assert result is (waits or request in self.fetching), f"{result!r}"

        result = self.turn(lambda: self.index.withdraw(runner.id, request), then, need=None)
        assert result is False or request not in self.fetching
        self.withdrawing = 0
        return result is True

    def _asked_l3(self, effect: Store | Probe | Fetch | Cancel) -> None:
        """It may begin this moment."""
        op = self.l3.take(effect)
        if op is None or isinstance(effect, Probe):
            return
        model = self.model
        for page, slot in zip(op.pages, op.slots, strict=True):
            if isinstance(effect, Store):
                assert model.slot[HOST].get(page) == slot, f"{page} is to be stored from slot {slot}"
                assert page in model.holds[HOST], f"{page} is to be stored, and nobody holds it"
                continue
            self._no_news(HOST, slot)
            taken = slot in model.page[HOST] or slot in model.fetched or slot in model.host_fenced
            assert not taken, f"slot {slot} is fetched into, and somebody's"
            assert slot not in model.writing.values(), f"slot {slot} is fetched into, and written"
            assert self.index.l3 is not None
            model.fetched[slot] = self.index.l3._by_ticket[effect.ticket].tenant
            for part in range(PARTS):
                self.memory[HOST][part][slot] = f"half of fetch {effect.ticket}"

    def l3_done(self, op: Op, right: int | None = None, bad: bool = False, evict: Sequence[Page] = ()) -> None:
        """What L3 was asked for is over. `right`: so many leading pages, or all; `bad`: the next was found to be none;
        `evict`: what it lost to make room."""
        effect, l3 = op.effect, self.l3
        del l3.ops[effect.ticket]
        removed = b"".join(l3.throw_away(page) for page in evict if page in l3.pages)
        if isinstance(effect, Store):
            count = len(op.pages) if right is None else right
            for page, slot in zip(op.pages[:count], op.slots, strict=False):
                for part in range(PARTS):
                    there = self.memory[HOST][part][slot]
                    assert there is page, f"{page} is stored from slot {slot}; part {part} there is {there}"
            mask = bytearray(len(op.pages))
            for i, page in enumerate(op.pages[:count]):
                if page.parent is None or page.parent in l3.pages:
                    l3.pages.setdefault(page)
                mask[i] = page in l3.pages
            for i, page in enumerate(op.pages):
                mask[i] |= page in l3.pages
            self.turn(lambda: self.index.stored(effect.ticket, bytes(mask), removed), need=None)
            return
        there = 0
        while there < len(op.pages) and op.pages[there] in l3.pages:
            there += 1
        count = there if right is None else min(right, there)
        if isinstance(effect, Probe):
            self.turn(lambda: self.index.probed(effect.ticket, count), need=None)
            return
        if bad and count < there and op.pages[count] in l3.leaves():
            removed += l3.throw_away(op.pages[count])
        for i, (page, slot) in enumerate(zip(op.pages, op.slots, strict=True)):
            for part in range(PARTS):
                self.memory[HOST][part][slot] = page if i < count else f"rest of fetch {effect.ticket}"
        self.turn(lambda: self.index.fetched(effect.ticket, count, removed), need=None)

    def l3_lost(self, page: Page) -> None:
        """By no doing of ours."""
        removed = self.l3.throw_away(page)
        self.turn(lambda: self.index.l3_removed(removed))

    def l3_had(self, pages: tuple[Page, ...]) -> None:
        """A path that it holds from an earlier life."""
        for page in pages:
            self.l3.pages.setdefault(page)
        if self.config.l3 is not None and self.config.l3.exact:
            self.turn(lambda: self.index.l3_found([self.l3.run(pages)]))

    def all_l3_done(self) -> None:
        """Every store and fetch goes well; so do those that they lead to."""
        while self.l3.ops:
            self.l3_done(next(iter(self.l3.ops.values())))

    def _no_news(self, tier: int, slot: int) -> None:
        """Whoever gets a slot must not hear of it before the stream has said that the old page is gone (law 5)."""
        change = self.model.freed_by[tier].get(slot)
        if change is None or self.config.events is False:
            return
        clears, page, count = change
        if page.namespace[1] is None and clears == self.subscriber.clears - 1:
            said = self.subscriber.said[tier, page]
            assert said >= count, f"slot {slot} of tier {tier} is handed on; its removal of {page} was not sent"

    # -- what was answered ------------------------------------------------------------------------------

    def _granted(self, lease: LeaseModel, grant: Grant) -> None:
        model, size = self.model, self.page_size
        slots = unpack_slots(grant.slots)
        want = [model.slot[DEVICE].get(page) for page in lease.path[: lease.pinned]]
        assert slots[: lease.pinned] == want, f"slots of the hit {slots[: lease.pinned]}, they are {want}"
        fresh = slots[lease.pinned :]
        assert len(set(slots)) == len(slots)
        assert len(fresh) == lease.num_fresh, f"{len(fresh)} fresh pages, {lease.num_fresh} are needed"
        assert grant.matched_tokens == lease.matched * size
        assert grant.host_tokens == (lease.matched - lease.pinned) * size
        assert (grant.load is None) is (grant.host_tokens == 0)
        lease.table, lease.owned, lease.load = slots, set(fresh), grant.load
        for slot in fresh:
            self._no_news(DEVICE, slot)
        model.granted(lease, grant.lease)
        self._scribble(lease, fresh)
        runner = self.runners[lease.session.number]
        runner.computed[lease] = dict.fromkeys(range(lease.session.shards), lease.matched)
        runner.stopped[lease] = set()
        runner.views[lease] = list(slots)

    def _extended(
        self,
        growing: Sequence[Growing],
        results: Sequence[bytes | SglcacheError],
        least: dict[int, tuple[int, int]],
    ) -> None:
        """`least`: the pages that could be had all the time, by tenant; what fits in these is granted."""
        assert len(results) == len(growing)
        taken = 0
        of: dict[int, int] = {}
        for each, result in zip(growing, results, strict=True):
            if isinstance(result, bytes):
                assert each.error is None, f"{each} was granted"
                self._grown(each.lease, each.tokens, unpack_slots(result), each.fresh)
                taken += each.fresh
                of[each.lease.tenant] = of.get(each.lease.tenant, 0) + each.fresh
            elif each.error is None:
                assert isinstance(result, NoSpace), f"{result!r}"
                room, headroom = least.get(each.lease.tenant, (1 << 62, 1 << 62))
                assert taken + each.fresh > room or of.get(each.lease.tenant, 0) + each.fresh > headroom, (
                    f"{result!r}; there was room for {room} and {headroom}, {of} were taken before"
                )
            else:
                assert isinstance(result, each.error), f"{each} was answered {result!r}"

    def _grown(self, lease: LeaseModel, tokens: bytes, fresh: list[int], num_fresh: int) -> None:
        assert len(fresh) == num_fresh, f"{len(fresh)} fresh pages, {num_fresh} are needed"
        lease.tokens += tokens
        lease.path = self.book.path(lease.namespace, lease.tokens)
        for slot in fresh:
            self._no_news(DEVICE, slot)
        self.model.grown(lease, fresh)
        self._scribble(lease, fresh)
        self.runners[lease.session.number].views[lease] += fresh

    def _scribble(self, lease: LeaseModel, slots: Iterable[int]) -> None:
        for slot in slots:
            for part in range(PARTS):
                self.memory[DEVICE][part][slot] = f"scribble of lease {lease.number}"

    def _woken(self, wake: Wake, seen: Seen, copies: Sequence[Copy]) -> None:
        """`copies`: what was asked for since the answer before."""
        self.wakes.append(wake)
        session, result = self.model.sessions[wake.session], wake.result
        if wake.request in self.left:
            self.left.remove(wake.request)
            return
        in_line = self.line.find(wake.request)
        if in_line is not None:
            self._left_line(in_line, result)
            return
        waits = next((w for w in self.waiting if w.request == wake.request), None)
        if waits is not None:
            error = isinstance(result, SglcacheError) and session.ended
            if isinstance(result, Cancelled):
                assert waits.request == self.withdrawing
                self.waiting.remove(waits)
                if waits.acquired is not None:
                    self.model.refused(waits.acquired)
                return
            if self._expiring and waits.copies <= self.time and _waited_in_vain(waits, result):
                self._gave_up(waits, result)
                return
            changed = isinstance(result, Extended) and not any(isinstance(each, bytes) for each in result.results)
            assert error or changed or waits.at_once or waits is self.waiting[0], (
                f"{waits} was served before {self.waiting[0]}"
            )
            if isinstance(result, Grant) and waits.num_fresh:
                assert waits is self.waiting[0], f"{waits} was served before {self.waiting[0]}"
            self.waiting.remove(waits)
            lease = waits.acquired
            if error:
                return
            if lease is None:
                assert isinstance(result, Extended), f"{result!r}"
                self._extended(waits.growing, result.results, waits.least)
            elif isinstance(result, Grant):
                self._granted(lease, result)
            else:
                assert isinstance(result, NoSpace), f"{result!r}"
                room = min(self._room(lease.tenant, later=True))
                assert lease.num_fresh > room, f"{result!r}; {room} pages can be had"
                self.model.refused(lease)
            return
        if isinstance(result, SglcacheError) and session.ended:
            if self.cancels.pop(wake.request, None) is None:
                self.asked.pop(wake.request)
            return  # SessionEnded to whatever was under way; the end is in the model already
        cancelled = self.cancels.pop(wake.request, None)
        if cancelled is not None:
            assert isinstance(result, Released), f"{result!r}"
            assert cancelled.over, f"{cancelled} is said to be given back"
            return
        self.model.settle(session)
        item = self.asked.pop(wake.request, None)
        assert item is not None, f"an answer to request {wake.request}, which waits for none: {result}"
        if isinstance(result, Committed):
            assert result.lease == item.lease.number
            slots = unpack_slots(result.slots)
            pages, rest = divmod(result.committed_tokens, self.page_size)
            assert not rest
            if not slots:  # the pages are where the runner has them
                slots = self.runners[wake.session].views[item.lease][result.first_page : pages]
            self._check_bytes(item.lease.path[:pages], slots, result.first_page)
            self.model.committed(item, pages, result.first_page, slots, result.num_duplicates, result.reply)
            path = item.lease.path[: item.lease.pinned]
            if not any(copy.dst == Tier.HOST for copy in copies):
                missed = [] if self.tenants else self.model.should_have_been_copied(path)
                assert not missed, f"there is room on the host, and {missed} were not written through"
        elif isinstance(result, Released):
            assert result.lease == item.lease.number
            self.model.released(item)
        elif item.lease.broken and not item.dropped:
            self.model.commit_failed(item)
        else:
            assert item.dropped, f"{item} was answered with {result!r}"

    def _gave_up(self, waits: Waits, result: object) -> None:
        """It had waited for a copy as long as it may."""
        self.waiting.remove(waits)
        self._turned_away += 1
        self._distrusted |= any(copy.target == HOST for copy in self.model.copies.values())
        if waits.acquired is not None:
            assert isinstance(result, NoSpace), f"{result!r}"
            assert result.waited_s >= 0
            self.model.refused(waits.acquired)
            return
        assert isinstance(result, Extended), f"{result!r}"
        for each in waits.growing:
            if each.error is None and each.fresh:
                each.error = NoSpace
        self._extended(waits.growing, result.results, {})

    def _check_bytes(self, path: Iterable[Page], slots: list[int], first: int) -> None:
        """What an answer calls canonical holds the right bytes on every shard, now."""
        for page, slot in zip(list(path)[first:], slots, strict=True):
            for part in range(PARTS):
                there = self.memory[DEVICE][part][slot]
                assert there is page, f"{page} is said to lie in slot {slot}; part {part} there is {there}"

    def _asked(self, copy: Copy) -> None:
        """A copy is to be made. It may start this moment: its sources hold their bytes, nobody uses its targets."""
        model = self.model
        self.copies.append(copy)
        source, target = unpack_slots(copy.src_slots), unpack_slots(copy.dst_slots)
        assert source
        assert len(source) == len(target) == len(set(source)) == len(set(target))
        lease = None
        if copy.dst == Tier.HOST:
            assert copy.src == Tier.DEVICE
            assert copy.lease is None
            for slot in source:
                assert slot in model.page[DEVICE], f"slot {slot} is to be backed up, and holds no cached page"
            pages = tuple(model.page[DEVICE][slot] for slot in source)
            path = tuple(ancestry(pages[-1]))
            assert path[-len(pages) :] == pages, f"a write-through of what is no run: {pages}"
            held = [(DEVICE, path), (HOST, path)]
        else:
            assert copy.src == Tier.HOST
            assert copy.lease is not None
            lease = model.leases[copy.lease]
            assert lease.load == copy.ticket
            pages = lease.path[lease.pinned : lease.matched]
            assert target == lease.table[lease.pinned : lease.matched]
            held = []  # the lease holds the host's path until it is given back
        for slot in target:
            self._no_news(copy.dst, slot)
        model.copying(CopyModel(copy.ticket, copy.src, copy.dst, pages, tuple(source), tuple(target), lease, held))
        for part in range(PARTS):
            for page, slot in zip(pages, source, strict=True):
                there = self.memory[copy.src][part][slot]
                assert there is page, f"{page} is to be copied from {slot}; part {part} there is {there}"
            for slot in target:
                self.memory[copy.dst][part][slot] = f"half of copy {copy.ticket}"

    # -- commands ---------------------------------------------------------------------------------------

    def open_session(self, shards: int = 1) -> Runner:
        number = self.turn(lambda: self.index.open_session(shards))
        assert isinstance(number, int)
        session = self.model.sessions[number] = SessionModel(number, shards)
        runner = self.runners[number] = Runner(session)
        return runner

    def acquire(
        self,
        runner: Runner,
        tokens: Iterable[int] | bytes,
        namespace: Namespace = ROOT,
        *,
        limit: int | None = None,
        reserve: int = 0,
        exact: int | None = None,
        room: int | None = None,
        session_id: str | None = None,
        priority: int = 0,
        fetch: float | None = None,
        tenant: str | None = None,
        wait: float | None = None,
        copies: float | None = None,
    ) -> LeaseModel | SglcacheError | None:
        """The lease; NoSpace exactly when locks leave too little, Changed exactly when `exact` is not what matches.

        None while it waits for `step`, or for copies to be over; or, with `wait`, in line until then for room that
        others lock. `copies`: how long it waits for the end of one.
        """
        patience = self._patience(wait, copies)
        key = tokens if isinstance(tokens, bytes) else pack(tokens)
        model, request = self.model, self._request()
        path = self.book.path(namespace, key)

        def make() -> tuple[LeaseModel, int]:
            pinned, matched = model.match(path, limit if exact is None else exact, now=True)
            host_pinned = 0
            while host_pinned < matched and path[host_pinned] in model.slot[HOST]:
                host_pinned += 1
            have = len(key) // TOKEN_BYTES + reserve
            if room is not None:
                have = min(have, matched * self.page_size + room)
            lease = LeaseModel(
                -request,
                runner.session,
                namespace,
                key,
                path,
                [],
                set(),
                pinned,
                host_pinned,
                session_id,
                priority,
                matched,
                tenant=self.number(tenant),
            )
            return lease, -(-have // self.page_size) - pinned

        most = len(path) if limit is None else min(len(path), limit // self.page_size)
        waits_for_l3 = fetch is not None and fetch > 0 and exact is None and self._l3_is_asked(path, most)
        lease, fresh = make()
        pinned, matched = lease.pinned, lease.matched
        now, later = (self._left(lease.tenant, path[:pinned], later=each) for each in (False, True))
        crowded = fresh > model.num_free(DEVICE) or (fresh > 0 and bool(self.waiting or len(self.line)))
        crowded = crowded or self._over(lease.tenant, fresh)
        short = crowded and (fresh > later or (fresh > 0 and len(self.line) > 0))

        def then(result: Grant | SglcacheError | None) -> None:
            if waits_for_l3:
                assert result is None, f"{result!r}, and L3 was to be asked"
                assert fetch is not None
                self.fetching[request] = Fetching(runner.session, path, make, fetch, patience)
                return
            agreed = exact is None or exact == matched * self.page_size
            assert isinstance(result, Changed) is not agreed, f"{result!r}; {matched} pages match, {exact=} tokens"
            if isinstance(result, Changed):
                assert result.matched_tokens == matched * self.page_size
                return
            if isinstance(result, SglcacheError):
                self._check_refusal(result, short, fresh + pinned, patience, runner.session)
                return
            if short:
                assert result is None, f"{result!r} while {self.line.first} waits, of {later} pages"
                assert patience is not None, f"it waits for {fresh} pages of {later}"
                self._stands(request, runner.session, patience, make=make, num_bytes=len(key))
                return
            self._check_answer(result is None, crowded, fresh, now)
            model.opened(lease)
            lease.num_fresh = fresh
            if result is None:
                lease.waiting = True
                line = self._in_line(request, runner.session, patience, make=make, num_bytes=len(key))
                self.waiting.append(Waits(request, lease, copies=_copies(patience), line=line))
            else:
                self._granted(lease, result)

        result = self.turn(
            lambda: self.index.acquire(
                runner.id,
                request,
                key,
                namespace,
                limit=limit,
                reserve=reserve,
                exact=exact,
                room=room,
                session_id=session_id,
                priority=priority,
                fetch=fetch,
                tenant=tenant,
                patience=patience,
            ),
            then,
            need=None if self.waiting or self._sliced else fresh,
            asks=True,
        )
        return lease if isinstance(result, Grant) else result

    def _l3_is_asked(self, path: Sequence[Page], most: int) -> bool:
        """Whether an acquire, or a prefetch, of so many pages of the path finds reason to."""
        l3 = self.config.l3
        if l3 is None:
            return False
        rest = most - self.model.reach(path[:most])[1]
        assert self.index.l3 is not None
        some = bool(self.l3.pages) if not self.index.l3.behind else len(self.index.l3.shelf) > 0
        return rest >= max(1, l3.threshold) and (not l3.exact or some)

    def prefetch(
        self,
        runner: Runner,
        tokens: Iterable[int] | bytes,
        namespace: Namespace,
        until: float,
        tenant: str | None = None,
    ) -> None:
        """Ask for what L3 has of a sequence."""
        key = tokens if isinstance(tokens, bytes) else pack(tokens)
        path, request = self.book.path(namespace, key), self._request()
        asked = self._l3_is_asked(path, len(path))

        def then(result: Prefetched | SglcacheError | None) -> None:
            if asked and until > 0:
                assert result is None, f"{result!r}"
                self.fetching[request] = Fetching(runner.session, path, None, until)
            else:
                assert result == Prefetched(self.model.reach(path)[1] * self.page_size, 0), f"{result!r}"

        self.turn(lambda: self.index.prefetch(runner.id, request, key, namespace, until, tenant), then)

    def _check_answer(self, waits: bool, crowded: bool, fresh: int, room: int) -> None:
        """Who could have been served at once was: in one slice, with nobody waiting before it."""
        if not waits:
            assert not crowded or (not self.waiting and fresh <= room), f"{fresh} pages were given out of {room}"
        elif not self.waiting and self.config.evict_slice >= self.config.num_pages and not self._writes_back:
            assert fresh > room, f"it waits for {fresh} pages, and {room} can be had"

    def extend(
        self,
        runner: Runner,
        lease: LeaseModel,
        tokens: Iterable[int] | bytes,
        reserve: int = 0,
        upto: int | None = None,
    ) -> bytes | SglcacheError | None:
        """The slots of its new pages; otherwise as `extend_all`."""
        key = tokens if isinstance(tokens, bytes) else pack(tokens)
        result = self.extend_all(runner, [(lease, key, reserve, upto)])
        return result.results[0] if isinstance(result, Extended) else result

    def extend_all(
        self,
        runner: Runner,
        items: Sequence[tuple[LeaseModel, bytes, int, int | None]],
        wait: float | None = None,
        copies: float | None = None,
    ) -> Extended | SglcacheError | None:
        """Each item for itself: NoSpace exactly where locks and those before it leave too little; None: it waits."""
        model, request = self.model, self._request()
        names = {lease.tenant for lease, *_ in items}
        rooms = {tenant: self._room(tenant, later=True) for tenant in names}
        promised = [want for waits in self.waiting for want in waits.wants]
        patience = self._patience(wait, copies)
        short = False
        growing: list[Growing] = []
        wants: list[tuple[int, int]] = []
        need = 0
        for lease, tokens, reserve, upto in items:
            have = (len(lease.tokens) + len(tokens)) // TOKEN_BYTES + reserve
            if upto is not None:
                have = min(have, upto)
            fresh = max(0, -(-have // self.page_size) - len(lease.table))
            error: type[SglcacheError] | None = None
            if self.extending(lease) or any(each.lease is lease and each.error is None for each in growing):
                error = BadRequest
            elif fresh and (
                not self._fits(rooms[lease.tenant], [*promised, *wants], lease.tenant, fresh) or self.line.extends
            ):
                most = self.config.num_pages
                if wait is None or need + fresh > most or len(lease.table) + fresh > most:
                    error = NoSpace
                else:
                    short = True
            growing.append(Growing(lease, tokens, fresh, error))
            if error is None:
                need += fresh
                wants.append((lease.tenant, fresh))
        crowded = need > model.num_free(DEVICE) or (need > 0 and bool(self.waiting))
        for tenant in names:
            crowded = crowded or self._over(tenant, sum(fresh for whose, fresh in wants if whose == tenant))
        now = 1 << 62 if self._all_fit_now(wants) else -1

        def then(result: Extended | SglcacheError | None) -> None:
            if isinstance(result, SglcacheError):
                self._check_refusal(result, short, 0, patience, runner.session)
                return
            if short:
                assert result is None, f"{result!r} while {self.line.first} waits, of {rooms}"
                assert patience is not None
                self._stands(request, runner.session, patience, growing=growing)
                return
            self._check_answer(result is None, crowded, need, now)
            if result is None:
                line = self._in_line(request, runner.session, patience, growing=growing)
                self.waiting.append(Waits(request, growing=growing, copies=_copies(patience), line=line))
            else:
                self._extended(growing, result.results, {})

        sent = [Extension(lease.number, tokens, reserve, upto) for lease, tokens, reserve, upto in items]
        return self.turn(
            lambda: self.index.extend(runner.id, request, sent, patience),
            then,
            need=None if self.waiting or self._sliced else need,
            asks=True,
        )

    def cancel(self, runner: Runner, lease: LeaseModel) -> bool | SglcacheError:
        """Give back what nobody was told of; False while its load is on its way."""
        request = self._request()

        def then(result: bool | SglcacheError) -> None:
            assert result is (lease.load is None), f"{result!r}"
            runner.stopped[lease].update(range(runner.session.shards))
            self._takes_no_more(lease)
            if result:
                self.model.cancelled(lease)
            else:
                lease.cancelling = request
                self.cancels[request] = lease
                self.model.leases.pop(lease.number)

        return self.turn(lambda: self.index.cancel(runner.id, request, LeaseId(lease.number)), then)

    @property
    def _sliced(self) -> bool:
        """Room is not made in one go."""
        return self._writes_back or self.config.evict_slice < self.config.num_pages

    @property
    def _writes_back(self) -> bool:
        """What is to be had may have to be copied first."""
        return self.config.write_policy.on_eviction and self.config.host_pages > 0

    def number(self, tenant: str | None) -> int:
        return self.tenants.index(tenant) if tenant in self.tenants else 0

    def _room(self, tenant: int, keep: Sequence[Page] = (), *, later: bool) -> tuple[int, int]:
        """See Model.room."""
        return self.model.room(DEVICE, tenant, keep, later and not self._distrusted)

    def _left(self, tenant: int, keep: Sequence[Page] = (), *, later: bool) -> int:
        """Pages that can be had for who comes now, and keeps these, beside those that are promised; `later`: once the
        write-throughs that are under way are over."""
        room, headroom = self._room(tenant, keep, later=later)
        promised = [want for waits in self.waiting for want in waits.wants]
        mine = sum(fresh for whose, fresh in promised if whose == tenant)
        return min(room - sum(fresh for _, fresh in promised), headroom - mine)

    @staticmethod
    def _fits(room: tuple[int, int], before: Sequence[tuple[int, int]], tenant: int, fresh: int) -> bool:
        mine = sum(pages for whose, pages in before if whose == tenant)
        return sum(pages for _, pages in before) + fresh <= room[0] and mine + fresh <= room[1]

    def _all_fit_now(self, wants: Sequence[tuple[int, int]]) -> bool:
        return all(
            not fresh or self._fits(self._room(tenant, later=False), wants[:i], tenant, fresh)
            for i, (tenant, fresh) in enumerate(wants)
        )

    def _over(self, tenant: int, fresh: int) -> bool:
        """With so many more it would be above its ceiling."""
        if not self.tenants or not fresh:
            return False
        ceiling = self.model.limits[tenant][DEVICE][1]
        return ceiling is not None and self.model.charged(DEVICE, tenant) + fresh > ceiling

    def set_tenant(self, name: str, **changes: int | None) -> SglcacheError | None:
        """BadRequest, and nothing changed, exactly when floors or ceilings can't be so."""
        model = self.model
        fields = ("device_floor", "device_ceiling", "host_floor", "host_ceiling")
        known = name in self.tenants
        was = model.limits[self.tenants.index(name)] if known else ((0, None), (0, None))
        now = dict(zip(fields, (*was[0], *was[1]), strict=True)) | changes
        device, host = ((now[f"{tier}_floor"] or 0, now[f"{tier}_ceiling"]) for tier in ("device", "host"))
        limits = list(model.limits)
        if known:
            limits[self.tenants.index(name)] = device, host
        else:
            limits.append((device, host))
        may_be = model.limits_may_be(limits)

        def then(result: SglcacheError | None) -> None:
            assert isinstance(result, BadRequest) is not may_be, f"{result!r}"
            if not may_be:
                return
            model.limits = limits
            if not known:
                self.tenants.append(name)
            number = self.tenants.index(name)
            for tier in (DEVICE, HOST):
                model.most[tier, number] = model.charged(tier, number)

        return self.turn(lambda: self.index.set_tenant(name, changes), then)

    def _room_later(self, keep: Sequence[Page] = (), tenant: int = 0) -> int:
        return self._left(tenant, keep, later=True)

    @property
    def more(self) -> bool:
        """`step` would get on with something."""
        return self.index.busy

    def _takes_no_more(self, lease: LeaseModel) -> None:
        """An extend of it that waits for room comes to nothing."""
        for each in self._growing:
            if each.lease is lease and each.error is None:
                each.error = Changed

    @property
    def _growing(self) -> list[Growing]:
        """Of all extends that wait."""
        waiting = [each for waits in self.waiting for each in waits.growing]
        return waiting + [each for waits in self.line.everyone for each in waits.growing]

    def extending(self, lease: LeaseModel) -> bool:
        return any(each.lease is lease and each.error is None for each in self._growing)

    def plan_commit(self, runner: Runner, lease: LeaseModel, tokens: int | None = None) -> Item:
        """Give a commit its ticket. From now on its event may be done; `issue` sends the command."""
        have = len(lease.tokens) // TOKEN_BYTES
        pages = min((have if tokens is None else tokens) // self.page_size, len(lease.table), len(lease.path))
        item = Item("commit", lease, runner.next_ticket, self._request(), pages, whole=tokens is None)
        return self._plan(runner, item)

    def plan_release(self, runner: Runner, lease: LeaseModel, discard: bool = False) -> Item:
        item = Item("release", lease, runner.next_ticket, self._request(), discard=discard)
        lease.release = item
        return self._plan(runner, item)

    def _plan(self, runner: Runner, item: Item) -> Item:
        runner.next_ticket += 1
        item.seen = runner.read  # what it records now comes after the reads so far
        runner.planned.append(item)
        runner.session.items.append(item)
        return item

    def issue(self, runner: Runner) -> Item:
        """Send the oldest command that has a ticket and was not sent."""
        item = runner.planned.pop(0)
        lease, session = LeaseId(item.lease.number), runner.id

        def send() -> None:
            if item.kind == "commit":
                tokens: int | None = item.pages * self.page_size
                have = min(len(item.lease.path), len(item.lease.table))
                if item.whole and item.pages == have:
                    tokens = None
                self.index.commit(session, item.request, lease, item.ticket, seen=item.seen, tokens=tokens)
            else:
                self.index.release(session, item.request, lease, item.ticket, seen=item.seen, discard=item.discard)

        def then(result: SglcacheError | None) -> None:
            assert result is None, f"{item} was refused: {result!r}"
            item.issued = True
            self.asked[item.request] = item
            if item.kind == "release":
                self._takes_no_more(item.lease)
                if item.discard:
                    for other in runner.session.items:
                        if other.lease is item.lease and other.kind == "commit":
                            other.dropped = True
                self.model.leases.pop(item.lease.number)

        self.turn(send, then)
        return item

    def commit(self, runner: Runner, lease: LeaseModel, tokens: int | None = None, *, done: bool = True) -> Item:
        """Plan and send; `done`: and the event on every shard."""
        return self._send(runner, self.plan_commit(runner, lease, tokens), done)

    def release(self, runner: Runner, lease: LeaseModel, *, discard: bool = False, done: bool = True) -> Item:
        return self._send(runner, self.plan_release(runner, lease, discard), done)

    def _send(self, runner: Runner, item: Item, done: bool) -> Item:
        while runner.planned:
            self.issue(runner)
        if done:
            self.events_done(runner)
        return item

    def events_done(self, runner: Runner) -> None:
        """Every event that was planned is done, in order."""
        for item in list(runner.session.items):
            for shard in range(runner.session.shards):
                if shard not in item.done:
                    self.event_done(runner, item, shard)

    def event_done(self, runner: Runner, item: Item, shard: int) -> None:
        """The shard's kernels up to this ticket have run: at the last moment they write what they compute."""
        lease = item.lease
        parts = range(PARTS) if runner.session.shards == 1 else [shard]
        computed, view = runner.computed[lease], runner.views[lease]
        if item.kind == "commit":
            for i in range(computed[shard], item.pages):
                for part in parts:
                    self.memory[DEVICE][part][view[i]] = f"garbage {lease.number}" if lease.broken else lease.path[i]
            computed[shard] = max(computed[shard], item.pages)
        else:
            for i in range(computed[shard], len(view)):  # pages that it never committed: scratch to the end
                if i >= lease.matched:
                    for part in parts:
                        self.memory[DEVICE][part][view[i]] = f"last scribble of lease {lease.number}"
            runner.stopped[lease].add(shard)
        item.done.add(shard)
        self.turn(lambda: self.index.event_done(runner.id, item.ticket, shard), None, need=None)

    def read_replies(self, runner: Runner) -> None:
        """The scheduler reads every answer so far; what it sends from now on says so."""
        runner.read = runner.session.replies

    def copy_done(self, copy: CopyModel, ok: bool = True) -> None:
        """The bytes move, at the last moment, and the ack comes."""
        model = self.model
        for part in range(PARTS):
            for page, source, target in zip(copy.pages, copy.source_slots, copy.target_slots, strict=True):
                there = self.memory[copy.source][part][source]
                assert there is page, f"copy {copy.ticket} of {page} read {there} from slot {source}"
                if ok:
                    self.memory[copy.target][part][target] = page

        def then(_: object) -> None:
            if copy.target == DEVICE:
                model.load_over(copy, ok)
                return
            self.acks.append((copy, ok))
            order = [c for c in model.copies.values() if c.target == HOST]
            while order and (ack := next((a for a in self.acks if a[0] is order[0]), None)):
                self.acks.remove(ack)
                self._distrusted = False
                model.write_through_over(*ack)
                order.pop(0)
                gone = [each for each in self.index.evictions if each.left and set(each.node) <= set(ack[0].pages)]
                model.evicted(DEVICE, gone, None)

        self.turn(lambda: self.index.copy_done(TicketId(copy.ticket), ok), then, need=None)

    def in_flight(self) -> list[CopyModel]:
        """Copies whose ack may come."""
        acked = [copy for copy, _ in self.acks]
        return [copy for copy in self.model.copies.values() if copy not in acked]

    def copies_done(self) -> None:
        """Every copy is done, in order, and what those bring about too."""
        while copies := self.in_flight():
            self.copy_done(copies[0])

    def end_session(self, runner: Runner) -> None:
        self._nothing_more(runner)
        self.turn(lambda: self.index.end_session(runner.id), lambda _: self.model.ended(runner.session))

    def _nothing_more(self, runner: Runner) -> None:
        """What it was about to send is never sent."""
        runner.planned.clear()
        for item in runner.session.items:
            if not item.issued and item.lease.release is item:
                item.lease.release = None
        runner.session.items = [item for item in runner.session.items if item.issued]

    def shard_gone(self, runner: Runner, shard: int) -> None:
        """One of its processes is dead: that ends the session, if nothing has yet."""
        self._nothing_more(runner)
        for stopped in runner.stopped.values():
            stopped.add(shard)

        def then(_: object) -> None:
            self.model.ended(runner.session)
            self.model.reap()  # what was over by its events alone went first
            runner.session.gone.add(shard)
            self.model.reap()  # and what is over by that, before anyone is served who waited for L3

        self.turn(lambda: self.index.shard_gone(runner.id, shard), then)

    def die(self, runner: Runner) -> None:
        """kill -9 of every process of the runner."""
        self.end_session(runner)
        for shard in range(runner.session.shards):
            self.shard_gone(runner, shard)

    def peek(self, tokens: Iterable[int] | bytes, namespace: Namespace = ROOT) -> tuple[int, int]:
        key = tokens if isinstance(tokens, bytes) else pack(tokens)
        before = self._fingerprint()
        result = self.turn(lambda: self.index.peek(key, namespace))
        assert not isinstance(result, SglcacheError)
        assert self._fingerprint()[0] == before[0]  # type: ignore[index]
        want = tuple(pages * self.page_size for pages in self.model.match(self.book.path(namespace, key)))
        assert (result.device_tokens, result.matched_tokens) == want, f"peeked {result}, it is {want}"
        return result.device_tokens, result.matched_tokens

    def pin(
        self, runner: Runner, tokens: Iterable[int] | bytes, namespace: Namespace, owner: str, expires_at: float
    ) -> int:
        key = tokens if isinstance(tokens, bytes) else pack(tokens)
        path = self.book.path(namespace, key)
        on_device, matched = self.model.reach(path)
        on_host = 0
        while on_host < matched and path[on_host] in self.model.slot[HOST]:
            on_host += 1
        held = [(DEVICE, path[:on_device]), (HOST, path[:on_host])]

        mine = sum(pin.session is runner.session for pin in self.model.pins)
        pinned = [
            {page for pin in self.model.pins for tier, path in pin.held if tier == t for page in path} for t in (0, 1)
        ]
        most = [int(total * self.config.max_pinned_fraction) for total in self.model.total]
        wants = [len(pinned[tier].union(path)) for tier, path in held]
        too_much = any(want > most[tier] and want > len(pinned[tier]) for tier, want in enumerate(wants))

        def then(result: int | SglcacheError) -> None:
            assert isinstance(result, Busy) is (mine >= self.config.max_pins), f"{result!r}; it has {mine} pins"
            if isinstance(result, Busy):
                return
            assert isinstance(result, NoSpace) is too_much, f"{result!r}; {wants} pages would be pinned, {most} may be"
            if isinstance(result, NoSpace):
                return
            assert result == matched * self.page_size
            if matched:
                self.model.pin(PinModel(runner.session, owner, held, expires_at))

        result = self.turn(lambda: self.index.pin(runner.id, key, namespace, owner, expires_at), then)
        return 0 if isinstance(result, SglcacheError) else result

    def unpin(self, runner: Runner, owner: str) -> int:
        mine = [pin for pin in self.model.pins if pin.session is runner.session and pin.owner == owner]

        def then(_: object) -> None:
            for pin in mine:
                self.model.unpin(pin)

        result = self.turn(lambda: self.index.unpin(runner.id, owner), then)
        assert isinstance(result, int)
        assert (result > 0) is bool(mine)
        return result

    def expire(self, now: float) -> int:
        over = [pin for pin in self.model.pins_in_order() if pin.expires_at <= now]
        self.time, self._expiring, self._turned_away = now, True, 0
        self._was_first = self.line.first

        def then(_: object) -> None:
            for pin in over:
                self.model.unpin(pin)

        late = sum(asked.until <= now for asked in self.fetching.values())
        result = self.turn(lambda: self.index.expire(now), then, need=None)
        self._expiring = False
        assert result == len(over) + late + self._turned_away
        ends = [pin.expires_at for pin in self.model.pins]
        ends += [asked.until for asked in self.fetching.values()]
        ends += [each.until for each in self.line.everyone] + [waits.copies for waits in self.waiting]
        may_be = self.config.l3 is not None  # what comes back from there goes on to wait in the turn's end
        assert may_be or all(end > now for end in ends), f"something is past its end at {now}: {sorted(ends)}"
        assert self.index.next_expiry == min((end for end in ends if end < float("inf")), default=None)
        return len(over)

    def clear(self, tier: Tier | None = None) -> dict[Tier, int] | SglcacheError:
        model = self.model
        busy = model.all_busy() or (self.index.l3 is not None and self.index.l3.num_busy > 0)

        def then(result: dict[Tier, int] | SglcacheError) -> None:
            assert isinstance(result, Busy) is busy, f"clear with busy={busy}: {result!r}"
            assert all(each.cleared for each in self.index.evictions), "a clear takes nothing to make room"
            if not isinstance(result, SglcacheError) and tier is None:
                assert result == {Tier(t): len(model.slot[t]) for t in range(2 if model.total[HOST] else 1)}
                model.cleared()
                self.clearing = [0, 0]

        if tier is not None and not busy:
            self.clearing[tier] += len(model.slot[tier])
        if tier is None and not busy:
            # Nothing is evicted by it, and everything goes: the model must hear of it before it looks.
            return self._clear_all(then)
        return self.turn(lambda: self.index.clear(tier), then)

    def _clear_all(self, then: Callable[[dict[Tier, int] | SglcacheError], None]) -> dict[Tier, int] | SglcacheError:
        def command() -> dict[Tier, int]:
            result = self.index.clear()
            then(result)
            return result

        return self.turn(command)

    def step(self) -> bool:
        """One slice of what is long."""
        more = self.turn(self.index.step, need=None)
        assert isinstance(more, bool)
        return more

    def steps(self) -> None:
        for _ in range(10_000):
            if not self.step():
                return
        raise AssertionError("step goes on for ever")

    def cut(self, heartbeat: bool = False) -> None:
        """Everything queued goes on the stream; then a mirror must equal the index (law 5)."""

        def command() -> None:
            while True:
                self.now += 1
                if self.index.cut(self.now, heartbeat):
                    return

        waits, batches = self.index.uncut, len(self.subscriber.batches)
        self.turn(command)
        assert not self.index.uncut or self.index.l3 is not None  # where what was named may lead to more
        sent = len(self.subscriber.batches) - batches
        if self.index.l3 is None:  # else what is queued may be no event
            said = self.config.events and (waits or heartbeat)
            assert (sent > 0) is said, f"{sent} batches, {waits=}, {heartbeat=}"
        assert waits or sent <= 1
        self.check_mirror()

    def _request(self) -> int:
        self.next_request += 1
        return self.next_request

    # -- looking ----------------------------------------------------------------------------------------

    def check(self, seen: Seen) -> None:
        """Everything that must hold between two turns."""
        model = self.model
        for tier in (DEVICE, HOST):
            assert seen[tier] == model.slot[tier], (
                f"tier {tier}: the index has {_less(seen[tier], model.slot[tier])} more, "
                f"lacks {_less(model.slot[tier], seen[tier])}"
            )
        late = model.overdue()
        assert not late, f"should have taken effect by now: {late}"
        self._check_waiting()
        self._check_counts()
        if self.tenants:
            self._check_tenants()
        self._check_memory()
        self.index.stamps.check(self.index, self.index.path)
        if self._checks:
            found = invariants.check(self.index)
            assert not found, "\n".join(found)

    def _check_waiting(self) -> None:
        """Who waits first waits for something that will happen: a slice, or the end of a copy of ours."""
        if not self.index.busy and (standing := self.line.first) is not None:
            later = self._room_later()
            if standing.make is not None:
                lease, need = standing.make()
                later = self._room_later(lease.path[: lease.pinned])
            else:
                need = sum(each.fresh for each in standing.growing if each.error is None)
            assert need > max(0, later), f"{standing} waits for {need} pages, and {later} can be had"
        if not self.waiting:
            return
        first, model = self.waiting[0], self.model
        for tenant, _ in first.wants:
            now, before = self._room(tenant, later=True), first.least.get(tenant, (1 << 62, 1 << 62))
            first.least[tenant] = min(now[0], before[0]), min(now[1], before[1])
        if not self.index.busy:
            assert self._writes_back or not self._all_fit_now(first.wants), f"{first} waits, and there is room"
            assert any(copy.target == HOST for copy in model.copies.values()), f"{first} waits for nothing"

    def _check_counts(self) -> None:
        model, stats = self.model, self.index.stats()
        fenced = sum(len(lease.owned) for lease in model.fenced)
        leased = len(model.owner) - fenced
        want = [(len(model.slot[DEVICE]), model.num_locked(DEVICE), leased, fenced, model.num_free(DEVICE))]
        if model.total[HOST]:
            cached = len(model.slot[HOST]) + len(model.writing)
            locked = model.num_locked(HOST) + len(model.writing)
            late = sum(len(op.slots) for op in self.l3.ops.values() if op.cancelled)
            under = len(model.fetched) - late
            want.append((cached, locked, under, len(model.host_fenced) + late, model.num_free(HOST)))
        for pool, counts in zip(stats.pools, want, strict=True):
            assert pool.free + pool.fenced + pool.leased + pool.cached == pool.total
            told = (pool.cached, pool.locked, pool.leased, pool.fenced, pool.free)
            assert told == counts, (
                f"{pool.tier.name}: (cached, locked, leased, fenced, free) are {told}, should be {counts}"
            )
        for tier, names in enumerate(LEFT):
            for name, reason in zip(names, ("evicted", "kept", "cleared"), strict=True):
                counted = stats.counters[name], model.left[tier, reason]
                assert counted[0] == counted[1], f"{name} is {counted[0]}, should be {counted[1]}"
            made_room = model.left[tier, "evicted"] + model.left[tier, "kept"]
            for ages in (self.index.lifetimes, self.index.idle_times) if stats.pools[tier:] else ():
                assert sum(ages[tier].counts) == made_room, "the age of each page that makes room is counted once"
        leases = sum(len(session.leases) for session in model.sessions.values())
        assert (stats.num_leases, stats.num_fenced_leases) == (leases, len(model.fenced))
        below = self.index.l3
        assert stats.num_copies == len(model.copies) + (below.num_busy if below is not None else 0)
        assert stats.num_waiting == len(self.waiting) + len(self.line) + len(self.fetching)
        assert len(self.index.line) == len(self.line)

    def _check_tenants(self) -> None:
        """Who pays for what, and that nobody is above its ceiling."""
        model, index = self.model, self.index
        assert index.tenants is not None
        paid: tuple[dict[Page, int], dict[Page, int]] = ({}, {})
        for node in index.tree.nodes():
            pages = index.path(node)[-(node.num_bytes // index.page_bytes) :]
            for tier, place in enumerate(index.tenants.place):
                if node.cells[tier] is not None:
                    paid[tier].update(dict.fromkeys(pages, node.cells[place]))
        for tier in (DEVICE, HOST):
            assert paid[tier] == model.payer[tier], (
                f"tier {tier}: who pays is {paid[tier].items() - model.payer[tier].items()}, "
                f"should be {model.payer[tier].items() - paid[tier].items()}"
            )
        model.check_ceilings()
        if not index.busy:
            leaving = model.leaving
            assert index.leaving() == leaving, f"{index.leaving()} leave the device, should be {leaving}"
            for tier, number in model.most:
                ceiling = model.limits[number][tier][1]
                gone = sum(model.payer[tier][page] == number for page in leaving) if tier == DEVICE else 0
                free = [page for page in model.evictable(tier) if model.payer[tier][page] == number]
                assert ceiling is None or not free or model.charged(tier, number) - gone <= ceiling, (
                    f"tenant {number} is above its ceiling of {ceiling} in tier {tier}, and nobody holds {free}"
                )
        for told in index.stats().tenants:
            number, tier = self.tenants.index(told.tenant), int(told.tier)
            assert (told.floor, told.ceiling) == model.limits[number][tier]
            charged = model.charged(tier, number)
            assert told.charged == charged, f"{told}; it pays for {charged} pages"
            locked = sum(
                payer == number and (page in model.holds[tier] or (tier == HOST and page in model.writing))
                for page, payer in model.payer[tier].items()
            )
            assert told.locked == locked, f"{told}; {locked} of its pages are locked"

    def _check_memory(self) -> None:
        """Whatever is cached holds its bytes, and so does whatever a runner may still read (laws 8 and 10)."""
        for tier in (DEVICE, HOST):
            for page, slot in self.model.slot[tier].items():
                for part in range(PARTS):
                    there = self.memory[tier][part][slot]
                    assert there is page, f"tier {tier} slot {slot} part {part}: {there} where {page} is cached"
        for runner in self.runners.values():
            for lease in runner.session.leases:
                if lease.waiting:
                    continue
                for shard in range(runner.session.shards):
                    if shard in runner.stopped[lease]:
                        continue
                    parts = range(PARTS) if runner.session.shards == 1 else [shard]
                    for part in parts:
                        self._check_reads(runner, lease, shard, self.memory[DEVICE][part])

    def _check_reads(self, runner: Runner, lease: LeaseModel, shard: int, memory: list[object]) -> None:
        for i, slot in enumerate(lease.table[: runner.computed[lease][shard]]):
            if i >= lease.pinned and (lease.broken or (lease.load is not None and i < lease.matched)):
                break  # nothing there to be read yet, or at all
            there = memory[slot]
            assert there is lease.path[i], f"lease {lease.number} reads {lease.path[i]} from {slot}: {there}"
        for duplicate in lease.duplicates:
            there = memory[duplicate.slot]
            assert there is duplicate.page, (
                f"lease {lease.number} still reads {duplicate.page} from its duplicate {duplicate.slot}: {there}"
            )

    def check_mirror(self) -> None:
        """A mirror built from the stream is the index, per tier; each change was told once; so is `walk`'s dump."""
        if not self.config.events:
            return
        model, subscriber = self.model, self.subscriber
        dumped: dict[int, set[Page]] = {DEVICE: set(), HOST: set(), Tier.DISK: set()}
        for nodes in self.index.walk(3):
            for node in nodes:
                size = self.index.hasher.size
                before = node.parent_digest
                for i in range(len(node.digests) // size):
                    page = self.book.by_digest[node.digests[i * size : (i + 1) * size]]
                    assert page.tokens == node.tokens[i * len(page.tokens) : (i + 1) * len(page.tokens)]
                    assert page.namespace == tuple(node.namespace)
                    assert (None if page.parent is None else page.parent.digest) == before
                    before = page.digest
                    for number in map(int, node.tiers):
                        assert page.parent is None or page.parent in dumped[number], "a child came before its parent"
                        dumped[number].add(page)
        assert subscriber.clears == model.clears + 1
        for tier in (DEVICE, HOST):
            published = {page for page in model.slot[tier] if page.namespace[1] is None}
            mirror = subscriber.present[tier]
            assert mirror == published, (
                f"tier {tier}: the mirror has {mirror - published} more, lacks {published - mirror}"
            )
            assert dumped[tier] == published, f"tier {tier}: the dump has {dumped[tier] ^ published} too many or few"
        l3 = self.config.l3
        if l3 is not None and l3.exact and not self.index.announcing and not self.index.l3.behind:  # type: ignore[union-attr]
            on_disk = {page for page in self.l3.pages if page.namespace[1] is None} if l3.tell else set()
            mirror = subscriber.present[Tier.DISK]
            assert mirror == on_disk, f"DISK: the mirror has {mirror - on_disk} more, lacks {on_disk - mirror}"
            assert dumped[Tier.DISK] == on_disk, f"DISK: the dump has {dumped[Tier.DISK] ^ on_disk} too many or few"
        for page, told in subscriber.stored_for.items():
            assert told == model.stored_for[page], f"{page} was stored for {told}, should be {model.stored_for[page]}"
        changes = {key: count for key, count in model.changes.items() if key[1].namespace[1] is None and count}
        said = {key: count for key, count in subscriber.said.items() if count and key[0] <= HOST}
        assert changes == said, "a change was told twice or not at all"

    def _quieten(self) -> None:
        """Until nothing is under way."""
        self.steps()
        self.cut()
        while self.in_flight() or self.l3.ops or self.index.uncut or self.more:
            self.copies_done()
            self.all_l3_done()
            self.steps()
            self.cut()

    def settle(self) -> None:
        """Everything under way comes to its end; then nothing is held by anyone."""
        self.steps()
        self._quieten()
        self.expire(self.time)
        while self.waiting:
            assert self.in_flight(), f"{self.waiting} wait, and no copy is under way"
            self.copies_done()
            self.steps()
        assert not self.fetching, f"{self.fetching} wait for L3, and nothing is asked of it"
        for runner in list(self.runners.values()):
            if not runner.session.ended:
                for lease in list(runner.session.leases):
                    if lease.release is None and lease.cancelling is None:
                        self.plan_release(runner, lease)
                while runner.planned:
                    self.issue(runner)
                self.copies_done()
                self.events_done(runner)
        self.copies_done()
        for runner in list(self.runners.values()):
            if runner.session.ended:
                for shard in range(runner.session.shards):
                    self.shard_gone(runner, shard)
            else:
                assert not runner.session.leases
        for pin in list(self.model.pins):
            if pin in self.model.pins:
                self.unpin(self.runners[pin.session.number], pin.owner)
        self._quieten()
        if self.waits and any(runner.session.leases for runner in self.runners.values()):
            self.settle()  # who stood in line was served
            return
        assert not len(self.line), f"nothing is held, and yet {self.line.first} waits"
        assert not self.index.backups.num_skipped or self.tenants, (
            "nothing is held, and yet what found no room on the host was not sent"
        )
        unanswered = [*self.waiting, *self.asked, *self.cancels]
        assert not unanswered, f"these were not answered: {unanswered}"
        for pool in self.index.stats().pools:
            assert (pool.locked, pool.leased, pool.fenced) == (0, 0, 0), f"something is held by nobody: {pool}"
            assert pool.free + pool.cached == pool.total


def _waited_in_vain(waits: Waits, result: object) -> bool:
    """Something of it that could be had was refused."""
    if isinstance(result, Extended):
        answers = zip(waits.growing, result.results, strict=True)
        return any(each.error is None and not isinstance(answer, bytes) for each, answer in answers)
    return isinstance(result, SglcacheError)


def _copies(patience: Patience | None) -> float:
    return float("inf") if patience is None else patience.copies


def _less(a: dict[Page, int], b: dict[Page, int]) -> dict[Page, int]:
    return {page: slot for page, slot in a.items() if b.get(page) != slot}


def observe(index: Index, book: Book) -> Seen:
    """The pages that are ready in each tier, and their slots. The only look behind the index's face.

    `walk` is not enough: it tells nothing with events off, nothing of what is not published, and no slots.
    """
    seen: Seen = ({}, {})
    last: dict[object, Page] = {}  # node -> its last page
    for node in index.tree.nodes():
        pages = book.path(node.space.namespace, node.key, last.get(node.parent))
        last[node] = pages[-1]
        for tier in range(len(index.pools)):
            if node.cells[tier] is None or node.writing >> tier & 1:
                continue
            slots = unpack_slots(node.cells[tier])
            assert len(slots) == len(pages), f"{node!r} has {len(slots)} slots for {len(pages)} pages"
            for page, slot in zip(pages, slots, strict=True):
                assert page not in seen[tier], f"{page} is in two nodes"
                seen[tier][page] = slot
    return seen
