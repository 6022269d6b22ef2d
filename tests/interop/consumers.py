"""Other people's readers of the stream, as processes of their own, and what they believe: read back over their HTTP.

They run in a Python of their own (`make interop` makes it), so that what they need does not decide what sglcache runs
with. Both bind every interface and can't be told otherwise, so each is started with `loopback.c` preloaded; where a
consumer listens is read from the kernel, and is asserted to be loopback alone.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import re
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("SGLCACHE_INTEROP_PYTHON", ROOT / ".venv-interop/bin/python"))
START_S = 60.0
STOP_S = 10.0
PAUSE_S = 0.03  # between two looks at another program, which has no other way to say that it is there
TIERS = {"device": "DEVICE", "host_pinned": "HOST", "disk": "DISK"}  # Dynamo's word -> ours

T = TypeVar("T")


def eventually(probe: Callable[[], T], within_s: float) -> T:
    """Probe until it gives something true, or until time is up: the last it gave."""
    deadline, never = time.monotonic() + within_s, threading.Event()
    while not (found := probe()) and time.monotonic() < deadline:
        never.wait(PAUSE_S)
    return found


def build_shim(folder: Path) -> Path:
    """Compile `loopback.c`."""
    library = folder / "loopback.so"
    source = Path(__file__).with_name("loopback.c")
    subprocess.run(["cc", "-Wall", "-Werror", "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
    return library


def listening(pid: int) -> list[tuple[str, int]]:
    """The (address, port) of every TCP socket that the process listens on, from the kernel's tables."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(fd))
        except FileNotFoundError:
            continue  # closed since
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in inodes:
                address, port = local.split(":")
                # Words of 32 bits, each in the machine's order.
                packed = b"".join(bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8))
                found.append((str(ipaddress.ip_address(packed)), int(port, 16)))
    return found


class Consumer:
    """A consumer's process. As a context manager it is ended by its pid at the end."""

    def __init__(self, folder: Path, shim: Path, name: str, module: str, *arguments: str) -> None:
        assert PYTHON.exists(), f"{PYTHON} is not there: `make interop` makes it, and then runs these tests"
        self.name = name
        self.log = folder / f"{name}.log"
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "OTEL", "DYN"))}
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [PYTHON, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                env={**environment, "LD_PRELOAD": str(shim), "NO_COLOR": "1"},
            )
        self._connection: http.client.HTTPConnection | None = None
        try:
            self.port = eventually(self._port, START_S)
            assert self.port, f"{name} does not listen: {self.said()}"
            self._connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        except BaseException:
            self.close()
            raise

    def _port(self) -> int:
        assert self.process.poll() is None, f"{self.name} ended with {self.process.returncode}: {self.said()}"
        ports = [port for _, port in listening(self.process.pid)]
        return ports[0] if ports else 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def said(self) -> str:
        """What it has logged, without the colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self.log.read_text(errors="replace"))

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Status and answer, decoded if it is JSON."""
        assert self._connection is not None
        data = None if body is None else json.dumps(body)
        self._connection.request(method, path, data, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        raw = response.read()
        if "json" in (response.headers["Content-Type"] or ""):
            return response.status, json.loads(raw)
        return response.status, raw.decode(errors="replace")

    def get(self, path: str) -> Any:
        status, answer = self.ask("GET", path)
        assert status == 200, f"{self.name} answered {path} with {status}: {answer}"
        return answer

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(STOP_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        addresses = listening(self.process.pid) if self.process.poll() is None else []
        self.close()
        if error is not None:
            error.add_note(f"{self.name} logged:\n{self.said()[-4000:]}")
        assert_loopback(addresses)


def assert_loopback(addresses: list[tuple[str, int]]) -> None:
    beyond = [address for address in addresses if not ipaddress.ip_address(address[0]).is_loopback]
    assert not beyond, f"it listens beyond loopback: {beyond}"


class Overlap(NamedTuple):
    """How much of a prompt is cached, in tokens from its start."""

    device: int
    matched: int  # and on from there on the host
    stored: int  # and on from there on the disk


NONE = Overlap(0, 0, 0)
Answer: TypeAlias = tuple[Overlap, dict[int, int]]
"""The most that a rank has, and by rank what is on the device, in tokens."""


class Indexer(Consumer):
    """NVIDIA Dynamo's standalone indexer."""

    def __init__(self, folder: Path, shim: Path, port: int = 0) -> None:
        """`port`: 0 is the system's choice."""
        super().__init__(folder, shim, "indexer", "dynamo.indexer", "--port", str(port))

    def register(
        self,
        model: str,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        instance: int,
        block_size: int,
        rank: int = 0,
    ) -> None:
        body = {"instance_id": instance, "endpoint": endpoint, "dp_rank": rank, "model_name": model}
        if replay_endpoint is not None:
            body["replay_endpoint"] = replay_endpoint
        assert self.ask("POST", "/register", {**body, "block_size": block_size}) == (201, {"status": "ok"})

    def unregister(self, model: str, *, instance: int) -> None:
        status, answer = self.ask("POST", "/unregister", {"instance_id": instance, "model_name": model})
        assert status == 200, answer

    def query(
        self, model: str, tokens: list[int], *, instance: int, lora: str | None = None, cache_salt: str | None = None
    ) -> Answer:
        """What it would route by."""
        names = {"lora_name": lora, "cache_salt": cache_salt}
        body = {"token_ids": tokens, "model_name": model, **{key: name for key, name in names.items() if name}}
        status, answer = self.ask("POST", "/query", body)
        assert status == 200, answer
        return _overlap(answer, instance)

    def query_by_hash(self, model: str, hashes: list[int], *, instance: int) -> Answer:
        """As `query`, with the block hashes computed by the asker."""
        status, answer = self.ask("POST", "/query_by_hash", {"block_hashes": hashes, "model_name": model})
        assert status == 200, answer
        return _overlap(answer, instance)

    def blocks(self, model: str) -> dict[tuple[int, str], set[int]]:
        """Every block it believes in, by (rank, tier): the hashes as the stream names them."""
        events = self.get("/dump").get(f"{model}:default", {}).get("events", [])
        found: dict[tuple[int, str], set[int]] = {}
        for entry in events:
            where = entry["event"]["dp_rank"], TIERS[entry["storage_tier"]]
            hashes = (signed(block["block_hash"]) for block in entry["event"]["data"]["stored"]["blocks"])
            found.setdefault(where, set()).update(hashes)
        return found


def _overlap(answer: dict[str, Any], instance: int) -> Answer:
    found = answer["instances"].get(str(instance))
    if found is None:
        return NONE, {}
    reached = Overlap(found["gpu"], found["cpu"], found["disk"])
    return reached, {int(rank): tokens for rank, tokens in found["dp"].items() if tokens}


def signed(block_hash: int) -> int:
    return block_hash - (1 << 64) if block_hash >> 63 else block_hash


class Drawn(NamedTuple):
    """A block as RadixView draws it."""

    parent: int | None
    num_tokens: int
    medium: str


class RadixView(Consumer):
    """The viewer of KV events. It finds the stream from `/server_info` at `server`."""

    def __init__(self, folder: Path, shim: Path, server: str, *, num_ranks: int = 1) -> None:
        super().__init__(folder, shim, "radixview", "radixview", "--server", server, "--view-port", "0")
        try:
            assert eventually(lambda: self.said().count("subscribed dp=") == num_ranks, START_S), self.said()
        except BaseException:
            self.close()
            raise

    def drawn(self) -> Mapping[int, Drawn]:
        """Every block of its tree, by hash, as of one version of it. A parent that it does not have keeps its name."""
        while True:
            tree = self.get("/api/tree")
            nodes = [node for node in tree["nodes"] if not node["missing"]]
            runs = {node["id"]: self.get(f"/api/run?id={urllib.parse.quote(node['id'])}")["blocks"] for node in nodes}
            if self.get(f"/api/tree?since={tree['version']}").get("unchanged"):
                break
        found = {}
        for node in nodes:
            above = node["parent"]
            if above is not None:
                above = int(runs[above][-1]["hash"] if above in runs else above.removeprefix("missing:"))
            for block in runs[node["id"]]:
                found[int(block["hash"])] = Drawn(above, block["tokens"], block["medium"])
                above = int(block["hash"])
        return found
