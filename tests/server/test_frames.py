"""What is no command, on a connection that was welcome: a typed failure, the end of the connection, and nothing else.

Law 11: the state is as it was, and nobody else notices.
"""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from sglcache.client import Client, Worker
from sglcache.errors import (
    BadRequest,
    Changed,
    ClosedError,
    Forbidden,
    NoSpace,
    ProtocolError,
    SglcacheError,
    Unavailable,
    UnknownLease,
)
from sglcache.testing.daemon import Daemon, Puppet, until
from sglcache.wire import control

TOKENS = list(range(40))


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with daemon.client() as client:
        yield client


def send(client: Client, data: bytes) -> None:
    client._connection._sock.sendall(data)


def ask(member: Client | Worker, command: Any) -> Any:
    with member._connection.lock:
        member._connection.send(command)
        return member._connection.wait(command.request)


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def array(*fields: Any) -> bytes:
    return framed(msgspec.msgpack.encode(fields))


BAD = {
    "empty": framed(b""),
    "garbage": framed(b"\xc1\xc1\xc1"),
    "oversized": (control.MAX_FRAME + 1).to_bytes(4, "big"),
    "huge": b"\xff\xff\xff\xff",
    "no array": framed(msgspec.msgpack.encode({"type": "Ping"})),
    "unknown": array("Reboot", 1),
    "a hello": control.frame(control.Hello(1, "x", "observer")),
    "an answer": control.frame(control.Done(1)),
    "too short": array("Ping"),
    "too long": array("Ping", 1, 2),
    "a wrong type": array("Ping", "1"),
    "a negative number": array("Ping", -1),
    "a number beyond 63 bits": array("Ping", 1 << 63),
    "a float": array("Ping", 1.5),
    "null": array("Ping", None),
    "text for tokens": array("Acquire", 1, "text"),
    "tokens as a list": array("Acquire", 1, [1, 2, 3]),
    "a negative limit": array("Acquire", 1, b"", None, None, None, None, None, 0, -1),
    "a negative room": array("Acquire", 1, b"", None, None, None, None, None, 0, None, 0, None, -1),
    "an extend that is no list": array("Extend", 1, 5),
    "an item that is none": array("Extend", 1, [5]),
    "an item of too many fields": array("Extend", 1, [[5, b"", 0, None, [], 1]]),
    "more companions than are known of": array("Extend", 1, [[5, b"", 0, None, [0] * (control.MAX_COMPANIONS + 1)]]),
    "a negative spare": array(
        "Acquire", 1, b"", None, None, None, None, None, 0, None, 0, None, None, None, None, [-1]
    ),
    "an end without a slot": array("Commit", 1, 1, 1, 0, None, 0, 0, [[0, 4]]),
    "more ends than are taken": array("Commit", 1, 1, 1, 0, None, 0, 0, [[0, 4, 1]] * (control.MAX_ENDS + 1)),
    "a negative floor": array("Commit", 1, 1, 1, 0, None, 0, 0, [], -1),
    "more items than are taken": array("Extend", 1, [[5]] * (control.MAX_EXTENSIONS + 1)),
    "a long salt": array("Acquire", 1, b"", None, None, "x" * 5000),
    "a bad string": framed(b"\x92\xa4Ping\xa2\xff\xfe"),
    "time to live of nothing": array("Pin", 1, b"", "me", 0.0),
    "time to live that is no number": framed(b"\x95\xa3Pin\x01\xc4\x00\xa2me\xcb" + struct.pack(">d", float("nan"))),
    "deep": framed(b"\x91" * 100_000),
    "an array of 4 billion": framed(b"\xdd\xff\xff\xff\xff"),
    "bytes of 4 billion": framed(b"\x93\xa7Acquire\x01\xc6\xff\xff\xff\xff"),
    "two in one frame": framed(msgspec.msgpack.encode(("Ping", 1)) * 2),
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_what_is_no_command_ends_the_connection_with_a_reason(daemon: Daemon, data: bytes) -> None:
    with daemon.client() as other, other.acquire(TOKENS) as lease:
        lease.commit()
        before = daemon.settle()["pools"]
        client = daemon.client()
        send(client, data)
        with pytest.raises(ProtocolError):
            client.ping()
        with pytest.raises(ProtocolError):
            client.ping()
        client.close()
        assert daemon.status()["pools"] == before
        other.ping()


def test_what_came_before_the_bad_frame_is_answered_and_what_comes_after_is_not(daemon: Daemon) -> None:
    with daemon.client() as client:
        connection = client._connection
        send(client, control.frame(control.Ping(101)) + BAD["garbage"] + control.frame(control.Clear(102)))
        with connection.lock:
            connection.wait(101)
            with pytest.raises(ProtocolError):
                connection.wait(102)


def test_frames_may_come_in_any_pieces(client: Client) -> None:
    tokens = struct.pack("<40I", *TOKENS)
    data = b"".join(control.frame(control.Peek(number, tokens)) for number in range(201, 211))
    rng = random.Random(1)
    while data:
        size = rng.randrange(1, 60)
        send(client, data[:size])
        data = data[size:]
    with client._connection.lock:
        for number in range(210, 200, -1):
            client._connection.wait(number)


def test_a_frame_that_is_cut_off_is_forgotten(daemon: Daemon) -> None:
    """Its sender's process lives, so its pages stay fenced; nothing was granted for the half frame."""
    with Puppet(daemon.socket) as puppet:
        puppet.do("cache = Client(socket); lease = cache.acquire(range(40))")
        puppet.do(
            "from sglcache.wire import control\n"
            "cache._connection._sock.sendall(control.frame(control.Acquire(9, bytes(64)))[:-1])\n"
            "cache._connection.close()"
        )
        until(lambda: daemon.pool()["leased"] == 0)
        assert daemon.pool()["fenced"] == 10
    until(lambda: daemon.pool()["fenced"] == 0)


def test_random_frames_never_harm(daemon: Daemon) -> None:
    """Truncated, flipped and invented frames, each on a connection of its own."""
    rng = random.Random(7)
    tokens = struct.pack("<8I", *range(8))
    good = [
        control.frame(frame)
        for frame in (
            control.Acquire(1, tokens, "lora", "extra", "salt", "s", "t", 1, 4, 4),
            control.Extend(2, [control.Extension(1, tokens)]),
            control.Commit(3, 1, 1, 0, ends=((0, 4, 0),), floor=4),
            control.Release(4, 1, 2, 0),
            control.Recorded(1, 0, 1),
            control.Pin(5, tokens, "me", 1.0),
            control.Unpin(6, "me"),
            control.Dump(7, "DEVICE"),
        )
    ]
    for _ in range(300):
        frame = bytearray(rng.choice(good))
        body = frame[4:]
        for _ in range(rng.randrange(1, 4)):
            kind = rng.randrange(3)
            if kind == 0:
                body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
            elif kind == 1:
                del body[rng.randrange(len(body)) :]
                body = body or bytearray(b"\x90")
            else:
                body[rng.randrange(len(body) + 1) :] = rng.randbytes(rng.randrange(1, 20))
        client = daemon.client(role="observer")
        send(client, framed(bytes(body)))
        with contextlib.suppress(ProtocolError, Forbidden, BadRequest):
            client.ping()
        client.close()
    assert daemon.status()["gauges"]["num_leases"] == 0


# -- well-formed, and still wrong --------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["observer", "admin", "scheduler", "runner"])
def test_a_role_may_do_its_own_things_only(daemon: Daemon, role: str) -> None:
    with daemon.client(role=role) as client:
        if role in ("observer", "admin"):
            for command in (
                lambda: client.acquire(TOKENS),
                lambda: client.pin(TOKENS, "me", 1.0),
                lambda: client.unpin("me"),
            ):
                with pytest.raises(Forbidden):
                    command()
        send(client, control.frame(control.Recorded(1, 0, 1)))
        with pytest.raises(Forbidden):
            client.ping()


def test_a_worker_may_not_lead(daemon: Daemon) -> None:
    with daemon.client(role="scheduler") as scheduler, daemon.worker(scheduler.token, 0) as worker:
        worker.ping()
        for command in (
            control.Acquire(11, b"\0" * 4),
            control.Commit(12, 1, 1, 0),
            control.Clear(13),
            control.Status(14),
            control.Peek(15, b""),
        ):
            with pytest.raises(Forbidden):
                ask(worker, command)
        worker.ping()


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (control.Acquire(1, b""), BadRequest),
        (control.Acquire(1, b"\0\0\0"), BadRequest),
        (control.Acquire(1, b"\0\0\0\0", reserve=(1 << 31) - 1), NoSpace),
        (control.Acquire(1, bytes(64), exact=3), BadRequest),
        (control.Acquire(1, bytes(64), exact=68), BadRequest),
        (control.Acquire(1, bytes(64), limit=8, exact=8), BadRequest),
        (control.Acquire(1, bytes(64), exact=8), Changed),
        (control.Cancel(1, 999), UnknownLease),
        (control.Commit(1, 999, 5, 0), UnknownLease),
        (control.Release(1, 999, 5, 0), UnknownLease),
        (control.Commit(1, 999, 5, 0, None, 1 << 30, 1), BadRequest),
        (control.Acquire(1, bytes(64), spare=(1,)), BadRequest),
        (control.Peek(1, b"\0"), BadRequest),
        (control.Pin(1, b"\0", "me", 1.0), BadRequest),
        (control.Clear(1, "DISK"), BadRequest),
        (control.Clear(1, "device"), BadRequest),
        (control.Dump(1, ""), BadRequest),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, control.Frame) else value.code,
)
def test_arguments_out_of_range_are_refused_and_the_connection_goes_on(
    daemon: Daemon, client: Client, command: Any, error: type[SglcacheError]
) -> None:
    before = daemon.status()["pools"]
    with pytest.raises(error):
        ask(client, command)
    client.ping()
    assert daemon.status()["pools"] == before


def test_many_commands_in_one_write_are_all_served(client: Client) -> None:
    numbers = range(1001, 2001)
    send(client, b"".join(control.frame(control.Ping(number)) for number in numbers))
    with client._connection.lock:
        for number in numbers:
            client._connection.wait(number)


def test_a_client_that_does_not_read_is_not_read_from(daemon: Daemon) -> None:
    """It writes until its socket is full; the daemon's memory does not grow with it, and others are served."""
    client = daemon.client()
    sock = client._connection._sock
    sock.setblocking(False)
    frames = b"".join(control.frame(control.Status(number)) for number in range(1, 201))
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while sent < 64 << 20:
            sent += sock.send(frames)
    assert sent < 64 << 20
    daemon.status()
    client._connection.close()
    with pytest.raises(ClosedError):
        client.ping()


def test_a_release_of_request_0_has_no_answer_whatever_comes_of_it(client: Client) -> None:
    connection = client._connection
    with client.acquire(TOKENS) as lease:
        lease.commit()
    lease = client.acquire(TOKENS)
    with connection.lock:
        for release in (lease.id, lease.id, 1 << 40):  # the second is of a lease that is gone, the third of none
            client._ticket += 1
            connection.send(control.Release(0, release, client._ticket, 0))
        connection.send(control.Ping(request := connection.number()))
        assert connection._read() == control.Done(request)
    lease.ended = True
    (mine,) = [each for each in client.status()["sessions"] if each["members"][0]["name"] == client._hello.client]
    assert mine["leases"] == 0
    assert mine["members"][0]["unanswered"] == 1  # the status itself


def test_a_daemon_that_went_away_is_unavailable(folder: Any) -> None:
    daemon = Daemon(folder)
    client = daemon.client()
    lease = client.acquire(TOKENS)
    daemon.kill()
    for command in (client.ping, lease.commit, lease.release):
        with pytest.raises(Unavailable):
            command()
    client.close()
    with pytest.raises(Unavailable, match="sglcache serve"):
        daemon.client()


@pytest.mark.parametrize("policy", ["wait_complet", "", "NONE"])
def test_an_unknown_prefetch_is_refused_where_there_is_no_third_tier_either(client: Client, policy: str) -> None:
    tokens = struct.pack("<3I", 1, 2, 3)
    with client._connection.lock:
        acquire, prefetch = client._connection.number(), client._connection.number()
    for command in (
        control.Acquire(acquire, tokens, prefetch=policy),
        control.Prefetch(prefetch, tokens, policy=policy),
    ):
        with pytest.raises(BadRequest, match="none, best_effort, timeout, wait_complete"):
            ask(client, command)
    client.acquire([1, 2, 3], prefetch="wait_complete").release()
    assert client.prefetch([1, 2, 3], policy="none").fetched_tokens == 0
