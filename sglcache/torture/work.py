"""The prompts of all runners, from one seed, and what each page of them is to hold.

Conversations over a few system prompts, which branch, come again a turn longer, and are asked for in several
namespaces: so runners share most prefixes, and the same tokens in another namespace are another page.

A page's content is a function of its namespace, of all tokens up to its end, and of the resource, shard, layer and
place: `named` replaces the tokens by numbers that say the first two of these, and `bench.contents` does the rest. So a
page of another prefix or namespace is noticed as one with another token would be.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from sglcache.client.client import NamespaceOptions

Tokens = npt.NDArray[np.uint32]

VOCAB = 4096
NUM_SYSTEMS = 3
TURNS = 8  # of a conversation
NAMESPACES: tuple[NamespaceOptions, ...] = (
    {},
    {"cache_salt": "blue"},
    {"cache_salt": "green"},
    {"lora": "adapter"},
    {"lora": "adapter", "cache_salt": "blue"},
    {"extra_key": "blue"},
)
PLAIN_SHARE = 0.6  # of requests in no namespace
TENANTS = (None, None, "acme", "bulk")


class Prompt(NamedTuple):
    """What a request is of: its prompt, and behind it what the model says."""

    tokens: Tokens
    prompt_tokens: int
    namespace: NamespaceOptions
    session_id: str
    tenant: str | None


class Work:
    """Prompts for a device pool of so many tokens: what is asked for again and again is twice of what it holds."""

    def __init__(self, seed: int, *, page_size: int, pool_tokens: int, share: int) -> None:
        """`share`: of the pool each prompt takes one part of so many, at most."""
        self.seed = seed
        self.page_size = page_size
        self.longest = max(2 * page_size, min(pool_tokens // max(2, share), 64 * page_size))
        self.num_conversations = max(4, 4 * pool_tokens // self.longest)

    def draw(self, rng: random.Random) -> Prompt:
        """The next request of a runner with this generator."""
        # Some conversations are asked for much more often than others.
        number = int(self.num_conversations * rng.random() ** 2)
        plan = random.Random(f"{self.seed}/{number}")
        system_tokens = plan.randint(0, self.longest // 3)
        ends = sorted(plan.randint(1, self.longest) for _ in range(TURNS))
        body = self._tokens(number)
        body[:system_tokens] = self._tokens(-1 - number % NUM_SYSTEMS)[:system_tokens]
        turn = rng.randrange(TURNS)
        stop = max(2, ends[turn])
        if rng.random() < 0.25:  # somebody goes on otherwise
            at, branch = rng.randrange(stop), rng.randrange(1, 3)
            body[at:] = self._tokens(number, branch)[at:]
        if rng.random() < 0.05:  # nobody has asked for it before
            body = np.random.default_rng(rng.getrandbits(32)).integers(0, VOCAB, self.longest, np.uint32)
        more = min(self.longest - stop, rng.choice((0, 1, self.page_size, 3 * self.page_size)))
        namespace = NAMESPACES[0] if rng.random() < PLAIN_SHARE else rng.choice(NAMESPACES)
        return Prompt(body[: stop + more], stop, namespace, f"conversation-{number}", rng.choice(TENANTS))

    def _tokens(self, *names: int) -> Tokens:
        rng = np.random.default_rng([self.seed & 0xFFFFFFFF, *(name & 0xFFFFFFFF for name in names)])
        return rng.integers(0, VOCAB, self.longest, np.uint32)


def named(tokens: Tokens, namespace: NamespaceOptions, page_size: int) -> Tokens:
    """For each token what its page is a page of: the namespace and all tokens up to the page's end. uint32 [n]."""
    digest = repr(sorted(namespace.items())).encode()
    found = np.empty(len(tokens), np.uint32)
    for start in range(0, len(tokens), page_size):
        digest = xxhash.xxh3_64_digest(digest + tokens[start : start + page_size].tobytes())
        found[start : start + page_size] = int.from_bytes(digest[:4], "little")
    return found
