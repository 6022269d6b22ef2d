"""Two pipeline stages, each with a daemon of its own: what one has and the other has not is matched by neither."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sglcache.client import Client, Lease, acquire_alike
from sglcache.errors import BadRequest, Changed, ClosedError, NoSpace
from sglcache.testing.daemon import Daemon

POOLS = (256, 96)  # pages: the second evicts what the first keeps


class Stages:
    """Both daemons, and a client of each."""

    def __init__(self, lend: Callable[..., Daemon], stack: ExitStack) -> None:
        self.daemons = [
            lend(pool={"num_tokens": 4 * pages}, host={"num_tokens": 0}, events={"enabled": False}) for pages in POOLS
        ]
        self.clients = [stack.enter_context(daemon.client()) for daemon in self.daemons]

    def settled(self) -> bool:
        """Nothing is held on either."""
        return all((pool["leased"], pool["locked"]) == (0, 0) for pool in (daemon.pool() for daemon in self.daemons))


@pytest.fixture
def stages(lend: Callable[..., Daemon]) -> Iterator[Stages]:
    with ExitStack() as stack:
        yield Stages(lend, stack)


def run(leases: list[Lease]) -> None:
    """Both stages compute the rest, and commit it."""
    for lease in leases:
        lease.commit()
        lease.release(wait=True)


def prompt(seed: int, num_tokens: int = 128) -> list[int]:
    return list(map(int, np.random.default_rng(seed).integers(0, 1000, num_tokens)))


def lose(client: Client, tokens: list[int]) -> None:
    """Push all that is not in use off the stage."""
    free = client.status()["pools"][0]
    client.acquire([7] * 4 * (free["total"] - free["leased"] - free["locked"])).release(wait=True)
    assert client.peek(tokens).matched_tokens < len(tokens)


def meanwhile(client: Client, monkeypatch: pytest.MonkeyPatch, what: Callable[[], None]) -> None:
    """Between what this client was told and what it asks for next, something happens on its stage."""
    begin = client.acquire_begin

    def late(*args: Any, **options: Any) -> Any:
        what()
        return begin(*args, **options)

    monkeypatch.setattr(client, "acquire_begin", late)


def test_hits_agree_on_stages_that_hold_different_things(stages: Stages) -> None:
    """Of a history that fits in one pool and not in the other, each match is the shorter one, on both."""
    matched = []
    one, other = stages.clients
    for turn in range(40):
        tokens = [*prompt(0, 64), *prompt(1 + turn % 6, 32 * (turn % 4)), turn]
        least = min(client.peek(tokens).matched_tokens for client in stages.clients)
        apart = one.peek(tokens) != other.peek(tokens)
        leases = acquire_alike(stages.clients, tokens, limit=len(tokens) - 1)
        assert {lease.matched_tokens for lease in leases} == {least}
        assert len({len(lease.slots) for lease in leases}) == 1
        matched.append((least, apart))
        run(leases)
    assert any(least for least, apart in matched if apart), "what was agreed on was something, where they differed"
    assert stages.settled()


def test_a_stage_that_lost_some_of_it_meanwhile_takes_the_others_along(
    stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(1)
    run(acquire_alike(stages.clients, tokens[:64]))
    run(acquire_alike(stages.clients, tokens))
    with stages.daemons[1].client() as thief:
        thief.pin(tokens[:64], "me", 60)
        times: list[int] = []

        def steal() -> None:
            times.append(1)
            if len(times) == 1:
                lose(thief, tokens)

        meanwhile(stages.clients[1], monkeypatch, steal)
        leases = acquire_alike(stages.clients, tokens, limit=127)
        assert [lease.matched_tokens for lease in leases] == [64, 64]
        assert len(times) == 2
        run(leases)
    assert stages.settled()


def test_after_so_many_times_round_it_says_that_it_changed(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = prompt(2)
    run(acquire_alike(stages.clients, tokens))
    with stages.daemons[1].client() as thief:
        meanwhile(stages.clients[1], monkeypatch, lambda: lose(thief, tokens))
        with pytest.raises(Changed) as caught:
            acquire_alike(stages.clients, tokens, tries=1)
        assert (caught.value.exact, caught.value.matched_tokens) == (128, 0)
    assert stages.settled()


def test_where_one_stage_has_no_room_no_stage_holds_anything(stages: Stages) -> None:
    with pytest.raises(NoSpace) as caught:
        acquire_alike(stages.clients, range(4 * 100))
    assert caught.value.total == 96
    assert stages.settled()
    with stages.clients[1].acquire([1] * 4 * 90):
        with pytest.raises(NoSpace):
            acquire_alike(stages.clients, prompt(3))
        run(acquire_alike(stages.clients, prompt(3), room=16))


def test_a_stage_that_is_gone_leaves_nothing_on_the_others(stages: Stages) -> None:
    stages.clients[1].close()
    with pytest.raises(ClosedError):
        acquire_alike(stages.clients, prompt(4))
    assert stages.settled()


def test_namespaces_and_arguments(stages: Stages) -> None:
    run(acquire_alike(stages.clients, prompt(5), cache_salt="a"))
    leases = acquire_alike(stages.clients, prompt(5), cache_salt="a", limit=50)
    assert [lease.matched_tokens for lease in leases] == [48, 48]
    run(leases)
    assert [lease.matched_tokens for lease in acquire_alike(stages.clients[:1], prompt(5))] == [0]
    for wrong in ({"exact": 4}, {"tries": 0}):
        with pytest.raises(BadRequest):
            acquire_alike(stages.clients, prompt(5), **wrong)  # type: ignore[arg-type]
    with pytest.raises(BadRequest):
        acquire_alike([], prompt(5))


def test_on_every_stage_of_one_daemon_a_hit_has_the_bytes_that_were_written(tmp_path: Path) -> None:
    """PP=2, the second stage smaller, so that it must evict and load back where the first need not.

    K of a token is made of the token, its place and the stage: whatever a stage serves is checked, layer by layer.
    """
    stages = [{"num_layers": 2, "num_tokens": 4 * 256}, {"num_layers": 1, "num_tokens": 4 * 96}]
    with ExitStack() as stack:
        daemon = stack.enter_context(
            Daemon(
                tmp_path, pp_size=2, parallel={"stages": stages}, host={"pool_ratio": 4.0}, events={"enabled": False}
            )
        )
        clients = [stack.enter_context(daemon.rank(stage).client()) for stage in (0, 1)]
        checked = [0, 0]
        hosts = 0
        for turn in range(30):
            tokens = [*prompt(0, 64), *prompt(1 + turn % 6, 32 * (1 + turn % 4)), turn]
            leases = acquire_alike(clients, tokens, limit=len(tokens) - 1)
            assert len({lease.matched_tokens for lease in leases}) == 1
            for stage, (client, lease) in enumerate(zip(clients, leases, strict=True)):
                lease.wait_loaded()
                hosts += lease.host_tokens
                places = torch.arange(len(tokens))
                pages = torch.tensor(lease.slots, dtype=torch.int64)[places // 4]
                want = (torch.tensor(tokens) * 7 + places * 3 + stage * 11) % 1024  # exact in half precision
                for layer in range(stages[stage]["num_layers"]):
                    k = client.pool.k[layer]
                    hit = lease.matched_tokens
                    there = k[pages[:hit], places[:hit] % 4, 0, 0]
                    assert torch.equal(there.long(), want[:hit] + layer)
                    k[pages[hit:], places[hit:] % 4] = (want[hit:] + layer).to(k.dtype)[:, None, None]
                checked[stage] += hit
            run(leases)
        assert min(checked) > 0
        assert hosts > 0, "something came from a host tier"
        for stage in (0, 1):
            daemon.rank(stage).settle()
