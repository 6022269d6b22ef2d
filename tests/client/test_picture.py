"""The blocks as the stream tells of them, and matches by tokens: equal to a flat model that knows no trick."""

from __future__ import annotations

import gc
import itertools
import random
import tracemalloc
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglcache.client.hashes import named
from sglcache.client.picture import Block, Digest, Groups, Match, Picture
from sglcache.errors import BadRequest, ConfigError
from sglcache.units import MEDIA, Tier
from sglcache.wire.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, Event, decode_batch, encode_batch

pytestmark = pytest.mark.core
CLEARED = AllBlocksCleared()


def stored(hashes: list[int], tokens: list[Any], parent: int | None = None, medium: str = "GPU", **more: Any) -> Event:
    return BlockStored(hashes, parent, tokens, len(tokens) // len(hashes) or 1, None, medium, **more)


def picture(*events: Event, rank: int = 0) -> Picture:
    made = Picture()
    for event in events:
        made.apply(event, rank)
    return made


# -- groups: windows and states -------------------------------------------------------------------------

WINDOW = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 4}
STATE = {"group_idx": 2, "kv_cache_spec_kind": "mamba"}
FIVE = list(range(10))  # five blocks of two tokens


def followed(*events: Event, groups: Groups) -> Picture:
    made = Picture(groups)
    for event in (stored([1, 2, 3, 4, 5], FIVE), *events):
        made.apply(event, 0)
    return made


def test_another_group_is_no_full_kv_and_takes_none_away() -> None:
    """Here are the removals of a window and of a state, which say nothing of the blocks that matches are made of."""
    plain = picture(stored([1, 2, 3, 4, 5], FIVE))
    for groups in (None, {}):
        held = Picture(groups)
        for event in (
            stored([1, 2, 3, 4, 5], FIVE),
            stored([2, 3], [2, 3, 4, 5], parent=1, **WINDOW),
            stored([9], [7, 7], **STATE),
            BlockRemoved([1, 2], "GPU", 1),
            BlockRemoved([3], "GPU", 2),
        ):
            held.apply(event, 0)
        assert dict(held.blocks("GPU")) == dict(plain.blocks("GPU"))
        assert held.digests() == plain.digests()
        match = held.longest_match(FIVE)[0]
        assert (match.tokens, match.tiers) == (10, {"GPU": 10})
        assert held.group_hashes(1, Tier.DEVICE) == (set() if groups is None else {3})


def test_a_window_is_of_use_where_all_of_it_is_there() -> None:
    window = stored([2, 3], [2, 3, 4, 5], parent=1, **WINDOW)
    assert followed(window, groups={}).longest_match(FIVE)[0] == Match(10, {"GPU": 10}, reusable=6)
    short = stored([1], [0, 1], **WINDOW)  # a prompt that is shorter than the window needs no more
    assert followed(short, groups={}).longest_match(FIVE)[0].reusable == 2
    assert followed(BlockRemoved([3], "GPU", 1), groups={1: 4}).longest_match(FIVE)[0].reusable == 0
    gone = (window, BlockRemoved([2], "GPU", 1))
    assert followed(*gone, groups={}).longest_match(FIVE)[0].reusable == 0
    elsewhere = stored([2], [2, 3], parent=1, medium="CPU_PINNED", **WINDOW)
    held = followed(*gone, elsewhere, groups={})
    assert held.longest_match(FIVE)[0].reusable == 6
    assert held.longest_match(FIVE, tier=Tier.DEVICE)[0].reusable == 0


def test_a_state_is_of_use_behind_its_block_and_every_group_must_agree() -> None:
    states = [stored([each], FIVE[2 * each - 2 : 2 * each], parent=each - 1 or None, **STATE) for each in (2, 4)]
    assert followed(*states, groups={}).longest_match(FIVE)[0].reusable == 8
    window = stored([1, 2], FIVE[:4], **WINDOW)
    assert followed(*states, window, groups={}).longest_match(FIVE)[0].reusable == 4
    assert followed(*states, groups={1: 4, 2: None}).longest_match(FIVE)[0].reusable == 0  # a group nobody told of yet


def test_a_clear_is_of_every_group() -> None:
    held = followed(stored([1], [0, 1], **STATE), CLEARED, stored([1], [0, 1]), groups={2: None})
    assert held.longest_match(FIVE)[0] == Match(2, {"GPU": 2}, reusable=0)
    assert held.longest_match([7, 7])[0] == Match(0, {}, reusable=0)
    assert picture(stored([1], [0, 1])).longest_match(FIVE)[0].reusable is None


# -- what a match is ----------------------------------------------------------------------------------


def test_a_match_is_told_over_all_tiers_and_in_each() -> None:
    held = picture(
        stored([1, 2, 3], [1, 1, 2, 2, 3, 3]),
        stored([1], [1, 1], medium="CPU_PINNED"),
        stored([3, 4], [3, 3, 4, 4], parent=2, medium="CPU_PINNED"),
    )
    match = held.longest_match([1, 1, 2, 2, 3, 3, 4, 4, 5])[0]
    assert match == Match(8, {"GPU": 6, "CPU_PINNED": 2})
    assert (match.on(Tier.DEVICE), match.on("CPU_PINNED"), match.on(Tier.DISK)) == (6, 2, 0)
    assert held.longest_match([1, 1, 2, 2, 3, 3, 4, 4], tier=Tier.HOST) == {0: Match(2, {"CPU_PINNED": 2})}


@pytest.mark.parametrize("tokens", [[], [1], [9, 1, 2], [2, 2]])
def test_what_is_not_there_from_the_first_block_on_is_no_match(tokens: list[int]) -> None:
    assert picture(stored([1, 2], [1, 1, 2, 2])).longest_match(tokens) == {0: Match(0, {})}


def test_a_match_ends_with_a_whole_block() -> None:
    held = picture(stored([1, 2], [1, 1, 2, 2]))
    assert [held.longest_match([1, 1, 2, 2][:n])[0].tokens for n in range(5)] == [0, 0, 2, 2, 4]


def test_equal_tokens_under_another_parent_are_another_block() -> None:
    held = picture(stored([1, 2], [7, 7, 7, 7]), stored([3], [7, 7], parent=9))
    assert held.longest_match([7] * 8)[0].tokens == 4


def test_tokens_may_be_packed_or_any_integers() -> None:
    held = picture(stored([1, 2], [1, 0xFFFFFFFF, 2, 2]))
    tokens = [1, 0xFFFFFFFF, 2, 2]
    packed = np.array(tokens, np.uint32)
    for each in (tokens, tuple(tokens), packed, packed.astype(np.int64), packed.tobytes()):
        assert held.longest_match(each)[0].tokens == 4  # type: ignore[arg-type]


@pytest.mark.parametrize("form", [bytes, bytearray, memoryview, lambda packed: memoryview(packed).cast("I")])
def test_packed_tokens_are_packed_in_whatever_form_bytes_have(form: Any) -> None:
    held = picture(stored([1, 2], [7, 8, 1 << 20, 9]))
    assert held.longest_match(form(np.array([7, 8, 1 << 20, 9], "<u4").tobytes()))[0].tokens == 4


@pytest.mark.parametrize(
    "wrong",
    [
        BlockStored([1, 2], None, [1, 2, 3, 4, 5, 6], 2, None, "CPU"),
        BlockStored([3, 4, 5], 2, [9] * 4, 2, None),
        BlockStored([3], 2, ["9", "9"], 2, None),  # type: ignore[list-item]
    ],
)
def test_what_no_decoder_gives_is_refused_and_changes_nothing(wrong: Event) -> None:
    held = picture(stored([1, 2], [7, 8, 1, 9]))
    before = held.digests(), dict(held.blocks("GPU"))
    with pytest.raises((BadRequest, TypeError)):
        held.apply(wrong, 0)
    assert (held.digests(), dict(held.blocks("GPU"))) == before
    assert held.longest_match([7, 8, 1, 9])[0].tokens == 4


@pytest.mark.parametrize("tokens", [[-1], [1 << 64], ["1"], [1.5], b"123"])
def test_what_is_no_token_id_is_refused(tokens: Any) -> None:
    with pytest.raises(BadRequest, match="ids from 0 on"):
        picture().longest_match(tokens)


def test_namespaces_are_apart_and_their_two_names_are_never_mixed_up() -> None:
    """A18: a lora X and a salt X, and 'a' with 'bc' and 'ab' with 'c', are not each other's; an empty one is none."""
    tokens = list(range(8))
    spaces: list[dict[str, Any]] = [
        {},
        {"lora_name": "X"},
        {"cache_salt": "X"},
        {"lora_name": "a", "cache_salt": "bc"},
        {"lora_name": "ab", "cache_salt": "c"},
        {"cache_salt": "a\0b"},
        {"lora_name": "a", "cache_salt": "b"},
    ]
    for at, space in enumerate(spaces):
        held = picture(stored([at], tokens, **space))
        for other in spaces:
            assert held.longest_match(tokens, **other)[0].tokens == (8 if other == space else 0)
    plain = picture(stored([1], tokens, lora_name="", cache_salt=""))
    assert plain.longest_match(tokens)[0].tokens == 8
    assert plain.longest_match(tokens, lora_name="", cache_salt="")[0].tokens == 8
    assert plain.blocks("GPU")[1] == Block(None, tuple(tokens), None, None)


def test_bigrams_match_by_the_plain_tokens() -> None:
    raw = [1, 2, 3, 4, 5, 6]
    units = list(itertools.pairwise(raw))
    held = picture(stored([1, 2], units[:4]))
    assert held.blocks("GPU")[2] == Block(1, (units[2], units[3]), None, None)
    assert held.longest_match(raw)[0].tokens == 4
    assert held.longest_match(raw[:4])[0].tokens == 2  # the second block needs the fifth token
    assert held.longest_match([1, 2, 9, 4, 5])[0].tokens == 0


def test_ids_past_uint32_are_kept_and_matched() -> None:
    wide = [1, 1 << 40, 3, 4]
    held = picture(stored([1, 2], wide))
    assert held.blocks("GPU") == {1: Block(None, (1, 1 << 40), None, None), 2: Block(1, (3, 4), None, None)}
    assert held.longest_match(wide)[0].tokens == 4
    assert held.longest_match([1, (1 << 40) + 1, 3, 4])[0].tokens == 0


def test_two_hashes_of_one_content_each_have_their_own_presence() -> None:
    held = picture(
        stored([1, 2], [1, 2]),
        stored([11, 12], [1, 2], medium="CPU_PINNED"),
        stored([13], [3], parent=12, medium="CPU_PINNED"),
    )
    assert held.longest_match([1, 2, 3])[0] == Match(3, {"GPU": 2, "CPU_PINNED": 3})
    held.apply(BlockRemoved([1], "GPU"), 0)
    assert held.longest_match([1, 2, 3])[0] == Match(3, {"CPU_PINNED": 3})
    held.apply(stored([1], [1]), 0)
    held.apply(BlockRemoved([11], "CPU_PINNED"), 0)
    assert held.longest_match([1, 2, 3])[0] == Match(2, {"GPU": 2})


def test_a_hash_that_is_told_anew_is_what_was_told_last() -> None:
    held = picture(stored([1], [1, 1]), stored([1], [2, 2], cache_salt="a"))
    assert held.blocks("GPU") == {1: Block(None, (2, 2), None, "a")}
    assert held.longest_match([1, 1])[0].tokens == 0
    assert held.longest_match([2, 2], cache_salt="a")[0].tokens == 2
    assert held.digests() == {"GPU": Digest(1, 1)}


@pytest.mark.parametrize("hashes", [[5, 5], [5, 6, 5], [5, 6, 5, 5]])
def test_of_a_hash_that_an_event_has_twice_the_last_counts(hashes: list[int]) -> None:
    held = picture(stored(hashes, list(range(len(hashes))), cache_salt="a"), stored([8], [1], cache_salt="b"))
    assert held.blocks("GPU")[5] == Block(hashes[-2], (len(hashes) - 1,), None, "a")
    assert held.blocks("GPU")[8] == Block(None, (1,), None, "b")
    assert held.digests() == {"GPU": Digest(len({*hashes}) + 1, sum({*hashes}) + 8)}
    assert held.longest_match([0, 1], cache_salt="a") == {0: Match(0, {})}


# -- tokens withheld ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["xxh3_128", "sha256"])
@pytest.mark.parametrize("space", [{}, {"lora_name": "a"}, {"cache_salt": "s"}, {"lora_name": "a", "cache_salt": "s"}])
def test_where_tokens_are_withheld_a_match_goes_by_hash(name: str, space: dict[str, str]) -> None:
    tokens = list(range(100, 112))
    hashes = list(named(name)(np.array(tokens, "<u4").tobytes(), 4, space.get("lora_name"), space.get("cache_salt")))
    held = picture(
        BlockStored(hashes, None, [], 4, None, "GPU", **space),
        BlockStored(hashes[:1], None, [], 4, None, "CPU_PINNED", **space),
        BlockRemoved(hashes[2:], "GPU"),
    )
    assert held.blocks("GPU")[hashes[1]].tokens == ()
    match = held.longest_match(tokens, block_hashes=named(name), **space)  # type: ignore[arg-type]
    assert match == {0: Match(8, {"GPU": 8, "CPU_PINNED": 4})}
    assert held.longest_match(tokens, block_hashes=named(name), lora_name="b")[0].tokens == 0
    with pytest.raises(ConfigError, match="hash_name="):
        held.longest_match(tokens)
    assert picture(BlockStored(hashes, None, [], 4, None), CLEARED).longest_match(tokens) == {0: Match(0, {})}


def test_an_unknown_hash_is_told_by_name() -> None:
    held = picture(BlockStored([1], None, [], 4, None))
    with pytest.raises(ConfigError, match="md5"):
        held.longest_match([1, 2, 3, 4], block_hashes=named("md5"))


# -- any stream ---------------------------------------------------------------------------------------

Key = tuple[int, str]
Content = tuple[int | None, tuple[Any, ...], str | None, str | None]
SIZE = 2
SPACES = ((None, None), ("x", None), (None, "x"))


class Flat:
    """The same, in the plainest way: every tier a dict, every match a search."""

    def __init__(self) -> None:
        self.tiers: dict[Key, dict[int, Content]] = {}

    def apply(self, event: Event, rank: int) -> None:
        if isinstance(event, AllBlocksCleared):
            for key in [key for key in self.tiers if key[0] == rank]:
                del self.tiers[key]
            return
        tier = self.tiers.setdefault((rank, event.medium or "GPU"), {})
        if isinstance(event, BlockRemoved):
            for each in event.block_hashes:
                tier.pop(each, None)
            return
        parent = event.parent_block_hash
        for at, each in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[at * SIZE : (at + 1) * SIZE])
            tier[each] = (parent, tokens, event.lora_name, event.cache_salt)
            parent = each

    def match(self, rank: int, media: Iterable[str], tokens: list[int], space: tuple[str | None, str | None]) -> int:
        """Blocks, the longest over all chains."""

        def walk(parent: int | None, at: int) -> int:
            want = (parent, tuple(tokens[at : at + SIZE]), *space)
            found = {
                each
                for medium in media
                for each, content in self.tiers.get((rank, medium), {}).items()
                if content == want
            }
            return max((1 + walk(each, at + SIZE) for each in found), default=0) if at + SIZE <= len(tokens) else 0

        return walk(None, 0)


tokens_of = st.lists(st.sampled_from([0, 1, 1 << 33]), min_size=SIZE, max_size=3 * SIZE).filter(
    lambda t: not len(t) % SIZE
)
stores = st.builds(
    lambda tokens, first, step, parent, medium, space: BlockStored(
        [(first + i * step) % 9 - 4 for i in range(len(tokens) // SIZE)],
        parent,
        tokens,
        SIZE,
        None,
        medium,
        cache_salt=space[1],
        lora_name=space[0],
    ),
    tokens_of,
    st.integers(0, 8),
    st.sampled_from((1, 1, 0)),  # 0: one hash for all of it
    st.none() | st.integers(-4, 4),
    st.sampled_from(MEDIA),
    st.sampled_from(SPACES),
)
removals = st.builds(BlockRemoved, st.lists(st.integers(-4, 4), max_size=4), st.sampled_from((None, *MEDIA)))
events_of = st.one_of(stores, stores, stores, removals, st.just(CLEARED))


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.tuples(events_of, st.integers(0, 1)), max_size=25),
    st.lists(st.sampled_from([0, 1, 1 << 33]), max_size=8),
)
def test_after_any_stream_it_is_what_a_flat_model_is(said: list[tuple[Event, int]], asked: list[int]) -> None:
    held, flat = Picture(), Flat()
    for event, rank in said:
        held.apply(event, rank)
        flat.apply(event, rank)
    for rank in (0, 1):
        digests = held.digests(rank)
        for medium in MEDIA:
            want = {each: Block(*content) for each, content in flat.tiers.get((rank, medium), {}).items()}
            assert dict(held.blocks(medium, rank)) == want
            assert held.hashes(medium, rank) == set(want)
            digest = Digest(len(want), sum(want) % (1 << 64))
            assert digests.get(medium, Digest(0, 0)) == digest
        for space in SPACES:
            match = held.longest_match(asked, lora_name=space[0], cache_salt=space[1]).get(rank, Match(0, {}))
            assert match.tokens == SIZE * flat.match(rank, MEDIA, asked, space)
            for medium in MEDIA:
                alone = SIZE * flat.match(rank, [medium], asked, space)
                assert match.on(medium) == alone
                only = held.longest_match(asked, lora_name=space[0], cache_salt=space[1], tier=medium)
                assert only.get(rank, Match(0, {})) == Match(alone, {medium: alone} if alone else {})


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(events_of, st.integers(0, 1)), max_size=25))
def test_nothing_is_left_of_what_is_removed(said: list[tuple[Event, int]]) -> None:
    held = Picture()
    for event, rank in said:
        held.apply(event, rank)
    for rank in held.ranks:
        for medium in MEDIA:
            held.apply(BlockRemoved(list(held.hashes(medium, rank)), medium), rank)
        left = held._ranks[rank]
        assert not left.children
        assert not left.spaces._numbers
        assert not left.spaces._uses
        assert set(left.sums.values()) <= {0}


# -- what it costs ------------------------------------------------------------------------------------


def told(num_blocks: int, *media: str, size: int = 16) -> list[bytes]:
    rng = random.Random(0)
    batches = []
    for _ in range(num_blocks // 100):
        hashes = [rng.getrandbits(64) - (1 << 63) for _ in range(100)]
        tokens = [rng.getrandbits(17) for _ in range(100 * size)]
        batches += [encode_batch(Batch(0.0, [BlockStored(hashes, None, tokens, size, None, m)], 0)) for m in media]
    return batches


@pytest.mark.parametrize(("media", "most"), [(("GPU",), 215), (("GPU", "CPU_PINNED"), 275)])
def test_a_block_takes_a_few_words_beside_its_tokens(media: tuple[str, ...], most: int) -> None:
    """140 to 202 bytes were measured, by how full the dicts are, and 30 to 60 more for a second tier; 4 for a token.

    With this many blocks the dicts are emptiest.
    """
    num_blocks = 22_000
    batches = told(num_blocks, *media)
    held = Picture()
    gc.collect()
    tracemalloc.start()
    try:
        for payload in batches:
            for event in decode_batch(payload).events:
                held.apply(event, 0)
        gc.collect()
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert size / num_blocks - 4 * 16 < most


@pytest.mark.pure  # compiled, it does not ask a dict of another kind
def test_a_match_looks_at_what_it_matches_and_at_nothing_else() -> None:
    class Counting(dict[bytes, Any]):
        looks = 0

        def get(self, key: bytes, default: Any = None) -> Any:
            self.looks += 1
            return super().get(key, default)

    held = Picture()
    for payload in told(20_000, "GPU"):
        for event in decode_batch(payload).events:
            held.apply(event, 0)
            first = event
    assert isinstance(first, BlockStored)
    held._ranks[0].children = counting = Counting(held._ranks[0].children)
    assert held.longest_match([*first.token_ids[: 16 * 10], *[9] * 1600])[0].tokens == 160
    assert counting.looks == 11
