"""The third tier over the lives of ranks and daemons: what is in the folder is found again, by whom it is meant for."""

from __future__ import annotations

import os
import random
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from below import ONE, check, daemon_over, drop, files, forget, idle, put, same, stored, third_of, watching, write

from sglcache.client import Client
from sglcache.testing.daemon import Daemon, DaemonError, Served, until

pytestmark = pytest.mark.daemons

TWO = range(101, 165)


def ready(rank: Served) -> None:
    until(lambda: third_of(rank)["ready"])


def test_pages_are_found_again_after_every_kind_of_end(tmp_path: Path) -> None:
    """A rank drained and killed, the whole daemon stopped and killed: each life has what those before it stored."""
    daemon = daemon_over(tmp_path)
    try:
        with daemon.client() as client:
            put(client, ONE, 7)
            stored(daemon, 16)
        lives = 1
        for number in (signal.SIGKILL, signal.SIGTERM):
            pid = daemon.kill_rank(number)
            daemon.next_life(pid)
            ready(daemon)
            lives += 1
            with daemon.client() as client:
                check(client, ONE, 7, 64)
                tokens = range(lives * 1000, lives * 1000 + 16)
                put(client, tokens, lives)
            stored(daemon, 16 + 4 * (lives - 1))
        for how in ("stop", "kill"):
            assert daemon.stop() == 0 if how == "stop" else daemon.kill() is None
            daemon = daemon_over(tmp_path)
            ready(daemon)
            with daemon.client() as client:
                check(client, ONE, 7, 64)
                for life in range(2, lives + 1):
                    check(client, range(life * 1000, life * 1000 + 16), life, 16)
            counters = daemon.settle()["counters"]
            assert counters["prefetched_pages"] == 16 + 4 * (lives - 1)
            assert counters["l3_store_pages"] == 0  # nothing is written that is there
            with watching(daemon, daemon.epoch) as mirror:
                blocks = same(daemon, mirror)
            assert len(blocks["DISK"]) == 16 + 4 * (lives - 1)
        idle(daemon)
    finally:
        daemon.kill()


@pytest.mark.parametrize(
    "other",
    [
        {"model_name": "another"},
        {"storage": {"revision": "2"}},
        {"pool": {"dtype": "bfloat16"}},
        {"pool": {"num_tokens": 8 * 128, "page_size": 8}},
        {"pool": {"bigram": True}},
        {"events": {"hash": "sha256"}},
        {"pool": {"num_shards": 2}},
    ],
    ids=str,
)
def test_what_another_model_or_form_has_stored_is_not_found(other_folder: Path, other: dict[str, Any]) -> None:
    sections = {key: value for key, value in other.items() if isinstance(value, dict)}
    with daemon_over(other_folder, f"other-{len(os.listdir(other_folder))}", **names(other), **sections) as daemon:
        ready(daemon)
        assert third_of(daemon)["num_pages"] == 0
        with daemon.client(role="observer") as client:
            assert client.digest()["tiers"]["DISK"] == [0, 0]
        if "num_shards" not in str(other):
            with daemon.client() as client, client.acquire(ONE) as lease:
                assert lease.matched_tokens == 0
    assert len(files(other_folder)) == 16


def names(other: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in other.items() if not isinstance(value, dict)}


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That has ONE of the model `test`."""
    folder = tmp_path_factory.mktemp("stored")
    with daemon_over(folder) as daemon, daemon.client() as client:
        put(client, ONE, 7)
        stored(daemon, 16)
    return folder


def test_layout_and_pool_sizes_may_change_between_lives(tmp_path: Path) -> None:
    with daemon_over(tmp_path) as daemon, daemon.client() as client:
        put(client, ONE, 7)
        stored(daemon, 16)
    for number, sections in enumerate(
        (
            {"host": {"layout": "layer_first", "num_tokens": 4 * 64}},
            {"pool": {"layout": "layer_first", "num_tokens": 4 * 100}, "host": {"layout": "layer_first"}},
        )
    ):
        with daemon_over(tmp_path, f"life-{number}", **sections) as daemon, daemon.client() as client:
            ready(daemon)
            check(client, ONE, 7, 64)
            tokens = range(1000 * (number + 1), 1000 * (number + 1) + 32)
            put(client, tokens, number)  # and what is stored in that layout is found in it
            stored(daemon, 16 + 8 * (number + 1))
            forget(client)
            check(client, tokens, number, 32)
            check(client, ONE, 7, 64)


@pytest.mark.parametrize("harm", ["corrupt", "truncated", "foreign", "gone", "header"])
def test_a_harmed_file_is_a_counted_miss_and_costs_itself_alone(tmp_path: Path, harm: str) -> None:
    with daemon_over(tmp_path) as daemon, daemon.client() as client:
        put(client, ONE, 7)
        stored(daemon, 16)
        put(client, TWO, 8)
        stored(daemon, 32)
        there = {path.name: path for path in files(tmp_path)}
        victim = there[digest_of(client, ONE, 10)]
        whole = victim.read_bytes()
        if harm == "corrupt":
            victim.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        elif harm == "header":
            victim.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        elif harm == "truncated":
            victim.write_bytes(whole[:-5])
        elif harm == "foreign":
            victim.write_bytes(there[digest_of(client, TWO, 10)].read_bytes())
        else:
            victim.unlink()
        forget(client)
        check(client, ONE, 7, 40)
        check(client, TWO, 8, 64)
        misses = third_of(daemon)["misses"]
        assert sum(misses.values()) == 6
        assert misses["behind"] == 5  # which were not looked at
        assert all(count > 0 for count in misses.values())
        until(lambda: third_of(daemon)["num_pages"] == 31)
        until(lambda: third_of(daemon)["discarded_pages"] == 1)
        with watching(daemon, daemon.epoch) as mirror:
            assert len(same(daemon, mirror)["DISK"]) == 31
            # It is computed anew, and comes back to its place before its children.
            put(client, ONE, 7)
            stored(daemon, 32)
            assert len(same(daemon, mirror)["DISK"]) == 32
        forget(client)
        check(client, ONE, 7, 64)
    with daemon_over(tmp_path, "next") as daemon, daemon.client() as client:
        ready(daemon)
        assert third_of(daemon)["num_pages"] == 32
        check(client, ONE, 7, 64)


def digest_of(client: Client, tokens: range, page: int) -> str:
    """The name of a page's file."""
    from sglcache.core import hashing
    from sglcache.core.key import ROOT
    from sglcache.testing.rig import pack

    hasher, before = hashing.hasher("xxh3_128"), hashing.seed(ROOT)
    for number in range(page + 1):
        before = hasher.digest(before + pack(tokens[4 * number : 4 * number + 4]))
    return before.hex()


FULL = """
import errno, os
from sglcache.storage import disk
real = disk.Disk.write
def write(self, path, parts):
    if os.path.exists({mark!r}):
        raise OSError(errno.ENOSPC, "No space left on device")
    return real(self, path, parts)
disk.Disk.write = write
"""


def test_a_full_disk_stores_nothing_more_and_serves_what_is_there(tmp_path: Path) -> None:
    mark = tmp_path / "full"
    with daemon_over(tmp_path, prelude=FULL.format(mark=str(mark))) as daemon, daemon.client() as client:
        put(client, ONE, 7)
        stored(daemon, 16)
        mark.touch()
        put(client, TWO, 8)
        until(lambda: sum(third_of(daemon)["not_stored"].values()) > 0)
        status = daemon.settle()
        assert status["counters"]["l3_stores_failed"] == 16
        assert "full" in status["third"]["not_stored"]
        with watching(daemon, daemon.epoch) as mirror:
            blocks = same(daemon, mirror)  # what had to go to make room is told of as well
            assert len(blocks["DISK"]) == status["third"]["num_pages"]
        mark.unlink()
        forget(client)
        put(client, TWO, 8)
        until(lambda: third_of(daemon)["num_pages"] >= 16)
        daemon.settle()
        forget(client)
        check(client, TWO, 8, 64)
    assert not [path for path in files(tmp_path) if path.suffix]  # no half of a page is left behind


def test_disk_is_exact_after_work_evictions_restarts_and_clears(tmp_path: Path) -> None:
    """A mirror has what the files are, whatever came and went: prompts that share beginnings, in a folder too small."""
    chance = random.Random(5)
    for life in range(3):
        with daemon_over(tmp_path, storage={"size": "1 MiB"}) as daemon:
            ready(daemon)
            with watching(daemon, daemon.epoch) as mirror, daemon.client() as client:
                for number in range(40):
                    prompt = work(client, chance)
                    if number % 10 == 9:
                        check_any(client, prompt)
                    if number == 20:
                        daemon.settle()
                        drop(client, chance.choice(["disk", None, "host"]))
                blocks = same(daemon, mirror)
                third = third_of(daemon)
                assert len(blocks["DISK"]) == third["num_pages"] == len(files(tmp_path)) > 0
                assert third["num_bytes"] <= third["max_bytes"] == 1 << 20
                if life != 1:
                    assert third["evicted_pages"] > 0
                with daemon.admin() as admin:
                    admin.announce()
                    until(lambda: not admin.digest()["announcing"])
                assert same(daemon, mirror)["DISK"] == blocks["DISK"]
                with watching(daemon) as late:  # who joins late, by a snapshot
                    assert same(daemon, late)["DISK"] == blocks["DISK"]
            if life == 1:
                daemon.kill_rank()
                until(lambda: daemon.row["state"] == "ok" and daemon.row["restarts"] == 1, 60.0)
                ready(daemon)
                with watching(daemon, daemon.epoch) as mirror:
                    again = same(daemon, mirror)["DISK"]
                    assert len(again) == third_of(daemon)["num_pages"] == len(files(tmp_path))
                    assert again == blocks["DISK"]


def work(client: Client, chance: random.Random) -> list[int]:
    """A prompt of one of a few families; its pages' bytes follow from its tokens alone."""
    family = chance.randrange(12)
    length = chance.randrange(4, 120)
    prompt = [family * 1000 + i for i in range(length // 2)] + [chance.randrange(1 << 30)] * (length - length // 2)
    with client.acquire(prompt, prefetch=chance.choice(["none", "best_effort", "wait_complete"])) as lease:
        lease.wait_loaded()
        for i in range(lease.matched_tokens // 4, len(prompt) // 4):
            write(client, lease.slots[i], value_of(prompt, i), i)
        lease.commit()
    return prompt


def value_of(prompt: list[int], page: int) -> int:
    return hash(tuple(prompt[: 4 * page + 4])) % 251


def check_any(client: Client, prompt: list[int]) -> None:
    import numpy as np
    from below import byte_of

    with client.acquire(prompt) as lease:
        lease.wait_loaded()
        for i in range(lease.matched_tokens // 4):
            for layer in client.pool.layers:
                for plane in layer:
                    assert np.all(plane[lease.slots[i]] == byte_of(value_of(prompt, i), i)), f"page {i}"


def test_routers_are_told_nothing_of_it_where_they_are_not_to_be(tmp_path: Path) -> None:
    with daemon_over(tmp_path, storage={"events": False}) as daemon, daemon.client() as client:
        put(client, ONE, 7)
        stored(daemon, 16)
        with watching(daemon, daemon.epoch) as mirror:
            same(daemon, mirror, ("DEVICE", "HOST"))
            assert mirror.hashes("DISK") == set()
        assert "DISK" not in client.digest()["tiers"]
        forget(client)
        check(client, ONE, 7, 64)


def test_a_daemon_without_events_has_a_third_tier_as_well(tmp_path: Path) -> None:
    for name in ("one", "two"):
        daemon: Daemon
        with daemon_over(tmp_path, name, events={"enabled": False}) as daemon, daemon.client() as client:
            ready(daemon)
            if name == "one":
                put(client, ONE, 7)
                stored(daemon, 16)
                forget(client)
            check(client, ONE, 7, 64)
            assert client.digest()["tiers"] == {}


EAGER = "from sglcache.server import third\nthird.RETRY_S = 0.05\n"


def test_a_rank_that_starts_again_serves_without_a_folder_that_cannot_be_opened(tmp_path: Path) -> None:
    """And uses it again once it can be."""
    with daemon_over(tmp_path, prelude=EAGER) as daemon:
        with daemon.client() as client:
            put(client, ONE, 7)
            stored(daemon, 16)
        lock = tmp_path / "l3" / "rank-0" / "lock"
        lock.unlink()
        lock.mkdir()
        daemon.next_life(daemon.kill_rank())
        third = third_of(daemon)
        assert (third["broken"], third["ready"]) == (True, False)
        assert f"{lock} can't be used" in third["why"]
        with daemon.client() as client:
            put(client, TWO, 8)
            check(client, TWO, 8, 64)
            lock.rmdir()
            ready(daemon)
            third = third_of(daemon)
            assert (third["broken"], third["why"], third["num_pages"]) == (False, None, 16)
            check(client, ONE, 7, 64)
            with watching(daemon, daemon.epoch) as mirror:
                assert len(same(daemon, mirror)["DISK"]) == 16
        assert daemon.row["restarts"] == 1


def test_a_daemon_does_not_start_over_a_folder_that_is_anothers_and_says_so_in_a_line(tmp_path: Path) -> None:
    with daemon_over(tmp_path), pytest.raises(DaemonError) as raised:
        daemon_over(tmp_path, "second")
    said = str(raised.value)
    assert re.search(r"ConfigError: rank 0 \(dp 0, pp 0\): storage\.path: .*/l3/rank-0 is in use \(process \d+\)", said)
    assert "served" not in said
    assert said.count("Traceback") == 1  # of the test's own program, which has no command line to end with a line
