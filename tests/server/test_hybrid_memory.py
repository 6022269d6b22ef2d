"""Daemons of hybrid models: each resource has pools of its own in both tiers, told at hello and mapped as they are."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sglcache import cli
from sglcache.client import Client, Lease
from sglcache.errors import BadRequest, ClosedError
from sglcache.testing.daemon import Daemon, until

pytestmark = pytest.mark.daemons

P = 4  # SMALL's page size
POOL = {"num_kv_heads": 2, "num_shards": 2}
WINDOW = {
    "size": 10,
    "num_layers": 3,
    "num_tokens": P * 64,
    "num_kv_heads": 4,
    "head_dim": 16,
    "dtype": "float32",
    "layers": [0, 2, 4],
}
MAMBA = {
    "num_layers": 5,
    "num_slots": 20,
    "host_slots": 30,
    "interval": 8 * P,
    "states": [
        {"name": "conv", "shape": [6, 3], "dtype": "float16"},
        {"name": "ssm", "shape": [4, 2, 8], "dtype": "float32"},
    ],
}
PURE = {"pool": {"num_layers": 0}, "window": {"size": 10, "num_layers": 3}}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("hybrid"), pool=POOL, window=WINDOW, mamba=MAMBA) as daemon:
        yield daemon


def test_a_worker_maps_its_shard_of_every_resource(daemon: Daemon) -> None:
    with (
        daemon.client(role="scheduler") as scheduler,
        daemon.worker(scheduler.token, 0) as first,
        daemon.worker(scheduler.token, 1) as second,
    ):
        for worker in (first, second):
            assert worker.window is not None
            assert worker.mamba is not None
            assert (worker.window.tokens, worker.window.num_pages, worker.window.layers) == (10, 3, (0, 2, 4))
            assert len(worker.window.k) == len(worker.window.v) == 3
            assert worker.window.k[2].shape == worker.window.v[0].shape == (64, P, 2, 16)
            assert worker.window.k[0].dtype == torch.float32
            assert (worker.mamba.interval, worker.mamba.layers) == (8 * P, ())
            assert list(worker.mamba.states) == ["conv", "ssm"]
            conv, ssm = worker.mamba.states["conv"], worker.mamba.states["ssm"]
            assert (len(conv), conv[4].shape, conv[4].dtype) == (5, (20, 3, 3), torch.float16)
            assert (len(ssm), ssm[4].shape, ssm[4].dtype) == (5, (20, 2, 2, 8), torch.float32)
            assert worker.pool.k[1].shape == (256, P, 1, 8)
        assert scheduler.window is not None
        assert (scheduler.window.tokens, scheduler.window.pools) == (10, [])
        with pytest.raises(BadRequest, match=r"a scheduler of 2 shards maps 0 pools; use `window\.pools`"):
            _ = scheduler.window.k


def test_what_one_member_writes_another_of_the_shard_sees_and_no_other_resource(daemon: Daemon) -> None:
    with daemon.client() as one, daemon.client() as other:
        windows, states = pools_of(one)
        windows[1].k[2][7] = 3.0
        states[0].states["ssm"][4][19] = 5.0
        for pools in (one.pools, other.pools):
            assert not any(tensor.any() for views in pools for tensor in (*views.k, *views.v))
        windows, states = pools_of(other)
        assert [[int(k.sum()) for k in views.k] for views in windows] == [[0, 0, 0], [0, 0, 3 * P * 2 * 16]]
        assert [int(states[shard].states["ssm"][4].sum()) for shard in (0, 1)] == [5 * 2 * 2 * 8, 0]
        assert not any(tensor.any() for views in states for tensor in views.states["conv"])
        assert one.window is not None
        with pytest.raises(BadRequest, match=r"a runner of 2 shards maps 2 pools; use `window\.pools`"):
            _ = one.window.k
    with pytest.raises(ClosedError):
        _ = one.window.pools
    with pytest.raises(ClosedError):
        _ = windows[0].k


def pools_of(client: Client) -> tuple[list[Any], list[Any]]:
    assert client.window is not None
    assert client.mamba is not None
    return list(client.window.pools), list(client.mamba.pools)


def test_a_model_without_companions_has_none(lend: Any) -> None:
    with lend().client() as client:
        assert (client.window, client.mamba) == (None, None)


def test_the_memory_of_all_resources_is_told(daemon: Daemon) -> None:
    facts = daemon.status(prove=False)
    token, window, slot = 2 * 2 * 8 * 2, 3 * 2 * 2 * 16 * 4, 5 * (32 + 128)  # of a shard; conv takes 18 bytes, and 32
    device = 2 * (256 * P * token + 64 * P * window + 20 * slot)
    host = 2 * (512 * P * token + 128 * P * window + 30 * slot)
    assert facts["memory"] == {
        "DEVICE": {"ready_bytes": device, "bytes": device},
        "HOST": {"ready_bytes": host, "bytes": host},
    }
    told = {each["kind"]: each for each in facts["companions"]}
    assert told["window"]["geometry"]["num_pages"] == 64
    assert (told["window"]["window"], told["window"]["page_bytes"], told["window"]["num_parts"]) == (10, P * window, 2)
    assert told["mamba"]["geometry"]["states"][1] == {"name": "ssm", "shape": [4, 2, 8], "dtype": "float32"}
    assert (told["mamba"]["geometry"]["host_pages"], told["mamba"]["interval"]) == (30, 32)
    assert daemon.info["companions"] == facts["companions"]


def test_server_info_has_the_state_of_every_resource(tmp_path: Path) -> None:
    with (
        Daemon(tmp_path, window=WINDOW, mamba=MAMBA, http={"enabled": True, "port": 0}) as daemon,
        daemon.client() as client,
        client.acquire(range(5 * P), states=2),
        urllib.request.urlopen(f"{daemon.info['http']}/server_info") as answer,
    ):
        (rank,) = json.load(answer)["ranks"]
        state = {(pool["resource"], pool["tier"]): (pool["leased"], pool["total"]) for pool in rank["pools"]}
    assert state == {
        ("full", "DEVICE"): (5, 256),
        ("full", "HOST"): (0, 512),
        ("window", "DEVICE"): (5, 64),
        ("window", "HOST"): (0, 128),
        ("mamba", "DEVICE"): (2, 20),
        ("mamba", "HOST"): (0, 30),
    }


def test_the_first_screen_tells_the_size_of_each_resource(daemon: Daemon) -> None:
    lines = cli._first_screen(daemon.info, 0.1).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("  device "))
    assert [line.strip() for line in lines[first : first + 6]] == [
        "device   256 pages of 4 tokens: 1,024 tokens, 128 KiB, taken as it is written",
        "host     512 pages of 4 tokens: 2,048 tokens, 256 KiB, taken as it is written",
        "window   device 64 pages of 4 tokens: 256 tokens, 384 KiB, taken as it is written",
        "host 128 pages of 4 tokens: 512 tokens, 768 KiB, taken as it is written",
        "mamba    device 20 slots: 31.25 KiB, taken as it is written",
        "host 30 slots: 46.88 KiB, taken as it is written",
    ]


def test_a_status_of_several_ranks_tells_of_full_pages_what_is_cached(tmp_path: Path) -> None:
    """A row of each rank has room for one number a tier."""
    with Daemon(tmp_path, dp_size=2, mamba=MAMBA) as daemon:
        with daemon.client() as client, client.acquire(range(P * 64), states=1) as lease:
            assert lease.mamba is not None
            lease.commit(states=[(P * 64, int(lease.mamba.slots[0]))])
        daemon.settle()
        command = [sys.executable, "-m", "sglcache", "status", "--socket", str(daemon.socket)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        row = next(line.split() for line in said.splitlines() if line.split()[:3] == ["0", "0", "0"])
        assert "25 % 12 %" in " ".join(row), said  # of 256 pages, and of 512
        screen = cli._first_screen(daemon.info, 0.1)
        assert screen.count("mamba device 20 slots") == screen.count("mamba host 30 slots") == 2


def test_a_populated_host_has_the_companions_memory_before_any_page_of_the_first(tmp_path: Path) -> None:
    """So what the index counts by is the first's alone."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    prelude = f"""
from sglcache.memory import filling, pools
filling.CHUNK_BYTES = 1
real = pools.Pool.populate
def held(self, first, stop):
    if self.num_pages == 512:
        open({str(gate)!r}).close()
    real(self, first, stop)
pools.Pool.populate = held
"""
    host = {"num_tokens": P * 512, "populate": True}
    with Daemon(tmp_path / "d", prelude=prelude, host=host, mamba=MAMBA) as daemon:
        slots, pages = 30 * 5 * (48 + 256), 512 * P * 2 * 2 * 2 * 8 * 2  # conv takes 36 bytes, and 48

        def memory() -> tuple[int, int]:
            there = daemon.status(prove=False)["memory"]["HOST"]
            return there["ready_bytes"], there["bytes"]

        until(lambda: memory() == (slots, slots + pages))
        while memory()[0] < slots + pages:
            with contextlib.suppress(OSError):  # nobody is at the gate
                os.close(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))


KINDS: dict[str, dict[str, Any]] = {
    "a window": {"window": WINDOW},
    "states": {"mamba": MAMBA},
    "both": {"window": WINDOW, "mamba": MAMBA},
    "a window alone": {"pool": {"num_layers": 0}, "window": {**WINDOW, "num_kv_heads": 2}},
    "latents and both": {
        "pool": {"kv_lora_rank": 12, "qk_rope_head_dim": 4},
        "window": {**WINDOW, "num_tokens": P * 40},
        "mamba": MAMBA,
    },
}


def arrays(client: Client, lease: Lease, first: int) -> Iterator[tuple[str, np.ndarray, list[int]]]:
    """What the lease has of its first 8 pages, from page `first` on: (what, [slots, bytes...] of a pool, the slots)."""
    for views in client.pools:
        for layer, planes in enumerate(views.layers):
            for plane, array in enumerate(planes):
                part = views.shard // client.geometry.num_replicas  # what shards have alike is written alike
                yield f"full {part} {layer} {plane}", array, lease.slots[first:8].tolist()
    if lease.window is not None:
        assert client.window is not None
        for views in client.window.pools:
            for layer, planes in enumerate(views.layers):
                for plane, array in enumerate(planes):
                    here = lease.window.table[max(first, 8 - client.window.num_pages) : 8].tolist()
                    yield f"window {views.shard} {layer} {plane}", array, here


def states_of(client: Client) -> Iterator[tuple[str, np.ndarray]]:
    for views in client.mamba.pools if client.mamba is not None else ():
        for layer, planes in enumerate(views.layers):
            for number, array in enumerate(planes):
                yield f"mamba {views.shard} {layer} {number}", array


def drawn(what: str, shape: tuple[int, ...]) -> np.ndarray:
    """Bytes that no other array has."""
    return np.random.default_rng(list(what.encode())).integers(0, 256, shape, np.uint8)


@pytest.mark.parametrize("layouts", [("page_first", "page_first"), ("layer_first", "page_first")], ids="-".join)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_runner_wrote_comes_back_from_the_host_whole_in_every_resource(
    kind: str, layouts: tuple[str, str], tmp_path: Path
) -> None:
    """Also once the device has none of it: then a load brings it all, and the first layer's event is for all of it."""
    sections = {**KINDS[kind], "host": {"num_tokens": P * 512, "layout": layouts[1]}}
    sections["pool"] = {"num_shards": 2, "layout": layouts[0], **sections.get("pool", {})}
    with Daemon(tmp_path, **sections) as daemon, daemon.client() as client:
        prompt = range(8 * P)
        states = 1 if client.mamba is not None else 0
        lease = client.acquire(prompt, states=states)
        for what, array, slots in arrays(client, lease, 0):
            array[slots] = drawn(what, array[slots].shape)
        for what, array in states_of(client):
            assert lease.mamba is not None
            array[lease.mamba.slots[0]] = drawn(what, array[0].shape)
        lease.commit(states=[(8 * P, int(lease.mamba.slots[0]))] if lease.mamba is not None else ())
        lease.release(wait=True)
        copied = daemon.settle()["copies"]
        assert [(lane["name"], lane["pages"] > 0) for lane in copied] == [("backup", True), ("load", False)]
        client.clear("DEVICE")
        for each in [client.pools, *(it.pools for it in (client.window, client.mamba) if it is not None)]:
            for views in each:
                for planes in views.layers:
                    for array in planes:
                        array[:] = 0xEE
        lease = client.acquire([*prompt, 1, 2, 3], states=states)
        assert (lease.matched_tokens, lease.host_tokens, lease.reaches[0]) == (8 * P, 8 * P, 8 * P)
        assert lease.load is not None
        client.wait_loaded(lease.load, 0)
        for what, array in states_of(client):
            assert lease.mamba is not None
            assert lease.mamba.source is not None
            assert (array[lease.mamba.source] == drawn(what, array[0].shape)).all(), what
        for what, array, slots in arrays(client, lease, 0):
            if what.startswith("window"):
                assert (array[slots] == drawn(what, array[slots].shape)).all(), what
        lease.wait_loaded()
        for what, array, slots in arrays(client, lease, 0):
            assert (array[slots] == drawn(what, array[slots].shape)).all(), what
        lease.release(wait=True)
        status = daemon.settle()
        assert status["copies"][1]["pages"] == 8
        assert status["violations"] == []


def test_layers_of_a_window_alone_have_pages_that_are_names_and_runners_go_on_as_ever(tmp_path: Path) -> None:
    with Daemon(tmp_path, **PURE) as daemon:
        with daemon.client() as client:
            assert client.window is not None
            assert client.pool.k == ()
            assert client.window.k[2].shape == (64, P, 2, 8)
            lease = client.acquire(range(40))
            lease.wait_loaded()
            lease.commit()
            lease.release(wait=True)
        assert daemon.info["geometry"]["num_layers"] == 0
        assert daemon.status()["memory"]["DEVICE"]["bytes"] == 64 * P * 3 * 2 * 2 * 8 * 2
        daemon.settle()
        assert "error" not in daemon.said().lower()


def test_a_runner_of_many_shards_gets_all_pools_of_all_resources(tmp_path: Path) -> None:
    """More descriptors than come beside one byte of a frame."""
    pool = {"num_kv_heads": 1, "num_shards": 130, "num_layers": 1, "num_tokens": 64}
    mamba = {**MAMBA, "num_layers": 1, "states": [{"name": "ssm", "shape": [130, 2], "dtype": "float32"}]}
    with Daemon(tmp_path, pool=pool, host={"num_tokens": 0}, mamba={**mamba, "host_slots": None}) as daemon:
        with daemon.client() as client:
            assert client.mamba is not None
            assert [views.shard for views in client.mamba.pools] == list(range(130))
            for views in client.mamba.pools:
                views.states["ssm"][0][3] = float(views.shard)
        with daemon.client(role="scheduler") as scheduler, daemon.worker(scheduler.token, 129) as worker:
            assert worker.mamba is not None
            assert (worker.mamba.states["ssm"][0][3] == 129.0).all()
