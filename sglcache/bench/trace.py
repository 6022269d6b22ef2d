"""Real requests from a file in Mooncake's trace format, as token ids.

A line is one request: {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}, with one
id for each 512 tokens of input. A block's tokens are drawn from a generator that is seeded by its id: equal ids give
equal tokens, so two requests share a prefix exactly where the real ones did, and any reader of the same file that
follows this rule gets the same ids.

The file is read line by line, and a bounded number of blocks is remembered: memory does not grow with the file.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from sglcache.errors import ConfigError

BLOCK = 512  # tokens
VOCAB = 128_000
MAX_LINE = 16 << 20  # bytes
MAX_TOKENS = 4 << 20  # of a prompt: what a frame of the control socket takes
KEPT_BLOCKS = 8192  # 16 MiB

Blocks = OrderedDict[int, npt.NDArray[np.uint32]]


class Record(msgspec.Struct, frozen=True):
    """A line. Keys that we don't know are not an error: traces carry more than this."""

    input_length: Annotated[int, Meta(ge=1)]
    hash_ids: list[Annotated[int, Meta(ge=0)]]
    timestamp: Annotated[float, Meta(ge=0)] = 0.0
    output_length: Annotated[int, Meta(ge=0)] = 0


class Request(NamedTuple):
    """One request of the trace."""

    arrival_ms: float
    tokens: npt.NDArray[np.uint32]  # [input_length], the prompt
    output_tokens: int


def records(path: Path | str, limit: int | None = None) -> Iterator[Record]:
    """The first `limit` lines, decoded. ConfigError with file and line: a line is not a request, or no file."""
    decode = msgspec.json.Decoder(Record).decode
    try:
        with open(path, "rb") as file:
            lines = iter(lambda: file.readline(MAX_LINE + 1), b"")
            for number, line in enumerate(lines, 1):
                if limit is not None and number > limit:
                    return
                if len(line) > MAX_LINE:
                    raise _bad(path, number, f"longer than {MAX_LINE} bytes")
                try:
                    record = decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
                    raise _bad(path, number, str(exc)) from None
                named = len(record.hash_ids) * BLOCK
                if record.input_length > MAX_TOKENS:
                    raise _bad(path, number, f"input_length {record.input_length}; at most {MAX_TOKENS} are taken")
                if not math.isfinite(record.timestamp):
                    raise _bad(path, number, f"timestamp {record.timestamp} is no time")
                if record.input_length > named:
                    raise _bad(path, number, f"input_length {record.input_length}, but hash_ids name {named} tokens")
                yield record
    except OSError as exc:
        raise ConfigError(
            f"{path}: {exc.strerror or exc}; give --trace a file that can be read", path=str(path)
        ) from exc


def requests(path: Path | str, limit: int | None = None) -> Iterator[Request]:
    """The first `limit` requests of the file, in its order. Errors as `records`."""
    blocks: Blocks = OrderedDict()
    for record in records(path, limit):
        needed = record.hash_ids[: -(-record.input_length // BLOCK)]
        tokens = np.concatenate([_block(blocks, number) for number in needed])[: record.input_length]
        yield Request(record.timestamp, tokens, record.output_length)


def _block(blocks: Blocks, number: int) -> npt.NDArray[np.uint32]:
    tokens = blocks.get(number)
    if tokens is not None:
        blocks.move_to_end(number)
        return tokens
    tokens = blocks[number] = np.random.default_rng(number).integers(0, VOCAB, BLOCK, dtype=np.uint32)
    if len(blocks) > KEPT_BLOCKS:
        blocks.popitem(last=False)
    return tokens


def _bad(path: Path | str, number: int, problem: str) -> ConfigError:
    return ConfigError(
        f"{path}:{number}: {problem}; a line is one JSON object with input_length, output_length, timestamp and one "
        f"hash_ids entry per {BLOCK} tokens",
        path=str(path),
        line=number,
    )
