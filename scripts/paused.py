#!/usr/bin/env python3
"""Run a command while the machine pauses: all of its processes at random, or one of them while the others go on.

What goes by the clock where it should wait for the thing itself fails so in minutes; on a busy machine it does once in
a hundred runs. No signal is sent: a control group is frozen (Linux 5.2, cgroup v2), so nothing sees it but the time.

    scripts/paused.py make test ARGS="-x"
    scripts/paused.py --seed 7 --every 0.3 --longest 0.6 -- .venv/bin/python -m pytest tests/server/test_limits.py

Exit status: the command's; 2: there is no control group to freeze, or bad usage.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

SHORTEST_S = 0.02


def mount() -> Path | None:
    """Where control groups of version 2 are."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(place)
    return None


class Groups:
    """One control group for all processes of the command, and in it one for a process that is paused alone."""

    def __init__(self, top: Path) -> None:
        here = Path("/proc/self/cgroup").read_text().rpartition("0::")[2].strip().lstrip("/")
        self.home = top / here
        self.all = self.home / f"paused-{os.getpid()}"
        self.one = self.all / "one"
        self.one.mkdir(parents=True)
        if not (self.one / "cgroup.freeze").exists():
            self.remove()
            raise FileNotFoundError("the kernel freezes none")

    def enter(self) -> None:
        (self.all / "cgroup.procs").write_text(str(os.getpid()))

    @contextlib.contextmanager
    def paused(self, group: Path) -> Iterator[None]:
        (group / "cgroup.freeze").write_text("1")
        try:
            yield
        finally:
            (group / "cgroup.freeze").write_text("0")

    @contextlib.contextmanager
    def alone(self, pid: str) -> Iterator[None]:
        (self.one / "cgroup.procs").write_text(pid)
        try:
            with self.paused(self.one):
                yield
        finally:
            self._move(self.one, self.all)  # its children of the meantime, too

    def remove(self) -> None:
        for group in (self.one, self.all):
            self._move(group, self.home)  # what the command has left running
            group.rmdir()

    def _move(self, group: Path, to: Path) -> None:
        while pids := (group / "cgroup.procs").read_text().split():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    (to / "cgroup.procs").write_text(pid)


def refused(exc: Exception) -> int:
    print(f"paused: no control group of version 2 can be made and entered ({exc}); try it as root", file=sys.stderr)
    return 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="which pauses (0)")
    parser.add_argument("--every", type=float, default=0.5, metavar="S", help="seconds from pause to pause (0.5)")
    parser.add_argument("--longest", type=float, default=0.5, metavar="S", help="seconds of the longest pause (0.5)")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    if args.every <= 0 or args.longest < SHORTEST_S:
        parser.error(f"--every is positive, and --longest at least {SHORTEST_S}")
    top = mount()
    try:
        if top is None:
            raise FileNotFoundError("none is mounted")
        groups = Groups(top)
    except OSError as exc:
        return refused(exc)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # nothing stays frozen
    rng, num_pauses = random.Random(args.seed), 0
    try:
        try:
            child = subprocess.Popen(args.command, preexec_fn=groups.enter)
        except subprocess.SubprocessError as exc:
            return refused(exc)
        except OSError as exc:
            print(f"paused: {exc}", file=sys.stderr)
            return 2
        while child.poll() is None:
            time.sleep(rng.expovariate(1 / args.every))
            length_s = SHORTEST_S * (args.longest / SHORTEST_S) ** rng.random()
            pids = (groups.all / "cgroup.procs").read_text().split()
            # A process may be gone before it is moved.
            with contextlib.suppress(ProcessLookupError):
                one = rng.random() < 0.5 and bool(pids)
                with groups.alone(rng.choice(pids)) if one else groups.paused(groups.all):
                    time.sleep(length_s)
                num_pauses += 1
    finally:
        groups.remove()
    print(f"paused: {num_pauses} pauses", file=sys.stderr)
    return child.returncode


if __name__ == "__main__":
    sys.exit(main())
