"""What a page is named by: its namespace and every token up to its end; with bigram keys, up to the one behind it.

Tokens are one `bytes` of uint32 little-endian; no Python object per token exists anywhere in the core. A run
is compared with a whole node at a time.
"""

from __future__ import annotations

import contextlib
import struct
from typing import Any, Final, NamedTuple

import numpy as np

from sglcache.errors import BadRequest

TOKEN_BYTES: Final = 4
_UINT32 = np.dtype("<u4")
FEW = 16  # tokens that are packed faster without an array: of a step that decodes, for each request


class Namespace(NamedTuple):
    """Three tagged fields, never joined into one string: equal prompts of two namespaces share nothing (law 10)."""

    lora: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None

    @classmethod
    def of(cls, lora: str | None = None, extra_key: str | None = None, cache_salt: str | None = None) -> Namespace:
        """An empty salt and an empty lora mean none (as in SGLang); an empty extra_key is a namespace of its own."""
        return cls(lora or None, extra_key, cache_salt or None)


ROOT = Namespace()


class Keys:
    """How the tokens of a sequence name its pages: one for the whole life of an index. Sizes are in bytes.

    Plain: a page of P tokens by these. Bigram, as the draft models of EAGLE need it: what is computed for a token
    depends on the one behind it, too, so a unit of the key is the two of them, and n tokens make n - 1 units. A page
    still holds what was computed for P tokens, but its key spans P + 1 and shares the last of them with the next
    page's; the last token of a sequence has no unit, and a page that ends with it no name yet. A run of pages is the
    slice of the sequence's tokens from the first of them to the one behind the last: a view, and compared as it is.
    """

    __slots__ = ("bigram", "over", "page_bytes", "page_size", "span", "word_bytes")

    def __init__(self, page_size: int, bigram: bool = False) -> None:
        self.page_size = page_size
        self.bigram = bigram
        self.page_bytes = page_size * TOKEN_BYTES
        self.over = TOKEN_BYTES if bigram else 0  # by which a run is longer than its pages
        self.span = self.page_bytes + self.over  # of one page's run
        self.word_bytes = self.page_bytes * (2 if bigram else 1)  # of a page as `words` has it

    def whole(self, num_bytes: int) -> int:
        """Of the pages that so much of a sequence names."""
        num_bytes -= self.over
        return num_bytes - num_bytes % self.page_bytes if num_bytes > 0 else 0

    def words(self, run: bytes) -> bytes:
        """A run as it is hashed and told of: uint32 [n], or of bigrams [n, 2]."""
        if not self.bigram:
            return run
        tokens = np.frombuffer(run, "<u4")
        pairs = np.empty((len(tokens) - 1, 2), "<u4")
        pairs[:, 0] = tokens[:-1]
        pairs[:, 1] = tokens[1:]
        return pairs.tobytes()


def pack(tokens: Any) -> bytes:
    """Token ids as packed uint32 little-endian. `BadRequest` for an id outside uint32 or something not integral."""
    if isinstance(tokens, bytes):
        if len(tokens) % TOKEN_BYTES:
            raise BadRequest(f"packed tokens are uint32: {len(tokens)} bytes is no multiple of 4")
        return tokens
    if type(tokens) is np.ndarray and tokens.dtype is _UINT32 and tokens.ndim == 1:
        return tokens.tobytes()
    if type(tokens) is list and len(tokens) <= FEW and all(type(token) is int for token in tokens):
        with contextlib.suppress(struct.error):  # what is wrong with it is said below
            return struct.pack(f"<{len(tokens)}I", *tokens)
    try:
        array = np.asarray(tokens)
    except (ValueError, OverflowError) as exc:
        raise BadRequest(f"token ids must be a flat sequence of integers: {exc}") from None
    if array.size == 0:
        return b""
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise BadRequest(f"token ids must be a flat sequence of integers, not {array.ndim}-d {array.dtype}")
    if array.dtype != np.uint32 and (int(array.min()) < 0 or int(array.max()) > 0xFFFFFFFF):
        bad = int(array.min()) if int(array.min()) < 0 else int(array.max())
        raise BadRequest(f"token id {bad} is outside 0..4294967295", token=bad)
    return array.astype("<u4", copy=False).tobytes()


def common_bytes(run: bytes, key: bytes, start: int, end: int) -> int:
    """How many bytes of `run` equal `key[start:end]` from its start."""
    size = min(len(run), end - start)
    done = 0
    # A first difference is mostly near the start, and most of a long run need not be looked at.
    step = 256
    while done < size:
        stop = min(done + step, size)
        if run[done:stop] != key[start + done : start + stop]:
            left = np.frombuffer(run, np.uint8, stop - done, done)
            right = np.frombuffer(key, np.uint8, stop - done, start + done)
            return done + int((left != right).argmax())
        done = stop
        step *= 4
    return size
