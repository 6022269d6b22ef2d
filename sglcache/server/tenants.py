"""Tenants' limits, as a configuration and an admin write them: tokens, or a share of the tier; and in pages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from sglcache.config import Config, tenant_name, token_limit
from sglcache.core.limits import DEFAULT, TIERS, Limits, check_limits
from sglcache.errors import BadRequest, ConfigError
from sglcache.memory.geometry import Geometry

Written: TypeAlias = Mapping[str, int | str]  # by key, what an admin wrote; NONE is no ceiling
KEYS = tuple(f"{tier}_{kind}" for tier in TIERS for kind in ("floor", "ceiling"))
NONE = "none"


def limits_of(config: Config, form: Geometry, changes: Mapping[str, Written]) -> dict[str, Limits] | None:
    """By name, in pages, of a rank; None: there are no tenants. `changes`: what was set since the supervisor began.

    ConfigError: they can't be so.
    """
    if config.tenants is None:
        return None
    found: dict[str, Limits] = {DEFAULT: Limits()}
    for name, section in config.tenants.items():
        pages: dict[str, Any] = {}
        for key in KEYS:
            value = getattr(section, key)
            try:
                pages[key] = in_pages(key, value, form)
            except ValueError as exc:
                dotted = f"tenants.{name}.{key}"
                raise ConfigError(f"{dotted} = {value!r}: {exc}", path=dotted, value=value) from None
        found[name] = Limits(**pages)
    if (wrong := check_limits(found, (form.num_pages, form.host_pages))) is not None:
        raise ConfigError(f"tenants: {wrong} of {form.page_size} tokens; lower them", path="tenants", value=None)
    for name, written in changes.items():
        given = {key: getattr(found.get(name, Limits()), key) for key in KEYS}
        found[name] = Limits(**given | asked(name, written, form))
    return found


def asked(name: str, written: Written, form: Geometry) -> dict[str, int | None]:
    """What an admin wrote of a tenant, in pages. BadRequest: it makes no sense."""
    try:
        tenant_name(name)
    except ValueError as exc:
        raise BadRequest(f"tenant {name!r}: {exc}", tenant=name) from None
    pages: dict[str, int | None] = {}
    for key, value in written.items():
        try:
            if value != NONE:
                token_limit(value)
            pages[key] = None if value == NONE and key.endswith("ceiling") else in_pages(key, value, form)
        except ValueError as exc:
            raise BadRequest(f"tenant {name!r}: {key} = {value!r}: {exc}", tenant=name, key=key) from None
    return pages


def in_pages(key: str, value: int | str | None, form: Geometry) -> int | None:
    """Rounded down to whole pages. ValueError: a floor of none, or of a tier that there is not."""
    if value is None:
        return None
    total = form.num_pages if key.startswith(TIERS[0]) else form.host_pages
    if not total and value not in (0, NONE):
        raise ValueError("there is no host tier; leave it out")
    if isinstance(value, int):
        return value // form.page_size
    match = re.match(r"[0-9.]+", value)
    if match is None:
        raise ValueError('only a ceiling can be "none"; a floor of none is 0')
    whole, _, rest = match[0].partition(".")  # by integers: 33.3 of 100 is no float
    pages: int = total * int(whole + rest) // int(f"100{'0' * len(rest)}")
    return pages
