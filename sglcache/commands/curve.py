"""The options of commands that read a stream with CURVE."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from sglcache.client.mirror import Curve
from sglcache.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


def curve_options(command: F) -> F:
    """Adds `curve_server_key` and `curve_key_file`."""
    ours = click.option(
        "--curve-key-file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Our own secret CURVE key, where the daemon lets in only whom it knows.",
    )
    theirs = click.option(
        "--curve-server-key", metavar="KEY|FILE", help="The stream's public CURVE key, or its file, where it has one."
    )
    return theirs(ours(command))


def curve_of(server_key: str | None, key_file: Path | None) -> Curve | None:
    """ConfigError: a key can't be read, or ours is of no use."""
    if server_key is None:
        if key_file is not None:
            raise ConfigError("--curve-key-file is ours; say --curve-server-key, too: whom to trust")
        return None
    from sglcache.net.curve import load_key

    if len(server_key) != 40 or Path(server_key).exists():
        server_key = load_key(Path(server_key), "--curve-server-key")[0].decode()
    if key_file is None:
        return Curve(server_key)
    public, secret = load_key(key_file, "--curve-key-file", secret=True)
    assert secret is not None
    return Curve(server_key, public.decode(), secret.decode())
