"""Who waits for room that locks leave too little of: in which order, how many, and until when.

Whoever stands here holds nothing, no page and no pin: it costs others no room, and two can't wait for each other. What
it would match is matched anew when its turn comes.

**Order.** Extends go before acquires: who extends holds the pages that an acquire waits for, and must get on to give
them back. Of each kind sessions take turns, and each session's commands go in the order they came. The first stays the
first until it has room, its deadline is over, or it is withdrawn: so a large one is not starved by small ones.

**Back again.** Who is to have room once a copy of ours is over waits for that outside, with its pins. If others, who
needed no room, have locked what the copy let go of, it goes to the head of the line, as if it had never left.

**Nobody overtakes.** While anyone stands here no acquire that needs room is granted but the first, and while an extend
does no extend is, whether there would be room for it or not; what needs no room is never held up. So an acquire waits
at most until those before it were served and the leases that live have grown to their ends: nothing new begins.

**Tenants** with a ceiling stand in lines of their own, and these take turns: whose own ceiling is in its way stands
aside, for it waits for nothing that others take, and holds up its tenant alone.

**Bounds.** At most so many in all, and of one session; beyond that it is `Busy`, at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from sglcache.core.effects import Grant
from sglcache.core.leases import Session
from sglcache.errors import Busy

FOR_EVER = float("inf")
MAX_BYTES = 256 << 20  # of tokens that acquires in line keep


class Patience(NamedTuple):
    """How long a command may wait, on the caller's clock."""

    since: float  # when it came
    room: float | None = None  # for room that others lock, until then; None: it is refused at once
    copies: float = FOR_EVER  # for the ends of copies of ours that alone lock its room, until then


@dataclass(slots=True, eq=False)
class Standing:
    """A command in line."""

    request: int
    session: Session
    patience: Patience
    need: tuple[int, ...]  # slots of each resource, as of when it was last tried
    retry: Callable[[], Grant | None] | None = None  # an acquire's: NoSpace, and nothing is changed; None: it goes on
    extends: Any = None  # the index's record of extends
    num_bytes: int = 0  # of tokens that are kept for it
    tenant: int = 0
    aside: bool = False  # when last tried its tenant's own ceiling was in the way


class Rota:
    """Standings of one kind and tenant: sessions in turns, each session's in order."""

    def __init__(self) -> None:
        self._by_session: dict[Session, deque[Standing]] = {}  # whose turn it is comes first
        self.size = 0

    @property
    def first(self) -> Standing | None:
        return next(iter(self._by_session.values()))[0] if self._by_session else None

    def add(self, standing: Standing, first: bool = False) -> None:
        """`first`: before all others, and it is its session's turn."""
        if first:
            row = self._by_session.pop(standing.session, deque())
            row.appendleft(standing)
            self._by_session = {standing.session: row, **self._by_session}
        else:
            self._by_session.setdefault(standing.session, deque()).append(standing)
        self.size += 1

    def remove(self, standing: Standing, served: bool) -> None:
        """`served`: it is the first, and its session's turn is over."""
        session = standing.session
        row = self._by_session[session]
        row.remove(standing)
        self.size -= 1
        if served or not row:
            del self._by_session[session]
            if row:
                self._by_session[session] = row

    def place(self, standing: Standing) -> int:
        """1: it is the first; that so many are served with it, if none leaves and none comes."""
        mine = self._by_session[standing.session].index(standing)
        place, before = 1, True
        for session, row in self._by_session.items():
            if session is standing.session:
                place, before = place + mine, False
            else:
                place += min(len(row), mine + before)
        return place

    def of(self, session: Session) -> list[Standing]:
        return list(self._by_session.get(session, ()))

    def __iter__(self) -> Iterator[Standing]:
        for row in self._by_session.values():
            yield from row


class Rotas:
    """Standings of one kind: tenants in turns, and of each its own `Rota`."""

    def __init__(self) -> None:
        self._by_tenant: dict[int, Rota] = {}  # whose turn it is comes first
        self.size = 0

    def firsts(self) -> list[Standing]:
        """Of each tenant, in order."""
        return [rota.first for rota in self._by_tenant.values() if rota.first is not None]

    def add(self, standing: Standing, first: bool = False) -> None:
        if first:
            rota = self._by_tenant.pop(standing.tenant, Rota())
            self._by_tenant = {standing.tenant: rota, **self._by_tenant}
        self._by_tenant.setdefault(standing.tenant, Rota()).add(standing, first)
        self.size += 1

    def remove(self, standing: Standing, served: bool) -> None:
        tenant = standing.tenant
        rota = self._by_tenant[tenant]
        rota.remove(standing, served)
        self.size -= 1
        if served or not rota.size:
            del self._by_tenant[tenant]
            if rota.size:
                self._by_tenant[tenant] = rota

    def place(self, standing: Standing) -> int:
        mine, place, before = self._by_tenant[standing.tenant].place(standing), 0, True
        for tenant, rota in self._by_tenant.items():
            if tenant == standing.tenant:
                place, before = place + mine, False
            else:
                place += min(rota.size, mine - 1 + before)
        return place

    def of(self, session: Session) -> list[Standing]:
        return [standing for rota in self._by_tenant.values() for standing in rota.of(session)]

    def __iter__(self) -> Iterator[Standing]:
        for rota in self._by_tenant.values():
            yield from rota


class Line:
    """Everybody who waits for room."""

    def __init__(self, max_in_all: int, max_of_session: int) -> None:
        self.max_in_all = max_in_all
        self.max_of_session = max_of_session
        self.extends = Rotas()
        self.acquires = Rotas()
        self._num_bytes = 0

    def __len__(self) -> int:
        return self.extends.size + self.acquires.size

    def __iter__(self) -> Iterator[Standing]:
        yield from self.extends
        yield from self.acquires

    def __contains__(self, standing: object) -> bool:
        return any(each is standing for each in self)

    def firsts(self) -> list[Standing]:
        """The first of each tenant, in the order in which they are served: extends, then acquires of those tenants
        that have no extend in line."""
        extends, acquires = self.extends.firsts(), self.acquires.firsts()
        if extends and acquires:
            growing = {standing.tenant for standing in extends}
            acquires = [standing for standing in acquires if standing.tenant not in growing]
        return extends + acquires

    @property
    def first(self) -> Standing | None:
        return next(iter(self.firsts()), None)

    def holds_up(self, tenant: int) -> bool:
        """Somebody is here before whom no acquire of that tenant may have room."""
        return any(first.tenant == tenant or not first.aside for first in self.firsts())

    def extends_hold_up(self, tenant: int) -> bool:
        """The same, and no extend."""
        return any(first.tenant == tenant or not first.aside for first in self.extends.firsts())

    def stand(self, standing: Standing, first: bool = False) -> None:
        """Busy, and nothing changed, if there are too many. `first`: at the head of those of its kind."""
        mine = len(self.extends.of(standing.session)) + len(self.acquires.of(standing.session))
        num_bytes = self._num_bytes + standing.num_bytes
        if len(self) >= self.max_in_all or mine >= self.max_of_session or num_bytes > MAX_BYTES:
            full = f"{len(self)} commands wait for room, and limits.max_waiting is {self.max_in_all}"
            if mine >= self.max_of_session:
                full = f"{mine} commands of this session wait for room, and limits.max_waiting_per_session is "
                full += f"{self.max_of_session}"
            elif len(self) < self.max_in_all:
                full = f"what the commands that wait for room have to say takes {num_bytes} bytes with this one's, and "
                full += f"{MAX_BYTES} may be kept"
            raise Busy(
                f"{full}: nothing was queued; send fewer at once, or try again later",
                waiting=len(self),
                waiting_of_session=mine,
                max_waiting=self.max_in_all,
                max_waiting_of_session=self.max_of_session,
                waiting_bytes=num_bytes,
            )
        self._num_bytes = num_bytes
        self._kind(standing).add(standing, first)

    def leave(self, standing: Standing, served: bool = False) -> None:
        """It waits no longer. `served`: its turn came, so now it is another session's."""
        self._kind(standing).remove(standing, served)
        self._num_bytes -= standing.num_bytes

    def place(self, standing: Standing) -> int:
        """How many are served before it, and itself, as things stand."""
        if standing.retry is None:
            return self.extends.place(standing)
        return self.extends.size + self.acquires.place(standing)

    def of(self, session: Session) -> list[Standing]:
        return [*self.extends.of(session), *self.acquires.of(session)]

    def late(self, now: float) -> list[Standing]:
        """Those whose time is over."""
        return [standing for standing in self if _deadline(standing) <= now]

    @property
    def next_deadline(self) -> float | None:
        return min(map(_deadline, self), default=None)

    def _kind(self, standing: Standing) -> Rotas:
        return self.extends if standing.retry is None else self.acquires


def _deadline(standing: Standing) -> float:
    room = standing.patience.room
    return FOR_EVER if room is None else room
