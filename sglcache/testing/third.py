"""L3 for a `Rig`: a store whose completions are held back, fail and lie, and an index's L3 seen step by step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from sglcache.core.effects import Cancel, Effect, Fetch, Probe, Result, Run, Store
from sglcache.core.key import Namespace
from sglcache.core.l3 import L3, Prefetch, Storing, Waiter
from sglcache.core.tree import Node
from sglcache.testing.pages import Book, Page, ancestry
from sglcache.units import TicketId

if TYPE_CHECKING:
    from sglcache.testing.rig import Watched

DEVICE, HOST = 0, 1


class Step(NamedTuple):
    """What the index's L3 did at a moment of a turn, between the answers of which `wakes` were given before."""

    wakes: int
    kind: str  # hold, let go, adopt, free, serve
    tier: int = HOST
    pages: tuple[Page, ...] = ()
    slots: tuple[int, ...] = ()
    request: int = 0


class WatchedL3(L3):
    """An L3 that notes each step that touches the books, in order."""

    index: Watched

    def _note(self, kind: str, **what: object) -> None:
        self.index.happened.append(Step(self.index.num_wakes, kind, **what))  # type: ignore[arg-type]

    def _path(self, node: Node | None) -> tuple[Page, ...]:
        return () if node is None else self.index.path(node)

    def _offer(self, end: Node, num_pages: int) -> None:
        super()._offer(end, num_pages)
        self._note("hold", pages=self._path(end))

    def _stored(self, storing: Storing) -> None:
        self._note("let go", pages=self._path(storing.end))
        super()._stored(storing)

    def want(
        self, namespace: Namespace, path: list[Node], tokens: bytes, waiter: Waiter | None, tenant: int = 0
    ) -> None:
        super().want(namespace, path, tokens, waiter, tenant)
        prefetch = self.prefetches[-1]
        self._note("hold", tier=DEVICE, pages=self._path(prefetch.device_end))
        self._note("hold", pages=self._path(prefetch.host_end))

    def _settle(self, prefetch: Prefetch) -> None:
        before = self._path(prefetch.host_end)
        super()._settle(prefetch)
        further = self._path(prefetch.host_end)[len(before) :]
        if further:
            self._note("hold", pages=further)

    def _pass(self, prefetch: Prefetch) -> None:
        before = self._path(prefetch.host_end)
        super()._pass(prefetch)
        further = self._path(prefetch.host_end)[len(before) :]
        if further:
            self._note("hold", pages=further)

    def _adopt(self, prefetch: Prefetch) -> None:
        slots, before = prefetch.slots, self._path(prefetch.anchor)
        super()._adopt(prefetch)
        pages = self._path(prefetch.anchor)[len(before) :]
        if pages:
            self._note("adopt", pages=pages, slots=tuple(memoryview(slots).cast("i"))[: len(pages)])

    def _give(self, prefetch: Prefetch, slots: bytes) -> None:
        super()._give(prefetch, slots)
        if slots:
            self._note("free", slots=tuple(memoryview(slots).cast("i")))

    def _end(self, prefetch: Prefetch) -> None:
        host, device = self._path(prefetch.host_end), self._path(prefetch.device_end)
        self._note("let go", pages=host)
        self._note("let go", tier=DEVICE, pages=device)
        super()._end(prefetch)

    def _next(self, waiter: Waiter, came: int) -> Result | None:
        self._note("serve", request=waiter.request)
        return super()._next(waiter, came)


@dataclass(eq=False)
class Op:
    """An effect for L3 that has no answer yet."""

    effect: Store | Probe | Fetch
    pages: tuple[Page, ...]
    slots: tuple[int, ...]
    cancelled: bool = False


@dataclass
class FakeL3:
    """What is in L3, and what is under way. An exact one's pages always have the ones before them."""

    book: Book
    pages: dict[Page, None] = field(default_factory=dict)
    ops: dict[TicketId, Op] = field(default_factory=dict)

    def take(self, effect: Effect) -> Op | None:
        """An effect of the index; None: a cancel."""
        if isinstance(effect, Cancel):
            self.ops[effect.ticket].cancelled = True  # of what is over is no cancel
            return None
        assert isinstance(effect, Store | Probe | Fetch)
        pages = self.pages_of(effect.run)
        slots: tuple[int, ...] = ()
        if not isinstance(effect, Probe):
            slots = tuple(memoryview(effect.slots).cast("i"))
            assert len(slots) == len(pages) == len(set(slots))
        op = self.ops[effect.ticket] = Op(effect, pages, slots)
        return op

    def pages_of(self, run: Run) -> tuple[Page, ...]:
        """A run's pages; it must say of each what is so."""
        book = self.book
        before = None if run.before is None else book.by_digest[run.before]
        pages = book.path(run.namespace, run.tokens, before)
        assert pages, "a run of no page"
        assert b"".join(page.digest for page in pages) == run.digests, f"{run} has other digests"
        return pages

    def run(self, pages: tuple[Page, ...]) -> Run:
        """Neighbours, as a run."""
        first, last = pages[0], pages[-1]
        over = last.words[-4:] if self.book.bigram else b""
        return Run(
            Namespace(*first.namespace),
            None if first.parent is None else first.parent.digest,
            b"".join(page.digest for page in pages),
            b"".join(page.tokens for page in pages) + over,
        )

    def leaves(self) -> list[Page]:
        """What may go without leaving a page that lacks the one before it."""
        parents = {page.parent for page in self.pages}
        return [page for page in self.pages if page not in parents]

    def throw_away(self, page: Page) -> bytes:
        """A page that is bad, and all behind it; the digests, children first."""
        gone = [each for each in self.pages if page in ancestry(each)]
        gone.sort(key=lambda each: -each.depth)
        for each in gone:
            del self.pages[each]
        return b"".join(each.digest for each in gone)
