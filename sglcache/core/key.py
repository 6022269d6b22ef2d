"""What a page is named by: its namespace and every token up to its end.

Tokens are one `bytes` of uint32 little-endian; no Python object per token exists anywhere in the core. A run
is compared with a whole node at a time.
"""

from __future__ import annotations

import contextlib
import struct
from typing import NamedTuple

import numpy as np

from sglcache.errors import BadRequest

TOKEN_BYTES = 4
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


def pack(tokens: object) -> bytes:
    """Token ids as packed uint32 little-endian. `BadRequest` for an id outside uint32 or something not integral."""
    if isinstance(tokens, bytes):
        if len(tokens) % TOKEN_BYTES:
            raise BadRequest(f"packed tokens are uint32: {len(tokens)} bytes is no multiple of 4")
        return tokens
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
