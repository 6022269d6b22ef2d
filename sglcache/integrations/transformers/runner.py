"""Continuous batching over leases: what a scheduler of a model runner does with the cache, and nothing else."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sglcache.core.key import Namespace, pack
from sglcache.errors import BadRequest, NoSpace, TransferError
from sglcache.integrations.transformers.model import Executor, Part

if TYPE_CHECKING:
    from sglcache.client import Client, Committed, Lease, Pending
    from sglcache.client.client import Tokens


@dataclass(eq=False, slots=True)
class Request:
    """A prompt and what becomes of it. Made by `Runner.submit`; read it, don't write it."""

    prompt: array[int]  # uint32
    max_new_tokens: int
    temperature: float
    stop: frozenset[int]
    namespace: Namespace
    generator: torch.Generator
    logits: list[Tensor] | None  # where asked for: float [vocab] of each new token, on the CPU
    tokens: array[int]  # the prompt and what followed
    lease: Lease | None = None
    computed: int = 0  # tokens whose K and V are in the pages
    committed: int = 0  # tokens that the cache was given, or had
    loaded: bool = True  # nothing is waited for
    done: bool = False
    matched_tokens: int = 0  # served from the cache when it was admitted
    host_tokens: int = 0  # of them, from the host
    num_duplicates: int = 0  # pages that were computed here and known by the time of the commit

    @property
    def output(self) -> list[int]:
        """The new tokens so far."""
        return self.tokens[len(self.prompt) :].tolist()

    @property
    def pages(self) -> list[int]:
        """Its page table; [] without a lease."""
        return [] if self.lease is None else self.lease.slots.tolist()


class _Begun(NamedTuple):
    """A commit or release on its way."""

    pending: Pending[Committed] | Pending[None]
    request: Request


@dataclass(eq=False)
class Runner:
    """Runs requests over one session. `client` acquires and commits; `executor` computes. One thread at a time.

    Each `step` is one forward pass: a token for each request that decodes, and chunks of the prompts of others, at
    most `step_tokens` together. A request is admitted when the cache has room for all that it may become, so it never
    has to stop for lack of pages. A prompt is committed chunk by chunk, the answer at its end.
    """

    client: Client
    executor: Executor
    step_tokens: int = 512
    max_running: int = 16
    num_steps: int = field(default=0, init=False)
    _waiting: deque[Request] = field(default_factory=deque, init=False)
    _running: list[Request] = field(default_factory=list, init=False)
    _begun: list[_Begun] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.max_running < 1 or self.step_tokens < self.max_running:
            raise BadRequest(f"step_tokens = {self.step_tokens} must be max_running = {self.max_running} or more")

    def submit(
        self,
        prompt: Tokens,
        *,
        max_new_tokens: int = 16,
        temperature: float = 0.0,
        seed: int = 0,
        stop: Collection[int] = (),
        lora: str | None = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        keep_logits: bool = False,
    ) -> Request:
        """Queue a prompt, given as to `Client.acquire`.

        `temperature` 0 takes the likeliest token; above it, `seed` decides. A token of `stop` ends the answer.
        """
        packed = array("I", pack(prompt))
        if not packed or max_new_tokens < 1 or temperature < 0:
            raise BadRequest(
                f"a request needs a prompt, max_new_tokens >= 1 and temperature >= 0; got {len(packed)} tokens, "
                f"{max_new_tokens}, {temperature}"
            )
        if (largest := max(packed)) >= self.executor.vocab_size:
            raise BadRequest(f"token {largest}: the model has {self.executor.vocab_size}, from 0", token=largest)
        request = Request(
            packed,
            max_new_tokens,
            temperature,
            frozenset(stop),
            Namespace(lora, extra_key, cache_salt),
            torch.Generator().manual_seed(seed),
            [] if keep_logits else None,
            packed[:],
        )
        self._waiting.append(request)
        return request

    @property
    def idle(self) -> bool:
        """No request is waiting or running."""
        return not (self._waiting or self._running)

    def run(self) -> None:
        """Step until all is done, and the cache has all of it."""
        while not self.idle:
            self.step()
        self.settle()

    def step(self) -> list[Request]:
        """One forward pass; the requests that it finished.

        NoSpace: nothing runs and others hold the pages that the next request needs; it stays queued (`give_up`).
        """
        self.settle()
        self._admit()
        work = self._choose()
        if not work:
            return []
        try:
            logits = self.executor.run([self._part(request, count) for request, count in work])
        except TransferError:
            self._acquire_anew()
            return []
        self.num_steps += 1
        row = 0
        for request, count in work:
            request.loaded = True
            request.computed += count
            if request.computed == len(request.tokens):
                self._take(request, logits[row])
                row += 1
        for request, _ in work:
            self._commit(request)
        self._record()
        finished = [request for request in self._running if request.done]
        self._running = [request for request in self._running if not request.done]
        return finished

    def give_up(self) -> Request:
        """Drop the request that is next to be admitted, such as one that will never find room; it has no output."""
        return self._waiting.popleft()

    def settle(self) -> None:
        """Hear what became of the commits: page tables name the canonical pages from then on."""
        begun, self._begun = self._begun, []
        for pending, request in begun:
            committed = pending.wait()
            if committed is not None:
                request.num_duplicates += committed.num_duplicates

    def close(self) -> None:
        """Drop what is waiting and running; what was committed stays cached."""
        self.settle()
        for request in self._running:
            if request.lease is not None:
                self._release(request)
        self._record()
        self.settle()
        self._running.clear()
        self._waiting.clear()

    # -- a step ------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.max_running:
            request = self._waiting[0]
            tokens = request.tokens
            try:
                lease = self.client.acquire(
                    tokens.tobytes(),
                    **request.namespace._asdict(),
                    # The last token is always computed: its logits are what we are here for.
                    limit=len(tokens) - 1,
                    # The last new token is never computed, so it needs no room.
                    reserve=max(0, len(request.prompt) + request.max_new_tokens - 1 - len(tokens)),
                )
            except NoSpace:
                if not self._running:
                    raise
                return
            self._waiting.popleft()
            self._running.append(request)
            request.lease = lease
            request.computed = request.committed = request.matched_tokens = lease.matched_tokens
            request.host_tokens = lease.host_tokens
            request.loaded = lease.load is None

    def _choose(self) -> list[tuple[Request, int]]:
        """Who computes how many tokens: first all that decode, so that a long prompt holds up nobody."""
        left = self.step_tokens
        work = []
        for request in sorted(self._running, key=lambda each: len(each.tokens) - each.computed > 1):
            count = min(left, len(request.tokens) - request.computed)
            if count:
                work.append((request, count))
                left -= count
        return work

    def _part(self, request: Request, count: int) -> Part:
        assert request.lease is not None
        start, stop = request.computed, request.computed + count
        return Part(
            request.tokens[start:stop].tobytes(),
            start,
            request.lease.slots.tobytes(),
            None if request.loaded else request.lease.load,
            stop == len(request.tokens),
        )

    @staticmethod
    def _take(request: Request, logits: Tensor) -> None:
        """The next token, from the logits of the last one: float [vocab]."""
        if request.logits is not None:
            request.logits.append(logits.clone())
        if request.temperature == 0:
            token = int(logits.argmax())
        else:
            odds = torch.softmax(logits.double() / request.temperature, 0)
            token = int(torch.multinomial(odds, 1, generator=request.generator))
        request.tokens.append(token)
        request.done = token in request.stop or len(request.tokens) == len(request.prompt) + request.max_new_tokens

    def _commit(self, request: Request) -> None:
        """Give the cache the whole pages that are new: of a prompt at once, of an answer when it is done."""
        lease = request.lease
        assert lease is not None
        if request.done:
            known = len(lease.tokens)
            if request.computed > known:  # within what was reserved: this can't fail for lack of room
                lease.extend(request.tokens[known : request.computed].tobytes())
        page_size = self.client.geometry.page_size
        whole = min(request.computed, len(lease.tokens)) // page_size * page_size
        if whole > request.committed:
            request.committed = whole
            self._begun.append(_Begun(lease.commit_begin(whole), request))
        if request.done:
            self._release(request)

    def _release(self, request: Request) -> None:
        assert request.lease is not None
        self._begun.append(_Begun(request.lease.release_begin(), request))
        request.lease = None

    def _record(self) -> None:
        """Have the workers, if there are any, record what was begun."""
        tickets = [begun.pending.ticket for begun in self._begun]
        self.executor.record([ticket for ticket in tickets if ticket is not None])

    def _acquire_anew(self) -> None:
        """A load from the host failed, of one of those that were waited for: they start over, ahead of the rest.

        What the others wrote in this step they write again in the next.
        """
        failed = [request for request in self._running if not request.loaded]
        for request in reversed(failed):
            self._running.remove(request)
            self._release(request)
            self._waiting.appendleft(request)
        self._record()
