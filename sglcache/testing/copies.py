"""Copies between tiers that a test holds back, in a real daemon: text for `Daemon(prelude=...)`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

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
