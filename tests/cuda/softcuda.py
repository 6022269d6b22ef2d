"""A CUDA driver in software (softcuda.c), for processes that load `libcuda.so.1`."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import fcntl
import itertools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

SOURCE = Path(__file__).parent / "softcuda.c"
FLAGS = ("-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread")
ROOM_BYTES = 1 << 30  # that the cards' memory wants of a file system
PREFIX = "softcuda-"
GRACE_S = 60.0


def compiled(target: Path, *more: str) -> Path:
    """The driver, as a library of that name."""
    cc = shutil.which("cc")
    if cc is None:
        pytest.fail(
            "no C compiler: these tests compile tests/cuda/softcuda.c. Debian and Ubuntu: build-essential", False
        )
    made = subprocess.run(
        [cc, *FLAGS, *more, str(SOURCE), "-o", str(target)], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    return target


class SoftCuda:
    """Cards in software, which nobody else's processes see.

    `environment` is for child processes: they find them by it. What tests tell the driver while processes run is a file
    in `state`; softcuda.c's head says which there are.
    """

    def __init__(self, library: Path, state: Path, **settings: Any) -> None:
        """`settings`: what goes into the environment, such as SOFTCUDA_DEVICES=2."""
        self.library = library
        self.state = state
        path = os.pathsep.join(filter(None, [str(library.parent), os.environ.get("LD_LIBRARY_PATH")]))
        told = {"LD_LIBRARY_PATH": path, "SOFTCUDA_DIR": state, "SOFTCUDA_DEVICES": 1, **settings}
        self.environment = {key: str(value) for key, value in told.items()}
        self._copies = itertools.count()
        self._loaded: list[ctypes.CDLL] = []
        self.kept: list[Any] = []  # what streams of this process may still touch when a test is over

    def copy(self) -> ctypes.CDLL:
        """The driver in this process: a fresh one, as another process would have, that has yet to be initialised."""
        own = shutil.copy(self.library, self.state / f"libcuda-{next(self._copies)}.so")
        self._loaded.append(ctypes.CDLL(str(own)))
        return self._loaded[-1]

    def load(self, answer: int = 0, **settings: Any) -> ctypes.CDLL:
        """The same, initialised with these settings too. AssertionError: cuInit answers otherwise."""
        library = self.copy()
        with pytest.MonkeyPatch.context() as patch:  # which is all that cuInit reads
            for key, value in (self.environment | settings).items():
                patch.setenv(key, str(value))
            code = library.cuInit(0)
        assert code == answer, f"cuInit: {code}"
        return library

    def fail(self, call: str, code: int, pid: int | None = None) -> None:
        """The next such call, of whichever process or of this one, fails."""
        new = self.state / "new"
        new.write_text(f"{code}\n")
        new.rename(self.state / (f"fail-{call}" if pid is None else f"fail-{call}.{pid}"))

    @contextlib.contextmanager
    def hold_copies(self, pid: int | None = None) -> Iterator[None]:
        """No copy begins meanwhile, of any process or of this one; those that wait begin then."""
        file = self.state / ("hold-copies" if pid is None else f"hold-copies.{pid}")
        file.touch()
        try:
            yield
        finally:
            file.unlink()

    def close(self) -> None:
        """End what streams of this process do."""
        for library in self._loaded:
            library.cuCtxSetCurrent(None)
            for device in range(int(self.environment["SOFTCUDA_DEVICES"])):
                while library.cuDevicePrimaryCtxRelease_v2(device) == 0:
                    continue


@contextlib.contextmanager
def cards(library: Path, **settings: Any) -> Iterator[SoftCuda]:
    """Cards with this in their environment. Their memory is in RAM, where there is room."""
    shm = Path("/dev/shm")
    room = shm.is_dir() and os.access(shm, os.W_OK) and shutil.disk_usage(shm).free >= ROOM_BYTES
    base = shm if room else Path(tempfile.gettempdir())
    sweep(base)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=base) as folder, (Path(folder) / "owner").open("w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        soft = SoftCuda(library, Path(folder), **settings)
        try:
            yield soft
        finally:
            soft.close()


def sweep(base: Path) -> None:
    """Remove what tests left there that were killed: memory that nobody would ever free."""
    for owner in base.glob(f"{PREFIX}*/owner"):
        with contextlib.suppress(OSError), owner.open() as file:
            if time.time() - os.fstat(file.fileno()).st_mtime > GRACE_S:  # younger: it may not be locked yet
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                shutil.rmtree(owner.parent, ignore_errors=True)


# Runs what it is sent, and answers with the value of the last line. What came along is in `fds`; what is put into
# `give` goes back.
PROGRAM = """
import ast, ctypes, mmap, os, socket, sys
import numpy as np
from sglcache.memory.cuda_driver import LibCuda
door = socket.socket(fileno=int(sys.argv[1]))
names = dict(globals())
while True:
    text, names["fds"], _, _ = socket.recv_fds(door, 1 << 16, 8)
    if not text:
        break
    names["give"] = []
    try:
        *lines, last = ast.parse(text).body
        exec(compile(ast.Module(lines, []), "sent", "exec"), names)
        if isinstance(last, ast.Expr):
            said = eval(compile(ast.Expression(last.value), "sent", "eval"), names)
        else:
            said = exec(compile(ast.Module([last], []), "sent", "exec"), names)
        answer = (True, said)
    except Exception as exc:
        answer = (False, str(exc))
    socket.send_fds(door, [repr(answer).encode()], names["give"])
"""


class Process:
    """A process on these cards, which does as it is told; `cuda` is its LibCuda, and speaks of the first card."""

    def __init__(self, soft: SoftCuda, **settings: Any) -> None:
        self._door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = os.environ | soft.environment | {key: str(value) for key, value in settings.items()}
        command = [sys.executable, "-c", PROGRAM, str(theirs.fileno())]
        self._process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()
        self.pid = self._process.pid
        self.fds: list[int] = []  # that came with the last answer
        self.run("cuda = LibCuda(); cuda.use(0)")

    def send(self, text: str, *fds: int) -> None:
        socket.send_fds(self._door, [textwrap.dedent(text).encode()], fds)

    def answer(self) -> Any:
        """AssertionError: it raised. EOFError: it is dead."""
        text, self.fds, _, _ = socket.recv_fds(self._door, 1 << 16, 8)
        if not text:
            raise EOFError
        ok, said = ast.literal_eval(text.decode())
        assert ok, said
        return said

    def run(self, text: str, *fds: int) -> Any:
        self.send(text, *fds)
        return self.answer()

    def kill(self) -> None:
        self._process.kill()
        self.wait()

    def wait(self) -> int:
        return self._process.wait(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        self._door.close()
