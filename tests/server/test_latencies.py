"""Each answer is counted once: as work if it came in the turn that served the command, else as a wait."""

from __future__ import annotations

import urllib.request
from collections import Counter
from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sglcache.client.mirror import Mirror
from sglcache.errors import Forbidden, NoSpace
from sglcache.server.latencies import KINDS, OTHER, CommandTimes
from sglcache.testing.daemon import Daemon, until
from sglcache.wire import control

Lend = Callable[..., Daemon]
HTTP = {"enabled": True, "port": 0}
P, PAGES = 4, 256


def counts(daemon: Daemon) -> Counter[tuple[str, ...]]:
    """How many observations each histogram has, by its name and labels (in the order of their names), but `rank`."""
    with urllib.request.urlopen(daemon.info["http"] + "/metrics", timeout=5) as page:
        text = page.read().decode()
    found: Counter[tuple[str, ...]] = Counter()
    for family in text_string_to_metric_families(text):
        if family.type == "histogram":
            for sample in family.samples:
                if sample.name.endswith("_count"):
                    labels = [sample.labels[name] for name in sorted(sample.labels) if name != "rank"]
                    found[family.name.removeprefix("sglcache_").removesuffix("_seconds"), *labels] = int(sample.value)
    return found


def test_every_command_is_of_a_kind_and_those_that_engines_send_have_a_name_of_their_own() -> None:
    times = CommandTimes()
    assert set(times.by_name) == {*KINDS.values(), OTHER}
    assert times.of[control.Ping] is times.of[control.Status] is times.by_name[OTHER]
    assert times.of[control.Cancel] is times.of[control.CancelRequest] is times.by_name["cancel"]


def test_answers_are_counted_by_kind_and_outcome_and_waits_apart_from_work(lend: Lend) -> None:
    daemon = lend(http=HTTP)
    with daemon.client() as client:
        before, copies = counts(daemon), daemon.status(prove=False)["copies"][0]["copies"]
        lease = client.acquire(range(P * 8))
        with pytest.raises(NoSpace):
            client.acquire(range(9000, 9000 + P * PAGES), wait_s=0)
        with pytest.raises(NoSpace):
            client.acquire(range(9000, 9000 + P * PAGES), wait_s=0.01)
        client.ping()
        with pytest.raises(Forbidden):
            client.evict_session(1)
        lease.commit()  # its event is done when the command comes: no wait
        ring = client._ring
        assert ring is not None
        event, generation = ring.reserve()
        with client._connection.lock:
            client._ticket += 1
            client._connection.send(control.Commit(99_999, lease.id, client._ticket, 0, None, event, generation))
            client._connection.ignore(99_999)
        client.ping()  # the commit was served in this turn, or before
        ring.complete(event, generation)
        lease.release()
        daemon.settle()
        new = counts(daemon) - before
    assert new["command", "acquire", "ok"] == 1
    assert new["command", "acquire", "refused"] == 1
    assert new["command_wait", "acquire", "refused"] == 1
    assert new["command", "commit", "ok"] == 1
    assert new["command_wait", "commit", "ok"] == new["runner_event_wait",] == 1
    assert new["command", OTHER, "refused"] == 1
    assert new["command", OTHER, "ok"] >= 1  # the ping, and what settling asked
    assert new["copy", "backup"] == daemon.status(prove=False)["copies"][0]["copies"] - copies > 0


def test_every_batch_that_is_sent_and_every_snapshot_that_is_told_is_timed_once(lend: Lend) -> None:
    daemon = lend(http=HTTP)
    with daemon.client() as client, client.acquire(range(P * 8)) as lease:
        lease.commit()
    stream = daemon.status(prove=False)["stream"]
    with Mirror(stream["endpoint"], stream["replay_endpoint"]) as mirror:
        assert mirror.catch_up(stream["next_seq"] - 1, 10.0)
    until(lambda: counts(daemon)["snapshot",] == daemon.status(prove=False)["stream"]["snapshots_done"] > 0)
    until(lambda: counts(daemon)["stream_delay",] == daemon.status(prove=False)["stream"]["batches_sent"] > 0)
