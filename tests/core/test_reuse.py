"""Distances are those of the line of pages, and a cache of that size hits what they say: the law of `core/reuse.py`."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglcache.bench.index import Driver
from sglcache.core.forecast import Sizes, forecast, rates, reach
from sglcache.core.index import Index, IndexConfig
from sglcache.core.key import ROOT, Keys, Namespace
from sglcache.core.reuse import NEVER, Curve, Reuse, Run
from sglcache.core.tiering import WritePolicy

PAGE = 4
EXACT = 62  # bits: every distance has a bucket of its own


def packed(tokens: list[int]) -> bytes:
    return np.array(tokens, "<u4").tobytes()


def exact(max_pages: int = 1 << 14, bigram: bool = False, sample: int = 1, page: int = PAGE) -> Reuse:
    return Reuse(Keys(page, bigram), sample, max_pages, 1e9, bits=EXACT)


class Text:
    """A lease's tokens, as `Lease.since` tells them."""

    def __init__(self, tokens: bytes) -> None:
        self.tokens = tokens

    def since(self, start: int) -> bytes:
        return self.tokens[start:]


def serve(reuse: Reuse, tokens: bytes, said: bytes = b"", now: float = 0.0, namespace: Namespace = ROOT) -> Run:
    """A request from its acquire to its last commit."""
    run = reuse.asked(tokens, namespace, 0, 0, now)
    whole = tokens + said
    reuse.committed(run, reuse.keys.whole(len(tokens)), Text(tokens).since, now)
    reuse.committed(run, reuse.keys.whole(len(whole)), Text(whole).since, now)
    return run


class Stack:
    """All pages, the last used first, by their names: what the law says, in a list."""

    def __init__(self, keys: Keys, max_pages: int = 1 << 30) -> None:
        self.keys = keys
        self.line: list[bytes] = []
        self.max_pages = max_pages
        self.distances: list[int | None] = []

    def pages(self, tokens: bytes) -> list[bytes]:
        keys = self.keys
        return [
            tokens[: end + keys.over] for end in range(keys.page_bytes, keys.whole(len(tokens)) + 1, keys.page_bytes)
        ]

    def serve(self, tokens: bytes, said: bytes = b"") -> None:
        asked = self.pages(tokens)
        for page in asked:
            self.distances.append(self.line.index(page) + 1 if page in self.line else None)
        pages = self.pages(tokens + said)
        self.line = [*pages, *(page for page in self.line if page not in set(pages))][: self.max_pages]


prompts = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=24), st.lists(st.integers(0, 1), max_size=9)),
    min_size=1,
    max_size=24,
)


def told(curve: Curve) -> dict[int, int]:
    return {int(most): looks for _, most, looks, _ in curve.counts}


@given(prompts, st.booleans())
@settings(max_examples=60, deadline=None)
def test_distances_are_those_of_the_line(requests: list[tuple[list[int], list[int]]], bigram: bool) -> None:
    reuse = exact(bigram=bigram)
    stack = Stack(reuse.keys)
    for asked, said in requests:
        serve(reuse, packed(asked), packed(said))
        stack.serve(packed(asked), packed(said))
    curve = reuse.curve(0.0)
    wanted = [distance for distance in stack.distances if distance is not None]
    assert told(curve) == {distance: wanted.count(distance) for distance in wanted}
    assert curve.looks == len(stack.distances) == curve.expected
    assert curve.cold == stack.distances.count(None)


@given(prompts, st.integers(1, 12))
@settings(max_examples=50, deadline=None)
def test_what_is_followed_is_bounded_and_is_the_newest(
    requests: list[tuple[list[int], list[int]]], max_pages: int
) -> None:
    reuse = exact(max_pages)
    stack = Stack(reuse.keys, max_pages)
    for asked, said in requests:
        serve(reuse, packed(asked), packed(said))
        stack.serve(packed(asked), packed(said))
        assert reuse.tracked == len(stack.line) <= max_pages
    wanted = [distance for distance in stack.distances if distance is not None]
    assert told(reuse.curve(0.0)) == {distance: wanted.count(distance) for distance in wanted}


class Lru:
    """A cache of so many pages that is closed under the page before, and lets the least recently used go."""

    def __init__(self, keys: Keys, capacity: int) -> None:
        self.stack = Stack(keys)
        self.capacity = capacity
        self.kept: OrderedDict[bytes, None] = OrderedDict()  # the oldest first
        self.hits = self.asked = 0

    def serve(self, tokens: bytes) -> None:
        pages = self.stack.pages(tokens)
        self.asked += len(pages)
        for page in pages:
            if page not in self.kept:
                break
            self.hits += 1
        for page in reversed(pages):  # a prompt's last page goes before its first
            self.kept.pop(page, None)
            self.kept[page] = None
        while len(self.kept) > self.capacity:
            self.kept.popitem(last=False)


@given(prompts, st.integers(1, 30))
@settings(max_examples=50, deadline=None)
def test_a_cache_of_that_size_hits_what_the_curve_says(
    requests: list[tuple[list[int], list[int]]], capacity: int
) -> None:
    reuse = exact()
    cache = Lru(reuse.keys, capacity)
    num_tokens = 0
    for asked, _ in requests:
        serve(reuse, packed(asked))
        cache.serve(packed(asked))
        num_tokens += len(asked)
    assert reuse.curve(0.0).hit_rate(capacity) * num_tokens == pytest.approx(cache.hits * PAGE)


def test_chunks_of_a_prompt_stand_where_its_acquire_does() -> None:
    """Another request comes between two commits; the prompt's pages are in one place, and its end before its begin."""
    reuse = exact()
    first, other = packed(list(range(16))), packed(list(range(100, 108)))
    run = reuse.asked(first, ROOT, 0, 0, 0.0)
    reuse.committed(run, 2 * PAGE * 4, Text(first).since, 0.0)
    serve(reuse, other)
    reuse.committed(run, 4 * PAGE * 4, Text(first).since, 0.0)
    serve(reuse, first)
    assert told(reuse.curve(0.0)) == {3: 1, 4: 1, 5: 1, 6: 1}  # behind the two of the other


def test_a_page_is_there_from_its_commit_on() -> None:
    reuse = exact()
    tokens = packed(list(range(8)))
    runs = [reuse.asked(tokens, ROOT, 0, 0, 0.0) for _ in range(2)]
    assert reuse.curve(0.0).cold == 4, "two compute it, and neither finds it"
    assert reuse.tracked == 0
    for run in runs:
        reuse.committed(run, 32, Text(tokens).since, 0.0)
    assert reuse.tracked == 2, "both have brought the same"
    serve(reuse, tokens)
    assert told(reuse.curve(0.0)) == {1: 1, 2: 1}


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    reuse = exact()
    asked, said, more = packed(list(range(6))), packed(list(range(50, 60))), packed([7] * 4)
    serve(reuse, asked, said)
    serve(reuse, asked + said + more)
    curve = reuse.curve(0.0)
    assert told(curve) == {1: 1, 2: 1, 3: 1, 4: 1}
    assert curve.cold == 2  # the first prompt's page, and the second's last


def test_decoding_step_by_step_is_the_same_as_at_once() -> None:
    keys, said = Keys(16), packed(list(np.random.default_rng(5).integers(0, 1000, 4000)))
    asked = packed(list(range(1000, 1100)))
    names: list[set[int]] = []
    for steps in (1, 7, 250):
        reuse = Reuse(keys, 16, 1 << 12, 1e9)
        run = reuse.asked(asked, ROOT, 0, 0, 0.0)
        for step in range(1, steps + 1):
            text = asked + said[: len(said) * step // steps // 4 * 4]
            reuse.committed(run, keys.whole(len(text)), Text(text).since, 0.0)
        names.append(set(reuse._touch_of))
        again = reuse.asked(asked + said, ROOT, 0, 0, 0.0)
        assert not again.wait, "whoever has it as a prompt finds all of it"
    assert len(names[0]) > 8
    assert names[0] == names[1] == names[2]


def test_a_lease_whose_text_is_gone_is_followed_no_more() -> None:
    reuse = exact()
    run = serve(reuse, packed([1] * 4))
    reuse.committed(run, 64, lambda start: None, 0.0)
    assert run.at == NEVER
    reuse.committed(run, 128, Text(packed([1] * 32)).since, 0.0)
    assert reuse.tracked == 1


def test_namespaces_share_nothing_and_a_clear_empties() -> None:
    reuse = exact()
    tokens = packed([1] * 8)
    for namespace in (ROOT, Namespace(lora="a"), Namespace(cache_salt="a"), Namespace(extra_key="")):
        serve(reuse, tokens, namespace=namespace)
    assert reuse.curve(0.0).cold == 8
    late = reuse.asked(tokens + tokens, ROOT, 0, 0, 0.0)
    reuse.clear()
    assert reuse.tracked == 0
    serve(reuse, tokens)
    assert reuse.curve(0.0).cold == 12
    reuse.committed(late, 64, Text(tokens + tokens).since, 0.0)
    assert reuse.tracked == 4


@pytest.mark.parametrize("page", [1, 4, 16, 64, 100, 256])
@pytest.mark.parametrize("bigram", [False, True])
def test_who_shares_a_prefix_agrees_which_of_its_pages_are_followed(page: int, bigram: bool) -> None:
    made = np.random.default_rng(1)
    prefix = made.integers(0, 1 << 17, 40_000, dtype=np.uint32).tobytes()
    keys = Keys(page, bigram)
    seen: list[dict[int, int]] = []
    for i in range(3):
        reuse = Reuse(keys, max(1, 2048 // page), 1 << 14, 1e9)
        rest = made.integers(0, 1 << 17, 3_000 * i + page, dtype=np.uint32).tobytes()
        run = reuse.asked(prefix + rest, ROOT, 0, 0, 0.0)
        seen.append({end: name for end, name in run.wait if end <= len(prefix)})
        assert all((end - keys.over) % keys.page_bytes == 0 for end, _ in run.wait)
    assert seen[0] == seen[1] == seen[2]
    assert 5 < len(seen[0]) < 60, "about 20 were to be followed"


def test_about_one_page_in_so_many_is_followed() -> None:
    made = np.random.default_rng(2)
    for page, sample in ((1, 512), (16, 128), (64, 64), (64, 100_000)):
        reuse = Reuse(Keys(page), sample, 1 << 16, 1e9)
        assert reuse.weight == pytest.approx(sample, rel=0.3) or reuse.weight == 512
        for _ in range(40):
            reuse.asked(made.integers(0, 1 << 17, 30_000, dtype=np.uint32).tobytes(), ROOT, 0, 0, 0.0)
        curve = reuse.curve(0.0)
        assert curve.expected * reuse.weight == pytest.approx(curve.pages, rel=0.02)
        assert curve.looks == pytest.approx(curve.expected, rel=0.25)


class Traffic(NamedTuple):
    """Requests of a seeded world: conversations that go on, over few system prompts, some far more so than others."""

    requests: int
    seed: int

    def __iter__(self) -> Iterator[bytes]:
        draw, made = random.Random(self.seed), np.random.default_rng(self.seed)

        def tokens(count: int) -> bytes:
            return made.integers(0, 1 << 17, count, dtype=np.uint32).tobytes()

        systems = [tokens(draw.randrange(64, 2000)) for _ in range(12)]
        open_ones: list[bytes] = []
        for _ in range(self.requests):
            if not open_ones or draw.random() < 0.4:
                open_ones.append(systems[min(int(draw.paretovariate(0.9)) - 1, 11)])
            # Who spoke lately speaks again; some come back after long.
            at = max(0, len(open_ones) - int(draw.paretovariate(0.6)))
            text = open_ones.pop(at) + tokens(draw.randrange(32, 1500))
            yield text
            open_ones.append(text)
            if len(open_ones) > 400:
                open_ones.pop(draw.randrange(100))


def test_a_sample_tells_what_all_pages_would() -> None:
    keys = Keys(16)
    whole, some = Reuse(keys, 1, 1 << 20, 1e9), Reuse(keys, 32, 1 << 14, 1e9)
    for tokens in Traffic(1500, 3):
        serve(whole, tokens)
        serve(some, tokens)
    truth, guess = whole.curve(0.0), some.curve(0.0)
    assert guess.tracked * 20 < truth.tracked
    for pages in (1000, 4000, 16_000, 64_000):
        assert guess.hit_rate(pages) == pytest.approx(truth.hit_rate(pages), abs=0.03)
    assert guess.ceiling == pytest.approx(truth.ceiling, abs=0.03)
    assert 0.2 < truth.hit_rate(1000) < truth.hit_rate(16_000) - 0.1, "or it would say nothing"


def simulate(config: IndexConfig, requests: Traffic) -> tuple[float, float]:
    """Shares of the tokens that an index finds, in any tier and on the device."""
    index = Index(config)
    driver = Driver(index)
    for tokens in requests:
        grant = driver.acquire(tokens)
        driver.commit_whole(grant.lease)
        driver.release(grant.lease)
        driver.effects.clear()
    counters = index.counters
    found = counters["matched_tokens"] / counters["request_tokens"]
    return found, found - counters["host_matched_tokens"] / counters["request_tokens"]


@pytest.mark.parametrize(
    ("policy", "device", "host"),
    [
        ("write_through", 1500, 0),
        ("write_through", 1500, 4500),
        ("write_through", 3000, 1500),
        ("write_back", 1500, 4500),
        ("write_back", 3000, 1500),
    ],
)
def test_the_index_hits_what_was_forecast(policy: str, device: int, host: int) -> None:
    traffic = Traffic(700, 7)
    reuse = exact(1 << 20, page=16)
    for tokens in traffic:
        serve(reuse, tokens)
    curve = reuse.curve(0.0)
    config = IndexConfig(16, device, host, events=False, write_policy=WritePolicy(policy))
    found, on_device = simulate(config, traffic)
    sizes = Sizes(device, 1, host, 1, write_policy=policy)
    told = rates(curve, sizes)
    assert told.device == pytest.approx(on_device, abs=0.015)
    assert told.all == pytest.approx(found, abs=0.015)
    if policy == "write_through":
        assert reach(curve, sizes) == max(device, host)
    else:
        assert max(device, host) < reach(curve, sizes) < device + host


def test_the_window_moves_on() -> None:
    reuse = Reuse(Keys(PAGE), 1, 64, 800.0, now=1000.0)
    tokens = packed([3] * 4)
    for now in range(1000, 2000, 10):
        serve(reuse, tokens, now=float(now))
    curve = reuse.curve(2000.0)
    assert curve.seconds == 700.0
    assert curve.requests == 70
    assert reuse.curve(2799.0).requests == 0
    assert reuse.curve(99_999.0).requests == 0
    serve(reuse, tokens, now=100_000.0)
    assert reuse.curve(100_000.0).requests == 1
    assert told(reuse.curve(100_000.0)) == {1: 1}, "what was used long ago is known still"


def test_gaps_are_seconds_since_the_last_use() -> None:
    reuse = exact()
    for now in (0.0, 0.5, 4.0, 100_000.0):
        serve(reuse, packed([3] * 8), now=now)
    bounds, counts, total = reuse.gaps.observed()
    seen = {most: count for most, count in zip((*bounds, None), counts, strict=True) if count}
    assert seen == {1.0: 2, 10.0: 2, 100_000.0: 2}
    assert total == pytest.approx(2 * 100_000)


def test_touches_go_round_the_ring() -> None:
    """More touches than there are places: what was used so long ago is forgotten, all else is told right."""
    reuse, stack = exact(16), Stack(Keys(PAGE))
    once = packed([9] * 4)
    serve(reuse, once)
    for i in range(500):
        serve(reuse, packed([i % 3] * 8))
        stack.serve(packed([i % 3] * 8))
    assert reuse.tracked == 6
    assert reuse.forgotten == 1
    wanted = [distance for distance in stack.distances if distance is not None]
    assert told(reuse.curve(0.0)) == {distance: wanted.count(distance) for distance in wanted}


def curve_of(*counts: tuple[float, float, int], cold: int) -> Curve:
    looks = sum(each for _, _, each in counts)
    rising = tuple((*each, sum(other[2] for other in counts[:i])) for i, each in enumerate(counts))
    looks += cold
    return Curve(1.0, 16, 100.0, 50, looks * 16, looks, looks, looks, cold, rising, looks * 8, looks, 10, 1000, 0)


def test_a_verdict_says_which_tier_is_worth_it() -> None:
    gib = 1 << 30
    page = gib // 64  # a GiB is 64 pages
    curve = curve_of((0, 64, 400), (1000, 1500, 300), cold=300)
    told = forecast(curve, Sizes(128, page, 256, page))
    assert told["forecast"] == pytest.approx({"all": 0.4, "device": 0.4})
    assert told["measured"] == pytest.approx({"all": 0.5, "device": 0.4375, "host": 0.0625})
    assert told["hit_rate"] == pytest.approx(0.5), "what was found, and on it what more memory adds"
    assert told["ceiling"] == pytest.approx(0.8)
    by = {(row["tier"], row["extra_gib"]): row for row in told["more"]}
    assert by["host", 10]["adds"] == by["device", 10]["adds"] == 0
    assert by["host", 50]["adds"] == pytest.approx(0.3)
    assert by["host", 50]["hit_rate"] == pytest.approx(0.8)
    assert by["host", 50]["device_hit_rate"] == pytest.approx(0.4375)
    assert by["host", 50]["adds_tokens_per_s"] == pytest.approx(0.3 * 160)
    assert told["verdict"] == (
        "50 GiB more device memory would add 30.0 points (50.0 % to 80.0 %); 50 GiB more host memory would add 30.0 "
        "points (50.0 % to 80.0 %); the ceiling is 80.0 %"
    )
    assert forecast(curve, Sizes(128, page, 2000, page), real=False)["verdict"] == (
        "50 GiB more device memory would add no hit, but 30.0 points of them would need no copy from below; more host "
        "memory none; the ceiling is 70.0 %"
    )
    assert "nothing worth it: the hit rate is 50.0 %" in forecast(curve, Sizes(2000, page))["verdict"]
    few = curve_of((0, 64, 40), cold=30)
    assert "too little was seen" in forecast(few, Sizes(128, page))["verdict"]
    nothing = forecast(Reuse(Keys(16), 64, 100, 60.0).curve(0.0), Sizes(128, page, 10, page, write_policy="write_back"))
    assert nothing["hit_rate"] == nothing["ceiling"] == 0.0
    assert nothing["measured"] is None


def check_books(reuse: Reuse) -> None:
    """Each followed page stands at one touch, and every sum over them is right."""
    line, by_place = reuse._line, [0] * reuse._line.size
    for touch in reuse._touch_of.values():
        assert 0 <= line.head - touch < line.size
        by_place[touch % line.size] += 1
    assert line.low == by_place
    assert sum(line.mid) == sum(line.top) == line.total == reuse.tracked <= reuse.max_pages
    assert line.upto == sum(line.low[: line.head % line.size + 1])


@pytest.mark.parametrize("seed", range(12))
def test_the_books_hold_whatever_comes_in_whatever_order(seed: int) -> None:
    """Leases side by side, commits in pieces and late, texts that are gone, clears, a ring that is too small."""
    draw = random.Random(seed)
    keys = Keys(draw.choice((1, 4)), draw.random() < 0.3)
    reuse = Reuse(keys, draw.choice((1, 2, 3, 8)), draw.choice((4, 10, 40)), 100.0, bits=draw.choice((2, EXACT)))
    live: list[tuple[Run, list[int]]] = []
    now = 0.0
    for step in range(300):
        now += draw.random() * 5
        what = draw.random()
        if what < 0.5 or not live:
            tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 60))]
            run = reuse.asked(packed(tokens), draw.choice((ROOT, Namespace("a"))), 0, 0, now)
            live.append((run, tokens))
        elif what < 0.85:
            run, tokens = draw.choice(live)
            tokens += [draw.randrange(2) for _ in range(draw.randrange(30))]
            text = Text(packed(tokens))
            since = text.since if draw.random() < 0.95 else lambda start: None
            reuse.committed(run, draw.randrange(0, keys.whole(len(text.tokens)) + 1, keys.page_bytes), since, now)
        elif what < 0.97:
            live.remove(draw.choice(live))
        elif what < 0.98:
            reuse.clear()
        else:
            reuse.curve(now)
        if step % 20 == 0:
            check_books(reuse)
    check_books(reuse)
