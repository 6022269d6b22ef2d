"""Blocks of our own, put there as a small runner, and whether a mirror has them as they are."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from sglcache.client.client import Client
from sglcache.client.discovery import Server
from sglcache.client.doctor.finding import Finding, failed, ok, skipped
from sglcache.client.doctor.ports import Heard
from sglcache.client.hashes import named
from sglcache.client.mirror import Mirror
from sglcache.errors import NoSpace, SglcacheError
from sglcache.units import Tier

PAGES = 3  # of each prompt
VOCAB = 1 << 17
PAUSE_S = 0.05


class Prompt(NamedTuple):
    """Random tokens in a namespace of their own, on one rank."""

    rank: int
    tokens: list[int]
    lora: str | None = None
    salt: str | None = None
    hidden: bool = False  # the stream tells the salt as the hex of its sha256

    @property
    def num_cached(self) -> int:
        """Tokens of its whole pages: all but the last one."""
        return len(self.tokens) - 1

    @property
    def names(self) -> dict[str, str]:
        """As a router asks for it."""
        if self.lora is not None:
            return {"lora_name": self.lora}
        assert self.salt is not None
        return {"cache_salt": hashlib.sha256(self.salt.encode()).hexdigest() if self.hidden else self.salt}

    @property
    def strangers(self) -> list[dict[str, str]]:
        """What is not its namespace: none, and the same name as what it is not."""
        name = next(iter(self.names.values()))
        return [{}, {"cache_salt" if self.lora is not None else "lora_name": name}]

    def __str__(self) -> str:
        return f"rank {self.rank} {'adapter' if self.lora is not None else 'salt'}"


class Runner:
    """Puts blocks, and looks for them in a mirror. They are held until it is closed: nothing evicts them meanwhile."""

    def __init__(self, server: Server, sockets: Mapping[int, Path], timeout_s: float) -> None:
        self.server = server
        self.sockets = sockets
        self.timeout_s = timeout_s
        self.name = f"sglcache-doctor-{secrets.token_hex(6)}"
        self._clients: dict[int, Client] = {}
        self._held = contextlib.ExitStack()
        self._put: list[Prompt] = []
        self.prompts: list[Prompt] = []  # of these, those that arrived
        self.has_host: set[int] = set()  # ranks

    def new_tokens(self) -> list[int]:
        random = secrets.SystemRandom()
        # One more than the pages hold: with bigram keys the last page has no name before that one.
        return [random.randrange(VOCAB) for _ in range(PAGES * self.server.block_size + 1)]

    def put(self, prompts: list[Prompt]) -> None:
        """Be their rank's runner. Nothing is computed: nobody will ever read these pages."""
        for prompt in prompts:
            client = self._clients.get(prompt.rank)
            if client is None:
                client = Client(self.sockets[prompt.rank], name="sglcache doctor")
                self._clients[prompt.rank] = self._held.enter_context(client)
            if client.geometry.host_pages:
                self.has_host.add(prompt.rank)
            room = prompt.num_cached
            lease = client.acquire(prompt.tokens, lora=prompt.lora, cache_salt=prompt.salt, room=room)
            self._held.enter_context(lease).commit()

    def close(self) -> None:
        """Let go of all of them; of a daemon that has died nothing is held."""
        with contextlib.suppress(SglcacheError):
            self._held.close()

    def put_new(self, rank: int) -> Iterator[Finding]:
        """A prompt under a salt, and one under an adapter of the same name. What went wrong."""
        prompts = [
            Prompt(rank, self.new_tokens(), salt=self.name),
            Prompt(rank, self.new_tokens(), lora=self.name),
        ]
        try:
            self.put(prompts)
            self._put += prompts
        except NoSpace as exc:
            yield failed(f"rank {rank} blocks", exc.message, "try again when there is room for a few pages")
        except SglcacheError as exc:
            yield failed(f"rank {rank} blocks", exc.message, "look at what `sglcache status` says")

    def examine(self, mirror: Mirror, rank: int, heard: Heard) -> Iterator[Finding]:
        """Whether a mirror has what was put on the rank."""
        view = _View(mirror, self.timeout_s)
        for prompt in self._put:
            if prompt.rank != rank:
                continue
            if prompt.lora is not None and heard.form == "array":
                yield skipped(str(prompt), "an array has no place for one: its blocks are not told of")
                continue
            told = [prompt] if prompt.salt is None else [prompt, prompt._replace(hidden=True)]
            found = view.wait_for(told, Tier.DEVICE)
            if found is None:
                remedy = "run `sglcache verify`: it says where stream and index part"
                yield failed(str(prompt), "blocks of our own, committed in that namespace, did not arrive", remedy)
                return
            self.prompts.append(found)
            more = ", which is told as its sha256: routers must ask with that" if found.hidden else ""
            yield ok(str(prompt), f"blocks arrive under it{more}")
            if any(view.held(found, names) for names in found.strangers):
                yield failed(str(prompt), "its blocks match without its name, too", "update the daemon")
        yield from self._hashes(mirror, rank)
        if rank not in self.has_host:
            yield skipped(f"rank {rank} host", "there is no host tier")
        elif all(view.wait_for([each], Tier.HOST) for each in self.prompts if each.rank == rank):
            yield ok(f"rank {rank} host", "they arrive in the host tier, too")
        else:
            remedy = "look whether `sglcache status` shows copies that do not end, or a full host pool"
            yield failed(f"rank {rank} host", "they did not arrive in the host tier", remedy)

    def _hashes(self, mirror: Mirror, rank: int) -> Iterator[Finding]:
        name = self.server.hash_name
        if name is None:
            yield skipped(f"rank {rank} hashes", "/server_info does not say which")
            return
        for prompt in self.prompts:
            packed = b"".join(token.to_bytes(4, "little") for token in prompt.tokens)
            wanted = set(named(name, self.server.bigram)(packed, self.server.block_size, prompt.lora, prompt.salt))
            if prompt.rank == rank and not wanted <= mirror.hashes(Tier.DEVICE, rank):
                remedy = "a router that computes hashes must not follow this daemon; update one of the two"
                yield failed(f"rank {rank} hashes", f"the stream's names are not the tokens' {name}", remedy)
                return
        yield ok(f"rank {rank} hashes", f"{name}, as /server_info says")


class _View:
    """What the mirror has of prompts, now or soon."""

    def __init__(self, mirror: Mirror, timeout_s: float) -> None:
        self.mirror = mirror
        self._timeout_s = timeout_s

    def wait_for(self, told: list[Prompt], tier: Tier) -> Prompt | None:
        """The first of these that is wholly there; None: none in time."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            for prompt in told:
                if self.held(prompt, prompt.names, tier) == prompt.num_cached:
                    return prompt
            if time.monotonic() > deadline:
                return None
            self.mirror.step(PAUSE_S)

    def held(self, prompt: Prompt, names: dict[str, str], tier: Tier | None = None) -> int:
        """How many of its tokens there are in the namespace of these names."""
        match = self.mirror.longest_match(
            prompt.tokens, lora_name=names.get("lora_name"), cache_salt=names.get("cache_salt"), tier=tier
        )
        return match[prompt.rank].tokens
