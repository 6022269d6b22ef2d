"""A host page whose bytes have gone bad: it goes, with what hangs on it, and nothing else; or nothing does.

`sglcache.testing.hybrid.Hybrid.expel` has the law, page by page and of every resource.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from sglcache.core import invariants
from sglcache.core.companions import Companions
from sglcache.core.effects import Copy
from sglcache.core.index import HOST, Index, IndexConfig
from sglcache.core.key import ROOT, pack
from sglcache.core.limits import Limits
from sglcache.core.tiering import WritePolicy
from sglcache.testing import hybrid_programs, lives
from sglcache.testing.planting import plant
from sglcache.units import Tier

pytestmark = pytest.mark.survive

DEEP = int(os.environ.get("SGLCACHE_DEEP", "0"))
KINDS = ("full", "swa", "mamba", "unified")


@pytest.mark.timeout(0 if DEEP else 120)
@pytest.mark.parametrize("roomy", [True, False], ids=["roomy", "crowded"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_page_that_went_bad_takes_along_what_hangs_on_it_and_nothing_else(kind: str, roomy: bool) -> None:
    """At any moment of any program; routers are told as much."""
    first, went = random.randrange(1 << 40) if DEEP else 0, 0
    for seed in range(first, first + 8 * max(1, DEEP)):
        try:
            world = hybrid_programs.run(seed, kind=kind, roomy=roomy, tiers=2, rot=True)
        except Exception as exc:
            exc.add_note(f"sglcache.testing.hybrid_programs.run({seed}, kind={kind!r}, roomy={roomy}, rot=True)")
            raise
        went += world.num_hits.get("expelled", 0)
    assert went >= 8, "else nothing was looked at"


@pytest.mark.parametrize("kind", KINDS)
def test_what_went_bad_does_not_come_back_with_the_next_life(kind: str) -> None:
    for seed in range(3):
        lives.run(seed, kind=kind, rot=True)


def filled(num_pages: int = 8, **config: Any) -> Index:
    """One prompt of so many pages of one token, in both tiers, which nobody holds."""
    index = Index(IndexConfig(page_size=1, num_pages=32, host_pages=32, events=False, **config))
    session = index.open_session()
    grant = index.acquire(session, 1, pack(range(num_pages)))
    assert grant is not None
    index.commit(session, 1, grant.lease, 1)
    index.release(session, 2, grant.lease, 2)
    for event in (1, 2):
        index.event_done(session, event)
    for effect in index.drain():
        if isinstance(effect, Copy):
            index.copy_done(effect.ticket)
    assert index.pools[HOST].cached == num_pages
    return index


def slot_of(index: Index, page: int) -> int:
    run = b"".join(node.cells[HOST] for node in index.tree.nodes())
    return int.from_bytes(run[4 * page : 4 * page + 4], "little")


def test_pages_above_stay_and_the_device_keeps_its_own() -> None:
    index = filled()
    assert index.expel(0, slot_of(index, 5))
    assert index.pools[HOST].cached == 5
    assert index.pools[0].cached == 8
    assert index.counters["corrupt_pages"] == 3
    assert index.counters["unbacked_pages"] == index.counters["evicted_host_pages"] == 0
    assert invariants.check(index) == []


def test_what_the_device_still_has_is_copied_again_with_the_next_commit_behind_it() -> None:
    index = filled()
    index.expel(0, slot_of(index, 5))
    session = index.open_session()
    grant = index.acquire(session, 1, pack(range(10)))
    assert grant is not None
    index.commit(session, 1, grant.lease, 1)
    index.event_done(session, 1)
    (copy,) = [effect for effect in index.drain() if isinstance(effect, Copy)]
    assert copy.dst is Tier.HOST
    assert len(copy.src_slots) // 4 == 5
    index.copy_done(copy.ticket)
    assert index.pools[HOST].cached == 10


def test_a_slot_without_a_page_is_no_reason_to_refuse() -> None:
    index = filled()
    version = index.revision
    free = next(slot for slot in range(32) if slot not in {slot_of(index, page) for page in range(8)})
    assert index.expel(0, free)
    assert index.revision == version


def test_what_somebody_holds_stays_whole_and_the_answer_is_no() -> None:
    index = filled()
    session = index.open_session()
    index.pin(session, pack(range(6)), ROOT, "someone", 100.0)
    revision = index.revision
    assert not index.expel(0, slot_of(index, 5))
    assert index.revision == revision
    assert index.expel(0, slot_of(index, 6)), "nobody holds what is behind"
    assert index.pools[HOST].cached == 6


def test_of_tenants_the_one_who_paid_for_it_is_not_charged_any_more() -> None:
    index = filled(tenants={"a": Limits(host_ceiling=20)})
    assert index.expel(0, slot_of(index, 3))
    charged = {each.tenant: each.charged for each in index.stats().tenants if each.tier is Tier.HOST}
    assert charged == {"default": 3, "a": 0}
    assert invariants.check(index) == []


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "tlru", "filo", "priority"])
def test_under_every_policy_the_books_are_right(policy: str) -> None:
    from sglcache.core.eviction import Policy

    for seed in range(3):
        hybrid_programs.run(seed, kind="full", tiers=2, rot=True, host_eviction=Policy(policy))


@pytest.mark.parametrize("policy", ["write_back", "write_through_selective"])
def test_under_every_write_policy_too(policy: str) -> None:
    for seed in range(4):
        hybrid_programs.run(seed, kind="unified", tiers=2, rot=True, write_policy=WritePolicy(policy))


BUGS: dict[str, tuple[Any, str, str, str, dict[str, Any]]] = {
    "what is locked goes": (
        Index,
        "expel",
        "if each.writing or any(each.cells[cell] is not None and each.cells[C + cell] for cell in cells):",
        "if False:",
        {"kind": "full"},
    ),
    "what hangs on it stays": (
        Index,
        "expel",
        "going += [child for child in tree.children(each) if child.cells[HOST] is not None]",
        "pass",
        {"kind": "full"},
    ),
    "good pages above go too": (Index, "expel", "if page:", "if False:", {"kind": "full"}),
    "it is cut a page too late": (
        Index,
        "expel",
        "tree.split(node, page * self.page_bytes)",
        "(page + 1) * self.page_bytes < node.num_bytes and tree.split(node, (page + 1) * self.page_bytes)",
        {"kind": "full"},
    ),
    "a slot's bytes are found between two": (
        Index,
        "_at_slot",
        "if at % SLOT_BYTES == 0:",
        "if True:",
        {"kind": "full"},
    ),
    "it counts as an eviction": (Index, "drop", "elif corrupt:", "elif False:", {"kind": "full"}),
    "leaves of no use stay": (
        Index,
        "expel",
        "self.companions.dropped(each, parent)",
        "pass",
        {"kind": "unified"},
    ),
    "a window's good pages behind go too": (
        Companions,
        "expel",
        "if page + 1 < num_pages:",
        "if False:",
        {"kind": "swa", "roomy": True},
    ),
    "a companion in use goes": (
        Companions,
        "expel",
        "if node.writing >> c & 1 or node.cells[index.tree.C + c]:",
        "if False:",
        {"kind": "unified", "roomy": True},
    ),
}


@pytest.mark.pure
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, old, new, fixed = BUGS[bug]
    plant(monkeypatch, owner, name, old, new)
    assert any(found(seed, **fixed) for seed in range(60))


def found(seed: int, **fixed: Any) -> bool:
    try:
        hybrid_programs.run(seed, tiers=2, rot=True, **fixed)
    except Exception:
        return True
    return False
