"""What the configuration makes of itself."""

from __future__ import annotations

import os
from pathlib import Path

from shelf import SHARD_BYTES, identity, memory

from sglcache.config import StorageConfig
from sglcache.storage.build import build_store
from sglcache.storage.file import FileStore
from sglcache.storage.host import HostPages
from sglcache.storage.mooncake import MooncakeStore


def test_each_kind_is_built_with_its_options(tmp_path: Path) -> None:
    assert build_store(StorageConfig(), identity(), memory(), 0) is None

    config = StorageConfig(kind="file", path=tmp_path, size="2 MiB", low_water=0.5)  # type: ignore[arg-type]
    store = build_store(config, identity(), memory(), 3)
    assert isinstance(store, FileStore)
    assert (store.path, store.max_bytes, store.low_bytes) == (tmp_path / "rank-3", 2 << 20, 1 << 20)
    store.open()
    other = build_store(config, identity(), memory(), 4)
    assert other is not None
    other.open()  # each rank has a folder of its own
    other.close()
    store.close()

    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    pages = HostPages.page_first(4, [memoryview(bytearray(4 * SHARD_BYTES))], [fd])
    config = StorageConfig(kind="mooncake", master="h:1", segment_size="1 GiB")  # type: ignore[arg-type]
    made = build_store(config, identity(payload_bytes=SHARD_BYTES), pages, 0)
    assert isinstance(made, MooncakeStore)
    assert made._start.options.segment_bytes == 1 << 30
    assert made._start.options.master == "h:1"
    assert made._start.num_threads == 4
    os.close(fd)
