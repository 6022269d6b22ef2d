"""How a tortured daemon's ranks are started: as the supervisor ever does, with seams that a fault may open.

    the clock          Owner's, and the one that sequence numbers begin with: off by as much as the board says
    copies             a piece of a copy fails, or stands still for a while; on a card that fails, it is lost
    the third tier     a write of a file fails, as of a disk that is full

What is opened when is in the rank's row of the board; a row of zeros changes nothing.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from sglcache.memory import cpu_engine
from sglcache.memory.cuda_driver import CudaError, LibCuda
from sglcache.server import owner, rank
from sglcache.storage import disk
from sglcache.torture.board import Board, Hook, Row

STEP_S = 0.005
LET_FAIL = "the torture lets this copy fail"


def open_seams(row: Row) -> None:
    """Put what looks at the row in the place of what it stands before."""

    def now() -> float:
        return time.time() + int(row[Hook.CLOCK_NS]) / 1e9

    class TorturedOwner(owner.Owner):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **{**named, "clock": now})

    move = cpu_engine.move

    def stand_still(odd: int) -> None:
        while time.monotonic_ns() < row[Hook.COPIES_UNTIL] and row[Hook.COPIES_UNTIL] & 1 == odd:
            time.sleep(STEP_S)

    def tortured_move(*arguments: Any) -> Any:
        stand_still(0)
        if row[Hook.COPIES_FAIL] > 0:
            row[Hook.COPIES_FAIL] -= 1
            row[Hook.FAILED] += 1
            raise OSError(LET_FAIL)
        staging = move(*arguments)
        stand_still(1)
        return staging

    copy = LibCuda.copy

    def tortured_copy(self: LibCuda, *arguments: Any) -> None:
        stand_still(0)
        if row[Hook.COPIES_FAIL] > 0:
            row[Hook.COPIES_FAIL] -= 1
            row[Hook.FAILED] += 1
            raise CudaError(LET_FAIL, call="copy")
        copy(self, *arguments)
        stand_still(1)

    write = disk.Disk.write

    def tortured_write(self: disk.Disk, path: str, parts: Any) -> None:
        if number := int(row[Hook.DISK_ERRNO]):
            raise OSError(number, os.strerror(number), path)
        write(self, path, parts)

    for module, name, seam in (
        (rank, "Owner", TorturedOwner),
        (rank, "_clock_us", lambda: int(now() * 1e6)),
        (cpu_engine, "move", tortured_move),
        (LibCuda, "copy", tortured_copy),
        (disk.Disk, "write", tortured_write),
    ):
        setattr(module, name, seam)


def main(board: str, first_row: int) -> None:
    """Be the rank that the supervisor at the other end of the descriptor in argv wants. Its row is the board's
    `first_row` and its offset, which only its first frame tells: the class that reads it opens the seams."""

    class TorturedRank(rank.Rank):
        def __init__(self, config: Any, start: Any, *more: Any) -> None:
            open_seams(Board(Path(board)).row(first_row + start.seat.offset))
            super().__init__(config, start, *more)

    setattr(rank, "Rank", TorturedRank)  # noqa: B010
    sys.exit(rank.serve(int(sys.argv[1])))
