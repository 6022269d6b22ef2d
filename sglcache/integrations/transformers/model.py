"""One process's part of a forward pass: a model, and the pages that its member of the session maps.

The seam is transformers' AttentionInterface: every attention module hands its new K and V (rotated already) to the
function that its config names, with whatever keyword arguments the model was called with. Ours writes them into the
pages and attends over the page table. The model itself is called without a cache of its own, on one row in which the
requests of a step stand one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from sglcache.integrations.transformers.geometry import check_geometry

if TYPE_CHECKING:
    from sglcache.client import Client, Worker

IMPLEMENTATION = "sglcache_paged"
"""Our name among transformers' attention implementations. It has no mask function, so models make no mask."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """What one request wants of a step: to compute `tokens`, which begin at position `start`."""

    tokens: bytes  # uint32 [n], n >= 1
    start: int  # everything before it is in the pages, or on its way there
    slots: bytes  # int32 [num_pages], the page table; pages from `start` on are ours to write
    load: tuple[int, int] | None  # (load slot, generation) to wait for, in every layer, before pages are read
    logits: bool  # the caller wants the last token's


class Executor(Protocol):
    """Where steps are computed: `PagedModel` in this process, or several of them in others."""

    def run(self, parts: Sequence[Part]) -> Tensor:
        """Compute a step; the logits asked for, in order: float [num_asked, vocab], on the CPU.

        A step that raised may be run again: it wrote only what it will write again. TransferError: a load failed.
        """
        ...

    def record(self, tickets: Sequence[int]) -> None:
        """Every step so far is behind these tickets of the session: let its workers say so."""
        ...


class PagedModel:
    """A causal language model of transformers over one shard's pages. One thread at a time."""

    def __init__(self, model: Any, member: Client | Worker) -> None:
        """Switches `model` to our attention, for good. ConfigError: the daemon's pages don't fit it."""
        check_geometry(model.config, str(model.dtype).removeprefix("torch."), member)
        AttentionInterface.register(IMPLEMENTATION, paged_attention)
        model.set_attn_implementation(IMPLEMENTATION)
        self.model = model.eval()
        self.member = member
        self._pool = member.pool  # made here: tensors that are made in inference mode can't be written outside it

    @torch.inference_mode()
    def run(self, parts: Sequence[Part]) -> Tensor:
        batch = PagedBatch(self.member, self._pool.k, self._pool.v, parts)
        out = self.model(
            input_ids=batch.tokens[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.asked,
            paged=batch,
        )
        logits: Tensor = out.logits[0]
        return logits

    def record(self, tickets: Sequence[int]) -> None:
        """Nothing to say: the commands of a runner of one process name its event themselves."""


class _Span(NamedTuple):
    """A request's rows of the step."""

    rows: slice
    length: int  # of the whole request once these rows are written
    table: Tensor  # int64 [ceil(length / page_size)]
    mask: Tensor | None  # bool [1, 1, n, length]; None: causal from the start, or all
    load: tuple[int, int] | None


class PagedBatch:
    """A step's requests one after another, and where each token's K and V go."""

    def __init__(
        self, member: Client | Worker, k: Sequence[Tensor], v: Sequence[Tensor], parts: Sequence[Part]
    ) -> None:
        page_size = member.geometry.page_size
        self._k, self._v = k, v  # per layer [num_pages, page_size, kv_heads, dim]
        self._wait: Callable[[tuple[int, int], int], None] = member.wait_loaded
        self._spans: list[_Span] = []
        rows, positions, pages, asked = 0, [], [], []
        for part in parts:
            num_tokens = len(part.tokens) // 4
            length = part.start + num_tokens
            table = np.frombuffer(part.slots, "<i4").astype(np.int64)[: -(-length // page_size)]
            new = np.arange(part.start, length)
            positions.append(new)
            pages.append(table[new // page_size])
            mask = None
            if part.start and num_tokens > 1:
                mask = torch.from_numpy(np.arange(length)[None] <= new[:, None])[None, None]
            self._spans.append(_Span(slice(rows, rows + num_tokens), length, torch.from_numpy(table), mask, part.load))
            rows += num_tokens
            if part.logits:
                asked.append(rows - 1)
        tokens = np.frombuffer(b"".join(part.tokens for part in parts), "<u4")
        self.tokens = torch.from_numpy(tokens.astype(np.int64))  # [rows]
        self.positions = torch.from_numpy(np.concatenate(positions))  # int64 [rows]
        self.asked = torch.tensor(asked, dtype=torch.int64)  # rows whose logits are wanted
        self._pages = torch.from_numpy(np.concatenate(pages))  # int64 [rows]
        self._offsets = self.positions % page_size

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """Write the layer's `key` and `value` [1, kv_heads, rows, dim] to the pages; [1, rows, heads, dim] of V."""
        layer = module.layer_idx
        # Pages hold one width for K and V; a model with two uses the first part of the shorter one.
        k = self._k[layer][..., : key.shape[-1]]  # [num_pages, page_size, kv_heads, dim]
        v = self._v[layer][..., : value.shape[-1]]
        k[self._pages, self._offsets] = key[0].transpose(0, 1)
        v[self._pages, self._offsets] = value[0].transpose(0, 1)
        outputs = []
        for span in self._spans:
            if span.load is not None:
                self._wait(span.load, layer)
            keys, values = (
                pool.index_select(0, span.table).flatten(0, 1)[: span.length].transpose(0, 1)[None] for pool in (k, v)
            )  # [1, kv_heads, length, dim]: the one copy, which a kernel that reads page tables would save
            output, _ = sdpa_attention_forward(
                module, query[:, :, span.rows], keys, values, span.mask, scaling=scaling, dropout=0.0
            )
            outputs.append(output)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: PagedBatch,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface over pages: [1, heads, rows, dim] in, [1, rows, heads, dim] out."""
    assert attention_mask is None, "a mask means that the model was not called by PagedModel"
    return paged.attend(module, query, key, value, scaling), None
