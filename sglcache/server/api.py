"""What `/api/NAME` of HTTP asks a rank: a table, a row a name: a question (`channel.About`) and its parameters.

A GET has them in its query, a POST as one JSON object; both may name `rank`, which is 0 by default. A row's struct is
the law of its parameters: unknown names, wrong types and what is out of range are refused, with what is wrong. Answers
are JSON objects as the rank tells them. An error is `{"error": {"code", "message", "facts"}}`.

Answers may hold what requests were about, so a browser is answered only where the page has the daemon's own name: an
address, localhost, or one of `http.names`. Otherwise a page of anybody's could have its name resolved to this host, and
read along (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Collection, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Struct

from sglcache.errors import BadRequest
from sglcache.server.channel import About
from sglcache.wire import control


class Params(Struct, forbid_unknown_fields=True):
    """Of a question without parameters; others have fields."""

    def told(self) -> dict[str, Any]:
        """As the rank takes them."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


class Explain(Params):
    """One of tokens (of a POST), request and last."""

    tokens: list[Annotated[int, Meta(ge=0, lt=1 << 32)]] = []
    lora: control.Name | None = None
    extra_key: control.Salt | None = None
    cache_salt: control.Salt | None = None
    limit: control.U31 | None = None
    request: control.Name | None = None
    last: control.U31 = 0

    def told(self) -> dict[str, Any]:
        return {**super().told(), "tokens": struct.pack(f"<{len(self.tokens)}I", *self.tokens)}


class Question(NamedTuple):
    about: About
    params: type[Params] = Params


class TreeParams(Params):
    """Which branch of the tree, by its name in an earlier picture (None: all), and how many nodes of it at most."""

    root: Annotated[int, Meta(ge=0)] | None = None
    budget: Annotated[int, Meta(ge=1, le=1500)] = 1000


class NodeParams(Params):
    """One node, by its name in a picture; its tokens from this page of it on."""

    name: Annotated[int, Meta(ge=0)]
    start: Annotated[int, Meta(ge=0)] = 0


class FindParams(Params):
    """A prompt."""

    tokens: Annotated[list[int], Meta(min_length=1, max_length=500_000)]
    lora: str | None = None


API: dict[str, Question] = {
    "facts": Question("facts"),
    "digest": Question("digest"),
    "live": Question("live"),
    "tree": Question("tree", TreeParams),
    "node": Question("node", NodeParams),
    "find": Question("find", FindParams),
    "reuse": Question("reuse"),
    "explain": Question("explain", Explain),
}

MAX_BODY_BYTES = 4 << 20
"""Of a POST: a prompt of some 500,000 tokens."""

T = TypeVar("T")


def from_query(name: str, query: Mapping[str, str]) -> tuple[Question, int, dict[str, Any]]:
    """The question, the rank, and its parameters. BadRequest: there is no such question, or they are wrong."""
    return _read(name, dict(query), strict=False)


def from_body(name: str, body: bytes) -> tuple[Question, int, dict[str, Any]]:
    """As `from_query`, of a POST's body."""
    try:
        fields = msgspec.json.decode(body or b"{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise BadRequest(f"the body must be one JSON object: {exc}") from None
    return _read(name, fields, strict=True)


def _read(name: str, fields: dict[str, Any], strict: bool) -> tuple[Question, int, dict[str, Any]]:
    if (question := API.get(name)) is None:
        raise BadRequest(f"there is no /api/{name}; there are {', '.join(sorted(API))}")
    rank = _convert(name, fields.pop("rank", 0), int, strict)
    return question, rank, _convert(name, fields, question.params, strict).told()


def _convert(name: str, value: Any, to: type[T], strict: bool) -> T:
    try:
        return msgspec.convert(value, to, strict=strict)
    except msgspec.ValidationError as exc:
        raise BadRequest(f"/api/{name}: {exc}") from None


def may_ask(host: str | None, names: Collection[str]) -> bool:
    """Whether a request's Host header names this daemon: an address, localhost, or one of `names` ("*": anything)."""
    if host is None or "*" in names:
        return host is not None or "*" in names
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    try:
        ipaddress.ip_address(name.strip("[]"))
        return True
    except ValueError:
        return name.lower().rstrip(".") in {"localhost", *(each.lower() for each in names)}
