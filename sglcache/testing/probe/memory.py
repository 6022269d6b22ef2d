"""(a) Memory that another process maps, and (d) what is left of it after deaths."""

from __future__ import annotations

import statistics
import time
from typing import Any, Final

import numpy as np

from sglcache.testing.card import WORD
from sglcache.testing.probe.sizes import Sizes
from sglcache.testing.probe.stage import Failed, Here, Stage
from sglcache.testing.probe.tasks import (
    Pool,
    Tell,
    count_into,
    drop_pool,
    fill_pool,
    free_bytes,
    make_pool,
    map_pool,
    pieces,
    ready,
    rounded,
    words_not,
    wrong_words,
)

DIRT: Final = 0xD1D1D1D1D1D1D1D1
HELD: Final = 0.02  # of the memory: what changes by less says nothing, since contexts come and go


# -- (a) -----------------------------------------------------------------------------------------------------------


def handing_over(stage: Stage, tell: Tell, sizes: Sizes) -> None:
    """A pool's descriptor goes over a socket, through a process without CUDA, and is mapped in a second process."""
    a, b = stage.actor("A"), stage.actor("B")
    tell("a.begin_s", round(max(a.ask(ready), b.ask(ready)), 3))
    a.ask(make_pool, "pool", sizes.pool)
    with a.given() as fds:
        b.hand(fds, map_pool, "pool", sizes.pool)
    a.ask(count_into, "pool", 1000)
    there = b.ask(wrong_words, "pool", 1000)
    b.ask(count_into, "pool", 77)
    tell("a.fd", there == 0 and a.ask(wrong_words, "pool", 77) == 0)
    b.ask(write_bytes, "pool", 3)
    tell("a.fd_copies", a.ask(wrong_words, "pool", 3) == 0)
    a.ask(drop_pool, "pool")
    tell("a.outlives_unmap", b.ask(wrong_words, "pool", 3) == 0)
    seen = b.ask(torch_view, "pool", 3) if sizes.torch else "not asked: --no-torch"
    if isinstance(seen, str):
        tell("a.torch", seen)
    else:
        tell("a.torch", seen and b.ask(wrong_words, "pool", 4) == 0)


def legacy_ipc(stage: Stage, tell: Tell, sizes: Sizes) -> None:
    """The older way: a handle of an allocation, and an offset into it."""
    a, b = stage.actor("A"), stage.actor("B")
    size, offset = sizes.pool // 4, sizes.pool // 8
    handle = a.ask(alloc_plain, "pool", size, offset)
    b.ask(open_plain, "pool", handle, size, offset)
    a.ask(count_into, "pool", 500)
    there = b.ask(wrong_words, "pool", 500)
    b.ask(count_into, "pool", 9)
    tell("a.ipc", there == 0 and a.ask(wrong_words, "pool", 9) == 0)


def handing_over_timed(stage: Stage, tell: Tell, sizes: Sizes) -> None:
    """What each call takes, of which sizes: medians, in ms."""
    a, b = stage.actor("A"), stage.actor("B")
    tell("a.granularity", a.ask(rounded, 1))
    table: dict[str, dict[str, float]] = {}
    for num_bytes in sizes.timed:
        if num_bytes > 0.8 * a.ask(free_bytes)[0]:
            continue
        all_took: list[dict[str, float]] = []
        for _ in range(sizes.repeats):
            made = a.ask(make_pool, "pool", num_bytes)
            with a.given() as fds:
                mapped = b.hand(fds, map_pool, "pool", num_bytes)
            took = {f"A {name}": seconds for name, seconds in made.items()}
            took |= {f"B {name}": seconds for name, seconds in mapped.items()}
            took |= {f"B {name}": seconds for name, seconds in b.ask(drop_pool, "pool").items()}
            took |= {f"A {name}": seconds for name, seconds in a.ask(drop_pool, "pool").items()}
            all_took.append(took)
        table[f"{num_bytes >> 20:,} MiB"] = {
            name: round(1e3 * statistics.median(each[name] for each in all_took), 3) for name in all_took[0]
        }
    tell("a.calls_ms", table)
    if table:
        tell("a.attach_ms", round(max(row["B import"] + row["B map"] for row in table.values()), 3))
        tell("a.export_ms", max(row["A export"] for row in table.values()))


def fresh_memory(stage: Stage, tell: Tell, sizes: Sizes) -> None:
    """Most of the card is filled by a process that is killed then; what does a new pool there hold?"""
    looks = stage.actor("M")
    before, _ = looks.ask(free_bytes)
    dirty = stage.actor("A")
    dirty.ask(ready)
    size = int(sizes.dirty * dirty.ask(free_bytes)[0])
    dirty.ask(make_pool, "pool", size)
    with dirty.given():
        dirty.ask(fill_pool, "pool", DIRT)
    dirty.kill()
    back = stage.until(lambda: looks.ask(free_bytes)[0] > before - size // 2, sizes.back_s)
    assert back, "the memory of a killed process is not back"
    new = stage.actor("B")
    new.ask(make_pool, "pool", size)
    with new.given():
        tell("a.fresh_zero", new.ask(words_not, "pool", 0) == 0)
    tell("a.fresh_dirt", new.ask(found_words, "pool", DIRT))


def write_bytes(here: Here, name: str, begin: int) -> None:
    """As `count_into`, but by a copy from host memory."""
    pool = here.kept[name]
    for first in range(0, pool.words, 1 << 20):
        words = np.arange(begin + first, begin + min(pool.words, first + (1 << 20)), dtype=np.uint64)
        here.card.write(pool.address + first * WORD, words)


def found_words(here: Here, name: str, value: int) -> int:
    """How many words, of those that were looked at, are `value`."""
    pool = here.kept[name]
    found = (here.card.read(pool.address + first * WORD, words) for first, words in pieces(pool))
    return sum(int(np.count_nonzero(each == value)) for each in found)


def torch_view(here: Here, name: str, begin: int) -> bool | str:
    """Whether a tensor over the pool has `count_into`'s words; adds one to each. A text: why it was not asked."""
    try:
        import torch
    except ImportError:
        return "not asked: no torch"
    if not torch.cuda.is_available():
        return "not asked: no torch with CUDA"
    pool = here.kept[name]

    class View:
        __cuda_array_interface__: Final[dict[str, Any]] = {
            "shape": (pool.words,),
            "typestr": "<i8",
            "data": (pool.address, False),
            "version": 3,
            "strides": None,
        }

    view = torch.as_tensor(View(), device=f"cuda:{here.device}")
    same = view.data_ptr() == pool.address
    equal = bool((view == torch.arange(begin, begin + pool.words, device=view.device)).all())
    view += 1
    torch.cuda.synchronize()
    return same and equal


def alloc_plain(here: Here, name: str, num_bytes: int, offset: int) -> bytes:
    """A pool that begins inside an allocation of the older kind; the allocation's handle."""
    base = here.card.alloc(num_bytes)
    if base is None:
        raise MemoryError(f"no {num_bytes:,} bytes left")
    here.kept[name] = Pool(base + offset, num_bytes - offset)
    return here.card.ipc_handle(base)


def open_plain(here: Here, name: str, handle: bytes, num_bytes: int, offset: int) -> None:
    here.kept[name] = Pool(here.card.open_ipc(handle) + offset, num_bytes - offset)


# -- (d) -----------------------------------------------------------------------------------------------------------


def exporter_dies(stage: Stage, tell: Tell, sizes: Sizes) -> None:
    """The exporter is killed, then the importer; then the descriptor is closed, which a process without CUDA has."""
    looks, a, b = stage.actor("M"), stage.actor("A"), stage.actor("B")
    looks.ask(ready)
    before, total = looks.ask(free_bytes)
    b.ask(ready)
    a.ask(ready)
    size = a.ask(rounded, int(sizes.held * a.ask(free_bytes)[0]))
    small = total * HELD
    a.ask(make_pool, "pool", size)
    with a.given() as fds:
        b.hand(fds, map_pool, "pool", size)
        a.ask(count_into, "pool", 21)
        a.kill()
        stage.sleep(sizes.still_s)
        tell("d.held_by_importer", looks.ask(free_bytes)[0] < before - size + small)
        tell("d.importer_reads", b.ask(wrong_words, "pool", 21) == 0)
        tell("d.no_room_for_a_second", not room(stage, size))
        tell("d.room_beside", round(looks.ask(fill_to_the_brim) / total, 3))
        b.kill()
        stage.sleep(sizes.still_s)
        tell("d.held_by_fd", looks.ask(free_bytes)[0] < before - size + small)
        after = stage.actor("C")
        try:
            after.hand(fds, map_pool, "pool", size)
            tell("d.fd_keeps_bytes", after.ask(wrong_words, "pool", 21) == 0)
        except Failed as exc:
            tell("d.fd_keeps_bytes", False)
            tell("d.fd_import", str(exc))
        _, dead = after.kill()
    closed = time.monotonic()
    back = stage.until(lambda: looks.ask(free_bytes)[0] > before - small, sizes.back_s)
    tell("d.back", back)
    if back:
        tell("d.back_ms", round(1e3 * (time.monotonic() - max(dead, closed)), 2))
    tell("d.room_again", room(stage, size))


def owner_dies_alone(stage: Stage, tell: Tell, sizes: Sizes) -> None:
    """A process with a pool that nobody else has: is the memory there for its next life as soon as it is dead?"""
    looks, a = stage.actor("M"), stage.actor("A")
    looks.ask(ready)
    before, total = looks.ask(free_bytes)
    a.ask(ready)
    size = a.ask(rounded, int(sizes.held * a.ask(free_bytes)[0]))
    a.ask(make_pool, "pool", size)
    with a.given():
        a.ask(count_into, "pool", 1)
    killed, dead = a.kill()
    at_once, _ = looks.ask(free_bytes)
    tell("d.back_at_pidfd", at_once > before - total * HELD)
    back = stage.until(lambda: looks.ask(free_bytes)[0] > before - total * HELD, sizes.back_s)
    assert back, "the memory of a killed process is not back"
    tell("d.alone_dead_ms", round(1e3 * (dead - killed), 2))
    tell("d.alone_back_ms", round(1e3 * (time.monotonic() - killed), 2))


def legacy_exporter_dies(stage: Stage, tell: Tell, sizes: Sizes) -> None:
    """By the older way, of which the manual says nothing."""
    looks, a, b = stage.actor("M"), stage.actor("A"), stage.actor("B")
    looks.ask(ready)
    b.ask(ready)
    before, total = looks.ask(free_bytes)
    a.ask(ready)
    size = int(sizes.held * a.ask(free_bytes)[0])
    handle = a.ask(alloc_plain, "pool", size, 0)
    b.ask(open_plain, "pool", handle, size, 0)
    a.ask(count_into, "pool", 5)
    a.kill()
    stage.sleep(sizes.still_s)
    tell("d.ipc_held", looks.ask(free_bytes)[0] < before - size + total * HELD)
    try:
        tell("d.ipc_reads", b.ask(wrong_words, "pool", 5) == 0)
    except Failed as exc:
        tell("d.ipc_reads", str(exc))


def room(stage: Stage, size: int) -> bool:
    """Whether a new process gets a pool of that size."""
    new = stage.actor("N")
    try:
        new.ask(make_pool, "pool", size)
    except Failed as exc:
        if "MemoryError" not in str(exc):
            raise
        return False
    finally:
        new.kill()
    return True


def fill_to_the_brim(here: Here) -> int:
    """How many bytes pools can be made of, until there is no more; they are given back."""
    size, handles, total = rounded(here, here.card.free_bytes()[0]), [], 0
    least = rounded(here, 1)
    while size >= least:
        if (handle := here.card.create(size, here.device)) is None:
            size = rounded(here, size // 2) if size > least else 0
        else:
            handles.append(handle)
            total += size
    for handle in handles:
        here.card.release_memory(handle)
    return total
