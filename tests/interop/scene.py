"""A daemon over several lives, behind links that can be cut, and everything that was ever committed to it.

What a consumer must say is asked of the index itself: `peek` for what is cached of a prompt, `dump` for the blocks of a
tier; and what is on the disk of the disk, by the names of its files. All leave it as it is.
"""

from __future__ import annotations

import random
import re
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from consumers import Overlap, eventually
from link import Link

from sglcache.client import Client
from sglcache.core.hashing import hasher, seed
from sglcache.core.key import Namespace, pack
from sglcache.errors import Changed
from sglcache.testing.daemon import Daemon
from sglcache.units import Tier

HEARTBEAT_S = 0.2
WORK_S = 30.0
VOCAB = 128_000
Names = Mapping[str, str]  # the namespace, as `acquire` takes it
PLAIN: Names = {}
TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK)
PAGE_FILE = re.compile(r"([0-9a-f]{32}){1,2}")
NOTHING_STORED: AbstractSet[int] = frozenset()


class Prompt(NamedTuple):
    """Something that was committed once."""

    tokens: list[int]
    names: Names


class Scene:
    """One daemon at a time, at two addresses that stay the same whatever life it is in."""

    def __init__(self, folder: Path, **sections: Mapping[str, Any]) -> None:
        self.folder = folder
        self.sections = {**sections, "events": {"heartbeat_s": HEARTBEAT_S, **sections.get("events", {})}}
        self.rng = random.Random(0)
        self.prompts: list[Prompt] = []
        self.store = Path(sections["storage"]["path"]) if "storage" in sections else None
        self.live, self.replay = Link(), Link()
        self.daemon: Daemon | None = None

    def start(self, **arguments: Any) -> Daemon:
        """Start the daemon. The links stay cut until `mend`: whoever follows comes too late for its first batch."""
        assert self.daemon is None
        self.cut()
        self.daemon = Daemon(self.folder, **arguments, **self.sections)
        return self.daemon

    def mend(self) -> None:
        assert self.daemon is not None
        stream = self.daemon.info["stream"]
        self.replay.mend(stream["replay_endpoint"])
        self.live.mend(stream["endpoint"])

    def cut(self) -> None:
        self.live.cut()
        self.replay.cut()

    def stop(self) -> None:
        """End the daemon as an operator does."""
        assert self.daemon is not None
        daemon, self.daemon = self.daemon, None
        assert daemon.stop() == 0, daemon.said()

    def kill(self) -> None:
        """End the daemon as the kernel does."""
        assert self.daemon is not None
        daemon, self.daemon = self.daemon, None
        daemon.kill()

    def kill_rank(self) -> None:
        """End the rank as the kernel does, and wait until the daemon has started it again; the links stay cut."""
        assert self.daemon is not None
        self.cut()
        self.daemon.next_life(self.daemon.kill_rank())

    def close(self) -> None:
        self.live.close()
        self.replay.close()
        if self.daemon is not None:
            self.daemon.kill()

    # -- traffic ------------------------------------------------------------------------------------------

    def drive(self, requests: int, names: Callable[[random.Random], Names] = lambda rng: PLAIN) -> None:
        """So many prompts, each new or the continuation of an earlier one; then wait for the copies."""
        assert self.daemon is not None
        with self.daemon.client() as client:
            for _ in range(requests):
                self.prompts.append(self._prompt(names(self.rng)))
                commit(client, self.prompts[-1])
        self.daemon.settle()

    @contextmanager
    def kept(self, prompt: Prompt) -> Iterator[None]:
        """What is cached of the prompt is not evicted meanwhile."""
        assert self.daemon is not None
        with self.daemon.client() as client, client.acquire(prompt.tokens, **prompt.names):
            yield

    @contextmanager
    def at_work(self) -> Iterator[Callable[[int], None]]:
        """A runner that commits one prompt after the other meanwhile; what it gives waits for so many more of them."""
        assert self.daemon is not None
        enough, failed, daemon = threading.Event(), list[BaseException](), self.daemon

        def work() -> None:
            try:
                with daemon.client() as client:
                    while not enough.is_set():
                        self.prompts.append(self._prompt(PLAIN))
                        commit(client, self.prompts[-1])
            except BaseException as error:
                failed.append(error)

        def wait(prompts: int) -> None:
            goal = len(self.prompts) + prompts
            eventually(lambda: len(self.prompts) >= goal or bool(failed), WORK_S)
            assert not failed, failed
            assert len(self.prompts) >= goal

        thread = threading.Thread(target=work, name="runner")
        thread.start()
        try:
            yield wait
        finally:
            enough.set()
            thread.join()
        assert not failed, failed
        daemon.settle()

    def _prompt(self, names: Names) -> Prompt:
        page = self.page_size
        begun = self.rng.choice(self.prompts[-64:]).tokens if self.prompts and self.rng.random() < 0.6 else []
        kept = begun[: page * self.rng.randint(0, len(begun) // page)][: 24 * page]
        fresh = [self.rng.randrange(VOCAB) for _ in range(page * self.rng.randint(1, 8) + self.rng.randrange(page))]
        return Prompt(kept + fresh, names)

    @property
    def page_size(self) -> int:
        assert self.daemon is not None
        return int(self.daemon.info["page_size"])

    # -- the truth ----------------------------------------------------------------------------------------

    def blocks(self) -> dict[Tier, set[int]]:
        """What each tier holds, as the stream names it."""
        assert self.daemon is not None
        with self.daemon.observer() as observer:
            tiers = [Tier[pool["tier"]] for pool in observer.status()["pools"]]
            found = {tier: dump(observer, tier) for tier in tiers}
        if self.store is not None:
            found[Tier.DISK] = set(stored(self.store))
        return found


def commit(client: Client, prompt: Prompt) -> None:
    with client.acquire(prompt.tokens, **prompt.names) as lease:
        lease.wait_loaded()
        lease.commit()


def dump(observer: Client, tier: Tier) -> set[int]:
    for _ in range(1000):
        try:
            return set(observer.dump(tier).hashes)
        except Changed:
            continue
    raise AssertionError("the index does not hold still")


def stored(store: Path, rank: int = 0) -> set[int]:
    """The pages that a rank's file store holds, as the stream names them."""
    names = (path.name for path in store.glob(f"rank-{rank}/*/??/*"))
    return {name_of(bytes.fromhex(name)) for name in names if PAGE_FILE.fullmatch(name)}


def name_of(digest: bytes) -> int:
    """The hash by which the stream names a page."""
    return int(struct.unpack_from(">q", digest)[0])


def chain(prompt: Prompt, page_size: int, hash_name: str = "xxh3_128") -> list[int]:
    """The names of all of a prompt's pages."""
    digest, namespace = hasher(hash_name), Namespace(prompt.names.get("lora"), None, prompt.names.get("cache_salt"))
    whole = len(prompt.tokens) // page_size * page_size
    chained = digest.chain(seed(namespace), pack(prompt.tokens[:whole]), 4 * page_size)
    return [name_of(chained[at : at + digest.size]) for at in range(0, len(chained), digest.size)]


def peek(observer: Client, prompt: Prompt, page_size: int, on_disk: AbstractSet[int] = NOTHING_STORED) -> Overlap:
    """`on_disk`: what of it is `stored`."""
    found = observer.peek(prompt.tokens, **prompt.names)
    reached = found.matched_tokens
    if on_disk:
        for name in chain(prompt, page_size)[reached // page_size :]:
            if name not in on_disk:
                break
            reached += page_size
    return Overlap(found.device_tokens, found.matched_tokens, reached)


def askable(prompts: list[Prompt], page_size: int, rng: random.Random, prefixes: int = 2) -> list[Prompt]:
    """Each prompt, some of its prefixes of any length, it with another end, and in a namespace that has nothing."""
    found = []
    for prompt in prompts:
        found.append(prompt)
        found += [Prompt(prompt.tokens[: rng.randint(1, len(prompt.tokens))], prompt.names) for _ in range(prefixes)]
        other = [rng.randrange(VOCAB) for _ in range(2 * page_size)]
        found.append(Prompt(prompt.tokens[: rng.randrange(len(prompt.tokens))] + other, prompt.names))
    found.append(Prompt(prompts[0].tokens, {**prompts[0].names, "cache_salt": "never used"}))
    return found


class Blocks:
    """Another oracle, from blocks: what each tier holds, by hash, and what follows what."""

    def __init__(self, tiers: Mapping[Tier, Mapping[int, Any]]) -> None:
        """`tiers`: the blocks of a mirror, with parent, tokens, lora_name and cache_salt."""
        self.tiers = {tier: set(blocks) for tier, blocks in tiers.items()}
        self._after: dict[tuple[int | None, tuple[int, ...], str | None, str | None], int] = {}
        for blocks in tiers.values():
            for block_hash, block in blocks.items():
                self._after[block.parent, tuple(block.tokens), block.lora_name, block.cache_salt] = block_hash

    def overlap(self, prompt: Prompt, page_size: int) -> Overlap:
        lora, salt = prompt.names.get("lora"), prompt.names.get("cache_salt")
        path: list[int] = []
        for start in range(0, len(prompt.tokens) - page_size + 1, page_size):
            page = tuple(prompt.tokens[start : start + page_size])
            found = self._after.get((path[-1] if path else None, page, lora, salt))
            if found is None:
                break
            path.append(found)
        length = 0
        reached = []
        for tier in TIERS:
            held = self.tiers.get(tier, set())
            while length < len(path) and path[length] in held:
                length += 1
            reached.append(length * page_size)
        return Overlap(*reached)
