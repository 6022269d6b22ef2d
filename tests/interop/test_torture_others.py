"""A torture with other people's programs in it: Dynamo's indexer follows the daemon, Mooncake's store is below it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from consumers import PYTHON, Indexer
from mooncakes import client_environment

from sglcache.torture import daemon, faults, run
from sglcache.torture.report import Report, describe

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]

SECONDS = 12.0


def tortured(names: tuple[str, ...], **options: Any) -> Report:
    given = {"num_runners": 2, "rate": 3.0, "quiet_every_s": 8.0, **options}
    report = run.torture(run.Options(1, daemon.KINDS["hiradix"], SECONDS, faults=names, **given))
    if report.folder is not None:
        shutil.rmtree(report.folder)
    assert report.ok, f"{report.problems}\n{describe(report)}"
    return report


def test_the_indexer_believes_what_the_indexes_hold_whatever_dies(tmp_path: Path, shim: Path) -> None:
    with Indexer(tmp_path, shim) as indexer:
        names = ("runner-kill", "rank-kill", "rank-drain", "rank-stall", "clear", "replay-storm", "subscribers", "hog")
        report = tortured(names, indexer=indexer.url, storage="file")
    assert report.checks["indexer's pictures"] >= 2
    assert report.kills["rank-kill"]


def test_a_store_that_dies_and_hangs_costs_misses(shim: Path) -> None:
    prelude = f"import os; os.environ.update({client_environment(shim)!r})"
    master = ("env", f"LD_PRELOAD={shim}", str(PYTHON.with_name("mooncake_master")))
    names = tuple(name for name, kind in faults.BY_NAME.items() if issubclass(kind, faults.MasterKill))
    report = tortured((*names, "runner-kill"), storage="mooncake", prelude=prelude, master=master)
    assert report.faults["helper-kill"]
    assert report.faults["master-stop"]
