"""The three pages, over real sockets, of ranks that are made up."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import socket
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import pytest
from msgspec import Meta

from sglcache import paths, ranks
from sglcache.errors import BadRequest, Busy, ConfigError, Unavailable
from sglcache.memory.mapping import create_memfd
from sglcache.ranks import ask
from sglcache.server import api, doors
from sglcache.server.http import HttpServer


class FakePages:
    def __init__(self) -> None:
        self.state = "ok"

    def health(self) -> dict[str, Any]:
        return {"status": self.state}

    async def server_info(self) -> dict[str, Any]:
        return {"model_name": "m"}

    async def metrics(self) -> bytes:
        return b"# HELP a b\n"

    async def ask(self, rank: int, about: str, params: Mapping[str, Any]) -> Any:
        if rank == 2:
            raise Busy("others are under way")
        if rank == 1:
            raise Unavailable("rank 1 is starting", rank=1)
        if rank > 1:
            raise BadRequest(f"there is no rank {rank} here", rank=rank)
        return {"about": about, "params": params}


def serve(
    test: Callable[[FakePages, aiohttp.ClientSession], Coroutine[Any, Any, None]], host: str = "127.0.0.1"
) -> None:
    async def main() -> None:
        pages = FakePages()
        sock = doors.tcp(host, 0, "http")
        url = doors.url(host, sock.getsockname()[1])
        server = HttpServer(pages, [sock])
        await server.start()
        try:
            async with aiohttp.ClientSession(url) as session:
                await test(pages, session)
        finally:
            await server.stop()
            await server.stop()

    asyncio.run(main())


class Depth(api.Params):
    depth: Annotated[int, Meta(ge=1)]
    name: str = ""


def test_the_api_asks_a_rank_by_query_or_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(api.API, "depth", api.Question("digest", Depth))

    async def test(_: FakePages, session: aiohttp.ClientSession) -> None:
        told = {"about": "digest", "params": {"depth": 3, "name": "a"}}
        async with session.get("/api/depth?depth=3&name=a") as answer:
            assert (answer.status, await answer.json()) == (200, told)
        async with session.post("/api/depth", json={"depth": 3, "name": "a", "rank": 0}) as answer:
            assert (answer.status, await answer.json()) == (200, told)
        for path, status, code, words in (
            ("/api/depth", 400, "bad_request", "depth"),
            ("/api/depth?depth=0", 400, "bad_request", ">= 1"),
            ("/api/depth?depth=1&deep=1", 400, "bad_request", "deep"),
            ("/api/depth?depth=1&rank=x", 400, "bad_request", "int"),
            ("/api/depth?depth=1&rank=7", 400, "bad_request", "no rank 7"),
            ("/api/depth?depth=1&rank=2", 429, "busy", "under way"),
            ("/api/depth?depth=1&rank=1", 503, "unavailable", "starting"),
            ("/api/nothing", 404, "bad_request", "there are"),
        ):
            async with session.get(path) as answer:
                error = (await answer.json())["error"]
                assert (answer.status, error["code"]) == (status, code), path
                assert words in error["message"]
        for body in (b"[1]", b"{", b"\xff", b"[" * 100_000):
            async with session.post("/api/depth", data=body) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (400, "bad_request")
        async with session.post("/api/depth", data=io.BytesIO(bytes(api.MAX_BODY_BYTES + 1))) as answer:
            assert answer.status == 413
            assert "4,194,304" in (await answer.json())["error"]["message"]

    serve(test)


def test_the_api_answers_under_the_daemons_own_names_alone() -> None:
    async def test(_: FakePages, session: aiohttp.ClientSession) -> None:
        for host, status in (("127.0.0.1", 200), ("localhost:80", 200), ("[::1]:80", 200), ("evil.example", 421)):
            async with session.get("/api/facts", headers={"Host": host}) as answer:
                assert answer.status == status, host

    serve(test)
    assert api.may_ask("cache.internal:30080", ["cache.internal"])
    assert api.may_ask("any", ["*"])
    assert not api.may_ask(None, [])


def test_health_is_200_only_while_the_rank_serves() -> None:
    async def test(pages: FakePages, session: aiohttp.ClientSession) -> None:
        for state, expected in (("ok", 200), ("draining", 503)):
            pages.state = state
            async with session.get("/health") as answer:
                assert (answer.status, await answer.json()) == (expected, {"status": state})

    serve(test)


def test_server_info_and_metrics_are_given_as_their_readers_want_them() -> None:
    async def test(_: FakePages, session: aiohttp.ClientSession) -> None:
        async with session.get("/server_info") as answer:
            assert answer.content_type == "application/json"
            assert (await answer.json()) == {"model_name": "m"}
        async with session.get("/metrics") as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert await answer.text() == "# HELP a b\n"
        async with session.get("/") as answer:
            assert "/server_info" in await answer.text()

    serve(test)


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nothing", 404), ("POST", "/health", 405)])
def test_a_wrong_request_is_told_as_json(method: str, path: str, status: int) -> None:
    async def test(_: FakePages, session: aiohttp.ClientSession) -> None:
        async with session.request(method, path) as answer:
            assert answer.status == status
            assert (await answer.json())["error"]["code"] == "http"

    serve(test)


def test_a_supervisor_that_is_stopped_is_told_from_one_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "ANSWER_S", 0.05)
    path = tmp_path / "supervisor.sock"
    with pytest.raises(Unavailable, match="no supervisor answers"):
        ask(path)
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(path))
        stopped.listen(0)
        with pytest.raises(Unavailable, match=f"\\(pid {os.getpid()}\\) is there, and does not answer") as told:
            ask(path)
        assert told.value.pid == os.getpid()
        with pytest.raises(Unavailable, match="is there, and does not answer"):
            ask(path)  # and who is before it has not been accepted, either


def test_a_malformed_request_is_no_traceback_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def test(pages: FakePages, session: aiohttp.ClientSession) -> None:
        url = session._base_url
        assert url is not None
        for junk in (b"\x16\x03\x01junk\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"GET / HTTP/1.1\r\nA b: c\r\n\r\n") * 3:
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(junk)
            assert b" 400 " in await reader.readline()
            writer.close()

    with caplog.at_level("INFO"):
        serve(test)
    assert not [record.getMessage() for record in caplog.records if record.levelname != "DEBUG"]


def test_a_defect_of_a_page_is_a_traceback_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def test(pages: FakePages, session: aiohttp.ClientSession) -> None:
        async with session.get("/digest") as answer:  # these pages have none
            assert answer.status == 500

    serve(test)
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.exc_info is not None


def test_a_port_that_is_taken_is_a_config_error_with_the_remedy() -> None:
    first = doors.tcp("127.0.0.1", 0, "http")
    with first, pytest.raises(ConfigError, match=r"is taken; choose another, or set http\.port=0") as caught:
        doors.tcp("127.0.0.1", first.getsockname()[1], "http")
    assert caught.value.path == "http.port"


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_that_is_not_this_hosts_is_the_hosts_error_and_not_the_ports(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"^http\.host = {host}: .*can't be bound: .*; write an address") as caught:
        doors.tcp(host, 0, "http")
    assert caught.value.path == "http.host"


def test_a_socket_that_cannot_be_made_is_told_by_its_key_and_with_a_remedy() -> None:
    with pytest.raises(
        ConfigError, match=r"^control\.socket: the folder /proc/x can't be made: .*; set control"
    ) as caught:
        doors.unix(Path("/proc/x/y"), "control.socket")
    assert caught.value.path == "control.socket"
    with pytest.raises(ConfigError, match=r"^control\.socket: the socket /proc/y can't be made: .*; set control"):
        doors.unix(Path("/proc/y"), "control.socket")


def test_whatever_wants_descriptors_says_how_to_have_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", exhausted)
    with pytest.raises(ConfigError, match=r"'a': Too many open files; raise the limit: ulimit -n"):
        create_memfd("a", 1)
    monkeypatch.setattr(paths, "lock", exhausted)
    with pytest.raises(ConfigError, match=r"Too many open files; raise the limit: ulimit -n"):
        doors.unix(Path("/tmp/x"), "control.socket")


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:7"),
        ("0.0.0.0", "http://127.0.0.1:7"),
        ("::", "http://[::1]:7"),
        ("::1", "http://[::1]:7"),
        ("a.example", "http://a.example:7"),
    ],
)
def test_the_url_is_what_a_browser_on_this_host_wants(host: str, url: str) -> None:
    assert doors.url(host, 7) == url


def test_two_colons_are_every_address_of_ipv4_too(ipv6: bool) -> None:
    """As they are for the event stream, so that one of the two is not left out by a probe or a router."""
    if not ipv6:
        pytest.skip("this host has no IPv6")
    with doors.tcp("::", 0, "http") as sock:
        port = sock.getsockname()[1]
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, port)).close()
    with doors.tcp("::1", 0, "http") as sock, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", sock.getsockname()[1]))


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_it_is_reached_by_the_url_whatever_the_host_is(host: str, ipv6: bool) -> None:
    if ":" in host and not ipv6:
        pytest.skip("this host has no IPv6")

    async def test(_: FakePages, session: aiohttp.ClientSession) -> None:
        async with session.get("/health") as answer:
            assert answer.status == 200

    serve(test, host)


def test_the_supervisors_unix_socket_tells_the_same_and_a_stale_one_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.sock.http"

    async def main() -> None:
        sock, lock = doors.unix(path, "control.socket")
        with pytest.raises(ConfigError, match="a live daemon has"):
            doors.unix(path, "control.socket")
        server = HttpServer(FakePages(), [sock])
        await server.start()
        assert await asyncio.to_thread(ask, path) == {"model_name": "m"}
        assert await asyncio.to_thread(ask, path, "/health") == {"status": "ok"}
        await server.stop()
        os.close(lock)  # as if killed: the path stays

    asyncio.run(main())
    assert path.exists()
    with pytest.raises(Unavailable, match="sglcache serve"):
        ask(path)
    sock, lock = doors.unix(path, "control.socket")
    doors.close(sock, path, lock)
    assert not path.exists()
