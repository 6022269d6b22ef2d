"""The third tier beside what it stands on: the file store beside bare files of the same bytes, and Mooncake beside its
client's own put and get, from the same pages of host memory.

Both in turn in one run; a ratio above 1 means that ours takes longer. Bare files are written and read as a program
would that knows nothing of pages: open, one write or read of the payload, close, a new name each time; both sides
use the page cache, and nothing is synced. Ours beyond it: a header, its hash and the payload's, a rename, and the
index. The client's own calls are batches of the same size with the payload alone, in this process; ours cross to the
process that has the client in it, and check.
"""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sglcache.bench.harness import BenchError, Comparison, Row
from sglcache.core.effects import Run
from sglcache.core.hashing import hasher
from sglcache.core.key import ROOT
from sglcache.storage.disk import Disk
from sglcache.storage.file import FileStore
from sglcache.storage.host import HostPages
from sglcache.storage.mooncake import MooncakeStore
from sglcache.storage.mooncake_words import Options as MooncakeOptions
from sglcache.storage.page import Identity
from sglcache.storage.store import Store

T = TypeVar("T")

PAGE_SIZE = 64  # tokens
CONNECT_S = 30.0


class Options(NamedTuple):
    """What `bench storage` is told."""

    page_bytes: tuple[int, ...] = (64 << 10, 256 << 10, 2 << 20)
    total_bytes: int = 64 << 20  # of a run, each time
    pairs: int = 7
    folder: Path | None = None
    master: str | None = None  # of Mooncake; without it the file store alone is measured


def run(options: Options) -> Row:
    """For each page size and store: seconds of put and get of one run, ours over theirs, and bytes a second."""
    rows = []
    folder = Path(tempfile.mkdtemp(prefix="sglcache-bench-", dir=options.folder))
    try:
        for page_bytes in options.page_bytes:
            rows.append({"store": "file", "page_bytes": page_bytes, **_file(options, page_bytes, folder)})
        if options.master is not None:
            for page_bytes in options.page_bytes:
                rows.append({"store": "mooncake", "page_bytes": page_bytes, **_mooncake(options, page_bytes)})
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {"total_bytes": options.total_bytes, "pairs": options.pairs, "cases": rows}


def _never() -> bool:
    return False


def _pages(num_pages: int, page_bytes: int) -> HostPages:
    fd = os.memfd_create("bench", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_pages * page_bytes)
    region = mmap.mmap(fd, num_pages * page_bytes)
    block = os.urandom(1 << 20)
    for at in range(0, len(region), len(block)):
        region[at : at + len(block)] = block[: len(region) - at]
    return HostPages.page_first(num_pages, [memoryview(region)], [fd])


def _identity(page_bytes: int) -> Identity:
    return Identity(
        model=f"bench-{os.getpid()}-{time.monotonic_ns()}",
        dtype="float16",
        layout="page_first",
        page_size=PAGE_SIZE,
        num_layers=1,
        payload_bytes=page_bytes,
    )


def _run(number: int, num_pages: int) -> Run:
    first = number * num_pages * PAGE_SIZE
    tokens = b"".join(token.to_bytes(4, "little") for token in range(first, first + num_pages * PAGE_SIZE))
    return Run(ROOT, None, hasher("xxh3_128").chain(b"", tokens, PAGE_SIZE * 4), tokens)


def _compare(
    store: Store,
    options: Options,
    num_pages: int,
    page_bytes: int,
    put: Callable[[int], None],
    get: Callable[[int], None],
) -> Row:
    """Pairs of ours and theirs, each on bytes that are new to the store."""
    times: dict[str, list[float]] = {name: [] for name in ("put", "get", "their put", "their get")}
    slots = range(num_pages)

    def timed(name: str, call: Callable[..., T], *words: Any) -> T:
        started = time.perf_counter()
        result = call(*words)
        times[name].append(time.perf_counter() - started)
        return result

    for number in range(options.pairs + 1):
        it = _run(number, num_pages)
        stored = timed("put", store.put, it, slots, _never)
        timed("their put", put, number)
        found = timed("get", store.get, it, slots, _never)
        timed("their get", get, number)
        if stored.new_pages != num_pages or found.num_pages != num_pages:
            raise BenchError(f"{store.name}: {stored.new_pages} of {num_pages} pages stored, {found.num_pages} found")
    row: Row = {"pages": num_pages}
    for name in ("put", "get"):
        ours, theirs = times[name][1:], times[f"their {name}"][1:]  # the first is the warm-up
        ratio = Comparison.of(theirs, ours)
        row[f"{name}_ratio"] = round(ratio.ratio, 3)
        row[f"{name}_pairs"] = [round(ratio.least, 3), round(ratio.most, 3)]
        row[f"{name}_gb_s"] = round(num_pages * page_bytes / statistics.median(ours) / 1e9, 3)
        row[f"{name}_us_a_page_beyond"] = round(
            (statistics.median(ours) - statistics.median(theirs)) / num_pages * 1e6, 1
        )
    return row


def _file(options: Options, page_bytes: int, folder: Path) -> Row:
    num_pages = max(1, options.total_bytes // page_bytes)
    pages, disk, raw = _pages(num_pages, page_bytes), Disk(), folder / "raw"
    store = FileStore(folder / "ours", _identity(page_bytes), pages, max_bytes=1 << 50)
    store.open()
    raw.mkdir()
    views = [pages.views(slot) for slot in range(num_pages)]

    def put(number: int) -> None:
        for slot, view in enumerate(views):
            disk.write(f"{raw}/{number}-{slot}", view)

    def get(number: int) -> None:
        for slot, view in enumerate(views):
            disk.read(f"{raw}/{number}-{slot}", view)

    try:
        return _compare(store, options, num_pages, page_bytes, put, get)
    finally:
        store.close()
        os.close(pages.fds[0])
        for name in ("ours", "raw"):
            shutil.rmtree(folder / name)


def _mooncake(options: Options, page_bytes: int) -> Row:
    import ctypes

    import mooncake.store

    assert options.master is not None
    num_pages = max(1, options.total_bytes // page_bytes)
    pages = _pages(num_pages, page_bytes)
    identity = _identity(page_bytes)
    room = 2 * (options.pairs + 2) * options.total_bytes
    words = MooncakeOptions(master=options.master, segment_bytes=room)
    store = MooncakeStore(words, identity, pages)
    theirs = mooncake.store.MooncakeDistributedStore()
    if code := theirs.setup("127.0.0.1", "P2PHANDSHAKE", room, 64 << 20, "tcp", "", options.master):
        raise BenchError(f"Mooncake's client could not be set up at {options.master}: {code}")
    base = ctypes.addressof(ctypes.c_char.from_buffer(pages.regions[0]))
    theirs.register_buffer(base, pages.regions[0].nbytes)
    store.open()
    batch = store.batch_pages

    def each(number: int, call: Callable[..., list[int]], right: int) -> None:
        for first in range(0, num_pages, batch):
            slots = range(first, min(first + batch, num_pages))
            keys = [f"{identity.model}-{number}-{slot}" for slot in slots]
            codes = call(keys, [base + slot * page_bytes for slot in slots], [page_bytes] * len(keys))
            if set(codes) != {right}:
                raise BenchError(f"Mooncake's own call gave {sorted(set(codes))}")

    try:
        until = time.monotonic() + CONNECT_S
        while not store.stats().connected:
            if time.monotonic() > until:
                raise BenchError(f"no Mooncake master at {options.master}")
            time.sleep(0.05)
        return _compare(
            store,
            options,
            num_pages,
            page_bytes,
            lambda number: each(number, theirs.batch_put_from, 0),
            lambda number: each(number, theirs.batch_get_into, page_bytes),
        )
    finally:
        store.close()
        theirs.close()
        os.close(pages.fds[0])
