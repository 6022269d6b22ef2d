"""`sglcache doctor`: what is wrong with the machine and the daemon, and what keeps others from working with it: one
finding a line, each fault with its remedy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from sglcache import paths, ranks
from sglcache.cli import socket_option
from sglcache.client.doctor import Options, examine
from sglcache.client.doctor.finding import Finding
from sglcache.commands.curve import curve_of, curve_options
from sglcache.console import EXIT_FAILED, EXITS, Group, Number, config_option, emit, json_option, set_option
from sglcache.errors import ConfigError, Unavailable


@click.group(
    cls=Group,
    invoke_without_command=True,
    examples=(
        "sglcache doctor",
        "sglcache doctor --config my.toml",
        "sglcache doctor --json | jq -c '.findings[] | select(.state == \"failed\")'",
        "sglcache doctor events",
    ),
    exits={0: "nothing failed; there may be warnings", EXIT_FAILED: "something failed"},
)
@socket_option
@config_option("What a daemon is, or is to be, configured by; by default the defaults.")
@set_option()
@json_option
@click.pass_context
def doctor(
    ctx: click.Context, socket: Path | None, file: Path | None, overrides: tuple[str, ...], as_json: bool
) -> int:
    """Look for what is wrong with this machine and, if one runs, the daemon: a line for each thing, with what to do.

    Python, the kernel, cards, the configuration, memory against the pools, limits, ports and who has them, sockets, the
    clock, the third tier's disk, routers; whether the daemon is well, of this version, and heard. It changes nothing.
    """
    if ctx.invoked_subcommand is not None:
        return 0
    from sglcache.commands.machine_checks import examine as judge
    from sglcache.commands.machine_facts import gather

    return _tell(judge(gather(file, overrides, socket)), as_json)


def _tell(found: Iterator[Finding], as_json: bool) -> int:
    """A line for each as it is found, or all of them as JSON; the exit code."""
    findings = []
    for finding in found:
        findings.append(finding)
        if not as_json:
            click.secho(str(finding), fg={"failed": "red", "warning": "yellow"}.get(finding.state))
    fine = all(finding.state != "failed" for finding in findings)
    if as_json:
        emit({"ok": fine, "findings": [finding.as_dict() for finding in findings]})
    return 0 if fine else EXIT_FAILED


@doctor.command(
    examples=("sglcache doctor events", "sglcache doctor events --indexer http://127.0.0.1:8090 --json"),
    exits={1: "something failed", 69: EXITS[69]},
)
@socket_option
@click.option("--server", metavar="URL", help="The daemon's HTTP address, as routers reach it; by default it is asked.")
@click.option("--indexer", metavar="URL", help="A Dynamo indexer (python -m dynamo.indexer) to prove, too.")
@click.option(
    "--timeout",
    "timeout_s",
    type=Number(min=0.1),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="What each thing that is waited for may take.",
)
@curve_options
@json_option
def events(
    socket: Path | None,
    server: str | None,
    indexer: str | None,
    timeout_s: float,
    curve_server_key: str | None,
    curve_key_file: Path | None,
    as_json: bool,
) -> int:
    """Prove that routers can follow the event stream.

    From /server_info to the ports of each rank, of every stage, what its batches look like, and a few blocks of its
    own, which it puts into the cache as a runner does, in namespaces of random names: a mirror must have them, and with
    --indexer the indexer, those from before it was registered and those from now on. What it registers it unregisters;
    its blocks leave when they are evicted. Exits 1 if something failed.
    """
    found = ranks.daemons(socket)
    if server is None:
        if not found:
            raise Unavailable(f"no daemon answers at {socket or paths.socket_path()}; say --server http://HOST:PORT")
        server = found[0]["http"]
        if server is None:
            raise ConfigError("the daemon has no HTTP, so no router can find its stream: set http.enabled = true")
    sockets = {row["rank"]: Path(row["socket"]) for each in found for row in each["ranks"]}
    curve = curve_of(curve_server_key, curve_key_file)
    return _tell(examine(Options(server, sockets, indexer, timeout_s, curve)), as_json)
