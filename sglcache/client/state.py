"""One stream's picture with its numbers: what the batches so far say, as of which number, and whether that is all.

No I/O and no policy: `apply` takes the next batch or refuses, and who calls it decides what to do about a gap (that is
`follower.Follower`).

`exact` means that the picture is, as of `next_seq` - 1, what the stream's teller holds. It is so from an
AllBlocksCleared on, or from number 0, for as long as nothing is lost. Between a snapshot's first frame and the end of
the replay it is not: a snapshot may be ahead of its number, and the batches behind it make up for that. While the
teller announces everything anew on the live stream the picture is exact as the stream goes, and grows back to all
that is held: nothing marks the end of that, but a digest tells.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence

from sglcache.client.picture import Block, Digest, Groups, Picture
from sglcache.units import Tier
from sglcache.wire.events import AllBlocksCleared, Batch, Event

KEPT_DIGESTS = 4096  # changes of the picture that `digests_at` looks back


class MirrorState:
    """The blocks of each (rank, medium) after the batches applied so far, and the number that is next."""

    def __init__(self, rank: int = 0, groups: Groups | None = None) -> None:
        """`rank`: of a batch that names none, and the one that `digests_at` tells of. `groups`: as `Picture`."""
        self.rank = rank
        self.first_seq: int | None = None  # of the first batch that was taken in
        self.next_seq: int | None = None  # None: nothing has been applied
        self.exact = False
        self.snapshot: int | None = None  # a replay that started anew is under way; its first frame's number
        self.losses = 0  # gaps that were not repaired
        self.stale_batches = 0  # with a number that was there before
        self.picture = Picture(groups)
        self._digests: deque[tuple[int, dict[str, Digest]]] = deque(maxlen=KEPT_DIGESTS)

    def blocks(self, tier: Tier | str, rank: int | None = None) -> Mapping[int, Block]:
        """By hash, the blocks in the tier (or medium), as a view: don't keep it."""
        return self.picture.blocks(tier, self.rank if rank is None else rank)

    def hashes(self, tier: Tier | str, rank: int | None = None) -> set[int]:
        """The hashes of the blocks in the tier (or medium)."""
        return self.picture.hashes(tier, self.rank if rank is None else rank)

    def apply(self, seq: int, batch: Batch, replayed: bool = False) -> Sequence[Event] | None:
        """Take in batch `seq`; the facts that are news. None: numbers before it are missing, and nothing was changed.

        A batch whose number was there before is ignored, unless it is a snapshot's, whose frames have the number of the
        batch before them, or a replayed one that starts anew, which may tell of another life. A replayed one is never
        refused, for nothing better will come: numbers missing before it were heartbeats if it is one, and are a loss
        otherwise.
        """
        expected = self.next_seq
        anew = batch.starts_anew or seq == 0  # SGLang begins each life at 0 and sends no AllBlocksCleared then
        facts: list[Event] = []
        if anew:
            if not replayed and expected is not None and seq < expected:
                self.stale_batches += 1
                return ()
            self._digests.clear()
            self.snapshot = seq if replayed else None
            if replayed or not batch.starts_anew:
                self.picture.clear()
            self.exact = not replayed
            facts += () if batch.starts_anew else (AllBlocksCleared(),)
        elif expected is None or seq > expected:
            if not replayed:
                return None
            if batch.events:
                facts += self.lose(seq)
        elif seq < expected and not (replayed and self.snapshot is not None and seq == expected - 1):
            self.stale_batches += 1
            return ()
        rank = self.rank if batch.attn_dp_rank is None else batch.attn_dp_rank
        for event in batch.events:
            self.picture.apply(event, rank)
            if self.snapshot is None and isinstance(event, AllBlocksCleared):
                self.exact = True
        if self.first_seq is None:
            self.first_seq = seq
        self.next_seq = seq + 1
        if self.exact and (batch.events or anew):
            self._note(seq)
        return [*facts, *batch.events] if facts else batch.events

    def end_replay(self) -> None:
        """The replay has said all it has to say: a snapshot is complete, unless something was lost on the way."""
        if self.snapshot is not None:
            assert self.next_seq is not None
            self.snapshot = None
            self.exact = True
            self._note(self.next_seq - 1)

    def lose(self, seq: int) -> Sequence[Event]:
        """Give up on what comes before number `seq`, and all that is known with it. The facts that say so."""
        self.losses += self.next_seq is not None
        self._empty(seq)
        return (AllBlocksCleared(),)

    def forget(self) -> Sequence[Event]:
        """The numbers so far are of a life that is over: nothing is known. The facts that say so."""
        self._empty(None)
        return (AllBlocksCleared(),)

    def digests_at(self, seq: int) -> dict[str, Digest] | None:
        """By medium, as of number `seq`. None: it is not reached, too long ago, or the picture was not exact then."""
        if self.next_seq is None or seq >= self.next_seq or not self._digests or seq < self._digests[0][0]:
            return None
        return self._digests[bisect_right(self._digests, seq, key=lambda noted: noted[0]) - 1][1]

    def _empty(self, next_seq: int | None) -> None:
        self.next_seq = next_seq
        self.exact = False
        self.snapshot = None
        self._digests.clear()
        self.picture.clear()

    def _note(self, seq: int) -> None:
        self._digests.append((seq, self.picture.digests(self.rank)))
