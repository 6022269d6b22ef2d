"""An index that says it is still is: what its owner may leave out then changes nothing."""

from __future__ import annotations

from sglcache.core.index import Index


def is_still(index: Index) -> bool:
    """`Index.still`, and the part of its law that can be seen before a drain; the drain must be empty, too."""
    if not index.still:
        return False
    assert not index.held, "still, and yet held"
    assert not index.uncut, "still, and yet something waits for a cut"
    assert not index.busy, "still, and yet busy"
    return True
