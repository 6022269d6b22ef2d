"""What tenants may have of the tiers: plain numbers, for whoever does without an index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglcache.units import Tier

TIERS = ("device", "host")
DEFAULT = "default"
MAX_TENANTS = 64  # each costs a look for a victim a look, and its numbers are told in one frame with all others'


@dataclass(frozen=True)
class Limits:
    """A tenant's, in pages; a ceiling of None is none."""

    device_floor: int = 0
    device_ceiling: int | None = None
    host_floor: int = 0
    host_ceiling: int | None = None

    def of(self, tier: int) -> tuple[int, int | None]:
        """(floor, ceiling)."""
        if tier == Tier.DEVICE:
            return self.device_floor, self.device_ceiling
        return self.host_floor, self.host_ceiling


def check_limits(limits: Mapping[str, Limits], totals: Sequence[int]) -> str | None:
    """What is wrong with these, of tiers of so many pages; None: nothing."""
    if len(limits) > MAX_TENANTS:
        return f"{len(limits)} tenants; there can be {MAX_TENANTS}"
    for tier, total in enumerate(totals):
        name = Tier(tier).name
        floors = 0
        for tenant, each in limits.items():
            floor, ceiling = each.of(tier)
            if floor < 0 or (ceiling is not None and ceiling < floor):
                return f"tenant {tenant!r}: its ceiling on {name}, {ceiling} pages, is below its floor, {floor}"
            floors += floor
        if floors > total:
            return f"the floors on {name} add up to {floors} pages, and there are {total}"
    return None
