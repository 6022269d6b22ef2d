"""Block hashes as the daemon makes them, for a mirror whose stream withholds tokens."""

from __future__ import annotations

from collections.abc import Iterable

from sglcache.client.picture import BlockHashes


def named(name: str, bigram: bool = False) -> BlockHashes:
    """The hashes of `events.hash` = `name`, and of `pool.bigram`.

    The first one raises ConfigError if there is no such hash.
    """

    def block_hashes(tokens: bytes, block_size: int, lora_name: str | None, cache_salt: str | None) -> Iterable[int]:
        # numpy and xxhash come with it, which a mirror is otherwise free of.
        from sglcache.core import hashing
        from sglcache.core.key import Keys, Namespace

        hasher = hashing.hasher(name)
        keys = Keys(block_size, bigram)
        before = hashing.seed(Namespace.of(lora_name, None, cache_salt))
        # A page at a time: who asks stops at the first that is not there.
        for at in range(0, keys.whole(len(tokens)), keys.page_bytes):
            before = hasher.chain(before, keys.words(tokens[at : at + keys.span]), keys.word_bytes)
            yield hashing.block_hash(before)

    return block_hashes
