"""Block hashes as the daemon makes them, for a mirror whose stream withholds tokens."""

from __future__ import annotations

from collections.abc import Iterable

from sglcache.client.picture import BlockHashes


def named(name: str) -> BlockHashes:
    """The hashes of `events.hash` = `name`. The first one raises ConfigError if there is no such hash."""

    def block_hashes(tokens: bytes, block_size: int, lora_name: str | None, cache_salt: str | None) -> Iterable[int]:
        # numpy and xxhash come with it, which a mirror is otherwise free of.
        from sglcache.core import hashing
        from sglcache.core.key import Namespace

        hasher = hashing.hasher(name)
        page_bytes = 4 * block_size
        before = hashing.seed(Namespace.of(lora_name, None, cache_salt))
        # A page at a time: who asks stops at the first that is not there.
        for at in range(0, len(tokens) - page_bytes + 1, page_bytes):
            before = hasher.chain(before, tokens[at : at + page_bytes], page_bytes)
            yield hashing.block_hash(before)

    return block_hashes
