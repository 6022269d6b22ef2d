"""Supervisor and rank talk in whole frames; nobody waits for one that hangs; descriptors travel and are never lost."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import msgspec
import pytest

from sglcache.server.channel import (
    MAX_FDS,
    MAX_FRAME,
    MAX_LONG,
    Answer,
    Ask,
    Beat,
    Channel,
    Drain,
    Keep,
    Long,
    Ready,
    Refusal,
    Start,
)
from sglcache.server.plan import Seat


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = Channel.pair()
    other = Channel(theirs)
    yield ours, other
    ours.close()
    other.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_frames_arrive_whole_and_in_order(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    seat = Seat(1, 1, 0, "/run/a", "tcp://*:1", None)
    start = Start({"pool": {"page_size": 4}}, seat, None, 0, 7, ["a"], 20, 0.5)
    words = [
        start,
        Ask(1, "facts"),
        Drain(),
        Ready({"pid": 1}),
        Beat("ok", 1 << 60, {"HOST": (1, 2)}),
        Answer(1, [{"a": 1.5}]),
        Ask(2, "facts", {"tokens": [1, 2]}),
        Answer(2, None, Refusal("bad_request", "no", {"rank": 1})),
    ]
    for word in words:
        assert ours.send(word)
    assert [theirs.receive() for _ in words] == [(word, []) for word in words]
    assert theirs.receive() is None


def test_descriptors_come_with_their_frame(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    memory = os.memfd_create("test")
    os.write(memory, b"still there")
    assert ours.send(Keep("pool"), [memory, memory])
    os.close(memory)
    assert ours.send(Drain())
    heard = theirs.receive()
    assert heard is not None
    word, fds = heard
    assert word == Keep("pool")
    for fd in fds:
        assert os.pread(fd, 99, 0) == b"still there"
        assert not os.get_inheritable(fd)
        os.close(fd)
    assert theirs.receive() == (Drain(), [])


def test_one_that_hangs_is_not_waited_for(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    sent = 0
    while ours.send(Answer(sent, "x" * 10_000)):
        sent += 1
        assert sent < 10_000
    for question in range(sent):
        assert theirs.receive() == (Answer(question, "x" * 10_000), [])
    assert theirs.receive() is None
    assert ours.send(Drain())


def test_what_is_too_much_is_not_sent_and_the_next_frame_is(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    assert not ours.send(Answer(1, "x" * MAX_LONG))
    assert not ours.send(Keep("a"), [0] * (MAX_FDS + 1))
    assert ours.send(Answer(1, "x" * (MAX_FRAME - 64)))
    assert ours.send(Drain())
    assert theirs.receive() is not None
    assert theirs.receive() == (Drain(), [])


def test_a_long_frame_comes_whole_beside_its_descriptors_and_leaves_none(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    long = Ask(1, "facts", {"tokens": bytes(range(256)) * (MAX_FRAME // 128)})
    memory = os.memfd_create("test")
    before = descriptors()
    assert ours.send(long)
    assert ours.send(long, [memory])
    assert theirs.receive() == (long, [])
    heard = theirs.receive()
    assert heard is not None
    word, (fd,) = heard
    assert word == long
    assert os.path.sameopenfile(fd, memory)
    os.close(fd)
    os.close(memory)
    assert descriptors() == before - 1


def long_in(inner: bytes, num_bytes: int) -> tuple[bytes, list[int]]:
    memory = os.memfd_create("test")
    os.write(memory, inner)
    return msgspec.msgpack.encode(Long(num_bytes)), [memory]


@pytest.mark.parametrize(
    ("inner", "num_bytes", "why"),
    [
        (msgspec.msgpack.encode(Drain()), 99, "cut off"),
        (msgspec.msgpack.encode(Long(1)), 7, "in a long frame"),
        (b"\xc1", 1, "MessagePack"),
    ],
)
def test_a_long_frame_that_is_none_is_refused_and_its_descriptor_closed(inner: bytes, num_bytes: int, why: str) -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(other)
    frame, fds = long_in(inner, num_bytes)
    before = descriptors()
    socket.send_fds(one, [frame], [*fds, 0])
    with pytest.raises(msgspec.DecodeError, match=why):
        channel.receive()
    assert descriptors() == before
    one.send(frame)
    with pytest.raises(msgspec.DecodeError, match="without a descriptor"):
        channel.receive()
    os.close(fds[0])
    channel.close()
    one.close()


def test_the_end_comes_after_the_last_words(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    ours.send(Beat("ok", 1, {}))
    ours.close()
    ours.close()
    assert theirs.receive(wait=True) == (Beat("ok", 1, {}), [])
    for _ in range(2):
        with pytest.raises(EOFError):
            theirs.receive()
    assert not theirs.send(Drain())


@pytest.mark.parametrize("data", [b"\xc1", b"\x92\xa4Beat\x01", b"\x91\xa5Nobodx", b"\x94\xa4Beat\xa2ok\x01\x02"])
def test_what_is_no_frame_is_refused_and_its_descriptors_are_closed(data: bytes) -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(other)
    before = descriptors()
    socket.send_fds(one, [data], [0, 0])
    with pytest.raises(msgspec.DecodeError):
        channel.receive()
    assert descriptors() == before
    channel.close()
    one.close()


def test_a_frame_that_does_not_fit_is_refused() -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(other)
    one.send(bytes(MAX_FRAME + 1))
    with pytest.raises(msgspec.DecodeError, match="cut off"):
        channel.receive()
    channel.close()
    one.close()
