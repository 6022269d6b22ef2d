"""Two pictures of a run, as SVG: how many times longer peers take, and hot paths beside their floors.

matplotlib is of the extra `bench`, and is imported here alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglcache.bench import cases as plan
from sglcache.bench.cases import HOT
from sglcache.bench.suite import SIZES, Results

OURS, GREY = "#1f6f8b", "#b8b8b8"
PEERS = ("#d1495b", "#edae49", "#8d5a97", "#66a182", "#9bc53d", "#5b8e7d")
NOT_DRAWN = ("cpu_us", "p99_us")  # of the index: the table has them


def draw(results: Results, folder: Path) -> list[Path]:
    """What there is to draw. ImportError: no matplotlib."""
    import matplotlib as mpl

    mpl.use("svg")
    # The text stays text, in whatever face the reader has; and the same results give the same bytes.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "sglcache", "font.size": 9})
    made = (_peers(results, folder / "peers.svg"), _paths(results, folder / "paths.svg"))
    return [path for path in made if path is not None]


def _peers(results: Results, path: Path) -> Path | None:
    bars: list[tuple[str, str, float, float, float]] = []
    names: list[str] = []
    for case in plan.cases(SIZES[results.size], ""):
        result = results.cases.get(case.name)
        for metric in case.metrics if result is not None else ():
            if case.group == "index" and metric.name in NOT_DRAWN:
                continue
            for side in case.sides:
                figure = result.figures.get(metric.name, {}).get(side.name) if result is not None else None
                if side.kind != "peer" or figure is None or figure.ratio is None:
                    continue
                if side.name not in names:
                    names.append(side.name)
                title = f"{case.title}: {metric.title}" if case.group == "index" else metric.title
                bars.append((title, side.name, figure.ratio, figure.ratio_least or 0, figure.ratio_most or 0))
    if not bars:
        return None
    figure_, axes = _axes(len(bars))
    for at, (_, name, ratio, least, most) in enumerate(bars):
        color = PEERS[names.index(name) % len(PEERS)]
        axes.barh(at, ratio - 1, left=1, color=color, height=0.7, label=name)
        axes.plot([least, most], [at, at], color="black", linewidth=1)
        axes.text(max(ratio, most, 1.0) * 1.08, at, f"{ratio:.2f}", va="center", fontsize=8)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel(
        "times as long as sglcache takes (medians; the line is single pairs); left of 1 the peer is quicker"
    )
    _finish(axes, [bar[0] for bar in bars])
    return _save(figure_, path)


def _paths(results: Results, path: Path) -> Path | None:
    bars: list[tuple[str, float, str]] = []
    for hot in HOT:
        case = next(case for case in plan.cases(SIZES[results.size], "") if case.name == hot.case)
        floor = next(side.name for side in case.sides if side.kind == "floor")
        result = results.cases.get(hot.case)
        found = result.figures.get(hot.metric, {}) if result is not None else {}
        figure = found.get(floor)
        if figure is not None and figure.ratio is not None:
            unit = next(metric.unit for metric in case.metrics if metric.name == hot.metric)
            today = found[case.sides[0].name].median
            bars.append((hot.title, figure.ratio, f"{today:,.3g} {unit} of {figure.median:,.3g}"))
    if not bars:
        return None
    figure_, axes = _axes(len(bars))
    for at, (_, gap, text) in enumerate(bars):
        axes.barh(at, gap, color=OURS, height=0.7, label="today")
        axes.barh(at, min(gap, 1), color=GREY, height=0.7, label="the floor")
        axes.text(gap + 0.1, at, f"{gap:.1f}: {text}", va="center", fontsize=8)
    axes.set_xlabel("times the floor")
    axes.set_xlim(0, max(gap for _, gap, _ in bars) * 1.35)
    _finish(axes, [bar[0] for bar in bars])
    return _save(figure_, path)


def _axes(rows: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.28 * rows))
    return figure, figure.subplots()


def _finish(axes: Any, titles: Sequence[str]) -> None:
    axes.set_yticks(range(len(titles)), titles)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.legend(once.values(), once.keys(), loc="lower right", frameon=False)


def _save(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, format="svg", metadata={"Date": None})
    return path
