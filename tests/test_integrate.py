"""The examples in docs/integrate.md are what a newcomer copies: they run, and say the same cold and warm."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglcache.testing.daemon import Daemon

pytestmark = pytest.mark.models

PAGE = Path(__file__).parents[1] / "docs" / "integrate.md"
POOL = {"page_size": 16, "num_tokens": 4096, "num_layers": 2, "num_kv_heads": 1, "head_dim": 32, "dtype": "float16"}


SOURCES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)  # the last: integrations/test_folder


def test_the_example_runs_and_hits(tmp_path: Path) -> None:
    assert len(SOURCES[0].splitlines()) <= 60
    program = tmp_path / "runner.py"
    program.write_text(SOURCES[0])
    with Daemon(tmp_path / "daemon", pool=POOL) as daemon:
        first, second = (run(program, daemon) for _ in range(2))
        assert daemon.settle()["gauges"]["num_leases"] == 0
    assert "0 of " in first[0]
    assert "320 of 325 tokens were cached" in second[0]
    answers = [line.partition(";")[2] for line in first]
    assert len(set(re.findall(r"\d+", answers[0]))) > 2, "an answer of one word repeated proves little"
    assert answers == [line.partition(";")[2] for line in second]


HYBRID: dict[str, dict[str, Any]] = {
    "pool": {**POOL, "num_layers": 1},
    "window": {"size": 32, "num_layers": 1, "num_tokens": 1024},
    "mamba": {
        "num_layers": 1,
        "states": [{"name": "h", "shape": [32], "dtype": "float32"}],
        "num_slots": 32,
        "interval": 64,
    },
}


def test_the_hybrid_example_runs_and_hits_as_the_page_says(tmp_path: Path) -> None:
    program = tmp_path / "hybrid.py"
    program.write_text(SOURCES[1])
    page = PAGE.read_text()
    with Daemon(tmp_path / "daemon", **HYBRID) as daemon:
        first, second = (run(program, daemon) for _ in range(2))
        assert daemon.settle()["gauges"]["num_leases"] == 0
        pools = daemon.settle()["pools"]
        assert {pool["resource"]: pool["leased"] + pool["locked"] for pool in pools} == {
            "full": 0,
            "window": 0,
            "mamba": 0,
        }
    for line in first:
        told, _, _ = line.partition("[")
        assert f"    {told}[" in page
    cached = [[int(number) for number in re.findall(r"\d+", line)[:3]] for line in second]
    assert cached == [[320, 325, 320], [304, 317, 304], [304, 316, 304]]
    answers = [line.partition(";")[2] for line in first]
    assert answers == [line.partition(";")[2] for line in second]
    assert len(set(answers)) == 3


def run(program: Path, daemon: Daemon) -> list[str]:
    environ = {**os.environ, "SGLCACHE_SOCKET": str(daemon.socket)}
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False, env=environ)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()
