"""What the suite measures: cases of sides that run in turn, and what is said of each hot path beside its figures.

A side is a command whose last line is a row of JSON, run in a fresh process each time; or it is read from another
side's row, where one process measures two things in turn itself. The first side of a case is ours, and others are
compared with it. What stands in a table is a metric's: which field of a row it is may differ from side to side.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from sglcache.bench.paths import PATHS

Kind = Literal["ours", "peer", "floor"]
Where = Literal["module", "command", "peer"]  # python -m of ours; `sglcache bench`; a script of scripts/peers


class Metric(NamedTuple):
    """A figure of a row."""

    name: str
    title: str
    unit: str = "µs"
    more_is_better: bool = False
    compared: bool = True


class Side(NamedTuple):
    """Who does the work."""

    name: str
    kind: Kind
    where: Where = "module"
    words: tuple[str, ...] = ()
    source: str = ""  # of another side, whose rows it is read from; then there is no command
    fields: Mapping[str, str] = {}  # from a metric's name to the row's field, with dots; by default the same
    rounds: int | None = None  # at most so many; None: as many as the case has


class Case(NamedTuple):
    """Sides that do the same work."""

    name: str
    group: str  # the table that it stands in
    title: str
    metrics: tuple[Metric, ...]
    sides: tuple[Side, ...]
    rounds: int = 5
    slow: bool = False  # a quick run has it once
    same: tuple[str, ...] = ()  # fields in which all sides' rows agree, or they did other work


class Size(NamedTuple):
    """How much of it is done."""

    limit: int  # requests of the trace
    operations: int  # of a hot path
    rpc_pairs: int
    pairs: int  # that a command makes itself, in one process
    requests: int  # that a router is told of
    prompts: int  # that are stored and come back
    most_rounds: int
    slow_rounds: int  # at most so many of what is slow
    pages: tuple[tuple[int, bool], ...]  # page sizes, with events or not


FULL = Size(600, 2000, 5, 5, 400, 8, 7, 7, ((64, False), (64, True), (16, True), (1, True)))
QUICK = Size(150, 500, 2, 2, 100, 3, 2, 1, ((64, True),))
TINY = Size(20, 20, 1, 1, 8, 2, 1, 1, ((64, True),))  # for tests: what it says of speed is nothing


class Hot(NamedTuple):
    """One row of the table of hot paths."""

    title: str
    case: str
    metric: str
    floor: str  # what the floor is
    why: str  # what the gap is


HOT = (
    Hot(
        "acquire, 2,048 tokens cached",
        "acquire",
        "us",
        "one look-up, a comparison of 8 KiB, a copy of the page table",
        "a lease with its pins and limits, the reply's fields, and an order of eviction that keeps what is used",
    ),
    Hot(
        "commit of 2,048 tokens",
        "commit",
        "us",
        "tokens and slots copied, one entry in a table",
        "the walk to where the prompt branches off, a node with its cells and locks, the record of an event",
    ),
    Hot(
        "release",
        "release",
        "us",
        "an entry goes, another moves to the end of an order",
        "every node of the path is unlocked from the leaf up; who waits for room is looked at",
    ),
    Hot(
        "cut: a commit's event",
        "cut",
        "us",
        "xxh3_128 of each of 128 pages after the last one, ormsgpack of tokens and hashes",
        "slices of bounded length, tallies for the digest, the batch's frame and number",
    ),
    Hot(
        "a batch of 128 blocks into a mirror",
        "mirror",
        "us",
        "it is unpacked, tokens are packed, an entry for each block",
        "each block is checked against what it was told as, has a way from its parent, and counts in the digest",
    ),
    Hot(
        "a mirror's match of 128 blocks",
        "match",
        "us",
        "a look-up for each block, by parent and tokens",
        "ways with several hashes, a mask of the tiers for each block, a reply for each rank",
    ),
    Hot(
        "round trip: acquire and release",
        "rpc",
        "us",
        "the same four frames through a bare uvloop echo",
        "the section Round trip",
    ),
    Hot(
        "copy to the host, 64 MiB",
        "copy",
        "backup_gb_s",
        "memcpy in as many threads",
        "a run of pages at a time, not one piece",
    ),
    Hot(
        "copy to the device, 64 MiB",
        "copy",
        "load_gb_s",
        "memcpy in as many threads",
        "layer by layer, so that the first can be used early: pieces of 64 KiB",
    ),
    Hot(
        "load-back of 128 MiB, to its last layer",
        "load",
        "ms",
        "memcpy of as many bytes",
        "the acquire before it, and pieces of a layer of a page; the first layer is there long before",
    ),
    Hot(
        "third tier: put, a page of 256 KiB",
        "third",
        "put_us",
        "a bare file, written",
        "a header, two hashes, a rename, the index",
    ),
    Hot(
        "third tier: get, a page of 256 KiB",
        "third",
        "get_us",
        "a bare file, read",
        "every byte is hashed and compared",
    ),
)

LATENCY = Metric("us", "an operation")
INDEX = (
    Metric("total_us", "mean"),
    Metric("cpu_us", "CPU"),
    Metric("p50_us", "median request"),
    Metric("p99_us", "p99"),
    Metric("hit_rate", "hit rate", "", compared=False),
)
HITS = (
    Metric("store_ms", "stored: the runner goes on", "ms"),
    Metric("kept_ms", "stored: the host has it", "ms"),
    Metric("host_hit_ms", "hit on the host: all layers", "ms"),
    Metric("first_layer_ms", "hit on the host: first layer", "ms"),
    Metric("device_hit_ms", "hit on the device", "ms"),
)
ROUTER = (Metric("apply_us", "events, a block"), Metric("match_us", "a match of 128 blocks"))
THIRD = (Metric("put_us", "put, a page of 256 KiB"), Metric("get_us", "get, a page of 256 KiB"))


def cases(size: Size, trace: str) -> tuple[Case, ...]:
    """All of them, of this size, on this trace."""
    return (
        *(_path(name, size) for name in PATHS),
        Case(
            "rpc",
            "rpc",
            "acquire and release of 2,048 cached tokens, through the daemon",
            (LATENCY, Metric("p99_us", "p99"), Metric("waited_us", "an operation, the release waited for")),
            (
                Side(
                    "sglcache",
                    "ours",
                    "command",
                    ("rpc", "--pairs", str(size.rpc_pairs), "--json"),
                    fields={"us": "p50_us", "waited_us": "waited_p50_us"},
                ),
                Side(
                    "bare echo",
                    "floor",
                    source="sglcache",
                    fields={"us": "echo_p50_us", "p99_us": "echo_p99_us", "waited_us": "echo_p50_us"},
                ),
                Side(
                    "echo that spins as long as the index",
                    "floor",
                    source="sglcache",
                    fields={"us": "busy_echo_p50_us"},
                ),
            ),
            rounds=5,
        ),
        Case(
            "copy",
            "copy",
            "64 MiB between the tiers, in pages of 2 MiB",
            (
                Metric("backup_gb_s", "to the host", "GB/s", True),
                Metric("load_gb_s", "to the device", "GB/s", True),
            ),
            (
                Side(
                    "sglcache",
                    "ours",
                    "command",
                    ("copy", "--size", "64", "--pairs", str(size.pairs), "--json"),
                    fields={"backup_gb_s": "cases.0.backup.gb_s", "load_gb_s": "cases.0.load.gb_s"},
                ),
                Side(
                    "memcpy",
                    "floor",
                    source="sglcache",
                    fields={"backup_gb_s": "cases.0.backup.memcpy_gb_s", "load_gb_s": "cases.0.load.memcpy_gb_s"},
                ),
            ),
            rounds=3,
            slow=True,
        ),
        Case(
            "load",
            "load",
            "128 MiB that the host alone has, as a runner sees it",
            (Metric("ms", "last layer", "ms"), Metric("first_ms", "first layer", "ms")),
            (
                Side(
                    "sglcache",
                    "ours",
                    "command",
                    ("tiers", "--pairs", str(size.pairs), "--operations", "2", "--json"),
                    fields={"ms": "load_back.last_layer_ms", "first_ms": "load_back.first_layer_ms"},
                ),
                Side("memcpy", "floor", source="sglcache", fields={"ms": "load_back.memcpy_ms"}),
            ),
            rounds=3,
            slow=True,
        ),
        *(_index(size, trace, page, events) for page, events in size.pages),
        Case(
            "hits",
            "hits",
            "2,048 tokens of 16 KiB",
            HITS,
            (
                Side("sglcache", "ours", words=("sglcache.bench.beside", "hits", "--prompts", str(size.prompts))),
                Side("memcpy", "floor", source="sglcache", fields={"host_hit_ms": "memcpy_ms"}),
                Side(
                    "LMCache 0.5.6",
                    "peer",
                    "peer",
                    ("lmcache_server.py", "--prompts", str(size.prompts)),
                    # It answers once all is done: nothing comes earlier, and there is nothing that it shares in place.
                    fields={"kept_ms": "store_ms", "first_layer_ms": "host_hit_ms", "device_hit_ms": "host_hit_ms"},
                ),
            ),
            rounds=3,
            slow=True,
        ),
        Case(
            "router",
            "router",
            f"{size.requests} conversations of 128 blocks",
            ROUTER,
            (
                Side("sglcache", "ours", words=("sglcache.bench.beside", "mirror", "--requests", str(size.requests))),
                Side("Dynamo 1.6.1", "peer", "peer", ("dynamo_tree.py", "--requests", str(size.requests))),
                Side("Dynamo, hashes given", "peer", source="Dynamo 1.6.1", fields={"match_us": "find_us"}),
            ),
            same=("blocks",),
        ),
        Case(
            "third",
            "third",
            "64 MiB in pages of 256 KiB",
            THIRD,
            (
                Side("sglcache, files", "ours", words=("sglcache.bench.beside", "files", "--pairs", str(size.pairs))),
                Side(
                    "bare files",
                    "floor",
                    source="sglcache, files",
                    fields={"put_us": "put_floor_us", "get_us": "get_floor_us"},
                ),
                Side("Mooncake 0.3.13", "peer", "peer", ("mooncake_store.py", "--pairs", str(size.pairs))),
                Side(
                    "sglcache on Mooncake",
                    "ours",
                    source="Mooncake 0.3.13",
                    fields={"put_us": "ours_put_us", "get_us": "ours_get_us"},
                ),
            ),
            rounds=3,
            slow=True,
            same=("page_kib",),
        ),
    )


def _path(name: str, size: Size) -> Case:
    return Case(
        name,
        "paths",
        name,
        (LATENCY,),
        (
            Side(
                "sglcache",
                "ours",
                words=("sglcache.bench.paths", name, "--operations", str(size.operations)),
                fields={"us": "today_us"},
            ),
            Side("floor", "floor", source="sglcache", fields={"us": "floor_us"}),
        ),
    )


def _index(size: Size, trace: str, page: int, events: bool) -> Case:
    words = ("--trace", trace, "--limit", str(size.limit), "--page-size", str(page), *(["--events"] if events else ()))
    rust, python = (("sglang_tree.py", "--core", core, *words) for core in ("rust", "python"))
    return Case(
        f"index-{page}{'-events' if events else ''}",
        "index",
        f"page {page}, events {'on' if events else 'off'}",
        INDEX,
        (
            Side("sglcache", "ours", "command", ("index", *words, "--json")),
            Side("SGLang 0.5.23, Rust", "peer", "peer", rust),
            Side("SGLang 0.5.23, Python", "peer", "peer", python, rounds=3),
        ),
        rounds=5 if page > 1 else 3,
        slow=True,
        same=("requests", "page_size", "events"),
    )
