"""Whether a live rank is what it says: every check that it can make of itself, and one from outside.

Each is tried again for as long as commands overtake it and there is time; one that was never seen whole is told of as
overtaken, which is neither right nor wrong.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from sglcache.client import verify
from sglcache.client.client import Client
from sglcache.client.mirror import Curve
from sglcache.errors import Busy, SglcacheError
from sglcache.wire.control import CHECKS

MIRROR = "mirror"
PAUSE_S = 0.05  # before a check that was overtaken is tried again

OK, VIOLATION, OVERTAKEN, SKIPPED = "ok", "violation", "overtaken", "skipped"


class Result(NamedTuple):
    """What became of one check."""

    name: str
    result: str  # OK, VIOLATION, OVERTAKEN or SKIPPED
    checked: int = 0  # nodes, blocks, pages, members or descriptors that were looked at
    violations: tuple[str, ...] = ()  # the first few
    num_violations: int = 0
    why: str | None = None  # there is no result
    seconds: float = 0.0


def fsck(
    observer: Client, *, mirror: bool = False, timeout_s: float = 30.0, curve: Curve | None = None
) -> list[Result]:
    """All checks of the observer's rank, in their order; `mirror`: of its stream, too. `timeout_s`: of each."""
    results = [one(observer, name, timeout_s) for name in CHECKS]
    if mirror:
        results.append(of_the_stream(observer, timeout_s, curve))
    return results


def one(observer: Client, name: str, timeout_s: float) -> Result:
    began = time.monotonic()
    while True:
        facts: dict[str, Any]
        try:
            facts = observer.check(name)
        except Busy as exc:  # others have as much looked at as the rank allows at once
            facts = {"overtaken": exc.message}
        took = time.monotonic() - began
        if (why := facts.get("skipped")) is not None:
            return Result(name, SKIPPED, why=why, seconds=took)
        if (why := facts.get("overtaken")) is None:
            found = tuple(facts["violations"])
            result = VIOLATION if facts["num_violations"] else OK
            return Result(name, result, facts["checked"], found, facts["num_violations"], seconds=took)
        if took > timeout_s:
            return Result(name, OVERTAKEN, why=why, seconds=took)
        time.sleep(PAUSE_S)


def of_the_stream(observer: Client, timeout_s: float, curve: Curve | None) -> Result:
    """`sglcache verify`'s, for a second: a mirror of the stream is held against the index."""
    began = time.monotonic()
    if observer.status()["stream"] is None:
        return Result(MIRROR, SKIPPED, why="events are off")
    try:
        curve = curve or Curve.of_stream(observer.status()["stream"])
        report = verify.verify(observer, duration_s=1.0, timeout_s=timeout_s, curve=curve)
    except SglcacheError as exc:
        if exc.code != "config":
            raise
        return Result(MIRROR, SKIPPED, why=exc.message)
    took = time.monotonic() - began
    blocks = sum(tier.blocks for tier in report.tiers.values())
    if not report.ok and not report.digests and not any(not tier.equal for tier in report.tiers.values()):
        return Result(MIRROR, OVERTAKEN, why="; ".join(report.problems), seconds=took)
    result = OK if report.ok else VIOLATION
    return Result(MIRROR, result, blocks, tuple(report.problems), len(report.problems), seconds=took)
