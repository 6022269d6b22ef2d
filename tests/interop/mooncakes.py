"""Mooncake's master as a process of its own, and daemons that share what it keeps."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from consumers import PYTHON, ROOT, eventually

from sglcache.testing.daemon import Daemon

WAIT_S = 60.0


def site_packages() -> Path:
    """Of the consumers' Python, which has Mooncake's client."""
    return next((PYTHON.parents[1] / "lib").glob("python*/site-packages"))


def client_environment(shim: Path) -> dict[str, str]:
    """For the process with Mooncake's client in it: it binds loopback alone."""
    return {"PYTHONPATH": f"{ROOT}:{site_packages()}", "LD_PRELOAD": str(shim), "LOOPBACK_MAPPED": "1"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Master:
    """`mooncake_master`, ended by its pid. It takes no port of the system's choice, so one is looked for."""

    def __init__(self, folder: Path, shim: Path) -> None:
        self.folder, self.shim = folder, shim
        self.port, self.metrics_port = free_port(), free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        words = [PYTHON.with_name("mooncake_master"), f"--rpc_port={self.port}", "--rpc_address=127.0.0.1"]
        words += [f"--metrics_port={self.metrics_port}", "--metrics_host=127.0.0.1", "--client_ttl=5"]
        with open(self.folder / "master.log", "ab") as log:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "LD_PRELOAD": str(self.shim)},
            )
        assert eventually(self.listens, WAIT_S), (self.folder / "master.log").read_text()[-2000:]

    def listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


def serve(
    folder: Path, master: Master, shim: Path, storage: Mapping[str, Any] | None = None, **arguments: Any
) -> Daemon:
    """A daemon whose third tier is the master's store; connected to it. What it gives to it is small."""
    words = {"kind": "mooncake", "master": master.address, "segment_size": "32 MiB", "buffer_size": "16 MiB"}
    # In the rank alone, for what it starts: the rank itself loads nothing of the consumers' packages.
    prelude = f"import os; os.environ.update({client_environment(shim)!r})"
    daemon = Daemon(folder, prelude=prelude, storage={**words, "prefetch_threshold": 1, **(storage or {})}, **arguments)
    try:
        assert eventually(lambda: connected(daemon), WAIT_S), daemon.said()
    except BaseException:
        daemon.kill()
        raise
    return daemon


def connected(daemon: Daemon) -> bool:
    """As it says itself."""
    third = daemon.status(prove=False)["third"]
    return bool(third["ready"] and third["connected"])
