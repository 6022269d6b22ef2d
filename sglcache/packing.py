"""Loops over tokens and hashes, where they are compiled: a few instructions for each.

It is for numbers that wrap at 64 bits, as they do in C, and not to be run as it is written.
"""

from __future__ import annotations

from librt.strings import (
    BytesWriter,
    read_i32_le,
    read_i64_be,
    write_i16_be,
    write_i32_be,
    write_i32_le,
    write_i64_be,
)
from mypy_extensions import i16, i32, i64, u8


def pack_tokens(text: bytes, start: int, stop: int) -> bytes:
    """uint32 little-endian [n], `text[start:stop]`, to a msgpack array of n integers, each as short as it can be."""
    at: i64 = start
    end: i64 = stop
    out = _array((end - at) // 4)
    size: i64 = len(out)
    while at < end:
        token = i64(read_i32_le(text, at)) & 0xFFFFFFFF
        at += 4
        if token < 1 << 8:  # of a text hardly any
            if token >= 1 << 7:
                out.append(0xCC)
                size += 1
            out.append(u8(token))
            size += 1
            continue
        # Three bytes or five, which no processor guesses: both are made, and eight written, without a branch.
        long = (0xFFFF - token) >> 63  # all ones: five
        short_form = (0xCD << 16 | token) << 40
        long_form = (0xCE << 32 | token) << 24
        write_i64_be(out, (short_form & ~long) | (long_form & long))
        size += 3 - 2 * long
        out.truncate(size)
    return out.getvalue()


def pack_hashes(digests: bytes, digest_bytes: int) -> bytes | None:
    """The first 8 bytes of each digest, as a big-endian int64, to a msgpack array; None: one of them is a short one."""
    at: i64 = 0
    end: i64 = len(digests)
    size: i64 = digest_bytes
    out = _array(end // size)
    while at < end:
        number = read_i64_be(digests, at)
        at += size
        if -(1 << 31) <= number < 1 << 32:
            return None
        out.append(u8(0xCF + ((number >> 63) & 4)))  # uint64, or int64 where it is negative
        write_i64_be(out, number)
    return out.getvalue()


def sum_hashes(digests: bytes, digest_bytes: int) -> int:
    """Of these numbers, mod 2^64, as an int64."""
    at: i64 = 0
    end: i64 = len(digests)
    size: i64 = digest_bytes
    total: i64 = 0
    while at < end:
        total += read_i64_be(digests, at)
        at += size
    return total


def _array(count: i64) -> BytesWriter:
    """The head of a msgpack array."""
    out = BytesWriter()
    if count < 1 << 4:
        out.append(u8(0x90 | count))
    elif count < 1 << 16:
        out.append(0xDC)
        write_i16_be(out, i16(count))
    else:
        out.append(0xDD)
        write_i32_be(out, i32(count))
    return out


def are_ids(tokens: list[object]) -> bool:
    """Whether all of them are integers from 0 on."""
    return all(isinstance(token, int) and token >= 0 for token in tokens)


def pack_ids(tokens: list[object]) -> bytes | None:
    """Token ids as uint32 little-endian; None: one is not of those."""
    out = BytesWriter()
    for token in tokens:
        if not isinstance(token, int) or not 0 <= token <= 0xFFFF_FFFF:
            return None
        word: i64 = token
        write_i32_le(out, i32(word))
    return out.getvalue()
