"""One process's part of a forward pass: a model, and the pages that its member of the session maps.

Two seams of transformers meet here. The model is called with a `PagedBatch` for its cache: each attention module hands
it what the model caches of the new tokens (K and V, rotated already; latents, where a model has those), and gets back
what it attends to. The batch writes the one into pages and reads the other from them. And the attention itself is a
function that the model's configuration names: ours tells the requests of a step apart, which stand in one row one after
another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from sglcache.errors import ConfigError
from sglcache.integrations.transformers.geometry import check_geometry

if TYPE_CHECKING:
    from sglcache.client import Client, Worker

IMPLEMENTATION = "sglcache_paged"
"""Our name among transformers' attention implementations. It has no mask function, so models make no mask."""

FOREIGN = ("sliding_window", "position_bias", "softcap", "s_aux")
"""What an attention module may ask for beside `scaling`, and would not get here."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """What one request wants of a step: to compute `tokens`, which begin at position `start`."""

    tokens: bytes  # uint32 [n], n >= 1
    start: int  # everything before it is in the pages, or on its way there
    slots: bytes  # int32 [num_pages], the page table; pages from `start` on are ours to write
    load: tuple[int, int] | None  # (load slot, generation) to wait for, in every layer, before pages are read
    logits: bool  # the caller wants the last token's


class Executor(Protocol):
    """Where steps are computed: `PagedModel` in this process, or several of them in others."""

    vocab_size: int
    """Token ids are below it."""

    def run(self, parts: Sequence[Part]) -> Tensor:
        """Compute a step; the logits asked for, in order: float [num_asked, vocab], on the CPU.

        Once it returns, what it wrote is in the pages. A step that raised may be run again: it wrote only what it will
        write again. TransferError: a load failed.
        """
        ...

    def record(self, tickets: Sequence[int]) -> None:
        """Every step so far is behind these tickets of the session: let its workers say so."""
        ...


class PagedModel:
    """A causal language model of transformers over one shard's pages. One thread at a time."""

    def __init__(self, model: Any, member: Client | Worker) -> None:
        """Switches `model` to our attention, for good.

        ConfigError: the daemon's pages don't fit the model, are on another device, or it attends in a way of its own.
        """
        check_geometry(model.config, str(model.dtype).removeprefix("torch."), member)
        if not (model._supports_sdpa and model._supports_attention_backend):
            raise ConfigError(f"{type(model).__name__} attends in a way of its own; only torch's attention reads pages")
        pool, rank = member.pool, member.geometry.kv_lora_rank
        if rank:  # what such a model calls K is the latent, and its V the rotated key behind it
            self._layers = PagedLayers([kv[..., :rank] for kv in pool.kv], [kv[..., rank:] for kv in pool.kv])
        else:
            self._layers = PagedLayers(pool.k, pool.v)
        if model.device != self._layers.device:
            raise ConfigError(f"the model is on {model.device} and the daemon's pages are on {self._layers.device}")
        AttentionInterface.register(IMPLEMENTATION, paged_attention)
        model.set_attn_implementation(IMPLEMENTATION)
        self.model = model.eval()
        self.member = member
        self.vocab_size = int(model.config.get_text_config().vocab_size)

    @torch.inference_mode()
    def run(self, parts: Sequence[Part]) -> Tensor:
        batch = PagedBatch(self._layers, parts, self.member.wait_loaded)
        out = self.model(
            input_ids=batch.tokens[None],
            position_ids=batch.positions[None],
            cache=batch,
            use_cache=False,  # of its own
            logits_to_keep=batch.asked,
            paged=batch,
        )
        logits: Tensor = out.logits[0].float().cpu()
        if self._layers.device.type == "cuda":  # without logits nothing has waited for the kernels yet
            torch.cuda.synchronize(self._layers.device)
        return logits

    def record(self, tickets: Sequence[int]) -> None:
        """Nothing to say: the commands of a runner of one process name its event themselves."""


class PagedLayers:
    """A member's pages as a step needs them: to write tokens by page and offset, to read heads as rows of one axis.

    Reading is a gather. Its result stands as transformers' own cache would have it, head by head, so that attention
    runs over it equally fast and does the same arithmetic; and one index, made once a step, does for every layer.
    """

    def __init__(self, k: Sequence[Tensor], v: Sequence[Tensor]) -> None:
        """`k` and `v`: per layer [num_pages, page_size, heads, dim], each dim its own and contiguous."""
        self.num_layers = len(k)
        self.num_pages, self.page_size, self.heads, _ = k[0].shape
        self.dims = (k[0].shape[3], v[0].shape[3])
        self.dtype, self.device = k[0].dtype, k[0].device
        # In rows, from page to page, token to token, head to head; K's and V's.
        self._steps = [_steps(planes[0]) for planes in (k, v)]
        self.are_alike = self._steps[0] == self._steps[1]
        # Inference mode would make views that can't be written outside it.
        with torch.inference_mode(False):
            self.pages = tuple(zip(k, v, strict=True))
            self.rows = tuple(tuple(map(_as_rows, planes)) for planes in self.pages)

    def index(self, table: npt.NDArray[np.int64], length: int, plane: int = 0) -> npt.NDArray[np.int64]:
        """The rows [heads, length] of a request's tokens, by its page table; K's, or V's (1), if not alike."""
        page, token, head = self._steps[plane]
        first = (table[:, None] * page + np.arange(self.page_size) * token).reshape(-1)[:length]
        return first + (np.arange(self.heads) * head)[:, None]


def _steps(plane: Tensor) -> list[int]:
    *strides, _ = plane.stride()
    unit = math.gcd(*strides)
    return [stride // unit for stride in strides]


def _as_rows(plane: Tensor) -> Tensor:
    """[num_rows, dim], the rows a unit of the strides apart: what lies between heads is never named."""
    *strides, _ = plane.stride()
    num_rows = 1 + sum(step * (size - 1) for step, size in zip(_steps(plane), plane.shape, strict=False))
    return plane.as_strided((num_rows, plane.shape[3]), (math.gcd(*strides), 1))


class _Span(NamedTuple):
    """One request of a step."""

    rows: slice  # of the step's row, what it computes
    tokens: slice  # of all that is attended to, its own
    mask: Tensor | None  # bool [1, 1, n, length]; None: causal from the start, or all


class PagedBatch:
    """A step's requests one after another, and the model's cache while it computes them."""

    def __init__(
        self, layers: PagedLayers, parts: Sequence[Part], wait: Callable[[tuple[int, int], int], object]
    ) -> None:
        self._layers = layers
        self._wait = wait
        self._loads = [part.load for part in parts if part.load is not None]
        self.spans: list[_Span] = []
        new, pages, asked, rows, total = [], [], [], 0, 0
        index: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(1 if layers.are_alike else 2)]
        for part in parts:
            count = len(part.tokens) // 4
            length = part.start + count
            table = np.frombuffer(part.slots, "<i4")[: -(-length // layers.page_size)].astype(np.int64)
            new.append(np.arange(part.start, length))
            pages.append(table[new[-1] // layers.page_size])
            for plane, parts_of in enumerate(index):
                parts_of.append(layers.index(table, length, plane))
            mask = None
            if part.start and count > 1:
                mask = torch.arange(length, device=layers.device) <= self._tensor(new[-1])[:, None]
                mask = mask[None, None]
            self.spans.append(_Span(slice(rows, rows + count), slice(total, total + length), mask))
            rows += count
            total += length
            if part.logits:
                asked.append(rows - 1)
        tokens = np.frombuffer(b"".join(part.tokens for part in parts), "<u4").astype(np.int64)
        self.tokens = self._tensor(tokens)  # [rows]
        self.positions = self._tensor(np.concatenate(new))  # int64 [rows]
        self.asked = self._tensor(np.array(asked, np.int64))  # rows whose logits are wanted
        self._pages = self._tensor(np.concatenate(pages))  # int64 [rows]
        self._offsets = self.positions % layers.page_size
        # int64 [heads * total], K's and V's
        found = [self._tensor(np.concatenate(parts_of, axis=1).reshape(-1)) for parts_of in index]
        self._k_index, self._v_index = found[0], found[-1]

    def _tensor(self, array: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self._layers.device)

    def update(self, k: Tensor, v: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """As transformers' caches: keep what is new [1, heads, rows, dim]; give back all [1, heads, total, dim].

        K and V may differ in width. ConfigError: the pages were made for another form.
        """
        layers = self._layers
        if not layer < layers.num_layers or any(
            part.shape[1] != layers.heads or part.shape[3] != dim or part.dtype != layers.dtype
            for part, dim in zip((k, v), layers.dims, strict=True)
        ):
            raise ConfigError(
                f"layer {layer} caches {k.shape[1]} heads of {k.shape[3]} and {v.shape[3]} in {k.dtype}, and the pages "
                f"hold {layers.heads} of {layers.dims[0]} and {layers.dims[1]} in {layers.dtype}, in "
                f"{layers.num_layers} layers"
            )
        for pages, part in zip(layers.pages[layer], (k, v), strict=True):
            pages[self._pages, self._offsets] = part[0].transpose(0, 1)
        for load in self._loads:
            self._wait(load, layer)
        k_rows, v_rows = layers.rows[layer]
        return self._gather(k_rows, self._k_index), self._gather(v_rows, self._v_index)

    def _gather(self, rows: Tensor, index: Tensor) -> Tensor:
        # The one copy, which a kernel that reads page tables would save.
        return rows.index_select(0, index).view(1, self._layers.heads, -1, rows.shape[1])


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: PagedBatch,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface for a step: each request's rows of `query` over its own of `key` and `value`.

    [1, heads, rows, dim] and [1, kv_heads, total, dim] in, [1, rows, heads, dim] out. ConfigError: the module asks for
    what is none of plain causal attention.
    """
    assert attention_mask is None, "a mask means that the model was not called by PagedModel"
    for name in FOREIGN:
        if arguments.get(name) is not None:
            raise ConfigError(
                f"{type(module).__name__} attends with {name} = {arguments[name]!r}; that is not done here"
            )
    outputs = [
        sdpa_attention_forward(
            module,
            query[:, :, span.rows],
            key[:, :, span.tokens],
            value[:, :, span.tokens],
            span.mask,
            **arguments,
        )[0]
        for span in paged.spans
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), None
