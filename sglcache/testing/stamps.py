"""When each page came and was last let go of, page by page: what the stamps of nodes are held against."""

from __future__ import annotations

from collections.abc import Callable

from sglcache.core.index import Index
from sglcache.core.tree import Node
from sglcache.testing.pages import Page

Path = tuple[Page, ...]


class Stamps:
    """Times by page. To come is an access, too, of the page and of all before it."""

    def __init__(self) -> None:
        self.born: dict[Page, float] = {}
        self.used: dict[Page, float] = {}
        self.gone: tuple[dict[Page, tuple[float, bool]], ...] = ({}, {})  # by tier, the last time
        self.of_tier: tuple[dict[Page, float], ...] = ({}, {})  # accesses by who held the page in this tier

    def came(self, path: Path, num_pages: int, now: float) -> None:
        """The last `num_pages` of a path are in one tier more."""
        new = [page for page in path[-num_pages:] if page not in self.born]
        self.born.update(dict.fromkeys(new, now))
        if new:
            self.used.update(dict.fromkeys(path, now))

    def left(self, tier: int, path: Path, num_pages: int, now: float, kept: bool) -> None:
        """The last `num_pages` of a path left a tier; `kept`: the other has them."""
        self.gone[tier].update(dict.fromkeys(path[-num_pages:], (now, kept)))

    def cleared(self) -> None:
        """Of all: nothing is known of what was before."""
        for times in self.gone:
            times.clear()

    def accessed(self, tier: int, path: Path, now: float) -> None:
        """Who held a path in a tier has let go of it."""
        self.used.update(dict.fromkeys(path, now))
        self.of_tier[tier].update(dict.fromkeys(path, now))

    def check(self, index: Index, path_of: Callable[[Node], Path]) -> None:
        """The latest `used` at or below a node is its first page's, and a tier's leaf has its tier's.

        Where nodes were joined it is between that and what is true of the first page of all on the path."""
        nodes = list(index.tree.nodes())
        paths = {node: path_of(node) for node in nodes}
        there = {page for node in nodes for page in paths[node][-(node.num_bytes // index.page_bytes) :]}
        for times in (self.born, self.used, *self.of_tier):
            for page in [page for page in times if page not in there]:
                del times[page]
        latest = {node: node.used for node in nodes}
        for node in reversed(nodes):
            if node.parent in latest:
                latest[node.parent] = max(latest[node.parent], latest[node])
        for node in nodes:
            path = paths[node]
            mine = path[-(node.num_bytes // index.page_bytes) :]
            least, most = self.used[mine[0]], self.used[path[0]]
            if not index.tree.num_merges:
                most = least
            assert least <= latest[node] <= most, (
                f"{node!r} was used at {latest[node]}, and should have been from {least} to {most}"
            )
            first = min(self.born[page] for page in mine)
            assert node.born <= first, f"{node!r} was born at {node.born}, and a page of it came at {first}"
            assert node.born == first or index.tree.num_merges, f"{node!r} was born at {node.born}, not at {first}"
            for tier, times in enumerate(self.of_tier[: index.T]):
                below = any(child.cells[tier] is not None for child in index.tree.children(node))
                if node.cells[tier] is not None and not below:
                    assert node.used >= times.get(mine[0], 0.0), f"{node!r}, a leaf of tier {tier}, has {node.used}"
