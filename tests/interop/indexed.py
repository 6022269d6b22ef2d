"""A daemon at work, and what follows it: Dynamo's indexer and our own mirror, held against what the index holds."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from consumers import NONE, Answer, Indexer, Overlap, eventually
from scene import PLAIN, TIERS, Blocks, Names, Prompt, commit, dump, peek, stored

from sglcache.bench import replay, trace
from sglcache.client.discovery import Source
from sglcache.client.mirror import Fact, Mirror
from sglcache.testing.daemon import Daemon
from sglcache.units import Tier

PAGE = 16
LEAST = 20  # how often each case must occur, for a comparison to say something
HEARD_S = 40.0
INSTANCE = 7
POOL = {"page_size": PAGE, "num_tokens": 12 << 10, "num_layers": 1, "num_kv_heads": 1, "head_dim": 8}
NOTHING: Answer = (NONE, {})
NAMES: list[Names] = [
    PLAIN,
    {"lora": "adapter-a"},
    {"lora": "adapter-b"},
    {"cache_salt": "tenant-1"},
    {"cache_salt": "tenant-2"},
    {"lora": "adapter-a", "cache_salt": "tenant-1"},
]


def conversations(requests: int, seed: int) -> Iterator[dict[str, Any]]:
    """Records of a trace whose prompts are short against the pool: up to four blocks, over two system prompts."""
    rng = random.Random(seed)
    live: list[list[int]] = []
    for number in range(requests):
        if not live or rng.random() < 0.4:
            live.append([rng.randrange(2)])
        history = rng.choice(live[-24:])
        if len(history) < 4:
            history.append(2 + seed * requests + number)
        yield {
            "timestamp": number,
            "input_length": trace.BLOCK * (len(history) - 1) + rng.randint(1, trace.BLOCK),
            "output_length": rng.randint(1, 100),
            "hash_ids": list(history),
        }


class Rig:
    """A daemon with pools of a few dozen conversations, a mirror and an indexer that follow each of its ranks."""

    def __init__(self, folder: Path, shim: Path, opened: ExitStack, *, dp_size: int = 1, **sections: Any) -> None:
        """Sections of the configuration. With a `storage`, its folder is made here."""
        self.folder = folder
        self.store: Path | None = None
        if "storage" in sections:
            self.store = folder / "store"
            sections["storage"] = {"kind": "file", "path": str(self.store), **sections["storage"]}
        given = {"host": {"num_tokens": 20 << 10}, **sections, "pool": {**POOL, **sections.get("pool", {})}}
        given["events"] = {"heartbeat_s": 0.2, **given.get("events", {})}
        self.daemon = opened.enter_context(Daemon(folder / "daemon", dp_size=dp_size, **given))
        self.indexer = opened.enter_context(Indexer(folder, shim))
        streams = {row["rank"]: row["stream"] for row in self.daemon.info["ranks"]}
        for rank, stream in streams.items():
            endpoints = stream["endpoint"], stream["replay_endpoint"]
            self.indexer.register("model", *endpoints, instance=INSTANCE, block_size=PAGE, rank=rank)
        sources = [Source(it["endpoint"], it["replay_endpoint"], rank=rank) for rank, it in streams.items()]
        self.mirror = opened.enter_context(Mirror.of(sources))
        self.prompts: list[Prompt] = []
        self.facts: list[Fact] = []  # all that the mirror was told, in order
        # Arrays have no place for an adapter: there such namespaces are not told of.
        arrays = given["events"].get("encoding") == "array"
        self.names = [names for names in NAMES if not (arrays and "lora" in names)]
        # A snapshot may be ahead of its number: who counts facts must have had it before there is anything to tell.
        self.settle()

    def replay(self, requests: int, seed: int) -> None:
        """What `sglcache replay` does: two client processes, every byte checked, our own mirror beside it."""
        path = self.folder / f"trace-{seed}.jsonl"
        path.write_text("".join(f"{json.dumps(record)}\n" for record in conversations(requests, seed)))
        options = replay.Options(path, num_clients=2, verify=True, socket=self.daemon.socket)
        report = replay.replay(options)
        assert report.ok, replay.describe(report)
        assert report.cut_requests == 0
        for number, request in enumerate(trace.requests(path)):
            output = replay.outputs(number, min(request.output_tokens, options.max_output_tokens))
            self.prompts.append(Prompt([*request.tokens.tolist(), *output.tolist()], PLAIN))

    def drive(self, requests: int, seed: int) -> None:
        """Conversations in namespaces, the same tokens in several of them; on the ranks in turn, and some on all."""
        rng = random.Random(seed)
        with ExitStack() as attached:
            clients = [attached.enter_context(rank.client()) for rank in self.daemon.ranks]
            for number in range(requests):
                tokens = rng.choice(self.prompts).tokens if self.prompts and rng.random() < 0.5 else []
                tokens = tokens[: rng.randint(0, len(tokens))] + [
                    rng.randrange(trace.VOCAB) for _ in range(rng.randint(8, 600))
                ]
                for names in rng.sample(self.names, 2):
                    self.prompts.append(Prompt(tokens, names))
                    for client in clients if rng.random() < 0.3 else [clients[number % len(clients)]]:
                        commit(client, self.prompts[-1])

    def settle(self) -> None:
        """Wait until both followers have all that was published; block by block they equal the index then."""
        for rank in self.daemon.ranks:
            rank.settle()
            last = rank.status()["stream"]["last_seq"]
            assert eventually(lambda rank=rank, last=last: self._follow(rank.offset, last), HEARD_S)
        truth = self.blocks()
        eventually(lambda: self.indexer.blocks("model") == truth, HEARD_S)
        assert self.indexer.blocks("model") == truth

    def _follow(self, rank: int, seq: int) -> bool:
        self.facts += self.mirror.step(0)
        return self.mirror.catch_up(seq, 0, rank=rank)

    def on_disk(self, rank: int = 0) -> set[int]:
        return set() if self.store is None else stored(self.store, rank)

    def blocks(self) -> dict[tuple[int, str], set[int]]:
        """What the index of each rank has, as `Indexer.blocks` tells it."""
        held = {}
        for rank in self.daemon.ranks:
            with rank.observer() as observer:
                held |= {(rank.offset, tier.name): dump(observer, tier) for tier in (Tier.DEVICE, Tier.HOST)}
                held[rank.offset, Tier.DISK.name] = self.on_disk(rank.offset)
        return {where: hashes for where, hashes in held.items() if hashes}

    def peek(self, asked: list[Prompt]) -> list[Answer]:
        """What the index of each rank says, as a router that knows both would answer."""
        with ExitStack() as attached:
            observers = {rank.offset: attached.enter_context(rank.observer()) for rank in self.daemon.ranks}
            on_disk = {rank: self.on_disk(rank) for rank in observers}
            return [
                answer({rank: peek(each, prompt, PAGE, on_disk[rank]) for rank, each in observers.items()})
                for prompt in asked
            ]

    def oracles(self) -> dict[int, Blocks]:
        """What a router can know of each rank from its stream, by our own mirror."""
        return {
            rank.offset: Blocks({tier: self.mirror.blocks(tier, rank.offset) for tier in TIERS})
            for rank in self.daemon.ranks
        }

    def ask(self, prompt: Prompt) -> Answer:
        return self.indexer.query("model", prompt.tokens, instance=INSTANCE, **prompt.names)


def answer(overlaps: dict[int, Overlap]) -> Answer:
    """Dynamo's of an instance whose ranks have so much: the most of each tier, and the device of each rank."""
    most = Overlap(*(max(each) for each in zip(*overlaps.values(), strict=True)))
    return most, {rank: found.device for rank, found in overlaps.items() if found.device}


KINDS = ("plain", "named")
CASES = ("device", "host beyond device", "nothing")
BELOW = "disk beyond host"


def case_of(found: Overlap) -> str:
    if found.stored > found.matched:
        return BELOW
    if found.matched > found.device:
        return "host beyond device"
    return "device" if found.device else "nothing"


def agree(rig: Rig, asked: list[Prompt]) -> Counter[tuple[str, str]]:
    """Index, mirror and indexer say the same of each prompt; how often what was said, with and without a namespace."""
    oracles, cases = rig.oracles(), Counter[tuple[str, str]]()
    for prompt, by_index in zip(asked, rig.peek(asked), strict=True):
        by_mirror = answer({rank: oracle.overlap(prompt, PAGE) for rank, oracle in oracles.items()})
        by_indexer = rig.ask(prompt)
        assert by_index == by_mirror == by_indexer, (
            f"{len(prompt.tokens)} tokens of {dict(prompt.names)}: the index says {by_index}, our mirror {by_mirror}, "
            f"Dynamo {by_indexer}"
        )
        cases[KINDS[bool(prompt.names)], case_of(by_indexer[0])] += 1
    return cases


def one_block_less_is_noticed(rig: Rig, rng: random.Random) -> None:
    """The comparison can fail: take any one block from what the oracle knows, and some answer differs."""
    oracles = rig.oracles()  # of one rank: what another one has would hide what this one lacks

    def differs() -> bool:
        return any(
            answer({rank: oracle.overlap(prompt, PAGE) for rank, oracle in oracles.items()}) != rig.ask(prompt)
            for prompt in rig.prompts
        )

    assert not differs()
    above: set[int] = set()
    for tier in oracles[0].tiers.values():  # what a tier above has, too, hides the copy below
        visible, above = tier - above, above | tier
        for block_hash in rng.sample(sorted(visible), 5 if visible else 0):
            tier.remove(block_hash)
            assert differs(), f"nobody misses {block_hash}"
            tier.add(block_hash)
