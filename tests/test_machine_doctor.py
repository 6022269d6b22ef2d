"""`sglcache doctor` of the machine: each check by made-up facts, the gatherer on this machine and a real daemon."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sglcache import cli, compiled, config, errors
from sglcache.client.doctor.finding import Finding
from sglcache.commands import machine_checks as checks
from sglcache.commands.machine_facts import Attached, Facts, Port, Socket, gather
from sglcache.server import room
from sglcache.server.plan import plan
from sglcache.testing.daemon import Daemon

CONFIG = config.parse({"http": {"port": 30080}})
SEATS = plan(CONFIG)
FOLDER = Path("/run/user/0/sglcache")
DAEMON = {"version": "0", "protocol": 7, "pid": 5, "ranks": [{"rank": 0, "pid": 6, "state": "ok"}]}
WELL = {"serving": True, "status": "ok"}
STREAM = {"endpoint": "tcp://127.0.0.1:5557", "subscriptions": 1}


class Case(NamedTuple):
    check: Callable[[Facts], Any]
    facts: dict[str, Any]
    state: str
    words: str


def running(**more: Any) -> dict[str, Any]:
    return {"protocol": 7, "daemons": [{**DAEMON, **more}], "health": [WELL]}


CASES = {
    "python is too old": Case(checks.python, {"python": (3, 10, 4)}, "failed", "3.10.4; make the environment"),
    "python is well": Case(checks.python, {"python": (3, 12, 1)}, "ok", "3.12.1"),
    "a core that was not compiled": Case(
        checks.core,
        {"core": compiled.Form(False, compiled.NOT_BUILT)},
        "warning",
        "takes up to twice the time: it was not",
    ),
    "a core that was changed": Case(
        checks.core,
        {"core": compiled.Form(False, "sglcache.core.tree was changed since it was compiled; `make install` does it")},
        "warning",
        "since it was compiled; `make install`",
    ),
    "a core that is wanted pure": Case(
        checks.core, {"core": compiled.Form(False, "SGLCACHE_PURE is set")}, "ok", "pure Python: SGLCACHE_PURE is set"
    ),
    "a core that is compiled": Case(checks.core, {}, "ok", "compiled"),
    "a kernel without pidfds": Case(checks.kernel, {"kernel": "4.18.0-el8"}, "failed", "update it"),
    "a kernel that knows no peer's pidfd": Case(checks.kernel, {"kernel": "5.15.0"}, "warning", "--pid"),
    "cuda is asked for": Case(
        checks.torch, {"config": config.parse({"pool": {"device": "cuda"}})}, "failed", 'write pool.device = "cpu"'
    ),
    "no torch": Case(checks.torch, {"packages": {"torch": None}}, "skipped", "sglcache[runner]"),
    "cards without a driver": Case(checks.torch, {"cards": ["/dev/nvidia0"]}, "warning", "no driver is loaded"),
    "cards and torch for CPUs": Case(
        checks.torch,
        {"cards": ["/dev/nvidia0"], "driver": "550", "packages": {"torch": "2.9+cpu"}},
        "warning",
        "TORCH=cuda",
    ),
    "a typo": Case(
        checks.configuration,
        {"config_error": errors.ConfigError("pool.page_sise: no such key; did you mean pool.page_size?")},
        "failed",
        "did you mean pool.page_size?",
    ),
    "too little memory": Case(
        checks.memory, {"machine": room.Machine(room.Limit(1 << 29, "RAM"))}, "failed", "RAM is 536.9 MB"
    ),
    "too little memory in a cgroup": Case(
        checks.memory,
        {"machine": room.Machine(room.Limit(1 << 40, "RAM"), room.Limit(1 << 29, "/sys/fs/cgroup/memory.max"))},
        "failed",
        "memory.max is 536.9 MB",
    ),
    "memory that others use": Case(checks.memory, {"available": 1 << 29}, "warning", "are available now"),
    "a memlock that is small": Case(
        checks.memory,
        {
            "weighed": room.weigh(config.parse({"pool": {"device": "cuda"}})),
            "machine": room.Machine(room.Limit(1 << 40, "RAM"), None, room.Limit(65536, "RLIMIT_MEMLOCK")),
        },
        "warning",
        "ulimit -l unlimited",
    ),
    "swap": Case(checks.memory, {"swapped": 2 << 30}, "warning", "swapoff"),
    "a /dev/shm that is small": Case(
        checks.kept,
        {"config": config.parse({"host": {"keep_path": "/dev/shm/kv"}}), "kept_free": 64 << 20},
        "failed",
        "--shm-size",
    ),
    "a keep_path on a disk": Case(
        checks.kept,
        {"config": config.parse({"host": {"keep_path": "/var/kv"}}), "kept_free": 1 << 40, "kept_kind": "ext4"},
        "warning",
        "/dev/shm",
    ),
    "few descriptors": Case(
        checks.limits, {"machine": room.Machine(room.Limit(1 << 40, "RAM"), max_fds=1024)}, "warning", "LimitNOFILE"
    ),
    "one processor": Case(checks.limits, {"cpus": 1, "seats": SEATS}, "warning", "give it one for each rank"),
    "huge pages are off": Case(checks.limits, {"huge_pages": "never"}, "skipped", "4 KiB"),
    "a port of somebody's": Case(
        checks.ports,
        {"ports": [Port("http.port", "127.0.0.1", 30080, 77, "nginx")]},
        "failed",
        "nginx (pid 77); end that",
    ),
    "a port of another user's": Case(
        checks.ports, {"ports": [Port("events.endpoint", "*", 5557, 0)]}, "failed", "tcp://*:6557"
    ),
    "a port of the daemon's": Case(
        checks.ports, {**running(), "ports": [Port("http.port", "127.0.0.1", 30080, 5, "python")]}, "ok", "the daemon's"
    ),
    "a port that is free": Case(checks.ports, {"ports": [Port("http.port", "127.0.0.1", 30080)]}, "ok", "free: 30080"),
    "a folder of another user": Case(checks.folder, {"folder_uid": 7}, "failed", "belongs to uid 7"),
    "a folder that others enter": Case(checks.folder, {"folder_uid": 0, "folder_mode": 0o755}, "failed", "chmod 700"),
    "a socket of another user": Case(
        checks.folder,
        {"folder_uid": 0, "sockets": [Socket(FOLDER / "a", 7, 0o600, True, False)]},
        "failed",
        "as that user",
    ),
    "a stale socket": Case(
        checks.folder, {"folder_uid": 0, "sockets": [Socket(FOLDER / "a", 0, 0o600, False, False)]}, "warning", "dead"
    ),
    "a clock that is behind": Case(checks.clock, {"reserved": 2e9, "now": 1e9}, "warning", "timedatectl"),
    "a disk that is full": Case(
        checks.disk, {"disk": room.DiskRoom(Path("/kv"), 1 << 40, 0, 1 << 20)}, "warning", "lower storage.size"
    ),
    "a disk that can't be written": Case(
        checks.disk,
        {"disk_error": errors.ConfigError("storage.path = /kv: it can't be written; give a folder")},
        "failed",
        "give a folder",
    ),
    "a dead router": Case(
        checks.routers, {"indexers": {"http://127.0.0.1:1": "refused"}}, "failed", "the daemon serves without it"
    ),
    "no daemon": Case(checks.daemon, {}, "skipped", "sglcache serve"),
    "a supervisor that is stopped": Case(
        checks.daemon,
        {"silent": [errors.Unavailable("it does not answer; let it go on", pid=4)]},
        "failed",
        "let it go on",
    ),
    "a daemon that does not serve": Case(
        checks.daemon,
        {**running(), "health": [{"serving": False, "status": "degraded", "reason": "rank 0 is waiting"}]},
        "failed",
        "rank 0 is waiting",
    ),
    "an old daemon": Case(checks.daemon, running(protocol=6), "failed", "start the daemon again"),
    "an old client": Case(checks.daemon, running(protocol=8), "failed", "this command is the older one"),
    "another version": Case(checks.daemon, running(version="0.2"), "warning", "to have one version"),
    "a rank that refuses us": Case(
        checks.served, {"attached": [Attached(0, error=errors.Forbidden("of uid 7; be it"))]}, "failed", "be it"
    ),
    "a stream that is silent": Case(
        checks.served,
        {"attached": [Attached(0, {"troubles": [], "stream": STREAM}, heard=False)]},
        "failed",
        "nothing came",
    ),
    "a stream that nobody follows": Case(
        checks.served,
        {"attached": [Attached(0, {"troubles": [], "stream": {**STREAM, "subscriptions": 0}}, heard=True)]},
        "warning",
        "nobody follows",
    ),
    "a copy that hangs": Case(
        checks.served,
        {"attached": [Attached(0, {"troubles": [{"what": "backup", "age_s": 12.0, "facts": {}}], "stream": None})]},
        "warning",
        "a copy to the host is in flight",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_thing_is_told_with_what_to_do(name: str) -> None:
    case = CASES[name]
    facts = Facts(**{"config": CONFIG, "weighed": room.weigh(CONFIG), "seats": SEATS, **case.facts})
    found: list[Finding] = list(case.check(facts))
    told = [each for each in found if each.state == case.state and case.words in str(each)]
    assert told, [str(each) for each in found]
    assert all(each.remedy for each in found if each.state in ("failed", "warning"))


def test_on_a_machine_on_which_nothing_is_wrong_nothing_is_found() -> None:
    facts = Facts(config=CONFIG, weighed=room.weigh(CONFIG), seats=SEATS)
    assert {each.state for each in checks.examine(facts)} == {"ok", "skipped"}


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, list[dict[str, str]]]]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", *arguments, "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] == (ended.value.code == 0)
    found: dict[str, list[dict[str, str]]] = {}
    for each in told["findings"]:
        found.setdefault(each["check"], []).append(each)
    assert isinstance(ended.value.code, int)
    return ended.value.code, found


def test_beside_a_daemon_it_says_whose_it_is_and_that_it_is_heard(
    lend: Callable[..., Daemon], capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = doctor(
        capsys, "--socket", str(lend().socket), "-s", "http.enabled=false", "-s", "events.enabled=false"
    )
    assert code == 0, found
    assert found["daemon"][0]["state"] == "ok"
    assert found["rank 0 events"][0]["state"] == "warning"
    assert "nobody follows" in found["rank 0 events"][0]["detail"]


def test_without_one_it_finds_what_would_be_in_the_way_of_its_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("SGLCACHE_SOCKET", raising=False)
    (tmp_path / "sglcache").mkdir(mode=0o700)
    with socket.socket() as taken, socket.socket(socket.AF_UNIX) as stale:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        stale.bind(str(tmp_path / "sglcache" / "rank-0.sock"))
        port = taken.getsockname()[1]
        code, found = doctor(
            capsys, "-s", f"http.port={port}", "-s", f'storage.path="{tmp_path / "kv"}"', "-s", "storage.kind=file",
            "-s", "model_name=m",
            "-s", 'events.dynamo_indexers=["http://127.0.0.1:1"]',
        )  # fmt: skip
    assert code == 1
    [whose] = [each for each in found["ports"] if each["state"] == "failed"]
    assert f"{port} (http.port) is taken by" in whose["detail"]
    assert f"(pid {os.getpid()})" in whose["detail"]
    assert [each["state"] for each in found["sockets"]] == ["ok", "warning"]
    assert found["indexer"][0]["state"] == "failed"
    assert found["daemon"][0]["state"] == "skipped"


def test_a_typo_in_the_configuration_is_a_finding_beside_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "my.toml").write_text("[pool]\npage_sise = 4\n")
    code, found = doctor(capsys, "--config", str(tmp_path / "my.toml"))
    assert code == 1
    assert found["config"][0]["remedy"] == "did you mean pool.page_size?"
    assert "python" in found


def test_what_is_gathered_here_is_of_the_form_that_is_judged(tmp_path: Path) -> None:
    facts = gather(None, ("events.enabled=false", "http.enabled=false"), tmp_path / "rank-0.sock")
    assert facts.python >= (3, 11)
    assert facts.kernel
    assert facts.available is not None
    assert facts.folder == tmp_path
    assert facts.config_error is None
    assert not facts.ports
