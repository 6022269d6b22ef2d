"""How large each branch of the tree is, and what of it to draw: for people who look at a tree of any size.

Nothing here is counted as the tree changes, so who does not look pays nothing. While somebody does, a *census* goes
through the ring of all nodes from its end, where children stand before their parents, and adds each node to its
parent: a slice at a time (`step`), over a tree that goes on changing. A *picture* is the largest branches of what it
found, and of each node that is drawn the rest is known as a sum.

What a census says of a tree that nobody changes meanwhile is exact. Of one that changes it is a mixture of then and
now: a node that splits, joins or leaves behind the census may be missing or twice in a sum above it, until the next.
Nothing else of the index asks this file.

Names of nodes are numbers, given out with a picture and never used twice in one life. A node that splits stays its
lower half, one that joins others is the lowest of them; a name of one that is no more, or that no picture had for a
while, is `gone`.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from sglcache.core.key import Namespace
from sglcache.core.tree import Node

if TYPE_CHECKING:
    from sglcache.core.index import Index

SLICE = 500  # nodes counted at once, or what costs as much: under 1 ms, where memory is cold
ROW_COST = 4  # of a node that is drawn, in nodes counted
PARTS = 251  # of the table of sums: one large one that grows would stall the loop; a prime, for addresses have a stride
SHARE = 12  # a branch of less than 2**-12 of all pages is not kept by itself
MOST_KEPT = 1 << 15  # branches: with more, only larger ones are kept
MAX_BUDGET = 1500  # nodes of a picture
MAX_PICTURES = 8  # that are kept up to date
MAX_PATH = 64  # of the nodes above a picture's first that are told
FEW = 1024  # children of one node that are looked at where no branch of theirs is kept
FORGET = 4  # after so many rounds nobody asks for a picture any more, and a name is forgotten that none had

BITS = 40  # a sum is three numbers in one: pages, those on the device, those on the host
MASK = (1 << BITS) - 1


class Row(NamedTuple):
    """A node as a picture has it; `total` and what follows it are of the branch, the node included."""

    name: int
    parent: int  # its row; -1: it is one of the first
    pages: int  # 0: it is the root of a namespace
    present: int  # mask of cells, full KV's device and host first: where the bytes are, or are being written
    writing: int  # mask of these that a copy brings
    device_locks: int
    host_locks: int
    children: int
    total: int
    device: int
    host: int
    age_s: float  # since its first page came
    idle_s: float  # since anything of the branch was last let go of


Wish = tuple[int | None, int]  # a picture: the branch, or all, and how many nodes at most
Branch = tuple[int, float]  # the sum of its pages, and its latest use


class Census:
    """Of one index. `look` says what somebody wants to see; `step` then does a slice of the work."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.num_rounds = 0  # censuses that came to their end
        self._tree = index.tree
        self._start = self._tree.start
        self._next_name = 1
        self._forget()

    def _forget(self) -> None:
        self._nodes: dict[int, Node] = {}
        self._names: dict[Node, tuple[int, int]] = {}  # and the round that last had it
        self._pictures: dict[
            tuple[int | None, int], tuple[int, dict[str, Any] | None]
        ] = {}  # the round of the last look
        self._stale: list[tuple[int | None, int]] = []  # pictures to be made
        self._kept: dict[Node, Branch] = {}
        self._below: dict[Node, list[tuple[int, Node]]] = {}
        self._tops: list[tuple[int, Node]] = []
        self._total = 0
        self._over = False  # a census is, and its pictures are still to be made
        self._counted = False  # there is a census to make pictures from
        self._work: Iterator[None] | None = None
        self._painting: tuple[Wish, Iterator[None]] | None = None
        self._mark: Node | None = None

    def close(self) -> None:
        """Let go of everything, names too. The next look begins anew. Idempotent."""
        if self._mark is not None and self._start is self._tree.start:
            _unlink(self._mark)
        self._forget()

    def look(self, root: int | None, budget: int) -> dict[str, Any] | None:
        """The newest picture of the branch at `root` (None: of all) with at most `budget` nodes.

        None: it is being made. With `gone` alone: there is no such node any more.
        """
        self._same_tree()
        if root is not None and self.node(root) is None:
            return {"gone": root}
        key = (root, max(1, min(budget, MAX_BUDGET)))
        known = self._pictures.pop(key, None)
        picture = None if known is None else known[1]
        self._pictures[key] = self.num_rounds, picture
        if picture is None and key not in self._stale:
            self._stale.insert(0, key)
        while len(self._pictures) > MAX_PICTURES:
            del self._pictures[next(iter(self._pictures))]
        return picture

    def node(self, name: int) -> Node | None:
        """Whose name that is; None: of no node any more."""
        self._same_tree()
        node = self._nodes.get(name)
        return node if node is not None and self._alive(node) else None

    def name(self, node: Node) -> int:
        """Its name, which it keeps for some rounds at least."""
        known = self._names.get(node)
        if known is None:
            number = self._next_name
            self._next_name += 1
            self._nodes[number] = node
        else:
            number = known[0]
        self._names[node] = number, self.num_rounds
        return number

    def step(self) -> bool:
        """A slice of work. False: a round is over, pictures are as new as it is, and the next step begins another."""
        self._same_tree()
        if self._painting is None and self._counted:
            while self._stale:
                key = self._stale.pop(0)
                if key in self._pictures and (key[0] is None or self.node(key[0]) is not None):
                    self._painting = key, self._paint(*key)
                    break
        if self._painting is not None:
            if next(self._painting[1], True):
                self._painting = None
                if not self._stale and self._over:
                    self._over = False
                    return False
            return True
        if self._work is None:
            self._work = self._round()
        if next(self._work, True):
            self._work = None
            self._over = bool(self._stale)
            return self._over
        return True

    def _same_tree(self) -> None:
        if self._start is not self._tree.start:  # it was dropped whole
            self._forget()
            self._start = self._tree.start

    def _alive(self, node: Node) -> bool:
        return node.parent is not None or node.space.root is node

    # -- counting ------------------------------------------------------------------------------------------

    def _round(self) -> Iterator[None]:
        """Count all; then have every picture made anew, and forget names that none of the last had."""
        tree, start = self._tree, self._start
        page_bytes = tree.page_bytes
        hosted = tree.T > 1
        one, on_device, on_host = 1, 1 | 1 << BITS, 1 | 1 << 2 * BITS
        everywhere = on_device | on_host
        pools = self.index.pools
        least = max(1, max(pools[c].cached for c in range(tree.T)) >> SHARE)
        sums: list[dict[Node, int]] = [{} for _ in range(PARTS)]
        uses: list[dict[Node, float]] = [{} for _ in range(PARTS)]
        kept: dict[Node, Branch] = {}
        below: dict[Node, list[tuple[int, Node]]] = {}
        most = MOST_KEPT
        mark = self._mark = Node(tree.nowhere, None, b"", [])
        mark.ahead, mark.behind = start.ahead, start
        start.ahead.behind = start.ahead = mark
        node = mark.ahead
        while node is not start:
            for _ in range(SLICE):
                parent = node.parent
                if parent is None:  # the end, or another walk's mark
                    if node is start:
                        break
                    node = node.ahead
                    continue
                cells = node.cells
                if cells[0] is not None:
                    weight = everywhere if hosted and cells[1] is not None else on_device
                else:
                    weight = on_host if hosted and cells[1] is not None else one
                total = node.num_bytes // page_bytes * weight
                used = node.used
                if node.children is not None:
                    number = hash(node) % PARTS
                    total += sums[number].pop(node, 0)
                    used = max(used, uses[number].pop(node, used))
                number = hash(parent) % PARTS
                part, lates = sums[number], uses[number]
                part[parent] = part.get(parent, 0) + total
                if used > lates.get(parent, -1.0):
                    lates[parent] = used
                if total & MASK >= least:
                    kept[node] = total, used
                    if parent in below:
                        below[parent].append((total, node))
                    else:
                        below[parent] = [(total, node)]
                node = node.ahead
            _unlink(mark)
            if node is start:
                break
            mark.behind, mark.ahead = node.behind, node
            node.behind.ahead = node.behind = mark
            if len(kept) > most:
                least *= 2
                most += MOST_KEPT // 2
            yield
            node = mark.ahead
        self._mark = None
        tops, whole = [], 0
        work = 0
        for part, lates in zip(sums, uses, strict=True):
            for root, total in part.items():
                if root.parent is None and root.space.root is root:  # else it joined another meanwhile
                    whole += total
                    if total & MASK >= least:
                        tops.append((total, root))
                        kept[root] = total, lates[root]
            work += len(part)
            part.clear()
            lates.clear()
            if work > SLICE:
                work = 0
                yield
        for children in (tops, *below.values()):
            children.sort(key=_size, reverse=True)
            work += len(children)
            if work > SLICE:
                work = 0
                yield
        self._kept, self._below, self._tops, self._total, self._counted = kept, below, tops, whole, True
        self.num_rounds += 1
        oldest = self.num_rounds - FORGET
        for key in [key for key, (seen, _) in self._pictures.items() if seen < oldest]:
            del self._pictures[key]
        self._stale = [*self._stale, *(key for key in self._pictures if key not in self._stale)]
        names = list(self._names.items())
        for at in range(0, len(names), SLICE):
            for node, _ in names[at : at + SLICE]:
                number, seen = self._names[node]
                if seen < oldest or not self._alive(node):
                    del self._names[node], self._nodes[number]
            yield

    # -- drawing -------------------------------------------------------------------------------------------

    def _paint(self, root: int | None, budget: int) -> Iterator[None]:
        tree, kept, below = self._tree, self._kept, self._below
        rows: list[Row] = []
        nodes: list[Node] = []  # of the rows
        drawn: dict[Node, int] = {}  # and the other way
        spaces: list[tuple[int, str | None, str | None, str | None]] = []

        def draw(node: Node, parent: int, branch: Branch) -> int:
            row = drawn[node] = len(rows)
            rows.append(self._row(node, parent, *branch))
            nodes.append(node)
            if node.parent is None:
                spaces.append((row, *shown(node.space.namespace)))
            return row

        waiting: list[tuple[int, int, Node, int, list[tuple[int, Node]], int]] = []
        count = 0  # of what ever waited: so there are no ties, and nodes are not compared

        def wait(siblings: list[tuple[int, Node]], at: int, parent: int) -> None:
            nonlocal count
            if at < len(siblings):
                total, node = siblings[at]
                count += 1
                heapq.heappush(waiting, (-(total & MASK), count, node, parent, siblings, at))

        first = None if root is None else self._nodes[root]
        path, before = ([], 0) if first is None else self._path(first)
        if first is None:
            wait(self._tops, 0, -1)
        elif first in kept:
            wait([(kept[first][0], first)], 0, -1)
        else:
            nodes_of = self._branch(first, budget)
            for node, branch in nodes_of or [(first, (self._own(first), first.used))]:
                draw(node, -1 if node is first else drawn[node.parent], branch)  # type: ignore[index]
        cost = 0
        while waiting and len(rows) < budget:
            _, _, node, parent, siblings, at = heapq.heappop(waiting)
            wait(siblings, at + 1, parent)
            if node not in drawn and self._alive(node):
                wait(below.get(node, []), 0, draw(node, parent, kept[node]))
            cost += ROW_COST
            if cost > SLICE:
                cost = 0
                yield
        # Small branches, each as a whole, as far as there is room: where most is not drawn, first.
        rest = [row.total - row.pages for row in rows]
        for row in rows:
            if row.parent >= 0:
                rest[row.parent] -= row.total
        visits = 4 * budget
        for number in sorted(range(len(rows)), key=rest.__getitem__, reverse=True):
            if len(rows) >= budget or visits <= 0:
                break
            node = nodes[number]
            for child in list(islice(tree.children(node), FEW)):
                if child in drawn or child.parent is not node:
                    continue
                room = min(budget - len(rows), visits)
                nodes_of = self._branch(child, room)
                if nodes_of is None:
                    visits -= room
                    cost += room
                else:
                    visits -= len(nodes_of)
                    cost += ROW_COST * len(nodes_of)
                    for each, branch in nodes_of:
                        draw(each, drawn[each.parent], branch)  # type: ignore[index]
                if len(rows) >= budget or visits <= 0:
                    break
                if cost > SLICE:
                    cost = 0
                    yield
        if first is None:
            whole = self._total
        else:
            whole = kept[first][0] if first in kept else sum(self._own(node) for node in nodes)
        key = root, budget
        if key in self._pictures:
            self._pictures[key] = (
                self._pictures[key][0],
                {
                    "round": self.num_rounds,
                    "root": root,
                    "path": path,
                    "before": before,
                    "pages": [whole & MASK, whole >> BITS & MASK, whole >> 2 * BITS],
                    "num_nodes": tree.num_nodes,
                    "num_spaces": len(tree.spaces),
                    "num_roots": sum(row.parent < 0 for row in rows),
                    "spaces": spaces,
                    "rows": rows,
                },
            )

    def _row(self, node: Node, parent: int, total: int, used: float) -> Row:
        tree, now = self._tree, self.index.now
        used = max(used, node.used)
        cells, C = node.cells, tree.C  # noqa: N806
        count = 0 if node.children is None else 1 if type(node.children) is Node else len(node.children)  # type: ignore[arg-type]
        times = round(now - node.born, 1), round(now - used, 1)
        sums = (total & MASK, total >> BITS & MASK, total >> 2 * BITS, *times)
        if not cells:  # a namespace's root
            return Row(self.name(node), parent, 0, 0, 0, 0, 0, count, *sums)
        present = sum(1 << c for c in range(C) if cells[c] is not None)
        host_locks = cells[C + 1] if tree.T > 1 else 0
        pages = node.num_bytes // tree.page_bytes
        return Row(self.name(node), parent, pages, present, node.writing, cells[C], host_locks, count, *sums)

    def _own(self, node: Node) -> int:
        """A node's pages, as a sum."""
        cells = node.cells
        pages = node.num_bytes // self._tree.page_bytes
        if not pages or not cells:
            return 0
        on_host = self._tree.T > 1 and cells[1] is not None
        return pages * (1 | (cells[0] is not None) << BITS | on_host << 2 * BITS)

    def _branch(self, first: Node, most: int) -> list[tuple[Node, Branch]] | None:
        """A branch of at most so many nodes, parents first, each with what its own branch is; None: it has more."""
        found: list[Node] = []
        stack = [first]
        while stack:
            node = stack.pop()
            found.append(node)
            if node.children is not None:
                if type(node.children) is not Node and len(node.children) > most:  # type: ignore[arg-type]
                    return None
                stack.extend(self._tree.children(node))
            if len(found) + len(stack) > most:
                return None
        sums: dict[Node, Branch] = {}
        for node in reversed(found):
            below, late = sums.get(node, (0, 0.0))
            total, used = sums[node] = below + self._own(node), max(late, node.used)
            if node is not first and node.parent is not None:
                beside, late = sums.get(node.parent, (0, 0.0))
                sums[node.parent] = beside + total, max(late, used)
        return [(node, sums[node]) for node in found]

    def _path(self, node: Node) -> tuple[list[tuple[int, int]], int]:
        """Names and pages of the nodes above it, a namespace's root first, the nearest of them; the pages before it."""
        path: list[tuple[int, int]] = []
        before, up = 0, node.parent
        while up is not None:
            pages = up.num_bytes // self._tree.page_bytes
            before += pages
            if len(path) < MAX_PATH or up.parent is None:
                path.append((self.name(up), pages))
            up = up.parent
        path.reverse()
        return path, before


def shown(namespace: Namespace) -> tuple[str | None, str | None, str | None]:
    """A namespace as people may see it: its lora's name; extra key and salt, which may be secrets, as hashes."""
    return namespace.lora, _hashed(namespace.extra_key), _hashed(namespace.cache_salt)


def _hashed(text: str | None) -> str | None:
    return None if text is None else hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def _size(child: tuple[int, Node]) -> int:
    return child[0] & MASK


def _unlink(mark: Node) -> None:
    mark.ahead.behind = mark.behind
    mark.behind.ahead = mark.ahead
    del mark.ahead, mark.behind
