"""`sglcache fsck`: is a running daemon what it says it is?"""

from __future__ import annotations

from pathlib import Path

import click

from sglcache.cli import (
    Target,
    each_of,
    observer_of,
    rank_option,
    socket_option,
    targets_of,
)
from sglcache.client import fsck as work
from sglcache.commands.curve import curve_of, curve_options
from sglcache.console import EXIT_FAILED, Command, Number, emit, json_option

COLOURS = {work.OK: "green", work.VIOLATION: "red", work.OVERTAKEN: "yellow", work.SKIPPED: None}


@click.command(
    cls=Command,
    examples=("sglcache fsck", "sglcache fsck --mirror --rank 0", "sglcache fsck --json | jq .ok"),
    exits={1: "something is wrong", 69: "a rank can't be reached"},
)
@socket_option
@rank_option("every one")
@click.option("--mirror", is_flag=True, help="Follow the event stream, too, and hold it against the index.")
@click.option(
    "--timeout",
    "timeout_s",
    type=Number(min=0.1),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="What each check may take before it is said to be overtaken.",
)
@curve_options
@json_option
def fsck(
    socket: Path | None,
    rank: str | None,
    mirror: bool,
    timeout_s: float,
    curve_server_key: str | None,
    curve_key_file: Path | None,
    as_json: bool,
) -> int:
    """Prove that a running daemon is what it says it is, without stopping it.

    Walks each rank a few milliseconds at a time, while it serves: its books, slot by slot; what it has told routers;
    the journal of its host tier; the third tier; who is attached; descriptors and memory. Exits 1 if anything is wrong.
    What commands change again and again before it is seen whole is overtaken: neither right nor wrong.
    """
    curve = curve_of(curve_server_key, curve_key_file)
    told: list[dict[str, object]] = []
    wrong = False

    def check(target: Target) -> None:
        nonlocal wrong
        with observer_of(target.socket) as observer:
            number = target.offset if target.offset is not None else observer.status()["rank"]
            results = work.fsck(observer, mirror=mirror, timeout_s=timeout_s, curve=curve)
        wrong = wrong or any(each.result == work.VIOLATION for each in results)
        told.append({"rank": number, "checks": [each._asdict() for each in results]})
        if not as_json:
            click.secho(f"rank {number}", bold=True)
            show(results)

    code = each_of(targets_of(socket, rank), check)
    if as_json:
        emit({"ok": not code and not wrong, "ranks": told})
    return code or (EXIT_FAILED if wrong else 0)


def show(results: list[work.Result]) -> None:
    """A line for each check, and one for each thing that is wrong."""
    for each in results:
        result = click.style(f"{each.result:<10}", fg=COLOURS[each.result])
        more = f"  {each.why}" if each.why is not None else f"{each.checked:>10} looked at  {each.seconds:.2f} s"
        click.echo(f"  {each.name:<12} {result}{more}")
        for words in each.violations:
            click.echo(f"    {words}")
        if (left := each.num_violations - len(each.violations)) > 0:
            click.echo(f"    and {left} more")
