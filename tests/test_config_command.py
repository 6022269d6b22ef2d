"""`sglcache config`: what it prints is a configuration again, and docs/configure.md is what the models say."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from sglcache import config as configs
from sglcache.commands import config as command

ROOT = Path(__file__).parents[1]


def run(*args: str) -> str:
    result = CliRunner().invoke(command.config, args, standalone_mode=False)
    assert result.exception is None, result.exception
    assert result.return_value == 0
    return result.stdout


def test_the_document_is_what_the_models_say() -> None:
    told = (ROOT / "docs" / "configure.md").read_text()
    assert told == command.text(), "make it anew: sglcache config --reference > docs/configure.md"


def test_the_reference_has_every_key_with_its_words() -> None:
    facts = {each["key"]: each for each in json.loads(run("--reference", "--json"))}
    tables = {"parallel.stages", "mamba.states", "tenants"}
    assert facts.keys() == configs.keys().keys() - tables
    assert facts["pool.page_size"]["default"] == 16
    assert facts["pool.page_size"]["is"].startswith("integer, 1 to")
    assert facts["events.encoding"]["is"] == '"map", "array", "superset"'
    assert facts["mamba.states.shape"]["required"]
    assert all(each["description"] for each in facts.values())


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_what_is_printed_is_the_same_configuration(path: Path) -> None:
    whole = configs.load(path)
    assert configs.parse(tomllib.loads(run(str(path)))) == whole
    assert configs.parse(tomllib.loads(run(str(path), "--changed"))) == whole
    assert configs.parse(json.loads(run(str(path), "--json", "--changed"))) == whole


def test_what_is_changed_alone() -> None:
    assert run("--changed").strip() == ""
    assert run("--changed", "-s", "pool.page_size=64", "-s", 'tenants.a.device_floor="10%"').split("\n") == [
        "",
        "[pool]",
        "page_size = 64",
        "",
        "[tenants]",
        'a = {device_floor = "10%"}',
        "",
    ]
