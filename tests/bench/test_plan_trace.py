"""A trace over a configuration: the forecast says what an index of that configuration finds."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from sglcache import config as configs
from sglcache.bench.plan import Options, plan
from sglcache.cli import cli
from sglcache.errors import ConfigError

BLOCK = 512


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty conversations of some turns, and one long prompt."""
    draw, path = random.Random(4), tmp_path_factory.mktemp("plan") / "trace.jsonl"
    talks: list[list[int]] = [[0] for _ in range(40)]
    lines, number = [], 1
    for at in range(400):  # a turn each
        talk = talks[int(draw.triangular(0, 40, 0))]
        more = 1
        talk += range(number, number + more)
        number += more
        length = len(talk) * BLOCK - draw.randrange(BLOCK)
        lines.append({"timestamp": 100 * at, "input_length": length, "output_length": 9, "hash_ids": talk[:]})
    lines.insert(100, {"timestamp": 10_000, "input_length": 40_000, "hash_ids": [*range(9000, 9080)]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def config(policy: str = "write_through", host: int = 80_000) -> configs.Config:
    return configs.parse(
        {
            "pool": {"page_size": 32, "num_tokens": 39_000},
            "host": {"num_tokens": host, "write_policy": policy},
            "parallel": {"dp_size": 2},
        }
    )


@pytest.mark.parametrize(("policy", "within"), [("write_through", 0.03), ("write_back", 0.05)])
def test_the_forecast_is_what_the_index_finds(trace: Path, policy: str, within: float) -> None:
    """Prompts are up to a fourth of the device here: the tree evicts whole runs, and that shows."""
    seen: list[int] = []
    told = plan(Options(trace, config(policy), simulate=True), seen.append)
    found = told["simulated"]
    assert told["refused"] == 1, "the long one does not fit"
    assert told["hit_rate"] == pytest.approx(found["all"], abs=within)
    assert told["device_hit_rate"] == pytest.approx(found["device"], abs=within)
    assert found["host"] == pytest.approx(found["all"] - found["device"])
    assert 0.2 < found["device"] < found["all"] - 0.1 < told["ceiling"]
    assert (told["requests"], told["seconds"], told["measured"]) == (400, pytest.approx(39.9), None)
    assert seen == list(range(0, 401, 16))


def test_a_sample_is_enough(trace: Path) -> None:
    whole, some = (plan(Options(trace, config(), sample_tokens=tokens)) for tokens in (0, 256))
    assert some["weight"] == 8
    assert some["simulated"] is None
    assert some["hit_rate"] == pytest.approx(whole["hit_rate"], abs=0.04)
    assert some["ceiling"] == pytest.approx(whole["ceiling"], abs=0.03)
    assert plan(Options(trace, config(), limit=7))["requests"] == 7


def test_the_command_shows_it(trace: Path) -> None:
    words = ["plan", "--trace", str(trace), "--page-size", "64", "-s", "pool.num_tokens=65536", "--simulate"]
    shown = CliRunner().invoke(cli, words, catch_exceptions=False).output
    assert "401 requests" in shown
    assert "refused" not in shown
    assert "simulated" in shown
    assert "GiB more" in shown
    told = json.loads(CliRunner().invoke(cli, [*words, "--json"], catch_exceptions=False).output)
    assert told["page_size"] == 64
    assert told["verdict"] in shown.replace("\n", " ")
    assert {row["tier"] for row in told["more"]} == {"device", "host"}


def test_what_does_not_go_together_is_refused(trace: Path, tmp_path: Path) -> None:
    assert CliRunner().invoke(cli, ["plan", "--simulate"]).exit_code == 2
    assert CliRunner().invoke(cli, ["plan", "--trace", str(trace), "--rank", "0"]).exit_code == 2
    (empty := tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ConfigError, match="there is no request in it"):
        plan(Options(empty, config()))
