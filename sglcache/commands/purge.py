"""`sglcache purge`: remove the host tier that `host.keep_path` has kept, of daemons that are not there any more."""

from __future__ import annotations

from pathlib import Path

import click

from sglcache import config as configs
from sglcache.console import Command, emit, json_option
from sglcache.errors import BadRequest, Busy, ConfigError
from sglcache.server import room
from sglcache.server.keeping import held_in


@click.command(
    cls=Command,
    examples=("sglcache purge my.toml", "sglcache purge --set host.keep_path=/dev/shm/kv"),
    exits={1: "a live daemon uses it; nothing was removed"},
)
@click.argument("file", type=click.Path(path_type=Path), required=False, envvar="SGLCACHE_CONFIG")
@click.option(
    "--set", "-s", "overrides", multiple=True, metavar="KEY=VALUE", help="Such as host.keep_path=/dev/shm/kv."
)
@json_option
def purge(file: Path | None, overrides: tuple[str, ...], as_json: bool) -> int:
    """Remove the pages that the configuration in FILE keeps beyond the daemon's end (host.keep_path), of every rank.

    What a live daemon uses is left, and then nothing is removed: `sglcache clear --tier host` empties that. Exits with
    1 if so.
    """
    config = configs.load(file, overrides)
    folder = config.host.keep_path
    if folder is None:
        raise BadRequest("host.keep_path is not set: nothing outlives the daemon; write --set host.keep_path=FOLDER")
    held = held_in(folder)
    if used := [each.folder.name for each in held if each.in_use]:
        raise Busy(f"a live daemon uses {', '.join(used)} in {folder}; stop it first, or clear its tier", ranks=used)
    if strange := [f"{each.folder}/{name}" for each in held for name in each.others]:
        raise Busy(f"these are not sglcache's: {', '.join(strange[:4])}; move them elsewhere first", paths=strange)
    for each in held:
        try:
            each.purge()
        except (OSError, ConfigError) as exc:
            raise Busy(f"{each.folder} can't be removed: {exc}", path=str(each.folder)) from exc
    num_bytes = sum(each.num_bytes for each in held)
    if as_json:
        emit({"removed": [str(each.folder) for each in held], "num_bytes": num_bytes})
    else:
        ranks = f"{len(held)} rank{'s' * (len(held) != 1)}"
        click.echo(f"removed {room.told(num_bytes)} of {ranks} in {folder}" if held else f"nothing is kept in {folder}")
    return 0
