"""The unit: what systemd says of it, and the daemon that it starts, as systemd would see it."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from deployed import BIN, ROOT, Service, Unit, environ, settings

from sglcache import console
from sglcache.server.child import KILL_S
from sglcache.server.supervisor import Timing

FILE = ROOT / "deploy" / "sglcache.service"
UNIT = Unit(FILE.read_text())


def test_systemd_finds_nothing_wrong_with_it(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    here = tmp_path / FILE.name
    here.write_text(FILE.read_text().replace("/opt/sglcache/bin/", f"{BIN}/"))  # it looks for the program
    done = subprocess.run(["systemd-analyze", "verify", here], capture_output=True, text=True, check=False)
    ours = [line for line in done.stderr.splitlines() if FILE.name in line]
    assert (done.returncode, ours) == (0, []), done.stderr
    here.write_text(here.read_text().replace("KillMode=mixed", "KillMode=mixd"))
    done = subprocess.run(["systemd-analyze", "verify", here], capture_output=True, text=True, check=False)
    assert "mixd" in done.stderr, "it would not have said anything"


def test_it_knows_how_the_daemon_ends() -> None:
    assert UNIT.one("Type") == "notify"
    assert UNIT.one("KillMode") == "mixed", "the ranks have their signals from the supervisor"
    assert float(UNIT.one("TimeoutStopSec")) > Timing().drain + KILL_S
    assert UNIT.one("Restart") == "on-failure"
    assert UNIT.one("RestartPreventExitStatus").split() == [str(console.EXIT_USAGE)]
    assert UNIT.one("OOMPolicy") == "continue", "the supervisor starts again what the kernel has killed"


def test_systemd_hears_of_it_and_it_stays_in_its_folders(tmp_path: Path) -> None:
    """ExecStart and Environment as they stand, with /run, /var/lib and /etc moved into the test's folder."""

    def moved(text: str) -> str:
        return re.sub(r"(^|=)(/run|/var/lib|/etc)", rf"\1{tmp_path}\2", text)

    command = [moved(word).replace("/opt/sglcache/bin", str(BIN)) for word in UNIT.one("ExecStart").split()]
    env = environ({name: moved(value) for name, value in UNIT.environment.items()})
    runtime = tmp_path / "run" / UNIT.one("RuntimeDirectory")
    runtime.mkdir(parents=True, mode=int(UNIT.one("RuntimeDirectoryMode"), 8))
    state = tmp_path / "var/lib" / UNIT.one("StateDirectory")
    state.mkdir(parents=True, mode=int(UNIT.one("StateDirectoryMode"), 8))
    (tmp_path / "etc/sglcache").mkdir(parents=True)
    shutil.copy(ROOT / "configs" / "cpu.toml", tmp_path / "etc/sglcache/sglcache.toml")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        env["NOTIFY_SOCKET"] = str(tmp_path / "notify")
        with Service([*command, *settings()], env, tmp_path / "log") as service:
            assert manager.recv(4096) == b"READY=1\nSTATUS=serving 1 ranks"
            service.await_health(runtime / "rank-0.sock")
            assert (state / "rank-0.json").exists()
            service.process.terminate()
            assert manager.recv(4096) == b"STOPPING=1"
            assert service.process.wait(30) == 0
    assert not [path for path in runtime.iterdir() if path.is_socket()]


def test_a_wrong_configuration_ends_with_the_status_that_is_not_tried_again(tmp_path: Path) -> None:
    file = tmp_path / "sglcache.toml"
    file.write_text("nonsense = 1\n")
    command = [word.replace("/etc/sglcache/sglcache.toml", str(file)) for word in UNIT.one("ExecStart").split()]
    command[0] = command[0].replace("/opt/sglcache/bin", str(BIN))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert str(done.returncode) == UNIT.one("RestartPreventExitStatus")
