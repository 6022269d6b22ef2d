"""A rank's stream, put together: the publisher as configured, and the index's snapshots for those who come late."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from sglcache.config import Config
from sglcache.core.encoding import Format, Group
from sglcache.core.index import Index
from sglcache.core.snapshot import Snapshot
from sglcache.net import endpoints
from sglcache.net.curve import Curve
from sglcache.net.publisher import Publisher
from sglcache.server.plan import LIVE, REPLAY, Seat, told_groups

logger = logging.getLogger("sglcache.stream")


def format_of(config: Config) -> Format:
    """How the index is to tell of blocks."""
    events = config.events
    return Format(
        encoding=events.encoding,
        extra_key_as=events.extra_key_as,
        hash_salts=events.cache_salt == "hashed",
        withhold_tokens=events.token_ids == "none",
        fixed_tokens=events.token_ids == "fixed",
        groups=tuple(Group(*each, each.window is None) for each in told_groups(config)),
    )


def build_publisher(config: Config, seat: Seat) -> Publisher:
    """ConfigError: an endpoint can't be had, or a key can't be read."""
    events = config.events
    connect = events.mode == "connect"
    assert seat.endpoint is not None, "the plan left out the stream"
    live = endpoints.parse(seat.endpoint, LIVE)
    replay = endpoints.parse(seat.replay_endpoint, REPLAY) if seat.replay_endpoint is not None else None
    curve = None
    if events.curve_key_file is not None:
        curve = Curve.load(events.curve_key_file, events.curve_allow_dir)
    publisher = Publisher(
        live,
        replay,
        topic=seat.topic,
        ring_bytes=events.ring_size,
        hwm=events.hwm,
        connect=connect,
        curve=curve,
        keys=(LIVE, REPLAY),
    )
    for key, endpoint in zip((LIVE, REPLAY), (None if connect else live, replay), strict=True):
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

    def __init__(self, snapshot: Snapshot, clock: Callable[[], float], hurry: Callable[[], None]) -> None:
        self._snapshot = snapshot
        self._clock = clock
        self._hurry = hurry

    def next(self) -> bytes | None:
        payload = self._snapshot.payload(self._clock())
        if self._snapshot.waits:
            self._hurry()
        return payload

    def close(self) -> None:
        self._snapshot.close()


def tell_all(
    publisher: Publisher, index: Index, hurry: Callable[[], None], clock: Callable[[], float] = time.time
) -> None:
    """Have the publisher answer with snapshots of `index` where its ring does not reach back.

    `hurry` is called when one waits for a cut.
    """
    publisher.snapshot = lambda: Telling(index.snapshot(), clock, hurry)
