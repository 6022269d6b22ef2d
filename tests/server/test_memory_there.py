"""Pools that this machine can't have are refused at the start, with what would do, not hours later by the kernel."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglcache.config import OTHER_WORDS, Config, load, parse, parse_override
from sglcache.errors import ConfigError
from sglcache.server import room
from sglcache.server.room import Limit, Machine, Room
from sglcache.units import Tier

GIB = 1 << 30
FOUR_RANKS = Path(__file__).parents[2] / "configs" / "dp2-pp2.toml"
PLENTY = Limit(1 << 50, "RAM")


def weighed(*overrides: str, file: Path | None = None) -> Room:
    return room.weigh(load(file, overrides))


def test_all_pools_of_all_ranks_count() -> None:
    four = weighed(file=FOUR_RANKS)
    assert (four.device_bytes, four.host_bytes, four.ram_bytes) == (3.5 * GIB, 7 * GIB, 10.5 * GIB)
    shards = weighed("pool.num_kv_heads=2", "pool.num_shards=2", "pool.num_tokens=160", "host.num_tokens=80")
    assert shards.ram_bytes == (160 + 80) * 2 * 2 * 2 * 32 * 2
    assert weighed("pool.device=cuda").ram_bytes == weighed().host_bytes


def test_replicas_count_each_on_the_device_and_once_on_the_host() -> None:
    latents = weighed("pool.kv_lora_rank=512", "pool.qk_rope_head_dim=64", "pool.num_shards=8", "pool.num_tokens=16")
    page = 16 * 2 * 576 * 2
    assert (latents.device_bytes, latents.host_bytes) == (8 * page, 2 * page)
    shared = weighed("pool.num_kv_heads=2", "pool.num_shards=8", "pool.num_tokens=16")
    assert (shared.device_bytes, shared.host_bytes) == (8 * 4096, 2 * 2 * 4096)


def test_what_decides_is_told_with_its_value() -> None:
    def bounds(*overrides: str) -> list[str]:
        (rank,) = weighed(*overrides).ranks
        return [tier.bound for tier in rank.tiers]

    assert bounds() == ["pool.num_tokens = 1048576", "host.pool_ratio = 2.0"]
    assert bounds("pool.size=1 GB", "host.num_tokens=64") == ['pool.size = "1 GB"', "host.num_tokens = 64"]
    assert bounds("host.size=1 GiB")[1] == 'host.size = "1 GiB"'
    assert len(bounds("host.pool_ratio=0")) == 1


def test_a_stages_error_is_told_by_its_stage() -> None:
    with pytest.raises(ConfigError, match=r"^parallel\.stages\.1\.size: 1 bytes hold 0 pages") as caught:
        weighed("parallel.pp_size=2", "parallel.stages=[{}, {size = '1 B'}]")
    assert caught.value.path == "parallel.stages.1.size"


# -- refusals -----------------------------------------------------------------------------------------------


def test_too_little_is_told_with_all_numbers_and_the_remedy() -> None:
    four = weighed(file=FOUR_RANKS)
    rows = sum(rank.geometry.host_pages for rank in four.ranks) * (8 + 32 + 4 * 16 + 2 * 64 + 16)
    daemon = ((50 + 4 * (60 + 64)) << 20) + rows
    assert four.daemon_bytes == daemon
    four.refuse(Machine(Limit(int(10.5 * GIB) + daemon, "RAM")))
    with pytest.raises(ConfigError, match=r"RAM is"):
        four.refuse(Machine(Limit(int(10.5 * GIB) + daemon - 1, "RAM")))
    with pytest.raises(ConfigError) as caught:
        four.refuse(Machine(Limit(8 * GIB, "RAM")))
    assert caught.value.message == (
        "the pools of 4 ranks take 11.27 GB (10.5 GiB) when they are full (device 3.758 GB (3.5 GiB), host 7.516 GB "
        "(7 GiB)), the daemon itself 576.6 MB (549.9 MiB), and RAM is 8.59 GB (8 GiB), 3.261 GB (3.037 GiB) less; "
        "write host.num_tokens = 37104 at most, or ask about another host with `sglcache check --ram SIZE`"
    )
    facts = caught.value.facts
    assert (facts["path"], facts["need"], facts["have"]) == ("host.pool_ratio", int(10.5 * GIB) + daemon, 8 * GIB)
    with pytest.raises(ConfigError, match=r"or raise the limit$"):
        four.refuse(Machine(PLENTY, Limit(4 * GIB, "/sys/fs/cgroup/memory.max")))


def test_a_ring_of_events_counts_where_there_are_events() -> None:
    there = Machine(Limit(16 * GIB, "RAM"), Limit(16 * GIB, "cgroup"))
    with pytest.raises(ConfigError, match=r"lower events\.ring_size") as caught:
        weighed("events.ring_size=100 TB").refuse(there)
    assert caught.value.path == "events.ring_size"
    weighed("events.ring_size=100 TB", "events.enabled=false").refuse(there)


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        ("[{host_size = '40 GB'}, {}]", r'parallel\.stages\.0\.host_size = "[0-9]+ MiB"'),
        ("[{}, {host_num_tokens = 99999984}]", r"parallel\.stages\.1\.host_num_tokens = [0-9]+"),
        ("[{size = '40 GB', host_size = '1 MB'}, {}]", r'parallel\.stages\.0\.size = "[0-9]+ MiB" and pool.num_tok'),
    ],
)
def test_the_remedy_of_a_stages_own_size_is_the_stages_and_is_enough(stages: str, told: str) -> None:
    there = Machine(Limit(8 * GIB, "RAM"))
    with pytest.raises(ConfigError, match=rf"; write {told}") as caught:
        weighed("parallel.pp_size=2", f"parallel.stages={stages}").refuse(there)
    assert caught.value.path.startswith("parallel.stages.")
    lowered = tomllib.loads(f"stages = {stages}")["stages"]
    others = []
    for each in caught.value.message.partition("; write ")[2].partition(" at most")[0].split(" and "):
        key, _, value = each.partition(" = ")
        if key.startswith("parallel.stages."):
            _, _, number, name = key.split(".")
            lowered[int(number)][name] = tomllib.loads(f"value = {value}")["value"]
        else:
            others.append(f"{key}={value}")
    room.weigh(parse({"parallel": {"pp_size": 2, "stages": lowered}, **sections(others)})).refuse(there)


def sections(overrides: list[str]) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    for dotted, value in map(parse_override, overrides):
        section, _, key = dotted.partition(".")
        found.setdefault(section, {})[key] = value
    return found


def test_what_bounds_a_stage_is_told_by_its_own_key() -> None:
    room_of_two = weighed("parallel.pp_size=2", "parallel.stages=[{num_tokens = 32, host_size = '1 MiB'}, {}]")
    bounds = [[tier.bound for tier in rank.tiers] for rank in room_of_two.ranks]
    assert bounds[0] == ["parallel.stages.0.num_tokens = 32", 'parallel.stages.0.host_size = "1 MiB"']
    assert bounds[1] == ["pool.num_tokens = 1048576", "host.pool_ratio = 2.0"]


WINDOW = ["window.size=100", "window.num_layers=3", "window.head_dim=48"]
STATES = "mamba.states=[{name = 'ssm', shape = [4, 1000], dtype = 'float32'}]"
MAMBA = ["mamba.num_layers=3", STATES]
HYBRIDS = [
    [],
    WINDOW,
    [*WINDOW, "pool.num_layers=0"],
    [*WINDOW, "window.num_tokens=300000"],
    [*WINDOW, "window.bytes=90 MB", "window.host_tokens=90000"],
    [*WINDOW, "pool.num_layers=0", "window.num_tokens=300000", "window.host_tokens=500000"],
    [*MAMBA, "mamba.num_slots=5000"],
    [*MAMBA, "mamba.bytes=90 MB", "mamba.host_slots=9000"],
    [*MAMBA, *WINDOW, "mamba.num_slots=5000"],
]


@settings(max_examples=400, deadline=None)
@given(
    ram=st.integers(1 << 27, 1 << 36),
    tokens=st.integers(16, 1 << 24),
    host=st.sampled_from(["host.pool_ratio=0", "host.pool_ratio=1.5", "host.num_tokens=4096", "host.size=100 MB"]),
    more=st.sampled_from([[], ["parallel.dp_size=3"], ["pool.kv_lora_rank=64", "pool.qk_rope_head_dim=0"]]),
    hybrid=st.sampled_from(HYBRIDS),
    by_size=st.booleans(),
)
def test_what_is_told_to_write_instead_is_enough(
    ram: int, tokens: int, host: str, more: list[str], hybrid: list[str], by_size: bool
) -> None:
    pool = f"pool.size={tokens * 300} B" if by_size else f"pool.num_tokens={tokens}"
    if "pool.kv_lora_rank=64" in more:
        hybrid = [each for each in hybrid if not each.startswith("window.head_dim")]
    overrides, there = [pool, host, *more, *hybrid], Machine(Limit(ram, "RAM"))
    try:
        room_ = weighed(*overrides)
    except ConfigError:
        return  # it can't be, whatever the machine
    try:
        room_.refuse(there)
    except ConfigError as exc:
        if any(text in exc.message for text in ("not one page", "alone: lower")):
            return
        told = re.search(r"write (.*?)(?: at most|, or ask)", exc.message)
        assert told is not None
        instead = [each.replace(" = ", "=", 1) for each in told[1].split(" and ")]
        said = {each.partition("=")[0] for each in instead}
        gone = said | {f"{key.partition('.')[0]}.{other}" for key in said for other in OTHER_WORDS.get(key, ())}
        weighed(*(each for each in overrides if each.partition("=")[0] not in gone), *instead).refuse(there)


def test_all_resources_count_each_in_its_own_pools() -> None:
    shards = ["pool.num_kv_heads=2", "pool.num_shards=2", "pool.num_tokens=1600", "host.num_tokens=800"]
    both = weighed(*shards, *WINDOW, *MAMBA, "mamba.num_slots=10")
    (rank,) = both.ranks
    assert [(it.resource, it.tier.name, it.num_tokens, it.num_pools) for it in rank.tiers] == [
        ("full", "DEVICE", 1600, 2),
        ("full", "HOST", 800, 2),
        ("window", "DEVICE", 400, 2),
        ("window", "HOST", 192, 2),
        ("mamba", "DEVICE", 10, 2),
        ("mamba", "HOST", 5, 2),
    ]
    token, window, slot = 2 * 2 * 2 * 32 * 2, 3 * 2 * 2 * (48 + 48), 3 * 4 * 1000 * 4
    assert both.device_bytes == 1600 * token + 400 * window + 10 * slot
    assert both.host_bytes == 800 * token + 192 * window + 5 * slot


def test_what_follows_from_another_size_is_told_with_that() -> None:
    def bounds(*overrides: str) -> list[str]:
        (rank,) = weighed(*overrides).ranks
        return [tier.bound for tier in rank.tiers[2:]]

    assert bounds(*WINDOW) == ["pool.num_tokens = 1048576, a quarter of it", "host.pool_ratio = 2.0, in proportion"]
    said = ["window.bytes=9 MB", "window.host_tokens=4800"]
    assert bounds(*WINDOW, *said) == ['window.bytes = "9 MB"', "window.host_tokens = 4800"]
    assert bounds(*MAMBA, "mamba.num_slots=9", "host.num_tokens=1048576") == [
        "mamba.num_slots = 9",
        "host.num_tokens = 1048576, in proportion",
    ]
    stages = "parallel.stages=[{window_num_tokens = 160}, {window_num_layers = 0}]"
    two = weighed("parallel.pp_size=2", stages, *WINDOW).ranks
    assert two[0].tiers[2].bound == "parallel.stages.0.window_num_tokens = 160"
    assert (len(two[0].tiers), len(two[1].tiers), two[1].companions) == (4, 2, ())


def test_a_window_that_can_not_be_is_told_by_its_stage() -> None:
    with pytest.raises(
        ConfigError, match=r"^parallel\.stages\.1\.window_num_tokens: 16 tokens: that is 1 page"
    ) as caught:
        weighed("parallel.pp_size=2", "parallel.stages=[{}, {window_num_tokens = 16}]", *WINDOW)
    assert caught.value.path == "parallel.stages.1.window_num_tokens"


def test_a_cgroups_limit_is_for_what_the_daemon_writes() -> None:
    four = weighed(file=FOUR_RANKS)
    cgroup = Limit(6 * GIB, "/sys/fs/cgroup/memory.max")
    with pytest.raises(ConfigError, match=r"take 7\.516 GB .*, and /sys/fs/cgroup/memory\.max is 6\.442 GB") as caught:
        four.refuse(Machine(PLENTY, cgroup))
    assert caught.value.limit == cgroup.name
    between = Machine(PLENTY, cgroup._replace(num_bytes=8 * GIB))
    four.refuse(between)
    (warning,) = four.warnings(between)
    assert "11.27 GB (10.5 GiB) when they are full, the daemon itself 576.6 MB (549.9 MiB)" in warning
    assert "and /sys/fs/cgroup/memory.max is 8.59 GB (8 GiB)" in warning
    assert four.warnings(Machine(PLENTY, cgroup._replace(num_bytes=12 * GIB))) == []


def test_little_locked_memory_is_told_of_where_memory_is_pinned() -> None:
    there = Machine(PLENTY, memlock=Limit(8 << 20, "RLIMIT_MEMLOCK"))
    assert weighed().warnings(there) == []
    (warning,) = weighed("pool.device=cuda").warnings(there)
    assert "pins 536.9 MB (512 MiB), and RLIMIT_MEMLOCK is 8.389 MB (8 MiB)" in warning
    assert "ulimit -l unlimited" in warning
    assert weighed("pool.device=cuda", "host.size=8 MiB").warnings(there) == []


def test_more_connections_than_descriptors_are_told_of() -> None:
    (warning,) = weighed("limits.max_connections=1000").warnings(Machine(PLENTY, max_fds=4063))
    assert "max_connections = 1000 takes 4064 file descriptors" in warning
    assert "RLIMIT_NOFILE is 4063: beyond 999 of them" in warning
    assert weighed("limits.max_connections=1000").warnings(Machine(PLENTY, max_fds=4064)) == []


def test_stages_of_different_sizes_are_told_which_counts() -> None:
    stages = "parallel.stages=[{num_tokens = 320}, {num_tokens = 160}]"
    (warning,) = weighed("parallel.pp_size=2", stages).warnings(Machine(PLENTY))
    assert "so 160, rank 1's, is what counts" in warning


def test_cards_are_weighed_and_not_served() -> None:
    there = Machine(PLENTY)
    with pytest.raises(ConfigError, match=r'pool\.device = "cuda".*has not run on one') as caught:
        room.served(load(None, ["pool.device=cuda"]), there)
    assert caught.value.path == "pool.device"
    assert room.served(Config(), there) == []
    with pytest.raises(ConfigError, match="RAM is 1 B"):
        room.served(Config(), Machine(Limit(1, "RAM")))


# -- what there is ------------------------------------------------------------------------------------------


def put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_without_cgroups_the_rams_size_is_all_that_is_known(tmp_path: Path) -> None:
    there = room.machine(tmp_path)
    assert there.ram.num_bytes > 1 << 20
    assert there.cgroup is None


@pytest.mark.parametrize(
    ("line", "base", "name", "none"),
    [
        ("0::/a/b", "sys/fs/cgroup", "memory.max", "max"),
        ("0::/a/b", "sys/fs/cgroup/unified", "memory.max", "max"),
        ("4:memory:/a/b", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "9223372036854771712"),
        ("7:cpu,memory:/a/b", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "9223372036854771712"),
    ],
)
def test_the_least_limit_of_our_cgroup_and_those_above_it_counts(
    tmp_path: Path, line: str, base: str, name: str, none: str
) -> None:
    put(tmp_path, "proc/self/cgroup", f"9:name=systemd:/\n{line}\n")
    put(tmp_path, f"{base}/a/b/{name}", none + "\n")
    assert room.machine(tmp_path).cgroup is None
    put(tmp_path, f"{base}/a/{name}", f"{3 << 30}\n")
    assert room.machine(tmp_path).cgroup == (3 << 30, f"/{base}/a/{name}")
    put(tmp_path, f"{base}/a/b/{name}", f"{2 << 30}\n")
    assert room.machine(tmp_path).cgroup == (2 << 30, f"/{base}/a/b/{name}")
    put(tmp_path, f"{base}/{name}", f"{1 << 30}\n")  # as a container sees its own
    assert room.machine(tmp_path).cgroup == (1 << 30, f"/{base}/{name}")
    put(tmp_path, f"sys/fs/cgroup/elsewhere/{name}", "1\n")
    assert room.machine(tmp_path).cgroup == (1 << 30, f"/{base}/{name}")


@pytest.mark.parametrize(("capabilities", "limited"), [("0000000000000000", True), ("0000000000004000", False)])
def test_who_may_lock_memory_has_no_limit(
    tmp_path: Path, capabilities: str, limited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "proc/self/status", f"Name:\tx\nCapEff:\t{capabilities}\n")
    monkeypatch.setattr(room.resource, "getrlimit", lambda which: (8 << 20, 16 << 20))
    memlock = room.machine(tmp_path).memlock
    assert memlock == ((8 << 20, "RLIMIT_MEMLOCK") if limited else None)
    monkeypatch.setattr(room.resource, "getrlimit", lambda which: (room.resource.RLIM_INFINITY,) * 2)
    assert room.machine(tmp_path).memlock is None


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1 << 10, "1.024 kB (1 KiB)"),
        (112 * 10**9, "112 GB (104.3 GiB)"),
    ],
)
def test_bytes_are_told_in_both_kinds_of_units(num_bytes: int, text: str) -> None:
    assert room.told(num_bytes).startswith(text)


def test_a_tiers_bytes_are_those_of_all_its_pools() -> None:
    (rank,) = weighed("pool.num_kv_heads=4", "pool.num_shards=2").ranks
    assert rank.num_bytes(Tier.DEVICE) == 2 * rank.geometry.pool_bytes
    assert rank.num_bytes(Tier.HOST) == 2 * rank.geometry.host_pool_bytes
