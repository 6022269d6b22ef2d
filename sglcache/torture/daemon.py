"""The daemon that is tortured: its configuration, its lives, and what the kernel says of its processes.

It is `sglcache serve`'s supervisor in a session of its own, in a folder of its own, with ports that nobody has; all its
processes have the folder's name in their environment, so that what is left of it can be told from everything else.

Run as a module with a configuration and a descriptor, this file is that supervisor.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sglcache import paths, ranks
from sglcache.config import Config, parse
from sglcache.console import last_words
from sglcache.errors import SglcacheError, StartError, Unavailable
from sglcache.server import supervisor

MARK = "SGLCACHE_TORTURE"  # in the environment of every process of ours
START_S, STOP_S, DEATH_S = 60.0, 30.0, 10.0
POLL_S = 0.02
TIMING = {"healthy": 1.0, "longest_wait": 1.0, "stuck": 1.0}
PORTS = 64  # between the first endpoint and the first replay endpoint: more ranks are not on one host

_POOL = {"page_size": 8, "num_tokens": 8 * 256, "num_layers": 2, "num_kv_heads": 2, "head_dim": 8}
_WINDOW = {"window": {"size": 24, "num_layers": 2, "num_tokens": 8 * 128}}
_MAMBA = {
    "mamba": {
        "num_layers": 2,
        "states": [{"name": "conv", "shape": [8, 4], "dtype": "bfloat16"}, {"name": "ssm", "shape": [4, 4, 4],
                    "dtype": "float32"}],
        "num_slots": 48,
        "interval": 64,
    }
}  # fmt: skip
_POLICIES = ("lru", "lru", "lfu", "fifo", "priority", "slru", "tlru")
_HOST = {"host": {"num_tokens": 8 * 320}}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "radix": {"pool": _POOL, "host": {"num_tokens": 0}},
    "hiradix": {"pool": _POOL, **_HOST},
    "swa": {"pool": _POOL, **_HOST, **_WINDOW},
    "mamba": {"pool": _POOL, **_HOST, **_MAMBA},
    "unified": {"pool": _POOL, **_HOST, **_WINDOW, **_MAMBA},
}
"""Small daemons of every kind of tree: pools that a few conversations fill, so that everything is evicted."""


def varied(kind: str, seed: int) -> dict[str, Any]:
    """The small daemon of a kind, in one of the many forms that it may have: which one is a function of the seed."""
    rng = random.Random(f"form/{seed}")
    data = {name: dict(section) for name, section in KINDS[kind].items()}
    pool, host = data["pool"], data["host"]
    pool["num_shards"] = rng.choice((1, 2, 2))
    pool["layout"] = rng.choice(("page_first", "layer_first"))
    if rng.random() < 0.25 and kind in ("radix", "hiradix"):
        del pool["num_kv_heads"], pool["head_dim"]
        pool.update(kv_lora_rank=12, qk_rope_head_dim=4)
    if rng.random() < 0.2 and kind in ("radix", "hiradix"):
        pool["bigram"] = True
    if host["num_tokens"]:
        host["layout"] = rng.choice(("page_first", "layer_first"))
        host["write_policy"] = rng.choice(("write_through", "write_through", "write_through_selective", "write_back"))
        host["populate"] = rng.random() < 0.3
        if rng.random() < 0.3:
            host["keep_path"] = "kept"
        if rng.random() < 0.2:
            host["load_back_threshold"] = 16
        data["eviction"] = {"host": rng.choice(_POLICIES)}
    data.setdefault("eviction", {})["device"] = rng.choice(_POLICIES)
    events: dict[str, Any] = {"encoding": rng.choice(("map", "map", "superset"))}
    events["hash"] = rng.choice(("xxh3_128", "sha256"))
    if rng.random() < 0.4:  # so little that who is late needs a snapshot
        events.update(ring_size="64 KiB", max_blocks=rng.choice((4, 64, 4096)))
    if rng.random() < 0.3:
        events["hwm"] = 16  # who is late loses what was on its way
    if rng.random() < 0.15:
        events["token_ids"] = "none"
    if rng.random() < 0.15:
        events["announce_every_s"] = 1.0
    if kind in ("swa", "mamba", "unified") and rng.random() < 0.4:
        events["groups"] = True
    data["events"] = events
    if rng.random() < 0.4:
        tiers = ("device", "host") if host["num_tokens"] else ("device",)
        data["tenants"] = {
            "acme": {f"{tier}_floor": "20%" for tier in tiers},
            "bulk": {f"{tier}_ceiling": rng.choice(("50%", "75%")) for tier in tiers},
        }
    return data


def on_cards(data: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The same daemon with its pools on cards: on the first, if nothing else is said."""
    pool, parallel = dict(data.get("pool", {})), data.get("parallel", {})
    ranks = parallel.get("dp_size", 1) * parallel.get("pp_size", 1)
    pool.update(device="cuda", untried=True)
    pool.setdefault("gpus", [0] * (ranks * pool.get("num_shards", 1)))
    pool.setdefault("export", random.Random(f"export/{seed}").choice(("fd", "fd", "ipc")))
    return {**data, "pool": pool}


def at_home(
    data: Mapping[str, Any], folder: Path, storage: str | None, *, indexer: str | None = None, master: str | None = None
) -> dict[str, Any]:
    """The configuration, with all that it shares with other processes put into the folder or on ports of its own.

    `storage`: none, file or mooncake instead of what it has; `master`: Mooncake's, HOST:PORT. `indexer`: Dynamo's, at
    which the ranks shall register themselves. ConfigError: that does not go with it.
    """
    made: dict[str, Any] = {
        name: dict(section) if isinstance(section, Mapping) else section for name, section in data.items()
    }
    made["model_name"] = folder.name  # nobody else's, at an indexer or a store
    made["control"] = {**made.get("control", {}), "socket": str(folder / "rank.sock")}
    made["state"] = {"dir": str(folder / "state")}
    made["http"] = {"enabled": False}
    if made.get("host", {}).get("keep_path") is not None:
        made["host"]["keep_path"] = str(folder / "kept")
    below = made.get("storage", {})
    kind = storage or below.get("kind", "none")
    if kind == "none":
        made.pop("storage", None)
    else:
        made["storage"] = {"size": "2 MiB", "prefetch_threshold": 1, "prefetch_timeout_s": 0.2, **below, "kind": kind}
        if kind == "file":
            made["storage"]["path"] = str(folder / "store")
        else:
            size = {"segment_size": "32 MiB", "buffer_size": "16 MiB", "rpc_timeout_s": 1.0}
            made["storage"] = {**size, **made["storage"], "master": master}
            del made["storage"]["size"]
    events = dict(made.get("events", {}))
    for key in ("curve_key_file", "curve_allow_dir", "dynamo_indexers"):
        events.pop(key, None)
    if indexer is not None:
        events["dynamo_indexers"] = [indexer]
    parallel = made.get("parallel", {})
    base = free_ports(parallel.get("dp_size", 1) * parallel.get("pp_size", 1))
    events["endpoint"] = f"tcp://127.0.0.1:{base}"
    events["replay_endpoint"] = f"tcp://127.0.0.1:{base + PORTS}"
    made["events"] = {"heartbeat_s": 0.2, **events, "mode": "bind", "enabled": True}
    return made


def free_ports(count: int) -> int:
    """The first of so many TCP ports on the loopback in a row, twice, that nobody has just now."""
    for _ in range(100):
        with contextlib.ExitStack() as stack:
            probe = stack.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            base = int(probe.getsockname()[1])
            try:
                for port in (*range(base + 1, base + count), *range(base + PORTS, base + PORTS + count)):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except (OSError, OverflowError):
                continue
            return base
    raise StartError(f"there are no {2 * count} free ports in a row on the loopback")


class Daemon:
    """One configuration, over all lives of its supervisor."""

    def __init__(self, config: Mapping[str, Any], folder: Path, board: Path, first_row: int, prelude: str = "") -> None:
        """`first_row`: of the ranks, on the board. `prelude`: Python that each rank runs first, to plant a bug.

        ConfigError.
        """
        self.data = dict(config)
        self.config: Config = parse(self.data)
        self.folder = folder
        self.log = folder / "daemon.log"
        self.socket = folder / "rank.sock"
        self.lives = 0  # of the supervisor
        self.ready_at = 0.0
        self.process: subprocess.Popen[bytes] | None = None
        self._rank = f"{prelude}\nfrom sglcache.torture.rank import main; main({str(board)!r}, {first_row})"
        for name in ("state", "store"):
            (folder / name).mkdir(mode=0o700, exist_ok=True)

    # -- lives --------------------------------------------------------------------------------------------

    def start(self) -> dict[str, Any]:
        """Start it, and wait until it serves: its /server_info. StartError, with what it logged."""
        reader, writer = os.pipe()
        options = {"config": self.data, "rank": self._rank, "timing": TIMING}
        try:
            with open(self.log, "ab") as log:
                self.process = subprocess.Popen(
                    supervisor.python("-m", __spec__.name, json.dumps(options), str(writer)),
                    pass_fds=[writer],
                    stdin=subprocess.PIPE,  # which is at its end when the torture is, however that comes about
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env={**os.environ, MARK: str(self.folder)},
                )
            os.close(writer)
            info = self._ready(reader)
        finally:
            os.close(reader)
        self.lives += 1
        self.ready_at = time.monotonic()
        return info

    def _ready(self, reader: int) -> dict[str, Any]:
        assert self.process is not None
        line, deadline = b"", time.monotonic() + START_S
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(reader, 1 << 16) if ready else b""
            if not part:
                if not ready:
                    self.process.kill()
                code = self._over()
                raise StartError(f"the daemon did not start (exit status {code}): {last_words(self.said())}")
            line += part
        facts: dict[str, Any] = json.loads(line)
        return facts

    def said(self) -> str:
        """What it has logged, in all its lives."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def ask(self, page: str = "/server_info") -> dict[str, Any]:
        """Its supervisor's page. Unavailable."""
        return ranks.ask(paths.supervisor_path(self.rank_sockets()[0]), page)

    def rank_sockets(self) -> list[Path]:
        parallel = self.config.parallel
        return [paths.beside(self.socket, offset) for offset in range(parallel.dp_size * parallel.pp_size)]

    def pids(self) -> dict[int, int]:
        """The process of each rank that has one now, by offset, from the supervisor; only its own children."""
        assert self.process is not None
        ours = set(children(self.process.pid))
        rows = self.ask("/health")["ranks"]
        return {row["rank"]: row["pid"] for row in rows if row["pid"] in ours}

    def serves(self) -> bool:
        """Every rank does. One that tells of a trouble does, too."""
        try:
            return all(row["state"] == "ok" for row in self.ask("/health")["ranks"])
        except Unavailable:
            return False

    def kill(self) -> list[str]:
        """SIGKILL to the supervisor; what of it is still there afterwards, in words; [] as it should be."""
        assert self.process is not None
        below = {}
        for pid in children(self.process.pid):
            with contextlib.suppress(OSError):
                below[pid] = os.pidfd_open(pid)
        self.process.kill()
        self._over()
        problems, deadline = [], time.monotonic() + DEATH_S
        for pid, pidfd in below.items():
            # Readable once its files are closed, too, which is a moment after its memory is gone.
            if not select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                problems.append(f"pid {pid} has outlived its supervisor by {DEATH_S:g} s")
            os.close(pidfd)
        for path in (paths.supervisor_path(self.socket), *self.rank_sockets()):
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(str(path)) == 0:
                    problems.append(f"somebody listens on {path.name} after the supervisor's death")
        return problems

    def abandon(self) -> None:
        """Kill what is left of it, whatever happened."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self._over()
        for pid in marked(self.folder):
            send(self.folder, pid, signal.SIGKILL)

    def _over(self) -> int:
        """Wait for the supervisor's end: its exit status."""
        assert self.process is not None
        code = self.process.wait(STOP_S)
        if self.process.stdin is not None:
            self.process.stdin.close()
        return code

    def stop(self) -> list[str]:
        """SIGTERM, and wait; what is not as it should be afterwards."""
        if self.process is None:
            return []
        problems = []
        self.process.terminate()
        try:
            code = self._over()
            if code:
                problems.append(f"the daemon ended with {code}: {self.said()[-2000:]}")
        except subprocess.TimeoutExpired:
            self.process.kill()
            self._over()
            problems.append(f"the daemon did not end within {STOP_S:g} s of SIGTERM")
        left = [path.name for path in self.folder.iterdir() if path.suffix in (".lock", ".http") or path.is_socket()]
        left += [path.name for path in (self.folder / "store").rglob("*.tmp")]
        if left:
            problems.append(f"the daemon left {', '.join(sorted(left))} behind")
        return problems


# -- what the kernel says ------------------------------------------------------------------------------------


def children(pid: int) -> list[int]:
    """Of all threads of a process; [] of none."""
    found: list[int] = []
    for task in _listed(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def state_of(pid: int) -> str:
    """R, S, T, Z, ...; "" of none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def marked(folder: Path) -> list[int]:
    """Every process with this folder in its environment, ourselves left out."""
    mark, found = f"{MARK}={folder}".encode(), []
    for name in _listed("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append(int(name))
    return found


def alive_of(folder: Path, pid: int) -> bool:
    """It is there, and one of ours: a number may be another process's by now."""
    with contextlib.suppress(OSError):
        return f"{MARK}={folder}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def descriptors(pid: int) -> Counter[str]:
    """The open descriptors of a process by what they are of: socket, memfd, pidfd, a file by its name, ..."""
    found: Counter[str] = Counter()
    for name in _listed(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            target = re.sub(r"^/memfd:(\S+).*", r"memfd \1", target)
            target = re.sub(r"[0-9a-f]{16}", "...", target)  # a name that nobody has chosen
            found[re.sub(r":?\[\d+\]$", "", target)] += 1
    return found


def own_bytes(pid: int) -> int:
    """Anonymous memory of a process: without its pools, which are shared, and without files. 0 of none."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    return 0


def _listed(folder: str) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return []


def waited(look: Callable[[], Any], within_s: float) -> Any:
    """Look until there is nothing, for so long: what there is then."""
    deadline = time.monotonic() + within_s
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return found


def send(folder: Path, pid: int, number: int) -> bool:
    """Signal a process if it is one of ours, whatever has become of the number meanwhile."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not alive_of(folder, pid):
            return False
        signal.pidfd_send_signal(pidfd, number)
    except OSError:
        return False
    finally:
        os.close(pidfd)
    return True


# -- the supervisor ------------------------------------------------------------------------------------------


def main() -> int:
    """Be the supervisor; one line of JSON down the descriptor once it serves."""
    import logging

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    options, writer = json.loads(sys.argv[1]), int(sys.argv[2])

    def ready(info: dict[str, Any]) -> None:
        os.write(writer, json.dumps(info).encode() + b"\n")
        os.close(writer)

    def orphaned() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=orphaned, name="orphaned", daemon=True).start()
    daemon = supervisor.Supervisor(
        parse(options["config"]),
        launch=supervisor.python("-c", options["rank"]),
        timing=supervisor.Timing(**options["timing"]),
    )
    try:
        return daemon.run(ready)
    except SglcacheError as error:
        print(f"error[{error.code}]: {error.message}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
