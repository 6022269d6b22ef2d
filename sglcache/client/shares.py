"""What a lease holds of its tree's companions: pages of a window, states.

The daemon tells of each companion by its place in the Welcome, and of what changed: with the grant, with an extend, and
with a commit. A commit's answer counts once it was waited for, as its canonical pages do; an extend's, as it comes.
Commits are taken in in the order in which they took effect, whatever the order in which they are waited for.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from sglcache.wire.control import WireShare

SLOT_BYTES = 4


class WindowShare:
    """A lease's pages of a window: those of its page table from `first_page` on. What lies before is no more its.

    A commit takes from the front what was slid past, and may name other pages than before, as of `Lease.slots`.
    """

    by_end = False

    __slots__ = ("_table", "_view", "first_page")

    def __init__(self, share: WireShare) -> None:
        self.first_page, self._table, _ = share
        """The page of the lease's table with which `slots` begins."""
        self._view: tuple[bytes, npt.NDArray[np.int32]] | None = None

    @property
    def slots(self) -> npt.NDArray[np.int32]:
        """int32: where page first_page + i of the tokens lives in the window's pool. A new array after each change."""
        table, view = self._table, self._view
        if view is None or view[0] is not table:
            view = self._view = (table, np.frombuffer(table, "<i4").copy())
        return view[1]

    @property
    def table(self) -> npt.NDArray[np.int32]:
        """int32: as `slots`, from the first page of the tokens on; -1 for pages that are not the lease's any more."""
        return np.concatenate((np.full(self.first_page, -1, np.int32), self.slots))

    def grow(self, slots: bytes) -> None:
        """An extend brought these."""
        if slots:
            self._table += slots

    def hear(self, share: WireShare) -> WireShare:
        """A commit took effect: what `apply` needs to know of it."""
        return share

    def apply(self, heard: WireShare) -> None:
        """It was waited for."""
        first, slots, _ = heard
        # An extend that was answered since has put more behind what the commit knew.
        rest = self._table[(first - self.first_page) * SLOT_BYTES :]
        self._table = slots + rest[len(slots) :]
        self.first_page = first

    def __repr__(self) -> str:
        stop = self.first_page + len(self._table) // SLOT_BYTES
        return f"WindowShare(pages {self.first_page} to {stop})"


class StateShare:
    """A lease's slots of states: those that it may write, and the one that its match ends with."""

    by_end = True

    __slots__ = ("_shown", "_told", "source")

    def __init__(self, share: WireShare) -> None:
        _, slots, self.source = share
        """The state with which the match ends, to be read only, and until the first commit took effect; None: there is
        none, the sequence begins from nothing."""
        self._shown = _numbers(slots)
        self._told = _numbers(slots)  # as the last answer that came says

    @property
    def slots(self) -> npt.NDArray[np.int32]:
        """int32, in order: the lease's own, to be written and committed. A new array each time."""
        return np.array(list(dict.fromkeys(self._shown)), np.int32)

    def grow(self, slots: bytes) -> None:
        """An extend brought these. One may be back that a commit gave away which was not waited for yet."""
        more = _numbers(slots)
        self._shown += more
        self._told += more

    def hear(self, share: WireShare) -> tuple[list[int], int | None]:
        """A commit took effect: what `apply` needs to know of it."""
        _, left, source = share
        before, self._told = self._told, _numbers(left)
        kept = set(self._told)
        return [slot for slot in before if slot not in kept], source

    def apply(self, heard: tuple[list[int], int | None]) -> None:
        """It was waited for."""
        gone, self.source = heard
        for slot in gone:
            self._shown.remove(slot)  # the first, which is the older

    def __repr__(self) -> str:
        return f"StateShare(own {self.slots.tolist()}, source {self.source})"


def _numbers(slots: bytes) -> list[int]:
    return list(map(int, np.frombuffer(slots, "<i4")))


Share: TypeAlias = WindowShare | StateShare

KINDS: dict[str, type[WindowShare] | type[StateShare]] = {"window": WindowShare, "mamba": StateShare}
"""By the companion's kind, as the Welcome names it."""


class Shares:
    """A lease's, in the Welcome's order."""

    __slots__ = ("_heard", "of")

    def __init__(self, kinds: tuple[str, ...], granted: tuple[WireShare, ...]) -> None:
        self.of: dict[str, Share] = {kind: KINDS[kind](share) for kind, share in zip(kinds, granted, strict=True)}
        self._heard: dict[int, list[Any]] = {}  # by the number of a commit's answer that was not waited for

    def grow(self, slots: tuple[bytes, ...]) -> None:
        """An extend took effect: of each companion, the new slots."""
        for share, more in zip(self.of.values(), slots, strict=True):
            share.grow(more)

    def hear(self, reply: int, shares: tuple[WireShare, ...]) -> None:
        """A commit took effect: `reply` is the number of its answer."""
        self._heard[reply] = [share.hear(told) for share, told in zip(self.of.values(), shares, strict=True)]

    def apply(self, reply: int) -> None:
        """It was waited for; with it counts what came before it."""
        for number in [number for number in self._heard if number <= reply]:
            for share, heard in zip(self.of.values(), self._heard.pop(number), strict=True):
                share.apply(heard)
