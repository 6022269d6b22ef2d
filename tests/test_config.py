"""The configuration speaks in dotted paths, and its defaults need no file."""

from __future__ import annotations

import os
import pwd
import tomllib
from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError

from sglcache.config import (
    Config,
    MambaConfig,
    MambaStateConfig,
    PolicyName,
    Section,
    StageConfig,
    TenantConfig,
    WindowConfig,
    keys,
    load,
    parse,
    parse_override,
    parse_size,
    size_text,
)
from sglcache.core.eviction import POLICIES, Policy
from sglcache.errors import ConfigError
from sglcache.memory.geometry import Geometry
from sglcache.server.rank import policy_of

LATENTS = ["pool.kv_lora_rank=512", "pool.qk_rope_head_dim=64"]
WINDOW = ["window.size=20", "window.num_layers=2"]
THIRD = ["storage.kind=file", "storage.path=/x", "model_name=m"]


def state(*tables: str) -> str:
    each = [f"{{{table}, dtype = 'float32'}}" for table in tables]
    return f"mamba.states=[{', '.join(each)}]"


MAMBA = ["mamba.num_layers=3", state("name = 'conv', shape = [8, 3]", "name = 'ssm', shape = [4]"), "mamba.num_slots=9"]
CONFIGS = sorted(Path(__file__).parents[1].joinpath("configs").glob("*.toml"))


def sections() -> list[type[Section]]:
    found: list[type[Section]] = [Config, StageConfig]
    found += [
        field.annotation
        for field in Config.model_fields.values()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    ]
    return found


ABSENT: list[type[Section]] = [WindowConfig, MambaConfig, MambaStateConfig, TenantConfig]
"""Sections that are not there by default. What such a one is of has no default that could be right."""


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_config_loads(path: Path) -> None:
    load(path)


def test_cpu_toml_says_the_defaults() -> None:
    path = next(path for path in CONFIGS if path.name == "cpu.toml")
    assert load(path) == load()

    text = path.read_text()
    written = {key for section in tomllib.loads(text).values() if isinstance(section, dict) for key in section}
    unset = {key.rpartition(".")[2] for key, default in keys().items() if default is None}
    for key in keys():
        name = key.rpartition(".")[2]
        assert name in written or name in tomllib.loads(text) or f"# {name} = " in text, f"{key} is not in {path}"
    assert "socket" in unset
    assert "dir" in unset


@pytest.mark.parametrize("section", [*sections(), *ABSENT], ids=lambda section: section.__name__)
def test_every_field_has_a_default_and_a_description(section: type[Section]) -> None:
    assert section.__doc__
    for name, field in section.model_fields.items():
        assert not field.is_required() or section in ABSENT, f"{section.__name__}.{name} has no default"
        assert field.description, f"{section.__name__}.{name} has no description"
        assert field.description.endswith("."), f"{section.__name__}.{name}: the description is a sentence"


def test_the_defaults_are_a_mebitoken_on_the_device_and_two_on_the_host() -> None:
    config = load()
    geometry = Geometry.of(config)
    assert geometry.num_pages * geometry.page_size == 1 << 20
    assert geometry.host_pages == 2 * geometry.num_pages
    assert geometry.pool_bytes == 256 << 20


def test_an_override_wins_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[pool]\npage_size = 4\nnum_layers = 3\n")
    config = load(file, ["pool.page_size=64", "pool.page_size=1"])
    assert (config.pool.page_size, config.pool.num_layers, config.pool.head_dim) == (1, 3, 32)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pool.page_size=64", ("pool.page_size", 64)),
        ("events.enabled=false", ("events.enabled", False)),
        ("host.pool_ratio=1.5", ("host.pool_ratio", 1.5)),
        ("events.endpoint=tcp://127.0.0.1:0", ("events.endpoint", "tcp://127.0.0.1:0")),
        ('events.topic="7"', ("events.topic", "7")),
        ("events.topic=a=b", ("events.topic", "a=b")),
        ("events.topic=", ("events.topic", "")),
        ("events.topic=x\ny = 3", ("events.topic", "x\ny = 3")),
    ],
)
def test_an_overrides_value_is_toml_or_else_the_text(text: str, expected: tuple[str, object]) -> None:
    assert parse_override(text) == expected


@pytest.mark.parametrize("text", ["pool.page_size", "=3", "pool..x=3", ".=1"])
def test_an_override_without_a_key_or_a_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write section\.key=value"):
        load(None, [text])


@pytest.mark.parametrize(
    ("override", "path", "remedy"),
    [
        ("pool.page_sise=4", "pool.page_sise", "did you mean pool.page_size?"),
        ("page_size=4", "page_size", "did you mean pool.page_size?"),
        ("pol.page_size=4", "pol", "did you mean [pool]?"),
        ("pool.foo=1", "pool.foo", "[pool] has device, page_size, num_tokens"),
        ("zzz=1", "zzz", "the sections are pool, host"),
        ("pool.page_size=0", "pool.page_size", "greater than or equal to 1"),
        ("pool.page_size=16.5", "pool.page_size", "the default is 16"),
        ('pool.page_size="16"', "pool.page_size", "valid integer"),
        ("pool.page_size.x=1", "pool.page_size", "valid integer"),
        ("pool=3", "pool", "[pool], then its keys"),
        ("pool.num_tokens=15", "pool.num_tokens", "write 16 to"),
        ("pool.num_tokens=99999999999999", "pool.num_tokens", "write 16 to"),
        ("pool.dtype=int4", "pool.dtype", "'float16', 'bfloat16', 'float32', 'float8_e4m3fn' or 'float8_e5m2'"),
        ("host.pool_ratio=-1", "host.pool_ratio", "greater than or equal to 0"),
        ("host.pool_ratio=nan", "host.pool_ratio", "finite"),
        ("host.num_tokens=99999999999999", "host.num_tokens", "lower host.num_tokens"),
        ("pool.size=80", "pool.size", 'such as "8 GiB" (1024 * 1024 * 1024 each)'),
        ("pool.size=8e9", "pool.size", "write a size with its unit"),
        ("pool.size=8 Gi", "pool.size", "a unit of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB"),
        ("pool.size=GiB", "pool.size", "write a number and a unit"),
        ("host.size=true", "host.size", "write a number and a unit"),
        ("events.ring_size=67108864", "events.ring_size", 'bytes are "67108864 B"'),
        ("events.ring_size=1 kB", "events.ring_size", 'at least "64 KiB"'),
        ("pool.kv_lora_rank=512", "pool.qk_rope_head_dim", "latents have both; write it"),
        ("pool.qk_rope_head_dim=64", "pool.kv_lora_rank", "write both, or head_dim"),
        ("pool.device=tpu", "pool.device", "'cpu' or 'cuda'"),
        ("pool.layout=page_head", "pool.layout", "'page_first' or 'layer_first'"),
        ("eviction.device=arc", "eviction.device", "'lru', 'lfu', 'fifo', 'mru', 'filo', 'priority', 'slru' or 'tlru'"),
        ("eviction.policy=lfu", "eviction.policy", "[eviction] has device, host, protected_threshold"),
        ("eviction.protected_threshold=3", "eviction.protected_threshold", 'write eviction.device = "slru"'),
        ("eviction.protected_threshold=0", "eviction.protected_threshold", "greater than or equal to 1"),
        ("eviction.next_prompt_estimate=3", "eviction.next_prompt_estimate", 'or eviction.host = "tlru"'),
        ("eviction.threshold=3", "eviction.threshold", "leave it out"),
        ("storage.kind=disk", "storage.kind", "'none', 'file' or 'mooncake'"),
        ("storage.kind=file", "storage.path", "the folder for its pages"),
        ("storage.kind=mooncake", "storage.master", "HOST:PORT"),
        ("storage.path=/x", "storage.path", 'write storage.kind = "file"'),
        ("storage.master=h:1", "storage.master", 'write storage.kind = "mooncake"'),
        ("storage.size=7", "storage.size", "write a size with its unit"),
        ("storage.folder=/x", "storage.folder", "[storage] has kind, revision"),
        ("events.hash=md5", "events.hash", "'xxh3_128' or 'sha256'"),
        ("events.endpoint=127.0.0.1:5557", "events.endpoint", "write tcp://HOST:PORT"),
        ("events.endpoint=tcp://::1:5557", "events.endpoint", "an IPv6 host in brackets"),
        ("events.endpoint=tcp://*:65536", "events.endpoint", "a port of 0 to 65535"),
        ("events.replay_endpoint=tcp://127.0.0.1:5557", "events.replay_endpoint", "a port of its own"),
        ("events.topic=7", "events.topic", "quote it: events.topic='\"7\"'"),
        ("parallel.dp_size=0", "parallel.dp_size", "greater than or equal to 1"),
        ("parallel.dp_ranks=[1]", "parallel.dp_ranks", "write some of 0..0"),
        ("parallel.pp_ranks=[]", "parallel.pp_ranks", "leave it out for all"),
        ("parallel.pp_ranks=[0, 0]", "parallel.pp_ranks", "twice"),
        ("parallel.pp_ranks=[true]", "parallel.pp_ranks.0", "valid integer"),
        ("parallel.stages=[{}, {}]", "parallel.stages", "parallel.pp_size = 1"),
        ("parallel.stages=[{num_tokens = 3}]", "parallel.stages.0.num_tokens", "write 16 to"),
        (
            "parallel.stages=[{num_layer = 3}]",
            "parallel.stages.0.num_layer",
            "did you mean parallel.stages.0.num_layers?",
        ),
        ("parallel.stages=[{num_layers = 0}]", "parallel.stages.0.num_layers", "or a [window]"),
        ("parallel.stages=[{num_layers = -1}]", "parallel.stages.0.num_layers", "greater than or equal to 0"),
        ("parallel.stages=[{window_num_tokens = 9}]", "parallel.stages.0.window_num_tokens", "write that section"),
        ("parallel.stages=[{mamba_num_slots = 9}]", "parallel.stages.0.mamba_num_slots", "is of [mamba], and there"),
        ("pool.num_layers=0", "pool.num_layers", "write how many layers keep every token's KV, or a [window]"),
        ("window.num_layers=3", "window.size", "window.size is missing: tokens that a query sees"),
        ("tenants.chat.ceiling=5", "tenants.chat.ceiling", "did you mean tenants.chat.host_ceiling?"),
        ("windw.size=3", "windw", "did you mean [window]?"),
        ("mamba.slots=3", "mamba.num_layers", "did you mean mamba.num_slots?"),
        (
            "parallel.stages=[{host_num_tokens = 99999999999999}]",
            "parallel.stages.0.host_num_tokens",
            "; lower parallel",
        ),
        ("http.port=70000", "http.port", "less than or equal to 65535"),
        ("control.socket=3", "control.socket", "path"),
        ("control.socket=~nosuchuser/x", "control.socket", "nobody knows where ~nosuchuser is; write the whole path"),
        ("storage.path=~nosuchuser/x", "storage.path", "without ~"),
        ('control.socket="/a\\u0000b"', "control.socket", "no zero byte"),
        ('state.dir="/a\\u0000b"', "state.dir", "no zero byte"),
        ("http.host=host..local", "http.host", "1 to 63 characters"),
        (f"http.host={'x' * 64}.local", "http.host", "1 to 63 characters"),
        ("http.host=.", "http.host", "1 to 63 characters"),
        ("http.host=127.0.0.1/x", "http.host", "without brackets or a port"),
        ('http.host="a\\u0000b"', "http.host", "an address"),
        ("pool.size=\u0663 GB", "pool.size", "write a number and a unit"),
        ("events.endpoint=tcp://127.0.0.1:\u0663", "events.endpoint", "a port of 0 to 65535"),
        ("host.size=0.5 B", "host.size", 'less than a byte; "0 B" is none'),
    ],
)
def test_a_wrong_key_or_value_is_refused_by_path_with_the_remedy(override: str, path: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, [override])
    assert caught.value.path == path
    assert path in caught.value.message
    assert remedy in caught.value.message


@pytest.mark.parametrize(
    ("overrides", "path", "remedy"),
    [
        (["pool.num_shards=3", "pool.num_kv_heads=2"], "pool.num_shards", "nor is it a multiple of it; make one"),
        (["pool.num_shards=2", "pool.num_kv_heads=3"], "pool.num_shards", "does not divide pool.num_kv_heads = 3"),
        (["pool.size=1 GiB", "pool.num_tokens=16"], "pool.size", "both say how big the pool is; leave one out"),
        (["host.size=1 GiB", "host.num_tokens=16"], "host.size", "both say how big the tier is; leave one out"),
        (["parallel.stages=[{size = '1 GiB', num_tokens = 16}]"], "parallel.stages.size", "leave one out"),
        (["pool.size=1 GiB", "pool.num_tokens=1048576"], "pool.size", "both say how big the pool is; leave one out"),
        ([*LATENTS, "pool.head_dim=32"], "pool.head_dim", "is of heads"),
        ([*LATENTS, "pool.num_kv_heads=1"], "pool.num_kv_heads", "is of heads"),
        (["host.pool_ratio=0", "host.write_policy=write_back"], "host.write_policy", "there is none; set host.num_t"),
        (["host.num_tokens=0", "host.load_back_threshold=9"], "host.load_back_threshold", "leave host.load_back_thr"),
        (["host.size=0 B", "host.load_back_quota=9"], "host.load_back_quota", "leave host.load_back_quota out"),
        (
            ["host.size=0 B", "host.write_policy=write_through_selective", "host.write_threshold=3"],
            "host.write_policy",
            "there is none",
        ),
        (["events.groups=true", "events.encoding=array"], "events.groups", 'use events.encoding = "map"'),
        (["control.num_load_slots=65536", "pool.num_layers=4096"], "control.num_load_slots", "= 256 at most"),
        ([*LATENTS, "pool.head_dim=64"], "pool.head_dim", "is of heads, and pool.kv_lora_rank = 512"),
        ([*LATENTS, "pool.v_head_dim=64"], "pool.v_head_dim", "leave one out"),
        ([*LATENTS, "pool.num_kv_heads=8"], "pool.num_kv_heads", "leave one out"),
        ([*WINDOW, "window.num_tokens=64", "window.bytes=1 GB"], "window.bytes", "leave one out"),
        ([*WINDOW, "window.size=0"], "window.size", "greater than or equal to 1"),
        ([*WINDOW, "window.num_layers=0"], "window.num_layers", "greater than or equal to 1"),
        ([*WINDOW, "window.dtype=int4"], "window.dtype", "'float16', 'bfloat16'"),
        ([*WINDOW, "window.host_tokens=64", "host.pool_ratio=0"], "window.host_tokens", "there is no host tier; set"),
        ([*WINDOW, "window.host_tokens=0"], "window.host_tokens", "write more, leave it out"),
        ([*WINDOW, "window.layers=[1]"], "window.layers", "of window.num_layers = 2 layers"),
        ([*WINDOW, "window.layers=[3, 1]"], "window.layers", "from the lowest to the highest"),
        ([*WINDOW, "window.layers=[1, -3]"], "window.layers.1", "greater than or equal to 0"),
        ([*WINDOW, "window.layers=[1, 3]", "parallel.pp_size=2"], "window.layers", "leave window.layers out"),
        ([*WINDOW, "pool.num_shards=4", "pool.num_kv_heads=4", "window.num_kv_heads=3"], "window.num_kv_heads", "= 3"),
        ([*WINDOW, *LATENTS, "window.head_dim=64"], "window.num_kv_heads", "leave all that is of heads out"),
        ([*WINDOW, "pool.num_layers=0", "pool.size=1 GB"], "pool.size", "pages of no bytes; write pool.num_tokens"),
        ([*WINDOW, "pool.num_layers=0", "host.size=1 GB"], "host.size", "pages of no bytes; write host.num_tokens"),
        ([*WINDOW, *THIRD], "storage.kind", "beside [window]: the third tier keeps the KV of every token"),
        ([*MAMBA, *THIRD], "storage.kind", "beside [mamba]: the third tier keeps the KV of every token"),
        ([*MAMBA, "mamba.bytes=1 GB"], "mamba.num_slots", "leave one out"),
        (MAMBA[:-1], "mamba.num_slots", 'or mamba.bytes, such as "8 GB"'),
        ([*MAMBA, "pool.num_layers=0"], "pool.num_layers", "or a [window]"),
        ([*MAMBA, "mamba.interval=1000"], "mamba.interval", "whole pages of 16 tokens; write 992"),
        ([*MAMBA, "mamba.interval=8"], "mamba.interval", "write 16"),
        ([*MAMBA, "mamba.host_slots=9", "host.size=0 B"], "mamba.host_slots", "there is no host tier; set"),
        ([*MAMBA, "mamba.host_slots=0"], "mamba.host_slots", "never be matched without it"),
        ([*MAMBA, "mamba.num_slots=2147483648"], "mamba.num_slots", "less than or equal to 2147483647"),
        ([*MAMBA, "mamba.states=[]"], "mamba.states", "at least 1 item"),
        ([*MAMBA, "mamba.states=[{name = 'a', shape = [2]}]"], "mamba.states.0.dtype", "is missing: element type"),
        ([*MAMBA, state("name = '1a', shape = [2]")], "mamba.states.0.name", "letters, digits and _"),
        ([*MAMBA, state("name = 'a', shape = [2, 0]")], "mamba.states.0.shape.1", "greater than or equal to 1"),
        ([*MAMBA, state("name = 'a', shape = []")], "mamba.states.0.shape", "at least 1 item"),
        (
            [*MAMBA, state("name = 'a', shape = [6]"), "pool.num_kv_heads=4", "pool.num_shards=4"],
            "mamba.states.0.shape",
            "pool.num_shards = 4 does not divide it",
        ),
        ([*MAMBA, state("name = 'a', shape = [6]", "name = 'a', shape = [7]")], "mamba.states", 'two are named "a"'),
    ],
)
def test_what_contradicts_itself_is_refused_with_both_sides(overrides: list[str], path: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, overrides)
    assert caught.value.path == path
    assert remedy in caught.value.message


@pytest.mark.parametrize(
    ("written", "override", "wins"),
    [
        ("[pool]\nnum_tokens = 1048576", "pool.size=1 MiB", ("pool", "size", 1 << 20)),
        ("[pool]\nsize = '1 MiB'", "pool.num_tokens=160", ("pool", "num_tokens", 160)),
        ("[host]\nsize = '1 MiB'", "host.num_tokens=160", ("host", "num_tokens", 160)),
        ("[host]\nnum_tokens = 160", "host.pool_ratio=0", ("host", "enabled", False)),
        ("[window]\nsize = 9\nnum_layers = 1\nbytes = '1 MB'", "window.num_tokens=160", ("window", "num_tokens", 160)),
        ("[pool]\nhead_dim = 32\nqk_rope_head_dim = 0", "pool.kv_lora_rank=8", ("pool", "kv_lora_rank", 8)),
    ],
)
def test_an_override_wins_over_the_files_other_words_for_the_same(
    written: str, override: str, wins: tuple[str, str, object], tmp_path: Path
) -> None:
    (tmp_path / "a.toml").write_text(written)
    section, key, value = wins
    assert getattr(getattr(load(tmp_path / "a.toml", [override]), section), key) == value
    with pytest.raises(ConfigError, match="leave one out"):
        load(None, ["pool.size=1 MiB", "pool.num_tokens=1048576"])


def test_a_host_tier_that_makes_no_page_is_refused_unless_it_is_0() -> None:
    for override in ("host.num_tokens=3", "host.pool_ratio=1e-7", "host.size=3 B"):
        with pytest.raises(ConfigError) as caught:
            Geometry.of(load(None, [override]))
        assert caught.value.path == override.partition("=")[0]
        assert caught.value.path in caught.value.message
    for override in ("host.num_tokens=0", "host.pool_ratio=0", "host.size=0 B"):
        assert Geometry.of(load(None, [override])).host_pages == 0


def test_what_makes_a_token_too_big_is_named_and_not_the_page() -> None:
    for overrides, path in (
        (["pool.num_kv_heads=32768", "pool.head_dim=65536"], "pool.head_dim"),
        (["pool.num_kv_heads=65536", "pool.head_dim=4096", "pool.num_layers=2"], "pool.num_kv_heads"),
        (["pool.head_dim=65536", "pool.page_size=4096", "pool.num_layers=64"], "pool.page_size"),
    ):
        with pytest.raises(ConfigError, match=r"; write less, or more|write pool\.page_size = 127 at most") as caught:
            Geometry.of(load(None, overrides))
        assert caught.value.path == path


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("8 GiB", 8 << 30),
        ("8GB", 8 * 10**9),
        ("1.5 gib", 3 << 29),
        (" 512 MB ", 512 * 10**6),
        ("0.1 kB", 100),
        ("0 B", 0),
        ("2 TiB", 2 << 40),
        ("7 B", 7),
    ],
)
def test_a_size_is_a_number_and_its_unit_and_is_told_as_it_can_be_read(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes
    assert parse_size(size_text(num_bytes)) == num_bytes


def test_a_configuration_survives_being_told_to_a_rank() -> None:
    sizes = ["pool.size=1.5 GB", "host.size=3 GiB", "parallel.pp_size=2", "parallel.stages=[{size = '5 MB'}, {}]"]
    config = load(None, sizes)
    assert parse(config.model_dump(mode="json", exclude_unset=True)) == config
    hybrid = load(None, [*WINDOW, "window.bytes=1.5 GB", "window.layers=[1, 3]", *MAMBA])
    assert parse(hybrid.model_dump(mode="json", exclude_unset=True)) == hybrid
    assert config.model_dump(mode="json")["host"]["size"] == "3 GiB"


def test_a_stage_may_have_a_size_of_its_own_in_either_words() -> None:
    stages = "parallel.stages=[{size = '1 MiB', host_size = '3 MiB'}, {num_tokens = 320, host_num_tokens = 640}, {}]"
    config = load(None, ["parallel.pp_size=3", "pool.size=2 MiB", "host.size=2 MiB", stages])
    sizes = [Geometry.of(config.for_stage(pp_rank)) for pp_rank in range(3)]
    assert [(it.num_pages, it.host_pages) for it in sizes] == [(256, 768), (20, 40), (512, 512)]


def test_every_problem_is_told_with_where_it_came_from(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[http]\nport = -1\n[pol]\n")
    with pytest.raises(ConfigError) as caught:
        load(file, ["events.hash=md5"])
    lines = caught.value.message.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("events.hash = 'md5' (--set): ")
    assert lines[1].startswith(f"http.port = -1 ({file}): ")
    assert lines[2] == f"pol ({file}): no such key; did you mean [pool]?"


def test_a_file_that_is_not_there_or_not_toml_is_told_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: No such file"):
        load(tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_text("[pool\n")
    with pytest.raises(ConfigError, match=r"bad\.toml is not TOML: .*line 1"):
        load(tmp_path / "bad.toml")


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbf[pool]\r\npage_size = 4\r\n")
    assert load(tmp_path / "a.toml").pool.page_size == 4


def test_a_pipe_is_read_to_its_end_and_is_not_waited_for_without_a_writer(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="a pipe into which nobody writes"):
        load(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(pipe, os.O_WRONLY)
    os.write(writer, b"[pool]\npage_size = 4\n")
    os.close(writer)
    assert load(pipe).pool.page_size == 4
    os.close(reader)
    with pytest.raises(ConfigError, match=r"/dev/zero is longer than 16 MiB"):
        load(Path("/dev/zero"))
    with pytest.raises(ConfigError, match=r"Is a directory; name a file that can be read"):
        load(tmp_path)


def test_a_user_without_a_home_is_told_which_key_wants_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's made-up uid has neither HOME nor an entry in passwd."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(ConfigError, match=r"state\.dir = '~/x' .*or set HOME") as caught:
        load(None, ["state.dir=~/x"])
    assert caught.value.path == "state.dir"


@pytest.mark.parametrize(
    "endpoint", ["tcp://*:5557", "tcp://0.0.0.0:1", "tcp://[::1]:0", "tcp://[::]:5557", "tcp://host-1.a:1", "ipc:///a"]
)
def test_these_endpoints_are_fine(endpoint: str) -> None:
    assert load(None, [f"events.endpoint={endpoint}"]).events.endpoint == endpoint


def test_the_host_tier_is_off_at_zero_and_a_size_in_tokens_wins_over_the_ratio() -> None:
    assert Geometry.of(load(None, ["host.pool_ratio=0"])).host_pages == 0
    assert Geometry.of(load(None, ["host.num_tokens=0"])).host_pages == 0
    assert Geometry.of(load(None, ["host.num_tokens=100", "pool.page_size=16"])).host_pages == 6


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="10000 ranks; at most 4096"):
        load(None, ["parallel.dp_size=100", "parallel.pp_size=100"])


def test_a_host_serves_all_ranks_or_those_that_it_names() -> None:
    four = ["parallel.dp_size=2", "parallel.pp_size=2"]
    assert load().parallel.local() == [(0, 0)]
    assert load(None, four).parallel.local() == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert load(None, [*four, "parallel.pp_ranks=[1]"]).parallel.local() == [(0, 1), (1, 1)]
    assert load(None, [*four, "parallel.dp_ranks=[1]", "parallel.pp_ranks=[1, 0]"]).parallel.local() == [(1, 0), (1, 1)]


def test_a_stage_differs_in_what_it_says_and_in_nothing_else() -> None:
    stages = "parallel.stages=[{num_layers = 3}, {num_tokens = 320, host_num_tokens = 64}, {}]"
    config = load(None, ["parallel.pp_size=3", stages, "host.pool_ratio=0.5", "pool.num_tokens=160"])
    first, second, third = (config.for_stage(pp_rank) for pp_rank in range(3))
    sizes = [(it.num_layers, it.num_pages, it.host_pages) for it in map(Geometry.of, (first, second))]
    assert sizes == [(3, 10, 5), (2, 20, 4)]
    assert (third.pool, third.host) == (config.pool, config.host)
    assert all(stage.events == config.events for stage in (first, second, third))
    assert load().for_stage(0) == load()


def test_a_stage_may_have_other_layers_of_each_kind_or_none() -> None:
    windows = "num_layers = 0, window_num_layers = 5, window_num_tokens = 320, window_host_tokens = 640"
    states = "window_num_layers = 0, mamba_num_layers = 4, mamba_num_slots = 7, mamba_host_slots = 8"
    stages = f"parallel.stages=[{{{windows}, mamba_num_layers = 0}}, {{{states}}}, {{}}]"
    config = load(None, ["parallel.pp_size=3", stages, *WINDOW, "window.bytes=1 MB", *MAMBA])
    first, second, third = (config.for_stage(pp_rank) for pp_rank in range(3))
    assert first.window is not None
    assert second.mamba is not None
    assert (first.pool.num_layers, first.mamba, second.window) == (0, None, None)
    window = first.window
    assert (window.num_layers, window.num_tokens, window.bytes, window.host_tokens) == (5, 320, None, 640)
    assert (second.mamba.num_layers, second.mamba.num_slots, second.mamba.host_slots) == (4, 7, 8)
    assert second.mamba.states == config.mamba.states if config.mamba is not None else False
    assert (third.window, third.mamba) == (config.window, config.mamba)
    assert config.key_of(0, "window.num_tokens") == "parallel.stages.0.window_num_tokens"
    assert config.key_of(1, "window.num_tokens") == "window.num_tokens"


def test_the_example_of_four_ranks_has_the_sizes_that_it_says() -> None:
    config = load(next(path for path in CONFIGS if path.name == "dp2-pp2.toml"))
    assert len(config.parallel.local()) == 4
    sizes = []
    for _, pp_rank in config.parallel.local():
        geometry = Geometry.of(config.for_stage(pp_rank))
        sizes.append((geometry.pool_bytes, geometry.host_pool_bytes))
    assert sizes == [(1 << 30, 2 << 30), (1 << 30, 2 << 30), (768 << 20, 1536 << 20), (768 << 20, 1536 << 20)]
    assert sum(map(sum, sizes)) == 10.5 * (1 << 30)


def test_a_value_in_a_table_of_a_file_is_told_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[parallel]\npp_size = 2\n[[parallel.stages]]\n[[parallel.stages]]\nnum_tokens = 0\n")
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert caught.value.message.startswith(f"parallel.stages.1.num_tokens = 0 ({file}): must be greater")


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        setattr(parse({}).pool, "page_size", 4)  # noqa: B010


def test_each_tier_has_a_policy_of_its_own_and_parameters_are_for_whom_reads_them() -> None:
    config = load(None, ["eviction.device=slru", "eviction.protected_threshold=3", "eviction.host=tlru"])
    policies = [policy_of(config.eviction, name) for name in (config.eviction.device, config.eviction.host)]
    assert policies == [Policy("slru", protected_threshold=3), Policy("tlru", protected_threshold=3)]
    assert get_args(PolicyName) == POLICIES
    with pytest.raises(ConfigError, match=r"there is no host tier; set host\.num_tokens"):
        load(None, ["eviction.host=lfu", "host.pool_ratio=0"])
    load(None, ["eviction.host=lru", "host.pool_ratio=0"])


def test_a_third_tier_needs_a_model_and_a_host_tier() -> None:
    """Pages of a model without a name would be found by whatever is served next."""
    file = ["storage.kind=file", "storage.path=/x"]
    with pytest.raises(ConfigError, match="needs model_name"):
        load(overrides=file)
    with pytest.raises(ConfigError, match="there is no host tier"):
        load(overrides=[*file, "model_name=m", "host.pool_ratio=0"])
    with pytest.raises(ConfigError, match=r'storage.master is mooncake\'s, and storage.kind = "file"'):
        load(overrides=[*file, "model_name=m", "storage.master=h:1"])
    config = load(overrides=[*file, "model_name=m", "storage.size=2 GiB"])
    assert (config.storage.size, config.storage.low_water) == (2 << 30, 0.95)
    assert load(overrides=["model_name=m", "storage.kind=mooncake", "storage.master=h:1"]).storage.segment_size == 0


def test_a_size_that_is_too_small_is_told_with_its_unit() -> None:
    with pytest.raises(ConfigError, match=r'storage\.size = .*: must be at least "1 MiB"'):
        load(None, ["storage.size=0 B"])


@pytest.mark.parametrize("name", [" ", " m", "m\n"])
def test_a_models_name_has_no_blanks_around_it(name: str) -> None:
    with pytest.raises(ConfigError, match=r"model_name = .*: write the name without blanks around it"):
        parse({"model_name": name})
