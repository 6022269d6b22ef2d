"""The third tier of a rank: between the index's effects and the threads of a store.

Its start has two halves. `open` makes the store ready. What it can't do is a reason for a daemon not to start; not so
for a rank that starts again: the store is left alone, all is a miss, and it is tried again now and then. Then, while
the rank serves already, the index is told what an exact store holds from earlier lives, a slice at a time; what is
asked of L3 until that is over waits here, so nothing that is told can have gone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from sglcache.config import Config
from sglcache.core.effects import Cancel, Fetch, Probe, Store
from sglcache.core.histograms import Histogram
from sglcache.core.l3 import L3Config
from sglcache.core.slots import SLOT_BYTES
from sglcache.errors import Busy, ClosedError, SglcacheError
from sglcache.memory.geometry import Geometry, moves
from sglcache.memory.pools import HostPools
from sglcache.server.inbox import Inbox
from sglcache.storage.build import build_store
from sglcache.storage.engine import NO_TICKET, Done, Engine
from sglcache.storage.host import HostPages, Piece
from sglcache.storage.page import Identity
from sglcache.units import TicketId, Tier

if TYPE_CHECKING:
    from sglcache.core.effects import Run
    from sglcache.server.owner import Owner

logger = logging.getLogger("sglcache.third")

CLOSE_S = 8.0  # of which Mooncake takes 2
CLEARING = 1 << 62  # tickets from here on are ours: of clears
FOR_EVER = float("inf")
RETRY_S = 10.0  # between two tries to open a store that is left alone
STUCK_S = 2.0  # a store that has not answered for so long is not asked for more


def config_of(config: Config, geometry: Geometry) -> L3Config | None:
    """What the index is to know of it."""
    storage = config.storage
    if storage.kind == "none":
        return None
    exact = storage.kind == "file"
    size = geometry.page_size
    return L3Config(
        exact=exact,
        tell=exact if storage.events is None else storage.events,
        threshold=max(1, -(-storage.prefetch_threshold // size)),
        prefetch_quota=max(1, int(geometry.host_pages * storage.prefetch_share)),
        store_quota=max(1, int(geometry.host_pages * storage.store_share)),
        part=max(1, storage.prefetch_part // (geometry.page_bytes * geometry.num_parts)),
    )


def identity_of(config: Config, geometry: Geometry, pp_rank: int) -> Identity:
    """What must be equal before the bytes of a page mean the same."""
    first = sum(config.for_stage(before).pool.num_layers for before in range(pp_rank))
    return Identity(
        model=config.model_name,
        revision=config.storage.revision,
        dtype=geometry.dtype,
        layout="page_first",  # the payload's order, whatever the pool's
        page_size=geometry.page_size,
        bigram=config.pool.bigram,
        hash_name=config.events.hash,
        first_layer=first,
        num_layers=geometry.num_layers,
        num_shards=geometry.num_shards,
        shards=(0, geometry.num_shards),
        payload_bytes=geometry.page_bytes * geometry.num_parts,
        geometry={
            "num_kv_heads": geometry.num_kv_heads,
            "head_dim": geometry.head_dim,
            "v_head_dim": geometry.v_head_dim,
            "kv_lora_rank": geometry.kv_lora_rank,
            "qk_rope_head_dim": geometry.qk_rope_head_dim,
        },
    )


def pages_of(geometry: Geometry, host: HostPools, holds: Sequence[int] = ()) -> HostPages:
    """Where a host page lies: part by part, and in each the pieces in the order that page_first has them.

    `holds`: descriptors that who writes the pages has open, see `HostPages`.
    """
    placement = geometry.placement(Tier.HOST)
    pieces = [
        Piece(part, region.offset, region.page_stride, region.num_bytes)
        for part in range(len(host.shards))
        for region, _ in moves(placement, placement)
    ]
    return HostPages(
        geometry.host_pages,
        [pool.buffer.data for pool in host.shards],
        pieces,
        [pool.fd for pool in host.shards],
        holds,
    )


class ThirdTier:
    """Owns a store and its threads; all its methods are for the loop's thread."""

    def __init__(
        self,
        config: Config,
        geometry: Geometry,
        host: HostPools,
        offset: int,
        pp_rank: int,
        holds: Sequence[int] = (),
    ) -> None:
        """The whole daemon's `config`, and the geometry of this rank. `holds` as `pages_of`."""
        self.config = config.storage
        identity, pages = identity_of(config, geometry, pp_rank), pages_of(geometry, host, holds)
        self._build = partial(build_store, config.storage, identity, pages, offset)
        store = self._build()
        assert store is not None, "there is no third tier"
        self.store = store
        self.name = config.storage.kind
        self.tier = Tier.DISK if store.exact else Tier.EXTERNAL
        told = config_of(config, geometry)
        self.told = told is not None and told.tell and config.events.enabled
        self.engine: Engine | None = None
        self.ready = False  # what it held is known
        self.broken = False  # it is left alone
        self.why: str | None = None  # it is
        self.num_stores = 0  # under way
        self.idle = asyncio.Event()  # set while there are none
        self.idle.set()
        self._owner: Owner | None = None
        self._waiting: deque[Store | Probe | Fetch | Cancel] = deque()  # until then
        self._telling: asyncio.Task[None] | None = None
        self._asked: dict[TicketId, float] = {}  # probes and fetches under way, oldest first, and since when
        self._under_way: dict[str, dict[TicketId, float]] = {"store": {}, "fetch": {}, "probe": {}}  # and since when
        self.latency = {kind: Histogram() for kind in self._under_way}  # seconds from the asking to the answer
        self.num_spared = 0  # acquires that did not ask, for it would not have answered
        self._clears: dict[int, Callable[[int | SglcacheError], None]] = {}
        self._next_clear = CLEARING

    # -- its life ------------------------------------------------------------------------------------------------

    async def open(self, first: bool) -> None:
        """Make the store ready. ConfigError, NotInstalled: the operator has to do something first.

        They are raised at the daemon's `first` start alone: later the store is left alone, and the rank serves.
        """
        try:
            await asyncio.get_running_loop().run_in_executor(None, self.store.open)
        except Exception as exc:
            if first:
                raise
            self._leave_alone(exc)

    def _leave_alone(self, exc: Exception) -> None:
        why = exc.message if isinstance(exc, SglcacheError) else f"{type(exc).__name__}: {exc}"
        if why != self.why:
            unexpected = None if isinstance(exc, SglcacheError) else exc
            logger.error("the third tier can't be opened, so it is left alone: %s", why, exc_info=unexpected)
        self.broken, self.why = True, why

    async def _open_again(self) -> None:
        """Until it can be."""
        while self.broken:
            await asyncio.sleep(RETRY_S)
            store = self._build()
            assert store is not None
            try:
                await asyncio.get_running_loop().run_in_executor(None, store.open)
            except Exception as exc:
                self._leave_alone(exc)
            else:
                self.store, self.broken, self.why = store, False, None
                logger.warning("the third tier could be opened, and is used again")

    def start(self, owner: Owner) -> None:
        """Tell the index what there is, then begin to work."""
        self._owner = owner
        self._telling = asyncio.get_running_loop().create_task(self._begin(owner))
        self._telling.add_done_callback(self._begun)

    def _begun(self, task: asyncio.Task[None]) -> None:
        """What can't be told of is not used: then all is a miss, and nothing is stored."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.error("what the third tier holds can't be read, so it is left alone: %s", error, exc_info=error)
        self.broken, self.why = True, f"what it holds can't be read: {error}"
        waiting, self._waiting = self._waiting, deque()
        for effect in waiting:
            self._miss(effect)

    async def _begin(self, owner: Owner) -> None:
        loop = asyncio.get_running_loop()
        await self._open_again()
        if self.store.exact:
            listing = self.store.listing()
            while (runs := await loop.run_in_executor(None, _next, listing)) is not None:
                owner.begin_turn()
                owner.index.l3_found(runs)
                owner.end_turn()

        inbox = Inbox(loop)

        def done(done: Done) -> None:
            inbox.say(self._done, done)

        self.engine = Engine(self.store, done, num_fetchers=self.config.num_threads)
        self.ready = True
        owner.begin_turn()
        if self.store.exact and self._has_room(owner):
            owner.index.l3_complete()
        waiting, self._waiting = self._waiting, deque()
        for effect in waiting:
            self._pass_on(self.engine, effect)
        owner.end_turn()

    def _has_room(self, owner: Owner) -> bool:
        """For all that the host has, without throwing anything out: what it threw out before is not to come again."""
        stats, pages = self.store.stats(), self.store.form.payload_bytes * owner.index.pools[1].cached
        return stats.max_bytes is None or (stats.num_bytes or 0) + pages <= stats.max_bytes

    def close(self) -> None:
        """Let go of the store. What hangs is left behind. Idempotent."""
        if self._telling is not None:
            self._telling.cancel()
        engine, self.engine = self.engine, None
        if engine is None:
            self.store.close()
        elif not engine.close(CLOSE_S):
            logger.warning("the store still works after %g s; the process ends in the midst of it", CLOSE_S)

    # -- what the index wants ----------------------------------------------------------------------------------------

    def submit(self, effect: Store | Probe | Fetch | Cancel) -> None:
        """Never waits."""
        if not isinstance(effect, Cancel):
            self._under_way[_kind(effect)][effect.ticket] = time.monotonic()
        if isinstance(effect, Store):
            self.num_stores += 1
            self.idle.clear()
        if self.engine is not None:
            self._pass_on(self.engine, effect)
        elif self.broken:
            asyncio.get_running_loop().call_soon(self._miss, effect)
        else:
            self._waiting.append(effect)

    def _miss(self, effect: Store | Probe | Fetch | Cancel) -> None:
        """Of a store that is left alone."""
        owner = self._owner
        assert owner is not None
        owner.begin_turn()
        if not isinstance(effect, Cancel):
            self._under_way[_kind(effect)].pop(effect.ticket, None)
        match effect:
            case Store(ticket, _, slots):
                self._store_over()
                owner.index.stored(ticket, bytes(len(slots) // SLOT_BYTES))
            case Fetch(ticket):
                owner.index.fetched(ticket, 0)
            case Probe(ticket):
                owner.index.probed(ticket, 0)
        owner.third_done()

    def _store_over(self) -> None:
        self.num_stores -= 1
        if not self.num_stores:
            self.idle.set()

    def _pass_on(self, engine: Engine, effect: Store | Probe | Fetch | Cancel) -> None:
        match effect:
            case Store(ticket, run, slots):
                engine.store(ticket, run, slots)
            case Fetch(ticket, run, slots):
                self._asked[ticket] = asyncio.get_running_loop().time()
                engine.fetch(ticket, run, slots)
            case Probe(ticket, run):
                self._asked[ticket] = asyncio.get_running_loop().time()
                engine.probe(ticket, run)
            case Cancel(ticket):
                engine.cancel(ticket)

    def _done(self, done: Done) -> None:
        owner = self._owner
        assert owner is not None
        if isinstance(done.error, ClosedError) or self.engine is None:
            return
        if done.error is not None:
            logger.error("%s", done.error.message, exc_info=done.error.__cause__)
        owner.begin_turn()
        index, ticket = owner.index, TicketId(done.ticket)
        self._asked.pop(ticket, None)
        if (since := self._under_way.get(done.kind, {}).pop(ticket, None)) is not None:
            self.latency[done.kind].observe(time.monotonic() - since)
        match done.kind:
            case "store":
                self._store_over()
                index.stored(ticket, done.mask, done.removed)
            case "fetch":
                index.fetched(ticket, done.num_pages, done.removed)
            case "probe":
                index.probed(ticket, done.num_pages)
            case "discard":
                assert done.ticket == NO_TICKET
                index.l3_removed(done.removed, bad=True)
            case "clear":
                index.l3_removed(done.removed)
                self._clears.pop(done.ticket)(done.error or done.num_pages)
        owner.third_done()

    def clear(self, tell: Callable[[int | SglcacheError], None]) -> None:
        """Forget all it holds, of this rank's identity; `tell` gets the pages, or why some are left.

        Busy: its work has not begun yet.
        """
        if self.engine is None:
            raise Busy("the third tier is not ready; clear it again in a moment, or see what the log says of it")
        ticket = self._next_clear = self._next_clear + 1
        self._clears[ticket] = tell
        self.engine.clear(ticket)

    # -- asking ------------------------------------------------------------------------------------------------------

    def until(self, policy: str | None, timeout_s: float | None, num_tokens: int, now: float) -> float | None:
        """Till when an acquire of so many tokens waits, as `Index.acquire` takes it. `policy` is one that there is."""
        config = self.config
        policy = config.prefetch_policy if policy is None else policy
        if policy == "none":
            return None
        if self.stuck_s(now) > STUCK_S:
            self.num_spared += 1
            return None
        if policy == "best_effort":
            return 0.0
        if policy == "wait_complete":
            return FOR_EVER
        assert policy == "timeout", policy
        if timeout_s is None:
            timeout_s = config.prefetch_timeout_s + config.prefetch_timeout_per_ki_token_s * num_tokens / 1024
        return now + timeout_s

    def stuck_s(self, now: float) -> float:
        """How long the oldest thing that it was asked for has had no answer; inf while it can't be asked.

        Who comes then is spared the wait: the first of those who wait pays for all.
        """
        if not self.store.exact and not self.store.stats().connected:
            return FOR_EVER
        return now - next(iter(self._asked.values()), now)

    def oldest(self) -> list[tuple[str, float, int]]:
        """Of stores, fetches and probes that are under way: the kind, since when the oldest is, and how many are."""
        return [(kind, next(iter(each.values())), len(each)) for kind, each in self._under_way.items() if each]

    def wrong(self) -> str | None:
        """Why it can't be used, or not be written, if so."""
        if self.broken:
            return self.why or "it is left alone"
        return self.store.stats().unwritable_why

    @property
    def busy(self) -> bool:
        """Something that it was told or asked is not over."""
        return bool(self.num_stores or self._asked or self._clears or self._waiting)

    def identity(self) -> dict[str, Any]:
        """What does not change in a life: `medium`, as routers are told of its pages; `fingerprint` of all that must be
        equal for another daemon to find them."""
        return {
            "kind": self.name,
            "medium": self.tier.medium if self.told else None,
            "fingerprint": self.store.form.fingerprint.hex(),
        }

    def facts(self) -> dict[str, Any]:
        """For people and their scripts."""
        stats, engine = self.store.stats(), self.engine
        facts: dict[str, Any] = {
            "ready": self.ready,
            "broken": self.broken,
            "why": self.why,
            "connected": stats.connected,
            "num_pages": stats.num_pages,
            "num_bytes": stats.num_bytes,
            "max_bytes": stats.max_bytes,
            "others_bytes": stats.others_bytes,
            "writable": not self.broken and stats.unwritable_why is None,
            "unwritable_since": stats.unwritable_since,
            "unwritable_why": stats.unwritable_why,
            "evicted_pages": stats.evicted_pages,
            "discarded_pages": stats.discarded_pages,
            "queued": engine.queued() if engine is not None else {},
            "spared": self.num_spared,
        }
        if engine is not None:
            counters = engine.counters
            for name, kind in (("stored", "store"), ("fetched", "fetch")):
                facts[f"{name}_pages"] = counters.pages[kind]  # type: ignore[index]
                facts[f"{name}_bytes"] = counters.bytes[kind]  # type: ignore[index]
                facts[f"{name}_seconds"] = round(counters.seconds[kind], 6)  # type: ignore[index]
            facts["cleared_pages"] = counters.pages["clear"]
            facts["misses"] = dict(counters.missed["fetch"])
            facts["not_stored"] = dict(counters.missed["store"])
        return facts


def _kind(effect: Store | Probe | Fetch) -> str:
    return type(effect).__name__.lower()


def _next(listing: Iterator[list[Run]]) -> list[Run] | None:
    return next(listing, None)
