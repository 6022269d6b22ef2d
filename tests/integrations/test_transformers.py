"""A cache is right when a model that uses it says the same words: real models of transformers over a real daemon.

Three judges, from strict to wide. *Bitwise*: where the model does the same arithmetic, what it read from pages gives
the very logits that transformers' own cache gives (one request at a time, in the same chunks). *BOUND*: elsewhere
(several requests in one matrix, another chunking) logits differ from those of the model without any cache by rounding
alone. *Words*: greedy tokens are identical, always.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import tiny
import torch
from judges import BOUND, NUM_NEW, judge, logits, say
from torch import Tensor

from sglcache.errors import BadRequest, ConfigError, NoSpace, TransferError
from sglcache.integrations.transformers import PagedModel, Part, Request, Runner, pool_settings
from sglcache.memory.geometry import Geometry
from sglcache.testing import copies
from sglcache.testing.daemon import Daemon

FAMILIES = list(tiny.FAMILIES)
Serve = Callable[..., Daemon]
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

    def start(family: str, page_size: int, dtype: str = "float32", layout: str = "page_first") -> Daemon:
        pool = pool_settings(models[family].config, page_size=page_size, num_tokens=384, dtype=dtype)
        pool["layout"] = layout
        kind = tuple(pool.items())
        if kind not in daemons:
            folder = tmp_path_factory.mktemp("daemon")
            daemons[kind] = Daemon(folder, pool=pool, host={"num_tokens": 1024}, events={"enabled": False})
        daemon = daemons[kind]
        daemon.settle()
        with daemon.admin() as admin:
            admin.clear()
        return daemon

    return start


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


@pytest.mark.parametrize(
    ("family", "page_size", "layout"),
    [
        *((family, page_size, "page_first") for family in FAMILIES for page_size in (1, 16)),
        ("llama", 16, "layer_first"),
        ("deepseek_v2", 16, "layer_first"),
    ],
)
def test_it_says_the_same_words_cold_warm_loaded_back_and_evicted(
    family: str, page_size: int, layout: str, models: dict[str, Any], serve: Serve
) -> None:
    model, daemon = models[family], serve(family, page_size, layout=layout)
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
    """Cold, hit, beside others, loaded back: the same seed draws the same words."""
    daemon, prompt = serve("llama", 16), tiny.prompt(40)
    drawing = {"temperature": 2.0, "seed": 7}
    with daemon.client() as client:
        runner = Runner(client, PagedModel(tiny.build("llama"), client))
        cold, warm = (say(runner, prompt, **drawing) for _ in range(2))
        beside = runner.submit(tiny.prompt(30, 5), max_new_tokens=NUM_NEW, temperature=2.0, seed=3)
        crowded = say(runner, prompt, **drawing)
        other = say(runner, prompt, temperature=2.0, seed=8)
        host_only(daemon, runner, prompt)
        loaded = say(runner, prompt, **drawing)
    want = tiny.without_cache(models["llama"], cold.tokens.tolist(), 40)
    torch.testing.assert_close(logits(cold), want, atol=BOUND, rtol=0)
    generator = torch.Generator().manual_seed(7)
    drawn = [int(torch.multinomial(torch.softmax(row.double() / 2.0, 0), 1, generator=generator)) for row in want]
    assert [each.output for each in (cold, warm, crowded, loaded)] == [drawn] * 4
    assert [each.matched_tokens for each in (cold, warm, crowded, loaded)] == [0, 32, 32, 32]
    assert loaded.host_tokens == 32
    assert beside.done
    assert other.output != cold.output


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_pages_of_bfloat16_hold_what_was_computed_to_the_bit(family: str, serve: Serve) -> None:
    daemon, prompt, chunks = serve(family, 16, "bfloat16"), tiny.prompt(100), [(0, 40), (40, 80), (80, 100)]
    own = tiny.build(family).to(torch.bfloat16)
    with daemon.client() as client:
        runner = Runner(client, PagedModel(tiny.build(family).to(torch.bfloat16), client), step_tokens=40)
        cold, warm = say(runner, prompt), say(runner, prompt)
        host_only(daemon, runner, prompt)
        loaded = say(runner, prompt)
    assert [each.matched_tokens for each in (cold, warm, loaded)] == [0, 96, 96]
    assert torch.equal(logits(cold), tiny.with_own_cache(own, cold.tokens, 100, chunks))
    for hit in (warm, loaded):
        assert torch.equal(logits(hit), tiny.with_own_cache(own, hit.tokens, 100, chunks, 96))


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


@pytest.mark.parametrize("held", [0, 2, 3])
def test_layers_are_computed_while_the_load_of_the_next_is_held_back(held: int, tmp_path: Path) -> None:
    """And each is waited for once, in the first step alone."""
    gate, prompt, layers = tmp_path / "gate", tiny.prompt(100), range(4)
    whole = tiny.build("llama", num_hidden_layers=len(layers))
    pool = pool_settings(whole.config, num_tokens=384)
    for layer in range(held):
        Path(f"{gate}.{layer}").touch()  # these may be loaded
    with (
        Daemon(
            tmp_path, prelude=copies.gate(gate, "load"), pool=pool, host={"num_tokens": 1024}, events={"enabled": False}
        ) as daemon,
        daemon.client() as client,
    ):
        model = tiny.build("llama", num_hidden_layers=len(layers))
        runner = Runner(client, PagedModel(model, client))
        say(runner, prompt)
        host_only(daemon, runner, prompt)
        story: list[str] = []
        at_the_gate, wait = threading.Event(), client.wait_loaded

        def watch(load: tuple[int, int], layer: int | None = None) -> None:
            story.append(f"wait {layer}")
            if layer == held:
                at_the_gate.set()
            wait(load, layer)

        client.wait_loaded = watch  # type: ignore[method-assign]
        for number, layer in enumerate(model.model.layers):
            layer.register_forward_hook(lambda *_, number=number: story.append(f"computed {number}"))
        told: list[Request] = []
        thread = threading.Thread(target=lambda: told.append(say(runner, prompt)))
        thread.start()
        assert at_the_gate.wait(30)
        thread.join(0.2)  # would be enough for all of it
        before = [f"{what} {layer}" for layer in range(held) for what in ("wait", "computed")]
        assert story == [*before, f"wait {held}"]
        gate.touch()
        thread.join(30)
        assert not thread.is_alive()
    assert told[0].host_tokens == 96
    assert [each for each in story if each.startswith("wait")] == [f"wait {layer}" for layer in layers]
    judge(whole, told[0])


class FailingLoad:
    """An executor whose first load fails."""

    def __init__(self, inner: PagedModel) -> None:
        self.inner = inner
        self.vocab_size = inner.vocab_size
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
        rank = client.geometry.kv_lora_rank
        if rank:
            columns = slice(rank) if part == "k" else slice(rank, None)
            layer = client.pool.kv[1][..., columns]
        else:
            layer = getattr(client.pool, part)[1]
        # One token of one layer and one head (or all of its latent), written where its neighbour belongs.
        layer[page.slots[2], 5, -1] = layer[page.slots[2], 6, -1]
        page.release()
        with pytest.raises(AssertionError):
            judge(models[family], say(runner, prompt))


def test_a_daemon_for_another_model_is_refused(models: dict[str, Any], serve: Serve) -> None:
    daemon = serve("llama", 16)
    with (
        daemon.client() as client,
        pytest.raises(
            ConfigError,
            match=r"pool\.num_kv_heads = 2 and the model needs none.*kv_lora_rank = nothing and .* needs 24",
        ),
    ):
        PagedModel(tiny.build("deepseek_v2"), client)


def test_a_model_that_is_elsewhere_is_refused(serve: Serve) -> None:
    with serve("llama", 16).client() as client, pytest.raises(ConfigError, match=r"on meta and .* pages are on cpu"):
        PagedModel(tiny.build("llama").to("meta"), client)


def test_a_model_that_does_not_let_others_attend_for_it_is_refused(serve: Serve) -> None:
    model = tiny.build("llama")
    model._supports_attention_backend = False
    with serve("llama", 16).client() as client, pytest.raises(ConfigError, match="attends in a way of its own"):
        PagedModel(model, client)


def test_a_model_that_looks_ahead_is_refused() -> None:
    from transformers import LlamaConfig

    with pytest.raises(ConfigError, match="llama attends to what comes later"):
        pool_settings(LlamaConfig(is_causal=False, **tiny.SIZES))


@pytest.mark.parametrize(("num_layers", "num_heads", "token_bytes"), [(27, 16, 31_104), (60, 128, 69_120)])
def test_latents_take_the_room_of_latents_however_many_heads_there_are(
    num_layers: int, num_heads: int, token_bytes: int
) -> None:
    """DeepSeek-V2-Lite and DeepSeek-V2, in bfloat16."""
    from transformers import DeepseekV2Config

    sizes = {"num_hidden_layers": num_layers, "num_attention_heads": num_heads}
    for num_shards in (1, 2):
        pool = pool_settings(DeepseekV2Config(**sizes), dtype="bfloat16", num_shards=num_shards)
        num_pages = pool.pop("num_tokens") // 16
        geometry = Geometry(num_pages=num_pages, **pool)  # type: ignore[arg-type]
        assert geometry.page_bytes == 16 * token_bytes, "each shard has a replica"


def test_a_token_that_the_model_does_not_have_is_refused_and_others_go_on(models: dict[str, Any], serve: Serve) -> None:
    daemon = serve("llama", 16)
    with daemon.client() as client:
        runner = Runner(client, PagedModel(tiny.build("llama"), client))
        good = runner.submit(tiny.prompt(20), max_new_tokens=2)
        with pytest.raises(BadRequest, match="token 999999"):
            runner.submit([1, 999_999])
        runner.run()
        assert len(good.output) == 2
