"""A cache is right when a model that uses it says the same words: real models of transformers over a real daemon.

Three judges, from strict to wide. *Bitwise*: where the model does the same arithmetic, what it read from pages gives
the very logits that transformers' own cache gives (one request at a time, in the same chunks). *BOUND*: elsewhere
(several requests in one matrix, another chunking) logits differ from those of the model without any cache by rounding
alone. *Words*: greedy tokens are identical, always.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import tiny
import torch
from torch import Tensor

from sglcache.errors import ConfigError, NoSpace, TransferError
from sglcache.integrations.transformers import PagedModel, Part, Request, Runner, pool_settings
from sglcache.testing.daemon import Daemon, Puppet, until

BOUND = 2e-5  # of float32 logits whose largest are about 10
NUM_NEW = 6
FAMILIES = list(tiny.FAMILIES)
Serve = Callable[[str, int], Daemon]
Daemons = dict[tuple[tuple[str, int | str], ...], Daemon]  # by their pool's settings


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """Untouched, for reference."""
    return {family: tiny.build(family) for family in FAMILIES}


@pytest.fixture(scope="module")
def daemons() -> Iterator[Daemons]:
    found: Daemons = {}
    yield found
    for daemon in found.values():
        daemon.process.terminate()
    for daemon in found.values():
        assert daemon.process.wait(60) == 0, daemon.said()


@pytest.fixture
def serve(models: dict[str, Any], daemons: Daemons, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """An empty daemon with room for 384 tokens, and for 1,024 on the host."""

    def start(family: str, page_size: int) -> Daemon:
        pool = pool_settings(models[family].config, page_size=page_size, num_tokens=384, dtype="float32")
        kind = tuple(pool.items())
        if kind not in daemons:
            folder = tmp_path_factory.mktemp("daemon")
            daemons[kind] = Daemon(folder, pool=pool, host={"num_tokens": 1024}, events={"enabled": False})
        daemon = daemons[kind]
        daemon.settle()
        with daemon.observer() as observer:
            observer.clear()
        return daemon

    return start


def say(runner: Runner, prompt: list[int], **arguments: Any) -> Request:
    request = runner.submit(prompt, max_new_tokens=NUM_NEW, keep_logits=True, **arguments)
    runner.run()
    return request


def logits(request: Request) -> Tensor:
    assert request.logits is not None
    return torch.stack(request.logits)


def judge(model: Any, request: Request) -> None:
    """Its words are the model's own, and its logits are within BOUND of the model's without a cache."""
    want = tiny.without_cache(model, request.tokens.tolist(), len(request.prompt))
    assert request.output == want.argmax(-1).tolist()
    torch.testing.assert_close(logits(request), want, atol=BOUND, rtol=0)


def host_only(daemon: Daemon, runner: Runner, prompt: list[int]) -> None:
    """Other prompts push this one out of the device, for real."""
    daemon.settle()
    with daemon.observer() as observer:
        for seed in range(100, 110):
            if observer.peek(prompt).device_tokens == 0:
                return
            say(runner, tiny.prompt(120, seed))
            daemon.settle()
    raise AssertionError("it is still there")


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_says_the_same_words_cold_warm_loaded_back_and_evicted(
    family: str, page_size: int, models: dict[str, Any], serve: Serve
) -> None:
    model, daemon = models[family], serve(family, page_size)
    first = tiny.prompt(100)
    second = tiny.prompt(90, seed=1, prefix=first[:70])
    with daemon.client() as client:
        runner = Runner(client, PagedModel(tiny.build(family), client), step_tokens=40)
        cold = say(runner, first)
        assert (cold.matched_tokens, runner.num_steps) == (0, 3 + NUM_NEW - 1)
        judge(model, cold)
        chunks = [(0, 40), (40, 80), (80, 100)]
        assert torch.equal(logits(cold), tiny.with_own_cache(model, cold.tokens, 100, chunks))

        warm = say(runner, first)
        hit = 99 // page_size * page_size
        assert (warm.matched_tokens, warm.host_tokens) == (hit, 0)
        judge(model, warm)
        # With pages of one token the last one of the prompt is cached too: computed anew, it is a duplicate.
        want = tiny.with_own_cache(model, warm.tokens, 100, chunks, hit, canonical=page_size == 1)
        assert torch.equal(logits(warm), want)

        shared = say(runner, second)
        assert shared.matched_tokens == 70 // page_size * page_size
        judge(model, shared)

        host_only(daemon, runner, first)
        loaded = say(runner, first)
        assert (loaded.matched_tokens, loaded.host_tokens) == (hit, hit)
        judge(model, loaded)
        assert torch.equal(logits(loaded), tiny.with_own_cache(model, loaded.tokens, 100, chunks, hit))
        if page_size > 1:
            assert torch.equal(logits(loaded), logits(warm)), "the bytes that come back are the bytes that went"

        daemon.settle()
        client.clear("host")
        client.clear("device")
        again = say(runner, first)
        assert again.matched_tokens == 0
        assert torch.equal(logits(again), logits(cold))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_many_at_once_say_what_each_would_alone(
    family: str, page_size: int, models: dict[str, Any], serve: Serve
) -> None:
    daemon = serve(family, page_size)
    base = tiny.prompt(50)
    prompts = [tiny.prompt(55 + 5 * seed, seed, base) for seed in range(1, 6)]
    prompts += [prompts[0], prompts[0][:51]]
    with daemon.client() as client:
        runner = Runner(client, PagedModel(tiny.build(family), client), step_tokens=64, max_running=3)
        requests = [runner.submit(each, max_new_tokens=NUM_NEW, keep_logits=True) for each in prompts]
        runner.run()
        for request in requests:
            judge(models[family], request)
        assert any(request.matched_tokens for request in requests)
    assert daemon.settle()["gauges"]["num_leases"] == 0


def test_two_that_compute_the_same_end_up_on_the_same_pages(models: dict[str, Any], serve: Serve) -> None:
    daemon, prompt = serve("llama", 16), tiny.prompt(64)
    with daemon.client() as client:
        runner = Runner(client, PagedModel(tiny.build("llama"), client))
        twins = [runner.submit(prompt, max_new_tokens=NUM_NEW, keep_logits=True) for _ in range(2)]
        runner.step()
        assert set(twins[0].pages).isdisjoint(twins[1].pages)
        runner.settle()
        assert twins[0].pages[:4] == twins[1].pages[:4], "the second was sent to the pages of the first"
        assert (twins[0].num_duplicates, twins[1].num_duplicates) == (0, 4)
        runner.run()
        for twin in twins:
            judge(models["llama"], twin)


def test_sampling_is_a_matter_of_the_seed_alone(models: dict[str, Any], serve: Serve) -> None:
    daemon, prompt = serve("llama", 16), tiny.prompt(40)
    with daemon.client() as client:
        runner = Runner(client, PagedModel(tiny.build("llama"), client))
        cold, warm = (say(runner, prompt, temperature=2.0, seed=7) for _ in range(2))
        other = say(runner, prompt, temperature=2.0, seed=8)
    want = tiny.without_cache(models["llama"], cold.tokens.tolist(), 40)
    torch.testing.assert_close(logits(cold), want, atol=BOUND, rtol=0)
    generator = torch.Generator().manual_seed(7)
    drawn = [int(torch.multinomial(torch.softmax(row.double() / 2.0, 0), 1, generator=generator)) for row in want]
    assert cold.output == warm.output == drawn
    assert warm.matched_tokens == 32
    assert other.output != cold.output


def test_a_stop_token_ends_it_and_namespaces_share_nothing(serve: Serve) -> None:
    daemon, prompt = serve("llama", 16), tiny.prompt(40)
    with daemon.client() as client:
        runner = Runner(client, PagedModel(tiny.build("llama"), client))
        whole = say(runner, prompt)
        short = say(runner, prompt, stop=[whole.output[2]], cache_salt="another")
        assert short.matched_tokens == 0
        assert short.output == whole.output[:3]
        # The answer is cached too: a conversation goes on where it was.
        further = say(runner, [*whole.tokens, *tiny.prompt(10)])
        assert further.matched_tokens == (40 + NUM_NEW - 1) // 16 * 16


def test_loads_are_waited_for_layer_by_layer(serve: Serve) -> None:
    daemon, prompt = serve("llama", 16), tiny.prompt(100)
    with daemon.client() as client:
        model = PagedModel(tiny.build("llama"), client)
        runner = Runner(client, model)
        say(runner, prompt)
        host_only(daemon, runner, prompt)
        seen: list[tuple[tuple[int, int], int | None]] = []
        wait = client.wait_loaded

        def watch(load: tuple[int, int], layer: int | None = None) -> None:
            seen.append((load, layer))
            wait(load, layer)

        client.wait_loaded = watch  # type: ignore[method-assign]
        request = say(runner, prompt)
    assert request.host_tokens == 96
    assert [layer for _, layer in seen] == [0, 1], "in each layer of the first step, and never again"


class FailingLoad:
    """An executor whose first load fails."""

    def __init__(self, inner: PagedModel) -> None:
        self.inner = inner
        self.failed = 0

    def run(self, parts: list[Part]) -> Tensor:
        if not self.failed and any(part.load for part in parts):
            self.failed += 1
            raise TransferError("planted")
        return self.inner.run(parts)

    def record(self, tickets: list[int]) -> None:
        self.inner.record(tickets)


def test_a_failed_load_starts_the_request_over(models: dict[str, Any], serve: Serve) -> None:
    daemon, prompt = serve("llama", 16), tiny.prompt(100)
    with daemon.client() as client:
        executor = FailingLoad(PagedModel(tiny.build("llama"), client))
        runner = Runner(client, executor)  # type: ignore[arg-type]
        say(runner, prompt)
        host_only(daemon, runner, prompt)
        beside = runner.submit(tiny.prompt(60, seed=5), max_new_tokens=NUM_NEW, keep_logits=True)
        request = say(runner, prompt)
        assert executor.failed == 1
        judge(models["llama"], request)
        judge(models["llama"], beside)


def test_what_does_not_fit_waits_for_what_runs(models: dict[str, Any], serve: Serve) -> None:
    daemon = serve("llama", 16)
    with daemon.client() as client:
        runner = Runner(client, PagedModel(tiny.build("llama"), client))
        requests = [
            runner.submit(tiny.prompt(150, seed), max_new_tokens=NUM_NEW, keep_logits=True) for seed in range(4)
        ]
        runner.run()
        for request in requests:
            judge(models["llama"], request)
        too_long = runner.submit(tiny.prompt(400), max_new_tokens=NUM_NEW)
        with pytest.raises(NoSpace):
            runner.run()
        runner.close()
        assert not too_long.done
        assert runner.idle


def test_closing_gives_everything_back(serve: Serve) -> None:
    daemon = serve("llama", 16)
    with daemon.client() as client:
        runner = Runner(client, PagedModel(tiny.build("llama"), client))
        runner.submit(tiny.prompt(64))
        runner.step()
        runner.close()
        assert daemon.settle()["gauges"]["num_leases"] == 0
        assert client.peek(tiny.prompt(64)).device_tokens == 64, "what was committed stays"


ANOTHER = f"""
sys.path.insert(0, {str(Path(__file__).parent)!r})
import tiny
from sglcache.integrations.transformers import PagedModel, Runner
client = Client(socket)
runner = Runner(client, PagedModel(tiny.build("llama"), client))
def say(prompt, steps=None):
    request = runner.submit(prompt, max_new_tokens={NUM_NEW}, keep_logits=True)
    if steps is not None:
        for _ in range(steps):
            runner.step()
        return
    runner.run()
    return request.matched_tokens, request.host_tokens, request.output, [row.tolist() for row in request.logits]
"""


def test_processes_share_a_daemon_and_outlive_each_other(models: dict[str, Any], serve: Serve) -> None:
    daemon, prompt = serve("llama", 16), tiny.prompt(100)
    with daemon.client() as client, Puppet(daemon.socket) as other:
        other.begin(ANOTHER)  # it imports while we compute
        runner = Runner(client, PagedModel(tiny.build("llama"), client))
        cold, warm = say(runner, prompt), say(runner, prompt)
        judge(models["llama"], cold)
        other.finish()
        want = [96, 0, warm.output, [row.tolist() for row in logits(warm)]]
        assert other.ask(f"say({prompt})") == want, "another process reads our pages, bit for bit"

        theirs = tiny.prompt(120, seed=3)
        other.ask(f"say({theirs}, steps=3)")  # prefilled and decoding
        os.close(other.kill())
        until(lambda: daemon.status(prove=False)["gauges"]["num_leases"] == 0)
    with daemon.client() as client:
        heir = Runner(client, PagedModel(tiny.build("llama"), client))
        again = say(heir, prompt)
        assert again.matched_tokens == 96
        assert torch.equal(logits(again), logits(warm)), "a runner that comes later reads the same"
        after = say(heir, theirs)
        assert after.matched_tokens == 112, "what the killed one had committed is a hit"
        judge(models["llama"], after)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("part", ["k", "v"])
def test_a_page_that_was_written_wrongly_is_noticed(
    family: str, part: str, models: dict[str, Any], serve: Serve
) -> None:
    daemon, prompt = serve(family, 16), tiny.prompt(100)
    with daemon.client() as client:
        runner = Runner(client, PagedModel(tiny.build(family), client))
        judge(models[family], say(runner, prompt))
        page = client.acquire(prompt)
        pool = getattr(client.pool, part)
        # One token of one layer and one head (or all of its latent), written where its neighbour belongs.
        pool[1][page.slots[2], 5, -1] = pool[1][page.slots[2], 6, -1]
        page.release()
        with pytest.raises(AssertionError):
            judge(models[family], say(runner, prompt))


def test_a_model_from_a_folder_says_the_same(models: dict[str, Any], serve: Serve, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    tiny.build("llama").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert pool_settings(AutoConfig.from_pretrained(tmp_path))["dtype"] == "float32"
    daemon = serve("llama", 16)
    with daemon.client() as client:
        runner = Runner(client, PagedModel(model, client))
        for _ in range(2):
            judge(models["llama"], say(runner, tiny.prompt(100)))


def test_a_daemon_for_another_model_is_refused(models: dict[str, Any], serve: Serve) -> None:
    daemon = serve("llama", 16)
    with (
        daemon.client() as client,
        pytest.raises(
            ConfigError, match=r"pool\.num_kv_heads = 2 and the model needs 1.*pool\.head_dim = 16 and .* 24"
        ),
    ):
        PagedModel(tiny.build("deepseek_v2"), client)


def test_a_model_with_windows_is_refused() -> None:
    from transformers import MistralConfig, Qwen2Config

    with pytest.raises(ConfigError, match="sliding_attention"):
        pool_settings(Qwen2Config(use_sliding_window=True, max_window_layers=0, **tiny.SIZES))
    with pytest.raises(ConfigError, match="sliding"):
        pool_settings(MistralConfig(sliding_window=64, num_key_value_heads=2, **tiny.SIZES))
