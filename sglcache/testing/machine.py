"""The laws under hypothesis: any order of whatever runners, copies and routers may do; everything is checked each time.

`IndexMachine` shrinks what it finds to a short program. It has no teardown that asserts: that would hide the first
failure behind the ones it brings about.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from sglcache.testing import hybrid_programs
from sglcache.testing.hybrid import Hybrid
from sglcache.testing.programs import Program, settings
from sglcache.testing.rig import Rig

T = TypeVar("T")


class DrawnChooser:
    """Choices that hypothesis makes, and can make smaller."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def integer(self, low: int, high: int) -> int:
        return self._data.draw(st.integers(low, high))

    def item(self, items: Sequence[T]) -> T:
        return items[self._data.draw(st.integers(0, len(items) - 1))]


class IndexMachine(RuleBasedStateMachine):
    """One index and its world. `fixed` overrides what the configuration draws."""

    fixed: dict[str, Any] = {}  # noqa: RUF012  # subclasses replace it whole
    program: Program

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        choose = DrawnChooser(data)
        self.program = Program(Rig(**{**settings(choose, **self.fixed), "waits": choose.integer(0, 1) > 0}))
        self.program.open(DrawnChooser(data))
        if self.program.rig.config.l3 is not None:
            self.program.earlier_life(DrawnChooser(data))

    @rule(data=st.data())
    def put(self, data: st.DataObject) -> None:
        self.program.put(DrawnChooser(data))

    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        self.program.acquire(DrawnChooser(data))

    @precondition(lambda self: self.program.rig.config.l3 is not None)
    @rule(data=st.data())
    def below(self, data: st.DataObject) -> None:
        self.program.below(DrawnChooser(data))

    @precondition(lambda self: self.program.rig.config.l3 is not None)
    @rule(data=st.data())
    def prefetch(self, data: st.DataObject) -> None:
        self.program.prefetch(DrawnChooser(data))

    @precondition(lambda self: self.program.open_leases())
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        self.program.extend(DrawnChooser(data))

    @precondition(lambda self: self.program.open_leases())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.program.cancel(DrawnChooser(data))

    @precondition(lambda self: self.program.open_leases())
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.program.commit(DrawnChooser(data))

    @precondition(lambda self: self.program.open_leases())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.program.plan_release(DrawnChooser(data))

    @precondition(lambda self: self.program.unsent())
    @rule(data=st.data())
    def issue(self, data: st.DataObject) -> None:
        self.program.issue(DrawnChooser(data))

    @precondition(lambda self: self.program.undone())
    @rule(data=st.data())
    def event(self, data: st.DataObject) -> None:
        self.program.event(DrawnChooser(data))

    @precondition(lambda self: self.program.rig.in_flight())
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        self.program.ack(DrawnChooser(data))

    @rule(data=st.data())
    def read_replies(self, data: st.DataObject) -> None:
        self.program.read(DrawnChooser(data))

    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        self.program.cut(DrawnChooser(data))

    @precondition(lambda self: self.program.rig.more)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self.program.step_long(DrawnChooser(data))

    @rule(data=st.data())
    def peek(self, data: st.DataObject) -> None:
        self.program.peek(DrawnChooser(data))

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        self.program.pin(DrawnChooser(data))

    @rule(data=st.data())
    def unpin_or_expire(self, data: st.DataObject) -> None:
        self.program.unpin(DrawnChooser(data))

    @precondition(lambda self: self.program.rig.waits)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        self.program.withdraw(DrawnChooser(data))

    @rule(data=st.data())
    def open_session(self, data: st.DataObject) -> None:
        self.program.open(DrawnChooser(data))

    @rule(data=st.data())
    def end_session(self, data: st.DataObject) -> None:
        self.program.end(DrawnChooser(data))

    @rule(data=st.data())
    def shard_gone(self, data: st.DataObject) -> None:
        self.program.gone(DrawnChooser(data))

    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        self.program.clear(DrawnChooser(data))

    @rule(data=st.data())
    def wrong_command(self, data: st.DataObject) -> None:
        self.program.stranger(DrawnChooser(data))

    @precondition(lambda self: self.program.rig.tenants)
    @rule(data=st.data())
    def limit(self, data: st.DataObject) -> None:
        self.program.limit(DrawnChooser(data))

    @rule()
    def settle(self) -> None:
        self.program.rig.settle()


class HybridMachine(RuleBasedStateMachine):
    """The same steps in whatever order hypothesis likes, which makes a short program of what it finds."""

    fixed: dict[str, Any] = {}  # noqa: RUF012  # subclasses replace it whole
    program: hybrid_programs.Program

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        choose = DrawnChooser(data)
        self.program = hybrid_programs.Program(Hybrid(**hybrid_programs.settings(choose, **self.fixed)))
        self.program.open(choose)

    @rule(data=st.data())
    def put(self, data: st.DataObject) -> None:
        self.program.put(DrawnChooser(data))

    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        self.program.acquire(DrawnChooser(data))

    @precondition(lambda self: self.program.open_leases())
    @rule(data=st.data(), what=st.sampled_from(("commit", "commit", "release", "extend", "cancel")))
    def of_a_lease(self, data: st.DataObject, what: str) -> None:
        self.program.actions[what][1](DrawnChooser(data))

    @precondition(lambda self: self.program.unsent())
    @rule(data=st.data())
    def issue(self, data: st.DataObject) -> None:
        self.program.issue(DrawnChooser(data))

    @precondition(lambda self: self.program.undone())
    @rule(data=st.data())
    def event(self, data: st.DataObject) -> None:
        self.program.event(DrawnChooser(data))

    @precondition(lambda self: self.program.world.in_flight())
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        self.program.ack(DrawnChooser(data))

    @precondition(lambda self: self.program.world.index.busy)
    @rule()
    def step(self) -> None:
        self.program.world.step()

    @rule(
        data=st.data(),
        what=st.sampled_from(
            ("peek", "read", "cut", "pin", "unpin", "open", "stranger", "end", "gone", "clear", "grow")
        ),
    )
    def other(self, data: st.DataObject, what: str) -> None:
        self.program.actions[what][1](DrawnChooser(data))

    @rule()
    def settle(self) -> None:
        self.program.world.settle()
