from __future__ import annotations

from collections.abc import Iterator

import pytest
from kernel_facts import descriptors

from sglcache.memory.geometry import Geometry


@pytest.fixture
def geometry() -> Geometry:
    return Geometry(
        page_size=4, num_pages=8, num_layers=3, num_kv_heads=4, head_dim=8, dtype="float32", num_shards=2, host_pages=6
    )


@pytest.fixture(autouse=True)
def _no_descriptor_leaks() -> Iterator[None]:
    before = descriptors()
    yield
    assert descriptors() == before
