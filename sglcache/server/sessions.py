"""Sessions and their members: who is attached, what each may say, and when the pages of one who is gone are free.

A session is one scheduler and, per shard, one worker; or a runner, which is both. Only who touches pages has an event
ring, a doorbell, and a pidfd that counts for them.

How a session ends (laws 8 and 9):

    a member's socket ends, it says Bye, breaks the protocol, or dies  ─►  end the session, once: leases are fenced
    a shard's Bye has its event done, or its member is dead            ─►  that shard is gone
    every shard is gone                                                ─►  the pages are free

A socket's end is not death: a forked child may hold the other end, or have closed it while its parent still writes. So
a member is kept, and its ring is still looked at, until one of the last two is so. And a death is no socket's end: the
same child keeps it open, so it is closed from here.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import select
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from sglcache.core import invariants
from sglcache.core.effects import Committed, Extended, Grant, Prefetched, Released, Share, Wake
from sglcache.core.histograms import Histogram
from sglcache.core.holdings import Holding, holdings
from sglcache.core.index import DumpedNode, Index
from sglcache.core.key import ROOT, Namespace
from sglcache.core.leases import Lease
from sglcache.core.reuse import Reuse
from sglcache.errors import (
    BadRequest,
    Busy,
    Changed,
    Forbidden,
    ProtocolError,
    SessionEnded,
    SglcacheError,
    TooSlow,
    TransferError,
    UnknownSession,
    with_article,
)
from sglcache.memory.engine import LoadPlace
from sglcache.memory.pools import DevicePool
from sglcache.memory.rings import FAILED, EventRingReader, LoadRing
from sglcache.server.checks import Check, NotHere, NotNow
from sglcache.server.connection import Connection, Handlers
from sglcache.server.explaining import Explaining
from sglcache.server.limits import Limits
from sglcache.server.listener import (
    NONE_LEFT,
    Peer,
    Refusals,
    check_version,
    close_fds,
    most_common,
    out_of_descriptors,
)
from sglcache.server.loads import Load
from sglcache.server.owner import Owner
from sglcache.server.tenants import KEYS
from sglcache.units import LeaseId, SessionId, Tier, printable
from sglcache.wire import control

logger = logging.getLogger("sglcache.sessions")

MAX_WAITS = 1 << 16  # events of one member that are named and not done
TOKEN_BYTES = 16  # of a session's token
DUMP_SLICE = 2000  # nodes
MAX_VIOLATIONS = 20  # that a check tells of in words
PROOF_TRIES = 100  # of a proof that commands keep overtaking
FAREWELL = -1  # the ticket of a Bye
LOOK_S, MAX_LOOK_S = 0.001, 0.02  # between looks at events that streams write; a timer of the loop knows milliseconds

RECLAIMS = 16  # deaths that are remembered

RUNNER, SCHEDULER, WORKER, OBSERVER, ADMIN = "runner", "scheduler", "worker", "observer", "admin"
WITHOUT_SESSION = (OBSERVER, ADMIN)
KEPT_PLACES = 8  # beyond `max_connections`, for observers and admins


class OfferedCompanion(NamedTuple):
    """A companion in every Welcome."""

    handle: control.CompanionHandle  # without pools
    pools: Sequence[DevicePool]  # one per shard


class Offer(NamedTuple):
    """What every Welcome says."""

    epoch: int
    version: str
    geometry: control.Geometry
    pools: Sequence[DevicePool]  # one per shard
    dp_rank: int
    pp_rank: int
    dp_size: int
    pp_size: int
    companions: Sequence[OfferedCompanion] = ()


class Session:
    """The daemon's record of one runner. Ended once; forgotten when no member is left."""

    def __init__(self, id: SessionId, num_shards: int, now: float) -> None:
        self.id = id
        self.attached_at = now
        self.token = os.urandom(TOKEN_BYTES)
        self.num_shards = num_shards
        self.scheduler: Member | None = None  # or the runner; None once its socket is at its end
        self.members: list[Member] = []
        self.workers: dict[int, Member] = {}  # by shard; of a runner none
        self.is_runner = False
        self.ended = False
        self.ended_at = 0.0
        self.why = ""  # it ended
        self.asked: deque[tuple[int, float]] = deque()  # (ticket, when) of what waits for workers' events; not pruned


class Reclaim(NamedTuple):
    """A death, and when all that it held was free again: seconds of CLOCK_MONOTONIC."""

    session: int
    pid: int
    died_at: float  # when the loop was told, by the process's descriptor
    freed_at: float


class Member(Connection):
    """One connection of a session, or of who has none: an observer's or an admin's."""

    def __init__(self, sessions: Sessions, peer: Peer, hello: control.Hello) -> None:
        super().__init__(sessions.owner, sessions.limits.config)
        self.sessions = sessions
        self.index: Index = sessions.owner.index
        self.explaining = sessions.explaining
        self.acquires = sessions.explaining.acquires
        self.role = hello.role
        self.name = printable(hello.client)
        self.pid = peer.pid
        self.pidfd = peer.pidfd
        self.touches = hello.role in (RUNNER, WORKER)
        self.shard = hello.shard if hello.role == WORKER else 0
        self.session: Session | None = None
        self.id = SessionId(0)  # the session's, for the hot path
        self.ring: EventRingReader | None = None
        self.load_doorbell = -1
        self.waits: list[tuple[int, int, int, float]] = []  # (event, generation, ticket, since) named and not done
        self.gone = False  # nothing more will come of it: its uses are over, and it is watched no longer

    def __repr__(self) -> str:
        return f"{self.who[:-1]}, session {self.id})"

    @property
    def who(self) -> str:
        """For people, within its session."""
        shard = f" of shard {self.shard}" if self.role == WORKER else ""
        return f"{self.role}{shard} {self.name!r} (pid {self.pid})"

    @property
    def cut_off(self) -> str:
        """Why its session ends where nothing is known but that its socket is at its end."""
        return f"the connection of its {self.who} ended"

    @property
    def alive(self) -> bool | None:
        """Whether its process lives; None: nobody watches it any more, as nothing depends on it."""
        if self.pidfd < 0:
            return None
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return not poll.poll(0)

    # -- the runner's journey -------------------------------------------------------------------------------

    def acquire(self, c: control.Acquire) -> None:
        namespace = ROOT
        if not (c.lora is None and c.extra_key is None and c.cache_salt is None):
            namespace = Namespace.of(c.lora, c.extra_key, c.cache_salt)
        third, now = self.owner.third, self.heard_at
        fetch = None
        if c.prefetch is not None:
            _check_policy(c.prefetch)
        if third is not None:
            fetch = third.until(c.prefetch, c.prefetch_timeout_s, len(c.tokens) >> 2, now)
            fetch = self.sessions.limits.until(fetch, now)
        request, acquires = c.request, self.acquires
        try:
            grant = self.index.acquire(
                self.id,
                request,
                c.tokens,
                namespace,
                limit=c.limit,
                reserve=c.reserve,
                exact=c.exact,
                room=c.room,
                session_id=c.session_id,
                priority=c.priority,
                fetch=fetch,
                spare=c.spare,
                patience=self.sessions.limits.patience(c.wait_s, now),
                tenant=c.tenant,
            )
        except SglcacheError as error:
            if acquires is not None:
                acquires.refused(c, self.id, namespace, now, error.code)
            raise
        if grant is not None:
            if acquires is not None:
                acquires.granted(c, self.id, namespace, now, grant)
            if grant.load is None:
                if self.sessions.reuse is not None:
                    self.sessions.asked(grant)
                lease, matched_tokens, host_tokens, slots, _, shares, reaches = grant
                told = _told(shares) if shares else ()
                self.reply(control.Granted(request, lease, matched_tokens, host_tokens, slots, None, told, reaches))
            else:
                self.granted(request, grant)
            return
        if acquires is not None:
            acquires.waits(c, self.id, namespace, now, self.index.waits_for(self.id, request))
        if third is not None:
            self.owner.third_asked()
        else:
            self.owner.pins_changed()

    def prefetch(self, c: control.Prefetch) -> None:
        namespace = Namespace.of(c.lora, c.extra_key, c.cache_salt)
        third, until = self.owner.third, None
        if c.policy is not None:
            _check_policy(c.policy)
        if third is not None:
            now = self.owner.loop.time()
            until = self.sessions.limits.until(third.until(c.policy, c.timeout_s, len(c.tokens) >> 2, now), now)
        if until is None:  # nobody is to be asked
            matched = self.index.peek(c.tokens, namespace).matched_tokens
            self.reply(control.Done(c.request, Prefetched(matched, 0)._asdict()))
            return
        done = self.index.prefetch(self.id, c.request, c.tokens, namespace, until, c.tenant)
        if done is not None:
            self.reply(control.Done(c.request, done._asdict()))
        self.owner.third_asked()

    def extend(self, c: control.Extend) -> None:
        patience = self.sessions.limits.patience(c.wait_s, self.heard_at)
        extended = self.index.extend(self.id, c.request, c.items, patience)
        if extended is not None:
            self.extended(c.request, extended)
        else:
            self.owner.pins_changed()

    def extended(self, request: int, extended: Extended) -> None:
        results = [
            result if isinstance(result, bytes) else control.Fault(result.code, result.message, result.facts)
            for result in extended.results
        ]
        self.reply(control.Extended(request, results, list(extended.shares)))

    def granted(self, request: int, grant: Grant) -> None:
        if self.sessions.reuse is not None:
            self.sessions.asked(grant)
        place = None
        if grant.load is not None:
            place = self.owner.loads.begin(self.id, request, grant).place
            if place is None:
                return
        self.tell_grant(request, grant, place)

    def loaded_without_slot(self, load: Load) -> None:
        """A load that found no slot is over: its answer."""
        self.tell_grant(load.request, load.grant, None)

    def tell_grant(self, request: int, grant: Grant, place: LoadPlace | None) -> None:
        lease, matched_tokens, host_tokens, slots, _, shares, reaches = grant
        told = _told(shares) if shares else ()
        self.reply(control.Granted(request, lease, matched_tokens, host_tokens, slots, place, told, reaches))

    def commit(self, c: control.Commit) -> None:
        done = self.event_done(c.event, c.generation)
        lease: Any = c.lease
        shard = self.shard if done else None
        self.index.commit(
            self.id,
            c.request,
            lease,
            c.ticket,
            seen=c.seen,
            tokens=c.tokens,
            ends=c.ends,
            floor=c.floor,
            done=shard,
        )
        if not done:
            self.await_event(c.event, c.generation, c.ticket)

    def release(self, c: control.Release) -> None:
        done = self.event_done(c.event, c.generation)
        lease: Any = c.lease
        shard, request = self.shard if done else None, c.request or None
        self.index.release(self.id, request, lease, c.ticket, seen=c.seen, discard=c.discard, done=shard)
        if request is None:
            self.no_reply(c)
        if not done:
            self.await_event(c.event, c.generation, c.ticket)

    def cancel(self, c: control.Cancel) -> None:
        if self.index.cancel(self.id, c.request, LeaseId(c.lease)):
            self.reply(control.Done(c.request))

    def cancel_request(self, c: control.CancelRequest) -> None:
        self.reply(control.Done(c.request, {"cancelled": self.index.withdraw(self.id, c.target)}))

    def recorded(self, c: control.Recorded) -> None:
        self.no_reply(c)
        if self.event_done(c.event, c.generation):
            self.event_over(c.ticket)
        else:
            self.await_event(c.event, c.generation, c.ticket)

    def bye(self, c: control.Bye) -> None:
        done = self.event_done(c.event, c.generation)
        logger.debug("%r says goodbye", self)
        self.handlers = {}
        self.reply(control.Done(c.request))
        if self.session is not None:
            self.sessions.end(self.session, f"its {self.who} left")
        if not self.touches:
            self.sessions.drop(self)
        elif done:
            self.event_over(FAREWELL)
        else:
            self.await_event(c.event, c.generation, FAREWELL)

    # -- events ---------------------------------------------------------------------------------------------

    def event_done(self, event: int, generation: int) -> bool:
        """Whether this member's use of its pages, which ends with this event, is over already.

        Of generation 0 there is none to wait for; who touches nothing has none. BadRequest if there is no such event,
        or too many are waited for.
        """
        ring = self.ring
        if ring is None:
            if generation:
                raise BadRequest(f"{with_article(self.role)} has no events to name", event=event)
            return False
        if not generation or ring.done(event, generation):
            return True
        if len(self.waits) >= MAX_WAITS:
            raise BadRequest(f"{len(self.waits)} events are named and not done; let some finish", waits=len(self.waits))
        return False

    def await_event(self, event: int, generation: int, ticket: int) -> None:
        """`ticket` is done once this event is; of a scheduler's, once its workers have named theirs and these are."""
        now = self.owner.loop.time()
        if self.touches:
            self.waits.append((event, generation, ticket, now))
            self.sessions.look_later()
        elif self.session is not None:
            asked, known = self.session.asked, self.index.sessions.get(self.id)
            while known is not None and asked and asked[0][0] <= known.last_done:
                asked.popleft()
            asked.append((ticket, now))

    def event_over(self, ticket: int) -> None:
        """The shard's use of its pages for `ticket` is over."""
        if ticket == FAREWELL:
            self.sessions.shard_gone(self)
            return
        try:
            self.index.event_done(self.id, ticket, self.shard)
        except BadRequest as error:  # too far ahead; the command, if any, has its answer or will get it
            self.throw_out(error)
        if self.lost and self.session is not None:
            self.sessions.forget_idle(self.session)

    def rang(self) -> None:
        """The doorbell: some event is done."""
        ring = self.ring
        if ring is None:
            return
        ring.drain()
        waits, self.waits = self.waits, []
        over = []
        for wait in waits:
            event, generation, ticket, since = wait
            if ring.done(event, generation):
                self.sessions.event_waits.observe(self.owner.loop.time() - since)
                over.append(ticket)
            else:
                self.waits.append(wait)
        self.owner.begin_turn()
        for ticket in over:
            self.event_over(ticket)
        self.owner.end_turn()

    # -- looking, pinning, clearing --------------------------------------------------------------------------

    def peek(self, c: control.Peek) -> None:
        peeked = self.index.peek(c.tokens, Namespace.of(c.lora, c.extra_key, c.cache_salt))
        self.reply(control.Done(c.request, peeked._asdict()))

    def pin(self, c: control.Pin) -> None:
        namespace = Namespace.of(c.lora, c.extra_key, c.cache_salt)
        self.sessions.limits.check_ttl(c.ttl_s)
        tokens = self.index.pin(self.id, c.tokens, namespace, c.owner, self.owner.loop.time() + c.ttl_s)
        self.owner.pins_changed()
        self.reply(control.Done(c.request, {"pinned_tokens": tokens}))

    def unpin(self, c: control.Unpin) -> None:
        pages = self.index.unpin(self.id, c.owner)
        self.owner.pins_changed()
        self.reply(control.Done(c.request, {"pages": pages}))

    def clear(self, c: control.Clear) -> None:
        third = self.owner.third
        tiers = [Tier(number) for number in range(self.index.T)]
        if third is not None:
            tiers.append(third.tier)
        tier = None if c.tier is None else _tier(c.tier, tiers, "clear")
        if third is not None and tier is third.tier:
            limits = self.sessions.limits
            limits.begin(self, "clear")
            try:
                third.clear(lambda outcome: self.cleared_below(c.request, third.tier.name, outcome))
            except SglcacheError:
                limits.end(self, "clear")
                raise
            return
        pages = self.index.clear(tier)
        if tier is None and self.sessions.reuse is not None:
            self.sessions.reuse.clear()
        self.reply(control.Done(c.request, {"pages": {tier.name: count for tier, count in pages.items()}}))

    def cleared_below(self, request: int, tier: str, outcome: int | SglcacheError) -> None:
        self.sessions.limits.end(self, "clear")
        if isinstance(outcome, SglcacheError):
            self.fail(request, outcome)
        else:
            self.reply(control.Done(request, {"pages": {tier: outcome}}))

    def ping(self, c: control.Ping) -> None:
        self.reply(control.Done(c.request))

    def status(self, c: control.Status) -> None:
        if c.prove:
            self.sessions.limits.begin(self, "proof")
            self.owner.loop.call_soon(_Proof(self, c.request).go_on)
        else:
            self.reply(control.Done(c.request, self.sessions.status(False)))

    def dump(self, c: control.Dump) -> None:
        tier = _tier(c.tier, self.index.told_tiers, "dump")
        self.sessions.limits.begin(self, "dump")
        self.owner.loop.call_soon(_Dump(self, c.request, tier).go_on)

    def digest(self, c: control.Digest) -> None:
        self.reply(control.Done(c.request, self.sessions.digest()))

    def reuse(self, c: control.Reuse) -> None:
        self.reply(control.Done(c.request, self.sessions.forecast()))

    def explain(self, c: control.Explain) -> None:
        namespace = Namespace.of(c.lora, c.extra_key, c.cache_salt)
        steps = self.explaining.steps(c.tokens, namespace, c.limit, c.name, c.last)
        self.sessions.limits.begin(self, "explain")
        self.explaining.drive(steps, functools.partial(self.explained, c.request), self.hears)

    def explained(self, request: int, told: dict[str, Any] | SglcacheError) -> None:
        self.sessions.limits.end(self, "explain")
        if isinstance(told, SglcacheError):
            self.fail(request, told)
        else:
            self.reply(control.Done(request, told))
        self.owner.end_turn()

    def hears(self) -> bool:
        """Whether an answer still has somebody to go to."""
        if self.lost:
            self.sessions.limits.end(self, "explain")
        return not self.lost

    def set_tenant(self, c: control.SetTenant) -> None:
        limits = {key: getattr(c, key) for key in KEYS}
        written = {key: value for key, value in limits.items() if value is not None}
        self.reply(control.Done(c.request, {"tenants": self.sessions.set_tenant(c.tenant, written)}))

    def check(self, c: control.Check) -> None:
        check = self.sessions.checks().get(c.name)
        if check is None:
            raise BadRequest(f"there is no check {c.name!r}; use {', '.join(control.CHECKS)}", name=c.name)
        self.sessions.limits.begin(self, "check")
        self.owner.loop.call_soon(_Checking(self, c.request, check).go_on)

    def announce(self, c: control.Announce) -> None:
        sessions = self.sessions
        sessions.num_anew = sessions.num_anew + 1 if self.index.announcing else 0
        sessions.limits.check_count("announcements", sessions.num_anew, "max_expensive")
        self.owner.announce()
        self.reply(control.Done(c.request))

    def evict_session(self, c: control.EvictSession) -> None:
        facts = self.sessions.evict(SessionId(c.session), c.kill, f"{self.role} {self.name!r} evicted it")
        self.reply(control.Done(c.request, facts))

    # -- what a role may not do now ----------------------------------------------------------------------------

    def acquire_early(self, c: control.Acquire) -> None:
        assert self.session is not None
        have, need = len(self.session.workers), self.session.num_shards
        raise Forbidden(
            f"{have} of {need} workers are attached; acquire once every shard has its own", attached=have, shards=need
        )

    def after_the_end(self, c: control.Frame) -> None:
        assert self.session is not None
        raise SessionEnded(f"the session ended: {self.session.why}; reattach()", session=self.session.id)

    def forbidden(self, command: control.Frame) -> SglcacheError:
        kind = type(command)
        may = [role for role, handlers in HANDLERS.items() if kind in handlers]
        if self.role in may:
            return Forbidden(f"this {self.role} has said Bye: it takes no more commands", role=self.role)
        *others, last = [with_article(role) for role in may]
        who = f"{', '.join(others)} or {last}" if others else last
        return Forbidden(
            f"{with_article(self.role)} may not send {with_article(kind.__name__)}; {who} may",
            role=self.role,
            may=may,
        )

    # -- the connection -----------------------------------------------------------------------------------------

    def throw_out(self, error: SglcacheError) -> None:
        logger.warning("%r is thrown out: %s", self, error.message)
        if isinstance(error, TooSlow):
            self.sessions.num_slow += 1
        super().throw_out(error)
        if self.session is not None:
            self.sessions.end(self.session, f"its {self.who} was thrown out: {error.message}")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.sessions.lost(self)


_LOOKING: Handlers[Member] = {
    control.Peek: Member.peek,
    control.Ping: Member.ping,
    control.Status: Member.status,
    control.Dump: Member.dump,
    control.Digest: Member.digest,
    control.Reuse: Member.reuse,
    control.Explain: Member.explain,
    control.Check: Member.check,
    control.Bye: Member.bye,
}
_CHANGING: Handlers[Member] = {
    **_LOOKING,
    control.Clear: Member.clear,
    control.Announce: Member.announce,
}
_LEADING: Handlers[Member] = {
    **_CHANGING,
    control.Acquire: Member.acquire,
    control.Prefetch: Member.prefetch,
    control.Extend: Member.extend,
    control.Commit: Member.commit,
    control.Release: Member.release,
    control.Cancel: Member.cancel,
    control.CancelRequest: Member.cancel_request,
    control.Pin: Member.pin,
    control.Unpin: Member.unpin,
}
HANDLERS: dict[str, Handlers[Member]] = {
    RUNNER: _LEADING,
    SCHEDULER: _LEADING,
    WORKER: {control.Recorded: Member.recorded, control.Ping: Member.ping, control.Bye: Member.bye},
    OBSERVER: _LOOKING,
    ADMIN: {
        **_CHANGING,
        control.EvictSession: Member.evict_session,
        control.SetTenant: Member.set_tenant,
    },
}
EARLY: Handlers[Member] = {**_LEADING, control.Acquire: Member.acquire_early}
"""A scheduler's while a worker is missing."""
ENDED: dict[str, Handlers[Member]] = {
    role: {**dict.fromkeys(handlers, Member.after_the_end), control.Bye: Member.bye}
    for role, handlers in HANDLERS.items()
}
"""After the session's end. A worker's events still count: a release that waits for one gives its pages back."""
ENDED[WORKER][control.Recorded] = Member.recorded


class Sessions:
    """Owns every connection that has said hello, and what it holds of ours."""

    def __init__(
        self,
        owner: Owner,
        load_ring: LoadRing,
        offer: Offer,
        status: Callable[[bool], dict[str, Any]],
        digest: Callable[[], dict[str, Any]],
        limits: Limits,
        explaining: Explaining,
        set_tenant: Callable[[str, Mapping[str, int | str]], list[dict[str, Any]]],
        checks: Callable[[], Mapping[str, Check]] = dict,
        reuse: Reuse | None = None,
        forecast: Callable[[], dict[str, Any]] = dict,
        *,
        streams: bool = False,
    ) -> None:
        """`reuse`: who follows what is asked for, told by `forecast`. `streams`: events may be words that streams
        write; behind those nobody rings, so they are looked at now and then while any is waited for."""
        self.owner = owner
        self.explaining = explaining
        self.limits = limits
        self.load_ring = load_ring
        self.offer = offer
        self.status = status
        self.digest = digest
        self.set_tenant = set_tenant
        self.checks = checks
        self.reuse = reuse
        self._to_follow: list[tuple[Lease, bytes, int, int]] = []  # acquires of this turn, once they are answered
        if reuse is not None:
            owner.afterwards = functools.partial(self._follow_asked, reuse)
        self.forecast = forecast
        self.members: set[Member] = set()  # connected, or kept until its uses are over
        self.refusals = Refusals(owner.loop)
        self.num_attached = 0  # since the start
        self.num_deaths = 0
        self.reclaims: deque[Reclaim] = deque(maxlen=RECLAIMS)  # the last ones
        self._dying: dict[SessionId, tuple[int, float]] = {}  # (pid, when): pages are not free for some other reason
        self.num_anew = 0  # times that an announcement was begun anew before it was over
        self.event_waits = Histogram()  # seconds, to a millisecond, that named events were not done for
        self.num_slow = 0  # members thrown out, for they did not read
        self._by_id: dict[SessionId, Session] = {}
        self._by_token: dict[bytes, Session] = {}
        self._adopting: set[asyncio.Task[None]] = set()
        self._streams = streams
        self._looking: asyncio.TimerHandle | None = None
        owner.wake = self._wake
        owner.loads.tell = self._loaded

    @property
    def sessions(self) -> list[Session]:
        return list(self._by_id.values())

    # -- attaching ------------------------------------------------------------------------------------------

    def welcome(self, peer: Peer, hello: control.Hello) -> None:
        """Take over a peer that said hello: attach it, or say why not and close."""
        try:
            member = self._attach(peer, hello)
        except SglcacheError as error:
            self.refusals.refuse(peer, error)
            return
        except OSError as exc:
            if exc.errno not in NONE_LEFT:
                raise
            self.refusals.refuse(peer, out_of_descriptors())
            return
        try:
            self._send_welcome(peer, member)
        except OSError as exc:
            logger.warning("%r was gone before its welcome: %s", member, exc)
            peer.sock.close()
            member.connection_lost(exc)
            return
        self.num_attached += 1
        logger.log(logging.DEBUG if member.role in WITHOUT_SESSION else logging.INFO, "attached %r", member)
        task = self.owner.loop.create_task(self._adopt(peer, member))
        self._adopting.add(task)
        task.add_done_callback(self._adopting.discard)

    def _attach(self, peer: Peer, hello: control.Hello) -> Member:
        """Check everything before anything is changed; from the first change on nothing fails."""
        _check_hello(peer, hello, self.offer.geometry.num_shards)
        limits = self.limits
        self._check_place(peer, hello)
        limits.check_count("events", hello.num_events - 1, "max_events")
        if hello.role in (RUNNER, SCHEDULER):
            limits.check_count("sessions", len(self._by_id), "max_sessions")
        session = self._join(hello) if hello.role == WORKER else None
        member = Member(self, peer, hello)
        loop, index = self.owner.loop, self.owner.index
        if member.touches:
            memfd, doorbell = peer.fds
            ring = EventRingReader(memfd, doorbell, hello.num_events)
            peer.fds = [memfd]  # the doorbell is the ring's now
            try:
                member.load_doorbell = self.load_ring.join()
            except OSError as exc:
                ring.close()
                raise out_of_descriptors() from exc
            peer.fds = []
            close_fds([memfd])
            member.ring = ring
            loop.add_reader(ring.doorbell, member.rang)
        member.handlers = HANDLERS[member.role]
        if session is None and member.role not in WITHOUT_SESSION:
            num_shards = self.offer.geometry.num_shards if member.role == SCHEDULER else 1
            session = Session(index.open_session(num_shards), num_shards, loop.time())
            session.scheduler = member
            session.is_runner = member.role == RUNNER
            self._by_id[session.id] = self._by_token[session.token] = session
        if session is not None:
            member.session, member.id = session, session.id
            session.members.append(member)
            if member.role == SCHEDULER:
                member.handlers = EARLY
            elif member.role == WORKER:
                session.workers[member.shard] = member
                if len(session.workers) == session.num_shards and session.scheduler is not None:
                    session.scheduler.handlers = HANDLERS[SCHEDULER]
            loop.add_reader(member.pidfd, self._died, member)
        self.members.add(member)
        peer.pidfd = -1  # the member's now
        return member

    def _check_place(self, peer: Peer, hello: control.Hello) -> None:
        """Busy: there are `max_connections`. A few more are for who looks and mends, from a process that has no other:
        so whoever fills all places, an operator can see it and end it."""
        most, count = self.limits.config.max_connections, len(self.members)
        if count < most:
            return
        pids = Counter(member.pid for member in self.members)
        if hello.role in WITHOUT_SESSION and count < most + KEPT_PLACES and peer.pid not in pids:
            return
        facts, words = most_common(pids)
        raise Busy(
            f"there are {count} connections ({words}), and max_connections is {most}; close some, or raise "
            "limits.max_connections",
            connections=count,
            max_connections=most,
            holders=facts,
        )

    def _join(self, hello: control.Hello) -> Session:
        session = self._by_token.get(hello.session)
        if session is None:
            raise UnknownSession("no session has this token; take the one of the scheduler that is attached now")
        if session.ended:
            raise SessionEnded(
                f"the session ended before this worker joined it: {session.why}; attach a new scheduler",
                session=session.id,
            )
        if session.is_runner:
            raise Forbidden("a runner is its own only worker; attach it as a scheduler to have others")
        if hello.shard >= session.num_shards or hello.shard in session.workers:
            taken = sorted(session.workers)
            raise BadRequest(
                f"shard {hello.shard} can't be joined: shards are 0..{session.num_shards - 1}, and {taken} are taken",
                shard=hello.shard,
                taken=taken,
            )
        return session

    def _send_welcome(self, peer: Peer, member: Member) -> None:
        offer = self.offer
        fds: list[int] = []
        shards: Sequence[int] = ()
        if member.touches:
            shards = range(len(offer.pools)) if member.role == RUNNER else [member.shard]

        def handles(pools: Sequence[DevicePool]) -> list[control.Pool]:
            told = []
            for shard in shards:
                told.append(pools[shard].handle(shard, len(fds)))
                fds.extend(pools[shard].fds)
            return told

        pools = handles(offer.pools)
        companions = [msgspec.structs.replace(each.handle, pools=handles(each.pools)) for each in offer.companions]
        if member.touches:
            fds += [self.load_ring.fd, member.load_doorbell]
        token = b"" if member.session is None else member.session.token
        peer.send(
            control.Welcome(
                control.PROTOCOL,
                offer.epoch,
                offer.version,
                token,
                offer.geometry,
                pools,
                self.load_ring.num_slots,
                offer.dp_rank,
                offer.pp_rank,
                offer.dp_size,
                offer.pp_size,
                companions,
            ),
            fds,
        )

    async def _adopt(self, peer: Peer, member: Member) -> None:
        try:
            await self.owner.loop.connect_accepted_socket(lambda: member, peer.sock)
        except OSError as exc:
            peer.sock.close()
            member.connection_lost(exc)

    # -- ending ---------------------------------------------------------------------------------------------

    def end(self, session: Session, why: str) -> None:
        """End the session, if that has not happened yet. Its members may still say Bye."""
        if session.ended:
            return
        session.ended, session.why, session.ended_at = True, why, self.owner.loop.time()
        logger.info("session %d ends: %s", session.id, why)
        for member in session.members:
            if member.handlers:
                member.handlers = ENDED[member.role]
        index = self.owner.index
        index.end_session(session.id, why)
        if (acquires := self.explaining.acquires) is not None:
            acquires.session_ended(session.id)
        if not session.is_runner:
            for shard in range(session.num_shards):
                if shard not in session.workers:  # it never came: nobody can be using it
                    index.shard_gone(session.id, shard)
        self.owner.pins_changed()

    def shard_gone(self, member: Member, died_at: float | None = None) -> None:
        """The member's uses of its shard are over: by its death, or by its farewell's event."""
        if died_at is not None:
            self._dying[member.id] = (member.pid, died_at)
        else:
            self._dying.pop(member.id, None)  # what others left comes back by a word, not by a death
        self.owner.index.shard_gone(member.id, member.shard)
        self.drop(member)
        self._reclaimed()

    def lost(self, member: Member) -> None:
        """The member's socket is at its end, which says nothing of its process."""
        if member not in self.members:
            return
        self.owner.begin_turn()
        session = member.session
        if session is not None:
            if session.scheduler is member:
                session.scheduler = None
            self.end(session, member.cut_off)
        if member.gone or not member.touches:
            self.drop(member)
        elif session is not None:
            self.forget_idle(session)
        self.owner.end_turn()

    def forget_idle(self, session: Session) -> None:
        """An ended session that holds no page has no use to wait for: who has left it need not die to be forgotten."""
        index = self.owner.index
        known = index.sessions.get(session.id)
        if known is not None and known.leases:
            return
        for shard in range(session.num_shards):
            index.shard_gone(session.id, shard)
        for member in [member for member in session.members if member.lost]:
            self.drop(member)
        self._reclaimed()

    def _died(self, member: Member) -> None:
        """The member's process is dead, whoever holds its socket."""
        self.owner.begin_turn()
        now = time.monotonic()
        self.num_deaths += 1
        logger.info("%r died", member)
        assert member.session is not None
        why, session = f"its {member.who} died", member.session
        if session.why == member.cut_off and (known := self.owner.index.sessions.get(session.id)) is not None:
            session.why = known.why = why  # its socket's end was heard of first
        self.end(session, why)
        if member.touches:
            self.shard_gone(member, now)
        else:
            self.drop(member)
        member.abort()
        self.owner.end_turn()

    def _reclaimed(self) -> None:
        """Note of whom, of those that died, nothing is left."""
        known = self.owner.index.sessions
        for id in [id for id in self._dying if id not in known]:
            pid, died_at = self._dying.pop(id)
            self.reclaims.append(Reclaim(id, pid, died_at, time.monotonic()))

    def evict(self, id: SessionId, kill: bool, why: str) -> dict[str, Any]:
        """End a session of which no member has died or left: what it holds stays fenced while these live. The facts.

        With `kill` they are sent SIGKILL. UnknownSession: there is none of that number.
        """
        session, index = self._by_id.get(id), self.owner.index
        if session is None and id not in index.sessions:
            raise UnknownSession(f"there is no session {id}; `sglcache sessions` lists those there are", session=id)
        was_ended = session is None or session.ended
        if session is not None:
            self.end(session, why)
        killed: list[int] = []
        not_killed: dict[int, str] = {}
        for member in session.members if session is not None and kill else ():
            if member.pidfd < 0:
                continue
            try:
                signal.pidfd_send_signal(member.pidfd, signal.SIGKILL)
                killed.append(member.pid)
            except ProcessLookupError:
                pass  # it is dead, and we hear of it in this turn or the next
            except OSError as exc:
                not_killed[member.pid] = exc.strerror or str(exc)
        if killed:
            logger.warning("session %d is evicted: killed pid %s", id, ", ".join(map(str, killed)))
        holding = holdings(index).get(id)
        return {
            "session": id,
            "was_ended": was_ended,
            "pages": self._pages(holding, ended=True),
            "must_end": [_named(member) for member in self._holders(session)],
            "killed": list(dict.fromkeys(killed)),
            "not_killed": [{"pid": pid, "why": reason} for pid, reason in not_killed.items()],
        }

    def drop(self, member: Member) -> None:
        """Let go of what is kept for the member; with its socket, too, at its end, forget it. Idempotent."""
        if not member.gone:
            member.gone = True
            loop = self.owner.loop
            if member.session is not None:
                loop.remove_reader(member.pidfd)
            os.close(member.pidfd)
            member.pidfd = -1
            if member.ring is not None:
                loop.remove_reader(member.ring.doorbell)
                member.ring.close()
                member.ring = None
                self.load_ring.leave(member.load_doorbell)
                member.load_doorbell = -1
            member.waits = []
        if member.lost and member in self.members:
            self.members.remove(member)
            session = member.session
            if session is not None:
                session.members.remove(member)
                if not session.members:
                    del self._by_id[session.id], self._by_token[session.token]

    def stop_reading(self) -> None:
        """Take no more commands from anyone."""
        for member in self.members:
            member.stop_reading()

    def close(self) -> None:
        """Let go of everyone."""
        self.refusals.tell()
        if self._looking is not None:
            self._looking.cancel()
        for task in self._adopting:
            task.cancel()
        for member in list(self.members):
            self.drop(member)
            member.abort()
        self.members.clear()

    # -- answers from afar ----------------------------------------------------------------------------------

    def _wake(self, wake: Wake) -> None:
        session = self._by_id.get(wake.session)
        if session is None or (member := session.scheduler) is None:
            return  # nobody is there to be told
        result = wake.result
        if isinstance(result, Released):
            member.reply(control.Done(wake.request))
        elif isinstance(result, Committed):
            if self.reuse is not None:
                self._follow(self.reuse, result)
            _, tokens, first_page, slots, num_duplicates, reply, shares = result
            told = _told(shares) if shares else ()
            member.reply(control.CommitDone(wake.request, tokens, first_page, slots, num_duplicates, reply, told))
        elif isinstance(result, Grant):
            if (acquires := self.explaining.acquires) is not None:
                acquires.answered(wake.session, wake.request, self.owner.index.now, result)
            member.granted(wake.request, result)
        elif isinstance(result, Extended):
            member.extended(wake.request, result)
        elif isinstance(result, Prefetched):
            member.reply(control.Done(wake.request, result._asdict()))
        else:
            if (acquires := self.explaining.acquires) is not None:
                acquires.answered(wake.session, wake.request, self.owner.index.now, None, result.code)
            member.fail(wake.request, result)

    def asked(self, grant: Grant) -> None:
        """A granted acquire, for who follows what is asked for: once the turn's answers are on their way."""
        lease = self.owner.index.leases.get(grant.lease)
        if lease is not None and (tokens := lease.since(0)) is not None:
            self._to_follow.append((lease, tokens, grant.matched_tokens, grant.host_tokens))

    def _follow_asked(self, reuse: Reuse) -> None:
        for lease, tokens, matched_tokens, host_tokens in self._to_follow:
            lease.reuse = reuse.asked(tokens, lease.namespace, matched_tokens, host_tokens, self.owner.index.now)
        self._to_follow.clear()

    def _follow(self, reuse: Reuse, result: Committed) -> None:
        """A commit has taken effect: its pages are there from now on."""
        index = self.owner.index
        if self._to_follow:  # it may be of one of these
            self._follow_asked(reuse)
        lease = index.leases.get(result.lease)
        if lease is not None and lease.reuse is not None:
            reuse.committed(lease.reuse, 4 * result.committed_tokens, lease.since, index.now)

    def _loaded(self, load: Load, ok: bool) -> None:
        """A load-back is over. The ring tells of a failed one before anyone computes with what isn't there."""
        session = self._by_id.get(load.session)
        members = session.members if session is not None else []
        if self._dying:  # its pages come back in this turn
            self.owner.loop.call_soon(self._reclaimed)
        if load.place is not None:
            if not ok:
                bells = [member.load_doorbell for member in members if member.load_doorbell >= 0]
                self.load_ring.write(load.place.slot, FAILED, doorbells=bells)
        elif ok:
            if session is not None and session.scheduler is not None:
                session.scheduler.loaded_without_slot(load)
        else:  # there is no ring to tell it in, and no lease that its runner knows of
            for member in list(members):
                member.throw_out(TransferError("a load from the host failed, and the session with it; attach anew"))

    def look_later(self, after_s: float = LOOK_S) -> None:
        """An event is waited for that nobody may ring for."""
        if not self._streams:
            return
        loop = self.owner.loop
        if self._looking is not None:
            if self._looking.when() <= loop.time() + after_s:
                return
            self._looking.cancel()
        self._looking = loop.call_later(after_s, self._look)

    def _look(self) -> None:
        """At every event that is waited for; and again, the later the longer the newest of them has been waited for."""
        self._looking = None
        if self.owner.failed:
            return
        for member in list(self.members):
            ring = member.ring
            if ring is not None and any(ring.done(event, generation) for event, generation, _, _ in member.waits):
                member.rang()
        newest = max((member.waits[-1][3] for member in self.members if member.waits), default=None)
        if newest is not None:
            self.look_later(min(max(LOOK_S, (self.owner.loop.time() - newest) / 8), MAX_LOOK_S))

    # -- telling --------------------------------------------------------------------------------------------

    def describe(self) -> list[dict[str, Any]]:
        """Every session, for people: those that ended and hold something still, too, and what they wait for."""
        held, now = holdings(self.owner.index), self.owner.loop.time()
        told = [self._row(session, held.pop(session.id, None), now) for session in self._by_id.values()]
        # Nobody of it is left, and a copy from the host is still being written into its pages.
        for id, holding in held.items():
            known = self.owner.index.sessions[id]
            told.append(
                {
                    "session": id,
                    "ended": True,
                    "why": known.why,
                    "age_s": None,
                    "idle_s": None,
                    "ended_s": None,
                    **self._held(holding, ended=True),
                    "oldest_event": None,
                    "fenced_by": _loads(holding),
                    "members": [],
                }
            )
        return told

    def _row(self, session: Session, holding: Holding | None, now: float) -> dict[str, Any]:
        fenced = session.ended and holding is not None and holding.num_leases
        return {
            "session": session.id,
            "ended": session.ended,
            "why": session.why or None,
            "age_s": round(now - session.attached_at, 3),
            "idle_s": round(now - max(member.heard_at for member in session.members), 3),
            "ended_s": round(now - session.ended_at, 3) if session.ended else None,
            **self._held(holding, session.ended),
            "oldest_event": self._oldest(session, holding, now),
            "fenced_by": [*(_named(each) for each in self._holders(session)), *_loads(holding)] if fenced else [],
            "members": [
                {
                    "role": member.role,
                    "name": member.name,
                    "pid": member.pid,
                    "shard": member.shard if member.touches else None,
                    "connected": not member.lost,
                    "alive": member.alive,
                    "waits": len(member.waits),
                    "unanswered": member.num_unanswered,
                }
                for member in session.members
            ],
        }

    def _held(self, holding: Holding | None, ended: bool) -> dict[str, Any]:
        return {
            "leases": holding.num_leases if holding is not None else 0,
            "pages": self._pages(holding, ended),
            "pins": holding.num_pins if holding is not None else 0,
            "pinned_pages": holding.pinned_pages if holding is not None else 0,
            "waiting": holding.num_waiting if holding is not None else 0,
        }

    def _pages(self, holding: Holding | None, ended: bool) -> list[dict[str, Any]]:
        """What it has of each pool: `leased` or, once it ended, `fenced` are its own; `locked` are cached, and used."""
        if holding is None:
            return []
        index = self.owner.index
        return [
            {
                "resource": index.resources[cell].name,
                "tier": Tier(cell % index.T).name,
                "leased": 0 if ended else holding.own.get(cell, 0),
                "fenced": holding.own.get(cell, 0) if ended else 0,
                "locked": holding.locked.get(cell, 0),
            }
            for cell in sorted({*holding.own, *holding.locked})
        ]

    def _oldest(self, session: Session, holding: Holding | None, now: float) -> dict[str, Any] | None:
        """The event that has been waited for longest, and whose it is: a runner that hangs is known by its age."""
        named = [(since, ticket, [each.shard]) for each in session.members for _, _, ticket, since in each.waits[:1]]
        if holding is not None and holding.oldest_ticket is not None:
            since = next((since for ticket, since in session.asked if ticket == holding.oldest_ticket), None)
            if since is not None:
                named.append((since, holding.oldest_ticket, list(holding.missing)))
        if not named:
            return None
        since, ticket, shards = min(named)
        return {
            "ticket": ticket if ticket != FAREWELL else None,  # None: that of a Bye
            "age_s": round(now - since, 3),
            "shards": shards,
        }

    @staticmethod
    def _holders(session: Session | None) -> list[Member]:
        """Those whose end the pages of an ended session wait for."""
        return [member for member in session.members if member.touches and not member.gone] if session else []


def _named(member: Member) -> dict[str, Any]:
    """Whom pages wait for, and why."""
    left = any(ticket == FAREWELL for _, _, ticket, _ in member.waits)
    return {
        "pid": member.pid,
        "role": member.role,
        "name": member.name,
        "shard": member.shard,
        "why": "farewell_event" if left else "alive",
    }


def _loads(holding: Holding | None) -> list[dict[str, Any]]:
    if holding is None or not holding.num_loads:
        return []
    return [{"pid": None, "role": None, "name": None, "shard": None, "why": "load"}]


class _Dump:
    """One walk over the index, a slice a turn. The index must hold still meanwhile."""

    def __init__(self, member: Member, request: int, tier: Tier) -> None:
        self.member = member
        self.request = request
        self.tier = tier
        self.index: Index = member.index
        self.found: list[bytes] = []
        self.walk: Iterator[list[DumpedNode]] | None = None
        self.mark: tuple[int, int, int] = (0, 0, 0)
        self.seq = 0

    def go_on(self) -> None:
        index, member = self.index, self.member
        if member.lost:
            member.sessions.limits.end(member, "dump")
            return
        if self.walk is None:
            if (
                index.uncut or index.retelling
            ):  # what is queued must be on the stream, or its number would say too little
                index.cut(member.owner.clock())
                member.owner.end_turn()
                member.owner.loop.call_soon(self.go_on)
                return
            self.seq = index.next_seq - 1
            self.mark = self._now()
            self.walk = index.walk(DUMP_SLICE)
        if self._now() != self.mark:
            member.sessions.limits.end(member, "dump")
            member.fail(self.request, Changed("the index changed during the dump; try again when it is quieter"))
        elif (nodes := next(self.walk, None)) is not None:
            self.found += [node.digests for node in nodes if self.tier in node.tiers]
            member.owner.loop.call_soon(self.go_on)
        else:
            member.sessions.limits.end(member, "dump")
            member.reply(control.Done(self.request, self._facts()))
        member.owner.end_turn()

    def _now(self) -> tuple[int, int, int]:
        """Changes with presence, and with the form of the tree, which a match may change."""
        return self.index.version, self.index.tree.num_splits, self.index.tree.num_merges

    def _facts(self) -> dict[str, Any]:
        """`hashes` is int64 [num_pages], little-endian: a block's name on the stream is its digest's first 8 bytes."""
        digests = np.frombuffer(b"".join(self.found), ">i8").reshape(-1, self.index.hasher.size // 8)
        hashes = digests[:, 0].astype("<i8")
        return {"tier": self.tier.name, "seq": self.seq, "num_pages": len(hashes), "hashes": hashes.tobytes()}


class _Proof:
    """A status with the proof of the books, a slice a turn. Begun anew whenever a command changed them meanwhile."""

    def __init__(self, member: Member, request: int) -> None:
        self.member = member
        self.request = request
        self.tries = 0
        self.found: list[str] = []
        self.slices: Iterator[None] = iter(())
        self.mark: tuple[int, ...] | None = None

    def go_on(self) -> None:
        member = self.member
        if member.lost:
            member.sessions.limits.end(member, "proof")
            return
        index = member.index
        if index.revision != self.mark:
            self.tries += 1
            self.mark, self.found = index.revision, []
            self.slices = invariants.slices(index, self.found)
        if self.tries <= PROOF_TRIES and next(self.slices, _OVER) is not _OVER:
            member.owner.loop.call_soon(self.go_on)
            return
        member.sessions.limits.end(member, "proof")
        facts = member.sessions.status(False)
        # No violations are not told of where there was no proof.
        if self.tries <= PROOF_TRIES:
            facts["violations"] = self.found
        member.reply(control.Done(self.request, facts))
        member.owner.end_turn()


class _Checking:
    """A check, a slice a turn. Begun anew whenever a command changed meanwhile what it looks at."""

    def __init__(self, member: Member, request: int, check: Check) -> None:
        self.member = member
        self.request = request
        self.check = check
        self.tries = 0
        self.checked = 0
        self.found: list[str] = []
        self.slices: Iterator[int] = iter(())
        self.mark: tuple[int, ...] | None = None

    def go_on(self) -> None:
        member = self.member
        if member.lost:
            member.sessions.limits.end(member, "check")
            return
        index, owner = member.index, member.owner
        if index.uncut or index.held:  # what is queued must be on the stream and in the journal, or they lag behind
            self.mark = None
            self.tries += 1
            index.cut(owner.clock())
            owner.end_turn()
            if self.tries <= PROOF_TRIES:
                owner.loop.call_soon(self.go_on)
                return
        elif index.revision != self.mark:
            self.tries += 1
            self.mark, self.checked, self.found = index.revision, 0, []
            self.slices = self.check(self.found)
        facts: dict[str, Any]
        try:
            if self.tries > PROOF_TRIES:
                raise NotNow("commands changed what is looked at, each time before it was seen whole")
            self.checked += next(self.slices)
            owner.loop.call_soon(self.go_on)
            return
        except StopIteration:
            shown = self.found[:MAX_VIOLATIONS]
            facts = {"checked": self.checked, "violations": shown, "num_violations": len(self.found)}
        except NotNow as exc:
            facts = {"overtaken": str(exc)}
        except NotHere as exc:
            facts = {"skipped": str(exc)}
        except Exception as exc:  # it only looks: what it stumbles over is wrong, and no reason to end the rank
            logger.exception("a check failed")
            shown = [f"the check itself failed: {type(exc).__name__}: {exc}"]
            facts = {"checked": self.checked, "violations": shown, "num_violations": 1}
        member.sessions.limits.end(member, "check")
        member.reply(control.Done(self.request, facts))
        owner.end_turn()


_OVER = object()


def _check_hello(peer: Peer, hello: control.Hello, num_shards: int) -> None:
    check_version(hello.protocol)
    if hello.role not in HANDLERS:
        raise BadRequest(f"there is no role {hello.role!r}; use one of {', '.join(HANDLERS)}", role=hello.role)
    need = 2 if hello.role in (RUNNER, WORKER) else 0
    if len(peer.fds) != need:
        raise ProtocolError(f"{with_article(hello.role)} sends {need} descriptors, not {len(peer.fds)}", need=need)


def _told(shares: Sequence[Share]) -> tuple[control.WireShare, ...]:
    """Shares as a frame carries them: whose each is its place says."""
    return tuple((share.first, share.slots, share.source) for share in shares)


def _check_policy(name: str) -> None:
    """BadRequest: no such policy, whether there is a third tier or not: it may be there tomorrow."""
    if name not in control.PREFETCH_POLICIES:
        raise BadRequest(
            f"prefetch {name!r} is unknown; use {', '.join(control.PREFETCH_POLICIES)}; None is as configured",
            prefetch=name,
        )


def _tier(name: str, tiers: Sequence[Tier], verb: str) -> Tier:
    """One of `tiers`, those that this rank has for `verb`, by its name. BadRequest: none of these."""
    for tier in tiers:
        if tier.name == name:
            return tier
    *others, last = [tier.name for tier in tiers]
    there = f"{', '.join(others)} or {last}" if others else last
    raise BadRequest(f"there is no tier {name!r} to {verb} here; use {there}", tier=name)
