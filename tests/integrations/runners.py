"""A runner of a small model that is a process, for tests that have several, or kill one."""

from __future__ import annotations

import contextlib
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import tiny

from sglcache.client import Client
from sglcache.integrations.transformers import PagedModel, Runner

POSITIONS = 1024
START_S = 60.0


class RunnerProcess:
    """It says one batch of prompts after the other, on request. Used as a context manager, it is dead at the end."""

    def __init__(self, context: ForkServerContext, socket: Path, family: str, max_running: int) -> None:
        """On its way; `wait` for it."""
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_live, args=(theirs, socket, family, max_running), daemon=True)
        self.process.start()
        theirs.close()

    def wait(self) -> None:
        """Until it is attached."""
        assert self.hear() == "attached"

    def begin(self, prompts: list[list[int]], num_new: int) -> None:
        self._pipe.send((prompts, num_new))

    def hear(self) -> Any:
        """What came of what was begun: for each prompt the tokens that hit, the output, and its logits. EOFError: it
        ended."""
        return self._pipe.recv()

    def say(self, prompts: list[list[int]], num_new: int) -> Any:
        self.begin(prompts, num_new)
        return self.hear()

    def kill(self) -> None:
        """SIGKILL, and wait for the death."""
        self.process.kill()
        self.process.join(START_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        self._pipe.close()


def _live(pipe: Connection, socket: Path, family: str, max_running: int) -> None:
    with contextlib.suppress(EOFError), Client(socket) as client:
        model = PagedModel(tiny.build(family, max_position_embeddings=POSITIONS), client)
        runner = Runner(client, model, max_running=max_running)
        pipe.send("attached")
        while True:
            prompts, num_new = pipe.recv()
            requests = [runner.submit(prompt, max_new_tokens=num_new, keep_logits=True) for prompt in prompts]
            runner.run()
            pipe.send(
                [
                    (request.matched_tokens, request.output, [row.tolist() for row in request.logits or []])
                    for request in requests
                ]
            )
