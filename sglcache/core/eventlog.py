"""What happened to blocks, in order, and how it becomes numbered batches (laws 5 and 6).

Recording is a tuple that refers to a node's bytes; hashing, coalescing and encoding wait for the cut, which can be
done in slices: a long prompt's hash chain never stalls a command. A page that is new to the tree gets a `Chain`,
a promise of its digests; records are cut in order, so what a chain builds on is always there before it.

With events off there is no log: nothing is recorded, hashed or queued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from sglcache.core import encoding, hashing
from sglcache.core.effects import Publish
from sglcache.core.encoding import NO_EXTRAS, NO_TOKENS, PLAIN, Extras, Format, Group
from sglcache.core.hashing import Hasher
from sglcache.core.key import Keys, Namespace
from sglcache.units import Tier

if TYPE_CHECKING:
    from sglcache.core.tree import Node


_new = tuple.__new__  # of records: a NamedTuple's own is a Python function around this
RECORD_COST = 40  # of a record's part in the cut, in the units of `slice`
MAX_BATCH_TOKENS = 1 << 18
PAIR_COST = 6  # tokens for whose encoding a bigram's takes as long


class Chain:
    """Digests to be: of a run, behind `before` (bytes, or a page of a chain that is resolved earlier)."""

    __slots__ = ("before", "digests", "done", "end", "nodes", "parts", "text")

    def __init__(self, run: Text, before: bytes | Pending, *nodes: Node) -> None:
        self.text, self.done, self.end = run  # hashed so far: up to `done`
        self.before: bytes | Pending = before
        self.nodes = list(nodes)  # whose `hashes` point here; a split adds to it
        self.parts: list[bytes] = []  # what earlier slices have made
        self.digests: bytes | None = None

    def resolve(self, hasher: Hasher, keys: Keys, budget: int) -> int:
        """Hash up to `budget` pages; how many it did. The nodes get their digests with the last."""
        before = self.before
        if not isinstance(before, bytes):
            before = _last_digest(before, hasher.size)
        text, page_bytes = self.text, keys.page_bytes
        done, end = self.done, self.end - keys.over
        stop = min(end, done + budget * page_bytes)
        if keys.bigram:
            run = text[done : stop + keys.over]
            part = hasher.chain(before, keys.words(run), keys.word_bytes)
        else:
            part = hasher.chain(before, text, page_bytes, done, stop)
        if stop < end:
            self.parts.append(part)
            self.before = part[-hasher.size :]
            self.done = stop
            return (stop - done) // page_bytes
        if self.parts:
            part = b"".join([*self.parts, part])
        self.digests = part
        for node in self.nodes:
            hashes = node.hashes
            if isinstance(hashes, Pending) and hashes.chain is self:
                first, last = hashes.start * hasher.size, hashes.stop * hasher.size
                node.hashes = part[first:last] if first or last != len(part) else part
        self.nodes.clear()
        self.parts.clear()
        self.text = self.before = b""
        return (stop - done) // page_bytes


class Pending(NamedTuple):
    """Pages start..stop-1 of a chain."""

    chain: Chain
    start: int
    stop: int


Text = tuple[bytes, int, int]  # a run of tokens: bytes start..stop-1 of a text, which is not copied for it
Hashes = bytes | Pending  # a node's digests, joined, or the promise of them


def _last_digest(hashes: Pending, size: int) -> bytes:
    digests = hashes.chain.digests
    assert digests is not None, "a chain was reached before the one it builds on"
    return digests[(hashes.stop - 1) * size : hashes.stop * size]


class _Stored(NamedTuple):
    tier: Tier
    run: Text
    hashes: Hashes
    before: Hashes | None  # the parent node's, or None at the start of a namespace
    extras: Extras
    start: int = 0  # the pages that are still to be told
    stop: int | None = None
    group: Group | None = None


class _Removed(NamedTuple):
    tier: Tier
    hashes: Hashes
    start: int = 0
    stop: int | None = None
    group: Group | None = None


class _Named(NamedTuple):
    """Digests that somebody waits for, or that others build on; nothing is told of them."""

    hashes: Hashes
    whose: Any


class Run:
    """Neighbouring records that become one event."""

    __slots__ = ("digests", "extras", "group", "num_blocks", "parent", "stored", "tier", "tokens")

    def __init__(
        self, stored: bool, tier: Tier, parent: bytes | None, extras: Extras, group: Group | None = None
    ) -> None:
        self.stored, self.tier, self.parent, self.extras, self.group = stored, tier, parent, extras, group
        self.digests: list[bytes] = []
        self.tokens: list[Text] = []
        self.num_blocks = 0


class Frame(NamedTuple):
    """A batch without a number."""

    events: list[bytes]  # in pieces
    num_events: int
    num_blocks: int


class Tally:
    """A tier's full KV as routers know it: how many blocks, and the sum of their hashes mod 2**64, in any order."""

    __slots__ = ("count", "total")

    def __init__(self) -> None:
        self.count = self.total = 0

    def add(self, digests: bytes, digest_bytes: int, sign: int) -> None:
        self.count += sign * (len(digests) // digest_bytes)
        self.total = (self.total + sign * encoding.sum_hashes(digests, digest_bytes)) & 0xFFFF_FFFF_FFFF_FFFF

    def clear(self) -> None:
        self.count = self.total = 0


class EventLog:
    """The queue of records and the cut. Batches leave by `published`.

    `tallies` is, outside of `cut`, what a reader of all batches before `next_seq` must have come to, by tier.
    """

    def __init__(
        self,
        hasher: Hasher,
        keys: Keys,
        *,
        format: Format = PLAIN,
        first_seq: int,
        rank: int,
        max_blocks: int,
        slice: int,
        quiet: bool = False,
    ) -> None:
        """`quiet`: nothing is told, and the digests are for others."""
        self.hasher = hasher
        self.keys = keys
        self.next_seq = first_seq
        self.rank = rank
        # An event is encoded in one go: one of a few ms would be a stall.
        token_cost = PAIR_COST if keys.bigram else 1
        self.max_blocks = max(1, min(max_blocks, MAX_BATCH_TOKENS // (keys.page_size * token_cost)))
        self.slice = slice  # in units of about 0.1 µs
        self._hash_cost = hasher.cost(keys.word_bytes)
        self.page_weight = keys.page_bytes * token_cost  # bytes of plain tokens that take as long to be told of
        self.encoding = encoding.encoding(format.encoding, keys.page_size)
        # Of the tiers that we own: what EXTERNAL has is a hint.
        self.tallies = {tier: Tally() for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK)}
        self.groups = format.groups
        self._withhold = format.withhold_tokens
        self._pack_tokens = encoding.pack_tokens_fixed if format.fixed_tokens else encoding.pack_tokens
        self._pack_pairs = encoding.pack_pairs_fixed if format.fixed_tokens else encoding.pack_pairs
        self.num_batches = self.num_stored = self.num_removed = self.num_cleared = self.num_unpublished = 0
        self.published: list[Publish] = []
        self.named: list[tuple[object, bytes]] = []  # who asked by `name` or `wanted`, and the digests
        self.num_full_cuts = 0  # that left nothing queued
        self.removals = 0  # queued; while there are any, no page may be handed on
        self._records: deque[_Stored | _Removed | _Named | None] = deque()  # None: all cleared
        self._packed: tuple[list[Text], list[bytes], bytes, bytes] = ([], [], b"", b"")
        # the batch in the making
        self._events: list[bytes] = []  # in pieces
        self._num_events = 0
        self._blocks = 0
        self._run: Run | None = None
        if not quiet:
            self.cleared()  # a life begins so

    def cost(self, num_blocks: int) -> int:
        """Of so many blocks' hashes and tokens in an event, in the units of `slice`."""
        return num_blocks * self.page_weight // 64

    # -- recording: called where presence changes, and nowhere else -------------------------------------

    def group(self, resource: int) -> Group | None:
        """What a companion is told as (`resource` from 1); None: not at all."""
        return self.groups[resource - 1] if resource <= len(self.groups) else None

    def stored(self, node: Node, tier: Tier, session_id: str | None, resource: int = 0) -> None:
        """The node's pages, or what else that resource keeps of it, are in the tier. Full KV of it was told before."""
        group = None
        if resource:
            group = self.group(resource)
            if group is None:
                return
        parent, extras = node.parent, node.space.extras
        assert parent is not None
        assert extras is not None, f"{node} is not to be told of"
        hashes = node.hashes or self._promise(node)
        if session_id is not None:
            extras = extras._replace(session_id=session_id)
        start = node.num_bytes // self.keys.page_bytes - 1 if group is not None and group.by_end else 0
        self._records.append(_new(_Stored, (tier, node.text, hashes, parent.hashes, extras, start, None, group)))

    def _promise(self, node: Node) -> Hashes:
        """Of the pages of a node that has no digests; the node above it has them, or the promise."""
        parent = node.parent
        assert parent is not None
        chain = Chain(node.text, self._behind(parent), node)
        hashes = node.hashes = _new(Pending, (chain, 0, node.num_bytes // self.keys.page_bytes))
        return hashes

    def _behind(self, node: Node) -> bytes | Pending:
        """What the digest of a page that follows a node's last one builds on."""
        before = node.hashes
        if before is None:
            return node.space.seed
        return before[-self.hasher.size :] if isinstance(before, bytes) else before

    def name(self, node: Node, whose: object) -> None:
        """Have the digests of a node's pages, and of all above them: `named` has them after a cut, for `whose`."""
        path: list[Node] = []
        up = node
        while up.hashes is None and up.parent is not None:
            path.append(up)
            up = up.parent
        for each in reversed(path):
            self._records.append(_Named(self._promise(each), None))
        assert node.hashes is not None
        self._records.append(_Named(node.hashes, whose))

    def wanted(self, node: Node | None, namespace: Namespace, tokens: bytes, whose: object) -> None:
        """Have the digests of pages that would follow those of a node, or of a root: `named` has them after a cut."""
        before: bytes | Pending = hashing.seed(namespace)
        if node is not None:
            if node.hashes is None:
                self.name(node, None)
            before = self._behind(node)
        num_pages = (len(tokens) - self.keys.over) // self.keys.page_bytes
        self._records.append(_Named(Pending(Chain((tokens, 0, len(tokens)), before), 0, num_pages), whose))

    def run_stored(self, tier: Tier, tokens: bytes, digests: bytes, before: bytes | None, extras: Extras) -> None:
        """As `stored`, of pages that have no node."""
        self._records.append(_Stored(tier, (tokens, 0, len(tokens)), digests, before, extras))

    def run_removed(self, tier: Tier, digests: bytes) -> None:
        self._records.append(_Removed(tier, digests))
        self.removals += 1

    def removed(self, node: Node, tier: Tier, resource: int = 0) -> None:
        """As `stored`."""
        group = None
        if resource:
            group = self.group(resource)
            if group is None:
                return
        hashes = node.hashes
        assert hashes is not None
        start = node.num_bytes // self.keys.page_bytes - 1 if group is not None and group.by_end else 0
        self._records.append(_new(_Removed, (tier, hashes, start, None, group)))
        self.removals += 1

    def cleared(self) -> None:
        """Whatever was queued and not yet cut is still told, before it."""
        self._records.append(None)
        self.removals += 1

    @property
    def pending(self) -> bool:
        return bool(self._records or self._run or self._events)

    # -- the cut ------------------------------------------------------------------------------------------

    def cut(self, ts: float, *, heartbeat: bool = False) -> bool:
        """Hash, coalesce, encode and number what is queued; False if a slice was used up before the end.

        `heartbeat`: an empty batch if there is nothing else.
        """
        records = self._records
        budget = self.slice
        size = self.hasher.size
        keys = self.keys
        cost = self._hash_cost
        while records:
            if budget <= 0:
                return self._pause(ts)
            record = records[0]
            if record is None:
                records.popleft()
                self.removals -= 1
                self._close_run()
                self._events.extend(self.encoding.cleared())
                self._num_events += 1
                self.num_cleared += 1
                for tally in self.tallies.values():
                    tally.clear()
                continue
            hashes = record.hashes
            if isinstance(hashes, bytes):
                digests = hashes
            else:
                chain = hashes.chain
                while chain.digests is None:
                    if budget <= 0:
                        return self._pause(ts)
                    budget -= cost * chain.resolve(self.hasher, keys, max(1, budget // cost))
                digests = chain.digests
                if hashes.start or hashes.stop * size != len(digests):
                    digests = digests[hashes.start * size : hashes.stop * size]
            records.popleft()
            if isinstance(record, _Named):
                budget -= RECORD_COST
                if record.whose is not None:
                    self.named.append((record.whose, digests))
                continue
            count = len(digests) // size
            start, stop = record.start, record.stop or count
            before = digests[(start - 1) * size : start * size] if start else b""
            if stop - start > self.max_blocks:
                # More than one event: the rest comes when its turn does, maybe in another slice. What is stored goes
                # from its start and what is removed from its end: no child is ever told of without its parent.
                if isinstance(record, _Removed):
                    records.appendleft(record._replace(stop=stop - self.max_blocks))
                    self.removals += 1
                    start = stop - self.max_blocks
                else:
                    stop = start + self.max_blocks
                    records.appendleft(record._replace(start=stop))
            if stop - start < count:
                count = stop - start
                digests = digests[start * size : stop * size]
            budget -= RECORD_COST + count * self.page_weight // 64
            if isinstance(record, _Removed):
                self.removals -= 1
                self._add(ts, False, record.tier, digests, count, b"", 0, None, NO_EXTRAS, record.group)
                continue
            parent: bytes | None
            text, first, _ = record.run
            if start:
                parent = before
            elif record.before is None:
                parent = None
            elif isinstance(record.before, bytes):
                parent = record.before[-size:]
            else:
                parent = _last_digest(record.before, size)
            first += start * keys.page_bytes
            self._add(ts, True, record.tier, digests, count, text, first, parent, record.extras, record.group)
        self._close_run()
        self._close_batch(ts, heartbeat=heartbeat)
        self.num_full_cuts += 1
        return True

    def _pause(self, ts: float) -> bool:
        # What is off the queue must be on the stream: `removals` says so.
        self._close_run()
        self._close_batch(ts)
        return False

    def _add(
        self,
        ts: float,
        stored: bool,
        tier: Tier,
        digests: bytes,
        count: int,
        text: bytes,
        at: int,
        parent: bytes | None,
        extras: Extras,
        group: Group | None,
    ) -> None:
        """Join the open run if it may (REFERENCE 5.2), else begin another; never more than max_blocks in one.

        `count` blocks; what is stored has its tokens in `text` from byte `at` on."""
        size, keys = self.hasher.size, self.keys
        start = 0
        while start < count:
            run = self._run
            room = self.max_blocks - self._blocks - (run.num_blocks if run is not None else 0)
            if room <= 0:
                self._close_run()
                self._close_batch(ts)
                continue
            if run is not None and not (
                run.stored is stored
                and run.tier is tier
                and run.group is group
                and (not stored or (run.extras == extras and parent is not None and run.digests[-1][-size:] == parent))
            ):
                self._close_run()
                run = None
            if run is None:
                run = self._run = Run(stored, tier, parent, extras, group)
            take = min(room, count - start)
            first = 0
            if take < count:
                # A removal is cut from its end: no batch takes a page whose children only the next one takes.
                first = start if stored else count - start - take
                part = digests[first * size : (first + take) * size]
            else:
                part = digests
            run.digests.append(part)
            if stored:
                begin = at + first * keys.page_bytes
                run.tokens.append((text, begin, begin + take * keys.page_bytes + keys.over))
            run.num_blocks += take
            start += take
            if start < count:
                parent = part[-size:]

    def _close_run(self) -> None:
        run = self._run
        if run is None:
            return
        self._run = None
        digests = b"".join(run.digests)
        count = run.num_blocks
        if run.group is None:
            tally = self.tallies.get(run.tier)
            if tally is not None:
                tally.add(digests, self.hasher.size, 1 if run.stored else -1)
        self._events += self.encode(run, digests)
        if run.stored:
            self.num_stored += count
        else:
            self.num_removed += count
        self._num_events += 1
        self._blocks += count

    def encode(self, run: Run, joined: bytes | None = None) -> Iterable[bytes]:
        """The run as one event, in pieces. `joined`: its digests."""
        size = self.hasher.size
        # The same pages mostly reach the host right after the device: their encoding is kept for that.
        pieces, digests, hashes, tokens = self._packed
        if not (run.stored and digests == run.digests and _same(pieces, run.tokens)):
            hashes = encoding.pack_hashes(b"".join(run.digests) if joined is None else joined, size)
            if run.stored:
                tokens = NO_TOKENS if self._withhold else self._pack(run.tokens)
                self._packed = (run.tokens, run.digests, hashes, tokens)
        if not run.stored:
            return self.encoding.removed(hashes, run.tier.medium, run.group)
        parent = None if run.parent is None else encoding.pack_hash(run.parent)
        return self.encoding.stored(hashes, parent, tokens, run.tier.medium, run.extras, run.group)

    def _pack(self, runs: list[Text]) -> bytes:
        if self.keys.bigram:
            return self._pack_pairs(b"".join([self.keys.words(text[start:stop]) for text, start, stop in runs]))
        if len(runs) == 1:
            return self._pack_tokens(*runs[0])
        text = b"".join([memoryview(text)[start:stop] for text, start, stop in runs])
        return self._pack_tokens(text, 0, len(text))

    def payload(self, ts: float, frame: Frame) -> bytes:
        """The frame as it goes on the wire."""
        return encoding.batch(ts, frame.num_events, frame.events, self.rank)

    def announce(self, ts: float, frame: Frame) -> None:
        """Give a snapshot's frame the next number."""
        assert not self._num_events, "a frame may not part a batch"
        self._events, self._num_events, self._blocks = frame.events, frame.num_events, frame.num_blocks
        self._close_batch(ts)

    def _close_batch(self, ts: float, *, heartbeat: bool = False) -> None:
        events = self._events
        if not events and not heartbeat:
            return
        # Encoded first: what can't be encoded takes no number.
        payload = encoding.batch(ts, self._num_events, events, self.rank)
        self.published.append(_new(Publish, (self.next_seq, payload, self._num_events, self._blocks)))
        self.next_seq += 1
        self.num_batches += 1
        self._events = []
        self._num_events = self._blocks = 0


def _same(left: list[Text], right: list[Text]) -> bool:
    """The same bytes of the same texts."""
    return len(left) == len(right) and all(
        one[0] is other[0] and one[1:] == other[1:] for one, other in zip(left, right, strict=True)
    )
