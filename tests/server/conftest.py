from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglcache.testing.daemon import Daemon


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for the tests of a file that leave it as they found it."""
    with Daemon(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon


@pytest.fixture
def daemon(shared: Daemon) -> Iterator[Daemon]:
    """The file's daemon, empty before the test and with nothing left behind after it."""
    with shared.observer() as observer:
        observer.clear()
    yield shared
    status = shared.settle()
    assert status["gauges"]["num_leases"] == 0
    assert status["sessions"] == []
    for pool in status["pools"]:
        assert pool["fenced"] == pool["leased"] == pool["locked"] == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture(scope="session")
def ipv6() -> bool:
    """Whether this host has the IPv6 loopback."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
