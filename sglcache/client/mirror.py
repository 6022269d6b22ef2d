"""A router's picture of what a server's ranks cache, kept from their event streams: the reference consumer.

    with Mirror.from_server("http://127.0.0.1:30080") as mirror:
        while True:
            mirror.step(1.0)
            mirror.longest_match(tokens)   # for each rank, how much of it is cached in each tier

It is in four parts, and this one alone does I/O: `picture` holds the blocks, `state` the numbers, `follower` decides
what to do about a gap, and here are the sockets. Loads neither torch nor numpy nor the index.

What a mirror holds is, as of the number it has reached, exactly what the rank holds (`exact`), or part of it: a
loss that nobody can repair empties the picture and lets it grow anew, for a block that is not known costs a router
less than one that is not there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import zmq

from sglcache.client.discovery import Source, discover
from sglcache.client.follower import Fact, Follower
from sglcache.client.hashes import named
from sglcache.client.picture import Block, BlockHashes, Digest, Groups, Match, Tokens, medium
from sglcache.client.state import MirrorState
from sglcache.errors import BadRequest, ClosedError, ConfigError
from sglcache.net.endpoints import dial, parse
from sglcache.units import Tier

END_SEQ = b"\xff" * 8
LIVE_HWM = 10_000  # messages that libzmq keeps for us while nobody calls `step`; beyond, there is a gap
REPLAY_HWM = 64
MAX_PATIENCE = 32  # times `replay_timeout_s` that a replay is given at last
MAX_MESSAGE = 64 << 20  # bytes; libzmq ends the connection of who sends more
TURN = 100  # messages of one socket that a step takes at most


class Curve(NamedTuple):
    """CURVE: the server's public key, and our own pair; made up if the server admits everyone. Z85, 40 characters."""

    server_key: str
    public_key: str | None = None
    secret_key: str | None = None

    @classmethod
    def of_stream(cls, stream: Mapping[str, Any]) -> Curve | None:
        """What the stream of a `Client.status` wants; None: nothing. ConfigError: a key that is on its list."""
        match stream.get("curve"):
            case None:
                return None
            case "every key":
                return cls(stream["curve_server_key"])
            case _:
                raise ConfigError(
                    f"the stream at {stream['endpoint']} lets in the keys in events.curve_allow_dir alone; "
                    "follow it with `sglcache verify` or scripts/subscribe.py and such a key"
                )

    def apply(self, sock: zmq.Socket[bytes]) -> None:
        """Make what the socket connects to prove that it is the server. ConfigError: that is no key."""
        public, secret = (self.public_key, self.secret_key)
        if public is None or secret is None:
            public, secret = (key.decode() for key in zmq.curve_keypair())
        try:
            sock.curve_serverkey = self.server_key.encode()
            sock.curve_publickey = public.encode()
            sock.curve_secretkey = secret.encode()
        except zmq.ZMQError as exc:
            raise ConfigError("a CURVE key is not 40 characters of Z85") from exc


class Disagreement(NamedTuple):
    """A tier of which teller and mirror do not have the same digest."""

    tier: str
    told: Digest
    mirrored: Digest


class Mirror:
    """One stream, followed; or, by `of` and `from_server`, those of several ranks.

        with Mirror("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5657") as mirror:
            for seq, rank, event in mirror.follow():
                ...

    For one thread. Without a replay endpoint every gap is a loss, and so is what came before the join. Bad frames are
    counted and left out; a batch that can't be read is a loss. A replay of which nothing comes for `replay_timeout_s`
    is asked for again, and given twice as long each time, for a daemon may have others to answer first. Until it has
    ended the picture stands still (`synced` is False), and what is kept of the live stream is bounded.

    `hash_name` (`xxh3_128` or `sha256`), or a function, computes block hashes where the stream withholds tokens;
    `bigram`: of a daemon whose keys are pairs (`pool.bigram`), which such a stream does not tell.

    `groups`: of a model with windows or states, keep what is told of them (`events.groups`), so that a match also says
    how much of it is `reusable`. By `group_idx` the tokens of the window, None for states; {} learns them as it goes.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        rank: int = 0,
        since: int = 0,
        replay_timeout_s: float = 2.0,
        curve: Curve | None = None,
        hash_name: str | BlockHashes | None = None,
        bigram: bool = False,
        groups: Groups | None = None,
    ) -> None:
        """`since`: the number to begin with, if it can be had; by default it begins with a snapshot.

        A stream that is bound to every interface (`tcp://*:5557`) is dialled on this host. ConfigError: it can't be.
        """
        source = Source(endpoint, replay_endpoint, topic, rank)
        self._open([source], replay_timeout_s, curve, hash_name, bigram, groups, {rank: since})

    @classmethod
    def of(
        cls,
        sources: Sequence[Source],
        *,
        replay_timeout_s: float = 2.0,
        curve: Curve | None = None,
        hash_name: str | BlockHashes | None = None,
        bigram: bool = False,
        groups: Groups | None = None,
        since: Mapping[int, int] | None = None,
    ) -> Mirror:
        """Of several ranks' streams at once; `since`: by rank."""
        mirror = cls.__new__(cls)
        mirror._open(sources, replay_timeout_s, curve, hash_name, bigram, groups, since or {})
        return mirror

    @classmethod
    def from_server(
        cls,
        url: str,
        *,
        replay_timeout_s: float = 2.0,
        curve: Curve | None = None,
        hash_name: str | BlockHashes | None = None,
        bigram: bool = False,
        groups: Groups | None = None,
    ) -> Mirror:
        """Of every data-parallel rank of the server, as its /server_info advertises them, and its `groups`.

        Unavailable: it does not answer. ConfigError: it has no stream to follow.
        """
        server = discover(url)
        return cls.of(
            server.sources,
            replay_timeout_s=replay_timeout_s,
            curve=curve,
            hash_name=hash_name or server.hash_name,
            bigram=bigram or server.bigram,
            groups=server.groups if groups is None else groups,
        )

    def _open(
        self,
        sources: Sequence[Source],
        timeout_s: float,
        curve: Curve | None,
        hash_name: str | BlockHashes | None,
        bigram: bool,
        groups: Groups | None,
        since: Mapping[int, int],
    ) -> None:
        self._block_hashes = named(hash_name, bigram) if isinstance(hash_name, str) else hash_name
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._streams: dict[int, _Stream] = {}
        try:
            for source in sources:
                if source.rank in self._streams:
                    raise BadRequest(f"two streams of rank {source.rank}")
                self._streams[source.rank] = _Stream(
                    self._context, source, timeout_s, curve, since.get(source.rank, 0), groups
                )
        except BaseException:
            self.close()
            raise
        self._first = next(iter(self._streams.values()))

    def __enter__(self) -> Mirror:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave. What is known stays readable."""
        self._context.destroy(linger=0)

    # -- what is known ----------------------------------------------------------------------------------

    @property
    def ranks(self) -> list[int]:
        """Those that are followed."""
        return sorted(self._streams)

    @property
    def state(self) -> MirrorState:
        """The first stream's; the only one's, mostly."""
        return self._first.follower.state

    def state_of(self, rank: int) -> MirrorState:
        """BadRequest: that rank is not followed."""
        return self._stream(rank).follower.state

    @property
    def synced(self) -> bool:
        """No replay is running: each picture is that of its stream's `next_seq`."""
        return all(stream.follower.synced for stream in self._streams.values())

    @property
    def exact(self) -> bool:
        """Of every rank the picture is all that it holds, as of the number that was reached."""
        return all(stream.follower.state.exact for stream in self._streams.values())

    @property
    def bad_messages(self) -> int:
        return sum(stream.follower.bad_messages for stream in self._streams.values())

    @property
    def batches(self) -> int:
        """Taken in, live and replayed ones."""
        return sum(stream.follower.batches for stream in self._streams.values())

    @property
    def payload_bytes(self) -> int:
        """Of these."""
        return sum(stream.follower.payload_bytes for stream in self._streams.values())

    @property
    def replays(self) -> int:
        """Asked for."""
        return sum(stream.follower.requests for stream in self._streams.values())

    @property
    def losses(self) -> int:
        """Gaps that were not repaired."""
        return sum(stream.follower.state.losses for stream in self._streams.values())

    def blocks(self, tier: Tier | str, rank: int = 0) -> Mapping[int, Block]:
        """By hash, the blocks in the tier (or medium), as a view: don't keep it."""
        return self.state_of(rank).blocks(tier)

    def hashes(self, tier: Tier | str, rank: int = 0) -> set[int]:
        """The hashes of the blocks in the tier (or medium)."""
        return self.state_of(rank).hashes(tier)

    def longest_match(
        self,
        tokens: Tokens,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        tier: Tier | str | None = None,
    ) -> dict[int, Match]:
        """For each rank how much of `tokens` it holds, over all tiers and in each; with `tier` in that one alone.

        By tokens and parents, block for block, in the namespace that events call `lora_name` and `cache_salt`. Takes
        as long as the match is, however much is cached. Where the stream withholds tokens: by hashes, computed for
        the same namespace; ConfigError if the mirror was given no `hash_name`.
        """
        found: dict[int, Match] = {}
        for rank, stream in self._streams.items():
            picture = stream.follower.state.picture
            match = picture.longest_match(
                tokens, lora_name=lora_name, cache_salt=cache_salt, tier=tier, block_hashes=self._block_hashes
            )
            found[rank] = match.get(rank, picture.no_match)
        return found

    def check_digest(self, seq: int, tiers: Mapping[str, Sequence[int]], rank: int = 0) -> list[Disagreement] | None:
        """Hold the picture as of number `seq` against the digest that the daemon gives for it: [count, sum] by tier.

        Where they differ; none if they agree. None: the picture of that number is not known: it is not reached, or
        thousands of changes ago, or was not exact.
        """
        mirrored = self.state_of(rank).digests_at(seq)
        if mirrored is None:
            return None
        empty = Digest(0, 0)
        return [
            Disagreement(tier, Digest(*told), ours)
            for tier, told in tiers.items()
            if (ours := mirrored.get(Tier[tier].medium, empty)) != tuple(told)
        ]

    # -- following --------------------------------------------------------------------------------------

    def follow(self, timeout_s: float | None = None) -> Iterator[Fact]:
        """Each fact with its number and rank, as it is taken in. Ends when none has come for `timeout_s`.

        Applied one after another to nothing they give `hashes`: a loss comes as an AllBlocksCleared.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while deadline is None or time.monotonic() < deadline:
            facts = self.step(1.0 if deadline is None else max(0.0, deadline - time.monotonic()))
            yield from facts
            if facts and timeout_s is not None:
                deadline = time.monotonic() + timeout_s

    def catch_up(self, seq: int, timeout_s: float, rank: int | None = None, *, stop: bool = False) -> bool:
        """Follow until that rank's number `seq` is taken in and no replay is running; whether that was so in time.

        `rank`: by default the first stream's. With `stop` what comes after `seq` on the live stream is left for the
        next step, and the picture is that of `seq`, unless it was past it already.
        """
        stream = self._first if rank is None else self._stream(rank)
        deadline = time.monotonic() + timeout_s
        stream.until = seq if stop else None
        try:
            while not stream.reached(seq):
                if (left := deadline - time.monotonic()) <= 0:
                    return False
                self.step(left)
            return True
        finally:
            stream.until = None

    def step(self, timeout_s: float) -> list[Fact]:
        """Wait at most `timeout_s` for messages, and take in those that are there. ClosedError after `close`."""
        if self._context.closed:
            raise ClosedError("the mirror is closed")
        poller = zmq.Poller()
        for stream in self._streams.values():
            timeout_s = min(timeout_s, stream.register(poller))
        ready = dict(poller.poll(math.ceil(max(0.0, timeout_s) * 1000)))
        facts: list[Fact] = []
        for stream in self._streams.values():
            stream.step(ready, facts)
        return facts

    def _stream(self, rank: int) -> _Stream:
        try:
            return self._streams[rank]
        except KeyError:
            raise BadRequest(f"rank {rank} is not followed; these are: {self.ranks}") from None


class _Stream:
    """One rank's sockets: a subscription for as long as the mirror lives, and a new connection for each replay."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        source: Source,
        timeout_s: float,
        curve: Curve | None,
        since: int,
        groups: Groups | None,
    ) -> None:
        can_ask = source.replay_endpoint is not None
        self.follower = Follower(rank=source.rank, can_ask=can_ask, since=since, groups=groups)
        self.until: int | None = None  # leave live messages beyond this number where they are
        self._held: tuple[int, bytes] | None = None  # the first of them
        self._context = context
        self._source = source
        self._curve = curve
        self._timeout_s = timeout_s
        self._patience = 1
        self._deadline = math.inf
        self._sub = self._socket(zmq.SUB, LIVE_HWM)
        self._sub.subscribe(source.topic)
        dial(self._sub, parse(source.endpoint).dialled())
        self._dealer: zmq.Socket[bytes] | None = None
        self._request = 0  # what the dealer was made for
        self._serve_requests()

    def register(self, poller: zmq.Poller) -> float:
        """Have the poller look at our sockets; the seconds for which it may."""
        if self._held is None:
            poller.register(self._sub, zmq.POLLIN)
        elif not self._stopped:
            return 0.0
        if self._dealer is None:
            return math.inf
        poller.register(self._dealer, zmq.POLLIN)
        return self._deadline - time.monotonic()

    def step(self, ready: Mapping[object, int], facts: list[Fact]) -> None:
        if self._sub in ready or (self._held is not None and not self._stopped):
            self._take_live(facts)
        if self._dealer is not None and self._dealer in ready:
            self._take_replay(self._dealer, facts)
        if self._dealer is not None and time.monotonic() > self._deadline:
            self._patience = min(2 * self._patience, MAX_PATIENCE)
            self.follower.lost_replay()
            self._serve_requests()

    @property
    def _stopped(self) -> bool:
        """The message that is held is beyond where we are to stop, and we are there."""
        held, until = self._held, self.until
        return held is not None and until is not None and held[0] > until and self.reached(until)

    def _take_live(self, facts: list[Fact]) -> None:
        for _ in range(TURN):
            if self._held is not None:
                (seq, payload), self._held = self._held, None
            else:
                try:
                    frames = self._sub.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                if len(frames) != 3 or len(frames[1]) != 8:
                    self.follower.bad_message()
                    continue
                seq, payload = int.from_bytes(frames[1], "big"), frames[2]
            if self.until is not None and seq > self.until and self.reached(self.until):
                self._held = seq, payload
                break
            facts += self.follower.live(seq, payload)
        self._serve_requests()

    def reached(self, seq: int) -> bool:
        """Until then a message beyond it is taken in: perhaps it is the one that shows a gap."""
        next_seq = self.follower.state.next_seq
        return self.follower.synced and next_seq is not None and next_seq > seq

    def _take_replay(self, dealer: zmq.Socket[bytes], facts: list[Fact]) -> None:
        for _ in range(TURN):
            try:
                frames = dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            # SGLang up to 0.5.21 leaves the topic out.
            if len(frames) not in (3, 4) or len(frames[-2]) != 8:
                self.follower.bad_message()
                continue
            self._deadline = time.monotonic() + self._timeout_s * self._patience
            if frames[-2] == END_SEQ:
                self._patience = 1
                facts += self.follower.end_replay()
                self._serve_requests()
                return
            facts += self.follower.replayed(int.from_bytes(frames[-2], "big"), frames[-1])

    def _serve_requests(self) -> None:
        """Ask, if the follower wants to; on a new connection, so that what was asked on the last one is forgotten."""
        follower = self.follower
        wanted = follower.requests if not follower.synced else 0
        if wanted == self._request:
            return
        self._request = wanted
        if self._dealer is not None:
            self._dealer.close(linger=0)
            self._dealer = None
        if follower.asked_from is None:
            return
        assert self._source.replay_endpoint is not None
        self._dealer = self._socket(zmq.DEALER, REPLAY_HWM)
        dial(self._dealer, parse(self._source.replay_endpoint, "replay_endpoint").dialled())
        self._dealer.send_multipart([b"", follower.asked_from.to_bytes(8, "big")], zmq.NOBLOCK)
        self._deadline = time.monotonic() + self._timeout_s * self._patience

    def _socket(self, kind: int, hwm: int) -> zmq.Socket[bytes]:
        sock = self._context.socket(kind)
        sock.setsockopt(zmq.RCVHWM, hwm)
        sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        if self._curve is not None:
            self._curve.apply(sock)
        return sock


__all__ = [
    "Block",
    "Curve",
    "Digest",
    "Disagreement",
    "Fact",
    "Groups",
    "Match",
    "Mirror",
    "MirrorState",
    "Source",
    "medium",
]
