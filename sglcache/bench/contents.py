"""What a runner that computes nothing has in the pages and slots of its leases: written, and looked at again.

Each resource has patterns of its own, one for each shard that this process maps. What a lease says it has must be there
whole: every page of the match, the window's last pages, the state with which it ends; of exactly that prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from sglcache.bench.pattern import Pattern, Rows, StatePattern
from sglcache.client.client import Member
from sglcache.client.companions import StatePool
from sglcache.memory.geometry import Geometry

Tokens = npt.NDArray[np.uint32]
Layers = Callable[[Any], Sequence[Sequence[Rows]]]
PARTS = 1 << 10  # what tells a shard's bytes of one resource from those of the next


class WrongContents(Exception):
    """A page or a slot does not hold what was written there for these tokens, or is missing."""


class Checked(NamedTuple):
    """What was found right."""

    tokens: int = 0  # with every layer's KV of them
    window_tokens: int = 0
    states: int = 0


class Window(Protocol):
    """As `WindowShare` has them."""

    @property
    def first_page(self) -> int: ...
    @property
    def table(self) -> npt.NDArray[np.int32]: ...


class State(Protocol):
    """As `StateShare` has it."""

    @property
    def source(self) -> int | None: ...


class Table(Protocol):
    """What a lease says of its pages; a `Lease`, or what of it a worker was told."""

    @property
    def matched_tokens(self) -> int: ...
    @property
    def reaches(self) -> tuple[int, ...]: ...
    @property
    def slots(self) -> npt.NDArray[np.int32]: ...
    @property
    def window(self) -> Window | None: ...
    @property
    def mamba(self) -> State | None: ...


class Contents:
    """Of all pools that a runner or a worker maps."""

    def __init__(self, cache: Member, layers: Layers | None = None) -> None:
        """`layers`: of a pool's view the rows, layer by layer; None: its arrays, of shared memory."""
        self.cache = cache
        layers = layers or _arrays
        self.page_size = cache.geometry.page_size
        self._full = []
        if cache.geometry.num_layers:
            self._full = [Pattern(layers(view), view.shard // cache.geometry.num_replicas) for view in cache.pools]
        window, mamba = cache.window, cache.mamba
        self._window = []
        if window is not None:
            replicas = window.geometry.num_replicas
            self._window = [Pattern(layers(view), PARTS + view.shard // replicas) for view in window.pools]
        self._states = []
        if mamba is not None:
            self._states = [StatePattern(layers(view), view.shard) for view in mamba.pools]

    def write(self, lease: Table, tokens: Tokens, start: int, stop: int) -> None:
        """What computing tokens[start:stop] leaves in the lease's pages."""
        for pattern in self._full:
            pattern.write(lease.slots, tokens, start, stop)
        if lease.window is not None:
            table = lease.window.table
            for pattern in self._window:
                pattern.write(table, tokens, start, stop)

    def write_state(self, slot: int, tokens: Tokens) -> None:
        """What computing all these tokens leaves in a slot of the lease's own."""
        for pattern in self._states:
            pattern.write(slot, tokens)

    def check_match(self, lease: Table, tokens: Tokens) -> Checked:
        """All that the match is made of. WrongContents."""
        matched = lease.matched_tokens
        if any(reach < matched for reach in lease.reaches):
            raise WrongContents(f"{matched} tokens match, and a part of them reaches less: {lease.reaches}")
        checked = self.check_pages("matched", lease, tokens, matched)
        mamba = self.cache.mamba
        if mamba is None or lease.mamba is None:
            return checked
        source = lease.mamba.source
        if (source is None) is not (matched == 0):
            raise WrongContents(f"{matched} tokens match, and the state that they end with is in slot {source}")
        if source is not None:
            self._check_state(mamba, source, tokens[:matched])
        return checked._replace(states=int(source is not None))

    def check_pages(self, what: str, lease: Table, tokens: Tokens, upto: int) -> Checked:
        """Every page before `upto`, whole pages that are the cache's, and of the window the last that it takes, or more
        where the lease has them. WrongContents.
        """
        self._check(what, self._full, self.cache.geometry, lease.slots, tokens, 0, upto)
        window, share = self.cache.window, lease.window
        if window is None or share is None:
            return Checked(upto)
        first = max(0, upto // self.page_size - window.num_pages)
        if share.first_page > first:
            raise WrongContents(f"{upto} tokens are {what}, and of the window pages {first} to {share.first_page} lack")
        start = share.first_page * self.page_size
        self._check(f"{what} window", self._window, window.geometry, share.table, tokens, start, upto)
        return Checked(upto, upto - start)

    def _check(
        self,
        what: str,
        patterns: list[Pattern],
        geometry: Geometry,
        table: npt.NDArray[np.int32],
        tokens: Tokens,
        start: int,
        stop: int,
    ) -> None:
        for shard, pattern in enumerate(patterns):
            if (wrong := pattern.check(table, tokens, start, stop)) is not None:
                raise WrongContents(
                    f"{what} page {wrong.position // self.page_size} (slot {wrong.slot}) does not hold token "
                    f"{wrong.token} at position {wrong.position}: shard {shard}, layer {wrong.layer}, "
                    f"{geometry.planes[wrong.plane].name}"
                )

    def _check_state(self, mamba: StatePool, slot: int, tokens: Tokens) -> None:
        for shard, pattern in enumerate(self._states):
            if (wrong := pattern.check(slot, tokens)) is not None:
                raise WrongContents(
                    f"slot {slot} does not hold the state behind {len(tokens)} tokens: shard {shard}, layer "
                    f"{wrong.layer}, {mamba.geometry.states[wrong.array].name}, byte {wrong.byte}"
                )


def _arrays(view: Any) -> Sequence[Sequence[Rows]]:
    arrays: Sequence[Sequence[Rows]] = view.layers
    return arrays
