"""Bad input that once did harm, each with what it did. Thousands more: `make survive`."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import socket
import sqlite3
import struct
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from sglcache import config, paths
from sglcache.bench import trace
from sglcache.client import Client
from sglcache.client.discovery import base_url, decode_json, server_of
from sglcache.errors import BadRequest, ConfigError, ProtocolError, SglcacheError
from sglcache.fuzzing.control import GEOMETRY
from sglcache.fuzzing.files import identity, run_of
from sglcache.memory.mapping import create_memfd
from sglcache.net import curve, endpoints
from sglcache.net.publisher import END_SEQ, Publisher
from sglcache.server.channel import Beat, Channel, Drain, Ready
from sglcache.server.child import Child
from sglcache.server.numbers import MAX_NUMBER, Numbers
from sglcache.server.plan import Seat
from sglcache.storage.catalog import Catalog
from sglcache.storage.file import MAX_TICK, FileStore
from sglcache.storage.host import HostPages
from sglcache.storage.mooncake_words import from_process, to_process
from sglcache.wire import control
from sglcache.wire.events import decode_batch, forms_of

encode = msgspec.msgpack.encode
DEEP = b"\x91" * 5000
DEEP_JSON = b"[" * 5000

# -- the daemon's answers ---------------------------------------------------------------------------------


def test_facts_may_have_any_names() -> None:
    """TypeError: got multiple values for argument 'message'."""
    error = SglcacheError.from_code("busy", "no", {"message": 1, "self": 2, "code": 3})
    assert (error.message, error.facts) == ("no", {"message": 1, "self": 2, "code": 3})


@contextlib.contextmanager
def daemon_that_says(folder: Path, welcome: bytes, fds: list[int], then: bytes = b"") -> Iterator[Path]:
    path = folder / "daemon.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.fspath(path))
        listening.listen()

        def serve() -> None:
            sock, _ = listening.accept()
            with sock:
                sock.recv(4096)
                socket.send_fds(sock, [welcome], fds)
                with contextlib.suppress(OSError):
                    while sock.recv(1 << 16):
                        sock.sendall(then)

        thread = threading.Thread(target=serve)
        thread.start()
        yield path
        thread.join()


def welcome(**changes: Any) -> bytes:
    words = control.Welcome(control.PROTOCOL, 1, "1", b"", GEOMETRY, [], 4, 0, 0, 1, 1)
    return control.frame(msgspec.structs.replace(words, **changes))


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


@pytest.mark.parametrize(
    "answer",
    [
        control.frame(control.Done(0)),  # AssertionError: an answer to no request
        control.frame(control.Granted(1, 1, 0, 0, b"")),  # AssertionError, AttributeError: to a peek
        control.frame(control.Done(1, {"matched_tokens": 1})),  # KeyError
        control.frame(control.Done(1, {"matched_tokens": 1, "device_tokens": 1, "reaches": 7})),  # TypeError
        framed(b"\x93\xa4Done\x01" + DEEP),  # RecursionError
        framed(b"\x93\xa4Done\x01\x81\xa2\xff\xfe\x01"),
        b"\xff\xff\xff\xff",  # 4 GiB were waited for, and would have been kept
    ],
)
def test_an_answer_that_makes_no_sense_is_the_end_of_the_connection(tmp_path: Path, answer: bytes) -> None:
    with daemon_that_says(tmp_path, welcome(), [], answer) as path, Client(path, role="observer") as client:
        with pytest.raises(ProtocolError):
            client.peek([1, 2, 3])
        with pytest.raises(ProtocolError):
            client.ping()


@pytest.mark.parametrize("answer", [framed(DEEP), framed(b"\x93\xa7Refusal\xa1a\xa2\xff\xff"), b"\xff\xff\xff\xff"])
def test_a_first_answer_that_makes_no_sense_is_refused(tmp_path: Path, answer: bytes) -> None:
    with daemon_that_says(tmp_path, answer, []) as path, pytest.raises(ProtocolError):
        Client(path, role="observer")


def test_a_welcome_with_the_wrong_descriptors_is_refused_and_none_is_left_open(tmp_path: Path) -> None:
    """IndexError; and the load ring's own stayed open."""
    memfd, bell = create_memfd("test", 4096), os.eventfd(0)
    before = len(os.listdir("/proc/self/fd"))
    with daemon_that_says(tmp_path, welcome(), [bell, bell]) as path, pytest.raises(ProtocolError):
        Client(path)
    os.unlink(path)
    pools = [control.PoolHandle(0, 4096, 7)]
    with (
        daemon_that_says(tmp_path, welcome(pools=pools), [memfd, memfd, bell], control.frame(control.Done(1))) as path,
        Client(path) as client,
        pytest.raises(ProtocolError),
    ):
        _ = client.pools
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(memfd)
    os.close(bell)


# -- what routers read --------------------------------------------------------------------------------------


NESTED = b"\x93\xcb" + bytes(8) + b"\x91" + DEEP


@pytest.mark.parametrize("payload", [DEEP, NESTED, b"\x93\x01\x91\x81\xa2\xff\xfe\x01\xc0"])
def test_a_batch_that_is_nested_deep_is_no_batch(payload: bytes) -> None:
    """RecursionError."""
    for read in (decode_batch, forms_of):
        with pytest.raises(ProtocolError):
            read(payload)


@pytest.mark.parametrize(
    "batch",
    [
        DEEP,
        encode([1e300, []]),  # OverflowError: no such time
        encode([float("nan"), []]),
        encode([1.0, [{"type": "BlockRemoved", "block_hashes": [[1]]}]]),  # unhashable, where --check looks
        encode([1.0, [{"type": ["BlockStored"]}]]),
        encode([1.0, [5]]),
    ],
)
def test_the_subscriber_s_script_says_that_it_is_no_batch(batch: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    script = runpy.run_path(os.fspath(Path(__file__).parents[1] / "scripts" / "subscribe.py"))
    arguments = Namespace(raw=False, json=False, heartbeats=True)
    assert script["read"](arguments, (1, batch, False), script["Seen"]()) is None
    assert "BAD BATCH #1" in capsys.readouterr().err


@pytest.mark.parametrize("raw", [b"{", b'{"a":\x80}', DEEP_JSON, b'["\xff"]'])
def test_a_server_that_answers_with_no_json_says_nothing(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_json(raw)
    with pytest.raises(ConfigError):
        server_of("http://a", [1])


@pytest.mark.parametrize("url", ["http://*:1]:50/", "http://[::1", "http://a:99999", "ftp://a", "http://"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    """ValueError: Invalid IPv6 URL."""
    with pytest.raises(ConfigError):
        base_url(url)


def test_a_request_of_any_number_of_frames_is_answered_with_the_end() -> None:
    """All frames of a message were kept, however many; now the first few."""
    publisher = Publisher(endpoints.parse("tcp://127.0.0.1:0"), endpoints.parse("tcp://127.0.0.1:0"))
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(publisher.replay_endpoint or "")
        for frames in ([b"x"] * 3000, [b"", bytes(8), b"more"], [b""], [bytes(8)]):
            dealer.send_multipart(frames)
            while not dealer.poll(1):
                publisher.service()
                assert len(publisher._frames) <= 4
            assert dealer.recv_multipart()[-2] == END_SEQ
        assert publisher.stats().malformed_requests == 3
    publisher.close(0)


# -- what lies on a disk ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        b"\xff\xfe",  # UnicodeDecodeError
        DEEP_JSON,  # RecursionError
        b'{"reserved": ' + b"9" * 5000 + b"}",
        json.dumps({"reserved": MAX_NUMBER + 1}).encode(),  # OverflowError, where it is sent
        b'{"reserved": -1}',
        b'{"reserved": 1}' + b" " * 5000,
    ],
)
def test_numbers_that_were_never_ours_are_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "rank-0.json"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match="remove it"):
        Numbers(path, lambda: 1)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    """Each was opened, and so waited for somebody at its other end."""
    state, key, folder = tmp_path / "state.json", tmp_path / "a.key", tmp_path / "store"
    os.mkfifo(state)
    os.mkfifo(key)
    with pytest.raises(ConfigError):
        Numbers(state, lambda: 1)
    with pytest.raises(ConfigError):
        curve.load_key(key, "events.curve_key_file")
    own = FileStore(folder, identity(), pages(), max_bytes=1 << 20)._own
    own.mkdir(parents=True)
    for name in ("identity.json", "identity.json.tmp", "index.db", "index.db-journal", "index.db-wal"):
        os.mkfifo(own / name)
    run = run_of(bytes(16))
    name = run.digests.hex()
    (own / name[:2]).mkdir()
    os.mkfifo(own / name[:2] / f"{name}.tmp")
    with contextlib.closing(FileStore(folder, identity(), pages(), max_bytes=1 << 20)) as store:
        store.open()
        assert store.put(run, [0], lambda: False).reason == "failed"


def pages() -> HostPages:
    return HostPages.page_first(4, [memoryview(bytearray(4 * 96))])


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TABLE pages (number, digest)",  # TypeError: Expected 7 arguments, got 2
        "CREATE VIEW pages AS SELECT 1 AS number, 2, 3, 4, 5, 6, 7",
        "CREATE TABLE pages (number TEXT, digest, before, namespace, tokens, num_bytes, used)",
    ],
)
def test_an_index_of_another_form_is_made_anew(tmp_path: Path, statement: str) -> None:
    path = tmp_path / "index.db"
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(statement)
        with contextlib.suppress(sqlite3.Error):
            db.execute(f"INSERT INTO pages VALUES ({','.join('1' * statement.count(','))}, 1)")
        db.commit()
    catalog = Catalog(path)
    assert catalog.open() == []
    catalog.close()
    assert Catalog(path).open() == []


@pytest.mark.parametrize(
    ("column", "value"), [("number", MAX_TICK + 1), ("used", (1 << 63) - 1), ("num_bytes", 1 << 50)]
)
def test_an_index_with_numbers_that_were_never_counted_is_not_believed(tmp_path: Path, column: str, value: int) -> None:
    """OverflowError at the next use, on a thread of the store; or a page that was all of the cap."""
    one, other = run_of(bytes(16)), run_of(struct.pack("<4I", *range(4)))
    store = FileStore(tmp_path, identity(), pages(), max_bytes=1 << 20)
    store.open()
    assert store.put(one, [0], lambda: False).mask == b"\1"
    store.close()
    with contextlib.closing(sqlite3.connect(store._catalog.path)) as db:
        db.execute(f"UPDATE pages SET {column} = {value}")
        db.commit()
    for _ in range(2):
        store = FileStore(tmp_path, identity(), pages(), max_bytes=1 << 20)
        store.open()
        assert store.get(one, [1], lambda: False).num_pages == 1
        assert store.put(other, [0], lambda: False).mask == b"\1"
        assert store.stats().num_bytes == 2 * 4096
        store.close()


NOT_Z85 = f'public-key = "{"A" * 40}"\nsecret-key = "{"!" * 40}"'


@pytest.mark.parametrize("text", ["", "public-key", 'public-key = "short"', NOT_Z85, f'public-key = "{"é" * 20}"'])
def test_a_key_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    """IndexError; or it was taken, and libzmq refused it later."""
    path = tmp_path / "a.key"
    path.write_text(text)
    with pytest.raises(ConfigError, match="holds no CURVE key"):
        curve.load_key(path, "events.curve_key_file")


@pytest.mark.parametrize(
    "line",
    [
        DEEP_JSON,
        b'{"input_length": 1, "hash_ids": [1], "timestamp": 1e999}',
        b'{"input_length": 5000000, "hash_ids": [' + b",".join([b"1"] * 9800) + b"]}",
    ],
)
def test_a_line_that_is_no_request_is_refused(tmp_path: Path, line: bytes) -> None:
    """RecursionError; and a line of 16 MB made 16 GB of tokens."""
    path = tmp_path / "trace.jsonl"
    path.write_bytes(line)
    with pytest.raises(ConfigError):
        list(trace.requests(path))


# -- configuration -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["[" * 5000, "{a=" * 3000, "9" * 5000, "[" * 300 + "]" * 300])
def test_a_configuration_that_is_nested_deep_is_refused(tmp_path: Path, value: str) -> None:
    """RecursionError; ValueError: Exceeds the limit for integer string conversion."""
    path = tmp_path / "config.toml"
    path.write_text(f"[pool]\npage_size = {value}\n")
    with pytest.raises(ConfigError):
        config.load(path)
    with pytest.raises(ConfigError):
        config.load(None, [f"pool.page_size={value}"])


@pytest.mark.parametrize("name", [".", "/", ""])
def test_a_socket_that_is_a_folder_is_refused(name: str) -> None:
    """ValueError: PosixPath('.') has an empty name."""
    if name:
        with pytest.raises(ConfigError, match="is a folder"):
            paths.socket_path(1, {"SGLCACHE_SOCKET": name})
    with pytest.raises(ConfigError, match="is a folder"):
        paths.supervisor_path(Path(name))


# -- between our own processes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("word", [b"\xc1", encode({"type": "Answer"}), encode({"type": "Ask", "number": -1.5}), DEEP])
def test_what_is_no_word_of_mooncake_s_process_is_refused(word: bytes) -> None:
    for decode in (to_process, from_process):
        with pytest.raises(ProtocolError):
            decode(word)


@pytest.mark.parametrize(
    "word",
    [
        encode(Ready({"stream": "tcp"})),  # TypeError: string indices must be integers
        encode(Ready({"stream": {"endpoint": 1}})),
        encode(Drain()),  # was passed over
        encode(["Beat", "ok", 1 << 63, {}]),  # the next life would have been told of it
        encode(["Beat", "ok", -1, {}]),
        encode(["Answer", 1]) + b"\0",
        DEEP,
        b"\x92\xa4Keep\xa2\xff\xfe",
    ],
)
def test_a_rank_that_says_what_nobody_understands_is_killed(word: bytes) -> None:
    channel, rank = Channel.pair()
    killed: list[bool] = []
    child = Child(Seat(0, 0, 0, "/run/a", "tcp://127.0.0.1:1", None, ""), 1.0, lambda _: None, lambda _: None)
    child._channel = channel
    child.kill = lambda: killed.append(True)  # type: ignore[method-assign]
    before = len(os.listdir("/proc/self/fd"))
    for each in (encode(Beat("ok", 5, {})), word):
        socket.send_fds(rank, [each], [0])
        child.hear()
    assert killed == [True]
    assert len(os.listdir("/proc/self/fd")) == before
    channel.close()
    rank.close()


def test_a_check_that_is_none_is_named(lend: Callable[..., Any]) -> None:
    with lend().observer() as observer, pytest.raises(BadRequest):
        observer.check("nothing")
