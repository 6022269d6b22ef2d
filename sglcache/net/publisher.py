"""One rank's event stream on the network: live batches to whoever subscribes, and past ones to whoever asks.

    append ──► Ring ──► cursor of the live stream ──► XPUB
                 └────► cursor of each answer ──────► ROUTER

There is one store of batches, the ring, and what is sent is read from it; nothing is queued twice. A cursor that the
ring has left behind skips forward, and its reader sees a gap in the numbers.

All of it runs on the event-loop thread. No call here waits: a subscriber that does not read loses batches of its own
beyond `hwm`, a reader of a replay that does not read is left where it is, and neither delays anyone else. A thread of
its own was measured and not taken. On two cores with one subscriber beside it, a batch of 2 to 50 kB a turn cost the
loop 25 to 55 us sent from here and up to 45 us handed over (the waking, the contention for the interpreter), and one
in a hundred then left 4 ms late, because the thread waits for the interpreter while the loop has it.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from sglcache.core.histograms import Histogram
from sglcache.errors import ClosedError, ConfigError
from sglcache.net.curve import Curve
from sglcache.net.endpoints import Endpoint, Place, bind, dial, place_of
from sglcache.net.replay import Pause, Replay, Source, Turns
from sglcache.net.ring import Entry, Ring

END_SEQ = b"\xff" * 8

MAX_INBOUND = 4096  # bytes of a frame that a peer may send; requests and topics are far smaller
MAX_REQUEST_FRAMES = 3  # the reader's name, a delimiter, a number; what a message has beyond that is not kept
MAX_UNSENT = 4096  # batches whose delay is measured while the live stream is stuck; beyond that the oldest are not
MAX_ANSWERS = 64  # that one reader may have waiting; what it asks beyond that the last one answers, too

REPLAY_SNDBUF = (
    1 << 18
)  # bytes that the kernel keeps for a reader who does not read; libzmq keeps `replay_hwm` messages

# What one turn of `service` does at most: under a millisecond.
TURN_MESSAGES = 64
TURN_FRAMES = 4 * TURN_MESSAGES  # of requests
TURN_BYTES = 1 << 20
QUANTUM = 16  # messages to one reader before the next one's turn
RETRY_S = 0.01, 1.0  # first and longest. libzmq signals room for a reader, but any call may swallow the signal


class _Reader:
    """A peer of the replay socket that has not had all its answers."""

    def __init__(self) -> None:
        self.answers: deque[Replay] = deque()
        self.stalled = False  # its queue in libzmq was full when last tried
        self.taken = 0  # messages

    def close(self) -> None:
        for answer in self.answers:
            answer.close()
        self.answers.clear()


@dataclass(frozen=True)
class PublisherStats:
    endpoint: str  # as bound
    replay_endpoint: str | None
    last_seq: int | None  # of the newest batch appended
    batches_sent: int  # put on the live stream, heartbeats included
    batches_skipped: int  # that left the ring before the live stream took them
    bytes_sent: int  # payloads, once for all subscribers
    subscriptions: int  # live now; a subscriber of two topics has two
    replay_requests: int  # well-formed ones
    malformed_requests: int
    merged_requests: int  # beyond MAX_ANSWERS: answered with an earlier one
    replayed_batches: int
    snapshots_begun: int
    snapshots_done: int
    readers: int  # that have not had their END yet
    ring_batches: int
    ring_bytes: int
    ring_first_seq: int | None


class Publisher:
    """Binds both sockets on construction. ConfigError: one can't be bound, and neither is.

    Batches are the three frames [topic, number, payload], the number 8 bytes big-endian. A replay is asked for with
    ["", number] from a DEALER, or the number alone; each batch from that number up to the newest at that moment
    comes as ["", topic, number, payload], and at the end ["", "", 8 x 0xff, ""]. A number that the ring does not reach
    back to gets a snapshot, where `snapshot` says how to make one. A malformed request gets the end at once. A REQ
    socket can only read the first of these.

    With `connect` the live socket dials a subscriber that binds, and dials again whenever it is not there: what is
    published meanwhile it can only ask for. With `curve` both sockets speak with none but whom it lets in.

    A subscriber may lag by `hwm` batches, in libzmq's memory, before it loses some; libzmq hears of what was read with
    up to a millisecond's delay, so it should be well above what is appended in one.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        replay_endpoint: Endpoint | None = None,
        *,
        topic: str = "",
        ring_bytes: int = 64 << 20,
        hwm: int = 10_000,
        replay_hwm: int = 16,
        connect: bool = False,
        curve: Curve | None = None,
        keys: tuple[str, str] = ("endpoint", "replay_endpoint"),
    ) -> None:
        self._topic = topic.encode()
        self._ring = Ring(ring_bytes)
        self._turns = Turns()
        self._unsent: deque[tuple[int, float]] = deque(maxlen=MAX_UNSENT)  # (number, when it came), not sent yet
        self.delay = Histogram()  # seconds from a batch's coming to its being with libzmq
        self._live = 0  # the number that the live stream sends next
        self._frames: list[bytes] = []  # the first ones of a request that is not all there
        self._readers: OrderedDict[bytes, _Reader] = OrderedDict()  # the next one to serve first
        self._sent = self._skipped = self._bytes = self._subscriptions = 0
        self._requests = self._malformed = self._merged = self._replayed = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.Handle | None = None
        self._progress = False  # whether a reader took something in this turn
        self._retry_s = RETRY_S[0]
        self._closed = False
        self._places: list[Place] = []
        self._context = zmq.Context()
        self.curve = curve
        self._guard = curve.guard(self._context) if curve is not None else None
        self._router: zmq.Socket[bytes] | None = None
        self._pub = self._socket(zmq.XPUB, hwm)
        self._pub.setsockopt(zmq.XPUB_VERBOSER, 1)  # tell every subscription, to count them
        try:
            self._endpoint = str((dial if connect else self._bind)(self._pub, endpoint, keys[0]))
            self._replay_endpoint = None
            if replay_endpoint is not None:
                self._router = self._socket(zmq.ROUTER, replay_hwm)
                self._router.setsockopt(zmq.SNDBUF, REPLAY_SNDBUF)
                self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full or vanished reader is an error, not silence
                self._replay_endpoint = str(self._bind(self._router, replay_endpoint, keys[1]))
        except ConfigError:
            self.close(linger_s=0)
            raise

    @property
    def endpoint(self) -> str:
        """As bound: with the port the system chose."""
        return self._endpoint

    @property
    def replay_endpoint(self) -> str | None:
        return self._replay_endpoint

    @property
    def snapshot(self) -> Callable[[], Source] | None:
        """Begins a snapshot of what is cached as of the newest batch. None: the ring is all there is."""
        return self._turns.source

    @snapshot.setter
    def snapshot(self, begin: Callable[[], Source]) -> None:
        self._turns.source = begin

    @property
    def snapshot_duration(self) -> Histogram:
        """Seconds of each snapshot that was told to its end."""
        return self._turns.duration

    # -- the live stream ------------------------------------------------------------------------------

    def append(self, seq: int, payload: bytes, heartbeat: bool = False) -> None:
        """Number `seq` of the stream, which is higher than any before. Never waits, and no reader makes it fail.

        ClosedError after `close`.
        """
        if self._closed:
            raise ClosedError("the publisher is closed")
        self._unsent.append((seq, time.perf_counter()))
        for entry in self._ring.append(Entry(seq, payload, heartbeat)):
            self._skipped += entry.seq >= self._live
        self._pump()
        if heartbeat:
            self._count_subscriptions()

    @property
    def behind(self) -> int:
        """By how many numbers the live stream is behind the newest batch."""
        last = self._ring.last_seq
        return 0 if last is None else max(0, last + 1 - self._live)

    @property
    def next_live(self) -> int:
        """The number that the live stream sends next."""
        return self._live

    def stalled_readers(self) -> list[tuple[bytes, int]]:
        """Readers of a replay that could take no more when last tried, and how much each has taken."""
        return [(identity, reader.taken) for identity, reader in self._readers.items() if reader.stalled]

    @property
    def _behind(self) -> bool:
        last = self._ring.last_seq
        return last is not None and self._live <= last

    def _pump(self) -> bool:
        """Send what the live stream is behind by, a turn's worth; whether it could send more."""
        for _ in range(TURN_MESSAGES):
            if not self._behind:
                return False
            entry = self._ring.at(self._live)
            assert entry is not None, f"the ring has lost its newest batch, {self._ring.last_seq}"
            if not self._send_live(entry):
                return False
            self._live = entry.seq + 1
            self._sent += 1
            self._note_sent(entry.seq)
            self._bytes += len(entry.payload)
        return self._behind

    def _note_sent(self, seq: int) -> None:
        unsent = self._unsent
        while unsent and unsent[0][0] <= seq:  # lower ones are heartbeats that this one stands for, or were skipped
            number, at = unsent.popleft()
            if number == seq:
                self.delay.observe(time.perf_counter() - at)

    def _send_live(self, entry: Entry) -> bool:
        """False: not now."""
        try:
            self._pub.send(self._topic, zmq.NOBLOCK | zmq.SNDMORE)
            self._pub.send(entry.seq.to_bytes(8, "big"), zmq.NOBLOCK | zmq.SNDMORE)
            self._pub.send(entry.payload, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _count_subscriptions(self) -> bool:
        """Read a turn's worth of them; whether there may be more."""
        for _ in range(TURN_MESSAGES):
            try:
                frame = self._pub.recv(zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._subscriptions += {b"\1": 1, b"\0": -1}.get(frame[:1], 0)
        return True

    # -- replay ---------------------------------------------------------------------------------------

    def service(self, retry: bool = True) -> bool:
        """One turn of everything but `append`. True: there is more that could be done at once, then with `retry` False.

        Call it when a descriptor of `filenos` is readable. With `retry` it also tries the readers that could take
        no more when last tried; while there are such, call it now and then. `attach` sees to all that.
        """
        more = self._pump()
        more = self._count_subscriptions() or more
        if self._router is not None:
            if retry:
                for reader in self._readers.values():
                    reader.stalled = False
            more = self._receive(self._router) or more
            more = self._answer(self._router) or more
            # Sending takes in what has come, too, and with it the descriptor's one word of it.
            more = more or self._router.poll(0, zmq.POLLIN) > 0
        return more

    def _receive(self, router: zmq.Socket[bytes]) -> bool:
        """Take in a turn's worth of requests; whether there may be more. A message may have any number of frames."""
        for _ in range(TURN_FRAMES):
            try:
                frame = router.recv(zmq.NOBLOCK)
            except zmq.Again:
                return False
            if len(self._frames) <= MAX_REQUEST_FRAMES:
                self._frames.append(frame)
            if not router.getsockopt(zmq.RCVMORE):
                frames, self._frames = self._frames, []
                self._request(frames)
        return True

    def _request(self, frames: list[bytes]) -> None:
        identity, *request = frames
        if request and not request[0] and len(request) > 1:
            del request[0]  # the delimiter; AIBrix leaves it out
        reader = self._readers.setdefault(identity, _Reader())
        if len(request) == 1 and len(request[0]) == 8:
            self._requests += 1
            start = int.from_bytes(request[0], "big")
        else:
            self._malformed += 1
            start = 1 << 64  # nothing is as new as that
        if len(reader.answers) < MAX_ANSWERS:
            reader.answers.append(Replay(self._ring, self._turns, start))
        else:
            self._merged += 1
            reader.answers[-1].merge(start)

    def _answer(self, router: zmq.Socket[bytes]) -> bool:
        """Send to each reader in turn, a turn's worth; whether one of them could take more."""
        messages, size = TURN_MESSAGES, TURN_BYTES
        more = False
        for identity in [identity for identity, reader in self._readers.items() if not reader.stalled]:
            if messages <= 0 or size <= 0:
                return True
            reader = self._readers[identity]
            self._readers.move_to_end(identity)
            quantum = min(QUANTUM, messages)
            while reader.answers and not reader.stalled:
                if quantum <= 0 or size <= 0:
                    more = True
                    break
                took = self._answer_one(router, identity, reader)
                if took is Pause.LATER:
                    break
                if took is Pause.AGAIN:
                    more = True
                    break
                size -= took
                quantum -= 1
                messages -= 1
                if reader.answers and reader.answers[0].is_making:  # a frame is a slice of work: one a turn
                    more = more or not reader.stalled
                    break
            if not reader.answers:
                del self._readers[identity]
        return more

    def _answer_one(self, router: zmq.Socket[bytes], identity: bytes, reader: _Reader) -> int | Pause:
        """Try to send the next message that is due to the reader; the bytes of its payload."""
        answer = reader.answers[0]
        entry = answer.peek()
        if isinstance(entry, Pause):
            return entry
        try:
            self._send_reply(router, identity, entry)
        except zmq.Again:
            reader.stalled = True
            return 0
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            reader.close()  # it is gone
            return 0
        self._progress = True
        reader.taken += 1
        if entry is None:
            answer.num_ends -= 1
            if not answer.num_ends:
                answer.close()
                reader.answers.popleft()
            return 0
        answer.advance()
        self._replayed += 1
        return len(entry.payload)

    def _send_reply(self, router: zmq.Socket[bytes], identity: bytes, entry: Entry | None) -> None:
        """One message, whole or not at all: only its first frame can fail."""
        seq, topic, payload = (
            (END_SEQ, b"", b"") if entry is None else (entry.seq.to_bytes(8, "big"), self._topic, entry.payload)
        )
        router.send(identity, zmq.NOBLOCK | zmq.SNDMORE)
        for frame in (b"", topic, seq):
            router.send(frame, zmq.NOBLOCK | zmq.SNDMORE)
        router.send(payload, zmq.NOBLOCK)

    # -- the loop -------------------------------------------------------------------------------------

    @property
    def filenos(self) -> list[int]:
        """Readable when libzmq has news. It says so once: see `service`."""
        return [sock.fileno() for sock in (self._pub, self._router) if sock is not None]

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have `loop` call `service` whenever it should, until `detach` or `close`. Call it on the loop's thread."""
        self._loop = loop
        for fd in self.filenos:
            loop.add_reader(fd, self._turn)
        self._turn()

    def detach(self) -> None:
        """Let go of the loop."""
        if self._loop is not None:
            for fd in self.filenos if not self._loop.is_closed() else ():
                self._loop.remove_reader(fd)
            self._loop = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _turn(self, retry: bool = True) -> None:
        if self._loop is None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._progress = False
        more = self.service(retry)
        if self._progress:
            self._retry_s = RETRY_S[0]
        if more:
            self._timer = self._loop.call_soon(self._turn, False)
        elif self._readers or self._behind:  # nobody can take more now
            self._timer = self._loop.call_later(self._retry_s, self._turn)
            self._retry_s = min(2 * self._retry_s, RETRY_S[1])

    # -- the end --------------------------------------------------------------------------------------

    def stats(self) -> PublisherStats:
        """The counters. ClosedError after `close`."""
        if self._closed:
            raise ClosedError("the publisher is closed")
        self._count_subscriptions()
        return PublisherStats(
            endpoint=self._endpoint,
            replay_endpoint=self._replay_endpoint,
            last_seq=self._ring.last_seq,
            batches_sent=self._sent,
            batches_skipped=self._skipped,
            bytes_sent=self._bytes,
            subscriptions=max(0, self._subscriptions),
            replay_requests=self._requests,
            malformed_requests=self._malformed,
            merged_requests=self._merged,
            replayed_batches=self._replayed,
            snapshots_begun=self._turns.num_begun,
            snapshots_done=self._turns.num_done,
            readers=len(self._readers),
            ring_batches=len(self._ring),
            ring_bytes=self._ring.num_bytes,
            ring_first_seq=self._ring.first_seq,
        )

    def close(self, linger_s: float = 0.5) -> None:
        """Close both sockets, having waited at most `linger_s` for subscribers to take what was sent. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for reader in self._readers.values():
            reader.close()
        self.detach()
        if self._guard is not None:
            self._guard.stop()
        for place in self._places:
            place.remove()
        self._context.destroy(linger=int(linger_s * 1000))

    def _bind(self, sock: zmq.Socket[bytes], endpoint: Endpoint, key: str) -> Endpoint:
        bound = bind(sock, endpoint, key)
        if (place := place_of(bound)) is not None:
            self._places.append(place)
        return bound

    def _socket(self, kind: int, hwm: int) -> zmq.Socket[bytes]:
        sock = self._context.socket(kind)
        sock.setsockopt(zmq.SNDHWM, hwm)
        sock.setsockopt(zmq.MAXMSGSIZE, MAX_INBOUND)
        sock.setsockopt(zmq.TCP_KEEPALIVE, 1)  # find out about peers whose host is gone
        sock.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 60)
        if self.curve is not None:
            self.curve.serve(sock)
        return sock
