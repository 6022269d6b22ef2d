"""What the journal is told: which host slots hold what, in the order in which it became so.

Whoever keeps a journal of these (memory/journal.py) can put the host tier of a rank that died back into a fresh index
(`restore`). An entry is of whole runs, and names a page by its slot: what is above it by the slot of the page above, so
that later splits and joins of nodes change nothing of what was told.

Laws: a page is told of as present after its bytes are there, and as absent before its slot is given to anyone else; the
page above is told of before it, and as absent after it.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from sglcache.core.key import Namespace
from sglcache.core.slots import SLOT_BYTES

if TYPE_CHECKING:
    from sglcache.core.tree import Node

HOST = 1


class Present(NamedTuple):
    """Pages whose bytes are on the host from now on."""

    resource: int  # 0: full KV; then the companions
    slots: bytes  # int32 [n]
    # Of full KV: the slot of the page above the first, int32; b"": the first is the first of its namespace. Of a
    # companion: the slots of the pages of full KV that these belong to, int32 [n].
    owners: bytes
    tokens: bytes = b""  # of full KV: uint32 of the pages, and with bigram keys the one behind them
    namespace: Namespace | None = None  # of full KV, where the first is the first of its namespace
    tenant: str = ""  # of full KV: who is charged with them; "": there are no tenants


class Absent(NamedTuple):
    """Slots whose pages are no longer there."""

    resource: int
    slots: bytes  # int32 [n]


class Cleared(NamedTuple):
    """No slot of any resource holds anything."""


Entry: TypeAlias = Present | Absent | Cleared


def key_of(tenant: str) -> int:
    """What a row has of a tenant's name: 64 bits, 0 for none."""
    return int.from_bytes(hashlib.blake2b(tenant.encode(), digest_size=8).digest(), "little") if tenant else 0


def entry(resource: int, by_end: bool, c: int, node: Node, present: bool, tenant: str) -> Entry:
    """What is to be told when the node's cell `c`, on the host, came or is about to go. `tenant`: who pays for it."""
    slots: bytes = node.cells[c]
    if not present:
        return Absent(resource, slots)
    if resource:
        full: bytes = node.cells[HOST]
        return Present(resource, slots, full[-SLOT_BYTES:] if by_end else full)
    parent = node.parent
    assert parent is not None
    if parent.parent is None:
        return Present(0, slots, b"", node.key, node.space.namespace, tenant)
    return Present(0, slots, parent.cells[HOST][-SLOT_BYTES:], node.key, None, tenant)
