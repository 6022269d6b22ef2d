"""A rank that refuses to answer costs a page that rank alone."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sglcache.config import Config
from sglcache.errors import ClosedError, Unavailable
from sglcache.server.child import Child
from sglcache.server.pages import RankPages


class Rank:
    """One of the supervisor's children, that answers or refuses at once, or never."""

    def __init__(self, offset: int, answer: object = None) -> None:
        self.seat = SimpleNamespace(offset=offset, dp_rank=offset, pp_rank=0)
        self.state, self.stuck, self.answer = "ok", False, answer

    def ask(self, about: str, params: object = None) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if isinstance(self.answer, Exception):
            future.set_exception(self.answer)
        elif self.answer is not None:
            future.set_result(self.answer)
        return future


def pages(*ranks: Rank) -> RankPages:
    return RankPages(Config(), cast("list[Child]", list(ranks)), None, lambda: "ok", 0.05)


def test_one_that_refuses_and_one_that_is_silent_are_left_out() -> None:
    told = {"seq": 7}
    ranks = [Rank(0, told), Rank(1, ClosedError("the publisher is closed")), Rank(2)]
    digest = asyncio.run(pages(*ranks).digest())
    assert [each["rank"] for each in digest["ranks"]] == [0]


def test_who_asks_that_one_is_told_why() -> None:
    with pytest.raises(ClosedError, match="publisher"):
        asyncio.run(pages(Rank(0, ClosedError("the publisher is closed"))).ask(0, "digest", {}))
    with pytest.raises(Unavailable, match="in time"):
        asyncio.run(pages(Rank(0)).ask(0, "digest", {}))
