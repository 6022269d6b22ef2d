"""Page digests: `digest(p) = H(digest(p-1) || tokens of p as uint32 LE)`, the first page of a namespace seeded.

With sha256 and no lora these are SGLang's own values (its `hash_binding.cpp`, and its storage seed from 0.5.21 on).
A digest depends on nothing but the tokens, the page size and the namespace: no process seed, no environment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import xxhash

from sglcache.core.key import Namespace
from sglcache.errors import ConfigError

AT_ONCE = 512  # pages that are made into objects: of many more the memory would be the system's, each time anew


class Hasher(NamedTuple):
    """One hash function for the whole life of an index."""

    name: str
    size: int  # bytes of a digest
    digest: Callable[[bytes], bytes]
    bytes_per_unit: int  # that it hashes in 0.1 µs

    def cost(self, page_bytes: int) -> int:
        """About what a page of a chain takes, in units of 0.1 µs."""
        return 1 + page_bytes // self.bytes_per_unit

    def chain(self, before: bytes, text: bytes, page_bytes: int, start: int = 0, stop: int | None = None) -> bytes:
        """The digests of the pages in `text[start:stop]`, joined; `before` is the digest (or seed, or nothing) they
        follow.

        Of bigram keys `text` is their `words`, and `page_bytes` is of these. A short last page is hashed as it is.
        """
        digest = self.digest
        size = (len(text) if stop is None else stop) - start
        whole = size // page_bytes
        # "V" and not "S": numpy's S drops trailing zero bytes, which are a token like any other.
        pages = np.frombuffer(text, f"V{page_bytes}", whole, start)
        last = before
        if whole <= AT_ONCE and whole * page_bytes == size:
            return b"".join([last := digest(last + page) for page in pages.tolist()])
        parts = []
        for first in range(0, whole, AT_ONCE):
            some = pages[first : first + AT_ONCE].tolist()
            parts.append(b"".join([last := digest(last + page) for page in some]))
        if whole * page_bytes < size:
            parts.append(digest(last + text[start + whole * page_bytes : start + size]))
        return b"".join(parts)


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


HASHERS = {
    "xxh3_128": Hasher("xxh3_128", 16, xxhash.xxh3_128_digest, 512),
    "sha256": Hasher("sha256", 32, _sha256, 40),
}


def hasher(name: str) -> Hasher:
    """`ConfigError` for a name that is not one of HASHERS."""
    try:
        return HASHERS[name]
    except KeyError:
        raise ConfigError(f"hash {name!r} is unknown; use one of {', '.join(HASHERS)}", path="events.hash") from None


def _tagged(value: str | None) -> bytes:
    if value is None:
        return b"\x00"
    data = value.encode()
    return b"\x01" + len(data).to_bytes(8, "little") + data


def seed(namespace: Namespace) -> bytes:
    """What stands for the digest before a namespace's first page; nothing for the plain namespace.

    SGLang's storage seed over (extra_key, cache_salt); a lora is a third tagged part, only when there is one.
    """
    lora, extra_key, cache_salt = namespace
    if lora is None and extra_key is None and cache_salt is None:
        return b""
    parts = b"sglang-cache-namespace-v1" + _tagged(extra_key) + _tagged(cache_salt)
    return _sha256(parts if lora is None else parts + _tagged(lora))


def block_hash(digest: bytes) -> int:
    """A digest's name in events: its first 8 bytes, big-endian, as a signed int64."""
    return int.from_bytes(digest[:8], "big", signed=True)
