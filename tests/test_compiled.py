"""Which form of the core a process has, where it is wanted, missing or too old; and that there is a compiled one."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from sglcache import compiled
from sglcache.core import encoding
from sglcache.core.key import TOKEN_BYTES

ROOT = Path(__file__).parents[1]


def can_compile() -> bool:
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return shutil.which(compiler) is not None and headers.exists()


def test_it_is_compiled_wherever_that_can_be_done() -> None:
    if compiled.pure_wanted() or not can_compile():
        assert not compiled.FORM.compiled
    else:
        assert compiled.FORM.compiled, f"the core is {compiled.FORM}; make install"


@pytest.mark.parametrize("module", compiled.MODULES)
def test_it_is_all_of_them_or_none(module: str) -> None:
    file = importlib.import_module(module).__file__
    assert file is not None
    assert file.endswith(".so") is compiled.FORM.compiled


def test_each_can_be_imported_first() -> None:
    """What a compiled module names of another must be there by then: nothing looks whether it is."""
    program = """
import os, sys
import sglcache, sglcache.compiled, msgspec, numpy, ormsgpack, xxhash
for module in sglcache.compiled.MODULES:
    if not (pid := os.fork()):
        __import__(module)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        print(module)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def said(**environment: str) -> str:
    """What a process of its own says of itself."""
    program = "from sglcache import compiled; import sglcache.core.index as i; print(compiled.FORM.name, i.__file__)"
    env = {key: value for key, value in os.environ.items() if key != compiled.VARIABLE} | environment
    return subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True).stdout


def test_a_process_has_what_its_environment_wants() -> None:
    assert said(SGLCACHE_PURE="1") == f"pure {ROOT / 'sglcache/core/index.py'}\n"
    if compiled.FORM.compiled:
        assert said() == said(SGLCACHE_PURE="0") == said(SGLCACHE_PURE="") == f"compiled {_index()}\n"


def _index() -> str | None:
    return importlib.import_module("sglcache.core.index").__file__


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One in which all was compiled just now."""
    monkeypatch.delenv(compiled.VARIABLE, raising=False)
    monkeypatch.setattr(compiled, "ROOT", str(tmp_path))
    for module in compiled.MODULES:
        file = Path(compiled.source(module))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(module)
        Path(compiled.name_of(module)).touch()
    Path(compiled.library()).write_bytes(b"a library")
    Path(compiled.stamp_of(compiled.library())).write_text(compiled.stamp(compiled.library()))
    (tmp_path / "setup.py").touch()
    assert compiled.form() == compiled.Form(True)
    return tmp_path


@pytest.mark.parametrize("age", [-1e6, 0, 1e6])
def test_a_source_that_is_another_leaves_all_of_it_aside_however_old_it_is(checkout: Path, age: float) -> None:
    """A file that is put back, or copied, has an old time."""
    file = Path(compiled.source("sglcache.core.tree"))
    os.utime(file)
    assert compiled.form().compiled, "it is the same"
    file.write_text("sglcache.core.tre3")
    os.utime(file, (time.time() + age,) * 2)
    assert compiled.form().why.startswith("sglcache.core.tree was changed since it was compiled; ")
    file.write_text("sglcache.core.tree")
    assert compiled.form().compiled


def test_where_it_is_installed_for_good_nobody_reads_the_sources(checkout: Path) -> None:
    (checkout / "setup.py").unlink()
    Path(compiled.source("sglcache.core.tree")).unlink()
    assert compiled.form().compiled


@pytest.mark.parametrize("text", ["", "{", "[]", '{"size": 9}', '{"size": 8, "sources": {}}', '{"sources": {}}', None])
def test_what_is_not_whole_is_not_loaded(checkout: Path, text: str | None) -> None:
    stamp = Path(compiled.stamp_of(compiled.library()))
    if text is None:
        stamp.unlink()
    else:
        stamp.write_text(text)
    assert compiled.form() == compiled.Form(False, f"what was compiled is not whole; {compiled.AGAIN}")


def test_a_library_that_was_cut_off_is_not_loaded(checkout: Path) -> None:
    os.truncate(compiled.library(), 4)
    assert not compiled.form().compiled


@pytest.mark.parametrize("module", compiled.MODULES)
def test_without_one_of_them_none_is_loaded(checkout: Path, module: str) -> None:
    os.unlink(compiled.name_of(module))
    assert compiled.form() == compiled.Form(False, f"what was compiled is not whole; {compiled.AGAIN}")


def test_what_was_not_built_is_not_there(checkout: Path) -> None:
    os.unlink(compiled.library())
    assert compiled.form() == compiled.Form(False, compiled.NOT_BUILT)


def test_a_wish_comes_first(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled.VARIABLE, "1")
    assert compiled.form() == compiled.Form(False, "SGLCACHE_PURE is set")


@pytest.mark.parametrize("count", [0, 1, 15, 16, 65535, 65536])
@pytest.mark.parametrize("end", [1 << 7, 1 << 8, 257, 1 << 16, 65537, 150_000, 1 << 32])
def test_tokens_are_packed_as_msgpack_has_them(count: int, end: int) -> None:
    """By the loop where it is compiled, else by a library: the same bytes."""
    tokens = np.random.default_rng(count).integers(max(0, end - 300), end, count).astype("<u4")
    text = b"before__" + tokens.tobytes() + b"behind"
    packed = encoding.pack_tokens(text, 8, 8 + count * TOKEN_BYTES)
    assert packed == msgspec.msgpack.encode(tokens.tolist())


CORNERS = [
    sign * (1 << bits) + by for sign in (1, -1) for bits in (0, 5, 7, 8, 15, 16, 31, 32, 62) for by in (-1, 0, 1)
]


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("count", [0, 1, 15, 16, 65535, 65536])
@pytest.mark.parametrize("short", [[], CORNERS, [-(1 << 63), (1 << 63) - 1]], ids=["none", "short", "long"])
def test_hashes_are_packed_as_msgpack_has_them_and_summed(count: int, short: list[int], size: int) -> None:
    """A short one among them, of which there is hardly ever any, is as short as it can be."""
    rng = np.random.default_rng(count)
    hashes = rng.integers(-(1 << 63), (1 << 63) - 1, count).tolist()
    hashes[: len(short)] = short[:count]
    digests = b"".join(each.to_bytes(8, "big", signed=True) + rng.bytes(size - 8) for each in hashes)
    assert encoding.pack_hashes(digests, size) == msgspec.msgpack.encode(hashes)
    assert (encoding.sum_hashes(digests, size) - sum(hashes)) % (1 << 64) == 0
