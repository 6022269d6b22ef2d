"""Batches as SGLang 0.5.21 and later encode them, to the byte; and what a reader must put up with."""

from __future__ import annotations

import msgspec
import pytest

from sglcache.errors import ProtocolError
from sglcache.wire.events import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    decode_batch,
    encode_batch,
    forms_of,
    is_full,
    medium_of,
)

# What SGLang 0.5.21 and 0.5.23 encode for BATCH below.
GOLDEN = bytes.fromhex(
    "93cb3ff80000000000009387a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739201feb1706172656e745f626c6f"
    "636b5f68617368c0a9746f6b656e5f6964739405060708aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da347505583"
    "a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739103a66d656469756daa4350555f50494e4e454481a4747970"
    "65b0416c6c426c6f636b73436c656172656400"
)
BATCH = Batch(
    1.5,
    [
        BlockStored([1, -2], None, [5, 6, 7, 8], 2, None, "GPU"),
        BlockRemoved([3], "CPU_PINNED"),
        AllBlocksCleared(),
    ],
    0,
)
STORED = {
    "type": "BlockStored",
    "block_hashes": [1],
    "parent_block_hash": None,
    "token_ids": [5, 6],
    "block_size": 2,
    "lora_id": None,
}


def batch_of(*events: object) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


def test_the_structs_encode_to_sglangs_bytes() -> None:
    assert encode_batch(BATCH) == GOLDEN


def test_sglangs_bytes_decode_to_the_structs() -> None:
    assert decode_batch(GOLDEN) == BATCH


def test_the_optional_keys_follow_in_sglangs_order() -> None:
    stored = BlockStored([1], None, [5, 6], 2, None, "GPU", cache_salt="t", session_id="s", lora_name="a")
    raw = msgspec.msgpack.decode(encode_batch(Batch(0.0, [stored], 0)))[1][0]
    assert list(raw)[-4:] == ["medium", "cache_salt", "session_id", "lora_name"]
    assert len(raw) == 10


def test_hashes_take_msgpacks_shortest_form_over_all_of_int64() -> None:
    hashes = [(1 << 63) - 1, -(1 << 63), 0, -1]
    payload = encode_batch(Batch(0.0, [BlockRemoved(hashes, "GPU")], 0))
    assert b"\xcf\x7f" + b"\xff" * 7 in payload  # positive: uint64's code
    assert b"\xd3\x80" + b"\0" * 7 in payload
    assert decode_batch(payload).events == [BlockRemoved(hashes, "GPU")]


def test_a_missing_medium_means_gpu() -> None:
    stored, removed = decode_batch(batch_of(STORED, {"type": "BlockRemoved", "block_hashes": [1]})).events
    assert isinstance(stored, BlockStored)
    assert isinstance(removed, BlockRemoved)
    assert medium_of(stored) == medium_of(removed) == "GPU"


def test_keys_and_event_types_of_a_later_version_are_left_out() -> None:
    later = {**STORED, "colour": {"deep": ["red"]}}
    batch = decode_batch(batch_of(later, {"type": "BlockWeighed", "grams": 1}, {"type": "AllBlocksCleared"}))
    assert batch.events == [BlockStored([1], None, [5, 6], 2, None), AllBlocksCleared()]


@pytest.mark.parametrize("rank", [None, 3])
def test_the_rank_may_be_absent_or_nil(rank: int | None) -> None:
    assert decode_batch(msgspec.msgpack.encode([1, [], rank])).attn_dp_rank == rank
    assert decode_batch(msgspec.msgpack.encode([1, []])).attn_dp_rank is None


def test_bigrams_count_as_one_token_each() -> None:
    (event,) = decode_batch(batch_of({**STORED, "token_ids": [[5, 6], [6, 7]]})).events
    assert isinstance(event, BlockStored)
    assert event.token_ids == [(5, 6), (6, 7)]


def test_withheld_tokens_are_no_fault() -> None:
    assert len(decode_batch(batch_of({**STORED, "token_ids": []})).events) == 1


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        GOLDEN[:-1],
        GOLDEN + b"\0",
        msgspec.msgpack.encode({"events": []}),
        msgspec.msgpack.encode([1.5]),
        msgspec.msgpack.encode(["now", [], 0]),
        msgspec.msgpack.encode([1.5, [], "0"]),
        batch_of(7),
        batch_of({"block_hashes": [1]}),
        batch_of({"type": 7}),
        batch_of({"type": "BlockRemoved"}),
        batch_of({"type": "BlockRemoved", "block_hashes": [1 << 63]}),
        batch_of({"type": "BlockRemoved", "block_hashes": [b"hash"]}),
        batch_of({**STORED, "token_ids": [5, 6, 7]}),
        batch_of({**STORED, "token_ids": [5, -6]}),
        batch_of({**STORED, "token_ids": [5, -1 << 63]}),
        batch_of({**STORED, "token_ids": [5, [5, 6]]}),
        batch_of({**STORED, "token_ids": [[5, 6], [6, -7]]}),
        batch_of({**STORED, "token_ids": [[5, 6], [6, 7, 8]]}),
        batch_of({**STORED, "block_size": 0}),
        batch_of({**STORED, "medium": 3}),
        batch_of({"type": "BlockWeighed"}, {"type": "BlockRemoved"}),
    ],
)
def test_anything_else_is_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_batch(payload)


# -- the other forms ----------------------------------------------------------------------------------

# What SGLang 0.5.17 and 0.5.19 encode for BATCH above, and 0.5.19 for a salted store alone.
GOLDEN_ARRAY = bytes.fromhex(
    "93cb3ff80000000000009397ab426c6f636b53746f7265649201fec0940506070802c0a347505593ac426c6f636b52656d6f766564910"
    "3aa4350555f50494e4e454491b0416c6c426c6f636b73436c656172656400"
)
GOLDEN_SALTED = bytes.fromhex("98ab426c6f636b53746f7265649201fec0940506070802c0a347505581aa63616368655f73616c74a174")


def test_sglangs_arrays_decode_to_the_same_structs() -> None:
    assert decode_batch(GOLDEN_ARRAY) == BATCH


def test_an_arrays_salt_is_behind_its_fields() -> None:
    (event,) = decode_batch(batch_of(msgspec.Raw(GOLDEN_SALTED))).events
    assert event == BlockStored([1, -2], None, [5, 6, 7, 8], 2, None, "GPU", cache_salt="t")


@pytest.mark.parametrize("fields", [5, 6, 7])
def test_an_array_may_stop_where_the_rest_has_defaults(fields: int) -> None:
    array = ["BlockStored", [1], None, [5, 6], 2, None, "CPU_PINNED"][:fields]
    (event,) = decode_batch(batch_of(array)).events
    assert event == BlockStored([1], None, [5, 6], 2, None, "CPU_PINNED" if fields == 7 else None)
    assert decode_batch(batch_of(["BlockRemoved", [1]])).events == [BlockRemoved([1])]


def test_the_fields_of_a_group_are_vllms_and_stand_last() -> None:
    stored = BlockStored(
        [1], None, [5, 6], 2, None, "GPU", lora_name="a",
        group_idx=1, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=128,
    )  # fmt: skip
    removed = BlockRemoved([1], "GPU", group_idx=2)
    payload = encode_batch(Batch(0.0, [stored, removed], 0))
    raw = msgspec.msgpack.decode(payload)[1]
    assert list(raw[0])[-4:] == ["lora_name", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"]
    assert raw[1] == {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "group_idx": 2}
    assert decode_batch(payload).events == [stored, removed]
    assert not is_full(stored)
    assert not is_full(removed)


def test_group_0_and_no_group_are_full_kv() -> None:
    events = decode_batch(batch_of({**STORED, "group_idx": 0, "kv_cache_spec_kind": "full_attention"}, STORED)).events
    assert [is_full(event) for event in events if isinstance(event, BlockStored)] == [True, True]


def test_a_group_in_vllms_arrays_is_read_as_well() -> None:
    stored, removed = decode_batch(
        batch_of(
            ["BlockStored", [1], None, [5, 6], 2, None, "GPU", "a", None, 1, "sliding_window", 64],
            ["BlockRemoved", [1], "GPU", 1],
        )
    ).events
    assert stored == BlockStored(
        [1], None, [5, 6], 2, None, "GPU", lora_name="a",
        group_idx=1, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=64,
    )  # fmt: skip
    assert removed == BlockRemoved([1], "GPU", 1)


def test_a_nil_option_is_no_option() -> None:
    nils = {**STORED, "medium": "GPU", "cache_salt": None, "session_id": None, "lora_name": None, "group_idx": None}
    assert decode_batch(batch_of(nils)).events == [BlockStored([1], None, [5, 6], 2, None, "GPU")]


def test_one_batch_may_hold_every_form() -> None:
    batch = decode_batch(batch_of(STORED, ["BlockRemoved", [1], "GPU"], ["BlockWeighed", 1], ["AllBlocksCleared"]))
    assert batch.events == [BlockStored([1], None, [5, 6], 2, None), BlockRemoved([1], "GPU"), AllBlocksCleared()]


def test_what_later_versions_add_to_an_array_is_left_out() -> None:
    later = ["BlockStored", [1], None, [5, 6], 2, None, "GPU", None, [["x"]], None, None, None, "later", 7]
    assert decode_batch(batch_of(later, ["AllBlocksCleared", 1])).events == [
        BlockStored([1], None, [5, 6], 2, None, "GPU"),
        AllBlocksCleared(),
    ]


@pytest.mark.parametrize(
    "event",
    [
        [],
        [7],
        ["BlockStored", [1], None, [5, 6]],
        ["BlockStored", [1], None, [5, 6, 7], 2, None, "GPU"],
        ["BlockStored", [1], None, [5, 6], 2, None, "GPU", {"cache_salt": 7}],
        ["BlockStored", [1], None, [5, 6], 2, None, "GPU", 7],
        ["BlockRemoved"],
        ["BlockRemoved", [b"hash"], "GPU"],
    ],
)
def test_an_array_that_is_no_event_is_a_protocol_error(event: list[object]) -> None:
    with pytest.raises(ProtocolError):
        decode_batch(batch_of(event))


def test_the_forms_of_a_batch_can_be_told() -> None:
    superset = {**STORED, "medium": "GPU", "lora_name": None}
    assert forms_of(batch_of(STORED, {"type": "AllBlocksCleared"})) == {"map"}
    assert forms_of(batch_of({**STORED, "lora_name": "a"})) == {"map"}
    assert forms_of(batch_of(superset, ["AllBlocksCleared"])) == {"superset", "array"}
    assert forms_of(batch_of()) == set()
    with pytest.raises(ProtocolError):
        forms_of(b"\xc1")
