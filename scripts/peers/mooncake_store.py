#!/usr/bin/env python3
"""Mooncake's client, and our store on it: the peer of `python -m sglcache.bench.beside files`, in one row of JSON.

    .venv-peers/bin/python scripts/peers/mooncake_store.py --page-kib 256

Starts `mooncake_master` on the loopback and runs `bench storage` against it: `put_us` and `get_us` are its own client's
batches, a page; `ours_put_us` and `ours_get_us` those of sglcache's store on it, whose client has a process of its own,
and which puts a header before each page and checks every byte. By TCP in one machine: nothing here is RDMA.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHIM = Path(sys.prefix) / "loopback.so"
START_S = 60.0
if "LOOPBACK_MAPPED" not in os.environ:  # the client binds every interface, and has no option for it
    if not SHIM.exists():
        raise SystemExit(f"{SHIM} is missing: run scripts/peers.sh with a C compiler at hand")
    os.environ |= {"LD_PRELOAD": str(SHIM), "LOOPBACK_MAPPED": "1", "GLOG_minloglevel": "2", "MC_LOG_LEVEL": "ERROR"}
    os.environ["PYTHONPATH"] = str(ROOT)  # for the process with the client in it as well
    os.execv(sys.executable, [sys.executable, *sys.argv])

from sglcache.bench import storage  # noqa: E402
from sglcache.bench.beside import FileOptions, parsed, storage_row  # noqa: E402


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end_with_parent() -> None:
    """Of the process that is about to be started: whatever ends this one ends it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def run(options: FileOptions) -> dict[str, object]:
    port = free_port()
    words = [sys.executable, "-m", "mooncake.cli", f"--rpc_port={port}", "--rpc_address=127.0.0.1"]
    words += [f"--metrics_port={free_port()}", "--metrics_host=127.0.0.1"]
    with tempfile.TemporaryFile() as log:
        master = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=end_with_parent)
        try:
            deadline = time.monotonic() + START_S
            while True:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                if master.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise SystemExit(f"mooncake_master did not start: {log.read().decode(errors='replace')[-1500:]}")
                time.sleep(0.05)
            case = storage.run(
                storage.Options(
                    (options.page_kib << 10,), options.total_mib << 20, options.pairs, None, f"127.0.0.1:{port}"
                )
            )["cases"][-1]
        finally:
            master.send_signal(signal.SIGKILL)  # it has nothing to keep
            master.wait()
    row = storage_row(case)
    return {
        "system": f"mooncake-{version('mooncake-transfer-engine-non-cuda')}",
        "page_kib": row["page_kib"],
        **{f"{name}_us": row[f"{name}_floor_us"] for name in ("put", "get")},
        **{f"ours_{name}_us": row[f"{name}_us"] for name in ("put", "get")},
    }


if __name__ == "__main__":
    row = json.dumps(run(parsed(FileOptions, sys.argv[1:])))
    sys.stdout.write(row + "\n")
    sys.stdout.flush()
    os._exit(0)  # its client's threads are not waited for
