"""What a daemon tells of reuse: by its clients' acquires and commits, the same in every place that tells it."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from sglcache import config as configs
from sglcache.client import Client
from sglcache.core.index import Index, IndexConfig
from sglcache.errors import BadRequest
from sglcache.memory.geometry import Geometry
from sglcache.server import reuse
from sglcache.testing.daemon import Daemon

pytestmark = pytest.mark.daemons

PAGE = 4
OBSERVED: dict[str, Any] = {"observe": {"reuse_sample_tokens": 1}, "http": {"enabled": True, "port": 0}}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("reuse"), **OBSERVED) as daemon:
        yield daemon


def turn(client: Client, prompt: list[int], said: list[int]) -> list[int]:
    """A turn of a conversation, its answer committed a token at a time; all of its tokens."""
    with client.acquire(prompt, limit=len(prompt) - 1) as lease:
        lease.commit()
        for token in said:
            lease.extend([token])
            if len(lease.tokens) % PAGE == 0:
                lease.commit()
    return prompt + said


def get(daemon: Daemon, path: str) -> bytes:
    with urllib.request.urlopen(f"{daemon.info['http']}{path}") as answer:
        return bytes(answer.read())


def test_a_conversation_is_followed_and_told_everywhere(daemon: Daemon) -> None:
    with daemon.client() as client:
        said = turn(client, list(range(18)), list(range(100, 110)))  # 4 pages asked for, 7 in the end
        turn(client, [*said, 1, 2, 3, 4], [])  # 8 pages, of which 7 were there
        with client.acquire(list(range(500, 516))):
            pass  # given back without a commit: nobody has it
        turn(client, list(range(500, 516)), [])
        facts = client.reuse()
    assert (facts["requests"], facts["tokens"]) == (4, 18 + 32 + 16 + 16)
    assert facts["looks"] == 4 + 8 + 4 + 4
    assert facts["forecast"]["all"] == pytest.approx(7 * PAGE / facts["tokens"])
    assert facts["ceiling"] == facts["hit_rate"] == pytest.approx(7 * PAGE / facts["tokens"])
    assert facts["measured"]["all"] == pytest.approx(7 * PAGE / facts["tokens"])
    assert facts["tracked_pages"] == 8 + 4
    assert [tier["tier"] for tier in facts["tiers"]] == ["device", "host"]
    told = json.loads(get(daemon, "/api/reuse"))
    assert {key: value for key, value in told.items() if key not in ("seconds", "more")} == {
        key: value for key, value in facts.items() if key not in ("seconds", "more")
    }
    page = get(daemon, "/metrics").decode()
    assert 'sglcache_reuse_hit_ratio{extra_gib="0",rank="0",tier="device"} 0.34' in page
    assert 'sglcache_reuse_hit_ratio{extra_gib="100",rank="0",tier="host"} 0.34' in page
    assert 'sglcache_reuse_gap_seconds_bucket{le="+Inf",rank="0"} 7.0' in page
    assert 'sglcache_reuse_gap_seconds_count{rank="0"} 7.0' in page
    with daemon.admin() as admin:
        admin.clear()
        assert admin.reuse()["tracked_pages"] == 0


def test_plan_asks_the_daemon_that_runs(daemon: Daemon) -> None:
    plan = [sys.executable, "-m", "sglcache", "plan", "--socket", str(daemon.socket)]
    done = subprocess.run([*plan, "--json"], capture_output=True, text=True, check=True)
    [told] = json.loads(done.stdout)["ranks"]
    assert told["rank"] == 0
    assert told["verdict"].startswith("too little was seen to say")
    done = subprocess.run(plan, capture_output=True, text=True, check=True)
    assert "too little was seen to say" in done.stdout


def test_turned_off_it_is_not_there() -> None:
    config = configs.parse({"observe": {"reuse_sample_tokens": 0}})
    index = Index(IndexConfig(page_size=16, num_pages=8))
    assert reuse.made(config, index) is None
    with pytest.raises(BadRequest, match="reuse_sample_tokens"):
        reuse.told(None, config, Geometry.of(config), index, 0.0)


def test_sizes_are_of_all_shards_and_of_each_tier() -> None:
    config = configs.parse(
        {
            "model_name": "m",
            "pool": {"page_size": 16, "num_tokens": 1600, "num_layers": 2, "num_kv_heads": 4, "num_shards": 2},
            "host": {"num_tokens": 3200, "write_policy": "write_back"},
            "storage": {"kind": "file", "path": "/nowhere", "size": "1 GiB"},
        }
    )
    shape = Geometry.of(config)
    sizes = reuse.sizes_of(config, shape, used=10)
    assert (sizes.device_pages, sizes.host_pages, sizes.write_policy) == (90, 200, "write_back")
    assert sizes.device_page_bytes == 2 * shape.page_bytes == sizes.host_page_bytes
    assert 0.9 < sizes.third_pages * sizes.third_page_bytes / 2**30 <= 1
