"""What the tests of the third tier share: pages with known bytes, runs of them, and disks that fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sglcache.core.effects import Run
from sglcache.core.hashing import hasher, seed
from sglcache.core.key import ROOT, Namespace
from sglcache.storage.disk import Buffer, Disk
from sglcache.storage.file import FileStore
from sglcache.storage.host import HostPages
from sglcache.storage.page import Form, Identity

PAGE = 4  # tokens
SHARD_BYTES = 96
SHARDS = 2


def identity(**changes: Any) -> Identity:
    words: dict[str, Any] = {
        "model": "m",
        "dtype": "float16",
        "layout": "page_first",
        "page_size": PAGE,
        "num_layers": 2,
        "num_shards": SHARDS,
        "shards": (0, SHARDS),
        "payload_bytes": SHARDS * SHARD_BYTES,
        "geometry": {"heads": 1},
    }
    return Identity(**{**words, **changes})


def memory(num_pages: int = 64, page_bytes: int = SHARD_BYTES, shards: int = SHARDS) -> HostPages:
    return HostPages.page_first(num_pages, [memoryview(bytearray(num_pages * page_bytes)) for _ in range(shards)])


def run(
    tokens: Sequence[int],
    namespace: Namespace = ROOT,
    *,
    skip: int = 0,
    hash_name: str = "xxh3_128",
    bigram: bool = False,
) -> Run:
    """The pages of a prompt from page `skip` on."""
    form = Form(identity(hash_name=hash_name, bigram=bigram))
    keys, raw = form.keys, b"".join(token.to_bytes(4, "little") for token in tokens)
    raw = raw[: keys.whole(len(raw)) + keys.over]
    digests = hasher(hash_name).chain(seed(namespace), keys.words(raw), keys.word_bytes) if raw else b""
    size = form.digest_bytes
    before = digests[(skip - 1) * size : skip * size] if skip else None
    return Run(namespace, before, digests[skip * size :], raw[skip * keys.page_bytes :])


def pages_of(it: Run, size: int = 16) -> list[bytes]:
    return [it.digests[at : at + size] for at in range(0, len(it.digests), size)]


def bytes_of(digest: bytes, num_bytes: int = SHARDS * SHARD_BYTES) -> bytes:
    """What a page's bytes are in these tests: so two stores agree without telling each other."""
    return (digest * (num_bytes // len(digest) + 1))[:num_bytes]


def fill(pages: HostPages, slot: int, data: bytes) -> None:
    for view in pages.views(slot):
        view[:], data = data[: view.nbytes], data[view.nbytes :]


def held(pages: HostPages, slot: int) -> bytes:
    return b"".join(pages.views(slot))


def write(pages: HostPages, it: Run, size: int = 16) -> list[int]:
    """Put the run's bytes into the first slots; these."""
    digests = pages_of(it, size)
    for slot, digest in enumerate(digests):
        fill(pages, slot, bytes_of(digest, pages.payload_bytes))
    return list(range(len(digests)))


def never() -> bool:
    return False


def file_store(path: Path, pages: HostPages, **options: Any) -> FileStore:
    who = options.pop("identity", None) or identity()
    made = FileStore(path, who, pages, **{"max_bytes": 1 << 30, **options})
    made.open()
    return made


def files(path: Path) -> Iterator[Path]:
    """The files of pages, whole or not."""
    for place, _, names in sorted(os.walk(path)):
        if len(Path(place).name) == 2:
            yield from (Path(place) / name for name in sorted(names))


class Crash(BaseException):
    """The process is gone at this point."""


class FailingDisk(Disk):
    """Before each call `before` is asked, with its name and path; it may raise."""

    def __init__(self, before: Callable[[str, str], None]) -> None:
        self.before = before

    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        self.before("write", path)
        flat = b"".join(bytes(part) for part in parts)
        super().write(path, [flat[: len(flat) // 2]])
        self.before("written half", path)
        super().write(path, parts)
        self.before("written", path)

    def read(self, path: str, parts: Sequence[Buffer]) -> int:
        self.before("read", path)
        return super().read(path, parts)

    def rename(self, path: str, to: str) -> None:
        self.before("rename", path)
        super().rename(path, to)
        self.before("renamed", to)

    def unlink(self, path: str) -> None:
        self.before("unlink", path)
        super().unlink(path)
        self.before("unlinked", path)

    def mkdir(self, path: str) -> None:
        self.before("mkdir", path)
        super().mkdir(path)


def failing(step: str, code: int, times: int = 1 << 30) -> FailingDisk:
    """Each such call fails so, the first `times` times."""
    left = [times]

    def before(name: str, path: str) -> None:
        if name == step and left[0]:
            left[0] -= 1
            raise OSError(code, os.strerror(code), path)

    return FailingDisk(before)


ENOSPC, EROFS, EACCES, EIO, EMFILE = errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO, errno.EMFILE
