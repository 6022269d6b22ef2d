"""Law 5 as far as a router: an index that changes, its stream, a link that loses, and a mirror at the other end.

The index is driven by `programs`, and what it publishes goes through the real ring and the real replays; the link and
the clock are ours. Whatever is lost, cut off, killed or begun anew, whenever the mirror says `exact` it holds what the
index held when it cut the batch of that number: block for block, tier by tier, with parents and tokens. And once the
link is whole, one heartbeat and one replay make it exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from sglcache.client.follower import Follower
from sglcache.client.picture import Block
from sglcache.core.effects import Effect, Publish
from sglcache.core.snapshot import Snapshot
from sglcache.net.replay import PATIENCE_S, Pause, Replay, Turns
from sglcache.net.ring import Entry, Ring
from sglcache.testing.pages import Page
from sglcache.testing.programs import Chooser, Program, SeededChooser, settings
from sglcache.testing.rig import Rig
from sglcache.units import Tier
from sglcache.wire.events import Token

TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK)
Held: TypeAlias = tuple[frozenset[Page], ...]  # by tier


class Number(NamedTuple):
    """What was so when a batch had been cut."""

    held: Held  # by the index
    told: frozenset[tuple[str, int]]  # (medium, hash), by the stream, since its last AllBlocksCleared
    announcing: bool  # then the stream has told part of it


class _Rig(Rig):
    """A rig whose batches someone hears, one by one."""

    def __init__(self, heard: Callable[[Publish, Held], None], **options: Any) -> None:
        self._heard = heard
        self._listening = False
        super().__init__(**options)

    def _drain(self) -> list[Effect]:
        if not self._listening:
            self._listening = True
            apply, present, heard = self.subscriber.apply, self._present, self._heard

            def listen(publish: Publish) -> None:
                apply(publish)
                heard(publish, present())

            self.subscriber.apply = listen  # type: ignore[method-assign]
        return super()._drain()

    def _present(self) -> Held:
        return tuple(frozenset(self.subscriber.present[tier]) for tier in TIERS)


class _Telling:
    """A snapshot as the publisher takes it."""

    def __init__(self, snapshot: Snapshot, clock: Callable[[], float]) -> None:
        self._snapshot = snapshot
        self._clock = clock

    def next(self) -> bytes | None:
        return self._snapshot.payload(self._clock())

    def close(self) -> None:
        self._snapshot.close()


class World:
    """Everything from the index to the mirror. Each method is one thing that may happen."""

    def __init__(self, choose: Chooser, **fixed: Any) -> None:
        self.fixed = settings(choose, **{"events": True, **fixed})
        self.ring_bytes = choose.item((400, 1500, 1 << 20))
        self.now = 1.0
        self.numbers: dict[int, Number] = {}  # of every life
        self.exact_checks = 0
        self.cut_off = False  # nothing of the live stream gets through
        self.live: deque[tuple[int, bytes]] = deque()  # on its way
        self.answers: deque[tuple[int, bytes] | None] = deque()  # of the replay, on their way; None: its END
        self.replay: Replay | None = None  # the teller's side of it
        self.rival: Replay | None = None  # someone else's
        self.last_seq = 0
        self._begin_life(choose.item((1, 1 << 40)))
        self.follower = Follower(rank=self.rig.config.rank)
        self.served = 0  # the mirror's request that was sent, or was lost on its way

    # -- the teller -------------------------------------------------------------------------------------

    def _begin_life(self, first_seq: int) -> None:
        self._told: set[tuple[str, int]] = set()
        self._telling_anew = False
        self.ring = Ring(self.ring_bytes)
        self.turns = Turns(lambda: self.now)
        self.rig: _Rig
        self.rig = _Rig(self._publish, **{**self.fixed, "first_seq": first_seq}, checks=False)
        self.rig.now = self.now
        self.turns.source = lambda: _Telling(self.rig.index.snapshot(), self._clock)
        self.program = Program(self.rig)

    def _clock(self) -> float:
        self.now += 0.001
        return self.now

    def _publish(self, batch: Publish, held: Held) -> None:
        """What a publisher does with a batch, and a note of what was so."""
        events = msgspec.msgpack.decode(batch.payload)[1]
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self._told.clear()
            else:
                blocks = {(event["medium"], each) for each in event["block_hashes"]}
                self._told = self._told | blocks if event["type"] == "BlockStored" else self._told - blocks
        self.numbers[batch.seq] = Number(held, frozenset(self._told), self._telling_anew)
        self.last_seq = batch.seq
        self.ring.append(Entry(batch.seq, batch.payload, not events))
        if not self.cut_off:
            self.live.append((batch.seq, batch.payload))

    def step(self, choose: Chooser) -> None:
        """Something happens to the index."""
        self.program.step(choose)
        self.check()

    def put(self, choose: Chooser) -> None:
        """A whole journey at once, so that there is something to lose."""
        self.program.put(choose)
        self.check()

    def cut(self, heartbeat: bool = False) -> None:
        self.rig.cut(heartbeat)
        self.check()

    def announce(self) -> None:
        """Begin to tell everything anew, or go on."""
        index, log = self.rig.index, self.rig.index.log
        assert log is not None
        if index.held:
            return
        if not index.announcing:
            index.announce()
            self._telling_anew = True
        index.announce_slice(self._clock())
        self._telling_anew = index.announcing
        published, log.published = log.published, []
        for batch in published:
            self.rig.subscriber.next_seq = batch.seq + 1
            self._publish(batch, self.rig._present())

    def restart(self) -> None:
        """The teller dies, and its answers with it; the next life's numbers are above."""
        self.kill_replay()
        self.leave_rival()
        self._begin_life(self.last_seq + 7)

    # -- the link ---------------------------------------------------------------------------------------

    def deliver(self, count: int) -> None:
        """Of what is on its way live, the next few arrive."""
        for _ in range(min(count, len(self.live))):
            self.follower.live(*self.live.popleft())
            self._send_request()
            self.check()

    def lose(self, count: int) -> None:
        """They do not."""
        for _ in range(min(count, len(self.live))):
            self.live.popleft()

    def cut_or_mend(self) -> None:
        self.cut_off = not self.cut_off
        if self.cut_off:
            self.live.clear()

    def _send_request(self) -> None:
        """A new request drops the connection of the last one. It is read when `answer` is called next."""
        if self.follower.synced or self.follower.requests != self.served:
            self.kill_replay()

    def lose_request(self) -> None:
        """Whatever the mirror has asked for is lost on its way."""
        self.kill_replay()
        self.served = self.follower.requests

    def kill_replay(self) -> None:
        """The connection breaks in the middle of an answer."""
        self.answers.clear()
        if self.replay is not None:
            self.replay.close()
            self.replay = None

    def answer(self, count: int) -> None:
        """The teller reads the request, if it has not yet, and sends a few messages of its answer."""
        follower = self.follower
        if self.replay is None and not follower.synced and follower.requests != self.served:
            assert follower.asked_from is not None
            self.replay = Replay(self.ring, self.turns, follower.asked_from)
            self.served = follower.requests
        for _ in range(count):
            if self.replay is None:
                return
            message = self.replay.peek()
            if message is Pause.LATER:
                return
            if isinstance(message, Entry):
                self.answers.append((message.seq, message.payload))
                self.replay.advance()
            elif message is None:
                self.answers.append(None)
                self.replay.close()
                self.replay = None

    def receive(self, count: int) -> None:
        """Of the answer, the next few messages arrive."""
        for _ in range(min(count, len(self.answers))):
            if not self.answers:
                return  # one of them led to another request
            message = self.answers.popleft()
            if message is None:
                self.follower.end_replay()
            else:
                self.follower.replayed(*message)
            self._send_request()
            self.check()

    def lose_patience(self) -> None:
        """The mirror's, with a replay that may or may not be on its way."""
        if not self.follower.synced:
            self.kill_replay()
            self.follower.lost_replay()
            self.check()

    def rejoin(self) -> None:
        """The mirror is another one, with nothing on its way to it."""
        self.kill_replay()
        self.live.clear()
        self.follower, self.served = Follower(rank=self.rig.config.rank), 0

    def visit(self, choose: Chooser) -> None:
        """Someone else asks for a snapshot, reads some of it, or leaves in the middle."""
        self.now += choose.item((0.0, PATIENCE_S + 1))
        if self.rival is None:
            self.rival = Replay(self.ring, self.turns, 0)
        elif choose.integer(0, 3) == 0:
            self.leave_rival()
        elif isinstance(message := self.rival.peek(), Entry):
            self.rival.advance()
        elif message is None:
            self.leave_rival()

    def leave_rival(self) -> None:
        if self.rival is not None:
            self.rival.close()
            self.rival = None

    # -- the law ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Whatever is called exact is what the index had."""
        state = self.follower.state
        if not state.exact:
            return
        assert state.next_seq is not None
        self.exact_checks += 1
        number = self.numbers.get(state.next_seq - 1)
        assert number is not None, f"{state.next_seq - 1} is nobody's number"
        for tier in TIERS:
            mirrored = state.hashes(tier)
            told = {each for medium, each in number.told if medium == tier.medium}
            assert told <= mirrored, f"{tier.name} at number {state.next_seq - 1}: the mirror lacks {told - mirrored}"
            if number.announcing:
                continue  # what is told is true, and not all of it was so at this number
            held = {page.hash: page for page in number.held[tier] if page.namespace[1] is None}
            assert mirrored == set(held), (
                f"{tier.name} at number {state.next_seq - 1}: the mirror has {mirrored - set(held)} more and lacks "
                f"{[held[each] for each in set(held) - mirrored]}"
            )
            for block_hash, block in state.blocks(tier).items():
                assert block == _block(held[block_hash])

    def heal(self) -> None:
        """The link is whole and the teller at rest: what is under way ends, and a heartbeat comes."""
        self.cut_off = False
        self.leave_rival()
        for _ in range(1000):
            if not self.rig.index.announcing:
                break
            self.rig.step()
            self.announce()
            self.cut()
        assert not self.rig.index.announcing, "it tells everything anew, for ever"
        self.cut()
        self._settle()
        requests = self.follower.requests
        self.cut(heartbeat=True)
        self._settle()
        asked = self.follower.requests - requests
        assert asked <= 1, f"{asked} replays after the heartbeat"
        state = self.follower.state
        assert self.follower.synced
        assert state.next_seq == self.last_seq + 1, f"the mirror is at {state.next_seq}, the stream at {self.last_seq}"
        assert state.exact, "the link is whole, a heartbeat came, and the mirror is not exact"
        self.check()

    def _settle(self) -> None:
        for _ in range(10_000):
            self.deliver(len(self.live))
            if self.follower.synced:
                return
            if self.replay is None and not self.answers and self.follower.requests == self.served:
                self.lose_patience()  # the request was lost
            self.answer(10)
            self.receive(len(self.answers))
        raise AssertionError("the mirror is never content")


def _block(page: Page) -> Block:
    words = np.frombuffer(page.words, "<u4").tolist()
    pairs = len(page.words) > len(page.tokens)
    tokens: tuple[Token, ...] = tuple(zip(words[::2], words[1::2], strict=True)) if pairs else tuple(words)
    return Block(None if page.parent is None else page.parent.hash, tokens, page.namespace[0], page.namespace[2])


def actions(world: World) -> list[tuple[int, Callable[[Chooser], object]]]:
    """What may happen, and how often it does."""
    return [
        (30, world.step),
        (20, world.put),
        (6, lambda choose: world.cut(heartbeat=not choose.integer(0, 1))),
        (14, lambda choose: world.deliver(choose.integer(1, 8))),
        (3, lambda choose: world.lose(choose.integer(1, 4))),
        (1, lambda _: world.cut_or_mend()),
        (12, lambda choose: world.answer(choose.integer(1, 3))),
        (12, lambda choose: world.receive(choose.integer(1, 3))),
        (1, lambda _: world.lose_request()),
        (1, lambda _: world.kill_replay()),
        (2, lambda _: world.lose_patience()),
        (1, lambda _: world.rejoin()),
        (2, world.visit),
        (3, lambda _: world.announce()),
        (1, lambda _: world.restart()),
        (1, lambda _: world.heal()),
    ]


def play(seed: int, steps: int = 200, **fixed: Any) -> World:
    """One random story; AssertionError at the first thing that is not right."""
    choose = SeededChooser(seed)
    world = World(choose, **fixed)
    deck = [action for weight, action in actions(world) for _ in range(weight)]
    for _ in range(steps):
        choose.item(deck)(choose)
    world.heal()
    return world
