"""A daemon that registers itself at Dynamo's indexer (`events.dynamo_indexers`): what the real one makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from consumers import Indexer, eventually
from scene import Scene
from watchers import IndexerWatcher

from sglcache.testing.daemon import until

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]

MODEL = "test"  # of a test's daemon
INSTANCE = 7
HEARD_S = 30.0  # the daemon looks every 10 s whether it is still known


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def told(indexer: Indexer, folder: Path, opened: ExitStack) -> Scene:
    """A daemon that knows of the indexer, and is not started."""
    events = {"dynamo_indexers": [indexer.url], "instance_id": INSTANCE}
    return opened.enter_context(closing(Scene(folder / "daemon", events=events)))


def watcher(indexer: Indexer) -> IndexerWatcher:
    return IndexerWatcher(indexer, MODEL, INSTANCE, with_replay=True)


def known(indexer: Indexer) -> dict[int, dict[str, str]]:
    """By instance, where the indexer thinks that each rank's stream is."""
    return {worker["instance_id"]: worker["endpoints"] for worker in indexer.get("/workers")}


def expect_exact(indexer: Indexer, scene: Scene) -> None:
    eventually(lambda: not watcher(indexer).wrong(scene), HEARD_S)
    assert not watcher(indexer).wrong(scene)


def test_it_is_known_from_its_start_to_its_end(tmp_path: Path, shim: Path, opened: ExitStack) -> None:
    indexer = opened.enter_context(Indexer(tmp_path, shim))
    scene = told(indexer, tmp_path, opened)
    daemon = scene.start()
    scene.drive(20)
    expect_exact(indexer, scene)
    assert known(indexer) == {INSTANCE: {"0": daemon.info["stream"]["endpoint"]}}
    scene.stop()
    assert known(indexer) == {}
    assert indexer.blocks(MODEL) == {}


def test_an_indexer_that_is_started_anew_is_told_again(tmp_path: Path, shim: Path, opened: ExitStack) -> None:
    indexer = opened.enter_context(Indexer(tmp_path, shim))
    scene = told(indexer, tmp_path, opened)
    scene.start()
    scene.drive(20)
    expect_exact(indexer, scene)
    indexer.close()
    again = opened.enter_context(Indexer(tmp_path, shim, port=indexer.port))
    expect_exact(again, scene)


# The first life of a rank answers no replay: whoever asks is left waiting, as if it had died in the middle.
MUTE = """
import pathlib
from sglcache.net.publisher import Publisher
mark = pathlib.Path({mark!r})
if not mark.exists():
    mark.touch()
    Publisher._answer = lambda self, router: False
"""


def test_a_rank_that_was_killed_in_the_middle_of_a_replay_is_heard_again(
    tmp_path: Path, shim: Path, opened: ExitStack
) -> None:
    indexer = opened.enter_context(Indexer(tmp_path, shim))
    scene = told(indexer, tmp_path, opened)
    daemon = scene.start(prelude=MUTE.format(mark=str(tmp_path / "mute")))
    scene.drive(20)
    until(lambda: daemon.status(prove=False)["stream"]["replay_requests"] > 0, HEARD_S)
    assert watcher(indexer).wrong(scene), "nobody answered it"
    scene.kill_rank()
    scene.drive(20)
    expect_exact(indexer, scene)


def test_what_the_indexer_refuses_is_not_taken_for_done(tmp_path: Path, shim: Path, opened: ExitStack) -> None:
    """Its model has blocks of another size, from another daemon."""
    indexer = opened.enter_context(Indexer(tmp_path, shim))
    indexer.register(MODEL, "tcp://127.0.0.1:1", instance=1, block_size=64)
    scene = told(indexer, tmp_path, opened)
    daemon = scene.start()
    assert eventually(lambda: "block_size mismatch" in daemon.said(), HEARD_S), daemon.said()
    assert "registered 1 ranks" not in daemon.said()
    assert INSTANCE not in known(indexer)


def test_a_daemon_whose_model_has_another_name_now_is_known_by_it(
    tmp_path: Path, shim: Path, opened: ExitStack
) -> None:
    """It was killed, so it could not say goodbye in its old name."""
    indexer = opened.enter_context(Indexer(tmp_path, shim))
    indexer.register("old name", "tcp://127.0.0.1:1", instance=INSTANCE, block_size=4)
    scene = told(indexer, tmp_path, opened)
    scene.start()
    scene.drive(20)
    expect_exact(indexer, scene)
    assert indexer.blocks("old name") == {}
