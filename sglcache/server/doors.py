"""Listening sockets of the control plane, bound before anything is built behind them.

What can't be had is refused here, by the name of its configuration key: a port or a path that another has, an address
that this host has not, a folder that others may enter.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path

from sglcache import paths
from sglcache.errors import ConfigError, because

FDS_PER_CONNECTION = 4
"""File descriptors, at most: of a runner its socket, its process and two doorbells."""


BACKLOG = 128


def tcp(host: str, port: int, section: str) -> socket.socket:
    """Listen on the first address that `host` names, IPv4 before IPv6; port 0: the system's choice.

    ConfigError, by the key that is to blame: the section's `host` or its `port`.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = sorted(found, key=lambda info: info[0] != socket.AF_INET)[0]
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                # `::` is every address of the host, IPv4 ones too, as it is for the event stream.
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, host != "::")
            sock.bind(address)
            sock.listen(BACKLOG)
        except BaseException:
            sock.close()
            raise
    except OSError as exc:
        if isinstance(exc, socket.gaierror) or exc.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL):
            key, value, remedy = f"{section}.host", host, "write an address or a name of this host"
        else:
            key, value, remedy = (
                f"{section}.port",
                str(port),
                f"choose another, or set {section}.port=0 for any; `sglcache doctor` says who has it",
            )
        what = "is taken" if exc.errno == errno.EADDRINUSE else "can't be bound"
        why = f"; {remedy}" if exc.errno == errno.EADDRINUSE else f": {because(exc, remedy)}"
        raise ConfigError(f"{key} = {value}: {host}:{port} {what}{why}", path=key, value=value) from exc
    return sock


def url(host: str, port: int) -> str:
    """How a browser on this host reaches it."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def unix(path: Path, key: str) -> tuple[socket.socket, int]:
    """Listen on `path`, mode 0600: the socket, and the lock by which the path is ours. `close` takes both.

    ConfigError: a live daemon has it, something else is there, or the place is no good. A dead daemon's is replaced.
    """
    paths.check_length(path)
    try:
        if path.parent == paths.runtime_dir():
            paths.make_private(path.parent)
        else:
            _make_folder(path.parent, key)
        lock = _claim(path, key)
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                mask = os.umask(0o177)  # the socket is 0600 from its first moment
                try:
                    sock.bind(os.fspath(path))
                finally:
                    os.umask(mask)
                sock.listen(BACKLOG)
            except BaseException:
                sock.close()
                raise
        except BaseException:
            paths.unlock(path, lock)
            raise
    except OSError as exc:
        why = because(exc, f"set {key} to a place where this user may make one")
        raise ConfigError(f"{key}: the socket {path} can't be made: {why}", path=key) from exc
    return sock, lock


def _make_folder(folder: Path, key: str) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        why = because(exc, f"set {key} to a path in a folder that this user has")
        raise ConfigError(f"{key}: the folder {folder} can't be made: {why}", path=key) from exc


def close(sock: socket.socket, path: Path, lock: int) -> None:
    """Stop listening and remove what `unix` made."""
    sock.close()
    with contextlib.suppress(OSError):
        os.unlink(path)
    paths.unlock(path, lock)  # last: until here nobody else can have bound the path


def _claim(path: Path, key: str) -> int:
    """Hold the path, and remove a dead daemon's socket from it."""
    try:
        lock = paths.lock(path)
    except BlockingIOError:
        raise ConfigError(
            f"a live daemon has {path}; stop it, or give this one another socket with {key}", path=key
        ) from None
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"{path} is there and is no socket; remove it", path=key)
        os.unlink(path)
    except FileNotFoundError:
        pass
    except BaseException:
        paths.unlock(path, lock)
        raise
    return lock
