"""A KV cache server: owns the KV pages beside a model runner, and tells routers where they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglcache import compiled as compiled  # before anything of the core is imported
from sglcache.errors import SglcacheError

if TYPE_CHECKING:
    from sglcache.client import Client, Worker

__all__ = ["Client", "SglcacheError", "Worker"]


def __getattr__(name: str) -> Any:
    """The clients are loaded when asked for: who only wants `sglcache.wire` shall not pay for them."""
    if name not in ("Client", "Worker"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sglcache import client

    return getattr(client, name)
