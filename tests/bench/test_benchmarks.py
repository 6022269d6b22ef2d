"""Each benchmark does the work that it claims to time. What is held is what it counts, never how long it took."""

from __future__ import annotations

import gc
import json
import sys
from array import array
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from sglcache.bench import (
    copy,
    death,
    estimate,
    events,
    hybrid,
    index,
    match,
    memory,
    rpc,
    rpc_clients,
    stall,
    start,
    storage,
    tiers,
)
from sglcache.bench.cli import bench
from sglcache.bench.harness import BenchError
from sglcache.errors import ConfigError, NoSpace

pytestmark = pytest.mark.daemons

BLOCK = 512


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Six requests: a conversation of three turns, one of another kind, the first again, and one of 16 tokens less."""
    lines = [(1024, [1, 2]), (1536, [1, 2, 3]), (2000, [1, 2, 3, 4]), (1024, [8, 9]), (1024, [1, 2]), (1008, [1, 2])]
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "".join(
            json.dumps({"timestamp": 0, "input_length": length, "output_length": 1, "hash_ids": ids}) + "\n"
            for length, ids in lines
        )
    )
    return path


@pytest.mark.parametrize("two_tiers", [False, True])
def test_memory_fills_the_pool_with_each_shape(two_tiers: bool) -> None:
    row = memory.run(memory.Options(num_pages=1024, page_size=4, two_tiers=two_tiers))
    assert [(shape["pages"], shape["nodes"]) for shape in row["shapes"]] == [
        (1024, 1024), (1024, 256), (1024, 16), (1024, 1),
    ]  # fmt: skip
    assert {shape["payload_bytes"] for shape in row["shapes"]} == {1024 * (16 + 4 * (1 + two_tiers) + 16)}
    assert row["node_bytes"] > 0


def test_index_counts_what_it_did(trace: Path) -> None:
    row = index.run(index.Options(trace, page_size=16, capacity_tokens=1 << 16, events=True))
    assert row["requests"] == 6
    assert row["tokens"] == 1024 + 1536 + 2000 + 1024 + 1024 + 1008
    assert row["hit_rate"] == round((1024 + 1536 + 1024 + 1008) / row["tokens"], 4)
    assert row["blocks"] == (2000 + 1024) // 16  # each page is told of once
    assert row["evicted_pages"] == row["copies"] == 0
    assert row["wire_bytes"] > 4 * row["blocks"]
    assert row["hit_requests"]["requests"] == 4
    assert row["miss_requests"]["requests"] == 2
    parts = sum(row[f"{part}_us"] for part in ("acquire", "commit", "release", "take_encode"))
    assert 0 < parts <= row["total_us"] + 0.3  # each is rounded
    assert gc.isenabled()


def test_index_without_events_tells_nothing(trace: Path) -> None:
    row = index.run(index.Options(trace, page_size=64, limit=3))
    assert (row["requests"], row["events"], row["hash"]) == (3, False, None)
    assert row["event_count"] == row["blocks"] == row["wire_bytes"] == row["batches"] == 0


def test_index_evicts_by_the_policy_that_is_named(tmp_path: Path) -> None:
    """Three prompts that share nothing, in room for two, and then the first again."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f'{{"input_length": 512, "hash_ids": [{number}]}}\n' for number in (1, 2, 3, 1)))
    words = ["index", "--trace", str(trace), "--page-size", "16", "--capacity-tokens", "1024", "--json"]
    for policy, hit_rate, evicted in (("lru", 0.0, 64), ("mru", 0.25, 32)):
        done = CliRunner().invoke(bench, [*words, "--policy", policy])
        assert done.exit_code == 0, done.output
        row = json.loads(done.output)
        assert (row["policy"], row["hit_rate"], row["evicted_pages"]) == (policy, hit_rate, evicted)


def test_index_has_tenants_in_turn(trace: Path) -> None:
    """Whose requests they are decides who pays, and of hits nothing where all have room."""
    rows = [index.run(index.Options(trace, page_size=16, capacity_tokens=1 << 16, tenants=n)) for n in (0, 1, 3)]
    assert [row["tenants"] for row in rows] == [0, 1, 3]
    assert len({row["hit_rate"] for row in rows}) == 1
    with pytest.raises(ConfigError, match="--tenants 64"):
        index.run(index.Options(trace, tenants=64))


def test_match_finds_everything_in_each_of_its_indexes() -> None:
    row = match.run(match.Options(pages=(1100, 5100), page_size=4, blocks=2, requests=10))
    small, large = row["sizes"]
    assert (small["cached_pages"], large["cached_pages"]) == (2 * match.FAMILY_PAGES, 10 * match.FAMILY_PAGES)
    assert large["nodes"] == 5 * small["nodes"] == 10 * match.FAMILY_PAGES // match.PART_PAGES
    assert row["requests"] == 20
    assert row["ratio"] > 0


def test_index_evicts_and_copies(trace: Path) -> None:
    row = index.run(
        index.Options(trace, page_size=16, capacity_tokens=2048, host_tokens=1 << 16, events=True, hash_name="sha256")
    )
    assert row["evicted_pages"] > 0
    assert row["copies"] > 0
    assert row["hit_rate"] == round((1024 + 1536 + 1024 + 1008) / row["tokens"], 4)  # from the host where need be


def test_index_slices_a_big_eviction(tmp_path: Path) -> None:
    driver = index.Driver(index.Index(index.IndexConfig(page_size=1, num_pages=5000)))
    for number in range(5000):
        lease = driver.acquire(np.uint32(number).tobytes()).lease
        driver.commit(lease)
        driver.release(lease)
    grant = driver.acquire(np.arange(10_000, 15_000, dtype=np.uint32).tobytes())
    assert len(grant.slots) == 5000 * 4
    assert driver.num_slices > 0
    with pytest.raises(NoSpace):
        driver.acquire(b"\0\0\0\0")


def test_index_refuses_a_pool_without_a_page(trace: Path) -> None:
    with pytest.raises(ConfigError, match="no page"):
        index.run(index.Options(trace, page_size=64, capacity_tokens=63))
    with pytest.raises(ConfigError, match="no request"):
        index.run(index.Options(trace, limit=0))


@pytest.mark.parametrize(
    ("matched", "reach", "end", "chunk", "page", "ends"),
    [
        (0, 0, 100, 0, 4, [100]),
        (0, 0, 100, 32, 4, [32, 64, 96, 100]),
        (0, 0, 96, 32, 4, [32, 64, 96]),
        (40, 40, 100, 32, 4, [64, 96, 100]),
        (64, 64, 100, 32, 4, [96, 100]),
        (0, 48, 100, 0, 4, [48, 100]),  # a branch is a part's end
        (16, 50, 100, 32, 4, [32, 48, 64, 96, 100]),
        (100, 100, 100, 32, 4, [100]),
        (0, 0, 12, 5, 4, [4, 8, 12]),  # parts are whole pages
        (0, 0, 8, 1, 4, [4, 8]),
    ],
)
def test_parts_end_at_chunks_branches_and_the_last_page(
    matched: int, reach: int, end: int, chunk: int, page: int, ends: list[int]
) -> None:
    assert hybrid.parts(matched, reach, end, chunk, page) == ends


@pytest.mark.parametrize(
    ("end", "window", "page", "floor"),
    [(100, 10, 1, 89), (100, 10, 4, 84), (12, 10, 4, 0), (8, 64, 4, 0), (96, 1, 4, 88)],
)
def test_a_whole_window_stays_in_front_of_the_last_token(end: int, window: int, page: int, floor: int) -> None:
    assert hybrid.floor(end, window, page) == floor
    assert floor == 0 or end - 1 - floor >= window


@pytest.mark.parametrize("kind", hybrid.KINDS)
@pytest.mark.parametrize("chunk_tokens", [0, 256])
def test_index_serves_every_kind_as_it_serves_full_kv(kind: str, chunk_tokens: int, trace: Path) -> None:
    """With room for all windows and states: only the last prompt ends where none of a state's is."""
    options = index.Options(
        trace, page_size=16, capacity_tokens=1 << 16, kind=kind, chunk_tokens=chunk_tokens, window=64, events=True
    )
    row = index.run(options)
    assert (row["kind"], row["requests"], row["chunk_tokens"]) == (kind, 6, chunk_tokens)
    last = 1008 if kind in ("full", "swa") else 768 if chunk_tokens else 0
    assert row["hit_rate"] == round((1024 + 1536 + 1024 + last) / row["tokens"], 4)
    assert row["full_reach"] == round((1024 + 1536 + 1024 + 1008) / row["tokens"], 4)
    assert row["blocks"] == (2000 + 1024) // 16  # of full KV, each page is told of once
    assert (row["window"], row["window_tokens"]) == ((64, 1 << 14) if kind in ("swa", "unified") else (0, 0))
    assert row["state_slots"] == (256 if kind in ("mamba", "unified") else 0)
    parts = sum(row[f"{part}_us"] for part in ("acquire", "extend", "commit", "release", "take_encode"))
    assert 0 < parts <= row["total_us"] + 0.4  # each is rounded
    assert (row["extend_us"] > 0) is bool(chunk_tokens)


def test_a_router_that_knows_full_kv_promises_too_much_and_one_that_knows_groups_does_not(trace: Path) -> None:
    base = index.Options(trace, page_size=16, capacity_tokens=1 << 16, chunk_tokens=256)
    row = estimate.run(estimate.Options(base, windows=(64,)))
    assert [each["kind"] for each in row["kinds"]] == list(hybrid.KINDS)
    full, swa, *others = row["kinds"]
    for each in (full, swa):
        assert each["hit_rate"] == each["estimated"] == each["with_groups"] > 0
        assert each["wrong_requests"] == 0
    for each in others:
        assert each["hit_rate"] == each["with_groups"] < each["estimated"] == full["estimated"]
        assert (each["wrong_requests"], each["mean_over"]) == (round(1 / 6, 4), 1008 - 768)
        assert (each["too_few"], each["wrong_with_groups"]) == (0, 0)


def test_index_beside_full_kv_alone(trace: Path) -> None:
    words = [
        "index",
        "--trace",
        str(trace),
        "--kind",
        "unified",
        "--chunk-tokens",
        "256",
        "--beside-full",
        "--pairs",
        "1",
    ]
    done = CliRunner().invoke(bench, [*words, "--page-size", "16", "--json"])
    assert done.exit_code == 0, done.output
    row = json.loads(done.output)
    assert (row["ours"][0]["kind"], row["full"][0]["kind"]) == ("unified", "full")
    assert row["hit_rate"]["ours"] < row["hit_rate"]["full"]
    assert row["full_ratios"]["total_us"]["ratio"] > 0
    assert "ratios" not in row


def peer(**fields: object) -> str:
    row = {"requests": 6, "page_size": 64, "events": False, "hit_rate": 0.5, "total_us": 100.0, "p50_us": 90.0}
    return f"echo '{json.dumps({**row, **fields})}'"


def test_index_against_a_peer(trace: Path) -> None:
    ours = [sys.executable, "-c", f"print('{json.dumps({'requests': 6, 'page_size': 64, 'events': False})[:-1]}"
            ', "hit_rate": 0.4, "total_us": 25.0, "p50_us": 30.0}\')']  # fmt: skip
    row = index.against(ours, peer(), 2)
    assert row["hit_rate"] == {"ours": 0.4, "peer": 0.5}
    assert {field: each.ratio for field, each in row["ratios"].items()} == {"total_us": 4.0, "p50_us": 3.0}
    with pytest.raises(ConfigError, match="page_size = 16"):
        index.against(ours, peer(page_size=16), 1)
    with pytest.raises(BenchError):
        index.against(ours, "false", 1)


def test_stall_runs_every_part() -> None:
    row = stall.run(stall.Options(num_nodes=200, requests=20, two_tiers=True, repeats=2))
    assert row["nodes"] == 201
    kinds = {kind for table in row["parts"].values() for kind in table}
    assert kinds == {"acquire", "commit", "release", "cut", "drain", "collect", "copy_done", "step", "clear"}
    assert row["parts"]["fill"]["acquire"]["calls"] == 200
    assert row["raw_max_us"] >= row["max_us"] > 0


def test_a_call_counts_with_its_quickest_run() -> None:
    runs = [array("d", [1.0, 9.0, 3.0]), array("d", [2.0, 2.0, 8.0])]
    assert stall.quickest(runs, aligned=True).tolist() == [1.0, 2.0, 3.0]
    assert stall.quickest(runs, aligned=False).tolist() == [2.0, 2.0, 8.0]
    assert stall.quickest([*runs, array("d", [5.0])], aligned=True).tolist() == [5.0]


def test_the_echo_answers_frames_however_they_arrive() -> None:
    class Transport:
        def __init__(self) -> None:
            self.written = b""

        def write(self, data: bytes) -> None:
            self.written += data

    transport = Transport()
    echo = rpc.Echo({20: (rpc.frame(8), 0.0), 30: (rpc.frame(9), 1e-6)})
    echo.connection_made(transport)  # type: ignore[arg-type]
    sent = rpc.frame(20) + rpc.frame(30) + rpc.frame(20)
    for start_at in range(0, len(sent), 7):
        echo.data_received(sent[start_at : start_at + 7])
    assert transport.written == rpc.frame(8) + rpc.frame(9) + rpc.frame(8)
    assert rpc.frame(8) == b"\0\0\0\4\0\0\0\0"


def test_rpc_measures_a_real_daemon() -> None:
    row = rpc.run(rpc.Options(tokens=64, pairs=2, operations=5, warm_up=2))
    assert (len(row["blocks_p50_us"]), len(row["echo_blocks_p50_us"])) == (2, 2)
    assert row["frame_bytes"][0] > 64 * 4
    assert row["frame_bytes"][1] > 64 // 16 * 4
    assert row["ratio"] > 0
    assert row["busy_echo_p50_us"] > row["index_acquire_us"] > 0


def test_rpc_measures_several_clients_at_once() -> None:
    row = rpc_clients.run(rpc_clients.Options(clients=(1, 3), tokens=64, pairs=1, block_s=0.05))
    assert [each["clients"] for each in row["rows"]] == [1, 3]
    for each in row["rows"]:
        assert each["per_s"] > 0
        assert 0 < each["p50_us"] <= each["p99_us"] <= each["p999_us"] <= each["max_us"]
        assert 0 < each["echo_p50_us"] <= each["echo_max_us"]


def test_death_measures_real_deaths_and_finds_every_page_free() -> None:
    row = death.run(death.Options(samples=3, leases=2, lease_tokens=64))
    assert (row["pages"], row["total_ms"]["samples"]) == (8, 3)
    assert 0 < row["freed_ms"]["p50"] <= row["total_ms"]["p50"] <= row["total_ms"]["max"]
    assert row["heard_ms"]["p50"] < row["total_ms"]["max"]


def test_start_measures_real_starts() -> None:
    row = start.run(start.Options(pool_gib=1 / 1024, repeats=2))
    assert row["pool_bytes"] == 1 << 20
    assert len(row["starts_s"]) == 2


def test_start_with_a_store_finds_all_of_it() -> None:
    row = start.run(start.Options(pool_gib=1 / 1024, repeats=1, stored_pages=300))
    assert row["stored_pages"] == 300
    assert row["told_median_s"] >= row["stored_median_s"] > 0
    assert row["stored_ratio"] > 0


def test_a_daemon_that_cannot_start_says_why() -> None:
    with pytest.raises(BenchError, match=r"pool\.page_size"), start.Daemon(["pool.page_size=0"]) as daemon:
        daemon.wait_healthy()


def test_the_command_line_prints_json_or_a_table(trace: Path) -> None:
    runner = CliRunner()
    words = ["index", "--trace", str(trace), "--events"]
    done = runner.invoke(bench, [*words, "--json"], standalone_mode=False)
    assert done.exception is None
    row = json.loads(done.output)
    assert row["requests"] == 6
    assert row["machine"]["cores"] >= 1
    table = runner.invoke(bench, words, standalone_mode=False)
    assert table.exception is None
    assert "take_encode_us" in table.output


def test_the_command_line_compares_with_a_peer(trace: Path) -> None:
    words = ["index", "--trace", str(trace), "--peer", peer(cpu_us=50.0), "--pairs", "1"]
    done = CliRunner().invoke(bench, [*words, "--json"], standalone_mode=False)
    assert done.exception is None
    row = json.loads(done.output)
    assert set(row["ratios"]) == {"total_us", "p50_us", "cpu_us"}
    assert row["ratios"]["total_us"]["other"] == 100.0
    table = CliRunner().invoke(bench, words, standalone_mode=False)
    assert table.exception is None
    assert "total_us" in table.output


@pytest.mark.timeout(240)  # four daemons and as many subscribers
def test_events_loses_nothing_and_finds_every_commit() -> None:
    options = events.Options(prompts=12, prompt_tokens=256, pages=(2048,), limit=10)
    row = events.run(options)
    throughput = row["throughput"]
    # 12 prompts of 16 pages: stored in both tiers, removed where a quarter, or half of them, has room.
    assert throughput["losses"] == 0
    assert throughput["blocks"] >= 12 * 16 * 2 + (12 - 4) * 16
    assert 8 < throughput["bytes_per_block"] < 200
    assert row["latency"]["commits"] == row["latency"]["ms"].samples == 10
    late = row["snapshot of 2,048 pages"]
    assert late["snapshots"] == 1
    assert late["pages"] >= 2048
    assert late["bytes"] > 2048 * 16


def test_storage_puts_and_gets_what_it_times(tmp_path: Path) -> None:
    row = storage.run(storage.Options(page_bytes=(4 << 10, 64 << 10), total_bytes=256 << 10, pairs=2, folder=tmp_path))
    assert [(case["store"], case["pages"]) for case in row["cases"]] == [("file", 64), ("file", 4)]
    assert all(case["put_ratio"] > 0 and case["get_ratio"] > 0 for case in row["cases"])
    assert list(tmp_path.iterdir()) == []


def test_copy_moves_what_it_times_in_every_shape_and_direction() -> None:
    options = copy.Options((1, 2), num_layers=4, num_kv_heads=2, head_dim=64, threads=2, pairs=2)
    row = copy.run(options)
    assert (row["threads"], row["page_bytes"]) == (2, 16 * 4 * 2 * 2 * 64 * 2)
    assert [(case["mib"], case["slots"]) for case in row["cases"]] == [
        (size, shape) for size in (1, 2) for shape in copy.SHAPES
    ]
    assert all(case[name]["ratio"] > 0 for case in row["cases"] for name in ("backup", "load"))
    assert [case["both"]["ratio"] > 0 for case in row["both_directions"]] == [True, True]
    assert all(case["first_ms"] <= case["last_ms"] for case in row["first_layer"])
    assert row["half"]["load"]["half_at_kib"] <= 2048
    with pytest.raises(BenchError, match="give --size more"):
        copy.measure(options._replace(sizes_mib=(1,), page_size=4096))


def test_a_plain_copy_does_not_reach_over_what_was_pinned_as_one() -> None:
    assert copy.pieces(10, 100, 0) == [(10, 100)]
    assert copy.pieces(0, 100, 40) == [(0, 40), (40, 40), (80, 20)]
    assert copy.pieces(100, 100, 40) == [(100, 20), (120, 40), (160, 40)]
    assert copy.pieces(80, 40, 40) == [(80, 40)]


def test_copy_names_pages_once_in_every_shape_and_looks_at_them(monkeypatch: pytest.MonkeyPatch) -> None:
    bench_ = copy.Bench(copy.Options((1,), num_layers=4, num_kv_heads=2, head_dim=64))
    for shape in copy.SHAPES:
        slots = bench_.slots(30, shape)
        assert len(set(slots.tolist())) == 30
        assert 0 <= slots.min() <= slots.max() < bench_.geometry.num_pages
        assert bench_.prove(30, shape) == 4 * 30
    # An engine that says it is done, and has moved nothing.
    monkeypatch.setattr(bench_.engine, "submit", lambda transfer: bench_._done.put((transfer.ticket, True, None)))
    with pytest.raises(BenchError, match="is not what was copied"):
        bench_.prove(30, "scattered")
    bench_.close()


def test_tiers_loads_what_only_the_host_has_and_writes_through() -> None:
    row = tiers.run(tiers.Options(64, 16, 3, 1, 8, pairs=2, operations=5, compute_ms=1))
    load = row["load_back"]
    assert 0 < load["answer_ms"] <= load["first_layer_ms"] <= load["last_layer_ms"]
    assert load["layers"] == 3
    assert all(row["write_through"][name]["ratio"] > 0 for name in ("acquire", "commit"))
