"""A tier that tenants share: what each has of it, and whose page goes next.

`Shared` is a cell's order of eviction where there are tenants. It keeps the cell's locks like any other, and beside
them a `Share` for each tenant: what it is charged with, and its own leaves in the policy's order. `tenants` decides who
may have how much; here it is decided what goes.

**Who pays.** A page is charged to the tenant whose request brought it to the tier, for as long as it is there: a fact
of a node and a cell. What a lease takes is its tenant's, and stays so when a commit gives it to the tree; a
write-through is charged to who pays on the device; what a load-back brings to the device is its request's. So no charge
ever moves from tenant to tenant. A split copies it; nodes are joined only where it is equal.

**What goes for tenant x.** The page that the policy would take first among the leaves of x, and of every tenant with a
spare: with pages that nobody holds beyond those that keep it at its floor. If x would come over its ceiling, among x's
own. A node that is larger than the spare is split, so that a floor holds to the page.

**Shared prefixes.** A page goes before the one it hangs on, and that may be another tenant's. So a page that might be
taken can be closed: below it are pages of tenants at their floors, and no leaf that might be taken. If, and only if,
there is no leaf that might be taken, and still too little room, a leaf below such a closed page goes, floor or no
floor. So what can be had is the sum of what may be taken, closed or not, and no walk of the tree is needed to know it:

    room(x) = free + unlocked - kept by the floors of the others

Each page that is taken leaves `unlocked - kept` one less, and free one more; one below a floor leaves `kept` and
`unlocked` one less, and free one more: so the sum never falls while room is made, and what was admitted is found. And
while it is more than what is free, a page that may be taken is there, and so is a leaf below it, or it is one.

What a floor promises, then: of the pages that hang on no other tenant's page none goes for another tenant while the
tenant is not above its floor. Those that hang on another's may go with it, last of all, and are counted (`broken`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sglcache.core.eviction import NODE, Facts, Policy, Ranked
from sglcache.core.slots import SLOT_BYTES, SlotPool

if TYPE_CHECKING:
    from sglcache.core.tree import Node


class Share:
    """What one tenant has of a tier, in pages, and its nodes in the order in which they go."""

    __slots__ = (
        "broken",
        "cached",
        "ceiling",
        "closed",
        "floor",
        "leased",
        "leaves",
        "leaving",
        "locked",
        "skipped",
        "taken",
    )

    def __init__(self, leaves: Ranked, closed: Ranked) -> None:
        self.floor = 0
        self.ceiling: int | None = None
        self.leased = 0  # by leases and fetches, fenced or not
        self.cached = 0
        self.locked = 0  # of the cached ones
        self.leaving = 0  # of the locked ones, those that leave with the end of a copy
        self.taken = 0  # so far, to make room for other tenants
        self.broken = 0  # of these, below the floor
        self.skipped = 0  # pages that were not copied here, for the limits left no room
        self.leaves = leaves
        self.closed = closed  # whose children in the tier are all of other tenants

    @property
    def charged(self) -> int:
        return self.cached + self.leased

    def kept(self, pinned: int = 0, copied: int = 0, gone: int = 0) -> int:
        """Of what nobody holds, the pages that keep it at its floor.

        As it would be with `pinned` pages more locked, and once copies are over: they let go of `copied` pages, of
        which `gone` leave."""
        unlocked = self.cached - self.locked - pinned + copied - gone
        held = self.leased + self.locked - self.leaving + pinned - copied + gone
        return max(0, min(unlocked, self.floor - held))

    @property
    def spare(self) -> int:
        """Of what nobody holds, the pages beyond those."""
        return self.cached - self.locked - self.kept()


class Shared(Ranked):
    """The order of a cell that tenants share: see above.

    A node is queued with its tenant while it is unlocked and none of its children in the tier is the same tenant's:
    among the leaves if it has none at all, else among the closed. Children in the tier are linked, so that a leaf below
    a closed node is found by going down.
    """

    __slots__ = ("first", "left", "own", "right", "shares", "tenant", "unfinished")

    def __init__(self, policy: Policy, cell: int, num_cells: int, pool: SlotPool, facts: Facts) -> None:
        self.shares: list[Share] = []
        super().__init__(policy, cell, num_cells, pool, facts)
        self.tenant = facts.tenants[cell]
        self.own, self.first, self.left, self.right = facts.links[cell]
        self.unfinished = False  # the last look for a victim found stale entries, and no end of them

    def add(self) -> Share:
        """One more tenant's."""
        leaves, closed = (
            Ranked(self.policy, self.cell, self.lock - self.cell, self.pool, self.facts) for _ in range(2)
        )
        share = Share(leaves, closed)
        self.shares.append(share)
        self.effort = 3 + len(self.shares) // 8  # who looks for a victim looks at each
        return share

    def reset(self, pool: SlotPool) -> list[Any]:
        garbage = super().reset(pool)
        for share in self.shares:
            share.cached = share.locked = share.leaving = 0
            garbage += share.leaves.reset(pool)
            garbage += share.closed.reset(pool)
        return garbage

    # -- locks

    def pin(self, node: Node | None, stop: Node | None = None) -> None:
        cell, lock, entry, tenant, shares = self.cell, self.lock, self.entry, self.tenant, self.shares
        self.clock += 1
        locked = 0
        while node is not stop and node is not None and node.parent is not None:
            cells = node.cells
            count = cells[lock]
            cells[lock] = count + 1
            if count == 0:
                num_pages = len(cells[cell]) // SLOT_BYTES
                share = shares[cells[tenant]]
                if cells[entry] is not None:
                    self._forget(cells)
                elif cells[self.time] is None:
                    self._put(node)
                    share.cached += num_pages
                share.locked += num_pages
                locked += num_pages
            node = node.parent
        self.pool.locked += locked

    def _put(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        cells, above = node.cells, parent.cells
        if above and above[self.entry] is not None:
            self._forget(above)  # it was a leaf until now, and this pin locks it, too
        super()._put(node)
        if parent.parent is None:
            return
        next_one: Node | None = above[self.first]
        above[self.first] = node
        cells[self.left], cells[self.right] = None, next_one
        if next_one is not None:
            next_one.cells[self.left] = node
        if above[self.tenant] == cells[self.tenant]:
            above[self.own] += 1

    def unpin(self, node: Node | None) -> None:
        if node is None or node.parent is None:
            return
        cell, lock, own, tenant, shares = self.cell, self.lock, self.own, self.tenant, self.shares
        self.clock += 1
        time = self.time if self.recent else None
        unlocked = 0
        up: Node | None = node
        while up is not None and up.parent is not None:
            cells = up.cells
            count = cells[lock] - 1
            cells[lock] = count
            if count == 0:
                if time is not None:
                    cells[time] = self.clock
                num_pages = len(cells[cell]) // SLOT_BYTES
                shares[cells[tenant]].locked -= num_pages
                unlocked += num_pages
                if not cells[own]:
                    self._push(up)
            up = up.parent
        self.pool.locked -= unlocked

    # -- who is queued where

    def _queue(self, cells: list[Any]) -> Ranked:
        share: Share = self.shares[cells[self.tenant]]
        return share.closed if cells[self.kids] else share.leaves

    def _push(self, node: Node) -> None:
        self._queue(node.cells)._push(node)

    def _forget(self, cells: list[Any]) -> None:
        self._queue(cells)._forget(cells)

    def unlink(self, node: Node) -> None:
        cells = node.cells
        self._forget(cells)
        cells[self.time] = None
        self.shares[cells[self.tenant]].cached -= len(cells[self.cell]) // SLOT_BYTES
        parent = node.parent
        assert parent is not None
        if parent.parent is not None:
            above = parent.cells
            if above[self.entry] is not None:
                self._forget(above)
            left, right = cells[self.left], cells[self.right]
            if left is not None:
                left.cells[self.right] = right
            else:
                above[self.first] = right
            if right is not None:
                right.cells[self.left] = left
            above[self.kids] -= 1
            above[self.own] -= above[self.tenant] == cells[self.tenant]
            if not above[self.own] and not above[self.lock]:
                self._push(parent)
        cells[self.left] = cells[self.right] = None
        cells[self.tenant] = 0

    def split(self, head: Node, tail: Node) -> None:
        """The head takes the tail's place among its parent's children, and is the same tenant's."""
        above, below = head.cells, tail.cells
        above[self.entry] = None
        above[self.kids] = above[self.own] = 1
        above[self.first] = tail
        self._replace(tail, head, head)
        below[self.left] = below[self.right] = None
        self.changed(tail)

    def join(self, top: Node, low: Node) -> None:
        self._replace(top, low, top)

    def _replace(self, old: Node, new: Node, under: Node) -> None:
        """Among the children of the parent of `under`."""
        left: Node | None = old.cells[self.left]
        right: Node | None = old.cells[self.right]
        new.cells[self.left], new.cells[self.right] = left, right
        if right is not None:
            right.cells[self.left] = new
        parent = under.parent
        assert parent is not None
        if left is not None:
            left.cells[self.right] = new
        elif parent.parent is not None:
            parent.cells[self.first] = new

    def changed(self, node: Node) -> None:
        entry = node.cells[self.entry]
        if entry is not None:
            self._queue(node.cells).changed(node)

    def alike(self, up: Node, low: Node) -> bool:
        return up.cells[self.tenant] == low.cells[self.tenant] and super().alike(up, low)

    # -- who goes

    def victim(self) -> Node | None:
        return self._first(range(len(self.shares)))[0]

    def victim_for(self, number: int, own: bool) -> tuple[Node, int] | None:
        """The next to go for this tenant, and how many pages of it may: its last ones. `own`: of its own alone, for it
        would come over its ceiling. None: nothing can go, or, if `unfinished`, ask again."""
        shares = self.shares
        mine = shares[number]
        if own:
            takers: Sequence[int] = (number,)
        else:
            takers = [
                i
                for i, share in enumerate(shares)
                if share.cached > share.locked and (share is mine or share.spare > 0)
            ]
        node, taker = self._first(takers)
        if node is not None:
            return node, 1 << 62 if taker == number else shares[taker].spare
        if self.unfinished:
            return None
        node, _ = self._first(takers, closed=True)
        if node is None:
            return None
        while (below := node.cells[self.first]) is not None:
            node = below
        return node, 1 << 62

    def _first(self, takers: Sequence[int], closed: bool = False) -> tuple[Node | None, int]:
        """Of these tenants' leaves, or closed nodes, the one that goes first, and whose it is."""
        self.unfinished = False
        found: list[Any] | None = None
        whose = -1
        for i in takers:
            queue = self.shares[i].closed if closed else self.shares[i].leaves
            if not queue.queued:
                continue
            node = queue.victim()
            if node is None:
                self.unfinished = True
                return None, -1
            entry = node.cells[self.entry]
            if found is None or entry[:2] < found[:2]:
                found, whose = entry, i
        return (None, -1) if found is None else (found[NODE], whose)

    # -- the proof

    def check(self, holders: Iterator[Node], found: list[str]) -> Iterator[None]:
        kids: dict[Node, set[Node]] = {}
        known: list[Node] = []
        cached, locked = [0] * len(self.shares), [0] * len(self.shares)
        queued: dict[Ranked, int] = {}
        for node in holders:
            up = node.parent
            assert up is not None
            kids.setdefault(up, set()).add(node)
            known.append(node)
            yield
        for node in known:
            cells = node.cells
            if not cells:
                return  # it changed under our hands, and what we find is void
            tenant, num_pages = cells[self.tenant], len(cells[self.cell]) // SLOT_BYTES
            if not 0 <= tenant < len(self.shares):
                found.append(f"{node!r}: tenant {tenant} of {len(self.shares)}")
                continue
            cached[tenant] += num_pages
            locked[tenant] += num_pages if cells[self.lock] else 0
            below = kids.get(node, set())
            own = sum(child.cells[self.tenant] == tenant for child in below if child.cells)
            if (cells[self.kids], cells[self.own]) != (len(below), own):
                found.append(
                    f"{node!r}: {cells[self.kids]} children counted, {cells[self.own]} its own; {len(below)} have the "
                    f"cell, {own} its own"
                )
            linked: list[Node] = []
            child = cells[self.first]
            before = None
            while child is not None and child.cells and len(linked) <= len(below):
                if child.cells[self.left] is not before:
                    found.append(f"{node!r}: its children are not linked both ways at {child!r}")
                linked.append(child)
                before, child = child, child.cells[self.right]
            if set(linked) != below or len(linked) != len(below):
                found.append(f"{node!r}: {len(linked)} children linked, {len(below)} have the cell")
            entry = cells[self.entry]
            waits = not cells[self.lock] and not own
            queue = self._queue(cells)
            if (entry is not None) is not waits:
                found.append(f"{node!r}: queue and lock_ref {cells[self.lock]} disagree")
            elif entry is not None:
                queued[queue] = queued.get(queue, 0) + 1
                if entry[NODE] is not node or (entry[0], entry[1]) != self.key(node):
                    found.append(f"{node!r}: queued as {entry!r}")
            yield
        for number, share in enumerate(self.shares):
            if (share.cached, share.locked) != (cached[number], locked[number]):
                found.append(
                    f"tenant {number}: {share.cached} pages counted as cached, {share.locked} of them locked; there "
                    f"are {cached[number]} and {locked[number]}"
                )
            for queue in (share.leaves, share.closed):
                live = 0
                for heap in (queue.heap, queue.old):
                    for place, entry in enumerate(heap):
                        live += entry[NODE] is not None
                        if place and heap[(place - 1) // 2][:NODE] > entry[:NODE]:
                            found.append(f"tenant {number}: a heap is out of order at {place}")
                        yield
                if not queued.get(queue, 0) == live == queue.queued:
                    found.append(
                        f"tenant {number}: {queue.queued} entries counted, {live} are there, "
                        f"{queued.get(queue, 0)} nodes have one"
                    )
