"""What peers are measured beside, one journey each, on the same work as their scripts in `scripts/peers`.

    python -m sglcache.bench.beside mirror|hits|files [--option value]

prints one row of JSON, as those scripts do. They import the options and the prompts from here, so that both sides do
the same: nothing at the top of this file needs more than numpy.

**mirror**, beside Dynamo's RadixTree: a router's picture is told of conversations and asked for them.
**hits**, beside LMCache's server: a prompt's KV is made and kept, and comes back to a runner.
**files**, beside Mooncake's client: pages to the third tier and back.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Row = dict[str, Any]
Tokens = npt.NDArray[np.uint32]

SHARED_BY = 4  # conversations that begin alike
WAIT_S = 60.0


class MirrorOptions(NamedTuple):
    """Of `mirror`."""

    requests: int = 400
    tokens: int = 2048
    page_size: int = 16


class HitOptions(NamedTuple):
    """Of `hits`: a model of so many layers in float16, 16 KiB a token by default."""

    tokens: int = 2048
    prompts: int = 6
    page_size: int = 16
    layers: int = 4
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


class FileOptions(NamedTuple):
    """Of `files`."""

    page_kib: int = 256
    total_mib: int = 64
    pairs: int = 3


def conversations(options: MirrorOptions) -> Iterator[Tokens]:
    """Prompts of whole blocks, of which each few have their first half in common."""
    rng = np.random.default_rng(0)
    length = options.tokens // options.page_size * options.page_size
    half = length // 2
    shared = np.zeros(half, np.uint32)
    for number in range(options.requests):
        if number % SHARED_BY == 0:
            shared = rng.integers(0, 128_000, half, dtype=np.uint32)
        yield np.concatenate([shared, rng.integers(0, 128_000, length - half, dtype=np.uint32)])


# -- mirror -------------------------------------------------------------------------------------------


CALLS = 5  # a prompt is asked for so often; the median counts


def mirror(options: MirrorOptions) -> Row:
    """The index tells of the conversations, request by request, and a picture is built of the bytes of its batches."""
    from sglcache.bench.index import Driver
    from sglcache.client.picture import Picture
    from sglcache.core.effects import Publish
    from sglcache.core.index import Index, IndexConfig
    from sglcache.wire.events import decode_batch

    prompts = [prompt.tobytes() for prompt in conversations(options)]
    num_pages = sum(map(len, prompts)) // 4 // options.page_size
    driver = Driver(Index(IndexConfig(options.page_size, num_pages)))
    for prompt in prompts:
        lease = driver.acquire(prompt).lease
        driver.commit_whole(lease)
        driver.release(lease)
        driver.cut()
    batches = [each for each in driver.effects if isinstance(each, Publish)]
    blocks = sum(batch.num_blocks for batch in batches)
    clock = time.perf_counter
    picture = Picture()
    started = clock()
    for batch in batches:
        for event in decode_batch(batch.payload).events:
            picture.apply(event, 0)
    applied = clock() - started
    matches = []
    for prompt in prompts:
        times = []
        for _ in range(CALLS):
            start = clock()
            match = picture.longest_match(prompt)
            times.append(clock() - start)
        assert match[0].tokens * 4 == len(prompt), "everything is told of"
        matches.append(statistics.median(times))
    return {
        "system": "sglcache",
        "blocks": blocks,
        "events": sum(batch.num_events for batch in batches),
        "event_bytes": sum(len(batch.payload) for batch in batches),
        "apply_us": applied / blocks * 1e6,
        "blocks_per_s": blocks / applied,
        "match_us": statistics.median(matches) * 1e6,
    }


# -- hits ---------------------------------------------------------------------------------------------


def hits(options: HitOptions) -> Row:
    """Through a daemon of its own, with room for two prompts on the device and for all on the host.

    `store_ms`: the commit, which is all that a runner waits for, its KV being where it belongs. `kept_ms`: until the
    host has a copy of it. `device_hit_ms`: from the acquire until every layer may be read, on the device, in place.
    `host_hit_ms`: the same of a prompt that the host alone has, so that every byte is copied; `first_layer_ms`: until
    its first layer may be read. Of each hit all bytes are looked at, outside of the time. `memcpy_ms`: of as many
    bytes, in this process.
    """
    from sglcache.bench.daemon import Daemon
    from sglcache.bench.harness import BenchError
    from sglcache.client import Client

    page = options.page_size
    length = options.tokens // page * page
    settings = {
        "pool.page_size": page,
        "pool.num_tokens": 2 * length,
        "pool.num_layers": options.layers,
        "pool.num_kv_heads": options.kv_heads,
        "pool.head_dim": options.head_dim,
        "host.num_tokens": (options.prompts + 2) * length,
        "host.populate": "true",
    }
    clock = time.perf_counter
    times: dict[str, list[float]] = {
        name: []
        for name in (
            "store_ms",
            "kept_ms",
            "device_hit_ms",
            "host_hit_ms",
            "first_layer_ms",
            "lookup_ms",
            "memcpy_ms",
        )
    }
    num_bytes = length * options.token_bytes
    one, other = (np.ones(num_bytes, np.uint8) for _ in range(2))
    prompts = [np.arange(length, dtype=np.uint32) + (number << 16) for number in range(options.prompts + 1)]
    with Daemon([f"{key}={value}" for key, value in settings.items()]) as daemon:
        daemon.wait_healthy()
        with Client(daemon.socket) as client:
            if client.geometry.page_bytes * (length // page) != num_bytes:
                raise BenchError(f"a page has {client.geometry.page_bytes} bytes; a peer's would have other ones")
            client.pool.array[:] = 0
            _until(lambda: all(m["ready_bytes"] >= m["bytes"] for m in client.status()["memory"].values()))
            for number, prompt in enumerate(prompts):
                with client.acquire(prompt) as lease:
                    lease.wait_loaded()
                    client.pool.array[lease.slots] = number + 1
                    start = clock()
                    lease.commit()
                    stored = clock()
                    _until(lambda: not client.status()["gauges"]["num_copies"])
                    kept = clock()
                    lease.release(wait=True)
                if number:  # the first is for nothing
                    times["store_ms"].append(stored - start)
                    times["kept_ms"].append(kept - start)
            for warm in (True, False):
                for number, prompt in enumerate(prompts):  # the one that was used the longest ago: on the host alone
                    start = clock()
                    lease = client.acquire(prompt)
                    answer = clock()
                    if lease.host_tokens != length:
                        raise BenchError(f"{lease.host_tokens} of {length} tokens are on the host alone: {lease}")
                    lease.wait_loaded(0)
                    first = clock()
                    lease.wait_loaded()
                    last = clock()
                    if not (client.pool.array[lease.slots] == number + 1).all():
                        raise BenchError(f"prompt {number} came back from the host as something else")
                    lease.release(wait=True)
                    again = clock()
                    lease = client.acquire(prompt)
                    lease.wait_loaded()
                    there = clock()
                    if lease.host_tokens or not (client.pool.array[lease.slots] == number + 1).all():
                        raise BenchError(f"prompt {number} is not on the device as it was")
                    lease.release(wait=True)
                    copied = clock()
                    ctypes.memmove(other.ctypes.data, one.ctypes.data, num_bytes)
                    if not warm:
                        times["memcpy_ms"].append(clock() - copied)
                        times["lookup_ms"].append(answer - start)
                        times["first_layer_ms"].append(first - start)
                        times["host_hit_ms"].append(last - start)
                        times["device_hit_ms"].append(there - again)
    row = {name: statistics.median(each) * 1e3 for name, each in times.items()}
    return {"system": "sglcache", "mib": num_bytes / 2**20, **row, "host_gb_s": num_bytes / row["host_hit_ms"] / 1e6}


def _until(done: Any) -> None:
    from sglcache.bench.harness import BenchError

    deadline = time.monotonic() + WAIT_S
    while not done():
        if time.monotonic() > deadline:
            raise BenchError(f"the daemon did not come so far within {WAIT_S:.0f} s")
        time.sleep(0.0005)


# -- files --------------------------------------------------------------------------------------------


def files(options: FileOptions) -> Row:
    """The file store's put and get, beside bare files (the floor), as `bench storage`."""
    from sglcache.bench import storage

    words = storage.Options((options.page_kib << 10,), options.total_mib << 20, options.pairs)
    case = storage.run(words)["cases"][0]
    return {"system": "sglcache", **storage_row(case)}


def storage_row(case: Row) -> Row:
    """A case of `bench storage`: µs a page, ours and what it stands on."""
    page = case["page_bytes"]
    row: Row = {"page_kib": page >> 10}
    for name in ("put", "get"):
        ours = page / case[f"{name}_gb_s"] / 1e3
        row[f"{name}_us"] = ours
        row[f"{name}_floor_us"] = ours / case[f"{name}_ratio"]
    return row


JOURNEYS: dict[str, tuple[Any, Any]] = {
    "mirror": (mirror, MirrorOptions),
    "hits": (hits, HitOptions),
    "files": (files, FileOptions),
}


def parsed(options: Any, words: Sequence[str]) -> Any:
    """A NamedTuple of ints, from the words of a command line."""
    parser = argparse.ArgumentParser()
    for name, value in options()._asdict().items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    return options(**vars(parser.parse_args(words)))


def main(words: Sequence[str]) -> None:
    run, options = JOURNEYS[words[0]]
    print(json.dumps(run(parsed(options, words[1:]))))


if __name__ == "__main__":
    main(sys.argv[1:])
