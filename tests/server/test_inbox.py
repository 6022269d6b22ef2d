"""What other threads say comes to the loop in order, whole, and with a look at everything else in between."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import uvloop

from sglcache.server.inbox import Inbox


def test_what_was_said_comes_in_order_and_others_have_their_turns_in_between() -> None:
    async def main() -> list[object]:
        loop = asyncio.get_running_loop()
        inbox = Inbox(loop, turn_s=0)  # each takes longer than that
        came: list[object] = []
        over = asyncio.Event()

        def other() -> None:
            came.append("other")
            if not over.is_set():
                loop.call_soon(other)

        for number in range(5):
            inbox.say(came.append, number)
        inbox.say(over.set)
        loop.call_soon(other)
        await over.wait()
        return came

    came = uvloop.run(main())
    assert [each for each in came if each != "other"] == list(range(5))
    assert all("other" in came[came.index(number) : came.index(number + 1)] for number in range(4)), came


def test_nothing_is_lost_between_threads() -> None:
    async def main() -> list[tuple[int, int]]:
        inbox = Inbox(asyncio.get_running_loop(), turn_s=0.0001)
        came: list[tuple[int, int]] = []
        over = asyncio.Event()

        def hear(thread: int, number: int) -> None:
            came.append((thread, number))
            if len(came) == 4 * 2000:
                over.set()

        def speak(thread: int) -> None:
            for number in range(2000):
                inbox.say(hear, thread, number)

        threads = [threading.Thread(target=speak, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        await asyncio.wait_for(over.wait(), 60)
        for thread in threads:
            thread.join()
        return came

    came = uvloop.run(main())
    for thread in range(4):
        assert [number for who, number in came if who == thread] == list(range(2000))


def test_an_error_of_one_keeps_back_no_other() -> None:
    async def main() -> tuple[list[int], list[Any]]:
        loop = asyncio.get_running_loop()
        errors: list[Any] = []
        loop.set_exception_handler(lambda loop, context: errors.append(context.get("exception")))
        inbox = Inbox(loop)
        came: list[int] = []
        over = asyncio.Event()

        def fail() -> None:
            raise ValueError("planted")

        inbox.say(came.append, 1)
        inbox.say(fail)
        inbox.say(came.append, 2)
        inbox.say(over.set)
        await over.wait()
        return came, errors

    came, errors = uvloop.run(main())
    assert came == [1, 2]
    assert [str(each) for each in errors] == ["planted"]


def test_a_loop_that_is_closed_says_so() -> None:
    loop = uvloop.new_event_loop()
    inbox = Inbox(loop)
    loop.close()
    with pytest.raises(RuntimeError):
        inbox.say(print)
