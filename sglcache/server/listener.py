"""The control socket's front door: the listening socket, who is on the other end, and the first frame.

All of this happens on raw non-blocking sockets, before uvloop owns the connection: file descriptors travel beside the
first frames, and uvloop would throw them away. A peer that says nothing, too much or the wrong thing is refused
within `HELLO_TIMEOUT_S` and holds nothing of ours.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from sglcache.errors import Busy, Forbidden, ProtocolError, SglcacheError
from sglcache.server import doors
from sglcache.server.doors import FDS_PER_CONNECTION
from sglcache.wire import control
from sglcache.wire.control import MAX_FDS

logger = logging.getLogger("sglcache.listener")

HELLO_TIMEOUT_S = 5.0
MAX_HELLO = 4096  # bytes of the first frame
MAX_HELLO_FDS = 2
MAX_ACCEPTS = 16  # in one turn: about 1.5 ms
MAX_WAITING = 256  # peers that have not said hello yet
LOG_S = 1.0  # refusals of one kind within it are one line of the log
TOLD_PIDS = 5
NONE_LEFT = (errno.EMFILE, errno.ENFILE)
SO_PEERPIDFD = 77  # Linux 6.5; absent from Python's socket module
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class Peer:
    """Who connected: the connection, its process and the descriptors it sent. Owned by whoever took it."""

    __slots__ = ("fds", "pid", "pidfd", "sock")

    def __init__(self, sock: socket.socket, pid: int, pidfd: int) -> None:
        self.sock = sock
        self.pid = pid
        self.pidfd = pidfd  # readable once the process is dead, forked children or not
        self.fds: list[int] = []

    def close(self) -> None:
        self.sock.close()
        close_fds([self.pidfd, *self.fds])
        self.pidfd, self.fds = -1, []

    def send(self, answer: control.Frame, fds: list[int]) -> None:
        """Send the one answer to a hello, on the empty and thus large enough buffer of a new socket. OSError."""
        frame = control.frame(answer)
        # The kernel takes MAX_FDS at a time: a byte goes ahead with each lot but the last.
        last = max(0, len(fds) - 1) // MAX_FDS
        for i in range(last + 1):
            part = frame[i : i + 1] if i < last else frame[i:]
            lot = fds[i * MAX_FDS : (i + 1) * MAX_FDS]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", lot))] if lot else []
            sent = self.sock.sendmsg([part], rights, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
            if sent != len(part):
                raise OSError(errno.EAGAIN, f"{sent} of {len(part)} bytes of the answer to a hello were taken")


def close_fds(fds: list[int]) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)


def _pid(sock: socket.socket) -> int:
    """The number of the process that called connect(); it may be another's by now."""
    pid: int = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]
    return pid


def identify(sock: socket.socket) -> Peer:
    """The process that called connect(). OSError if it is gone; `Forbidden` if it is of another user, or of a PID
    namespace out of sight on a kernel that can't give us a descriptor of it."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.geteuid():
        raise Forbidden(f"this rank serves uid {os.geteuid()}, and the peer is uid {uid}", uid=uid)
    try:
        pidfd = sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as exc:
        if exc.errno != errno.ENOPROTOOPT:
            raise
        # Before Linux 6.5.
        if not pid:
            raise Forbidden(
                "the peer is in a PID namespace that this rank can't see into, and so could not be known to be dead; "
                "have both share one, or run Linux 6.5 or later",
                uid=uid,
            ) from None
        # The number could be another process's by now only if the peer is dead and reaped.
        pidfd = os.pidfd_open(pid)
    return Peer(sock, pid, pidfd)


class _Hearing:
    """One peer that has yet to say hello."""

    __slots__ = ("buffer", "listener", "peer", "timer")

    def __init__(self, listener: Listener, peer: Peer) -> None:
        self.listener = listener
        self.peer = peer
        self.buffer = b""
        loop = listener.loop
        self.timer = loop.call_later(HELLO_TIMEOUT_S, self.expired)
        loop.add_reader(peer.sock.fileno(), self.readable)

    def stop(self) -> None:
        self.timer.cancel()
        self.listener.loop.remove_reader(self.peer.sock.fileno())
        self.listener.hearing.discard(self)

    def expired(self) -> None:
        self.refuse(ProtocolError(f"no hello within {HELLO_TIMEOUT_S:g} s"))

    def refuse(self, error: SglcacheError) -> None:
        self.stop()
        self.listener.refuse(self.peer, error)

    def readable(self) -> None:
        try:
            hello = self.read()
        except SglcacheError as error:
            self.refuse(error)
        except OSError:
            self.stop()
            self.peer.close()
        else:
            if hello is not None:
                self.stop()
                self.listener.welcome(self.peer, hello)

    def read(self) -> control.Hello | None:
        """Read what is there, but not a byte past the hello: what follows is uvloop's. None: there is more to come."""
        if len(self.buffer) < control.HEADER and not self.receive(control.HEADER):
            return None
        size = int.from_bytes(self.buffer[: control.HEADER], "big")
        if size > MAX_HELLO:
            raise ProtocolError(f"a hello of {size} bytes; at most {MAX_HELLO} are taken", num_bytes=size)
        if not self.receive(control.HEADER + size):
            return None
        try:
            return _decode_hello(self.buffer[control.HEADER :])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            check_version(_version(self.buffer[control.HEADER :]))
            raise ProtocolError(f"the first frame is no hello: {exc}") from None

    def receive(self, upto: int) -> bool:
        """Fill the buffer to `upto` bytes; False if they are not all there yet."""
        while (missing := upto - len(self.buffer)) > 0:
            try:
                data, rights, flags, _ = self.peer.sock.recvmsg(
                    missing, socket.CMSG_SPACE(4 * (MAX_HELLO_FDS + 1)), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return False
            for level, kind, packed in rights:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(packed[: len(packed) // fds.itemsize * fds.itemsize])
                    self.peer.fds += fds
            if len(self.peer.fds) > MAX_HELLO_FDS:
                raise ProtocolError(f"more than {MAX_HELLO_FDS} descriptors beside a hello")
            if flags & socket.MSG_CTRUNC:  # there was place for more of them than came
                raise out_of_descriptors()
            if not data:
                raise ConnectionResetError("the peer left before its hello")
            self.buffer += data
        return True


_decode_hello = msgspec.msgpack.Decoder(control.Hello).decode


def check_version(version: int) -> None:
    """ProtocolError if the client speaks another protocol than we do."""
    if version != control.PROTOCOL:
        raise ProtocolError(
            f"this daemon speaks protocol {control.PROTOCOL}, the client {version}; update the older one",
            daemon=control.PROTOCOL,
            client=version,
        )


def _version(frame: bytes) -> int:
    """The protocol of a hello of whatever form; ours if it is no hello at all."""
    try:
        match msgspec.msgpack.decode(frame):
            case ["Hello", int(version), *_]:
                return version
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    return control.PROTOCOL


def out_of_descriptors() -> Busy:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Busy(
        f"this rank has all the {limit} file descriptors that it may have; close connections, or raise its limit "
        "(ulimit -n, LimitNOFILE= of a unit) and start it again",
        max_descriptors=limit,
    )


def most_common(pids: Counter[int]) -> tuple[list[dict[str, int]], str]:
    """Who has most of something: as facts, and in words."""
    facts = [{"pid": pid, "connections": count} for pid, count in pids.most_common(TOLD_PIDS)]
    return facts, ", ".join(f"pid {each['pid']} has {each['connections']}" for each in facts)


class Refusals:
    """Tells peers why they are refused, and the log: many of one kind in one line."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._untold: dict[str, tuple[str, Counter[int]]] = {}  # by code: what the first was told, and whom it concerns
        self._timer: asyncio.TimerHandle | None = None
        self._none_since: float | None = None

    def refuse(self, peer: Peer, error: SglcacheError) -> None:
        """Say why, as well as a peer that may be gone can be told, and close."""
        if "max_descriptors" in error.facts:
            self.none_left()
        with contextlib.suppress(OSError):
            peer.send(control.Refusal(error.code, error.message, error.facts), [])
        self._untold.setdefault(error.code, (error.message, Counter()))[1][peer.pid] += 1
        peer.close()
        if self._timer is None:
            self._timer = self._loop.call_later(LOG_S, self.tell)

    def none_left(self) -> None:
        """A descriptor was wanted, and there was none."""
        if self._none_since is None:
            self._none_since = self._loop.time()

    def none_since(self) -> float | None:
        """Since when there are too few descriptors for another connection, as far as is known; None: there are
        enough."""
        if self._none_since is not None:
            fds: list[int] = []
            with contextlib.suppress(OSError):
                for _ in range(FDS_PER_CONNECTION + 1):  # and one to look at them by
                    fds.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
                self._none_since = None
            close_fds(fds)
        return self._none_since

    def tell(self) -> None:
        """Write to the log what was not yet."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for message, pids in self._untold.values():
            if pids.total() == 1:
                logger.warning("refused pid %d: %s", *pids, message)
            else:
                logger.warning("refused %d connections (%s): %s", pids.total(), most_common(pids)[1], message)
        self._untold.clear()


class Listener:
    """Owns the listening socket and the peers that have not said hello. `welcome` takes over those that have."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        path: Path,
        welcome: Callable[[Peer, control.Hello], None],
        refusals: Refusals | None = None,
    ) -> None:
        self.loop = loop
        self.path = path
        self.welcome = welcome
        self.hearing: set[_Hearing] = set()
        self.refusals = refusals or Refusals(loop)
        self.refuse = self.refusals.refuse
        self._spare = -1  # a descriptor that is let go of to tell somebody that there is none
        self._lock = -1
        self._sock: socket.socket | None = None
        self._retry: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Bind and listen. ConfigError if a live daemon has this socket, or the place is no good."""
        self._sock, self._lock = doors.unix(self.path, "control.socket")
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self.loop.add_reader(self._sock.fileno(), self._accept)

    def close(self) -> None:
        """Stop listening, remove the socket, and drop whoever has not said hello. Idempotent."""
        if self._retry is not None:
            self._retry.cancel()
        for hearing in list(self.hearing):
            hearing.stop()
            hearing.peer.close()
        if self._sock is not None:
            self.loop.remove_reader(self._sock.fileno())
            doors.close(self._sock, self.path, self._lock)
            self._sock, self._lock = None, -1
        close_fds([self._spare])
        self._spare = -1
        self.refusals.tell()

    def _accept(self) -> None:
        assert self._sock is not None
        for _ in range(MAX_ACCEPTS):  # then others get their turn
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as exc:
                if exc.errno in NONE_LEFT:
                    self.refusals.none_left()
                    try:
                        if self._turn_away():
                            continue
                    except BlockingIOError:  # nobody is there: without a descriptor accept() does not look
                        return
                # The peer stays in the backlog, and to poll for it would spin.
                logger.error("can't accept: %s; trying again in 1 s", exc)
                self.loop.remove_reader(self._sock.fileno())
                self._retry = self.loop.call_later(1.0, self._resume)
                return
            sock.setblocking(False)
            self.hear(sock)

    def _turn_away(self) -> bool:
        """Tell who waits that there is no descriptor for it, by the one that was spared; False: it can't be told."""
        assert self._sock is not None
        if self._spare < 0:
            return False
        os.close(self._spare)
        self._spare = -1
        try:
            sock, _ = self._sock.accept()
            sock.setblocking(False)
            self.refuse(Peer(sock, _pid(sock), -1), out_of_descriptors())
        except BlockingIOError:
            raise
        except OSError:
            return False
        finally:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        return True

    def hear(self, sock: socket.socket) -> None:
        """Wait for the hello of who is at the other end of a socket, which is ours now."""
        try:
            peer = identify(sock)
        except SglcacheError as error:
            self.refuse(Peer(sock, -1, -1), error)
        except OSError as exc:
            if exc.errno in NONE_LEFT:
                self.refuse(Peer(sock, _pid(sock), -1), out_of_descriptors())
            else:
                sock.close()
        else:
            if len(self.hearing) >= MAX_WAITING:
                self.refuse(peer, self._crowded())
                return
            self.hearing.add(_Hearing(self, peer))

    def _crowded(self) -> Busy:
        count = len(self.hearing)
        facts, words = most_common(Counter(hearing.peer.pid for hearing in self.hearing))
        return Busy(
            f"{count} connections have not said hello ({words}), and {MAX_WAITING} may at once; each is closed after "
            f"{HELLO_TIMEOUT_S:g} s: try again then",
            silent=count,
            max_silent=MAX_WAITING,
            holders=facts,
        )

    def _resume(self) -> None:
        self._retry = None
        if self._spare < 0:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        if self._sock is not None:
            self.loop.add_reader(self._sock.fileno(), self._accept)
