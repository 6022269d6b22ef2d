"""Pipeline stages: each has a rank of its own, which may hold another part of a prompt than the others, and all must
match alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from operator import methodcaller
from typing import TYPE_CHECKING, TypeVar, Unpack

from sglcache.client.client import checked_acquire
from sglcache.client.connection import Pending
from sglcache.core.key import pack
from sglcache.errors import BadRequest, Changed, SglcacheError

if TYPE_CHECKING:
    from sglcache.client.client import AcquireOptions, Client, NamespaceOptions, Peeked, Tokens
    from sglcache.client.lease import Lease

T = TypeVar("T")
U = TypeVar("U")


def acquire_alike(
    stages: Sequence[Client], tokens: Tokens, *, tries: int = 8, **options: Unpack[AcquireOptions]
) -> list[Lease]:
    """A lease on every stage, all with the same match: the longest that every stage has. All of them, or an error.

    Every stage is asked (`peek`), then held to the least that was said (`exact`). Where one has lost some of it since,
    the others' leases are given back and all are held to what is left, `tries` times at most; then Changed. NoSpace of
    any stage is raised once the others' are given back. What only the third tier of a stage has is brought to its host
    first, as `prefetch` says. `states` are of those stages that have layers with states. Three round trips to all at
    once, and one for each time more; where there are windows or states, so that a stage need not have what is shorter
    than its match, also one for each length that not all had.
    """
    if not stages or tries < 1 or options.get("exact") is not None:
        raise BadRequest(f"{len(stages)} stages, tries={tries}: at least one of each, and `exact` is found out here")
    checked_acquire(options)
    packed = pack(tokens)
    whole = math.lcm(*(stage.geometry.page_size for stage in stages))
    limit = options.pop("limit", None)
    stateful = any(stage.keeps_states for stage in stages)
    policy, timeout_s = options.pop("prefetch", None), options.pop("prefetch_timeout_s", None)
    namespace: NamespaceOptions = {
        "lora": options.get("lora"),
        "extra_key": options.get("extra_key"),
        "cache_salt": options.get("cache_salt"),
    }
    wanted = packed if limit is None else packed[: 4 * limit]
    if policy != "none":
        _, errors = _all(
            stages, lambda stage: stage.prefetch_begin(wanted, policy=policy, timeout_s=timeout_s, **namespace)
        )
        if errors:
            raise errors[0]
    agreed = _agree(stages, packed, len(wanted) // 4, whole, namespace)
    for _ in range(tries):
        options["exact"] = agreed - agreed % whole
        leases, errors = _all(stages, lambda stage: stage.acquire_begin(packed, **_of(stage, options, stateful)))
        if not errors:
            return leases
        _all(leases, lambda lease: lease.cancel_begin())  # nobody was told of their pages
        for error in errors:
            if not isinstance(error, Changed):
                raise error
        agreed = min(error.matched_tokens for error in errors)
    raise errors[0]


def _of(stage: Client, options: AcquireOptions, stateful: bool) -> AcquireOptions:
    """What is asked of this stage: no states, where it has no layers that have any, and another has."""
    if stateful and not stage.keeps_states and "states" in options:
        options = options.copy()
        del options["states"]
    return options


def _agree(stages: Sequence[Client], tokens: bytes, most: int, whole: int, namespace: NamespaceOptions) -> int:
    """The longest match of at most so many tokens, a multiple of `whole`, that every stage says it has."""
    agreed = most
    while True:
        agreed -= agreed % whole
        part = tokens[: 4 * (agreed + 1)]  # where keys are pairs a match needs the token behind it
        peeked: list[Peeked]
        peeked, errors = _all(stages, methodcaller("peek_begin", part, **namespace))
        if errors:
            raise errors[0]
        least = min(agreed, *(each.matched_tokens for each in peeked))
        if least == agreed or not any(stage.companions for stage in stages):
            return least
        agreed = least


def _all(items: Iterable[T], begin: Callable[[T], Pending[U]]) -> tuple[list[U], list[SglcacheError]]:
    """Begin it with each, then wait for each: what came of it, and what went wrong."""
    begun: list[Pending[U]] = []
    results: list[U] = []
    errors: list[SglcacheError] = []
    for item in items:
        try:
            begun.append(begin(item))
        except SglcacheError as error:
            errors.append(error)
    for pending in begun:
        try:
            results.append(pending.wait())
        except SglcacheError as error:
            errors.append(error)
    return results, errors
