"""What is handed out, and what it is where it is all that there is: `make package` builds and installs it first."""

from __future__ import annotations

import email.message
import email.parser
import os
import subprocess
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
from deployed import ROOT, Service, environ, run, settings
from packaging.requirements import Requirement

from sglcache import compiled

pytestmark = pytest.mark.package

FOLDER = Path(os.environ.get("SGLCACHE_PACKAGE", ROOT / ".venv-package"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PROGRAM = str(FOLDER / "installed/bin/sglcache")
PYTHON = str(FOLDER / "installed/bin/python")
NAME = f"sglcache-{PROJECT['version']}"


@pytest.fixture(scope="module")
def wheel() -> Iterator[zipfile.ZipFile]:
    (path,) = (FOLDER / "dist").glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        yield wheel


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    return email.parser.BytesParser().parsebytes(wheel.read(f"{NAME}.dist-info/METADATA"))


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    env = environ({"SGLCACHE_SOCKET": str(tmp_path / "control.sock"), "XDG_STATE_HOME": str(tmp_path / "state")})
    env.pop("PYTHONPATH", None)  # it could bring the checkout back
    return env


def tracked(*folders: str) -> set[str]:
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(filter(None, listed.stdout.split("\0")))


def test_the_wheel_is_the_package_and_what_an_operator_copies(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if not name.endswith("/")}
    data = f"{NAME}.data/data/share/sglcache/"
    expected = tracked("sglcache") | {f"{data}{path}" for path in tracked("configs/*.toml", "deploy")}
    assert "sglcache/py.typed" in expected
    own = {name for name in names if name.startswith(f"{NAME}.dist-info/")}
    if not str(wheel.filename).endswith("-py3-none-any.whl"):
        places = [module.replace(".", "/") for module in (compiled.LIBRARY, *compiled.MODULES)]
        expected |= {f"{place}{EXTENSION_SUFFIXES[0]}" for place in places}
    assert names - own == expected
    assert wheel.read(f"{NAME}.dist-info/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


def test_the_sdist_has_what_it_takes_to_test_it() -> None:
    with tarfile.open(FOLDER / "dist" / f"{NAME}.tar.gz") as sdist:
        names = {name.removeprefix(f"{NAME}/") for name in sdist.getnames()}
    not_handed_out = {".pre-commit-config.yaml", ".gitignore"}
    missing = tracked() - names - not_handed_out
    assert not missing, f"MANIFEST.in leaves out {sorted(missing)}"
    assert not {name for name in names if "__pycache__" in name or name.startswith((".git/", ".venv"))}


def test_its_metadata_say_what_it_is(metadata: email.message.Message) -> None:
    assert metadata["Name"] == "sglcache"
    assert metadata["Version"] == PROJECT["version"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    wanted = [Requirement(each) for each in metadata.get_all("Requires-Dist", [])]
    always = {each.name for each in wanted if each.marker is None}
    assert always == {Requirement(each).name for each in PROJECT["dependencies"]}
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])


def test_what_is_installed_is_the_wheel_and_not_the_checkout(tmp_path: Path, env: dict[str, str]) -> None:
    program = "import sglcache, sglcache.config, sys; print(sglcache.__file__); sys.exit('torch' in sys.modules)"
    done = run([PYTHON, "-c", program], env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(FOLDER / "installed")
    done = run([PROGRAM, "version"], env, cwd=tmp_path)
    assert (done.stdout, done.stderr) == (f"{PROJECT['version']}\n", "")


@pytest.mark.parametrize("name", sorted(file.name for file in (ROOT / "configs").glob("*.toml")))
def test_the_configurations_are_beside_it(name: str, tmp_path: Path, env: dict[str, str]) -> None:
    file = FOLDER / "installed/share/sglcache/configs" / name
    done = run([PROGRAM, "check", str(file), "--ram", "2 TB"], env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_every_module_can_be_imported_or_says_which_extra_it_needs(tmp_path: Path, env: dict[str, str]) -> None:
    """What only the command line and tests import may leave the saying to them."""
    program = """
import importlib, pkgutil, sys
import sglcache
from sglcache.errors import NotInstalled
for found in pkgutil.walk_packages(sglcache.__path__, "sglcache.", onerror=lambda name: None):
    if found.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(found.name)
    except NotInstalled:
        pass
    except ModuleNotFoundError as exc:
        print(found.name, exc.name)
"""
    done = run([PYTHON, "-W", "error", "-c", program], env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name, module in (line.split() for line in done.stdout.splitlines()):
        home = {"torch": ("bench", "demo", "testing"), "hypothesis": ("testing",)}.get(module, ())
        assert name.split(".")[1] in home, f"{name} needs {module}, and raises no NotInstalled"


def test_it_serves_a_whole_journey_without_torch(tmp_path: Path, env: dict[str, str]) -> None:
    """Runners in processes of their own, every byte of what they find checked, and a mirror of the stream."""

    def sglcache(*words: str) -> str:
        done = run([PROGRAM, *words], env, cwd=tmp_path)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    with Service([PROGRAM, "serve", *settings(**{"pool.num_tokens": 65536})], env, tmp_path / "log") as service:
        service.await_health(tmp_path / "control.sock")
        assert sglcache("health") == "ok\n"
        assert sglcache("ping").startswith("ok: ")
        told = sglcache("replay", "--limit", "40", "--verify")
        assert "mirror    device: " in told
        assert "mirror    host: " in told
        assert "every page is in one place, and the counts add up" in sglcache("status")
        sglcache("verify")
        program = "import sglcache\nwith sglcache.Client() as cache:\n    cache.pool.k"
        done = run([PYTHON, "-c", program], env, cwd=tmp_path)
        assert "sglcache.errors.NotInstalled: this needs torch, which is not installed; pip install" in done.stderr
        assert service.stop() == 0
