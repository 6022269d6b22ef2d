"""Pages as an outsider names them: by namespace and every token up to their end, hashed with hashlib and xxhash alone.

Nothing here comes from `core`, so that a test which compares the two compares two pieces of work.
"""

from __future__ import annotations

import hashlib
import struct
from itertools import pairwise

import xxhash

TOKEN_BYTES = 4

# (lora, extra_key, cache_salt), as a plain tuple; the core's Namespace is equal to it.
NamespaceTuple = tuple[str | None, str | None, str | None]


def digest_of(hash_name: str, data: bytes) -> bytes:
    """The page hash by its published name."""
    if hash_name == "sha256":
        return hashlib.sha256(data).digest()
    return bytes(xxhash.xxh3_128(data).digest())


def seed_of(namespace: NamespaceTuple) -> bytes:
    """What a namespace's first page is chained to: SGLang's storage seed, a lora as third part if there is one."""
    lora, extra_key, cache_salt = namespace
    if namespace == (None, None, None):
        return b""
    data = b"sglang-cache-namespace-v1"
    for part in (extra_key, cache_salt) if lora is None else (extra_key, cache_salt, lora):
        if part is None:
            data += b"\x00"
        else:
            data += b"\x01" + struct.pack("<Q", len(part.encode())) + part.encode()
    return hashlib.sha256(data).digest()


class Page:
    """One page of one namespace at one place in one sequence. Interned by a Book: equal pages are the same object."""

    __slots__ = ("depth", "digest", "hash", "namespace", "parent", "tokens", "words")

    def __init__(
        self, namespace: NamespaceTuple, parent: Page | None, tokens: bytes, words: bytes, digest: bytes
    ) -> None:
        self.namespace = namespace
        self.parent = parent  # None: the first of its namespace
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.tokens = tokens  # its own, uint32 LE
        self.words = words  # as they are hashed and told of: the same, or of bigrams each with the one behind it
        self.digest = digest
        self.hash: int = struct.unpack(">q", digest[:8])[0]

    def __repr__(self) -> str:
        prefix = b"".join(page.tokens for page in ancestry(self))
        ids = struct.unpack(f"<{len(prefix) // TOKEN_BYTES}I", prefix)
        shown = ",".join(map(str, ids if len(ids) <= 12 else (*ids[:4], "..", *ids[-4:])))
        where = "" if self.namespace == (None, None, None) else f" of {tuple(self.namespace)}"
        return f"<page {self.depth} [{shown}]{where}>"


class Book:
    """Every page met so far, for one page size and hash: one object for each namespace and sequence of tokens.

    `bigram`: a page is named by its tokens and the one behind them, as pairs.
    """

    def __init__(self, page_size: int, hash_name: str, bigram: bool = False) -> None:
        self.page_bytes = page_size * TOKEN_BYTES
        self.bigram = bigram
        self.hash_name = hash_name
        self.by_digest: dict[bytes, Page] = {}
        self.by_hash: dict[int, Page] = {}
        # By what is before it, the page's own tokens, and the namespace where nothing is before it.
        self._pages: dict[tuple[Page | NamespaceTuple, bytes], Page] = {}

    def path(self, namespace: NamespaceTuple, tokens: bytes, after: Page | None = None) -> tuple[Page, ...]:
        """The pages of `tokens` in order, behind the page `after`; a last one that is short or has no name is none."""
        namespace = (namespace[0], namespace[1], namespace[2])
        path: list[Page] = []
        size = self.page_bytes
        parent = after
        for start in range(0, len(tokens) - size + 1, size):
            own = words = tokens[start : start + size]
            if self.bigram:
                if start + size == len(tokens):
                    break
                ids = struct.unpack_from(f"<{size // TOKEN_BYTES + 1}I", tokens, start)
                words = b"".join(struct.pack("<II", *pair) for pair in pairwise(ids))
            key = (namespace if parent is None else parent, words)
            page = self._pages.get(key)
            if page is None:
                before = seed_of(namespace) if parent is None else parent.digest
                page = Page(namespace, parent, own, words, digest_of(self.hash_name, before + words))
                self._pages[key] = self.by_digest[page.digest] = self.by_hash[page.hash] = page
            path.append(page)
            parent = page
        return tuple(path)


def ancestry(page: Page | None) -> list[Page]:
    """The page and everything above it, first page first."""
    path: list[Page] = []
    while page is not None:
        path.append(page)
        page = page.parent
    path.reverse()
    return path
