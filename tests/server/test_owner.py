"""The turn, on a loop of its own: what leaves in what order, and what waits for what."""

from __future__ import annotations

import asyncio
import gc
import struct
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from sglcache.core.effects import Copy, Wake
from sglcache.core.index import Index, IndexConfig
from sglcache.errors import TransferError
from sglcache.server.collector import Collector
from sglcache.server.loads import Loads
from sglcache.server.numbers import Numbers
from sglcache.server.owner import Owner
from sglcache.server.stream import Telling
from sglcache.wire.events import BlockStored, decode_batch

PAGES = 8


def tokens(*ids: int) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


class Stepped(Index):
    """An index that knows what its steps came to."""

    def __init__(self, config: IndexConfig) -> None:
        super().__init__(config)
        self.steps: list[bool] = []

    def step(self) -> bool:
        self.steps.append(super().step())
        return self.steps[-1]


class World:
    """An owner of a small index, and a diary of all that it let out, in order."""

    def __init__(self, folder: Path, stride: int = 10, **config: Any) -> None:
        self.diary: list[str] = []
        self.copies: list[Copy] = []
        self.batches: list[tuple[int, bytes]] = []
        numbers = Numbers(folder / "state.json", lambda: 1_000, stride=stride)
        index = Stepped(IndexConfig(**{"page_size": 1, "num_pages": PAGES, "first_seq": numbers.first, **config}))
        self.owner = Owner(
            index,
            asyncio.get_running_loop(),
            stream=self,
            submit=self.submit,
            loads=Loads(4),
            numbers=numbers,
            collector=Collector(1 << 30),
            heartbeat_s=60,
            max_delay_s=0,
        )
        self.owner.wake = self.wake
        self.index = index
        self.session = index.open_session(1)
        self.tickets = 0

    def append(self, seq: int, payload: bytes, heartbeat: bool = False) -> None:
        assert seq <= self.owner.numbers.reserved
        self.batches.append((seq, payload))
        events = decode_batch(payload).events
        self.diary.append("+".join(type(event).__name__ for event in events) if events else "heartbeat")

    def submit(self, copy: Copy) -> None:
        self.copies.append(copy)
        self.diary.append(f"copy to {copy.dst.name}")

    def wake(self, wake: Wake) -> None:
        self.diary.append(type(wake.result).__name__)
        self.answer()

    def answer(self) -> None:
        if self not in self.owner.dirty:
            self.owner.dirty.append(self)

    def flush(self) -> None:
        self.diary.append("written")

    def commit(self, *ids: int) -> None:
        """A whole journey of a lease: acquire, commit, release."""
        grant = self.index.acquire(self.session, 0, tokens(*ids))
        assert grant is not None
        for command in (self.index.commit, self.index.release):
            self.tickets += 1
            command(self.session, self.tickets, grant.lease, self.tickets)
            self.index.event_done(self.session, self.tickets)

    def take(self) -> list[str]:
        diary, self.diary = self.diary, []
        return diary


async def turns(number: int = 3) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def in_a_world(folder: Path, test: Callable[[World], Coroutine[Any, Any, None]], **config: Any) -> None:
    async def main() -> None:
        world = World(folder, **config)
        world.owner.start()
        assert world.take() == ["AllBlocksCleared"]
        await test(world)
        world.owner.close()
        world.owner.close()

    asyncio.run(main())


def test_what_removed_pages_leaves_before_what_was_given_them(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.commit(*range(PAGES))
        world.owner.end_turn()
        await turns()
        assert world.take() == ["Committed", "Released", "written", "BlockStored"]
        grant = world.index.acquire(world.session, 99, tokens(*range(100, 100 + PAGES)))
        assert grant is not None
        world.answer()
        world.owner.end_turn()
        assert world.take() == ["BlockRemoved", "written"]

    in_a_world(tmp_path, test)


def test_a_load_is_submitted_before_the_answer_that_promises_it_and_a_backup_behind_all_answers(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.commit(*range(PAGES))
        world.owner.end_turn()
        assert world.take() == ["Committed", "Released", "written", "copy to HOST"]
        world.owner.copied(world.copies[0].ticket, True)
        world.commit(*range(50, 50 + PAGES))
        world.owner.end_turn()
        world.owner.copied(world.copies[1].ticket, True)
        await turns()
        world.take()
        grant = world.index.acquire(world.session, 99, tokens(*range(PAGES)))
        assert grant is not None
        assert grant.host_tokens == PAGES
        world.owner.loads.tell = lambda load, ok: world.diary.append(f"load {ok}")
        world.owner.loads.begin(world.session, 99, grant)
        world.answer()
        world.owner.end_turn()
        assert world.take() == ["BlockRemoved", "copy to DEVICE", "written"]
        assert not world.owner.idle.is_set()
        world.owner.copied(world.copies[2].ticket, True)
        assert world.owner.idle.is_set()
        await turns()
        assert world.take() == ["load True", "BlockStored"]

    in_a_world(tmp_path, test, host_pages=4 * PAGES)


def test_a_snapshot_is_over_at_once_when_what_it_told_is_in_a_batch_and_not_before(tmp_path: Path) -> None:
    """The page's copy is acknowledged after the last cut, and the next one is a minute away."""

    async def test(world: World) -> None:
        world.commit(*range(PAGES))
        world.owner.end_turn()
        await turns()
        world.owner.max_delay_s = 60
        world.owner.copied(world.copies[0].ticket, True)
        assert world.take()[-1] == "BlockStored"
        telling = Telling(world.index.snapshot(), lambda: 1.0, world.owner.hurry)
        frame = telling.next()
        assert frame is not None
        assert [getattr(event, "medium", None) for event in decode_batch(frame).events] == [None, "GPU", "CPU_PINNED"]
        assert telling.next() == b""
        assert world.take() == []
        await turns()
        assert world.take() == ["BlockStored"]
        assert telling.next() is None

    in_a_world(tmp_path, test, host_pages=4 * PAGES)


def test_an_announcement_is_over_at_once_when_what_it_told_is_in_a_batch(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.commit(*range(PAGES))
        world.owner.end_turn()
        await turns()
        world.owner.max_delay_s = 60
        world.owner.copied(world.copies[0].ticket, True)
        world.take()
        world.owner.announce()
        await turns(6)
        assert world.take() == ["AllBlocksCleared+BlockStored+BlockStored", "BlockStored"]
        assert not world.index.announcing

    in_a_world(tmp_path, test, host_pages=4 * PAGES)


def test_while_removals_are_being_told_every_answer_waits(tmp_path: Path) -> None:
    """Telling takes more than a slice here: what was freed is not granted to anyone in the meantime."""

    async def test(world: World) -> None:
        for first in range(0, 2000, 10):
            world.commit(*range(first, first + 10))
        world.owner.end_turn()
        await turns(1000)
        world.take()
        grant = world.index.acquire(world.session, 99, tokens(*range(5000, 5000 + 2000)))
        assert grant is not None
        world.answer()
        world.owner.end_turn()
        assert world.index.held
        told = world.take()
        while world.index.held:
            assert "written" not in told
            world.owner.end_turn()  # other connections' turns change nothing about it
            await turns(1)
            told += world.take()
        assert told[-1] == "written"
        assert told.count("BlockRemoved") == len(told) - 1 > 2
        assert world.index.stats().counters["evicted_nodes"] == 200

    in_a_world(tmp_path, test, num_pages=2000, cut_slice=100)


def test_events_of_several_turns_share_a_batch_for_a_while(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.owner.max_delay_s = 0.005
        for ids in ((1,), (2,), (3,)):
            world.commit(*ids)
            world.owner.end_turn()
        while len(world.batches) < 2:
            await asyncio.sleep(0)
        events = decode_batch(world.batches[1][1]).events
        assert [type(event) for event in events] == [BlockStored] * 3

    in_a_world(tmp_path, test)


def test_long_work_goes_on_by_itself_a_slice_a_turn(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        for first in range(0, 40, 2):
            world.commit(first, first + 1)
        world.owner.end_turn()
        await turns()
        world.take()
        assert world.index.acquire(world.session, 99, tokens(*range(100, 140))) is None
        world.owner.end_turn()
        world.owner.end_turn()
        assert "Grant" not in world.take()
        told: list[str] = []
        for _ in range(100):
            await turns(1)
            told += world.take()
            if "Grant" in told:
                break
        assert told[-2:] == ["Grant", "written"]
        assert told.count("BlockRemoved") > 1

    in_a_world(tmp_path, test, num_pages=40, evict_slice=3)


def test_the_loop_sleeps_while_who_waits_for_room_waits_for_a_copy(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.commit(*range(PAGES))
        world.owner.end_turn()
        await turns()
        world.take()
        world.index.steps.clear()
        assert world.index.acquire(world.session, 99, tokens(*range(100, 104))) is None
        world.owner.end_turn()
        await turns(50)
        assert world.index.steps == [False]
        assert world.take() == []
        world.owner.copied(world.copies[0].ticket, True)
        await turns()
        assert world.take()[-2:] == ["Grant", "written"]

    in_a_world(tmp_path, test, host_pages=4 * PAGES)


def test_an_idle_stream_beats(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        assert world.owner._beating is not None
        world.owner._beating.cancel()
        world.owner.heartbeat_s = 0.001
        world.owner._beat()
        while world.diary.count("heartbeat") < 20:  # more than one purchase of numbers
            await asyncio.sleep(0)
        assert [seq for seq, _ in world.batches] == list(range(1_000, 1_000 + len(world.batches)))

    in_a_world(tmp_path, test)


def test_pins_run_out_by_the_loops_clock(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.commit(1, 2, 3)
        loop = asyncio.get_running_loop()
        for owner, ttl_s in (("a", 0.002), ("b", 60.0)):
            world.index.pin(world.session, tokens(1, 2, 3), (None, None, None), owner, loop.time() + ttl_s)  # type: ignore[arg-type]
        world.owner.pins_changed()
        while world.index.stats().pinned_pages > 3:
            await asyncio.sleep(0)
        assert world.index.next_expiry is not None
        world.index.unpin(world.session, "b")
        world.owner.pins_changed()

    in_a_world(tmp_path, test)


def test_the_end_tells_what_is_still_queued(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.owner.max_delay_s = 60
        world.commit(1)
        world.owner.end_turn()
        world.take()
        world.owner.close()
        assert world.take() == ["BlockStored"]

    in_a_world(tmp_path, test)


def test_turns_leave_no_cycles(tmp_path: Path) -> None:
    """What a command makes is freed as it ends: the collector rests (server/collector.py)."""

    async def test(world: World) -> None:
        world.commit(*range(PAGES))
        world.owner.end_turn()
        await turns()
        gc.collect()
        for first in range(0, 3000, PAGES):
            world.commit(*range(first, first + PAGES))
            world.owner.end_turn()
        await turns()
        world.batches.clear()
        world.take()
        assert gc.collect() < 20

    in_a_world(tmp_path, test, stride=1_000_000)


def test_who_failed_lets_nothing_out_any_more(tmp_path: Path) -> None:
    """No batch, no answer, no copy; and the end of a copy changes nothing."""

    async def test(world: World) -> None:
        world.commit(*range(PAGES // 2))
        world.owner.end_turn()
        assert world.take() == ["Committed", "Released", "written", "copy to HOST"]
        ended: list[BaseException] = []
        world.owner._lost = ended.append
        error = TransferError("the device is gone", fatal=True)
        world.owner.copied(world.copies[0].ticket, False, error)
        assert ended == [error]
        world.commit(*range(50, 53))
        world.answer()
        world.owner.copied(world.copies[0].ticket, True)
        world.owner.hurry()
        world.owner.flush()
        await turns()
        world.owner.close()
        assert world.take() == []

    in_a_world(tmp_path, test, host_pages=4 * PAGES)


def test_nothing_is_let_out_after_the_close(tmp_path: Path) -> None:
    """Handles of the loop that were under way come round once more; by then there is no engine to copy anything."""

    async def test(world: World) -> None:
        world.owner.close()
        world.take()
        world.commit(1, 2, 3)
        world.owner.end_turn()
        world.owner._step()
        await turns()
        assert world.take() == []
        assert world.copies == []

    in_a_world(tmp_path, test, host_pages=PAGES)
