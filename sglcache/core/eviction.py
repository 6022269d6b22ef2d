"""Which cached pages go first: one order of eviction per cell, with that cell's locks, and the facts that it asks for.

`Recency` is lru: a list through the nodes, which costs two links a lock and knows the next victim at once. `Ranked` is
every other policy: a heap of the evictable leaves by the policy's key. What both hold to:

* Only unlocked nodes go, and of these only leaves of the cell: no child there has the cell.
* Whatever is unlocked can be had, leaf by leaf. So free + evictable - pinned is exact, whatever the policy.
* There is no clock but the order's own count of what happened to it: equal programs evict alike.

What the keys are made of:

* **last access**: when the last lock was let go of. A lease, a pin and a copy of ours all lock, so a use is over, and
  counts, when its holder lets go; while it lasts the node can't go anyway.
* **creation**: when the pages came to the tier. A page that left it and comes back is new there.
* **hits, priority, history**: of the node, whichever tier its pages are in; see `Facts`.

A time does not change while the node is evictable. What is of the node mostly doesn't either, for a use locks; but it
may lock the node in one tier alone, and then the node is ranked anew in the other. So the key under which a leaf is
queued is the one that it has, and a heap need never be ordered anew. And what gets the same time gets it along one
path, so of two leaves with the same key one would be above the other: there are no ties.

A split copies all of it, so no page gets younger by it; nodes are joined only if all of it is alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Final, Protocol

from sglcache.core.key import TOKEN_BYTES
from sglcache.core.slots import SLOT_BYTES, SlotPool
from sglcache.errors import ConfigError

if TYPE_CHECKING:
    from sglcache.core.tree import Node


# -- policies ---------------------------------------------------------------------------------------------------------

POLICIES = ("lru", "lfu", "fifo", "mru", "filo", "priority", "slru", "tlru")


@dataclass(frozen=True)
class Policy:
    """One of POLICIES, with what slru (the first) and tlru (the other two, in tokens) are told besides."""

    name: str = "lru"
    protected_threshold: int = 2  # hits from which on a node is protected
    next_prompt_estimate: int = 0
    threshold: int = 0

    def __post_init__(self) -> None:
        if self.name not in POLICIES:
            raise ConfigError(f"eviction policy {self.name!r} is unknown; use one of {', '.join(POLICIES)}")


LRU = Policy()

Key = tuple[int, int]  # the smallest goes first
BY_CREATION = ("fifo", "filo")  # whose time is a creation; the others' is a last access
LOWEST = -(1 << 64)  # below every priority that a request can name


class Facts:
    """What is kept of a node behind its cells, and at which place of that list; 0: no policy asks for it.

    kids[c]     children that have cell c
    tenants[c]  with tenants, whose the pages of cell c are: see `shares`, which keeps some more places beside it
    hits        requests that had the node in what they committed, or in what they matched if they committed nothing
    priority    the highest that any of these had
    depth       tokens from the root to the node's end
    history     the deepest end that there ever was on this branch since the node came: it does not shrink with it
    """

    __slots__ = ("blank", "by_use", "depth", "history", "hits", "kids", "kinds", "links", "priority", "tenants")

    def __init__(self, policies: Sequence[Policy], count: int, hits: bool = False, tenants: bool = False) -> None:
        """`policies`: of the first of `count` cells; the others have none."""
        names = {policy.name for policy in policies}
        self.blank: list[Any] = [None] * count + [0] * count + [None] * (2 * count)  # the cells of a new node
        self.kids = [self._place(0) if tenants or policy.name != "lru" else 0 for policy in policies]
        self.tenants = [self._place(0) if tenants else 0 for _ in policies]
        # With tenants, of each cell: children of the same tenant, the first child, the neighbours among the children.
        self.links = [(self._place(0), *(self._place(None) for _ in range(3))) for _ in policies if tenants]
        self.hits = self._place(0) if hits or names & {"lfu", "slru"} else 0
        self.priority = self._place(LOWEST) if "priority" in names else 0
        self.depth = self._place(0) if "tlru" in names else 0
        self.history = self._place(0) if "tlru" in names else 0
        self.kinds = [place for place in (self.hits, self.priority, self.history) if place]
        self.by_use = bool(self.hits or self.priority)  # whether `used` has anything to note

    def _place(self, value: int | None) -> int:
        self.blank.append(value)
        return len(self.blank) - 1

    def alike(self, one: Node, other: Node) -> bool:
        left, right = one.cells, other.cells
        return all(left[place] == right[place] for place in self.kinds)


# -- orders -----------------------------------------------------------------------------------------------------------


class Order(Protocol):
    """The locks of one cell, and its unlocked nodes in the order in which they go."""

    policy: Policy
    effort: int  # of finding a victim and taking it out; lru's is 1

    def pin(self, node: Node | None, stop: Node | None = None) -> None:
        """lock_ref + 1 on every node from `node` up to the root (or up to and without `stop`).

        A cell that is being put is not in the order yet: the first pin after it takes it in.
        """
        ...

    def unpin(self, node: Node | None) -> None:
        """The mirror of `pin`, for a whole path; what becomes unlocked was last used now."""
        ...

    def victim(self) -> Node | None:
        """The next to go: unlocked, and a leaf of its cell. None: nothing can go, or ask again, for it took too long
        to find out."""
        ...

    def unlink(self, node: Node) -> None:
        """Out of the order, unlocked and a leaf; its cell is about to go."""
        ...

    def split(self, head: Node, tail: Node) -> None:
        """`head` was made above `tail`, of the upper part of its cell."""
        ...

    def alike(self, up: Node, low: Node) -> bool:
        """Whether nobody can tell a node and its only child, whose locks are alike, from one."""
        ...

    def join(self, top: Node, low: Node) -> None:
        """`low` takes the place of the chain that ends with it and begins with `top`."""
        ...

    def reset(self, pool: SlotPool) -> list[Any]:
        """Nothing is cached any more. What is left to be taken apart, an item at a time, if it is much."""
        ...

    def check(self, holders: Iterator[Node], found: list[str]) -> Iterator[None]:
        """Hold it against all nodes that have the cell, parents first; what is wrong, in words, is appended."""
        ...


class Recency:
    """lru: a ring through all unlocked nodes that have the cell, least recently used first.

    A lock 0→1 unlinks, 1→0 appends, always from the leaf to the root, and a pin is a whole path: so a child stands
    before its parent, and the first is a leaf. No heap, no clock, no set of leaves.
    """

    __slots__ = ("_places", "cell", "effort", "end", "fresher", "lock", "older", "policy", "pool")

    def __init__(self, cell: int, num_cells: int, pool: SlotPool, end: Node) -> None:
        """`end`: a node that is in no tree; fresher than it is the oldest, older than it the freshest."""
        self.policy = LRU
        self.effort = 1
        self.cell = cell
        self.lock, self.older, self.fresher = (stride * num_cells + cell for stride in (1, 2, 3))
        self._places = cell, self.lock, self.older, self.fresher
        self.end = end
        self.reset(pool)

    def reset(self, pool: SlotPool) -> list[Any]:
        self.pool = pool
        self.end.cells[self.older] = self.end.cells[self.fresher] = self.end
        return []

    def pin(self, node: Node | None, stop: Node | None = None) -> None:
        cell, lock, older, fresher = self._places
        locked = 0
        while node is not stop and node is not None:
            parent = node.parent
            if parent is None:
                break
            cells = node.cells
            count = cells[lock]
            cells[lock] = count + 1
            if not count:
                left = cells[older]
                if left is not None:  # a cell that is being put has not been in the list yet
                    left.cells[fresher] = right = cells[fresher]
                    right.cells[older] = left
                    cells[older] = cells[fresher] = None
                locked += len(cells[cell])
            node = parent
        if locked:
            self.pool.locked += locked // SLOT_BYTES

    def unpin(self, node: Node | None) -> None:
        cell, lock, older, fresher = self._places
        end = self.end
        last = end.cells[older]
        unlocked = 0
        while node is not None:
            parent = node.parent
            if parent is None:
                break
            cells = node.cells
            cells[lock] = count = cells[lock] - 1
            if not count:
                cells[older] = last
                last.cells[fresher] = node
                last = node
                unlocked += len(cells[cell])
            node = parent
        if unlocked:
            last.cells[fresher] = end
            end.cells[older] = last
            self.pool.locked -= unlocked // SLOT_BYTES

    def victim(self) -> Node | None:
        node: Node = self.end.cells[self.fresher]
        return None if node.parent is None else node

    def unlink(self, node: Node) -> None:
        _, _, older, fresher = self._places
        cells = node.cells
        left, right = cells[older], cells[fresher]
        left.cells[fresher] = right
        right.cells[older] = left
        cells[older] = cells[fresher] = None

    def split(self, head: Node, tail: Node) -> None:
        """As old as the tail, and right behind it."""
        below = tail.cells
        fresher = below[self.fresher]
        if fresher is not None:
            above = head.cells
            below[self.fresher] = head
            above[self.older] = tail
            above[self.fresher] = fresher
            fresher.cells[self.older] = head

    def alike(self, up: Node, low: Node) -> bool:
        """Neighbours: nothing can go between the two. Locked ones will be when they are unlocked together."""
        fresher = low.cells[self.fresher]
        return fresher is up or fresher is None

    def join(self, top: Node, low: Node) -> None:
        fresher = top.cells[self.fresher]
        if fresher is not None:
            low.cells[self.fresher] = fresher
            fresher.cells[self.older] = low

    def check(self, holders: Iterator[Node], found: list[str]) -> Iterator[None]:
        yield from self._check(holders, found, lone=False)

    def _check(self, holders: Iterator[Node], found: list[str], lone: bool) -> Iterator[None]:
        """`lone`: a node may go before its descendants."""
        places: dict[Node, int] = {}
        before, node = self.end, self.end.cells[self.fresher]
        while node is not self.end:
            if node in places:
                found.append(f"eviction list runs in a circle at {node!r}")
                return
            if node.cells[self.older] is not before:
                found.append(f"eviction list is broken before {node!r}")
            places[node] = len(places)
            before, node = node, node.cells[self.fresher]
            yield
            if not node.cells:
                return  # it changed under our hands, and what we find is void
        unlocked = 0
        for node in holders:
            if not node.cells:
                return
            lock = node.cells[self.lock]
            unlocked += lock == 0
            if (node in places) is not (lock == 0):
                found.append(f"{node!r}: eviction list and lock_ref {lock} disagree")
            elif not lone and node in places and places.get(node.parent or node, 1 << 62) < places[node]:
                found.append(f"{node!r}: evicted after its parent")
            yield
        if len(places) != unlocked:
            found.append(f"eviction list: {len(places)} nodes are in it, {unlocked} could be evicted")


class Places(Recency):
    """A companion's: a ring through all nodes that have the cell and are not locked, least recently used first.

    Any of them may go, alone: presence is not prefix-closed. A lock is on a place, whether its cell is there or not,
    and a holder locks the last so many bytes of the path that it holds of Full: the boundary is between nodes, since
    a split divides a lock, and no two nodes are joined of which one is locked by fewer.
    """

    __slots__ = ()

    def hold(self, node: Node | None, num_bytes: int) -> None:
        """lock_ref + 1 on so many bytes of the path that ends with `node`; of what is by end, 1 is the node's own."""
        cell, lock, older, fresher = self.cell, self.lock, self.older, self.fresher
        locked = 0
        while num_bytes > 0:
            assert node is not None
            cells = node.cells
            if cells[lock] == 0 and cells[cell] is not None:
                left, right = cells[older], cells[fresher]
                left.cells[fresher] = right
                right.cells[older] = left
                cells[older] = cells[fresher] = None
                locked += len(cells[cell])
            cells[lock] += 1
            num_bytes -= node.num_bytes
            node = node.parent
        self.pool.locked += locked // SLOT_BYTES

    def let_go(self, node: Node | None, num_bytes: int, needless: bool = False) -> None:
        """The mirror of `hold`; what is there and becomes unlocked was last used now, or `needless`: the next to go."""
        lock, cell = self.lock, self.cell
        unlocked = 0
        while num_bytes > 0:
            assert node is not None
            cells = node.cells
            cells[lock] -= 1
            assert cells[lock] >= 0, f"{node!r} is let go of twice"
            if cells[lock] == 0 and cells[cell] is not None:
                self._link(node, self.end if needless else self.end.cells[self.older])
                unlocked += len(cells[cell])
            num_bytes -= node.num_bytes
            node = node.parent
        self.pool.locked -= unlocked // SLOT_BYTES

    def put(self, node: Node) -> None:
        """Its cell came: it is the freshest, or locked as its place is."""
        if node.cells[self.lock]:
            self.pool.locked += len(node.cells[self.cell]) // SLOT_BYTES
        else:
            self._link(node, self.end.cells[self.older])

    def withdraw(self, node: Node) -> None:
        """The mirror of `put`, before the cell goes: its place may be locked."""
        if node.cells[self.lock]:
            self.pool.locked -= len(node.cells[self.cell]) // SLOT_BYTES
        else:
            self.unlink(node)

    def _link(self, node: Node, older: Node) -> None:
        """Into the ring, right behind `older`."""
        cells, fresher = node.cells, older.cells[self.fresher]
        cells[self.older] = older
        cells[self.fresher] = fresher
        older.cells[self.fresher] = node
        fresher.cells[self.older] = node

    def join(self, top: Node, low: Node) -> None:
        """The upper place is kept: where the two are not neighbours the lower pages are worth no more than it."""
        if low.cells[self.fresher] is None:
            return
        node: Node | None = low
        while node is not top:
            assert node is not None
            self.unlink(node)
            node = node.parent
        above, below = top.cells, low.cells
        left, right = above[self.older], above[self.fresher]
        below[self.older], below[self.fresher] = left, right
        left.cells[self.fresher] = low
        right.cells[self.older] = low

    def check(self, holders: Iterator[Node], found: list[str]) -> Iterator[None]:
        yield from self._check(holders, found, lone=True)


# An entry of a heap: [key's first part, key's second, number, node]. The number is the entry's own, so that no two are
# alike; without a node it is stale, and thrown away when it comes to the top or the heap is renewed.
NODE: Final = 3
SWEEP = 4  # entries of the old heap that a push moves to the new one
DISCARD = 4  # stale entries that one look for a victim throws away
SLACK = 64  # stale entries that are no reason for anything


class Ranked:
    """Every other policy: a heap of the evictable leaves of the cell, by the policy's key.

    A leaf is pushed when it becomes evictable: a path to it is unlocked, or its last child went. A lock makes its entry
    stale. When more are stale than not the heap is renewed, a few entries with each push, so that no call pays for it:
    what is at the end of the old heap's list can be taken off it, and it is a heap still.
    """

    __slots__ = (
        "cell",
        "clock",
        "effort",
        "entry",
        "facts",
        "heap",
        "key",
        "kids",
        "lock",
        "number",
        "old",
        "policy",
        "pool",
        "queued",
        "recent",
        "time",
    )

    def __init__(self, policy: Policy, cell: int, num_cells: int, pool: SlotPool, facts: Facts) -> None:
        self.policy = policy
        self.effort = 3
        self.key: Callable[[Node], Key] = getattr(self, f"_{policy.name}")
        self.recent = policy.name not in BY_CREATION
        self.cell = cell
        self.lock, self.entry, self.time = (stride * num_cells + cell for stride in (1, 2, 3))
        self.facts = facts
        self.kids = facts.kids[cell]
        self.clock = 0
        self.number = 0
        self.heap: list[list[Any]] = []
        self.old: list[list[Any]] = []
        self.reset(pool)

    def reset(self, pool: SlotPool) -> list[Any]:
        garbage = [self.heap, self.old]
        self.pool = pool
        self.queued = 0  # entries that are not stale
        self.heap, self.old = [], []
        return garbage

    # -- the policies' keys

    def _lfu(self, node: Node) -> Key:
        return node.cells[self.facts.hits], node.cells[self.time]

    def _fifo(self, node: Node) -> Key:
        return 0, node.cells[self.time]

    def _lru(self, node: Node) -> Key:  # where there are tenants: the time is an access
        return 0, node.cells[self.time]

    def _mru(self, node: Node) -> Key:
        return 0, -node.cells[self.time]

    def _filo(self, node: Node) -> Key:
        return 0, -node.cells[self.time]

    def _priority(self, node: Node) -> Key:
        return node.cells[self.facts.priority], node.cells[self.time]

    def _slru(self, node: Node) -> Key:
        return int(node.cells[self.facts.hits] >= self.policy.protected_threshold), node.cells[self.time]

    def _tlru(self, node: Node) -> Key:
        """What lies beyond the prompt that is to be expected on this branch goes before the rest."""
        cells, facts, policy = node.cells, self.facts, self.policy
        before = cells[facts.depth] - node.num_bytes // TOKEN_BYTES
        budget = max(cells[facts.history] + policy.next_prompt_estimate - policy.threshold, 0)
        return -1 if before >= budget else 0, cells[self.time]

    # -- the heap

    def pin(self, node: Node | None, stop: Node | None = None) -> None:
        cell, lock, entry = self.cell, self.lock, self.entry
        self.clock += 1
        locked = 0
        while node is not stop and node is not None and node.parent is not None:
            cells = node.cells
            count = cells[lock]
            cells[lock] = count + 1
            if count == 0:
                queued = cells[entry]
                if queued is not None:
                    queued[NODE] = cells[entry] = None
                    self.queued -= 1
                elif cells[self.time] is None:
                    self._put(node)
                locked += len(cells[cell])
            node = node.parent
        self.pool.locked += locked // SLOT_BYTES

    def _put(self, node: Node) -> None:
        """Its pages came to the tier with this pin: all of a path at the same time."""
        node.cells[self.time] = self.clock
        parent = node.parent
        assert parent is not None
        if parent.parent is not None:
            parent.cells[self.kids] += 1

    def unpin(self, node: Node | None) -> None:
        if node is None or node.parent is None:
            return
        cell, lock = self.cell, self.lock
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
                unlocked += len(cells[cell])
            up = up.parent
        self.pool.locked -= unlocked // SLOT_BYTES
        cells = node.cells
        if not cells[lock] and not cells[self.kids]:
            self._push(node)

    def _push(self, node: Node) -> None:
        """It has become evictable."""
        first, second = self.key(node)
        self.number += 1
        entry = [first, second, self.number, node]
        node.cells[self.entry] = entry
        self.queued += 1
        heappush(self.heap, entry)
        old = self.old
        if old:
            for _ in range(min(SWEEP, len(old))):
                entry = old.pop()
                if entry[NODE] is not None:
                    heappush(self.heap, entry)
        elif len(self.heap) > 2 * self.queued + SLACK:
            self.old, self.heap = self.heap, []

    def victim(self) -> Node | None:
        left = DISCARD
        for heap in (self.heap, self.old):
            while heap and heap[0][NODE] is None:
                if not left:
                    return None
                left -= 1
                heappop(heap)
        heap, old = self.heap, self.old
        if old and (not heap or old[0] < heap[0]):
            heap = old
        found: Node | None = heap[0][NODE] if heap else None
        return found

    def unlink(self, node: Node) -> None:
        cells = node.cells
        self._forget(cells)
        cells[self.time] = None
        parent = node.parent
        assert parent is not None
        if parent.parent is not None:
            above = parent.cells
            above[self.kids] -= 1
            if not above[self.kids] and not above[self.lock]:
                self._push(parent)

    def _forget(self, cells: list[Any]) -> None:
        cells[self.entry][NODE] = None
        cells[self.entry] = None
        self.queued -= 1

    def split(self, head: Node, tail: Node) -> None:
        """All as the tail's; the tail begins further from the root, which is part of a tlru's key."""
        above = head.cells
        above[self.entry] = None
        above[self.kids] = 1
        self.changed(tail)

    def changed(self, node: Node) -> None:
        """Something of the node that its key may be made of is not as it was."""
        entry = node.cells[self.entry]
        if entry is not None and self.key(node) != (entry[0], entry[1]):
            self._forget(node.cells)
            self._push(node)

    def alike(self, up: Node, low: Node) -> bool:
        """On the same side of what the policy divides, and of the same time: the upper goes right after the lower.

        Of locked ones it is the access that is to come.
        """
        above, below = self.key(up), self.key(low)
        return above == below or (self.recent and low.cells[self.lock] > 0 and above[0] == below[0])

    def join(self, top: Node, low: Node) -> None:
        pass

    def check(self, holders: Iterator[Node], found: list[str]) -> Iterator[None]:
        kids: dict[Node, int] = {}
        known: list[Node] = []
        queued = 0
        for node in holders:
            up = node.parent
            assert up is not None
            kids[up] = kids.get(up, 0) + 1
            known.append(node)
            yield
        for node in known:
            cells = node.cells
            if not cells:
                return  # it changed under our hands, and what we find is void
            if cells[self.kids] != kids.get(node, 0):
                found.append(f"{node!r}: {cells[self.kids]} children counted, {kids.get(node, 0)} have the cell")
            entry = cells[self.entry]
            evictable = not cells[self.lock] and node not in kids
            queued += entry is not None
            if (entry is not None) is not evictable:
                found.append(f"{node!r}: eviction heap and lock_ref {cells[self.lock]} disagree")
            elif entry is not None and (entry[NODE] is not node or (entry[0], entry[1]) != self.key(node)):
                found.append(f"{node!r}: eviction heap has it as {entry!r}")
            yield
        live = 0
        for heap in (self.heap, self.old):
            for place, entry in enumerate(heap):
                live += entry[NODE] is not None
                if place and heap[(place - 1) // 2][:NODE] > entry[:NODE]:
                    found.append(f"eviction heap is out of order at {place}")
                yield
        if not queued == live == self.queued:
            found.append(f"eviction heap: {self.queued} entries counted, {live} are there, {queued} nodes have one")


def orders(
    policies: Sequence[Policy],
    pools: Sequence[SlotPool],
    facts: Facts,
    end: Callable[[], Node],
    shared: Callable[[Policy, int, int, SlotPool, Facts], Order] | None = None,
) -> list[Order]:
    """One for each pool's cell, the first by these policies, of companions `Places`. `end`: makes nodes of no tree;
    `shared`: orders of cells that tenants share."""
    count = len(pools)
    made: list[Order] = []
    for c, policy in enumerate(policies):
        if shared is not None:
            made.append(shared(policy, c, count, pools[c], facts))
        elif policy.name == "lru":
            made.append(Recency(c, count, pools[c], end()))
        else:
            made.append(Ranked(policy, c, count, pools[c], facts))
    return made + [Places(c, count, pools[c], end()) for c in range(len(policies), count)]
