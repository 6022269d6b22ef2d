"""The three pages, over a real socket, of a rank that is made up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
import pytest

from sglcache.errors import ConfigError
from sglcache.server.http import HttpServer, kv_events


class FakeRank:
    def __init__(self) -> None:
        self.state = "ok"

    def health(self) -> dict[str, Any]:
        return {"status": self.state}

    def server_info(self) -> dict[str, Any]:
        return {"model_name": "m", "kv_events": kv_events("tcp://127.0.0.1:5557", None, topic="", block_size=16)}

    def metrics(self) -> bytes:
        return b"# HELP a b\n"


def serve(test: Callable[[HttpServer, FakeRank, aiohttp.ClientSession], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        rank = FakeRank()
        server = HttpServer(rank, "127.0.0.1", 0)
        await server.start()
        try:
            async with aiohttp.ClientSession(server.url) as session:
                await test(server, rank, session)
        finally:
            await server.stop()
            await server.stop()

    asyncio.run(main())


def test_health_is_200_only_while_the_rank_serves() -> None:
    async def test(_: HttpServer, rank: FakeRank, session: aiohttp.ClientSession) -> None:
        for state, expected in (("ok", 200), ("draining", 503)):
            rank.state = state
            async with session.get("/health") as answer:
                assert (answer.status, await answer.json()) == (expected, {"status": state})

    serve(test)


def test_server_info_and_metrics_are_given_as_their_readers_want_them() -> None:
    async def test(server: HttpServer, _: FakeRank, session: aiohttp.ClientSession) -> None:
        assert server.port != 0
        async with session.get("/server_info") as answer:
            assert answer.content_type == "application/json"
            assert (await answer.json())["kv_events"]["endpoint_host"] == "*"
        async with session.get("/metrics") as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert await answer.text() == "# HELP a b\n"
        async with session.get("/") as answer:
            assert "/server_info" in await answer.text()

    serve(test)


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nothing", 404), ("POST", "/health", 405)])
def test_a_wrong_request_is_told_as_json(method: str, path: str, status: int) -> None:
    async def test(_: HttpServer, __: FakeRank, session: aiohttp.ClientSession) -> None:
        async with session.request(method, path) as answer:
            assert answer.status == status
            assert (await answer.json())["error"]["code"] == "http"

    serve(test)


def test_a_port_that_is_taken_is_a_config_error_with_the_remedy() -> None:
    async def test(server: HttpServer, rank: FakeRank, _: aiohttp.ClientSession) -> None:
        second = HttpServer(rank, "127.0.0.1", server.port)
        with pytest.raises(ConfigError, match=r"is taken; choose another, or set http\.port=0") as caught:
            await second.start()
        assert caught.value.path == "http.port"

    serve(test)


def test_kv_events_is_sglangs_block() -> None:
    block = kv_events("tcp://127.0.0.1:5557", "tcp://[::1]:5657", topic="kv", block_size=16, dp_size=2)
    assert block == {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": 5557,
        "topic": "kv",
        "block_size": 16,
        "dp_size": 2,
        "replay_endpoint_port_base": 5657,
    }


def test_kv_events_is_null_where_no_router_could_dial() -> None:
    assert kv_events("ipc:///tmp/a", None, topic="", block_size=16) is None
