"""Bytes written are bytes read, through every tier and layout of pools on cards, by whoever has the pages mapped."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from worlds import World, check, evict, put

from sglcache.testing.daemon import Daemon

Lend = Callable[..., Daemon]

TOKENS = range(1000, 1000 + 16 * 4)

def test_a_page_goes_to_the_host_and_comes_back(world: World, lend: Lend) -> None:
    daemon = lend(**world.sections())
    with world.client(daemon) as client:
        put(world, client, TOKENS)
        check(world, client, TOKENS, host_tokens=0)
        evict(daemon)
        check(world, client, TOKENS, host_tokens=len(TOKENS))
