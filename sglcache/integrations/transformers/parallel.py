"""A model whose heads are spread over processes: one worker for each shard of the pages, and the scheduler here.

    scheduler = sglcache.Client(role="scheduler")
    with ShardedModel(build, scheduler) as model:
        Runner(scheduler, model)

The scheduler owns leases and has no pages; each worker joins its session, maps one shard and computes its heads, and
the workers add up their parts with torch.distributed. What goes to a worker is what a step needs (`Part`: tokens, page
table, load) and the tickets of commits and releases, which it answers to the daemon, on its own connection, once all
work before them is done.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec
import torch
from torch import Tensor, distributed, nn

from sglcache.client import Worker
from sglcache.errors import ConfigError, DaemonRestarted, SglcacheError, Unavailable
from sglcache.integrations.transformers.model import PagedModel, Part

if TYPE_CHECKING:
    from sglcache.client import Client

STOP_S = 10.0  # how long a worker may take to end


class _Run(msgspec.Struct, tag="run"):
    parts: list[Part]


class _Record(msgspec.Struct, tag="record"):
    tickets: list[int]


class _Reattach(msgspec.Struct, tag="reattach"):
    token: bytes
    timeout_s: float


class _LetGo(msgspec.Struct, tag="let_go"):
    pass


class _Ready(msgspec.Struct, tag="ready"):
    """A worker is attached; or a step is done, and worker 0 tells the logits."""

    num_rows: int = 0
    logits: bytes = b""  # float32 [num_rows, vocab]
    vocab_size: int = 0  # said when it is attached


class _Failed(msgspec.Struct, tag="failed"):
    code: str
    message: str
    facts: dict[str, Any]


_encode = msgspec.msgpack.Encoder().encode
_to_worker = msgspec.msgpack.Decoder(_Run | _Record | _LetGo | _Reattach).decode
_from_worker = msgspec.msgpack.Decoder(_Ready | _Failed).decode


class ShardedModel:
    """An `Executor` over `scheduler.geometry.num_shards` processes, which end with it. One thread at a time.

    `build` makes the whole model, in each worker, which keeps its part: a module's function, or a partial of one.
    `context` starts the workers: by default each is a new Python, which imports torch and transformers by itself.
    Unavailable: a worker ended; the session is over then, and so is this.
    """

    def __init__(
        self, build: Callable[[], Any], scheduler: Client, context: SpawnContext | ForkServerContext | None = None
    ) -> None:
        context = context or multiprocessing.get_context("spawn")
        num_shards = scheduler.geometry.num_shards
        self._folder = tempfile.TemporaryDirectory(prefix="sglcache-workers-")
        self._pipes: list[Connection] = []
        self._processes = []
        try:
            for shard in range(num_shards):
                ours, theirs = context.Pipe()
                place = (str(scheduler.socket), scheduler.token, shard, num_shards, f"{self._folder.name}/meet")
                process = context.Process(target=_work, args=(theirs, build, *place), daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
            self.vocab_size = self._hear()[0].vocab_size
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The workers, by shard."""
        return [process.pid or 0 for process in self._processes]

    def run(self, parts: Sequence[Part]) -> Tensor:
        self._tell(_Run(list(parts)))
        first = self._hear()[0]
        if not first.num_rows:
            return torch.empty(0)
        return torch.frombuffer(bytearray(first.logits), dtype=torch.float32).view(first.num_rows, -1)

    def record(self, tickets: Sequence[int]) -> None:
        if tickets:
            self._tell(_Record(list(tickets)))

    def let_go(self) -> None:
        self._tell(_LetGo())
        self._hear()

    def reattach(self, token: bytes, timeout_s: float) -> None:
        self._tell(_Reattach(token, timeout_s))
        self._hear()

    def close(self) -> None:
        """End the workers. Idempotent."""
        for pipe in self._pipes:
            pipe.close()  # their sign to leave
        for process in self._processes:
            process.join(STOP_S)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _tell(self, message: _Run | _Record | _LetGo | _Reattach) -> None:
        payload = _encode(message)
        for shard, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(payload)
            except OSError:
                raise self._gone(shard) from None

    def _hear(self) -> list[_Ready]:
        """Each worker's answer. What one of them failed with, after all have answered, is raised."""
        answers = []
        for shard, pipe in enumerate(self._pipes):
            try:
                answers.append(_from_worker(pipe.recv_bytes()))
            except (EOFError, OSError):
                raise self._gone(shard) from None
        for answer in answers:
            if isinstance(answer, _Failed):
                raise SglcacheError.from_code(answer.code, answer.message, answer.facts)
        return [answer for answer in answers if isinstance(answer, _Ready)]

    def _gone(self, shard: int) -> Unavailable:
        process = self._processes[shard]
        process.join(STOP_S)
        return Unavailable(f"worker {shard} (pid {process.pid}) ended with {process.exitcode}; attach anew")


def _work(
    pipe: Connection,
    build: Callable[[], Any],
    socket: str,
    token: bytes,
    shard: int,
    num_shards: int,
    rendezvous: str,
) -> None:
    """A worker's life: attach, compute what comes down the pipe, and leave when its other end is closed."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the shards of a rank are on one host
    with contextlib.suppress(EOFError), pipe:
        distributed.init_process_group("gloo", init_method=Path(rendezvous).as_uri(), rank=shard, world_size=num_shards)
        try:
            model = build()
            shard_model(model, shard, num_shards)
            with Worker(token, shard, socket, name=f"worker {shard}") as member:
                paged = PagedModel(model, member)
                pipe.send_bytes(_encode(_Ready(vocab_size=paged.vocab_size)))
                while True:
                    message = _to_worker(pipe.recv_bytes())
                    if isinstance(message, _Run):
                        pipe.send_bytes(_encode(_compute(paged, message.parts, tell=shard == 0)))
                    elif isinstance(message, _Reattach):
                        pipe.send_bytes(_encode(_join(paged, message)))
                    elif isinstance(message, _LetGo):
                        paged.let_go()
                        pipe.send_bytes(_encode(_Ready()))
                    else:
                        with contextlib.suppress(DaemonRestarted):  # the scheduler meets it, too, and says what next
                            for ticket in message.tickets:
                                member.record(ticket)
        except SglcacheError as exc:
            pipe.send_bytes(_encode(_Failed(exc.code, exc.message, exc.facts)))
        finally:
            distributed.destroy_process_group()


def _compute(paged: PagedModel, parts: Sequence[Part], tell: bool) -> _Ready | _Failed:
    try:
        logits = paged.run(parts)
    except SglcacheError as exc:  # a load that fails, or a daemon that dies, does so for every shard before they meet
        return _Failed(exc.code, exc.message, exc.facts)
    return _Ready(len(logits), logits.float().numpy().tobytes()) if tell else _Ready()


def _join(paged: PagedModel, message: _Reattach) -> _Ready | _Failed:
    try:
        paged.reattach(message.token, message.timeout_s)
    except SglcacheError as exc:
        return _Failed(exc.code, exc.message, exc.facts)
    return _Ready()


WHOLE = (None, "replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj")
"""Styles of what every shard has all of: norms, routers, what makes latents."""
ADDED_UP = ("rowwise", "moe_tp_experts")
"""Styles of modules of which each shard computes a summand."""
CUT = ("colwise", "rowwise", "packed_colwise")
"""Styles of weights: by what goes out, by what comes in, and by what goes out of two layers in one."""


def shard_model(model: Any, shard: int, num_shards: int) -> None:
    """Keep one shard's part of every layer, after transformers' own plan for the model; the output layer stays whole.

    ConfigError: the plan has what is not done here, or something does not divide by `num_shards`.
    """
    plan = model.config.base_model_tp_plan or {}
    num_heads = model.config.get_text_config().num_attention_heads
    if num_heads % num_shards:
        raise ConfigError(f"{num_heads} heads can't be divided by {num_shards}")
    for name, module in model.base_model.named_modules():
        general = re.sub(r"\.\d+", ".*", name)
        style = plan.get(general)
        # A linear layer has one style, experts have one for each of their stacked weights.
        linear = style if isinstance(module, nn.Linear) else None
        for each, whole in list(module.named_parameters(recurse=False)):
            how = plan.get(f"{general}.{each}", linear)
            if how in WHOLE and style not in ADDED_UP:
                continue
            if how not in CUT:
                raise ConfigError(f"{name}.{each} is sharded {how} ({style}); that is not done here")
            setattr(module, each, nn.Parameter(_part(name, whole, how, shard, num_shards), requires_grad=False))
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        if style in ADDED_UP:
            module.register_forward_hook(_add_up)
        elif style not in (*WHOLE, *CUT):
            raise ConfigError(f"{name} is sharded {style}; that is not done here")


def _part(name: str, whole: Tensor, style: str, shard: int, num_shards: int) -> Tensor:
    """A copy of one shard's part: of [out, in], of a bias [out], or of stacked experts [num_experts, out, in]."""
    if style == "rowwise" and whole.dim() == 1:  # a bias, which is added once
        return whole.detach().clone() if shard == 0 else torch.zeros_like(whole)
    dim = whole.dim() - 1 if style == "rowwise" else max(0, whole.dim() - 2)
    layers = whole.detach().chunk(2 if style == "packed_colwise" else 1, dim)
    if layers[0].shape[dim] % num_shards:
        raise ConfigError(f"{name} of {tuple(whole.shape)} can't be divided by {num_shards}")
    return torch.cat([layer.chunk(num_shards, dim)[shard] for layer in layers], dim)


def _add_up(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    distributed.all_reduce(output)
    return output
