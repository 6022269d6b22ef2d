"""A runner's claim on pages, from acquire to release."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from sglcache.client.connection import Answer
from sglcache.wire import control

if TYPE_CHECKING:
    from sglcache.client.client import Client, Tokens


class Committed(NamedTuple):
    """What a commit came to, once it took effect; `slots` of the lease says the canonical pages from then on."""

    committed_tokens: int
    num_duplicates: int  # pages of ours that the cache had already: they are read from there now


class Lease:
    """Made by `Client.acquire`. As a context manager it is aborted on an exception and released otherwise.

    Thread-safe as its client is. Ended, it takes no command but another release or abort, which do nothing.
    """

    __slots__ = ("_client", "_slots", "_table", "_tokens", "ended", "host_tokens", "id", "load", "matched_tokens")

    def __init__(self, client: Client, tokens: bytes, granted: control.Granted) -> None:
        self._client = client
        self._tokens = tokens
        self._table = granted.slots
        self._slots: npt.NDArray[np.int32] | None = None
        self.ended = False
        self.id = granted.lease
        self.matched_tokens = granted.matched_tokens
        """Served from the cache, from any tier; a multiple of the page size."""
        self.host_tokens = granted.host_tokens
        """Of these, the last ones, which come from the host: `wait_loaded` before they are read."""
        self.load = granted.load
        """(load slot, generation) for workers to wait for; None: nothing is being loaded."""

    @property
    def slots(self) -> npt.NDArray[np.int32]:
        """int32 [num_pages]: where page i of the tokens lives on the device. A new array after extend and commit."""
        if self._slots is None:
            # A copy: torch warns of arrays that can't be written.
            self._slots = np.frombuffer(self._table, "<i4").copy()
        return self._slots

    @property
    def tokens(self) -> npt.NDArray[np.uint32]:
        """uint32 [num_tokens]: what was acquired and extended by."""
        return np.frombuffer(self._tokens, "<u4")

    def __repr__(self) -> str:
        state = ", ended" if self.ended else ""
        return f"Lease({self.id}, {len(self._tokens) // 4} tokens, {self.matched_tokens} matched{state})"

    def wait_loaded(self, layer: int | None = None) -> None:
        """Block until what comes from the host is readable, in one layer or in all.

        TransferError: the load failed; abort the lease and acquire anew.
        """
        if self.load is not None:
            self._client.wait_loaded(self.load, layer)

    def extend(self, tokens: Tokens, reserve: int = 0) -> None:
        """Append tokens, and pages as they need, with room for `reserve` more. NoSpace: nothing was changed."""
        packed = self._client.pack(tokens)
        granted = self._client.extend(self.id, packed, reserve)
        self._tokens += packed
        self._table = granted.slots
        self._slots = None

    def commit(self, tokens: int | None = None) -> Committed:
        """Give the whole pages of the first `tokens` tokens (None: of all) to the cache, and wait until it has them.

        With workers this waits for every one's `record`.
        """
        return self._client.commit(self, tokens)

    def commit_begin(self, tokens: int | None = None) -> int:
        """As `commit`, without waiting: the ticket, for `Client.wait` and for the workers to record."""
        return self._client.begin_commit(self, tokens)

    def release(self, *, wait: bool = False) -> None:
        """Give everything back. Of what was not committed the cache keeps nothing.

        There is nothing to learn from the answer, and what this client does next comes after it; so it is waited for
        only on request, by whom must know that the pages are free for others (with workers, that all have recorded).
        """
        if not self.ended:
            self._client.end(self, discard=False, wait=wait)

    def release_begin(self) -> int:
        """As `release`: the ticket, for the workers to record and for `Client.wait`."""
        return self._client.begin_end(self, discard=False)

    def abort(self, *, wait: bool = False) -> None:
        """As `release`, and commits that have not taken effect don't."""
        if not self.ended:
            self._client.end(self, discard=True, wait=wait)

    def apply(self, answer: Answer) -> Committed | None:
        """Take in what the daemon answered to a commit; to a release there is nothing to take."""
        if not isinstance(answer, control.CommitDone):
            return None
        if answer.slots:
            table = bytearray(self._table)
            start = answer.first_page * 4
            table[start : start + len(answer.slots)] = answer.slots
            self._table = bytes(table)
            self._slots = None
        return Committed(answer.committed_tokens, answer.num_duplicates)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.release()
        else:
            self._client.abandon(self)
