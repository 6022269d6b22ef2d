"""What the pools of a configuration take, and whether this machine has it: told before anything starts.

Pages take memory when they are written, so that too little would show only after hours, as a process that the kernel
kills. `sglcache check` prints what is found here, and `sglcache serve` refuses what it refuses.

What counts against which limit: all pools that are in RAM count against the host's. Against a cgroup's limit the host
pools do, which the ranks write; the device pools of a CPU are charged to the runners that write them (docs/install.md),
so where only both together are too much it is a warning.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from sglcache.config import Config, size_text
from sglcache.errors import ConfigError
from sglcache.memory.geometry import Geometry
from sglcache.units import Tier

NO_LIMIT = 1 << 60  # what cgroup v1 writes for none is near 2**63
CAP_IPC_LOCK = 14


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
    def ram_bytes(self) -> int:
        """What is in RAM when all is full."""
        return self.host_bytes + self.store_bytes + (self.device_bytes if self.config.pool.device == "cpu" else 0)

    def refuse(self, there: Machine) -> None:
        """ConfigError, with the numbers and what to write instead: the pools can't all be there."""
        if self.ram_bytes > there.ram.num_bytes:
            raise self._too_much(self.ram_bytes, there.ram)
        if there.cgroup is not None and self.host_bytes > there.cgroup.num_bytes:
            raise self._too_much(self.host_bytes, there.cgroup)

    def warnings(self, there: Machine) -> list[str]:
        """What may be right, and may be a mistake."""
        found = []
        cgroup, memlock = there.cgroup, there.memlock
        if cgroup is not None and self.host_bytes <= cgroup.num_bytes < self.ram_bytes:
            found.append(
                f"device and host pools take {told(self.ram_bytes)} when they are full, and {cgroup.name} is "
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

    def _too_much(self, want: int, limit: Limit) -> ConfigError:
        """With the least change that would do, in the words of the key that decides."""
        pool, host = self.config.pool, self.config.host
        fixed = self.device_bytes + self.store_bytes if want != self.host_bytes else 0  # beside the host's pools
        per_host_token = sum(it.geometry.num_parts * it.geometry.token_bytes for it in self.ranks)
        per_device_token = sum(it.geometry.num_shards * it.geometry.token_bytes for it in self.ranks)
        if self.host_bytes and (left := limit.num_bytes - fixed) >= per_host_token * pool.page_size:
            tokens = left // per_host_token // pool.page_size * pool.page_size
            size = left // len(self.ranks)
            key = "size" if host.size is not None else "num_tokens" if host.num_tokens is not None else "pool_ratio"
            path, instead = f"host.{key}", f"host.num_tokens = {tokens}"
            if key == "size":
                instead = f'host.size = "{_rounded(size)}"'
        else:
            ratio = host.pool_ratio if host.enabled and host.num_tokens is None and host.size is None else 0
            tokens = int(max(0, limit.num_bytes - self.store_bytes) / (per_device_token + ratio * per_host_token))
            path, instead = "pool.num_tokens", f"pool.num_tokens = {tokens // pool.page_size * pool.page_size}"
            if pool.size is not None:
                path = "pool.size"
                instead = f'pool.size = "{_rounded(tokens * self.ranks[0].geometry.token_bytes)}"'
            if not ratio and self.host_bytes:
                instead += ' and host.size = "0 B"'
        remedy = f"write {instead} at most, or raise the limit"
        if tokens < pool.page_size:
            remedy = "not one page of each rank would fit; raise the limit, or lower pool.page_size"
        parts = f"device {told(self.device_bytes)}, host {told(self.host_bytes)}"
        if self.store_bytes:
            parts += f", Mooncake's clients {told(self.store_bytes)}"
        if want == self.host_bytes:
            parts = "the host's alone"
        several = f" of {len(self.ranks)} ranks" if len(self.ranks) > 1 else ""
        return ConfigError(
            f"the pools{several} take {told(want)} when they are full ({parts}), and {limit.name} is "
            f"{told(limit.num_bytes)}, {told(want - limit.num_bytes)} less; {remedy}",
            path=path,
            value=want,
            need=want,
            have=limit.num_bytes,
            limit=limit.name,
        )


class DiskRoom(NamedTuple):
    """A file store's place, for all ranks of this host."""

    path: Path
    want: int  # bytes, when it is full
    used: int  # bytes of what is there already
    free: int  # bytes that the disk has left for this user

    @property
    def warnings(self) -> list[str]:
        if self.want <= self.used + self.free:
            return []
        return [
            f"storage.size lets the ranks store {told(self.want)}, and the disk of {self.path} has {told(self.free)} "
            f"free beside {told(self.used)} that are stored there: once it is full nothing more is stored; lower "
            "storage.size, or move storage.path"
        ]


def disk(config: Config, *, patient: bool = True) -> DiskRoom | None:
    """None: nothing is kept on a disk. ConfigError: the folder can't be used.

    What is there is counted file by file; unless `patient`, only where it matters to the warning.
    """
    storage = config.storage
    if storage.kind != "file" or storage.path is None:
        return None
    there = storage.path
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "is no folder" if not there.is_dir() else "can't be written by this user"
        raise ConfigError(
            f"storage.path = {storage.path}: {there} {why}; give a folder that this user may write",
            path="storage.path",
            value=str(storage.path),
        )
    try:
        status = os.statvfs(there)
    except OSError as exc:
        raise ConfigError(f"storage.path = {storage.path}: {exc.strerror}", path="storage.path") from None
    want, free = storage.size * len(config.parallel.local()), status.f_bavail * status.f_frsize
    return DiskRoom(storage.path, want, _used(storage.path) if patient or want > free else 0, free)


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
                f'pool.size = "{size_text(own.pool.size)}"'
                if own.pool.size is not None
                else f"pool.num_tokens = {own.pool.num_tokens}",
            )
        ]
        if geometry.host_pages:
            bound = f"host.pool_ratio = {own.host.pool_ratio}"
            if own.host.size is not None:
                bound = f'host.size = "{size_text(own.host.size)}"'
            elif own.host.num_tokens is not None:
                bound = f"host.num_tokens = {own.host.num_tokens}"
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
