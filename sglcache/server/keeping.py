"""Where the memory of the host tier lies while the rank that fills it comes and goes.

It has to outlive a process, so somebody else holds it: the supervisor, by the descriptors of memfds that nothing names
(`channel.Keep`); or, with `host.keep_path`, a folder, by files of these names, which outlives the supervisor as well.
Either way a life finds by name what the life before had, of the same size, and tells by the journal whether it is of
any use (`memory.journal`): that has the inodes of the pools that it speaks of.

With files all of the memory is taken when they are made: a hole in a file on a full file system is a SIGBUS.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from sglcache import paths
from sglcache.errors import ConfigError, StartError, because
from sglcache.memory.mapping import create_memfd

logger = logging.getLogger("sglcache.keeping")

KEEP = "keep_path"
OURS = "sglcache-"  # what the names of all that is kept begin with
JOURNAL = f"{OURS}journal"
HOLD_S = 5.0  # that a killed process may take to be gone
HOLD_POLL_S = 0.002


class Keeper:
    """Gives descriptors by name: of the life before, or new ones of zeros, which later lives get."""

    def __init__(
        self, folder: Path | None, offset: int, kept: Mapping[str, int], keep: Callable[[str, int | None], bool]
    ) -> None:
        """`folder`: of `host.keep_path`, for all ranks. `kept`: what the supervisor held, ours now; `keep` has it hold
        more. ConfigError: the folder can't be had, or another daemon has it."""
        self._keep = keep
        self._kept = dict(kept)
        self._folder: Path | None = None
        self._lock = -1
        self.holds: list[int] = []
        self.identities: list[tuple[str, int, int, int]] = []  # name, device, inode, bytes of what was given
        if folder is not None:
            self._folder = rank_folder(folder, offset)
            self._lock = _claim(self._folder)

    def open(self, name: str, num_bytes: int) -> int:
        """A descriptor of so many bytes, the caller's to close. ConfigError: there is no memory to be had."""
        fd = self._file(name, num_bytes) if self._folder is not None else self._memfd(name, num_bytes)
        info = os.fstat(fd)
        self.identities.append((name, info.st_dev, info.st_ino, num_bytes))
        return fd

    def _memfd(self, name: str, num_bytes: int) -> int:
        fd = self._kept.pop(name, -1)
        if fd >= 0:
            if os.fstat(fd).st_size == num_bytes:
                return fd
            os.close(fd)
        fd = create_memfd(name, num_bytes)
        if not self._keep(name, fd):
            logger.warning("the supervisor does not hold %s: the next life begins without it", name)
        return fd

    def _file(self, name: str, num_bytes: int) -> int:
        assert self._folder is not None
        path = self._folder / name
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                if (size := os.fstat(fd).st_size) != num_bytes:
                    if size:
                        logger.warning("%s is of %d bytes, not %d: what it held is dropped", path, size, num_bytes)
                    os.ftruncate(fd, 0)
                    if num_bytes:
                        os.posix_fallocate(fd, 0, num_bytes)
            except BaseException:
                os.close(fd)
                with contextlib.suppress(OSError):
                    os.unlink(path)
                raise
        except OSError as exc:
            what = f"host.{KEEP}: {path} of {num_bytes:,} bytes can't be had"
            remedy = "give it room, or lower host.size" if exc.errno == errno.ENOSPC else f"set host.{KEEP} elsewhere"
            raise ConfigError(f"{what}: {because(exc, remedy)}", path=f"host.{KEEP}", value=num_bytes) from exc
        return fd

    def hold(self, fd: int) -> None:
        """Wait until nobody writes into what was given: no life before, and no process that it started.

        It holds `fd`, one of those given, from then on, by a lock that goes with its last holder; who is to write,
        too, inherits `holds`. StartError: somebody still does.
        """
        hold = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)  # a lock is of the opening, not of the file
        try:
            deadline = time.monotonic() + HOLD_S
            while True:
                try:
                    fcntl.flock(hold, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise StartError(
                            f"a process of an earlier life still writes into host pages after {HOLD_S:g} s; end it"
                        ) from None
                    time.sleep(HOLD_POLL_S)
        except BaseException:
            os.close(hold)
            raise
        self.holds.append(hold)

    def close(self) -> None:
        """What was given stays the callers'. Idempotent."""
        for hold in self.holds:
            os.close(hold)
        self.holds.clear()
        for fd in self._kept.values():
            os.close(fd)
        self._kept.clear()
        if self._folder is not None and self._lock >= 0:
            paths.unlock(self._folder, self._lock)
            self._lock = -1


def rank_folder(folder: Path, offset: int) -> Path:
    """Where `host.keep_path` has a rank's."""
    return folder / f"rank-{offset}"


def _claim(folder: Path) -> int:
    """Make it, mode 0700, and hold it."""
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        _check_private(folder)
        return paths.lock(folder)
    except BlockingIOError:
        raise ConfigError(
            f"host.{KEEP}: a live daemon has {folder}; stop it, or set another", path=f"host.{KEEP}"
        ) from None
    except OSError as exc:
        why = because(exc, "set it to a folder that this user may make, best on a tmpfs such as /dev/shm")
        raise ConfigError(f"host.{KEEP}: {folder} can't be had: {why}", path=f"host.{KEEP}") from exc


def check_place(folder: Path, num_bytes: int) -> None:
    """ConfigError: a daemon could not keep so many bytes there, as far as can be seen without trying."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    said = {"path": f"host.{KEEP}", "value": str(folder)}
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(
            f"host.{KEEP}: {place} is no folder that this user may write; set it to one, best on a tmpfs such as "
            "/dev/shm",
            **said,
        )
    for each in held_in(folder):
        _check_private(each.folder)
    there, room = sum(each.num_bytes for each in held_in(folder)), os.statvfs(place)
    if num_bytes > there + room.f_bavail * room.f_frsize:
        raise ConfigError(
            f"host.{KEEP}: {folder} has room for {room.f_bavail * room.f_frsize:,} bytes beside the {there:,} there, "
            f"and {num_bytes:,} are needed; give it room, or lower host.size",
            **said,
        )


def _check_private(folder: Path) -> None:
    info = os.lstat(folder)
    if info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise ConfigError(
            f"host.{KEEP}: {folder} must be this user's, with mode 0700: who can enter it can read everyone's KV",
            path=f"host.{KEEP}",
        )


class Held:
    """What a folder of `host.keep_path` has of one rank, for people."""

    def __init__(self, folder: Path, offset: int) -> None:
        self.folder = rank_folder(folder, offset)
        self.offset = offset
        self.num_bytes = 0
        self.names: list[str] = []
        self.others: list[str] = []  # which are not ours
        with contextlib.suppress(FileNotFoundError):
            for entry in sorted(os.scandir(self.folder), key=lambda each: each.name):
                if entry.name.startswith(OURS) and entry.is_file(follow_symlinks=False):
                    self.names.append(entry.name)
                    self.num_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
                else:
                    self.others.append(entry.name)

    @property
    def in_use(self) -> bool:
        """Whether a live daemon has it."""
        try:
            held = os.open(f"{self.folder}.lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(held)
        return False

    def purge(self) -> None:
        """Remove it; what is not ours stays. ConfigError if a live daemon has it; OSError: it can't be."""
        lock = _claim(self.folder) if self.folder.exists() else -1
        if lock < 0:
            return
        try:
            for name in self.names:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.folder / name)
            if not self.others:
                os.rmdir(self.folder)
        finally:
            paths.unlock(self.folder, lock)


def memory_of(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str | None:
    """What kind of file system the folder is, or is to be, on; None: one of memory, or nobody knows."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    best, kind = "", ""
    with contextlib.suppress(OSError):
        for line in mounts.read_text().splitlines():
            _, at, what, *_ = line.split()
            if place.resolve().is_relative_to(at) and len(at) >= len(best):
                best, kind = at, what
    return None if kind in ("", "tmpfs", "ramfs", "hugetlbfs") else kind


def held_in(folder: Path | None) -> list[Held]:
    """Every rank's that is there, by its offset. None: nowhere."""
    offsets: list[int] = []
    if folder is None:
        return []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry in os.scandir(folder):
            head, _, tail = entry.name.partition("rank-")
            if not head and tail.isdigit() and entry.is_dir(follow_symlinks=False):
                offsets.append(int(tail))
    return [held for offset in sorted(offsets) if (held := Held(folder, offset)).names]
