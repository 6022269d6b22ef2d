"""`sglcache announce` and `sglcache keygen`: what a stream's subscribers may need of an operator."""

from __future__ import annotations

import time
from pathlib import Path

import click

from sglcache.cli import Target, admin_of, each_of, rank_option, socket_option, targets_of

PAUSE_S = 0.02


@click.command()
@socket_option
@rank_option("every one")
def announce(socket: Path | None, rank: str | None) -> int:
    """Tell all that is cached anew on the stream, for subscribers that joined late or lost batches and can't ask.

    AllBlocksCleared, then every block, under fresh numbers, among the batches of what goes on. Returns at its end.
    """

    def work(target: Target) -> None:
        with admin_of(target.socket) as client:
            first = client.digest()["seq"] + 1
            client.announce()
            while (digest := client.digest())["announcing"]:
                time.sleep(PAUSE_S)
        told = ", ".join(f"{count:,} blocks of {tier.lower()}" for tier, (count, _) in digest["tiers"].items())
        click.echo(f"rank {target.offset or 0}: told of {told}, in the batches from {first} to {digest['seq']}")

    return each_of(targets_of(socket, rank), work)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.argument("name")
def keygen(folder: Path, name: str) -> int:
    """Make a pair of CURVE keys: FOLDER/NAME.key, for everyone to know, and FOLDER/NAME.key_secret, for nobody else.

    The daemon's: events.curve_key_file = FOLDER/NAME.key_secret. A reader's: its .key goes into events.curve_allow_dir.
    """
    from sglcache.net.curve import make_keys

    for path in make_keys(folder, name):
        click.echo(path)
    return 0
