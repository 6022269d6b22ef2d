"""scripts/paused.py, with which tests are looked for that go by the clock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "paused.py"

UNTIL_PAUSED = """
import sys, time
seen, last = 0, time.monotonic()
while seen < 3:
    now = time.monotonic()
    seen, last = seen + (now - last >= 0.02), now
sys.exit(3)
"""


def paused(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_a_command_is_paused_and_ends_as_it_ends() -> None:
    done = paused("--every", "0.01", "--longest", "0.05", "--", sys.executable, "-c", UNTIL_PAUSED)
    if done.returncode == 2:
        assert "try it as root" in done.stderr
        pytest.skip(done.stderr.strip())
    assert done.returncode == 3
    words = done.stderr.split()
    assert (words[0], words[2]) == ("paused:", "pauses")
    assert int(words[1]) >= 1
    gone = paused("--", "/nowhere/to/be/found")
    assert (gone.returncode, "/nowhere/to/be/found" in gone.stderr) == (2, True)


def test_what_cannot_be_meant_is_refused() -> None:
    for arguments in (["--every", "0", "true"], ["--longest", "0.01", "true"], []):
        done = paused(*arguments)
        assert done.returncode == 2
        assert "usage:" in done.stderr
