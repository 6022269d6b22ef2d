"""The command line. Commands are glue: the work is in the packages, which are imported when a command runs.

What all have in common, from exit codes to `--json`, is `console`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from sglcache.console import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_SOFTWARE,
    EXIT_UNAVAILABLE,
    EXITS,
    Group,
    Number,
    complain,
    config_option,
    emit,
    exit_code,
    json_option,
    misused,
    set_option,
)
from sglcache.errors import BadRequest, Busy, SglcacheError, Unavailable, extras

if TYPE_CHECKING:
    from sglcache.client import Client

SUBSCRIBER_DEFAULT = "tcp://127.0.0.1:5557"  # of scripts/subscribe.py


class LazyCommand(click.Command):
    """A command, or a group of them, that is another module's, imported when it is called or asked about."""

    def __init__(self, target: str, **kwargs: Any) -> None:
        """`target`: module:attribute, a click command; `help` is what the list of commands shows."""
        super().__init__(**kwargs)
        self.target = target

    def loaded(self) -> click.Command:
        module, _, attribute = self.target.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command), f"{self.target} is {command!r}"
        return command

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **extra: Any) -> click.Context:
        return self.loaded().make_context(info_name, args, *more, **extra)


@click.group(
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    examples=(
        "sglcache serve --set pool.page_size=64",
        "sglcache status",
        "sglcache top",
        "sglcache doctor",
        "sglcache status --json | jq .pools",
    ),
    exits=EXITS,
)
@click.version_option(package_name="sglcache", message="%(version)s")
def cli() -> None:
    """A KV cache server: owns the KV pages beside a model runner, and tells routers where they are.

    Start one with `sglcache serve`; the other commands talk to it.
    """


socket_option = click.option(
    "--socket",
    type=click.Path(path_type=Path),
    envvar="SGLCACHE_SOCKET",
    help="The control socket of the daemon's rank 0; by default where `sglcache serve` of this user puts it.",
)


def rank_option(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(
        "--rank",
        metavar="N|DP,PP",
        help=f"A rank by its offset (pp_rank * dp_size + dp_rank), or as dp_rank,pp_rank; by default {default}.",
    )


class Target(NamedTuple):
    """A rank to talk to."""

    offset: int | None  # None: there is no supervisor to say
    socket: Path
    row: dict[str, Any]  # what the supervisor says of it
    is_one_of: int  # so many


def targets_of(socket: Path | None, rank: str | None) -> list[Target]:
    """The ranks that this host has, or the one that was asked for. BadRequest: there is no such."""
    from sglcache import paths, ranks

    found = ranks.daemons(socket)
    rows = sorted((row for daemon in found for row in daemon["ranks"]), key=lambda row: int(row["rank"]))
    there = [Target(row["rank"], Path(row["socket"]), row, len(rows)) for row in rows]
    if rank is None:
        # A socket that belongs to no supervisor's first rank is a rank's own.
        return there or [Target(None, socket or paths.socket_path(), {}, 1)]
    dp_rank, comma, pp_rank = rank.partition(",")
    if not all(part.isascii() and part.isdigit() for part in (dp_rank, *([pp_rank] if comma else []))):
        raise BadRequest(f"--rank {rank}: write an offset, such as 3, or dp_rank,pp_rank, such as 1,0")
    if not there:
        if comma:
            raise Unavailable(f"--rank {rank}: no daemon is there to say which offset that is")
        path = paths.beside(socket, int(rank)) if socket is not None else paths.socket_path(int(rank))
        return [Target(int(rank), path, {}, 1)]
    if comma:
        wanted = [it for it in there if (it.row["dp_rank"], it.row["pp_rank"]) == (int(dp_rank), int(pp_rank))]
    else:
        wanted = [it for it in there if it.offset == int(rank)]
    if not wanted:
        here = ", ".join(f"{row['rank']} ({row['dp_rank']},{row['pp_rank']})" for row in rows)
        raise BadRequest(f"--rank {rank}: this host has the ranks {here}")
    return wanted[:1]


def each_of(targets: list[Target], work: Callable[[Target], None]) -> int:
    """Do it with every rank, whatever becomes of the others; the first failure's exit code."""
    code = 0
    for target in targets:
        try:
            work(target)
        except SglcacheError as exc:
            if len(targets) == 1:
                raise
            complain(exc, rank=target.offset)
            code = code or exit_code(exc)
    return code


def observer_of(socket: Path) -> Client:
    from sglcache.client import Client

    return Client(socket, role="observer", name="sglcache")


def admin_of(socket: Path) -> Client:
    """For a command that changes something."""
    from sglcache.client import Client

    return Client(socket, role="admin", name="sglcache")


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[int], None]]:
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


@cli.command(
    examples=(
        "sglcache serve",
        "sglcache serve --config configs/dp2-pp2.toml",
        "sglcache serve --set pool.page_size=64 --log-format json",
    ),
    exits={EXIT_SOFTWARE: EXITS[EXIT_SOFTWARE], EXIT_INTERRUPTED: "128 + N: a second signal N ended it at once"},
)
@config_option("A TOML file; see configs/cpu.toml.")
@set_option()
@click.option("--verbose", "-v", count=True, help="Log who comes and goes (log.level = info); twice, to debug.")
@click.option("--log-format", type=click.Choice(["lines", "json"]), help="How to log, whatever log.format says.")
def serve(file: Path | None, overrides: tuple[str, ...], verbose: int, log_format: str | None) -> int:
    """Run the daemon: every rank of this host. SIGTERM or Ctrl-C drains and exits 0; a second one exits at once.

    `sglcache check` says beforehand what it takes.
    """
    from sglcache.server import logs

    if verbose:
        overrides = (*overrides, f"log.level={'info' if verbose == 1 else 'debug'}")
    if log_format is not None:
        overrides = (*overrides, f"log.format={log_format}")
    in_json = logs.wanted(file, overrides) == logs.JSON
    try:
        return _serve(file, overrides, in_json)
    except SglcacheError as exc:
        if not in_json:
            raise
        told: dict[str, Any] = {"code": exc.code, "facts": exc.facts, "remedy": exc.remedy}
        click.echo(logs.line("critical", "sglcache.supervisor", exc.message, **told), err=True)
        return exit_code(exc)


def _serve(file: Path | None, overrides: tuple[str, ...], in_json: bool) -> int:
    from sglcache import config

    settings = config.load(file, overrides)
    import logging
    import time

    from sglcache.server import logs

    logs.begin(logging.getLevelNamesMapping()[settings.log.level.upper()], settings.log.format)
    started = time.perf_counter()
    from sglcache.server.supervisor import Supervisor

    def say(text: str, **more: Any) -> None:
        click.echo(logs.line("info", "sglcache.supervisor", text, **more) if in_json else text)
        sys.stdout.flush()

    def ready(info: dict[str, Any]) -> None:
        start_s = time.perf_counter() - started
        if in_json:
            say("ready", start_s=round(start_s, 3), **{key: info[key] for key in ("version", "http", "ranks")})
        else:
            say(_first_screen(info, start_s))

    code = Supervisor(settings).run(ready)
    say("drained and stopped" if code == 0 else f"stopped with {code}")
    return code


def _first_screen(info: dict[str, Any], start_s: float) -> str:
    """Where everything is, how big it is, and what to do next."""
    ranks = info["ranks"]
    several = f": {len(ranks)} ranks of {info['dp_size']} replicas, {info['pp_size']} stages each"
    http = "off" if info["http"] is None else f"{info['http']}  a page for browsers; /health /server_info /metrics /api"
    if len(ranks) == 1:
        rank = ranks[0]
        stream, (sizes, *others) = rank["stream"], _sizes(rank)
        lines = [
            ("control", rank["socket"]),
            ("events", "off" if stream is None else f"{stream['endpoint']} (numbers from {rank['epoch']})"),
            ("replay", "off" if stream is None else stream["replay_endpoint"]),
            ("http", http),
            ("device", sizes["device"]),
            ("host", sizes.get("host", "off")),
        ]
        for companion, its in zip(rank["companions"], others, strict=True):
            labels = [companion["kind"], *[""] * len(its)]
            lines += [(label, f"{tier} {size}") for label, (tier, size) in zip(labels, its.items(), strict=False)]
        if (third := rank["third"]) is not None:
            lines.append(("third", f"{third['kind']}, told of as {third['medium'] or 'nothing'}"))
    else:
        lines = [("http", http)]
        for rank in ranks:
            stream, (sizes, *others) = rank["stream"], _sizes(rank)
            lines += [
                (f"rank {rank['rank']}", f"dp {rank['dp_rank']}, pp {rank['pp_rank']}: {rank['socket']}"),
                ("", "events off" if stream is None else f"{stream['endpoint']}, replay {stream['replay_endpoint']}"),
                *(("", f"{tier} {size}") for tier, size in sizes.items()),
            ]
            for companion, its in zip(rank["companions"], others, strict=True):
                lines += [("", f"{companion['kind']} {tier} {size}") for tier, size in its.items()]
    told = "\n".join(f"  {label:<8} {text}" for label, text in lines)
    tries = "\n".join(f"  {command}" for command in _things_to_try(ranks[0]))
    return (
        f"sglcache {info['version']} is ready (in {start_s:.1f} s){several if len(ranks) > 1 else ''}\n{told}\n"
        f"\nTry it, in another terminal:\n{tries}\n\nCtrl-C drains and stops it."
    )


def _sizes(rank: dict[str, Any]) -> list[dict[str, str]]:
    """How big the pools of each tier are that there is: of full KV, then of each companion."""
    from sglcache.memory.geometry import Geometry

    form = Geometry(**rank["geometry"])
    full = {"geometry": rank["geometry"], "page_bytes": form.page_bytes, "num_parts": form.num_parts}
    found = []
    for each in (full, *rank["companions"]):
        geometry, tiers = each["geometry"], {}
        places = (("device", "num_pages", geometry["num_shards"]), ("host", "host_pages", each["num_parts"]))
        for tier, key, num_pools in places:
            if pages := geometry[key]:
                count = f"{pages:,} slots: "
                if page_size := geometry.get("page_size"):
                    count = f"{pages:,} pages of {page_size} tokens: {pages * page_size:,} tokens, "
                tiers[tier] = f"{count}{_bytes(pages * each['page_bytes'] * num_pools)}, taken as it is written"
        found.append(tiers)
    return found


def _things_to_try(rank: dict[str, Any]) -> list[str]:
    """Commands that work as they stand, from the folder that this one was called from."""
    from sglcache import paths
    from sglcache.net.endpoints import parse

    here = os.path.abspath(sys.argv[0])
    program = "sglcache" if shutil.which("sglcache") == here else os.path.relpath(here)
    if program.endswith("__main__.py"):
        program = f"{os.path.relpath(sys.executable)} -m sglcache"
    where = "" if rank["socket"] == str(paths.socket_path(rank["rank"])) else f" --socket {rank['socket']}"
    commands = [f"{program} {command}{where}" for command in ("replay --verify", "status", "top")]
    if (stream := rank["stream"]) is not None:
        subscriber = f"{program} watch{where}"
        if Path("scripts/subscribe.py").exists():
            subscriber = f"{os.path.relpath(sys.executable)} scripts/subscribe.py"
            endpoint, replay_endpoint = (str(parse(stream[key]).dialled()) for key in ("endpoint", "replay_endpoint"))
            if endpoint != SUBSCRIBER_DEFAULT:
                subscriber += f" --endpoint {endpoint}"
            subscriber += f" --replay-endpoint {replay_endpoint}"
        commands.insert(0, subscriber)
    return commands


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


@cli.command(examples=("sglcache ping", "sglcache ping --rank 1"), exits={EXIT_UNAVAILABLE: "a rank can't be reached"})
@socket_option
@rank_option("all")
@json_option
def ping(socket: Path | None, rank: str | None, as_json: bool) -> int:
    """Ask the daemon for a sign of life; prints how long the answer took."""
    import time

    def work(target: Target) -> None:
        with observer_of(target.socket) as client:
            started = time.perf_counter()
            client.ping()
            micros = (time.perf_counter() - started) * 1e6
        if as_json:
            emit({"rank": target.offset or 0, "micros": round(micros, 1)})
        else:
            click.echo(f"{_label(target)}ok: {micros:.0f} µs")

    return each_of(targets_of(socket, rank), work)


def _label(target: Target) -> str:
    return f"rank {target.offset}: " if target.is_one_of > 1 else ""


@cli.command(
    examples=("sglcache status", "sglcache status --rank 1 --no-prove", "sglcache status --json | jq .counters"),
    exits={EXIT_FAILED: "a rank does not serve, or its books are wrong or not proved", EXIT_UNAVAILABLE: EXITS[69]},
)
@socket_option
@rank_option("all, in a table")
@json_option
@click.option("--prove/--no-prove", default=True, help="Check every page's place, slot by slot.  [default: prove]")
def status(socket: Path | None, rank: str | None, as_json: bool, prove: bool) -> int:
    """What the daemon holds, for whom, and whether its books are right.

    Exits 1 if a rank does not serve, if the proof finds a violation, or if commands kept overtaking it.
    """
    targets = targets_of(socket, rank)
    alone = targets[0] if len(targets) == 1 and targets[0].row.get("state", "ok") in ("ok", "draining") else None
    if alone is None:
        return _status_of_several(targets, as_json, prove)
    with observer_of(alone.socket) as client:
        facts = client.status(prove=prove)
    if as_json:
        emit(facts)
    else:
        _show_status(facts)
    if prove and "violations" not in facts and not as_json:
        click.echo("proof     not taken: commands kept overtaking it; ask again when it is quieter", err=True)
    return proof_status(facts, prove)


def _status_of_several(targets: list[Target], as_json: bool, prove: bool) -> int:
    rows = []
    for target in targets:
        row = dict(target.row)
        if row["state"] in ("ok", "draining"):  # one that hangs does not answer
            try:
                with observer_of(target.socket) as client:
                    row |= client.status(prove=prove)
            except Unavailable as exc:
                row |= {"state": "unreachable", "why": exc.message}
        rows.append(row)
    if as_json:
        emit({"ranks": rows})
    else:
        _show_ranks(rows)
    return EXIT_FAILED if any(row["state"] != "ok" or proof_status(row, prove) for row in rows) else 0


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else ""


def _show_ranks(rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from sglcache.server.watch import in_words

    console = Console(highlight=False)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    names = ("rank", "dp", "pp", "state", "pid", "up", "restarts", "device", "host", "hits", "proof")
    for name in names:
        table.add_column(name, justify="left" if name in ("state", "proof") else "right", no_wrap=True)
    notes = []
    for row in rows:
        counters = row.get("counters", {})
        pools = [pool for pool in row.get("pools", ()) if pool["resource"] == "full"]
        cached = {}
        if row["state"] != "stuck":  # what it said last is no news
            cached = {pool["tier"]: _share(pool["cached"], pool["total"]) for pool in pools}
        violations = row.get("violations")
        table.add_row(
            *(str(row[name]) for name in ("rank", "dp_rank", "pp_rank", "state")),
            str(row["pid"] or ""),
            f"{row['uptime_s']:.0f} s" if "uptime_s" in row else "",
            str(row["restarts"]),
            cached.get("DEVICE", ""),
            cached.get("HOST", ""),
            _share(counters.get("matched_tokens", 0), counters.get("request_tokens", 0)),
            "" if violations is None else "WRONG" if violations else "right",
        )
        for trouble in row.get("troubles", ()):
            notes.append(f"rank {row['rank']}: {in_words(**trouble)}")
        if "silent_s" in row:
            notes.append(f"rank {row['rank']} has given no sign of life for {row['silent_s']} s")
        if "starts_in_s" in row:
            notes.append(f"rank {row['rank']} starts again in {row['starts_in_s']} s")
        if (exit := row.get("last_exit")) is not None:
            notes.append(f"rank {row['rank']}: pid {exit['pid']} {exit['why']}")
        notes += [f"VIOLATION rank {row['rank']}: {violation}" for violation in violations or ()]
    console.print(table)
    for note in notes:
        console.print(note, soft_wrap=True)


def proof_status(facts: dict[str, Any], prove: bool) -> int:
    """The exit status of a status: a proof that was asked for and not given is no proof."""
    return EXIT_FAILED if prove and facts.get("violations") != [] else 0


def _show_status(facts: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from sglcache.client.shares import KINDS
    from sglcache.server.watch import in_words

    console = Console(highlight=False)
    counters, stream, geometry = facts["counters"], facts["stream"], facts["geometry"]
    console.print(
        f"sglcache {facts['version']}, rank {facts['rank']}, pid {facts['pid']}: {facts['state']}, "
        f"up {facts['uptime_s']:.0f} s, epoch {facts['epoch']}"
        + (f", {facts['restarts']} restarts" if facts["restarts"] else "")
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
        by_end = pool["resource"] in KINDS and KINDS[pool["resource"]].by_end  # what is cached of it has no length
        pools.add_row(where, *counts, "" if by_end else f"{pool['cached'] * geometry['page_size']:,}")
    console.print(pools)
    tiers = dict.fromkeys(pool["tier"].lower() for pool in facts["pools"])
    companions = dict.fromkeys(pool["resource"] for pool in facts["pools"] if pool["resource"] != "full")

    asked, matched = counters["request_tokens"], counters["matched_tokens"]
    rate = f"{100 * matched / asked:.1f} %" if asked else "none yet"
    console.print(f"acquires  {counters['requests']:,} granted, {counters['refused']:,} refused; hit rate {rate}")
    if matched:
        host, below = counters["host_matched_tokens"], counters["l3_matched_tokens"]
        parts = [("device", matched - host), ("host", host - below), ("third tier", below)]
        told = ", ".join(f"{count:,} on the {tier}" for tier, count in parts if count)
        console.print(f"hits      of {asked:,} tokens {matched:,}: {told}", soft_wrap=True)
    for tier, kept in (("device", "demoted"), ("host", "unbacked"))[: len(tiers)]:
        names = (f"evicted_{tier}_pages", f"{kept}_pages", f"cleared_{tier}_pages")
        evicted, moved, cleared = (counters[name] for name in names)
        pruned = counters.get(f"pruned_{tier}_pages", 0)
        more = f", {pruned:,} pruned" if pruned else ""
        corrupt = counters["corrupt_pages"] if tier == "host" else 0
        more += f", {corrupt:,} corrupt" if corrupt else ""
        console.print(
            f"removed   from the {tier}: {evicted:,} pages evicted, {moved:,} {kept}, {cleared:,} cleared{more}"
        )
    for companion in companions:
        prefix = f"{companion}_"
        own = {key.removeprefix(prefix): count for key, count in counters.items() if key.startswith(prefix) and count}
        told = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in own.items())
        console.print(f"{companion:<9} {told or 'nothing yet'}", soft_wrap=True)
    for lane in facts["copies"]:
        oldest = f", the oldest for {lane['oldest_s']:.1f} s" if lane["in_flight"] else ""
        failed = f", {lane['failed']:,} failed" if lane["failed"] else ""
        console.print(
            f"{lane['name']:<9} {lane['copies']:,} copies, {_bytes(lane['bytes'])} in {lane['seconds']:.1f} s{failed}; "
            f"{lane['in_flight']} in flight{oldest}"
        )
    for tier, there in facts["memory"].items():
        if there["ready_bytes"] < there["bytes"]:
            console.print(f"memory    {tier.lower()}: {_bytes(there['ready_bytes'])} of {_bytes(there['bytes'])} ready")
    if (scrub := facts["scrub"]) is not None:
        age = scrub["round_age_s"]
        whole = f"; whole rounds: {scrub['rounds']:,}" + (f", the last {age:.1f} s ago" if age is not None else "")
        changed = f"; {scrub['mismatches']:,} HAD CHANGED" if scrub["mismatches"] else ""
        console.print(
            f"scrub     {scrub['pages']:,} looks at host pages, {_bytes(scrub['bytes'])}{changed}{whole}",
            soft_wrap=True,
        )
    if len(tiers) > 1:
        console.print(
            f"backups   {counters['backup_pages']:,} pages to the host, {counters['backup_pages_skipped']:,} found "
            f"no room; {counters['backups_retried']:,} paths sent later, {counters['backups_failed']:,} failed",
            soft_wrap=True,
        )
    if (third := facts["third"]) is not None:
        for line in _third_lines(third, counters):
            console.print(line, soft_wrap=True)
    if stream is None:
        console.print("stream    off")
    else:
        console.print(
            f"stream    {stream['endpoint']} at number {stream['last_seq']}: {stream['batches_sent']:,} batches, "
            f"{_bytes(stream['bytes_sent'])}, {stream['subscriptions']} subscriptions; "
            f"ring {stream['ring_batches']:,} batches, {_bytes(stream['ring_bytes'])}",
            soft_wrap=True,
        )
    for trouble in facts["troubles"]:
        console.print(f"TROUBLE   {in_words(**trouble)}", style="bold yellow", soft_wrap=True)
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


def _third_lines(third: dict[str, Any], counters: dict[str, int]) -> Iterator[str]:
    """What a rank's status says of its third tier."""
    import time

    state = "ready" if third["ready"] else "reading what it holds"
    if not third["connected"]:
        state = "AWAY: all in it is a miss"
    if third["broken"]:
        state = f"BROKEN: all in it is a miss, for {third['why']}"
    size = ""
    if third["num_pages"] is not None:
        most = f" of {_bytes(third['max_bytes'])}" if third["max_bytes"] is not None else ""
        size = f"; {third['num_pages']:,} pages, {_bytes(third['num_bytes'] or 0)}{most}"
    yield f"third     {third['kind']}, {state}{size}; told of as {third['medium'] or 'nothing'}"
    words = {"behind": "behind one of these", "orphan": "without the page before them"}
    if third["others_bytes"]:
        yield f"          {_bytes(third['others_bytes'])} of these are other models' or forms' pages, which go first"
    if third["unwritable_since"] is not None:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(third["unwritable_since"]))
        yield f"          NOT WRITABLE since {since}, so nothing is stored: {third['unwritable_why']}"
    ways = (("stored", "not_stored"), ("fetched", "misses"))
    moved = [
        f"{third.get(f'{way}_pages', 0):,} pages {way} ({_bytes(third.get(f'{way}_bytes', 0))} in "
        f"{third.get(f'{way}_seconds', 0.0):.1f} s)"
        for way, _ in ways
    ]
    waits = [f"{count:,} {kind}" for kind, count in third["queued"].items() if count]
    yield f"          {', '.join(moved)}; waiting: {', '.join(waits) or 'nothing'}"
    for way, key in ways:
        reasons = [f"{count:,} {words.get(reason, reason)}" for reason, count in third.get(key, {}).items() if count]
        if way == "stored" and counters["l3_pages_skipped"]:
            later = counters["l3_stores_retried"]
            reasons.append(f"{counters['l3_pages_skipped']:,} while too many waited ({later:,} paths later)")
        if reasons:
            yield f"          not {way}: {', '.join(reasons)}"
    if third["spared"]:
        yield f"          {third['spared']:,} acquires did not ask it, for it did not answer others"
    if counters["prefetches_declined"]:
        yield f"          {counters['prefetches_declined']:,} prefetches found no room on the host"
    if third["discarded_pages"] or third["evicted_pages"]:
        yield f"          {third['evicted_pages']:,} pages evicted, {third['discarded_pages']:,} bad ones thrown away"


@cli.command(
    examples=("sglcache clear", "sglcache clear --tier disk", "sglcache clear --wait 30 --json"),
    exits={EXIT_FAILED: "leases or copies hold it; nothing was dropped", EXIT_UNAVAILABLE: EXITS[69]},
)
@socket_option
@rank_option("all")
@click.option(
    "--tier",
    type=click.Choice(["device", "host", "disk", "external"]),
    help="Only this tier; by default the device and the host. disk: the third tier's folder; external: Mooncake.",
)
@click.option(
    "--wait",
    "wait_s",
    type=Number(min=0),
    default=5.0,
    show_default=True,
    help="Seconds to wait for leases and copies to end.",
)
@json_option
def clear(socket: Path | None, rank: str | None, tier: str | None, wait_s: float, as_json: bool) -> int:
    """Drop what is cached above the third tier. While a rank's leases or copies are live it drops nothing: it says what
    holds it, exit 1.

    The third tier is dropped by its name alone, whatever else is under way.
    """
    import time

    deadline = time.monotonic() + wait_s
    dropped: dict[int, dict[str, int]] = {}

    def work(target: Target) -> None:
        with admin_of(target.socket) as client:
            while True:
                try:
                    pages = client.clear(tier)
                    break
                except Busy:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.05)
        dropped[target.offset or 0] = pages
        if not as_json:
            told = ", ".join(f"{count:,} pages of {name.lower()}" for name, count in pages.items())
            click.echo(f"{_label(target)}dropped {told}")

    targets = targets_of(socket, rank)
    code = each_of(targets, work)
    if as_json:
        several = {"ranks": [{"rank": offset, "pages": pages} for offset, pages in dropped.items()]}
        emit(several if len(targets) > 1 else {"pages": next(iter(dropped.values()), {})})
    return code


@cli.command(
    examples=(
        "sglcache replay --verify",
        "sglcache replay --trace mooncake_trace.jsonl --limit 500 --clients 4",
        "sglcache replay --kind unified --verify --json",
    ),
    exits={EXIT_FAILED: "bytes or the mirror were wrong, or the daemon refused", EXIT_UNAVAILABLE: EXITS[69]},
)
@socket_option
@rank_option("the first")
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
@click.option(
    "--rate",
    type=Number(min=0, min_open=True),
    metavar="R",
    help="So many requests a second at most; by default as fast as the clients can.",
)
@click.option(
    "--kind",
    type=click.Choice(("swa", "mamba", "unified")),
    help="Of a model with a sliding window, with states, or with both: start a small daemon for it, or take one such.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Start a daemon for it, configured so, instead of taking one that runs; may be repeated.",
)
@json_option
def replay(
    socket: Path | None,
    rank: str | None,
    trace: Path | None,
    limit: int | None,
    clients: int,
    verify: bool,
    max_output: int,
    rate: float | None,
    kind: str | None,
    settings: tuple[str, ...],
    as_json: bool,
) -> int:
    """Drive a trace of requests through the daemon, as model runners would, from several processes.

    At the end a mirror built from the event stream must equal the index, tier by tier. Exits 1 if a page's bytes are
    wrong or the mirror differs. In pools that hold less than what the trace comes back to, hits are the lower tiers':
    --set pool.num_tokens=65536, --set host.num_tokens=131072, and a third tier of [storage].

    With --kind each hit must have the bytes of exactly its prefix in every resource: all pages of full attention, the
    last ones of a window, and the state that it ends with. The hit rate is told for each alone, too.
    """
    from sglcache.bench import replay as work

    if settings and (socket is not None or rank is not None):
        raise click.UsageError("--set starts a daemon; it goes without --socket and --rank")
    named = socket is not None or rank is not None
    with work.trace_file(trace) as file, work.serving(settings, None if named else kind) as own:
        served = own or targets_of(socket, rank)[0].socket
        options = work.Options(file, limit, clients, verify, max_output, served, rate, kind)
        with progress(work.num_requests(file, limit)) as advance:
            report = work.replay(options, advance)
    report.trace = str(trace) if trace is not None else "made up"
    click.echo(report.to_json() if as_json else work.describe(report))
    return 0 if report.ok else EXIT_FAILED


LAZY = (
    ("sglcache.bench.cli:bench", "bench", "Measure it: one benchmark for each journey."),
    ("sglcache.commands.top:top", "top", "Watch it live: pools, hits, evictions, the stream, who holds what."),
    ("sglcache.commands.events:events", "events", "Print the event stream, as it comes or from a number on."),
    ("sglcache.commands.events:watch", "watch", "The same as `events --replay --json`."),
    ("sglcache.commands.doctor:doctor", "doctor", "Look for what is wrong with the machine and the daemon."),
    ("sglcache.commands.check:check", "check", "What a configuration takes, or what is wrong."),
    ("sglcache.commands.config:config", "config", "What a daemon would run with, every key."),
    ("sglcache.commands.explain:explain", "explain", "Why a prompt is a hit as far as it is, and no farther."),
    ("sglcache.commands.fsck:fsck", "fsck", "Prove that a running daemon is what it says it is."),
    ("sglcache.commands.plan:plan", "plan", "Would more memory help? Of a daemon, or of a trace."),
    ("sglcache.commands.purge:purge", "purge", "Remove the host tier that outlived its daemon."),
    ("sglcache.commands.health:health", "health", "Whether every rank serves, for probes."),
    ("sglcache.commands.sessions:sessions", "sessions", "Who is attached, and what each holds."),
    ("sglcache.commands.tenants:tenants", "tenants", "What each tenant has and may have."),
    (
        "sglcache.commands.sessions:evict_session",
        "evict-session",
        "End a session, such as that of a runner that hangs.",
    ),
    ("sglcache.commands.verify:verify", "verify", "Check that the event stream says what the index holds."),
    ("sglcache.commands.stream:announce", "announce", "Tell all that is cached anew on the event stream."),
    ("sglcache.commands.stream:keygen", "keygen", "Make a pair of CURVE keys for the event stream."),
    ("sglcache.commands.torture:torture", "torture", "Break a daemon of its own in every way, and see nothing give."),
)
for _target, _name, _help in LAZY:
    cli.add_command(LazyCommand(_target, name=_name, help=_help))


@cli.command(examples=("sglcache demo",), exits={EXIT_FAILED: "something did not go as it should"})
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


@cli.command(examples=("sglcache version", "sglcache version --json"), exits={})
@json_option
def version(as_json: bool) -> int:
    """Print the version."""
    import importlib.metadata

    number = importlib.metadata.version("sglcache")
    if as_json:
        from sglcache.compiled import FORM
        from sglcache.wire import control

        emit({"version": number, "protocol": control.PROTOCOL, "core": FORM.name})
    else:
        click.echo(number)
    return 0


def main(args: Sequence[str] | None = None) -> None:
    """The console script: run, and turn errors into one line and an exit code."""
    args = sys.argv[1:] if args is None else args
    as_json = "--json" in args
    try:
        with extras():
            result = cli.main(list(args), prog_name="sglcache", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as exc:
        if as_json:
            complain(misused(exc), as_json)
        else:
            exc.show()
        result = exc.exit_code
    except (click.Abort, KeyboardInterrupt):
        result = EXIT_INTERRUPTED
    except SglcacheError as exc:
        complain(exc, as_json)
        result = exit_code(exc)
    except BrokenPipeError:  # the reader of our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        result = 0
    sys.exit(result)
