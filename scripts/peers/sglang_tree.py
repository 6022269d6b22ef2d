#!/usr/bin/env python3
"""SGLang 0.5.23's prefix trees on a real trace: the peer of `sglcache bench index`, in one row of JSON.

    OMP_NUM_THREADS=1 .venv-peers/bin/python scripts/peers/sglang_tree.py --trace FILE [--kind swa --window 128]

Its Rust core, or with --core python its RadixCache, which has full KV alone. scripts/peers.sh makes .venv-peers. With
one OpenMP thread: torch's helpers spin and would look like work.

Per request: a match; then, part by part as the prompt is computed, eviction down to the capacities and the insert of
all that is computed by then; with --events at the end the take of the queue and the encoding of the batch, as SGLang's
publisher does it. Parts end at multiples of --chunk-tokens, at the branch point (how far full KV alone would have
matched: SGLang commits a window and a state there as well) and at the prompt's last whole page.

What a scheduler does beside the tree, and this leaves out, is in the peer's favour: locks, allocators, the map from
full to window slots (here window slots have the numbers of the full ones), the request's page table, slot tensors.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import warnings
from array import array
from pathlib import Path
from types import SimpleNamespace

warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).parents[2]))

import msgspec  # noqa: E402
import torch  # noqa: E402

# SGLang imports torchvision as it loads, whose wheel has its operators in a library that wants CUDA. No image is looked
# at here, so it is enough that those are known which torchvision names in Python.
VISION = torch.library.Library("torchvision", "DEF")  # for as long as this lives
for name in ("nms", "qnms"):
    VISION.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from sglang.srt.disaggregation.kv_events import KVEventBatch  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey  # noqa: E402
from sglang.srt.mem_cache.rust_tree_core import adapter  # noqa: E402
from sglang.srt.mem_cache.unified_cache.cache_action import SWARebuild  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402

from sglcache.bench import trace as traces  # noqa: E402
from sglcache.bench.hybrid import KINDS, floor, parts  # noqa: E402

FULL, SWA, MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA
STATE_GRID = 64  # tokens: the chunk of flash-linear-attention's kernels, at whose multiples a state can be had

# The core asks a server's arguments for two numbers of the model; here there is no server.
adapter.mamba_cache_chunk_size = lambda: STATE_GRID
adapter.get_exec = lambda: SimpleNamespace(mamba=SimpleNamespace(mamba_max_states_per_path=-1))


class Tree:
    """The Rust core of one kind, driven as `UnifiedRadixCache` drives it."""

    def __init__(self, options: argparse.Namespace) -> None:
        window, mamba = KINDS[options.kind]
        self.page_size = options.page_size
        self.window = options.window if window else 0
        self.mamba = mamba
        self.components = (FULL, *((SWA,) if window else ()), *((MAMBA,) if mamba else ()))
        self.capacities = {FULL: options.capacity_tokens, SWA: options.window_tokens, MAMBA: options.state_slots}
        self.core = adapter.RustUnifiedTreeCore(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=None,
                page_size=options.page_size,
                enable_kv_cache_events=options.events,
                tree_components=self.components,
                sliding_window_size=options.window if window else None,
            )
        )
        self.take = self.core.take_events

    def match(self, tokens: array[int]) -> tuple[int, int]:
        """Tokens that a request may use, and how many full KV alone would give."""
        result = self.core.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))
        return result.device_prefix_len, result.full_kv_hit_length

    def make_room(self, num_tokens: int) -> None:
        """Evict until so many new tokens fit, and a window of each of them, and one state."""
        need = {FULL: num_tokens, SWA: num_tokens, MAMBA: 1}
        freed = dict.fromkeys(self.components, 0)
        overflows = [
            (each, self.core.component_evictable_size(each) + need[each] - self.capacities[each])
            for each in self.components
        ]
        for component, overflow in overflows:
            if overflow > freed[component]:
                self.evict(component, overflow, freed)

    def evict(self, component: ComponentType, amount: int, freed: dict[ComponentType, int]) -> None:
        core = self.core
        core.evict_device_start(component, amount)
        while freed[component] < amount:
            step = core.evict_device_next_node(component, freed)
            self.drain(step, freed)
            if step.node_id is not None:
                self.drain(core.evict_device_leaf(step.node_id, False), freed)
            elif not step.made_progress:
                break
        core.evict_device_end(component)

    def drain(self, result: object, freed: dict[ComponentType, int]) -> None:
        for component, count in result.tracker.items():
            freed[component] += count
        result.device_frees.clear()
        result.host_frees.clear()
        result.cache_actions.clear()

    def insert(self, key: array[int], slots: torch.Tensor, known: int, state: torch.Tensor | None) -> None:
        """`key` is all that is computed so far, of which the tree has `known` tokens from this request already."""
        params = InsertParams(key=RadixKey(key), value=slots, prev_prefix_len=known, mamba_value=state)
        if self.window:
            params.set_evicted_seqlen(SWA, floor(len(key), self.window, self.page_size))
        core = self.core
        step = core.begin_insert(params)
        while True:
            self.apply(step.actions)
            if step.result is not None:
                break
            step = core.resume_insert()
        self.apply(core.end_insert())

    def apply(self, actions: list[object]) -> None:
        for action in actions:
            if isinstance(action, SWARebuild):
                self.core.set_component_device_value(action.node_id, SWA, action.source_value)


class Counting:
    """In the place of an allocator: what is freed is counted, and nothing else is done with it."""

    device = torch.device("cpu")
    freed = 0

    def free(self, slots: torch.Tensor, *_: object, **__: object) -> None:
        self.freed += len(slots)

    free_segment = free


class PythonTree:
    """SGLang's RadixCache, as its scheduler calls it. Full KV."""

    window, mamba = 0, False

    def __init__(self, options: argparse.Namespace) -> None:
        self.capacity = options.capacity_tokens
        self.cache = RadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=Counting(),
                page_size=options.page_size,
                enable_kv_cache_events=options.events,
            )
        )
        self.take = self.cache.kv_events.take

    def match(self, tokens: array[int]) -> tuple[int, int]:
        found = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens))).device_prefix_len
        return found, found

    def make_room(self, num_tokens: int) -> None:
        overflow = self.cache.evictable_size_ + num_tokens - self.capacity
        if overflow > 0:
            self.cache.evict(EvictParams(num_tokens=overflow))

    def insert(self, key: array[int], slots: torch.Tensor, known: int, state: torch.Tensor | None) -> None:
        self.cache.insert(InsertParams(key=RadixKey(key), value=slots))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", required=True)
    parser.add_argument("--core", choices=["rust", "python"], default="rust")
    parser.add_argument("--kind", choices=list(KINDS), default="full")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--capacity-tokens", type=int, default=2_000_000)
    parser.add_argument("--window", type=int, default=128, help="tokens that a query sees")
    parser.add_argument("--window-tokens", type=int, help="capacity; default: a quarter of --capacity-tokens")
    parser.add_argument("--state-slots", type=int, default=256, help="capacity")
    parser.add_argument("--chunk-tokens", type=int, default=0, help="0: a prompt is computed whole")
    parser.add_argument("--events", action="store_true")
    options = parser.parse_args()
    if options.window_tokens is None:
        options.window_tokens = options.capacity_tokens // 4
    if options.core == "python" and options.kind != "full":
        parser.error("--core python has full KV alone")
    print(json.dumps(run(options)))


def warm_up(options: argparse.Namespace) -> None:
    """What is loaded or compiled at the first insert, which took RadixCache ten seconds, is no request's."""
    tree = Tree(options) if options.core == "rust" else PythonTree(options)
    for first in (1, 2):
        tokens = array("q", [first] * 2 * options.page_size)
        tree.match(tokens)
        tree.insert(tokens, torch.arange(len(tokens)), 0, torch.tensor([first]) if tree.mamba else None)
    tree.take()


def run(options: argparse.Namespace) -> dict[str, object]:
    tree = Tree(options) if options.core == "rust" else PythonTree(options)
    requests = [
        array("q", request.tokens.astype("int64").tobytes())
        for request in traces.requests(options.trace, options.limit)
    ]
    encoder = msgspec.msgpack.Encoder()
    clock, cpu = time.perf_counter, time.thread_time
    spent = dict.fromkeys(["match", "evict", "insert", "take_encode"], 0.0)
    totals, cpus = [], []
    hit = reach = seen = next_slot = event_count = blocks = wire_bytes = 0
    branches = tree.window > 0 or tree.mamba
    warm_up(options)
    tree.take()
    gc.freeze()
    for tokens in requests:
        aligned = len(tokens) // options.page_size * options.page_size
        cpu_start, start = cpu(), clock()
        found, full = tree.match(tokens)
        matched, cpu_s = clock(), cpu() - cpu_start
        total = matched - start
        spent["match"] += total
        slots = torch.arange(next_slot, next_slot + aligned, dtype=torch.int64)
        known = found
        for end in parts(found, full if branches else found, aligned, options.chunk_tokens, options.page_size):
            state = torch.tensor([next_slot]) if tree.mamba else None
            next_slot += end - known
            value = slots[:end]
            cpu_start, start = cpu(), clock()
            tree.make_room(end - known)
            roomy = clock()
            tree.insert(tokens[:end], value, known, state)
            inserted = clock()
            cpu_s += cpu() - cpu_start
            spent["evict"] += roomy - start
            spent["insert"] += inserted - roomy
            total += inserted - start
            known = end
        if options.events:
            cpu_start, start = cpu(), clock()
            batch = tree.take()
            payload = encoder.encode(KVEventBatch(ts=0.0, events=batch, attn_dp_rank=0))
            taken = clock()
            cpu_s += cpu() - cpu_start
            spent["take_encode"] += taken - start
            total += taken - start
            wire_bytes += len(payload)
            event_count += len(batch)
            blocks += sum(len(getattr(event, "block_hashes", ())) for event in batch)
        totals.append(total)
        cpus.append(cpu_s)
        hit += found
        reach += full
        seen += aligned
    count = len(requests)
    ordered, cpus_ordered = sorted(totals), sorted(cpus)
    return {
        "system": f"sglang-0.5.23-{options.core}",
        "kind": options.kind,
        "page_size": options.page_size,
        "events": options.events,
        "capacity_tokens": options.capacity_tokens,
        "window": tree.window,
        "window_tokens": options.window_tokens if tree.window else 0,
        "state_slots": options.state_slots if tree.mamba else 0,
        "chunk_tokens": options.chunk_tokens,
        "requests": count,
        "tokens": seen,
        "hit_rate": round(hit / seen, 4),
        "full_reach": round(reach / seen, 4),
        **{f"{name}_us": round(value / count * 1e6, 1) for name, value in spent.items()},
        "total_us": round(sum(totals) / count * 1e6, 1),
        "cpu_us": round(sum(cpus) / count * 1e6, 1),
        "p50_us": round(ordered[count // 2] * 1e6, 1),
        "cpu_p50_us": round(cpus_ordered[count // 2] * 1e6, 1),
        "p99_us": round(ordered[int(count * 0.99)] * 1e6, 1),
        "event_count": event_count,
        "blocks": blocks,
        "wire_bytes": wire_bytes,
    }


if __name__ == "__main__":
    main()
