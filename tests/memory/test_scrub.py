"""The scrubber over real pools and a real journal: a bit that flips is found, wherever it is, and nothing else is."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from sglcache.core.journal import Absent, Cleared, Present
from sglcache.core.key import ROOT
from sglcache.core.restore import Restored
from sglcache.memory import scrub
from sglcache.memory.geometry import FULL, MAMBA, WINDOW, Form, Geometry, StateGeometry, moves
from sglcache.memory.journal import Journal
from sglcache.memory.journal_form import Shape
from sglcache.memory.pools import ResourcePools
from sglcache.memory.scrub import Scrubber
from sglcache.testing.daemon import until
from sglcache.testing.lives import map_new
from sglcache.testing.planting import plant
from sglcache.wire.control import StateForm

pytestmark = pytest.mark.survive

FAST = 1 << 40  # bytes a second: as fast as it can be
PAGES = 6

HEADS = {"num_kv_heads": 4, "head_dim": 8}
FORMS: dict[str, dict[str, Form]] = {
    "page first": {FULL: Geometry(4, 1, 2, **HEADS, host_pages=PAGES)},
    "layer first": {FULL: Geometry(4, 1, 3, **HEADS, host_pages=PAGES, host_layout="layer_first")},
    "shards": {FULL: Geometry(4, 1, 2, **HEADS, num_shards=2, host_pages=PAGES)},
    "shards that share a head": {FULL: Geometry(4, 1, 2, 2, 8, num_shards=4, host_pages=PAGES)},
    "latents": {FULL: Geometry(4, 1, 2, kv_lora_rank=12, qk_rope_head_dim=4, num_shards=2, host_pages=PAGES)},
    "a window": {
        FULL: Geometry(4, 1, 2, **HEADS, host_pages=PAGES),
        WINDOW: Geometry(4, 1, 1, **HEADS, num_shards=2, host_pages=4, host_layout="layer_first"),
    },
    "a window alone": {
        FULL: Geometry(4, 1, 0, **HEADS, host_pages=PAGES),
        WINDOW: Geometry(4, 1, 1, **HEADS, host_pages=4),
    },
    "a state": {
        FULL: Geometry(4, 1, 2, **HEADS, host_pages=PAGES),
        MAMBA: StateGeometry(
            num_pages=1,
            num_layers=2,
            states=(StateForm("conv", (2, 3), "float16"), StateForm("ssm", (2, 5), "float32")),
            num_shards=2,
            host_pages=3,
            host_layout="layer_first",
        ),
    },
}


class World:
    """Host pools, their journal, and a scrubber whose words are kept."""

    def __init__(self, forms: dict[str, Form], rate: int = FAST) -> None:
        self.resources = [ResourcePools(name, form) for name, form in forms.items()]
        sizes = [form.host_pages for form in forms.values()]
        self.shape = Shape(4, sizes, [name == MAMBA for name in forms])
        self.region = map_new(self.shape.num_bytes)
        self.rate = rate
        self.found: list[tuple[int, int, int]] = []
        self.failed: list[BaseException] = []
        self.journal = Journal(self.region, self.shape, b"")
        assert self.journal.load() is None
        self.rng = random.Random(0)

    def come(self, resource: int, slot: int) -> None:
        """A page comes: its bytes, and then its row."""
        for pool in self.resources[resource].host.shards:
            for region, _ in moves(pool.placement, pool.placement):
                pool.buffer[region.start(slot) : region.start(slot) + region.num_bytes] = np.frombuffer(
                    self.rng.randbytes(region.num_bytes), np.uint8
                )
        packed = slot.to_bytes(4, "little")
        if resource:
            self.journal.note([Present(resource, packed, (0).to_bytes(4, "little"))])
        else:
            self.journal.note([Present(0, packed, b"", self.rng.randbytes(16), ROOT)])

    def go(self, resource: int, slot: int) -> None:
        self.journal.note([Absent(resource, slot.to_bytes(4, "little"))])

    def fill(self) -> None:
        for resource, each in enumerate(self.resources):
            for slot in range(each.form.host_pages):
                self.come(resource, slot)

    def again(self) -> None:
        """Another life, on what is there."""
        self.journal = Journal(self.region, self.shape, b"")
        survivors = self.journal.load()
        assert survivors is not None
        slots = [survivors.full.slots, *(each.slots for each in survivors.companions)]
        self.journal.taken(survivors, Restored(slots))

    @contextmanager
    def scrubbing(self) -> Iterator[Scrubber]:
        def bad(*what: int) -> None:
            self.found.append(what)

        scrubber = Scrubber(self.resources, self.journal, self.rate, bad, self.failed.append)
        scrubber.start()
        try:
            yield scrubber
        finally:
            scrubber.close()
            assert not self.failed, self.failed

    def flip(self, resource: int, shard: int, place: int) -> None:
        self.resources[resource].host.shards[shard].buffer[place] ^= 1 << self.rng.randrange(8)

    def close(self) -> None:
        for each in self.resources:
            each.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub, "LEAST_ROUND_S", 0.001)
    monkeypatch.setattr(scrub, "REST", 1.0)


@pytest.fixture
def make() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def world(*arguments: Any, **options: Any) -> World:
        made.append(World(*arguments, **options))
        return made[-1]

    yield world
    for each in made:
        each.close()


def rounds(scrubber: Scrubber, count: int = 2) -> None:
    """So many whole rounds, which began after now."""
    want = scrubber.stats().rounds + count + 1
    until(lambda: scrubber.stats().rounds >= want)


def slot_at(pool: Any, place: int) -> int:
    """Which page has this byte."""
    for region, _ in moves(pool.placement, pool.placement):
        slot, at = divmod(place - region.offset, region.page_stride)
        if 0 <= slot < pool.num_pages and at < region.num_bytes:
            return slot
    raise AssertionError(f"no page has byte {place}")


def law(world: World, count: int = 40) -> None:
    """Any byte of any pool: it is found, as the page that has it, once, and no other is."""
    world.fill()
    with world.scrubbing() as scrubber:
        rounds(scrubber)
        assert world.found == []
        for _ in range(count):
            resource = world.rng.choice([r for r, it in enumerate(world.resources) if it.host.shards[0].num_bytes])
            shard = world.rng.randrange(len(world.resources[resource].host.shards))
            pool = world.resources[resource].host.shards[shard]
            place = world.rng.randrange(pool.num_bytes)
            slot = slot_at(pool, place)
            seq = world.journal.seq_of(resource, slot)
            world.flip(resource, shard, place)
            rounds(scrubber)
            assert world.found == [(resource, slot, seq)]
            world.found.clear()
            world.go(resource, slot)
            world.come(resource, slot)
            rounds(scrubber, 1)
            assert world.found == []


@pytest.mark.parametrize("form", FORMS)
def test_any_byte_that_changes_is_found_as_the_page_that_has_it(form: str, make: Callable[..., World]) -> None:
    law(make(FORMS[form]))


def test_a_page_larger_than_a_piece_is_looked_at_to_its_end(make: Callable[..., World]) -> None:
    world = make({FULL: Geometry(16, 1, 8, 8, 1024, host_pages=2)})
    (pool,) = world.resources[0].host.shards
    assert pool.placement.page_bytes > 3 * scrub.PIECE_BYTES
    world.fill()
    with world.scrubbing() as scrubber:
        rounds(scrubber)
        world.flip(0, 0, pool.num_bytes - 1)
        rounds(scrubber)
    assert [slot for _, slot, _ in world.found] == [1]


def test_what_changes_while_the_rank_is_dead_is_found_by_the_next_lifes_first_round(
    make: Callable[..., World],
) -> None:
    world = make(FORMS["a window"])
    world.fill()
    with world.scrubbing() as scrubber:
        rounds(scrubber)
    seqs = world.journal.seq_of(0, 3), world.journal.seq_of(1, 2)
    pool, window = world.resources[0].host.shards[0], world.resources[1].host.shards[1]
    world.flip(0, 0, pool.placement.ranges(3)[0][0])
    world.flip(1, 1, window.placement.ranges(2)[-1][1] - 1)
    world.again()
    with world.scrubbing() as scrubber:
        until(lambda: scrubber.stats().rounds >= 1)
        assert world.found == [(0, 3, seqs[0]), (1, 2, seqs[1])]


def reuse(world: World) -> None:
    """The newest page goes, and the next life gives its number to another page in its slot."""
    world.fill()
    with world.scrubbing() as scrubber:
        rounds(scrubber)
    seq = world.journal.seq_of(0, PAGES - 1)
    world.go(0, PAGES - 1)
    world.again()
    world.come(0, PAGES - 1)
    assert world.journal.seq_of(0, PAGES - 1) <= seq, "else this tests nothing"
    with world.scrubbing() as scrubber:
        rounds(scrubber)
    assert world.found == []


def test_a_number_that_is_given_again_brings_no_sum_along(make: Callable[..., World]) -> None:
    reuse(make({FULL: Geometry(4, 1, 2, **HEADS, host_pages=PAGES)}))


def test_of_a_journal_that_is_not_taken_no_sum_is(make: Callable[..., World]) -> None:
    world = make(FORMS["page first"])
    world.fill()
    with world.scrubbing() as scrubber:
        rounds(scrubber)
    world.journal = Journal(world.region, world.shape, b"another geometry")
    assert world.journal.load() is None
    world.fill()
    with world.scrubbing() as scrubber:
        rounds(scrubber)
    assert world.found == []


def busy(world: World, count: int = 3000) -> None:
    """Pages come and go, in all slots, while it looks: no sum is of two pages."""
    slots = [(r, slot) for r, each in enumerate(world.resources) for slot in range(each.form.host_pages)]
    there: set[tuple[int, int]] = set()
    with world.scrubbing() as scrubber:
        for number in range(count):
            place = world.rng.choice(slots)
            if place in there:
                world.go(*place)
                there.remove(place)
            if world.rng.randrange(8):
                world.come(*place)
                there.add(place)
            if number % 500 == 499:
                rounds(scrubber)  # so that there is something to compare with
                world.journal.note([Cleared()])
                there.clear()
            assert world.found == []
        compared = scrubber.stats().compared_pages
    assert compared > 20


@pytest.mark.parametrize("form", ["layer first", "a state"])
def test_while_pages_come_and_go_nothing_is_found(form: str, make: Callable[..., World]) -> None:
    busy(make(FORMS[form]))


def meanwhile(world: World, patcher: pytest.MonkeyPatch) -> None:
    """A page goes and another comes in the midst of a look at it: at the worst moment, before its bytes are read."""
    world.fill()
    took = Scrubber._sum
    looks = 0

    def late(self: Scrubber, resource: int, slot: int) -> int | None:
        nonlocal looks
        looks += 1
        if looks % 5 == 0:
            world.go(resource, slot)
            world.come(resource, slot)
        return took(self, resource, slot)

    with patcher.context() as patch:
        patch.setattr(Scrubber, "_sum", late)
        with world.scrubbing() as scrubber:
            rounds(scrubber, 20)
    assert world.found == []


def test_a_look_at_a_page_that_goes_meanwhile_is_void(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile(make(FORMS["page first"]), monkeypatch)


def test_it_keeps_to_its_rate_and_to_a_share_of_a_processor(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrub, "REST", 9.0)
    world = make({FULL: Geometry(4, 1, 2, **HEADS, host_pages=256)}, rate=1_000_000)
    world.fill()
    began = time.monotonic()
    with world.scrubbing() as scrubber:
        until(lambda: scrubber.stats().bytes >= 500_000)
        took = time.monotonic() - began
        stats = scrubber.stats()
    step = 1_000_000 * scrub.STEP_S + world.resources[0].form.page_bytes
    assert stats.bytes <= 1_000_000 * (took + scrub.CATCH_UP_S) + 2 * step
    assert stats.seconds <= 0.1 * took + scrub.STEP_WORK_S
    assert stats.round_age_s is None or stats.rounds


def test_an_empty_host_tier_is_looked_through_once_in_a_while(make: Callable[..., World]) -> None:
    world = make(FORMS["a window"])
    with world.scrubbing() as scrubber:
        rounds(scrubber)
        stats = scrubber.stats()
    assert (stats.pages, stats.bytes, stats.compared_pages) == (0, 0, 0)
    assert stats.round_age_s is not None


def test_slots_beyond_a_block_are_looked_at_too(make: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub, "BLOCK_SLOTS", 4)
    law(make(FORMS["page first"]), 10)


def test_the_end_comes_at_once_and_lets_go_of_the_pools(make: Callable[..., World]) -> None:
    world = make(FORMS["shards"], rate=1)  # which rests for hours
    world.fill()
    with world.scrubbing() as scrubber:
        until(lambda: scrubber.stats().pages > 0)
    assert not any(thread.name == "sglcache-scrubber" for thread in threading.enumerate())
    scrubber.close()


def test_an_error_that_nobody_expected_is_told(make: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Scrubber, resource: int, slot: int) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(Scrubber, "_look", broken)
    world = make(FORMS["page first"])
    world.fill()
    scrubber = Scrubber(world.resources, world.journal, FAST, lambda *_: None, world.failed.append)
    scrubber.start()
    until(lambda: bool(world.failed))
    scrubber.close()
    assert [str(error) for error in world.failed] == ["planted"]


BUGS: dict[str, tuple[Any, str, str, str, str, str]] = {
    "parts but the first": (Scrubber, "_sum", "self._parts[resource]:", "self._parts[resource][:1]:", "shards", "law"),
    "layers but the first": (Scrubber, "_sum", "in part.regions:", "in part.regions[:1]:", "layer first", "law"),
    "resources but the first": (Scrubber, "_round", "enumerate(self._slots):", "[(0, 6)]:", "a window", "law"),
    "the last bytes": (Scrubber, "_sum", "start + num_bytes", "start + num_bytes // 2", "page first", "law"),
    "the last slot": (Scrubber, "_round", "range(0, num_slots, BLOCK", "range(0, num_slots - 1, BLOCK", "tiny", "law"),
    "whether it is still the page": (
        Scrubber,
        "_look",
        "value is None or journal.seq_of(resource, slot) != seq",
        "False",
        "page first",
        "meanwhile",
    ),
    "of which page a sum is": (Journal, "sum_of", "if int(sums.seqs[slot]) == seq", "if 1", "page first", "law"),
    "that numbers are given again": (Journal, "taken", "& (sums.seqs != table.seqs)", "& False", "page first", "reuse"),
    "what it has told": (Scrubber, "_look", "self._told.get((resource, slot)) != seq", "True", "page first", "law"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_if_it_forgets(bug: str, make: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bugs are caught."""
    owner, name, old, new, form, which = BUGS[bug]
    plant(monkeypatch, owner, name, old, new)
    if form == "tiny":
        monkeypatch.setattr(scrub, "BLOCK_SLOTS", 1)
    world = make(FORMS["page first" if form == "tiny" else form])
    with pytest.raises((AssertionError, ValueError)):
        {"law": law, "meanwhile": lambda it: meanwhile(it, monkeypatch), "reuse": reuse}[which](world)
