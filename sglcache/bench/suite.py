"""The whole suite: every case of `cases`, side by side in turn, A B A B, each time in a fresh process.

What has been measured is on disk after every process, in `results.json` of the run's folder, so a run that was
interrupted goes on where it was. A side that can't be had (a peer that is not installed) or that fails is left out with
the reason, and everything else is measured; only a failure of ours is told by the exit status.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct

from sglcache.bench import cases as plan
from sglcache.bench import flame
from sglcache.bench import trace as traces
from sglcache.bench.cases import Case, Kind, Side
from sglcache.bench.harness import BenchError, Row, facts, run_json
from sglcache.compiled import VARIABLE
from sglcache.errors import ConfigError

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts" / "peers"
PEERS = ("sglang", "lmcache", "ai-dynamo-runtime", "mooncake-transfer-engine-non-cuda", "torch")
RUN_S = 400.0  # that one process may take
FORMAT = 1
SIZES = {"full": plan.FULL, "quick": plan.QUICK, "tiny": plan.TINY}
PROFILED = {  # beside the paths: below what, and with which words more
    "rpc": ("serve (sglcache/server/rank.py", ()),
    "index-64-events": ("measure (", ("--limit", "4000")),
}
PROFILE_S = 4.0

SizeName = Literal["full", "quick", "tiny"]


class Figure(Struct):
    """Of one metric of one side."""

    median: float
    least: float
    most: float
    # How many times better ours is than this side; of a floor how far ours is from it. Of medians, and of single pairs.
    ratio: float | None = None
    ratio_least: float | None = None
    ratio_most: float | None = None


class SideResult(Struct):
    """Of one side, round by round."""

    kind: Kind
    rows: list[dict[str, float]] = []  # by metric
    system: str = ""
    command: str = ""
    error: str | None = None  # why there are no more rows


class CaseResult(Struct):
    """Of one case."""

    title: str
    group: str
    sides: dict[str, SideResult]
    load_average: list[float] = []  # of a minute, before and after
    seconds: float = 0.0
    done: bool = False
    figures: dict[str, dict[str, Figure]] = {}  # by metric and side


class Results(Struct):
    """`results.json`."""

    format: int
    started: str  # ISO 8601, UTC
    size: SizeName
    trace: str  # its file's name; "made up"
    machine: dict[str, Any]
    peers: dict[str, str]  # versions
    cases: dict[str, CaseResult] = {}
    flames: list[str] = []  # paths that have a flame graph
    notes: list[str] = []  # what was left out, and why

    @property
    def failed(self) -> list[str]:
        """Of ours, what could not be measured."""
        return [
            f"{name}, {side}: {it.error}"
            for name, case in self.cases.items()
            for side, it in case.sides.items()
            if it.error is not None and it.kind == "ours" and it.command
        ]


class Options(NamedTuple):
    """What `bench suite` is told."""

    folder: Path
    size: SizeName = "full"
    trace: Path | None = None  # None: one is made up
    only: tuple[str, ...] = ()  # cases or groups; empty: all
    peers: Path | None = ROOT / ".venv-peers"  # None: without them
    flames: bool | None = None  # None: of a full run


class Step(NamedTuple):
    """What is told of a run as it goes."""

    case: str
    side: str
    round: int
    done: int  # processes
    total: int


Tell = Callable[[Step], None]


def read(folder: Path) -> Results:
    """BenchError: there are none, or they are another version's."""
    path = folder / "results.json" if folder.is_dir() else folder
    try:
        return msgspec.json.decode(path.read_bytes(), type=Results)
    except OSError as exc:
        raise BenchError(f"{path}: {exc.strerror or exc}; `sglcache bench suite` writes one") from exc
    except msgspec.DecodeError as exc:
        raise BenchError(f"{path} is no results file of this version: {exc}") from exc


def run(options: Options, tell: Tell = lambda _: None) -> Results:
    """All cases, or go on with them. ConfigError: no such case or trace, or the folder's run is another one."""
    if options.trace is not None:
        next(traces.records(options.trace, 1), None)
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    results = _begin(options)
    trace = options.trace or folder / "trace.jsonl"
    if options.trace is None and not trace.exists():
        make_trace(trace)
    wanted = chosen(plan.cases(SIZES[options.size], str(trace)), options.only)
    commands = [(case, _commands(case, options, results)) for case in wanted]
    counts = [[(side, words, _rounds(case, side, options)) for side, words in sides] for case, sides in commands]
    total = sum(rounds for sides in counts for *_, rounds in sides)
    done = 0
    for (case, _), sides in zip(commands, counts, strict=True):
        case_result = results.cases.setdefault(case.name, _empty(case))
        if case_result.done:
            done += sum(rounds for *_, rounds in sides)
            continue
        if not case_result.load_average:
            case_result.load_average.append(round(os.getloadavg()[0], 2))
        for number in range(max((rounds for *_, rounds in sides), default=0)):
            for side, words, rounds in sides:
                if number >= rounds:
                    continue
                tell(Step(case.name, side.name, number, done, total))
                done += 1
                _measure(case, case_result, side, words, number)
                _save(folder, results)
        case_result.figures = figures(case, case_result)
        case_result.load_average.append(round(os.getloadavg()[0], 2))
        case_result.done = True
        _save(folder, results)
    if options.flames or (options.flames is None and options.size == "full"):
        _flames(options, results, wanted, str(trace))
    _save(folder, results)
    return results


def chosen(every: Sequence[Case], only: Iterable[str]) -> list[Case]:
    """Those that are named, or whose table is. ConfigError: there is none of a name."""
    only = set(only)
    known = {case.name for case in every} | {case.group for case in every}
    if unknown := only - known:
        raise ConfigError(f"{', '.join(sorted(unknown))} is measured by no case; there are {', '.join(sorted(known))}")
    return [case for case in every if not only or only & {case.name, case.group}]


def _begin(options: Options) -> Results:
    trace = options.trace.name if options.trace is not None else "made up"
    if (options.folder / "results.json").exists():
        results = read(options.folder)
        machine = facts()
        was = (results.size, results.trace, results.machine["commit"])
        now = (options.size, trace, machine["commit"])
        if was != now:
            raise ConfigError(
                f"{options.folder} has a run of {', '.join(map(str, was))}, and this is {', '.join(map(str, now))}: "
                "take another folder"
            )
        results.notes.clear()
        return results
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return Results(FORMAT, started, options.size, trace, facts(), versions(options.peers))


def versions(peers: Path | None) -> dict[str, str]:
    """Of what is in the peers' environment; nothing where there is none."""
    if peers is None:
        return {}
    program = (
        "import importlib.metadata as m, json, sys; have = {d.metadata['Name']: d.version for d in m.distributions()}; "
        "print(json.dumps({name: have[name] for name in sys.argv[1:] if name in have}))"
    )
    try:
        return {name: str(version) for name, version in run_json([str(_python(peers)), "-c", program, *PEERS]).items()}
    except BenchError:
        return {}


def _python(peers: Path) -> Path:
    return peers / "bin" / "python"


def _empty(case: Case) -> CaseResult:
    return CaseResult(case.title, case.group, {side.name: SideResult(side.kind) for side in case.sides})


def _rounds(case: Case, side: Side, options: Options) -> int:
    size = SIZES[options.size]
    rounds = min(case.rounds, size.slow_rounds if case.slow else size.most_rounds)
    return rounds if side.rounds is None else min(rounds, side.rounds)


def _commands(case: Case, options: Options, results: Results) -> list[tuple[Side, list[str]]]:
    """Of the sides that can be run; of the others it is noted why not."""
    found = []
    for side in case.sides:
        if side.source:
            continue
        if side.where == "module":
            found.append((side, [sys.executable, "-m", *side.words]))
        elif side.where == "command":
            found.append((side, [sys.executable, "-m", "sglcache", "bench", *side.words]))
        elif options.peers is not None:
            if not SCRIPTS.is_dir():
                _note(results, f"{side.name}: {SCRIPTS} is not there; peers are measured from a checkout")
            elif not _python(options.peers).exists():
                _note(results, f"{side.name}: {options.peers} is not there; scripts/peers.sh makes it")
            else:
                script = str(SCRIPTS / side.words[0])
                found.append((side, [str(_python(options.peers)), script, *side.words[1:]]))
        else:
            _note(results, f"{side.name}: without peers, as told")
    return found


def _note(results: Results, note: str) -> None:
    if note not in results.notes:
        results.notes.append(note)


def _measure(case: Case, result: CaseResult, side: Side, words: list[str], number: int) -> None:
    """Round `number` of a side, and of those that are read from it; nothing if it is there, or it failed before."""
    own = result.sides[side.name]
    if own.error is not None or len(own.rows) > number:
        return
    own.command = _shown(words)
    started = time.perf_counter()
    try:
        row = run_json(words, RUN_S, {**os.environ, "OMP_NUM_THREADS": "1"})
        flat = flatten(row)
        _same_work(case, result, flat, side)
        for each in case.sides:
            if side.name in (each.name, each.source):
                it = result.sides[each.name]
                it.rows.append(_row(case, each, flat))
                it.system = str(row.get("system", ""))
    except BenchError as exc:
        own.error = str(exc)[-800:]
    result.seconds = round(result.seconds + time.perf_counter() - started, 1)


def _row(case: Case, side: Side, flat: Mapping[str, Any]) -> dict[str, float]:
    row = {}
    for name in (*(metric.name for metric in case.metrics), *case.same):
        # Where one side is read from another's row only what it names is its own.
        field = side.fields.get(name, "" if side.source else name)
        if isinstance(value := flat.get(field), int | float):
            row[name] = float(f"{value:.6g}")
    if not row:
        raise BenchError(f"{side.name}: a row of {case.name} has none of {', '.join(m.name for m in case.metrics)}")
    return row


def _same_work(case: Case, result: CaseResult, flat: Mapping[str, Any], side: Side) -> None:
    first = result.sides[case.sides[0].name].rows
    for field in case.same if first else ():
        if field in flat and flat[field] != first[0].get(field, flat[field]):
            raise BenchError(f"{side.name} ran with {field} = {flat[field]}, ours with {first[0][field]:g}")


def flatten(row: Row) -> dict[str, Any]:
    """Lists and objects within as names with dots."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, list):
            value = {str(number): each for number, each in enumerate(value)}
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": each for name, each in flatten(value).items()}
        else:
            flat[key] = value
    return flat


def figures(case: Case, result: CaseResult) -> dict[str, dict[str, Figure]]:
    """Medians and spreads, and how the first side, which is ours, compares: see `Figure`."""
    found: dict[str, dict[str, Figure]] = {}
    base = case.sides[0].name
    for metric in case.metrics:
        values = {
            side: [row[metric.name] for row in it.rows if metric.name in row] for side, it in result.sides.items()
        }
        found[metric.name] = {}
        for side, own in values.items():
            if not own:
                continue
            figure = Figure(statistics.median(own), min(own), max(own))
            ours = values[base]
            if metric.compared and side != base and ours and all(value > 0 for value in (*own, *ours)):
                # Above 1: more time than ours, or less done than ours. A floor's the other way round: ours over it.
                turned = metric.more_is_better != (result.sides[side].kind == "floor")
                pairs = [a / b if turned else b / a for a, b in zip(ours, own, strict=False)]
                middle = statistics.median(ours)
                figure.ratio = middle / figure.median if turned else figure.median / middle
                figure.ratio_least, figure.ratio_most = min(pairs), max(pairs)
            found[metric.name][side] = figure
    return found


def _shown(words: Sequence[str]) -> str:
    """Without where it lies on this machine."""
    names = {sys.executable: "python", str(ROOT) + "/": ""}
    shown = " ".join(words)
    for name, short in names.items():
        shown = shown.replace(name, short)
    shown = re.sub(r"\S*/(?=bin/python)", ".venv-peers/", shown)
    return re.sub(r"(?<=--trace )\S*/", "", shown)


def _save(folder: Path, results: Results) -> None:
    """In one piece, whatever happens meanwhile."""
    path = folder / "results.json"
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    new.replace(path)


def make_trace(path: Path, requests: int = 600) -> None:
    """Conversations that grow by turns over a few system prompts, in the form of Mooncake's trace."""
    import numpy as np

    rng = np.random.default_rng(0)
    live: list[list[int]] = []
    next_block = 4
    lines = []
    for number in range(requests):
        if not live or rng.random() < 0.6:
            live.append([int(rng.integers(4))])
        history = live[-1 - int(rng.integers(min(len(live), 64)))]
        grown = int(rng.integers(1, 24))
        history += range(next_block, next_block + grown)
        next_block += grown
        length = 512 * (len(history) - 1) + int(rng.integers(1, 513))
        line = {"timestamp": number * 300, "input_length": length, "output_length": 100, "hash_ids": history[:]}
        lines.append(json.dumps(line) + "\n")
    path.write_text("".join(lines))


# -- flame graphs -------------------------------------------------------------------------------------


def _flames(options: Options, results: Results, wanted: Sequence[Case], trace: str) -> None:
    """Of what is measured, sampled by py-spy: SVGs in the run's folder."""
    profiler = Path(sys.executable).with_name("py-spy")
    if not profiler.exists():
        _note(results, "flame graphs: py-spy is not installed; the package's extra `bench` has it")
        return
    raw = options.folder / "stacks.txt"
    for case in wanted:
        if case.name in results.flames or not (case.group == "paths" or case.name in PROFILED):
            continue
        if case.group == "paths":
            words, root = (
                [sys.executable, "-m", "sglcache.bench.paths", case.name, "--seconds", str(PROFILE_S)],
                "spin (",
            )
        else:
            root, more = PROFILED[case.name]
            words = [sys.executable, "-m", "sglcache", "bench", *case.sides[0].words, *more]
        spy = [str(profiler), "record", "-f", "raw", "-F", "-r", "250", "-o", str(raw), "--subprocesses", "--", *words]
        try:
            env = {**os.environ, VARIABLE: "1"}  # a compiled function is no frame of Python's
            done = subprocess.run(spy, env=env, capture_output=True, text=True, timeout=RUN_S, check=False)
            tree = flame.fold(raw.read_text(), root)
        except (OSError, subprocess.TimeoutExpired) as exc:
            _note(results, f"flame graph of {case.name}: {exc}")
            continue
        finally:
            raw.unlink(missing_ok=True)
        if not tree.samples:
            _note(results, f"flame graph of {case.name}: no sample of {root}; {done.stderr.strip()[-300:]}")
            continue
        (options.folder / f"flame-{case.name}.svg").write_text(
            flame.svg(tree, f"{case.name}, below {root.partition(' ')[0]}")
        )
        results.flames.append(case.name)
