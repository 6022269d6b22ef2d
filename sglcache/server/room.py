"""Whether this host has the memory that the pools of all its ranks take when they are full.

Pages take memory when they are written, so that too little shows only after hours, as a process that the kernel kills.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from sglcache.memory.geometry import Geometry


def wanted(ranks: Iterable[Geometry]) -> int:
    """Bytes of every pool, device and host, of these ranks."""
    return sum(it.num_shards * it.pool_bytes + it.num_parts * it.host_pool_bytes for it in ranks)


def there(cgroup: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Bytes that this process and its children may have: the host's, or less in a container."""
    bytes_ = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = cgroup.read_text().strip()
    except OSError:
        return bytes_
    return min(bytes_, int(limit)) if limit.isdigit() else bytes_


def too_little(ranks: Iterable[Geometry], have: int) -> str | None:
    """What to tell an operator; None: it is enough."""
    want = wanted(ranks)
    if want <= have:
        return None
    return (
        f"the pools take {want / 2**30:.1f} GiB when they are full, and {have / 2**30:.1f} GiB are there; lower "
        "pool.num_tokens or host.pool_ratio, or the kernel will kill a rank when they fill up"
    )
