"""A run of `bench cards` as a person sees it: what is begun, then its tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from sglcache.bench import cards
from sglcache.bench.harness import BenchError, plain
from sglcache.bench.report import Table
from sglcache.console import EXIT_FAILED, emit

if TYPE_CHECKING:
    from rich.console import Console


def show(options: cards.Options, document: Path | None, as_json: bool) -> int:
    """Run it. 1: something could not be measured, or bytes were wrong. BenchError: `document` can't be written."""

    def keep(report: cards.Report) -> None:
        if document is not None:
            document.write_text(cards.markdown(report))

    if document is not None:
        try:
            document.open("a").close()  # now, and not after minutes
        except OSError as exc:
            raise BenchError(f"{document}: {exc.strerror or exc}") from exc
    report = cards.run(options, lambda text: click.echo(text, err=True), keep)
    if as_json:
        emit(plain(cards.as_row(report)))
    else:
        _tables(report)
    for line in report.failed:
        click.echo(f"failed: {line}", err=True)
    return EXIT_FAILED if report.failed else 0


def _tables(report: cards.Report) -> None:
    from rich.console import Console

    console = Console()
    for result in report.results.values():
        for table in result.tables:
            _print(console, table)
    if cards.goals(report):
        _print(console, cards.summary(report))
    for line in [*cards.taken(report), *(f"left out: {line}" for line in report.left_out)]:
        console.print(line, style="dim", highlight=False, soft_wrap=True)


def _print(console: Console, table: Table) -> None:
    from rich.table import Table as RichTable

    shown = RichTable(title=table.title, title_justify="left")
    for number, name in enumerate(table.head):
        shown.add_column(name, justify="right" if number else "left")
    for row in table.rows:
        shown.add_row(*row)
    console.print(shown)
