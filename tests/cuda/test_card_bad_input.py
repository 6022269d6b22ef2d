"""A handle of a pool that makes no sense is refused, and costs the process neither its card nor anything else."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from worlds import World, check, put, until

from sglcache.client.cards import on_cards
from sglcache.errors import ConfigError, ProtocolError
from sglcache.memory.cuda_pools import open_pool
from sglcache.memory.mapping import create_memfd
from sglcache.testing.daemon import Daemon

Lend = Callable[..., Daemon]

TOKENS = range(64)
GRANULE = 2 << 20


@contextlib.contextmanager
def nothing_is_left(world: World) -> Iterator[None]:
    """The card is ours afterwards, and so is all that was on the way."""
    gc.collect()
    descriptors, used = len(os.listdir("/proc/self/fd")), world.used()
    yield
    gc.collect()
    until(lambda: world.is_back(used) and len(os.listdir("/proc/self/fd")) <= descriptors)


@contextlib.contextmanager
def some(make: Callable[[], int]) -> Iterator[int]:
    fd = make()
    try:
        yield fd
    finally:
        os.close(fd)


def null() -> int:
    return os.open("/dev/null", os.O_RDWR)


def memfd() -> int:
    return create_memfd("no-card-s", GRANULE)


def half_of_a_pair() -> int:
    ours, theirs = socket.socketpair()
    theirs.close()
    return ours.detach()


FDS: dict[str, dict[str, Any]] = {
    "a UUID of 15 bytes": {"device_uuid": bytes(15)},
    "more bytes than are mapped": {"num_bytes": GRANULE + 1},
    "no bytes": {"num_bytes": -1},
    "more mapped than there is": {"mapped_bytes": 64 * GRANULE},
    "half a granule mapped": {"mapped_bytes": GRANULE // 2},
    "nothing mapped": {"mapped_bytes": 0, "num_bytes": 0},
}


def test_of_descriptors(world: World, lend: Lend) -> None:
    daemon = lend(**world.sections())
    with world.client(daemon) as client:
        put(world.port, client, TOKENS)
        [handle] = on_cards(client._welcome)
        fd, driver = client._connection.fds[0], world.port.cards[0]
        assert handle.mapped_bytes == GRANULE  # type: ignore[union-attr]
        with nothing_is_left(world):
            for change in FDS.values():
                with pytest.raises(ProtocolError):
                    open_pool(driver, replace(handle, **change), fd)
            with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
                open_pool(driver, replace(handle, device_uuid=bytes(16)), fd)
            with pytest.raises(ProtocolError):
                open_pool(driver, handle, None)
            for make in (null, memfd, half_of_a_pair):
                with some(make) as other, pytest.raises(ProtocolError, match="can't be mapped"):
                    open_pool(driver, handle, other)
            for index in (-1, 99):
                with pytest.raises(ProtocolError, match=f"descriptor {index} of"):
                    client._memory(replace(handle, fd_index=index))
        check(world.port, client, TOKENS)


@pytest.mark.daemons
def test_of_ipc(world: World, lend: Lend) -> None:
    daemon = lend(**world.sections(pool={"export": "ipc"}))
    with world.client(daemon) as client:
        put(world.port, client, TOKENS)
        [handle] = on_cards(client._welcome)
        driver, size = world.port.cards[0], handle.num_bytes
        wrong: list[dict[str, Any]] = [
            {"device_uuid": b""},
            {"handle": bytes(63)},
            {"handle": np.random.default_rng(1).bytes(64)},
            {"offset": size},
            {"offset": -4096},
            {"offset": 1 << 60},
            {"num_bytes": 2 * size, "offset": 4096},
            {"num_bytes": -1},
        ]
        with nothing_is_left(world):
            for change in wrong:
                with pytest.raises(ProtocolError):
                    open_pool(driver, replace(handle, **change), None)
        check(world.port, client, TOKENS)


def test_a_role_without_pages_is_told_of_none(world: World, lend: Lend) -> None:
    with lend(**world.sections()).observer() as observer:
        assert on_cards(observer._welcome) == []
        assert observer.peek(TOKENS).matched_tokens == 0
