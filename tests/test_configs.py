"""The configurations for real models: their arithmetic is done anew from the shapes that the models are published with.

What a comment says must be what comes out here, and what `sglcache check` prints.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sglcache.config import load, parse_size
from sglcache.errors import ConfigError
from sglcache.memory.geometry import Geometry

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


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.toml")), ids=lambda file: file.name)
def test_every_configuration_is_checked_for_a_host_of_two_terabytes_in_words_too(file: Path) -> None:
    command = [sys.executable, "-m", "sglcache", "check", str(file), "--ram", "2 TB"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    geometry = Geometry.of(load(file).for_stage(0))
    for number in (geometry.layer_bytes, geometry.token_bytes, geometry.page_bytes, geometry.num_pages):
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
