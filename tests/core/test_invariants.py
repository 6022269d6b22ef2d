"""`invariants.check` is the proof that a live daemon gives: it must see what is wrong, and all of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sglcache.core import invariants, tree
from sglcache.core.index import DEVICE, HOST, Index
from sglcache.core.tree import Node
from sglcache.testing.model import LeaseModel
from sglcache.testing.rig import Rig


def sound() -> Index:
    """Two branches, a lease, a pinned path, a write-through under way."""
    rig = Rig(page_size=4, num_pages=32, host_pages=16)
    runner = rig.open_session()
    for tail in ([1] * 8, [2] * 8, [3] * 8):
        lease = rig.acquire(runner, [9] * 8 + tail)
        assert isinstance(lease, LeaseModel)
        rig.commit(runner, lease)
        if tail[0] < 3:
            rig.copies_done()
            rig.release(runner, lease)
    assert rig.in_flight()
    return rig.index


def nodes(index: Index) -> list[Node]:
    return list(index.tree.nodes())


def leaf(index: Index) -> Node:
    """One that nobody holds."""
    return next(n for n in nodes(index) if n.children is None and not n.cells[len(index.pools)])


def set_cell(index: Index, node: Node, cell: int, run: bytes | None) -> None:
    node.cells[cell] = run


def ahead_of_its_parent(index: Index) -> None:
    node, start = leaf(index), index.tree.start
    tree._leave(node)
    node.ahead, node.behind = start, start.behind
    start.behind.ahead = start.behind = node


BROKEN: dict[str, tuple[str, Callable[[Index], object]]] = {
    "a slot held twice": ("twice", lambda i: set_cell(i, leaf(i), DEVICE, nodes(i)[0].cells[DEVICE])),
    "a slot lost": ("by nobody", lambda i: i.pools[DEVICE].take(1)),
    "a wrong count": ("cached", lambda i: setattr(i.pools[DEVICE], "cached", i.pools[DEVICE].cached + 1)),
    "a wrong lock count": ("locked", lambda i: setattr(i.pools[HOST], "locked", i.pools[HOST].locked + 1)),
    "a lock nobody has": ("lock_ref", lambda i: leaf(i).cells.__setitem__(len(i.pools), 1)),
    "a lock dropped": ("lock_ref", lambda i: nodes(i)[0].cells.__setitem__(len(i.pools), 0)),
    "a child without its parent": ("without its parent", lambda i: set_cell(i, nodes(i)[0], HOST, None)),
    "a node its parent does not know": ("does not know it", lambda i: setattr(leaf(i), "key", b"\7" * 32)),
    "a node of half a page": ("whole pages", lambda i: setattr(leaf(i), "key", leaf(i).key[:-4])),
    "a node that is nowhere": ("present nowhere", lambda i: [set_cell(i, leaf(i), c, None) for c in (DEVICE, HOST)]),
    "a node not in the order": ("eviction list", lambda i: i.tree.orders[DEVICE].unlink(leaf(i))),
    "a node too many": ("nodes", lambda i: setattr(i.tree, "num_nodes", 99)),
    "a node out of the ring": ("in the ring of nodes", lambda i: tree._leave(leaf(i))),
    "a child ahead of its parent": ("not behind its parent", lambda i: ahead_of_its_parent(i)),
    "a ring linked one way": ("ring of nodes is broken", lambda i: setattr(leaf(i), "ahead", leaf(i))),
    "digests that are too few": ("digests", lambda i: setattr(leaf(i), "hashes", b"")),
    "a ticket without its bit": ("not being written", lambda i: [setattr(n, "writing", 0) for n in nodes(i)]),
    "a leased page not counted": ("leased", lambda i: setattr(i.pools[DEVICE], "leased", 7)),
}


def test_a_sound_index_has_no_violation() -> None:
    assert invariants.check(sound()) == []


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_told(name: str) -> None:
    words, break_it = BROKEN[name]
    index = sound()
    break_it(index)
    found = invariants.check(index)
    assert any(words in violation for violation in found), found


def test_every_violation_is_told_not_the_first_alone() -> None:
    index = sound()
    for name in ("a wrong count", "a wrong lock count", "a node too many", "digests that are too few"):
        BROKEN[name][1](index)
    found = "\n".join(invariants.check(index))
    for words in ("cached", "locked", "99", "digests"):
        assert words in found


def test_the_proof_can_be_taken_in_slices() -> None:
    index = sound()
    found: list[str] = []
    assert len(list(invariants.slices(index, found, 1))) >= len(nodes(index))
    assert found == []
