"""A daemon of one's own to measure: a process of `sglcache serve` with a folder and free ports to itself."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from sglcache.bench.harness import BenchError
from sglcache.console import last_words

STOP_S = 15.0
POLL_S = 0.002


def free_port() -> int:
    """A TCP port on the loopback that nobody has just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Daemon:
    """Runs from construction to `close`; `started` is the clock when it was launched."""

    def __init__(self, overrides: Sequence[str] = (), stop_s: float = STOP_S) -> None:
        """`stop_s`: that it may take to stop: a large host tier that is pinned for a card is not let go of at once."""
        self._stop_s = stop_s
        self.folder = Path(tempfile.mkdtemp(prefix="sglcache-bench-"))
        self.socket = self.folder / "control.sock"
        self.port = free_port()
        self.log = self.folder / "daemon.log"
        settings = [
            f"control.socket={self.socket}",
            f"state.dir={self.folder / 'state'}",
            f"http.port={self.port}",
            "events.endpoint=tcp://127.0.0.1:0",
            "events.replay_endpoint=tcp://127.0.0.1:0",
            *overrides,
        ]
        command = [sys.executable, "-m", "sglcache", "serve"]
        for setting in settings:
            command += ["--set", setting]
        self.started = time.perf_counter()
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def wait_healthy(self, timeout_s: float = 60.0) -> float:
        """Seconds from the launch until GET /health said ok. BenchError: it did not, or the process ended."""
        url = f"http://127.0.0.1:{self.port}/health"
        # The environment's proxies are for other hosts.
        get = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        while (waited := time.perf_counter() - self.started) < timeout_s:
            # OSError: nobody listens yet, or it answered 503.
            with contextlib.suppress(OSError), get(url, timeout=5) as answer:
                if json.load(answer).get("status") == "ok":
                    return time.perf_counter() - self.started
            self._check()
            time.sleep(POLL_S)
        raise BenchError(f"the daemon was not healthy after {waited:.0f} s: {self._words()}")

    def close(self) -> None:
        """SIGTERM, and wait. BenchError: it did not end with 0 in good time. Idempotent."""
        try:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
            try:
                code = self.process.wait(self._stop_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise BenchError(f"the daemon did not stop within {self._stop_s:.0f} s: {self._words()}") from None
            if code:
                raise BenchError(f"the daemon ended with {code}: {self._words()}")
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            with contextlib.suppress(BenchError):
                self.close()

    def _check(self) -> None:
        if self.process.poll() is not None:
            raise BenchError(f"the daemon ended with {self.process.returncode}: {self._words()}")

    def _words(self) -> str:
        try:
            return last_words(self.log.read_text(errors="replace"))
        except OSError:
            return ""
