"""`sglcache plan`: what the tiers hit, and what more of one would add; of a daemon that runs, or of a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from sglcache import config as configs
from sglcache.cli import Target, each_of, observer_of, progress, rank_option, socket_option, targets_of
from sglcache.console import EXITS, Command, config_option, emit, json_option, set_option


@click.command(
    cls=Command,
    examples=(
        "sglcache plan",
        "sglcache plan --json | jq -r '.ranks[].verdict'",
        "sglcache plan --trace conversation_trace.jsonl --config my.toml",
        "sglcache plan --trace trace.jsonl -s pool.page_size=64 -s host.size='256 GiB' --simulate",
    ),
    exits={2: "nothing is followed, or the trace or the configuration is wrong", 69: EXITS[69]},
)
@click.option("--trace", type=click.Path(path_type=Path), metavar="FILE", help="A trace in Mooncake's format.")
@config_option("With --trace: the tiers to lay it over; by default those of a daemon without one.")
@set_option("With --trace, such as host.size='64 GiB'.")
@click.option("--limit", type=click.IntRange(min=1), help="With --trace: only so many requests of it.")
@click.option("--page-size", type=click.IntRange(1, 4096), help="With --trace: as --set pool.page_size.")
@click.option(
    "--sample-tokens",
    type=click.IntRange(0, 1 << 20),
    default=0,
    help="With --trace: follow about one page in so many tokens, as a daemon does; by default every page.",
)
@click.option("--simulate", is_flag=True, help="With --trace: run it through an index as well, and show both.")
@socket_option
@rank_option("all")
@json_option
def plan(
    trace: Path | None,
    file: Path | None,
    overrides: tuple[str, ...],
    limit: int | None,
    page_size: int | None,
    sample_tokens: int,
    simulate: bool,
    socket: Path | None,
    rank: str | None,
    as_json: bool,
) -> int:
    """Would more memory help? The hit rate, its ceiling, and what 10, 50 and 100 GiB more of each tier would add.

    Without --trace the daemon that runs is asked, for each of its ranks; it follows a sample of pages all the time
    (observe.reuse_sample_tokens). With --trace there need be no daemon.
    """
    if trace is None:
        if overrides or limit or page_size or sample_tokens or simulate:
            raise click.UsageError("--set, --limit, --page-size, --sample-tokens and --simulate go with --trace")
        return _online(socket, rank, as_json)
    if socket is not None or rank is not None:
        raise click.UsageError("--trace needs no daemon: leave out --socket and --rank")
    from sglcache.bench import plan as work
    from sglcache.bench.replay import num_requests

    if page_size is not None:
        overrides = (*overrides, f"pool.page_size={page_size}")
    options = work.Options(trace, configs.load(file, overrides), limit, sample_tokens, simulate)
    with progress(num_requests(trace, limit)) as advance:
        told = work.plan(options, advance)
    if as_json:
        emit(told)
    else:
        _show(f"{trace}", told)
    return 0


def _online(socket: Path | None, rank: str | None, as_json: bool) -> int:
    rows: list[dict[str, Any]] = []

    def work(target: Target) -> None:
        with observer_of(target.socket) as client:
            rows.append({"rank": target.offset or 0, **client.reuse()})
        if not as_json:
            _show(f"rank {target.offset or 0}, the last {_time(rows[-1]['seconds'])}", rows[-1])

    code = each_of(targets_of(socket, rank), work)
    if as_json:
        emit({"ranks": rows})
    return code


def _show(whence: str, told: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    each = "every page" if told["weight"] == 1 else f"one page in {told['weight']:,.0f}"
    click.echo(f"{whence}: {told['requests']:,} requests, {told['tokens']:,} tokens; followed was {each}")
    if told.get("refused"):
        click.echo(f"refused   {told['refused']:,} prompts that the device has no room for are left out")
    tiers = ", ".join(f"{tier['tier']} {tier['tokens']:,} tokens ({_gib(tier['bytes'])})" for tier in told["tiers"])
    click.echo(f"tiers     {tiers}{', ' + told['write_policy'] if told['write_policy'] else ''}")
    if told["looks"]:
        for label, rates in (("measured", told["measured"]), ("simulated", told.get("simulated"))):
            if rates is not None:
                click.echo(f"{label:<9} {_rates(rates)}")
        click.echo(f"forecast  {_rates(told['forecast'])}")
        click.echo(f"ceiling   {100 * told['ceiling']:.1f} %, with room for everything")
    if told["enough"]:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column("tier")
        for name in ("more", "hit rate", "adds", "tokens/s", "on the device", "adds"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in told["more"]:
            table.add_row(
                row["tier"],
                f"{row['extra_gib']} GiB",
                f"{100 * row['hit_rate']:.1f} %",
                f"{100 * row['adds']:+.1f}",
                f"{row['adds_tokens_per_s']:,.0f}",
                f"{100 * row['device_hit_rate']:.1f} %",
                f"{100 * row['adds_on_device']:+.1f}",
            )
        Console(highlight=False).print(table)
    click.echo(told["verdict"])


def _rates(rates: dict[str, Any]) -> str:
    return f"{100 * rates['all']:.1f} % of the tokens, {100 * rates['device']:.1f} % on the device"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / 2**20:,.1f} MiB"


def _time(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
