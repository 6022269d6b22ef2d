"""The event stream of a real daemon, from a commit to who decodes it: how many blocks, how late, and who comes late.

Three parts, each with a daemon of its own and a subscriber in a process of its own, which decodes every event into a
mirror:

* `throughput`: a runner commits fresh prompts as fast as it can, in a pool that is full most of the time, so that
  blocks are stored and removed in both tiers. From the first commit to the subscriber having taken in the last batch.
* `latency`: from the answer to a commit, which says that the pages are cached, to the subscriber's receiving the batch
  that tells of its last page, before it decodes anything. Prompts of the trace, or made-up ones, at so many a second.
* `snapshot`: a subscriber that comes when so many pages are cached, while a runner goes on committing, as often: how
  long until it is exact, and how long anybody waited meanwhile (the longest of pings, one after another;
  `longest_ping_before` is the same without the subscriber).

With `indexer`, the address of a Dynamo indexer, it is registered too: the clock stops when it knows the last prompt.
"""

from __future__ import annotations

import json
import multiprocessing
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zmq

from sglcache.bench import trace
from sglcache.bench.daemon import Daemon
from sglcache.bench.harness import BenchError, Row, Summary, quantile
from sglcache.client import Client
from sglcache.client.mirror import Mirror
from sglcache.core import hashing
from sglcache.wire.events import BlockStored, decode_batch

VOCAB = 128_000
WITHIN_S = 120.0
MODEL = "default"
POLL_S = 0.002


class Options(NamedTuple):
    """What `bench events` is told."""

    page_size: int = 16
    prompts: int = 400
    prompt_tokens: int = 4096
    pages: tuple[int, ...] = (100_000,)
    trace: Path | None = None
    limit: int = 300
    rate: float = 50.0  # of the latency's prompts, a second
    indexer: str | None = None


def run(options: Options) -> Row:
    """All three."""
    return {
        "page_size": options.page_size,
        "trace": str(options.trace) if options.trace is not None else "made up",
        "throughput": throughput(options),
        "latency": latency(options),
        **{f"snapshot of {pages:,} pages": snapshot(options, pages) for pages in options.pages},
    }


# -- the subscriber, in its own process ------------------------------------------------------------------


class Seen(NamedTuple):
    """What a subscriber came to; `at` is the clock when it had taken in the batch that it was asked to reach."""

    at: float
    blocks: int  # stored and removed
    payload_bytes: int
    losses: int


class Subscriber:
    """Follows from construction on, as `follow` does in a process of its own. `reach` may be asked once."""

    def __init__(self, follow: Callable[[Connection, str, str], None], endpoint: str, replay_endpoint: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=follow, args=(theirs, endpoint, replay_endpoint), daemon=True)
        self._process.start()
        theirs.close()
        self._hear()

    def _hear(self) -> Any:
        if not self._pipe.poll(WITHIN_S):
            raise BenchError(f"the subscriber said nothing for {WITHIN_S:.0f} s")
        try:
            return self._pipe.recv()
        except EOFError:
            raise BenchError("the subscriber ended") from None

    def reach(self, seq: int) -> Any:
        """Wait until it has taken in number `seq`: what it came to."""
        self._pipe.send(seq)
        return self._hear()

    def close(self) -> None:
        self._pipe.close()
        self._process.join(WITHIN_S)

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def follow(pipe: Connection, endpoint: str, replay_endpoint: str) -> None:
    """Say that it is in step, follow until a number that comes down the pipe, say what it saw: `Seen`."""
    blocks, target = 0, None
    with Mirror(endpoint, replay_endpoint) as mirror:
        while not (mirror.synced and mirror.state.next_seq):
            mirror.step(0.1)
        pipe.send("in step")
        while True:
            facts = mirror.step(0.01)
            blocks += sum(len(getattr(event, "block_hashes", ())) for _, _, event in facts)
            if target is None and pipe.poll(0):
                target = pipe.recv()
            if target is not None and mirror.synced and (mirror.state.next_seq or 0) > target:
                pipe.send(Seen(time.monotonic(), blocks, mirror.payload_bytes, mirror.losses))
                return


def note(pipe: Connection, endpoint: str, replay_endpoint: str) -> None:
    """Note when each message comes, until a number; then say when each block on the device was first told of."""
    del replay_endpoint
    messages: list[tuple[float, bytes]] = []
    target = None
    with zmq.Context() as context, context.socket(zmq.SUB) as sub:
        sub.subscribe("")
        sub.connect(endpoint)
        sub.recv_multipart()  # at the latest a heartbeat
        pipe.send("in step")
        seq = 0
        while target is None or seq < target:
            if sub.poll(10):
                frames = sub.recv_multipart()
                messages.append((time.monotonic(), frames[2]))
                seq = int.from_bytes(frames[1], "big")
            if target is None and pipe.poll(0):
                target = pipe.recv()
    arrivals: dict[int, float] = {}
    for at, payload in messages:
        for event in decode_batch(payload).events:
            if isinstance(event, BlockStored) and event.medium == "GPU":
                for each in event.block_hashes:
                    arrivals.setdefault(each, at)
    pipe.send(arrivals)


# -- the parts -------------------------------------------------------------------------------------------


def throughput(options: Options) -> Row:
    """Blocks a second."""
    per_prompt = options.prompt_tokens // options.page_size
    # Room for a quarter of the prompts on the device, and for half on the host.
    device = max(4, options.prompts // 4) * per_prompt
    with _daemon(options, device, 2 * device) as daemon, _runner(daemon) as client:
        stream = client.status()["stream"]
        indexer = _Indexer(options, stream) if options.indexer is not None else None
        with Subscriber(follow, stream["endpoint"], stream["replay_endpoint"]) as subscriber:
            before = client.status()["counters"]
            prompts = [_fresh(number, options.prompt_tokens) for number in range(options.prompts)]
            start = time.monotonic()
            for prompt in prompts:
                _put(client, prompt)
            committed_s = time.monotonic() - start
            _quiet(client)
            seen: Seen = subscriber.reach(client.digest()["seq"])
            counters = client.status()["counters"]
            row: Row = {
                "blocks": sum(counters[key] - before[key] for key in ("blocks_stored", "blocks_removed")),
                "batches": counters["batches"] - before["batches"],
                "losses": seen.losses,
                "committing_s": committed_s,
                "seconds": seen.at - start,
            }
            if seen.losses or seen.blocks < row["blocks"]:
                raise BenchError(f"the subscriber saw {seen.blocks} of {row['blocks']} blocks, {seen.losses} losses")
            row["blocks_per_s"] = row["blocks"] / row["seconds"]
            row["bytes_per_block"] = seen.payload_bytes / max(1, seen.blocks)
            if indexer is not None:
                row["dynamo_s"] = indexer.knows(prompts[-1], start)
                row["dynamo_blocks_per_s"] = row["blocks"] / row["dynamo_s"]
                indexer.close()
    return row


def latency(options: Options) -> Row:
    """Milliseconds from the answer to a commit to the batch of its last page at the subscriber. May be negative."""
    with _daemon(options, 1 << 17, 0) as daemon, _runner(daemon) as client:
        stream = client.status()["stream"]
        chain = hashing.hasher("xxh3_128").chain
        page_bytes = 4 * options.page_size
        with Subscriber(note, stream["endpoint"], stream["replay_endpoint"]) as subscriber:
            commits: list[tuple[float, bytes]] = []
            started = time.monotonic()
            for number, prompt in enumerate(_prompts(options)):
                time.sleep(max(0.0, started + number / options.rate - time.monotonic()))
                whole = prompt[: len(prompt) // page_bytes * page_bytes]
                with client.acquire(prompt) as lease:
                    news = len(whole) // 4 - lease.matched_tokens
                    lease.commit()
                    if news > 0:
                        commits.append((time.monotonic(), whole))
            arrivals = subscriber.reach(client.digest()["seq"] + 1)
    late = []
    for at, whole in commits:
        last = hashing.block_hash(chain(b"", whole, page_bytes)[-16:])
        if (arrival := arrivals.pop(last, None)) is not None:  # of a page that comes again the first time counts
            late.append((arrival - at) * 1e3)
    return {"commits": len(late), "rate": options.rate, "ms": Summary.of(late)}


def snapshot(options: Options, pages: int) -> Row:
    """Someone comes late."""
    own = 64 * options.page_size  # tokens of a prompt that no other has
    families = [_fresh(number, 4 * options.page_size) for number in range(64)]
    with _daemon(options, pages + 4096, 0) as daemon, _runner(daemon) as client, _observer(daemon) as observer:
        count = 0
        while observer.digest()["tiers"]["DEVICE"][0] < pages:
            for _ in range(100):
                _put(client, families[count % 64] + _fresh(1000 + count, own))
                count += 1
        stream = client.status()["stream"]

        def work() -> None:
            nonlocal count
            _put(client, families[count % 64] + _fresh(1000 + count, own))
            count += 1

        end = time.monotonic() + 1.0
        before = _pings(observer, work, options.rate, lambda: time.monotonic() > end)
        done = client.status()["stream"]["snapshots_done"]
        late = _Late(stream)
        committed = count
        during = _pings(observer, work, options.rate, late.exact)
        row: Row = {
            "pages": observer.digest()["tiers"]["DEVICE"][0],
            "nodes": client.status()["gauges"]["num_nodes"],
            "exact_s": late.took_s,
            "snapshots": client.status()["stream"]["snapshots_done"] - done,
            "bytes": late.payload_bytes,
            "longest_ping_ms": max(during) * 1e3,
            "p50_ping_ms": Summary.of(during).p50 * 1e3,
            "longest_ping_before_ms": max(before) * 1e3,
            "p999_ping_ms": quantile(sorted(during), 0.999) * 1e3,
            "commits_meanwhile": count - committed,
        }
        late.close()
        if options.indexer is not None:
            indexer = _Indexer(options, stream)
            row["dynamo_exact_s"] = indexer.knows(families[(count - 1) % 64] + _fresh(1000 + count - 1, own))
            indexer.close()
    return row


class _Late:
    """A latecomer in a process of its own, which says when it is exact."""

    def __init__(self, stream: Row) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_come_late, args=(theirs, stream["endpoint"], stream["replay_endpoint"]), daemon=True
        )
        self._process.start()
        theirs.close()
        self.took_s = 0.0  # from its first look at the stream
        self.payload_bytes = 0

    def exact(self) -> bool:
        if not self._pipe.poll(0):
            return False
        self.took_s, self.payload_bytes = self._pipe.recv()
        return True

    def close(self) -> None:
        self._pipe.close()
        self._process.join(WITHIN_S)


def _come_late(pipe: Connection, endpoint: str, replay_endpoint: str) -> None:
    started = time.monotonic()
    with Mirror(endpoint, replay_endpoint) as mirror:
        while not (mirror.synced and mirror.exact):
            mirror.step(0.1)
        pipe.send((time.monotonic() - started, mirror.payload_bytes))


def _pings(observer: Client, work: Callable[[], None], rate: float, until: Callable[[], bool]) -> list[float]:
    """Pings, one after another, and a commit so many times a second: seconds of each ping."""
    clock = time.perf_counter
    taken: list[float] = []
    started, commits = clock(), 0
    while not until():
        if clock() > started + commits / rate:
            work()
            commits += 1
        start = clock()
        observer.ping()
        taken.append(clock() - start)
        if start > started + WITHIN_S:
            raise BenchError(f"not so after {WITHIN_S:.0f} s")
    return taken


# -- small things ----------------------------------------------------------------------------------------


class _Indexer:
    """Dynamo's standalone indexer, told of one rank."""

    def __init__(self, options: Options, stream: Row) -> None:
        assert options.indexer is not None
        self.url = options.indexer.rstrip("/")
        self.instance = {"instance_id": time.monotonic_ns(), "model_name": MODEL}
        self.started = time.monotonic()
        self._post(
            "register",
            block_size=options.page_size,
            endpoint=stream["endpoint"],
            replay_endpoint=stream["replay_endpoint"],
            dp_rank=0,
        )
        self.page_size = options.page_size

    def knows(self, prompt: bytes, since: float | None = None) -> float:
        """Seconds since then, or since it was registered, until it knows the whole prompt."""
        tokens = np.frombuffer(prompt, "<u4").tolist()
        whole = len(tokens) // self.page_size * self.page_size
        start = self.started if since is None else since
        while time.monotonic() < start + WITHIN_S:
            scores = self._post("query", token_ids=tokens)["scores"]
            if any(whole in ranks.values() for ranks in scores.values()):
                return time.monotonic() - start
            time.sleep(POLL_S)
        raise BenchError(f"the indexer at {self.url} does not know the last prompt after {WITHIN_S:.0f} s")

    def close(self) -> None:
        self._post("unregister")

    def _post(self, what: str, **body: Any) -> Any:
        data = json.dumps({**self.instance, **body}).encode()
        request = urllib.request.Request(f"{self.url}/{what}", data, {"Content-Type": "application/json"})
        get = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        try:
            with get(request, timeout=10) as answer:
                return json.load(answer)
        except (OSError, urllib.error.URLError) as exc:
            raise BenchError(f"the indexer at {self.url} can't be asked to {what}: {exc}") from exc


def _daemon(options: Options, device_pages: int, host_pages: int) -> Daemon:
    daemon = Daemon(
        [
            f"pool.page_size={options.page_size}",
            f"pool.num_tokens={device_pages * options.page_size}",
            f"host.num_tokens={host_pages * options.page_size}",
            "pool.num_layers=1",
            "pool.head_dim=1",
        ]
    )
    daemon.wait_healthy()
    return daemon


def _runner(daemon: Daemon) -> Client:
    return Client(daemon.socket, name="bench events")


def _observer(daemon: Daemon) -> Client:
    return Client(daemon.socket, role="observer", name="bench events")


def _put(client: Client, prompt: bytes) -> None:
    with client.acquire(prompt) as lease:
        lease.commit()


def _quiet(client: Client) -> None:
    """Wait for the copies, which are told of, too."""
    deadline = time.monotonic() + WITHIN_S
    while client.status()["gauges"]["num_copies"]:
        if time.monotonic() > deadline:
            raise BenchError("copies are still in flight")
        time.sleep(POLL_S)


def _fresh(number: int, tokens: int) -> bytes:
    """A prompt of its own."""
    return np.random.default_rng(number).integers(0, VOCAB, tokens, dtype=np.uint32).tobytes()


def _prompts(options: Options) -> Iterator[bytes]:
    if options.trace is not None:
        for request in trace.requests(options.trace, options.limit):
            yield request.tokens.tobytes()
        return
    families = [_fresh(number, options.prompt_tokens // 2) for number in range(16)]
    for number in range(options.limit):
        yield families[number % 16] + _fresh(100 + number, options.prompt_tokens // 2)
