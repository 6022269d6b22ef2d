"""A model runner's client (`Client`, `Worker`) and a router's mirror (`mirror.Mirror`), each loaded when asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglcache.client.client import Client, Committed, Dump, Event, Extension, Lease, Peeked, Pending, Worker
    from sglcache.client.stages import acquire_alike

__all__ = [
    "Client",
    "Committed",
    "Dump",
    "Event",
    "Extension",
    "Lease",
    "Peeked",
    "Pending",
    "Worker",
    "acquire_alike",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sglcache.client import client, stages

    return getattr(stages if name == "acquire_alike" else client, name)
