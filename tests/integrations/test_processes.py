"""Runners are processes: they share a daemon at the same time, and are killed in the middle of it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import tiny
from runners import POSITIONS, RunnerProcess

from sglcache.integrations.transformers import PagedModel, Runner, settings
from sglcache.testing.daemon import Daemon, until

NUM_NEW = 6
SEVERAL = 40
MAX_RUNNING = 3  # of a runner
LONG = 400  # new tokens: seconds of decoding
Begin = Callable[[], RunnerProcess]


@pytest.fixture(params=["llama", "deepseek_v2", "lara_mini"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(family: str) -> Any:
    return tiny.build(family, max_position_embeddings=POSITIONS)


@pytest.fixture
def daemon(model: Any, tmp_path: Path) -> Iterator[Daemon]:
    sections = settings(model.config, num_tokens=1600, num_states=24)
    if "window" in sections:  # for all that both have running: who finds no page, and has nothing to give back, ends
        sections["window"]["num_tokens"] = 1600
    with Daemon(tmp_path, host={"num_tokens": 3200}, events={"enabled": False}, **sections) as daemon:
        yield daemon


@pytest.fixture
def begin(daemon: Daemon, family: str, warm: ForkServerContext) -> Begin:
    """A runner process that is on its way."""
    return partial(RunnerProcess, warm, daemon.socket, family, MAX_RUNNING)


def test_two_runners_at_the_same_time_say_what_each_would_alone(model: Any, daemon: Daemon, begin: Begin) -> None:
    shared = tiny.prompt(96)
    prompts = [tiny.prompt(100 + 7 * seed, seed, shared) for seed in range(6)]
    with begin() as one, begin() as other:
        one.wait()
        other.wait()
        one.begin(prompts, SEVERAL)  # both compute the same, in opposite order
        other.begin(prompts[::-1], SEVERAL)
        until(lambda: daemon.status(prove=False)["gauges"]["num_leases"] > MAX_RUNNING)  # both are at it
        answers = [one.hear(), other.hear()[::-1]]
        for first, second, prompt in zip(*answers, prompts, strict=True):
            assert first[1] == second[1]
            want = tiny.without_cache(model, [*prompt, *first[1]], len(prompt))
            assert first[1] == want.argmax(-1).tolist()
        assert sum(matched for answer in answers for matched, *_ in answer) > 0
        again = [each.say(prompts[:1], NUM_NEW) for each in (one, other)]
        assert again[0] == again[1], "both read the same pages, bit for bit"
        assert again[0][0][0] == 96
    until(lambda: daemon.status(prove=False)["gauges"]["num_leases"] == 0)
    assert daemon.settle()["violations"] == []


def test_a_runner_that_is_killed_while_it_decodes_leaves_what_it_committed_and_nothing_else(
    family: str, model: Any, daemon: Daemon, begin: Begin
) -> None:
    prompt = tiny.prompt(120, seed=3)
    with begin() as victim, daemon.client() as client:
        victim.wait()
        victim.begin([prompt], LONG)
        until(lambda: client.peek(prompt).device_tokens == 112, 60)  # the prompt is committed: it decodes
        held = daemon.pool()
        assert held["leased"] > 0
        assert held["locked"] == 7
        victim.kill()
        assert victim.process.exitcode == -signal.SIGKILL
        with pytest.raises(EOFError):  # it had not finished
            victim.hear()
        until(lambda: all(pool["leased"] == pool["fenced"] == 0 for pool in daemon.status()["pools"]))
        daemon.settle()  # a copy to the host may have locked the prompt, too
        left = daemon.pool()
        assert (left["cached"], left["locked"]) == (7, 0)
        assert left["free"] == left["total"] - 7
    with begin() as heir, daemon.client() as client:
        runner = Runner(client, PagedModel(model, client))
        want = tiny.greedy(tiny.build(family, max_position_embeddings=POSITIONS), prompt, NUM_NEW)
        heir.wait()
        matched, said, logits = heir.say([prompt], NUM_NEW)[0]
        assert (matched, said) == (112, want), "started again, it says the same, from the pages of the one that died"
        request = runner.submit(prompt, max_new_tokens=NUM_NEW, keep_logits=True)
        runner.run()
        assert [row.tolist() for row in request.logits or []] == logits
