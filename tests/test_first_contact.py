"""What a newcomer runs into, one by one: each refusal says what it is, by its name, and what to do next.

The messages are in docs/troubleshooting.md, and a test holds that they are.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import sglcache
from sglcache import cli, errors
from sglcache.client.mirror import Mirror
from sglcache.testing.daemon import Daemon
from sglcache.wire import control

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No daemon is where one is looked for."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("SGLCACHE_SOCKET", raising=False)
    monkeypatch.delenv("SGLCACHE_CONFIG", raising=False)


Said = Callable[..., tuple[object, str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """`said(*arguments)`: the exit code and all that a command says on stderr."""

    def run(*arguments: object) -> tuple[object, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main([str(each) for each in arguments])
        return ended.value.code, capsys.readouterr().err

    return run


CONFIGS = {
    "a section that is none": ("[pol]\npage_size = 4\n", ["no such key", "did you mean [pool]?"]),
    "a key that is none": ("[pool]\npage_sise = 4\n", ["pool.page_sise", "did you mean pool.page_size?"]),
    "a key outside of its section": ("port = 3\n", ["did you mean http.port?"]),
    "a value that is none": ("[pool]\npage_size = 'big'\n", ["pool.page_size = 'big'", "the default is 16"]),
    "a number without a unit": ("[host]\nsize = 512\n", ["host.size = 512", "with its unit", "512 B"]),
    "a unit that is none": ("[host]\nsize = '4 Gigs'\n", ["'4 Gigs'", "GiB"]),
    "a port that is none": ("[http]\nport = 99999\n", ["http.port = 99999", "65535"]),
    "an unquoted text": ("[events]\ntopic = kv\n", ["is not TOML", "line 2", "text in quotes"]),
    "an open section": ("[pool\n", ["is not TOML", "[section]"]),
    "a model without a name that is stored": (
        "[storage]\nkind = 'file'\npath = '/tmp/kv'\n", ["storage.kind", 'write model_name = "..."'],
    ),
    "more than the machine has": (
        "[pool]\nnum_tokens = 4_000_000_000\nhead_dim = 4096\n",
        ["RAM is", "write pool.num_tokens = ", "at most", "--ram SIZE"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
@pytest.mark.parametrize("command", ["check", "serve"])
def test_a_configuration_that_is_wrong_is_refused_by_key_and_with_what_to_write(
    case: str, command: str, tmp_path: Path, said: Said
) -> None:
    text, words = CONFIGS[case]
    file = tmp_path / "my.toml"
    file.write_text(text)
    code, err = said(command, *(["--config"] if command == "serve" else []), file)
    assert code == 2
    assert err.startswith("error[config]: ")
    assert all(each in err for each in words), err


def test_a_configuration_s_file_that_can_t_be_read_is_named(tmp_path: Path, said: Said) -> None:
    assert said("check", tmp_path / "none.toml")[1].endswith(
        "No such file or directory; name a file that can be read\n"
    )
    assert "Is a directory; name a file" in said("check", tmp_path)[1]
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    assert "UTF-8" in said("check", tmp_path / "binary.toml")[1]


def test_cards_are_refused_with_what_to_write(said: Said) -> None:
    code, err = said("serve", "-s", "pool.device=cuda")
    assert code == 2
    assert 'write pool.device = "cpu"' in err


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["storage.path=/proc/kv", "storage.kind=file", "model_name=m"], ["storage.path", "this user may write"]),
        (["host.keep_path=/proc/kv"], ["host.keep_path", "/proc", "tmpfs"]),
        (["control.socket=/proc/kv/rank-0.sock"], ["control.socket", "a folder that this user has"]),
    ],
    ids=["storage", "keep_path", "socket"],
)
def test_a_folder_that_can_t_be_written_is_named_with_its_key(sets: list[str], words: list[str], said: Said) -> None:
    more = [word for each in (*sets, "http.enabled=false", "events.enabled=false") for word in ("-s", each)]
    code, err = said("serve", *more)
    assert code == 2
    assert all(each in err for each in words), err


def test_a_port_that_is_taken_is_named_with_its_key_and_how_to_find_who_has_it(said: Said) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, err = said("serve", "-s", f"http.port={taken.getsockname()[1]}")
    assert code == 2
    assert re.search(r"http.port = \d+: .* is taken; choose another, or set http.port=0 .*`sglcache doctor`", err)


def test_without_a_daemon_each_command_says_how_to_start_one_or_to_find_it(said: Said) -> None:
    for command in ("status", "ping", "top", "sessions", "events", "fsck", "clear", "announce"):
        code, err = said(command)
        assert code == 69
        assert "start one with `sglcache serve`, or name its socket in SGLCACHE_SOCKET" in err
    with pytest.raises(errors.Unavailable, match="start one with `sglcache serve`"):
        sglcache.Client()


def test_what_is_no_socket_and_a_dead_daemon_s_are_told_apart(tmp_path: Path, said: Said) -> None:
    assert "that is no socket: name a rank's control socket" in said("ping", "--socket", tmp_path)[1]
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "rank-0.sock"))
    code, err = said("ping", "--socket", tmp_path / "rank-0.sock")
    assert code == 69
    assert "left of one that is dead, and the next replaces it: start one with" in err


def test_another_user_s_daemon_says_whose_it_is(
    lend: Callable[..., Daemon], said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = lend()
    uid = os.geteuid()
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: uid + 1)
        code, err = said("ping", "--socket", daemon.socket)
    assert code == 1
    assert f"is of uid {uid}, and we are {uid + 1}; run as that user" in err


def test_an_old_client_and_an_old_daemon_are_told_by_both_numbers(
    lend: Callable[..., Daemon], said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = lend()
    ours = control.PROTOCOL
    with monkeypatch.context() as old:
        old.setattr(control, "PROTOCOL", ours - 1)  # this process is the client, and another has the daemon
        code, err = said("ping", "--socket", daemon.socket)
    assert code == 1
    assert f"this daemon speaks protocol {ours}, the client {ours - 1}; update the older one" in err


@contextmanager
def answering(path: Path, frame: bytes) -> Iterator[Path]:
    """Somebody at `path` who answers the first client with this."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()

        def serve() -> None:
            peer, _ = listening.accept()
            with peer:
                peer.recv(65536)
                peer.sendall(frame)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield path
        finally:
            thread.join()


def test_a_daemon_that_welcomes_with_another_protocol_is_old(lend: Callable[..., Daemon], tmp_path: Path) -> None:
    with lend().observer() as client:
        welcome = client._connection.welcome
    from msgspec.structs import replace

    old = control.frame(replace(welcome, protocol=control.PROTOCOL - 1))
    with (
        answering(tmp_path / "a.sock", old) as path,
        pytest.raises(errors.ProtocolError, match="update the older one, and start the daemon again"),
    ):
        sglcache.Client(path, role="observer")


def test_what_is_no_daemon_is_told_by_what_it_is(tmp_path: Path) -> None:
    with (
        answering(tmp_path / "a.sock", b"HTTP/1.1 400 Bad Request\r\n\r\n") as path,
        pytest.raises(errors.ProtocolError, match=r"answers HTTP: .* without \.http"),
    ):
        sglcache.Client(path, role="observer")
    with (
        answering(tmp_path / "b.sock", struct.pack(">I", 3) + b"abc") as path,
        pytest.raises(errors.ProtocolError, match="name a rank's control socket"),
    ):
        sglcache.Client(path, role="observer")


def test_a_rank_that_there_is_not_names_those_that_there_are(lend: Callable[..., Daemon], said: Said) -> None:
    code, err = said("ping", "--socket", lend().socket, "--rank", 7)
    assert code == 2
    assert "--rank 7: this host has the ranks 0 (0,0)" in err


def test_a_server_s_address_that_is_wrong_says_which_is_meant(lend: Callable[..., Daemon]) -> None:
    stream = lend().info["stream"]["endpoint"].removeprefix("tcp://")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        with pytest.raises(errors.Unavailable, match=r"Connection refused; .*:30080 by default"):
            Mirror.from_server(f"http://127.0.0.1:{port}")
    with pytest.raises(errors.Unavailable, match="speaks no HTTP: it may be the port of an event stream"):
        Mirror.from_server(f"http://{stream}")


def test_a_page_that_there_is_not_names_those_that_there_are(lend: Callable[..., Daemon]) -> None:
    told = lend().ask("/helth")
    message = "404 Not Found; GET /health, /server_info, /digest, /metrics or /api; a browser gets a page at /"
    assert told["error"]["message"] == message


def test_a_subscriber_at_a_wrong_port_hears_that_nothing_comes(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglcache.commands import events

    monkeypatch.setattr(events, "SILENCE_S", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        code, err = said("events", "--endpoint", endpoint, "--for", "1.3")
    assert code == 0
    assert f"nothing has come from {endpoint} in 0.2 s" in err
    assert "5557 by default" in err


def test_the_script_that_subscribes_says_so_as_well(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "scripts" / "subscribe.py")]
    done = subprocess.run([*script, "--endpoint", "127.0.0.1:5557"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "write tcp://HOST:PORT" in done.stderr


def test_a_command_or_an_option_that_there_is_not_names_the_nearest(said: Said) -> None:
    assert "There is no command 'statsu'; did you mean status?" in said("statsu")[1]
    assert "`sglcache --help` lists them" in said("frobnicate")[1]
    assert "did you mean events?" in said("doctor", "event")[1]
    code, err = said("ping", "--rnk", "3")
    assert code == 2
    assert "--rank" in err


@pytest.mark.parametrize("module", ["torch", "transformers", "tokenizers", "mooncake"])
def test_a_part_that_is_not_installed_is_named_with_the_extra_that_brings_it(module: str) -> None:
    with (
        pytest.raises(errors.NotInstalled, match=rf"needs {module}, .*; pip install 'sglcache\[\w+\]'"),
        errors.extras(),
    ):
        raise ModuleNotFoundError(name=f"{module}.inside")


def test_a_python_that_is_too_old_is_told_before_anything_is_made(tmp_path: Path) -> None:
    for name in ("scripts/install.sh", "deploy/constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo "Python 3.9.2"\nexit 1\n')
    old.chmod(0o755)
    done = subprocess.run(
        [str(tmp_path / "scripts" / "install.sh")],
        env={**os.environ, "PYTHON": str(old)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "is Python 3.9.2; Python 3.11 or later is needed (set PYTHON=...)" in done.stderr
    assert not (tmp_path / ".venv").exists()
    assert 'requires-python = ">=3.11"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.daemons
def test_two_daemons_and_a_router_that_is_dead(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        router = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with Daemon(tmp_path / "d", events={"dynamo_indexers": [router]}) as daemon:
            sets = (f"control.socket={daemon.socket}", "http.enabled=false", "events.enabled=false")
            done = subprocess.run(
                [sys.executable, "-m", "sglcache", "serve", *(word for each in sets for word in ("-s", each))],
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 2
            assert "a live daemon has" in done.stderr
            assert "stop it, or give this one another socket with control.socket" in done.stderr
            with daemon.observer() as client:
                client.ping()  # it serves all the same
        assert f"the indexer at {router} does not know this host's ranks" in daemon.said()
        assert "mend events.dynamo_indexers" in daemon.said()


def test_what_the_document_quotes_is_what_is_said() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    quotes = re.findall(r"^\| `([^`]+)`? \|", text, re.M)
    assert len(quotes) > 30
    others = {"Received HTTP/0.9 when not allowed", "[Errno 111] Connection refused"}  # curl's, and the system's
    sources = [*(ROOT / "sglcache").rglob("*.py"), ROOT / "scripts" / "install.sh", ROOT / "scripts" / "subscribe.py"]
    said = re.sub(r"[\"']\s*\n\s*f?[\"']", "", "\n".join(file.read_text() for file in sources))
    said += "".join(f"error[{kind.code}]" for kind in errors.SglcacheError.__subclasses__()) + "404 Not Found"
    assert [quote for quote in quotes if quote not in others and quote.strip() not in said] == []
