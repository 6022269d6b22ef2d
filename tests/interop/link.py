"""A stretch of TCP between two programs that a test can cut, mend, and stop in the middle of an answer."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

T = TypeVar("T")


class Link:
    """Listens on a port of the system's choice for its whole life, and passes on what comes to `target`.

    While it is cut, connections are closed as soon as they are made, and nothing is passed on: what a program sends to
    subscribers meanwhile is lost to them.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="link", daemon=True)
        self._thread.start()
        self._target: int | None = None
        self._pairs: set[asyncio.Task[None]] = set()
        self._answers_left: int | None = None  # bytes from the target that may still pass; None: all
        self.held = threading.Event()
        """Bytes from the target have been held back."""
        self._server = self._run(asyncio.start_server(self._accepted, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def mend(self, endpoint: str) -> None:
        """Pass connections made from now on to `tcp://127.0.0.1:PORT`."""
        self._run(self._cut(int(endpoint.rpartition(":")[2])))

    def cut(self) -> None:
        """End every connection, and let none through."""
        self._run(self._cut(None))

    def hold_answers(self, after_bytes: int) -> None:
        """Let so many more bytes come from the target, in all connections together; what follows waits, and is lost."""
        self.held.clear()
        self._answers_left = after_bytes

    def pass_answers(self) -> None:
        """Hold nothing back any more; what was held stays lost."""
        self._answers_left = None

    def close(self) -> None:
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- on the link's own thread -------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _cut(self, target: int | None) -> None:
        self._target = target
        pairs = list(self._pairs)
        for task in pairs:
            task.cancel()
        await asyncio.gather(*pairs, return_exceptions=True)

    async def _end(self) -> None:
        self._server.close()
        await self._cut(None)
        while others := asyncio.all_tasks() - {asyncio.current_task()}:  # accepted meanwhile: they find the link cut
            await asyncio.gather(*others, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pairs.add(task)
        try:
            if self._target is not None:
                await self._join(reader, writer, self._target)
        except (OSError, asyncio.CancelledError):
            pass  # one end is gone, or the link was cut
        finally:
            writer.transport.abort()
            self._pairs.discard(task)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: int) -> None:
        opening = asyncio.ensure_future(asyncio.open_connection("127.0.0.1", target))
        try:
            answers, requests = await asyncio.shield(opening)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                (await opening)[1].transport.abort()
            raise
        ways = [
            asyncio.ensure_future(self._pass_on(reader, requests)),
            asyncio.ensure_future(self._pass_on(answers, writer, answer=True)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            requests.transport.abort()  # at once: whoever waits here may be cancelled
            for way in ways:
                way.cancel()

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, answer: bool = False) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                if answer and self._answers_left is not None:
                    passed = data[: self._answers_left]
                    self._answers_left -= len(passed)
                    if len(passed) < len(data):
                        self.held.set()
                    data = passed
                sink.write(data)
                await sink.drain()
