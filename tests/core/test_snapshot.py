"""A snapshot, and then every batch since its beginning, is the index: whatever happened in between (law 5).

Judged by a reader as strict as the strictest router known: a block whose parent it does not know is lost on it.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sglcache.core import snapshot as snapshot_module
from sglcache.core.effects import Effect, Publish
from sglcache.core.encoding import Format, Group
from sglcache.core.hashing import block_hash
from sglcache.core.index import Index, IndexConfig
from sglcache.core.key import Namespace
from sglcache.core.l3 import L3Config
from sglcache.core.snapshot import Snapshot
from sglcache.errors import ConfigError
from sglcache.testing.programs import Program, SeededChooser, settings
from sglcache.testing.rig import Rig, pack
from sglcache.units import Tier

MEDIA = ("GPU", "CPU_PINNED", "DISK")
Blocks = dict[str, set[int]]
ON_DISK = {"host_pages": 12, "l3": L3Config(tell=True, store_quota=100, part=2)}


class Router:
    """Keeps (medium, hash); a block under an unknown parent is dropped for good."""

    def __init__(self) -> None:
        self.blocks: Blocks = {medium: set() for medium in MEDIA}
        self.orphans = 0
        self.parents: dict[int, int | None] = {}  # as told

    def take(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.blocks = {medium: set() for medium in MEDIA}
            return
        if event["medium"] == "EXTERNAL":
            return  # a hint, and in no snapshot
        there = self.blocks[event["medium"]]
        if event["type"] == "BlockRemoved":
            there.difference_update(event["block_hashes"])
            return
        assert len(event["token_ids"]) == len(event["block_hashes"]) * event["block_size"]
        parent = before = event["parent_block_hash"]
        for each in event["block_hashes"]:
            self.parents[each] = before
            before = each
        if parent is None or any(parent in blocks for blocks in self.blocks.values()):
            there.update(event["block_hashes"])
        else:
            self.orphans += 1

    def take_batch(self, payload: bytes) -> None:
        for event in msgspec.msgpack.decode(payload)[1]:
            self.take(event)


class Latecomer:
    """Someone who asks for a snapshot now, and reads it as slowly as it likes."""

    def __init__(self, index: Index) -> None:
        self.snapshot: Snapshot = index.snapshot()
        self.router = Router()
        self.since: list[bytes] = []
        self.done = False
        self.frames = 0

    def step(self) -> None:
        self.frames += 1
        assert self.frames < 1000, "it tells the same again and again"
        frame = self.snapshot.next()
        if frame is None:
            self.done = True
            return
        events = [msgspec.msgpack.decode(each) for each in _events(frame.events, frame.num_events)]
        assert sum(len(event.get("block_hashes", ())) for event in events) == frame.num_blocks
        for event in events:
            self.router.take(event)

    def finish(self) -> Blocks:
        while not self.done:
            self.step()
        for payload in self.since:
            self.router.take_batch(payload)
        return self.router.blocks


def _events(pieces: list[bytes], count: int) -> list[bytes]:
    return [
        bytes(raw)
        for raw in msgspec.msgpack.decode(b"\xdc" + count.to_bytes(2, "big") + b"".join(pieces), type=list[msgspec.Raw])
    ]


class Show:
    """A random program with latecomers and an announcement among its steps."""

    def __init__(self, seed: int, **fixed: Any) -> None:
        self.choose = SeededChooser(seed)
        self.rig = Rig(**settings(self.choose, **{"events": True, **fixed}))
        self.program = Program(self.rig)
        self.latecomers: list[Latecomer] = []
        self.confused = Router()  # follows the stream, knows nothing right, and is set right by an announcement
        self.announced = False
        index, drain = self.rig.index, self.rig.index.drain

        def listen(ts: float | None = None) -> list[Effect]:
            effects = drain(ts)
            for effect in effects:
                if isinstance(effect, Publish):
                    self._heard(effect.payload)
            return effects

        index.drain = listen  # type: ignore[method-assign]

    def _heard(self, payload: bytes) -> None:
        for latecomer in self.latecomers:
            latecomer.since.append(payload)
        self.confused.take_batch(payload)

    def step(self) -> None:
        choose, index = self.choose, self.rig.index
        match choose.integer(0, 9):
            case 0 if len(self.latecomers) < 3:
                self.latecomers.append(Latecomer(index))
            case 1 | 2 if self.latecomers:
                choose.item(self.latecomers).step()
            case 3 if not index.held:
                self._announce()
            case 4:
                self.program.cut(choose)
                self.compare_tally()
            case _:
                self.program.step(choose)

    def _announce(self) -> None:
        index, log = self.rig.index, self.rig.index.log
        assert log is not None
        if not index.announcing and self.choose.integer(0, 3) == 0:
            self.confused.blocks = {medium: {1, 2, 3} for medium in MEDIA}
            index.announce()
            self.announced = True
        index.announce_slice(self.rig.now)
        published, log.published = log.published, []
        for batch in published:
            self._heard(batch.payload)
            self.rig.subscriber.next_seq = batch.seq + 1

    def truth(self) -> Blocks:
        present = self.rig.subscriber.present
        return {medium: {block_hash(page.digest) for page in present[tier]} for tier, medium in enumerate(MEDIA)}

    def compare_tally(self) -> None:
        truth = self.truth()
        for tier, (count, total) in self.rig.index.digest().items():
            hashes = truth[tier.medium]
            assert (count, total) == (len(hashes), sum(hashes) % (1 << 64))

    def end(self) -> None:
        """All that was begun comes to its end, in the middle of the program's life."""
        self.rig.cut()
        for _ in range(1000):
            if not self.rig.index.announcing:  # until then everyone has part of it
                break
            self.rig.step()
            self.rig.cut()
            self._announce()
        assert not self.rig.index.announcing, "it announces the same again and again"
        truth = self.truth()
        self.compare_tally()
        parents = {block_hash(digest): page.parent for digest, page in self.rig.book.by_digest.items()}
        for latecomer in self.latecomers:
            assert latecomer.finish() == truth
            for block, parent in latecomer.router.parents.items():
                page = parents[block]
                assert parent == (None if page is None else block_hash(page.digest))
        if self.announced:
            assert self.confused.blocks == truth
        assert _marks(self.rig.index) == 0


def _marks(index: Index) -> int:
    """Walks that are still in the ring."""
    count, node = 0, index.tree.start.behind
    while node is not index.tree.start:
        count += node.parent is None
        node = node.behind
    return count


def play(seed: int, steps: int = 120, **fixed: Any) -> None:
    show = Show(seed, **fixed)
    for _ in range(steps):
        show.step()
    show.end()
    show.rig.settle()


@pytest.mark.parametrize(
    "variant", [{}, {"cut_slice": 8, "evict_slice": 1}, {"num_pages": 10, "host_pages": 40}, ON_DISK], ids=str
)
def test_who_comes_late_ends_up_with_what_the_index_has(variant: dict[str, Any]) -> None:
    for seed in range(120):
        try:
            play(seed, **variant)
        except AssertionError as exc:
            exc.add_note(f"play({seed}, **{variant})")
            raise


@pytest.mark.parametrize(
    ("owner", "old", "new"),
    [
        ("_tell", "parent = None if above is None else above[-size:]", "parent = None"),
        ("_tell", "start = _page_of(self._told, hashes, size) + 1 if self._told else 0", "start = 0"),
        ("_tell", "if stop < num_pages:", "if False:"),
        ("next", "building.clear()", "pass"),
    ],
)
def test_a_snapshot_that_is_wrong_is_noticed(owner: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import inspect
    import textwrap

    source = textwrap.dedent(inspect.getsource(getattr(Snapshot, owner)))
    assert source.count(old) == 1
    scope: dict[str, Any] = {}
    exec(
        compile("from __future__ import annotations\n" + source.replace(old, new), owner, "exec"),
        vars(snapshot_module),
        scope,
    )
    monkeypatch.setattr(Snapshot, owner, scope[owner])
    with pytest.raises(AssertionError):
        _play_many()


def _play_many() -> None:
    for seed in range(150):
        play(seed, max_batch_blocks=3)


def stored(rig: Rig) -> list[dict[str, Any]]:
    return [event for event in rig.subscriber.events if event["type"] == "BlockStored"]


def test_a_long_run_is_told_in_frames_and_goes_on_where_it_was_split() -> None:
    """The reader is in the middle of a node of 10 pages when a shorter prompt cuts it in two."""
    rig = Rig(page_size=4, num_pages=40, max_batch_blocks=3)
    runner = rig.open_session()
    lease = rig.acquire(runner, range(40))
    rig.commit(runner, lease)
    rig.cut()
    late = Latecomer(rig.index)
    late.step()
    late.step()
    assert len(late.router.blocks["GPU"]) == 6
    rig.release(runner, rig.acquire(runner, [*range(16), 99]))
    rig.cut()
    assert late.finish()["GPU"] == {block_hash(page.digest) for page in rig.subscriber.present[0]}
    assert late.router.orphans == 0


def index_of(format: Format) -> Index:
    return Index(IndexConfig(page_size=2, num_pages=64, format=format))


def put(index: Index, tokens: list[int], **namespace: str) -> None:
    session = index.open_session()
    grant = index.acquire(session, 1, pack(tokens), Namespace.of(**namespace))
    assert grant is not None
    index.commit(session, 2, grant.lease, 1)
    index.event_done(session, 1)
    index.release(session, 3, grant.lease, 2)
    index.event_done(session, 2)


def events(index: Index) -> list[Any]:
    while not index.cut(1.5):
        pass
    return [
        event
        for effect in index.drain()
        if isinstance(effect, Publish)
        for event in msgspec.msgpack.decode(effect.payload)[1]
    ]


def test_arrays_are_those_of_0_5_19() -> None:
    index = index_of(Format("array"))
    put(index, [5, 6])
    put(index, [5, 6, 7, 8], cache_salt="t")
    cleared, plain, salted = events(index)
    assert cleared == ["AllBlocksCleared"]
    assert plain == ["BlockStored", plain[1], None, [5, 6], 2, None, "GPU"]
    assert salted == ["BlockStored", salted[1], None, [5, 6, 7, 8], 2, None, "GPU", {"cache_salt": "t"}]
    index.clear(Tier.DEVICE)
    (removed,) = events(index)
    assert removed[0] == "BlockRemoved"
    assert sorted(removed[1]) == sorted(plain[1] + salted[1])
    assert removed[2] == "GPU"


def test_an_array_has_no_place_for_a_lora_so_it_is_not_told() -> None:
    """A router that does not hear of the adapter would take its blocks for the base model's."""
    index = index_of(Format("array"))
    put(index, [5, 6], lora="a")
    assert events(index) == [["AllBlocksCleared"]]
    assert index.stats().counters["unpublished_pages"] == 1


def test_the_superset_has_every_key_that_vllm_wants() -> None:
    index = index_of(Format("superset"))
    put(index, [5, 6])
    put(index, [5, 6], lora="a")
    _, plain, named = events(index)
    assert list(plain) == [
        "type",
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
    ]
    assert (plain["lora_name"], named["lora_name"]) == (None, "a")


WINDOW, STATE = Group(1, "sliding_window", 128), Group(2, "mamba", by_end=True)


@pytest.mark.parametrize("name", ["map", "superset"])
def test_a_group_is_told_in_fields_behind_all_others_and_full_kv_as_ever(name: str) -> None:
    plain, index = index_of(Format(name)), index_of(Format(name, groups=(WINDOW, STATE)))
    put(plain, [5, 6, 7, 8], lora="a")
    put(index, [5, 6, 7, 8], lora="a")
    (node,) = index.tree.nodes()
    log = index.log
    assert log is not None
    for resource in (1, 2):
        log.stored(node, Tier.DEVICE, None, resource)
    for resource in (2, 1):
        log.removed(node, Tier.DEVICE, resource)
    cleared, full, window, state, no_state, no_window = events(index)
    assert [cleared, full] == events(plain)
    told = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 128}
    assert list(window.items()) == [*full.items(), *told.items()]
    first, last = full["block_hashes"]
    assert state == {
        **full,
        "block_hashes": [last],
        "parent_block_hash": first,
        "token_ids": [7, 8],
        "group_idx": 2,
        "kv_cache_spec_kind": "mamba",
    }
    assert no_state == {"type": "BlockRemoved", "block_hashes": [last], "medium": "GPU", "group_idx": 2}
    assert no_window == {"type": "BlockRemoved", "block_hashes": [first, last], "medium": "GPU", "group_idx": 1}
    assert index.digest() == plain.digest()  # of full KV alone


def test_a_group_that_is_not_to_be_told_is_not_queued() -> None:
    index = index_of(Format())
    put(index, [5, 6, 7, 8])
    events(index)
    (node,) = index.tree.nodes()
    assert index.log is not None
    index.log.stored(node, Tier.DEVICE, None, 1)
    index.log.removed(node, Tier.DEVICE, 1)
    assert not index.uncut


def test_a_group_has_no_place_in_an_array() -> None:
    with pytest.raises(ConfigError, match="superset"):
        Format("array", groups=(WINDOW,))


def test_withheld_tokens_are_an_empty_list() -> None:
    index = index_of(Format(withhold_tokens=True))
    put(index, [5, 6, 7, 8])
    assert events(index)[1]["token_ids"] == []


@pytest.mark.parametrize("bigram", [False, True])
@pytest.mark.parametrize("name", ["map", "array", "superset"])
def test_fixed_tokens_say_the_same_in_five_bytes_each(name: str, bigram: bool) -> None:
    tokens = [0, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1, 9]
    least, fixed = (
        Index(IndexConfig(2, 64, bigram=bigram, format=Format(name, fixed_tokens=each))) for each in (False, True)
    )
    payloads = []
    for index in (least, fixed):
        put(index, tokens)
        index.cut(1.0)
        payloads.append(b"".join(effect.payload for effect in index.drain() if isinstance(effect, Publish)))
    short, long = payloads
    first, second = (msgspec.msgpack.decode(payload) for payload in payloads)
    assert first == second
    assert sum(byte == 0xCE for byte in long) >= (16 if bigram else 8)
    # of eight tokens (or pairs of nine) those that need fewer
    sizes = [1 + (t > 127) + (t > 255) + 2 * (t > 65_535) for t in tokens]
    said = [*sizes[:8], *(sizes[1:9] if bigram else [])]
    assert len(long) - len(short) == sum(5 - size for size in said)


def test_a_hashed_salt_is_told_by_its_sha256_and_hashes_are_as_before() -> None:
    clear, hidden = index_of(Format()), index_of(Format(hash_salts=True))
    for index in (clear, hidden):
        put(index, [5, 6], cache_salt="secret")
    told, secret = events(clear)[1], events(hidden)[1]
    assert told["block_hashes"] == secret["block_hashes"]
    assert secret["cache_salt"] == "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"


@pytest.mark.parametrize(("field", "value"), [("lora_name", {"lora_name": "k"}), ("cache_salt", {"cache_salt": "k"})])
def test_an_extra_key_is_told_by_the_field_that_is_configured(field: str, value: dict[str, str]) -> None:
    index = index_of(Format(extra_key_as=field))
    put(index, [5, 6], extra_key="k")
    assert events(index)[1].items() >= value.items()


def test_two_namespaces_that_routers_can_t_tell_apart_are_not_both_told() -> None:
    """One's removal would be the other's. Once the first is gone, the next to come has the name."""
    index = index_of(Format(extra_key_as="lora_name"))
    put(index, [5, 6], lora="k")
    put(index, [5, 6], extra_key="k")
    assert [event["type"] for event in events(index)] == ["AllBlocksCleared", "BlockStored"]
    assert index.stats().counters["unpublished_pages"] == 1
    index.clear()
    put(index, [5, 6], extra_key="k")
    assert [event["type"] for event in events(index)] == ["AllBlocksCleared", "BlockStored"]


@pytest.mark.pure
def test_what_can_t_be_encoded_takes_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    index = index_of(Format())
    events(index)
    before = index.next_seq
    put(index, [5, 6])
    with monkeypatch.context() as broken:
        broken.setattr("sglcache.core.encoding.batch", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            index.cut(2.0)
    assert index.next_seq == before


def test_an_unknown_encoding_is_refused() -> None:
    with pytest.raises(ConfigError, match="map, array, superset"):
        index_of(Format("json"))
