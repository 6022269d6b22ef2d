"""`sglcache top`: what two looks come to, how it is seen, and the whole of it in a terminal beside a real daemon."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sglcache import cli
from sglcache.commands import top
from sglcache.commands.top import Look, View, frame, render
from sglcache.testing.daemon import Daemon

POOL = {
    "resource": "full",
    "tier": "DEVICE",
    "total": 100,
    "free": 40,
    "fenced": 5,
    "leased": 5,
    "cached": 50,
    "locked": 10,
}
SESSION = {
    "session": 3, "ended": False, "leases": 2, "waiting": 0, "pinned_pages": 0, "idle_s": 1.5,
    "members": [{"name": "llama", "pid": 77}],
    "pages": [{"resource": "full", "tier": "DEVICE", "leased": 5, "fenced": 0, "locked": 10}],
}  # fmt: skip


def row(**more: Any) -> dict[str, Any]:
    counters = dict.fromkeys(
        ("requests", "refused", "request_tokens", "matched_tokens", "evicted_device_pages", "demoted_pages",
         "cleared_device_pages"), 0,
    )  # fmt: skip
    return {
        "rank": 0, "dp_rank": 0, "pp_rank": 0, "state": "ok", "pid": 11, "uptime_s": 5.0, "restarts": 0, "epoch": 1,
        "counters": {**counters, **more.pop("counters", {})},
        "gauges": {"num_leases": 2, "num_waiting": 0},
        "pools": [POOL],
        "stream": {"last_seq": 9, "subscriptions": 1, "batches_sent": more.pop("batches", 0), "bytes_sent": 0},
        "copies": [{"name": "backup", "in_flight": 0, "oldest_s": 0.0, "failed": 0, "bytes": 0}],
        "sessions": [SESSION], "tenants": [], "troubles": [],
        **more,
    }  # fmt: skip


def text(told: dict[str, Any], view: View | None = None, width: int = 100) -> str:
    console = Console(record=True, width=width, file=open(os.devnull, "w"), force_terminal=False)  # noqa: SIM115
    with console.file:
        console.print(render(told, view or View(), width))
    return console.export_text()


THEN = Look(10.0, [row(counters={"requests": 100, "request_tokens": 1000, "matched_tokens": 100}, batches=4)])
NOW = Look(
    12.0,
    [
        row(
            counters={"requests": 110, "request_tokens": 1200, "matched_tokens": 250, "demoted_pages": 8},
            batches=10,
            copies=[{"name": "backup", "in_flight": 2, "oldest_s": 3.25, "failed": 0, "bytes": 4096}],
        )
    ],
)


def test_rates_are_those_between_the_looks() -> None:
    [rank] = frame(THEN, NOW)["ranks"]
    assert (rank["requests_per_s"], rank["tokens_per_s"], rank["refused_per_s"]) == (5.0, 100.0, 0.0)
    assert (rank["hit_rate_now"], rank["hit_rate"]) == (0.75, round(250 / 1200, 4))
    assert rank["removed_per_s"] == {"device": {"evicted": 0.0, "demoted": 4.0, "cleared": 0.0}}
    assert rank["stream"]["batches_per_s"] == 3.0
    assert rank["copies"] == [{"name": "backup", "in_flight": 2, "oldest_s": 3.25, "failed": 0, "bytes_per_s": 2048.0}]


PAGE = """# TYPE sglcache_command_seconds histogram
sglcache_command_seconds_bucket{command="acquire",le="0.001",outcome="ok",rank="0"} %d
sglcache_command_seconds_bucket{command="acquire",le="0.002",outcome="ok",rank="0"} %d
sglcache_command_seconds_bucket{command="acquire",le="+Inf",outcome="ok",rank="0"} %d
sglcache_command_seconds_bucket{command="acquire",le="+Inf",outcome="busy",rank="0"} 0.0
sglcache_command_seconds_count{command="acquire",outcome="ok",rank="0"} 9.0
"""


def test_how_long_commands_took_is_of_those_between_the_looks() -> None:
    then, now = (look._replace(commands=top.buckets_of(PAGE % counts)) for look, counts in (
        (THEN, (50, 50, 50)), (NOW, (130, 150, 150)),
    ))  # fmt: skip
    told = frame(then, now)["ranks"][0]["commands"]
    assert told == {"acquire": {"per_s": 50.0, "p50_s": pytest.approx(0.000625), "p99_s": pytest.approx(0.00195)}}
    assert "acquire   50.0/s, p50 625 µs, p99 1,950 µs" in text(frame(then, now))
    assert frame(then, now._replace(ranks=[row(epoch=2)]))["ranks"][0]["commands"] == {}
    assert frame(None, now)["ranks"][0]["commands"] == {}


def test_a_quantile_beyond_the_last_bound_is_that_bound_and_of_nothing_there_is_none() -> None:
    assert top.quantile({0.1: 1.0, float("inf"): 10.0}, 0.99) == 0.1
    assert top.quantile({0.1: 0.0, float("inf"): 0.0}, 0.5) is None
    assert top.quantile({}, 0.5) is None


def test_of_one_look_or_of_two_lives_there_are_no_rates() -> None:
    for told in (frame(None, NOW), frame(THEN, Look(12.0, [row(epoch=2)]))):
        [rank] = told["ranks"]
        assert rank["requests_per_s"] is rank["hit_rate_now"] is rank["stream"]["batches_per_s"] is None
        json.dumps(told)


def test_what_became_of_the_daemon_is_news() -> None:
    away = Look(13.0, why="no daemon at /x")
    assert frame(NOW, away)["news"] == ["the daemon went away: no daemon at /x"]
    assert frame(NOW, away)["state"] == "away"
    assert frame(away, NOW)["news"] == ["the daemon is back"]
    assert frame(NOW, Look(13.0, [row(epoch=2)]))["news"] == ["rank 0 was started again"]
    starting = {key: value for key, value in row(state="waiting", starts_in_s=0.2).items() if key in ("rank", "state")}
    gone = Look(13.0, [{"dp_rank": 0, "pp_rank": 0, "pid": None, "restarts": 0, **starting}])
    assert frame(NOW, gone)["state"] == "degraded"
    assert frame(gone, NOW)["news"] == []


def test_what_is_seen_has_all_of_it() -> None:
    seen = text(frame(THEN, NOW))
    assert "device        [" in seen
    assert "60.0 %  60 of 100" in seen
    assert "75.0 % now, 20.8 % since the start   requests 5.0/s" in seen
    assert "from the device: 4.0/s demoted" in seen
    assert "#9   3.0 batches/s" in seen
    assert "2 in flight, the oldest for 3.2 s" in seen
    assert re.search(r"3 +2 +0 +5 +0 +0 +2 s  llama \(77\)", seen)


def test_a_bar_is_as_long_as_its_pool_is_full_and_the_least_part_of_it_is_seen() -> None:
    bar = str(
        top._bar({**POOL, "total": 1000, "free": 499, "leased": 1, "fenced": 0, "cached": 500, "locked": 100}, 90)
    )
    inside = bar.partition("[")[2].partition("]")[0]
    assert (len(inside), inside.count("#"), inside.count(" ")) == (40, 1, 20)
    assert inside.count("=") == pytest.approx(4, abs=1)
    full = str(top._bar({**POOL, "total": 7, "free": 0, "leased": 1, "fenced": 1, "cached": 5, "locked": 4}, 10))
    assert len(full.partition("[")[2].partition("]")[0]) == 10


def test_troubles_and_ranks_that_do_not_serve_are_told() -> None:
    stuck = {**row(), "rank": 1, "state": "stuck", "silent_s": 3.1}
    del stuck["counters"]
    late = row(troubles=[{"what": "backup", "age_s": 12.0, "facts": {"in_flight": 1}}])
    told = frame(None, Look(1.0, [late, stuck]))
    assert told["state"] == "degraded"
    seen = text(told)
    assert "rank 0: a copy to the host is in flight for 12.0 s" in seen
    assert "rank 1: no sign of life for 3.1 s" in seen
    assert "rank 1 is stuck" in seen
    assert "rank 1   pid" in text(told, View(rank=1))
    assert "no daemon: it ended; waiting for it" in text(frame(None, Look(1.0, why="it ended")))


def test_keys_sort_turn_pause_help_and_end() -> None:
    view = View()
    assert view.pressed("s", 1) == View(sort="leases")
    assert view.pressed("r", 2) == View(rank=1)
    assert View(rank=1).pressed("r", 2) == view
    assert view.pressed("p", 1) == View(paused=True)
    assert view.pressed("x", 1) == view
    assert view.pressed("q", 1) is None
    assert "PAUSED" in text(frame(THEN, NOW), View(paused=True))
    assert top.HELP in text(frame(THEN, NOW), View(help=True), 200)


def test_sessions_are_in_the_order_of_the_key() -> None:
    a, b = {**SESSION, "session": 1, "idle_s": 9.0, "leases": 1}, {**SESSION, "session": 2, "idle_s": None, "leases": 5}
    rows = [top._session(each) for each in (a, b)]
    assert [each["session"] for each in top.in_order(rows, "leases")] == [2, 1]
    assert [each["session"] for each in top.in_order(rows, "idle")] == [1, 2]
    assert [each["session"] for each in top.in_order(deepcopy(rows[::-1]), "session")] == [1, 2]


def test_of_many_sessions_the_first_are_seen_and_the_others_counted() -> None:
    many = [{**SESSION, "session": number, "leases": number} for number in range(60)]
    seen = text(frame(THEN, Look(12.0, [row(sessions=many)])), View(sort="leases"))
    assert "and 10 more" in seen
    assert seen.count("llama (77)") == 50


def test_where_it_is_no_terminal_it_prints_one_frame(
    lend: Callable[..., Daemon], capsys: pytest.CaptureFixture[str]
) -> None:
    socket = str(lend().socket)
    for more, lines in (([], None), (["--json", "--count", "2"], 2)):
        with pytest.raises(SystemExit) as ended:
            cli.main(["top", "--socket", socket, "--interval", "0.1", *more])
        told = capsys.readouterr()
        assert ended.value.code == 0, told.err
        if lines is None:
            assert "device        [" in told.out
            assert "\x1b" not in told.out
        else:
            frames = [json.loads(line) for line in told.out.splitlines()]
            assert len(frames) == lines
            assert {"at", "state", "ranks", "news"} <= set(frames[0])
            assert frames[1]["ranks"][0]["requests_per_s"] == 0.0


class Terminal:
    """A command in a terminal, and what it shows."""

    def __init__(self, *arguments: str) -> None:
        self._fd, theirs = pty.openpty()
        self.shown = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sglcache", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "50"},
            start_new_session=True,
        )
        os.close(theirs)

    def until(self, words: str, within_s: float = 30.0) -> None:
        """Wait until it is shown from now on."""
        seen, deadline = "", time.monotonic() + within_s
        while words not in seen:
            ready, _, _ = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{words!r} was not shown: {seen[-4000:]}"
            seen += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", os.read(self._fd, 65536).decode(errors="replace"))
        self.shown += seen

    def press(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


@pytest.mark.daemons
def test_in_a_terminal_it_is_live_obeys_its_keys_and_outlives_the_daemon(tmp_path: Path) -> None:
    with Daemon(tmp_path, timing={"first_wait": 0.1}) as daemon:
        terminal = Terminal("top", "--socket", str(daemon.socket), "--interval", "0.1")
        try:
            with daemon.client(name="llama") as client, client.acquire(range(40)) as lease:
                terminal.until("llama (")
                lease.commit()
            terminal.press("?")
            terminal.until("s sorts the sessions")
            terminal.press("?s")
            terminal.until("leases*")
            terminal.press("p")
            terminal.until("PAUSED")
            terminal.press("p")
            pid = daemon.kill_rank(signal.SIGKILL)
            daemon.next_life(pid)
            terminal.until("rank 0 was started again")
            terminal.until("device        [")
            terminal.press("q")
            assert terminal.process.wait(10) == 0
        finally:
            terminal.close()
