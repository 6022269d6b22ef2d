"""What is checked of each rank, all along and at quiet points: a thread that follows its stream as a router does.

All along: the mirror's digest is the daemon's as of a number, through all of its lives; the books prove themselves.
At a quiet point, when every runner has left: nobody holds anything, every page is free or cached, the mirror equals the
index block for block, and descriptors, memory and processes are what they were before.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from sglcache.client import Client, fsck
from sglcache.client.dynamo import Indexer
from sglcache.client.mirror import Curve, Mirror
from sglcache.errors import Changed, SglcacheError
from sglcache.torture import daemon as daemons
from sglcache.torture.runner import LOST
from sglcache.units import Tier

T = TypeVar("T")

DIGEST_S, PROOF_S = 0.25, 1.0  # between two
STEP_S = 0.05
REACH_S = 2.0  # for the mirror to reach a number; then it is asked again
SHOWN = 4


class Auditor(threading.Thread):
    """Of one rank. What is wrong goes to `fail`; `agreed_at` is when the mirror was last right."""

    def __init__(
        self,
        rank: int,
        socket: Path,
        endpoints: tuple[str, str],
        status: dict[str, Any],
        fail: Callable[[str], None],
        rest_s: float,
    ) -> None:
        super().__init__(name=f"auditor-{rank}", daemon=True)
        self.rank = rank
        self.socket = socket
        self.endpoints = endpoints
        self.fail = fail
        self.rest_s = rest_s  # for the rank to come to rest once nobody uses it
        self.agreed_at = time.monotonic()
        self.spared: set[str] = set()  # checks of fsck that the faults so far have made moot
        self.restarted_at = 0.0  # a fault that begins another life of the rank
        self.known_losses = 0
        self.counts: Counter[str] = Counter()
        self.third_tokens = 0  # hits from the third tier, over all lives
        self.status = status
        self.blocks: dict[Tier, set[int]] = {}  # that the index had at the last quiet point
        self._topic, self._curve = status["stream"]["topic"], Curve.of_stream(status["stream"])
        self._ending = threading.Event()
        self._jobs: SimpleQueue[tuple[Callable[[Client, Mirror], Any], Future[Any]]] = SimpleQueue()
        self._observer: Client | None = None

    def run(self) -> None:
        digest_at = proof_at = 0.0
        try:
            with Mirror(*self.endpoints, topic=self._topic, rank=self.rank, curve=self._curve) as mirror:
                while not self._ending.is_set():
                    mirror.step(STEP_S)
                    try:
                        observer = self._attached()
                        if observer is None:
                            continue
                        self._do_jobs(observer, mirror)
                        now = time.monotonic()
                        if now >= digest_at:
                            self._digest(observer, mirror)
                            digest_at = time.monotonic() + DIGEST_S
                        if now >= proof_at:
                            self._prove(observer)
                            proof_at = time.monotonic() + PROOF_S
                    except SglcacheError as error:
                        if error.code not in LOST:
                            self.fail(f"rank {self.rank}: an observer got error[{error.code}]: {error.message}")
                        self._let_go()
                    if mirror.bad_messages:
                        self.fail(f"rank {self.rank}: {mirror.bad_messages} messages of its stream can't be read")
                        return
                    self.counts["batches"] = mirror.batches
                    self.counts["replays"] = mirror.replays
                    self.counts["losses"] = mirror.losses
        except Exception as exc:
            self.fail(f"rank {self.rank}: following it failed: {exc!r}")
        finally:
            self._let_go()

    def ask(self, job: Callable[[Client, Mirror], T], within_s: float) -> T:
        """Have it done by this thread, which alone has the mirror. TimeoutError; SglcacheError: the daemon went."""
        future: Future[T] = Future()
        self._jobs.put((job, future))
        return future.result(within_s)

    def stop(self) -> None:
        self._ending.set()
        self.join()

    # -- all along --------------------------------------------------------------------------------------------

    def _attached(self) -> Client | None:
        if self._observer is None:
            self._observer = Client(self.socket, role="observer", name="torture")
        return self._observer

    def _let_go(self) -> None:
        if self._observer is not None:
            self._observer.close()
            self._observer = None

    def _do_jobs(self, observer: Client, mirror: Mirror) -> None:
        try:
            while True:
                job, future = self._jobs.get_nowait()
                try:
                    future.set_result(job(observer, mirror))
                except BaseException as exc:
                    future.set_exception(exc)
                    if isinstance(exc, SglcacheError):
                        raise
        except Empty:
            return

    def _digest(self, observer: Client, mirror: Mirror) -> None:
        told = observer.digest()
        if told["announcing"] or not mirror.catch_up(told["seq"], REACH_S):
            return
        found = mirror.check_digest(told["seq"], told["tiers"], self.rank)
        if found is None:
            return
        self.counts["digests"] += 1
        self.agreed_at = time.monotonic()
        for each in found:
            self.fail(
                f"rank {self.rank}, {each.tier}: as of number {told['seq']} the daemon has told of "
                f"{each.told.num_blocks} blocks with the sum {each.told.sum_hashes:016x}, the mirror has "
                f"{each.mirrored.num_blocks} with {each.mirrored.sum_hashes:016x}"
            )

    def _prove(self, observer: Client) -> None:
        status = observer.status(prove=True)
        if status["epoch"] == self.status["epoch"]:
            before = self.status["counters"]["l3_matched_tokens"]
        else:
            before = 0
        self.third_tokens += status["counters"]["l3_matched_tokens"] - before
        self.status = status
        if "violations" not in status:
            self.counts["proofs overtaken"] += 1
            return
        self.counts["proofs"] += 1
        for violation in status["violations"][:SHOWN]:
            self.fail(f"rank {self.rank}: the books are wrong: {violation}")

    # -- at a quiet point -------------------------------------------------------------------------------------

    def at_rest(self) -> list[str]:
        """Once no runner is attached: what is not as it should be, in words."""
        try:
            return self.ask(self._at_rest, 4 * self.rest_s)
        except TimeoutError:
            return [f"rank {self.rank} did not answer within {4 * self.rest_s:g} s, and no fault goes on"]

    def _at_rest(self, observer: Client, mirror: Mirror) -> list[str]:
        busy = daemons.waited(lambda: what_is_held(observer.status(prove=False)), self.rest_s)
        if busy:
            return [f"rank {self.rank}: {self.rest_s:g} s after the last runner left there are {', '.join(busy)}"]
        problems: list[str] = []
        self._prove(observer)
        for each in fsck.fsck(observer, timeout_s=self.rest_s):
            self.counts["checks of fsck"] += each.result == fsck.OK
            if each.result == fsck.OVERTAKEN:
                problems.append(f"rank {self.rank}: {each.name} can't be proved though nobody is there: {each.why}")
            if each.name not in self.spared:
                problems += [f"rank {self.rank}: fsck {each.name}: {words}" for words in each.violations]
        for tier in observer.digest()["tiers"]:
            problems += self._compare(observer, mirror, Tier[tier])
        return problems

    def _compare(self, observer: Client, mirror: Mirror, tier: Tier) -> list[str]:
        """Block for block, as of one number."""
        deadline = time.monotonic() + self.rest_s
        while time.monotonic() < deadline:
            try:
                dump = observer.dump(tier)
            except Changed:
                continue
            if not mirror.catch_up(dump.seq, REACH_S, stop=True):
                continue
            if mirror.state.next_seq != dump.seq + 1 or not mirror.exact:
                continue
            wanted, believed = set(dump.hashes), mirror.hashes(tier, self.rank)
            self.counts["dumps"] += 1
            self.blocks[tier] = wanted
            self.agreed_at = time.monotonic()
            if wanted == believed:
                return []
            missing, extra = sorted(wanted - believed), sorted(believed - wanted)
            return [
                f"rank {self.rank}, {tier.name}: as of number {dump.seq} the mirror lacks {len(missing)} of the "
                f"index's {len(wanted)} blocks ({missing[:SHOWN]}) and has {len(extra)} too many ({extra[:SHOWN]})"
            ]
        return [
            f"rank {self.rank}, {tier.name}: the index and the mirror could not be compared within {self.rest_s:g} s"
        ]


def what_differs(indexer: Indexer, model: str, auditors: Sequence[Auditor]) -> list[str]:
    """At a quiet point: where Dynamo's indexer does not have what the indexes have, in words."""
    believed = indexer.blocks(model)
    problems = []
    for auditor in auditors:
        if auditor.status["pp_rank"]:
            continue  # routers are told of the first stages alone
        for tier, wanted in auditor.blocks.items():
            words = (tier.medium, tier.name.lower())  # the second is the indexer's own, where it has no other
            found = set().union(*(believed.get((auditor.rank, word), set()) for word in words))
            if found != wanted:
                problems.append(
                    f"rank {auditor.rank}, {tier.name}: Dynamo's indexer lacks {len(wanted - found)} of "
                    f"{len(wanted)} blocks and has {len(found - wanted)} too many"
                )
    return problems


def what_is_held(status: dict[str, Any]) -> list[str]:
    """What somebody still has of a rank, in words; [] of one at rest."""
    gauges = status["gauges"]
    held = [
        f"{gauges[name]} {words}"
        for name, words in (
            ("num_sessions", "sessions"),
            ("num_leases", "leases"),
            ("num_fenced_leases", "fenced leases"),
            ("num_waiting", "commands that wait"),
            ("num_copies", "copies under way"),
            ("pinned_pages", "pinned pages"),
        )
        if gauges[name]
    ]
    third = status["third"]
    if third is not None:
        held += [f"{count} {kind}s queued for the third tier" for kind, count in third["queued"].items() if count]
    for pool in status["pools"]:
        where = f"{pool['resource']} {pool['tier']}"
        held += [f"{pool[name]} {name} pages of {where}" for name in ("leased", "fenced", "locked") if pool[name]]
        if not held and pool["free"] + pool["cached"] != pool["total"]:
            held.append(f"{pool['free']} free and {pool['cached']} cached of {pool['total']} pages of {where}")
    return held


class Leaks:
    """What a daemon's processes have of the kernel, against what they had before the first runner came."""

    def __init__(self, rest_s: float) -> None:
        self.rest_s = rest_s
        self.before: dict[str, Counter[str]] = {}
        self.first_bytes: dict[str, int] = {}
        self.last_bytes: dict[str, int] = {}

    def begin(self, processes: dict[str, int]) -> None:
        self.before = {name: daemons.descriptors(pid) for name, pid in processes.items()}

    def look(self, processes: dict[str, int], growth_bytes: int) -> list[str]:
        """What is too much, in words. `processes`: those of now; `growth_bytes`: by which memory may have grown."""
        problems = []
        for name, pid in processes.items():
            more = daemons.waited(partial(self._more, name, pid), self.rest_s)
            if more:
                told = ", ".join(f"{count} more of {what}" for what, count in more.most_common(SHOWN))
                problems.append(f"{name} (pid {pid}) leaks descriptors: {told} than before the first runner")
            num_bytes = daemons.own_bytes(pid)
            first = self.first_bytes.setdefault(name, num_bytes)
            self.last_bytes[name] = num_bytes
            if num_bytes > first + growth_bytes:
                problems.append(
                    f"{name} (pid {pid}) has {num_bytes / 2**20:.1f} MiB of its own, {first / 2**20:.1f} MiB at the "
                    f"first quiet point, and may grow by {growth_bytes / 2**20:.0f} MiB"
                )
        return problems

    def _more(self, name: str, pid: int) -> Counter[str]:
        return daemons.descriptors(pid) - self.before[name]
