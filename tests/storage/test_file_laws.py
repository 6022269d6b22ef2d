"""Random programs on a file store, held against a flat model: a table of pages, each with when it was used last."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from shelf import (
    ENOSPC,
    PAGE,
    Crash,
    FailingDisk,
    bytes_of,
    file_store,
    files,
    fill,
    held,
    memory,
    never,
    pages_of,
    run,
    write,
)

from sglcache.core.effects import Run
from sglcache.core.key import ROOT, Namespace
from sglcache.storage.file import BLOCK_BYTES, FileStore

CAP = 10  # pages
SPACES = (ROOT, Namespace(None, None, "s"))


@st.composite
def prompts(draw: st.DrawFn) -> Run:
    """Two tokens make a tree that is met again and again."""
    pages = draw(st.lists(st.integers(0, 1), min_size=2, max_size=12))
    skip = draw(st.sampled_from([0, 0, 0, 1, 2])) if len(pages) > 2 else 0
    return run([token for page in pages for token in [page] * PAGE], draw(st.sampled_from(SPACES)), skip=skip)


class ClockedDisk(FailingDisk):
    """Files are as old as they are many: what a start without an index goes by is the same in each run of a program."""

    def __init__(self, before: Callable[[str, str], None], clock: Iterator[int]) -> None:
        super().__init__(before)
        self.clock = clock

    def rename(self, path: str, to: str) -> None:
        now = next(self.clock)
        os.utime(path, ns=(now, now))
        super().rename(path, to)


class Laws(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="sglcache-"))
        self.pages = memory()
        self.fail: str | None = None  # at which step of the next put, and with what
        self.error: BaseException = Crash()
        self.parents: dict[bytes, bytes | None] = {}  # of every page ever named
        self.used: dict[bytes, int] = {}  # of the pages that are held
        self.tick = 0
        self.bad: set[bytes] = set()
        self.clock = itertools.count(1)
        self.store = self.open()

    def open(self) -> FileStore:
        def before(step: str, path: str) -> None:
            if step == self.fail:
                self.fail = None
                raise self.error

        return file_store(
            self.path, self.pages, disk=ClockedDisk(before, self.clock), max_bytes=CAP * BLOCK_BYTES, low_water=7 / CAP
        )

    def children(self, digest: bytes) -> list[bytes]:
        return [page for page in self.used if self.parents[page] == digest]

    def effective(self, digest: bytes) -> int:
        return max([self.used[digest], *map(self.effective, self.children(digest))])

    @rule(it=prompts())
    def put(self, it: Run) -> None:
        self._put(it)

    def _put(self, it: Run) -> None:
        digests = pages_of(it)
        self.parents |= dict(zip(digests, [it.before, *digests], strict=False))
        there = [digest in self.used for digest in digests]
        done = self.store.put(it, write(self.pages, it), never)
        self.tick += 1
        count = done.mask.count(1)
        assert done.mask == b"\1" * count + bytes(len(digests) - count)
        if count < len(digests):
            orphan = it.before is not None and it.before not in self.used
            assert (done.reason == "orphan") == (orphan and count == 0) or done.reason in ("full", "failed")
        behind = {digest for digest, had in zip(digests, there, strict=True) if had}
        if done.reason != "orphan":
            self.used |= dict.fromkeys(behind, self.tick)
        # What it has written or passed hangs on the next page that it writes, and so can't go. What lies behind a hole
        # does not yet: it goes where nothing else is left, and is written again if the put comes so far.
        hole = there.index(False) if False in there else len(there)
        gone = self.removed_in_put(done.removed, [it.before, *digests[:count]], behind - set(digests[:hole]))
        assert done.new_pages == count - sum(there[:count]) + len(gone & set(digests[:count]))
        for digest in digests[:count]:
            self.used[digest] = self.tick

    def removed_in_put(self, removed: bytes, own: list[bytes | None], behind: set[bytes]) -> set[bytes]:
        """Those of its own that went."""
        gone = pages_of(Run(ROOT, None, removed, b""))
        event(f"evicted {min(len(gone), 1)}, {min(len(behind.intersection(gone)), 1)} of its own")
        assert set(gone).intersection(own) <= behind
        for digest in gone:
            assert not self.children(digest), "an eviction left a page without its parent"
            leaves = [page for page in self.used if (page not in own or page in behind) and not self.children(page)]
            assert self.used[digest] == min(self.used[page] for page in leaves)
            parent = self.parents[digest]
            if parent in self.used:
                self.used[parent] = max(self.used[parent], self.used[digest])
            del self.used[digest]
            self.bad.discard(digest)
        return behind.intersection(gone)

    @rule(it=prompts())
    def get(self, it: Run) -> None:
        self._get(it)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def get_a_tail(self, data: st.DataObject) -> None:
        """Of what is held, without its parents: which count as used all the same."""
        runs = [it for runs in self.store.listing() for it in runs]
        it = data.draw(st.sampled_from(runs))
        skip = data.draw(st.integers(0, len(pages_of(it)) - 1))
        before = pages_of(it)[skip - 1] if skip else it.before
        self._get(Run(it.namespace, before, it.digests[16 * skip :], it.tokens[4 * PAGE * skip :]))

    def _get(self, it: Run) -> None:
        digests = pages_of(it)
        for slot in range(len(digests)):
            fill(self.pages, slot, bytes(self.pages.payload_bytes))
        got = self.store.get(it, range(len(digests)), never)
        self.tick += 1
        want = next((n for n, page in enumerate(digests) if page not in self.used or page in self.bad), len(digests))
        assert got.num_pages == want
        for slot, digest in enumerate(digests[:want]):
            assert held(self.pages, slot) == bytes_of(digest, self.pages.payload_bytes)
            self.used[digest] = self.tick
        if want < len(digests):
            bad = digests[want] in self.bad
            assert (got.reason, got.bad) == (("corrupt", digests[want]) if bad else ("missing", b""))
            if bad:
                assert self.store.discard(got.bad) == got.bad
                self.gone_bad(got.bad)

    def gone_bad(self, digest: bytes) -> None:
        parent = self.parents[digest]
        if parent in self.used:
            self.used[parent] = max(self.used[parent], self.used[digest])
        del self.used[digest]
        self.bad.discard(digest)

    @rule(it=prompts())
    def exists(self, it: Run) -> None:
        digests = pages_of(it)
        want = next((n for n, page in enumerate(digests) if page not in self.used), len(digests))
        assert self.store.exists(it) == want

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from(sorted(self.used)))
        path = Path(self.store._file(digest))
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
        if digest in self.bad:
            self.bad.discard(digest)  # the same bit again
        else:
            self.bad.add(digest)

    @rule(it=prompts(), step=st.sampled_from(["write", "written half", "written", "rename"]))
    def put_and_fail(self, it: Run, step: str) -> None:
        self.fail, self.error = step, OSError(ENOSPC if step == "write" else 5, "no")
        self._put(it)
        self.fail = None

    @precondition(lambda self: self.used)
    @rule(data=st.data(), full=st.booleans())
    def mend(self, data: st.DataObject, full: bool) -> None:
        """A page in the midst of others is lost, and put again with them, on a disk that may be full."""
        it = data.draw(st.sampled_from([it for runs in self.store.listing() for it in runs]))
        lost = data.draw(st.sampled_from(pages_of(it)))
        assert self.store.discard(lost) == lost
        self.gone_bad(lost)
        if full:
            self.put_and_fail(it, "write")
        else:
            self._put(it)

    @rule(it=prompts(), step=st.sampled_from(["write", "written half", "written", "rename", "renamed", "unlink"]))
    def put_and_crash(self, it: Run, step: str) -> None:
        """What a page that was on its way came to is for the disk to say; all others are as they were."""
        digests = pages_of(it)
        self.parents |= dict(zip(digests, [it.before, *digests], strict=False))
        self.fail, self.error = step, Crash()
        with contextlib.suppress(Crash):
            self.store.put(it, write(self.pages, it), never)
        self.fail = None
        self.reopen(crashed=True)

    @rule(index=st.sampled_from(["kept", "lost", "damaged"]))
    def restart(self, index: str) -> None:
        self.store.close()
        (path,) = self.path.glob("*/index.db")
        if index == "lost":
            path.unlink()
        elif index == "damaged":
            data = bytearray(path.read_bytes())
            for at in range(100, len(data), 997):
                data[at] ^= 0x55
            path.write_bytes(data)
        self.reopen(crashed=index != "kept")

    def reopen(self, *, crashed: bool) -> None:
        """After a close all is as it was, but for what had no parent; after a crash it is what the disk has."""
        if crashed and self.store._lock_fd >= 0:
            os.close(self.store._lock_fd)
            if self.store._catalog._db is not None:
                self.store._catalog._db.close()
        there = {bytes.fromhex(path.name) for path in files(self.path) if not path.suffix}
        if not crashed:
            assert there == set(self.used)
        reachable = {page for page in there if self.reaches(page, there)}
        self.store = self.open()
        told = {page for runs in self.store.listing() for it in runs for page in pages_of(it)}
        if len(reachable) <= CAP:
            assert told == reachable
        else:
            assert told <= reachable
        if crashed:  # what was used when may be a little old, or the time of writing
            order = self.store._order
            self.used = {page: order.used(order.row(page)) for page in told}
            self.tick = order.tick
        else:
            self.used = {page: tick for page, tick in self.used.items() if page in told}
        self.bad &= told

    def reaches(self, digest: bytes, there: set[bytes]) -> bool:
        parent = self.parents[digest]
        return digest in there and (parent is None or self.reaches(parent, there))

    @rule()
    def clear(self) -> None:
        removed = pages_of(Run(ROOT, None, self.store.clear().removed, b""))
        assert sorted(removed) == sorted(self.used)
        self.used.clear()
        self.bad.clear()

    @invariant()
    def the_books_are_right(self) -> None:
        there = sorted(path.name for path in files(self.path))
        assert there == sorted(page.hex() for page in self.used)
        stats = self.store.stats()
        assert stats.num_pages == len(self.used) <= CAP
        assert stats.num_bytes == len(self.used) * BLOCK_BYTES
        assert sorted(page for runs in self.store.listing() for it in runs for page in pages_of(it)) == sorted(
            self.used
        )

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.path)


Laws.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestLaws = Laws.TestCase
