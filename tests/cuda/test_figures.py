"""`bench cards` takes every figure that it has a place for, and says so where it can't."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from softcuda import FLAGS, SOURCE, SoftCuda, cards

from sglcache.bench.cards import SECTIONS
from sglcache.bench.hand import Hand, SharedReach, page_of, write_page
from sglcache.bench.harness import BenchError
from sglcache.memory.geometry import Placement
from sglcache.testing.daemon import Daemon

pytestmark = pytest.mark.daemons


def bench(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglcache", "bench", *words]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=200, check=False)


def test_every_figure_is_taken_on_a_card_and_every_byte_is_right(soft_cuda: SoftCuda, tmp_path: Path) -> None:
    page = tmp_path / "figures.md"
    done = bench("cards", "--quick", "--json", "--markdown", str(page), **soft_cuda.environment)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert (row["failed"], list(row["sections"])) == ([], list(SECTIONS))
    assert row["card"]["name"] == "softcuda card 0"
    copies = row["sections"]["copies"]
    for page_size in (16, 64):
        for layout in ("page_first", "layer_first"):
            its = copies[f"page {page_size}, {layout}"]
            found = [(case["mib"], case["slots"]) for case in its["cases"]]
            assert found == [(size, shape) for size in (4, 8) for shape in ("dense", "scattered")]
            assert found == [(case["mib"], case["slots"]) for case in its["both_directions"]]
            assert its["pages_proved"] > 0
            for case in (*its["cases"], *its["both_directions"]):
                ways = [case[way] for way in ("backup", "load", "both") if way in case]
                assert all(each[key] > 0 for each in ways for key in ("gb_s", "ratio", "registered_ratio"))
    decoding = row["sections"]["decoding"]
    for kernels in ("burn", "copy"):
        for way in ("to the host", "to the device", "both at once"):
            fed = decoding[f"{kernels}, {way}"]["fed"]
            assert all((each["written"] > 0) == (way != "to the device") for each in fed)
            assert all((each["loaded"] > 0) == (way != "to the host") for each in fed)
    assert decoding["pages_proved"] > 0
    tokens = row["sections"]["tokens"]
    for source in ("cold", "L1", "L2"):
        for times in tokens[f"256 tokens, {source}"]:
            assert 0 < times["answer"] <= times["first_layer"] <= times["all_layers"] <= times["token"]
    assert len(row["sections"]["polls"]["one_page"]) == 2
    assert row["sections"]["runners"]["total_ms"]["samples"] == 2
    assert row["sections"]["ranks"]["0.0625 GiB"]["first_hit_s"] > 0
    assert [goal["goal"] for goal in row["goals"]] == ["≥ 0.9"] * 4 + ["≤ 5 %"]
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ") and "---" not in line]
    # Goals; 4 tables of copies and one of layers; decoding, tokens, polls and one page; deaths.
    assert len(rows) == (1 + 5) + 4 * (1 + 24) + (1 + 8) + (1 + 6) + (1 + 3) + (1 + 2) + (1 + 2) + (1 + 4) + (1 + 1)


def test_without_a_card_it_says_so(soft_cuda: SoftCuda, tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_bytes(b"")
    for command in (("cards",), ("copy", "--device", "cuda", "--size", "2")):
        none = bench(*command, "--json", LD_LIBRARY_PATH=str(tmp_path))
        assert none.returncode == 2
        told = json.loads(none.stderr.splitlines()[-1])["error"]
        assert told["code"] == "config"
        assert "this machine has no CUDA driver" in told["message"]
    hidden = bench("cards", **{**soft_cuda.environment, "CUDA_VISIBLE_DEVICES": ""})
    assert hidden.returncode == 2
    assert "the CUDA driver sees no card" in hidden.stderr


def test_wrong_bytes_are_told_and_the_other_sections_go_on(tmp_path: Path) -> None:
    """The second half of each range of a batch is not copied."""
    whole, half = (f"(Copy){{dsts[i], srcs[i], sizes[i]{part}, NULL, NULL}}" for part in ("", " / 2"))
    text = SOURCE.read_text()
    assert text.count(whole) == 1
    source = tmp_path / "broken.c"
    source.write_text(text.replace(whole, half))
    subprocess.run(["cc", *FLAGS, str(source), "-o", str(tmp_path / "libcuda.so.1")], check=True)
    words = [word for section in ("copies", "tokens", "polls") for word in ("--only", section)]
    with cards(tmp_path / "libcuda.so.1") as soft:
        done = bench("cards", "--quick", *words, "--json", **soft.environment)
    assert done.returncode == 1
    row = json.loads(done.stdout)
    assert list(row["sections"]) == ["polls"]
    *copies, tokens = row["failed"]
    assert len(copies) == 4
    assert "page 16, page_first: dense: page 8 of HOST is not what was copied to it" in copies[0]
    assert "L2: page 7 of 16 (slot" in tokens


def test_a_page_that_is_not_as_it_was_written_is_seen(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, Hand(daemon.socket) as hand, hand.client.acquire(range(400)) as lease:
        hand.fill(lease.slots, 7)
        assert hand.check(lease.slots, 7, "written") == 64
        with pytest.raises(BenchError, match="page 0 of 100"):
            hand.check(lease.slots, 8, "another")
        hand.client.pool.array[lease.slots[99], -1] ^= 1
        with pytest.raises(BenchError, match="page 99 of 100"):
            hand.check(lease.slots, 7, "changed")


def test_pages_of_every_layout_are_looked_at_whole() -> None:
    memory, reach = np.zeros(4 * 96, np.uint64), SharedReach()
    for layout in ("page_first", "layer_first"):
        placement = Placement.of(layout, 4, 3, (128, 128))
        for slot in (2, 0, 3, 1):
            write_page(reach, placement, memory.ctypes.data, slot, 1000 * slot)
        for slot in range(4):
            found = page_of(reach, placement, memory.ctypes.data, slot)
            assert found.tolist() == list(range(1000 * slot, 1000 * slot + 96))
