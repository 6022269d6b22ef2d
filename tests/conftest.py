from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings

from sglcache.compiled import FORM
from sglcache.testing.daemon import Daemon, until

MOST = 4  # daemons on the shelf: an idle one costs in two minutes what its start would

Lend = Callable[..., Daemon]

# How long an example takes is the machine's affair, and what else runs on it.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give the core's tests their mark; leave what a compiled core can't have to `make pure`, a card's to `-m gpu`."""
    for item in items:
        if "core" in item.path.parent.parts[-1:]:
            item.add_marker("core")
    left_out = {"pure"} if FORM.compiled else set()
    if "gpu" not in config.getoption("markexpr"):  # another `-m` takes the place of the one that leaves them out
        left_out.add("gpu")
    can_not = [item for item in items if any(item.get_closest_marker(name) for name in left_out)]
    if can_not:
        config.hook.pytest_deselected(items=can_not)
        items[:] = [item for item in items if item not in set(can_not)]


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """What was imported stays; let no `gc.collect()` of a test walk it, which takes half a second with transformers.

    A module whose tests thaw it again leaves it to the next.
    """
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()


class Shelf:
    """Running daemons by their configuration, for tests that leave them as they found them."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._daemons: dict[str, Daemon] = {}  # the last one used is the last

    def take(self, sections: dict[str, Any]) -> Daemon:
        """One of that configuration, with nothing cached."""
        key = json.dumps(sections, sort_keys=True)
        daemon = self._daemons.pop(key, None) or Daemon(self._folders.mktemp("lent"), **sections)
        self._daemons[key] = daemon
        if len(self._daemons) > MOST:
            self._stop(next(iter(self._daemons)))
        with daemon.admin() as admin:
            admin.clear()
        return daemon

    def take_back(self, daemon: Daemon) -> None:
        """AssertionError: something was left behind in it, and nobody gets it again."""
        try:
            until(lambda: not daemon.status(prove=False)["sessions"])
            status = daemon.settle()
            assert status["gauges"]["num_leases"] == 0
            for pool in status["pools"]:
                assert pool["fenced"] == pool["leased"] == pool["locked"] == 0
        except BaseException:
            self._daemons = {key: each for key, each in self._daemons.items() if each is not daemon}
            daemon.kill()
            raise

    def close(self) -> None:
        for key in list(self._daemons):
            self._stop(key)

    def _stop(self, key: str) -> None:
        daemon = self._daemons.pop(key)
        code = daemon.stop()
        assert code == 0, f"a daemon ended with {code}: {daemon.said()}"


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    shelf = Shelf(tmp_path_factory)
    yield shelf
    shelf.close()


@pytest.fixture
def lend(shelf: Shelf) -> Iterator[Lend]:
    """`lend(**sections)`: a daemon of that configuration, empty, and idle again when the test is over.

    The same one for all tests of this process that ask for the same. It is for tests that neither end it, nor look at
    what it counted from its start on, nor plant anything in it: these start their own.
    """
    lent: list[Daemon] = []

    def lend(**sections: Any) -> Daemon:
        lent.append(shelf.take(sections))
        return lent[-1]

    yield lend
    for daemon in lent:
        shelf.take_back(daemon)
