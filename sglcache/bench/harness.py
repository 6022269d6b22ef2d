"""What every benchmark needs: numbers about numbers, pairs in turn, other processes, and where it all ran.

Times of one machine say little about another and, on a shared one, little about the next minute. So what is claimed
is a ratio: two things measured in turn, A B A B, in the same run, and compared by their medians; the smallest and the
largest ratio of any pair is the spread.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from sglcache.compiled import FORM
from sglcache.errors import SglcacheError

A = TypeVar("A")
B = TypeVar("B")
Row = dict[str, Any]

MIN_PAIRS = 7
PACKAGES = ("sglcache", "numpy", "msgspec", "ormsgpack", "xxhash", "uvloop", "torch", "transformers")


class BenchError(SglcacheError):
    """What should be measured could not be run, or did not do the work."""

    code = "bench"


def quantile(ordered: Sequence[float] | npt.NDArray[np.float64], q: float) -> float:
    """The value below which a share `q` of `ordered` (ascending, not empty) lies: element int(n q), or the last."""
    return float(ordered[min(int(len(ordered) * q), len(ordered) - 1)])


class Summary(NamedTuple):
    """Of a sample, in its own unit."""

    samples: int
    mean: float
    p50: float
    p99: float
    max: float

    @staticmethod
    def of(values: Sequence[float]) -> Summary:
        """All zero for an empty sample."""
        if not values:
            return Summary(0, 0.0, 0.0, 0.0, 0.0)
        ordered = sorted(values)
        mean = sum(ordered) / len(ordered)
        return Summary(len(ordered), mean, quantile(ordered, 0.5), quantile(ordered, 0.99), ordered[-1])


class Comparison(NamedTuple):
    """How much longer the other takes: above 1, ours is faster. From equally many samples, taken in turn."""

    ours: float  # median
    other: float  # median
    ratio: float  # other / ours: of the medians
    least: float  # the smallest ratio of one pair
    most: float  # the largest
    ours_spread: tuple[float, float]
    other_spread: tuple[float, float]

    @staticmethod
    def of(ours: Sequence[float], other: Sequence[float]) -> Comparison:
        """Both positive and of equal, positive length."""
        pairs = [b / a for a, b in zip(ours, other, strict=True)]
        a, b = statistics.median(ours), statistics.median(other)
        return Comparison(a, b, b / a, min(pairs), max(pairs), (min(ours), max(ours)), (min(other), max(other)))


def rounds(calls: Sequence[Callable[[], A]], count: int) -> list[list[A]]:
    """A B C A B C …: as `in_turn`, for any number of them; what each gave."""
    given: list[list[A]] = [[] for _ in calls]
    for _ in range(count):
        for call, its in zip(calls, given, strict=True):
            its.append(call())
    return given


def in_turn(first: Callable[[], A], second: Callable[[], B], pairs: int) -> tuple[list[A], list[B]]:
    """A B A B …: a machine that slows down slows both down."""
    a: list[A] = []
    b: list[B] = []
    for _ in range(pairs):
        a.append(first())
        b.append(second())
    return a, b


def compare(ours: Sequence[Row], other: Sequence[Row], fields: Sequence[str]) -> dict[str, Comparison]:
    """By field, for those that every row of both has, as a positive number."""
    return {
        field: Comparison.of([row[field] for row in ours], [row[field] for row in other])
        for field in fields
        if all(isinstance(row.get(field), int | float) and row[field] > 0 for row in [*ours, *other])
    }


def run_json(command: str | Sequence[str], timeout_s: float = 1800.0, env: Mapping[str, str] | None = None) -> Row:
    """Run a command (a string: by the shell) and take its last line of stdout as a JSON object. BenchError if not."""
    shown = command if isinstance(command, str) else shlex.join(command)
    try:
        done = subprocess.run(
            command,
            shell=isinstance(command, str),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=env,
        )
    except subprocess.TimeoutExpired:
        raise BenchError(f"`{shown}` took longer than {timeout_s:.0f} s") from None
    except OSError as exc:
        raise BenchError(f"`{shown}` can't be run: {exc.strerror or exc}") from exc
    if done.returncode:
        said = done.stderr[-2000:].strip()
        raise BenchError(f"`{shown}` exited {done.returncode}: {said}", rc=done.returncode, stderr=said)
    lines = done.stdout.strip().splitlines()
    try:
        row = json.loads(lines[-1])
    except (IndexError, ValueError):
        row = None
    if not isinstance(row, dict):
        raise BenchError(f"`{shown}` printed no JSON object on its last line: {done.stdout[-500:]!r}")
    return row


def run_ours(command: Sequence[str], timeout_s: float = 1800.0, env: Mapping[str, str] | None = None) -> Row:
    """As `run_json`, of a command of ours with --json: the error that it tells of is raised here."""
    try:
        return run_json(command, timeout_s, env)
    except BenchError as exc:
        with contextlib.suppress(ValueError, LookupError, TypeError):
            told = json.loads(str(exc.facts["stderr"]).strip().splitlines()[-1])["error"]
            raise SglcacheError.from_code(told["code"], told["message"], told["facts"]) from None
        raise


def facts() -> Row:
    """The machine, the versions and the commit, and how busy the machine was: no figure goes without them."""
    return {
        "core": FORM.name,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "versions": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "commit": _commit(Path(__file__).parent),
    }


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit(folder: Path) -> str | None:
    """HEAD, with `+` behind it where the tree differs from it; None outside a checkout."""
    try:
        head, changed = (
            subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=True)
            for words in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain"))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def plain(value: Any) -> Any:
    """For JSON: named tuples as objects, floats to four digits after the point."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
