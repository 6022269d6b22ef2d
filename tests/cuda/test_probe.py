"""What is asked of a card is asked here of one in software: every question runs, and has the answers that it must."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from softcuda import SoftCuda, cards

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_probe.py"

# Times and rates are the machine's, and are not looked at.
KNOWN = {
    "a.fd": True,
    "a.fd_copies": True,
    "a.outlives_unmap": True,
    "a.torch": "not asked: --no-torch",
    "a.ipc": True,
    "a.granularity": 2 << 20,
    "a.fresh_dirt": 0,
    "b.event_waits": True,
    "b.unrecorded_is_no_op": True,
    "b.word_seen": True,
    "b.word_waits": True,
    "b.store_releases": True,
    "b.largest_releases": True,
    "b.minus_one_waits": True,
    "b.stale_stored": 0,
    "b.stale_waited": 0,
    "b.stale_loaded": 0,
    "b.streams_held": 0,
    "b.calls_held": ["cuMemFree"],
    "c.exporter_changes": 0,
    "c.exporter_word": False,
    "c.exporter_other_works": True,
    "c.importer_changes": 0,
    "c.importer_word": False,
    "c.importer_other_works": True,
    "c.waiter_back": True,
    "d.held_by_importer": True,
    "d.importer_reads": True,
    "d.no_room_for_a_second": True,
    "d.held_by_fd": True,
    "d.fd_keeps_bytes": True,
    "d.back": True,
    "d.room_again": True,
    "d.back_at_pidfd": True,
    "e.batched": "cuMemcpyBatchAsync_v2",
    "e.wrong_chunks": 0,
    "f.attach_all": True,
}


def probe(environment: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--no-torch", *options],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture(scope="module")
def asked(libcuda: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, str]:
    """(the JSON, the markdown, what was printed)."""
    folder = tmp_path_factory.mktemp("probe")
    with cards(libcuda, SOFTCUDA_MEMORY=64 << 20) as soft:
        files = ("--json", str(folder / "probe.json"), "--markdown", str(folder / "probe.md"))
        ran = probe(soft.environment, *files)
    assert ran.returncode in (0, 1), ran.stderr  # 1: rates that a card would not have
    assert not ran.stderr
    return json.loads((folder / "probe.json").read_text()), (folder / "probe.md").read_text(), ran.stdout


def test_each_question_comes_to_its_end(asked: tuple[dict[str, Any], str, str]) -> None:
    found, _, _ = asked
    assert {question["title"]: question["error"] for question in found["questions"] if question["error"]} == {}
    assert {question["letter"] for question in found["questions"]} == set("abcdef")


def test_the_answers_are_what_cuda_means(asked: tuple[dict[str, Any], str, str]) -> None:
    found, _, _ = asked
    assert {key: found["answers"].get(key) for key in KNOWN} == KNOWN
    assert "CUDA_ERROR_INVALID_VALUE" in found["answers"]["f.copy_over_ranges"]


def test_a_verdict_is_on_every_answer_and_says_so_everywhere(asked: tuple[dict[str, Any], str, str]) -> None:
    found, markdown, printed = asked
    assert set(found["answers"]) == set(found["verdicts"]), "a row of ASSUMED that nobody tells, or the other way round"
    for key, verdict in found["verdicts"].items():
        assert f"(`{key}`)" in markdown or f"`{key}` |" in markdown
        assert f"    {key}" in printed
        if verdict.startswith("DIFFERS"):
            assert verdict in markdown
            assert verdict in printed
    good = not any(verdict.startswith("DIFFERS") for verdict in found["verdicts"].values())
    assert found["good"] == good


def test_a_question_that_fails_is_told_of_and_the_others_go_on(soft_cuda: SoftCuda, tmp_path: Path) -> None:
    answers = tmp_path / "probe.json"
    soft_cuda.fail("cuMemImportFromShareableHandle", 801)
    ran = probe(soft_cuda.environment, "--only", "a", "--json", str(answers))
    assert ran.returncode == 1
    found = json.loads(answers.read_text())
    first, *others = found["questions"]
    assert "cuMemImportFromShareableHandle: CUDA_ERROR_NOT_SUPPORTED" in first["error"]
    assert found["verdicts"]["a.fd"] == "NOT ANSWERED"
    assert not any(question["error"] for question in others)


def test_no_card_is_told_of(libcuda: Path) -> None:
    with cards(libcuda, SOFTCUDA_DEVICES=0) as soft:
        ran = probe(soft.environment)
    assert ran.returncode == 2
    assert "no card to ask" in ran.stderr
    assert "the CUDA driver sees no card" in ran.stderr
    assert not ran.stdout
