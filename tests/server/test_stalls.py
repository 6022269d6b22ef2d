"""Of how long the loop stood still: what it worked itself, and what it waited for."""

from __future__ import annotations

import time
from collections.abc import Callable

from sglcache.server.watch import Stalls


class Loop:
    """Time that a test makes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: Callable[[], None] = self.time  # type: ignore[assignment]

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        self.due = call


def test_what_the_loop_waited_for_is_not_its_own_work() -> None:
    loop = Loop()
    stalls = Stalls(loop, 0.5)  # type: ignore[arg-type]
    stalls.start()
    loop.now = stalls._due + 60.0  # its thread had no processor
    loop.due()
    assert stalls.longest_s == 60.0
    waited = stalls.longest_own_s
    began = time.thread_time()
    while time.thread_time() - began < waited + 0.01:
        pass
    loop.now = stalls._due + 60.0
    loop.due()
    assert waited < stalls.longest_own_s < 60.0
    assert stalls.facts()["longest_own_s"] == stalls.longest_own_s


def test_work_that_makes_nothing_late_is_no_stall() -> None:
    loop = Loop()
    stalls = Stalls(loop, 0.5)  # type: ignore[arg-type]
    stalls.start()
    began = time.thread_time()
    while time.thread_time() - began < 0.002:
        pass
    loop.now = stalls._due + 0.001
    loop.due()
    assert 0 < stalls.longest_own_s <= 0.001 + 1e-9
