"""The third tier through real daemons of many forms: shards, latents, layouts, keys, namespaces, write policies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from below import (
    ONE,
    byte_of,
    check,
    daemon_over,
    drop,
    files,
    forget,
    idle,
    put,
    right,
    same,
    stored,
    third_of,
    watching,
)

from sglcache.client import Client, Worker
from sglcache.client.verify import verify
from sglcache.errors import Busy
from sglcache.testing import copies
from sglcache.testing.copies import Gate
from sglcache.testing.daemon import Daemon, until

pytestmark = pytest.mark.daemons

OTHERS = [range(10_000 * n, 10_000 * n + 128) for n in range(1, 9)]  # 32 pages each

FORMS: dict[str, dict[str, Any]] = {
    "shards that split heads": {"pool": {"num_kv_heads": 4, "num_shards": 2}},
    "shards that share heads": {"pool": {"num_shards": 4, "layout": "layer_first"}},
    "latents of three shards": {"pool": {"kv_lora_rank": 12, "qk_rope_head_dim": 4, "num_shards": 3}},
    "a host of layers": {"host": {"layout": "layer_first"}},
    "sha256": {"events": {"hash": "sha256"}},
    "eight bits": {"pool": {"dtype": "float8_e4m3fn", "v_head_dim": 5}},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_byte_comes_back_in_every_form_and_by_the_next_life_too(form: str, tmp_path: Path) -> None:
    with daemon_over(tmp_path, **FORMS[form]) as daemon, daemon.client() as client:
        fill(client)
        stored(daemon, 16)
        forget(client)
        look(client)
        with watching(daemon, daemon.epoch) as mirror:
            assert len(same(daemon, mirror)["DISK"]) == 16
    with daemon_over(tmp_path, "next", **FORMS[form]) as daemon, daemon.client() as client:
        until(lambda: third_of(daemon)["ready"])
        look(client)


def planes(client: Client) -> Iterator[tuple[int, Any]]:
    """A number that tells the part and plane of each array of pages; replicas have the same."""
    number = 0
    for views in client.pools:
        if views.shard % client.geometry.num_replicas == 0:
            number += 50
        for i, layer in enumerate(views.layers):
            for j, plane in enumerate(layer):
                yield number + 7 * i + j, plane.view(np.uint8) if isinstance(plane, np.ndarray) else plane


def fill(client: Client) -> None:
    """Bytes that differ from page to page, part to part, layer to layer."""
    with client.acquire(ONE) as lease:
        assert lease.matched_tokens == 0
        for number, plane in planes(client):
            for i, slot in enumerate(lease.slots):
                plane[slot] = byte_of(number, i)
        lease.commit()


def look(client: Client) -> None:
    with client.acquire(ONE) as lease:
        assert lease.matched_tokens == 64
        lease.wait_loaded()
        for number, plane in planes(client):
            for i, slot in enumerate(lease.slots):
                assert np.all(plane[slot] == byte_of(number, i)), f"page {i}, plane {number}"


def test_workers_of_two_shards_read_what_was_fetched(tmp_path: Path) -> None:
    """The scheduler waits; the workers see the load that follows, each in its own shard."""
    with daemon_over(tmp_path, pool={"num_kv_heads": 4, "num_shards": 2}) as daemon:
        with crew(daemon) as (scheduler, workers):
            lease = scheduler.acquire(ONE)
            for shard, worker in enumerate(workers):
                for layer in worker.pool.layers:
                    for plane in layer:
                        for i, slot in enumerate(lease.slots):
                            plane[slot] = byte_of(shard + 3, i)
            commit = lease.commit_begin()
            for worker in workers:
                worker.record(commit.ticket)
            commit.wait()
            release = lease.release_begin()
            for worker in workers:
                worker.record(release.ticket)
            release.wait()
        stored(daemon, 16)
        with daemon.admin() as admin:
            until(lambda: not daemon.status(prove=False)["sessions"])
            admin.clear()
        with crew(daemon) as (scheduler, workers):
            lease = scheduler.acquire(ONE, prefetch="wait_complete")
            assert (lease.matched_tokens, lease.host_tokens) == (64, 64)
            assert lease.load is not None
            for shard, worker in enumerate(workers):
                worker.wait_loaded(lease.load)
                for layer in worker.pool.layers:
                    for plane in layer:
                        for i, slot in enumerate(lease.slots):
                            assert np.all(plane[slot] == byte_of(shard + 3, i))
            lease.cancel()
        idle(daemon)


@contextlib.contextmanager
def crew(daemon: Daemon) -> Iterator[tuple[Client, list[Worker]]]:
    with (
        daemon.client(role="scheduler") as scheduler,
        daemon.worker(scheduler.token, 0) as one,
        daemon.worker(scheduler.token, 1) as two,
    ):
        yield scheduler, [one, two]


def test_pairs_of_tokens_are_found_by_the_token_behind_them(tmp_path: Path) -> None:
    with daemon_over(tmp_path, pool={"bigram": True}) as daemon, daemon.client() as client:
        put(client, range(1, 66), 7)
        stored(daemon, 16)
        forget(client)
        check(client, range(1, 66), 7, 64)
        forget(client)
        check(client, [*range(1, 65), 99], 7, 60)
        with watching(daemon, daemon.epoch) as mirror:
            assert len(same(daemon, mirror)["DISK"]) == 16


def test_namespaces_are_apart(tmp_path: Path) -> None:
    spaces: list[dict[str, str]] = [
        {},
        {"cache_salt": "a"},
        {"cache_salt": "ab"},
        {"lora": "a"},
        {"extra_key": "a"},
        {"lora": "a", "cache_salt": "b"},
    ]
    with daemon_over(tmp_path) as daemon, daemon.client() as client:
        for number, space in enumerate(spaces):
            check(client, ONE, number, 0, **space)
            put(client, ONE, number, **space)
            stored(daemon, 16 * (number + 1))
        forget(client)
        check(client, ONE, 0, 0, cache_salt="b")
        for number, space in enumerate(spaces):
            check(client, ONE, number, 64, **space)
        with watching(daemon, daemon.epoch) as mirror:
            # Routers are told of no namespace with an extra_key.
            assert len(same(daemon, mirror)["DISK"]) == 16 * (len(spaces) - 1)


# -- write policies, load-back ----------------------------------------------------------------------------------------


def test_write_back_stores_what_leaves_the_device(tmp_path: Path) -> None:
    with daemon_over(tmp_path, host={"write_policy": "write_back"}) as daemon, daemon.client() as client:
        put(client, ONE, 7)
        status = daemon.settle()
        assert (status["counters"]["backup_pages"], status["third"]["num_pages"]) == (0, 0)
        for number, tokens in enumerate(OTHERS):
            put(client, tokens, number)
        assert client.peek(ONE)[:2] == (0, 64)
        until(lambda: third_of(daemon)["num_pages"] >= 16)
        daemon.settle()
        forget(client)
        check(client, ONE, 7, 64)
    assert len(files(tmp_path)) >= 16


def test_write_through_selective_stores_at_the_use_that_it_asks_for(tmp_path: Path) -> None:
    host = {"write_policy": "write_through_selective", "write_threshold": 3}
    with daemon_over(tmp_path, host=host) as daemon, daemon.client() as client:
        put(client, ONE, 7)
        check(client, ONE, 7, 64)
        assert daemon.settle()["third"]["num_pages"] == 0
        check(client, ONE, 7, 64)
        stored(daemon, 16)
        forget(client)
        check(client, ONE, 7, 64)


def test_what_is_too_short_to_be_loaded_is_computed_though_it_was_fetched(tmp_path: Path) -> None:
    with daemon_over(tmp_path, host={"load_back_threshold": 65}) as daemon, daemon.client() as client:
        put(client, ONE, 7)
        stored(daemon, 16)
        forget(client)
        check(client, ONE, 7, 0)
        assert daemon.settle()["counters"]["prefetched_pages"] == 16
        put(client, [*ONE, *range(500, 516)], 7)
        check(client, ONE, 7, 64)


def test_loads_beyond_their_quota_are_computed_and_the_next_request_has_them(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with (
        daemon_over(tmp_path, host={"load_back_quota": 64}, prelude=copies.gate(gate, "load")) as daemon,
        daemon.client() as client,
    ):
        put(client, ONE, 7)
        put(client, OTHERS[0][:64], 8)
        stored(daemon, 32)
        forget(client)
        with client.acquire(ONE) as first:
            assert first.matched_tokens == 64
            check(client, OTHERS[0][:64], 8, 0)
            assert daemon.status(prove=False)["counters"]["loads_declined"] == 1
            gate.touch()
            right(client, first, 7)
        daemon.settle()  # a layer is there a moment before the load is over
        check(client, OTHERS[0][:64], 8, 64)


# -- cases of the collection that name the third tier -----------------------------------------------------------------


def test_a01_whatever_verb_takes_a_page_the_mirror_is_right(tmp_path: Path) -> None:
    with daemon_over(tmp_path) as daemon, daemon.client() as client, watching(daemon, daemon.epoch) as mirror:
        put(client, range(1, 17), 7)
        put(client, [*range(1, 9), *range(101, 109)], 7)
        stored(daemon, 6)
        assert [len(blocks) for blocks in same(daemon, mirror).values()] == [6, 6, 6]
        drop(client, "device")
        assert [len(blocks) for blocks in same(daemon, mirror).values()] == [0, 6, 6]
        drop(client, "host")
        assert [len(blocks) for blocks in same(daemon, mirror).values()] == [0, 0, 6]
        drop(client)
        assert [len(blocks) for blocks in same(daemon, mirror).values()] == [0, 0, 6]
        check(client, range(1, 17), 7, 16)
        client.clear("disk")
        assert [len(blocks) for blocks in same(daemon, mirror).values()] == [4, 4, 0]


def test_a02_host_pages_that_were_refilled_are_announced(tmp_path: Path) -> None:
    with daemon_over(tmp_path) as daemon, daemon.client() as client, watching(daemon, daemon.epoch) as mirror:
        tokens = range(1, 17)
        put(client, tokens, 7)
        stored(daemon, 4)
        for tier in ("device", "host"):
            drop(client, tier)
            daemon.settle()
        assert client.prefetch(tokens) == (16, 16)
        blocks = same(daemon, mirror)
        assert (len(blocks["HOST"]), len(blocks["DEVICE"])) == (4, 0)
        check(client, tokens, 7, 16)
        assert len(same(daemon, mirror)["DEVICE"]) == 4
        drop(client, "device")
        blocks = same(daemon, mirror)
        assert (len(blocks["HOST"]), len(blocks["DEVICE"])) == (4, 0)
        check(client, tokens, 7, 16)


def test_a03_parents_of_what_is_stored_below_were_told_before(tmp_path: Path) -> None:
    """A mirror takes in no block whose parent it does not know: so that it is exact says it."""
    with daemon_over(tmp_path) as daemon, daemon.client() as client, watching(daemon, daemon.epoch) as mirror:
        put(client, range(1, 9), 7)
        stored(daemon, 2)
        put(client, range(1, 21), 7)
        stored(daemon, 5)
        assert len(same(daemon, mirror)["DISK"]) == 5
        chain = mirror.blocks("DISK")
        assert sum(block.parent is None for block in chain.values()) == 1
        assert all(block.parent is None or block.parent in chain for block in chain.values())


def test_a08_and_a10_pages_that_are_stored_or_fetched_are_given_back_and_not_before(tmp_path: Path) -> None:
    """The write is held: the host pages that it reads stay, whatever else the host is to take; then all is free."""
    writes = Gate(tmp_path / "writes", "write")
    with (
        daemon_over(tmp_path, host={"num_tokens": 4 * 32}, prelude=writes.prelude) as daemon,
        daemon.client() as client,
    ):
        with writes.held():
            put(client, ONE, 7)
            writes.wait()
            assert daemon.pool("HOST")["locked"] == 16
            for number, tokens in enumerate(OTHERS[:4]):
                put(client, tokens[:64], number)
            assert client.peek(ONE)[1] == 64
        until(lambda: third_of(daemon)["num_pages"] >= 16)
        daemon.settle()
        assert daemon.pool("HOST")["locked"] == 0
        for number in range(20):  # looked up, and never used: nothing of it stays
            client.acquire(ONE).cancel()
            client.prefetch([*ONE, number])
        put(client, OTHERS[5], 5)
        daemon.settle()
        assert len(client.dump("host").hashes) == 32  # all of the host can be had
        forget(client)
        check(client, ONE, 7, 64)
    assert len(files(tmp_path)) >= 16


def test_a12_a_split_while_the_write_below_stalls_loses_nothing(tmp_path: Path) -> None:
    writes = Gate(tmp_path / "writes", "write")
    prompt, other = range(1, 33), [*range(1, 17), *range(201, 217)]
    with daemon_over(tmp_path, prelude=writes.prelude) as daemon, daemon.client() as client:
        with watching(daemon, daemon.epoch) as mirror:
            with writes.held():
                put(client, prompt, 7)
                writes.wait()
                put(client, other, 7)
            stored(daemon, 12)
            assert [len(blocks) for blocks in same(daemon, mirror).values()] == [12, 12, 12]
        assert all(pool["locked"] == 0 for pool in daemon.status()["pools"])
        forget(client)
        check(client, prompt, 7, 32)
        check(client, other, 7, 32)


@pytest.mark.parametrize("hash_name", ["xxh3_128", "sha256"])
def test_a14_three_lives_with_other_seeds_of_python_find_the_same(tmp_path: Path, hash_name: str) -> None:
    told = []
    for number, seed in enumerate((None, "0", "12345")):
        env = {} if seed is None else {"PYTHONHASHSEED": seed}
        sections = {"pool": {"num_kv_heads": 4, "num_shards": 2}, "events": {"hash": hash_name}}
        with daemon_over(tmp_path, f"life-{number}", env=env, **sections) as daemon, daemon.client() as client:
            until(lambda: third_of(daemon)["ready"])
            for salt, value in ((None, 7), ("a", 8)):
                if number == 0:
                    put(client, range(1, 17), value, cache_salt=salt)
                else:
                    check(client, range(1, 17), value, 16, cache_salt=salt)
            stored(daemon, 8)
            assert daemon.settle()["counters"]["l3_store_pages"] == (8 if number == 0 else 0)
            told.append((sorted(client.dump("disk").hashes), daemon.info["third"]["fingerprint"]))
    assert told[0] == told[1] == told[2]
    assert len(set(told[0][0])) == 8


def test_a20_of_every_page_that_left_the_reason_is_counted(tmp_path: Path) -> None:
    with daemon_over(tmp_path, storage={"size": "1 MiB"}) as daemon, daemon.client() as client:
        for number, tokens in enumerate([*OTHERS, *(range(500_000 + 1000 * n, 500_128 + 1000 * n) for n in range(4))]):
            put(client, tokens, number)
            daemon.settle()
        third = daemon.status()["third"]
        assert third["stored_pages"] == third["num_pages"] + third["evicted_pages"]
        assert third["evicted_pages"] > 0
        assert client.clear("disk") == {"DISK": third["num_pages"]}
        assert third_of(daemon)["num_pages"] == 0


def test_a22_a_clear_does_all_or_says_what_holds_it_and_leaves_the_third_tier(tmp_path: Path) -> None:
    reads = Gate(tmp_path / "reads")
    with daemon_over(tmp_path, prelude=reads.prelude) as daemon, daemon.client() as client:
        put(client, ONE, 7)
        stored(daemon, 16)
        forget(client)
        with watching(daemon, daemon.epoch) as mirror:
            with client.acquire(range(101, 109)) as lease:
                lease.commit()
                daemon.settle()
                with reads.held():
                    pending = client.acquire_begin(ONE)
                    reads.wait()
                    with pytest.raises(Busy) as refused:
                        client.clear()
                    assert (refused.value.facts["leases"], refused.value.facts["copies"]) == (1, 1)
                    assert client.peek(range(101, 109))[:2] == (8, 8)
                pending.wait().release(wait=True)
            daemon.settle()
            drop(client)
            assert [len(blocks) for blocks in same(daemon, mirror).values()] == [0, 0, 18]
        for pool in daemon.status()["pools"]:
            assert pool["free"] == pool["total"]


def test_verify_compares_the_third_tier_too_block_by_block(tmp_path: Path) -> None:
    with daemon_over(tmp_path) as daemon, daemon.client() as client:
        put(client, ONE, 7)
        stored(daemon, 16)
        drop(client, "device")
        with daemon.observer() as observer:
            report = verify(observer, duration_s=0.2, full=True)
        assert report.ok, report.problems
        assert {name: (tier.blocks, tier.dumped) for name, tier in report.tiers.items()} == {
            "device": (0, True),
            "host": (16, True),
            "disk": (16, True),
        }
