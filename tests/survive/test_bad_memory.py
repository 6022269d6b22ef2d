"""Host memory that goes bad, on the real daemon: it is found, told of, and never served; no good page is found bad."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_restart
from test_restart import KINDS, MAMBA, WINDOW, P, Runner, exact, prompt

from sglcache import config as configs
from sglcache.client.mirror import Mirror
from sglcache.errors import NoSpace, SglcacheError
from sglcache.memory.geometry import Geometry, companions_of, moves
from sglcache.memory.journal_form import HEAD_BYTES, SEQ_BYTES, Shape
from sglcache.server.rank import EXIT_FAILED
from sglcache.server.watch import WORDS
from sglcache.testing import copies
from sglcache.testing.daemon import HEADS, SMALL, Daemon, until
from sglcache.units import Tier

pytestmark = pytest.mark.survive

QUICK = {"first_wait": 0.02, "longest_wait": 0.02, "beat": 0.05}
FAST = "import sglcache.memory.scrub as scrub\nscrub.LEAST_ROUND_S = 0.01\nscrub.REST = 1.0\n"
RATE = {"scrub_rate": "100 GB"}


def sections(kind: str, **host: Any) -> dict[str, dict[str, Any]]:
    found = {name: dict(values) for name, values in KINDS[kind].items()}
    found.setdefault("host", {}).update({**RATE, **host})
    return found


class Memory:
    """A rank's host pages and their journal, by the descriptors that a process has of them: the rank's own, or while it
    is dead the supervisor's."""

    def __init__(self, pid: int, **parts: Any) -> None:
        merged: dict[str, dict[str, Any]] = {}
        for layer in (SMALL, parts):
            for name, values in layer.items():
                merged.setdefault(name, {}).update(values)
        if "kv_lora_rank" in merged["pool"]:
            for key in HEADS:
                del merged["pool"][key]
        config = configs.parse({"model_name": "test", **merged}).for_stage(0)
        full = Geometry.of(config)
        companions = companions_of(config, full)
        self.forms = {"full": full, **{each.kind: each.form for each in companions}}
        self.shape = Shape.of(full.page_size, config.pool.bigram, list(self.forms.values()))
        self._fds: dict[str, int] = {}
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                head, _, what = target.removesuffix(" (deleted)").partition("/memfd:")
                if not head and (what.startswith("sglcache-host") or what == "sglcache-journal"):
                    self._fds.setdefault(what, os.open(f"/proc/{pid}/fd/{name}", os.O_RDWR))

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)

    def used(self, resource: str) -> list[int]:
        """Slots that hold something."""
        at = HEAD_BYTES
        for name, (count, size) in zip(self.forms, self.shape.tables, strict=False):
            if name == resource:
                seqs = np.frombuffer(os.pread(self._fds["sglcache-journal"], count * SEQ_BYTES, at), "<u8")
                return [int(slot) for slot in np.flatnonzero(seqs)]
            at += count * (SEQ_BYTES + size)
        raise KeyError(resource)

    def flip(self, resource: str, slot: int, rng: random.Random) -> None:
        """One bit of a page, in any part."""
        form = self.forms[resource]
        name = "sglcache-host" if resource == "full" else f"sglcache-host-{resource}"
        fd = self._fds[f"{name}-{rng.randrange(form.num_parts)}"]
        placement = form.placement(Tier.HOST)
        region, _ = rng.choice(moves(placement, placement))
        place = region.start(slot) + rng.randrange(region.num_bytes)
        with mmap.mmap(fd, 0) as memory:
            memory[place] ^= 1 << rng.randrange(8)


@contextlib.contextmanager
def memory_of(pid: int, **parts: Any) -> Iterator[Memory]:
    memory = Memory(pid, **parts)
    try:
        yield memory
    finally:
        memory.close()


def status(daemon: Daemon) -> dict[str, Any]:
    return daemon.status(prove=False)


def looked(daemon: Daemon) -> None:
    """All that is there has been looked at, from its beginning to its end."""
    want = status(daemon)["scrub"]["rounds"] + 2
    until(lambda: status(daemon)["scrub"]["rounds"] >= want)


def suspect(daemon: Daemon) -> dict[str, Any]:
    """Wait until /health says so; what it says."""

    def told() -> list[dict[str, Any]]:
        troubles = daemon.ask("/health")["ranks"][0].get("troubles", ())  # a loaded machine may have others, too
        return [each["facts"] for each in troubles if each["what"] == "corrupt"]

    until(lambda: bool(told()))
    health = daemon.ask("/health")
    assert health["status"] == "degraded"
    assert health["serving"]
    assert WORDS["corrupt"] in health["reason"]
    return told()[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_bit_that_flips_costs_its_page_and_what_hangs_on_it(tmp_path: Path, kind: str) -> None:
    """Of every resource, in any part; routers are told, /health says so, and what comes later computes it anew."""
    rng = random.Random(kind)
    over = 1 if kind == "bigrams" else 0
    parts = sections(kind)
    with Daemon(tmp_path, timing=QUICK, prelude=FAST, **parts) as daemon, memory_of(daemon.pid, **parts) as memory:
        stream = daemon.status()["stream"]
        with Mirror(stream["endpoint"], stream["replay_endpoint"]) as mirror, Runner(daemon) as runner:
            prompts = [prompt(number) + [7] * over for number in range(6)]
            for tokens in prompts:
                runner.put(tokens)
            found = 0
            for resource, form in memory.forms.items():
                if not form.page_bytes:
                    continue
                daemon.settle()
                looked(daemon)
                assert status(daemon)["scrub"]["mismatches"] == found
                slot = rng.choice(memory.used(resource))
                memory.flip(resource, slot, rng)
                found += 1
                until(lambda found=found: status(daemon)["scrub"]["mismatches"] == found)  # type: ignore[misc]
                counter = "corrupt_pages" if resource == "full" else f"{resource}_corrupt_slots"
                assert status(daemon)["counters"][counter] > 0
                facts = {"pages": found, "resource": resource, "slot": slot}
                until(lambda facts=facts: suspect(daemon) == facts)  # type: ignore[misc]  # with the next beat
                assert f"the bytes of host slot {slot} of {resource} have changed by themselves" in daemon.said()
                exact(daemon, mirror)
                with daemon.admin() as admin:
                    admin.clear(Tier.DEVICE)
                until(lambda: daemon.pool("DEVICE")["cached"] == 0)
                hits = [runner.put(tokens) for tokens in prompts]
                assert any(hit < 40 for hit in hits) or resource != "full", hits
                assert [runner.put(tokens) for tokens in prompts] == [40] * 6
                exact(daemon, mirror)
            assert not daemon.row["restarts"]


def test_what_the_device_has_as_well_stays_a_hit(tmp_path: Path) -> None:
    parts = sections("full KV")
    with Daemon(tmp_path, timing=QUICK, prelude=FAST, **parts) as daemon, memory_of(daemon.pid, **parts) as memory:
        with Runner(daemon) as runner:
            runner.put(prompt(1))
            daemon.settle()
            looked(daemon)
            memory.flip("full", memory.used("full")[4], random.Random(1))
            until(lambda: status(daemon)["counters"]["corrupt_pages"] == 6)
            assert daemon.pool("HOST")["cached"] == 4
            assert daemon.pool("DEVICE")["cached"] == 10
            assert runner.put([*prompt(1), 5, 5, 5, 5]) == 40
        assert daemon.settle()["counters"]["corrupt_pages"] == 6
        assert daemon.pool("HOST")["cached"] == 11, "and was copied again"


HOLDS = ("a lease", "a pin", "a load")


@pytest.mark.parametrize("holder", HOLDS)
def test_where_somebody_holds_it_the_rank_ends_and_the_next_life_has_an_empty_host_tier(
    tmp_path: Path, holder: str
) -> None:
    gate = tmp_path / "gate"
    prelude = FAST + (copies.gate(gate, "load") if holder == "a load" else "")
    parts = sections("full KV")
    with (
        Daemon(tmp_path / "daemon", timing=QUICK, prelude=prelude, **parts) as daemon,
        memory_of(daemon.pid, **parts) as memory,
    ):
        with Runner(daemon) as runner:
            runner.put(prompt(1))
        daemon.settle()
        looked(daemon)
        pid, slot = daemon.pid, memory.used("full")[2]
        client = daemon.client()
        if holder == "a lease":
            client.acquire(prompt(1))
        elif holder == "a pin":
            client.pin(prompt(1), owner="someone", ttl_s=60.0)
        else:
            with daemon.admin() as admin:
                admin.clear(Tier.DEVICE)
            until(lambda: daemon.pool("DEVICE")["cached"] == 0)
            client.acquire(prompt(1))
        memory.flip("full", slot, random.Random(2))
        life = daemon.next_life(pid)
        with contextlib.suppress(SglcacheError):
            client.close()
        assert life["last_exit"]["status"] == EXIT_FAILED
        assert f"fail stop: the bytes of host slot {slot} of full have changed by themselves" in daemon.said()
        assert all(pool["cached"] == 0 for pool in daemon.status()["pools"])
        assert WORDS["corrupt"] not in daemon.ask("/health").get("reason", ""), (
            "of this life nothing is known to be bad"
        )
        with Runner(daemon) as runner:
            assert runner.put(prompt(1)) == 0
            assert runner.put(prompt(1)) == 40


@pytest.mark.parametrize("kind", ["full KV", "both", "layer first", "shards"])
def test_what_changes_while_the_rank_is_dead_is_found_by_the_next_life(tmp_path: Path, kind: str) -> None:
    rng = random.Random(kind)
    parts = sections(kind)
    slow = {**QUICK, "first_wait": 1.0, "longest_wait": 1.0}
    with Daemon(tmp_path, timing=slow, prelude=FAST, **parts) as daemon:
        with Runner(daemon) as runner:
            for number in range(4):
                runner.put(prompt(number))
        daemon.settle()
        looked(daemon)
        pid = daemon.kill_rank()
        with memory_of(daemon.process.pid, **parts) as memory:
            resources = [name for name, form in memory.forms.items() if form.page_bytes]
            for resource in resources:
                memory.flip(resource, rng.choice(memory.used(resource)), rng)
        daemon.next_life(pid)
        until(lambda: status(daemon)["scrub"]["rounds"] >= 1)
        # A page of a window that went with full KV's was not looked at any more.
        until(lambda: 1 <= status(daemon)["scrub"]["mismatches"] <= len(resources))
        assert status(daemon)["counters"]["corrupt_pages"] > 0
        suspect(daemon)
        with Runner(daemon) as runner:
            hits = [runner.put(prompt(number)) for number in range(4)]
            assert any(hit < 40 for hit in hits)


def test_with_a_keep_path_what_changes_while_no_daemon_runs_is_found(tmp_path: Path) -> None:
    parts = sections("full KV", keep_path=str(tmp_path / "kept"))
    with Daemon(tmp_path, timing=QUICK, prelude=FAST, **parts) as daemon:
        with Runner(daemon) as runner:
            runner.put(prompt(1))
        daemon.settle()
        looked(daemon)
    pages = tmp_path / "kept" / "rank-0" / "sglcache-host-0"
    form = Geometry.of(configs.parse({"model_name": "test", **SMALL}))
    with open(pages, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[form.page_bytes * 9 + 5] ^= 4  # the last of the prompt
    with Daemon(tmp_path, timing=QUICK, prelude=FAST, **parts) as daemon:
        until(lambda: status(daemon)["counters"]["corrupt_pages"] == 1)
        with Runner(daemon) as runner:
            assert runner.put(prompt(1)) == 36


def test_in_thousands_of_operations_no_good_page_is_found_bad(tmp_path: Path) -> None:
    """Small pools, evictions and copies all the time, of every resource; several lives on the same memory."""
    small: dict[str, Any] = {
        "pool": {"num_tokens": P * 64},
        "host": {"num_tokens": P * 100, **RATE},
        "window": {**WINDOW, "num_tokens": P * 60},
        "mamba": MAMBA,
    }
    with Daemon(tmp_path, timing=QUICK, prelude=FAST, **small) as daemon:
        stop, wrong, done = threading.Event(), [], [0] * 3

        def work(number: int) -> None:
            mine = random.Random(number)
            while not stop.is_set():
                try:
                    with Runner(daemon) as runner:
                        while not stop.is_set():
                            tokens = prompt(mine.randrange(24), mine.choice((24, 33, 40)))
                            with contextlib.suppress(NoSpace):
                                runner.put(tokens)
                            done[number] += 1
                except SglcacheError:
                    pass  # that life is over
                except BaseException as error:
                    wrong.append(error)
                    return

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        try:
            for life in range(3):
                enough = sum(done) + 1200
                until(lambda enough=enough: sum(done) > enough or bool(wrong), 60.0)  # type: ignore[misc]
                told = status(daemon)
                assert told["scrub"]["mismatches"] == 0, daemon.said()
                assert told["scrub"]["compared_pages"] > 100
                assert told["counters"]["evicted_host_pages"] + told["counters"]["unbacked_pages"] > 100
                if life < 2:
                    daemon.next_life(daemon.kill_rank())
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not wrong, wrong
        assert "have changed by themselves" not in daemon.said()


BUGS = {
    "what is bad is let go of without a word": (
        "from sglcache.core.index import Index\nIndex.expel = lambda self, resource, slot: True\n"
    ),
    "nothing is told of it": (
        "from sglcache.server.scrubbing import Scrubbing\nScrubbing._bad = lambda self, resource, slot, seq: None\n"
    ),
    "routers are not told": (
        "from sglcache.core.index import Index\n"
        "expel = Index.expel\n"
        "def silent(self, resource, slot):\n"
        "    self.telling, told = False, self.telling\n"
        "    try:\n"
        "        return expel(self, resource, slot)\n"
        "    finally:\n"
        "        self.telling = told\n"
        "Index.expel = silent\n"
    ),
    "health does not say so": (
        "from sglcache.server.watch import Watch\n"
        "find = Watch._all\n"
        "Watch._all = lambda self, now, seen: (it for it in find(self, now, seen) if it.what != 'corrupt')\n"
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "FAST", FAST + BUGS[bug])
    for module in (globals(), vars(test_restart)):
        monkeypatch.setitem(module, "until", functools.partial(until, within_s=2.0))
    with pytest.raises(AssertionError):
        test_a_bit_that_flips_costs_its_page_and_what_hangs_on_it(tmp_path, "full KV")
