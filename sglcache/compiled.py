"""Which form of the core runs: compiled, or as it is written. They do the same; the compiled one takes half the time.

Where there is a C compiler, setup.py has mypyc compile MODULES: the index and what its commands go through, and a
router's picture of it. What it makes lies beside the sources, and Python prefers it, unless

* SGLCACHE_PURE is set, and not to 0: for a debugger or a profiler that goes by lines, or to plant a bug;
* it is not whole, by what the build has written down beside it (`stamp`), or
* this is a checkout, and a source is not what was compiled: `make install` compiles again. Times tell nothing of that:
  a file that is put back, or copied, has an old one.

The compiled modules call each other without looking anything up, so it is all of them or none.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from types import ModuleType
from typing import NamedTuple

MODULES = (
    "sglcache.client.picture",
    "sglcache.core.companions",
    "sglcache.core.departures",
    "sglcache.core.encoding",
    "sglcache.core.eventlog",
    "sglcache.core.eviction",
    "sglcache.core.hashing",
    "sglcache.core.histograms",
    "sglcache.core.index",
    "sglcache.core.key",
    "sglcache.core.leases",
    "sglcache.core.line",
    "sglcache.core.resources",
    "sglcache.core.shares",
    "sglcache.core.slots",
    "sglcache.core.tiering",
    "sglcache.core.tree",
    "sglcache.packing",
)
VARIABLE = "SGLCACHE_PURE"
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LIBRARY = "sglcache__mypyc"  # all that is compiled; the file beside a source only names it
AGAIN = "`make install` compiles it again"
NOT_BUILT = "it was not compiled; to have that, install it where there are a C compiler and Python's headers"


class Form(NamedTuple):
    """Of the core."""

    compiled: bool
    why: str = ""  # it is not

    @property
    def name(self) -> str:
        return "compiled" if self.compiled else "pure"

    def __str__(self) -> str:
        return "compiled" if self.compiled else f"pure Python: {self.why}"


COMPILED = Form(True)


def pure_wanted() -> bool:
    return os.environ.get(VARIABLE, "") not in ("", "0")


def source(module: str) -> str:
    return os.path.join(ROOT, *module.split(".")) + ".py"


def name_of(module: str) -> str:
    """The file beside a source that says that it is in the library. Without it Python takes the source."""
    return source(module).removesuffix(".py") + EXTENSION_SUFFIXES[0]


def library() -> str:
    """Where it is, or would be."""
    return os.path.join(ROOT, LIBRARY + EXTENSION_SUFFIXES[0])


def stamp_of(library: str) -> str:
    """The file in which the build writes down what it has made."""
    return os.path.join(os.path.dirname(library), f"{LIBRARY}.json")


def stamp(library: str) -> str:
    """What is to be in it: the library's size, and a checksum of each source."""
    sums = {module: _sum(module) for module in MODULES}
    return json.dumps({"size": os.path.getsize(library), "sources": sums})


def _sum(module: str) -> int:
    with open(source(module), "rb") as file:
        return zlib.crc32(file.read())


def form() -> Form:
    """What a process that starts now would have."""
    if pure_wanted():
        return Form(False, f"{VARIABLE} is set")
    if not os.path.exists(library()):
        return Form(False, NOT_BUILT)
    try:
        with open(stamp_of(library())) as file:
            made = json.load(file)
        whole = made["size"] == os.path.getsize(library()) and all(map(os.path.exists, map(name_of, MODULES)))
        sums: dict[str, int] = made["sources"]
    except (OSError, ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        return Form(False, f"what was compiled is not whole; {AGAIN}")
    if os.path.exists(os.path.join(ROOT, "setup.py")):
        for module in MODULES:
            if _sum(module) != sums.get(module):
                return Form(False, f"{module} was changed since it was compiled; {AGAIN}")
    if find_spec("librt") is None:
        return Form(False, "librt is missing, which the compiled one needs; pip install librt")
    return COMPILED


class Finder(MetaPathFinder):
    """Of modules that are not where Python would look first."""

    def __init__(self, where: dict[str, str]) -> None:
        self.where = where

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self.where.get(fullname)
        return None if file is None else spec_from_file_location(fullname, file)


FORM = form()
# The library is found here however the package is installed; in a checkout its folder need not be on the path.
sys.meta_path.insert(0, Finder({LIBRARY: library()} if FORM.compiled else {each: source(each) for each in MODULES}))
