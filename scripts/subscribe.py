#!/usr/bin/env python3
"""Watch a KV event stream: print what each batch says, and say loudly when numbers are missing or start anew.

Needs pyzmq and msgspec, nothing else: it reads the stream as any router would. Works with SGLang, too.

    scripts/subscribe.py --endpoint tcp://127.0.0.1:5557 --replay-endpoint tcp://127.0.0.1:5657
    scripts/subscribe.py --check --timeout 30        # 0 once the stream has shown all kinds of events

Exit status: 0; with --check, 1 if something was not seen in time; 2 for bad usage; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import zmq
import zmq.auth
from zmq.utils import z85

END_SEQ = b"\xff" * 8
MAX_BATCHES_S = 10_000  # no publisher makes more in a second; numbers that rise faster are another life's, not a loss
SILENCE_S = 5.0  # without a word since the start, after which that is told; heartbeats come more often
REPLAY_SILENCE_S = 10.0  # after which a replay that has not ended is given up
FIELDS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    "BlockRemoved": ("block_hashes", "medium"),
}
BAD_BATCH = (msgspec.MsgspecError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)
Message = tuple[int, bytes, bool]  # number, payload, whether it was replayed


def event_map(raw: Any) -> dict[str, Any]:
    """An event of either wire form, as a map."""
    if isinstance(raw, dict):
        return raw
    name, *values = raw
    event = {"type": name, **dict(zip(FIELDS.get(name, ()), values, strict=False))}
    if len(values) > 6:
        if isinstance(values[6], dict):  # SGLang 0.5.19's trailing metadata
            event.update(values[6])
        elif isinstance(values[6], str):  # vLLM's arrays
            event["lora_name"] = values[6]
    return event


def short(block_hash: int | None) -> str:
    return "root" if block_hash is None else f"{block_hash & (1 << 64) - 1:016x}"


def describe(event: dict[str, Any]) -> str:
    """One line for people."""
    kind, hashes = event["type"], event.get("block_hashes", [])
    if kind not in FIELDS:
        return str(kind)
    span = short(hashes[0]) + (f"..{short(hashes[-1])}" if len(hashes) > 1 else "") if hashes else "-"
    text = f"{kind:<13}{event.get('medium') or 'GPU':<11}{len(hashes):>5} blocks  {span}"
    if kind == "BlockStored":
        tokens = event["token_ids"]
        sample = ",".join(map(str, tokens[:4])) + (",.." if len(tokens) > 4 else "")
        text += f"  parent {short(event['parent_block_hash'])}  {len(tokens)} tokens [{sample}]"
        text += f" in blocks of {event['block_size']}"
        for key in ("lora_name", "cache_salt", "session_id"):
            if event.get(key) is not None:
                text += f"  {key} {event[key]!r}"
    if event.get("group_idx"):
        text += f"  group {event['group_idx']}"
        for key in ("kv_cache_spec_kind", "kv_cache_spec_sliding_window"):
            if event.get(key) is not None:
                text += f" {event[key]}"
    return text


class Seen:
    """What --check waits for."""

    def __init__(self) -> None:
        self.missing = {
            "stored": "a BlockStored of several blocks",
            "removed": "a BlockRemoved of blocks that were seen stored",
            "cleared": "an AllBlocksCleared",
        }
        self._stored: set[tuple[str, int, int]] = set()

    def take(self, event: dict[str, Any]) -> None:
        where = event.get("medium") or "GPU", event.get("group_idx") or 0
        blocks = {(*where, block_hash) for block_hash in event.get("block_hashes", ())}
        if event["type"] == "BlockStored":
            self._stored |= blocks
            if len(blocks) > 1:
                self.missing.pop("stored", None)
        elif event["type"] == "BlockRemoved" and blocks and blocks <= self._stored:
            self.missing.pop("removed", None)
        elif event["type"] == "AllBlocksCleared":
            self.missing.pop("cleared", None)


class Curve(NamedTuple):
    """The stream's public key, and our own pair: made up where the stream lets in everyone who knows it."""

    server_key: bytes
    public_key: bytes
    secret_key: bytes

    @classmethod
    def of(cls, server_key: str, key_file: str | None) -> Curve:
        """OSError, ValueError, KeyError: a key can't be read, or is none."""
        if len(server_key) != 40 or os.path.exists(server_key):
            server = zmq.auth.load_certificate(server_key)[0]
        else:
            server = server_key.encode()
            z85.decode(server)
        public, secret = zmq.curve_keypair() if key_file is None else zmq.auth.load_certificate(key_file)
        if secret is None:
            raise ValueError(f"{key_file} holds a public key alone; name the .key_secret file")
        return cls(server, public, secret)


class Stream:
    """The batches in order: live ones, and replayed ones where numbers were missing. Each number once."""

    def __init__(self, endpoint: str, replay_endpoint: str | None, topic: str, curve: Curve | None = None) -> None:
        self.context = zmq.Context()
        self.curve = curve
        self.sub = self._socket(zmq.SUB, endpoint)
        self.sub.setsockopt(zmq.RCVHWM, 0)
        self.sub.subscribe(topic)
        try:
            self.sub.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"{endpoint!r} is no endpoint ({error.strerror}); write tcp://HOST:PORT") from error
        self.endpoint = endpoint
        self.heard = self.hinted = False  # anything at all; what else it may be
        self.replay_endpoint = replay_endpoint
        self.expected: int | None = None
        self.last_live: int | None = None
        self.last_payload = b""

    def _socket(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        sock = self.context.socket(kind)
        sock.setsockopt(zmq.IPV6, int("[" in endpoint))
        if self.curve is not None:
            sock.curve_serverkey, sock.curve_publickey, sock.curve_secretkey = self.curve
        return sock

    def close(self) -> None:
        self.context.destroy(linger=0)

    def messages(self, from_start: bool, deadline: float | None) -> Iterator[Message]:
        if from_start:
            yield from self._replay(0, deadline)
        while (message := self._live(deadline)) is not None:
            seq, payload = message
            before, self.last_payload = self.last_payload, payload
            if self.last_live is not None and seq <= self.last_live:
                shout(f"RESTART: numbers went back, from {self.last_live} to {seq}")
                self.expected = None
            self.last_live = seq
            if self.expected is not None and seq < self.expected:
                continue  # was replayed already
            if self.expected is not None and seq > self.expected:
                missing = f"{seq - self.expected} numbers are missing: {self.expected}..{seq - 1}"
                asking = ", asking for a replay" if self.replay_endpoint else ""
                if _starts_anew(payload):
                    shout(f"RESTART: {missing}, and everything is cleared")
                else:
                    restart = _is_another_life(seq - self.expected, before, payload)
                    if restart:
                        leap = f"the numbers leap from {self.expected - 1} to {seq}"
                        shout(f"RESTART: {leap}, those of another life{asking}")
                    else:
                        shout(f"GAP: {missing}{asking}")
                    if self.replay_endpoint:
                        yield from self._replay(self.expected, deadline, restart)
                    if self.expected is not None and seq < self.expected:
                        continue
            self.expected = seq + 1
            yield seq, payload, False

    def _live(self, deadline: float | None) -> tuple[int, bytes] | None:
        if not self.heard:
            self._hear(deadline)
        while wait(self.sub, deadline):
            frames = self.sub.recv_multipart()
            if len(frames) == 3 and len(frames[1]) == 8:
                return int.from_bytes(frames[1], "big"), frames[2]
            hint, self.hinted = "" if self.hinted else f"; {self._else()}", True
            shout(f"NOT A BATCH: {len(frames)} frames of {[len(frame) for frame in frames]} bytes{hint}")
        return None

    def _hear(self, deadline: float | None) -> None:
        """Wait for the first message, and say once if none comes."""
        silent_at = time.monotonic() + SILENCE_S
        if not wait(self.sub, silent_at if deadline is None else min(deadline, silent_at)):
            if deadline is not None and deadline <= silent_at:
                return
            shout(f"NOTHING has come from {self.endpoint} in {SILENCE_S:g} s, not even a heartbeat; {self._else()}")
        self.heard = True

    def _else(self) -> str:
        return "is that the port of the events (5557 by default, not HTTP's, nor that of replays), and is it open?"

    def _replay(self, start: int, deadline: float | None, restart: bool = False) -> Iterator[Message]:
        if self.replay_endpoint is None:
            return
        end, first = deadline or float("inf"), True
        with self._socket(zmq.DEALER, self.replay_endpoint) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(self.replay_endpoint)
            dealer.send_multipart([b"", start.to_bytes(8, "big")])
            while wait(dealer, min(end, time.monotonic() + REPLAY_SILENCE_S)):
                frames = dealer.recv_multipart()
                if frames[-2:] == [END_SEQ, b""]:
                    return
                if len(frames) < 3 or len(frames[-2]) != 8:
                    shout(f"NOT A BATCH: {len(frames)} frames of {[len(frame) for frame in frames]} bytes")
                    continue
                seq = int.from_bytes(frames[-2], "big")  # with or without a topic before it
                if start and first and _starts_anew(frames[-1]):
                    why = "of this life" if restart else "what is missing can't be had any more;"
                    shout(f"SNAPSHOT: {why} all that is cached follows, as of {seq}")
                first = False
                self.expected = max(self.expected or 0, seq + 1)
                yield seq, frames[-1], True
        shout(f"NO REPLAY: {self.replay_endpoint} did not answer to the end")


def _starts_anew(payload: bytes) -> bool:
    try:
        events = msgspec.msgpack.decode(payload)[1]
        return bool(events) and event_map(events[0])["type"] == "AllBlocksCleared"
    except BAD_BATCH:
        return False


def _is_another_life(num_missing: int, before: bytes, after: bytes) -> bool:
    """By the numbers and the times of two batches: who is connected again has not heard the life's first one.

    A life's numbers begin with the clock, in microseconds, or well above the last one's.
    """
    try:
        start, end = (msgspec.msgpack.decode(payload)[0] for payload in (before, after))
        return bool(num_missing > MAX_BATCHES_S * (1 + max(0.0, end - start)))
    except BAD_BATCH:
        return False


def wait(sock: zmq.Socket[bytes], deadline: float | None) -> bool:
    timeout = None if deadline is None else max(0, int((deadline - time.monotonic()) * 1000))
    return bool(sock.poll(timeout))


def shout(text: str) -> None:
    print(f"!!! {text}", file=sys.stderr, flush=True)


def show(args: argparse.Namespace, message: Message) -> list[dict[str, Any]]:
    """Print one batch; its events."""
    seq, payload, replayed = message
    ts, raw_events, *rest = msgspec.msgpack.decode(payload)
    rank = rest[0] if rest else None
    events = [event_map(raw) for raw in raw_events]
    if args.raw:
        print(seq, payload.hex(), flush=True)
    elif args.json:
        for event in events:
            line = {"seq": seq, "ts": ts, "rank": rank, "replayed": replayed, **event}
            print(json.dumps(line, default=repr), flush=True)
    else:
        try:
            clock = time.strftime("%H:%M:%S", time.localtime(ts)) + f".{int(ts % 1 * 1000):03d}"
        except (OverflowError, OSError) as error:
            raise ValueError(f"{ts!r} is no time") from error
        head = f"{clock}  #{seq}  rank {rank}{'  replayed' if replayed else ''}"
        if not events and args.heartbeats:
            print(f"{head}  heartbeat", flush=True)
        for event in events:
            print(f"{head}  {describe(event)}", flush=True)
    return events


def read(args: argparse.Namespace, message: Message, seen: Seen) -> int | None:
    """Print one batch, and have `seen` take it in: how many events. None, and a shout: that is no batch."""
    try:
        events = show(args, message)
        for event in events:
            seen.take(event)
    except BAD_BATCH as error:
        shout(f"BAD BATCH #{message[0]}: {error!r}")
        return None
    return len(events)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint", default="tcp://127.0.0.1:5557", help="default %(default)s")
    parser.add_argument("--replay-endpoint", help="where to ask for what was missed; without it a gap is only told")
    parser.add_argument("--topic", default="", help="the topic's beginning; default all")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object a line for each event")
    form.add_argument("--raw", action="store_true", help="number and payload, in hex, for each batch")
    parser.add_argument("--heartbeats", action="store_true", help="print empty batches, too")
    parser.add_argument("--limit", type=int, help="stop after this many events")
    parser.add_argument("--timeout", type=float, help="stop after this many seconds; with --check 30 if not given")
    parser.add_argument(
        "--check",
        action="store_true",
        help="exit 0 once a store of several blocks, a removal of stored blocks and a clear were seen, 1 if not in "
        "time; with a replay endpoint what is past counts, too",
    )
    parser.add_argument(
        "--curve-server-key", metavar="KEY|FILE", help="the stream's public CURVE key, or its file, where it has one"
    )
    parser.add_argument(
        "--curve-key-file", metavar="FILE", help="our own secret CURVE key, where only readers who are listed get in"
    )
    args = parser.parse_args()
    if args.curve_key_file and not args.curve_server_key:
        parser.error("--curve-key-file is ours; say --curve-server-key, too: whom to trust")
    try:
        curve = Curve.of(args.curve_server_key, args.curve_key_file) if args.curve_server_key else None
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"that is no CURVE key: {error}")
    if args.check and args.timeout is None:
        args.timeout = 30.0
    deadline = None if args.timeout is None else time.monotonic() + args.timeout

    seen, count = Seen(), 0
    try:
        stream = Stream(args.endpoint, args.replay_endpoint, args.topic, curve)
    except ValueError as error:
        parser.error(str(error))
    try:
        for message in stream.messages(args.check, deadline):
            count += read(args, message, seen) or 0
            if (args.check and not seen.missing) or (args.limit is not None and count >= args.limit):
                break
    except KeyboardInterrupt:
        return 130
    finally:
        stream.close()
    if args.check and seen.missing:
        shout("CHECK FAILED, not seen: " + "; ".join(seen.missing.values()))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
