from __future__ import annotations

from pathlib import Path

import consumers
import pytest


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return consumers.build_shim(tmp_path_factory.mktemp("shim"))
