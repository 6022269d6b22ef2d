"""`sglcache announce` and `sglcache keygen`: what a stream's subscribers may need of an operator."""

from __future__ import annotations

import time
from pathlib import Path

import click

from sglcache.cli import Target, admin_of, each_of, rank_option, socket_option, targets_of
from sglcache.console import Command, emit, json_option

PAUSE_S = 0.02


@click.command(cls=Command, examples=("sglcache announce", "sglcache announce --rank 1"))
@socket_option
@rank_option("every one")
@json_option
def announce(socket: Path | None, rank: str | None, as_json: bool) -> int:
    """Tell all that is cached anew on the stream, for subscribers that joined late or lost batches and can't ask.

    AllBlocksCleared, then every block, under fresh numbers, among the batches of what goes on. Returns at its end.
    """

    def work(target: Target) -> None:
        with admin_of(target.socket) as client:
            first = client.digest()["seq"] + 1
            client.announce()
            while (digest := client.digest())["announcing"]:
                time.sleep(PAUSE_S)
        last, offset = digest["seq"], target.offset or 0
        if as_json:
            blocks = {tier.lower(): count for tier, (count, _) in digest["tiers"].items()}
            emit({"rank": offset, "blocks": blocks, "first_seq": first, "last_seq": last})
            return
        told = ", ".join(f"{count:,} blocks of {tier.lower()}" for tier, (count, _) in digest["tiers"].items())
        click.echo(f"rank {offset}: told of {told}, in the batches from {first} to {last}")

    return each_of(targets_of(socket, rank), work)


@click.command(cls=Command, examples=("sglcache keygen keys rank", "sglcache keygen readers router-1"), exits={})
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.argument("name")
@json_option
def keygen(folder: Path, name: str, as_json: bool) -> int:
    """Make a pair of CURVE keys: FOLDER/NAME.key, for everyone to know, and FOLDER/NAME.key_secret, for nobody else.

    The daemon's: events.curve_key_file = FOLDER/NAME.key_secret. A reader's: its .key goes into events.curve_allow_dir.
    """
    from sglcache.net.curve import make_keys

    public, secret = make_keys(folder, name)
    if as_json:
        emit({"public": str(public), "secret": str(secret)})
    else:
        click.echo(f"{public}\n{secret}")
    return 0
