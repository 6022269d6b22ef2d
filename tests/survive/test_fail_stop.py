"""Fail stop (law 12): a device's error ends the rank, which tells nobody anything any more; its next life tells all.

The ranks are real ones, on CUDA's engine over a driver in software, and on a CPU's with an error that is said to be
fatal. A test breaks them at a moment of its choice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from sglcache.client import Client
from sglcache.client.mirror import Mirror
from sglcache.errors import TransferError, Unavailable
from sglcache.memory.cuda_driver import CudaError
from sglcache.server.rank import EXIT_FAILED
from sglcache.testing.daemon import Daemon, until
from sglcache.wire.events import decode_batch

pytestmark = pytest.mark.survive

TOKENS = list(range(64))
QUICK = {"first_wait": 0.05}

# Each reads from a pipe what is to break. The pipe's other end is the test's.
BREAKS = """
import os, threading
def watch(path, told):
    with open(path) as words:
        for word in words:
            told(word.strip())
def on_word(told):
    threading.Thread(target=watch, args=({path!r}, told), daemon=True).start()
import asyncio
from sglcache.server.rank import Rank
stop = Rank.stop
async def late(rank):
    if rank.state == "failed":
        await asyncio.sleep(0.5)  # ten heartbeats, had it not failed
    await stop(rank)
Rank.stop = late
"""
SOFTWARE = (
    BREAKS
    + """
from sglcache.memory.cuda_engine import CudaEngine, CudaMemory
from sglcache.memory.engine import ways_of
from sglcache.testing.cuda import FakeDriver
driver = FakeDriver(eager=True)
on_word(lambda word: setattr(driver, "broken", word))
def engine(config, resources, done, loaded, lost):
    def memory(pools, device):
        return [CudaMemory(pool.placement, pool.address, device) for pool in pools.shards]
    ways = [way for it in resources for way in ways_of(it.form, memory(it.device, 0), memory(it.host, None), it.name)]
    return CudaEngine(ways, done, loaded, driver=driver, lost=lost)
"""
)
PLANTED = (
    BREAKS
    + """
from sglcache.errors import TransferError
from sglcache.memory import cpu_engine
from sglcache.server.devices import Cpu
engine = Cpu().engine
move, broken = cpu_engine.move, []
on_word(broken.append)
def breaking(*arguments):
    if broken:
        raise TransferError("the device is gone", fatal=True)
    return move(*arguments)
cpu_engine.move = breaking
"""
)


@contextmanager
def rank_that_breaks(folder: Path, prelude: str) -> Iterator[tuple[Daemon, int]]:
    """The daemon, and the pipe into which to write what breaks in its rank."""
    pipe = folder / "break"
    os.mkfifo(pipe)
    with Daemon(
        folder, prelude=prelude.format(path=str(pipe)), engine="engine", timing=QUICK, events={"heartbeat_s": 0.05}
    ) as daemon:
        fd = os.open(pipe, os.O_WRONLY)
        try:
            yield daemon, fd
        finally:
            os.close(fd)


def commit(client: Client, tokens: list[int]) -> None:
    lease = client.acquire(tokens)
    lease.commit()
    lease.release()


def commit_for_ever(client: Client) -> None:
    for number in range(1, 1 << 30):
        commit(client, [1000 * (number % 1000) + token for token in range(8)])


def agree(mirror: Mirror, observer: Client) -> bool:
    digest = observer.digest()
    assert mirror.catch_up(digest["seq"], 10.0)
    return mirror.exact and mirror.check_digest(digest["seq"], digest["tiers"]) == []


@pytest.mark.parametrize("what", ["copy", "record", "done"])
def test_an_error_of_the_driver_ends_the_rank_and_its_next_life_announces_itself(tmp_path: Path, what: str) -> None:
    """Of whatever call: a copy, an event's record, a look at an event."""
    check_fail_stop(tmp_path, SOFTWARE, what, "CUDA_ERROR_ILLEGAL_ADDRESS")


def test_a_fatal_error_of_a_copy_ends_the_rank_on_any_engine(tmp_path: Path) -> None:
    check_fail_stop(tmp_path, PLANTED, "all", "the device is gone")


def check_fail_stop(folder: Path, prelude: str, what: str, why: str) -> None:
    with rank_that_breaks(folder, prelude) as (daemon, fd):
        stream = daemon.info["stream"]
        heard: list[tuple[int, float]] = []  # number and time of each batch
        with (
            Mirror(stream["endpoint"], stream["replay_endpoint"]) as mirror,
            daemon.client() as client,
            zmq.Context() as context,
            context.socket(zmq.SUB) as sub,
        ):
            sub.subscribe("")
            sub.connect(stream["endpoint"])
            assert sub.poll(10_000)
            commit(client, TOKENS)
            daemon.settle()
            with daemon.observer() as observer:
                before = observer.digest()
            assert mirror.catch_up(before["seq"], 10.0)
            assert len(mirror.hashes("CPU_PINNED")) == 16, "no copy came to the host"
            pid = daemon.pid
            os.write(fd, f"{what}\n".encode())
            with pytest.raises(Unavailable):
                commit_for_ever(client)  # what breaks is the copy of one of these
            failed_at = time.time()
            daemon.next_life(pid)
            life = daemon.row["last_exit"]
            assert (life["pid"], life["status"]) == (pid, EXIT_FAILED)
            assert why in life["why"]
            assert "fail stop: " in daemon.said()
            while not heard or heard[-1][0] < daemon.epoch:
                assert sub.poll(10_000)
                _, number, payload = sub.recv_multipart()
                heard.append((int.from_bytes(number, "big"), decode_batch(payload).ts))
            last = max(ts for seq, ts in heard if seq < daemon.epoch)
            assert last < failed_at, "something was published after the failure"
            assert daemon.epoch > before["seq"]
            with daemon.observer() as observer:
                until(lambda: agree(mirror, observer))
            assert not mirror.hashes("GPU")
            # A lost device has not touched the host's pages: the next life has them again.
            assert len(mirror.hashes("CPU_PINNED")) >= 16
        with daemon.client() as client:
            commit(client, TOKENS)
            assert client.peek(TOKENS).matched_tokens == 64


def test_the_driver_s_errors_are_fatal_and_a_copy_s_are_not() -> None:
    assert CudaError("copy: CUDA_ERROR_ILLEGAL_ADDRESS (700)").facts["fatal"] is True
    assert not TransferError("a copy failed").facts.get("fatal")
