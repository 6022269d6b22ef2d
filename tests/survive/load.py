"""Clients that work all the time while something goes wrong beside them, and check every byte that they find."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from sglcache.client import Client, Lease
from sglcache.errors import NoSpace

P = 4


def prompt(number: int, num_pages: int) -> range:
    return range(1000 * number, 1000 * number + P * num_pages)


def value_of(number: int, page: int) -> int:
    """What every byte of page `page` of prompt `number` is."""
    return (number * 37 + page) % 251


def write(client: Client, lease: Lease, number: int) -> None:
    """What the cache lacks."""
    pool = client.pool.array
    for page in range(lease.matched_tokens // P, len(lease.slots)):
        pool[lease.slots[page]] = value_of(number, page)


def check(client: Client, lease: Lease, number: int) -> None:
    lease.wait_loaded()
    pool = client.pool.array
    for page in range(lease.matched_tokens // P):
        found = pool[lease.slots[page]]
        assert np.all(found == value_of(number, page)), f"page {page} of prompt {number} holds {found.flat[0]}"


def put(client: Client, number: int, num_pages: int, wait_s: float | None = None) -> None:
    with client.acquire(prompt(number, num_pages), wait_s=wait_s) as lease:
        check(client, lease, number)
        write(client, lease, number)
        lease.commit()


class Work:
    """Some clients, each in a thread: prompts that they share, of a few pages, begun anew as long as this is open.

    At its end nobody has failed, each has got on, and `slowest_s` is what one request took at most.
    """

    def __init__(self, socket: Path, clients: int = 3, prompts: int = 12, num_pages: int = 2, first: int = 500) -> None:
        self.slowest_s = 0.0
        self.done = [0] * clients
        self.refused = 0
        self._errors: list[BaseException] = []
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(socket, each, prompts, num_pages, first))
            for each in range(clients)
        ]

    def _work(self, socket: Path, each: int, prompts: int, num_pages: int, first: int) -> None:
        rng = random.Random(each)
        try:
            with Client(socket, name=f"worker {each}") as client:
                while not self._over.is_set():
                    began = time.perf_counter()
                    try:
                        put(client, first + rng.randrange(prompts), num_pages, wait_s=5.0)
                    except NoSpace:
                        self.refused += 1
                    self.slowest_s = max(self.slowest_s, time.perf_counter() - began)
                    self.done[each] += 1
        except BaseException as exc:
            self._errors.append(exc)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(30)
        if kind is None:
            if self._errors:
                raise self._errors[0]
            assert min(self.done) > 0, f"somebody stood still: {self.done}"
