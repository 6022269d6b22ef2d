"""What the daemon logs, on stderr, as lines for people or as one object of JSON a line, the supervisor and ranks alike.

    2026-11-30 10:44:24,123 WARNING rank 1 sglcache.watch: ...
    {"ts": "2026-11-30T10:44:24.123Z", "level": "warning", "logger": "sglcache.watch", "rank": 1, "pid": 42, ...}

JSON has `exception`, a traceback, where there is one, and of an error that ends the start its `code`, `facts` and
`remedy`. Warnings of Python and what nobody caught are lines of JSON then as well.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

LINES, JSON = "lines", "json"


def line(
    level: str, logger: str, message: str, *, at: float | None = None, rank: int | None = None, **more: Any
) -> str:
    """One of JSON; `rank`: None of the supervisor."""
    at = time.time() if at is None else at
    ts = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at)) + f".{int(at * 1000) % 1000:03d}Z"
    fields = {"ts": ts, "level": level, "logger": logger, "rank": rank, "pid": os.getpid(), "message": message, **more}
    return json.dumps(fields, default=str)


class JsonFormatter(logging.Formatter):
    def __init__(self, rank: int | None) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        more: dict[str, Any] = {}
        if record.exc_info:
            more["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            more["stack"] = record.stack_info
        return line(
            record.levelname.lower(), record.name, record.getMessage(), at=record.created, rank=self._rank, **more
        )


def begin(level: int, form: str, rank: int | None = None) -> None:
    """Have this process log so, to stderr. Of one that logs already nothing is changed."""
    root = logging.getLogger()
    if root.handlers:
        return
    handler = logging.StreamHandler()
    if form == JSON:
        handler.setFormatter(JsonFormatter(rank))
        logging.captureWarnings(True)
        sys.excepthook = _uncaught
    else:
        where = "" if rank is None else f"rank {rank} "
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {where}%(name)s: %(message)s"))
    root.addHandler(handler)
    root.setLevel(level)


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("sglcache").critical("%s: %s", kind.__name__, error, exc_info=(kind, error, trace))


def wanted_by(data: Mapping[str, Any]) -> str:
    """The form that a configuration asks for, which may be wrong otherwise; lines if it does not say."""
    log = data.get("log")
    return JSON if isinstance(log, Mapping) and log.get("format") == JSON else LINES


def wanted(file: Path | None, overrides: Sequence[str]) -> str:
    """Likewise, of a file under overrides."""
    form = LINES
    if file is not None:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            form = wanted_by(tomllib.loads(file.read_text()))
    for override in overrides:
        key, _, value = override.partition("=")
        if key.strip() == "log.format":
            form = value.strip(" \"'")
    return JSON if form == JSON else LINES
