"""Cards in software for the tests of this folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from softcuda import SoftCuda, cards, compiled
from worlds import World, of_a_card, of_software


@pytest.fixture(scope="session")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`libcuda.so.1`, compiled by the first of the workers that wants it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "softcuda"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "libcuda.so.1").exists():
            compiled(folder / "new").rename(folder / "libcuda.so.1")
    return folder / "libcuda.so.1"


@pytest.fixture
def soft_cuda(libcuda: Path) -> Iterator[SoftCuda]:
    """One card of 256 MiB."""
    with cards(libcuda) as soft:
        yield soft


@pytest.fixture
def two_cards(libcuda: Path) -> Iterator[SoftCuda]:
    with cards(libcuda, SOFTCUDA_DEVICES=2) as soft:
        yield soft


@pytest.fixture(scope="session", params=["software", pytest.param("card", marks=pytest.mark.gpu)])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """The cards of this process and of the daemons that it starts."""
    if request.param == "card":
        made = of_a_card()
    else:
        made = of_software(request.getfixturevalue("libcuda"))
    with made as world:
        yield world
