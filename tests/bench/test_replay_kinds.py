"""A replay on a daemon of each kind of tree: hits have the bytes of their prefix in every resource, or it is told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglcache.bench import replay
from sglcache.bench import trace as traces
from sglcache.client import Client, Lease
from sglcache.errors import ConfigError
from sglcache.testing.daemon import until

pytestmark = pytest.mark.daemons

REQUESTS = 60


class Served:
    """A daemon of a kind, on which a small trace has been replayed once."""

    def __init__(self, kind: str, socket: Path, folder: Path) -> None:
        self.kind, self.socket = kind, socket
        self.trace = folder / f"{kind}.jsonl"
        records = list(replay.conversations(REQUESTS))
        self.trace.write_text("".join(f"{json.dumps(record)}\n" for record in records))
        self.last = folder / f"{kind}-last.jsonl"
        self.last.write_text(f"{json.dumps(records[-1])}\n")
        self.report = self.replay(self.trace, 2)

    def replay(self, trace: Path, num_clients: int = 1) -> replay.Report:
        options = replay.Options(trace, num_clients=num_clients, verify=True, socket=self.socket, kind=self.kind)
        return replay.replay(options)


@pytest.fixture(scope="module", params=list(replay.KINDS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with replay.serving((), request.param) as socket:
        assert socket is not None
        yield Served(request.param, socket, tmp_path_factory.mktemp("traces"))


def test_every_hit_has_the_bytes_of_its_prefix_in_every_resource(served: Served) -> None:
    report = served.report
    assert report.problems == []
    assert report.requests == REQUESTS
    assert report.hit_rate > 0.2
    assert report.host_tokens > 0, "nothing came back from the host"
    assert report.duplicate_pages > 0, "no two committed the same"
    companions = replay.KINDS[served.kind].companions
    assert tuple(report.reach_tokens) == ("full", *companions)
    assert all(tokens >= report.matched_tokens for tokens in report.reach_tokens.values())
    assert report.reach_tokens["full"] > report.matched_tokens, "no match ended early for want of another resource"
    assert (report.verified_window_tokens > 0) is ("window" in companions)
    assert (report.verified_states > 0) is (report.states > 0) is ("mamba" in companions)
    told = replay.describe(report)
    for name in ("full", *companions):
        assert f"{name} {100 * report.reach_tokens[name] / report.input_tokens:.1f} %" in told
    assert json.loads(report.to_json())["reach_rates"] == report.reach_rates


def test_the_books_are_right_and_nothing_is_held_when_it_is_over(served: Served) -> None:
    with Client(served.socket, role="observer") as observer:
        until(lambda: observer.status()["gauges"]["num_copies"] == 0)
        status = observer.status(prove=True)
    assert status["violations"] == []
    assert all(pool["leased"] == pool["fenced"] == pool["locked"] == 0 for pool in status["pools"])
    assert {pool["resource"] for pool in status["pools"]} == {"full", *replay.KINDS[served.kind].companions}


Byte = tuple[np.ndarray[Any, np.dtype[np.uint8]], tuple[int, ...]]


def of_full(cache: Client, lease: Lease) -> Byte:
    return cache.pools[0].layers[1][0], (int(lease.slots[3]), 5, 6)


def of_window(cache: Client, lease: Lease) -> Byte:
    assert cache.window is not None
    assert lease.window is not None
    last = lease.matched_tokens // cache.geometry.page_size - 1 - lease.window.first_page
    return cache.window.pools[0].layers[1][1], (int(lease.window.slots[last]), 15, 7)


def of_state(cache: Client, lease: Lease) -> Byte:
    assert cache.mamba is not None
    assert lease.mamba is not None
    assert lease.mamba.source is not None
    return cache.mamba.pools[0].layers[1][1], (lease.mamba.source, 4321)


FLIPS: dict[str, tuple[Callable[[Client, Lease], Byte], str]] = {
    "full": (of_full, "request 0: matched page 3 "),
    "window": (of_window, "request 0: matched window page "),
    "mamba": (of_state, " does not hold the state behind "),
}


def test_one_flipped_byte_of_any_resource_is_noticed(served: Served) -> None:
    prompt = next(traces.requests(served.last)).tokens
    assert served.replay(served.last).problems == [], "it is right as long as nobody changes anything"
    for resource in ("full", *replay.KINDS[served.kind].companions):
        place, said = FLIPS[resource]
        with Client(served.socket) as cache, cache.acquire(prompt, limit=len(prompt) - 1, room=0) as lease:
            lease.wait_loaded()
            assert lease.matched_tokens > 100
            array, at = place(cache, lease)
            array[at] ^= 4
            (problem,) = served.replay(served.last).problems
            array[at] ^= 4
        assert said in problem
        assert "layer 1" in problem
    assert served.replay(served.last).problems == []


def test_a_daemon_of_another_kind_is_refused_by_name(served: Served) -> None:
    wrong = {"swa": "mamba", "mamba": "unified", "unified": "swa"}[served.kind]
    with pytest.raises(ConfigError, match=f"--kind {wrong} is full and "):
        replay.replay(replay.Options(served.last, socket=served.socket, kind=wrong))
