"""`sglcache doctor events` on real daemons, and on what is wrong with servers, streams and indexers.

With Dynamo's own indexer: tests/interop/test_dynamo_doctor.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import zmq
from told import CLEARED, free_ports, payload, stored

from sglcache.client.discovery import Source, discover
from sglcache.client.doctor import Finding, Options, examine
from sglcache.client.doctor.ports import listen
from sglcache.client.mirror import Mirror
from sglcache.testing.daemon import Daemon

pytestmark = pytest.mark.daemons

HTTP = {"http": {"enabled": True, "port": 0}}
BRISK = {"events": {"heartbeat_s": 0.1}}
QUICK_S = 2.0  # for what never comes


@pytest.fixture
def daemon(lend: Callable[..., Daemon]) -> Daemon:
    return lend(**HTTP, **BRISK)


def look(daemon: Daemon, **options: Any) -> dict[str, Finding]:
    sockets = {row["rank"]: Path(row["socket"]) for row in daemon.info["ranks"]}
    found = list(examine(Options(daemon.info["http"], sockets, **options)))
    assert len({finding.check for finding in found}) == len(found), "two findings of one name"
    return {finding.check: finding for finding in found}


def states(found: dict[str, Finding]) -> dict[str, str]:
    return {check: finding.state for check, finding in found.items()}


RIGHT = {
    "server": "ok",
    "rank 0 live": "ok",
    "rank 0 replay": "ok",
    "encoding": "ok",
    "rank 0 salt": "ok",
    "rank 0 adapter": "ok",
    "rank 0 hashes": "ok",
    "rank 0 host": "ok",
    "indexer": "skipped",
}


# -- daemons ------------------------------------------------------------------------------------------


def test_a_right_daemon_is_right_all_the_way_and_nothing_of_ours_is_held_after_it(daemon: Daemon) -> None:
    assert states(look(daemon)) == RIGHT
    status = daemon.status()
    assert status["sessions"] == []
    assert [pool["locked"] for pool in status["pools"]] == [0, 0]


@pytest.mark.parametrize("encoding", ["array", "superset"])
def test_every_encoding_is_told_and_a_hidden_salt_is_found(encoding: str, tmp_path: Path) -> None:
    with Daemon(tmp_path, **HTTP, events={"encoding": encoding, "cache_salt": "hashed", "hash": "sha256"}) as daemon:
        found = look(daemon)
    assert states(found) == RIGHT | {"rank 0 adapter": "skipped" if encoding == "array" else "ok"}
    assert found["encoding"].detail == encoding
    assert "told as its sha256" in found["rank 0 salt"].detail
    assert found["rank 0 hashes"].detail.startswith("sha256")


def test_withheld_tokens_keep_an_indexer_from_believing_anything(tmp_path: Path) -> None:
    with Daemon(tmp_path, **HTTP, events={"token_ids": "none"}, host={"num_tokens": 0}) as daemon:
        found = look(daemon)
        assert states(found) == RIGHT | {"rank 0 host": "skipped"}
        assert "only who computes the hashes can match" in found["indexer"].detail
        found = look(daemon, indexer="http://127.0.0.1:1")
        assert (found["indexer"].state, found["indexer"].remedy) == ("failed", 'set events.token_ids = "clear"')


@pytest.mark.parametrize("token_ids", ["clear", "none"])
def test_keys_of_pairs_are_right_too(token_ids: str, tmp_path: Path) -> None:
    with Daemon(tmp_path, **HTTP, pool={"bigram": True}, events={"token_ids": token_ids}) as daemon:
        assert states(look(daemon)) == RIGHT


def test_every_replica_is_looked_at_in_every_stage(tmp_path: Path) -> None:
    base = free_ports(8)
    events = {"endpoint": f"tcp://127.0.0.1:{base}", "replay_endpoint": f"tcp://127.0.0.1:{base + 4}"}
    with Daemon(tmp_path, **HTTP, events=events, parallel={"dp_size": 2, "pp_size": 2}) as daemon:
        found = look(daemon)
        assert found["server"].detail.startswith(f"{daemon.info['http']} tells of 2 ranks and 2 of later stages")
        assert daemon.rank(3).status()["sessions"] == []
    every = {check.replace("rank 0", f"rank {rank}"): it for rank in range(4) for check, it in RIGHT.items()}
    assert states(found) == every


def test_a_later_stage_that_can_not_be_heard_is_found(tmp_path: Path) -> None:
    base = free_ports(8)
    events = {"endpoint": f"tcp://*:{base}", "replay_endpoint": f"tcp://*:{base + 4}"}
    with Daemon(tmp_path, **HTTP, events=events, parallel={"dp_size": 1, "pp_size": 2}) as daemon:
        later = discover(daemon.info["http"]).later_stages
        assert later == [Source(f"tcp://127.0.0.1:{base + 1}", f"tcp://127.0.0.1:{base + 5}", "", 1)]
        os.kill(daemon.rank(1).pid, signal.SIGSTOP)
        try:
            found = list(examine(Options(daemon.info["http"], {}, timeout_s=QUICK_S)))
        finally:
            os.kill(daemon.rank(1).pid, signal.SIGCONT)
    failed = [finding.check for finding in found if finding.state == "failed"]
    assert failed == ["rank 1 live", "rank 1 replay"]


def test_a_full_pool_is_said_to_be_full(daemon: Daemon) -> None:
    with daemon.client() as client, client.acquire(list(range(4 * 256))):
        found = look(daemon)
    assert (found["rank 0 blocks"].state, list(found)[-1]) == ("failed", "rank 0 blocks")
    assert "try again when there is room" in found["rank 0 blocks"].remedy


def test_blocks_that_do_not_arrive_are_a_matter_for_verify(tmp_path: Path) -> None:
    prelude = (
        "from sglcache.core.eventlog import EventLog\n"
        "from sglcache.core.snapshot import Snapshot\n"
        "EventLog.stored = lambda *a: None\n"
        "Snapshot._tell = lambda self, node, building: self._walk.advance(node)\n"
    )
    with Daemon(tmp_path, prelude=prelude, **HTTP, **BRISK, host={"num_tokens": 0}) as daemon:
        found = look(daemon, timeout_s=QUICK_S)
    assert found["rank 0 salt"].state == "failed"
    assert "sglcache verify" in found["rank 0 salt"].remedy


def test_hashes_that_are_not_the_tokens_are_found(tmp_path: Path) -> None:
    prelude = (
        "from sglcache.core import hashing\n"
        "real = hashing.HASHERS['xxh3_128']\n"
        "hashing.HASHERS['xxh3_128'] = real._replace(digest=lambda data: real.digest(data + b'!'))\n"
    )
    with Daemon(tmp_path, prelude=prelude, **HTTP, **BRISK) as daemon:
        found = look(daemon, timeout_s=QUICK_S)
    assert found["rank 0 hashes"].state == "failed"


def test_the_command_asks_the_daemon_where_it_is(daemon: Daemon) -> None:
    ran = run("--socket", str(daemon.socket), "--json")
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["ok"]
    assert {each["check"]: each["state"] for each in told["findings"]} == RIGHT
    ran = run("--socket", str(daemon.socket), "--indexer", "127.0.0.1:1", "--timeout", "1")
    assert ran.returncode == 1
    assert ran.stdout.splitlines()[-1].startswith("FAILED indexer: GET http://127.0.0.1:1/health: ")
    assert ran.stdout.splitlines()[-1].endswith("; start it: python -m dynamo.indexer --port PORT")


def test_without_a_daemon_or_without_http_the_command_says_what_to_do(tmp_path: Path) -> None:
    ran = run("--socket", str(tmp_path / "none.sock"))
    assert (ran.returncode, ran.stdout) == (69, "")
    with Daemon(tmp_path) as daemon:
        ran = run("--socket", str(daemon.socket))
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "http.enabled = true" in ran.stderr


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglcache", "doctor", "events", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


# -- servers that are not ours ------------------------------------------------------------------------


class Site:
    """Answers as it is told to, on a port of its own."""

    def __init__(self, answer: Callable[[str, str, Any], tuple[int, Any]]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"] or 0))
                status, told = answer(self.command, self.path.split("?")[0], json.loads(body) if body else None)
                raw = b"" if told is None else told if isinstance(told, bytes) else json.dumps(told).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            do_GET = do_POST = _answer  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def findings_of(info: Any, status: int = 200) -> list[Finding]:
    with Site(lambda *_: (status, info)) as site:
        return list(examine(Options(site.url, timeout_s=QUICK_S)))


KV_EVENTS = {
    "publisher": "zmq",
    "endpoint_host": "*",
    "endpoint_port_base": 5557,
    "topic": "",
    "block_size": 2,
    "dp_size": 1,
}


@pytest.mark.parametrize(
    ("info", "status", "words"),
    [
        ({"kv_events": None}, 200, "has no kv_events"),
        ([], 200, "has no kv_events"),
        (b"<html>", 200, "server_info: "),
        ({"error": "no"}, 500, "status 500"),
        ({"kv_events": {**KV_EVENTS, "dp_size": 0}}, 200, "dp_size"),
        ({"kv_events": {**KV_EVENTS, "endpoint_port_base": "5557"}}, 200, "endpoint_port_base"),
        ({"kv_events": {**KV_EVENTS, "endpoint_port_base": 65535, "dp_size": 2}}, 200, "no port is left for rank 1"),
    ],
)
def test_a_server_that_tells_of_no_stream_is_the_end_of_it(info: Any, status: int, words: str) -> None:
    (finding,) = findings_of(info, status)
    assert (finding.check, finding.state) == ("server", "failed")
    assert words in finding.detail
    assert finding.remedy


class Ports:
    """Two sockets of a rank that tell what they are given to tell."""

    def __init__(self, *live: list[bytes], replay: list[list[bytes]] | None = None) -> None:
        self.context = zmq.Context()
        self.pub, self.router = self.context.socket(zmq.XPUB), self.context.socket(zmq.ROUTER)
        bases = [sock.bind_to_random_port("tcp://127.0.0.1") for sock in (self.pub, self.router)]
        self.info = {**KV_EVENTS, "endpoint_port_base": bases[0], "replay_endpoint_port_base": bases[1]}
        self.live, self.replay = live, replay
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        while not self.stop.wait(0.005):
            while self.pub.poll(0):
                self.pub.recv()
            for message in self.live:
                self.pub.send_multipart(message)
            if self.router.poll(0):
                identity, *_ = self.router.recv_multipart()
                for message in self.replay or ():
                    self.router.send_multipart([identity, *message])

    def __enter__(self) -> Ports:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()
        self.context.destroy(linger=0)


def message(*events: Any, seq: int = 5, topic: bytes = b"", rank: int | None = 0) -> list[bytes]:
    return [topic, seq.to_bytes(8, "big"), payload(*events, rank=rank)]


END = [b"", b"", b"\xff" * 8, b""]


def judged(ports: Ports) -> dict[str, Finding]:
    with ports:
        found = findings_of({"kv_events": ports.info})
    return {finding.check: finding for finding in found}


def test_a_replay_without_an_end_is_a_danger() -> None:
    found = judged(Ports(message(), replay=[[b"", *message(CLEARED)]]))
    assert states(found) == {"server": "ok", "rank 0 live": "ok", "rank 0 replay": "failed", "encoding": "ok"}
    assert "no END came" in found["rank 0 replay"].detail
    assert "hangs" in found["rank 0 replay"].remedy


def test_a_replay_that_does_not_begin_anew_is_only_what_the_ring_had() -> None:
    found = judged(Ports(message(), replay=[[b"", *message(stored(1))], END]))
    assert "does not begin with AllBlocksCleared" in found["rank 0 replay"].detail


def test_a_silent_port_is_told_with_its_address() -> None:
    found = judged(Ports(replay=[[b"", *message(CLEARED)], END]))
    assert (found["rank 0 live"].state, found["rank 0 replay"].state) == ("failed", "ok")
    assert "tcp://127.0.0.1:" in found["rank 0 live"].detail


def test_what_the_batches_say_is_held_against_what_the_server_says() -> None:
    odd = [message(stored(1), topic=b"other", rank=3), [b"", b"short", b""]]
    found = judged(Ports(*odd, replay=[[b"", *message(CLEARED, stored(1))], END]))
    assert {check for check, finding in found.items() if finding.state == "failed"} >= {"rank 0 topic", "rank 0 number"}
    assert "the stream says 'other'" in found["rank 0 topic"].detail
    assert "say rank 3" in found["rank 0 number"].detail


def test_another_block_size_is_one_that_an_indexer_drops() -> None:
    ports = Ports(message(), replay=[[b"", *message(CLEARED, stored(1))], END])
    ports.info["block_size"] = 16
    found = judged(ports)
    assert "/server_info says 16 tokens, the stream [2]" in found["rank 0 block size"].detail


def test_a_stream_of_two_forms_is_two_streams() -> None:
    array = [b"", (6).to_bytes(8, "big"), b"\x93\xcb" + bytes(8) + b"\x91\x91\xb0AllBlocksCleared\x00"]
    found = judged(Ports(message(), replay=[[b"", *message(CLEARED)], [b"", *array], END]))
    assert found["encoding"].state == "failed"


def test_no_replay_port_at_all_is_a_fault() -> None:
    ports = Ports(message(CLEARED))
    del ports.info["replay_endpoint_port_base"]
    assert "names no replay_endpoint_port_base" in judged(ports)["rank 0 replay"].detail


def test_without_control_sockets_only_the_stream_is_looked_at(daemon: Daemon) -> None:
    found = {finding.check: finding.state for finding in examine(Options(daemon.info["http"]))}
    assert found == {"server": "ok", "rank 0 live": "ok", "rank 0 replay": "ok", "encoding": "ok", "blocks": "skipped"}


def test_listening_ends_when_nobody_is_there() -> None:
    heard = listen(Source("tcp://127.0.0.1:1", "tcp://127.0.0.1:1"), None, 0.2)
    assert (heard.live, heard.ended, heard.form) == (False, False, None)


# -- indexers -----------------------------------------------------------------------------------------


class StandIn:
    """Dynamo's indexer, as far as its HTTP API is asked here, kept by our own mirror; and what may be wrong with it."""

    def __init__(self, *faults: str) -> None:
        self.faults = set(faults)
        self.workers: dict[tuple[int, str], dict[str, Any]] = {}
        self.mirrors: dict[tuple[int, str], dict[int, Mirror]] = {}
        self.lock = threading.Lock()

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        with self.lock:
            done: tuple[int, Any] = getattr(self, path[1:])(body)
            return done

    def health(self, _: Any) -> tuple[int, Any]:
        return (503 if "ill" in self.faults else 200), None

    def register(self, body: Any) -> tuple[int, Any]:
        if "refuses" in self.faults and body["model_name"].startswith("sglcache-doctor-"):
            return 400, {"error": "bad endpoint"}
        key = body["instance_id"], body["model_name"]
        worker = self.workers.setdefault(key, {"block_size": body["block_size"], "endpoints": {}, "listeners": {}})
        rank = body["dp_rank"]
        replay = None if "no late join" in self.faults else body.get("replay_endpoint")
        worker["endpoints"][str(rank)] = body["endpoint"]
        worker["listeners"][str(rank)] = {"status": "active"}
        self.mirrors.setdefault(key, {})[rank] = Mirror(body["endpoint"], replay, rank=rank)
        return 201, {"status": "ok"}

    def unregister(self, body: Any) -> tuple[int, Any]:
        if "never forgets" in self.faults:
            return 500, {"error": "no"}
        key = body["instance_id"], body["model_name"]
        if key not in self.workers:
            return 404, {"error": "not found"}
        self.close(key)
        return 200, {"status": "ok"}

    def close(self, key: tuple[int, str]) -> None:
        del self.workers[key]
        for mirror in self.mirrors.pop(key).values():
            mirror.close()

    def query(self, body: Any) -> tuple[int, Any]:
        names = {"lora_name": body.get("lora_name"), "cache_salt": body.get("cache_salt")}
        if "mixes names up" in self.faults and names["cache_salt"] is not None:
            names = {"lora_name": names["cache_salt"], "cache_salt": None}
        instances: dict[str, Any] = {}
        for (instance, model), ranks in self.mirrors.items():
            if model != body["model_name"] or ("hangs" in self.faults and instance == 1):
                continue
            for rank, mirror in ranks.items():
                if "deaf" not in self.faults or mirror.batches == 0:
                    mirror.step(0)
                spaces = [names, {"lora_name": names["cache_salt"], "cache_salt": names["lora_name"]}]
                if "mixes names up" not in self.faults:
                    spaces = [names]
                matches = [mirror.longest_match(body["token_ids"], **each)[rank].on("GPU") for each in spaces]
                instances.setdefault(str(instance), {"dp": {}})["dp"][str(rank)] = max(matches)
        return 200, {"instances": instances}

    def dump(self, _: Any) -> tuple[int, Any]:
        told: dict[str, Any] = {}
        for (_instance, model), ranks in self.mirrors.items():
            events = told.setdefault(f"{model}:default", {"events": []})["events"]
            for rank, mirror in ranks.items():
                mirror.step(0)
                for word, medium in (("device", "GPU"), ("host_pinned", "CPU_PINNED")):
                    if word == "host_pinned" and "no host" in self.faults:
                        continue
                    blocks = [{"block_hash": each % (1 << 64)} for each in mirror.hashes(medium, rank)]
                    event = {"dp_rank": rank, "data": {"stored": {"blocks": blocks}}}
                    events.append({"event": event, "storage_tier": word})
        return 200, told


@pytest.fixture
def indexer() -> Iterator[Callable[..., tuple[StandIn, str]]]:
    made: list[tuple[StandIn, Site]] = []

    def build(*faults: str) -> tuple[StandIn, str]:
        stand_in = StandIn(*faults)

        def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
            if path == "/workers":
                with stand_in.lock:
                    return 200, [
                        {"instance_id": instance, "model_name": model, **worker}
                        for (instance, model), worker in stand_in.workers.items()
                    ]
            return stand_in.answer(method, path, body)

        made.append((stand_in, Site(answer)))
        return stand_in, made[-1][1].url

    yield build
    for stand_in, site in made:
        site.__exit__()
        for key in list(stand_in.workers):
            stand_in.close(key)


PROVED = {
    "indexer": "ok",
    "indexer late join": "ok",
    "indexer live": "ok",
    "indexer namespaces": "ok",
    "indexer tiers": "ok",
    "indexer cleanup": "ok",
}


def test_an_indexer_that_follows_is_proved_and_left_as_it_was(
    daemon: Daemon, indexer: Callable[..., tuple[StandIn, str]]
) -> None:
    stand_in, url = indexer()
    stream = daemon.info["ranks"][0]["stream"]
    body = {"instance_id": 1, "model_name": "m", "block_size": 4, "dp_rank": 0, "endpoint": stream["endpoint"]}
    stand_in.register({**body, "replay_endpoint": stream["replay_endpoint"]})
    found = look(daemon, indexer=url)
    assert states(found) == RIGHT | PROVED | {"indexer instance 1 of m": "ok"}
    assert list(stand_in.workers) == [(1, "m")]


@pytest.mark.parametrize(
    ("fault", "check", "words"),
    [
        ("ill", "indexer", "status 503"),
        ("refuses", "indexer register", "bad endpoint"),
        ("no late join", "indexer late join", "it has 0 of 12 tokens"),
        ("deaf", "indexer live", "put just now"),
        ("mixes names up", "indexer namespaces", "match when it is asked for"),
        ("no host", "indexer tiers", "no CPU_PINNED blocks of rank 0"),
        ("never forgets", "indexer cleanup", "still there"),
    ],
)
def test_what_is_wrong_with_an_indexer_is_named(
    fault: str, check: str, words: str, daemon: Daemon, indexer: Callable[..., tuple[StandIn, str]]
) -> None:
    _, url = indexer(fault)
    found = look(daemon, indexer=url, timeout_s=QUICK_S)
    failures = {check: finding for check, finding in found.items() if finding.state == "failed"}
    assert next(iter(failures)) == check
    assert words in failures[check].detail
    assert failures[check].remedy


def test_a_registration_that_does_not_hear_of_us_is_named_with_its_cure(
    daemon: Daemon, indexer: Callable[..., tuple[StandIn, str]]
) -> None:
    stand_in, url = indexer("hangs")
    stream = daemon.info["ranks"][0]["stream"]
    for instance, size, model in ((1, 4, "m"), (2, 16, "n")):
        stand_in.register(
            {"instance_id": instance, "model_name": model, "block_size": size, "dp_rank": 0}
            | {key: stream[key] for key in ("endpoint", "replay_endpoint")}
        )
    found = look(daemon, indexer=url, timeout_s=QUICK_S)
    assert "does not hear of rank 0" in found["indexer instance 1 of m"].detail
    assert "unregister and register" in found["indexer instance 1 of m"].remedy
    assert "blocks of 16, and drops those of 4" in found["indexer instance 2 of n"].detail
    assert found["indexer cleanup"].state == "ok"


def test_what_is_no_indexer_is_said_to_be_none(daemon: Daemon) -> None:
    with Site(lambda *_: (200, {"hello": 1})) as site:
        found = look(daemon, indexer=site.url, timeout_s=QUICK_S)
    assert (found["indexer"].state, found["indexer"].remedy) == ("failed", "look what serves there")
