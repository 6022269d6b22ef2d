"""What a page holds, and where its bytes lie: the one place that knows either. No torch here, and no numpy.

**What.** A page is `page_size` tokens in every layer of a pipeline stage. A layer has one or two *planes*: K and V,
each [page_size, heads, dim] with a dim of its own, or latents, [page_size, 1, kv_lora_rank + qk_rope_head_dim].
One plane of one layer of one page is a *piece*: a run of bytes, token by token, that is the same in every layout.

**Whose.** Each shard has a pool of all pages. The shards split the KV heads; where there are fewer heads than shards,
neighbours have the same head, and of latents all shards have the whole. What shards have alike is one *part*: shard s
has part s // num_replicas. The host keeps a part once: it is copied from the part's first shard, and loaded to all.

**Where.** A layout says how the pieces of a pool lie, and nothing else differs between layouts:

    page_first     [num_pages][num_layers][planes]   a page is one run of bytes, and a layer of it one run inside
    layer_first    [num_layers][planes][num_pages]   a plane of a layer is one array: SGLang's flat [slots, heads, dim]

**For who copies**, that is all there is to know of a model: a pool is a buffer and a `Placement`, which names each
piece as a `Region`, the same bytes of every page at a stride. `moves(src, dst)` pairs the regions of two pools, in as
few pairs as there can be (one, from page_first to page_first), all layers or one; `Geometry.pairs` says which pools
those are. A copy of n pages is then, for each pair of regions, n runs of `num_bytes` from `src.start(p)` to
`dst.start(q)`: what a batch of memcpys takes, and a gather in numpy as well.

**Hybrid models** have several *resources*, each with pools of its own and a `Form` that answers all of the above: the
layers that keep every token (`Geometry`), those with a sliding window (another `Geometry`: other layers, other heads,
fewer pages), and those that keep one state (`StateGeometry`). There a page is a slot, and its pieces are the named
arrays of each layer's state. Where no layer keeps every token, those pages have no bytes, and are names alone.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from sglcache.errors import ConfigError
from sglcache.units import Tier
from sglcache.wire import control
from sglcache.wire.control import StateForm

if TYPE_CHECKING:
    from sglcache.config import Config, MambaConfig, WindowConfig

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1}
LAYOUTS = ("page_first", "layer_first")
FULL, WINDOW, MAMBA = "full", "window", "mamba"  # resources; the first is always there
STATE_ALIGN = 16  # bytes
WINDOW_SHARE = 4  # of the first's pages one in so many is what a window has where nothing is said
LEAST_SLOTS = 2  # of states: a request that goes on from one writes another
MAX_INT32 = (1 << 31) - 1  # a slot is one, and so is the size of a page in numpy's eyes


class Region(NamedTuple):
    """Bytes that every page of a pool has: `num_bytes` of them, page p's beginning at offset + p * page_stride."""

    offset: int
    page_stride: int
    num_bytes: int

    def start(self, page: int) -> int:
        """Where they begin in the pool's buffer."""
        return self.offset + page * self.page_stride


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the pieces of a pool's pages lie in its buffer."""

    num_pages: int
    layers: tuple[tuple[Region, ...], ...]  # [num_layers][planes]

    @classmethod
    def whole(cls, num_pages: int, page_bytes: int) -> Placement:
        """Pages of one piece, one behind another."""
        return cls(num_pages, ((Region(0, page_bytes, page_bytes),),))

    @classmethod
    def of(cls, layout: str, num_pages: int, num_layers: int, pieces: Sequence[int]) -> Placement:
        """`pieces`: bytes of a piece, for each plane of a layer."""
        layers, at, layer_bytes = [], 0, sum(pieces)
        for _ in range(num_layers):
            regions = []
            for num_bytes in pieces:
                if layout == "page_first":
                    regions.append(Region(at, num_layers * layer_bytes, num_bytes))
                    at += num_bytes
                else:
                    regions.append(Region(at, num_bytes, num_bytes))
                    at += num_pages * num_bytes
            layers.append(tuple(regions))
        return cls(num_pages, tuple(layers))

    @property
    def page_bytes(self) -> int:
        return sum(region.num_bytes for regions in self.layers for region in regions)

    @property
    def num_bytes(self) -> int:
        """Of the buffer: all of it is pages."""
        return self.num_pages * self.page_bytes

    def page(self) -> Region:
        """All that a page has, as one region. ConfigError: it lies in several places (layer_first)."""
        (region, _), *others = moves(self, self) or [(Region(0, 0, 0),) * 2]
        if others:
            raise ConfigError(
                "the bytes of a page lie apart, layer by layer; read the pool's layers, or give the daemon "
                'pool.layout = "page_first"',
                path="pool.layout",
            )
        return region

    def ranges(self, page: int, layer: int | None = None) -> list[tuple[int, int]]:
        """(start, stop) of the bytes of a page, or of one layer of it, in the pieces' order; neighbours are joined."""
        found = moves(self, self, None if layer is None else (layer,))
        return [(region.start(page), region.start(page) + region.num_bytes) for region, _ in found]


def moves(src: Placement, dst: Placement, layers: Iterable[int] | None = None) -> list[tuple[Region, Region]]:
    """The regions to copy from one pool to the other for a page, or for some of its layers; as few as there can be.

    Of each pair both have the same `num_bytes`; together they are every piece once. ValueError: the pools' pages are
    not of the same pieces.
    """
    if [[it.num_bytes for it in each] for each in src.layers] != [[it.num_bytes for it in each] for each in dst.layers]:
        raise ValueError(f"pages of {src.page_bytes} bytes to pages of {dst.page_bytes}, or of other pieces")
    found: list[tuple[Region, Region]] = []
    for layer in range(len(src.layers)) if layers is None else layers:
        for pair in zip(src.layers[layer], dst.layers[layer], strict=True):
            if found and all(_adjoins(*sides) for sides in zip(found[-1], pair, strict=True)):
                (a, b), num_bytes = found[-1], found[-1][0].num_bytes + pair[0].num_bytes
                found[-1] = (a._replace(num_bytes=num_bytes), b._replace(num_bytes=num_bytes))
            else:
                found.append(pair)
    return found


def _adjoins(first: Region, second: Region) -> bool:
    """In every page the second begins where the first ends."""
    return first.page_stride == second.page_stride and first.offset + first.num_bytes == second.offset


class Plane(NamedTuple):
    """What a shard keeps of a token in a layer."""

    name: str  # k, v, or kv for latents
    heads: int
    dim: int
    token_bytes: int


class Form(ABC):
    """What the pools of one resource are like: what pools, placements and copies ask."""

    __slots__ = ()

    num_pages: int  # of the device pool; each shard has them all
    num_layers: int
    layout: str
    num_shards: int
    host_pages: int  # 0: no host pool
    host_layout: str

    # -- what ---------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def pieces(self) -> tuple[int, ...]:
        """Bytes of each piece that a page has of a layer, in one shard."""

    @property
    def page_bytes(self) -> int:
        """Of one page in one shard."""
        return self.num_layers * sum(self.pieces)

    # -- whose --------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def num_replicas(self) -> int:
        """How many shards have the same bytes."""

    @property
    def num_parts(self) -> int:
        """How many shards have bytes of their own; the host has a pool for each part."""
        return self.num_shards // self.num_replicas

    def pairs(self, src: Tier, dst: Tier) -> list[tuple[int, int]]:
        """(source pool, target pool) of each copy that a page takes from tier to tier, by their numbers there."""
        if (src, dst) == (Tier.DEVICE, Tier.HOST):
            return [(part * self.num_replicas, part) for part in range(self.num_parts)]
        assert (src, dst) == (Tier.HOST, Tier.DEVICE), f"from {src!r} to {dst!r}"
        return [(shard // self.num_replicas, shard) for shard in range(self.num_shards)]

    # -- where --------------------------------------------------------------------------------------------

    def placement(self, tier: Tier = Tier.DEVICE) -> Placement:
        """Of one shard's device pool, or of one part's host pool."""
        num_pages, layout = (
            (self.num_pages, self.layout) if tier is Tier.DEVICE else (self.host_pages, self.host_layout)
        )
        return Placement.of(layout, num_pages, self.num_layers, self.pieces)

    @property
    def pool_bytes(self) -> int:
        """Of one shard's device pool."""
        return self.num_pages * self.page_bytes

    @property
    def host_pool_bytes(self) -> int:
        """Of one part's host pool."""
        return self.host_pages * self.page_bytes

    # -- told ---------------------------------------------------------------------------------------------

    @abstractmethod
    def to_wire(self) -> control.Geometry | control.StateGeometry: ...

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Its fields by name, as JSON has them."""


@dataclass(frozen=True, slots=True)
class Geometry(Form):
    """The form of pools of tokens. ConfigError, with the dotted key as `path`, for one that can't be.

    With a `kv_lora_rank` the pools hold latents, `num_kv_heads` is 1, `head_dim` is the row's width and `v_head_dim` 0.
    """

    page_size: int  # tokens
    num_pages: int  # of the device pool; each shard has them all
    num_layers: int
    num_kv_heads: int = 1  # of the model, whatever the shards
    head_dim: int = 0  # of K
    v_head_dim: int = 0  # of V; 0: as K's
    dtype: str = "float16"  # torch's name
    layout: str = "page_first"
    num_shards: int = 1
    host_pages: int = 0  # 0: no host pool
    host_layout: str = "page_first"
    kv_lora_rank: int = 0  # 0: K and V of heads
    qk_rope_head_dim: int = 0

    def __post_init__(self) -> None:
        if self.kv_lora_rank:
            row = self.kv_lora_rank + self.qk_rope_head_dim
            if self.num_kv_heads != 1 or self.head_dim not in (0, row) or self.v_head_dim:
                raise _wrong("kv_lora_rank", "has latents in place of heads; leave num_kv_heads and head dims out")
            object.__setattr__(self, "head_dim", row)
        elif not self.v_head_dim:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        for name in ("page_size", "num_pages", "num_layers", "num_kv_heads", "head_dim", "num_shards", *_MAY_BE_0):
            value, least = getattr(self, name), 0 if name in _MAY_BE_0 else 1
            if not least <= value <= MAX_INT32:
                raise _wrong(name, f"= {value} is not in {least}..{MAX_INT32}")
        if self.dtype not in ITEM_BYTES:
            raise _wrong("dtype", f"= {self.dtype!r} is none of {', '.join(ITEM_BYTES)}")
        for path, layout in (("pool.layout", self.layout), ("host.layout", self.host_layout)):
            if layout not in LAYOUTS:
                raise ConfigError(f"{path} = {layout!r} is none of {', '.join(LAYOUTS)}", path=path)
        if not self.is_latent and self.num_kv_heads % self.num_shards and self.num_shards % self.num_kv_heads:
            raise _wrong(
                "num_shards",
                f"= {self.num_shards} and num_kv_heads = {self.num_kv_heads}: shards split the heads, or share one, "
                "evenly; make one a multiple of the other",
            )
        if self.token_bytes > MAX_INT32:
            dim = "kv_lora_rank" if self.is_latent else "head_dim"
            num, key = max((getattr(self, name), name) for name in (dim, "num_kv_heads", "num_layers"))
            raise _wrong(
                key,
                f"= {num} makes {self.token_bytes:,} bytes of a token in a shard ({self.layer_bytes:,} "
                f"in each layer), and a page has {MAX_INT32:,} at most; write less, or more pool.num_shards",
            )
        if self.page_bytes > MAX_INT32:
            raise _wrong(
                "page_size",
                f"= {self.page_size} makes pages of {self.page_bytes:,} bytes; a page has {MAX_INT32:,} at most: write "
                f"pool.page_size = {MAX_INT32 // self.token_bytes} at most",
            )

    @classmethod
    def of(cls, config: Config) -> Geometry:
        """The pools of a rank so configured (of one stage: `Config.for_stage`).

        ConfigError, with the numbers: it can't be, or a size holds no page.
        """
        pool, host = config.pool, config.host
        one = cls(
            page_size=pool.page_size,
            num_pages=1,
            num_layers=pool.num_layers,
            num_kv_heads=pool.num_kv_heads if pool.kv_lora_rank is None else 1,
            head_dim=pool.head_dim if pool.kv_lora_rank is None else 0,
            v_head_dim=pool.v_head_dim or 0,
            dtype=pool.dtype,
            layout=pool.layout,
            num_shards=pool.num_shards,
            host_layout=host.layout,
            kv_lora_rank=pool.kv_lora_rank or 0,
            qk_rope_head_dim=pool.qk_rope_head_dim or 0,
        )
        num_pages = pool.num_tokens // pool.page_size
        if pool.size is not None:
            num_pages = _pages("pool.size", pool.size, one.page_bytes, "in each shard")
        host_pages, told = int(num_pages * host.pool_ratio), f"host.pool_ratio = {host.pool_ratio}"
        if host.size is not None:
            host_pages = (
                _pages("host.size", host.size, one.page_bytes * one.num_parts, "of all parts") if host.size else 0
            )
        elif host.num_tokens is not None:
            host_pages, told = host.num_tokens // pool.page_size, f"host.num_tokens = {host.num_tokens}"
        if host.enabled and not host_pages:
            path = told.partition(" ")[0]
            raise ConfigError(
                f"{told} makes no page of {pool.page_size} tokens, of {num_pages} on the device; write more, or 0 for "
                "no host tier",
                path=path,
                value=getattr(host, path.removeprefix("host.")),
            )
        if host_pages > MAX_INT32:
            raise ConfigError(
                f"host: {host_pages} pages are more than a slot number can name ({MAX_INT32}); lower host.pool_ratio",
                path="host.pool_ratio",
                value=host.pool_ratio,
            )
        return replace(one, num_pages=num_pages, host_pages=host_pages)

    # -- what ---------------------------------------------------------------------------------------------

    @property
    def is_latent(self) -> bool:
        return self.kv_lora_rank > 0

    @property
    def planes(self) -> tuple[Plane, ...]:
        """What a shard keeps of a token in each layer, in the order of the pieces."""
        dims = [("kv", self.head_dim)] if self.is_latent else [("k", self.head_dim), ("v", self.v_head_dim)]
        heads, item = self.shard_heads, ITEM_BYTES[self.dtype]
        return tuple(Plane(name, heads, dim, heads * dim * item) for name, dim in dims)

    @property
    def layer_bytes(self) -> int:
        """Of one token in one layer of one shard."""
        return sum(plane.token_bytes for plane in self.planes)

    @property
    def token_bytes(self) -> int:
        """Of one token in one shard."""
        return self.num_layers * self.layer_bytes

    @property
    def pieces(self) -> tuple[int, ...]:
        return tuple(self.page_size * plane.token_bytes for plane in self.planes)

    @property
    def load_layers(self) -> int:
        """Layers that the loads of a rank are told of, with this as its first resource: one where there are none."""
        return max(1, self.num_layers)

    # -- whose --------------------------------------------------------------------------------------------

    @property
    def shard_heads(self) -> int:
        return max(1, self.num_kv_heads // self.num_shards)

    @property
    def num_replicas(self) -> int:
        return self.num_shards if self.is_latent else max(1, self.num_shards // self.num_kv_heads)

    # -- told ---------------------------------------------------------------------------------------------

    def to_wire(self) -> control.Geometry:
        return control.Geometry(**asdict(self))

    def facts(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: control.Geometry) -> Geometry:
        return cls(**{name: getattr(wire, name) for name in wire.__struct_fields__})


_MAY_BE_0 = ("num_layers", "v_head_dim", "host_pages", "kv_lora_rank", "qk_rope_head_dim")


@dataclass(frozen=True, slots=True)
class StateGeometry(Form):
    """The form of pools of states: a page is a slot, which has the state of every layer. ConfigError as `Geometry`'s.

    Shards split the first axis of each array. A piece is rounded up to `STATE_ALIGN` bytes, so that each begins where
    its elements, and wide loads, may begin.
    """

    num_pages: int  # slots
    num_layers: int
    states: tuple[StateForm, ...]  # of a layer, of all shards
    layout: str = "page_first"
    num_shards: int = 1
    host_pages: int = 0
    host_layout: str = "page_first"

    def __post_init__(self) -> None:
        for name, least in (("num_pages", 1), ("num_layers", 1), ("num_shards", 1), ("host_pages", 0)):
            if not least <= (value := getattr(self, name)) <= MAX_INT32:
                raise _wrong(name, f"= {value} is not in {least}..{MAX_INT32}", "mamba")
        for name, shape, dtype in self.states:
            if dtype not in ITEM_BYTES:
                raise _wrong("states", f"{name!r}: dtype {dtype!r} is none of {', '.join(ITEM_BYTES)}", "mamba")
            if not shape or min(shape) < 1 or shape[0] % self.num_shards:
                raise _wrong(
                    "states",
                    f"{name!r} of {list(shape)} in {self.num_shards} shards, which split the first axis evenly",
                    "mamba",
                )
        if self.page_bytes > MAX_INT32:
            raise _wrong(
                "num_layers",
                f"= {self.num_layers} makes slots of {self.page_bytes:,} bytes in a shard ({sum(self.pieces):,} in "
                f"each layer), and a slot has {MAX_INT32:,} at most; write smaller states, or more pool.num_shards",
                "mamba",
            )

    def shard_shape(self, state: StateForm) -> tuple[int, ...]:
        """Of an array of a layer in one shard."""
        return (state.shape[0] // self.num_shards, *state.shape[1:])

    @property
    def pieces(self) -> tuple[int, ...]:
        sizes = [math.prod(self.shard_shape(state)) * ITEM_BYTES[state.dtype] for state in self.states]
        return tuple(-(-size // STATE_ALIGN) * STATE_ALIGN for size in sizes)

    @property
    def layer_bytes(self) -> int:
        """Of one slot in one layer of one shard."""
        return sum(self.pieces)

    @property
    def num_replicas(self) -> int:
        return 1

    def to_wire(self) -> control.StateGeometry:
        return control.StateGeometry(**{name: getattr(self, name) for name in control.StateGeometry.__struct_fields__})

    def facts(self) -> dict[str, Any]:
        states = [{**state._asdict(), "shape": list(state.shape)} for state in self.states]
        return {**{name: getattr(self, name) for name in control.StateGeometry.__struct_fields__}, "states": states}

    @classmethod
    def from_wire(cls, wire: control.StateGeometry) -> StateGeometry:
        return cls(**{name: getattr(wire, name) for name in wire.__struct_fields__})


class CompanionForm(NamedTuple):
    """A resource beside the first, of one rank."""

    kind: str  # WINDOW, MAMBA
    form: Geometry | StateGeometry
    window: int = 0  # tokens that a query sees
    interval: int = 0  # tokens between two states that a runner should commit
    layers: tuple[int, ...] = ()  # the model's numbers of its layers; (): nobody said

    @property
    def window_pages(self) -> int:
        """Pages that a match must have at its end."""
        assert isinstance(self.form, Geometry), f"{self.kind} has no window"
        return -(-self.window // self.form.page_size)

    def facts(self) -> dict[str, Any]:
        """What is told of it: its form, and what that comes to."""
        return {
            "kind": self.kind,
            "geometry": self.form.facts(),
            "window": self.window,
            "interval": self.interval,
            "layers": list(self.layers),
            "page_bytes": self.form.page_bytes,
            "num_parts": self.form.num_parts,
        }

    def to_wire(self) -> control.CompanionHandle:
        """Without pools."""
        geometry = self.form.to_wire()
        return control.CompanionHandle(self.kind, geometry, [], self.window, self.interval, list(self.layers))


def companions_of(config: Config, full: Geometry) -> tuple[CompanionForm, ...]:
    """The other resources of a rank so configured, `full` its first, in the order that all parts of a daemon have them.

    ConfigError, with the numbers: one can't be, or a size holds too little.
    """
    found = []
    if config.window is not None:
        found.append(_window(config, config.window, full))
    if config.mamba is not None:
        found.append(_mamba(config, config.mamba, full))
    return tuple(found)


def _window(config: Config, window: WindowConfig, full: Geometry) -> CompanionForm:
    pool = config.pool
    row: dict[str, Any] = {}
    if pool.kv_lora_rank is None or window.num_kv_heads is not None:
        row = {"num_kv_heads": window.num_kv_heads or pool.num_kv_heads, "kv_lora_rank": 0, "qk_rope_head_dim": 0}
        row["head_dim"] = window.head_dim or pool.head_dim
        row["v_head_dim"] = window.v_head_dim or pool.v_head_dim or 0
    dtype = window.dtype or full.dtype
    try:
        one = replace(full, num_pages=1, host_pages=0, num_layers=window.num_layers, dtype=dtype, **row)
    except ConfigError as exc:
        key = exc.path.removeprefix("pool.")
        path = f"window.{key}" if getattr(window, key, None) is not None else exc.path
        raise ConfigError(exc.message.replace(exc.path, path), **{**exc.facts, "path": path}) from None
    least = -(-window.size // one.page_size)
    what = f"pages of {one.page_size} tokens, and a window of {window.size:,} takes {least}"
    remedy = f"write window.{{}} = {least * one.page_size} or more"
    device, bound = full.num_pages // WINDOW_SHARE, f"a quarter of [pool]'s {full.num_pages:,}"
    key = "window.num_tokens"
    enough = remedy.format("num_tokens")
    if window.bytes is not None:
        if window.bytes < least * one.page_bytes:  # before anything is said of a single page
            _enough(
                "window.bytes",
                f"{window.bytes:,} bytes",
                window.bytes // one.page_bytes,
                least,
                what,
                _bytes_of(one, least),
            )
        device = _pages("window.bytes", window.bytes, one.page_bytes, "in each shard")
        key, bound = "window.bytes", f"{window.bytes:,} bytes"
    elif window.num_tokens is not None:
        device, bound = window.num_tokens // one.page_size, f"{window.num_tokens:,} tokens"
    _enough(key, bound, device, least, what, enough)
    host, host_bound = _in_proportion(full, device)
    if window.host_tokens is not None:
        host, host_bound = window.host_tokens // one.page_size, f"{window.host_tokens:,} tokens"
    if full.host_pages:
        _enough("window.host_tokens", host_bound, host, least, what, remedy.format("host_tokens"))
    form = replace(one, num_pages=device, host_pages=host)
    return CompanionForm(WINDOW, form, window.size, 0, tuple(window.layers or ()))


def _mamba(config: Config, mamba: MambaConfig, full: Geometry) -> CompanionForm:
    one = StateGeometry(
        num_pages=1,
        num_layers=mamba.num_layers,
        states=tuple(StateForm(state.name, tuple(state.shape), state.dtype) for state in mamba.states),
        layout=full.layout,
        num_shards=full.num_shards,
        host_layout=full.host_layout,
    )
    device = mamba.num_slots or 0
    if mamba.bytes is not None:
        device = mamba.bytes // one.page_bytes
        what = f"slots of {one.page_bytes:,} in each shard, and a request that goes on from a state writes another"
        remedy = f'write mamba.bytes = "{LEAST_SLOTS * one.page_bytes} B" or more'
        _enough("mamba.bytes", f"{mamba.bytes:,} bytes", device, LEAST_SLOTS, what, remedy)
    host, bound = _in_proportion(full, device)
    if mamba.host_slots is not None:
        host, bound = mamba.host_slots, f"{mamba.host_slots:,}"
    if full.host_pages:
        _enough("mamba.host_slots", bound, host, 1, "slots", "write mamba.host_slots = 1 or more")
    form = replace(one, num_pages=device, host_pages=host)
    return CompanionForm(MAMBA, form, 0, mamba.interval, tuple(mamba.layers or ()))


def _in_proportion(full: Geometry, num_pages: int) -> tuple[int, str]:
    """Of a companion's host pool, as the first resource has it: its pages, and why."""
    told = f"{full.host_pages:,} / {full.num_pages:,} of {num_pages:,} on the device"
    return full.host_pages * num_pages // full.num_pages, told


def _bytes_of(one: Geometry, num_pages: int) -> str:
    return f'write window.bytes = "{num_pages * one.page_bytes} B" or more'


def _enough(path: str, bound: str, num_pages: int, least: int, what: str, remedy: str) -> None:
    if num_pages < least:
        if num_pages == 1:
            what = what.replace("pages", "page", 1).replace("slots", "slot", 1)
        raise ConfigError(f"{path}: {bound}: that is {num_pages:,} {what}; {remedy}", path=path, value=num_pages)
    if num_pages > MAX_INT32:
        raise ConfigError(
            f"{path}: {bound}: that is {num_pages:,}, more than a slot number can name ({MAX_INT32}); write less",
            path=path,
            value=num_pages,
        )


def form_from_wire(wire: control.Geometry | control.StateGeometry) -> Geometry | StateGeometry:
    if isinstance(wire, control.Geometry):
        return Geometry.from_wire(wire)
    return StateGeometry.from_wire(wire)


def _wrong(name: str, what: str, section: str = "pool") -> ConfigError:
    return ConfigError(f"{section}.{name} {what}", path=f"{section}.{name}")


def _pages(path: str, num_bytes: int, page_bytes: int, which: str) -> int:
    """As many as fit."""
    if not 1 <= (found := num_bytes // page_bytes) <= MAX_INT32:
        raise ConfigError(
            f"{path}: {num_bytes:,} bytes hold {found:,} pages of {page_bytes:,} bytes {which}; write "
            f'"{page_bytes} B" to "{page_bytes * MAX_INT32} B"',
            path=path,
            value=num_bytes,
        )
    return found
