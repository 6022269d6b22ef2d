"""What the pools of a configuration take, and whether this machine has it: told before anything starts.

Pages take memory when they are written, so that too little would show only after hours, as a process that the kernel
kills. `sglcache check` prints what is found here, and `sglcache serve` refuses what it refuses.

What counts against which limit: all pools that are in RAM count against the host's. Against a cgroup's limit the host
pools do, which the ranks write; the device pools of a CPU are charged to the runners that write them (docs/install.md),
so where only both together are too much it is a warning. Against both count the processes themselves, and each rank's
ring of event batches.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from sglcache import paths
from sglcache.config import Config, size_text
from sglcache.errors import ConfigError
from sglcache.memory.geometry import (
    FULL,
    LEAST_SLOTS,
    WINDOW_SHARE,
    CompanionForm,
    Form,
    Geometry,
    companions_of,
)
from sglcache.memory.journal_form import Shape
from sglcache.server.doors import FDS_PER_CONNECTION
from sglcache.server.tenants import limits_of
from sglcache.units import Tier

UNTRIED = (
    "this version's code for cards has not run on one: `sglcache serve` has them with pool.untried = true alone, and "
    "nothing of it is to be relied on"
)
BLOCK = 4096  # of a disk: a file takes whole ones
HEADER_BYTES = 256  # of a page's file, about, beside its tokens

NO_LIMIT = 1 << 60  # what cgroup v1 writes for none is near 2**63
CAP_IPC_LOCK = 14
SUPERVISOR_BYTES = 50 << 20
RATIO = "host.pool_ratio"
QUARTER = 1 / WINDOW_SHARE  # of the device's pages, where nothing else is said
RANK_FDS = 64  # beside connections
RANK_BYTES = 60 << 20  # before its index grows


def file_bytes(page_bytes: int, page_size: int) -> int:
    """What a page of the host takes in a file store, about: its bytes, its tokens and a header, in whole blocks."""
    return -(-(page_bytes + HEADER_BYTES + 4 * page_size) // BLOCK) * BLOCK


class Limit(NamedTuple):
    """So many bytes at most, and who says so."""

    num_bytes: int
    name: str


class Machine(NamedTuple):
    """What a host lets its processes have."""

    ram: Limit
    cgroup: Limit | None = None  # the least of this process's and those above it
    memlock: Limit | None = None  # RLIMIT_MEMLOCK, unless we may do without
    max_fds: int | None = None  # the hard RLIMIT_NOFILE, up to which a rank raises its own


def machine(root: Path = Path("/")) -> Machine:
    """This one, as /proc and /sys below `root` say."""
    ram = Limit(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "RAM")
    limits = list(_cgroup_limits(root))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    memlock = None if soft == resource.RLIM_INFINITY or _may_lock(root) else Limit(soft, "RLIMIT_MEMLOCK")
    _, fds = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Machine(ram, min(limits, default=None), memlock, None if fds == resource.RLIM_INFINITY else fds)


def _cgroup_limits(root: Path) -> Iterator[Limit]:
    """Of version 2 and of version 1, each of our own cgroup and of those above it, as far as they can be seen."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            mounts, name = ["sys/fs/cgroup", "sys/fs/cgroup/unified"], "memory.max"
        elif "memory" in controllers.split(","):
            mounts, name = ["sys/fs/cgroup/memory"], "memory.limit_in_bytes"
        else:
            continue
        for mount in mounts:
            # A container that sees its host's paths has its own cgroup at the mount itself: the last of these.
            own = root / mount / path.strip("/")
            for folder in (own, *own.parents):
                if folder.is_relative_to(root / mount):
                    yield from _limit_in(folder / name, f"/{(folder / name).relative_to(root)}")


def _limit_in(file: Path, name: str) -> Iterator[Limit]:
    try:
        text = file.read_text().strip()
    except OSError:
        return
    if text.isdigit() and int(text) < NO_LIMIT:
        yield Limit(int(text), name)


def _may_lock(root: Path) -> bool:
    try:
        status = (root / "proc/self/status").read_text()
    except OSError:
        return False
    found = [line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")]
    return bool(found) and bool(int(found[0], 16) >> CAP_IPC_LOCK & 1)


class TierRoom(NamedTuple):
    """One tier of one resource of one rank."""

    tier: Tier
    num_pages: int  # of states: slots
    num_tokens: int  # of states: slots, too
    pool_bytes: int  # of one pool
    num_pools: int  # a device's is a shard's, a host's a part's
    bound: str  # the key, with its value, that makes it so big
    resource: str = FULL
    least: int = 1  # pages without which it is of no use
    journal_bytes: int = 0  # beside the pools, when they are full

    @property
    def num_bytes(self) -> int:
        return self.pool_bytes * self.num_pools

    @property
    def key(self) -> str:
        """The key alone."""
        return self.bound.partition(" = ")[0]

    @property
    def unit(self) -> int:
        """Tokens, or slots, of a page."""
        return self.num_tokens // self.num_pages

    @property
    def rate(self) -> float:
        """Bytes of a token, or slot, in all its pools and beside them."""
        return (self.num_bytes + self.journal_bytes) / self.num_tokens


class RankRoom(NamedTuple):
    """What one rank takes."""

    offset: int
    dp_rank: int
    pp_rank: int
    geometry: Geometry
    tiers: tuple[TierRoom, ...]  # those that it has: of the first resource, then of each companion
    companions: tuple[CompanionForm, ...] = ()

    @property
    def journal_bytes(self) -> int:
        """That the host's takes when it is full."""
        return sum(it.journal_bytes for it in self.tiers)

    def num_bytes(self, tier: Tier) -> int:
        return sum(it.num_bytes for it in self.tiers if it.tier is tier)

    def of(self, resource: str) -> list[TierRoom]:
        return [it for it in self.tiers if it.resource == resource]

    def by(self, key: str) -> list[TierRoom]:
        """What the key decides: the tier whose size it is, and then those that follow from that."""
        return [it for it in self.tiers if it.key == key]


class Room(NamedTuple):
    """What this host's ranks take together."""

    config: Config
    ranks: tuple[RankRoom, ...]

    @property
    def device_bytes(self) -> int:
        return sum(rank.num_bytes(Tier.DEVICE) for rank in self.ranks)

    @property
    def host_bytes(self) -> int:
        return sum(rank.num_bytes(Tier.HOST) for rank in self.ranks)

    @property
    def store_bytes(self) -> int:
        """What the third tier's clients take of RAM: Mooncake's give and use some."""
        storage = self.config.storage
        return (storage.segment_size + storage.buffer_size) * len(self.ranks) if storage.kind == "mooncake" else 0

    @property
    def daemon_bytes(self) -> int:
        """Beside the pools: of the processes, and the journals of what is on the host."""
        return self.process_bytes + sum(rank.journal_bytes for rank in self.ranks)

    @property
    def process_bytes(self) -> int:
        """Of the processes: each rank with its ring of batches, and the supervisor."""
        ring = self.config.events.ring_size if self.config.events.enabled else 0
        return SUPERVISOR_BYTES + len(self.ranks) * (RANK_BYTES + ring)

    @property
    def ram_bytes(self) -> int:
        """Of the pools and the third tier's clients, what is in RAM when all is full."""
        return self.host_bytes + self.store_bytes + (self.device_bytes if self.config.pool.device == "cpu" else 0)

    def refuse(self, there: Machine) -> None:
        """ConfigError, with the numbers and what to write instead: the pools can't all be there."""
        for pools, limit in ((self.ram_bytes, there.ram), (self.host_bytes, there.cgroup)):
            if limit is not None and pools + self.daemon_bytes > limit.num_bytes:
                raise self._too_much(pools, limit)

    def warnings(self, there: Machine) -> list[str]:
        """What may be right, and may be a mistake."""
        found = []
        cgroup, memlock = there.cgroup, there.memlock
        left = cgroup.num_bytes - self.daemon_bytes if cgroup is not None else 0
        if cgroup is not None and self.host_bytes <= left < self.ram_bytes:
            found.append(
                f"device and host pools take {told(self.ram_bytes)} when they are full, the daemon itself "
                f"{told(self.daemon_bytes)}, and {cgroup.name} is "
                f"{told(cgroup.num_bytes)}: that is enough only if runners in cgroups of their own write the device's"
            )
        most = max((rank.num_bytes(Tier.HOST) for rank in self.ranks), default=0)
        if self.config.pool.device == "cuda" and memlock is not None and memlock.num_bytes < most:
            found.append(
                f"a rank pins {told(most)}, and {memlock.name} is {told(memlock.num_bytes)}: CUDA does not count "
                "against it, but what registers memory for RDMA does; raise it with `ulimit -l unlimited`, "
                "LimitMEMLOCK=infinity in a unit, or --ulimit memlock=-1 of a container"
            )
        connections = self.config.limits.max_connections
        fds = connections * FDS_PER_CONNECTION + RANK_FDS
        if there.max_fds is not None and fds > there.max_fds:
            fit = max(1, (there.max_fds - RANK_FDS) // FDS_PER_CONNECTION)
            found.append(
                f"limits.max_connections = {connections} takes {fds} file descriptors, {FDS_PER_CONNECTION} for each "
                f"runner, and RLIMIT_NOFILE is {there.max_fds}: beyond {fit} of them others are refused; raise it with "
                "`ulimit -Hn`, LimitNOFILE= in a unit, or --ulimit nofile= of a container, or lower "
                "limits.max_connections"
            )
        if len({rank.tiers[0].num_tokens for rank in self.ranks}) > 1:
            least = min(self.ranks, key=lambda rank: rank.tiers[0].num_tokens)
            found.append(
                f"the ranks hold different numbers of tokens; a prefix is of use where every stage has it, so "
                f"{least.tiers[0].num_tokens:,}, rank {least.offset}'s, is what counts"
            )
        return found

    def _too_much(self, pools: int, limit: Limit) -> ConfigError:
        """With the least change that would do, in the words of the keys that decide."""
        want = pools + self.daemon_bytes
        parts = "the host's alone" if pools == self.host_bytes else None
        parts = parts or f"device {told(self.device_bytes)}, host {told(self.host_bytes)}"
        if self.store_bytes and pools != self.host_bytes:
            parts += f", Mooncake's clients {told(self.store_bytes)}"
        several = f" of {len(self.ranks)} ranks" if len(self.ranks) > 1 else ""
        path, remedy = self._remedy(pools, limit.num_bytes - self.process_bytes)
        other = "raise the limit"
        if limit.name == "RAM":
            other = "ask about another host with `sglcache check --ram SIZE`"
        return ConfigError(
            f"the pools{several} take {told(pools)} when they are full ({parts}), the daemon itself "
            f"{told(self.daemon_bytes)}, and {limit.name} is {told(limit.num_bytes)}, {told(want - limit.num_bytes)} "
            f"less; {remedy}, or {other}",
            path=path,
            value=want,
            need=want,
            have=limit.num_bytes,
            limit=limit.name,
        )

    def _remedy(self, pools: int, left: int) -> tuple[str, str]:
        """The key that decides most, and what to write so that the pools take `left` bytes."""
        if left <= 0:
            return "events.ring_size", "that is not enough for the processes alone: lower events.ring_size"
        fixed = pools - self.host_bytes  # the device's, where it counts, and what the third tier's clients take
        stores = self.store_bytes if fixed else 0
        if stores >= left:
            return "storage.segment_size", "that is not enough for Mooncake's clients: lower storage.segment_size"
        hosts = self._costs(Tier.HOST)
        # The largest alone, if that will do; else all of them, each by as much.
        for keys in (list(hosts)[:1], list(hosts)):
            rest = sum(cost for key, cost in hosts.items() if key not in keys)
            instead = self._lowered({key: hosts[key] for key in keys}, left - fixed - rest)
            if instead is not None:
                return keys[0], f"write {' and '.join(instead)} at most"
        none = [f'{key} = "0 B"' if key.endswith("size") else f"{key} = 0" for key in hosts]
        if fixed == stores:
            return next(iter(hosts)), f"write {' and '.join(none)}"
        # A host tier that is a multiple of the device's is lowered with it, and so what is there in proportion.
        apart = {its.key for rank in self.ranks for its in rank.tiers if its.tier is Tier.HOST and its.resource != FULL}
        ratio = RATIO in hosts and apart <= {its.key for rank in self.ranks for its in rank.of(FULL)}
        if ratio:
            none = [each for each in none if not each.startswith(RATIO)]
        devices = self._costs(Tier.DEVICE, ratio)
        instead = self._lowered(devices, left - stores, ratio)
        key = next(iter(devices))
        if instead is None:
            window = ", or no window," if any(rank.companions for rank in self.ranks) else ""
            return key, f"not one page{window} of each rank would fit: lower pool.page_size"
        return key, f"write {' and '.join([*instead, *none])} at most"

    def _costs(self, tier: Tier, ratio: bool = False) -> dict[str, float]:
        """The keys that decide of the tier, and the bytes that each makes it take; the one that makes most is first."""
        keys = dict.fromkeys(its.key for rank in self.ranks for its in rank.tiers if its.tier is tier)
        costs = {
            key: sum(self._rate(rank, key, ratio) * its[0].num_tokens for rank in self.ranks if (its := rank.by(key)))
            for key in keys
        }
        return dict(sorted(costs.items(), key=lambda item: -item[1]))

    def _lowered(self, costs: dict[str, float], budget: float, ratio: bool = False) -> list[str] | None:
        """What to write for each key so that they cost `budget` together, as they share it now. None: no page each.

        `ratio`: as for `_rate`.
        """
        total = sum(costs.values())
        if budget <= 0 or not total:
            return None
        instead = []
        for key, cost in costs.items():
            if not cost:  # pages without bytes
                continue
            share, rooms = int(budget * cost / total), [(rank, its) for rank in self.ranks if (its := rank.by(key))]
            first = rooms[0][1][0]
            tokens = int(share / sum(self._rate(rank, key, ratio) for rank, _ in rooms)) // first.unit * first.unit
            follow = [(it, it.num_pages * tokens // its[0].num_tokens) for _, its in rooms for it in its]
            if any(num_pages < it.least for it, num_pages in follow):
                return None
            if not key.endswith(("size", "bytes")):
                instead.append(f"{'host.num_tokens' if key == RATIO else key} = {tokens}")
                continue
            most = tokens * min(its[0].pool_bytes // its[0].num_tokens for _, its in rooms)
            if first.tier is Tier.HOST:
                parts = (its[0].num_bytes / its[0].num_tokens / self._rate(rank, key, ratio) for rank, its in rooms)
                most = int(min(parts) * share) // len(rooms)
            instead.append(f'{key} = "{_rounded(most)}"')
        return instead

    def _rate(self, rank: RankRoom, key: str, ratio: bool = False) -> float:
        """What one more token, or slot, by this key costs the rank, with all that follows from it.

        `ratio`: with a device's its host's, where that is a multiple. It is what a token costs before anything is
        rounded down to pages, so that what is found by it is enough.
        """
        first, *others = rank.by(key)
        if first.tier is Tier.HOST:
            device = rank.tiers[0]
            there = {it.resource: it for it in rank.tiers if it.tier is Tier.DEVICE}
            return first.rate + sum(it.rate * there[it.resource].num_tokens / device.num_tokens for it in others)
        rate = 0.0
        for it, part in ((first, 1.0), *((it, QUARTER) for it in others)):
            rate += it.rate * part
            hosts = [its for its in rank.of(it.resource) if its.tier is Tier.HOST and its.key == RATIO]
            if ratio:
                rate += sum(host.rate * part * self.config.host.pool_ratio for host in hosts)
        return rate


class DiskRoom(NamedTuple):
    """A file store's place, for all ranks of this host."""

    path: Path
    want: int  # bytes, when it is full
    used: int  # bytes of what is there already
    free: int  # bytes that the disk has left for this user
    in_use: tuple[str, ...] = ()  # folders of ranks that a daemon has now

    @property
    def warnings(self) -> list[str]:
        busy = [f"{folder} is in use by a daemon that runs: beside it another can't start" for folder in self.in_use]
        if self.want <= self.used + self.free:
            return busy
        return [
            *busy,
            f"storage.size lets the ranks store {told(self.want)}, and the disk of {self.path} has {told(self.free)} "
            f"free beside {told(self.used)} that are stored there: once it is full the oldest pages go for new ones; "
            "lower storage.size, or move storage.path",
        ]


def disk(config: Config, *, patient: bool = True) -> DiskRoom | None:
    """None: nothing is kept on a disk. ConfigError: a rank's folder can't be used, as making one beside it shows.

    What is there is counted file by file; unless `patient`, only where it matters to the warning, and whether a daemon
    has it is left to the ranks.
    """
    storage = config.storage
    if storage.kind != "file" or storage.path is None:
        return None
    parallel = config.parallel
    folders = [storage.path / f"rank-{pp * parallel.dp_size + dp}" for dp, pp in parallel.local()]
    for there in dict.fromkeys(map(_nearest, folders)):
        if why := _refusal(there, made=there in folders):
            raise ConfigError(
                f"storage.path = {storage.path}: {there} {why}", path="storage.path", value=str(storage.path)
            )
    there = _nearest(storage.path)
    try:
        status = os.statvfs(there)
    except OSError as exc:
        raise ConfigError(f"storage.path = {storage.path}: {exc.strerror}", path="storage.path") from None
    want, free = storage.size * len(config.parallel.local()), status.f_bavail * status.f_frsize
    in_use = tuple(str(folder) for folder in folders if patient and paths.is_locked(folder / "lock"))
    return DiskRoom(storage.path, want, _used(storage.path) if patient or want > free else 0, free, in_use)


def _nearest(path: Path) -> Path:
    """Of it and the folders above it the first that is there."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _refusal(folder: Path, made: bool) -> str | None:
    """Why nothing can be made in it. `made`: it need not have room, what is there can be served."""
    if not folder.is_dir():
        return "is no folder; give a folder that this user may write"
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".sglcache-", dir=folder))
    except OSError as exc:
        if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
            return f"can't be written ({exc.strerror}); give a folder that this user may write"
        if not made:
            return f"has no room ({exc.strerror}); make some, or give a folder on another disk"
    return None


def _used(folder: Path) -> int:
    """Bytes that the files below it take of their disk."""
    used = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # gone meanwhile
                used += os.lstat(os.path.join(place, name)).st_blocks * 512
    return used


def weigh(config: Config) -> Room:
    """ConfigError: a pool can't be as it is said."""
    ranks = []
    for dp_rank, pp_rank in config.parallel.local():
        own = config.for_stage(pp_rank)
        try:
            geometry = Geometry.of(own)
            companions = companions_of(own, geometry)
            limits_of(own, geometry, {})
        except ConfigError as exc:
            if not config.parallel.stages:
                raise
            path = config.key_of(pp_rank, exc.path)
            message = exc.message.replace(exc.path, path)
            if path == exc.path:
                message = f"parallel.stages.{pp_rank}: {message}"
            raise ConfigError(message, **{**exc.facts, "path": path}) from None
        tiers = list(_tiers(own, geometry, companions, partial(config.key_of, pp_rank)))
        offset = pp_rank * config.parallel.dp_size + dp_rank
        ranks.append(RankRoom(offset, dp_rank, pp_rank, geometry, tuple(tiers), companions))
    return Room(config, tuple(ranks))


def _tiers(
    own: Config, full: Geometry, companions: Sequence[CompanionForm], key_of: Callable[[str], str]
) -> Iterator[TierRoom]:
    """`own`: the stage's configuration; `key_of`: where what it has of a key is written."""

    def said(section: str, *keys: str) -> str:
        """The first of these keys that was written, with its value; or "" """
        for key in keys:
            if (value := getattr(getattr(own, section), key)) is not None:
                text = f'"{size_text(value)}"' if key in ("size", "bytes") else value
                return f"{key_of(f'{section}.{key}')} = {text}"
        return ""

    bounds = [said("pool", "size", "num_tokens"), said("host", "size", "num_tokens", "pool_ratio")]
    rows = [0] * (1 + len(companions))
    if own.host.keep:
        rows = Shape.of(full.page_size, own.pool.bigram, [full, *(each.form for each in companions)]).slot_bytes
    yield from _both(FULL, full, full.page_size, bounds, rows[0])
    for each, row in zip(companions, rows[1:], strict=True):
        kind, form = each.kind, each.form
        if isinstance(form, Geometry):
            device = said(kind, "bytes", "num_tokens") or f"{bounds[0]}, a quarter of it"
            host, unit = said(kind, "host_tokens"), form.page_size
            least = (each.window_pages, each.window_pages)
        else:
            device, host, unit = said(kind, "bytes", "num_slots"), said(kind, "host_slots"), 1
            least = (LEAST_SLOTS, 1)
        yield from _both(kind, form, unit, [device, host or f"{bounds[1]}, in proportion"], row, least)


def _both(
    resource: str, form: Form, unit: int, bounds: Sequence[str], row_bytes: int, least: Sequence[int] = (1, 1)
) -> Iterator[TierRoom]:
    """The tiers that a resource has; `unit`: tokens, or slots, of a page; `row_bytes`: of the journal, for a page."""
    sizes = [(Tier.DEVICE, form.num_pages, form.pool_bytes, form.num_shards)]
    sizes.append((Tier.HOST, form.host_pages, form.host_pool_bytes, form.num_parts))
    for (tier, num_pages, pool_bytes, num_pools), bound, fewest in zip(sizes, bounds, least, strict=True):
        if num_pages:
            rows = num_pages * row_bytes if tier is Tier.HOST else 0
            yield TierRoom(tier, num_pages, num_pages * unit, pool_bytes, num_pools, bound, resource, fewest, rows)


def told(num_bytes: int) -> str:
    """For people, in both kinds of units: 112 GB (104.3 GiB)."""
    for power, decimal, binary in ((4, "TB", "TiB"), (3, "GB", "GiB"), (2, "MB", "MiB"), (1, "kB", "KiB")):
        if num_bytes >= 1000**power:
            return f"{num_bytes / 1000**power:.4g} {decimal} ({num_bytes / 1024**power:.4g} {binary})"
    return f"{num_bytes} B"


def _rounded(num_bytes: int) -> str:
    """A little less, where that is easier to read."""
    return f"{num_bytes >> 20} MiB" if num_bytes >= 100 << 20 else f"{num_bytes} B"


def served(config: Config, there: Machine) -> Sequence[str]:
    """The warnings for a daemon that is about to start. ConfigError: it can't serve this."""
    untried = []
    if config.pool.device != "cpu":
        if not config.pool.untried:
            raise ConfigError(
                f'pool.device = "{config.pool.device}": `sglcache check` knows it, and this version\'s code for cards '
                'has not run on one; write pool.device = "cpu", or try it out with pool.untried = true (docs/gpu.md)',
                path="pool.device",
                value=config.pool.device,
            )
        untried = [UNTRIED]
    room = weigh(config)
    room.refuse(there)
    below = disk(config, patient=False)
    return [*untried, *room.warnings(there), *(below.warnings if below is not None else [])]
