"""The statistics that every figure goes through, and the running of other processes."""

from __future__ import annotations

import json
import shlex
import sys

import numpy as np
import pytest

from sglcache.bench import harness
from sglcache.bench.harness import BenchError, Comparison, Summary
from sglcache.errors import ConfigError


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


@pytest.mark.parametrize(
    ("size", "q", "wanted"), [(1, 0.5, 0), (2, 0.5, 1), (600, 0.5, 300), (600, 0.99, 594), (100, 1.0, 99), (7, 0.0, 0)]
)
def test_a_quantile_is_an_element(size: int, q: float, wanted: int) -> None:
    assert harness.quantile([float(i) for i in range(size)], q) == wanted
    assert harness.quantile(np.arange(size, dtype=np.float64), q) == wanted


def test_a_summary_does_not_mind_the_order() -> None:
    values = [float(i) for i in range(200)]
    assert Summary.of(values) == Summary.of(values[::-1]) == Summary(200, 99.5, 100.0, 198.0, 199.0)
    assert Summary.of([]) == Summary(0, 0.0, 0.0, 0.0, 0.0)


def test_a_comparison_is_of_medians_and_tells_the_worst_pair() -> None:
    comparison = Comparison.of([10.0, 20.0, 40.0], [30.0, 30.0, 100.0])
    assert (comparison.ours, comparison.other, comparison.ratio) == (20.0, 30.0, 1.5)
    assert (comparison.least, comparison.most) == (1.5, 3.0)
    assert (comparison.ours_spread, comparison.other_spread) == ((10.0, 40.0), (30.0, 100.0))


def test_unequal_samples_are_not_compared() -> None:
    with pytest.raises(ValueError, match="zip"):
        Comparison.of([1.0], [1.0, 2.0])


def test_pairs_run_in_turn() -> None:
    order: list[str] = []
    a, b = harness.in_turn(lambda: order.append("a"), lambda: order.append("b"), 3)
    assert "".join(order) == "ababab"
    assert len(a) == len(b) == 3


def test_compare_leaves_out_what_a_row_lacks_or_did_not_measure() -> None:
    ours = [{"x": 1.0, "y": 2, "z": 0.0}, {"x": 2.0, "y": 2, "z": 1.0}]
    other = [{"x": 4.0, "z": 1.0}, {"x": 4.0, "y": 1, "z": 1.0}]
    compared = harness.compare(ours, other, ["x", "y", "z"])
    assert list(compared) == ["x"]
    assert compared["x"].ratio == 4.0 / 1.5


def test_run_json_takes_the_last_line() -> None:
    assert harness.run_json(python("print('noise'); print('{\"a\": 1}')")) == {"a": 1}
    assert harness.run_json(f"X=7 {shlex.join(python('import os; print(dict(x=1) and os.environ[chr(88)])'))} | "
                            "sed 's/.*/{\"x\": &}/'") == {"x": 7}  # fmt: skip


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import sys; sys.exit('why')", "exited 1: why"),
        ("print('no json')", "no JSON object"),
        ("print('[1]')", "no JSON object"),
        ("pass", "no JSON object"),
        ("import time; time.sleep(60)", "longer than"),
    ],
)
def test_run_json_says_what_went_wrong(program: str, words: str) -> None:
    with pytest.raises(BenchError, match=words):
        harness.run_json(python(program), timeout_s=0.2 if "sleep" in program else 60.0)


def test_an_error_that_a_command_of_ours_tells_is_raised_here() -> None:
    told = 'import sys; print(\'{"error": {"code": "config", "message": "m", "facts": {}}}\', file=sys.stderr)'
    with pytest.raises(ConfigError, match=r"^m$"):
        harness.run_ours(python(f"{told}; sys.exit(2)"))
    with pytest.raises(BenchError, match="exited 1: why"):
        harness.run_ours(python("import sys; sys.exit('why')"))


def test_rounds_take_turns() -> None:
    calls: list[str] = []
    given = harness.rounds([lambda name=name: calls.append(name) or len(calls) for name in "abc"], 2)
    assert "".join(calls) == "abcabc"
    assert given == [[1, 4], [2, 5], [3, 6]]


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(BenchError, match="can't be run"):
        harness.run_json(["/nowhere/at-all"])


def test_facts_are_plain_json() -> None:
    facts = harness.facts()
    assert json.loads(json.dumps(harness.plain(facts))) == harness.plain(facts)
    assert facts["cores"] >= 1
    assert facts["versions"]["numpy"] == np.__version__


def test_plain_names_the_fields_of_named_tuples() -> None:
    value = {"a": Summary(1, 0.123456, 2.0, 3.0, 4.0), "b": (1, [2.00004]), "c": None}
    assert harness.plain(value) == {
        "a": {"samples": 1, "mean": 0.1235, "p50": 2.0, "p99": 3.0, "max": 4.0},
        "b": [1, [2.0]],
        "c": None,
    }
