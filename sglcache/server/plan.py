"""Which ranks a host runs, and where the sockets of each are: decided, and checked as a whole, before anything starts.

A rank's offset is pp_rank * dp_size + dp_rank. So the first stage of replica d is at port base + d whatever the number
of stages, which is where every router dials, and later stages come behind all replicas.
"""

from __future__ import annotations

from collections import defaultdict
from os.path import commonprefix
from pathlib import Path
from socket import gethostname
from typing import NamedTuple

from msgspec import Struct

from sglcache import paths
from sglcache.config import Config
from sglcache.errors import ConfigError
from sglcache.net import endpoints
from sglcache.net.endpoints import Endpoint, Tcp

LIVE, REPLAY = "events.endpoint", "events.replay_endpoint"


class Seat(Struct, frozen=True):
    """One rank's place. Its lives come and go; this stays."""

    offset: int
    dp_rank: int
    pp_rank: int
    socket: str  # the control socket's path
    endpoint: str | None  # None: events are off
    replay_endpoint: str | None
    topic: str = ""  # the first frame of every message

    def __str__(self) -> str:
        return f"rank {self.offset} (dp {self.dp_rank}, pp {self.pp_rank})"


def plan(config: Config) -> list[Seat]:
    """The seats of this host, by offset. ConfigError: a port would leave 1..65535, or two sockets would be one."""
    dp_size, pp_size = config.parallel.dp_size, config.parallel.pp_size
    events = config.events
    connect = events.mode == "connect"  # then all ranks dial the one subscriber; their topics tell them apart
    if events.enabled:
        for key, text in ((LIVE, events.endpoint), (REPLAY, events.replay_endpoint)):
            if not (connect and key == LIVE):
                endpoints.parse(text, key).offset(dp_size * pp_size - 1, key)
    seats = []
    for dp_rank, pp_rank in config.parallel.local():
        offset = pp_rank * dp_size + dp_rank
        socket = config.control.socket
        path = paths.beside(socket, offset) if socket is not None else paths.socket_path(offset)
        live: Endpoint | None = None
        replay: Endpoint | None = None
        if events.enabled:
            live = endpoints.parse(events.endpoint, LIVE).offset(0 if connect else offset, LIVE)
            replay = endpoints.parse(events.replay_endpoint, REPLAY).offset(offset, REPLAY)
        places = [str(it) if it is not None else None for it in (live, replay)]
        topic = topic_of(config, offset, dp_size)
        seats.append(Seat(offset, dp_rank, pp_rank, str(path), places[0], places[1], topic))
    _refuse_overlaps(config, seats)
    return seats


def _refuse_overlaps(config: Config, seats: list[Seat]) -> None:
    """ConfigError, naming both, if no two sockets of the host can be bound at once."""
    taken: dict[object, list[tuple[str, str, Endpoint]]] = defaultdict(list)
    wanted: list[tuple[str, str, Endpoint]] = []
    if config.http.enabled:
        wanted.append(("the supervisor", "http.port", Tcp(config.http.host, config.http.port)))
    for seat in seats:
        for key, text in ((LIVE, seat.endpoint), (REPLAY, seat.replay_endpoint)):
            if text is not None and not (key == LIVE and config.events.mode == "connect"):
                wanted.append((str(seat), key, endpoints.parse(text, key)))
    for who, key, endpoint in wanted:
        if isinstance(endpoint, Tcp) and not endpoint.port:
            continue  # the system's choice
        near = taken[endpoint.port if isinstance(endpoint, Tcp) else Path(endpoint.path).name]
        for other, other_key, there in near:
            if endpoints.collide(endpoint, there):
                raise ConfigError(
                    f"{key}: {endpoint} of {who} is {other_key} of {other} too ({there}); rank r has each base + r, "
                    f"so keep the bases {config.parallel.dp_size * config.parallel.pp_size} or more apart",
                    path=key,
                    ranks=[other, who],
                )
        near.append((who, key, endpoint))


def topic_of(config: Config, offset: int, dp_size: int = 1) -> str:
    """The first frame of every message of rank `offset`."""
    return config.events.topic.format(
        host=gethostname(),
        model=config.model_name,
        rank=offset,
        dp_rank=offset % dp_size,
        pp_rank=offset // dp_size,
    )


def kv_events(config: Config, seats: list[Seat]) -> dict[str, object] | None:
    """The block of /server_info by which routers find the streams, as SGLang gives it; None where they could not.

    `seats` have the endpoints as bound. A subscriber dials port base + r on the host that it asked, for r in
    0..dp_size-1: the first pipeline stage's. `endpoint_host` is always "*": one consumer refuses to start on anything
    else. `topic` is what the ranks' topics begin with, for a subscription is to a beginning. Where the system chose the
    ports of several ranks there is no base, and where a host has later stages only, or its ranks dial, there is nothing
    to dial: the ranks of /server_info then say where each is.
    """
    first = [seat for seat in seats if seat.pp_rank == 0]
    live = _base([(seat.offset, seat.endpoint) for seat in first])
    if live is None or config.events.mode == "connect":
        return None
    block: dict[str, object] = {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": live,
        "topic": commonprefix([seat.topic for seat in first]),  # noqa: RUF071  # of text, not of a path
        "block_size": config.pool.page_size,
        "dp_size": config.parallel.dp_size,
    }
    replay = _base([(seat.offset, seat.replay_endpoint) for seat in first])
    if replay is not None:
        block["replay_endpoint_port_base"] = replay
    return block


class ToldGroup(NamedTuple):
    """What a stream tells of beside full KV, in the words of vLLM's events."""

    group_idx: int
    kind: str
    window: int | None  # tokens; None: states


def told_groups(config: Config) -> list[ToldGroup]:
    """In the order of the index's companions; none where `events.groups` does not ask for them."""
    found: list[ToldGroup] = []
    if config.events.groups and config.window is not None:
        latents = config.pool.kv_lora_rank is not None and config.window.num_kv_heads is None
        found.append(ToldGroup(1, "sliding_window_mla" if latents else "sliding_window", config.window.size))
    if config.events.groups and config.mamba is not None:
        found.append(ToldGroup(len(found) + 1, "mamba", None))
    return found


def _base(bound: list[tuple[int, str | None]]) -> int | None:
    """The port that each of these is its offset above; None if there is none such."""
    bases = set()
    for offset, text in bound:
        endpoint = endpoints.parse(text) if text is not None else None
        bases.add(endpoint.port - offset if isinstance(endpoint, Tcp) and endpoint.port else 0)
    base = bases.pop() if len(bases) == 1 else 0
    return base if base > 0 else None
