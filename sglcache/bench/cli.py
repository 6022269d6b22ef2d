"""`sglcache bench`: one command for each benchmark. A table for people, `--json` for programs.

No figure here is a test: an absolute time says as much about the machine as about us. `make test` holds what the
benchmarks count, never how long it took.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from sglcache.bench import harness
from sglcache.bench.harness import Comparison, Row
from sglcache.bench.hybrid import KINDS
from sglcache.console import EXIT_FAILED, EXIT_INTERRUPTED, Group, emit, json_option
from sglcache.core.eviction import POLICIES
from sglcache.memory.geometry import LAYOUTS

Command = TypeVar("Command", bound=Callable[..., Any])

events_option = click.option("--events/--no-events", default=True, show_default=True, help="Publish events.")
page_size_option = click.option("--page-size", type=click.IntRange(1, 4096), default=16, show_default=True)
tiers_option = click.option("--tiers", type=click.IntRange(1, 2), default=1, show_default=True)
policy_option = click.option(
    "--policy", type=click.Choice(POLICIES), default="lru", show_default=True, help="Which pages are evicted first."
)
positive = click.IntRange(min=1)
device_option = click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where the device pools are."
)


def _numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in (value or "").split(",") if part)
    except ValueError:
        numbers = (0,)
    if any(not 1 <= number <= 256 for number in numbers):
        raise click.BadParameter(f"{value!r}: numbers of clients, 1 to 256, with commas between them")
    return numbers


def layout_option(name: str, text: str) -> Callable[[Command], Command]:
    return click.option(name, type=click.Choice(LAYOUTS), default=LAYOUTS[0], show_default=True, help=text)


@click.group(
    cls=Group, examples=("sglcache bench rpc", "sglcache bench index --trace mooncake_trace.jsonl --json"), exits={}
)
def bench() -> None:
    """Measure it: one benchmark for each journey."""


@bench.command(
    examples=("sglcache bench index --trace mooncake_trace.jsonl --limit 600 --page-size 16 --events --json",), exits={}
)
@click.option("--trace", type=click.Path(path_type=Path), required=True, help="A file in Mooncake's trace format.")
@click.option("--page-size", type=click.IntRange(1, 4096), default=64, show_default=True)
@click.option("--limit", type=positive, help="Only the first so many requests.")
@click.option("--capacity-tokens", type=positive, default=2_000_000, show_default=True)
@click.option("--host-tokens", type=click.IntRange(min=0), default=0, help="A second tier; by default there is none.")
@click.option("--events", is_flag=True, help="Hash and encode events.")
@click.option("--hash", "hash_name", type=click.Choice(["xxh3_128", "sha256"]), default="xxh3_128", show_default=True)
@policy_option
@click.option("--host-policy", type=click.Choice(POLICIES), default="lru", show_default=True, help="Of --host-tokens.")
@click.option("--kind", type=click.Choice(list(KINDS)), default="full", show_default=True, help="What the tree keeps.")
@click.option("--chunk-tokens", type=click.IntRange(min=0), default=0, help="Of a part; by default prompts go whole.")
@click.option("--window", type=positive, default=128, show_default=True, help="Tokens that a query sees: swa, unified.")
@click.option("--window-tokens", type=positive, help="Capacity for windows; by default a quarter of --capacity-tokens.")
@click.option("--state-slots", type=positive, default=256, show_default=True, help="Capacity: mamba, unified.")
@click.option(
    "--tenants",
    type=click.IntRange(min=0),
    default=0,
    help="Requests are of so many in turn, each with a floor of half its share; by default there are none.",
)
@click.option("--fixed-tokens", is_flag=True, help="As `token_ids` of the events: five bytes for each.")
@click.option("--beside-full", is_flag=True, help="In turn with a tree of full KV alone, which does the same work.")
@click.option("--peer", metavar="CMD", help="A command that measures something else; it prints a row as --json does.")
@click.option("--pairs", type=positive, default=harness.MIN_PAIRS, show_default=True, help="Runs of each, in turn.")
@json_option
def index(
    trace: Path,
    page_size: int,
    limit: int | None,
    capacity_tokens: int,
    host_tokens: int,
    events: bool,
    hash_name: str,
    policy: str,
    host_policy: str,
    kind: str,
    chunk_tokens: int,
    window: int,
    window_tokens: int | None,
    state_slots: int,
    tenants: int,
    fixed_tokens: bool,
    beside_full: bool,
    peer: str | None,
    pairs: int,
    as_json: bool,
) -> int:
    """The cost of a request on a real trace, in the index alone: acquire, commit, release, cut and encode.

    With --peer or --beside-full all run in turn, each time in a fresh process, and are compared.
    """
    from sglcache.bench import index as benchmark

    options = benchmark.Options(
        trace,
        page_size,
        limit,
        capacity_tokens,
        host_tokens,
        events,
        hash_name,
        policy,
        host_policy,
        kind,
        chunk_tokens,
        window,
        window_tokens,
        state_slots,
        fixed_tokens,
        tenants,
    )
    if peer is None and not beside_full:
        return _show("index", benchmark.run(options), as_json)
    ours = [sys.executable, "-m", "sglcache", "bench", "index", "--trace", str(trace), "--page-size", str(page_size)]
    ours += [
        "--capacity-tokens",
        str(capacity_tokens),
        "--host-tokens",
        str(host_tokens),
        "--hash",
        hash_name,
        "--policy",
        policy,
        "--host-policy",
        host_policy,
        "--chunk-tokens",
        str(chunk_tokens),
        "--tenants",
        str(tenants),
        "--json",
    ]
    if limit is not None:
        ours += ["--limit", str(limit)]
    if events:
        ours.append("--events")
    if fixed_tokens:
        ours.append("--fixed-tokens")
    full = ours if beside_full else None
    ours = [*ours, "--kind", kind, "--window", str(window), "--state-slots", str(state_slots)]
    if window_tokens is not None:
        ours += ["--window-tokens", str(window_tokens)]
    row = benchmark.against(ours, peer, pairs, full)
    if as_json:
        return _show("index", row, as_json)
    if full is not None:
        _comparison_table(shlex.join(full[1:]), row, row["full_ratios"], ("full", "ours"))
    if peer is not None:
        _comparison_table(f"{shlex.join(ours[1:])}\n{peer}", row, row["ratios"], ("ours", "peer"))
    return 0


@bench.command(examples=("sglcache bench estimate --trace mooncake_trace.jsonl --window 128 --json",), exits={})
@click.option("--trace", type=click.Path(path_type=Path), required=True, help="A file in Mooncake's trace format.")
@click.option("--page-size", type=click.IntRange(1, 4096), default=64, show_default=True)
@click.option("--limit", type=positive, help="Only the first so many requests.")
@click.option("--capacity-tokens", type=positive, default=2_000_000, show_default=True)
@click.option("--host-tokens", type=click.IntRange(min=0), default=0, help="A second tier; by default there is none.")
@click.option(
    "--chunk-tokens", type=click.IntRange(min=0), default=4096, show_default=True, help="Of a part; 0: whole."
)
@click.option("--window", type=positive, multiple=True, default=(128, 4096), show_default=True, help="Tokens; each.")
@click.option("--window-tokens", type=positive, help="Capacity for windows; by default a quarter of --capacity-tokens.")
@click.option("--state-slots", type=positive, default=256, show_default=True, help="Capacity for states.")
@json_option
def estimate(
    trace: Path,
    page_size: int,
    limit: int | None,
    capacity_tokens: int,
    host_tokens: int,
    chunk_tokens: int,
    window: tuple[int, ...],
    window_tokens: int | None,
    state_slots: int,
    as_json: bool,
) -> int:
    """What a router that follows the events would promise, against what is then matched, for each kind of tree.

    Shares of the prompts' tokens: what was matched, what a router promised that knows full KV, and one that knows all
    groups; the share of requests of which the first promised too much, and by how many tokens.
    """
    from sglcache.bench import estimate as benchmark
    from sglcache.bench.index import Options

    base = Options(
        trace,
        page_size,
        limit,
        capacity_tokens,
        host_tokens,
        chunk_tokens=chunk_tokens,
        window_tokens=window_tokens,
        state_slots=state_slots,
    )
    row = benchmark.run(benchmark.Options(base, window))
    if as_json:
        return _show("estimate", row, as_json)
    click.echo(
        f"{'':<8}{'window':>7}{'matched':>9}{'by full KV':>12}{'too much':>10}{'mean':>8}{'p99':>8}{'by groups':>11}"
    )
    for each in row["kinds"]:
        shares = [f"{100 * each[key]:.2f} %" for key in ("hit_rate", "estimated", "wrong_requests", "with_groups")]
        matched, promised, wrong, by_groups = shares
        over = f"{each['mean_over']:>8,.0f}{each['p99_over']:>8,.0f}"
        seen = f"{each['window'] or '':>7}"
        click.echo(f"{each['kind']:<8}{seen}{matched:>9}{promised:>12}{wrong:>10}{over}{by_groups:>11}")
    click.echo(_line({key: value for key, value in row.items() if key != "kinds"}))
    click.secho(_line(harness.facts()), dim=True)
    return 0


@bench.command(examples=("sglcache bench rpc --pairs 5", "sglcache bench rpc --clients 1,4,16 --pairs 5"), exits={})
@click.option("--tokens", type=positive, default=2048, show_default=True, help="Of the cached prompt.")
@page_size_option
@click.option("--pairs", type=positive, default=15, show_default=True, help="Blocks of each, in turn.")
@click.option("--operations", type=positive, default=500, show_default=True, help="In a block.")
@click.option("--clients", callback=_numbers, metavar="N,N,...", help="So many at once, each a process: 1,2,4,8,16.")
@events_option
@json_option
def rpc(
    tokens: int, page_size: int, pairs: int, operations: int, clients: tuple[int, ...], events: bool, as_json: bool
) -> int:
    """Acquire and release of a cached prompt through daemon and client, against bare echoes of the same frames.

    With --clients: what several get done at once, by time instead of by number; --pairs are of half a second each.
    """
    if clients:
        return _rpc_clients(clients, tokens, page_size, pairs, events, as_json)
    from sglcache.bench import rpc as benchmark

    options = benchmark.Options(tokens, page_size, pairs, operations, events=events)
    return _show("rpc", benchmark.run(options), as_json)


def _rpc_clients(clients: tuple[int, ...], tokens: int, page_size: int, pairs: int, events: bool, as_json: bool) -> int:
    from sglcache.bench import rpc_clients as benchmark

    row = benchmark.run(benchmark.Options(clients, tokens, page_size, pairs, events=events))
    if as_json:
        return _show("rpc", row, as_json)
    own, echo = f"{'a second':>10}{'p50 µs':>9}{'p99':>9}{'p99.9':>9}", f"{'echo: a second':>16}{'p50':>9}{'p99.9':>9}"
    click.echo(f"{'clients':>7}{own}{echo}{'ratio':>7}")
    for each in row["rows"]:
        own = f"{each['per_s']:>10,}{each['p50_us']:>9,}{each['p99_us']:>9,}{each['p999_us']:>9,}"
        echo = f"{each['echo_per_s']:>16,}{each['echo_p50_us']:>9,}{each['echo_p999_us']:>9,}"
        click.echo(f"{each['clients']:>7}{own}{echo}{each['ratio_per_s']:>7}")
    click.echo(_line({key: value for key, value in row.items() if key != "rows"}))
    click.secho(_line(harness.facts()), dim=True)
    return 0


@bench.command(examples=("sglcache bench match --blocks 3", "sglcache bench match --json"), exits={})
@click.option(
    "--pages",
    type=click.IntRange(min=1000),
    multiple=True,
    default=(100_000, 1_000_000),
    show_default=True,
    help="That are cached; once for each index.",
)
@page_size_option
@click.option("--blocks", type=positive, default=9, show_default=True, help="Blocks of requests to each, in turn.")
@json_option
def match(pages: tuple[int, ...], page_size: int, blocks: int, as_json: bool) -> int:
    """A full hit's cost for each page that it finds, in a small index and in a large one."""
    from sglcache.bench import match as benchmark

    return _show("match", benchmark.run(benchmark.Options(pages, page_size, blocks)), as_json)


@bench.command(examples=("sglcache bench count --events", "sglcache bench count --page-size 16 --json"), exits={})
@click.option("--page-size", type=click.IntRange(1, 4096), default=64, show_default=True)
@click.option("--events", is_flag=True, help="Hash and encode events.")
@click.option("--requests", type=positive, default=40, show_default=True, help="That are counted.")
@click.option(
    "--pages",
    type=click.IntRange(min=1000),
    multiple=True,
    default=(2_000, 100_000),
    show_default=True,
    help="That are cached where a match is counted; once for each index.",
)
@json_option
def count(page_size: int, events: bool, requests: int, pages: tuple[int, ...], as_json: bool) -> int:
    """The interpreter's instructions for a request in the index: they don't depend on the machine, nor on its load."""
    from sglcache.bench import count as benchmark

    options = benchmark.Options(page_size, events, requests, pages=pages)
    return _show("count", benchmark.run(options), as_json)


@bench.command(examples=("sglcache bench memory --pages 65536", "sglcache bench memory --json"), exits={})
@click.option("--pages", type=click.IntRange(min=2048), default=1 << 16, show_default=True)
@page_size_option
@tiers_option
@events_option
@policy_option
@json_option
def memory(pages: int, page_size: int, tiers: int, events: bool, policy: str, as_json: bool) -> int:
    """What the index weighs beyond tokens, slots and digests: bytes per page and per node."""
    from sglcache.bench import memory as benchmark

    return _show("memory", benchmark.run(benchmark.Options(pages, page_size, tiers == 2, events, policy)), as_json)


@bench.command(examples=("sglcache bench stall --nodes 50000", "sglcache bench stall --json"), exits={})
@click.option("--nodes", type=click.IntRange(min=100), default=200_000, show_default=True)
@page_size_option
@tiers_option
@events_option
@policy_option
@click.option(
    "--repeats", type=positive, default=3, show_default=True, help="Runs; each call counts with its quickest."
)
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="NAME",
    help="Instead: the longest stall of a daemon's loop while that goes wrong; all: each of them in turn.",
)
@json_option
def stall(
    nodes: int,
    page_size: int,
    tiers: int,
    events: bool,
    policy: str,
    repeats: int,
    faults: tuple[str, ...],
    as_json: bool,
) -> int:
    """The longest single call to an index with many nodes, the cycle collector included."""
    if faults:
        return _stall_by_fault(faults, as_json)
    from sglcache.bench import stall as benchmark

    options = benchmark.Options(nodes, page_size, tiers == 2, events, policy=policy, repeats=repeats)
    return _show("stall", benchmark.run(options), as_json)


def _stall_by_fault(names: tuple[str, ...], as_json: bool) -> int:
    from sglcache.bench import faults as benchmark

    if names == ("all",):
        names = tuple(benchmark.FAULTS)
    if unknown := [name for name in names if name not in benchmark.FAULTS]:
        raise click.BadParameter(f"{unknown[0]} is none; all, {', '.join(benchmark.FAULTS)}", param_hint="--fault")
    row = benchmark.run(benchmark.Options(faults=names))
    if as_json:
        return _show("stall", row, as_json)
    click.echo(f"{'':<18}{'loop, longest':>15}{'its own':>9}{'ping p50':>10}{'p99':>9}{'max':>9}   ms")
    for name, each in row["faults"].items():
        values = f"{each['ping_p50_ms']:>10.2f}{each['ping_p99_ms']:>9.2f}{each['ping_max_ms']:>9.2f}"
        click.echo(f"{name:<18}{each['longest_stall_ms']:>15.2f}{each['longest_own_ms']:>9.2f}{values}")
    return 0


@bench.command(examples=("sglcache bench death --samples 50", "sglcache bench death --json"), exits={})
@click.option("--samples", type=positive, default=200, show_default=True, help="Runners that are killed, one by one.")
@click.option("--leases", type=positive, default=8, show_default=True, help="Of each.")
@click.option("--lease-tokens", type=positive, default=2048, show_default=True)
@page_size_option
@events_option
@click.option(
    "--pool-gib",
    type=click.FloatRange(min=0),
    default=0.0,
    help="Of pages of Llama-3.1-8B, without a host tier.  [default: what two runners hold, of small pages]",
)
@device_option
@json_option
def death(
    samples: int,
    leases: int,
    lease_tokens: int,
    page_size: int,
    events: bool,
    pool_gib: float,
    device: str,
    as_json: bool,
) -> int:
    """From kill -9 of a runner that holds leases until all its pages are free again."""
    from sglcache.bench import death as benchmark

    row = benchmark.run(benchmark.Options(samples, leases, lease_tokens, page_size, events, device, pool_gib))
    if as_json:
        return _show("death", row, as_json)
    click.echo(f"{'ms':<22}{'p50':>9}{'p99':>9}{'max':>9}")
    for field, text in (
        ("dead_ms", "dead, seen from here"),
        ("heard_ms", "told to the rank"),
        ("freed_ms", "told, to free"),
        ("total_ms", "killed, to free"),
    ):
        click.echo(f"{text:<22}" + "".join(f"{row[field][name]:>9.3f}" for name in ("p50", "p99", "max")))
    click.echo(_line({key: value for key, value in row.items() if not key.endswith("_ms")}))
    click.secho(_line(harness.facts()), dim=True)
    return 0


@bench.command(examples=("sglcache bench restart --gib 0.5", "sglcache bench restart --json"), exits={})
@click.option("--gib", type=click.FloatRange(min=0.01), default=1.0, show_default=True, help="Of the host tier.")
@click.option("--page-size", type=positive, default=64, show_default=True)
@click.option("--token-kib", type=positive, default=32, show_default=True, help="Of KV of a token, all layers.")
@click.option("--repeats", type=positive, default=5, show_default=True)
@click.option("--beside-empty/--alone", default=True, show_default=True, help="And of a rank whose host tier is empty.")
@device_option
@json_option
def restart(
    gib: float, page_size: int, token_kib: int, repeats: int, beside_empty: bool, device: str, as_json: bool
) -> int:
    """From kill -9 of a rank until its next life gives a hit from the host tier, its bytes looked at."""
    from sglcache.bench import restart as benchmark

    options = benchmark.Options(gib, page_size, token_kib, repeats, device, beside_empty)
    return _show("restart", benchmark.run(options), as_json)


@bench.command(examples=("sglcache bench journal --pairs 3", "sglcache bench journal --json"), exits={})
@page_size_option
@click.option("--prompt-tokens", type=positive, default=4096, show_default=True)
@click.option("--requests", type=positive, default=400, show_default=True, help="Of a block.")
@click.option("--pairs", type=positive, default=7, show_default=True, help="Blocks of each, in turn.")
@json_option
def journal(page_size: int, prompt_tokens: int, requests: int, pairs: int, as_json: bool) -> int:
    """What the journal of the host tier costs a request: an index with one and one without, in turn."""
    from sglcache.bench import restart as benchmark

    options = benchmark.JournalOptions(page_size, prompt_tokens, requests, pairs)
    return _show("journal", benchmark.run_journal(options), as_json)


@bench.command(examples=("sglcache bench start --pool-gib 1", "sglcache bench start --json"), exits={})
@click.option("--pool-gib", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True)
@click.option("--repeats", type=positive, default=7, show_default=True)
@click.option(
    "--stored-pages", type=click.IntRange(min=0), default=0, help="And with a file store that has so many, in turn."
)
@json_option
def start(pool_gib: float, repeats: int, stored_pages: int, as_json: bool) -> int:
    """From the launch of `sglcache serve` to /health saying ok."""
    from sglcache.bench import start as benchmark

    return _show("start", benchmark.run(benchmark.Options(pool_gib, repeats, stored_pages)), as_json)


@bench.command(examples=("sglcache bench runner --pairs 3", "sglcache bench runner --json"), exits={})
@click.option(
    "--prompt-tokens",
    type=click.IntRange(16, 1 << 16),
    multiple=True,
    help="Of what is shared; may be repeated.  [default: 512, 2048, 4096]",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    multiple=True,
    help="May be repeated.  [default: float32, bfloat16]",
)
@click.option("--layers", type=positive, default=6, show_default=True)
@click.option("--hidden", type=click.IntRange(min=64), default=512, show_default=True, help="A multiple of 64.")
@page_size_option
@click.option("--pairs", type=positive, default=9, show_default=True, help="Measurements of each, in turn.")
@json_option
def runner(
    prompt_tokens: tuple[int, ...],
    dtype: tuple[str, ...],
    layers: int,
    hidden: int,
    page_size: int,
    pairs: int,
    as_json: bool,
) -> int:
    """A small model's first token by tier, and its decode steps, beside transformers' own cache. Some two minutes."""
    from sglcache.bench import runner as benchmark

    options = benchmark.Options(layers=layers, hidden=hidden, page_size=page_size, pairs=pairs)
    if prompt_tokens:
        options = options._replace(prompts=prompt_tokens)
    if dtype:
        options = options._replace(dtypes=dtype)
    row = benchmark.run(options)
    if as_json:
        return _show("runner", row, as_json)
    _over_lines(row)
    return 0


@bench.command(examples=("sglcache bench events --prompts 100", "sglcache bench events --json"), exits={})
@page_size_option
@click.option("--prompts", type=positive, default=400, show_default=True, help="Of the throughput's.")
@click.option("--prompt-tokens", type=click.IntRange(min=64), default=4096, show_default=True)
@click.option(
    "--pages", type=positive, multiple=True, help="Cached when someone comes late; may be repeated.  [default: 100000]"
)
@click.option("--trace", type=click.Path(path_type=Path), help="Latency under this; by default under made-up prompts.")
@click.option("--limit", type=positive, default=300, show_default=True, help="Only the first so many requests.")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), default=50.0, show_default=True, help="A second.")
@click.option("--indexer", metavar="URL", help="A Dynamo indexer, which is told of the stream as well.")
@json_option
def events(
    page_size: int,
    prompts: int,
    prompt_tokens: int,
    pages: tuple[int, ...],
    trace: Path | None,
    limit: int,
    rate: float,
    indexer: str | None,
    as_json: bool,
) -> int:
    """The event stream, from a commit to who decodes it: blocks a second, how late, and someone who comes late."""
    from sglcache.bench import events as benchmark

    options = benchmark.Options(page_size, prompts, prompt_tokens, pages or (100_000,), trace, limit, rate, indexer)
    return _show("events", benchmark.run(options), as_json)


@bench.command(examples=("sglcache bench storage --folder /mnt/nvme", "sglcache bench storage --json"), exits={})
@click.option(
    "--page-kib", type=positive, multiple=True, help="Bytes of a page; may be repeated.  [default: 64, 256, 2048]"
)
@click.option("--total-mib", type=positive, default=64, show_default=True, help="Of a run.")
@click.option("--pairs", type=positive, default=harness.MIN_PAIRS, show_default=True, help="Runs of each, in turn.")
@click.option(
    "--folder", type=click.Path(path_type=Path), help="On the disk that is meant; by default where temporary files go."
)
@click.option("--mooncake", "master", metavar="HOST:PORT", help="A Mooncake master: its store as well.")
@json_option
def storage(
    page_kib: tuple[int, ...], total_mib: int, pairs: int, folder: Path | None, master: str | None, as_json: bool
) -> int:
    """Put and get of the third tier, beside bare files of the same bytes, and beside Mooncake's own client."""
    from sglcache.bench import storage as benchmark

    options = benchmark.Options(total_bytes=total_mib << 20, pairs=pairs, folder=folder, master=master)
    if page_kib:
        options = options._replace(page_bytes=tuple(each << 10 for each in page_kib))
    return _show("storage", benchmark.run(options), as_json)


@bench.command(examples=("sglcache bench copy --size 64 --threads 2", "sglcache bench copy --json"), exits={})
@click.option("--size", "sizes", type=positive, multiple=True, help="MiB; may be repeated.  [default: 64, 256]")
@page_size_option
@click.option("--layers", type=positive, default=32, show_default=True)
@click.option("--kv-heads", type=positive, default=8, show_default=True)
@click.option("--head-dim", type=positive, default=128, show_default=True)
@layout_option("--layout", "The device pool's.")
@layout_option("--host-layout", "The host pool's.")
@click.option("--threads", type=positive, help="That copy, for each direction.  [default: as a rank has]")
@click.option("--pairs", type=positive, default=7, show_default=True, help="Copies of each, in turn.")
@device_option
@json_option
def copy(
    sizes: tuple[int, ...],
    page_size: int,
    layers: int,
    kv_heads: int,
    head_dim: int,
    layout: str,
    host_layout: str,
    threads: int | None,
    pairs: int,
    device: str,
    as_json: bool,
) -> int:
    """The copy engine between two tiers, against plain memcpys of as many bytes: in as many threads, or a card's."""
    from sglcache.bench import copy as benchmark

    options = benchmark.Options(
        sizes or (64, 256), page_size, layers, kv_heads, head_dim, layout, host_layout, threads or 0, pairs, device
    )
    return _show("copy", benchmark.run(options), as_json)


CARDS = ("copies", "decoding", "tokens", "polls", "runners", "ranks")


@bench.command(
    examples=("sglcache bench cards --markdown figures.md", "sglcache bench cards --only copies --size 64 --json"),
    exits={EXIT_FAILED: "something could not be measured, or bytes were wrong"},
)
@click.option("--only", type=click.Choice(CARDS), multiple=True, help="A section; may be repeated.")
@click.option("--quick", is_flag=True, help="Little of each: whether all of it runs.")
@click.option(
    "--size", "sizes", type=positive, multiple=True, help="MiB that are copied; may be repeated.  [default: 64 to 4096]"
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(32, 32_768),
    multiple=True,
    help="For first tokens; may be repeated.  [default: 2048, 16384]",
)
@click.option("--prefill-rate", type=positive, help="Tokens a second that are computed of them.  [default: 20000]")
@click.option(
    "--rank-gib",
    type=click.FloatRange(min=0.01),
    multiple=True,
    help="Host tiers whose rank is killed, where they fit; may be repeated.  [default: 1, 8, 64]",
)
@click.option("--pairs", type=positive, help="Measurements of each, in turn.  [default: 5]")
@click.option("--limit-s", type=positive, help="What would take longer is left out.  [default: 460]")
@click.option("--markdown", type=click.Path(dir_okay=False, path_type=Path), help="Written anew after each section.")
@json_option
def cards(
    only: tuple[str, ...],
    quick: bool,
    sizes: tuple[int, ...],
    prompt_tokens: tuple[int, ...],
    prefill_rate: int | None,
    rank_gib: tuple[float, ...],
    pairs: int | None,
    limit_s: int | None,
    markdown: Path | None,
    as_json: bool,
) -> int:
    """What a card makes of it: copies, a runner beside them, first tokens, deaths, polls. Less than eight minutes.

    On the first card that this process sees (CUDA_VISIBLE_DEVICES), with nothing else on it.
    """
    from dataclasses import replace

    from sglcache.bench import cards as benchmark
    from sglcache.bench import cards_show

    said: dict[str, Any] = {
        "only": only,
        "sizes_mib": tuple(sorted(set(sizes))),
        "prompts": prompt_tokens,
        "prefill_rate": float(prefill_rate or 0),
        "rank_gib": rank_gib,
        "pairs": pairs,
        "limit_s": float(limit_s or 0),
    }
    base = benchmark.QUICK if quick else benchmark.Options()
    options = replace(base, **{key: value for key, value in said.items() if value})
    return cards_show.show(options, markdown, as_json)


@bench.command(examples=("sglcache bench tiers --pairs 3", "sglcache bench tiers --json"), exits={})
@click.option("--tokens", type=positive, default=1024, show_default=True, help="Of the prompt that is loaded back.")
@page_size_option
@click.option("--layers", type=positive, default=32, show_default=True)
@click.option("--kv-heads", type=positive, default=8, show_default=True)
@click.option("--head-dim", type=positive, default=128, show_default=True)
@click.option("--pairs", type=positive, default=9, show_default=True, help="Measurements of each, in turn.")
@click.option("--operations", type=positive, default=20, show_default=True, help="Write-throughs in a block.")
@json_option
def tiers(
    tokens: int,
    page_size: int,
    layers: int,
    kv_heads: int,
    head_dim: int,
    pairs: int,
    operations: int,
    as_json: bool,
) -> int:
    """A load-back as a runner sees it, first layer and last, and what a write-through costs acquire and commit."""
    from sglcache.bench import tiers as benchmark

    options = benchmark.Options(tokens, page_size, layers, kv_heads, head_dim, pairs, operations)
    return _show("tiers", benchmark.run(options), as_json)


@bench.command(
    examples=("sglcache bench suite --quick", "sglcache bench suite --only index --trace mooncake_trace.jsonl"),
    exits={
        EXIT_FAILED: "something of ours could not be measured",
        EXIT_INTERRUPTED: "interrupted: it says how to go on",
    },
)
@click.option(
    "--into",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where results go; where a run was interrupted there it goes on.  [default: a new folder in .bench]",
)
@click.option("--quick", is_flag=True, help="Less of each, in less than two minutes: to see that all of it runs.")
@click.option("--tiny", is_flag=True, hidden=True)
@click.option("--only", metavar="NAME", multiple=True, help="A case, or all of a table; may be repeated.")
@click.option("--trace", type=click.Path(path_type=Path), help="By default one is made up.")
@click.option("--no-peers", is_flag=True, help="Ours and its floors alone.")
@click.option("--peers", type=click.Path(path_type=Path), help="Their environment.  [default: .venv-peers]")
@click.option("--flames/--no-flames", default=None, help="Flame graphs of hot paths.  [default: unless --quick]")
@json_option
def suite(
    folder: Path | None,
    quick: bool,
    tiny: bool,
    only: tuple[str, ...],
    trace: Path | None,
    no_peers: bool,
    peers: Path | None,
    flames: bool | None,
    as_json: bool,
) -> int:
    """Everything, in turn with peers and floors, into a folder of results, tables, pictures. A quarter of an hour."""
    from sglcache.bench import show
    from sglcache.bench import suite as benchmark

    size: benchmark.SizeName = "tiny" if tiny else "quick" if quick else "full"
    if folder is None:
        folder = Path(".bench") / time.strftime("%Y%m%d-%H%M%S")
    options = benchmark.Options(folder, size, trace, only, flames=flames)
    if no_peers:
        options = options._replace(peers=None)
    elif peers is not None:
        options = options._replace(peers=peers)
    return show.suite(options, as_json)


@bench.command(
    examples=("sglcache bench report .bench/RUN", "sglcache bench report .bench/RUN --into page.md"), exits={}
)
@click.argument("results", type=click.Path(path_type=Path))
@click.option("--into", type=click.Path(dir_okay=False, path_type=Path), help="A document whose marks are filled.")
@json_option
def report(results: Path, into: Path | None, as_json: bool) -> int:
    """A run's tables; or into a document, where <!-- bench:NAME --> and <!-- /bench --> are."""
    from sglcache.bench import report as reports
    from sglcache.bench.suite import read

    if into is not None:
        filled, left = reports.into(results, into)
        if as_json:
            emit({"filled": filled, "left": left})
        else:
            rest = f"; left: {', '.join(left)}" if left else ""
            click.echo(f"{into}: {', '.join(filled) or 'nothing'} written{rest}")
    elif as_json:
        emit({each.title: {"head": each.head, "rows": each.rows} for each in reports.tables(read(results))})
    else:
        click.echo(reports.markdown(read(results)), nl=False)
    return 0


# -- showing ------------------------------------------------------------------------------------------


def _show(title: str, row: Row, as_json: bool) -> int:
    row = {**row, "machine": harness.facts()}
    if as_json:
        emit(harness.plain(row))
        return 0
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("", title, title_justify="left")
    nested = {key: value for key, value in row.items() if isinstance(value, dict | list) and key != "machine"}
    for key, value in row.items():
        if key not in nested and key != "machine":
            table.add_row(key, _text(value))
    console.print(table)
    for key, value in nested.items():
        if isinstance(value, dict):
            for name, each in value.items():
                console.print(f"{key}, {name}: {_line(each)}", highlight=False, soft_wrap=True)
        else:
            console.print(f"{key}: {_line(value)}", highlight=False, soft_wrap=True)
    console.print(_line(row["machine"]), style="dim", highlight=False, soft_wrap=True)
    return 0


def _comparison_table(title: str, row: Row, ratios: dict[str, Comparison], names: tuple[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    # Medians, their ratio, the ratios of single pairs from the least to the most, and how far the runs were apart.
    table = Table("", *names, "ratio", "pairs", *(f"{name}, runs" for name in names))
    for field, each in ratios.items():
        table.add_row(
            field,
            f"{each.ours:,.1f}",
            f"{each.other:,.1f}",
            f"{each.ratio:.2f}",
            f"{each.least:.2f}-{each.most:.2f}",
            "-".join(f"{value:,.1f}" for value in each.ours_spread),
            "-".join(f"{value:,.1f}" for value in each.other_spread),
        )
    console.print(title, style="dim", highlight=False, soft_wrap=True)
    console.print(table)
    console.print(f"{row['pairs']} pairs; hit rate {_line(row['hit_rate'])}", highlight=False)
    console.print(_line(harness.facts()), style="dim", highlight=False, soft_wrap=True)


def _over_lines(row: Row) -> None:
    """Ours over theirs: medians in ms, their ratio, and the ratios of single pairs from the least to the most."""
    for title, cases in row.items():
        if not isinstance(cases, list):
            continue
        click.echo(f"{title:<40}{'ours, ms':>10}{'theirs':>10}{'ratio':>8}  {'pairs'}")
        for case in cases:
            words = ", ".join(f"{key} {_text(value)}" for key, value in case.items() if isinstance(value, int | str))
            click.echo(f"  {words}")
            for name, each in case.items():
                if isinstance(each, float):
                    click.echo(f"    {name:<56}{each:>8.3f}")
                elif isinstance(each, dict):
                    times = f"{each['ours_ms']:>10,.1f}{each['theirs_ms']:>10,.1f}{each['ratio']:>8.3f}"
                    click.echo(f"    {name:<36}{times}  {each['ratio_least']:.2f}-{each['ratio_most']:.2f}")
    click.echo(_line({key: value for key, value in row.items() if not isinstance(value, list)}))
    click.secho(_line(harness.facts()), dim=True)


def _line(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_line(each)}" for key, each in value.items())
    if isinstance(value, list):
        return ("; " if value and isinstance(value[0], dict) else ", ").join(map(_line, value))
    return _text(value)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 10 else f"{value:,.1f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
