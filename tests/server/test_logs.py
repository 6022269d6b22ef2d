"""The log as lines and as JSON: of the supervisor, of the ranks, and of a start that is refused."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglcache.server import logs


def record(message: str, **more: Any) -> logging.LogRecord:
    return logging.LogRecord("sglcache.watch", logging.WARNING, "x.py", 1, message, (), more.get("exc_info"))


def test_a_line_of_json_has_what_a_line_for_people_has() -> None:
    told = json.loads(logs.JsonFormatter(3).format(record('a "copy"\nis late')))
    assert set(told) == {"ts", "level", "logger", "rank", "pid", "message"}
    assert (told["level"], told["logger"], told["rank"]) == ("warning", "sglcache.watch", 3)
    assert told["message"] == 'a "copy"\nis late'
    assert told["ts"].endswith("Z")
    assert len(told["ts"]) == len("2026-11-30T10:44:24.123Z")


def test_an_exception_is_in_its_line_with_its_traceback() -> None:
    try:
        raise ValueError("so it is")
    except ValueError:
        line = logs.JsonFormatter(None).format(record("it broke", exc_info=sys.exc_info()))
    assert "\n" not in line
    told = json.loads(line)
    assert told["rank"] is None
    assert told["exception"].startswith("Traceback")
    assert told["exception"].endswith("ValueError: so it is")


@pytest.mark.parametrize(
    ("text", "overrides", "form"),
    [
        ("", (), "lines"),
        ("[log]\nformat = 'json'\n[pool]\npage_sise = 4\n", (), "json"),
        ("[log]\nformat = 'json'\n", ("log.format=lines",), "lines"),
        ("log = 3", (), "lines"),
        ("[log", ("log.format='json'",), "json"),
        ("[log]\nformat = 'yaml'\n", (), "lines"),
    ],
)
def test_which_form_is_wanted_is_known_of_a_configuration_that_is_wrong(
    tmp_path: Path, text: str, overrides: tuple[str, ...], form: str
) -> None:
    (tmp_path / "my.toml").write_text(text)
    assert logs.wanted(tmp_path / "my.toml", overrides) == form
    assert logs.wanted(tmp_path / "none.toml", overrides) == ("lines" if not overrides else form)


def serve(*args: str, folder: Path) -> subprocess.Popen[str]:
    environ = {key: value for key, value in os.environ.items() if key != "SGLCACHE_SOCKET"}
    environ |= {"XDG_RUNTIME_DIR": str(folder), "XDG_STATE_HOME": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-m", "sglcache", "serve", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    )


def test_a_start_that_is_refused_is_a_line_of_json_too(tmp_path: Path) -> None:
    process = serve("--log-format", "json", "--set", "pool.page_sise=4", folder=tmp_path)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    told = json.loads(err)
    assert (told["level"], told["code"], told["facts"]["path"]) == ("critical", "config", "pool.page_sise")
    assert told["remedy"] == "did you mean pool.page_size?"


@pytest.mark.daemons
def test_all_that_a_daemon_says_is_json_from_its_start_to_its_end(tmp_path: Path) -> None:
    sizes = ("pool.num_tokens=1024", "host.num_tokens=1024", "http.enabled=false")
    ports = ("events.endpoint=tcp://127.0.0.1:0", "events.replay_endpoint=tcp://127.0.0.1:0")
    sets = [word for each in (*sizes, *ports, "log.format=json", "log.level=info") for word in ("--set", each)]
    process = serve(*sets, folder=tmp_path)
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
    assert (ready["message"], ready["ranks"][0]["rank"]) == ("ready", 0)
    assert json.loads(out)["message"] == "drained and stopped"
    lines = [json.loads(line) for line in err.splitlines()]
    assert {each["rank"] for each in lines} == {None, 0}
    assert all({"ts", "level", "logger", "rank", "message"} <= set(each) for each in lines)
