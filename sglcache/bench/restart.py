"""How soon a rank that was killed serves what it had on the host: from SIGKILL until its next life gives the first hit.

The host tier is filled by a client, the rank is killed, and two clients wait for its next life: one for /health, one
that attaches as soon as it can, acquires a prompt that only the host has, waits for its last layer and looks at its
bytes. Between the two, in this order: the supervisor's wait before it starts a rank again, 0.1 s; Python's start; the
journal read, and the tree made of it; the socket. Without `keep` there would be no hit, so the same start with an empty
journal is timed beside it, by a rank of the same pools that is killed before anything was written.

`bench journal` is what that costs a commit: an index with a host tier that tells a journal, and one that does not,
the same requests, in turn. The copies are done at once, so the whole of it is the index's and the journal's time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from sglcache.bench.daemon import STOP_S, Daemon
from sglcache.bench.hand import Hand, on_device
from sglcache.bench.harness import BenchError, Comparison, Row, in_turn
from sglcache.core.effects import Copy, Journal
from sglcache.core.index import Index, IndexConfig
from sglcache.memory import journal
from sglcache.memory.journal_form import Shape
from sglcache.memory.mapping import create_memfd, map_shared

WAIT_S = 300.0
PAUSE_S = 0.001
LAYERS, HEADS = 16, 8
PROMPT_PAGES = 32


class Options(NamedTuple):
    """What `bench restart` is told."""

    gib: float = 1.0  # of the host tier
    page_size: int = 64
    token_kib: int = 32
    repeats: int = 5
    device: str = "cpu"  # or cuda
    beside_empty: bool = True


class JournalOptions(NamedTuple):
    """What `bench journal` is told."""

    page_size: int = 64
    prompt_tokens: int = 4096
    requests: int = 400
    pairs: int = 7


def run(options: Options) -> Row:
    """Medians over the repeats. BenchError: a next life did not serve, or not what it should."""
    filled = _restarts(options, fill=True)
    empty = _restarts(options, fill=False) if options.beside_empty else []
    page_bytes = options.page_size * options.token_kib << 10
    return {
        "gib": options.gib,
        "pages": int(options.gib * (1 << 30)) // page_bytes,
        "page_mib": page_bytes / (1 << 20),
        "repeats": options.repeats,
        "device": options.device,
        **{f"{name}_s": statistics.median(each[name] for each in filled) for name in filled[0]},
        "first_hit_s_most": max(each["first_hit"] for each in filled),
        **({"empty_serving_s": statistics.median(each["serving"] for each in empty)} if empty else {}),
    }


def _restarts(options: Options, fill: bool) -> list[dict[str, float]]:
    tokens_of_prompt = PROMPT_PAGES * options.page_size
    num_pages = int(options.gib * (1 << 30)) // (options.page_size * options.token_kib << 10)
    prompts = [np.arange(tokens_of_prompt, dtype=np.uint32) + (n << 16) for n in range(num_pages // PROMPT_PAGES)]
    settings = {
        "pool.page_size": options.page_size,
        "pool.num_tokens": 2 * tokens_of_prompt,
        "pool.num_layers": LAYERS,
        "pool.num_kv_heads": HEADS,
        "pool.head_dim": (options.token_kib << 10) // (LAYERS * HEADS * 2 * 2),
        "host.num_tokens": num_pages * options.page_size,
    }
    found = []
    overrides = [f"{key}={value}" for key, value in settings.items()]
    with Daemon([*overrides, *on_device(options.device)], STOP_S + options.gib) as daemon:
        daemon.wait_healthy()
        if fill:
            _fill(daemon, prompts)
        for turn in range(options.repeats):
            pid = _rank_pid(daemon)
            killed = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            with _attach(daemon, pid) as hand:
                serving = time.perf_counter() - killed
                times = {"serving": serving}
                if fill:
                    number = turn % len(prompts)
                    with hand.client.acquire(prompts[number]) as lease:
                        if lease.matched_tokens != tokens_of_prompt:
                            raise BenchError(f"{lease.matched_tokens} of {tokens_of_prompt} tokens came back")
                        lease.wait_loaded()
                        times["first_hit"] = time.perf_counter() - killed
                        hand.check(lease.slots, number, "what came back")
            found.append(times)
    return found


def _fill(daemon: Daemon, prompts: list[np.ndarray[Any, Any]]) -> None:
    with Hand(daemon.socket) as hand:
        client = hand.client
        # A card's host tier grows as its memory is pinned.
        _until(lambda: all(it["ready_bytes"] >= it["bytes"] for it in client.status()["memory"].values()), "there")
        for number, prompt in enumerate(prompts):
            with client.acquire(prompt) as lease:
                hand.fill(lease.slots, number)
                lease.commit()
            _until(lambda: not client.status()["gauges"]["num_copies"], "filled")


def _until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        if time.monotonic() > deadline:
            raise BenchError(f"the host tier was not {what} after {WAIT_S:.0f} s")
        time.sleep(PAUSE_S)


def _rank_pid(daemon: Daemon) -> int:
    from sglcache.client import Client

    with Client(daemon.socket, role="observer", name="bench") as observer:
        return int(observer.status()["pid"])


@contextlib.contextmanager
def _attach(daemon: Daemon, before: int) -> Iterator[Hand]:
    """A client of the next life, as soon as there is one."""
    from sglcache.errors import Unavailable

    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            hand = Hand(daemon.socket, name="bench restart")
            break
        except Unavailable:
            if time.monotonic() > deadline:
                raise BenchError(f"no rank serves {WAIT_S:.0f} s after the death of pid {before}") from None
            time.sleep(PAUSE_S)
    with hand:
        yield hand


def run_journal(options: JournalOptions) -> Row:
    """Acquire, commit and release of new prompts that share half of their pages with one before."""
    with_it, without = _Requests(options, True), _Requests(options, False)
    with_it.block(), without.block()
    ours, other = in_turn(with_it.block, without.block, options.pairs)
    comparison = Comparison.of(other, ours)
    pages = options.prompt_tokens // options.page_size
    return {
        "page_size": options.page_size,
        "prompt_pages": pages,
        "requests": options.requests,
        "with_us": comparison.other * 1e6,
        "without_us": comparison.ours * 1e6,
        "more_us": (comparison.other - comparison.ours) * 1e6,
        "ratio": comparison.ratio,
        "ratio_least": comparison.least,
        "ratio_most": comparison.most,
        "rows": with_it.book.num_rows if with_it.book is not None else 0,
    }


class _Requests:
    """One index and its journal, if it has one."""

    def __init__(self, options: JournalOptions, keep: bool) -> None:
        self.options = options
        pages = options.prompt_tokens // options.page_size
        room = 64 * pages
        self.index = Index(
            IndexConfig(page_size=options.page_size, num_pages=room, host_pages=2 * room, journal=keep, events=True)
        )
        self.book: journal.Journal | None = None
        if keep:
            shape = Shape(options.page_size, [2 * room])
            fd = create_memfd("bench", shape.num_bytes)
            try:
                self.book = journal.Journal(map_shared(fd, shape.num_bytes), shape, b"")
            finally:
                os.close(fd)
            self.book.load()
        self.session = self.index.open_session()
        self.number = 0

    def block(self) -> float:
        """Seconds of a request."""
        options = self.options
        half = options.prompt_tokens // 2
        prompts = []
        for _ in range(options.requests):
            self.number += 1
            mine = np.arange(options.prompt_tokens - half, dtype="<u4") + self.number * options.prompt_tokens
            shared = np.arange(half, dtype="<u4") + (1 << 31) + self.number // 4 * half
            prompts.append(shared.astype("<u4").tobytes() + mine.astype("<u4").tobytes())
        started = time.perf_counter()
        for ticket, prompt in enumerate(prompts, self.number * 4):
            self._request(prompt, 2 * ticket)
        return (time.perf_counter() - started) / options.requests

    def _request(self, prompt: bytes, ticket: int) -> None:
        index, session = self.index, self.session
        grant = index.acquire(session, 1, prompt)
        self._pump()
        if grant is None:
            raise BenchError("an acquire waits")
        index.commit(session, 2, grant.lease, ticket)
        index.event_done(session, ticket)
        self._pump()
        index.release(session, 3, grant.lease, ticket + 1)
        index.event_done(session, ticket + 1)
        self._pump()

    def _pump(self) -> None:
        index = self.index
        while True:
            effects = index.drain(0.0)
            for effect in effects:
                if isinstance(effect, Journal):
                    assert self.book is not None
                    self.book.note(effect.entries)
                elif isinstance(effect, Copy):
                    index.copy_done(effect.ticket)
            if not effects and not (index.busy and index.step()):
                break
        while not index.cut(0.0):
            pass
