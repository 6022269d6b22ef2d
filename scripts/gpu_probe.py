#!/usr/bin/env python3
"""Ask a card what sglcache takes for granted about it: memory between processes, order, death, copies, costs.

Each question runs in processes of its own and has a deadline; one that hangs is killed and told of, and the others go
on. Needs numpy and msgspec beside this checkout, and an NVIDIA driver; torch with CUDA for the two questions about it.

    scripts/gpu_probe.py --json probe.json --markdown probe.md        # some minutes, with nothing else on the card
    scripts/gpu_probe.py --only b --only c                            # some of them
    scripts/gpu_probe.py --quick                                      # small: whether the questions themselves run

Exit status: 0 everything is as assumed; 1 something is not, or was not answered; 2 there is no card, or bad usage.
docs/gpu.md says what is asked, and why.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

# One thread in each process: what is measured is the card. Before numpy is loaded.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sglcache.memory.cuda_engine import MAX_BATCH, POLL_S
from sglcache.testing.card import ATTRIBUTES
from sglcache.testing.probe import copies, death, memory, order
from sglcache.testing.probe.sizes import FULL, QUICK, Sizes
from sglcache.testing.probe.stage import Here, Stage, Unanswered, open_pidfd, staged
from sglcache.testing.probe.tasks import Tell

BUDGET_S = 570.0  # of all questions together
LEAST_S = 3.0  # a question that has not so long any more is not begun


class Row(NamedTuple):
    """One answer: what is assumed of it, where that is built on, and what to change if it is otherwise."""

    key: str
    asked: str
    assumed: str = ""  # "": nothing is, it is measured
    holds: Callable[[Any], bool] | None = None
    rests: str = ""
    change: str = ""


class Question(NamedTuple):
    letter: str
    title: str
    ask: Callable[[Stage, Tell, Sizes], None]
    seconds: float
    rows: tuple[Row, ...]


def true(value: Any) -> bool:
    return value is True


def false(value: Any) -> bool:
    return value is False


def zero(value: Any) -> bool:
    return bool(value == 0)


def at_most(limit: float) -> Callable[[Any], bool]:
    return lambda value: bool(value <= limit)


def at_least(limit: float) -> Callable[[Any], bool]:
    return lambda value: bool(value >= limit)


FD = "memory/cuda_pools.py, DESIGN 5 Pools"
WORDS = "client/cards.py, memory/rings.py, law 8"
DEATH = "server/sessions.py, laws 8 and 9"
COPY = "memory/cuda_engine.py, DESIGN 5 Layouts"

ASSUMED = (
    Question(
        "a",
        "a pool, mapped in a second process",
        memory.handing_over,
        60,
        (
            Row("a.begin_s", "s until a process has a context and its kernels"),
            Row("a.fd", "kernels on both sides see the other's bytes", "yes", true, FD, 'pool.export = "ipc"'),
            Row("a.fd_copies", "so do copies from host memory", "yes", true, FD, 'pool.export = "ipc"'),
            Row(
                "a.outlives_unmap",
                "the importer keeps it when the exporter lets go",
                "yes",
                true,
                FD,
                "CudaPool.close may not unmap while a member has it",
            ),
            Row("a.torch", "a torch tensor is a view on it", "yes", true, "memory/views.py", "make views by dlpack"),
        ),
    ),
    Question(
        "a",
        "the older way: an IPC handle and an offset",
        memory.legacy_ipc,
        60,
        (Row("a.ipc", "kernels on both sides see the other's bytes", "yes", true, FD, "no second variant"),),
    ),
    Question(
        "a",
        "what handing over costs",
        memory.handing_over_timed,
        60,
        (
            Row("a.granularity", "bytes that pools are a multiple of"),
            Row("a.calls_ms", "ms of each call"),
            Row(
                "a.export_ms",
                "ms of an export, at most",
                "≤ 1,000: once in a rank's life",
                at_most(1000),
                "server/devices.py",
                "export in a thread",
            ),
            Row(
                "a.attach_ms",
                "ms to import and map, at most",
                "≤ 500: a runner's start hardly notices",
                at_most(500),
                "client/cards.py",
                "map shards in threads",
            ),
        ),
    ),
    Question(
        "a",
        "what fresh memory holds",
        memory.fresh_memory,
        60,
        (
            Row(
                "a.fresh_dirt", "words of a dead process's pool in a new one", "0", zero, "docs/security.md", "zero it"
            ),
            Row("a.fresh_zero", "all of it is zero"),
        ),
    ),
    Question(
        "b",
        "events of another process",
        order.events,
        45,
        (
            Row("b.event_waits", "a stream waits for another process's event"),
            Row("b.unrecorded_is_no_op", "waiting for one that was never recorded is no wait"),
        ),
    ),
    Question(
        "b",
        "words that streams write and wait for",
        order.stream_words,
        45,
        (
            Row(
                "b.word_seen",
                "a stream's write to a registered memfd is seen, not before what is ahead of it",
                "yes",
                true,
                WORDS,
                "a host function (cuLaunchHostFunc) in place of cuStreamWriteValue64",
            ),
            Row(
                "b.word_waits",
                "a stream waits for what another process's will write, and for no less",
                "yes",
                true,
                WORDS,
                "wait_loaded waits on the processor, as on a CPU",
            ),
            Row(
                "b.store_releases",
                "a processor's store ends the wait",
                "yes",
                true,
                "client/cards.py: _Watch; law 8",
                "wait_loaded waits on the processor, as on a CPU",
            ),
            Row(
                "b.largest_releases",
                "2**63 - 1 ends any wait",
                "yes",
                true,
                "memory/rings.py: FAILED",
                "give up word by word, with its own generation",
            ),
            Row("b.minus_one_waits", "2**64 - 1 ends none: the comparison is signed"),
        ),
    ),
    Question(
        "b",
        "how soon words are seen",
        order.latencies,
        45,
        (
            Row("b.write_to_own_us", "µs from enqueuing a write to its processor's seeing it"),
            Row("b.write_to_other_us", "µs to another process's seeing it"),
            Row("b.store_to_stream_us", "µs from a store to the next write of a stream that waited"),
            Row("b.write_call_us", "µs of the call"),
        ),
    ),
    Question(
        "b",
        "bytes behind a word",
        order.stale_pages,
        60,
        (
            Row("b.rounds", "rounds of each kind"),
            Row(
                "b.stale_stored",
                "old words in a copy that was enqueued after the runner's word was seen",
                "0",
                zero,
                "memory/filling.py, law 8, A11",
                "an IPC event beside the word, waited for by the copy's stream",
            ),
            Row("b.stale_waited", "old words in a copy that waited for the runner's word in its stream"),
            Row(
                "b.stale_loaded",
                "old words that a runner's kernel saw behind its wait for a load",
                "0",
                zero,
                WORDS + ", A10",
                "the copy's stream writes the load's word (cuStreamWriteValue64)",
            ),
        ),
    ),
    Question(
        "b",
        "what a stream that waits holds up",
        order.beside_a_wait,
        60,
        (
            Row(
                "b.streams_held",
                "other streams of its process that stand still",
                "0",
                zero,
                "client/cards.py: wait_loaded",
                "CUDA_DEVICE_MAX_CONNECTIONS=32 for runners, or wait_loaded on the processor",
            ),
            Row("b.streams_held_32", "the same with CUDA_DEVICE_MAX_CONNECTIONS=32"),
            Row(
                "b.calls_held",
                "calls that do not come back",
                "at most cuMemFree and what loads kernels",
                lambda calls: set(calls) <= {"cuMemFree", "cuModuleLoadData", "a kernel's first launch"},
                "client/cards.py: attach and record while a load is waited for",
                "wait_loaded on the processor where these are called",
            ),
        ),
    ),
    *(
        Question(
            "c",
            f"an {what} is killed while its kernel writes",
            ask,
            40,
            (
                Row(f"c.{what}_looks", "looks at the page"),
                Row(f"c.{what}_dead_ms", "ms from kill -9 to the pidfd"),
                Row(f"c.{what}_last_change_ms", "ms from kill -9 to the page's last change"),
                Row(
                    f"c.{what}_changes",
                    "changes of the page after the pidfd said dead",
                    "0",
                    zero,
                    DEATH,
                    "pages of the dead stay fenced for c.*_last_change_ms more",
                ),
                Row(
                    f"c.{what}_word",
                    "its stream wrote a word that was behind the kernel",
                    "no",
                    false,
                    "memory/rings.py, law 9",
                    "the event ring is read no more once the pidfd is ready",
                ),
                Row(
                    f"c.{what}_other_works",
                    "the other process's context works on",
                    "yes",
                    true,
                    "law 12",
                    "a runner's death is a rank's",
                ),
            ),
        )
        for what, ask in (("exporter", death.exporter_writes), ("importer", death.importer_writes))
    ),
    Question(
        "c",
        "a process is killed while its stream waits",
        death.waiter_dies,
        40,
        (
            Row(
                "c.waiter_dead_ms",
                "ms from kill -9 to the pidfd",
                "≤ 1,000",
                at_most(1000),
                DEATH,
                "wait_loaded waits on the processor",
            ),
            Row("c.waiter_back", "its memory is back", "yes", true, DEATH, "wait_loaded waits on the processor"),
        ),
    ),
    Question(
        "d",
        "exporter, importer and descriptor go, in this order",
        memory.exporter_dies,
        60,
        (
            Row(
                "d.held_by_importer",
                "an importer keeps a dead exporter's memory",
                "yes",
                true,
                "memory/cuda_pools.py: _too_large",
                "its text says who holds the rest",
            ),
            Row(
                "d.importer_reads",
                "and reads it",
                "yes",
                true,
                "client/cards.py: leave, law 12",
                "a runner must stop its kernels when the daemon dies",
            ),
            Row(
                "d.no_room_for_a_second",
                "a second pool of that size has no room then",
                "yes",
                true,
                "memory/cuda_pools.py: _too_large, which a rank's next life says",
                "nothing: the next life has room at once",
            ),
            Row("d.room_beside", "of the card can be had beside it"),
            Row("d.held_by_fd", "a descriptor alone, in a process without CUDA, keeps it"),
            Row(
                "d.fd_keeps_bytes",
                "and from it a new process has the bytes",
                "yes",
                true,
                "ARCHITECTURE 7; client/client.py closes descriptors once it has mapped",
                "ARCHITECTURE 7: pools could not outlive a rank",
            ),
            Row("d.fd_import", "why not"),
            Row("d.back", "the memory is back after the last", "yes", true, "law 9", "wait for it, with a deadline"),
            Row("d.back_ms", "ms after the last's end"),
            Row("d.room_again", "the pool has room again", "yes", true, "law 9", "try again, with a deadline"),
        ),
    ),
    Question(
        "d",
        "a process dies with a pool that nobody else has",
        memory.owner_dies_alone,
        40,
        (
            Row("d.alone_dead_ms", "ms from kill -9 to the pidfd"),
            Row("d.alone_back_ms", "ms from kill -9 to its memory's being back"),
            Row(
                "d.back_at_pidfd",
                "it is back when the pidfd says dead",
                "yes",
                true,
                "server/devices.py: the next life's pool",
                "a rank's start tries again for d.alone_back_ms",
            ),
        ),
    ),
    Question(
        "d",
        "an exporter of the older way dies",
        memory.legacy_exporter_dies,
        40,
        (
            Row("d.ipc_held", "an importer keeps the memory"),
            Row("d.ipc_reads", "and reads it"),
        ),
    ),
    Question(
        "f",
        "what calls cost",
        copies.costs,
        60,
        (
            Row("f.register_s_per_gib", "s to register a GiB of memfd"),
            Row(
                "f.register_s",
                "s to register a GiB, at most",
                "≤ 1",
                at_most(1.0),
                "memory/filling.py: the host tier is pinned in the background, and grows with it",
                "smaller ranges, or huge pages",
            ),
            Row(
                "f.query_us",
                "µs of cuEventQuery and cuEventRecord",
                f"≤ {POLL_S * 1e5:.0f}: a tenth of POLL_S",
                lambda took: max(took["done"], took["not done"]) <= POLL_S * 1e5,
                "memory/cuda_engine.py: POLL_S",
                "POLL_S to ten times that",
            ),
            Row("f.enqueue", "a batched copy of 32 KiB ranges, by their number"),
            Row(
                "f.enqueue_to_copy",
                f"the call's share of the time of {MAX_BATCH:,} ranges",
                "≤ 0.9: the card is not kept waiting",
                at_most(0.9),
                "memory/cuda_engine.py: MAX_BATCH",
                "a gather kernel for layer_first, or page_first by default",
            ),
            Row(
                "f.batch_call_ms",
                "ms of that call, in which nothing is told of",
                "≤ 5",
                at_most(5),
                "memory/cuda_engine.py: MAX_BATCH",
                "MAX_BATCH to the largest of f.enqueue that is quicker",
            ),
        ),
    ),
    Question(
        "f",
        "a copy over two registered ranges",
        copies.over_ranges,
        30,
        (Row("f.copy_over_ranges", "it works: cuda_engine's `span` could go"),),
    ),
    Question(
        "e",
        "copies, alone",
        copies.copies_alone,
        120,
        (
            Row("e.batched", "the batched copy", "is there", lambda name: "none" not in name, COPY, "a newer driver"),
            Row("e.wrong_chunks", "chunks that came out wrong", "0", zero, COPY, "the batched copy's attributes"),
            Row("e.failed", "methods that failed", "none", lambda failed: not failed, COPY, "see why"),
            Row("e.plain", "GB/s of one copy, memfd registered"),
            Row("e.plain_driver", "GB/s of one copy, cuMemHostAlloc"),
            Row(
                "e.memfd_to_driver",
                "the first to the second, at least",
                "≥ 0.9",
                at_least(0.9),
                "memory/filling.py: host pools are registered memfds",
                "huge pages for the memfd (MFD_HUGETLB)",
            ),
            Row("e.alone", "GB/s by layout and method"),
            Row("e.fraction_32k", "of one copy, 32 KiB, batch", "≥ 0.5", at_least(0.5), COPY, "page_first by default"),
            Row("e.fraction_128k", "of one copy, 128 KiB, batch"),
            Row("e.fraction_2048k", "of one copy, 2 MiB, batch", "≥ 0.85", at_least(0.85), COPY, "larger chunks"),
            Row("e.fraction_8192k", "of one copy, 8 MiB, batch", "≥ 0.9", at_least(0.9), COPY, "see e.alone"),
        ),
    ),
    Question(
        "e",
        "copies beside a process that decodes",
        copies.copies_beside_decode,
        150,
        (
            Row("e.beside", "B's GB/s, and by how much A is slower"),
            Row("e.matmul", "matmul"),
            Row("e.slower_batch_2048k", "%, A slower: 2 MiB, batch", "≤ 5", at_most(5), COPY, "a lower rate of copies"),
            Row("e.slower_batch_32k", "%, A slower: 32 KiB, batch", "≤ 5", at_most(5), COPY, "page_first by default"),
            Row("e.slower_overlap_2048k", "%, A slower: 2 MiB, batch that prefers overlap"),
            Row("e.slower_overlap_32k", "%, A slower: 32 KiB, batch that prefers overlap"),
            Row("e.slower_single_2048k", "%, A slower: 2 MiB, one by one"),
            Row("e.slower_single_32k", "%, A slower: 32 KiB, one by one"),
            Row("e.slower_kernel_2048k", "%, A slower: 2 MiB, kernel"),
            Row("e.slower_kernel_32k", "%, A slower: 32 KiB, kernel"),
            Row(
                "e.kernel_slows_more",
                "a kernel of another process slows decoding more than copy engines do",
                "yes",
                true,
                COPY,
                "a gather kernel is worth having",
            ),
        ),
    ),
    Question(
        "f",
        "many processes have the pool mapped",
        copies.attach_limit,
        90,
        (
            Row("f.attached", "processes that could"),
            Row("f.attach_all", "all could", "yes", true, "client/cards.py", "the limit is told at hello"),
            Row("f.attach_refused", "why not"),
            Row("f.attach_s", "s for all of them, at once"),
            Row("f.context_mib", "MiB of the card for each"),
        ),
    ),
)


class Outcome(NamedTuple):
    """Of a question."""

    letter: str
    title: str
    seconds: float
    error: str  # "": it came to its end


class Report:
    """All that was found, and what it comes to."""

    def __init__(self, facts: dict[str, str], quick: bool) -> None:
        self.facts = facts
        self.quick = quick
        self.answers: dict[str, Any] = {}
        self.outcomes: list[tuple[Question, Outcome]] = []

    def verdict(self, row: Row, outcome: Outcome) -> str:
        if row.key not in self.answers:
            return "NOT ANSWERED" if outcome.error and row.holds else ""
        answer = self.answers[row.key]
        if isinstance(answer, str) and answer.startswith("not asked"):
            return answer
        if row.holds is None:
            return "measured"
        return "as assumed" if row.holds(answer) else f"DIFFERS: {row.change} ({row.rests})"

    def verdicts(self) -> list[tuple[Question, Row, str]]:
        return [
            (question, row, verdict)
            for question, outcome in self.outcomes
            for row in question.rows
            if (verdict := self.verdict(row, outcome))
        ]

    @property
    def good(self) -> bool:
        bad = any(verdict.startswith(("DIFFERS", "NOT ANSWERED")) for _, _, verdict in self.verdicts())
        return not bad and not any(outcome.error for _, outcome in self.outcomes)

    def as_json(self) -> str:
        return json.dumps(
            {
                "facts": self.facts,
                "quick": self.quick,
                "good": self.good,
                "answers": self.answers,
                "verdicts": {row.key: verdict for _, row, verdict in self.verdicts()},
                "questions": [outcome._asdict() for _, outcome in self.outcomes],
            },
            indent=1,
        )

    def as_markdown(self) -> str:
        lines = [*table(("", ""), self.facts.items())]
        if self.quick:
            lines += ["**Small sizes (`--quick`): the times and rates say nothing.**", ""]
        for question, outcome in self.outcomes:
            lines += [f"### ({question.letter}) {question.title}", ""]
            rows, tables = [], list[str]()
            for row in question.rows:
                if not (verdict := self.verdict(row, outcome)):
                    continue
                answer = self.answers.get(row.key)
                if is_nested(answer):
                    tables += [f"{row.asked} (`{row.key}`):", "", *nested(answer)]
                    continue
                rows.append((row.asked, shown(answer), row.assumed, verdict, f"`{row.key}`"))
            if rows:
                lines += table(("", "answer", "assumed", "", "key"), rows)
            if outcome.error:
                lines += [f"**Did not come to its end: {outcome.error}**", ""]
            lines += tables
        return "\n".join(lines).rstrip() + "\n"


def is_nested(answer: Any) -> TypeGuard[dict[str, dict[str, Any]]]:
    return isinstance(answer, dict) and any(isinstance(each, dict) for each in answer.values())


def shown(answer: Any) -> str:
    if isinstance(answer, bool):
        return "yes" if answer else "no"
    if isinstance(answer, dict):
        return "; ".join(f"{name} {shown(value)}" for name, value in answer.items()) or "none"
    if isinstance(answer, list):
        return ", ".join(map(str, answer)) or "none"
    if answer is None:
        return ""
    return f"{answer:,}" if isinstance(answer, int | float) else str(answer).replace("|", "\\|").replace("\n", " ")


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """In markdown, and an empty line."""
    lines = [head, ("---",) * len(head), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines] + [""]


def nested(answer: dict[str, dict[str, Any]]) -> list[str]:
    """Tables of rows by name; those of one kind together."""
    lines, by_columns = list[str](), dict[tuple[str, ...], list[tuple[str, ...]]]()
    for name, row in answer.items():
        by_columns.setdefault(tuple(row), []).append((name, *(shown(value) for value in row.values())))
    for columns, rows in by_columns.items():
        lines += table(("", *columns), rows)
    return lines


# -- the machine -----------------------------------------------------------------------------------------------------


def card_facts(here: Here) -> dict[str, str]:
    card = here.card
    free, total = card.free_bytes()
    known = {name: card.fact(name) for name in ATTRIBUTES}
    return {
        "card": f"{card.name()}, GPU-{uuid.UUID(bytes=card.uuid(here.device))}",
        "compute capability": f"{known.pop('compute_major')}.{known.pop('compute_minor')}",
        "driver": f"{kernel_module()}, for CUDA up to {card.driver_version()}",
        "memory": f"{total:,} bytes, {free:,} free at the begin",
        "attributes": ", ".join(f"{name} {value}" for name, value in known.items()),
        "priorities": "{} to {}".format(*card.priorities()),
    }


def kernel_module() -> str:
    """The driver in the kernel, by its own words."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0].removeprefix("NVRM version:").strip()
    except (OSError, IndexError):
        return "not in /proc/driver/nvidia"


def host_facts() -> dict[str, str]:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    cpu = next((line for line in lines_of("/proc/cpuinfo") if line.startswith("model name")), "").partition(":")[2]
    huge = next(iter(lines_of("/sys/kernel/mm/transparent_hugepage/shmem_enabled")), "")
    return {
        "date": now,
        "kernel": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "processors": f"{len(os.sched_getaffinity(0))}, {cpu.strip()}",
        "huge pages of shared memory": huge,
        "python": platform.python_version(),
        "pidfds": "yes" if open_pidfd(os.getpid()) is not None else "no: a parent's wait takes their place",
    }


def lines_of(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


# -- the run -----------------------------------------------------------------------------------------------------------


def ask(question: Question, device: int, seconds: float, sizes: Sizes, tell: Tell) -> Outcome:
    began, error = time.monotonic(), ""
    with staged(device, seconds) as stage:
        try:
            question.ask(stage, tell, sizes)
        except Unanswered as exc:
            error = f"{type(exc).__name__.lower()}: {exc}"
        except Exception as exc:  # a mistake of ours is one question's, too
            error = f"{type(exc).__name__}: {exc}"
    if stage.left_behind:
        error += f"; kill -9 did not end {', '.join(stage.left_behind)}"
    return Outcome(question.letter, question.title, round(time.monotonic() - began, 1), error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=int, default=0, help="number of the card")
    parser.add_argument("--only", action="append", metavar="LETTER", choices=sorted({q.letter for q in ASSUMED}))
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--no-torch", action="store_true", help="leave out what is about torch")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="S", help=f"seconds in all: {BUDGET_S:.0f}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written anew after each question")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="likewise: what docs/gpu.md is to have")
    options = parser.parse_args()
    until = time.monotonic() + options.budget
    with staged(options.device, min(60.0, options.budget)) as stage:
        try:
            facts = host_facts() | stage.actor("card").ask(card_facts)
        except Unanswered as exc:
            print(f"gpu_probe: no card to ask: {exc}", file=sys.stderr)
            return 2
    report = Report(facts, options.quick)
    print("\n".join(f"{name:<28}{fact}" for name, fact in facts.items()), flush=True)
    for question in ASSUMED:
        if options.only and question.letter not in options.only:
            continue
        seconds = min(question.seconds, until - time.monotonic())
        if seconds < LEAST_S:
            outcome = Outcome(question.letter, question.title, 0.0, "the time that there was is over")
        else:
            sizes = replace(QUICK if options.quick else FULL, torch=not options.no_torch)
            outcome = ask(question, options.device, seconds, sizes, report.answers.__setitem__)
        report.outcomes.append((question, outcome))
        print(f"\n({question.letter}) {question.title}: {outcome.seconds} s {outcome.error}".rstrip(), flush=True)
        for row in question.rows:
            if verdict := report.verdict(row, outcome):
                answer = report.answers.get(row.key)
                if is_nested(answer):
                    lines = (f"      {name}: {shown(line)}" for name, line in answer.items())
                    print(f"    {row.key}", *lines, sep="\n", flush=True)
                else:
                    print(f"    {row.key:<27} {shown(answer):<30} {verdict}", flush=True)
        if options.json:
            options.json.write_text(report.as_json() + "\n")
        if options.markdown:
            options.markdown.write_text(report.as_markdown())
    differs = sum(
        not verdict.startswith(("as assumed", "measured", "not asked")) for _, _, verdict in report.verdicts()
    )
    print(
        "\neverything is as assumed"
        if report.good
        else f"\n{differs} differ from what is assumed, or were not answered"
    )
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
