"""What a member maps of the layers that don't keep every token's KV: a window's pages, or states.

They are pools of their own beside `Client.pool`, with slots of their own, which a lease names beside its page table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sglcache.wire import control

if TYPE_CHECKING:
    from torch import Tensor

    from sglcache.client.client import Member
    from sglcache.memory.geometry import Geometry, StateGeometry
    from sglcache.memory.views import KVViews, StateViews


class CompanionPool:
    """One companion of a member. Made by it, and closed with it."""

    def __init__(self, member: Member, handle: control.CompanionHandle) -> None:
        self._member = member
        self._handle = handle
        self.kind = handle.kind
        self.layers = tuple(handle.layers)
        """The model's numbers of the layers, in the pool's order, if the daemon was told; else ()."""

    def rebind(self, handle: control.CompanionHandle) -> None:
        """Its member's: the next life of the daemon has it there, in the same form."""
        self._handle = handle


class WindowPool(CompanionPool):
    """Layers whose queries see the last `tokens` tokens only."""

    def __init__(self, member: Member, handle: control.CompanionHandle, geometry: Geometry) -> None:
        super().__init__(member, handle)
        self.geometry = geometry
        self.tokens = handle.window
        """Tokens that a query sees, itself among them."""
        self.num_pages = -(-handle.window // geometry.page_size)
        """Pages that a match has at its end: so many are enough to go on from it."""

    @property
    def pools(self) -> list[KVViews]:
        """As `Client.pools`."""
        return self._member.mapped_tokens(self.kind, self.geometry, self._handle.pools)

    @property
    def pool(self) -> KVViews:
        """As `Client.pool`."""
        return self._member.only(self.pools, f"{self.kind}.pools")

    @property
    def k(self) -> tuple[Tensor, ...]:
        """Per layer of the window: [num_pages, page_size, shard_heads, head_dim]. BadRequest: see `pool`."""
        return self.pool.k

    @property
    def v(self) -> tuple[Tensor, ...]:
        """As `k`: [num_pages, page_size, shard_heads, v_head_dim]."""
        return self.pool.v

    @property
    def kv(self) -> tuple[Tensor, ...]:
        """Where the window's layers have latents, as `Client.pool.kv`."""
        return self.pool.kv

    def __repr__(self) -> str:
        return f"WindowPool({self.geometry.num_layers} layers, {self.tokens} tokens, {self.geometry.num_pages} pages)"


class StatePool(CompanionPool):
    """Layers that keep one state. A slot has the states of all of them after some token of a prompt."""

    def __init__(self, member: Member, handle: control.CompanionHandle, geometry: StateGeometry) -> None:
        super().__init__(member, handle)
        self.geometry = geometry
        self.interval = handle.interval
        """Tokens between the states that a runner should commit."""

    @property
    def pools(self) -> list[StateViews]:
        """As `Client.pools`."""
        return self._member.mapped_states(self.kind, self.geometry, self._handle.pools)

    @property
    def pool(self) -> StateViews:
        """As `Client.pool`."""
        return self._member.only(self.pools, f"{self.kind}.pools")

    @property
    def states(self) -> Mapping[str, tuple[Tensor, ...]]:
        """By name, per layer: [num_slots, *shape], the shard's part of the shape. BadRequest: see `pool`."""
        return self.pool.states

    def __repr__(self) -> str:
        names = ", ".join(state.name for state in self.geometry.states)
        return f"StatePool({self.geometry.num_layers} layers of {names}, {self.geometry.num_pages} slots)"
