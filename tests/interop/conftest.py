from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import consumers
import pytest
from mooncakes import Master

sys.path.append(str(Path(__file__).parents[1] / "integrations"))  # its models: `tiny`


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return consumers.build_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def master(tmp_path: Path, shim: Path) -> Iterator[Master]:
    made = Master(tmp_path, shim)
    yield made
    made.signal(signal.SIGCONT)
    made.kill()
