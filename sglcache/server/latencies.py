"""How long commands take, as the rank sees it: from when the loop read a frame to when its answer was written.

What is answered in the turn that serves it was work alone, its own and of what stood before it in that turn. What is
answered later has waited for something: an event, a copy, room, the third tier, a slice of long work. The two are apart
(`WORK`, `WAIT`), since the first is the rank's own speed and the second what it was asked to wait for. A release that
asks for no answer was work until it was served. A `Recorded` is in neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, get_args

from sglcache.core.histograms import Histogram, Observed
from sglcache.units import Tier
from sglcache.wire import control

if TYPE_CHECKING:
    from sglcache.server.rank import Parts

WORK, WAIT = "work", "wait"
OK, REFUSED = "ok", "refused"
OTHER = "other"
TIERS = tuple(tier.name.lower() for tier in (Tier.DEVICE, Tier.HOST))
KINDS: dict[type, str] = {
    control.Acquire: "acquire",
    control.Extend: "extend",
    control.Commit: "commit",
    control.Release: "release",
    control.Cancel: "cancel",
    control.CancelRequest: "cancel",
    control.Prefetch: "prefetch",
    control.Peek: "peek",
    control.Pin: "pin",
    control.Unpin: "pin",
}
"""What engines send, by name; the rest, which people and their scripts send, is `OTHER`."""


class Times:
    """Of one kind of command, by how it was answered."""

    __slots__ = ("refused", "wait", "work")

    def __init__(self, refused: Times | None = None) -> None:
        """`refused`: of those that were; None: these are they."""
        self.work = Histogram()
        self.wait = Histogram()
        self.refused = refused or self


Asked = tuple[Times, float]  # a command without an answer, and when it was read (perf_counter)


class CommandTimes:
    """Of one rank. Touched by the loop's thread alone."""

    def __init__(self) -> None:
        self.by_name = {name: Times(Times()) for name in (*KINDS.values(), OTHER)}
        self.of = {kind: self.by_name[KINDS.get(kind, OTHER)] for kind in get_args(control.Command)}

    def observed(self, what: str) -> Iterator[tuple[dict[str, str], Observed]]:
        """Of `WORK` or `WAIT`: by the labels `command` and `outcome`."""
        for name, times in self.by_name.items():
            for outcome, each in ((OK, times), (REFUSED, times.refused)):
                histogram = each.work if what == WORK else each.wait
                yield {"command": name, "outcome": outcome}, histogram.observed()


Observations = dict[str, list[tuple[dict[str, str], Observed]]]


def of_rank(parts: Parts) -> Observations:
    """All that a rank measures, by the keys of `metrics.HISTOGRAMS`: the labels beside `rank`, and what was seen."""
    times, index = parts.owner.times, parts.index
    found: Observations = {
        "commands": [*times.observed(WORK)],
        "waits": [*times.observed(WAIT)],
        "events": [({}, parts.sessions.event_waits.observed())],
        "copies": [({"direction": lane.name}, lane.latency()) for lane in parts.engine.lanes.values()],
        "lifetimes": [({"tier": tier}, each.observed()) for tier, each in zip(TIERS, index.lifetimes, strict=False)],
        "idle": [({"tier": tier}, each.observed()) for tier, each in zip(TIERS, index.idle_times, strict=False)],
        "stalls": [({}, parts.watch.stalls.histogram.observed())],
    }
    if (third := parts.owner.third) is not None:
        found["third"] = [({"kind": kind}, each.observed()) for kind, each in third.latency.items()]
    if (publisher := parts.publisher) is not None:
        found["delays"] = [({}, publisher.delay.observed())]
        found["snapshots"] = [({}, publisher.snapshot_duration.observed())]
    return found
