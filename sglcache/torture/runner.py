"""A model runner that is tortured: requests on a daemon, several at a time, every byte of every hit looked at.

A runner of one process is its own hands; one of several is a scheduler, whose hands are a worker for each shard. Both
go the same journeys. What a daemon may answer to an engine (no room, changed, a copy that failed, a session that
ended, a daemon that is gone) is dealt with as an engine would; anything else is a problem, and is told.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket as sockets
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from sglcache.bench.contents import Checked, Contents, WrongContents
from sglcache.client import Client, Lease, Worker
from sglcache.client.connection import Pending
from sglcache.client.lease import Committed
from sglcache.errors import (
    BadRequest,
    Busy,
    Changed,
    DaemonRestarted,
    NoSpace,
    SglcacheError,
    TransferError,
    Unavailable,
)
from sglcache.testing.cards import Port
from sglcache.torture.board import Action, Board, Common, Point, Row, Word
from sglcache.torture.work import Tokens, Work, named

LIVE = 3  # requests of a runner at a time, at most
PAUSE_S = 0.01
LINGER_S = 0.3  # that a process lives on, and writes, when its session is over, at most
SLOW_SHARE, SLOW_S = 16, 0.02  # one run of pages in so many takes so long to write
LATE_SHARE, LATE_S = 0.3, 0.005  # of writes on cards, and by how much at most
ATTACH_PAUSE_S = 0.05
LOST = ("unavailable", "session_ended", "daemon_restarted", "too_slow", "closed")
PR_SET_PDEATHSIG = 1  # linux/prctl.h
POLICIES = (None, "none", "best_effort", "timeout", "wait_complete")
PIN_TTL_S = 0.5
WAITS = (0.0, 0.02, 0.5)  # seconds, for room
SMALL_PAGES, SMALL_PROMPTS, SMALL_BATCH, SMALL_LOOKS = 2, 1024, 64, 0.05


class Seat(NamedTuple):
    """Where a process of a runner is put."""

    board: str
    row: int  # of the board
    socket: str
    rank: int
    name: str
    seed: str  # of this life
    work: tuple[int, int]  # seed, and how many prompts the device pool is for
    budget: int  # operations after which it ends; 0: none
    small: bool  # small requests only, one after the other: to count operations


class Gone(Exception):
    """The daemon, or this session, is no more. `end`: the process should end, too, for its pages to be free."""

    def __init__(self, error: SglcacheError, end: bool = False) -> None:
        super().__init__(error.message)
        self.error = error
        self.end = end


class Desk:
    """A process's own row of the board: where it is, and what is wanted of it."""

    def __init__(self, seat: Seat) -> None:
        self.board = Board(Path(seat.board))
        self.row: Row = self.board.row(seat.row)
        self.row[Word.PID] = os.getpid()
        self.row[Word.PAUSED] = 0
        self.vanish: Callable[[], None] = lambda: None
        self.reach: CardReach | None = None  # where pools are on cards
        self._order = int(self.row[Word.ORDER])  # those before are another life's
        self.at(Point.ATTACH)

    def at(self, point: Point) -> None:
        """It is here now. What is ordered for this point is done."""
        row = self.row
        row[Word.STAMP] = time.monotonic_ns()
        row[Word.POINT] = point
        if row[Word.ORDER] != self._order and row[Word.AT] in (point, Point.ANYWHERE):
            self._order = int(row[Word.ORDER])
            row[Word.FIRED] = self._order
            match row[Word.ACTION]:
                case Action.DIE:
                    os.kill(os.getpid(), signal.SIGKILL)
                case Action.STOP:
                    os.kill(os.getpid(), signal.SIGSTOP)
                case Action.VANISH:
                    self.vanish()

    def count(self, word: Word, count: int = 1) -> None:
        self.row[word] += count

    def streams(self) -> Mapping[int, int]:
        """Where the work is of a client whose pools are on cards; only then it is asked."""
        return self._reached().streams()

    def contents(self, member: Client | Worker) -> Contents:
        """Of what it maps."""
        if all(view.device is None for view in member.pools):
            return Contents(member)
        return Contents(member, self._reached().layers)

    def _reached(self) -> CardReach:
        if self.reach is None:
            self.reach = CardReach()
        return self.reach

    def linger(self, seconds: float) -> None:
        """Be slow: kernels are, where there are any."""
        if self.reach is not None:
            self.reach.spin(seconds)
        else:
            time.sleep(seconds)

    def said(self, what: Common) -> bool:
        return bool(self.board.common[what])


class CardReach(Port):
    """Of a process whose pools are on cards: its kernels are late by random times."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(os.getpid())

    def spin(self, seconds: float, device: int | None = None) -> None:
        """On one card, or on all."""
        for card in self.cards if device is None else [self.cards[device]]:
            super().spin(seconds, card.device)

    def be_late(self) -> None:
        if self.rng.random() < LATE_SHARE:
            self.spin(self.rng.random() * LATE_S, self.rng.randrange(len(self.cards)))


class Hands(Protocol):
    """Who touches the pages of a lease."""

    def look(self, lease: Lease, ids: Tokens) -> Checked:
        """Wait for what is loaded, and check the match. WrongContents, TransferError."""
        ...

    def check(self, lease: Lease, ids: Tokens, upto: int) -> Checked: ...
    def write(self, lease: Lease, ids: Tokens, start: int, stop: int) -> None: ...
    def write_state(self, slot: int, ids: Tokens) -> None: ...
    def record(self, ticket: int | None) -> None:
        """What was done so far is behind this ticket."""
        ...

    def end(self, lease: Lease, how: str, wait: bool) -> None:
        """Release or abort it."""
        ...

    def leave(self) -> None: ...


class OwnHands:
    """Of a runner of one process."""

    def __init__(self, cache: Client, desk: Desk) -> None:
        self.cache = cache
        self.desk = desk
        self.contents = desk.contents(cache)

    def look(self, lease: Lease, ids: Tokens) -> Checked:
        return _look(self.desk, self.cache, self.contents, lease.load, lease, ids)

    def check(self, lease: Lease, ids: Tokens, upto: int) -> Checked:
        return self.contents.check_pages("committed", lease, ids, upto)

    def write(self, lease: Lease, ids: Tokens, start: int, stop: int) -> None:
        _write(self.contents, self.desk, lease, ids, start, stop)

    def write_state(self, slot: int, ids: Tokens) -> None:
        self.contents.write_state(slot, ids)

    def record(self, ticket: int | None) -> None:
        """The command has its event."""

    def end(self, lease: Lease, how: str, wait: bool) -> None:
        (lease.release if how == "release" else lease.abort)(wait=wait)

    def leave(self) -> None:
        """There is nobody else."""


class Told(NamedTuple):
    """Of a lease, what a worker needs to know. `contents.Table`."""

    matched_tokens: int
    reaches: tuple[int, ...]
    slots: npt.NDArray[np.int32]
    window: ToldWindow | None
    mamba: ToldState | None


class ToldWindow(NamedTuple):
    first_page: int
    table: npt.NDArray[np.int32]


class ToldState(NamedTuple):
    source: int | None


def told_of(lease: Lease) -> Told:
    window, mamba = lease.window, lease.mamba
    return Told(
        lease.matched_tokens,
        lease.reaches,
        lease.slots,
        None if window is None else ToldWindow(window.first_page, window.table),
        None if mamba is None else ToldState(mamba.source),
    )


class WorkersHands:
    """Of a scheduler: each job goes to all workers, and is done when all have said so."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self.pipes = pipes

    def look(self, lease: Lease, ids: Tokens) -> Checked:
        checked: Checked = self._all("look", lease.load, told_of(lease), ids)[0]
        return checked

    def check(self, lease: Lease, ids: Tokens, upto: int) -> Checked:
        checked: Checked = self._all("check", told_of(lease), ids, upto)[0]
        return checked

    def write(self, lease: Lease, ids: Tokens, start: int, stop: int) -> None:
        self._all("write", told_of(lease), ids, start, stop)

    def write_state(self, slot: int, ids: Tokens) -> None:
        self._all("write_state", slot, ids)

    def record(self, ticket: int | None) -> None:
        self._all("record", ticket)

    def end(self, lease: Lease, how: str, wait: bool) -> None:
        pending = lease.release_begin() if how == "release" else lease.abort_begin()
        self.record(pending.ticket)
        pending.wait()

    def leave(self) -> None:
        """Their pipes' end tells them."""
        for pipe in self.pipes:
            pipe.close()

    def _all(self, job: str, *arguments: object) -> list[Any]:
        try:
            for pipe in self.pipes:
                pipe.send((job, *arguments))
            answers = [pipe.recv() for pipe in self.pipes]
        except (EOFError, OSError):
            raise Gone(SglcacheError("a worker is gone"), end=True) from None
        for answer in answers:
            if isinstance(answer, tuple) and answer[:1] == ("lost",):
                raise Gone(SglcacheError.from_code(*answer[1:]), end=True)
            if isinstance(answer, tuple) and answer[:1] == ("transfer",):
                raise TransferError(*answer[1:])
            if isinstance(answer, tuple) and answer[:1] == ("wrong",):
                raise WrongContents(*answer[1:])
        return answers


def _look(
    desk: Desk, member: Client | Worker, contents: Contents, load: tuple[int, int] | None, table: Any, ids: Tokens
) -> Checked:
    """Wait for what is loaded, and check the match. On cards some let their streams wait, and read layer by layer."""
    layers = range(member.geometry.load_layers) if load is not None else ()
    on_stream = desk.reach is not None and desk.reach.rng.random() < 0.5
    for layer in layers:
        assert load is not None, "it has layers"
        member.wait_loaded(load, layer, on_stream=on_stream)
    desk.at(Point.LOADED)
    try:
        return contents.check_match(table, ids)
    finally:
        if load is not None and on_stream:
            member.wait_loaded(load)  # of a load that failed the streams have read something else


def _write(contents: Contents, desk: Desk, table: Any, ids: Tokens, start: int, stop: int) -> None:
    """In two halves, so that there is a moment at which a page is half written."""
    middle = (start + stop) // 2
    contents.write(table, ids, start, middle)
    desk.at(Point.HALF_WRITTEN)
    if ids[start] % SLOW_SHARE == 0:
        desk.linger(SLOW_S)
    if desk.reach is not None:
        desk.reach.be_late()
    contents.write(table, ids, middle, stop)
    desk.at(Point.WRITTEN)


class Runner:
    """One life: attached once, it does requests until it is told to pause or stop, or is gone."""

    def __init__(self, seat: Seat, desk: Desk, cache: Client, hands: Hands, rng: random.Random) -> None:
        geometry = cache.geometry
        self.seat = seat
        self.desk = desk
        self.cache = cache
        self.hands = hands
        self.rng = rng
        self.page_size = geometry.page_size
        self.work = Work(
            seat.work[0], page_size=self.page_size, pool_tokens=_room(cache), share=LIVE * seat.work[1] + 1
        )
        self.leases: list[Lease] = []
        self.given: dict[int, int] = {}  # by lease, the tokens up to which it has sent commits
        self.tables: dict[int, Told] = {}  # by lease, as it was when it was last written
        self.pinned = False
        self.small: list[tuple[Tokens, Tokens, Any]] = []

    def run(self) -> None:
        """Until pause or stop. Gone."""
        live: list[Iterator[None]] = []
        desk, rng = self.desk, self.rng
        try:
            while not (desk.said(Common.STOP) or desk.said(Common.PAUSE) or _spent(self.seat, desk)):
                desk.at(Point.IDLE)
                if len(live) < (1 if self.seat.small else LIVE) and (not live or rng.random() < 0.3):
                    live.append(self._small() if self.seat.small else self._request())
                journey = rng.choice(live)
                try:
                    next(journey)
                except StopIteration:
                    live.remove(journey)
            for lease in list(self.leases):
                self._end(lease, "release", wait=True)
        except Gone:
            raise
        except SglcacheError as error:
            thrown_out = error.code == TransferError.code and desk.said(Common.COPIES_MAY_FAIL)
            if error.code not in LOST and not thrown_out:
                raise
            self._write_on()
            raise Gone(error, end=thrown_out) from None

    def _write_on(self) -> None:
        """The session is over, and kernels that were under way are not: they write what the leases had for them.

        Until this process is dead, or has said Bye, nobody else may be given these pages.
        """
        if not isinstance(self.hands, OwnHands) or self.rng.random() < 0.5:
            return
        until = time.monotonic() + LINGER_S * self.rng.random()
        while time.monotonic() < until:
            for lease, table in self.tables.items():
                start = self.given.get(lease, table.matched_tokens) // self.page_size * self.page_size
                stop = len(table.slots) * self.page_size
                self.hands.contents.write(table, np.full(stop, self.rng.getrandbits(32), np.uint32), start, stop)
            self.desk.row[Word.STAMP] = time.monotonic_ns()
            time.sleep(PAUSE_S)

    # -- a request ----------------------------------------------------------------------------------------

    def _request(self) -> Iterator[None]:
        """Yields where another of the runner's requests may go on."""
        rng, desk = self.rng, self.desk
        prompt = self.work.draw(rng)
        ids = named(prompt.tokens, prompt.namespace, self.page_size)
        tokens = prompt.tokens[: prompt.prompt_tokens]
        if rng.random() < 0.15:
            yield from self._look_ahead(tokens, prompt.namespace)
        pending = self._acquire_begin(prompt, tokens)
        desk.at(Point.ACQUIRE_SENT)
        if rng.random() < 0.5:
            yield
        try:
            lease = pending.wait()
        except (NoSpace, Changed, Busy) as error:
            desk.count(Word.NO_SPACE, not isinstance(error, Changed))
            desk.count(Word.OPERATIONS)
            return
        self.leases.append(lease)
        desk.count(Word.OPERATIONS)
        desk.at(Point.ACQUIRED)
        desk.count(Word.REQUESTS)
        desk.count(Word.INPUT_TOKENS, len(tokens))
        desk.count(Word.HOST_TOKENS, lease.host_tokens)
        desk.count(Word.DEVICE_TOKENS, lease.matched_tokens - lease.host_tokens)
        if rng.random() < 0.05 and self._cancel(lease):
            return
        try:
            self._checked(self.hands.look(lease, ids))
        except TransferError:
            self._copy_failed(lease)
            return
        except WrongContents as wrong:
            raise WrongContents(f"{_told(lease, prompt.namespace)}: {wrong}") from None
        yield
        try:
            yield from self._compute(lease, prompt.tokens, ids, len(tokens), prompt.namespace)
        except (NoSpace, Busy):  # preempted: what it has committed it may find again
            desk.count(Word.NO_SPACE)
        for _ in range(rng.choice((0, 0, 1, 5))):
            yield  # a slow reader
        self._end(lease, "abort" if rng.random() < 0.1 else "release", wait=rng.random() < 0.3)

    def _compute(self, lease: Lease, tokens: Tokens, ids: Tokens, prompt_tokens: int, namespace: Any) -> Iterator[None]:
        rng, desk = self.rng, self.desk
        at = lease.matched_tokens
        for stop in self._stops(at, prompt_tokens, len(tokens), lease.reaches[0]):
            known = len(lease.tokens)
            self._make_room(lease, tokens[known:stop], stop)
            start = at // self.page_size * self.page_size  # a page's content is of all its tokens
            self.tables[lease.id] = told_of(lease)
            self.hands.write(lease, ids, start, stop)
            pending, floor = self._commit_begin(lease, ids, at, stop)
            desk.at(Point.COMMIT_SENT)
            self.hands.record(pending.ticket)
            desk.at(Point.RECORDED)
            if rng.random() < 0.5:
                yield
            done = pending.wait()
            desk.count(Word.OPERATIONS)
            desk.at(Point.COMMITTED)
            if floor is None and (done.num_duplicates or rng.random() < 0.2):
                try:
                    self._checked(self.hands.check(lease, ids, done.committed_tokens))
                except WrongContents as wrong:
                    raise WrongContents(f"{_told(lease, namespace)}, after {done}: {wrong}") from None
            at = stop
            yield

    def _acquire_begin(self, prompt: Any, tokens: Tokens) -> Pending[Lease]:
        rng, cache = self.rng, self.cache
        options: dict[str, Any] = {**prompt.namespace, "session_id": prompt.session_id, "tenant": prompt.tenant}
        options["limit"] = len(tokens) - 1
        if rng.random() < 0.2:
            options["priority"] = rng.randrange(-2, 3)
        if rng.random() < 0.2:
            options["wait_s"] = rng.choice(WAITS)
        if rng.random() < 0.3:
            policy = options["prefetch"] = rng.choice(POLICIES)
            if policy == "timeout":
                options["prefetch_timeout_s"] = rng.choice((0.0, 0.01, 0.2))
        if cache.companions or rng.random() < 0.3:
            options["room"] = self.page_size * rng.randint(1, 4)
        elif rng.random() < 0.3:
            options["reserve"] = len(prompt.tokens) - len(tokens)
        if cache.keeps_states:
            options["states"] = 1
        return cache.acquire_begin(tokens, **options)

    def _look_ahead(self, tokens: Tokens, namespace: Any) -> Iterator[None]:
        """What an engine, or a router beside it, does before a request."""
        rng, desk, cache = self.rng, self.desk, self.cache
        desk.at(Point.LOOKING)
        match rng.randrange(4):
            case 0:
                cache.peek(tokens, **namespace)
            case 1:
                cache.prefetch(tokens, policy="timeout", timeout_s=0.05, **namespace)
            case 2:
                cache.pin(tokens, self.seat.name, PIN_TTL_S, **namespace)
                self.pinned = True
            case 3 if self.pinned:
                cache.unpin(self.seat.name)
                self.pinned = False
            case _:
                return
        desk.count(Word.OPERATIONS)
        yield

    def _stops(self, start: int, prompt: int, stop: int, branch: int) -> list[int]:
        """Where the chunks of the prompt, and then of the output, end."""
        rng, size = self.rng, self.page_size
        chunk = size * rng.randint(1, 8)
        stops = {*range(start + chunk, prompt, chunk), prompt, stop, *range(prompt + max(1, size // 2), stop, size)}
        if self.cache.keeps_states:
            interval = self.cache.mamba.interval if self.cache.mamba is not None else size
            stops |= {*range(start - start % interval, prompt, interval), branch, prompt - prompt % size}
        return sorted(each for each in stops if start < each <= stop)

    def _make_room(self, lease: Lease, more: Tokens, stop: int) -> None:
        """Pages for the first `stop` tokens, `more` of them new to the lease, and a slot for a state. NoSpace."""
        states = int(lease.mamba is not None and not len(lease.mamba.slots))
        if len(more) or states or len(lease.slots) * self.page_size < stop:
            if self.rng.random() < 0.5:
                lease.extend(more, upto=stop, states=states, wait_s=self.rng.choice((None, *WAITS)))
            else:
                (error,) = self.cache.extend([(lease, more, 0, stop, states)])
                if error is not None:
                    raise error
            self.desk.count(Word.OPERATIONS)
            self.desk.at(Point.EXTENDED)

    def _commit_begin(self, lease: Lease, ids: Tokens, before: int, stop: int) -> tuple[Pending[Committed], int | None]:
        states: list[tuple[int, int]] = []
        whole = min(stop, len(lease.tokens) - 1) // self.page_size * self.page_size
        if lease.mamba is not None and whole > before:
            slot = int(lease.mamba.slots[0])
            self.hands.write_state(slot, ids[:whole])
            states.append((whole, slot))
        floor = None
        if self.cache.window is not None and self.rng.random() < 0.3:
            floor = max(0, stop - self.cache.window.tokens)
        self.given[lease.id] = stop
        return lease.commit_begin(stop, states=states, floor=floor), floor

    def _checked(self, checked: Checked) -> None:
        pages = (checked.tokens + checked.window_tokens) // self.page_size
        self.desk.count(Word.CHECKED_PAGES, pages)
        self.desk.count(Word.CHECKED_STATES, checked.states)

    def _cancel(self, lease: Lease) -> bool:
        lease.cancel()
        self.leases.remove(lease)
        self.desk.count(Word.OPERATIONS)
        return True

    def _copy_failed(self, lease: Lease) -> None:
        if not self.desk.said(Common.COPIES_MAY_FAIL):
            raise BadRequest("a load failed, and no fault explains it")
        self._end(lease, "abort", wait=True)

    def _end(self, lease: Lease, how: str, wait: bool) -> None:
        self.desk.at(Point.RELEASE_SENT)
        self.leases.remove(lease)
        self.given.pop(lease.id, None)
        self.tables.pop(lease.id, None)
        self.hands.end(lease, how, wait)
        self.desk.count(Word.OPERATIONS)

    # -- many small ones ----------------------------------------------------------------------------------

    def _small(self) -> Iterator[None]:
        """Requests of a page or two, pipelined, whose operations are to be counted; one hit in so many is looked at."""
        assert isinstance(self.hands, OwnHands)
        rng, cache, desk = self.rng, self.cache, self.desk
        share = max(2, cache.geometry.num_pages // (2 * SMALL_PAGES * (self.seat.work[1] + 1)))
        if not self.small:
            self.small = [self._small_prompt() for _ in range(SMALL_PROMPTS)]
        prompts = rng.choices(self.small, k=min(share, SMALL_BATCH))
        states = int(cache.keeps_states)
        begun = [
            cache.acquire_begin(tokens, limit=len(tokens) - 1, states=states, **namespace)
            for tokens, _, namespace in prompts
        ]
        commits: list[Pending[Committed]] = []
        for (_, ids, namespace), pending in zip(prompts, begun, strict=True):
            try:
                lease = pending.wait()
            except NoSpace:
                desk.count(Word.NO_SPACE)
                continue
            self.leases.append(lease)
            if lease.host_tokens or rng.random() < SMALL_LOOKS:
                try:
                    self._checked(self.hands.look(lease, ids))
                except WrongContents as wrong:
                    raise WrongContents(f"{_told(lease, namespace)}: {wrong}") from None
            if lease.matched_tokens < len(ids):
                self.hands.contents.write(lease, ids, lease.matched_tokens, len(ids))
            desk.count(Word.INPUT_TOKENS, len(ids))
            desk.count(Word.HOST_TOKENS, lease.host_tokens)
            desk.count(Word.DEVICE_TOKENS, lease.matched_tokens - lease.host_tokens)
            commits.append(lease.commit_begin())
        for each in commits:
            each.wait()
        desk.count(Word.REQUESTS, len(commits))
        for lease in self.leases:
            lease.release()
        self.leases.clear()
        desk.count(Word.OPERATIONS, len(begun) + 2 * len(commits))
        desk.at(Point.IDLE)
        yield

    def _small_prompt(self) -> tuple[Tokens, Tokens, Any]:
        prompt = self.work.draw(self.rng)
        tokens = prompt.tokens[: self.page_size * self.rng.randint(1, SMALL_PAGES) + 1]
        return tokens, named(tokens, prompt.namespace, self.page_size), prompt.namespace


def _room(cache: Client) -> int:
    """Tokens that prompts can be of, by the smallest of its pools that each token takes part of."""
    return cache.geometry.num_pages * cache.geometry.page_size


def _told(lease: Lease, namespace: Any) -> str:
    return f"{lease!r} of {dict(namespace)}, {lease.host_tokens} tokens from the host"


# -- processes ----------------------------------------------------------------------------------------------


def runner_main(seat: Seat, pipe: Connection) -> None:
    """The life of a runner of one process."""

    def once(desk: Desk, rng: random.Random) -> None:
        with _attached(seat, desk, "runner") as cache:
            while True:
                try:
                    with _losses():
                        Runner(seat, desk, cache, OwnHands(cache, desk), rng).run()
                    return
                except Gone as gone:
                    # As an engine would, that keeps its client over the daemon's lives.
                    if gone.error.code != DaemonRestarted.code or rng.random() < 0.5 or not _joined(cache, desk):
                        raise
                    desk.count(Word.LOST)
                    pipe.send(_told_of_loss(gone, desk))

    _live(seat, pipe, once)


def scheduler_main(seat: Seat, pipe: Connection, workers: list[Connection]) -> None:
    """The life of a runner's scheduler. It ends with the first thing that it can't go on from."""

    def once(desk: Desk, rng: random.Random) -> None:
        hands = WorkersHands(workers)
        try:
            with _attached(seat, desk, "scheduler") as cache:
                hands._all("attach", cache.token)
                Runner(seat, desk, cache, hands, rng).run()
        except Gone as gone:
            raise Gone(gone.error, end=True) from None
        finally:
            hands.leave()

    _live(seat, pipe, once, again=False)


def worker_main(seat: Seat, pipe: Connection, jobs: Connection, shard: int) -> None:
    """The life of one of its workers: as long as the pipe to its scheduler."""

    def once(desk: Desk, rng: random.Random) -> None:
        worker: Worker | None = None
        contents: Contents | None = None
        with contextlib.ExitStack() as stack:
            while True:
                desk.row[Word.STAMP] = time.monotonic_ns()
                if not jobs.poll(0.5):
                    continue
                try:
                    job, *arguments = jobs.recv()
                except (EOFError, OSError):
                    return
                answer: object = None
                try:
                    if job == "attach":
                        worker = stack.enter_context(
                            Worker(arguments[0], shard, seat.socket, name=seat.name, streams=desk.streams)
                        )
                        desk.vanish = _vanishing(worker)
                        contents = desk.contents(worker)
                    else:
                        assert worker is not None, f"{job} comes before the attach"
                        assert contents is not None, f"{job} comes before the attach"
                        answer = _work(desk, worker, contents, job, arguments)
                except TransferError as error:
                    answer = ("transfer", error.message)
                except WrongContents as wrong:
                    answer = ("wrong", str(wrong))
                except SglcacheError as error:
                    answer = ("lost", error.code, error.message, {})
                try:
                    jobs.send(answer)
                except OSError:
                    return

    _live(seat, pipe, once, again=False)


def _work(desk: Desk, worker: Worker, contents: Contents, job: str, arguments: list[Any]) -> object:
    match job:
        case "look":
            load, told, ids = arguments
            return _look(desk, worker, contents, load, told, ids)
        case "check":
            told, ids, upto = arguments
            return contents.check_pages("committed", told, ids, upto)
        case "write":
            _write(contents, desk, *arguments)
        case "write_state":
            slot, ids = arguments
            contents.write_state(slot, ids)
        case "record":
            worker.record(arguments[0])
            desk.at(Point.RECORDED)
    return None


def _live(seat: Seat, pipe: Connection, once: Callable[[Desk, random.Random], None], again: bool = True) -> None:
    """Do it, and with `again` once more after a pause or a loss, until told to stop. Tells of what goes wrong."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's: we are told in another way
    desk, rng = Desk(seat), random.Random(seat.seed)
    try:
        while True:
            try:
                once(desk, rng)
            except Gone as gone:
                desk.count(Word.LOST)
                pipe.send(_told_of_loss(gone, desk))
                if gone.end or rng.random() < 0.5:
                    break
            if not again or desk.said(Common.STOP) or _spent(seat, desk):
                break
            if desk.said(Common.PAUSE):
                desk.row[Word.PAUSED] = 1
                while desk.said(Common.PAUSE) and not desk.said(Common.STOP):
                    desk.row[Word.STAMP] = time.monotonic_ns()
                    time.sleep(PAUSE_S)
                desk.row[Word.PAUSED] = 0
        pipe.send(("over",))
    except BrokenPipeError:
        pass  # the torture is gone
    except WrongContents as wrong:
        pipe.send(("problem", f"wrong bytes: {wrong}"))
    except SglcacheError as error:
        where = Point(int(desk.row[Word.POINT])).name
        pipe.send(("problem", f"error[{error.code}] at {where}: {error.message}\n{traceback.format_exc()}"))
    except Exception:
        pipe.send(("problem", traceback.format_exc()))


def _spent(seat: Seat, desk: Desk) -> bool:
    return bool(seat.budget) and int(desk.row[Word.OPERATIONS]) >= seat.budget


@contextlib.contextmanager
def _losses() -> Iterator[None]:
    """What says that the daemon or the session is no more is Gone."""
    try:
        yield
    except SglcacheError as error:
        if error.code not in LOST:
            raise
        raise Gone(error) from None


@contextlib.contextmanager
def _attached(seat: Seat, desk: Desk, role: str) -> Iterator[Client]:
    """Attached for as long as the block lasts, once a daemon is there. Gone: it is so no more."""
    while True:
        desk.row[Word.POINT] = Point.ATTACH
        try:
            cache = Client(seat.socket, role=role, name=seat.name, streams=desk.streams)
            break
        except SglcacheError as error:
            if error.code not in LOST:
                raise
        if desk.said(Common.STOP) or desk.said(Common.PAUSE):
            raise Gone(SglcacheError("there was no daemon to attach to"), end=False)
        time.sleep(ATTACH_PAUSE_S)
    desk.vanish = _vanishing(cache)
    desk.at(Point.ATTACH)
    try:
        with _losses():
            yield cache
    except Gone as gone:
        epoch = cache.epoch
        cache.close()
        # What ended us while the daemon lives on (we were thrown out) keeps our pages fenced for as long as we live.
        with contextlib.suppress(SglcacheError), Client(seat.socket, role="observer", name=seat.name) as look:
            gone.end = gone.end or look.epoch == epoch
        raise
    cache.close()


def _told_of_loss(gone: Gone, desk: Desk) -> tuple[str, ...]:
    return ("lost", gone.error.code, gone.error.message, Point(int(desk.row[Word.POINT])).name)


def _joined(cache: Client, desk: Desk) -> bool:
    """The daemon's next life; False: it is not to be had for now, or this is the same one, from which we vanished."""
    epoch = cache.epoch
    while not (desk.said(Common.STOP) or desk.said(Common.PAUSE)):
        with contextlib.suppress(Unavailable):
            cache.reattach(ATTACH_PAUSE_S)
            desk.at(Point.ATTACH)
            return cache.epoch != epoch
    return False


def _vanishing(member: Client | Worker) -> Callable[[], None]:
    """What ends its connection without a word, as a network or a bug would."""

    def vanish() -> None:
        with contextlib.suppress(OSError, SglcacheError):
            # Of what `reattach` has joined, if it has.
            twin = sockets.socket(fileno=os.dup(member._connection.fileno()))
            twin.shutdown(sockets.SHUT_RDWR)
            twin.close()

    return vanish
