"""What an acquire and a release cost in instructions and system calls, on each side: held without a clock.

The bounds are what was counted with CPython 3.11 (2026-11-30) and a few percent: whoever makes the way longer finds it
here, and whoever makes it shorter lowers them. Other versions of Python have other instructions.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from sglcache.bench import opcodes
from sglcache.testing.daemon import Daemon

TOKENS = np.arange(2048, dtype=np.uint32)
MOST_DAEMON = {"commit": 1980, "acquire": 1410, "release": 850, "release and acquire": 2210}
MOST_SERVER = {"commit": 580, "acquire": 515, "release": 320, "release and acquire": 860}  # of these, beside the index
MOST_CLIENT = {"acquire": 345, "release": 250}

counted_for = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="counted with another version of Python")


@pytest.fixture(scope="module")
def daemon_counts() -> dict[str, opcodes.Counts]:
    return opcodes.of_daemon()


@counted_for
@pytest.mark.parametrize("command", MOST_DAEMON)
def test_the_daemons_way_of_a_command_is_no_longer(daemon_counts: dict[str, opcodes.Counts], command: str) -> None:
    counts = daemon_counts[command]
    beside = counts.total - counts.by_part["core"]
    assert counts.total <= MOST_DAEMON[command], counts.by_function.most_common(12)
    assert beside <= MOST_SERVER[command], counts.by_function.most_common(12)


def test_a_command_is_as_long_whatever_came_before() -> None:
    first, second = (opcodes.of_daemon(tokens=256) for _ in range(2))
    assert {name: each.by_function for name, each in first.items()} == {
        name: each.by_function for name, each in second.items()
    }


def test_a_longer_prompt_takes_no_instruction_more(daemon_counts: dict[str, opcodes.Counts]) -> None:
    longer = opcodes.of_daemon(tokens=3 * 2048)
    for name in ("acquire", "release", "release and acquire"):
        assert longer[name].by_function == daemon_counts[name].by_function


READ, WRITE = (f"server/connection.py Connection.{name}" for name in ("data_received", "flush"))


def test_what_comes_together_is_read_once_and_answered_by_one_write() -> None:
    with opcodes.Served() as served:
        (grant,) = served.serve(served.acquire())

        def calls(*frames: bytes) -> tuple[int, int]:
            counts = opcodes.counted(lambda: grants.extend(served.serve(*frames)))
            return counts.calls[READ], counts.calls[WRITE]

        grants: list[Any] = []
        assert calls(served.release(grant.lease)) == (1, 0)
        assert calls(*[served.acquire() for _ in range(3)]) == (1, 1)
        assert calls(*[served.release(each.lease) for each in grants], served.acquire()) == (1, 1)
        assert len(grants) == 4


@pytest.fixture
def daemon(lend: Callable[..., Daemon]) -> Daemon:
    return lend(pool={"page_size": 16, "num_tokens": 8192})


@pytest.fixture
def client_counts(daemon: Daemon) -> Iterator[tuple[dict[str, opcodes.Counts], Counter[str]]]:
    with daemon.client() as client:
        with client.acquire(TOKENS) as lease:
            lease.commit()
        counts = opcodes.of_client(client, TOKENS)
        yield counts, opcodes.calls(lambda: client.acquire(TOKENS).release())


@counted_for
def test_the_clients_way_is_no_longer(
    client_counts: tuple[dict[str, opcodes.Counts], Counter[str]],
) -> None:
    for name, counts in client_counts[0].items():
        assert counts.total <= MOST_CLIENT[name], counts.by_function.most_common(12)


def test_an_acquire_and_a_release_are_two_sends_a_look_and_a_read(
    client_counts: tuple[dict[str, opcodes.Counts], Counter[str]],
) -> None:
    calls = client_counts[1]
    system = {name: calls[name] for name in ("send", "sendall", "sendmsg", "poll", "recv", "recv_into", "select")}
    assert system == {"send": 2, "sendall": 0, "sendmsg": 0, "poll": 1, "recv": 1, "recv_into": 0, "select": 0}
