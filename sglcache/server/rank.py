"""A rank's life: build, start, serve, drain, stop. Start here to read the daemon.

    build   everything there is, in one function; what can refuse does so here or in start
    start   the first batch of a life, the control socket, HTTP
    serve   until SIGTERM or SIGINT
    drain   nobody new, no command; copies in flight end; the stream's last batch leaves
    stop    let go of everything

A second signal ends the process at once, by 128 + its number. An exception that nobody expected ends it with
`EXIT_FAILED`: what the index then holds is not known, so nothing more is published (law 12). Its next life begins with
AllBlocksCleared.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from sglcache import paths
from sglcache.config import Config
from sglcache.core import invariants
from sglcache.core.effects import Copy
from sglcache.core.index import Index, IndexConfig
from sglcache.errors import ConfigError, TransferError
from sglcache.memory.copier import Copier
from sglcache.memory.geometry import Geometry
from sglcache.memory.pools import DevicePools, HostPools
from sglcache.memory.rings import LoadRing
from sglcache.net.publisher import Publisher
from sglcache.server.allocator import keep_large_buffers
from sglcache.server.collector import Collector
from sglcache.server.listener import Listener
from sglcache.server.loads import Loads
from sglcache.server.numbers import Numbers
from sglcache.server.owner import Owner
from sglcache.server.sessions import Offer, Sessions
from sglcache.server.stream import build_publisher, format_of, tell_all, topic_of
from sglcache.units import TicketId, Tier
from sglcache.wire import control

if TYPE_CHECKING:
    from sglcache.server.http import HttpServer

logger = logging.getLogger("sglcache.rank")

EXIT_FAILED = 70  # sysexits' EX_SOFTWARE
DRAIN_S = 10.0  # what copies in flight get
SWITCH_INTERVAL_S = 0.0005  # how long the copier's Python may keep the loop from running; the default is ten times it
VERSION = importlib.metadata.version("sglcache")


@dataclass
class Parts:
    """What `build` made, in the order of its making."""

    numbers: Numbers
    publisher: Publisher | None
    device: DevicePools
    host: HostPools
    load_ring: LoadRing
    copier: Copier
    index: Index
    owner: Owner
    sessions: Sessions
    listener: Listener
    http: HttpServer | None


class Rank:
    """One rank of one replica, on the loop that `main` runs on."""

    def __init__(self, config: Config, offset: int = 0) -> None:
        """`offset`: pp_rank * dp_size + dp_rank, which its ports and its socket are named by."""
        self.config = config
        self.offset = offset
        self.socket = config.control.socket or paths.socket_path(offset)
        self.geometry = geometry(config)
        self.state = "starting"  # then ok, draining, stopped or failed
        self.started_at = time.time()
        self._parts: Parts | None = None
        self._ending: asyncio.Event | None = None
        self._code = 0

    @property
    def parts(self) -> Parts:
        assert self._parts is not None, "the rank is not built"
        return self._parts

    # -- the life -----------------------------------------------------------------------------------------

    async def main(self, ready: Callable[[Rank], None] = lambda rank: None) -> int:
        """The whole life; `ready` is called once clients can attach. The exit status; ConfigError: it can't start."""
        loop = asyncio.get_running_loop()
        self._ending = asyncio.Event()
        loop.set_exception_handler(self._unexpected)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        try:
            await self.start(loop)
            ready(self)
            await self._ending.wait()
            if self.state != "failed":
                await self.drain()
        finally:
            await self.stop()
        return self._code

    async def start(self, loop: asyncio.AbstractEventLoop) -> None:
        parts = self._parts = build(self, loop)
        if parts.publisher is not None:
            parts.publisher.attach(loop)
        parts.owner.start()
        if parts.http is not None:
            await parts.http.start()
        parts.listener.open()
        parts.owner.collector.start()
        self.state = "ok"
        logger.info("serving %s from %s", self.geometry, self.socket)

    async def drain(self) -> None:
        """Let what is under way end, for a while; take nothing new."""
        self.state = "draining"
        parts = self.parts
        parts.listener.close()
        parts.sessions.stop_reading()
        try:
            async with asyncio.timeout(DRAIN_S):
                await parts.owner.idle.wait()
        except TimeoutError:
            logger.warning("%d copies are still in flight after %g s", parts.owner.num_copies, DRAIN_S)
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
        if parts.http is not None:
            await parts.http.stop()
        parts.sessions.close()
        parts.owner.collector.stop()
        if parts.publisher is not None:
            parts.publisher.close()
        parts.copier.close(finish=False)
        parts.load_ring.close()
        parts.device.close()
        parts.host.close()

    def _signalled(self, number: int) -> None:
        assert self._ending is not None
        if self._ending.is_set():
            os._exit(128 + number)
        logger.info("%s: draining; another ends this at once", signal.Signals(number).name)
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
        self.state = "failed"
        self._code = EXIT_FAILED
        if self._parts is not None:
            parts = self._parts
            parts.owner.cancel()
            if parts.publisher is not None:
                parts.publisher.close(linger_s=0)
            parts.listener.close()
            parts.sessions.close()
        if self._ending is not None:
            self._ending.set()

    # -- telling ------------------------------------------------------------------------------------------

    def health(self) -> dict[str, Any]:
        return {"status": self.state, "rank": self.offset, "uptime_s": round(time.time() - self.started_at, 3)}

    def prove(self) -> list[str]:
        """Every violation of the books' laws, in words; [] if they are right. Walks everything in one go."""
        return invariants.check(self.parts.index)

    def status(self, prove: bool = False) -> dict[str, Any]:
        """For people and their scripts. With `prove`, `violations` says what is wrong with the books, slot by slot."""
        parts = self.parts
        stats = parts.index.stats()
        facts = {
            "version": VERSION,
            "protocol": control.PROTOCOL,
            "rank": self.offset,
            "pid": os.getpid(),
            "state": self.state,
            "epoch": parts.numbers.first,
            "uptime_s": time.time() - self.started_at,
            "socket": str(self.socket),
            "http": parts.http.url if parts.http is not None else None,
            "geometry": self._geometry(),
            "pools": [{**pool._asdict(), "tier": pool.tier.name} for pool in stats.pools],
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
                "loads_parked": parts.owner.loads.num_parked,
                "turns": parts.owner.num_turns,
                "collections": parts.owner.collector.num_collections,
            },
            "sessions": parts.sessions.describe(),
            "stream": self._stream(),
        }
        if prove:
            facts["violations"] = self.prove()
        return facts

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

    def server_info(self) -> dict[str, Any]:
        """`GET /server_info`: what routers read to find the stream, and what tells one life from another."""
        from sglcache.server.http import kv_events

        parts = self.parts
        stream = self._stream()
        return {
            "version": VERSION,
            "protocol": control.PROTOCOL,
            "model_name": self.config.model_name,
            "page_size": self.geometry.page_size,
            "dp_size": 1,
            "kv_events": None
            if stream is None
            else kv_events(
                stream["endpoint"],
                stream["replay_endpoint"],
                topic=stream["topic"],
                block_size=self.geometry.page_size,
            ),
            "epoch": parts.numbers.first,
            "hash": self.config.events.hash,
            "pid": os.getpid(),
            "socket": str(self.socket),
            "geometry": self._geometry(),
            "stream": stream,
        }

    def metrics(self) -> bytes:
        from sglcache.server.metrics import RankCollector, exposition

        publisher = self.parts.publisher
        info = {"version": VERSION, "hash": self.config.events.hash, "model_name": self.config.model_name}
        return exposition(
            [
                RankCollector(
                    self.offset,
                    lambda: (self.parts.index.stats(), publisher.stats() if publisher is not None else None),
                    info,
                )
            ]
        )

    def _geometry(self) -> dict[str, Any]:
        wire = self.geometry.to_wire()
        return {name: getattr(wire, name) for name in wire.__struct_fields__}

    def _stream(self) -> dict[str, Any] | None:
        publisher = self.parts.publisher
        if publisher is None:
            return None
        stats = publisher.stats()
        return {
            **{name: getattr(stats, name) for name in stats.__dataclass_fields__},
            "topic": topic_of(self.config, self.offset),
            "hash": self.config.events.hash,
            "next_seq": self.parts.index.next_seq,
        }


def geometry(config: Config) -> Geometry:
    pool = config.pool
    return Geometry(
        page_size=pool.page_size,
        num_pages=pool.num_pages,
        num_layers=pool.num_layers,
        num_kv_heads=pool.num_kv_heads,
        head_dim=pool.head_dim,
        dtype=pool.dtype,
        layout=pool.layout,
        num_shards=pool.num_shards,
        host_pages=config.host_pages,
    )


def build(rank: Rank, loop: asyncio.AbstractEventLoop) -> Parts:
    """Construct a rank. ConfigError, with nothing left open, if it can't be had."""
    config, shape, offset = rank.config, rank.geometry, rank.offset
    events = config.events
    with contextlib.ExitStack() as undo:
        numbers = _numbers(config, rank.socket, offset)
        publisher = None
        if events.enabled:
            publisher = build_publisher(config, offset)
            undo.callback(publisher.close, 0)
        device = DevicePools(shape)
        undo.callback(device.close)
        host = HostPools(shape)
        undo.callback(host.close)
        load_ring = LoadRing(config.control.num_load_slots, shape.num_layers)
        undo.callback(load_ring.close)
        index = Index(
            IndexConfig(
                page_size=shape.page_size,
                num_pages=shape.num_pages,
                host_pages=shape.host_pages,
                hash_name=events.hash,
                events=events.enabled,
                first_seq=numbers.first,
                rank=offset,
                max_batch_blocks=events.max_blocks,
                format=format_of(events),
            )
        )
        if publisher is not None:
            tell_all(publisher, index)
        tiers = {Tier.DEVICE: device.shards, Tier.HOST: host.shards}

        def copied(ticket: TicketId, ok: bool, error: TransferError | None) -> None:
            # On the copier's thread, and with the loop perhaps gone: then nobody waits for it.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(owner.copied, ticket, ok, error)

        copier = Copier(copied)
        undo.callback(copier.close, finish=False)

        def submit(copy: Copy) -> None:
            copier.submit(copy.ticket, tiers[copy.src], tiers[copy.dst], copy.src_slots, copy.dst_slots)

        owner = Owner(
            index,
            loop,
            stream=publisher,
            submit=submit,
            loads=Loads(config.control.num_load_slots),
            numbers=numbers,
            collector=Collector(),
            max_delay_s=events.max_delay_ms / 1000,
            heartbeat_s=events.heartbeat_s,
            announce_every_s=events.announce_every_s if events.enabled else 0.0,
        )
        offer = Offer(numbers.first, VERSION, shape.to_wire(), [pool.fd for pool in device.shards], shape.pool_bytes)
        sessions = Sessions(owner, load_ring, offer, rank.status, rank.digest)
        listener = Listener(loop, rank.socket, sessions.welcome)
        http = None
        if config.http.enabled:
            from sglcache.server.http import HttpServer

            http = HttpServer(rank, config.http.host, config.http.port)
        undo.pop_all()
    return Parts(numbers, publisher, device, host, load_ring, copier, index, owner, sessions, listener, http)


def _numbers(config: Config, socket: Path, offset: int) -> Numbers:
    """The state file: where it was asked for, else in the user's state folder, else beside the control socket."""
    name = f"rank-{offset}.json"
    if config.state.dir is not None:
        return Numbers(config.state.dir / name, _clock_us)
    try:
        return Numbers(paths.state_dir() / name, _clock_us)
    except ConfigError as exc:
        if not isinstance(exc.__cause__, OSError):  # it can be read, and makes no sense
            raise
        logger.warning("%s; keeping it beside the control socket, where it may be lost at a reboot", exc.message)
        return Numbers(socket.with_name(name), _clock_us)


def _clock_us() -> int:
    return time.time_ns() // 1000


def run(config: Config, ready: Callable[[Rank], None] = lambda rank: None) -> int:
    """Be a rank in this process until a signal. The exit status; ConfigError: it can't start."""
    keep_large_buffers()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Rank(config).main(ready))


def _raise_file_limit() -> None:
    """A member costs four descriptors; the soft limit of 1,024 is for select(), which nothing here uses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
