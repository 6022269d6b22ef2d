"""Laws 4, 5, 7, 8, 9 and 10 after every step of any program: see `sglcache.testing`.

`SGLCACHE_DEEP=N` runs N times as many programs, new ones each time.
"""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from sglcache.testing.machine import IndexMachine
from sglcache.testing.programs import run

DEEP = int(os.environ.get("SGLCACHE_DEEP", "0"))

CI = settings(
    max_examples=60,
    stateful_step_count=50,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
SETTINGS = settings(CI, max_examples=60 * DEEP, stateful_step_count=100, derandomize=False) if DEEP else CI


@pytest.mark.timeout(0 if DEEP else 300)
def test_any_program_under_hypothesis() -> None:
    run_state_machine_as_test(IndexMachine, settings=SETTINGS)


@pytest.mark.timeout(0 if DEEP else 300)
@pytest.mark.parametrize("tiers", [1, 2])
def test_any_seeded_program(tiers: int) -> None:
    fixed = {"host_pages": 0} if tiers == 1 else {}
    first = random.randrange(1 << 40) if DEEP else 0
    for seed in range(first, first + (200 if tiers == 1 else 500) * max(1, DEEP)):
        try:
            run(seed, **fixed)
        except Exception as exc:
            exc.add_note(f"sglcache.testing.programs.run({seed}, **{fixed})")
            raise
