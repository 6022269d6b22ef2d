"""Mooncake's master for the daemon that is tortured: a process of its own on the loopback, over all its lives."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from sglcache.errors import NotInstalled, StartError

START_S, POLL_S = 30.0, 0.02


class Master:
    """`mooncake_master`, ended by its pid. It takes no port of the system's choice, so one is looked for."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self.command = list(command)
        self.folder = folder
        self.port, self.metrics_port = _free_port(), _free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and wait until it listens. NotInstalled; StartError."""
        words = [*self.command, f"--rpc_port={self.port}", "--rpc_address=127.0.0.1"]
        words += [f"--metrics_port={self.metrics_port}", "--metrics_host=127.0.0.1", "--client_ttl=5"]
        log = self.folder / "master.log"
        try:
            with open(log, "ab") as file:
                self.process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
                )
        except FileNotFoundError as exc:
            raise NotInstalled(
                f"--storage mooncake needs {self.command[-1]}, which is not there; pip install 'sglcache[mooncake]', "
                "in the environment whose programs are found first",
                module="mooncake",
                extra="mooncake",
            ) from exc
        deadline = time.monotonic() + START_S
        while not self.listens():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise StartError(f"Mooncake's master did not start: {log.read_text(errors='replace')[-1000:]}")
            time.sleep(POLL_S)

    def listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def signal(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)

    def stop(self) -> None:
        """Kill it. Idempotent."""
        if self.process is not None:
            with contextlib.suppress(OSError):
                os.kill(self.process.pid, signal.SIGCONT)
            self.process.kill()
            self.process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
