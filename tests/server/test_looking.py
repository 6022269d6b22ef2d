"""What the page is told: by a real rank, through the supervisor; and what it is not told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sglcache import paths, ranks
from sglcache.config import HttpConfig
from sglcache.server import doors
from sglcache.server.http import FILES, HttpServer
from sglcache.server.looking import shows_tokens
from sglcache.server.texts import Texts
from sglcache.testing.daemon import Daemon, until


def ask(daemon: Daemon, page: str) -> dict[str, Any]:
    return dict(ranks.ask(paths.supervisor_path(daemon.socket), page))


def test_a_rank_tells_of_its_tree_while_it_serves(lend: Callable[..., Daemon]) -> None:
    daemon = lend()
    tokens = list(range(40))
    with daemon.client(name="me") as client:
        lease = client.acquire(tokens)
        lease.commit()
        lease.release(wait=True)
        daemon.settle()
        lease = client.acquire([*tokens, 1])
        live = ask(daemon, "/api/live")
        status = daemon.status(prove=False)
        assert live["pools"] == status["pools"]
        assert live["counters"].items() <= status["counters"].items()
        assert [each["members"][0]["name"] for each in live["sessions"]] == ["me"]
        told: dict[str, Any] = {}

        def drawn() -> bool:
            told.update(ask(daemon, "/api/tree?budget=20"))
            return told.get("pages") == [10, 10, 10]

        until(drawn)
        name = told["rows"][1][0]
        node = ask(daemon, f"/api/node?name={name}")
        assert node["tokens"] == tokens
        assert [each["session"] for each in node["leases"]] == [live["sessions"][0]["session"]]
        assert node["epoch"] == told["epoch"] == live["epoch"] == daemon.epoch
        lease.release(wait=True)
    assert not daemon.status()["violations"]  # with a walk's mark in the ring
    with daemon.admin() as admin:
        admin.clear()
    assert ask(daemon, f"/api/node?name={name}")["gone"] == name
    assert ask(daemon, f"/api/tree?root={name}")["gone"] == name


@pytest.mark.parametrize(
    ("http", "shown"),
    [
        ({}, True),
        ({"host": "localhost"}, True),
        ({"host": "::1"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "cache.internal"}, False),
        ({"host": "0.0.0.0", "enabled": False}, True),
        ({"host": "0.0.0.0", "show_tokens": "always"}, True),
        ({"show_tokens": "never"}, False),
    ],
)
def test_tokens_are_shown_where_only_this_host_can_ask(http: dict[str, Any], shown: bool) -> None:
    assert shows_tokens(HttpConfig(**http)) is shown


def test_tokens_become_text_where_a_tokenizer_is_named(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"zero": 0, "one": 1, "[UNK]": 2}, unk_token="[UNK]")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "bad.json").write_text("{}")
    told = {"name": 1, "tokens": [1, 0]}

    def text(path: Path | None, told: dict[str, Any]) -> dict[str, Any]:
        return asyncio.run(Texts(path).add(told))

    assert text(tmp_path / "tokenizer.json", told) == {**told, "text": "one zero"}
    assert text(None, told) == told
    assert text(tmp_path / "tokenizer.json", {"tokens": None}) == {"tokens": None}
    assert "bad.json can't be used" in text(tmp_path / "bad.json", told)["no_text"]
    assert "none.json can't be used" in text(tmp_path / "none.json", told)["no_text"]
    assert "OverflowError" in text(tmp_path / "tokenizer.json", {"tokens": [1 << 40]})["no_text"]


def test_a_browser_gets_the_page_and_others_a_line() -> None:
    async def main() -> None:
        sock = doors.tcp("127.0.0.1", 0, "http")
        url = doors.url("127.0.0.1", sock.getsockname()[1])
        server = HttpServer(None, [sock])  # type: ignore[arg-type]  # nobody is asked
        await server.start()
        try:
            async with aiohttp.ClientSession(url) as session:
                async with session.get("/") as answer:
                    assert answer.content_type == "text/plain"
                for path, (_, kind) in FILES.items():
                    async with session.get(path, headers={"Accept": "text/html"}) as answer:
                        body, headers = await answer.text(), answer.headers
                        assert (answer.status, answer.content_type) == (200, kind)
                        assert headers["Content-Security-Policy"].startswith("default-src 'self'; ")
                        assert headers["X-Content-Type-Options"] == "nosniff"
                    assert "http://" not in body.replace("http://www.w3.org/2000/svg", "")
                    assert "https://" not in body
                    etag = {"Accept": "text/html", "If-None-Match": headers["ETag"]}
                    async with session.get(path, headers=etag) as answer:
                        assert (answer.status, await answer.read()) == (304, b"")
                async with session.get("/web/../http.py") as answer:
                    assert answer.status == 404
                async with session.get("/api") as answer:
                    assert {"live", "tree", "node"} <= set(json.loads(await answer.text())["names"])
        finally:
            await server.stop()

    asyncio.run(main())
