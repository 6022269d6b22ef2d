"""Words in shared memory, between the torture, its runners and its daemon's ranks: a file that all of them map.

A word is an int64 that one process writes and others read; so nothing waits for anything here, what a process has
counted outlives its SIGKILL, and a seam in a rank costs a look at memory.
"""

from __future__ import annotations

import os
from enum import IntEnum
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.int64]  # [words]
E = TypeVar("E", bound=IntEnum)

WORDS = 32  # of a row
COMMON = 0  # the row that all runners read


class Common(IntEnum):
    """Of row 0, the torture's."""

    STOP = 0  # runners end in good order
    PAUSE = 1  # they give everything back, leave, and wait
    COPIES_MAY_FAIL = 2  # a TransferError is no surprise


class Word(IntEnum):
    """Of a process of a runner; it writes them, but for the last three."""

    PID = 0
    STAMP = 1  # time.monotonic_ns() of its last step
    POINT = 2  # where it is
    OPERATIONS = 3  # index commands that were answered
    REQUESTS = 4
    INPUT_TOKENS = 5
    DEVICE_TOKENS = 6  # of hits
    HOST_TOKENS = 7
    CHECKED_PAGES = 8
    CHECKED_STATES = 9
    NO_SPACE = 10
    LOST = 11  # times that the daemon, or its session, was gone
    PAUSED = 12  # it has left, and waits
    FIRED = 13  # the number of the last order that it carried out
    ORDER = 20  # the torture's: the number of the order
    ACTION = 21  # an Action
    AT = 22  # the Point at which it is to be done


class Action(IntEnum):
    """What a process of a runner is to do to itself."""

    NOTHING = 0
    DIE = 1  # SIGKILL
    STOP = 2  # SIGSTOP; the torture lets it go on
    VANISH = 3  # its socket ends without a word


class Point(IntEnum):
    """Where in its journey a process of a runner is."""

    ANYWHERE = 0
    ATTACH = 1
    IDLE = 2
    ACQUIRE_SENT = 3
    ACQUIRED = 4
    LOADED = 5
    HALF_WRITTEN = 6
    WRITTEN = 7
    COMMIT_SENT = 8
    RECORDED = 9
    COMMITTED = 10
    EXTENDED = 11
    RELEASE_SENT = 12
    LOOKING = 13


class Hook(IntEnum):
    """Of a rank; the torture writes them, and the rank counts down."""

    CLOCK_NS = 0  # what its clock is off by
    COPIES_FAIL = 1  # so many of the next copies' pieces fail
    COPIES_UNTIL = 2  # time.monotonic_ns() until which copies stand still: even, before a byte is moved; odd, after
    DISK_ERRNO = 3  # what each write of the third tier's files fails with
    FAILED = 4  # pieces that were failed so far; the rank's


class Board:
    """Rows of words in a file. Row 0 is for all; rows of runners' processes, then of ranks, come behind."""

    def __init__(self, path: Path, num_rows: int | None = None) -> None:
        """`num_rows`: make it; else it is there."""
        self.path = path
        if num_rows is not None:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.ftruncate(fd, num_rows * WORDS * 8)
            os.close(fd)
        self.words: npt.NDArray[np.int64] = np.memmap(path, np.int64, "r+").reshape(-1, WORDS)

    def row(self, number: int) -> Row:
        row: Row = self.words[number]
        return row

    @property
    def common(self) -> Row:
        return self.row(COMMON)
