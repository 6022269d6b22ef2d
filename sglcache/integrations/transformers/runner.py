"""Continuous batching over leases: what a scheduler of a model runner does with the cache, and nothing else."""

from __future__ import annotations

import contextlib
from array import array
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sglcache.client.client import REATTACH_S
from sglcache.core.key import Namespace, pack
from sglcache.errors import BadRequest, DaemonRestarted, NoSpace, TransferError
from sglcache.integrations.transformers.model import Executor, Part, StatePart, WindowPart

if TYPE_CHECKING:
    from sglcache.client import Client, Committed, Lease, Pending
    from sglcache.client.client import AcquireOptions, Tokens


class State(NamedTuple):
    """The states after so many tokens, in one of the lease's own slots."""

    tokens: int
    slot: int


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
    tenant: str | None = None  # who is charged with its pages
    lease: Lease | None = None
    computed: int = 0  # tokens whose K and V are in the pages
    committed: int = 0  # tokens that the cache was given, or had
    loaded: bool = True  # nothing is waited for
    goal: int = 0  # tokens there were when it was admitted: what follows is its answer
    state: int | None = None  # the own slot that has the states after `computed`; None: as the lease's match ends
    kept: State | None = None  # of the answer, at its last whole page; it is committed when that is done
    done: bool = False
    matched_tokens: int = 0  # served from the cache when it was admitted
    host_tokens: int = 0  # of them, from the host
    num_duplicates: int = 0  # pages that were computed here and known by the time of the commit
    duplicates: bool = False  # there are some of the last commit's, which are the lease's until the next one

    @property
    def output(self) -> list[int]:
        """The new tokens so far."""
        return self.tokens[len(self.prompt) :].tolist()

    @property
    def pages(self) -> list[int]:
        """Its page table; [] without a lease."""
        return [] if self.lease is None else self.lease.slots.tolist()


class _Work(NamedTuple):
    """A request's part of a step."""

    request: Request
    num_tokens: int
    state: int | None = None  # the own slot for the states that are needed to go on
    keep: int | None = None  # another for those that the cache is to have


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

    Where layers have windows, room for all of it would be many times what is needed at once. There pages come chunk by
    chunk and page by page, and what was slid past goes back with each commit; who finds none has the youngest start
    over, from what is cached by then, once another is done.

    Where layers keep states, they are committed at multiples of the daemon's interval, where the match of full
    attention alone would have ended (others branch off there), at the last whole page of the prompt but its last token,
    and of the answer. Chunks end there. A state for which there is no slot is left out.

    When the daemon's life ends, it joins the next one and computes again what is lost, from the tokens that there are
    by then: the words are the same.
    """

    client: Client
    executor: Executor
    step_tokens: int = 512
    max_running: int = 16
    reattach_s: float = REATTACH_S  # how long the daemon's next life is waited for
    num_steps: int = field(default=0, init=False)
    _waiting: deque[Request] = field(default_factory=deque, init=False)
    _running: list[Request] = field(default_factory=list, init=False)
    _begun: list[_Begun] = field(default_factory=list, init=False)
    _crowded: bool = field(default=False, init=False)  # one had to start over since another was done

    def __post_init__(self) -> None:
        if self.max_running < 1 or self.step_tokens < self.max_running:
            raise BadRequest(f"step_tokens = {self.step_tokens} must be max_running = {self.max_running} or more")
        self._page_size = self.client.geometry.page_size
        window, states = self.client.window, self.client.mamba
        self._interval = None if states is None else states.interval
        self._chunk: int | None = None  # tokens that get pages at once, where there are windows
        if window is not None:
            # Beside them a request holds its window, whose first page need not be a whole one of it.
            spare = window.geometry.num_pages - -(-window.tokens // self._page_size) - 1
            self._chunk = min(self.step_tokens, max(1, spare) * self._page_size)

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
        tenant: str | None = None,
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
            tenant,
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

        NoSpace: nothing else runs and others hold what the next request needs; it stays queued (`give_up`).
        Unavailable: the daemon is gone, and no life of it came within `reattach_s`; all are queued, and another step
        tries again.
        """
        try:
            return self._step()
        except DaemonRestarted:
            return self._attach_anew()

    def _step(self) -> list[Request]:
        self._settle()
        self._admit()
        work = self._choose()
        if not work:
            return []
        try:
            logits = self.executor.run([self._part(each) for each in work])
        except TransferError:
            self._acquire_anew()
            return []
        self.num_steps += 1
        row = 0
        for request, count, state, _ in work:
            request.loaded = True
            request.computed += count
            request.state = state
            if request.computed == len(request.tokens):
                self._take(request, logits[row])
                row += 1
        for each in work:
            self._commit(each.request, each.keep)
        self._record()
        finished = [request for request in self._running if request.done]
        self._crowded = self._crowded and not finished
        self._running = [request for request in self._running if not request.done]
        return finished

    def give_up(self) -> Request:
        """Drop the request that is next to be admitted, such as one that will never find room; it has no output."""
        return self._waiting.popleft()

    def settle(self) -> None:
        """Hear what became of the commits: page tables name the canonical pages from then on."""
        try:
            self._settle()
        except DaemonRestarted:
            self._attach_anew()

    def _settle(self) -> None:
        begun, self._begun = self._begun, []
        for pending, request in begun:
            committed = pending.wait()
            if committed is not None:
                request.num_duplicates += committed.num_duplicates
                request.duplicates = committed.num_duplicates > 0

    def close(self) -> None:
        """Drop what is waiting and running; what was committed stays cached."""
        with contextlib.suppress(DaemonRestarted):  # then there is nothing to give back
            self._settle()
            for request in self._running:
                if request.lease is not None:
                    self._release(request)
            self._record()
            self._settle()
        self._begun.clear()
        self._running.clear()
        self._waiting.clear()

    # -- a step ------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.max_running:
            if self._crowded and self._running:
                return
            request = self._waiting[0]
            tokens = request.tokens
            options: AcquireOptions = request.namespace._asdict()  # type: ignore[assignment]
            # The last token is always computed: its logits are what we are here for.
            options["limit"] = len(tokens) - 1
            if request.tenant is not None:
                options["tenant"] = request.tenant
            if self._chunk is not None:
                options["room"] = self._chunk
            else:  # the last new token is never computed, so it needs no room
                options["reserve"] = max(0, len(request.prompt) + request.max_new_tokens - 1 - len(tokens))
            if self._interval is not None:
                options["states"] = 1
            try:
                lease = self.client.acquire(tokens.tobytes(), **options)
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
            request.goal = len(tokens)
            request.state = request.kept = None
            request.duplicates = False

    def _choose(self) -> list[_Work]:
        """Who computes how many tokens: first all that decode, so that a long prompt holds up nobody."""
        left = self.step_tokens
        work = []
        for request in sorted(self._running, key=lambda each: len(each.tokens) - each.computed > 1):
            if request.lease is None:
                continue  # it made room for another
            count = min(left, len(request.tokens) - request.computed)
            if self._chunk is not None:
                count = min(count, self._chunk)
            if self._interval is not None:
                count = min(count, self._next_state(request) - request.computed)
            if count and self._grow(request, request.computed + count):
                work.append(_Work(request, count, *self._state_slots(request, request.computed + count)))
                left -= count
        return [each for each in work if each.request.lease is not None]

    def _next_state(self, request: Request) -> int:
        """The tokens after which the states are next to be committed."""
        assert request.lease is not None
        assert self._interval is not None
        computed, page = request.computed, self._page_size
        ends = [computed - computed % self._interval + self._interval, request.lease.reaches[0]]
        ends.append((request.goal - 1) // page * page if computed < request.goal else computed - computed % page + page)
        return min(end for end in ends if end > computed)

    def _grow(self, request: Request, upto: int) -> bool:
        """Pages for the first so many tokens; others may have to start over for that. False: it has to itself.

        NoSpace: it is alone.
        """
        lease = request.lease
        assert lease is not None
        while len(lease.slots) * self._page_size < upto:
            try:
                lease.extend(request.tokens[len(lease.tokens) : upto].tobytes(), upto=upto)
            except NoSpace:
                if self._give_back_duplicates():
                    continue
                youngest = self._running[-1]
                self._start_over([youngest])
                self._crowded = True
                if not self._running:
                    raise
                if youngest is request:
                    return False
                self._settle()
        return True

    def _give_back_duplicates(self) -> bool:
        """Whether there were any: pages of leases that the cache had already. An event behind their last use is due."""
        held = [request for request in self._running if request.duplicates]
        for request in held:
            assert request.lease is not None
            self._begun.append(_Begun(request.lease.commit_begin(request.committed), request))
        self._record()
        self._settle()
        return bool(held)

    def _state_slots(self, request: Request, end: int) -> tuple[int | None, int | None]:
        """Own slots for the states after so many tokens: to go on from, and for the cache, where it is to have them."""
        lease = request.lease
        assert lease is not None
        if lease.mamba is None:
            return None, None
        held = set(lease.mamba.slots.tolist())
        state = request.state if request.state is not None else min(held)
        if end % self._page_size or end not in (self._next_state(request), request.goal):
            return state, None
        kept = set() if request.kept is None else {request.kept.slot}
        if not kept and not held - {state}:
            try:
                lease.extend(states=1)
            except NoSpace:
                return state, None
            held = set(lease.mamba.slots.tolist())
        return state, min(kept or held - {state})

    def _part(self, work: _Work) -> Part:
        request, count, state, keep = work
        lease = request.lease
        assert lease is not None
        start, stop = request.computed, request.computed + count
        window = states = None
        if lease.window is not None:
            window = WindowPart(lease.window.first_page, lease.window.slots.tobytes())
        if lease.mamba is not None:
            assert state is not None
            source = lease.mamba.source if request.state is None else request.state
            states = StatePart(source, (state,) if keep is None else (state, keep))
        return Part(
            request.tokens[start:stop].tobytes(),
            start,
            lease.slots.tobytes(),
            None if request.loaded else lease.load,
            stop == len(request.tokens),
            window,
            states,
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

    def _commit(self, request: Request, keep: int | None) -> None:
        """Give the cache the whole pages that are new: of a prompt at once, of an answer when it is done, and before as
        far as the lease was told of it. `keep`: the slot that has the states after what is computed."""
        lease = request.lease
        assert lease is not None
        computed, states = request.computed, []
        if keep is not None:
            request.kept = State(computed, keep)
        # What an answer will be is not known, so of its whole pages the last one's state is kept until it is done.
        kept = request.kept
        if kept and (request.done or kept.tokens < request.goal or kept.tokens % (self._interval or 1) == 0):
            states.append(kept)
            request.kept = None
        known = len(lease.tokens)
        if computed > known and (request.done or states):  # it has the pages: this can't fail for lack of room
            lease.extend(request.tokens[known:computed].tobytes())
        whole = min(computed, len(lease.tokens)) // self._page_size * self._page_size
        if whole > request.committed or states:
            request.committed = whole
            self._begun.append(_Begun(lease.commit_begin(whole, states=states), request))
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

    def _attach_anew(self) -> list[Request]:
        """The daemon's life is over, and all leases with it: start over in its next one, ahead of who waits.

        Those that have their last token need nothing more: the cache lacks their end, and that is all.
        """
        finished = [request for request in self._running if request.done]
        self._waiting.extendleft(request for request in reversed(self._running) if not request.done)
        for request in self._running:
            request.lease = None
        self._running, self._crowded = [], False
        self._begun.clear()
        if self._waiting and not finished:  # else whoever needs the cache next meets it again
            self.executor.let_go()
            self.client.reattach(self.reattach_s)
            self.executor.reattach(self.client.token, self.reattach_s)
        return finished

    def _acquire_anew(self) -> None:
        """A load from the host failed, of one of those that were waited for.

        What the others wrote in this step they write again in the next.
        """
        self._start_over([request for request in self._running if not request.loaded])

    def _start_over(self, requests: Sequence[Request]) -> None:
        """Ahead of the rest, from what is cached by then."""
        for request in reversed(requests):
            self._running.remove(request)
            self._release(request)
            self._waiting.appendleft(request)
        self._record()
