"""What a replay is made of, without a daemon (with one: tests/test_journey.py): trace, comparison, report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from sglcache.bench import replay, trace
from sglcache.bench.replay import Report, Watcher
from sglcache.client.client import Client, Dump
from sglcache.client.mirror import Fact, Mirror, MirrorState
from sglcache.errors import ConfigError
from sglcache.units import Tier
from sglcache.wire.events import AllBlocksCleared, Batch, BlockStored

RANK = 3  # of the daemon's ranks


def stored(*hashes: int, medium: str = "GPU") -> BlockStored:
    return BlockStored(list(hashes), None, list(range(len(hashes))), 1, None, medium)


class StillMirror:
    """A mirror at the end of a script: each step takes in the next batch."""

    synced = True
    bad_messages = 0

    def __init__(self, *batches: list[Any]) -> None:
        self.state = MirrorState()
        self.script = list(enumerate(batches))

    def step(self, timeout_s: float) -> list[Fact]:
        if not self.script:
            return []
        seq, events = self.script.pop(0)
        news = self.state.apply(seq, Batch(0.0, events, RANK))
        return [Fact(seq, RANK, event) for event in news or []]

    def hashes(self, tier: Tier, rank: int) -> set[int]:
        return self.state.hashes(tier, rank)


def compare(mirror: StillMirror, dump: Callable[[Tier], Dump]) -> tuple[Report, Watcher]:
    watcher = Watcher(cast(Mirror, mirror), RANK)
    report = Report("a trace", 2)
    observer = SimpleNamespace(dump=dump, digest=lambda: {"tiers": {"DEVICE": [0, 0], "HOST": [0, 0]}})
    replay._compare(cast(Client, observer), watcher, report)
    return report, watcher


def test_a_mirror_that_equals_the_index_has_no_problem_and_every_event_is_counted() -> None:
    mirror = StillMirror([AllBlocksCleared()], [stored(1, 2)], [stored(1, medium="CPU_PINNED")])
    held = {Tier.DEVICE: [2, 1], Tier.HOST: [1]}
    report, watcher = compare(mirror, lambda tier: Dump(tier, 2, held[tier]))
    assert report.ok
    assert report.tiers["device"].equal
    assert (report.tiers["device"].mirror_blocks, report.tiers["host"].mirror_blocks) == (2, 1)
    assert watcher.counts == {"AllBlocksCleared": 1, "BlockStored": 2, "blocks": 3}


def test_a_difference_is_told_by_tier_and_hash() -> None:
    mirror = StillMirror([AllBlocksCleared()], [stored(1, 2)])
    held = {Tier.DEVICE: [2, 3], Tier.HOST: []}
    report, _ = compare(mirror, lambda tier: Dump(tier, 1, held[tier]))
    assert not report.ok
    assert report.tiers["device"].missing == [3]
    assert report.tiers["device"].extra == [1]
    assert report.tiers["host"].equal
    assert report.problems == [
        "DEVICE: at number 1 the mirror lacks 1 of the index's 2 blocks and has 1 that it should not; "
        "lacking [3], too many [1]"
    ]
    assert "DIFFERS from the index" in replay.describe(report)


def test_a_mirror_that_is_ahead_of_the_dump_is_compared_again() -> None:
    mirror = StillMirror([AllBlocksCleared()], [stored(1)], [stored(2)])
    for _ in range(3):
        mirror.step(0)
    dumps = iter([Dump(Tier.DEVICE, 1, [1]), Dump(Tier.DEVICE, 2, [1, 2]), Dump(Tier.HOST, 2, [])])
    report, _ = compare(mirror, lambda tier: next(dumps))
    assert report.ok
    assert report.tiers["device"].seq == 2


def test_a_mirror_that_never_arrives_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "SETTLE_S", 0.0)
    report, _ = compare(StillMirror([AllBlocksCleared()]), lambda tier: Dump(tier, 9, []))
    assert "did not reach number 9" in report.problems[0]


def test_the_made_up_trace_is_a_trace_shares_prefixes_and_is_the_same_every_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    records = list(replay.conversations(200))
    assert records == list(replay.conversations(200))
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    assert replay.num_requests(path, None) == 200
    assert replay.num_requests(path, 7) == 7
    requests = list(trace.requests(path))
    assert [len(request.tokens) for request in requests] == [record["input_length"] for record in records]
    first_blocks = {request.tokens[:512].tobytes() for request in requests}
    assert len(first_blocks) == 4, "four system prompts"
    last_blocks = [tuple(record["hash_ids"]) for record in records]
    assert len(set(last_blocks)) == 200, "no request repeats another"


def test_no_trace_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        replay.num_requests(tmp_path / "absent", None)


def test_outputs_are_the_same_in_every_run_and_differ_by_request() -> None:
    assert (replay.outputs(3, 10) == replay.outputs(3, 10)).all()
    assert (replay.outputs(3, 10) != replay.outputs(4, 10)).any()
    assert replay.outputs(3, 10).dtype == np.uint32
    assert len(replay.outputs(3, 0)) == 0


def test_quantiles() -> None:
    assert replay.quantile([], 0.5) == 0.0
    assert replay.quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert replay.quantile([float(n) for n in range(100)], 0.99) == 99.0


def test_an_empty_report_can_be_told() -> None:
    text = replay.describe(Report("a trace", 2, problems=["it broke"]))
    assert "problem   it broke" in text
    assert json.loads(Report("a trace", 2).to_json())["hit_rate"] == 0


def test_hits_are_told_by_the_tier_they_were_found_in() -> None:
    report = Report("a trace", 2, input_tokens=1000, matched_tokens=500, host_tokens=300, third_tokens=100)
    assert report.hit_tokens == {"device": 200, "host": 200, "third": 100}
    assert json.loads(report.to_json())["hit_tokens"] == report.hit_tokens
    assert "50.0 % of the tokens in; of these 40.0 % came from the host, 20.0 % from the third tier" in replay.describe(
        report
    )
    assert "third tier" not in replay.describe(Report("a trace", 2, matched_tokens=500, host_tokens=300))
