"""The demo is the first thing that people run: it runs here too."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("transformers")


pytestmark = pytest.mark.models


@pytest.mark.timeout(240)  # two processes import torch, one after the other
def test_the_demo_goes_as_it_should() -> None:
    done = subprocess.run([sys.executable, "-m", "sglcache", "demo"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    hits = [line.partition(" ms ")[2] for line in done.stdout.splitlines() if "first token" in line]
    tiers = [line.rpartition(", ")[2] for line in hits]
    assert tiers[:3] == ["-", "device", "-"]
    assert tiers[3].startswith("host")
    assert tiers[4].startswith("device")
    assert "kill -9" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("The same answers every time")
