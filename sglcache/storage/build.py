"""The store that the configuration asks for; of the others nothing is loaded."""

from __future__ import annotations

from sglcache.config import StorageConfig
from sglcache.storage.host import HostPages
from sglcache.storage.page import Identity
from sglcache.storage.store import Store


def build_store(config: StorageConfig, identity: Identity, pages: HostPages, offset: int) -> Store | None:
    """For the rank of that offset, not opened yet; None: there is no third tier."""
    if config.kind == "file":
        from sglcache.storage.file import FileStore  # and with it SQLite

        assert config.path is not None, config
        path = config.path / f"rank-{offset}"
        return FileStore(path, identity, pages, max_bytes=config.size, low_water=config.low_water)
    if config.kind == "mooncake":
        from sglcache.storage.mooncake import MooncakeStore
        from sglcache.storage.mooncake_words import Options

        assert config.master is not None, config
        options = Options(
            master=config.master,
            metadata_server=config.metadata_server,
            local_hostname=config.local_hostname,
            protocol=config.protocol,
            rdma_devices=config.rdma_devices,
            segment_bytes=config.segment_size,
            buffer_bytes=config.buffer_size,
        )
        # One more that writes, and one that looks up.
        return MooncakeStore(
            options, identity, pages, num_threads=config.num_threads + 2, rpc_timeout_s=config.rpc_timeout_s
        )
    return None
