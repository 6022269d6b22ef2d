"""Indexes of all kinds that die at any moment, and what comes back of their host tier.

`Lives` is a `Hybrid` with a real journal in a real memfd. `killed` ends it as a kill would: what the last turn did not
drain is lost, and copies that were under way leave half of something behind. `again` is the next life on the same
memory. What it must begin with is what the dead one had on the host, page by page and slot by slot, but for what no
match can use any more; from then on it is a world like any other.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sglcache.core.effects import Journal as JournalEffect
from sglcache.core.restore import restore
from sglcache.memory.journal import Journal, slices
from sglcache.memory.journal_form import Shape
from sglcache.memory.mapping import create_memfd, map_shared
from sglcache.testing.hybrid import Hybrid
from sglcache.testing.hybrid_model import FULL, HOST, Places
from sglcache.testing.hybrid_programs import Program, settings
from sglcache.testing.pages import Page, ancestry
from sglcache.testing.programs import Chooser, SeededChooser

if TYPE_CHECKING:
    from sglcache.memory.mapping import Region

SEQ_LEAP = 1000  # by which the numbers of a life begin above those of the life before


class Lives(Hybrid):
    """One life. `config` as IndexConfig's fields, with a host tier."""

    def __init__(
        self, *, before: Lives | None = None, harm: Callable[[Any], None] | None = None, **config: Any
    ) -> None:
        """`before`: the life before; `harm` may spoil the journal's bytes, uint8 [n], before it is read."""
        self.dead = before
        self.harm = harm
        super().__init__(journal=True, book=before.book if before is not None else None, **config)

    def born(self) -> None:
        shape = shape_of(self)
        dead = self.dead
        self.region: Region = map_new(shape.num_bytes) if dead is None else dead.region
        if self.harm is not None:
            self.harm(memoryview(self.region).cast("B"))
        self.journal = Journal(self.region, shape, b"of a test")
        survivors = self.journal.load()
        if dead is None:
            assert survivors is None
            return
        for r in range(len(self.kinds)):
            c = self.cell(r, HOST)
            self.memory[c] = dead.memory[c]
        if survivors is not None:
            self.journal.taken(survivors, restore(self.index, survivors))

    def noted(self, effect: JournalEffect) -> None:
        self.journal.note(effect.entries)

    def check(self) -> None:
        super().check()
        found: list[str] = []
        for _ in slices(self.index, self.journal, found):
            pass
        assert not found, "\n".join(found)

    def killed(self, last: Callable[[], Any] | None = None) -> None:
        """The process is killed: after this command, whose effects nobody drained."""
        if last is not None:
            last()
        for copy in self.in_flight():
            if copy.to_host:
                for part in copy.parts:
                    for slot in part.target:
                        self.memory[self.cell(part.resource, HOST)][slot] = "half a copy"

    def again(self, harm: Callable[[Any], None] | None = None) -> Lives:
        """The next life, which has what this one had; with `harm`, no more than that."""
        config = {name: getattr(self.config, name) for name in self.config.__dataclass_fields__ if name != "journal"}
        config["first_seq"] = self.index.next_seq + SEQ_LEAP
        config["host_ready"] = self.host_ready
        new = Lives(before=self, harm=harm, proof=self.proof, **config)
        for r in range(len(self.kinds)):
            c = self.cell(r, HOST)
            had, has = self.seen.ready[c], new.seen.ready[c]
            for page, slot in has.items():
                assert had.get(page) == slot, f"{page} is in slot {slot}, and was in {had.get(page)}"
            if harm is None and len(self.kinds) == 1:
                assert has == had, f"{had.keys() - has.keys()} were on the host, and are not"
        if harm is None:
            for page in self.seen.ready[self.cell(FULL, HOST)]:
                want, got = (_reach(world, page) for world in (self, new))
                assert want == got, f"of {page} {got} pages can be had, and {want} could before"
        new.cut()
        new.note("pages that came back", sum(map(len, new.seen.ready)))
        return new


def shape_of(world: Hybrid) -> Shape:
    over = 1 if world.config.bigram else 0
    counts = [kind.total[HOST] for kind in world.kinds]
    return Shape(world.page_size + over, counts, [kind.by_end for kind in world.kinds], over)


def map_new(num_bytes: int) -> Region:
    fd = create_memfd("a test's journal", num_bytes)
    try:
        return map_shared(fd, num_bytes)
    finally:
        os.close(fd)


def _reach(world: Hybrid, page: Page) -> int:
    """How many pages of the path to this one a match would find on the host alone."""
    ready: list[Places] = [
        places if tier == HOST else {} for (_, tier), places in zip(world.cells, world.seen.ready, strict=True)
    ]
    return world.oracle.reach(replace(world.seen, ready=ready), ancestry(page)).matched


def run(seed: int, steps: int = 60, lives: int = 4, **fixed: Any) -> Lives:
    """A random program over several lives; AssertionError at the first thing that is not right."""
    choose: Chooser = SeededChooser(seed)
    rot = fixed.pop("rot", False)
    config = settings(choose, **{"tiers": 2, **fixed})
    world = Lives(**config)
    prompts: list[Any] = []
    for life in range(lives):
        program = Program(world, rot=rot)
        program.prompts += prompts
        program.open(choose)
        for _ in range(choose.integer(1, steps)):
            program.step(choose)
        prompts = program.prompts
        if life < lives - 1:
            world.killed()
            world = world.again()
    world.settle()
    return world
