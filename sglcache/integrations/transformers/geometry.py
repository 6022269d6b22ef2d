"""What the daemon's pages and states must look like for a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import get_layer_types_and_kwargs

from sglcache.errors import ConfigError

if TYPE_CHECKING:
    from sglcache.client import Client, Worker
    from sglcache.client.client import WindowPool

KEPT = {
    "full_attention": ("full",),
    "sliding_attention": ("window",),
    "linear_attention": ("mamba",),
    "conv": ("mamba",),
    "hybrid": ("full", "mamba"),
    "hybrid_sliding": ("window", "mamba"),
    "dummy": (),
}
"""What a layer of one of transformers' types keeps of a request, by the pool that has it."""

STATES = ("conv", "ssm")
"""What transformers calls a layer's convolutional and its recurrent state; a layer has one or both."""

INTERVAL = 1024
"""Tokens from one state that a runner commits to the next, where nothing is said."""

ROOM = ("page_size", "num_tokens", "num_shards", "num_slots", "interval")
"""What a daemon may have otherwise than `settings` proposes."""


class Layers(NamedTuple):
    """A model's layers by what they keep: the model's number of each, in the pool's order."""

    full: tuple[int, ...]
    window: tuple[int, ...]
    mamba: tuple[int, ...]


def layers_of(config: Any) -> Layers:
    """ConfigError: a layer keeps something else than all of its K and V, a window of them, or a state."""
    text = config.get_text_config()
    if not getattr(text, "is_causal", True) or getattr(text, "use_bidirectional_attention", None):
        raise ConfigError(f"{text.model_type} attends to what comes later; only what can't change is cached")
    types, arguments = get_layer_types_and_kwargs(text)
    if unknown := {each for each in types if each not in KEPT}:
        raise ConfigError(f"{text.model_type} has layers of {', '.join(sorted(unknown))}, which are not cached here")
    if any(each.get("number_of_states", 1) > 1 for each in arguments):
        raise ConfigError(f"{text.model_type} has layers of several states each; one is cached")
    if getattr(text, "kv_sharing_modes", None) is not None:
        raise ConfigError(f"{text.model_type} has layers that read what others keep; that is not cached here")
    return Layers(*(tuple(n for n, each in enumerate(types) if kind in KEPT[each]) for kind in Layers._fields))


def settings(
    config: Any,
    *,
    page_size: int = 16,
    num_tokens: int = 1 << 16,
    dtype: str | None = None,
    num_shards: int = 1,
    interval: int | None = None,
    num_states: int | None = None,
) -> dict[str, dict[str, Any]]:
    """The sections of the daemon's configuration for a model of this transformers `config`: `[pool]` always, `[window]`
    for layers that attend to a window, `[mamba]` for layers that keep a state.

    `dtype` (torch's name) is the config's where it says one, else float32: it must be that of the model as it runs.
    `interval`: tokens between the states that are committed, a multiple of the page size; by default 1,024 or a little
    less. `num_states`: by default as many as take the room of the pool. ConfigError: the model keeps something else.

    Of a model with latent attention (DeepSeek-V2 and later) the latents are cached, as transformers' own cache has
    them: a row of the latent (`kv_lora_rank`) and the rotated key that all heads share (`qk_rope_head_dim`). Each shard
    has a whole replica. States are as transformers' own cache has them, too.
    """
    text = config.get_text_config()
    layers = layers_of(config)
    dtype = dtype or _dtype_name(getattr(text, "dtype", None))
    full, window = (_row_of_all(text, each) for each in (layers.full, layers.window))
    if not layers.full and not layers.window:
        raise ConfigError(f"{text.model_type} has no layer of attention; states alone are not cached here")
    if layers.window and "kv_lora_rank" in window:
        raise ConfigError(f"{text.model_type} has latents of windows; only those of everything are cached")
    found: dict[str, dict[str, Any]] = {
        "pool": {
            "page_size": page_size,
            "num_tokens": num_tokens,
            "num_layers": len(layers.full),
            **(full if layers.full else window),
            "dtype": dtype,
            "num_shards": num_shards,
        }
    }
    if layers.window:
        others = window if layers.full and window != full else {}
        found["window"] = {"size": _window_of(text, layers.window), "num_layers": len(layers.window), **others}
        if not layers.full:  # whose pages are names: what takes the room is the window's
            found["window"]["num_tokens"] = num_tokens
    if layers.mamba:
        if num_shards > 1:
            raise ConfigError(f"{text.model_type} keeps states; a model with states is not spread over shards here")
        states = _states(text, layers.mamba, dtype)
        room = num_tokens * len(layers.full or layers.window) * _row_bytes(found["pool"])
        each = len(layers.mamba) * sum(math.prod(state["shape"]) * _itemsize(state["dtype"]) for state in states)
        found["mamba"] = {
            "num_layers": len(layers.mamba),
            "states": states,
            "num_slots": num_states or max(8, room // each),
            "interval": interval or max(1, INTERVAL // page_size) * page_size,
        }
    return found


def pool_settings(
    config: Any, *, page_size: int = 16, num_tokens: int = 1 << 16, dtype: str | None = None, num_shards: int = 1
) -> dict[str, Any]:
    """The `[pool]` of `settings`, for a model that needs nothing else. ConfigError: it has windows or states."""
    found = settings(config, page_size=page_size, num_tokens=num_tokens, dtype=dtype, num_shards=num_shards)
    if others := found.keys() - {"pool"}:
        raise ConfigError(
            f"{config.get_text_config().model_type} needs more than [pool]: {', '.join(sorted(others))} of `settings`"
        )
    return found["pool"]


def state_modules(model: Any) -> dict[int, nn.Module]:
    """By their layer, the modules of a model that keep states: those with a convolution."""
    return {
        int(module.layer_idx): module
        for module in model.modules()
        if hasattr(module, "layer_idx") and any(isinstance(child, nn.Conv1d) for child in module.children())
    }


def check_geometry(config: Any, dtype: str, member: Client | Worker) -> None:
    """ConfigError, with every difference: the daemon's pages are of another form than the model's KV."""
    wanted = settings(config, page_size=member.geometry.page_size, dtype=dtype, num_shards=member.geometry.num_shards)
    sections = {name: {key: value for key, value in found.items() if key not in ROOM} for name, found in wanted.items()}
    pool = sections["pool"]
    row = {name: value for name, value in pool.items() if name != "num_layers"}
    want = _under("pool", pool if pool["num_layers"] else {"num_layers": 0})
    have = _tokens_of("pool", member)
    if "window" in sections:
        want |= _under("window", {**row, **sections["window"]})
    if member.window is not None:
        have |= {"window.size": member.window.tokens, **_tokens_of("window", member.window)}
    want |= _under("mamba", sections.get("mamba", {}))
    if member.mamba is not None:
        geometry = member.mamba.geometry
        states = [{"name": it.name, "shape": list(it.shape), "dtype": it.dtype} for it in geometry.states]
        have |= {"mamba.num_layers": geometry.num_layers, "mamba.states": states}
    wrong = [
        f"{name} = {have.get(name, 'nothing')} and the model needs {want.get(name, 'none')}"
        for name in {**have, **want}
        if have.get(name) != want.get(name)
    ]
    if wrong:
        raise ConfigError(f"the daemon at {member.socket} serves another model: {'; '.join(wrong)}")


def _under(section: str, found: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{section}.{name}": value for name, value in found.items()}


def _tokens_of(section: str, pool: Client | Worker | WindowPool) -> dict[str, Any]:
    """What a daemon's pages of one kind are, as a configuration says it: of no layers nothing else."""
    geometry = pool.geometry
    found: dict[str, Any] = {"num_layers": geometry.num_layers}
    if geometry.num_layers:
        found["dtype"] = geometry.dtype
        if geometry.is_latent:
            found |= {"kv_lora_rank": geometry.kv_lora_rank, "qk_rope_head_dim": geometry.qk_rope_head_dim}
        else:
            found |= {"num_kv_heads": geometry.num_kv_heads, "head_dim": geometry.head_dim}
            if geometry.v_head_dim != geometry.head_dim:
                found["v_head_dim"] = geometry.v_head_dim
    return _under(section, found)


def _row(text: Any) -> dict[str, int]:
    """What a model keeps of a token in a layer, as `[pool]` says it."""
    if getattr(text, "kv_lora_rank", None) is not None:
        return {"kv_lora_rank": text.kv_lora_rank, "qk_rope_head_dim": text.qk_rope_head_dim}
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return {
        "num_kv_heads": getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        "head_dim": head_dim,
    }


def _row_of_all(text: Any, layers: Sequence[int]) -> dict[str, int]:
    """The same of some layers, which are alike; {} of none."""
    rows = [_row(text.per_layer_config[each]) for each in layers]
    if any(row != rows[0] for row in rows):
        raise ConfigError(f"{text.model_type} has layers of one kind that differ: {rows[0]}, ...; a pool has one form")
    return rows[0] if rows else {}


def _window_of(text: Any, layers: Sequence[int]) -> int:
    sizes = {int(text.per_layer_config[each].sliding_window) for each in layers}
    if len(sizes) > 1:
        raise ConfigError(f"{text.model_type} has windows of {sorted(sizes)} tokens; a pool has those of one size")
    return sizes.pop()


def _states(text: Any, layers: Sequence[int], dtype: str) -> list[dict[str, Any]]:
    """What a layer keeps of a request, by asking the model's own modules, on a device that computes nothing."""
    with torch.device("meta"), torch.inference_mode():
        model = AutoModelForCausalLM.from_config(text, dtype=getattr(torch, dtype))
        modules = state_modules(model)
        if set(modules) != set(layers):
            raise ConfigError(f"{text.model_type} keeps states in a way of its own; no module of it tells their form")
        cache = DynamicCache(config=text)
        for module in modules.values():
            module(hidden_states=torch.zeros(1, 2, text.hidden_size, dtype=model.dtype), cache=cache)
    kept = [(cache.layers[each].conv_states[0], cache.layers[each].recurrent_states[0]) for each in layers]
    forms = [
        [
            {"name": name, "shape": list(state.shape[1:]), "dtype": _dtype_name(state.dtype)}
            for name, state in zip(STATES, states, strict=True)
            if state is not None
        ]
        for states in kept
    ]
    if any(form != forms[0] for form in forms):
        raise ConfigError(f"{text.model_type} has states of several forms; a pool has those of one")
    return forms[0]


def _row_bytes(pool: Mapping[str, Any]) -> int:
    if "kv_lora_rank" in pool:
        width = pool["kv_lora_rank"] + pool["qk_rope_head_dim"]
    else:
        width = 2 * pool["num_kv_heads"] * pool["head_dim"]
    return int(width) * _itemsize(pool["dtype"])


def _itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


def _dtype_name(dtype: Any) -> str:
    return "float32" if dtype is None else str(dtype).removeprefix("torch.")
