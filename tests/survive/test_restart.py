"""A rank is killed, and its host tier is there again: on the real daemon, with every resource's bytes looked at."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglcache.bench.contents import Contents
from sglcache.client import Client
from sglcache.client.mirror import Mirror
from sglcache.errors import NoSpace, SglcacheError
from sglcache.testing.daemon import Daemon, DaemonError, Served, until
from sglcache.units import Tier

pytestmark = pytest.mark.survive

P = 4  # tokens of a page
QUICK = {"first_wait": 0.02, "longest_wait": 0.02}
STATES = [{"name": "ssm", "shape": [4, 4], "dtype": "float32"}]
WINDOW = {"size": 6, "num_layers": 3, "num_tokens": 4 * 200}
MAMBA = {"num_layers": 2, "num_slots": 60, "interval": 16, "states": STATES}
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "full KV": {},
    "a window": {"window": WINDOW},
    "a window alone": {"window": WINDOW, "pool": {"num_layers": 0}},
    "a state": {"mamba": MAMBA},
    "both": {"window": WINDOW, "mamba": MAMBA},
    "shards": {"pool": {"num_shards": 2, "num_kv_heads": 4}},
    "latents": {"pool": {"num_shards": 2, "kv_lora_rank": 12, "qk_rope_head_dim": 4}},
    "bigrams": {"pool": {"bigram": True}},
    "layer first": {"host": {"layout": "layer_first"}},
    "populated": {"host": {"populate": True}},
}


class Runner:
    """One that computes nothing, and looks at every byte that it is given."""

    def __init__(self, rank: Served) -> None:
        self.client = rank.client()
        self.contents = Contents(self.client)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()

    def put(self, tokens: Any, **options: Any) -> int:
        """Match, look at the hit, write the rest, commit; the tokens that were matched."""
        tokens = np.asarray(tokens, np.uint32)
        if self.client.mamba is not None:
            options["states"] = 1
        with self.client.acquire(tokens, **options) as lease:
            lease.wait_loaded()
            self.contents.check_match(lease, tokens)
            self.contents.write(lease, tokens, lease.matched_tokens, len(tokens))
            whole = len(tokens) // P * P
            if lease.mamba is not None and lease.matched_tokens < whole:
                slot = int(lease.mamba.slots[0])
                self.contents.write_state(slot, tokens[:whole])
                lease.commit(states=[(whole, slot)])
            else:
                lease.commit()
            return lease.matched_tokens


def prompt(number: int, length: int = 40) -> list[int]:
    """They share their beginnings by fours, and all of them a system prompt."""
    return [
        *range(1, 9),
        *range(1000 * (number // 4), 1000 * (number // 4) + 12),
        *(number * 50 + i for i in range(length - 20)),
    ]


def exact(rank: Served, mirror: Mirror) -> None:
    """What a router has is what the index has, block by block."""
    rank.settle()
    with rank.observer() as observer:

        def same() -> bool:
            digest = observer.digest()
            assert mirror.catch_up(digest["seq"], 10.0)
            return mirror.check_digest(digest["seq"], digest["tiers"]) == []

        until(same)  # a heartbeat may have come in between
        for tier, medium in ((Tier.DEVICE, "GPU"), (Tier.HOST, "CPU_PINNED")):
            assert set(observer.dump(tier.name).hashes) == mirror.hashes(medium)
    assert mirror.exact


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_kill_everything_that_was_on_the_host_is_a_hit_again(tmp_path: Path, kind: str) -> None:
    """Twice, so that what was taken over once is taken over again, beside what came since."""
    over = 1 if kind == "bigrams" else 0
    with Daemon(tmp_path, timing=QUICK, **KINDS[kind]) as daemon:
        stream = daemon.status()["stream"]
        with Mirror(stream["endpoint"], stream["replay_endpoint"]) as mirror:
            salts = [None, "a", "é" * 300]
            known: list[tuple[list[int], str | None]] = []
            for life in range(3):
                with Runner(daemon) as runner:
                    for tokens, salt in known:
                        assert runner.put(tokens, cache_salt=salt) == 40
                    for number in range(4 * life, 4 * life + 4):
                        tokens, salt = prompt(number) + [7] * over, salts[number % 3]
                        runner.put(tokens, cache_salt=salt)
                        known.append((tokens, salt))
                exact(daemon, mirror)
                pools = {(pool["resource"], pool["tier"]): pool for pool in daemon.status()["pools"]}
                daemon.next_life(daemon.kill_rank())
                again = {(pool["resource"], pool["tier"]): pool for pool in daemon.status()["pools"]}
                for (resource, tier), pool in again.items():
                    had = pools[resource, tier]["cached"] if tier == "HOST" else 0
                    assert pool["cached"] == had, f"{resource} on {tier}"
                    assert pool["locked"] == pool["leased"] == pool["fenced"] == 0
                exact(daemon, mirror)
                assert not mirror.hashes("GPU")


def test_a_kill_at_any_moment_of_busy_runners_gives_back_nothing_that_is_wrong(tmp_path: Path) -> None:
    """Four runners, small pools, copies and evictions all the time; a kill every so often; every hit's bytes right."""
    rng = random.Random(7)
    sizes = {
        "pool": {"num_tokens": P * 96},
        "host": {"num_tokens": P * 160},
        "window": {**WINDOW, "num_tokens": P * 80},
    }
    with Daemon(tmp_path, timing=QUICK, **sizes) as daemon:
        stream = daemon.status()["stream"]
        stop, wrong, hits = threading.Event(), [], [0] * 4

        def work(number: int) -> None:
            mine = random.Random(number)
            while not stop.is_set():
                try:
                    with Runner(daemon) as runner:
                        while not stop.is_set():
                            tokens = prompt(mine.randrange(24), mine.choice((24, 33, 60)))
                            with contextlib.suppress(NoSpace):
                                hits[number] += runner.put(tokens, cache_salt=mine.choice((None, "a")))
                except SglcacheError:
                    pass  # that life is over
                except BaseException as error:
                    wrong.append(error)
                    return

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(12):
                enough = sum(hits) + rng.randrange(200, 2000)
                until(lambda enough=enough: sum(hits) > enough or bool(wrong), 30.0)  # type: ignore[misc]
                daemon.next_life(daemon.kill_rank())
                assert not wrong, wrong
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not wrong, wrong
        with Mirror(stream["endpoint"], stream["replay_endpoint"]) as mirror:
            until(lambda: not daemon.status(prove=False)["sessions"])
            exact(daemon, mirror)
        assert daemon.said().count("of the life before are on the host") == 12


def test_a_life_whose_books_were_wrong_leaves_nothing(tmp_path: Path) -> None:
    """An exception that nobody expected: what it noted may be as wrong."""
    prelude = (
        "from sglcache.core.index import Index\n"
        "clear = Index.clear\n"
        "def broken(self, tier=None):\n"
        "    raise AssertionError('the books are wrong')\n"
        "Index.clear = broken\n"
    )
    with Daemon(tmp_path, timing=QUICK, prelude=prelude) as daemon:
        with Runner(daemon) as runner:
            runner.put(prompt(1))
        daemon.settle()
        pid = daemon.pid
        with daemon.client(role="admin") as admin, pytest.raises(SglcacheError):
            admin.clear()
        life = daemon.next_life(pid)
        assert "fail stop" in daemon.said()
        assert life["last_exit"]["status"] == 70
        assert all(pool["cached"] == 0 for pool in daemon.status()["pools"])


def test_a_life_that_dies_while_it_takes_over_is_followed_by_an_empty_one(tmp_path: Path) -> None:
    """What kills it would kill the next one as well, for ever."""
    prelude = (
        "import os, sglcache.server.rank as rank\n"
        "def broken(index, survivors):\n"
        "    os._exit(9)\n"
        "rank.restore = broken\n"
    )
    with Daemon(tmp_path, timing=QUICK, prelude=prelude) as daemon:
        with Runner(daemon) as runner:
            runner.put(prompt(1))
        daemon.settle()
        restarts = daemon.row["restarts"]
        daemon.next_life(daemon.kill_rank())
        assert daemon.row["restarts"] == restarts + 2
        assert "died while it took" in daemon.said()
        assert all(pool["cached"] == 0 for pool in daemon.status()["pools"])


def test_without_keep_nothing_comes_back(tmp_path: Path) -> None:
    with Daemon(tmp_path, timing=QUICK, host={"keep": False}) as daemon:
        with Runner(daemon) as runner:
            runner.put(prompt(1))
        daemon.settle()
        daemon.next_life(daemon.kill_rank())
        assert all(pool["cached"] == 0 for pool in daemon.status()["pools"])


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_with_a_keep_path_the_host_tier_outlives_the_daemon(tmp_path: Path, how: str) -> None:
    sections: dict[str, Any] = {"host": {"keep_path": str(tmp_path / "kept")}, "window": WINDOW}
    for life in range(3):
        daemon = Daemon(tmp_path, timing=QUICK, **sections)
        try:
            with Runner(daemon) as runner:
                for number in range(life):
                    assert runner.put(prompt(number)) == 40
                runner.put(prompt(life))
            daemon.settle()
            with pytest.raises(DaemonError, match=r"host\.keep_path: a live daemon has .*rank-0; stop it"):
                Daemon(tmp_path / "other", **sections)
        finally:
            if how == "stop":
                assert daemon.stop(signal.SIGTERM) == 0
            else:
                daemon.kill()
    with Daemon(tmp_path, model_name="another", **sections) as daemon:
        assert all(pool["cached"] == 0 for pool in daemon.status()["pools"])
        assert "it is of other pools, another geometry or another boot" in daemon.said()


def test_a_keep_path_that_cannot_be_had_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DaemonError, match=r"host\.keep_path: .*/file/rank-0 can't be had"):
        Daemon(tmp_path / "a", host={"keep_path": str(tmp_path / "file")})
    (tmp_path / "open" / "rank-0").mkdir(parents=True)
    (tmp_path / "open" / "rank-0").chmod(0o755)
    with pytest.raises(DaemonError, match=r"must be this user's, with mode 0700"):
        Daemon(tmp_path / "b", host={"keep_path": str(tmp_path / "open")})


def test_the_supervisor_holds_as_many_descriptors_after_many_lives_as_after_one(tmp_path: Path) -> None:
    with Daemon(tmp_path, timing=QUICK) as daemon:

        def num_open() -> int:
            return len(list(Path(f"/proc/{daemon.process.pid}/fd").iterdir()))

        daemon.next_life(daemon.kill_rank())
        first = min(num_open() for _ in range(50))
        for _ in range(5):
            daemon.next_life(daemon.kill_rank())
            until(lambda: num_open() <= first)  # who asked it something just now may still have a connection


def test_a_client_of_the_dead_life_cannot_touch_the_next_ones_pages(tmp_path: Path) -> None:
    """It keeps its mapping, of memory that nobody else has any more."""
    with Daemon(tmp_path, timing=QUICK) as daemon:
        old: Client = daemon.client()
        lease = old.acquire(prompt(1))
        layers = old.pool.layers
        daemon.next_life(daemon.kill_rank())
        with Runner(daemon) as runner:
            runner.put(prompt(2))
            for layer in layers:
                for plane in layer:
                    plane[:] = 255
            assert runner.put(prompt(2)) == 40
        assert lease is not None
        old.close()


def test_what_was_not_stored_when_the_rank_died_is_stored_by_the_next_life(tmp_path: Path) -> None:
    """Behind a write-through comes the store; a kill between the two would leave a page that no disk ever gets."""
    prelude = (
        "import os, pathlib\n"
        "from sglcache.storage.file import FileStore\n"
        "put = FileStore.put\n"
        "def slow(self, *arguments, **more):\n"
        f"    assert not pathlib.Path({str(tmp_path / 'full')!r}).exists(), 'no room'\n"
        "    return put(self, *arguments, **more)\n"
        "FileStore.put = slow\n"
    )
    full = tmp_path / "full"
    full.touch()
    storage = {"kind": "file", "path": str(tmp_path / "l3"), "size": "1 GB"}
    with Daemon(tmp_path / "daemon", timing=QUICK, prelude=prelude, storage=storage) as daemon:
        with Runner(daemon) as runner:
            runner.put(prompt(1))
        until(lambda: daemon.settle()["counters"]["l3_stores_failed"] == 10)
        full.unlink()
        daemon.next_life(daemon.kill_rank())
        until(lambda: daemon.status(prove=False)["third"]["num_pages"] == 10)
        daemon.settle()


def test_a_next_life_waits_until_nobody_writes_into_the_pages_any_more(tmp_path: Path) -> None:
    """Such as a process of a store, of which the kernel is not yet done: it has inherited what the rank held."""
    prelude = (
        "import os, subprocess, sys\n"
        "import sglcache.server.rank as rank\n"
        "ThirdTier, build = rank.ThirdTier, rank.build\n"
        "def with_helper(it, loop):\n"
        "    parts = build(it, loop)\n"
        "    if not it._start.restarts:\n"
        "        words = 'import time, pathlib; time.sleep(3); pathlib.Path(\"%s\").touch()'\n"
        "        subprocess.Popen([sys.executable, '-c', words], pass_fds=parts.keeper.holds)\n"
        "    return parts\n"
        "rank.build = with_helper\n"
    ) % (tmp_path / "over")
    with Daemon(tmp_path, timing=QUICK, prelude=prelude) as daemon:
        with Runner(daemon) as runner:
            runner.put(prompt(1))
        daemon.settle()
        assert not (tmp_path / "over").exists()
        pid = daemon.kill_rank()
        daemon.next_life(pid)
        assert (tmp_path / "over").exists()
        with Runner(daemon) as runner:
            assert runner.put(prompt(1)) == 40


def test_what_came_back_damaged_or_of_another_size_is_said(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    host: dict[str, Any] = {"keep_path": str(kept)}
    with Daemon(tmp_path, host=host) as daemon, Runner(daemon) as runner:
        for number in range(4):
            runner.put(prompt(number))
        daemon.settle()
    book = kept / "rank-0" / "sglcache-journal"
    data = bytearray(book.read_bytes())
    data[4096 + 8 * 512 + 300] ^= 255  # in the row of an early page
    book.write_bytes(data)
    with Daemon(tmp_path, host=host) as daemon:
        assert "more are not: their rows, or those above them, are damaged" in daemon.said()
    with Daemon(tmp_path, host={**host, "num_tokens": P * 300}) as daemon:
        assert "sglcache-host-0 is of 262144 bytes, not 153600: what it held is dropped" in daemon.said()


def test_a_purge_takes_what_is_ours_and_nothing_else(tmp_path: Path) -> None:
    kept, other = tmp_path / "kept", tmp_path / "other"
    (other / "rank-0").mkdir(parents=True)
    (other / "rank-0" / "mine").touch()

    def purge(folder: Path) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "sglcache", "purge", "--set", f"host.keep_path={folder}"],
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    assert purge(other) == (0, f"nothing is kept in {other}\n")
    assert (other / "rank-0" / "mine").exists()
    with Daemon(tmp_path, host={"keep_path": str(kept)}) as daemon:
        code, said = purge(kept)
        assert (code, "a live daemon uses rank-0" in said) == (1, True)
        with Runner(daemon) as runner:
            runner.put(prompt(1))
    (kept / "rank-0" / "mine").touch()
    code, said = purge(kept)
    assert (code, "these are not sglcache's" in said) == (1, True)
    assert len(list((kept / "rank-0").iterdir())) == 3
    (kept / "rank-0" / "mine").unlink()
    assert purge(kept)[0] == 0
    assert not (kept / "rank-0").exists()
    assert purge(kept) == (0, f"nothing is kept in {kept}\n")


def test_check_refuses_the_places_that_serve_would_refuse(tmp_path: Path) -> None:
    def check(*settings: str) -> str:
        options = [word for each in settings for word in ("--set", each)]
        done = subprocess.run(
            [sys.executable, "-m", "sglcache", "check", *options], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2, done.stdout
        return done.stderr

    (tmp_path / "file").touch()
    assert "is no folder that this user may write" in check(f"host.keep_path={tmp_path / 'file' / 'x'}")
    assert "has room for 0 bytes" in check("host.keep_path=/proc/nope")
    (tmp_path / "open" / "rank-0").mkdir(parents=True, mode=0o755)
    (tmp_path / "open" / "rank-0" / "sglcache-journal").touch()
    assert "with mode 0700" in check(f"host.keep_path={tmp_path / 'open'}")
    both = [f"host.keep_path={tmp_path / 'a'}", "storage.kind=file", f"storage.path={tmp_path / 'a' / 'b'}"]
    assert "lie in each other" in check(*both)
