"""What makes one kind of cached state different from another: a few pure answers, and nowhere else.

The first resource of an index is `Full`: the layers that keep the KV of every token. Its pages are what the tree is
made of and what routers are told of. Beside it there may be *companions*, for layers that keep less: a page of them
lives in a tier only while Full's does. They come in two shapes, and whoever handles them asks for the shape and not
for the kind:

* **by page**: a slot for each page, like Full; a split divides them.
* **by end**: one slot, which is of the end of a node; a split leaves it to the lower half, the upper one has none.

A tree's kind follows from its list of companions:

    none                        radix; with a host tier, HiRadix
    SlidingWindow               swa; pure swa is the same over a Full of no layers, whose pages have no bytes
    MambaState                  mamba
    SlidingWindow, MambaState   unified

A companion's presence is not prefix-closed as Full's is: a node without it is a *tombstone*, and a match may pass over
it, but end only where every companion says that it may.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

FAR = 1 << 62  # pages since the last gap, before there is one


class Resource(Protocol):
    """The answers. All are pure: they look at their arguments only."""

    name: str
    by_end: bool
    reach: int  # by page: so many pages before the end of a match are needed
    max_per_path: int  # by end: how many there may be on one path; 0: any number

    def split(self, run: bytes, num_pages: int) -> tuple[bytes | None, bytes]:
        """The slots of a node's upper `num_pages` and of the rest."""
        ...

    def join(self, runs: list[bytes]) -> bytes:
        """The slots of a node made of a chain of nodes, root side first. Inverse of `split`."""
        ...

    def step(self, run: int, present: bool, num_pages: int, whole: bool) -> tuple[int, bool]:
        """Pages without a gap up to the end of `num_pages` more, and whether a match may end there.

        `run`: the same before these; FAR at the root. `whole`: that end is a node's.
        """
        ...


class _ByPage:
    by_end = False
    reach = FAR
    max_per_path = 0

    def split(self, run: bytes, num_pages: int) -> tuple[bytes, bytes]:
        cut = num_pages * 4
        return run[:cut], run[cut:]

    def join(self, runs: list[bytes]) -> bytes:
        return b"".join(runs)

    def step(self, run: int, present: bool, num_pages: int, whole: bool) -> tuple[int, bool]:
        run = min(run + num_pages, FAR) if present else 0
        return run, present and run >= min(self.reach, FAR)


class Full(_ByPage):
    """One slot a page; a match may end where every page so far is present; a lease pins the whole path."""

    name = "full"


class SlidingWindow(_ByPage):
    """One slot a page; a match may end where the last `reach` pages are present, or all there are; these are pinned."""

    name = "window"

    def __init__(self, num_pages: int) -> None:
        """`num_pages`: the window's tokens, rounded up to pages; at least 1."""
        assert num_pages >= 1
        self.reach = num_pages


class MambaState:
    """One slot, of a node's end; a match may end exactly there; it alone is pinned."""

    name = "mamba"
    by_end = True
    reach = 0

    def __init__(self, max_per_path: int = 0) -> None:
        self.max_per_path = max_per_path

    def split(self, run: bytes, num_pages: int) -> tuple[None, bytes]:
        return None, run

    def join(self, runs: list[bytes]) -> bytes:
        return runs[-1]

    def step(self, run: int, present: bool, num_pages: int, whole: bool) -> tuple[int, bool]:
        return 0, present and whole


@dataclass(frozen=True)
class Companion:
    """A resource beside Full, and the slots of its pools. `host_slots` without a host tier are none."""

    resource: SlidingWindow | MambaState
    num_slots: int
    host_slots: int = 0
