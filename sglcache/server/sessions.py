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
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from sglcache.core import invariants
from sglcache.core.effects import Committed, Extended, Grant, Prefetched, Released, Share, Wake
from sglcache.core.index import DumpedNode, Index
from sglcache.core.key import ROOT, Namespace
from sglcache.errors import (
    BadRequest,
    Changed,
    Forbidden,
    ProtocolError,
    SessionEnded,
    SglcacheError,
    TransferError,
    Unavailable,
    UnknownSession,
    with_article,
)
from sglcache.memory.engine import LoadPlace
from sglcache.memory.rings import FAILED, EventRingReader, LoadRing
from sglcache.server.connection import Connection, Handlers
from sglcache.server.listener import Peer, check_version, close_fds, refuse
from sglcache.server.loads import Load
from sglcache.server.owner import Owner
from sglcache.units import LeaseId, SessionId, Tier
from sglcache.wire import control

logger = logging.getLogger("sglcache.sessions")

MAX_MEMBERS = 4096
MAX_WAITS = 1 << 16  # events of one member that are named and not done
TOKEN_BYTES = 16  # of a session's token
DUMP_SLICE = 2000  # nodes
PROOF_TRIES = 100  # of a proof that commands keep overtaking
FAREWELL = -1  # the ticket of a Bye

RUNNER, SCHEDULER, WORKER, OBSERVER = "runner", "scheduler", "worker", "observer"


class OfferedCompanion(NamedTuple):
    """A companion in every Welcome."""

    handle: control.CompanionHandle  # without pools
    pool_fds: list[int]  # one per shard
    pool_bytes: int


class Offer(NamedTuple):
    """What every Welcome says."""

    epoch: int
    version: str
    geometry: control.Geometry
    pool_fds: list[int]  # one per shard
    pool_bytes: int
    dp_rank: int
    pp_rank: int
    dp_size: int
    pp_size: int
    companions: Sequence[OfferedCompanion] = ()


class Session:
    """The daemon's record of one runner. Ended once; forgotten when no member is left."""

    def __init__(self, id: SessionId, num_shards: int) -> None:
        self.id = id
        self.token = os.urandom(TOKEN_BYTES)
        self.num_shards = num_shards
        self.scheduler: Member | None = None  # or the runner; None once its socket is at its end
        self.members: list[Member] = []
        self.workers: dict[int, Member] = {}  # by shard; of a runner none
        self.is_runner = False
        self.ended = False


class Member(Connection):
    """One connection of a session, or an observer's."""

    def __init__(self, sessions: Sessions, peer: Peer, hello: control.Hello) -> None:
        super().__init__(sessions.owner)
        self.sessions = sessions
        self.index: Index = sessions.owner.index
        self.role = hello.role
        self.name = hello.client
        self.pid = peer.pid
        self.pidfd = peer.pidfd
        self.touches = hello.role in (RUNNER, WORKER)
        self.shard = hello.shard if hello.role == WORKER else 0
        self.session: Session | None = None
        self.id = SessionId(0)  # the session's, for the hot path
        self.ring: EventRingReader | None = None
        self.load_doorbell = -1
        self.waits: list[tuple[int, int, int]] = []  # (event, generation, ticket) named and not done
        self.gone = False  # nothing more will come of it: its uses are over, and it is watched no longer

    def __repr__(self) -> str:
        shard = f" of shard {self.shard}" if self.role == WORKER else ""
        return f"{self.role}{shard} {self.name!r} (pid {self.pid}, session {self.id})"

    # -- the runner's journey -------------------------------------------------------------------------------

    def acquire(self, c: control.Acquire) -> None:
        namespace = ROOT
        if not (c.lora is None and c.extra_key is None and c.cache_salt is None):
            namespace = Namespace.of(c.lora, c.extra_key, c.cache_salt)
        third = self.owner.third
        fetch = None
        if c.prefetch is not None:
            _check_policy(c.prefetch)
        if third is not None:
            fetch = third.until(c.prefetch, c.prefetch_timeout_s, len(c.tokens) >> 2, self.owner.loop.time())
        grant = self.index.acquire(
            self.id,
            c.request,
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
        )
        if grant is not None:
            self.granted(c.request, grant)
        elif third is not None:
            self.owner.third_asked()

    def prefetch(self, c: control.Prefetch) -> None:
        namespace = Namespace.of(c.lora, c.extra_key, c.cache_salt)
        third, until = self.owner.third, None
        if c.policy is not None:
            _check_policy(c.policy)
        if third is not None:
            until = third.until(c.policy, c.timeout_s, len(c.tokens) >> 2, self.owner.loop.time())
        if until is None:  # nobody is to be asked
            matched = self.index.peek(c.tokens, namespace).matched_tokens
            self.reply(control.Done(c.request, Prefetched(matched, 0)._asdict()))
            return
        done = self.index.prefetch(self.id, c.request, c.tokens, namespace, until)
        if done is not None:
            self.reply(control.Done(c.request, done._asdict()))
        self.owner.third_asked()

    def extend(self, c: control.Extend) -> None:
        extended = self.index.extend(self.id, c.request, c.items)
        if extended is not None:
            self.extended(c.request, extended)

    def extended(self, request: int, extended: Extended) -> None:
        results = [
            result if isinstance(result, bytes) else control.Fault(result.code, result.message, result.facts)
            for result in extended.results
        ]
        self.reply(control.Extended(request, results, list(extended.shares)))

    def granted(self, request: int, grant: Grant) -> None:
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
        self.index.commit(self.id, c.request, lease, c.ticket, seen=c.seen, tokens=c.tokens, ends=c.ends, floor=c.floor)
        if done:
            self.event_over(c.ticket)
        elif self.touches:
            self.waits.append((c.event, c.generation, c.ticket))

    def release(self, c: control.Release) -> None:
        done = self.event_done(c.event, c.generation)
        lease: Any = c.lease
        self.index.release(self.id, c.request, lease, c.ticket, seen=c.seen, discard=c.discard)
        if done:
            self.event_over(c.ticket)
        elif self.touches:
            self.waits.append((c.event, c.generation, c.ticket))

    def cancel(self, c: control.Cancel) -> None:
        if self.index.cancel(self.id, c.request, LeaseId(c.lease)):
            self.reply(control.Done(c.request))

    def recorded(self, c: control.Recorded) -> None:
        if self.event_done(c.event, c.generation):
            self.event_over(c.ticket)
        else:
            self.waits.append((c.event, c.generation, c.ticket))

    def bye(self, c: control.Bye) -> None:
        done = self.event_done(c.event, c.generation)
        logger.debug("%r says goodbye", self)
        self.handlers = {}
        self.reply(control.Done(c.request))
        if self.session is not None:
            self.sessions.end(self.session)
        if not self.touches:
            self.sessions.drop(self)
        elif done:
            self.event_over(FAREWELL)
        else:
            self.waits.append((c.event, c.generation, FAREWELL))

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
            event, generation, ticket = wait
            if ring.done(event, generation):
                over.append(ticket)
            else:
                self.waits.append(wait)
        for ticket in over:
            self.event_over(ticket)
        self.owner.end_turn()

    # -- looking, pinning, clearing --------------------------------------------------------------------------

    def peek(self, c: control.Peek) -> None:
        peeked = self.index.peek(c.tokens, Namespace.of(c.lora, c.extra_key, c.cache_salt))
        self.reply(control.Done(c.request, peeked._asdict()))

    def pin(self, c: control.Pin) -> None:
        namespace = Namespace.of(c.lora, c.extra_key, c.cache_salt)
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
            third.clear(lambda outcome: self.cleared_below(c.request, third.tier.name, outcome))
            return
        pages = self.index.clear(tier)
        self.reply(control.Done(c.request, {"pages": {tier.name: count for tier, count in pages.items()}}))

    def cleared_below(self, request: int, tier: str, outcome: int | SglcacheError) -> None:
        if isinstance(outcome, SglcacheError):
            self.fail(request, outcome)
        else:
            self.reply(control.Done(request, {"pages": {tier: outcome}}))

    def ping(self, c: control.Ping) -> None:
        self.reply(control.Done(c.request))

    def status(self, c: control.Status) -> None:
        if c.prove:
            self.owner.loop.call_soon(_Proof(self, c.request).go_on)
        else:
            self.reply(control.Done(c.request, self.sessions.status(False)))

    def dump(self, c: control.Dump) -> None:
        tier = _tier(c.tier, self.index.told_tiers, "dump")
        self.owner.loop.call_soon(_Dump(self, c.request, tier).go_on)

    def digest(self, c: control.Digest) -> None:
        self.reply(control.Done(c.request, self.sessions.digest()))

    def announce(self, c: control.Announce) -> None:
        self.owner.announce()
        self.reply(control.Done(c.request))

    # -- what a role may not do now ----------------------------------------------------------------------------

    def acquire_early(self, c: control.Acquire) -> None:
        assert self.session is not None
        have, need = len(self.session.workers), self.session.num_shards
        raise Forbidden(
            f"{have} of {need} workers are attached; acquire once every shard has its own", attached=have, shards=need
        )

    def after_the_end(self, c: control.Frame) -> None:
        raise SessionEnded("the session ended: a member died or left; say Bye, close, and attach anew")

    # -- the connection -----------------------------------------------------------------------------------------

    def throw_out(self, error: SglcacheError) -> None:
        logger.warning("%r is thrown out: %s", self, error.message)
        super().throw_out(error)
        if self.session is not None:
            self.sessions.end(self.session)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.sessions.lost(self)


_LOOKING: Handlers[Member] = {
    control.Peek: Member.peek,
    control.Clear: Member.clear,
    control.Ping: Member.ping,
    control.Status: Member.status,
    control.Dump: Member.dump,
    control.Digest: Member.digest,
    control.Announce: Member.announce,
    control.Bye: Member.bye,
}
_LEADING: Handlers[Member] = {
    **_LOOKING,
    control.Acquire: Member.acquire,
    control.Prefetch: Member.prefetch,
    control.Extend: Member.extend,
    control.Commit: Member.commit,
    control.Release: Member.release,
    control.Cancel: Member.cancel,
    control.Pin: Member.pin,
    control.Unpin: Member.unpin,
}
HANDLERS: dict[str, Handlers[Member]] = {
    RUNNER: _LEADING,
    SCHEDULER: _LEADING,
    WORKER: {control.Recorded: Member.recorded, control.Ping: Member.ping, control.Bye: Member.bye},
    OBSERVER: _LOOKING,
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
    ) -> None:
        self.owner = owner
        self.load_ring = load_ring
        self.offer = offer
        self.status = status
        self.digest = digest
        self.members: set[Member] = set()  # connected, or kept until its uses are over
        self.num_attached = 0  # since the start
        self.num_deaths = 0
        self._by_id: dict[SessionId, Session] = {}
        self._by_token: dict[bytes, Session] = {}
        self._adopting: set[asyncio.Task[None]] = set()
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
            refuse(peer, error)
            return
        try:
            self._send_welcome(peer, member)
        except OSError as exc:
            logger.warning("%r was gone before its welcome: %s", member, exc)
            peer.sock.close()
            member.connection_lost(exc)
            return
        self.num_attached += 1
        logger.log(logging.DEBUG if member.role == OBSERVER else logging.INFO, "attached %r", member)
        task = self.owner.loop.create_task(self._adopt(peer, member))
        self._adopting.add(task)
        task.add_done_callback(self._adopting.discard)

    def _attach(self, peer: Peer, hello: control.Hello) -> Member:
        """Check everything before anything is changed; from the first change on nothing fails."""
        _check_hello(peer, hello, self.offer.geometry.num_shards)
        if len(self.members) >= MAX_MEMBERS:
            raise BadRequest(f"{len(self.members)} members are attached; no more are taken", members=len(self.members))
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
                raise Unavailable(f"this daemon is out of descriptors: {exc}") from exc
            peer.fds = []
            close_fds([memfd])
            member.ring = ring
            loop.add_reader(ring.doorbell, member.rang)
        member.handlers = HANDLERS[member.role]
        if session is None and member.role != OBSERVER:
            num_shards = self.offer.geometry.num_shards if member.role == SCHEDULER else 1
            session = Session(index.open_session(num_shards), num_shards)
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

    def _join(self, hello: control.Hello) -> Session:
        session = self._by_token.get(hello.session)
        if session is None:
            raise UnknownSession("no session has this token; take the one of the scheduler that is attached now")
        if session.ended:
            raise SessionEnded("the session ended before this worker joined it; attach a new scheduler")
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
            shards = range(len(offer.pool_fds)) if member.role == RUNNER else [member.shard]

        def handles(pool_fds: list[int], pool_bytes: int) -> list[control.PoolHandle]:
            first = len(fds)
            fds.extend(pool_fds[shard] for shard in shards)
            return [control.PoolHandle(shard, pool_bytes, first + i) for i, shard in enumerate(shards)]

        pools = handles(offer.pool_fds, offer.pool_bytes)
        companions = [
            msgspec.structs.replace(each.handle, pools=handles(each.pool_fds, each.pool_bytes))
            for each in offer.companions
        ]
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

    def end(self, session: Session) -> None:
        """A member is gone: end the session, if that has not happened yet. Its other members may still say Bye."""
        if session.ended:
            return
        session.ended = True
        logger.info("session %d ends", session.id)
        for member in session.members:
            if member.handlers:
                member.handlers = ENDED[member.role]
        index = self.owner.index
        index.end_session(session.id)
        if not session.is_runner:
            for shard in range(session.num_shards):
                if shard not in session.workers:  # it never came: nobody can be using it
                    index.shard_gone(session.id, shard)
        self.owner.pins_changed()

    def shard_gone(self, member: Member) -> None:
        """The member's uses of its shard are over: by its death, or by its farewell's event."""
        self.owner.index.shard_gone(member.id, member.shard)
        self.drop(member)

    def lost(self, member: Member) -> None:
        """The member's socket is at its end, which says nothing of its process."""
        if member not in self.members:
            return
        session = member.session
        if session is not None:
            if session.scheduler is member:
                session.scheduler = None
            self.end(session)
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

    def _died(self, member: Member) -> None:
        """The member's process is dead, whoever holds its socket."""
        self.num_deaths += 1
        logger.info("%r died", member)
        assert member.session is not None
        self.end(member.session)
        if member.touches:
            self.shard_gone(member)
        else:
            self.drop(member)
        member.abort()
        self.owner.end_turn()

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
            _, tokens, first_page, slots, num_duplicates, reply, shares = result
            told = _told(shares) if shares else ()
            member.reply(control.CommitDone(wake.request, tokens, first_page, slots, num_duplicates, reply, told))
        elif isinstance(result, Grant):
            member.granted(wake.request, result)
        elif isinstance(result, Extended):
            member.extended(wake.request, result)
        elif isinstance(result, Prefetched):
            member.reply(control.Done(wake.request, result._asdict()))
        else:
            member.fail(wake.request, result)

    def _loaded(self, load: Load, ok: bool) -> None:
        """A load-back is over. The ring tells of a failed one before anyone computes with what isn't there."""
        session = self._by_id.get(load.session)
        members = session.members if session is not None else []
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

    # -- telling --------------------------------------------------------------------------------------------

    def describe(self) -> list[dict[str, Any]]:
        """Every session, for people."""
        leases = self.owner.index.sessions
        return [
            {
                "session": session.id,
                "ended": session.ended,
                "leases": len(leases[session.id].leases) if session.id in leases else 0,
                "members": [
                    {
                        "role": member.role,
                        "name": member.name,
                        "pid": member.pid,
                        "shard": member.shard if member.touches else None,
                        "connected": not member.lost,
                        "waits": len(member.waits),
                    }
                    for member in session.members
                ],
            }
            for session in self._by_id.values()
        ]


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
            member.fail(self.request, Changed("the index changed during the dump; try again when it is quieter"))
        elif (nodes := next(self.walk, None)) is not None:
            self.found += [node.digests for node in nodes if self.tier in node.tiers]
            member.owner.loop.call_soon(self.go_on)
        else:
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
            return
        index = member.index
        if index.revision != self.mark:
            self.tries += 1
            self.mark, self.found = index.revision, []
            self.slices = invariants.slices(index, self.found)
        if self.tries <= PROOF_TRIES and next(self.slices, _OVER) is not _OVER:
            member.owner.loop.call_soon(self.go_on)
            return
        facts = member.sessions.status(False)
        # No violations are not told of where there was no proof.
        if self.tries <= PROOF_TRIES:
            facts["violations"] = self.found
        member.reply(control.Done(self.request, facts))
        member.owner.end_turn()


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
