"""Dynamo's indexer: registered for this alone, it must come to know our blocks; and who was registered before, too."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator

from sglcache.client.discovery import Server, Source
from sglcache.client.doctor.blocks import PAGES, PAUSE_S, Prompt, Runner
from sglcache.client.doctor.finding import Finding, failed, ok
from sglcache.client.dynamo import Indexer, Registration
from sglcache.errors import SglcacheError, Unavailable


class Dynamo:
    """One indexer, and the ranks that it is to follow."""

    def __init__(
        self, indexer: Indexer, server: Server, sources: list[Source], runner: Runner, timeout_s: float
    ) -> None:
        self.indexer = indexer
        self.server = server
        self.sources = sources
        self.runner = runner
        self.timeout_s = timeout_s
        self.model = runner.name
        self.instance = secrets.randbits(48)

    def examine(self) -> Iterator[Finding]:
        indexer = self.indexer
        try:
            indexer.check_health()
            workers = indexer.workers()
        except Unavailable as exc:
            yield failed("indexer", exc.message, "start it: python -m dynamo.indexer --port PORT")
            return
        yield ok("indexer", f"{indexer.url} is well, and has {len(workers)} workers")
        with contextlib.ExitStack() as undo:
            undo.callback(self._unregister)
            for source in self.sources:
                try:
                    indexer.register(self.model, self.instance, source, self.server.block_size)
                except SglcacheError as exc:
                    yield failed("indexer register", exc.message, "look at what its log says of the endpoint")
                    return
            yield from self._followed(workers)
        if any(each.model == self.model for each in indexer.workers()):
            remedy = f"unregister instance {self.instance} of model {self.model}"
            yield failed("indexer cleanup", "what was registered for this is still there", remedy)
        else:
            yield ok("indexer cleanup", "what was registered for this is unregistered")

    def _unregister(self) -> None:
        with contextlib.suppress(SglcacheError):
            self.indexer.unregister(self.model, self.instance)

    def _followed(self, workers: list[Registration]) -> Iterator[Finding]:
        ranks = {source.rank for source in self.sources}
        before = [prompt for prompt in self.runner.prompts if prompt.rank in ranks]
        if lacking := self._lacking(before):
            yield failed(
                "indexer late join",
                f"{lacking}, which was there before it was registered",
                "look whether it reaches the replay port; it asks for a replay with the first batch that it hears",
            )
        else:
            yield ok("indexer late join", "it has the blocks from before it was registered")
        now = [self._like(prompt) for prompt in before]
        self.runner.put(now)
        if late := self._lacking(now):
            yield failed("indexer live", f"{late}, put just now", "look whether it reaches the live port")
        else:
            yield ok("indexer live", "it has the blocks from now on")
        if not lacking and not late:
            yield from self._apart(before)
            yield from self._tiers(before)
        for worker in workers:
            yield from self._other(worker, now)

    def _like(self, prompt: Prompt) -> Prompt:
        """Other tokens in the same namespace."""
        return prompt._replace(tokens=self.runner.new_tokens())

    def _lacking(self, prompts: list[Prompt]) -> str | None:
        """What of them it does not have when time is up."""
        missing = list(prompts)

        def all_there() -> bool:
            missing[:] = [each for each in missing if self._asked(each, each.names) != each.num_cached]
            return not missing

        if self._wait(all_there):
            return None
        first = missing[0]
        return f"{first}: it has {self._asked(first, first.names)} of {first.num_cached} tokens"

    def _asked(
        self, prompt: Prompt, names: dict[str, str], model: str | None = None, instance: int | None = None
    ) -> int:
        found = self.indexer.query(model or self.model, prompt.tokens, **names)
        return found.get(self.instance if instance is None else instance, {}).get(prompt.rank, 0)

    def _apart(self, prompts: list[Prompt]) -> Iterator[Finding]:
        for prompt in prompts:
            for names in prompt.strangers:
                if got := self._asked(prompt, names):
                    yield failed(
                        "indexer namespaces",
                        f"{got} tokens of {prompt.names} match when it is asked for {names or 'no namespace'}",
                        "this indexer mixes namespaces up: do not route salted or adapted requests by it",
                    )
                    return
        yield ok("indexer namespaces", "a salt and an adapter match under their own name alone")

    def _tiers(self, prompts: list[Prompt]) -> Iterator[Finding]:
        wanted: dict[tuple[int, str], int] = {}
        for prompt in prompts:
            for name in ("GPU", *(("CPU_PINNED",) if prompt.rank in self.runner.has_host else ())):
                wanted[prompt.rank, name] = wanted.get((prompt.rank, name), 0) + PAGES
        lacking: list[tuple[int, str]] = []

        def all_there() -> bool:
            held = self.indexer.blocks(self.model)
            lacking[:] = [where for where, count in wanted.items() if len(held.get(where, ())) < count]
            return not lacking

        if self._wait(all_there):
            yield ok("indexer tiers", "it has them on " + " and ".join(sorted({name for _, name in wanted})))
        else:
            yield failed("indexer tiers", f"it has no {lacking[0][1]} blocks of rank {lacking[0][0]}", "update it")

    def _other(self, worker: Registration, prompts: list[Prompt]) -> Iterator[Finding]:
        """A registration that was there already. It is one of ours if it listens where our ranks publish."""
        ports = {source.endpoint.rsplit(":", 1)[1]: source.rank for source in self.sources}
        label = f"indexer instance {worker.instance} of {worker.model}"
        for rank, endpoint in worker.endpoints.items():
            if ports.get(endpoint.rsplit(":", 1)[1]) != rank:
                continue
            if worker.block_size != self.server.block_size:
                told = (
                    f"it is registered with blocks of {worker.block_size}, and drops those of {self.server.block_size}"
                )
                yield failed(label, told, "unregister and register it with the daemon's block size")
                continue
            prompt = next(each for each in prompts if each.rank == rank)

            def there(prompt: Prompt = prompt) -> bool:
                got = self._asked(prompt, prompt.names, worker.model, worker.instance)
                return got == prompt.num_cached

            if self._wait(there):
                yield ok(label, f"it follows rank {rank}")
            else:
                told = f"it says that it is {worker.statuses.get(rank)}, and does not hear of rank {rank}"
                yield failed(label, told, "unregister and register it: it may wait for an END that never comes")

    def _wait(self, until: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + self.timeout_s
        while not until():
            if time.monotonic() > deadline:
                return False
            time.sleep(PAUSE_S)
        return True
