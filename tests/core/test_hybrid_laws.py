"""Laws 4, 5 and 7 to 10 for indexes with companions, after every step of any program: see `sglcache.testing.hybrid`.

`SGLCACHE_DEEP=N` runs N times as many programs, new ones each time.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from sglcache.core import eventlog, eviction, index, slots, tree
from sglcache.core.tiering import WRITE_THROUGH, WritePolicy
from sglcache.testing import hybrid_programs
from sglcache.testing.hybrid import Hybrid
from sglcache.testing.hybrid_programs import run
from sglcache.testing.machine import HybridMachine
from sglcache.testing.programs import SeededChooser

DEEP = int(os.environ.get("SGLCACHE_DEEP", "0"))

CI = settings(
    max_examples=40,
    stateful_step_count=50,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
SETTINGS = settings(CI, max_examples=200 * DEEP, stateful_step_count=100, derandomize=False) if DEEP else CI


@pytest.mark.timeout(0 if DEEP else 300)
def test_any_program_under_hypothesis() -> None:
    run_state_machine_as_test(HybridMachine, settings=SETTINGS)


BACK = WritePolicy("write_back")
VARIANTS: dict[str, tuple[dict[str, Any], bool]] = {
    "window": ({"kind": "swa", "tiers": 1}, False),
    "window, two tiers": ({"kind": "swa", "tiers": 2}, False),
    "window, copied on eviction": ({"kind": "swa", "tiers": 2, "write_policy": BACK}, False),
    "state": ({"kind": "mamba", "tiers": 1}, False),
    "state, two tiers": ({"kind": "mamba", "tiers": 2}, False),
    "state, copied on eviction": ({"kind": "mamba", "tiers": 2, "write_policy": BACK}, False),
    "both": ({"kind": "unified", "tiers": 1}, False),
    "both, two tiers": ({"kind": "unified", "tiers": 2}, False),
    "both, copied on eviction": ({"kind": "unified", "tiers": 2, "write_policy": BACK}, False),
    "both, copied at a second hit": (
        {"kind": "unified", "tiers": 2, "write_policy": WritePolicy("write_through_selective")},
        False,
    ),
    "both, bigrams": ({"kind": "unified", "bigram": True}, False),
    "both, in slices": ({"kind": "unified", "evict_slice": 1, "cut_slice": 8}, False),
    "small tables": ({"kind": "unified"}, True),
    "none": ({"kind": "full"}, False),
}


@pytest.mark.timeout(0 if DEEP else 300)
@pytest.mark.parametrize("variant", VARIANTS)
def test_any_seeded_program(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed, small = VARIANTS[variant]
    if small:  # what happens in large indexes only, in small ones
        monkeypatch.setattr(slots, "CRUMB_BYTES", 12)
        monkeypatch.setattr(tree, "FANOUT", 2)
        monkeypatch.setattr(eventlog, "MAX_BATCH_TOKENS", 40)
        monkeypatch.setattr(index, "MERGE_LIMIT", 2)
        monkeypatch.setattr(eviction, "SLACK", 0)
        monkeypatch.setattr(eviction, "SWEEP", 1)
        monkeypatch.setattr(eviction, "DISCARD", 1)
    first = random.randrange(1 << 40) if DEEP else 0
    for seed in range(first, first + 12 * max(1, DEEP)):
        try:
            run(seed, **fixed)
        except Exception as exc:
            exc.add_note(f"sglcache.testing.hybrid_programs.run({seed}, **{fixed}){', small tables' if small else ''}")
            raise


@pytest.mark.parametrize("kind", ["swa", "mamba", "unified"])
def test_where_the_host_has_room_it_has_all_that_the_device_has(kind: str) -> None:
    """Pages and states that came late, or that nodes were split and joined around, too."""
    for seed in range(8):
        choose = SeededChooser(seed)
        fixed = {"kind": kind, "tiers": 2, "roomy": True, "write_policy": WRITE_THROUGH, "host_ready": None}
        chosen = hybrid_programs.settings(choose, **fixed)
        program = hybrid_programs.Program(Hybrid(proof=False, **chosen), failures=False)
        program.open(choose)
        for _ in range(60):
            program.step(choose)
        world = program.world
        world.settle()
        for r in range(len(world.kinds)):
            near, far = (world.seen.ready[world.cell(r, tier)].keys() for tier in (0, 1))
            assert near <= far or world.num_hits.get("cleared"), f"{world.kinds[r].name}: {near - far} ({kind}, {seed})"


def test_programs_get_to_what_is_to_be_seen() -> None:
    """Else they would be green whatever the core does."""
    seen: dict[str, int] = {}
    for seed in range(40):
        for what, count in run(seed, kind="unified", tiers=2, steps=60, proof=False).num_hits.items():
            seen[what] = seen.get(what, 0) + count
    for what in (
        "companion hits",
        "companions written",
        "companions loaded",
        "states committed",
        "waits",
        "refused for want of full",
        "refused for want of window",
        "refused for want of mamba",
    ):
        assert seen.get(what, 0) >= 5, f"{what}: {seen.get(what, 0)} times only"
