"""Pools of many forms through a real daemon: what a runner wrote, pushed out to the host and back, to the last byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sglcache.client import Client, Lease
from sglcache.config import parse
from sglcache.errors import BadRequest
from sglcache.memory.geometry import Geometry
from sglcache.memory.token_pools import MHATokenToKVPool, MLATokenToKVPool
from sglcache.memory.views import KVViews
from sglcache.testing.daemon import Daemon

pytestmark = pytest.mark.daemons

PAGES = 48
PROMPT = list(range(40))  # ten pages
HEADS = {"num_kv_heads": 2, "head_dim": 8}
LATENTS = {"kv_lora_rank": 12, "qk_rope_head_dim": 4}

FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "V narrower than K": ({**HEADS, "v_head_dim": 5, "dtype": "float32"}, {}),
    "layer_first to page_first": ({**HEADS, "layout": "layer_first", "dtype": "bfloat16"}, {}),
    "page_first to layer_first": ({**HEADS, "v_head_dim": 6}, {"layout": "layer_first"}),
    "layer_first to layer_first": ({**HEADS, "layout": "layer_first"}, {"layout": "layer_first"}),
    "eight bits": ({**HEADS, "dtype": "float8_e4m3fn", "layout": "layer_first"}, {}),
    "shards split heads": ({**HEADS, "num_kv_heads": 4, "num_shards": 2, "dtype": "float8_e5m2"}, {}),
    "shards share heads": ({**HEADS, "num_shards": 4, "layout": "layer_first"}, {}),
    "latents": ({**LATENTS, "dtype": "bfloat16"}, {"layout": "layer_first"}),
    "replicas of latents": ({**LATENTS, "num_shards": 3, "layout": "layer_first"}, {}),
}


@pytest.fixture(params=FORMS)
def daemon(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Daemon]:
    pool, host = FORMS[request.param]
    with Daemon(
        tmp_path / "d", pool={"num_tokens": 4 * PAGES, "num_layers": 3, **pool}, host={"num_tokens": 4 * 200, **host}
    ) as daemon:
        yield daemon


def planes_of(views: KVViews) -> list[Sequence[Tensor]]:
    return [getattr(views, plane.name) for plane in views.geometry.planes]


def fill(client: Client, lease: Lease, seed: int) -> list[list[list[Tensor]]]:
    """Random bytes into the lease's pages; what each shard's planes have in each layer. Replicas are alike."""
    generator = torch.Generator().manual_seed(seed)
    slots, geometry = lease.slots.tolist(), client.geometry
    wrote: list[list[list[Tensor]]] = []
    for views in client.pools:
        if views.shard % geometry.num_replicas == 0:
            made = []
            for plane in geometry.planes:
                shape = (len(slots), geometry.page_size, plane.heads, plane.token_bytes // plane.heads)
                made.append(
                    [
                        torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
                        for _ in range(geometry.num_layers)
                    ]
                )
        wrote.append(made)
        for plane, rows in zip(planes_of(views), made, strict=True):
            for pages, row in zip(plane, rows, strict=True):
                pages[slots] = row.view(pages.dtype)
    return wrote


def found(client: Client, lease: Lease) -> list[list[list[Tensor]]]:
    slots = lease.slots.tolist()
    return [
        [[pages[slots].view(torch.uint8) for pages in plane] for plane in planes_of(views)] for views in client.pools
    ]


def same(a: list[list[list[Tensor]]], b: list[list[list[Tensor]]]) -> bool:
    return all(
        torch.equal(*pair)
        for shards in zip(a, b, strict=True)
        for planes in zip(*shards, strict=True)
        for pair in zip(*planes, strict=True)
    )


def push_out(daemon: Daemon, client: Client) -> None:
    for seed in range(1, 4):
        with client.acquire([1000 * seed + n for n in range(4 * (PAGES - 12))]) as lease:
            fill(client, lease, seed)
            lease.commit()
        daemon.settle()
    assert client.peek(PROMPT)[:2] == (0, len(PROMPT)), "on the host alone"


def test_every_byte_comes_back_from_the_host_in_every_form(daemon: Daemon) -> None:
    with daemon.client() as client:
        with client.acquire(PROMPT) as lease:
            wrote = fill(client, lease, 0)
            assert same(found(client, lease), wrote)
            lease.commit()
        daemon.settle()
        push_out(daemon, client)
        with client.acquire(PROMPT) as lease:
            assert lease.host_tokens == len(PROMPT)
            lease.wait_loaded()
            assert same(found(client, lease), wrote)
        # What was written meanwhile is right, too: one of the others, from wherever it is.
        other = [1000 + n for n in range(4 * (PAGES - 12))]
        with client.acquire(other) as lease:
            assert lease.matched_tokens == len(other)
            lease.wait_loaded()
            assert same(found(client, lease), fill(client, lease, 1))
    daemon.status()


def test_both_sides_have_one_geometry_and_the_host_has_each_part_once(daemon: Daemon) -> None:
    with daemon.client() as client, daemon.observer() as observer:
        geometry = client.geometry
        assert observer.geometry == geometry == Geometry(**daemon.info["geometry"])
        assert [views.shard for views in client.pools] == list(range(geometry.num_shards))
        memfds = [os.readlink(link) for link in Path(f"/proc/{daemon.pid}/fd").iterdir() if link.exists()]
        memfds += [os.readlink(link) for link in Path(f"/proc/{daemon.pid}/fd").iterdir() if not link.exists()]
        count = {tier: sum(f"/memfd:sglcache-{tier}-" in each for each in memfds) for tier in ("device", "host")}
        assert count == {"device": geometry.num_shards, "host": geometry.num_parts}


@pytest.mark.parametrize("form", ["shards share heads", "replicas of latents"])
def test_replicas_are_loaded_from_the_first_of_them(form: str, tmp_path: Path) -> None:
    pool, host = FORMS[form]
    with (
        Daemon(
            tmp_path / "d", pool={"num_tokens": 4 * PAGES, "num_layers": 3, **pool}, host={"num_tokens": 800, **host}
        ) as daemon,
        daemon.client() as client,
    ):
        replicas = client.geometry.num_replicas
        with client.acquire(PROMPT) as lease:
            wrote = fill(client, lease, 0)
            for views in client.pools:
                if views.shard % replicas:  # which no model would do: it shows which one was copied
                    for plane in planes_of(views):
                        for pages in plane:
                            pages.view(torch.uint8)[lease.slots.tolist()] = 0xAA
            lease.commit()
        daemon.settle()
        push_out(daemon, client)
        with client.acquire(PROMPT) as lease:
            lease.wait_loaded()
            assert same(found(client, lease), wrote)


def test_sglangs_pools_stand_on_a_real_daemons_layers(tmp_path: Path) -> None:
    slots = torch.tensor([5, 17, 2])
    form = {"num_tokens": 4 * PAGES, "layout": "layer_first"}
    with Daemon(tmp_path / "heads", pool={**form, "v_head_dim": 5}) as daemon, daemon.client() as client:
        heads = MHATokenToKVPool(client.pool)
        k, v = torch.randn(3, 2, 8).half(), torch.randn(3, 2, 5).half()
        heads.set_kv_buffer(1, slots, k, v)
        assert heads.get_key_buffer(1).shape == (4 * PAGES, 2, 8)
        assert torch.equal(heads.get_key_buffer(1)[slots], k)
        assert torch.equal(client.pool.v[1][slots // 4, slots % 4], v)
    with Daemon(tmp_path / "latents", pool={**form, **LATENTS}) as daemon, daemon.client() as client:
        latents = MLATokenToKVPool(client.pool, 12, 4)
        rows = torch.randn(3, 1, 16).half()
        latents.set_kv_buffer(0, slots, rows)
        assert latents.get_key_buffer(0).shape == (4 * PAGES, 1, 16)
        assert torch.equal(latents.get_value_buffer(0)[slots], rows[..., :12])
        with pytest.raises(BadRequest, match="holds no k"):
            _ = client.pool.k


@pytest.mark.parametrize("form", ["replicas of latents", "page_first to layer_first", "shards split heads"])
def test_a_replay_verifies_whatever_the_form(form: str, tmp_path: Path) -> None:
    pool, host = FORMS[form]
    sections = {"pool": {"num_tokens": 4 * 4096, **pool}, "host": {"num_tokens": 4 * 8192, **host}}
    parse({"pool": {**sections["pool"], "page_size": 4}})
    with Daemon(tmp_path / "d", **sections, http={"enabled": True, "port": 0}) as daemon:
        command = [sys.executable, "-m", "sglcache", "replay", "--verify", "--limit", "12", "--json"]
        done = subprocess.run(
            [*command, "--socket", str(daemon.socket)], capture_output=True, text=True, check=False, timeout=100
        )
        assert done.returncode == 0, done.stderr + done.stdout
        report = json.loads(done.stdout)
        assert report["problems"] == []
        assert report["verified_tokens"] > 0
        daemon.status()
