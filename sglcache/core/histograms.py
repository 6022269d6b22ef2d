"""Distributions with fixed buckets: a count for each, and a sum. Whoever measures anything with a clock has one.

To observe is a bisection and two additions, cheap enough for a command's path. Nothing is locked: who observes and who
reads are one thread, or have a lock of their own. Bounds never change in a life, so what several ranks, or one rank at
several times, have counted can be added up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

LATENCIES = tuple(
    digit * 10.0**power if power >= 0 else digit / 10.0**-power for power in range(-5, 2) for digit in (1, 2, 5)
)[1:]
"""Seconds, from 20 us to 50 s: what somebody waits for."""
AGES = tuple(digit * 10.0**power if power >= 0 else digit / 10.0**-power for power in range(-1, 6) for digit in (1, 3))
"""Seconds, from 0.1 s to three and a half days: how long something was there."""


class Observed(NamedTuple):
    """What a histogram has seen so far. `counts[i]` is of what is at most `bounds[i]` and above the bound before; the
    last, of one more, is of what is above all."""

    bounds: Sequence[float]
    counts: Sequence[int]
    total: float  # of all that was observed


class Histogram:
    """Counts what is observed by bucket."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = LATENCIES) -> None:
        """`bounds` rise."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, weight: int = 1) -> None:
        """`weight` times."""
        self.counts[bisect_left(self.bounds, value)] += weight
        self.total += value * weight

    def observed(self) -> Observed:
        """As it is now: a copy."""
        return Observed(self.bounds, list(self.counts), self.total)
