"""Asking a daemon's supervisor how its ranks are, on this host: HTTP over the unix socket that `paths` names."""

from __future__ import annotations

import http.client
import json
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from sglcache import paths
from sglcache.errors import Unavailable

T = TypeVar("T")
ANSWER_S = 5.0  # a supervisor gives its ranks one


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=ANSWER_S)
        self._path = path
        self.pid: int | None = None  # the process at the other end, once it is known

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))
        credentials = struct.Struct("3i")  # struct ucred: pid, uid, gid
        peer = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
        self.pid = credentials.unpack(peer)[0] or None


def ask(supervisor: Path, page: str = "/server_info") -> dict[str, Any]:
    """One of the supervisor's pages that are JSON, whatever its status. Unavailable: there is no supervisor,
    or one that does not answer."""
    answer: dict[str, Any] = _get(supervisor, page, json.loads)
    return answer


def ask_metrics(supervisor: Path) -> str:
    """GET /metrics. Unavailable as for `ask`."""
    return _get(supervisor, "/metrics", bytes.decode)


def _get(supervisor: Path, page: str, read: Callable[[bytes], T]) -> T:
    connection = _Connection(supervisor)
    try:
        connection.request("GET", page)
        return read(connection.getresponse().read())
    except (TimeoutError, BlockingIOError) as exc:  # its backlog may be full of others who wait
        who = f" (pid {connection.pid})" if connection.pid else ""
        raise Unavailable(
            f"the supervisor at {supervisor}{who} is there, and does not answer within {ANSWER_S:g} s: it is stopped "
            "or starved; look at its process (`ps -o pid,stat,time`), let it go on (`kill -CONT`), or end it and start "
            "it again",
            pid=connection.pid,
        ) from exc
    except (OSError, http.client.HTTPException, ValueError) as exc:
        raise Unavailable(f"no supervisor answers at {supervisor}: {exc}; start one with `sglcache serve`") from exc
    finally:
        connection.close()


def daemons(socket: Path | None = None) -> list[dict[str, Any]]:
    """What /server_info says of each daemon that `paths.supervisors` finds and that answers."""
    found = []
    for path in paths.supervisors(socket):
        try:
            found.append(ask(path))
        except Unavailable:
            continue  # a dead one's socket
    return found
