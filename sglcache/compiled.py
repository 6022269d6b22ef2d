"""Which form of the core runs: compiled, or as it is written. They do the same; the compiled one takes half the time.

Where there is a C compiler, setup.py has mypyc compile MODULES: the index and what its commands go through. What it
makes lies beside the sources, and Python prefers it, unless

* SGLCACHE_PURE is set, and not to 0: for a debugger or a profiler that goes by lines, or to plant a bug;
* this is a checkout, and a source is younger than what was made of it: `make install` compiles again.

The compiled modules call each other without looking anything up, so it is all of them or none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from types import ModuleType
from typing import NamedTuple

MODULES = (
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
    "sglcache.core.packing",
    "sglcache.core.resources",
    "sglcache.core.shares",
    "sglcache.core.slots",
    "sglcache.core.tiering",
    "sglcache.core.tree",
)
VARIABLE = "SGLCACHE_PURE"
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LIBRARY = "sglcache__mypyc"  # all that is compiled; the file beside a source only names it
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


def library() -> str:
    """Where it is, or would be."""
    return os.path.join(ROOT, LIBRARY + EXTENSION_SUFFIXES[0])


def form() -> Form:
    """What a process that starts now would have."""
    if pure_wanted():
        return Form(False, f"{VARIABLE} is set")
    if not os.path.exists(library()):
        return Form(False, NOT_BUILT)
    if os.path.exists(os.path.join(ROOT, "setup.py")):
        made = os.path.getmtime(library())
        for module in MODULES:
            if os.path.getmtime(source(module)) > made:
                return Form(False, f"{module} was changed since it was compiled; `make install` compiles it again")
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
