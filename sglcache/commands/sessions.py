"""`sglcache sessions` and `sglcache evict-session`: who holds what, and how to get it back from one that hangs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from sglcache.cli import (
    Target,
    admin_of,
    each_of,
    observer_of,
    rank_option,
    socket_option,
    targets_of,
)
from sglcache.client import Client
from sglcache.console import EXIT_FAILED, EXIT_UNAVAILABLE, EXITS, Command, Number, emit, json_option
from sglcache.errors import Unavailable

POLL_S = 0.02
WHY = {
    "alive": "lives, and may still write",
    "farewell_event": "said goodbye, and the event of its last work is not done",
    "load": "a copy from the host is still being written into its pages",
}


@click.command(
    cls=Command,
    examples=("sglcache sessions", "sglcache sessions --json | jq '.sessions[].members[].pid'"),
    exits={69: "a rank can't be reached, or can't answer"},
)
@socket_option
@rank_option("all")
@json_option
def sessions(socket: Path | None, rank: str | None, as_json: bool) -> int:
    """Who is attached, what each holds, and what it is waited for.

    Of a session that ended and holds pages still: whose end they wait for. Exits 69 if a rank can't be reached.
    """
    targets = targets_of(socket, rank)
    rows: list[dict[str, Any]] = []

    def work(target: Target) -> None:
        if target.row.get("state", "ok") not in ("ok", "draining"):  # one that hangs does not answer
            raise Unavailable(_silent(target.row))
        with observer_of(target.socket) as client:
            found = client.status()["sessions"]
        rows.append({"rank": target.offset or 0, "sessions": found})
        if not as_json:
            for each in found:
                _show(each, f"rank {target.offset}, " if target.is_one_of > 1 else "")

    code = each_of(targets, work)
    if as_json:
        emit({"ranks": rows} if len(targets) > 1 else {"sessions": rows[0]["sessions"]})
    elif not code and not any(row["sessions"] for row in rows):
        click.echo("nobody is attached")
    return code and EXIT_UNAVAILABLE


def _silent(row: dict[str, Any]) -> str:
    """Of a rank that can't be asked."""
    words = f"rank {row['rank']} (pid {row['pid']}) is {row['state']}, and can't say who holds what"
    if row["state"] != "stuck":
        return f"{words}; `sglcache status` says why, ask again when it serves"
    return (
        f"{words}: no sign of life for {row['silent_s']} s; if it is stopped, let it go on (kill -CONT {row['pid']}), "
        f"else end it (kill -9 {row['pid']}): it is started again"
    )


def _show(row: dict[str, Any], where: str) -> None:
    facts = []
    if row["age_s"] is not None:
        facts.append(f"attached {_ago(row['age_s'])}, last command {_ago(row['idle_s'])}")
    if row["ended"]:
        when = "" if row["ended_s"] is None else f" {_ago(row['ended_s'])}"
        facts.append(f"ended{when}: {row['why']}")
    click.echo(f"{where}session {row['session']}: {'; '.join(facts)}")
    for member in row["members"]:
        shard = "" if member["shard"] is None else f", shard {member['shard']}"
        states = [
            word for word, so in (("socket closed", not member["connected"]), ("left", not member["alive"])) if so
        ]
        state = f", {', '.join(states)}" if states else ""
        click.echo(f"  {member['role']:<9} {member['name']} (pid {member['pid']}{shard}{state})")
    held = f"{_count(row['leases'], 'lease')}"
    if row["waiting"]:
        held += f", {_count(row['waiting'], 'request')} waiting"
    if row["pins"]:
        held += f", {_count(row['pins'], 'pin')} of {_count(row['pinned_pages'], 'page')}"
    click.echo(f"  holds     {held}{''.join(f'; {text}' for text in _pools(row['pages']))}")
    if (event := row["oldest_event"]) is not None:
        what = "its farewell" if event["ticket"] is None else f"ticket {event['ticket']}"
        shards = ", ".join(map(str, event["shards"]))
        click.echo(f"  waits     for the event of {what} on shard {shards}, for {_span(event['age_s'])}")
    for each in row["fenced_by"]:
        click.echo(f"  fenced    {_why(each)}")


def _pools(pages: list[dict[str, Any]]) -> list[str]:
    told = []
    for pool in pages:
        counts = [f"{pool[name]:,} {name}" for name in ("leased", "fenced", "locked") if pool[name]]
        if counts:
            kind = "" if pool["resource"] == "full" else f" {pool['resource']}"
            told.append(f"{pool['tier'].lower()}{kind} {', '.join(counts)}")
    return told


def _why(each: dict[str, Any]) -> str:
    if each["pid"] is None:
        return WHY[each["why"]]
    shard = f" of shard {each['shard']}" if each["role"] == "worker" else ""
    return f"{each['role']}{shard} {each['name']} (pid {each['pid']}) {WHY[each['why']]}"


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _span(seconds: float) -> str:
    return (
        f"{seconds:.1f} s"
        if seconds < 100
        else f"{seconds / 60:.0f} min"
        if seconds < 6000
        else f"{seconds / 3600:.0f} h"
    )


def _ago(seconds: float) -> str:
    return f"{_span(seconds)} ago"


@click.command(
    cls=Command,
    examples=("sglcache evict-session 7", "sglcache evict-session 7 --kill --wait 10"),
    exits={1: "pages are still fenced, or there is no such session", 69: EXITS[69]},
)
@click.argument("session", type=click.IntRange(min=0))
@socket_option
@rank_option("the first")
@click.option("--kill", is_flag=True, help="SIGKILL to its processes, so that their pages come back.")
@click.option(
    "--wait",
    "wait_s",
    type=Number(min=0),
    metavar="SECONDS",
    help="How long to wait until it holds nothing any more.  [default: 5 with --kill, else 0]",
)
@json_option
def evict_session(
    session: int, socket: Path | None, rank: str | None, kill: bool, wait_s: float | None, as_json: bool
) -> int:
    """End a session, as the death of its runner would: no command of it is served from then on.

    Its pages stay fenced while a process lives that may still write into them, unless it says goodbye; the output says
    which. With --kill the daemon sends these SIGKILL, to the very processes that attached, and the pages come back.

    Exits 0 if it holds nothing any more, 1 if pages are still fenced or there is no such session.
    """
    [target, *_] = targets_of(socket, rank)
    with admin_of(target.socket) as client:
        done = client.evict_session(session, kill=kill)
        deadline = time.monotonic() + (wait_s if wait_s is not None else 5.0 if kill else 0.0)
        while (left := _left(client, session)) is not None and time.monotonic() < deadline:
            time.sleep(POLL_S)
    pages, waits = ([], []) if left is None else (left["pages"], left["fenced_by"])
    fenced = sum(pool["fenced"] for pool in pages)
    if as_json:
        emit({**done, "fenced_pages": fenced, "pages": pages, "fenced_by": waits})
    else:
        click.echo(f"session {session} {'had ended already' if done['was_ended'] else 'is ended'}")
        if done["killed"]:
            click.echo(f"killed pid {', '.join(map(str, done['killed']))}")
        for each in done["not_killed"]:
            click.echo(f"pid {each['pid']} could not be killed: {each['why']}", err=True)
        if left is None:
            click.echo("it holds nothing any more")
        else:
            click.echo(f"it holds {'; '.join(_pools(pages))}, until these end or say goodbye:")
            for each in waits:
                click.echo(f"  {_why(each)}")
    return EXIT_FAILED if left is not None else 0


def _left(client: Client, session: int) -> dict[str, Any] | None:
    """What the daemon tells of an ended session that holds something still."""
    rows = client.status()["sessions"]
    return next((row for row in rows if row["session"] == session and row["ended"] and row["leases"]), None)
