"""What the page shows of a rank: the tree, one node of it, and the numbers of the moment.

A census (`core/census.py`) runs while somebody looks, a slice at a time with pauses between, so that it takes a share
of the loop and no command waits for more than a slice. `IDLE_S` after the last look all of it is let go of.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Callable
from typing import Any

import msgspec

from sglcache.config import HttpConfig
from sglcache.core.census import Census
from sglcache.core.detail import detail
from sglcache.core.index import Index
from sglcache.core.key import TOKEN_BYTES, Namespace, pack
from sglcache.core.tree import Node
from sglcache.errors import Forbidden
from sglcache.memory.engine import LaneStats
from sglcache.server.owner import Owner
from sglcache.server.sessions import Sessions
from sglcache.server.watch import Watch

SHARE = 4  # of the loop's time at most a fourth, while a census runs
PAUSE_S = 0.5  # between the end of a census and the next
IDLE_S = 15.0
MAX_LEASES = 400  # with more, what each session holds is not worked out every second
MAX_SESSIONS = 100  # told of

COUNTERS = (
    "requests",
    "request_tokens",
    "matched_tokens",
    "host_matched_tokens",
    "l3_matched_tokens",
    "refused",
    "commits",
    "committed_pages",
    "evicted_device_pages",
    "evicted_host_pages",
    "demoted_pages",
    "backup_pages",
    "load_pages",
    "blocks_stored",
    "blocks_removed",
    "all_blocks_cleared",
)


def shows_tokens(http: HttpConfig) -> bool:
    """Whether people may see what is cached: by default only where nobody of another host can ask."""
    if http.show_tokens != "loopback":
        return http.show_tokens == "always"
    if not http.enabled:
        return True  # the unix socket alone
    try:
        return ipaddress.ip_address(http.host).is_loopback
    except ValueError:
        return http.host == "localhost"


class Looking:
    """Of one rank. On the loop's thread."""

    def __init__(
        self,
        index: Index,
        owner: Owner,
        sessions: Sessions,
        watch: Watch,
        copies: Callable[[], list[LaneStats]],
        stream: Callable[[], dict[str, Any] | None],
        *,
        show_tokens: bool,
    ) -> None:
        self.index = index
        self.owner = owner
        self.sessions = sessions
        self.watch = watch
        self.copies = copies
        self.stream = stream
        self.show_tokens = show_tokens
        self.census = Census(index)
        self._looked_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._pausing = False

    def tree(self, root: int | None = None, budget: int = 1000) -> dict[str, Any]:
        """A picture of the tree, or of the branch at `root`; `pending`: it is being made, ask again in a moment."""
        self._look()
        picture = self.census.look(root, budget)
        if picture is None:
            self._hurry()
            return {"epoch": self.owner.numbers.first, "pending": True}
        return {"epoch": self.owner.numbers.first, **picture}

    def node(self, name: int, start: int = 0) -> dict[str, Any]:
        """One node, as `core/detail.py` tells of it."""
        self._look()
        self.owner.begin_turn()
        return {"epoch": self.owner.numbers.first, **detail(self.census, name, start, self.show_tokens)}

    def find(self, tokens: list[int], lora: str | None = None) -> dict[str, Any]:
        """The node in which the match of a prompt ends, and how far it reaches. Forbidden: it is not told here."""
        if not self.show_tokens:
            raise Forbidden("what is cached of which tokens is not told here: http.show_tokens says where it is")
        self._look()
        index = self.index
        key = pack(tokens)
        space = index.tree.spaces.get(Namespace.of(lora))
        end: Node | None = None
        matched = 0
        if space is not None:
            path, partial, at = index._match(space.root, key, index.keys.whole(len(key)))
            matched = sum(node.num_bytes for node in path) + at
            end = partial if partial is not None else path[-1] if path else None
        name = None if end is None else self.census.name(end)
        return {"epoch": self.owner.numbers.first, "name": name, "matched_tokens": matched // TOKEN_BYTES}

    def live(self) -> dict[str, Any]:
        """The numbers of the moment, small enough to be asked for every second."""
        index = self.index
        stats = index.stats()
        return {
            "epoch": self.owner.numbers.first,
            "at": time.time(),
            "page_size": index.config.page_size,
            "show_tokens": self.show_tokens,
            "pools": [{**pool._asdict(), "tier": pool.tier.name} for pool in stats.pools],
            "gauges": {
                "nodes": stats.num_nodes,
                "spaces": stats.num_spaces,
                "sessions": stats.num_sessions,
                "leases": stats.num_leases,
                "fenced_leases": stats.num_fenced_leases,
                "waiting": stats.num_waiting,
                "copies": stats.num_copies,
                "pinned_pages": stats.pinned_pages,
            },
            "counters": {name: stats.counters[name] for name in COUNTERS if name in stats.counters},
            "tenants": [{**each._asdict(), "tier": each.tier.name} for each in stats.tenants],
            "copies": [lane._asdict() for lane in self.copies()],
            "stream": self.stream(),
            "sessions": self._sessions(),
            "troubles": [msgspec.structs.asdict(each) for each in self.watch.troubles],
            "oldest": self.watch.oldest,
            "longest_stall_s": self.watch.stalls.longest_s,
        }

    def close(self) -> None:
        """Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.census.close()

    def _sessions(self) -> list[dict[str, Any]]:
        index = self.index
        if len(index.leases) <= MAX_LEASES and len(index.sessions) <= MAX_SESSIONS:
            return self.sessions.describe()
        sessions = list(index.sessions.values())[:MAX_SESSIONS]
        return [
            {"session": each.id, "ended": each.ended, "leases": len(each.leases), "pins": len(each.pins)}
            for each in sessions
        ]

    # -- the census ----------------------------------------------------------------------------------------

    def _look(self) -> None:
        self._looked_at = self.owner.loop.time()
        if self._timer is None:
            self._timer = self.owner.loop.call_later(0, self._slice)

    def _hurry(self) -> None:
        """Somebody waits for a picture: let there be no pause."""
        if self._pausing and self._timer is not None:
            self._pausing = False
            self._timer.cancel()
            self._timer = self.owner.loop.call_later(0, self._slice)

    def _slice(self) -> None:
        started = self.owner.begin_turn()
        self._timer = None
        self._pausing = False
        if started - self._looked_at > IDLE_S:
            self.census.close()
            return
        began = time.perf_counter()
        if self.census.step():
            took = time.perf_counter() - began
            self._timer = self.owner.loop.call_later(took * (SHARE - 1), self._slice)
        else:
            self._pausing = True
            self._timer = self.owner.loop.call_later(PAUSE_S, self._slice)
