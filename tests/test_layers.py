"""The arrows between the packages, read from the source: what an import statement says, anywhere in a file, counts.

    cli, bench -> server -> memory, storage, net -> core -> wire, config, units, errors

Arrows point down only. `memory`, `storage` and `net` never import each other; `client` and `testing` never import
`server`; `core` can't block, tell the time or draw lots. ARCHITECTURE.md says why.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "sglcache"
FILES = sorted(PACKAGE.rglob("*.py"))

BOTTOM = {"compiled", "errors", "units", "config", "packing", "wire"}
MIDDLE = {"memory", "storage", "net"}
MAY_IMPORT: dict[str, set[str]] = {
    "__init__": {"client", "compiled", "errors", "units"},
    "compiled": set(),
    "errors": set(),
    "units": set(),
    "paths": {"errors"},
    "console": {"errors"},
    "ranks": {"errors", "paths"},
    "config": {"errors", "units"},
    "packing": set(),
    "wire": {"compiled", "errors", "packing", "units"},
    "web": set(),
    "core": BOTTOM,
    "memory": BOTTOM | {"core"},
    "storage": BOTTOM | {"core"},
    "net": BOTTOM | {"core"},
    "server": BOTTOM | MIDDLE | {"core", "paths"},
    "client": BOTTOM | {"core", "memory", "net", "paths"},
    "testing": BOTTOM | MIDDLE | {"core", "client", "paths", "ranks"},
    "integrations": BOTTOM | {"client", "core", "paths"},
    "bench": BOTTOM | MIDDLE | {"console", "core", "client", "integrations", "paths", "ranks", "server", "testing"},
    "fuzzing": BOTTOM | MIDDLE | {"bench", "client", "core", "paths", "server", "testing"},
    "torture": BOTTOM | MIDDLE | {"bench", "client", "console", "core", "paths", "ranks", "server", "testing"},
    "demo": BOTTOM | {"client", "integrations", "paths", "testing"},
    "cli": BOTTOM | MIDDLE | {"console", "core", "client", "demo", "paths", "ranks", "server", "bench"},
    "commands": BOTTOM | {"bench", "cli", "client", "console", "memory", "net", "paths", "ranks", "server", "torture"},
    "__main__": {"cli"},
}

# What the core may import from outside: nothing here blocks, does I/O, tells the time or is random.
PURE = {
    "__future__", "abc", "bisect", "collections", "contextlib", "dataclasses", "enum", "functools", "hashlib", "heapq",
    "itertools", "math", "operator", "struct", "types", "typing",
    "librt", "msgspec", "mypy_extensions", "numpy", "ormsgpack", "xxhash",
}  # fmt: skip

# Third-party packages that have one home. Elsewhere they would bring their start-up time and their kind of failure.
HOME = {
    "torch": {"memory", "client", "testing", "bench", "integrations", "demo"},
    "transformers": {"integrations", "bench", "demo"},
    "zmq": {"net", "client", "testing", "bench", "fuzzing", "torture"},
    "aiohttp": {"server"},
    "prometheus_client": {"server"},
    "uvloop": {"server", "bench"},
    "click": {"cli", "console", "bench", "commands", "integrations"},
    "rich": {"cli", "bench", "commands"},
    "pydantic": {"config"},
    "hypothesis": {"testing"},
    "mooncake": {"storage", "bench"},
    "tokenizers": {"server"},
}


def tree(path: Path) -> ast.Module:
    """Not kept: all of them are a million objects for every later `gc.collect()`."""
    return ast.parse(path.read_text(), str(path))


@cache
def imports(path: Path) -> set[str]:
    """The full names of all that the file imports, in whatever scope."""
    found: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            assert node.module is not None
            if node.module == "sglcache":  # `from sglcache import config` imports sglcache.config
                found |= {f"sglcache.{alias.name}" for alias in node.names}
            else:
                found.add(node.module)
    return found


def layer(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_arrows_point_down(path: Path) -> None:
    own = layer(path)
    assert own in MAY_IMPORT, f"{name(path)} is of no layer; give it one in {name(Path(__file__))} and ARCHITECTURE.md"
    ours = {full.split(".")[1] for full in imports(path) if full.startswith("sglcache.")}
    ours &= {layer(file) for file in FILES}  # `from sglcache import Client` names a class, not a layer
    wrong = sorted(ours - MAY_IMPORT[own] - {own})
    assert not wrong, f"{name(path)} imports {wrong}; {own} may import {sorted(MAY_IMPORT[own])}"


@pytest.mark.parametrize("path", [path for path in FILES if layer(path) == "core"], ids=name)
def test_the_core_is_sans_io(path: Path) -> None:
    outside = {full.split(".")[0] for full in imports(path)} - {"sglcache"}
    assert outside <= PURE, f"{name(path)} imports {sorted(outside - PURE)}; core/ is sans-IO (ARCHITECTURE.md, law 1)"


@pytest.mark.parametrize("path", [path for path in FILES if layer(path) == "wire"], ids=name)
def test_the_wire_needs_msgspec_alone(path: Path) -> None:
    outside = {full.split(".")[0] for full in imports(path)} - {"sglcache", "msgspec"}
    assert outside <= sys.stdlib_module_names, f"{name(path)}: consumers import sglcache.wire with msgspec alone"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_every_dependency_is_at_home(path: Path) -> None:
    for full in imports(path):
        package = full.split(".")[0]
        home = HOME.get(package)
        assert home is None or layer(path) in home, f"{name(path)} imports {package}, whose home is {sorted(home)}"


@pytest.mark.parametrize(
    "statement",
    [
        "import sglcache",
        "import sglcache.wire.control, sglcache.wire.events",
        "import sglcache.client.mirror",
        "import sglcache.core.index",
        "import sglcache.config",
        "import sglcache.cli",
        "import sglcache.client.client, sglcache.memory.views",
        "import sglcache.bench.replay",
        "import sglcache.server.rank",
        "import sglcache.server.supervisor, sglcache.server.http, sglcache.server.metrics",
    ],
)
def test_this_import_loads_no_torch(statement: str) -> None:
    heavy = {"torch"}
    if "supervisor" in statement:
        heavy |= {"zmq", "numpy", "uvloop", "prometheus_client"}
    elif "rank" in statement:
        heavy |= {"aiohttp", "prometheus_client", "sqlite3", "mooncake"}  # the last two: as [storage] says
    program = f"{statement}\nimport sys\nsys.exit(bool({heavy} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{statement} loads torch, or fails: {done.stderr}"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_no_module_keeps_state(path: Path) -> None:
    wrong = list(module_state(tree(path)))
    assert not wrong, f"{name(path)}: {wrong}; state belongs to an object that `build` makes"


def module_state(module: ast.Module) -> Iterator[str]:
    """Module-level names that look like state, and `global` statements. CAPITALS are constants, by everyone's word."""
    for node in ast.walk(module):
        if isinstance(node, ast.Global):
            yield f"line {node.lineno}: global {', '.join(node.names)}"
    for statement in module.body:
        if not isinstance(statement, ast.Assign | ast.AnnAssign):
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            if isinstance(target, ast.Name) and mutable(statement.value) and not constant(target.id):
                yield f"line {statement.lineno}: {target.id}"


def constant(identifier: str) -> bool:
    return identifier.isupper() or identifier == "__all__"


def mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name | ast.Attribute):
        called = value.func.id if isinstance(value.func, ast.Name) else value.func.attr
        return called in {"list", "dict", "set", "bytearray", "deque", "defaultdict", "OrderedDict", "Counter"}
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def test_the_state_check_sees_what_it_should() -> None:
    program = (
        "cache = {}\nLIMITS = {}\nqueue: deque[int] = deque()\ndef f() -> None:\n    global cache\n    cache = {}\n"
    )
    assert list(module_state(ast.parse(program))) == ["line 5: global cache", "line 1: cache", "line 3: queue"]


def test_no_test_sleeps() -> None:
    """A test waits for the thing itself, with a deadline; what a sleep hides comes back as a flaky test."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "sleep":
                zero = node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0
                assert zero, f"{name(path)}:{node.lineno} sleeps"


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports them by their names alone, and refuses the second of two in one run."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []
