"""Has mypyc compile the hot modules of the core where that can be done: see sglcache/compiled.py. Without a C compiler,
or with SGLCACHE_PURE=1, the package is pure and does the same. All else of the build is in pyproject.toml."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))

from sglcache import compiled  # noqa: E402

# It compiles by our types alone, so that it makes the same of them in any environment; `make check` judges with all.
FLAGS = ["--config-file=", "--no-site-packages", "--ignore-missing-imports", "--follow-imports=silent"]
CAN_NOT = "sglcache: the core is not compiled, and runs as pure Python:"


def loads() -> bool:
    """Whether what is there is whole. In a process of its own: a library that is cut off ends it by a signal."""
    program = "from importlib import import_module as load; from sglcache.compiled import MODULES as all_of_them\n"
    program += "assert all(load(each).__file__.endswith('.so') for each in all_of_them)"
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=False).returncode == 0


def extensions() -> list[Extension]:
    if compiled.pure_wanted():
        return []
    if "editable_wheel" in sys.argv and compiled.FORM.compiled:
        made = os.path.getmtime(compiled.library())
        if all(os.path.getmtime(ROOT / name) <= made for name in ("setup.py", "sglcache/compiled.py")) and loads():
            return []  # it is there already
    for file in (compiled.library(), compiled.stamp_of(compiled.library())):
        Path(file).unlink(missing_ok=True)  # half of it, or broken, or of other sources
    if not any(map(shutil.which, (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[:1])):
        print(CAN_NOT, "there is no C compiler", file=sys.stderr)
        return []
    from mypyc.build import mypycify

    files = [f"{module.replace('.', '/')}.py" for module in compiled.MODULES]
    name = compiled.LIBRARY.removesuffix("__mypyc")
    # -O1: more of it takes half as long again to compile, and is not seen in what it does.
    made_of: list[Extension] = mypycify([*FLAGS, *files], opt_level="1", debug_level="0", group_name=name)
    for each in made_of:
        each.extra_compile_args.append("-Wno-error")  # what some compiler says of generated C is nobody's fault
    return made_of


class Build(build_ext):
    """All of it or nothing: a module alone would not find the others."""

    def run(self) -> None:
        try:
            super().run()
        except Exception as exc:
            print(CAN_NOT, exc, file=sys.stderr)
            for each in self.extensions:
                Path(self.get_ext_fullpath(each.name)).unlink(missing_ok=True)
            self.extensions = []
            return
        for each in self.extensions:
            if each.name == compiled.LIBRARY:
                library = self.get_ext_fullpath(each.name)
                Path(compiled.stamp_of(library)).write_text(compiled.stamp(library))


setup(ext_modules=extensions(), cmdclass={"build_ext": Build})
