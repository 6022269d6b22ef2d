"""A hybrid's windows and states on the stream: who knows groups is not disturbed by them, and knows full KV as ever."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from indexed import LEAST, NAMES, PAGE, Rig
from scene import Prompt, askable

from sglcache.client import Client
from sglcache.client.mirror import Mirror
from sglcache.errors import NoSpace
from sglcache.units import Tier
from sglcache.wire.events import BlockRemoved, BlockStored

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]

TIERS = (Tier.DEVICE, Tier.HOST)
MODEL: dict[str, Any] = {
    "window": {"size": 3 * PAGE, "num_layers": 1, "num_tokens": 3 << 10, "host_tokens": 4 << 10},
    "mamba": {
        "num_layers": 1,
        "num_slots": 40,
        "host_slots": 60,
        "states": [{"name": "ssm", "shape": [8], "dtype": "float32"}],
    },
}


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def serve(client: Client, prompt: Prompt, rng: random.Random) -> None:
    """As a runner does that commits a state now and then."""
    try:
        with client.acquire(prompt.tokens, states=1, **prompt.names) as lease:
            lease.wait_loaded()
            assert lease.mamba is not None
            done, end = lease.matched_tokens, len(prompt.tokens) // PAGE * PAGE
            while done < end:
                done = min(end, done + PAGE * rng.randint(2, 12))
                slots = lease.mamba.slots
                states = [(done, int(slots[0]))] if len(slots) and rng.random() < 0.3 else []
                lease.commit(done, states=states, floor=max(0, done - 4 * PAGE))
    except NoSpace:
        pass


@pytest.mark.parametrize("encoding", ["map", "superset"])
def test_dynamos_indexer_leaves_windows_and_states_out(
    encoding: str, tmp_path: Path, shim: Path, opened: ExitStack
) -> None:
    rig = Rig(tmp_path, shim, opened, events={"encoding": encoding, "groups": True}, **MODEL)
    stream = rig.daemon.info["stream"]
    groups = opened.enter_context(Mirror(stream["endpoint"], stream["replay_endpoint"], groups={1: 3 * PAGE, 2: None}))
    rng = random.Random(1)
    client = opened.enter_context(rig.daemon.client())
    wrong = 0
    for _ in range(4):
        for _ in range(80):
            old = rng.choice(rig.prompts).tokens if rig.prompts and rng.random() < 0.6 else []
            tokens = [*old[: rng.randint(0, len(old))], *(rng.randrange(1000) for _ in range(rng.randint(8, 300)))]
            rig.prompts.append(Prompt(tokens, rng.choice(NAMES)))
            serve(client, rig.prompts[-1], rng)
        rig.settle()  # block by block the indexer has full KV, in both tiers, and nothing else
        assert groups.catch_up(rig.daemon.status()["stream"]["last_seq"], 20.0)
        for prompt in askable(rig.prompts[-80:], PAGE, rng):
            names = {"lora_name": prompt.names.get("lora"), "cache_salt": prompt.names.get("cache_salt")}
            match = groups.longest_match(prompt.tokens, **names)[0]
            (reached, _) = rig.ask(prompt)
            assert match.tokens == reached.matched
            assert match.reusable == client.peek(prompt.tokens, **prompt.names).matched_tokens
            wrong += match.reusable != match.tokens
    assert wrong >= LEAST, f"{wrong} promises were too much: too few to say anything"
    told = Counter(
        (type(event), event.group_idx, event.medium)
        for _, _, event in rig.facts
        if isinstance(event, BlockStored | BlockRemoved)
    )
    kinds = [(what, group, tier.medium) for what in (BlockStored, BlockRemoved) for group in (1, 2) for tier in TIERS]
    rare = {kind: told[kind] for kind in kinds if told[kind] < LEAST}
    assert not rare, f"too rare to say anything: {rare}, of {told}"
