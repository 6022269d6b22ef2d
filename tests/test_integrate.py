"""The example in docs/integrate.md is what a newcomer copies: it runs, and says the same cold and warm."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from sglcache.testing.daemon import Daemon

PAGE = Path(__file__).parents[1] / "docs" / "integrate.md"
POOL = {"page_size": 16, "num_tokens": 4096, "num_layers": 2, "num_kv_heads": 1, "head_dim": 32, "dtype": "float16"}


def test_the_example_runs_and_hits(tmp_path: Path) -> None:
    source, _ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)  # the other: integrations/test_folder
    assert len(source.splitlines()) <= 60
    program = tmp_path / "runner.py"
    program.write_text(source)
    with Daemon(tmp_path / "daemon", pool=POOL) as daemon:
        first, second = (run(program, daemon) for _ in range(2))
        assert daemon.settle()["gauges"]["num_leases"] == 0
    assert "0 of " in first[0]
    assert "320 of 325 tokens were cached" in second[0]
    answers = [line.partition(";")[2] for line in first]
    assert len(set(re.findall(r"\d+", answers[0]))) > 2, "an answer of one word repeated proves little"
    assert answers == [line.partition(";")[2] for line in second]


def run(program: Path, daemon: Daemon) -> list[str]:
    environ = {**os.environ, "SGLCACHE_SOCKET": str(daemon.socket)}
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False, env=environ)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()
