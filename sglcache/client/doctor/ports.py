"""What comes out of a rank's two ports, message by message, and whether that is what /server_info says."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import zmq

from sglcache.client.discovery import Server, Source
from sglcache.client.doctor.finding import Finding, failed, ok
from sglcache.client.mirror import END_SEQ, Curve
from sglcache.errors import ProtocolError
from sglcache.wire.events import BlockStored, decode_batch, forms_of


@dataclass
class Heard:
    """What a rank's two ports gave."""

    live: bool = False  # a batch, if only a heartbeat
    ended: bool = False  # the replay came to its END
    replayed: int = 0
    anew: bool = False  # it began with AllBlocksCleared
    bad: int = 0
    topics: set[bytes] = field(default_factory=set)
    ranks: set[int | None] = field(default_factory=set)
    sizes: set[int] = field(default_factory=set)
    forms: set[str] = field(default_factory=set)
    withheld: bool = False

    @property
    def form(self) -> str | None:
        """The encoding; None: nothing has shown it yet."""
        return next((each for each in ("array", "superset", "map") if each in self.forms), None)


def listen(source: Source, curve: Curve | None, timeout_s: float) -> Heard:
    """Read both ports: the replay to its END, and one live message."""
    heard = Heard()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        poller = zmq.Poller()
        sub, dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        for sock in (sub, dealer):
            sock.setsockopt(zmq.IPV6, int("[" in source.endpoint))
            if curve is not None:
                curve.apply(sock)
        sub.subscribe("")  # a wrong topic is a finding
        sub.connect(source.endpoint)
        poller.register(sub, zmq.POLLIN)
        if source.replay_endpoint is not None:
            dealer.connect(source.replay_endpoint)
            dealer.send_multipart([b"", bytes(8)])
            poller.register(dealer, zmq.POLLIN)
        deadline = time.monotonic() + timeout_s
        while not (heard.live and (heard.ended or source.replay_endpoint is None)):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            for sock, _ in poller.poll(int(left * 1000) + 1):
                frames = sock.recv_multipart()
                if sock is sub:
                    heard.live = _take(heard, frames) or heard.live
                elif frames[-2:] == [END_SEQ, b""]:
                    heard.ended = True
                elif _take(heard, frames[1:]):
                    deadline = time.monotonic() + timeout_s  # a long one may take long
                    heard.replayed += 1
    finally:
        context.destroy(linger=0)
    return heard


def _take(heard: Heard, frames: list[bytes]) -> bool:
    """False: it is not a message of the stream."""
    try:
        topic, seq, payload = frames
        if len(seq) != 8:
            raise ProtocolError("a number of 8 bytes")
        batch = decode_batch(payload)
        heard.forms |= forms_of(payload)
    except (ProtocolError, ValueError):
        heard.bad += 1
        return False
    heard.topics.add(topic)
    heard.ranks.add(batch.attn_dp_rank)
    heard.anew = heard.anew or (not heard.replayed and batch.starts_anew)
    for event in batch.events:
        if isinstance(event, BlockStored):
            heard.sizes.add(event.block_size)
            heard.withheld = heard.withheld or not event.token_ids
    return True


def judge(source: Source, heard: Heard, server: Server) -> Iterator[Finding]:
    rank = f"rank {source.rank}"
    if heard.live:
        yield ok(f"{rank} live", f"batches come at {source.endpoint}")
    else:
        yield failed(
            f"{rank} live",
            f"nothing came at {source.endpoint}, not even a heartbeat",
            "open that port to this host; say --curve-server-key if it has one; events.mode = connect lets none dial",
        )
    if source.replay_endpoint is None:
        yield failed(
            f"{rank} replay",
            "/server_info names no replay_endpoint_port_base: gaps stay, and who joins late knows nothing",
            "give events.replay_endpoint a tcp:// address",
        )
    elif not heard.ended:
        yield failed(
            f"{rank} replay",
            f"no END came from {source.replay_endpoint} after {heard.replayed} messages",
            "open that port to this host; a router that waits for it hangs, so register none before it answers",
        )
    elif not heard.anew:
        yield failed(
            f"{rank} replay",
            "an answer from number 0 does not begin with AllBlocksCleared: what came before it is lost",
            "update the daemon",
        )
    else:
        yield ok(f"{rank} replay", f"{heard.replayed} messages and an END from {source.replay_endpoint}")
    if heard.bad:
        yield failed(
            f"{rank} batches",
            f"{heard.bad} messages could not be read",
            f"look who else publishes at {source.endpoint}",
        )
    if other := sorted(heard.topics - {source.topic.encode()}):
        yield failed(
            f"{rank} topic",
            f"/server_info says {source.topic!r}, the stream says {other[0].decode(errors='replace')!r}",
            "subscribe to what the stream says; another publisher may have the port",
        )
    if others := sorted(heard.ranks - {source.rank}, key=str):
        yield failed(
            f"{rank} number",
            f"batches at its port say rank {others[0]}",
            "look which rank binds that port: the port must be the base plus the rank",
        )
    if wrong := sorted(heard.sizes - {server.block_size}):
        yield failed(
            f"{rank} block size",
            f"/server_info says {server.block_size} tokens, the stream {wrong}",
            "register with the stream's size: an indexer drops every block of another",
        )


def agree(heard: Mapping[int, Heard]) -> Iterator[Finding]:
    forms = {each.form for each in heard.values()} - {None}
    if len(forms) > 1 or any({"array", "map"} <= each.forms for each in heard.values()):
        yield failed(
            "encoding", f"events have several forms: {sorted(map(str, forms))}", "give all ranks one events.encoding"
        )
    elif forms:
        yield ok("encoding", f"{forms.pop()}")
