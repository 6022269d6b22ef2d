"""What the paged model runner costs and saves: a real model over a real daemon, beside transformers' own cache.

The same model twice in one process, on one thread, asked the same in turn; both must say the same words.

*First token.* `cold`: nothing is cached, and the prompt is computed in chunks of `step_tokens`. Beside it a
DynamicCache that is filled in the same chunks (`own cache`), and the model without any cache, all at once (`no cache`).
`device`: what is shared is in the device pool, and a short question follows it; `host`: it comes from the host. Beside
each a DynamicCache that was kept from the request before, cut back to what is shared, and given the same question
(`kept`). That is the ceiling: it is there without a search, and nobody but its own process has it.

*Decode step.* All of `Runner.step`, beside a bare loop over the model with its own cache: for one request, and for
several of equal length, which is what suits the own cache best.

Every ratio is ours / theirs, of medians; the least and the most of single pairs are the spread.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from sglcache.bench.daemon import Daemon
from sglcache.bench.harness import BenchError, Comparison, Row, Summary
from sglcache.client import Client
from sglcache.integrations.transformers import PagedModel, Runner, pool_settings

VOCAB = 4096
HEAD_DIM = 64
SETTLE_S = 60.0


class Options(NamedTuple):
    """What `bench runner` is told."""

    prompts: tuple[int, ...] = (512, 2048, 4096)  # tokens that are shared; whole pages
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    layers: int = 6
    hidden: int = 512
    page_size: int = 16
    question_tokens: int = 24
    step_tokens: int = 512
    cold_pairs: int = 3
    pairs: int = 9
    steps: int = 16  # of a block, whose median counts
    batch: int = 8
    batch_prompt: int = 512  # tokens of each prompt of the batch

    @property
    def new_tokens(self) -> int:
        """Of a request that decodes: a block to warm up, the blocks, and while the prompts of others are computed."""
        prompts = self.batch * max(self.batch_prompt, *self.prompts)
        others = prompts // max(1, self.step_tokens - self.batch) + self.batch  # who decodes takes of each step
        return self.steps * (self.pairs + 1) + others


def run(options: Options) -> Row:
    """First tokens by dtype and prompt, then decode steps by dtype and batch.

    BenchError: a hit was none, or the words differ.
    """
    torch.set_num_threads(1)
    config = _config(options)
    settings = pool_settings(config, page_size=options.page_size, num_tokens=_room(options))
    first_token, decode, num_weights = [], [], 0
    for dtype in options.dtypes:
        pool = [f"pool.{name}={value}" for name, value in {**settings, "dtype": dtype}.items()]
        with Daemon([*pool, "events.enabled=false"]) as daemon:
            daemon.wait_healthy()
            with Client(daemon.socket, name="bench runner") as client:
                pair = _Pair(options, config, dtype, client)
                num_weights = sum(weights.numel() for weights in pair.own.parameters())
                first_token += [pair.first_token(tokens) for tokens in options.prompts]
                decode += [pair.decode(1, sorted(options.prompts)[len(options.prompts) // 2])]
                decode += [pair.decode(options.batch, options.batch_prompt)]
    return {
        "layers": options.layers,
        "hidden": options.hidden,
        "weights": num_weights,
        "page_size": options.page_size,
        "question_tokens": options.question_tokens,
        "step_tokens": options.step_tokens,
        "threads": torch.get_num_threads(),
        "first_token": first_token,
        "decode_step": decode,
    }


def _config(options: Options) -> Any:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 8 // 3,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // HEAD_DIM,
        num_key_value_heads=max(1, options.hidden // HEAD_DIM // 3),
        max_position_embeddings=2 * _room(options),
    )


def _room(options: Options) -> int:
    """Tokens of the pool: nothing that is measured is pushed out by what is measured."""
    questions = 2 * (options.pairs + 1) * (options.question_tokens + 2 * options.page_size)
    batch = options.batch * (options.batch_prompt + options.new_tokens + options.page_size)
    return 2 * max(options.step_tokens, *options.prompts) + questions + batch + options.new_tokens


class _Told(NamedTuple):
    ms: float
    word: int


class _Pair:
    """The same model on the daemon's pages (`runner`) and with transformers' cache (`own`)."""

    def __init__(self, options: Options, config: Any, dtype: str, client: Client) -> None:
        self.options = options
        self.dtype = dtype
        self.client = client
        self.own = self._build(config)
        paged = PagedModel(self._build(config), client)
        self.runner = Runner(client, paged, step_tokens=options.step_tokens, max_running=options.batch)
        self._drawn = 0
        # Who comes first would pay for what is made once: kernels for a chunk's shape.
        prompt = self._draw(options.step_tokens)
        self._ask(prompt, 0, 0)
        self._own_ask(prompt, DynamicCache(config=self.own.config), 0)
        self._plain_ask(prompt)

    def _build(self, config: Any) -> Any:
        torch.manual_seed(0)
        # A copy: the attention that a model is switched to stands in its configuration.
        return LlamaForCausalLM(copy.deepcopy(config)).to(getattr(torch, self.dtype)).eval()

    def first_token(self, prompt_tokens: int) -> Row:
        """A prompt of so many tokens, cold and then as the prefix of questions."""
        shared = prompt_tokens // self.options.page_size * self.options.page_size
        cold, own_cold, no_cache = [], [], []
        for _ in range(self.options.cold_pairs):
            self._settled()
            self.client.clear()
            prompt = self._draw(shared)
            kept = DynamicCache(config=self.own.config)
            ours = self._ask(prompt, 0, 0)
            cold.append(ours.ms)
            own_cold.append(self._same(ours, self._own_ask(prompt, kept, 0)))
            no_cache.append(self._plain_ask(prompt).ms)
        times: dict[str, tuple[list[float], list[float]]] = {"device": ([], []), "host": ([], [])}
        for number in range(self.options.pairs + 1):
            for tier, (hit, own_warm) in times.items():
                self._settled()
                if tier == "host":
                    self.client.clear("device")
                asked = [*prompt, *self._draw(self.options.question_tokens)]
                ours = self._ask(asked, shared, shared if tier == "host" else 0)
                own = self._same(ours, self._own_ask(asked, kept, shared))
                if number:  # the first of each warms up
                    hit.append(ours.ms)
                    own_warm.append(own)
        return {
            "dtype": self.dtype,
            "prompt_tokens": shared,
            "cold_over_own_cache": _over(cold, own_cold),
            "cold_over_no_cache": _over(cold, no_cache),
            "device_over_kept": _over(*times["device"]),
            "host_over_kept": _over(*times["host"]),
            "device_over_cold": Summary.of(times["device"][0]).p50 / Summary.of(cold).p50,
            "host_over_cold": Summary.of(times["host"][0]).p50 / Summary.of(cold).p50,
        }

    def decode(self, batch: int, prompt_tokens: int) -> Row:
        """Steps of `batch` requests at once, in blocks of ours and theirs, behind prompts of so many tokens."""
        self._settled()
        self.client.clear()
        prompts = [self._draw(prompt_tokens) for _ in range(batch)]
        requests = [self.runner.submit(each, max_new_tokens=self.options.new_tokens) for each in prompts]
        while not all(request.output for request in requests):
            self.runner.step()
        ahead = max(len(request.output) for request in requests)
        own = _OwnBatch(self.own, prompts, self.options.step_tokens)
        for _ in range(ahead - 1):
            own.step()
        ours_ms, own_ms = [], []
        for number in range(self.options.pairs + 1):
            ours, theirs = self._block(self.runner.step), self._block(own.step)
            if number:
                ours_ms.append(ours)
                own_ms.append(theirs)
        if any(request.done for request in requests):
            raise BenchError("a request was done before the last step")
        self.runner.close()
        # A batch computes several requests in one matrix, and there the last bits may differ.
        if batch == 1 and requests[0].output[: len(own.words)] != own.words[: len(requests[0].output)]:
            raise BenchError(f"the words differ: {requests[0].output} and {own.words}")
        return {
            "dtype": self.dtype,
            "batch": batch,
            "prompt_tokens": prompt_tokens,
            "step_over_own_cache": _over(ours_ms, own_ms),
        }

    # -- one of each --------------------------------------------------------------------------------------

    def _ask(self, prompt: list[int], matched: int, from_host: int) -> _Told:
        started = time.perf_counter()
        request = self.runner.submit(prompt, max_new_tokens=1)
        while not request.output:
            self.runner.step()
        told = _Told(_ms_since(started), request.output[0])
        self.runner.run()
        if (request.matched_tokens, request.host_tokens) != (matched, from_host):
            raise BenchError(
                f"{request.matched_tokens} tokens were matched, {request.host_tokens} of them on the host; "
                f"{matched} and {from_host} should have been",
            )
        return told

    @torch.inference_mode()
    def _own_ask(self, prompt: list[int], cache: Any, shared: int) -> _Told:
        cache.crop(min(0, shared - cache.get_seq_length()))
        started = time.perf_counter()
        for start in range(shared, len(prompt), self.options.step_tokens):
            chunk = torch.tensor([prompt[start : start + self.options.step_tokens]])
            logits = self.own(chunk, cache=cache, use_cache=True, logits_to_keep=1).logits
        return _Told(_ms_since(started), int(logits[0, -1].argmax()))

    @torch.inference_mode()
    def _plain_ask(self, prompt: list[int]) -> _Told:
        started = time.perf_counter()
        logits = self.own(torch.tensor([prompt]), use_cache=False, logits_to_keep=1).logits
        return _Told(_ms_since(started), int(logits[0, -1].argmax()))

    def _block(self, step: Callable[[], object]) -> float:
        """The median of a block of steps, in ms."""
        steps = []
        for _ in range(self.options.steps):
            started = time.perf_counter()
            step()
            steps.append(_ms_since(started))
        return Summary.of(steps).p50

    @staticmethod
    def _same(ours: _Told, own: _Told) -> float:
        if ours.word != own.word:
            raise BenchError(f"the words differ: {ours.word} and {own.word}")
        return own.ms

    def _draw(self, count: int) -> list[int]:
        """Random tokens, new ones each time."""
        self._drawn += 1
        generator = torch.Generator().manual_seed(self._drawn)
        drawn: list[int] = torch.randint(0, VOCAB, (count,), generator=generator).tolist()
        return drawn

    def _settled(self) -> None:
        """Wait until all is released, and copied to the host."""
        deadline = time.monotonic() + SETTLE_S
        while any((gauges := self.client.status()["gauges"])[name] for name in ("num_leases", "num_copies")):
            if time.monotonic() > deadline:
                raise BenchError(f"the daemon does not come to rest: {gauges}")
            time.sleep(0.001)


class _OwnBatch:
    """Prompts of equal length with one DynamicCache, decoding greedily."""

    def __init__(self, model: Any, prompts: list[list[int]], step_tokens: int) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config)
        self.words: list[int] = []  # of the first prompt
        tokens = torch.tensor(prompts)
        for start in range(0, tokens.shape[1], step_tokens):
            self._next = self._forward(tokens[:, start : start + step_tokens])
        self.words.append(int(self._next[0]))

    def step(self) -> None:
        self._next = self._forward(self._next)
        self.words.append(int(self._next[0]))

    @torch.inference_mode()
    def _forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens, cache=self.cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True)


def _over(ours: list[float], theirs: list[float]) -> Row:
    """Ours over theirs: above 1, ours takes longer. Times in ms."""
    each = Comparison.of(theirs, ours)
    return {
        "ours_ms": each.other,
        "theirs_ms": each.ours,
        "ratio": each.ratio,
        "ratio_least": each.least,
        "ratio_most": each.most,
        "ours_spread_ms": each.other_spread,
        "theirs_spread_ms": each.ours_spread,
    }


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3
