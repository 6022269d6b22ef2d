from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from sglcache.testing.daemon import Daemon


@pytest.fixture
def daemon(lend: Callable[..., Daemon]) -> Daemon:
    return lend()


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
