"""A subscriber that believes nothing: a mirror built from encoded batches, each checked against what pages are.

Decoded with msgspec into plain dicts, so that neither the wire structs nor the encoder vouch for themselves.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from sglcache.core.effects import Publish
from sglcache.testing.pages import Book, Page

EXTERNAL = 3
MEDIA = {"GPU": 0, "CPU_PINNED": 1, "DISK": 2, "EXTERNAL": 3}  # the wire's word -> the tier's number
STORED_KEYS = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
STORED_OPTIONS = ("cache_salt", "session_id", "lora_name")
GROUP_KEYS = ("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")  # of what is told beside full KV


class Subscriber:
    """What a router would believe after each batch: for each medium, the set of pages there.

    `said[(tier, page)]` counts how often the stream changed that page's presence since the last AllBlocksCleared,
    so a caller can compare it with how often it really changed. Every violation raises AssertionError.
    """

    def __init__(self, book: Book, *, page_size: int, first_seq: int, rank: int, max_batch_blocks: int) -> None:
        self.book = book
        self.page_size = page_size
        self.next_seq = first_seq
        self.rank = rank
        self.max_batch_blocks = max_batch_blocks
        self.present: list[set[Page]] = [set(), set(), set(), set()]
        self.beside: dict[tuple[int, int], set[Page]] = {}  # of other groups: (group, tier) -> where they are
        self.said: Counter[tuple[int, Page]] = Counter()
        self.clears = 0
        self.ts = 0.0
        self.batches: list[list[dict[str, Any]]] = []  # every event so far, for tests that look at form
        self.stored_for: dict[Page, list[str | None]] = {}  # the session_id that each storing on the device named

    @property
    def events(self) -> list[dict[str, Any]]:
        return [event for batch in self.batches for event in batch]

    def apply(self, publish: Publish) -> None:
        """Take in one batch."""
        assert publish.seq == self.next_seq, f"batch {publish.seq} where {self.next_seq} is next"
        self.next_seq += 1
        batch = msgspec.msgpack.decode(publish.payload)
        assert msgspec.msgpack.encode(batch) == publish.payload, (
            "the bytes are not what msgspec makes of the same batch"
        )
        ts, events, rank = batch
        assert rank == self.rank
        assert isinstance(ts, float)
        assert ts >= self.ts, f"a batch of {ts} behind one of {self.ts}"
        self.ts = ts
        if not self.batches:
            assert events, "a life starts with AllBlocksCleared, not with a heartbeat"
            assert events[0]["type"] == "AllBlocksCleared", f"a life starts with {events[0]}"
        blocks = 0
        before: dict[str, Any] | None = None
        for event in events:
            if event["type"] == "AllBlocksCleared":
                assert set(event) == {"type"}
                self.present = [set(), set(), set(), set()]
                self.beside.clear()
                self.said.clear()
                self.clears += 1
            elif event["type"] == "BlockStored":
                blocks += self._stored(event)
            else:
                blocks += self._removed(event)
            assert before is None or not joinable(before, event), f"not coalesced: {before}, then {event}"
            before = event
        assert publish.num_events == len(events)
        assert publish.num_blocks == blocks
        assert blocks <= self.max_batch_blocks or len(events) == 1, f"{blocks} blocks in one batch"
        self.batches.append(events)

    def _stored(self, event: dict[str, Any]) -> int:
        keys = tuple(event)
        options = tuple(key for key in STORED_OPTIONS if key in event)
        group = tuple(key for key in GROUP_KEYS if key in event)
        assert keys == STORED_KEYS + options + group, f"keys of a BlockStored: {keys}"
        assert all(event[key] for key in options), f"an empty option is no option: {event}"
        assert event["lora_id"] is None
        assert event["block_size"] == self.page_size
        hashes, tokens = event["block_hashes"], event["token_ids"]
        assert hashes
        assert len(tokens) == len(hashes) * self.page_size
        tier = MEDIA[event["medium"]]
        parent_hash = event["parent_block_hash"]
        if self.book.bigram:
            assert all(isinstance(pair, list) and len(pair) == 2 for pair in tokens)
            tokens = [token for pair in tokens for token in pair]
        packed = b"".join(token.to_bytes(4, "little") for token in tokens)
        size = self.book.page_bytes * (2 if self.book.bigram else 1)
        for i, value in enumerate(hashes):
            page = self.book.by_hash.get(value)
            assert page is not None, f"hash {value} is no page's that was ever committed"
            assert page.words == packed[i * size : (i + 1) * size], f"{page} was announced with other tokens"
            assert page.namespace == (event.get("lora_name"), None, event.get("cache_salt")), f"{page}: {event}"
            want = None if page.parent is None else page.parent.hash
            assert parent_hash == want, f"{page} was announced under {parent_hash}, its parent is {want}"
            if group:
                beside = self.beside.setdefault((event["group_idx"], tier), set())
                assert page not in beside, f"{page} was stored twice in tier {tier}, group {event['group_idx']}"
                assert page in self.present[tier], f"{page}, group {event['group_idx']}: told of before full KV"
                beside.add(page)
                parent_hash = value
                continue
            if tier < EXTERNAL:  # of which only hints are told
                known = page.parent is None or page.parent in self.present[tier]
                assert known, f"{page} was announced before its parent"
                assert page not in self.present[tier], f"{page} was stored twice in tier {tier}"
            self.present[tier].add(page)
            self.said[tier, page] += 1
            parent_hash = value
            if tier == 0:
                self.stored_for.setdefault(page, []).append(event.get("session_id"))
        return len(hashes)

    def _removed(self, event: dict[str, Any]) -> int:
        keys = ("type", "block_hashes", "medium", *(["group_idx"] if "group_idx" in event else []))
        assert tuple(event) == keys, f"keys of a BlockRemoved: {tuple(event)}"
        assert event["type"] == "BlockRemoved"
        tier = MEDIA[event["medium"]]
        present = self.present[tier]
        assert event["block_hashes"]
        if "group_idx" in event:
            beside = self.beside.get((event["group_idx"], tier), set())
            for page in (self.book.by_hash[value] for value in event["block_hashes"]):
                assert page in beside, f"{page} was removed from tier {tier}, group {event['group_idx']}: not there"
                beside.remove(page)
            return len(event["block_hashes"])
        # One event is one node or several, each listed first page first: children are looked for behind the event.
        gone = [self.book.by_hash[value] for value in event["block_hashes"]]
        for page in gone:
            assert page in present, f"{page} was removed from tier {tier}, where the stream never put it"
            present.remove(page)
            self.said[tier, page] += 1
        parents = set(gone)
        orphans = [page for page in present if page.parent in parents]
        assert not orphans, f"removed from tier {tier} while children are there: {orphans}"
        for (group, where), beside in self.beside.items():
            left = beside.intersection(gone) if where == tier else ()
            assert not left, f"full KV of {left} was removed from tier {tier} before group {group}'s"
        return len(gone)


def joinable(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether a coalescer that follows SGLang's rules would have made one event of these two neighbours."""
    if a["type"] != b["type"] or a.get("medium") != b.get("medium") or a.get("group_idx") != b.get("group_idx"):
        return False
    if a["type"] == "BlockRemoved":
        return True
    if a["type"] != "BlockStored":
        return False
    same = all(a.get(key) == b.get(key) for key in ("block_size", "lora_id", *STORED_OPTIONS))
    return same and bool(b["parent_block_hash"] == a["block_hashes"][-1])
