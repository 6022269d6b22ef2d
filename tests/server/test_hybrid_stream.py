"""A daemon of a hybrid model tells of full KV; with `events.groups` of windows and states as well, for who asks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglcache.client import Client
from sglcache.client.discovery import discover
from sglcache.client.mirror import Mirror
from sglcache.errors import NoSpace
from sglcache.testing.daemon import Daemon
from sglcache.units import Tier

P = 4  # SMALL's page size
MODEL = {
    "window": {"size": 10, "num_layers": 1, "num_tokens": 40 * P},
    "mamba": {"num_layers": 1, "num_slots": 12, "states": [{"name": "ssm", "shape": [8], "dtype": "float32"}]},
}
HTTP = {"http": {"enabled": True, "port": 0}}
FOLLOWED_S = 20.0


@pytest.fixture(params=[False, True], ids=["full", "groups"])
def daemon(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path, **MODEL, **HTTP, events={"groups": request.param}) as daemon:
        yield daemon


def url(daemon: Daemon) -> str:
    return str(daemon.info["http"])


def drive(client: Client, prompts: list[list[int]], number: int, rng: random.Random) -> None:
    """Prompts that share beginnings, each committed in parts, some with the state at their end."""
    for _ in range(number):
        old = rng.choice(prompts)
        tokens = [*old[: rng.randrange(len(old) + 1)], *(rng.randrange(3) for _ in range(rng.randrange(1, 6 * P)))][
            :120
        ]
        try:
            with client.acquire(tokens, states=1) as lease:
                lease.wait_loaded()
                assert lease.mamba is not None
                done = lease.matched_tokens
                while done < len(tokens) // P * P:
                    done = min(len(tokens) // P * P, done + P * rng.randrange(1, 6))
                    slots = lease.mamba.slots
                    states = [(done, int(slots[0]))] if len(slots) and rng.random() < 0.5 else []
                    lease.commit(done, states=states, floor=max(0, done - 3 * P))
                prompts.append(tokens)
        except NoSpace:
            continue


def test_a_mirror_knows_what_is_of_use_where_groups_are_told_and_full_kv_in_any_case(daemon: Daemon) -> None:
    told = discover(url(daemon)).groups
    rng = random.Random(1)
    prompts: list[list[int]] = [[0]]
    with daemon.client() as client, Mirror.from_server(url(daemon)) as mirror, daemon.observer() as observer:
        cut = 0
        for _ in range(4):
            drive(client, prompts, 60, rng)
            facts = daemon.settle()
            with Mirror.from_server(url(daemon)) as late:
                for each in (mirror, late):
                    assert each.catch_up(facts["stream"]["last_seq"], FOLLOWED_S)
                    digest = observer.digest()
                    assert each.check_digest(digest["seq"], digest["tiers"]) in ([], None)
                    assert each.hashes(Tier.DEVICE) == set(observer.dump("DEVICE").hashes)
                    assert each.hashes(Tier.HOST) == set(observer.dump("HOST").hashes)
                    for tokens in prompts[-30:]:
                        peeked = client.peek(tokens)
                        match = each.longest_match(tokens)[0]
                        if told is None:
                            assert match.reusable is None
                        else:
                            assert match.reusable == peeked.matched_tokens
                        assert match.tokens >= peeked.matched_tokens
                        cut += match.tokens > peeked.matched_tokens
        assert cut > 10, "no estimate was too much, so this says little"


def test_the_server_says_which_groups_it_tells_of(daemon: Daemon) -> None:
    server = discover(url(daemon))
    groups: list[dict[str, Any]] = server.info["groups"]
    if groups:
        assert groups == [
            {"group_idx": 1, "kind": "sliding_window", "window": 10},
            {"group_idx": 2, "kind": "mamba", "window": None},
        ]
        assert server.groups == {1: 10, 2: None}
    else:
        assert server.groups is None
