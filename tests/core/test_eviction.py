"""Who goes first: each policy by its key, per tier, whatever was split, joined, locked or copied meanwhile."""

from __future__ import annotations

import gc
import heapq
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from sglcache.core import eviction, invariants
from sglcache.core.effects import Grant, Wake
from sglcache.core.eviction import POLICIES, Policy, Ranked
from sglcache.core.index import DEVICE, Index, IndexConfig
from sglcache.core.tree import Node
from sglcache.errors import ConfigError, NoSpace
from sglcache.testing.model import LeaseModel
from sglcache.testing.programs import SeededChooser, policy, run
from sglcache.testing.rig import Rig, Runner, pack
from sglcache.units import Tier

RANKED = tuple(name for name in POLICIES if name != "lru")


def rig(name: str = "lru", host: str = "lru", **config: Any) -> tuple[Rig, Runner]:
    options = {key: config.pop(key) for key in list(config) if key in Policy.__dataclass_fields__}
    made = Rig(
        **{
            "page_size": 4,
            "num_pages": 32,
            "eviction": Policy(name, **options),
            "host_eviction": Policy(host, **options),
            **config,
        }
    )
    return made, made.open_session()


def acquire(r: Rig, runner: Runner, tokens: Sequence[int], priority: int = 0) -> LeaseModel:
    lease = r.acquire(runner, tokens, priority=priority)
    assert isinstance(lease, LeaseModel), repr(lease)
    return lease


def put(r: Rig, runner: Runner, tokens: Sequence[int], priority: int = 0) -> None:
    """A whole request."""
    lease = acquire(r, runner, tokens, priority)
    r.commit(runner, lease)
    r.copies_done()
    r.release(runner, lease)


def evict(r: Rig, runner: Runner, num_pages: int) -> None:
    lease = acquire(r, runner, [4_000_000_000] * (r.model.num_free(DEVICE) + num_pages) * r.page_size)
    r.cancel(runner, lease)


def gone(r: Rig, medium: str = "GPU") -> list[int]:
    """The first token of each page that the stream has removed, in order."""
    r.cut()
    events = [e for e in r.subscriber.events if e["type"] == "BlockRemoved" and e["medium"] == medium]
    pages = [r.book.by_hash[h] for e in events for h in e["block_hashes"]]
    return [int.from_bytes(page.tokens[:4], "little") for page in pages]


def runs(*firsts: int) -> list[int]:
    """A page of each token."""
    return [first for first in firsts for _ in range(4)]


A, B, C, D = (runs(n) for n in (1, 2, 3, 4))

# Requests, and what goes first of all that is cached. Priorities stand behind a colon.
ORDERS: dict[str, tuple[dict[str, Any], str, list[int]]] = {
    "lru": ({}, "1 2 3 1", [2, 3, 1]),
    "lfu": ({}, "1 1 2 2 2 3 4 4", [3, 1, 4, 2]),
    "lfu, of equal counts the least recently used": ({}, "1 2 1 2 3 1 3 2", [3, 1, 2]),
    "fifo": ({}, "1 2 3 1 2 1", [1, 2, 3]),
    "mru": ({}, "1 2 3 1", [1, 3, 2]),
    "filo": ({}, "1 2 3 1 2 1", [3, 2, 1]),
    "priority": ({}, "1:2 2:0 3:1 4:0", [2, 4, 3, 1]),
    "priority, the highest that ever was": ({}, "1:2 2:1 1:0", [2, 1]),
    "priority, below none": ({}, "1:0 2:-1 3:0", [2, 1, 3]),
    "slru": ({}, "1 1 2 3 2 4", [3, 4, 1, 2]),
    "slru, of three hits": ({"protected_threshold": 3}, "1 1 2 2 2 3", [1, 3, 2]),
    "slru, all protected": ({"protected_threshold": 1}, "2 1 3", [2, 1, 3]),
    "tlru, as lru": ({}, "1 2 3 1", [2, 3, 1]),
}


@pytest.mark.parametrize("name", ORDERS)
def test_each_policy_has_its_order(name: str) -> None:
    options, requests, order = ORDERS[name]
    r, runner = rig(name.split(",")[0], **options)
    for request in requests.split():
        first, _, priority = request.partition(":")
        put(r, runner, runs(int(first)), int(priority or 0))
    for count in range(1, len(order) + 1):
        evict(r, runner, 1)
        assert gone(r) == order[:count]


def test_tlru_takes_what_is_beyond_the_next_prompt() -> None:
    """A tail that begins as deep as the branch ever was, less the threshold, goes before what is older."""
    r, runner = rig("tlru", threshold=4)
    put(r, runner, D + D)
    put(r, runner, A)
    put(r, runner, A + B + C)  # three pages of history: a node that begins at two of them is beyond
    put(r, runner, A + B)  # C is a node now, and begins at 8 of 12 tokens
    evict(r, runner, 1)
    assert gone(r) == [3]
    evict(r, runner, 1)  # the history stays: what is left of the branch begins before
    assert gone(r) == [3, 4, 4]


def test_tlru_takes_first_what_is_short_enough_to_be_computed_anew() -> None:
    r, runner = rig("tlru", threshold=4)
    put(r, runner, D + D)
    put(r, runner, A)
    evict(r, runner, 1)
    assert gone(r) == [1]


def test_an_estimate_of_the_next_prompt_protects_more() -> None:
    r, runner = rig("tlru", threshold=4, next_prompt_estimate=4)
    put(r, runner, D)
    put(r, runner, A + B + C)
    put(r, runner, A + B)
    evict(r, runner, 1)
    assert gone(r) == [4]


def test_a_request_is_one_hit_of_a_page_however_often_it_commits() -> None:
    r, runner = rig("lfu")
    for _ in range(2):
        put(r, runner, B)
    lease = acquire(r, runner, A + C)
    for tokens in (4, 4, 8):
        r.commit(runner, lease, tokens)
    r.release(runner, lease)
    evict(r, runner, 2)
    assert sorted(gone(r)) == [1, 3]


def test_a_match_without_a_commit_is_a_hit_and_a_cancelled_one_is_none() -> None:
    r, runner = rig("lfu")
    for tokens in (A, B, C):
        put(r, runner, tokens)
    r.release(runner, acquire(r, runner, A))
    for _ in range(3):
        r.cancel(runner, acquire(r, runner, B))
    hold = acquire(r, runner, runs(*range(100, 129)))
    assert isinstance(r.acquire(runner, [*C, *runs(*range(200, 230))]), NoSpace)
    r.release(runner, hold, discard=True)
    evict(r, runner, 2)
    assert gone(r) == [3, 2], "B is as often used as C, and later"


def test_a_page_that_comes_back_is_new() -> None:
    r, runner = rig("fifo", num_pages=4)
    put(r, runner, A)
    put(r, runner, B)
    evict(r, runner, 1)
    put(r, runner, A)
    evict(r, runner, 1)
    assert gone(r) == [1, 2]


@pytest.mark.parametrize("name", ["fifo", "filo", "lfu", "mru"])
def test_a_split_makes_no_page_younger(name: str) -> None:
    r, runner = rig(name)
    put(r, runner, A + B)
    put(r, runner, D)
    lease = acquire(r, runner, A + C)  # splits the first node, and uses its upper half
    r.cancel(runner, lease)
    assert r.index.stats().num_nodes == 3
    evict(r, runner, 3)
    assert gone(r) == {"fifo": [2, 1, 4], "filo": [4, 2, 1], "lfu": [2, 4, 1], "mru": [4, 2, 1]}[name]


def joined(r: Rig) -> int:
    """How many nodes there are once all that can be joined is."""
    for node in list(r.index.tree.nodes()):
        if node.children is None:
            r.index.tree.merge(node)
    r.cut()
    return r.index.stats().num_nodes


@pytest.mark.parametrize("name", POLICIES)
def test_a_chain_that_nobody_can_tell_from_one_node_is_one(name: str) -> None:
    r, runner = rig(name)
    put(r, runner, A + B)
    r.cut()
    r.cancel(runner, acquire(r, runner, A + C))  # a later access of A alone, and no hit
    assert joined(r) == (2 if name in ("mru", "priority", "slru", "tlru", "lfu") else 1)
    put(r, runner, A + B)
    assert joined(r) == 1
    evict(r, runner, 1)
    assert gone(r) == [1, 2]


@pytest.mark.parametrize("name", POLICIES)
def test_a_part_that_was_used_otherwise_stays_a_node(name: str) -> None:
    r, runner = rig(name)
    put(r, runner, A + B)
    r.cut()
    put(r, runner, A, priority=1)
    put(r, runner, D)
    by_time = name in ("fifo", "filo")  # to which a use is nothing
    assert joined(r) == (2 if by_time or name == "lru" else 3)


def test_tiers_have_policies_of_their_own() -> None:
    r, runner = rig("fifo", "lfu", num_pages=3, host_pages=3)
    for tokens in (A, B, A, A, C, D):
        put(r, runner, tokens)
    assert gone(r) == [1], "the first that came, though it is used most"
    assert gone(r, "CPU_PINNED") == [2], "the least used, though others came before"


def test_what_a_request_did_counts_in_a_tier_that_it_does_not_lock() -> None:
    """Its pages reached the host while it went on, so nothing of it locks them there when it ends."""
    r, runner = rig("lru", "lfu", num_pages=32, host_pages=3)
    put(r, runner, B)
    put(r, runner, B)
    lease = acquire(r, runner, A)
    r.commit(runner, lease)
    r.copies_done()
    other = acquire(r, runner, A)
    third = acquire(r, runner, A)
    for each in (other, third, lease):
        r.release(runner, each)
    put(r, runner, C)
    put(r, runner, D)  # the host is full
    put(r, runner, runs(5))
    assert gone(r, "CPU_PINNED") == [3, 4]


def test_locks_and_children_keep_a_page_whatever_its_key() -> None:
    r, runner = rig("fifo", num_pages=8)
    held = acquire(r, runner, A)
    r.commit(runner, held)
    put(r, runner, B)
    put(r, runner, B + C)
    put(r, runner, D)
    evict(r, runner, 1)
    assert gone(r) == [3], "A is locked, B has a child"
    evict(r, runner, 1)
    assert gone(r) == [3, 2]
    r.release(runner, held)
    evict(r, runner, 1)
    assert gone(r) == [3, 2, 1]


@pytest.mark.parametrize("name", POLICIES)
def test_refusals_are_exact(name: str) -> None:
    """Whatever is not locked can be had, and nothing more; of a refusal nothing is changed."""
    r, runner = rig(name, num_pages=16)
    put(r, runner, A + B)
    put(r, runner, A + C)
    put(r, runner, D)
    held = acquire(r, runner, A)
    free = 16 - 1
    assert isinstance(r.acquire(runner, runs(*range(100, 100 + free + 1))), NoSpace)
    assert gone(r) == []
    lease = acquire(r, runner, runs(*range(100, 100 + free)))
    assert sorted(gone(r)) == [2, 3, 4]
    r.release(runner, lease, discard=True)
    r.release(runner, held)
    r.settle()


@pytest.mark.parametrize("name", RANKED)
def test_long_evictions_go_in_slices(name: str) -> None:
    r, runner = rig(name, num_pages=24, evict_slice=9)
    for first in range(24):
        put(r, runner, runs(first))
    assert r.acquire(runner, runs(*range(100, 110))) is None
    assert len(gone(r)) == 3
    r.steps()
    assert len(gone(r)) == 10
    r.settle()


@pytest.mark.parametrize("name", RANKED)
def test_a_tier_is_cleared_in_slices_too(name: str) -> None:
    r, runner = rig(name, name, num_pages=24, host_pages=24, evict_slice=5)
    for first in range(20):
        put(r, runner, runs(first))
    r.settle()
    r.clear(Tier.HOST)
    r.steps()
    assert sorted(gone(r, "CPU_PINNED")) == list(range(20))
    r.clear(Tier.DEVICE)
    r.steps()
    assert r.index.stats().num_nodes == 0


@pytest.mark.parametrize("name", RANKED)
def test_all_is_cleared_at_once_and_taken_apart_in_slices(name: str) -> None:
    r, runner = rig(name, name, num_pages=24, host_pages=24, evict_slice=5)
    for first in range(20):
        put(r, runner, runs(first))
    r.clear()
    put(r, runner, A)  # while the old tree is still being taken apart
    r.steps()
    assert not r.index.busy
    evict(r, runner, 1)
    assert gone(r) == [1]


@pytest.mark.parametrize("name", POLICIES)
def test_equal_programs_evict_alike(name: str) -> None:
    told = []
    for _ in range(2):
        choose = SeededChooser(5)
        r = run(11, steps=200, eviction=policy(choose, 4, name), host_eviction=policy(choose, 4, name), num_pages=10)
        told.append([event for batch in r.subscriber.batches for event in batch])
    assert told[0] == told[1]
    assert any(event["type"] == "BlockRemoved" for event in told[0])


@pytest.mark.parametrize("name", RANKED)
def test_dropped_nodes_leave_nothing_for_the_collector(name: str) -> None:
    r, runner = rig(name, name, num_pages=64, host_pages=16)
    gc.collect()
    gc.disable()
    try:
        for first in range(40):
            put(r, runner, runs(*[first] * 6))
            put(r, runner, runs(*[first] * 2, *[first + 1] * 4))
        r.settle()
        r.clear()
        r.steps()
        r.cut()
        r.index.evictions.clear()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [obj for obj in gc.garbage if isinstance(obj, Node)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not left


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'arc' is unknown; use one of lru, lfu"):
        Policy("arc")


# -- the heap -----------------------------------------------------------------------------------------------------


class Bare:
    """An index without a model beside it, for numbers that a model is too slow for."""

    def __init__(self, name: str, num_pages: int) -> None:
        self.index = Index(IndexConfig(4, num_pages, events=False, eviction=Policy(name)))
        self.session = self.index.open_session()
        self.ticket = 0
        order = self.index.orders[DEVICE]
        assert isinstance(order, Ranked)
        self.order = order

    @property
    def entries(self) -> int:
        return len(self.order.heap) + len(self.order.old)

    def request(self, tokens: bytes) -> None:
        index, session = self.index, self.session
        grant = index.acquire(session, 1, tokens)
        while grant is None:
            index.step()
            grant = next((e.result for e in index.drain() if isinstance(e, Wake)), None)  # type: ignore[assignment]
        assert isinstance(grant, Grant)
        for command in (index.commit, index.release):
            self.ticket += 1
            command(session, 2, grant.lease, self.ticket)
            index.event_done(session, self.ticket)
        index.drain()


@pytest.mark.parametrize("name", RANKED)
def test_stale_entries_are_bounded_and_no_call_pays_for_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand leaves, each used many times: the heap is renewed a little with each push, never at once."""
    bare = Bare(name, 1000)
    pushes = pops = 0

    def push(heap: list[Any], entry: Any) -> None:
        nonlocal pushes
        pushes += 1
        heapq.heappush(heap, entry)

    def pop(heap: list[Any]) -> Any:
        nonlocal pops
        pops += 1
        return heapq.heappop(heap)

    monkeypatch.setattr(eviction, "heappush", push)
    monkeypatch.setattr(eviction, "heappop", pop)
    prompts = [pack(runs(first)) for first in range(1000)]
    most = total = count = 0
    for tokens in prompts * 8:
        pushes = 0
        bare.request(tokens)
        most = max(most, pushes)
        total += pushes
        count += 1
        assert bare.order.queued <= bare.entries <= 3 * bare.order.queued + 2 * eviction.SLACK
    assert most <= 1 + eviction.SWEEP
    assert total < 3 * count, "each entry is moved a bounded number of times"
    assert invariants.check(bare.index) == []
    while bare.order.queued:
        pops = 0
        node = bare.order.victim()
        assert pops <= eviction.DISCARD
        if node is not None:
            bare.index.drop(DEVICE, node)
    assert bare.index.stats().num_nodes == 0


def test_a_heap_full_of_stale_entries_is_thrown_away_in_slices() -> None:
    """Nothing but stale entries stand before the next victim: a slice that ends among them goes on in the next."""
    bare = Bare("lfu", 300)
    object.__setattr__(bare.index.config, "evict_slice", 1)
    for first in range(300):
        bare.request(pack(runs(first)))
    for first in range(1, 151):
        bare.request(pack(runs(first)))  # 150 stale entries of one hit, among 150 that are not
    order = bare.order
    for entry in order.heap:
        if entry[3] is not None and entry[0] == 1 and entry[3].first(4) != pack([0]):
            order.pin(entry[3])  # and the others, which others hold
    session, index = bare.session, bare.index
    assert index.acquire(session, 9, pack(runs(900, 901))) is None
    steps = 1
    while index.step():
        steps += 1
    assert 150 // eviction.DISCARD < steps < 150 // eviction.DISCARD + 50
    assert any(isinstance(e, Wake) and isinstance(e.result, Grant) for e in index.drain())


# -- SGLang's tree, as it is written down ---------------------------------------------------------------------------


class Leaf:
    """A node of it."""

    def __init__(self, parent: Leaf | None, key: tuple[int, ...], now: int) -> None:
        self.parent, self.key = parent, key
        self.children: dict[int, Leaf] = {}
        self.last_access_time = self.creation_time = now
        self.hit_count = self.priority = self.cached_prefix_len = self.history_len = 0


class Radix:
    """RadixCache of one request at a time, page size 1: match, insert, evict; keys as in evict_policy.py.

    Where it cuts a node it makes the upper half new and the lower one used, which follows from nothing that was asked
    for; here a cut leaves both as they were.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.now = 0
        self.root = Leaf(None, (), 0)

    def _split(self, child: Leaf, size: int) -> Leaf:
        upper = Leaf(child.parent, child.key[:size], 0)
        for name in ("last_access_time", "creation_time", "hit_count", "priority", "history_len"):
            setattr(upper, name, getattr(child, name))
        upper.cached_prefix_len = child.cached_prefix_len - len(child.key) + size
        child.key, child.parent, upper.children = child.key[size:], upper, {child.key[size]: child}
        assert upper.parent is not None
        upper.parent.children[upper.key[0]] = upper
        return upper

    def _walk(self, tokens: Sequence[int]) -> tuple[list[Leaf], int]:
        node, at, path = self.root, 0, []
        while at < len(tokens) and (child := node.children.get(tokens[at])) is not None:
            same = 0
            while same < min(len(child.key), len(tokens) - at) and child.key[same] == tokens[at + same]:
                same += 1
            node = child if same == len(child.key) else self._split(child, same)
            path.append(node)
            at += same
            if node is not child:
                break
        return path, at

    def request(self, tokens: Sequence[int], priority: int) -> None:
        self.now += 1
        path, at = self._walk(tokens)
        for node in path:
            node.last_access_time = self.now
            node.hit_count += 1
            node.priority = max(node.priority, priority)
        if at < len(tokens):
            parent = path[-1] if path else self.root
            leaf = parent.children[tokens[at]] = Leaf(parent, tuple(tokens[at:]), self.now)
            leaf.hit_count, leaf.priority = 1, priority
            leaf.cached_prefix_len = leaf.history_len = len(tokens)
            for node in path:
                node.history_len = max(node.history_len, len(tokens))

    def _key(self, node: Leaf) -> tuple[int, ...]:
        access, policy = node.last_access_time, self.policy
        beyond = node.cached_prefix_len - len(node.key) >= max(
            node.history_len + policy.next_prompt_estimate - policy.threshold, 0
        )
        return {
            "lru": (access,),
            "lfu": (node.hit_count, access),
            "fifo": (node.creation_time,),
            "mru": (-access,),
            "filo": (-node.creation_time,),
            "priority": (node.priority, access),
            "slru": (int(node.hit_count >= policy.protected_threshold), access),
            "tlru": (-int(beyond), access),
        }[policy.name]

    def evict_all(self) -> Iterator[int]:
        """The tokens as they go, the last of a node first."""
        nodes = [self.root]
        for node in nodes:
            nodes += node.children.values()
        heap = [(self._key(node), id(node), node) for node in nodes[1:] if not node.children]
        heapq.heapify(heap)
        while heap:
            node = heapq.heappop(heap)[2]
            yield from reversed(node.key)
            parent = node.parent
            assert parent is not None
            del parent.children[node.key[0]]
            if not parent.children and parent.parent is not None:
                heapq.heappush(heap, (self._key(parent), id(parent), parent))


@pytest.mark.parametrize("name", POLICIES)
def test_one_request_after_the_other_everything_goes_as_from_sglangs_tree(name: str) -> None:
    for seed in range(12):
        choose = SeededChooser(seed)
        chosen = policy(choose, 1, name)
        bare = Index(IndexConfig(1, 4096, hash_name="xxh3_128", eviction=chosen))
        session = bare.open_session()
        theirs = Radix(chosen)
        prompts: list[list[int]] = []
        ticket = 0
        for _ in range(60):
            base = choose.item(prompts) if prompts and choose.integer(0, 3) else []
            tokens = base[: choose.integer(0, len(base))] + [choose.integer(0, 2) for _ in range(choose.integer(1, 5))]
            prompts.append(tokens)
            priority = choose.integer(0, 2)
            theirs.request(tokens, priority)
            grant = bare.acquire(session, 1, pack(tokens), priority=priority)
            assert isinstance(grant, Grant)
            for command in (bare.commit, bare.release):
                ticket += 1
                command(session, 1, grant.lease, ticket)
                bare.event_done(session, ticket)
            bare.cut(0.0)
            bare.drain()
        victims: list[Node] = []
        ours: list[int] = []
        while (node := bare.orders[DEVICE].victim()) is not None or bare.pools[DEVICE].evictable:
            if node is not None:
                victims.append(node)
                ours += [int.from_bytes(node.key[at : at + 4], "little") for at in range(0, len(node.key), 4)][::-1]
                bare.drop(DEVICE, node)
        assert ours == list(theirs.evict_all()), f"seed {seed}"


def test_the_worked_trace_of_a_radix_tree() -> None:
    """Page size 2, SGLang's hashes; what it calls match is a request that is given back."""
    a, b, c, d, e = (
        3817746824117602890,
        -4216701448867210342,
        5371148316746243504,
        -1109091013351789073,
        -3911304729569109109,
    )
    r = Rig(page_size=2, num_pages=6, hash_name="sha256")
    runner = r.open_session()

    def told() -> list[tuple[Any, ...]]:
        r.cut()
        names = ("type", "block_hashes", "parent_block_hash", "token_ids", "session_id")
        events = [tuple(event[name] for name in names if name in event) for event in r.subscriber.events[seen[0] :]]
        seen[0] = len(r.subscriber.events)
        return events

    def insert(tokens: Sequence[int], session_id: str | None = None) -> int:
        lease = r.acquire(runner, tokens, session_id=session_id)
        assert isinstance(lease, LeaseModel)
        r.commit(runner, lease)
        r.release(runner, lease)
        return lease.matched * 2

    seen = [0]
    assert told() == [("AllBlocksCleared",)]
    assert insert([1, 2, 3, 4]) == 0
    assert told() == [("BlockStored", [a, b], None, [1, 2, 3, 4])]
    assert insert([1, 2, 3, 4, 5, 6, 7]) == 4
    assert told() == [("BlockStored", [c], b, [5, 6])]
    assert insert([1, 2, 9, 9]) == 2
    assert told() == [("BlockStored", [d], a, [9, 9])]
    lease = acquire(r, runner, [1, 2, 3, 9])
    assert lease.matched * 2 == 2
    r.cancel(runner, lease)
    assert told() == []
    r.cancel(runner, acquire(r, runner, [8] * 6))  # of six pages four are cached
    assert told() == [("BlockRemoved", [c])]
    r.cancel(runner, acquire(r, runner, [8] * 12))
    # SGLang tells of d and a leaf by leaf; here they are one node by then, and told from its start.
    assert told() == [("BlockRemoved", [b, a, d])]
    r.clear()
    assert told() == [("AllBlocksCleared",)]
    insert([1, 2, 3, 4, 5, 6])
    told()
    insert([1, 2, 3, 4, 5, 6, 7, 8], session_id="s1")
    assert told() == [("BlockStored", [e], c, [7, 8], "s1")]
