"""A model runner's client, blocking: acquire pages, write KV into them in place, commit, release.

    with sglcache.Client() as cache:
        with cache.acquire(tokens) as lease:
            lease.wait_loaded()
            ...  # compute tokens[lease.matched_tokens:], writing cache.pool.k[layer][lease.slots]
            lease.commit()

A runner of one process is a `Client` (role "runner"). One of several is a `Client(role="scheduler")`, which has no
pool, and a `Worker(token, shard)` in each process that touches pages: the scheduler hands them the tickets of its
commits and releases, and each says `record(ticket)` once its work for it is enqueued.

Every object may be used from several threads; it does one thing at a time, and who waits keeps the others out. In a
forked child it is closed: the child must attach anew. Torch is loaded when `pool` is first asked for.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from sglcache import paths
from sglcache.client.connection import Connection, Request
from sglcache.client.lease import Committed, Lease
from sglcache.core.key import pack
from sglcache.errors import BadRequest, ClosedError, ConfigError, SglcacheError
from sglcache.memory.geometry import Geometry
from sglcache.memory.rings import EventRing, LoadRingReader
from sglcache.units import Tier
from sglcache.wire import control

if TYPE_CHECKING:
    from sglcache.memory.views import KVViews

NUM_EVENTS = 4096  # of a member's ring: as many of its commits and releases may be held back at a time

Tokens: TypeAlias = Sequence[int] | npt.NDArray[Any] | bytes
"""Token ids: any integers that fit uint32, or bytes that are packed uint32 little-endian already."""


class Peeked(NamedTuple):
    """How far a match would reach."""

    device_tokens: int
    matched_tokens: int  # device and host together


class Dump(NamedTuple):
    """Every block of a tier that the stream tells of, after the batch numbered `seq`."""

    tier: Tier
    seq: int
    hashes: list[int]  # as on the stream


class Member:
    """What a client and a worker have in common: a connection, and pools where the role has them."""

    def __init__(self, path: Path, hello: control.Hello, ring: EventRing | None) -> None:
        self._ring = ring
        self._loads: LoadRingReader | None = None
        self._pools: list[KVViews] | None = None
        fds = [ring.fd, ring.doorbell] if ring is not None else []
        try:
            self._connection = Connection(path, hello, fds)
        except BaseException:
            if ring is not None:
                ring.close()
            raise
        welcome = self._welcome = self._connection.welcome
        self.socket = path
        self.role = hello.role
        self.epoch = welcome.epoch
        """The life of the daemon: another one is another cache."""
        self.version = welcome.version
        try:
            self.geometry = Geometry.from_wire(welcome.geometry)
            if ring is not None:
                fd, doorbell = self._take(len(welcome.pools)), self._take(len(welcome.pools))
                self._loads = LoadRingReader(fd, doorbell, welcome.num_load_slots, self.geometry.num_layers)
                os.close(fd)
        except BaseException:
            self._let_go("this client never stood")
            raise
        child = weakref.WeakMethod(self._in_child)
        # There is no taking it back; a closed client leaves a few bytes behind.
        os.register_at_fork(after_in_child=lambda: (method := child()) and method())

    def _take(self, index: int) -> int:
        """Make descriptor `index` of the welcome ours."""
        if index >= len(self._connection.fds):
            raise ConfigError(f"the daemon sent {len(self._connection.fds)} descriptors; update the older side")
        return self._connection.fds.pop(index)

    @property
    def pools(self) -> list[KVViews]:
        """The device pools that this member maps: a runner all shards, a worker its own. ClosedError once closed."""
        with self._connection.lock:
            if self._connection.closed:
                self._connection.fileno()  # says why
            if self._pools is None:
                from sglcache.memory.views import KVViews

                fds = self._connection.fds
                self._pools = [
                    KVViews(fds[handle.fd_index], self.geometry, handle.shard) for handle in self._welcome.pools
                ]
            return self._pools

    @property
    def pool(self) -> KVViews:
        """The one device pool that this member maps: `pool.k[layer][slots]` is where KV is read and written."""
        pools = self.pools
        if len(pools) != 1:
            raise BadRequest(f"a {self.role} of {self.geometry.num_shards} shards maps {len(pools)} pools; use `pools`")
        return pools[0]

    def ping(self) -> None:
        """A round trip."""
        with self._connection.lock:
            self._call(control.Ping(self._connection.number()))

    def wait_loaded(self, load: tuple[int, int], layer: int | None = None) -> None:
        """Block until a lease's `load` is readable, in one layer or in all.

        TransferError: the load failed. Unavailable: the daemon is gone.
        """
        if self._loads is None:
            raise BadRequest(f"a {self.role} maps no pages that could be loaded; its workers wait")
        slot, generation = load
        for each in range(self.geometry.num_layers) if layer is None else (layer,):
            if self._loads.done(slot, generation, each):
                continue
            with self._connection.lock:
                while not self._loads.wait(slot, generation, each, self._connection.fileno()):
                    self._connection.pull()

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

    def _record(self) -> tuple[int, int]:
        """An event behind everything written so far; (0, 0) of a member that touches nothing."""
        return (0, 0) if self._ring is None else self._ring.record_unrung()

    def _call(self, command: Request) -> control.Granted | control.CommitDone | control.Done:
        connection = self._connection
        connection.send(command)
        return connection.wait(command.request)

    def _facts(self, command: Request) -> dict[str, Any]:
        answer = self._call(command)
        assert isinstance(answer, control.Done), f"{command} was answered {answer}"
        return answer.facts

    def _let_go(self, why: str) -> None:
        self._connection.close(why)
        if self._ring is not None:
            self._ring.close()
        if self._loads is not None:
            self._loads.close()
        for pool in self._pools or ():
            pool.close()

    def _in_child(self) -> None:
        """After a fork: the parent has all this, and the thread that may hold the lock isn't here."""
        self._connection.lock = threading.Lock()
        if not self._connection.closed:
            self._let_go("this client belongs to the parent of this forked process; attach anew")


class Client(Member):
    """A runner, a scheduler of workers, or an observer, which may look and clear and has no pages."""

    def __init__(
        self,
        socket: str | os.PathLike[str] | None = None,
        rank: tuple[int, int] = (0, 0),
        role: str = "runner",
        name: str | None = None,
        *,
        dp_size: int = 1,
        ring: EventRing | None = None,
    ) -> None:
        """Attach to the daemon at `socket`, by default where `sglcache serve` of this user puts it.

        `rank` is (dp_rank, pp_rank) and picks the socket where none is named; `name` is for people. `ring` brings a
        runner's own events. Unavailable: there is no daemon.
        """
        if role == "runner":
            ring = ring or EventRing(NUM_EVENTS)
        elif role == "worker":
            raise BadRequest("a worker joins a scheduler's session: use Worker(token, shard)")
        path = Path(socket) if socket is not None else paths.socket_path(rank[1] * dp_size + rank[0])
        num_events = ring.num_events if ring is not None else 0
        super().__init__(path, control.Hello(control.PROTOCOL, _name(name), role, num_events=num_events), ring)
        self.token = self._welcome.session
        """What a scheduler's workers attach with."""
        self._ticket = 0
        self._seen = 0  # the highest number of a CommitDone that was read
        self._begun: dict[int, tuple[int, Lease]] = {}  # ticket → (request, lease), not waited for yet

    # -- a runner's journey -----------------------------------------------------------------------------

    def acquire(
        self,
        tokens: Tokens,
        *,
        lora: str | None = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        session_id: str | None = None,
        tenant: str | None = None,
        priority: int = 0,
        limit: int | None = None,
        reserve: int = 0,
    ) -> Lease:
        """Find what is cached of `tokens`, pin it, and get pages for the rest, with room for `reserve` tokens more.

        At most `limit` tokens are matched. NoSpace: locks leave too few pages, and nothing was changed.
        """
        packed = pack(tokens)
        _check_counts(limit=limit, reserve=reserve, priority=priority)
        _check_names(lora=lora, extra_key=extra_key, cache_salt=cache_salt, session_id=session_id, tenant=tenant)
        connection = self._connection
        with connection.lock:
            answer = self._call(
                control.Acquire(
                    connection.number(),
                    packed,
                    lora,
                    extra_key,
                    cache_salt,
                    session_id,
                    tenant,
                    priority,
                    limit,
                    reserve,
                )
            )
        return Lease(self, packed, cast(control.Granted, answer))

    def wait(self, ticket: int) -> Committed | None:
        """What a begun commit came to; None of a release, once it is over. Each ticket can be waited for once."""
        with self._connection.lock:
            begun = self._begun.pop(ticket, None)
            if begun is None:
                raise BadRequest(f"ticket {ticket} was not begun here, or was waited for", ticket=ticket)
            return self._finish(*begun)

    # -- looking, pinning, clearing ---------------------------------------------------------------------

    def peek(
        self,
        tokens: Tokens,
        *,
        lora: str | None = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> Peeked:
        """How far a match would reach, without changing anything, not even the order of eviction."""
        packed = pack(tokens)
        _check_names(lora=lora, extra_key=extra_key, cache_salt=cache_salt)
        with self._connection.lock:
            facts = self._facts(control.Peek(self._connection.number(), packed, lora, extra_key, cache_salt))
        return Peeked(facts["device_tokens"], facts["matched_tokens"])

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
        _check_names(owner=owner, lora=lora, extra_key=extra_key, cache_salt=cache_salt)
        if not 0 < ttl_s <= control.MAX_TTL_S:
            raise BadRequest(f"ttl_s={ttl_s}: more than 0 and at most {control.MAX_TTL_S} seconds", argument="ttl_s")
        with self._connection.lock:
            command = control.Pin(self._connection.number(), packed, owner, float(ttl_s), lora, extra_key, cache_salt)
            return int(self._facts(command)["pinned_tokens"])

    def unpin(self, owner: str) -> int:
        """Let go of all that this client pinned in the name of `owner`; its pages. Of nothing is no error."""
        with self._connection.lock:
            return int(self._facts(control.Unpin(self._connection.number(), owner))["pages"])

    def clear(self, tier: Tier | str | None = None) -> dict[str, int]:
        """Drop every cached page of a tier, or of all; the pages by tier. Busy: something live holds it."""
        with self._connection.lock:
            facts = self._facts(control.Clear(self._connection.number(), _tier(tier)))
        return dict(facts["pages"])

    def status(self, prove: bool = False) -> dict[str, Any]:
        """What the daemon holds, for whom. With `prove`, `violations` is what is wrong with its books."""
        with self._connection.lock:
            return self._facts(control.Status(self._connection.number(), prove))

    def dump(self, tier: Tier | str) -> Dump:
        """Every block hash in a tier. Changed: the cache was too busy for that; try again."""
        with self._connection.lock:
            facts = self._facts(control.Dump(self._connection.number(), _tier(tier) or ""))
        hashes = np.frombuffer(facts["hashes"], "<i8").tolist()
        return Dump(Tier[facts["tier"]], facts["seq"], hashes)

    def digest(self) -> dict[str, Any]:
        """What who has read every batch up to number `seq` must have: `tiers` is, by tier, the number of blocks and the
        sum of their hashes mod 2**64. While `announcing`, who follows the announcement has only part of it.
        """
        with self._connection.lock:
            return self._facts(control.Digest(self._connection.number()))

    def announce(self) -> None:
        """Have all that is cached told anew on the stream: AllBlocksCleared, then every block, under fresh numbers.

        For subscribers that can't ask for a replay. BadRequest: events are off.
        """
        with self._connection.lock:
            self._facts(control.Announce(self._connection.number()))

    # -- for leases -------------------------------------------------------------------------------------

    @staticmethod
    def pack(tokens: Tokens) -> bytes:
        return pack(tokens)

    def extend(self, lease: int, tokens: bytes, reserve: int) -> control.Granted:
        with self._connection.lock:
            answer = self._call(control.Extend(self._connection.number(), lease, tokens, reserve))
        return cast(control.Granted, answer)

    def commit(self, lease: Lease, tokens: int | None) -> Committed:
        with self._connection.lock:
            committed = self._finish(self._send_commit(lease, tokens), lease)
        assert committed is not None
        return committed

    def begin_commit(self, lease: Lease, tokens: int | None) -> int:
        with self._connection.lock:
            request = self._send_commit(lease, tokens)
            self._begun[self._ticket] = (request, lease)
            return self._ticket

    def end(self, lease: Lease, *, discard: bool, wait: bool) -> None:
        with self._connection.lock:
            request = self._send_release(lease, discard)
            if wait:
                self._connection.wait(request)
            else:
                self._connection.ignore(request)

    def begin_end(self, lease: Lease, *, discard: bool) -> int:
        with self._connection.lock:
            request = self._send_release(lease, discard)
            self._begun[self._ticket] = (request, lease)
            return self._ticket

    def abandon(self, lease: Lease) -> None:
        """Abort while an error is on its way, which says more than what may go wrong here."""
        with contextlib.suppress(SglcacheError):
            lease.abort()

    # -- inside -----------------------------------------------------------------------------------------

    def _send_commit(self, lease: Lease, tokens: int | None) -> int:
        event, generation = self._record()
        request = self._connection.number()
        self._ticket += 1
        self._connection.send(control.Commit(request, lease.id, self._ticket, self._seen, tokens, event, generation))
        return request

    def _send_release(self, lease: Lease, discard: bool) -> int:
        lease.ended = True
        event, generation = self._record()
        request = self._connection.number()
        self._ticket += 1
        self._connection.send(control.Release(request, lease.id, self._ticket, self._seen, discard, event, generation))
        return request

    def _finish(self, request: int, lease: Lease) -> Committed | None:
        answer = self._connection.wait(request)
        if isinstance(answer, control.CommitDone):
            self._seen = max(self._seen, answer.reply)
            return lease.apply(answer)
        return None


class Worker(Member):
    """A process of a runner that touches pages: one shard of a scheduler's session."""

    def __init__(
        self,
        token: bytes,
        shard: int,
        socket: str | os.PathLike[str] | None = None,
        rank: tuple[int, int] = (0, 0),
        name: str | None = None,
        *,
        dp_size: int = 1,
        ring: EventRing | None = None,
    ) -> None:
        """Join the session of `Client(role="scheduler").token` as its `shard`. UnknownSession, SessionEnded."""
        ring = ring or EventRing(NUM_EVENTS)
        path = Path(socket) if socket is not None else paths.socket_path(rank[1] * dp_size + rank[0])
        hello = control.Hello(control.PROTOCOL, _name(name), "worker", token, shard, ring.num_events)
        super().__init__(path, hello, ring)
        self.shard = shard

    def record(self, ticket: int) -> None:
        """My work for the scheduler's `ticket` is done: all that I have written so far is behind this."""
        with self._connection.lock:
            self._connection.send(control.Recorded(ticket, *self._record()))


def _check_counts(**counts: int | None) -> None:
    """What the frame could not carry is refused here, by its name: there it would end the connection."""
    for name, count in counts.items():
        least = -control.MAX_COUNT if name == "priority" else 0
        if count is not None and not least <= count <= control.MAX_COUNT:
            raise BadRequest(f"{name}={count}: {least} to {control.MAX_COUNT}", argument=name)


def _check_names(**names: str | None) -> None:
    for name, text in names.items():
        most = control.MAX_SALT if name in ("extra_key", "cache_salt") else control.MAX_NAME
        if text is not None and len(text) > most:
            raise BadRequest(f"{name} of {len(text)} characters: at most {most}", argument=name)


def _name(name: str | None) -> str:
    return name if name is not None else Path(sys.argv[0] or "python").name


def _tier(tier: Tier | str | None) -> str | None:
    return tier.name if isinstance(tier, Tier) else tier.upper() if tier is not None else None


__all__ = ["Client", "ClosedError", "Committed", "Dump", "Lease", "Peeked", "Worker"]
