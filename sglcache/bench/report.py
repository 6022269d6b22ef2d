"""A run of the suite as tables: on a terminal, in Markdown, and into the marks of a document.

A mark is `<!-- bench:NAME -->` on a line of its own, and ends with `<!-- /bench -->`; what is between them is written
anew from the results. So the figures in a document are those of the results that lie beside it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from sglcache.bench import cases as plan
from sglcache.bench.cases import HOT, Case, Metric
from sglcache.bench.harness import BenchError
from sglcache.bench.suite import SIZES, CaseResult, Figure, Results, read

MARK = re.compile(r"<!-- bench:(?P<name>[a-z0-9-]*) -->\n(?P<body>.*?)<!-- /bench -->", re.DOTALL)
HOT_TITLE = "hot paths"
OPENS = re.compile(r"<!-- bench:")


class Table(NamedTuple):
    """Cells of text; the first column is words, the others figures."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def markdown(self) -> str:
        lines = [self.head, tuple("---" for _ in self.head), *self.rows]
        return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def number(value: float) -> str:
    """Three digits that mean something."""
    if value == 0:
        return "0"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"


def ratio(figure: Figure) -> str:
    """Of medians, and of single pairs from the least to the most."""
    if figure.ratio is None or figure.ratio_least is None or figure.ratio_most is None:
        return "–"
    return f"{number(figure.ratio)} ({number(figure.ratio_least)}–{number(figure.ratio_most)})"


def _cases(results: Results) -> dict[str, Case]:
    return {case.name: case for case in plan.cases(SIZES[results.size], "")}


def compared(results: Results, group: str) -> Table | None:
    """Cases of one group, with a column for each side and one for how it compares. None: nothing of it was measured."""
    known = [case for case in _cases(results).values() if case.group == group and case.name in results.cases]
    if not known:
        return None
    had = {side for case in known for mine in results.cases[case.name].figures.values() for side in mine}
    sides = [side.name for side in known[0].sides if side.name in had]
    if not sides:
        return None
    kinds = {side.name: side.kind for side in known[0].sides}
    head = ["", sides[0]]
    for side in sides[1:]:
        head += [side, "ours over it" if kinds[side] == "floor" else f"over {sides[0]}"]
    rows = []
    for case in known:
        result = results.cases[case.name]
        for metric in case.metrics:
            mine = result.figures.get(metric.name, {})
            if sides[0] not in mine:
                continue
            cells = [_words(case, metric, group == "index"), number(mine[sides[0]].median)]
            for side in sides[1:]:
                figure = mine.get(side)
                cells += ["–", "–"] if figure is None else [number(figure.median), ratio(figure)]
            rows.append(tuple(cells))
    return Table(_title(known, results), tuple(head), rows)


def _words(case: Case, metric: Metric, with_case: bool) -> str:
    words = f"{metric.title}, {metric.unit}" if metric.unit else metric.title
    return f"{case.title}: {words}" if with_case else words


def _title(cases: list[Case], results: Results) -> str:
    one: CaseResult = results.cases[cases[0].name]
    return cases[0].group if len(cases) > 1 else one.title


def paths(results: Results) -> Table | None:
    """Each hot path: its floor, today, the gap and why."""
    rows = []
    for hot in HOT:
        result = results.cases.get(hot.case)
        case = _cases(results).get(hot.case)
        if result is None or case is None:
            continue
        metric = next(metric for metric in case.metrics if metric.name == hot.metric)
        floor = next(side.name for side in case.sides if side.kind == "floor")
        mine = result.figures.get(hot.metric, {})
        if floor not in mine or case.sides[0].name not in mine:
            continue
        below, today = mine[floor], mine[case.sides[0].name]
        cells = (f"{number(each.median)} {metric.unit}" for each in (below, today))
        rows.append((hot.title, *cells, ratio(below), hot.floor, hot.why))
    return Table(HOT_TITLE, ("path", "floor", "today", "gap", "the floor is", "the gap is"), rows) if rows else None


def machine(results: Results) -> Table:
    """Where and when; how busy it was; what is left out."""
    it = results.machine
    loads = [load for case in results.cases.values() for load in case.load_average]
    seconds = sum(case.seconds for case in results.cases.values())
    ours = ", ".join(f"{name} {version}" for name, version in it.get("versions", {}).items())
    core = f"the core {it['core']}, " if "core" in it else ""
    rows: list[tuple[str, ...]] = [
        ("when", f"{results.started}, {seconds / 60:.0f} minutes, size {results.size}"),
        ("machine", f"{it['cpu']}, {it['cores']} cores, {it['memory_gib']} GiB, {it['system']}"),
        ("load average", f"{min(loads):.1f} to {max(loads):.1f}" if loads else "–"),
        ("ours", f"commit {it['commit']}, {it['python']}, {core}{ours}"),
        ("peers", ", ".join(f"{name} {version}" for name, version in results.peers.items()) or "none"),
        ("trace", results.trace),
    ]
    rows += [("left out", note) for note in results.notes]
    rows += [
        ("failed", f"{name}, {side}: {' '.join(it.error.split())[:300]}")
        for name, case in results.cases.items()
        for side, it in case.sides.items()
        if it.error is not None
    ]
    return Table("run", ("", ""), rows)


TABLES: dict[str, Callable[[Results], Table | None]] = {
    "machine": machine,
    "paths": paths,
    **{
        group: lambda results, group=group: compared(results, group)  # type: ignore[misc]
        for group in ("index", "hits", "router", "third", "rpc", "copy", "load")
    },
}


def tables(results: Results) -> list[Table]:
    """All that there are."""
    return [table for make in TABLES.values() if (table := make(results)) is not None]


def markdown(results: Results) -> str:
    return "\n".join(f"### {table.title}\n\n{table.markdown()}" for table in tables(results))


def fill(text: str, results: Results) -> tuple[str, list[str], list[str]]:
    """A document with its marks filled in, the names of these, and of those that the results have nothing for, which
    are left as they were. BenchError: a mark has a name that is none, or no end; or there is no mark.
    """
    filled: list[str] = []
    left: list[str] = []

    def one(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in TABLES:
            raise BenchError(f"the mark bench:{name} is none; there are {', '.join(TABLES)}")
        table = TABLES[name](results)
        if table is None:
            left.append(name)
            return found[0]
        filled.append(name)
        return f"<!-- bench:{name} -->\n{table.markdown()}<!-- /bench -->"

    made, marks = MARK.subn(one, text)
    if marks != len(OPENS.findall(text)):
        raise BenchError("a mark has no <!-- /bench --> behind it, or is not on a line of its own")
    if not marks:
        raise BenchError("there is no mark: write <!-- bench:NAME --> and <!-- /bench --> on lines of their own")
    return made, filled, left


def into(folder: Path, document: Path) -> tuple[list[str], list[str]]:
    """Fill a document's marks, and keep results and pictures in `bench` beside it. As `fill`; BenchError: it can't be
    read or written.
    """
    results = read(folder)
    try:
        made, filled, left = fill(document.read_text(), results)
        kept = document.parent / "bench"
        kept.mkdir(exist_ok=True)
        for path in (folder / "results.json", *sorted(folder.glob("*.svg"))):
            if path.exists() and path.parent.resolve() != kept.resolve():
                shutil.copyfile(path, kept / path.name)
        document.write_text(made)
    except OSError as exc:
        raise BenchError(f"{document}: {exc.strerror or exc}") from exc
    return filled, left
