"""What each session holds of the cache, for people. It costs what leases' paths are deep, and nothing of the tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from sglcache.core.leases import ByEnd, Lease, Session
from sglcache.core.slots import SLOT_BYTES
from sglcache.core.tree import Node
from sglcache.units import SessionId

if TYPE_CHECKING:
    from sglcache.core.index import Index


class Holding(NamedTuple):
    """Of one session. By cell, as the index numbers them; where there is nothing of one it is missing."""

    num_leases: int
    own: dict[int, int]  # slots of its own: leased, and once the session ended, fenced
    locked: dict[int, int]  # cached pages that its leases keep from eviction; two leases on one page count twice
    num_pins: int
    pinned_pages: int
    num_waiting: int  # requests that wait for room, or for the third tier
    num_loads: int  # copies from the host into its own pages that are under way
    oldest_ticket: int | None  # of its commits and releases, the first whose events are not all done
    missing: tuple[int, ...]  # the shards whose event of that ticket is not done


def holdings(index: Index) -> dict[SessionId, Holding]:
    """Every session that the index knows: those that are over, and hold something still, too."""
    waiting = Counter(each.session.id for each in (*index._waiting, *index.line))
    if index.l3 is not None:
        waiting.update(waiter.session.id for prefetch in index.l3.prefetches for waiter in prefetch.waiters)
    return {session.id: _holding(index, session, waiting[session.id]) for session in index.sessions.values()}


def _holding(index: Index, session: Session, num_waiting: int) -> Holding:
    own: Counter[int] = Counter()
    locked: Counter[int] = Counter()
    for lease in session.leases.values():
        for cell, count in _own(index, lease):
            own[cell] += count
        for cell, count in _locked(index, lease):
            locked[cell] += count
    pins = [pin for each in session.pins.values() for pin in each]
    ticket, missing = None, 0
    if session.queue:
        ticket = session.queue[0].ticket
        missing = session.all_shards & ~(session.events.get(ticket, 0) | session.gone)
    return Holding(
        len(session.leases),
        {cell: count for cell, count in sorted(own.items()) if count},
        {cell: count for cell, count in sorted(locked.items()) if count},
        len(pins),
        sum(pin.num_pages for pin in pins),
        num_waiting,
        sum(lease.load is not None for lease in session.leases.values()),
        ticket,
        tuple(shard for shard in range(missing.bit_length()) if missing >> shard & 1),
    )


def _own(index: Index, lease: Lease) -> Iterator[tuple[int, int]]:
    """As `Lease.own_slots`, counted, of each resource; they are all on the device."""
    yield 0, max(0, lease.num_pages - lease.committed) + _slots(lease.duplicates)
    for number, held in enumerate(lease.parts, 1):
        if isinstance(held, ByEnd):
            count = (len(held.slots) + len(held.loading)) // SLOT_BYTES
        else:
            count = sum(stop - start for start, stop in held.owned) + _slots(held.duplicates)
        yield number * index.T, count


def _slots(duplicates: list[tuple[int, bytes]]) -> int:
    return sum(len(slots) for _, slots in duplicates) // SLOT_BYTES


def _locked(index: Index, lease: Lease) -> Iterator[tuple[int, int]]:
    yield 0, _depth(lease.node) // index.page_bytes
    if lease.host_node is not None:
        yield 1, _depth(lease.host_node) // index.page_bytes
    for number, held in enumerate(lease.parts, 1):
        cell = number * index.T
        if isinstance(held, ByEnd):
            yield cell, int(held.source is not None)
            if held.host_source is not None:
                yield cell + 1, 1
        else:
            yield cell, max(0, lease.committed - held.pinned)
            if held.host_pages:
                yield cell + 1, held.host_pages


def _depth(node: Node | None) -> int:
    """Bytes from the root to its end."""
    depth = 0
    while node is not None:
        depth += node.num_bytes
        node = node.parent
    return depth
