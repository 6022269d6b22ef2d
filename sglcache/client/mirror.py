"""A router's picture of what one rank caches, kept from its event stream: the reference consumer.

`MirrorState` is the bookkeeping, without any I/O. `Mirror` feeds it from the two sockets: live batches, and a replay
whenever numbers are missing, at the start from number 0. Loads neither torch nor the index.

What a mirror holds is, as of the number it has reached, exactly what the rank holds (`exact`), or part of it: a
loss that nobody can repair empties the picture and lets it grow anew, for a block that is not known costs a router
less than one that is not there.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import zmq

from sglcache.errors import ClosedError, ProtocolError
from sglcache.units import Tier
from sglcache.wire.events import AllBlocksCleared, Batch, BlockStored, Event, Token, decode_batch, medium_of

END_SEQ = b"\xff" * 8
MAX_WAITING = 10_000  # live batches kept while a replay runs; beyond, they are replayed too


class Block(NamedTuple):
    parent: int | None  # the parent block's hash; None: at the root
    tokens: tuple[Token, ...]  # its own; empty where the daemon withholds them
    lora_name: str | None
    cache_salt: str | None


class MirrorState:
    """The blocks of each (rank, medium) after the batches applied so far, and the number that is next."""

    def __init__(self) -> None:
        self.next_seq: int | None = None  # None: nothing has been applied
        self.exact = False  # since an AllBlocksCleared: nothing that came after it was lost
        self.losses = 0  # gaps that were not repaired
        self.stale_batches = 0  # live ones with a number that was there before
        self._tiers: dict[tuple[int, str], dict[int, Block]] = {}

    def blocks(self, tier: Tier | str, rank: int = 0) -> dict[int, Block]:
        """By hash, the blocks in the tier (or medium), as a view: don't change it, and don't keep it."""
        return self._tiers.get((rank, tier.medium if isinstance(tier, Tier) else tier), {})

    def hashes(self, tier: Tier | str, rank: int = 0) -> set[int]:
        """The hashes of the blocks in the tier (or medium)."""
        return set(self.blocks(tier, rank))

    def apply(self, seq: int, batch: Batch, replayed: bool = False) -> list[Event] | None:
        """Take in batch `seq`; the facts that are news. None: numbers before it are missing, and nothing was changed.

        A live batch whose number was there before is ignored. A replayed one is taken again, which changes nothing
        unless it starts anew; and it is never refused, for nothing better will come: numbers missing before it were
        heartbeats if it is one, and are a loss otherwise.
        """
        expected = self.next_seq
        facts: list[Event] = []
        if not replayed:
            if expected is not None and seq < expected:
                self.stale_batches += 1
                return []
            if seq != expected and not batch.starts_anew:
                return None
        elif (expected is None or seq > expected) and batch.events and not batch.starts_anew:
            facts = self.lose(seq)
        for event in batch.events:
            self._apply(event, batch.attn_dp_rank or 0)
        # A replay that starts anew may tell of another life, whose numbers need not be higher.
        restarted = replayed and batch.starts_anew
        self.next_seq = seq + 1 if expected is None or restarted else max(expected, seq + 1)
        return facts + batch.events

    def lose(self, seq: int) -> list[Event]:
        """Give up on what comes before number `seq`, and all that is known with it. The facts that say so."""
        self.losses += self.next_seq is not None
        self.next_seq = seq
        self.exact = False
        self._tiers.clear()
        return [AllBlocksCleared()]

    def _apply(self, event: Event, rank: int) -> None:
        if isinstance(event, AllBlocksCleared):
            for key, blocks in self._tiers.items():
                if key[0] == rank:
                    blocks.clear()
            self.exact = True
            return
        tier = self._tiers.setdefault((rank, medium_of(event)), {})
        if isinstance(event, BlockStored):
            parent, size = event.parent_block_hash, event.block_size
            for place, block_hash in enumerate(event.block_hashes):
                tokens = tuple(event.token_ids[place * size : (place + 1) * size])
                tier[block_hash] = Block(parent, tokens, event.lora_name, event.cache_salt)
                parent = block_hash
        else:
            for block_hash in event.block_hashes:
                tier.pop(block_hash, None)


class Mirror:
    """One rank's stream, followed. Without a replay endpoint every gap is a loss, and so is what came before the join.

        with Mirror("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5657") as mirror:
            for seq, event in mirror.follow():
                ...

    For one thread. Bad frames are counted and left out; a batch that can't be read is a loss. While a replay is not
    answered it is asked for again, every `replay_timeout_s`, and the picture stands still (`synced` is False).
    """

    def __init__(
        self, endpoint: str, replay_endpoint: str | None = None, *, topic: str = "", replay_timeout_s: float = 2.0
    ) -> None:
        self.state = MirrorState()
        self.bad_messages = 0
        self.batches = 0  # taken in, live and replayed ones
        self.payload_bytes = 0  # of these
        self.replays = 0  # asked for
        self._replay_endpoint = replay_endpoint
        self._replay_timeout_s = replay_timeout_s
        self._waiting: deque[tuple[int, bytes]] = deque()  # live, until the replay's end
        self._asked_from: int | None = None  # a replay is running since this number
        self._asked_for: int | None = None  # the live batch that the last one was asked for
        self._answered_anew = False  # what has come of it starts anew
        self._deadline = 0.0
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.RCVHWM, 100_000)
        self._sub.setsockopt(zmq.IPV6, int("[" in endpoint))
        self._sub.subscribe(topic)
        self._sub.connect(endpoint)
        self._dealer: zmq.Socket[bytes] | None = None
        if replay_endpoint is not None:
            self._ask(0)

    def __enter__(self) -> Mirror:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave. What is known stays readable."""
        self._context.destroy(linger=0)

    @property
    def synced(self) -> bool:
        """No replay is running: the picture is that of `state.next_seq`."""
        return self._asked_from is None

    def hashes(self, tier: Tier | str, rank: int = 0) -> set[int]:
        """The hashes of the blocks in the tier (or medium)."""
        return self.state.hashes(tier, rank)

    def follow(self, timeout_s: float | None = None) -> Iterator[tuple[int, Event]]:
        """Each fact with its number, as it is taken in. Ends when none has come for `timeout_s`.

        Applied one after another to nothing they give `hashes`: a loss comes as an AllBlocksCleared.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while deadline is None or time.monotonic() < deadline:
            facts = self.step(1.0 if deadline is None else max(0.0, deadline - time.monotonic()))
            yield from facts
            if facts and timeout_s is not None:
                deadline = time.monotonic() + timeout_s

    def catch_up(self, seq: int, timeout_s: float) -> bool:
        """Follow until number `seq` is taken in and no replay is running; whether that was so in time."""
        deadline = time.monotonic() + timeout_s
        while not (self.synced and self.state.next_seq is not None and self.state.next_seq > seq):
            if (left := deadline - time.monotonic()) <= 0:
                return False
            self.step(left)
        return True

    def step(self, timeout_s: float) -> list[tuple[int, Event]]:
        """Wait at most `timeout_s` for messages, and take in those that are there. ClosedError after `close`."""
        if self._context.closed:
            raise ClosedError("the mirror is closed")
        facts: list[tuple[int, Event]] = []
        poller = zmq.Poller()
        poller.register(self._sub, zmq.POLLIN)
        if self._dealer is not None:
            poller.register(self._dealer, zmq.POLLIN)
            timeout_s = max(0.0, min(timeout_s, self._deadline - time.monotonic()))
        ready = dict(poller.poll(math.ceil(timeout_s * 1000)))
        if self._sub in ready:
            self._take_live(facts)
        if self._dealer is not None and self._dealer in ready:
            self._take_replay(self._dealer, facts)
        if self._asked_from is not None and time.monotonic() > self._deadline:
            # It died on us. After a picture has started anew only all of it will do.
            self._ask(0 if self._answered_anew else self._asked_from)
        return facts

    # -- live -----------------------------------------------------------------------------------------

    def _take_live(self, facts: list[tuple[int, Event]]) -> None:
        for _ in range(1000):
            try:
                frames = self._sub.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frames) != 3 or len(frames[1]) != 8:
                self.bad_messages += 1
                continue
            if len(self._waiting) == MAX_WAITING:
                self._waiting.clear()
            self._waiting.append((int.from_bytes(frames[1], "big"), frames[2]))
        self._take_waiting(facts)

    def _take_waiting(self, facts: list[tuple[int, Event]]) -> None:
        while self._waiting and self._asked_from is None:
            seq, payload = self._waiting[0]
            if self._take(seq, payload, facts):
                self._waiting.popleft()
            elif self._replay_endpoint is None or self._asked_for == seq:
                self._hand_on(seq, self.state.lose(seq), facts)  # they can't be had, or were asked for in vain
            else:
                self._asked_for = seq
                self._ask(self.state.next_seq or 0)

    def _take(self, seq: int, payload: bytes, facts: list[tuple[int, Event]], replayed: bool = False) -> bool:
        """False: numbers before it are missing."""
        try:
            batch = decode_batch(payload)
        except ProtocolError:
            self.bad_messages += 1
            if not replayed and self.state.next_seq is not None and seq < self.state.next_seq:
                return True
            self._hand_on(seq, self.state.lose(seq + 1), facts)
            return True
        news = self.state.apply(seq, batch, replayed)
        if news is None:
            return False
        self.batches += 1
        self.payload_bytes += len(payload)
        self._answered_anew = self._answered_anew or batch.starts_anew
        self._hand_on(seq, news, facts)
        return True

    @staticmethod
    def _hand_on(seq: int, news: list[Event], facts: list[tuple[int, Event]]) -> None:
        facts.extend((seq, event) for event in news)

    # -- replay ---------------------------------------------------------------------------------------

    def _ask(self, start: int) -> None:
        """Ask for all from `start` on, on a new connection: what was asked on the last one is forgotten."""
        assert self._replay_endpoint is not None
        if self._dealer is not None:
            self._dealer.close(linger=0)
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.RCVHWM, 1000)
        self._dealer.setsockopt(zmq.IPV6, int("[" in self._replay_endpoint))
        self._dealer.connect(self._replay_endpoint)
        self._dealer.send_multipart([b"", start.to_bytes(8, "big")], zmq.NOBLOCK)
        self.replays += 1
        self._asked_from, self._answered_anew = start, False
        self._deadline = time.monotonic() + self._replay_timeout_s

    def _take_replay(self, dealer: zmq.Socket[bytes], facts: list[tuple[int, Event]]) -> None:
        for _ in range(1000):
            try:
                frames = dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._deadline = time.monotonic() + self._replay_timeout_s
            if len(frames) != 4 or len(frames[2]) != 8:
                self.bad_messages += 1
            elif frames[2] != END_SEQ:
                self._take(int.from_bytes(frames[2], "big"), frames[3], facts, replayed=True)
            else:
                dealer.close(linger=0)
                self._dealer = self._asked_from = None
                self._take_waiting(facts)
                return
