"""What a rank lets its clients have: how long they may wait, and how much expensive work goes on at once."""

from __future__ import annotations

from collections import Counter
from typing import Any

from sglcache.config import LimitsConfig
from sglcache.core.line import Patience
from sglcache.errors import BadRequest, Busy

_new = tuple.__new__  # a NamedTuple's own is a Python function around this


class Limits:
    """`[limits]` of a rank, and what is under way of what they bound."""

    def __init__(self, config: LimitsConfig) -> None:
        self.config = config
        self._acquire_wait_s, self._copy_wait_s = config.acquire_wait_s, config.copy_wait_s
        self._expensive: Counter[tuple[object, str]] = Counter()  # by who asked, and what

    def patience(self, wait_s: float | None, now: float) -> Patience:
        """How long a command waits that says `wait_s`, and came `now`."""
        if wait_s is None:
            wait_s = self._acquire_wait_s
        if not wait_s:
            return _new(Patience, (now, None, now + self._copy_wait_s))
        config = self.config
        room = now + min(wait_s, config.max_wait_s) if wait_s > 0 else None
        return Patience(now, room, now + config.copy_wait_s)

    def until(self, until: float | None, now: float) -> float | None:
        """The same of a wait for the third tier."""
        return None if until is None else min(until, now + self.config.max_wait_s)

    def check_ttl(self, ttl_s: float) -> None:
        """BadRequest: a pin may not last so long."""
        most = self.config.max_pin_ttl_s
        if ttl_s > most:
            raise BadRequest(
                f"a pin of {ttl_s:g} s; at most {most:g} are given: pin it again in time, or raise "
                "limits.max_pin_ttl_s",
                ttl_s=ttl_s,
                max_pin_ttl_s=most,
            )

    def check_count(self, what: str, count: int, key: str) -> None:
        """Busy: there are as many of `what` as `key` of the configuration lets there be."""
        most: int = getattr(self.config, key)
        if count >= most:
            facts: dict[str, Any] = {what: count, key: most}
            raise Busy(f"there are {count} {what}, and {key} is {most}; close some, or raise limits.{key}", **facts)

    def begin(self, who: object, what: str) -> None:
        """Expensive work for a connection begins; `end` it. Busy: it has one of that kind, or there are too many."""
        total, most = self._expensive.total(), self.config.max_expensive
        if self._expensive[who, what] or total >= most:
            mine = f"this connection's {what} is under way" if self._expensive[who, what] else "others are under way"
            raise Busy(
                f"{mine}: {total} of {most} explanations, dumps, proofs, clears and announcements at once; "
                "ask again when it is over, or raise limits.max_expensive",
                what=what,
                under_way=total,
                max_expensive=most,
            )
        self._expensive[who, what] += 1

    def end(self, who: object, what: str) -> None:
        """Of what is not under way is no error."""
        self._expensive.pop((who, what), None)
