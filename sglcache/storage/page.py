"""What a page is in L3: its name, its header, and what has to agree before its bytes count.

A value is a header and the payload, the bytes of the page in all local shards. The header, little-endian:

    0   8s   magic                    48   32s  digest, zeros behind a short one
    8   u16  format version           80   32s  digest of the page before; zeros where there is none
    10  u8   bytes of a digest        112  ...  namespace: lora, extra_key, cache_salt, each 00, or 01, length, UTF-8
    11  u8   1: there is a page before          tokens: uint32, of the page (bigram: and the one behind it)
    12  u32  bytes of the header                zeros, up to a multiple of 8
    16  u64  bytes of the payload       -32  16s  xxh3_128 of the payload
    24  u32  bytes of the namespace     -16  16s  xxh3_128 of the header up to here
    28  u32  bytes of the tokens
    32  16s  identity

All of it up to the payload's hash follows from what is asked for, so a page is checked against its tokens, namespace,
digest and identity by one comparison of bytes: a hash alone decides nothing (xxh3 is no cryptographic hash, and a
tenant can choose tokens).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import xxhash

from sglcache.core.effects import Run
from sglcache.core.hashing import hasher, seed
from sglcache.core.key import Keys, Namespace
from sglcache.errors import BadRequest, StorageError

FORMAT = 1
MAGIC = b"SGLCPAGE"
MAX_HEADER_BYTES = 1 << 20  # a longer namespace is not stored
HASH_BYTES = 16
IDENTITY_BYTES = 16
_FIXED = struct.Struct("<8sHBBIQII16s32s32s")
_TAIL_BYTES = 2 * HASH_BYTES

# Why a page that was asked for is none: it is not there; its bytes are not what was put; it is another's; it ends too
# soon; it could not be read. Why one was not put: the write failed; there is no room that could be made; the page
# before it is not held. And the caller cancelled, or it is behind one that
# is none for another reason, and was not looked at.
Reason = Literal["missing", "corrupt", "foreign", "short", "failed", "full", "orphan", "cancelled", "behind"]
REASONS: tuple[Reason, ...] = (
    "missing",
    "corrupt",
    "foreign",
    "short",
    "failed",
    "full",
    "orphan",
    "cancelled",
    "behind",
)


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal before the bytes of a page mean the same. Whatever differs here never hits."""

    model: str
    revision: str = ""
    dtype: str  # torch's name
    layout: str  # of the payload: the order of its pieces, whatever the pool's
    page_size: int  # tokens
    bigram: bool = False
    hash_name: str = "xxh3_128"
    first_layer: int = 0  # of the model: the pipeline stage
    num_layers: int
    num_shards: int = 1  # of the model
    shards: tuple[int, int] = (0, 1)  # half-open: those whose bytes a payload has, in order
    payload_bytes: int  # of a page: all these shards
    geometry: Mapping[str, str | int | bool | None] = {}  # heads, dims, and whatever else gives the bytes a form

    @property
    def fingerprint(self) -> bytes:
        """16 bytes; the same in every process, on every machine."""
        said = msgspec.json.encode({"format": FORMAT, **msgspec.to_builtins(self)}, order="deterministic")
        return hashlib.sha256(said).digest()[:IDENTITY_BYTES]


class Found(NamedTuple):
    """What a header says of its page."""

    namespace: Namespace
    digest: bytes
    before: bytes | None
    tokens: bytes
    header_bytes: int


class Form:
    """Headers of one identity's pages: made, compared and read."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.fingerprint = identity.fingerprint
        self.keys = Keys(identity.page_size, identity.bigram)
        self.hasher = hasher(identity.hash_name)
        self.digest_bytes = self.hasher.size
        self.payload_bytes = identity.payload_bytes

    def num_pages(self, run: Run) -> int:
        """BadRequest where digests, tokens and the page before don't fit together."""
        num_pages, rest = divmod(len(run.digests), self.digest_bytes)
        wanted = num_pages * self.keys.page_bytes + (self.keys.over if num_pages else 0)
        if rest or len(run.tokens) != wanted or (run.before is not None and len(run.before) != self.digest_bytes):
            raise BadRequest(
                f"{len(run.digests)} bytes of digests, {len(run.tokens)} of tokens and "
                f"{'no' if run.before is None else len(run.before)} of the one before are no run of pages of "
                f"{self.keys.page_size} tokens and digests of {self.digest_bytes} bytes"
            )
        return num_pages

    def digest(self, run: Run, page: int) -> bytes:
        size = self.digest_bytes
        return run.digests[page * size : (page + 1) * size]

    def before(self, run: Run, page: int) -> bytes | None:
        return self.digest(run, page - 1) if page else run.before

    def tokens(self, run: Run, page: int) -> bytes:
        start = page * self.keys.page_bytes
        return run.tokens[start : start + self.keys.span]

    def part(self, run: Run, first: int, num_pages: int) -> Run:
        """The run of so many of its pages, from page `first` on."""
        size, keys = self.digest_bytes, self.keys
        digests = run.digests[first * size : (first + num_pages) * size]
        start = first * keys.page_bytes
        tokens = run.tokens[start : start + num_pages * keys.page_bytes + keys.over]
        return Run(run.namespace, self.before(run, first), digests, tokens)

    def header_bytes(self, namespace: Namespace) -> int:
        """Of every page of this namespace."""
        length = sum(1 if part is None else 9 + len(part.encode()) for part in namespace)
        return -(-(_FIXED.size + length + self.keys.span) // 8) * 8 + _TAIL_BYTES

    def prefix(self, run: Run, page: int, name: bytes) -> bytes:
        """The header of a page up to the hash of its payload. `name` is `packed(run.namespace)`."""
        before, tokens = self.before(run, page), self.tokens(run, page)
        length = _FIXED.size + len(name) + len(tokens)
        padding = -length % 8
        fixed = _FIXED.pack(
            MAGIC, FORMAT, self.digest_bytes, before is not None, length + padding + _TAIL_BYTES, self.payload_bytes,
            len(name), len(tokens), self.fingerprint, self.digest(run, page), before or b"",
        )  # fmt: skip
        return b"".join((fixed, name, tokens, bytes(padding)))

    def seal(self, prefix: bytes, payload: Sequence[memoryview]) -> bytes:
        """The whole header of the page whose bytes these are."""
        body = prefix + payload_hash(payload)
        return body + xxhash.xxh3_128_digest(body)

    def check(self, prefix: bytes, header: bytes, payload: Sequence[memoryview]) -> Reason | None:
        """Why these are not the page that was asked for, whole; None: they are."""
        if header[-HASH_BYTES:] != xxhash.xxh3_128_digest(header[:-HASH_BYTES]):
            return "corrupt"
        if header[:-_TAIL_BYTES] != prefix:
            return "foreign"
        if header[-_TAIL_BYTES:-HASH_BYTES] != payload_hash(payload):
            return "corrupt"
        return None

    def read(self, start: bytes) -> Found:
        """What the header that `start` begins with says. StorageError where it is none, is damaged, or another's."""
        if len(start) < _FIXED.size:
            raise StorageError(f"{len(start)} bytes are no header", reason="short")
        (
            magic,
            version,
            size,
            has_before,
            header_bytes,
            payload_bytes,
            name_bytes,
            token_bytes,
            whose,
            digest,
            before,
        ) = _FIXED.unpack_from(start)
        if magic != MAGIC or not _FIXED.size + _TAIL_BYTES <= header_bytes <= MAX_HEADER_BYTES:
            raise StorageError("this is no header", reason="corrupt")
        header = start[:header_bytes]
        if len(header) < header_bytes:
            raise StorageError(f"{len(header)} bytes of a header of {header_bytes}", reason="short", want=header_bytes)
        if header[-HASH_BYTES:] != xxhash.xxh3_128_digest(header[:-HASH_BYTES]):
            raise StorageError("the header is damaged", reason="corrupt")
        ours = (FORMAT, self.digest_bytes, self.payload_bytes, self.keys.span, self.fingerprint)
        if (version, size, payload_bytes, token_bytes, whose) != ours:
            raise StorageError("the page is of another identity", reason="foreign")
        name = header[_FIXED.size : _FIXED.size + name_bytes]
        tokens = header[_FIXED.size + name_bytes :][:token_bytes]
        if len(tokens) != token_bytes:
            raise StorageError("the header's parts are longer than itself", reason="corrupt")
        namespace = unpacked(name)
        found = Found(namespace, digest[:size], before[:size] if has_before else None, tokens, header_bytes)
        if not self.holds(*found[:4]):
            raise StorageError("the digest is not that of the tokens", reason="corrupt")
        return found

    def holds(self, namespace: Namespace, digest: bytes, before: bytes | None, tokens: bytes) -> bool:
        """Whether the digest is the one of these tokens behind that page: what was written down proves itself."""
        return self.hasher.digest((seed(namespace) if before is None else before) + self.keys.words(tokens)) == digest


def payload_hash(payload: Sequence[memoryview]) -> bytes:
    if len(payload) == 1:
        return xxhash.xxh3_128_digest(payload[0])
    state = xxhash.xxh3_128()
    for part in payload:
        state.update(part)
    return state.digest()


def packed(namespace: Namespace) -> bytes:
    """The three fields tagged and apart, so that no two namespaces are written alike (law 10)."""
    parts = [None if part is None else part.encode() for part in namespace]
    return b"".join(b"\x00" if part is None else b"\x01" + len(part).to_bytes(8, "little") + part for part in parts)


def unpacked(name: bytes) -> Namespace:
    """StorageError for bytes that `packed` does not make."""
    fields: list[Any] = []
    at = 0
    try:
        for _ in range(3):
            tag, at = name[at], at + 1
            if tag == 0:
                fields.append(None)
                continue
            if tag != 1:
                raise IndexError
            end = at + 8 + int.from_bytes(name[at : at + 8], "little")
            fields.append(name[at + 8 : end].decode())
            at = end
    except (IndexError, UnicodeDecodeError):
        at = -1
    if at != len(name):
        raise StorageError("the header's namespace is damaged", reason="corrupt")
    return Namespace(*fields)
