"""`sglcache health`: what a probe asks, without a port or a client: /health, on the supervisor's unix socket."""

from __future__ import annotations

from pathlib import Path

import click

from sglcache import paths, ranks
from sglcache.cli import socket_option
from sglcache.console import EXIT_FAILED, EXITS, Command, emit, json_option
from sglcache.errors import Unavailable


@click.command(
    cls=Command,
    examples=("sglcache health", "sglcache health --json | jq -r .status"),
    exits={1: "a rank does not serve", 69: EXITS[69]},
)
@socket_option
@json_option
def health(socket: Path | None, as_json: bool) -> int:
    """Whether every rank serves, for probes: exits 0 if so, 1 if one does not, 69 if there is no daemon.

    What GET /health says, asked on the unix socket, so that it is there whatever http.enabled, host and port are.
    """
    there = paths.supervisors(socket)
    if not there:
        where = socket if socket is not None else paths.socket_path()
        raise Unavailable(f"no daemon has its control socket at {where}; start one with `sglcache serve`")
    pages = [ranks.ask(path, "/health") for path in there]
    if as_json:
        for page in pages:
            emit(page)
    else:
        click.echo(
            "; ".join(f"{page['status']}: {page['reason']}" if "reason" in page else page["status"] for page in pages)
        )
    return 0 if all(page["serving"] for page in pages) else EXIT_FAILED
