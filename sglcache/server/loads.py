"""Load slots: how a runner learns, layer by layer, that what it got from the host is readable.

A load-back has a slot of the load ring from its submission to the end of its copy, and a generation, which rises with
each use of the slot. The copy engine marks the slot's layers as they are there, and rings; the loop has no part in it.
The answer to the acquire names slot and generation; the runner waits for the ring, not for a frame. Generations never
go back, so one who looks late sees a higher number and knows that its own load is over.

There are as many slots as configured. A load that finds none is parked: its answer goes out once its copy is done,
and then names no slot, for there is nothing left to wait for. That is rare (copies complete in order, so it takes more
loads in flight than slots), bounded (the copy ends by itself) and needs no second mechanism.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sglcache.core.effects import Grant
from sglcache.memory.engine import LoadPlace
from sglcache.units import SessionId, TicketId


class Load(NamedTuple):
    """A load-back on its way. Where it has no slot, its answer waits."""

    session: SessionId
    request: int
    grant: Grant
    place: LoadPlace | None


class Loads:
    """Owns the slots. `tell(load, ok)` is called at the end of each load that somebody was promised."""

    def __init__(self, num_slots: int) -> None:
        self.tell: Callable[[Load, bool], None] = _nobody  # the sessions' part takes it over
        self.num_parked = 0  # since the start
        self._generations = [0] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._places: dict[TicketId, LoadPlace | None] = {}
        self._loads: dict[TicketId, Load] = {}

    def place(self, ticket: TicketId) -> LoadPlace | None:
        """The slot of a load, which takes one if it is new and there is one. None: it is parked.

        Asked for the copy and for the answer, in either order: an acquire that waited is answered behind its copy.
        """
        if ticket not in self._places:
            place = None
            if self._free:
                slot = self._free.pop()
                self._generations[slot] += 1
                place = LoadPlace(slot, self._generations[slot])
            else:
                self.num_parked += 1
            self._places[ticket] = place
        return self._places[ticket]

    def begin(self, session: SessionId, request: int, grant: Grant) -> Load:
        """Who is promised the grant's load. Answer now where it has a slot; else when its end is told."""
        assert grant.load is not None, f"{grant} loads nothing"
        load = self._loads[grant.load] = Load(session, request, grant, self.place(grant.load))
        return load

    def end(self, ticket: TicketId, ok: bool) -> None:
        """The copy is over. Of a ticket that is no load-back nothing is known here."""
        place = self._places.pop(ticket, None)
        if (load := self._loads.pop(ticket, None)) is not None:
            self.tell(load, ok)
        # A slot whose load failed is not used again: a later generation would tell who looks late that all went well.
        if place is not None and ok:
            self._free.append(place.slot)


def _nobody(load: Load, ok: bool) -> None:
    raise AssertionError(f"nobody is there to be told of {load}")
