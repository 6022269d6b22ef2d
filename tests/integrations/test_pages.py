"""The pages as a step sees them: every layout of them, and what does not fit."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest

pytest.importorskip("transformers")

import numpy as np
import torch
from torch import Tensor

from sglcache.errors import ConfigError
from sglcache.integrations.transformers.model import PagedBatch, PagedLayers, Part, paged_attention

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
