"""Tenants: one floor and one ceiling for each, on the device and on the host, changeable at run time.

Limits are in pages of Full. What the companions of a hybrid model have goes with Full, or alone by the order of their
own pools, which know no tenants.

* **Ceiling**: what a tenant is charged with (cached, leased, fenced) and what it asks for are together no more than it.
  Its own pages that nobody holds are evicted for that first; if that is too little, it is refused, with its numbers.
  A ceiling that is set below what is charged already takes what nobody holds at once, in slices, and what is held as
  soon as it is let go of.
* **Floor**: what nobody holds of a tenant that has no more than it is not evicted for others; `shares` says exactly
  what that promises where prefixes are shared. It reserves nothing: free pages are whoever asks first's, and who holds
  pages keeps them. The floors of a tier add up to no more than it has.
* On the host a write-through is charged to who pays on the device, one copy for each tenant on the path. What the
  limits leave no room for is skipped, counted, and tried again like what finds no room at all.

A request names its tenant; one that is not configured is the tenant `default`, number 0. So clients make no tenants.
Who waits for room is asked about in `left`, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from sglcache.core.departures import Cause
from sglcache.core.limits import DEFAULT, Limits, check_limits
from sglcache.core.shares import Shared
from sglcache.errors import BadRequest, ConfigError
from sglcache.units import Tier

if TYPE_CHECKING:
    from sglcache.core.index import Index
    from sglcache.core.tree import Node

DEVICE, HOST = 0, 1


class TenantStats(NamedTuple):
    """One tenant on one tier, in pages; and counters since the start."""

    tenant: str
    tier: Tier
    floor: int
    ceiling: int | None
    charged: int  # cached, and held by leases and fetches
    cached: int
    locked: int  # of the cached ones
    taken: int  # evicted to make room for other tenants
    broken: int  # of these, below the floor: they hung on another tenant's pages
    skipped: int  # not copied here, since the limits left no room


class Copied(NamedTuple):
    """By tenant, device pages that copies of ours alone hold, and those of them that leave with the copies' end."""

    pages: dict[int, int]
    gone: dict[int, int]


@dataclass
class Tally:
    """Pages that are promised: in all, and by tenant."""

    total: int = 0
    by: dict[int, int] = field(default_factory=dict)

    def add(self, tenant: int, num_pages: int) -> None:
        self.total += num_pages
        self.by[tenant] = self.by.get(tenant, 0) + num_pages

    def of(self, tenant: int) -> int:
        return self.by.get(tenant, 0)


NOBODY: Mapping[int, int] = {}
NO_COPIES = Copied({}, {})


class Tenants:
    """Those of one index. A tenant is a number; `names` says whose."""

    def __init__(self, index: Index, limits: Mapping[str, Limits]) -> None:
        self.index = index
        self.limits: dict[str, Limits] = {DEFAULT: Limits(), **limits}
        wrong = check_limits(self.limits, self._totals)
        if wrong is not None:
            raise ConfigError(wrong)
        self.names = list(self.limits)
        self._numbers = {name: number for number, name in enumerate(self.names)}
        orders = index.orders[: index.T]
        self.orders = [order for order in orders if isinstance(order, Shared)]
        assert len(self.orders) == index.T
        self.shares = [order.shares for order in self.orders]  # by tier and number
        self.place = [order.tenant for order in self.orders]  # where a node says whose a cell is, by tier
        self.above: list[tuple[int, int]] = []  # (tier, number) of who is above a ceiling that was lowered
        for name in self.names:
            self._add(name)

    @property
    def _totals(self) -> list[int]:
        config = self.index.config
        return [config.num_pages, config.host_pages][: self.index.T]

    def _add(self, name: str) -> None:
        for tier, order in enumerate(self.orders):
            share = order.add()
            share.floor, share.ceiling = self.limits[name].of(tier)

    def number(self, name: str | None) -> int:
        return 0 if name is None else self._numbers.get(name, 0)

    def set(self, name: str, changes: Mapping[str, int | None]) -> None:
        """Change these of its limits, fields of `Limits`; a new name is a new tenant. BadRequest: they can't be so."""
        limits = {**self.limits, name: replace(self.limits.get(name, Limits()), **dict[str, Any](changes))}
        wrong = check_limits(limits, self._totals)
        if wrong is not None:
            raise BadRequest(f"{wrong}; nothing was changed", tenant=name, **changes)
        self.limits = limits
        if name not in self._numbers:
            self._numbers[name] = len(self.names)
            self.names.append(name)
            self._add(name)
        for tier, shares in enumerate(self.shares):
            share = shares[self._numbers[name]]
            share.floor, share.ceiling = limits[name].of(tier)
        self.look()

    def look(self) -> None:
        """Have what is above a ceiling taken, as far as nobody holds it."""
        self.above = [
            (tier, number)
            for tier, shares in enumerate(self.shares)
            for number in range(len(shares))
            if self.over(tier, number, 0)
        ]

    # -- who pays ---------------------------------------------------------------------------------------------------

    def payer(self, tier: int, node: Node) -> str:
        """Who is charged with the node's pages on this tier."""
        number: int = node.cells[self.place[tier]]
        return self.names[number]

    def belongs(self, nodes: Iterable[Node], tier: int, number: int) -> None:
        """Cells that have just been put, and are not locked yet, are this tenant's."""
        place = self.place[tier]
        for node in nodes:
            node.cells[place] = number

    def lease(self, tier: int, number: int, num_pages: int) -> None:
        """It has so many pages more, which are no cached ones; fewer, if below 0."""
        self.shares[tier][number].leased += num_pages

    def leaving(self, node: Node, num_pages: int) -> None:
        """So many device pages that `node` ends with leave with the end of a copy; below 0: it is over."""
        self.shares[DEVICE][node.cells[self.place[DEVICE]]].leaving += num_pages

    def unlocked(self, tier: int, nodes: Iterable[tuple[Node, int]]) -> dict[int, int]:
        """By tenant, of these nodes and so many of their pages, those that nothing locks yet."""
        place, lock = self.place[tier], len(self.index.pools) + tier
        found: dict[int, int] = {}
        for node, num_pages in nodes:
            cells = node.cells
            if cells[tier] is not None and not cells[lock]:
                tenant = cells[place]
                found[tenant] = found.get(tenant, 0) + num_pages
        return found

    # -- who may have how much ----------------------------------------------------------------------------------------

    def room(self, tier: int, number: int, pinned: Mapping[int, int] = NOBODY, copied: Copied = NO_COPIES) -> int:
        """Pages of the tier that can be had for this tenant, its ceiling left aside, with so many of whose locked, and
        once copies are over. Exact: see `shares`."""
        pool = self.index.pools[tier]
        room = pool.free + pool.evictable - sum(pinned.values()) + sum(copied.pages.values())
        for other, share in enumerate(self.shares[tier]):
            if share.floor and other != number:
                room -= share.kept(pinned.get(other, 0), copied.pages.get(other, 0), copied.gone.get(other, 0))
        return room

    def headroom(self, tier: int, number: int, pinned: Mapping[int, int] = NOBODY, copied: Copied = NO_COPIES) -> int:
        """Pages until it is at its ceiling, once all of its own has gone that nobody holds."""
        share = self.shares[tier][number]
        if share.ceiling is None:
            return 1 << 62
        held = share.locked + share.leased + pinned.get(number, 0) - copied.pages.get(number, 0)
        return share.ceiling - held

    def left(
        self,
        number: int,
        promised: Tally,
        pinned: Mapping[int, int] = NOBODY,
        copied: Copied = NO_COPIES,
        tier: int = DEVICE,
    ) -> int:
        """Pages that can be had for this tenant beside those that are promised. The one answer to whether there is
        room for somebody."""
        room = self.room(tier, number, pinned, copied) - promised.total
        return min(room, self.headroom(tier, number, pinned, copied) - promised.of(number))

    def over(self, tier: int, number: int, num_pages: int) -> bool:
        """It would come over its ceiling with so many more, unless some of its own go."""
        share = self.shares[tier][number]
        return share.ceiling is not None and share.charged + num_pages > share.ceiling

    def free(self, tier: int, number: int) -> int:
        """Pages that it can have without anything going."""
        share, free = self.shares[tier][number], self.index.pools[tier].free
        return free if share.ceiling is None else min(free, share.ceiling - share.charged)

    def short(self, wants: Sequence[tuple[int, int]]) -> bool:
        """More device pages are wanted than can be had now, by (tenant, pages) in order."""
        tally = Tally()
        for number, num_pages in wants:
            if num_pages and num_pages > self.left(number, tally):
                return True
            tally.add(number, num_pages)
        return False

    def crowded(self, wants: Sequence[tuple[int, int]]) -> bool:
        """Something has to go for these."""
        tally = Tally()
        for number, num_pages in wants:
            tally.add(number, num_pages)
        if tally.total > self.index.pools[DEVICE].free:
            return True
        return any(self.over(DEVICE, number, num_pages) for number, num_pages in tally.by.items() if num_pages)

    def facts(self, number: int, need: int, promised: Tally, locked: int, tier: int = DEVICE) -> dict[str, Any]:
        """What a refusal says of the tenant, and of the others' floors. `locked`: of its own, with what a match
        would lock."""
        share = self.shares[tier][number]
        others = (each.kept() for other, each in enumerate(self.shares[tier]) if each.floor and other != number)
        return {
            "tenant": self.names[number],
            "floor": share.floor,
            "ceiling": share.ceiling,
            "charged": share.charged,
            "tenant_locked": locked,
            "tenant_promised": promised.of(number),
            "kept_by_floors": sum(others),
            "need": need,
        }

    # -- making room --------------------------------------------------------------------------------------------------

    def make_room(self, wants: Sequence[tuple[int, int]]) -> bool:
        """Evict until these can be taken from the device; False: a slice was used up, or copies of ours lock what is
        needed. `short` says that they can."""
        tally = Tally()
        for number, num_pages in wants:
            if num_pages:
                tally.add(number, num_pages)
                if not self.index.evict(DEVICE, tally.total, number, tally.of(number)):
                    return False
        return True

    def stuck(self, wants: Sequence[tuple[int, int]]) -> bool:
        """`make_room` can't get on before a copy is over: all that these lack is on its way, or nothing else can go."""
        pool, shares = self.index.pools[DEVICE], self.shares[DEVICE]
        tally = Tally()
        for number, num_pages in wants:
            tally.add(number, num_pages)
        if not self.crowded(wants):
            return False
        if not pool.evictable:
            return True
        if tally.total > pool.free + self.index.backups.demoting:
            return False
        return all(
            shares[number].ceiling is None
            or not num_pages
            or shares[number].charged - shares[number].leaving + num_pages <= shares[number].ceiling  # type: ignore[operator]
            for number, num_pages in tally.by.items()
        )

    def evict(self, tier: int, num_pages: int, number: int, extra: int) -> bool:
        """As `Index.evict`, for this tenant, which is to be charged with `extra` pages more."""
        index = self.index
        pool, order, mine = index.pools[tier], self.orders[tier], self.shares[tier][number]
        backups, companions = index.backups, index.companions
        copying = tier == DEVICE and backups.policy.on_eviction and index.T > HOST
        left = index.config.evict_slice
        while True:
            own = mine.ceiling is not None and mine.charged - mine.leaving + extra > mine.ceiling
            if not own and pool.free + (backups.demoting if copying else 0) >= num_pages:
                break
            if left <= 0:
                return False
            left -= order.effort
            found = order.victim_for(number, own)
            if found is None:
                if order.unfinished:
                    continue
                assert copying or not (num_pages or extra), f"nothing to evict: {pool}, {num_pages} wanted"
                return False
            node, most = found
            size = node.num_bytes // index.page_bytes
            if size > most:
                index.tree.split(node, (size - most) * index.page_bytes)
                size = most
            self._count(tier, number, node, size)
            if copying and node.cells[HOST] is None and backups.demote(node):
                continue
            parent = node.parent
            index.drop(tier, node)
            if companions is not None:
                companions.dropped(node, parent)
        return pool.free >= num_pages and not self.over(tier, number, extra)

    def _count(self, tier: int, number: int, node: Node, num_pages: int) -> None:
        whose = node.cells[self.place[tier]]
        if whose != number:
            share = self.shares[tier][whose]
            share.broken += max(0, num_pages - share.spare)
            share.taken += num_pages

    @property
    def trimming(self) -> bool:
        """Something that is above a ceiling can go."""
        return bool(self.above) and self._too_much() is not None

    def trim(self) -> None:
        """A slice of that."""
        if (found := self._too_much()) is not None:
            if self.index.departures is not None:
                self.index.departures.cause = Cause("ceiling", None, found[1])
            self.index.evict(found[0], 0, found[1])

    def _too_much(self) -> tuple[int, int] | None:
        self.above = [(tier, number) for tier, number in self.above if self.over(tier, number, 0)]
        for tier, number in self.above:
            share = self.shares[tier][number]
            assert share.ceiling is not None
            if share.charged - share.leaving > share.ceiling and share.cached > share.locked:
                return tier, number
        return None

    # -- telling ----------------------------------------------------------------------------------------------------

    def stats(self) -> list[TenantStats]:
        return [
            TenantStats(
                name,
                Tier(tier),
                share.floor,
                share.ceiling,
                share.charged,
                share.cached,
                share.locked,
                share.taken,
                share.broken,
                share.skipped,
            )
            for number, name in enumerate(self.names)
            for tier, share in enumerate(shares[number] for shares in self.shares)
        ]
