"""What each consumer believes after what happens to a stream. The claims are the table in docs/events.md, cell by cell.

A row is run once for the consumers that know tiers and once, on a daemon with the device tier alone, for RadixView.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
from consumers import Indexer, eventually
from scene import HEARTBEAT_S, Scene
from watchers import IndexerWatcher, MirrorWatcher, RadixViewWatcher, Watcher

from sglcache.units import Tier

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]

DOCS = Path(__file__).parents[2] / "docs/events.md"
TIERED = MIRROR, DYNAMO, DYNAMO_LIVE = "`Mirror`", "Dynamo, with replay", "Dynamo, without"
RADIXVIEW = "RadixView, one tier"
EXACT, ANNOUNCED, REGISTERED, NOTHING = "exact", "exact once announced", "exact once registered again", "–"
HEARD_S = 40.0  # for a consumer to believe what it should
QUIET_S = 10 * HEARTBEAT_S  # after which a consumer that does not believe it yet never will by itself

EVENTS = {"ring_size": "64 KiB", "max_blocks": 16}  # a ring that is soon full; a snapshot of many frames


def storage(folder: Path) -> dict[str, Any]:
    """A disk of so little that it gives way, too."""
    return {"kind": "file", "path": str(folder / "store"), "size": "3 MiB", "prefetch_threshold": 1}


OLD_CLOCK = """
import time
time.time_ns = lambda: 1_000_000_000
"""


def table() -> dict[str, dict[str, str]]:
    """The claims: by situation, then by consumer."""
    lines = [line for line in DOCS.read_text().splitlines() if line.startswith("|")]
    start = next(number for number, line in enumerate(lines) if line.startswith("| situation "))
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:]]
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def claim(cell: str) -> str:
    """The claim at the start of a cell; what follows it is why."""
    found = re.match(f"{ANNOUNCED}|{REGISTERED}|{EXACT}|{NOTHING}", cell)
    assert found, f"{cell!r} claims nothing"
    return found.group()


# -- the situations -----------------------------------------------------------------------------------


def followed(scene: Scene) -> None:
    scene.drive(40)


def rank_killed(scene: Scene) -> None:
    scene.kill_rank()
    scene.drive(10)
    scene.mend()


def killed(scene: Scene) -> None:
    scene.kill()
    scene.start()
    scene.drive(10)
    scene.mend()


def restarted(scene: Scene) -> None:
    scene.stop()
    scene.start()
    scene.mend()


def clock_set_back(scene: Scene) -> None:
    scene.stop()
    scene.start(prelude=OLD_CLOCK)
    scene.drive(10)
    scene.mend()


def cut_off_shortly(scene: Scene) -> None:
    scene.cut()
    scene.drive(10)
    scene.mend()


def cut_off_for_long(scene: Scene) -> None:
    scene.cut()
    overflow(scene)
    scene.mend()


def before_they_join(scene: Scene) -> None:
    overflow(scene)


def while_they_join(scene: Scene) -> None:
    """A runner commits and evicts on, while they are told what was there before: see `run`."""


def killed_in_a_replay(scene: Scene) -> None:
    hold_a_replay(scene)
    scene.kill_rank()
    scene.replay.pass_answers()
    scene.mend()


def broken_in_a_replay(scene: Scene) -> None:
    hold_a_replay(scene)
    scene.cut()
    scene.replay.pass_answers()
    scene.mend()


def one_tier_cleared(scene: Scene) -> None:
    clear(scene, Tier.DEVICE)


def all_cleared(scene: Scene) -> None:
    clear(scene, None)


SITUATIONS: dict[str, Callable[[Scene], None]] = {
    "followed from the start": followed,
    "the rank is killed, and the daemon starts it again": rank_killed,
    "the daemon is killed, and started again": killed,
    "the daemon is stopped, and started again": restarted,
    "the daemon is started again with the clock set back": clock_set_back,
    "cut off for less than the ring holds": cut_off_shortly,
    "cut off for more than the ring holds": cut_off_for_long,
    "joins late, when the stream is idle and older than the ring": before_they_join,
    "joins late, while runners are at work": while_they_join,
    "the rank is killed in the middle of a replay": killed_in_a_replay,
    "the connection breaks in the middle of a replay": broken_in_a_replay,
    "one tier is cleared": one_tier_cleared,
    "all tiers are cleared (AllBlocksCleared)": all_cleared,
}


def hold_a_replay(scene: Scene) -> None:
    """Have something missed, and let the answer to whoever asks for it stop on its way."""
    assert scene.daemon is not None
    scene.live.cut()
    scene.drive(40)
    scene.replay.hold_answers(after_bytes=5000)
    scene.live.mend(scene.daemon.info["stream"]["endpoint"])
    assert scene.replay.held.wait(HEARD_S), "nobody asked for a replay"


def overflow(scene: Scene) -> None:
    """Drive until the ring has nothing left of what it holds now."""
    last = stream(scene)["last_seq"]
    while stream(scene)["ring_first_seq"] <= last:
        scene.drive(20)


def stream(scene: Scene) -> dict[str, Any]:
    assert scene.daemon is not None
    facts: dict[str, Any] = scene.daemon.status(prove=False)["stream"]
    return facts


def announce(scene: Scene, at_work: bool) -> None:
    """Have all told anew; `at_work`: while a runner commits and evicts on. Then one prompt more, which follows it."""
    assert scene.daemon is not None
    with scene.daemon.admin() as admin, scene.at_work() if at_work else nullcontext() as wait:
        admin.announce()
        if wait is not None:
            wait(50)
        assert eventually(lambda: not admin.digest()["announcing"], HEARD_S)
    scene.drive(1)


def clear(scene: Scene, tier: Tier | None) -> None:
    assert scene.daemon is not None
    with scene.daemon.admin() as admin:
        assert sum(admin.clear(tier).values()) > 0


# -- the runs -----------------------------------------------------------------------------------------


def run(scene: Scene, situation: str, watchers: dict[str, Watcher]) -> None:
    """Hold each watcher against what the table claims of it."""
    claims = {name: claim(table()[situation][name]) for name in watchers}
    present = {name: watcher for name, watcher in watchers.items() if claims[name] != NOTHING}
    happens = SITUATIONS[situation]

    def those(*claimed: str) -> dict[str, Watcher]:
        return {name: watcher for name, watcher in present.items() if claims[name] in claimed}

    scene.start()
    scene.mend()
    if happens is before_they_join:
        happens(scene)
        join(scene, present)
    elif happens is while_they_join:
        scene.drive(10)
        with scene.kept(scene.prompts[0]), scene.at_work() as wait:
            wait(20)
            join(scene, present)
            wait(50)
    else:
        join(scene, present)
        scene.drive(30)
        expect_exact(scene, present)
        happens(scene)
    expect_exact(scene, those(EXACT))
    if others := those(ANNOUNCED, REGISTERED):
        eventually(lambda: not all(watcher.wrong(scene) for watcher in others.values()), QUIET_S)
        expect_wrong(scene, others, "by itself")
        announce(scene, at_work=happens is while_they_join)
        expect_exact(scene, those(EXACT, ANNOUNCED))
    if lost := those(REGISTERED):
        expect_wrong(scene, lost, "after an announcement")
        for watcher in lost.values():
            watcher.leave()
        join(scene, lost, already=len(present) - len(lost))
        expect_exact(scene, lost)


def join(scene: Scene, watchers: dict[str, Watcher], already: int = 0) -> None:
    for watcher in watchers.values():
        watcher.join(scene)
    assert eventually(lambda: stream(scene)["subscriptions"] == already + len(watchers), HEARD_S), stream(scene)


def expect_exact(scene: Scene, watchers: dict[str, Watcher]) -> None:
    for name, watcher in watchers.items():
        if not eventually(lambda watcher=watcher: not watcher.wrong(scene), HEARD_S):
            raise AssertionError(f"{name} is not exact: {watcher.wrong(scene)}")


def expect_wrong(scene: Scene, watchers: dict[str, Watcher], when: str) -> None:
    for name, watcher in watchers.items():
        assert watcher.wrong(scene), f"{name} is exact {when}, and the table says that it is not"


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def rows(*consumers: str) -> list[str]:
    """The situations of which the table claims something for one of them."""
    claims = table()
    return [name for name in SITUATIONS if any(claim(claims[name][consumer]) != NOTHING for consumer in consumers)]


@pytest.mark.parametrize("situation", rows(*TIERED))
def test_consumers_that_know_tiers_do_as_the_table_claims(
    situation: str, tmp_path: Path, shim: Path, opened: ExitStack
) -> None:
    scene = opened.enter_context(closing(Scene(tmp_path / "daemon", events=EVENTS, storage=storage(tmp_path))))
    indexer = opened.enter_context(Indexer(tmp_path, shim))
    watchers: dict[str, Watcher] = {
        MIRROR: opened.enter_context(closing(MirrorWatcher())),
        DYNAMO: IndexerWatcher(indexer, "replay", 1, with_replay=True),
        DYNAMO_LIVE: IndexerWatcher(indexer, "live", 2, with_replay=False),
    }
    run(scene, situation, watchers)


@pytest.mark.parametrize("situation", rows(RADIXVIEW))
def test_radixview_does_as_the_table_claims(situation: str, tmp_path: Path, shim: Path, opened: ExitStack) -> None:
    scene = opened.enter_context(closing(Scene(tmp_path / "daemon", host={"num_tokens": 0}, events=EVENTS)))
    run(scene, situation, {RADIXVIEW: opened.enter_context(closing(RadixViewWatcher(tmp_path, shim)))})


def test_the_table_has_every_situation() -> None:
    assert list(table()) == list(SITUATIONS)


@pytest.mark.parametrize("seed", range(2))
def test_with_replay_one_thing_after_the_other_leaves_them_exact(
    seed: int, tmp_path: Path, shim: Path, opened: ExitStack
) -> None:
    """In any order; but Dynamo must be over the last thing before a connection breaks: it may be in a replay."""
    rng = random.Random(seed)
    scene = opened.enter_context(closing(Scene(tmp_path / "daemon", events=EVENTS, storage=storage(tmp_path))))
    indexer = opened.enter_context(Indexer(tmp_path, shim))
    watchers: dict[str, Watcher] = {
        MIRROR: opened.enter_context(closing(MirrorWatcher())),
        DYNAMO: IndexerWatcher(indexer, "replay", 1, with_replay=True),
    }
    scene.start()
    scene.mend()
    scene.drive(5)
    join(scene, watchers)

    def announced() -> None:
        announce(scene, at_work=rng.random() < 0.5)

    def cleared() -> None:
        scene.drive(5)
        clear(scene, rng.choice([Tier.DEVICE, Tier.HOST, None]))

    gentle: list[Callable[[], None]] = [lambda: scene.drive(rng.randint(1, 30)), announced, cleared]
    rough = [rank_killed, restarted, cut_off_shortly, cut_off_for_long]
    for _ in range(5):
        for thing in rng.choices(gentle, k=rng.randint(0, 3)):
            thing()
        expect_exact(scene, watchers)
        rng.choice(rough)(scene)
    expect_exact(scene, watchers)
