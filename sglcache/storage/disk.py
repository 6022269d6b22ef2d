"""The calls of the operating system that a file store makes, in one place: a test can fail each of them, or stop at it.

All raise OSError, and wait for the disk with the interpreter's lock let go. Nothing is synced: after a power cut a file
may be anything, and its hashes say so.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

Buffer = bytes | bytearray | memoryview

_MAX_PARTS = 512  # of one call; the kernel's limit is 1024


class Disk:
    """The real one."""

    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        """Make a file of these parts, readable for its owner alone; what was there is replaced."""
        # Without waiting: to open a pipe that lies there for writing would wait for who reads it.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
        try:
            left = [memoryview(part).cast("B") for part in parts]
            while left:
                written = os.writev(fd, left[:_MAX_PARTS])
                left = _behind(left, written)
        finally:
            os.close(fd)

    def read(self, path: str, parts: Sequence[Buffer]) -> int:
        """Fill these buffers from the start of a file, and say how many bytes there were to do so."""
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            left, done = [memoryview(part).cast("B") for part in parts], 0
            while left and (count := os.preadv(fd, left[:_MAX_PARTS], done)):
                done += count
                left = _behind(left, count)
            return done
        finally:
            os.close(fd)

    def head(self, path: str, num_bytes: int) -> tuple[bytes, int]:
        """The first bytes of a file, and its size."""
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return os.pread(fd, num_bytes, 0), os.fstat(fd).st_size
        finally:
            os.close(fd)

    def rename(self, path: str, to: str) -> None:
        os.rename(path, to)

    def unlink(self, path: str) -> None:
        """Remove a file, or an empty folder that stands in its place; nothing there is fine."""
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        except IsADirectoryError:
            os.rmdir(path)

    def mkdir(self, path: str) -> None:
        """Make a folder for its owner alone; it may be there."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)


def _behind(parts: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of the parts behind the first so many bytes."""
    for number, part in enumerate(parts):
        if num_bytes < part.nbytes:
            return [part[num_bytes:], *parts[number + 1 :]]
        num_bytes -= part.nbytes
    return []
