"""The second tier: which pages are copied to the host, when, and what the end of such a copy brings about.

A write-through is a `Ticket` that names (end node, number of pages) and pins both tiers' paths; a split gives both
halves everything, and the ack walks up the range that was sent. Acks take effect in the order of sending, whatever
order they come in, so parents reach the host, and are announced there, first. If a copy fails, what was sent later and
hangs on it comes to nothing, too, and its target slots stay fenced until its own copy is over.

When a page is copied is the write policy:

* `write_through`: with the commit that brings it.
* `write_through_selective`: once it had so many hits; a request is one, with its commits or when it is over.
* `write_back`: when it is to leave the device. It goes once the copy is over: it is on the host before it is not on
  the device. A copy that fails, or has no room on the host, is no reason to stay.

What found no room on the host is counted, remembered, and tried again when something there is let go of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from sglcache.core.departures import NOBODY, Cause
from sglcache.core.effects import Copy
from sglcache.core.leases import Ticket
from sglcache.core.slots import SLOT_BYTES
from sglcache.core.tenants import Tally
from sglcache.errors import ConfigError
from sglcache.units import TicketId, Tier

if TYPE_CHECKING:
    from sglcache.core.index import Index
    from sglcache.core.tree import Node

DEVICE: Final = 0
HOST: Final = 1
WRITING: Final = 1 << HOST  # the bit of `Node.writing`
WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
RETRIES = 4  # backups tried again by one slice
LOOK = 64  # children looked at for whether a node is a leaf


@dataclass(frozen=True)
class WritePolicy:
    """One of WRITE_POLICIES, and how many hits the selective one asks for."""

    name: str = "write_through"
    threshold: int = 2

    def __post_init__(self) -> None:
        if self.name not in WRITE_POLICIES:
            raise ConfigError(f"write policy {self.name!r} is unknown; use one of {', '.join(WRITE_POLICIES)}")

    @property
    def selective(self) -> bool:
        return self.name == "write_through_selective"

    @property
    def on_eviction(self) -> bool:
        return self.name == "write_back"


WRITE_THROUGH = WritePolicy()


@mypyc_attr(allow_interpreted_subclasses=True)
class Backups:
    """Copies from the device to the host of one index."""

    def __init__(self, index: Index, policy: WritePolicy) -> None:
        self.index = index
        self.policy = policy
        self.writes: deque[Ticket] = deque()  # in the order they were sent
        self.num_over = 0
        self.demoting = 0  # pages that leave the device with the end of copies that are under way
        self.due = False  # something on the host was let go of, and there is something to try again
        self._skipped: dict[Node, None] = {}  # ends of paths that found no room, oldest first

    # -- sending ------------------------------------------------------------------------------------------------

    def used(self, end: Node | None) -> None:
        """A request has committed the path to `end`, or is over: copy what the policy says."""
        if end is None or self.policy.on_eviction:
            return
        self.send(end)

    def demote(self, victim: Node) -> bool:
        """Copy a leaf of the device that the host lacks, and have it leave when that is over; False: no room."""
        return self.send(victim, demote=True)

    def let_go(self) -> None:
        """Something on the host may be evicted now that could not be before."""
        self.due = bool(self._skipped)

    def retry(self) -> None:
        """A slice of what found no room."""
        index, skipped = self.index, self._skipped
        self.due = got_on = False
        for _ in range(min(RETRIES, len(skipped))):
            node = next(iter(skipped))
            del skipped[node]
            if node.parent is None or node.cells[DEVICE] is None:
                got_on = True
                continue  # it went, or joined another that was sent after it
            before = index.counters["backup_pages"]
            if not self.send(node, again=True):
                if index.counters["backup_pages"] == before:
                    if index.tenants is None:
                        return
                    continue  # what one tenant has no room for another may have
                got_on = True
                continue
            index.counters["backups_retried"] += 1
            got_on = True
        self.due = bool(skipped) and (got_on or index.tenants is None)

    @property
    def num_skipped(self) -> int:
        """Paths that are to be tried again."""
        return len(self._skipped)

    def forget(self, node: Node | None = None) -> None:
        """This node leaves the tree, or all do."""
        if node is None:
            self._skipped.clear()
            self.due = False
        elif self._skipped:
            self._skipped.pop(node, None)

    def send(self, end: Node, *, demote: bool = False, again: bool = False, whole: bool = False) -> bool:
        """Copy what of the path to `end` is not on the host, parents first, as far as there is room; whether all of it.

        What is skipped is counted once, and tried again when a commit passes over it or room may have come. `whole`:
        all of it or nothing, whatever the policy. To `demote` is that, too. With tenants it is a copy for each tenant
        on the path, charged to it.
        """
        if self.index.tenants is None:
            return self._send(end, demote, again, whole, 0)
        place = self.index.tenants.place[DEVICE]
        ends: list[Node] = []
        node = end
        while node.parent is not None and node.cells[HOST] is None:
            if not ends or ends[-1].cells[place] != node.cells[place]:
                ends.append(node)
            node = node.parent
        for last in reversed(ends[1:]):
            if not self._send(last, False, again, whole or demote, last.cells[place]):
                if last in self._skipped:
                    del self._skipped[last]
                    self._skipped[end] = None  # all of it, when there is room
                return False
        return self._send(end, demote, again, whole, end.cells[place])

    def _send(self, end: Node, demote: bool, again: bool, whole: bool, tenant: int) -> bool:
        index, tenants, departures = self.index, self.index.tenants, self.index.departures
        cause = NOBODY if departures is None else departures.cause
        orders, pool, page_bytes = index.orders, index.pools[HOST], index.page_bytes
        chain: list[Node] = []
        node = end
        while node.parent is not None and node.cells[HOST] is None:
            chain.append(node)
            node = node.parent
        if self.policy.selective and not whole:
            place, least = index.tree.facts.hits, self.policy.threshold
            # Who had a page had all before it: what has too few hits is the end of the chain.
            first = 0
            while first < len(chain) and chain[first].cells[place] < least:
                first += 1
            del chain[:first]
        if not chain:
            return True
        chain.reverse()
        backed = node
        if tenants is None:
            room, most = pool.free + pool.evictable - self._unlocked(backed), index.config.host_pages
        else:
            pinned = tenants.unlocked(HOST, self._path(backed))
            room = max(0, tenants.left(tenant, Tally(), pinned, tier=HOST))
            ceiling = tenants.shares[HOST][tenant].ceiling
            most = index.config.host_pages if ceiling is None else min(index.config.host_pages, ceiling)
        count, need = self._fitting(chain, room)
        if not whole and need < room and count < len(chain) and self._pages_to(chain[-1]) > most:
            # All of it will never fit, so what does goes: else a prompt longer than the host would never be there.
            chain.insert(count, index.tree.split(chain[count], (room - need) * page_bytes))
            if demote:
                return False  # its end goes at once, and the rest when its turn comes
            count, need = count + 1, room
        if again and count < len(chain):
            # Room made for a part of it would be taken from another's part, whose turn is next: that would never end.
            count, need = self._fitting(chain, self._free(tenant))
        whole |= demote
        if whole and count < len(chain):
            count = 0
        sliced = False
        if count:
            orders[HOST].pin(backed)  # or room would be made by evicting what the copy hangs on
            if departures is not None:
                departures.cause = Cause("backup", None, tenant)
            sliced = not index.evict(HOST, need, tenant, need)
            if departures is not None:
                departures.cause = cause
            if sliced:
                count, need = self._fitting(chain, self._free(tenant))
                if not count or (whole and count < len(chain)):
                    count = 0
                    orders[HOST].unpin(backed)
        done = count == len(chain)
        if not done and not whole and self._pages_to(chain[-1]) <= index.config.host_pages:
            self._skipped[chain[-1]] = None
            self.due |= sliced
        if not done and not again:
            skipped = sum(each.num_bytes for each in chain[count:]) // page_bytes
            index.counters["backup_pages_skipped"] += skipped
            if departures is not None:
                departures.not_copied("no_room", chain[-1], skipped)
            if tenants is not None and need + skipped <= pool.free + pool.evictable:
                tenants.shares[HOST][tenant].skipped += skipped  # there is room, for others
        if not count:
            return False
        del chain[count:]
        slots = pool.take(need)
        pool.cached += need
        at = 0
        for each in chain:
            size = each.num_bytes // page_bytes * SLOT_BYTES
            each.cells[HOST] = slots[at : at + size]
            each.writing |= WRITING
            at += size
        last = chain[-1]
        if tenants is not None:
            tenants.belongs(chain, HOST, tenant)
        orders[HOST].pin(last, backed)
        orders[DEVICE].pin(last)
        ticket = Ticket(TicketId(index.new_id()), Tier.HOST, last, need, None)
        if demote:
            ticket.demote = last.num_bytes // page_bytes
            self.demoting += ticket.demote
            if tenants is not None:
                tenants.leaving(last, ticket.demote)
        if departures is not None and self.policy.on_eviction:
            departures.sent(ticket)
        self.writes.append(ticket)
        index.counters["backup_pages"] += need
        source = b"".join([each.cells[DEVICE] for each in chain])
        more = () if index.companions is None else index.companions.send_along(ticket, need * page_bytes)
        index.emit(Copy(ticket.id, index.resources[HOST].name, Tier.DEVICE, Tier.HOST, source, slots, None, more))
        return done

    def _fitting(self, chain: list[Node], room: int) -> tuple[int, int]:
        """How many nodes of a chain `room` pages are enough for, and their pages."""
        need = 0
        for count, each in enumerate(chain):
            pages = each.num_bytes // self.index.page_bytes
            if need + pages > room:
                return count, need
            need += pages
        return len(chain), need

    def _unlocked(self, node: Node | None) -> int:
        """Pages of a path that could be evicted from the host now."""
        lock = len(self.index.pools) + HOST
        num_bytes = 0
        while node is not None and node.parent is not None and not node.cells[lock]:
            num_bytes += node.num_bytes
            node = node.parent
        return num_bytes // self.index.page_bytes

    def _free(self, tenant: int) -> int:
        """Host pages that can be had without anything going."""
        tenants = self.index.tenants
        return self.index.pools[HOST].free if tenants is None else max(0, tenants.free(HOST, tenant))

    def _path(self, node: Node | None) -> Iterator[tuple[Node, int]]:
        """The nodes up from this one, with their pages."""
        while node is not None and node.parent is not None:
            yield node, node.num_bytes // self.index.page_bytes
            node = node.parent

    def _pages_to(self, node: Node | None) -> int:
        num_bytes = 0
        while node is not None:
            num_bytes += node.num_bytes
            node = node.parent
        return num_bytes // self.index.page_bytes

    # -- the end of a copy ----------------------------------------------------------------------------------------

    def done(self, ticket: TicketId, ok: bool) -> None:
        """A copy is over. An unknown ticket is no error."""
        writes = self.writes
        for write in writes:
            if write.id == ticket:
                write.ok = ok
                break
        while writes and writes[0].ok is not None:
            self.num_over += 1
            self._written(writes.popleft())
        if self.index.l3 is not None:
            self.index.l3.unblocked()

    def _written(self, ticket: Ticket) -> None:
        """A write-through's ack, in the order of sending."""
        index = self.index
        index.moved()
        orders, pool = index.orders, index.pools[HOST]
        assert ticket.end is not None
        companions = index.companions
        if index.departures is not None:
            index.departures.copied(ticket)
            if ticket.cancelled or not ticket.ok:
                index.departures.not_copied("failed", ticket.end, ticket.num_pages)
        if ticket.cancelled:
            pool.fenced -= len(ticket.fenced) // SLOT_BYTES
            pool.give(ticket.fenced)
            for c, slots in ticket.fenced_more:
                index.pools[c].fenced -= len(slots) // SLOT_BYTES
                index.pools[c].give(slots)
        elif ticket.ok:
            for node in self.sent(ticket.end, ticket.num_pages):
                node.writing &= ~WRITING
                index.change(HOST, node, True)
            if companions is not None:
                companions.written(ticket)
            if index.l3 is not None:
                index.l3.backed_up(ticket.end, ticket.num_pages)
            orders[HOST].unpin(ticket.end)
        else:
            index.counters["backups_failed"] += 1
            nodes = self.sent(ticket.end, ticket.num_pages)
            # What was sent later and hangs on these has no parent on the host now: it goes too, its target slots
            # fenced until its own copy is over.
            for later in reversed(self.writes):
                if not later.cancelled and self._hangs_on(later, nodes):
                    later.cancelled = True
                    if companions is not None:
                        later.fenced_more = companions.unwrite(later)
                        for c, slots in later.fenced_more:
                            index.pools[c].fenced += len(slots) // SLOT_BYTES
                    later.fenced = self._unwrite(later)
                    pool.fenced += len(later.fenced) // SLOT_BYTES
            if companions is not None:
                for c, slots in companions.unwrite(ticket):
                    index.pools[c].give(slots)
            pool.give(self._unwrite(ticket))
        if companions is not None:
            companions.let_go(ticket)
        orders[DEVICE].unpin(ticket.end)
        if companions is not None:
            companions.over(ticket)
        if ticket.demote:
            self._demoted(ticket)
        else:
            index.tree.merge(ticket.end)
        if companions is not None:
            companions.prune(ticket.end)
        self.let_go()

    def _demoted(self, ticket: Ticket) -> None:
        """Now they leave the device, unless somebody has come to them meanwhile; as they are, if the copy failed."""
        self.demoting -= ticket.demote
        assert ticket.end is not None
        if self.index.tenants is not None:
            self.index.tenants.leaving(ticket.end, -ticket.demote)
        index, lock = self.index, len(self.index.pools) + DEVICE
        node, left = ticket.end, ticket.demote * index.page_bytes
        while left and node.parent is not None and not node.cells[lock] and self._is_leaf(node):
            if node.num_bytes > left:  # its copy came to nothing, and it was joined with what is above it
                index.tree.split(node, node.num_bytes - left)
            left -= node.num_bytes
            parent = node.parent
            index.drop(DEVICE, node)
            if index.companions is not None:
                index.companions.dropped(node, parent)
            node = parent

    def _is_leaf(self, node: Node) -> bool:
        """Whether no child is on the device. Of one with very many children it may be said that it is none."""
        seen = list(islice(self.index.tree.children(node), LOOK))
        return len(seen) < LOOK and all(child.cells[DEVICE] is None for child in seen)

    def sent(self, end: Node, num_pages: int) -> list[Node]:
        """The nodes that now make up so many pages up to `end`, parents first: splits may have made more of them."""
        nodes = []
        left = num_pages
        node: Node | None = end
        while left:
            assert node is not None
            nodes.append(node)
            left -= node.num_bytes // self.index.page_bytes
            node = node.parent
        nodes.reverse()
        return nodes

    def _hangs_on(self, ticket: Ticket, nodes: list[Node]) -> bool:
        node = ticket.end
        while node is not None:
            if node in nodes:
                return True
            node = node.parent
        return False

    def _unwrite(self, ticket: Ticket) -> bytes:
        """Take the cells of a copy that came to nothing; nobody was told of them. Their slots, no longer counted."""
        order, pool = self.index.orders[HOST], self.index.pools[HOST]
        assert ticket.end is not None
        order.unpin(ticket.end)
        runs = []
        for node in reversed(self.sent(ticket.end, ticket.num_pages)):
            node.writing &= ~WRITING
            order.unlink(node)
            runs.append(node.cells[HOST])
            node.cells[HOST] = None
        slots = b"".join(runs)
        pool.cached -= len(slots) // SLOT_BYTES
        return slots
