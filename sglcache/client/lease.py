"""A runner's claim on pages, from acquire to release."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from sglcache.client.connection import Connection, Pending
from sglcache.client.shares import Shares, StateShare, WindowShare
from sglcache.errors import BadRequest, Forbidden
from sglcache.wire import control

if TYPE_CHECKING:
    from sglcache.client.client import Client, Event, Tokens


class Committed(NamedTuple):
    """What a commit came to, once it took effect; `slots` of the lease says the canonical pages from then on."""

    committed_tokens: int
    num_duplicates: int  # pages of ours that the cache had already: they are read from there now


class Lease:
    """Made by `Client.acquire`. As a context manager it is aborted on an exception and released otherwise.

    Thread-safe as its client is. Ended, it takes no command but another release or abort, which do nothing. When the
    daemon's life is over, or the session, it stays dead, whatever its client attaches to next: every verb raises
    DaemonRestarted (or SessionEnded) and sends nothing, and so does `slots`, whose numbers name no page any more.

    Of a scheduler with workers, what waits for events (commit, release, abort, `with`) is Forbidden: the workers must
    record a ticket first, so the scheduler begins these things, hands out the ticket, and waits later.
    """

    __slots__ = (
        "_client",
        "_granted",
        "_parts",
        "_shares",
        "_table",
        "_view",
        "ended",
        "id",
        "session",
    )

    def __init__(self, client: Client, connection: Connection, tokens: bytes, granted: control.Granted) -> None:
        self._table = table = granted.slots
        if len(table) % 4:
            raise ValueError(f"{len(table)} bytes of slots, of 4 each")
        self._client = client
        self.session = connection
        """The session that it is of, which another of its client's may have followed. See `connection`."""
        self._parts = [tokens]
        self._granted = granted
        self._view: tuple[bytes, npt.NDArray[np.int32]] | None = None  # the table that was shown, and how
        self.ended = False
        self.id = granted.lease
        self._shares = Shares(client.companions, granted.shares) if granted.shares else None

    @property
    def matched_tokens(self) -> int:
        """Served from the cache, from any tier; a multiple of the page size."""
        return self._granted.matched_tokens

    @property
    def host_tokens(self) -> int:
        """Of these, the last ones, which come from the host: `wait_loaded` before they are read."""
        return self._granted.host_tokens

    @property
    def load(self) -> tuple[int, int] | None:
        """(load slot, generation) for workers to wait for; None: nothing is being loaded."""
        return self._granted.load

    @property
    def reaches(self) -> tuple[int, ...]:
        """Tokens that full attention's KV alone would match, then it with each companion alone; the match is where all
        agree. What lies between `matched_tokens` and the first is cached and can't be used for want of a window or a
        state: at that depth others branch off, so a state committed there will be found."""
        granted = self._granted
        return granted.reaches or (granted.matched_tokens,)

    @property
    def slots(self) -> npt.NDArray[np.int32]:
        """int32 [num_pages]: where page i of the tokens lives on the device. A new array after extend and commit.

        With `room` it may end before the tokens do: what lies beyond has no page yet.
        """
        if self.session.broken:
            self.session.check()
        table, view = self._table, self._view
        if view is None or view[0] is not table:
            # A copy: torch warns of arrays that can't be written.
            view = self._view = (table, np.frombuffer(table, "<i4").copy())
        return view[1]

    @property
    def window(self) -> WindowShare | None:
        """The lease's pages of the window; None: the daemon keeps none. The same object at all times."""
        return None if self._shares is None else cast("WindowShare | None", self._share("window"))

    @property
    def mamba(self) -> StateShare | None:
        """The lease's states; None: the daemon keeps none. The same object at all times."""
        return None if self._shares is None else cast("StateShare | None", self._share("mamba"))

    @property
    def tokens(self) -> npt.NDArray[np.uint32]:
        """uint32 [num_tokens]: what was acquired and extended by."""
        parts = self._parts
        if (count := len(parts)) > 1:
            parts[:count] = [b"".join(parts[:count])]
        return np.frombuffer(parts[0], "<u4")

    def __repr__(self) -> str:
        state = ", ended" if self.ended else ""
        num_tokens = sum(map(len, self._parts)) // 4
        return f"Lease({self.id}, {num_tokens} tokens, {self.matched_tokens} matched{state})"

    def is_of(self, client: Client) -> bool:
        """Whether that client acquired it: another's number may mean another lease."""
        return self._client is client

    # -- more pages ---------------------------------------------------------------------------------------

    def wait_loaded(self, layer: int | None = None, *, on_stream: bool = False) -> None:
        """Block until what comes from the host is readable, in one layer or in all.

        `on_stream`: as of `Client.wait_loaded`. TransferError: the load failed; abort the lease and acquire anew.
        """
        if self.load is not None:
            self.session.check()
            self._client.wait_loaded(self.load, layer, on_stream=on_stream)

    def extend(
        self,
        tokens: Tokens = (),
        reserve: int = 0,
        upto: int | None = None,
        states: int = 0,
        *,
        wait_s: float | None = None,
    ) -> None:
        """Append tokens, and pages for all that the lease has then and `reserve` more; it never loses one.

        `upto`: pages for the first so many tokens at most, as for the next chunk of a prompt. `states`: so many slots
        for states more. `wait_s`: how long to wait for room that others hold; None: as the daemon is configured.
        NoSpace: nothing was changed.
        """
        self.extend_begin(tokens, reserve, upto, states, wait_s=wait_s).wait()

    def extend_begin(
        self,
        tokens: Tokens = (),
        reserve: int = 0,
        upto: int | None = None,
        states: int = 0,
        *,
        wait_s: float | None = None,
    ) -> Pending[None]:
        """As `extend`, without waiting. `Client.extend_begin` does it for many leases at once."""
        return self._client.send_extension(self, tokens, reserve, upto, states, wait_s)

    # -- giving to the cache, and giving back -----------------------------------------------------------------

    def commit(
        self,
        tokens: int | None = None,
        *,
        states: Iterable[tuple[int, int]] = (),
        floor: int | None = None,
        event: Event | None = None,
    ) -> Committed:
        """Give the whole pages of the first `tokens` tokens (None: of all that have pages) to the cache, and wait.

        Where the daemon has bigram keys: of these pages those behind which the lease has a token. `states`: pairs
        (tokens, slot); each says that one of `mamba.slots` holds the state at the end of so many tokens, whole pages
        that are committed by then, and it is given with them. `floor`: window pages of the lease's own that lie wholly
        before so many tokens are given up before that, as of no use. `event`: one that was recorded earlier, behind the
        writes of all this; None: one that is recorded now.
        """
        self._must_not_wait("commit")
        return self.commit_begin(tokens, states=states, floor=floor, event=event).wait()

    def commit_begin(
        self,
        tokens: int | None = None,
        *,
        states: Iterable[tuple[int, int]] = (),
        floor: int | None = None,
        event: Event | None = None,
    ) -> Pending[Committed]:
        """As `commit`, without waiting. Its `ticket` is for the workers to record, if there are any."""
        return self._client.send_commit(self, tokens, states, floor, event)

    def release(self, *, wait: bool = False, event: Event | None = None) -> None:
        """Give everything back. Of what was not committed the cache keeps nothing.

        There is nothing to learn from the answer, and what this client does next comes after it; so it is waited for
        only on request, by whom must know that the pages are free for others. `event`: as in `commit`, behind the last
        use of the lease's pages.
        """
        if wait or self._client.has_workers:
            self._end("release", wait, event, discard=False)
        elif not self.ended:
            self._client.send_release_unheard(self, event, discard=False)

    def release_begin(self, *, event: Event | None = None) -> Pending[None]:
        """As `release`: done once the pages are free, which is when its `ticket`, if there are workers, is recorded."""
        return self._client.send_release(self, event, discard=False)

    def abort(self, *, wait: bool = False, event: Event | None = None) -> None:
        """As `release`, and commits that have not taken effect don't: waiting for these raises Changed."""
        self._end("abort", wait, event, discard=True)

    def abort_begin(self, *, event: Event | None = None) -> Pending[None]:
        """As `release_begin`, and commits that have not taken effect don't."""
        return self._client.send_release(self, event, discard=True)

    def cancel(self) -> None:
        """As `release`, at once and without event or ticket: for a lease whose pages nobody wrote, and no worker knows.

        BadRequest while a commit of it waits to take effect.
        """
        if not self.ended:
            self.cancel_begin().wait()

    def cancel_begin(self) -> Pending[None]:
        """As `cancel`: done once what is being loaded into its pages, if anything, has come to its end."""
        return self._client.send_cancel(self)

    def __enter__(self) -> Lease:
        try:
            self._must_not_wait("release", "with")
        except Forbidden:
            # Nobody can have been told of pages that were not looked at: they need not be lost with the lease.
            if self._view is None and not self.ended:
                with contextlib.suppress(BadRequest):
                    self.cancel()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.release()
        else:
            self._client.abandon(self)

    # -- for its client -------------------------------------------------------------------------------------

    @property
    def connection(self) -> Connection:
        """On which alone commands of this lease may go. Raises why none can, if that is known."""
        self.session.check()
        return self.session

    # -- inside -----------------------------------------------------------------------------------------------

    def _end(self, verb: str, wait: bool, event: Event | None, discard: bool) -> None:
        self._must_not_wait(verb)
        if self.ended:
            return
        if wait:
            self._client.send_release(self, event, discard=discard).wait()
        else:
            self._client.send_release_unheard(self, event, discard=discard)

    def _share(self, kind: str) -> WindowShare | StateShare | None:
        assert self._shares is not None
        if self.session.broken:
            self.session.check()
        return self._shares.of.get(kind)

    def _must_not_wait(self, verb: str, what: str | None = None) -> None:
        """A scheduler that waits for an event before its workers know the ticket waits for ever."""
        if self._client.has_workers:
            raise Forbidden(
                f"`{what or verb}` of a scheduler's lease: its workers must record a ticket first. Use {verb}_begin(), "
                f"have each worker record(pending.ticket), then pending.wait()",
                role=self._client.role,
            )

    def cancelled(self, pending: Pending[None], answer: control.Done) -> None:
        self.ended = True

    def grow(self, tokens: bytes, slots: bytes, shares: tuple[bytes, ...] = ()) -> None:
        """Take in an extend that took effect, as soon as it is heard of: tokens, and the slots of new pages."""
        if tokens:
            self._parts.append(tokens)
        if slots:
            self._table += slots
        if self._shares is not None:
            self._shares.grow(shares)

    def hear(self, answer: control.CommitDone) -> None:
        """A commit took effect, and was not waited for yet."""
        if self._shares is not None:
            self._shares.hear(answer.reply, answer.shares)

    def apply(self, answer: control.CommitDone) -> Committed:
        """Take in what came of a commit, once it was waited for: the canonical pages."""
        if answer.slots:
            table = bytearray(self._table)
            start = answer.first_page * 4
            table[start : start + len(answer.slots)] = answer.slots
            self._table = bytes(table)
        if self._shares is not None:
            self._shares.apply(answer.reply)
        return Committed(answer.committed_tokens, answer.num_duplicates)
