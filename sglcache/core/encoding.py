"""Events as bytes, from packed runs: what SGLang puts on the wire, byte for byte, in the form that `Format` names.

`wire/events.py` holds the same events as structs for whoever reads them; here they are written, and neither
token ids nor hashes ever become Python integers: ormsgpack packs a numpy view of the packed bytes into the same
minimal msgpack that msgspec makes of a list.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import ormsgpack

from sglcache.compiled import FORM
from sglcache.core.key import TOKEN_BYTES, Namespace
from sglcache.errors import ConfigError

if FORM.compiled:
    from sglcache import packing

pack_value = msgspec.msgpack.Encoder().encode
_FLOAT = struct.Struct(">Bd")
_NUMPY = ormsgpack.OPT_SERIALIZE_NUMPY
_UINT32 = 0xCE  # msgpack's mark of one
_WORD = np.dtype([("mark", "u1"), ("value", ">u4")])
_PAIR = np.dtype([("head", "u1"), ("first", _WORD), ("second", _WORD)])


def pack_tokens(text: bytes, start: int, stop: int) -> bytes:
    """uint32 little-endian [n], `text[start:stop]`, to a msgpack array of n integers."""
    if FORM.compiled:
        return packing.pack_tokens(text, start, stop)
    return ormsgpack.packb(np.frombuffer(text, "<u4", (stop - start) // TOKEN_BYTES, start), option=_NUMPY)


def pack_pairs(words: bytes) -> bytes:
    """uint32 little-endian [n, 2] to a msgpack array of n arrays of two integers."""
    return ormsgpack.packb(np.frombuffer(words, "<u4").reshape(-1, 2), option=_NUMPY)


def pack_tokens_fixed(text: bytes, start: int, stop: int) -> bytes:
    """As `pack_tokens`, each as a uint32 whatever its value."""
    count = (stop - start) // TOKEN_BYTES
    out = np.empty(count, _WORD)
    out["mark"] = _UINT32
    out["value"] = np.frombuffer(text, "<u4", count, start)
    return b"".join((array_header(count), out.data))


def pack_pairs_fixed(words: bytes) -> bytes:
    """As `pack_pairs`, each integer as a uint32 whatever its value."""
    pairs = np.frombuffer(words, "<u4").reshape(-1, 2)
    out = np.empty(len(pairs), _PAIR)
    out["head"] = 0x92
    for word, column in zip(("first", "second"), pairs.T, strict=True):
        out[word]["mark"] = _UINT32
        out[word]["value"] = column
    return b"".join((array_header(len(pairs)), out.data))


def pack_hashes(digests: bytes, digest_bytes: int) -> bytes:
    """Digests, joined, to a msgpack array of their first 8 bytes as big-endian int64."""
    if FORM.compiled and (packed := packing.pack_hashes(digests, digest_bytes)) is not None:
        return packed
    words = np.frombuffer(digests, ">i8")[:: digest_bytes // 8].astype("<i8")
    return ormsgpack.packb(words, option=_NUMPY)


def sum_hashes(digests: bytes, digest_bytes: int) -> int:
    """Of these numbers; what is beyond 64 bits means nothing."""
    if FORM.compiled:
        return packing.sum_hashes(digests, digest_bytes)
    return int(np.add.reduce(np.frombuffer(digests, ">u8")[:: digest_bytes // 8]))


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


class Group(NamedTuple):
    """What a companion of full KV is told as, in vLLM's fields. Full KV is group 0, and is told without them."""

    number: int
    kind: str  # vLLM's KVCacheSpecKind: sliding_window, mamba, ...
    window: int | None = None  # tokens that a query sees, itself included
    by_end: bool = False  # of a node its last page is told alone: that is what the state belongs to


@dataclass(frozen=True)
class Format:
    """How blocks are told of.

    `encoding`: map (SGLang >= 0.5.21, Dynamo), array (SGLang <= 0.5.19, llm-d) or superset (map with the keys that
    vLLM's structs require). `extra_key_as`: the field, lora_name or cache_salt, that stands for an extra_key; None:
    namespaces with one are not told of. `hash_salts`: a salt is told as the hex of its sha256. `withhold_tokens`:
    token_ids is empty. `fixed_tokens`: each token takes five bytes, though msgpack can say most in three: as good to
    any decoder and a quarter more bytes, but made in a seventh of the time, which else goes into guessing the next
    one's size. `groups`: what is told beside full KV, one for each companion of it in their order; none:
    nothing is. ConfigError: arrays have no place for groups.
    """

    encoding: str = "map"
    extra_key_as: str | None = None
    hash_salts: bool = False
    withhold_tokens: bool = False
    fixed_tokens: bool = False
    groups: tuple[Group, ...] = ()

    def __post_init__(self) -> None:
        if self.groups and self.encoding == "array":
            raise ConfigError(
                "events.groups tells of windows and states in fields that arrays have no place for; use "
                'events.encoding = "map" or "superset", or leave events.groups out',
                path="events.groups",
            )

    def extras(self, namespace: Namespace) -> Extras | None:
        """By which fields a router knows the namespace; None: by none, so that it must not be told of it.

        Routers tell namespaces apart by lora and salt alone, and of an array by salt alone.
        """
        lora, extra_key, salt = namespace
        if salt is not None and self.hash_salts:
            salt = hashlib.sha256(salt.encode()).hexdigest()
        if extra_key is not None:
            if self.extra_key_as == "lora_name" and lora is None:
                lora = extra_key
            elif self.extra_key_as == "cache_salt" and salt is None:
                salt = extra_key if not self.hash_salts else hashlib.sha256(extra_key.encode()).hexdigest()
            else:
                return None
        if lora is not None and self.encoding == "array":
            return None
        return NO_EXTRAS if lora is None and salt is None else Extras(salt, None, lora)


class Encoding(Protocol):
    """An event's pieces. `hashes` and `tokens` are packed msgpack arrays, `parent` a packed integer or None at the
    start, `group` None for full KV."""

    def stored(
        self, hashes: bytes, parent: bytes | None, tokens: bytes, medium: str, more: Extras, group: Group | None = None
    ) -> tuple[bytes, ...]: ...

    def removed(self, hashes: bytes, medium: str, group: Group | None = None) -> tuple[bytes, ...]: ...

    def cleared(self) -> tuple[bytes, ...]: ...


class MapEncoding:
    """Tagged maps: SGLang 0.5.21 and later; fields that are None are left out, except the two SGLang always sends.

    As `superset` lora_name is always there, too, nil where there is none: vLLM's struct has no default for it. A
    group's fields are behind all others, and of full KV there are none: its bytes are the same with groups and without.
    """

    def __init__(self, page_size: int, superset: bool = False) -> None:
        self._size = b"\xaablock_size" + pack_value(page_size) + b"\xa7lora_id\xc0\xa6medium"
        self._superset = superset

    def stored(
        self, hashes: bytes, parent: bytes | None, tokens: bytes, medium: str, more: Extras, group: Group | None = None
    ) -> tuple[bytes, ...]:
        count = 7
        tail = b""
        if more is not NO_EXTRAS or self._superset:
            for name, value in zip(Extras._fields, more, strict=True):
                if value is not None or (self._superset and name == "lora_name"):
                    count += 1
                    tail += pack_value(name) + pack_value(value)
        if group is not None:
            count += 2 if group.window is None else 3
            tail += _GROUP_IDX + pack_value(group.number) + b"\xb2kv_cache_spec_kind" + pack_value(group.kind)
            if group.window is not None:
                tail += b"\xbckv_cache_spec_sliding_window" + pack_value(group.window)
        return (
            _STORED[count],
            hashes,
            b"\xb1parent_block_hash" + (parent or b"\xc0") + b"\xa9token_ids",
            tokens,
            self._size + pack_value(medium) + tail,
        )

    def removed(self, hashes: bytes, medium: str, group: Group | None = None) -> tuple[bytes, ...]:
        tail = b"\xa6medium" + pack_value(medium)
        if group is None:
            return b"\x83\xa4type\xacBlockRemoved\xacblock_hashes", hashes, tail
        return b"\x84\xa4type\xacBlockRemoved\xacblock_hashes", hashes, tail + _GROUP_IDX + pack_value(group.number)

    def cleared(self) -> tuple[bytes, ...]:
        return (b"\x81\xa4type\xb0AllBlocksCleared",)


class ArrayEncoding:
    """Tagged arrays: SGLang up to 0.5.19, where a salt is an eighth element; sessions, loras, groups have no place."""

    def __init__(self, page_size: int) -> None:
        self._size = pack_value(page_size) + b"\xc0"

    def stored(
        self, hashes: bytes, parent: bytes | None, tokens: bytes, medium: str, more: Extras, group: Group | None = None
    ) -> tuple[bytes, ...]:
        assert group is None, f"{group} in an array"
        tail = self._size + pack_value(medium)
        if more.cache_salt is not None:
            tail += pack_value({"cache_salt": more.cache_salt})
        head = b"\x97\xabBlockStored" if more.cache_salt is None else b"\x98\xabBlockStored"
        return head, hashes, parent or b"\xc0", tokens, tail

    def removed(self, hashes: bytes, medium: str, group: Group | None = None) -> tuple[bytes, ...]:
        assert group is None, f"{group} in an array"
        return b"\x93\xacBlockRemoved", hashes, pack_value(medium)

    def cleared(self) -> tuple[bytes, ...]:
        return (b"\x91\xb0AllBlocksCleared",)


ENCODINGS = ("map", "array", "superset")
NO_TOKENS = b"\x90"
PLAIN = Format()


def encoding(name: str, page_size: int) -> Encoding:
    """`ConfigError` for a name that is not one of ENCODINGS."""
    if name not in ENCODINGS:
        raise ConfigError(f"encoding {name!r} is unknown; use one of {', '.join(ENCODINGS)}", path="events.encoding")
    return ArrayEncoding(page_size) if name == "array" else MapEncoding(page_size, name == "superset")


_STORED = {n: bytes((0x80 | n,)) + b"\xa4type\xabBlockStored\xacblock_hashes" for n in range(7, 14)}
_GROUP_IDX = b"\xa9group_idx"
