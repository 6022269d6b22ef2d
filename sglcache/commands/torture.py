"""`sglcache torture`: break a daemon of its own in every way there is, for a while, and see that nothing gives."""

from __future__ import annotations

import contextlib
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from sglcache import config as configs
from sglcache.console import EXIT_FAILED, Command, Number, config_option, json_option
from sglcache.torture import daemon as daemons
from sglcache.torture import faults, report, run, schedule

LINE_EVERY_S = 10.0  # of progress, where that is no terminal
DEFAULT_KIND = "hiradix"
BESIDE_REPLAY = ("--replay", "--indexer", "--keep", "--json")


@click.command(
    cls=Command,
    examples=("sglcache torture", "sglcache torture --kind unified --seconds 600", "sglcache torture --seed 7 --json"),
    exits={1: "something gave: its seed and schedule are told", 130: "interrupted"},
)
@click.option(
    "--seconds",
    type=Number(min=1),
    metavar="S",
    help=f"How long. [default: {run.SECONDS:g}; with --kills until that]",
)
@click.option(
    "--runners", "num_runners", type=click.IntRange(1, 64), default=4, show_default=True, help="Model runners."
)
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="Of prompts and faults; by default drawn anew.")
@config_option(
    "The daemon's TOML file. Sockets, ports, state and storage are put into a folder of the torture's own.", envvar=None
)
@click.option(
    "--kind",
    type=click.Choice(tuple(daemons.KINDS)),
    help="Instead of a file: a small daemon of this kind of tree, in a form that the seed chooses. [default: "
    f"{DEFAULT_KIND}]",
)
@click.option(
    "--device",
    type=click.Choice(("cpu", "cuda")),
    help="Where the device pools are; by default as configured. cuda: on the first card, although this version's code "
    "for cards has not run on one.",
)
@click.option(
    "--faults",
    "names",
    default="all",
    show_default=True,
    metavar="A,B,...",
    help=f"all, none, or some of {', '.join(faults.BY_NAME)}; all,-NAME leaves one out.",
)
@click.option("--rate", type=Number(min=0.01, max=50), default=2.0, show_default=True, help="Faults a second, about.")
@click.option("--kills", type=click.IntRange(min=1), metavar="N", help="End after so many kills.")
@click.option("--workers", type=click.IntRange(1, 64), metavar="TP", help="pool.num_shards: workers of a scheduler.")
@click.option("--ranks", metavar="DPxPP", help="parallel.dp_size and pp_size, both: 3x1 are three ranks.")
@click.option(
    "--storage", type=click.Choice(("none", "file", "mooncake")), help="The third tier; by default as configured."
)
@click.option(
    "--operations",
    type=click.IntRange(min=1),
    metavar="N",
    help="Instead of --seconds: so many index commands, small and pipelined, to see memory stay flat.",
)
@click.option(
    "--replay",
    "replayed",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Do again what a schedule.json says that an earlier run has left.",
)
@click.option(
    "--indexer", metavar="URL", help="Dynamo's, which then must believe what the indexes hold at every quiet point."
)
@click.option("--keep", is_flag=True, help="Leave the folder with log, state and schedule. After a failure it stays.")
@json_option
def torture(
    seconds: float | None,
    num_runners: int,
    seed: int | None,
    file: Path | None,
    kind: str | None,
    device: str | None,
    names: str,
    rate: float,
    kills: int | None,
    workers: int | None,
    ranks: str | None,
    storage: str | None,
    operations: int | None,
    replayed: Path | None,
    indexer: str | None,
    keep: bool,
    as_json: bool,
) -> int:
    """Torture a daemon: runners on it, faults at random moments, and checks that nothing is lost, leaked or stuck.

    It starts a daemon of its own, with every process that it needs, and touches no other. Runners check every byte of
    every hit; processes are killed, stopped and flooded, disks fill up, copies fail, clocks jump. At quiet points every
    page must be free or cached, the event stream must say what the index holds, and memory and descriptors must be what
    they were. Exits 1 with the first thing that is not so, its seed and its schedule.
    """
    given = _given()
    if file is not None and kind is not None:
        raise click.UsageError("--config has a kind already; leave --kind out")
    if replayed is not None and (others := [each for each in given if each not in BESIDE_REPLAY]):
        raise click.UsageError(f"--replay does what its file says; leave {', '.join(others)} out")
    if operations is not None and (others := [each for each in ("--seconds", "--kills") if each in given]):
        raise click.UsageError(f"--operations says when it ends; leave {' and '.join(others)} out")
    if replayed is not None:
        recorded, planned = schedule.read(replayed)
        options = run.Options(
            seed=recorded["seed"],
            config=recorded["config"],
            seconds=recorded["seconds"],
            num_runners=recorded["runners"],
            storage=recorded["storage"],
            faults=[each.kind for each in planned],
            schedule=planned,
            keep=keep,
            indexer=indexer,
        )
    else:
        seed = secrets.randbits(32) if seed is None else seed
        options = run.Options(
            seed=seed,
            config=_config(file, kind or DEFAULT_KIND, seed, workers, ranks, device),
            seconds=run.SECONDS if seconds is None and kills is None else seconds,
            num_runners=num_runners,
            faults=schedule.chosen(names, tuple(faults.BY_NAME)),
            rate=rate,
            kills=kills,
            operations=operations,
            storage=storage or ("file" if file is None and (kind or DEFAULT_KIND) == DEFAULT_KIND else None),
            keep=keep,
            indexer=indexer,
        )
    click.echo(f"seed {options.seed}", err=as_json)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nothing of it is left then, either
    with _progress() as progress:
        found = run.torture(options, progress)
    if as_json:
        click.echo(found.to_json())
    else:
        click.echo(report.describe(found))
    for problem in found.problems if not as_json else ():
        click.echo(f"error[torture]: {problem}", err=True)
    if found.problems:
        click.echo(
            f"seed {found.seed}; the daemon's log and what was done to it: {found.folder}; again: sglcache torture "
            f"--replay {found.folder}/{run.SCHEDULE}",
            err=True,
        )
    elif found.folder is not None:
        click.echo(f"kept: {found.folder}", err=True)
    return 0 if found.ok else EXIT_FAILED


def _given() -> list[str]:
    """The options that were written, in the words of --help."""
    context = click.get_current_context()
    return [
        option.opts[0]
        for option in context.command.params
        if option.name is not None and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
    ]


def _config(
    file: Path | None, kind: str, seed: int, workers: int | None, ranks: str | None, device: str | None
) -> dict[str, Any]:
    """As a file has it. ConfigError; UsageError: --ranks is not two numbers."""
    if file is not None:
        data = configs.load(file).model_dump(mode="json", exclude_unset=True)
    else:
        data = daemons.varied(kind, seed)
    if workers is not None:
        data.setdefault("pool", {})["num_shards"] = workers
    if ranks is not None:
        dp_size, x, pp_size = ranks.partition("x")
        if not (x and dp_size.isdecimal() and pp_size.isdecimal()):
            raise click.UsageError(f"--ranks {ranks}: write DPxPP, such as 2x1")
        data["parallel"] = {**data.get("parallel", {}), "dp_size": int(dp_size), "pp_size": int(pp_size)}
    if device == "cuda":
        return daemons.on_cards(data, seed)
    if device is not None:
        data.setdefault("pool", {})["device"] = device
    return data


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[run.Progress], None]]:
    """A line on stderr: a live one on a terminal, else one every `LINE_EVERY_S`."""
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status("starting") as status:
            yield lambda now: status.update(str(now))
        return
    next_at = time.monotonic() + LINE_EVERY_S

    def line(now: run.Progress) -> None:
        nonlocal next_at
        if time.monotonic() >= next_at:
            click.echo(str(now), err=True)
            next_at += LINE_EVERY_S

    yield line
