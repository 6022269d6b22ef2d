"""A real daemon for tests: a process of its own, in a folder of its own, on ports of the system's choice."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sglcache import paths, ranks
from sglcache.client import Client, Worker
from sglcache.errors import SglcacheError

START_S = 60.0  # a loaded machine imports torch slowly
STOP_S = 30.0
POLL_S = 0.005  # between two questions: what is waited for mostly needs the processor too

# What the process runs: a daemon, and one line of JSON down the pipe when clients can attach. A rank is launched with
# the prelude before it.
PROGRAM = """
import json, logging, os, sys
from sglcache import config
from sglcache.server.supervisor import Supervisor, Timing
logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
options = json.loads(sys.argv[1])
rank = options["prelude"] + "\\nimport sys; from sglcache.server.rank import serve; "
rank += f"sys.exit(serve(int(sys.argv[1]){options['more']}))"
def ready(info):
    os.write(int(sys.argv[2]), json.dumps(info).encode() + b"\\n")
supervisor = Supervisor(
    config.parse(options["config"]), launch=[sys.executable, "-c", rank], timing=Timing(**options["timing"])
)
sys.exit(supervisor.run(ready))
"""

SMALL: Mapping[str, Mapping[str, Any]] = {
    "pool": {"page_size": 4, "num_tokens": 4 * 256, "num_layers": 2, "num_kv_heads": 2, "head_dim": 8},
    "host": {"num_tokens": 4 * 512},
    "events": {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0"},
    "http": {"enabled": False},
    "watch": {"loop_stall_s": 30.0},  # /health does not go by how busy the tests' machine is
}


HEADS = ("num_kv_heads", "head_dim")


class DaemonError(Exception):
    """The daemon did not do as it should; the message has what it logged."""


class Served:
    """One rank of a daemon, over all its lives."""

    def __init__(self, daemon: Daemon, offset: int, socket: Path) -> None:
        self.daemon = daemon
        self.offset = offset
        self.socket = socket

    @property
    def row(self) -> dict[str, Any]:
        """What the supervisor says of it now."""
        found: dict[str, Any] = next(row for row in self.daemon.ask()["ranks"] if row["rank"] == self.offset)
        return found

    @property
    def pid(self) -> int:
        """Of the process that serves it now."""
        pid = self.row["pid"]
        assert isinstance(pid, int), f"rank {self.offset} has no process: {self.row}"
        return pid

    @property
    def epoch(self) -> int:
        """Of its newest life that was ready."""
        return int(self.row["epoch"])

    def client(self, **arguments: Any) -> Client:
        return Client(self.socket, **arguments)

    def worker(self, token: bytes, shard: int, **arguments: Any) -> Worker:
        return Worker(token, shard, self.socket, **arguments)

    @contextmanager
    def observer(self) -> Iterator[Client]:
        with Client(self.socket, role="observer", name="test") as client:
            yield client

    @contextmanager
    def admin(self) -> Iterator[Client]:
        """Who may change what an observer only looks at."""
        with Client(self.socket, role="admin", name="test") as client:
            yield client

    def status(self, prove: bool = True) -> dict[str, Any]:
        """Asked by an observer. AssertionError: a law of the books is broken."""
        with self.observer() as observer:
            status = observer.status(prove)
        assert not status.get("violations"), status["violations"]
        return status

    def pool(self, tier: str = "DEVICE") -> dict[str, Any]:
        """The pages of a tier by state, with the books proved."""
        found: dict[str, Any] = next(pool for pool in self.status()["pools"] if pool["tier"] == tier)
        return found

    def settle(self, within_s: float = 10.0) -> dict[str, Any]:
        """Ask until no copy is in flight; the status then."""
        until(lambda: self.status(prove=False)["gauges"]["num_copies"] == 0, within_s)
        return self.status()

    def kill_rank(self, number: int = signal.SIGKILL) -> int:
        """End its process alone, and wait for the death; its pid. The supervisor starts it again."""
        pid = self.pid
        pidfd = os.pidfd_open(pid)
        try:
            os.kill(pid, number)
            assert select.select([pidfd], [], [], STOP_S)[0], f"pid {pid} did not die"
        finally:
            os.close(pidfd)
        return pid

    def next_life(self, after_pid: int, within_s: float = START_S) -> dict[str, Any]:
        """Wait until it serves in another process than that; its row then."""

        def back() -> bool:
            row = self.row
            return bool(row["state"] == "ok" and row["pid"] != after_pid)

        until(back, within_s)
        return self.row


class Daemon(Served):
    """Running from construction on; its own methods speak of its first rank, `rank` of any.

    As a context manager it is stopped at the end, and must end with 0.
    """

    def __init__(
        self,
        folder: Path,
        *,
        prelude: str = "",
        engine: str = "",
        env: Mapping[str, str] | None = None,
        dp_size: int = 1,
        pp_size: int = 1,
        model_name: str = "test",
        timing: Mapping[str, float] | None = None,
        **sections: Mapping[str, Any],
    ) -> None:
        """`sections` are the configuration's, laid over `SMALL`; `env` is laid over this process's environment.

        `prelude` is Python that runs in each rank first, to plant a fault. `engine`: a name in it, of what makes the
        rank's copy engine. `timing`: of the supervisor's `Timing`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.log = folder / "daemon.log"
        socket = folder / "rank-0.sock"
        config: dict[str, Any] = {
            "model_name": model_name,
            "control": {"socket": str(socket)},
            "state": {"dir": str(folder)},
            "parallel": {"dp_size": dp_size, "pp_size": pp_size},
        }
        for layer in (SMALL, sections):
            for name, values in layer.items():
                config.setdefault(name, {}).update(values)
        if "kv_lora_rank" in config["pool"]:
            for key in HEADS:  # `SMALL`'s: latents have none
                del config["pool"][key]
        more = f", {engine}" if engine else ""
        options = {"config": config, "prelude": prelude, "more": more, "timing": dict(timing or {})}
        reader, writer = os.pipe()
        try:
            with open(self.log, "ab") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-c", PROGRAM, json.dumps(options), str(writer)],
                    pass_fds=[writer],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **(env or {})},
                )
            os.close(writer)
            info = self._await_ready(reader)
        finally:
            os.close(reader)
        first = info["ranks"][0]
        self.info: dict[str, Any] = {**first, **info}
        """What `/server_info` says, and over it what it says of the first rank."""
        super().__init__(self, first["rank"], Path(first["socket"]))
        self.ranks = [Served(self, row["rank"], Path(row["socket"])) for row in info["ranks"]]
        self._pids = [row["pid"] for row in info["ranks"]]

    def rank(self, offset: int) -> Served:
        return next(rank for rank in self.ranks if rank.offset == offset)

    def ask(self, page: str = "/server_info") -> dict[str, Any]:
        """The supervisor's answer now: /server_info or /health."""
        return ranks.ask(paths.supervisor_path(self.socket), page)

    def _await_ready(self, reader: int) -> dict[str, Any]:
        line = b""
        deadline = time.monotonic() + START_S
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(reader, 65536) if ready else b""
            if not part:
                if not ready:
                    self.process.kill()
                code = self.process.wait(STOP_S)
                raise DaemonError(f"the daemon did not start (exit status {code}): {self.said()}")
            line += part
        facts: dict[str, Any] = json.loads(line)
        return facts

    def said(self) -> str:
        """What it has logged."""
        return self.log.read_text(errors="replace")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal it, and wait for its end: the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(STOP_S)

    def kill(self) -> None:
        """SIGKILL to the supervisor; the kernel ends the ranks with it, and they are waited for."""
        pids = self._pids
        if self.process.poll() is None:
            with suppress(SglcacheError):
                pids = [row["pid"] for row in self.ask("/health")["ranks"] if row["pid"]]
        pidfds = []
        for pid in pids:
            with suppress(ProcessLookupError):
                pidfds.append(os.pidfd_open(pid))
        self.process.kill()
        self.process.wait(STOP_S)
        for pidfd in pidfds:
            ended = select.select([pidfd], [], [], STOP_S)[0]
            os.close(pidfd)
            assert ended, "a rank has outlived the supervisor"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ended_itself = self.process.poll()
        try:
            code = self.stop()
        except subprocess.TimeoutExpired:
            self.kill()
            code = -signal.SIGKILL
        if kind is None and (code != 0 or ended_itself is not None):
            raise DaemonError(f"the daemon ended with {code}: {self.said()}")
        if error is not None:
            error.add_note(f"the daemon (exit status {code}) logged:\n{self.said()}")


# A puppet's whole mind: do what a line says, and say what came of it.
PUPPET = """
import ctypes, json, os, sys, time
import numpy as np
import sglcache
from sglcache.errors import SglcacheError
from sglcache import paths, ranks
from sglcache.client import Client, Worker
from sglcache.memory.rings import EventRing
socket = sys.argv[1]
mind = dict(globals())
print("ready", flush=True)
for line in sys.stdin:
    how, text = json.loads(line)
    try:
        answer = [eval(text, mind)] if how == "ask" else [exec(text, mind)]
    except SglcacheError as error:
        answer = [error.code, error.message, error.facts]
    except BaseException as error:
        answer = ["bug", repr(error), {}]
    print(json.dumps(answer), flush=True)
"""


class Puppet:
    """A process of a runner, which does one thing at a time, on request. It has `socket`, and the client's classes."""

    def __init__(self, socket: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PUPPET, str(socket)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._receive("ready")

    @property
    def pid(self) -> int:
        return self.process.pid

    def begin(self, statements: str, how: str = "do") -> None:
        """Have it do something, and don't wait for it."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([how, statements]) + "\n")
        self.process.stdin.flush()

    def finish(self) -> Any:
        """What came of what was begun; the error that it was."""
        answer = json.loads(self._receive())
        if len(answer) == 3:
            raise SglcacheError.from_code(*answer)
        return answer[0]

    def do(self, statements: str) -> None:
        self.begin(statements)
        self.finish()

    def ask(self, expression: str) -> Any:
        self.begin(expression, "ask")
        return self.finish()

    def kill(self) -> int:
        """SIGKILL; returns a descriptor that says when it is dead, the caller's to close."""
        pidfd = os.pidfd_open(self.pid)
        self.process.kill()
        return pidfd

    def close(self) -> None:
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.process.wait(STOP_S)

    def _receive(self, expected: str | None = None) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line or (expected is not None and line != expected):
            raise DaemonError(f"the puppet said {line!r} and ended with {self.process.poll()}")
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def until(condition: Callable[[], bool], within_s: float = 10.0) -> float:
    """Ask until it is so; the seconds that took. AssertionError if it never is."""
    started = time.monotonic()
    while not condition():
        took = time.monotonic() - started
        assert took < within_s, f"not so after {took:.3f} s"
        time.sleep(POLL_S)
    return time.monotonic() - started
