"""The first sequence number of a life: above every number of every earlier life, whatever the clock does (law 6).

It is max(clock in µs, reserved + 1). `reserved` lies in a small file and is moved ahead before it is reached, so
that no batch ever bears a number above what the file says: a life that ends without a word, and a clock that then
steps back, do no harm. The supervisor knows `reserved` as well, and gives it to the next life as its `floor`, should
the file be lost in between. One process at a time counts in a file: two would say the same number twice.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

from sglcache import paths
from sglcache.errors import ConfigError, because

# Numbers bought with one write of the file. A life starts at the clock's µs and uses far fewer than a million a
# second, so even lives of no length, one after the other, stay near the clock.
STRIDE = 10_000_000
MAX_NUMBER = 1 << 62  # a clock in µs comes to it in 146,000 years; what is above was never a number of ours
MAX_FILE = 4096  # bytes


class Numbers:
    """Owns the state file of one rank, from construction to `close`.

    ConfigError: the file can't be had (its `__cause__` is the OSError), makes no sense, or is a live daemon's.
    """

    def __init__(self, path: Path, clock_us: Callable[[], int], *, floor: int = 0, stride: int = STRIDE) -> None:
        """`floor`: a number that is known to have been reserved, whatever the file says."""
        self.path = path
        self.stride = stride
        self._lock = threading.Lock()
        self._held = _hold(path)
        try:
            self.reserved = max(self._read(), floor, 0)
            self.first = max(clock_us(), self.reserved + 1)
            """This life's first number. It is reserved already."""
            self.reserve(self.first)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let another process count in this file. Idempotent."""
        held, self._held = self._held, -1
        if held >= 0:
            paths.unlock(self.path, held)

    def low(self, next_seq: int) -> bool:
        """Whether half of what was bought is gone: then call `reserve`, from any thread; it waits for the disk."""
        return next_seq + self.stride // 2 > self.reserved

    def reserve(self, next_seq: int) -> None:
        """Buy numbers from `next_seq` on. ConfigError if the file can't be written."""
        with self._lock:
            self._reserve(next_seq + self.stride)

    def _reserve(self, upto: int) -> None:
        if upto <= self.reserved:
            return
        try:
            beside = self.path.with_name(f"{self.path.name}.{os.getpid()}")
            with open(beside, "w") as file:
                json.dump({"reserved": upto}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, self.path)
        except OSError as exc:
            raise _refused(self.path, "written", exc) from exc
        self.reserved = upto

    def _read(self) -> int:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # or a pipe's open waits for a writer
            with open(fd, "rb") as file:
                text = file.read(MAX_FILE + 1) or b""
        except FileNotFoundError:
            return 0
        except OSError as exc:
            raise _refused(self.path, "read", exc) from exc
        try:
            if len(text) > MAX_FILE:
                raise ValueError(f"it is longer than {MAX_FILE} bytes")
            reserved = json.loads(text)["reserved"]
            if type(reserved) is not int:
                raise TypeError(f"reserved is {reserved!r}")
            if not 0 <= reserved <= MAX_NUMBER:
                raise ValueError(f"{reserved} is not in 0..{MAX_NUMBER}")
        except (ValueError, TypeError, KeyError, RecursionError) as exc:
            # To go on would be to guess a number that consumers may have seen already.
            raise ConfigError(
                f"{self.path} does not say which sequence numbers were used ({exc}); "
                "remove it if this host's clock has never stepped back",
                path="state.dir",
            ) from exc
        return reserved


def _hold(path: Path) -> int:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return paths.lock(path)
    except BlockingIOError:
        raise ConfigError(
            f"a live daemon counts its event stream in {path}; stop it, or give this one another folder with state.dir",
            path="state.dir",
        ) from None
    except OSError as exc:
        raise _refused(path, "written", exc) from exc


def _refused(path: Path, what: str, error: OSError) -> ConfigError:
    why = because(error, "name a folder that this user may write to")
    return ConfigError(f"state.dir: the state file {path} can't be {what}: {why}", path="state.dir")
