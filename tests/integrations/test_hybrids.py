"""Models of which some layers see a window, or keep a state: the same words from every tier, and with too little room.

A match ends where all kinds of layers agree, so what is hit is the law of these tests as much as the words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import tiny
import torch
from judges import NUM_NEW, judge, logits, say

from sglcache import config
from sglcache.errors import ConfigError, TransferError
from sglcache.integrations.transformers import PagedModel, Part, Runner, pool_settings, settings
from sglcache.memory.geometry import StateGeometry
from sglcache.testing.daemon import Daemon
from sglcache.wire.control import StateForm

PAGE = 16
INTERVAL = 32
WHOLE = 40  # tokens: more than a window
LOADED = ("load_pages", "window_load_slots", "mamba_load_slots")
CHUNK = 48  # tokens: no multiple of the interval
Serve = Callable[..., Daemon]


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """Untouched, for reference."""
    return {family: tiny.build(family) for family in tiny.HYBRIDS}


@pytest.fixture
def serve(models: dict[str, Any], tmp_path: Path) -> Iterator[Serve]:
    """A daemon for a family, with room for so many tokens, tokens of windows, and states; twice that on the host."""
    found: list[Daemon] = []

    def start(
        family: str, num_tokens: int, window: int, num_states: int, dtype: str = "float32", page_size: int = PAGE
    ) -> Daemon:
        config = models[family].config
        sections = settings(
            config, page_size=page_size, num_tokens=num_tokens, dtype=dtype, interval=INTERVAL, num_states=num_states
        )
        if "window" in sections:
            sections["window"]["num_tokens"] = window
        found.append(Daemon(tmp_path, host={"num_tokens": 2 * num_tokens}, events={"enabled": False}, **sections))
        return found[-1]

    yield start
    for daemon in found:
        with daemon:
            pass


def runner_of(family: str, client: Any, dtype: torch.dtype = torch.float32, **settings: int) -> Runner:
    return Runner(client, PagedModel(tiny.build(family).to(dtype), client), step_tokens=CHUNK, **settings)


def has_states(family: str) -> bool:
    return family not in tiny.WINDOWS


def at_rest(daemon: Daemon) -> dict[str, Any]:
    status = daemon.settle()
    assert status["violations"] == []
    assert status["gauges"]["num_leases"] == 0
    assert {(pool["leased"], pool["fenced"], pool["locked"]) for pool in status["pools"]} == {(0, 0, 0)}
    return status


@pytest.mark.parametrize("family", tiny.HYBRIDS)
def test_it_says_the_same_words_cold_warm_branching_loaded_back_and_evicted(
    family: str, models: dict[str, Any], serve: Serve
) -> None:
    model, daemon = models[family], serve(family, 640, 640, 24)
    first = tiny.prompt(100)
    others = [tiny.prompt(97 + seed, seed, first[:90]) for seed in (1, 2)]
    with daemon.client() as client:
        runner = runner_of(family, client)
        cold = say(runner, first)
        judge(model, cold)
        warm = say(runner, first)
        assert (cold.matched_tokens, warm.matched_tokens, warm.host_tokens) == (0, 96, 0)
        assert torch.equal(logits(warm), logits(cold)), "it begins where a chunk began"
        chunks = pairwise([0, 32, 64, 96, 100] if has_states(family) else [0, 48, 96, 100])
        assert torch.equal(logits(cold), tiny.with_own_cache(model, cold.tokens.tolist(), 100, list(chunks)))

        branches = [say(runner, other) for other in others]
        # The first that branches off finds no state but that of the interval, and leaves one where it did.
        assert [each.matched_tokens for each in branches] == [64 if has_states(family) else 80, 80]
        for each in branches:
            judge(model, each)

        daemon.settle()
        client.clear("device")
        loaded = [say(runner, each) for each in (first, *others)]
        assert [each.matched_tokens for each in loaded] == [96, 96, 96]
        assert loaded[0].host_tokens == 96
        for each in loaded:
            judge(model, each)
        assert torch.equal(logits(loaded[0]), logits(warm)), "the bytes that come back are the bytes that went"

        daemon.settle()
        client.clear("host")
        client.clear("device")
        again = say(runner, first)
        assert again.matched_tokens == 0
        assert torch.equal(logits(again), logits(cold))
    at_rest(daemon)


@pytest.mark.parametrize("family", ["mistral", "qwen3_next", "lara_mini"])
def test_many_at_once_say_what_each_would_alone_while_pools_overflow(
    family: str, models: dict[str, Any], serve: Serve
) -> None:
    """Each pool holds less than all that run together want, and a host that holds it all has it back."""
    daemon = serve(family, 384, 192, 7)
    bases = [tiny.prompt(40, seed) for seed in range(2)]
    prompts = [tiny.prompt(70 + 9 * seed, seed, bases[seed % 2]) for seed in range(6)]
    prompts[1:1] = [prompts[0], prompts[0][:1]]  # twins, who compute the same; and the shortest
    with daemon.client() as client:
        runner = runner_of(family, client, max_running=3)
        for again in range(2):
            requests = [runner.submit(each, max_new_tokens=17, keep_logits=True) for each in prompts]
            runner.run()
            for request in requests:
                judge(models[family], request)
            daemon.settle()
            if again:
                assert sum(request.matched_tokens for request in requests) > 100
                assert sum(request.host_tokens for request in requests) > 0
    status = at_rest(daemon)
    assert sum(count for name, count in status["counters"].items() if name in LOADED) > 0


@pytest.mark.parametrize("family", ["gemma3", "lara_mini"])
def test_a_prompt_far_longer_than_the_pool_of_the_window_goes_through_it(
    family: str, models: dict[str, Any], serve: Serve
) -> None:
    """And two at a time: where both need more, the younger starts over, once, when the other is done."""
    daemon = serve(family, 1024, 96, 8)
    with daemon.client() as client:
        runner = runner_of(family, client, max_running=2)
        requests = [
            runner.submit(tiny.prompt(200 + seed, seed), max_new_tokens=20, keep_logits=True) for seed in (1, 2)
        ]
        runner.run()
        for request in requests:
            judge(models[family], request)
        assert requests[0].matched_tokens == 0
    assert at_rest(daemon)["counters"]["requests"] == 3


def test_pages_that_two_computed_are_no_reason_to_start_over(models: dict[str, Any], serve: Serve) -> None:
    """What was a duplicate stays the lease's until another event: where room is scarce, that comes first."""
    daemon = serve("gemma3", 640, 64, 0, page_size=4)  # 16 pages of the window, which is 6
    with daemon.client() as client:
        runner = Runner(client, PagedModel(tiny.build("gemma3"), client), step_tokens=40, max_running=2)
        prompt = tiny.prompt(58)
        runner.submit(prompt[:24], max_new_tokens=1)
        request = runner.submit(prompt, max_new_tokens=NUM_NEW, keep_logits=True)
        runner.step()
        runner.settle()
        assert request.num_duplicates == 4
        runner.run()
        judge(models["gemma3"], request)
    assert at_rest(daemon)["counters"]["requests"] == 2


def test_a_window_s_room_is_all_that_a_long_answer_needs_of_it(models: dict[str, Any], serve: Serve) -> None:
    """Its pool has six pages, three of which are the window and what is written."""
    daemon = serve("gemma3", 512, 96, 0)
    with daemon.client() as client:
        runner = runner_of("gemma3", client)
        request = runner.submit(tiny.prompt(20), max_new_tokens=110, keep_logits=True)
        most = 0
        while not runner.idle:
            runner.step()
            if request.lease is not None and request.lease.window is not None:
                most = max(most, len(request.lease.window.slots))
        runner.settle()
        judge(models["gemma3"], request)
        assert most <= 4
        # Of the answer everything is cached, and what goes on from it hits all of that.
        on = say(runner, [*request.tokens, *tiny.prompt(9, 5)])
        assert on.matched_tokens == (len(request.tokens) - 1) // PAGE * PAGE
        judge(models["gemma3"], on)


@pytest.mark.parametrize("family", ["granite_hybrid", "lfm3"])
def test_an_answer_s_last_page_has_its_state_and_a_conversation_goes_on_there(
    family: str, models: dict[str, Any], serve: Serve
) -> None:
    daemon = serve(family, 512, 512, 12)
    with daemon.client() as client:
        runner = runner_of(family, client)
        said = tiny.prompt(30)
        for turn in range(3):
            request = runner.submit(said, max_new_tokens=21, keep_logits=True)
            runner.run()
            judge(models[family], request)
            if turn:
                assert request.matched_tokens == (len(said) - 10) // PAGE * PAGE
            said = [*request.tokens, *tiny.prompt(9, turn)]


@pytest.mark.parametrize(("family", "num_states"), [("qwen3_next", 2), ("lfm3", 3)])
def test_states_that_find_no_slot_are_left_out(
    family: str, num_states: int, models: dict[str, Any], serve: Serve
) -> None:
    """One to write for each of two that run, and hardly another."""
    daemon = serve(family, 512, 512, num_states)
    prompts = [tiny.prompt(100, seed) for seed in range(3)]
    with daemon.client() as client:
        runner = runner_of(family, client, max_running=2)
        for _ in range(2):
            requests = [runner.submit(each, max_new_tokens=NUM_NEW, keep_logits=True) for each in prompts]
            runner.run()
            for request in requests:
                judge(models[family], request)
    at_rest(daemon)


class FailingLoad:
    """An executor whose first load fails, in a layer that comes after others."""

    def __init__(self, inner: PagedModel) -> None:
        self.inner = inner
        self.vocab_size = inner.vocab_size
        self.failed = 0
        self._wait = inner.member.wait_loaded
        inner.member.wait_loaded = self._fail  # type: ignore[method-assign]

    def _fail(self, load: tuple[int, int], layer: int | None = None) -> None:
        self._wait(load, layer)
        if layer and not self.failed:
            self.failed += 1
            raise TransferError("planted")

    def run(self, parts: list[Part]) -> torch.Tensor:
        return self.inner.run(parts)

    def record(self, tickets: list[int]) -> None:
        self.inner.record(tickets)


def test_a_load_that_fails_on_the_way_leaves_the_states_of_others_as_they_were(serve: Serve, tmp_path: Path) -> None:
    """The layers before were computed, and are computed again: a state must not have been taken further twice."""
    model = tiny.build("falcon_h1")
    daemon = serve("falcon_h1", 512, 0, 12)
    with daemon.client() as client:
        executor = FailingLoad(PagedModel(tiny.build("falcon_h1"), client))
        runner = Runner(client, executor, step_tokens=CHUNK)  # type: ignore[arg-type]
        prompt = tiny.prompt(100)
        say(runner, prompt)
        daemon.settle()
        client.clear("device")
        beside = runner.submit(tiny.prompt(60, seed=5), max_new_tokens=30, keep_logits=True)
        for _ in range(4):
            runner.step()
        assert beside.output, "it decodes"
        request = say(runner, prompt)
        assert executor.failed == 1
        judge(model, request)
        judge(model, beside)


@pytest.mark.parametrize("family", ["gemma2", "qwen3_next", "lara_mini"])
def test_pools_of_bfloat16_hold_what_was_computed_to_the_bit(family: str, serve: Serve) -> None:
    daemon, prompt = serve(family, 512, 512, 12, "bfloat16"), tiny.prompt(100)
    with daemon.client() as client:
        runner = runner_of(family, client, torch.bfloat16)
        cold, warm = say(runner, prompt), say(runner, prompt)
        daemon.settle()
        client.clear("device")
        loaded = say(runner, prompt)
    assert [each.matched_tokens for each in (cold, warm, loaded)] == [0, 96, 96]
    assert torch.equal(logits(cold), logits(warm))
    assert torch.equal(logits(loaded), logits(warm))
    chunks = pairwise([0, 32, 64, 96, 100] if has_states(family) else [0, 48, 96, 100])
    own = tiny.build(family).to(torch.bfloat16)
    assert torch.equal(logits(cold), tiny.with_own_cache(own, cold.tokens.tolist(), 100, list(chunks)))


# -- what a daemon must be like ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", tiny.HYBRIDS)
def test_the_settings_of_a_model_are_a_configuration_and_say_what_it_keeps(family: str, models: dict[str, Any]) -> None:
    """As transformers' own cache has it after a prompt."""
    model = models[family]
    found = settings(model.config, dtype="float32")
    config.parse(found)
    cache = tiny.cache_of(model, tiny.prompt(WHOLE))
    kept: dict[str, list[Any]] = {"pool": [], "window": [], "states": []}
    for layer in cache.layers:
        if getattr(layer, "keys", None) is not None:
            kept["window" if layer.is_sliding else "pool"].append((layer.keys.shape[1], layer.keys.shape[3]))
        if hasattr(layer, "conv_states"):
            states = (layer.conv_states[0], layer.recurrent_states[0])
            kept["states"].append([list(each.shape[1:]) for each in states if each is not None])
    for section in ("pool", "window"):
        wanted = found.get(section, {"num_layers": 0})
        row = {**found["pool"], **wanted}
        assert kept[section] == [(row["num_kv_heads"], row["head_dim"])] * wanted["num_layers"]
    wanted = found.get("mamba", {"num_layers": 0, "states": []})
    assert kept["states"] == [[each["shape"] for each in wanted["states"]]] * wanted["num_layers"]
    assert found.get("window", {"size": tiny.WINDOW})["size"] == tiny.WINDOW


def test_a_slot_of_a_published_model_is_as_large_as_its_states() -> None:
    """Qwen3-Next-80B-A3B in bfloat16: of each of 36 layers 32 heads' [128, 128] in float32, and a convolution."""
    from transformers import Qwen3NextConfig

    mamba = settings(Qwen3NextConfig(), dtype="bfloat16")["mamba"]
    forms = tuple(StateForm(each["name"], tuple(each["shape"]), each["dtype"]) for each in mamba["states"])
    geometry = StateGeometry(mamba["num_slots"], mamba["num_layers"], forms)
    assert geometry.page_bytes == 36 * (32 * 128 * 128 * 4 + 8192 * 4 * 2) == 77_856_768


def test_a_model_that_needs_more_than_a_pool_says_so(models: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"lara_mini needs more than \[pool\]: mamba, window"):
        pool_settings(models["lara_mini"].config)


def test_what_is_neither_kept_in_full_nor_a_window_nor_a_state_is_refused() -> None:
    from transformers import FalconMambaConfig, Gemma3nTextConfig, Llama4TextConfig, MiniMaxConfig

    for made, words in (
        (Llama4TextConfig(), "llama4_text has layers of chunked_attention"),
        (Gemma3nTextConfig(), "gemma3n_text has layers that read what others keep"),
        (MiniMaxConfig(num_hidden_layers=2), "minimax keeps states in a way of its own"),
        (FalconMambaConfig(num_hidden_layers=2), "falcon_mamba has no layer of attention"),
    ):
        with pytest.raises(ConfigError, match=words):
            settings(made)
    with pytest.raises(ConfigError, match="not spread over shards"):
        settings(tiny.build("qwen3_next").config, num_shards=2)


def test_a_daemon_for_another_window_or_other_states_is_refused(models: dict[str, Any], serve: Serve) -> None:
    with serve("lara_mini", 256, 256, 4).client() as client:
        for family, words in (
            ("qwen3_next", r"window\.size = 24 and the model needs none"),
            ("lfm3", r"mamba\.states = .*'shape': \[128, 4\].* and the model needs .*'shape': \[64, 7\]"),
        ):
            with pytest.raises(ConfigError, match=words):
                PagedModel(tiny.build(family), client)
