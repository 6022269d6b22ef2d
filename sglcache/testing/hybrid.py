"""Indexes whose layers keep a full KV, a window of it, or one state: a flat model, an oracle of matching, and memory.

What pages and states are called is said in `hybrid_model`, and a slot's content is such a name: so a hit is right if
and only if each slot of it holds the name that it should. What is present in each (resource, tier) is looked at after
every command, expanded to pages; what came must have come by a commit or a copy, with the very slot that the model
says; what is held must have stayed. What a match is, is worked out page by page from what is present, and is compared
with every peek and acquire.

`Hybrid` is one index and its world. Every method of it is one turn of a server's loop, and ends with `check`. Runners
do what a correct runner may: they scribble over what is theirs as soon as they have it and until they are dead, write
the right names at the last moment, and read what they may read until the last moment, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from sglcache.core import invariants
from sglcache.core.effects import Committed, Copy, Effect, Extended, Grant, Journal, Publish, Released, Share, Wake
from sglcache.core.index import Index, IndexConfig
from sglcache.core.key import ROOT, Namespace
from sglcache.errors import BadRequest, Busy, Changed, NoSpace, SglcacheError, TransferError
from sglcache.testing.hybrid_model import (
    DEVICE,
    FULL,
    HOST,
    Copying,
    Duplicate,
    End,
    Growing,
    Kind,
    Known,
    Lease,
    Moved,
    Oracle,
    Pinned,
    Places,
    Reached,
    Runner,
    Seen,
    Sent,
    Waits,
    look,
    pack,
    unpack,
)
from sglcache.testing.pages import TOKEN_BYTES, Book, Page, ancestry
from sglcache.testing.still import is_still
from sglcache.testing.subscriber import Subscriber
from sglcache.units import LeaseId, SessionId, TicketId, Tier
from sglcache.wire.control import Extension

T = TypeVar("T")


class Hybrid:
    """One index under test. `config` as IndexConfig's fields."""

    def __init__(self, *, proof: bool = True, book: Book | None = None, **config: Any) -> None:
        self.config = IndexConfig(**config)
        self.proof = proof
        self.page_size = self.config.page_size
        self.book = book or Book(self.page_size, self.config.hash_name, self.config.bigram)
        self.index = Index(self.config)
        self.num_tiers = 2 if self.config.host_pages else 1
        self.kinds = [Kind("full", False, 0, (self.config.num_pages, self.config.host_pages))]
        for each in self.config.companions:
            resource = each.resource
            window = 0 if resource.by_end else resource.reach
            self.kinds.append(Kind(resource.name, resource.by_end, window, (each.num_slots, each.host_slots)))
        self.companions = range(1, len(self.kinds))
        self.by_end = [r for r in self.companions if self.kinds[r].by_end]
        self.by_page = [r for r in range(len(self.kinds)) if not self.kinds[r].by_end]
        self.cells = [(r, t) for r in range(len(self.kinds)) for t in range(self.num_tiers)]
        self.memory: list[list[object]] = [["never written"] * self.kinds[r].total[t] for r, t in self.cells]
        self.oracle = Oracle(self.kinds, self.num_tiers)
        self.subscriber = Subscriber(
            self.book,
            page_size=self.page_size,
            first_seq=self.config.first_seq,
            rank=self.config.rank,
            max_batch_blocks=self.config.max_batch_blocks,
        )
        self.runners: dict[int, Runner] = {}
        self.copies: dict[int, Copying] = {}  # in the order they were asked for
        self.waiting: list[Waits] = []
        self.asked: dict[int, Sent] = {}
        self.cancels: dict[int, Lease] = {}
        self.next_request = 1
        self.now = 0.0
        self.failed = False
        self.num_hits: dict[str, int] = {}  # what programs got to, so that a test can tell that they got anywhere
        self._known: Known = {}
        ready = self.config.host_ready
        self.host_ready = self.config.host_pages if ready is None else ready
        self.born()
        self.seen = look(self.index, self.book, self.kinds, self.num_tiers, self._known)
        self._print: object = None
        self.revision: object = None
        self.turn(lambda: None)

    def born(self) -> None:
        """The index is there, and has had no command. For those whose index begins with something."""

    def noted(self, effect: Journal) -> None:
        """The journal is to note this. For those who have one."""
        raise AssertionError(f"nobody asked for a journal: {effect}")

    def cell(self, r: int, tier: int) -> int:
        return r * self.num_tiers + tier

    def note(self, what: str, count: int = 1) -> None:
        self.num_hits[what] = self.num_hits.get(what, 0) + count

    # -- one turn -----------------------------------------------------------------------------------------------------

    def turn(
        self, command: Callable[[], T], then: Callable[[T | SglcacheError], None] | None = None
    ) -> T | SglcacheError:
        """Run a command, and look at everything."""
        try:
            result: T | SglcacheError
            self.index.now += 1
            try:
                result = command()
            except SglcacheError as exc:
                result = exc
                assert self._fingerprint() == self._print, f"{result!r} changed something"
            effects = self._drain()
            revision, self.revision = self.revision, self.index.revision
            self.before, self.seen = self.seen, look(self.index, self.book, self.kinds, self.num_tiers, self._known)
            if self.before != self.seen:
                assert revision != self.revision, "the books have changed, `revision` has not"
            # By cell: what may have come in this turn, and with which slot.
            self.coming: list[Places] = [{} for _ in self.cells]
            self.ended_something = False  # a lease is over, and what it alone held may have gone
            if then is not None:
                then(result)
            for effect in effects:
                assert isinstance(effect, Copy | Wake), f"{effect!r}"
                if isinstance(effect, Wake):
                    self._woken(effect)
            for effect in effects:  # a load leaves before the answer that says what is loaded
                if isinstance(effect, Copy):
                    self._asked(effect)
            self._settle_sessions()
            self.check()
            self._print = self._fingerprint()
        except AssertionError:
            self.failed = True
            raise
        return result

    def _fingerprint(self) -> object:
        index = self.index
        pools = [(pool.free, pool.fenced, pool.leased, pool.cached, pool.locked) for pool in index.pools]
        return index.version, index.next_seq, pools, len(index.leases), len(index.writes), len(index.loads)

    def _drain(self) -> list[Effect]:
        effects: list[Effect] = []
        still = is_still(self.index)
        while True:
            self.now += 1
            for effect in self.index.drain(self.now):
                assert not still, f"still, and yet {effect} left"
                if isinstance(effect, Publish):
                    self.subscriber.apply(effect)
                elif isinstance(effect, Journal):
                    self.noted(effect)
                else:
                    effects.append(effect)
            if not self.index.held:
                return effects
            self.index.cut(self.now)

    # -- answers ------------------------------------------------------------------------------------------------------

    def _taken(self, lease: Lease, r: int, slots: Iterable[int]) -> None:
        """A lease gets slots: they were nobody's."""
        c = self.cell(r, DEVICE)
        held = set(self.seen.ready[c].values())
        for other in self._leases():
            held |= other.own[r]
        for slot in slots:
            assert 0 <= slot < self.kinds[r].total[DEVICE], f"slot {slot} is none"
            assert slot not in held, f"{self.kinds[r].name} slot {slot} was handed to {lease} and is somebody's"
            held.add(slot)
            lease.own[r].add(slot)
            self.memory[c][slot] = f"scribble of lease {lease.number}"

    def _leases(self) -> Iterator[Lease]:
        for runner in self.runners.values():
            for lease in runner.leases:
                if not lease.waiting:
                    yield lease

    def _granted(self, lease: Lease, grant: Grant) -> None:
        size, n, seen = self.page_size, lease.matched, self.seen
        assert grant.matched_tokens == n * size, f"{grant.matched_tokens} tokens matched, should be {n * size}"
        assert grant.reaches == lease.reaches, f"reaches {grant.reaches}, should be {lease.reaches}"
        lease.number, lease.waiting = grant.lease, False
        lease.committed = lease.told = lease.on_device
        count = len(self.kinds)
        lease.views = [{} for _ in range(count)]
        lease.filled = [set() for _ in range(count)]
        lease.first = [0] * count
        lease.states = [[] for _ in range(count)]
        lease.sources = [None] * count
        lease.own = [set() for _ in range(count)]
        lease.loading = [{} for _ in range(count)]
        shares = [Share("full", 0, grant.slots), *grant.shares]
        assert len(shares) == count
        lease.num_pages = len(grant.slots) // 4
        for r, share in enumerate(shares):
            kind, c = self.kinds[r], self.cell(r, DEVICE)
            slots = unpack(share.slots)
            assert share.resource == kind.name
            if kind.by_end:
                assert share.first == 0
                fresh = list(slots)
                lease.states[r] = list(slots)
                lease.sources[r] = share.source
                assert (share.source is None) is (n == 0), f"{kind.name}: source {share.source} of a match of {n} pages"
                if share.source is not None:
                    page = lease.path[n - 1]
                    if page in lease.there[r]:
                        place = seen.ready[c].get(page)
                        assert share.source == place, f"the state lies in {place}, told is {share.source}"
                    else:
                        lease.loading[r][n - 1] = share.source
                        fresh.append(share.source)
            else:
                assert share.source is None
                first = 0 if r == FULL else n - min(kind.window, n)
                assert share.first == first, f"{kind.name}: first page {share.first}, should be {first}"
                assert len(slots) == lease.num_pages - first, f"{len(slots)} slots for pages {first}..{lease.num_pages}"
                lease.first[r] = first
                lease.views[r] = dict(zip(range(first, lease.num_pages), slots, strict=True))
                lease.filled[r] = set(range(first, n))
                fresh = []
                for i, slot in lease.views[r].items():
                    if i < n and lease.path[i] in lease.there[r]:
                        place = seen.ready[c].get(lease.path[i])
                        assert slot == place, f"{kind.name}: {lease.path[i]} lies in {place}, told is {slot}"
                    else:
                        fresh.append(slot)
                        if i < n:
                            lease.loading[r][i] = slot
            assert len(fresh) == lease.need[r], f"{kind.name}: {len(fresh)} own slots, {lease.need[r]} are needed"
            self._taken(lease, r, fresh)
        loads = any(lease.loading)
        from_host = 0 if not loads else n - (lease.from_device if self.companions else lease.on_device)
        assert grant.host_tokens == from_host * size, f"{grant.host_tokens} tokens from the host, are {from_host} pages"
        assert (grant.load is None) is not loads, f"load {grant.load}, to be loaded is {lease.loading}"
        lease.load = grant.load
        lease.computed = n
        self.note("loads", loads)
        self.note("hits", n > 0)
        if n and len(self.kinds) > 1:
            self.note("companion hits")

    def _woken(self, wake: Wake) -> None:
        runner, result = self.runners[wake.session], wake.result
        waits = next((each for each in self.waiting if each.request == wake.request), None)
        if waits is not None:
            self.waiting.remove(waits)
            lease = waits.lease
            if lease is None:
                if isinstance(result, Extended):
                    self._extended(waits, result)
                else:
                    assert runner.ended, f"{result!r}"
                    for each in waits.items:
                        each.lease.extending = None
            elif isinstance(result, Grant):
                self._look_again(lease)
                self._granted(lease, result)
            else:
                assert runner.ended or isinstance(result, NoSpace), f"{result!r}"
                if not runner.ended:
                    self._check_refusal(
                        result, lease.need, [self._room(r, self.before) for r in range(len(self.kinds))]
                    )
                runner.leases.remove(lease)
            return
        cancelled = self.cancels.pop(wake.request, None)
        if cancelled is not None:
            if isinstance(result, Released):
                assert not cancelled.load, f"{cancelled} is said to be given back while it is loaded"
                self._over(cancelled)
            else:
                assert runner.ended, f"{result!r}"
            return
        item = self.asked.pop(wake.request, None)
        assert item is not None, f"an answer to request {wake.request}, which waits for none: {result!r}"
        if runner.ended:
            assert isinstance(result, SglcacheError), f"{result!r}"
            return
        self._settle(runner)
        if isinstance(result, Committed):
            self._may_apply(item)
            self._committed(item, result)
            self._applied(item)
        elif isinstance(result, Released):
            assert item.release
            self._may_apply(item)
            self._over(item.lease)
            self._applied(item)
        elif item.dropped:
            assert isinstance(result, Changed), f"{result!r}"
        else:
            assert isinstance(result, TransferError), f"{item} was answered {result!r}"
            assert item.lease.broken
            self._may_apply(item)
            self._applied(item)

    def _look_again(self, lease: Lease) -> None:
        """Others have committed while it waited: what its locked nodes have got on the device is there now."""
        for r in self.companions:
            ready = self.seen.ready[self.cell(r, DEVICE)]
            came = {page for page in self._wanted(r, lease.path, lease.matched) if page in ready} - lease.there[r]
            if self.kinds[r].by_end:
                came = came if lease.on_device == lease.matched else set()
            else:
                came &= set(lease.path[: lease.on_device])
            lease.there[r] |= came
            lease.need[r] -= len(came)

    def _wanted(self, r: int, path: tuple[Page, ...], n: int) -> tuple[Page, ...]:
        """What a match of n pages needs of a companion."""
        kind = self.kinds[r]
        return path[n - min(n, 1 if kind.by_end else kind.window) : n]

    def _may_apply(self, item: Sent) -> None:
        runner, lease = item.lease.runner, item.lease
        assert item.issued, f"{item} took effect before it was sent"
        assert not item.dropped, f"{item} was discarded and took effect"
        assert len(item.done) == runner.shards, f"{item} took effect before its events"
        assert lease.load is None, f"{item} took effect while the load of its lease is on its way"
        assert runner.items[0] is item, f"{item} took effect before {runner.items[0]}"

    def _applied(self, item: Sent) -> None:
        runner = item.lease.runner
        runner.items.remove(item)
        for lease in runner.leases:
            for duplicate, reply in list(lease.duplicates.items()):
                if 0 < reply <= item.seen:
                    del lease.duplicates[duplicate]
                    lease.own[duplicate.resource].remove(duplicate.slot)

    def _settle(self, runner: Runner) -> None:
        """A discarded commit is over, and nothing else, when its turn comes."""
        items = runner.items
        while items and items[0].dropped and len(items[0].done) == runner.shards:
            self._applied(items[0])

    def _settle_sessions(self) -> None:
        for runner in self.runners.values():
            if not runner.ended:
                self._settle(runner)
                if runner.items:
                    item = runner.items[0]
                    due = item.issued and len(item.done) == runner.shards and item.lease.load is None
                    assert not due, f"{item} should have taken effect"
                continue
            for lease in list(runner.leases):
                over = len(runner.gone) == runner.shards
                if lease.release is not None and lease.release.issued:
                    over |= len(lease.release.done | runner.gone) == runner.shards
                if over and lease.load is None:
                    self._over(lease)

    def _over(self, lease: Lease) -> None:
        """Everything is given back."""
        lease.over = self.ended_something = True
        lease.duplicates.clear()
        for own in lease.own:
            own.clear()
        lease.runner.leases.remove(lease)

    def _place(self, r: int, page: Page) -> int | None:
        """Where the device has it, or had it in this turn."""
        c = self.cell(r, DEVICE)
        return self.coming[c].get(page, self.before.ready[c].get(page))

    def _give(self, lease: Lease, r: int, page: Page, slot: int) -> bool:
        """The tree is given a slot of the lease's own, and keeps it if it has none; whether it did."""
        c = self.cell(r, DEVICE)
        assert slot in lease.own[r], f"{self.kinds[r].name} slot {slot} is not {lease}'s own"
        if self._place(r, page) is not None and self.seen.ready[c].get(page) != slot:
            return False
        self.coming[c][page] = slot
        lease.own[r].remove(slot)
        return True

    def _committed(self, item: Sent, result: Committed) -> None:
        lease, runner, size = item.lease, item.lease.runner, self.page_size
        assert not lease.broken
        runner.replies += 1
        assert result.reply == runner.replies
        before, end = lease.committed, max(lease.committed, item.pages)
        assert result.committed_tokens == end * size, f"{item}: {result.committed_tokens} tokens are committed"
        assert len(result.shares) == len(self.kinds) - 1
        floor = 0 if item.floor is None else item.floor // size
        lost = sum(reply == 0 and each.resource == FULL for each, reply in lease.duplicates.items())
        for duplicate, reply in list(lease.duplicates.items()):
            if not reply:
                lease.duplicates[duplicate] = result.reply
        for r in self.by_page:
            view = lease.views[r]
            for i in range(max(before, lease.first[r]), lease.num_pages):
                slot = view[i]
                if r != FULL and i < floor:
                    lease.own[r].remove(slot)  # given up, whatever the tree has
                    continue
                if i >= end:
                    break
                page = lease.path[i]
                if not self._give(lease, r, page, slot):
                    lease.duplicates[Duplicate(r, slot, page)] = result.reply
                    lost += r == FULL
            self._renamed(lease, r, end, floor, result)
        assert result.num_duplicates == lost, f"{result.num_duplicates} duplicates were told, there are {lost}"
        for r in self.by_end:
            self._put_ends(item, r, unpack(result.shares[r - 1].slots))
        lease.committed = end
        lease.told = end
        for r in self.by_end:
            share = result.shares[r - 1]
            assert share.resource == self.kinds[r].name
            assert sorted(unpack(share.slots)) == sorted(lease.states[r]), (
                f"{self.kinds[r].name}: own slots {unpack(share.slots)} are left, should be {lease.states[r]}"
            )
            assert share.source is None, f"source {share.source} after a commit"
            source, lease.sources[r] = lease.sources[r], None
            if source is not None:
                lease.own[r].discard(source)  # that of a load for which the tree had another

    def _put_ends(self, item: Sent, r: int, left: list[int]) -> None:
        """The states of a commit; `left`: what is told to be the lease's still."""
        lease, c = item.lease, self.cell(r, DEVICE)
        ends = [(lease.path[pages - 1], slot) for which, pages, slot in item.ends if which == r]
        for page, slot in ends:
            if not self._thinned(r):
                taken = self._give(lease, r, page, slot)
            elif taken := slot not in left:
                # One end may have made place for another, and of the same page the next one comes again.
                lease.own[r].remove(slot)
                if page not in self.coming[c] or self.seen.ready[c].get(page) == slot:
                    self.coming[c][page] = slot
            if taken:
                lease.states[r].remove(slot)
                self.note("states committed")

    def _thinned(self, r: int) -> bool:
        return r in self.by_end and self.config.companions[r - 1].resource.max_per_path > 0

    def _renamed(self, lease: Lease, r: int, end: int, floor: int, result: Committed) -> None:
        """The view is what the answer says, and that is where the pages are."""
        kind, view = self.kinds[r], lease.views[r]
        if r == FULL:
            first, slots = result.first_page, unpack(result.slots)
            assert first == lease.told, f"the answer begins with page {first}, the runner knows {lease.told}"
            stop = end
        else:
            share = result.shares[r - 1]
            assert share.resource == kind.name
            assert share.source is None
            first, slots = share.first, unpack(share.slots)
            least = max(lease.first[r], end - kind.window, min(floor, lease.num_pages))
            assert first == least, f"{kind.name}: first page {first}, should be {least}"
            stop = lease.num_pages
            for i in [i for i in view if i < first]:
                del view[i]
                lease.filled[r].discard(i)
            lease.first[r] = first
        if slots:
            assert len(slots) == stop - first, f"{kind.name}: {len(slots)} slots for pages {first}..{stop}"
            view.update(zip(range(first, stop), slots, strict=True))
        for i in range(min(first, end), end):
            place = self._place(r, lease.path[i])
            assert view[i] == place, f"{kind.name}: {lease.path[i]} lies in {place}, the runner was told {view[i]}"
        for i in range(max(first, end), stop):
            assert view[i] in lease.own[r], f"{kind.name}: page {i} is to be in {view[i]}, which is not the lease's"

    def _extended(self, waits: Waits, result: Extended) -> None:
        granted: list[Lease] = []
        every = result.shares if self.companions else [()] * len(waits.items)
        for each, slots, shares in zip(waits.items, result.results, every, strict=True):
            lease = each.lease
            if lease.extending is waits:
                lease.extending = None
            if isinstance(slots, SglcacheError):
                assert shares == ()
                continue
            assert lease not in granted
            granted.append(lease)
            lease.tokens += each.tokens
            lease.path = self.book.path(lease.namespace, lease.tokens)
            came = [unpack(slots), *(unpack(share) for share in shares)]
            assert [len(one) for one in came] == each.need, f"{came} are new, {each.need} are needed"
            for r, one in enumerate(came):
                self._taken(lease, r, one)
                if self.kinds[r].by_end:
                    lease.states[r] += one
                else:
                    lease.views[r].update(zip(range(lease.num_pages, lease.num_pages + len(one)), one, strict=True))
            lease.num_pages += len(came[FULL])
            lease.need = each.need
            self.note("extended")

    def _asked(self, copy: Copy) -> None:
        """A copy is to be made, and may begin: its sources hold their names, nobody uses its targets."""
        parts = []
        to_host = copy.dst == Tier.HOST
        source_tier, target_tier = (DEVICE, HOST) if to_host else (HOST, DEVICE)
        assert (copy.src, copy.dst) == (Tier(source_tier), Tier(target_tier))
        assert copy.resource == self.kinds[FULL].name
        given = [(copy.resource, copy.src_slots, copy.dst_slots), *copy.more]
        names = [kind.name for kind in self.kinds]
        for name, src, dst in given:
            r = names.index(name)
            source, target = unpack(src), unpack(dst)
            assert len(source) == len(target) == len(set(source)) == len(set(target)), f"{copy}"
            from_cell = self.cell(r, source_tier)
            pages = []
            for slot in source:
                page = self.memory[from_cell][slot]
                assert isinstance(page, Page), f"{name} slot {slot} is to be copied, and holds {page}"
                assert self.seen.ready[from_cell].get(page) == slot, f"{page} is to be copied from {slot}; not there"
                pages.append(page)
            parts.append(Moved(r, tuple(pages), source, target))
        assert len({part.resource for part in parts}) == len(parts)
        assert any(part.names for part in parts), "a copy of nothing"
        lease = None
        if to_host:
            assert copy.lease is None
            for part in parts:
                c = self.cell(part.resource, HOST)
                for page, slot in zip(part.names, part.target, strict=True):
                    assert self.seen.writing[c].get(page) == slot, f"{page} is on its way to {slot}, and is not there"
            self.note("companions written", sum(len(part.names) for part in parts[1:]))
        else:
            lease = next(each for each in self._leases() if each.number == copy.lease)
            assert lease.load == copy.ticket
            for r, wanted in enumerate(lease.loading):
                moved = next((part for part in parts if part.resource == r), Moved(r, (), [], []))
                want = {lease.path[i]: slot for i, slot in wanted.items()}
                have = dict(zip(moved.names, moved.target, strict=True))
                assert have == want, f"{self.kinds[r].name}: {have} is loaded, should be {want}"
            self.note("companions loaded", sum(len(part.names) for part in parts[1:]))
        for part in parts:
            for slot in part.target:
                self.memory[self.cell(part.resource, target_tier)][slot] = f"half of copy {copy.ticket}"
        assert copy.ticket not in self.copies
        self.copies[copy.ticket] = Copying(copy.ticket, to_host, parts, lease)

    # -- commands -----------------------------------------------------------------------------------------------------

    def open_session(self, shards: int = 1) -> Runner:
        number = self.turn(lambda: self.index.open_session(shards))
        assert isinstance(number, int)
        runner = self.runners[number] = Runner(SessionId(number), shards)
        return runner

    def _request(self) -> int:
        self.next_request += 1
        return self.next_request

    def reached(self, path: Sequence[Page], now: bool = True) -> Reached:
        """What a match would find, and is worth loading. `now`: with the loads that are under way."""
        reached, config = self.oracle.reach(self.seen, path), self.config
        pages = reached.matched - reached.device
        loading = sum(len(lease.loading[FULL]) for lease in self._leases() if lease.load is not None)
        few = pages * self.page_size < config.load_back_threshold
        many = now and 0 < config.load_back_quota < pages + loading
        return reached._replace(matched=reached.device) if pages and (few or many) else reached

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
        priority: int = 0,
        states: int = 0,
    ) -> Lease | SglcacheError | None:
        """The lease; an error; or None while it waits."""
        key = tokens if isinstance(tokens, bytes) else pack(tokens)
        path = self.book.path(namespace, key)
        request = self._request()
        end = limit if exact is None else exact
        most = len(path) if end is None else min(len(path), end // self.page_size)
        reached = self.reached(path[:most])
        for n in (reached.matched, 0):
            have = len(key) // TOKEN_BYTES + reserve
            if room is not None:
                have = min(have, n * self.page_size + room)
            total = max(-(-have // self.page_size), n)
            need, there = [], []
            for r, kind in enumerate(self.kinds):
                wanted = path[:n] if r == FULL else self._wanted(r, path, n)
                ready = self.seen.ready[self.cell(r, DEVICE)]
                on_device = {page for page in wanted if page in ready}
                if r == FULL:
                    on_device = set(path[: min(reached.on_device, n)])
                there.append(on_device)
                need.append(len(wanted) - len(on_device) + (states if kind.by_end else total - n))
            fits = all(need[r] + len(there[r]) <= self.kinds[r].total[DEVICE] for r in self.companions)
            if fits or exact is not None:
                break
            reached = reached._replace(device=0)
            self.note("hits that leave no room")
        reaches = tuple(each * self.page_size for each in reached.reaches)
        lease = Lease(runner, namespace, key, path, n, len(there[FULL]), need, there, reaches, reached.device)
        room_now = [self._room(r, self.seen, there[r]) for r in range(len(self.kinds))]
        spare = [states if self.kinds[r].by_end else 0 for r in self.companions]
        later = [self._room_later(r, there[r]) for r in range(len(self.kinds))]

        def then(result: Grant | SglcacheError | None) -> None:
            agreed = exact is None or exact == n * self.page_size
            assert isinstance(result, Changed) is not agreed, f"{result!r}; {n} pages match, {exact=} tokens"
            if isinstance(result, Changed):
                assert result.matched_tokens == n * self.page_size
                return
            if isinstance(result, SglcacheError):
                self._check_refusal(result, need, room_now)
                return
            if result is not None:
                self._check_victims(need)
            runner.leases.append(lease)
            if result is None:
                assert self._fits(need, later), f"it waits for {need}, and at most {later} can be had"
                lease.waiting = True
                self.waiting.append(Waits(request, lease))
                self.note("waits")
                return
            assert not (self.waiting and any(need)), "it overtook those who wait"
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
                priority=priority,
                spare=spare,
                tenant=("a", "b", None)[request % 3],  # of whom nothing is said here: they have no limits, if any
            ),
            then,
        )
        return lease if isinstance(result, Grant) else result

    def _room(self, r: int, seen: Seen, keep: Iterable[Page] = ()) -> int:
        """Slots that can be had at least, once those pages are held, with the whole nodes that they are in."""
        c = self.cell(r, DEVICE)
        held, kept = self.held_slots(r), set(keep)
        free = self.kinds[r].total[DEVICE] - len(seen.ready[c]) - held
        unlocked = seen.unlocked(c)
        if kept:
            for node in seen.nodes:
                if kept.intersection(node.pages):
                    unlocked = unlocked.difference(node.pages)
        promised = sum(self._promised(waits)[r] for waits in self.waiting)
        return free + len(unlocked) - promised

    def _room_later(self, r: int, keep: Iterable[Page] = ()) -> int:
        """Slots that can be had at most once those pages are held, and the copies to the host are over."""
        c = self.cell(r, DEVICE)
        ready = self.seen.ready[c]
        copied = {
            above
            for copy in self.copies.values()
            if copy.to_host
            for part in copy.parts
            for page in part.names
            for above in (ancestry(page) if r == FULL else [page])
        }
        could = self.seen.unlocked(c) | (copied & ready.keys())
        promised = sum(waits.lease.need[r] for waits in self.waiting if waits.lease is not None)
        free = self.kinds[r].total[DEVICE] - len(ready) - self.held_slots(r)
        return free + len(could.difference(keep)) - promised

    def _check_victims(self, need: Sequence[int]) -> None:
        """Nothing of a companion went of which enough was free, but with its full KV; nothing at all without need."""
        devices = [self.cell(r, DEVICE) for r in range(len(self.kinds))]
        before = [self.before.ready[c].keys() for c in devices]
        lost = [had - self.seen.ready[c].keys() for had, c in zip(before, devices, strict=True)]
        short = [
            need[r] > kind.total[DEVICE] - len(before[r]) - self.held_slots(r) for r, kind in enumerate(self.kinds)
        ]
        assert any(short) or not lost[FULL], f"{lost[FULL]} went, and there was enough of all"
        for r in self.companions:
            alone = lost[r] - lost[FULL]
            assert short[r] or not alone, f"{self.kinds[r].name}: {alone} went, and enough was free"

    @staticmethod
    def _fits(need: Sequence[int], room: Sequence[int]) -> bool:
        """Of nothing there is always enough, whatever is promised."""
        return all(want <= max(0, have) for want, have in zip(need, room, strict=True))

    def _promised(self, waits: Waits) -> list[int]:
        if waits.lease is not None:
            return waits.lease.need
        return [sum(each.need[r] for each in waits.promised) for r in range(len(self.kinds))]

    def held_slots(self, r: int) -> int:
        return sum(len(lease.own[r]) for lease in self._leases())

    def _check_refusal(self, error: object, need: Sequence[int], room: Sequence[int]) -> None:
        assert isinstance(error, NoSpace), f"{error!r}"
        r = [kind.name for kind in self.kinds].index(error.resource)
        assert need[r] > room[r], f"{error!r}: {need[r]} are needed, {room[r]} can be had"
        self.note(f"refused for want of {error.resource}")

    def extend(self, runner: Runner, items: Sequence[tuple[Lease, bytes, int, int | None, int]]) -> object:
        """Of each: its lease, tokens, reserve, upto, and states."""
        request = self._request()
        growing: list[Growing] = []
        for lease, tokens, reserve, upto, states in items:
            have = (len(lease.tokens) + len(tokens)) // TOKEN_BYTES + reserve
            if upto is not None:
                have = min(have, upto)
            fresh = max(0, -(-have // self.page_size) - lease.num_pages)
            growing.append(Growing(lease, tokens, [states if kind.by_end else fresh for kind in self.kinds]))
        room_now = [self._room(r, self.seen) for r in range(len(self.kinds))]
        later = [self._room_later(r) for r in range(len(self.kinds))]

        def then(result: Extended | SglcacheError | None) -> None:
            assert not isinstance(result, SglcacheError), f"{result!r}"
            waits = Waits(request, items=growing)
            if result is None:
                fits = any(self._fits(each.need, later) for each in growing)
                assert fits, f"it waits, and at most {later} can be had"
                for each in growing:
                    if each.lease.extending is None:
                        each.lease.extending = waits
                waits.promised = list(growing)  # some of which may be refused already: it is told with the rest
                self.waiting.append(waits)
                self.note("waits")
                return
            taken = [0] * len(self.kinds)
            granted: list[Lease] = []
            for each, answer in zip(growing, result.results, strict=True):
                wants = [a + b for a, b in zip(taken, each.need, strict=True)]
                if isinstance(answer, BadRequest):
                    assert each.lease.extending is not None or each.lease in granted, f"{answer!r}"
                elif isinstance(answer, SglcacheError):
                    self._check_refusal(answer, wants, room_now)
                else:
                    taken = wants
                    granted.append(each.lease)
            assert not (self.waiting and any(taken)), "it overtook those who wait"
            self._extended(waits, result)

        spares = [tuple(states if self.kinds[r].by_end else 0 for r in self.companions) for _, _, _, _, states in items]
        sent = [
            Extension(lease.number, tokens, reserve, upto, spare)
            for (lease, tokens, reserve, upto, _), spare in zip(items, spares, strict=True)
        ]
        return self.turn(lambda: self.index.extend(runner.id, request, sent), then)

    def cancel(self, runner: Runner, lease: Lease) -> None:
        request = self._request()

        def then(result: bool | SglcacheError) -> None:
            assert result is (lease.load is None), f"{result!r}"
            lease.stopped.update(range(runner.shards))
            if result:
                self._over(lease)
            else:
                lease.cancelling = request
                self.cancels[request] = lease

        self._takes_no_more(lease)
        self.turn(lambda: self.index.cancel(runner.id, request, LeaseId(lease.number)), then)

    def _takes_no_more(self, lease: Lease) -> None:
        """An extend of it that waits comes to nothing: there is nothing promised any more."""
        for waits in self.waiting:
            waits.promised = [each for each in waits.promised if each.lease is not lease]

    def plan_commit(
        self,
        runner: Runner,
        lease: Lease,
        tokens: int | None = None,
        ends: Iterable[tuple[int, int, int]] = (),
        floor: int | None = None,
    ) -> Sent:
        """Give a commit its ticket; from now on its event may be done. `ends`: (resource, pages, slot)."""
        have = min(len(lease.tokens) // TOKEN_BYTES, lease.num_pages * self.page_size)
        pages = min((have if tokens is None else tokens) // self.page_size, len(lease.path))
        item = Sent(
            lease, runner.next_ticket, self._request(), False, pages, tuple(End(*end) for end in ends), floor=floor
        )
        return self._plan(runner, item)

    def plan_release(self, runner: Runner, lease: Lease, discard: bool = False) -> Sent:
        item = Sent(lease, runner.next_ticket, self._request(), True, discard=discard)
        lease.release = item
        return self._plan(runner, item)

    def _plan(self, runner: Runner, item: Sent) -> Sent:
        runner.next_ticket += 1
        item.seen = runner.read
        runner.planned.append(item)
        runner.items.append(item)
        return item

    def issue(self, runner: Runner) -> Sent:
        """Send the oldest that has a ticket and is not sent."""
        item = runner.planned.pop(0)
        number = LeaseId(item.lease.number)

        def send() -> None:
            if item.release:
                self.index.release(runner.id, item.request, number, item.ticket, seen=item.seen, discard=item.discard)
            else:
                self.index.commit(
                    runner.id,
                    item.request,
                    number,
                    item.ticket,
                    seen=item.seen,
                    tokens=item.pages * self.page_size,
                    ends=[(r - 1, pages * self.page_size, slot) for r, pages, slot in item.ends],
                    floor=item.floor,
                )

        def then(result: SglcacheError | None) -> None:
            assert result is None, f"{item} was refused: {result!r}"
            item.issued = True
            self.asked[item.request] = item
            if item.release and item.discard:
                for other in runner.items:
                    if other.lease is item.lease and not other.release:
                        other.dropped = True

        if item.release:
            self._takes_no_more(item.lease)
        self.turn(send, then)
        return item

    def commit(self, runner: Runner, lease: Lease, tokens: int | None = None, **how: Any) -> Sent:
        """Plan, send, and all events are done."""
        item = self.plan_commit(runner, lease, tokens, **how)
        self.flush(runner)
        return item

    def release(self, runner: Runner, lease: Lease, discard: bool = False) -> Sent:
        item = self.plan_release(runner, lease, discard)
        self.flush(runner)
        return item

    def flush(self, runner: Runner) -> None:
        while runner.planned:
            self.issue(runner)
        for item in list(runner.items):
            for shard in range(runner.shards):
                if shard not in item.done:
                    self.event_done(runner, item, shard)

    def event_done(self, runner: Runner, item: Sent, shard: int) -> None:
        """The shard's kernels up to this ticket have run. What they compute is there when the last shard's have."""
        lease = item.lease
        item.done.add(shard)
        if len(item.done | runner.gone) == runner.shards and not lease.over:
            if item.release:
                self._scribble(lease, "last scribble")
            else:  # and what it computed before
                for earlier in runner.items:
                    if earlier.lease is lease and not earlier.release and earlier.ticket <= item.ticket:
                        self._compute(earlier)
        if item.release:
            lease.stopped.add(shard)
        self.turn(lambda: self.index.event_done(runner.id, item.ticket, shard))

    def _compute(self, item: Sent) -> None:
        lease = item.lease
        floor = 0 if item.floor is None else item.floor // self.page_size
        for i in range(lease.computed, item.pages):
            for r in self.by_page:
                slot = lease.views[r].get(i)
                if slot is None or (r != FULL and i < floor):
                    continue  # what the runner has slid past it need not write any more
                garbage = f"garbage of lease {lease.number}"
                self.memory[self.cell(r, DEVICE)][slot] = garbage if lease.broken else lease.path[i]
                lease.filled[r].add(i)
        lease.computed = max(lease.computed, item.pages)
        for r, pages, slot in item.ends:
            page = lease.path[pages - 1]
            self.memory[self.cell(r, DEVICE)][slot] = f"garbage of lease {lease.number}" if lease.broken else page

    def _scribble(self, lease: Lease, what: str) -> None:
        """Over all that is its own and that nobody may read: what it never committed, and no duplicate."""
        promised = {(r, slot) for item in lease.runner.items if item.lease is lease for r, _, slot in item.ends}
        for r, kind in enumerate(self.kinds):
            if kind.by_end:
                slots = [slot for slot in lease.states[r] if (r, slot) not in promised]
            else:
                slots = [slot for i, slot in lease.views[r].items() if i >= max(lease.computed, lease.matched)]
            for slot in slots:
                assert slot in lease.own[r]
                self.memory[self.cell(r, DEVICE)][slot] = f"{what} of lease {lease.number}"

    def read_replies(self, runner: Runner) -> None:
        runner.read = runner.replies

    def in_flight(self) -> list[Copying]:
        """Copies whose ack may come."""
        return [copy for copy in self.copies.values() if copy.ok is None]

    def copy_done(self, copy: Copying, ok: bool = True) -> None:
        """The bytes move, at the last moment, and the ack comes."""
        source, target = (DEVICE, HOST) if copy.to_host else (HOST, DEVICE)
        for r, names, sources, targets in copy.parts:
            for page, from_slot, to_slot in zip(names, sources, targets, strict=True):
                there = self.memory[self.cell(r, source)][from_slot]
                assert there is page, f"copy {copy.ticket} of {self.kinds[r].name} {page} read {there} from {from_slot}"
                self.memory[self.cell(r, target)][to_slot] = page if ok else f"rest of copy {copy.ticket}"
        copy.ok = ok
        if not copy.to_host:
            del self.copies[copy.ticket]
        self.turn(
            lambda: self.index.copy_done(TicketId(copy.ticket), ok),
            lambda _: self._loaded(copy) if not copy.to_host else self._written(),
        )

    def _written(self) -> None:
        """Acks of copies to the host take effect in the order of sending."""
        for copy in [each for each in self.copies.values() if each.to_host]:
            if copy.ok is None:
                return
            del self.copies[copy.ticket]
            self.ended_something = True
            if copy.cancelled:
                continue
            if not copy.ok:
                failed = set(copy.parts[FULL].names)
                for other in self.copies.values():
                    below = {page for part in other.parts for name in part.names for page in ancestry(name)}
                    if other.to_host and not self._under_way(other):
                        other.cancelled = True  # it may hang on more than it brings
                    assert other.cancelled or not (other.to_host and failed & below), f"{other} hangs on {failed}"
                continue
            for part in copy.parts:
                self.coming[self.cell(part.resource, HOST)].update(zip(part.names, part.target, strict=True))

    def _under_way(self, copy: Copying) -> bool:
        """It brings pages, or has just brought them."""
        cells = [(self.cell(part.resource, HOST), part) for part in copy.parts]
        return any(
            slot in (self.seen.writing[c].get(page), self.seen.ready[c].get(page))
            for c, part in cells
            for page, slot in zip(part.names, part.target, strict=True)
        )

    def _loaded(self, copy: Copying) -> None:
        lease = copy.lease
        assert lease is not None
        lease.load = None
        if not copy.ok:
            lease.broken = True
            for filled, slots in zip(lease.filled, lease.loading, strict=True):
                filled.difference_update(slots)
        elif not lease.runner.ended:
            for r, slots in enumerate(lease.loading):
                for i, slot in slots.items():
                    page = lease.path[i]
                    if not self._give(lease, r, page, slot) and not self.kinds[r].by_end:
                        lease.duplicates[Duplicate(r, slot, page)] = 0  # a state it reads until its first commit
            lease.committed = lease.matched
        lease.loading = [{} for _ in self.kinds]
        if lease.cancelling is not None and lease.runner.ended:
            self._over(lease)  # nobody is to be told

    def end_session(self, runner: Runner) -> None:
        self._nothing_more(runner)
        self.turn(lambda: self.index.end_session(runner.id), lambda _: self._ended(runner))

    def _nothing_more(self, runner: Runner) -> None:
        runner.planned.clear()
        for item in runner.items:
            if not item.issued and item.lease.release is item:
                item.lease.release = None
        runner.items = [item for item in runner.items if item.issued]

    def _ended(self, runner: Runner) -> None:
        if runner.ended:
            return
        runner.ended = True
        runner.pins.clear()
        for lease in list(runner.leases):
            if lease.waiting:
                continue  # its answer is yet to come
            self._takes_no_more(lease)

    def shard_gone(self, runner: Runner, shard: int) -> None:
        """One of its processes is dead, and wrote until then."""
        self._nothing_more(runner)
        for lease in runner.leases:
            if not lease.waiting and shard not in lease.stopped:
                self._scribble(lease, "the dying scribble")
                lease.stopped.add(shard)

        def then(_: object) -> None:
            self._ended(runner)
            runner.gone.add(shard)

        self.turn(lambda: self.index.shard_gone(runner.id, shard), then)

    def die(self, runner: Runner) -> None:
        self.end_session(runner)
        for shard in range(runner.shards):
            self.shard_gone(runner, shard)

    def peek(self, tokens: Iterable[int] | bytes, namespace: Namespace = ROOT) -> tuple[int, int, tuple[int, ...]]:
        key = tokens if isinstance(tokens, bytes) else pack(tokens)
        before = self.index.version
        result = self.turn(lambda: self.index.peek(key, namespace))
        assert not isinstance(result, SglcacheError)
        assert self.index.version == before
        reached = self.reached(self.book.path(namespace, key), now=False)
        size = self.page_size
        want = (reached.device * size, reached.matched * size, tuple(each * size for each in reached.reaches))
        assert tuple(result) == want, f"peeked {result}, it is {want}"
        return want

    def pin(
        self, runner: Runner, tokens: Iterable[int] | bytes, namespace: Namespace, owner: str, expires_at: float
    ) -> int:
        key = tokens if isinstance(tokens, bytes) else pack(tokens)
        path = self.book.path(namespace, key)
        reached = self.oracle.reach(self.seen, path)
        result = self.turn(lambda: self.index.pin(runner.id, key, namespace, owner, expires_at))
        assert result == reached.matched * self.page_size, f"pinned {result}, matched are {reached.matched} pages"
        if result:
            runner.pins.append(Pinned(owner, expires_at, path[: reached.matched]))
        return result

    def unpin(self, runner: Runner, owner: str) -> None:
        runner.pins = [pin for pin in runner.pins if pin.owner != owner]
        self.turn(lambda: self.index.unpin(runner.id, owner))

    def expire(self, now: float) -> None:
        self.turn(lambda: self.index.expire(now))
        for runner in self.runners.values():
            runner.pins = [pin for pin in runner.pins if pin.until > now]

    def clear(self, tier: Tier | None = None) -> None:
        def then(result: dict[Tier, int] | SglcacheError) -> None:
            if isinstance(result, SglcacheError):
                assert isinstance(result, Busy), f"{result!r}"
                held = self.copies or any(runner.leases or runner.pins for runner in self.runners.values())
                assert held, f"{result!r}, and nothing is held"
            else:
                tiers = range(self.num_tiers) if tier is None else [tier]
                want = {Tier(t): len(self.before.ready[self.cell(FULL, t)]) for t in tiers}
                assert result == want, f"{result} pages are said to go, of full KV there were {want}"
                self.note("cleared")
                assert not any(runner.leases for runner in self.runners.values())

        self.turn(lambda: self.index.clear(tier), then)

    def grow_host(self, num_pages: int) -> None:
        """So many more pages of full KV have memory on the host now."""
        self.host_ready = min(self.config.host_pages, self.host_ready + num_pages)
        self.turn(lambda: self.index.host_ready(self.host_ready))

    def expel(self, r: int, page: Page) -> bool:
        """The bytes of a page on the host have gone bad; whether it could be let go of. What else goes is of no use."""
        c = self.cell(r, HOST)
        slot = self.seen.ready[c][page]
        cells = [self.cell(each, HOST) for each in range(len(self.kinds))] if r == FULL else [c]
        hanging: dict[int, set[Page]] = {
            cell: {
                each
                for each in (*self.seen.ready[cell], *self.seen.writing[cell])
                if each is page or (r == FULL and page in ancestry(each))
            }
            for cell in cells
        }
        held = any(hanging[cell] & (self.seen.locked[cell] | set(self.seen.writing[cell])) for cell in cells)
        names = {self.cell(each, HOST): f"{self.kinds[each].name}_corrupt_slots" for each in self.companions}
        names[self.cell(FULL, HOST)] = "corrupt_pages"
        counted = dict(self.index.counters)
        self.memory[c][slot] = "gone bad"

        def then(went: bool | SglcacheError) -> None:
            assert went is not held, f"{page} was {'held' if held else 'free to go'}, and the answer was {went}"
            if held:
                self.memory[c][slot] = page  # a rank ends here; this one goes on as if nothing had been
                assert self._fingerprint() == self._print, "it was refused, and changed something"
                assert self.before.ready == self.seen.ready
                return
            ideal = [
                {each: at for each, at in places.items() if each not in hanging.get(cell, ())}
                for cell, places in enumerate(self.before.ready)
            ]
            for cell, name in names.items():
                count = self.index.counters[name] - counted[name]
                assert count == len(hanging.get(cell, ())), f"{count} are counted as {name}, {hanging.get(cell)} went"
                assert not hanging.get(cell, set()) & self.seen.ready[cell].keys()
            if len(self.kinds) == 1:
                assert self.seen.ready == ideal, "something else came or went"
            without = replace(self.before, ready=ideal)
            for each in set().union(*(self.before.ready[self.cell(FULL, t)] for t in range(self.num_tiers))):
                want, got = (self.oracle.reach(seen, ancestry(each)).matched for seen in (without, self.seen))
                assert want == got, f"of {each} {got} pages can be had, and {want} should"
            self.note("expelled")

        return self.turn(lambda: self.index.expel(r, slot), then) is True

    def step(self) -> bool:
        more = self.turn(self.index.step)
        assert isinstance(more, bool)
        return more

    def steps(self) -> None:
        for _ in range(10_000):
            if not self.step():
                return
        raise AssertionError("step goes on for ever")

    def cut(self, heartbeat: bool = False) -> None:
        def command() -> None:
            self.now += 1
            while not self.index.cut(self.now, heartbeat):
                self.now += 1

        self.turn(command)
        self.check_mirror()

    # -- looking ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        self._check_changes()
        self._check_memory()
        self._check_leases()
        self._check_counts()
        self._check_nodes()
        self._check_pins()
        self._check_waiting()
        for tier in range(self.num_tiers):
            gone = self.subscriber.present[tier] - self.seen.ready[self.cell(FULL, tier)].keys()
            assert not gone, f"tier {tier}: {gone} went, and the stream has not said so"
        if self.proof:
            found = invariants.check(self.index)
            assert not found, "\n".join(found)

    def _check_changes(self) -> None:
        """What came had a reason, and came where it should; what stayed stayed where it was."""
        for c, (r, tier) in enumerate(self.cells):
            before, after = self.before.ready[c], self.seen.ready[c]
            thinned = self._thinned(r)
            for page, slot in after.items():
                again = (thinned or self.ended_something) and page in self.coming[c]  # it went, and came again
                if page in before and not again:
                    assert slot == before[page], f"cell {c}: {page} moved from slot {before[page]} to {slot}"
                else:
                    want = self.coming[c].get(page)
                    assert slot == want, f"{self.kinds[r].name}, tier {tier}: {page} came in slot {slot}, not {want}"
            for page, slot in self.coming[c].items():
                # What only a lease or a copy held that is over may have gone with it.
                gone = (thinned or self.ended_something) and page not in self.seen.writing[c]
                assert page in after or gone, f"{self.kinds[r].name}, tier {tier}: {page} was to come in slot {slot}"

    def _check_memory(self) -> None:
        """Whatever is cached holds its name."""
        for c, (r, tier) in enumerate(self.cells):
            for page, slot in self.seen.ready[c].items():
                there = self.memory[c][slot]
                assert there is page, f"{self.kinds[r].name}, tier {tier}, slot {slot}: {there} where {page} is cached"

    def _check_leases(self) -> None:
        owned: list[set[int]] = [set() for _ in self.kinds]
        for lease in self._leases():
            for r, own in enumerate(lease.own):
                twice = own & owned[r]
                assert not twice, f"{self.kinds[r].name} slots {twice} have two owners"
                owned[r] |= own
            self._check_held(lease)
            if len(lease.stopped) < lease.runner.shards:
                self._check_reads(lease)
        for r in range(len(self.kinds)):
            c = self.cell(r, DEVICE)
            both = owned[r] & set(self.seen.ready[c].values())
            assert not both, f"{self.kinds[r].name} slots {both} are a lease's and cached"
            free = set(unpack(self.index.pools[c].free_slots())) & owned[r]
            assert not free, f"{self.kinds[r].name} slots {free} are a lease's and free"

    def _check_held(self, lease: Lease) -> None:
        """What a lease reads and does not own is in the tree, and locked there."""
        for r in self.by_page:
            c = self.cell(r, DEVICE)
            have, locked = self.seen.ready[c], self.seen.locked[c]
            for i, slot in lease.views[r].items():
                if i < lease.committed and slot not in lease.own[r]:
                    page = lease.path[i]
                    assert have.get(page) == slot, f"{lease}: {self.kinds[r].name} {page} was in {slot}, and went"
                    assert page in locked, f"{lease}: {self.kinds[r].name} {page} is read, and nothing locks it"
        for r in self.by_end:
            source, c = lease.sources[r], self.cell(r, DEVICE)
            if source is not None and source not in lease.own[r]:
                page = lease.path[lease.matched - 1]
                assert self.seen.ready[c].get(page) == source, f"{lease}: the state at {page} was in {source}, and went"
                assert page in self.seen.locked[c], f"{lease}: the state at {page} is its source, and nothing locks it"

    def _check_reads(self, lease: Lease) -> None:
        for r in self.by_page:
            memory = self.memory[self.cell(r, DEVICE)]
            for i in lease.filled[r]:
                if i in lease.loading[r] or (lease.broken and i >= lease.committed):
                    continue
                slot = lease.views[r][i]
                there = memory[slot]
                assert there is lease.path[i], f"{lease} reads {self.kinds[r].name} {lease.path[i]} in {slot}: {there}"
        for r, slot, page in lease.duplicates:
            there = self.memory[self.cell(r, DEVICE)][slot]
            assert there is page, f"{lease} reads {self.kinds[r].name} {page} in its duplicate {slot}: {there}"
        for r in self.by_end:
            source = lease.sources[r]
            if source is None or lease.loading[r] or (lease.broken and source in lease.own[r]):
                continue
            there, page = self.memory[self.cell(r, DEVICE)][source], lease.path[lease.matched - 1]
            assert there is page, f"{lease} begins with the state at {page} in {source}: {there}"

    def _check_counts(self) -> None:
        stats = self.index.stats()
        assert len(stats.pools) == len(self.cells)
        for c, ((r, tier), pool) in enumerate(zip(self.cells, stats.pools, strict=True)):
            name = f"{self.kinds[r].name}, tier {tier}"
            total = self.host_ready if (r, tier) == (FULL, HOST) else self.kinds[r].total[tier]
            assert (pool.resource, pool.tier, pool.total) == (self.kinds[r].name, Tier(tier), total)
            assert pool.free + pool.fenced + pool.leased + pool.cached == pool.total, f"{name}: {pool}"
            cached = len(self.seen.ready[c]) + len(self.seen.writing[c])
            assert pool.cached == cached, f"{name}: {pool.cached} are counted as cached, {cached} are"
            locked = len(self.seen.locked[c])
            assert pool.locked == locked, f"{name}: {pool.locked} are counted as locked, {locked} are"
            if tier == DEVICE:
                leased = sum(len(lease.own[r]) for lease in self._leases() if not lease.runner.ended)
                fenced = sum(len(lease.own[r]) for lease in self._leases() if lease.runner.ended)
            else:
                leased = 0
                fenced = sum(
                    len(part.target)
                    for copy in self.copies.values()
                    if copy.cancelled
                    for part in copy.parts
                    if part.resource == r
                )
            assert (pool.leased, pool.fenced) == (leased, fenced), (
                f"{name}: {pool.leased} leased and {pool.fenced} fenced are counted, there are {leased} and {fenced}"
            )
        assert stats.num_copies == len(self.copies)
        assert stats.num_waiting == len(self.waiting)

    def _check_nodes(self) -> None:
        """Companions live where Full lives; and a leaf that nobody holds is there because a match can end in it."""
        tiers = self.num_tiers
        for node in self.seen.nodes:
            for r in self.companions:
                for t in range(tiers):
                    alone = node.present[r * tiers + t] and not node.present[t]
                    assert not alone, f"{node.pages}: {self.kinds[r].name} in tier {t} without Full"
            if node.is_leaf and not any(node.locks) and not node.writing:
                useful = self.oracle.is_useful(self.seen, node)
                assert useful, f"{node} is a leaf, and no match can end in it"

    def _check_pins(self) -> None:
        for runner in self.runners.values():
            for pin in runner.pins:
                still = self.oracle.reach(self.seen, pin.path).matched
                assert still == len(pin.path), f"{pin}: {still} pages of it match"

    def _check_waiting(self) -> None:
        """Who waits first waits for something that will happen."""
        if self.waiting and not self.index.busy:
            writes = any(copy.to_host for copy in self.copies.values())
            assert writes, f"{self.waiting[0]} waits for nothing"

    def check_mirror(self) -> None:
        """What the stream has told is what is there, tier by tier; of companions, if they are groups."""
        if not self.config.events:
            return
        for tier in range(self.num_tiers):
            held = {page for page in self.seen.ready[self.cell(FULL, tier)] if page.namespace[1] is None}
            mirror = self.subscriber.present[tier]
            assert mirror == held, f"tier {tier}: the mirror has {mirror - held} more, lacks {held - mirror}"
        for c, (r, tier) in enumerate(self.cells):
            if r == FULL:
                continue
            told = r <= len(self.config.format.groups)
            held = {page for page in self.seen.ready[c] if told and page.namespace[1] is None}
            mirror = self.subscriber.beside.get((r, tier), set())
            assert mirror == held, f"group {r}, tier {tier}: the mirror has {mirror - held} more, lacks {held - mirror}"

    def quieten(self) -> None:
        """Until nothing is under way, which does not take for ever."""
        for _ in range(1000):
            self.steps()
            self.cut()
            copies = self.in_flight()
            if not copies and not self.index.busy:
                return
            for copy in copies:
                self.copy_done(copy)
        raise AssertionError("one copy leads to another, for ever")

    def settle(self) -> None:
        """Everything comes to its end; then nobody holds anything, and each slot is free or cached."""
        self.quieten()
        for runner in self.runners.values():
            if runner.ended:
                for shard in range(runner.shards):
                    if shard not in runner.gone:
                        self.shard_gone(runner, shard)
                continue
            for owner in dict.fromkeys(pin.owner for pin in runner.pins):
                self.unpin(runner, owner)
            for lease in list(runner.leases):
                if not lease.waiting and lease.release is None and lease.cancelling is None:
                    self.plan_release(runner, lease)
            self.flush(runner)
        self.quieten()
        for runner in list(self.runners.values()):
            if not runner.ended and runner.leases:  # who waited was served, or was refused
                for lease in list(runner.leases):
                    self.plan_release(runner, lease)
                self.flush(runner)
        self.quieten()
        if any(runner.leases for runner in self.runners.values()):
            self.settle()
            return
        unanswered = [*self.waiting, *self.asked, *self.cancels]
        assert not unanswered, f"these were not answered: {unanswered}"
        stats = self.index.stats()
        for c, pool in enumerate(stats.pools):
            assert (pool.locked, pool.leased, pool.fenced) == (0, 0, 0), f"something is held by nobody: {pool}"
            assert pool.free + pool.cached == pool.total
            _, tier = self.cells[c]
            if tier == DEVICE:
                came, *left = (stats.counters.get(name, 0) for name in _came_and_left(pool.resource))
                went = sum(left)
                assert came - went == pool.cached, (
                    f"{came} slots came, {went} went, and {pool.cached} are there: {pool}"
                )


def _came_and_left(resource: str) -> tuple[str, ...]:
    """The counters of what came to the device, and of what left it, for each reason."""
    if resource == "full":
        left = ("evicted_device_pages", "demoted_pages", "cleared_device_pages", "pruned_device_pages")
        return ("committed_pages", *left)
    slots = ("committed_slots", "evicted_device_slots", "demoted_slots", "cleared_device_slots")
    return tuple(f"{resource}_{name}" for name in slots)
