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
import fcntl
import os
import resource
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from sglcache.config import Config, size_text
from sglcache.errors import ConfigError
from sglcache.memory.geometry import Geometry
from sglcache.units import Tier

NO_LIMIT = 1 << 60  # what cgroup v1 writes for none is near 2**63
CAP_IPC_LOCK = 14
SUPERVISOR_BYTES = 50 << 20
RANK_BYTES = 60 << 20  # before its index grows


class Limit(NamedTuple):
    """So many bytes at most, and who says so."""

    num_bytes: int
    name: str


class Machine(NamedTuple):
    """What a host lets its processes have."""

    ram: Limit
    cgroup: Limit | None = None  # the least of this process's and those above it
    memlock: Limit | None = None  # RLIMIT_MEMLOCK, unless we may do without


def machine(root: Path = Path("/")) -> Machine:
    """This one, as /proc and /sys below `root` say."""
    ram = Limit(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "RAM")
    limits = list(_cgroup_limits(root))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    memlock = None if soft == resource.RLIM_INFINITY or _may_lock(root) else Limit(soft, "RLIMIT_MEMLOCK")
    return Machine(ram, min(limits, default=None), memlock)


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
    """One tier of one rank."""

    tier: Tier
    num_pages: int
    num_tokens: int
    pool_bytes: int  # of one pool
    num_pools: int  # a device's is a shard's, a host's a part's
    bound: str  # the key, with its value, that makes it so big

    @property
    def num_bytes(self) -> int:
        return self.pool_bytes * self.num_pools


class RankRoom(NamedTuple):
    """What one rank takes."""

    offset: int
    dp_rank: int
    pp_rank: int
    geometry: Geometry
    tiers: tuple[TierRoom, ...]  # those that it has

    def num_bytes(self, tier: Tier) -> int:
        return sum(it.num_bytes for it in self.tiers if it.tier is tier)


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
        """Of the processes, beside the pools: each rank with its ring of batches, and the supervisor."""
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
                f"device and host pools take {told(self.ram_bytes)} when they are full, the daemon's processes "
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
        path, remedy = self._remedy(pools, limit.num_bytes - self.daemon_bytes)
        other = "raise the limit"
        if limit.name == "RAM":
            other = "ask about another host with `sglcache check --ram SIZE`"
        return ConfigError(
            f"the pools{several} take {told(pools)} when they are full ({parts}), the daemon's processes "
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
        hosts = self._by_key(Tier.HOST)
        # The largest alone, if that will do; else all of them, each by as much.
        for keys in (list(hosts)[:1], list(hosts)):
            rest = sum(self._bytes(hosts[key], Tier.HOST) for key in hosts if key not in keys)
            instead = self._lowered({key: hosts[key] for key in keys}, Tier.HOST, left - fixed - rest)
            if instead is not None:
                return keys[0], f"write {' and '.join(instead)} at most"
        none = [f'{key} = "0 B"' if key.endswith("size") else f"{key} = 0" for key in hosts]
        if fixed == stores:
            return next(iter(hosts)), f"write {' and '.join(none)}"
        none = [each for each in none if not each.startswith("host.pool_ratio")]
        devices = self._by_key(Tier.DEVICE)
        instead = self._lowered(devices, Tier.DEVICE, left - stores)
        key = next(iter(devices))
        if instead is None:
            return key, "not one page of each rank would fit: lower pool.page_size"
        return key, f"write {' and '.join([*instead, *none])} at most"

    def _by_key(self, tier: Tier) -> dict[str, list[RankRoom]]:
        """The ranks that have the tier by the key that says how big theirs is; who takes most is first."""
        found: dict[str, list[RankRoom]] = {}
        for rank in self.ranks:
            for its in rank.tiers:
                if its.tier is tier:
                    found.setdefault(its.bound.partition(" = ")[0], []).append(rank)
        return dict(sorted(found.items(), key=lambda item: -self._bytes(item[1], tier)))

    @staticmethod
    def _bytes(ranks: Sequence[RankRoom], tier: Tier) -> int:
        return sum(rank.num_bytes(tier) for rank in ranks)

    def _lowered(self, keys: dict[str, list[RankRoom]], tier: Tier, budget: int) -> list[str] | None:
        """What to write for each key so that they take `budget` together, as they share it now. None: no page each.

        A host tier that is a multiple of the device's is lowered with it.
        """
        page_size, total = self.config.pool.page_size, sum(self._bytes(ranks, tier) for ranks in keys.values())
        if budget <= 0 or not keys:
            return None
        instead = []
        for key, ranks in keys.items():
            share = budget * self._bytes(ranks, tier) // total
            per_token = sum(self._token_bytes(rank, tier) for rank in ranks)
            if tier is Tier.DEVICE:
                # Of what the ranks take with their hosts, for these may be unlike.
                full = sum(self._token_bytes(r) * r.tiers[0].num_tokens for each in keys.values() for r in each)
                share = int(budget * sum(self._token_bytes(r) * r.tiers[0].num_tokens for r in ranks) / full)
            tokens = int(share / per_token) // page_size * page_size
            if tokens < page_size:
                return None
            if key.endswith("size"):
                most = share // len(ranks)
                if tier is Tier.DEVICE:
                    most = tokens * min(rank.geometry.token_bytes for rank in ranks)
                instead.append(f'{key} = "{_rounded(most)}"')
            else:
                instead.append(f"{'host.num_tokens' if key == 'host.pool_ratio' else key} = {tokens}")
        return instead

    def _token_bytes(self, rank: RankRoom, tier: Tier = Tier.DEVICE) -> float:
        """What one more token of the tier costs the rank: a device's brings its host's, where that is a multiple."""
        it = rank.geometry
        if tier is Tier.HOST:
            return it.num_parts * it.token_bytes
        by_ratio = any(its.bound.startswith("host.pool_ratio") for its in rank.tiers)
        ratio = self.config.host.pool_ratio if by_ratio else 0
        return (it.num_shards + ratio * it.num_parts) * it.token_bytes


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
    in_use = tuple(str(folder) for folder in folders if patient and _is_locked(folder / "lock"))
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


def _is_locked(path: Path) -> bool:
    """Whether a daemon holds it."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


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
        except ConfigError as exc:
            if not config.parallel.stages:
                raise
            path = config.key_of(pp_rank, exc.path)
            message = exc.message.replace(exc.path, path)
            if path == exc.path:
                message = f"parallel.stages.{pp_rank}: {message}"
            raise ConfigError(message, **{**exc.facts, "path": path}) from None
        tiers = [
            TierRoom(
                Tier.DEVICE,
                geometry.num_pages,
                geometry.num_pages * geometry.page_size,
                geometry.pool_bytes,
                geometry.num_shards,
                f'{config.key_of(pp_rank, "pool.size")} = "{size_text(own.pool.size)}"'
                if own.pool.size is not None
                else f"{config.key_of(pp_rank, 'pool.num_tokens')} = {own.pool.num_tokens}",
            )
        ]
        if geometry.host_pages:
            bound = f"host.pool_ratio = {own.host.pool_ratio}"
            if own.host.size is not None:
                bound = f'{config.key_of(pp_rank, "host.size")} = "{size_text(own.host.size)}"'
            elif own.host.num_tokens is not None:
                bound = f"{config.key_of(pp_rank, 'host.num_tokens')} = {own.host.num_tokens}"
            tiers.append(
                TierRoom(
                    Tier.HOST,
                    geometry.host_pages,
                    geometry.host_pages * geometry.page_size,
                    geometry.host_pool_bytes,
                    geometry.num_parts,
                    bound,
                )
            )
        offset = pp_rank * config.parallel.dp_size + dp_rank
        ranks.append(RankRoom(offset, dp_rank, pp_rank, geometry, tuple(tiers)))
    return Room(config, tuple(ranks))


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
    if config.pool.device != "cpu":
        raise ConfigError(
            f'pool.device = "{config.pool.device}": `sglcache check` knows it, and this version has no pools on cards; '
            'write pool.device = "cpu"',
            path="pool.device",
            value=config.pool.device,
        )
    room = weigh(config)
    room.refuse(there)
    below = disk(config, patient=False)
    return [*room.warnings(there), *(below.warnings if below is not None else [])]
