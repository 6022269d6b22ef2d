"""Which fault comes when: a function of the seed, or what a file says.

Moments are counted in operations of all runners together, for these are the same on a fast machine and a slow one; the
rate in seconds is only what a usual machine makes of it. What a fault does in particular (whom it hits, at which point,
for how long) it draws from a number of its own.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sglcache.errors import BadRequest

OPERATIONS_PER_S = 150.0  # of one runner on a usual machine


class Planned(NamedTuple):
    """A fault to come."""

    number: int
    at: int  # operations of all runners since the beginning
    kind: str
    seed: int  # what it draws from


class Done(NamedTuple):
    """What became of it."""

    planned: Planned
    at: int  # operations when it began
    at_s: float  # seconds since the beginning
    took_s: float
    what: str


def plan(seed: int, weights: Mapping[str, int], rate: float, num_runners: int) -> Iterator[Planned]:
    """Without end. Each kind comes as often as its weight says in every round, in a new order each time."""
    rng = random.Random(f"schedule/{seed}")
    bag = [kind for kind, weight in sorted(weights.items()) for _ in range(weight)]
    at, number = 0.0, 0
    while bag:
        rng.shuffle(bag)
        for kind in bag:
            number += 1
            at += rng.expovariate(1.0) * OPERATIONS_PER_S * num_runners / rate
            yield Planned(number, int(at), kind, rng.getrandbits(32))


def written(options: Mapping[str, Any], done: Iterable[Done]) -> str:
    """A schedule as a file has it: with the options that the run was given, and when each fault really began."""
    rows = [
        {"at": each.at, "kind": each.planned.kind, "seed": each.planned.seed, "at_s": round(each.at_s, 3),
         "took_s": round(each.took_s, 3), "what": each.what}
        for each in done
    ]  # fmt: skip
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    return f'{{"options": {json.dumps(dict(options))},\n "faults": [\n  {lines}\n ]}}\n'


def read(path: Path) -> tuple[dict[str, Any], list[Planned]]:
    """Options and faults. BadRequest: it can't be read, or is no schedule."""
    try:
        data = json.loads(path.read_text())
        faults = [
            Planned(number, int(row["at"]), str(row["kind"]), int(row["seed"]))
            for number, row in enumerate(data["faults"], 1)
        ]
        return dict(data["options"]), faults
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise BadRequest(f"{path} is no schedule of a torture: {exc!r}; name one that a run has written") from exc


def chosen(names: str, known: Sequence[str]) -> list[str]:
    """The faults of `--faults`: all, none, or their names with commas; `all,-name` leaves one out. BadRequest."""
    found: list[str] = []
    for name in filter(None, (each.strip() for each in names.split(","))):
        wanted = name.removeprefix("-")
        if wanted not in (*known, "all", "none"):
            raise BadRequest(f"there is no fault {wanted!r}; use all, none, or some of {', '.join(known)}")
        if name == "all":
            found += [each for each in known if each not in found]
        elif name.startswith("-"):
            found = [each for each in found if each != wanted]
        elif name != "none" and name not in found:
            found.append(name)
    return found
