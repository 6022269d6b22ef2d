"""What a file store wrote down about its pages, so that it need not read every file to know them again: SQLite.

The catalog is never the truth, the files are. So it is written late and without syncs, may be lost, old or damaged, and
is thrown away at the first error: each row proves itself (`Form.holds`), and what it lacks the files' headers have.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger(__name__)

VERSION = 1
FLUSH_ROWS = 512
TABLE = (
    "CREATE TABLE pages (number INTEGER PRIMARY KEY, digest BLOB, before BLOB, namespace BLOB, tokens BLOB, "
    "num_bytes INTEGER, used INTEGER) STRICT"
)
_SIDECARS = ("", "-journal", "-wal", "-shm")


class Entry(NamedTuple):
    """A page as it is written down."""

    number: int  # rises in the order in which pages came
    digest: bytes
    before: bytes | None
    namespace: bytes  # packed
    tokens: bytes
    num_bytes: int  # of its file
    used: int  # a tick


class Catalog:
    """One SQLite file, used from any thread. Nothing here raises for what the disk does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._added: dict[int, Entry] = {}
        self._removed: list[int] = []
        self._used: dict[int, int] = {}
        self._db: sqlite3.Connection | None = None

    def open(self) -> list[Entry]:
        """All that is written down, in the order of numbers; nothing where it can't be read: then it is made anew."""
        try:
            return self._load()
        except (sqlite3.Error, OverflowError, ValueError) as exc:
            log.warning("%s can't be read (%s); it is made anew from the pages", self.path, exc)
            self._drop()
        try:
            return self._load()
        except (sqlite3.Error, ValueError) as exc:
            log.warning("%s can't be made (%s); the next start will read every page's header", self.path, exc)
            self._drop()
            return []

    def _load(self) -> list[Entry]:
        for end in _SIDECARS:
            # SQLite opens them, and would wait for whoever writes into a pipe.
            path = self.path.with_name(self.path.name + end)
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISREG(os.lstat(path).st_mode):
                    raise ValueError(f"{path.name} is no file")
        db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        self._db = db
        # One process has it, so the lock is taken once; and what a power cut damages is thrown away.
        for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=TRUNCATE", "synchronous=OFF"):
            db.execute(f"PRAGMA {pragma}")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version not in (0, VERSION):
            raise ValueError(f"it is of version {version}")
        made = db.execute("SELECT sql FROM sqlite_master WHERE name = 'pages'").fetchone()
        if made is None:
            db.execute(TABLE)
        elif made != (TABLE,):
            raise ValueError(f"its table was made by {made[0]!r}")
        db.execute(f"PRAGMA user_version={VERSION}")
        return list(map(Entry._make, db.execute("SELECT * FROM pages ORDER BY number")))

    def add(self, entry: Entry) -> None:
        with self._lock:
            if self._db is not None:
                self._added[entry.number] = entry

    def remove(self, number: int) -> None:
        with self._lock:
            if self._db is not None and self._added.pop(number, None) is None:
                self._removed.append(number)
                self._used.pop(number, None)

    def use(self, numbers: Iterable[int], tick: int) -> None:
        with self._lock:
            if self._db is not None:
                self._used.update(dict.fromkeys(numbers, tick))

    @property
    def late(self) -> bool:
        """Enough has changed for a flush."""
        return len(self._added) + len(self._removed) + len(self._used) >= FLUSH_ROWS

    def flush(self) -> None:
        """Write down what has changed."""
        with self._lock, self._trying() as db:
            if db is None:
                return
            db.execute("BEGIN")
            db.executemany("DELETE FROM pages WHERE number = ?", ((number,) for number in self._removed))
            db.executemany("INSERT OR REPLACE INTO pages VALUES (?, ?, ?, ?, ?, ?, ?)", self._added.values())
            used = ((tick, number) for number, tick in self._used.items())
            db.executemany("UPDATE pages SET used = ? WHERE number = ?", used)
            db.execute("COMMIT")
            self._added.clear()
            self._removed.clear()
            self._used.clear()

    def find(self, numbers: Sequence[int]) -> dict[int, Entry]:
        """Those of these that are written down, or waiting to be."""
        with self._lock:
            found = {number: self._added[number] for number in numbers if number in self._added}
            missing = [number for number in numbers if number not in found]
            with self._trying() as db:
                if db is not None and missing:
                    marks = ",".join("?" * len(missing))
                    for row in db.execute(f"SELECT * FROM pages WHERE number IN ({marks})", missing):
                        found[row[0]] = Entry._make(row)
        return found

    def clear(self) -> None:
        """Forget everything."""
        with self._lock, self._trying() as db:
            self._added.clear()
            self._removed.clear()
            self._used.clear()
            if db is not None:
                db.execute("DELETE FROM pages")

    def close(self) -> None:
        """Flush, and let go of the file. Harmless when repeated."""
        self.flush()
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None

    @contextlib.contextmanager
    def _trying(self) -> Iterator[sqlite3.Connection | None]:
        """The database, or None where there is none any more; an error in here is its end."""
        try:
            yield self._db
        except sqlite3.Error as exc:
            log.warning("%s failed (%s); the next start will read every page's header", self.path, exc)
            self._drop()

    def _drop(self) -> None:
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
            self._db = None
        self._added.clear()
        self._removed.clear()
        self._used.clear()
        for end in _SIDECARS:
            with contextlib.suppress(OSError):
                self.path.with_name(self.path.name + end).unlink()
