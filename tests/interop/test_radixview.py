"""RadixView finds the daemon by itself and draws the tree that the stream tells of.

It keeps one entry for a hash, whatever the rank and the medium: what it draws is the last word that was said of each
hash. On a daemon with the device tier alone that is what the index holds.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from consumers import Drawn, RadixView, eventually
from scene import HEARTBEAT_S, PLAIN, Prompt, Scene, commit, dump

from sglcache.client.mirror import Mirror
from sglcache.testing.daemon import Daemon, until
from sglcache.units import Tier
from sglcache.wire.events import AllBlocksCleared, BlockStored, medium_of

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]

HEARD_S = 40.0


def last_words(facts: list[Any]) -> dict[int, Drawn]:
    """What the last event that names it says of each hash."""
    found: dict[int, Drawn] = {}
    for event in facts:
        if isinstance(event, AllBlocksCleared):
            found.clear()
        elif isinstance(event, BlockStored):
            above = event.parent_block_hash
            for block_hash in event.block_hashes:
                found[block_hash] = Drawn(above, event.block_size, medium_of(event))
                above = block_hash
        else:
            for block_hash in event.block_hashes:
                found.pop(block_hash, None)
    return found


@pytest.mark.parametrize("told", ["device", "device and host", "device and windows"])
def test_the_tree_that_it_draws_is_the_streams(told: str, tmp_path: Path, shim: Path) -> None:
    """Another tier's removal, or another group's, is a block's to it."""
    sections: dict[str, Any] = {"host": {"num_tokens": 4 * 300 if told == "device and host" else 0}}
    if told == "device and windows":
        sections |= {"window": {"size": 8, "num_layers": 1, "num_tokens": 4 * 150}, "events": {"groups": True}}
    scene = Scene(tmp_path / "daemon", http={"enabled": True, "port": 0}, **sections)
    with ExitStack() as opened:
        opened.callback(scene.close)
        daemon = scene.start()
        stream = daemon.info["stream"]
        mirror = opened.enter_context(Mirror(stream["endpoint"], stream["replay_endpoint"]))
        view = opened.enter_context(RadixView(tmp_path, shim, daemon.info["http"]))
        until(lambda: daemon.status(prove=False)["stream"]["subscriptions"] == 2)
        scene.drive(150)
        facts: list[Any] = []
        last = daemon.status(prove=False)["stream"]["last_seq"]
        while mirror.state.next_seq is None or mirror.state.next_seq <= last:
            facts += [fact.event for fact in mirror.step(HEARTBEAT_S)]
        want = last_words(facts)
        eventually(lambda: view.drawn() == want, HEARD_S)
        assert view.drawn() == want
        truth = scene.blocks()
        if told == "device and host":
            assert truth.get(Tier.HOST)
        else:
            assert (set(want) == truth[Tier.DEVICE]) is (told == "device")
        for complaint in ("malformed", "gap", "restarted"):
            assert complaint not in view.said()


def test_it_finds_every_rank_by_its_port(tmp_path: Path, shim: Path) -> None:
    """Rank r's stream is at the base plus r, as `/server_info` says; prompts that are on one rank only are drawn."""
    base = neighbouring_ports(4)
    events = {"endpoint": f"tcp://127.0.0.1:{base}", "replay_endpoint": f"tcp://127.0.0.1:{base + 2}"}
    with ExitStack() as opened:
        daemon = opened.enter_context(
            Daemon(
                tmp_path / "daemon", dp_size=2, host={"num_tokens": 0}, http={"enabled": True, "port": 0}, events=events
            )
        )
        view = opened.enter_context(RadixView(tmp_path, shim, daemon.info["http"], num_ranks=2))
        for rank in daemon.ranks:
            until(lambda rank=rank: rank.status(prove=False)["stream"]["subscriptions"] == 1)
            with rank.client() as client:
                commit(client, Prompt(list(range(1000 * rank.offset, 1000 * rank.offset + 400)), PLAIN))
        held: list[set[int]] = []
        for rank in daemon.ranks:
            with rank.observer() as observer:
                held.append(dump(observer, Tier.DEVICE))
        assert held[0]
        assert held[1]
        assert not held[0] & held[1]
        eventually(lambda: set(view.drawn()) == held[0] | held[1], HEARD_S)
        assert set(view.drawn()) == held[0] | held[1]


def neighbouring_ports(count: int) -> int:
    """The first of so many that nobody has just now."""
    while True:
        with ExitStack() as taken:
            first = taken.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            base: int = first.getsockname()[1]
            try:
                for port in range(base + 1, base + count):
                    taken.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except (OSError, OverflowError):
                continue
            return base
