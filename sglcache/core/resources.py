"""What makes one kind of cached state different from another: a few pure answers, and nowhere else.

The tree, the leases and the tiers ask a resource and never its name. A tree's kind follows from its resources; so
far there is `Full`: every layer keeps the KV of every token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

Validator = Callable[[int, bool], bool]


class Resource(Protocol):
    """The answers. All are pure: they look at their arguments only."""

    name: str

    def split(self, run: bytes, num_pages: int) -> tuple[bytes, bytes]:
        """The slots of a node's upper `num_pages` and of the rest."""
        ...

    def join(self, runs: list[bytes]) -> bytes:
        """The slots of a node made of a chain of nodes, root side first. Inverse of `split`."""
        ...


class Full:
    """One slot a page; a match may end where every page so far is present; a lease pins the whole path."""

    name = "full"

    def split(self, run: bytes, num_pages: int) -> tuple[bytes, bytes]:
        cut = num_pages * 4
        return run[:cut], run[cut:]

    def join(self, runs: list[bytes]) -> bytes:
        return b"".join(runs)
