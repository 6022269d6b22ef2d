"""How far apart the uses of a page are, sampled; and from that, what a cache of another size would hit.

**The law.** Put all pages in one line, the last used first; a request's own pages stand in it from the first page of
the prompt to the last. A page's *distance* is its place in that line when it is asked for again. A cache of C pages
that lets go of what was used longest ago holds the first C of the line, whatever C is; so it hits a page exactly if
its distance is at most C (Mattson, 1970). What stands before a page in its prompt never has a larger distance than it:
what is hit of a prompt is always a prefix, as the tree's hits are. A page that nobody has had before has no distance,
and no size helps: what is left is the *ceiling*.

* A *use* is a granted acquire that asks for a page which a commit has brought before. A page is first in the line from
  the commit on that brings it, a prompt's page as well as one of generated tokens, at the place of its lease's acquire:
  so the next turn of a conversation has a distance to what the last one said, and whoever asks for a page while another
  still computes it misses it, here as in the tree.
* The tree takes the end of a lease for the use, this the begin. With leases of about the same length that is the same
  distance; what is locked meanwhile counts as the newest in both.
* Namespaces share nothing. A page's name is the hash of its namespace and all tokens up to its end.

**Sampling** (Waldspurger et al., SHARDS, 2015): only some pages are followed, chosen by what they are and not by when
they come, and each stands for `weight` pages: so distances among them are the true ones divided by `weight`. Whether a
page is followed depends on its prefix alone, and all who share it agree. Of every `stride` pages the one in the middle
can be chosen, and is by a byte of its last two tokens and its depth; that is a few operations on whole byte strings for
a prompt, and only what lies before the last chosen page is hashed. With `sample = 1` all pages are followed and nothing
is estimated.

What chance has followed too often or too seldom are mostly pages that everybody shares, as system prompts, whose
distances are short: so what is missing to the expected number of looks is taken as hits of the shortest distance, and
what is too much as well (their SHARDS-adj).

At most `max_pages` are followed, those that were used last. What is told is of the last `window_s` seconds, on the
caller's clock, in eight parts of which the oldest goes at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from operator import itemgetter
from typing import NamedTuple

import xxhash

from sglcache.core.hashing import seed
from sglcache.core.histograms import AGES, Histogram
from sglcache.core.key import ROOT, Keys, Namespace

NUM_PARTS = 8  # of the window
RUN_TOKENS = 128  # of which one page can be chosen
BITS = 5  # distances are told apart to one part in 2**BITS
KEPT_SEEDS = 1024
MANY_PIECES = 64
NEVER = 1 << 62

_hash = xxhash.xxh3_64_intdigest
_most = itemgetter(1)  # of what a Curve counts


class Run:
    """What is still to be seen of one lease: pages that no commit has brought yet. Offsets are bytes of its text."""

    __slots__ = ("at", "hashed", "have", "key", "next", "tail", "touch", "wait")

    def __init__(self, have: int, hashed: int, key: int, next: int, tail: bytes | memoryview, touch: int) -> None:
        self.have = have  # so far its text is known here
        self.hashed = hashed  # and so far it is in `key`
        self.key = key
        self.next = next  # where the next page ends that can be chosen
        self.tail: list[bytes | memoryview] = [tail]  # from `hashed` to `have`
        self.touch = touch  # its place in the line; 0: it has none yet
        self.wait: list[tuple[int, int]] = []  # chosen, and not committed: where each ends, its name
        self.at = have + 1  # a commit that reaches so far is of interest


class _Part:
    """What was seen in one part of the window."""

    __slots__ = (
        "began",
        "cold",
        "counts",
        "host_tokens",
        "looks",
        "matched_tokens",
        "pages",
        "places",
        "requests",
        "tokens",
    )

    def __init__(self, began: float) -> None:
        self.began = began
        self.requests = 0
        self.tokens = 0
        self.pages = 0
        self.places = 0  # at which a page could have been chosen
        self.looks = 0  # at chosen pages
        self.cold = 0  # of these, at pages that nobody had before
        self.matched_tokens = 0  # what the cache really found
        self.host_tokens = 0
        self.counts: dict[int, int] = {}  # by bucket of the distance


class Curve(NamedTuple):
    """Hits by size of the cache, as of one moment. Sizes and distances are in pages."""

    weight: float  # pages that each followed one stands for
    page_size: int
    seconds: float  # that were looked at
    requests: int
    tokens: int  # that were asked for
    pages: int  # of them, whole ones
    expected: float  # looks at chosen pages, as chance would have it
    looks: int
    cold: int
    counts: tuple[tuple[float, float, int, int], ...]  # (distances above this, up to this, looks, looks below), rising
    matched_tokens: int
    host_tokens: int
    tracked: int  # pages that are followed
    max_tracked: int
    forgotten: int  # since the start

    @property
    def reach(self) -> float:
        """Distances beyond it are not known, if anything was forgotten: they count as never."""
        return self.max_tracked * self.weight

    @property
    def measured(self) -> float:
        """The hit rate that there was, in tokens."""
        return self.matched_tokens / self.tokens if self.tokens else 0.0

    @property
    def measured_host(self) -> float:
        return self.host_tokens / self.tokens if self.tokens else 0.0

    def hit_rate(self, pages: float) -> float:
        """The share of tokens that a cache of so many pages would have found."""
        if not self.expected or pages < 1:
            return 0.0
        at = bisect_left(self.counts, pages, key=_most)
        if at == len(self.counts):
            return self.ceiling
        above, most, looks, hits = self.counts[at]
        # Within a bucket they lie evenly.
        return self._share(hits + looks * max(0.0, pages - above) / (most - above))

    @property
    def ceiling(self) -> float:
        """With room for everything."""
        return self._share(self.looks - self.cold)

    def _share(self, hits: float) -> float:
        if not self.expected or not self.tokens:
            return 0.0
        share = (hits + self.expected - self.looks) / self.expected
        return min(1.0, max(0.0, share)) * self.pages * self.page_size / self.tokens


class _Line:
    """The line of pages, by touches: how many pages stand at each, and how many are newer.

    A ring of the last fan³ touches, with sums over fan and fan² of them: a change costs three additions, a look three
    sums of fan numbers at most.
    """

    __slots__ = ("fan", "head", "low", "mid", "size", "square", "top", "total", "upto")

    def __init__(self, least: int) -> None:
        """For `least` touches or more."""
        fan = 4
        while fan**3 < least:
            fan += 1
        self.fan, self.square, self.size = fan, fan * fan, fan**3
        self.low = [0] * self.size
        self.mid = [0] * self.square
        self.top = [0] * fan
        self.head = 0  # the number of the last touch; its place in the ring is mod size
        self.upto = 0  # pages in the ring's places up to the head's
        self.total = 0

    def add(self, touch: int, count: int) -> int:
        """So many pages come to a touch, or go if it is negative; how many are there now."""
        at = touch % self.size
        self.low[at] = left = self.low[at] + count
        self.mid[at // self.fan] += count
        self.top[at // self.square] += count
        self.total += count
        if at <= self.head % self.size:
            self.upto += count
        return left

    def newer(self, touch: int) -> int:
        """Pages that stand at later touches."""
        at, fan, square = touch % self.size, self.fan, self.square
        block, run = at // square, at // fan
        upto = sum(self.top[:block]) + sum(self.mid[block * fan : run]) + sum(self.low[run * fan : at + 1])
        newer = self.upto - upto
        return newer if at <= self.head % self.size else newer + self.total

    def advance(self) -> int:
        """Begin the next touch, whose place in the ring is empty."""
        self.head = head = self.head + 1
        if head % self.size == 0:
            self.upto = self.low[0]
        return head

    def oldest(self, touch: int) -> int:
        """The first place of the ring, from that of `touch` on, where there is a page. There is one."""
        at, fan, square, low, mid, top = touch % self.size, self.fan, self.square, self.low, self.mid, self.top
        while not low[at]:
            if at % square == 0 and not top[at // square]:
                at += square
            elif at % fan == 0 and not mid[at // fan]:
                at += fan
            else:
                at += 1
            at %= self.size
        return at


class Reuse:
    """Follows what an index is asked for. See the module for the law. Not fed, it costs nothing."""

    def __init__(
        self, keys: Keys, sample: int, max_pages: int, window_s: float, now: float = 0.0, bits: int = BITS
    ) -> None:
        """About one page in `sample` is followed; `weight` says how many it is. `bits`: see BITS; 62 is exact."""
        self.keys = keys
        self.max_pages = max_pages
        self.bits = bits
        stride = max(1, min(RUN_TOKENS // keys.page_size, sample))
        chosen = max(1, min(256, round(256 * stride / sample)))  # of 256 bytes
        self.weight = 256 * stride / chosen
        self.rate = chosen / 256  # of the places
        self.stride = stride * keys.page_bytes
        self.first = (stride // 2 + 1) * keys.page_bytes + keys.over  # where the first page ends that can be chosen
        self._all = chosen == 256
        self._table = bytes(byte < chosen for byte in range(256))
        self._pad = b""
        self._seeds: dict[Namespace, int] = {}
        self._line = _Line(2 * max_pages)
        self._touch_of: dict[int, int] = {}  # by name
        self._names: list[list[int] | None] = [None] * self._line.size  # by touch, in order of depth; some have left it
        self._times = [0.0] * self._line.size  # by touch
        self._oldest = 0  # before it there are no pages
        self._part = _Part(now)
        self._parts = [self._part]
        self._part_s = window_s / NUM_PARTS
        self._until = now + self._part_s
        self.forgotten = 0
        self.gaps = Histogram(AGES)  # looks by seconds since the page's last use

    @property
    def tracked(self) -> int:
        """Pages that are followed."""
        return len(self._touch_of)

    # -- feeding --------------------------------------------------------------------------------------------

    def asked(self, tokens: bytes, namespace: Namespace, matched_tokens: int, host_tokens: int, now: float) -> Run:
        """A granted acquire, and what it found, in all and of it on the host alone. Tell of its commits by the Run."""
        part = self._part if now < self._until else self._turn(now)
        length = len(tokens)
        whole = self.keys.whole(length)
        first, stride = self.first, self.stride
        last = whole + self.keys.over
        places = (last - first) // stride + 1 if last >= first else 0
        part.requests += 1
        part.tokens += length >> 2
        part.pages += whole // self.keys.page_bytes
        part.places += places
        part.matched_tokens += matched_tokens
        part.host_tokens += host_tokens
        key = 0 if namespace is ROOT else self._seed(namespace)
        if not places:
            return Run(length, 0, key, first, tokens, 0)
        marks = b"" if self._all else self._marks(tokens, last, places)
        at = 0 if self._all else marks.find(1)
        if at < 0:
            return Run(length, 0, key, first + places * stride, tokens, 0)
        view = memoryview(tokens)
        names: list[tuple[int, int]] = []
        done = 0
        while 0 <= at < places:
            end = first + at * stride
            key = _hash(view[done:end], key)
            names.append((end, key))
            done = end
            at = at + 1 if self._all else marks.find(1, at + 1)
        touch = self._begin(now)
        run = Run(length, done, key, first + places * stride, view[done:], touch)
        self._look(part, names, touch, now, run)
        return run

    def committed(self, run: Run, num_bytes: int, since: Callable[[int], bytes | None], now: float) -> None:
        """A commit has brought the lease's pages up to `num_bytes`, of pages alone.

        `since(start)` are its tokens from that byte on; None: they are gone, and no more of it is followed.
        """
        upto = num_bytes + self.keys.over
        if upto < run.at:
            return
        wait = run.wait
        if wait and wait[0][0] <= upto:
            count = 1
            while count < len(wait) and wait[count][0] <= upto:
                count += 1
            self._bring(run, [name for _, name in wait[:count]], now)
            del wait[:count]
        if upto > run.have:
            self._follow(run, upto, since(run.have), now)
        run.at = min(run.at if run.at == NEVER else run.have + 1, wait[0][0] if wait else NEVER)

    def clear(self) -> None:
        """All that was cached is gone, for a cache of any size."""
        line = self._line
        self._line = _Line(line.size)
        self._line.head = line.head - line.head % line.size + line.size  # earlier touches are none of it
        self._touch_of.clear()
        self._names = [None] * line.size
        self._oldest = self._line.head

    # -- telling --------------------------------------------------------------------------------------------

    def curve(self, now: float) -> Curve:
        """Of the window that ends now."""
        if now >= self._until:
            self._turn(now)
        parts = self._parts
        counts: dict[int, int] = {}
        for part in parts:
            for bucket, looks in part.counts.items():
                counts[bucket] = counts.get(bucket, 0) + looks
        told: list[tuple[float, float, int, int]] = []
        below = 0
        for bucket in sorted(counts):
            told.append((*self._bounds(bucket), counts[bucket], below))
            below += counts[bucket]
        return Curve(
            self.weight,
            self.keys.page_size,
            now - parts[0].began,
            sum(part.requests for part in parts),
            sum(part.tokens for part in parts),
            sum(part.pages for part in parts),
            sum(part.places for part in parts) * self.rate,
            sum(part.looks for part in parts),
            sum(part.cold for part in parts),
            tuple(told),
            sum(part.matched_tokens for part in parts),
            sum(part.host_tokens for part in parts),
            self.tracked,
            self.max_pages,
            self.forgotten,
        )

    # -- inside ---------------------------------------------------------------------------------------------

    def _seed(self, namespace: Namespace) -> int:
        made = self._seeds.get(namespace)
        if made is None:
            if len(self._seeds) >= KEPT_SEEDS:
                self._seeds.clear()
            told = seed(namespace)
            made = self._seeds[namespace] = _hash(told) if told else 0
        return made

    def _marks(self, tokens: bytes, last: int, places: int) -> bytes:
        """Of each place, 1 if its page is chosen."""
        first, stride, number = self.first, self.stride, int.from_bytes
        if len(self._pad) < places:
            self._pad = b"".join(xxhash.xxh3_64_digest(i.to_bytes(4, "little")) for i in range(places // 4 + 1))
        mixed = number(tokens[first - 4 : last - 3 : stride], "little")
        mixed ^= number(tokens[first - 8 : last - 7 : stride], "little")
        mixed ^= number(self._pad[:places], "little")
        return mixed.to_bytes(places, "little").translate(self._table)

    def _begin(self, now: float) -> int:
        line = self._line
        at = (line.head + 1) % line.size
        if line.low[at]:  # used so many touches ago
            self._forget(at, line.low[at])
        self._names[at] = None
        touch = line.advance()
        self._oldest = max(self._oldest, touch - line.size + 1)
        self._times[at] = now
        return touch

    def _look(self, part: _Part, names: list[tuple[int, int]], touch: int, now: float, run: Run) -> None:
        """A request asks for these pages: count their distances, and put them first in the line."""
        touch_of, line, counts, bits = self._touch_of, self._line, part.counts, self.bits
        known: list[int] = []
        group, distance = -1, 0
        moved = 0  # of this group
        for each in names:
            name = each[1]
            old = touch_of.get(name)
            if old is None:
                run.wait.append(each)
                continue
            if old != group:
                if moved:
                    self._move(group, touch, moved, now)
                    moved = 0
                group, distance = old, line.newer(old)
            # At one touch the later pages of a prompt are left behind first: this is the first there that is left.
            distance += 1
            moved += 1
            more = distance.bit_length() - bits - 1
            bucket = distance if more <= 0 else (more << bits) + (distance >> more)
            counts[bucket] = counts.get(bucket, 0) + 1
            touch_of[name] = touch
            known.append(name)
        if moved:
            self._move(group, touch, moved, now)
        part.looks += len(names)
        part.cold += len(run.wait)
        if known:
            self._names[touch % line.size] = known
        if run.wait:
            run.at = min(run.at, run.wait[0][0])

    def _move(self, old: int, touch: int, count: int, now: float) -> None:
        line = self._line
        at = old % line.size
        self.gaps.observe(now - self._times[at], count)
        if not line.add(old, -count):
            self._names[at] = None
        line.add(touch, count)

    def _bounds(self, bucket: int) -> tuple[float, float]:
        """The distances of a bucket, in pages: above the one, up to the other."""
        bits, weight = self.bits, self.weight
        more = (bucket >> bits) - 1 if bucket >= 2 << bits else 0
        least = bucket - (more << bits) << more
        return (least - 1) * weight, (least + (1 << more) - 1) * weight

    def _bring(self, run: Run, names: list[int], now: float) -> None:
        """A commit has brought these pages: they stand where the lease's acquire does, unless another's is later."""
        line, touch_of = self._line, self._touch_of
        if not 0 < run.touch > line.head - line.size:
            run.touch = self._begin(now)
        touch, came = run.touch, 0
        kept = self._names[touch % line.size]
        if kept is None:
            kept = self._names[touch % line.size] = []
        for name in names:
            old = touch_of.get(name)
            if old is not None:
                if old >= touch:
                    continue
                if not line.add(old, -1):
                    self._names[old % line.size] = None
            touch_of[name] = touch
            kept.append(name)
            came += 1
        if came:
            line.add(touch, came)
            self._oldest = min(self._oldest, touch)
        if line.total > self.max_pages:
            self._let_go(line.total - self.max_pages)

    def _follow(self, run: Run, upto: int, text: bytes | None, now: float) -> None:
        """A commit has brought pages beyond the prompt: of generated tokens."""
        if text is None:
            run.at, run.tail = NEVER, []
            return
        have, stride = run.have, self.stride
        piece = text[: upto - have]
        found: list[int] = []
        start = 0
        while run.next <= upto:
            end = run.next - have
            if self._all or self._chosen(run, piece, end):
                run.tail.append(piece[start:end])
                run.key = _hash(b"".join(run.tail), run.key)
                run.tail.clear()
                start = end
                found.append(run.key)
            run.next += stride
        run.tail.append(piece[start:])
        if len(run.tail) > MANY_PIECES:
            run.tail = [b"".join(run.tail)]
        run.have = upto
        if found:
            self._bring(run, found, now)

    def _chosen(self, run: Run, piece: bytes, end: int) -> bool:
        """As `_marks` says of one place, which ends in `piece` at `end`."""
        place = (run.next - self.first) // self.stride
        if len(self._pad) <= place:
            self._pad = b"".join(xxhash.xxh3_64_digest(i.to_bytes(4, "little")) for i in range(place // 4 + 1))
        before = piece[end - 8] if end >= 8 else run.tail[-1][end - 8]
        return bool(self._table[piece[end - 4] ^ before ^ self._pad[place]])

    def _let_go(self, count: int) -> None:
        """Forget so many pages, those used longest ago first, of a prompt the last first."""
        while count:
            at = self._line.oldest(self._oldest)
            count -= self._forget(at, count)

    def _forget(self, at: int, count: int) -> int:
        """Up to so many at a place of the ring."""
        line, touch_of = self._line, self._touch_of
        names = self._names[at]
        assert names, f"{line.low[at]} pages without a name"
        head = line.head
        touch = head - (head - at) % line.size
        gone = 0
        while names and gone < count:
            name = names.pop()
            if touch_of.get(name) == touch:
                del touch_of[name]
                gone += 1
        if not line.add(touch, -gone):
            self._names[at] = None
        self.forgotten += gone
        self._oldest = touch
        return gone

    def _turn(self, now: float) -> _Part:
        """The window moves on."""
        parts, length = self._parts, self._part_s
        if now - self._until >= NUM_PARTS * length:
            parts.clear()
            self._until = now + length
            parts.append(_Part(now))
        while now >= self._until:
            parts.append(_Part(self._until))
            self._until += length
        del parts[:-NUM_PARTS]
        self._part = parts[-1]
        return self._part
