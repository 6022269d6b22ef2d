"""What `sglcache doctor` knows when it judges: a gatherer, which looks at machine and daemon, and judges nothing.

Nothing is changed by looking, apart from a folder for a moment where the third tier's would be, by which it is seen
whether one can be made. What can't be found out stays at its default.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import resource
import socket
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from sglcache import config as configs
from sglcache import paths, ranks
from sglcache.client import Client
from sglcache.client.discovery import Source, ask_json
from sglcache.client.doctor import ports
from sglcache.compiled import COMPILED, FORM, Form
from sglcache.config import Config
from sglcache.errors import NotInstalled, SglcacheError
from sglcache.net import endpoints
from sglcache.server import room
from sglcache.server.plan import Seat, plan
from sglcache.wire import control

LISTENS = "0A"  # a socket's state in /proc/net/tcp
PACKAGES = ("torch", "transformers", "mooncake-transfer-engine-non-cuda")
HEARD_S = 3.0  # that a stream's next heartbeat is waited for
ASKED_S = 2.0  # that an indexer may take


class Port(NamedTuple):
    """One that the configuration wants, and who listens there now."""

    key: str
    host: str
    number: int
    pid: int | None = None  # 0: somebody whose process this user can't see; None: nobody
    name: str = ""


class Socket(NamedTuple):
    """A unix socket where a daemon's would be."""

    path: Path
    uid: int
    mode: int
    held: bool  # a live process has its lock
    answers: bool


class Attached(NamedTuple):
    """What came of attaching to a rank."""

    rank: int
    status: Mapping[str, Any] | None = None
    error: SglcacheError | None = None
    heard: bool | None = None  # a batch on its live stream; None: nobody listened


ROOMY = room.Machine(room.Limit(1 << 40, "RAM"))


@dataclass(frozen=True)
class Facts:
    """What was found; by default a machine on which nothing is wrong, and no daemon."""

    python: tuple[int, ...] = (3, 11, 0)
    executable: str = "python"
    kernel: str = "6.8.0"
    version: str = "0"
    protocol: int = control.PROTOCOL
    core: Form = COMPILED
    packages: Mapping[str, str | None] = field(default_factory=dict)  # versions of the optional ones
    torch_cuda: str | None = None  # the CUDA that torch was built for
    driver: str | None = None  # NVIDIA's
    cards: Sequence[str] = ()  # device files
    cpus: int = 64  # that this process may use
    nodes: int = 1  # of NUMA
    machine: room.Machine = ROOMY
    available: int | None = None  # bytes of RAM that are free, or can be made so
    swapped: int = 0  # bytes
    max_fds: int = 1 << 20  # RLIMIT_NOFILE, soft
    huge_pages: str = ""  # for shared memory: always, within_size, advise, never, ...
    now: float = 1.8e9  # unix seconds
    reserved: float | None = None  # the highest number of a rank's stream, as unix seconds
    file: Path | None = None
    config: Config | None = None
    config_error: SglcacheError | None = None
    weighed: room.Room | None = None
    seats: Sequence[Seat] = ()
    disk: room.DiskRoom | None = None
    disk_error: SglcacheError | None = None
    kept_free: int | None = None  # bytes on the file system of host.keep_path, beside what is kept there
    kept_kind: str | None = None  # of that file system, where it is not one of memory
    folder: Path = Path("/run/user/0/sglcache")  # of the sockets
    folder_uid: int | None = None  # None: it is not there
    folder_mode: int = 0o700
    uid: int = 0
    ports: Sequence[Port] = ()
    sockets: Sequence[Socket] = ()
    daemons: Sequence[Mapping[str, Any]] = ()  # /server_info of each
    silent: Sequence[SglcacheError] = ()  # supervisors that are there and do not answer
    health: Sequence[Mapping[str, Any]] = ()  # of each
    attached: Sequence[Attached] = ()
    indexers: Mapping[str, str | None] = field(default_factory=dict)  # by URL, why it does not answer


def gather(file: Path | None, overrides: Sequence[str], where: Path | None) -> Facts:
    """Look at everything. `where`: rank 0's control socket, where it is named."""
    found: dict[str, Any] = {"file": file, **_machine(), **_configured(file, overrides)}
    config: Config | None = found.get("config")
    named = where or (config.control.socket if config is not None else None)
    folder = named.parent if named is not None else paths.runtime_dir()
    found["folder"] = folder
    with contextlib.suppress(OSError):
        info = os.lstat(folder)
        found |= {"folder_uid": info.st_uid, "folder_mode": stat.S_IMODE(info.st_mode)}
    found["sockets"] = list(_sockets(folder, named))
    found |= _daemons(named)
    found["reserved"] = _reserved(config)
    if config is not None:
        found["ports"] = [_port(*each) for each in _wanted(config, found.get("seats", ()))]
        found["indexers"] = {url: _indexer(url) for url in config.events.dynamo_indexers}
    return Facts(**found)


def _machine() -> dict[str, Any]:
    memory = _fields(Path("/proc/meminfo"))
    cards = sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))
    driver = _text("/proc/driver/nvidia/version").partition("\n")[0].strip() or None
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    huge = _text("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return {
        "python": tuple(sys.version_info[:3]),
        "executable": sys.executable,
        "kernel": platform.release(),
        "version": importlib.metadata.version("sglcache"),
        "core": FORM,
        "protocol": control.PROTOCOL,
        "packages": {name: _installed(name) for name in PACKAGES},
        "torch_cuda": _torch_cuda(),
        "driver": driver,
        "cards": cards,
        "cpus": len(os.sched_getaffinity(0)),
        "nodes": max(1, len(nodes)),
        "machine": room.machine(),
        "available": memory.get("MemAvailable"),
        "swapped": memory.get("SwapTotal", 0) - memory.get("SwapFree", 0),
        "max_fds": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "huge_pages": huge.partition("[")[2].partition("]")[0],
        "now": time.time(),
        "uid": os.geteuid(),
    }


def _configured(file: Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        found["config"] = config = configs.load(file, overrides)
        found["seats"] = plan(config)
        found["weighed"] = room.weigh(config)
        if (folder := config.host.keep_path) is not None:
            from sglcache.server.keeping import held_in, memory_of

            place = folder
            while not place.exists() and place != place.parent:
                place = place.parent
            there = os.statvfs(place)
            held = sum(each.num_bytes for each in held_in(folder))
            found |= {"kept_free": there.f_bavail * there.f_frsize + held, "kept_kind": memory_of(folder)}
    except (SglcacheError, OSError) as exc:
        found["config_error"] = exc if isinstance(exc, SglcacheError) else SglcacheError(str(exc))
    if (loaded := found.get("config")) is not None:
        try:
            found["disk"] = room.disk(loaded, patient=False)
        except SglcacheError as exc:
            found["disk_error"] = exc
    return found


def _daemons(named: Path | None) -> dict[str, Any]:
    told: list[dict[str, Any]] = []
    health: list[dict[str, Any]] = []
    silent: list[SglcacheError] = []
    attached: list[Attached] = []
    for path in paths.supervisors(named):
        try:
            told.append(ranks.ask(path))
            health.append(ranks.ask(path, "/health"))
        except SglcacheError as exc:
            if exc.facts.get("pid"):  # else it is a dead one's socket
                silent.append(exc)
    for row in (row for each in told for row in each["ranks"]):
        if row["state"] in ("ok", "draining"):
            attached.append(_attach(row))
    return {"daemons": told, "health": health, "silent": silent, "attached": attached}


def _attach(row: Mapping[str, Any]) -> Attached:
    try:
        with Client(row["socket"], role="observer", name="doctor") as client:
            status = client.status()
    except SglcacheError as exc:
        return Attached(row["rank"], error=exc)
    stream = status["stream"]
    if stream is None or stream["curve"] is not None:
        return Attached(row["rank"], status)
    source = Source(str(endpoints.parse(stream["endpoint"]).dialled()), None, stream["topic"], row["rank"])
    return Attached(row["rank"], status, heard=ports.listen(source, None, HEARD_S).live)


def _wanted(config: Config, seats: Sequence[Seat]) -> Iterator[tuple[str, str, int]]:
    """Key, host and number of each TCP port that the daemon would bind."""
    if config.http.enabled:
        yield "http.port", config.http.host, config.http.port
    for seat in seats:
        for key, text in (("events.endpoint", seat.endpoint), ("events.replay_endpoint", seat.replay_endpoint)):
            if text is None or (key == "events.endpoint" and config.events.mode == "connect"):
                continue
            endpoint = endpoints.parse(text)
            if isinstance(endpoint, endpoints.Tcp) and endpoint.port:
                yield key, endpoint.host, endpoint.port


def _port(key: str, host: str, number: int) -> Port:
    inodes = {inode for port, inode in _listening() if port == number}
    if not inodes:
        return Port(key, host, number)
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for fd in os.listdir(process / "fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(process / "fd" / fd).removeprefix("socket:[").rstrip("]") in inodes:
                        return Port(key, host, number, int(process.name), _text(process / "comm").strip())
    return Port(key, host, number, 0)


def _listening() -> Iterator[tuple[int, str]]:
    """Number and inode of each TCP socket of this host that listens."""
    for name in ("tcp", "tcp6"):
        for line in _text(f"/proc/net/{name}").splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS:
                yield int(words[1].rpartition(":")[2], 16), words[9]


def _sockets(folder: Path, named: Path | None) -> Iterator[Socket]:
    for path in sorted(folder.glob(f"{named.name}*" if named is not None else "rank-*.sock*")):
        try:
            info = os.lstat(path)
            if not stat.S_ISSOCK(info.st_mode):
                continue
        except OSError:
            continue
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
            try:
                sock.connect(str(path))
                answers = True
            except BlockingIOError:  # its backlog is full: somebody has it
                answers = True
            except OSError:
                answers = False
        yield Socket(path, info.st_uid, stat.S_IMODE(info.st_mode), paths.is_locked(Path(f"{path}.lock")), answers)


def _reserved(config: Config | None) -> float | None:
    """As seconds, the highest number that a rank's stream may have used: it counts a clock's microseconds."""
    import json

    folder = (config.state.dir if config is not None else None) or paths.state_dir()
    found = []
    for path in folder.glob("rank-*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found.append(float(json.loads(path.read_bytes())["reserved"]) / 1e6)
    return max(found, default=None)


def _indexer(url: str) -> str | None:
    """Why it does not answer as an indexer of Dynamo does; None: it does."""
    try:
        status, _ = ask_json(f"{url}/workers", timeout_s=ASKED_S)
    except SglcacheError as exc:
        return exc.message
    return None if status == 200 else f"GET {url}/workers: status {status}"


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    """Read from torch's own file: to import it takes seconds."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, NotInstalled, OSError):
        file = importlib.metadata.distribution("torch").locate_file("torch/version.py")
        for line in Path(str(file)).read_text().splitlines():
            name, _, value = line.partition("=")
            if name.partition(":")[0].strip() == "cuda":
                return value.strip().strip("'\"").removeprefix("None") or None
    return None


def _fields(path: Path) -> dict[str, int]:
    """Bytes by name, of a file such as /proc/meminfo."""
    found = {}
    for line in _text(path).splitlines():
        name, _, rest = line.partition(":")
        if rest.strip().endswith("kB"):
            found[name] = int(rest.split()[0]) << 10
    return found


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
