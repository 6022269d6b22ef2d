"""Copies between tiers, and reads and writes of the third, that a test holds back in a real daemon: text for
`Daemon(prelude=...)`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from sglcache.testing.daemon import until

_GATE = """
def plant(path, name):
    import os, threading
    from sglcache.memory import cpu_engine, engine
    engine.STEP_BYTES = 1
    move = cpu_engine.move
    def held(way, layers, *rest):
        if way.name == name:
            while not (os.path.exists(path) or os.path.exists(f"{path}.{layers[0]}")):
                threading.Event().wait(0.002)
            if os.path.exists(path + ".fail"):
                raise MemoryError("planted")
        return move(way, layers, *rest)
    cpu_engine.move = held
"""


def gate(path: Path, name: Literal["backup", "load"]) -> str:
    """Copies of that direction move nothing until a file `path` is there, and fail where `path`.fail is, too.

    Loads go layer by layer, however small they are: layer n moves when there is a file `path`.n. May be used for both
    directions at once, with a file for each.
    """
    return f"{_GATE}\nplant({str(path)!r}, {name!r})\n"


# Planted into a rank: reads, or writes, of the folder's pages wait for as long as the file {mark} is there.
HELD = """
import os, time
from sglcache.storage import disk
def gate(real):
    def held(self, path, parts):
        open({mark!r} + ".began", "a").close()
        while os.path.exists({mark!r}):
            time.sleep(0.002)
        return real(self, path, parts)
    return held
disk.Disk.{call} = gate(disk.Disk.{call})
"""


class Gate:
    """Holds a rank's reads or writes of pages while it is shut."""

    def __init__(self, mark: Path, call: str = "read") -> None:
        """`call`: read or write."""
        self._mark = mark
        self.prelude = HELD.format(mark=str(mark), call=call)

    def shut(self) -> None:
        self._mark.touch()

    def open(self) -> None:
        self._mark.unlink(missing_ok=True)

    def wait(self) -> None:
        """Until something is held, which is let on no longer."""
        began = Path(f"{self._mark}.began")
        until(began.exists)
        began.unlink()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Shut for so long."""
        Path(f"{self._mark}.began").unlink(missing_ok=True)
        self.shut()
        try:
            yield
        finally:
            self.open()
