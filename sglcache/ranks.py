"""Asking a daemon's supervisor how its ranks are, on this host: HTTP over the unix socket that `paths` names."""

from __future__ import annotations

import http.client
import json
import socket
from pathlib import Path
from typing import Any

from sglcache import paths
from sglcache.errors import Unavailable

ANSWER_S = 5.0  # a supervisor gives its ranks one


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=ANSWER_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def ask(supervisor: Path, page: str = "/server_info") -> dict[str, Any]:
    """One of the supervisor's pages that are JSON, whatever its status. Unavailable: there is no supervisor."""
    connection = _Connection(supervisor)
    try:
        connection.request("GET", page)
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
        return answer
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
