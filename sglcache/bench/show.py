"""A run of the suite as a person sees it: how far it is, and then its tables."""

from __future__ import annotations

import sys

import click
import msgspec

from sglcache.bench import report
from sglcache.bench import suite as suites
from sglcache.console import EXIT_FAILED, EXIT_INTERRUPTED


def suite(options: suites.Options, as_json: bool) -> int:
    """Run it. 1: something of ours could not be measured; 130: interrupted, and it says how to go on."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as progress:
            bar = progress.add_task("bench", total=None)

            def tell(step: suites.Step) -> None:
                words = f"{step.case}: {step.side}, {step.round + 1}"
                progress.update(bar, completed=step.done, total=step.total, description=words)
                if progress.disable and not step.round:
                    click.echo(f"{step.done}/{step.total} {step.case}: {step.side}", err=True)

            results = suites.run(options, tell)
            progress.update(bar, completed=progress.tasks[0].total, description="done")
    except KeyboardInterrupt:
        click.echo(
            f"interrupted; `sglcache bench suite --into {options.folder}` with the same options goes on", err=True
        )
        return EXIT_INTERRUPTED
    try:
        from sglcache.bench import plots

        pictures = plots.draw(results, options.folder)
    except ImportError:
        pictures = []
        click.echo("no pictures: matplotlib is not installed; the package's extra `bench` has it", err=True)
    (options.folder / "tables.md").write_text(report.markdown(results))
    if as_json:
        click.echo(msgspec.json.encode(results))
    else:
        _tables(results)
        made = ["results.json", "tables.md", *(path.name for path in pictures)]
        made += [f"flame-{name}.svg" for name in results.flames]
        click.echo(f"{options.folder}: {', '.join(made)}")
    for line in results.failed:
        click.echo(f"failed: {line}", err=True)
    return EXIT_FAILED if results.failed else 0


def _tables(results: suites.Results) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for each in report.tables(results):
        width = 4 if each.title == report.HOT_TITLE else len(each.head)  # the words behind are for a document
        table = Table(title=each.title, title_justify="left")
        for number, name in enumerate(each.head[:width]):
            table.add_column(name, justify="left" if number == 0 or width == 2 else "right")
        for row in each.rows:
            table.add_row(*row[:width])
        console.print(table)
