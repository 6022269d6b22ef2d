"""Dynamo's indexer and three tiers: what each has is told as it comes, goes and comes back, whatever the policies."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from indexed import BELOW, CASES, KINDS, LEAST, PAGE, Rig, agree, one_block_less_is_noticed
from scene import PLAIN, Prompt, askable, chain

from sglcache.client.mirror import Fact
from sglcache.units import Tier
from sglcache.wire.events import AllBlocksCleared, BlockStored

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]

# Pools of a few prompts each, and a disk of a few dozen: all three are full, and give way, all the time.
FULL: dict[str, Any] = {
    "pool": {"num_tokens": 3 << 10},
    "host": {"num_tokens": 6 << 10},
    "storage": {"size": "3 MiB", "prefetch_threshold": PAGE},
}
MEDIA = {tier.medium: tier for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK)}


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Heard:
    """What was told, one fact after the other: how often, and of a page that leaves the device where it is then."""

    def __init__(self, facts: list[Fact]) -> None:
        self.stored, self.removed = Counter[Tier](), Counter[Tier]()
        self.kept = self.lost = 0  # pages that left the device, and were on the host then, or not
        present: dict[Tier, set[int]] = {tier: set() for tier in MEDIA.values()}
        for fact in facts:
            event = fact.event
            if isinstance(event, AllBlocksCleared):
                present = {tier: set() for tier in MEDIA.values()}
                continue
            tier, hashes = MEDIA[str(event.medium)], set(event.block_hashes)
            if isinstance(event, BlockStored):
                again = hashes & present[tier]
                assert not again, (
                    f"what is there comes: {tier.name}, {len(again)} of {len(hashes)} blocks, number {fact.seq}"
                )
                present[tier] |= hashes
                self.stored[tier] += len(hashes)
                continue
            assert hashes <= present[tier], "what is not there goes"
            present[tier] -= hashes
            self.removed[tier] += len(hashes)
            if tier is Tier.DEVICE:
                self.kept += len(hashes & present[Tier.HOST])
                self.lost += len(hashes - present[Tier.HOST])


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_what_each_tier_has_is_told_whatever_is_written_when(
    policy: str, tmp_path: Path, shim: Path, opened: ExitStack
) -> None:
    rig = Rig(tmp_path, shim, opened, **{**FULL, "host": {**FULL["host"], "write_policy": policy}})
    rng = random.Random(0)
    cases: Counter[tuple[str, str]] = Counter()
    rare = dict.fromkeys((*CASES, BELOW), 0)
    for seed in range(1, 13):  # how much is on the disk when it is asked depends on how fast that is
        rig.drive(60, seed)
        rig.settle()
        cases += agree(rig, askable(rig.prompts[-60:], PAGE, rng))
        rare = {
            case: count for case in (*CASES, BELOW) if (count := cases["plain", case] + cases["named", case]) <= LEAST
        }
        if seed >= 3 and not rare:
            break
    assert not rare, f"too rare to say anything: {rare}, of {cases}"
    one_block_less_is_noticed(rig, rng)
    heard, status = Heard(rig.facts), rig.daemon.status()
    assert min(heard.stored[tier] for tier in MEDIA.values()) > LEAST
    assert min(heard.removed[tier] for tier in MEDIA.values()) > LEAST
    counters = status["counters"]
    assert heard.removed[Tier.DISK] == status["third"]["evicted_pages"]
    assert min(counters["load_pages"], counters["prefetched_pages"]) > LEAST
    if policy == "write_back":
        assert heard.kept > LEAST
        assert heard.lost <= counters["backup_pages_skipped"], "it left the device before it was told of on the host"


def test_what_is_fetched_is_told_of_on_the_host_when_it_is_there(tmp_path: Path, shim: Path, opened: ExitStack) -> None:
    """Then it is loaded like any host hit, and the disk has it still."""
    rig = Rig(tmp_path, shim, opened, storage={"prefetch_part": "4 KiB", "prefetch_threshold": PAGE})
    rng = random.Random(0)
    prompt = Prompt([rng.randrange(1000) for _ in range(30 * PAGE + 5)], PLAIN)
    names, whole = chain(prompt, PAGE), 30 * PAGE
    with rig.daemon.client() as client:
        client.acquire(prompt.tokens).abort(wait=True)
        with client.acquire(prompt.tokens) as lease:
            lease.commit()
        rig.settle()
        client.clear(Tier.DEVICE)
        client.clear(Tier.HOST)
        rig.settle()
        assert rig.ask(prompt)[0] == (0, 0, whole)
        rig.facts.clear()
        assert client.prefetch(prompt.tokens) == (whole, whole)
        rig.settle()
        assert rig.ask(prompt)[0] == (0, whole, whole)
        told = [fact.event for fact in rig.facts]
        assert {(type(event).__name__, getattr(event, "medium", None)) for event in told} == {
            ("BlockStored", Tier.HOST.medium)
        }
        assert [name for event in told if isinstance(event, BlockStored) for name in event.block_hashes] == names
        rig.facts.clear()
        with client.acquire(prompt.tokens) as lease:
            assert (lease.matched_tokens, lease.host_tokens) == (whole, whole)
            lease.wait_loaded()
        rig.settle()
        assert rig.ask(prompt)[0] == (whole, whole, whole)
        assert Heard(rig.facts).stored == {Tier.DEVICE: 30}


def test_a_clear_is_of_the_tiers_it_names(tmp_path: Path, shim: Path, opened: ExitStack) -> None:
    rig = Rig(tmp_path, shim, opened, **FULL)
    rng = random.Random(0)

    def driven(seed: int) -> dict[tuple[int, str], set[int]]:
        rig.drive(40, seed)
        rig.settle()
        return rig.blocks()

    with rig.daemon.admin() as admin:
        before = driven(1)
        assert min(map(len, before.values())) > LEAST
        assert admin.clear(Tier.DISK) == {"DISK": len(before[0, "DISK"])}
        rig.settle()
        assert rig.blocks() == {where: hashes for where, hashes in before.items() if where[1] != "DISK"}
        before = driven(2)
        assert len(before[0, "DISK"]) > LEAST
        admin.clear()
        rig.settle()
        assert rig.blocks() == {(0, "DISK"): before[0, "DISK"]}, "AllBlocksCleared takes nothing from the disk"
        cases = agree(rig, askable(rig.prompts, PAGE, rng))
        assert cases["plain", BELOW] + cases["named", BELOW] > LEAST, cases
        driven(3)
        agree(rig, askable(rng.sample(rig.prompts, 60), PAGE, rng))


def test_what_a_rank_finds_on_its_disk_is_told_though_nobody_asks_it(
    tmp_path: Path, shim: Path, opened: ExitStack
) -> None:
    """Two ranks; one is killed, and its next life has what its own disk and host have. The other is as it was."""
    rig = Rig(tmp_path, shim, opened, dp_size=2, **FULL)
    rng = random.Random(0)
    rig.drive(80, seed=1)
    rig.settle()
    before = rig.blocks()
    assert all(len(before[rank, "DISK"] - before[rank, "HOST"]) > LEAST for rank in (0, 1))
    second = rig.daemon.rank(1)
    second.next_life(second.kill_rank())
    rig.settle()
    assert rig.blocks() == {where: hashes for where, hashes in before.items() if where != (1, "DEVICE")}
    with rig.daemon.rank(1).admin() as admin:
        admin.clear(Tier.HOST)
    rig.settle()
    assert rig.blocks() == {where: hashes for where, hashes in before.items() if where[0] == 0 or where[1] == "DISK"}
    cases = agree(rig, askable(rig.prompts, PAGE, rng))
    assert min(cases[kind, BELOW] for kind in KINDS) > LEAST, cases
    rig.drive(20, seed=2)
    rig.settle()
    agree(rig, askable(rig.prompts[-40:], PAGE, rng))
