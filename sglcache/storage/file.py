"""The embedded third tier: a file a page, in a folder that this store alone has.

    PATH/lock                      held while the store is open: a second one on the folder is refused
    PATH/IDENTITY/index.db         the catalog, which may be lost (catalog.py)
    PATH/IDENTITY/ab/abcdef...     a page by its digest, in one of 256 folders; `.tmp` behind it while it is written

**What it holds is what its files are.** A page is written beside its place and renamed into it, so a file that has its
name is whole unless the machine lost power, and then its hashes say so. At open the names on the disk are held against
the catalog: what it lacks is read from the file's header, what has no file is forgotten, and what was half written, is
damaged, or hangs on a page that is not there, is swept. Then the store is closed under the page before: parents are
there, and remain so but for a page whose file went bad. A bad file costs its one page.

**Exact.** It knows its pages in memory, and `removed` tells of each that goes, whichever way.

**The cap** is of all files below PATH. At the cap a batch goes, down to the low-water mark: first what is of other
identities, which can't hit now (a model that is served no more), then the least recently used of its own (order.py). A
disk that is full before the cap is reached is a smaller cap.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from sglcache.core.effects import Run
from sglcache.errors import BadRequest, ConfigError, StorageError
from sglcache.storage.catalog import Catalog, Entry
from sglcache.storage.disk import Buffer, Disk
from sglcache.storage.host import HostPages
from sglcache.storage.order import NONE, Order
from sglcache.storage.page import MAX_HEADER_BYTES, Form, Found, Identity, Reason, packed, unpacked
from sglcache.storage.store import Cleared, Got, Put, Stats, Stop

log = logging.getLogger(__name__)

BLOCK_BYTES = 4096  # a file takes whole ones
LOW_WATER = 0.95  # of the cap
SLICE = 256  # pages of a listing at a time
HEAD_BYTES = 4096  # of a file, at first, for its header
TEMPORARY = ".tmp"
QUIET_S = 10.0  # between warnings
MAX_TICK = 1 << 62  # of a use, or a page's number: what is above was never counted

_ABOUT = {
    "identity.json",
    "identity.json.tmp",
    "index.db",
    "index.db-journal",
    "index.db-wal",
    "index.db-shm",
}  # no pages
_FOLDER = re.compile(r"[0-9a-f]{32}")
# The page is as good as it was: it is the process that can't read it now.
_PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN, errno.ENOBUFS}
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NOT_ITS_KIND = {errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENXIO}


class FileStore:
    """A `Store` in a folder. `max_bytes` is the cap on all files in it."""

    name = "file"
    exact = True

    def __init__(
        self,
        path: Path,
        identity: Identity,
        pages: HostPages,
        *,
        max_bytes: int,
        low_water: float = LOW_WATER,
        disk: Disk | None = None,
    ) -> None:
        if pages.payload_bytes != identity.payload_bytes:
            raise BadRequest(f"pages of {pages.payload_bytes} bytes, and an identity of {identity.payload_bytes}")
        self.path = path
        self.form = Form(identity)
        self.max_bytes = max_bytes
        self.low_bytes = int(max_bytes * low_water)
        self._pages = pages
        self._disk = disk or Disk()
        self._own = path / self.form.fingerprint.hex()
        self._order = Order(self.form.digest_bytes)
        self._catalog = Catalog(self._own / "index.db")
        # Around the order: calls of no more than some hundred rows, and never a file.
        self._mutex = threading.Lock()
        self._next = 1  # number of a page in the catalog
        self._others: list[tuple[str, int]] = []  # files of other identities and their bytes; the oldest is last
        self._others_bytes = 0
        self._evicted = self._discarded = 0
        self._lock_fd = -1
        self._left: dict[str, None] = {}  # files that a clear could not remove
        self._unwritable: tuple[float, str] | None = None  # since when, and why
        self._lost = False  # another daemon has the folder
        self._quiet_until, self._untold = 0.0, 0  # of warnings

    # -- opening and closing ----------------------------------------------------------------------------

    def open(self) -> None:
        """Take the folder and find again what is in it. ConfigError: another has it, or it can't be written."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._take()
            self._own.mkdir(mode=0o700, exist_ok=True)
            self._own.chmod(0o700)
            self._describe()
            self._find()
            self._find_others()
        except OSError as exc:
            self.close()
            culprit = exc.filename or self.path
            raise ConfigError(
                f"storage.path: {culprit} can't be used ({exc.strerror or exc}); {_remedy(exc)}",
                path="storage.path",
                file=str(culprit),
            ) from exc
        except BaseException:
            self.close()
            raise
        self._make_room(0, [])
        self._catalog.flush()

    def _describe(self) -> None:
        """Say whose pages these are, for people: it is never read."""
        path = self._own / "identity.json"
        try:
            disk = Disk()
            disk.write(f"{path}{TEMPORARY}", [msgspec.json.format(msgspec.json.encode(self.form.identity)) + b"\n"])
            disk.rename(f"{path}{TEMPORARY}", os.fspath(path))
        except OSError as exc:
            log.warning("%s can't be written (%s); nothing needs it", path, exc.strerror or exc)

    def _take(self) -> None:
        """Have the lock, of this name and not of a file that had it. ConfigError: another has it."""
        self._try_lock()
        while not self._has_lock():
            self._try_lock()

    def _has_lock(self) -> bool:
        try:
            there, ours = os.stat(self.path / "lock", follow_symlinks=False), os.fstat(self._lock_fd)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, ours)

    def _try_lock(self) -> None:
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise ConfigError(
                f"storage.path: {self.path} is in use (process {holder}); give each daemon a storage.path of its own",
                path="storage.path",
                file=str(self.path / "lock"),
            ) from None
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
        self._lock_fd = fd
        with contextlib.suppress(OSError):  # it is for people; a disk that is full has no room for it
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)

    def _keep(self) -> bytes:
        """See to it that the folder is there, and ours; digests of what went with one that is not there any more.

        Somebody may have moved or removed it, or its lock alone. ConfigError, OSError: it can't be had; once another
        has it, never again in this life, for what is in it then is not known.
        """
        if self._has_lock() and self._own.is_dir():
            return b""
        if self._lost:
            raise ConfigError(f"{self.path} is another daemon's now; start this rank again", path="storage.path")
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._take()
        except ConfigError:
            self._lost = True
            raise
        if self._own.is_dir():
            log.warning("%s was removed or replaced; it is held again", self.path / "lock")
            return b""
        log.warning("%s is not there any more, and is made again; what was in it is lost", self._own)
        with self._mutex:
            rows = self._order.by_number()
        removed = []
        for row in reversed(rows):
            with self._mutex:
                removed.append(self._order.remove(row))
        self._left.clear()
        self._catalog.close()
        self._own.mkdir(mode=0o700)
        self._describe()
        self._catalog = Catalog(self._own / "index.db")
        self._catalog.open()
        self._find_others()
        return b"".join(removed)

    def _find(self) -> None:
        """Bring catalog and files together."""
        there: dict[bytes, None] = {}
        name = re.compile(f"[0-9a-f]{{{2 * self.form.digest_bytes}}}")
        with os.scandir(self._own) as folders:
            names = sorted(folder.name for folder in folders if len(folder.name) == 2 and folder.is_dir())
        for folder in names:
            with os.scandir(self._own / folder) as files:
                for file in files:
                    stem = file.name.removesuffix(TEMPORARY)
                    if name.fullmatch(stem) is None or stem[:2] != folder or not file.is_file(follow_symlinks=False):
                        continue
                    if stem != file.name:
                        self._sweep(file.path)
                    else:
                        there[bytes.fromhex(stem)] = None
        entries = self._catalog.open()
        known: list[Entry] = []
        gone: list[int] = []
        for entry in entries:
            if entry.digest in there and self._proven(entry):
                del there[entry.digest]
                known.append(entry)
            else:
                gone.append(entry.number)
        for number in gone:
            self._catalog.remove(number)
        self._next = max((entry.number for entry in known), default=0) + 1
        used = max((entry.used for entry in known), default=0)
        if there:
            log.info("%s: reading the headers of %d pages that its index does not have", self.path, len(there))
        known += self._read_headers(list(there), used)
        self._build(known)

    def _proven(self, entry: Entry) -> bool:
        try:
            # A digest is of 128 bits or more; a type that is not bytes, or a number that is none, is damage as well.
            namespace = unpacked(entry.namespace)
            if not all(type(each) is int and 0 <= each <= MAX_TICK for each in (entry.number, entry.used)):
                return False
            num_bytes = _blocks(self.form.header_bytes(namespace) + self.form.payload_bytes)
            return entry.num_bytes == num_bytes and self.form.holds(namespace, entry.digest, entry.before, entry.tokens)
        except (StorageError, TypeError, ValueError):
            return False

    def _read_headers(self, digests: list[bytes], used: int) -> list[Entry]:
        """The pages of these files, the oldest first; what is none is swept."""
        found: list[tuple[int, bytes, Found, int]] = []
        for digest in digests:
            path = self._file(digest)
            try:
                header, num_bytes = self._header(path)
                if header.digest != digest or num_bytes != header.header_bytes + self.form.payload_bytes:
                    raise StorageError("the file is not what its name and header say", reason="corrupt")
                found.append((os.stat(path).st_mtime_ns, digest, header, num_bytes))
            except (StorageError, OSError) as exc:
                self._warn("%s is no page (%s); it is removed", path, exc)
                self._sweep(path)
                self._discarded += 1
        found.sort(key=lambda each: each[0])
        entries = []
        for _, digest, header, num_bytes in found:
            used += 1
            entry = Entry(
                self._next, digest, header.before, packed(header.namespace), header.tokens, _blocks(num_bytes), used
            )
            self._next += 1
            self._catalog.add(entry)
            if self._catalog.late:
                self._catalog.flush()
            entries.append(entry)
        return entries

    def _header(self, path: str) -> tuple[Found, int]:
        """A file's header, and the file's size."""
        want = HEAD_BYTES
        while True:
            start, num_bytes = self._disk.head(path, want)
            try:
                return self.form.read(start), num_bytes
            except StorageError as exc:
                longer = exc.facts.get("want", 0)
                if longer <= want:
                    raise
                want = longer

    def _build(self, entries: list[Entry]) -> None:
        """Put the pages in order, parents first. What has no parent is swept: nobody can come to it."""
        waiting: dict[bytes, list[Entry]] = {}
        order = self._order
        spaces: dict[bytes, bytes] = {}  # a digest proves the namespace of a first page alone; the others have its own
        for entry in entries:
            ready = [entry]
            while ready:
                each = ready.pop()
                parent = NONE if each.before is None else order.row(each.before)
                if each.before is not None and parent == NONE:
                    waiting.setdefault(each.before, []).append(each)
                elif each.digest not in order:
                    space = each.namespace if each.before is None else spaces[each.before]
                    if space != each.namespace:
                        self._catalog.add(each._replace(namespace=space))
                    spaces[each.digest] = space
                    order.add(each.digest, parent, each.num_bytes, each.number, each.used)
                    ready += waiting.pop(each.digest, ())
        for orphans in waiting.values():
            for entry in orphans:
                self._sweep(self._file(entry.digest))
                self._catalog.remove(entry.number)
                self._discarded += 1

    def _find_others(self) -> None:
        """The files of other identities, which count, and go first."""
        found: list[tuple[int, str, int]] = []
        with os.scandir(self.path) as folders:
            others = [f.path for f in folders if _FOLDER.fullmatch(f.name) and f.is_dir(follow_symlinks=False)]
        for folder in others:
            if folder == str(self._own):
                continue
            _remove_empty(folder)
            for place, _, names in os.walk(folder):
                for name in names:
                    path = os.path.join(place, name)
                    try:
                        status = os.lstat(path)
                    except OSError:
                        continue
                    found.append((status.st_mtime_ns, path, _blocks(status.st_size)))
        found.sort(reverse=True)
        self._others = [(path, num_bytes) for _, path, num_bytes in found]
        self._others_bytes = sum(num_bytes for _, num_bytes in self._others)

    def interrupt(self) -> None:
        """There is no way to hurry a disk."""

    def close(self) -> None:
        """Write the catalog down and let go of the folder. Harmless when repeated."""
        self._catalog.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    # -- the work ---------------------------------------------------------------------------------------

    def exists(self, run: Run) -> int:
        """How many leading pages it has. From memory."""
        order, form = self._order, self.form
        with self._mutex:
            num_pages = form.num_pages(run)
            for page in range(num_pages):
                if form.digest(run, page) not in order:
                    return page
        return num_pages

    def put(self, run: Run, slots: Sequence[int], stop: Stop) -> Put:
        """Store these pages, up to the first that fails; what is there is not written again.

        Room is made of others' pages, and where there are none left, of its own behind a hole, which are written anew.
        """
        form, name = self.form, packed(run.namespace)
        mask = bytearray(form.num_pages(run))
        removed: list[bytes] = []
        rows = array("q")
        new = 0
        reason: Reason | None = None
        try:
            removed.append(self._keep())
        except (ConfigError, OSError) as exc:
            self._cannot_write(exc, self.path)
            return Put(bytes(mask), 0, reason="failed")
        with self._mutex:
            tick = self._order.tick = self._order.tick + 1
            row = NONE if run.before is None else self._order.row(run.before)
        for page in range(len(mask)):
            digest, parent = form.digest(run, page), row
            row = self._order.row(digest)
            if row == NONE:
                if stop():
                    reason = "cancelled"
                elif parent == NONE and form.before(run, page) is not None:
                    reason = "orphan"
                else:
                    if not new:  # what lies behind the hole is used with this, too: what makes room is others'
                        behind = (self._order.row(form.digest(run, each)) for each in range(page + 1, len(mask)))
                        self._use(array("q", (each for each in behind if each != NONE)), tick)
                    reason = self._write(run, page, name, self._pages.views(slots[page]), parent, tick, removed)
                if reason is not None:
                    break
                row = self._order.row(digest)
                new += 1
            else:
                rows.append(row)
            mask[page] = 1
        self._use(rows, tick)
        if self._catalog.late:
            self._catalog.flush()
        return Put(bytes(mask), new, b"".join(removed), reason)

    def _write(
        self, run: Run, page: int, name: bytes, payload: list[memoryview], parent: int, tick: int, removed: list[bytes]
    ) -> Reason | None:
        """Make the file of one page that is not there. Why not; None: it is there, and known."""
        form = self.form
        digest, before = form.digest(run, page), form.before(run, page)
        header = form.seal(form.prefix(run, page, name), payload)
        num_bytes = _blocks(len(header) + form.payload_bytes)
        if len(header) > MAX_HEADER_BYTES or not self._make_room(num_bytes, removed, parent):
            return "full"
        path = self._file(digest)
        parts: list[Buffer] = [header, *payload]
        try:
            try:
                self._place(path, parts)
            except OSError as exc:
                if exc.errno not in _NO_ROOM or not self._give_way(num_bytes, removed, parent):
                    raise
                self._place(path, parts)
        except OSError as exc:
            self._cannot_write(exc, path)
            self._sweep(path + TEMPORARY)
            return "full" if exc.errno in _NO_ROOM else "failed"
        self._unwritable = None
        if self._left:
            self._left.pop(path, None)
            self._remove_left()
        entry = Entry(self._next, digest, before, name, form.tokens(run, page), num_bytes, tick)
        self._next += 1
        with self._mutex:
            self._order.add(digest, parent, num_bytes, entry.number, tick)
        self._catalog.add(entry)
        return None

    def _cannot_write(self, exc: ConfigError | OSError, path: str | Path) -> None:
        why = exc.message if isinstance(exc, ConfigError) else f"{exc.filename or path}: {exc.strerror or exc}"
        self._unwritable = (self._unwritable or (time.time(), ""))[0], why
        self._warn("nothing can be stored: %s", why)

    def _place(self, path: str, parts: Sequence[Buffer]) -> None:
        temporary = path + TEMPORARY
        try:
            self._disk.write(temporary, parts)
        except FileNotFoundError:  # the first page of its folder
            self._disk.mkdir(os.path.dirname(path))
            self._disk.write(temporary, parts)
        try:
            self._disk.rename(temporary, path)
        except IsADirectoryError:
            self._disk.unlink(path)
            self._disk.rename(temporary, path)

    def get(self, run: Run, slots: Sequence[int], stop: Stop) -> Got:
        """Read pages into their slots, up to the first that is not right."""
        form, name = self.form, packed(run.namespace)
        num_pages = form.num_pages(run)
        header = bytearray(form.header_bytes(run.namespace))
        more = bytearray(1)  # a file that is longer than its page is none
        rows = array("q")
        got = Got(num_pages)
        for page in range(num_pages):
            digest = form.digest(run, page)
            row = self._order.row(digest)
            if row == NONE or stop():
                got = Got(page, "missing" if row == NONE else "cancelled")
                break
            payload = self._pages.views(slots[page])
            try:
                num_bytes = self._disk.read(self._file(digest), [header, *payload, more])
            except OSError as exc:
                got = Got(page, *self._unreadable(digest, exc))
                break
            reason: Reason | None = "short"
            if num_bytes >= len(header) + form.payload_bytes:
                reason = form.check(form.prefix(run, page, name), bytes(header), payload)
                if reason is None and num_bytes > len(header) + form.payload_bytes:
                    reason = "corrupt"
            if reason is not None:
                got = Got(page, "foreign") if self._collides(run, page) else Got(page, reason, digest)
                self._warn("page %s is not what it should be: %s", digest.hex(), got.reason)
                break
            rows.append(row)
        with self._mutex:
            tick = self._order.tick = self._order.tick + 1
        self._use(rows, tick)
        return got

    def _unreadable(self, digest: bytes, exc: OSError) -> tuple[Reason, bytes]:
        self._warn("page %s can't be read (%s)", digest.hex(), exc.strerror or exc)
        if exc.errno in _PASSING:
            return "failed", b""
        return "missing" if exc.errno == errno.ENOENT else "failed", digest

    def _collides(self, run: Run, page: int) -> bool:
        """Whether the file is a page of this digest, and not a bad one, but of other tokens or another namespace."""
        digest = self.form.digest(run, page)
        try:
            found = self._header(self._file(digest))[0]
        except (StorageError, OSError):
            return False
        asked = (run.namespace, self.form.before(run, page), self.form.tokens(run, page))
        return found.digest == digest and (found.namespace, found.before, found.tokens) != asked

    def discard(self, digest: bytes) -> bytes:
        """Throw a bad page away. Its file may be there still, if the disk does not let go of it."""
        with self._mutex:
            row = self._order.row(digest)
            if row == NONE:
                return b""
            self._catalog.remove(self._order.number(row))
            self._order.remove(row)
        self._sweep(self._file(digest))
        self._discarded += 1
        return digest

    def listing(self) -> Iterator[list[Run]]:
        """All pages, parents first, in runs as long as they come. From any thread, at any time."""
        with self._mutex:
            rows = self._order.by_number()
            numbers = [self._order.number(row) for row in rows]
        told: set[int] = set()  # numbers
        for first in range(0, len(rows), SLICE):
            here: list[tuple[int, int]] = []  # row, number
            with self._mutex:
                for row, number in zip(rows[first : first + SLICE], numbers[first : first + SLICE], strict=True):
                    chain: list[tuple[int, int]] = []
                    while row >= 0 and number and self._order.number(row) == number and number not in told:
                        chain.append((row, number))
                        told.add(number)
                        row = self._order.parent(row)  # it came later, where it was lost and put again
                        number = self._order.number(row) if row >= 0 else 0
                    here += reversed(chain)
                digests = {number: self._order.digest(row) for row, number in here}
            if here and (runs := self._runs([number for _, number in here], digests)):
                yield runs

    def _runs(self, numbers: list[int], digests: dict[int, bytes]) -> list[Run]:
        """These pages as runs. One that has gone meanwhile, or whose file says nothing any more, is left out."""
        found: dict[int, Entry] = {}
        for start in range(0, len(numbers), SLICE):
            found |= self._catalog.find(numbers[start : start + SLICE])
        runs: list[Run] = []
        parts: list[Entry] = []

        def finish() -> None:
            if parts:
                keys = self.form.keys
                tokens = b"".join(
                    [*(part.tokens[: keys.page_bytes] for part in parts), parts[-1].tokens[keys.page_bytes :]]
                )
                joined = b"".join(part.digest for part in parts)
                runs.append(Run(unpacked(parts[0].namespace), parts[0].before, joined, tokens))
                parts.clear()

        for number in numbers:
            entry = found.get(number)
            if entry is None or entry.digest != digests[number]:
                entry = self._entry(number, digests[number])
            if entry is None:
                continue
            if parts and entry.before != parts[-1].digest:
                finish()
            parts.append(entry)
        finish()
        return runs

    def _entry(self, number: int, digest: bytes) -> Entry | None:
        """As the file's header has it: the catalog is lost."""
        try:
            header, num_bytes = self._header(self._file(digest))
        except (StorageError, OSError):
            return None
        return Entry(number, digest, header.before, packed(header.namespace), header.tokens, num_bytes, 0)

    def clear(self) -> Cleared:
        """Remove every page of this identity, children first.

        A file that can't be removed is tried again at the next clear, and when one can be written.
        """
        try:
            removed = [self._keep()]
        except (ConfigError, OSError) as exc:
            self._cannot_write(exc, self.path)
            return Cleared(left=None, why=self.stats().unwritable_why or "")
        with self._mutex:
            rows = self._order.by_number()
        for row in reversed(rows):
            with self._mutex:
                digest = self._order.remove(row)
            self._left.setdefault(self._file(digest))
            removed.append(digest)
        self._catalog.clear()
        num_pages, why = len(self._left), ""
        for path in list(self._left):
            try:
                self._disk.unlink(path)
            except OSError as exc:
                why = f"{path}: {exc.strerror or exc}"
                self._warn("%s can't be removed (%s)", path, exc.strerror or exc)
            else:
                del self._left[path]
        return Cleared(num_pages - len(self._left), b"".join(removed), len(self._left), why)

    def _remove_left(self) -> None:
        """What a clear has left, now that the folder can be written; up to the first that can't go."""
        with contextlib.suppress(OSError):
            while self._left:
                path = next(iter(self._left))
                self._disk.unlink(path)
                del self._left[path]

    def __contains__(self, digest: bytes) -> bool:
        """Whether it has this page. From any thread."""
        with self._mutex:
            return digest in self._order

    def stats(self) -> Stats:
        with self._mutex:
            order = self._order
            since, why = self._unwritable or (None, None)
            return Stats(
                len(order),
                self._total,
                self.max_bytes,
                self._evicted,
                self._discarded,
                others_bytes=self._others_bytes,
                unwritable_since=since,
                unwritable_why=why,
            )

    # -- room -------------------------------------------------------------------------------------------

    def _make_room(self, num_bytes: int, removed: list[bytes], keep: int = NONE) -> bool:
        """See to it that so many bytes more are within the cap; `removed` gets what went. Whether they are.

        `keep` is the page that something is about to hang on.
        """
        if self._total <= self.max_bytes - num_bytes:
            return True
        if num_bytes > self.max_bytes:
            return False
        self._evict(self.low_bytes - num_bytes, removed, keep)
        return self._total <= self.max_bytes - num_bytes

    def _give_way(self, num_bytes: int, removed: list[bytes], keep: int) -> bool:
        """The disk is full before the cap is reached: a batch goes, of what there is. Whether any went."""
        total = self._total
        self._evict(total - max(num_bytes, total - total * self.low_bytes // self.max_bytes), removed, keep)
        return self._total < total

    @property
    def _total(self) -> int:
        return self._order.num_bytes + self._others_bytes

    def _evict(self, low: int, removed: list[bytes], keep: int) -> None:
        """Down to so many bytes, or to what can't go."""
        while self._total > low:
            if self._others:
                path, num_bytes = self._others.pop()
                self._others_bytes -= num_bytes
                self._sweep(path)
                _rmdirs(path, self.path)
                continue
            with self._mutex:
                row = self._order.victim(keep)
                if row == NONE:
                    return
                self._catalog.remove(self._order.number(row))
                digest = self._order.remove(row)
            self._sweep(self._file(digest))
            removed.append(digest)
            self._evicted += 1

    def _use(self, rows: array[int], tick: int) -> None:
        if rows:
            with self._mutex:
                self._order.use(rows, tick)
                numbers = [self._order.number(row) for row in rows]
            self._catalog.use(numbers, tick)

    def _warn(self, text: str, *facts: object) -> None:
        """A disk that fails does so at every page: it is told of now and then."""
        now = time.monotonic()
        if now < self._quiet_until:
            self._untold += 1
            return
        self._quiet_until, untold, self._untold = now + QUIET_S, self._untold, 0
        log.warning(text + (f"; and {untold} more such" if untold else ""), *facts)

    def _sweep(self, path: str) -> None:
        try:
            self._disk.unlink(path)
        except OSError as exc:
            self._warn("%s can't be removed (%s)", path, exc.strerror or exc)

    def _file(self, digest: bytes) -> str:
        name = digest.hex()
        return f"{self._own}/{name[:2]}/{name}"


def _remedy(exc: OSError) -> str:
    """What the operator does about it."""
    if exc.errno in _NO_ROOM:
        return "make room on its disk, or give storage.path a folder on another"
    if exc.errno in _NOT_ITS_KIND:
        return "something else has its place: move that away"
    return "give storage.path a folder that this user may write"


def _blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _remove_empty(folder: str) -> None:
    """Of an identity's folder what holds nothing; and all of it, once it holds no page."""
    for place, _, names in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            if place == folder and set(os.listdir(place)) <= _ABOUT:
                for name in names:
                    os.unlink(os.path.join(place, name))
            if place == folder or not names:
                os.rmdir(place)


def _rmdirs(path: str, root: Path) -> None:
    """Remove the folders that a file has left empty, up to the root."""
    folder = Path(path).parent
    while folder != root and root in folder.parents:
        try:
            folder.rmdir()
        except OSError:
            return
        folder = folder.parent
