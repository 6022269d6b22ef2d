"""What docs/security.md says of a running daemon, as far as no other test holds it."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import struct
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from sglcache.testing.daemon import Daemon, Puppet

SALT = "nobody-else-s-salt"
TOKENS = list(range(3_000_000_001, 3_000_000_065))
"""What no page has for another reason: greater than a port, a pid or the seconds since 1970, and no size in pages."""


def tells_tokens(text: str) -> bool:
    """Whether a number of `text` is a token, or hex digits in it have two tokens that follow each other, packed.

    Numbers are read whole: a measured time may have any digits, and none of them tells of anybody.
    """
    numbers = map(float, re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.])", text))  # metrics have all forms
    packed = [struct.pack(order + "2I", *TOKENS[at : at + 2]).hex() for order in "<>" for at in range(len(TOKENS) - 1)]
    return not set(TOKENS).isdisjoint(numbers) or any(pair in text for pair in packed)


def test_a_token_in_a_page_is_found_and_a_time_with_its_digits_is_not() -> None:
    first, second = TOKENS[:2]
    for told in (
        f"[1,{first},2]",
        f'{{"token": {second}}}',
        f'tokens="{first} {second}"',
        "x 3.000000001e+09\n",
        f"{first}.0",
    ):
        assert tells_tokens(told)
    for order in "<>":
        assert tells_tokens(f'"{struct.pack(order + "3I", 7, first, second).hex()}"')
    for time in (f"0.0002{first}", f"{first}.5", f"12{first}", f"0x{first}", f"{first}7"):
        assert not tells_tokens(time)


def test_http_tells_no_token_and_no_salt(lend: Callable[..., Daemon]) -> None:
    daemon = lend(http={"enabled": True, "port": 0})
    with daemon.client() as client:
        lease = client.acquire(TOKENS, cache_salt=SALT, session_id="chat-of-somebody")
        lease.commit()
        for page in ("", "health", "server_info", "digest", "metrics"):
            with urllib.request.urlopen(f"{daemon.info['http']}/{page}", timeout=10) as answer:
                text = answer.read().decode()
            assert SALT not in text
            assert "chat-of-somebody" not in text
            assert not tells_tokens(text)
        lease.release()


def test_a_runner_can_resize_nothing_that_it_was_given(lend: Callable[..., Daemon]) -> None:
    """Neither the pools nor the load ring, nor make it so that the daemon could not write them."""
    with Puppet(lend().socket) as puppet:
        puppet.do("cache = Client(socket)")
        folder = f"/proc/{puppet.pid}/fd"
        ours = ("/memfd:sglcache-device", "/memfd:sglcache-loads")
        given = [fd for fd in os.listdir(folder) if os.readlink(f"{folder}/{fd}").startswith(ours)]
        assert given
        for name in given:
            fd = os.open(f"{folder}/{name}", os.O_RDWR)
            for size in (0, 1 << 30):
                with pytest.raises(PermissionError):
                    os.ftruncate(fd, size)
            with pytest.raises(PermissionError):
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
            os.close(fd)
        puppet.do("cache.close()")


def test_what_lies_on_a_disk_is_its_owner_s_alone(tmp_path: Path) -> None:
    places = {"storage": {"kind": "file", "path": str(tmp_path / "l3"), "size": "64 MB"}}
    kept = {"num_tokens": 4 * 512, "keep_path": str(tmp_path / "kept")}
    with Daemon(tmp_path / "daemon", **places, host=kept) as daemon, daemon.client() as client:
        with client.acquire(TOKENS) as lease:
            lease.commit()
        daemon.settle()
    found = 0
    for top in (tmp_path / "l3", tmp_path / "kept"):
        for place, folders, files in os.walk(top):
            for name in folders:
                assert stat.S_IMODE(os.lstat(os.path.join(place, name)).st_mode) == 0o700
            for name in files:
                if len(name) == 32 or name.startswith("sglcache-"):
                    found += 1
                    assert stat.S_IMODE(os.lstat(os.path.join(place, name)).st_mode) == 0o600
    assert found > 16


def test_a_tenant_without_the_salt_hits_nothing(lend: Callable[..., Daemon]) -> None:
    with lend().client() as client:
        with client.acquire(TOKENS, cache_salt=SALT) as lease:
            lease.commit()
        assert client.peek(TOKENS, cache_salt=SALT).matched_tokens == 64
        for other in (None, "", SALT + "x", SALT.upper()):
            assert client.peek(TOKENS, cache_salt=other).matched_tokens == 0
        assert client.peek(TOKENS, extra_key=SALT).matched_tokens == 0
        assert client.peek(TOKENS, lora=SALT).matched_tokens == 0
