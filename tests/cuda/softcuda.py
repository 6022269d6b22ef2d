"""A CUDA driver in software (softcuda.c), for processes that load `libcuda.so.1`."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parent / "softcuda.c"
FLAGS = ("-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread")
ROOM_BYTES = 1 << 30  # that the cards' memory wants of a file system


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

    def load(self, **settings: Any) -> ctypes.CDLL:
        """The driver in this process, initialised: a fresh one, that shares with others what another process would."""
        own = Path(shutil.copy(self.library, self.state / f"libcuda-{next(self._copies)}.so"))
        with pytest.MonkeyPatch.context() as patch:
            for key, value in (self.environment | settings).items():
                patch.setenv(key, str(value))
            library = ctypes.CDLL(str(own))
            code = library.cuInit(0)
        assert code == 0, f"cuInit: {code}"
        self._loaded.append(library)
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
    with tempfile.TemporaryDirectory(prefix="softcuda-", dir=shm if room else None) as folder:
        soft = SoftCuda(library, Path(folder), **settings)
        try:
            yield soft
        finally:
            soft.close()
