"""Whole journeys over a `Rig`, in few words, for tests that say what must come of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sglcache.core.key import ROOT, Namespace
from sglcache.testing.model import DEVICE, LeaseModel
from sglcache.testing.pages import Page
from sglcache.testing.rig import Rig, Runner, pack


def rig(**config: Any) -> tuple[Rig, Runner]:
    """Pages of 4 tokens, 64 of them; and a runner."""
    made = Rig(**{"page_size": 4, "num_pages": 64, **config})
    return made, made.open_session()


def ids(first: int, last: int) -> list[int]:
    """[first..last]"""
    return list(range(first, last + 1))


def acquire(r: Rig, runner: Runner, tokens: Iterable[int], namespace: Namespace = ROOT) -> LeaseModel:
    """A lease that is granted at once."""
    lease = r.acquire(runner, tokens, namespace)
    assert isinstance(lease, LeaseModel), repr(lease)
    return lease


def put(r: Rig, runner: Runner, tokens: Iterable[int], namespace: Namespace = ROOT, ack: bool = True) -> None:
    """Acquire, commit, release; `ack`: and what is copied by it is over before the release."""
    lease = acquire(r, runner, tokens, namespace)
    r.commit(runner, lease)
    if ack:
        r.copies_done()
    r.release(runner, lease)


def pages(r: Rig, tokens: Iterable[int], namespace: Namespace = ROOT) -> tuple[Page, ...]:
    return r.book.path(namespace, pack(tokens))


def hashes(r: Rig, tokens: Iterable[int], namespace: Namespace = ROOT) -> list[int]:
    return [page.hash for page in pages(r, tokens, namespace)]


def evict(r: Rig, runner: Runner, num_pages: int) -> None:
    """Have so many pages evicted from the device, by who comes in their place and leaves nothing."""
    lease = acquire(r, runner, [4_000_000_000] * (r.model.num_free(DEVICE) + num_pages) * r.page_size)
    r.release(runner, lease, discard=True)


def new_events(r: Rig) -> list[dict[str, Any]]:
    """What the stream said since the last call; the mirror is checked against the index by the way."""
    r.cut()
    seen = getattr(r, "events_seen", 0)
    events = r.subscriber.events[seen:]
    r.events_seen = seen + len(events)  # type: ignore[attr-defined]
    return events


def brief(events: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """(kind, medium, hashes, and of what is stored the parent) of each."""
    return [
        (
            e["type"].removeprefix("Block"),
            e.get("medium"),
            e.get("block_hashes"),
            *([e["parent_block_hash"]] if "token_ids" in e else []),
        )
        for e in events
    ]
