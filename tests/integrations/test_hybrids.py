"""Models of which some layers see a window, or keep a state: the same words from every tier, and with too little room.

A match ends where all kinds of layers agree, so what is hit is the law of these tests as much as the words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import tiny
import torch
from judges import NUM_NEW, judge, logits, say

from sglcache.integrations.transformers import PagedModel, Runner, settings
from sglcache.testing.daemon import Daemon

PAGE = 16
INTERVAL = 32
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

    def start(family: str, num_tokens: int, window: int, num_states: int, dtype: str = "float32") -> Daemon:
        config = models[family].config
        sections = settings(
            config, page_size=PAGE, num_tokens=num_tokens, dtype=dtype, interval=INTERVAL, num_states=num_states
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
        judge(model, warm)

        branches = [say(runner, other) for other in others]
        # The first that branches off finds no state but that of the interval, and leaves one where it did.
        assert [each.matched_tokens for each in branches] == [64 if family_has_states(family) else 80, 80]
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


def family_has_states(family: str) -> bool:
    return family not in tiny.WINDOWS


@pytest.mark.parametrize("family", ["mistral", "qwen3_next", "lara_mini"])
def test_many_at_once_say_what_each_would_alone_while_pools_overflow(
    family: str, models: dict[str, Any], serve: Serve
) -> None:
    """Each pool holds less than all that run together want, and a host that holds it all has it back."""
    daemon = serve(family, 384, 192, 7)
    bases = [tiny.prompt(40, seed) for seed in range(2)]
    prompts = [tiny.prompt(70 + 9 * seed, seed, bases[seed % 2]) for seed in range(7)]
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
    """And two at a time: where both need more, the younger starts over, from what is cached by then."""
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
    assert at_rest(daemon)["counters"]["requests"] > len(requests), "one started over"


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
