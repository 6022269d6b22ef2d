"""A daemon whose keys are pairs of tokens, from a runner to a router."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from sglcache.client import Client
from sglcache.client.discovery import discover
from sglcache.client.mirror import Mirror
from sglcache.client.stages import acquire_alike
from sglcache.testing.daemon import Daemon
from sglcache.units import Tier

HTTP = {"http": {"enabled": True, "port": 0}}


@pytest.fixture(scope="module", params=["clear", "none"])
def daemon(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    sections = {"pool": {"bigram": True}, "events": {"token_ids": request.param}, **HTTP}
    with Daemon(tmp_path_factory.mktemp(request.param), **sections) as daemon:
        yield daemon


def put(client: Client, tokens: list[int], **namespace: str) -> None:
    with client.acquire(tokens, **namespace) as lease:
        lease.commit()


def test_a_router_and_a_runner_find_the_same(daemon: Daemon) -> None:
    """Whether the stream has the pairs or hashes alone, which are computed from the tokens then."""
    base = list(range(100))
    with daemon.client() as client, Mirror.from_server(daemon.info["http"]) as mirror:
        client.clear()
        put(client, base[:41])
        put(client, [*base[:20], *range(500, 520)])
        put(client, base[:21], cache_salt="a")
        daemon.settle()
        digest = client.digest()
        assert mirror.catch_up(digest["seq"], 10.0)
        assert mirror.check_digest(digest["seq"], digest["tiers"]) == []
        for tokens in (base, base[:40], base[:41], [*base[:20], 500], [*base[:20], 7], [3]):
            found = mirror.longest_match(tokens)[0]
            assert found.tokens == client.peek(tokens).matched_tokens
            assert found.on(Tier.HOST) == found.tokens
        assert client.peek(base).matched_tokens == 40
        assert client.peek(base[:40]).matched_tokens == 36
        assert mirror.longest_match(base, cache_salt="a")[0].tokens == 20
        first = next(block for block in mirror.blocks(Tier.DEVICE).values() if block.parent is None)
        if first.tokens:
            assert first.tokens == tuple(pairwise(base[:5]))


def test_the_server_says_that_it_is_so(daemon: Daemon) -> None:
    server = discover(daemon.info["http"])
    assert server.bigram
    assert server.block_size == 4


def test_a_lease_goes_on_where_the_match_ended(daemon: Daemon) -> None:
    tokens = list(range(2000, 2033))
    with daemon.client() as client, daemon.client() as other:
        put(client, tokens[:30])
        lease = client.acquire(tokens, limit=len(tokens) - 1)
        assert (lease.matched_tokens, len(lease.slots)) == (28, 9)
        assert lease.commit(32).committed_tokens == 32, "the token behind them is known"
        lease.extend([1, 2, 3, 4])
        assert lease.commit().committed_tokens == 36
        lease.release(wait=True)
        alike = acquire_alike([client, other], tokens)
        assert [each.matched_tokens for each in alike] == [32, 32]
        for each in alike:
            each.cancel()
