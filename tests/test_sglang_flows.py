"""The code in docs/sglang.md serves requests over a real daemon, and every position is what was computed for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sglcache import Client
from sglcache.errors import DoubleFree
from sglcache.memory.token_pools import MHATokenToKVPool
from sglcache.testing.daemon import Daemon

PAGE = Path(__file__).parents[1] / "docs" / "sglang.md"
PAGE_SIZE, NUM_PAGES, CHUNK = 4, 40, 10


def code() -> dict[str, Any]:
    scope: dict[str, Any] = {}
    for program in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(program, scope)
    return scope


@pytest.fixture
def page_size() -> int:
    return PAGE_SIZE


@pytest.fixture
def daemon(lend: Callable[..., Daemon], page_size: int) -> Daemon:
    pool = {"page_size": page_size, "num_tokens": NUM_PAGES * PAGE_SIZE, "dtype": "float32"}
    return lend(pool=pool, host={"num_tokens": 4 * NUM_PAGES * PAGE_SIZE})


class Request:
    def __init__(self, prompt: list[int], num_new: int) -> None:
        self.tokens = list(prompt)
        self.most = len(prompt) + num_new
        self.kv_len = 0
        self.row: int
        self.lease: Any

    @property
    def done(self) -> bool:
        return len(self.tokens) == self.most


def kv(tokens: list[int], layer: int) -> Tensor:
    """What a model would compute: of each position, something that all tokens up to it have a say in."""
    sums = torch.tensor(tokens, dtype=torch.float64).add(1).cumsum(0)
    return (sums * (layer + 1) % 1021).float()[:, None, None].expand(-1, 2, 8)


class Engine:
    """SGLang's loop, in short: admit, allocate or retract, compute, sample, cache."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.cache = code()["LeaseCache"](client, max_running=6, max_context_len=120)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.hits: list[int] = []
        self.num_retracted = 0
        self.full = False

    def step(self) -> None:
        while self.waiting and not (self.full and self.running) and self.cache.admit(self.waiting[0], CHUNK):
            self.hits.append(self.waiting[0].kv_len)
            self.running.append(self.waiting.pop(0))
        while (loc := self.cache.alloc(self.running, CHUNK)) is None:
            assert len(self.running) > 1, "one request has room for itself"
            self.retract()
        stops = [min(len(request.tokens), request.kv_len + CHUNK) for request in self.running]
        self.forward(loc, stops)
        for request, stop in zip(list(self.running), stops, strict=True):
            request.kv_len = stop
            if stop == len(request.tokens):
                request.tokens.append(stop * 7 % 50)
            if request.done:
                self.cache.cache_finished_req(request)
                self.running.remove(request)
                self.full = False
            else:
                self.cache.cache_unfinished_req(request)

    def retract(self) -> None:
        self.num_retracted += 1
        self.full = True  # until somebody is done: else the victim would be back at once
        victim = self.running.pop()
        self.cache.retract(victim)
        self.waiting.insert(0, victim)

    def forward(self, loc: Tensor, stops: list[int]) -> None:
        pool: MHATokenToKVPool = self.cache.kv
        filled = torch.cat([loc, torch.full((3,), pool.padding_slot)])  # as a batch of a captured graph's size
        for layer in range(pool.layer_num):
            wrote = [kv(request.tokens, layer)[request.kv_len : n] for request, n in self.parts(stops)]
            new = torch.cat([*wrote, torch.full((3, 2, 8), -1.0)])
            pool.set_kv_buffer(layer, filled, new, -new)
            k, v = pool.get_key_pages(layer), pool.get_value_pages(layer)
            for request, stop in self.parts(stops):
                slots = self.cache.rows.req_to_token[request.row, :stop].long()
                at = slots // pool.page_size, slots % pool.page_size
                assert torch.equal(k[at], kv(request.tokens[:stop], layer)), (layer, request.kv_len, stop)
                assert torch.equal(v[at], -k[at])

    def parts(self, stops: list[int]) -> Iterator[tuple[Request, int]]:
        return zip(self.running, stops, strict=True)

    def run(self) -> None:
        for _ in range(500):
            if not (self.waiting or self.running):
                return
            self.step()
        raise AssertionError(f"{len(self.waiting)} wait and {len(self.running)} run")

    def close(self) -> None:
        self.cache.padding.release(wait=True)


def prompt(seed: int, num_tokens: int) -> list[int]:
    return list(map(int, np.random.default_rng(seed).integers(0, 50, num_tokens)))


@pytest.mark.parametrize("page_size", [PAGE_SIZE, 1])
def test_requests_share_what_they_have_alike_and_are_retracted_when_they_do_not_fit(daemon: Daemon) -> None:
    with daemon.client() as client:
        engine = Engine(client)
        for round in range(3):
            requests = [Request(prompt(1, 25) + prompt(10 * round + n, 9), 22 + n) for n in range(5)]
            engine.waiting += requests
            engine.run()
            assert all(request.done for request in requests)
        assert engine.num_retracted > 0, "not all had room at once"
        assert max(engine.hits) >= 24
        assert engine.cache.rows.available_size() == 6
        engine.close()
        status = daemon.settle()
        assert status["gauges"]["num_leases"] == 0
        assert status["counters"]["duplicate_pages"] > 0, "two computed the same at once, and read one of the two"
        assert (daemon.pool()["leased"], daemon.pool()["locked"]) == (0, 0)


def test_a_finished_request_is_cached_an_aborted_one_only_as_far_as_it_was(daemon: Daemon) -> None:
    with daemon.client() as client:
        engine = Engine(client)
        finished, aborted, unwanted = (Request(prompt(seed, 22), 5) for seed in (1, 2, 3))
        engine.waiting += [finished]
        engine.run()
        engine.waiting += [aborted, unwanted]
        engine.step()  # one chunk of ten is computed, and cached
        assert engine.cache.alloc(engine.running, CHUNK) is not None
        for request in (aborted, unwanted):
            request.kv_len += CHUNK  # and a second one computed
        engine.cache.abort(aborted)
        engine.cache.cache_finished_req(unwanted, is_insert=False)
        engine.close()
        computed = len(finished.tokens) - 1  # its last token was never computed
        for request, most in ((finished, computed), (aborted, CHUNK), (unwanted, CHUNK)):
            assert client.peek(request.tokens).matched_tokens == most // PAGE_SIZE * PAGE_SIZE
        daemon.settle()
        assert (daemon.pool()["leased"], daemon.pool()["locked"]) == (0, 0)


def test_what_comes_back_from_the_host_is_read_as_it_was(daemon: Daemon) -> None:
    with daemon.client() as client:
        engine = Engine(client)
        first = Request(prompt(1, 60), 3)
        engine.waiting.append(first)
        engine.run()
        daemon.settle()
        engine.waiting += [Request(prompt(seed, 110), 2) for seed in (2, 3)]  # the first is on the host alone then
        engine.run()
        again = Request(first.tokens[:60], 3)
        engine.waiting.append(again)
        engine.run()
        assert engine.hits[-1] >= 56
        assert daemon.status()["counters"]["load_pages"] > 0
        engine.close()


def test_the_first_to_attach_is_given_page_0_for_padding(daemon: Daemon) -> None:
    with daemon.client() as client:
        first = Engine(client)
        assert first.cache.kv.padding_slot == 0
        with daemon.client() as other:
            second = Engine(other)
            slot = second.cache.kv.padding_slot
            assert slot == PAGE_SIZE
            assert second.cache.rows.req_to_token.eq(slot).all()
            second.close()
        first.close()


def test_pages_of_ones_own_are_no_ones_else(daemon: Daemon) -> None:
    with daemon.client() as client:
        other = client.acquire(prompt(9, 30), limit=0)
        lease, allocator = code()["own_pages"](client, 32)
        row = allocator.alloc_extend([0], [9], [-1], 9)
        assert allocator.available_size() == 32 - -(-9 // PAGE_SIZE) * PAGE_SIZE
        more = allocator.alloc_decode([10], row[-1:])
        pages = {int(slot) // PAGE_SIZE for slot in torch.cat([row, more])}
        assert pages <= set(map(int, lease.slots))
        assert not pages & set(map(int, other.slots))
        pool = MHATokenToKVPool(client.pool)
        pool.set_kv_buffer(0, row, torch.ones(9, 2, 8), torch.ones(9, 2, 8))
        allocator.free_segment(torch.cat([row, more]), 0)
        with pytest.raises(DoubleFree):
            allocator.free(more)
        assert allocator.available_size() == 32
        lease.release()
        other.release(wait=True)
    assert daemon.pool()["leased"] == 0
