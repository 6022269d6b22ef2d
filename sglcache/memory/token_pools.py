"""The mapped pages with SGLang's names and shapes: `MHATokenToKVPool` and `MLATokenToKVPool` over a runner's `KVViews`.

SGLang's kernels see a layer as [slots, heads, dim], a slot being page * page_size + offset. That is one tensor only
where the pages of a layer lie one behind another: with the layout layer_first, or with pages of one token. Where they
don't, as in page_first, writing by slot works all the same, and the pages themselves can be had; the flat views are
refused, rather than copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypedDict, Unpack

from sglcache.errors import BadRequest, ConfigError, extras

with extras():
    import torch
    from torch import Tensor


class Layout(Protocol):
    """Of a geometry, what is named here."""

    @property
    def layout(self) -> str: ...


class Views(Protocol):
    """What of `KVViews` is used here."""

    @property
    def geometry(self) -> Layout: ...

    @property
    def k(self) -> Sequence[Tensor]: ...

    @property
    def v(self) -> Sequence[Tensor]: ...

    @property
    def kv(self) -> Sequence[Tensor]: ...


class HasLayerId(Protocol):
    """As SGLang's RadixAttention."""

    layer_id: int


Layer = int | HasLayerId
Load = tuple[int, int]


class PoolOptions(TypedDict, total=False):
    """Of a pool, all optional."""

    start_layer: int
    """What the model calls the first layer here."""
    padding_page: int | None
    """A page of the caller's, for tokens that only fill a batch."""
    wait: Callable[[Load, int], object] | None
    """`wait_loaded` of the client or worker, for `wait_for`."""


class TokenPool:
    """What the two pools have in common: the layers of one shard of one stage, read and written by token slot.

    Slots count from the pool's page 0, which the daemon hands out like any other. SGLang pads its batches with slot 0:
    whoever does so must hold a page for it by a lease, and name it (`padding_page`).

    A slot is not looked at before it is written to: that would wait for the device. It must be one of the caller's
    pages, beyond what is committed. After `views.close()` every access raises ClosedError.
    """

    def __init__(self, views: Views, **options: Unpack[PoolOptions]) -> None:
        self.views = views
        start_layer, padding_page = options.get("start_layer", 0), options.get("padding_page")
        pages = self._keys[0]
        self.num_pages, self.page_size, self.head_num, self.head_dim = pages.shape
        self.dtype, self.device = pages.dtype, pages.device
        self.layer_num = len(self._keys)
        self.start_layer, self.end_layer = start_layer, start_layer + self.layer_num - 1
        if padding_page is not None and not 0 <= padding_page < self.num_pages:
            raise BadRequest(f"padding_page = {padding_page} of {self.num_pages} pages", num_pages=self.num_pages)
        self.padding_slot = None if padding_page is None else padding_page * self.page_size
        """The first slot of the padding page; None: there is no such page."""
        self.size = (self.num_pages - (padding_page is not None)) * self.page_size
        """Token slots without the padding page's."""
        self._wait = options.get("wait")
        self._loads: tuple[Load, ...] = ()

    @property
    def is_flat(self) -> bool:
        """The flat views can be had."""
        return _is_flat(self._keys[0])

    def wait_for(self, loads: Iterable[Load | None]) -> None:
        """From now on each getter waits, in its layer, for these: the `load` of each lease of the batch, None or not.

        As SGLang's getters wait for the layer transfer counter. TransferError, from a getter: a load failed.
        """
        found = tuple(load for load in loads if load is not None)
        if found and self._wait is None:
            raise BadRequest("there are loads to wait for, and the pool was made without `wait`")
        self._loads = found

    def get_key_pages(self, layer: Layer) -> Tensor:
        """[num_pages, page_size, head_num, head_dim], strided, in any layout: for kernels that read page tables."""
        return self._keys[self._read(layer)]

    def get_key_buffer(self, layer: Layer) -> Tensor:
        """[slots, head_num, head_dim], the same memory. ConfigError: not in this layout; see `is_flat`."""
        return self._flat(self.get_key_pages(layer))

    # -- inside -----------------------------------------------------------------------------------------------

    @property
    def _keys(self) -> Sequence[Tensor]:
        """What SGLang's getters call keys."""
        return self.views.k

    def _index(self, layer: Layer) -> int:
        number = layer if isinstance(layer, int) else layer.layer_id
        if not self.start_layer <= number <= self.end_layer:
            raise BadRequest(f"layer {number} is not one of {self.start_layer}..{self.end_layer}", layer=number)
        return number - self.start_layer

    def _read(self, layer: Layer) -> int:
        index = self._index(layer)
        if self._wait is not None:
            for load in self._loads:
                self._wait(load, index)
        return index

    def _flat(self, pages: Tensor) -> Tensor:
        if not _is_flat(pages):
            layout = self.views.geometry.layout
            raise ConfigError(
                f"pool.layout = {layout!r} keeps a layer's pages of {self.page_size} tokens apart, so there is no "
                f'[slots, heads, dim] of them; give the daemon pool.layout = "layer_first" or pool.page_size = 1, or '
                f"read pages",
                path="pool.layout",
                layout=layout,
            )
        # Whoever first asks in inference mode must be able to write it outside.
        with torch.inference_mode(False):
            return pages.view(self.num_pages * self.page_size, *pages.shape[2:])

    def _store(self, pages: Tensor, loc: Tensor, values: Tensor) -> None:
        heads, dim = pages.shape[2:]
        if values.shape != (len(loc), heads, dim):
            raise BadRequest(
                f"{list(values.shape)} for {len(loc)} slots of {heads} heads of {dim}", shape=tuple(values.shape)
            )
        values = values.to(self.dtype)
        if _is_flat(pages):
            self._flat(pages)[loc] = values
        else:
            pages[loc // self.page_size, loc % self.page_size] = values

    def _load(self, pages: Tensor, loc: Tensor) -> Tensor:
        return pages[loc // self.page_size, loc % self.page_size]


class MHATokenToKVPool(TokenPool):
    """K and V of each head, of widths of their own where the daemon's pool has such."""

    @property
    def v_head_dim(self) -> int:
        return self.views.v[0].shape[3]

    def get_value_pages(self, layer: Layer) -> Tensor:
        """[num_pages, page_size, head_num, v_head_dim], as `get_key_pages`."""
        return self.views.v[self._read(layer)]

    def get_value_buffer(self, layer: Layer) -> Tensor:
        """[slots, head_num, v_head_dim], as `get_key_buffer`."""
        return self._flat(self.get_value_pages(layer))

    def get_kv_buffer(self, layer: Layer) -> tuple[Tensor, Tensor]:
        return self.get_key_buffer(layer), self.get_value_buffer(layer)

    def set_kv_buffer(self, layer: Layer, loc: Tensor, cache_k: Tensor, cache_v: Tensor) -> None:
        """Write [n, head_num, head_dim] and [n, head_num, v_head_dim] to the n slots `loc`, in any layout.

        BadRequest: of another shape. Other dtypes are converted.
        """
        index = self._index(layer)
        k, v = self.views.k[index], self.views.v[index]
        if cache_v.shape[:2] != cache_k.shape[:2]:
            raise BadRequest(f"K is {list(cache_k.shape)} and V is {list(cache_v.shape)}")
        if cache_v.shape[2:] != (self.v_head_dim,):
            raise BadRequest(f"{list(cache_v.shape)} for V of {self.v_head_dim}", shape=tuple(cache_v.shape))
        self._store(k, loc, cache_k)
        self._store(v, loc, cache_v)


class MLATokenToKVPool(TokenPool):
    """Latents: one head, whose row is `kv_lora_rank` of what keys and values share, then the rotated key."""

    def __init__(self, views: Views, kv_lora_rank: int, qk_rope_head_dim: int, **options: Unpack[PoolOptions]) -> None:
        """ConfigError: the pool's latents are not of these two. BadRequest: it holds K and V."""
        super().__init__(views, **options)
        self.kv_lora_rank, self.qk_rope_head_dim = kv_lora_rank, qk_rope_head_dim
        self.kv_cache_dim = kv_lora_rank + qk_rope_head_dim
        if (self.head_num, self.head_dim) != (1, self.kv_cache_dim):
            raise ConfigError(
                f"latents of {kv_lora_rank} + {qk_rope_head_dim} are one head of {self.kv_cache_dim}, and the pool has "
                f"{self.head_num} of {self.head_dim}",
                path="pool.kv_lora_rank",
            )

    @property
    def _keys(self) -> Sequence[Tensor]:
        return self.views.kv

    def get_value_buffer(self, layer: Layer) -> Tensor:
        """[slots, 1, kv_lora_rank]: the first columns of `get_key_buffer`."""
        return self.get_key_buffer(layer)[..., : self.kv_lora_rank]

    def get_kv_buffer(self, layer: Layer) -> tuple[Tensor, Tensor]:
        return self.get_key_buffer(layer), self.get_value_buffer(layer)

    def set_kv_buffer(self, layer: Layer, loc: Tensor, cache_k: Tensor, cache_v: Tensor | None = None) -> None:
        """Write whole rows, [n, 1, kv_cache_dim], to the n slots `loc`. `cache_v` is a part of them: not looked at."""
        self._store(self._keys[self._index(layer)], loc, cache_k)

    def set_mla_kv_buffer(self, layer: Layer, loc: Tensor, cache_k_nope: Tensor, cache_k_rope: Tensor) -> None:
        """Write rows in their two parts: [n, 1, kv_lora_rank] and [n, 1, qk_rope_head_dim]."""
        pages = self._keys[self._index(layer)]
        if cache_k_nope.shape[2:] != (self.kv_lora_rank,) or cache_k_nope.shape[:2] != cache_k_rope.shape[:2]:
            raise BadRequest(f"{list(cache_k_nope.shape)} and {list(cache_k_rope.shape)} are no row's two parts")
        self._store(pages, loc, torch.cat([cache_k_nope, cache_k_rope], dim=2))

    def get_mla_kv_buffer(
        self, layer: Layer, loc: Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """A copy of the n slots `loc`, in any layout: [n, 1, kv_lora_rank] and [n, 1, qk_rope_head_dim]."""
        rows = self._load(self.get_key_pages(layer), loc).to(dst_dtype or self.dtype)
        return rows[..., : self.kv_lora_rank], rows[..., self.kv_lora_rank :]


def _is_flat(pages: Tensor) -> bool:
    """The first two dimensions of [num_pages, page_size, ...] can be one."""
    num_pages, page_size = pages.shape[:2]
    return page_size == 1 or num_pages == 1 or pages.stride(0) == page_size * pages.stride(1)
