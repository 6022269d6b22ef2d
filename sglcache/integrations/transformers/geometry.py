"""What the daemon's pages must look like for a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglcache.errors import ConfigError

if TYPE_CHECKING:
    from sglcache.client import Client, Worker


def pool_settings(
    config: Any, *, page_size: int = 16, num_tokens: int = 1 << 16, dtype: str | None = None, num_shards: int = 1
) -> dict[str, int | str]:
    """The `[pool]` section of the daemon's configuration for a model of this transformers `config`.

    `dtype` (torch's name) is the config's where it says one, else float32: it must be that of the model as it runs.
    ConfigError: the model keeps something else than K and V of every token (windows, states).

    Of a model with latent attention (DeepSeek-V2 and later) the latents are cached, as transformers' own cache has
    them: a row of the latent (`kv_lora_rank`) and the rotated key that all heads share (`qk_rope_head_dim`). Each shard
    has a whole replica.
    """
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    if not kinds and getattr(text, "sliding_window", None):
        kinds = {"sliding_attention"}
    kinds.discard("full_attention")
    if kinds:
        raise ConfigError(f"{text.model_type} has layers of {', '.join(sorted(kinds))}; only full attention is cached")
    if not getattr(text, "is_causal", True):
        raise ConfigError(f"{text.model_type} attends to what comes later; only what can't change is cached")
    return {
        "page_size": page_size,
        "num_tokens": num_tokens,
        "num_layers": text.num_hidden_layers,
        **_row(text),
        "dtype": dtype or _dtype_name(getattr(text, "dtype", None)),
        "num_shards": num_shards,
    }


def check_geometry(config: Any, dtype: str, member: Client | Worker) -> None:
    """ConfigError, with every difference: the daemon's pages are of another form than the model's KV."""
    want = pool_settings(config, dtype=dtype, num_shards=member.geometry.num_shards)
    have = {"num_layers": member.geometry.num_layers, "dtype": member.geometry.dtype, **_row_of(member)}
    wrong = [
        f"pool.{name} = {have.get(name, 'nothing')} and the model needs {want.get(name, 'none')}"
        for name in {**have, **_row(config.get_text_config())}
        if have.get(name) != want.get(name)
    ]
    if wrong:
        raise ConfigError(f"the daemon at {member.socket} serves another model: {'; '.join(wrong)}")


def _row(text: Any) -> dict[str, int]:
    """What a model keeps of a token in a layer, as `[pool]` says it."""
    if getattr(text, "kv_lora_rank", None) is not None:
        return {"kv_lora_rank": text.kv_lora_rank, "qk_rope_head_dim": text.qk_rope_head_dim}
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return {
        "num_kv_heads": getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        "head_dim": head_dim,
    }


def _row_of(member: Client | Worker) -> dict[str, int]:
    """The same of a daemon's pages."""
    geometry = member.geometry
    if geometry.is_latent:
        return {"kv_lora_rank": geometry.kv_lora_rank, "qk_rope_head_dim": geometry.qk_rope_head_dim}
    row = {"num_kv_heads": geometry.num_kv_heads, "head_dim": geometry.head_dim}
    return row if geometry.v_head_dim == geometry.head_dim else {**row, "v_head_dim": geometry.v_head_dim}


def _dtype_name(dtype: Any) -> str:
    return "float32" if dtype is None else str(dtype).removeprefix("torch.")
