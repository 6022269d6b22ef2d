"""A rank that is killed under a runner: it joins the next life, computes again, and says the same words."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import tiny

from sglcache.errors import DaemonRestarted, Unavailable
from sglcache.integrations.transformers import PagedModel, Runner, settings
from sglcache.integrations.transformers.parallel import ShardedModel
from sglcache.testing.daemon import Daemon

NUM_NEW = 8
QUICK = {"first_wait": 0.01, "longest_wait": 0.01}
Answers = list[tuple[list[int], int]]


@pytest.fixture(params=["llama", "lara_mini"])
def family(request: pytest.FixtureRequest) -> str:
    """Full attention alone; and with windows and states."""
    return str(request.param)


@pytest.fixture
def daemon(family: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Daemon]:
    num_shards = getattr(request.node.function, "num_shards", 1)
    sections = settings(
        tiny.build(family).config,
        page_size=16,
        num_tokens=640,
        dtype="float32",
        num_shards=num_shards,
        **({"interval": 32, "num_states": 16} if family == "lara_mini" else {}),
    )
    if "window" in sections:
        sections["window"]["num_tokens"] = 640
    with Daemon(tmp_path, timing=QUICK, host={"num_tokens": 1024}, events={"enabled": False}, **sections) as daemon:
        yield daemon


def requests(runner: Runner) -> list[Any]:
    """A prompt in many chunks, two alike, one that is drawn."""
    first = tiny.prompt(90)
    return [
        runner.submit(first, max_new_tokens=NUM_NEW),
        runner.submit(first[:50], max_new_tokens=NUM_NEW),
        runner.submit(tiny.prompt(40, 3), max_new_tokens=NUM_NEW, temperature=0.7, seed=5),
    ]


def undisturbed(family: str, daemon: Daemon) -> list[list[int]]:
    with daemon.client() as client:
        runner = Runner(client, PagedModel(tiny.build(family), client), step_tokens=40)
        asked = requests(runner)
        runner.run()
        daemon.settle()
        return [each.output for each in asked]


def kill(daemon: Daemon) -> None:
    daemon.next_life(daemon.kill_rank())


def test_a_runner_says_the_same_words_whenever_its_rank_dies(family: str, daemon: Daemon) -> None:
    """In the midst of a prompt, of an answer, at the end, and twice."""
    want = undisturbed(family, daemon)
    with daemon.client() as client:
        runner = Runner(client, PagedModel(tiny.build(family), client), step_tokens=40)
        for deaths in ([1], [2, 7]):
            daemon.settle()  # copies that are under way hold a clear
            with daemon.admin() as admin:
                admin.clear()
            before, asked, finished = runner.num_steps, requests(runner), []
            while not runner.idle:
                if runner.num_steps - before in deaths:
                    deaths.remove(runner.num_steps - before)
                    kill(daemon)
                finished += runner.step()
            runner.settle()
            assert [each.output for each in asked] == want, deaths
            assert set(finished) == set(asked)
            assert len(finished) == len(asked), "each is finished once"
        kill(daemon)
        again = requests(runner)
        runner.run()
        assert client.epoch == daemon.epoch
        daemon.settle()
        hit = runner.submit(again[0].prompt, max_new_tokens=NUM_NEW)
        runner.run()
        assert hit.matched_tokens >= 64, "and it caches as ever"
        assert hit.output == want[0]
        runner.close()
    status = daemon.settle()
    assert status["gauges"]["num_leases"] == 0
    assert {(pool["leased"], pool["fenced"], pool["locked"]) for pool in status["pools"]} == {(0, 0, 0)}


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_a_runner_without_a_daemon_says_so_and_goes_on_when_there_is_one(family: str, daemon: Daemon) -> None:
    want = undisturbed(family, daemon)
    with daemon.client() as client:
        runner = Runner(client, PagedModel(tiny.build(family), client), step_tokens=40, reattach_s=0.02)
        with daemon.admin() as admin:
            admin.clear()
        asked = requests(runner)
        runner.step()
        daemon.kill_rank()
        with pytest.raises(Unavailable) as caught:
            runner.run()
        assert not isinstance(caught.value, DaemonRestarted)
        assert not runner.idle, "all of it is queued"
        runner.reattach_s = 60.0
        runner.run()
        assert [each.output for each in asked] == want
    daemon.settle()


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_workers_and_their_scheduler_come_back_together(family: str, daemon: Daemon, warm: ForkServerContext) -> None:
    with (
        daemon.client(role="scheduler") as scheduler,
        ShardedModel(partial(tiny.build, family), scheduler, warm) as executor,
    ):
        runner = Runner(scheduler, executor, step_tokens=40)
        asked = requests(runner)
        runner.run()
        want = [each.output for each in asked]
        for steps in (1, 4):
            kill(daemon)
            asked = requests(runner)
            for _ in range(steps):
                runner.step()
            kill(daemon)
            runner.run()
            assert [each.output for each in asked] == want
        asked = requests(runner)  # what is on the host again may have had the last of them done before the last kill
        runner.run()
        assert [each.output for each in asked] == want
        assert scheduler.epoch == daemon.epoch
    assert daemon.settle()["gauges"]["num_leases"] == 0


test_workers_and_their_scheduler_come_back_together.num_shards = 2  # type: ignore[attr-defined]
