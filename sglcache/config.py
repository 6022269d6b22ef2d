"""The configuration: one frozen model a section, one TOML file, and `--set` over it.

Laws: an unknown key is an error, by its dotted path and with the nearest known one; a wrong value is an error that
names the path, the value, where it came from and what to write instead; nothing is read from the environment. Every
field has a default, so a daemon needs no file, and a description (a test holds both); but for a section that is not
there by default, which has fields that must be written. Units are in the names; of sizes in bytes, in the values.

This file is apart from `server/` because the core's and the pools' shapes are decided here, before anything is built.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
import string
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    model_validator,
)

from sglcache.errors import ConfigError

MAX_PAGES = 2**31 - 1  # a slot is an int32
MAX_RANKS = 4096
MAX_TENANT_NAME = 64  # characters
MAX_LOAD_WORDS = 1 << 20  # of 8 bytes, one for each load slot and layer; each load slot is made at the start
MAX_FILE = 16 << 20  # bytes of a configuration's file

C = TypeVar("C", bound="Section")

Port = Annotated[int, Field(ge=0, le=65535)]


def _endpoint(value: str) -> str:
    """`tcp://HOST:PORT` (IPv6 in brackets; `*` binds every interface; port 0: the system's choice) or `ipc://PATH`."""
    if value.startswith("ipc://") and len(value) > len("ipc://"):
        return value
    match = re.fullmatch(r"tcp://(\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]]+):([0-9]{1,5})", value)
    if match is None or int(match[2]) > 65535:
        raise ValueError("write tcp://HOST:PORT with a port of 0 to 65535 (an IPv6 host in brackets), or ipc://PATH")
    return value


TOPIC_FIELDS = ("host", "model", "rank", "dp_rank", "pp_rank")


def _topic(value: str) -> str:
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(value) if name is not None}
    except ValueError as exc:
        raise ValueError(f"{exc}; write {{{{ and }}}} for braces") from None
    if not names <= set(TOPIC_FIELDS):
        raise ValueError(f"use {', '.join(f'{{{name}}}' for name in TOPIC_FIELDS)}; write {{{{ and }}}} for braces")
    return value


def _http_url(value: str) -> str:
    if re.fullmatch(r"https?://[^\s/]+(/\S*)?", value) is None:
        raise ValueError("write http://HOST:PORT")
    return value.rstrip("/")


def _host(value: str) -> str:
    """An address or a host's name, as far as it can be told without asking for it."""
    try:
        value.encode("idna")  # as it will be looked up
    except UnicodeError:
        raise ValueError("write an address, or a name whose parts between the dots have 1 to 63 characters") from None
    if re.search(r"[\s\0/\[\]]", value):
        raise ValueError("write an address, without brackets or a port, or a name")
    return value


def _path(value: object) -> object:
    if value is None or isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value:
        raise ValueError("write a path as text")
    if "\0" in value:
        raise ValueError("a path has no zero byte in it; write it without")
    try:
        return Path(value).expanduser()
    except RuntimeError:  # no such user, or we have no home: no HOME, and no entry in passwd
        user = value.partition("/")[0]
        raise ValueError(f"nobody knows where {user} is; write the whole path, without ~, or set HOME") from None


UNITS = {
    "B": 1,
    **{f"{x}B": 1000**n for n, x in enumerate("kMGT", 1)},
    **{f"{x}iB": 1024**n for n, x in enumerate("KMGT", 1)},
}


def parse_size(value: object) -> int:
    """Bytes: a number and its unit, such as "8 GiB" (2**30 each) or "512 MB" (10**6 each). ValueError: it is not that.

    A bare number is none: whether "8" is GB or GiB, or bytes, is what such files are read wrongly by.
    """
    example = 'such as "8 GiB" (1024 * 1024 * 1024 each) or "512 MB" (1000 * 1000 each)'
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError(f'write a size with its unit, {example}; bytes are "{value} B"')
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)", value.strip()) if isinstance(value, str) else None
    by_name = {name.lower(): factor for name, factor in UNITS.items()}
    if match is None or match[2].lower() not in by_name:
        raise ValueError(f"write a number and a unit of {', '.join(UNITS)}, {example}")
    exact = Decimal(match[1]) * by_name[match[2].lower()]
    if 0 < exact < 1:
        raise ValueError('that is less than a byte; "0 B" is none')
    return int(exact)


def size_text(num_bytes: int) -> str:
    """The same size as `parse_size` reads it, exactly, in the unit that makes the shortest number."""
    fits = [(num_bytes // factor, -factor, name) for name, factor in UNITS.items() if num_bytes % factor == 0]
    number, _, name = min(fits) if num_bytes else (0, 0, "B")
    return f"{number} {name}"


def _name(value: str) -> str:
    if value != value.strip():
        raise ValueError("write the name without blanks around it")
    return value


def _identifier(value: str) -> str:
    if not value.isidentifier() or not value.isascii():
        raise ValueError('write a name of letters, digits and _, such as "conv"')
    return value


Size = Annotated[int, BeforeValidator(parse_size), PlainSerializer(size_text, return_type=str)]
Endpoint = Annotated[str, AfterValidator(_endpoint)]
Host = Annotated[str, AfterValidator(_host)]
HttpUrl = Annotated[str, AfterValidator(_http_url)]
FilePath = Annotated[Path, BeforeValidator(_path)]


class Section(BaseModel):
    """A part of the configuration: frozen, strict about types, and closed to keys that it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True, protected_namespaces=())


Layout = Literal["page_first", "layer_first"]
Dtype = Literal["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"]


class PoolConfig(Section):
    """`[pool]`: the device pool, where a model runner reads and writes KV in place."""

    device: Literal["cpu", "cuda"] = Field(default="cpu", description="Where the pool is: shared memory, or cards.")
    page_size: int = Field(default=16, ge=1, le=4096, description="Tokens per page; a block on the event stream.")
    num_tokens: int = Field(
        default=1 << 20,
        ge=1,
        description="Tokens that the pool holds, rounded down to whole pages. Read only where size is not set.",
    )
    size: Size | None = Field(
        default=None,
        description='Bytes of each shard\'s pool instead, such as "100 GB", rounded down to whole pages.',
    )
    num_layers: int = Field(
        default=2,
        ge=0,
        le=4096,
        description="The layers of this pipeline rank that keep every token's KV; 0 where all are a window's.",
    )
    num_kv_heads: int = Field(default=1, ge=1, le=65536, description="KV heads per layer, of all shards together.")
    head_dim: int = Field(default=32, ge=1, le=65536, description="Elements per head.")
    v_head_dim: int | None = Field(
        default=None, ge=1, le=65536, description="Elements per head of V, where it differs from K."
    )
    kv_lora_rank: int | None = Field(
        default=None,
        ge=1,
        le=65536,
        description="Latent attention (MLA): elements of a token's latent. There are then no heads, and shards are "
        "replicas.",
    )
    qk_rope_head_dim: int | None = Field(
        default=None, ge=0, le=65536, description="Latent attention: elements of the rotated key behind the latent."
    )
    dtype: Dtype = Field(default="float16", description="Element type of K and V, by torch's name.")
    layout: Layout = Field(
        default="page_first",
        description="page_first: a page's K and V of all layers are contiguous; layer_first: all pages of a layer are, "
        "for kernels that want [slots, heads, dim].",
    )
    bigram: bool = Field(
        default=False,
        description="A page's key is its tokens and the one behind them, as pairs: for runners with a draft model of "
        "EAGLE's kind, whose KV depends on that one, too. Events have the pairs.",
    )
    num_shards: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Tensor-parallel shards on this host: one tensor each, one page table. They split the heads; more "
        "shards than heads share them.",
    )
    untried: bool = Field(
        default=False,
        description="Serve from cards although this version's CUDA code has not run on one: to find out, not to rely "
        "on. docs/gpu.md.",
    )
    gpus: list[Annotated[int, Field(ge=0, le=1023)]] | None = Field(
        default=None,
        description="On cards: the number of each shard's card, as CUDA_VISIBLE_DEVICES counts, for all shards of this "
        "host's first rank, then of its second; one may be there twice. By default 0, 1, 2 and on.",
    )
    export: Literal["fd", "ipc"] = Field(
        default="fd",
        description="On cards: how runners get the pool; fd: a descriptor of memory that is gone with its last user; "
        "ipc: a legacy IPC handle, for drivers that export no descriptors.",
    )

    @model_validator(mode="after")
    def _check(self) -> PoolConfig:
        if self.size is None and not self.page_size <= self.num_tokens < (MAX_PAGES + 1) * self.page_size:
            raise ConfigError(
                f"pool.num_tokens = {self.num_tokens} makes {self.num_tokens // self.page_size} pages of "
                f"{self.page_size} tokens; write {self.page_size} to {MAX_PAGES * self.page_size}",
                path="pool.num_tokens",
                value=self.num_tokens,
            )
        if self.size is not None and self._says("num_tokens"):
            raise ConfigError(
                f'pool.size = "{size_text(self.size)}" and pool.num_tokens = {self.num_tokens} both say how big the '
                "pool is; leave one out",
                path="pool.size",
                value=self.size,
            )
        if (self.kv_lora_rank is None) != (self.qk_rope_head_dim is None):
            have, miss = ("kv_lora_rank", "qk_rope_head_dim")[:: 1 if self.kv_lora_rank is not None else -1]
            raise ConfigError(
                f"pool.{have} = {getattr(self, have)} without pool.{miss}: latents have both; write it, 0 where a "
                "latent has no rotated key"
                if have == "kv_lora_rank"
                else f"pool.{have} without pool.{miss}: a rotated key stands behind a latent; write both, or head_dim",
                path=f"pool.{miss}",
                value=None,
            )
        if self.kv_lora_rank is not None:
            for key in ("num_kv_heads", "head_dim", "v_head_dim"):
                if self._says(key):
                    raise ConfigError(
                        f"pool.{key} = {getattr(self, key)} is of heads, and pool.kv_lora_rank = {self.kv_lora_rank} "
                        "says that latents are kept; leave one out",
                        path=f"pool.{key}",
                        value=getattr(self, key),
                    )
        elif self.num_kv_heads % self.num_shards and self.num_shards % self.num_kv_heads:
            raise ConfigError(
                f"pool.num_shards = {self.num_shards} does not divide pool.num_kv_heads = {self.num_kv_heads}, nor is "
                "it a multiple of it; make one a multiple of the other",
                path="pool.num_shards",
                value=self.num_shards,
            )
        return self

    def _says(self, key: str) -> bool:
        """It was written, whatever the value."""
        return key in self.model_fields_set and getattr(self, key) is not None


SCRUB_RATE = 64_000_000  # host.scrub_rate's default


class HostConfig(Section):
    """`[host]`: the second tier, in host memory beside the device pool."""

    pool_ratio: float = Field(
        default=2.0,
        ge=0,
        le=1024,
        allow_inf_nan=False,
        description="Size as a multiple of the device pool's pages; 0: no host tier. Read only where num_tokens and "
        "size are not set.",
    )
    num_tokens: int | None = Field(
        default=None, ge=0, description="Size in tokens, rounded down to whole pages; 0: no host tier."
    )
    size: Size | None = Field(
        default=None,
        description='Bytes of all shards together instead, such as "256 GiB", rounded down to whole pages; "0 B": no '
        "host tier. They are for [pool]'s pages; what [window] and [mamba] have there comes on top.",
    )
    layout: Layout = Field(default="page_first", description="As pool.layout, of the host's pages; each may be either.")
    populate: bool = Field(
        default=False,
        description="Have all of its memory from the start on, in the background, instead of as it is written.",
    )
    copy_threads: int = Field(
        default=0,
        ge=0,
        le=64,
        description="Threads that copy, for each direction; 0: a quarter of the cores, 1 to 4.",
    )
    write_policy: Literal["write_through", "write_through_selective", "write_back"] = Field(
        default="write_through",
        description="When a page is copied to it: with the commit that brings it (write_through), once it was used "
        "write_threshold times (write_through_selective), or when it is to leave the device (write_back).",
    )
    write_threshold: int = Field(default=2, ge=1, le=1 << 31, description="write_through_selective: so many uses.")
    load_back_threshold: int = Field(
        default=0, ge=0, le=1 << 31, description="Tokens: a hit of fewer on the host alone is computed again."
    )
    keep: bool = Field(
        default=True,
        description="Have its pages outlive a rank that dies: the next life serves them. It costs a row of memory a "
        "page, and some microseconds when a page comes.",
    )
    keep_path: FilePath | None = Field(
        default=None,
        description="A folder, best on a tmpfs such as /dev/shm, whose files hold its pages, so that they outlive the "
        "whole daemon, until the machine boots again. All of the memory is taken at the start. `sglcache purge` "
        "removes it.",
    )
    scrub_rate: Size = Field(  # type: ignore[assignment]  # as a file has it
        default="64 MB",
        description="Bytes a second of its pages that are looked at for whether they have changed by themselves; "
        '"0 B": none. It needs keep, whose journal it uses.',
    )
    load_back_quota: int = Field(
        default=0,
        ge=0,
        le=1 << 40,
        description="Tokens that may be on their way back from it at once; further hits are computed again. 0: any.",
    )

    @model_validator(mode="after")
    def _check(self) -> HostConfig:
        if self.size is not None and self.num_tokens is not None:
            raise ConfigError(
                f'host.size = "{size_text(self.size)}" and host.num_tokens = {self.num_tokens} both say how big the '
                "tier is; leave one out",
                path="host.size",
                value=self.size,
            )
        if self.write_threshold != 2 and self.write_policy != "write_through_selective":
            raise ConfigError(
                f"host.write_threshold = {self.write_threshold} is write_through_selective's; write "
                'host.write_policy = "write_through_selective", or leave it out',
                path="host.write_threshold",
                value=self.write_threshold,
            )
        if not self.keep and self.scrub_rate not in (0, SCRUB_RATE):
            raise ConfigError(
                f'host.scrub_rate = "{size_text(self.scrub_rate)}" needs host.keep, whose journal says what is in a '
                "slot; leave one of the two out",
                path="host.scrub_rate",
                value=self.scrub_rate,
            )
        return self

    @property
    def enabled(self) -> bool:
        """There is a host tier."""
        said = [value for value in (self.num_tokens, self.size) if value is not None]
        return bool(said[0] if said else self.pool_ratio)


PolicyName = Literal["lru", "lfu", "fifo", "mru", "filo", "priority", "slru", "tlru"]


class EvictionConfig(Section):
    """`[eviction]`: which cached pages of a tier go first when there is no room. What is in use never goes."""

    device: PolicyName = Field(
        default="lru",
        description="Of the device pool: the least recently used first (lru), the least often used (lfu), the oldest "
        "(fifo), the newest (filo), the most recently used (mru), those of the lowest request priority (priority), "
        "those used once before those used again (slru), or what lies beyond the next prompt (tlru).",
    )
    host: PolicyName = Field(default="lru", description="Of the host pool: one of the same.")
    protected_threshold: int = Field(
        default=2, ge=1, le=1 << 31, description="slru: from so many uses on a page is protected."
    )
    next_prompt_estimate: int = Field(
        default=0, ge=0, le=1 << 31, description="tlru: tokens that the next prompt of a conversation adds."
    )
    threshold: int = Field(
        default=0, ge=0, le=1 << 31, description="tlru: tokens that may be computed anew without harm."
    )

    @model_validator(mode="after")
    def _check(self) -> EvictionConfig:
        for key, policy in (("protected_threshold", "slru"), ("next_prompt_estimate", "tlru"), ("threshold", "tlru")):
            value = getattr(self, key)
            if value != type(self).model_fields[key].default and policy not in (self.device, self.host):
                raise ConfigError(
                    f"eviction.{key} = {value} is {policy}'s, and neither tier has that policy; write "
                    f'eviction.device = "{policy}" or eviction.host = "{policy}", or leave it out',
                    path=f"eviction.{key}",
                    value=value,
                )
        return self


class WindowConfig(Section):
    """`[window]`: layers whose queries see the last tokens only. They have pages in pools of their own.

    What is left out of a token's form is `[pool]`'s.
    """

    size: int = Field(
        ge=1, le=1 << 31, description="Tokens that a query sees, itself among them: the model's sliding_window."
    )
    num_layers: int = Field(ge=1, le=4096, description="Such layers of this pipeline rank.")
    num_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens that the pool holds, rounded down to whole pages; by default a quarter of [pool]'s.",
    )
    bytes: Size | None = Field(
        default=None, description='Bytes of each shard\'s pool instead, such as "8 GB", rounded down to whole pages.'
    )
    host_tokens: int | None = Field(
        default=None,
        ge=0,
        description="Tokens that the host's pool holds; by default in the proportion of the device's.",
    )
    num_kv_heads: int | None = Field(default=None, ge=1, le=65536, description="KV heads per layer, of all shards.")
    head_dim: int | None = Field(default=None, ge=1, le=65536, description="Elements per head.")
    v_head_dim: int | None = Field(
        default=None, ge=1, le=65536, description="Elements per head of V, where it differs from K."
    )
    dtype: Dtype | None = Field(default=None, description="Element type of K and V, by torch's name.")
    layers: list[Annotated[int, Field(ge=0, le=65535)]] | None = Field(
        default=None, description="The model's numbers of these layers, in order, for the runner to be told."
    )

    @model_validator(mode="after")
    def _check(self) -> WindowConfig:
        if self.num_tokens is not None and self.bytes is not None:
            raise ConfigError(
                f'window.bytes = "{size_text(self.bytes)}" and window.num_tokens = {self.num_tokens} both say how big '
                "the pool is; leave one out",
                path="window.bytes",
                value=self.bytes,
            )
        _check_layers("window", self.layers, self.num_layers)
        return self


class MambaStateConfig(Section):
    """`[[mamba.states]]`: one of the arrays that a layer's state is made of."""

    name: Annotated[str, AfterValidator(_identifier)] = Field(
        max_length=64, description='What the runner calls it, such as "conv" or "ssm".'
    )
    shape: list[Annotated[int, Field(ge=1, le=1 << 31)]] = Field(
        min_length=1, max_length=8, description="Of a layer, of all shards together, which split the first axis."
    )
    dtype: Dtype = Field(description="Element type, by torch's name.")


class MambaConfig(Section):
    """`[mamba]`: layers that keep one state in place of KV. A slot has the states of all of them after some token."""

    num_layers: int = Field(ge=1, le=4096, description="Such layers of this pipeline rank.")
    states: list[MambaStateConfig] = Field(min_length=1, max_length=16, description="What the state of a layer is.")
    num_slots: int | None = Field(
        default=None,
        ge=2,
        le=MAX_PAGES,
        description="States that the pool holds; a request that goes on from one writes another.",
    )
    bytes: Size | None = Field(
        default=None, description='Bytes of each shard\'s pool instead, such as "8 GB", rounded down to whole slots.'
    )
    host_slots: int | None = Field(
        default=None,
        ge=0,
        le=MAX_PAGES,
        description="States that the host's pool holds; by default in the proportion of the device's tokens.",
    )
    interval: int = Field(
        default=1024,
        ge=1,
        le=1 << 31,
        description="Tokens between the states that a runner is to commit, whole pages; it is told at hello.",
    )
    max_states_per_path: int = Field(
        default=0, ge=0, le=1 << 31, description="States kept of one prompt, beyond which its oldest goes; 0: any."
    )
    layers: list[Annotated[int, Field(ge=0, le=65535)]] | None = Field(
        default=None, description="The model's numbers of these layers, in order, for the runner to be told."
    )

    @model_validator(mode="after")
    def _check(self) -> MambaConfig:
        if (self.num_slots is None) == (self.bytes is None):
            raise ConfigError(
                "mamba: num_slots and bytes both say how big the pool is; leave one out"
                if self.num_slots is not None
                else "mamba.num_slots is missing: states that the pool holds, those that requests write among them; "
                'write it, or mamba.bytes, such as "8 GB"',
                path="mamba.num_slots",
                value=self.num_slots,
            )
        names = [state.name for state in self.states]
        if twice := [name for number, name in enumerate(names) if name in names[:number]]:
            raise ConfigError(
                f'mamba.states: two are named "{twice[0]}"; give each a name of its own',
                path="mamba.states",
                value=names,
            )
        _check_layers("mamba", self.layers, self.num_layers)
        return self


def _check_layers(section: str, layers: list[int] | None, num_layers: int) -> None:
    if layers is not None and (len(layers) != num_layers or sorted(set(layers)) != layers):
        raise ConfigError(
            f"{section}.layers = {layers}: of {section}.num_layers = {num_layers} layers; write the number of each "
            "once, from the lowest to the highest, or leave it out",
            path=f"{section}.layers",
            value=layers,
        )


class StageConfig(Section):
    """`[[parallel.stages]]`: what one pipeline rank has otherwise than the sections of its pools say."""

    num_layers: int | None = Field(default=None, ge=0, le=4096, description="Of this stage, as pool.num_layers.")
    num_tokens: int | None = Field(default=None, ge=1, description="Tokens that its device pool holds.")
    size: Size | None = Field(default=None, description="Bytes of each of its shards' pools instead.")
    host_num_tokens: int | None = Field(
        default=None, ge=0, description="Tokens that its host pool holds; 0: no host tier."
    )
    host_size: Size | None = Field(default=None, description="Bytes of its host pool instead, of all shards.")
    window_num_layers: int | None = Field(
        default=None, ge=0, le=4096, description="Of this stage, as window.num_layers; 0: it has none."
    )
    window_num_tokens: int | None = Field(default=None, ge=1, description="Of this stage, as window.num_tokens.")
    window_host_tokens: int | None = Field(default=None, ge=0, description="Of this stage, as window.host_tokens.")
    mamba_num_layers: int | None = Field(
        default=None, ge=0, le=4096, description="Of this stage, as mamba.num_layers; 0: it has none."
    )
    mamba_num_slots: int | None = Field(
        default=None, ge=2, le=MAX_PAGES, description="Of this stage, as mamba.num_slots."
    )
    mamba_host_slots: int | None = Field(
        default=None, ge=0, le=MAX_PAGES, description="Of this stage, as mamba.host_slots."
    )

    @model_validator(mode="after")
    def _check(self) -> StageConfig:
        for tokens, size in (("num_tokens", "size"), ("host_num_tokens", "host_size")):
            if getattr(self, tokens) is not None and getattr(self, size) is not None:
                raise ConfigError(
                    f"parallel.stages: {tokens} and {size} both say how big a tier is; leave one out",
                    path=f"parallel.stages.{size}",
                    value=getattr(self, size),
                )
        return self


class ParallelConfig(Section):
    """`[parallel]`: the model's data-parallel replicas and pipeline stages, and which of them this host serves.

    There is a rank for each (dp, pp); its offset, pp_rank * dp_size + dp_rank, is added to every port. Tensor-parallel
    shards are no ranks: they are `pool.num_shards` of each.
    """

    dp_size: int = Field(default=1, ge=1, le=1024, description="Data-parallel replicas of the model, on all hosts.")
    pp_size: int = Field(default=1, ge=1, le=1024, description="Pipeline stages of each replica, on all hosts.")
    dp_ranks: list[int] | None = Field(
        default=None, description="The replicas that this host serves, such as [0, 1]; by default all."
    )
    pp_ranks: list[int] | None = Field(
        default=None, description="The stages that this host serves of each of them; by default all."
    )
    stages: list[StageConfig] = Field(
        default=[], description="One for each pipeline rank, in order, where they differ; none: all are alike."
    )

    @model_validator(mode="after")
    def _check(self) -> ParallelConfig:
        if self.dp_size * self.pp_size > MAX_RANKS:
            raise ConfigError(
                f"parallel.dp_size = {self.dp_size} times parallel.pp_size = {self.pp_size} makes "
                f"{self.dp_size * self.pp_size} ranks; at most {MAX_RANKS} can be told apart by a port each",
                path="parallel.dp_size",
                value=self.dp_size,
            )
        for key, ranks, size in (("dp", self.dp_ranks, self.dp_size), ("pp", self.pp_ranks, self.pp_size)):
            if ranks is None:
                continue
            outside = [rank for rank in ranks if not 0 <= rank < size]
            if not ranks or outside or len(set(ranks)) < len(ranks):
                wrong = (
                    f"{outside[0]} is not in 0..{size - 1}" if outside else "one is there twice" if ranks else "none"
                )
                raise ConfigError(
                    f"parallel.{key}_ranks = {ranks}: {wrong}; write some of 0..{size - 1} (parallel.{key}_size is "
                    f"{size}), each once, or leave it out for all",
                    path=f"parallel.{key}_ranks",
                    value=ranks,
                )
        if self.stages and len(self.stages) != self.pp_size:
            raise ConfigError(
                f"parallel.stages: {len(self.stages)} of them, but parallel.pp_size = {self.pp_size}; "
                "write one [[parallel.stages]] for each pipeline rank, in order, or none",
                path="parallel.stages",
                value=len(self.stages),
            )
        return self

    def local(self) -> list[tuple[int, int]]:
        """(dp_rank, pp_rank) of each rank that this host serves, by offset."""
        replicas = sorted(self.dp_ranks if self.dp_ranks is not None else range(self.dp_size))
        stages = sorted(self.pp_ranks if self.pp_ranks is not None else range(self.pp_size))
        return [(dp_rank, pp_rank) for pp_rank in stages for dp_rank in replicas]


class EventsConfig(Section):
    """`[events]`: the stream that tells routers what is cached where."""

    enabled: bool = Field(default=True, description="false: nothing is hashed, queued or bound.")
    endpoint: Endpoint = Field(
        default="tcp://127.0.0.1:5557", description="Where the publisher binds (ZMQ PUB); port 0: the system's choice."
    )
    replay_endpoint: Endpoint = Field(
        default="tcp://127.0.0.1:5657", description="Where replay is answered (ZMQ ROUTER)."
    )
    mode: Literal["bind", "connect"] = Field(
        default="bind",
        description="connect: every rank dials the endpoint, where a subscriber binds; replay is bound all the same.",
    )
    topic: Annotated[str, AfterValidator(_topic)] = Field(
        default="",
        max_length=256,
        description="First frame of every message; {host}, {model}, {rank}, {dp_rank} and {pp_rank} are filled in.",
    )
    encoding: Literal["map", "array", "superset"] = Field(
        default="map",
        description="map: SGLang from 0.5.21 on, Dynamo; array: SGLang to 0.5.19, llm-d; superset: vLLM's keys, too.",
    )
    token_ids: Literal["clear", "fixed", "none"] = Field(
        default="clear",
        description="fixed: each takes five bytes, which is quicker to make and a quarter longer; "
        "none: blocks are told of by their hashes alone.",
    )
    cache_salt: Literal["clear", "hashed"] = Field(
        default="clear", description="hashed: a salt is told as the hex of its sha256."
    )
    extra_key_as: Literal["lora_name", "cache_salt"] | None = Field(
        default=None,
        description="The field that tells routers of an extra_key; by default they are not told of such namespaces.",
    )
    groups: bool = Field(
        default=False,
        description="true: windows and states are told of, too, as groups of their own beside full KV, in vLLM's "
        "fields. A consumer that does not know group_idx takes their removals for those of full KV.",
    )
    announce_every_s: float = Field(
        default=0.0,
        ge=0,
        le=86400,
        description="Seconds after which all that is cached is told anew, for subscribers that can't ask; 0: never.",
    )
    dynamo_indexers: list[HttpUrl] = Field(
        default=[],
        description="Dynamo indexers, http://HOST:PORT, at which each rank registers itself whenever it starts.",
    )
    instance_id: int | None = Field(
        default=None,
        ge=0,
        le=(1 << 63) - 1,
        description="This host's ranks to Dynamo's indexers; by default made of the host's name and the port of HTTP.",
    )
    advertised_host: str | None = Field(
        default=None, min_length=1, description="How others reach a stream that is bound to every interface."
    )
    curve_key_file: FilePath | None = Field(
        default=None, description="Secret key of both sockets (ZMQ CURVE), as `sglcache keygen` writes it."
    )
    curve_allow_dir: FilePath | None = Field(
        default=None, description="Folder of the public keys, *.key, that may connect; by default every key may."
    )
    hash: Literal["xxh3_128", "sha256"] = Field(
        default="xxh3_128", description="The block hash; sha256 gives SGLang's values for plain pages."
    )
    max_delay_ms: float = Field(
        default=1.0, ge=0, le=1000, description="Milliseconds that an event may wait for others to share its batch."
    )
    max_blocks: int = Field(default=4096, ge=1, le=1 << 20, description="Blocks that one batch may hold.")
    ring_size: Annotated[Size, Field(ge=1 << 16)] = Field(  # type: ignore[assignment]  # as a file has it
        default="64 MiB", description="Encoded batches kept for replay, in bytes; an older start gets a snapshot."
    )
    heartbeat_s: float = Field(
        default=1.0, gt=0, le=60, description="Seconds of silence after which an empty batch is sent."
    )
    hwm: int = Field(default=10_000, ge=1, le=1 << 20, description="Batches that a subscriber may lag before it loses.")

    @model_validator(mode="after")
    def _check(self) -> EventsConfig:
        if self.endpoint == self.replay_endpoint and not self.endpoint.endswith(":0"):
            raise ConfigError(
                f"events.replay_endpoint = {self.replay_endpoint!r} is events.endpoint too; give it a port of its own",
                path="events.replay_endpoint",
                value=self.replay_endpoint,
            )
        if self.groups and self.encoding == "array":
            raise ConfigError(
                'events.groups: arrays have no place for its fields; use events.encoding = "map" or "superset", '
                "or leave events.groups out",
                path="events.groups",
                value=self.groups,
            )
        if self.curve_allow_dir is not None and self.curve_key_file is None:
            raise ConfigError(
                "events.curve_allow_dir says who may connect, and without events.curve_key_file everyone may; set both",
                path="events.curve_allow_dir",
                value=str(self.curve_allow_dir),
            )
        if self.dynamo_indexers and (self.curve_key_file or self.token_ids == "none" or self.mode == "connect"):
            raise ConfigError(
                "events.dynamo_indexers: an indexer dials, without CURVE, and matches by tokens; leave "
                'events.curve_key_file, events.token_ids = "none" and events.mode = "connect" out',
                path="events.dynamo_indexers",
                value=self.dynamo_indexers,
            )
        if self.mode == "connect" and self.endpoint.endswith(":0"):
            raise ConfigError(
                f"events.endpoint = {self.endpoint!r} can't be dialled; name the port that the subscriber binds",
                path="events.endpoint",
                value=self.endpoint,
            )
        return self


class HttpConfig(Section):
    """`[http]`: GET /health, /server_info and /metrics, on one port for all ranks."""

    enabled: bool = Field(
        default=True, description="false: no port; the pages are then on a unix socket only, where the CLI asks."
    )
    host: Host = Field(
        default="127.0.0.1",
        min_length=1,
        description="The address to bind; 0.0.0.0 for every one of IPv4, :: for those of IPv6 as well.",
    )
    port: Port = Field(default=30080, description="The port to bind; 0: the system's choice.")
    names: list[str] = Field(
        default=[],
        description="Names by which browsers reach it, beside localhost and addresses: /api is answered under these "
        'alone; "*" for any.',
    )
    show_tokens: Literal["loopback", "always", "never"] = Field(
        default="loopback",
        description="Where the tokens of what is cached are shown: loopback: where http.host is a loopback address.",
    )
    tokenizer: FilePath | None = Field(
        default=None, description="A tokenizer.json: what is cached is then shown as text, too, where tokens are."
    )


class ObserveConfig(Section):
    """`[observe]`: what is kept so that people can see why. 0 turns a part off, and then it costs nothing."""

    departures: int = Field(
        default=16384, ge=0, le=1 << 20, description="Runs of pages that left a tier, for `sglcache explain`."
    )
    requests: int = Field(default=4096, ge=0, le=1 << 20, description="Acquires, for `sglcache explain --request`.")
    max_size: Annotated[Size, Field(ge=1 << 16)] = Field(  # type: ignore[assignment]  # as a file has it
        default="64 MiB", description="Bytes that each of these two keeps at most, of tokens above all; then fewer are."
    )
    reuse_sample_tokens: int = Field(
        default=8192,
        ge=0,
        le=1 << 20,
        description="Of so many tokens about one page is followed, to tell what more memory adds: `sglcache plan`.",
    )
    reuse_pages: int = Field(default=32768, ge=64, le=1 << 22, description="Pages that are followed at most.")
    reuse_window_s: float = Field(
        default=3600.0, gt=0, le=604_800.0, description="What is told of them is of the last seconds, so many."
    )


class ControlConfig(Section):
    """`[control]`: the unix sockets that model runners attach to, one for each rank."""

    socket: FilePath | None = Field(
        default=None,
        description="Rank 0's path, and with -1, -2, ... behind it the others'; by default rank-<offset>.sock in "
        "$XDG_RUNTIME_DIR/sglcache/, else in a private folder of the user's.",
    )
    num_load_slots: int = Field(
        default=64, ge=1, le=65536, description="Loads from the host that may be on their way at a time."
    )


class StorageConfig(Section):
    """`[storage]`: the third tier, below the host's. What the host has is stored, and found again after a restart.

    `file` keeps pages in a folder of this host, `mooncake` in a store of many. Pages are named by model_name, revision,
    and all of the pool's form, so nothing of another model is ever found.
    """

    kind: Literal["none", "file", "mooncake"] = Field(default="none", description="Where pages are kept.")
    revision: str = Field(
        default="",
        max_length=256,
        description="What changes with the model's weights, such as a commit: pages of another are not found.",
    )
    num_threads: int = Field(
        default=2, ge=1, le=64, description="Threads that read from it; one more writes, and one looks up."
    )
    path: FilePath | None = Field(
        default=None, description="file: the folder; each rank has one of its own in it, rank-0, rank-1, ..."
    )
    size: Annotated[Size, Field(ge=1 << 20)] = Field(  # type: ignore[assignment]  # as a file has it
        default="64 GiB", description="file: of each rank's pages on the disk; at it the least recently used go."
    )
    low_water: float = Field(
        default=0.95, gt=0, le=1, allow_inf_nan=False, description="file: down to this share of size at a time."
    )
    master: str | None = Field(
        default=None,
        min_length=1,
        description="mooncake: HOST:PORT of mooncake_master, or what its client takes for it.",
    )
    metadata_server: str = Field(
        default="P2PHANDSHAKE", min_length=1, description="mooncake: where clients find each other's addresses."
    )
    local_hostname: str = Field(
        default="127.0.0.1", min_length=1, description="mooncake: how other hosts reach this one's client."
    )
    protocol: str = Field(default="tcp", min_length=1, description="mooncake: tcp or rdma.")
    rdma_devices: str = Field(default="", description="mooncake: of rdma, with commas; by default it chooses.")
    segment_size: Size = Field(  # type: ignore[assignment]
        default="0 B",
        description="mooncake: memory of this host that each rank gives to the store, for everybody's pages.",
    )
    buffer_size: Annotated[Size, Field(ge=1 << 20)] = Field(  # type: ignore[assignment]
        default="64 MiB", description="mooncake: of its client's own buffers."
    )
    rpc_timeout_s: float = Field(
        default=5.0,
        gt=0,
        le=600,
        allow_inf_nan=False,
        description="mooncake: how long its master may take for an answer; a client that takes eight times as long is "
        "started anew.",
    )

    events: bool | None = Field(
        default=None,
        description="Whether routers are told: of a file store's pages as DISK, exactly (by default yes); of "
        "Mooncake's as EXTERNAL, that they were put there and no more (by default no).",
    )
    prefetch_policy: Literal["none", "best_effort", "wait_complete", "timeout"] = Field(
        default="timeout",
        description="What an acquire that does not say does about pages that only this tier has: nothing; have them "
        "fetched for later requests and go on; wait for all of them; or wait for as long as prefetch_timeout_s says.",
    )
    prefetch_timeout_s: float = Field(
        default=1.0, ge=0, le=3600, allow_inf_nan=False, description="timeout: so long for any prompt."
    )
    prefetch_timeout_per_ki_token_s: float = Field(
        default=0.25,
        ge=0,
        le=3600,
        allow_inf_nan=False,
        description="timeout: and so much more for every 1,024 tokens of it.",
    )
    prefetch_threshold: int = Field(
        default=256, ge=1, le=1 << 31, description="Tokens: fewer than these are computed rather than fetched."
    )
    prefetch_share: float = Field(
        default=0.5, gt=0, le=1, allow_inf_nan=False, description="Of the host pool that fetches may hold at once."
    )
    prefetch_part: Annotated[Size, Field(ge=1)] = Field(  # type: ignore[assignment]
        default="16 MiB", description="Bytes fetched in one go; what has come by the deadline is used."
    )
    store_share: float = Field(
        default=0.25,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="Of the host pool that may wait to be stored; what comes beyond is not stored.",
    )

    @model_validator(mode="after")
    def _check(self) -> StorageConfig:
        for key, field in type(self).model_fields.items():
            of = (field.description or "").partition(":")[0]
            if of in ("file", "mooncake") and of != self.kind and self._said(key):
                raise ConfigError(
                    f'storage.{key} is {of}\'s, and storage.kind = "{self.kind}"; write storage.kind = "{of}", or '
                    "leave it out",
                    path=f"storage.{key}",
                    value=getattr(self, key),
                )
        for kind, key, what in (("file", "path", "the folder for its pages"), ("mooncake", "master", "HOST:PORT")):
            if self.kind == kind and getattr(self, key) is None:
                raise ConfigError(
                    f'storage.kind = "{kind}" needs storage.{key}, {what}', path=f"storage.{key}", value=None
                )
        return self

    def _said(self, key: str) -> bool:
        """It is not the default."""
        default, value = type(self).model_fields[key].default, getattr(self, key)
        return bool(value != (parse_size(default) if key.endswith("size") else default))


def token_limit(value: int | str) -> int | str:
    """Tokens, or a share of the tier, such as "25%". ValueError: it is neither."""
    if isinstance(value, str):
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?%", value)
        if match is None or float(match[1]) > 100:
            raise ValueError('write tokens, or a share of the tier, such as "25%"')
    elif not 0 <= value <= 1 << 50:
        raise ValueError(f"write tokens, 0 to {1 << 50}")
    return value


def tenant_name(name: str) -> str:
    """ValueError: it is no name for a tenant."""
    if not 0 < len(name) <= MAX_TENANT_NAME or name != name.strip() or not name.isprintable():
        raise ValueError(f"a tenant's name has 1 to {MAX_TENANT_NAME} printable characters, no blanks around them")
    return name


TokenLimit = Annotated[int | str, AfterValidator(token_limit)]
TenantName = Annotated[str, AfterValidator(tenant_name)]


class TenantConfig(Section):
    """`[tenants.NAME]`: what one tenant may have of each rank's tiers, in tokens of full KV or as a share, "25%"."""

    device_floor: TokenLimit = Field(
        default=0, description="Of the device: no more than it is not evicted for others. What is held is theirs."
    )
    device_ceiling: TokenLimit | None = Field(
        default=None, description="Of the device: at most so much, cached and leased; its own goes first. Unset: any."
    )
    host_floor: TokenLimit = Field(default=0, description="Of the host, as device_floor.")
    host_ceiling: TokenLimit | None = Field(default=None, description="Of the host, as device_ceiling.")


class StateConfig(Section):
    """`[state]`: what must outlive the process. Only each rank's highest number on its stream is kept."""

    dir: FilePath | None = Field(
        default=None, description="Folder for it; by default $XDG_STATE_HOME/sglcache, else ~/.local/state/sglcache."
    )


class LimitsConfig(Section):
    """`[limits]`: what a rank lets its clients have and do, so that none takes all of it from the others."""

    acquire_wait_s: float = Field(
        default=0.0,
        ge=0,
        le=86400,
        allow_inf_nan=False,
        description="How long an acquire or extend waits for room that others hold, if it does not say; 0: not at all.",
    )
    max_wait_s: float = Field(
        default=300.0,
        gt=0,
        le=86400,
        allow_inf_nan=False,
        description="The longest that anyone waits for room, or for the third tier, whatever it says.",
    )
    copy_wait_s: float = Field(
        default=10.0,
        gt=0,
        le=86400,
        allow_inf_nan=False,
        description="How long anyone waits for room that only a copy of ours to the host locks.",
    )
    max_waiting: int = Field(default=1024, ge=1, le=1 << 20, description="Commands that may wait for room, in all.")
    max_waiting_per_session: int = Field(default=256, ge=1, le=1 << 20, description="And of one session.")
    max_connections: int = Field(default=4096, ge=1, le=1 << 20, description="Connections to the control socket.")
    max_sessions: int = Field(default=1024, ge=1, le=1 << 20, description="Model runners that are attached at once.")
    max_leases_per_session: int = Field(default=65536, ge=1, le=1 << 24, description="Leases of one model runner.")
    max_events: int = Field(
        default=1 << 20, ge=1, le=1 << 28, description="Events in the ring of one process of a model runner."
    )
    max_pipelined: int = Field(
        default=16384,
        ge=1,
        le=1 << 20,
        description="Commands of a connection without an answer; beyond that it is not read from until some have one.",
    )
    slow_reader_s: float = Field(
        default=30.0,
        gt=0,
        le=86400,
        allow_inf_nan=False,
        description="A peer that takes none of its answers for so long is thrown out.",
    )
    max_unsent: Annotated[Size, Field(ge=1 << 20)] = Field(  # type: ignore[assignment]  # as a file has it
        default="64 MiB", description="Answers that wait for a peer to read them; beyond that it is thrown out."
    )
    max_expensive: int = Field(
        default=8,
        ge=1,
        le=1024,
        description="Explanations, dumps, proofs, clears and announcements under way at once, in all; one of each kind "
        "a connection.",
    )
    max_pinned_fraction: float = Field(
        default=0.5, ge=0, le=1, description="The part of each tier's pages that pins may keep from eviction."
    )
    max_pins: int = Field(default=1024, ge=0, le=1 << 16, description="Pins of one model runner.")
    max_pin_ttl_s: float = Field(
        default=86400.0, gt=0, le=86400, allow_inf_nan=False, description="The longest that a pin may last."
    )


class WatchConfig(Section):
    """`[watch]`: after how many seconds what does not get on makes /health say degraded, and why."""

    copy_s: float = Field(default=10.0, gt=0, description="A copy between tiers that is in flight.")
    storage_s: float = Field(default=30.0, gt=0, description="A store, fetch or probe of the third tier; its disk.")
    event_s: float = Field(default=120.0, gt=0, description="An event that a commit or release of a runner waits for.")
    room_s: float = Field(default=30.0, gt=0, description="A command that waits for room.")
    fenced_s: float = Field(default=60.0, gt=0, description="Pages of a session that ended, and whose use may go on.")
    answer_s: float = Field(default=120.0, gt=0, description="A connection's commands, of which none gets an answer.")
    stream_s: float = Field(default=5.0, gt=0, description="Batches that do not leave for the live stream.")
    reader_s: float = Field(default=30.0, gt=0, description="The reader of a replay that takes none of it.")
    numbers_s: float = Field(default=5.0, gt=0, description="Numbers of the stream that can't be reserved.")
    loop_stall_s: float = Field(
        default=0.5, gt=0, description="The event loop in one go; it is told of for a minute after."
    )


class LogConfig(Section):
    """`[log]`: what the supervisor and the ranks say on stderr."""

    format: Literal["lines", "json"] = Field(
        default="lines", description="Lines for people, or one object of JSON a line. serve --log-format wins over it."
    )
    level: Literal["error", "warning", "info", "debug"] = Field(
        default="warning", description="The least that is logged; info tells who comes and goes. serve -v: info."
    )


class Config(Section):
    """Everything that `sglcache serve` can be told. Build it with `load` or `parse`, which speak to people."""

    model_name: Annotated[str, AfterValidator(_name)] = Field(
        default="default", min_length=1, max_length=256, description="The model's name, for routers and /server_info."
    )
    pool: PoolConfig = Field(default_factory=PoolConfig, description="The device pool.")
    host: HostConfig = Field(default_factory=HostConfig, description="The host tier.")
    window: WindowConfig | None = Field(default=None, description="Layers with a sliding window, where there are any.")
    mamba: MambaConfig | None = Field(default=None, description="Layers with a state, where there are any.")
    eviction: EvictionConfig = Field(default_factory=EvictionConfig, description="Which cached pages go first.")
    parallel: ParallelConfig = Field(default_factory=ParallelConfig, description="Replicas and stages.")
    events: EventsConfig = Field(default_factory=EventsConfig, description="The event stream.")
    http: HttpConfig = Field(default_factory=HttpConfig, description="HTTP.")
    observe: ObserveConfig = Field(default_factory=ObserveConfig, description="What is kept to see why.")
    control: ControlConfig = Field(default_factory=ControlConfig, description="The control socket.")
    storage: StorageConfig = Field(default_factory=StorageConfig, description="The third tier.")
    tenants: dict[TenantName, TenantConfig] | None = Field(
        default=None,
        description="Tenants by name; `default` is of requests that name none of them. Unset: there are none.",
    )
    state: StateConfig = Field(default_factory=StateConfig, description="What outlives the process.")
    limits: LimitsConfig = Field(default_factory=LimitsConfig, description="What clients may have and do.")
    watch: WatchConfig = Field(default_factory=WatchConfig, description="When what is stuck is told of.")
    log: LogConfig = Field(default_factory=LogConfig, description="What is logged, and how.")

    def for_stage(self, pp_rank: int) -> Config:
        """The configuration as the ranks of this pipeline stage have it: the sections of pools are the stage's own."""
        if not self.parallel.stages:
            return self
        stage = self.parallel.stages[pp_rank]
        pool, host = self.pool.model_dump(exclude_unset=True), self.host.model_dump(exclude_unset=True)
        if stage.num_layers is not None:
            pool["num_layers"] = stage.num_layers
        if stage.num_tokens is not None:
            pool |= {"num_tokens": stage.num_tokens, "size": None}
        if stage.size is not None:
            pool.pop("num_tokens", None)
            pool["size"] = size_text(stage.size)
        if stage.host_num_tokens is not None:
            host |= {"num_tokens": stage.host_num_tokens, "size": None}
        if stage.host_size is not None:
            host |= {"num_tokens": None, "size": size_text(stage.host_size)}
        try:
            own = self.model_copy(
                update={
                    "parallel": self.parallel.model_copy(update={"stages": []}),
                    "pool": PoolConfig(**pool),
                    "host": HostConfig(**host),
                    "window": self._own(stage, "window", self.window),
                    "mamba": self._own(stage, "mamba", self.mamba),
                }
            )
            own._check_host()
            own._check_companions()
        except ConfigError as exc:
            path = self.key_of(pp_rank, exc.path)
            raise ConfigError(exc.message.replace(exc.path, path), path=path, value=exc.value) from None
        return own

    def _own(self, stage: StageConfig, name: str, section: C | None) -> C | None:
        """`[window]` or `[mamba]` as the stage has it; None: it has no such layers."""
        said = {
            key.removeprefix(f"{name}_"): value
            for key, value in stage.model_dump(exclude_none=True).items()
            if key.startswith(f"{name}_")
        }
        if not said:
            return section
        if section is None:
            (key, value), *_ = said.items()
            raise ConfigError(
                f"{name}.{key} = {value} is of [{name}], and there is none; write that section, or leave it out",
                path=f"{name}.{key}",
                value=value,
            )
        if said.get("num_layers") == 0:
            return None
        if said.keys() & {"num_tokens", "num_slots"}:
            said["bytes"] = None
        return type(section)(**section.model_dump(exclude_unset=True) | said)

    def key_of(self, pp_rank: int, key: str) -> str:
        """Where what this stage has of `key`, such as host.size, is written: with the stage, or for all."""
        section, _, name = key.partition(".")
        own = name if section == "pool" else f"{section}_{name}"
        stages = self.parallel.stages
        said = stages and own in StageConfig.model_fields and getattr(stages[pp_rank], own) is not None
        return f"parallel.stages.{pp_rank}.{own}" if said else key

    @model_validator(mode="after")
    def _check(self) -> Config:
        keep, store = self.host.keep_path, self.storage.path
        if keep is not None and self.storage.kind == "file" and store is not None:
            one, other = keep.resolve(), store.resolve()
            if one == other or one in other.parents or other in one.parents:
                raise ConfigError(
                    f"host.keep_path = {keep} and storage.path = {store} lie in each other; give each its own folder",
                    path="host.keep_path",
                    value=str(keep),
                )
        self._check_host()
        if not self.parallel.stages:
            self._check_companions()
        self._check_layer_numbers()
        stages = [self.for_stage(pp_rank) for pp_rank in range(len(self.parallel.stages))] or [self]
        if self.eviction.host != "lru" and not any(stage.host.enabled for stage in stages):
            raise ConfigError(
                f'eviction.host = "{self.eviction.host}", and there is no host tier; set host.num_tokens or '
                "host.pool_ratio, or leave eviction.host out",
                path="eviction.host",
                value=self.eviction.host,
            )
        for key, field in HostConfig.model_fields.items():
            value = getattr(self.host, key)
            wished = key.startswith(("write_", "load_back_")) and value != field.default
            if wished and not any(stage.host.enabled for stage in stages):
                raise ConfigError(
                    f"host.{key} = {value} is of the host tier, and there is none; set host.num_tokens or "
                    f"host.pool_ratio, or leave host.{key} out",
                    path=f"host.{key}",
                    value=value,
                )
        slots = self.control.num_load_slots
        most = max(1, *(stage.pool.num_layers for stage in stages))
        if slots * most > MAX_LOAD_WORDS:
            raise ConfigError(
                f"control.num_load_slots = {slots} of {most} layers are {slots * most} words that runners watch; "
                f"write control.num_load_slots = {MAX_LOAD_WORDS // most} at most",
                path="control.num_load_slots",
                value=slots,
            )
        self._check_storage(stages)
        self._check_gpus()
        return self

    def gpus_of(self, dp_rank: int, pp_rank: int) -> list[int]:
        """On cards: the number of each shard's card."""
        first = self.parallel.local().index((dp_rank, pp_rank)) * self.pool.num_shards
        shards = range(first, first + self.pool.num_shards)
        return list(shards) if self.pool.gpus is None else [self.pool.gpus[shard] for shard in shards]

    def _check_gpus(self) -> None:
        if self.pool.gpus is None:
            return
        ranks = len(self.parallel.local())
        if len(self.pool.gpus) != ranks * self.pool.num_shards:
            raise ConfigError(
                f"pool.gpus = {self.pool.gpus}: {ranks} ranks of {self.pool.num_shards} shards are on this host; write "
                f"{ranks * self.pool.num_shards} numbers, or leave it out",
                path="pool.gpus",
                value=self.pool.gpus,
            )
        if self.pool.device != "cuda":
            raise ConfigError(
                f'pool.gpus = {self.pool.gpus}, and pool.device = "{self.pool.device}"; write pool.device = "cuda", or '
                "leave pool.gpus out",
                path="pool.gpus",
                value=self.pool.gpus,
            )

    def _check_storage(self, stages: Sequence[Config]) -> None:
        kind = self.storage.kind
        if kind == "none":
            return
        if self.model_name == type(self).model_fields["model_name"].default:
            raise ConfigError(
                f'storage.kind = "{kind}" needs model_name: pages are named by it, and would be found by whatever '
                'model is served next; write model_name = "..." above the sections',
                path="model_name",
                value=self.model_name,
            )
        if not all(stage.host.enabled for stage in stages):
            raise ConfigError(
                f'storage.kind = "{kind}", and there is no host tier, which is all that it stores; set '
                "host.pool_ratio, host.num_tokens or host.size, or leave storage.kind out",
                path="storage.kind",
                value=kind,
            )
        for name in ("window", "mamba"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f'storage.kind = "{kind}" beside [{name}]: the third tier keeps the KV of every token and nothing '
                    "else, and without the rest a page is of no use; leave storage.kind out",
                    path="storage.kind",
                    value=kind,
                )

    def _check_companions(self) -> None:
        """What `[window]` and `[mamba]` need of the other sections."""
        pool, window, mamba = self.pool, self.window, self.mamba
        if not pool.num_layers and window is None:
            raise ConfigError(
                "pool.num_layers = 0, and there is no [window]: no layer keeps anything that a prefix could be had "
                "from; write how many layers keep every token's KV, or a [window]",
                path="pool.num_layers",
                value=0,
            )
        for section in ("pool", "host"):
            size = getattr(self, section).size
            if size and not pool.num_layers:
                raise ConfigError(
                    f'{section}.size = "{size_text(size)}", and pool.num_layers = 0 makes pages of no bytes; write '
                    f"{section}.num_tokens",
                    path=f"{section}.size",
                    value=size,
                )
        if window is not None:
            heads = window.num_kv_heads or (pool.num_kv_heads if pool.kv_lora_rank is None else 1)
            dims = (window.num_kv_heads, window.head_dim, window.v_head_dim)
            latents = pool.kv_lora_rank is not None and dims == (None, None, None)
            if pool.kv_lora_rank is not None and not latents and None in dims[:2]:
                miss = "num_kv_heads" if window.num_kv_heads is None else "head_dim"
                raise ConfigError(
                    f"window.{miss} is missing: pool.kv_lora_rank = {pool.kv_lora_rank} has no heads that it could be "
                    "taken from; write it, or leave all that is of heads out for latents as [pool]'s",
                    path=f"window.{miss}",
                    value=None,
                )
            if not latents and heads % pool.num_shards and pool.num_shards % heads:
                raise ConfigError(
                    f"pool.num_shards = {pool.num_shards} does not divide window.num_kv_heads = {heads}, nor is it a "
                    "multiple of it; make one a multiple of the other",
                    path="window.num_kv_heads",
                    value=heads,
                )
        if mamba is not None:
            for number, state in enumerate(mamba.states):
                if state.shape[0] % pool.num_shards:
                    raise ConfigError(
                        f"mamba.states.{number}.shape = {state.shape}: shards split the first axis, and "
                        f"pool.num_shards = {pool.num_shards} does not divide it; write the shape of all shards "
                        "together, or other shards",
                        path=f"mamba.states.{number}.shape",
                        value=state.shape,
                    )
            if mamba.interval % pool.page_size:
                page = pool.page_size
                raise ConfigError(
                    f"mamba.interval = {mamba.interval} is not of whole pages of {page} tokens; write "
                    f"{max(1, mamba.interval // page) * page}",
                    path="mamba.interval",
                    value=mamba.interval,
                )
        for key, of in (
            ("window.host_tokens", window and window.host_tokens),
            ("mamba.host_slots", mamba and mamba.host_slots),
        ):
            if of is not None and bool(of) != self.host.enabled:
                raise ConfigError(
                    f"{key} = {of}, and there is no host tier; set host.num_tokens or host.pool_ratio, or leave "
                    f"{key} out"
                    if of
                    else f"{key} = 0 beside a host tier: what is there could never be matched without it; write more, "
                    "leave it out, or write host.num_tokens = 0 for no host tier",
                    path=key,
                    value=of,
                )

    def _check_layer_numbers(self) -> None:
        for name, section in (("window", self.window), ("mamba", self.mamba)):
            if section is not None and section.layers is not None and self.parallel.pp_size > 1:
                raise ConfigError(
                    f"{name}.layers are the numbers of one rank's layers, and parallel.pp_size = "
                    f"{self.parallel.pp_size} ranks have each its own; leave {name}.layers out",
                    path=f"{name}.layers",
                    value=section.layers,
                )

    def _check_host(self) -> None:
        num_pages = (self.host.num_tokens or 0) // self.pool.page_size
        if num_pages > MAX_PAGES:
            raise ConfigError(
                f"host: {num_pages} pages are more than a slot number can name ({MAX_PAGES}); lower host.num_tokens",
                path="host.num_tokens",
                value=self.host.num_tokens,
            )


# What can be said in one of several ways. A file's way is left where an override goes another.
OTHER_WORDS = {
    "pool.num_tokens": ("size",),
    "pool.size": ("num_tokens",),
    "pool.kv_lora_rank": ("num_kv_heads", "head_dim", "v_head_dim"),
    "pool.head_dim": ("kv_lora_rank", "qk_rope_head_dim"),
    "host.pool_ratio": ("num_tokens", "size"),
    "host.num_tokens": ("size",),
    "host.size": ("num_tokens",),
    "window.num_tokens": ("bytes",),
    "window.bytes": ("num_tokens",),
    "mamba.num_slots": ("bytes",),
    "mamba.bytes": ("num_slots",),
}


TOML = "a line is `key = value` below its [section], with text in quotes, or a # and words"
TOO_DEEP = "values are nested too deep; write sections, and in them keys with plain values"


def load(path: Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The defaults, under the TOML file at `path`, under `overrides` (`a.b=c`, the last one of a key wins).

    An override wins as well over the same thing in the file's other words: `pool.size` over `pool.num_tokens`.

    ConfigError: the file can't be read or is not TOML, an override has no `=`, or `parse` refuses.
    """
    data: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if path is not None:
        try:
            data = tomllib.loads(_read(path))
        except OSError as exc:
            raise ConfigError(f"{path}: {exc.strerror or exc}; name a file that can be read") from exc
        except (ValueError, RecursionError) as exc:  # a number of 5,000 digits is no TOMLDecodeError
            what = "write it as UTF-8 text" if isinstance(exc, UnicodeDecodeError) else TOML
            raise ConfigError(f"{path} is not TOML: {exc}; {what}") from exc
        try:
            sources = {dotted: str(path) for dotted in _leaves(data)}
        except RecursionError:
            raise ConfigError(f"{path}: {TOO_DEEP}") from None
    for override in overrides:
        dotted, value = parse_override(override)
        section = dotted.partition(".")[0]
        for other in OTHER_WORDS.get(dotted, ()):
            if sources.get(f"{section}.{other}") == str(path):
                del data[section][other], sources[f"{section}.{other}"]
        _put(data, dotted, value)
        sources[dotted] = "--set"
    return parse(data, sources)


def _read(path: Path) -> str:
    """The file's text, without the mark that some editors put before it; of a pipe, all that its writers write.

    OSError; ConfigError: nobody writes into the pipe, which could be waited for forever, or it has no end.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # or a pipe's open waits for a writer
    with open(fd, "rb") as file:
        os.set_blocking(fd, True)
        text = file.read(MAX_FILE + 1)
        if not text and stat.S_ISFIFO(os.fstat(fd).st_mode):
            raise ConfigError(f"{path} is a pipe into which nobody writes; name a file, or start its writer first")
    if len(text) > MAX_FILE:
        raise ConfigError(f"{path} is longer than {size_text(MAX_FILE)}; name a configuration's file")
    return text.decode("utf-8-sig")


def parse(data: Mapping[str, Any], sources: Mapping[str, str] | None = None) -> Config:
    """Build the configuration from nested mappings; `sources` tells, by dotted path, where a value came from.

    ConfigError: `path` and `value` are those of the first problem, the message has a line for each.
    """
    try:
        return Config.model_validate(data)
    except ValidationError as exc:
        try:
            problems = exc.errors(include_url=False)
            lines = [_describe(problem, sources or {}) for problem in problems]
        except RecursionError:
            raise ConfigError(TOO_DEEP) from None
        raise ConfigError("\n".join(lines), path=_dotted(problems[0]), value=problems[0]["input"]) from None
    except RecursionError:
        raise ConfigError(TOO_DEEP) from None


def parse_override(text: str) -> tuple[str, Any]:
    """Split `a.b=c`. The value is read as TOML where it is TOML, and is the plain text otherwise.

    ConfigError: no `=`, or an empty key.
    """
    dotted, equals, value = text.partition("=")
    dotted = dotted.strip()
    if not equals or not all(dotted.split(".")):
        raise ConfigError(f"--set {text}: write section.key=value, such as pool.page_size=64", path=dotted, value=text)
    try:
        return dotted, tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        return dotted, value.strip()


def _put(data: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, key = dotted.split(".")
    inner: Any = data
    for depth, section in enumerate(sections, 1):
        inner = inner.setdefault(section, {})
        if not isinstance(inner, dict):
            above = ".".join(sections[:depth])
            raise ConfigError(f"--set {dotted}: {above} is a value, not a section", path=dotted, value=value)
    inner[key] = value


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in data.items():
        yield f"{prefix}{key}"
        tables = {"": value} if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
        for number, table in dict(tables).items():
            if isinstance(table, Mapping):
                yield from _leaves(table, f"{prefix}{key}.{number}." if number != "" else f"{prefix}{key}.")


def _dotted(problem: Any) -> str:
    return ".".join(str(part) for part in problem["loc"])


def _describe(problem: Any, sources: Mapping[str, str]) -> str:
    """One problem in one line: path, value, source, remedy."""
    dotted, value = _dotted(problem), problem["input"]
    source = f" ({sources[dotted]})" if dotted in sources else ""
    if problem["type"] == "extra_forbidden":
        return f"{dotted}{source}: no such key; {_suggest(dotted)}"
    if problem["type"] == "missing":
        return f"{dotted} is missing: {_description(dotted)}"
    message = problem["msg"].removeprefix("Value error, ")
    message = (message[:1].lower() + message[1:]).replace("input should be", "must be")
    if problem["type"] == "string_type":
        message += f"; quote it: {dotted}='\"{value}\"'" if sources.get(dotted) == "--set" else "; quote it"
    if problem["type"] == "greater_than_equal" and isinstance(_default_of(dotted), str):
        message = f'must be at least "{size_text(problem["ctx"]["ge"])}"'
    if problem["type"] in ("model_type", "model_attributes_type"):
        message = f"a section is wanted: [{dotted}], then its keys"
    default = _default(dotted)
    return f"{dotted} = {_show(value)}{source}: {message}" + (f" (the default is {default})" if default else "")


def _show(value: object) -> str:
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    return text if len(text) <= 80 else f"{text[:77]}..."


def keys() -> dict[str, Any]:
    """Every key by its dotted path, with its default; the order is the file's."""
    found: dict[str, Any] = {}
    for name, field in Config.model_fields.items():
        section = section_of(field.annotation)
        if section is None:
            found[name] = field.default
            continue
        for key, inner in section.model_fields.items():
            found[f"{name}.{key}"] = None if inner.is_required() else inner.default
            if (table := section_of(inner.annotation)) is not None:  # of a list of tables: those of one
                found |= {
                    f"{name}.{key}.{own}": None if its.is_required() else its.default
                    for own, its in table.model_fields.items()
                }
    return found


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a field is, or may be, or has a list or a table of."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(section_of, get_args(annotation))), None)


def _general(dotted: str) -> str:
    """The key as `keys` has it: parallel.stages.num_layers for parallel.stages.3.num_layers, and without the name of a
    tenant."""
    section, *rest = (part for part in dotted.split(".") if not part.isdigit())
    return ".".join([section, *(rest[-1:] if section == "tenants" else rest)])


def _particular(known: str, written: str) -> str:
    """A key as `keys` has it, with the tenant's name or the stage's number that `written` has."""
    parts = written.split(".")
    for section in ("tenants", "parallel.stages"):
        depth = section.count(".") + 1
        if known.startswith(f"{section}.") and written.startswith(f"{section}.") and len(parts) > depth + 1:
            return f"{section}.{'.'.join(parts[depth:-1])}.{known.rpartition('.')[2]}"
    return known


def _default_of(dotted: str) -> Any:
    """As a file has it: a size is text."""
    return keys().get(_general(dotted))


def _description(dotted: str) -> str:
    """What a field that must be written says of itself."""
    section: type[Section] = Config
    *sections, key = _general(dotted).split(".")
    for name in sections:
        section = section_of(section.model_fields[name].annotation) or section
    text = section.model_fields[key].description or ""
    return f"{text[:1].lower()}{text[1:].rstrip('.')}; write it"


def _default(dotted: str) -> str:
    default = _default_of(dotted)
    return "" if default is None else _show(default)


def _suggest(dotted: str) -> str:
    known, written, dotted = list(keys()), dotted, _general(dotted)
    same_name = [key for key in known if key.rpartition(".")[2] == dotted.rpartition(".")[2]]
    nearest = difflib.get_close_matches(dotted, known, n=1, cutoff=0.75) or same_name[:1]
    sections = list(dict.fromkeys(key.rpartition(".")[0] for key in known if "." in key))
    section = dotted.rpartition(".")[0]
    if nearest:
        return f"did you mean {_particular(nearest[0], written)}?"
    if "." not in dotted and (near := difflib.get_close_matches(dotted, sections, n=1)):
        return f"did you mean [{near[0]}]?"
    inside = [key.rpartition(".")[2] for key in known if key.rpartition(".")[0] == section]
    if section and inside:
        return f"[{section}] has {', '.join(inside)}"
    return f"the sections are {', '.join(sections)}"
