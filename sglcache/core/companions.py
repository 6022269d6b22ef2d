"""What leases, copies and evictions do about the resources beside Full; `resources` says what makes these different.

All of it is by shape (by page, by end), never by kind. The laws of this file:

* A companion's page is in a tier only while Full's is: what evicts Full takes its companions along, and each of them
  may go alone, least recently used first. Then its node is a tombstone, which owns no slot.
* A match ends where Full is present up to there and every companion says that it may: as far as the device alone
  goes, and as far as both tiers go.
* A lease gets of every companion what it needs, or nothing at all. By page that is the last `reach` pages of the
  match, locked, and a slot for each page behind it; by end a lock on the state with which the match ends, which it
  reads and never writes, and as many slots of its own as it asked for.
* After a commit a lease locks the last `reach` pages of what it has committed, and no more: what it has slid past is
  cached, and may go. The state it began with it has read by then.
* Where the tree has a companion's page it keeps it, and the newcomer's is a duplicate; where it has none it adopts it.
* No leaf stays that no match can end in, once nobody holds it (`prune`): routers would be told of pages that are
  no hit, and its pages would be of no use. One that has its own pages of all companions may stay a while, where those
  it needs above it have gone and it is one of very many there.
* To the host go a node's companions with Full, or, if Full is there already, by a copy of their own: those of the
  deepest nodes first, as far as there is room. What finds none is counted, and not tried again. Under write_back what
  is to leave the device alone is copied then, with Full if the host lacks that, and leaves when the copy is over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import TYPE_CHECKING, NamedTuple

from sglcache.core.effects import Copy, Part, Share
from sglcache.core.eviction import Places
from sglcache.core.key import TOKEN_BYTES
from sglcache.core.leases import ByEnd, ByPage, Lease, Ticket
from sglcache.core.resources import FAR, Companion, Resource
from sglcache.core.slots import SLOT_BYTES, SlotPool
from sglcache.errors import BadRequest
from sglcache.units import TicketId, Tier

if TYPE_CHECKING:
    from sglcache.core.index import Index
    from sglcache.core.tree import Node

DEVICE, HOST = 0, 1
LOOK = 16  # nodes

COUNTERS = (  # of each companion, behind its name
    "committed_slots",
    "duplicate_slots",
    "evicted_device_slots",  # to make room, with Full or alone, and the host has none of them,
    "demoted_slots",  # or has
    "evicted_host_slots",
    "unbacked_slots",  # the device has them
    "cleared_device_slots",  # by a clear
    "cleared_host_slots",
    "corrupt_slots",  # their bytes, or those of pages of Full that they hung on, were wrong
    "backup_slots",
    "backup_slots_skipped",
    "load_slots",
)
CLEARED = ("cleared_device_slots", "cleared_host_slots")
PRUNED = ("pruned_device_pages", "pruned_host_pages")  # of Full, in place of what it would be counted as otherwise


class Kind(NamedTuple):
    """One companion of an index."""

    resource: Resource
    device: int  # its cells
    host: int | None

    def size(self, num_pages: int) -> int:
        """Slots of a node of so many pages."""
        return 1 if self.resource.by_end else num_pages


class Agreement(NamedTuple):
    """How far a match goes, in bytes."""

    everywhere: int  # with both tiers
    device: int  # with the device alone
    reaches: tuple[int, ...]  # in tokens: Full, and each companion with it


class Need(NamedTuple):
    """Of one companion: slots to be taken, and cached ones that the match locks and nothing else does."""

    num_slots: int
    pinned: int
    held: Mapping[Node, int]  # of each node of the path, the cached ones that the match locks, whoever else does


class Companions:
    """Those of one index, which has at least one."""

    def __init__(self, index: Index, companions: Sequence[Companion], num_tiers: int) -> None:
        self.index = index
        self.page_bytes = index.page_bytes
        self.T = num_tiers
        self.demoting = dict.fromkeys(range(num_tiers, num_tiers * (1 + len(companions))), 0)  # slots, by cell
        self.kinds = [
            Kind(each.resource, number * num_tiers, number * num_tiers + HOST if num_tiers > HOST else None)
            for number, each in enumerate(companions, 1)
        ]

    @staticmethod
    def pools(companions: Sequence[Companion], num_tiers: int) -> list[SlotPool]:
        """In the order of the cells."""
        return [SlotPool(n) for each in companions for n in (each.num_slots, each.host_slots)[:num_tiers]]

    @staticmethod
    def counters(companions: Sequence[Companion]) -> list[str]:
        return [*(f"{each.resource.name}_{name}" for each in companions for name in COUNTERS), *PRUNED]

    def order(self, c: int) -> Places:
        order = self.index.orders[c]
        assert isinstance(order, Places)
        return order

    def count(self, kind: Kind, what: str, number: int) -> None:
        self.index.counters[f"{kind.resource.name}_{what}"] += number

    # -- matching ---------------------------------------------------------------------------------------------------

    def agree(self, path: Sequence[Node], partial: Node | None, at: int) -> Agreement:
        """How far a match may go on a path on which Full is present in some tier."""
        kinds, page_bytes = self.kinds, self.page_bytes
        runs = [[FAR] * len(kinds), [FAR] * len(kinds)]  # both tiers, the device alone
        reaches = [0] * len(kinds)
        everywhere = device = depth = 0
        on_device = True
        for node in [*path, partial]:
            if node is None:
                break
            num_bytes = at if node is partial else node.num_bytes
            num_pages, whole = num_bytes // page_bytes, num_bytes == node.num_bytes
            cells = node.cells
            depth += num_bytes
            on_device = on_device and cells[DEVICE] is not None
            all_agree, device_agrees = True, on_device
            for i, (resource, near, far) in enumerate(kinds):
                there = cells[near] is not None
                runs[1][i], may_end = resource.step(runs[1][i], there, num_pages, whole)
                device_agrees = device_agrees and may_end
                there = there or (far is not None and cells[far] is not None and not node.writing >> far & 1)
                runs[0][i], may_end = resource.step(runs[0][i], there, num_pages, whole)
                all_agree = all_agree and may_end
                if may_end:
                    reaches[i] = depth
            if all_agree:
                everywhere = depth
            if device_agrees:
                device = depth
        return Agreement(everywhere, device, tuple(reach // TOKEN_BYTES for reach in (depth, *reaches)))

    def cut(
        self, path: list[Node], partial: Node | None, at: int, num_bytes: int
    ) -> tuple[list[Node], Node | None, int]:
        """The path as far as so many bytes, where a match may end."""
        kept: list[Node] = []
        for node in path:
            if num_bytes <= 0:
                return kept, None, 0
            kept.append(node)
            num_bytes -= node.num_bytes
        assert num_bytes in (0, at), "a match ends inside a node only where the key does"
        return (kept, partial, at) if num_bytes and partial is not None else (kept, None, 0)

    # -- room -------------------------------------------------------------------------------------------------------

    def needs(
        self, path: Sequence[Node], partial: Node | None, at: int, on_device: int, total: int, spare: Sequence[int]
    ) -> list[Need]:
        """Of each companion, for a match of this path, the first `on_device` pages of it there, and `total` pages.

        Exact: once the path is locked no more will be needed.
        """
        page_bytes, C = self.page_bytes, self.index.tree.C  # noqa: N806
        nodes = [*path] if partial is None else [*path, partial]
        matched = (sum(node.num_bytes for node in path) + (at if partial is not None else 0)) // page_bytes
        found: list[Need] = []
        for i, (resource, near, _) in enumerate(self.kinds):
            missing = pinned = 0
            held: dict[Node, int] = {}
            if resource.by_end:
                missing = spare[i] if i < len(spare) else 0
                if nodes:
                    cells = nodes[-1].cells
                    if matched > on_device or cells[near] is None:
                        missing += 1
                    else:
                        held[nodes[-1]] = 1
                        pinned = 0 if cells[C + near] else 1
                found.append(Need(missing, pinned, held))
                continue
            first, stop = max(0, matched - resource.reach), matched
            for node in reversed(nodes):
                start = stop - (at if node is partial else node.num_bytes) // page_bytes
                low = max(start, first)
                if stop > on_device or node.cells[near] is None:
                    missing += stop - low
                else:
                    held[node] = stop - low
                    pinned += 0 if node.cells[C + near] else stop - low
                stop = start
                if stop <= first:
                    break
            found.append(Need(missing + total - matched, pinned, held))
        return found

    def never(self, needs: Sequence[Need]) -> bool:
        """A pool has too few slots for what the match locks and what is taken beside it, even if it had no others."""
        pools = (self.index.pools[kind.device] for kind in self.kinds)
        return any(
            need.num_slots + sum(need.held.values()) > pool.total for need, pool in zip(needs, pools, strict=True)
        )

    def room(self, i: int, pinned: int = 0) -> int:
        """Slots of a companion that can be had now, beside those that are promised."""
        pool = self.index.pools[self.kinds[i].device]
        return pool.free + pool.evictable - pinned - self.index.promised(1 + i)

    def in_copies(self, i: int, held: Mapping[Node, int] | None = None) -> int:
        """Slots that nothing but write-throughs of ours locks, but for those that a match will hold (`Need`)."""
        index, (resource, near, _) = self.index, self.kinds[i]
        counts: dict[Node, int] = {}
        for ticket in index.writes:
            for cell, node in self._held(ticket):
                if cell == near:
                    counts[node] = counts.get(node, 0) + 1
        lock = index.tree.C + near
        kept = held or {}
        return sum(
            (1 if resource.by_end else node.num_bytes // self.page_bytes) - kept.get(node, 0)
            for node, count in counts.items()
            if node.cells[near] is not None and node.cells[lock] == count
        )

    def _held(self, ticket: Ticket) -> Iterator[tuple[int, Node]]:
        """(device cell, node) of the places that a copy to the host locks there."""
        for c, node in self.covered(ticket):
            yield c - HOST, node
        for c, end, num_bytes in ticket.kept:
            up: Node | None = end
            while num_bytes > 0:
                assert up is not None
                yield c, up
                num_bytes -= up.num_bytes
                up = up.parent

    def crowded(self, needs: Sequence[int]) -> bool:
        return any(need > self.index.pools[kind.device].free for need, kind in zip(needs, self.kinds, strict=True))

    def make_room(self, needs: Sequence[int]) -> bool:
        """Evict until there is so much; False: a slice was used up, or copies of ours lock what is needed."""
        for need, kind in zip(needs, self.kinds, strict=True):
            pool = self.index.pools[kind.device]
            if need > pool.free and (need > pool.free + pool.evictable or not self.evict(kind.device, need)):
                return False
        return True

    # -- eviction ---------------------------------------------------------------------------------------------------

    def evict(self, c: int, num_slots: int) -> bool:
        """Evict, what is needless first and then what was used least recently, until so many are free.

        False: a slice was used up before, or it takes the end of copies that are under way, or were begun here.
        """
        index, order = self.index, self.order(c)
        pool = index.pools[c]
        left = index.config.evict_slice
        copying = self.T > HOST and c % self.T == DEVICE and index.backups.policy.on_eviction
        while pool.free + self.demoting[c] < num_slots:
            if left <= 0:
                return False
            left -= 1
            node = order.victim()
            if node is None:
                assert copying, f"nothing to evict: {pool}, {num_slots} wanted"
                return False
            if copying and self._demote(c, node):
                continue
            self.drop(c, node)
            self._prune_below(node, index.resources[c].reach)
        return pool.free >= num_slots

    def _demote(self, c: int, node: Node) -> bool:
        """Have a copy of what the host lacks of it, and leave when that is over; False: the host has it, or no room."""
        index, host = self.index, c + HOST
        if node.cells[host] is not None:
            return False
        if node.cells[HOST] is None:
            if not index.backups.send(node, whole=True):
                return False
        else:
            self.back_up(node, node.num_bytes // self.page_bytes)
        if node.cells[host] is None:
            return False
        count = len(node.cells[c]) // SLOT_BYTES
        self.demoting[c] += count
        index.writes[-1].demoted = (c, node, 1 if index.tree.by_end[c] else node.num_bytes, count)
        return True

    def over(self, ticket: Ticket) -> None:
        """A copy is over, however: what was to leave with it does, unless somebody has come to it meanwhile."""
        if ticket.demoted is None:
            return
        c, end, num_bytes, count = ticket.demoted
        self.demoting[c] -= count
        nodes: list[Node] = []
        node: Node | None = end
        while num_bytes > 0 and node is not None and node.parent is not None:
            nodes.append(node)
            num_bytes -= node.num_bytes
            node = node.parent
        lock = self.index.tree.C + c
        for node in nodes:
            if node.cells[c] is not None and not node.cells[lock]:
                self.drop(c, node)
        for node in nodes:
            if node.parent is not None:
                self._prune_below(node, self.index.resources[c].reach)

    def coming(self, needs: Sequence[int]) -> bool:
        """What some of it lacks is on its way: it leaves with the end of copies."""
        return any(
            self.index.pools[kind.device].free < need <= self.index.pools[kind.device].free + self.demoting[kind.device]
            for need, kind in zip(needs, self.kinds, strict=True)
        )

    def _prune_below(self, node: Node, reach: int) -> None:
        """A companion has lost pages of a node: let the leaves go that needed them, as far as LOOK nodes tell."""
        stack, leaves = [(node, reach)], []
        for _ in range(LOOK):
            if not stack:
                break
            node, left = stack.pop()
            if node.children is None:
                leaves.append(node)
            elif left > 0:
                below = islice(self.index.tree.children(node), LOOK)
                stack += [(child, left - child.num_bytes // self.page_bytes) for child in below]
        for leaf in leaves:
            self.prune(leaf)

    def drop(self, c: int, node: Node, gone: bool = True, corrupt: bool = False) -> None:
        """Take an unlocked cell of a companion from a node. It is counted as evicted, or as cleared without `gone`, or
        as `corrupt`."""
        pool = self.index.pools[c]
        run = node.cells[c]
        self.index.tell(c, node, False)
        self.order(c).unlink(node)
        node.cells[c] = None
        pool.cached -= len(run) // SLOT_BYTES
        pool.give(run)
        self.index.moved()
        kind, tier = self.kinds[c // self.T - 1], c % self.T
        if self.index.departures is not None:
            reason = "corrupt" if corrupt else "evicted" if gone else "cleared"
            other = c + 1 if c % self.T == DEVICE else c - 1
            kept = self.T > HOST and node.cells[other] is not None
            self.index.departures.left(node, c, len(run) // SLOT_BYTES, reason, kept)
        if corrupt:
            what = "corrupt_slots"
        elif gone:
            kept = self.T > HOST and node.cells[kind.device + 1 - tier] is not None
            what = (("evicted_device_slots", "demoted_slots"), ("evicted_host_slots", "unbacked_slots"))[tier][kept]
        else:
            what = CLEARED[tier]
        self.count(kind, what, len(run) // SLOT_BYTES)

    def clear(self) -> None:
        """All that is cached is about to go at once."""
        for kind in self.kinds:
            for tier in range(self.T):
                self.count(kind, CLEARED[tier], self.index.pools[kind.device + tier].cached)

    def drop_with(self, tier: int, node: Node, gone: bool, corrupt: bool = False) -> None:
        """Full leaves the tier: nothing of the node stays there."""
        for c in range(self.T + tier, self.index.tree.C, self.T):
            if node.cells[c] is not None:
                self.drop(c, node, gone, corrupt)

    def expel(self, c: int, node: Node, page: int) -> bool:
        """The bytes of a host slot are wrong, the one of page `page` of a node: it goes alone; see `Index.expel`."""
        index = self.index
        if node.writing >> c & 1 or node.cells[index.tree.C + c]:
            return False
        if not index.tree.by_end[c]:
            num_pages = node.num_bytes // self.page_bytes
            if page:
                index.tree.split(node, page * self.page_bytes)
            if page + 1 < num_pages:
                node = index.tree.split(node, self.page_bytes)
        self.drop(c, node, corrupt=True)
        self._prune_below(node, index.resources[c].reach)
        return True

    def dropped(self, node: Node, parent: Node | None) -> None:
        """A node has lost Full in a tier, and perhaps left the tree."""
        if node.parent is None:
            self.prune(parent)
        else:
            self._prune_below(node, max(kind.resource.reach for kind in self.kinds))

    def prune(self, node: Node | None) -> None:
        """Let a leaf go that no match can end in, and then what it was the last child of, if that is alike."""
        index, C = self.index, self.index.tree.C  # noqa: N806
        while node is not None and node.parent is not None and node.children is None and not node.writing:
            cells = node.cells
            if any(cells[C : 2 * C]) or not self._useless(node):
                return
            parent = node.parent
            for tier in range(self.T):
                if not _out(node) and node.cells[tier] is not None:
                    index.drop(tier, node, pruned=True)
            node = parent if _out(node) else None

    def _useless(self, leaf: Node) -> bool:
        """No match can end with it: some companion lacks, in all tiers, what that takes."""
        for resource, near, _ in self.kinds:
            left = 1 if resource.by_end else resource.reach
            node: Node | None = leaf
            while left > 0 and node is not None and node.parent is not None:
                cells = node.cells
                if all(cells[near + tier] is None for tier in range(self.T)):
                    return True
                left -= 1 if resource.by_end else node.num_bytes // self.page_bytes
                node = node.parent
        return False

    # -- leases: what they take -------------------------------------------------------------------------------------

    def open(self, lease: Lease, path: list[Node], agreement: Agreement) -> list[Node]:
        """Lock what of companions the match needs, as it is split for that; the path as it is then.

        Full is locked: on the device `lease.committed` pages deep, on the host to `lease.host_node`.
        """
        page_bytes = self.page_bytes
        lease.from_device = agreement.device // TOKEN_BYTES
        lease.reaches = agreement.reaches
        matched = sum(node.num_bytes for node in path) // page_bytes
        host = 0
        if lease.host_node is not None:
            for node in path:
                host += node.num_bytes // page_bytes
                if node is lease.host_node:
                    break
        parts: list[ByPage | ByEnd] = []
        for resource, near, far in self.kinds:
            if resource.by_end:
                state = ByEnd()
                if path:
                    end = path[-1]
                    if lease.committed == matched:
                        state.source = end
                        self.order(near).hold(end, 1)
                    if far is not None and host == matched:
                        state.host_source = end
                        self.order(far).hold(end, 1)
                parts.append(state)
                continue
            window = ByPage(max(0, matched - resource.reach))
            window.ends = (matched, agreement.reaches[0] * TOKEN_BYTES // page_bytes)
            path = self._split_path(path, window.first)
            if lease.committed > window.first:
                self.order(near).hold(lease.node, (lease.committed - window.first) * page_bytes)
            if far is not None and host > window.first:
                window.host_pages = host - window.first
                self.order(far).hold(lease.host_node, window.host_pages * page_bytes)
            parts.append(window)
        lease.parts = parts
        return path

    def _split_path(self, path: list[Node], at: int) -> list[Node]:
        """The same path with an end of a node after `at` pages."""
        depth, wanted = 0, at * self.page_bytes
        for i, node in enumerate(path):
            if depth == wanted:
                return path
            if depth < wanted < depth + node.num_bytes:
                return [*path[:i], self.index.tree.split(node, wanted - depth), *path[i:]]
            depth += node.num_bytes
        return path

    def grant(
        self, lease: Lease, on_device: Sequence[Node], on_host: Sequence[Node], total: int, spare: Sequence[int]
    ) -> tuple[tuple[Share, ...], tuple[Part, ...]]:
        """Take the slots, which are free by now: what the lease has of each, and what of them is to be loaded."""
        page_bytes, pools = self.page_bytes, self.index.pools
        shares: list[Share] = []
        loads: list[Part] = []
        matched = sum(node.num_bytes for node in (*on_device, *on_host)) // page_bytes
        for i, (kind, held) in enumerate(zip(self.kinds, lease.parts, strict=True)):
            pool = pools[kind.device]
            sources: list[bytes] = []
            targets: list[bytes] = []
            if isinstance(held, ByEnd):
                count = spare[i] if i < len(spare) else 0
                held.slots += self._take(pool, count)
                source = None
                if matched:
                    end = on_host[-1] if on_host else on_device[-1]
                    slot = end.cells[kind.device] if not on_host else None
                    if slot is None:
                        slot = held.loading = self._take(pool, 1)
                        assert kind.host is not None
                        sources.append(end.cells[kind.host])
                        targets.append(slot)
                    source = int.from_bytes(slot, "little")
                shares.append(Share(kind.resource.name, 0, bytes(held.slots), source))
            else:
                pieces: list[bytes] = []
                stop = 0
                for number, node in enumerate((*on_device, *on_host)):
                    start = stop
                    stop += node.num_bytes // page_bytes
                    if stop <= held.first:
                        continue
                    skip = max(0, held.first - start) * SLOT_BYTES
                    run = node.cells[kind.device] if number < len(on_device) else None
                    if run is None:
                        run = self._take(pool, stop - max(start, held.first))
                        assert kind.host is not None
                        sources.append(node.cells[kind.host][skip:])
                        targets.append(run)
                        self._own(held, max(start, held.first), stop)
                        pieces.append(run)
                    else:
                        pieces.append(run[skip:])
                if total > matched:
                    pieces.append(self._take(pool, total - matched))
                    self._own(held, matched, total)
                held.slots = bytearray(b"".join(pieces))
                shares.append(Share(kind.resource.name, held.first, bytes(held.slots)))
            if targets:
                part = Part(kind.resource.name, b"".join(sources), b"".join(targets))
                loads.append(part)
                self.count(kind, "load_slots", len(part.dst_slots) // SLOT_BYTES)
        return tuple(shares), tuple(loads)

    def grow(self, lease: Lease, num_pages: int, spare: Sequence[int]) -> tuple[bytes, ...]:
        """So many pages more, and slots by end; they are free by now."""
        found: list[bytes] = []
        for i, (kind, held) in enumerate(zip(self.kinds, lease.parts, strict=True)):
            pool = self.index.pools[kind.device]
            if isinstance(held, ByEnd):
                fresh = self._take(pool, spare[i] if i < len(spare) else 0)
            else:
                fresh = self._take(pool, num_pages)
                if num_pages:
                    self._own(held, lease.num_pages, lease.num_pages + num_pages)
            held.slots += fresh
            found.append(fresh)
        return tuple(found)

    def growth(self, num_pages: int, spare: Sequence[int]) -> list[int]:
        """Slots that these take."""
        return [
            (spare[i] if i < len(spare) else 0) if resource.by_end else num_pages
            for i, (resource, _, _) in enumerate(self.kinds)
        ]

    def check_spare(self, spare: Sequence[int]) -> None:
        """BadRequest unless it is counts of those by end."""
        wrong = len(spare) > len(self.kinds) or any(
            count < 0 or (count and not kind.resource.by_end) for count, kind in zip(spare, self.kinds, strict=False)
        )
        if wrong:
            names = ", ".join(kind.resource.name for kind in self.kinds)
            raise BadRequest(f"spare is how many slots of {names}, 0 of those by page; got {list(spare)}")

    def _take(self, pool: SlotPool, count: int) -> bytes:
        pool.leased += count
        return pool.take(count)

    @staticmethod
    def _own(held: ByPage, start: int, stop: int) -> None:
        if held.owned and held.owned[-1][1] == start:
            start = held.owned.pop()[0]
        held.owned.append((start, stop))

    # -- leases: what they give the tree ----------------------------------------------------------------------------

    def check_ends(
        self, lease: Lease, ends: Sequence[tuple[int, int, int]], num_pages: int, promised: set[tuple[int, bytes]]
    ) -> list[tuple[int, int, bytes]]:
        """As an Operation has them. `promised`: (companion, slot) that commits before it give. BadRequest: wrong."""
        found: list[tuple[int, int, bytes]] = []
        taken = set(promised)
        size = self.index.config.page_size
        for i, tokens, slot in ends:
            if not 0 <= i < len(self.kinds) or not self.kinds[i].resource.by_end:
                raise BadRequest(f"companion {i} has no state of an end", companion=i)
            held = lease.parts[i]
            packed = slot.to_bytes(SLOT_BYTES, "little") if 0 <= slot < 1 << 31 else b""
            own = packed and any(
                held.slots[at : at + SLOT_BYTES] == packed for at in range(0, len(held.slots), SLOT_BYTES)
            )
            if not own or (i, packed) in taken:
                raise BadRequest(
                    f"{self.kinds[i].resource.name} slot {slot} is not the lease's own, or was committed already",
                    slot=slot,
                )
            if tokens % size or not 0 < tokens <= num_pages * size:
                raise BadRequest(
                    f"a state of {tokens} tokens: it is of the end of a page of {size}, and of what is committed with "
                    f"it, {num_pages * size} tokens",
                    tokens=tokens,
                )
            taken.add((i, packed))
            found.append((i, tokens // size, packed))
        return found

    def give_up(self, lease: Lease, floor: int) -> None:
        """The lease's own pages before page `floor` are not given to the tree: they are free."""
        for kind, held in zip(self.kinds, lease.parts, strict=True):
            if isinstance(held, ByEnd):
                continue
            pool = self.index.pools[kind.device]
            owned: list[tuple[int, int]] = []
            for start, stop in held.owned:
                if start < floor:
                    lost = held.span(start, min(stop, floor))
                    pool.leased -= len(lost) // SLOT_BYTES
                    pool.give(lost)
                    start = min(stop, floor)
                if start < stop:
                    owned.append((start, stop))
            held.owned = owned
            self._slide(lease, kind, held, min(floor, lease.num_pages), lease.committed)

    def adopt(self, lease: Lease, before: int, reply: int) -> int:
        """Full's pages of the lease are the tree's up to `lease.committed`, until now `before`: so are its companions'.

        How many of the last of them the tree had none of. `reply`: the number that names duplicates; 0: of a later one.
        """
        tree, page_bytes = self.index.tree, self.page_bytes
        lowest = lease.committed
        for kind, held in zip(self.kinds, lease.parts, strict=True):
            c = kind.device
            if isinstance(held, ByEnd):
                continue
            end, node = lease.committed, lease.node
            while node is not None and node.parent is not None:
                before_end = [each for each in held.owned if each[0] < end]
                if not before_end:
                    break
                first, stop = before_end[-1]
                start = end - node.num_bytes // page_bytes
                mine = stop >= end
                at = first if mine else stop
                if start < at < end:
                    head = tree.split(node, (at - start) * page_bytes)
                    start = at
                else:
                    head = node.parent
                if mine:
                    slots = held.span(start, end)
                    there = node.cells[c]
                    if there is None:
                        self._put(kind, node, slots)
                        lowest = min(lowest, start)
                    else:
                        held.duplicates.append((reply, slots))
                        held.slots[(start - held.first) * SLOT_BYTES : (end - held.first) * SLOT_BYTES] = there
                        held.renamed = True
                        self.count(kind, "duplicate_slots", end - start)
                end, node = start, head
            held.owned = [(max(start, lease.committed), stop) for start, stop in held.owned if stop > lease.committed]
            low = max(before, held.pinned)
            if lease.committed > low:
                self.order(c).hold(lease.node, (lease.committed - low) * page_bytes)
        return lease.committed - lowest

    def loaded(self, lease: Lease) -> None:
        """A load-back is over, and what it brought of Full the tree's: the states with which matches end are, too."""
        node = lease.node
        for kind, held in zip(self.kinds, lease.parts, strict=True):
            if isinstance(held, ByEnd) and held.loading:
                assert node is not None
                if held.source is None:
                    held.source = node
                    self.order(kind.device).hold(node, 1)
                if node.cells[kind.device] is None:  # else it reads its own until its first commit
                    self._put(kind, node, held.loading)
                    held.loading = b""

    def _put(self, kind: Kind, node: Node, slots: bytes) -> None:
        pool, count = self.index.pools[kind.device], len(slots) // SLOT_BYTES
        pool.leased -= count
        pool.cached += count
        node.cells[kind.device] = slots
        self.order(kind.device).put(node)
        self.index.moved()
        self.index.tell(kind.device, node, True)
        self.count(kind, "committed_slots", count)

    def put_ends(self, lease: Lease, ends: Sequence[tuple[int, int, bytes]]) -> int:
        """States of a commit: those that the tree lacks are its own now. What it counts is as `adopt` does."""
        lowest = lease.committed
        for i, pages, slot in ends:
            kind, held = self.kinds[i], lease.parts[i]
            assert isinstance(held, ByEnd)
            node = self._node_at(lease, pages)
            if node.cells[kind.device] is not None:
                self.count(kind, "duplicate_slots", 1)
                continue
            own = bytes(held.slots)
            at = next(at for at in range(0, len(own), SLOT_BYTES) if own[at : at + SLOT_BYTES] == slot)
            del held.slots[at : at + SLOT_BYTES]
            self._put(kind, node, slot)
            lowest = min(lowest, pages - 1)
            if kind.resource.max_per_path:
                self._thin(kind, lease, node)
        return lease.committed - lowest

    def _thin(self, kind: Kind, lease: Lease, newest: Node) -> None:
        """Too many states on a path: the shallowest goes, before those where branches part and those in use."""
        c, lock = kind.device, self.index.tree.C + kind.device
        node: Node | None = lease.node
        holders: list[Node] = []
        while node is not None and node.parent is not None:
            if node.cells[c] is not None:
                holders.append(node)
            node = node.parent
        too_many = len(holders) - kind.resource.max_per_path
        for branching in (False, True):
            for node in reversed(holders):
                if too_many <= 0:
                    return
                if node is newest or node.cells[c] is None or node.cells[lock]:
                    continue
                if branching or sum(1 for _, _ in zip(range(2), self.index.tree.children(node), strict=False)) < 2:
                    self.drop(c, node)
                    too_many -= 1

    def _node_at(self, lease: Lease, pages: int) -> Node:
        """The node on the lease's path that ends after so many pages, of those it has committed; made by a split."""
        node, end = lease.node, lease.committed
        while True:
            assert node is not None
            start = end - node.num_bytes // self.page_bytes
            if end == pages:
                return node
            if start < pages:
                return self.index.tree.split(node, (pages - start) * self.page_bytes)
            node, end = node.parent, start

    def slide(self, lease: Lease, before: int) -> None:
        """After a commit: of what is committed only the last pages are still needed, and the first state was read.

        `before`: pages that were committed until then.
        """
        for kind, held in zip(self.kinds, lease.parts, strict=True):
            if isinstance(held, ByPage):
                self._slide(lease, kind, held, lease.committed - kind.resource.reach, before)
            else:
                self._read(kind, held, lease)

    def _slide(self, lease: Lease, kind: Kind, held: ByPage, first: int, before: int) -> None:
        """The lease needs no page before `first` any more.

        Most of them no match will end with, and they are the next to go. What is kept like any other are whole windows
        where there was an end: of the match, of what Full alone would have matched, or of the last commit, if this one
        went further than a window at once. And one page before the window that stays, if this commit is of several: who
        asks for the same again computes the last token anew, so of whole pages all but the last match.
        """
        if first <= held.first:
            return
        stop, reach = min(first, lease.committed), kind.resource.reach
        if stop > held.pinned:
            ends = {*held.ends, before}
            ends = {end for end in ends if max(0, end - reach) < stop and end > held.pinned}
            if held.pinned > max(0, before - reach) or before > stop:
                ends.discard(before)  # part of it has gone by, or stays
            again = lease.committed - reach - 1 if lease.committed - before > 1 else -1
            cuts = sorted({held.pinned, stop, again, again + 1, *ends, *(end - reach for end in ends)})
            cuts = [cut for cut in cuts if held.pinned <= cut <= stop]
            for low, high in pairwise(cuts):
                needless = not any(end - reach <= low and high <= end for end in ends) and low != again
                self._node_at(lease, low)
                node = self._node_at(lease, high)
                self.order(kind.device).let_go(node, (high - low) * self.page_bytes, needless)
                if needless:
                    self.index.tree.merge(node, within=(high - held.needless) * self.page_bytes)
                else:
                    held.needless = high
            held.pinned = stop
        held.pinned = max(held.pinned, first)
        del held.slots[: (first - held.first) * SLOT_BYTES]
        held.first = first

    def _read(self, kind: Kind, held: ByEnd, lease: Lease) -> None:
        """The state with which the match ended was read, or will never be."""
        if held.source is not None:
            self.order(kind.device).let_go(held.source, 1)
            held.source = None
        if held.host_source is not None:
            assert kind.host is not None
            self.order(kind.host).let_go(held.host_source, 1)
            held.host_source = None
        if held.loading:
            self._give(kind, lease, held.loading)
            held.loading = b""

    def shares(self, lease: Lease) -> tuple[Share, ...]:
        """As the answer to a commit tells of them."""
        found: list[Share] = []
        for kind, held in zip(self.kinds, lease.parts, strict=True):
            if isinstance(held, ByEnd):
                found.append(Share(kind.resource.name, 0, bytes(held.slots)))
            else:
                found.append(Share(kind.resource.name, held.first, bytes(held.slots) if held.renamed else b""))
                held.renamed = False
        return tuple(found)

    def number_duplicates(self, lease: Lease, reply: int) -> bool:
        """Those that a load-back found are named by this answer; whether the lease has any."""
        found = False
        for held in lease.parts:
            if isinstance(held, ByPage) and held.duplicates:
                held.duplicates = [(number or reply, slots) for number, slots in held.duplicates]
                found = True
        return found

    def drop_duplicates(self, lease: Lease, seen: int) -> bool:
        """Those that answers up to `seen` have named are nobody's; whether some are left."""
        left = False
        for kind, held in zip(self.kinds, lease.parts, strict=True):
            if isinstance(held, ByPage) and held.duplicates:
                for number, slots in held.duplicates:
                    if 0 < number <= seen:
                        self._give(kind, lease, slots)
                held.duplicates = [each for each in held.duplicates if not 0 < each[0] <= seen]
                left = left or bool(held.duplicates)
        return left

    # -- leases: what they give back --------------------------------------------------------------------------------

    def fence(self, lease: Lease) -> None:
        """Its session ended: its own slots are fenced from now on."""
        for kind, held in zip(self.kinds, lease.parts, strict=True):
            pool, own = self.index.pools[kind.device], len(held.own) // SLOT_BYTES
            pool.leased -= own
            pool.fenced += own

    def give_back(self, lease: Lease) -> None:
        """Exactly what it took, before Full's locks are let go of."""
        for kind, held in zip(self.kinds, lease.parts, strict=True):
            if isinstance(held, ByEnd):
                self._read(kind, held, lease)
                self._give(kind, lease, bytes(held.slots))
            else:
                self._give(kind, lease, held.own)
                if lease.committed > held.pinned:
                    self.order(kind.device).let_go(lease.node, (lease.committed - held.pinned) * self.page_bytes)
                if held.host_pages:
                    assert kind.host is not None
                    self.order(kind.host).let_go(lease.host_node, held.host_pages * self.page_bytes)
        lease.parts = ()

    def _give(self, kind: Kind, lease: Lease, slots: bytes) -> None:
        pool = self.index.pools[kind.device]
        if lease.session.ended:
            pool.fenced -= len(slots) // SLOT_BYTES
        else:
            pool.leased -= len(slots) // SLOT_BYTES
        pool.give(slots)

    # -- pins -------------------------------------------------------------------------------------------------------

    def pin(self, path: list[Node], ends: Sequence[Node | None]) -> tuple[tuple[int, Node, int], ...]:
        """Lock what a match of the path needs; `ends`: of each tier, where Full is locked to."""
        matched = sum(node.num_bytes for node in path)
        depths: dict[Node, int] = {}
        places: list[tuple[int, Node, int]] = []
        for kind in self.kinds:
            if not kind.resource.by_end:
                path = self._split_path(path, max(0, matched // self.page_bytes - kind.resource.reach))
        at = 0
        for node in path:
            at += node.num_bytes
            depths[node] = at
        for kind in self.kinds:
            first = matched - kind.resource.reach * self.page_bytes
            for tier, end in enumerate(ends):
                if end is None:
                    continue
                if kind.resource.by_end:
                    if depths[end] == matched:
                        places.append((kind.device + tier, end, 1))
                elif depths[end] > first:
                    places.append((kind.device + tier, end, depths[end] - max(0, first)))
        for c, node, num_bytes in places:
            self.order(c).hold(node, num_bytes)
        return tuple(places)

    def unpin(self, places: Sequence[tuple[int, Node, int]]) -> None:
        for c, node, num_bytes in places:
            self.order(c).let_go(node, num_bytes)

    # -- copies to the host -----------------------------------------------------------------------------------------

    def send_along(self, ticket: Ticket, num_bytes: int) -> tuple[Part, ...]:
        """What of companions, on the last so many bytes of the path to its end, goes to the host with a copy.

        The copy has Full locked in both tiers, as far as its end.
        """
        index, page_bytes = self.index, self.page_bytes
        depth = self._depth(ticket.end)
        parts: list[Part] = []
        ranges: list[tuple[int, int, int]] = []
        for kind in self.kinds:
            c = kind.host
            assert c is not None
            pool = index.pools[c]
            wanted = self._lacking(kind, ticket.end, depth, num_bytes)
            chosen, need = self._fitting(kind, wanted, pool.free + pool.evictable)
            if need > pool.free:
                self.evict(c, need)
                wanted = self._lacking(kind, ticket.end, depth, num_bytes)  # nodes may have been joined
                chosen, need = self._fitting(kind, wanted, pool.free)
            skipped = sum(kind.size(node.num_bytes // page_bytes) for node, _ in wanted) - need
            if skipped:
                self.count(kind, "backup_slots_skipped", skipped)
            if not chosen:
                continue
            chosen.reverse()
            slots = pool.take(need)
            pool.cached += need
            sources: list[bytes] = []
            place = 0
            for node, end in chosen:
                size = kind.size(node.num_bytes // page_bytes) * SLOT_BYTES
                node.cells[c] = slots[place : place + size]
                place += size
                node.writing |= 1 << c
                sources.append(node.cells[kind.device])
                amount = 1 if kind.resource.by_end else node.num_bytes
                self.order(c).put(node)  # whose place may be locked already
                self.order(c).hold(node, amount)
                self.order(kind.device).hold(node, amount)
                ranges.append((c, end if kind.resource.by_end else end - node.num_bytes, end))
            parts.append(Part(kind.resource.name, b"".join(sources), slots))
            self.count(kind, "backup_slots", need)
        ticket.depth, ticket.ranges = depth, ranges
        return tuple(parts)

    def _lacking(self, kind: Kind, node: Node | None, depth: int, num_bytes: int) -> list[tuple[Node, int]]:
        """(node, where it ends) on the last so many bytes of a path that are on the device and not on the host."""
        found: list[tuple[Node, int]] = []
        while num_bytes > 0 and node is not None and node.parent is not None:
            if node.cells[kind.device] is not None and node.cells[kind.host] is None:  # type: ignore[index]
                found.append((node, depth))
            num_bytes -= node.num_bytes
            depth -= node.num_bytes
            node = node.parent
        return found

    def _fitting(self, kind: Kind, wanted: list[tuple[Node, int]], room: int) -> tuple[list[tuple[Node, int]], int]:
        """As many of them, from the first on, as there is room for, and their slots."""
        need = 0
        for number, (node, _) in enumerate(wanted):
            size = kind.size(node.num_bytes // self.page_bytes)
            if need + size > room:
                return wanted[:number], need
            need += size
        return list(wanted), need

    def _depth(self, node: Node | None) -> int:
        depth = 0
        while node is not None:
            depth += node.num_bytes
            node = node.parent
        return depth

    def back_up(self, end: Node, pages: int) -> None:
        """Copy to the host what of the last `pages` of the path to `end` is new on it, where Full is there already."""
        if self.T <= HOST:
            return
        index = self.index
        last: Node | None = end
        left = pages * self.page_bytes
        while left > 0 and last is not None and last.parent is not None:
            if last.cells[HOST] is not None and self._lacks(last):
                break
            left -= last.num_bytes
            last = last.parent
        else:
            return
        ticket = Ticket(TicketId(index.new_id()), Tier.HOST, last, 0, None)
        index.orders[HOST].pin(last)
        index.orders[DEVICE].pin(last)
        parts = self.send_along(ticket, left)
        if not parts:
            index.orders[HOST].unpin(last)
            index.orders[DEVICE].unpin(last)
            return
        index.writes.append(ticket)
        name = index.resources[HOST].name
        index.emit(Copy(ticket.id, name, Tier.DEVICE, Tier.HOST, b"", b"", None, parts))

    def _lacks(self, node: Node) -> bool:
        """Something of it is on the device and not on the host."""
        cells = node.cells
        return any(
            kind.host is not None and cells[kind.device] is not None and cells[kind.host] is None for kind in self.kinds
        )

    def covered(self, ticket: Ticket) -> list[tuple[int, Node]]:
        """(host cell, node) of what a copy brings; splits may have made more nodes of it since it was sent."""
        ranges = ticket.ranges
        found: list[tuple[int, Node]] = []
        if not ranges:
            return found
        lowest = min(start for _, start, _ in ranges)
        node, end = ticket.end, ticket.depth
        by_end = self.index.tree.by_end
        while node is not None and node.parent is not None and end >= lowest:
            start = end - node.num_bytes
            for c, low, high in ranges:
                if end == high if by_end[c] else low <= start and end <= high:
                    found.append((c, node))
            node, end = node.parent, start
        return found

    def written(self, ticket: Ticket) -> None:
        """A copy that went well: its pages are on the host."""
        for c, node in self.covered(ticket):
            node.writing &= ~(1 << c)
            amount = 1 if self.index.tree.by_end[c] else node.num_bytes
            self.order(c).let_go(node, amount)
            self.order(c - HOST).let_go(node, amount)
            self.index.tell(c, node, True)

    def unwrite(self, ticket: Ticket) -> list[tuple[int, bytes]]:
        """A copy that comes to nothing: (host cell, slots) that its pages had there, which are not counted any more.

        What it reads stays locked until it is over, see `let_go`.
        """
        found: list[tuple[int, bytes]] = []
        kept: list[tuple[int, Node, int]] = []
        by_end = self.index.tree.by_end
        lowest: dict[int, int] = {}
        for c, start, _ in ticket.ranges:
            lowest[c] = min(start, lowest.get(c, start))
        for c, node in self.covered(ticket):
            amount = 1 if by_end[c] else node.num_bytes
            run = node.cells[c]
            node.writing &= ~(1 << c)
            self.order(c).let_go(node, amount)
            self.order(c).withdraw(node)
            node.cells[c] = None
            self.index.pools[c].cached -= len(run) // SLOT_BYTES
            found.append((c, run))
            if by_end[c]:
                kept.append((c - HOST, node, 1))
            else:
                self.order(c - HOST).let_go(node, amount)
        assert ticket.end is not None
        for c, start in lowest.items():
            if not by_end[c]:  # the last of what it locks of Full, as every holder's
                kept.append((c - HOST, ticket.end, ticket.depth - start))
                self.order(c - HOST).hold(ticket.end, ticket.depth - start)
        ticket.ranges = ()
        ticket.kept = kept
        return found

    def let_go(self, ticket: Ticket) -> None:
        """A copy that came to nothing is over: nothing of it is read any more."""
        for c, node, num_bytes in ticket.kept:
            self.order(c).let_go(node, num_bytes)
        ticket.kept = ()


def _out(node: Node) -> bool:
    """It has left the tree. As a call, for mypy takes an attribute that it has seen to be what it was."""
    return node.parent is None
