"""`sglcache top`: the daemon, live. `frame` makes of two looks what is shown, `render` shows it; the rest is a loop.

A frame is also what `--json` prints. Rates are of the seconds between its two looks, and None where there is one look
alone, or another life of the rank in between.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from sglcache import paths, ranks
from sglcache.cli import Target, observer_of, rank_option, socket_option, targets_of
from sglcache.console import EXITS, Command, Number, emit, json_option
from sglcache.errors import BadRequest, SglcacheError, Unavailable
from sglcache.server.watch import in_words

if TYPE_CHECKING:
    from rich.console import RenderableType

    from sglcache.client import Client

Facts = dict[str, Any]

SERVING = ("ok", "draining")
REMOVED = {
    "device": {"evicted_device_pages": "evicted", "demoted_pages": "demoted", "cleared_device_pages": "cleared"},
    "host": {"evicted_host_pages": "evicted", "unbacked_pages": "unbacked", "cleared_host_pages": "cleared"},
}
MORE = {
    "device": {"pruned_device_pages": "pruned"},
    "host": {"pruned_host_pages": "pruned", "corrupt_pages": "corrupt"},
}
PARTS = ("leased", "fenced", "locked", "cached")  # of a pool's bar, from the left; the rest is free
COLOURS = {"leased": "yellow", "fenced": "red", "locked": "blue", "cached": "green"}
MARKS = {"leased": "#", "fenced": "!", "locked": "=", "cached": "-"}  # where there are no colours
SORTS = ("held", "leases", "waiting", "idle", "session")
MAX_NOTES = 5
MAX_COMMANDS = 4  # with their times
MAX_SESSIONS = 50  # that are seen, first by the order; JSON has all


BUCKET = "sglcache_command_seconds_bucket{"
LABELS = re.compile(r'(\w+)="([^"]*)"')
Buckets = dict[float, float]  # by its upper bound in seconds, how many took no longer


def buckets_of(page: str) -> dict[tuple[int, str], Buckets]:
    """What a page of metrics says of the commands' times, whatever came of them."""
    found: dict[tuple[int, str], Buckets] = {}
    for line in page.splitlines():
        if line.startswith(BUCKET):
            head, _, count = line.rpartition(" ")
            labels = dict(LABELS.findall(head))
            its = found.setdefault((int(labels["rank"]), labels["command"]), {})
            bound = float(labels["le"])
            its[bound] = its.get(bound, 0.0) + float(count)
    return found


def quantile(buckets: Buckets, share: float) -> float | None:
    """Seconds that this share of them took at most, as Prometheus reckons: evenly within a bucket; None of none."""
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if not total:
        return None
    low = below = 0.0
    for bound in bounds:
        if buckets[bound] >= share * total:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (share * total - below) / (buckets[bound] - below)
        low, below = bound, buckets[bound]
    return low


class Look(NamedTuple):
    """What was seen at once."""

    at: float  # seconds, of a clock that runs on
    ranks: Sequence[Facts] = ()  # the supervisor's row of each, and over it the rank's status, where it gives one
    why: str | None = None  # there is no daemon to be seen
    commands: Mapping[tuple[int, str], Buckets] = {}  # by rank and command, how long they took


def frame(before: Look | None, now: Look) -> Facts:
    """What two looks come to."""
    seconds = now.at - before.at if before is not None else None
    earlier = {row["rank"]: row for row in before.ranks} if before is not None else {}
    told = [_rank(earlier.get(row["rank"]), row, seconds) for row in now.ranks]
    for rank, row in zip(told, now.ranks, strict=True):
        same = before is not None and earlier.get(row["rank"], {}).get("epoch") == row.get("epoch")
        rank["commands"] = _commands(before, now, row["rank"]) if before is not None and same else {}
    state = "away" if now.why is not None else "ok"
    if state == "ok" and any(rank["state"] != "ok" or rank["troubles"] for rank in told):
        state = "degraded"
    return {
        "state": state,
        "why": now.why,
        "seconds": None if seconds is None else round(seconds, 3),
        "news": _news(before, now),
        "ranks": told,
    }


def _news(before: Look | None, now: Look) -> list[str]:
    """What became of the daemon between the looks."""
    if before is None:
        return []
    if before.why is None and now.why is not None:
        return [f"the daemon went away: {now.why}"]
    if before.why is not None and now.why is None:
        return ["the daemon is back"]
    lives = {row["rank"]: row.get("epoch") for row in before.ranks}
    return [
        f"rank {row['rank']} was started again"
        for row in now.ranks
        if row.get("epoch") is not None and lives.get(row["rank"], row["epoch"]) not in (None, row["epoch"])
    ]


def _rank(before: Facts | None, row: Facts, seconds: float | None) -> Facts:
    told = {name: row.get(name) for name in ("rank", "dp_rank", "pp_rank", "state", "pid", "uptime_s", "restarts")}
    counters = row.get("counters")
    silent = [f"no sign of life for {row['silent_s']} s"] if "silent_s" in row else []
    if "starts_in_s" in row:
        silent.append(f"starts again in {row['starts_in_s']} s: {(row.get('last_exit') or {}).get('why', 'it ended')}")
    told["troubles"] = silent + [in_words(**trouble) for trouble in row.get("troubles", ())]
    if counters is None:
        return {**told, "pools": []}
    if before is None or before.get("counters") is None or before.get("epoch") != row.get("epoch"):
        before = None
    was = before["counters"] if before is not None else {}

    def rate(name: str, now: Mapping[str, Any] = counters, then: Mapping[str, Any] = was) -> float | None:
        if before is None or not seconds or name not in now:
            return None
        return round(float(now[name] - then.get(name, 0)) / seconds, 3)

    asked, matched = (counters[name] - was.get(name, 0) for name in ("request_tokens", "matched_tokens"))
    stream, old = row.get("stream"), (before or {}).get("stream") or {}
    lanes = {lane["name"]: lane for lane in (before or {}).get("copies", ())}
    return {
        **told,
        "pools": row["pools"],
        "hit_rate": _share(counters["matched_tokens"], counters["request_tokens"]),
        "hit_rate_now": _share(matched, asked) if before is not None else None,
        "requests_per_s": rate("requests"),
        "refused_per_s": rate("refused"),
        "tokens_per_s": rate("request_tokens"),
        "removed_per_s": {
            tier: {reason: rate(name) for name, reason in {**names, **MORE[tier]}.items() if name in counters}
            for tier, names in REMOVED.items()
            if any(pool["tier"].lower() == tier for pool in row["pools"])
        },
        "stream": None
        if stream is None
        else {
            "last_seq": stream["last_seq"],
            "subscriptions": stream["subscriptions"],
            "batches_per_s": rate("batches_sent", stream, old),
            "bytes_per_s": rate("bytes_sent", stream, old),
        },
        "leases": row["gauges"]["num_leases"],
        "waiting": row["gauges"]["num_waiting"],
        "copies": [
            {
                "name": lane["name"],
                "in_flight": lane["in_flight"],
                "oldest_s": lane["oldest_s"] if lane["in_flight"] else None,
                "failed": lane["failed"],
                "bytes_per_s": rate("bytes", lane, lanes.get(lane["name"], {})),
            }
            for lane in row["copies"]
        ],
        "sessions": [_session(session) for session in row["sessions"]],
        "tenants": row["tenants"],
    }


def _commands(before: Look, now: Look, rank: int) -> Facts:
    """How many a second, and how long they took, between the looks."""
    told = {}
    for (whose, command), buckets in now.commands.items():
        was = before.commands.get((whose, command), {})
        between = {bound: count - was.get(bound, 0.0) for bound, count in buckets.items()}
        if whose == rank and (count := between.get(math.inf, 0.0)) > 0:
            p50, p99 = (quantile(between, share) for share in (0.5, 0.99))
            told[command] = {"per_s": round(count / (now.at - before.at), 3), "p50_s": p50, "p99_s": p99}
    return told


def _session(row: Facts) -> Facts:
    members = [f"{member['name']} ({member['pid']})" for member in row["members"]]
    return {
        "session": row["session"],
        "ended": row["ended"],
        "members": members,
        "held": sum(pool["leased"] + pool["fenced"] for pool in row["pages"]),
        "fenced": sum(pool["fenced"] for pool in row["pages"]),
        **{name: row[name] for name in ("leases", "waiting", "pinned_pages", "idle_s")},
    }


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def in_order(sessions: Sequence[Facts], key: str) -> list[Facts]:
    """The most of it first; by `session` the oldest."""
    if key == "session":
        return sorted(sessions, key=lambda row: row["session"])
    name = "idle_s" if key == "idle" else key
    return sorted(sessions, key=lambda row: (-(row[name] or 0), row["session"]))


# -- seen ---------------------------------------------------------------------------------------------


class View(NamedTuple):
    """How it is to be seen, as the keys choose."""

    sort: str = SORTS[0]
    rank: int = 0  # of the frame's ranks, the one that is shown whole
    paused: bool = False
    help: bool = False
    notes: Sequence[str] = ()
    keys: bool = True

    def pressed(self, key: str, num_ranks: int) -> View | None:
        """After this key; None: it is the end."""
        match key:
            case "q" | "\x03":
                return None
            case "s":
                return self._replace(sort=SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)])
            case "r":
                return self._replace(rank=(self.rank + 1) % max(1, num_ranks))
            case "p":
                return self._replace(paused=not self.paused)
            case "?" | "h":
                return self._replace(help=not self.help)
        return self


HELP = "q ends, s sorts the sessions by the next key, r shows the next rank, p pauses, ? this"


def render(told: Facts, view: View, width: int) -> RenderableType:
    """One frame, so wide."""
    from rich.console import Group
    from rich.text import Text

    ranks = told["ranks"]
    colour = {"ok": "green", "degraded": "bold yellow"}.get(told["state"], "bold red")
    head = Text("sglcache ")
    head.append(told["state"], colour)
    head.append(f"   {len(ranks)} rank{'s' if len(ranks) != 1 else ''}")
    if told["seconds"] is not None:
        head.append(f", over {told['seconds']:.1f} s")
    if view.paused:
        head.append("   PAUSED", "bold reverse")
    lines: list[RenderableType] = [head]
    if told["why"] is not None:
        lines.append(Text(f"no daemon: {told['why']}; waiting for it", "bold red"))
    lines += [Text(note, "yellow") for note in view.notes]
    if len(ranks) > 1:
        lines.append(_table_of_ranks(ranks, view.rank % len(ranks)))
    for rank in ranks:
        lines += [Text(f"rank {rank['rank']}: {trouble}", "bold red") for trouble in rank["troubles"]]
        if rank["state"] not in SERVING:
            lines.append(Text(f"rank {rank['rank']} is {rank['state']}", "bold red"))
    if ranks:
        lines += _one(ranks[view.rank % len(ranks)], view, width)
    if view.help:
        lines.append(Text(f"\n{HELP}\n{_legend()}", "dim"))
    elif view.keys:
        lines.append(Text("\nq end  s sort  r rank  p pause  ? help", "dim"))
    return Group(*lines)


def _legend() -> str:
    return "pools: " + ", ".join(f"{MARKS[part]} {part}" for part in PARTS) + ", the rest is free"


def _table_of_ranks(ranks: Sequence[Facts], shown: int) -> RenderableType:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("rank", "dp", "pp", "state", "pid", "requests/s", "hits now", "hits", "device", "host", "stream"):
        table.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
    for number, rank in enumerate(ranks):
        full = {pool["tier"]: pool for pool in rank["pools"] if pool["resource"] == "full"}
        used = [
            _percent(_share(pool["total"] - pool["free"], pool["total"])) if (pool := full.get(tier)) else ""
            for tier in ("DEVICE", "HOST")
        ]
        table.add_row(
            *(str(rank[name]) for name in ("rank", "dp_rank", "pp_rank")),
            rank["state"],
            str(rank["pid"] or ""),
            _number(rank.get("requests_per_s")),
            _percent(rank.get("hit_rate_now")),
            _percent(rank.get("hit_rate")),
            *used,
            str((rank.get("stream") or {}).get("last_seq", "")),
            style="bold" if number == shown else None,
        )
    return table


def _one(rank: Facts, view: View, width: int) -> Iterator[RenderableType]:
    """A rank, whole."""
    from rich.text import Text

    up = "" if rank["uptime_s"] is None else f"   up {_span(rank['uptime_s'])}"
    again = f", {rank['restarts']} restarts" if rank["restarts"] else ""
    yield Text(f"rank {rank['rank']}   pid {rank['pid'] or '-'}{up}{again}", "bold")
    if "hit_rate" not in rank:
        return
    yield from (_bar(pool, width) for pool in rank["pools"])
    yield Text(
        f"hits      {_percent(rank['hit_rate_now']) or '-'} now, {_percent(rank['hit_rate']) or '-'} since the start   "
        f"requests {_number(rank['requests_per_s'])}/s, {_number(rank['refused_per_s'])}/s refused; "
        f"{_number(rank['tokens_per_s'])} tokens/s"
    )
    for command, its in sorted(rank["commands"].items(), key=lambda item: -item[1]["per_s"])[:MAX_COMMANDS]:
        times = ", ".join(f"{name} {_micros(its[f'{name}_s'])}" for name in ("p50", "p99"))
        yield Text(f"{command:<9} {_number(its['per_s'])}/s, {times}")
    for tier, reasons in rank["removed_per_s"].items():
        busy = [f"{_number(count)}/s {reason}" for reason, count in reasons.items() if count]
        quiet = "nothing" if any(count is not None for count in reasons.values()) else "-"
        yield Text(f"removed   from the {tier}: {', '.join(busy) or quiet}")
    if (stream := rank["stream"]) is None:
        yield Text("stream    off")
    else:
        yield Text(
            f"stream    #{stream['last_seq']}   {_number(stream['batches_per_s'])} batches/s, "
            f"{_bytes(stream['bytes_per_s'])}/s   {stream['subscriptions']} subscriptions"
        )
    for lane in rank["copies"]:
        if lane["in_flight"] or lane["failed"] or lane["bytes_per_s"]:
            age = f", the oldest for {lane['oldest_s']:.1f} s" if lane["in_flight"] else ""
            failed = f", {lane['failed']:,} failed" if lane["failed"] else ""
            yield Text(
                f"{lane['name']:<9} {_bytes(lane['bytes_per_s'])}/s, {lane['in_flight']} in flight{age}{failed}",
                "red" if lane["failed"] else "",
            )
    yield _sessions(rank, view)
    if rank["tenants"]:
        yield _tenants(rank["tenants"])


def _bar(pool: Facts, width: int) -> RenderableType:
    from rich.text import Text

    name = pool["tier"].lower() + ("" if pool["resource"] == "full" else f" {pool['resource']}")
    locked = pool["locked"]
    counts = {**{part: pool[part] for part in PARTS}, "cached": pool["cached"] - locked}
    room = max(10, min(60, width - 50))
    text = Text(f"{name:<14}[")
    taken, ends = 0, 0.0
    for part in PARTS:
        ends += counts[part] * room / pool["total"]
        length = max(round(ends) - taken, 1 if counts[part] and taken < room else 0)
        length = min(length, room - taken)
        text.append(MARKS[part] * length, COLOURS[part])
        taken += length
    used = pool["total"] - pool["free"]
    text.append(" " * (room - taken) + f"] {100 * used / pool['total']:5.1f} %  {used:,} of {pool['total']:,}")
    return text


def _sessions(rank: Facts, view: View) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if not rank["sessions"]:
        return Text("sessions  none")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    names = ("session", "leases", "waiting", "held", "fenced", "pinned", "idle", "members")
    for name in names:
        mark = "*" if name == view.sort else ""
        table.add_column(name + mark, justify="left" if name == "members" else "right", no_wrap=True)
    for row in in_order(rank["sessions"], view.sort)[:MAX_SESSIONS]:
        idle = "" if row["idle_s"] is None else _span(row["idle_s"])
        counts = [f"{row[name]:,}" for name in ("leases", "waiting", "held", "fenced", "pinned_pages")]
        members = ", ".join(row["members"]) + (" ended" if row["ended"] else "")
        table.add_row(str(row["session"]), *counts, idle, members, style="yellow" if row["fenced"] else None)
    if (left := len(rank["sessions"]) - MAX_SESSIONS) > 0:
        table.caption = f"and {left:,} more"
    return table


def _tenants(tenants: Sequence[Facts]) -> RenderableType:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    names = ("floor", "ceiling", "charged", "locked", "taken", "broken")
    for name in ("tenant", "tier", *names):
        table.add_column(name, justify="left" if name in ("tenant", "tier") else "right", no_wrap=True)
    for row in tenants:
        counts = ["" if row[name] is None else f"{row[name]:,}" for name in names]
        over = row["ceiling"] is not None and row["charged"] >= row["ceiling"]
        table.add_row(row["tenant"], row["tier"].lower(), *counts, style="yellow" if over else None)
    return table


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:,.1f}"


def _micros(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} µs" if seconds < 0.01 else f"{seconds * 1e3:,.0f} ms"


def _bytes(count: float | None) -> str:
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def _span(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"


# -- looking ------------------------------------------------------------------------------------------


class Looking:
    """Asks the daemon, over connections that stay; what is away is asked for anew at the next look."""

    def __init__(self, socket: Path | None, rank: str | None) -> None:
        self._socket, self._rank = socket, rank
        self._clients: dict[Path, Client] = {}

    def look(self) -> Look:
        """BadRequest: there is no such rank. What else goes wrong is what is seen."""
        try:
            targets = targets_of(self._socket, self._rank)
            return Look(time.monotonic(), [self._row(target) for target in targets], commands=self._times())
        except BadRequest:
            raise
        except SglcacheError as exc:
            return Look(time.monotonic(), why=exc.message.partition("; ")[0])

    def _times(self) -> dict[tuple[int, str], Buckets]:
        found: dict[tuple[int, str], Buckets] = {}
        for path in paths.supervisors(self._socket):
            with contextlib.suppress(Unavailable):
                found |= buckets_of(ranks.ask_metrics(path))
        return found

    def _row(self, target: Target) -> Facts:
        row = {"rank": target.offset or 0, "dp_rank": 0, "pp_rank": 0, "pid": None, "restarts": 0, **target.row}
        if row.get("state", "ok") not in SERVING:  # one that hangs does not answer
            return row
        try:
            client = self._clients.get(target.socket)
            if client is None:
                client = self._clients[target.socket] = observer_of(target.socket)
            return {**row, **client.status()}
        except SglcacheError as exc:
            self._drop(target.socket)
            if not target.row:  # no supervisor says that there is one
                raise
            return {**row, "state": "unreachable", "why": exc.message}

    def _drop(self, socket: Path) -> None:
        if (client := self._clients.pop(socket, None)) is not None:
            client.close()

    def close(self) -> None:
        for socket in list(self._clients):
            self._drop(socket)


@contextlib.contextmanager
def _keyboard() -> Iterator[int | None]:
    """The terminal's keys one by one, unechoed; None where there is no terminal to press them on."""
    if not sys.stdin.isatty():
        yield None
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _key(fd: int | None, within_s: float) -> str:
    """The next key; empty: none was pressed in time."""
    if fd is None:
        time.sleep(within_s)
        return ""
    ready, _, _ = select.select([fd], [], [], within_s)
    return os.read(fd, 1).decode(errors="replace") if ready else ""


def _live(looking: Looking, first: Look, interval_s: float) -> None:
    """Until somebody ends it."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    with _keyboard() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        view = View(keys=keys is not None)
        before, told = first, frame(None, first)
        while True:
            live.update(render(told, view, console.width), refresh=True)
            next_at = time.monotonic() + interval_s
            while (left := next_at - time.monotonic()) > 0:
                if not (key := _key(keys, left)):
                    continue
                after = view.pressed(key, len(told["ranks"]))
                if after is None:
                    return
                view = after
                live.update(render(told, view, console.width), refresh=True)
            if view.paused:
                continue
            now = looking.look()
            told = frame(before, now)
            notes = [f"{time.strftime('%H:%M:%S')} {news}" for news in told["news"]]
            view = view._replace(notes=[*view.notes, *notes][-MAX_NOTES:])
            before = now


@click.command(
    cls=Command,
    examples=(
        "sglcache top",
        "sglcache top --interval 5 --rank 1",
        "sglcache top --once",
        "sglcache top --json --count 10 | jq '.ranks[0].hit_rate_now'",
    ),
    exits={0: "it was ended, or --count frames were told", 69: EXITS[69]},
)
@socket_option
@rank_option("all")
@click.option(
    "--interval",
    "interval_s",
    type=Number(min=0.1, max=3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Between two looks.",
)
@click.option("--once", is_flag=True, help="One frame, after one interval; so it is where the output is no terminal.")
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="End after N frames.")
@json_option
def top(socket: Path | None, rank: str | None, interval_s: float, once: bool, count: int | None, as_json: bool) -> int:
    """Watch the daemon live: pools, hits, evictions, the stream, copies, sessions, tenants, and what is in trouble.

    It outlives a restart of the daemon, and says so. Keys: q ends, s sorts the sessions, r shows the next rank, p
    pauses, ? helps. With --json a frame is a line, one each interval.
    """
    looking = Looking(socket, rank)
    with contextlib.closing(looking):
        targets = targets_of(socket, rank)
        if not targets[0].row:  # nobody is there, or a rank without a supervisor: then it is asked, or this is the end
            observer_of(targets[0].socket).close()
        before = looking.look()
        if not as_json and not once and count is None and sys.stdout.isatty():
            _live(looking, before, interval_s)
            return 0
        left = 1 if once or not (as_json or count) else count
        while left is None or left > 0:
            time.sleep(interval_s)
            now = looking.look()
            told = frame(before, now)
            if as_json:
                emit({"at": round(time.time(), 3), **told})
            else:
                _print(told)
            before = now
            left = None if left is None else left - 1
    return 0


def _print(told: Facts) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(render(told, View(keys=False, notes=told["news"]), console.width))
