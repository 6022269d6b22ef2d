"""Fail stop (law 12) on cards: whichever call fails, the rank ends, and has said nothing that may be wrong.

And what can't begin says why, with what to write instead.
"""

from __future__ import annotations

import ctypes.util
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from worlds import World, check, evict, put, until

from sglcache.client import Client
from sglcache.client.mirror import Mirror
from sglcache.errors import ConfigError, Unavailable
from sglcache.server.rank import EXIT_FAILED
from sglcache.testing.daemon import Daemon, DaemonError
from sglcache.wire.events import decode_batch

pytestmark = pytest.mark.daemons

P = 4
TOKENS = range(1000, 1000 + 16 * P)
QUICK = {"first_wait": 0.01, "longest_wait": 0.05}

# A rank that has failed is kept for ten heartbeats before it ends: what it says then, it should not.
LATE = """
import asyncio
from sglcache.server.rank import Rank
stop = Rank.stop
async def late(rank):
    if rank.state == "failed":
        await asyncio.sleep(0.5)
    await stop(rank)
Rank.stop = late
"""


@pytest.fixture(scope="module")
def served(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    world.only_software()
    with world.daemon(tmp_path_factory.mktemp("rank"), timing=QUICK, prelude=LATE) as daemon:
        yield daemon


def commit_for_ever(world: World, client: Client, first: int) -> None:
    for number in range(first, 1 << 30):
        put(world.port, client, range(1000 * (number % 1000), 1000 * (number % 1000) + 8))


STARTING = ("cuCtxSetCurrent", "cuMemHostRegister_v2")
CALLS = {"cuMemcpyBatchAsync_v2": 700, "cuEventQuery": 719, "cuEventCreate": 2}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_ends_the_rank_and_its_next_life_announces_itself(
    world: World, served: Daemon, call: str
) -> None:
    soft, stream = world.only_software(), served.info["stream"]
    heard: list[tuple[int, float]] = []  # number and time of each batch
    with (
        Mirror(stream["endpoint"], stream["replay_endpoint"]) as mirror,
        world.client(served) as client,
        zmq.Context() as context,
        context.socket(zmq.SUB) as sub,
    ):
        sub.subscribe("")
        sub.connect(stream["endpoint"])
        assert sub.poll(10_000)
        if call != "cuEventCreate":  # the first copies of a life make some
            put(world.port, client, TOKENS)
            served.settle()
        with served.observer() as observer:
            before = observer.digest()
        assert mirror.catch_up(before["seq"], 10.0)
        pid = served.pid
        soft.fail(call, CALLS[call], pid=pid)
        with pytest.raises(Unavailable):
            commit_for_ever(world, client, 1)
        failed_at = time.time()
        served.next_life(pid)
        life = served.row["last_exit"]
        assert (life["pid"], life["status"]) == (pid, EXIT_FAILED)
        assert call in life["why"]
        while not heard or heard[-1][0] < served.epoch:
            assert sub.poll(10_000)
            _, number, payload = sub.recv_multipart()
            heard.append((int.from_bytes(number, "big"), decode_batch(payload).ts))
        assert max(ts for seq, ts in heard if seq < served.epoch) < failed_at, "it went on publishing"
        assert served.epoch > before["seq"]
        with served.observer() as observer:

            def agree() -> bool:
                digest = observer.digest()
                assert mirror.catch_up(digest["seq"], 10.0)
                return mirror.exact and mirror.check_digest(digest["seq"], digest["tiers"]) == []

            until(agree)
        assert not mirror.hashes("GPU")
    with world.client(served) as client:
        put(world.port, client, TOKENS)
        check(world.port, client, TOKENS)


# -- at the start --------------------------------------------------------------------------------------------------


def refused(world: World, folder: Path, why: str, **sections: object) -> str:
    used = world.used()
    with pytest.raises(DaemonError, match=rf"ConfigError: .*{why}") as caught:
        world.daemon(folder, **sections)  # type: ignore[arg-type]
    until(lambda: world.is_back(used))
    return str(caught.value)


def test_without_a_driver_it_says_so(world: World, tmp_path: Path) -> None:
    if ctypes.util.find_library("cuda"):
        pytest.skip("this machine has a driver")
    refused(world, tmp_path, "this machine has no CUDA driver", environment={"LD_LIBRARY_PATH": ""})


def test_without_a_card_it_says_so(world: World, tmp_path: Path) -> None:
    refused(world, tmp_path, "sees no card.*CUDA_VISIBLE_DEVICES", environment={"CUDA_VISIBLE_DEVICES": ""})


def test_a_card_that_is_not_there_is_named(world: World, tmp_path: Path) -> None:
    refused(world, tmp_path, r"pool\.gpus: card 7 is wanted, and this process sees \d", pool={"gpus": [7]})


def test_a_pool_that_does_not_fit_is_told_with_what_is_free(world: World, tmp_path: Path) -> None:
    room = {"SOFTCUDA_MEMORY": str(world.used() + (2 << 20))}
    pool = {"num_tokens": 1 << (16 if world.soft is not None else 31)}
    host = {"num_tokens": 16}
    said = refused(
        world, tmp_path, r"pool\.size: a pool of \d+ bytes does not fit", environment=room, pool=pool, host=host
    )
    if world.soft is not None:
        assert f"has {2 << 20} of {world.used() + (2 << 20)} bytes free" in said


def test_a_driver_that_does_not_start_is_told(world: World, tmp_path: Path) -> None:
    world.only_software()
    refused(world, tmp_path, "cuInit says CUDA_ERROR_UNKNOWN", environment={"SOFTCUDA_FAIL": "cuInit:1:999"})


def test_an_error_at_the_start_is_told_and_nothing_stays(world: World, tmp_path: Path) -> None:
    world.only_software()
    used = world.used()
    with pytest.raises(DaemonError, match="cuMemMap: CUDA_ERROR_UNKNOWN"):
        world.daemon(tmp_path, environment={"SOFTCUDA_FAIL": "cuMemMap:1:999"})
    until(lambda: world.used() == used)


def test_an_error_at_a_later_start_ends_that_life_and_the_one_after_it_serves(world: World, served: Daemon) -> None:
    """With the host's pages, which no card has touched. Of calls on the loop, and of the card's own thread."""
    soft, used = world.only_software(), world.used()
    with world.client(served) as client:
        put(world.port, client, TOKENS)
        served.settle()
    for call in STARTING:
        soft.fail(call, 999)
        served.kill_rank()
        until(lambda call=call: f"{call}: CUDA_ERROR_UNKNOWN" in str(served.row["last_exit"]))
        last = served.row["last_exit"]
        assert last["status"] == EXIT_FAILED
        served.next_life(last["pid"])
        with world.client(served) as client:
            check(world.port, client, TOKENS)
        until(lambda: world.used() == used)


def test_where_the_machine_pins_no_more_the_host_tier_ends_and_the_rank_serves(world: World, tmp_path: Path) -> None:
    world.only_software()
    pages = {"page_size": 16, "num_tokens": 16 * 64, "num_layers": 4, "num_kv_heads": 8, "head_dim": 128}
    tokens = range(16 * 64)
    for limit, code, num_pages in ((2, 2, 1024), (1, 801, 0)):  # of ranges of 256 MiB; no memory, no such memory
        with world.daemon(
            tmp_path / str(limit),
            environment={"SOFTCUDA_FAIL": f"cuMemHostRegister_v2:{limit}:{code}"},
            pool=pages,
            host={"num_tokens": 16 * 2048},
        ) as daemon:
            until(lambda daemon=daemon: "gets no more" in daemon.said())
            assert f"the host tier has {num_pages} of 2048 pages" in daemon.said()
            until(lambda daemon=daemon: "can't be pinned" in daemon.ask("/health").get("reason", ""))
            with world.client(daemon) as client:
                put(world.port, client, tokens)
                daemon.settle()
                assert daemon.pool("HOST")["cached"] == min(num_pages, 64)
                if num_pages:
                    evict(daemon, world.port, client)
                check(world.port, client, tokens, host_tokens=len(tokens) if num_pages else 0)


def test_a_runner_that_does_not_see_the_card_is_told(world: World, served: Daemon) -> None:
    world.need(cards=2)
    soft = world.only_software()
    for hidden, why in (("1", "sees 1, that one not among them"), ("", "sees no card")):
        environment = {**soft.environment, "CUDA_VISIBLE_DEVICES": hidden}
        with world.puppet(served, environment, port=False) as puppet:
            with pytest.raises(ConfigError, match=why) as caught:
                puppet.do("cache = Client(socket)")
            assert "CUDA_VISIBLE_DEVICES" in caught.value.message
    until(lambda: not served.status()["sessions"])


def test_a_runner_whose_streams_are_not_known_is_told(world: World, served: Daemon) -> None:
    soft = world.only_software()
    with world.puppet(served, soft.environment, port=False) as puppet:
        with pytest.raises(ConfigError, match="`streams` has none of card 0"):
            puppet.do("cache = Client(socket, streams=lambda: {1: 1}); cache.acquire([1] * 64).commit()")
        with pytest.raises(ConfigError, match="torch sees none: install torch with CUDA, or say"):
            puppet.do("cache.close(); Client(socket)")
    until(lambda: not served.status()["sessions"])


def test_a_runner_without_a_driver_is_told(world: World, served: Daemon) -> None:
    if ctypes.util.find_library("cuda"):
        pytest.skip("this machine has a driver")
    with world.puppet(served, {"LD_LIBRARY_PATH": ""}, port=False) as puppet:
        with pytest.raises(ConfigError, match="has no CUDA driver"):
            puppet.do("cache = Client(socket)")
        assert puppet.ask("Client(socket, role='observer').peek([1, 2, 3]).matched_tokens") == 0
    until(lambda: not served.status()["sessions"])
