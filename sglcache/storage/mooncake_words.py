"""What a rank and its Mooncake process say to each other, as msgpack over a socket pair."""

from __future__ import annotations

from typing import Literal

import msgspec

from sglcache.errors import ProtocolError
from sglcache.storage.page import Identity, Reason

MAX_WORD = 256 << 20  # bytes: of the longest run of pages with its tokens
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Of the client library, by its own names where it has one."""

    master: str  # HOST:PORT, or what the library takes for a master that is highly available
    metadata_server: str = "P2PHANDSHAKE"
    local_hostname: str = "127.0.0.1"  # by which other clients reach this one
    protocol: str = "tcp"
    rdma_devices: str = ""
    segment_bytes: int = 0  # of this host's memory for the store; 0: only use what others give
    buffer_bytes: int = 64 << 20  # of the library's own
    prefix: str = "sglcache"  # of every key


class Start(msgspec.Struct, tag=True):
    """The first word, to the process. Regions are memfds, mapped whole."""

    options: Options
    identity: Identity
    num_pages: int
    fds: list[int]
    region_bytes: list[int]
    pieces: list[tuple[int, int, int, int]]
    num_threads: int


What = Literal["exists", "put", "get", "discard", "clear"]


class Ask(msgspec.Struct, tag=True):
    """One batch of pages."""

    number: int
    what: What
    namespace: tuple[str | None, str | None, str | None] = (None, None, None)
    before: bytes | None = None
    digests: bytes = b""
    tokens: bytes = b""
    slots: bytes = b""  # int32


class Close(msgspec.Struct, tag=True):
    """Leave the store and end."""


class Loaded(msgspec.Struct, tag=True):
    """The library could be loaded; or why not."""

    error: str | None = None
    missing: bool = False  # it is not installed


class State(msgspec.Struct, tag=True):
    """Whether the master can be asked."""

    connected: bool


class Answer(msgspec.Struct, tag=True):
    """To the Ask of that number."""

    number: int
    num_pages: int = 0
    mask: bytes = b""
    reason: Reason | None = None
    bad: bytes = b""


ToProcess = Start | Ask | Close
FromProcess = Loaded | State | Answer

_to_process = msgspec.msgpack.Decoder(ToProcess).decode
_from_process = msgspec.msgpack.Decoder(FromProcess).decode


def to_process(data: bytes) -> ToProcess:
    """ProtocolError: that is none of a rank's words."""
    try:
        return _to_process(data)
    except DECODE_ERRORS as exc:
        raise ProtocolError(f"that is none of a rank's words: {exc}") from None


def from_process(data: bytes) -> FromProcess:
    """ProtocolError: that is none of the process's words."""
    try:
        return _from_process(data)
    except DECODE_ERRORS as exc:
        raise ProtocolError(f"that is none of its words: {exc}") from None
