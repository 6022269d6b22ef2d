"""The event stream's batches, for whoever reads them; what later versions add is skipped.

A batch is the msgpack array [ts, events, rank]. An event is one of three forms, told apart event by event:

* map (SGLang >= 0.5.21, vLLM): a map whose "type" is the class's name; options that are not set are left out;
* superset: the same with options that are nil, because some reader requires the key;
* array (SGLang <= 0.5.19): [name, fields...], and behind a salted store's fields the map {"cache_salt": ...}.

What is told is full KV. Of a model that keeps a window or a state as well these may be told, too, as other *groups*, in
vLLM's fields (in its maps, and in the arrays it had before): an event with a `group_idx` above 0 says nothing of full
KV, and who does not know of groups must not be sent it.

The daemon packs the same bytes without these structs, because token ids must not become Python ints there. Encoding
them (`encode_batch`) gives byte for byte SGLang's maps, and so what the daemon's packing is held against.
"""

from __future__ import annotations

from itertools import chain
from typing import Annotated, Any, TypeAlias, cast

import msgspec
from msgspec import Meta, Struct

from sglcache.compiled import FORM
from sglcache.errors import ProtocolError
from sglcache.units import MEDIA

if FORM.compiled:
    from sglcache import packing

BlockHash: TypeAlias = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
# What ids may be is checked by hand: msgspec 0.23 crashes on a constrained integer in a union with a tuple.
Token: TypeAlias = int | tuple[int, int]  # a pair under EAGLE: one bigram is one logical token


class _Event(Struct, tag=True, omit_defaults=True, frozen=True, gc=False):
    """A fact about one medium of one rank: true when it was sent. Fields are only ever added, at the end."""


class BlockStored(_Event, frozen=True, gc=False):
    """`block_hashes[i]` is readable on `medium`; block i + 1 is the child of block i. Storing twice is storing once."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None  # None: block 0 starts at the root
    token_ids: list[Token]  # len == len(block_hashes) * block_size; empty where the daemon withholds them
    block_size: Annotated[int, Meta(ge=1)]  # tokens per block
    lora_id: int | None  # always sent, always None: adapters are told apart by lora_name
    medium: str | None = None  # None: GPU, as SGLang reads it
    cache_salt: str | None = None
    session_id: str | None = None  # attribution only
    lora_name: str | None = None
    group_idx: int | None = None  # None and 0: full KV
    kv_cache_spec_kind: str | None = None  # what the group keeps: sliding_window, mamba, ...
    kv_cache_spec_sliding_window: int | None = None  # tokens that a query of the group sees, itself included


class BlockRemoved(_Event, frozen=True, gc=False):
    """The blocks are no longer readable on `medium`; other media and groups keep theirs. Of an unknown one: nothing."""

    block_hashes: list[BlockHash]
    medium: str | None = None  # None: GPU
    group_idx: int | None = None


class AllBlocksCleared(_Event, frozen=True, gc=False):
    """The rank holds nothing in any medium."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(Struct, array_like=True, frozen=True, gc=False):
    """What one message carries. No events: a heartbeat."""

    ts: float  # unix seconds, when the batch was cut
    events: list[Event]
    attn_dp_rank: int | None = None

    @property
    def starts_anew(self) -> bool:
        """Whether nothing said before this batch matters any more."""
        return bool(self.events) and isinstance(self.events[0], AllBlocksCleared)


class _ArrayStored(Struct, tag="BlockStored", array_like=True):
    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[Token]
    block_size: Annotated[int, Meta(ge=1)]
    lora_id: int | None = None
    medium: str | None = None
    more: Any = None  # SGLang 0.5.19: {"cache_salt": str}; vLLM before its maps: lora_name, and then these
    extra_keys: Any = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _ArrayRemoved(Struct, tag="BlockRemoved", array_like=True):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class _ArrayCleared(Struct, tag="AllBlocksCleared", array_like=True):
    pass


class _Metadata(Struct):
    cache_salt: str | None = None


class _Envelope(Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    attn_dp_rank: int | None = None


class _Tag(Struct):
    type: str


class _ArrayTag(Struct, array_like=True):
    type: str


# msgspec encoders and decoders hold no state between calls.
encode_batch = msgspec.msgpack.Encoder().encode
_decode_batch = msgspec.msgpack.Decoder(Batch).decode
_decode_envelope = msgspec.msgpack.Decoder(_Envelope).decode
_decode_map: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
_decode_array: msgspec.msgpack.Decoder[_ArrayStored | _ArrayRemoved | _ArrayCleared] = msgspec.msgpack.Decoder(
    _ArrayStored | _ArrayRemoved | _ArrayCleared
)
_decode_tag = msgspec.msgpack.Decoder(_Tag).decode
_decode_array_tag = msgspec.msgpack.Decoder(_ArrayTag).decode
_decode_keys = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode

BAD = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding raises where the bytes are no such thing."""
NIL = b"\xc0"  # msgpack's None

_KNOWN = {kind.__name__ for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}


def is_full(event: BlockStored | BlockRemoved) -> bool:
    """Whether it tells of full KV, and not of another group."""
    return not event.group_idx


def medium_of(event: BlockStored | BlockRemoved) -> str:
    """The event's medium, with the default put in."""
    return MEDIA[0] if event.medium is None else event.medium


def decode_batch(payload: bytes) -> Batch:
    """The batch in `payload`, in any of the forms; events of a type unknown here are left out.

    ProtocolError: it is not a batch.
    """
    try:
        batch = _decode_batch(payload)  # all maps, and all known
    except msgspec.ValidationError:
        batch = _decode_each(payload)
    except BAD as error:
        raise ProtocolError(f"{len(payload)} bytes that are not msgpack: {error}") from None
    for event in batch.events:
        if isinstance(event, BlockStored) and event.token_ids:
            _check_tokens(event)
    return batch


def forms_of(payload: bytes) -> set[str]:
    """Which forms the batch's events have: map, superset, array. ProtocolError: it is not a batch."""
    try:
        return {_form(raw) for raw in _decode_envelope(payload).events}
    except BAD as error:
        raise ProtocolError(f"not a batch of events: {error}") from None


def _form(raw: msgspec.Raw) -> str:
    if _is_array(raw):
        return "array"
    keys = _decode_keys(raw)
    return "superset" if bytes(keys.get("lora_name", b"")) == NIL else "map"


def _is_array(raw: msgspec.Raw) -> bool:
    first = memoryview(raw)[0]
    return 0x90 <= first <= 0x9F or first in (0xDC, 0xDD)


def _check_tokens(event: BlockStored) -> None:
    tokens, blocks = event.token_ids, len(event.block_hashes)
    if len(tokens) != blocks * event.block_size:
        raise ProtocolError(f"BlockStored has {len(tokens)} tokens for {blocks} blocks of {event.block_size}")
    if FORM.compiled and packing.are_ids(cast("list[object]", tokens)):
        return
    kinds = set(map(type, tokens))
    flat: Any = tokens if kinds == {int} else chain.from_iterable(cast(Any, tokens)) if kinds == {tuple} else (-1,)
    if min(flat) < 0:
        raise ProtocolError("BlockStored has token_ids that are neither all ids nor all pairs of ids")


def _decode_each(payload: bytes) -> Batch:
    """Event by event: they may be arrays, or of types that are new."""
    try:
        envelope = _decode_envelope(payload)
        events = [event for raw in envelope.events if (event := _decode_event(raw)) is not None]
        return Batch(envelope.ts, events, envelope.attn_dp_rank)
    except BAD as error:
        raise ProtocolError(f"not a batch of events: {error}") from None


def _decode_event(raw: msgspec.Raw) -> Event | None:
    if _is_array(raw):
        return _from_array(_decode_array.decode(raw)) if _decode_array_tag(raw).type in _KNOWN else None
    return _decode_map.decode(raw) if _decode_tag(raw).type in _KNOWN else None


def _from_array(event: _ArrayStored | _ArrayRemoved | _ArrayCleared) -> Event:
    if isinstance(event, _ArrayCleared):
        return AllBlocksCleared()
    if isinstance(event, _ArrayRemoved):
        return BlockRemoved(event.block_hashes, event.medium, event.group_idx)
    if isinstance(event.more, str):
        salt, lora = None, event.more
    else:
        salt, lora = msgspec.convert(event.more or {}, _Metadata).cache_salt, None
    return BlockStored(
        event.block_hashes,
        event.parent_block_hash,
        event.token_ids,
        event.block_size,
        event.lora_id,
        event.medium,
        cache_salt=salt,
        lora_name=lora,
        group_idx=event.group_idx,
        kv_cache_spec_kind=event.kv_cache_spec_kind,
        kv_cache_spec_sliding_window=event.kv_cache_spec_sliding_window,
    )
