"""Dynamo's indexer, fed by a daemon at work, believes what the index holds: block by block, answer by answer."""

from __future__ import annotations

import json
import random
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from consumers import NONE, PYTHON, Answer, Indexer, Overlap, eventually, signed
from scene import PLAIN, Blocks, Names, Prompt, askable, commit, dump, peek

from sglcache.bench import replay, trace
from sglcache.client.discovery import Source
from sglcache.client.mirror import Mirror
from sglcache.testing.daemon import Daemon
from sglcache.units import Tier
from sglcache.wire.events import AllBlocksCleared, BlockRemoved

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]

PAGE = 16
LEAST = 20  # how often each case must occur, for a comparison to say something
HEARD_S = 40.0
INSTANCE = 7
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
        self.folder = folder
        pool = {"page_size": PAGE, "num_tokens": 12 << 10, "num_layers": 1, "num_kv_heads": 1, "head_dim": 8}
        given = {"pool": pool, "host": {"num_tokens": 20 << 10}, **sections}
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
        # Arrays have no place for an adapter: there such namespaces are not told of.
        arrays = given["events"].get("encoding") == "array"
        self.names = [names for names in NAMES if not (arrays and "lora" in names)]

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
            assert self.mirror.catch_up(rank.status()["stream"]["last_seq"], HEARD_S, rank=rank.offset)
        truth = self.blocks()
        eventually(lambda: self.indexer.blocks("model") == truth, HEARD_S)
        assert self.indexer.blocks("model") == truth

    def blocks(self) -> dict[tuple[int, str], set[int]]:
        """What the index of each rank has, as `Indexer.blocks` tells it."""
        held = {}
        for rank in self.daemon.ranks:
            with rank.observer() as observer:
                held |= {(rank.offset, tier.name): dump(observer, tier) for tier in (Tier.DEVICE, Tier.HOST)}
        return {where: hashes for where, hashes in held.items() if hashes}

    def peek(self, asked: list[Prompt]) -> list[Answer]:
        """What the index of each rank says, as a router that knows both would answer."""
        with ExitStack() as attached:
            observers = {rank.offset: attached.enter_context(rank.observer()) for rank in self.daemon.ranks}
            return [answer({rank: peek(observer, prompt) for rank, observer in observers.items()}) for prompt in asked]

    def oracles(self) -> dict[int, Blocks]:
        """What a router can know of each rank from its stream, by our own mirror."""
        return {
            rank.offset: Blocks({tier: self.mirror.blocks(tier, rank.offset) for tier in (Tier.DEVICE, Tier.HOST)})
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


def case_of(found: Overlap) -> str:
    if found.matched > found.device:
        return "host beyond device"
    return "device" if found.device else "nothing"


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


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
    device, host = oracles[0].tiers[Tier.DEVICE], oracles[0].tiers[Tier.HOST]
    for tier, visible in ((device, device), (host, host - device)):  # what the device has, too, hides the host's copy
        for block_hash in rng.sample(sorted(visible), 5):
            tier.remove(block_hash)
            assert differs(), f"nobody misses {block_hash}"
            tier.add(block_hash)


@pytest.mark.parametrize("encoding", ["map", "array", "superset"])
def test_the_indexer_equals_the_index(encoding: str, tmp_path: Path, shim: Path, opened: ExitStack) -> None:
    rig = Rig(tmp_path, shim, opened, events={"encoding": encoding})
    rng = random.Random(0)
    cases: Counter[tuple[str, str]] = Counter()
    if encoding == "map":  # once is enough: its processes load torch
        rig.replay(150, seed=1)
    else:
        rig.drive(80, seed=1)
    for seed in (2, 3, 4, 5):
        rig.settle()
        cases += agree(rig, askable(rng.sample(rig.prompts, 150), PAGE, rng))
        rig.drive(60, seed)
    rig.settle()
    cases += agree(rig, askable(rig.prompts, PAGE, rng))
    rare = {(kind, case): cases[kind, case] for kind in KINDS for case in CASES if cases[kind, case] < LEAST}
    assert not rare, f"too rare to say anything: {rare}, of {cases}"
    one_block_less_is_noticed(rig, rng)


def test_each_rank_is_told_of_for_itself(tmp_path: Path, shim: Path, opened: ExitStack) -> None:
    """Two replicas with some prompts in common, under one instance; then one is killed, and the other's stay."""
    rig = Rig(tmp_path, shim, opened, dp_size=2)
    rng = random.Random(0)
    rig.drive(160, seed=1)
    rig.settle()
    asked = askable(rig.prompts, PAGE, rng)
    cases = agree(rig, asked)
    assert all(cases["plain", case] + cases["named", case] >= LEAST for case in CASES), cases
    both = sum(len(ranks) == 2 for _, ranks in rig.peek(asked))
    assert both >= LEAST, f"only {both} prompts are on both"
    before = rig.indexer.blocks("model")
    second = rig.daemon.rank(1)
    second.next_life(second.kill_rank())
    rig.settle()
    after = rig.indexer.blocks("model")
    assert after == {where: hashes for where, hashes in before.items() if where[0] == 0}
    rig.drive(20, seed=2)
    rig.settle()
    agree(rig, askable(rig.prompts[-40:], PAGE, rng))


UNTOLD = Prompt(list(range(10 * PAGE)), {"extra_key": "image"})


@pytest.mark.parametrize(
    ("events", "names"),
    [
        ({"extra_key_as": "lora_name"}, {"lora": "image"}),
        ({"extra_key_as": "cache_salt"}, {"cache_salt": "image"}),
        ({"extra_key_as": "cache_salt", "cache_salt": "hashed"}, {"cache_salt": sha256(b"image").hexdigest()}),
    ],
)
def test_an_extra_key_is_known_by_the_field_that_stands_for_it(
    events: dict[str, str], names: Names, tmp_path: Path, shim: Path, opened: ExitStack
) -> None:
    rig = Rig(tmp_path, shim, opened, events=events)
    with rig.daemon.client() as client:
        commit(client, UNTOLD)
    assert eventually(lambda: [rig.ask(Prompt(UNTOLD.tokens, names))] == rig.peek([UNTOLD]), HEARD_S)
    assert rig.ask(UNTOLD._replace(names=PLAIN)) == NOTHING


def test_what_routers_can_not_name_is_not_told(tmp_path: Path, shim: Path, opened: ExitStack) -> None:
    """A namespace with an extra_key: to a router its blocks would be those of the namespace without."""
    rig = Rig(tmp_path, shim, opened)
    told = Prompt(UNTOLD.tokens, PLAIN)
    with rig.daemon.client() as client:
        commit(client, UNTOLD)
        commit(client, Prompt(told.tokens[: 4 * PAGE], told.names))
    assert rig.daemon.settle()["counters"]["unpublished_pages"] > 0
    assert eventually(lambda: rig.ask(told) == answer({0: Overlap(4 * PAGE, 4 * PAGE)}), HEARD_S)


def test_a_hashed_salt_is_asked_for_by_its_hash(tmp_path: Path, shim: Path, opened: ExitStack) -> None:
    rig = Rig(tmp_path, shim, opened, events={"cache_salt": "hashed"})
    salted = Prompt(UNTOLD.tokens, {"cache_salt": "tenant"})
    with rig.daemon.client() as client:
        commit(client, salted)
    hashed = Prompt(salted.tokens, {"cache_salt": sha256(b"tenant").hexdigest()})
    assert eventually(lambda: [rig.ask(hashed)] == rig.peek([salted]), HEARD_S)
    assert rig.ask(salted) == NOTHING


def test_blocks_without_tokens_are_none_to_it(tmp_path: Path, shim: Path, opened: ExitStack) -> None:
    """It names blocks by what they hold: a daemon that withholds that is one with an empty cache."""
    rig = Rig(tmp_path, shim, opened, events={"token_ids": "none"})
    rig.drive(10, seed=1)
    last = rig.daemon.settle()["stream"]["last_seq"]
    assert rig.mirror.catch_up(last, HEARD_S)
    assert rig.mirror.hashes(Tier.DEVICE) == rig.blocks()[0, "DEVICE"] != set()
    assert rig.indexer.blocks("model") == {}
    assert "Failed to decode" not in rig.indexer.said()


# Dynamo's own functions, in its own Python: the hashes of prompts, and a tree that is fed events.
HASH_PROGRAM = """
import json, sys
from dynamo.llm import compute_block_hash_for_seq
for line in sys.stdin:
    tokens, size, lora, salt = json.loads(line)
    print(json.dumps(compute_block_hash_for_seq(tokens, size, lora_name=lora, cache_namespace=salt)))
"""
TREE_PROGRAM = """
import json, sys
from dynamo.llm import RadixTree, compute_block_hash_for_seq
tree = RadixTree()
job = json.load(sys.stdin)
for number, event in enumerate(job["events"]):
    if "stored" in event:
        for block in event["stored"]["blocks"]:
            tokens, size, lora, salt = block.pop("of")
            (block["tokens_hash"],) = compute_block_hash_for_seq(tokens, size, lora_name=lora, cache_namespace=salt)
    tree.apply_event(1, json.dumps({"event_id": number, "data": event, "dp_rank": 0}).encode())
for tokens, size, lora, salt in job["asked"]:
    hashes = compute_block_hash_for_seq(tokens, size, lora_name=lora, cache_namespace=salt)
    print(json.dumps(sum(tree.find_matches(hashes).scores.values())))
"""


def dynamo(program: str, text: str) -> list[Any]:
    """Run it in the consumers' Python: what it printed, a JSON value a line."""
    done = subprocess.run([PYTHON, "-c", program], input=text, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def question(prompt: Prompt) -> list[Any]:
    return [prompt.tokens, PAGE, prompt.names.get("lora"), prompt.names.get("cache_salt")]


@pytest.mark.parametrize("block_hash", ["xxh3_128", "sha256"])
def test_a_router_that_hashes_prompts_itself_finds_the_same(
    block_hash: str, tmp_path: Path, shim: Path, opened: ExitStack
) -> None:
    """What the stream names blocks by is of no matter to it."""
    rig = Rig(tmp_path, shim, opened, events={"hash": block_hash})
    rig.drive(40, seed=1)
    rig.settle()
    asked = askable(rig.prompts, PAGE, random.Random(0))
    hashes = dynamo(HASH_PROGRAM, "".join(f"{json.dumps(question(prompt))}\n" for prompt in asked))
    cases = Counter[str]()
    for by_index, chain in zip(rig.peek(asked), hashes, strict=True):
        found = rig.indexer.query_by_hash("model", [signed(each) for each in chain], instance=INSTANCE)
        assert found == by_index
        cases[case_of(found[0])] += 1
    assert all(cases[case] >= LEAST for case in CASES), cases


def test_dynamos_radix_tree_takes_the_stream_as_it_comes(tmp_path: Path, shim: Path, opened: ExitStack) -> None:
    """Its tree knows one tier: it is fed the device's facts, in the order of the stream."""
    rig = Rig(tmp_path, shim, opened)
    facts: list[Any] = []
    rig.drive(60, seed=1)
    last = rig.daemon.settle()["stream"]["last_seq"]
    while rig.mirror.state.next_seq is None or rig.mirror.state.next_seq <= last:
        facts += [fact.event for fact in rig.mirror.step(HEARD_S)]
    events: list[dict[str, Any]] = []
    for event in facts:
        if isinstance(event, AllBlocksCleared):
            events.append({"cleared": None})
        elif event.medium == Tier.DEVICE.medium and isinstance(event, BlockRemoved):
            events.append({"removed": {"block_hashes": [each % (1 << 64) for each in event.block_hashes]}})
        elif event.medium == Tier.DEVICE.medium:
            pages = [list(event.token_ids[at : at + PAGE]) for at in range(0, len(event.token_ids), PAGE)]
            blocks = [
                {"block_hash": each % (1 << 64), "of": [page, PAGE, event.lora_name, event.cache_salt]}
                for each, page in zip(event.block_hashes, pages, strict=True)
            ]
            parent = event.parent_block_hash
            stored = {"parent_hash": None if parent is None else parent % (1 << 64), "blocks": blocks}
            events.append({"stored": stored})
    kinds = Counter(key for event in events for key in event)
    assert kinds["stored"] > LEAST
    assert kinds["removed"] > LEAST
    asked = askable(rig.prompts, PAGE, random.Random(0))
    job = {"events": events, "asked": [question(prompt) for prompt in asked]}
    matched = dynamo(TREE_PROGRAM, json.dumps(job))
    assert [blocks * PAGE for blocks in matched] == [found.device for found, _ in rig.peek(asked)]
