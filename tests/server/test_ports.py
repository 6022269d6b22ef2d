"""Ports as people configure them, and get them wrong: real reports as cases, with what is right for each."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from streams import Listener, free_ports

from sglcache.testing.daemon import Daemon, until
from sglcache.wire.events import BlockStored

pytestmark = pytest.mark.daemons

PAGE = list(range(4))


def advertised(info: dict[str, Any]) -> dict[int, str]:
    """Every stream by its rank, as a router finds it: base + r for the replicas, and the later stages by name."""
    block = info["kv_events"]
    found = {r: f"tcp://127.0.0.1:{block['endpoint_port_base'] + r}" for r in range(block["dp_size"])}
    return found | {row["rank"]: row["endpoint"] for row in info["pipeline_endpoints"]}


def listening(pid: int) -> set[int]:
    """The TCP ports that a process listens on."""
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            inodes.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:
            continue
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


@pytest.mark.parametrize(
    ("dp_size", "pp_size", "num_shards"),
    [(1, 2, 1), (2, 1, 1), (2, 2, 1), (1, 1, 2)],
    ids=["PP=2", "DP=2", "PP=2 x DP=2", "TP=2"],
)
def test_case_a15_no_two_ranks_want_one_port(tmp_path: Path, dp_size: int, pp_size: int, num_shards: int) -> None:
    """Ranks that offset their port by nothing, or by a number that others have too, met on one port.

    Replica d's first stage is at base + d in every configuration; shards of one rank are one stream. (Context-parallel
    peers are shards here, like tensor-parallel ones.)
    """
    num_ranks = dp_size * pp_size
    base, replay_base = free_ports(num_ranks, num_ranks)
    events = {"endpoint": f"tcp://127.0.0.1:{base}", "replay_endpoint": f"tcp://127.0.0.1:{replay_base}"}
    pool = {"num_shards": num_shards}
    with Daemon(tmp_path, dp_size=dp_size, pp_size=pp_size, events=events, pool=pool) as daemon:
        info = daemon.ask()
        places = advertised(info)
        assert places == {offset: f"tcp://127.0.0.1:{base + offset}" for offset in range(num_ranks)}
        assert places == {row["rank"]: row["stream"]["endpoint"] for row in info["ranks"]}
        assert info["kv_events"]["replay_endpoint_port_base"] == replay_base
        for row in info["ranks"]:
            assert listening(row["pid"]) == {base + row["rank"], replay_base + row["rank"]}

        with ExitStack() as stack:
            streams = {offset: stack.enter_context(Listener(endpoint)) for offset, endpoint in places.items()}
            for stream in streams.values():
                stream.await_batch()
            for offset in places:
                put_one_page(daemon, offset)
                daemon.rank(offset).settle()
            for offset, stream in streams.items():
                device, host = (stream.await_event(BlockStored)[1] for _ in range(2))
                assert [event.medium for event in (device, host)] == ["GPU", "CPU_PINNED"]  # type: ignore[union-attr]
                assert [len(event.block_hashes) for event in (device, host)] == [1, 1]  # type: ignore[union-attr]
                stream.await_batch()  # a heartbeat: had another told of the block, it would be here by now
                stored = [
                    event for _, batch in stream.heard for event in batch.events if isinstance(event, BlockStored)
                ]
                assert stored == [device, host], "each block once"
                assert {batch.attn_dp_rank for _, batch in stream.heard} == {offset}


def put_one_page(daemon: Daemon, offset: int) -> None:
    """Shards or none: a runner of all of them is one."""
    with daemon.rank(offset).client() as client, client.acquire(PAGE) as lease:
        lease.commit()


ENDPOINTS = {
    "*": ("tcp://*:{port}", "tcp://127.0.0.1:{port}"),  # 1
    "127.0.0.1": ("tcp://127.0.0.1:{port}", "tcp://127.0.0.1:{port}"),  # 2
    "0.0.0.0": ("tcp://0.0.0.0:{port}", "tcp://127.0.0.1:{port}"),  # 3
    "ipc of rank 1": ("ipc://{folder}/kv", "ipc://{folder}/kv-1"),  # 7
    "[::1]": ("tcp://[::1]:{port}", "tcp://[::1]:{port}"),  # 8
}


@pytest.mark.parametrize("name", ENDPOINTS)
def test_case_a16_an_endpoint_that_is_accepted_is_bound(tmp_path: Path, name: str, ipv6: bool) -> None:
    """A publisher that was off by default, or connected where a host was named, said nothing and sent nothing."""
    if "::" in name and not ipv6:
        pytest.skip("this host has no IPv6")
    if name in ("*", "0.0.0.0"):
        publishes_apart(name, tmp_path)
    else:
        publishes(name, tmp_path)


def publishes(name: str, folder: Path) -> None:
    facts = {"port": free_ports(1)[0], "folder": folder}
    endpoint, dialled = (text.format(**facts) for text in ENDPOINTS[name])
    rank = 1 if "ipc" in endpoint else 0
    with Daemon(folder, dp_size=rank + 1, events={"endpoint": endpoint}) as daemon:
        with Listener(dialled) as stream:
            stream.await_batch()
            put_one_page(daemon, rank)
            assert stream.await_event(BlockStored)[1].token_ids == PAGE  # type: ignore[union-attr]
            told = daemon.rank(rank).row["stream"]
            assert told["endpoint"] == endpoint + ("-1" if rank else "")
            assert told["batches_sent"] > 1
            assert told["last_seq"] >= stream.heard[-1][0]
            until(lambda: daemon.rank(rank).row["stream"]["subscriptions"] == 1)
        if "ipc" not in endpoint:
            assert daemon.ask()["kv_events"]["publisher"] == "zmq"


APART = """
import ctypes, fcntl, os, socket, struct, sys
from pathlib import Path
CLONE_NEWUSER, CLONE_NEWNET, SIOCSIFFLAGS, IFF_UP = 0x10000000, 0x40000000, 0x8914, 1  # linux/sched.h, sockios.h, if.h
libc = ctypes.CDLL(None)
if libc.unshare(CLONE_NEWNET) and libc.unshare(CLONE_NEWUSER | CLONE_NEWNET):
    sys.exit(77)
with socket.socket() as any:
    fcntl.ioctl(any, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
import test_ports
test_ports.publishes(sys.argv[1], Path(sys.argv[2]))
"""


def publishes_apart(name: str, folder: Path) -> None:
    """In a network of its own, which has nothing but a loopback: a wildcard is not to be reached from outside."""
    done = subprocess.run(
        [sys.executable, "-c", APART, name, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])},
    )
    if done.returncode == 77:
        pytest.skip("this process may not have a network of its own")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[events]\nendpont = "tcp://*:5557"', "events.endpont ({file}): no such key; did you mean events.endpoint?"),
        ('[events]\npublisher = "zmQ"', "events.publisher ({file}): no such key; [events] has enabled, endpoint"),
        ('[events\nendpoint = "tcp://*:5557"', "{file} is not TOML: "),
        ('[events]\nendpoint = "*:5557"', "events.endpoint = '*:5557' ({file}): write tcp://HOST:PORT"),
    ],
    ids=["a key", "a publisher", "no TOML", "no scheme"],
)
def test_case_a16_what_is_not_understood_is_refused_by_name(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "a.toml"
    file.write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "sglcache", "serve", "--config", str(file)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error[config]: " + told.format(file=file))
