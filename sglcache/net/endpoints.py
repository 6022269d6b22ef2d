"""Where a rank's sockets are: the rules for tcp:// and ipc:// endpoints, and binding to them.

Every rank has the configured endpoint offset by its number, as routers dial it. An endpoint here binds, whatever its
host is, unless `dial` is asked for by name. Nothing is resolved or touched before that, and zmq is not loaded before it
either: the supervisor, which only plans, does without.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import socket
import stat
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from sglcache.errors import ConfigError

if TYPE_CHECKING:
    import zmq

MAX_PORT = 65535
MAX_IPC_PATH = 107  # bytes; what a sockaddr_un holds

_WILDCARDS = {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # and where they are dialled from this host
_HOST = re.compile(r"(?!.*\.\.)(?!.*[^.]{64})[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")


@dataclass(frozen=True)
class Tcp:
    """`tcp://host:port`. Host: `*`, an address (IPv6 without its brackets) or a name. Port 0: the system's choice."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"

    @property
    def is_wildcard(self) -> bool:
        return self.host in _WILDCARDS

    def offset(self, rank: int, key: str = "endpoint") -> Tcp:
        """Rank `rank`'s own: port + rank, or 0 if the system chooses each. ConfigError: it would leave 1..65535."""
        if self.port + rank > MAX_PORT and self.port:
            raise ConfigError(
                f"{key}: {self} is port {self.port + rank} for rank {rank}; choose a base of at most {MAX_PORT - rank}",
                path=key,
                rank=rank,
            )
        return replace(self, port=self.port + rank) if self.port else self

    def dialled(self) -> Tcp:
        """How a process on this host reaches it."""
        return replace(self, host=_WILDCARDS.get(self.host, self.host))


@dataclass(frozen=True)
class Ipc:
    """`ipc://path`; a path that starts with @ is in Linux's abstract namespace."""

    path: str

    def __str__(self) -> str:
        return f"ipc://{self.path}"

    @property
    def is_wildcard(self) -> bool:
        return False

    def offset(self, rank: int, key: str = "endpoint") -> Ipc:
        """Rank `rank`'s own: `path-rank`, rank 0's as it is. ConfigError: the path gets too long."""
        return _checked(Ipc(f"{self.path}-{rank}"), key) if rank else self

    def dialled(self) -> Ipc:
        """How a process on this host reaches it, from whatever directory."""
        return self if self.path.startswith("@") else Ipc(os.path.abspath(self.path))


Endpoint: TypeAlias = Tcp | Ipc


def parse(text: str, key: str = "endpoint") -> Endpoint:
    """The endpoint that `text` names. ConfigError, naming the configuration's `key`, if it is none."""
    scheme, separator, rest = text.partition("://")
    if separator and scheme == "tcp":
        return _parse_tcp(text, rest, key)
    if separator and scheme == "ipc":
        if rest in ("", "@", "*"):
            raise ConfigError(f"{key}: {text!r} has no path; write ipc:///run/sglcache/events.ipc", path=key)
        return _checked(Ipc(rest), key)
    raise ConfigError(f"{key}: {text!r} is neither tcp://host:port nor ipc://path", path=key)


def is_local(endpoint: Endpoint) -> bool:
    """Whether only this host's processes can reach it, as far as its name tells."""
    if isinstance(endpoint, Ipc):
        return True
    if endpoint.is_wildcard:
        return False
    if endpoint.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(endpoint.host).is_loopback
    except ValueError:
        return False


def collide(one: Endpoint, other: Endpoint) -> bool:
    """Whether no two sockets can be bound to these at once."""
    if isinstance(one, Tcp) and isinstance(other, Tcp):
        same_host = one.host == other.host or one.is_wildcard or other.is_wildcard
        return same_host and one.port == other.port != 0
    return one.dialled() == other.dialled()


def bind(sock: zmq.Socket[bytes], endpoint: Endpoint, key: str = "endpoint") -> Endpoint:
    """Bind, and the endpoint as bound: with the system's port where 0 was asked for. ConfigError: it can't be bound."""
    import zmq

    try:
        if isinstance(endpoint, Ipc):
            _refuse_to_take_over(endpoint)
            sock.bind(str(endpoint))
            return endpoint
        address = _numeric(endpoint)
        sock.setsockopt(zmq.IPV6, int(":" in address.host))
        sock.bind(str(address))
    except (OSError, zmq.ZMQError) as error:
        raise ConfigError(f"{key}: {_why_not(endpoint, error)}", path=key, endpoint=str(endpoint)) from None
    bound = sock.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return replace(endpoint, port=int(bound.rstrip(b"\0").rpartition(b":")[2]))


class Place:
    """The file of an ipc socket that was bound, to be removed before the socket is closed: libzmq leaves it."""

    def __init__(self, endpoint: Ipc) -> None:
        self._path = os.path.abspath(endpoint.path)  # whatever the working directory is in the end
        self._file = os.stat(self._path)

    def remove(self) -> None:
        """Unless another has taken the path meanwhile, or the file is gone."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self._path), self._file):
                os.unlink(self._path)


def place_of(endpoint: Endpoint) -> Place | None:
    """What is to be removed when the socket bound there is closed. None: nothing, in no file system is a name of it."""
    return None if isinstance(endpoint, Tcp) or endpoint.path.startswith("@") else Place(endpoint)


def dial(sock: zmq.Socket[bytes], endpoint: Endpoint, key: str = "endpoint") -> Endpoint:
    """Connect to where a peer binds, now or later. ConfigError: nobody can be there."""
    if endpoint.is_wildcard or (isinstance(endpoint, Tcp) and not endpoint.port):
        raise ConfigError(f"{key}: {endpoint} can't be dialled; name the host and port that the peer binds", path=key)
    import zmq

    try:
        sock.setsockopt(zmq.IPV6, int(isinstance(endpoint, Tcp) and ":" in endpoint.host))
        sock.connect(str(endpoint.dialled()))
    except zmq.ZMQError as error:
        raise ConfigError(f"{key}: can't dial {endpoint}: {error.strerror}", path=key) from None
    return endpoint


def _parse_tcp(text: str, rest: str, key: str) -> Tcp:
    host, separator, port = rest.rpartition(":")
    problem = remedy = ""
    if not separator or not host:
        problem, remedy = "has no host or no port", "write tcp://127.0.0.1:5557, or tcp://*:5557 for every interface"
    elif not (port.isascii() and port.isdigit() and int(port) <= MAX_PORT):
        problem, remedy = f"has the port {port!r}", f"a port is 1..{MAX_PORT}, or 0 for the system's choice"
    elif host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if not _is_ipv6(host):
            problem, remedy = "has no IPv6 address between its brackets", "write tcp://[::1]:5557"
    elif ":" in host:
        problem, remedy = "has an IPv6 address without brackets", f"write tcp://[{host}]:{port}"
    elif host != "*" and not _HOST.fullmatch(host):
        problem, remedy = f"has the host {host!r}", "a host is an address, a name, or * for every interface"
    if problem:
        raise ConfigError(f"{key}: {text!r} {problem}; {remedy}", path=key)
    return Tcp(host, int(port))


def _checked(endpoint: Ipc, key: str) -> Ipc:
    size = len(os.fsencode(endpoint.path))
    if size > MAX_IPC_PATH or "\0" in endpoint.path:
        raise ConfigError(
            f"{key}: {str(endpoint)!r} has a path of {size} bytes; a socket's has at most {MAX_IPC_PATH}, none zero",
            path=key,
        )
    return endpoint


def _is_ipv6(text: str) -> bool:
    try:
        return bool(ipaddress.IPv6Address(text))
    except ValueError:
        return False


def _numeric(endpoint: Tcp) -> Tcp:
    """libzmq binds to addresses and interfaces, not to names such as localhost."""
    host = endpoint.host
    if host == "*" or ":" in host or host in (name for _, name in socket.if_nameindex()):
        return endpoint
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    found.sort(key=lambda info: info[0] != socket.AF_INET)
    return replace(endpoint, host=str(found[0][4][0]))


def _refuse_to_take_over(endpoint: Ipc) -> None:
    """libzmq unlinks whatever is at the path before it binds: a living socket, even a file. OSError if that is so."""
    if endpoint.path.startswith("@"):
        return  # the kernel refuses
    try:
        mode = os.stat(endpoint.path).st_mode
    except FileNotFoundError:
        os.stat(os.path.dirname(endpoint.path) or ".")
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(errno.EEXIST, "there is a file, and it is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(endpoint.path)
        except ConnectionRefusedError:
            return  # left behind by a process that died
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


_REMEDIES: dict[int, str] = {
    errno.EADDRINUSE: "stop the process that has it, which `sglcache doctor` names, or choose another",
    errno.EACCES: "choose one that this user may bind to",
    errno.EADDRNOTAVAIL: "this host has no such address; use one of its own, or * for all",
    errno.ENODEV: "this host has no such address; use one of its own, or * for all",
    errno.ENOENT: "make its directory first",
}


def _why_not(endpoint: Endpoint, error: OSError | zmq.ZMQError) -> str:
    reason = error.strerror or str(error)
    remedy = _REMEDIES.get(error.errno or 0)
    return f"can't bind {endpoint}: {reason}" + (f"; {remedy}" if remedy else "")
