"""Nodes, splits, merges and the order of eviction, one law at a time."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from sglcache.core import tree as tree_module
from sglcache.core.index import DEVICE, HOST
from sglcache.core.key import ROOT, Namespace, common_bytes
from sglcache.core.tree import Fanout, Node
from sglcache.testing.model import LeaseModel
from sglcache.testing.rig import Rig, Runner, pack


def rig(**config: Any) -> tuple[Rig, Runner]:
    made = Rig(**{"page_size": 4, "num_pages": 32, **config})
    return made, made.open_session()


def put(r: Rig, runner: Runner, tokens: list[int], namespace: Namespace = ROOT) -> None:
    """Acquire, commit, write through, release."""
    lease = r.acquire(runner, tokens, namespace)
    assert isinstance(lease, LeaseModel)
    r.commit(runner, lease)
    r.copies_done()
    r.release(runner, lease)


def removed(r: Rig, medium: str = "GPU") -> list[int]:
    """The hashes that the stream has removed, in order."""
    r.cut()
    events = r.subscriber.events
    return [h for e in events if e["type"] == "BlockRemoved" and e["medium"] == medium for h in e["block_hashes"]]


def hashes(r: Rig, tokens: list[int], namespace: Namespace = ROOT) -> list[int]:
    return [page.hash for page in r.book.path(namespace, pack(tokens))]


def evict(r: Rig, runner: Runner, num_pages: int) -> None:
    """Take as many pages as makes `num_pages` go, and give them back unused."""
    need = r.model.num_free(DEVICE) + num_pages
    lease = r.acquire(runner, [999] * (need * 4))
    assert isinstance(lease, LeaseModel)
    r.release(runner, lease, discard=True)


A, B, C = [1] * 8, [2] * 8, [3] * 8


def test_least_recently_used_goes_first() -> None:
    r, runner = rig()
    for tokens in (A, B, C):
        put(r, runner, tokens)
    put(r, runner, A)  # used again
    evict(r, runner, 1)
    assert removed(r) == hashes(r, B)
    evict(r, runner, 4)
    assert removed(r) == hashes(r, B) + hashes(r, C) + hashes(r, A)


def test_last_use_is_the_release_not_the_acquire() -> None:
    r, runner = rig()
    first = r.acquire(runner, A)
    second = r.acquire(runner, B)
    assert isinstance(first, LeaseModel)
    assert isinstance(second, LeaseModel)
    r.commit(runner, first)
    r.commit(runner, second)
    r.release(runner, second)
    r.release(runner, first)
    evict(r, runner, 1)
    assert removed(r) == hashes(r, B)


def test_peek_and_a_refused_acquire_are_no_use() -> None:
    r, runner = rig()
    for tokens in (A, B):
        put(r, runner, tokens)
    r.peek(A)
    hold = r.acquire(runner, [9] * 4 * 20)
    assert isinstance(hold, LeaseModel)
    assert not isinstance(r.acquire(runner, A + [7] * 4 * 20), LeaseModel)
    r.release(runner, hold, discard=True)
    evict(r, runner, 1)
    assert removed(r) == hashes(r, A)


def test_a_pin_is_a_use_when_it_ends() -> None:
    r, runner = rig()
    for tokens in (A, B):
        put(r, runner, tokens)
    r.pin(runner, pack(A), ROOT, "owner", 1.0)
    evict(r, runner, 2)
    assert removed(r) == hashes(r, B)
    put(r, runner, B)
    assert r.expire(1.0) == 1
    evict(r, runner, 1)
    assert removed(r) == hashes(r, B) * 2


def test_a_child_goes_before_its_parent_and_whole_nodes_go() -> None:
    r, runner = rig()
    put(r, runner, A + B)
    put(r, runner, A + C)
    evict(r, runner, 1)  # of a node of two pages
    assert removed(r) == hashes(r, A + B)[2:]
    evict(r, runner, 3)
    assert removed(r) == hashes(r, A + B)[2:] + hashes(r, A + C)[2:] + hashes(r, A)


def test_a_splits_upper_half_is_as_old_as_its_lower_half() -> None:
    """A pin of the upper half alone makes it fresh; a mere split (by a pin that found nothing new) must not."""
    r, runner = rig()
    put(r, runner, A + B)
    put(r, runner, C)
    # Split the first node without using its upper half: its holder leaves at once, and C is used after that.
    r.pin(runner, pack(A), ROOT, "owner", 1.0)
    r.unpin(runner, "owner")
    put(r, runner, C)
    before = r.index.stats().num_nodes
    evict(r, runner, 4)
    assert before == 3
    assert removed(r) == hashes(r, A + B)[2:] + hashes(r, A)


def test_a_split_under_a_lock_keeps_both_halves_locked() -> None:
    r, runner = rig()
    lease = r.acquire(runner, A + B)
    assert isinstance(lease, LeaseModel)
    r.commit(runner, lease)
    put(r, runner, A + C)
    assert r.index.stats().pools[0].locked == 4
    evict(r, runner, 2)
    assert removed(r) == hashes(r, A + C)[2:]
    r.release(runner, lease)
    assert r.index.stats().pools[0].locked == 0


def test_a_chain_with_nothing_between_is_one_node_again() -> None:
    r, runner = rig()
    put(r, runner, A + B)
    put(r, runner, A + C)
    assert r.index.stats().num_nodes == 3
    put(r, runner, A + B)
    r.cut()  # digests that are only promised keep nodes apart for a while
    evict(r, runner, 1)  # C's branch
    assert removed(r) == hashes(r, A + C)[2:]
    assert r.index.stats().num_nodes == 1
    assert r.subscriber.present[0] == set(r.book.path(ROOT, pack(A + B)))


def test_a_prompt_may_end_anywhere_inside_a_node() -> None:
    for end in range(1, 17):
        r, runner = rig()
        put(r, runner, A + B)
        assert r.peek((A + B)[:end]) == (end - end % 4,) * 2
        assert r.peek((A + B)[:end] + [77] * 9) == (end - end % 4,) * 2
        put(r, runner, (A + B)[:end])
        put(r, runner, (A + B)[:end] + [77] * 9)
        r.settle()


def test_first_pages_that_agree_in_part_are_different_children() -> None:
    r, runner = rig()
    for last in range(3000, 3008):
        put(r, runner, [1, 2, 3, last])
    assert r.index.stats().num_nodes == 8
    for last in range(3000, 3008):
        assert r.peek([1, 2, 3, last]) == (4, 4)


@pytest.mark.parametrize("fanout", [1, 2, 3])
def test_many_children_change_nothing_but_their_table(fanout: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_module, "FANOUT", fanout)
    r, runner = rig()
    for last in range(12):
        put(r, runner, [*A, *([last] * 4)])
    for last in range(12):
        assert r.peek([*A, *([last] * 4)]) == (12, 12)
    evict(r, runner, 14)
    assert r.index.stats().num_nodes == 0


def test_a_fanout_is_a_table() -> None:
    table: Fanout[bytes, int] = Fanout({b"a": 1, b"b": 2})
    table[b"c"] = 3
    table[b"a"] = 4
    assert len(table) == 3
    assert table.get(b"a") == 4
    assert table.get(b"x") is None
    del table[b"b"]
    assert sorted(table.values()) == [3, 4]
    assert len(table) == 2


@pytest.mark.parametrize("length", [1, 3, 255, 256, 257, 1023, 1024, 1025, 5000])
def test_common_bytes_finds_the_first_difference(length: int) -> None:
    run = bytes(range(256)) * 20
    assert common_bytes(run[:length], b"xyz" + run, 3, 3 + length) == length
    for at in (0, length // 2, length - 1):
        other = bytearray(run)
        other[at] ^= 1
        assert common_bytes(run[:length], b"xyz" + bytes(other), 3, 3 + len(run)) == at
    assert common_bytes(run[:length], b"xyz" + run, 3, 3 + length - 1) == length - 1
    assert common_bytes(run, b"", 0, 0) == 0


def test_a_namespace_without_pages_is_forgotten() -> None:
    r, runner = rig()
    put(r, runner, A, Namespace(cache_salt="s"))
    assert r.index.stats().num_spaces == 1
    evict(r, runner, 2)
    assert r.index.stats().num_spaces == 0


def test_dropped_nodes_leave_nothing_for_the_collector() -> None:
    """Garbage collection may be held off for long: eviction, merging and clear leave no cycles behind."""
    r, runner = rig(num_pages=64, host_pages=16)
    gc.collect()
    gc.disable()
    try:
        for first in range(40):
            put(r, runner, [first] * 24)
            put(r, runner, [first] * 8 + [first + 1] * 16)
        r.settle()
        r.clear()
        r.steps()
        r.cut()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [obj for obj in gc.garbage if isinstance(obj, Node)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not left


def test_host_copies_go_least_recently_used_first() -> None:
    r, runner = rig(num_pages=32, host_pages=4)
    put(r, runner, A)
    put(r, runner, B)
    assert set(r.model.slot[HOST]) == set(r.book.path(ROOT, pack(A))) | set(r.book.path(ROOT, pack(B)))
    put(r, runner, A)  # used again: its host copy too
    put(r, runner, C)
    assert removed(r, "CPU_PINNED") == hashes(r, B)
