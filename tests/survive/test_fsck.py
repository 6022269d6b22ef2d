"""`sglcache fsck` of daemons of every kind, under load, and over a death."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from sglcache.client import fsck
from sglcache.testing.daemon import Daemon, Puppet, until

pytestmark = pytest.mark.survive

STATES = [{"name": "conv", "shape": [4, 3], "dtype": "float16"}]
HYBRID: dict[str, Any] = {
    "window": {"size": 8, "num_layers": 3, "num_tokens": 4 * 64},
    "mamba": {"num_layers": 2, "states": STATES, "num_slots": 8, "interval": 16},
}


@pytest.mark.parametrize(
    "sections",
    [
        {},
        HYBRID,
        {"events": {"enabled": False}},
        {"host": {"num_tokens": 0}},
        {"host": {"num_tokens": 512, "keep": False}},
    ],
    ids=["plain", "hybrid", "no events", "no host", "no journal"],
)
def test_every_kind_of_daemon_is_sound(lend: Callable[..., Daemon], sections: dict[str, Any]) -> None:
    daemon = lend(**sections)
    with daemon.client() as client:
        for number in range(5):
            with client.acquire(range(100 * number, 100 * number + 64), room=64) as lease:
                lease.commit()
        with daemon.observer() as observer:
            results = fsck.fsck(observer, mirror=True)
    assert {each.result for each in results} <= {fsck.OK, fsck.SKIPPED}, results


def test_a_next_life_is_sound_with_what_it_has_of_the_last(tmp_path: Any) -> None:
    with Daemon(tmp_path, dp_size=2, timing={"first_wait": 0.05}) as daemon:
        with daemon.client() as client, client.acquire(range(64)) as lease:
            lease.commit()
        daemon.settle()
        daemon.next_life(daemon.kill_rank())
        done = sglcache("fsck", "--socket", daemon.socket, "--json", "--mirror")
        assert done.returncode == 0, done.stdout
        first, second = ({each["name"]: each for each in rank["checks"]} for rank in json.loads(done.stdout)["ranks"])
        assert first["journal"]["checked"] == 16
        assert second["journal"]["checked"] == 0
        one = json.loads(sglcache("fsck", "--socket", daemon.socket, "--json", "--rank", 1).stdout)
        assert [rank["rank"] for rank in one["ranks"]] == [1]


def sglcache(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglcache", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_checks_go_on_under_load_and_say_so_where_they_are_overtaken(lend: Callable[..., Daemon]) -> None:
    daemon = lend()
    with Puppet(daemon.socket) as puppet, daemon.observer() as observer:
        puppet.do("cache = Client(socket)")
        puppet.begin(
            "end = time.monotonic() + 2\n"
            "number = 0\n"
            "while time.monotonic() < end:\n"
            "    number += 1\n"
            "    with cache.acquire([number % 50 * 100 + each for each in range(64)]) as lease: lease.commit()\n"
        )
        results = fsck.fsck(observer, timeout_s=0.5)
        assert all(each.result in (fsck.OK, fsck.OVERTAKEN, fsck.SKIPPED) for each in results), results
        puppet.finish()
        until(lambda: all(each.result != fsck.OVERTAKEN for each in fsck.fsck(observer)))
        puppet.do("cache.close()")
