"""Dynamo's standalone indexers: this host's ranks register themselves, again whenever one starts.

An indexer's listener waits for the END of a replay without a limit (seen in ai-dynamo-runtime 1.6.1), so one whose
answer was lost with a rank's life waits for ever, and says that it is active. It forgets an instance only as a whole,
all ranks of it: so all are registered anew with each start of one, and each finds its picture by a snapshot.

Its API: POST /register (201; 409: that rank is registered, or the instance under another model's name, or the model
has blocks of another size), POST /unregister (200; 404: there is no such instance of that model), GET /workers.
Nothing here holds up the ranks: an indexer that does not answer, or refuses, is asked again, ever more patiently.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Sequence
from socket import gethostname
from typing import Any

import aiohttp

from sglcache.config import Config
from sglcache.net import endpoints
from sglcache.server.plan import Seat

logger = logging.getLogger("sglcache.indexers")

TIMEOUT_S = 5.0  # of a request
WAIT_S = 0.5, 30.0  # before the next try: first and longest
LOOK_S = 10.0  # between two looks whether the indexer, which may have been started anew, still knows the ranks
FAREWELL_S = 1.0
UNREADABLE = (aiohttp.ClientError, TimeoutError, ValueError, TypeError, KeyError)


class Indexers:
    """Owns a task for each configured indexer, from the first `register` to `close`."""

    def __init__(self, config: Config, *, look_s: float = LOOK_S) -> None:
        events = config.events
        self.instance_id = events.instance_id if events.instance_id is not None else _own_id(config)
        self.model_name = config.model_name
        self.block_size = config.pool.page_size
        self.host = events.advertised_host or gethostname()
        self._look_s = look_s
        self._tasks: list[asyncio.Task[None]] = []
        self._urls = list(events.dynamo_indexers)
        self._wanted: list[dict[str, Any]] = []
        self._session: aiohttp.ClientSession | None = None

    def register(self, seats: Sequence[Seat]) -> None:
        """Have every indexer forget this instance and know these ranks, as bound; later stages are not for routers."""
        if not self._urls:
            return
        self._cancel()
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        self._wanted = [self._body(seat) for seat in seats if seat.pp_rank == 0 and seat.endpoint is not None]
        self._tasks = [asyncio.create_task(self._keep(url)) for url in self._urls]

    async def close(self) -> None:
        """Say goodbye where that takes no time. Idempotent."""
        self._cancel()
        session, self._session = self._session, None
        if session is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await asyncio.gather(*(self._ask(session, url, "unregister") for url in self._urls))
        await session.close()

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks = []

    def _body(self, seat: Seat) -> dict[str, Any]:
        body = {"block_size": self.block_size, "dp_rank": seat.dp_rank, "endpoint": self._dialled(seat.endpoint)}
        if seat.replay_endpoint is not None:
            body["replay_endpoint"] = self._dialled(seat.replay_endpoint)
        return body

    def _dialled(self, text: str | None) -> str:
        """How another host reaches it."""
        assert text is not None
        endpoint = endpoints.parse(text)
        if isinstance(endpoint, endpoints.Tcp) and endpoint.is_wildcard:
            endpoint = endpoints.Tcp(self.host, endpoint.port)
        return str(endpoint)

    async def _keep(self, url: str) -> None:
        """Register, then look now and then whether it still holds."""
        session = self._session
        assert session is not None
        anew = True
        wait_s = WAIT_S[0]
        complaint = ""
        while True:
            problem = await self._tell(session, url) if anew else ""
            if not problem:
                if anew:
                    logger.info("registered %d ranks at %s as instance %d", len(self._wanted), url, self.instance_id)
                complaint, wait_s = "", WAIT_S[0]
                await asyncio.sleep(self._look_s)
                anew = not await self._known(session, url)
            else:
                if problem != complaint:
                    logger.warning(
                        "the indexer at %s does not know this host's ranks: %s; start it, or "
                        "mend events.dynamo_indexers; this is tried again, and the daemon serves without it",
                        url,
                        problem,
                    )
                complaint = problem
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, WAIT_S[1])

    async def _tell(self, session: aiohttp.ClientSession, url: str) -> str:
        """Have it forget this instance, by whatever name it has it, and know the ranks. Empty, or what was wrong."""
        try:
            names = {self.model_name, *(each["model_name"] for each in await self._mine(session, url))}
        except UNREADABLE as exc:
            return f"GET /workers: {str(exc) or repr(exc)}"
        for name in sorted(names):
            status, text = await self._ask(session, url, "unregister", model_name=name)
            if status not in (200, 404):
                return f"/unregister said {text}"
        for body in self._wanted:
            status, text = await self._ask(session, url, "register", **body)
            if status != 201:
                return f"/register said {text}"
        return ""

    async def _known(self, session: aiohttp.ClientSession, url: str) -> bool:
        """Whether the indexer has every rank where it is; True if it can't be asked, for then it can't be told."""
        try:
            mine = [each for each in await self._mine(session, url) if each["model_name"] == self.model_name]
            have = mine[0]["endpoints"] if mine else {}
            return all(have.get(str(body["dp_rank"])) == body["endpoint"] for body in self._wanted)
        except UNREADABLE:
            return True

    async def _mine(self, session: aiohttp.ClientSession, url: str) -> list[dict[str, Any]]:
        """What it knows of this instance."""
        async with session.get(f"{url}/workers") as answer:
            answer.raise_for_status()
            return [each for each in await answer.json(content_type=None) if each["instance_id"] == self.instance_id]

    async def _ask(self, session: aiohttp.ClientSession, url: str, what: str, **more: Any) -> tuple[int | None, str]:
        """The status, None if there was no answer; and what was said."""
        body = {"instance_id": self.instance_id, "model_name": self.model_name, **more}
        try:
            async with session.post(f"{url}/{what}", json=body) as answer:
                return answer.status, f"{answer.status}: {(await answer.text())[:500]}"
        except (aiohttp.ClientError, TimeoutError) as exc:
            return None, f"nothing ({exc!r})"


def _own_id(config: Config) -> int:
    """The same in every life of this daemon, and another for another daemon: of its host's name and its port."""
    name = f"{gethostname()}:{config.http.port if config.http.enabled else config.events.endpoint}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
