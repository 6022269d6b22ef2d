"""Tenants of a real daemon: limits hold among real clients, change while it runs, and go on in a rank's next life."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sglcache import config as configs
from sglcache.client import Client
from sglcache.errors import BadRequest, ConfigError, Forbidden, NoSpace
from sglcache.memory.geometry import Geometry
from sglcache.server import room
from sglcache.server.tenants import limits_of
from sglcache.testing.daemon import SMALL, Daemon

pytestmark = pytest.mark.survive

TENANTS: dict[str, Any] = {
    "quiet": {"device_floor": 4 * 64, "host_floor": "25%"},
    "noisy": {"host_ceiling": "50%"},
    "small": {"device_ceiling": 4 * 16},
}
HTTP: dict[str, Any] = {"tenants": TENANTS, "http": {"enabled": True, "port": 0}}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("tenants"), **HTTP) as daemon:
        yield daemon


def prompt(number: int, num_pages: int = 8) -> range:
    """One that shares nothing with another number's."""
    return range(number * 1000, number * 1000 + 4 * num_pages)


def serve(client: Client, tokens: range, tenant: str | None) -> int:
    """A request from its beginning to its end; the tokens that were cached."""
    lease = client.acquire(tokens, tenant=tenant)
    matched = lease.matched_tokens
    lease.commit()
    lease.release(wait=True)
    return matched


def row(daemon: Daemon, tenant: str, tier: str = "DEVICE") -> dict[str, Any]:
    [found] = [each for each in daemon.status()["tenants"] if (each["tenant"], each["tier"]) == (tenant, tier)]
    assert isinstance(found, dict)
    return found


def run(daemon: Daemon, *words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "sglcache", "tenants", *words, "--socket", str(daemon.socket)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_noisy_tenant_with_a_hundred_times_the_traffic_does_not_cost_a_quiet_one_a_hit(daemon: Daemon) -> None:
    """Its conversations fit its floor, and another's traffic is many times the device and the host."""
    with daemon.client(name="quiet") as quiet, daemon.client(name="noisy") as noisy:
        for number in range(8):
            serve(quiet, prompt(number), "quiet")
        for turn in range(8):
            for number in range(100):
                serve(noisy, prompt(1000 + 100 * turn + number), "noisy")
            assert serve(quiet, prompt(turn), "quiet") == 32, f"turn {turn}"
            lease = quiet.acquire(prompt(turn), tenant="quiet", limit=32)
            assert lease.host_tokens == 0, "of the device"
            lease.release(wait=True)
    daemon.settle()
    assert (row(daemon, "quiet")["charged"], row(daemon, "quiet")["broken"]) == (64, 0)
    assert row(daemon, "quiet", "HOST")["charged"] == 64
    assert row(daemon, "noisy", "HOST")["charged"] <= 256


def test_a_tenant_at_its_ceiling_is_refused_with_its_numbers(daemon: Daemon) -> None:
    with daemon.client() as client:
        lease = client.acquire(prompt(5001, 12), tenant="small")
        with pytest.raises(NoSpace, match="tenant 'small': need 8 pages; its ceiling") as refused:
            client.acquire(prompt(5002, 8), tenant="small")
        facts = refused.value.facts
        assert (facts["tenant"], facts["ceiling"], facts["charged"], facts["need"]) == ("small", 16, 12, 8)
        assert facts["tenant_locked"] == 0, "it has not committed them"
        client.acquire(prompt(5002, 8), tenant="made up by a client").release(wait=True)
        lease.release(wait=True)
    assert {each["tenant"] for each in daemon.status()["tenants"]} >= {"default", "quiet", "noisy", "small"}


def test_limits_change_while_it_runs_and_only_by_an_admin(daemon: Daemon) -> None:
    with daemon.client() as client:
        with pytest.raises(Forbidden, match="an admin may"):
            client.set_tenant("small", device_ceiling=4)
        serve(client, prompt(5003, 12), "small")
        with daemon.admin() as admin:
            assert admin.set_tenant("small", device_ceiling=4 * 2, host_ceiling="10%")[0]["ceiling"] == 2
            assert row(daemon, "small", "HOST")["ceiling"] == 51
            with pytest.raises(BadRequest, match="add up to 257 pages, and there are 256"):
                admin.set_tenant("small", device_floor=4 * 193, device_ceiling="none")
            with pytest.raises(BadRequest, match='only a ceiling can be "none"'):
                admin.set_tenant("small", device_floor="none")
            with pytest.raises(BadRequest, match="a share of the tier"):
                admin.set_tenant("small", device_floor="much")
            with pytest.raises(BadRequest, match="1 to 64 printable characters"):
                admin.set_tenant("", device_floor=4)
            for wrong in (-1, 1.5, True):
                with pytest.raises(BadRequest, match="device_floor="):
                    admin.set_tenant("small", device_floor=wrong)  # type: ignore[arg-type]
            daemon.settle()
            assert row(daemon, "small")["charged"] <= 2, "the rest went by itself"
            admin.set_tenant("small", device_ceiling=4 * 16, host_ceiling="none")
    assert (row(daemon, "small")["ceiling"], row(daemon, "small", "HOST")["ceiling"]) == (16, None)


def test_the_command_lists_them_and_sets_them(daemon: Daemon) -> None:
    code, text = run(daemon)
    assert code == 0, text
    assert "quiet" in text
    code, text = run(daemon, "--json")
    assert code == 0, text
    told = json.loads(text)["ranks"][0]
    assert told["page_size"] == 4
    assert {each["tenant"] for each in told["tenants"]} >= {"default", "quiet", "noisy", "small"}
    code, text = run(daemon, "set", "small", "device_floor=40", "host_floor=5%")
    assert code == 0, text
    assert (row(daemon, "small")["floor"], row(daemon, "small", "HOST")["floor"]) == (10, 25)
    code, text = run(daemon, "set", "small", "device_floor=100%", "device_ceiling=none")
    assert (code, "add up to" in text) == (2, True), text
    code, text = run(daemon, "set", "small", "floor=1")
    assert code == 2
    assert "device_floor, device_ceiling" in text
    code, text = run(daemon, "set", "small", "device_floor=0", "host_floor=0")
    assert code == 0, text


def test_metrics_and_server_info_have_every_tenant(daemon: Daemon) -> None:
    http = daemon.info["http"]
    with urllib.request.urlopen(f"{http}/metrics", timeout=10) as page:
        text = page.read().decode()
    assert 'sglcache_tenant_floor_pages{rank="0",tenant="quiet",tier="device"} 64.0' in text
    assert 'sglcache_tenant_taken_pages_total{rank="0",tenant="noisy",tier="device"}' in text
    assert 'sglcache_tenant_ceiling_pages{rank="0",tenant="quiet",tier="device"}' not in text
    with urllib.request.urlopen(f"{http}/server_info", timeout=10) as page:
        info = json.loads(page.read())
    assert {each["tenant"] for each in info["ranks"][0]["tenants"]} >= {"default", "quiet", "noisy", "small"}


def test_what_was_set_holds_in_a_ranks_next_life(daemon: Daemon) -> None:
    """It ends the rank's life."""
    with daemon.admin() as admin:
        admin.set_tenant("made at run time", device_ceiling="10%")
        admin.set_tenant("quiet", device_floor=4 * 32)
    daemon.next_life(daemon.kill_rank())
    assert row(daemon, "made at run time")["ceiling"] == 25
    assert (row(daemon, "quiet")["floor"], row(daemon, "quiet", "HOST")["floor"]) == (32, 128)
    with daemon.admin() as admin:
        admin.set_tenant("quiet", device_floor=4 * 64)


def test_without_tenants_there_are_none_to_list_or_to_set(lend: Callable[..., Daemon]) -> None:
    daemon = lend()
    code, text = run(daemon)
    assert code == 1
    assert "no [tenants]" in text
    with daemon.admin() as admin, pytest.raises(BadRequest, match=r"\[tenants\]"):
        admin.set_tenant("a", device_floor=4)


@pytest.mark.parametrize(
    ("tenants", "words"),
    [
        ({"a": {"device_floor": "60%"}, "b": {"device_floor": "41%"}}, "add up to 257 pages, and there are 256"),
        ({"a": {"device_floor": 400, "device_ceiling": 300}}, "tenant 'a': its ceiling on DEVICE, 75 pages"),
        ({"a": {"device_floor": "lots"}}, r"tenants\.a\.device_floor.* such as \"25%\""),
        ({"a": {"device_floor": "120%"}}, r"tenants\.a\.device_floor"),
        ({"a": {"floor": 3}}, r"tenants\.a\.floor: no such key; .*floor"),
        ({" a": {}}, "printable characters"),
    ],
)
def test_a_configuration_that_can_not_be_is_refused_before_anything_starts(tenants: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        room.weigh(configs.parse({**SMALL, "tenants": tenants}))


def test_a_share_is_rounded_down_to_whole_pages_and_a_host_floor_needs_a_host() -> None:
    config = configs.parse({**SMALL, "tenants": {"a": {"device_floor": "33.3%", "device_ceiling": 4 * 100 + 3}}})
    limits = limits_of(config, Geometry.of(config), {})
    assert limits is not None
    assert (limits["a"].device_floor, limits["a"].device_ceiling) == (85, 100)
    config = configs.parse({**SMALL, "host": {"num_tokens": 0}, "tenants": {"a": {"host_floor": "10%"}}})
    with pytest.raises(ConfigError, match="there is no host tier"):
        limits_of(config, Geometry.of(config), {})
