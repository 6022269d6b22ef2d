"""`sglcache torture` with pages on cards: a sound daemon bears it, and what is planted in one is found."""

from __future__ import annotations

import multiprocessing.forkserver
from concurrent.futures import ProcessPoolExecutor

import pytest
from worlds import World

from sglcache.torture import daemon, faults, run
from sglcache.torture.report import Report, describe

pytestmark = [pytest.mark.survive, pytest.mark.timeout(120)]

# Which a rank on cards has: each is of the order between streams and the daemon.
BUGS = {
    "an event is done when it is told of": """
from sglcache.memory.rings import EventRingReader
EventRingReader.done = lambda ring, event, generation: True
""",
    "a load is there when it is begun": """
from sglcache.memory.cuda_driver import LibCuda
LibCuda.done = lambda driver, event: True
""",
    "pages of an ended session are free while its kernels run": """
from sglcache.server.sessions import Sessions
end = Sessions.end
def hasty(self, session, *why):
    end(self, session, *why)
    for shard in range(session.num_shards):
        self.owner.index.shard_gone(session.id, shard)
Sessions.end = hasty
""",
}

SLOW = {"SOFTCUDA_SLOW_NS_PER_MB": "1000000000"}  # a page takes milliseconds


@pytest.fixture(autouse=True)
def _older_fork_server() -> None:
    """As after another torture in this process: its fork server has the environment that was there before."""
    multiprocessing.forkserver.ensure_running()


def tortured(world: World, seed: int, names: tuple[str, ...], kind: str, seconds: float, prelude: str = "") -> Report:
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {**world.environment, **(SLOW if prelude else {})}.items():
            patch.setenv(key, value)
        config = daemon.on_cards(daemon.varied(kind, seed), seed)
        options = run.Options(seed, config, seconds, faults=names, rate=3.0, prelude=prelude)
        # In a process of its own: runners have the environment that their fork server began with.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
            return alone.submit(run.torture, options).result()


@pytest.mark.parametrize("kind", ["unified"])
def test_a_sound_daemon_bears_all_of_it(world: World, kind: str) -> None:
    report = tortured(world, 7, tuple(faults.BY_NAME), kind, 8.0)
    assert report.ok, describe(report)
    assert report.checked_pages > 200


@pytest.mark.parametrize("name", BUGS)
def test_what_is_planted_is_found(world: World, name: str) -> None:
    names = ("runner-vanish",) if "ended" in name else ()
    report = tortured(world, 5, names, "hiradix", 30.0, BUGS[name])
    assert any("wrong bytes" in problem for problem in report.problems), describe(report)
