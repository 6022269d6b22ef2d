"""A rank's life: build, start, serve, drain, stop. One process of the daemon, which the supervisor starts.

    build   everything there is, in one function; what can refuse does so here or in start
    start   the first batch of a life, the control socket
    serve   until the supervisor says Drain, or SIGTERM
    drain   nobody new, no command; copies in flight end; the stream's last batch leaves
    stop    let go of everything

The end of the supervisor ends it at once: nobody would start it again, and it would hold memory and ports that the next
daemon wants. An exception that nobody expected ends it with `EXIT_FAILED`: what the index then holds is not known, so
nothing more is published (law 12). Its next life begins with AllBlocksCleared.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.metadata
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from sglcache import config as configs
from sglcache import paths
from sglcache.compiled import FORM
from sglcache.config import Config, EvictionConfig
from sglcache.core import invariants
from sglcache.core.effects import Copy
from sglcache.core.eviction import Policy
from sglcache.core.index import Index, IndexConfig
from sglcache.core.key import Namespace
from sglcache.core.resources import Companion, MambaState, SlidingWindow
from sglcache.core.restore import Survivors, restore
from sglcache.core.tenants import TenantStats
from sglcache.core.tiering import WritePolicy
from sglcache.errors import BadRequest, ConfigError, NotInstalled, ProtocolError, SglcacheError, TransferError
from sglcache.memory.engine import CopyEngine, LoadPlace, Transfer
from sglcache.memory.filling import Filler
from sglcache.memory.geometry import FULL, WINDOW, CompanionForm, Geometry, companions_of
from sglcache.memory.journal import Journal, identity_of
from sglcache.memory.journal_form import Shape
from sglcache.memory.mapping import create_memfd, map_shared
from sglcache.memory.pools import ResourcePools
from sglcache.memory.rings import LoadRing
from sglcache.net.publisher import Publisher
from sglcache.server import checks, latencies, logs, metrics, reuse
from sglcache.server.allocator import keep_large_buffers
from sglcache.server.channel import (
    Answer,
    Ask,
    Beat,
    Channel,
    Drain,
    Explain,
    Failed,
    Keep,
    Ready,
    Refusal,
    Start,
    Tenants,
)
from sglcache.server.collector import Collector
from sglcache.server.devices import MakeEngine, devices_of
from sglcache.server.explaining import Explaining
from sglcache.server.inbox import Inbox
from sglcache.server.keeping import JOURNAL, Keeper
from sglcache.server.limits import Limits
from sglcache.server.listener import Listener
from sglcache.server.loads import Loads
from sglcache.server.looking import Looking, shows_tokens
from sglcache.server.numbers import Numbers
from sglcache.server.owner import Owner
from sglcache.server.scrubbing import Scrubbing
from sglcache.server.sessions import Offer, OfferedCompanion, Sessions
from sglcache.server.stream import build_publisher, format_of, tell_all
from sglcache.server.tenants import asked, limits_of
from sglcache.server.third import ThirdTier, config_of
from sglcache.server.watch import Watch
from sglcache.units import TicketId, Tier
from sglcache.wire import control

logger = logging.getLogger("sglcache.rank")

EXIT_FAILED = 70  # sysexits' EX_SOFTWARE
EXIT_CONFIG = 78  # sysexits' EX_CONFIG: it can't be had as it is configured
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15  # linux/prctl.h
DRAIN_S = 10.0  # what copies in flight get
CLOSE_S = 2.0  # what a piece of a copy gets that is being copied at the end; then the process ends in the midst of it
SWITCH_INTERVAL_S = (
    0.0005  # how long the copy threads' Python may keep the loop from running; the default is ten times it
)
VERSION = importlib.metadata.version("sglcache")


@dataclass
class Parts:
    """What `build` made, in the order of its making."""

    numbers: Numbers
    publisher: Publisher | None
    resources: tuple[ResourcePools, ...]  # the first, then the companions
    load_ring: LoadRing
    engine: CopyEngine
    index: Index
    owner: Owner
    sessions: Sessions
    listener: Listener
    watch: Watch
    filler: Filler | None  # while the host tier's memory is had in the background
    journal: Journal | None  # of the host tier, for the next life
    scrubbing: Scrubbing | None  # of the host tier
    keeper: Keeper
    looking: Looking


class Rank:
    """One life of one rank, on the loop that `main` runs on."""

    def __init__(
        self,
        config: Config,
        start: Start,
        channel: Channel,
        kept: dict[str, int],
        make_engine: MakeEngine | None = None,
    ) -> None:
        """`config`: the stage's. `kept`: descriptors of earlier lives by name, the rank's now.

        `make_engine`: of copies between memfds; None: the configuration's.
        """
        self.config = config
        self.make_engine = make_engine
        self.seat = start.seat
        self.socket = Path(start.seat.socket)
        self.geometry = Geometry.of(config)
        self.companions = companions_of(config, self.geometry)
        self.state = "starting"  # then ok, draining, stopped or failed
        self.started_at = time.time()
        self.floor = start.floor
        self.kept = kept
        self.tenants = dict(start.tenants)  # limits that were set, as they were written
        self._start = start
        self._channel = channel
        self._parts: Parts | None = None
        self._ending: asyncio.Event | None = None
        self._beating: asyncio.TimerHandle | None = None
        self._code = 0

    @property
    def parts(self) -> Parts:
        assert self._parts is not None, "the rank is not built"
        return self._parts

    # -- the life -----------------------------------------------------------------------------------------

    async def main(self) -> int:
        """The whole life. The exit status; ConfigError: it can't start."""
        loop = asyncio.get_running_loop()
        self._ending = asyncio.Event()
        loop.set_exception_handler(self._unexpected)
        loop.add_signal_handler(signal.SIGTERM, self._told_to_end)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        try:
            await self.start(loop)
            if self.state == "ok":
                self._channel.send(Ready(self.facts()))
                self._channel.watch(loop, self._hear)
                self._beat(loop)
            await self._ending.wait()
            if self.state != "failed":
                await self.drain()
        finally:
            if self._beating is not None:
                self._beating.cancel()
            await self.stop()
            self._channel.unwatch()
        return self._code

    async def start(self, loop: asyncio.AbstractEventLoop) -> None:
        parts = self._parts = build(self, loop)
        below = parts.owner.third
        if below is not None:
            await below.open(first=not self._start.restarts)
            if self.state == "failed":  # meanwhile: an engine's thread has lost its card
                return
        if parts.publisher is not None:
            parts.publisher.attach(loop)
        parts.owner.start()
        if below is not None:
            below.start(parts.owner)
        parts.listener.open()
        parts.owner.collector.start()
        parts.watch.stalls.start()
        if parts.scrubbing is not None:
            parts.scrubbing.start()
        self.state = "ok"
        forms = [self.geometry, *(each.form for each in self.companions)]
        logger.info("serving %s from %s; the core is %s", " and ".join(map(str, forms)), self.socket, FORM)

    async def drain(self) -> None:
        """Let what is under way end, for a while; take nothing new."""
        self.state = "draining"
        parts = self.parts
        below = parts.owner.third
        parts.listener.close()
        parts.sessions.stop_reading()
        try:
            async with asyncio.timeout(DRAIN_S):
                await parts.owner.idle.wait()
                if below is not None:
                    parts.owner.flush()
                    await below.idle.wait()
        except TimeoutError:
            stores = below.num_stores if below is not None else 0
            logger.warning(
                "%d copies and %d stores are still in flight after %g s", parts.owner.num_copies, stores, DRAIN_S
            )
        parts.owner.close()
        logger.info("drained")

    async def stop(self) -> None:
        """Let go of everything that was built. Idempotent."""
        parts, self._parts = self._parts, None
        if self.state != "failed":
            self.state = "stopped"
        if parts is None:
            return
        parts.listener.close()
        parts.sessions.close()
        parts.owner.collector.stop()
        parts.watch.stalls.stop()
        parts.looking.close()
        if parts.publisher is not None:
            parts.publisher.close()
        if parts.scrubbing is not None:
            parts.scrubbing.close()
        if parts.filler is not None:
            parts.filler.close()
        if parts.owner.third is not None:
            parts.owner.third.close()
        if not parts.engine.close(finish=False, timeout_s=CLOSE_S):
            logger.warning("a copy is still being made after %g s; the process ends in the midst of it", CLOSE_S)
        parts.load_ring.close()
        for each in parts.resources:
            each.close()
        parts.keeper.close()
        parts.numbers.close()

    def _told_to_end(self) -> None:
        assert self._ending is not None
        if not self._ending.is_set():
            logger.info("draining")
            self._ending.set()

    def _unexpected(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is None or isinstance(error, OSError):
            logger.warning("%s", context.get("message"), exc_info=error)
        else:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Fail stop: publish nothing more, say why, end."""
        if self.state == "failed":
            return
        logger.critical("fail stop: %s", error, exc_info=error)
        self._channel.send(failed(error))
        self.state = "failed"
        self._code = EXIT_FAILED
        if self._parts is not None:
            parts = self._parts
            if parts.journal is not None and not isinstance(error, TransferError):
                parts.journal.distrust()  # what it was told may be as wrong as what nobody expected
            parts.owner.fail()
            parts.owner.cancel()
            parts.looking.close()
            if parts.publisher is not None:
                parts.publisher.close(linger_s=0)
            parts.listener.close()
            parts.sessions.close()
        if self._ending is not None:
            self._ending.set()

    # -- the supervisor -----------------------------------------------------------------------------------

    def keep(self, name: str, fd: int | None) -> bool:
        """Have the supervisor hold what `fd` is for this rank's later lives, or let go of it; False: it can't now.

        The descriptor stays the caller's. The next life finds its own of the same in `kept`.
        """
        return self._channel.send(Keep(name), [fd] if fd is not None else [])

    def set_tenant(self, name: str, written: Mapping[str, int | str]) -> list[dict[str, Any]]:
        """Change limits of a tenant, for this life and later ones; what it has now. BadRequest: they can't be so."""
        index = self.parts.index
        index.set_tenant(name, asked(name, written, self.geometry))
        self.tenants[name] = {**self.tenants.get(name, {}), **written}
        if not self._channel.send(Tenants(self.tenants)):
            logger.warning("the supervisor did not hear of tenant %r: its limits are for this life alone", name)
        logger.info("tenant %r: %s", name, ", ".join(f"{key} = {value}" for key, value in written.items()))
        return [_tenant(each) for each in index.stats().tenants if each.tenant == name]

    def _hear(self) -> None:
        try:
            while (heard := self._channel.receive()) is not None:
                match heard[0]:
                    case Ask(question, "explain", params):
                        self._explain(question, params)
                    case Ask():
                        self._channel.send(self._answer(heard[0]))
                    case Drain():
                        self._told_to_end()
                    case word:
                        raise ProtocolError(f"a supervisor does not say {type(word).__name__}")
        except EOFError:
            logger.critical("the supervisor is gone")
            os._exit(EXIT_FAILED)

    def _answer(self, ask: Ask) -> Answer:
        """What the supervisor wants to know. Each is told in one go, so it is short work, and never a walk of all."""
        looking = self.parts.looking
        answers: dict[str, Callable[..., Any]] = {
            "facts": self.facts,
            "digest": self.digest,
            "metrics": self.metrics,
            "reuse": self.reuse,
            "live": looking.live,
            "tree": looking.tree,
            "node": looking.node,
            "find": looking.find,
        }
        tell = answers[ask.about]
        try:
            return Answer(ask.question, tell(**ask.params))
        except SglcacheError as exc:
            return Answer(ask.question, None, _refusal(exc))

    def _explain(self, question: int, params: Mapping[str, Any]) -> None:
        """The one answer that takes several turns."""
        sessions, who = self.parts.sessions, object()

        def done(told: dict[str, Any] | SglcacheError) -> None:
            sessions.limits.end(who, "explain")
            answer = Answer(question, None, _refusal(told)) if isinstance(told, SglcacheError) else None
            self._channel.send(answer or Answer(question, told))

        try:
            c = msgspec.convert(params, Explain)
            namespace = Namespace.of(c.lora, c.extra_key, c.cache_salt)
            shown = shows_tokens(self.config.http)
            steps = sessions.explaining.steps(c.tokens, namespace, c.limit, c.request, c.last, shown)
            sessions.limits.begin(who, "explain")
        except msgspec.ValidationError as exc:
            self._channel.send(Answer(question, None, _refusal(BadRequest(str(exc)))))
        except SglcacheError as exc:
            self._channel.send(Answer(question, None, _refusal(exc)))
        else:
            sessions.explaining.drive(steps, done, lambda: True)

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._parts is not None:
            parts = self._parts
            troubles = parts.watch.look()
            self._channel.send(Beat(self.state, parts.numbers.reserved, self.tiers(), troubles))
        self._beating = loop.call_later(self._start.beat_s, self._beat, loop)

    # -- telling ------------------------------------------------------------------------------------------

    def prove(self) -> list[str]:
        """Every violation of the books' laws, in words; [] if they are right. Walks everything in one go."""
        return invariants.check(self.parts.index)

    def checks(self) -> Mapping[str, checks.Check]:
        """What can be proved of it while it serves."""
        return checks.of(self)

    def status(self, prove: bool = False) -> dict[str, Any]:
        """For people and their scripts. With `prove`, `violations` says what is wrong with the books, slot by slot."""
        parts = self.parts
        stats, facts = parts.index.stats(), self.facts()
        facts = {
            "version": VERSION,
            "protocol": control.PROTOCOL,
            "state": self.state,
            "uptime_s": time.time() - self.started_at,
            "restarts": self._start.restarts,
            "http": self._start.http,
            **facts,
            "gauges": {
                name: getattr(stats, name)
                for name in (
                    "num_nodes",
                    "num_spaces",
                    "num_sessions",
                    "num_leases",
                    "num_fenced_leases",
                    "num_waiting",
                    "num_copies",
                    "pinned_pages",
                )
            },
            "counters": {
                **stats.counters,
                "members_attached": parts.sessions.num_attached,
                "members_died": parts.sessions.num_deaths,
                "slow_readers": parts.sessions.num_slow,
                "loads_parked": parts.owner.loads.num_parked,
                "turns": parts.owner.num_turns,
                "collections": parts.owner.collector.num_collections,
            },
            "copies": [lane._asdict() for lane in parts.engine.stats()],
            "memory": {name: {"ready_bytes": ready, "bytes": total} for name, (ready, total) in self.tiers().items()},
            "third": {**facts["third"], **parts.owner.third.facts()} if parts.owner.third is not None else None,
            "scrub": parts.scrubbing.facts() if parts.scrubbing is not None else None,
            "sessions": parts.sessions.describe(),
            "troubles": [msgspec.structs.asdict(trouble) for trouble in parts.watch.look()],
            "oldest": parts.watch.oldest,
            "loop": parts.watch.stalls.facts(),
            "reclaims": [each._asdict() for each in parts.sessions.reclaims],
            "stream": self.stream(for_ourselves=True),
        }
        if prove:
            facts["violations"] = self.prove()
        return facts

    def tiers(self) -> dict[str, tuple[int, int]]:
        """By tier, bytes of memory that the index may use now, and of all that there will be."""
        parts = self.parts
        first = parts.resources[0]
        told: dict[str, tuple[int, int]] = {}
        for pool in parts.index.stats().pools:
            if pool.resource == first.name:
                tier, device = pool.tier, pool.tier is Tier.DEVICE
                total, *more = (
                    sum(it.num_bytes for it in (each.device if device else each.host).shards)
                    for each in parts.resources
                )
                ready = pool.total * total // (first.form.num_pages if device else first.form.host_pages)
                filled = parts.filler.bytes_before if parts.filler is not None and not device else sum(more)
                told[tier.name] = (ready + filled, total + sum(more))
        return told

    def digest(self) -> dict[str, Any]:
        """What who has read every batch up to `seq` must have, by tier: blocks, and the sum of their hashes mod 2**64.

        While `announcing`, a reader who was there at its beginning has only part of it.
        """
        index = self.parts.index
        return {
            "seq": index.next_seq - 1,
            "announcing": index.announcing,
            "tiers": {tier.name: list(pair) for tier, pair in index.digest().items()},
        }

    def reuse(self) -> dict[str, Any]:
        """What the tiers hit, and what more of one would add. BadRequest: nothing is followed."""
        sessions = self.parts.sessions
        return reuse.told(sessions.reuse, self.config, self.geometry, self.parts.index, sessions.owner.loop.time())

    def facts(self) -> dict[str, Any]:
        """What /server_info says of this rank: where it is, and what tells one life from another."""
        third = self.parts.owner.third
        return {
            "rank": self.seat.offset,
            "dp_rank": self.seat.dp_rank,
            "pp_rank": self.seat.pp_rank,
            "pid": os.getpid(),
            "core": FORM.name,
            "epoch": self.parts.numbers.first,
            "socket": str(self.socket),
            "geometry": self.geometry.facts(),
            "companions": [each.facts() for each in self.companions],
            "pools": [{**pool._asdict(), "tier": pool.tier.name} for pool in self.parts.index.stats().pools],
            "tenants": [_tenant(each) for each in self.parts.index.stats().tenants],
            "stream": self.stream(),
            "third": third.identity() if third is not None else None,
        }

    def metrics(self) -> list[metrics.Family]:
        publisher, third = self.parts.publisher, self.parts.owner.third
        families = metrics.of_rank(
            self.seat.offset,
            self.parts.index.stats(),
            publisher.stats() if publisher is not None else None,
            {"version": VERSION, "hash": self.config.events.hash, "model_name": self.config.model_name},
            self.parts.engine.stats(),
            self.tiers(),
            third.facts() if third is not None else None,
            self.parts.watch.oldest,
            [trouble.what for trouble in self.parts.watch.troubles],
            self.parts.watch.stalls.longest_s,
            self.parts.sessions.num_slow,
            self.parts.scrubbing.facts() if self.parts.scrubbing is not None else None,
            latencies.of_rank(self.parts),
        )
        if (follows := self.parts.sessions.reuse) is not None:
            families += reuse.families({"rank": str(self.seat.offset)}, follows, self.reuse())
        return families

    def stream(self, for_ourselves: bool = False) -> dict[str, Any] | None:
        """Of the event stream; None: it is off.

        `for_ourselves`: for a peer of the control socket, who is of our user and may know the public key.
        """
        publisher = self.parts.publisher
        if publisher is None:
            return None
        stats = publisher.stats()
        curve = publisher.curve
        return {
            **{name: getattr(stats, name) for name in stats.__dataclass_fields__},
            "curve": None if curve is None else "listed keys" if curve.allowed is not None else "every key",
            **({"curve_server_key": curve.public.decode()} if curve is not None and for_ourselves else {}),
            "topic": self.seat.topic,
            "hash": self.config.events.hash,
            "next_seq": self.parts.index.next_seq,
        }


def _tenant(stats: TenantStats) -> dict[str, Any]:
    return {**stats._asdict(), "tier": stats.tier.name}


def policy_of(config: EvictionConfig, name: str) -> Policy:
    return Policy(name, config.protected_threshold, config.next_prompt_estimate, config.threshold)


def _companion(form: CompanionForm, config: Config) -> Companion:
    """As the index has it."""
    resource: SlidingWindow | MambaState
    if form.kind == WINDOW:
        resource = SlidingWindow(form.window_pages)
    else:
        assert config.mamba is not None
        resource = MambaState(config.mamba.max_states_per_path)
    return Companion(resource, form.form.num_pages, form.form.host_pages)


def build(rank: Rank, loop: asyncio.AbstractEventLoop) -> Parts:
    """Construct a rank. ConfigError, with nothing left open, if it can't be had."""
    config, shape, seat = rank.config, rank.geometry, rank.seat
    events, observe = config.events, config.observe
    with contextlib.ExitStack() as undo:
        numbers = _numbers(config, rank.socket, seat.offset, rank.floor)
        undo.callback(numbers.close)
        publisher = None
        if events.enabled:
            publisher = build_publisher(config, seat)
            undo.callback(publisher.close, 0)
        keeper = Keeper(config.host.keep_path, seat.offset, rank.kept, rank.keep)
        undo.callback(keeper.close)
        source = keeper.open if config.host.keep else create_memfd
        devices = devices_of(config, seat.dp_rank, seat.pp_rank, rank.make_engine)
        resources = []
        for name, form in ((FULL, shape), *((each.kind, each.form) for each in rank.companions)):
            resources.append(ResourcePools(name, form, source, devices.pool))
            undo.callback(resources[-1].close)
        first, *others = resources
        fills = config.host.populate or devices.pins
        journal, survivors = _journal(rank, keeper)
        load_ring = LoadRing(config.control.num_load_slots, shape.load_layers)
        undo.callback(load_ring.close)
        index = Index(
            IndexConfig(
                page_size=shape.page_size,
                num_pages=shape.num_pages,
                host_pages=shape.host_pages,
                host_ready=_usable(first, survivors, devices.pins) if fills else None,
                hash_name=events.hash,
                events=events.enabled,
                first_seq=numbers.first,
                rank=seat.offset,
                max_batch_blocks=events.max_blocks,
                format=format_of(config),
                bigram=config.pool.bigram,
                eviction=policy_of(config.eviction, config.eviction.device),
                host_eviction=policy_of(config.eviction, config.eviction.host),
                write_policy=WritePolicy(config.host.write_policy, config.host.write_threshold),
                load_back_threshold=config.host.load_back_threshold,
                load_back_quota=-(-config.host.load_back_quota // shape.page_size),
                l3=config_of(config, shape),
                companions=tuple(_companion(each, config) for each in rank.companions),
                tenants=limits_of(config, shape, rank.tenants),
                journal=journal is not None,
                max_waiting=config.limits.max_waiting,
                max_waiting_of_session=config.limits.max_waiting_per_session,
                max_leases=config.limits.max_leases_per_session,
                max_pinned_fraction=config.limits.max_pinned_fraction,
                max_pins=config.limits.max_pins,
                now=loop.time(),
                departures=observe.departures,
                departed_bytes=observe.max_size,
            )
        )
        if journal is not None and survivors is not None:
            restored = restore(index, survivors)
            journal.taken(survivors, restored)
            count = len(restored.slots[0])
            logger.info("%d pages of the life before are on the host", count)
            if count < journal.num_found:
                logger.warning(
                    "%d more are not: their rows, or those above them, are damaged", journal.num_found - count
                )
        if publisher is not None:
            tell_all(publisher, index, lambda: owner.hurry())
        loads = Loads(config.control.num_load_slots)

        inbox = Inbox(loop)

        def tell(callback: Callable[..., None], *arguments: object) -> None:
            # From another thread, and with the loop perhaps gone: then nobody waits for it.
            with contextlib.suppress(RuntimeError):
                inbox.say(callback, *arguments)

        def copied(ticket: TicketId, ok: bool, error: TransferError | None) -> None:
            tell(owner.copied, ticket, ok, error)

        def loaded(load: LoadPlace, first: int, stop: int) -> None:
            load_ring.write(load.slot, load.generation, first, stop)

        def lost(error: BaseException) -> None:
            owner.fail()  # at once: the loop may be about to publish
            tell(rank.fail, error)

        def submit(copy: Copy) -> None:
            place = None if copy.lease is None else loads.place(copy.ticket)
            engine.submit(Transfer(copy.ticket, copy.src, copy.dst, copy.src_slots, copy.dst_slots, place, copy.more))

        below = None
        if index.l3 is not None:
            below = ThirdTier(config, shape, first.host, seat.offset, seat.pp_rank, keeper.holds)
            undo.callback(below.close)
        owner = Owner(
            index,
            loop,
            stream=publisher,
            submit=submit,
            loads=loads,
            numbers=numbers,
            collector=Collector(),
            max_delay_s=events.max_delay_ms / 1000,
            heartbeat_s=events.heartbeat_s,
            announce_every_s=events.announce_every_s if events.enabled else 0.0,
            third=below,
            note=journal.note if journal is not None else None,
            lost=rank.fail,
        )
        engine = devices.engine(config, resources, copied, loaded, lost)  # whose threads may tell of something at once
        undo.callback(engine.close, finish=False)
        offer = Offer(
            numbers.first,
            VERSION,
            shape.to_wire(),
            first.device.shards,
            seat.dp_rank,
            seat.pp_rank,
            config.parallel.dp_size,
            config.parallel.pp_size,
            [
                OfferedCompanion(each.to_wire(), it.device.shards)
                for each, it in zip(rank.companions, others, strict=True)
            ],
        )
        scrubbing = None
        if journal is not None and config.host.scrub_rate:
            rate = config.host.scrub_rate
            scrubbing = Scrubbing(resources, journal, rate, index, owner, tell, rank.fail)
            undo.callback(scrubbing.close)
        limits = Limits(config.limits)
        sessions = Sessions(
            owner,
            load_ring,
            offer,
            rank.status,
            rank.digest,
            limits,
            Explaining(owner, observe.requests, observe.max_size, shape.page_bytes * shape.num_parts),
            rank.set_tenant,
            rank.checks,
            reuse.made(config, index),
            rank.reuse,
            streams=devices.streams,
        )
        listener = Listener(loop, rank.socket, sessions.welcome, sessions.refusals)
        filler = None
        if fills and first.host.shards:
            before = [each.host.shards for each in others if each.host.shards]
            pin = devices.pin if devices.pins else None
            filler = Filler(first.host.shards, lambda num_pages: tell(owner.host_ready, num_pages), before, pin)
            undo.callback(filler.close)
        watch = Watch(
            config.watch,
            loop,
            index=index,
            sessions=sessions,
            copies=engine.stats,
            publisher=publisher,
            owner=owner,
            third=below,
            scrubbing=scrubbing,
            filler=filler,
            refusals=sessions.refusals,
        )
        looking = Looking(
            index, owner, sessions, watch, engine.stats, rank.stream, show_tokens=shows_tokens(config.http)
        )
        undo.pop_all()
    return Parts(
        numbers,
        publisher,
        tuple(resources),
        load_ring,
        engine,
        index,
        owner,
        sessions,
        listener,
        watch,
        filler,
        journal,
        scrubbing,
        keeper,
        looking,
    )


def _refusal(error: SglcacheError) -> Refusal:
    return Refusal(error.code, error.message, error.facts)


def _journal(rank: Rank, keeper: Keeper) -> tuple[Journal | None, Survivors | None]:
    """The journal of the host tier, where one is kept, and what the lives before have left in it."""
    config, shape = rank.config, rank.geometry
    if not (config.host.keep and shape.host_pages):
        return None, None
    forms = [shape, *(each.form for each in rank.companions)]
    rows = Shape.of(shape.page_size, config.pool.bigram, forms)
    # The device's pools are new with each life, so how large they are is no matter.
    facts = [{**form.facts(), "num_pages": 0, "layout": ""} for form in forms]
    windows = [(each.kind, each.window) for each in rank.companions]
    identity = identity_of(config.model_name, facts, windows, list(keeper.identities))
    fd = keeper.open(JOURNAL, rows.num_bytes)
    try:
        keeper.hold(fd)
        journal = Journal(map_shared(fd, rows.num_bytes, ours=True), rows, identity)
    finally:
        os.close(fd)
    return journal, journal.load()


def _usable(first: ResourcePools, survivors: Survivors | None, pins: bool) -> int | None:
    """How many host pages have memory at the start of a life that has the rest of it populated; None: all.

    `pins`: none is pinned yet. What survived is used all the same, the slower way, until it is.
    """
    pools = first.host.shards
    if not pins and all(os.fstat(pool.fd).st_blocks * 512 >= pool.num_bytes for pool in pools):
        return None
    if survivors is None or not len(survivors.full.slots):
        return 0
    return int(survivors.full.slots.max()) + 1


def _numbers(config: Config, socket: Path, offset: int, floor: int) -> Numbers:
    """The state file: where it was asked for, else in the user's state folder, else beside the control socket."""
    name = f"rank-{offset}.json"
    if config.state.dir is not None:
        return Numbers(config.state.dir / name, _clock_us, floor=floor)
    try:
        return Numbers(paths.state_dir() / name, _clock_us, floor=floor)
    except ConfigError as exc:
        if not isinstance(exc.__cause__, OSError):  # it can be read, and makes no sense, or it is another daemon's
            raise
        logger.warning("%s; keeping it beside the control socket, where it may be lost at a reboot", exc.message)
        return Numbers(socket.with_name(name), _clock_us, floor=floor)


def _clock_us() -> int:
    return time.time_ns() // 1000


_SIGNALS = (signal.SIGTERM, signal.SIGINT)  # which the supervisor has held back from a process that is not ready yet


def serve(fd: int, make_engine: MakeEngine | None = None) -> int:
    """Be the rank that the supervisor at the other end of `fd` wants, in this process. The exit status."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a rank that hangs can't see the channel's end
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the supervisor's, who says Drain
    channel = Channel(socket.socket(fileno=fd))
    code = EXIT_FAILED
    try:
        word, fds = channel.receive(wait=True) or (None, [])
        if not isinstance(word, Start):
            raise ProtocolError(f"a supervisor says Start first, not {type(word).__name__}")
        prctl(PR_SET_NAME, f"sglcache-rank-{word.seat.offset}"[:15].encode(), 0, 0, 0)
        logs.begin(word.log_level, logs.wanted_by(word.config), word.seat.offset)
        keep_large_buffers()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        raise_file_limit()
        config = configs.parse(word.config).for_stage(word.seat.pp_rank)
        rank = Rank(config, word, channel, dict(zip(word.kept, fds, strict=True)), make_engine)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(rank.main())
    except EOFError:
        pass  # the supervisor is gone before it said anything
    except (ConfigError, NotInstalled) as exc:
        channel.send(failed(exc))
        code = EXIT_CONFIG
    except msgspec.DecodeError as exc:
        channel.send(Failed("protocol", f"{exc}; was sglcache updated while it ran? Start the daemon again", {}))
    except BaseException as exc:
        logger.critical("%s", exc, exc_info=exc)
        channel.send(failed(exc))
    channel.close()
    return code


def failed(error: BaseException) -> Failed:
    if isinstance(error, SglcacheError):
        return Failed(error.code, error.message, error.facts)
    return Failed("fail_stop", f"{type(error).__name__}: {error}", {})


def raise_file_limit() -> None:
    """A member costs several; the soft limit of 1,024 is for select(), which nothing here uses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
