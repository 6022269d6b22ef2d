"""Keys of pairs: a page holds what was computed for its tokens, and is named by these and the one behind them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest

from sglcache.client.hashes import named
from sglcache.client.picture import Picture
from sglcache.core import encoding
from sglcache.core.effects import Publish
from sglcache.core.encoding import Format
from sglcache.core.hashing import hasher
from sglcache.core.index import DEVICE, HOST, Index, IndexConfig
from sglcache.core.key import ROOT, Keys
from sglcache.errors import BadRequest, Changed, SglcacheError
from sglcache.testing.model import LeaseModel
from sglcache.testing.rig import Rig, Runner, pack
from sglcache.units import SessionId
from sglcache.wire.events import BlockStored, decode_batch

V4 = [-1303529142941650691, 7461429976246528554]  # of tokens 1..5, page size 2, by SGLang


def rig(**config: Any) -> tuple[Rig, Runner]:
    made = Rig(**{"page_size": 4, "num_pages": 32, "bigram": True, **config})
    return made, made.open_session()


def acquire(r: Rig, runner: Runner, tokens: Any, **options: Any) -> LeaseModel:
    lease = r.acquire(runner, tokens, **options)
    assert isinstance(lease, LeaseModel), repr(lease)
    return lease


def put(r: Rig, runner: Runner, tokens: Any) -> LeaseModel:
    lease = acquire(r, runner, tokens)
    r.commit(runner, lease)
    r.copies_done()
    r.release(runner, lease)
    return lease


def stored(r: Rig) -> list[dict[str, Any]]:
    r.cut()
    return [event for event in r.subscriber.events if event["type"] == "BlockStored"]


# -- the keys themselves ------------------------------------------------------------------------------------------


def test_n_tokens_make_n_less_one_units() -> None:
    keys = Keys(4, bigram=True)
    whole = [keys.whole(4 * count) // 16 for count in range(14)]
    assert whole == [0] * 5 + [1] * 4 + [2] * 4 + [3]
    plain = Keys(4)
    assert [plain.whole(4 * count) // 16 for count in range(9)] == [0] * 4 + [1] * 4 + [2]
    assert (keys.span, keys.word_bytes, plain.span, plain.word_bytes) == (20, 32, 16, 16)


def test_the_words_of_a_run_are_its_pairs() -> None:
    tokens = [0, 7, 0xFFFFFFFF, 0, 1 << 24]
    words = Keys(2, bigram=True).words(pack(tokens))
    assert np.frombuffer(words, "<u4").reshape(-1, 2).tolist() == [list(pair) for pair in pairwise(tokens)]
    assert Keys(2).words(pack(tokens)) == pack(tokens)


def test_the_hashes_are_sglangs() -> None:
    """Vector V4, in one run and taken up half-way."""
    keys, sha = Keys(2, bigram=True), hasher("sha256")
    whole = sha.chain(b"", keys.words(pack([1, 2, 3, 4, 5])), keys.word_bytes)
    head = sha.chain(b"", keys.words(pack([1, 2, 3])), keys.word_bytes)
    tail = sha.chain(head, keys.words(pack([3, 4, 5])), keys.word_bytes)
    assert head + tail == whole
    assert list(named("sha256", bigram=True)(pack([1, 2, 3, 4, 5]), 2, None, None)) == V4
    assert list(named("sha256", bigram=True)(pack([1, 2, 3, 4]), 2, None, None)) == V4[:1]


def test_pairs_are_packed_as_a_list_of_them_would_be() -> None:
    tokens = np.array([0, 127, 128, 255, 256, 65535, 65536, 0xFFFFFFFF] * 9, "<u4")
    words = Keys(1, bigram=True).words(tokens.tobytes())
    assert encoding.pack_pairs(words) == msgspec.msgpack.encode(list(pairwise(tokens.tolist())))


def test_the_worked_trace_of_a_bigram_tree() -> None:
    r, runner = rig(page_size=2, hash_name="sha256")
    put(r, runner, [1, 2, 3, 4, 5])
    (event,) = stored(r)
    assert event["block_hashes"] == V4
    assert event["token_ids"] == [[1, 2], [2, 3], [3, 4], [4, 5]]
    assert (event["block_size"], event["parent_block_hash"]) == (2, None)


# -- what a runner counts in tokens ------------------------------------------------------------------------------


def test_a_match_needs_the_token_behind_it() -> None:
    r, runner = rig()
    put(r, runner, range(13))  # three pages and the token that names the third
    for count in range(1, 14):
        assert r.peek(range(count)) == ((count - 1) // 4 * 4,) * 2
    assert r.peek(range(20)) == (12, 12)
    assert r.peek([*range(12), 99]) == (8, 8), "the third page holds what was computed knowing of another token"
    assert r.peek([*range(8), 99]) == (4, 4)


def test_the_last_page_has_no_name_before_the_token_behind_it_is_known() -> None:
    r, runner = rig()
    lease = acquire(r, runner, range(8), reserve=8)
    assert r.commit(runner, lease).pages == 1
    assert lease.pinned == 1
    r.extend(runner, lease, [8])
    r.commit(runner, lease, 8)
    assert lease.pinned == 2, "eight tokens are computed, and the ninth is known"
    r.extend(runner, lease, range(9, 13))
    r.commit(runner, lease, 11)
    assert lease.pinned == 2, "eleven tokens are two pages"
    r.commit(runner, lease)
    assert lease.pinned == 3, "thirteen have three, and the name of the third"
    r.release(runner, lease)
    assert len(r.model.slot[DEVICE]) == 3


def test_a_commit_of_all_that_has_pages_looks_at_what_has_none() -> None:
    r, runner = rig()
    lease = acquire(r, runner, range(100), room=8)
    assert len(lease.table) == 2
    r.commit(runner, lease)
    assert lease.pinned == 2


@pytest.mark.parametrize(
    ("options", "matched", "pages"),
    [
        ({}, 12, 5),
        ({"limit": 12}, 12, 5),
        ({"limit": 11}, 8, 5),
        ({"limit": 0}, 0, 5),
        ({"exact": 8}, 8, 5),
        ({"exact": 0}, 0, 5),
        ({"exact": 12}, 12, 5),
        ({"reserve": 4}, 12, 6),
        ({"room": 0}, 12, 3),
        ({"room": 1}, 12, 4),
        ({"room": 1, "limit": 4}, 4, 2),
        ({"room": 100, "reserve": 3}, 12, 5),
    ],
)
def test_limit_exact_reserve_and_room_are_tokens(options: dict[str, int], matched: int, pages: int) -> None:
    r, runner = rig()
    put(r, runner, range(13))
    lease = acquire(r, runner, range(17), **options)
    assert lease.matched * 4 == matched
    assert len(lease.table) == pages


def test_exact_can_be_as_much_as_there_are_units() -> None:
    r, runner = rig()
    put(r, runner, range(13))
    changed = r.acquire(runner, range(17), exact=16)
    assert isinstance(changed, Changed)
    assert changed.matched_tokens == 12
    index = r.index
    with pytest.raises(BadRequest, match="of the 15 tokens that can be matched"):
        index.acquire(runner.id, 99, pack(range(16)), exact=16)
    assert isinstance(r.acquire(runner, range(16), exact=12), LeaseModel)


def test_a_pin_is_of_whole_named_pages() -> None:
    r, runner = rig()
    put(r, runner, range(13))
    assert r.pin(runner, pack(range(12)), ROOT, "owner", 9.0) == 8
    assert r.pin(runner, pack(range(14)), ROOT, "owner", 9.0) == 12


def test_one_token_is_no_unit() -> None:
    r, runner = rig(page_size=1)
    lease = put(r, runner, [5])
    assert (lease.matched, r.peek([5])) == (0, (0, 0))
    put(r, runner, [5, 6])
    assert r.peek([5, 6]) == (1, 1)
    assert r.peek([5, 7]) == (0, 0)
    assert r.peek([5]) == (0, 0)


# -- the tree -------------------------------------------------------------------------------------------------------


def test_branches_part_one_token_early() -> None:
    r, runner = rig()
    put(r, runner, range(17))
    put(r, runner, [*range(8), *range(50, 59)])  # parts behind 8 tokens: the second page is another one already
    assert r.index.stats().num_nodes == 3
    assert len(r.model.slot[DEVICE]) == 4 + 3
    put(r, runner, [*range(9), *range(50, 58)])  # here the first two pages are the same
    assert len(r.model.slot[DEVICE]) == 4 + 3 + 2
    r.settle()


def test_children_that_differ_in_the_token_behind_their_first_page_are_different() -> None:
    r, runner = rig()
    for last in range(3000, 3008):
        put(r, runner, [1, 2, 3, 4, last])
    assert r.index.stats().num_nodes == 8
    for last in range(3000, 3008):
        assert r.peek([1, 2, 3, 4, last, 9]) == (4, 4)
    r.settle()


def test_what_was_cut_is_joined_again() -> None:
    r, runner = rig()
    put(r, runner, range(25))
    r.cut()
    for end in (5, 9, 13, 17, 21):
        put(r, runner, range(end))
    assert r.index.stats().num_nodes > 1
    put(r, runner, range(25))
    (node,) = r.index.tree.nodes()
    assert node.key == pack(range(25))
    assert node.num_bytes == 24 * 4
    r.settle()


def test_host_copies_come_back() -> None:
    r, runner = rig(num_pages=6, host_pages=32)
    put(r, runner, range(21))
    put(r, runner, range(100, 121))
    lease = acquire(r, runner, range(21))
    assert (lease.matched, lease.load is not None) == (5, True)
    r.copies_done()
    r.release(runner, lease)
    assert r.peek(range(21)) == (20, 20)
    assert len(r.model.slot[HOST]) == 10
    r.settle()


# -- the stream ---------------------------------------------------------------------------------------------------


class Told:
    """An index's stream as bytes, in any encoding."""

    def __init__(self, **config: Any) -> None:
        self.index = Index(IndexConfig(4, 64, bigram=True, **config))
        self.session: SessionId = self.index.open_session()
        self.payloads: list[bytes] = []
        self.ticket = 0

    def put(self, tokens: bytes) -> None:
        grant = self.index.acquire(self.session, 1, tokens)
        assert grant is not None
        for command in (self.index.commit, self.index.release):
            self.ticket += 1
            command(self.session, 1, grant.lease, self.ticket)
            self.index.event_done(self.session, self.ticket)
        while not self.index.cut(0.0):
            pass
        self.payloads += [effect.payload for effect in self.index.drain() if isinstance(effect, Publish)]

    def events(self) -> list[Any]:
        return [event for payload in self.payloads for event in msgspec.msgpack.decode(payload)[1]]


@pytest.mark.parametrize("name", encoding.ENCODINGS)
def test_each_encoding_has_the_pairs(name: str) -> None:
    told = Told(format=Format(encoding=name), max_batch_blocks=3)
    tokens = list(range(1000, 1021))
    told.put(pack(tokens[:9]))
    told.put(pack(tokens))
    events = [event for event in told.events() if "BlockStored" in (event if name == "array" else event.values())]
    pairs = [pair for event in events for pair in (event[3] if name == "array" else event["token_ids"])]
    assert pairs == [list(pair) for pair in pairwise(tokens)]
    for payload in told.payloads:
        for event in decode_batch(payload).events:
            if isinstance(event, BlockStored):
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size == 4 * len(event.block_hashes)


@pytest.mark.parametrize("withheld", [False, True])
@pytest.mark.parametrize("name", encoding.ENCODINGS)
def test_a_router_matches_what_the_index_would(name: str, withheld: bool) -> None:
    told = Told(format=Format(encoding=name, withhold_tokens=withheld))
    prompts = [list(range(30)), [*range(12), *range(90, 110)], [*range(13), *range(70, 75)]]
    for tokens in prompts:
        told.put(pack(tokens))
    picture = Picture()
    for payload in told.payloads:
        for event in decode_batch(payload).events:
            picture.apply(event, 0)
    hashes = named("xxh3_128", bigram=True) if withheld else None
    for tokens in [*prompts, list(range(12)), list(range(13)), [*range(12), 7], [1], [5, 6]]:
        want = told.index.peek(pack(tokens)).matched_tokens
        for given in (tokens, pack(tokens)):
            assert picture.longest_match(given, block_hashes=hashes)[0].tokens == want


def test_long_runs_are_cut_into_events_that_overlap_by_one_token() -> None:
    """A slice for the hashes, one for the events, a few blocks in each."""
    r, runner = rig(num_pages=40, max_batch_blocks=3, cut_slice=1, hash_name="sha256")
    put(r, runner, range(141))
    events = stored(r)
    assert len(events) > 8
    assert [pair for event in events for pair in event["token_ids"]] == [list(pair) for pair in pairwise(range(141))]
    r.settle()


def test_a_snapshot_has_the_pairs() -> None:
    r, runner = rig(max_batch_blocks=3)
    put(r, runner, range(29))
    put(r, runner, [*range(14), *range(60, 70)])
    r.cut()
    snapshot = r.index.snapshot()
    picture = Picture()
    while (payload := snapshot.payload(0.0)) is not None:
        for event in decode_batch(payload).events if payload else []:
            picture.apply(event, 0)
    assert picture.hashes("GPU") == {page.hash for page in r.model.slot[DEVICE]}
    blocks = picture.blocks("GPU")
    for page in r.model.slot[DEVICE]:
        flat = [token for pair in blocks[page.hash].tokens for token in pair]  # type: ignore[union-attr]
        assert pack(flat) == page.words
        assert blocks[page.hash].parent == (None if page.parent is None else page.parent.hash)


def test_wrong_keys_are_refused_as_ever() -> None:
    index = Index(IndexConfig(4, 8, bigram=True, events=False))
    session = index.open_session()
    for tokens in (b"", b"\1\0\0"):
        with pytest.raises(SglcacheError):
            index.acquire(session, 1, tokens)
    assert index.peek(b"")[:2] == (0, 0)
