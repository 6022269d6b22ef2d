"""The last acquires, for those who ask later why one had to compute so much (see `explain`).

What is kept of one is its tokens, which its lease has anyway, the match, and how many runs of pages had left by then:
so the reason is found out when somebody asks, and as of then. Bounded by number, and in bytes of tokens.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from sglcache.core.key import Namespace


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


class Acquires:
    """Those of one index."""

    def __init__(self, count: int, num_bytes: int) -> None:
        """At most `count`, with `num_bytes` of tokens in all."""
        self.count = count
        self.max_bytes = num_bytes
        self.num_bytes = 0
        self.total = 0
        self._ring: deque[Asked] = deque()
        self._waiting: dict[tuple[int, int], Asked] = {}  # by session and its number of the command

    def __len__(self) -> int:
        return len(self._ring)

    def add(
        self,
        name: str | None,
        session: int,
        tenant: str | None,
        namespace: Namespace,
        tokens: bytes,
        limit: int | None,
        at: float,
    ) -> Asked:
        self.total += 1
        asked = Asked(self.total, name, session, tenant, namespace, tokens, limit, at)
        self._ring.append(asked)
        self.num_bytes += len(tokens)
        while len(self._ring) > self.count or self.num_bytes > self.max_bytes:
            self.num_bytes -= len(self._ring.popleft().tokens)
        return asked

    def wait(self, asked: Asked, request: int, what: str) -> None:
        """It is answered later."""
        asked.waits_for = what
        self._waiting[asked.session, request] = asked

    def answered(self, session: int, request: int) -> Asked | None:
        """Which of those that wait this is the answer to; None: to none of them."""
        return self._waiting.pop((session, request), None) if self._waiting else None

    def session_ended(self, session: int) -> None:
        """Nobody is answered any more."""
        for key in [key for key in self._waiting if key[0] == session]:
            self._waiting.pop(key).outcome = "session_ended"

    def find(self, name: str) -> Asked | None:
        """The last one of that name, or of our number, as "#7"; None: there is none, or none any more."""
        number = int(name[1:]) if name[:1] == "#" and name[1:].isascii() and name[1:].isdigit() else 0
        for asked in reversed(self._ring):
            if asked.name == name or asked.number == number:
                return asked
        return None

    def last(self, count: int) -> list[Asked]:
        """The newest first."""
        return [self._ring[-1 - i] for i in range(min(count, len(self._ring)))]
