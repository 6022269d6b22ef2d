"""Runners are processes: they share a daemon at the same time, and are killed in the middle of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import tiny

from sglcache.integrations.transformers import PagedModel, Runner, pool_settings
from sglcache.testing.daemon import Daemon, Puppet, until

NUM_NEW = 6
SEVERAL = 40
MAX_RUNNING = 3  # of a runner
LONG = 400  # new tokens: seconds of decoding

RUNNER = f"""
sys.path.insert(0, {str(Path(__file__).parent)!r})
import tiny
from sglcache.integrations.transformers import PagedModel, Runner
client = Client(socket)
runner = Runner(client, PagedModel(tiny.build(FAMILY, max_position_embeddings=1024), client), max_running={MAX_RUNNING})
def say(prompts, num_new={NUM_NEW}):
    requests = [runner.submit(prompt, max_new_tokens=num_new, keep_logits=True) for prompt in prompts]
    runner.run()
    return [
        [request.matched_tokens, request.output, [row.tolist() for row in request.logits]] for request in requests
    ]
"""


@pytest.fixture(params=["llama", "deepseek_v2"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(family: str) -> Any:
    return tiny.build(family, max_position_embeddings=1024)


@pytest.fixture
def daemon(model: Any, tmp_path: Path) -> Iterator[Daemon]:
    pool = pool_settings(model.config, num_tokens=1600)
    with Daemon(tmp_path, pool=pool, host={"num_tokens": 3200}, events={"enabled": False}) as daemon:
        yield daemon


def begin(daemon: Daemon, family: str) -> Puppet:
    """A runner process that is on its way."""
    puppet = Puppet(daemon.socket)
    puppet.begin(f"FAMILY = {family!r}\n{RUNNER}")
    return puppet


@pytest.mark.timeout(240)  # two more processes import torch
def test_two_runners_at_the_same_time_say_what_each_would_alone(family: str, model: Any, daemon: Daemon) -> None:
    shared = tiny.prompt(96)
    prompts = [tiny.prompt(100 + 7 * seed, seed, shared) for seed in range(6)]
    with begin(daemon, family) as one, begin(daemon, family) as other:
        one.finish()
        other.finish()
        one.begin(f"say({prompts}, {SEVERAL})", "ask")  # both compute the same, in opposite order
        other.begin(f"say({prompts[::-1]}, {SEVERAL})", "ask")
        until(lambda: daemon.status(prove=False)["gauges"]["num_leases"] > MAX_RUNNING)  # both are at it
        answers = [one.finish(), other.finish()[::-1]]
        for first, second, prompt in zip(*answers, prompts, strict=True):
            assert first[1] == second[1]
            want = tiny.without_cache(model, [*prompt, *first[1]], len(prompt))
            assert first[1] == want.argmax(-1).tolist()
        assert sum(matched for answer in answers for matched, *_ in answer) > 0
        again = [each.ask(f"say({prompts[:1]})") for each in (one, other)]
        assert again[0] == again[1], "both read the same pages, bit for bit"
        assert again[0][0][0] == 96
    until(lambda: daemon.status(prove=False)["gauges"]["num_leases"] == 0)
    assert daemon.settle()["violations"] == []


@pytest.mark.timeout(240)
def test_a_runner_that_is_killed_while_it_decodes_leaves_what_it_committed_and_nothing_else(
    family: str, model: Any, daemon: Daemon
) -> None:
    prompt = tiny.prompt(120, seed=3)
    with begin(daemon, family) as victim, daemon.client() as client:
        victim.finish()
        victim.begin(f"say({[prompt]}, {LONG})", "ask")
        until(lambda: client.peek(prompt).device_tokens == 112, 60)  # the prompt is committed: it decodes
        held = daemon.pool()
        assert held["leased"] > 0
        assert held["locked"] == 7
        os.close(victim.kill())
        assert victim.process.wait(30) == -9
        assert victim.process.stdout is not None
        assert victim.process.stdout.read() == "", "it had not finished"
        until(lambda: daemon.pool()["leased"] == 0 and daemon.pool()["fenced"] == 0)
        left = daemon.pool()
        assert (left["cached"], left["locked"]) == (7, 0)
        assert left["free"] == left["total"] - 7
    with begin(daemon, family) as heir, daemon.client() as client:
        runner = Runner(client, PagedModel(model, client))
        want = tiny.greedy(tiny.build(family, max_position_embeddings=1024), prompt, NUM_NEW)
        heir.finish()
        matched, said, logits = heir.ask(f"say({[prompt]})")[0]
        assert (matched, said) == (112, want), "started again, it says the same, from the pages of the one that died"
        request = runner.submit(prompt, max_new_tokens=NUM_NEW, keep_logits=True)
        runner.run()
        assert [row.tolist() for row in request.logits or []] == logits
