"""The suite: what it says of how two sides compare, that it goes on after whatever ends it, and that a document has its
figures from a file. What is measured here is tiny: of speed it says nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from sglcache.bench import beside, cases, flame, paths, plots, report, suite
from sglcache.bench.cases import Case, Metric, Side
from sglcache.bench.cli import bench
from sglcache.bench.harness import BenchError
from sglcache.bench.suite import CaseResult, Options, Results, SideResult
from sglcache.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs"


def result(*, ours: list[float], floor: list[float], peer: list[float], more: bool = False) -> Results:
    """Of one case, in a table that there is."""
    case = Case(
        "acquire",
        "paths",
        "acquire",
        (Metric("us", "an operation", "µs", more),),
        (Side("sglcache", "ours"), Side("floor", "floor", source="sglcache"), Side("other", "peer", "peer")),
    )
    sides = {"sglcache": ours, "floor": floor, "other": peer}
    kinds = {side.name: side.kind for side in case.sides}
    done = CaseResult(
        case.title, case.group, {name: SideResult(kinds[name], [{"us": v} for v in own]) for name, own in sides.items()}
    )
    done.figures = suite.figures(case, done)
    machine = {"cpu": "x", "cores": 2, "memory_gib": 1, "system": "Linux", "commit": "c", "python": "CPython"}
    return Results(suite.FORMAT, "2026-01-01T00:00:00Z", "tiny", "made up", machine, {}, {"acquire": done})


def test_a_ratio_is_how_much_better_ours_is_and_how_far_from_the_floor() -> None:
    found = result(ours=[2.0, 4.0], floor=[1.0, 1.0], peer=[6.0, 6.0]).cases["acquire"].figures["us"]
    assert found["sglcache"].ratio is None
    assert (found["other"].ratio, found["other"].ratio_least, found["other"].ratio_most) == (2.0, 1.5, 3.0)
    assert (found["floor"].ratio, found["floor"].ratio_least, found["floor"].ratio_most) == (3.0, 2.0, 4.0)


def test_where_more_is_better_ratios_are_turned_round() -> None:
    found = result(ours=[8.0], floor=[10.0], peer=[4.0], more=True).cases["acquire"].figures["us"]
    assert (found["other"].ratio, found["floor"].ratio) == (2.0, 1.25)


def test_a_side_that_was_measured_less_often_is_compared_pair_by_pair() -> None:
    found = result(ours=[2.0, 2.0, 2.0], floor=[], peer=[4.0]).cases["acquire"].figures["us"]
    assert "floor" not in found
    assert (found["other"].ratio_least, found["other"].ratio_most) == (2.0, 2.0)


def test_rows_are_flattened() -> None:
    assert suite.flatten({"a": 1, "b": [{"c": 2.5}, 3], "d": {"e": {"f": "x"}}}) == {
        "a": 1, "b.0.c": 2.5, "b.1": 3, "d.e.f": "x",
    }  # fmt: skip


@pytest.mark.parametrize("size", list(suite.SIZES))
def test_every_case_says_what_it_is_of(size: str) -> None:
    every = cases.cases(suite.SIZES[size], "trace.jsonl")
    assert len({case.name for case in every}) == len(every)
    assert {case.group for case in every} <= set(report.TABLES)
    for case in every:
        sides = [side.name for side in case.sides]
        assert (case.sides[0].kind, case.sides[0].source) == ("ours", ""), case.name
        assert len(set(sides)) == len(sides), case.name
        for side in case.sides:
            assert bool(side.source) != bool(side.words), f"{case.name}, {side.name}: a command or a source"
            assert not side.source or side.source in sides, f"{case.name}, {side.name}"
            if side.where == "peer" and side.words:
                assert (suite.SCRIPTS / side.words[0]).exists(), side.words[0]
    for hot in cases.HOT:
        case = next(case for case in every if case.name == hot.case)
        assert hot.metric in {metric.name for metric in case.metrics}, hot.title
        assert "floor" in {side.kind for side in case.sides}, hot.title


@pytest.mark.parametrize("path", list(paths.PATHS))
def test_a_path_and_its_floor_do_the_same(path: str) -> None:
    row = paths.run(paths.Options(path, operations=5, warm_up=1))
    assert row["today_us"] > 0 < row["floor_us"]


def test_a_router_is_told_of_every_block() -> None:
    row = beside.mirror(beside.MirrorOptions(requests=8, tokens=64, page_size=16))
    assert row["blocks"] == 8 * 4 - 6 * 2  # of each four conversations the first half is told of once


def test_a_made_up_trace_is_one(tmp_path: Path) -> None:
    from sglcache.bench import trace

    path = tmp_path / "trace.jsonl"
    suite.make_trace(path, 50)
    requests = list(trace.requests(path))
    assert len(requests) == 50
    first_blocks = {request.tokens[:512].tobytes() for request in requests}
    assert len(first_blocks) <= 4
    suite.make_trace(tmp_path / "again", 50)
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


# -- running ------------------------------------------------------------------------------------------


def options(folder: Path, *only: str, peers: Path | None = None) -> Options:
    return Options(folder, "tiny", None, only, peers, flames=False)


@pytest.mark.daemons
def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    told = []

    def tell(step: suite.Step) -> None:
        told.append(step.case)
        if step.case == "release":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        suite.run(options(tmp_path, "acquire", "release"), tell)
    before = suite.read(tmp_path)
    assert before.cases["acquire"].done
    assert "release" not in before.cases or not before.cases["release"].done
    told.clear()
    after = suite.run(options(tmp_path, "acquire", "release"), lambda step: told.append(step.case))
    assert told == ["release"]
    assert after.cases["acquire"] == before.cases["acquire"]
    assert after.cases["release"].done
    assert not after.failed
    with pytest.raises(ConfigError, match="take another folder"):
        suite.run(options(tmp_path, "acquire")._replace(size="quick"))
    with pytest.raises(ConfigError, match="by no case"):
        suite.run(options(tmp_path, "nothing"))


def test_who_interrupts_it_is_told_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> Results:
        raise KeyboardInterrupt

    monkeypatch.setattr(suite, "run", stop)
    done = CliRunner().invoke(bench, ["suite", "--into", str(tmp_path)], standalone_mode=False)
    assert done.return_value == 130
    assert f"`sglcache bench suite --into {tmp_path}` with the same options goes on" in done.output


def peer(folder: Path, program: str) -> Path:
    """An environment whose Python is this program."""
    python = folder / "peers" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)
    return python.parents[1]


@pytest.mark.daemons
def test_a_peer_that_is_not_there_or_dies_is_told_and_the_rest_goes_on(tmp_path: Path) -> None:
    missing = suite.run(options(tmp_path / "a", "router", peers=tmp_path / "none"))
    assert any("Dynamo" in note and "peers.sh" in note for note in missing.notes)
    assert missing.cases["router"].figures["match_us"].keys() == {"sglcache"}
    dead = suite.run(options(tmp_path / "b", "router", peers=peer(tmp_path, "echo broken >&2; exit 3")))
    case = dead.cases["router"]
    assert "exited 3: broken" in str(case.sides["Dynamo 1.6.1"].error)
    assert len(case.sides["sglcache"].rows) == 1
    assert case.done
    assert dead.failed == []  # it is none of ours
    assert any(line[0] == "failed" for line in report.machine(dead).rows)


@pytest.mark.daemons
def test_a_peer_that_did_other_work_is_not_compared(tmp_path: Path) -> None:
    other = peer(tmp_path, """echo '{"system": "x", "blocks": 7, "apply_us": 1.0, "match_us": 2.0, "find_us": 1.0}'""")
    case = suite.run(options(tmp_path, "router", peers=other)).cases["router"]
    assert "with blocks = 7" in str(case.sides["Dynamo 1.6.1"].error)
    assert not case.sides["Dynamo, hashes given"].rows


def test_results_are_what_they_say(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="No such file"):
        suite.read(tmp_path)
    (tmp_path / "results.json").write_text('{"format": 1}')
    with pytest.raises(BenchError, match="no results file of this version"):
        suite.read(tmp_path)
    made = result(ours=[2.0], floor=[1.0], peer=[3.0])
    (tmp_path / "results.json").write_bytes(msgspec.json.encode(made))
    assert suite.read(tmp_path) == made


@pytest.mark.daemons
def test_a_suite_runs_from_its_command_to_its_tables(tmp_path: Path) -> None:
    only = [word for name in ("hits", "index", "cut") for word in ("--only", name)]
    words = ["suite", "--tiny", "--no-peers", "--no-flames", "--into", str(tmp_path), *only]
    done = CliRunner().invoke(bench, words)
    assert done.exit_code == 0, done.output
    results = suite.read(tmp_path)
    assert not results.failed
    assert {case.group for case in results.cases.values()} == {"hits", "index", "paths"}
    for case in results.cases.values():
        for side, it in case.sides.items():
            assert it.kind == "peer" or it.rows, f"{case.title}, {side}"
    tables = (tmp_path / "tables.md").read_text()
    assert "| cut: a commit's event |" in tables
    shown = CliRunner().invoke(bench, ["report", str(tmp_path)])
    assert shown.output == tables


# -- the document -------------------------------------------------------------------------------------


def test_marks_are_filled_and_nothing_else_is_touched(tmp_path: Path) -> None:
    results = result(ours=[2.0, 4.0], floor=[1.0, 1.0], peer=[6.0, 6.0])
    text = "before\n<!-- bench:paths -->\nold\n<!-- /bench -->\nbetween\n<!-- bench:hits -->\nkept\n<!-- /bench -->\n"
    made, filled, left = report.fill(text, results)
    assert (filled, left) == (["paths"], ["hits"])
    assert "| acquire, 2,048 tokens cached | 1.00 µs | 3.00 µs | 3.00 (2.00–4.00) |" in made
    assert "old" not in made
    assert made.startswith("before\n")
    assert made.endswith("between\n<!-- bench:hits -->\nkept\n<!-- /bench -->\n")
    assert report.fill(made, results)[0] == made


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<!-- bench:nothing -->\n<!-- /bench -->\n", "bench:nothing is none; there are machine, paths"),
        ("<!-- bench:paths -->\n", "no <!-- /bench -->"),
        ("a <!-- bench:paths --> b\n<!-- /bench -->\n", "not on a line of its own"),
        ("nothing\n", "there is no mark"),
    ],
)
def test_a_mark_that_is_none_is_refused(text: str, says: str) -> None:
    with pytest.raises(BenchError, match=says):
        report.fill(text, result(ours=[2.0], floor=[1.0], peer=[3.0]))


def test_a_report_keeps_results_and_pictures_beside_the_document(tmp_path: Path) -> None:
    run, document = tmp_path / "run", tmp_path / "docs" / "page.md"
    run.mkdir()
    document.parent.mkdir()
    results = result(ours=[2.0], floor=[1.0], peer=[3.0])
    (run / "results.json").write_bytes(msgspec.json.encode(results))
    (run / "paths.svg").write_text("<svg/>")
    document.write_text("<!-- bench:machine -->\n<!-- /bench -->\n")
    done = CliRunner().invoke(bench, ["report", str(run), "--into", str(document)])
    assert done.exit_code == 0, done.output
    assert "machine written" in done.output
    assert "| when | 2026-01-01T00:00:00Z" in document.read_text()
    assert suite.read(document.parent / "bench") == results
    assert (document.parent / "bench" / "paths.svg").exists()


def test_the_document_has_the_figures_of_the_results_beside_it() -> None:
    text = (DOCS / "performance.md").read_text()
    assert report.fill(text, suite.read(DOCS / "bench"))[0] == text


def test_pictures_are_drawn_of_what_there_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = plots.draw(result(ours=[2.0], floor=[1.0], peer=[3.0]), tmp_path)
    assert [path.name for path in drawn] == ["paths.svg"]
    first = drawn[0].read_bytes()
    assert plots.draw(result(ours=[2.0], floor=[1.0], peer=[3.0]), tmp_path)[0].read_bytes() == first


def test_numbers_have_three_digits_that_mean_something() -> None:
    show: Callable[[float], str] = report.number
    assert [show(value) for value in (0, 0.01234, 1.234, 12.34, 1234.5)] == ["0", "0.012", "1.23", "12.3", "1,234"]


SPUN = "a (x.py:1);spin (sglcache/bench/paths.py:9);step (sglcache/bench/paths.py:1)"
STACKS = f"""{SPUN};Index.go (sglcache/core/index.py:7) 60
{SPUN} 39
{SPUN};tiny <&> (y.py:7) 0
a (x.py:1);load (x.py:3) 100
"""


def test_a_flame_graph_has_what_is_below_a_function() -> None:
    tree = flame.fold(STACKS, "spin (")
    assert tree.samples == 99
    (step,) = tree.children.values()
    assert [(node.frame.split()[0], node.samples) for node in step.children.values()] == [("Index.go", 60), ("tiny", 0)]
    assert flame.fold(STACKS).samples == 199
    assert flame.fold(STACKS, "nothing").samples == 0


def test_a_flame_graph_is_a_picture_of_boxes() -> None:
    from xml.etree import ElementTree

    drawn = ElementTree.fromstring(flame.svg(flame.fold(STACKS, "spin ("), "a <title>"))
    titles = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == ["step (sglcache/bench/paths.py): 100.0%", "Index.go (sglcache/core/index.py): 60.6%"]
