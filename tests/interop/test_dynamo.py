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
from consumers import PYTHON, Overlap, eventually, signed
from indexed import (
    CASES,
    HEARD_S,
    INSTANCE,
    KINDS,
    LEAST,
    NOTHING,
    PAGE,
    Rig,
    agree,
    answer,
    case_of,
    one_block_less_is_noticed,
)
from scene import PLAIN, Names, Prompt, askable, commit

from sglcache.units import Tier
from sglcache.wire.events import AllBlocksCleared, BlockRemoved

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(
    ("encoding", "token_ids"), [("map", "clear"), ("array", "clear"), ("superset", "clear"), ("map", "fixed")]
)
def test_the_indexer_equals_the_index(
    encoding: str, token_ids: str, tmp_path: Path, shim: Path, opened: ExitStack
) -> None:
    rig = Rig(tmp_path, shim, opened, events={"encoding": encoding, "token_ids": token_ids})
    rng = random.Random(0)
    cases: Counter[tuple[str, str]] = Counter()
    if (encoding, token_ids) == ("map", "clear"):  # once is enough: its processes load torch
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
    """Two replicas with prompts in common, under one instance; one is killed, and what it had on the host stays."""
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
    assert any(where == (1, "HOST") for where in before)
    assert after == {where: hashes for where, hashes in before.items() if where != (1, "DEVICE")}
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
    assert eventually(lambda: rig.ask(told) == answer({0: Overlap(4 * PAGE, 4 * PAGE, 4 * PAGE)}), HEARD_S)


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
