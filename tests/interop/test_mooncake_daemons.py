"""Daemons that share Mooncake's store: what one computed the other hits, byte by byte; what dies costs misses."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from consumers import eventually
from mooncakes import WAIT_S, Master, connected, serve
from scene import PLAIN, Prompt, chain

from sglcache.client import Client, Lease
from sglcache.client.mirror import Mirror
from sglcache.testing.daemon import Daemon
from sglcache.units import Tier

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]

PAGE = 16  # tokens
POOL = {"page_size": PAGE, "num_tokens": 4096, "num_layers": 2, "num_kv_heads": 2, "head_dim": 64, "num_shards": 2}
FORM: dict[str, Any] = {"pool": POOL, "host": {"num_tokens": 8192}}
FEW: dict[str, Any] = {"pool": {**POOL, "num_tokens": 512}, "host": {"num_tokens": 1024}}  # they forget soon
PATIENCE_S = 0.5  # of an acquire
SLACK_S = 2.0  # of a loaded machine
EVENTS = {"heartbeat_s": 0.2}


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Model:
    """Whose KV of a page is random bytes: of each sequence up to the page's end its own, in every process."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)

    def prompt(self, num_pages: int) -> list[int]:
        return [self.rng.randrange(128_000) for _ in range(num_pages * PAGE + 1)]

    def run(self, client: Client, tokens: list[int], prefetch: str = "wait_complete", **arguments: Any) -> Lease:
        """A request from acquire to release. The lease, over; what it matched was as it is to be, by its hash."""
        planes = [plane for view in client.pools for planes in view.layers for plane in planes]
        lease = client.acquire(tokens, limit=len(tokens) - 1, prefetch=prefetch, **arguments)
        with lease:
            lease.wait_loaded()
            for page in range(len(tokens) // PAGE):
                parts = [plane[lease.slots[page]] for plane in planes]  # uint8 [page_size, bytes of a token] each
                size = sum(part.size for part in parts)
                wanted = random.Random(repr(tokens[: (page + 1) * PAGE])).randbytes(size)
                if page < lease.matched_tokens // PAGE:
                    found = sha256(b"".join(part.tobytes() for part in parts))
                    assert found.digest() == sha256(wanted).digest(), f"page {page} of {len(tokens)} tokens"
                    continue
                at = 0
                for part in parts:
                    part[:] = np.frombuffer(wanted[at : at + part.size], np.uint8).reshape(part.shape)
                    at += part.size
            lease.commit()
        return lease


def at_rest(daemon: Daemon) -> None:
    """Nothing is under way or in anybody's hands, and the books are proved."""
    status = daemon.settle(WAIT_S)
    assert status["violations"] == []
    gauges = status["gauges"]
    assert {name: gauges[name] for name in ("num_leases", "num_fenced_leases", "num_waiting", "num_copies")} == {
        "num_leases": 0,
        "num_fenced_leases": 0,
        "num_waiting": 0,
        "num_copies": 0,
    }
    for pool in status["pools"]:
        assert (pool["leased"], pool["fenced"], pool["locked"]) == (0, 0, 0), pool
        assert pool["free"] + pool["cached"] == pool["total"]
    assert status["third"]["queued"] == dict.fromkeys(status["third"]["queued"], 0)


def forget(client: Client, daemon: Daemon) -> None:
    """All but the store does."""
    daemon.settle(WAIT_S)
    client.clear()


def test_what_one_daemon_computed_another_hits_and_one_of_another_model_never(
    tmp_path: Path, shim: Path, master: Master, opened: ExitStack
) -> None:
    first = opened.enter_context(serve(tmp_path / "first", master, shim, **FORM))
    second = opened.enter_context(serve(tmp_path / "second", master, shim, **FORM))
    model = Model()
    prompts = [model.prompt(num_pages) for num_pages in (1, 7, 30, 64)]
    prompts.append(prompts[2][: 20 * PAGE] + model.prompt(10))
    with first.client() as one, second.client() as other:
        for prompt in prompts:
            model.run(one, prompt)
        first.settle(WAIT_S)
        for prompt in prompts:
            lease = model.run(other, prompt)
            assert lease.matched_tokens == len(prompt) // PAGE * PAGE
        second.settle(WAIT_S)
        # What it found there it does not put there again; what is new it does, and the first finds that.
        assert second.status()["third"]["stored_pages"] == 0
        longer = [*prompts[1][: 7 * PAGE], *model.prompt(9)]
        assert model.run(other, longer).matched_tokens == 7 * PAGE
        second.settle(WAIT_S)
        forget(one, first)
        assert model.run(one, longer).matched_tokens == 16 * PAGE
    at_rest(first)
    at_rest(second)
    for name, words in {"model": {}, "revision": {"revision": "b"}}.items():
        with serve(tmp_path / name, master, shim, words, model_name="test" if words else "other", **FORM) as third:
            with third.client() as client:
                for prompt in prompts:
                    assert client.acquire(prompt, prefetch="wait_complete").matched_tokens == 0
            assert third.status()["third"]["fetched_pages"] == 0


class Traffic:
    """A runner that goes on, whatever becomes of the store: known prompts, more than the pools hold, and new ones."""

    def __init__(self, daemon: Daemon, model: Model, known: list[list[int]]) -> None:
        self.daemon, self.model, self.known = daemon, model, known
        self.done: list[tuple[int, float]] = []  # tokens that came from the store, seconds of the request
        self.failed: list[BaseException] = []

    @contextmanager
    def going_on(self) -> Iterator[Callable[[int], None]]:
        """What it gives waits until so many more requests are over."""
        enough = threading.Event()

        def work() -> None:
            try:
                with self.daemon.client() as client:
                    while not enough.is_set():
                        fresh = self.model.rng.random() < 0.3
                        prompt = self.model.prompt(5) if fresh else self.model.rng.choice(self.known)
                        had = client.peek(prompt).matched_tokens
                        started = time.monotonic()
                        lease = self.model.run(client, prompt, "timeout", prefetch_timeout_s=PATIENCE_S)
                        self.done.append((max(0, lease.matched_tokens - had), time.monotonic() - started))
            except BaseException as error:
                self.failed.append(error)

        def wait(requests: int) -> None:
            goal = len(self.done) + requests
            eventually(lambda: len(self.done) >= goal or bool(self.failed), WAIT_S)
            assert not self.failed, self.failed
            assert len(self.done) >= goal

        thread = threading.Thread(target=work, name="runner")
        thread.start()
        try:
            yield wait
        finally:
            enough.set()
            thread.join()
        assert not self.failed, self.failed


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_without_its_master_requests_are_misses_and_when_it_is_back_they_hit(
    how: str, tmp_path: Path, shim: Path, master: Master, opened: ExitStack
) -> None:
    words = {"rpc_timeout_s": 1.0, "events": True}
    first = opened.enter_context(serve(tmp_path / "first", master, shim, words, events=EVENTS, **FEW))
    second = opened.enter_context(
        serve(tmp_path / "second", master, shim, {"rpc_timeout_s": 1.0}, events=EVENTS, **FEW)
    )
    mirrors = {
        daemon: opened.enter_context(
            Mirror(daemon.info["stream"]["endpoint"], daemon.info["stream"]["replay_endpoint"])
        )
        for daemon in (first, second)
    }
    model = Model()
    known = [model.prompt(5) for _ in range(30)]
    with first.client() as client:
        for prompt in known:
            model.run(client, prompt)
            first.settle(WAIT_S)  # or its stores would wait, and beyond a share of the host's pages be skipped
    names = {name for prompt in known for name in chain(Prompt(prompt, PLAIN), PAGE)}
    assert told_of(first, mirrors[first]) == names
    traffic = Traffic(first, model, known)

    def hits(wait: Callable[[int], None]) -> bool:
        before = len(traffic.done)
        wait(10)
        return any(matched for matched, _ in traffic.done[before:])

    with traffic.going_on() as wait:
        assert hits(wait)
        if how == "killed":
            master.kill()
        else:
            master.signal(signal.SIGSTOP)
        assert eventually(lambda: not connected(first), WAIT_S)
        wait(2)  # what was under way
        away, told = len(traffic.done), told_of(first, mirrors[first])
        wait(20)
        assert told_of(first, mirrors[first]) == told, "what could not be put was told of"
        assert [matched for matched, _ in traffic.done[away:]] == [0] * (len(traffic.done) - away)
        assert max(seconds for _, seconds in traffic.done) < PATIENCE_S + SLACK_S
        for daemon in (first, second):
            assert daemon.ask("/health")["status"] == "ok"
        if how == "killed":
            master.start()
        else:
            master.signal(signal.SIGCONT)
        assert eventually(lambda: connected(first) and connected(second), WAIT_S)
        with second.client() as client:  # what the master has forgotten is put again
            for prompt in known:
                model.run(client, prompt)
            assert eventually(lambda: hits(wait), WAIT_S)
    at_rest(first)
    at_rest(second)
    assert told_of(second, mirrors[second]) == set(), "it is not told of unless that is configured"
    with first.observer() as observer:
        assert set(observer.digest()["tiers"]) == {"DEVICE", "HOST"}


def told_of(daemon: Daemon, mirror: Mirror) -> set[int]:
    """The blocks that were told to be EXTERNAL; that one is so no longer is never told."""
    last = daemon.status(prove=False)["stream"]["last_seq"]
    assert mirror.catch_up(last, WAIT_S)
    return mirror.hashes(Tier.EXTERNAL)
