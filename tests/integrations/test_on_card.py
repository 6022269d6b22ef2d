"""The same words on a card: real models, with the daemon's pages in its memory. `pytest -m gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import tiny
import torch
from judges import logits, say

from sglcache.integrations.transformers import PagedModel, Request, Runner, pool_settings
from sglcache.testing.daemon import Daemon

pytestmark = pytest.mark.gpu

FAMILIES = ("llama", "qwen2", "deepseek_v2")
BOUND = 2e-3  # of float32 logits whose largest are about 10, of a card against a processor


@pytest.fixture(params=["fd", "ipc"])
def export(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    if not torch.cuda.is_available():
        pytest.fail("torch sees no card here; run this where there is one, with torch's CUDA build")
    return str(request.param)


@pytest.fixture
def daemon(family: str, export: str, tmp_path: Path) -> Iterator[Daemon]:
    pool = pool_settings(tiny.build(family).config, page_size=16, num_tokens=384, dtype="float32")
    pool |= {"device": "cuda", "untried": True, "export": export}
    with Daemon(tmp_path / "daemon", pool=pool, host={"num_tokens": 1024}, events={"enabled": False}) as daemon:
        yield daemon


def judge(model: Any, request: Request) -> None:
    want = tiny.without_cache(model, request.tokens.tolist(), len(request.prompt))
    assert request.output == want.argmax(-1).tolist()
    torch.testing.assert_close(logits(request), want, atol=BOUND, rtol=0)


def test_it_says_the_same_words_cold_warm_and_loaded_back(family: str, daemon: Daemon) -> None:
    model, first = tiny.build(family), tiny.prompt(100)
    second = tiny.prompt(90, seed=1, prefix=first[:70])
    with daemon.client() as client:
        runner = Runner(client, PagedModel(tiny.build(family).to("cuda"), client), step_tokens=40)
        assert client.pools[0].pages.is_cuda
        cold = say(runner, first)
        assert cold.matched_tokens == 0
        judge(model, cold)
        warm = say(runner, first)
        assert (warm.matched_tokens, warm.host_tokens) == (96, 0)
        judge(model, warm)
        shared = say(runner, second)
        assert shared.matched_tokens == 64
        judge(model, shared)
        daemon.settle()
        client.clear("device")
        loaded = say(runner, first)
        assert (loaded.matched_tokens, loaded.host_tokens) == (96, 96)
        judge(model, loaded)
        torch.testing.assert_close(logits(loaded), logits(warm), atol=BOUND, rtol=0)


def test_a_daemon_that_dies_lets_the_stream_go_on_and_its_next_life_has_what_was_on_the_host(
    family: str, daemon: Daemon
) -> None:
    model, prompt = tiny.build(family), tiny.prompt(100)
    with daemon.client() as client:
        runner = Runner(client, PagedModel(tiny.build(family).to("cuda"), client), step_tokens=40)
        judge(model, say(runner, prompt))
        daemon.settle()
        daemon.kill_rank()
        again = say(runner, prompt)
        assert again.host_tokens == 96
        judge(model, again)
