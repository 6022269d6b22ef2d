"""The proof of an index: every violation of laws 4 and 5 and of the tree's own, in words; none is a sound index.

It walks everything and trusts no counter. A live daemon runs it on demand (`sglcache status`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from sglcache.core.index import DEVICE, HOST, Index
from sglcache.core.leases import ByEnd, Ticket
from sglcache.core.tree import Node
from sglcache.units import Tier


def check(index: Index) -> list[str]:
    """Every violation found."""
    found: list[str] = []
    for _ in slices(index, found, 1 << 62):
        pass
    return found


def slices(index: Index, found: list[str], max_nodes: int = 1000) -> Iterator[None]:
    """`check` in slices of `max_nodes`; what it finds is appended. Void if `index.revision` changed meanwhile."""
    tree = index.tree
    C, T = tree.C, tree.T  # noqa: N806
    names = [_name(index, c) for c in range(C)]
    owned: list[list[bytes]] = [[] for _ in range(C)]  # slots by owner, per cell
    cached = [0] * C
    locked = [0] * C
    holders: list[list[Node]] = [[] for _ in range(C)]  # nodes that have the cell, parents first
    num_nodes = 0
    expected = _expected_locks(index, found)
    places: dict[Node, int] = {tree.start: 0}
    for _ in _ring(index, found, places):
        if len(places) % max_nodes == 0:
            yield
    for node in tree.nodes():
        num_nodes += 1
        if places.get(node, 0) <= places.get(node.parent or node, 0):
            found.append(f"{node!r}: not behind its parent in the ring of nodes")
        pages, rest = divmod(len(node.key) - tree.over, tree.page_bytes)
        if rest or not pages:
            found.append(f"{node!r}: run of {len(node.key)} bytes is not whole pages")
        parent = node.parent
        assert parent is not None
        if tree.child(parent, node.key, 0) is not node:
            found.append(f"{node!r}: its parent does not know it")
        if all(node.cells[c] is None for c in range(T)):
            found.append(f"{node!r}: present nowhere")
        if _is_dead(index, node):
            found.append(f"{node!r}: a leaf that nobody holds and no match can end in")
        if node.hashes is not None:
            size = (
                len(node.hashes) / index.hasher.size
                if isinstance(node.hashes, bytes)
                else node.hashes.stop - node.hashes.start
            )
            if size != pages:
                found.append(f"{node!r}: {size} digests for {pages} pages")
            if parent.parent is not None and parent.hashes is None:
                found.append(f"{node!r} has digests, and {parent!r} above it has none")
        for c in range(C):
            run, lock = node.cells[c], node.cells[C + c]
            want = expected[c].pop(node, 0)
            if lock != want:
                found.append(f"{node!r}: {names[c]} lock_ref {lock}, {want} hold it")
            if run is None:
                if lock and c < T:
                    found.append(f"{node!r}: absent from {names[c]} and locked")
                if node.writing >> c & 1:
                    found.append(f"{node!r}: absent from {names[c]} and being written")
                continue
            owned[c].append(run)
            holders[c].append(node)
            size = 1 if tree.by_end[c] else pages
            if len(run) != 4 * size:
                found.append(f"{node!r}: {len(run) // 4} {names[c]} slots for {pages} pages")
            cached[c] += size
            locked[c] += size if lock else 0
            if c >= T:
                if node.cells[c % T] is None:
                    found.append(f"{node!r}: in {names[c]} without Full")
                if node.writing >> c % T & 1 and not node.writing >> c & 1:
                    found.append(f"{node!r}: ready in {names[c]} before Full")
            elif parent.parent is not None:
                if parent.cells[c] is None:
                    found.append(f"{node!r}: in {names[c]} without its parent")
                if parent.writing >> c & 1 and not node.writing >> c & 1:
                    found.append(f"{node!r}: ready in {names[c]} before its parent")
        if num_nodes % max_nodes == 0:
            yield
    for c, order in enumerate(tree.orders):
        wrong: list[str] = []
        for step, _ in enumerate(order.check(iter(holders[c]), wrong), 1):
            if step % max_nodes == 0:
                yield
        found += [f"{names[c]}: {words}" for words in wrong]
    if num_nodes != tree.num_nodes:
        found.append(f"{num_nodes} nodes, counted {tree.num_nodes}")
    if num_nodes != len(places) - 1:
        found.append(f"{num_nodes} nodes, {len(places) - 1} in the ring of nodes")
    for c in range(C):
        for node, count in expected[c].items():
            found.append(f"{node!r}: {count} hold it in {names[c]}, and it is not in the tree")
    leased, fenced = [0] * C, [0] * C
    for lease in index.leases.values():
        for r, own in enumerate([lease.own_slots, *[part.own for part in lease.parts]]):
            c = r * T + DEVICE
            owned[c].append(own)
            (fenced if lease.session.ended else leased)[c] += len(own) // 4
        if lease.session.leases.get(lease.id) is not lease:
            found.append(f"{lease!r}: its session does not know it")
    for ticket in index.writes:
        for c, slots in ticket.fenced_more:
            owned[c].append(slots)
            fenced[c] += len(slots) // 4
    for c in range(C):
        if c != HOST or T == 1:
            _compare(found, f"{names[c]} leased", index.pools[c].leased, leased[c])
            _compare(found, f"{names[c]} fenced", index.pools[c].fenced, fenced[c])
    if T > HOST:
        held = [ticket.fenced for ticket in index.writes]
        fetched: list[bytes] = []
        if index.l3 is not None:
            for prefetch in index.l3.prefetches:
                fetched.append(prefetch.slots)
                for part in prefetch.parts:
                    (held if part.fenced else fetched).append(part.slots)
            writes = sum(len(ticket.fenced) for ticket in index.writes) // 4
            _compare(found, "HOST under fetches", index.l3.fetching, _count(fetched) + _count(held) - writes)
            pages = sum(storing.num_pages for storing in index.l3.storing.values())
            _compare(found, "HOST held by stores", index.l3.held_by_stores, pages)
        owned[HOST] += held + fetched
        _compare(found, "HOST fenced", index.pools[HOST].fenced, _count(held))
        _compare(found, "HOST leased", index.pools[HOST].leased, _count(fetched))
    if index.tenants is not None:
        _tenants(index, found)
    for c, pool in enumerate(index.pools):
        name = names[c]
        _compare(found, f"{name} cached", pool.cached, cached[c])
        _compare(found, f"{name} locked", pool.locked, locked[c])
        total = pool.free + pool.fenced + pool.leased + pool.cached
        if total != pool.total:
            found.append(f"{name}: {pool!r} adds up to {total}")
        every = np.frombuffer(b"".join([*owned[c], pool.free_slots()]), "<i4")
        if every.size and (every.min() < 0 or every.max() >= pool.total):
            found.append(f"{name}: a slot outside 0..{pool.total - 1}")
        elif ((counts := np.bincount(every, minlength=pool.total)) != 1).any():
            found.append(
                f"{name}: slots held twice {np.flatnonzero(counts > 1)[:8].tolist()}, "
                f"held by nobody {np.flatnonzero(counts == 0)[:8].tolist()}"
            )


def _tenants(index: Index, found: list[str]) -> None:
    """What tenants hold beside cached pages, which their orders of eviction prove; and what leaves them."""
    tenants = index.tenants
    assert tenants is not None
    leased = [[0] * len(tenants.names) for _ in tenants.shares]
    leaving = [[0] * len(tenants.names) for _ in tenants.shares]
    for lease in index.leases.values():
        leased[DEVICE][lease.tenant] += len(lease.own_slots) // 4
    if index.l3 is not None:
        for prefetch in index.l3.prefetches:
            num_bytes = len(prefetch.slots) + sum(len(part.slots) for part in prefetch.parts)
            leased[HOST][prefetch.tenant] += num_bytes // 4
    for ticket in index.writes:
        if ticket.demote and ticket.end is not None:
            leaving[DEVICE][ticket.end.cells[tenants.place[DEVICE]]] += ticket.demote
    for tier, shares in enumerate(tenants.shares):
        for number, share in enumerate(shares):
            name = f"{_name(index, tier)}, tenant {tenants.names[number]!r}:"
            _compare(found, f"{name} leased", share.leased, leased[tier][number])
            _compare(found, f"{name} leaving", share.leaving, leaving[tier][number])
        cached = sum(share.cached for share in shares)
        _compare(found, f"{_name(index, tier)} cached, of all tenants", cached, index.pools[tier].cached)


def _name(index: Index, c: int) -> str:
    tier = Tier(c % index.T).name
    return tier if c < index.T else f"{index.resources[c].name} on {tier}"


def _is_dead(index: Index, node: Node) -> bool:
    """It is a leaf, held by nobody, without what some companion needs for a match to end in it."""
    companions, C = index.companions, index.tree.C  # noqa: N806
    if companions is None or node.children is not None or node.writing or any(node.cells[C : 2 * C]):
        return False
    return any(all(node.cells[kind.device + tier] is None for tier in range(index.T)) for kind in companions.kinds)


def _count(runs: list[bytes]) -> int:
    return sum(map(len, runs)) // 4


def _compare(found: list[str], what: str, counted: int, seen: int) -> None:
    if counted != seen:
        found.append(f"{what}: counted {counted}, there are {seen}")


def _expected_locks(index: Index, found: list[str]) -> list[dict[Node, int]]:
    """lock_ref of every locked node, from those who hold it: leases, pins and copies."""
    expected: list[dict[Node, int]] = [{} for _ in index.pools]

    def hold(c: int, node: Node | None) -> None:
        while node is not None and node.parent is not None:
            expected[c][node] = expected[c].get(node, 0) + 1
            node = node.parent

    def place(c: int, node: Node | None, num_bytes: int) -> None:
        while num_bytes > 0 and node is not None and node.parent is not None:
            expected[c][node] = expected[c].get(node, 0) + 1
            num_bytes -= node.num_bytes
            node = node.parent
        if num_bytes > 0 or (num_bytes < 0 and not index.tree.by_end[c]):
            found.append(f"a lock on {_name(index, c)} is off by {num_bytes} bytes")

    for lease in index.leases.values():
        hold(DEVICE, lease.node)
        if index.T > HOST:
            hold(HOST, lease.host_node)
        for number, part in enumerate(lease.parts, 1):
            c = number * index.T
            if isinstance(part, ByEnd):
                for tier, source in enumerate((part.source, part.host_source)):
                    if source is not None:
                        place(c + tier, source, 1)
                continue
            place(c, lease.node, max(0, lease.committed - part.pinned) * index.page_bytes)
            if part.host_pages:
                place(c + HOST, lease.host_node, part.host_pages * index.page_bytes)
        _depth(index, found, lease.committed, lease.node, lambda lease=lease: repr(lease))  # type: ignore[misc]
    for session in index.sessions.values():
        for pins in session.pins.values():
            for pin in pins:
                for c, node in enumerate(pin.nodes):
                    hold(c, node)
                for c, node, num_bytes in pin.places:
                    place(c, node, num_bytes)
    if index.l3 is not None:
        for prefetch in index.l3.prefetches:
            hold(DEVICE, prefetch.device_end)
            hold(HOST, prefetch.host_end)
        for storing in index.l3.storing.values():
            hold(HOST, storing.end)
    for ticket in index.writes:
        hold(DEVICE, ticket.end)
        if not ticket.cancelled:
            hold(HOST, ticket.end)
            _range(index, found, ticket)
        if index.companions is not None:
            for c, node in index.companions.covered(ticket):
                amount = 1 if index.tree.by_end[c] else node.num_bytes
                place(c, node, amount)
                place(c - HOST, node, amount)
                if not node.writing >> c & 1:
                    found.append(f"ticket {ticket.id}: {node!r} is to be on {_name(index, c)}, and not being written")
            for c, node, num_bytes in ticket.kept:
                place(c, node, num_bytes)
    return expected


def _depth(index: Index, found: list[str], pages: int, node: Node | None, name: Callable[[], str]) -> None:
    depth = 0
    while node is not None and node.parent is not None:
        depth += node.num_bytes // index.page_bytes
        node = node.parent
    if depth != pages:
        found.append(f"{name()}: {pages} pages committed, its pin is {depth} deep")


def _range(index: Index, found: list[str], ticket: Ticket) -> None:
    left, node = ticket.num_pages, ticket.end
    while left > 0 and node is not None and node.parent is not None:
        if not node.writing >> HOST & 1:
            found.append(f"ticket {ticket.id}: {node!r} is in its range and not being written")
        left -= node.num_bytes // index.page_bytes
        node = node.parent
    if left:
        found.append(f"ticket {ticket.id}: its range of {ticket.num_pages} pages is off by {left}")


def _ring(index: Index, found: list[str], places: dict[Node, int]) -> Iterator[None]:
    """Number the ring of all nodes, and see that it is linked both ways. Marks of walks are passed over."""
    start = index.tree.start
    before, node = start, start.behind
    while node is not start:
        if node.ahead is not before or node in places:
            found.append(f"the ring of nodes is broken at {node!r}")
            return
        if node.parent is not None:
            places[node] = len(places)
        before, node = node, node.behind
        yield
        if not hasattr(node, "behind"):
            return  # it changed under our hands, and what we find is void
