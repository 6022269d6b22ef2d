"""A histogram counts each value once, in the first bucket that it fits; nothing is lost above the last bound."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from sglcache.core.histograms import AGES, LATENCIES, Histogram


def test_every_value_is_in_the_first_bucket_whose_bound_it_does_not_exceed() -> None:
    draw = random.Random(1)
    histogram, values = Histogram((1.0, 2.0, 5.0)), [0.0, 1.0, 1.5, 2.0, 5.0, 5.1, 1e9]
    values += [draw.uniform(0, 7) for _ in range(500)]
    for value in values:
        histogram.observe(value)
    bounds, counts, total = histogram.observed()
    for place, bound in enumerate(bounds):
        assert sum(counts[: place + 1]) == sum(value <= bound for value in values)
    assert sum(counts) == len(values)
    assert total == pytest.approx(sum(values))


def test_a_weight_is_as_many_observations() -> None:
    once, often = Histogram(), Histogram()
    once.observe(0.003, 7)
    for _ in range(7):
        often.observe(0.003)
    assert once.observed().counts == often.observed().counts
    assert once.total == pytest.approx(often.total)


def test_what_was_observed_does_not_change_with_what_comes() -> None:
    histogram = Histogram()
    seen = histogram.observed()
    histogram.observe(1.0)
    assert sum(seen.counts) == 0


@pytest.mark.parametrize("bounds", [LATENCIES, AGES])
def test_bounds_rise_in_even_steps_and_are_told_in_few_digits(bounds: tuple[float, ...]) -> None:
    steps = [after / before for before, after in pairwise(bounds)]
    assert all(1.9 < step < 3.4 for step in steps)
    assert all(len(repr(bound)) <= 8 for bound in bounds)
