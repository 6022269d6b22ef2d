"""`sglcache events`: what of the stream is shown, and how; on facts, and on a real daemon's stream."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click
import pytest

from sglcache import cli
from sglcache.client.mirror import Fact
from sglcache.commands import events
from sglcache.testing.daemon import Daemon, until
from sglcache.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event


def stored(hashes: list[int], parent: int | None, tokens: list[int], medium: str | None = None) -> BlockStored:
    return BlockStored(hashes, parent, list(tokens), 2, None, medium)


def kept(facts: list[Event], **choice: object) -> list[Event]:
    told = events.chosen((Fact(9, 0, each) for each in facts), choice.get("medium"), choice.get("prefix"))  # type: ignore[arg-type]
    return [fact.event for fact in told]


ROOT = stored([1, 2], None, [5, 6, 7, 8])
CHILD = stored([3], 2, [9, 9])
OTHER = stored([4], None, [5, 0])


def test_a_tier_is_of_its_events_and_a_clear_is_of_all() -> None:
    host = stored([1], None, [5, 6], "CPU_PINNED")
    facts = [ROOT, host, BlockRemoved([1]), BlockRemoved([1], "CPU_PINNED"), AllBlocksCleared()]
    assert kept(facts, medium="GPU") == [ROOT, BlockRemoved([1]), AllBlocksCleared()]
    assert kept(facts, medium="CPU_PINNED") == [host, BlockRemoved([1], "CPU_PINNED"), AllBlocksCleared()]


@pytest.mark.parametrize(
    ("prefix", "blocks"),
    [
        ((5,), [[1, 2], [3], [4], [1, 4]]),
        ((5, 6), [[1, 2], [3], [1]]),
        ((5, 6, 7), [[1, 2], [3], [1]]),
        ((5, 6, 7, 8, 9, 9, 1), [[1, 2], [3], [1]]),
        ((5, 6, 0), [[1], [1]]),
        ((6,), []),
    ],
)
def test_a_prefix_is_of_the_blocks_along_it_and_of_those_beyond(
    prefix: tuple[int, ...], blocks: list[list[int]]
) -> None:
    told = kept([ROOT, CHILD, OTHER, BlockRemoved([7, 1, 4])], prefix=prefix)
    assert [each.block_hashes for each in told if not isinstance(each, AllBlocksCleared)] == blocks
    assert all(len(each.token_ids) == 2 * len(each.block_hashes) for each in told if isinstance(each, BlockStored))


def test_a_line_for_people_says_what_where_and_after_what() -> None:
    line = events.in_words(Fact(12, 1, ROOT))
    assert line.startswith("#12  rank 1  stored    device ")
    assert "2 blocks  0000000000000001..0000000000000002  after the root  tokens 5,6,7,8" in line
    assert "removed   host  " in events.in_words(Fact(1, 0, BlockRemoved([1], "CPU_PINNED")))
    assert "cleared" in events.in_words(Fact(1, 0, AllBlocksCleared()))


def test_tiers_and_tokens_are_known_by_their_names() -> None:
    assert [events.tier_name(name) for name in ("device", "GPU", "host", "CPU_PINNED", "disk")] == [
        "GPU", "GPU", "CPU_PINNED", "CPU_PINNED", "DISK",
    ]  # fmt: skip
    assert events.prefix_tokens("[1, 2,3]") == (1, 2, 3)
    for wrong in ("1,,2", "a", "-1"):
        with pytest.raises(click.BadParameter, match="commas between"):
            events.prefix_tokens(wrong)
    with pytest.raises(click.BadParameter, match="device, host, disk"):
        events.tier_name("tape")


def run(daemon: Daemon, capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["events", "--socket", str(daemon.socket), "--json", *map(str, arguments)])
    told = capsys.readouterr()
    assert ended.value.code == 0, told.err
    return [json.loads(line) for line in told.out.splitlines()]


def test_it_begins_now_or_with_all_that_is_cached_or_with_a_batch(
    lend: Callable[..., Daemon], capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = lend(host={"num_tokens": 0})
    with daemon.client() as client:
        with client.acquire(range(12)) as lease:
            lease.commit()
        until(lambda: client.digest()["tiers"]["DEVICE"][0] == 3)  # told of, in a batch of its own
        first = client.digest()["seq"] + 1
        with client.acquire(range(100, 112)) as lease:
            lease.commit()
        until(lambda: client.digest()["tiers"]["DEVICE"][0] == 6)
        assert run(daemon, capsys, "--for", 0.5) == []
        told = run(daemon, capsys, "--replay", "--count", 3)
        assert [each["type"] for each in told] == ["AllBlocksCleared", "BlockStored", "BlockStored"]
        assert {tuple(each["token_ids"]) for each in told[1:]} == {tuple(range(12)), tuple(range(100, 112))}
        [since] = run(daemon, capsys, "--since", first, "--count", 1)
        assert (since["type"], since["token_ids"]) == ("BlockStored", list(range(100, 112)))
        [_, along] = run(daemon, capsys, "--prefix", "100,101,102,103,104", "--count", 2)
        assert along["token_ids"] == list(range(100, 112))
