"""`sglcache check`: what a configuration would take, and where; or what is wrong with it. Nothing is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from sglcache import config as configs
from sglcache.cli import json_option
from sglcache.errors import BadRequest
from sglcache.server import room
from sglcache.server.plan import Seat, plan
from sglcache.units import Tier

BLOCK = 4096  # of a disk: a file takes whole ones
HEADER_BYTES = 256  # of a page's file, about, beside its tokens


@click.command()
@click.argument("file", type=click.Path(path_type=Path), required=False, envvar="SGLCACHE_CONFIG")
@click.option("--set", "-s", "overrides", multiple=True, metavar="KEY=VALUE", help="Such as pool.page_size=64.")
@click.option(
    "--ram", metavar="SIZE", help='Check for a host with so much memory, such as "2 TB", instead of for this one.'
)
@json_option
def check(file: Path | None, overrides: tuple[str, ...], ram: str | None, as_json: bool) -> int:
    """Check the configuration in FILE (else the defaults): print what each rank would take, or what is wrong.

    Per token and page, per tier, shard and rank, and in all; and which setting or limit decides. `sglcache serve`
    refuses what this refuses. Exits with 2 if it does.
    """
    config = configs.load(file, overrides)
    seats = plan(config)
    if (key := config.events.curve_key_file) is not None:
        from sglcache.net.curve import Curve

        Curve.load(key, config.events.curve_allow_dir)
    weighed = room.weigh(config)
    there = room.machine() if ram is None else room.Machine(room.Limit(_size(ram), "--ram"))
    weighed.refuse(there)
    disk = room.disk(config) if ram is None else None
    if as_json:
        click.echo(json.dumps(_facts(weighed, seats, there, disk), indent=2))
    else:
        click.echo("\n".join(_lines(weighed, seats, there, disk)))
    return 0


def _size(text: str) -> int:
    try:
        return configs.parse_size(text)
    except ValueError as exc:
        raise BadRequest(f"--ram {text}: {exc}") from None


def _facts(weighed: room.Room, seats: list[Seat], there: room.Machine, disk: room.DiskRoom | None) -> dict[str, Any]:
    ranks = []
    for rank, seat in zip(weighed.ranks, seats, strict=True):
        wire = rank.geometry.to_wire()
        ranks.append(
            {
                "rank": rank.offset,
                "dp_rank": rank.dp_rank,
                "pp_rank": rank.pp_rank,
                "endpoint": seat.endpoint,
                "replay_endpoint": seat.replay_endpoint,
                "geometry": {name: getattr(wire, name) for name in wire.__struct_fields__},
                "layer_bytes": rank.geometry.layer_bytes,
                "token_bytes": rank.geometry.token_bytes,
                "page_bytes": rank.geometry.page_bytes,
                "tiers": {
                    tier.tier.name.lower(): {**tier._asdict(), "tier": tier.tier.name, "num_bytes": tier.num_bytes}
                    for tier in rank.tiers
                },
            }
        )
    return {
        "config": weighed.config.model_dump(mode="json"),
        "ranks": ranks,
        "device_bytes": weighed.device_bytes,
        "host_bytes": weighed.host_bytes,
        "store_bytes": weighed.store_bytes,
        "ram_bytes": weighed.ram_bytes,
        "disk": {**disk._asdict(), "path": str(disk.path)} if disk is not None else None,
        "daemon_bytes": weighed.daemon_bytes,
        "limits": [limit._asdict() for limit in there if limit is not None],
        "warnings": [*weighed.warnings(there), *(disk.warnings if disk is not None else [])],
    }


def _lines(weighed: room.Room, seats: list[Seat], there: room.Machine, disk: room.DiskRoom | None) -> list[str]:
    lines = []
    for rank, seat in zip(weighed.ranks, seats, strict=True):
        geometry = rank.geometry
        lines += [
            f"{seat}: {geometry.num_layers} layers, {_row(rank)}",
            f"  token   {geometry.token_bytes:,} B in a shard, {geometry.layer_bytes:,} B of them in each layer",
            f"  page    {geometry.page_bytes:,} B in a shard, {geometry.page_size} tokens",
        ]
        for tier in rank.tiers:
            layout = geometry.layout if tier.tier is Tier.DEVICE else geometry.host_layout
            which = "shard" if tier.tier is Tier.DEVICE else "part"
            each = f"{room.told(tier.pool_bytes)} in each of {tier.num_pools} {which}s, " if tier.num_pools > 1 else ""
            lines += [
                f"  {tier.tier.name.lower():<7} {tier.num_pages:,} pages, {tier.num_tokens:,} tokens, {layout}: "
                f"{each}{room.told(tier.num_bytes)}",
                f"          bounded by {tier.bound}",
            ]
        if len(rank.tiers) == 1:
            lines.append("  host    none")
    lines += _third_lines(weighed, disk)
    where = weighed.config.pool.device
    lines.append(f"in all: device {room.told(weighed.device_bytes)} ({where}), host {room.told(weighed.host_bytes)}")
    lines.append(f"  and the daemon's processes, before their indexes grow: {room.told(weighed.daemon_bytes)}")
    for limit in (there.ram, there.cgroup):
        if limit is not None:
            counted = weighed.daemon_bytes + (weighed.ram_bytes if limit is there.ram else weighed.host_bytes)
            lines.append(f"  of {limit.name}: {room.told(counted)} of {room.told(limit.num_bytes)}")
    warnings = [*weighed.warnings(there), *(disk.warnings if disk is not None else [])]
    lines += [f"warning: {warning}" for warning in warnings]
    return lines


def _third_lines(weighed: room.Room, disk: room.DiskRoom | None) -> list[str]:
    storage = weighed.config.storage
    if storage.kind == "none":
        return []
    if storage.kind == "mooncake":
        return [
            f"third tier: Mooncake at {storage.master}, "
            f"{room.told(weighed.store_bytes)} of this host's RAM for its clients"
        ]
    lines = []
    for rank in weighed.ranks:
        geometry = rank.geometry
        page = geometry.page_bytes * geometry.num_parts
        file = -(-(page + HEADER_BYTES + 4 * geometry.page_size) // BLOCK) * BLOCK
        lines.append(
            f"third tier of rank {rank.offset}: {storage.path}/rank-{rank.offset}, {room.told(storage.size)} at most: "
            f"some {storage.size // file:,} pages of {page:,} B, {storage.size // file * geometry.page_size:,} tokens"
        )
    if disk is not None:
        lines.append(f"  of the disk: {room.told(disk.want)}; {room.told(disk.used)} used, {room.told(disk.free)} free")
    return lines


def _row(rank: room.RankRoom) -> str:
    """What a shard keeps of a token, in words."""
    geometry = rank.geometry
    shards = f" in {geometry.num_shards} shards" if geometry.num_shards > 1 else ""
    if geometry.is_latent:
        shards += ", each with all of them" if geometry.num_shards > 1 else ""
        return f"latents of {geometry.kv_lora_rank} + {geometry.qk_rope_head_dim} {geometry.dtype}{shards}"
    dims = f"K of {geometry.head_dim} and V of {geometry.v_head_dim}"
    if geometry.num_replicas > 1:
        shards += f", {geometry.num_replicas} of which share a head"
    return f"{geometry.num_kv_heads} KV heads, {dims} {geometry.dtype}{shards}"
