"""Bytes written are bytes read, through every tier and layout of pools on cards, by whoever has the pages mapped."""

from __future__ import annotations

import contextlib
import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from worlds import World, check, evict, ids, put, until

from sglcache.errors import TransferError
from sglcache.memory.cuda_engine import CudaEngine, CudaMemory
from sglcache.memory.cuda_pools import CudaPool
from sglcache.memory.engine import LoadPlace, Transfer, ways_of
from sglcache.memory.filling import pinned_pages
from sglcache.memory.geometry import LAYOUTS, Form, Geometry, StateGeometry
from sglcache.memory.pools import ResourcePools
from sglcache.testing.daemon import Daemon
from sglcache.units import TicketId, Tier
from sglcache.wire.control import StateForm

Lend = Callable[..., Daemon]

TOKENS = range(1000, 1000 + 16 * 4)
NUM_PAGES, HOST_PAGES = 7, 9
STATES = (StateForm("conv", (4, 3), "bfloat16"), StateForm("ssm", (2, 5), "float32"))


def forms() -> Iterator[tuple[str, Form]]:
    """Each kind, split over shards in each way, in each pair of layouts."""
    kinds: list[tuple[str, Callable[..., Form]]] = [
        (
            f"{heads} heads in {shards} shards",
            lambda h=heads, s=shards, **how: Geometry(
                page_size=2, num_pages=NUM_PAGES, num_layers=3, num_kv_heads=h, head_dim=5, num_shards=s, **how
            ),
        )
        for heads, shards in ((2, 1), (2, 2), (4, 4), (2, 4))
    ]
    kinds += [
        (
            f"latents in {shards} shards",
            lambda s=shards, **how: Geometry(
                page_size=2, num_pages=NUM_PAGES, num_layers=3, kv_lora_rank=5, qk_rope_head_dim=2, num_shards=s, **how
            ),
        )
        for shards in (1, 2, 4)
    ]
    kinds += [
        (
            f"states in {shards} shards",
            lambda s=shards, **how: StateGeometry(
                num_pages=NUM_PAGES, num_layers=3, states=STATES, num_shards=s, **how
            ),
        )
        for shards in (1, 2)
    ]
    for (name, make), layout, host_layout in itertools.product(kinds, LAYOUTS, LAYOUTS):
        yield f"{name}, {layout}, {host_layout}", make(layout=layout, host_layout=host_layout, host_pages=HOST_PAGES)


FORMS = dict(forms())


def packed(slots: Sequence[int]) -> bytes:
    return array("i", slots).tobytes()


class Pools:
    """A form's pools in both tiers, the device's on cards, full of bytes that are all different things."""

    def __init__(self, world: World, form: Form, gpus: Sequence[int]) -> None:
        self.form = form
        driver = world.port.cards[0]
        self.pools = ResourcePools("full", form, make=lambda shard, _, at: CudaPool(at, driver, gpus[shard]))
        self.cards = [world.port.cards[pool.device] for pool in self.device]
        for number, pool in enumerate(self.device):
            noise = np.random.default_rng([1, number]).integers(0, 256, pool.mapped_bytes, np.uint8)
            with self.cards[number].on(pool.device):
                self.cards[number].write(pool.address, noise.view(np.uint64))
        for number, pool in enumerate(self.pools.host.shards):
            pool.buffer[:] = np.random.default_rng([2, number]).integers(0, 256, pool.num_bytes, np.uint8)
        self.span = pinned_pages(self.pools.host.shards)
        device = [CudaMemory(pool.placement, pool.address, pool.device) for pool in self.device]
        host = [CudaMemory(pool.placement, pool.address, None, self.span) for pool in self.pools.host.shards]
        self.answers: list[tuple[TicketId, bool, TransferError | None]] = []
        self.lost: list[BaseException] = []
        self.layers: list[tuple[int, int]] = []
        self.engine = CudaEngine(
            ways_of(form, device, host),
            lambda *answer: self.answers.append(answer),
            lambda _, first, stop: self.layers.append((first, stop)),
            driver=driver,
            lost=self.lost.append,
        )
        for pool in self.pools.host.shards:
            assert self.engine.pin(pool.address, pool.num_bytes)

    @property
    def device(self) -> list[CudaPool]:
        return list(self.pools.device.shards)  # type: ignore[arg-type]

    def bytes(self, tier: Tier) -> list[np.ndarray]:
        """Of each pool of a tier."""
        if tier is Tier.HOST:
            return [pool.buffer.copy() for pool in self.pools.host.shards]
        found = []
        for pool, card in zip(self.device, self.cards, strict=True):
            with card.on(pool.device):
                found.append(card.read(pool.address, pool.mapped_bytes // 8).view(np.uint8)[: pool.num_bytes])
        return found

    def expected(self, src: Tier, dst: Tier, src_slots: Sequence[int], dst_slots: Sequence[int]) -> list[np.ndarray]:
        """The target's bytes once pages are copied one by one."""
        sources, found = self.bytes(src), self.bytes(dst)
        for i, j in self.form.pairs(src, dst):
            here, there = self.form.placement(src), self.form.placement(dst)
            for a, b in zip(src_slots, dst_slots, strict=True):
                for ours, theirs in zip(itertools.chain(*here.layers), itertools.chain(*there.layers), strict=True):
                    start, end = ours.start(a), theirs.start(b)
                    found[j][end : end + ours.num_bytes] = sources[i][start : start + ours.num_bytes]
        return found

    def close(self) -> None:
        self.engine.close()
        self.pools.close()


@pytest.mark.parametrize("name", FORMS)
def test_a_copy_moves_the_pages_that_it_names_and_no_other_byte(world: World, name: str) -> None:
    check_copies(world, FORMS[name], [0] * 4)


@pytest.mark.parametrize("name", [name for name in FORMS if "4 shards" in name])
def test_so_it_does_where_shards_are_on_several_cards(world: World, name: str) -> None:
    world.need(cards=2)
    check_copies(world, FORMS[name], [0, 1, 1, 0])


def check_copies(world: World, form: Form, gpus: Sequence[int]) -> None:
    before = [world.used(device) for device in range(world.num_cards)]
    with contextlib.closing(Pools(world, form, gpus)) as pools:
        there, between = [0, 1, 2, 6, 4], [8, 3, 4, 0, 5]  # neighbours and strangers
        for ticket, src, dst, src_slots, dst_slots in (
            (1, Tier.DEVICE, Tier.HOST, there, between),
            (2, Tier.HOST, Tier.DEVICE, [5, 1, 8], [0, 1, 2]),
        ):
            expected = pools.expected(src, dst, src_slots, dst_slots)
            load = LoadPlace(0, 1) if dst is Tier.DEVICE else None
            pools.engine.submit(Transfer(TicketId(ticket), src, dst, packed(src_slots), packed(dst_slots), load))
            until(lambda ticket=ticket: len(pools.answers) == ticket)
            for found, wanted in zip(pools.bytes(dst), expected, strict=True):
                assert np.array_equal(found, wanted)
        assert pools.answers == [(1, True, None), (2, True, None)]
        assert [each for first, stop in pools.layers for each in range(first, stop)] == [0, 1, 2]
        assert pools.lost == []
    assert [world.used(device) for device in range(world.num_cards)] == before


# -- whole daemons -------------------------------------------------------------------------------------------------

WINDOW = {"size": 8, "num_layers": 2, "num_tokens": 4 * 64, "host_tokens": 4 * 128}
MAMBA = {"num_layers": 2, "states": [{"name": "conv", "shape": [4, 3], "dtype": "bfloat16"}], "num_slots": 16}
SHARDS = {"num_shards": 4, "num_kv_heads": 4, "gpus": [0, 0, 0, 0]}
LATENTS = {"num_shards": 2, "kv_lora_rank": 16, "qk_rope_head_dim": 8}


def test_a_page_goes_to_the_host_and_comes_back(world: World, lend: Lend) -> None:
    go_round(world, lend(**world.sections()))


DAEMONS: dict[str, dict[str, Any]] = {
    "hybrid": {
        "pool": {"num_shards": 2, "layout": "layer_first"},
        "window": WINDOW,
        "mamba": MAMBA,
        "host": {"num_tokens": 4 * 256},
    },
    "by ipc, latents": {"pool": {**LATENTS, "export": "ipc"}, "host": {"layout": "layer_first"}},
    "by ipc, hybrid, on two cards": {
        "pool": {"num_shards": 2, "gpus": [0, 1], "export": "ipc"},
        "window": WINDOW,
        "mamba": MAMBA,
    },
    "on two cards": {"pool": {**SHARDS, "gpus": [1, 0, 1, 0]}},
}


@pytest.mark.daemons
@pytest.mark.parametrize("name", DAEMONS)
def test_whatever_is_cached_goes_round(world: World, lend: Lend, name: str) -> None:
    world.need(cards=2 if "two" in name else 1)
    go_round(world, lend(**world.sections(**DAEMONS[name])))


def go_round(world: World, daemon: Daemon) -> None:
    with world.client(daemon) as client:
        put(world.port, client, TOKENS)
        check(world.port, client, TOKENS, host_tokens=0)
        evict(daemon, world.port, client)
        check(world.port, client, TOKENS, host_tokens=len(TOKENS))
        daemon.settle()
        check(world.port, client, TOKENS, host_tokens=0)


@pytest.mark.daemons
@pytest.mark.parametrize("gpus", [[0, 0, 0, 0], [0, 1, 0, 1]], ids=str)
@pytest.mark.parametrize("export", ["fd", "ipc"])
def test_workers_write_and_read_each_its_shard_and_a_runner_all(
    world: World, lend: Lend, gpus: list[int], export: str
) -> None:
    world.need(cards=1 + max(gpus))
    daemon = lend(**world.sections(pool={**SHARDS, "gpus": gpus, "export": export}))
    with world.client(daemon, role="scheduler") as scheduler, contextlib.ExitStack() as stack:
        workers = [stack.enter_context(world.worker(daemon, scheduler.token, shard)) for shard in range(4)]
        contents = [world.contents(worker) for worker in workers]
        lease = scheduler.acquire(TOKENS)
        for each in contents:
            each.write(lease, ids(TOKENS), 0, len(TOKENS))
        begun = lease.commit_begin()
        for worker in workers:
            worker.record(begun.ticket)
        assert begun.wait().committed_tokens == len(TOKENS)
        released = lease.release_begin()
        for worker in workers:
            worker.record(released.ticket)
        released.wait()
        evict(daemon, world.port, *workers)
        lease = scheduler.acquire(TOKENS)
        assert lease.load is not None
        for worker, each in zip(workers, contents, strict=True):
            worker.wait_loaded(lease.load)
            each.check_match(lease, ids(TOKENS))
        released = lease.release_begin()
        for worker in workers:
            worker.record(released.ticket)
        released.wait()
    daemon.settle()
    with world.client(daemon) as client:
        check(world.port, client, TOKENS, host_tokens=0)
