"""The prefix tree: nodes, their cells, splitting, merging, locks, and the order of eviction.

A node is an edge-compressed run of pages of one namespace. It carries one cell per (resource, tier), kept in one
flat list, `cells`, of four strides of C (the number of cells), and then what the policies of eviction ask for beside:

    cells[c]        the slots, packed int32; None: absent
    cells[C + c]    lock_ref
    cells[2C + c]   the cell's order of eviction keeps its place here,
    cells[3C + c]   and here (see `eviction`)
    cells[4C:]      see `eviction.Facts`; of lru nothing

A list and no Cell objects: half the memory, and one attribute lookup for a node's whole state. `writing` is a bit
mask of cells whose bytes a copy of ours is still bringing.

The laws of this file:

* Presence is prefix-closed in each cell: a node with a cell has it on every ancestor. A pin locks a whole path.
* A split is silent. The tail keeps its identity, so whoever holds (end node, number of pages) need not be told;
  the head is as old as the tail.
* Every node stands in one more ring, behind its parent. A `Walk` is a bookmark in it, so it can stop for as long as it
  likes while the tree goes on changing: what was there when it began and still is there at its end, it has met.
* A node has two stamps, in seconds of `Tree.now`: `born`, when the first of its pages came, and `used`, when it was
  last let go of by a lease or a pin that ended with it. One that goes farther says so at its own end alone, and what
  leaves a tier hands `used` to its parent. So the last access to a node is the latest `used` at or below it: of a leaf
  its own. A split copies both; of nodes that are joined the earlier birth and the later use stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sglcache.core import eviction
from sglcache.core.eviction import Facts, Order, Policy, Ranked
from sglcache.core.key import TOKEN_BYTES, Keys, Namespace, common_bytes
from sglcache.core.slots import SlotPool

if TYPE_CHECKING:
    from sglcache.core.encoding import Extras
    from sglcache.core.eventlog import Hashes
    from sglcache.core.resources import Resource

K = TypeVar("K")
V = TypeVar("V")


class Node:
    """A run of pages under one parent."""

    __slots__ = (
        "_skip",
        "_text",
        "ahead",
        "behind",
        "born",
        "cells",
        "children",
        "hashes",
        "num_bytes",
        "parent",
        "space",
        "used",
        "was",
        "writing",
    )
    __deletable__ = ("ahead", "behind")

    _text: bytes
    _skip: int
    num_bytes: int  # of the pages' own tokens
    # The neighbours in the ring of all nodes, towards its start and its end. Of a root, none.
    ahead: Node
    behind: Node
    # Set where departures are kept. Of one that left the tree: what it hung on; of one that was joined to another: the
    # other, and how many bytes before its end the end of this one is.
    was: Node | tuple[Node, int]

    def __init__(self, space: Space, parent: Node | None, key: bytes, cells: list[Any], now: float = 0.0) -> None:
        self.born = self.used = now  # see `Tree.now`
        self.space = space
        self.parent = parent  # None: a namespace's root, which has no cells
        self._text = key
        self._skip = 0
        self.num_bytes = len(key) - space.over if key else 0
        # None, a lone child itself, or a table by first page: most nodes have one child, and need no hash for it.
        self.children: Node | dict[bytes, Node] | Fanout[bytes, Node] | None = None
        self.cells = cells
        self.writing = 0
        self.hashes: Hashes | None = None

    @property
    def key(self) -> bytes:
        """The run: uint32 little-endian, whole pages, and with bigram keys the token behind them."""
        skip = self._skip
        if skip:
            self._text = self._text[skip : skip + self.num_bytes + self.space.over]
            self._skip = 0
        return self._text

    @key.setter
    def key(self, key: bytes) -> None:
        self._text = key
        self._skip = 0
        self.num_bytes = len(key) - self.space.over if key else 0

    @property
    def text(self) -> tuple[bytes, int, int]:
        """Where the run lies, as it does: a text, and from which byte to which. No copy is made for it."""
        skip = self._skip
        return self._text, skip, skip + self.num_bytes + self.space.over

    def lie_in(self, text: bytes, start: int, end: int) -> None:
        """Have the pages in `text[start:end]` for a key, copied when someone first asks for it.

        Most leaves are evicted before anyone does, and on a long prompt the copy is half of a commit. The text is kept
        whole until then: only where what lies around the key is an eighth of it at most.
        """
        self.num_bytes = size = end - start
        if start and (len(text) - size) * 8 <= size:
            self._text = text
            self._skip = start
        else:
            end += self.space.over
            # A slice of the whole is no copy, except where this is compiled.
            self._text = text[start:end] if start or end != len(text) else text
            self._skip = 0

    def first(self, num_bytes: int) -> bytes:
        """The beginning of `key`, without making one."""
        text, skip = self._text, self._skip
        return text[skip : skip + num_bytes] if skip or num_bytes != len(text) else text

    def __repr__(self) -> str:
        runs = [cell for cell in self.cells if isinstance(cell, bytes)]
        return f"Node({self.num_bytes // TOKEN_BYTES} tokens, cells={runs})"


class Space:
    """One namespace: its root, and what its pages' hashes begin with."""

    __slots__ = ("extras", "namespace", "over", "root", "seed")

    def __init__(self, namespace: Namespace, seed: bytes, extras: Extras | None, over: int) -> None:
        self.namespace = namespace
        self.over = over  # see Keys
        self.seed = seed
        self.extras = extras  # what routers know it by; None: they are not told of it
        self.root = Node(self, None, b"", [])


class Fanout(Generic[K, V]):
    """A dict in 256 parts: growing a flat one of a million keys stalls for 50 ms, a part of it for 0.2."""

    __slots__ = ("_count", "_parts")

    def __init__(self, items: dict[K, V]) -> None:
        self._parts: list[dict[K, V]] = [{} for _ in range(256)]
        self._count = 0
        for key, value in items.items():
            self[key] = value

    def get(self, key: K) -> V | None:
        return self._parts[hash(key) & 255].get(key)

    def __setitem__(self, key: K, value: V) -> None:
        part = self._parts[hash(key) & 255]
        self._count += key not in part
        part[key] = value

    def __delitem__(self, key: K) -> None:
        del self._parts[hash(key) & 255][key]
        self._count -= 1

    def __len__(self) -> int:
        return self._count

    def pop(self) -> V | None:
        """Take some value out; None once it is empty. For taking a large table apart bit by bit."""
        while self._parts:
            if self._parts[-1]:
                self._count -= 1
                return self._parts[-1].popitem()[1]
            self._parts.pop()
        return None

    def values(self) -> Iterator[V]:
        return chain.from_iterable(
            map(dict.values, filter(None, self._parts))
        )  # of a few keys it is mostly empty parts


FANOUT = 2048  # a table of children larger than this is a Fanout


class Tree:
    """The nodes of all namespaces, with one pool and one order of eviction per cell.

    `resources[c]` answers for cell c, `orders[c]` has its locks. Nothing here emits an event or frees a slot: the
    caller changes presence.
    """

    def __init__(
        self,
        keys: Keys,
        resources: list[Resource],
        pools: list[SlotPool],
        policies: Sequence[Policy],
        hits: bool = False,
        shared: Callable[[Policy, int, int, SlotPool, Facts], Order] | None = None,
    ) -> None:
        """`policies`: of Full, one a tier; the cells beyond are companions', which have none.

        `pools` stays the caller's: it may put others there before `drop_all`. `hits`: they are counted anyway.
        `shared`: makes orders of eviction for Full's cells, where tenants share them.
        """
        self.page_bytes = keys.page_bytes
        self.over = keys.over
        self.span = keys.span
        self.resources = resources
        self.pools = pools
        self.C = len(pools)
        self.T = len(policies)  # tiers: cells 0..T-1 are Full's
        self.by_end = [resource.by_end for resource in resources]
        self.ends = [c for c, by_end in enumerate(self.by_end) if by_end]  # cells
        self.facts = Facts(policies, self.C, hits, tenants=shared is not None)
        self.spaces: Fanout[Namespace, Space] = Fanout({})
        self.num_nodes = 0
        self.num_splits = self.num_merges = 0
        self.remembers = False  # whether nodes keep `was`
        self.now = 0.0  # seconds on the caller's clock: see `Index.now`
        self.nowhere = nowhere = Space(Namespace(), b"", None, keys.over)  # what dropped roots belong to
        self.orders = eviction.orders(
            policies, pools, self.facts, lambda: Node(nowhere, None, b"", self.facts.blank.copy()), shared
        )
        self.runs = [(c, order) for c, order in enumerate(self.orders) if not self.by_end[c]]
        self._ranked = [order for order in self.orders if isinstance(order, Ranked)]
        self.start = self._ring()

    def drop_all(self) -> list[Any]:
        """Forget every node, and have the caller take apart what is returned. Every walk is over."""
        garbage: list[Any] = [self.spaces]
        self.spaces = Fanout({})
        self.num_nodes = 0
        self.start = self._ring()
        for order, pool in zip(self.orders, self.pools, strict=True):
            garbage += order.reset(pool)
        return garbage

    def _ring(self) -> Node:
        start = Node(self.nowhere, None, b"", [])
        start.ahead = start.behind = start
        return start

    # -- children -----------------------------------------------------------------------------------------

    def child(self, node: Node, key: bytes, start: int) -> Node | None:
        """The child whose first page is the one at `key[start:]`."""
        children = node.children
        if children is None:
            return None
        span = self.span
        if type(children) is Node:
            return children if key.startswith(children.first(span), start) else None
        return children.get(key[start : start + span])  # type: ignore[union-attr]

    def children(self, node: Node) -> Iterator[Node]:
        children = node.children
        if children is None:
            return
        if type(children) is Node:
            yield children
        else:
            yield from children.values()  # type: ignore[union-attr]

    def add(self, parent: Node, text: bytes, start: int = 0, end: int | None = None) -> Node:
        """A new node of the pages in `text[start:end]`, without any cell, under `parent`: no child starts alike there.

        None: the whole text is the run.
        """
        facts = self.facts
        node = Node(parent.space, parent, b"", facts.blank.copy(), self.now)
        node.lie_in(text, start, len(text) - self.over if end is None else end)
        if facts.depth:
            self._deepened(node)
        children = parent.children
        if children is None:
            parent.children = node
        else:
            span = self.span
            if type(children) is Node:
                children = parent.children = {children.first(span): children}
            elif len(children) == FANOUT and type(children) is dict:  # type: ignore[arg-type]
                children = parent.children = Fanout(children)
            children[node.first(span)] = node  # type: ignore[index]
        ring = self.start
        last = node.ahead = ring.ahead
        node.behind = ring
        last.behind = ring.ahead = node
        self.num_nodes += 1
        return node

    def remove(self, node: Node) -> None:
        """Take out a node that has no cell, lock or child left."""
        parent = node.parent
        assert parent is not None
        assert node.children is None
        children = parent.children
        if type(children) is Node:
            children = parent.children = None
        else:
            del children[node.first(self.span)]  # type: ignore[union-attr]
            if len(children) == 1:  # type: ignore[arg-type]
                parent.children = next(iter(children.values()))  # type: ignore[union-attr]
        node.parent = None
        _leave(node)
        self.num_nodes -= 1
        if children is None and parent.parent is None:
            del self.spaces[node.space.namespace]
            parent.space = self.nowhere  # root and space refer to each other: nothing is left for the collector

    # -- structure ----------------------------------------------------------------------------------------

    def common_pages(self, run: bytes, key: bytes, start: int, end: int) -> int:
        """Bytes, whole pages, in which a node's run agrees with the pages in `key[start:end]`."""
        same = common_bytes(run, key, start, end + self.over) - self.over
        return same - same % self.page_bytes if same > 0 else 0

    def split(self, node: Node, at: int) -> Node:
        """Cut `node` at byte `at` of its pages, a page's end inside it; the new upper half. Emits nothing.

        Pins, slot slices, hashes, what is being written and what policies ask for go to both halves.
        """
        parent = node.parent
        assert parent is not None
        assert 0 < at < node.num_bytes, f"split at {at} of {node.num_bytes}"
        cells = node.cells
        above = cells.copy()  # what is not said otherwise is alike
        key = node.key
        head = Node(node.space, parent, key[: at + self.over], above, node.born)
        head.used = node.used
        node.key = key[at:]
        num_pages = at // self.page_bytes
        children = parent.children
        if type(children) is Node:
            parent.children = head
        else:
            children[head.key[: self.span]] = head  # type: ignore[index]
        head.children = node
        node.parent = head
        ahead = head.ahead = node.ahead
        head.behind = node
        ahead.behind = node.ahead = head
        head.writing = node.writing
        depth = self.facts.depth
        if depth:
            above[depth] -= node.num_bytes // TOKEN_BYTES
        for c, order in self.runs:
            run = cells[c]
            if run is not None:
                above[c], cells[c] = self.resources[c].split(run, num_pages)
                order.split(head, node)
        for c in self.ends:  # it is of the end, with its lock and what writes it
            above[c], above[self.C + c] = None, 0
            above[2 * self.C + c] = above[3 * self.C + c] = None
            head.writing &= ~(1 << c)
        hashes = node.hashes
        if hashes is None:
            pass
        elif isinstance(hashes, bytes):
            cut = len(hashes) // ((node.num_bytes + at) // self.page_bytes) * num_pages
            head.hashes, node.hashes = hashes[:cut], hashes[cut:]
        else:
            middle = hashes.start + num_pages
            head.hashes = hashes._replace(stop=middle)
            node.hashes = hashes._replace(start=middle)
            hashes.chain.nodes.append(head)
        self.num_nodes += 1
        self.num_splits += 1
        return head

    def merge(self, node: Node, limit: int = 16, within: int | None = None) -> int:
        """Join `node` with the ancestors that differ from it in nothing, at most `limit` of them; how many.

        A parent is joined if `node` is its only child, their cells are alike, nothing writes either, whoever locks the
        one locks the other, and no order of eviction can tell the two from one. Silent. While they are locked a longer
        one waits until what would join it has grown: so of a prompt that is committed and copied piece by piece each
        byte is moved a few times, and the path that each copy locks stays short.

        `within`: of the last so many bytes only, and of companions the order is no reason against it, the upper
        place is kept: so the pages that a lease has slid past, one by one, become one node.
        """
        parent = node.parent
        if parent is None or parent.parent is None or parent.children is not node or node.writing:
            return 0  # mostly
        C = self.C  # noqa: N806
        cells = node.cells
        digests = type(node.hashes)
        chain = [node]
        low = node
        num_bytes = node.num_bytes
        locked = any(cells[C : 2 * C])
        while len(chain) <= limit:
            up = low.parent
            if up is None or up.parent is None or up.children is not low:
                break
            if up.writing or type(up.hashes) is not digests or not self._alike(up, low, within is not None):
                break
            if locked and up.num_bytes > 2 * num_bytes:
                break
            if within is not None and num_bytes + up.num_bytes > within:
                break
            chain.append(up)
            low = up
            num_bytes += up.num_bytes
        if len(chain) == 1 or (node.hashes is not None and not isinstance(node.hashes, bytes)):
            return 0
        top = chain[-1]
        chain.reverse()
        old_first = top.key[: self.span]
        parent = top.parent
        assert parent is not None
        for c, order in self.runs:  # of what is by end none above has any
            if cells[c] is not None:
                cells[c] = self.resources[c].join([each.cells[c] for each in chain])
                order.join(top, node)
        if self.over:  # which the next one begins with
            node.key = b"".join([*[each.key[: each.num_bytes] for each in chain[:-1]], node.key])
        else:
            node.key = b"".join([each.key for each in chain])
        if node.hashes is not None:
            node.hashes = b"".join([each.hashes for each in chain])  # type: ignore[misc]
        children = parent.children
        if type(children) is Node:
            parent.children = node
        else:
            children[old_first] = node  # type: ignore[index]
        node.parent = parent
        for each in chain[:-1]:  # no cycles are left behind for the collector
            if each.born < node.born:
                node.born = each.born
            if each.used > node.used:
                node.used = each.used
            each.parent = each.children = None
            each.cells = []
            if self.remembers:
                num_bytes -= each.num_bytes
                each.was = node, num_bytes
                each._text = b""
                each._skip = 0
            _leave(each)
        self.num_nodes -= len(chain) - 1
        self.num_merges += len(chain) - 1
        return len(chain) - 1

    # -- what policies ask for ------------------------------------------------------------------------------

    def used(self, node: Node | None, stop: Node | None, priority: int) -> None:
        """A hit, by a request of this priority, for each node from `node` up to and without `stop`."""
        hits, place = self.facts.hits, self.facts.priority
        while node is not stop and node is not None and node.parent is not None:
            cells = node.cells
            if hits:
                cells[hits] += 1
            if place and cells[place] < priority:
                cells[place] = priority
            self._changed(node)
            node = node.parent

    def _deepened(self, node: Node) -> None:
        """A new node hangs on its parent: how far from the root the branch goes now."""
        depth, history = self.facts.depth, self.facts.history
        parent = node.parent
        assert parent is not None
        end = node.num_bytes // TOKEN_BYTES
        if parent.parent is not None:
            end += parent.cells[depth]
        node.cells[depth] = end
        up: Node | None = node
        while up is not None and up.parent is not None and up.cells[history] < end:
            up.cells[history] = end
            self._changed(up)
            up = up.parent

    def _changed(self, node: Node) -> None:
        for order in self._ranked:
            order.changed(node)

    def _alike(self, up: Node, low: Node, slid: bool) -> bool:
        """Equal counts are equal holders: who holds a node holds its parent, and who ends at the parent does not.

        Of a companion a holder holds the last pages of what it holds of Full, as many as it needs: so among holders of
        the same pages of Full, who holds the upper node's holds the lower one's.
        """
        above, below, C = up.cells, low.cells, self.C  # noqa: N806
        for c in self.ends:
            if above[c] is not None or above[C + c]:
                return False
        for c, order in self.runs:
            if above[C + c] != below[C + c] or (above[c] is None) is not (below[c] is None):
                return False
            if above[c] is not None and not (slid and c >= self.T) and not order.alike(up, low):
                return False
        return not self.facts.kinds or self.facts.alike(up, low)

    def nodes(self) -> Iterator[Node]:
        """Every node, parents first, without recursion."""
        for space in self.spaces.values():
            stack = list(self.children(space.root))
            while stack:
                node = stack.pop()
                yield node
                stack.extend(self.children(node))


def _leave(node: Node) -> None:
    """Out of the ring of all nodes, and no reference left to it."""
    ahead, behind = node.ahead, node.behind
    ahead.behind = behind
    behind.ahead = ahead
    del node.ahead, node.behind


class Walk:
    """All nodes, parents first, over a tree that changes meanwhile: a bookmark in the ring of nodes.

    A node that is there from the beginning of the walk to its end is met; one that a split makes is met where its other
    half still is to be; one that joins others is met behind where they were. So a node may be met again with pages
    that were met before, and new ones are met too, since they stand at the end.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._start = tree.start
        self._mark = mark = Node(tree.nowhere, None, b"", [])
        mark.ahead = start = tree.start
        mark.behind = start.behind
        start.behind.ahead = mark
        start.behind = mark

    @property
    def over(self) -> bool:
        """The tree was dropped, or the walk closed."""
        return self._start is not self._tree.start

    def peek(self) -> Node | None:
        """The next node; None at the end, or if it is over."""
        if self.over:
            return None
        node = self._mark.behind
        while node.parent is None and node is not self._start:  # another walk's mark
            node = node.behind
        return None if node is self._start else node

    def advance(self, node: Node) -> None:
        """`node`, as just peeked, was met."""
        mark = self._mark
        _leave(mark)
        mark.ahead = node
        behind = mark.behind = node.behind
        node.behind = behind.ahead = mark

    def close(self) -> None:
        """Idempotent."""
        if not self.over:
            _leave(self._mark)
            self._start = self._mark
