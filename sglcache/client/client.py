"""A model runner's client, blocking: acquire pages, write KV into them in place, commit, release.

    with sglcache.Client() as cache:
        with cache.acquire(tokens) as lease:
            lease.wait_loaded()
            ...  # compute tokens[lease.matched_tokens:], writing cache.pool.k[layer][lease.slots]
            lease.commit()

A runner of one process is a `Client` (role "runner"). One of several is a `Client(role="scheduler")`, which has no
pool, and a `Worker(token, shard)` in each process that touches pages: the scheduler hands them the tickets of its
commits and releases, and each says `record(ticket)` once its work for it is enqueued.

Every verb that has an answer worth waiting for has a second form, `peek_begin`, `acquire_begin`, `commit_begin`, ...,
which sends and returns a `Pending`: `wait` for it when it suits you, in any order. A loop that must not block looks
with `Client.poll`, and may sleep on `Client.fileno` together with its other work.

Every object may be used from several threads; it does one thing at a time, and who waits keeps the others out. In a
forked child it is closed: the child must attach anew. Torch is loaded when a tensor of `pool` is first asked for.
"""

from __future__ import annotations

import contextlib
import difflib
import operator
import os
import reprlib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias, TypedDict, TypeVar, Unpack

import msgspec
import numpy as np
import numpy.typing as npt

from sglcache import paths
from sglcache.client.cards import Cards, Streams, on_cards, told_of
from sglcache.client.companions import StatePool, WindowPool
from sglcache.client.connection import UNFIT, Connection, Pending, Request
from sglcache.client.lease import Committed, Lease
from sglcache.client.shares import KINDS, StateShare, WindowShare
from sglcache.core.key import pack
from sglcache.errors import (
    BadRequest,
    Changed,
    ClosedError,
    ConfigError,
    ProtocolError,
    SglcacheError,
    TransferError,
    Unavailable,
    with_article,
)
from sglcache.memory.geometry import FULL, WINDOW, Geometry, StateGeometry
from sglcache.memory.rings import EventRing, LoadRingReader
from sglcache.units import Tier
from sglcache.wire import control

if TYPE_CHECKING:
    from sglcache.memory.views import Bytes, KVViews, StateViews

NUM_EVENTS = 4096  # of a member's ring: as many of its commits and releases may be held back at a time

MAX_SPIN_US = 1e6
REATTACH_S = 60.0  # a rank that died often is started again after 30 s at most (supervisor.Timing), and has to start
FIRST_PAUSE_S, MAX_PAUSE_S = 0.01, 0.25  # between two tries to find the daemon's next life

T = TypeVar("T")
V = TypeVar("V")
Tokens: TypeAlias = Sequence[int] | npt.NDArray[Any] | bytes
"""Token ids: any integers that fit uint32, or bytes that are packed uint32 little-endian already."""


class Peeked(NamedTuple):
    """How far a match would reach."""

    device_tokens: int
    matched_tokens: int  # device and host together
    reaches: tuple[int, ...]  # as `Lease.reaches`


class Event(NamedTuple):
    """A moment in a member's work, by `record`: whoever waits for it knows that what was enqueued before is done."""

    event: int
    generation: int  # 0: of a member that touches no pages
    seen: int = 0  # the commits whose answers had been read: only uses of the pages they replaced lie before this


class Extension(NamedTuple):
    """What one lease of a batch is to get; as in `Lease.extend`."""

    lease: Lease
    tokens: Tokens = ()
    reserve: int = 0
    upto: int | None = None
    states: int = 0


class NamespaceOptions(TypedDict, total=False):
    """What keeps requests apart that must not share pages."""

    lora: str | None
    extra_key: str | None
    cache_salt: str | None


class AcquireOptions(NamespaceOptions, total=False):
    """Of an acquire, all optional."""

    limit: int | None
    """Match at most so many tokens."""
    exact: int | None
    """Match so many, whole pages, or raise Changed with `matched_tokens`, what it would be now, and change nothing."""
    reserve: int
    """Pages for so many tokens beyond the last."""
    room: int | None
    """Pages for the match and so many tokens beyond it only; `Lease.extend(upto=...)` gets more."""
    session_id: str | None
    """Whose request this is, for the event stream."""
    tenant: str | None
    """Who is charged with the pages, where the daemon has tenants; None, or none of these: its tenant `default`."""
    priority: int
    """Where the daemon evicts by priority: what a request of a higher one has used is kept longer. Else nothing."""
    prefetch: str | None
    """What to do about pages that only the third tier has: none; best_effort (have them fetched for later requests, and
    go on); timeout (wait for them so long); wait_complete. None: as the daemon is configured."""
    prefetch_timeout_s: float | None
    """timeout: how long, instead of as the daemon is configured. Another policy named with it is refused."""
    states: int
    """So many slots of the lease's own for states, where the model has any: `Lease.mamba.slots`."""
    wait_s: float | None
    """How long to wait for room that others hold, instead of NoSpace at once. None: as the daemon is configured."""
    request_id: str | None
    """What you call this request: `sglcache explain --request` finds it by that."""


class Prefetched(NamedTuple):
    """What a prefetch led to, in tokens."""

    matched_tokens: int  # that a match would find now, in any tier above the third
    fetched_tokens: int  # of them, those that were fetched meanwhile


class Dump(NamedTuple):
    """Every block of a tier that the stream tells of, after the batch numbered `seq`."""

    tier: Tier
    seq: int
    hashes: list[int]  # as on the stream


class Member:
    """What a client and a worker have in common: a connection, and pools where the role has them."""

    def __init__(
        self,
        socket: str | os.PathLike[str] | None,
        rank: tuple[int, int] | None,
        dp_size: int | None,
        hello: control.Hello,
        ring: EventRing | None,
        spin_us: float | None = None,
        streams: Streams | None = None,
    ) -> None:
        self._ring = ring
        self._cards: Cards | None = None  # None: the pools are shared memory
        self._spin_us = spin_us
        self._hello = hello
        self._attaching = threading.Lock()
        self._loads: LoadRingReader | None = None
        self._pools: dict[str, list[KVViews] | list[StateViews]] = {}  # by resource
        try:
            offset = _offset(rank, dp_size)
            path = Path(socket) if socket is not None else paths.socket_path(offset)
            self._connection = self._connect(path, hello)
        except BaseException:
            if ring is not None:
                ring.close()
            raise
        welcome = self._welcome = self._connection.welcome
        self.socket = path
        self.role = hello.role
        self.epoch = welcome.epoch
        """The life of the daemon: another one is another cache. `reattach` changes it."""
        self.version = welcome.version
        self.rank = (welcome.dp_rank, welcome.pp_rank)
        """(dp_rank, pp_rank): whose pages these are."""
        self.companions = tuple(handle.kind for handle in welcome.companions)
        """The kinds of cached state beside full KV, in their order."""
        try:
            _check_rank(welcome, rank, dp_size, path)
            if unknown := set(self.companions) - set(KINDS):
                raise ConfigError(f"the daemon keeps {', '.join(unknown)}, which this client does not know; update it")
            self.geometry = Geometry.from_wire(welcome.geometry)
            self.window: WindowPool | None = None
            """The layers with a sliding window; None: the model has none."""
            self.mamba: StatePool | None = None
            """The layers that keep a state; None: the model has none."""
            for each in welcome.companions:
                if isinstance(each.geometry, control.Geometry):
                    self.window = WindowPool(self, each, Geometry.from_wire(each.geometry))
                else:
                    self.mamba = StatePool(self, each, StateGeometry.from_wire(each.geometry))
            self._loads = self._load_ring(self._connection)
            self._cards = self._on_cards(streams)
        except BaseException:
            self._let_go("this client never stood")
            raise
        child = weakref.WeakMethod(self._in_child)
        # There is no taking it back; a closed client leaves a few bytes behind.
        os.register_at_fork(after_in_child=lambda: (method := child()) and method())

    def _connect(self, path: Path, hello: control.Hello) -> Connection:
        ring = self._ring
        fds = [ring.fd, ring.doorbell] if ring is not None else []
        return Connection(path, hello, fds, spin_us=self._spin_us)

    def _load_ring(self, connection: Connection) -> LoadRingReader | None:
        """The daemon's load ring, of whose descriptors it takes hold. ConfigError: they are missing."""
        if self._ring is None:
            return None
        welcome, fds = connection.welcome, connection.fds
        at = sum(not isinstance(pool, control.CudaIpcHandle) for pool in told_of(welcome))
        if len(fds) < at + 2:
            raise ConfigError(f"the daemon sent {len(fds)} descriptors; update the older side")
        fd, doorbell = fds.pop(at), fds.pop(at)
        try:
            return LoadRingReader(fd, doorbell, welcome.num_load_slots, self.geometry.load_layers)
        except BaseException:
            os.close(doorbell)
            raise
        finally:
            os.close(fd)

    def _on_cards(self, streams: Streams | None) -> Cards | None:
        handles = on_cards(self._welcome)
        if not handles or self._ring is None or self._loads is None:
            return None
        return Cards(handles, self._ring, self._loads, streams)

    @property
    def pools(self) -> list[KVViews]:
        """The device pools that this member maps: a runner all shards, a worker its own.

        DaemonRestarted once the daemon's life is over, until `reattach`; from then on they are the next life's. Tensors
        and arrays that were taken before stay the old memory, which is nobody else's: harmless, and of no use.
        ClosedError once closed.
        """
        return self.mapped_tokens(FULL, self.geometry, self._welcome.pools)

    @property
    def pool(self) -> KVViews:
        """The one device pool that this member maps: `pool.k[layer][slots]` is where KV is read and written."""
        return self.only(self.pools, "pools")

    def mapped_tokens(self, resource: str, form: Geometry, handles: list[control.Pool]) -> list[KVViews]:
        """A resource's pools, mapped when they are asked for first."""
        from sglcache.memory.views import KVViews

        return self._mapped(resource, lambda memory, shard: KVViews(memory, form, shard), handles)

    def mapped_states(self, resource: str, form: StateGeometry, handles: list[control.Pool]) -> list[StateViews]:
        """As `mapped_tokens`."""
        from sglcache.memory.views import StateViews

        return self._mapped(resource, lambda memory, shard: StateViews(memory, form, shard), handles)

    def only(self, pools: list[V], name: str) -> V:
        """The one pool of this member. BadRequest: it maps none, or several."""
        if len(pools) != 1:
            raise BadRequest(
                f"{with_article(self.role)} of {self.geometry.num_shards} shards maps {len(pools)} pools; use `{name}`"
            )
        return pools[0]

    def ping(self) -> None:
        """A round trip."""
        with self._connection.lock:
            self._call(control.Ping(self._connection.number()))

    def wait_loaded(self, load: tuple[int, int], layer: int | None = None, *, on_stream: bool = False) -> None:
        """Block until a lease's `load` is readable, in one layer or in all.

        Layers are those of `pool`; what `window` and `mamba` have of the load is there before the first of them. Where
        there are none, wait for all. TransferError: the load failed. DaemonRestarted: the daemon's life is over; a
        `load` of that life means nothing to the next, and must not be waited for there.

        `on_stream`, of pools on cards: have the streams wait for it instead, before what is put into them next, and
        return at once. A load that failed, or whose daemon is gone, lets them go on with what isn't there: so say
        `wait_loaded` without it before what was computed is used; a commit is refused then.
        """
        if self._loads is None:
            raise BadRequest(f"{with_article(self.role)} maps no pages that could be loaded; its workers wait")
        slot, generation = load
        loads, connection = self._loads, self._connection
        layers = range(self.geometry.load_layers) if layer is None else range(layer, layer + 1)
        if on_stream:
            if self._cards is None:
                raise BadRequest("on_stream: the pools are shared memory, which no stream reads", argument="on_stream")
            with connection.lock:
                self._cards.wait_loaded(load, layers, connection.socket)
            return
        try:
            for each in layers:
                if loads.done(slot, generation, each):
                    continue
                with connection.lock:
                    while not loads.wait(slot, generation, each, connection.fileno()):
                        connection.pull()
        except TransferError:
            with connection.lock:
                connection.pull()  # says so if it failed since the daemon is gone
            raise

    def close(self) -> None:
        """Say goodbye, and let go of the connection and the mappings. What was not committed is gone. Idempotent."""
        connection = self._connection
        with connection.lock:
            if connection.closed:
                return
            # The daemon may be gone, or the session ended: then there is nobody to tell.
            with contextlib.suppress(SglcacheError):
                self._call(control.Bye(connection.number(), *self._record()))
            self._let_go("this client is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._connection.closed else ""
        return f"{type(self).__name__}({self.role} at {self.socket}{state})"

    # -- inside -----------------------------------------------------------------------------------------

    def _mapped(self, resource: str, view: Callable[[int | Bytes, int], Any], handles: list[control.Pool]) -> list[Any]:
        connection = self._connection
        with connection.lock:
            connection.pull()  # raises if it is at its end, though nobody has noticed yet
            if resource not in self._pools:
                self._pools[resource] = [view(self._memory(handle), handle.shard) for handle in handles]
            return self._pools[resource]

    def _memory(self, handle: control.Pool) -> int | Bytes:
        """Where a pool is: its memfd, which stays the connection's, or a card's memory, mapped."""
        fds, fd = self._connection.fds, None
        if not isinstance(handle, control.CudaIpcHandle):
            if not 0 <= handle.fd_index < len(fds):
                raise ProtocolError(f"a pool is to be descriptor {handle.fd_index} of {len(fds)}")
            fd = fds[handle.fd_index]
            if isinstance(handle, control.PoolHandle):
                return fd
        if self._cards is None:
            raise ProtocolError(f"{with_article(self.role)} is told of a pool on a card, and of no rings")
        return self._cards.open(handle, fd)

    def _reattach(self, hello: control.Hello, timeout_s: float) -> bool:
        """Join the daemon's next life, as `hello` says; False: the session stands, and nothing is done.

        A session that ended while the daemon lives on is left first, so that its pages are free.
        """
        with self._attaching:
            old = self._connection
            try:
                self.ping()
                return False
            except ClosedError:
                raise
            except SglcacheError as exc:
                why = exc
            self.drop_pools()  # of a card: the next life may have no other room
            connection = self._next_life(hello, timeout_s)
            try:
                _check_alike(self._welcome, connection.welcome, self.socket)
                if self._cards is not None:
                    self._cards.check(on_cards(connection.welcome))
                loads = self._load_ring(connection)
            except BaseException:
                connection.close()
                raise
            with old.lock:
                if old.closed:  # meanwhile, by another thread
                    connection.close()
                    old.check()
                with contextlib.suppress(SglcacheError):
                    self._call(control.Bye(old.number(), *self._record()))
                old.retire(why)
                self._drop_mappings()
                self._connection, self._loads = connection, loads
                self._joined(connection.welcome)
                if self._cards is not None and loads is not None:
                    self._cards.join(on_cards(connection.welcome), loads)
        return True

    def _next_life(self, hello: control.Hello, timeout_s: float) -> Connection:
        deadline, pause = time.monotonic() + timeout_s, FIRST_PAUSE_S
        while True:
            try:
                return self._connect(self.socket, hello)
            except Unavailable as exc:
                if time.monotonic() + pause > deadline:
                    raise Unavailable(f"no next life within {timeout_s:g} s: {exc.message}") from None
            time.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_S)

    def _joined(self, welcome: control.Welcome) -> None:
        """Another connection is ours from now on. With the lock of the one before held."""
        self._welcome = welcome
        self.epoch, self.version = welcome.epoch, welcome.version
        self.geometry = Geometry.from_wire(welcome.geometry)
        for handle in welcome.companions:
            companion = self.window if handle.kind == WINDOW else self.mamba
            assert companion is not None, "it was checked"
            companion.rebind(handle)

    def _record(self) -> tuple[int, int]:
        """An event behind everything written so far; (0, 0) of a member that touches nothing."""
        if self._cards is not None:
            return self._cards.record()
        return (0, 0) if self._ring is None else self._ring.record_unrung()

    def _call(self, command: Request) -> dict[str, Any]:
        return self._ask(command, lambda facts: facts)

    def _ask(self, command: Request, take: Callable[[dict[str, Any]], T]) -> T:
        """Send, wait, and make of the answer's facts what `take` does. With the lock held."""
        connection = self._connection
        connection.send(command)
        answer = connection.wait(command.request)
        if not isinstance(answer, control.Done):
            raise connection.unfit(answer)
        try:
            return take(answer.facts)
        except UNFIT as exc:
            raise connection.unfit(answer) from exc

    def _let_go(self, why: str) -> None:
        self._connection.close(why)
        self._drop_mappings()
        if self._cards is not None:
            self._cards.close()
            self._cards = None
        if self._ring is not None:
            self._ring.close()

    def drop_pools(self) -> None:
        """Let go of the pools: their memory goes with the last tensor or array of yours. They are mapped anew when they
        are asked for."""
        with self._connection.lock:
            with contextlib.suppress(SglcacheError):
                self._connection.pull()  # it may be at its end, and nobody has noticed
            self._close_pools()
            if self._connection.broken:  # nothing is mapped by its descriptors any more, and they keep a card's memory
                self._connection.let_go_of_fds()

    def _close_pools(self) -> None:
        for pools in self._pools.values():
            for pool in pools:
                pool.close()
        self._pools = {}

    def _drop_mappings(self) -> None:
        if self._cards is not None:
            self._cards.leave()
        if self._loads is not None:
            self._loads.close()
        self._close_pools()

    def _in_child(self) -> None:
        """After a fork: the parent has all this, and the thread that may hold the lock isn't here."""
        self._connection.lock = threading.Lock()
        self._cards = None  # CUDA is the parent's alone
        if not self._connection.closed:
            self._let_go("this client belongs to the parent of this forked process; attach anew")


class Client(Member):
    """A runner, a scheduler of workers, an observer, which only looks, or an admin, which may also clear, announce and
    evict. Neither of the last two has a session, or pages."""

    def __init__(
        self,
        socket: str | os.PathLike[str] | None = None,
        rank: tuple[int, int] | None = None,
        role: str = "runner",
        name: str | None = None,
        *,
        dp_size: int | None = None,
        ring: EventRing | None = None,
        spin_us: float | None = None,
        streams: Streams | None = None,
    ) -> None:
        """Attach to the daemon at `socket`, by default where `sglcache serve` of this user puts it.

        `rank` is (dp_rank, pp_rank) and picks the socket where none is named, None the first; of a second or later
        stage (pp_rank) the daemon's `dp_size` is needed for that, unless it is 1. `name` is for people. `ring` brings
        a runner's own events. Unavailable: there is no daemon. BadRequest: it is another rank than `rank`, or one of
        another dp_size.

        `spin_us`: how many microseconds to look for an answer, holding a processor, before sleeping for it: to be woken
        takes longer than most answers do. 0: never. None: 50 where this process may use four processors or more, else
        never. Where looking does not pay it is soon left off, and tried again later.

        `streams`, of pools on cards: by a card's number in this process the stream (a CUstream, as an integer) whose
        work this client's events are behind; by default torch's current one.
        """
        name = _name(name)
        spin_us = None if spin_us is None else _spin(spin_us)
        if role == "runner":
            ring = ring or EventRing(NUM_EVENTS)
        elif role == "worker":
            raise BadRequest("a worker joins a scheduler's session: use Worker(token, shard)")
        num_events = ring.num_events if ring is not None else 0
        hello = control.Hello(control.PROTOCOL, name, role, num_events=num_events)
        super().__init__(socket, rank, dp_size, hello, ring, spin_us, streams)
        self.token = self._welcome.session
        """What a scheduler's workers attach with."""
        self.has_workers = role == "scheduler"
        self._ticket = 0
        self._heard = 0  # the highest number of a CommitDone that has come
        self._unread: dict[int, tuple[Pending[Committed], Lease]] = {}  # by number, what may not have been waited for

    @property
    def keeps_states(self) -> bool:
        """Whether there are layers with states here: leases may have some of their own."""
        return any(KINDS[kind].by_end for kind in self.companions)

    def reattach(self, timeout_s: float = REATTACH_S) -> None:
        """Attach to the daemon's next life, after DaemonRestarted; wait at most so long for it to serve.

        What is new from then on: `epoch`, `token` (workers join again with it, `Worker.reattach`), the session, and the
        memory of `pool`, `window` and `mamba`; on a card it may find room only once your tensors of theirs are gone.
        What was: every lease and whatever was begun, which raise what they
        raised before; take `pool` anew, and acquire anew. The cache has at most what outlived the daemon.

        Where the session ended though the daemon lives (SessionEnded: a worker died, an operator evicted it) it says
        goodbye to it and attaches likewise, and where nothing is wrong it does nothing, so that of several threads each
        may call it. Unavailable: nobody serves yet, try again. Changed: the next life serves another model or pools of
        another form; close this client. Nothing has changed then.
        """
        if _seconds("timeout_s", timeout_s) is None:
            raise BadRequest("timeout_s=None: seconds are needed", argument="timeout_s")
        self._reattach(self._hello, timeout_s)

    def _joined(self, welcome: control.Welcome) -> None:
        super()._joined(welcome)
        self.token = welcome.session
        self._ticket = self._heard = 0
        self._unread = {}

    # -- a runner's journey -----------------------------------------------------------------------------

    def acquire(self, tokens: Tokens, **options: Unpack[AcquireOptions]) -> Lease:
        """Find what is cached of `tokens`, pin it, and get pages for the rest; see `AcquireOptions`.

        NoSpace: leases and pins leave too few pages, and did for `wait_s`. Busy: too many wait. Changed: not `exact` so
        many match. Nothing was changed then.
        """
        packed = pack(tokens)
        checked = self._acquire_options(options) if options else _NO_OPTIONS
        connection = self._connection
        with connection.lock:
            request = connection.number()
            try:
                answer = connection.ask(control.Acquire(request, packed, **checked))
            except SglcacheError:
                raise
            except BaseException:  # of an interrupted wait the lease is not lost: `poll` has it
                connection.expect(Pending(connection, request, partial(Lease, self, connection, packed)))
                raise
            try:
                return Lease(self, connection, packed, answer)  # type: ignore[arg-type]
            except UNFIT as exc:
                raise connection.unfit(answer) from exc

    def acquire_begin(self, tokens: Tokens, **options: Unpack[AcquireOptions]) -> Pending[Lease]:
        """As `acquire`, without waiting. Several are served in their order, and may be answered in another."""
        packed = pack(tokens)
        checked = self._acquire_options(options)
        connection = self._connection
        with connection.lock:
            request = connection.number()
            pending = Pending(connection, request, partial(Lease, self, connection, packed))
            return connection.begin(control.Acquire(request, packed, **checked), pending)

    def extend(
        self, batch: Iterable[Extension | tuple[Any, ...]], *, wait_s: float | None = None
    ) -> list[SglcacheError | None]:
        """Extend many leases by one command, as for a step of a batch: for each, in order, None or why it was not.

        Each for itself: where there is no room for one, NoSpace is its result, it is as it was, and all others have
        what they asked for, in the order of the batch as far as the room goes. So the step goes on without those alone,
        and what is preempted for them is the caller's choice. `wait_s`: so long they wait, together, for room for all;
        then those are refused for which there is none. None: as the daemon is configured.
        """
        return self.extend_begin(batch, wait_s=wait_s).wait()

    def extend_begin(
        self, batch: Iterable[Extension | tuple[Any, ...]], *, wait_s: float | None = None
    ) -> Pending[list[SglcacheError | None]]:
        """As `extend`, without waiting."""
        return self._send_extend([_extension(each) for each in batch], _errors, wait_s)

    def record(self) -> Event:
        """This moment, to be named by a later command: what was written so far is behind it, and nothing after.

        Of a scheduler it says what had been read of the answers, while its workers record the rest.
        """
        connection = self._connection
        with connection.lock:
            connection.check()
            return self._now()

    # -- answers, without waiting -------------------------------------------------------------------------

    def poll(self) -> list[Pending[Any]]:
        """Those of what was begun that were answered since the last poll and not waited for, in order. Never waits.

        Unavailable, or why the daemon threw this client out: no answer will come any more.
        """
        self._connection.look()
        return self._connection.news()

    def fileno(self) -> int:
        """What to select on: readable when answers may have come. Poll until it says nothing, then sleep on this.

        Without a poll before, what other calls have found on their way may have been read already.
        """
        return self._connection.fileno()

    # -- looking, pinning, clearing ---------------------------------------------------------------------

    def peek(self, tokens: Tokens, **namespace: Unpack[NamespaceOptions]) -> Peeked:
        """How far a match would reach, without changing anything, not even the order of eviction."""
        return self.peek_begin(tokens, **namespace).wait()

    def peek_begin(self, tokens: Tokens, **namespace: Unpack[NamespaceOptions]) -> Pending[Peeked]:
        """As `peek`, without waiting."""
        packed = pack(tokens)
        _check_names("peek", namespace, _NAMESPACE)
        checked = _checked(namespace)
        connection = self._connection
        with connection.lock:
            request = connection.number()
            return connection.begin(control.Peek(request, packed, **checked), Pending(connection, request, _peeked))

    def prefetch(
        self,
        tokens: Tokens,
        *,
        policy: str | None = "wait_complete",
        timeout_s: float | None = None,
        tenant: str | None = None,
        **namespace: Unpack[NamespaceOptions],
    ) -> Prefetched:
        """Have what only the third tier has of a sequence brought to the host, ahead of the request that will need it.

        Answered when it is there, or will not be; with policy timeout (after `timeout_s`) or best_effort before that,
        too, and then what is under way goes on. `policy` None: as the daemon is configured. All as an acquire's.
        """
        return self.prefetch_begin(tokens, policy=policy, timeout_s=timeout_s, tenant=tenant, **namespace).wait()

    def prefetch_begin(
        self,
        tokens: Tokens,
        *,
        policy: str | None = "wait_complete",
        timeout_s: float | None = None,
        tenant: str | None = None,
        **namespace: Unpack[NamespaceOptions],
    ) -> Pending[Prefetched]:
        """As `prefetch`, without waiting."""
        packed = pack(tokens)
        _check_names("prefetch", namespace, (*_NAMESPACE, "policy", "timeout_s", "tenant"))
        checked = _checked({**namespace, "policy": policy, "timeout_s": timeout_s, "tenant": tenant})
        _check_timeout(checked, "policy", "timeout_s")
        connection = self._connection
        with connection.lock:
            request = connection.number()
            pending = Pending(connection, request, _prefetched)
            return connection.begin(control.Prefetch(request, packed, **checked), pending)

    def pin(
        self,
        tokens: Tokens,
        owner: str,
        ttl_s: float,
        *,
        lora: str | None = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> int:
        """Keep what is cached of `tokens` from eviction for `ttl_s` seconds, in the name of `owner`; its tokens."""
        packed = pack(tokens)
        _checked({"owner": owner, "lora": lora, "extra_key": extra_key, "cache_salt": cache_salt})
        seconds = _seconds("ttl_s", ttl_s)
        if not seconds:
            raise BadRequest(f"ttl_s={ttl_s}: more than 0 and at most {control.MAX_TTL_S:g} seconds", argument="ttl_s")
        with self._connection.lock:
            command = control.Pin(self._connection.number(), packed, owner, seconds, lora, extra_key, cache_salt)
            return self._ask(command, lambda facts: int(facts["pinned_tokens"]))

    def unpin(self, owner: str) -> int:
        """Let go of all that this client pinned in the name of `owner`; its pages. Of nothing is no error."""
        _checked({"owner": owner})
        with self._connection.lock:
            command = control.Unpin(self._connection.number(), owner)
            return self._ask(command, lambda facts: int(facts["pages"]))

    def clear(self, tier: Tier | str | None = None) -> dict[str, int]:
        """Drop every cached page of a tier, or of all; the pages by tier. Busy: something live holds it."""
        with self._connection.lock:
            command = control.Clear(self._connection.number(), _tier(tier))
            return self._ask(command, lambda facts: dict(facts["pages"]))

    def status(self, prove: bool = False) -> dict[str, Any]:
        """What the daemon holds, for whom. With `prove`, `violations` is what is wrong with its books."""
        with self._connection.lock:
            return self._call(control.Status(self._connection.number(), prove))

    def dump(self, tier: Tier | str) -> Dump:
        """Every block hash in a tier. Changed: the cache was too busy for that; try again."""
        with self._connection.lock:
            return self._ask(control.Dump(self._connection.number(), _tier(tier) or ""), _dump)

    def digest(self) -> dict[str, Any]:
        """What who has read every batch up to number `seq` must have: `tiers` is, by tier, the number of blocks and the
        sum of their hashes mod 2**64. While `announcing`, who follows the announcement has only part of it.
        """
        with self._connection.lock:
            return self._call(control.Digest(self._connection.number()))

    def reuse(self) -> dict[str, Any]:
        """What the tiers hit, and what more of one would add: see docs/plan.md. BadRequest: nothing is followed."""
        with self._connection.lock:
            return self._call(control.Reuse(self._connection.number()))

    def explain(
        self, tokens: Tokens, *, limit: int | None = None, **namespace: Unpack[NamespaceOptions]
    ) -> dict[str, Any]:
        """Why so much of `tokens` would be a hit now, and no more: facts, and `words` of them. See docs/explain.md."""
        packed = pack(tokens)
        _check_names("explain", {**namespace, "limit": limit}, (*_NAMESPACE, "limit"))
        checked = _checked({**namespace, "limit": limit})
        with self._connection.lock:
            return self._call(control.Explain(self._connection.number(), packed, **checked))

    def explain_request(self, request_id: str) -> dict[str, Any]:
        """The same of an acquire of before, as of then: by its `request_id`, or by "#" and the daemon's number of it.

        BadRequest: it is not remembered (any more)."""
        checked = _checked({"name": request_id})
        with self._connection.lock:
            return self._call(control.Explain(self._connection.number(), **checked))

    def last_requests(self, count: int = 20) -> list[dict[str, Any]]:
        """The last acquires, the newest first. BadRequest: none are remembered."""
        checked = _checked({"last": count})
        with self._connection.lock:
            return list(self._call(control.Explain(self._connection.number(), **checked))["requests"])

    def check(self, name: str) -> dict[str, Any]:
        """Have the live rank prove one of `control.CHECKS`: see `sglcache.client.fsck`. BadRequest: there is none."""
        with self._connection.lock:
            return self._call(control.Check(self._connection.number(), name))

    def announce(self) -> None:
        """Have all that is cached told anew on the stream: AllBlocksCleared, then every block, under fresh numbers.

        For subscribers that can't ask for a replay. BadRequest: events are off.
        """
        with self._connection.lock:
            self._call(control.Announce(self._connection.number()))

    def evict_session(self, session: int, *, kill: bool = False) -> dict[str, Any]:
        """End another's session, as a member's death would (an admin's alone). What it holds stays fenced while a
        process lives that touches pages, and has not said goodbye; `kill` ends these.

        `pages`: what is fenced; `must_end`: whose end it waits for; `killed`: pids. UnknownSession: there is none such.
        """
        if isinstance(session, bool) or not isinstance(session, int) or not 0 <= session < 1 << 63:
            raise BadRequest(f"session={_shown(session)}: the number that a status has of it", argument="session")
        with self._connection.lock:
            return self._call(control.EvictSession(self._connection.number(), session, kill))

    def set_tenant(
        self,
        tenant: str,
        *,
        device_floor: int | str | None = None,
        device_ceiling: int | str | None = None,
        host_floor: int | str | None = None,
        host_ceiling: int | str | None = None,
    ) -> list[dict[str, Any]]:
        """Change limits of a tenant of this rank, or make it (an admin's alone): tokens, or a share of the tier, "25%";
        a ceiling may be "none"; None stays as it is. What it has by then, in pages, by tier.

        What is above a lowered ceiling is evicted, and what is in use once it is let go of. BadRequest: the floors are
        more than the tier has, or a ceiling is below its floor; nothing was changed.
        """
        limits = {
            "device_floor": device_floor,
            "device_ceiling": device_ceiling,
            "host_floor": host_floor,
            "host_ceiling": host_ceiling,
        }
        if not isinstance(tenant, str):
            raise BadRequest(f"tenant={_shown(tenant)} is no text", argument="tenant")
        for key, value in limits.items():
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not isinstance(value, str) and not (whole and 0 <= int(value) < 1 << 63):
                raise BadRequest(f'{key}={_shown(value)}: tokens, or a share of the tier such as "25%"', argument=key)
        texts = {key: value for key, value in limits.items() if isinstance(value, str)}
        numbers = {key: value for key, value in limits.items() if isinstance(value, int)}
        checked = _checked({"tenant": tenant, **texts})
        with self._connection.lock:
            facts = self._call(control.SetTenant(self._connection.number(), **checked | numbers))
        return list(facts["tenants"])

    # -- for leases -------------------------------------------------------------------------------------

    def send_extension(
        self, lease: Lease, tokens: Tokens, reserve: int, upto: int | None, states: int, wait_s: float | None
    ) -> Pending[None]:
        return self._send_extend([Extension(lease, tokens, reserve, upto, states)], _error, wait_s)

    def send_commit(
        self,
        lease: Lease,
        tokens: int | None,
        states: Iterable[tuple[int, int]],
        floor: int | None,
        event: Event | None,
    ) -> Pending[Committed]:
        tokens = _checked({"tokens": tokens})["tokens"]
        if floor is not None:
            floor = _checked({"floor": floor})["floor"]
        ends = self._ends(states)
        _check_event(event)
        connection = lease.connection
        with connection.lock:
            connection.check()
            number, generation, seen = self._moment(event)
            request = connection.number()
            ticket = self._ticket = self._ticket + 1
            return connection.begin(
                control.Commit(request, lease.id, ticket, seen, tokens, number, generation, ends, floor),
                Pending(connection, request, lease.apply, partial(self._hear_commit, lease), ticket),
            )

    def send_release(self, lease: Lease, event: Event | None, *, discard: bool) -> Pending[None]:
        connection = lease.connection
        with connection.lock:
            command = self._release(connection, connection.number(), lease, event, discard)
            return connection.begin(command, Pending(connection, command.request, _nothing, ticket=command.ticket))

    def send_release_unheard(self, lease: Lease, event: Event | None, *, discard: bool) -> None:
        """Nobody asks what came of it, and there is no answer."""
        connection = lease.session
        with connection.lock:
            connection.send(self._release(connection, 0, lease, event, discard))

    def send_cancel(self, lease: Lease) -> Pending[None]:
        connection = lease.connection
        with connection.lock:
            request = connection.number()
            pending = Pending(connection, request, _nothing, lease.cancelled)
            return connection.begin(control.Cancel(request, lease.id), pending)

    def abandon(self, lease: Lease) -> None:
        """Abort while an error is on its way, which says more than what may go wrong here."""
        with contextlib.suppress(SglcacheError):
            lease.abort()

    # -- inside -----------------------------------------------------------------------------------------

    def _moment(self, event: Event | None) -> Event:
        if event is None:
            return self._now()
        # One that was recorded in an earlier life says what had been read there.
        return event._replace(seen=min(event.seen, self._read()))

    def _now(self) -> Event:
        return Event(*self._record(), self._read())

    def _read(self) -> int:
        """Up to which number the answers to commits were all waited for, or are of no use: their lease has ended.

        What a commit found to be a duplicate is the daemon's again once a command that says it has read so far is done.
        An answer that was received and not waited for does not count: its lease still names the old pages.
        """
        unread = self._unread
        while unread:
            number = next(iter(unread))
            pending, lease = unread[number]
            if not (pending.finished or lease.ended):
                return number - 1
            del unread[number]
        return self._heard

    def _hear_commit(self, lease: Lease, pending: Pending[Committed], answer: control.CommitDone) -> None:
        self._heard = answer.reply
        lease.hear(answer)
        self._unread[answer.reply] = (pending, lease)

    def _acquire_options(self, options: AcquireOptions) -> dict[str, Any]:
        """As an acquire's frame carries them."""
        checked = checked_acquire(options)
        if "states" in checked:
            checked["spare"] = self._spare(checked.pop("states"))
        return checked

    def _release(
        self, connection: Connection, request: int, lease: Lease, event: Event | None, discard: bool
    ) -> control.Release:
        _check_event(event)
        connection.check()
        if event is None:
            number, generation = self._record()
            seen = self._read() if self._unread else self._heard
        else:
            number, generation, seen = self._moment(event)
        self._ticket = ticket = self._ticket + 1
        lease.ended = True
        return control.Release(request, lease.id, ticket, seen, discard, number, generation)

    def _spare(self, states: int) -> tuple[int, ...]:
        """So many states as a command carries them: by companion. BadRequest: the daemon keeps none."""
        if not states:
            return ()
        at = self._by_end()
        return (*(0,) * at, states)

    def _ends(self, states: Iterable[tuple[int, int]]) -> control.Ends:
        """The states of a commit as the frame carries them. BadRequest: one is none, or the daemon keeps none."""
        try:
            pairs = [(tokens, slot) for tokens, slot in states]
        except (TypeError, ValueError):
            raise BadRequest(f"states={_shown(states)}: pairs (tokens, slot) are needed", argument="states") from None
        if not pairs:
            return ()
        if len(pairs) > control.MAX_ENDS:
            raise BadRequest(f"{len(pairs)} states: at most {control.MAX_ENDS} by one commit", argument="states")
        at = self._by_end()
        ends = []
        for pair in pairs:
            tokens, slot = (_checked({"states": part})["states"] for part in pair)
            ends.append((at, tokens, slot))
        return tuple(ends)

    def _by_end(self) -> int:
        """The number of the companion that `states` are of."""
        for number, kind in enumerate(self.companions):
            if KINDS[kind].by_end:
                return number
        raise BadRequest("states: this daemon keeps none; its configuration needs a [mamba]", argument="states")

    def _send_extend(
        self, batch: list[Extension], finish: Callable[[control.Extended], T], wait_s: float | None
    ) -> Pending[T]:
        items = []
        connection = self._connection
        for lease, tokens, reserve, upto, states in batch:
            if not isinstance(lease, Lease) or not lease.is_of(self):
                raise BadRequest(
                    f"{_shown(lease)} is no lease of this client's, so it can't extend it", argument="batch"
                )
            if lease.connection is not connection:  # this client has joined another life in this moment
                connection = lease.connection
            checked = _checked({"reserve": reserve, "upto": upto}) if reserve != 0 or upto is not None else _NO_ROOM
            spare = self._spare(_checked({"states": states})["states"]) if states != 0 else ()
            items.append(control.Extension(lease.id, pack(tokens), **checked, spare=spare))
        if len(items) > control.MAX_EXTENSIONS:
            raise BadRequest(f"{len(items)} leases: at most {control.MAX_EXTENSIONS} by one command", leases=len(items))

        def hear(pending: Pending[T], answer: control.Extended) -> None:
            shares = answer.shares or [()] * len(items)
            for extension, item, result, more in zip(batch, items, answer.results, shares, strict=True):
                if isinstance(result, bytes):
                    extension.lease.grow(item.tokens, result, more)

        if wait_s is not None:
            wait_s = _seconds("wait_s", wait_s)
        with connection.lock:
            request = connection.number()
            return connection.begin(control.Extend(request, items, wait_s), Pending(connection, request, finish, hear))


class Worker(Member):
    """A process of a runner that touches pages: one shard of a scheduler's session."""

    def __init__(
        self,
        token: bytes,
        shard: int,
        socket: str | os.PathLike[str] | None = None,
        rank: tuple[int, int] | None = None,
        name: str | None = None,
        *,
        dp_size: int | None = None,
        ring: EventRing | None = None,
        streams: Streams | None = None,
    ) -> None:
        """Join the session of `Client(role="scheduler").token` as its `shard`; `rank` and `streams` as there.

        UnknownSession: that session is none of this rank's. SessionEnded.
        """
        name = _name(name)
        ring = ring or EventRing(NUM_EVENTS)
        hello = control.Hello(control.PROTOCOL, name, "worker", token, shard, ring.num_events)
        super().__init__(socket, rank, dp_size, hello, ring, streams=streams)
        self.shard = shard

    def reattach(self, token: bytes, timeout_s: float = REATTACH_S) -> None:
        """As `Client.reattach`, into the session of a scheduler that has attached anew, and has this `token`.

        UnknownSession: that session is none of the life that serves now.
        """
        if _seconds("timeout_s", timeout_s) is None:
            raise BadRequest("timeout_s=None: seconds are needed", argument="timeout_s")
        hello = msgspec.structs.replace(self._hello, session=token)
        if self._reattach(hello, timeout_s):
            self._hello = hello

    def record(self, ticket: int | None = None, event: Event | None = None) -> Event:
        """My work for the scheduler's `ticket` is behind `event`, or, without one, behind all that I have enqueued.

        Without a ticket nothing is sent: the event is for a later call. So a worker that is a batch ahead when it
        learns of a ticket can name the moment that the ticket is for; the scheduler's command must name one that it
        recorded then itself, or pages that its table has lost since may be taken from under the batch that reads them.
        """
        _check_event(event)
        connection = self._connection
        if ticket is not None and (not isinstance(ticket, int) or not 0 <= ticket < 1 << 63):
            raise BadRequest(f"ticket {_shown(ticket)} is none that a scheduler's command gave", argument="ticket")
        with connection.lock:
            connection.check()
            if event is None:
                event = Event(*self._record())
            if ticket is not None:
                connection.send(control.Recorded(ticket, event.event, event.generation))
        return event


def _offset(rank: tuple[int, int] | None, dp_size: int | None) -> int:
    """Of the rank that is wanted, as the daemon counts them. BadRequest: there can be no such rank."""
    if rank is None and dp_size is None:
        return 0
    wanted = (0, 0) if rank is None else rank
    parts: tuple[object, ...] = (*wanted, dp_size) if isinstance(wanted, tuple | list) else ()
    good = all(isinstance(part, int) and not isinstance(part, bool) for part in parts if part is not None)
    if len(parts) != 3 or not good or None in wanted:
        raise BadRequest(
            f"rank={_shown(rank)}, dp_size={_shown(dp_size)}: rank is (dp_rank, pp_rank), integers", argument="rank"
        )
    dp_rank, pp_rank = wanted
    if dp_rank < 0 or pp_rank < 0 or (dp_size is not None and not dp_rank < dp_size):
        size = "" if dp_size is None else f" with dp_size={_shown(dp_size)}"
        raise BadRequest(
            f"there is no rank (dp {_shown(dp_rank)}, pp {_shown(pp_rank)}){size}: dp_rank is 0..dp_size - 1, "
            f"pp_rank 0..pp_size - 1",
            argument="rank",
        )
    return pp_rank * (1 if dp_size is None else dp_size) + dp_rank


def _check_rank(welcome: control.Welcome, rank: tuple[int, int] | None, dp_size: int | None, path: Path) -> None:
    """BadRequest: the rank that answered is not the one that was asked for."""
    there = (welcome.dp_rank, welcome.pp_rank)
    if (rank is None or tuple(rank) == there) and dp_size in (None, welcome.dp_size):
        return
    dp_rank, pp_rank = (0, 0) if rank is None else rank
    size = "" if dp_size is None else f" of dp_size {_shown(dp_size)}"
    raise BadRequest(
        f"rank (dp {_shown(dp_rank)}, pp {_shown(pp_rank)}){size} was asked for, and at {path} is rank (dp {there[0]}, "
        f"pp {there[1]}) of dp_size {welcome.dp_size}, pp_size {welcome.pp_size}; give dp_size={welcome.dp_size} and a "
        f"rank within these, or that rank's own socket",
        argument="rank",
        wanted=[dp_rank, pp_rank],
        there=list(there),
        dp_size=welcome.dp_size,
        pp_size=welcome.pp_size,
    )


def _check_alike(was: control.Welcome, now: control.Welcome, path: Path) -> None:
    """Changed: another rank, or pools of another form, than those that the client was made for."""
    before, after = _form(was), _form(now)
    differ = [name for name in before if before[name] != after[name]]
    if differ:
        told = ", ".join(f"{name} was {before[name]} and is {after[name]}" for name in differ)
        raise Changed(
            f"the daemon at {path} serves something else now: {told}; close this client, and set the runner up anew",
            differ=differ,
        )


def _form(welcome: control.Welcome) -> dict[str, Any]:
    """All of a life that a runner may have built on; what the host tier is like it can't see."""

    def seen(geometry: control.Geometry | control.StateGeometry) -> dict[str, Any]:
        return {name: value for name, value in msgspec.structs.asdict(geometry).items() if not name.startswith("host_")}

    companions = [(each.kind, each.window, each.interval, each.layers) for each in welcome.companions]
    return {
        "rank": (welcome.dp_rank, welcome.pp_rank, welcome.dp_size, welcome.pp_size),
        **seen(welcome.geometry),
        "companions": [(*told, seen(each.geometry)) for told, each in zip(companions, welcome.companions, strict=True)],
        "pools": [(pool.shard, pool.num_bytes) for pool in welcome.pools],
    }


def _extension(each: object) -> Extension:
    try:
        return Extension(*each)  # type: ignore[misc]
    except TypeError as exc:
        raise BadRequest(
            f"{_shown(each)} in a batch: (lease, tokens, reserve, upto, states) is needed, all but the lease optional",
            argument="batch",
        ) from exc


def _dump(facts: dict[str, Any]) -> Dump:
    return Dump(Tier[facts["tier"]], facts["seq"], np.frombuffer(facts["hashes"], "<i8").tolist())


def _peeked(answer: control.Done) -> Peeked:
    matched = answer.facts["matched_tokens"]
    return Peeked(answer.facts["device_tokens"], matched, tuple(answer.facts["reaches"]) or (matched,))


def _prefetched(answer: control.Done) -> Prefetched:
    return Prefetched(answer.facts["matched_tokens"], answer.facts["fetched_tokens"])


def _errors(answer: control.Extended) -> list[SglcacheError | None]:
    return [
        None if isinstance(each, bytes) else SglcacheError.from_code(each.code, each.message, each.facts)
        for each in answer.results
    ]


def _error(answer: control.Extended) -> None:
    (error,) = _errors(answer)
    if error is not None:
        raise error


def _nothing(answer: control.Done) -> None:
    """There is nothing to be told of it."""


_TEXTS = {
    "lora": control.MAX_NAME,
    "extra_key": control.MAX_SALT,
    "cache_salt": control.MAX_SALT,
    "session_id": control.MAX_NAME,
    "request_id": control.MAX_NAME,
    "tenant": control.MAX_NAME,
    **dict.fromkeys(("device_floor", "device_ceiling", "host_floor", "host_ceiling"), control.MAX_NAME),
    "owner": control.MAX_NAME,
    "tier": control.MAX_NAME,
    "name": control.MAX_NAME,
}
_CHOICES = {"prefetch": control.PREFETCH_POLICIES, "policy": control.PREFETCH_POLICIES}
_NEEDED = frozenset(("reserve", "priority", "owner", "states"))  # None is no value of these
_NAMESPACE = tuple(NamespaceOptions.__annotations__)
_ACQUIRE = tuple(AcquireOptions.__annotations__)  # the namespace's first
_NO_OPTIONS: dict[str, Any] = {}
_NO_ROOM: dict[str, Any] = {"reserve": 0, "upto": None}


class _Shown(reprlib.Repr):
    """`repr` of what a caller gave, short however long that is; of a long integer Python would refuse the digits."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 80

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 128 else f"<an integer of {x.bit_length()} bits>"


def _shown(value: object) -> str:
    return _Shown().repr(value)


def _check_names(verb: str, options: Mapping[str, object], known: Sequence[str]) -> None:
    """BadRequest: `verb` has no option of one of these names."""
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(known)}"
            raise BadRequest(f"{verb} has no option {_shown(name)}; {hint}", argument=name)


def checked_acquire(options: AcquireOptions) -> dict[str, Any]:
    """An acquire's options as its frame carries them. BadRequest, by the name of the first that is wrong."""
    if not options:
        return {}
    _check_names("acquire", options, _ACQUIRE)
    checked = _checked(options)
    _check_timeout(checked, "prefetch", "prefetch_timeout_s")
    return checked


def _check_timeout(checked: Mapping[str, Any], policy: str, timeout_s: str) -> None:
    """BadRequest: a timeout for a policy that has none. With none named it is the daemon's, if that has one."""
    seconds, named = checked.get(timeout_s), checked.get(policy)
    if seconds is not None and named not in (None, "timeout"):
        raise BadRequest(
            f"{timeout_s}={seconds:g} with {policy}={named!r}, which has no timeout; use {policy}='timeout', or leave "
            f"{timeout_s} out",
            argument=timeout_s,
        )


def _checked(options: Mapping[str, object]) -> dict[str, Any]:
    """The options as the frame carries them. What it could not is refused here, by its name: there it would end the
    connection, and with it every lease. Whatever is an integer (numpy's, too) is a count; a bool is none."""
    checked: dict[str, Any] = {}
    for name, value in options.items():
        most = _TEXTS.get(name)
        if value is None and name not in _NEEDED:
            checked[name] = None
        elif name.endswith("_s"):
            checked[name] = _seconds(name, value)
        elif (choices := _CHOICES.get(name)) is not None:
            if not isinstance(value, str) or value not in choices:
                raise BadRequest(f"{name}={_shown(value)} is unknown; use {', '.join(choices)}, or None", argument=name)
            checked[name] = value
        elif most is not None:
            if not isinstance(value, str) or len(value) > most:
                what = f"of {len(value)} characters" if isinstance(value, str) else f"{_shown(value)} is no text"
                raise BadRequest(f"{name} {what}: at most {most} characters", argument=name)
            if not value.isascii():
                _check_text(name, value)
            checked[name] = value
        else:
            least = -control.MAX_COUNT if name == "priority" else 0
            try:
                count = operator.index(value) if not isinstance(value, bool) else None  # type: ignore[arg-type]
            except TypeError:
                count = None
            if count is None or not least <= count <= control.MAX_COUNT:
                raise BadRequest(f"{name}={_shown(value)}: an integer of {least} to {control.MAX_COUNT}", argument=name)
            checked[name] = count
    return checked


def _check_text(name: str, value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        raise BadRequest(
            f"{name}={value[:80]!a} is no text: {exc.reason} at character {exc.start}", argument=name
        ) from None


def _seconds(name: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= control.MAX_TTL_S:
        raise BadRequest(f"{name}={_shown(value)}: seconds, 0 to {control.MAX_TTL_S:g}", argument=name)
    return float(value)


def _spin(spin_us: object) -> float:
    if isinstance(spin_us, bool) or not isinstance(spin_us, int | float) or not 0 <= spin_us <= MAX_SPIN_US:
        raise BadRequest(f"spin_us={_shown(spin_us)}: microseconds, 0 to {MAX_SPIN_US:g}", argument="spin_us")
    return float(spin_us)


def _check_event(event: Event | None) -> None:
    if event is None:
        return
    good = isinstance(event, Event) and all(isinstance(part, int) and 0 <= part < 1 << 63 for part in event)
    if not good or event.event > control.MAX_COUNT:
        raise BadRequest(f"{_shown(event)} is none that `record` gave", argument="event")


def _name(name: str | None) -> str:
    if name is not None:
        return str(_checked({"name": name})["name"])
    called = Path(sys.argv[0] or "python").name  # its bytes need not be text
    return called.encode(errors="backslashreplace").decode()[: control.MAX_NAME]


def _tier(tier: Tier | str | None) -> str | None:
    if tier is None or isinstance(tier, Tier):
        return None if tier is None else tier.name
    return str(_checked({"tier": tier})["tier"]).upper()


__all__ = [
    "AcquireOptions",
    "Client",
    "ClosedError",
    "Committed",
    "Dump",
    "Event",
    "Extension",
    "Lease",
    "NamespaceOptions",
    "Peeked",
    "Pending",
    "Prefetched",
    "StatePool",
    "StateShare",
    "WindowPool",
    "WindowShare",
    "Worker",
]
