"""HTTP for people, probes and routers: GET /health, /server_info and /metrics, on the rank's own event loop.

Each page is made when it is asked for, from what the rank counts anyway, in well under a millisecond; nothing here
changes anything. aiohttp is loaded with this module and so only where HTTP is on.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import urlsplit

from aiohttp import web

from sglcache.errors import ConfigError
from sglcache.server.metrics import CONTENT_TYPE

SHUTDOWN_S = 1.0  # what a request that is under way gets when the daemon stops
MAX_BODY_BYTES = 1 << 16  # nobody sends one
INDEX = "sglcache: GET /health, /server_info, /digest or /metrics\n"


class Pages(Protocol):
    """What the pages show. Called on the event-loop thread."""

    def health(self) -> dict[str, Any]:
        """`status` is "ok" while the rank serves; any other word answers 503."""

    def server_info(self) -> dict[str, Any]: ...

    def digest(self) -> dict[str, Any]: ...

    def metrics(self) -> bytes:
        """In Prometheus's text format."""


class HttpServer:
    """Binds one address from `start` to `stop`."""

    def __init__(self, pages: Pages, host: str, port: int) -> None:
        self.pages = pages
        self.host = host
        self.port = port  # after `start`, the one that is bound
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors_as_json])
        app.router.add_get("/", self._index)
        app.router.add_get("/health", self._health)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/digest", self._digest)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=SHUTDOWN_S)

    @property
    def url(self) -> str:
        """How a browser on this host reaches it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    async def start(self) -> None:
        """Bind and serve. ConfigError: the address can't be bound; nothing is left open."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port)
        try:
            await site.start()
        except OSError as exc:
            await self._runner.cleanup()
            what = "is taken" if exc.errno == errno.EADDRINUSE else f"can't be bound ({exc.strerror or exc})"
            raise ConfigError(
                f"http.port = {self.port}: {self.host}:{self.port} {what}; choose another, or set http.port=0 for any",
                path="http.port",
                value=self.port,
            ) from exc
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Take no more, let what is under way end, close. Doing it twice is no error."""
        await self._runner.cleanup()

    async def _index(self, _: web.Request) -> web.Response:
        return web.Response(text=INDEX)

    async def _health(self, _: web.Request) -> web.Response:
        health = self.pages.health()
        return _json(health, status=200 if health.get("status") == "ok" else 503)

    async def _server_info(self, _: web.Request) -> web.Response:
        return _json(self.pages.server_info())

    async def _digest(self, _: web.Request) -> web.Response:
        return _json(self.pages.digest())

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self.pages.metrics(), headers={"Content-Type": CONTENT_TYPE})


def kv_events(
    endpoint: str, replay_endpoint: str | None, *, topic: str, block_size: int, dp_size: int = 1
) -> dict[str, Any] | None:
    """The block of /server_info by which routers find the stream, as SGLang gives it; None where they could not.

    The endpoints are rank 0's as bound: `tcp://HOST:PORT`. A subscriber dials port base + rank on the host that it
    asked, so `endpoint_host` is always "*": one consumer refuses to start on anything else.
    """
    port = _port(endpoint)
    if port is None:
        return None
    block: dict[str, Any] = {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": port,
        "topic": topic,
        "block_size": block_size,
        "dp_size": dp_size,
    }
    if replay_endpoint is not None and (replay := _port(replay_endpoint)) is not None:
        block["replay_endpoint_port_base"] = replay
    return block


def _port(endpoint: str) -> int | None:
    if not endpoint.startswith("tcp://"):
        return None
    return urlsplit(endpoint).port or None


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(text=json.dumps(value, indent=2) + "\n", content_type="application/json", status=status)


@web.middleware
async def _errors_as_json(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
    try:
        response: web.StreamResponse = await handler(request)
    except web.HTTPException as exc:
        return _json({"error": {"code": "http", "message": f"{exc.status} {exc.reason}"}}, status=exc.status)
    return response
