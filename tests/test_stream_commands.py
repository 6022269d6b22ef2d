"""Commands for those who run the stream, on a real daemon."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq.auth

from sglcache.client.mirror import Mirror
from sglcache.testing.daemon import Daemon, until

pytestmark = pytest.mark.daemons


def sglcache(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglcache", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_an_announcement_is_over_when_the_command_is(lend: Callable[..., Daemon]) -> None:
    daemon = lend()
    with daemon.client() as client:
        with client.acquire(range(40)) as lease:
            lease.commit()
        daemon.settle()
        before = client.digest()["seq"]
        done = sglcache("announce", "--socket", daemon.socket)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("rank 0: told of 10 blocks of device, 10 blocks of host, in the batches from ")
        assert client.digest()["seq"] > before
        assert not client.digest()["announcing"]


def test_health_is_that_of_every_rank(tmp_path: Path) -> None:
    with Daemon(tmp_path, dp_size=2, timing={"first_wait": 600.0}) as daemon:  # http is off: there is no port to ask
        done = sglcache("health", "--socket", daemon.socket)
        assert (done.returncode, done.stdout) == (0, "ok\n")
        assert json.loads(sglcache("health", "--socket", daemon.socket, "--json").stdout)["status"] == "ok"
        pid = daemon.rank(1).kill_rank()
        until(lambda: daemon.rank(1).row["state"] == "waiting")
        done = sglcache("health", "--socket", daemon.socket)
        assert done.returncode == 1
        assert done.stdout.startswith("degraded: rank 1 is waiting for its next start in ")
        assert f"pid {pid} was killed by SIGKILL" in done.stdout
    gone = sglcache("health", "--socket", daemon.socket)
    assert (gone.returncode, gone.stdout) == (69, "")


def test_without_events_an_announcement_says_what_to_set(lend: Callable[..., Daemon]) -> None:
    done = sglcache("announce", "--socket", lend(events={"enabled": False}).socket)
    assert done.returncode == 2
    assert "events.enabled" in done.stderr


def test_keys_are_made_once_and_the_secret_is_ones_own(tmp_path: Path) -> None:
    done = sglcache("keygen", tmp_path / "keys", "rank")
    assert done.returncode == 0, done.stderr
    public, secret = map(Path, done.stdout.split())
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert zmq.auth.load_certificate(secret)[0] == zmq.auth.load_certificate(public)[0]
    again = sglcache("keygen", tmp_path / "keys", "rank")
    assert again.returncode == 2
    assert "choose another name" in again.stderr
    assert sglcache("keygen", tmp_path, "a/b").returncode == 2


def test_a_daemon_with_keys_speaks_with_those_it_knows(tmp_path: Path) -> None:
    """All of it as an operator would: keygen for both sides, the reader's public key into the folder."""
    ours = Path(sglcache("keygen", tmp_path / "ours", "rank").stdout.split()[1])
    theirs = Path(sglcache("keygen", tmp_path / "readers", "router").stdout.split()[1])
    with (
        Daemon(
            tmp_path / "daemon", events={"curve_key_file": str(ours), "curve_allow_dir": str(tmp_path / "readers")}
        ) as daemon,
        daemon.client() as client,
    ):
        from sglcache.client.mirror import Curve

        with client.acquire(range(40)) as lease:
            lease.commit()
        daemon.settle()
        stream = client.status()["stream"]
        public, secret = zmq.auth.load_certificate(theirs)
        assert secret is not None
        server = zmq.auth.load_certificate(ours)[0]
        curve = Curve(server.decode(), public.decode(), secret.decode())
        with Mirror(stream["endpoint"], stream["replay_endpoint"], curve=curve) as mirror:
            assert mirror.catch_up(client.digest()["seq"], 10.0)
            assert len(mirror.hashes("GPU")) == 10


@pytest.mark.parametrize("listed", [False, True])
def test_watch_and_replay_know_the_stream_s_key_or_say_what_is_wanted(tmp_path: Path, listed: bool) -> None:
    ours = Path(sglcache("keygen", tmp_path / "ours", "rank").stdout.split()[1])
    events = {"curve_key_file": str(ours), **({"curve_allow_dir": str(tmp_path / "ours")} if listed else {})}
    with Daemon(tmp_path / "daemon", events=events, pool={"num_tokens": 4096}, host={"num_tokens": 4096}) as daemon:
        assert "curve_server_key" not in json.dumps(daemon.ask()), "HTTP is for everyone"
        watch = sglcache("watch", "--socket", daemon.socket, "--limit", 1)
        replay = sglcache("replay", "--socket", daemon.socket, "--limit", 3, "--clients", 1)
        if listed:
            assert (watch.returncode, replay.returncode) == (2, 2)
            assert "events.curve_allow_dir" in watch.stderr
            assert "events.curve_allow_dir" in replay.stderr
        else:
            assert watch.returncode == 0, watch.stderr
            assert replay.returncode == 0, replay.stderr
