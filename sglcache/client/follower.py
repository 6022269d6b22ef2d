"""What to do about one stream's messages: take them in order, and ask for what is missing. No I/O and no clock.

    live messages ──► live ─────► waiting, while a replay runs ──► MirrorState
    a replay's    ──► replayed ─────────────────────────────────► MirrorState
    its END       ──► end_replay
    its silence   ──► lost_replay

`asked_from` is the number from which a replay is wanted, `requests` how often one was: whenever that has grown, the
caller drops the connection of the last one and asks anew. Answers to an older request must not be handed in.

Numbers of one life rise, and a teller's next life goes on above the last. Another teller's may begin again at 0, and
then nothing is what it seems: batches of the new life look like ones that were there before. Two things give it away:
on one connection the numbers never fall within a life, and a batch that was replayed is not younger than all that
were taken in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from sglcache.client.picture import Groups
from sglcache.client.state import MirrorState
from sglcache.errors import ProtocolError
from sglcache.wire.events import AllBlocksCleared, Batch, Event, decode_batch

MAX_WAITING = 10_000  # live messages kept while a replay runs; beyond, they are replayed too
MAX_WAITING_BYTES = 64 << 20
CLEARED = AllBlocksCleared.__name__.encode()


class Fact(NamedTuple):
    """What one event says, and the number and the rank of the batch that said it."""

    seq: int
    rank: int
    event: Event


class Follower:
    """Keeps a `MirrorState` as near to the stream as its messages allow."""

    def __init__(self, *, rank: int = 0, can_ask: bool = True, since: int = 0, groups: Groups | None = None) -> None:
        """`can_ask`: there is someone to answer replays. Without, what came before the join and each gap is a loss.

        `since`: the number to begin with, if it can be had: 0 is a snapshot, a life's first number its whole story.
        `groups`: as `Picture`.
        """
        self.state = MirrorState(rank, groups)
        self.can_ask = can_ask
        self._since = since
        self.asked_from: int | None = None  # a replay from this number is wanted, or under way
        self.requests = 0
        self.bad_messages = 0
        self.batches = 0  # taken in, live and replayed
        self.payload_bytes = 0  # of these
        self.restarts = 0  # lives that ended, seen by numbers that went back
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._waiting_bytes = 0
        self._last_live: int | None = None  # the last live number that arrived
        self._newest_ts = 0.0  # of what was taken in; 0: its teller gives none
        self._asked_for: int | None = None  # the live number that the last request was made for
        self._bad_seq = -1  # the last number that could not be read
        self._to_mend = False  # because of it the picture is not all there: a snapshot would be
        if can_ask:
            self._ask(since)

    @property
    def synced(self) -> bool:
        """No replay is wanted or under way."""
        return self.asked_from is None

    def live(self, seq: int, payload: bytes) -> list[Fact]:
        """A message of the live stream. What it says, or what it let through says."""
        facts: list[Fact] = []
        if self._last_live is not None and seq <= self._last_live:
            self._drop_waiting()
            self.asked_from = None
            self._begin_life(facts)
        self._last_live = seq
        if not self.synced and self._starts_anew(seq, payload):
            self._drop_waiting()
            self.asked_from = None  # whatever the replay would say does not matter any more
        if self.synced:
            if not self._take(seq, payload, facts, fresh=True):
                self._wait(seq, payload)
                self._take_waiting(facts)
            self._mend()
        else:
            self._wait(seq, payload)
        return facts

    def replayed(self, seq: int, payload: bytes) -> list[Fact]:
        """A message of the replay that was asked for."""
        facts: list[Fact] = []
        state = self.state
        if (batch := self._decode(payload)) is not None:
            news = state.apply(seq, batch, replayed=True)
            assert news is not None, "a replayed batch is never refused"
            self._took(seq, batch, payload, news, facts)
        elif state.next_seq is None or seq >= state.next_seq or seq == state.snapshot:
            self._lose(seq, facts)
        return facts

    def end_replay(self) -> list[Fact]:
        """That was its last one."""
        facts: list[Fact] = []
        self.asked_from = None
        self.state.end_replay()
        self._take_waiting(facts)
        self._mend()
        return facts

    def lost_replay(self) -> None:
        """Nothing more will come of it: ask again. Part of a snapshot is nothing to go on from."""
        self._ask(0 if self.state.snapshot is not None else self.state.next_seq or self._since)

    def bad_message(self) -> None:
        """Frames that are no message of this protocol. If a batch was meant, its number will be missed."""
        self.bad_messages += 1

    # -- inside -----------------------------------------------------------------------------------------

    def _take_waiting(self, facts: list[Fact]) -> None:
        while self._waiting and self.synced:
            seq, payload = self._waiting[0]
            if self._take(seq, payload, facts):
                self._waiting.popleft()
                self._waiting_bytes -= len(payload)
            elif not self.can_ask or self._asked_for == seq:
                self._hand_on(seq, self.state.lose(seq), facts)  # they can't be had, or were asked for in vain
            else:
                self._asked_for = seq
                self._ask(self.state.next_seq or 0)

    def _take(self, seq: int, payload: bytes, facts: list[Fact], fresh: bool = False) -> bool:
        """A live message whose turn it is. False: numbers before it are missing.

        `fresh`: it did not wait for a replay, so there is no reason that it should have been replayed.
        """
        state = self.state
        behind = state.next_seq is not None and seq < state.next_seq
        if (batch := self._decode(payload)) is None:
            if not behind:
                self._lose(seq, facts)
            return True
        if behind and fresh and batch.ts > self._newest_ts > 0:
            self._begin_life(facts)
        news = state.apply(seq, batch)
        if news is None:
            return False
        self._took(seq, batch, payload, news, facts)
        return True

    def _took(self, seq: int, batch: Batch, payload: bytes, news: Sequence[Event], facts: list[Fact]) -> None:
        if self.state.next_seq != seq + 1:
            return  # it was there before
        self.batches += 1
        self.payload_bytes += len(payload)
        self._newest_ts = max(self._newest_ts, batch.ts)
        self._hand_on(seq, news, facts, batch.attn_dp_rank)

    def _hand_on(self, seq: int, news: Sequence[Event], facts: list[Fact], rank: int | None = None) -> None:
        rank = self.state.rank if rank is None else rank
        facts.extend(Fact(seq, rank, event) for event in news)

    def _begin_life(self, facts: list[Fact]) -> None:
        """The numbers went back: all that is known is of a life that is over."""
        self.restarts += 1
        self._newest_ts = 0.0
        self._asked_for = None
        self._bad_seq = -1
        if (reached := self.state.next_seq) is not None:
            self._hand_on(reached, self.state.forget(), facts)

    def _lose(self, seq: int, facts: list[Fact]) -> None:
        """Number `seq` can't be read. A ring would only give it again, and once is enough to find that out."""
        if seq > self._bad_seq:
            self._bad_seq = seq
            self._to_mend = True
        self._hand_on(seq, self.state.lose(seq + 1), facts)

    def _mend(self) -> None:
        if self._to_mend and self.can_ask and self.synced:
            self._to_mend = False
            self._ask(0)

    def _ask(self, start: int) -> None:
        self.asked_from = start
        self.requests += 1

    def _wait(self, seq: int, payload: bytes) -> None:
        if len(self._waiting) >= MAX_WAITING or self._waiting_bytes + len(payload) > MAX_WAITING_BYTES:
            self._drop_waiting()
        self._waiting.append((seq, payload))
        self._waiting_bytes += len(payload)

    def _drop_waiting(self) -> None:
        self._waiting.clear()
        self._waiting_bytes = 0

    def _decode(self, payload: bytes) -> Batch | None:
        try:
            return decode_batch(payload)
        except ProtocolError:
            self.bad_messages += 1
            return None

    def _starts_anew(self, seq: int, payload: bytes) -> bool:
        """Whether nothing that was said before the live message matters, the running replay's answers included."""
        reached = self.state.next_seq
        if (reached is not None and seq < reached) or not (seq == 0 or CLEARED in payload[:64]):
            return False
        try:
            return seq == 0 or decode_batch(payload).starts_anew
        except ProtocolError:
            return False
