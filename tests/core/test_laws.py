"""Laws 4, 5, 7, 8, 9 and 10 after every step of any program: see `sglcache.testing`.

`SGLCACHE_DEEP=N` runs N times as many programs, new ones each time.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from sglcache.core import eventlog, eviction, index, l3, slots, tree
from sglcache.core.eviction import POLICIES
from sglcache.core.l3 import L3Config
from sglcache.core.tiering import WritePolicy
from sglcache.testing.machine import IndexMachine
from sglcache.testing.programs import SeededChooser, policy, run

DEEP = int(os.environ.get("SGLCACHE_DEEP", "0"))

CI = settings(
    max_examples=200,
    stateful_step_count=50,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
SETTINGS = settings(CI, max_examples=200 * DEEP, stateful_step_count=100, derandomize=False) if DEEP else CI


@pytest.mark.timeout(0 if DEEP else 300)
def test_any_program_under_hypothesis() -> None:
    run_state_machine_as_test(IndexMachine, settings=SETTINGS)


BELOW = {"num_pages": 10, "host_pages": 10}  # so little that the rest is in L3
VARIANTS: dict[str, tuple[dict[str, Any], bool]] = {
    "any": ({}, False),
    "one tier": ({"host_pages": 0, "max_waiting": 4, "max_waiting_of_session": 3, "max_pinned_fraction": 0.4}, False),
    "loads": (
        {"num_pages": 10, "host_pages": 40, "max_pins": 2},
        False,
    ),  # what is evicted from the device is still on the host
    "slices": ({"evict_slice": 1, "cut_slice": 8}, False),  # acquires that wait for room, batches that wait for a cut
    "small tables": ({}, True),
    "bigrams": ({"bigram": True}, False),
    "copied on eviction": ({"num_pages": 10, "host_pages": 24, "write_policy": WritePolicy("write_back")}, False),
    "copied at a second hit": (
        {"num_pages": 10, "host_pages": 24, "write_policy": WritePolicy("write_through_selective")},
        False,
    ),
    "a store that tells": ({**BELOW, "l3": L3Config(tell=True, part=2, store_quota=100)}, False),
    "a store that is asked": ({**BELOW, "l3": L3Config(exact=False, tell=True, part=1, store_quota=100)}, False),
    "a store beside bigrams in slices": (
        {**BELOW, "bigram": True, "cut_slice": 4, "evict_slice": 2, "l3": L3Config(tell=True, prefetch_quota=3)},
        True,
    ),
    "bigrams in small tables": ({"bigram": True, "max_batch_blocks": 3, "cut_slice": 4}, True),
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
        monkeypatch.setattr(l3, "CHANGES", 2)
        monkeypatch.setattr(l3, "STORE_PART", 2)
        monkeypatch.setattr(l3, "SEGMENT", 3)
    first = random.randrange(1 << 40) if DEEP else 0
    for seed in range(first, first + (200 if variant == "any" else 100) * max(1, DEEP)):
        fixed["waits"] = seed % 2 == 1  # commands wait for room
        try:
            run(seed, **fixed)
        except Exception as exc:
            exc.add_note(f"sglcache.testing.programs.run({seed}, **{fixed}){', small tables' if small else ''}")
            raise


@pytest.mark.timeout(0 if DEEP else 300)
@pytest.mark.parametrize("name", POLICIES)
def test_any_seeded_program_with_a_policy_on_both_tiers(name: str) -> None:
    """Every eviction is compared with all that could have gone, by the policy's plain key."""
    first = random.randrange(1 << 40) if DEEP else 1 << 20
    for seed in range(first, first + 40 * max(1, DEEP)):
        choose = SeededChooser(seed)
        page_size = choose.item((1, 4))
        fixed = {"page_size": page_size, "host_pages": choose.item((0, 12, 24))}
        for tier in ("eviction", "host_eviction"):
            fixed[tier] = policy(choose, page_size, name)
        try:
            run(seed, **fixed)
        except Exception as exc:
            exc.add_note(f"sglcache.testing.programs.run({seed}, **{fixed})")
            raise
