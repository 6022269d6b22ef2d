"""`sglcache events`: the event stream as people want it, or as JSON, a line an event. `watch` is one way to call it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import click
import msgspec

from sglcache.cli import Target, observer_of, rank_option, socket_option, targets_of
from sglcache.client.mirror import Curve, Fact, Mirror, Source
from sglcache.commands.curve import curve_of, curve_options
from sglcache.console import EXITS, Command, Number, emit, json_option
from sglcache.errors import BadRequest, Unavailable
from sglcache.units import Tier
from sglcache.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, medium_of

STEP_S = 1.0
SAMPLE = 4  # tokens of a line for people
SILENCE_S = 5.0  # without a word from an --endpoint, after which that is said; heartbeats come more often


def tier_name(value: str) -> str:
    """The medium of a tier, by its name, or by its own on the wire."""
    found = next((tier.medium for tier in Tier if value.lower() in (tier.name.lower(), tier.medium.lower())), None)
    if found is None:
        raise click.BadParameter(f"{value!r} is none of {', '.join(tier.name.lower() for tier in Tier)}.")
    return found


def prefix_tokens(value: str) -> tuple[int, ...]:
    """Token ids with commas between."""
    parts = [part.strip() for part in value.strip("[] ").split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise click.BadParameter(f"{value!r}: write token ids with commas between, such as 1,15043,3186")
    return tuple(map(int, parts))


class Along:
    """Which events lie on the path of a prompt that begins with `tokens`: of the blocks in it, and of all beyond it.

    Learns as the stream goes: a block whose parent was never told of is on nobody's path. Pairs of tokens (EAGLE's) go
    by their first.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tuple(tokens)
        self._reached: dict[tuple[int, int], int] = {}  # by rank and block, how many tokens end with it

    def keep(self, fact: Fact) -> Fact | None:
        """The part of it that lies on the path; None: nothing of it."""
        event, rank = fact.event, fact.rank
        if isinstance(event, AllBlocksCleared):
            return fact
        if isinstance(event, BlockRemoved):
            ours = [each for each in event.block_hashes if (rank, each) in self._reached]
            return fact._replace(event=msgspec.structs.replace(event, block_hashes=ours)) if ours else None
        start = 0
        if event.parent_block_hash is not None:
            if (found := self._reached.get((rank, event.parent_block_hash))) is None:
                return None
            start = found
        size, kept = event.block_size, 0
        for number, block in enumerate(event.block_hashes):
            span = event.token_ids[number * size : (number + 1) * size]
            wanted = self.tokens[start : start + size]
            if not span or tuple(each if isinstance(each, int) else each[0] for each in span)[: len(wanted)] != wanted:
                break
            start += size
            self._reached[rank, block] = start
            kept += 1
        if not kept:
            return None
        whole = kept == len(event.block_hashes)
        cut = msgspec.structs.replace(
            event, block_hashes=event.block_hashes[:kept], token_ids=event.token_ids[: kept * size]
        )
        return fact if whole else fact._replace(event=cut)


def chosen(facts: Iterator[Fact], medium: str | None, prefix: Sequence[int] | None) -> Iterator[Fact]:
    """Those of a tier, and along a prompt; a loss, or a clear, is everybody's."""
    along = Along(prefix) if prefix else None
    for fact in facts:
        kept = along.keep(fact) if along is not None else fact
        if kept is None:
            continue
        event = kept.event
        if medium is None or isinstance(event, AllBlocksCleared) or medium_of(event) == medium:
            yield kept


def as_wire(fact: Fact) -> dict[str, Any]:
    """The event as it is on the wire, with its batch's number and rank."""
    return {"seq": fact.seq, "rank": fact.rank, **msgspec.to_builtins(fact.event)}


def in_words(fact: Fact) -> str:
    """For people, one line; without the time."""
    event = fact.event
    head = f"#{fact.seq}  rank {fact.rank}  "
    if isinstance(event, AllBlocksCleared):
        return f"{head}cleared   everything: what was told before does not count any more"
    tier = next((each.name.lower() for each in Tier if each.medium == medium_of(event)), medium_of(event))
    hashes = event.block_hashes
    span = f"{_short(hashes[0])}{f'..{_short(hashes[-1])}' if len(hashes) > 1 else ''}" if hashes else "-"
    what = "stored" if isinstance(event, BlockStored) else "removed"
    text = f"{head}{what:<8}  {tier:<8} {len(hashes):>5} block{'s' if len(hashes) != 1 else ' '}  {span}"
    if isinstance(event, BlockStored):
        parent = "the root" if event.parent_block_hash is None else _short(event.parent_block_hash)
        text += f"  after {parent}"
        if tokens := event.token_ids:
            more = ",.." if len(tokens) > SAMPLE else ""
            text += f"  tokens {','.join(map(str, tokens[:SAMPLE]))}{more}"
        for key in ("lora_name", "cache_salt", "session_id"):
            if (value := getattr(event, key)) is not None:
                text += f"  {key} {value!r}"
    if event.group_idx:
        text += f"  group {event.group_idx}"
    return text


def _short(block: int) -> str:
    return f"{block & (1 << 64) - 1:016x}"


class Start(NamedTuple):
    """Where to begin."""

    sources: list[Source]
    since: dict[int, int]  # by rank, the batch to ask for first; 0: all that is cached
    wanted: dict[int, int]  # by rank, the first batch to show
    curve: Curve | None = None


def options(command: Callable[..., int]) -> Callable[..., int]:
    """Of `events` and of `watch`."""
    for option in reversed(
        (
            socket_option,
            rank_option("all"),
            click.option("--endpoint", help="The stream's endpoint; by default the daemon is asked."),
            click.option("--replay-endpoint", help="Where to ask for what came before; likewise."),
            click.option("--topic", default="", help="Only this topic, with --endpoint."),
            click.option("--tier", "--medium", "medium", type=tier_name, metavar="TIER", help="device, host, disk."),
            click.option(
                "--prefix",
                type=prefix_tokens,
                metavar="T,T,...",
                help="Only blocks of prompts that begin with these tokens; it begins with a replay, to know them.",
            ),
            click.option("--count", "--limit", type=click.IntRange(min=1), metavar="N", help="Stop after N events."),
            click.option(
                "--for", "for_s", type=Number(min=0.1), metavar="SECONDS", help="Stop after so long, whatever came."
            ),
            curve_options,
        )
    ):
        command = option(command)
    return command


@click.command(
    cls=Command,
    examples=(
        "sglcache events",
        "sglcache events --replay --tier host --count 100",
        "sglcache events --prefix 1,15043,3186",
        "sglcache events --json | jq -c 'select(.type == \"BlockRemoved\")'",
        "sglcache events --endpoint tcp://10.0.0.7:5557 --replay-endpoint tcp://10.0.0.7:5657 --since 1796028526192340",
    ),
    exits={0: "it ended as --count or --for said", 69: EXITS[69]},
)
@options
@click.option("--replay", is_flag=True, help="Begin with all that is cached now; by default with what comes.")
@click.option(
    "--since",
    type=click.IntRange(min=1),
    metavar="SEQ",
    help="Begin with batch SEQ, where the daemon has it still; else as --replay. Of one rank.",
)
@json_option
def events(
    socket: Path | None,
    rank: str | None,
    endpoint: str | None,
    replay_endpoint: str | None,
    topic: str,
    medium: str | None,
    prefix: tuple[int, ...] | None,
    count: int | None,
    for_s: float | None,
    curve_server_key: str | None,
    curve_key_file: Path | None,
    replay: bool,
    since: int | None,
    as_json: bool,
) -> int:
    """Print the event stream: what is stored where, and what is removed, as routers hear it.

    A loss that replay could not repair shows as `cleared`. With --json each line has the batch's number, `seq`, its
    `rank`, and the event as it is on the wire.
    """
    told = replay or bool(prefix)
    if told and since is not None:
        raise BadRequest("--replay and --prefix begin with all that is cached, --since with a batch; leave one out")
    if endpoint is not None:
        start = Start([Source(endpoint, replay_endpoint if told or since else None, topic)], {}, {})
    else:
        start = _ask(targets_of(socket, rank), told)
    if since is not None:
        if len(start.sources) > 1:
            raise BadRequest("--since is a number of one stream, and there are several; say which with --rank")
        start = start._replace(since={start.sources[0].rank: since}, wanted={start.sources[0].rank: since})
    if (told or since is not None) and any(source.replay_endpoint is None for source in start.sources):
        raise BadRequest("--replay, --since and --prefix ask for what was; say where, with --replay-endpoint")
    curve = curve_of(curve_server_key, curve_key_file) or start.curve
    with Mirror.of(start.sources, curve=curve, since=start.since) as mirror:
        for number, fact in enumerate(chosen(_follow(mirror, start, for_s), medium, prefix), 1):
            if as_json:
                emit(as_wire(fact))
            else:
                click.echo(f"{time.strftime('%H:%M:%S')}  {in_words(fact)}")
            if number == count:
                break
    return 0


def _ask(targets: list[Target], told: bool) -> Start:
    """The streams of these ranks, from now on or, where it is to be `told`, from all that is cached."""
    start = Start([], {}, {})
    for target in targets:
        with observer_of(target.socket) as client:
            facts = client.status()
            if (stream := facts["stream"]) is None:
                raise Unavailable("the daemon publishes no events; set events.enabled = true")
            last = client.digest()["seq"]
        source = Source(stream["endpoint"], stream["replay_endpoint"], stream["topic"], facts["rank"])
        start.sources.append(source)
        if not told:
            start.since[source.rank], start.wanted[source.rank] = last, last + 1
        start = start._replace(curve=Curve.of_stream(stream))
    return start


def _follow(mirror: Mirror, start: Start, for_s: float | None) -> Iterator[Fact]:
    """The facts from `start` on. Without a clear at its beginning that says no more than that it is one."""
    deadline = None if for_s is None else time.monotonic() + for_s
    silent_at: float | None = time.monotonic() + SILENCE_S
    begun: set[int] = set()
    while deadline is None or time.monotonic() < deadline:
        facts = mirror.step(STEP_S if deadline is None else max(0.0, min(STEP_S, deadline - time.monotonic())))
        if silent_at is not None and mirror.batches:
            silent_at = None
        if silent_at is not None and time.monotonic() > silent_at:
            silent_at = None
            where = ", ".join(source.endpoint for source in start.sources)
            click.echo(
                f"nothing has come from {where} in {SILENCE_S:g} s, not even a heartbeat; is that the port of the "
                "events (5557 by default, not that of HTTP or of replays), and open? `sglcache doctor events` looks",
                err=True,
            )
        for fact in facts:
            if fact.seq < start.wanted.get(fact.rank, 0):
                continue
            first = fact.rank not in begun
            begun.add(fact.rank)
            if first and isinstance(fact.event, AllBlocksCleared) and fact.rank in mirror.ranks:
                state = mirror.state_of(fact.rank)
                if not state.exact and state.snapshot is None:
                    continue
            yield fact


watch = Command(
    "watch",
    callback=partial(cast(Callable[..., int], events.callback), replay=True, since=None, as_json=True),
    params=[param for param in events.params if param.name not in ("replay", "since", "as_json")],
    help="The same as `sglcache events --replay --json`: the stream as JSON lines, from what is cached now on.",
    examples=("sglcache watch", "sglcache watch --limit 10"),
    exits=events.exits,
)
