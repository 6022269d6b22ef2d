"""A real trace through a running daemon, as model runners would drive it, from several processes.

Each request: acquire the prompt (all but its last token may match), wait for what is loaded from the host, check the
matched pages' bytes if asked to, write every fresh page, commit in chunks, extend by the output, commit, release.
Of a daemon with a window or states the prompt's pages are had chunk by chunk, and a state is committed at the end of a
chunk: at multiples of the daemon's interval, at the depth where full attention's KV would have gone on matching, and at
the prompt's and the output's last whole page. Half of the requests keep window pages of the last chunk's end alone.
The requests are dealt out in turn, so a conversation's prefix is mostly another process's work. Beside it a mirror
follows the event stream as a router does; at the end it must equal the index, tier by tier.

Nothing is simulated but the model: instead of KV and states there are `pattern`'s bytes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import multiprocessing
import random
import signal
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import xxhash

from sglcache.bench import trace as traces
from sglcache.bench.contents import Checked, Contents, WrongContents
from sglcache.bench.daemon import Daemon
from sglcache.client import Client, Lease
from sglcache.client.client import Tokens
from sglcache.client.mirror import Curve, Fact, Mirror
from sglcache.config import load
from sglcache.errors import Changed, ConfigError, NoSpace, SglcacheError, Unavailable
from sglcache.units import Tier
from sglcache.wire.events import AllBlocksCleared

CHUNK_TOKENS = 2048  # a prefill chunk: what is computed between two commits
SHARED_UNIT = 512  # tokens; the grain at which a client remembers what it wrote itself
FIRST_WAIT_S, LAST_WAIT_S = 0.001, 0.1  # between two tries for room
GIVE_UP_S = 60.0  # after so long without room
START_S = 120.0  # for a client process to attach, on a machine that has other things to do
SETTLE_S = 30.0  # for the mirror to reach what the index was when the last client had left
MADE_UP_REQUESTS = 1000
EVENT_KINDS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
SHOWN = 5  # hashes of a difference that are told


class Kind(NamedTuple):
    """Of a tree: the companions of full attention's KV, and a small daemon that has them."""

    companions: tuple[str, ...]
    settings: tuple[str, ...]


_FULL = ("pool.num_tokens=65536", "host.num_tokens=131072")
_WINDOW = ("window.size=128", "window.num_layers=2", "window.num_tokens=16384")
_MAMBA = (
    "mamba.num_layers=2",
    'mamba.states=[{name="conv",shape=[64,4],dtype="bfloat16"},{name="ssm",shape=[8,16,16],dtype="float32"}]',
    "mamba.num_slots=64",
    "mamba.interval=1024",
)
KINDS = {
    "swa": Kind(("window",), (*_FULL, *_WINDOW)),
    "mamba": Kind(("mamba",), (*_FULL, *_MAMBA)),
    "unified": Kind(("window", "mamba"), (*_FULL, *_WINDOW, *_MAMBA)),
}


class Options(NamedTuple):
    """What a replay is told."""

    trace: Path
    limit: int | None = None  # requests
    num_clients: int = 2
    verify: bool = False
    max_output_tokens: int = 512  # longer outputs are cut
    socket: Path | None = None  # None: found by the rule of sglcache.paths
    rate: float | None = None  # requests a second at most, of all clients together; None: as fast as they can
    kind: str | None = None  # one of KINDS that the daemon must be of; None: whatever it is


class Done(NamedTuple):
    """One request as its client saw it."""

    input_tokens: int
    output_tokens: int
    matched_tokens: int
    host_tokens: int  # of the matched, those from the host
    shared_tokens: int  # matched and surely not written by this client; a lower bound
    reaches: tuple[int, ...]  # what each resource would have matched, as `Lease.reaches`
    verified: Checked
    duplicate_pages: int
    num_states: int  # committed
    num_commands: int
    num_waits: int  # tries that found no room
    was_cut: bool  # the prompt is longer than the pool
    acquire_s: float


@dataclass
class _Work:
    """A request under way: what it is, and what came of it so far, over all leases that it needed."""

    index: int
    prompt: npt.NDArray[np.uint32]
    tokens: npt.NDArray[np.uint32]  # the prompt, and the output behind it
    matched_tokens: int = 0  # by the first lease: a later one finds what this request has committed
    host_tokens: int = 0
    reaches: tuple[int, ...] = ()
    acquire_s: float = 0.0
    verified: Checked = field(default_factory=Checked)
    duplicates: int = 0
    num_states: int = 0
    num_commands: int = 0

    def begin(self, lease: Lease, acquire_s: float) -> None:
        self.num_commands += 2  # this, and the release
        if not self.reaches:
            self.matched_tokens, self.host_tokens = lease.matched_tokens, lease.host_tokens
            self.reaches, self.acquire_s = lease.reaches, acquire_s

    def add(self, checked: Checked) -> None:
        self.verified = Checked(*map(sum, zip(self.verified, checked, strict=True)))


class Problem(NamedTuple):
    """What a client could not go on from."""

    message: str


@dataclass
class TierReport:
    """One tier: the blocks that the index has and the mirror believes, as of one number of the stream."""

    seq: int
    index_blocks: int
    mirror_blocks: int
    missing: list[int] = field(default_factory=list)  # hashes the mirror lacks; the first few
    extra: list[int] = field(default_factory=list)  # hashes the mirror has and should not; the first few

    @property
    def equal(self) -> bool:
        return not self.missing and not self.extra


@dataclass
class Report:
    """The outcome. `problems` is empty if everything was as it should be."""

    trace: str
    num_clients: int
    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    matched_tokens: int = 0
    host_tokens: int = 0
    third_tokens: int = 0  # of these, what came there from the third tier while an acquire waited
    shared_tokens: int = 0
    reach_tokens: dict[str, int] = field(default_factory=dict)  # by resource, what it would have matched
    verified_tokens: int = 0
    verified_window_tokens: int = 0
    verified_states: int = 0
    duplicate_pages: int = 0
    states: int = 0  # committed
    commands: int = 0
    waits: int = 0
    cut_requests: int = 0  # whose prompts are longer than the pool: only so much of them was done
    wall_s: float = 0.0
    acquire_p50_us: float = 0.0
    acquire_p99_us: float = 0.0
    events: dict[str, int] = field(default_factory=dict)  # by kind, as a subscriber saw them; and "blocks" in all
    batches: int = 0
    payload_bytes: int = 0
    tiers: dict[str, TierReport] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        return self.matched_tokens / self.input_tokens if self.input_tokens else 0.0

    @property
    def reach_rates(self) -> dict[str, float]:
        """By resource, the hit rate that there would be if all else were always there; of full KV, and each with it."""
        return {name: tokens / self.input_tokens for name, tokens in self.reach_tokens.items() if self.input_tokens}

    @property
    def hit_tokens(self) -> dict[str, int]:
        """By the tier that they were found in."""
        return {
            "device": self.matched_tokens - self.host_tokens,
            "host": self.host_tokens - self.third_tokens,
            "third": self.third_tokens,
        }

    @property
    def ops_per_s(self) -> float:
        return self.commands / self.wall_s if self.wall_s else 0.0

    def to_json(self) -> str:
        names = ("hit_rate", "hit_tokens", "reach_rates", "ops_per_s", "ok")
        return json.dumps({**asdict(self), **{name: getattr(self, name) for name in names}})

    @property
    def ok(self) -> bool:
        return not self.problems

    def add(self, done: Done) -> None:
        for name, tokens in zip(self.reach_tokens, done.reaches, strict=True):
            self.reach_tokens[name] += tokens
        self.requests += 1
        self.input_tokens += done.input_tokens
        self.output_tokens += done.output_tokens
        self.matched_tokens += done.matched_tokens
        self.host_tokens += done.host_tokens
        self.shared_tokens += done.shared_tokens
        self.verified_tokens += done.verified.tokens
        self.verified_window_tokens += done.verified.window_tokens
        self.verified_states += done.verified.states
        self.duplicate_pages += done.duplicate_pages
        self.states += done.num_states
        self.commands += done.num_commands
        self.waits += done.num_waits
        self.cut_requests += done.was_cut


# -- one client process -------------------------------------------------------------------------------


def client_main(number: int, options: Options, pipe: Connection) -> None:
    """A client process's whole life: "ready", then after the parent's word a `Done` per request, then None."""
    try:
        with Client(options.socket, name=f"replay-{number}") as cache:
            runner = Runner(cache, options)
            pipe.send("ready")
            pipe.recv()
            started = time.monotonic()
            for index, request in enumerate(traces.requests(options.trace, options.limit)):
                if index % options.num_clients == number:
                    if options.rate is not None:
                        time.sleep(max(0.0, started + index / options.rate - time.monotonic()))
                    pipe.send(runner.run(index, request))
        pipe.send(None)
    except SglcacheError as exc:
        pipe.send(Problem(f"client {number}: error[{exc.code}]: {exc.message}"))
    except WrongContents as exc:
        pipe.send(Problem(f"client {number}: {exc}"))
    except (EOFError, BrokenPipeError):
        pass  # the parent is gone
    except Exception:
        pipe.send(Problem(f"client {number}: {traceback.format_exc()}"))


class Runner:
    """Does requests one after the other, in a client process."""

    def __init__(self, cache: Client, options: Options) -> None:
        geometry = cache.geometry
        self.cache = cache
        self.options = options
        self.page_size = geometry.page_size
        self.most_tokens = geometry.num_pages * geometry.page_size
        self.contents = Contents(cache)
        self.interval = cache.mamba.interval if cache.mamba is not None else 0
        self.own: set[int] = set()  # hashes of the prefixes that this client has committed, every SHARED_UNIT tokens

    def run(self, index: int, request: traces.Request) -> Done:
        """One request, start to end. WrongContents: the bytes of a page or a state are not those of its tokens.

        Where there is no room, what it has is given back, and it begins anew: what it has committed it may find.
        """
        prompt = request.tokens[: self.most_tokens - self.page_size]
        output = outputs(index, min(request.output_tokens, self.options.max_output_tokens))
        output = output[: self.most_tokens - len(prompt)]
        pause, give_up = FIRST_WAIT_S, time.monotonic() + GIVE_UP_S
        work = _Work(index, prompt, np.concatenate([prompt, output]))
        waits = 0
        while True:
            started = time.perf_counter()
            try:
                with self._acquire(prompt, len(output)) as lease:
                    work.begin(lease, time.perf_counter() - started)
                    self._serve(work, lease)
                break
            except NoSpace:
                if time.monotonic() > give_up:
                    raise
                time.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, LAST_WAIT_S)
                waits += 1
        tokens, matched = work.tokens, work.matched_tokens
        shared = matched - self._known(tokens[:matched])
        self._remember(tokens)
        return Done(
            len(prompt), len(output), matched, work.host_tokens, max(0, shared), work.reaches, work.verified,
            work.duplicates, work.num_states, num_commands=work.num_commands, num_waits=waits,
            was_cut=len(prompt) < len(request.tokens), acquire_s=work.acquire_s,
        )  # fmt: skip

    def _acquire(self, prompt: npt.NDArray[np.uint32], reserve: int) -> Lease:
        limit = len(prompt) - 1
        if self.cache.companions:
            return self.cache.acquire(prompt, limit=limit, room=CHUNK_TOKENS, states=int(self.cache.keeps_states))
        return self.cache.acquire(prompt, limit=limit, reserve=reserve)

    def _serve(self, work: _Work, lease: Lease) -> None:
        """The request's journey on a lease that it has just got."""
        tokens, prompt = work.tokens, work.prompt
        lease.wait_loaded()
        if self.options.verify:
            work.add(self._checked(work, lambda: self.contents.check_match(lease, tokens)))
        at, duplicates = lease.matched_tokens, work.duplicates
        for stop in self._stops(at, len(prompt), lease.reaches[0]):
            self._make_room(work, lease, stop)
            self.contents.write(lease, tokens, at, stop)
            self._commit(work, lease, at, stop)
            at = stop
        if len(tokens) > len(prompt):
            self._make_room(work, lease, len(tokens), tokens[len(prompt) :])
            self.contents.write(lease, tokens, at, len(tokens))
            self._commit(work, lease, at, len(tokens))
        if work.duplicates > duplicates and self.options.verify:  # others' pages took the place of ours
            whole = len(tokens) // self.page_size * self.page_size
            work.add(self._checked(work, lambda: self.contents.check_pages("committed", lease, tokens, whole)))

    def _stops(self, start: int, stop: int, branch: int) -> list[int]:
        """Where the chunks of tokens[start:stop] end."""
        stops = {*range(start + CHUNK_TOKENS, stop, CHUNK_TOKENS), stop}
        if self.cache.keeps_states:
            stops |= {*range(start - start % self.interval, stop, self.interval), branch, stop - stop % self.page_size}
        return sorted(each for each in stops if start < each <= stop)

    def _make_room(self, work: _Work, lease: Lease, stop: int, more: Tokens = ()) -> None:
        """Pages for the first `stop` tokens, `more` of them new to the lease, and a slot for the state behind them."""
        states = int(lease.mamba is not None and not len(lease.mamba.slots))
        if len(more) or states or len(lease.slots) * self.page_size < stop:
            lease.extend(more, upto=stop, states=states)
            work.num_commands += 1

    def _commit(self, work: _Work, lease: Lease, before: int, stop: int) -> None:
        """What tokens[:stop] leave, `before` of which had been committed."""
        states: list[tuple[int, int]] = []
        whole = min(stop, len(lease.tokens) - 1) // self.page_size * self.page_size  # as where keys are pairs
        if lease.mamba is not None and whole > before:
            slot = int(lease.mamba.slots[0])
            self.contents.write_state(slot, work.tokens[:whole])
            states.append((whole, slot))
        floor = None
        if self.cache.window is not None and work.index % 2:
            floor = max(0, stop - self.cache.window.tokens)
        work.duplicates += lease.commit(stop, states=states, floor=floor).num_duplicates
        work.num_states += len(states)
        work.num_commands += 1

    def _checked(self, work: _Work, check: Callable[[], Checked]) -> Checked:
        try:
            return check()
        except WrongContents as exc:
            raise WrongContents(f"request {work.index}: {exc}") from None

    def _prefixes(self, tokens: npt.NDArray[np.uint32]) -> Iterator[int]:
        seed = 0
        for start in range(0, len(tokens) - SHARED_UNIT + 1, SHARED_UNIT):
            seed = xxhash.xxh3_64_intdigest(tokens[start : start + SHARED_UNIT].tobytes(), seed)
            yield seed

    def _known(self, tokens: npt.NDArray[np.uint32]) -> int:
        """At most so many of these tokens had been committed by this client before."""
        units = 0
        for prefix in self._prefixes(tokens):
            if prefix not in self.own:
                break
            units += 1
        return (units + 1) * SHARED_UNIT

    def _remember(self, tokens: npt.NDArray[np.uint32]) -> None:
        self.own.update(self._prefixes(tokens))


def outputs(index: int, num_tokens: int) -> npt.NDArray[np.uint32]:
    """What the model would say to request `index`: any tokens, the same in every run."""
    return np.random.default_rng([index, 1]).integers(0, traces.VOCAB, num_tokens, dtype=np.uint32)


# -- the parent ---------------------------------------------------------------------------------------


class Watcher(threading.Thread):
    """Follows the stream in a thread of its own while the clients work, so that reading them waits for nothing."""

    def __init__(self, mirror: Mirror, rank: int) -> None:
        """`rank`: the daemon's rank, by which the mirror knows its blocks."""
        super().__init__(name="sglcache-replay-watcher", daemon=True)
        self.mirror = mirror
        self.rank = rank
        self.counts: Counter[str] = Counter()
        self.error: BaseException | None = None
        self._enough = threading.Event()

    def run(self) -> None:
        try:
            while not self._enough.is_set():
                self._count(self.mirror.step(0.05))
        except BaseException as exc:
            self.error = exc

    def stop(self) -> None:
        """From here on the mirror is the caller's. Doing it twice is no error."""
        self._enough.set()
        self.join()

    def catch_up(self, seq: int, timeout_s: float) -> bool:
        """Once stopped: follow until number `seq` is taken in, and count on; whether that was so in time."""
        deadline, mirror = time.monotonic() + timeout_s, self.mirror
        while not (mirror.synced and mirror.state.next_seq is not None and mirror.state.next_seq > seq):
            if (left := deadline - time.monotonic()) <= 0:
                return False
            self._count(mirror.step(left))
        return True

    def _count(self, facts: Iterable[Fact]) -> None:
        for _, _, event in facts:
            self.counts[type(event).__name__] += 1
            if not isinstance(event, AllBlocksCleared):
                self.counts["blocks"] += len(event.block_hashes)


def replay(options: Options, progress: Callable[[int], None] = lambda requests: None) -> Report:
    """Drive the trace; `progress` is told of each request that is done. SglcacheError: it could not begin.

    What goes wrong on the way is in the report's `problems`, and ends the replay.
    """
    report = Report(str(options.trace), options.num_clients)
    with contextlib.ExitStack() as stack:
        observer = stack.enter_context(Client(options.socket, role="observer", name="replay"))
        if options.kind is not None and observer.companions != KINDS[options.kind].companions:
            raise ConfigError(
                f"the daemon at {observer.socket} has {' and '.join(('full', *observer.companions))}, and --kind "
                f"{options.kind} is {' and '.join(('full', *KINDS[options.kind].companions))}; leave --socket, "
                f"--rank and $SGLCACHE_SOCKET out, and one is started for it"
            )
        report.reach_tokens = dict.fromkeys(("full", *observer.companions), 0)
        facts = observer.status()
        stream = facts["stream"]
        watcher = None
        if stream is not None:
            mirror = stack.enter_context(
                Mirror(
                    stream["endpoint"],
                    stream["replay_endpoint"],
                    topic=stream["topic"],
                    rank=facts["rank"],
                    curve=Curve.of_stream(stream),
                )
            )
            if not mirror.catch_up(stream["last_seq"], START_S):
                raise Unavailable(f"the stream at {stream['endpoint']} did not answer within {START_S:.0f} s")
            batches, payload_bytes = mirror.batches, mirror.payload_bytes
            watcher = Watcher(mirror, facts["rank"])
            watcher.start()
            stack.callback(watcher.stop)  # before the mirror is closed
        before = _from_third(observer)
        latencies = _run_clients(options, report, progress)
        report.third_tokens = _from_third(observer) - before
        report.acquire_p50_us, report.acquire_p99_us = (1e6 * quantile(latencies, q) for q in (0.5, 0.99))
        if watcher is not None:
            watcher.stop()
            if watcher.error is not None:
                raise watcher.error
            if not report.problems:
                _compare(observer, watcher, report)
            report.events = dict(watcher.counts)
            report.batches = mirror.batches - batches
            report.payload_bytes = mirror.payload_bytes - payload_bytes
    return report


def _from_third(observer: Client) -> int:
    """Tokens of hits that came from the third tier, so far. The daemon counts them, of all clients."""
    return int(observer.status()["counters"]["l3_matched_tokens"])


def _run_clients(options: Options, report: Report, progress: Callable[[int], None]) -> list[float]:
    """Start the clients, let them go at once, and gather what they did: the seconds of each acquire."""
    context = multiprocessing.get_context("spawn")
    latencies: list[float] = []
    with contextlib.ExitStack() as stack:
        pipes: dict[Connection, BaseProcess] = {}
        for number in range(options.num_clients):
            ours, theirs = context.Pipe()
            process = context.Process(target=client_main, args=(number, options, theirs), name=f"replay-{number}")
            with _sigint_is_ours():
                process.start()
            theirs.close()
            stack.callback(_end, process)
            pipes[ours] = process
        waiting, deadline = set(pipes), time.monotonic() + START_S
        started = 0.0
        while pipes and not report.problems:
            if waiting and time.monotonic() > deadline:
                report.problems.append(f"{len(waiting)} clients did not attach within {START_S:.0f} s")
                break
            for pipe in cast("list[Connection]", wait(list(pipes), timeout=0.5)):
                try:
                    message = pipe.recv()
                except (EOFError, ConnectionResetError):
                    pipes[pipe].join()
                    message = Problem(f"{pipes[pipe].name} ended with {pipes[pipe].exitcode} before its work was done")
                if message == "ready":
                    waiting.discard(pipe)
                    if not waiting:
                        started = time.perf_counter()
                        for each in pipes:
                            each.send("go")
                elif message is None:
                    pipes.pop(pipe).join()
                elif isinstance(message, Problem):
                    report.problems.append(message.message)
                else:
                    report.add(message)
                    latencies.append(message.acquire_s)
                    progress(report.requests)
        if started:
            report.wall_s = time.perf_counter() - started
    return latencies


@contextlib.contextmanager
def _sigint_is_ours() -> Iterator[None]:
    """What is started meanwhile is deaf to Ctrl-C, wherever it is in its start: we end it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(process: BaseProcess) -> None:
    """Our own child: by itself, or by force."""
    if process.is_alive():
        process.terminate()
    process.join(5)
    if process.is_alive():
        process.kill()
        process.join()


def _compare(observer: Client, watcher: Watcher, report: Report) -> None:
    """Hold the mirror against the index, per tier, at one and the same number of the stream."""
    mirror = watcher.mirror
    for tier in map(Tier.__getitem__, observer.digest()["tiers"]):  # of which routers are told exactly
        deadline = time.monotonic() + SETTLE_S
        while True:
            try:
                dump = observer.dump(tier)
            except Changed:  # copies are still on their way, or someone else is at work
                if time.monotonic() > deadline:
                    raise
                continue
            seq, wanted = dump.seq, set(dump.hashes)
            caught_up = watcher.catch_up(seq, max(0.0, deadline - time.monotonic()))
            believed = mirror.hashes(tier, watcher.rank)
            # Past `seq` the mirror may know more than the dump says: then they are compared at a later number.
            if believed == wanted or not caught_up or mirror.state.next_seq == seq + 1 or time.monotonic() > deadline:
                break
        missing, extra = sorted(wanted - believed), sorted(believed - wanted)
        tier_report = TierReport(seq, len(wanted), len(believed), missing[:SHOWN], extra[:SHOWN])
        report.tiers[tier.name.lower()] = tier_report
        if not caught_up:
            report.problems.append(f"{tier.name}: the mirror did not reach number {seq} within {SETTLE_S:.0f} s")
        elif missing or extra:
            report.problems.append(
                f"{tier.name}: at number {seq} the mirror lacks {len(missing)} of the index's {len(wanted)} blocks "
                f"and has {len(extra)} that it should not; lacking {missing[:SHOWN]}, too many {extra[:SHOWN]}"
            )
    if mirror.state.losses or mirror.bad_messages:
        report.problems.append(
            f"the mirror lost its place {mirror.state.losses} times and met {mirror.bad_messages} bad messages"
        )


def quantile(values: list[float], q: float) -> float:
    """The value below which `q` of them lie; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.floor(q * len(ordered)))] if ordered else 0.0


@contextlib.contextmanager
def serving(settings: Sequence[str], kind: str | None = None) -> Iterator[Path | None]:
    """The socket of a daemon of its own, of this kind and configured so, for as long as the block lasts; None without
    both. ConfigError: the settings are not right.
    """
    if kind is not None:
        settings = [*KINDS[kind].settings, *settings]
    if not settings:
        yield None
        return
    load(None, settings)  # what is wrong is said here, and not in the log of a daemon that did not start
    with Daemon(settings) as daemon:
        daemon.wait_healthy()
        yield daemon.socket


# -- traces and texts ---------------------------------------------------------------------------------


@contextlib.contextmanager
def trace_file(path: Path | None) -> Iterator[Path]:
    """The trace, or for None a made-up one that lasts as long as the block."""
    if path is not None:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="sglcache-") as folder:
        made_up = Path(folder) / "made-up.jsonl"
        made_up.write_text("".join(f"{json.dumps(record)}\n" for record in conversations(MADE_UP_REQUESTS)))
        yield made_up


def conversations(num_requests: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Records like Mooncake's: conversations that take turns, over a few system prompts. The same for the same seed."""
    rng = random.Random(seed)
    fresh = itertools.count()
    systems = [[next(fresh) for _ in range(rng.randint(1, 6))] for _ in range(4)]
    live: list[list[int]] = []
    for number in range(num_requests):
        if not live or rng.random() < 0.3:
            live.append(list(rng.choice(systems)))
        history = rng.choice(live[-32:])
        history.extend(next(fresh) for _ in range(rng.randint(1, 5)))
        last = rng.randint(1, traces.BLOCK)
        yield {
            "timestamp": 100 * number,
            "input_length": traces.BLOCK * len(history) + last,
            "output_length": rng.randint(8, 400),
            "hash_ids": [*history, next(fresh)],
        }
        if len(history) > 48:
            live.remove(history)


def num_requests(path: Path, limit: int | None) -> int:
    """How many a replay of it will do. ConfigError with file and line: it can't be read, or is no trace."""
    return sum(1 for _ in traces.records(path, limit))


def describe(report: Report) -> str:
    """The report for people."""

    def share(part: int, whole: int) -> str:
        return f"{100 * part / whole:.1f} %" if whole else "none"

    hits = report.hit_tokens
    third = f"{share(hits['third'], report.matched_tokens)} from the third tier, " if hits["third"] else ""
    lines = [
        ("requests", f"{report.requests:,} from {report.num_clients} clients in {report.wall_s:.1f} s"),
        ("tokens", f"{report.input_tokens:,} in, {report.output_tokens:,} out"),
        (
            "hit rate",
            f"{share(report.matched_tokens, report.input_tokens)} of the tokens in; of these "
            f"{share(hits['host'], report.matched_tokens)} came from the host, {third}"
            f"at least {share(report.shared_tokens, report.matched_tokens)} from another client",
        ),
        ("commands", f"{report.commands:,}, {report.ops_per_s:,.0f} a second"),
        ("acquire", f"p50 {report.acquire_p50_us:,.0f} µs, p99 {report.acquire_p99_us:,.0f} µs"),
        ("waits", f"{report.waits:,} tries found no room; {report.duplicate_pages:,} pages were another's already"),
    ]
    if report.cut_requests:
        lines.append(("cut", f"{report.cut_requests:,} prompts are longer than the pool, and were cut to it"))
    if len(report.reach_tokens) > 1:
        reaches = [f"{name} {share(tokens, report.input_tokens)}" for name, tokens in report.reach_tokens.items()]
        lines.append(("reach", f"of the tokens in: {', '.join(reaches)}, each with full KV"))
    if report.states:
        lines.append(("states", f"{report.states:,} were committed"))
    if report.verified_tokens:
        windows = f", {report.verified_window_tokens:,} of them of the window" if report.verified_window_tokens else ""
        states = f", and {report.verified_states:,} states" if report.verified_states else ""
        lines.append(
            ("verified", f"the bytes of {report.verified_tokens:,} tokens in pages of the cache{windows}{states}")
        )
    if report.events:
        kinds = ", ".join(f"{report.events.get(kind, 0):,} {kind}" for kind in EVENT_KINDS)
        size = f"{report.batches:,} batches, {report.payload_bytes / 1e6:,.1f} MB"
        lines.append(("stream", f"{kinds} of {report.events.get('blocks', 0):,} blocks; {size}"))
    for name, tier in report.tiers.items():
        equal = "equals the index" if tier.equal else "DIFFERS from the index"
        lines.append(("mirror", f"{name}: {tier.mirror_blocks:,} blocks, {equal} at number {tier.seq}"))
    lines += [("problem", problem) for problem in report.problems]
    return "\n".join(f"{label:<9} {text}" for label, text in lines)
