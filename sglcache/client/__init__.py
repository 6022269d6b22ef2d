"""A model runner's client (`Client`, `Worker`) and a router's mirror (`mirror.Mirror`), each loaded when asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglcache.client.client import Client, Committed, Dump, Event, Extension, Lease, Peeked, Pending, Worker

__all__ = ["Client", "Committed", "Dump", "Event", "Extension", "Lease", "Peeked", "Pending", "Worker"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sglcache.client import client

    return getattr(client, name)
