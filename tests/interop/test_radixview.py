"""RadixView finds the daemon by itself and draws the tree that the stream tells of.

It keeps one entry for a hash, whatever the rank and the medium: what it draws is the last word that was said of each
hash. On a daemon with the device tier alone that is what the index holds.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from consumers import Drawn, RadixView, eventually
from scene import HEARTBEAT_S, Scene

from sglcache.client.mirror import Mirror
from sglcache.testing.daemon import until
from sglcache.units import Tier
from sglcache.wire.events import AllBlocksCleared, BlockStored, medium_of

pytestmark = [pytest.mark.interop, pytest.mark.timeout(120)]

HEARD_S = 20.0


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


@pytest.mark.parametrize("tiers", ["device", "device and host"])
def test_the_tree_that_it_draws_is_the_streams(tiers: str, tmp_path: Path, shim: Path) -> None:
    host = {"num_tokens": 0 if tiers == "device" else 4 * 300}
    scene = Scene(tmp_path / "daemon", http={"enabled": True, "port": 0}, host=host)
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
        assert truth.get(Tier.HOST) if tiers != "device" else set(want) == truth[Tier.DEVICE]
        for complaint in ("malformed", "gap", "restarted"):
            assert complaint not in view.said()
