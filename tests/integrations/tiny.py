"""Small models with random weights, and what they say without our cache."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    LaraMiniConfig,
    LaraMiniForCausalLM,
    Lfm3Config,
    Lfm3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

VOCAB = 199
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2, **SIZES}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    **EXPERTS,
    **SIZES,
}

FAMILIES: dict[str, Callable[..., Any]] = {
    "llama": lambda **sizes: LlamaForCausalLM(LlamaConfig(**{**GROUPED, **sizes})),
    "qwen2": lambda **sizes: Qwen2ForCausalLM(Qwen2Config(**{**GROUPED, **sizes})),
    "qwen3_moe": lambda **sizes: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(head_dim=16, num_experts=4, mlp_only_layers=[0], **EXPERTS, **{**GROUPED, **sizes})
    ),
    "deepseek_v2": lambda **sizes: DeepseekV2ForCausalLM(DeepseekV2Config(q_lora_rank=None, **{**LATENT, **sizes})),
    "deepseek_v3": lambda **sizes: DeepseekV3ForCausalLM(
        DeepseekV3Config(q_lora_rank=20, n_group=2, topk_group=1, **{**LATENT, **sizes})
    ),
}

WINDOW = 24  # tokens: shorter than prompts, and no multiple of a page
ALTERNATING: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
    **GROUPED,
}
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 32,
    **GROUPED,
}
DELTA: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 4,
    "shared_expert_intermediate_size": 32,
    "pad_token_id": 0,
    "eos_token_id": 1,
    **EXPERTS,
    **GROUPED,
}

WINDOWS: dict[str, Callable[..., Any]] = {
    "mistral": lambda **sizes: MistralForCausalLM(MistralConfig(sliding_window=WINDOW, **{**GROUPED, **sizes})),
    "gemma2": lambda **sizes: Gemma2ForCausalLM(Gemma2Config(**{**ALTERNATING, **sizes})),
    "gemma3": lambda **sizes: Gemma3ForCausalLM(Gemma3TextConfig(**{**ALTERNATING, **sizes})),
    "gpt_oss": lambda **sizes: GptOssForCausalLM(
        GptOssConfig(num_local_experts=4, num_experts_per_tok=2, rope_parameters=None, **{**ALTERNATING, **sizes})
    ),
}
"""Models with layers that see a window: the first has no others."""

STATES: dict[str, Callable[..., Any]] = {
    "qwen3_next": lambda **sizes: Qwen3NextForCausalLM(
        Qwen3NextConfig(layer_types=["linear_attention", "full_attention"], **{**DELTA, **sizes})
    ),
    "granite_hybrid": lambda **sizes: GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(
            mamba_expand=2,
            layer_types=["linear_attention", "full_attention"],
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=32,
            **{**MAMBA2, **sizes},
        )
    ),
    "falcon_h1": lambda **sizes: FalconH1ForCausalLM(FalconH1Config(mamba_d_ssm=128, **{**MAMBA2, **sizes})),
}
"""Models with layers that keep a state: delta rule, Mamba-2, and Mamba-2 beside attention in every layer."""

UNIFIED: dict[str, Callable[..., Any]] = {
    "lara_mini": lambda **sizes: LaraMiniForCausalLM(
        LaraMiniConfig(
            sliding_window=WINDOW,
            **{
                **DELTA,
                "num_hidden_layers": 3,
                "layer_types": ["linear_attention", "sliding_attention", "full_attention"],
                **sizes,
            },
        )
    ),
    "lfm3": lambda **sizes: Lfm3ForCausalLM(
        Lfm3Config(
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **{
                **ALTERNATING,
                "num_hidden_layers": 3,
                "layer_types": ["conv", "sliding_attention", "full_attention"],
                **sizes,
            },
        )
    ),
}
"""Models with both, and full attention as well; the state of the second is a convolution's alone."""

HYBRIDS = {**WINDOWS, **STATES, **UNIFIED}


def forgetful() -> Any:
    """A model with Mamba-1 layers, of which transformers takes a state further by one token at a time only."""
    return JambaForCausalLM(
        JambaConfig(
            num_experts=2,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            mamba_d_state=8,
            **GROUPED,
        )
    )


def build(family: str, **sizes: int) -> Any:
    """The same weights at each call, in every process. They are large enough that a wrong page shows in the logits.

    `sizes` are laid over `SIZES`.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = {**FAMILIES, **HYBRIDS}[family](**sizes).eval()
    model.generation_config.eos_token_id = None  # it never says that it is done
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.mul_(4.0)
    return model


def prompt(num_tokens: int, seed: int = 0, prefix: Sequence[int] = ()) -> list[int]:
    """`prefix`, and random tokens up to `num_tokens`."""
    generator = torch.Generator().manual_seed(seed)
    return [*prefix, *torch.randint(0, VOCAB, (num_tokens - len(prefix),), generator=generator).tolist()]


@torch.inference_mode()
def without_cache(model: Any, tokens: Sequence[int], num_prompt: int) -> Tensor:
    """Logits [len(tokens) - num_prompt, vocab] of every token after the prompt, all at once and with no cache."""
    logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0, num_prompt - 1 : -1]
    return logits


def greedy(model: Any, tokens: Sequence[int], num_new: int) -> list[int]:
    """The likeliest continuation, with no cache."""
    said = list(tokens)
    for _ in range(num_new):
        said.append(int(without_cache(model, [*said, 0], len(said))[-1].argmax()))
    return said[len(tokens) :]


@torch.inference_mode()
def with_own_cache(
    model: Any,
    tokens: Sequence[int],
    num_prompt: int,
    chunks: Sequence[tuple[int, int]],
    hit: int | None = None,
    canonical: bool = False,
) -> Tensor:
    """The same logits, with transformers' cache: the prompt in `chunks`, then a token at a time.

    With `hit` the chunks are what an earlier request computed, of which so many tokens are taken and the rest computed
    anew. With `canonical` what comes after reads the earlier request's K and V of that rest too.
    """
    cache = DynamicCache(config=model.config)

    def forward(start: int, stop: int, cache: DynamicCache) -> Tensor:
        ids = torch.tensor([tokens[start:stop]])
        last: Tensor = model(ids, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        return last

    for start, stop in chunks:
        last = forward(start, stop, cache)
    if hit is not None:
        ours = copy.deepcopy(cache)
        ours.crop(hit - num_prompt)  # negative: so many tokens less
        last = forward(hit, num_prompt, ours)
        cache = cache if canonical else ours
    return torch.stack([last, *(forward(at, at + 1, cache) for at in range(num_prompt, len(tokens) - 1))])


@torch.inference_mode()
def cache_of(model: Any, tokens: Sequence[int]) -> DynamicCache:
    """What transformers keeps of a prompt."""
    cache = DynamicCache(config=model.config)
    model(torch.tensor([tokens]), cache=cache, use_cache=True)
    return cache
