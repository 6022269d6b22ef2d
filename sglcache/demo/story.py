"""What the demo does, and what it shows. Everything it starts ends with it."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from sglcache.client import Client
from sglcache.client.mirror import Mirror
from sglcache.errors import SglcacheError, extras
from sglcache.testing.daemon import Daemon
from sglcache.wire.events import BlockRemoved, BlockStored

NUM_NEW = 12
HANDBOOK = "You are a patient assistant of a public library. " + "Rule {}: answer in one sentence, and be kind. " * 60
ALMANAC = "You are an almanac of the sea, and know the tides. " + "Entry {}: at noon the wind turns to the west. " * 60


class DemoError(SglcacheError):
    """The demo did not go as it should."""

    code = "demo"


class Told(NamedTuple):
    """One question, and what came of it."""

    title: str
    first_token_s: float
    prompt_tokens: int
    matched_tokens: int
    host_tokens: int
    output: list[int]
    events: str


@dataclass
class Report:
    told: list[Told] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems


class RunnerProcess:
    """The model runner, which can be killed. It is there from construction on, and attached once it is told where."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sglcache.demo.runner"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pool = self._receive()
        """`[pool]` for its model."""

    def attach(self, socket: Path) -> None:
        self._send(str(socket))

    def ask(self, text: str) -> dict[str, Any]:
        return self._send({"text": text, "max_new_tokens": NUM_NEW})

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.close()

    def close(self) -> None:
        self.process.communicate()  # closes its stdin, which ends it

    def _send(self, words: object) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            _, said = self.process.communicate()
            raise DemoError(f"the runner ended with {self.process.returncode}: {said.strip()[-500:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.close()


def play(say: Callable[[str], None], show: Callable[[Told], None]) -> Report:
    """The whole demo. NotInstalled: torch or transformers is not there."""
    with extras():
        for module in ("torch", "transformers"):  # the runners load them, and take their time for it
            if importlib.util.find_spec(module) is None:
                raise ModuleNotFoundError(name=module)

    report = Report()
    with tempfile.TemporaryDirectory(prefix="sglcache-demo-") as folder, RunnerProcess() as runner:
        num_tokens = runner.pool["num_tokens"]
        say(f"a daemon with room for {num_tokens:,} tokens on the device, and four times as many on the host")
        host = {"num_tokens": 4 * num_tokens}
        with Daemon(Path(folder), pool=runner.pool, host=host) as daemon, daemon.observer() as observer:
            stream = observer.status()["stream"]
            with Mirror(stream["endpoint"], stream["replay_endpoint"]) as router:
                _tell(runner, daemon, observer, router, report, say, show)
    return report


def _tell(
    runner: RunnerProcess,
    daemon: Daemon,
    observer: Client,
    router: Mirror,
    report: Report,
    say: Callable[[str], None],
    show: Callable[[Told], None],
) -> None:
    def ask(runner: RunnerProcess, title: str, manual: str, question: str) -> Told:
        text = "".join(part + str(at) for at, part in enumerate(manual.split("{}"))) + question
        answer = runner.ask(text)
        told = Told(title, events=_events(daemon, observer, router), **answer)
        report.told.append(told)
        show(told)
        return told

    def check(right: bool, problem: str) -> None:
        if not right:
            report.problems.append(problem)

    say("a model runner attaches (a small Llama of random weights; it takes its time to read, like a real one)")
    with runner:
        runner.attach(daemon.socket)
        cold = ask(runner, "cold: nobody has read the handbook", HANDBOOK, "Where are the maps?")
        warm = ask(runner, "another question on the handbook", HANDBOOK, "When do you close?")
        check(warm.matched_tokens > 0 and not warm.host_tokens, "the second question did not hit the device")
        ask(runner, "the almanac pushes it off the device", ALMANAC, "When is high tide?")
        back = ask(runner, "the first question again", HANDBOOK, "Where are the maps?")
        check(back.host_tokens > 0, "what was pushed out did not come back from the host")
        check(back.output == cold.output, "the same question was answered otherwise")
        say(f"kill -9 {runner.process.pid}, and another runner attaches")
        runner.kill()
    with RunnerProcess() as heir:
        heir.attach(daemon.socket)
        again = ask(heir, "the first question, to the new runner", HANDBOOK, "Where are the maps?")
        check(again.matched_tokens > 0, "the new runner found nothing")
        check(again.output == cold.output, "the new runner answered otherwise")
    exact = {tier: set(observer.dump(tier).hashes) for tier in ("DEVICE", "HOST")}
    check(
        router.hashes("GPU") == exact["DEVICE"] and router.hashes("CPU_PINNED") == exact["HOST"],
        "a mirror of the event stream differs from the index",
    )
    check(not observer.status(prove=True)["violations"], "the books are wrong")


def _events(daemon: Daemon, observer: Client, router: Mirror) -> str:
    """What a router heard since it last listened: blocks stored and removed, by medium."""
    daemon.settle()
    last = observer.dump("DEVICE").seq
    counts: Counter[str] = Counter()
    while router.state.next_seq is None or router.state.next_seq <= last or not router.synced:
        for _, _, event in router.step(1.0):
            if isinstance(event, BlockStored | BlockRemoved):
                sign = "+" if isinstance(event, BlockStored) else "-"
                counts[f"{sign}{{}} {event.medium}"] += len(event.block_hashes)
    return ", ".join(name.format(count) for name, count in sorted(counts.items())) or "none"


def describe(told: Told) -> str:
    """One line for people."""
    device = told.matched_tokens - told.host_tokens
    if told.host_tokens:
        tier = f"host (and {device} on the device)" if device else "host"
    else:
        tier = "device" if device else "-"
    hit = f"{told.matched_tokens:>5,} of {told.prompt_tokens:,} tokens cached, {tier}"
    return f"{told.title:<40} first token {told.first_token_s * 1e3:>7,.0f} ms   {hit}\n{'':<40} events: {told.events}"
