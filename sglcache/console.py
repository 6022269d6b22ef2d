"""What all commands have in common: examples and exit codes in their help, `--json`, numbers, and how errors are told.

Output: results on stdout, as words, or with `--json` as objects of JSON, one a line. An error is on stderr, one line
either way: `error[code]: what; what to do`, or with `--json` `{"error": {"code", "message", "facts", "remedy"}}`.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from sglcache.errors import BadRequest, ConfigError, NotInstalled, SglcacheError, StartError, Unavailable

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

EXIT_FAILED, EXIT_USAGE, EXIT_UNAVAILABLE, EXIT_SOFTWARE, EXIT_INTERRUPTED = 1, 2, 69, 70, 130

EXITS: Mapping[int, str] = {
    0: "it is as it should be",
    EXIT_FAILED: "something was found, or the daemon refused",
    EXIT_USAGE: "wrong usage, input or configuration, or a part that is not installed",
    EXIT_UNAVAILABLE: "no daemon can be reached",
    EXIT_SOFTWARE: "a rank of the daemon failed",
    EXIT_INTERRUPTED: "interrupted",
}
"""Of every command, in general. 69 and 70 are sysexits' EX_UNAVAILABLE and EX_SOFTWARE."""
EVERYWHERE = {code: EXITS[code] for code in (0, EXIT_USAGE)}
OF_DAEMONS = {EXIT_UNAVAILABLE: EXITS[EXIT_UNAVAILABLE]}


def config_option(text: str, envvar: str | None = "SGLCACHE_CONFIG") -> Decorator:
    """The configuration's file, as `file`."""
    return click.option("--config", "-c", "file", type=click.Path(path_type=Path), envvar=envvar, help=text)


def set_option(text: str = "Such as pool.page_size=64.") -> Decorator:
    """What is laid over the configuration, as `overrides`."""
    return click.option("--set", "-s", "overrides", multiple=True, metavar="KEY=VALUE", help=text)


json_option = click.option(
    "--json", "as_json", is_flag=True, help="JSON for programs: an object a line, errors as well."
)


class Explained:
    """What a command's help says at its end: `examples`, whole lines that work, and `exits`, what its exit codes say
    beside 0 and 2; by default it needs a daemon and may find something."""

    def __init__(
        self,
        *args: Any,
        examples: Sequence[str] = (),
        exits: Mapping[int, str | None] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)
        ours = {EXIT_FAILED: EXITS[EXIT_FAILED], **OF_DAEMONS} if exits is None else exits
        self.exits = dict(sorted((code, text) for code, text in {**EVERYWHERE, **ours}.items() if text is not None))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples:
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), text) for code, text in self.exits.items()])


class Command(Explained, click.Command):
    pass


class Group(Explained, click.Group):
    command_class = Command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            told = f"did you mean {near[0]}?" if near else f"`{ctx.command_path} --help` lists them"
            raise click.UsageError(f"There is no command {args[0]!r}; {told}", ctx) from None


class Number(click.FloatRange):
    """A finite number within a range: nan is within every range that click looks at, and ends no wait."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number.", param, ctx)
        return number


def emit(answer: Any) -> None:
    """An object of JSON on a line of its own, at once."""
    click.echo(json.dumps(answer))


def complain(error: SglcacheError, as_json: bool | None = None, *, rank: int | None = None) -> None:
    """Tell an error, with what to do; `as_json`: as the command that runs was asked to; `rank`: whose it is."""
    if as_json is None:
        context = click.get_current_context(silent=True)
        as_json = bool(context is not None and context.params.get("as_json"))
    if as_json:
        facts = error.facts if rank is None else {"rank": rank, **error.facts}
        told = {"code": error.code, "message": error.message, "facts": facts, "remedy": error.remedy}
        click.echo(json.dumps({"error": told}, default=str), err=True)
        return
    where = "" if rank is None else f"rank {rank}: "
    more = "" if "; " in error.message else f"\n{error.remedy}" if "\n" in error.message else f"; {error.remedy}"
    click.echo(f"error[{error.code}]: {where}{error.message}{more}", err=True)


def last_words(log: str, limit: int = 2000) -> str:
    """Why a process of ours ended that logged this: the error that it told last, or the end of the log."""
    told = [line for line in log.splitlines() if line.startswith("error[")]
    return told[-1].partition("]: ")[2] if told else log[-limit:].strip()


def misused(error: click.ClickException) -> BadRequest:
    """What was wrong with how the command was called, as an error like others."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    remedy = f"see `{context.command_path} --help`" if context is not None else "see --help"
    return BadRequest(f"{error.format_message().rstrip('.')}; {remedy}")


def exit_code(error: SglcacheError) -> int:
    if isinstance(error, Unavailable):
        return EXIT_UNAVAILABLE
    if isinstance(error, ConfigError | BadRequest | NotInstalled):
        return EXIT_USAGE
    if isinstance(error, StartError):
        return EXIT_SOFTWARE
    return EXIT_FAILED
