"""`sglcache verify`: does the event stream say what the index holds?"""

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
from sglcache.client import verify as work
from sglcache.commands.curve import curve_of, curve_options
from sglcache.console import EXIT_FAILED, EXITS, Command, Number, emit, json_option


@click.command(
    cls=Command,
    examples=("sglcache verify", "sglcache verify --full --duration 10", "sglcache verify --json | jq .ok"),
    exits={1: "it does not, or nothing could be compared", 69: EXITS[69]},
)
@socket_option
@rank_option("every one")
@click.option("--full", is_flag=True, help="Insist on comparing block by block, however busy the daemon is.")
@click.option(
    "--duration",
    "duration_s",
    type=Number(min=0),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to compare by digest.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=Number(min=0.1),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="What the stream, and a dump of the index, may take.",
)
@curve_options
@json_option
def verify(
    socket: Path | None,
    rank: str | None,
    full: bool,
    duration_s: float,
    timeout_s: float,
    curve_server_key: str | None,
    curve_key_file: Path | None,
    as_json: bool,
) -> int:
    """Check that the event stream says what the index holds.

    Follows the stream as a router would, on a live daemon and under load, and holds what it has learned against the
    daemon's digests, as of one and the same number, for every rank and tier; then block by block, when the index holds
    still for that. Says which blocks differ. Exits 1 if any does, or if nothing could be compared.
    """
    curve = curve_of(curve_server_key, curve_key_file)
    reports: list[work.RankReport] = []

    def check(target: Target) -> None:
        with observer_of(target.socket) as observer:
            report = work.verify(observer, duration_s=duration_s, full=full, timeout_s=timeout_s, curve=curve)
        reports.append(report)
        if not as_json:
            if target.is_one_of > 1:
                click.secho(f"rank {report.rank}", bold=True)
            click.echo(work.describe(report))

    code = each_of(targets_of(socket, rank), check)
    if as_json:
        emit({"ok": not code and all(each.ok for each in reports), "ranks": [each.as_dict() for each in reports]})
    return code or (0 if all(report.ok for report in reports) else EXIT_FAILED)
