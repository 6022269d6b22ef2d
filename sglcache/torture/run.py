"""A torture from its start to its report: the daemon, its runners, the faults at their moments, and the checks.

The loop here starts the runners again that ended, begins the faults that are due, each in a thread, and sees to it that
everybody makes progress. Every `QUIET_EVERY_S` there is a quiet point: no fault goes on, every runner gives everything
back and leaves, and then nothing may be held, lost or leaked. The first thing that is not as it should be ends it.

An excuse is a fault that goes on, or did a moment ago. Who stands still, or loses its session, without one has found a
bug.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from sglcache.client import Client
from sglcache.client.dynamo import Indexer
from sglcache.config import parse
from sglcache.errors import SglcacheError, Unavailable
from sglcache.testing.cards import Port
from sglcache.torture import daemon as daemons
from sglcache.torture.audit import Auditor, Leaks, what_differs
from sglcache.torture.board import Action, Board, Common, Point, Row, Word
from sglcache.torture.daemon import Daemon
from sglcache.torture.faults import BY_NAME, Fault
from sglcache.torture.master import Master
from sglcache.torture.rank import LET_FAIL
from sglcache.torture.report import Report
from sglcache.torture.runner import Seat, runner_main, scheduler_main, worker_main
from sglcache.torture.schedule import Done, Planned, plan, written

SECONDS = 90.0
SCHEDULE = "schedule.json"  # in the folder
QUIET_EVERY_S = 20.0
STUCK_S = 10.0  # without progress and without an excuse
GRACE_S = 3.0  # that a fault is an excuse after its end
FORGET_S = 15.0  # after a restart, in which a reader may give up a replay of the life before
LAG_S = 6.0  # after which the next fault is due, however few operations there were
MOST_FAULTS = 6  # at a time
TICK_S = 0.02
REST_S = 10.0
LEAVE_S = 20.0  # for runners to leave
INDEXER_S = 40.0  # for Dynamo's indexer, which is told again every 10 s who is there
HURRY_S = 1.0  # the same once it has failed
START_S = 60.0  # for a daemon to serve
CLEARED = 0.4  # of the quiet points end with a clear
GROWTH_BYTES = 48 << 20  # of a process, between its first and any later quiet point
CRASHED, EXPECTED = "CRITICAL", ("the supervisor is gone", LET_FAIL)  # in the daemon's log, and what belongs there


class Options(NamedTuple):
    """What a torture is told."""

    seed: int
    config: Mapping[str, Any]  # the configuration as a file has it, before it is put into the folder
    seconds: float | None = SECONDS  # None: until so many `kills`
    num_runners: int = 4
    faults: Sequence[str] = ()
    rate: float = 2.0  # faults a second, about
    kills: int | None = None  # after so many it ends
    operations: int | None = None  # of all runners, after which it ends instead; small and pipelined
    storage: str | None = None  # none, file, mooncake; None: as configured
    keep: bool = False
    schedule: Sequence[Planned] | None = None  # instead of the seed's
    indexer: str | None = None  # the URL of Dynamo's, which is to be right, too
    master: Sequence[str] = ("mooncake_master",)  # the command of Mooncake's master
    prelude: str = ""  # Python that each rank runs first, to plant a bug
    quiet_every_s: float = QUIET_EVERY_S
    stuck_s: float = STUCK_S
    growth_bytes: int = GROWTH_BYTES
    rest_s: float = REST_S  # for the daemon to come to rest once nobody uses it

    def recorded(self) -> dict[str, Any]:
        """What a schedule's file has of them."""
        return {
            "seed": self.seed, "config": dict(self.config), "seconds": self.seconds,
            "runners": self.num_runners, "storage": self.storage,
        }  # fmt: skip


class Excuse(NamedTuple):
    """A fault that goes on, or has just ended."""

    fault: Fault
    since: float
    until: float | None  # None: it goes on


class Crew:
    """A runner over all its lives: one process, or a scheduler and a worker for each shard."""

    def __init__(self, number: int, rank: int, rows: Sequence[int], has_workers: bool) -> None:
        self.number = number
        self.rank = rank
        self.rows = rows  # of the board, a process each
        self.has_workers = has_workers
        self.name = f"runner {number}"
        self.names = [f"torture-{number}{f'-{worker}' if worker >= 0 else ''}" for worker in range(-1, len(rows) - 1)]
        self.lives = 0
        self.processes: list[Any] = []
        self.pidfds: list[int] = []
        self.pipe: Connection | None = None
        self.pipes: list[Connection] = []
        self.living = False  # all of it; for other threads, which may not ask the processes
        self.spent = False
        self.held_since: list[float] = [0.0] * len(rows)

    def signal(self, number: int, what: int) -> None:
        """To one of its processes, if that is still there."""
        if number < len(self.pidfds):
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self.pidfds[number], what)

    def forget(self) -> None:
        """All its processes have ended."""
        for process in self.processes:
            process.join()
            process.close()
        for fd in self.pidfds:
            os.close(fd)
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pidfds, self.pipes, self.pipe = [], [], [], None


@dataclass
class Progress:
    """What a line of progress says."""

    seconds: float
    operations: int
    requests: int
    checked_pages: int
    faults: int
    restarts: int
    now: list[str] = field(default_factory=list)  # faults that go on

    def __str__(self) -> str:
        going = f"; now {', '.join(self.now)}" if self.now else ""
        return (
            f"{self.seconds:5.0f} s  {self.operations:,} operations, {self.requests:,} requests, "
            f"{self.checked_pages:,} pages checked, {self.faults} faults, {self.restarts} lives of the daemon{going}"
        )


def torture(options: Options, progress: Callable[[Progress], None] = lambda now: None) -> Report:
    """Do it. ConfigError, StartError: it could not begin. What goes wrong on the way is in the report's `problems`.

    Runners have the environment with which this process's fork server began, at the latest at its first torture.
    """
    folder = Path(tempfile.mkdtemp(prefix="sglcache-torture-"))
    run = None
    try:
        run = Torture(options, folder)
        return run.run(progress)
    finally:
        failed = run is not None and run.report.problems
        if not (options.keep or failed):
            shutil.rmtree(folder, ignore_errors=True)


class Torture:
    """One run."""

    def __init__(self, options: Options, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.ending = threading.Event()
        self.report = Report(options.seed, num_runners=options.num_runners)
        kind = options.storage or options.config.get("storage", {}).get("kind")
        self.master = Master(options.master, folder) if kind == "mooncake" else None
        data = daemons.at_home(
            options.config,
            folder,
            options.storage,
            indexer=options.indexer,
            master=self.master.address if self.master is not None else None,
        )
        config = parse(data)
        shards = config.pool.num_shards
        num_ranks = config.parallel.dp_size * config.parallel.pp_size
        per_crew = 1 + shards
        self.crews = [
            Crew(number, number % num_ranks, range(1 + number * per_crew, 1 + (number + 1) * per_crew), False)
            for number in range(options.num_runners)
        ]
        for crew in self.crews:
            crew.has_workers = crew.number // num_ranks % 2 == 1 and options.operations is None
            if not crew.has_workers:
                crew.rows = crew.rows[:1]
            crew.held_since = [0.0] * len(crew.rows)
        self._first_rank = 1 + options.num_runners * per_crew
        self.board = Board(folder / "board", self._first_rank + num_ranks)
        self.daemon = Daemon(data, folder, self.board.path, self._first_rank, options.prelude)
        self.config = self.daemon.config
        self.sockets = self.daemon.rank_sockets()
        self.endpoints: list[tuple[str, str]] = []
        self.auditors: list[Auditor] = []
        self.leaks = Leaks(options.rest_s)
        self.excuses: list[Excuse] = []
        self.done: list[Done] = []
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["sglcache.torture.runner"])
        self._rng = random.Random(f"quiet/{options.seed}")
        self._began = 0.0
        self._orders = 0
        self._rank_lives = 0
        self._retired: Counter[Word] = Counter()
        self._lock = threading.Lock()  # around excuses, orders and problems; held for nothing that waits
        self._threads: list[threading.Thread] = []
        self._alone = threading.Lock()
        self._port: Port | None = None
        self._last_fault_at = 0.0

    # -- what faults ask for ----------------------------------------------------------------------------------

    def fail(self, problem: str) -> None:
        """Something is not as it should be: this ends it."""
        with self._lock:
            if problem not in self.report.problems:
                self.report.problems.append(problem)
        self.ending.set()

    def rank_row(self, rank: int) -> Row:
        return self.board.row(self._first_rank + rank)

    def rank_pid(self, rank: int) -> int | None:
        with contextlib.suppress(Unavailable):
            return self.daemon.pids().get(rank)
        return None

    def comes_back(self, rank: int, after_pid: int, within_s: float) -> bool:
        """The rank serves in another process than that, in time."""

        def away() -> bool:
            return self.rank_pid(rank) in (None, after_pid) or not self.daemon.serves()

        return not daemons.waited(away, within_s)

    def count_life(self) -> None:
        with self._lock:
            self._rank_lives += 1

    def client(self, rank: int, role: str) -> Client:
        return Client(self.sockets[rank], role=role, name="torture", streams=self.streams)

    def streams(self) -> Mapping[int, int]:
        """For clients of this process whose pools are on cards."""
        with self._lock:
            if self._port is None:
                self._port = Port()
            return self._port.streams()

    def goes_on(self, kind: type[Fault], besides: Fault | None = None) -> bool:
        with self._lock:
            return any(
                isinstance(each.fault, kind) and each.until is None and each.fault is not besides
                for each in self.excuses
            )

    def was_lately(self, kind: type[Fault]) -> bool:
        """One goes on, or did a moment ago."""
        with self._lock:
            return any(isinstance(each.fault, kind) for each in self.excuses)

    def order(self, crew: Crew, number: int, action: Action, point: Point, within_s: float) -> bool:
        """Have a process of a runner do that at that point; whether it did, in time. Else it will not any more."""
        if number >= len(crew.rows):
            return False
        row = self.board.row(crew.rows[number])
        with self._lock:
            self._orders += 1
            order = self._orders
            row[Word.ACTION], row[Word.AT] = action, point
            row[Word.ORDER] = order
        waiting = daemons.waited(lambda: row[Word.FIRED] != order and not self.ending.is_set(), within_s)
        if waiting:
            row[Word.ACTION] = Action.NOTHING
        return not waiting and bool(row[Word.FIRED] == order)

    # -- the run ----------------------------------------------------------------------------------------------

    def run(self, progress: Callable[[Progress], None]) -> Report:
        report, options = self.report, self.options
        report.folder = str(self.folder) if options.keep else None
        interrupted = False
        try:
            if self.master is not None:
                self.master.start()
            info = self.daemon.start()
            self.count_life()
            streams = {row["rank"]: row["stream"] for row in info["ranks"]}
            self.endpoints = [(streams[rank]["endpoint"], streams[rank]["replay_endpoint"]) for rank in sorted(streams)]
            self._audit()
            self._began = self._last_fault_at = time.monotonic()
            try:
                self._loop(progress)
            except KeyboardInterrupt:
                interrupted = True
                self.ending.set()
            self._end()
        finally:
            self.ending.set()
            self._abandon()
        report.seconds = time.monotonic() - self._began
        self._tell()
        if interrupted:
            raise KeyboardInterrupt
        return report

    def _audit(self) -> None:
        for rank, socket in enumerate(self.sockets):
            with self.client(rank, "observer") as observer:
                status = observer.status()
            self.auditors.append(Auditor(rank, socket, self.endpoints[rank], status, self.fail, self.options.rest_s))
            self.auditors[-1].start()
        for auditor in self.auditors:
            for problem in auditor.at_rest():
                self.fail(problem)
        self.leaks.begin(self._processes())

    def _processes(self) -> dict[str, int]:
        assert self.daemon.process is not None
        return {"supervisor": self.daemon.process.pid} | {
            f"rank {rank}": pid for rank, pid in self.daemon.pids().items()
        }

    def _loop(self, progress: Callable[[Progress], None]) -> None:
        options = self.options
        faults = self._faults()
        planned = next(faults, None)
        quiet_at = self._began + options.quiet_every_s
        while not self.ending.is_set():
            now = time.monotonic()
            if self._is_over(now):
                break
            self._tend(start=True)
            self._watch(now)
            self._reap()
            while planned is not None and self._is_due(planned, now):
                self._begin(planned)
                planned = next(faults, None)
            if now >= quiet_at:
                self._quiet()
                quiet_at = time.monotonic() + options.quiet_every_s
            progress(self._now(now))

    def _is_over(self, now: float) -> bool:
        options = self.options
        if options.operations is not None:
            return all(crew.spent for crew in self.crews)
        if options.kills is not None and self.report.kills.total() >= options.kills:
            return True
        return options.seconds is not None and now - self._began >= options.seconds

    def _faults(self) -> Iterator[Planned]:
        weights: dict[str, int] = {}
        for name in self.options.faults:
            why = BY_NAME[name].possible(self)
            if why is None:
                weights[name] = BY_NAME[name].weight
            else:
                self.report.not_possible[name] = why
        if self.options.schedule is not None:
            return iter(self.options.schedule)
        return plan(self.options.seed, weights, self.options.rate, self.options.num_runners)

    def _is_due(self, planned: Planned, now: float) -> bool:
        if len(self._threads) >= MOST_FAULTS:
            return False
        late = self.options.schedule is None and now - self._last_fault_at > LAG_S
        return self.total(Word.OPERATIONS) >= planned.at or late

    def _begin(self, planned: Planned) -> None:
        kind = BY_NAME[planned.kind]
        fault = kind(self, planned.seed)
        at, began = self.total(Word.OPERATIONS), time.monotonic()
        self._last_fault_at = began

        def work() -> None:
            what = "it failed"
            excuse = Excuse(fault, time.monotonic(), None)
            with self._alone if fault.alone else contextlib.nullcontext():
                if self.ending.is_set():
                    return
                with self._lock:
                    self.excuses.append(excuse)
                    self.report.faults[kind.name] += 1
                    self.report.kills[kind.name] += kind.kills
                try:
                    what = fault.do()
                except SglcacheError as error:
                    # Another fault may have taken the daemon away from under this one.
                    what = f"error[{error.code}]: {error.message}"
                    if not (self.ending.is_set() or self.excused("ends")):
                        self.fail(f"{kind.name}: {what}")
                except Exception as exc:
                    self.fail(f"{kind.name}: {exc!r}")
                ended = time.monotonic()
                with self._lock:
                    self.excuses.remove(excuse)
                    self.excuses.append(excuse._replace(until=ended))
                    self.done.append(Done(planned, at, began - self._began, ended - began, what))

        thread = threading.Thread(target=work, name=kind.name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _reap(self) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        limit = time.monotonic() - GRACE_S
        with self._lock:
            self.excuses = [each for each in self.excuses if each.until is None or each.until > limit]

    def excused(self, what: str, rank: int | None = None, crew: Crew | None = None) -> list[str]:
        """The faults that explain that somebody of that rank `stalls` or `ends`, or that have hit this runner."""
        with self._lock:
            faults = [each.fault for each in self.excuses]
        return [
            fault.name
            for fault in faults
            if (getattr(fault, what) and (rank is None or fault.rank in (None, rank)))
            or (crew is not None and fault.hit is crew)
        ]

    # -- runners ----------------------------------------------------------------------------------------------

    def _tend(self, start: bool, timeout_s: float = TICK_S) -> None:
        """Hear what runners say, bury those that ended, and start them again."""
        pipes = {crew.pipe: crew for crew in self.crews if crew.pipe is not None}
        heard = wait([*pipes, *(p.sentinel for crew in self.crews for p in crew.processes)], timeout_s)
        for crew in self.crews:
            if crew.processes:
                self._hear(crew)
                alive = [process.is_alive() for process in crew.processes]
                crew.living = all(alive)
                if not any(alive):
                    self._hear(crew)
                    self._bury(crew)
            if not crew.processes and start and not crew.spent and not self.ending.is_set():
                self._start(crew)
        if heard and timeout_s:
            time.sleep(0.001)  # a process that has just ended is dead in a moment

    def _start(self, crew: Crew) -> None:
        options = self.options
        crew.lives += 1
        budget = -(-options.operations // len(self.crews)) if options.operations is not None else 0
        shards = self.config.pool.num_shards if crew.has_workers else 0
        share = max(1, len([each for each in self.crews if each.rank == crew.rank]))
        for row in crew.rows:
            self.board.row(row)[Word.STAMP] = time.monotonic_ns()
            self.board.row(row)[Word.FIRED] = 0

        def seat(number: int) -> Seat:
            return Seat(
                str(self.board.path), crew.rows[number], str(self.sockets[crew.rank]), crew.rank, crew.names[number],
                f"{options.seed}/{crew.number}/{number}/{crew.lives}", (options.seed, share), budget,
                options.operations is not None,
            )  # fmt: skip

        def launch(target: Callable[..., None], number: int, *arguments: object) -> Connection:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=target, args=(seat(number), theirs, *arguments), daemon=True)
            process.start()
            assert process.pid is not None
            theirs.close()
            crew.processes.append(process)
            crew.pidfds.append(os.pidfd_open(process.pid))
            crew.pipes.append(ours)
            return ours

        links = [self._context.Pipe() for _ in range(shards)]
        if shards:
            crew.pipe = launch(scheduler_main, 0, [ours for ours, _ in links])
            for shard, (_, theirs) in enumerate(links):
                launch(worker_main, 1 + shard, theirs, shard)
        else:
            crew.pipe = launch(runner_main, 0)
        for pair in links:
            for end in pair:
                end.close()
        crew.living = True

    def _hear(self, crew: Crew) -> None:
        for pipe in crew.pipes:
            with contextlib.suppress(EOFError, OSError):
                while pipe.poll():
                    self._take(crew, pipe.recv())

    def _take(self, crew: Crew, message: tuple[str, ...]) -> None:
        match message:
            case ("problem", text):
                self.fail(f"{crew.name}: {text}")
            case ("lost", code, text, point):
                if not (self.ending.is_set() or self.excused("ends", crew.rank, crew) or self._pausing):
                    self.fail(
                        f"{crew.name} lost its session at {point}, and no fault explains it: error[{code}]: {text}"
                    )
            case ("over",):
                budget = self.options.operations
                crew.spent = budget is not None and self._spent(crew, budget)

    @property
    def _pausing(self) -> bool:
        return bool(self.board.common[Common.PAUSE])

    def _spent(self, crew: Crew, budget: int) -> bool:
        return int(self.board.row(crew.rows[0])[Word.OPERATIONS]) >= -(-budget // len(self.crews))

    def _bury(self, crew: Crew) -> None:
        for process in crew.processes:
            if process.exitcode not in (0, -signal.SIGKILL) or (
                process.exitcode and not self.ending.is_set() and not self.excused("kills", crew.rank, crew)
            ):
                self.fail(f"{crew.name}, pid {process.pid}, ended with {process.exitcode}, and no fault explains it")
        crew.forget()

    def _watch(self, now: float) -> None:
        """Who makes no progress, and why."""
        for crew in self.crews:
            own = sorted(set(self.excused("stalls", crew.rank, crew)))
            for number, row in enumerate(crew.rows):
                stamp = int(self.board.row(row)[Word.STAMP]) / 1e9
                gap = now - stamp if crew.processes else 0.0
                for name in own or ["none"]:
                    if gap > self.report.longest_s.get(name, 0.0):
                        self.report.longest_s[name] = gap
                if own or gap < 1.0:
                    crew.held_since[number] = now
                elif now - crew.held_since[number] > self.options.stuck_s:
                    point = Point(int(self.board.row(row)[Word.POINT])).name
                    self.fail(
                        f"{crew.name} has made no progress for {gap:.1f} s at {point}, and no fault explains it: "
                        f"process {number} of {len(crew.rows)}"
                    )
        for auditor in self.auditors:
            if self.excused("restarts", auditor.rank):
                auditor.restarted_at = now
            losses = auditor.counts["losses"]
            if losses > auditor.known_losses and now - auditor.restarted_at > FORGET_S:
                self.fail(
                    f"rank {auditor.rank}: a reader of its stream has lost what neither a replay nor a snapshot has "
                    "brought back, and no life has ended"
                )
            auditor.known_losses = losses
            if self.excused("stalls", auditor.rank):
                auditor.agreed_at = max(auditor.agreed_at, now)
            elif now - auditor.agreed_at > self.options.stuck_s:
                self.fail(
                    f"rank {auditor.rank}: for {now - auditor.agreed_at:.1f} s the mirror has not been brought to a "
                    "number of the daemon's, and no fault explains it"
                )

    # -- quiet points, and the end ------------------------------------------------------------------------------

    def _quiet(self) -> None:
        """Have everybody leave, and see that nothing is left."""
        for thread in list(self._threads):
            while thread.is_alive() and not self.ending.is_set():
                self._tend(start=True)
                self._watch(time.monotonic())
        self._reap()
        common = self.board.common
        common[Common.PAUSE] = 1
        try:
            deadline = time.monotonic() + LEAVE_S
            while not all(self._has_left(crew) for crew in self.crews) and not self.ending.is_set():
                self._tend(start=False)
                if time.monotonic() > deadline:
                    late = [crew for crew in self.crews if not self._has_left(crew)]
                    where = [Point(int(self.board.row(crew.rows[0])[Word.POINT])).name for crew in late]
                    self.fail(
                        f"{', '.join(crew.name for crew in late)} did not leave within {LEAVE_S:g} s, at "
                        f"{', '.join(where)}"
                    )
            if not self.ending.is_set():
                self._rest()
        finally:
            common[Common.PAUSE] = 0
        for crew in self.crews:
            for row in crew.rows:
                self.board.row(row)[Word.STAMP] = time.monotonic_ns()

    def _has_left(self, crew: Crew) -> bool:
        return not crew.processes or bool(self.board.row(crew.rows[0])[Word.PAUSED])

    def _rest(self) -> None:
        """Nobody is attached, and no fault goes on."""
        self.report.checks["quiet points"] += 1
        for auditor in self.auditors:
            for problem in auditor.at_rest():
                self.fail(problem)
        if self.options.indexer is not None and not self.ending.is_set():
            indexer = Indexer(self.options.indexer)
            look = partial(what_differs, indexer, self.config.model_name, self.auditors)
            for problem in daemons.waited(look, INDEXER_S):
                self.fail(problem)
            self.report.checks["indexer's pictures"] += 1
        if self.ending.is_set():
            return
        for problem in self.leaks.look(self._processes(), self.options.growth_bytes):
            self.fail(problem)
        known = set(self._processes().values())
        strangers = [pid for pid in daemons.marked(self.folder) if pid not in known]
        strangers = [pid for pid in strangers if not self._is_below(pid, known)]
        if strangers:
            self.fail(f"processes of the daemon's are left that nobody owns: {strangers}")
        for name, pid in self._processes().items():
            if dead := daemons.waited(partial(_unburied, pid), 2.0):
                self.fail(f"{name} (pid {pid}) has not buried its children {dead}")
        for rank in range(len(self.sockets)) if self._rng.random() < CLEARED else ():
            self._clear(rank)

    def _clear(self, rank: int) -> None:
        """With nobody there it must be done, and leave nothing. What is below may stay."""
        with self.client(rank, "admin") as operator:
            before = operator.status()["pools"]
            operator.clear()
            status = daemons.waited(partial(_still_cached, operator), self.options.rest_s)
        self.report.checks["clears"] += 1
        if status:
            self.fail(f"rank {rank}: after a clear there are {status}; before there were {before}")

    def _is_below(self, pid: int, known: set[int]) -> bool:
        """A child of a rank's, such as the process with Mooncake's client."""
        return any(pid in daemons.children(each) for each in known)

    def _end(self) -> None:
        """The last quiet point, with all runners gone for good; then the daemon's end."""
        if not self.ending.is_set():
            self._quiet()
        for thread in self._threads:  # one may be starting the daemon again
            thread.join(START_S)
        common = self.board.common
        common[Common.STOP] = 1
        deadline = time.monotonic() + (HURRY_S if self.ending.is_set() else LEAVE_S)
        while any(crew.processes for crew in self.crews) and time.monotonic() < deadline:
            self._tend(start=False)
            for crew in self.crews:
                for number in range(len(crew.processes)):
                    crew.signal(number, signal.SIGCONT)
        if not self.ending.is_set():
            for crew in self.crews:
                if crew.processes:
                    self.fail(f"{crew.name} did not end within {LEAVE_S:g} s of being told to")
            self._rest()
        self._retire()
        for auditor in self.auditors:
            auditor.stop()
        self.auditors_counts()
        for problem in self.daemon.stop():
            self.fail(problem)
        said = self.daemon.said()
        bad = [line for line in said.splitlines() if CRASHED in line and not any(each in line for each in EXPECTED)]
        if bad:
            self.fail(f"the daemon's log has {len(bad)} lines such as: {bad[0]}")

    def auditors_counts(self) -> None:
        for auditor in self.auditors:
            self.report.checks.update(auditor.counts)
        self.report.checks = +self.report.checks

    def _retire(self) -> None:
        for name, first in self.leaks.first_bytes.items():
            self.report.memory[name] = (first / 2**20, self.leaks.last_bytes[name] / 2**20)

    def _abandon(self) -> None:
        """Whatever happened: leave none of our processes behind."""
        for thread in self._threads:
            thread.join(5.0)
        for crew in self.crews:
            for number, process in enumerate(crew.processes):
                if process.is_alive():
                    crew.signal(number, signal.SIGKILL)
            if crew.processes:
                crew.forget()
        self.daemon.abandon()
        if self.master is not None:
            self.master.stop()

    # -- telling ----------------------------------------------------------------------------------------------

    def total(self, word: Word) -> int:
        """Of all runners, over all their lives: a row goes on counting from life to life."""
        return sum(int(self.board.row(row)[word]) for crew in self.crews for row in crew.rows)

    def _now(self, now: float) -> Progress:
        with self._lock:
            going = sorted({each.fault.name for each in self.excuses if each.until is None})
        return Progress(
            now - self._began,
            self.total(Word.OPERATIONS),
            self.total(Word.REQUESTS),
            self.total(Word.CHECKED_PAGES),
            self.report.faults.total(),
            self._rank_lives,
            going,
        )

    def _tell(self) -> None:
        report, total = self.report, self.total
        report.requests, report.operations = total(Word.REQUESTS), total(Word.OPERATIONS)
        report.input_tokens = total(Word.INPUT_TOKENS)
        third = min(sum(auditor.third_tokens for auditor in self.auditors), total(Word.HOST_TOKENS))
        report.hit_tokens = {
            "device": total(Word.DEVICE_TOKENS),
            "host": total(Word.HOST_TOKENS) - third,
            "third": third,
        }
        report.checked_pages, report.checked_states = total(Word.CHECKED_PAGES), total(Word.CHECKED_STATES)
        report.no_space, report.lost = total(Word.NO_SPACE), total(Word.LOST)
        report.kills = +report.kills
        report.lives = {"runners": sum(crew.lives for crew in self.crews), "the daemon and its ranks": self._rank_lives}
        (self.folder / SCHEDULE).write_text(written(self.options.recorded(), self.done))
        if report.problems:
            report.folder = str(self.folder)


def _unburied(pid: int) -> list[int]:
    return [child for child in daemons.children(pid) if daemons.state_of(child) == "Z"]


def _still_cached(operator: Client) -> str:
    pools = operator.status()["pools"]
    cached = [f"{pool['cached']} pages of {pool['resource']} {pool['tier']}" for pool in pools if pool["cached"]]
    return ", ".join(cached)
