"""Where sockets bind: what is an endpoint, which one is a rank's, and why one can't be had."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from sglcache.errors import ConfigError
from sglcache.net.endpoints import Ipc, Tcp, bind, collide, is_local, parse


@pytest.fixture
def sock() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.XPUB) as sock:
        yield sock


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("tcp://127.0.0.1:5557", Tcp("127.0.0.1", 5557)),
        ("tcp://*:5557", Tcp("*", 5557)),
        ("tcp://[::1]:5557", Tcp("::1", 5557)),
        ("tcp://[fe80::1%eth0]:0", Tcp("fe80::1%eth0", 0)),
        ("tcp://router-1.example:65535", Tcp("router-1.example", 65535)),
        ("ipc:///run/sglcache/events", Ipc("/run/sglcache/events")),
        ("ipc://@events", Ipc("@events")),
    ],
)
def test_an_endpoint_reads_back_as_it_was_written(text: str, endpoint: Tcp | Ipc) -> None:
    assert parse(text) == endpoint
    assert str(endpoint) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5557",
        "127.0.0.1:5557",
        "inproc://events",
        "udp://127.0.0.1:5557",
        "tcp://",
        "tcp://127.0.0.1",
        "tcp://:5557",
        "tcp://127.0.0.1:",
        "tcp://127.0.0.1:*",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:-1",
        "tcp://127.0.0.1:٣",
        "tcp://::1:5557",
        "tcp://[127.0.0.1]:5557",
        "tcp://[]:5557",
        "tcp://eth0;127.0.0.1:5557",
        "tcp://host..local:5557",
        f"tcp://{'x' * 64}.local:5557",
        "tcp://a b:5557",
        "ipc://",
        "ipc://*",
        "ipc:///" + "x" * 107,
    ],
)
def test_what_is_none_is_refused_by_the_name_of_its_key(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^events\.endpoint: ") as caught:
        parse(text, "events.endpoint")
    assert caught.value.path == "events.endpoint"


def test_a_rank_has_the_base_port_plus_its_number() -> None:
    assert Tcp("*", 5557).offset(3) == Tcp("*", 5560)
    assert Tcp("*", 0).offset(3) == Tcp("*", 0)
    assert Ipc("/run/replay").offset(3) == Ipc("/run/replay-3")
    assert Ipc("/run/events").offset(0) == Ipc("/run/events")


def test_a_rank_beyond_the_last_port_is_refused() -> None:
    assert Tcp("*", 65533).offset(2).port == 65535
    with pytest.raises(ConfigError, match="rank 3"):
        Tcp("*", 65533).offset(3)
    with pytest.raises(ConfigError):
        Ipc("/" + "x" * 105).offset(10)


def test_who_can_be_reached_from_elsewhere() -> None:
    for text in ("tcp://*:1", "tcp://0.0.0.0:1", "tcp://[::]:1", "tcp://10.0.0.5:1", "tcp://example.org:1"):
        assert not is_local(parse(text))
    for text in ("tcp://127.0.0.1:1", "tcp://127.8.8.8:1", "tcp://localhost:1", "tcp://[::1]:1", "ipc://x"):
        assert is_local(parse(text))


def test_live_and_replay_can_not_share_an_endpoint() -> None:
    assert collide(Tcp("*", 1), Tcp("127.0.0.1", 1))
    assert not collide(Tcp("*", 0), Tcp("*", 0))
    assert not collide(Tcp("127.0.0.1", 1), Tcp("127.0.0.2", 1))
    assert collide(Ipc("/run/x"), Ipc("/run/../run/x"))
    assert not collide(Ipc("/run/x"), Tcp("*", 1))


def test_a_wildcard_is_dialled_on_loopback() -> None:
    assert Tcp("*", 1).dialled() == Tcp("0.0.0.0", 1).dialled() == Tcp("127.0.0.1", 1)
    assert Tcp("::", 1).dialled() == Tcp("::1", 1)
    assert Tcp("127.0.0.2", 1).dialled() == Tcp("127.0.0.2", 1)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "lo"])
def test_a_concrete_host_binds_and_port_0_is_told(sock: zmq.Socket[bytes], host: str) -> None:
    bound = bind(sock, Tcp(host, 0))
    assert isinstance(bound, Tcp)
    with socket.create_connection(("127.0.0.1", bound.port)):
        pass


def test_ipv6_binds(sock: zmq.Socket[bytes]) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this host has no IPv6")
    bound = bind(sock, Tcp("::1", 0))
    assert isinstance(bound, Tcp)
    with socket.create_connection(("::1", bound.port)):
        pass


def test_a_taken_port_is_named(sock: zmq.Socket[bytes]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        endpoint = Tcp("127.0.0.1", other.getsockname()[1])
        with pytest.raises(ConfigError, match=f"{endpoint}.*[Ii]n use.*; stop") as caught:
            bind(sock, endpoint, "events.endpoint")
    assert caught.value.endpoint == str(endpoint)


def test_an_address_of_another_host_is_refused(sock: zmq.Socket[bytes]) -> None:
    with pytest.raises(ConfigError, match="no such address"):
        bind(sock, Tcp("192.0.2.1", 0))


def test_an_ipc_path_is_taken_over_only_from_the_dead(sock: zmq.Socket[bytes], tmp_path: Path) -> None:
    path = tmp_path / "events"
    with pytest.raises(ConfigError, match="directory"):
        bind(sock, Ipc(str(tmp_path / "none" / "events")))
    path.write_text("precious")
    with pytest.raises(ConfigError, match="no socket"):
        bind(sock, Ipc(str(path)))
    assert path.read_text() == "precious"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(str(path))
        living.listen()
        with pytest.raises(ConfigError, match="in use"):
            bind(sock, Ipc(str(path)))
    assert bind(sock, Ipc(str(path))) == Ipc(str(path))
