"""`sglcache tenants`: what each tenant has, and may have; and how to change that while the daemon runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from sglcache.cli import (
    Target,
    admin_of,
    each_of,
    observer_of,
    rank_option,
    socket_option,
    targets_of,
)
from sglcache.console import EXIT_FAILED, EXITS, Group, emit, json_option
from sglcache.errors import BadRequest

LIMITS = ("device_floor", "device_ceiling", "host_floor", "host_ceiling")


@click.group(
    cls=Group,
    invoke_without_command=True,
    examples=("sglcache tenants", "sglcache tenants --json", "sglcache tenants set batch device_ceiling=25%"),
    exits={1: "there are no tenants", 69: EXITS[69]},
)
@socket_option
@rank_option("all")
@json_option
@click.pass_context
def tenants(ctx: click.Context, socket: Path | None, rank: str | None, as_json: bool) -> int:
    """What each tenant has of each rank's tiers, in pages of full KV, and what it may have.

    `taken` were evicted to make room for others; of these `broken` below the floor, since they hung on another tenant's
    pages and nothing else could go. `skipped` found no room on the host for the limits. Exits 1 where there are none.
    """
    if ctx.invoked_subcommand is not None:
        return 0
    rows: list[dict[str, Any]] = []

    def work(target: Target) -> None:
        with observer_of(target.socket) as client:
            facts = client.status()
        rows.append({"rank": facts["rank"], "page_size": facts["geometry"]["page_size"], "tenants": facts["tenants"]})

    code = each_of(targets_of(socket, rank), work)
    if as_json:
        emit({"ranks": rows})
    else:
        _show(rows)
    return code or (EXIT_FAILED if rows and not any(row["tenants"] for row in rows) else 0)


@tenants.command("set", examples=("sglcache tenants set batch device_ceiling=25% host_ceiling=none",))
@click.argument("name")
@click.argument("limits", nargs=-1, required=True, metavar="LIMIT=VALUE...")
@socket_option
@rank_option("all")
@json_option
def set_limits(name: str, limits: tuple[str, ...], socket: Path | None, rank: str | None, as_json: bool) -> int:
    """Change limits of tenant NAME on each rank, or make it: device_floor, device_ceiling, host_floor, host_ceiling.

    VALUE is tokens, or a share of the tier, such as 25%; of a ceiling also "none". It holds at once, and for a rank's
    later lives until the daemon ends; then the configuration counts again. What is above a lowered ceiling is evicted,
    and what is in use once it is let go of.
    """
    written: dict[str, Any] = {}
    for limit in limits:
        key, equals, value = limit.partition("=")
        if not equals or key not in LIMITS:
            raise BadRequest(f"{limit}: write {', '.join(LIMITS)}, each with =VALUE", argument=limit)
        written[key] = int(value) if value.isascii() and value.isdigit() else value
    rows: list[dict[str, Any]] = []

    def work(target: Target) -> None:
        with admin_of(target.socket) as client:
            facts = client.set_tenant(name, **written)
            rows.append({"rank": target.offset or 0, "tenants": facts})

    code = each_of(targets_of(socket, rank), work)
    if as_json:
        emit({"ranks": rows})
    else:
        _show(rows)
    return code


def _show(rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    columns = ("floor", "ceiling", "charged", "locked", "taken", "broken", "skipped")
    several = len(rows) > 1
    for name in (*(["rank"] if several else []), "tenant", "tier"):
        table.add_column(name, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        for each in row["tenants"]:
            counts = ["" if each[name] is None else f"{each[name]:,}" for name in columns]
            table.add_row(*([str(row["rank"])] if several else []), each["tenant"], each["tier"].lower(), *counts)
    if table.row_count:
        Console(highlight=False).print(table)
    else:
        click.echo("there are no tenants: the configuration has no [tenants]")
