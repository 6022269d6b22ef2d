"""Processes that are asked to do things with a card, over unix sockets, while the asker itself never calls CUDA.

    stage.actor("A") ─fork─► process A: Card, streams, memory      task(here, ...) runs there
          .ask(task, 1, fds=[fd]) ──socket, descriptors──► .result()

So the asker is what the supervisor is: a process without CUDA through whose hands descriptors go. Processes are forked
from it before it or they have begun with CUDA, which does not outlive a fork.

Every wait here has an end, the stage's. An actor that does not answer by then is killed with the others, and the
question has `Hung`. Tasks and answers are pickled: both ends are this program.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import select
import signal
import socket
import struct
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from sglcache.testing.card import Card

HEADER: Final = struct.Struct("!I")
MAX_FDS: Final = 64  # with one message
REAP_S: Final = 10.0  # a killed process that has not ended by then is left to the system, and told of
PR_SET_PDEATHSIG: Final = 1
DRIVERS: Final = ("cuda_driver.py", "card.py")  # what calls into these is where something went wrong

P = ParamSpec("P")
R = TypeVar("R")


class Unanswered(Exception):
    """A question that ended before its end."""


class Hung(Unanswered):
    """A process did not answer in time."""


class Gone(Unanswered):
    """A process ended while it was asked."""


class Failed(Unanswered):
    """What a process was asked went wrong there; the text says how."""


class Link:
    """Whole messages, with descriptors, over a unix socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, message: object, fds: Sequence[int] = ()) -> None:
        body = pickle.dumps(message)
        self.sock.settimeout(None)
        socket.send_fds(self.sock, [HEADER.pack(len(body))], list(fds))
        self.sock.sendall(body)

    def receive(self, timeout_s: float | None) -> tuple[Any, list[int]]:
        """A message and its descriptors, now the caller's. EOFError: the other side is gone. TimeoutError."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        header, fds = b"", []
        while len(header) < HEADER.size:
            self._wait(until)
            more, got, _, _ = socket.recv_fds(self.sock, HEADER.size - len(header), MAX_FDS)
            fds += got
            if not more:
                raise EOFError
            header += more
        (left,) = HEADER.unpack(header)
        body = bytearray()
        while left:
            self._wait(until)
            if not (more := self.sock.recv(min(left, 1 << 20))):
                raise EOFError
            body += more
            left -= len(more)
        return pickle.loads(bytes(body)), fds

    def _wait(self, until: float | None) -> None:
        left = None if until is None else until - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError
        self.sock.settimeout(left)


class Here:
    """An actor's own side: what its tasks have in hand."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.kept: dict[str, Any] = {}  # from task to task
        self.got: list[int] = []  # descriptors that came with what is asked now; closed after it
        self.give: list[int] = []  # descriptors to go with the answer; closed when they have gone

    @cached_property
    def card(self) -> Card:
        return Card(self.device)

    @cached_property
    def stream(self) -> int:
        """The one that most tasks use."""
        return self.card.stream()


class Actor:
    """A process, from the asker's side."""

    def __init__(self, stage: Stage, name: str, env: Mapping[str, str]) -> None:
        self.name = name
        self._stage = stage
        self._asked: list[str] = []
        self._got: list[int] = []
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        asker = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _live(theirs, asker, stage.device, env)
        theirs.close()
        self._link = Link(ours)
        self.pidfd = open_pidfd(self.pid)

    def begin(self, task: Callable[Concatenate[Here, P], Any], *args: P.args, **kwargs: P.kwargs) -> None:
        """Ask, and go on. The answer is `result`'s."""
        self._ask((), task, *args, **kwargs)

    def ask(self, task: Callable[Concatenate[Here, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        self._ask((), task, *args, **kwargs)
        answer: R = self.result()
        return answer

    def hand(self, fds: Sequence[int], task: Callable[Concatenate[Here, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As `ask`, with descriptors, which stay the asker's."""
        self._ask(fds, task, *args, **kwargs)
        answer: R = self.result()
        return answer

    def begin_with(
        self, fds: Sequence[int], task: Callable[Concatenate[Here, P], Any], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """As `begin`, with descriptors, which stay the asker's."""
        self._ask(fds, task, *args, **kwargs)

    def result(self) -> Any:
        """The answer to the first of what was asked and is not answered yet."""
        what = f"{self.name} ({self._asked[0]})"
        self._close(self.take())
        began = time.monotonic()
        try:
            (good, answer), self._got = self._link.receive(max(0.0, self._stage.left_s))
        except TimeoutError as exc:
            raise Hung(f"{what} did not answer within {time.monotonic() - began:.1f} s, to the question's end") from exc
        except (EOFError, ConnectionError) as exc:
            raise Gone(f"{what} ended before it answered") from exc
        self._asked.pop(0)
        if not good:
            raise Failed(f"{what}: {answer}")
        return answer

    def take(self) -> list[int]:
        """The last answer's descriptors, from now on the caller's to close; not taken, they go with the next answer."""
        fds, self._got = self._got, []
        return fds

    @contextlib.contextmanager
    def given(self) -> Iterator[list[int]]:
        """As `take`, and closed at the end."""
        fds = self.take()
        try:
            yield fds
        finally:
            self._close(fds)

    def has_answered(self, within_s: float) -> bool:
        """Whether `result` would come at once; waits so long for it."""
        readable, _, _ = select.select([self._link.sock], [], [], max(0.0, min(within_s, self._stage.left_s)))
        return bool(readable)

    def kill(self) -> tuple[float, float]:
        """kill -9; when that was, and when the pidfd said that it is dead: of the monotonic clock."""
        began = time.monotonic()
        os.kill(self.pid, signal.SIGKILL)
        if not self._is_dead(self._stage.left_s):
            raise Hung(f"{self.name} is not dead {time.monotonic() - began:.1f} s after kill -9")
        seen = time.monotonic()
        self._reap()
        return began, seen

    def end(self) -> bool:
        """Kill it, if it lives; whether it is gone."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            if not self._is_dead(REAP_S):
                return False
            self._reap()
        return True

    def _ask(self, fds: Sequence[int], task: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._asked.append(task.__name__)
        try:
            self._link.send((task, args, kwargs), fds)
        except ConnectionError as exc:
            raise Gone(f"{self.name} was gone when it was to {task.__name__}") from exc

    def _close(self, fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)

    def _is_dead(self, within_s: float) -> bool:
        if self.pidfd is not None:
            return bool(select.select([self.pidfd], [], [], max(0.0, within_s))[0])
        until = time.monotonic() + within_s
        while not (dead := os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
            if time.monotonic() > until:
                break
            time.sleep(0.0002)
        return dead is not None

    def _reap(self) -> None:
        os.waitpid(self.pid, 0)
        self.pid = 0
        self._close(self.take())
        if self.pidfd is not None:
            os.close(self.pidfd)
        self._link.sock.close()


class Stage:
    """The processes of one question, and how long it may take."""

    def __init__(self, device: int, seconds: float) -> None:
        self.device = device
        self._until = time.monotonic() + seconds
        self._actors: list[Actor] = []
        self.left_behind: list[str] = []  # actors that kill -9 did not end

    def actor(self, name: str, env: Mapping[str, str] | None = None) -> Actor:
        """A new process; it begins with CUDA when it is first asked for something of the card."""
        actor = Actor(self, name, env or {})
        self._actors.append(actor)
        return actor

    @property
    def left_s(self) -> float:
        return self._until - time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Hung: the question's time is over."""
        if seconds > self.left_s:
            raise Hung(f"{seconds:.1f} s more were needed, and {max(0.0, self.left_s):.1f} s were left")
        time.sleep(seconds)

    def until(self, true: Callable[[], bool], within_s: float) -> bool:
        """Whether that became true."""
        until = time.monotonic() + min(within_s, self.left_s)
        while not (now := true()) and time.monotonic() < until:
            time.sleep(0.0005)
        return now

    def end(self) -> None:
        for actor in self._actors:
            if not actor.end():
                self.left_behind.append(actor.name)


@contextlib.contextmanager
def staged(device: int, seconds: float) -> Iterator[Stage]:
    stage = Stage(device, seconds)
    try:
        yield stage
    finally:
        stage.end()


def open_pidfd(pid: int) -> int | None:
    """None: this system has none, and a parent's wait says the same to within a fraction of a millisecond."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _live(sock: socket.socket, asker: int, device: int, env: Mapping[str, str]) -> None:
    """An actor's whole life; does not return."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != asker:
            os._exit(1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the asker ends its actors
        # What the asker has from others is not this process's: a descriptor of a pool would keep the pool.
        keep = sock.fileno()
        os.closerange(3, keep)
        os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 1 << 20 else 1 << 16)
        # With the module, since a kernel that is loaded by its first launch may wait for streams that wait for it.
        os.environ.update({"CUDA_MODULE_LOADING": "EAGER", **env})
        _serve(Link(sock), Here(device))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _serve(link: Link, here: Here) -> None:
    while True:
        try:
            (task, args, kwargs), here.got = link.receive(None)
        except EOFError:
            return
        try:
            answer = (True, task(here, *args, **kwargs))
        except Exception as exc:
            frames = [(os.path.basename(at.filename), at.lineno) for at in traceback.extract_tb(exc.__traceback__)]
            where = "{}:{}".format(*next(at for at in reversed(frames) if at[0] not in DRIVERS))
            what = str(exc).partition("; the rank ends")[0]  # which is about a daemon
            answer = (False, f"{type(exc).__name__}: {what} ({where})")
        link.send(answer, here.give)
        for fd in {*here.got, *here.give}:
            os.close(fd)
        here.got, here.give = [], []
