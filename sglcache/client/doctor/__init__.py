"""Whether a router can follow a daemon, from end to end, each fault with its remedy: `sglcache doctor events`.

    /server_info ─► each rank's two ports ─► what its batches look like ─► a few blocks of our own, as a runner ─►
    a mirror has them ─► Dynamo's indexer, registered for this alone, has them: those from before, and those from now

Our own blocks lie in namespaces that nobody else can be in, by random names, so that no prompt is ever served with
them, and leave when their turn comes to be evicted: the cache has no verb for that, and needs none. What was registered
is unregistered, whatever happens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from sglcache.client.discovery import Server, Source, discover
from sglcache.client.doctor import ports
from sglcache.client.doctor.blocks import Runner
from sglcache.client.doctor.finding import Finding, failed, ok, skipped
from sglcache.client.doctor.routers import Dynamo
from sglcache.client.dynamo import Indexer
from sglcache.client.mirror import Curve, Mirror
from sglcache.errors import ConfigError, SglcacheError, Unavailable

ANSWER_S = 10.0  # what an answer over HTTP may take at least


class Options(NamedTuple):
    server: str  # its HTTP address, as the indexer reaches it, too
    sockets: Mapping[int, Path] = {}  # the ranks' control sockets, where they are on this host
    indexer: str | None = None  # an indexer's HTTP address
    timeout_s: float = 10.0  # of each thing that is waited for
    curve: Curve | None = None


def examine(options: Options) -> Iterator[Finding]:
    """Look at one thing after another, and stop where the rest would make no sense."""
    try:
        server = discover(options.server, max(ANSWER_S, options.timeout_s))
    except Unavailable as exc:
        what, _, _ = exc.message.partition("; ")
        yield failed("server", what, "start it with `sglcache serve`, or say --server http://HOST:PORT of its HTTP")
        return
    except ConfigError as exc:
        remedy = "set events.enabled = true, and events.endpoint to tcp://HOST:PORT, for several ranks not to port 0"
        yield failed("server", exc.message, remedy)
        return
    later = server.later_stages
    ranks = f"{len(server.sources)} rank{'s' * (len(server.sources) > 1)}"
    ranks += f" and {len(later)} of later stages" if later else ""
    yield ok("server", f"{server.url} tells of {ranks}, and of blocks of {server.block_size} tokens")
    with contextlib.closing(Runner(server, options.sockets, options.timeout_s)) as runner:
        yield from _follow(options, server, [*server.sources, *later], runner)


def _follow(options: Options, server: Server, streams: list[Source], runner: Runner) -> Iterator[Finding]:
    """From the ports on. `streams`: of all stages, the first one's first."""
    sources = [source for source in streams if source.rank in options.sockets]  # where we can be a runner
    # Ours are put first: an empty cache would show nothing of how blocks are told of.
    for source in sources:
        problems = list(runner.put_new(source.rank))
        yield from problems
        if problems:
            return
    heard = {}
    for source in streams:
        heard[source.rank] = ports.listen(source, options.curve, options.timeout_s)
        yield from ports.judge(source, heard[source.rank], server)
    yield from ports.agree(heard)
    if not all(each.ended and each.live for each in heard.values()):
        return
    if not sources:
        yield skipped("blocks", "the control sockets are on the daemon's host: run this there to see blocks arrive")
        return
    with Mirror.of(streams, curve=options.curve, hash_name=server.hash_name, bigram=server.bigram) as mirror:
        for source in sources:
            findings = list(runner.examine(mirror, source.rank, heard[source.rank]))
            yield from findings
            if any(finding.state == "failed" for finding in findings):
                return
    withheld = any(each.withheld for each in heard.values())
    if options.indexer is None:
        more = ", and token_ids are withheld: only who computes the hashes can match" if withheld else ""
        yield skipped("indexer", f"no --indexer was given{more}")
        return
    if withheld:
        yield failed(
            "indexer",
            "token_ids are withheld, and Dynamo's indexer matches by tokens: it would believe in no block",
            'set events.token_ids = "clear"',
        )
        return
    indexer = Indexer(options.indexer, max(ANSWER_S, options.timeout_s))
    first = [source for source in sources if source in server.sources]  # routers dial these alone
    dynamo = Dynamo(indexer, server, first, runner, options.timeout_s)
    try:
        yield from dynamo.examine()
    except (SglcacheError, LookupError, TypeError, ValueError, AttributeError) as exc:
        yield failed("indexer", f"it answered what no indexer of Dynamo does: {exc!r}", "look what serves there")
