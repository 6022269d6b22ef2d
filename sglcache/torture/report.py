"""What came of a torture: for people, and for programs."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Report:
    """`problems` is empty if everything was as it should be."""

    seed: int
    folder: str | None = None  # where everything is, if it was kept
    seconds: float = 0.0
    num_runners: int = 0
    requests: int = 0
    operations: int = 0
    input_tokens: int = 0
    hit_tokens: dict[str, int] = field(default_factory=dict)  # by tier
    checked_pages: int = 0
    checked_states: int = 0
    no_space: int = 0  # commands that found no room
    lost: int = 0  # times that a runner lost daemon or session
    lives: dict[str, int] = field(default_factory=dict)  # of runners and ranks
    faults: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    not_possible: dict[str, str] = field(default_factory=dict)  # why a kind that was wanted was not done
    checks: Counter[str] = field(default_factory=Counter)
    longest_s: dict[str, float] = field(default_factory=dict)  # that a runner stood still, by fault; "none" without
    memory: dict[str, tuple[float, float]] = field(default_factory=dict)  # MiB at the first and last quiet point
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_json(self) -> str:
        return json.dumps({"ok": self.ok, **vars(self)})


def table(report: Report) -> list[tuple[str, str]]:
    """Label and text of each line."""
    matched = sum(report.hit_tokens.values())

    def share(part: int, whole: int) -> str:
        return f"{100 * part / whole:.0f} %" if whole else "none"

    def counted(counts: Counter[str]) -> str:
        return ", ".join(f"{count:,} {name}" for name, count in counts.most_common()) or "none"

    rate = report.operations / report.seconds if report.seconds else 0.0
    hits = ", ".join(f"{tokens:,} {tier} ({share(tokens, matched)})" for tier, tokens in report.hit_tokens.items())
    lines = [
        ("requests", f"{report.requests:,} of {report.num_runners} runners in {report.seconds:.0f} s"),
        ("operations", f"{report.operations:,}, {rate:,.0f} a second; {report.no_space:,} found no room"),
        ("hits", f"{share(matched, report.input_tokens)} of {report.input_tokens:,} tokens: {hits}"),
        ("faults", counted(report.faults)),
        ("kills", counted(report.kills)),
        ("lives", ", ".join(f"{count:,} of {name}" for name, count in report.lives.items())),
        ("lost", f"{report.lost:,} times a runner lost the daemon or its session"),
        (
            "checked",
            f"the bytes of {report.checked_pages:,} pages and {report.checked_states:,} states of hits; "
            f"{counted(report.checks)}",
        ),
    ]
    if report.longest_s:
        longest = sorted(report.longest_s.items(), key=lambda item: -item[1])
        lines.append(("stood still", "a runner, longest: " + ", ".join(f"{s:.1f} s {name}" for name, s in longest)))
    if report.memory:
        told = ", ".join(f"{name} {first:.1f} then {last:.1f} MiB" for name, (first, last) in report.memory.items())
        lines.append(("memory", f"without pools: {told}"))
    for why in dict.fromkeys(report.not_possible.values()):
        names = [name for name, each in report.not_possible.items() if each == why]
        lines.append(("not done", f"{', '.join(names)}: {why}"))
    return lines


def describe(report: Report) -> str:
    """The report for people, without the failure."""
    return "\n".join(f"{label:<12} {text}" for label, text in table(report))
