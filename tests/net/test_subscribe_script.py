"""scripts/subscribe.py against a publisher: what it prints, what it notices, and when --check is content."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglcache.net.curve import Curve, make_keys
from sglcache.net.endpoints import parse
from sglcache.net.publisher import Publisher
from sglcache.wire.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, Event, encode_batch

ROOT = Path(__file__).parents[2]
ANY = parse("tcp://127.0.0.1:0")
PATIENCE_S = 20.0
STORED = BlockStored([1, -2], None, [5, 6, 7, 8], 2, None, "GPU", lora_name="a")
PROGRAM: list[tuple[Event, ...]] = [(AllBlocksCleared(),), (STORED,), (), (BlockRemoved([-2], "GPU"),)]


class Telling:
    """A snapshot of one frame."""

    def __init__(self) -> None:
        self.frames = [encode_batch(Batch(1.5, [AllBlocksCleared(), STORED], 0))]

    def next(self) -> bytes | None:
        return self.frames.pop() if self.frames else None

    def close(self) -> None:
        pass


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = Publisher(ANY, ANY, topic="kv@")
    yield publisher
    publisher.close(linger_s=0)


def say(publisher: Publisher, seq: int, *events: Event) -> None:
    publisher.append(seq, encode_batch(Batch(1.5, list(events), 0)), heartbeat=not events)


def run(
    publisher: Publisher, *options: str, replay: bool = True, then: Callable[[], None] = lambda: None
) -> tuple[int, str, str]:
    """The script's exit status and what it printed; `then` is called once it has subscribed."""
    command = [sys.executable, str(ROOT / "scripts" / "subscribe.py"), "--endpoint", publisher.endpoint, *options]
    if replay:
        command += ["--replay-endpoint", str(publisher.replay_endpoint)]
    deadline = time.monotonic() + PATIENCE_S
    subscribed = False
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as script:
        while script.poll() is None:
            if time.monotonic() > deadline:
                script.kill()
            if not publisher.service():
                select.select(publisher.filenos, [], [], 0.01)
            if not subscribed and publisher.stats().subscriptions:
                subscribed = True
                then()
        out, err = script.communicate()
    return script.returncode, out, err


def test_check_is_content_with_the_past(publisher: Publisher) -> None:
    for seq, events in enumerate(PROGRAM, 100):
        say(publisher, seq, *events)
    status, out, err = run(publisher, "--check", "--topic", "kv@")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) == 3
    assert "#101" in lines[1]
    assert "2 blocks  0000000000000001..fffffffffffffffe  parent root  4 tokens [5,6,7,8]" in lines[1]
    assert "lora_name 'a'" in lines[1]


def test_a_group_is_shown_and_its_removal_is_none_of_full_kv(publisher: Publisher) -> None:
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 128}
    say(publisher, 1, AllBlocksCleared(), STORED)
    say(publisher, 2, BlockStored([1], None, [5, 6], 2, None, "GPU", **window), BlockRemoved([-2], "GPU", 1))
    status, out, err = run(publisher, "--check", "--timeout", "1")
    assert (status, err) == (1, "!!! CHECK FAILED, not seen: a BlockRemoved of blocks that were seen stored\n")
    assert "group 1 sliding_window 128" in out


def test_check_is_content_with_what_comes(publisher: Publisher) -> None:
    def then() -> None:
        for seq, events in enumerate(PROGRAM, 100):
            say(publisher, seq, *events)

    assert run(publisher, "--check", replay=False, then=then)[0] == 0


def test_check_says_what_it_missed(publisher: Publisher) -> None:
    say(publisher, 1, AllBlocksCleared(), BlockStored([1], None, [5, 6], 2, None, "GPU"))
    say(publisher, 2, BlockRemoved([1], "CPU_PINNED"))
    status, _, err = run(publisher, "--check", "--timeout", "1")
    assert status == 1
    assert err == (
        "!!! CHECK FAILED, not seen: a BlockStored of several blocks; a BlockRemoved of blocks that were seen stored\n"
    )


def test_gaps_and_restarts_are_noticed(publisher: Publisher) -> None:
    def then() -> None:
        say(publisher, 5, STORED)
        say(publisher, 8, BlockRemoved([1], "GPU"))
        say(publisher, 20, AllBlocksCleared())

    status, out, err = run(publisher, "--limit", "3", replay=False, then=then)
    assert (status, len(out.splitlines())) == (0, 3)
    assert err.splitlines() == [
        "!!! GAP: 2 numbers are missing: 6..7",
        "!!! RESTART: 11 numbers are missing: 9..19, and everything is cleared",
    ]


@pytest.mark.parametrize("replay", [True, False])
def test_another_life_is_no_loss_though_its_first_batch_was_not_heard(publisher: Publisher, replay: bool) -> None:
    """Whoever was connected to the last one is connected again only when that is over."""
    before, after = 1_796_000_531_552_033, 1_796_000_541_552_023
    publisher.snapshot = Telling

    def then() -> None:
        publisher.append(before, encode_batch(Batch(100.0, [STORED], 0)))
        publisher._ring._lost = after  # in another process the ring is, too
        publisher.append(after + 1, encode_batch(Batch(102.5, [STORED], 0)))

    status, _, err = run(publisher, "--limit", "3" if replay else "2", replay=replay, then=then)
    assert (status, "GAP" in err) == (0, False)
    told = f"!!! RESTART: the numbers leap from {before} to {after + 1}, those of another life"
    if replay:
        assert err.splitlines() == [
            f"{told}, asking for a replay",
            f"!!! SNAPSHOT: of this life all that is cached follows, as of {after + 1}",
        ]
    else:
        assert err.splitlines() == [told]


def test_a_long_absence_is_a_gap_though_many_numbers_are_missing(publisher: Publisher) -> None:
    def then() -> None:
        publisher.append(100, encode_batch(Batch(100.0, [STORED], 0)))
        publisher.append(500_100, encode_batch(Batch(200.0, [STORED], 0)))

    _, _, err = run(publisher, "--limit", "2", replay=False, then=then)
    assert err.splitlines() == ["!!! GAP: 499999 numbers are missing: 101..500099"]


def test_a_gap_that_the_ring_does_not_reach_back_over_is_told_as_a_snapshot(publisher: Publisher) -> None:
    def then() -> None:
        say(publisher, 5, STORED)
        publisher._ring._lost = 7  # as if 6 and 7 had left the ring
        say(publisher, 8, BlockRemoved([1], "GPU"))

    publisher.snapshot = Telling
    status, out, err = run(publisher, "--limit", "3", then=then)
    assert status == 0
    assert [line.split("#")[1].split()[0] for line in out.splitlines()] == ["5", "8", "8"]
    assert err.splitlines() == [
        "!!! GAP: 2 numbers are missing: 6..7, asking for a replay",
        "!!! SNAPSHOT: what is missing can't be had any more; all that is cached follows, as of 8",
    ]


def test_json_is_one_event_a_line(publisher: Publisher) -> None:
    status, out, _ = run(publisher, "--json", "--limit", "1", then=lambda: say(publisher, 7, STORED))
    assert status == 0
    event = json.loads(out)
    assert (event["seq"], event["rank"], event["type"], event["block_hashes"]) == (7, 0, "BlockStored", [1, -2])


def test_raw_is_number_and_payload(publisher: Publisher) -> None:
    _, out, _ = run(publisher, "--raw", "--limit", "1", then=lambda: say(publisher, 7, STORED))
    assert out.split() == ["7", encode_batch(Batch(1.5, [STORED], 0)).hex()]


def test_a_bad_batch_does_not_end_it(publisher: Publisher) -> None:
    def then() -> None:
        publisher.append(1, b"\xc1")
        say(publisher, 2, STORED)

    status, _, err = run(publisher, "--limit", "1", then=then)
    assert status == 0
    assert err.startswith("!!! BAD BATCH #1")


@pytest.mark.parametrize("listed", [True, False])
def test_a_stream_with_keys_is_read_with_keys(tmp_path: Path, listed: bool) -> None:
    (_, secret), (_, reader) = make_keys(tmp_path, "rank"), make_keys(tmp_path / "readers", "router")
    publisher = Publisher(ANY, ANY, topic="kv@", curve=Curve.load(secret, reader.parent if listed else None))
    try:
        for seq, events in enumerate(PROGRAM, 100):
            say(publisher, seq, *events)
        keys = ["--curve-server-key", str(tmp_path / "rank.key")]
        assert run(publisher, "--check", *keys, *(["--curve-key-file", str(reader)] if listed else []))[0] == 0
        status, _, err = run(publisher, "--check", "--timeout", "0.5", *(keys if listed else []))
        assert (status, "CHECK FAILED" in err) == (1, True), "whoever has none, or another, hears nothing"
    finally:
        publisher.close(linger_s=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--curve-key-file", "x"], "say --curve-server-key, too"),
        (["--curve-server-key", "x"], "that is no CURVE key"),
        (["--curve-server-key", "~" * 40], "that is no CURVE key"),
        (["--curve-server-key", "0" * 40, "--curve-key-file", "{folder}/a.key"], "holds a public key alone"),
    ],
)
def test_a_key_that_is_none_is_wrong_usage(
    publisher: Publisher, tmp_path: Path, options: list[str], words: str
) -> None:
    make_keys(tmp_path, "a")
    status, _, err = run(publisher, *(option.format(folder=tmp_path) for option in options))
    assert (status, words in err) == (2, True), err


def test_it_is_standalone() -> None:
    assert "sglcache" not in [
        line.split()[1].split(".")[0]
        for line in (ROOT / "scripts" / "subscribe.py").read_text().splitlines()
        if line.startswith(("import ", "from "))
    ]
