"""The host tier of a life that ended, in a fresh index: what its journal had, as far as it is whole.

A page is taken if its own row is right and every row above it, up to the first page of its namespace: presence on the
host is closed under the page above. Of companions those are taken whose page is. What was on the device alone is gone,
and so is every lock: nothing here is anyone's.

Pages come back in runs, not one by one: whatever nodes there were, a run is what was told together and has no branch,
and runs of one child are joined as they are in a tree that grew. The order of eviction is that of coming, the oldest
branch first; how often and when they were used nobody wrote down.

Routers are told by the records that any change of presence makes: behind the AllBlocksCleared with which a life begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sglcache.core.journal import HOST, key_of
from sglcache.core.key import Namespace

if TYPE_CHECKING:
    from sglcache.core.index import Index
    from sglcache.core.tree import Node

Ints = npt.NDArray[np.int64]
NOBODY = -1  # the owner of the first page of a namespace
MERGE_LIMIT = 1 << 30


class Rows(NamedTuple):
    """What is known of slots of one resource: who holds each, by slot and sequence. Sequences rise with the telling."""

    slots: Ints  # [n], no two alike
    seqs: npt.NDArray[np.uint64]  # [n]
    owners: Ints  # [n]: the slot of the page above, or NOBODY; of a companion: the slot of its page
    owner_seqs: npt.NDArray[np.uint64]  # [n]: what the owner's sequence was


class Survivors(NamedTuple):
    """What a journal had."""

    full: Rows
    tokens: npt.NDArray[np.uint32]  # [n, tokens of a page and, with bigram keys, the one behind it], as `full`
    namespaces: Mapping[int, Namespace]  # by slot, of the first pages of namespaces
    tenants: npt.NDArray[np.uint64]  # `journal.key_of` who is charged with each, as `full`
    companions: Sequence[Rows] = ()


class Restored(NamedTuple):
    """The slots that hold something again, int64, of full KV and then of each companion."""

    slots: list[Ints]


def restore(index: Index, survivors: Survivors) -> Restored:
    """Put what is whole into an index that has had no command yet, and tell of it. No order of rows is asked for.

    Slots that the host pools do not have, as they are now, are not taken.
    """
    # The journal has these rows; it is told only of what does not stay.
    entries, index.journal = index.journal, None
    try:
        plan = _plan(index, survivors)
        nodes, taken = _grow(index, plan)
        _settle(index, nodes)
        for node in nodes:
            for c in range(HOST, index.tree.C, index.T):
                if node.cells[c] is None:
                    pass
                elif c == HOST:
                    index.change(HOST, node, True)
                else:
                    index.tell(c, node, True)
    finally:
        index.journal = entries
    leaves = [node for node in nodes if node.children is None]
    for leaf in leaves:
        index.tree.merge(leaf, MERGE_LIMIT)
    if index.companions is not None:
        for leaf in leaves:
            index.companions.prune(leaf)
    if index.tenants is not None:  # whose ceilings may be others than they were
        index.tenants.look()
    return taken


class _Plan(NamedTuple):
    """Pages that are whole, parents first, cut into runs. All by page but `starts`."""

    slots: Ints
    parents: Ints  # the place of the page above, or -1
    tokens: npt.NDArray[np.uint32]
    starts: list[int]  # where runs begin, and the end of the last
    tenants: npt.NDArray[np.uint64]
    companions: list[Ints]  # of each: the slot, or -1
    namespaces: Mapping[int, Namespace]


def _plan(index: Index, survivors: Survivors) -> _Plan:
    num_slots = index.pools[HOST].total
    rows = survivors.full
    there = np.flatnonzero((rows.slots >= 0) & (rows.slots < num_slots))
    order = there[np.argsort(rows.seqs[there], kind="stable")]  # a page is told of after the one above it
    slots, seqs = rows.slots[order], rows.seqs[order]
    owners, owner_seqs = rows.owners[order], rows.owner_seqs[order]
    count = len(slots)
    place = np.full(num_slots + 1, -1, np.int64)  # by slot; the last is nobody's
    place[slots] = np.arange(count)
    inside = (owners >= 0) & (owners < num_slots)
    parents = np.where(inside, place[np.where(inside, owners, num_slots)], -1)
    linked = parents >= 0
    linked[linked] = seqs[parents[linked]] == owner_seqs[linked]
    linked &= parents < np.arange(count)
    roots = (owners == NOBODY) & np.fromiter((int(slot) in survivors.namespaces for slot in slots), bool, count)
    # By whole strides: each page's ancestor 1, 2, 4, ... above it, until all are at an end of their path.
    top = np.where(linked, parents, np.arange(count))
    while True:
        above = top[top]
        if np.array_equal(above, top):
            break
        top = above
    good = np.flatnonzero(roots[top]) if count else np.zeros(0, np.int64)
    back = np.full(count + 1, -1, np.int64)
    back[good] = np.arange(len(good))
    slots, seqs, parents = slots[good], seqs[good], back[np.where(linked[good], parents[good], count)]
    count = len(slots)
    place = np.full(num_slots + 1, -1, np.int64)
    place[slots] = np.arange(count)

    tenants = survivors.tenants[order][good]
    companions: list[Ints] = []
    cut = np.zeros(count, bool)  # a run begins here
    for number, held in enumerate(survivors.companions, 1):
        c = number * index.T + HOST
        mine = np.full(count, -1, np.int64)
        if len(held.slots):
            ours = (held.slots >= 0) & (held.slots < index.pools[c].total)
            ours &= (held.owners >= 0) & (held.owners < num_slots)
            at = place[np.where(ours, held.owners, num_slots)]
            ours &= at >= 0
            ours[ours] = seqs[at[ours]] == held.owner_seqs[ours]
            mine[at[ours]] = held.slots[ours]
        companions.append(mine)
        if index.tree.by_end[c]:
            cut[1:] |= mine[:-1] >= 0
        else:
            cut[1:] |= (mine[1:] >= 0) != (mine[:-1] >= 0)
    kids = np.bincount(parents[parents >= 0], minlength=count)
    if count:
        cut[0] = True
        cut[1:] |= (parents[1:] != np.arange(count - 1)) | (kids[:-1] != 1) | (tenants[1:] != tenants[:-1])
    starts = [*np.flatnonzero(cut).tolist(), count]
    tokens = survivors.tokens[order][good]
    return _Plan(slots, parents, tokens, starts, tenants, companions, survivors.namespaces)


def _grow(index: Index, plan: _Plan) -> tuple[list[Node], Restored]:
    """A node for each run; of two that begin alike under one page the first, since one of them must be wrong."""
    tree, page_size = index.tree, index.config.page_size
    slots = plan.slots.astype("<i4")
    at_end: dict[int, Node] = {}  # by the place of a run's last page
    nodes: list[Node] = []
    kept = np.zeros(len(slots), bool)
    companions = [mine.astype("<i4") for mine in plan.companions]
    parents = plan.parents
    payers = {} if index.tenants is None else {key_of(name): name for name in index.tenants.names}
    for start, stop in zip(plan.starts, plan.starts[1:], strict=False):
        if parents[start] >= 0:
            parent = at_end.get(int(parents[start]))
            if parent is None:
                continue
        else:
            parent = index.space(plan.namespaces[int(plan.slots[start])]).root
        text = np.ascontiguousarray(plan.tokens[start:stop, :page_size], "<u4").tobytes()
        text += plan.tokens[stop - 1, page_size:].astype("<u4").tobytes()
        if tree.child(parent, text, 0) is not None:
            continue
        node = tree.add(parent, text)
        node.cells[HOST] = slots[start:stop].tobytes()
        if index.tenants is not None:
            payer = payers.get(int(plan.tenants[start]))
            index.tenants.belongs([node], HOST, index.tenants.number(payer))
        for number, mine in enumerate(companions, 1):
            c = number * index.T + HOST
            run = mine[stop - 1 : stop] if tree.by_end[c] else mine[start:stop]
            if run[-1] >= 0:
                node.cells[c] = run.tobytes()
        kept[start:stop] = True
        at_end[stop - 1] = node
        nodes.append(node)
    taken: list[Ints] = [plan.slots[kept], *[mine[kept & (mine >= 0)] for mine in plan.companions]]
    for number, these in enumerate(taken):
        index.pools[number * index.T + HOST].adopt(these)
    return nodes, Restored(taken)


def _settle(index: Index, nodes: Sequence[Node]) -> None:
    """Into the orders of eviction: a use of each leaf's path, in the order in which the leaves came."""
    tree = index.tree
    host = index.orders[HOST]
    companions: list[tuple[int, Any]] = []
    if index.companions is not None:
        companions = [(c, index.companions.order(c)) for c in range(index.T + HOST, tree.C, index.T)]
    for node in nodes:
        for c, order in companions:
            if node.cells[c] is not None:
                order.put(node)
        if node.children is None:
            host.pin(node)
            host.unpin(node)
