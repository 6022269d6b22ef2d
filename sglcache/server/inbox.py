"""What other threads have to say to the loop: in order, and not all in one turn.

After a copy or a disk that hung, thousands of ends come at once. An event loop runs all that is ready before it looks
at a socket again: so it is given one thing, which takes what was said for `TURN_S`, and comes again for the rest.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

TURN_S = 0.0005


class Inbox:
    """`say` is for any thread; what is said runs on the loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, turn_s: float = TURN_S) -> None:
        self._loop = loop
        self._turn_s = turn_s
        self._said: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()
        self._coming = False  # the loop was told, and has not begun to take

    def say(self, callback: Callable[..., None], *arguments: object) -> None:
        """RuntimeError: the loop is closed."""
        self._said.append((callback, arguments))
        if not self._coming:  # said before it is cleared it is taken, and looked at after that it is told again
            self._coming = True
            self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self._coming = False
        said, clock = self._said, time.perf_counter
        end = clock() + self._turn_s
        try:
            while said:
                callback, arguments = said.popleft()
                callback(*arguments)
                if clock() >= end:
                    return
        finally:
            if said and not self._coming:
                self._coming = True
                self._loop.call_soon(self._take)
