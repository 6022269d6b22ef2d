"""The control socket's words: a unix stream of frames, each a 4-byte big-endian length and one msgpack array.

A connection starts with `Hello` and its answer, `Welcome` or `Refusal`, each with file descriptors beside
it (SCM_RIGHTS). From then on the client sends commands, pipelined as it likes, and each command that has a
`request` number gets exactly one `Reply` or `Failure` with that number; answers may overtake each other. A `Release`
of request 0 has none.
Token ids are raw uint32 little-endian, slots raw int32 little-endian. Nothing here is ever unpickled.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
from msgspec import Meta, Struct

PROTOCOL = 9  # raised when an old peer would misread a new one
MAX_FRAME = 16 << 20  # bytes, the length's 4 bytes not counted
HEADER = 4
MAX_FDS = 253  # beside one byte: the kernel's SCM_MAX_FD

U31 = Annotated[int, Meta(ge=0, lt=1 << 31)]
U63 = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
MAX_COUNT = (1 << 31) - 1
MAX_NAME = 256  # characters
MAX_SALT = 4096
MAX_TTL_S = 86400.0
PREFETCH_POLICIES = ("none", "best_effort", "timeout", "wait_complete")
MAX_EXTENSIONS = 1024  # leases of one Extend: about 2 ms of the daemon's time
CHECKS = ("books", "digests", "journal", "third", "sessions", "descriptors", "memory")
MAX_COMPANIONS = 8  # resources of a tree beside Full
MAX_ENDS = 1024  # states of one Commit
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Salt = Annotated[str, Meta(max_length=MAX_SALT)]
Tokens = Annotated[bytes, Meta(max_length=MAX_FRAME)]
Spare = Annotated[tuple[U31, ...], Meta(max_length=MAX_COMPANIONS)]
"""For each companion, how many slots of its own a lease gets: of one by end. What is missing is 0."""
Ends = Annotated[tuple[tuple[U31, U31, U31], ...], Meta(max_length=MAX_ENDS)]
"""(number of the companion from 0, tokens, slot): this slot of the lease's own holds the state at their end."""
Wait = Annotated[float, Meta(ge=0, le=MAX_TTL_S)] | None
"""Seconds to wait for room that others lock; 0: it is refused at once; None: as the daemon is configured."""
WireShare = tuple[int, bytes, int | None]
"""(first, slots, source) of a core.effects.Share; its place is that of its resource among the Welcome's companions."""


class Frame(Struct, array_like=True, tag=True, forbid_unknown_fields=True, gc=False):
    """Every message is `[tag, fields...]`. Fields are added at the end, with defaults."""


# -- the first frame on each side ---------------------------------------------------------------------


class Hello(Frame):
    """Client's first frame. Descriptors beside it, for a role that touches pages: [event ring memfd, doorbell eventfd].

    The event ring is uint64 [num_events] in the memfd: event i of generation g is done once ring[i] >= g.
    The client writes the ring, then adds 1 to the doorbell; it need not ring for an event that it names after that.
    Where pools are on cards a stream may write the ring: the daemon looks at events that it waits for by itself, too.
    """

    protocol: int
    client: Name  # for people: shown in `status`
    role: str  # "runner" (scheduler and only worker in one), "scheduler", "worker", "observer", "admin"
    session: bytes = b""  # a worker's: the token that the scheduler's Welcome carried
    shard: U31 = 0  # a worker's
    num_events: U31 = 0


class PoolHandle(Frame):
    """One shard's device pool: a memfd."""

    shard: int
    num_bytes: int
    fd_index: int  # which of the descriptors beside the Welcome


class CudaPoolHandle(Frame):
    """One shard's device pool on a card: a descriptor for cuMemImportFromShareableHandle."""

    shard: int
    num_bytes: int
    fd_index: int
    device_uuid: bytes  # 16 bytes, of cuDeviceGetUuid
    mapped_bytes: int  # of the allocation, a multiple of the card's granularity: so much is to be mapped


class CudaIpcHandle(Frame):
    """One shard's device pool on a card, by legacy IPC; no descriptor is its."""

    shard: int
    num_bytes: int
    device_uuid: bytes
    handle: bytes  # 64 bytes, of cuIpcGetMemHandle, of the allocation that the pool lies in
    offset: int  # of the pool in it


Pool = PoolHandle | CudaPoolHandle | CudaIpcHandle


class Geometry(Frame):
    """What a page holds and how the pages of a pool lie; `sglcache.memory.geometry` says what that means.

    A shard keeps of a token, in each layer, K [shard_heads, head_dim] and V [shard_heads, v_head_dim]; or, with a
    kv_lora_rank, one row of kv_lora_rank + qk_rope_head_dim, which is head_dim, then num_kv_heads is 1 and v_head_dim
    0. A page_first pool is [num_pages][num_layers][K, V][page_size] of these, a layer_first one
    [num_layers][K, V][num_pages][page_size].
    """

    page_size: int
    num_pages: int
    num_layers: int
    num_kv_heads: int  # of the model; with more shards than heads, neighbouring shards have the same one
    head_dim: int
    v_head_dim: int
    dtype: str  # torch's name: float16, bfloat16, float32, float8_e4m3fn, float8_e5m2
    layout: str  # page_first, layer_first
    num_shards: int
    host_pages: int
    host_layout: str
    kv_lora_rank: int
    qk_rope_head_dim: int


class StateForm(NamedTuple):
    """One of the arrays that the state of a layer is made of."""

    name: str
    shape: tuple[int, ...]  # of all shards together, which split the first axis
    dtype: str


class StateGeometry(Frame):
    """What a slot holds in a pool of states, which is for a slot what `Geometry` is for a page.

    A page_first pool is [num_pages][num_layers][states] of these, a layer_first one [num_layers][states][num_pages]; a
    state of a layer takes a multiple of 16 bytes.
    """

    num_pages: int  # slots
    num_layers: int
    states: tuple[StateForm, ...]
    layout: str
    num_shards: int
    host_pages: int
    host_layout: str


class CompanionHandle(Frame):
    """What layers keep that don't keep every token's KV: their pools, as those of the Welcome itself."""

    kind: str  # window, mamba
    geometry: Geometry | StateGeometry
    pools: list[Pool]
    window: int = 0  # tokens that a query sees, itself among them; 0: of a window this is none
    interval: int = 0  # tokens between the states that a runner should commit; 0: of states this is none
    layers: list[int] = []  # the model's numbers of these layers; []: nobody said


class Welcome(Frame):
    """The daemon's answer. Descriptors: the pools', then each companion's; if the role touches pages, then [load
    ring memfd, doorbell]. Of more than MAX_FDS, each MAX_FDS come beside some byte of the frame, in their order.

    The load ring is uint64 [num_load_slots * n], written by the daemon: layer l of a load in slot s with generation g
    is readable once ring[s * n + l] >= g, and what companions have of the load is by then, too. n is num_layers, or 1
    where there are none. The doorbell eventfd is this member's own.
    """

    protocol: int
    epoch: U63
    version: str
    session: bytes  # the token for workers; 16 random bytes
    geometry: Geometry
    pools: list[Pool]
    num_load_slots: int
    dp_rank: U31  # whose pages these are, so that a client knows that they are those it wants
    pp_rank: U31
    dp_size: U31
    pp_size: U31
    companions: list[CompanionHandle] = []


class Refusal(Frame):
    """Instead of a Welcome; the connection closes."""

    code: str
    message: str
    facts: dict[str, Any]


# -- commands -----------------------------------------------------------------------------------------


class Acquire(Frame):
    request: U63
    tokens: Tokens
    lora: Name | None = None
    extra_key: Salt | None = None
    cache_salt: Salt | None = None
    session_id: Name | None = None
    tenant: Name | None = None
    priority: int = 0  # for the policy of eviction of that name
    limit: U31 | None = None  # match at most this many tokens
    reserve: U31 = 0  # room for this many tokens more
    exact: U31 | None = None  # match this many tokens, a multiple of the page size, or answer `Changed`
    room: U31 | None = None  # pages for the match and this many tokens beyond it; None: for all, and `reserve`
    prefetch: Name | None = None  # one of PREFETCH_POLICIES; None: as the daemon is configured
    prefetch_timeout_s: Annotated[float, Meta(ge=0, le=MAX_TTL_S)] | None = None  # instead of the daemon's
    spare: Spare = ()
    wait_s: Wait = None
    request_id: Name | None = None  # what the client calls it: `Explain` finds it by that


class Extension(NamedTuple):
    """What one lease gets: tokens, and pages for all it has then and `reserve` more; for the first `upto` at most; and
    of each companion by end so many `spare` slots more."""

    lease: U63
    tokens: Tokens = b""
    reserve: U31 = 0
    upto: U31 | None = None
    spare: Spare = ()


class Extend(Frame):
    """More tokens or pages for leases, each for itself: where one fails the others are as they would be without it."""

    request: U63
    items: Annotated[list[Extension], Meta(max_length=MAX_EXTENSIONS)]
    wait_s: Wait = None


class Commit(Frame):
    """Give the lease's whole pages up to `tokens` to the index, once `ticket` is done on every shard.

    `ticket` numbers rise by one per Commit, Release and Bye of a session. `seen` is the highest `reply`
    number the scheduler had read when it sent this. A runner names its event here; with workers it is 0, 0
    and each worker sends Recorded. The states of `ends` are given with the pages. Before that, what the lease owns of
    companions by page wholly before `floor` is given up.
    """

    request: U63
    lease: U63
    ticket: U63
    seen: U63
    tokens: U31 | None = None  # None: all that the lease has
    event: U31 = 0
    generation: U63 = 0
    ends: Ends = ()
    floor: U31 | None = None  # tokens; None: it keeps them until the commit


class Release(Frame):
    """End the lease when `ticket` is done. With `discard` its commits that have not taken effect are dropped.

    Of request 0 there is no answer, whatever comes of it: what its sender does next comes after it all the same.
    """

    request: U63
    lease: U63
    ticket: U63
    seen: U63
    discard: bool = False
    event: U31 = 0
    generation: U63 = 0


class Cancel(Frame):
    """Give a lease back at once, whose pages nobody has touched or was told of: there is no use to wait for."""

    request: U63
    lease: U63


class Recorded(Frame):
    """A worker's: I have recorded `event` behind all my work for `ticket`. No answer."""

    request: ClassVar[None] = None
    ticket: U63
    event: U31
    generation: U63


class Peek(Frame):
    """How long a match would be, without changing anything."""

    request: U63
    tokens: Tokens
    lora: Name | None = None
    extra_key: Salt | None = None
    cache_salt: Salt | None = None


class Prefetch(Frame):
    """Bring to the host what only the third tier has of `tokens`; answered when that is over, or as `policy` says."""

    request: U63
    tokens: Tokens
    lora: Name | None = None
    extra_key: Salt | None = None
    cache_salt: Salt | None = None
    policy: Name | None = None  # as an Acquire's `prefetch`
    timeout_s: Annotated[float, Meta(ge=0, le=MAX_TTL_S)] | None = None  # of policy timeout, instead of the daemon's
    tenant: Name | None = None  # who is charged with the pages


class Pin(Frame):
    """Keep what is cached of `tokens` from eviction for `ttl_s` seconds, in the name of `owner`."""

    request: U63
    tokens: Tokens
    owner: Name
    ttl_s: Annotated[float, Meta(gt=0, le=MAX_TTL_S)]
    lora: Name | None = None
    extra_key: Salt | None = None
    cache_salt: Salt | None = None


class Unpin(Frame):
    """Let go of all that this session pinned in the name of `owner`; of none is no error."""

    request: U63
    owner: Name


class Clear(Frame):
    """Drop every cached page, of one tier ("DEVICE", "HOST", "DISK", "EXTERNAL") or of the first two."""

    request: U63
    tier: Name | None = None


class Ping(Frame):
    request: U63


class Status(Frame):
    """Counts, sessions, stream; with `prove`, law 4 checked slot by slot."""

    request: U63
    prove: bool = False


class Dump(Frame):
    """Every block hash in a tier, as of a number of the stream. `Changed` if the index did not hold still."""

    request: U63
    tier: Name


class Digest(Frame):
    """What who has read every batch up to a number must have, by tier."""

    request: U63


class Reuse(Frame):
    """What the tiers hit, and what more of one would add. BadRequest: nothing is followed."""

    request: U63


class Explain(Frame):
    """Why so much of `tokens` is a hit, and no more; or of an earlier acquire, by the `name` that its request_id gave
    it or as "#" and the daemon's number of it; or a list of the `last` ones. See core.explain."""

    request: U63
    tokens: Tokens = b""
    lora: Name | None = None
    extra_key: Salt | None = None
    cache_salt: Salt | None = None
    limit: U31 | None = None
    name: Name | None = None
    last: U31 = 0


class Announce(Frame):
    """Tell all that is cached anew on the stream, for subscribers that can't ask for a replay."""

    request: U63


class EvictSession(Frame):
    """End another's session, as its own member's death would. Its pages stay fenced while a process that touches them
    lives; with `kill` these, and its scheduler, get SIGKILL, by their descriptors, not their numbers."""

    request: U63
    session: U63
    kill: bool = False


class SetTenant(Frame):
    """Change limits of a tenant, or make it: tokens, or a share of the tier ("25%"); a ceiling may be "none". What is
    None stays as it is. They hold at once, and for the rank's later lives under the same supervisor."""

    request: U63
    tenant: Name
    device_floor: U63 | Name | None = None
    device_ceiling: U63 | Name | None = None
    host_floor: U63 | Name | None = None
    host_ceiling: U63 | Name | None = None


class Check(Frame):
    """Prove one thing of the live rank, in slices: one of `CHECKS`. Done with `checked`, how much was looked at,
    `violations`, the first few in words, and `num_violations`; or with `skipped` or `overtaken`: why there is no
    result.
    """

    request: U63
    name: Name


class Bye(Frame):
    """The member's last word: its uses end with this event (a scheduler that touches nothing sends 0, 0)."""

    request: U63
    event: U31 = 0
    generation: U63 = 0


class CancelRequest(Frame):
    """Let the scheduler's request `target` wait no longer, for room, for a copy or for the third tier.

    Then it is answered by a Failure of code "cancelled", and the Done of this says {"cancelled": true}. One that does
    not wait is answered as it would be.
    """

    request: U63
    target: U63


Command = (
    Acquire
    | Extend
    | Commit
    | Release
    | Cancel
    | Recorded
    | Peek
    | Prefetch
    | Pin
    | Unpin
    | Clear
    | Ping
    | Status
    | Dump
    | Digest
    | Reuse
    | Explain
    | Announce
    | Check
    | Bye
    | EvictSession
    | CancelRequest
    | SetTenant
)


# -- answers ------------------------------------------------------------------------------------------


class Granted(Frame):
    """To Acquire: see core.effects.Grant.

    `load` = [load slot, generation] where something is loaded from the host; None there: it is readable already.
    `shares` has one for each companion; where there are none, `reaches` may be empty, too.
    """

    request: int
    lease: int
    matched_tokens: int
    host_tokens: int
    slots: bytes
    load: tuple[int, int] | None = None
    shares: tuple[WireShare, ...] = ()
    reaches: tuple[int, ...] = ()


class Fault(Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """Why one of several things was not done, as in a Failure."""

    code: str
    message: str
    facts: dict[str, Any]


class Extended(Frame):
    """To Extend: for each item, in order, the slots of its new pages, at the table's end, or why it has none.

    `shares`, where there are companions, is beside it: for each item each companion's new slots; none where it failed.
    """

    request: int
    results: list[bytes | Fault]
    shares: list[tuple[bytes, ...]] = []


class CommitDone(Frame):
    """To Commit: see core.effects.Committed."""

    request: int
    committed_tokens: int
    first_page: int
    slots: bytes
    num_duplicates: int
    reply: int
    shares: tuple[WireShare, ...] = ()


class Done(Frame):
    """To Release, Cancel, Unpin, Clear, Ping, Bye, Peek, Prefetch, Pin, Status, Dump, EvictSession, ...: the numbers,
    by name."""

    request: int
    facts: dict[str, Any] = {}


class Failure(Frame):
    """Instead of the answer; the state is as it was. request 0: it concerns the connection, which closes."""

    request: int
    code: str
    message: str
    facts: dict[str, Any]


Answer = Granted | Extended | CommitDone | Done | Failure

# msgspec encoders hold no state between calls.
_encoder = msgspec.msgpack.Encoder()
encode, encode_into = _encoder.encode, _encoder.encode_into


def frame(message: Frame) -> bytes:
    """The message as it goes on the socket: its length, then itself."""
    payload = encode(message)
    return len(payload).to_bytes(HEADER, "big") + payload
