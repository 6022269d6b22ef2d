"""`sglcache doctor events` against Dynamo's own indexer: it proves what is right, and leaves it as it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from consumers import Indexer

from sglcache.testing.daemon import Daemon

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]

PROVED = ("indexer", "indexer late join", "indexer live", "indexer namespaces", "indexer tiers", "indexer cleanup")


def doctor(daemon: Daemon, indexer: Indexer, *arguments: str) -> tuple[int, dict[str, str]]:
    command = [sys.executable, "-m", "sglcache", "doctor", "events", "--socket", str(daemon.socket), "--json"]
    ran = subprocess.run(
        [*command, "--indexer", indexer.url, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.stderr == ""
    return ran.returncode, {each["check"]: each["state"] for each in json.loads(ran.stdout)["findings"]}


@pytest.mark.parametrize("encoding", ["map", "array", "superset"])
def test_every_encoding_is_proved_and_the_indexer_is_left_as_it_was(encoding: str, tmp_path: Path, shim: Path) -> None:
    sections: dict[str, Any] = {"http": {"enabled": True, "port": 0}, "events": {"encoding": encoding}}
    with Daemon(tmp_path / "daemon", **sections) as daemon, Indexer(tmp_path, shim) as indexer:
        stream = daemon.info["ranks"][0]["stream"]
        indexer.register("m", stream["endpoint"], stream["replay_endpoint"], instance=1, block_size=4)
        code, found = doctor(daemon, indexer)
        assert code == 0
        assert [found[check] for check in (*PROVED, "indexer instance 1 of m")] == ["ok"] * 7
        assert [worker["instance_id"] for worker in indexer.get("/workers")] == [1]


def test_a_registration_of_another_block_size_is_found(tmp_path: Path, shim: Path) -> None:
    with Daemon(tmp_path / "daemon", http={"enabled": True, "port": 0}) as daemon, Indexer(tmp_path, shim) as indexer:
        stream = daemon.info["ranks"][0]["stream"]
        indexer.register("m", stream["endpoint"], stream["replay_endpoint"], instance=1, block_size=16)
        code, found = doctor(daemon, indexer)
        assert (code, found["indexer instance 1 of m"], found["indexer live"]) == (1, "failed", "ok")
