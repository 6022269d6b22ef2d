"""The configurations for real models: their arithmetic is done anew from the shapes that the models are published with.

What a comment says must be what comes out here, and what `sglcache check` prints.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sglcache.config import load, parse_size
from sglcache.errors import ConfigError
from sglcache.memory.geometry import Geometry, companions_of

CONFIGS = Path(__file__).parents[1] / "configs"
CARD = 141 * 10**9  # bytes of an H200, by its data sheet


class Model(NamedTuple):
    """As its config.json has it."""

    name: str
    num_parameters: int
    weight_bytes: int  # of one parameter
    num_layers: int
    row: dict[str, int]  # as `[pool]` says it
    row_elements: int  # what a layer keeps of a token


def llama_8b() -> Model:
    hidden, layers, inner, vocab, heads, kv_heads, dim = 4096, 32, 14336, 128256, 32, 8, 128
    layer = 2 * hidden * heads * dim + 2 * hidden * kv_heads * dim + 3 * hidden * inner + 2 * hidden
    row = {"num_kv_heads": kv_heads, "head_dim": dim}
    return Model("meta-llama/Llama-3.1-8B", 2 * vocab * hidden + layers * layer + hidden, 2, layers, row, 2 * 8 * 128)


def deepseek(
    name: str, weight_bytes: int, *, hidden: int, layers: int, dense: int, inner: int, expert: int, routed: int,
    shared: int, heads: int, q_rank: int, vocab: int, correction: bool,
) -> Model:  # fmt: skip
    latent, rope, nope, value = 512, 64, 128, 128
    query = hidden * heads * (nope + rope)
    if q_rank:
        query = hidden * q_rank + q_rank + q_rank * heads * (nope + rope)
    attention = query + hidden * (latent + rope) + latent + latent * heads * (nope + value) + heads * value * hidden
    experts = routed * hidden + routed * correction + (routed + shared) * 3 * hidden * expert
    total = 2 * vocab * hidden + layers * (attention + 2 * hidden) + hidden
    total += dense * 3 * hidden * inner + (layers - dense) * experts
    row = {"kv_lora_rank": latent, "qk_rope_head_dim": rope}
    return Model(name, total, weight_bytes, layers, row, latent + rope)


LITE = deepseek(
    "deepseek-ai/DeepSeek-V2-Lite", 2, hidden=2048, layers=27, dense=1, inner=10944, expert=1408, routed=64,
    shared=2, heads=16, q_rank=0, vocab=102400, correction=False,
)  # fmt: skip
V3 = deepseek(
    "deepseek-ai/DeepSeek-V3", 1, hidden=7168, layers=61, dense=3, inner=18432, expert=2048, routed=256,
    shared=1, heads=128, q_rank=1536, vocab=129280, correction=True,
)  # fmt: skip

CARDS = [
    ("llama-3.1-8b-h200.toml", llama_8b(), 1),
    ("deepseek-v2-lite-h200.toml", LITE, 1),
    ("deepseek-v3-8xh200.toml", V3, 8),
]


def comments(file: Path) -> str:
    return "\n".join(line for line in file.read_text().splitlines() if line.startswith("#"))


def numbers(text: str) -> set[int]:
    """Those of four digits and more, which are written with commas."""
    return {int(found.replace(",", "")) for found in re.findall(r"\b\d{1,3}(?:,\d{3})+\b", text)}


def checked(file: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "sglcache", "check", str(file), "--ram", "2 TB", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("name", "model", "num_shards"), CARDS, ids=[name for name, *_ in CARDS])
def test_the_arithmetic_of_a_card_is_the_models(name: str, model: Model, num_shards: int) -> None:
    file = CONFIGS / name
    config = load(file)
    assert (config.model_name, config.pool.device, config.pool.num_layers) == (model.name, "cuda", model.num_layers)
    assert config.pool.num_shards == num_shards
    assert {key: getattr(config.pool, key) for key in model.row} == model.row

    layer_bytes = model.row_elements * 2
    token_bytes = layer_bytes * model.num_layers
    page_bytes = token_bytes * config.pool.page_size
    assert config.pool.size is not None
    assert config.host.size is not None
    weights = model.num_parameters * model.weight_bytes // num_shards
    num_pages, host_pages = config.pool.size // page_bytes, config.host.size // page_bytes
    tokens = [pages * config.pool.page_size for pages in (num_pages, host_pages)]
    wanted = {layer_bytes, token_bytes, page_bytes, model.num_parameters, weights, CARD - weights}
    assert wanted | {num_pages, host_pages, *tokens} <= numbers(comments(file))
    kept_back = CARD - weights - config.pool.size
    assert 12e9 < kept_back < 14e9
    assert f"{kept_back / 1e9:.1f} GB kept back" in comments(file)

    told = checked(file)
    (rank,) = told["ranks"]
    assert (rank["layer_bytes"], rank["token_bytes"], rank["page_bytes"]) == (layer_bytes, token_bytes, page_bytes)
    device, host = rank["tiers"]["device"], rank["tiers"]["host"]
    assert (device["num_pages"], host["num_pages"]) == (num_pages, host_pages)
    assert [device["num_tokens"], host["num_tokens"]] == tokens
    assert told["device_bytes"] == num_shards * num_pages * page_bytes
    assert told["ram_bytes"] == told["host_bytes"] == host_pages * page_bytes, "once, however many shards"


def test_what_the_comments_say_beside_is_so_too() -> None:
    lite, v3 = (comments(CONFIGS / name) for name in ("deepseek-v2-lite-h200.toml", "deepseek-v3-8xh200.toml"))
    assert 16 * (128 + 64 + 128) * 2 in numbers(lite), "without latents"
    geometry = Geometry.of(load(CONFIGS / "deepseek-v3-8xh200.toml"))
    assert geometry.placement().layers[0][0].num_bytes in numbers(v3), "a run of a layer"
    assert len(geometry.placement().ranges(0)) == 61
    for name in ("llama-3.1-8b-h200.toml", "deepseek-v2-lite-h200.toml"):
        assert len(Geometry.of(load(CONFIGS / name)).placement().ranges(0)) == 1, "one run, one copy"


def test_the_arithmetic_of_two_replicas_in_two_stages_is_as_they_say() -> None:
    file = CONFIGS / "dp2-pp2.toml"
    told = checked(file)
    by_stage = [2 * 4 * 128 * 2 * layers for layers in (16, 12, 16, 12)]
    assert [rank["token_bytes"] for rank in told["ranks"]] == [*by_stage[:1] * 2, *by_stage[1:2] * 2]
    wanted = {2048, *by_stage, *(16 * each for each in by_stage), 32_768}
    assert wanted <= numbers(comments(file))
    assert {rank["tiers"]["device"]["num_pages"] for rank in told["ranks"]} == {2048}
    assert told["ram_bytes"] == 10.5 * (1 << 30)
    assert "= 10.5 GiB when they are full" in comments(file)
    assert told["warnings"] == []


# -- hybrid models ------------------------------------------------------------------------------------------


class Hybrid(NamedTuple):
    """As its config.json has it: which layers are of which kind, and what both kinds keep."""

    name: str
    num_parameters: int
    weights: int  # bytes
    full: list[int]  # the numbers of the layers with full attention
    others: list[int]
    row: dict[str, int]
    row_elements: int
    window: int = 0
    states: Mapping[str, tuple[tuple[int, ...], str, int]] = {}  # name: shape, type, bytes of an element


def gpt_oss() -> Hybrid:
    hidden, layers, inner, experts, vocab, heads, kv_heads, dim = 2880, 24, 2880, 32, 201088, 64, 8, 64
    attention = 2 * hidden * heads * dim + heads * dim + hidden + 2 * (hidden + 1) * kv_heads * dim + heads  # and sinks
    matrices, biases = experts * 3 * hidden * inner, experts * (2 * inner + hidden)
    layer = attention + experts * (hidden + 1) + matrices + biases + 2 * hidden
    total = 2 * vocab * hidden + layers * layer + hidden
    packed = layers * matrices  # MXFP4: 4 bits, and a scale of 8 for each 32; all else is bfloat16
    weights = packed // 2 + packed // 32 + 2 * (total - packed)
    row = {"num_kv_heads": kv_heads, "head_dim": dim}
    every = range(layers)
    full, others = [n for n in every if n % 2], [n for n in every if not n % 2]
    return Hybrid("openai/gpt-oss-20b", total, weights, full, others, row, 2 * kv_heads * dim, 128)


def gemma_27b() -> Hybrid:
    hidden, layers, inner, vocab, heads, kv_heads, dim = 5376, 62, 21504, 262208, 32, 16, 128
    layer = 2 * hidden * heads * dim + 2 * hidden * kv_heads * dim + 2 * dim + 3 * hidden * inner + 4 * hidden
    total = vocab * hidden + layers * layer + hidden  # the output is the embedding's
    eyes, depth, wide, patches, patch = 1152, 27, 4304, (896 // 14) ** 2, 3 * 14 * 14
    block = 4 * (eyes + 1) * eyes + (eyes + 1) * wide + (wide + 1) * eyes + 4 * eyes
    total += depth * block + (patch + 1) * eyes + patches * eyes + 2 * eyes + eyes * hidden + eyes
    row = {"num_kv_heads": kv_heads, "head_dim": dim}
    full = [n for n in range(layers) if n % 6 == 5]
    others = [n for n in range(layers) if n % 6 != 5]
    return Hybrid("google/gemma-3-27b-it", total, 2 * total, full, others, row, 2 * kv_heads * dim, 1024)


def qwen3_next() -> Hybrid:
    hidden, layers, inner, experts, vocab, heads, kv_heads, dim = 2048, 48, 512, 512, 151936, 16, 2, 256
    keys, values, wide, kernel = 16, 32, 128, 4
    full = [n for n in range(layers) if n % 4 == 3]
    others = [n for n in range(layers) if n % 4 != 3]
    attention = 3 * hidden * heads * dim + 2 * hidden * kv_heads * dim + 2 * dim  # the query has a gate beside it
    channels = 2 * keys * wide + values * wide
    linear = hidden * (channels + values * wide) + hidden * 2 * values + channels * kernel + 2 * values + wide
    linear += values * wide * hidden
    feed = experts * hidden + (experts + 1) * 3 * hidden * inner + hidden
    total = 2 * vocab * hidden + layers * (feed + 2 * hidden) + len(full) * attention + len(others) * linear + hidden
    total += attention + feed + 2 * hidden + 2 * hidden * hidden + 3 * hidden  # the layer that predicts further
    row = {"num_kv_heads": kv_heads, "head_dim": dim}
    states = {
        "conv": ((channels, kernel - 1), "bfloat16", 2),
        "ssm": ((values, wide, wide), "float32", 4),
    }
    name = "Qwen/Qwen3-Next-80B-A3B-Instruct-FP8"
    return Hybrid(name, total, total, full, others, row, 2 * kv_heads * dim, 0, states)


HYBRIDS = [
    ("gpt-oss-20b.toml", gpt_oss()),
    ("gemma-3-27b.toml", gemma_27b()),
    ("qwen3-next-80b-a3b.toml", qwen3_next()),
]


def test_the_hybrids_have_the_parameters_that_they_are_published_with() -> None:
    assert [model.num_parameters for _, model in HYBRIDS] == [20_914_757_184, 27_432_406_640, 81_324_862_720]


@pytest.mark.parametrize(("name", "model"), HYBRIDS, ids=[name for name, _ in HYBRIDS])
def test_the_arithmetic_of_a_hybrid_is_the_models(name: str, model: Hybrid) -> None:
    file = CONFIGS / name
    config = load(file)
    pool = config.pool
    assert (config.model_name, pool.device, pool.num_layers) == (model.name, "cuda", len(model.full))
    assert {key: getattr(pool, key) for key in model.row} == model.row
    assert sorted([*model.full, *model.others]) == list(range(len(model.full) + len(model.others)))
    layer_bytes = model.row_elements * 2
    token_bytes = layer_bytes * len(model.full)
    page_bytes = token_bytes * pool.page_size
    wanted = {model.num_parameters, model.weights, CARD - model.weights, layer_bytes, token_bytes, page_bytes}
    if config.window is not None:
        assert (config.window.size, config.window.layers) == (model.window, model.others)
        other_bytes = layer_bytes * len(model.others) * pool.page_size
        wanted |= {other_bytes, other_bytes // pool.page_size, other_bytes * -(-model.window // pool.page_size)}
        kind, size, unit = "window", config.window.bytes, pool.page_size
    else:
        assert config.mamba is not None
        assert config.mamba.layers == model.others
        states = {state.name: (tuple(state.shape), state.dtype) for state in config.mamba.states}
        assert states == {name: (shape, dtype) for name, (shape, dtype, _) in model.states.items()}
        arrays = [math.prod(shape) * item for shape, _, item in model.states.values()]
        other_bytes = sum(arrays) * len(model.others)
        wanted |= {*arrays, sum(arrays), other_bytes, other_bytes // token_bytes}
        kind, size, unit = "mamba", config.mamba.bytes, 1
    assert pool.size is not None
    assert size is not None
    assert config.host.size is not None
    kept_back = CARD - model.weights - pool.size - size
    assert 12e9 < kept_back < 14e9
    assert f"{kept_back / 1e9:.1f} GB kept back" in comments(file)
    pages, others, host_pages = pool.size // page_bytes, size // other_bytes, config.host.size // page_bytes
    host_others = host_pages * others // pages
    host_bytes = host_pages * page_bytes + host_others * other_bytes
    assert host_bytes < 200 * 10**9, "of 2 TB an eighth, and room for all else"
    wanted |= {pages, others, host_pages, host_others, host_others * other_bytes, host_bytes}
    wanted |= {pages * pool.page_size, host_pages * pool.page_size, others * unit, host_others * unit}
    assert {each for each in wanted if each >= 1000} <= numbers(comments(file))

    told = checked(file)
    (rank,) = told["ranks"]
    (companion,) = rank["companions"]
    assert (rank["layer_bytes"], rank["token_bytes"], rank["page_bytes"]) == (layer_bytes, token_bytes, page_bytes)
    assert (companion["kind"], companion["page_bytes"]) == (kind, other_bytes)
    assert [rank["tiers"][tier]["num_pages"] for tier in ("device", "host")] == [pages, host_pages]
    assert [companion["tiers"][tier]["num_pages"] for tier in ("device", "host")] == [others, host_others]
    assert told["device_bytes"] == pages * page_bytes + others * other_bytes
    assert told["ram_bytes"] == told["host_bytes"] == host_bytes


def test_what_the_comments_of_hybrids_say_beside_is_so_too() -> None:
    oss, gemma, qwen = (comments(CONFIGS / name) for name, _ in HYBRIDS)
    matrices = 24 * 32 * 3 * 2880 * 2880
    rest = gpt_oss().num_parameters - matrices
    assert {matrices, matrices // 32 * 17, rest, 2 * rest} <= numbers(oss)
    assert 8900 // 2 in numbers(oss), "ends of prompts"
    assert 436_207_616 // 81_920 == 5_324, "and a half"
    assert 5_325 in numbers(gemma)
    assert f"{1467 // 16} ends of prompts" in gemma
    assert f"{976_512 // 4096} for one every 4,096 of these tokens" in qwen


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.toml")), ids=lambda file: file.name)
def test_every_configuration_is_checked_for_a_host_of_two_terabytes_in_words_too(file: Path) -> None:
    command = [sys.executable, "-m", "sglcache", "check", str(file), "--ram", "2 TB"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    own = load(file).for_stage(0)
    geometry = Geometry.of(own)
    told = [geometry.layer_bytes, geometry.token_bytes, geometry.page_bytes, geometry.num_pages]
    for each in companions_of(own, geometry):
        form = each.form
        told += [form.layer_bytes, form.page_bytes, form.num_pages, form.host_pages, each.window, each.interval]
        assert f"\n  {each.kind:<7} {form.num_layers} layers, " in done.stdout
    for number in filter(None, told):
        assert f"{number:,}" in done.stdout
    assert "of --ram:" in done.stdout


def test_a_card_is_not_served_and_says_so() -> None:
    command = [sys.executable, "-m", "sglcache", "serve", "--config", str(CONFIGS / "llama-3.1-8b-h200.toml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith('error[config]: pool.device = "cuda": `sglcache check` knows it, and this version')
    assert done.stderr.count("\n") == 1


def test_what_serve_refuses_check_refuses_with_the_same_words(tmp_path: Path) -> None:
    file = tmp_path / "big.toml"
    file.write_text('[pool]\nsize = "2 TB"\n[host]\npool_ratio = 0.5\n')
    done = [
        subprocess.run([sys.executable, "-m", "sglcache", *how, str(file)], capture_output=True, text=True, check=False)
        for how in (["check"], ["serve", "--config"])
    ]
    assert [each.returncode for each in done] == [2, 2]
    assert done[0].stderr == done[1].stderr
    assert "error[config]: the pools take 3 TB" in done[0].stderr
    assert 'write pool.size = "' in done[0].stderr
    assert done[0].stdout == ""


def test_a_size_without_a_unit_is_refused_in_a_file_with_the_remedy(tmp_path: Path) -> None:
    file = tmp_path / "bare.toml"
    file.write_text("[pool]\nsize = 112000000000\n")
    with pytest.raises(ConfigError, match=rf"pool\.size = 112000000000 \({file}\): write a size with its unit"):
        load(file)
    done = subprocess.run(
        [sys.executable, "-m", "sglcache", "check", "--ram", "2000"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "error[bad_request]: --ram 2000: write a number and a unit" in done.stderr
    assert parse_size("2 TB") == 2 * 10**12
