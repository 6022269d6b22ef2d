"""What can be proved of a live rank, one thing after the other, without stopping it: `sglcache fsck` asks for each.

A check is a generator over slices of a few milliseconds each, begun anew when a command changes what it looks at
(`sessions._Checking`). It yields how much it has looked at and appends to `found` what is wrong, in words. Nothing is
believed that can be looked at: counters are held against walks, the journal against the tree, descriptors against what
the kernel says they are.
"""

from __future__ import annotations

import fcntl
import os
import select
import stat
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from sglcache.core import invariants
from sglcache.core.index import DEVICE, HOST, Index
from sglcache.core.restore import NOBODY
from sglcache.memory.journal import Journal
from sglcache.memory.pools import Pool

if TYPE_CHECKING:
    from sglcache.memory.pools import DevicePool, Pools
    from sglcache.server.rank import Rank
    from sglcache.server.sessions import Member, Sessions
    from sglcache.server.third import ThirdTier
    from sglcache.storage.store import Stats

SLICE = 1000  # nodes, pages or members
MASK = (1 << 64) - 1

Found = list[str]
Check = Callable[[Found], Iterator[int]]


class Exact(Protocol):
    """A store that knows what it holds."""

    def __contains__(self, digest: bytes) -> bool: ...

    def stats(self) -> Stats: ...


class NotNow(Exception):
    """What is to be looked at is in the midst of something; the check can be tried again. The message says what."""


class NotHere(Exception):
    """This rank has no such thing; the message says why."""


def of(rank: Rank) -> Mapping[str, Check]:
    """By name, in the order in which `sglcache fsck` makes them."""
    parts = rank.parts
    index = parts.index

    def memory(found: Found) -> Iterator[int]:
        for each in parts.resources:
            for pools, tier, num_pages in (
                (each.device, DEVICE, each.form.num_pages), (each.host, HOST, each.form.host_pages)
            ):  # fmt: skip
                yield from pools_as_configured(pools, num_pages, tier == DEVICE or config.host.keep_path is None, found)
        yield from slots_as_configured(index, [each.form for each in parts.resources], found)
        yield from private(rank.socket, found)

    config = rank.config
    return {
        "books": lambda found: books(index, found),
        "digests": lambda found: digests(index, found),
        "journal": lambda found: journal(index, parts.journal, found),
        "third": lambda found: third(index, parts.owner.third, found),
        "sessions": lambda found: sessions(index, parts.sessions, found),
        "descriptors": lambda found: descriptors(parts.sessions, memfds_of(rank), len(parts.listener.hearing), found),
        "memory": memory,
    }


def books(index: Index, found: Found) -> Iterator[int]:
    """Law 4, slot by slot, and all that `core.invariants` knows."""
    for _ in invariants.slices(index, found, SLICE):
        yield 0
    yield index.stats().num_nodes


def digests(index: Index, found: Found) -> Iterator[int]:
    """Of each tier what the index says it has told, against the blocks that it has."""
    if index.log is None:
        raise NotHere("events are off")
    if index.announcing or index.retelling:
        raise NotNow("everything is being told anew")
    size = index.hasher.size
    counts = {tier: [0, 0] for tier in index.told_tiers}
    for nodes in index.walk(SLICE):
        for node in nodes:
            words = np.frombuffer(node.digests, ">u8")[:: size // 8]
            for tier in node.tiers:
                if tier in counts:
                    counts[tier][0] += len(words)
                    counts[tier][1] += int(words.sum(dtype=np.uint64))
        yield len(nodes)
    for tier, (count, total) in index.digest().items():
        have, sums = counts[tier]
        if (count, total & MASK) != (have, sums & MASK):
            found.append(
                f"{tier.name}: {count} blocks with the sum {total & MASK:016x} were told, and {have} with "
                f"{sums & MASK:016x} are there"
            )


def journal(index: Index, kept: Journal | None, found: Found) -> Iterator[int]:
    """Every page on the host has a row that says what it is and what is above it, and there is no other row."""
    if kept is None:
        raise NotHere("no journal is kept")
    held = [0] * (index.tree.C // index.T)
    for count, node in enumerate(index.tree.nodes(), 1):
        if node.cells[HOST] is not None and not node.writing >> HOST & 1:
            _rows_of_node(index, kept, node, held, found)
        if count % SLICE == 0:
            yield SLICE
    for resource, count in enumerate(held):
        rows = kept.num_held(resource)
        if rows != count and not kept.num_unnamed:
            found.append(f"{_resource(index, resource)}: {count} slots hold something, and {rows} have a row")
    yield sum(held)


def _rows_of_node(index: Index, kept: Journal, node: Any, held: list[int], found: Found) -> None:
    slots = np.frombuffer(node.cells[HOST], "<i4")
    rows = kept.rows_of(0, slots)
    held[0] += len(slots)
    if not rows.seqs.all():
        if not kept.num_unnamed:
            found.append(f"{node!r}: the journal has no row of slots {slots[rows.seqs == 0][:8].tolist()}")
        return
    parent = node.parent
    root = parent.parent is None
    above = NOBODY if root else int(np.frombuffer(parent.cells[HOST], "<i4")[-1])
    owners = np.concatenate(([above], slots[:-1]))
    if not np.array_equal(rows.owners, owners):
        found.append(f"{node!r}: the journal has {rows.owners[:8].tolist()} above its pages, not {owners[:8].tolist()}")
    elif not np.array_equal(rows.owner_seqs[1:], rows.seqs[:-1]):
        found.append(f"{node!r}: the journal's rows name pages that were in these slots before")
    elif not root and int(rows.owner_seqs[0]) != kept.seq_of(0, above):
        found.append(f"{node!r}: the journal's row names a page that was in slot {above} before")
    if root and kept.namespace_of(int(slots[0])) != node.space.namespace:
        found.append(f"{node!r}: the journal has it in another namespace")
    page_size = index.config.page_size
    tokens = np.frombuffer(node.key, "<u4")[: len(slots) * page_size].reshape(-1, page_size)
    if not np.array_equal(kept.tokens_of(slots)[:, :page_size], tokens):
        found.append(f"{node!r}: the journal has other tokens")
    for resource in range(1, len(held)):
        c = resource * index.T + HOST
        run = node.cells[c]
        if run is None or node.writing >> c & 1:
            continue
        mine = np.frombuffer(run, "<i4")
        held[resource] += len(mine)
        beside = kept.rows_of(resource, mine)
        if not beside.seqs.all():
            found.append(f"{node!r}: the journal has no row of its {_resource(index, resource)}")
        elif not np.array_equal(beside.owners, slots[-1:] if index.tree.by_end[c] else slots):
            found.append(f"{node!r}: the journal has its {_resource(index, resource)} of other pages")


def _resource(index: Index, number: int) -> str:
    return "full" if not number else index.resources[number * index.T].name


def third(index: Index, below: ThirdTier | None, found: Found) -> Iterator[int]:
    """What the index believes an exact store has, it has; and no more."""
    if below is None or index.l3 is None:
        raise NotHere("there is no third tier")
    if not below.store.exact:
        raise NotHere("what the third tier holds, it alone knows")
    if below.broken:
        raise NotHere(f"the third tier is left alone: {below.why}")
    if not below.ready or below.busy:
        raise NotNow("the third tier is at work")
    # Of an exact store; not by its type, which would load SQLite into ranks that have none.
    store, shelf = cast(Exact, below.store), index.l3.shelf
    number, seen = 0, 0
    while (segment := shelf.digests_after(number)) is not None:
        number, names = segment
        missing = sum(name not in store for name in names)
        if missing:
            found.append(f"{below.tier.name}: {missing} pages of a segment are believed to be there, and are not")
        seen += len(names)
        yield len(names)
    if below.busy:
        raise NotNow("the third tier is at work")
    if (count := store.stats().num_pages) != seen:
        found.append(f"{below.tier.name}: the store holds {count} pages, and the index believes {seen}")


def sessions(index: Index, attached: Sessions, found: Found) -> Iterator[int]:
    """Who is attached is known to the index, and holds what it should: a living process, a ring, a doorbell."""
    known = {session.id for session in attached.sessions}
    for number in index.sessions:
        if number not in known and not index.sessions[number].ended:
            found.append(f"session {number}: the index serves it, and nobody is attached")
    for count, member in enumerate(list(attached.members), 1):
        if member.session is not None and not member.gone:
            _look_at(member, found)
        if count % SLICE == 0:
            yield SLICE
    yield len(attached.members)


def _look_at(member: Member, found: Found) -> None:
    if _kind(member.pidfd) != "anon_inode:[pidfd]":
        found.append(f"{member!r}: descriptor {member.pidfd} is no process, but {_kind(member.pidfd)}")
    elif select.select([member.pidfd], [], [], 0)[0]:
        raise NotNow(f"pid {member.pid} has just died")
    if not member.touches:
        return
    bell = member.ring.doorbell if member.ring is not None else -1
    for fd in (bell, member.load_doorbell):
        if _kind(fd) != "anon_inode:[eventfd]":
            found.append(f"{member!r}: its doorbell, descriptor {fd}, is {_kind(fd)}")


def descriptors(attached: Sessions, memfds: int, hearing: int, found: Found) -> Iterator[int]:
    """Every process and piece of memory that this process holds open is accounted for, by what the kernel names it.

    Sockets and eventfds are libzmq's as well, who does not tell; so those are left out.
    """
    kinds: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):
        kind = _kind(int(name))
        kind = "memfd" if kind.startswith("/memfd:sglcache") else kind
        kinds[kind] = kinds.get(kind, 0) + 1
    processes = hearing + sum(member.pidfd >= 0 for member in attached.members)
    for what, kind, explained in (
        ("processes", "anon_inode:[pidfd]", processes), ("pieces of shared memory", "memfd", memfds)
    ):  # fmt: skip
        if (there := kinds.get(kind, 0)) != explained:
            found.append(f"{there} descriptors of {what} are open, and {explained} have an owner")
    yield sum(kinds.values())


def memfds_of(rank: Rank) -> int:
    """Descriptors of memory that this rank should have open."""
    parts = rank.parts
    pools = [pool for each in parts.resources for pools in (each.device, each.host) for pool in pools.shards]
    fds = (*(fd for pool in pools for fd in pool.fds), parts.load_ring.fd, *parts.keeper.holds)
    return sum(_kind(fd).startswith("/memfd:") for fd in fds)


def pools_as_configured(pools: Pools[DevicePool], num_pages: int, sealed: bool, found: Found) -> Iterator[int]:
    """The memory is as large as it should be, and nobody can make it smaller. (A card's has one size for ever.)"""
    for pool in pools.shards:
        if not isinstance(pool, Pool):
            if pool.placement.num_pages != num_pages:
                found.append(f"a pool of {pool.placement.num_pages} pages: {num_pages} are configured")
            continue
        status = os.fstat(pool.fd)
        if pool.num_pages != num_pages or status.st_size != pool.num_bytes:
            found.append(f"a pool of {status.st_size} bytes and {pool.num_pages} pages: {num_pages} are configured")
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        if sealed and fcntl.fcntl(pool.fd, fcntl.F_GET_SEALS) & seals != seals:
            found.append(f"the memory of a pool, descriptor {pool.fd}, can be resized by whoever has it")
    yield len(pools.shards)


def slots_as_configured(index: Index, forms: list[Any], found: Found) -> Iterator[int]:
    for c, pool in enumerate(index.pools):
        form = forms[c // index.T]
        most = form.num_pages if c % index.T == DEVICE else form.host_pages
        # The host's memory comes bit by bit, where it is populated.
        if pool.total > most or (c % index.T == DEVICE and pool.total != most):
            found.append(f"{_resource(index, c // index.T)}: {pool.total} slots where {most} are configured")
    yield len(index.pools)


def private(socket: Any, found: Found) -> Iterator[int]:
    """The control socket is its owner's alone."""
    try:
        mode = stat.S_IMODE(os.stat(socket).st_mode)
    except OSError as exc:
        found.append(f"{socket}: {exc.strerror}; nobody can attach")
    else:
        if mode & 0o077:
            found.append(f"{socket}: mode {mode:04o} lets others in")
    yield 1


def _kind(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return "not open"
