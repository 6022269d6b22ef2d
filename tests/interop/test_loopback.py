"""Nothing that these tests start is to be reached from another host."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
from consumers import Indexer, RadixView, assert_loopback, listening

from sglcache.testing.daemon import Daemon

pytestmark = pytest.mark.interop


def test_daemon_and_consumers_listen_on_loopback_alone(tmp_path: Path, shim: Path) -> None:
    with ExitStack() as opened:
        daemon = opened.enter_context(Daemon(tmp_path / "daemon", http={"enabled": True, "port": 0}))
        indexer = opened.enter_context(Indexer(tmp_path, shim))
        view = opened.enter_context(RadixView(tmp_path, shim, daemon.info["http"]))
        for pid in (daemon.process.pid, daemon.pid, indexer.process.pid, view.process.pid):
            addresses = listening(pid)
            assert addresses, f"pid {pid} does not listen at all"
            assert_loopback(addresses)


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_check_sees_who_listens(family: socket.AddressFamily, address: str) -> None:
    try:
        server = socket.create_server((address, 0), family=family)
    except OSError as error:
        pytest.skip(f"{address} is not to be had here: {error}")
    with server:
        assert (address, server.getsockname()[1]) in listening(os.getpid())


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "10.0.0.5"])
def test_the_check_refuses_what_is_beyond(address: str) -> None:
    with pytest.raises(AssertionError, match=address):
        assert_loopback([("127.0.0.1", 1), (address, 1)])
