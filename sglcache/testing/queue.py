"""Who waits in line for room, as the law is written down: by brute force, and from what was seen from outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglcache.testing.model import LeaseModel, SessionModel

if TYPE_CHECKING:
    from sglcache.testing.rig import Growing


@dataclass(eq=False)
class InLine:
    """An acquire or extend that stands in line."""

    request: int
    session: SessionModel
    since: float
    until: float
    copies: float
    num_bytes: int = 0
    make: Callable[[], tuple[LeaseModel, int]] | None = None  # an acquire's lease, and the pages it needs, as of now
    growing: list[Growing] = field(default_factory=list)


class Queue:
    """Extends before acquires; of each, sessions in turns, and each session's as they came."""

    def __init__(self) -> None:
        self._rows: dict[bool, list[InLine]] = {True: [], False: []}  # by whether they are extends, as they came
        self._turns: dict[bool, list[SessionModel]] = {True: [], False: []}  # whose turn it is, then the others'

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    @property
    def everyone(self) -> list[InLine]:
        return [*self._rows[True], *self._rows[False]]

    @property
    def extends(self) -> int:
        return len(self._rows[True])

    @property
    def first(self) -> InLine | None:
        return self._first(self._rows, self._turns)

    def of(self, session: SessionModel) -> int:
        return sum(each.session is session for each in self.everyone)

    def find(self, request: int) -> InLine | None:
        return next((each for each in self.everyone if each.request == request), None)

    def add_first(self, each: InLine) -> None:
        """Before all others of its kind, and it is its session's turn."""
        kind = each.make is None
        self._rows[kind].insert(0, each)
        self._turns[kind] = [each.session, *(other for other in self._turns[kind] if other is not each.session)]

    def add(self, each: InLine) -> None:
        kind = each.make is None
        self._rows[kind].append(each)
        if each.session not in self._turns[kind]:
            self._turns[kind].append(each.session)

    def remove(self, each: InLine, served: bool) -> None:
        self._remove(self._rows, self._turns, each, served)

    def place(self, each: InLine) -> int:
        """By letting all before it be served."""
        rows = {kind: list(row) for kind, row in self._rows.items()}
        turns = {kind: list(turn) for kind, turn in self._turns.items()}
        place = 1
        while (first := self._first(rows, turns)) is not each:
            assert first is not None
            self._remove(rows, turns, first, True)
            place += 1
        return place

    @staticmethod
    def _first(rows: dict[bool, list[InLine]], turns: dict[bool, list[SessionModel]]) -> InLine | None:
        for kind in (True, False):
            if turns[kind]:
                return next(each for each in rows[kind] if each.session is turns[kind][0])
        return None

    @staticmethod
    def _remove(
        rows: dict[bool, list[InLine]], turns: dict[bool, list[SessionModel]], each: InLine, served: bool
    ) -> None:
        kind = each.make is None
        rows[kind].remove(each)
        more = any(other.session is each.session for other in rows[kind])
        if served or not more:
            turns[kind].remove(each.session)
            if more:
                turns[kind].append(each.session)
