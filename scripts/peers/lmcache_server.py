#!/usr/bin/env python3
"""LMCache's server on a CPU: the peer of `python -m sglcache.bench.beside hits`, in one row of JSON.

    .venv-peers/bin/python scripts/peers/lmcache_server.py --tokens 2048 --layers 4

Starts `lmcache server` on the loopback with its tier in host memory, and attaches as an engine does by the client that
LMCache has for its own benchmark, in `--mode cpu`: client and server share memory for their chunks (256 tokens), and
the client copies between these and the engine's tensors. `store_ms`: until the server has a prompt. `lookup_ms`: until
it says how much it has; its answer is polled for, here without the pause of 50 ms that LMCache's benchmark makes.
`host_hit_ms`: lookup and retrieve, until every byte is in the engine's tensors, which had been cleared. Every hit's
bytes are compared.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from importlib.metadata import version
from pathlib import Path

warnings.filterwarnings("ignore")
os.environ |= {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_DISABLE_BANNER": "1"}
os.environ.setdefault("OMP_NUM_THREADS", "1")  # with two on two cores torch's helpers spin: forty times slower
sys.path.insert(0, str(Path(__file__).parents[2]))

from sglcache.bench.beside import HitOptions, parsed  # noqa: E402

START_S, STOP_S = 90.0, 15.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end_with_parent() -> None:
    """Of the process that is about to be started: whatever ends this one ends it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Server:
    """`lmcache server` with one GiB more than what is stored."""

    def __init__(self, gib: float) -> None:
        self.port, self.http_port = free_port(), free_port()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        words = [str(Path(sys.executable).with_name("lmcache")), "server", "--host", "127.0.0.1", "--port"]
        words += [str(self.port), "--http-host", "127.0.0.1", "--http-port", str(self.http_port)]
        words += ["--l1-size-gb", str(gib), "--no-l1-use-lazy", "--eviction-policy", "LRU"]
        words += ["--supported-transfer-mode", "auto", "--shm-name", f"sglcache_bench_{os.getpid()}"]
        self.process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, preexec_fn=end_with_parent
        )

    def wait(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.http_port)) == 0:
                    return
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.log.seek(0)
                raise SystemExit(f"lmcache server did not start: {self.log.read().decode(errors='replace')[-1500:]}")
            time.sleep(0.05)

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def run(options: HitOptions) -> dict[str, object]:
    num_bytes = options.tokens * options.token_bytes
    server = Server(1 + (options.prompts + 1) * num_bytes / 2**30)
    try:
        # While it starts: this loads torch.
        from lmcache.cli.commands.bench.server_bench import helpers
        from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
        from lmcache.cli.commands.bench.server_bench.config import BenchConfig

        server.wait()
        blocks = (options.prompts + 2) * options.tokens // options.page_size
        shape = f"(2,{blocks},{options.page_size},{options.kv_heads},{options.head_dim}):float16:{options.layers}"
        config = BenchConfig(
            rpc_url=f"tcp://127.0.0.1:{server.port}",
            http_url=f"http://127.0.0.1:{server.http_port}",
            mode="cpu",
            transfer_mode="auto",
            tp_size=1,
            use_mla=False,
            num_tokens=options.tokens - 1,  # it puts one before them
            kvcache_shape_spec=shape,
            num_blocks=blocks,
            block_size=options.page_size,
        )
        poll = helpers._poll_prefetch_status
        helpers._poll_prefetch_status = lambda client, request: poll(client, request, 100_000, 0.0)
        client = ServerBenchClient(config, lambda _: None)
        client.start()
        try:
            return measure(client, options, num_bytes)
        finally:
            client.close()
    finally:
        server.close()


def measure(client: object, options: HitOptions, num_bytes: int) -> dict[str, object]:
    clock = time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in ("store_ms", "lookup_ms", "retrieve_ms", "host_hit_ms")}
    sums = []
    for number in range(options.prompts + 1):
        request = client.create_request(number, f"store-{number}", "cold")
        length = request.num_full_tokens
        if length != options.tokens:
            raise SystemExit(f"of {options.tokens} tokens LMCache takes {length}: give a multiple of its chunk")
        if client.lookup(request).hit_chunks:
            raise SystemExit(f"prompt {number} is there already")
        sums.append(client.compute_checksums(request, 0, length))
        start = clock()
        stored = client.store(request, 0, length)
        if number:  # the first is for nothing
            times["store_ms"].append(clock() - start)
        if not stored.succeeded:
            raise SystemExit(f"prompt {number} was not stored")
        client.end_session(request)
    for warm in (True, False):
        for number in range(options.prompts + 1):
            request = client.create_request(number, f"hit-{number}-{warm}", "warm")
            client.zero_destination(request, 0, options.tokens)
            start = clock()
            found = client.lookup(request)
            told = clock()
            got = client.retrieve(request, 0, options.tokens)
            end = clock()
            right = found.is_full_hit and got.succeeded
            if not right or client.compute_checksums(request, 0, options.tokens) != sums[number]:
                raise SystemExit(f"prompt {number} did not come back: {found}, {got}")
            client.end_session(request)
            if not warm:
                times["lookup_ms"].append(told - start)
                times["retrieve_ms"].append(end - told)
                times["host_hit_ms"].append(end - start)
    row = {name: statistics.median(each) * 1e3 for name, each in times.items()}
    rate = num_bytes / row["host_hit_ms"] / 1e6
    return {"system": f"lmcache-{version('lmcache')}", "mib": num_bytes / 2**20, **row, "host_gb_s": rate}


if __name__ == "__main__":
    print(json.dumps(run(parsed(HitOptions, sys.argv[1:]))))
