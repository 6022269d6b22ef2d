"""Where a rank's control socket lies: one rule, for the daemon that binds it and the client that looks for it.

`SGLCACHE_SOCKET` names the socket outright. Else it is `rank-<offset>.sock` in `$XDG_RUNTIME_DIR/sglcache`, and
where there is no XDG_RUNTIME_DIR (a container, a cron job) in `/tmp/sglcache-<uid>`. That folder lies in a place
where anyone may make one of the name, so it's used only if it is ours and nobody else can enter it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from sglcache.errors import ConfigError

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
    """The control socket of the rank at `offset`, by the rule above."""
    if path := environ.get("SGLCACHE_SOCKET"):
        return Path(path)
    return runtime_dir(environ) / f"rank-{offset}.sock"


def make_private(folder: Path) -> None:
    """Make the folder, mode 0700, or check that the one there is ours alone; ConfigError if it isn't."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
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
