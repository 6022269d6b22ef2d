"""(e) Copies beside a process that decodes, and (f) what calls cost.

B is the daemon: it copies between a pool and pinned host memory, at random places, in chunks as layouts have them. A is
a runner. What both do is measured in the same window of the monotonic clock.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from sglcache.memory.cuda_engine import MAX_BATCH
from sglcache.testing.card import THREADS, WORD
from sglcache.testing.probe.order import spread
from sglcache.testing.probe.sizes import Sizes
from sglcache.testing.probe.stage import Actor, Failed, Gone, Here, Stage
from sglcache.testing.probe.tasks import Tell, count_into, free_bytes, make_pool, map_pool, new_shared, ready

Words = npt.NDArray[np.uint64]
Window = tuple[float, float]

D2H, H2D, BOTH = "to the host", "to the device", "both at once"
DIRECTIONS: Final = (D2H, H2D, BOTH)
BATCH, OVERLAP, SINGLE, GATHER = "batch", "batch, overlap", "one by one", "kernel"
METHODS: Final = (BATCH, OVERLAP, SINGLE, GATHER)
KEYS: Final = {BATCH: "batch", OVERLAP: "overlap", SINGLE: "single", GATHER: "kernel"}
PREFER_OVERLAP: Final = 1  # CUmemcpyFlags: a hint that the copy is to run beside kernels
MEMFD, DRIVER = "memfd", "driver"  # whose the pinned memory is
PLAIN: Final = 0  # as a chunk: all in one copy
# A chunk is what lies together of a page of Llama 3.1 8B, of 128 KiB a token: of one layer's K or V, or of all.
LLAMA: Final = {
    "page 16, layer_first": 32 << 10,
    "page 64, layer_first": 128 << 10,
    "page 16, page_first": 2 << 20,
    "page 64, page_first": 8 << 20,
}
SMALL, LARGE = 32 << 10, 2 << 20
GATHER_BLOCKS: Final = 32  # so many fill PCIe, and leave most of a card to others
TRIED_BYTES: Final = 256 << 20  # on each side, where a method is tried
IN_FLIGHT: Final = 2  # batches of a direction
BATCHES: Final = (64, 256, 1024, MAX_BATCH)


class Plan(NamedTuple):
    """Chunks of one direction: addresses."""

    dsts: Words
    srcs: Words
    sizes: Words


class Pinned(NamedTuple):
    address: int
    there: int  # where the device has it
    array: Words


# -- (e) -----------------------------------------------------------------------------------------------------------


def copies_alone(stage: Stage, tell: Tell, sizes: Sizes) -> None:
    """Nothing else runs. GB/s, and the fraction of one plain copy between the same memories."""
    usable = tried_methods(stage, tell, sizes)
    b = stage.actor("B")
    b.ask(ready)
    b.ask(prepare_copies, sizes)
    tell("e.batched", b.ask(batched_call))
    plain = {way: rate(stage, b, sizes, BATCH, PLAIN, way, MEMFD) for way in DIRECTIONS}
    tell("e.plain", plain)
    of_driver = {way: rate(stage, b, sizes, BATCH, PLAIN, way, DRIVER) for way in DIRECTIONS}
    tell("e.plain_driver", of_driver)
    tell("e.memfd_to_driver", round(min(plain[way] / of_driver[way] for way in DIRECTIONS), 3))
    table: dict[str, dict[str, float]] = {}
    tell("e.alone", table)  # and what comes into it
    for layout, chunk in LLAMA.items():
        for method in usable if chunk in (SMALL, LARGE) else [BATCH]:
            row = {way: rate(stage, b, sizes, method, chunk, way, MEMFD) for way in DIRECTIONS}
            table[f"{layout}: {chunk >> 10:,} KiB, {method}"] = row
            if method == BATCH:
                least = min(row[way] / plain[way] for way in DIRECTIONS)
                tell(f"e.fraction_{chunk >> 10}k", round(least, 3))
    for chunk in (SMALL, LARGE):
        row = {way: rate(stage, b, sizes, BATCH, chunk, way, DRIVER) for way in DIRECTIONS}
        table[f"{chunk >> 10:,} KiB, {BATCH}, the driver's memory"] = row


def tried_methods(stage: Stage, tell: Tell, sizes: Sizes) -> list[str]:
    """Those that can be used; each is tried in a process of its own, since an error ends that one's use of the card."""
    usable, failed, wrong = [], {}, 0
    small = replace(sizes, copied=min(sizes.copied, TRIED_BYTES))
    for method in METHODS:
        tries = stage.actor(f"B, {method}")
        try:
            tries.ask(prepare_copies, small)
            wrong += sum(tries.ask(wrong_chunks, small, method, chunk) for chunk in (SMALL, LARGE))
            usable.append(method)
        except Failed as exc:
            failed[method] = str(exc)
        tries.kill()
    tell("e.wrong_chunks", wrong)
    tell("e.failed", failed)
    return usable


def copies_beside_decode(stage: Stage, tell: Tell, sizes: Sizes) -> None:
    """A decodes, B copies: GB/s of B, and by how much A is slower than alone."""
    usable = tried_methods(stage, tell, sizes)
    a, b = stage.actor("A"), stage.actor("B")
    a.ask(ready)
    b.ask(ready)
    b.ask(prepare_copies, sizes)
    loads = ["burn", "copy"]
    a.ask(prepare_decode, sizes)
    matmul = a.ask(prepare_matmul) if sizes.torch else "not asked: --no-torch"
    if matmul:
        tell("e.matmul", matmul)
    else:
        loads.append("matmul")
    table: dict[str, dict[str, str]] = {}
    slower: dict[tuple[str, int], list[float]] = {}
    tell("e.beside", table)  # and what comes into it
    for load in loads:
        alone = steps(stage, a, sizes, load)
        for method in usable:
            for chunk in (SMALL, LARGE):
                row = table.setdefault(f"{load}: {chunk >> 10:,} KiB, {method}", {})
                for way in DIRECTIONS:
                    window = soon(sizes)
                    b.begin(copy_rate, sizes, method, chunk, way, MEMFD, window)
                    beside = steps(stage, a, sizes, load, window)
                    rates = b.result()
                    late = alone["steps"] / beside["steps"] - 1
                    slower.setdefault((method, chunk), []).append(late)
                    row[way] = f"{sum(rates.values()):.1f} GB/s, {100 * late:+.1f} %"
        again = steps(stage, a, sizes, load)
        drift = alone["steps"] / again["steps"] - 1
        table[f"{load}: alone"] = {
            "steps a second": f"{alone['steps']:.0f}, later {100 * drift:+.1f} %",
            "a step's p99": f"{alone['p99_us']:.0f} µs",
        }
    for (method, chunk), late_by in slower.items():
        tell(f"e.slower_{KEYS[method]}_{chunk >> 10}k", round(100 * max(late_by), 1))
    worst = {name: max(max(slower[name, chunk]) for chunk in (SMALL, LARGE)) for name in usable}
    if GATHER in worst and BATCH in worst:
        tell("e.kernel_slows_more", worst[GATHER] > worst[BATCH])


def soon(sizes: Sizes) -> Window:
    begin = time.monotonic() + sizes.settle_s
    return begin, begin + sizes.window_s


def rate(stage: Stage, b: Actor, sizes: Sizes, method: str, chunk: int, way: str, kind: str) -> float:
    """GB/s, of both directions together."""
    found: dict[str, float] = b.ask(copy_rate, sizes, method, chunk, way, kind, soon(sizes))
    return round(sum(found.values()), 2)


def steps(stage: Stage, a: Actor, sizes: Sizes, load: str, window: Window | None = None) -> dict[str, float]:
    return a.ask(decode, load, sizes, window or soon(sizes))


def prepare_copies(here: Here, sizes: Sizes) -> None:
    """A pool, and pinned memory of each kind."""
    make_pool(here, "pool", sizes.copied)
    fd = new_shared(sizes.copied)
    here.give.append(fd)
    shared = mmap.mmap(fd, sizes.copied)
    array = np.frombuffer(shared, np.uint64)
    array[:] = 0
    address = ctypes.addressof(ctypes.c_char.from_buffer(shared))
    here.kept[MEMFD] = Pinned(address, here.card.register(address, sizes.copied), array)
    address = here.card.alloc_host(sizes.copied)
    own = (ctypes.c_uint64 * (sizes.copied // WORD)).from_address(address)
    here.kept[DRIVER] = Pinned(address, address, np.ctypeslib.as_array(own))
    here.kept["streams"] = {way: here.card.stream() for way in (D2H, H2D)}
    here.kept["offsets"] = here.card.alloc(2 * MAX_BATCH * WORD * 2)


def batched_call(here: Here) -> str:
    return here.card._batch or "none: one by one"


def plan(here: Here, sizes: Sizes, chunk: int, way: str, kind: str) -> Plan:
    """The first half of each side goes to the host, the second to the device; in a random order, at random places."""
    half = sizes.copied // 2
    size = min(chunk or half, half)
    count = min(half // size, MAX_BATCH)
    random = np.random.default_rng(size)
    begin = 0 if way == D2H else half
    places = [
        (random.permutation(half // size)[:count] * size + base + begin).astype(np.uint64)
        for base in (int(here.kept["pool"].address), int(here.kept[kind].address))
    ]
    device, host = places
    dsts, srcs = (host, device) if way == D2H else (device, host)
    return Plan(dsts, srcs, np.full(count, size, np.uint64))


def enqueuer(here: Here, method: str, chunks: Plan, way: str, kind: str) -> Callable[[], None]:
    """What enqueues all chunks once."""
    card, stream = here.card, here.kept["streams"][way]
    if method in (BATCH, OVERLAP):
        card.batch_flags = PREFER_OVERLAP if method == OVERLAP else 0
        return lambda: card.copy(*chunks, stream)
    if method == SINGLE:
        each = list(zip(*(column.tolist() for column in chunks), strict=True))

        def one_by_one() -> None:
            for dst, src, size in each:
                card.copy_one(dst, src, size, stream)

        return one_by_one
    pool, host, there = int(here.kept["pool"].address), here.kept[kind].address, here.kept[kind].there
    (to, dst), (start, src) = ((host, there), (pool, pool)) if way == D2H else ((pool, pool), (host, there))
    count = len(chunks.sizes)
    at = int(here.kept["offsets"]) + (0 if way == D2H else 2 * MAX_BATCH * WORD)
    card.write(at, chunks.dsts - np.uint64(to))
    card.write(at + MAX_BATCH * WORD, chunks.srcs - np.uint64(start))
    arguments = (dst, src, at, at + MAX_BATCH * WORD, int(chunks.sizes[0]), count)
    return lambda: card.launch("sgl_gather", *arguments, stream=stream, blocks=GATHER_BLOCKS, threads=THREADS)


def copy_rate(
    here: Here, sizes: Sizes, method: str, chunk: int, way: str, kind: str, window: Window
) -> dict[str, float]:
    """GB/s of each direction, of the batches that ended in the window; goes on until its end."""
    begin, end = window
    ways = (D2H, H2D) if way == BOTH else (way,)
    running: dict[str, list[int]] = {each: [] for each in ways}
    ended: dict[str, list[float]] = {each: [] for each in ways}
    enqueue: dict[str, Callable[[], None]] = {}
    num_bytes: dict[str, int] = {}
    for each in ways:
        chunks = plan(here, sizes, chunk, each, kind)
        num_bytes[each] = int(chunks.sizes.sum())
        enqueue[each] = enqueuer(here, method, chunks, each, kind)
    spare = [here.card.event() for _ in range(IN_FLIGHT * len(ways))]
    # A window that was too short for two batches is made longer.
    while time.monotonic() < end or any(len(times) < 2 for times in ended.values()):
        for each in ways:
            if running[each] and here.card.done(running[each][0]):
                spare.append(running[each].pop(0))
                if (now := time.monotonic()) >= begin:
                    ended[each].append(now)
            if len(running[each]) < IN_FLIGHT:
                enqueue[each]()
                event = spare.pop()
                here.card.record(event, here.kept["streams"][each])
                running[each].append(event)
    for each in ways:
        here.card.synchronize(here.kept["streams"][each])
    here.card.release([], [*spare, *(event for events in running.values() for event in events)])
    return {
        each: (len(times) - 1) * num_bytes[each] / max(times[-1] - times[0], 1e-9) / 1e9
        for each, times in ended.items()
    }


def wrong_chunks(here: Here, sizes: Sizes, method: str, chunk: int) -> int:
    """Copy once in each direction; how many of the chunks that were looked at are not as they were."""
    pool, host = here.kept["pool"], here.kept[MEMFD]
    wrong = 0
    for way in (D2H, H2D):
        host.array[:] = 0
        count_into(here, "pool", 0)
        if way == H2D:
            host.array[:] = np.arange(len(host.array), dtype=np.uint64)
            here.card.fill(pool.address, 0, pool.words, here.stream)
            here.card.synchronize(here.stream)
        chunks = plan(here, sizes, chunk, way, MEMFD)
        enqueuer(here, method, chunks, way, MEMFD)()
        here.card.synchronize(here.kept["streams"][way])
        to, start = (host.address, pool.address) if way == D2H else (pool.address, host.address)
        size = int(chunks.sizes[0]) // WORD
        for at in np.linspace(0, len(chunks.sizes) - 1, 16).astype(int).tolist():
            first = (int(chunks.srcs[at]) - start) // WORD
            there = (int(chunks.dsts[at]) - to) // WORD
            found = (
                host.array[there : there + size] if way == D2H else here.card.read(pool.address + there * WORD, size)
            )
            wrong += not np.array_equal(found, np.arange(first, first + size, dtype=np.uint64))
    return wrong


def prepare_decode(here: Here, sizes: Sizes) -> None:
    """What "burn" and "copy" are."""
    card, step = here.card, sizes.decode_step
    source, target = card.alloc(step), card.alloc(step)
    if source is None or target is None:
        raise MemoryError(f"no {2 * step:,} bytes left")
    blocks = 2 * card.multiprocessors
    start, end, iterations = card.timed_event(), card.timed_event(), 1 << 10
    while True:  # as many as take `burn_s`
        card.record(start, here.stream)
        card.launch("sgl_burn", target, iterations, stream=here.stream, blocks=blocks, threads=THREADS)
        card.record(end, here.stream)
        card.synchronize(here.stream)
        if card.seconds_between(start, end) >= sizes.burn_s or iterations >= 1 << 30:
            break
        iterations *= 2

    def burn() -> None:
        card.launch("sgl_burn", target, iterations, stream=here.stream, blocks=blocks, threads=THREADS)

    def copy() -> None:
        card.copy_words(target, source, step // WORD, here.stream)

    def each(kernel: Callable[[], None]) -> Callable[[], None]:
        def one_step() -> None:
            for _ in range(sizes.kernels):
                kernel()
            card.synchronize(here.stream)

        return one_step

    here.kept["burn"], here.kept["copy"] = each(burn), each(copy)


def prepare_matmul(here: Here) -> str:
    """What "matmul" is: a layer's weights for 64 sequences. A text: why there is none."""
    try:
        import torch
    except ImportError:
        return "not asked: no torch"
    if not torch.cuda.is_available():
        return "not asked: no torch with CUDA"
    device = f"cuda:{here.device}"
    rows = torch.randn(64, 4096, device=device, dtype=torch.bfloat16)
    up, down = (torch.randn(*shape, device=device, dtype=torch.bfloat16) for shape in ((4096, 14336), (14336, 4096)))

    def one_step() -> None:
        for _ in range(16):
            (rows @ up) @ down
        torch.cuda.synchronize()

    one_step()
    here.kept["matmul"] = one_step
    return ""


def decode(here: Here, load: str, sizes: Sizes, window: Window) -> dict[str, float]:
    """Steps a second, and the slowest hundredth of them, of those that ended in the window."""
    begin, end = window
    one_step: Callable[[], None] = here.kept[load]
    ended: list[float] = []
    while (now := time.monotonic()) < end or len(ended) < 3:
        one_step()
        if now >= begin:
            ended.append(time.monotonic())
    took = [after - before for before, after in itertools.pairwise(ended)]
    return {"steps": len(took) / sum(took), "p99_us": spread(took)["p99"]}


# -- (f) -----------------------------------------------------------------------------------------------------------


def costs(stage: Stage, tell: Tell, sizes: Sizes) -> None:
    """Registering, polling, enqueuing."""
    b = stage.actor("B")
    b.ask(ready)
    registering = b.ask(cost_of_registering, sizes.registered)
    tell("f.register_s_per_gib", registering)
    tell("f.register_s", max(registering["untouched"], registering["touched"]))
    tell("f.query_us", b.ask(cost_of_queries, sizes.calls, sizes.spin_s))
    b.ask(prepare_copies, sizes)
    table = b.ask(cost_of_enqueuing, sizes)
    tell("f.enqueue", table)
    tell("f.enqueue_to_copy", table[str(MAX_BATCH)]["call / copy"])
    tell("f.batch_call_ms", table[str(MAX_BATCH)]["call, ms"])


def over_ranges(stage: Stage, tell: Tell, sizes: Sizes) -> None:
    """A copy from memory that was registered as two ranges, across where they meet."""
    b = stage.actor("B")
    b.ask(ready)
    try:
        tell("f.copy_over_ranges", b.ask(copy_over_ranges, sizes.page))
    except Failed as exc:
        tell("f.copy_over_ranges", str(exc))


def attach_limit(stage: Stage, tell: Tell, sizes: Sizes) -> None:
    """Many processes have a pool mapped at once: how many could, what each takes of the card, and how long."""
    daemon = stage.actor("daemon")
    daemon.ask(ready)
    daemon.ask(make_pool, "pool", sizes.pool)
    with daemon.given() as fds:
        before, _ = daemon.ask(free_bytes)
        runners = [stage.actor(f"runner {number}") for number in range(sizes.attached)]
        began = time.monotonic()
        for runner in runners:
            runner.begin_with(fds, map_pool, "pool", sizes.pool)
        good, why = 0, ""
        for runner in runners:
            try:
                runner.result()
                runner.ask(count_into, "pool", 1)
                good += 1
                tell("f.attached", good)
            except (Failed, Gone) as exc:
                why = str(exc)
        took = time.monotonic() - began
        after, _ = daemon.ask(free_bytes)
    tell("f.attach_all", good == sizes.attached)
    if why:
        tell("f.attach_refused", why)
    tell("f.attach_s", round(took, 2))
    tell("f.context_mib", round((before - after) / max(1, good) / (1 << 20)))


def cost_of_registering(here: Here, num_bytes: int) -> dict[str, float]:
    """Seconds a GiB: pages that nobody has touched, letting go of them, pages that are there, and the driver's own."""
    fd = new_shared(num_bytes)
    shared = mmap.mmap(fd, num_bytes)
    os.close(fd)
    address = ctypes.addressof(ctypes.c_char.from_buffer(shared))
    calls: Sequence[tuple[str, Callable[[], Any]]] = (
        ("untouched", lambda: here.card.register(address, num_bytes)),
        ("unregister", lambda: here.card.unpin(address)),
        ("touched", lambda: here.card.register(address, num_bytes)),
        ("unregister again", lambda: here.card.unpin(address)),
        ("cuMemHostAlloc", lambda: here.card.free_host(here.card.alloc_host(num_bytes))),
    )
    took = {}
    for name, call in calls:
        began = time.monotonic()
        call()
        took[name] = round((time.monotonic() - began) * (1 << 30) / num_bytes, 4)
    return took


def copy_over_ranges(here: Here, num_bytes: int) -> bool:
    """Whether all of it came over."""
    fd = new_shared(num_bytes)
    shared = mmap.mmap(fd, num_bytes)
    os.close(fd)
    array = np.frombuffer(shared, np.uint64)
    array[:] = np.arange(len(array), dtype=np.uint64)
    address, half = ctypes.addressof(ctypes.c_char.from_buffer(shared)), num_bytes // 2
    for begin in (address, address + half):
        here.card.register(begin, half)
    make_pool(here, "pool", num_bytes)
    there = here.kept["pool"].address
    dst, src, size = (np.array([each], np.uint64) for each in (there, address, num_bytes))
    here.card.copy(dst, src, size, here.stream)
    here.card.synchronize(here.stream)
    return bool(np.array_equal(here.card.read(there, len(array)), array))


def cost_of_queries(here: Here, calls: int, spin_s: float) -> dict[str, float]:
    """µs."""
    card, event, took = here.card, here.card.event(), {}
    card.spin(spin_s, here.stream)
    card.record(event, here.stream)
    began, asked = time.monotonic(), 0
    while asked < calls and not card.done(event):
        asked += 1
    took["not done"] = round((time.monotonic() - began) / max(1, asked) * 1e6, 2)
    card.synchronize(here.stream)
    began = time.monotonic()
    for _ in range(calls):
        card.done(event)
    took["done"] = round((time.monotonic() - began) / calls * 1e6, 2)
    began = time.monotonic()
    for _ in range(calls):
        card.record(event, here.stream)
    took["record"] = round((time.monotonic() - began) / calls * 1e6, 2)
    card.synchronize(here.stream)
    return took


def cost_of_enqueuing(here: Here, sizes: Sizes) -> dict[str, dict[str, float]]:
    """Of one call with so many chunks of 32 KiB, or what fits: what it takes, and what it takes with the copy."""
    chunk = min(SMALL, sizes.copied // 2 // MAX_BATCH)
    whole = plan(here, sizes, chunk, D2H, MEMFD)
    stream, table = here.kept["streams"][D2H], {}
    for count in BATCHES:
        chunks = Plan(*(column[:count] for column in whole))
        calls, copies = [], []
        for _ in range(10):
            began = time.monotonic()
            here.card.copy(*chunks, stream)
            called = time.monotonic()
            here.card.synchronize(stream)
            calls.append(called - began)
            copies.append(time.monotonic() - began)
        call, copy = statistics.median(calls), statistics.median(copies)
        table[str(count)] = {
            "call, ms": round(1e3 * call, 3),
            "a range, µs": round(1e6 * call / count, 3),
            "with the copy, ms": round(1e3 * copy, 3),
            "call / copy": round(call / copy, 3),
        }
    return table
