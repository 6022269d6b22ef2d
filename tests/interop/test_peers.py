"""The scripts that the suite measures peers with, on the peers that are installed here: they do the work and say so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from consumers import ROOT
from mooncakes import client_environment, site_packages

from sglcache.bench import beside

pytestmark = [pytest.mark.interop, pytest.mark.timeout(120)]


def row(script: str, *words: str, **env: str) -> dict[str, Any]:
    """In our Python, which finds the peers' packages behind its own, and so needs nothing else of theirs."""
    command = [sys.executable, str(ROOT / "scripts" / "peers" / script), *words]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_dynamo_is_told_of_the_same_blocks() -> None:
    theirs = row("dynamo_tree.py", "--requests", "8", "--tokens", "128", PYTHONPATH=f"{ROOT}:{site_packages()}")
    ours = beside.mirror(beside.MirrorOptions(requests=8, tokens=128))
    assert theirs["blocks"] == ours["blocks"] == 8 * 8 - 6 * 4
    assert theirs["match_us"] >= theirs["find_us"] > 0


def test_mooncake_gives_back_what_it_was_given(shim: Path) -> None:
    """Bytes are looked at by our store on it, and pages counted on both sides."""
    theirs = row("mooncake_store.py", "--total-mib", "4", "--pairs", "1", **client_environment(shim))
    assert theirs["page_kib"] == 256
    assert all(theirs[name] > 0 for name in ("put_us", "get_us", "ours_put_us", "ours_get_us"))
