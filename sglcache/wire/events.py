"""The event stream's batches, for whoever reads them: SGLang 0.5.21's tagged maps; what later versions add is skipped.

A batch is the msgpack array [ts, events, rank]; each event is a map whose "type" is the class's name. The daemon
packs the same bytes without these structs, because token ids must not become Python ints there. Encoding them
(`encode_batch`) gives byte for byte what SGLang's encoder gives, and so what the daemon's packing is held against.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from sglcache.errors import ProtocolError
from sglcache.units import MEDIA

BlockHash: TypeAlias = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
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


class BlockRemoved(_Event, frozen=True, gc=False):
    """The blocks are no longer readable on `medium`; other media keep theirs. Of an unknown block: nothing."""

    block_hashes: list[BlockHash]
    medium: str | None = None  # None: GPU


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


class _Envelope(Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    attn_dp_rank: int | None = None


class _Tag(Struct):
    type: str


# msgspec encoders and decoders hold no state between calls.
encode_batch = msgspec.msgpack.Encoder().encode
_decode_batch = msgspec.msgpack.Decoder(Batch).decode
_decode_envelope = msgspec.msgpack.Decoder(_Envelope).decode
_decode_event: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
_decode_tag = msgspec.msgpack.Decoder(_Tag).decode

_KNOWN = {kind.__name__ for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}


def medium_of(event: BlockStored | BlockRemoved) -> str:
    """The event's medium, with the default put in."""
    return MEDIA[0] if event.medium is None else event.medium


def decode_batch(payload: bytes) -> Batch:
    """The batch in `payload`; events of a type unknown here are left out. ProtocolError: it is not a batch."""
    try:
        batch = _decode_batch(payload)
    except msgspec.ValidationError:
        batch = _decode_known(payload)  # again, slowly: perhaps only an event type is new
    except msgspec.DecodeError as error:
        raise ProtocolError(f"{len(payload)} bytes that are not msgpack: {error}") from None
    for event in batch.events:
        if isinstance(event, BlockStored) and event.token_ids:
            tokens, blocks = len(event.token_ids), len(event.block_hashes)
            if tokens != blocks * event.block_size:
                raise ProtocolError(f"BlockStored has {tokens} tokens for {blocks} blocks of {event.block_size}")
    return batch


def _decode_known(payload: bytes) -> Batch:
    try:
        envelope = _decode_envelope(payload)
        known = [raw for raw in envelope.events if _decode_tag(raw).type in _KNOWN]
        return Batch(envelope.ts, [_decode_event.decode(raw) for raw in known], envelope.attn_dp_rank)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"not a batch of events: {error}") from None
