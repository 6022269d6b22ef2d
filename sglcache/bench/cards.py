"""What an NVIDIA card makes of it: copies, a runner beside them, first tokens, deaths, and how late polls are.

    copies    the copy engine between real pools, as a share of a plain pinned cuMemcpyAsync of as many bytes
    decoding  a process that decodes, alone and beside a daemon that copies as fast as it can
    tokens    time to first token: cold, from the device, from the host
    polls     how late the daemon sees what a stream has written
    runners   kill -9 of a runner with a kernel under way, until its pages are free
    ranks     kill -9 of a rank, until its next life has given a hit on the host

This process never calls CUDA: each section is processes of its own, and daemons as `sglcache serve` starts them. What
is compared is measured in turn, A B A B, and what was copied is looked at: wrong bytes are an error. A section that
fails, or for which no time is left, is told of, and the others go on. docs/gpu.md has the figures.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sglcache.bench import copy
from sglcache.bench import death as deaths
from sglcache.bench.cards_tasks import (
    ASKED,
    COLD,
    L1,
    L2,
    Feed,
    attach,
    check_feed,
    describe,
    detach,
    first_token,
    lateness,
    plain_load,
    prepare_feed,
    run_feed,
    spoil,
)
from sglcache.bench.copy import BACKUP, LOAD
from sglcache.bench.daemon import Daemon
from sglcache.bench.hand import on_device
from sglcache.bench.harness import BenchError, Row, Summary, facts, run_ours
from sglcache.bench.report import Table, number
from sglcache.errors import ConfigError, SglcacheError
from sglcache.memory.cuda_engine import POLL_S
from sglcache.server.room import machine
from sglcache.testing.probe.copies import decode, prepare_decode, prepare_matmul, soon
from sglcache.testing.probe.sizes import Sizes
from sglcache.testing.probe.stage import Actor, Stage, Unanswered, staged

if TYPE_CHECKING:
    from sglcache.client import Client

MIB, GIB = 1 << 20, 1 << 30
COPY_GOAL = 0.9  # of the plain memcpy
SLOWER_GOAL = 0.05
WAYS = {"to the host": (BACKUP,), "to the device": (LOAD,), "both at once": (BACKUP, LOAD)}
SPARE = 1.15  # of a host tier's bytes, what the machine is to have
CARD_S = 60.0  # that it may take to say what it is
STOP_S = 60.0  # that a daemon may take to let go of its pinned host tier
WHOLE_S = 300.0  # a run with less than that is a look
RANK_S, RANK_S_PER_GIB = 20.0, 2.0  # that a rank's deaths take
PAGE_SIZE = 16
LAYERS, KV_HEADS, HEAD_DIM = 32, 8, 128  # Llama-3.1-8B's; 128 KiB a token in bfloat16


@dataclass(frozen=True)
class Options:
    """As for an H200: 139 GB on the card, 128 GB beside it, and less than eight minutes."""

    sizes_mib: tuple[int, ...] = (64, 256, 1024, 4096)
    pages: tuple[int, ...] = (16, 64)
    layouts: tuple[str, ...] = ("page_first", "layer_first")
    shapes: tuple[str, ...] = ("dense", "scattered")
    num_layers: int = LAYERS
    pairs: int = 5
    # The daemon of decoding, tokens and polls, in tokens of pages of 16.
    device_tokens: int = 32768
    host_tokens: int = 131072
    feed_tokens: int = 2048  # of a prompt that is copied
    decode: Sizes = field(default_factory=lambda: Sizes(window_s=0.5, settle_s=0.3))
    prompts: tuple[int, ...] = (2048, 16384)
    prefill_rate: float = 20_000.0  # tokens a second that a model computes
    late_after_s: tuple[float, ...] = (0.0, 0.001, 0.01, 0.1)  # how long an event is waited for
    late_samples: int = 40
    kills: int = 20
    kill_leases: int = 8
    kill_tokens: int = 2048  # of a lease
    kill_pool_gib: float = 64.0  # that the killed runner has mapped
    rank_gib: tuple[float, ...] = (1.0, 8.0, 64.0)
    rank_kills: int = 3  # of the smallest; of others fewer
    token_kib: int = 128  # of the rank's pages
    limit_s: float = 460.0
    only: tuple[str, ...] = ()


QUICK = Options(
    sizes_mib=(4, 8),
    num_layers=4,
    pairs=1,
    device_tokens=1024,
    host_tokens=4096,
    feed_tokens=64,
    decode=Sizes(window_s=0.03, settle_s=0.03, decode_step=MIB, kernels=2),
    prompts=(256,),
    prefill_rate=100_000.0,
    late_after_s=(0.0, 0.01),
    late_samples=3,
    kills=2,
    kill_leases=2,
    kill_tokens=64,
    kill_pool_gib=0.0625,
    rank_gib=(0.0625,),
    rank_kills=1,
    token_kib=16,
)
"""For a look at whether all of it runs."""


class Goal(NamedTuple):
    """A figure that there is a goal for."""

    what: str
    value: str
    goal: str
    met: bool


class Result(NamedTuple):
    """Of a section."""

    tables: list[Table]
    goals: list[Goal]
    raw: Row  # what the tables are made of


class Section(NamedTuple):
    title: str
    how: str  # the figures were taken
    seconds: float  # that it takes on a card; with less left it is not begun
    measure: Callable[[Run], Result]


@dataclass
class Report:
    """What was measured so far."""

    when: str
    card: Row
    options: Options
    machine: Row
    results: dict[str, Result] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)  # and why
    failed: list[str] = field(default_factory=list)  # and how


class Run:
    """What the sections share: processes, a daemon, and the time that is left."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.left_out: list[str] = []
        self.failed: list[str] = []  # parts of a section, which went on
        self._until = time.monotonic() + options.limit_s
        self._stage: Stage | None = None
        self._undo = contextlib.ExitStack()
        self._daemon: Daemon | None = None

    @property
    def left_s(self) -> float:
        return self._until - time.monotonic()

    def lacks(self, seconds: float) -> str:
        """Why something that takes so long is not begun. A run that is to be short is a look, and begins all."""
        if self.options.limit_s < WHOLE_S or self.left_s >= seconds:
            return ""
        return f"{self.left_s:.0f} s were left, and it takes {seconds:.0f}"

    @property
    def stage(self) -> Stage:
        assert self._stage is not None, "no section is being measured"
        return self._stage

    def measured(self, section: Section) -> Result:
        """Its processes are gone afterwards; one that takes far too long is ended."""
        stage = self._stage = Stage(0, min(self.left_s, 30 + 2.5 * section.seconds))
        try:
            return section.measure(self)
        except (Unanswered, SglcacheError):
            with contextlib.suppress(BenchError):
                self.close()  # the next section has a daemon that nothing went wrong with
            raise
        finally:
            stage.end()
            self.left_out += [f"the end of the process {name!r}: kill -9 did not end it" for name in stage.left_behind]

    @property
    def daemon(self) -> Daemon:
        """The one that decoding, tokens and polls are measured beside, its host tier all there."""
        if self._daemon is None:
            options = self.options
            settings = {
                "pool.num_tokens": options.device_tokens,
                "pool.page_size": PAGE_SIZE,
                "pool.num_layers": options.num_layers,
                "pool.num_kv_heads": KV_HEADS,
                "pool.head_dim": HEAD_DIM,
                "pool.dtype": "bfloat16",
                "host.num_tokens": options.host_tokens,
            }
            words = [*(f"{key}={value}" for key, value in settings.items()), *on_device("cuda")]
            self._daemon = self._undo.enter_context(Daemon(words, STOP_S))
            self._daemon.wait_healthy()
            with self.client("observer") as observer:
                memory = observer.status
                self.until(lambda: all(it["ready_bytes"] >= it["bytes"] for it in memory()["memory"].values()), "there")
        return self._daemon

    @contextlib.contextmanager
    def client(self, role: str) -> Iterator[Client]:
        from sglcache.client import Client

        with Client(self.daemon.socket, role=role, name="bench cards") as client:
            yield client

    @contextlib.contextmanager
    def actor(self, name: str) -> Iterator[Actor]:
        """A process for as long as this lasts."""
        actor = self.stage.actor(name)
        try:
            yield actor
        finally:
            actor.end()

    def until(self, true: Callable[[], bool], what: str) -> None:
        while not true():
            if self.stage.left_s <= 0:
                raise BenchError(f"the daemon's host tier was not {what} when the time was up")
            time.sleep(0.002)

    def quiet(self) -> None:
        """No copy is in flight."""
        with self.client("observer") as observer:
            self.until(lambda: not observer.status()["gauges"]["num_copies"], "at rest")

    def ours(self, *words: str) -> Row:
        """A row of another of our benchmarks, in a process of its own."""
        command = [sys.executable, "-m", "sglcache", "bench", *words, "--device", "cuda", "--json"]
        return run_ours(command, max(1.0, self.stage.left_s))

    def close(self) -> None:
        """BenchError: the daemon did not end as it should."""
        self._daemon = None
        self._undo.close()


def run(options: Options, tell: Callable[[str], None], keep: Callable[[Report], None]) -> Report:
    """Measure. `tell` hears what is begun; `keep` has what there is after each section.

    ConfigError: there is no card, or no driver. BenchError: it does not answer.
    """
    with staged(0, CARD_S) as stage:
        try:
            card = stage.actor("card").ask(describe)
        except Unanswered as exc:
            raise BenchError(f"the card could not be asked what it is: {exc}") from None
    if "error" in card:
        raise ConfigError(f"{card['error']}; nvidia-smi says what cards there are")
    report = Report(time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), card, options, facts())
    shared = Run(options)
    try:
        for name, section in SECTIONS.items():
            if options.only and name not in options.only:
                continue
            if lack := shared.lacks(section.seconds if name != "ranks" else RANK_S):
                report.left_out.append(f"{name}: {lack}")
                continue
            tell(f"{name}: {section.title}")
            began = time.monotonic()
            try:
                result = shared.measured(section)
                if result.tables:
                    report.results[name] = result
            except (Unanswered, SglcacheError) as exc:
                shared.failed.append(f"{name}: {exc}")
            report.seconds[name] = time.monotonic() - began
            report.left_out += shared.left_out
            report.failed += shared.failed
            shared.left_out, shared.failed = [], []
            keep(report)
        shared.close()
    except BenchError as exc:  # its daemon did not end as it should
        report.failed.append(str(exc))
    finally:
        with contextlib.suppress(BenchError):
            shared.close()
    return report


# -- copies --------------------------------------------------------------------------------------------------------


def _copies(run: Run) -> Result:
    options = run.options
    tables, goals = [], []
    raw: Row = {}
    for page_size in options.pages:
        for layout in options.layouts:
            name = f"page {page_size}, {layout}"
            words = copy.Options(
                options.sizes_mib,
                page_size,
                options.num_layers,
                KV_HEADS,
                HEAD_DIM,
                layout,
                pairs=options.pairs,
                device="cuda",
                shapes=options.shapes,
                both_shapes=options.shapes,
            )
            try:
                raw[name] = row = copy.run(words, max(1.0, run.stage.left_s))
            except SglcacheError as exc:
                run.failed.append(f"copies, {name}: {exc}")
                continue
            cells = _copy_cells(row)
            where, cell = min(cells.items(), key=lambda each: each[1]["ratio"])
            least = cell["ratio"]
            size, shape, way = where
            told = f"{least:.2f} ({size:,} MiB, {shape}, {way})"
            goals.append(Goal(f"copies, {name}: least share", told, f"≥ {COPY_GOAL}", least >= COPY_GOAL))
    shows: tuple[tuple[str, Callable[[Row], str]], ...] = (
        ("share of a plain memcpy with memory of cuMemHostAlloc", lambda it: f"{it['ratio']:.2f}"),
        ("GB/s", lambda it: f"{it['gb_s']:.1f}"),
        ("GB/s of that plain memcpy", lambda it: f"{it['memcpy_gb_s']:.1f}"),
        (
            "share of that plain memcpy that one with registered memory reaches",
            lambda it: f"{it['registered_gb_s'] / it['memcpy_gb_s']:.2f}",
        ),
    )
    for what, show in shows if raw else ():
        head = ("", *(f"{size:,} MiB" for size in options.sizes_mib))
        rows = []
        for name, row in raw.items():
            cells = _copy_cells(row)
            for shape in options.shapes:
                for way in WAYS:
                    found = [show(cells[size, shape, way]) for size in sorted({size for size, _, _ in cells})]
                    rows.append((f"{name}, {shape}, {way}", *found))
        tables.append(Table(f"copies: {what}", head, rows))
    layers = [
        (name, f"{it['mib']:,}", *(f"{it[key]:.2f}" for key in ("first_ms", "last_ms", "memcpy_ms")))
        for name, row in raw.items()
        for it in row["first_layer"]
    ]
    head = ("to the device, dense", "MiB", "first layers, ms", "last, ms", "plain memcpy, ms")
    if layers:
        tables.append(Table("copies: layer by layer", head, layers))
    return Result(tables, goals, raw)


def _copy_cells(row: Row) -> dict[tuple[int, str, str], Row]:
    cells = {}
    for case in row["cases"]:
        cells[case["mib"], case["slots"], "to the host"] = case[BACKUP]
        cells[case["mib"], case["slots"], "to the device"] = case[LOAD]
    for case in row["both_directions"]:
        cells[case["mib"], case["slots"], "both at once"] = case["both"]
    return cells


# -- decoding ------------------------------------------------------------------------------------------------------


def _decoding(run: Run) -> Result:
    options = run.options
    feed = Feed(options.feed_tokens, options.device_tokens * 5 // 4 // options.feed_tokens)
    raw: Row = {"tokens_of_a_prompt": feed.tokens}
    rows: list[tuple[str, ...]] = []
    worst = []
    with run.actor("decoder") as decoder, run.actor("feeder") as feeder, run.client("observer") as observer:
        decoder.ask(prepare_decode, options.decode)
        loads = ["burn", "copy"]
        without = decoder.ask(prepare_matmul)
        if without:
            run.left_out.append(f"decoding, matmul: {without.removeprefix('not asked: ')}")
        else:
            loads.append("matmul")
        for load in loads:
            for way, ways in WAYS.items():
                slower, rates, p99, fed = [], [], [], []
                for _ in range(max(1, options.pairs - 1)):
                    feeder.ask(prepare_feed, str(run.daemon.socket), feed)
                    alone = decoder.ask(decode, load, options.decode, soon(options.decode))
                    window = soon(options.decode)
                    decoder.begin(decode, load, options.decode, window)
                    feeder.begin(run_feed, ways, feed, window[1] + options.decode.settle_s)
                    rates.append(_rate(run, observer, ways, window))
                    beside = decoder.result()
                    fed.append(feeder.result())
                    slower.append(alone["steps"] / beside["steps"] - 1)
                    p99.append(beside["p99_us"] / alone["p99_us"] - 1)
                middle = statistics.median(slower)
                worst.append(middle)
                raw[f"{load}, {way}"] = {"slower": slower, "gb_s": rates, "p99_slower": p99, "fed": fed}
                spread = f"{100 * min(slower):+.1f} to {100 * max(slower):+.1f}"
                rows.append(
                    (
                        f"{load}, {way}",
                        f"{100 * middle:+.1f}",
                        spread,
                        f"{100 * statistics.median(p99):+.1f}",
                        f"{statistics.median(rates):.1f}",
                    )
                )
        raw["pages_proved"] = feeder.ask(check_feed, feed)
    head = ("", "slower, %", "pairs", "p99 of a step, %", "GB/s copied")
    most = max(worst)
    goal = Goal(
        "decoding beside copies: slower", f"{100 * most:.1f} %", f"≤ {100 * SLOWER_GOAL:g} %", most <= SLOWER_GOAL
    )
    return Result([Table("decoding beside a daemon that copies", head, rows)], [goal], raw)


def _rate(run: Run, observer: Client, ways: Sequence[str], window: tuple[float, float]) -> float:
    """GB/s of the daemon's copies in the window, by its own count of what is over."""
    ends = []
    for at in window:
        run.stage.sleep(max(0.0, at - time.monotonic()))
        lanes = observer.status()["copies"]
        ends.append((sum(lane["bytes"] for lane in lanes if lane["name"] in ways), time.monotonic()))
    (before, begun), (after, ended) = ends
    rate: float = (after - before) / (ended - begun) / 1e9
    return rate


# -- tokens --------------------------------------------------------------------------------------------------------


def _tokens(run: Run) -> Result:
    options = run.options
    raw: Row = {}
    rows: list[tuple[str, ...]] = []
    count = max(2, options.pairs - 1)
    with run.actor("runner") as runner, run.client("admin") as admin:
        runner.ask(attach, str(run.daemon.socket))
        for prompts, tokens in enumerate(options.prompts):
            times: dict[str, list[Row]] = {source: [] for source in (COLD, L1, L2)}
            for turn in range(count + 1):
                for source, its in times.items():
                    if source == L2:
                        admin.clear("device")
                        runner.ask(spoil)
                    its.append(
                        runner.ask(first_token, ASKED + 1000 * prompts + turn, tokens, source, options.prefill_rate)
                    )
                    run.quiet()
            num_bytes = tokens * _token_bytes(options)
            plain = runner.ask(plain_load, num_bytes, count)
            raw[f"{tokens} tokens, plain_load_ms"] = plain
            for source, its in times.items():
                middle = {key: statistics.median(each[key] for each in its[1:]) for key in its[0]}  # the first warms up
                raw[f"{tokens} tokens, {source}"] = its[1:]
                rows.append(
                    (
                        f"{tokens:,} tokens ({num_bytes >> 20:,} MiB), {source}",
                        number(middle["answer"]),
                        *(number(middle[key]) if source == L2 else "" for key in ("first_layer", "all_layers")),
                        number(middle["token"]),
                        number(plain) if source == L2 else "",
                    )
                )
        runner.ask(detach)
    head = ("", "answer", "first layer readable", "all readable", "first token", "a plain memcpy of it")
    return Result([Table("first tokens, ms from the acquire", head, rows)], [], raw)


def _token_bytes(options: Options) -> int:
    """Of a token."""
    return options.num_layers * 2 * KV_HEADS * HEAD_DIM * 2


# -- polls ---------------------------------------------------------------------------------------------------------


def _polls(run: Run) -> Result:
    options = run.options
    raw: Row = {}
    rows: list[tuple[str, ...]] = []
    with run.actor("runner") as runner:
        runner.ask(attach, str(run.daemon.socket))
        runner.ask(lateness, 0.001, 3)  # for nothing: what is made once
        for busy_s in options.late_after_s:
            found = runner.ask(lateness, busy_s, options.late_samples)
            late, ping = (Summary.of(found[key]) for key in ("late", "ping"))
            raw[f"{busy_s}"] = {"late_ms": late._asdict(), "ping_ms": ping._asdict()}
            what = "as it is recorded" if not busy_s else f"{1e3 * busy_s:g} ms later"
            rows.append((f"done {what}", number(late.p50), number(late.p99), number(late.max), number(ping.p50)))
        runner.ask(detach)
    head = ("", "p50", "p99", "max", "a ping's p50")
    small = copy.Options(
        (16,), PAGE_SIZE, options.num_layers, KV_HEADS, HEAD_DIM, device="cuda", shapes=(), both_shapes=()
    )
    copied = copy.run(small, max(1.0, run.stage.left_s))
    raw["one_page"] = one = copied["one_page"]
    pages: list[tuple[str, ...]] = []
    for way, it in one.items():
        cells = (it["us"], it["memcpy_us"], it["us"] - it["memcpy_us"])
        pages.append((f"one page of {copied['page_bytes'] >> 10:,} KiB, {way}", *map(number, cells)))
    more = f"later (the engine looks every {1e6 * POLL_S:.0f} µs)"
    return Result(
        [
            Table("polls: from an event's word to its commit's answer, ms", head, rows),
            Table("polls: a copy from submit to done, µs", ("", "engine", "plain memcpy", more), pages),
        ],
        [],
        raw,
    )


# -- deaths --------------------------------------------------------------------------------------------------------


def _runners(run: Run) -> Result:
    options = run.options
    words = [
        "--leases",
        options.kill_leases,
        "--lease-tokens",
        options.kill_tokens,
        "--pool-gib",
        options.kill_pool_gib,
    ]
    row = run.ours("death", "--samples", str(options.kills), *map(str, words))
    titles = {
        "dead_ms": "dead, seen from here",
        "heard_ms": "told to the rank",
        "freed_ms": "told, to pages free",
        "total_ms": "killed, to pages free",
    }
    rows = [(titles[key], *(number(row[key][each]) for each in ("p50", "p99", "max"))) for key in deaths.FIELDS]
    head = ("", "p50", "p99", "max")
    title = f"a runner of {row['pages']:,} pages of a pool of {options.kill_pool_gib:g} GiB, ms from kill -9"
    return Result([Table(title, head, rows)], [], row)


def _ranks(run: Run) -> Result:
    run.close()  # its host tier is not needed any more, and these are large
    options = run.options
    raw: Row = {}
    rows: list[tuple[str, ...]] = []
    for turn, gib in enumerate(sorted(options.rank_gib)):
        name = f"{gib:g} GiB"
        needs, there = gib * GIB * SPARE, _available()
        if there < needs:
            run.left_out.append(f"ranks, {name}: {needs / GIB:.1f} GiB are needed, {there / GIB:.1f} are available")
            continue
        if lack := run.lacks(RANK_S + gib * RANK_S_PER_GIB):
            run.left_out.append(f"ranks, {name}: {lack}")
            continue
        words = ["--gib", str(gib), "--token-kib", str(options.token_kib), "--page-size", str(PAGE_SIZE), "--alone"]
        repeats = max(1, options.rank_kills - turn)
        try:
            raw[name] = row = run.ours("restart", *words, "--repeats", str(repeats))
        except SglcacheError as exc:
            run.failed.append(f"ranks, {name}: {exc}")
            continue
        times = (row["serving_s"], row["first_hit_s"], row["first_hit_s_most"])
        rows.append((name, f"{row['pages']:,}", str(repeats), *map(number, times)))
    head = ("host tier", "pages", "kills", "attached", "first hit", "at most")
    return Result([Table("a rank, s from kill -9", head, rows)] if rows else [], [], raw)


def _available() -> int:
    """Bytes that this machine would give, as far as it says."""
    limits = [found.num_bytes for found in (machine().ram, machine().cgroup) if found is not None]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) << 10)
    return min(limits, default=0)


SECTIONS: dict[str, Section] = {
    "copies": Section(
        "the copy engine beside plain memcpys",
        "`bench copy --device cuda` in a process of its own: CudaEngine, as a rank makes it, between a pool of "
        "cuMemCreate and a memfd that is populated and registered. Wall clock from `submit` to `done` heard by "
        "another thread; the plain memcpys are one cuMemcpyAsync (between registered memory one for each range "
        "that was registered as one) and a synchronize, by the wall clock as well. Engine, memcpy with "
        "cuMemHostAlloc's memory and memcpy with the host pool in turn, medians. Both at once: as many bytes each"
        " way, and the rate is of both together. Before, copies of each kind are made and looked at, page by "
        "page.",
        120,
        _copies,
    ),
    "decoding": Section(
        "a runner that decodes, beside a daemon that copies",
        "One process runs steps of kernels, with a synchronize behind each: `burn` multiplies in registers, "
        "`copy` reads and writes device memory, `matmul` is torch's, a model's layers for 64 sequences. Another "
        "keeps the daemon copying: new prompts are committed (to the host), prompts that the host alone has are "
        "acquired (to the device); the words of its events are written by its CPU, so that it has no work on the "
        "card. Alone and beside in turn. Slower: steps a second alone over those beside, less 1. GB/s: what the "
        "daemon's engine says it copied in the window. At the end prompts that were loaded back are looked at.",
        85,
        _decoding,
    ),
    "tokens": Section(
        "time to first token",
        "A runner and a daemon, in turn: a prompt that is cached nowhere, then on the device, then, that being "
        "cleared, on the host alone. What is not cached is computed at a stated rate by kernels in chunks of 512 "
        "tokens, one that waits and one that writes the pages; of a hit that is the last page. "
        "`wait_loaded(on_stream=True)`: the times are when the stream has come past the wait, and past the last "
        "kernel, as a CPU that asks all the time sees it. Every time the pages of what was cached are looked at.",
        30,
        _tokens,
    ),
    "polls": Section(
        "how late what a card has done is seen",
        "A runner commits a page whose event is behind a kernel of so many milliseconds, and looks all the time: "
        "at the word that its stream writes, and for the commit's answer; the time between the two is the "
        "daemon's poll, its work and the socket's way, of which a ping is the last. The engine: a copy of one "
        "page beside a plain memcpy of it.",
        30,
        _polls,
    ),
    "runners": Section(
        "a runner is killed",
        "`bench death --device cuda`: processes that attach, lease, write every page by a kernel, and have a "
        "kernel of 5 s under way when they are killed, one by one. Dead: the pidfd is readable. Free: the rank "
        "has them on its free list.",
        45,
        _runners,
    ),
    "ranks": Section(
        "a rank is killed",
        "`bench restart --device cuda`: the host tier is filled through the device, the rank is killed, and a "
        "client that attaches as soon as it can acquires a prompt that the host alone has, waits for its last "
        "layer and looks at its bytes. The next life pins the host tier anew, behind that. The device pool is new"
        " with each life.",
        100,
        _ranks,
    ),
}


def as_row(report: Report) -> Row:
    """For JSON."""
    return {
        "when": report.when,
        "card": report.card,
        "options": dataclasses.asdict(report.options),
        "goals": [goal._asdict() for goal in goals(report)],
        "sections": {
            name: {"seconds": report.seconds[name], "how": SECTIONS[name].how, **result.raw}
            for name, result in report.results.items()
        },
        "left_out": report.left_out,
        "failed": report.failed,
        "machine": report.machine,
    }


def goals(report: Report) -> list[Goal]:
    return [goal for result in report.results.values() for goal in result.goals]


def summary(report: Report) -> Table:
    """What there is a goal for."""
    rows: list[tuple[str, ...]] = [
        (goal.what, goal.value, goal.goal, "yes" if goal.met else "NO") for goal in goals(report)
    ]
    return Table("goals", ("", "figure", "goal", "met"), rows)


def taken(report: Report) -> list[str]:
    """When and where, a line each."""
    card, there, options = report.card, report.machine, report.options
    token = _token_bytes(options) >> 10
    return [
        f"{report.when}, {sum(report.seconds.values()):.0f} s, commit {there['commit']}",
        f"{card['name']}, {card['memory_gib']:.1f} GiB, {card['free_gib']:.1f} of it free, {card['copy_engines']} copy "
        f"engines; CUDA {card['cuda']}, the kernel's driver {_module()}; batches by {card['batched_by']}",
        f"{there['cpu']}, {there['cores']} cores, {there['memory_gib']} GiB, {there['system']}, "
        f"{there['python']}, load {there['load_average']}",
        f"{options.num_layers} layers of {KV_HEADS} heads of {HEAD_DIM}, 2 bytes each: {token} KiB a token; "
        f"the host's pages are page_first; first tokens are computed at {options.prefill_rate:,.0f} tokens a second",
    ]


def _module() -> str:
    """Of the kernel's driver; none is loaded where the card is one in software."""
    try:
        line = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except OSError:
        return "none"
    words = line.split()
    return next((word for word in words if word[0].isdigit() and "." in word), line)


def markdown(report: Report) -> str:
    """For a document: a part of a section whose title is of the second level."""
    lines = [f"- {line}" for line in taken(report)]
    lines += [f"- left out: {line}" for line in report.left_out]
    lines += [f"- failed: {' '.join(line.split())}" for line in report.failed]
    parts = ["\n".join(lines) + "\n"]
    if goals(report):
        parts.append(summary(report).markdown())
    for name, result in report.results.items():
        section = SECTIONS[name]
        parts.append(f"### {section.title[0].upper()}{section.title[1:]}\n\n{section.how}\n")
        for table in result.tables:
            parts += [f"{table.title[0].upper()}{table.title[1:]}:\n", table.markdown()]
    return "\n".join(parts)
