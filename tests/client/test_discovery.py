"""Where the streams are, as /server_info says: hosts, ports, ranks; and a mirror of all of them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from told import free_ports

from sglcache.client.discovery import Source, ask_json, base_url, discover
from sglcache.client.mirror import Match, Mirror
from sglcache.errors import ConfigError, Unavailable
from sglcache.testing.daemon import Daemon

BLOCK = {
    "publisher": "zmq",
    "endpoint_host": "*",
    "endpoint_port_base": 5557,
    "topic": "kv@",
    "block_size": 16,
    "dp_size": 2,
}


@pytest.fixture
def serve() -> Iterator[Callable[[Any], str]]:
    """A server that tells of something; its address."""
    servers: list[HTTPServer] = []

    def build(info: Any) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                assert self.path == "/server_info"
                raw = json.dumps(info).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: object) -> None:
                pass

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,)).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield build
    for server in servers:
        server.shutdown()
        server.server_close()


def test_each_rank_is_at_the_base_and_its_number_on_the_servers_own_host(serve: Callable[[Any], str]) -> None:
    url = serve({"kv_events": {**BLOCK, "replay_endpoint_port_base": 5657}, "hash": "sha256", "more": [1]})
    server = discover(url)
    assert server.sources == [
        Source("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5657", "kv@", 0),
        Source("tcp://127.0.0.1:5558", "tcp://127.0.0.1:5658", "kv@", 1),
    ]
    assert (server.url, server.block_size, server.hash_name, server.info["more"]) == (url, 16, "sha256", [1])


@pytest.mark.parametrize(
    ("host", "dialled"),
    [("*", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("[::]", "127.0.0.1"), ("other", "other"), ("fe80::1", "[fe80::1]")],
)
def test_a_wildcard_is_the_host_that_was_asked(host: str, dialled: str, serve: Callable[[Any], str]) -> None:
    server = discover(serve({"kv_events": {**BLOCK, "endpoint_host": host}}))
    assert server.sources[0] == Source(f"tcp://{dialled}:5557", None, "kv@", 0)
    assert server.hash_name is None


@pytest.mark.parametrize("text", ["127.0.0.1:80", "http://127.0.0.1:80", "http://127.0.0.1:80/server_info?x=1"])
def test_an_address_may_be_written_in_any_way(text: str) -> None:
    assert base_url(text) == "http://127.0.0.1:80"


@pytest.mark.parametrize("text", ["", "ftp://host:1", "http://", "/tmp/socket"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write http://HOST:PORT"):
        base_url(text)


def test_nobody_there_is_unavailable() -> None:
    with pytest.raises(Unavailable, match=r"GET http://127\.0\.0\.1:1/x: "):
        ask_json("http://127.0.0.1:1/x")


def test_no_proxy_is_asked(serve: Callable[[Any], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert discover(serve({"kv_events": BLOCK})).block_size == 16


def test_a_mirror_of_a_server_follows_every_replica(tmp_path: Path) -> None:
    base = free_ports(8)
    events = {"endpoint": f"tcp://127.0.0.1:{base}", "replay_endpoint": f"tcp://127.0.0.1:{base + 4}"}
    parallel = {"dp_size": 2, "pp_size": 2}
    with Daemon(tmp_path, http={"enabled": True, "port": 0}, events=events, parallel=parallel) as daemon:
        tokens = list(range(12))
        for rank, length in ((0, 12), (1, 8), (2, 12)):
            with daemon.rank(rank).client() as client, client.acquire(tokens[:length]) as lease:
                lease.commit()
        for rank in range(2):
            daemon.rank(rank).settle()
        with Mirror.from_server(daemon.info["http"]) as mirror:
            assert mirror.ranks == [0, 1], "later stages of the pipeline are no replicas"
            for rank in mirror.ranks:
                with daemon.rank(rank).observer() as observer:
                    digest = observer.digest()
                assert mirror.catch_up(digest["seq"], 10.0, rank)
                assert mirror.check_digest(digest["seq"], digest["tiers"], rank) == []
            assert mirror.longest_match(tokens) == {
                0: Match(12, {"GPU": 12, "CPU_PINNED": 12}),
                1: Match(8, {"GPU": 8, "CPU_PINNED": 8}),
            }


def test_the_example_in_the_docs_prints_what_they_say(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "events.md").read_text()
    example = page.split("```python\n")[1].split("```")[0]
    with Daemon(tmp_path, pool={"page_size": 16}, http={"enabled": True, "port": 0}) as daemon:
        with daemon.client() as client, client.acquire(list(range(100))) as lease:
            lease.commit()
        daemon.settle()
        program = example.replace("http://127.0.0.1:30080", daemon.info["http"])
        assert program != example
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "96 {'GPU': 96, 'CPU_PINNED': 96} True\n"
    assert f"prints `{ran.stdout.strip()}`" in page


def test_a_mirror_of_a_server_that_withholds_tokens_computes_the_hash_that_it_names(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"http": {"enabled": True, "port": 0}, "events": {"token_ids": "none", "hash": "sha256"}}
    with Daemon(tmp_path, **sections) as daemon:
        with daemon.client() as client, client.acquire(list(range(8)), cache_salt="s") as lease:
            lease.commit()
        with Mirror.from_server(daemon.info["http"]) as mirror, daemon.observer() as observer:
            assert mirror.catch_up(observer.digest()["seq"], 10.0)
            assert mirror.longest_match(list(range(8)), cache_salt="s")[0].on("GPU") == 8
            assert mirror.longest_match(list(range(8)))[0].tokens == 0
