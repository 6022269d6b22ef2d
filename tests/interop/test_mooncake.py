"""The real Mooncake store: a master, clients in processes of their own, TCP on loopback. What dies costs misses."""

from __future__ import annotations

import ipaddress
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import consumers
import pytest
from consumers import PYTHON, ROOT, eventually, listening
from mooncakes import WAIT_S, Master, client_environment, site_packages

from sglcache.core.effects import Run
from sglcache.core.hashing import hasher
from sglcache.core.key import ROOT as PLAIN
from sglcache.core.key import Namespace
from sglcache.storage.engine import NO_TICKET, Done, Engine
from sglcache.storage.host import HostPages, Piece
from sglcache.storage.mooncake import MooncakeStore
from sglcache.storage.mooncake_words import Options
from sglcache.storage.page import Identity

pytestmark = pytest.mark.interop

PAGE = 4  # tokens
NUM_PAGES = 32
PIECE = 24 << 10


def memory() -> HostPages:
    """Two shards, each a memfd of pages of two pieces."""
    fds, regions = [], []
    for shard in range(2):
        fd = os.memfd_create(f"test-{shard}", os.MFD_CLOEXEC)
        os.ftruncate(fd, NUM_PAGES * PIECE * 2)
        fds.append(fd)
        regions.append(memoryview(mmap.mmap(fd, NUM_PAGES * PIECE * 2)))
    pieces = [Piece(shard, half * NUM_PAGES * PIECE, PIECE, PIECE) for shard in range(2) for half in range(2)]
    return HostPages(NUM_PAGES, regions, pieces, fds)


def identity(**changes: Any) -> Identity:
    words = {"model": "m", "dtype": "float16", "layout": "layer_first", "page_size": PAGE, "num_layers": 2}
    return Identity(**{**words, "payload_bytes": 4 * PIECE, **changes})


def run(first: int, num_pages: int, namespace: Namespace = PLAIN) -> Run:
    from sglcache.core.hashing import seed

    tokens = b"".join(token.to_bytes(4, "little") for token in range(first, first + num_pages * PAGE))
    return Run(namespace, None, hasher("xxh3_128").chain(seed(namespace), tokens, 4 * PAGE), tokens)


def slots(num_pages: int) -> bytes:
    return b"".join(slot.to_bytes(4, "little") for slot in range(num_pages))


def fill(pages: HostPages, seed: int) -> list[bytes]:
    """Random bytes in every page; these."""
    import random

    rng = random.Random(seed)
    for region in pages.regions:
        region[:] = rng.randbytes(region.nbytes)
    return contents(pages)


def contents(pages: HostPages) -> list[bytes]:
    return [b"".join(pages.views(slot)) for slot in range(pages.num_pages)]


class Desk:
    """A rank's storage part with the real client behind it."""

    def __init__(self, master: Master, shim: Path, *, who: Identity | None = None, **options: Any) -> None:
        self.pages = memory()
        self.store = MooncakeStore(
            Options(master=master.address, segment_bytes=options.pop("segment_bytes", 64 << 20), buffer_bytes=16 << 20),
            who or identity(),
            self.pages,
            env=client_environment(shim),
            **options,
        )
        self.store.open()
        self.done: Queue[Done] = Queue()
        self.engine = Engine(self.store, self.done.put)
        self.ticket = 0

    def connected(self, wanted: bool = True) -> bool:
        return eventually(lambda: self.store.stats().connected == wanted, WAIT_S)

    def begin(self, what: str, it: Run) -> int:
        self.ticket += 1
        words = (it,) if what == "probe" else (it, slots(len(it.digests) // 16))
        getattr(self.engine, what)(self.ticket, *words)
        return self.ticket

    def next(self) -> Done:
        return self.done.get(timeout=WAIT_S)

    def do(self, what: str, it: Run) -> Done:
        ticket = self.begin(what, it)
        done = self.next()
        assert (done.ticket, done.kind, done.error) == (ticket, what, None)
        return done

    def pid(self) -> int:
        assert self.store._process is not None
        return self.store._process.pid

    def close(self) -> None:
        assert self.engine.close(WAIT_S)
        for fd in self.pages.fds:
            os.close(fd)


@pytest.fixture
def desk(master: Master, shim: Path) -> Iterator[Desk]:
    made = Desk(master, shim)
    assert made.connected()
    yield made
    made.close()


def again(desk: Desk, it: Run) -> bool:
    """Whether the run is stored and comes back."""
    num_pages = len(it.digests) // 16
    return desk.do("store", it).mask.count(1) == desk.do("fetch", it).num_pages == num_pages


def test_what_one_puts_another_gets_with_equal_bytes(desk: Desk, master: Master, shim: Path) -> None:
    it = run(0, 20)
    put = fill(desk.pages, 1)
    assert desk.do("probe", it).num_pages == 0
    done = desk.do("store", it)
    assert (done.num_pages, done.mask, done.reason) == (20, b"\1" * 20, None)
    other = Desk(master, shim)
    assert other.connected()
    assert other.do("probe", run(0, 24)).num_pages == 20
    done = other.do("fetch", run(0, 24))
    assert (done.num_pages, done.reason) == (20, "missing")
    assert contents(other.pages)[:20] == put[:20]
    # What is there is not put again: the second's bytes would be others.
    fill(other.pages, 2)
    done = other.do("store", run(0, 24))
    assert (done.num_pages, done.mask) == (4, b"\1" * 24)
    assert desk.do("fetch", it).num_pages == 20
    assert contents(desk.pages)[:20] == put[:20]
    other.close()


def test_namespaces_and_identities_share_nothing(desk: Desk, master: Master, shim: Path) -> None:
    fill(desk.pages, 1)
    desk.do("store", run(0, 4))
    assert desk.do("probe", run(0, 4, Namespace(None, None, "s"))).num_pages == 0
    lie = run(0, 4)._replace(tokens=run(99, 4).tokens)
    assert desk.do("fetch", lie)[2:] == (0, b"", b"", "foreign", None)
    other = Desk(master, shim, who=identity(model="other"))
    assert other.connected()
    assert other.do("probe", run(0, 4)).num_pages == 0
    other.do("store", run(0, 4))
    other.engine.clear(99)
    other.next()
    assert other.do("probe", run(0, 4)).num_pages == 0
    assert desk.do("fetch", run(0, 4)).num_pages == 4
    other.close()


def test_a_damaged_object_is_a_miss_and_is_thrown_away(desk: Desk, master: Master, tmp_path: Path) -> None:
    """Another client, which knows nothing of headers, puts a page of ours with a flipped bit, and one too short."""
    put = fill(desk.pages, 1)
    it = run(0, 4)
    desk.do("store", it)
    key = f"sglcache-{identity().fingerprint.hex()}-"
    digests = [it.digests[at : at + 16] for at in range(0, 64, 16)]
    program = """
import os, sys
import mooncake.store
store = mooncake.store.MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", sys.argv[1]) == 0
for key, how in ((sys.argv[2], "flip"), (sys.argv[3], "cut")):
    value = bytearray(store.get(key))
    assert value
    value[-1] ^= 1
    assert store.remove(key, True) == 0
    assert store.put(key, bytes(value if how == "flip" else value[:-8])) == 0
print("done", flush=True)
os._exit(0)
"""
    words = [sys.executable, "-c", program, master.address, key + digests[2].hex(), key + digests[3].hex()]
    env = {**os.environ, "PYTHONPATH": str(site_packages())}
    subprocess.run(words, env=env, check=True, capture_output=True, timeout=WAIT_S)
    for page, reason in ((2, "corrupt"), (3, "short")):
        done = desk.do("fetch", it)
        assert (done.num_pages, done.reason) == (page, reason)
        assert desk.next() == Done(NO_TICKET, "discard", 0)
        fill(desk.pages, 1)
        assert desk.do("store", it).num_pages == 1
    assert desk.do("fetch", it).num_pages == 4
    assert contents(desk.pages)[:4] == put[:4]


def test_a_master_that_dies_costs_misses_until_it_is_back(desk: Desk, master: Master) -> None:
    put = fill(desk.pages, 1)
    desk.do("store", run(0, 8))
    master.kill()
    for what in ("fetch", "store", "probe"):
        done = desk.do(what, run(0, 8))
        assert done.num_pages == 0
        assert done.reason == (None if what == "probe" else "failed")
    assert desk.connected(False)
    started = time.monotonic()
    for _ in range(50):
        assert desk.do("fetch", run(0, 8)).reason == "failed"
    assert time.monotonic() - started < 5  # at once, while it is known to be away
    master.start()
    assert desk.connected()
    # The index was the master's; the pages are put again.
    assert eventually(lambda: desk.do("store", run(0, 8)).mask == b"\1" * 8, WAIT_S)
    put = contents(desk.pages)
    assert desk.do("fetch", run(0, 8)).num_pages == 8
    assert contents(desk.pages)[:8] == put[:8]


def test_a_rank_that_starts_before_its_master_finds_it(master: Master, shim: Path) -> None:
    master.kill()
    desk = Desk(master, shim)
    assert desk.do("fetch", run(0, 4)).reason == "failed"
    master.start()
    assert desk.connected()
    fill(desk.pages, 1)
    assert eventually(lambda: desk.do("store", run(0, 4)).mask == b"\1" * 4, WAIT_S)
    desk.close()


def test_a_master_that_hangs_costs_misses_and_no_page(master: Master, shim: Path) -> None:
    desk = Desk(master, shim, rpc_timeout_s=1.0)
    assert desk.connected()
    put = fill(desk.pages, 1)
    desk.do("store", run(0, 8))
    master.signal(signal.SIGSTOP)
    for what in ("fetch", "store", "probe"):
        desk.begin(what, run(0 if what == "fetch" else 1000, 8))
    gaps = beats(lambda: [desk.next() for _ in range(3)])
    assert all(done.num_pages == 0 and done.error is None for done in gaps.result)
    assert gaps.longest_s < 2.0  # the interpreter was never held
    assert desk.connected(False)
    master.signal(signal.SIGCONT)
    assert desk.connected()
    assert desk.do("fetch", run(0, 8)).num_pages == 8
    assert contents(desk.pages)[:8] == put[:8]
    assert desk.store._lives == 1
    desk.close()


def test_a_client_that_hangs_is_ended_and_writes_into_no_slot_any_more(master: Master, shim: Path) -> None:
    desk = Desk(master, shim, rpc_timeout_s=0.3)
    assert desk.connected()
    fill(desk.pages, 1)
    desk.do("store", run(0, 8))
    pid = desk.pid()
    os.kill(pid, signal.SIGSTOP)
    for what in ("fetch", "store", "probe"):
        desk.begin(what, run(0, 8))
    gaps = beats(lambda: [desk.next() for _ in range(3)])
    assert all(done.num_pages == 0 and done.error is None for done in gaps.result)
    assert gaps.longest_s < 2.0
    assert not Path(f"/proc/{pid}").exists()
    assert desk.connected()
    # The pages that lay in it are gone; the master takes a while to know.
    fill(desk.pages, 1)
    assert eventually(lambda: again(desk, run(0, 8)), WAIT_S)
    desk.close()


def test_close_is_quick_though_the_master_hangs(master: Master, shim: Path) -> None:
    desk = Desk(master, shim)
    assert desk.connected()
    master.signal(signal.SIGSTOP)
    tickets = [desk.begin("fetch", run(0, 8)), desk.begin("store", run(0, 8))]
    pid = desk.pid()
    gaps = beats(lambda: desk.engine.close(8.0))
    assert gaps.result
    assert gaps.longest_s < 2.0
    assert sorted(desk.next().ticket for _ in tickets) == tickets
    assert not Path(f"/proc/{pid}").exists()


def test_a_process_that_is_killed_is_replaced(desk: Desk) -> None:
    fill(desk.pages, 1)
    assert desk.do("store", run(0, 8)).num_pages == 8
    lives = desk.store._lives
    os.kill(desk.pid(), signal.SIGKILL)
    assert eventually(lambda: desk.store._lives > lives, WAIT_S)
    assert desk.connected()
    assert eventually(lambda: again(desk, run(100, 8)), WAIT_S)


def test_a_store_that_is_full_says_so_or_makes_room(master: Master, shim: Path) -> None:
    desk = Desk(master, shim, segment_bytes=16 << 20)
    assert desk.connected()
    fill(desk.pages, 1)
    reasons = {desk.do("store", run(1000 * number, 32)).reason for number in range(12)}  # 37 MB
    assert reasons <= {None, "full", "failed"}
    assert desk.do("probe", run(0, 1)).error is None
    desk.close()


def test_everything_listens_on_loopback_alone(desk: Desk) -> None:
    found = listening(desk.pid())
    assert found
    for address, _ in found:
        parsed = ipaddress.ip_address(address)
        assert (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback, found


def test_the_process_ends_with_its_rank(master: Master, shim: Path, tmp_path: Path) -> None:
    program = """
import sys, os, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import test_mooncake
class M: address = sys.argv[2]
desk = test_mooncake.Desk(M, Path(sys.argv[3]))
print(desk.pid(), flush=True)
sys.stdin.read()
"""
    words = [sys.executable, "-c", program, str(Path(__file__).parent), master.address, str(shim)]
    rank = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert rank.stdout is not None
    pid = int(rank.stdout.readline())
    rank.kill()
    rank.communicate()
    assert eventually(lambda: not Path(f"/proc/{pid}").exists() or state(pid) == "Z", WAIT_S)


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


class beats:  # noqa: N801
    """Run something in a thread, and see meanwhile for how long this process stood still."""

    def __init__(self, call: Any) -> None:
        self.longest_s = 0.0
        self.result: Any = None

        def work() -> None:
            self.result = call()

        thread = threading.Thread(target=work)
        last = time.monotonic()
        thread.start()
        while thread.is_alive():
            thread.join(0.005)
            now = time.monotonic()
            self.longest_s, last = max(self.longest_s, now - last), now


def test_these_tests_have_a_mooncake() -> None:
    assert PYTHON.with_name("mooncake_master").exists(), f"{consumers.PYTHON}: `make interop` installs it"
