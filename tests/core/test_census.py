"""What a census says of a tree that stands still is the tree; while it changes nothing breaks, and the next is so."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from sglcache.core import census as census_module
from sglcache.core.census import Census, Row
from sglcache.core.detail import MAX_HASHES, detail
from sglcache.core.hashing import block_hash
from sglcache.core.index import DEVICE, HOST, Index, IndexConfig
from sglcache.core.key import ROOT, Namespace
from sglcache.core.tree import Node
from sglcache.testing.model import LeaseModel
from sglcache.testing.programs import Program, SeededChooser, settings
from sglcache.testing.rig import Rig, Runner, pack

Sums = tuple[int, int, int]


def finish(census: Census) -> None:
    """To the end of a round."""
    for _ in range(100_000):
        if not census.step():
            return
    raise AssertionError("a round has no end")


def picture(census: Census, root: int | None = None, budget: int = 1500) -> dict[str, Any]:
    """Of the tree as it is: a round that began now."""
    census.look(root, budget)
    finish(census)
    census.look(root, budget)
    finish(census)
    found = census.look(root, budget)
    assert found is not None
    return found


def brute(index: Index) -> dict[Node, Sums]:
    """Pages in any tier, on the device and on the host, of each branch, one page at a time from each node up."""
    sums: dict[Node, list[int]] = {}
    for node in index.tree.nodes():
        pages = node.num_bytes // index.page_bytes
        own = pages, pages * (node.cells[DEVICE] is not None), pages * (index.T > 1 and node.cells[HOST] is not None)
        up: Node | None = node
        while up is not None:
            total = sums.setdefault(up, [0, 0, 0])
            for i, count in enumerate(own):
                total[i] += count
            up = up.parent
    return {node: (total[0], total[1], total[2]) for node, total in sums.items()}


def check(census: Census, told: dict[str, Any], root: Node | None = None, whole: bool = True) -> None:
    """A picture of a tree that has not changed since. `whole`: its budget was enough."""
    index = census.index
    sums = brute(index)
    rows: list[Row] = told["rows"]
    nodes = [census.node(row.name) for row in rows]
    assert len(set(nodes)) == len(nodes)
    for i, (row, node) in enumerate(zip(rows, nodes, strict=True)):
        assert node is not None
        assert (row.total, row.device, row.host) == sums[node]
        assert row.pages == node.num_bytes // index.page_bytes
        assert row.children == len(list(index.tree.children(node)))
        if row.parent < 0:
            assert node is root if root is not None else node.parent is None
        else:
            assert row.parent < i
            assert nodes[row.parent] is node.parent
        if node.parent is not None:
            cells, C = node.cells, index.tree.C  # noqa: N806
            assert row.present == sum(1 << c for c in range(C) if cells[c] is not None)
            assert row.device_locks == cells[C]
            assert row.writing == node.writing
            branch = [each for each in index.tree.nodes() if each is node or node in above(each)]
            assert row.idle_s == round(index.now - max(each.used for each in branch), 1)
    drawn = {space[0]: space[1:] for space in told["spaces"]}
    assert set(drawn) == {i for i, node in enumerate(nodes) if node is not None and node.parent is None}
    if root is None:
        assert (
            tuple(told["pages"]) == tuple(map(sum, zip(*(sums[s.root] for s in spaces(index)), strict=True)))
            or not rows
        )
        if whole:
            assert len(rows) == index.tree.num_nodes + len(spaces(index))
    elif whole:
        assert len(rows) == sum(root is each or root in above(each) for each in index.tree.nodes()) + (
            root.parent is None
        )


def above(node: Node) -> list[Node]:
    found = []
    while node.parent is not None:
        node = node.parent
        found.append(node)
    return found


def spaces(index: Index) -> list[Any]:
    return list(index.tree.spaces.values())


@pytest.mark.parametrize("seed", range(24))
def test_a_picture_is_the_tree_and_a_census_harms_no_program(seed: int) -> None:
    choose = SeededChooser(seed)
    program = Program(Rig(**settings(choose)))
    census = Census(program.rig.index)
    for turn in range(160):
        program.step(choose)
        if turn % 40 < 30:  # a walk amid changes, in slices of any size
            census.look(None, 1 + turn % 50)
            for _ in range(turn % 4):
                census.step()
    index = program.rig.index
    told = picture(census)
    check(census, told)
    nodes = [census.node(row.name) for row in told["rows"]]
    for node in nodes[:: max(1, len(nodes) // 5)]:
        assert node is not None
        check(census, picture(census, census.name(node)), node)
    census.close()
    program.rig.settle()
    assert index.tree.start.ahead.parent is not None or index.tree.start.ahead is index.tree.start  # no mark is left


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_slices_of_any_size_and_shares_of_any_size_say_the_same(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(census_module, "SLICE", size)
    monkeypatch.setattr(census_module, "MOST_KEPT", 4 * size)
    choose = SeededChooser(size)
    program = Program(Rig(**settings(choose)))
    census = Census(program.rig.index)
    for _ in range(120):
        program.step(choose)
        census.look(None, 10)
        census.step()
    check(census, picture(census))


def put(r: Rig, runner: Runner, tokens: list[int], namespace: Namespace = ROOT) -> None:
    lease = r.acquire(runner, tokens, namespace)
    assert isinstance(lease, LeaseModel)
    r.commit(runner, lease)
    r.copies_done()
    r.release(runner, lease)


def test_the_largest_branches_are_drawn_and_the_rest_is_a_sum() -> None:
    r = Rig(page_size=1, num_pages=400, host_pages=0)
    runner = r.open_session()
    for branch in range(1, 21):  # the larger the number, the longer
        put(r, runner, [7, 7, *([branch] * branch)])
    census = Census(r.index)
    told = picture(census, budget=6)
    rows: list[Row] = told["rows"]
    assert [row.pages for row in rows] == [0, 2, 20, 19, 18, 17]
    assert rows[1].total == 2 + sum(range(1, 21))
    assert rows[1].children == 20
    assert rows[1].total - rows[1].pages - sum(row.total for row in rows[2:]) == sum(range(1, 17))


def test_small_branches_are_drawn_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(census_module, "SHARE", 1)  # nothing below half of all is kept
    r = Rig(page_size=1, num_pages=64, host_pages=0)
    runner = r.open_session()
    for branch in range(1, 9):
        put(r, runner, [branch] * 4)
    census = Census(r.index)
    check(census, picture(census))
    assert len(picture(census, budget=5)["rows"]) == 5


def test_no_slice_is_long_however_large_the_tree_is() -> None:
    """Counted in lines of Python: a slice is of so many nodes, and not of all."""
    index = Index(IndexConfig(page_size=1, num_pages=8000, host_pages=0, events=False))
    session = index.open_session()
    for branch in range(3 * census_module.SLICE):
        grant = index.acquire(session, 0, pack([branch % 40, branch % 7, branch + 100]))
        assert grant is not None
        index.commit(session, 1, grant.lease, 2 * branch)
        index.release(session, 2, grant.lease, 2 * branch + 1)
        index.event_done(session, 2 * branch)
        index.event_done(session, 2 * branch + 1)
        index.drain()
    census = Census(index)
    most = 0
    for budget in (1500, 1500, 3):
        census.look(None, budget)
        more = True
        steps = 0
        while more:
            lines, more = counted(census.step)
            most = max(most, lines)
            steps += 1
        assert steps > index.tree.num_nodes // census_module.SLICE
    assert most < 45 * census_module.SLICE
    assert len(census.look(None, 1500)["rows"]) == 1500  # type: ignore[index]


def counted(call: Callable[[], bool]) -> tuple[int, bool]:
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        result = call()
    finally:
        sys.settrace(before)
    return lines, result


def test_names_are_gone_with_their_nodes_and_are_not_used_again() -> None:
    r = Rig(page_size=1, num_pages=16, host_pages=0)
    runner = r.open_session()
    put(r, runner, [1, 2, 3])
    put(r, runner, [1, 2, 4])
    census = Census(r.index)
    names = [row.name for row in picture(census)["rows"]]
    r.clear()
    for name in names:
        assert census.node(name) is None
        assert census.look(name, 10) == {"gone": name}
        assert detail(census, name) == {"gone": name}
    put(r, runner, [1, 2, 3])
    again = [row.name for row in picture(census)["rows"]]
    assert not set(names) & set(again)
    assert census.look(10**9, 10) == {"gone": 10**9}


def test_a_split_node_stays_its_lower_half() -> None:
    r = Rig(page_size=1, num_pages=16, host_pages=0)
    runner = r.open_session()
    put(r, runner, [1, 2, 3])
    census = Census(r.index)
    (_, row) = picture(census)["rows"]
    put(r, runner, [1, 2, 4])
    told = picture(census)
    names = [each.name for each in told["rows"]]
    assert row.name in names
    assert told["rows"][names.index(row.name)].pages == 1


def test_nobody_looks_nothing_is_kept() -> None:
    r = Rig(page_size=1, num_pages=16, host_pages=0)
    runner = r.open_session()
    put(r, runner, [1, 2, 3])
    census = Census(r.index)
    name = picture(census)["rows"][0].name
    for _ in range(2 * census_module.FORGET + 2):  # rounds that nobody looks at
        finish(census)
    assert census.node(name) is None
    census.look(None, 10)
    census.step()
    census.close()
    census.close()
    assert r.index.tree.start.ahead.parent is not None
    assert picture(census)["pages"] == [3, 3, 0]


def test_a_node_is_told_with_its_path_tokens_hashes_and_holders() -> None:
    r = Rig(page_size=2, num_pages=64, host_pages=64)
    runner = r.open_session()
    namespace = Namespace.of("adapter", None, "salt")
    put(r, runner, [1, 2, 3, 4, 5, 6], namespace)
    put(r, runner, [1, 2, 3, 4, 7, 8], namespace)
    r.cut()
    lease = r.acquire(runner, [1, 2, 3, 4, 7, 8, 9], namespace)
    assert isinstance(lease, LeaseModel)
    census = Census(r.index)
    rows = picture(census)["rows"]
    leaf = next(row for row in rows if row.pages == 1 and row.device_locks)
    told = detail(census, leaf.name)
    pages = r.book.path(namespace, pack([1, 2, 3, 4, 7, 8]))
    assert told["tokens"] == [7, 8]
    assert told["hashes"] == [{"int64": str(pages[-1].hash), "hex": pages[-1].digest.hex()}]
    assert block_hash(bytes.fromhex(told["hashes"][0]["hex"])) == pages[-1].hash
    assert (told["before"], told["pages"], told["depth"]) == (4, 1, 2)
    assert [each["pages"] for each in told["path"]] == [0, 2]
    assert told["tiers"] == ["DEVICE", "HOST"]
    (held,) = r.index.leases
    assert told["leases"] == [{"lease": held, "session": runner.id, "tiers": ["DEVICE", "HOST"]}]
    assert told["lora"] == "adapter"
    assert "salt" not in map(str, told.values())
    other = next(row for row in rows if row.pages == 1 and not row.device_locks)
    assert detail(census, other.name)["leases"] == []
    assert detail(census, leaf.name, tokens=False)["tokens"] is None
    root = next(row for row in rows if row.pages == 0)
    assert (detail(census, root.name)["tokens"], detail(census, root.name)["hashes"]) == ([], [])


def test_a_long_node_is_told_in_pieces() -> None:
    r = Rig(page_size=1, num_pages=4000, host_pages=0, checks=False)
    runner = r.open_session()
    tokens = [i % 1000 for i in range(3000)]
    put(r, runner, tokens)
    r.cut()
    census = Census(r.index)
    name = picture(census)["rows"][1].name
    first, second = detail(census, name), detail(census, name, 2048)
    assert first["tokens"] + second["tokens"] == tokens
    assert len(first["hashes"]) == len(second["hashes"]) == MAX_HASHES
    assert second["start"] == 2048
