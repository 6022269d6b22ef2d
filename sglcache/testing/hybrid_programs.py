"""Random programs over indexes of all kinds, in pools so small that each of them is full most of the time.

As `programs`, which does the same for Full alone and predicts more: choices come from a `Chooser`, so that hypothesis
and a seeded generator run the same steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglcache.core.encoding import Format, Group
from sglcache.core.key import Namespace
from sglcache.core.resources import Companion, MambaState, SlidingWindow
from sglcache.core.tiering import WRITE_POLICIES, WritePolicy
from sglcache.errors import BadRequest, SessionEnded, UnknownLease, UnknownSession
from sglcache.testing.hybrid import Hybrid
from sglcache.testing.hybrid_model import FULL, HOST, Lease, Runner, Sent
from sglcache.testing.pages import TOKEN_BYTES
from sglcache.testing.programs import TOKENS, Chooser, SeededChooser, policy, prompt
from sglcache.units import LeaseId, SessionId, Tier
from sglcache.wire.control import Extension

KINDS = ("swa", "mamba", "unified", "full")  # pure swa is swa: nothing in the core knows what bytes Full's pages have
MOST = 12  # pages of a prompt


def settings(choose: Chooser, **fixed: Any) -> dict[str, Any]:
    """A small index. `kind`: one of KINDS; `tiers`: 1 or 2; `roomy`: what leaves the device is on the host; all else
    are IndexConfig's fields."""
    fixed = dict(fixed)
    kind = fixed.pop("kind", None) or choose.item(KINDS[:3])
    tiers = fixed.pop("tiers", None) or choose.item((1, 2, 2))
    roomy = fixed.pop("roomy", None)
    if roomy is None:
        roomy = choose.integer(0, 1) > 0
    page_size = fixed.get("page_size") or choose.item((1, 2, 3, 4))

    def slots(*sizes: int) -> int:
        """On the host."""
        return 0 if tiers == 1 else 40 if roomy else choose.item(sizes)

    companions = []
    if kind in ("swa", "unified"):
        window = SlidingWindow(choose.integer(1, 4))
        companions.append(Companion(window, choose.item((14, 10, 18, 30)), slots(3, 6, 12)))
    if kind in ("mamba", "unified"):
        state = MambaState(choose.item((0, 0, 1, 2)))
        companions.append(Companion(state, choose.item((6, 4, 9)), slots(2, 4, 8)))
    host_pages = slots(4, 8, 14, 24)
    groups = []
    if not choose.integer(0, 2):  # they are told of
        for number, each in enumerate(companions, 1):
            by_end = each.resource.by_end
            size = None if by_end else each.resource.reach * page_size
            groups.append(Group(number, each.resource.name, size, by_end))
    slices: dict[str, int] = {}
    if choose.integer(0, 3) == 3:
        slices = {"evict_slice": choose.integer(1, 3), "cut_slice": choose.integer(1, 4)}
    return {
        "page_size": page_size,
        "num_pages": choose.item((14, 14, 18, 24)),
        "host_pages": host_pages,
        "host_ready": choose.integer(0, host_pages) if host_pages and not choose.integer(0, 4) else None,
        **({"companions": tuple(companions)} if companions else {}),
        "format": Format(groups=tuple(groups)),
        "max_batch_blocks": choose.item((4096, 3)),
        "bigram": choose.integer(0, 3) == 3,
        "eviction": policy(choose, page_size) if not choose.integer(0, 2) else policy(choose, page_size, "lru"),
        "host_eviction": policy(choose, page_size) if not choose.integer(0, 2) else policy(choose, page_size, "lru"),
        "write_policy": WritePolicy(choose.item((WRITE_POLICIES[0], *WRITE_POLICIES)), choose.integer(1, 3)),
        "load_back_quota": choose.item((0, 0, 0, 3)),
        "load_back_threshold": choose.item((0, 0, 0, 2 * page_size)),
        **slices,
        **fixed,
    }


class Program:
    """A world and what may be done to it. `step` does one thing that makes sense now."""

    def __init__(self, world: Hybrid, failures: bool = True, rot: bool = False) -> None:
        """`failures`: copies may come to nothing. `rot`: pages on the host may go bad, and be found to be."""
        self.world = world
        self.failures = failures
        self.prompts: list[tuple[Namespace, bytes]] = []
        self.time = 0.0
        self.actions: dict[str, tuple[int, Callable[[Chooser], object]]] = {
            "put": (24, self.put),
            "acquire": (10, self.acquire),
            "extend": (5, self.extend),
            "commit": (10, self.commit),
            "release": (10, self.release),
            "cancel": (2, self.cancel),
            "issue": (12, self.issue),
            "event": (16, self.event),
            "ack": (8, self.ack),
            "read": (4, self.read),
            "cut": (3, self.cut),
            "step_long": (5, self.step_long),
            "peek": (3, self.peek),
            "pin": (3, self.pin),
            "unpin": (3, self.unpin),
            "end": (1, self.end),
            "gone": (3, self.gone),
            "open": (2, self.open),
            "clear": (1, self.clear),
            "grow": (1, self.grow),
            "stranger": (1, self.stranger),
            "settle": (1, self.settle),
        }
        if rot:
            self.actions["expel"] = (8, self.expel)
        self._deck = [action for weight, action in self.actions.values() for _ in range(weight)]

    def step(self, choose: Chooser) -> None:
        choose.item(self._deck)(choose)

    # -- what there is ------------------------------------------------------------------------------------------------

    def live(self) -> list[Runner]:
        return [runner for runner in self.world.runners.values() if not runner.ended]

    def open_leases(self) -> list[Lease]:
        return [
            lease
            for runner in self.live()
            for lease in runner.leases
            if lease.release is None and lease.cancelling is None and not lease.waiting
        ]

    def unsent(self) -> list[Runner]:
        return [runner for runner in self.live() if runner.planned]

    def undone(self) -> list[tuple[Runner, Sent, int]]:
        """Events that may be done now, their command sent or not; also of sessions that ended and live on."""
        return [
            (runner, item, shard)
            for runner in self.world.runners.values()
            for item in runner.items
            for shard in range(runner.shards)
            if shard not in item.done and shard not in runner.gone and not item.lease.over
        ]

    def prompt(self, choose: Chooser, most: int) -> tuple[Namespace, bytes]:
        return prompt(choose, self.prompts[-10:], self.world.page_size, most)  # few, so that they are hits

    def ends(self, choose: Chooser, lease: Lease, pages: int) -> list[tuple[int, int, int]]:
        """States for a commit of so many pages: at its end, where the match met a branch, or anywhere."""
        world = self.world
        ends: list[tuple[int, int, int]] = []
        promised = {(r, slot) for item in lease.runner.items if item.lease is lease for r, _, slot in item.ends}
        most = max(pages, lease.committed)
        for r in world.by_end:
            slots = [slot for slot in lease.states[r] if (r, slot) not in promised]
            where = [each for each in (most, lease.reaches[FULL] // world.page_size) if 0 < each <= most]
            for slot in slots[: choose.integer(0, len(slots))]:
                if most:
                    at = choose.item(where) if choose.integer(0, 2) else choose.integer(1, most)
                    if all((one, other) != (r, at) for one, other, _ in ends) or not choose.integer(0, 7):
                        ends.append((r, at, slot))
        return ends

    def floor(self, choose: Chooser, lease: Lease, pages: int) -> int | None:
        """How far a runner has slid, as it should be, or further."""
        world = self.world
        if choose.integer(0, 2) or len(world.by_page) < 2:
            return None
        size = world.page_size
        tidy = max(0, max(pages, lease.committed) - world.kinds[1].window) * size
        return choose.integer(0, tidy if choose.integer(0, 2) else pages * size)

    # -- actions ------------------------------------------------------------------------------------------------------

    def open(self, choose: Chooser) -> None:
        if len(self.live()) < 3:
            self.world.open_session(choose.integer(1, 2))

    def acquire(self, choose: Chooser) -> None:
        if not self.live():
            self.open(choose)
        world = self.world
        size = world.page_size
        namespace, key = self.prompt(choose, MOST)
        limit = choose.integer(0, len(key) // TOKEN_BYTES) if not choose.integer(0, 4) else None
        exact = None
        if not choose.integer(0, 5):
            path = world.book.path(namespace, key)
            most = len(path) if limit is None else min(len(path), limit // size)
            exact = size * min(len(path), max(0, world.reached(path[:most]).matched + choose.integer(-1, 1)))
            limit = None
        world.acquire(
            choose.item(self.live()),
            key,
            namespace,
            limit=limit,
            exact=exact,
            reserve=choose.integer(1, 2 * size) if not choose.integer(0, 3) else 0,
            room=choose.integer(0, 4 * size) if not choose.integer(0, 2) else None,
            priority=choose.integer(-1, 2),
            states=choose.integer(0, 2),
        )
        self.prompts.append((namespace, key))

    def put(self, choose: Chooser) -> None:
        """One whole journey at once, in chunks or not."""
        world = self.world
        ready = [runner for runner in self.live() if not runner.planned]
        if not ready:
            return
        runner = choose.item(ready)
        namespace, key = self.prompt(choose, MOST)
        self.prompts.append((namespace, key))
        chunk = choose.integer(1, 4) * world.page_size if choose.integer(0, 1) else None
        lease = world.acquire(runner, key, namespace, room=chunk, states=choose.integer(0, 2))
        if not isinstance(lease, Lease):
            return
        if choose.integer(0, 1):
            self._acks()
        while True:
            pages = min(lease.num_pages, len(lease.path))
            world.commit(runner, lease, ends=self.ends(choose, lease, pages), floor=self.floor(choose, lease, pages))
            upto = (lease.num_pages + 2) * world.page_size
            if chunk is None or lease.num_pages * world.page_size >= len(lease.tokens) // TOKEN_BYTES:
                break
            had = lease.num_pages
            if lease.runner.ended or lease.load is not None:
                break
            world.extend(runner, [(lease, b"", 0, upto, choose.integer(0, 1))])
            if lease.num_pages == had:
                break
        if choose.integer(0, 3):
            self._acks()
        if lease.release is None:
            world.release(runner, lease)

    def _acks(self) -> None:
        while copies := self.world.in_flight():
            self.world.copy_done(copies[0])

    def extend(self, choose: Chooser) -> None:
        leases = self.open_leases()
        if not leases:
            return
        lease = choose.item(leases)
        batch = [lease]
        if choose.integer(0, 2):
            mine = [other for other in leases if other.runner is lease.runner]
            first = choose.integer(0, len(mine) - 1)
            batch = (mine[first:] + mine[:first])[: choose.integer(1, 4)]
            if not choose.integer(0, 5):
                batch.append(choose.item(mine))
        size = self.world.page_size
        items = []
        for each in batch:
            tokens = choose.item(TOKENS).to_bytes(TOKEN_BYTES, "little") * choose.integer(0, 2 * size)
            upto = None
            if not choose.integer(0, 2):
                upto = choose.integer(0, (len(each.tokens) + len(tokens)) // TOKEN_BYTES + size)
            items.append((each, tokens, choose.integer(0, size), upto, choose.integer(0, 1)))
        self.world.extend(lease.runner, items)
        self.prompts += [(each.namespace, each.tokens) for each in batch if len(each.path) <= MOST]

    def cancel(self, choose: Chooser) -> None:
        leases = [each for each in self.open_leases() if all(item.lease is not each for item in each.runner.items)]
        if leases:
            lease = choose.item(leases)
            self.world.cancel(lease.runner, lease)

    def commit(self, choose: Chooser) -> None:
        leases = self.open_leases()
        if not leases:
            return
        lease, world = choose.item(leases), self.world
        have = min(len(lease.tokens) // TOKEN_BYTES, lease.num_pages * world.page_size)
        tokens = choose.integer(0, have) if choose.integer(0, 1) else None
        pages = min((have if tokens is None else tokens) // world.page_size, len(lease.path))
        ends, floor = self.ends(choose, lease, pages), self.floor(choose, lease, pages)
        world.plan_commit(lease.runner, lease, tokens, ends, floor)
        if choose.integer(0, 1):
            world.issue(lease.runner)

    def release(self, choose: Chooser) -> None:
        leases = self.open_leases()
        if leases:
            lease = choose.item(leases)
            self.world.plan_release(lease.runner, lease, discard=not choose.integer(0, 3))

    def issue(self, choose: Chooser) -> None:
        runners = self.unsent()
        if runners:
            self.world.issue(choose.item(runners))

    def event(self, choose: Chooser) -> None:
        waits = self.undone()
        if waits:
            self.world.event_done(*(waits[0] if choose.integer(0, 2) else choose.item(waits)))

    def ack(self, choose: Chooser) -> None:
        copies = self.world.in_flight()
        if copies:
            copy = copies[0] if choose.integer(0, 2) else choose.item(copies)
            self.world.copy_done(copy, ok=choose.integer(0, 5 if copy.to_host else 3) > 0 or not self.failures)

    def read(self, choose: Chooser) -> None:
        if self.live():
            self.world.read_replies(choose.item(self.live()))

    def cut(self, choose: Chooser) -> None:
        self.world.cut(heartbeat=not choose.integer(0, 3))

    def step_long(self, choose: Chooser) -> None:
        self.world.step()

    def peek(self, choose: Chooser) -> None:
        namespace, key = self.prompt(choose, MOST)
        self.world.peek(key, namespace)

    def pin(self, choose: Chooser) -> None:
        if self.live() and self.prompts:
            namespace, key = self.prompt(choose, MOST)
            owner = choose.item(("p", "q"))
            self.world.pin(choose.item(self.live()), key, namespace, owner, self.time + choose.integer(1, 4))

    def unpin(self, choose: Chooser) -> None:
        if self.live() and choose.integer(0, 1):
            self.world.unpin(choose.item(self.live()), choose.item(("p", "q")))
        else:
            self.time += choose.integer(0, 2)
            self.world.expire(self.time)

    def end(self, choose: Chooser) -> None:
        if self.live():
            self.world.end_session(choose.item(self.live()))

    def gone(self, choose: Chooser) -> None:
        ended = [
            (runner, shard)
            for runner in self.world.runners.values()
            if runner.ended
            for shard in range(runner.shards)
            if shard not in runner.gone
        ]
        if not ended and not choose.integer(0, 5):
            ended = [(runner, 0) for runner in self.live()]
        if ended:
            self.world.shard_gone(*choose.item(ended))

    def clear(self, choose: Chooser) -> None:
        self.world.clear(choose.item((None, Tier.DEVICE, Tier.HOST)[: 1 + self.world.num_tiers]))

    def grow(self, choose: Chooser) -> None:
        world = self.world
        if world.host_ready < world.config.host_pages:
            world.grow_host(choose.integer(1, 8))

    def expel(self, choose: Chooser) -> None:
        """A page on the host goes bad, and is found to be."""
        world = self.world
        if world.num_tiers > HOST:
            there = [(r, page) for r in range(len(world.kinds)) for page in world.seen.ready[world.cell(r, HOST)]]
            if there:
                world.expel(*choose.item(there))

    def settle(self, choose: Chooser) -> None:
        self.world.settle()

    def stranger(self, choose: Chooser) -> None:
        """Wrong commands: a typed error, and nobody is harmed."""
        world = self.world
        index = world.index
        some = SessionId(1 << 40)
        wrong: list[Callable[[], Any]] = [
            lambda: index.acquire(some, 1, b"\1\0\0\0"),
            lambda: index.commit(some, 1, LeaseId(1), 1),
        ]
        count = len(world.companions)
        for runner in self.live():
            wrong += [
                lambda r=runner: index.acquire(r.id, 1, b"\1\0\0\0", spare=[1] * (count + 1)),  # type: ignore[misc]
                lambda r=runner: index.acquire(r.id, 1, b"\1\0\0\0", spare=[-1] * count or [0]),  # type: ignore[misc]
                lambda r=runner: index.commit(r.id, 1, LeaseId(1 << 40), 1 << 50),  # type: ignore[misc]
            ]
        leases = self.open_leases()
        if leases:
            lease = choose.item(leases)
            number, runner, ticket = LeaseId(lease.number), lease.runner, lease.runner.next_ticket
            size, have = world.page_size, min(len(lease.tokens) // TOKEN_BYTES, lease.num_pages * world.page_size)

            def commit(**how: Any) -> Callable[[], Any]:
                return lambda: index.commit(runner.id, 1, number, ticket, **how)

            wrong.append(commit(floor=-1))
            wrong.append(commit(ends=[(9, size, 0)]))
            for r in world.companions:
                if not world.kinds[r].by_end:
                    wrong.append(commit(ends=[(r - 1, size, next(iter(lease.own[r]), 0))]))
                    continue
                strange = next(slot for slot in range(world.kinds[r].total[0] + 1) if slot not in lease.own[r])
                wrong.append(commit(ends=[(r - 1, size, strange)]))
                if lease.states[r]:
                    slot = lease.states[r][0]
                    wrong.append(commit(ends=[(r - 1, have + size, slot)]))
                    wrong.append(commit(ends=[(r - 1, 0, slot)]))
                    wrong.append(commit(ends=[(r - 1, size, slot), (r - 1, size, slot)]))
                    if size > 1:
                        wrong.append(commit(ends=[(r - 1, size - 1, slot)]))
            extended = world.turn(lambda: index.extend(runner.id, 1, [Extension(1 << 40, b"\1\0\0\0")]))
            answer = getattr(extended, "results", [extended])[0]
            assert isinstance(answer, UnknownLease), f"{answer!r}"
        for command in wrong:
            result = world.turn(command)
            kinds = (UnknownLease, UnknownSession, SessionEnded, BadRequest)
            assert isinstance(result, kinds), f"a wrong command gave {result!r}"


def run(seed: int, steps: int = 100, **fixed: Any) -> Hybrid:
    """One random program; AssertionError at the first thing that is not right."""
    choose = SeededChooser(seed)
    proof = fixed.pop("proof", True)
    rot = fixed.pop("rot", False)
    program = Program(Hybrid(proof=proof, **settings(choose, **fixed)), rot=rot)
    program.open(choose)
    for _ in range(steps):
        program.step(choose)
    program.world.settle()
    return program.world
