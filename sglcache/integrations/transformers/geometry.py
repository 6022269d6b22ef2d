"""What the daemon's pages must look like for a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from sglcache.errors import ConfigError

if TYPE_CHECKING:
    from sglcache.client import Client, Worker


class _Heads(NamedTuple):
    num_kv_heads: int
    head_dim: int


def pool_settings(
    config: Any, *, page_size: int = 16, num_tokens: int = 1 << 16, dtype: str | None = None, num_shards: int = 1
) -> dict[str, int | str]:
    """The `[pool]` section of the daemon's configuration for a model of this transformers `config`.

    `dtype` (torch's name) is the config's where it says one, else float32: it must be that of the model as it runs.
    ConfigError: the model keeps something else than K and V of every token (windows, states).

    Of a model with latent attention (DeepSeek-V2 and later) the latents are cached, as transformers' own cache has
    them: one head whose K is the latent (`kv_lora_rank`) and whose V is the rotated key that all heads share
    (`qk_rope_head_dim`), padded to the same width. Each shard has a whole replica.
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
    heads = _heads(text, num_shards)
    return {
        "page_size": page_size,
        "num_tokens": num_tokens,
        "num_layers": text.num_hidden_layers,
        "num_kv_heads": heads.num_kv_heads,
        "head_dim": heads.head_dim,
        "dtype": dtype or _dtype_name(getattr(text, "dtype", None)),
        "num_shards": num_shards,
    }


def check_geometry(config: Any, dtype: str, member: Client | Worker) -> None:
    """ConfigError, with every difference: the daemon's pages are of another form than the model's KV."""
    want = pool_settings(config, dtype=dtype, num_shards=member.geometry.num_shards)
    wrong = [
        f"pool.{name} = {have} and the model needs {want[name]}"
        for name in ("num_layers", "num_kv_heads", "head_dim", "dtype")
        if (have := getattr(member.geometry, name)) != want[name]
    ]
    if wrong:
        raise ConfigError(f"the daemon at {member.socket} serves another model: {'; '.join(wrong)}")


def _heads(text: Any, num_shards: int) -> _Heads:
    latents = getattr(text, "kv_lora_rank", None)
    if latents is not None:
        return _Heads(num_shards, max(latents, text.qk_rope_head_dim))
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return _Heads(getattr(text, "num_key_value_heads", None) or text.num_attention_heads, head_dim)


def _dtype_name(dtype: Any) -> str:
    return "float32" if dtype is None else str(dtype).removeprefix("torch.")
