"""A client's end of the control socket: hello, requests and their answers, and what a forked child may not keep.

Blocking, under one lock: a thread that waits for its answer keeps the others out, and answers that it finds on the
way are kept for whom they are for. Requests can be sent ahead and waited for later, in any order (`Pending`); each that
was sent should be waited for or ignored. While the daemon does not take what is sent, its answers are read, so that two
that both write can't wait for each other.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import select
import socket as sockets
import stat
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar, cast

import msgspec

from sglcache.errors import (
    BadRequest,
    Busy,
    ClosedError,
    DaemonRestarted,
    Forbidden,
    ProtocolError,
    SessionEnded,
    SglcacheError,
    Unavailable,
    with_article,
)
from sglcache.wire import control
from sglcache.wire.control import HEADER, MAX_FDS

HELLO_TIMEOUT_S = 10.0
PROBE_TIMEOUT_S = 2.0  # for a daemon that closed a connection to say that it is still the same
RECV_BYTES = 1 << 16
SPIN_US = 50.0
SPIN_CPUS = 4  # that a process must be allowed before its clients spin unasked
MAX_RESTS = 1 << 10
DONTWAIT = int(sockets.MSG_DONTWAIT)
MAX_ANSWER = 1 << 30  # bytes: more than a dump of the largest index there is
HTTP_ANSWER = int.from_bytes(b"HTTP", "big")  # what the length of a frame would be
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid

Request: TypeAlias = (
    control.Acquire
    | control.Extend
    | control.Commit
    | control.Release
    | control.Cancel
    | control.Peek
    | control.Prefetch
    | control.Pin
    | control.Unpin
    | control.Clear
    | control.Ping
    | control.Status
    | control.Dump
    | control.Digest
    | control.Reuse
    | control.Explain
    | control.Announce
    | control.Check
    | control.EvictSession
    | control.SetTenant
    | control.Bye
    | control.CancelRequest
)
UNFIT = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""What taking an answer apart raises where it is not what the request's answer must be."""
Answer: TypeAlias = control.Granted | control.Extended | control.CommitDone | control.Done
T = TypeVar("T")

_encode_into = control.encode_into
_size = struct.Struct(">I")
_put_size, _size_of = _size.pack_into, _size.unpack_from
_decode = msgspec.msgpack.Decoder(control.Answer).decode
_decode_first = msgspec.msgpack.Decoder(control.Welcome | control.Refusal).decode


class Pending(Generic[T]):
    """Something that was begun: sent, and its answer not waited for.

    Whoever begins a thing waits for it some time, in any order; `Client.poll` tells whose answers have come. It can be
    waited for again, and says the same. Thread-safe.
    """

    __slots__ = ("_answer", "_connection", "_finish", "_hear", "_result", "finished", "request", "ticket")

    def __init__(
        self,
        connection: Connection,
        request: int,
        finish: Callable[[Any], T],
        hear: Callable[[Pending[T], Any], None] | None = None,
        ticket: int | None = None,
    ) -> None:
        """`hear` takes in the answer when it comes, `finish` when it is waited for. With the connection's lock held."""
        self._connection = connection
        self._finish = finish
        self._hear = hear
        self._answer: Answer | control.Failure | None = None
        self._result: T | None = None
        self.finished = False
        """It was waited for, and went well."""
        self.request = request
        self.ticket = ticket
        """What the workers must `record` for this to be done; None where there is nothing to record."""

    @property
    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once. Looks, and never waits."""
        if self._answer is None and not self._connection.over:
            with contextlib.suppress(SglcacheError):
                self._connection.look()
        return self._answer is not None or self._connection.over

    def wait(self) -> T:
        """What it came to. Raises what the daemon refused it with; Unavailable, ClosedError."""
        connection = self._connection
        with connection.lock:
            if not self.finished:
                answer = self._answer or connection.finish(self)
                connection.forget(self)
                if type(answer) is control.Failure:
                    raise SglcacheError.from_code(answer.code, answer.message, answer.facts)
                try:
                    self._result = self._finish(answer)
                except UNFIT as exc:
                    raise connection.unfit(answer) from exc
                self.finished = True
            return cast(T, self._result)

    def cancel(self) -> None:
        """Have the daemon give it up while it waits, for room or for the third tier; `wait` then raises Cancelled.

        What does not wait any more comes to what it would: `wait` returns it, and it is the caller's. Never waits.
        """
        connection = self._connection
        with connection.lock:
            if self._answer is None and not connection.over:
                request = connection.number()
                connection.send(control.CancelRequest(request, self.request))
                connection.ignore(request)

    def take(self, answer: Answer | control.Failure) -> None:
        """The connection's: here is your answer. With its lock held."""
        self._answer = answer
        if self._hear is not None and type(answer) is not control.Failure:
            try:
                self._hear(self, answer)
            except UNFIT as exc:
                raise self._connection.unfit(answer) from exc

    def __repr__(self) -> str:
        ticket = "" if self.ticket is None else f", ticket {self.ticket}"
        state = "done" if self._answer is not None else "under way"
        return f"Pending(request {self.request}{ticket}, {state})"


class Connection:
    """Attached from construction to `close`, or to the fork in the child.

    Errors of construction: Unavailable (no daemon, or none that answers), and what the daemon refuses with. Later:
    what the daemon answers, and once the connection is at its end: what the daemon said last (TooSlow, ProtocolError),
    DaemonRestarted where its life is over, SessionEnded where it serves on and did not say why it closed, ClosedError
    where this side closed it.
    """

    def __init__(
        self,
        path: Path,
        hello: control.Hello,
        fds: Sequence[int],
        timeout_s: float = HELLO_TIMEOUT_S,
        spin_us: float | None = None,
    ) -> None:
        """`spin_us`: how long to look for an answer before going to sleep for it; None: as the processors allow."""
        self.path = path
        self.lock = threading.Lock()
        self.fds: list[int] = []
        """What came with the welcome; whoever takes one out owns it."""
        self._pending: dict[int, Pending[Any]] = {}  # by request, not answered
        self._news: dict[int, Pending[Any]] = {}  # answered, and neither waited for nor told by `news`
        self._answers: dict[int, Answer | control.Failure] = {}  # to requests that nobody has a Pending of
        self._ignored: set[int] = set()
        if spin_us is None:
            spin_us = SPIN_US if len(os.sched_getaffinity(0)) >= SPIN_CPUS else 0.0
        self._spin_s = spin_us * 1e-6
        self._failed_spins = 0  # in a row
        self._rests = 0  # so many receptions sleep at once
        self._out = bytearray()  # the frame that is being sent
        self._rest = b""
        self._request = 0
        self._closed: str | None = None
        self._error: SglcacheError | None = None  # why the connection is at its end
        self._timeout_s = timeout_s  # until it is attached
        self._sock = _connect(path, timeout_s)
        try:
            self.welcome = self._attach(hello, fds)
            self._sock.settimeout(None)
        except BaseException:
            self._sock.close()
            _close_all(self.fds)
            raise
        readable = select.poll()
        readable.register(self._sock, select.POLLIN)
        # To sleep in recv() is to be woken, too, by each command of ours that the daemon reads, as a socket's one queue
        # is for those who wait for room as well: on one processor that costs two switches, in the midst of its work.
        self._poll = readable.poll
        self._recv, self._send_some = self._sock.recv, self._sock.send

    # -- requests ---------------------------------------------------------------------------------------

    def number(self) -> int:
        """The next request's number. With the lock held."""
        self._request += 1
        return self._request

    def send(self, command: control.Frame) -> None:
        """Send without waiting for an answer. With the lock held. BadRequest: it is larger than a frame may be."""
        out = self._out
        _encode_into(command, out, HEADER)
        size = len(out)
        if size > HEADER + control.MAX_FRAME:
            self._out = bytearray()
            raise _too_large(command, size - HEADER)
        _put_size(out, 0, size - HEADER)
        if self._closed is not None or self._error is not None:
            self._check()
        try:
            sent = self._send_some(out, DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError as exc:
            raise self._over(exc) from None
        if sent != size:
            self._write_rest(bytes(out), sent)

    def ask(self, command: Request) -> Answer | control.Failure:
        """Send, and wait for the answer, whatever it is. With the lock held."""
        self.send(command)
        request = command.request
        while (got := self._read()).request != request:
            self._keep(got)
        return got

    def begin(self, command: Request, pending: Pending[T]) -> Pending[T]:
        """Send; the answer will be the pending's. With the lock held."""
        self.send(command)
        return self.expect(pending)

    def expect(self, pending: Pending[T]) -> Pending[T]:
        """The answer to a request that was sent will be the pending's. With the lock held."""
        self._pending[pending.request] = pending
        return pending

    def finish(self, pending: Pending[Any]) -> Answer | control.Failure:
        """Read until it has its answer. With the lock held."""
        request = pending.request
        while True:
            got = self._read()
            if got.request == request:
                del self._pending[request]
                pending.take(got)
                return got
            self._keep(got)

    def forget(self, pending: Pending[Any]) -> None:
        """It is being waited for, so it is no news."""
        self._news.pop(pending.request, None)

    def wait(self, request: int) -> Answer:
        """The answer to a request that was sent, or the error that it is. With the lock held."""
        answer = self._answers.pop(request, None) if self._answers else None
        while answer is None:
            got = self._read()
            if got.request == request:
                answer = got
            else:
                self._keep(got)
        if type(answer) is control.Failure:
            raise SglcacheError.from_code(answer.code, answer.message, answer.facts)
        return answer  # type: ignore[return-value]

    def unfit(self, answer: Answer | control.Failure) -> SglcacheError:
        """Why it is of no use: it is a failure, and says so. Or it is of another command, or has not what it should
        have: then nothing of the daemon can be relied on."""
        if type(answer) is control.Failure:
            return SglcacheError.from_code(answer.code, answer.message, answer.facts)
        return self._nonsense(f"a {type(answer).__name__} that does not fit request {answer.request}")

    def ignore(self, request: int) -> None:
        """Its answer will not be waited for. With the lock held."""
        self._ignored.add(request)

    def look(self) -> None:
        """Take in what has arrived, without waiting; where another thread is at it, it does. Without the lock held."""
        if self.lock.acquire(blocking=False):
            try:
                self.pull()
            finally:
                self.lock.release()

    def news(self) -> list[Pending[Any]]:
        """Those that were answered since this was last asked and are not waited for, in order."""
        news: list[Pending[Any]] = []
        with contextlib.suppress(KeyError):
            while True:
                news.append(self._news.popitem()[1])
        news.reverse()
        return news

    def pull(self) -> None:
        """Take in what has arrived, without waiting. With the lock held."""
        self._check()
        with contextlib.suppress(BlockingIOError):
            self._rest += self._receive(DONTWAIT)
        while len(self._rest) >= HEADER and len(self._rest) >= HEADER + int.from_bytes(self._rest[:HEADER], "big"):
            self._keep(self._read())

    @property
    def socket(self) -> sockets.socket:
        """Its own end."""
        self._check()
        return self._sock

    def fileno(self) -> int:
        """Readable when `pull` would find something."""
        self._check()
        return self._sock.fileno()

    def check(self) -> None:
        """Raise why no more can be said on it, if that is known."""
        if self._closed is not None or self._error is not None:
            self._check()

    @property
    def broken(self) -> bool:
        """It came to its end, and not because this side closed it."""
        return self._error is not None

    def let_go_of_fds(self) -> None:
        """Of what came with the welcome. With the lock held."""
        _close_all(self.fds)

    def retire(self, error: SglcacheError) -> None:
        """Another takes its place: from now on whatever is asked of it raises why, at first `error`. With the lock
        held."""
        if self._error is None:
            self._error = error
        self._sock.close()
        _close_all(self.fds)

    def close(self, why: str = "this client is closed") -> None:
        """Close this process's end; `why` is what ClosedError says from now on. Idempotent."""
        if self._closed is None:
            self._closed = why
            self._sock.close()
            _close_all(self.fds)

    @property
    def closed(self) -> bool:
        return self._closed is not None

    @property
    def over(self) -> bool:
        """No answer will come any more."""
        return self._closed is not None or self._error is not None

    # -- inside -----------------------------------------------------------------------------------------

    def _attach(self, hello: control.Hello, fds: Sequence[int]) -> control.Welcome:
        sock = self._sock
        sock.settimeout(self._timeout_s)
        rights = [(sockets.SOL_SOCKET, sockets.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it said why not without hearing us
                sock.sendmsg([control.frame(hello)], rights)
            size = int.from_bytes(self._receive_first(HEADER), "big")
            if size == HTTP_ANSWER:
                raise ProtocolError(
                    f"{self.path} answers HTTP: it is a supervisor's; name a rank's control socket, which is that path "
                    "without .http"
                )
            if size > control.MAX_FRAME:
                raise ProtocolError(
                    f"{self.path} is no sglcache socket: its first frame has {size} bytes; name a rank's control socket"
                )
            first = _decode_first(self._receive_first(size))
        except TimeoutError:
            raise Unavailable(f"the daemon at {self.path} did not answer within {self._timeout_s:g} s") from None
        except OSError as exc:
            raise Unavailable(f"the daemon at {self.path} went away: {exc}") from exc
        except DECODE_ERRORS as exc:
            raise ProtocolError(f"{self.path} is no sglcache socket: {exc}; name a rank's control socket") from None
        if isinstance(first, control.Refusal):
            raise SglcacheError.from_code(first.code, first.message, first.facts)
        if first.protocol != control.PROTOCOL:
            raise ProtocolError(
                f"the daemon speaks protocol {first.protocol}, this client {control.PROTOCOL}; update the older one, "
                "and start the daemon again if it was that",
                daemon=first.protocol,
                client=control.PROTOCOL,
            )
        return first

    def _receive_first(self, size: int) -> bytes:
        """Exactly so many bytes, and the descriptors that come with them."""
        data = b""
        while len(data) < size:
            part, rights, flags, _ = self._sock.recvmsg(
                size - len(data), sockets.CMSG_SPACE(4 * MAX_FDS), sockets.MSG_CMSG_CLOEXEC
            )
            for level, kind, packed in rights:
                if level == sockets.SOL_SOCKET and kind == sockets.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(packed)
                    self.fds += fds
            if flags & sockets.MSG_CTRUNC:
                raise Unavailable("this process can't take the daemon's descriptors; raise its limit (ulimit -n)")
            if not part:
                raise Unavailable(f"the daemon at {self.path} closed the connection without an answer")
            data += part
        return data

    def _check(self) -> None:
        if self._closed is not None:
            raise ClosedError(self._closed)
        if self._error is not None:
            raise SglcacheError.from_code(self._error.code, self._error.message, self._error.facts)

    def _write_rest(self, frame: bytes, sent: int) -> None:
        """The socket is full: read what the daemon has to say until it takes the rest."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN | select.POLLOUT)
        try:
            while sent < len(frame):
                for _, events in poll.poll():
                    if events & select.POLLIN:
                        self.pull()
                    if events & ~select.POLLIN:
                        with contextlib.suppress(BlockingIOError):
                            sent += self._send_some(frame[sent:], DONTWAIT)
        except OSError as exc:
            raise self._over(exc) from None
        except BaseException:  # half a frame is out: nothing more can be said
            if self._error is None:
                self._error = Unavailable("an interrupted write broke the connection; attach anew")
            raise

    def _read(self) -> Answer | control.Failure:
        """The next frame, waiting for it."""
        data = self._rest
        if not data:
            if self._closed is not None or self._error is not None:
                self._check()
            data = self._receive()
            if len(data) > HEADER and _size_of(data)[0] == len(data) - HEADER:  # mostly it is all, and one
                try:
                    return _decode(data[HEADER:])
                except DECODE_ERRORS as exc:
                    raise self._nonsense(f"what is no answer: {exc}") from None
            self._rest = data
        while len(data) < HEADER:
            data = self._rest = data + self._receive()
        stop = HEADER + int.from_bytes(data[:HEADER], "big")
        if stop > HEADER + MAX_ANSWER:
            raise self._nonsense(f"an answer of {stop - HEADER} bytes; at most {MAX_ANSWER} are taken")
        if len(data) < stop:
            parts = [data]
            have = len(data)
            try:
                while have < stop:
                    parts.append(self._receive())
                    have += len(parts[-1])
            finally:
                data = self._rest = b"".join(parts)
        self._rest = data[stop:]
        try:
            return _decode(data[HEADER:stop])
        except DECODE_ERRORS as exc:
            raise self._nonsense(f"what is no answer: {exc}") from None

    def _nonsense(self, what: str) -> ProtocolError:
        """The daemon's words can't be made sense of, these or any after them."""
        self._error = error = ProtocolError(f"the daemon sent {what}")
        return error

    def _receive(self, flags: int = 0) -> bytes:
        """What has come, waiting for it unless `flags` say otherwise."""
        try:
            if flags:
                data = self._recv(RECV_BYTES, flags)
            elif self._spin_s and self._rests <= 0:
                data = self._spin()
            else:
                self._rests -= 1
                self._poll()
                data = self._recv(RECV_BYTES)
        except BlockingIOError:
            raise
        except OSError as exc:
            raise self._over(exc) from None
        if not data:
            raise self._over(None)
        return data

    def _spin(self) -> bytes:
        """Look for the answer a few times before going to sleep for it.

        To be woken on a processor that has gone to sleep, too, takes longer than the daemon takes to answer. Where it
        doesn't pay (an answer that waits for an event, a daemon that needs this very processor) it is soon left off.
        """
        recv, clock = self._recv, time.perf_counter
        end = clock() + self._spin_s
        while True:
            try:
                data = recv(RECV_BYTES, DONTWAIT)
            except BlockingIOError:
                if clock() > end:
                    break
            else:
                self._failed_spins = 0
                return data
        self._failed_spins += 1
        self._rests = min(1 << self._failed_spins, MAX_RESTS)
        self._poll()
        return recv(RECV_BYTES)

    def _keep(self, answer: Answer | control.Failure) -> None:
        request = answer.request
        pending = self._pending.pop(request, None)
        if pending is not None:
            self._news[request] = pending
            pending.take(answer)
            return
        if request in self._ignored:
            self._ignored.remove(request)
            return
        if request:
            self._answers[request] = answer
            return
        if not isinstance(answer, control.Failure):
            raise self._nonsense(f"a {type(answer).__name__} that answers no request")
        self._error = SglcacheError.from_code(answer.code, answer.message, answer.facts)
        raise self._error

    def _over(self, exc: OSError | None) -> SglcacheError:
        """The connection is at its end. What the daemon said last says more than the socket does."""
        if self._error is None:
            try:
                while data := self._recv(RECV_BYTES, DONTWAIT):
                    self._rest += data
            except OSError:
                pass
            self._error = self._last_words() or self._why_it_ended(exc)
            self._rest = b""
        return self._error

    def _last_words(self) -> SglcacheError | None:
        """Why the daemon threw this client out, if it could say so. What else is in `_rest` is nobody's any more."""
        rest = self._rest
        while len(rest) >= HEADER and len(rest) >= (stop := HEADER + int.from_bytes(rest[:HEADER], "big")):
            with contextlib.suppress(*DECODE_ERRORS):
                last = _decode(rest[HEADER:stop])
                if isinstance(last, control.Failure) and last.request == 0:
                    return SglcacheError.from_code(last.code, last.message, last.facts)
            rest = rest[stop:]
        return None

    def _why_it_ended(self, exc: OSError | None) -> SglcacheError:
        """SessionEnded where the daemon still serves the life that this connection was to; else that life is over."""
        epoch = self.welcome.epoch
        if self._serves_on():
            return SessionEnded(
                f"the daemon at {self.path} closed this connection, and serves on (life {epoch}); its log says why; "
                "reattach()",
                epoch=epoch,
                socket=str(self.path),
            )
        return DaemonRestarted(
            f"the daemon at {self.path} went away{f' ({exc})' if exc else ''}: its life "
            f"{epoch} is over, and so are the leases of it; reattach() joins its next one",
            epoch=epoch,
            socket=str(self.path),
        )

    def _serves_on(self) -> bool:
        """Whether who answers at the socket now is the life that the connection was to."""
        mine = _pid(self._sock)
        hello = control.Hello(control.PROTOCOL, "lost its connection", "observer")
        try:
            other = Connection(self.path, hello, (), PROBE_TIMEOUT_S)
        except Busy:  # it says no epoch, but the kernel says who it is
            with contextlib.suppress(OSError, SglcacheError), _connect(self.path, PROBE_TIMEOUT_S) as sock:
                return mine == _pid(sock)
            return False
        except SglcacheError:
            return False
        other.close()
        return other.welcome.epoch == self.welcome.epoch


def _pid(sock: sockets.socket) -> int:
    """The process that listened where `sock` connected to, dead or not; 0: one of another PID namespace."""
    pid: int = _CREDENTIALS.unpack(sock.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _CREDENTIALS.size))[0]
    return pid


def _connect(path: Path, timeout_s: float) -> sockets.socket:
    sock = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM | sockets.SOCK_CLOEXEC)
    try:
        # A non-blocking connect fails at once where many others are waiting to be accepted; the kernel can wait.
        sock.setsockopt(sockets.SOL_SOCKET, sockets.SO_SNDTIMEO, struct.pack("ll", int(timeout_s), 0))
        sock.connect(os.fspath(path))
        sock.setsockopt(sockets.SOL_SOCKET, sockets.SO_SNDTIMEO, struct.pack("ll", 0, 0))
        _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _CREDENTIALS.size))
        if uid != os.geteuid():  # it would see our tokens, and we would write into its memory
            raise Forbidden(
                f"the daemon at {path} is of uid {uid}, and we are {os.geteuid()}; run as that user, for a daemon "
                "serves its own alone",
                uid=uid,
            )
    except (OSError, Forbidden) as exc:
        sock.close()
        if isinstance(exc, Forbidden):
            raise
        raise Unavailable(f"no daemon at {path} ({exc.strerror or exc}); {_instead(path, exc)}") from None
    return sock


def _instead(path: Path, error: OSError) -> str:
    """What to do, where a connect to `path` failed."""
    start = "start one with `sglcache serve`, or name its socket in SGLCACHE_SOCKET"
    try:
        info = os.stat(path)
    except OSError as exc:
        error, info = exc, None
    if error.errno in (errno.EACCES, errno.EPERM):
        return "that is another user's: run as the user of the daemon, or name your own daemon's in SGLCACHE_SOCKET"
    if info is None:
        return start
    if not stat.S_ISSOCK(info.st_mode):
        return "that is no socket: name a rank's control socket, such as rank-0.sock"
    if error.errno == errno.ECONNREFUSED:
        return "it is left of one that is dead, and the next replaces it: " + start
    return start


def _too_large(command: control.Frame, num_bytes: int) -> BadRequest:
    """Of a command that no frame can hold: by how many tokens, and what would do instead."""
    what = with_article(type(command).__name__)
    if isinstance(command, control.Extend):
        remedy = "extend by several commands, of fewer leases or tokens each"
        sizes = [len(item.tokens) for item in command.items]
    else:
        remedy = "send fewer"
        if isinstance(command, control.Acquire):
            remedy = "acquire by the first ones, and extend the lease by the others"
        sizes = [len(getattr(command, "tokens", b"") or b"")]
    num_tokens = sum(sizes) // 4
    most = max(0, (control.MAX_FRAME - (num_bytes - sum(sizes))) // 4)
    return BadRequest(
        f"{what} of {num_tokens} tokens: at most {most} fit a frame of {control.MAX_FRAME} bytes with the rest of it; "
        f"{remedy}",
        num_bytes=num_bytes,
        num_tokens=num_tokens,
        max_tokens=most,
    )


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
