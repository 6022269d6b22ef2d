"""Fork and /proc, for tests that ask the kernel what is mapped and where."""

from __future__ import annotations

import faulthandler
import os
import resource
import warnings
from collections.abc import Callable
from pathlib import Path


def mapped(name: str) -> int:
    """How often this process maps the memfd of that name."""
    return sum(f"/memfd:{name} " in line for line in Path("/proc/self/maps").read_text().splitlines())


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def in_child(body: Callable[[], object]) -> int:
    """Fork, run `body` there, and give the exit status: 0 unless it returned False or raised, < 0 for a signal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch has threads; the child touches none of them
        pid = os.fork()
    if pid == 0:
        status = 99
        try:
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            status = 1 if body() is False else 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
