"""Tenants under random programs: floors, ceilings, who pays and who is refused; and bugs planted one at a time, which
these programs must notice.

`SGLCACHE_DEEP=N` runs N times as many programs, new ones each time.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from sglcache.core import eviction, index, invariants, slots, tree
from sglcache.core.effects import Copy, Grant, Wake
from sglcache.core.index import Index, IndexConfig, _Beside
from sglcache.core.l3 import L3, L3Config
from sglcache.core.limits import Limits
from sglcache.core.resources import Companion, MambaState, SlidingWindow
from sglcache.core.shares import Share, Shared
from sglcache.core.tenants import Tenants
from sglcache.core.tiering import Backups, WritePolicy
from sglcache.errors import BadRequest, NoSpace
from sglcache.testing import hybrid_programs
from sglcache.testing.machine import IndexMachine
from sglcache.testing.model import LeaseModel
from sglcache.testing.planting import plant
from sglcache.testing.programs import SeededChooser, run
from sglcache.testing.rig import Rig
from sglcache.units import LeaseId

pytestmark = pytest.mark.survive

DEEP = int(os.environ.get("SGLCACHE_DEEP", "0"))
NUM_PROGRAMS = 300  # most bugs are caught by the first few

BACK: dict[str, Any] = {"num_pages": 10, "host_pages": 24, "write_policy": WritePolicy("write_back"), "l3": None}
TIGHT: dict[str, Any] = {"num_pages": 8, "page_size": 1, "l3": None}
TWO_TIERS: dict[str, Any] = {"num_pages": 10, "host_pages": 12, "l3": None}
BELOW: dict[str, Any] = {"num_pages": 10, "host_pages": 10, "l3": L3Config(tell=True, part=2, store_quota=100)}


class TenantsMachine(IndexMachine):
    fixed = {"tenants": "any", "num_pages": 10}  # noqa: RUF012  # as there


CI = settings(
    max_examples=60,
    stateful_step_count=40,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
SETTINGS = settings(CI, max_examples=100 * DEEP, stateful_step_count=100, derandomize=False) if DEEP else CI


@pytest.mark.timeout(0 if DEEP else 300)
def test_any_program_of_several_tenants_under_hypothesis() -> None:
    run_state_machine_as_test(TenantsMachine, settings=SETTINGS)


VARIANTS: dict[str, tuple[dict[str, Any], bool]] = {
    "any": ({"num_pages": 10}, False),
    "tight": (TIGHT, False),
    "one tier": ({"num_pages": 10, "host_pages": 0}, False),
    "slices": ({"num_pages": 10, "evict_slice": 1, "cut_slice": 8}, False),
    "copied on eviction": (BACK, False),
    "a store below": (BELOW, False),
    "bigrams in small tables": ({"num_pages": 10, "bigram": True, "l3": None}, True),
}


@pytest.mark.timeout(0 if DEEP else 300)
@pytest.mark.parametrize("variant", VARIANTS)
def test_any_program_of_several_tenants(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed, small = VARIANTS[variant]
    if small:
        monkeypatch.setattr(slots, "CRUMB_BYTES", 12)
        monkeypatch.setattr(tree, "FANOUT", 2)
        monkeypatch.setattr(index, "MERGE_LIMIT", 2)
        monkeypatch.setattr(eviction, "SLACK", 0)
        monkeypatch.setattr(eviction, "SWEEP", 1)
    first = random.randrange(1 << 40) if DEEP else 0
    for seed in range(first, first + 150 * max(1, DEEP)):
        try:
            run(seed, tenants="any", **fixed)
        except Exception as exc:
            exc.add_note(f"sglcache.testing.programs.run({seed}, tenants='any', **{fixed}){', small' if small else ''}")
            raise


def of_two_at_their_floors() -> None:
    """What goes when nothing else can is what hangs on a page that may be taken, not what was used longest ago."""
    limits = {"first": Limits(device_floor=4), "second": Limits(device_floor=4), "noisy": Limits()}
    rig = Rig(page_size=1, num_pages=16, tenants=limits)
    runner = rig.open_session()
    for tokens, tenant in (
        (range(100, 104), "first"),
        (range(8), "noisy"),
        ([*range(8), *range(200, 204)], "second"),
    ):
        lease = rig.acquire(runner, tokens, tenant=tenant)
        assert isinstance(lease, LeaseModel)
        rig.commit(runner, lease)
        rig.release(runner, lease)
    lease = rig.acquire(runner, range(300, 308), tenant="noisy")
    assert isinstance(lease, LeaseModel)
    broken = {each.tenant: each.broken for each in rig.index.stats().tenants}
    assert broken == {"default": 0, "first": 0, "second": 4, "noisy": 0}
    rig.settle()


def test_of_two_at_their_floors_the_one_goes_that_hangs_on_what_may_be_taken() -> None:
    of_two_at_their_floors()


@pytest.mark.parametrize("kind", ["swa", "mamba", "unified"])
def test_tenants_without_limits_change_nothing_of_windows_and_states(kind: str) -> None:
    for seed in range(25):
        hybrid_programs.run(seed, kind=kind, tenants={"a": Limits(), "b": Limits()})


def roam(seed: int, kind: str, write_policy: WritePolicy) -> dict[str, int]:
    """Requests of three tenants with limits, on an index with companions; all that is held to are its own books and
    the ceilings. What was evicted for others."""
    choose = SeededChooser(seed)
    config = IndexConfig(
        page_size=2,
        num_pages=24,
        host_pages=choose.item((0, 16, 32)),
        write_policy=write_policy,
        companions=tuple(
            each
            for each in (Companion(SlidingWindow(2), 20, 20), Companion(MambaState(2), 12, 12))
            if kind in ("unified", each.resource.name)
        ),
        tenants={
            "a": Limits(device_floor=8),
            "b": Limits(device_ceiling=12, host_ceiling=8),
            "c": Limits(host_floor=4),
        },
        evict_slice=choose.item((500, 4)),
    )
    index = Index(config)
    session = index.open_session()
    grants: dict[int, tuple[Grant, int]] = {}
    ticket = 0
    by_end = [each.resource.by_end for each in config.companions]
    for request in range(1, 150):
        tokens = np.array([choose.integer(0, 1), *[choose.integer(0, 2)] * choose.integer(1, 20)], "<u4").tobytes()
        found: Grant | None = None
        action = choose.integer(0, 5)
        if action < 3:
            with contextlib.suppress(NoSpace):
                spare = [int(each) for each in by_end]
                found = index.acquire(session, request, tokens, tenant=choose.item(("a", "b", "c", "d")), spare=spare)
            if found is not None:
                grants[found.lease] = found, len(tokens) // 4
        elif action == 3 and grants:
            grant, have = grants[choose.item(list(grants))]
            ticket += 1
            end = have // 2 * 2
            ends = [
                (i, end, int.from_bytes(share.slots[:4], "little"))
                for i, share in enumerate(grant.shares)
                if by_end[i] and end and share.slots
            ]
            with contextlib.suppress(BadRequest):  # the state was given already
                index.commit(session, request, LeaseId(grant.lease), ticket, ends=ends)
            index.event_done(session, ticket)
        elif action == 4 and grants:
            lease = choose.item(list(grants))
            del grants[lease]
            ticket += 1
            index.release(session, request, LeaseId(lease), ticket)
            index.event_done(session, ticket)
        elif choose.integer(0, 9) == 0:
            index.set_tenant("b", {"device_ceiling": choose.item((4, 12, None))})
        for effect in index.drain(request):
            if isinstance(effect, Copy):
                index.copy_done(effect.ticket, ok=choose.integer(0, 5) > 0)
            elif isinstance(effect, Wake) and isinstance(effect.result, Grant):
                grants[effect.result.lease] = effect.result, len(effect.result.slots) // 4 * 2
        while index.busy:
            index.step()
        assert invariants.check(index) == []
        assert index.tenants is not None
        for told in index.stats().tenants:
            share = index.tenants.shares[told.tier][index.tenants.number(told.tenant)]
            over = told.ceiling is not None and told.charged > told.ceiling
            assert not over or share.cached == share.locked, f"{told} is above its ceiling, and nobody holds some of it"
    return {each.tenant: each.taken for each in index.stats().tenants if each.tier == 0}


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("kind", ["window", "mamba", "unified"])
def test_books_and_ceilings_are_right_beside_windows_and_states(kind: str, policy: str) -> None:
    taken = [roam(seed, kind, WritePolicy(policy)) for seed in range(40)]
    assert sum(each["c"] for each in taken) > 0, "nothing was ever taken"


class Mutation(NamedTuple):
    name: str
    owner: Any
    method: str
    old: str
    new: str
    fixed: dict[str, Any] = TIGHT
    by: Callable[[], None] | None = None  # a program that gets there at once


MUTATIONS = [
    # -- whose page goes
    Mutation("a floor is no reason to stay", Shared, "victim_for", "share.spare > 0", "share.cached > 0"),
    Mutation("a run goes as a whole, floor or no floor", Tenants, "evict", "if size > most:", "if False:"),
    Mutation("a run is cut a page too high", Tenants, "evict", "(size - most)", "max(1, size - most - 1)"),
    Mutation(
        "what a tenant holds does not count for its floor",
        Share,
        "kept",
        "held = self.leased + self.locked",
        "held = self.locked",
    ),
    Mutation("what is leaving still keeps a floor", Share, "kept", " - self.leaving", "", BACK),
    Mutation("at its ceiling it takes others' pages", Shared, "victim_for", "if own:", "if False:"),
    Mutation("the order is of one tenant alone", Shared, "_first", "entry[:2] < found[:2]", "False"),
    Mutation("a closed page goes before leaves do", Shared, "victim_for", "if node is not None:", "if False:"),
    Mutation(
        "a leaf goes that closes nothing",
        Shared,
        "victim_for",
        "node, _ = self._first(takers, closed=True)",
        "node, _ = self._first(range(len(shares)))",
        by=of_two_at_their_floors,
    ),
    Mutation(
        "a page goes from under its children",
        Shared,
        "victim_for",
        "is not None:\n            node = below",
        "is node:\n            node = below",
    ),
    # -- who pays
    Mutation(
        "what is committed is the default tenant's", Index, "_adopt", "DEVICE, lease.tenant)\n    ", "DEVICE, 0)\n    "
    ),
    Mutation("what is committed is still leased", Index, "_adopt", "lease.tenant, -adopted", "lease.tenant, 0"),
    Mutation("an extend is for nothing", Index, "_extended", "lease.tenant, num_fresh", "lease.tenant, 0"),
    Mutation("who gives back still pays", Index, "_give_back", "lease.tenant, -count", "lease.tenant, 0"),
    Mutation(
        "duplicates that are dropped are still paid for", Index, "_drop_duplicates", "-(len(slots) // SLOT_BYTES)", "0"
    ),
    Mutation(
        "on the host the default tenant pays",
        Backups,
        "_send",
        "belongs(chain, HOST, tenant)",
        "belongs(chain, HOST, 0)",
        TWO_TIERS,
    ),
    Mutation(
        "one copy is charged to one tenant",
        Backups,
        "send",
        "for last in reversed(ends[1:]):",
        "for last in ():",
        TWO_TIERS,
    ),
    Mutation(
        "what a store brings is nobody's",
        L3,
        "_adopt",
        "belongs(new, HOST, prefetch.tenant)",
        "belongs(new, HOST, 0)",
        BELOW,
    ),
    Mutation("a fetch is for nothing", L3, "_fetch", "tenants.lease(HOST, tenant, num_pages)", "pass", BELOW),
    Mutation(
        "nodes of two tenants are joined", Shared, "alike", "up.cells[self.tenant] == low.cells[self.tenant] and ", ""
    ),
    # -- links and queues
    Mutation("a join loses its place among the children", Shared, "join", "self._replace(top, low, top)", "pass"),
    Mutation("a split loses its place among the children", Shared, "split", "self._replace(tail, head, head)", "pass"),
    Mutation("a node stays queued as closed", Shared, "unlink", "if above[self.entry] is not None:", "if False:"),
    Mutation("a closed node is not queued", Shared, "unpin", "if not cells[own]:", "if not cells[self.kids]:"),
    # -- who is refused
    Mutation(
        "a ceiling is none",
        Tenants,
        "left",
        "return min(room, self.headroom(tier, number, pinned, copied) - promised.of(number))",
        "return room",
    ),
    Mutation("floors of others refuse nobody", Tenants, "room", "room -= share.kept(", "0 and share.kept("),
    Mutation("what a match locks can be had", Tenants, "room", " - sum(pinned.values())", ""),
    Mutation("what a match locks of others keeps no floor", Tenants, "room", "pinned.get(other, 0)", "0"),
    Mutation("its own match is no reason", Tenants, "headroom", " + pinned.get(number, 0)", ""),
    Mutation("copies never end", Tenants, "headroom", " - copied.pages.get(number, 0)", "", TWO_TIERS),
    Mutation("those of one extend are promised the same", _Beside, "add", "self.tally.add(tenant, num_fresh)", "pass"),
    Mutation("who waits is promised nothing", Index, "_tally", "tally.add(number, num_pages)", "pass", TWO_TIERS),
    Mutation("a tenant's floors are checked for one tier", Tenants, "_totals", "[: self.index.T]", "[:1]", TWO_TIERS),
    Mutation("a lowered ceiling takes nothing", Tenants, "set", "self.look()", "pass"),
    Mutation(
        "a new limit is for the next life", Tenants, "set", "share.floor, share.ceiling = limits[name].of(tier)", "pass"
    ),
]


@pytest.mark.pure
@pytest.mark.parametrize("planted", MUTATIONS, ids=lambda m: m.name.replace(" ", "-"))
def test_planted_bug_is_caught(planted: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, planted.owner, planted.method, planted.old, planted.new)
    for seed in range(NUM_PROGRAMS):
        try:
            if planted.by is not None:
                planted.by()
            run(seed, tenants="any", **planted.fixed)
        except Exception:
            return
    raise AssertionError(f"{NUM_PROGRAMS} programs did not notice that {planted.name}")
