"""HTTP for people, probes and routers: GET /health, /server_info and /metrics, of all ranks, by the supervisor; and
at /, for browsers, the page of `sglcache/web`.

Each page is made when it is asked for and has a deadline; nothing here changes anything. aiohttp is loaded with this
module: the supervisor does so once the ranks are on their way, and without `[http]` not before somebody asks.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import logging
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from sglcache.errors import BadRequest, Busy, SglcacheError, Unavailable
from sglcache.server import api
from sglcache.server.channel import About

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # Prometheus's
SHUTDOWN_S = 1.0  # what a request that is under way gets when the daemon stops
FILES = {  # of the page, by their path
    "/": ("index.html", "text/html"),
    "/web/app.js": ("app.js", "text/javascript"),
    "/web/tree.js": ("tree.js", "text/javascript"),
    "/web/charts.js": ("charts.js", "text/javascript"),
    "/web/panels.js": ("panels.js", "text/javascript"),
    "/web/style.css": ("style.css", "text/css"),
    "/web/icon.svg": ("icon.svg", "image/svg+xml"),
}
# The page runs nothing and asks nothing but what is here, and no other page may show it in a frame or learn of it.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
API_HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
INDEX = "sglcache: GET /health, /server_info, /digest, /metrics or /api; a browser gets a page at /\n"
STATUS = ((BadRequest, 400), (Busy, 429), (Unavailable, 503))  # of a question that is refused; else 409


class Pages(Protocol):
    """What the pages show. Called on the event-loop thread."""

    def health(self) -> dict[str, Any]:
        """`serving`: every rank serves, if only somehow; else it is answered with 503."""

    async def server_info(self) -> dict[str, Any]: ...

    async def digest(self) -> dict[str, Any]: ...

    async def ask(self, rank: int, about: About, params: Mapping[str, Any]) -> Any:
        """What a rank answers to a question of `api.API`, or the SglcacheError that it refuses with."""

    async def metrics(self) -> bytes:
        """In Prometheus's text format."""


class _Log(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's, for whom what a peer gets wrong is an error, with a traceback: anybody could fill the log so."""

    def exception(self, msg: object, *args: object, exc_info: Any = True, **more: Any) -> None:
        error = exc_info if isinstance(exc_info, BaseException) else sys.exc_info()[1]
        if isinstance(error, HttpProcessingError):
            first, *_ = str(error.message).splitlines() or [""]
            self.debug("a malformed request was refused: %s", first)
        else:
            super().exception(msg, *args, exc_info=exc_info, **more)


class HttpServer:
    """Serves on sockets that listen already, which stay the caller's, from `start` to `stop`."""

    def __init__(self, pages: Pages, socks: Sequence[socket.socket], names: Sequence[str] = ()) -> None:
        """`names`: see `api.may_ask`."""
        self.pages = pages
        self.socks = socks
        self.names = names
        app = web.Application(client_max_size=api.MAX_BODY_BYTES, middlewares=[_errors_as_json])
        for path in FILES:
            app.router.add_get(path, self._file)
        app.router.add_get("/health", self._health)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/digest", self._digest)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/api", self._names)
        app.router.add_get("/api/{name}", self._api)
        app.router.add_post("/api/{name}", self._api)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            shutdown_timeout=SHUTDOWN_S,
            logger=_Log(logging.getLogger("sglcache.http"), {}),
        )

    async def start(self) -> None:
        await self._runner.setup()
        for sock in self.socks:
            await web.SockSite(self._runner, sock).start()

    async def stop(self) -> None:
        """Take no more, let what is under way end, close. Doing it twice is no error."""
        await self._runner.cleanup()

    async def _file(self, request: web.Request) -> web.Response:
        """A part of the page; at / for whoever does not ask for HTML, what there is to ask."""
        if request.path == "/" and "text/html" not in request.headers.get("Accept", ""):
            return web.Response(text=INDEX, headers={"Vary": "Accept"})
        name, kind = FILES[request.path]
        body = importlib.resources.files("sglcache.web").joinpath(name).read_bytes()
        tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        headers = {**PAGE_HEADERS, "ETag": tag, "Vary": "Accept"}
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=headers)

    async def _health(self, _: web.Request) -> web.Response:
        health = self.pages.health()
        return _json(health, status=200 if health.get("serving", health.get("status") == "ok") else 503)

    async def _server_info(self, _: web.Request) -> web.Response:
        return _json(await self.pages.server_info())

    async def _digest(self, _: web.Request) -> web.Response:
        return _json(await self.pages.digest())

    async def _names(self, _: web.Request) -> web.Response:
        """What there is to ask a rank."""
        return _json({"names": sorted(api.API)})

    async def _api(self, request: web.Request) -> web.Response:
        if not api.may_ask(request.headers.get("Host"), self.names):
            raise web.HTTPMisdirectedRequest(reason="not a name of this daemon: use its address, or set http.names")
        name = request.match_info["name"]
        try:
            if request.method == "POST":
                question, rank, params = api.from_body(name, await request.read())
            else:
                question, rank, params = api.from_query(name, request.query)
            answer = await self.pages.ask(rank, question.about, params)
            return web.Response(body=_encode(answer), content_type="application/json", headers=API_HEADERS)
        except SglcacheError as exc:
            status = 404 if name not in api.API else next((at for kind, at in STATUS if isinstance(exc, kind)), 409)
            error = {"code": exc.code, "message": exc.message, "facts": exc.facts}
            return _json({"error": error}, status=status)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=await self.pages.metrics(), headers={"Content-Type": CONTENT_TYPE})


def _encode(answer: object) -> bytes:
    """Most are long, and no one reads them as they are."""
    return msgspec.json.encode(answer, enc_hook=str) + b"\n"


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(
        text=json.dumps(value, indent=2, default=str) + "\n", content_type="application/json", status=status
    )


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as exc:
        message = f"{exc.status} {exc.reason}"
        if exc.status == 413:
            message += f"; at most {api.MAX_BODY_BYTES:,} bytes, which `sglcache explain` is not bound to"
        if exc.status == 404:
            message += f"; {INDEX.partition(': ')[2].strip()}"
        return _json({"error": {"code": "http", "message": message}}, status=exc.status)
