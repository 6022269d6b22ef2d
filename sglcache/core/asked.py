"""The last acquires, for those who ask later why one had to compute so much (see `explain`).

What is kept of one is its tokens, which its lease has anyway, the match, and how many runs of pages had left by then:
so the reason is found out when somebody asks, and as of then. Bounded by number, and in bytes of tokens.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from sglcache.core.departures import Departures
from sglcache.core.effects import Grant
from sglcache.core.key import Namespace
from sglcache.wire.control import Acquire


@dataclass(slots=True, eq=False)
class Asked:
    """One acquire. Times are seconds on the index's clock."""

    number: int  # ours
    name: str | None  # the client's
    session: int
    tenant: str | None
    namespace: Namespace
    tokens: bytes  # uint32
    limit: int | None
    at: float
    departures: int = 0  # before the match, or before now
    waits_for: str | None = None  # see `Index.waits_for`
    answered_at: float | None = None
    outcome: str = "waiting"  # granted, or the code of the error
    device_tokens: int = 0
    host_tokens: int = 0


# What is kept of one that was granted at once, as most are: the command, session, namespace, when, how many
# runs of pages had left, tokens matched, and of these from the host.
Entry = tuple[Acquire, int, Namespace, float, int, int, int]


class Acquires:
    """Those of one index."""

    def __init__(self, count: int, num_bytes: int, departures: Departures | None = None) -> None:
        """At most `count`, with `num_bytes` of tokens in all."""
        self.count = count
        self.max_bytes = num_bytes
        self.num_bytes = 0
        self.total = 0
        self._departures = departures
        self._ring: deque[Entry | Asked] = deque()
        self._waiting: dict[tuple[int, int], Asked] = {}  # by session and its number of the command

    def __len__(self) -> int:
        return len(self._ring)

    def granted(self, c: Acquire, session: int, namespace: Namespace, at: float, grant: Grant) -> None:
        """At once."""
        departures = self._departures
        total = 0 if departures is None else departures.total
        self._ring.append((c, session, namespace, at, total, grant[1], grant[2]))
        self.total += 1
        self.num_bytes = num_bytes = self.num_bytes + len(c.tokens)
        if num_bytes > self.max_bytes or len(self._ring) > self.count:
            self._trim()

    def _trim(self) -> None:
        while len(self._ring) > self.count or self.num_bytes > self.max_bytes:
            oldest = self._ring.popleft()
            self.num_bytes -= len(oldest.tokens if isinstance(oldest, Asked) else oldest[0].tokens)

    def refused(self, c: Acquire, session: int, namespace: Namespace, at: float, code: str) -> None:
        """At once."""
        asked = self._add(c, session, namespace, at)
        asked.outcome, asked.answered_at = code, at

    def waits(self, c: Acquire, session: int, namespace: Namespace, at: float, what: str) -> None:
        """It is answered later."""
        self._waiting[session, c.request] = asked = self._add(c, session, namespace, at)
        asked.waits_for = what

    def _add(self, c: Acquire, session: int, namespace: Namespace, at: float) -> Asked:
        self.total += 1
        limit = c.limit if c.exact is None else c.exact
        asked = Asked(self.total, c.request_id, session, c.tenant, namespace, c.tokens, limit, at)
        self._ring.append(asked)
        self.num_bytes += len(c.tokens)
        self._trim()
        return asked

    def answered(self, session: int, request: int, at: float, grant: Grant | None, code: str = "granted") -> None:
        """To one that waits, if it is remembered."""
        asked = self._waiting.pop((session, request), None)
        if asked is None:
            return
        asked.outcome, asked.answered_at = code, at
        if self._departures is not None:
            asked.departures = self._departures.total
        if grant is not None:
            asked.host_tokens = grant.host_tokens
            asked.device_tokens = grant.matched_tokens - grant.host_tokens

    def session_ended(self, session: int) -> None:
        """Nobody is answered any more."""
        for key in [key for key in self._waiting if key[0] == session]:
            self._waiting.pop(key).outcome = "session_ended"

    def find(self, name: str) -> Asked | None:
        """The last one of that name, or of our number, as "#7"; None: there is none, or none any more."""
        digits = name[1:] if name[:1] == "#" else ""
        if digits.isascii() and digits.isdigit() and len(digits) < 20:
            back = self.total - int(digits)
            if 0 <= back < len(self._ring):
                return self._at(back)
        for back, entry in enumerate(reversed(self._ring)):
            if (entry.name if isinstance(entry, Asked) else entry[0].request_id) == name:
                return self._at(back)
        return None

    def last(self, count: int) -> list[Asked]:
        """The newest first."""
        return [self._at(back) for back in range(min(count, len(self._ring)))]

    def _at(self, back: int) -> Asked:
        """The newest but so many."""
        entry = self._ring[-1 - back]
        if isinstance(entry, Asked):
            return entry
        c, session, namespace, at, departures, matched, host = entry
        limit = c.limit if c.exact is None else c.exact
        asked = Asked(self.total - back, c.request_id, session, c.tenant, namespace, c.tokens, limit, at, departures)
        asked.outcome, asked.answered_at = "granted", at
        asked.host_tokens, asked.device_tokens = host, matched - host
        return asked
