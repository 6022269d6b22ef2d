"""What the image is built with: every dependency has a pin, and the pins are what pyproject.toml allows."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from collections.abc import Iterator

import pytest
from deployed import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(
    line.split("==")
    for line in (ROOT / "deploy" / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
)
NOT_THE_DAEMONS = {"bench", "dev"}


def asked_for() -> Iterator[Requirement]:
    yield from map(Requirement, PROJECT["dependencies"])
    for extra, wanted in PROJECT["optional-dependencies"].items():
        if extra not in NOT_THE_DAEMONS:
            yield from (each for each in map(Requirement, wanted) if each.name != PROJECT["name"])


def needed(name: str, found: dict[str, None]) -> None:
    """What it needs, and what that needs, as installed here; what is not installed has no say."""
    name = canonicalize_name(name)
    if name in found:
        return
    try:
        wanted = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return
    found[name] = None
    for each in map(Requirement, wanted):
        if each.marker is None or each.marker.evaluate({"extra": ""}):
            needed(each.name, found)


@pytest.mark.parametrize("requirement", list(asked_for()), ids=str)
def test_a_dependency_is_pinned_to_a_release_that_is_allowed(requirement: Requirement) -> None:
    assert requirement.specifier.contains(PINS[canonicalize_name(requirement.name)])


def test_what_dependencies_need_is_pinned_too() -> None:
    found: dict[str, None] = {}
    for requirement in asked_for():
        needed(requirement.name, found)
    # torch's CUDA build pins what it brings by itself.
    missing = {name for name in found if not name.startswith(("nvidia-", "cuda-", "triton"))} - set(PINS)
    assert not missing, f"deploy/constraints.txt has no {sorted(missing)}"


def test_the_daemon_needs_no_torch() -> None:
    assert not {"torch", "transformers"} & {Requirement(each).name for each in PROJECT["dependencies"]}


def test_there_is_one_pin_of_torch() -> None:
    script = (ROOT / "scripts" / "install.sh").read_text()
    assert re.search(r"deploy/constraints\.txt", script)
    assert PINS["torch"] not in script
