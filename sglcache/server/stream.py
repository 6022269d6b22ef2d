"""A rank's stream, put together: the publisher as configured, and the index's snapshots for those who come late."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable

from sglcache.config import Config, EventsConfig
from sglcache.core.encoding import Format
from sglcache.core.index import Index
from sglcache.core.snapshot import Snapshot
from sglcache.net import endpoints
from sglcache.net.curve import Curve
from sglcache.net.publisher import Publisher

logger = logging.getLogger("sglcache.stream")

KEYS = ("events.endpoint", "events.replay_endpoint")


def format_of(events: EventsConfig) -> Format:
    """How the index is to tell of blocks."""
    return Format(
        encoding=events.encoding,
        extra_key_as=events.extra_key_as,
        hash_salts=events.cache_salt == "hashed",
        withhold_tokens=events.token_ids == "none",
    )


def topic_of(config: Config, offset: int, dp_size: int = 1) -> str:
    """The first frame of every message of rank `offset`."""
    return config.events.topic.format(
        host=socket.gethostname(),
        model=config.model_name,
        rank=offset,
        dp_rank=offset % dp_size,
        pp_rank=offset // dp_size,
    )


def build_publisher(config: Config, offset: int, dp_size: int = 1) -> Publisher:
    """ConfigError: an endpoint can't be had, or a key can't be read."""
    events = config.events
    connect = events.mode == "connect"
    live, replay = endpoints.rank_endpoints(events.endpoint, events.replay_endpoint, offset, keys=KEYS)
    if connect:  # all ranks dial the one subscriber; its topic tells them apart
        live = endpoints.parse(events.endpoint, KEYS[0])
    curve = None
    if events.curve_key_file is not None:
        curve = Curve.load(events.curve_key_file, events.curve_allow_dir)
    publisher = Publisher(
        live,
        replay,
        topic=topic_of(config, offset, dp_size),
        ring_bytes=events.ring_bytes,
        hwm=events.hwm,
        connect=connect,
        curve=curve,
        keys=KEYS,
    )
    for key, endpoint in zip(KEYS, (None if connect else live, replay), strict=True):
        if curve is None and endpoint is not None and not endpoints.is_local(endpoint):
            logger.warning(
                "%s = %s: whoever reaches it reads what is cached, %s; bind 127.0.0.1, or set events.curve_key_file",
                key,
                endpoint,
                "hashes alone" if events.token_ids == "none" else "token for token",
            )
    return publisher


class Telling:
    """A snapshot as the publisher takes it: a payload at a time, stamped when it is made."""

    def __init__(self, snapshot: Snapshot, clock: Callable[[], float]) -> None:
        self._snapshot = snapshot
        self._clock = clock

    def next(self) -> bytes | None:
        return self._snapshot.payload(self._clock())

    def close(self) -> None:
        self._snapshot.close()


def tell_all(publisher: Publisher, index: Index, clock: Callable[[], float] = time.time) -> None:
    """Have the publisher answer with snapshots of `index` where its ring does not reach back."""
    publisher.snapshot = lambda: Telling(index.snapshot(), clock)
