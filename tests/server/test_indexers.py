"""Ranks register themselves at an indexer, and do so again: after a rank's death, and after the indexer's.

The indexer here is a small HTTP server that keeps books as Dynamo's does; the interop tests have the real one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from sglcache import config as configuration
from sglcache.config import Config
from sglcache.errors import ConfigError
from sglcache.server.indexers import Indexers, _own_id
from sglcache.server.plan import plan

WITHIN_S = 10.0


class Indexer:
    """Dynamo's way with registrations: an instance is forgotten whole."""

    def __init__(self) -> None:
        self.instances: dict[int, dict[int, dict[str, Any]]] = {}
        self.said: list[str] = []
        self.broken = False
        self.block_size: int | None = None  # of the model's blocks, if it has some already
        self.port = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/register", self._register)
        app.router.add_post("/unregister", self._unregister)
        app.router.add_get("/workers", self._workers)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()
        self.instances.clear()

    async def _register(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.said.append(f"register {body['dp_rank']}")
        if self.broken:
            return web.json_response({"error": "out of order"}, status=500)
        if self.block_size not in (None, body["block_size"]):
            return web.json_response({"error": "block_size mismatch"}, status=409)
        ranks = self.instances.setdefault(body["instance_id"], {})
        if body["dp_rank"] in ranks or any(rank["model_name"] != body["model_name"] for rank in ranks.values()):
            return web.json_response({"error": "already registered"}, status=409)
        ranks[body["dp_rank"]] = body
        return web.json_response({"status": "ok"}, status=201)

    async def _unregister(self, request: web.Request) -> web.Response:
        self.said.append("unregister")
        body = await request.json()
        ranks = self.instances.get(body["instance_id"], {})
        if not any(rank["model_name"] == body["model_name"] for rank in ranks.values()):
            return web.json_response({"error": "not found"}, status=404)
        del self.instances[body["instance_id"]]
        return web.json_response({"status": "ok"}, status=200)

    async def _workers(self, _: web.Request) -> web.Response:
        return web.json_response(
            [
                {
                    "instance_id": instance,
                    "model_name": next(iter(ranks.values()))["model_name"],
                    "endpoints": {str(rank): body["endpoint"] for rank, body in ranks.items()},
                }
                for instance, ranks in self.instances.items()
            ]
        )


def config_for(indexer: Indexer, **events: Any) -> Config:
    url = f"http://127.0.0.1:{indexer.port}/"
    return configuration.parse(
        {
            "model_name": "m",
            "parallel": {"dp_size": 2, "pp_size": 2},
            "events": {"dynamo_indexers": [url], "instance_id": 7, "endpoint": "tcp://*:5557", **events},
        }
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0)


def play(story: Callable[[Indexer], Any]) -> None:
    async def main() -> None:
        indexer = Indexer()
        await indexer.start()
        try:
            await story(indexer)
        finally:
            await indexer.stop()

    asyncio.run(main())


def test_the_first_stage_of_every_replica_registers_and_says_goodbye() -> None:
    async def story(indexer: Indexer) -> None:
        config = config_for(indexer, advertised_host="10.0.0.5")
        indexers = Indexers(config)
        indexers.register(plan(config))
        await until(lambda: len(indexer.instances.get(7, {})) == 2)
        assert indexer.instances[7][1] == {
            "instance_id": 7,
            "model_name": "m",
            "block_size": 16,
            "dp_rank": 1,
            "endpoint": "tcp://10.0.0.5:5558",
            "replay_endpoint": "tcp://127.0.0.1:5658",
        }
        await indexers.close()
        assert indexer.instances == {}
        await indexers.close()

    play(story)


def test_a_rank_that_starts_again_is_registered_anew_with_all_others() -> None:
    async def story(indexer: Indexer) -> None:
        config = config_for(indexer)
        indexers, seats = Indexers(config), plan(config)
        for _ in range(2):
            indexer.said.clear()
            indexers.register(seats)
            await until(lambda: indexer.said == ["unregister", "register 0", "register 1"])
        await indexers.close()

    play(story)


def test_an_indexer_that_starts_again_is_told_again() -> None:
    async def story(indexer: Indexer) -> None:
        config = config_for(indexer)
        indexers = Indexers(config, look_s=0.02)
        indexers.register(plan(config))
        await until(lambda: len(indexer.instances.get(7, {})) == 2)
        await indexer.stop()
        await indexer.start()
        await until(lambda: len(indexer.instances.get(7, {})) == 2)
        await indexers.close()

    play(story)


@pytest.mark.parametrize("how", ["away", "broken"])
def test_an_indexer_that_can_t_be_told_is_told_later(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglcache.server.indexers.WAIT_S", (0.01, 0.05))

    async def story(indexer: Indexer) -> None:
        config = config_for(indexer)
        if how == "away":
            await indexer.stop()
        indexer.broken = how == "broken"
        indexers = Indexers(config)
        indexers.register(plan(config))
        if how == "away":
            await indexer.start()
        else:
            await until(lambda: indexer.said.count("register 0") > 1)
            indexer.broken = False
        await until(lambda: len(indexer.instances.get(7, {})) == 2)
        await indexers.close()

    play(story)


def test_what_it_refuses_is_said_once_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """409 is not only "already registered": with blocks of another size in the model nothing of ours would be known."""
    monkeypatch.setattr("sglcache.server.indexers.WAIT_S", (0.01, 0.05))

    async def story(indexer: Indexer) -> None:
        config = config_for(indexer)
        indexer.block_size = 64
        indexers = Indexers(config)
        indexers.register(plan(config))
        await until(lambda: indexer.said.count("register 0") > 3)
        assert [record.getMessage().count("block_size mismatch") for record in caplog.records] == [1]
        indexer.block_size = None
        await until(lambda: len(indexer.instances.get(7, {})) == 2)
        await indexers.close()

    play(story)


def test_an_instance_of_another_models_name_is_forgotten_first() -> None:
    """A daemon that was killed has not said goodbye, and its model may have another name in its next life."""

    async def story(indexer: Indexer) -> None:
        config = config_for(indexer)
        indexer.instances[7] = {0: {"model_name": "before", "endpoint": "tcp://127.0.0.1:1"}}
        indexers = Indexers(config)
        indexers.register(plan(config))
        await until(lambda: [rank["model_name"] for rank in indexer.instances.get(7, {}).values()] == ["m", "m"])
        await indexers.close()

    play(story)


def test_what_an_indexer_could_not_read_is_refused() -> None:
    for wrong in ({"token_ids": "none"}, {"mode": "connect"}, {"curve_key_file": "x"}):
        with pytest.raises(ConfigError, match=r"events\.dynamo_indexers"):
            config_for(Indexer(), **wrong)


def test_an_instance_is_the_same_in_every_life_and_another_for_another_daemon() -> None:
    one, other = (configuration.parse({"http": {"port": port}}) for port in (1000, 1001))
    assert _own_id(one) == _own_id(one)
    assert _own_id(one) != _own_id(other)
