#!/usr/bin/env python3
"""Dynamo's RadixTree beside our mirror: the peer of `python -m sglcache.bench.beside mirror`, in one row of JSON.

    .venv-peers/bin/python scripts/peers/dynamo_tree.py --requests 400 --tokens 2048 --page-size 16

The same conversations (`sglcache.bench.beside.conversations`) are told to it as its own events, in JSON, which is what
its `apply_event` takes, and then asked for. It is asked by the hashes of blocks, which its router computes of a
request's tokens: `hash_us` is that, `find_us` the tree's own part, `match_us` both. Its events carry no tokens, ours
do: a mirror that is asked by tokens needs no agreement about hashes.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from dynamo.llm import RadixTree, compute_block_hash_for_seq

from sglcache.bench.beside import MirrorOptions, conversations, parsed

CALLS = 5  # a prompt is asked for so often; the median counts


def main() -> None:
    print(json.dumps(run(parsed(MirrorOptions, sys.argv[1:]))))


def run(options: MirrorOptions) -> dict[str, object]:
    clock, size = time.perf_counter, options.page_size
    tree = RadixTree()
    prompts = [prompt.tolist() for prompt in conversations(options)]
    events, known, blocks = [], {}, 0
    for number, prompt in enumerate(prompts):
        # What a block is called does not matter to the tree, as long as equal prefixes are called the same.
        parent = above = None
        fresh = []
        for local in compute_block_hash_for_seq(prompt, size):
            name = known.get((parent, local))
            if name is None:
                name = known[parent, local] = len(known) + 1
                if not fresh:
                    above = parent
                fresh.append({"block_hash": name, "tokens_hash": local})
            parent = name
        if fresh:
            event = {"event_id": number, "data": {"stored": {"parent_hash": above, "blocks": fresh}}}
            events.append(json.dumps(event).encode())
            blocks += len(fresh)
    started = clock()
    for event in events:
        tree.apply_event(0, event)
    tree.find_matches([1])  # its thread is behind the calls: this answer comes after all of them
    applied = clock() - started
    hashes_s, finds_s = [], []
    for prompt in prompts:
        hashing, finding = [], []
        for _ in range(CALLS):
            a = clock()
            hashes = compute_block_hash_for_seq(prompt, size)
            b = clock()
            scores = tree.find_matches(hashes).scores
            c = clock()
            hashing.append(b - a)
            finding.append(c - b)
        if list(scores.values()) != [len(prompt) // size]:
            raise SystemExit(f"of a prompt of {len(prompt) // size} blocks it knows {scores}")
        hashes_s.append(sorted(hashing)[CALLS // 2])
        finds_s.append(sorted(finding)[CALLS // 2])
    middle = len(prompts) // 2
    return {
        "system": f"ai-dynamo-runtime-{version('ai-dynamo-runtime')}",
        "blocks": blocks,
        "events": len(events),
        "event_bytes": sum(map(len, events)),
        "apply_us": applied / blocks * 1e6,
        "blocks_per_s": blocks / applied,
        "hash_us": sorted(hashes_s)[middle] * 1e6,
        "find_us": sorted(finds_s)[middle] * 1e6,
        "match_us": sorted(a + b for a, b in zip(hashes_s, finds_s, strict=True))[middle] * 1e6,
    }


if __name__ == "__main__":
    main()
