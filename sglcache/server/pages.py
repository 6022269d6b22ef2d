"""What the daemon's HTTP shows of all ranks. Each page has a deadline: a rank that does not answer is left out."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglcache.config import Config
from sglcache.errors import BadRequest, Unavailable
from sglcache.server import metrics, watch
from sglcache.server.channel import About
from sglcache.server.child import Child
from sglcache.server.plan import kv_events, told_groups
from sglcache.server.texts import Texts
from sglcache.wire import control


class RankPages:
    """`http.Pages` over the supervisor's children."""

    def __init__(
        self, config: Config, children: Sequence[Child], url: str | None, state: Callable[[], str], answer_s: float
    ) -> None:
        """`state`: the daemon's, starting, ok or draining. `answer_s`: what a rank has for a question."""
        self.config = config
        self.children = children
        self.url = url
        self.state = state
        self.answer_s = answer_s
        self._started_at = time.monotonic()
        self._texts = Texts(config.http.tokenizer)

    def health(self) -> dict[str, Any]:
        ranks = [child.describe() for child in self.children]
        bad = [rank for rank in ranks if rank["state"] != "ok" or rank.get("troubles")]
        status = "degraded" if bad and self.state() == "ok" else self.state()
        health: dict[str, Any] = {
            "status": status,
            "serving": self.state() == "ok" and all(rank["state"] == "ok" for rank in ranks),
            "uptime_s": round(time.monotonic() - self._started_at, 3),
        }
        if bad:
            health["reason"] = "; ".join(map(in_words, bad))
        return {**health, "ranks": ranks}

    async def server_info(self) -> dict[str, Any]:
        facts = await self._ask("facts")
        config, parallel = self.config, self.config.parallel
        seats = [child.seat for child in self.children]
        ranks = []
        for child, told in zip(self.children, facts, strict=True):
            unknown = {"socket": child.seat.socket, "epoch": None, "geometry": None, "stream": None}
            ranks.append({**(told or child.facts or unknown), **child.describe()})
        return {
            "version": importlib.metadata.version("sglcache"),
            "protocol": control.PROTOCOL,
            "model_name": config.model_name,
            "page_size": config.pool.page_size,
            "bigram": config.pool.bigram,
            "groups": [each._asdict() for each in told_groups(config.for_stage(0))],  # where every router dials
            "dp_size": parallel.dp_size,
            "pp_size": parallel.pp_size,
            "hash": config.events.hash,
            "kv_events": kv_events(config, seats),
            "pipeline_endpoints": [
                {
                    "rank": seat.offset,
                    "dp_rank": seat.dp_rank,
                    "pp_rank": seat.pp_rank,
                    "endpoint": seat.endpoint,
                    "replay_endpoint": seat.replay_endpoint,
                }
                for seat in seats
                if seat.pp_rank > 0 and seat.endpoint is not None
            ],
            "pid": os.getpid(),
            "http": self.url,
            "ranks": ranks,
        }

    async def digest(self) -> dict[str, Any]:
        """What a mirror of each rank must have, as of the number `seq` of its stream; nothing of one that is away."""
        digests = await self._ask("digest")
        return {
            "ranks": [
                {"rank": child.seat.offset, "dp_rank": child.seat.dp_rank, "pp_rank": child.seat.pp_rank, **digest}
                for child, digest in zip(self.children, digests, strict=True)
                if digest is not None
            ]
        }

    async def metrics(self) -> bytes:
        families = await self._ask("metrics")
        lives = {
            child.seat.offset: (told is not None, child.restarts)
            for child, told in zip(self.children, families, strict=True)
        }
        return metrics.page([metrics.of_lives(lives), *filter(None, families)])

    async def ask(self, rank: int, about: About, params: Mapping[str, Any]) -> Any:
        """What that rank answers, or the SglcacheError that it refuses with. BadRequest: there is no such rank here.
        Unavailable: it does not serve, or not answer in time."""
        child = next((child for child in self.children if child.seat.offset == rank), None)
        if child is None:
            here = ", ".join(str(child.seat.offset) for child in self.children)
            raise BadRequest(f"there is no rank {rank} here; ask one of {here}", rank=rank)
        if (answer := child.ask(about, params)) is not None:
            try:
                told = await asyncio.wait_for(answer, self.answer_s)
                return await self._texts.add(told) if about == "node" else told
            except TimeoutError:
                pass
        words = in_words(child.describe()) if child.state != "ok" or child.stuck else "it did not answer in time"
        raise Unavailable(f"rank {rank} can't be asked: {words}; try again in a moment", rank=rank)

    async def _ask(self, about: About) -> list[Any]:
        """What each rank answers; None of one that does not, in time."""
        asked = [child.ask(about) for child in self.children]
        if waited := [future for future in asked if future is not None]:
            await asyncio.wait(waited, timeout=self.answer_s)
        answers = [
            future.result() if future is not None and future.done() and future.exception() is None else None
            for future in asked
        ]
        for future in waited:
            future.cancel()
        return answers


def in_words(rank: dict[str, Any]) -> str:
    """Why a rank that `Child.describe` tells of does not serve, or what of it does not get on."""
    if rank["state"] == "ok":
        troubles = (watch.in_words(**trouble) for trouble in rank["troubles"])
        return f"rank {rank['rank']}: " + "; ".join(troubles)
    words = f"rank {rank['rank']} is {rank['state']}"
    if "silent_s" in rank:
        words += f": no sign of life for {rank['silent_s']} s"
    if "starts_in_s" in rank:
        words += f" for its next start in {rank['starts_in_s']} s: pid {rank['last_exit']['pid']}"
        words += f" {rank['last_exit']['why']}"
    return words
