"""`sglcache check`: what a configuration would take, and where; or what is wrong with it. Nothing is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from sglcache import config as configs
from sglcache.console import Command, emit, json_option, set_option
from sglcache.errors import BadRequest
from sglcache.memory.geometry import FULL, Geometry, StateGeometry
from sglcache.server import room
from sglcache.server.keeping import check_place, held_in, memory_of
from sglcache.server.plan import Seat, plan
from sglcache.units import Tier


@click.command(
    cls=Command,
    examples=(
        "sglcache check",
        "sglcache check configs/llama-3.1-8b-h200.toml --ram '2 TB'",
        "sglcache check my.toml --set pool.size='40 GB' --json",
    ),
    exits={2: "the configuration is wrong, or does not fit"},
)
@click.argument("file", type=click.Path(path_type=Path), required=False, envvar="SGLCACHE_CONFIG")
@set_option()
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
    if config.host.keep_path is not None and config.host.keep and ram is None:
        check_place(config.host.keep_path, weighed.host_bytes + sum(rank.journal_bytes for rank in weighed.ranks))
    disk = room.disk(config) if ram is None else None
    if config.pool.device != "cpu":
        click.echo(f"check: {room.UNTRIED}", err=True)
    if as_json:
        emit(_facts(weighed, seats, there, disk))
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
        ranks.append(
            {
                "rank": rank.offset,
                "dp_rank": rank.dp_rank,
                "pp_rank": rank.pp_rank,
                "endpoint": seat.endpoint,
                "replay_endpoint": seat.replay_endpoint,
                "geometry": rank.geometry.facts(),
                "layer_bytes": rank.geometry.layer_bytes,
                "token_bytes": rank.geometry.token_bytes,
                "page_bytes": rank.geometry.page_bytes,
                "journal_bytes": rank.journal_bytes,
                "tiers": _tiers(rank.of(FULL)),
                "companions": [
                    {**each.facts(), "layer_bytes": each.form.layer_bytes, "tiers": _tiers(rank.of(each.kind))}
                    for each in rank.companions
                ],
            }
        )
    return {
        "config": weighed.config.model_dump(mode="json"),
        "ranks": ranks,
        "device_bytes": weighed.device_bytes,
        "host_bytes": weighed.host_bytes,
        "store_bytes": weighed.store_bytes,
        "ram_bytes": weighed.ram_bytes,
        "kept": [
            {"folder": str(each.folder), "num_bytes": each.num_bytes, "in_use": each.in_use}
            for each in held_in(weighed.config.host.keep_path)
        ],
        "disk": {**disk._asdict(), "path": str(disk.path)} if disk is not None else None,
        "daemon_bytes": weighed.daemon_bytes,
        "limits": [limit._asdict() for limit in there if isinstance(limit, room.Limit)],
        "warnings": [*weighed.warnings(there), *(disk.warnings if disk is not None else [])],
    }


def _tiers(tiers: list[room.TierRoom]) -> dict[str, Any]:
    return {
        it.tier.name.lower(): {
            "tier": it.tier.name,
            "num_pages": it.num_pages,
            "num_tokens": it.num_tokens,
            "pool_bytes": it.pool_bytes,
            "num_pools": it.num_pools,
            "bound": it.bound,
            "num_bytes": it.num_bytes,
        }
        for it in tiers
    }


def _lines(weighed: room.Room, seats: list[Seat], there: room.Machine, disk: room.DiskRoom | None) -> list[str]:
    lines = []
    for rank, seat in zip(weighed.ranks, seats, strict=True):
        geometry = rank.geometry
        what = f"{geometry.num_layers} layers, {_row(geometry)}"
        lines.append(f"{seat}: {what if geometry.num_layers else 'no layer keeps every token: its pages are names'}")
        lines += _form_lines(geometry, rank.of(FULL))
        if not geometry.host_pages:
            lines.append("  host    none")
        for each in rank.companions:
            form = each.form
            what = f"{form.num_layers} layer{'s' * (form.num_layers != 1)}, "
            if isinstance(form, Geometry):
                what += f"a window of {each.window:,} tokens, {each.window_pages:,} pages: {_row(form)}"
            else:
                what += f"a state every {each.interval:,} tokens: {_states(form)}"
            lines.append(f"  {each.kind:<7} {what}")
            lines += [f"  {line}" for line in _form_lines(form, rank.of(each.kind))]
    lines += _kept_lines(weighed)
    lines += _third_lines(weighed, disk)
    where = weighed.config.pool.device
    lines.append(f"in all: device {room.told(weighed.device_bytes)} ({where}), host {room.told(weighed.host_bytes)}")
    lines.append(f"  and the daemon itself, before its indexes grow: {room.told(weighed.daemon_bytes)}")
    for limit in (there.ram, there.cgroup):
        if limit is not None:
            counted = weighed.daemon_bytes + (weighed.ram_bytes if limit is there.ram else weighed.host_bytes)
            lines.append(f"  of {limit.name}: {room.told(counted)} of {room.told(limit.num_bytes)}")
    warnings = [*weighed.warnings(there), *(disk.warnings if disk is not None else [])]
    lines += [f"warning: {warning}" for warning in warnings]
    return lines


def _kept_lines(weighed: room.Room) -> list[str]:
    """Of the host tier's pages over a rank's death, and a daemon's."""
    host = weighed.config.host
    if not any(rank.journal_bytes for rank in weighed.ranks):
        return []
    if host.keep_path is None:
        return [
            f"the host's pages outlive a rank: {room.told(sum(it.journal_bytes for it in weighed.ranks))} of journals"
        ]
    lines = [f"the host's pages outlive the daemon, in {host.keep_path}"]
    for each in held_in(host.keep_path):
        use = ", in use by a live daemon" if each.in_use else ""
        lines.append(f"  there now: {each.folder.name}, {room.told(each.num_bytes)}{use}")
    if (kind := memory_of(host.keep_path)) is not None:
        lines.append(f"  warning: that is {kind}, not a tmpfs: the system writes pages to the disk all along")
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
        file = room.file_bytes(page, geometry.page_size)
        lines.append(
            f"third tier of rank {rank.offset}: {storage.path}/rank-{rank.offset}, {room.told(storage.size)} at most: "
            f"some {storage.size // file:,} pages of {page:,} B, {storage.size // file * geometry.page_size:,} tokens"
        )
    if disk is not None:
        lines.append(f"  of the disk: {room.told(disk.want)}; {room.told(disk.used)} used, {room.told(disk.free)} free")
    return lines


def _form_lines(form: Geometry | StateGeometry, tiers: list[room.TierRoom]) -> list[str]:
    """What a page, or slot, takes, and how many there are of it."""
    if isinstance(form, Geometry):
        lines = [
            f"  token   {form.token_bytes:,} B in a shard, {form.layer_bytes:,} B of them in each layer",
            f"  page    {form.page_bytes:,} B in a shard, {form.page_size} tokens",
        ]
    else:
        lines = [f"  slot    {form.page_bytes:,} B in a shard, {form.layer_bytes:,} B of them in each layer"]
    for it in tiers:
        layout = form.layout if it.tier is Tier.DEVICE else form.host_layout
        which = "shard" if it.tier is Tier.DEVICE else "part"
        each = f"{room.told(it.pool_bytes)} in each of {it.num_pools} {which}s, " if it.num_pools > 1 else ""
        count = f"{it.num_pages:,} slots"
        if isinstance(form, Geometry):
            count = f"{it.num_pages:,} pages, {it.num_tokens:,} tokens"
        lines += [
            f"  {it.tier.name.lower():<7} {count}, {layout}: {each}{room.told(it.num_bytes)}",
            f"          bounded by {it.bound}",
        ]
    return lines


def _row(geometry: Geometry) -> str:
    """What a shard keeps of a token, in words."""
    shards = f" in {geometry.num_shards} shards" if geometry.num_shards > 1 else ""
    if geometry.is_latent:
        shards += ", each with all of them" if geometry.num_shards > 1 else ""
        return f"latents of {geometry.kv_lora_rank} + {geometry.qk_rope_head_dim} {geometry.dtype}{shards}"
    dims = f"K of {geometry.head_dim} and V of {geometry.v_head_dim}"
    if geometry.num_replicas > 1:
        shards += f", {geometry.num_replicas} of which share a head"
    return f"{geometry.num_kv_heads} KV heads, {dims} {geometry.dtype}{shards}"


def _states(form: StateGeometry) -> str:
    """What a layer's state is, in words."""
    each = [f"{name} of {' x '.join(map(str, shape))} {dtype}" for name, shape, dtype in form.states]
    return " and ".join(each) + (f" in {form.num_shards} shards" if form.num_shards > 1 else "")
