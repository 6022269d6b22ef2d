"""The command line. Commands are glue: the work is in the packages, which are imported when a command runs.

Exit codes: 0 it is as it should be; 1 a check failed or the daemon refused; 2 wrong usage or configuration; 69 the
daemon can't be reached (sysexits' EX_UNAVAILABLE); 130 interrupted. An error is one line on stderr,
`error[code]: message`; output is for pipes wherever it is JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sglcache.errors import BadRequest, Busy, ConfigError, SglcacheError, Unavailable

if TYPE_CHECKING:
    from sglcache.client import Client
    from sglcache.client.mirror import Mirror

SUBSCRIBER_DEFAULT = "tcp://127.0.0.1:5557"  # of scripts/subscribe.py
EXIT_FAILED, EXIT_USAGE, EXIT_UNAVAILABLE, EXIT_INTERRUPTED = 1, 2, 69, 130


class Lazy(click.Group):
    """A group whose commands are another module's, imported when one is asked for."""

    def __init__(self, target: str, **kwargs: Any) -> None:
        """`target`: module:attribute, a click group."""
        super().__init__(**kwargs)
        self.target = target

    def _group(self) -> click.Group:
        module, _, attribute = self.target.partition(":")
        group = getattr(importlib.import_module(module), attribute)
        assert isinstance(group, click.Group), f"{self.target} is {group!r}"
        return group

    def list_commands(self, ctx: click.Context) -> list[str]:
        return self._group().list_commands(ctx)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return self._group().get_command(ctx, cmd_name)


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 fine, 1 a check failed or the daemon refused, 2 usage or configuration, 69 no daemon.",
)
def cli() -> None:
    """A KV cache server: owns the KV pages beside a model runner, and tells routers where they are.

    Start one with `sglcache serve`; the other commands talk to it.
    """


socket_option = click.option(
    "--socket",
    type=click.Path(path_type=Path),
    envvar="SGLCACHE_SOCKET",
    help="The daemon's control socket; by default where `sglcache serve` of this user puts it.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="JSON on stdout, for programs.")


def _observer(socket: Path | None) -> Client:
    from sglcache.client import Client

    return Client(socket, role="observer", name="sglcache")


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, where that is a terminal. Gives what to call with how much is done."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda done: bar.update(task, completed=done)


@cli.command()
@click.option("--config", "-c", "file", type=click.Path(path_type=Path), help="A TOML file; see configs/cpu.toml.")
@click.option("--set", "-s", "overrides", multiple=True, metavar="KEY=VALUE", help="Such as pool.page_size=64.")
@click.option("--check", is_flag=True, help="Only check the configuration, and print it as JSON.")
@click.option("--verbose", "-v", count=True, help="Log who comes and goes; twice, to debug.")
def serve(file: Path | None, overrides: tuple[str, ...], check: bool, verbose: int) -> int:
    """Run the daemon. SIGTERM or Ctrl-C drains and exits 0; a second one exits at once."""
    from sglcache import config

    settings = config.load(file, overrides)
    if check:
        click.echo(settings.model_dump_json(indent=2))
        return 0
    import logging
    import time

    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    started = time.perf_counter()
    from sglcache.server import rank

    def ready(served: rank.Rank) -> None:
        click.echo(_first_screen(served.status(), time.perf_counter() - started))
        sys.stdout.flush()

    code = rank.run(settings, ready)
    click.echo("drained and stopped" if code == 0 else f"stopped with {code}")
    return code


def _first_screen(facts: dict[str, Any], start_s: float) -> str:
    """Where everything is, how big it is, and what to do next."""
    stream, geometry = facts["stream"], facts["geometry"]
    shard_page_bytes = _page_bytes(geometry)
    sizes = {
        tier: f"{pages:,} pages of {geometry['page_size']} tokens: {pages * geometry['page_size']:,} tokens, "
        f"{_bytes(pages * shard_page_bytes * geometry['num_shards'])}, taken as it is written"
        for tier, pages in (("device", geometry["num_pages"]), ("host", geometry["host_pages"]))
        if pages
    }
    lines = [
        ("control", facts["socket"]),
        ("events", "off" if stream is None else f"{stream['endpoint']} (numbers from {facts['epoch']})"),
        ("replay", "off" if stream is None else stream["replay_endpoint"]),
        ("http", "off" if facts["http"] is None else f"{facts['http']}/health /server_info /metrics"),
        ("device", sizes["device"]),
        ("host", sizes.get("host", "off")),
    ]
    told = "\n".join(f"  {label:<8} {text}" for label, text in lines)
    tries = "\n".join(f"  {command}" for command in _things_to_try(facts))
    return (
        f"sglcache {facts['version']} is ready (in {start_s:.1f} s)\n{told}\n"
        f"\nTry it, in another terminal:\n{tries}\n\nCtrl-C drains and stops it."
    )


def _things_to_try(facts: dict[str, Any]) -> list[str]:
    """Commands that work as they stand, from the folder that this one was called from."""
    from sglcache import paths

    program = os.path.relpath(sys.argv[0]) if os.sep in sys.argv[0] else "sglcache"
    if program.endswith("__main__.py"):
        program = f"{os.path.relpath(sys.executable)} -m sglcache"
    where = "" if facts["socket"] == str(paths.socket_path()) else f" --socket {facts['socket']}"
    commands = [f"{program} replay --verify{where}", f"{program} status{where}"]
    if (stream := facts["stream"]) is not None:
        subscriber = f"{program} watch{where}"
        if Path("scripts/subscribe.py").exists():
            subscriber = f"{os.path.relpath(sys.executable)} scripts/subscribe.py"
            if stream["endpoint"] != SUBSCRIBER_DEFAULT:
                subscriber += f" --endpoint {stream['endpoint']}"
            subscriber += f" --replay-endpoint {stream['replay_endpoint']}"
        commands.insert(0, subscriber)
    return commands


def _page_bytes(geometry: dict[str, Any]) -> int:
    from sglcache.memory.geometry import Geometry

    return Geometry(**geometry).page_bytes


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


@cli.command()
@socket_option
def ping(socket: Path | None) -> int:
    """Ask the daemon for a sign of life; prints how long the answer took."""
    import time

    with _observer(socket) as client:
        started = time.perf_counter()
        client.ping()
        micros = (time.perf_counter() - started) * 1e6
    click.echo(f"ok: {micros:.0f} µs")
    return 0


@cli.command()
@socket_option
@json_option
@click.option("--prove/--no-prove", default=True, help="Check every page's place, slot by slot.  [default: prove]")
def status(socket: Path | None, as_json: bool, prove: bool) -> int:
    """What the daemon holds, for whom, and whether its books are right.

    Exits 1 if the proof finds a violation, or if commands kept overtaking it.
    """
    with _observer(socket) as client:
        facts = client.status(prove=prove)
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    else:
        _show_status(facts)
    if prove and "violations" not in facts:
        click.echo("proof     not taken: commands kept overtaking it; ask again when it is quieter", err=True)
    return proof_status(facts, prove)


def proof_status(facts: dict[str, Any], prove: bool) -> int:
    """The exit status of a status: a proof that was asked for and not given is no proof."""
    return EXIT_FAILED if prove and facts.get("violations") != [] else 0


def _show_status(facts: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    counters, stream, geometry = facts["counters"], facts["stream"], facts["geometry"]
    console.print(
        f"sglcache {facts['version']}, rank {facts['rank']}, pid {facts['pid']}: {facts['state']}, "
        f"up {facts['uptime_s']:.0f} s, epoch {facts['epoch']}"
    )
    console.print(f"control {facts['socket']}   http {facts['http'] or 'off'}", soft_wrap=True)

    pools = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    columns = ("total", "free", "fenced", "leased", "cached", "locked")
    pools.add_column("pages")
    for name in (*columns, "tokens cached"):
        pools.add_column(name, justify="right", no_wrap=True)
    for pool in facts["pools"]:
        where = pool["tier"].lower() + ("" if pool["resource"] == "full" else f" {pool['resource']}")
        counts = [f"{pool[name]:,}" for name in columns]
        pools.add_row(where, *counts, f"{pool['cached'] * geometry['page_size']:,}")
    console.print(pools)

    asked, matched = counters["request_tokens"], counters["matched_tokens"]
    rate = f"{100 * matched / asked:.1f} %" if asked else "none yet"
    console.print(f"acquires  {counters['requests']:,} granted, {counters['refused']:,} refused; hit rate {rate}")
    if stream is None:
        console.print("stream    off")
    else:
        console.print(
            f"stream    {stream['endpoint']} at number {stream['last_seq']}: {stream['batches_sent']:,} batches, "
            f"{_bytes(stream['bytes_sent'])}, {stream['subscriptions']} subscriptions; "
            f"ring {stream['ring_batches']:,} batches, {_bytes(stream['ring_bytes'])}",
            soft_wrap=True,
        )
    for session in facts["sessions"]:
        members = ", ".join(
            f"{member['role']} {member['name']} (pid {member['pid']}{'' if member['connected'] else ', gone'})"
            for member in session["members"]
        )
        ended = ", ended" if session["ended"] else ""
        console.print(f"session   {session['session']}{ended}: {session['leases']} leases; {members}", soft_wrap=True)
    for violation in facts.get("violations", ()):
        console.print(f"VIOLATION {violation}", style="bold red", soft_wrap=True)
    if "violations" in facts and not facts["violations"]:
        console.print("proof     every page is in one place, and the counts add up")


@cli.command()
@socket_option
@click.option("--endpoint", help="The stream's endpoint; by default the daemon is asked.")
@click.option("--replay-endpoint", help="Where to ask for what came before; by default the daemon is asked.")
@click.option("--topic", default="", help="Only this topic, with --endpoint.")
@click.option("--medium", type=click.Choice(["GPU", "CPU_PINNED", "DISK", "EXTERNAL"]), help="Only of this medium.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Stop after so many events.")
def watch(
    socket: Path | None,
    endpoint: str | None,
    replay_endpoint: str | None,
    topic: str,
    medium: str | None,
    limit: int | None,
) -> int:
    """Print the event stream as JSON lines, from what is cached now on.

    Each line has the batch's number, `seq`, and the event as it is on the wire. A loss that replay could not repair
    shows as an AllBlocksCleared.
    """
    from sglcache.client.mirror import Mirror

    if endpoint is None:
        with _observer(socket) as client:
            stream = client.status()["stream"]
        if stream is None:
            raise Unavailable("the daemon publishes no events (events.enabled = false)")
        endpoint, replay_endpoint, topic = stream["endpoint"], stream["replay_endpoint"], stream["topic"]
    left = limit
    with Mirror(endpoint, replay_endpoint, topic=topic) as mirror:
        for line in _event_lines(mirror, medium):
            click.echo(line)
            if left is not None and (left := left - 1) == 0:
                break
    return 0


def _event_lines(mirror: Mirror, medium: str | None) -> Iterator[str]:
    import msgspec

    for seq, _, event in mirror.follow():
        fields = msgspec.to_builtins(event)
        if medium is None or fields.get("medium", "GPU") == medium or fields["type"] == "AllBlocksCleared":
            yield json.dumps({"seq": seq, **fields})


@cli.command()
@socket_option
@click.option("--tier", type=click.Choice(["device", "host"]), help="Only this tier; by default all.")
@click.option("--wait", "wait_s", default=5.0, show_default=True, help="Seconds to wait for leases and copies to end.")
@json_option
def clear(socket: Path | None, tier: str | None, wait_s: float, as_json: bool) -> int:
    """Drop what is cached. While leases or copies are live nothing is dropped: it says what holds it, and exits 1."""
    import time

    deadline = time.monotonic() + wait_s
    with _observer(socket) as client:
        while True:
            try:
                pages = client.clear(tier)
                break
            except Busy:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
    if as_json:
        click.echo(json.dumps({"pages": pages}))
    else:
        click.echo("dropped " + ", ".join(f"{count:,} pages of {name.lower()}" for name, count in pages.items()))
    return 0


@cli.command()
@socket_option
@click.option(
    "--trace", type=click.Path(path_type=Path), metavar="FILE", help="A Mooncake trace; by default a small made-up one."
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N requests.")
@click.option("--clients", type=click.IntRange(min=1), default=2, show_default=True, help="Processes to drive it from.")
@click.option("--verify", is_flag=True, help="Check the bytes of every matched page.")
@click.option(
    "--max-output",
    type=click.IntRange(min=0),
    default=512,
    show_default=True,
    help="Cut longer outputs to so many tokens.",
)
@json_option
def replay(
    socket: Path | None,
    trace: Path | None,
    limit: int | None,
    clients: int,
    verify: bool,
    max_output: int,
    as_json: bool,
) -> int:
    """Drive a trace of requests through the daemon, as model runners would, from several processes.

    At the end a mirror built from the event stream must equal the index, tier by tier. Exits 1 if a page's bytes are
    wrong or the mirror differs.
    """
    from sglcache.bench import replay as work

    with work.trace_file(trace) as file:
        options = work.Options(file, limit, clients, verify, max_output, socket)
        with _progress(work.num_requests(file, limit)) as advance:
            report = work.replay(options, advance)
    report.trace = str(trace) if trace is not None else "made up"
    click.echo(report.to_json() if as_json else work.describe(report))
    return 0 if report.ok else EXIT_FAILED


bench = Lazy("sglcache.bench.cli:bench", name="bench", help="Measure it: one benchmark for each journey.")
cli.add_command(bench)


@cli.command()
def demo() -> int:
    """See it work: a daemon, a small model, a conversation that outlives its runner. Half a minute.

    Shows the time to the first token cold and warm, which tier was hit, and what a router hears. Exits 1 if something
    did not go as it should.
    """
    from sglcache.demo import story

    report = story.play(lambda line: click.secho(f"-- {line}", dim=True), lambda told: click.echo(story.describe(told)))
    for problem in report.problems:
        click.echo(f"error[demo]: {problem}", err=True)
    if report.ok:
        click.echo("The same answers every time, and the router's picture equals the index.")
    return 0 if report.ok else EXIT_FAILED


@cli.command()
def version() -> int:
    """Print the version."""
    import importlib.metadata

    click.echo(importlib.metadata.version("sglcache"))
    return 0


def main() -> None:
    """The console script: run, and turn errors into one line and an exit code."""
    try:
        result = cli.main(standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as exc:
        exc.show()
        result = exc.exit_code
    except (click.Abort, KeyboardInterrupt):
        result = EXIT_INTERRUPTED
    except SglcacheError as exc:
        click.echo(f"error[{exc.code}]: {exc.message}", err=True)
        result = _exit_code(exc)
    except BrokenPipeError:  # the reader of our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        result = 0
    sys.exit(result)


def _exit_code(error: SglcacheError) -> int:
    if isinstance(error, Unavailable):
        return EXIT_UNAVAILABLE
    if isinstance(error, ConfigError | BadRequest):
        return EXIT_USAGE
    return EXIT_FAILED
