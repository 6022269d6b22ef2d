"""The control socket's frames: what each side says is what the other hears, and its limits hold on both."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sglcache.wire import control

COMMANDS = msgspec.msgpack.Decoder(control.Command)
ANSWERS = msgspec.msgpack.Decoder(control.Answer)
MOST = control.MAX_COUNT

SAID = [
    control.Acquire(1, b"\1\0\0\0", spare=(0, 3)),
    control.Extend(2, [control.Extension(1, b"", 0, 64, (0, MOST)), control.Extension(2)]),
    control.Commit(3, 1, 1, 0, 128, 0, 7, ((1, 64, 5), (1, 128, 6)), 96),
    control.Commit(4, 1, 2, 0, ends=((MOST, MOST, MOST),) * control.MAX_ENDS),
]
HEARD = [
    control.Granted(1, 9, 64, 0, bytes(16), None, ((2, bytes(8), None), (0, b"", 7)), (128, 96, 64)),
    control.Granted(1, 9, 64, 0, bytes(16)),
    control.Extended(2, [bytes(8), control.Fault("no_space", "none", {})], [(bytes(8), bytes(4)), ()]),
    control.CommitDone(3, 128, 0, b"", 0, 1, ((6, b"", None), (0, bytes(4), None))),
]
EXTENSION = [5, b"", 0, None]
ACQUIRE = [1, b"", None, None, None, None, None, 0, None, 0, None, None, None, None]
COMMIT = [1, 5, 1, 0, None, 0, 0]


@pytest.mark.parametrize("said", SAID, ids=repr)
def test_a_command_is_heard_as_it_was_said(said: Any) -> None:
    heard = COMMANDS.decode(control.encode(said))
    assert heard == said
    if isinstance(heard, control.Extend):
        assert [type(item) for item in heard.items] == [control.Extension] * 2


@pytest.mark.parametrize("said", HEARD, ids=repr)
def test_an_answer_is_heard_as_it_was_said(said: Any) -> None:
    assert ANSWERS.decode(control.encode(said)) == said


@pytest.mark.parametrize(
    ("fields", "value"),
    [
        (["Acquire", *ACQUIRE], control.Acquire(1, b"")),
        (["Extend", 1, [EXTENSION]], control.Extend(1, [control.Extension(5)])),
        (["Commit", *COMMIT], control.Commit(1, 5, 1, 0)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_says_nothing_of_companions_means_none(fields: list[Any], value: Any) -> None:
    assert COMMANDS.decode(msgspec.msgpack.encode(fields)) == value


@pytest.mark.parametrize(
    "fields",
    [
        ["Acquire", *ACQUIRE, [-1]],
        ["Acquire", *ACQUIRE, [MOST + 1]],
        ["Acquire", *ACQUIRE, [1.0]],
        ["Acquire", *ACQUIRE, 1],
        ["Acquire", *ACQUIRE, None],
        ["Acquire", *ACQUIRE, [1] * (control.MAX_COMPANIONS + 1)],
        ["Extend", 1, [[*EXTENSION, [-1]]]],
        ["Extend", 1, [[*EXTENSION, [1] * (control.MAX_COMPANIONS + 1)]]],
        ["Extend", 1, [[*EXTENSION, [], 1]]],
        ["Commit", *COMMIT, [[0, 4]]],
        ["Commit", *COMMIT, [[0, 4, 1, 1]]],
        ["Commit", *COMMIT, [[0, 4, -1]]],
        ["Commit", *COMMIT, [[0, 4, "1"]]],
        ["Commit", *COMMIT, [[0, 4, 1]] * (control.MAX_ENDS + 1)],
        ["Commit", *COMMIT, {}],
        ["Commit", *COMMIT, [], -1],
        ["Commit", *COMMIT, [], MOST + 1],
        ["Commit", *COMMIT, [], None, None],
    ],
    ids=lambda fields: f"{fields[0]} {fields[-1]!r:.40}",
)
def test_what_no_count_can_be_is_no_command(fields: list[Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        COMMANDS.decode(msgspec.msgpack.encode(fields))
