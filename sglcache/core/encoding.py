"""Events as bytes, from packed runs: what SGLang >= 0.5.21 and vLLM put on the wire, byte for byte.

`wire/events.py` holds the same events as structs for whoever reads them; here they are written, and neither
token ids nor hashes ever become Python integers: ormsgpack packs a numpy view of the packed bytes into the same
minimal msgpack that msgspec makes of a list.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import msgspec
import numpy as np
import ormsgpack

from sglcache.core.key import Namespace

pack_value = msgspec.msgpack.Encoder().encode
_FLOAT = struct.Struct(">Bd")
_NUMPY = ormsgpack.OPT_SERIALIZE_NUMPY


def pack_tokens(tokens: bytes) -> bytes:
    """uint32 little-endian [n] to a msgpack array of n integers."""
    return ormsgpack.packb(np.frombuffer(tokens, "<u4"), option=_NUMPY)


def pack_hashes(digests: bytes, digest_bytes: int) -> bytes:
    """Digests, joined, to a msgpack array of their first 8 bytes as big-endian int64."""
    words = np.frombuffer(digests, ">i8")[:: digest_bytes // 8].astype("<i8")
    return ormsgpack.packb(words, option=_NUMPY)


def pack_hash(digest: bytes) -> bytes:
    """One digest's int64."""
    return pack_value(int.from_bytes(digest[:8], "big", signed=True))


def array_header(count: int) -> bytes:
    if count < 16:
        return bytes((0x90 | count,))
    if count < 1 << 16:
        return b"\xdc" + count.to_bytes(2, "big")
    return b"\xdd" + count.to_bytes(4, "big")


def batch(ts: float, num_events: int, pieces: list[bytes], rank: int) -> bytes:
    """`[ts, events, rank]` of the events' pieces, which are copied here and only here; no events: a heartbeat."""
    return b"".join((b"\x93", _FLOAT.pack(0xCB, ts), array_header(num_events), *pieces, pack_value(rank)))


class Extras(NamedTuple):
    """The optional fields of a BlockStored."""

    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


NO_EXTRAS = Extras()


def extras(namespace: Namespace, session_id: str | None) -> Extras:
    if session_id is None and namespace.lora is None and namespace.cache_salt is None:
        return NO_EXTRAS
    return Extras(namespace.cache_salt, session_id, namespace.lora)


class MapEncoding:
    """Tagged maps: SGLang 0.5.21 and later; fields that are None are left out, except the two SGLang always sends."""

    def __init__(self, page_size: int) -> None:
        self._size = b"\xaablock_size" + pack_value(page_size) + b"\xa7lora_id\xc0\xa6medium"

    def stored(
        self, hashes: bytes, parent: bytes | None, tokens: bytes, medium: str, more: Extras
    ) -> tuple[bytes, ...]:
        """`hashes` and `tokens` are packed msgpack arrays, `parent` a packed integer or None at the start."""
        count = 7
        tail = b""
        if more is not NO_EXTRAS:
            for name, value in zip(Extras._fields, more, strict=True):
                if value is not None:
                    count += 1
                    tail += pack_value(name) + pack_value(value)
        return (
            _STORED[count],
            hashes,
            b"\xb1parent_block_hash" + (parent or b"\xc0") + b"\xa9token_ids",
            tokens,
            self._size + pack_value(medium) + tail,
        )

    def removed(self, hashes: bytes, medium: str) -> tuple[bytes, ...]:
        return b"\x83\xa4type\xacBlockRemoved\xacblock_hashes", hashes, b"\xa6medium" + pack_value(medium)

    def cleared(self) -> tuple[bytes, ...]:
        return (b"\x81\xa4type\xb0AllBlocksCleared",)


_STORED = {n: bytes((0x80 | n,)) + b"\xa4type\xabBlockStored\xacblock_hashes" for n in range(7, 11)}
