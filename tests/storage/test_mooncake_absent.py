"""Mooncake's store where there is no Mooncake. With it: tests/interop/test_mooncake.py."""

from __future__ import annotations

import importlib.util
import os
import time

import pytest
from shelf import SHARD_BYTES, identity, memory

from sglcache.errors import BadRequest, NotInstalled
from sglcache.storage.host import HostPages
from sglcache.storage.mooncake import MooncakeStore
from sglcache.storage.mooncake_words import Options

NOWHERE = Options(master="127.0.0.1:1")


def shared() -> HostPages:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(fd, 4 * SHARD_BYTES)
    return HostPages.page_first(4, [memoryview(bytearray(4 * SHARD_BYTES))], [fd])


@pytest.mark.skipif(importlib.util.find_spec("mooncake") is not None, reason="Mooncake is installed here")
def test_without_the_library_it_is_refused_with_the_remedy() -> None:
    pages = shared()
    store = MooncakeStore(NOWHERE, identity(payload_bytes=SHARD_BYTES), pages)
    with pytest.raises(NotInstalled, match=r"pip install 'sglcache\[mooncake\]'"):
        store.open()
    os.close(pages.fds[0])


def test_pages_that_another_process_can_not_map_are_refused() -> None:
    with pytest.raises(BadRequest, match="memfds"):
        MooncakeStore(NOWHERE, identity(), memory())


def test_a_process_that_ends_at_once_is_started_again_ever_later_and_everything_is_missed() -> None:
    pages = shared()
    store = MooncakeStore(NOWHERE, identity(payload_bytes=SHARD_BYTES), pages, launch=["false"])
    store._keeper.start()
    started = time.monotonic()
    while store._lives < 2:
        assert time.monotonic() - started < 20
        store._ending.wait(0.01)
    assert time.monotonic() - started >= 0.5
    assert not store.stats().connected
    store.close()
    assert store._lives <= 2 + (time.monotonic() - started)  # the third waits a second
    os.close(pages.fds[0])
