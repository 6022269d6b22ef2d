"""Law 5 from the index to a router, over a link that loses, cuts off and kills, and lives that end: `testing.stream`.

`SGLCACHE_DEEP=N` runs N times as many stories, new ones each time.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from sglcache.client.follower import Follower
from sglcache.client.picture import Picture
from sglcache.client.state import MirrorState
from sglcache.core.snapshot import Snapshot
from sglcache.net.replay import Replay
from sglcache.net.ring import Ring
from sglcache.testing.machine import DrawnChooser
from sglcache.testing.model import LeaseModel
from sglcache.testing.planting import plant
from sglcache.testing.programs import SeededChooser
from sglcache.testing.stream import World, play

DEEP = int(os.environ.get("SGLCACHE_DEEP", "0"))
NUM_STORIES = 400  # in which a planted bug must show; most do in the first few


class StreamMachine(RuleBasedStateMachine):
    """Any order of all that may happen to index, link and mirror; hypothesis makes a short story of what is wrong."""

    world: World

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.world = World(DrawnChooser(data))

    @rule(data=st.data())
    def change(self, data: st.DataObject) -> None:
        self.world.step(DrawnChooser(data))

    @rule(data=st.data())
    def put(self, data: st.DataObject) -> None:
        self.world.put(DrawnChooser(data))

    @rule(heartbeat=st.booleans())
    def cut(self, heartbeat: bool) -> None:
        self.world.cut(heartbeat)

    @precondition(lambda self: self.world.live)
    @rule(count=st.integers(1, 8))
    def deliver(self, count: int) -> None:
        self.world.deliver(count)

    @precondition(lambda self: self.world.live)
    @rule(count=st.integers(1, 4))
    def lose(self, count: int) -> None:
        self.world.lose(count)

    @rule()
    def cut_or_mend(self) -> None:
        self.world.cut_or_mend()

    @precondition(lambda self: not self.world.follower.synced)
    @rule(count=st.integers(1, 4))
    def answer(self, count: int) -> None:
        self.world.answer(count)

    @precondition(lambda self: self.world.answers)
    @rule(count=st.integers(1, 4))
    def receive(self, count: int) -> None:
        self.world.receive(count)

    @precondition(lambda self: not self.world.follower.synced)
    @rule()
    def lose_request(self) -> None:
        self.world.lose_request()

    @precondition(lambda self: self.world.replay is not None)
    @rule()
    def kill_replay(self) -> None:
        self.world.kill_replay()

    @precondition(lambda self: not self.world.follower.synced)
    @rule()
    def lose_patience(self) -> None:
        self.world.lose_patience()

    @rule()
    def rejoin(self) -> None:
        self.world.rejoin()

    @rule(data=st.data())
    def visit(self, data: st.DataObject) -> None:
        self.world.visit(DrawnChooser(data))

    @rule()
    def announce(self) -> None:
        self.world.announce()

    @rule()
    def restart(self) -> None:
        self.world.restart()

    @rule()
    def heal(self) -> None:
        self.world.heal()


@pytest.mark.timeout(0 if DEEP else 120)
def test_any_story_under_hypothesis() -> None:
    few = settings(
        max_examples=150,
        stateful_step_count=50,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    deep = settings(few, max_examples=150 * max(1, DEEP), stateful_step_count=100, derandomize=False)
    run_state_machine_as_test(StreamMachine, settings=deep if DEEP else few)


VARIANTS: dict[str, dict[str, Any]] = {
    "any": {},
    "two tiers": {"num_pages": 10, "host_pages": 40},
    "slices": {"evict_slice": 1, "cut_slice": 8, "host_pages": 24},
    "small batches": {"max_batch_blocks": 3},
}


@pytest.mark.timeout(0 if DEEP else 120)
@pytest.mark.parametrize("variant", VARIANTS)
def test_any_seeded_story(variant: str) -> None:
    first = random.randrange(1 << 40) if DEEP else 0
    for seed in range(first, first + 100 * max(1, DEEP)):
        try:
            play(seed, **VARIANTS[variant])
        except Exception as exc:
            exc.add_note(f"sglcache.testing.stream.play({seed}, **{VARIANTS[variant]})")
            raise


def test_a_replay_does_not_end_before_all_that_it_told_is_in_a_batch() -> None:
    """A page's copy reached the host after the last cut: a snapshot tells of it, and no batch does yet."""
    world = World(SeededChooser(0), page_size=4, num_pages=16, host_pages=16, max_batch_blocks=4096)
    rig = world.rig
    runner = rig.open_session()
    lease = rig.acquire(runner, range(8))
    assert isinstance(lease, LeaseModel)
    rig.commit(runner, lease)
    world.cut()
    rig.copies_done()
    assert rig.index.uncut
    world.answer(10)
    world.receive(10)
    assert len(world.follower.state.hashes("CPU_PINNED")) == 2
    world.cut()
    world.answer(10)
    world.receive(10)
    world.deliver(10)
    assert world.follower.state.exact


def test_the_stories_are_not_idle() -> None:
    """Every kind of thing happens in them, and mostly the mirror is exact while it does."""
    worlds = [play(seed) for seed in range(40)]
    assert sum(world.exact_checks for world in worlds) > 3000
    assert sum(world.turns.num_done for world in worlds) > 40
    states = [world.follower.state for world in worlds]
    assert sum(state.stale_batches for state in states) > 100
    assert sum(bool(state.hashes("GPU")) for state in states) > 20
    assert sum(bool(state.hashes("CPU_PINNED")) for state in states) > 10


Edit = tuple[Any, str, str, str]
CLEARS: Edit = (Picture, "apply", "            self._ranks[rank] = _Rank(self._groups)", "            pass")

# By what they get wrong: where, and what is read for what.
BUGS: dict[str, list[Edit]] = {
    # -- the mirror's numbers
    "a gap is skipped": [(MirrorState, "apply", "            if not replayed:\n                return None\n", "")],
    "a gap before a heartbeat is no gap": [
        (MirrorState, "apply", "if not replayed:\n", "if not replayed and batch.events:\n")
    ],
    "what was there before is taken again": [
        (MirrorState, "apply", "elif seq < expected and not (", "elif seq < expected and replayed and not (")
    ],
    "clears are forgotten": [
        CLEARS,
        (MirrorState, "apply", "                self.picture.clear()\n", "                pass\n"),
    ],
    # -- its snapshots
    "a snapshot is taken for a picture at its first frame": [
        (MirrorState, "apply", "self.exact = not replayed", "self.exact = True")
    ],
    "a snapshot lies over what was known": [
        CLEARS,
        (MirrorState, "apply", "if replayed or not batch.starts_anew:", "if not replayed:"),
    ],
    "of a snapshot only the first frame is taken": [
        (MirrorState, "apply", "self.snapshot is not None and seq == expected - 1", "False")
    ],
    "half a snapshot is gone on from": [
        (Follower, "lost_replay", "0 if self.state.snapshot is not None else self.state", "self.state")
    ],
    # -- its requests
    "nobody asks again": [(Follower, "lost_replay", "self._ask(", "(lambda start: None)(")],
    "what came during a replay is taken at once": [
        (Follower, "live", "        if self.synced:\n", "        if True:\n")
    ],
    "any live batch ends a replay": [
        (Follower, "live", "if not self.synced and self._starts_anew(seq, payload):", "if not self.synced:")
    ],
    "a replay ends with its first message": [
        (Follower, "replayed", "        return facts\n", "        return facts + self.end_replay()\n")
    ],
    # -- its blocks
    "what leaves one tier leaves all": [
        (Picture, "apply", "held.remove(medium_of(event), event.block_hashes)",
         "[held.remove(name, event.block_hashes) for name in held.tiers]")
    ],
    "a removal of many takes the first": [
        (Picture, "apply", "held.remove(medium_of(event), event.block_hashes)",
         "held.remove(medium_of(event), event.block_hashes[:1])")
    ],
    # -- the teller's side
    "what happens during a snapshot is not told": [
        (Replay, "_from_snapshot", "elif (batch := self._ring.at(self._next)) is not None:", "elif batch := None:"),
        (Replay, "_from_snapshot", "self._until = last", "self._until = -1"),
    ],
    "a snapshot takes the number after": [
        (Replay, "_from_snapshot", "self._next = last + 1", "self._next = last + 2")
    ],
    "what the ring has lost is not missed": [
        (Ring, "has_from", "seq >= self.born and seq > self._lost", "seq >= self.born")
    ],
    "no snapshot begins with a clear": [(Snapshot, "next", "building.clear()", "pass")],
}  # fmt: skip
LATE = {"what happens during a snapshot is not told": 40}  # the seed that shows it, to save the time until there


def _bug(name: str) -> Any:
    """What is planted in a picture goes by its source."""
    marks = [pytest.mark.pure] if any(where is Picture for where, *_ in BUGS[name]) else []
    return pytest.param(name, id=name.replace(" ", "-"), marks=marks)


@pytest.mark.parametrize("bug", [*map(_bug, BUGS)])
def test_planted_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for edit in BUGS[bug]:
        plant(monkeypatch, *edit)
    for seed in (LATE.get(bug, 0), *range(NUM_STORIES // len(VARIANTS))):
        for fixed in VARIANTS.values():
            try:
                play(seed, **fixed)
            except AssertionError:
                return
    pytest.fail(f"{NUM_STORIES} stories did not notice that {bug}")
