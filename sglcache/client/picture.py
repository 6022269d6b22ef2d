"""What a stream says is cached, by rank and tier, with the tokens and the parent of every block; packed; no I/O.

A block is one `bytes`, its key: namespace, parent and tokens, so that no token is a Python int and nothing here is
an object that the cycle collector walks. Three kinds of dict share the keys and the hashes:

    tier of a rank:  hash ──► key          what is there, and what it is
    rank:            key  ──► hash         the child of a parent with these tokens: a match walks down it

A match goes by tokens and parents, never by what the hashes are made of, which is the engine's affair. Two hashes of
one content are kept apart: each has its own presence. Where the stream withholds tokens a match computes the hashes.

All of this is full KV. What a stream tells of other groups (windows, states) is left out, or, for who wants it, kept
beside it as sets of hashes (`_Groups`): blocks, digests and the length of a match are of full KV all the same.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias, cast

from sglcache.compiled import FORM
from sglcache.errors import BadRequest, ConfigError
from sglcache.units import Tier
from sglcache.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, Token, is_full, medium_of

if FORM.compiled:
    from sglcache import packing

Tokens: TypeAlias = Sequence[int] | bytes
"""Token ids, or bytes that are packed uint32 little-endian already."""

BlockHashes: TypeAlias = Callable[[bytes, int, str | None, str | None], Iterable[int]]
"""(tokens packed as uint32, tokens per block, lora_name, cache_salt) to the hashes of the whole blocks, in order."""

Groups: TypeAlias = Mapping[int, int | None]
"""By `group_idx`, above 0: the tokens of its window; None: it keeps states, each told by the block that it follows."""

Hashes: TypeAlias = list[tuple[int, ...]]
"""Block for block the hashes that it has."""

_Hash: TypeAlias = Any
"""An int that stays the object that it is: the compiled code would make another of it wherever it is kept."""

MASK = (1 << 64) - 1
HEAD, PARENT = 4, 8  # bytes of a key's parts; the tokens are the rest
_WAY = struct.Struct(">Iq")  # both of these
HAS_PARENT, BIGRAMS = 1 << 31, 1 << 30  # in the head, above the namespace's number
WIDE = b"\xff"  # before tokens that do not fit uint32 and take 8 bytes each: an odd length tells them


class Block(NamedTuple):
    """One block, unpacked."""

    parent: int | None  # the parent block's hash; None: at the root
    tokens: tuple[Token, ...]  # its own; empty where the daemon withholds them
    lora_name: str | None
    cache_salt: str | None


class Digest(NamedTuple):
    """A set of blocks in no order: how many, and the sum of their hashes mod 2^64."""

    num_blocks: int
    sum_hashes: int


class Match(NamedTuple):
    """How many of a request's tokens a rank holds, from the first on; always whole blocks."""

    tokens: int  # each block in one tier or another
    tiers: dict[str, int]  # by medium: each block in that tier; media with nothing are left out
    reusable: int | None = None  # of `tokens`, so many have what every group needs; None: groups are not followed

    def on(self, tier: Tier | str) -> int:
        """In one tier alone."""
        return self.tiers.get(medium(tier), 0)


def medium(tier: Tier | str) -> str:
    """The tier's word on the wire; a word is itself."""
    return tier.medium if isinstance(tier, Tier) else tier


class Picture:
    """The blocks of every rank that one stream tells of."""

    def __init__(self, groups: Groups | None = None) -> None:
        """`groups`: keep what is told of other groups, too: of these, and of more as they are told of. None: don't."""
        self._groups = groups
        self._ranks: dict[int, _Rank] = {}

    @property
    def no_match(self) -> Match:
        """What nothing is found as."""
        return Match(0, {}, None if self._groups is None else 0)

    @property
    def ranks(self) -> list[int]:
        """Those that the stream has told of so far."""
        return sorted(self._ranks)

    def apply(self, event: Event, rank: int) -> None:
        """Storing twice is storing once, removing the unknown is nothing, and a clear is of every tier of the rank."""
        held = self._ranks.get(rank)
        if held is None:
            held = self._ranks[rank] = _Rank(self._groups)
        if isinstance(event, AllBlocksCleared):
            self._ranks[rank] = _Rank(self._groups)
        elif not is_full(event):
            if held.groups is not None:
                held.groups.apply(event)
        elif isinstance(event, BlockStored):
            held.store(event)
        else:
            held.remove(medium_of(event), event.block_hashes)

    def clear(self) -> None:
        """Forget all of it."""
        self._ranks.clear()

    def blocks(self, tier: Tier | str, rank: int = 0) -> Mapping[int, Block]:
        """By hash, the blocks in the tier (or medium): a view, each unpacked when it is asked for."""
        return _View(self._ranks.get(rank), medium(tier))

    def hashes(self, tier: Tier | str, rank: int = 0) -> set[int]:
        """The hashes of the blocks in the tier (or medium)."""
        held = self._ranks.get(rank)
        return set(held.tiers.get(medium(tier), ())) if held is not None else set()

    def group_hashes(self, number: int, tier: Tier | str, rank: int = 0) -> set[int]:
        """The hashes of the blocks whose part of that group is in the tier (or medium); none if it is not followed."""
        held = self._ranks.get(rank)
        if held is None or held.groups is None:
            return set()
        return set(held.groups.held.get((number, medium(tier)), ()))

    def digests(self, rank: int = 0) -> dict[str, Digest]:
        """By medium, of those that were ever told of since the last clear. Costs nothing."""
        held = self._ranks.get(rank)
        return held.digests() if held is not None else {}

    def block_size(self, rank: int = 0) -> int | None:
        """Tokens per block, as last told."""
        held = self._ranks.get(rank)
        return held.block_size or None if held is not None else None

    def longest_match(
        self,
        tokens: Tokens,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        tier: Tier | str | None = None,
        block_hashes: BlockHashes | None = None,
    ) -> dict[int, Match]:
        """For each rank how much of `tokens` it holds, over all tiers and in each; with `tier` in that one alone.

        Takes as long as the match is, however much is cached. ConfigError: the stream withholds tokens, and
        `block_hashes` is missing.
        """
        only = None if tier is None else medium(tier)
        namespace = (lora_name or None, cache_salt or None)
        ids = _ids(tokens)
        return {rank: held.match(ids, namespace, only, block_hashes) for rank, held in sorted(self._ranks.items())}


class _Rank:
    """One rank's tiers, and the way from a parent and tokens to a hash."""

    def __init__(self, groups: Groups | None) -> None:
        self.groups = None if groups is None else _Groups(groups)
        self.spaces = _Spaces()
        self.tiers: dict[str, dict[_Hash, bytes]] = {}
        self.sums: dict[str, int] = {}
        self.children: dict[bytes, _Hash | tuple[_Hash, ...]] = {}  # of keys with tokens; several of one content
        self.block_size = 0  # as last told; 0: not yet
        self.bigrams = False
        self.withheld = False

    def digests(self) -> dict[str, Digest]:
        return {name: Digest(len(held), self.sums[name]) for name, held in self.tiers.items()}

    # -- what is there ----------------------------------------------------------------------------------

    def store(self, event: BlockStored) -> None:
        if not event.block_hashes:
            return
        # What it is made of first: who is told something that can't be keeps what there was.
        blocks = _pack(event.token_ids, event.block_size) if event.token_ids else [b""] * len(event.block_hashes)
        if len(blocks) != len(event.block_hashes):
            raise BadRequest(f"BlockStored has tokens of {len(blocks)} blocks, and {len(event.block_hashes)} hashes")
        name = medium_of(event)
        tier = self.tiers.setdefault(name, {})
        total = self.sums.setdefault(name, 0)
        space = self.spaces.number((event.lora_name or None, event.cache_salt or None))
        self.block_size = event.block_size
        self.withheld = not event.token_ids
        if event.token_ids:
            self.bigrams = not isinstance(event.token_ids[0], int)
        flags = space | BIGRAMS if self.bigrams and event.token_ids else space
        root, child = flags.to_bytes(HEAD, "big"), flags | HAS_PARENT
        parent: _Hash | None = event.parent_block_hash
        block_hash: _Hash
        children, others = self.children, [held for each, held in self.tiers.items() if held and each != name]
        way = _WAY.pack
        for block_hash, tokens in zip(event.block_hashes, blocks, strict=True):
            key = (root if parent is None else way(child, parent)) + tokens
            before = tier.get(block_hash)
            if before is None:
                total += block_hash
            elif before != key:  # told anew, as something else
                del tier[block_hash]
                self._forget(block_hash, before)
            if before != key:
                for other in others:  # the same two, as the objects that are there already
                    same = other.get(block_hash)
                    if same == key:
                        key = same
                        break
                if tokens:
                    known = children.setdefault(key, block_hash)
                    if known is not block_hash:
                        block_hash = self._another(key, block_hash, known)
                tier[block_hash] = key
                self.spaces.take(space)
            parent = block_hash
        self.sums[name] = total & MASK
        self.spaces.give_up(space)

    def remove(self, name: str, block_hashes: list[_Hash]) -> None:
        tier = self.tiers.get(name)
        if tier is None:
            return
        total = self.sums[name]
        for block_hash in block_hashes:
            key = tier.pop(block_hash, None)
            if key is not None:
                total -= block_hash
                self._forget(block_hash, key)
        self.sums[name] = total & MASK

    def _another(self, key: bytes, block_hash: _Hash, known: _Hash | tuple[_Hash, ...]) -> _Hash:
        """Have `children` lead to the hash besides what it leads to. The same, as the object that is there already."""
        if isinstance(known, tuple):
            if block_hash not in known:
                self.children[key] = (*known, block_hash)
        elif known == block_hash:
            return known
        else:
            self.children[key] = (known, block_hash)
        return block_hash

    def _forget(self, block_hash: _Hash, key: bytes) -> None:
        """It has left a tier: unless it is in another, `children` leads there no more."""
        self.spaces.give_up(_space(key))
        if not _tokens(key) or any(tier.get(block_hash) == key for tier in self.tiers.values()):
            return
        known = self.children[key]
        if isinstance(known, tuple):
            left = tuple(each for each in known if each != block_hash)
            self.children[key] = left if len(left) > 1 else left[0]
        else:
            del self.children[key]

    def unpack(self, key: bytes) -> Block:
        flags = int.from_bytes(key[:HEAD], "big")
        parent = int.from_bytes(key[HEAD : HEAD + PARENT], "big", signed=True) if flags & HAS_PARENT else None
        packed = _tokens(key)
        ids = array("Q", packed[1:]) if len(packed) % 2 else array("I", packed)
        tokens: tuple[Token, ...] = tuple(zip(ids[::2], ids[1::2], strict=True)) if flags & BIGRAMS else tuple(ids)
        return Block(parent, tokens, *self.spaces.name(_space(key)))

    # -- matching ---------------------------------------------------------------------------------------

    def match(
        self, ids: array[int], namespace: tuple[str | None, str | None], only: str | None, hashes: BlockHashes | None
    ) -> Match:
        tiers = [(name, held) for name, held in self.tiers.items() if held and only in (None, name)]
        nothing = Match(0, {}, None if self.groups is None else 0)
        if not tiers:
            return nothing
        path: Hashes | None = None if self.groups is None else []
        if self.withheld:
            if hashes is None:
                raise ConfigError(
                    "the stream withholds tokens, so a match has to compute the hashes: give the mirror the daemon's "
                    "hash (hash_name=), or have it publish with events.token_ids"
                )
            packed = ids.tobytes() if ids.typecode == "I" else b""  # ids past uint32 have no hash here
            masks = self._by_hash(hashes(packed, self.block_size, *namespace), [held for _, held in tiers], path)
        else:
            space = self.spaces.find(namespace)
            if space is None:
                return nothing
            masks = self._by_tokens(self._blocks_of(ids), space, [held for _, held in tiers], path)
        # What a mask has, those before it have.
        longest = [bisect_left(masks, True, key=lambda mask: not mask >> place & 1) for place in range(len(tiers))]
        size = self.block_size
        return Match(
            len(masks) * size,
            {name: count * size for (name, _), count in zip(tiers, longest, strict=True) if count},
            None if self.groups is None or path is None else self.groups.reach(path, size, only) * size,
        )

    @staticmethod
    def _by_hash(hashes: Iterable[_Hash], tiers: list[dict[_Hash, bytes]], path: Hashes | None) -> list[int]:
        """Per block that is there, a mask of the tiers that have all blocks so far; its hash is put on the path."""
        masks: list[int] = []
        mask = (1 << len(tiers)) - 1
        for block_hash in hashes:
            here = 0
            for place, tier in enumerate(tiers):
                if block_hash in tier:
                    here |= 1 << place
            if not here:
                break
            mask &= here
            if path is not None:
                path.append((block_hash,))
            masks.append(mask)
        return masks

    def _by_tokens(
        self, blocks: Iterable[bytes], space: int, tiers: list[dict[_Hash, bytes]], path: Hashes | None
    ) -> list[int]:
        """The same. Where one content has several hashes, each is a way on, with its own mask."""
        flags = space | BIGRAMS if self.bigrams else space
        child, way = flags | HAS_PARENT, _WAY.pack
        children = self.children
        masks: list[int] = []
        before, mask = flags.to_bytes(HEAD, "big"), (1 << len(tiers)) - 1
        others: list[tuple[bytes, int]] = []  # ways besides that one, and their masks; mostly there is none
        for tokens in blocks:
            if not others:
                key = before + tokens
                known = children.get(key)
                if known is None:
                    break
                if isinstance(known, int):
                    here = _holders(tiers, known, key)
                    if not here:
                        break
                    before = way(child, known)
                    mask &= here
                    if path is not None:
                        path.append((known,))
                    masks.append(mask)
                    continue
            onward: list[tuple[_Hash, int]] = []
            reached = 0
            for from_, narrowed in [(before, mask), *others]:
                key = from_ + tokens
                known = children.get(key)
                for block_hash in () if known is None else known if isinstance(known, tuple) else (known,):
                    here = _holders(tiers, block_hash, key)
                    if here:
                        onward.append((block_hash, narrowed & here))
                        reached |= narrowed & here
            if not onward:
                break
            if path is not None:
                path.append(tuple(block_hash for block_hash, _ in onward))
            masks.append(reached)
            (before, mask), *others = [(way(child, block_hash), here) for block_hash, here in onward]
        return masks

    def _blocks_of(self, ids: array[int]) -> Iterator[bytes]:
        """The whole blocks of a request, packed as keys have them."""
        size = self.block_size
        if self.bigrams:  # a unit is a token and the next one: a block needs the first token of the block after it
            return (
                _pack(list(zip(ids[at : at + size], ids[at + 1 : at + size + 1], strict=True)), size)[0]
                for at in range(0, len(ids) - size, size)
            )
        if ids.typecode == "I":
            packed, width = ids.tobytes(), 4 * size
            return (packed[at : at + width] for at in range(0, len(packed) - width + 1, width))
        return (_pack(ids[at : at + size], size)[0] for at in range(0, len(ids) - size + 1, size))


class _Groups:
    """Which blocks have a window, and which end with a state: what a match needs besides full KV."""

    def __init__(self, windows: Groups) -> None:
        self.windows = dict(windows)
        self.held: dict[tuple[int, str], set[int]] = {}

    def apply(self, event: BlockStored | BlockRemoved) -> None:
        assert event.group_idx
        here = self.held.setdefault((event.group_idx, medium_of(event)), set())
        if isinstance(event, BlockStored):
            self.windows.setdefault(event.group_idx, event.kv_cache_spec_sliding_window)
            here.update(event.block_hashes)
        else:
            here.difference_update(event.block_hashes)

    def reach(self, path: Hashes, block_size: int, only: str | None) -> int:
        """How many of the blocks (the hashes of each) a runner can go on behind: the most that every group allows.

        A window allows it where all blocks that the next token's query sees are there, a state where there is one; both
        in whatever tier, or in `only`.
        """
        able = [True] * len(path)
        for number, window in self.windows.items():
            tiers = [held for (of, name), held in self.held.items() if of == number and only in (None, name)]
            needed = 1 if window is None else -(-window // block_size) if block_size else 0
            run = 0
            for place, hashes in enumerate(path):
                run = run + 1 if any(each in tier for tier in tiers for each in hashes) else 0
                able[place] &= run >= min(needed, place + 1)
        return max((place + 1 for place, is_able in enumerate(able) if is_able), default=0)


class _Spaces:
    """Namespaces as small numbers, forgotten when nothing has them any more: every conversation may have its own."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str | None, str | None], int] = {}
        self._names: dict[int, tuple[str | None, str | None]] = {}
        self._uses: dict[int, int] = {}
        self._free: list[int] = []

    def find(self, name: tuple[str | None, str | None]) -> int | None:
        return self._numbers.get(name)

    def name(self, number: int) -> tuple[str | None, str | None]:
        return self._names[number]

    def number(self, name: tuple[str | None, str | None]) -> int:
        """The namespace's number, with a use more."""
        number = self._numbers.get(name)
        if number is None:
            number = self._free.pop() if self._free else len(self._names)
            self._numbers[name] = number
            self._names[number] = name
            self._uses[number] = 0
        self.take(number)
        return number

    def take(self, number: int) -> None:
        self._uses[number] += 1

    def give_up(self, number: int) -> None:
        self._uses[number] -= 1
        if not self._uses[number]:
            del self._uses[number], self._numbers[self._names.pop(number)]
            self._free.append(number)


class _View(Mapping[int, Block]):
    def __init__(self, rank: _Rank | None, name: str) -> None:
        self._rank = rank
        self._held: dict[_Hash, bytes] = rank.tiers.get(name, {}) if rank is not None else {}

    def __getitem__(self, block_hash: _Hash) -> Block:
        key = self._held[block_hash]
        assert self._rank is not None
        return self._rank.unpack(key)

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._held

    def __iter__(self) -> Iterator[int]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __repr__(self) -> str:
        return repr(dict(self))


def _holders(tiers: list[dict[_Hash, bytes]], block_hash: _Hash, key: bytes) -> int:
    """A mask of the tiers that have this hash, as this."""
    here = 0
    for place, tier in enumerate(tiers):
        if tier.get(block_hash) == key:
            here |= 1 << place
    return here


def _space(key: bytes) -> int:
    return int.from_bytes(key[:HEAD], "big") & (BIGRAMS - 1)


def _tokens(key: bytes) -> bytes:
    return key[HEAD + PARENT :] if key[0] & HAS_PARENT >> 24 else key[HEAD:]


def _ids(tokens: Tokens) -> array[int]:
    """An array of uint32, or where one does not fit of uint64. BadRequest: they are no token ids."""
    if isinstance(tokens, memoryview) and tokens.itemsize == 1:  # of bytes
        tokens = tokens.tobytes()
    try:
        try:
            return array("I", tokens)
        except OverflowError:
            return array("Q", tokens)
    except (OverflowError, TypeError, ValueError) as exc:
        raise BadRequest(f"tokens are ids from 0 on, or bytes that are packed uint32: {exc}") from None


def _pack(tokens: Sequence[Token], size: int) -> list[bytes]:
    """Whole blocks of `size` tokens: uint32 each, or two for a bigram; `WIDE` and uint64 where one does not fit."""
    flat: Sequence[int]
    if isinstance(tokens[0], int):
        flat = tokens  # type: ignore[assignment]
        words = size
    else:
        flat = list(chain.from_iterable(tokens))  # type: ignore[arg-type]
        words = 2 * size
    try:
        packed = _packed(flat)
    except OverflowError:
        return [_pack_wide(flat[at : at + words]) for at in range(0, len(flat), words)]
    return [packed[at : at + 4 * words] for at in range(0, len(packed), 4 * words)]


def _packed(flat: Sequence[int]) -> bytes:
    """OverflowError: they do not fit uint32."""
    if FORM.compiled and isinstance(flat, list):
        packed = packing.pack_ids(cast("list[object]", flat))
        if packed is not None:
            return packed
    return array("I", flat).tobytes()


def _pack_wide(flat: Sequence[int]) -> bytes:
    try:
        return array("I", flat).tobytes()
    except OverflowError:
        return WIDE + array("Q", flat).tobytes()
