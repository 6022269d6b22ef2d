"""What a page holds and where its bytes lie: the numbers, the laws of regions, and what is refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from forms import forms, state_geometries
from hypothesis import given
from hypothesis import strategies as st

from sglcache.config import load
from sglcache.errors import ConfigError
from sglcache.memory.geometry import (
    ITEM_BYTES,
    STATE_ALIGN,
    CompanionForm,
    Form,
    Geometry,
    Placement,
    Plane,
    Region,
    StateGeometry,
    companions_of,
    form_from_wire,
    moves,
)
from sglcache.units import Tier
from sglcache.wire import control
from sglcache.wire.control import StateForm

LLAMA_8B = Geometry(page_size=16, num_pages=1000, num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
DEEPSEEK_V3 = Geometry(
    page_size=64,
    num_pages=1000,
    num_layers=61,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    dtype="bfloat16",
    num_shards=8,
    host_pages=10,
)


def test_a_page_of_llama_8b_is_two_mebibytes() -> None:
    assert (LLAMA_8B.layer_bytes, LLAMA_8B.token_bytes, LLAMA_8B.page_bytes) == (4096, 128 << 10, 2 << 20)
    assert LLAMA_8B.pool_bytes == 1000 * (2 << 20)
    assert LLAMA_8B.host_pool_bytes == 0
    assert LLAMA_8B.planes == (Plane("k", 8, 128, 2048), Plane("v", 8, 128, 2048))


def test_shards_share_the_heads_and_have_all_pages() -> None:
    sharded = replace(LLAMA_8B, num_shards=4, host_pages=10)
    assert sharded.shard_heads == 2
    assert sharded.page_bytes * 4 == LLAMA_8B.page_bytes
    assert sharded.pool_bytes * 4 == LLAMA_8B.pool_bytes
    assert sharded.host_pool_bytes == 10 * sharded.page_bytes
    assert (sharded.num_parts, sharded.num_replicas) == (4, 1)
    assert sharded.pairs(Tier.DEVICE, Tier.HOST) == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_more_shards_than_heads_share_a_head_with_their_neighbours() -> None:
    """As SGLang: shard i of 8 has head i * 2 // 8 of 2. The host keeps each once."""
    shared = replace(LLAMA_8B, num_kv_heads=2, num_shards=8)
    assert (shared.shard_heads, shared.num_parts, shared.num_replicas) == (1, 2, 4)
    assert shared.pairs(Tier.DEVICE, Tier.HOST) == [(0, 0), (4, 1)]
    assert shared.pairs(Tier.HOST, Tier.DEVICE) == [(i * 2 // 8, i) for i in range(8)]


def test_latents_are_one_row_which_every_shard_has_and_the_host_once() -> None:
    assert DEEPSEEK_V3.planes == (Plane("kv", 1, 576, 1152),)
    assert (DEEPSEEK_V3.layer_bytes, DEEPSEEK_V3.token_bytes, DEEPSEEK_V3.page_bytes) == (1152, 70_272, 4_497_408)
    assert replace(DEEPSEEK_V3, num_shards=1).page_bytes == DEEPSEEK_V3.page_bytes
    assert DEEPSEEK_V3.pairs(Tier.DEVICE, Tier.HOST) == [(0, 0)]
    assert DEEPSEEK_V3.pairs(Tier.HOST, Tier.DEVICE) == [(0, shard) for shard in range(8)]


def test_k_and_v_may_differ_in_width() -> None:
    wide = Geometry(page_size=4, num_pages=8, num_layers=2, num_kv_heads=3, head_dim=24, v_head_dim=16, dtype="float32")
    assert [plane.token_bytes for plane in wide.planes] == [3 * 24 * 4, 3 * 16 * 4]
    assert wide.page_bytes == 4 * 2 * 3 * (24 + 16) * 4


@pytest.mark.parametrize(("dtype", "item"), [("float16", 2), ("bfloat16", 2), ("float32", 4), ("float8_e4m3fn", 1)])
def test_an_element_takes_what_its_type_takes(dtype: str, item: int) -> None:
    assert replace(LLAMA_8B, dtype=dtype).page_bytes == (1 << 20) * item


# -- regions ------------------------------------------------------------------------------------------------


def test_a_page_first_page_is_one_run_and_a_layer_of_it_one_run_inside() -> None:
    placement = LLAMA_8B.placement()
    page, layer = 2 << 20, 64 << 10
    assert moves(placement, placement) == [(Region(0, page, page),) * 2]
    assert placement.ranges(3) == [(3 * page, 4 * page)]
    assert placement.ranges(3, layer=5) == [(3 * page + 5 * layer, 3 * page + 6 * layer)]


def test_a_layer_first_plane_of_a_layer_is_one_array() -> None:
    placement = replace(LLAMA_8B, layout="layer_first").placement()
    piece = 32 << 10  # 16 tokens' K of one layer
    assert placement.layers[5] == (Region(10_000 * piece, piece, piece), Region(11_000 * piece, piece, piece))
    assert placement.ranges(3, layer=5) == [(10_003 * piece, 10_004 * piece), (11_003 * piece, 11_004 * piece)]
    assert len(placement.ranges(3)) == 64
    with pytest.raises(ConfigError, match="lie apart, layer by layer") as caught:
        placement.page()
    assert caught.value.path == "pool.layout"


@given(geometry=forms())
def test_the_pieces_of_all_pages_are_all_of_the_pool_and_none_is_there_twice(geometry: Form) -> None:
    for tier in (Tier.DEVICE, Tier.HOST):
        placement = geometry.placement(tier)
        ranges = sorted(
            (region.start(page), region.start(page) + region.num_bytes)
            for regions in placement.layers
            for region in regions
            for page in range(placement.num_pages)
        )
        assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges)][: len(ranges)]
        assert placement.num_bytes == placement.num_pages * geometry.page_bytes
        assert placement.num_bytes == (ranges[-1][1] if ranges else 0)


@given(geometry=forms(), data=st.data())
def test_moves_are_every_piece_once_in_either_pool_whole_or_by_layer(geometry: Form, data: st.DataObject) -> None:
    device, host = geometry.placement(Tier.DEVICE), geometry.placement(Tier.HOST)
    layers = list(range(geometry.num_layers))
    chosen = data.draw(st.none() | st.sets(st.sampled_from(layers or [0])).map(sorted)) if layers else None
    wanted = range(geometry.num_layers) if chosen is None else chosen
    found = moves(device, host, chosen)
    assert all(src.num_bytes == dst.num_bytes for src, dst in found)
    for side, placement in enumerate((device, host)):
        pages = range(placement.num_pages)
        told = [
            {at for move in found for at in range(move[side].start(p), move[side].start(p) + move[side].num_bytes)}
            for p in pages
        ]
        for p in pages:
            pieces = {at for layer in wanted for start, stop in placement.ranges(p, layer) for at in range(start, stop)}
            assert told[p] == pieces
            assert sum(move[side].num_bytes for move in found) == len(pieces)
    if geometry.layout == geometry.host_layout == "page_first" and chosen is None:
        assert len(found) == (1 if layers else 0)


def test_what_adjoins_in_one_page_only_is_not_joined() -> None:
    """A buffer that neither layout makes: the second piece begins where the first ends, and its pages lie elsewhere."""
    odd = Placement(2, ((Region(0, 100, 4), Region(4, 8, 4)),))
    assert moves(odd, odd) == [(region, region) for region in odd.layers[0]]
    assert odd.ranges(1) == [(100, 104), (12, 16)]


def test_pools_of_other_pieces_are_not_copied() -> None:
    with pytest.raises(ValueError, match="pages of 8 bytes to pages of 16"):
        moves(Placement.whole(4, 8), Placement.whole(4, 16))
    with pytest.raises(ValueError, match="other pieces"):
        moves(Placement.of("page_first", 4, 2, [4]), Placement.of("page_first", 4, 1, [8]))


# -- other resources ----------------------------------------------------------------------------------------


QWEN3_NEXT = StateGeometry(
    num_pages=100,
    num_layers=36,
    states=(StateForm("conv", (8192, 3), "bfloat16"), StateForm("ssm", (32, 128, 128), "float32")),
    num_shards=4,
    host_pages=50,
)


def test_a_slot_of_states_has_the_arrays_of_every_layer_and_shards_split_the_first_axis() -> None:
    whole = replace(QWEN3_NEXT, num_shards=1)
    assert whole.pieces == (8192 * 3 * 2, 32 * 128 * 128 * 4)
    assert whole.page_bytes == 36 * (49_152 + 2_097_152)
    assert QWEN3_NEXT.shard_shape(QWEN3_NEXT.states[0]) == (2048, 3)
    assert QWEN3_NEXT.page_bytes * 4 == whole.page_bytes
    assert QWEN3_NEXT.pairs(Tier.DEVICE, Tier.HOST) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert QWEN3_NEXT.host_pool_bytes == 50 * QWEN3_NEXT.page_bytes


@given(geometry=state_geometries())
def test_a_state_begins_where_its_elements_may_whatever_stands_before_it(geometry: StateGeometry) -> None:
    for tier in (Tier.DEVICE, Tier.HOST):
        for regions in geometry.placement(tier).layers:
            for region, state in zip(regions, geometry.states, strict=True):
                item = ITEM_BYTES[state.dtype]
                exact = math.prod(geometry.shard_shape(state)) * item
                assert region.offset % STATE_ALIGN == region.page_stride % STATE_ALIGN == 0
                assert exact <= region.num_bytes < exact + STATE_ALIGN


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"num_pages": 0}, "mamba.num_pages"),
        ({"num_layers": 0}, "mamba.num_layers"),
        ({"num_shards": 5}, "mamba.states"),
        ({"states": (StateForm("a", (4,), "int8"),)}, "mamba.states"),
        ({"states": (StateForm("a", (), "float32"),)}, "mamba.states"),
        ({"states": (StateForm("a", (1 << 20, 1 << 10), "float32"),)}, "mamba.num_layers"),
    ],
)
def test_a_form_of_states_that_cannot_be_is_refused_by_its_key(changes: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError, match=path) as caught:
        replace(QWEN3_NEXT, **changes)
    assert caught.value.path == path


def test_pages_without_layers_have_no_bytes_and_are_pages_all_the_same() -> None:
    names = replace(LLAMA_8B, num_layers=0, host_pages=10)
    assert (names.page_bytes, names.pool_bytes, names.num_pages, names.load_layers) == (0, 0, 1000, 1)
    for tier in Tier.DEVICE, Tier.HOST:
        placement = names.placement(tier)
        assert placement.page() == Region(0, 0, 0)
        assert placement.ranges(3) == []
    assert LLAMA_8B.load_layers == 32


# -- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"page_size": 0}, "pool.page_size"),
        ({"num_pages": 0}, "pool.num_pages"),
        ({"num_pages": 1 << 31}, "pool.num_pages"),
        ({"num_layers": -1}, "pool.num_layers"),
        ({"num_kv_heads": 0}, "pool.num_kv_heads"),
        ({"num_shards": 3}, "pool.num_shards"),
        ({"num_shards": 12}, "pool.num_shards"),
        ({"head_dim": 0}, "pool.head_dim"),
        ({"v_head_dim": -1}, "pool.v_head_dim"),
        ({"host_pages": -1}, "pool.host_pages"),
        ({"dtype": "int8"}, "pool.dtype"),
        ({"layout": "head_first"}, "pool.layout"),
        ({"host_layout": "page_head"}, "host.layout"),
        ({"kv_lora_rank": 512}, "pool.kv_lora_rank"),
        ({"page_size": 1 << 20}, "pool.page_size"),
    ],
)
def test_a_form_that_cannot_be_is_refused_by_its_key(changes: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError, match=path) as caught:
        replace(LLAMA_8B, **changes)
    assert caught.value.path == path


# -- from a configuration -----------------------------------------------------------------------------------


LATENTS = ["pool.kv_lora_rank=512", "pool.qk_rope_head_dim=64"]


def of(*overrides: str) -> Geometry:
    return Geometry.of(load(None, overrides))


def test_a_size_is_of_a_shards_pool_and_of_all_the_hosts_and_rounds_down_to_pages() -> None:
    heads = ["pool.num_layers=32", "pool.num_kv_heads=8", "pool.head_dim=128", "pool.num_shards=4"]
    found = of(*heads, "pool.size=1 GB", "host.size=8 GiB")
    assert found.page_bytes == 512 << 10
    assert found.num_pages == 10**9 // (512 << 10)
    assert found.host_pages == (8 << 30) // (4 * (512 << 10))
    latents = of(*LATENTS, "pool.num_shards=4", "pool.size=1 GB", "host.size=8 GiB")
    assert latents.host_pages == (8 << 30) // latents.page_bytes, "the host keeps one of four replicas"
    assert of("pool.size=1 MiB", "host.pool_ratio=0.5").host_pages == of("pool.size=1 MiB").num_pages // 2
    assert of("host.size=0 B").host_pages == 0


@pytest.mark.parametrize(
    ("overrides", "path", "words"),
    [
        (["pool.size=4095 B"], "pool.size", 'hold 0 pages of 4,096 bytes in each shard; write "4096 B" to'),
        (["host.size=1 kB"], "host.size", "hold 0 pages of 4,096 bytes of all parts"),
        (["pool.num_tokens=34359738352", "host.pool_ratio=2"], "host.pool_ratio", "lower host.pool_ratio"),
    ],
)
def test_a_size_that_holds_no_pages_or_too_many_is_told_with_the_numbers(
    overrides: list[str], path: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        of(*overrides)
    assert caught.value.path == path


def test_every_key_of_the_form_reaches_it() -> None:
    found = of("pool.v_head_dim=16", "pool.layout=layer_first", "host.layout=page_first", "pool.dtype=float8_e5m2")
    assert (found.head_dim, found.v_head_dim, found.layout, found.host_layout) == (32, 16, "layer_first", "page_first")
    assert of("host.layout=layer_first").host_layout == "layer_first"
    assert found.dtype == "float8_e5m2"
    latents = of(*LATENTS, "pool.num_shards=3")
    assert (latents.kv_lora_rank, latents.qk_rope_head_dim, latents.head_dim, latents.num_parts) == (512, 64, 576, 1)


WINDOW = ["window.size=100", "window.num_layers=3"]
STATES = "{name = 'conv', shape = [8, 3], dtype = 'float16'}, {name = 'ssm', shape = [4, 5], dtype = 'float32'}"
MAMBA = ["mamba.num_layers=5", f"mamba.states=[{STATES}]", "mamba.num_slots=40"]


def companions(*overrides: str) -> tuple[CompanionForm, ...]:
    config = load(None, overrides)
    return companions_of(config, Geometry.of(config))


def test_a_model_without_companions_has_none() -> None:
    assert companions() == ()


def test_a_window_is_as_the_pool_where_it_does_not_say_and_a_quarter_of_it() -> None:
    (window,) = companions(*WINDOW, "pool.v_head_dim=16", "pool.layout=layer_first", "window.layers=[0, 2, 4]")
    full = of("pool.v_head_dim=16", "pool.layout=layer_first")
    quarter = {"num_pages": full.num_pages // 4, "host_pages": full.host_pages // 4}
    assert window == CompanionForm("window", replace(full, num_layers=3, **quarter), 100, 0, (0, 2, 4))
    assert window.window_pages == 7


def test_a_window_may_have_another_row_and_another_size() -> None:
    pool = ["pool.num_kv_heads=4", "pool.num_shards=4", "host.pool_ratio=0.5"]
    row = ["window.num_kv_heads=2", "window.head_dim=64", "window.v_head_dim=16", "window.dtype=bfloat16"]
    (window,) = companions(*pool, *WINDOW, *row, "window.num_tokens=1000", "window.host_tokens=3000")
    form = window.form
    assert isinstance(form, Geometry)
    assert (form.num_kv_heads, form.head_dim, form.v_head_dim, form.dtype) == (2, 64, 16, "bfloat16")
    assert (form.num_pages, form.host_pages, form.num_parts) == (62, 187, 2)
    (window,) = companions(*pool, *WINDOW, *row, "window.bytes=1 MB")
    assert window.form.num_pages == 10**6 // window.form.page_bytes
    assert window.form.host_pages == window.form.num_pages // 2, "in proportion"


def test_a_window_beside_latents_has_latents_or_heads_of_its_own() -> None:
    (window,) = companions(*LATENTS, *WINDOW, "pool.num_shards=3")
    assert isinstance(window.form, Geometry)
    assert (window.form.is_latent, window.form.num_parts) == (True, 1)
    (window,) = companions(*LATENTS, *WINDOW, "window.num_kv_heads=3", "window.head_dim=8", "pool.num_shards=3")
    assert (window.form.is_latent, window.form.num_parts) == (False, 3)


def test_states_have_slots_by_number_or_bytes_and_on_the_host_in_proportion() -> None:
    (mamba,) = companions(*MAMBA, "pool.num_kv_heads=2", "pool.num_shards=2", "pool.layout=layer_first")
    states = (StateForm("conv", (8, 3), "float16"), StateForm("ssm", (4, 5), "float32"))
    form = StateGeometry(40, 5, states, "layer_first", 2, 80, "page_first")
    assert mamba == CompanionForm("mamba", form, 0, 1024)
    (by_bytes,) = companions(*MAMBA[:2], "mamba.bytes=10 kB", "mamba.host_slots=3", "mamba.interval=32")
    assert (by_bytes.form.num_pages, by_bytes.form.host_pages, by_bytes.interval) == (10**4 // (5 * 128), 3, 32)
    (alone,) = companions(*MAMBA, "host.pool_ratio=0")
    assert alone.form.host_pages == 0


def test_a_model_with_both_has_the_window_first() -> None:
    assert [each.kind for each in companions(*MAMBA, *WINDOW)] == ["window", "mamba"]


@pytest.mark.parametrize(
    ("overrides", "path", "words"),
    [
        (
            [*WINDOW, "pool.num_tokens=160"],
            "window.num_tokens",
            r"a quarter of \[pool\]'s 10: that is 2 pages of 16 tokens",
        ),
        (
            [*WINDOW, "window.num_tokens=99"],
            "window.num_tokens",
            "99 tokens: that is 6 pages .* takes 7; write .* = 112",
        ),
        ([*WINDOW, "window.bytes=40 kB"], "window.bytes", "40,000 bytes: that is 6 pages"),
        (
            [*WINDOW, "window.bytes=4 B"],
            "window.bytes",
            r"4 bytes: that is 0 pages of .* takes 7; write window\.bytes = \"43008 B\" or more",
        ),
        ([*WINDOW, "window.host_tokens=100"], "window.host_tokens", r"6 pages .*; write window\.host_tokens = 112"),
        ([*WINDOW, "host.num_tokens=64"], "window.host_tokens", "4 / 65,536 of 16,384 on the device: that is 1 page"),
        ([*WINDOW, "window.num_tokens=99999999999"], "window.num_tokens", "more than a slot number"),
        ([*WINDOW, "window.head_dim=65536", "pool.num_kv_heads=65536"], "pool.num_kv_heads", "bytes of a token"),
        ([*MAMBA[:2], "mamba.bytes=639 B"], "mamba.bytes", 'that is 0 slots of 640 .*; write mamba.bytes = "1280 B"'),
        ([*MAMBA, "host.num_tokens=16"], "mamba.host_slots", "that is 0 slots; write mamba.host_slots = 1"),
        (
            [*MAMBA, "mamba.num_layers=4096", "mamba.states=[{name='a',shape=[999999],dtype='float32'}]"],
            "mamba.num_l",
            "write smaller states",
        ),
    ],
)
def test_a_companion_that_holds_too_little_or_cannot_be_is_told_by_its_key(
    overrides: list[str], path: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        companions(*overrides)
    assert caught.value.path.startswith(path)
    assert caught.value.path in caught.value.message


# -- on the wire --------------------------------------------------------------------------------------------


@given(geometry=forms())
def test_it_survives_the_wire(geometry: Form) -> None:
    frame = msgspec.msgpack.decode(control.encode(geometry.to_wire()), type=control.Geometry | control.StateGeometry)
    assert form_from_wire(frame) == geometry
    assert math.prod((geometry.num_shards, geometry.pool_bytes)) == geometry.placement().num_bytes * geometry.num_shards


@given(geometry=forms())
def test_its_facts_are_json_and_say_it_all(geometry: Form) -> None:
    facts = json.loads(json.dumps(geometry.facts()))
    if "states" in facts:
        facts["states"] = tuple(StateForm(**{**each, "shape": tuple(each["shape"])}) for each in facts["states"])
    assert type(geometry)(**facts) == geometry


@pytest.mark.parametrize("module", ["geometry", "mapping", "rings"])
def test_sizes_and_rings_need_no_torch(module: str) -> None:
    code = f"import sys, sglcache.memory.{module}; sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
