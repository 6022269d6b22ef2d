"""The command line without a daemon: help is quick, errors are one line with an exit code that means something."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from sglcache import cli

COMMANDS = (
    "bench",
    "check",
    "clear",
    "doctor",
    "events",
    "health",
    "ping",
    "replay",
    "serve",
    "status",
    "verify",
    "version",
    "watch",
)
NEEDS_A_DAEMON = (
    ["health"],
    ["ping"],
    ["status"],
    ["status", "--json"],
    ["watch"],
    ["events"],
    ["clear"],
    ["replay"],
    ["verify"],
    ["doctor", "events"],
)


def run(*args: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`sglcache ARGS` in a process of its own, where no daemon can be found."""
    environ = {key: value for key, value in os.environ.items() if key != "SGLCACHE_SOCKET"}
    if folder is not None:
        environ["XDG_RUNTIME_DIR"] = str(folder)
    return subprocess.run(
        [sys.executable, "-m", "sglcache", *args], capture_output=True, text=True, check=False, timeout=60, env=environ
    )


def test_help_names_every_command_and_the_exit_codes() -> None:
    done = run("--help")
    assert done.returncode == 0
    for command in COMMANDS:
        assert f"\n  {command} " in done.stdout
    assert "69   no daemon" in done.stdout


def test_help_is_quick_and_loads_nothing_big() -> None:
    program = (
        "import sys; sys.argv = ['sglcache', '--help']\n"
        "from sglcache.cli import main\n"
        "try:\n    main()\n"
        "finally:\n"
        "    big = {'torch', 'numpy', 'pydantic', 'rich', 'zmq', 'aiohttp', 'asyncio'} & set(sys.modules)\n"
        "    assert not big, big\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    # Processor time: on a loaded machine the clock says nothing.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(command: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout


@pytest.mark.parametrize("args", NEEDS_A_DAEMON, ids=" ".join)
def test_without_a_daemon_it_is_unavailable(args: list[str], tmp_path: Path) -> None:
    done = run(*args, folder=tmp_path)
    assert done.returncode == 69, done
    assert done.stderr.startswith('{"error": {"code": "unavailable"' if "--json" in args else "error[unavailable]: ")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_wrong_config_is_one_line_by_path_and_exits_2() -> None:
    done = run("serve", "--set", "pool.page_sise=4")
    assert done.returncode == 2
    assert done.stderr == "error[config]: pool.page_sise (--set): no such key; did you mean pool.page_size?\n"


def test_wrong_usage_exits_2() -> None:
    for args in (["nothing"], ["clear", "--tier", "tape"], ["replay", "--clients", "0"], ["status", "--jsom"]):
        done = run(*args)
        assert done.returncode == 2, args
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "args", [["clear", "--wait"], ["replay", "--rate"], ["verify", "--duration"], ["verify", "--timeout"]], ids=" ".join
)
@pytest.mark.parametrize("number", ["-1", "nan", "inf", "-inf"])
def test_a_number_that_is_no_length_of_time_and_no_rate_is_wrong_usage(args: list[str], number: str) -> None:
    done = run(*args, number)
    assert done.returncode == 2
    assert args[-1] in done.stderr
    assert number in done.stderr


def test_check_prints_the_whole_configuration_for_programs() -> None:
    done = run("check", "--json", "--set", "pool.page_size=64")
    assert done.returncode == 0
    config = json.loads(done.stdout)["config"]
    assert config["pool"]["page_size"] == 64
    assert set(config) >= {"pool", "host", "events", "http", "control", "state", "model_name"}


def test_the_configuration_file_may_be_named_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "sglcache.toml"
    file.write_text("[pool]\npage_size = 64\n")
    monkeypatch.setenv("SGLCACHE_CONFIG", str(file))
    done = run("check", "--json", "--set", "pool.head_dim=8")
    pool = json.loads(done.stdout)["config"]["pool"]
    assert (pool["page_size"], pool["head_dim"]) == (64, 8)


def test_what_an_extra_brings_is_named_where_it_is_missing() -> None:
    program = (
        "import sys\nsys.modules['torch'] = None\nsys.argv = ['sglcache', 'demo']\n"
        "from sglcache.cli import main\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error[not_installed]: this needs torch, which is not installed; pip install ")
    assert done.stderr.count("\n") == 1


def test_version_is_the_packages() -> None:
    import importlib.metadata

    assert run("version").stdout.strip() == importlib.metadata.version("sglcache")


@pytest.mark.parametrize(
    ("facts", "prove", "status"),
    [
        ({"violations": []}, True, 0),
        ({"violations": ["a slot held twice"]}, True, 1),
        ({}, True, 1),  # commands kept overtaking the proof
        ({}, False, 0),
    ],
)
def test_a_proof_that_was_not_given_is_no_proof(facts: dict[str, list[str]], prove: bool, status: int) -> None:
    assert cli.proof_status(facts, prove) == status
