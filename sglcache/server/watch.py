"""What does not get on is seen: the age of the oldest thing in flight, of each kind, against a threshold of its own.

Nothing here waits or mends. A rank looks with each sign of life that it gives its supervisor, from what its parts count
anyway, and sends with it what is older than `[watch]` says: a `Trouble` each. So /health is `degraded` while nothing
moves, with the reason and the age, however well the event loop turns; the log says once that a trouble begins and once
that it is over. Where a part does not say since when, an age is from the first look at which the thing stood there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct

from sglcache.config import WatchConfig
from sglcache.core.histograms import Histogram

if TYPE_CHECKING:  # the supervisor knows troubles by their names alone
    from sglcache.core.index import Index
    from sglcache.memory.engine import LaneStats
    from sglcache.memory.filling import Filler
    from sglcache.net.publisher import Publisher
    from sglcache.server.listener import Refusals
    from sglcache.server.owner import Owner
    from sglcache.server.scrubbing import Scrubbing
    from sglcache.server.sessions import Sessions
    from sglcache.server.third import ThirdTier

logger = logging.getLogger("sglcache.watch")

TICK_S = 0.05  # between two looks at whether the loop turns
STALL_TOLD_S = 60.0  # a stall is over when it is seen; so long it is told of
STALLS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)  # seconds
MAX_TOLD = 8  # of one kind, in one beat

WORDS = {
    "backup": "a copy to the host is in flight",
    "load": "a copy from the host is in flight",
    "store": "the third tier has not stored pages",
    "fetch": "the third tier has not fetched pages",
    "probe": "the third tier has not said what it has",
    "storage": "the third tier can't be used",
    "event": "a commit or release waits for an event",
    "room": "a command waits for room",
    "fenced": "pages of a session that ended are fenced",
    "answer": "a connection's commands have no answer",
    "stream": "batches do not leave for the live stream",
    "reader": "the reader of a replay takes none of it",
    "numbers": "numbers of the stream can't be reserved",
    "descriptors": "there is no file descriptor for another connection",
    "loop": "the event loop stood still",
    "corrupt": "the host tier's memory is suspect",
    "memory": "the host tier is smaller than configured",
}
"""What each kind of trouble is, in words before `for N s`."""


class Trouble(Struct, array_like=True, forbid_unknown_fields=True):
    """Something that has not got on for longer than it should take."""

    what: str  # of WORDS
    age_s: float
    facts: dict[str, Any] = {}


class Oldest(NamedTuple):
    """The oldest thing of one kind that is in flight."""

    what: str
    age_s: float
    facts: dict[str, Any]


def in_words(what: str, age_s: float, facts: dict[str, Any]) -> str:
    more = ", ".join(f"{name} {value}" for name, value in facts.items())
    return f"{WORDS.get(what, what)} for {age_s:.1f} s" + (f" ({more})" if more else "")


class Stalls:
    """How long the loop does not turn: a timer that comes late by that. Its histogram, and the last long one.

    Of how late it was the loop's own work is at most what its thread had of a processor since the last tick; the rest
    it waited, for one or for the interpreter's lock.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, long_s: float) -> None:
        self._loop = loop
        self._long_s = long_s
        self.histogram = Histogram(STALLS)
        self.longest_s = 0.0
        self.longest_own_s = 0.0
        self._cpu = 0.0
        self.last: tuple[float, float] | None = None  # (when, how long) of the last that was long
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def start(self) -> None:
        self._cpu = time.thread_time()
        self._due = self._loop.time() + TICK_S
        self._timer = self._loop.call_at(self._due, self._tick)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        now = self._loop.time()
        late = max(0.0, now - self._due)
        self.histogram.observe(late)
        self.longest_s = max(self.longest_s, late)
        self.longest_own_s = max(self.longest_own_s, min(late, time.thread_time() - self._cpu))
        if late > self._long_s:
            self.last = now, late
        self.start()

    def facts(self) -> dict[str, Any]:
        bounds, counts, total = self.histogram.observed()
        longest = {"longest_s": self.longest_s, "longest_own_s": self.longest_own_s}
        return {"buckets": list(bounds), "counts": counts, "sum": total, **longest}


class Watch:
    """Of one rank. `look` with each beat; between looks it costs a timer."""

    def __init__(
        self,
        config: WatchConfig,
        loop: asyncio.AbstractEventLoop,
        *,
        index: Index,
        sessions: Sessions,
        copies: Callable[[], Iterable[LaneStats]],
        publisher: Publisher | None,
        owner: Owner,
        third: ThirdTier | None,
        refusals: Refusals,
        scrubbing: Scrubbing | None = None,
        filler: Filler | None = None,
    ) -> None:
        self.config = config
        self.loop = loop
        self.index = index
        self.sessions = sessions
        self.copies = copies
        self.publisher = publisher
        self.owner = owner
        self.third = third
        self.scrubbing = scrubbing
        self.filler = filler
        self.refusals = refusals
        self.stalls = Stalls(loop, config.loop_stall_s)
        self.troubles: list[Trouble] = []
        self.oldest: dict[str, float] = {}  # by kind, seconds; of what there is nothing, 0
        self._seen: dict[Hashable, tuple[Hashable, float]] = {}  # what stood where, and since when
        self._told: dict[str, float] = {}  # kinds of trouble that the log knows of, and the greatest age
        self._thresholds = {
            **dict.fromkeys(("backup", "load"), config.copy_s),
            **dict.fromkeys(("store", "fetch", "probe", "storage"), config.storage_s),
            "event": config.event_s,
            "room": config.room_s,
            "fenced": config.fenced_s,
            "answer": config.answer_s,
            "stream": config.stream_s,
            "reader": config.reader_s,
            "numbers": config.numbers_s,
            "descriptors": 0.0,
            "loop": 0.0,
            "corrupt": 0.0,
            "memory": 0.0,
        }

    def look(self) -> list[Trouble]:
        """What is wrong now. On the loop's thread."""
        now = self.loop.time()
        seen, self._seen = self._seen, {}
        found = [*self._all(now, seen)]
        self.oldest = dict.fromkeys(self._thresholds, 0.0)
        late: dict[str, list[Trouble]] = {}
        for what, age_s, facts in found:
            self.oldest[what] = max(self.oldest[what], age_s)
            if age_s > self._thresholds[what]:
                late.setdefault(what, []).append(Trouble(what, round(age_s, 3), facts))
        self.troubles = []
        for troubles in late.values():
            troubles.sort(key=lambda trouble: -trouble.age_s)
            self.troubles += troubles[:MAX_TOLD]
        self._log(late)
        return self.troubles

    def _log(self, late: dict[str, list[Trouble]]) -> None:
        for what, troubles in late.items():
            first = troubles[0]
            if what not in self._told:
                logger.warning("%s", in_words(what, first.age_s, first.facts))
            self._told[what] = max(self._told.get(what, 0.0), first.age_s)
        for what in [what for what in self._told if what not in late]:
            logger.warning("over, after %.1f s: %s", self._told.pop(what), WORDS[what])

    def _since(self, key: Hashable, mark: Hashable, now: float, seen: dict[Hashable, tuple[Hashable, float]]) -> float:
        """How long `mark` has stood at `key`, as far as was looked."""
        known = seen.get(key)
        since = known[1] if known is not None and known[0] == mark else now
        self._seen[key] = mark, since
        return now - since

    def _all(self, now: float, seen: dict[Hashable, tuple[Hashable, float]]) -> Iterable[Oldest]:
        """The oldest of each kind, and of each session, connection and reader."""
        index = self.index
        for lane in self.copies():
            if lane.in_flight:
                yield Oldest(lane.name, lane.oldest_s, {"in_flight": lane.in_flight})
        if self.third is not None:
            for kind, since, count in self.third.oldest():
                yield Oldest(kind, now - since, {"under_way": count})
            if (why := self.third.wrong()) is not None:
                yield Oldest("storage", self._since("storage", "wrong", now, seen), {"why": why})
        if (asked := index.oldest_wait) is not None:
            facts: dict[str, Any] = {"waiting": len(index.line)}
            extends = index.line.extends.size
            if extends and all(lease.extending for lease in index.leases.values()):
                facts["every_lease_waits"] = extends
            yield Oldest("room", now - asked, facts)
        for id, session in index.sessions.items():
            if session.ended:
                if session.leases:
                    age_s = self._since(("fenced", id), "ended", now, seen)
                    yield Oldest("fenced", age_s, {"session": id, "leases": len(session.leases)})
            elif session.queue:
                ticket = session.queue[0].ticket
                age_s = self._since(("event", id), ticket, now, seen)
                yield Oldest("event", age_s, {"session": id, "ticket": ticket})
        for member in self.sessions.members:
            if member.num_unanswered > 0 and not member.lost:
                age_s = self._since(("answer", member), member.num_answered, now, seen)
                yield Oldest("answer", age_s, {"pid": member.pid, "unanswered": member.num_unanswered})
        if self.publisher is not None:
            behind = self.publisher.behind
            if behind:
                yield Oldest("stream", self._since("stream", self.publisher.next_live, now, seen), {"behind": behind})
            for identity, taken in self.publisher.stalled_readers():
                yield Oldest("reader", self._since(("reader", identity), taken, now, seen), {})
        if (why := self.owner.numbers_fail) is not None:
            yield Oldest("numbers", self._since("numbers", "failing", now, seen), {"why": why})
        if (none_since := self.refusals.none_since()) is not None:
            yield Oldest("descriptors", now - none_since, {"connections": len(self.sessions.members)})
        stall = self.stalls.last
        if stall is not None and now - stall[0] < STALL_TOLD_S:
            yield Oldest("loop", stall[1], {})
        if self.scrubbing is not None and self.scrubbing.since is not None:
            yield Oldest("corrupt", now - self.scrubbing.since, self.scrubbing.found)
        if self.filler is not None and (short := self.filler.short) is not None:
            age_s = self._since("memory", "short", now, seen)
            yield Oldest("memory", age_s, {"pages": short.num_pages, "of": short.of, "why": short.why})
