"""One node of the tree, for who points at it: its path, its pages' tokens and hashes, and who keeps it from eviction.

Bounded, whatever the node and the index are like: of what is long a piece is told, and how much there is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglcache.core.census import MAX_PATH, Census, shown
from sglcache.core.hashing import block_hash
from sglcache.core.key import TOKEN_BYTES
from sglcache.core.tree import Node
from sglcache.units import Tier

if TYPE_CHECKING:
    from sglcache.core.index import Index

MAX_TOKENS = 2048  # told at once
MAX_HASHES = 256
MAX_HOLDERS = 64  # of each kind
MAX_STEPS = 4000  # up the tree, while looking for who holds it


def detail(census: Census, name: int, start: int = 0, tokens: bool = True) -> dict[str, Any]:
    """What the node of that name is; `gone` alone if there is none. Its tokens from the node's page `start` on.

    `tokens`: whether they may be told; without, `tokens` is None.
    """
    index = census.index
    node = census.node(name)
    if node is None:
        return {"gone": name}
    tree, now = index.tree, index.now
    page_bytes, size = tree.page_bytes, index.hasher.size
    path: list[dict[str, Any]] = []
    before, up, depth = 0, node.parent, 0
    while up is not None:
        depth += 1
        before += up.num_bytes
        if len(path) < MAX_PATH or up.parent is None:
            path.append({"name": census.name(up), "pages": up.num_bytes // page_bytes, "tiers": _tiers(index, up)})
        up = up.parent
    path.reverse()
    num_pages = node.num_bytes // page_bytes
    start = max(0, min(start, num_pages - 1)) if num_pages else 0
    stop = min(num_pages, start + max(1, MAX_TOKENS // index.config.page_size))
    run = node.key[start * page_bytes : stop * page_bytes]
    hashes = node.hashes if isinstance(node.hashes, bytes) else b""
    digests = [hashes[at : at + size] for at in range(start * size, min(stop, start + MAX_HASHES) * size, size)]
    lora, extra_key, salt = shown(node.space.namespace)
    told: dict[str, Any] = {
        "name": name,
        "lora": lora,
        "extra_key_hash": extra_key,
        "cache_salt_hash": salt,
        "told": node.space.extras is not None,  # to routers
        "depth": depth,
        "path": path,
        "before": before // TOKEN_BYTES,
        "pages": num_pages,
        "num_tokens": node.num_bytes // TOKEN_BYTES,
        "tiers": _tiers(index, node),
        "cells": _cells(index, node),
        "age_s": round(now - node.born, 3) if num_pages else None,
        "start": start,
        "tokens": memoryview(run).cast("I").tolist() if tokens else None,
        "hashes": [{"int64": str(block_hash(each)), "hex": each.hex()} for each in digests if each],
        "children": sum(1 for _ in zip(range(MAX_TOKENS), tree.children(node), strict=False)),
    }
    return {**told, **_holders(index, node)}


def _tiers(index: Index, node: Node) -> list[str]:
    """Where its pages are, whole."""
    if not node.cells:
        return []
    return [Tier(c).name for c in range(index.T) if node.cells[c] is not None and not node.writing >> c & 1]


def _cells(index: Index, node: Node) -> list[dict[str, Any]]:
    """Each (resource, tier) that it has, with its locks."""
    if not node.cells:
        return []
    C = index.tree.C  # noqa: N806
    return [
        {
            "resource": index.resources[c].name,
            "tier": Tier(c % index.T).name,
            "writing": bool(node.writing >> c & 1),
            "locks": node.cells[C + c],
        }
        for c in range(C)
        if node.cells[c] is not None or node.cells[C + c]
    ]


def _holders(index: Index, node: Node) -> dict[str, Any]:
    """Leases, pins and copies whose path it is on."""
    above: dict[Node, bool] = {node: True}  # whether the node is on the path from the root to there
    steps = 0

    def on_path(end: Node | None) -> bool:
        nonlocal steps
        walked: list[Node] = []
        while end is not None and end not in above:
            walked.append(end)
            end = end.parent
        steps += len(walked)
        found = end is not None and above[end]
        above.update(dict.fromkeys(walked, found))
        return found

    whole = True
    leases: list[dict[str, Any]] = []
    pins: list[dict[str, Any]] = []
    copies: list[dict[str, Any]] = []
    for lease in index.leases.values():
        if len(leases) == MAX_HOLDERS or steps > MAX_STEPS:
            whole = False
            break
        steps += 1
        tiers = [tier.name for tier, end in ((Tier.DEVICE, lease.node), (Tier.HOST, lease.host_node)) if on_path(end)]
        if tiers:
            leases.append({"lease": lease.id, "session": lease.session.id, "tiers": tiers})
    for session in index.sessions.values():
        if len(pins) >= MAX_HOLDERS or steps > MAX_STEPS:
            whole = False
            break
        for owner, each in session.pins.items():
            steps += 1
            if len(pins) < MAX_HOLDERS and any(on_path(end) for pin in each[:MAX_HOLDERS] for end in pin.nodes):
                pins.append({"owner": owner, "session": session.id})
    for ticket in index.writes:
        if len(copies) == MAX_HOLDERS or steps > MAX_STEPS:
            whole = False
            break
        steps += 1
        if on_path(ticket.end):
            copies.append({"ticket": ticket.id, "to": ticket.dst.name, "pages": ticket.num_pages})
    return {"leases": leases, "pins": pins, "copies": copies, "all_holders": whole}
