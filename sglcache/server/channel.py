"""Between the supervisor and one life of a rank: a socketpair of whole frames, msgpack, descriptors beside them.

    supervisor ── Start (configuration, place, descriptors kept for it) · Ask · Drain ──► rank
               ◄─ Ready · Beat · Answer · Keep (a descriptor for the next life) · Tenants · Failed ──

A frame that is too long for the kernel's buffer goes as a descriptor of memory that holds it (`Long`).

Nobody waits here. A frame that the other side does not take now, because it hangs and its buffer is full, is not sent,
and who needs an answer has a deadline of its own. The end of the socket is the end of the other process: the kernel
closes it, whatever that died of.
"""

from __future__ import annotations

import array
import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from sglcache.server.numbers import MAX_NUMBER
from sglcache.server.plan import Seat
from sglcache.server.watch import Trouble
from sglcache.wire import control

logger = logging.getLogger("sglcache.channel")

MAX_FRAME = 192 << 10  # bytes; the kernel's default buffer takes no larger message
MAX_LONG = 16 << 20  # bytes of a frame that goes as a descriptor; as on the control socket
MAX_FDS = 253  # beside one frame: the kernel's SCM_MAX_FD


About: TypeAlias = Literal["facts", "digest", "metrics", "reuse", "live", "tree", "node", "find", "explain"]


class Frame(Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    """Every message is `[tag, fields...]`."""


class Start(Frame):
    """The supervisor's first frame. Beside it the descriptors of `kept`, in that order, which are the rank's now."""

    config: dict[str, Any]
    seat: Seat
    http: str | None  # the daemon's URL
    restarts: int  # lives of this rank before this one, under this supervisor
    floor: int  # the stream's numbers up to this one may have been used
    kept: list[str]
    log_level: int
    beat_s: float
    tenants: dict[str, dict[str, int | str]] = {}  # limits that were set in earlier lives, as they were written


class Ask(Frame):
    """Wants one Answer: what the rank's method of this name tells, called with `params`."""

    question: int
    about: About
    params: dict[str, Any] = {}


class Explain(Struct, forbid_unknown_fields=True):
    """Parameters of "explain": see `control.Explain`; `request` is its `name`."""

    tokens: bytes = b""  # uint32
    lora: control.Name | None = None
    extra_key: control.Salt | None = None
    cache_salt: control.Salt | None = None
    limit: control.U31 | None = None
    request: control.Name | None = None
    last: control.U31 = 0


class Drain(Frame):
    """End, in good order, with exit status 0."""


class Ready(Frame):
    """Clients can attach. `facts` are for pages, but for `stream`: None, or where it was bound (`Bound`)."""

    facts: dict[str, Any]


class Bound(Struct):
    """The part of a Ready's `stream` that the supervisor needs."""

    endpoint: str
    replay_endpoint: str | None


class Beat(Frame):
    """A sign of life, from the rank's event loop."""

    state: str
    reserved: Annotated[int, Meta(ge=0, le=MAX_NUMBER)]  # the next life's floor
    tiers: dict[str, tuple[int, int]]  # by tier, bytes of memory that are ready, and of all that there will be
    troubles: list[Trouble] = []  # what does not get on


class Refusal(Struct):
    """Why there is no answer: an error of errors.py."""

    code: str
    message: str
    facts: dict[str, Any]


class Answer(Frame):
    question: int
    body: Any
    refusal: Refusal | None = None


class Failed(Frame):
    """Why the process is about to end: a `code` of errors.py where it is one of ours, else "fail_stop"."""

    code: str
    message: str
    facts: dict[str, Any]


class Keep(Frame):
    """Hold the descriptor beside this for the rank's later lives; without one, let go of what is held by this name.

    So memory can outlive the process that filled it: a host pool, a journal. The newest of a name is held.
    """

    name: str


class Tenants(Frame):
    """Limits of tenants that were set since the supervisor began: the rank's next life has them, too."""

    tenants: dict[str, dict[str, int | str]]


class Long(Frame):
    """The first descriptor beside this holds the frame that is meant: so many bytes from its beginning."""

    num_bytes: Annotated[int, Meta(ge=0, le=MAX_LONG)]


Word: TypeAlias = Start | Ask | Drain | Ready | Beat | Answer | Failed | Keep | Tenants

_decode: Callable[[bytes | memoryview], Word | Long] = msgspec.msgpack.Decoder(Word | Long).decode
_encode = msgspec.msgpack.Encoder(enc_hook=str).encode  # facts of errors may hold anything


class Channel:
    """One end, which it owns. `receive` gives frames and their descriptors, which are the caller's then."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)  # each call says by a flag whether it may wait
        self._sock = sock
        self._buffer = bytearray(MAX_FRAME)
        self._loop: asyncio.AbstractEventLoop | None = None

    @staticmethod
    def pair() -> tuple[Channel, socket.socket]:
        """Our end, and the other process's."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return Channel(ours), theirs

    def send(self, word: Word, fds: Sequence[int] = ()) -> bool:
        """Whether the other side has, or will have, the frame. The descriptors stay the caller's."""
        frame = _encode(word)
        if len(frame) > MAX_FRAME:
            return self._send_long(word, frame, fds)
        return self._send(type(word).__name__, frame, fds)

    def _send_long(self, word: Word, frame: bytes, fds: Sequence[int]) -> bool:
        if len(frame) > MAX_LONG or len(fds) >= MAX_FDS:
            logger.error("%s of %d bytes is too long to send", type(word).__name__, len(frame))
            return False
        try:
            fd = os.memfd_create("sglcache-frame", os.MFD_CLOEXEC)
        except OSError as exc:
            logger.error("%s can't be sent: %s", type(word).__name__, exc)
            return False
        try:
            view = memoryview(frame)
            while view:
                view = view[os.write(fd, view) :]
            return self._send(type(word).__name__, _encode(Long(len(frame))), [fd, *fds])
        except OSError as exc:
            logger.error("%s can't be sent: %s", type(word).__name__, exc)
            return False
        finally:
            os.close(fd)

    def _send(self, name: str, frame: bytes, fds: Sequence[int]) -> bool:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._sock.sendmsg([frame], rights, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except OSError as exc:
            if exc.errno not in (errno.EAGAIN, errno.EPIPE, errno.ECONNRESET, errno.EBADF):
                logger.error("%s can't be sent: %s", name, exc)
            return False
        return True

    def receive(self, wait: bool = False) -> tuple[Word, list[int]] | None:
        """The next frame; None: there is none yet. EOFError: the other end is closed. DecodeError: it is no frame."""
        how = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
        try:
            size, rights, flags, _ = self._sock.recvmsg_into([self._buffer], socket.CMSG_SPACE(4 * MAX_FDS), how)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            raise EOFError from None
        fds = array.array("i")
        for level, kind, packed in rights:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(packed[: len(packed) // fds.itemsize * fds.itemsize])
        if not size:
            raise EOFError
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise msgspec.DecodeError("a frame was cut off")
            try:
                word = _decode(memoryview(self._buffer)[:size])
                if isinstance(word, Long):
                    word = self._read_long(word, fds)
                return word, list(fds)
            except (UnicodeDecodeError, RecursionError) as exc:
                raise msgspec.DecodeError(str(exc)) from None
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    @staticmethod
    def _read_long(long: Long, fds: array.array[int]) -> Word:
        """The frame that is meant; its descriptor is closed."""
        if not fds:
            raise msgspec.DecodeError("a long frame without a descriptor")
        fd = fds.pop(0)
        try:
            frame = os.pread(fd, long.num_bytes, 0)
        except OSError as exc:
            raise msgspec.DecodeError(f"a long frame can't be read: {exc}") from None
        finally:
            os.close(fd)
        if len(frame) != long.num_bytes:
            raise msgspec.DecodeError("a long frame was cut off")
        word = _decode(frame)
        if isinstance(word, Long):
            raise msgspec.DecodeError("a long frame in a long frame")
        return word

    def watch(self, loop: asyncio.AbstractEventLoop, readable: Callable[[], None]) -> None:
        """Have `readable` called, until `unwatch`, while there is something to receive, the end included."""
        self._loop = loop
        loop.add_reader(self._sock.fileno(), readable)

    def unwatch(self) -> None:
        """Idempotent."""
        if self._loop is not None:
            self._loop.remove_reader(self._sock.fileno())
            self._loop = None

    def close(self) -> None:
        """Idempotent."""
        self.unwatch()
        self._sock.close()
