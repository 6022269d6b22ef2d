"""The embedded store: what was put comes back, what is wrong is one page's miss, and the folder is the truth."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from shelf import (
    EACCES,
    EIO,
    EMFILE,
    ENOSPC,
    EROFS,
    PAGE,
    Crash,
    FailingDisk,
    bytes_of,
    failing,
    file_store,
    files,
    fill,
    held,
    identity,
    memory,
    never,
    pages_of,
    run,
    write,
)

from sglcache.core.effects import Run
from sglcache.core.key import ROOT, Namespace
from sglcache.errors import BadRequest, ConfigError
from sglcache.storage.file import BLOCK_BYTES, FileStore
from sglcache.storage.host import HostPages, Piece

LONG = range(100, 100 + 8 * PAGE)  # eight pages


def put(store: FileStore, it: Run) -> bytes:
    return store.put(it, write(store._pages, it, store.form.digest_bytes), never).mask


def right(store: FileStore, it: Run) -> int:
    """Leading pages that come back with their bytes."""
    pages = store._pages
    for slot in range(pages.num_pages):
        fill(pages, slot, bytes(pages.payload_bytes))
    got = store.get(it, range(pages.num_pages), never)
    for slot, digest in enumerate(pages_of(it, store.form.digest_bytes)[: got.num_pages]):
        assert held(pages, slot) == bytes_of(digest, pages.payload_bytes)
    return got.num_pages


def listed(store: FileStore) -> list[bytes]:
    """Digests as the listing tells them, parents first; each run is held against its tokens."""
    size, keys, told = store.form.digest_bytes, store.form.keys, []
    for runs in store.listing():
        for it in runs:
            before = it.before
            for page, digest in enumerate(pages_of(it, size)):
                assert before is None or before in told, "a page was told of before its parent"
                tokens = it.tokens[page * keys.page_bytes :][: keys.span]
                assert store.form.holds(it.namespace, digest, before, tokens)
                told.append(digest)
                before = digest
    assert len(set(told)) == len(told)
    return told


# -- what is put comes back ---------------------------------------------------------------------------


@pytest.mark.parametrize("hash_name", ["xxh3_128", "sha256"])
@pytest.mark.parametrize("bigram", [False, True])
@pytest.mark.parametrize("space", [ROOT, Namespace("l", "", "s"), Namespace(None, "x" * 9000, None)])
def test_what_is_put_comes_back_also_after_a_restart(
    tmp_path: Path, hash_name: str, bigram: bool, space: Namespace
) -> None:
    who = identity(hash_name=hash_name, bigram=bigram)
    it = run(LONG, space, hash_name=hash_name, bigram=bigram)
    num_pages = 7 if bigram else 8
    for lost in (False, True):
        store = file_store(tmp_path, memory(), identity=who)
        assert put(store, it) == b"\1" * num_pages
        assert store.exists(it) == right(store, it) == num_pages
        store.close()
        if lost:
            (index,) = tmp_path.glob("*/index.db")
            index.unlink()
        store = file_store(tmp_path, memory(), identity=who)
        assert store.exists(it) == right(store, it) == num_pages
        assert listed(store) == pages_of(it, store.form.digest_bytes)
        assert b"".join(part.tokens for runs in store.listing() for part in runs) == it.tokens
        store.close()


def test_a_page_of_many_pieces_is_stored_in_their_order(tmp_path: Path) -> None:
    """layer_first: two regions (shards), in each two layers, each with all its pages."""
    regions = [bytearray(os.urandom(8 * 2 * 10)) for _ in range(2)]
    pieces = [Piece(shard, layer * 80, 10, 10) for shard in range(2) for layer in range(2)]
    pages = HostPages(8, [memoryview(region) for region in regions], pieces)
    store = file_store(tmp_path, pages, identity=identity(payload_bytes=40))
    it, before = run(range(PAGE)), held(pages, 3)
    assert before == b"".join(bytes(region[at : at + 10]) for region in regions for at in (30, 110))
    assert store.put(it, [3], never).mask == b"\1"
    assert store.get(it, [5], never).num_pages == 1
    assert held(pages, 5) == before
    store.close()


def test_a_part_of_a_prompt_is_put_and_found_behind_its_parent(tmp_path: Path) -> None:
    store = file_store(tmp_path, memory())
    assert put(store, run(LONG[: 3 * PAGE])) == b"\1\1\1"
    rest = run(LONG, skip=3)
    assert put(store, rest) == b"\1" * 5
    assert (store.exists(rest), right(store, rest), right(store, run(LONG))) == (5, 5, 8)
    assert listed(store) == pages_of(run(LONG))
    store.close()


def test_a_page_without_the_one_before_it_is_not_stored(tmp_path: Path) -> None:
    store = file_store(tmp_path, memory())
    it = run(LONG, skip=2)
    done = store.put(it, write(store._pages, it), never)
    assert (done.mask, done.reason, store.stats().num_pages) == (bytes(6), "orphan", 0)
    store.close()


def test_what_is_there_is_not_written_again(tmp_path: Path) -> None:
    store = file_store(tmp_path, memory())
    put(store, run(LONG))
    before = {path: path.stat().st_mtime_ns for path in files(tmp_path)}
    longer = run(range(100, 100 + 9 * PAGE))
    done = store.put(longer, write(store._pages, longer), never)
    assert (done.mask, done.new_pages, done.removed) == (b"\1" * 9, 1, b"")
    assert {path: path.stat().st_mtime_ns for path in files(tmp_path) if path in before} == before
    store.close()


def test_namespaces_share_nothing(tmp_path: Path) -> None:
    spaces = [ROOT, Namespace("a"), Namespace(None, "a"), Namespace(None, None, "a"), Namespace(None, "")]
    store = file_store(tmp_path, memory())
    for number, space in enumerate(spaces):
        assert store.exists(run(LONG, space)) == 0
        put(store, run(LONG, space))
        assert store.stats().num_pages == 8 * (number + 1)
    store.close()


def test_a_call_that_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    store = file_store(tmp_path, memory())
    it = run(LONG)
    for wrong in (it._replace(digests=it.digests[:-1]), it._replace(tokens=it.tokens[4:]), it._replace(before=b"x")):
        for call in (lambda wrong=wrong: store.exists(wrong), lambda wrong=wrong: store.get(wrong, range(8), never)):
            with pytest.raises(BadRequest):
                call()
    with pytest.raises(BadRequest, match="slot 64"):
        store.put(it, [64] * 8, never)
    with pytest.raises(BadRequest):
        FileStore(tmp_path, identity(payload_bytes=1), memory(), max_bytes=1)
    store.close()


def test_put_and_get_stop_where_they_are_told_to(tmp_path: Path) -> None:
    store = file_store(tmp_path, memory())
    it = run(LONG)
    asked = iter([False, False, False, True])
    done = store.put(it, write(store._pages, it), lambda: next(asked))
    assert (done.mask, done.reason, store.exists(it)) == (b"\1\1\1" + bytes(5), "cancelled", 3)
    put(store, it)
    asked = iter([False, False, True])
    assert store.get(it, range(8), lambda: next(asked)) == (2, "cancelled", b"")
    store.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "other"},
        {"revision": "2"},
        {"dtype": "bfloat16"},
        {"layout": "layer_first"},
        {"num_layers": 3},
        {"first_layer": 2},
        {"num_shards": 4},
        {"shards": (2, 4)},
        {"geometry": {"heads": 2}},
    ],
    ids=str,
)
def test_another_identity_never_hits(tmp_path: Path, changes: dict[str, object]) -> None:
    store = file_store(tmp_path, memory())
    put(store, run(LONG))
    store.close()
    other = file_store(tmp_path, memory(), identity=identity(**changes))
    assert (other.exists(run(LONG)), right(other, run(LONG)), listed(other)) == (0, 0, [])
    # And where its files are taken for ours, their headers say whose they are.
    for path in list(files(store._own)):
        target = other._own / path.relative_to(store._own)
        target.parent.mkdir(exist_ok=True)
        shutil.copy(path, target)
    other.close()
    other = file_store(tmp_path, memory(), identity=identity(**changes))
    assert (other.exists(run(LONG)), listed(other), other.stats().discarded_pages) == (0, [], 8)
    other.close()


def test_the_folder_is_its_owners_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        store = file_store(tmp_path / "new", memory())
        put(store, run(LONG))
    finally:
        os.umask(old)
    for place, folders, _ in os.walk(tmp_path / "new"):
        for name in folders:
            assert stat.S_IMODE(os.stat(Path(place) / name).st_mode) == 0o700
        if Path(place) != tmp_path / "new":
            assert stat.S_IMODE(os.stat(place).st_mode) == 0o700
    for path in files(tmp_path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    store.close()


def test_a_second_store_on_the_folder_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    store = file_store(tmp_path, memory())
    put(store, run(LONG))
    with pytest.raises(ConfigError, match=rf"in use .process {os.getpid()}"):
        file_store(tmp_path, memory())
    with pytest.raises(ConfigError, match="in use"):
        file_store(tmp_path, memory(), identity=identity(model="other"))
    assert right(store, run(LONG)) == 8
    store.close()
    store.close()
    file_store(tmp_path, memory()).close()


def test_a_folder_that_cannot_be_used_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"file.* can't be used"):
        file_store(tmp_path / "file" / "below", memory())


# -- one bad file harms one page ----------------------------------------------------------------------


def _flip(at: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 4
        path.write_bytes(data)

    return damage


def _cut(size: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size if size >= 0 else path.stat().st_size + size)


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (_cut(0), "short"),
    "cut in the header": (_cut(60), "short"),
    "cut in the payload": (_cut(-1), "short"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "corrupt"),
    "flip in the magic": (_flip(0), "corrupt"),
    "flip in the digest": (_flip(48), "corrupt"),
    "flip in the tokens": (_flip(116), "corrupt"),
    "flip in the payload's hash": (_flip(-200), "corrupt"),
    "flip in the header's hash": (_flip(-193), "corrupt"),
    "flip in the first shard": (_flip(-192), "corrupt"),
    "flip in the last byte": (_flip(-1), "corrupt"),
    "gone": (Path.unlink, "missing"),
    "an empty folder": (lambda path: _replace(path, Path.mkdir), "failed"),
    "a link to itself": (lambda path: _replace(path, lambda p: p.symlink_to(p)), "failed"),
    "a link to another page": (
        lambda path: _replace(path, lambda p: p.symlink_to(next(files(p.parents[1])))),
        "failed",
    ),
    "a pipe": (lambda path: _replace(path, os.mkfifo), "failed"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_bad_file_is_a_miss_of_one_page_and_is_mended_by_a_put(tmp_path: Path, how: str) -> None:
    damage, reason = DAMAGE[how]
    store = file_store(tmp_path, memory())
    it, other = run(LONG), run(range(50))
    put(store, it)
    put(store, other)
    bad = pages_of(it)[3]
    damage(Path(store._file(bad)))
    got = store.get(it, range(8), never)
    assert (got.num_pages, got.reason, got.bad) == (3, reason, bad)
    assert store.discard(bad) == bad
    assert store.discard(bad) == b""
    assert (store.exists(it), right(store, it), right(store, run(LONG, skip=4))) == (3, 3, 4)
    assert right(store, other) == 12
    done = store.put(it, write(store._pages, it), never)
    assert (done.mask, done.new_pages) == (b"\1" * 8, 1)
    assert right(store, it) == 8
    assert sorted(listed(store)) == sorted(pages_of(it) + pages_of(other))
    store.close()
    store = file_store(tmp_path, memory())
    assert right(store, it) == 8
    store.close()


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("index", ["kept", "lost"])
def test_a_file_that_went_bad_while_nobody_looked_is_never_told_as_right(tmp_path: Path, how: str, index: str) -> None:
    store = file_store(tmp_path, memory())
    it, other = run(LONG), run(range(50))
    put(store, it)
    put(store, other)
    bad = Path(store._file(pages_of(it)[3]))
    store.close()
    DAMAGE[how][0](bad)
    if index == "lost":
        next(tmp_path.glob("*/index.db")).unlink()
    store = file_store(tmp_path, memory())
    assert right(store, other) == 12
    assert right(store, it) == 3 or (index == "lost" and "flip in the" in how and right(store, it) == 3)
    got = store.get(it, range(8), never)
    store.discard(got.bad)
    assert store.exists(it) == 3
    assert put(store, it) == b"\1" * 8
    assert right(store, it) == 8
    store.close()


def test_a_page_in_anothers_place_is_foreign(tmp_path: Path) -> None:
    store = file_store(tmp_path, memory())
    it = run(LONG)
    put(store, it)
    first, second = (Path(store._file(digest)) for digest in pages_of(it)[:2])
    shutil.copy(first, second)
    got = store.get(it, range(8), never)
    assert (got.num_pages, got.reason, got.bad) == (1, "foreign", pages_of(it)[1])
    store.close()


def test_a_page_whose_digest_another_has_is_foreign_and_stays_that_others(tmp_path: Path) -> None:
    """A collision: xxh3 is no cryptographic hash. The tokens and the namespace decide."""
    store = file_store(tmp_path, memory())
    it = run(LONG)
    put(store, it)
    for lie in (it._replace(namespace=Namespace(None, None, "s")), it._replace(tokens=run(range(32)).tokens)):
        got = store.get(lie, range(8), never)
        assert (got.num_pages, got.reason, got.bad) == (0, "foreign", b"")
    assert right(store, it) == 8
    store.close()


@pytest.mark.parametrize(("step", "code"), [("read", EIO), ("read", EACCES), ("read", EMFILE)])
def test_a_page_that_cannot_be_read_is_a_miss(tmp_path: Path, step: str, code: int) -> None:
    store = file_store(tmp_path, memory(), disk=failing(step, code, times=1))
    it = run(LONG)
    put(store, it)
    got = store.get(it, range(8), never)
    assert (got.num_pages, got.reason) == (0, "failed")
    assert got.bad == (
        b"" if code == EMFILE else pages_of(it)[0]
    )  # a process short of descriptors says nothing of pages
    assert right(store, it) == 8
    store.close()


@pytest.mark.parametrize("step", ["write", "written half", "written", "rename", "mkdir"])
@pytest.mark.parametrize(("code", "reason"), [(EIO, "failed"), (EROFS, "failed"), (EACCES, "failed"), (ENOSPC, "full")])
def test_a_put_that_fails_leaves_what_was_there_and_nothing_of_itself(
    tmp_path: Path, step: str, code: int, reason: str
) -> None:
    store = file_store(tmp_path, memory())
    put(store, run(range(50)))
    store.close()
    store = file_store(tmp_path, memory(), disk=failing(step, code))
    it = run(LONG)
    done = store.put(it, write(store._pages, it), never)
    assert done.reason == reason
    stayed = done.mask.count(1)
    assert done.mask == b"\1" * stayed + bytes(8 - stayed)
    assert (store.exists(it), right(store, it)) == (stayed, stayed)
    if code != ENOSPC:  # which makes room first
        assert (right(store, run(range(50))), done.removed) == (12, b"")
    assert not [path for path in files(tmp_path) if path.suffix]
    assert store.stats().num_pages == len(list(files(tmp_path)))
    store.close()
    store = file_store(tmp_path, memory())
    assert put(store, it) == b"\1" * 8
    store.close()


def test_a_disk_that_others_fill_costs_a_part_of_what_is_there_and_not_all(tmp_path: Path) -> None:
    store = file_store(tmp_path, memory(), disk=failing("write", ENOSPC, times=1), max_bytes=1 << 40)
    disk = store._disk
    store._disk = type(disk)(lambda step, path: None)
    for number in range(5):
        put(store, run(range(1000 * number, 1000 * number + 8 * PAGE)))
    store._disk = disk
    it = run(range(9000, 9000 + 8 * PAGE))
    done = store.put(it, write(store._pages, it), never)
    assert done.mask == b"\1" * 8
    assert 2 <= len(done.removed) // 16 <= 3  # about a twentieth of forty
    store.close()


def test_a_disk_that_is_full_before_the_cap_is_a_smaller_cap(tmp_path: Path) -> None:
    room = [20]
    disk = FailingDisk(lambda step, path: None)

    def before(step: str, path: str) -> None:
        if step == "write" and len(list(files(tmp_path))) >= room[0]:
            raise OSError(ENOSPC, "full", path)

    disk.before = before
    store = file_store(tmp_path, memory(), disk=disk, max_bytes=40 * BLOCK_BYTES)
    for first in range(6):
        it = run(range(1000 * first, 1000 * first + 8 * PAGE))
        assert put(store, it) == b"\1" * 8
        assert right(store, it) == 8
    assert 16 <= store.stats().num_pages <= 20
    store.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="as another user there is nobody to be")
def test_a_file_that_this_user_may_not_read_is_a_miss() -> None:
    """Root may read everything, so this runs as nobody."""
    program = """
import os, sqlite3, sys, tempfile
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from shelf import *
os.seteuid(65534)
folder = tempfile.TemporaryDirectory()
store = file_store(Path(folder.name), memory())
it = run(range(100, 132))
store.put(it, write(store._pages, it), never)
bad = Path(store._file(pages_of(it)[2]))
os.chmod(bad, 0)
got = store.get(it, range(8), never)
assert (got.num_pages, got.reason, got.bad) == (2, "failed", pages_of(it)[2]), got
store.discard(got.bad)
assert store.put(it, write(store._pages, it), never).mask == b"\\1" * 8
os.chmod(bad.parent, 0o500)
store.discard(pages_of(it)[2])
assert store.put(it, write(store._pages, it), never).reason in ("failed", None)
store.close()
os.chmod(bad.parent, 0o700)
folder.cleanup()
"""
    words = [sys.executable, "-c", program, str(Path(__file__).parent)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# -- the cap ------------------------------------------------------------------------------------------


def test_the_cap_holds_and_goes_down_to_the_low_water_mark_the_oldest_first(tmp_path: Path) -> None:
    store = file_store(tmp_path, memory(), max_bytes=20 * BLOCK_BYTES, low_water=0.8)
    a, b, c = (run(range(n, n + 8 * PAGE)) for n in (1000, 2000, 3000))
    put(store, a)
    put(store, b)
    right(store, a)  # a was used last
    done = store.put(c, write(store._pages, c), never)
    assert done.mask == b"\1" * 8
    removed = pages_of(Run(ROOT, None, done.removed, b""))
    assert removed == pages_of(b)[::-1][: len(removed)]  # the deepest first, and none of a
    assert len(removed) == 5  # the 21st page made room: 20 - 5 + 1 = 16
    assert (store.exists(a), store.exists(b), store.exists(c)) == (8, 3, 8)
    assert store.stats().num_bytes == 19 * BLOCK_BYTES
    assert len(list(files(tmp_path))) == 19
    store.close()


def test_a_put_that_mends_a_hole_makes_no_room_of_what_lies_behind_it(tmp_path: Path) -> None:
    """It uses those pages, too: else they went as the oldest, and were written again in the same put."""
    store = file_store(tmp_path, memory(), max_bytes=12 * BLOCK_BYTES, low_water=10 / 12)
    it, other = run(LONG), run(range(50, 66))
    put(store, it)
    put(store, other)
    assert store.discard(pages_of(it)[3])
    put(store, run(range(90, 94)))
    done = store.put(it, write(store._pages, it), never)
    assert (done.mask, done.new_pages, done.reason) == (b"\1" * 8, 1, None)
    assert pages_of(Run(ROOT, None, done.removed, b"")) == pages_of(other)[:0:-1], "the oldest that are not its own"
    assert right(store, it) == 8
    store.close()


def test_a_run_longer_than_the_cap_is_stored_as_far_as_it_fits(tmp_path: Path) -> None:
    store = file_store(tmp_path, memory(), max_bytes=5 * BLOCK_BYTES)
    done = store.put(run(LONG), write(store._pages, run(LONG)), never)
    assert (done.mask, done.reason, done.removed) == (b"\1" * 5 + bytes(3), "full", b"")
    assert right(store, run(LONG)) == 5
    store.close()


def test_a_page_larger_than_the_cap_evicts_nothing(tmp_path: Path) -> None:
    pages = memory(4, 1 << 15)
    store = file_store(tmp_path, pages, identity=identity(payload_bytes=1 << 16), max_bytes=1 << 15)
    assert store.put(run(range(PAGE)), [0], never).reason == "full"
    store.close()


def test_a_smaller_cap_is_held_from_the_start(tmp_path: Path) -> None:
    store = file_store(tmp_path, memory())
    put(store, run(LONG))
    store.close()
    store = file_store(tmp_path, memory(), max_bytes=4 * BLOCK_BYTES)
    assert store.exists(run(LONG)) == len(list(files(tmp_path))) == 3  # below the low-water mark
    store.close()


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_what_was_used_last_is_known_after_a_restart(tmp_path: Path, index: str) -> None:
    store = file_store(tmp_path, memory())
    a, b = (run(range(n, n + 8 * PAGE)) for n in (1000, 2000))
    put(store, a)
    put(store, b)
    if index == "kept":
        right(store, a)
        a, b = b, a
    else:  # then by the time of writing
        for number, digest in enumerate(pages_of(a) + pages_of(b)):
            os.utime(store._file(digest), ns=(number, number))
    store.close()
    if index == "lost":
        next(tmp_path.glob("*/index.db")).unlink()
    store = file_store(tmp_path, memory(), max_bytes=10 * BLOCK_BYTES, low_water=1.0)
    assert (store.exists(a), store.exists(b)) == (2, 8)
    store.close()


def test_other_identities_count_and_go_first(tmp_path: Path) -> None:
    old = file_store(tmp_path, memory(), identity=identity(model="old"))
    put(old, run(LONG))
    old.close()
    store = file_store(tmp_path, memory(), max_bytes=20 * BLOCK_BYTES, low_water=0.9)
    assert store.stats().num_bytes >= 8 * BLOCK_BYTES
    a, b = (run(range(n, n + 8 * PAGE)) for n in (1000, 2000))
    done = [store.put(it, write(store._pages, it), never) for it in (a, b)]
    assert [each.mask for each in done] == [b"\1" * 8] * 2
    assert done[1].removed == b""
    assert (store.exists(a), store.exists(b)) == (8, 8)
    third = run(range(3000, 3000 + 5 * PAGE))
    assert put(store, third) == b"\1" * 5
    assert not (tmp_path / old.form.fingerprint.hex()).exists()
    store.close()


def test_clear_removes_every_page_children_first(tmp_path: Path) -> None:
    store = file_store(tmp_path, memory())
    put(store, run(LONG))
    assert store.clear() == (8, b"".join(reversed(pages_of(run(LONG)))), 0, "")
    assert (list(files(tmp_path)), store.exists(run(LONG)), listed(store)) == ([], 0, [])
    assert store.stats().num_bytes == 0
    put(store, run(LONG))
    store.close()
    store = file_store(tmp_path, memory())
    assert right(store, run(LONG)) == 8
    store.close()


# -- restarts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["garbage", "empty", "cut", "folder", "rows", "older", "newer version"])
def test_an_index_that_is_damaged_or_old_is_made_right_from_the_files(tmp_path: Path, damage: str) -> None:
    import sqlite3

    store = file_store(tmp_path, memory())
    put(store, run(range(50)))
    store.close()
    (index,) = tmp_path.glob("*/index.db")
    older = index.read_bytes()
    store = file_store(tmp_path, memory())
    put(store, run(LONG))
    branch = run([*range(2 * PAGE), *[9] * PAGE])
    put(store, branch)
    gone = pages_of(run(range(50)))[-1]
    store.discard(gone)
    store.close()
    if damage == "garbage":
        index.write_bytes(os.urandom(20000))
    elif damage == "empty":
        index.write_bytes(b"")
    elif damage == "cut":
        os.truncate(index, 5000)
    elif damage == "folder":
        index.unlink()
        index.mkdir()
    elif damage == "older":
        index.write_bytes(older)
    else:
        db = sqlite3.connect(index)
        if damage == "rows":
            db.execute("UPDATE pages SET namespace = x'000001010000000000000061' WHERE before IS NOT NULL")
            for change in (
                "tokens = x'00'",
                "digest = zeroblob(16)",
                "namespace = x'02'",
                "before = NULL",
                "used = -1",
            ):
                db.execute(f"UPDATE pages SET {change} WHERE number = (SELECT number FROM pages ORDER BY random())")
        else:
            db.execute("PRAGMA user_version=99")
        db.commit()
        db.close()
    store = file_store(tmp_path, memory())
    assert sorted(listed(store)) == sorted(pages_of(run(range(50)))[:-1] + pages_of(run(LONG)) + pages_of(branch)[2:])
    assert {it.namespace for runs in store.listing() for it in runs} == {ROOT}
    assert (right(store, run(range(50))), right(store, run(LONG))) == (11, 8)
    store.close()
    store = file_store(tmp_path, memory())
    assert store.stats().num_pages == 20
    store.close()


def test_an_index_that_breaks_while_it_is_used_costs_no_page(tmp_path: Path) -> None:
    store = file_store(tmp_path, memory())
    put(store, run(LONG))
    assert store._catalog._db is not None
    store._catalog._db.execute("DROP TABLE pages")
    store._catalog.flush()
    put(store, run(range(50)))
    assert sorted(listed(store)) == sorted(pages_of(run(LONG)) + pages_of(run(range(50))))
    store.close()
    store = file_store(tmp_path, memory())
    assert store.stats().num_pages == 20
    store.close()


def test_a_strange_file_in_the_folder_is_left_alone(tmp_path: Path) -> None:
    store = file_store(tmp_path, memory())
    put(store, run(LONG))
    strange = [tmp_path / "notes", store._own / "ab", store._own / "lost+found"]
    strange[0].write_text("mine")
    strange[1].mkdir(exist_ok=True)
    (strange[1] / "README").write_text("mine")
    strange[2].mkdir()
    store.close()
    store = file_store(tmp_path, memory())
    assert right(store, run(LONG)) == 8
    assert (tmp_path / "notes").exists()
    assert (strange[1] / "README").exists()
    store.close()


STEPS = ["write", "written half", "written", "rename", "renamed", "mkdir", "unlink", "unlinked"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("nth", [1, 3])
def test_a_crash_at_any_step_of_a_put_loses_that_page_at_most(tmp_path: Path, step: str, nth: int) -> None:
    """Nothing is closed or flushed: what the next life finds is what was on the disk at that moment."""
    left = [1 << 30]

    def before(name: str, path: str) -> None:
        if name == step:
            left[0] -= 1
            if not left[0]:
                raise Crash

    store = file_store(tmp_path, memory(), disk=FailingDisk(before), max_bytes=12 * BLOCK_BYTES)
    a, b = run(LONG), run(range(2000, 2000 + 8 * PAGE))
    put(store, a)
    left[0] = nth
    with contextlib.suppress(Crash):
        put(store, b)
    if step != "mkdir":  # each needs a folder only where none was
        assert left[0] <= 0
    os.close(store._lock_fd)
    assert store._catalog._db is not None
    store._catalog._db.close()

    store = file_store(tmp_path, memory(), max_bytes=12 * BLOCK_BYTES)
    assert not [path for path in files(tmp_path) if path.suffix]
    there = [digest.hex() for digest in listed(store)]
    assert sorted(there) == sorted(path.name for path in files(tmp_path))
    assert right(store, a) == store.exists(a)
    assert right(store, b) == store.exists(b)
    assert store.exists(a) + store.exists(b) == len(there)
    assert put(store, b) == b"\1" * 8
    store.close()


def test_a_process_that_is_killed_leaves_pages_that_are_right(tmp_path: Path) -> None:
    program = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from shelf import *
store = file_store(Path(sys.argv[1]), memory(), max_bytes=100 * 4096)
print("open", flush=True)
number = 0
while True:
    number += 1
    it = run(range(number * 1000, number * 1000 + 32))
    assert store.put(it, write(store._pages, it), never).mask == b"\\1" * 8
    print(number, flush=True)
"""
    for life in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), str(Path(__file__).parent)],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "open\n"
            for _ in range(20 + 7 * life):
                assert child.stdout.readline()
        finally:
            child.send_signal(signal.SIGKILL)
            child.communicate()
        store = file_store(tmp_path, memory(), max_bytes=100 * BLOCK_BYTES)
        told = listed(store)
        assert 90 <= len(told) <= 100
        assert sorted(digest.hex() for digest in told) == sorted(path.name for path in files(tmp_path))
        for runs in store.listing():
            for it in runs:
                assert right(store, it) == len(pages_of(it))
        store.close()


def test_a_start_reads_no_page(tmp_path: Path) -> None:
    """What it has to know of its pages stands in the index: or a start would take as long as they are many."""
    store = file_store(tmp_path, memory())
    for number in range(40):
        it = run(range(number << 16, (number << 16) + 64 * PAGE))
        assert store.put(it, range(64), never).mask == b"\1" * 64
    store.close()
    calls: list[str] = []
    disk = FailingDisk(lambda step, path: calls.append(step))
    store = file_store(tmp_path, memory(), disk=disk)
    assert (store.stats().num_pages, calls) == (40 * 64, [])
    assert sum(len(it.digests) // 16 for runs in store.listing() for it in runs) == 40 * 64
    store.close()


SMALL_DISK = """
import subprocess, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from shelf import *
folder = Path(sys.argv[1])
pages = memory(16, 1 << 15)
store = file_store(folder, pages, identity=identity(payload_bytes=1 << 16))
runs = [run(range(n * 1000, n * 1000 + 32)) for n in range(4)]
for it in runs:
    done = store.put(it, write(pages, it), never)  # 0.5 MB each, on a disk of 1 MB
    assert done.mask == b"\\1" * 8, done
assert store.get(runs[-1], range(8), never).num_pages == 8
there = store.stats().num_pages
assert 8 <= there < 16, there
subprocess.run(["mount", "--bind", sys.argv[1], sys.argv[1]], check=True)
subprocess.run(["mount", "-o", "remount,bind,ro", sys.argv[1]], check=True)
done = store.put(runs[0], write(pages, runs[0]), never)
assert done.reason == "failed" and done.removed == b"", done
assert store.get(runs[-1], range(8), never).num_pages == 8
assert store.stats().num_pages == there
store.close()
try:
    file_store(folder, pages, identity=identity(payload_bytes=1 << 16))
except Exception as exc:
    assert "can't be used (Read-only file system)" in str(exc), exc
else:
    raise AssertionError("a folder that can't be written was taken")
subprocess.run(["umount", sys.argv[1]], check=True)
store = file_store(folder, pages, identity=identity(payload_bytes=1 << 16))
assert store.get(runs[-1], range(8), never).num_pages == 8
print("fine")
"""


def test_a_disk_that_is_full_and_then_read_only_is_lived_with(tmp_path: Path) -> None:
    """A real one, of 1 MB, in a mount namespace of its own."""
    space = ["unshare", "--user", "--map-root-user", "--mount"]
    mount = 'mount -t tmpfs -o size=1m none "$1" && exec "$2" -c "$3" "$1" "$4"'
    if shutil.which("unshare") is None or subprocess.run([*space, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here")
    words = [*space, "bash", "-c", mount, "-", str(tmp_path), sys.executable, SMALL_DISK, str(Path(__file__).parent)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if "mount:" in done.stderr and "Traceback" not in done.stderr:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    assert done.stdout == "fine\n", done.stderr


def test_names_and_identities_are_alike_in_every_process(tmp_path: Path) -> None:
    """No seed of Python's hashes, and no environment, is in them: or a restart would find nothing, and say nothing."""
    program = """
import sys
sys.path.insert(0, sys.argv[1])
from shelf import *
print(identity().fingerprint.hex(), run(range(32), Namespace("l", "k", "s")).digests.hex())
"""
    said = set()
    for hash_seed in ("0", "12345", "random"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        words = [sys.executable, "-c", program, str(Path(__file__).parent)]
        said.add(subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout)
    assert len(said) == 1
    assert said.pop().split()[0] == identity().fingerprint.hex()


def _in_the_way(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / name
        path.unlink(missing_ok=True)
        path.mkdir()
        return path

    return make


def test_a_file_that_is_only_rewritten_costs_nothing(tmp_path: Path) -> None:
    store = file_store(tmp_path, memory())
    put(store, run(LONG))
    store.close()
    _in_the_way("identity.json")(tmp_path / store.form.fingerprint.hex())
    store = file_store(tmp_path, memory())
    assert right(store, run(LONG)) == 8
    store.close()


def test_what_is_in_the_way_is_named_with_its_remedy(tmp_path: Path) -> None:
    culprit = _in_the_way("lock")(tmp_path)
    with pytest.raises(ConfigError, match="something else has its place: move that away") as raised:
        file_store(tmp_path, memory())
    assert (raised.value.path, raised.value.file) == ("storage.path", str(culprit))
    assert f"{culprit} can't be used (Is a directory)" in raised.value.message


def test_a_clear_says_what_it_could_not_remove_and_removes_it_later(tmp_path: Path) -> None:
    broken = [False]

    def before(name: str, path: str) -> None:
        if broken[0] and name in ("unlink", "write"):
            raise OSError(EROFS, os.strerror(EROFS), path)

    store = file_store(tmp_path, memory(), disk=FailingDisk(before))
    put(store, run(LONG))
    broken[0] = True
    cleared = store.clear()
    assert (cleared.num_pages, cleared.left, len(cleared.removed)) == (0, 8, 8 * 16)
    assert "Read-only file system" in cleared.why
    assert store.exists(run(LONG)) == 0
    assert (store.clear().left, store.clear().removed) == (8, b"")
    broken[0] = False
    assert store.clear() == (8, b"", 0, "")
    assert not list(files(tmp_path))
    put(store, run(LONG))
    broken[0] = True
    assert store.clear().left == 8
    broken[0] = False
    other = run(range(5000, 5000 + PAGE))
    put(store, other)  # the folder can be written again, so what was cleared goes
    assert [path.name for path in files(tmp_path)] == [pages_of(other)[0].hex()]
    store.close()
    store = file_store(tmp_path, memory())
    assert (store.exists(run(LONG)), store.exists(other)) == (0, 1)
    store.close()


def test_a_folder_that_went_is_made_again_and_its_pages_are_told_as_gone(tmp_path: Path) -> None:
    store = file_store(tmp_path / "l3", memory())
    put(store, run(LONG))
    (tmp_path / "l3").rename(tmp_path / "gone")
    it = run(range(5000, 5000 + 2 * PAGE))
    done = store.put(it, write(store._pages, it), never)
    assert (done.mask, done.reason) == (b"\1\1", None)
    assert sorted(pages_of(Run(ROOT, None, done.removed, b""))) == sorted(pages_of(run(LONG)))
    assert (store.exists(run(LONG)), store.stats().num_pages, right(store, it)) == (0, 2, 2)
    with pytest.raises(ConfigError, match="in use"):
        file_store(tmp_path / "l3", memory())
    store.close()
    store = file_store(tmp_path / "l3", memory())
    assert right(store, it) == 2
    store.close()


def test_a_lock_that_was_removed_is_held_anew_or_the_folder_is_left_to_who_has_it(tmp_path: Path) -> None:
    store = file_store(tmp_path, memory())
    put(store, run(LONG))
    (tmp_path / "lock").unlink()
    it = run(range(5000, 5000 + 2 * PAGE))
    assert put(store, it) == b"\1\1"
    with pytest.raises(ConfigError, match="in use"):
        file_store(tmp_path, memory())
    (tmp_path / "lock").unlink()
    second = file_store(tmp_path, memory())
    other = run(range(6000, 6000 + 2 * PAGE))
    assert put(store, other) == b"\0\0"
    assert "in use" in str(store.stats().unwritable_why)
    assert store.clear().left is None
    assert right(second, run(LONG)) == 8
    second.close()
    assert put(store, other) == b"\0\0"
    assert "another daemon's now" in str(store.stats().unwritable_why)
    store.close()


def test_a_store_says_since_when_and_why_it_cannot_be_written(tmp_path: Path) -> None:
    disk = failing("write", EROFS, 2)
    store = file_store(tmp_path, memory(), disk=disk)
    assert store.stats().unwritable_since is None
    began = time.time()
    put(store, run(LONG))
    since = store.stats().unwritable_since
    assert since is not None
    assert began <= since <= time.time()
    assert "Read-only file system" in str(store.stats().unwritable_why)
    put(store, run(LONG))
    assert store.stats().unwritable_since == since
    put(store, run(LONG))
    assert (store.stats().unwritable_since, store.stats().unwritable_why) == (None, None)
    store.close()


def test_what_other_identities_have_is_told_and_their_empty_folders_go(tmp_path: Path) -> None:
    old = file_store(tmp_path, memory(), identity=identity(model="old"))
    put(old, run(LONG))
    old.close()
    folder = tmp_path / old.form.fingerprint.hex()
    store = file_store(tmp_path, memory())
    stats = store.stats()
    assert (stats.num_pages, stats.others_bytes, folder.exists()) == (0, stats.num_bytes, True)
    assert stats.others_bytes >= 8 * BLOCK_BYTES
    store.close()
    for path in files(folder):
        path.unlink()
    store = file_store(tmp_path, memory())
    assert (store.stats().others_bytes, folder.exists()) == (0, False)
    (folder / "ab").mkdir(parents=True)
    (folder / "strange").write_text("left alone")
    store.close()
    store = file_store(tmp_path, memory())
    assert [path.name for path in folder.iterdir()] == ["strange"]
    store.close()
