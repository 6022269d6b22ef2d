"""Load slots: how a runner learns, layer by layer, that what it got from the host is readable.

A load-back has a slot of the load ring from its grant to the end of its copy, and a generation, which rises with
each use of the slot. The answer names both; the runner waits for the ring, not for a frame. Generations never go
back, so one who looks late sees a higher number and knows that its own load is over.

There are as many slots as configured. A load that finds none is parked: its answer goes out once its copy is done,
and then names no slot, for there is nothing left to wait for. That is rare (copies complete in order, so it takes more
loads in flight than slots), bounded (the copy ends by itself) and needs no second mechanism.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sglcache.core.effects import Grant
from sglcache.units import SessionId, TicketId


class Load(NamedTuple):
    """A load-back on its way. Where it has no slot, its answer waits."""

    session: SessionId
    request: int
    grant: Grant
    slot: int | None
    generation: int


class Loads:
    """Owns the slots. `tell(load, ok)` writes the ring and rings the session's doorbells."""

    def __init__(self, num_slots: int) -> None:
        self.tell: Callable[[Load, bool], None] = _nobody  # the sessions' part takes it over
        self.num_parked = 0  # since the start
        self._generations = [0] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._loads: dict[TicketId, Load] = {}

    def begin(self, session: SessionId, request: int, grant: Grant) -> Load:
        """Find a slot for the grant's load, if there is one. Answer now where there is; else when `end` tells."""
        assert grant.load is not None, f"{grant} loads nothing"
        slot, generation = None, 0
        if self._free:
            slot = self._free.pop()
            generation = self._generations[slot] = self._generations[slot] + 1
        else:
            self.num_parked += 1
        load = self._loads[grant.load] = Load(session, request, grant, slot, generation)
        return load

    def end(self, ticket: TicketId, ok: bool) -> None:
        """The copy is over. Of a ticket that is no load-back nothing is known here."""
        load = self._loads.pop(ticket, None)
        if load is None:
            return
        self.tell(load, ok)
        # A slot whose load failed is not used again: a later generation would tell who looks late that all went well.
        if load.slot is not None and ok:
            self._free.append(load.slot)


def _nobody(load: Load, ok: bool) -> None:
    raise AssertionError(f"nobody is there to be told of {load}")
