"""The stream as subscribers get it, replay as readers get it, and what the slow and the dead among them may not do."""

from __future__ import annotations

import asyncio
import errno
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop
import zmq
import zmq.auth

from sglcache.errors import ClosedError, ConfigError
from sglcache.net.curve import Curve
from sglcache.net.endpoints import Ipc, parse
from sglcache.net.publisher import END_SEQ, MAX_ANSWERS, TURN_MESSAGES, Publisher
from sglcache.net.ring import ENTRY_OVERHEAD, Entry

ANY = parse("tcp://127.0.0.1:0")
TOPIC = "kv@10.0.0.5@m1"
END = [b"", b"", END_SEQ, b""]
PATIENCE_S = 10.0  # far more than anything here takes


def be64(seq: int) -> bytes:
    return seq.to_bytes(8, "big")


class Peers:
    """Sockets of this test, closed with it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.context = context
        self.sockets: list[zmq.Socket[bytes]] = []

    def socket(self, kind: int, rcvhwm: int = 0) -> zmq.Socket[bytes]:
        self.sockets.append(self.context.socket(kind))
        self.sockets[-1].setsockopt(zmq.RCVHWM, rcvhwm)
        return self.sockets[-1]

    def subscribe(self, publisher: Publisher, topic: str = "", rcvhwm: int = 0) -> zmq.Socket[bytes]:
        """A subscriber that the publisher has seen."""
        before = publisher.stats().subscriptions
        sub = self.socket(zmq.SUB, rcvhwm)
        sub.subscribe(topic)
        sub.connect(publisher.endpoint)
        serve(publisher, lambda: publisher.stats().subscriptions == before + 1)
        return sub

    def ask(self, publisher: Publisher, *frames: bytes, kind: int = zmq.DEALER, rcvhwm: int = 0) -> zmq.Socket[bytes]:
        assert publisher.replay_endpoint is not None
        sock = self.socket(kind, rcvhwm)
        sock.connect(publisher.replay_endpoint)
        sock.send_multipart(frames)
        return sock


@pytest.fixture
def peers() -> Iterator[Peers]:
    context = zmq.Context()
    yield Peers(context)
    context.destroy(linger=0)


@pytest.fixture
def make() -> Iterator[Callable[..., Publisher]]:
    made: list[Publisher] = []

    def build(endpoint: object = ANY, replay: object = ANY, **options: object) -> Publisher:
        kind: Callable[..., Publisher] = options.pop("kind", Publisher)  # type: ignore[assignment]
        made.append(kind(endpoint, replay, **options))
        return made[-1]

    yield build
    for publisher in made:
        publisher.close(linger_s=0)


def serve(publisher: Publisher, until: Callable[[], bool]) -> None:
    """Be the loop until something is so."""
    deadline = time.monotonic() + PATIENCE_S
    while not until():
        assert time.monotonic() < deadline, f"waited in vain: {publisher.stats()}"
        if not publisher.service():
            select.select(publisher.filenos, [], [], 0.01)


def answer(publisher: Publisher, sock: zmq.Socket[bytes]) -> list[list[bytes]]:
    """All messages through END."""
    messages: list[list[bytes]] = []

    def ended() -> bool:
        while sock.poll(0):
            messages.append(sock.recv_multipart())
            if messages[-1][-2:] == [END_SEQ, b""]:
                return True
        return False

    serve(publisher, ended)
    return messages


def receive(sub: zmq.Socket[bytes], count: int) -> list[list[bytes]]:
    messages = []
    for _ in range(count):
        assert sub.poll(PATIENCE_S * 1000), f"only {len(messages)} of {count} batches came"
        messages.append(sub.recv_multipart())
    return messages


def numbers(messages: list[list[bytes]]) -> list[int]:
    return [int.from_bytes(frames[-2], "big") for frames in messages]


# -- live ---------------------------------------------------------------------------------------------


def test_a_batch_is_topic_number_payload(make: Callable[..., Publisher], peers: Peers) -> None:
    publisher = make(topic=TOPIC)
    sub = peers.subscribe(publisher, "kv@")
    publisher.append(0x0102030405060708, b"payload")
    assert receive(sub, 1) == [[TOPIC.encode(), bytes(range(1, 9)), b"payload"]]


def test_every_number_appended_is_sent_once_and_nothing_else_is(make: Callable[..., Publisher], peers: Peers) -> None:
    publisher = make()
    sub = peers.subscribe(publisher)
    for seq in range(100, 150):
        publisher.append(seq, b"x", heartbeat=seq % 3 == 0)
        publisher.service()
    assert numbers(receive(sub, 50)) == list(range(100, 150))
    assert not sub.poll(0)
    stats = publisher.stats()
    assert (stats.last_seq, stats.batches_sent, stats.batches_skipped, stats.bytes_sent) == (149, 50, 0, 50)


def test_live_batches_go_out_within_append(make: Callable[..., Publisher], peers: Peers) -> None:
    publisher = make(replay=None)
    sub = peers.subscribe(publisher)
    publisher.append(1, b"x")
    assert publisher.stats().batches_sent == 1
    assert numbers(receive(sub, 1)) == [1]


def test_subscriptions_are_counted_and_uncounted(make: Callable[..., Publisher], peers: Peers) -> None:
    publisher = make()
    one, _ = peers.subscribe(publisher), peers.subscribe(publisher)
    one.close(linger=0)
    serve(publisher, lambda: publisher.stats().subscriptions == 1)


def test_a_late_subscriber_gets_what_comes_and_asks_for_the_rest(make: Callable[..., Publisher], peers: Peers) -> None:
    publisher = make()
    for seq in range(1, 6):
        publisher.append(seq, b"%d" % seq)
    sub = peers.subscribe(publisher)
    publisher.append(6, b"6")
    assert numbers(receive(sub, 1)) == [6]
    past = answer(publisher, peers.ask(publisher, b"", be64(0)))
    assert numbers(past[:-1]) == [1, 2, 3, 4, 5, 6]


def test_ipc_serves_both_sockets(make: Callable[..., Publisher], peers: Peers, tmp_path: Path) -> None:
    publisher = make(Ipc(str(tmp_path / "live")), Ipc(str(tmp_path / "replay")))
    assert publisher.endpoint == f"ipc://{tmp_path}/live"
    sub = peers.subscribe(publisher)
    publisher.append(1, b"x")
    assert receive(sub, 1) == [[b"", be64(1), b"x"]]
    assert answer(publisher, peers.ask(publisher, b"", be64(0))) == [[b"", b"", be64(1), b"x"], END]
    publisher.close()
    assert list(tmp_path.iterdir()) == [], "no socket stays behind"
    assert make(Ipc(str(tmp_path / "live")), None).endpoint == publisher.endpoint


def test_what_another_put_at_an_ipc_path_is_not_removed(make: Callable[..., Publisher], tmp_path: Path) -> None:
    path = tmp_path / "live"
    first = make(Ipc(str(path)), None)
    path.unlink()
    second = make(Ipc(str(path)), None)
    first.close()
    assert path.is_socket()
    second.close()
    assert not path.exists()


def test_a_publisher_that_could_not_bind_leaves_no_socket_behind(
    make: Callable[..., Publisher], tmp_path: Path
) -> None:
    taken = parse(make(replay=None).endpoint)
    with pytest.raises(ConfigError):
        make(Ipc(str(tmp_path / "live")), taken)
    assert list(tmp_path.iterdir()) == []
    abstract = make(Ipc(f"@{tmp_path}/live"), None)
    abstract.close()
    assert make(Ipc(f"@{tmp_path}/live"), None).endpoint == abstract.endpoint


def test_what_can_not_be_bound_is_named_and_nothing_stays_bound(make: Callable[..., Publisher]) -> None:
    taken = parse(make(replay=None).endpoint)
    free = parse(make(replay=None).endpoint)
    with pytest.raises(ConfigError, match=rf"events\.replay_endpoint: can't bind {taken}"):
        make(ANY, taken, keys=("events.endpoint", "events.replay_endpoint"))
    with pytest.raises(ConfigError, match=f"can't bind {free}"):
        make(free)


def test_a_subscriber_that_does_not_read_loses_its_own_batches_only(
    make: Callable[..., Publisher], peers: Peers
) -> None:
    publisher = make(hwm=20, ring_bytes=1 << 20)
    slow, quick = peers.subscribe(publisher, rcvhwm=1), peers.subscribe(publisher)
    payload = bytes(100_000)
    for seq in range(1, 401):  # far more than the sockets' buffers take
        publisher.append(seq, payload)
        assert numbers(receive(quick, 1)) == [seq]
        publisher.service()
    assert publisher.stats().batches_skipped == 0
    publisher.append(401, b"last")
    got: list[int] = []
    while slow.poll(200):
        got += numbers([slow.recv_multipart()])
    assert 0 < len(got) < 401
    assert got == sorted(set(got))


class Held(Publisher):
    """A publisher that can't send for a while."""

    held = True

    def _send_live(self, entry: Entry) -> bool:
        return not self.held and super()._send_live(entry)


def test_a_publisher_that_falls_off_the_ring_skips_forward_and_counts(
    make: Callable[..., Publisher], peers: Peers
) -> None:
    publisher = make(kind=Held, ring_bytes=8 * (4 + ENTRY_OVERHEAD))
    assert isinstance(publisher, Held)
    sub = peers.subscribe(publisher)
    for seq in range(1, 1001):
        publisher.append(seq, b"page")
    assert publisher.stats().batches_skipped == 992
    publisher.held = False
    publisher.service()
    publisher.append(1001, b"page")
    assert numbers(receive(sub, 9)) == list(range(993, 1002))  # the gap is on the wire
    assert publisher.stats().batches_sent == 9


def test_a_backlog_is_sent_in_slices(make: Callable[..., Publisher], peers: Peers) -> None:
    publisher = make(kind=Held)
    assert isinstance(publisher, Held)
    sub = peers.subscribe(publisher)
    for seq in range(1, 501):
        publisher.append(seq, b"page")
    publisher.held = False
    assert publisher.service()
    assert publisher.stats().batches_sent < 100
    serve(publisher, lambda: publisher.stats().batches_sent == 500)
    assert numbers(receive(sub, 500)) == list(range(1, 501))


# -- replay -------------------------------------------------------------------------------------------


@pytest.fixture
def six(make: Callable[..., Publisher]) -> Publisher:
    """Six batches, 100..105."""
    publisher = make(topic=TOPIC)
    for seq in range(100, 106):
        publisher.append(seq, b"payload %d" % seq)
    return publisher


def expected(first: int) -> list[list[bytes]]:
    return [*([b"", TOPIC.encode(), be64(seq), b"payload %d" % seq] for seq in range(first, 106)), END]


def test_a_dealer_gets_the_frames_as_they_were_live_and_one_end(six: Publisher, peers: Peers) -> None:
    dealer = peers.ask(six, b"", be64(102))
    assert answer(six, dealer) == expected(102)
    assert not dealer.poll(0)


def test_a_req_socket_can_read_the_first_reply_only(six: Publisher, peers: Peers) -> None:
    req = peers.ask(six, be64(102), kind=zmq.REQ)
    serve(six, lambda: bool(req.poll(0)))
    assert req.recv_multipart() == expected(102)[0][1:]
    serve(six, lambda: six.stats().readers == 0)


def test_a_request_without_the_delimiter_is_answered(six: Publisher, peers: Peers) -> None:
    assert answer(six, peers.ask(six, be64(102))) == expected(102)


@pytest.mark.parametrize("start", [106, 1 << 63, (1 << 64) - 1])
def test_from_the_future_comes_the_end_only(six: Publisher, peers: Peers, start: int) -> None:
    assert answer(six, peers.ask(six, b"", be64(start))) == [END]
    assert six.stats().malformed_requests == 0


def test_from_before_the_ring_comes_what_it_has(make: Callable[..., Publisher], peers: Peers) -> None:
    publisher = make(topic=TOPIC, ring_bytes=4 * (11 + ENTRY_OVERHEAD))
    for seq in range(100, 106):
        publisher.append(seq, b"payload %d" % seq)
    assert answer(publisher, peers.ask(publisher, b"", be64(100))) == expected(102)


def test_before_the_first_batch_comes_the_end(make: Callable[..., Publisher], peers: Peers) -> None:
    publisher = make()
    assert answer(publisher, peers.ask(publisher, b"", be64(0))) == [END]


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"", b""],
        [b"", b"abc"],
        [b"abc"],
        [b"", be64(100), b""],
        [b"", be64(100), be64(100)],
        [be64(100), be64(100)],
        [b"", b"", b"", b""],
        [b"", b"\0" * 9],
        [b"", b"\0" * 4],
    ],
)
def test_what_is_no_request_is_counted_and_gets_the_end_at_once(
    six: Publisher, peers: Peers, frames: list[bytes]
) -> None:
    assert answer(six, peers.ask(six, *frames)) == [END]
    assert six.stats().malformed_requests == 1
    assert answer(six, peers.ask(six, b"", be64(105))) == expected(105)


def test_a_frame_too_large_ends_that_connection_only(six: Publisher, peers: Peers) -> None:
    peers.ask(six, b"", bytes(100_000))
    assert answer(six, peers.ask(six, b"", be64(105))) == expected(105)


def test_requests_of_one_reader_are_answered_in_turn(six: Publisher, peers: Peers) -> None:
    dealer = peers.ask(six, b"", be64(104))
    dealer.send_multipart([b"", b"junk"])
    dealer.send_multipart([b"", be64(105)])
    assert [answer(six, dealer) for _ in range(3)] == [expected(104), [END], expected(105)]


def test_a_run_of_heartbeats_is_replayed_as_its_last(make: Callable[..., Publisher], peers: Peers) -> None:
    publisher = make()
    publisher.append(1, b"one")
    for seq in range(2, 9):
        publisher.append(seq, b"beat", heartbeat=True)
    publisher.append(9, b"nine")
    assert numbers(answer(publisher, peers.ask(publisher, b"", be64(1)))[:-1]) == [1, 8, 9]


def test_a_heartbeat_does_not_stand_in_for_what_was_lost_before_it(
    make: Callable[..., Publisher], peers: Peers
) -> None:
    publisher = make(ring_bytes=200)
    publisher.append(1, bytes(150))
    publisher.append(2, b"beat", heartbeat=True)
    assert answer(publisher, peers.ask(publisher, b"", be64(1))) == [END]


def test_a_snapshot_is_sent_between_live_batches_and_others_get_theirs(
    make: Callable[..., Publisher], peers: Peers
) -> None:
    """Two latecomers and one who only missed the last batch, while the stream goes on."""
    publisher = make(topic=TOPIC, replay_hwm=4)
    publisher.append(100, b"first")
    open_ones: list[Frames] = []

    class Frames:
        def __init__(self) -> None:
            self.left = [None, *[b"frame %d" % i + bytes(100_000) for i in reversed(range(200))], b"", b"cleared"]
            open_ones.append(self)

        def next(self) -> bytes | None:
            return self.left.pop()

        def close(self) -> None:
            open_ones.remove(self)

    publisher.snapshot = Frames
    late = [peers.ask(publisher, b"", be64(0), rcvhwm=1) for _ in range(2)]
    serve(publisher, lambda: publisher.stats().readers == 2 and not publisher.service())
    assert publisher.stats().snapshots_begun == 1, "one at a time"
    publisher.append(101, b"second")
    quick = peers.ask(publisher, b"", be64(101))
    assert numbers(answer(publisher, quick)) == [101, (1 << 64) - 1]
    first, second = sorted((answer(publisher, sock) for sock in late), key=numbers)
    # The first was in the middle when number 101 came, which comes in between; frames after it have its number.
    place = [frames[3] for frames in first].index(b"second")
    assert 1 < place < 200
    assert numbers(first) == [100] * place + [101] * (202 - place) + [(1 << 64) - 1]
    assert [frames[3][:7] for frames in first[:2]] == [b"cleared", b"frame 0"]
    assert numbers(second) == [101] * 201 + [(1 << 64) - 1]
    assert not open_ones
    assert (publisher.stats().snapshots_begun, publisher.stats().snapshots_done) == (2, 2)


# -- who may read ------------------------------------------------------------------------------------


def certificate(folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    _, secret = zmq.auth.create_certificates(folder, name)
    return Path(secret)


def dialled_with(sock: zmq.Socket[bytes], key: Path, server: bytes) -> zmq.Socket[bytes]:
    public, secret = zmq.auth.load_certificate(key)
    assert secret is not None
    sock.curve_serverkey, sock.curve_publickey, sock.curve_secretkey = server, public, secret
    return sock


def test_without_the_key_nobody_reads_and_with_it_the_allowed_do(
    make: Callable[..., Publisher], peers: Peers, tmp_path: Path
) -> None:
    ours = certificate(tmp_path / "ours", "rank")
    friend, stranger = certificate(tmp_path / "readers", "friend"), certificate(tmp_path / "strangers", "stranger")
    keys = Curve.load(ours, tmp_path / "readers")
    publisher = make(curve=keys)
    publisher.append(1, b"one")
    plain = peers.ask(publisher, b"", be64(1))
    assert publisher.replay_endpoint is not None
    got = []
    for key in (stranger, friend):
        dealer = dialled_with(peers.socket(zmq.DEALER), key, keys.public)
        dealer.connect(publisher.replay_endpoint)
        dealer.send_multipart([b"", be64(1)])
        got.append(dealer)
    assert numbers(answer(publisher, got[1])) == [1, (1 << 64) - 1]
    sub = dialled_with(peers.socket(zmq.SUB), friend, keys.public)
    sub.subscribe("")
    sub.connect(publisher.endpoint)
    serve(publisher, lambda: publisher.stats().subscriptions == 1)
    publisher.append(2, b"two")
    assert numbers(receive(sub, 1)) == [2]
    # All were let in or turned away by now: the friend came last.
    assert publisher.stats().replay_requests == 1
    assert not plain.poll(0)
    assert not got[0].poll(0)


@pytest.mark.parametrize("what", ["missing", "public", "junk"])
def test_a_key_that_is_none_is_refused_by_its_file(tmp_path: Path, what: str) -> None:
    secret = certificate(tmp_path, "rank")
    path = {"missing": tmp_path / "none", "public": tmp_path / "rank.key", "junk": tmp_path / "junk"}[what]
    (tmp_path / "junk").write_text("no key")
    with pytest.raises(ConfigError, match=str(path)):
        Curve.load(path, None)
    with pytest.raises(ConfigError, match="no folder"):
        Curve.load(secret, tmp_path / "none")


def test_a_publisher_that_dials_reaches_the_subscriber_that_binds(make: Callable[..., Publisher], peers: Peers) -> None:
    """llm-d's way. What is published before the subscriber is there, it can ask for."""
    sub = peers.socket(zmq.SUB)
    sub.subscribe("kv@")
    port = sub.bind_to_random_port("tcp://127.0.0.1")
    publisher = make(parse(f"tcp://127.0.0.1:{port}"), connect=True, topic=TOPIC)
    # A subscriber that binds says what it wants when it looks for messages.
    serve(publisher, lambda: bool(sub.poll(0)) or publisher.stats().subscriptions == 1)
    publisher.append(7, b"seven")
    assert receive(sub, 1) == [[TOPIC.encode(), be64(7), b"seven"]]
    assert numbers(answer(publisher, peers.ask(publisher, b"", be64(7)))) == [7, (1 << 64) - 1]


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://127.0.0.1:0"])
def test_where_nobody_can_be_is_not_dialled(make: Callable[..., Publisher], endpoint: str) -> None:
    with pytest.raises(ConfigError, match="can't be dialled"):
        make(parse(endpoint), connect=True)


# -- slow and dead readers ----------------------------------------------------------------------------


def large(publisher: Publisher, count: int = 300) -> None:
    for seq in range(1, count + 1):
        publisher.append(seq, bytes(100_000))


def test_a_reader_that_does_not_read_delays_nobody(make: Callable[..., Publisher], peers: Peers) -> None:
    publisher = make(replay_hwm=4)
    sub = peers.subscribe(publisher)
    large(publisher)
    receive(sub, 300)
    stuck = peers.ask(publisher, b"", be64(1), rcvhwm=1)
    serve(publisher, lambda: publisher.stats().readers == 1 and not publisher.service())
    assert numbers(answer(publisher, peers.ask(publisher, b"", be64(299)))[:-1]) == [299, 300]
    began = time.perf_counter()
    publisher.append(301, b"x")
    assert time.perf_counter() - began < 0.1
    assert numbers(receive(sub, 1)) == [301]
    assert publisher.stats().readers == 1
    # When it does read, it gets the rest of its answer: up to what was newest when it asked.
    assert numbers(answer(publisher, stuck)[:-1]) == list(range(1, 301))
    assert publisher.stats().readers == 0


def test_a_reader_that_the_ring_leaves_behind_gets_the_rest_and_the_end(
    make: Callable[..., Publisher], peers: Peers
) -> None:
    publisher = make(replay_hwm=4, ring_bytes=350 * 100_000)
    large(publisher)
    stuck = peers.ask(publisher, b"", be64(1), rcvhwm=1)
    serve(publisher, lambda: publisher.stats().readers == 1 and not publisher.service())
    for seq in range(301, 621):
        publisher.append(seq, bytes(100_000))
    seqs = numbers(answer(publisher, stuck)[:-1])
    assert seqs == sorted(set(seqs))
    assert 1 in seqs
    assert seqs[-1] <= 300


def test_a_reader_that_dies_in_the_middle_is_forgotten(make: Callable[..., Publisher], peers: Peers) -> None:
    publisher = make(replay_hwm=4)
    large(publisher)
    dying = peers.ask(publisher, b"", be64(1), rcvhwm=1)
    serve(publisher, lambda: publisher.stats().readers == 1 and not publisher.service())
    dying.close(linger=0)
    serve(publisher, lambda: publisher.stats().readers == 0)
    assert answer(publisher, peers.ask(publisher, b"", be64(301))) == [END]


def test_no_request_is_overlooked_while_others_are_answered(make: Callable[..., Publisher], peers: Peers) -> None:
    """libzmq tells of news once; a send may be what takes it in."""
    publisher = make()
    publisher.append(1, b"x")
    dealers = [peers.ask(publisher, b"", be64(1)) for _ in range(8)]
    deadline = time.monotonic() + PATIENCE_S
    more = True
    for _ in range(100):
        for dealer in dealers:
            while not dealer.poll(1):
                assert time.monotonic() < deadline, f"overlooked: {publisher.stats()}"
                if more or select.select(publisher.filenos, [], [], 0)[0]:
                    more = publisher.service(False)
            while dealer.recv_multipart() != END:
                pass
        for dealer in dealers:
            dealer.send_multipart([b"", be64(1)])


def test_a_reader_that_asks_faster_than_it_reads_is_bounded(make: Callable[..., Publisher], peers: Peers) -> None:
    publisher = make(replay_hwm=4)
    large(publisher, 60)
    dealer = peers.ask(publisher, b"", be64(1), rcvhwm=1)
    for start in [1, 1 << 40] * MAX_ANSWERS:
        dealer.send_multipart([b"", be64(start)])
    serve(publisher, lambda: publisher.stats().merged_requests > MAX_ANSWERS // 2)
    assert publisher.stats().readers == 1
    # No request is left without its END, nor with an END before what it wants.
    serve(publisher, lambda: publisher.stats().replay_requests == 1 + 2 * MAX_ANSWERS or not publisher.service())
    for start in [1, *[1, 1 << 40] * MAX_ANSWERS]:
        got = numbers(answer(publisher, dealer)[:-1])
        assert got in ([], list(range(1, 61)))
        assert got or start > 1 or publisher.stats().merged_requests
    serve(publisher, lambda: publisher.stats().readers == 0)


def test_a_long_answer_is_sent_in_slices_and_readers_take_turns(make: Callable[..., Publisher], peers: Peers) -> None:
    publisher = make(replay_hwm=10_000)
    for seq in range(1, 1001):
        publisher.append(seq, b"x")
    one, other = (peers.ask(publisher, b"", be64(1)) for _ in range(2))
    turns, sent = 0, 0

    def ended() -> bool:
        nonlocal turns, sent
        now = publisher.stats().replayed_batches
        assert now - sent <= TURN_MESSAGES, "one turn sent more than a turn's worth"
        turns, sent = turns + (now > sent), now
        return publisher.stats().replay_requests == 2 and publisher.stats().readers == 0

    serve(publisher, ended)
    assert turns >= 2000 // TURN_MESSAGES
    for reader in (one, other):
        assert numbers(answer(publisher, reader)[:-1]) == list(range(1, 1001))


# -- the loop, and the end ----------------------------------------------------------------------------


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_attached_to_a_loop_it_serves_by_itself(
    make: Callable[..., Publisher], peers: Peers, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    publisher = make(replay_hwm=4)

    def read_slowly(count: int) -> list[int]:
        dealer = peers.ask(publisher, b"", be64(1), rcvhwm=1)
        messages = receive(dealer, count + 1)
        assert messages[-1] == END
        return numbers(messages[:-1])

    async def main() -> None:
        loop = asyncio.get_running_loop()
        publisher.attach(loop)
        sub = peers.socket(zmq.SUB)
        sub.subscribe("")
        sub.connect(publisher.endpoint)
        seqs = await asyncio.gather(loop.run_in_executor(None, read_slowly, 0))
        assert seqs == [[]]
        large(publisher)
        both = await asyncio.gather(*(loop.run_in_executor(None, read_slowly, 300) for _ in range(2)))
        assert both == [list(range(1, 301))] * 2
        assert publisher.stats().subscriptions == 1
        publisher.detach()

    loop = new_loop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def test_once_served_it_leaves_the_loop_alone(make: Callable[..., Publisher], peers: Peers) -> None:
    publisher = make()
    sub = peers.subscribe(publisher)
    for seq in range(1, 6):
        publisher.append(seq, b"x")
    receive(sub, 5)
    answer(publisher, peers.ask(publisher, b"", be64(0)))
    serve(publisher, lambda: select.select(publisher.filenos, [], [], 0) == ([], [], []))
    assert not publisher.service()
    assert select.select(publisher.filenos, [], [], 0.05) == ([], [], [])


def test_a_loop_that_is_gone_is_no_hindrance_to_close(make: Callable[..., Publisher]) -> None:
    publisher = make()

    async def attach() -> None:
        publisher.attach(asyncio.get_running_loop())

    asyncio.run(attach())
    publisher.close()


def test_close_does_not_wait_for_those_who_never_read(make: Callable[..., Publisher], peers: Peers) -> None:
    publisher = make(replay_hwm=4)
    peers.subscribe(publisher, rcvhwm=1)
    large(publisher)
    peers.ask(publisher, b"", be64(1), rcvhwm=1)
    serve(publisher, lambda: publisher.stats().readers == 1)
    began = time.monotonic()
    publisher.close()
    assert time.monotonic() - began < 2
    publisher.close()
    with pytest.raises(ClosedError):
        publisher.append(301, b"x")
    with pytest.raises(ClosedError):
        publisher.stats()


def test_close_lets_those_who_read_have_the_last_batch(make: Callable[..., Publisher], peers: Peers) -> None:
    publisher = make()
    sub = peers.subscribe(publisher)
    for seq in range(1, 101):
        publisher.append(seq, bytes(10_000))
    publisher.close()
    assert numbers(receive(sub, 100)) == list(range(1, 101))


def test_a_closed_publisher_leaves_its_port_to_the_next(make: Callable[..., Publisher]) -> None:
    publisher = make()
    endpoint = parse(publisher.endpoint)
    publisher.close()
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            assert make(endpoint).endpoint == str(endpoint)
            return
        except ConfigError:
            assert time.monotonic() < deadline, errno.errorcode[errno.EADDRINUSE]
