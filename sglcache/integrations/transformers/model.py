"""One process's part of a forward pass: a model, and the pages that its member of the session maps.

Three seams of transformers meet here. The model is called with a `PagedBatch` for its cache: each attention module
hands it what the model caches of the new tokens (K and V, rotated already; latents, where a model has those), and gets
back what it attends to: everything before, or a window of it. The batch writes the one into pages and reads the other
from them. The attention itself is a function that the model's configuration names: ours tells the requests of a step
apart, which stand in one row one after another. And a module that keeps a state is called once for each request (once
for all that decode), with the request's states for its cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from sglcache.client import Worker
from sglcache.errors import ConfigError
from sglcache.integrations.transformers.geometry import check_geometry, layers_of, state_modules

if TYPE_CHECKING:
    from sglcache.client import Client

IMPLEMENTATION = "sglcache_paged"
"""Our name among transformers' attention implementations. It has no mask function, so models make no mask."""

FOREIGN = ("position_bias",)
"""What an attention module may ask for, and would not get here."""

SPECIAL = ("softcap", "s_aux")
"""What it gets here, and not of torch's attention."""


class WindowPart(msgspec.Struct, frozen=True, array_like=True):
    """A request's pages of the layers that attend to a window."""

    first_page: int  # of the request: with it `slots` begins
    slots: bytes  # int32 [num_pages]; pages from the part's `start` on are ours to write


class StatePart(msgspec.Struct, frozen=True, array_like=True):
    """A request's states, by their slots, each of which has those of all layers."""

    source: int | None  # what the step begins with: the states after all before `start`; None: nothing
    targets: tuple[int, ...]  # where the states after the step are to be, once it is over; ours to write


class Part(msgspec.Struct, frozen=True, array_like=True):
    """What one request wants of a step: to compute `tokens`, which begin at position `start`."""

    tokens: bytes  # uint32 [n], n >= 1
    start: int  # everything before it is in the pages, or on its way there
    slots: bytes  # int32 [num_pages], the page table; pages from `start` on are ours to write
    load: tuple[int, int] | None  # (load slot, generation) to wait for, in every layer, before pages are read
    logits: bool  # the caller wants the last token's
    window: WindowPart | None = None
    states: StatePart | None = None


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

    def let_go(self) -> None:
        """The daemon's life is over: keep nothing of its pages. On a card the next life may have no other room."""
        ...

    def reattach(self, token: bytes, timeout_s: float) -> None:
        """The scheduler, or runner, has attached anew, with this token: go on with the pages of that session."""
        ...


class PagedModel:
    """A causal language model of transformers over one shard's pages. One thread at a time."""

    def __init__(self, model: Any, member: Client | Worker) -> None:
        """Switches `model` to our attention, for good.

        ConfigError: the daemon's pages don't fit the model, are on another device, or it attends in a way of its own.
        """
        check_geometry(model.config, str(model.dtype).removeprefix("torch."), member)
        text, numbers = model.config.get_text_config(), layers_of(model.config)
        modules = state_modules(model)
        # A model with states says that it does not: nobody but its own modules would run them.
        if not (_lets_us_attend(model) and (model._supports_attention_backend or modules)):
            raise ConfigError(f"{type(model).__name__} attends in a way of its own; only torch's attention reads pages")
        if set(modules) != set(numbers.mamba):
            raise ConfigError(f"{type(model).__name__} has states in other layers than its configuration says")
        self.member = member
        self._numbers = numbers
        self._pools, self._states = self._mapped()
        if numbers.mamba:
            assert self._states is not None
            first = numbers.mamba[0]
            one = StateLayers({name: planes[:1] for name, planes in self._states.planes.items()}, (first,))
            check_continues(modules[first], one, text.hidden_size, model.dtype)
        device = self._pools[0].device
        if model.device != device:
            raise ConfigError(f"the model is on {model.device} and the daemon's pages are on {device}")
        AttentionInterface.register(IMPLEMENTATION, paged_attention)
        model.set_attn_implementation(IMPLEMENTATION)
        for module in modules.values():
            module.forward = _by_request(module.forward)
        self.model = model.eval()
        self.vocab_size = int(text.vocab_size)

    def _mapped(self) -> tuple[list[PagedLayers], StateLayers | None]:
        """The pages, and the states, as the member has them now."""
        member, numbers = self.member, self._numbers
        pools: list[PagedLayers] = []
        states = None
        if numbers.full:
            pool, rank = member.pool, member.geometry.kv_lora_rank
            k: Sequence[Tensor] = [kv[..., :rank] for kv in pool.kv] if rank else pool.k
            # What a model of latents calls K is the latent, and its V the rotated key behind it.
            v: Sequence[Tensor] = [kv[..., rank:] for kv in pool.kv] if rank else pool.v
            pools.append(PagedLayers(k, v, numbers.full))
        if numbers.window:
            assert member.window is not None, "it was checked"
            pools.append(PagedLayers(member.window.k, member.window.v, numbers.window, member.window.tokens))
        if numbers.mamba:
            assert member.mamba is not None, "it was checked"
            states = StateLayers(member.mamba.states, numbers.mamba)
        return pools, states

    def let_go(self) -> None:
        self._pools, self._states = [], None
        self.member.drop_pools()

    def reattach(self, token: bytes, timeout_s: float) -> None:
        """As `Executor.reattach`; where the member is the runner itself, it has attached already."""
        if isinstance(self.member, Worker):
            self.member.reattach(token, timeout_s)
        self._pools, self._states = self._mapped()

    @torch.inference_mode()
    def run(self, parts: Sequence[Part]) -> Tensor:
        device = self._pools[0].device
        # On a card the stream waits, layer by layer, and the CPU goes on putting kernels into it.
        on_stream = device.type == "cuda"
        wait = self.member.wait_loaded
        if on_stream:
            wait = functools.partial(wait, on_stream=True)
        batch = PagedBatch(self._pools, parts, wait, self._states)
        out = self.model(
            input_ids=batch.tokens[None],
            position_ids=batch.positions[None],
            cache=batch,
            use_cache=False,  # of its own
            logits_to_keep=batch.asked,
            paged=batch,
        )
        if batch.unread:
            raise ConfigError(f"{type(self.model).__name__} attends in a way of its own; only torch's reads pages")
        batch.keep_states()
        logits: Tensor = out.logits[0].float().cpu()
        if on_stream:
            torch.cuda.synchronize(device)  # without logits nothing has waited for the kernels yet
            for part in parts:
                if part.load is not None:  # one that failed let the stream go on
                    self.member.wait_loaded(part.load)
        return logits

    def record(self, tickets: Sequence[int]) -> None:
        """Nothing to say: the commands of a runner of one process name its event themselves."""


def _lets_us_attend(model: Any) -> bool:
    """Whether its attention is all in what it calls the attention function with."""
    if model._supports_sdpa:
        return True
    # What torch's attention lacks, and ours has.
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    return capped or any(name.endswith(".sinks") for name, _ in model.named_parameters())


def check_continues(module: Any, layers: StateLayers, width: int, dtype: torch.dtype) -> None:
    """ConfigError: the module forgets its state where several tokens follow at once, as Mamba-1's do.

    Nothing in a model says so, so it is tried: what comes out must not be the same after two different states.
    """
    (layer,) = layers.numbers
    for name, (plane,) in layers.planes.items():
        planes = {each: [state.new_zeros(2, *state.shape[1:])] for each, (state,) in layers.planes.items()}
        planes[name][0][1] = 1.0
        rows = torch.arange(6, device=plane.device).view(2, 3)
        states = StateBatch(StateLayers(planes, (layer,)), rows, [StatePart(slot, ()) for slot in (0, 1)], lambda: None)
        hidden = torch.linspace(-1, 1, 3 * width, dtype=dtype, device=plane.device).view(1, 3, width).expand(2, -1, -1)
        out = module(hidden_states=hidden, cache=states)
        if not isinstance(out, Tensor):
            raise ConfigError(
                f"{type(module).__name__} has more to say than what comes out of it; that is not done here"
            )
        if torch.equal(out[0], out[1]):
            raise ConfigError(
                f"{type(module).__name__} forgets its {name} state where several tokens follow; a prompt can't go on "
                f"where the cache ends"
            )


class PagedLayers:
    """The pages of a member's layers of one kind as a step needs them: to write tokens by page and offset, to read
    heads as rows of one axis.

    Reading is a gather. Its result stands as transformers' own cache would have it, head by head, so that attention
    runs over it equally fast and does the same arithmetic; and one index, made once a step, does for every layer.
    """

    def __init__(
        self, k: Sequence[Tensor], v: Sequence[Tensor], numbers: Sequence[int] | None = None, window: int | None = None
    ) -> None:
        """`k` and `v`: per layer [num_pages, page_size, heads, dim], each dim its own and contiguous.

        `numbers`: the model's, of these layers; by default from 0. `window`: tokens that a query sees, itself included.
        """
        self.window = window
        self.num_layers = len(k)
        self.numbers = range(len(k)) if numbers is None else numbers
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

    def index(self, table: npt.NDArray[np.int64], tokens: slice, plane: int = 0) -> npt.NDArray[np.int64]:
        """The rows [heads, n] of some tokens of a page table; K's, or V's (1), if not alike."""
        page, token, head = self._steps[plane]
        first = (table[:, None] * page + np.arange(self.page_size) * token).reshape(-1)[tokens]
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


class StateLayers(NamedTuple):
    """A member's states: by name ("conv", "ssm") and layer [num_slots, *shape]."""

    planes: Mapping[str, Sequence[Tensor]]
    numbers: Sequence[int]  # the model's, of these layers


class _Span(NamedTuple):
    """One request of a step."""

    rows: slice  # of the step's row, what it computes
    tokens: slice  # of all that is attended to, its own
    mask: Tensor | None  # bool [1, 1, n, length]; None: causal from the start, or all


class PagedStep:
    """What a step writes and reads in the layers of one kind: the same in each of them."""

    def __init__(self, layers: PagedLayers, parts: Sequence[Part]) -> None:
        self.layers = layers
        self.spans: list[_Span] = []
        size, window = layers.page_size, layers.window
        pages, offsets, rows, total = [], [], 0, 0
        index: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(1 if layers.are_alike else 2)]
        for part in parts:
            count = len(part.tokens) // 4
            length = part.start + count
            new = np.arange(part.start, length)
            low = 0 if window is None else max(0, part.start - window + 1)  # nothing before it is attended to
            first, slots = 0, part.slots
            if window is not None:
                assert part.window is not None, "the caller knows of no window"
                first, slots = part.window.first_page, part.window.slots
            assert first <= low // size, f"pages from {first} on, and token {low} is needed"
            table = np.frombuffer(slots, "<i4")[low // size - first : -(-length // size) - first].astype(np.int64)
            pages.append(table[new // size - low // size])
            offsets.append(new % size)
            seen = slice(low % size, low % size + length - low)
            for plane, parts_of in enumerate(index):
                parts_of.append(layers.index(table, seen, plane))
            mask = None
            # None where transformers has none: with a mask that hides nothing torch may do another arithmetic.
            if (count > 1 and part.start) or (window is not None and length - low >= window):
                at, before = self._tensor(new)[:, None], torch.arange(low, length, device=layers.device)
                mask = before <= at
                if window is not None:
                    mask &= before > at - window
                mask = mask[None, None]
            self.spans.append(_Span(slice(rows, rows + count), slice(total, total + length - low), mask))
            rows += count
            total += length - low
        self._pages = self._tensor(np.concatenate(pages))  # int64 [rows]
        self._offsets = self._tensor(np.concatenate(offsets))
        # int64 [heads * total], K's and V's
        found = [self._tensor(np.concatenate(parts_of, axis=1).reshape(-1)) for parts_of in index]
        self._k_index, self._v_index = found[0], found[-1]

    def _tensor(self, array: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self.layers.device)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        for pages, part in zip(self.layers.pages[layer], (k, v), strict=True):
            pages[self._pages, self._offsets] = part[0].transpose(0, 1)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        k_rows, v_rows = self.layers.rows[layer]
        return self._gather(k_rows, self._k_index), self._gather(v_rows, self._v_index)

    def _gather(self, rows: Tensor, index: Tensor) -> Tensor:
        # The one copy, which a kernel that reads page tables would save.
        return rows.index_select(0, index).view(1, self.layers.heads, -1, rows.shape[1])


class StateBatch:
    """The states of some requests of a step, each with as many tokens, as a module that keeps states sees its cache.

    They are read once a layer, and held until all layers are computed: a step that failed has written none.
    """

    def __init__(
        self, layers: StateLayers, rows: Tensor, parts: Sequence[StatePart], ready: Callable[[], None]
    ) -> None:
        """`rows`: int64 [len(parts), n], where in the step's row their tokens are. All have a source, or none has."""
        self.rows = rows
        self._layers = layers
        self._at = {number: place for place, number in enumerate(layers.numbers)}
        self._parts = parts
        self._ready = ready
        sources = [part.source for part in parts if part.source is not None]
        self._sources = torch.tensor(sources, device=rows.device) if sources else None
        self._now: dict[tuple[str, int], Tensor] = {}

    def get_conv_state(self, layer: int, state_idx: int = 0) -> Tensor | None:
        return self._get("conv", layer)

    def get_recurrent_state(self, layer: int, state_idx: int = 0) -> Tensor | None:
        return self._get("ssm", layer)

    def update_conv_state(self, new: Tensor, layer: int, state_idx: int = 0, **_: object) -> Tensor:
        """As transformers' caches: [len(parts), channels, n] and what was before it, of which the end is kept."""
        plane = self._plane("conv", layer)
        width = plane.shape[-1]
        before = self._get("conv", layer)
        if before is None:
            whole = nn.functional.pad(new, (max(0, width - new.shape[-1]), 0))
        else:
            whole = torch.cat([before, new], dim=-1)
        self._now["conv", layer] = whole[..., -width:].to(plane.dtype)
        return whole

    def update_recurrent_state(self, new: Tensor, layer_idx: int, state_idx: int = 0, **_: object) -> Tensor:
        self._now["ssm", layer_idx] = new = new.to(self._plane("ssm", layer_idx).dtype)
        return new

    def has_previous_state(self, layer: int | None = None, state_idx: int | None = None) -> bool:
        return self._sources is not None

    def is_recording_past(self, layer: int) -> bool:
        return False

    def keep(self) -> None:
        """Write what became of the states to where they are wanted."""
        pairs = [(row, target) for row, part in enumerate(self._parts) for target in part.targets]
        rows, targets = (torch.tensor(each, device=self.rows.device) for each in zip(*pairs, strict=True))
        for name, planes in self._layers.planes.items():
            for layer, place in self._at.items():
                planes[place].index_copy_(0, targets, self._now[name, layer].index_select(0, rows))

    def _plane(self, name: str, layer: int) -> Tensor:
        return self._layers.planes[name][self._at[layer]]

    def _get(self, name: str, layer: int) -> Tensor | None:
        if (name, layer) not in self._now and self._sources is not None and name in self._layers.planes:
            self._ready()
            self._now[name, layer] = self._plane(name, layer).index_select(0, self._sources)
        return self._now.get((name, layer))


class PagedBatch:
    """A step's requests one after another, and the model's cache while it computes them."""

    def __init__(
        self,
        pools: Sequence[PagedLayers],
        parts: Sequence[Part],
        wait: Callable[[tuple[int, int], int], object],
        states: StateLayers | None = None,
    ) -> None:
        """`pools`: those of full attention, if any, before those of windows. `wait`: for a layer of the first."""
        self._wait = wait
        self._loads = [part.load for part in parts if part.load is not None]
        self._waited = False
        self._steps = [PagedStep(layers, parts) for layers in pools]
        self._step = self._steps[0]
        self.unread = 0  # layers that were updated, and that our attention was not asked for
        # By the model's number of a layer, the pool, and the layer there.
        self._at = {number: (step, place) for step in self._steps for place, number in enumerate(step.layers.numbers)}
        device = pools[0].device
        counts = [len(part.tokens) // 4 for part in parts]
        stops = np.cumsum(counts)
        new = [np.arange(part.start, part.start + count) for part, count in zip(parts, counts, strict=True)]
        asked = [stop - 1 for part, stop in zip(parts, stops, strict=True) if part.logits]
        tokens = np.frombuffer(b"".join(part.tokens for part in parts), "<u4").astype(np.int64)
        self.tokens = torch.from_numpy(tokens).to(device)  # [rows]
        self.positions = torch.from_numpy(np.concatenate(new)).to(device)  # int64 [rows]
        self.asked = torch.from_numpy(np.array(asked, np.int64)).to(device)  # rows whose logits are wanted
        self._states = [] if states is None else self._grouped(states, parts, counts)

    def _grouped(self, layers: StateLayers, parts: Sequence[Part], counts: Sequence[int]) -> list[StateBatch]:
        """Those that go on by one token together; each other by itself."""
        decoding: list[tuple[Tensor, StatePart]] = []
        groups, start = [decoding], 0
        for part, count in zip(parts, counts, strict=True):
            assert part.states is not None, "the caller knows of no states"
            one = (torch.arange(start, start + count), part.states)
            start += count
            if count == 1 and part.states.source is not None:
                decoding.append(one)
            else:
                groups.append([one])
        return [
            StateBatch(
                layers,
                torch.stack([rows for rows, _ in group]).to(self.tokens.device),
                [states for _, states in group],
                self._wait_first,
            )
            for group in groups
            if group
        ]

    @property
    def spans(self) -> list[_Span]:
        """The requests, as the layer sees them that was updated last."""
        return self._step.spans

    @property
    def window(self) -> int | None:
        """The window of that layer."""
        return self._step.layers.window

    def update(self, k: Tensor, v: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """As transformers' caches: keep what is new [1, heads, rows, dim]; give back all [1, heads, total, dim].

        K and V may differ in width. ConfigError: the pages were made for another form.
        """
        step, place = self._at.get(layer, (self._steps[0], None))
        layers = step.layers
        if place is None or any(
            part.shape[1] != layers.heads or part.shape[3] != dim or part.dtype != layers.dtype
            for part, dim in zip((k, v), layers.dims, strict=True)
        ):
            raise ConfigError(
                f"layer {layer} caches {k.shape[1]} heads of {k.shape[3]} and {v.shape[3]} in {k.dtype}, and the pages "
                f"hold {layers.heads} of {layers.dims[0]} and {layers.dims[1]} in {layers.dtype}, in "
                f"{layers.num_layers} layers"
            )
        self._step = step
        self.unread += 1
        step.write(place, k, v)
        if layers.window is None:
            for load in self._loads:
                self._wait(load, place)
        else:
            self._wait_first()
        return step.read(place)

    def recur(self, forward: Callable[..., Tensor], hidden: Tensor, **arguments: Any) -> Tensor:
        """A module that keeps states, called for the requests one after another: [1, rows, dim] in and out."""
        whole: Tensor | None = None
        for group in self._states:
            out = forward(hidden[0][group.rows], cache=group, **arguments)
            if whole is None:
                whole = out.new_empty(1, hidden.shape[1], out.shape[2])
            whole[0, group.rows] = out
        assert whole is not None, "a step has requests"
        return whole

    def keep_states(self) -> None:
        """Write the states after the step, once it has been computed."""
        for group in self._states:
            group.keep()

    def _wait_first(self) -> None:
        """Until what windows and states have of a load is there: with the first layer, which there is even of none."""
        if not self._waited:
            for load in self._loads:
                self._wait(load, 0)
            self._waited = True


def _by_request(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The `forward` of a module that keeps states, for one row of several requests."""

    @functools.wraps(forward)
    def split(hidden_states: Tensor, *, cache: object = None, paged: object = None, **arguments: Any) -> Tensor:
        if isinstance(cache, PagedBatch):
            return cache.recur(forward, hidden_states, **arguments)
        return forward(hidden_states, cache=cache, **arguments)

    return split


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: PagedBatch,
    sliding_window: int | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface for a step: each request's rows of `query` over its own of `key` and `value`.

    [1, heads, rows, dim] and [1, kv_heads, total, dim] in, [1, rows, heads, dim] out. ConfigError: the module asks for
    what is not done here, or for another window than the layer has.
    """
    assert attention_mask is None, "a mask means that the model was not called by PagedModel"
    for name in FOREIGN:
        if arguments.get(name) is not None:
            raise ConfigError(
                f"{type(module).__name__} attends with {name} = {arguments[name]!r}; that is not done here"
            )
    if sliding_window not in (None, paged.window):
        raise ConfigError(
            f"{type(module).__name__} attends with sliding_window = {sliding_window}, and its layer's is {paged.window}"
        )
    paged.unread -= 1
    special = any(arguments.get(name) is not None for name in SPECIAL)
    attend = _attend if special else sdpa_attention_forward
    outputs = [
        attend(
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


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """What torch's attention has not: scores that are capped (Gemma-2), or a sink beside them for each head (gpt-oss).

    [1, heads, n, dim] and [1, kv_heads, length, dim] in, [1, n, heads, dim] out.
    """
    key, value = (repeat_kv(each, query.shape[1] // each.shape[1]) for each in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    count, length = scores.shape[2:]
    if mask is None and count > 1:
        mask = torch.ones(count, length, dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.reshape(1, -1, 1, 1).expand(1, -1, count, 1)], dim=-1)
    odds = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)[..., :length]
    return (odds @ value).transpose(1, 2).contiguous(), None
