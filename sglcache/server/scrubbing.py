"""What follows when a host page's bytes have changed by themselves: it is never served again.

The scrubber's thread says which slot, and under which sequence of the journal; here, on the loop's thread, the page and
what hangs on it leave the index (`Index.expel`), and routers are told. Where something of it is in use there is nobody
who could be told in time: the rank ends at once, and its next life begins with an empty host tier.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from sglcache.core.index import Index
from sglcache.errors import CorruptPage
from sglcache.memory.journal import Journal
from sglcache.memory.pools import ResourcePools
from sglcache.memory.scrub import Scrubber
from sglcache.server.owner import Owner

logger = logging.getLogger("sglcache.scrub")


class Tell(Protocol):
    """Has the loop's thread call this soon; from any thread."""

    def __call__(self, callback: Callable[..., None], *arguments: object) -> None: ...


class Scrubbing:
    """The scrubber of one life, and what it has found."""

    def __init__(
        self,
        resources: Sequence[ResourcePools],
        journal: Journal,
        rate: int,
        index: Index,
        owner: Owner,
        tell: Tell,
        fail: Callable[[BaseException], None],
    ) -> None:
        """`fail(error)`: end the rank, and trust nothing that it noted."""
        self._names = [each.name for each in resources]
        self._journal = journal
        self._index = index
        self._owner = owner
        self._fail = fail
        self.mismatches = 0
        self.since: float | None = None  # on the loop's clock: when the first was found
        self.found: dict[str, Any] = {}  # how many, and the last of them
        self._scrubber = Scrubber(
            resources,
            journal,
            rate,
            lambda resource, slot, seq: tell(self._bad, resource, slot, seq),
            lambda error: tell(fail, error),
        )

    def start(self) -> None:
        self._scrubber.start()

    def close(self) -> None:
        """Idempotent."""
        self._scrubber.close()

    def facts(self) -> dict[str, Any]:
        """For a status, and metrics."""
        return {**self._scrubber.stats()._asdict(), "mismatches": self.mismatches}

    def _bad(self, resource: int, slot: int, seq: int) -> None:
        if self._owner.failed:
            return
        self._owner.begin_turn()
        index, name = self._index, self._names[resource]
        self.mismatches += 1
        if self.since is None:
            self.since = self._owner.loop.time()
        self.found = {"pages": self.mismatches, "resource": name, "slot": slot}
        what = f"the bytes of host slot {slot} of {name} have changed by themselves"
        if self._journal.seq_of(resource, slot) != seq:
            logger.error("%s; the page that was there has gone meanwhile", what)
            return
        place = index.whereabouts(resource, slot)
        if place is not None:
            what += f"; it held the page up to token {place.end:,} of a prompt" + (
                f" of lora {place.namespace.lora!r}" if place.namespace.lora else ""
            )
        before = index.counters["corrupt_pages"]
        if index.expel(resource, slot):
            gone = index.counters["corrupt_pages"] - before
            more = f", {gone:,} pages with what hung on it" if gone else ""
            logger.error("%s; it is let go of%s, and memory that does so should be looked into", what, more)
            self._owner.end_turn()
            return
        self._fail(
            CorruptPage(
                f"{what}, and it is in use: the rank ends, its next life has an empty host tier; look into the memory",
                resource=name,
                slot=slot,
            )
        )
