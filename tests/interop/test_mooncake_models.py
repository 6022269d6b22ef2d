"""Runners of real models on two daemons that share Mooncake's store: what the one read, the other need not compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import tiny
import torch
from judges import judge, logits, say
from mooncakes import WAIT_S, Master, serve

from sglcache.integrations.transformers import PagedModel, Request, Runner, pool_settings
from sglcache.testing.daemon import Daemon

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]

PAGE = 16


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_a_second_daemon_says_the_same_words_from_the_pages_of_the_first(
    family: str, tmp_path: Path, shim: Path, master: Master
) -> None:
    """Greedy and drawn. Its own pools hold a prompt or two, so it fetches each time; and so does the first one then."""
    model = tiny.build(family)
    pool = pool_settings(model.config, page_size=PAGE, num_tokens=160, dtype="float32")
    form: dict[str, Any] = {"pool": pool, "host": {"num_tokens": 240}, "events": {"enabled": False}}
    prompts = [tiny.prompt(100 + seed, seed, tiny.prompt(48, seed % 2)) for seed in range(4)]

    def say_all(daemon: Daemon, **sampling: Any) -> list[Request]:
        with daemon.client() as client:
            runner = Runner(client, PagedModel(tiny.build(family), client), step_tokens=40)
            said = []
            for prompt in prompts:
                said.append(say(runner, prompt, **sampling))
                daemon.settle(WAIT_S)
            return said

    def same(said: list[Request], before: list[Request]) -> None:
        for request, earlier in zip(said, before, strict=True):
            assert request.output == earlier.output
            assert request.matched_tokens == (len(request.prompt) - 1) // PAGE * PAGE

    words, drawn = {"prefetch_policy": "wait_complete", "store_share": 1.0}, {"temperature": 2.0, "seed": 7}
    with (
        serve(tmp_path / "first", master, shim, words, **form) as first,
        serve(tmp_path / "second", master, shim, words, **form) as second,
    ):
        cold = say_all(first)
        others = say_all(second)
        same(others, cold)
        own = say_all(first)
        same(own, cold)
        for request, other in zip(own, others, strict=True):
            judge(model, request)
            assert torch.equal(logits(request), logits(other))
        same(say_all(second, **drawn), say_all(first, **drawn))
        for daemon in (first, second):
            status = daemon.settle(WAIT_S)
            assert status["violations"] == []
            assert status["counters"]["prefetched_pages"] > 12
            assert [(each["leased"], each["fenced"], each["locked"]) for each in status["pools"]] == [(0, 0, 0)] * 2
        assert second.status()["third"]["stored_pages"] == 0
