"""The runner's benchmark does the work that it claims to time."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers")

from click.testing import CliRunner

from sglcache.bench import runner
from sglcache.bench.cli import bench
from sglcache.bench.harness import BenchError

pytestmark = pytest.mark.daemons
SMALL = runner.Options(
    prompts=(40, 64),
    dtypes=("float32", "bfloat16"),
    layers=1,
    hidden=64,
    question_tokens=5,
    step_tokens=24,
    cold_pairs=1,
    pairs=2,
    steps=2,
    batch=2,
    batch_prompt=24,
)


def test_runner_measures_every_tier_beside_the_own_cache() -> None:
    row = runner.run(SMALL)
    first, steps = row["first_token"], row["decode_step"]
    assert [(case["dtype"], case["prompt_tokens"]) for case in first] == [
        ("float32", 32),  # whole pages
        ("float32", 64),
        ("bfloat16", 32),
        ("bfloat16", 64),
    ]
    assert [(case["dtype"], case["batch"], case["prompt_tokens"]) for case in steps] == [
        ("float32", 1, 64),
        ("float32", 2, 24),
        ("bfloat16", 1, 64),
        ("bfloat16", 2, 24),
    ]
    compared = [each for case in [*first, *steps] for each in case.values() if isinstance(each, dict)]
    assert len(compared) == 4 * 4 + 4
    for each in compared:
        assert 0 < each["ratio_least"] <= each["ratio"] <= each["ratio_most"]
        assert each["ratio"] == pytest.approx(each["ours_ms"] / each["theirs_ms"])


def test_a_hit_that_is_none_and_words_that_differ_are_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    small = SMALL._replace(prompts=(32,), dtypes=("float32",))
    ask, acquire = runner._Pair._own_ask, runner.Client.acquire
    with monkeypatch.context() as patched:
        patched.setattr(runner._Pair, "_own_ask", lambda *arguments: ask(*arguments)._replace(word=-1))
        with pytest.raises(BenchError, match="the words differ"):
            runner.run(small)
    monkeypatch.setattr(
        runner.Client, "acquire", lambda *arguments, **options: acquire(*arguments, **{**options, "limit": 0})
    )
    with pytest.raises(BenchError, match="0 tokens were matched, 0 of them on the host; 32 and 0 should have been"):
        runner.run(small)


def test_the_command_line_prints_json_or_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["runner", "--layers", "1", "--hidden", "64", "--pairs", "1", "--dtype", "float32", "--prompt-tokens", "32"]
    monkeypatch.setattr(runner, "Options", lambda **given: SMALL._replace(**given))
    done = CliRunner().invoke(bench, [*words, "--json"], standalone_mode=False)
    assert done.exception is None
    row = json.loads(done.output)
    assert (len(row["first_token"]), len(row["decode_step"])) == (1, 2)
    assert row["machine"]["cores"] >= 1
    table = CliRunner().invoke(bench, words, standalone_mode=False)
    assert table.exception is None
    assert "step_over_own_cache" in table.output
