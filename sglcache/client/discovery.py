"""Where a server's event streams are: asked of its GET /server_info, as every router does."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from sglcache.errors import ConfigError, ProtocolError, Unavailable

MAX_ANSWER_BYTES = 256 << 20
ELSE = "write the address of a daemon's HTTP, http://HOST:30080 by default, which `sglcache status` shows"
WILDCARDS = ("*", "0.0.0.0", "::", "[::]")
PortNumber = Annotated[int, Meta(ge=1, le=65535)]


class Source(NamedTuple):
    """One rank's stream."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    rank: int = 0


class KvEvents(Struct):
    """The block of /server_info, as SGLang gives it: rank r's ports are the bases plus r."""

    endpoint_host: str
    endpoint_port_base: PortNumber
    block_size: Annotated[int, Meta(ge=1)]
    dp_size: Annotated[int, Meta(ge=1, le=65535)]
    topic: str = ""
    publisher: str = "zmq"
    replay_endpoint_port_base: PortNumber | None = None


class Stream(Struct):
    """A rank's stream as our own /server_info has it, with what was bound."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""


class Rank(Struct):
    rank: int
    pp_rank: int = 0
    stream: Stream | None = None


class Group(Struct):
    """What a stream tells of beside full KV."""

    group_idx: Annotated[int, Meta(ge=1)]
    kind: str
    window: Annotated[int, Meta(ge=1)] | None = None  # tokens


class Server(NamedTuple):
    url: str
    sources: list[Source]  # of the first pipeline stage, where every router dials
    block_size: int
    hash_name: str | None  # of the block hashes, where the server says it
    info: dict[str, Any]  # all that it said

    @property
    def bigram(self) -> bool:
        """Whether its keys are pairs of tokens, where the server says it."""
        return self.info.get("bigram") is True

    @property
    def groups(self) -> dict[int, int | None] | None:
        """By `group_idx` the window's tokens, None for states. None: the server tells of full KV alone."""
        try:
            groups = msgspec.convert(self.info.get("groups") or [], list[Group])
        except msgspec.ValidationError:
            return None
        return {each.group_idx: each.window for each in groups} or None

    @property
    def later_stages(self) -> list[Source]:
        """The streams of the other pipeline stages, where the server tells of them."""
        try:
            ranks = msgspec.convert(self.info.get("ranks", []), list[Rank])
        except msgspec.ValidationError:
            return []
        return [
            Source(
                self._reached(stream.endpoint),
                None if stream.replay_endpoint is None else self._reached(stream.replay_endpoint),
                stream.topic,
                each.rank,
            )
            for each in ranks
            if each.pp_rank > 0 and (stream := each.stream) is not None
        ]

    def _reached(self, endpoint: str) -> str:
        """Where all interfaces are bound, the host is the one at which the first stage is reached."""
        host, _, port = endpoint.rpartition(":")
        if host.removeprefix("tcp://") not in WILDCARDS:
            return endpoint
        return f"{self.sources[0].endpoint.rpartition(':')[0]}:{port}"


def base_url(text: str) -> str:
    """`host:port`, `http://host:port` and `http://host:port/...` are one server."""
    try:
        parts = urlsplit(text if "//" in text else f"http://{text}")
        named = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is none, or brackets around no address
        named = False
    if not named:
        raise ConfigError(f"{text!r} is no server's address; write http://HOST:PORT")
    return f"{parts.scheme}://{parts.netloc}"


class _Response(http.client.HTTPResponse):
    def begin(self) -> None:
        # Of a stream's port there is no end to what would be read as the first line of an answer.
        if (first := self.fp.peek(1)[:1]) not in (b"H", b""):
            raise http.client.BadStatusLine(repr(first))
        super().begin()


class _Connection(http.client.HTTPConnection):
    response_class = _Response


class _Http(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, req)


def ask_json(url: str, body: object = None, *, timeout_s: float = 5.0) -> tuple[int, Any]:
    """Status and answer of a GET, or of a POST of `body`. No proxy is asked, whatever the environment.

    Unavailable: nobody answers, or not with JSON.
    """
    method, data = ("GET", None) if body is None else ("POST", msgspec.json.encode(body))
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        try:
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Http)
            answer = opener.open(request, timeout=timeout_s)
        except urllib.error.HTTPError as refusal:
            answer = refusal
        with answer:
            return answer.status, decode_json(answer.read(MAX_ANSWER_BYTES))
    except (OSError, http.client.HTTPException, ProtocolError) as exc:
        reason = exc.reason if isinstance(exc, urllib.error.URLError) else exc
        if isinstance(exc, http.client.BadStatusLine) and not isinstance(exc, http.client.RemoteDisconnected):
            reason = "what answers there speaks no HTTP: it may be the port of an event stream, or of replays"
        raise Unavailable(f"{method} {url}: {reason}", url=url) from exc


def decode_json(raw: bytes) -> Any:
    """What an answer says; None of an empty one. ProtocolError: it is not JSON."""
    try:
        return msgspec.json.decode(raw) if raw else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"it is not JSON: {exc}") from None


def discover(url: str, timeout_s: float = 5.0) -> Server:
    """Ask the server. Unavailable: it does not answer; ConfigError: it publishes nothing that could be followed."""
    url = base_url(url)
    try:
        status, info = ask_json(f"{url}/server_info", timeout_s=timeout_s)
    except Unavailable as exc:
        raise Unavailable(f"{exc.message}; {ELSE}", url=url) from exc
    if status != 200:
        raise Unavailable(f"GET {url}/server_info: status {status}; {ELSE}", url=url)
    return server_of(url, info)


def server_of(url: str, info: Any) -> Server:
    """What the /server_info of the server at `url` comes to. ConfigError: nothing in it could be followed."""
    block = info.get("kv_events") if isinstance(info, dict) else None
    if block is None:
        raise ConfigError(f"{url}/server_info has no kv_events: start the server with its event stream on, over tcp")
    try:
        told = msgspec.convert(block, KvEvents)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{url}/server_info: kv_events: {exc}") from exc
    if told.endpoint_port_base + told.dp_size - 1 > 65535:
        raise ConfigError(f"{url}/server_info: no port is left for rank {told.dp_size - 1}: {block}")
    host = told.endpoint_host
    if host in WILDCARDS:
        host = urlsplit(url).hostname or host
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    replay = told.replay_endpoint_port_base
    sources = [
        Source(
            f"tcp://{host}:{told.endpoint_port_base + rank}",
            None if replay is None else f"tcp://{host}:{replay + rank}",
            told.topic,
            rank,
        )
        for rank in range(told.dp_size)
    ]
    hash_name = info.get("hash")
    return Server(url, sources, told.block_size, hash_name if isinstance(hash_name, str) else None, info)
