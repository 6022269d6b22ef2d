"""What a store of pages is, whatever keeps them. `engine.py` calls it, on its threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from sglcache.core.effects import Run
from sglcache.storage.page import Form, Reason

Stop = Callable[[], bool]  # asked before each page, or each batch of them


class Put(NamedTuple):
    """What a put did."""

    mask: bytes  # a byte a page: 1, the store has it now
    new_pages: int  # of these, what was not there before
    removed: bytes = b""  # digests, joined: what it no longer holds, in order
    reason: Reason | None = None  # why it stopped


class Got(NamedTuple):
    """What a get found."""

    num_pages: int  # leading pages whose bytes are right in their slots
    reason: Reason | None = None  # why the next is not; None: there is no next
    bad: bytes = b""  # digest of a page that should be discarded: it is in the store and is no page


class Cleared(NamedTuple):
    """What a clear did. Pages that could not be removed are nobody's in this life, and would be there in the next."""

    num_pages: int = 0  # that are gone, as far as it knows
    removed: bytes = b""  # digests, joined: what it no longer holds (exact stores)
    left: int | None = 0  # pages that could not be removed; None: it did not come to pass, for so many as there are
    why: str = ""


class Stats(NamedTuple):
    """Of a store that is open. None: only whoever keeps the pages knows."""

    num_pages: int | None = None
    num_bytes: int | None = None
    max_bytes: int | None = None
    evicted_pages: int = 0  # since it was opened; likewise below
    discarded_pages: int = 0
    connected: bool = True  # it can be asked; what it can't be asked for is a miss
    others_bytes: int = 0  # of num_bytes, what other identities have there
    unwritable_since: float | None = None  # Unix time since which nothing could be stored; None: it can be
    unwritable_why: str | None = None


class Store(Protocol):
    """A store. Its calls wait for I/O with the interpreter's lock let go, and none raises for what I/O does.

    `put`, `discard` and `clear` come from one thread, `get` from several, `exists` from one, `listing` from any.
    A page that is put while it is there stays as it is. SglcacheError is raised only where a call can't be meant.
    """

    name: str
    exact: bool  # it knows what it holds, and tells of all that goes; else what it says is a hint
    form: Form

    def open(self) -> None:
        """Make it ready. ConfigError, NotInstalled: the operator has to do something first."""

    def exists(self, run: Run) -> int:
        """How many leading pages it has, as far as it knows."""

    def put(self, run: Run, slots: Sequence[int], stop: Stop) -> Put:
        """Store these pages' bytes, up to the first that fails."""

    def get(self, run: Run, slots: Sequence[int], stop: Stop) -> Got:
        """Read pages into their slots, up to the first that is not right. It and those behind it may hold anything."""

    def discard(self, digest: bytes) -> bytes:
        """Throw away a page that was found bad; the digests of what is no longer held."""

    def listing(self) -> Iterator[list[Run]]:
        """All it holds, parents first, some hundred pages at a time; exact stores only.

        What comes or goes meanwhile may be in it or not; all that a slice tells of was there when it was made.
        """

    def clear(self) -> Cleared:
        """Forget all pages of this identity, and those that an earlier clear left."""

    def stats(self) -> Stats: ...

    def interrupt(self) -> None:
        """Before a close that can't wait: calls under way shall come back, and later ones at once. From any thread."""

    def close(self) -> None: ...
