"""The pages and states as a step sees them: every layout of them, windows, and what does not fit."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable

import pytest

pytest.importorskip("transformers")

import numpy as np
import tiny
import torch
from torch import Tensor

from sglcache.errors import ConfigError
from sglcache.integrations.transformers.geometry import state_modules
from sglcache.integrations.transformers.model import (
    PagedBatch,
    PagedLayers,
    Part,
    StateBatch,
    StateLayers,
    StatePart,
    WindowPart,
    check_continues,
    paged_attention,
)

NUM_PAGES, PAGE_SIZE, LAYERS, HEADS, DIM = 12, 4, 3, 2, 8


Planes = tuple[list[Tensor], list[Tensor]]


def page_first(k_dim: int = DIM, v_dim: int = DIM, gap: int = 0) -> Planes:
    """A page's layers one after another, K and V of each."""
    sizes = [PAGE_SIZE * HEADS * dim for dim in (k_dim, v_dim)]
    pages = torch.zeros(NUM_PAGES, LAYERS * sum(sizes) + gap)[:, : LAYERS * sum(sizes)].unflatten(
        1, (LAYERS, sum(sizes))
    )
    k, v = pages.split(sizes, dim=2)
    return tuple(
        [plane[:, layer].unflatten(1, (PAGE_SIZE, HEADS, dim)) for layer in range(LAYERS)]
        for plane, dim in ((k, k_dim), (v, v_dim))
    )  # type: ignore[return-value]


def layer_first(k_dim: int = DIM, v_dim: int = DIM) -> Planes:
    k, v = (list(torch.zeros(LAYERS, NUM_PAGES, PAGE_SIZE, HEADS, dim)) for dim in (k_dim, v_dim))
    return k, v


def head_first(k_dim: int = DIM, v_dim: int = DIM) -> Planes:
    k, v = (list(torch.zeros(LAYERS, NUM_PAGES, HEADS, PAGE_SIZE, dim).transpose(2, 3)) for dim in (k_dim, v_dim))
    return k, v


def with_a_gap(k_dim: int = DIM, v_dim: int = DIM) -> Planes:
    """A page's bytes are no multiple of a row's."""
    return page_first(k_dim, v_dim, gap=4)


def latents(k_dim: int = DIM, v_dim: int = DIM) -> Planes:
    """One row has both."""
    rows = torch.zeros(NUM_PAGES, LAYERS, PAGE_SIZE, HEADS, k_dim + v_dim)
    return list(rows[..., :k_dim].unbind(1)), list(rows[..., k_dim:].unbind(1))


def part(start: int, count: int, slots: list[int]) -> Part:
    return Part(np.arange(count, dtype="<u4").tobytes(), start, array("i", slots).tobytes(), None, True)


def batch(layers: PagedLayers, *parts: Part) -> PagedBatch:
    return PagedBatch([layers], parts, lambda load, layer: None)


@pytest.mark.parametrize("widths", [(DIM, DIM), (DIM, 3), (5, DIM)], ids=str)
@pytest.mark.parametrize("layout", [page_first, layer_first, head_first, with_a_gap, latents])
def test_what_is_written_is_read_in_order_in_any_layout(
    layout: Callable[[int, int], Planes], widths: tuple[int, int]
) -> None:
    k, v = layout(*widths)
    layers = PagedLayers(k, v)
    slots = {"one": [7, 2, 11], "other": [0, 5, 3]}
    wrote: dict[str, list[list[Tensor]]] = {"one": [[], []], "other": [[], []]}
    for starts in ({"one": (0, 6), "other": (0, 3)}, {"one": (6, 1), "other": (3, 7)}):
        step = batch(layers, *(part(*where, slots[name]) for name, where in starts.items()))
        rows = sum(count for _, count in starts.values())
        for layer in range(LAYERS):
            new = [torch.randn(1, HEADS, rows, width) for width in widths]
            found = step.update(new[0], new[1], layer)
            for (name, (_, count)), span in zip(starts.items(), step.spans, strict=True):
                for plane in range(2):
                    kept = wrote[name][plane]
                    if len(kept) == layer:
                        kept.append(torch.empty(1, HEADS, 0, widths[plane]))
                    kept[layer] = torch.cat([kept[layer], new[plane][:, :, span.rows]], 2)
                    assert torch.equal(found[plane][:, :, span.tokens], kept[layer]), (name, plane, layer, count)
    for page in {1, 4, 6, 8, 9, 10}:
        assert not any(plane[page].any() for plane in (*k, *v)), f"page {page} is nobody's"


def test_what_is_read_stands_as_attention_likes_it() -> None:
    layers = PagedLayers(*page_first())
    new = torch.randn(1, HEADS, 6, DIM)
    k, v = batch(layers, part(0, 6, [3, 1])).update(new, new, 0)
    assert k.is_contiguous()
    assert v.is_contiguous()


@pytest.mark.parametrize(
    ("shape", "dtype", "layer"),
    [
        ((1, HEADS + 1, 2, DIM), torch.float32, 0),
        ((1, HEADS, 2, DIM + 1), torch.float32, 0),
        ((1, HEADS, 2, DIM - 1), torch.float32, 0),
        ((1, HEADS, 2, DIM), torch.bfloat16, 0),
        ((1, HEADS, 2, DIM), torch.float32, LAYERS),
    ],
)
def test_what_the_pages_were_not_made_for_is_refused(shape: tuple[int, ...], dtype: torch.dtype, layer: int) -> None:
    k, v = page_first()
    new = torch.ones(shape, dtype=dtype)
    with pytest.raises(ConfigError, match=f"layer {layer} caches"):
        batch(PagedLayers(k, v), part(0, 2, [3])).update(new, new, layer)
    assert not any(plane.any() for plane in (*k, *v)), "nothing was written"


@pytest.mark.parametrize("name", ["sliding_window", "position_bias"])
def test_attention_of_another_kind_is_refused(name: str) -> None:
    new = torch.ones(1, HEADS, 2, DIM)
    step = batch(PagedLayers(*page_first()), part(0, 2, [3]))
    with pytest.raises(ConfigError, match=name):
        paged_attention(torch.nn.Identity(), new, new, new, None, paged=step, **{name: 3.0})


def test_everything_a_step_makes_is_where_the_pages_are() -> None:
    """On a device that computes nothing, but tells one from another: an operation over two of them is an error."""
    k, v = ([plane.to("meta") for plane in planes] for planes in page_first())
    layers = PagedLayers(k, v)
    step = batch(layers, part(0, 6, [3, 1]), part(9, 1, [0, 5, 7]), part(2, 7, [8, 4, 6]))
    made = [step.tokens, step.positions, step.asked, *(span.mask for span in step.spans if span.mask is not None)]
    assert len(made) == 4
    assert {tensor.device.type for tensor in made} == {"meta"}
    new = torch.empty(1, HEADS, 14, DIM, device="meta")
    keys, values = step.update(new, new, 1)
    assert (keys.shape, keys.device.type) == ((1, HEADS, 6 + 10 + 9, DIM), "meta")
    out, _ = paged_attention(torch.nn.Identity(), new, keys, values, None, paged=step)
    assert (out.shape, out.device.type) == ((1, 14, HEADS, DIM), "meta")


# -- windows -------------------------------------------------------------------------------------------------------

WINDOW = 6  # more than a page, and no multiple of one


def windowed(start: int, count: int, first: int, slots: list[int]) -> Part:
    """Of a request that holds no page before `first` any more."""
    tokens = np.arange(count, dtype="<u4").tobytes()
    return Part(tokens, start, b"", None, True, WindowPart(first, array("i", slots).tobytes()))


@pytest.mark.parametrize("layout", [page_first, layer_first, head_first])
def test_a_window_is_attended_to_from_the_pages_that_are_left(layout: Callable[[], Planes]) -> None:
    """Chunk by chunk, with no page that lies wholly before the window; as torch's attention over all of it, masked."""
    torch.manual_seed(0)
    layers = PagedLayers(*layout(), window=WINDOW)
    for plane in (*layers.pages[1][0:1], *layers.pages[1][1:2]):
        plane.fill_(torch.nan)  # to read what was not written shows
    slots, length = [7, 2, 11, 0, 5, 3, 9, 1], 30
    query, key, value = (torch.randn(1, HEADS, length, DIM) for _ in range(3))
    after = torch.arange(length)[:, None] - torch.arange(length)
    mask = (after >= 0) & (after < WINDOW)
    want = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2)
    got = []
    for start, stop in itertools.pairwise([0, 3, 4, 14, 15, 16, 25, 26, 30]):
        first = max(0, start - WINDOW + 1) // PAGE_SIZE
        step = batch(layers, windowed(start, stop - start, first, slots[first:]))
        new = slice(start, stop)
        k, v = step.update(key[:, :, new], value[:, :, new], 1)
        out, _ = paged_attention(torch.nn.Identity(), query[:, :, new], k, v, None, paged=step, sliding_window=WINDOW)
        got.append(out)
    torch.testing.assert_close(torch.cat(got, 1), want, atol=1e-6, rtol=0)


def test_layers_of_two_kinds_have_pools_of_their_own() -> None:
    """Full attention in the model's layers 1 and 3, a window in 0 and 2, each in the order of its own pool."""
    (full_k, full_v), (window_k, window_v) = page_first(), page_first()
    pools = [
        PagedLayers(full_k[:2], full_v[:2], (1, 3)),
        PagedLayers(window_k[:2], window_v[:2], (0, 2), WINDOW),
    ]
    part = Part(
        np.arange(2, dtype="<u4").tobytes(),
        8,
        array("i", [1, 2, 3]).tobytes(),
        None,
        True,
        WindowPart(0, b"\4\0\0\0" * 3),
    )
    step = PagedBatch(pools, [part], lambda load, layer: None)
    for layer in range(4):
        k, _ = step.update(*(torch.full((1, HEADS, 2, DIM), layer + 1.0) for _ in range(2)), layer)
        assert k.shape[2] == (10 if layer % 2 else 7), "everything, or a window's tokens before the first new one"
        assert step.window == (None if layer % 2 else WINDOW)
    for planes, slot, layers in ((full_k, 3, (1, 3)), (window_k, 4, (0, 2))):
        for plane, layer in zip(planes, layers, strict=False):
            assert (plane[slot, :2] == layer + 1.0).all()
    with pytest.raises(ConfigError, match="layer 4 caches"):
        step.update(*(torch.zeros(1, HEADS, 2, DIM) for _ in range(2)), 4)


@pytest.mark.parametrize("numbers", [(0, 1, 2), ()])
def test_what_a_window_has_of_a_load_is_there_with_the_first_layer_of_full_attention(numbers: tuple[int, ...]) -> None:
    """It is waited for once, before a window is read, and where there are no layers of full attention as well."""
    waited: list[int] = []
    full = [PagedLayers(*page_first(), numbers)] if numbers else []
    window = PagedLayers(*page_first(), [number + len(numbers) for number in range(LAYERS)], WINDOW)
    part = windowed(8, 2, 0, [4, 5, 6])
    part = Part(part.tokens, 8, array("i", [1, 2, 3]).tobytes(), (7, 1), True, part.window)
    step = PagedBatch([*full, window], [part], lambda load, layer: waited.append(layer))
    new = torch.ones(1, HEADS, 2, DIM)
    for layer in range(len(numbers), len(numbers) + LAYERS):
        step.update(new, new, layer)
    assert waited == [0]
    for layer in numbers:
        step.update(new, new, layer)
    assert waited == [0, *numbers]


def test_another_window_than_the_layer_s_is_refused() -> None:
    new = torch.ones(1, HEADS, 2, DIM)
    step = batch(PagedLayers(*page_first(), window=WINDOW), windowed(0, 2, 0, [3]))
    k, v = step.update(new, new, 0)
    with pytest.raises(ConfigError, match="sliding_window = 5, and its layer's is 6"):
        paged_attention(torch.nn.Identity(), new, k, v, None, paged=step, sliding_window=5)


# -- states --------------------------------------------------------------------------------------------------------


def states(num_slots: int = 6) -> StateLayers:
    """Of two layers, the model's 1 and 4; slot s is full of s."""
    forms = {"conv": (3, 4), "ssm": (2, 5)}
    slots = torch.arange(float(num_slots))
    planes = {
        name: [slots.view(-1, 1, 1).expand(-1, *shape).clone() for _ in range(2)] for name, shape in forms.items()
    }
    return StateLayers(planes, (1, 4))


def state_batch(layers: StateLayers, *parts: StatePart) -> StateBatch:
    return StateBatch(layers, torch.zeros(len(parts), 1, dtype=torch.int64), parts, lambda: None)


def test_states_are_read_from_their_sources_and_written_where_they_are_wanted_at_the_end_alone() -> None:
    layers = states()
    step = state_batch(layers, StatePart(1, (2, 5)), StatePart(3, (3,)))
    for layer in layers.numbers:
        conv, ssm = step.get_conv_state(layer), step.get_recurrent_state(layer)
        assert conv is not None
        assert ssm is not None
        assert [conv[0].unique().tolist(), conv[1].unique().tolist()] == [[1.0], [3.0]]
        conv += 10  # as the kernels of one token do
        step.update_recurrent_state(ssm + 20, layer)
    before = states()
    for name, planes in layers.planes.items():
        assert all(map(torch.equal, planes, before.planes[name])), "a step that fails has written nothing"
    step.keep()
    for name, more in (("conv", 10), ("ssm", 20)):
        for plane in layers.planes[name]:
            assert plane[:, 0, 0].tolist() == [0, 1, 1 + more, 3 + more, 4, 1 + more]


def test_without_a_source_there_is_nothing_before_and_a_short_start_is_padded() -> None:
    layers = states()
    step = state_batch(layers, StatePart(None, (0,)))
    assert step.get_conv_state(1) is step.get_recurrent_state(1) is None
    new = torch.arange(1.0, 7).view(1, 3, 2)
    assert step.update_conv_state(new, 1)[0, 0].tolist() == [0, 0, 1, 2]
    assert step.update_conv_state(new, 1)[0, 0].tolist() == [0, 0, 1, 2, 1, 2]
    now = step.get_conv_state(1)
    assert now is not None
    assert now[0, 0].tolist() == [1, 2, 1, 2]


def test_a_module_that_forgets_its_state_is_refused() -> None:
    """Mamba-1's: what a prompt's second chunk says does not depend on the first."""
    for model, forgets in ((tiny.forgetful(), True), (tiny.build("granite_hybrid"), False)):
        number, module = next(iter(state_modules(model).items()))
        width = module.conv1d.in_channels
        forms = {"conv": (width, module.conv_kernel_size), "ssm": (width, 8) if forgets else (8, 16, 16)}
        layers = StateLayers({name: [torch.zeros(2, *form)] for name, form in forms.items()}, (number,))
        if not forgets:
            check_continues(module, layers, 64, torch.float32)
            continue
        with pytest.raises(ConfigError, match="JambaMambaMixer forgets its ssm state"):
            check_continues(module, layers, 64, torch.float32)
