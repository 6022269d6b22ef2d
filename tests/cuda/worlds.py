"""Where the tests of cards run: on a machine's own, or on the driver in software. They are the same tests."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from softcuda import SoftCuda, cards, compiled

from sglcache.bench.contents import Contents
from sglcache.client.client import Client, Member, Worker
from sglcache.errors import Busy, ConfigError
from sglcache.testing.cards import Port
from sglcache.testing.daemon import Daemon, Puppet, Served, until

SOFT_CARDS = 2
MEMORY = 256 << 20  # of each of these
SLACK = 64 << 20
JUNK = 0xEEEEEEEEEEEEEEEE

# A puppet of the driver in software has what it says of pages.
PUPPET = """
from sglcache.bench.contents import Contents
from sglcache.testing.cards import Port
port = Port()
card = port.cards[0]
ids = lambda first, stop: np.arange(first, stop, dtype=np.uint32)
def put(lease, first, stop):
    contents.write(lease, ids(first, stop), 0, stop - first)
"""


def ids(tokens: range) -> np.ndarray:
    """What pages of these tokens are to hold, as `Contents` wants it."""
    return np.arange(tokens.start, tokens.stop, dtype=np.uint32)


class World:
    """`environment` is for what is started. `port` reads and writes pages of this process's."""

    def __init__(self, environment: Mapping[str, str], soft: SoftCuda | None) -> None:
        self.environment = dict(environment)
        self.soft = soft
        self.port = Port()

    @property
    def num_cards(self) -> int:
        return len(self.port.cards)

    def need(self, cards: int) -> None:
        if self.num_cards < cards:
            pytest.skip(f"needs {cards} cards, and there are {self.num_cards}")

    def sections(
        self, *, environment: Mapping[str, str] | None = None, **sections: Mapping[str, Any]
    ) -> dict[str, Any]:
        """A daemon's, on cards; all its shards are on the first if nothing else is said. Its heart beats quickly."""
        events = {"heartbeat_s": 0.05, **sections.get("events", {})}
        pool = {"device": "cuda", "untried": True, **sections.get("pool", {})}
        pool.setdefault("gpus", [0] * pool.get("num_shards", 1))
        return {**sections, "pool": pool, "events": events, "env": {**self.environment, **(environment or {})}}

    def daemon(self, folder: Path, *, environment: Mapping[str, str] | None = None, **sections: Any) -> Daemon:
        return Daemon(folder, **self.sections(environment=environment, **sections))

    def client(self, served: Served, **arguments: Any) -> Client:
        return served.client(streams=self.port.streams, **arguments)

    def worker(self, served: Served, token: bytes, shard: int) -> Worker:
        return served.worker(token, shard, streams=self.port.streams)

    def contents(self, member: Member) -> Contents:
        return Contents(member, self.port.layers)

    def used(self, device: int = 0) -> int:
        """Bytes of a card that anybody has."""
        card = self.port.cards[device]
        with card.on(device):
            free, total = card.free_bytes()
        return total - free

    def is_back(self, used: int, device: int = 0) -> bool:
        """Whether no more of it is in use than then. A card's driver has affairs of its own there."""
        return self.used(device) - used <= (0 if self.soft is not None else SLACK)

    @contextlib.contextmanager
    def puppet(
        self, served: Served, environment: Mapping[str, str] | None = None, *, port: bool = True
    ) -> Iterator[Puppet]:
        """A process with a port, and no client yet."""
        with pytest.MonkeyPatch.context() as patch:
            for key, value in {**self.environment, **(environment or {})}.items():
                patch.setenv(key, value)
            puppet = Puppet(served.socket)
        with puppet:
            if port:
                puppet.do(PUPPET)
            yield puppet

    @contextlib.contextmanager
    def copies_held(self, served: Served) -> Iterator[None]:
        """The rank's copies begin when this is over. Of the driver in software alone: others are slow at most."""
        if self.soft is None:
            yield
            return
        with self.soft.hold_copies(served.pid):
            yield

    def only_software(self) -> SoftCuda:
        if self.soft is None:
            pytest.skip("a card can't be told to do this")
        return self.soft


@contextlib.contextmanager
def of_software(library: Path) -> Iterator[World]:
    """This process has the driver in software from here on, as if it were the machine's."""
    with cards(library, SOFTCUDA_DEVICES=SOFT_CARDS, SOFTCUDA_MEMORY=MEMORY) as soft:
        with pytest.MonkeyPatch.context() as patch:
            for key, value in soft.environment.items():
                patch.setenv(key, value)
            patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
            # By its SONAME it is found where `libcuda.so.1` is asked for. It alone has one: the first would be found.
            own = compiled(soft.state / "libcuda.so.1", "-Wl,-soname,libcuda.so.1")
            loaded = ctypes.CDLL(str(own), mode=ctypes.RTLD_GLOBAL)
            assert loaded.cuInit(0) == 0
        assert ctypes.CDLL("libcuda.so.1")._handle == loaded._handle, f"this process has another: {_driver()}"
        world = World(soft.environment, soft)
        yield world
        world.port.close()


@contextlib.contextmanager
def of_a_card() -> Iterator[World]:
    library = _driver()
    if library is not None and "softcuda" in library:
        pytest.skip("this process has the driver in software already; run `pytest -m gpu` by itself")
    eager = {"CUDA_MODULE_LOADING": "EAGER"}  # a kernel that is loaded late may wait for those that run
    with pytest.MonkeyPatch.context() as patch:
        for key, value in eager.items():
            patch.setenv(key, value)
        try:
            world = World(eager, None)
        except ConfigError as exc:
            pytest.fail(f"these are the tests of a card: {exc.message}", False)
        for card in world.port.cards:
            world.port.spin(0.0, card.device)
    yield world
    world.port.close()


def _driver() -> str | None:
    """The file of this process's libcuda."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libcuda" in line:
            return line.split(maxsplit=5)[5]
    return None


def heartbeats(served: Served, count: int = 3) -> None:
    """The rank has looked about so often since."""
    with served.observer() as observer:
        for _ in range(count):
            seen = observer.digest()["seq"]
            until(lambda seen=seen: observer.digest()["seq"] > seen)


def evict(served: Served, port: Port, *members: Member) -> None:
    """Nothing is cached on the device any more, once what is in flight is over, and its free pages hold other bytes.

    Nobody has a lease, or the last is on its way back.
    """
    port.finish()
    served.settle()
    with served.admin() as admin:

        def cleared() -> bool:
            try:
                admin.clear("device")
            except Busy:
                return False
            return True

        until(cleared)
    for view in (view for member in members for view in views_of(member)):
        card, memory = port.card(view), view.memory
        with card.on(card.device):
            card.fill(memory.address, JUNK, memory.num_bytes // 8, port.stream(card.device))
    port.finish()


def views_of(member: Member) -> list[Any]:
    """Of all the pools that it maps."""
    return [*member.pools, *(pool for each in (member.window, member.mamba) if each for pool in each.pools)]


def put(port: Port, client: Client, tokens: range, **options: Any) -> None:
    """Commit these, with what pages of them are to hold."""
    contents = Contents(client, port.layers)
    options = {"states": int(client.keeps_states), "wait_s": 10, **options}
    with client.acquire(tokens, **options) as lease:
        start = lease.matched_tokens
        contents.write(lease, ids(tokens), start, len(tokens))
        states = []
        if lease.mamba is not None:
            contents.write_state(int(lease.mamba.slots[0]), ids(tokens))
            states = [(len(tokens), int(lease.mamba.slots[0]))]
        lease.commit(states=states)


def check(port: Port, client: Client, tokens: range, host_tokens: int | None = None) -> None:
    """All of them are a hit, so many of the host, and hold what was written. WrongContents."""
    with client.acquire(tokens, states=int(client.keeps_states), wait_s=10) as lease:
        assert lease.matched_tokens == len(tokens)
        if host_tokens is not None:
            assert lease.host_tokens == host_tokens
        lease.wait_loaded()
        Contents(client, port.layers).check_match(lease, ids(tokens))


__all__ = ["World", "check", "evict", "ids", "of_a_card", "of_software", "put", "until"]
