"""What the tiers hit as they are, and what more of one would add: sums over a `reuse.Curve`.

How far back in the line of pages (see `reuse`) a set of tiers reaches is a matter of how they share it:

* The *device* holds the first C_d pages, as many as it has room for beside those that are leased.
* `write_through`: the host's order of eviction is the device's, and all that is committed is copied. So the host holds
  the first C_h, the two together the first max(C_d, C_h), and a host that is smaller than the device adds nothing.
  `write_through_selective` is taken for the same; since it keeps what was used once from the host, it is at most that.
* `write_back`: the host gets what leaves the device, and keeps it when it comes back. Together they reach C_d + C_h
  less what both have: of the pages that come to the device some share is loaded from the host and not computed, and of
  the device's pages that share is on the host as well.
* The *third* tier has what the host had, and lasts longer: together the first max of that and its own size.

These are expectations for least-recently-used tiers without tenants' shares or pins; what was really found stands
beside them. A tree that evicts whole runs of pages finds a little less, the more so the larger single prompts are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sglcache.core.reuse import Curve

EXTRA_GIB = (10, 50, 100)
FEW_LOOKS = 500  # below these a verdict would be chance
LITTLE = 0.005  # a share of the tokens that nobody would buy memory for
ENOUGH = 0.8  # of what the largest step adds: a smaller one will do
ROUNDS = 20


class Sizes(NamedTuple):
    """What of each tier there is, in pages, and what one takes there, in bytes, all shards together."""

    device_pages: int
    device_page_bytes: int
    host_pages: int = 0  # 0: there is none
    host_page_bytes: int = 0
    third_pages: int = 0  # 0: there is none, or nobody knows how much it takes
    third_page_bytes: int = 0
    write_policy: str = "write_through"

    def pages(self, tier: str) -> int:
        return int(getattr(self, f"{tier}_pages"))

    def page_bytes(self, tier: str) -> int:
        return int(getattr(self, f"{tier}_page_bytes"))

    def more(self, tier: str, gib: float) -> Sizes:
        """With so many GiB more of a tier."""
        changed: dict[str, Any] = {f"{tier}_pages": self.pages(tier) + int(gib * 2**30) // self.page_bytes(tier)}
        return self._replace(**changed)


class Rates(NamedTuple):
    """Shares of all tokens asked for: found in any tier, on the device or the host, and on the device."""

    all: float
    near: float
    device: float


def tiers_of(sizes: Sizes) -> list[str]:
    return [tier for tier in ("device", "host", "third") if sizes.page_bytes(tier)]


def reach(curve: Curve, sizes: Sizes) -> float:
    """How many pages of the line the device and the host hold together."""
    device, host = sizes.device_pages, sizes.host_pages
    if sizes.write_policy != "write_back" or not host:
        return float(max(device, host))
    both, on_device = float(device + host), curve.hit_rate(device)
    for _ in range(ROUNDS):
        loaded = curve.hit_rate(both) - on_device
        share = loaded / max(1e-9, 1.0 - on_device)
        both = (both + max(device, host, device + host - device * share)) / 2
    return both


def rates(curve: Curve, sizes: Sizes) -> Rates:
    near = reach(curve, sizes)
    return Rates(curve.hit_rate(max(near, sizes.third_pages)), curve.hit_rate(near), curve.hit_rate(sizes.device_pages))


def forecast(curve: Curve, sizes: Sizes, real: bool = True, extra_gib: tuple[int, ...] = EXTRA_GIB) -> dict[str, Any]:
    """All that can be said, for people and programs. Rates are shares of the tokens asked for.

    `real`: what was matched was told to the curve. Then what more memory `adds` is laid on that: what a sample has too
    much or too little of are mostly the pages that everybody shares, and these are hit whatever the size is.
    """
    now = rates(curve, sizes)
    per_s = curve.tokens / curve.seconds if curve.seconds > 0 else 0.0
    measured = None
    over = Rates(0.0, 0.0, 0.0)  # by which more was found than was forecast
    if real and curve.requests:
        measured = {"all": curve.measured, "device": curve.measured - curve.measured_host, "host": curve.measured_host}
        over = Rates(measured["all"] - now.all, 0.0, measured["device"] - now.device)
    rows: list[dict[str, Any]] = []
    for tier in tiers_of(sizes):
        for gib in extra_gib:
            then = rates(curve, sizes.more(tier, gib))
            rows.append(
                {
                    "tier": tier,
                    "extra_gib": gib,
                    "hit_rate": _share(then.all + over.all),
                    "adds": then.all - now.all,
                    "adds_tokens_per_s": (then.all - now.all) * per_s,
                    "device_hit_rate": _share(then.device + over.device),
                    "adds_on_device": then.device - now.device,
                }
            )
    told = {
        "page_size": curve.page_size,
        "weight": curve.weight,
        "seconds": curve.seconds,
        "requests": curve.requests,
        "tokens": curve.tokens,
        "looks": curve.looks,
        "enough": curve.looks >= FEW_LOOKS,  # to say what more would add
        "tracked_pages": curve.tracked,
        "max_tracked_pages": curve.max_tracked,
        "forgotten_pages": curve.forgotten,
        "reach_tokens": int(curve.reach) * curve.page_size,
        "write_policy": sizes.write_policy if sizes.host_pages else None,
        "tiers": [
            {
                "tier": tier,
                "pages": sizes.pages(tier),
                "tokens": sizes.pages(tier) * curve.page_size,
                "bytes": sizes.pages(tier) * sizes.page_bytes(tier),
                "page_bytes": sizes.page_bytes(tier),
            }
            for tier in tiers_of(sizes)
        ],
        "measured": measured,
        "forecast": {"all": now.all, "device": now.device},
        "hit_rate": _share(now.all + over.all),
        "device_hit_rate": _share(now.device + over.device),
        "ceiling": _share(curve.ceiling + over.all),
        "more": rows,
    }
    told["verdict"] = verdict(told)
    return told


def _share(rate: float) -> float:
    return min(1.0, max(0.0, rate))


def verdict(told: dict[str, Any]) -> str:
    """One line for who pays for memory."""
    if told["looks"] < FEW_LOOKS:
        return (
            f"too little was seen to say: {told['looks']} looks at followed pages in {told['requests']} requests, and "
            f"it takes {FEW_LOOKS}"
        )
    said: list[str] = []
    for tier in dict.fromkeys(row["tier"] for row in told["more"]):
        rows = [row for row in told["more"] if row["tier"] == tier]
        key = "adds"
        if rows[-1]["adds"] < LITTLE and tier == "device" and rows[-1]["adds_on_device"] >= LITTLE:
            key = "adds_on_device"
        if rows[-1][key] < LITTLE:
            most = 100 * rows[-1]["adds"]
            said.append(f"more {_NAMES[tier]} {f'at most {most:.1f}' if most >= 0.05 else 'none'}")
            continue
        row = next(row for row in rows if row[key] >= ENOUGH * rows[-1][key])
        if key == "adds":
            then = (
                f"add {100 * row['adds']:.1f} points ({100 * told['hit_rate']:.1f} % to {100 * row['hit_rate']:.1f} %)"
            )
        else:
            then = f"add no hit, but {100 * row[key]:.1f} points of them would need no copy from below"
        said.append(f"{row['extra_gib']} GiB more {_NAMES[tier]} would {then}")
    end = f"the ceiling is {100 * told['ceiling']:.1f} %"
    if all(each.startswith("more") for each in said):
        return f"more memory would add nothing worth it: the hit rate is {100 * told['hit_rate']:.1f} %, {end}"
    said.sort(key=lambda each: each.startswith("more"))
    return f"{'; '.join(said)}; {end}"


_NAMES = {"device": "device memory", "host": "host memory", "third": "third tier"}
