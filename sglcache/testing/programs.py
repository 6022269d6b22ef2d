"""Random programs over an index: what runners, copies and routers may do next, at any moment, and one step of it.

The choices come from a `Chooser`, so the same actions serve hypothesis (which shrinks) and a seeded generator (which
is fast, and the same on every machine).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from sglcache.core.effects import Extended
from sglcache.core.eviction import POLICIES, Policy
from sglcache.core.key import ROOT, Namespace
from sglcache.core.l3 import L3Config
from sglcache.core.limits import Limits
from sglcache.core.tiering import WRITE_POLICIES, WritePolicy
from sglcache.errors import BadRequest, SessionEnded, SglcacheError, UnknownLease, UnknownSession
from sglcache.testing.model import DEVICE, CopyModel, Item, LeaseModel
from sglcache.testing.pages import TOKEN_BYTES
from sglcache.testing.rig import Rig, Runner
from sglcache.units import LeaseId, SessionId, TicketId, Tier
from sglcache.wire.control import Extension

T = TypeVar("T")

NAMESPACES = (
    ROOT,
    Namespace(cache_salt="a"),
    Namespace(lora="a"),
    Namespace(lora="x", cache_salt="y"),
    Namespace(extra_key="a"),  # held apart like the others, and never published
)
LIMITS = ("device_floor", "device_ceiling", "host_floor", "host_ceiling")
TOKENS = (0, 1, 1, 2, 7, 0xFFFFFFFF)  # few, so that sequences meet; both ends of uint32


class Chooser(Protocol):
    """Where a program's choices come from. The simplest choice comes first, for shrinking."""

    def integer(self, low: int, high: int) -> int: ...

    def item(self, items: Sequence[T]) -> T: ...


class SeededChooser:
    """Choices of a seeded generator."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def item(self, items: Sequence[T]) -> T:
        return self._random.choice(items)


def config(choose: Chooser) -> dict[str, Any]:
    """A small index that is full most of the time."""
    page_size = choose.item((1, 4, 16))
    num_pages = choose.item((8, 10, 14, 20, 28, 40))
    slices: dict[str, int] = {}
    if choose.integer(0, 3) == 3:
        slices = {"evict_slice": choose.integer(1, 3), "cut_slice": choose.integer(1, 4)}
    return {
        "page_size": page_size,
        "num_pages": num_pages,
        "host_pages": choose.item((0, 8, 12, 24, 24, 40)),
        "hash_name": choose.item(("xxh3_128", "sha256")),
        "events": choose.integer(0, 3) > 0,
        "first_seq": choose.item((1, 1 << 40)),
        "rank": choose.integer(0, 2),
        "max_batch_blocks": choose.item((4096, 3)),
        "bigram": choose.integer(0, 3) == 3,
        "eviction": policy(choose, page_size),
        "host_eviction": policy(choose, page_size),
        "write_policy": WritePolicy(choose.item((WRITE_POLICIES[0], *WRITE_POLICIES)), choose.integer(1, 3)),
        "load_back_threshold": choose.item((0, 0, 2 * page_size)),
        "load_back_quota": choose.item((0, 0, 3)),
        "l3": l3(choose),
        **slices,
    }


def tenants(choose: Chooser, num_pages: int, host_pages: int) -> dict[str, Limits]:
    """Three that are close together: default, a and b."""
    found: dict[str, Limits] = {}
    for name in ("default", "a", "b"):
        changes = {key: limit(choose, key, num_pages, host_pages) for key in LIMITS}
        for tier in ("device", "host"):
            ceiling = changes[f"{tier}_ceiling"]
            if ceiling is not None:
                changes[f"{tier}_floor"] = min(changes[f"{tier}_floor"] or 0, ceiling)
        found[name] = Limits(**changes)  # type: ignore[arg-type]
    return found


def limit(choose: Chooser, key: str, num_pages: int, host_pages: int) -> int | None:
    total = num_pages if key.startswith("device") else host_pages
    if key.endswith("floor"):
        return choose.item((0, 0, total // 4, total // 3))
    return choose.item((None, None, total // 3, total // 2, total * 3 // 4))


def settings(choose: Chooser, **fixed: Any) -> dict[str, Any]:
    """The same, with some of it fixed. `tenants` of "any" are drawn, too."""
    chosen = {**config(choose), **fixed}
    if not chosen["host_pages"]:
        chosen["l3"] = None  # which goes through the host
    if chosen.get("tenants") == "any":
        chosen["tenants"] = tenants(choose, chosen["num_pages"], chosen["host_pages"])
    return chosen


def l3(choose: Chooser) -> L3Config | None:
    """None, an exact one, or one that has to be asked; small enough to be short of everything."""
    if choose.integer(0, 2) < 2:
        return None
    return L3Config(
        exact=choose.integer(0, 2) > 0,
        tell=choose.integer(0, 2) > 0,
        threshold=choose.item((1, 1, 2)),
        prefetch_quota=choose.item((0, 4)),
        store_quota=choose.item((0, 3, 100)),
        part=choose.item((1, 2, 32)),
    )


def policy(choose: Chooser, page_size: int, name: str | None = None) -> Policy:
    """One of all, or of that name, with parameters that matter for prompts as short as these."""
    name = choose.item(POLICIES) if name is None else name
    return Policy(
        name,
        protected_threshold=choose.integer(1, 3),
        next_prompt_estimate=choose.integer(0, 2 * page_size),
        threshold=choose.integer(0, 8 * page_size),
    )


def prompt(
    choose: Chooser, earlier: Sequence[tuple[Namespace, bytes]], page_size: int, most: int
) -> tuple[Namespace, bytes]:
    """A sequence of `most` pages at most that begins, mostly, as an earlier one did, and leaves it anywhere."""
    size = page_size
    if earlier and not choose.integer(0, 3):
        return choose.item(earlier)
    if earlier and choose.integer(0, 3):
        namespace, base = choose.item(earlier[-24:])
        if not choose.integer(0, 5):
            namespace = choose.item(NAMESPACES)
        keep = choose.integer(0, len(base) // TOKEN_BYTES)
        if choose.integer(0, 1):
            keep -= keep % size
        base = base[: keep * TOKEN_BYTES]
    else:
        namespace, base = choose.item(NAMESPACES) if not choose.integer(0, 2) else ROOT, b""
    more = choose.integer(0, 4) * size + choose.integer(0, size)
    if choose.integer(0, 2):
        tail = [choose.item(TOKENS)] * more  # repeated tokens: equal pages at different depths
    else:
        tail = [choose.item(TOKENS) for _ in range(min(more, 8))]
        tail += [tail[-1] if tail else 1] * (more - len(tail))
    key = (base + b"".join(token.to_bytes(4, "little") for token in tail))[: most * size * TOKEN_BYTES]
    return namespace, key or b"\x01\x00\x00\x00"


class Program:
    """A rig and what may be done to it. `step` does one thing that makes sense now."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.prompts: list[tuple[Namespace, bytes]] = []
        self.time = 0.0
        self.actions: tuple[tuple[int, Callable[[Chooser], object]], ...] = (
            (8, self.put),
            (12, self.acquire),
            (4, self.extend),
            (2, self.cancel),
            (10, self.commit),
            (8, self.plan_release),
            (14, self.issue),
            (16, self.event),
            (8, self.ack),
            (4, self.read),
            (4, self.cut),
            (4, self.step_long),
            (2, self.peek),
            (3, self.pin),
            (2, self.unpin),
            (1, self.end),
            (4, self.gone),
            (2, self.open),
            (1, self.clear),
            (1, self.stranger),
            (1, self.settle),
            *(((12, self.below), (3, self.prefetch)) if rig.config.l3 is not None else ()),
            *(((3, self.limit),) if rig.tenants else ()),
            *(((3, self.withdraw), (3, self.wait_a_while)) if rig.waits else ()),
        )
        self._deck = [action for weight, action in self.actions for _ in range(weight)]

    def step(self, choose: Chooser) -> None:
        choose.item(self._deck)(choose)

    # -- what there is --------------------------------------------------------------------------------

    def live(self) -> list[Runner]:
        return [runner for runner in self.rig.runners.values() if not runner.session.ended]

    def open_leases(self) -> list[tuple[Runner, LeaseModel]]:
        """Leases that their runner has not asked to release."""
        return [
            (runner, lease)
            for runner in self.live()
            for lease in runner.session.leases
            if lease.release is None and lease.cancelling is None and not lease.waiting
        ]

    def unsent(self) -> list[Runner]:
        """Runners with a ticket whose command is not sent."""
        return [runner for runner in self.live() if runner.planned]

    def undone(self) -> list[tuple[Runner, Item, int]]:
        """Events that may be done now, their command sent or not; also of sessions that ended and live on."""
        return [
            (runner, item, shard)
            for runner in self.rig.runners.values()
            for item in runner.session.items
            for shard in range(runner.session.shards)
            if shard not in item.done and shard not in runner.session.gone and not item.lease.over
        ]

    def alive_after_end(self) -> list[tuple[Runner, int]]:
        """Shards of ended sessions whose process still lives."""
        return [
            (runner, shard)
            for runner in self.rig.runners.values()
            if runner.session.ended
            for shard in range(runner.session.shards)
            if shard not in runner.session.gone
        ]

    def prompt(self, choose: Chooser, most: int) -> tuple[Namespace, bytes]:
        return prompt(choose, self.prompts, self.rig.page_size, most)

    # -- actions --------------------------------------------------------------------------------------

    def open(self, choose: Chooser) -> None:
        if len(self.live()) < 3:
            self.rig.open_session(choose.integer(1, 2))

    def acquire(self, choose: Chooser) -> None:
        runners = self.live()
        if not runners:
            self.open(choose)
            runners = self.live()
        rig = self.rig
        namespace, key = self.prompt(choose, max(1, rig.config.num_pages * 2 // 3))
        limit = choose.integer(0, len(key) // TOKEN_BYTES) if not choose.integer(0, 4) else None
        reserve = choose.integer(1, 2 * rig.page_size) if not choose.integer(0, 3) else 0
        room = choose.integer(0, 4 * rig.page_size) if not choose.integer(0, 3) else None
        exact = None
        if not choose.integer(0, 4):  # as agreed with others that hold as much, more or less
            path = rig.book.path(namespace, key)
            matched = rig.model.match(path, limit, now=True)[1]
            exact = rig.page_size * min(len(path), max(0, matched + choose.integer(-1, 1)))
            limit = None
        rig.acquire(
            choose.item(runners),
            key,
            namespace,
            limit=limit,
            reserve=reserve,
            exact=exact,
            room=room,
            session_id="s" if not choose.integer(0, 5) else None,
            priority=choose.integer(-1, 2),
            fetch=choose.item((None, 0, self.time + choose.integer(1, 3), float("inf"))),
            tenant=self.tenant(choose),
            **self.patience(choose),
        )
        self.prompts.append((namespace, key))

    def patience(self, choose: Chooser) -> dict[str, float]:
        """How long the next command waits for room, and for copies."""
        if not self.rig.waits or not choose.integer(0, 2):
            return {}
        most = {"wait": choose.item((self.time + choose.integer(1, 3), float("inf")))} if choose.integer(0, 3) else {}
        if not choose.integer(0, 2):
            most["copies"] = self.time + choose.integer(1, 4)
        return most

    def withdraw(self, choose: Chooser) -> None:
        """Something that waits, or nothing."""
        rig = self.rig
        waits = [(waits.acquired.session, waits.request) for waits in rig.waiting if waits.acquired is not None]
        waits += [(each.session, each.request) for each in rig.line.everyone]
        waits += [(asked.session, request) for request, asked in rig.fetching.items()]
        if waits and choose.integer(0, 5):
            session, request = choose.item(waits)
            rig.withdraw(rig.runners[session.number], request)
        elif runners := self.live():
            rig.withdraw(choose.item(runners), 1 << 40)

    def wait_a_while(self, choose: Chooser) -> None:
        self.time += choose.integer(0, 2)
        self.rig.expire(self.time)

    def put(self, choose: Chooser) -> None:
        """One whole journey at once: it fills the pools, so that everything else happens in full ones."""
        rig = self.rig
        ready = [runner for runner in self.live() if not runner.planned]
        if not ready:
            return
        runner = choose.item(ready)
        namespace, key = self.prompt(choose, max(1, rig.config.num_pages * 2 // 3))
        self.prompts.append((namespace, key))
        lease = rig.acquire(runner, key, namespace, priority=choose.integer(0, 1), tenant=self.tenant(choose))
        if isinstance(lease, LeaseModel):
            if choose.integer(0, 1):
                rig.copies_done()
            rig.commit(runner, lease)
            if choose.integer(0, 3):
                rig.copies_done()
            rig.release(runner, lease)

    def extend(self, choose: Chooser) -> None:
        """One lease, or several of a runner as for a step of a batch; now and then one that has an extend already."""
        leases = self.open_leases()
        if not leases:
            return
        runner, lease = choose.item(leases)
        batch = [lease]
        if choose.integer(0, 2):
            mine = [other for other_runner, other in leases if other_runner is runner]
            first = choose.integer(0, len(mine) - 1)
            batch = (mine[first:] + mine[:first])[: choose.integer(1, 6)]
            if not choose.integer(0, 5):
                batch.append(choose.item(mine))
        size = self.rig.page_size
        items = []
        for each in batch:
            tokens = choose.item(TOKENS).to_bytes(TOKEN_BYTES, "little") * choose.integer(0, 2 * size)
            upto = None
            if not choose.integer(0, 2):
                upto = choose.integer(0, (len(each.tokens) + len(tokens)) // TOKEN_BYTES + size)
            items.append((each, tokens, choose.integer(0, size), upto))
        self.rig.extend_all(runner, items, **self.patience(choose))
        self.prompts += [(Namespace(*each.namespace), each.tokens) for each in batch]

    def cancel(self, choose: Chooser) -> None:
        """Of a lease that none of its processes was told of: there is no ticket for it."""
        leases = [
            (runner, lease)
            for runner, lease in self.open_leases()
            if all(item.lease is not lease for item in runner.session.items)
        ]
        if leases:
            self.rig.cancel(*choose.item(leases))

    def commit(self, choose: Chooser) -> None:
        leases = self.open_leases()
        if not leases:
            return
        runner, lease = choose.item(leases)
        have = len(lease.tokens) // TOKEN_BYTES
        self.rig.plan_commit(runner, lease, choose.integer(0, have) if choose.integer(0, 1) else None)
        if choose.integer(0, 1):
            self.rig.issue(runner)

    def plan_release(self, choose: Chooser) -> None:
        leases = self.open_leases()
        if leases:
            runner, lease = choose.item(leases)
            self.rig.plan_release(runner, lease, discard=not choose.integer(0, 3))

    def issue(self, choose: Chooser) -> None:
        runners = self.unsent()
        if runners:
            self.rig.issue(choose.item(runners))

    def event(self, choose: Chooser) -> None:
        """Any shard's event of any ticket, its command sent or not; also of a session that ended and lives on."""
        waits = self.undone()
        if waits:
            # Kernels of one shard mostly run in the order they were sent; nothing may depend on it.
            runner, item, shard = waits[0] if choose.integer(0, 2) else choose.item(waits)
            self.rig.event_done(runner, item, shard)

    def ack(self, choose: Chooser) -> None:
        """Copies of one direction end in order; of both, in any. Acks may overtake each other."""
        copies: list[CopyModel] = self.rig.in_flight()
        if copies:
            copy = copies[0] if choose.integer(0, 2) else choose.item(copies)
            self.rig.copy_done(copy, ok=choose.integer(0, 5 if copy.lease is None else 3) > 0)

    def earlier_life(self, choose: Chooser) -> None:
        """Prompts that L3 has, some of each."""
        rig = self.rig
        for _ in range(choose.integer(0, 4)):
            namespace, key = self.prompt(choose, 12)
            self.prompts.append((namespace, key))
            path = rig.book.path(namespace, key)
            path = path[: choose.integer(0, len(path))]
            if path:
                rig.l3_had(path)

    def below(self, choose: Chooser) -> None:
        """Something that L3 was asked for is over, well or not; or it loses a page."""
        rig = self.rig
        leaves = rig.l3.leaves()
        ops = list(rig.l3.ops.values())
        if not ops:
            if leaves and rig.config.l3 is not None and rig.config.l3.exact and not choose.integer(0, 3):
                rig.l3_lost(choose.item(leaves))
            return
        op = ops[0] if choose.integer(0, 2) else choose.item(ops)
        right = choose.integer(0, len(op.pages)) if not choose.integer(0, 3) else None
        lost = [choose.item(leaves)] if leaves and not choose.integer(0, 5) else []
        rig.l3_done(op, right, bad=not choose.integer(0, 2), evict=[page for page in lost if page not in op.pages])

    def prefetch(self, choose: Chooser) -> None:
        runners = self.live()
        if runners:
            namespace, key = self.prompt(choose, 16)
            rig = self.rig
            runner, until = choose.item(runners), choose.item((float("inf"), self.time + 1, 0))
            rig.prefetch(runner, key, namespace, until, self.tenant(choose))

    def tenant(self, choose: Chooser) -> str | None:
        """One that is configured, or was made, or nobody."""
        return choose.item(("a", "a", "b", "b", None, "c", "nobody")) if self.rig.tenants else None

    def limit(self, choose: Chooser) -> None:
        """One or two limits of a tenant, which may be new, change; now and then to what can't be."""
        config = self.rig.config
        keys = {choose.item(LIMITS) for _ in range(choose.integer(1, 2))}
        self.rig.set_tenant(
            choose.item(("a", "b", "default", "c")),
            **{key: limit(choose, key, config.num_pages, config.host_pages) for key in sorted(keys)},
        )

    def read(self, choose: Chooser) -> None:
        runners = self.live()
        if runners:
            self.rig.read_replies(choose.item(runners))

    def cut(self, choose: Chooser) -> None:
        self.rig.cut(heartbeat=not choose.integer(0, 3))

    def step_long(self, choose: Chooser) -> None:
        self.rig.step()

    def peek(self, choose: Chooser) -> None:
        namespace, key = self.prompt(choose, 12)
        self.rig.peek(key, namespace)

    def pin(self, choose: Chooser) -> None:
        runners = self.live()
        if runners and self.prompts:
            namespace, key = self.prompt(choose, 12)
            owner = choose.item(("p", "q"))
            self.rig.pin(choose.item(runners), key, namespace, owner, self.time + choose.integer(1, 4))

    def unpin(self, choose: Chooser) -> None:
        runners = self.live()
        if runners and choose.integer(0, 1):
            self.rig.unpin(choose.item(runners), choose.item(("p", "q")))
        else:
            self.time += choose.integer(0, 2)
            self.rig.expire(self.time)

    def end(self, choose: Chooser) -> None:
        runners = self.live()
        if runners:
            self.rig.end_session(choose.item(runners))

    def gone(self, choose: Chooser) -> None:
        ended = self.alive_after_end()
        if not ended and not choose.integer(0, 5):
            ended = [(runner, 0) for runner in self.live()]
        if ended:
            self.rig.shard_gone(*choose.item(ended))

    def clear(self, choose: Chooser) -> None:
        tiers: list[Tier | None] = [None, Tier.DEVICE]
        if self.rig.config.host_pages:
            tiers.append(Tier.HOST)
        self.rig.clear(choose.item(tiers))

    def settle(self, choose: Chooser) -> None:
        self.rig.settle()

    def stranger(self, choose: Chooser) -> None:
        """Late, doubled and made-up commands: a typed error, or nothing; and nobody is harmed (law 9)."""
        rig, index = self.rig, self.rig.index
        sessions = [SessionId(number) for number in rig.runners] + [SessionId(1 << 40)]
        session = choose.item(sessions)
        mine = rig.model.sessions.get(session)
        held = [le.number for le in mine.leases if le.number in rig.model.leases] if mine else []
        other = [number for number in rig.model.leases if number not in held]
        # of its own, one that is being released already: a doubled release
        late = [le.number for le in mine.leases if le.number not in rig.model.leases and not le.waiting] if mine else []
        lease = LeaseId(choose.item([*late, *late, *other, 1 << 40]))
        ticket = 1 << 50
        wrong: list[Callable[[], Any]] = [
            lambda: index.release(session, 1, lease, ticket),
            lambda: index.commit(session, 1, lease, ticket),
            lambda: index.cancel(session, 1, lease),
            lambda: index.acquire(session, 1, b"\1\0\0"),
            lambda: index.acquire(session, 1, b"\1\0\0\0", exact=1 << 30),
            lambda: index.acquire(session, 1, b"\1\0\0\0", exact=0, limit=0),
            lambda: index.peek(b"\1\0\0"),
            lambda: index.acquire(SessionId(1 << 40), 1, b"\1\0\0\0"),
        ]
        result = rig.turn(choose.item(wrong))
        kinds = (UnknownLease, UnknownSession, SessionEnded, BadRequest)
        assert isinstance(result, kinds), f"a wrong command gave {result!r}"
        extended = rig.turn(lambda: index.extend(session, 1, [Extension(lease, b"\1\0\0\0")]))
        answer = extended.results[0] if isinstance(extended, Extended) else extended
        assert isinstance(answer, kinds), f"an extend of a lease that is none gave {answer!r}"
        short = [
            (runner, lease)
            for runner, lease in self.open_leases()
            if len(lease.tokens) // TOKEN_BYTES > len(lease.table) * rig.page_size
        ]
        if short:
            runner, brief = choose.item(short)
            beyond = len(brief.table) * rig.page_size + 1
            result = rig.turn(
                lambda: index.commit(runner.id, 1, LeaseId(brief.number), runner.next_ticket, tokens=beyond)
            )
            assert isinstance(result, BadRequest), f"a commit of what has no page gave {result!r}"
        harmless: list[Callable[[], Any]] = [
            lambda: index.copy_done(TicketId(1 << 40)),
            lambda: index.event_done(SessionId(1 << 40), 1),
            lambda: index.end_session(SessionId(1 << 40)),
            lambda: index.shard_gone(SessionId(1 << 40), 0),
            lambda: index.unpin(session, "nobody"),
        ]
        again = [runner for runner in rig.runners.values() if runner.session.ended]
        harmless += [lambda r=runner: index.end_session(r.id) for runner in again]  # type: ignore[misc]
        assert not isinstance(rig.turn(choose.item(harmless)), SglcacheError)


def run(seed: int, steps: int = 120, **fixed: Any) -> Rig:
    """One random program; raises AssertionError at the first thing that is not right."""
    choose = SeededChooser(seed)
    program = Program(Rig(**settings(choose, **fixed)))
    if program.rig.config.l3 is not None:
        program.earlier_life(choose)
    for _ in range(steps):
        program.step(choose)
    program.rig.settle()
    return program.rig


__all__ = ["DEVICE", "Chooser", "Item", "Program", "SeededChooser", "config", "run"]
