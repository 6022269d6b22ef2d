"""What every command keeps: examples, exit codes, `--json`, and errors that say what to do, in either form."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import pytest

from sglcache import cli, console, errors
from sglcache.cli import LazyCommand

NO_JSON = {
    "serve": "it stays; what it says are logs, and --log-format json has them as JSON",
    "demo": "a story for people",
    "watch": "it prints nothing else",
    "bench": "a group that prints nothing itself",
}


def walk(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    command = command.loaded() if isinstance(command, LazyCommand) else command
    if path:
        yield path, command
    if isinstance(command, click.Group):
        for name, inner in sorted(command.commands.items()):
            yield from walk(inner, (*path, name))


ALL = dict(walk(cli.cli))
each = pytest.mark.parametrize("path", ALL, ids=" ".join)


@each
def test_each_command_has_json_or_a_reason_why_not(path: tuple[str, ...]) -> None:
    flags = [option for option in ALL[path].params if "--json" in option.opts]
    if " ".join(path) in NO_JSON:
        assert not flags, "take it off the list"
    else:
        assert [flag.name for flag in flags] == ["as_json"]


@each
def test_each_command_has_examples_that_can_be_read_by_itself_and_its_exit_codes(
    path: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ALL[path]
    assert isinstance(command, console.Explained), "make it with cls=console.Command"
    assert command.examples
    for example in command.examples:
        words = shlex.split(example.partition(" | ")[0])
        assert words[0] == "sglcache"
        words, found = words[1:], ()
        while words and (*found, words[0]) in ALL:
            found = (*found, words.pop(0))
        assert found[: len(path)] == path, example
        ALL[found].make_context(found[-1], list(words), resilient_parsing=False).close()
    with pytest.raises(SystemExit) as ended:
        cli.main([*path, "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert f"Examples:\n  {command.examples[0]}\n" in told
    assert set(re.findall(r"^  (\d+) ", told.partition("Exit codes:")[2], re.M)) == {
        str(code) for code in command.exits
    }
    assert set(command.exits) <= set(console.EXITS)


def ends(args: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(args)
    told = capsys.readouterr()
    return ended.value.code, told.out, told.err


ERRORS: Mapping[str, tuple[list[str], int, str]] = {
    "no daemon": (["ping"], 69, "unavailable"),
    "a key that is none": (["check", "--set", "pool.page_sise=4"], 2, "config"),
    "a rank that is none": (["ping", "--rank", "x"], 2, "bad_request"),
    "an option that is none": (["status", "--jsom"], 2, "bad_request"),
    "a command that is none": (["statsu"], 2, "bad_request"),
    "nothing to purge": (["purge"], 2, "bad_request"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_is_a_line_of_words_or_of_json_and_says_what_to_do(
    case: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("SGLCACHE_SOCKET", raising=False)
    args, code, name = ERRORS[case]
    assert ends(args, capsys)[:2] == (code, "")
    status, out, err = ends([*args, "--json"], capsys)
    assert (status, out, err.count("\n")) == (code, "", 1)
    told = json.loads(err)["error"]
    assert set(told) == {"code", "message", "facts", "remedy"}
    assert told["code"] == name
    assert told["remedy"]


def test_each_kind_of_error_says_what_to_do_where_its_message_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in {errors.SglcacheError, *errors.SglcacheError.__subclasses__()}:
        console.complain(kind("it is so"), False)
        assert capsys.readouterr().err == f"error[{kind.code}]: it is so; {kind.in_general}\n"
        console.complain(kind("it is so; do this"), False)
        assert capsys.readouterr().err == f"error[{kind.code}]: it is so; do this\n"


def test_why_a_daemon_ended_is_the_error_that_it_told_last_or_else_the_end_of_its_log(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console.complain(errors.ConfigError("it is so; do this"), False)
    log = f"INFO starts\nerror[start]: before; that\n{capsys.readouterr().err}INFO drained\n"
    assert console.last_words(log) == "it is so; do this"
    assert console.last_words("INFO starts\nKilled\n") == "INFO starts\nKilled"
    assert console.last_words("x" * 3000) == "x" * 2000
    assert console.last_words("") == ""


def test_one_of_several_ranks_that_fails_is_named_in_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    console.complain(errors.Unavailable("it is away", socket=Path("/x")), True, rank=3)
    assert json.loads(capsys.readouterr().err)["error"]["facts"] == {"rank": 3, "socket": "/x"}


def test_every_code_that_a_command_may_end_with_is_in_the_table_of_the_documents() -> None:
    text = (Path(__file__).parents[1] / "docs" / "operate.md").read_text()
    table = re.findall(r"^\| (\d+) \|", text.partition("## Exit codes")[2].partition("\n## ")[0], re.M)
    assert sorted(map(int, table)) == sorted(console.EXITS)
