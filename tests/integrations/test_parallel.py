"""The tensor-parallel shape: a scheduler without pages, and two workers with half the heads each."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import tiny
import torch

from sglcache.errors import ConfigError, SglcacheError
from sglcache.integrations.transformers import Request, Runner, settings
from sglcache.integrations.transformers.parallel import ShardedModel, shard_model
from sglcache.testing.daemon import Daemon, until

BOUND = 5e-5  # the shards' parts are added up in another order
NUM_NEW = 6


@pytest.fixture(params=["qwen2", "deepseek_v2", "gemma3"])
def family(request: pytest.FixtureRequest) -> str:
    """Biases; latents and experts; windows."""
    return str(request.param)


@pytest.fixture
def daemon(family: str, tmp_path: Path) -> Iterator[Daemon]:
    config = tiny.build(family).config
    sections = settings(config, page_size=16, num_tokens=384, dtype="float32", num_shards=2)
    if "window" in sections:
        sections["window"]["num_tokens"] = 384
    with Daemon(tmp_path, host={"num_tokens": 1024}, events={"enabled": False}, **sections) as daemon:
        yield daemon


def judge(model: Any, request: Request) -> None:
    want = tiny.without_cache(model, request.tokens.tolist(), len(request.prompt))
    assert request.output == want.argmax(-1).tolist()
    assert request.logits is not None
    torch.testing.assert_close(torch.stack(request.logits), want, atol=BOUND, rtol=0)


def test_two_workers_say_what_the_whole_model_says(family: str, daemon: Daemon, warm: ForkServerContext) -> None:
    """Cold, hit, several at once, loaded back; and when one worker is killed, everything comes back."""
    model = tiny.build(family)
    prompt = tiny.prompt(100)
    with (
        daemon.client(role="scheduler") as scheduler,
        ShardedModel(partial(tiny.build, family), scheduler, warm) as executor,
    ):
        runner = Runner(scheduler, executor, step_tokens=40)

        def say(tokens: list[int]) -> Request:
            request = runner.submit(tokens, max_new_tokens=NUM_NEW, keep_logits=True)
            runner.run()
            return request

        cold, warm = say(prompt), say(prompt)
        assert (cold.matched_tokens, warm.matched_tokens) == (0, 96)
        judge(model, cold)
        judge(model, warm)
        twins = [runner.submit(tiny.prompt(64, 9), max_new_tokens=NUM_NEW, keep_logits=True) for _ in range(2)]
        runner.run()
        for twin in twins:
            judge(model, twin)
        for seed in range(10, 14):
            say(tiny.prompt(120, seed))
        daemon.settle()
        assert scheduler.peek(prompt).device_tokens == 0
        loaded = say(prompt)
        assert (loaded.matched_tokens, loaded.host_tokens) == (96, 96)
        judge(model, loaded)
        assert torch.equal(torch.stack(loaded.logits or []), torch.stack(warm.logits or []))

        runner.submit(tiny.prompt(90, 20))
        runner.step()
        os.kill(executor.pids[1], signal.SIGKILL)
        with pytest.raises(SglcacheError):
            runner.run()
    until(lambda: daemon.status()["gauges"]["num_leases"] == 0 and daemon.pool()["fenced"] == 0)
    assert daemon.pool()["leased"] == 0


def test_shards_that_can_t_be_made_are_refused() -> None:
    model = tiny.build("llama")
    with pytest.raises(ConfigError, match="4 heads can't be divided by 3"):
        shard_model(model, 0, 3)
    model.config.num_attention_heads = 64
    with pytest.raises(ConfigError, match=r"k_proj of \(32, 64\) can't be divided by 64"):
        shard_model(model, 0, 64)
    model.config.base_model_tp_plan = {"layers.*.self_attn.q_proj": "sideways"}
    with pytest.raises(ConfigError, match=r"q_proj\.weight is sharded sideways"):
        shard_model(model, 0, 2)


def test_the_parts_of_experts_make_the_whole() -> None:
    """Both halves of gate and up are cut, each by itself, and down by what comes in."""
    whole, parts = tiny.build("qwen3_moe"), [tiny.build("qwen3_moe") for _ in range(2)]
    for shard, part in enumerate(parts):
        shard_model(part, shard, 2)
    experts = [model.model.layers[1].mlp.experts for model in (whole, *parts)]
    gates, ups = zip(*(each.gate_up_proj.chunk(2, 1) for each in experts), strict=True)
    for all_of_it, *halves in (gates, ups):
        assert torch.equal(torch.cat(halves, 1), all_of_it)
    assert torch.equal(torch.cat([each.down_proj for each in experts[1:]], 2), experts[0].down_proj)
    routers = [model.model.layers[1].mlp.gate.weight for model in (whole, *parts)]
    assert torch.equal(routers[0], routers[1])
