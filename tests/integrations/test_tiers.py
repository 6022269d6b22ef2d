"""The same words from every tier: a device that holds one prompt, a host that holds a few, and a disk.

Prompts share prefixes and take turns, so what each needs comes back from below, and only from there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import tiny
import torch
from judges import judge, logits, say

from sglcache.client import Client
from sglcache.integrations.transformers import PagedModel, Request, Runner, pool_settings
from sglcache.testing.daemon import Daemon

PAGE = 16
FAMILIES = ["llama", "deepseek_v2"]
WAIT_S = 30.0
MANY = 12  # pages
DRAWN = {"temperature": 2.0, "seed": 7}
Serve = Callable[[], Daemon]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def serve(family: str, tmp_path: Path) -> Serve:
    """A daemon; each has the folders of the one before it."""
    pool = pool_settings(tiny.FAMILIES[family]().config, page_size=PAGE, num_tokens=160, dtype="float32")
    storage = {
        "kind": "file",
        "path": str(tmp_path / "store"),
        "prefetch_threshold": 1,
        "prefetch_policy": "wait_complete",
        "store_share": 1.0,
    }
    sections: dict[str, Any] = {"pool": pool, "host": {"num_tokens": 480}, "storage": storage}
    return partial(Daemon, tmp_path / "daemon", events={"enabled": False}, **sections)


def prompts() -> list[list[int]]:
    """Six pages and more each, over two prefixes."""
    return [tiny.prompt(100 + seed, seed, tiny.prompt(48, seed % 2)) for seed in range(4)]


def hit(prompt: list[int]) -> int:
    return (len(prompt) - 1) // PAGE * PAGE


def say_all(runner: Runner, daemon: Daemon) -> list[Request]:
    """One after the other, and each first one drawn as well."""
    said = []
    for prompt in prompts():
        said.append(say(runner, prompt))
        daemon.settle(WAIT_S)
    said.append(say(runner, prompts()[0], **DRAWN))
    daemon.settle(WAIT_S)
    return said


def runner_of(family: str, client: Client) -> Runner:
    return Runner(client, PagedModel(tiny.build(family), client), step_tokens=40)


def came_back(said: list[Request], before: list[Request], model: Any, *, whole: bool) -> None:
    """All words are those of before. `whole`: each prompt but its end was cached, if not on the device."""
    for request, earlier in zip(said, before, strict=True):
        assert request.output == earlier.output
        if request.temperature == 0:
            judge(model, request)
        if whole:
            assert request.matched_tokens == hit(request.prompt.tolist())


def test_words_are_the_same_from_the_host_from_the_disk_and_after_a_restart(family: str, serve: Serve) -> None:
    model = tiny.build(family)
    with serve() as daemon, daemon.client() as client:
        runner = runner_of(family, client)
        cold = say_all(runner, daemon)
        came_back(cold, cold, model, whole=False)
        warm = say_all(runner, daemon)
        came_back(warm, cold, model, whole=True)
        counters = daemon.status()["counters"]
        assert counters["load_pages"] > MANY, "the device is too large for this test"
        assert counters["prefetched_pages"] == 0, "the host holds all of them"
        client.clear()
        from_disk(say_all(runner, daemon), warm, model)
        at_rest(daemon)
    with serve() as daemon, daemon.client() as client:
        from_disk(say_all(runner_of(family, client), daemon), warm, model)
        at_rest(daemon)


def from_disk(said: list[Request], warm: list[Request], model: Any) -> None:
    """What is matched is the same as from the host, and so is the arithmetic: bit for bit, if the bytes are."""
    came_back(said, warm, model, whole=True)
    for request, earlier in zip(said, warm, strict=True):
        assert torch.equal(logits(request), logits(earlier))


def at_rest(daemon: Daemon) -> None:
    """Much has come from the disk, and nothing is in anybody's hands."""
    status = daemon.settle(WAIT_S)
    assert status["counters"]["prefetched_pages"] > MANY
    assert status["violations"] == []
    assert status["gauges"]["num_leases"] == 0
    assert [(pool["leased"], pool["fenced"], pool["locked"]) for pool in status["pools"]] == [(0, 0, 0)] * 2


def test_many_at_once_say_what_each_would_alone_from_a_disk(family: str, serve: Serve) -> None:
    """More requests than the pools hold run together, while what they need is fetched, loaded, evicted and stored."""
    model = tiny.build(family)
    asked = [tiny.prompt(81 + seed, seed, tiny.prompt(32, seed % 3)) for seed in range(14)]
    for _ in range(2):
        with serve() as daemon, daemon.client() as client:
            runner = Runner(client, PagedModel(tiny.build(family), client), step_tokens=64, max_running=3)
            for _ in range(2):
                requests = [runner.submit(prompt, max_new_tokens=4, keep_logits=True) for prompt in asked]
                runner.run()
                for request in requests:
                    judge(model, request)
                daemon.settle(WAIT_S)
            assert all(request.matched_tokens for request in requests)
            at_rest(daemon)
