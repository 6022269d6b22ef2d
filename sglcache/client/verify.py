"""Whether what a live daemon's stream says is what its index holds, block for block: `sglcache verify`.

A mirror follows the stream from outside, like any router, and is held against the daemon in two ways:

* by digest, as of a number of the stream, again and again and under any load: what the daemon counted while it cut;
* by a dump of the index itself, as of a number too, which needs the index to hold still for as long as that takes.

The first shows whatever goes wrong on the way, the second also what was never told. The mirror begins with the life's
first batch where the daemon still has it, so that all of its story is checked; else with a snapshot, and what is
checked is that and the story from then on. A difference is told block by block; what a block is that the mirror lacks,
another mirror is asked, which begins with a snapshot.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from sglcache.client.client import Client, Dump
from sglcache.client.mirror import Curve, Disagreement, Mirror
from sglcache.client.picture import Block
from sglcache.errors import Changed, Unavailable
from sglcache.units import Tier

SHOWN = 8  # blocks of a difference that are told of; the rest is counted
FIRST_TOKENS = 8  # of such a block
PAUSE_S = 0.1  # between two digests


@dataclass(frozen=True)
class BlockNote:
    """One block of a difference, as far as the stream tells."""

    hash: int
    known: bool = False  # the rest is so
    parent: int | None = None
    tokens: tuple[Any, ...] = ()  # the first few
    lora_name: str | None = None
    cache_salt: str | None = None
    elsewhere: tuple[str, ...] = ()  # other tiers where the mirror has it

    def __str__(self) -> str:
        text = name(self.hash)
        if self.known:
            above = "at the root" if self.parent is None else f"under {name(self.parent)}"
            tokens = ",".join(map(str, self.tokens)) + ",.." if self.tokens else "withheld"
            text += f" {above}, tokens {tokens}"
        for label, value in (("lora", self.lora_name), ("salt", self.cache_salt)):
            text += f", {label} {value!r}" if value is not None else ""
        return text + (f", also in {' and '.join(self.elsewhere)}" if self.elsewhere else "")


@dataclass
class TierReport:
    """One tier as of number `seq`."""

    seq: int
    blocks: int  # that the index has
    mirrored: int
    dumped: bool = False  # compared block by block; else by digest
    equal: bool = True
    num_missing: int = 0  # that the index has and the mirror lacks
    num_extra: int = 0  # the other way round
    missing: list[BlockNote] = field(default_factory=list)  # the first few
    extra: list[BlockNote] = field(default_factory=list)


@dataclass
class RankReport:
    rank: int
    endpoint: str
    replay_endpoint: str | None
    from_the_start: bool = False  # of the daemon's life; else from a snapshot
    digests: int = 0  # that agreed
    full: bool = False  # every tier was compared block by block
    tiers: dict[str, TierReport] = field(default_factory=dict)  # by name, in lower case
    problems: list[str] = field(default_factory=list)
    batches: int = 0  # that the mirror took in
    replays: int = 0  # that it asked for
    announcing: bool = False  # the daemon was telling everything anew, and no end of it was seen

    @property
    def ok(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def name(block_hash: int) -> str:
    """A hash as people compare them."""
    return f"{block_hash & (1 << 64) - 1:016x}"


def verify(
    observer: Client,
    *,
    duration_s: float = 2.0,
    full: bool = False,
    timeout_s: float = 30.0,
    curve: Curve | None = None,
) -> RankReport:
    """Join the stream of the observer's rank, and compare for `duration_s`; then block by block, if the index lets.

    With `full` it is a problem if it does not. `timeout_s`: what the stream and a dump may take. Unavailable: the
    daemon publishes nothing.
    """
    status = observer.status()
    stream = status["stream"]
    if stream is None:
        raise Unavailable("the daemon publishes no events: set events.enabled = true to have something to verify")
    report = RankReport(status["rank"], stream["endpoint"], stream["replay_endpoint"])
    first = status["epoch"] if stream["ring_first_seq"] == status["epoch"] else 0
    with Mirror(
        report.endpoint, report.replay_endpoint, topic=stream["topic"], rank=report.rank, since=first, curve=curve
    ) as mirror:
        _Verifier(observer, mirror, report, timeout_s, stream["topic"], curve).run(duration_s, full)
        report.batches, report.replays = mirror.batches, mirror.replays
        report.from_the_start = first > 0 and mirror.state.first_seq == first
    return report


class _Verifier:
    def __init__(
        self,
        observer: Client,
        mirror: Mirror,
        report: RankReport,
        timeout_s: float,
        topic: str,
        curve: Curve | None,
    ) -> None:
        self.observer = observer
        self.mirror = mirror
        self.report = report
        self.timeout_s = timeout_s
        self.topic = topic
        self.curve = curve

    def run(self, duration_s: float, full: bool) -> None:
        report, mirror = self.report, self.mirror
        deadline = time.monotonic() + duration_s
        patience = time.monotonic() + self.timeout_s
        last: dict[str, Any] | None = None
        quiet = False
        while not report.problems:
            digest = self.observer.digest()
            quiet = last is not None and last["tiers"] == digest["tiers"]
            report.announcing = bool(digest.get("announcing"))
            if not report.announcing:
                self._compare_digest(digest)
                last = digest
            if mirror.losses and not mirror.exact:
                break  # and it will not be exact again before the next clear
            now = time.monotonic()
            if now >= deadline and (report.digests or now >= patience):
                break
            self._follow(PAUSE_S)
        if not report.digests and not report.problems and not mirror.losses:
            what = "was telling everything anew all the time" if report.announcing else "never held still"
            report.problems.append(f"no digest could be compared within {self.timeout_s:.0f} s: the stream {what}")
        if not report.announcing:
            self._compare_dumps(must=full, patient=full or quiet or bool(report.problems))
        if mirror.losses or mirror.bad_messages:
            report.problems.append(
                f"the stream lost {mirror.losses} times what no replay brought back, and {mirror.bad_messages} "
                "messages could not be read"
            )

    def _follow(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.mirror.step(left)

    def _reach(self, seq: int, stop: bool = False) -> bool:
        if self.mirror.catch_up(seq, self.timeout_s, stop=stop):
            return True
        state = self.mirror.state
        where = "has heard nothing" if state.next_seq is None else f"is at {state.next_seq - 1}"
        self.report.problems.append(
            f"after {self.timeout_s:.0f} s the mirror {where}, and the daemon was at {seq}; can {self.report.endpoint} "
            f"and {self.report.replay_endpoint} be reached from here?"
        )
        return False

    def _compare_digest(self, digest: dict[str, Any]) -> None:
        report, seq = self.report, digest["seq"]
        if not self._reach(seq):
            return
        found = self.mirror.check_digest(seq, digest["tiers"], report.rank)
        if found is None:
            # A replay went past it, which is no fault; or something was lost, which `losses` tells.
            return
        disagreeing = {each.tier: each for each in found}
        mirrored = self.mirror.state.digests_at(seq) or {}
        for tier, (count, _) in digest["tiers"].items():
            ours = mirrored.get(Tier[tier].medium)
            report.tiers[tier.lower()] = TierReport(
                seq, count, ours.num_blocks if ours is not None else 0, equal=tier not in disagreeing
            )
        if not found:
            report.digests += 1
        report.problems += [_in_words(each, seq) for each in found]

    def _compare_dumps(self, *, must: bool, patient: bool) -> None:
        """`must`: it is a problem if the index does not hold still. `patient`: try for as long as there is time."""
        report = self.report
        tiers = [Tier[each] for each in self.observer.digest()["tiers"]]
        for tier in tiers:
            deadline = time.monotonic() + (self.timeout_s if patient else 1.0)
            while (dump := self._dump(tier)) is None or not self._compare_dump(tier, dump):
                if time.monotonic() > deadline:
                    if must:
                        report.problems.append(
                            f"{tier.name}: the index did not hold still long enough to be compared block by block; "
                            "try again when it is quieter"
                        )
                    return
                self._follow(PAUSE_S)
        report.full = all(each.dumped for each in report.tiers.values())

    def _dump(self, tier: Tier) -> Dump | None:
        try:
            return self.observer.dump(tier)
        except Changed:
            return None

    def _compare_dump(self, tier: Tier, dump: Dump) -> bool:
        """False: the mirror can't be brought to that number any more."""
        mirror, report = self.mirror, self.report
        if not self._reach(dump.seq, stop=True):
            return True
        state = mirror.state
        if state.next_seq != dump.seq + 1 or not state.exact:
            return bool(mirror.losses)
        wanted, believed = set(dump.hashes), state.hashes(tier)
        missing, extra = sorted(wanted - believed), sorted(believed - wanted)
        told = TierReport(dump.seq, len(wanted), len(believed), True, not (missing or extra), len(missing), len(extra))
        if missing or extra:
            if not any(problem.startswith(f"{tier.name}:") for problem in report.problems):
                report.problems.append(
                    f"{tier.name}: at number {dump.seq} the mirror lacks {len(missing)} of the index's "
                    f"{len(wanted)} blocks and has {len(extra)} that it should not"
                )
            told.extra = [self._note(each, mirror, tier) for each in extra[:SHOWN]]
            if missing:
                told.missing = self._notes_of_missing(missing[:SHOWN], tier)
        report.tiers[tier.name.lower()] = told
        return True

    def _notes_of_missing(self, hashes: list[int], tier: Tier) -> list[BlockNote]:
        report = self.report
        with Mirror(
            report.endpoint, report.replay_endpoint, topic=self.topic, rank=report.rank, curve=self.curve
        ) as other:
            other.catch_up(self.observer.digest()["seq"], self.timeout_s)
            return [self._note(each, other, tier) for each in hashes]

    def _note(self, block_hash: int, source: Mirror, tier: Tier) -> BlockNote:
        rank = self.report.rank
        elsewhere = tuple(
            other.name for other in Tier if other is not tier and block_hash in self.mirror.blocks(other, rank)
        )
        block: Block | None = next(
            (blocks[block_hash] for other in (tier, *Tier) if block_hash in (blocks := source.blocks(other, rank))),
            None,
        )
        if block is None:
            return BlockNote(block_hash, elsewhere=elsewhere)
        return BlockNote(
            block_hash, True, block.parent, block.tokens[:FIRST_TOKENS], block.lora_name, block.cache_salt, elsewhere
        )


def _in_words(found: Disagreement, seq: int) -> str:
    told, mirrored = found.told, found.mirrored
    return (
        f"{found.tier}: as of number {seq} the daemon has told of {told.num_blocks} blocks with the sum "
        f"{told.sum_hashes:016x}, the mirror has {mirrored.num_blocks} with {mirrored.sum_hashes:016x}"
    )


def describe(report: RankReport) -> str:
    """A few lines for people."""
    lines = []
    for tier, told in report.tiers.items():
        how = "block by block" if told.dumped else "by digest"
        verdict = "equal" if told.equal else "DIFFERENT"
        lines.append(f"{tier:<8} {told.blocks:,} blocks, {verdict} {how} at number {told.seq}")
        for label, count, notes in (
            ("missing", told.num_missing, told.missing),
            ("extra", told.num_extra, told.extra),
        ):
            lines += [f"  {label:<8} {note}" for note in notes]
            lines += [f"  {label:<8} and {count - len(notes):,} more"] if count > len(notes) else []
    since = "the daemon's start" if report.from_the_start else "a snapshot"
    lines.append(f"stream   {report.digests:,} digests agreed; {report.batches:,} batches, from {since} on")
    lines += [f"problem  {problem}" for problem in report.problems]
    return "\n".join(lines)
