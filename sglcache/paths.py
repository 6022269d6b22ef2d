"""Where a daemon's unix sockets lie: one rule, for the daemon that binds them and the client that looks for them.

`SGLCACHE_SOCKET` names rank 0's control socket outright, and with -1, -2, ... behind it the other ranks'. Else a rank's
is `rank-<offset>.sock` in `$XDG_RUNTIME_DIR/sglcache`, and where there is no XDG_RUNTIME_DIR (a container, a cron job)
in `/tmp/sglcache-<uid>`. That folder lies in a place where anyone may make one of the name, so it's used only if it is
ours and nobody else can enter it.

The supervisor answers HTTP beside the socket of the first rank that it runs: that path with .http behind it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from sglcache.errors import ConfigError, because

MAX_SOCKET_PATH = 107  # bytes: sockaddr_un.sun_path less its closing zero


def runtime_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of this user's sockets. It need not exist."""
    if base := environ.get("XDG_RUNTIME_DIR"):
        return Path(base) / "sglcache"
    return Path(f"/tmp/sglcache-{os.geteuid()}")


def state_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of what a rank remembers over a restart: `$XDG_STATE_HOME/sglcache`. It need not exist."""
    if base := environ.get("XDG_STATE_HOME"):
        return Path(base) / "sglcache"
    return Path(environ.get("HOME") or "/") / ".local" / "state" / "sglcache"


def socket_path(offset: int = 0, environ: Mapping[str, str] = os.environ) -> Path:
    """The control socket of the rank at `offset`, by the rule above. ConfigError: a folder is named."""
    if path := environ.get("SGLCACHE_SOCKET"):
        return beside(Path(path), offset)
    return runtime_dir(environ) / f"rank-{offset}.sock"


def beside(socket: Path, offset: int) -> Path:
    """The control socket of the rank at `offset` where rank 0's is `socket`: as with an ipc:// endpoint."""
    return _checked(socket).with_name(f"{socket.name}-{offset}") if offset else _checked(socket)


def _checked(socket: Path) -> Path:
    if not socket.name or socket.name == "..":
        raise ConfigError(f"{str(socket)!r} is a folder; name a socket in it", path="control.socket")
    return socket


def supervisor_path(socket: Path) -> Path:
    """Where the supervisor answers HTTP whose first rank has this control socket."""
    return _checked(socket).with_name(f"{socket.name}.http")


def supervisors(socket: Path | None = None, environ: Mapping[str, str] = os.environ) -> list[Path]:
    """The supervisors' sockets that there are, by their first ranks' offsets; `socket`: rank 0's, where it is named.

    One may be a dead supervisor's.
    """
    base = socket if socket is not None else Path(named) if (named := environ.get("SGLCACHE_SOCKET")) else None
    folder = base.parent if base is not None else runtime_dir(environ)
    name = re.escape(base.name) + r"(?:-(\d+))?" if base is not None else r"rank-(\d+)\.sock"
    try:
        there = os.listdir(folder)
    except OSError:
        return []
    found = [(int(match[1] or 0), each) for each in there if (match := re.fullmatch(name + r"\.http", each))]
    return [folder / each for _, each in sorted(found)]


def make_private(folder: Path) -> None:
    """Make the folder, mode 0700, or check that the one there is ours alone; ConfigError if it isn't.

    The one above it is the system's: if that is not there, XDG_RUNTIME_DIR is wrong, and nobody would look where we
    are.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as exc:
        why = because(exc, "make it, set XDG_RUNTIME_DIR to this user's, or set control.socket")
        if not folder.parent.is_dir():
            raise ConfigError(
                f"control.socket: XDG_RUNTIME_DIR is {folder.parent}: {why}", path="control.socket"
            ) from exc
        raise ConfigError(f"control.socket: the folder {folder} can't be made: {why}", path="control.socket") from exc
    check_private(folder)


def check_private(folder: Path) -> None:
    """ConfigError unless the folder is a real one, owned by this user, that nobody else can enter."""
    info = os.lstat(folder)
    if not stat.S_ISDIR(info.st_mode):
        raise ConfigError(f"{folder} is not a folder; remove it, or set SGLCACHE_SOCKET")
    if info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise ConfigError(
            f"{folder} belongs to uid {info.st_uid} with mode {stat.S_IMODE(info.st_mode):04o}, "
            f"but must be yours (uid {os.geteuid()}) with mode 0700; remove it, or set SGLCACHE_SOCKET"
        )


def check_length(path: Path) -> None:
    """ConfigError if the kernel can't take this as a socket's name."""
    if (length := len(os.fsencode(path))) > MAX_SOCKET_PATH:
        raise ConfigError(f"socket path of {length} bytes, at most {MAX_SOCKET_PATH} fit: {path}; choose a shorter one")


def lock(path: Path) -> int:
    """Hold `path`, by a lock on a file beside it, until `unlock` of the descriptor, or this process's end.

    BlockingIOError: another process holds it. No try-and-see, whose answer is old when it comes: the kernel gives the
    lock up with its holder. Of one that died the file stays, and is held by the next.
    """
    name = f"{path}.lock"
    while True:
        held = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its holder may have removed it since it was opened: then it is no longer what others would lock.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(held), os.stat(name)):
                    return held
        except BaseException:
            os.close(held)
            raise
        os.close(held)


def is_locked(lock: Path) -> bool:
    """Whether a process holds this file by a lock, as `lock` takes it. False as well where there is none to be read."""
    try:
        with open(lock, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def unlock(path: Path, held: int) -> None:
    """Let go of `path`, and leave no file behind. It goes before the lock does, so nobody else's can be removed."""
    with contextlib.suppress(OSError):
        os.unlink(f"{path}.lock")
    os.close(held)
