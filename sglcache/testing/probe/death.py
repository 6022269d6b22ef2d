"""(c) A process that is killed while its kernel writes a page, or while its stream waits."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from sglcache.testing.card import WORD
from sglcache.testing.probe.order import wait_for_word, words
from sglcache.testing.probe.sizes import Sizes
from sglcache.testing.probe.stage import Actor, Here, Stage
from sglcache.testing.probe.tasks import (
    Tell,
    count_into,
    free_bytes,
    make_pool,
    map_pool,
    ready,
    word,
    wrong_words,
)

BEHIND, ENOUGH = 0, 1  # words: what the writer's stream would write, and the end of watching


class Watched(NamedTuple):
    """What a page was seen to do. Times are of the monotonic clock."""

    looks: int
    changed: list[float]  # for each change: when the look began that still saw what was before


def exporter_writes(stage: Stage, tell: Tell, sizes: Sizes) -> None:
    """The writer made the pool, and another has it mapped."""
    a, b = stage.actor("A"), stage.actor("B")
    _die_writing(stage, tell, sizes, "exporter", maker=a, other=b, writer=a, watcher=b)


def importer_writes(stage: Stage, tell: Tell, sizes: Sizes) -> None:
    """The writer has the pool mapped, and another made it: a runner's death."""
    a, b = stage.actor("A"), stage.actor("B")
    _die_writing(stage, tell, sizes, "importer", maker=b, other=a, writer=a, watcher=b)


def _die_writing(
    stage: Stage, tell: Tell, sizes: Sizes, what: str, *, maker: Actor, other: Actor, writer: Actor, watcher: Actor
) -> None:
    writer.ask(ready)
    watcher.ask(ready)
    maker.ask(make_pool, "pool", sizes.page)
    with maker.given() as fds:
        other.hand(fds, map_pool, "pool", sizes.page)
    with words(writer, watcher) as ring:
        watcher.begin(watch, sizes.page)
        writer.ask(scribble_and_write, sizes.page, sizes.scribble_s)
        stage.sleep(sizes.kill_after_s)
        killed, dead = writer.kill()
        stage.sleep(sizes.scribble_s - sizes.kill_after_s + sizes.still_s)  # as long as it would have gone on
        ring.words[ENOUGH] = 1
        watched: Watched = watcher.result()
        before = sum(at < killed for at in watched.changed)
        assert before > 2, f"the kernel was seen to write {before} times in {watched.looks} looks; this says nothing"
        tell(f"c.{what}_dead_ms", round(1e3 * (dead - killed), 2))
        tell(f"c.{what}_changes", sum(at > dead for at in watched.changed))
        tell(f"c.{what}_last_change_ms", round(1e3 * (max(watched.changed) - killed), 2))
        tell(f"c.{what}_looks", watched.looks)
        tell(f"c.{what}_word", ring.words[BEHIND] != 0)
    watcher.ask(count_into, "pool", 11)
    tell(f"c.{what}_other_works", watcher.ask(wrong_words, "pool", 11) == 0)


def waiter_dies(stage: Stage, tell: Tell, sizes: Sizes) -> None:
    """Killed while its stream waits for a word that nobody writes."""
    looks, a = stage.actor("M"), stage.actor("A")
    looks.ask(ready)
    before, _ = looks.ask(free_bytes)
    a.ask(ready)
    a.ask(make_pool, "pool", sizes.pool)
    with a.given(), words(a):
        a.ask(wait_for_word, 0, 1)
        stage.sleep(sizes.still_s)
        killed, dead = a.kill()
    tell("c.waiter_dead_ms", round(1e3 * (dead - killed), 2))
    back = stage.until(lambda: looks.ask(free_bytes)[0] > before - sizes.pool // 2, sizes.back_s)
    tell("c.waiter_back", back)


def scribble_and_write(here: Here, num_bytes: int, seconds: float) -> None:
    """A kernel that writes the page for so long, and behind it a word."""
    here.card.scribble(here.kept["pool"].address, num_bytes // WORD, seconds, here.stream)
    here.card.write_value(here.stream, word(here, "ring", BEHIND), 1)


def watch(here: Here, num_bytes: int) -> Watched:
    """Read the whole page again and again, until it is enough."""
    page, num_words, ring = here.kept["pool"].address, num_bytes // WORD, here.kept["ring"].words
    began, looks, changed = time.monotonic(), 1, list[float]()
    last = here.card.read(page, num_words)
    while not ring[ENOUGH]:
        now = time.monotonic()
        found = here.card.read(page, num_words)
        if not np.array_equal(found, last):
            changed.append(began)
        last, began = found, now
        looks += 1
    return Watched(looks, changed)
