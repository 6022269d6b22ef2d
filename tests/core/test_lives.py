"""What comes back of a host tier when an index has died, at any moment of any program: see `sglcache.testing.lives`.

`SGLCACHE_DEEP=N` runs N times as many programs, new ones each time.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sglcache.core import effects, invariants, restore
from sglcache.core.effects import Copy
from sglcache.core.index import Index, IndexConfig
from sglcache.core.journal import Present
from sglcache.core.key import ROOT, Namespace, pack
from sglcache.core.tenants import Limits
from sglcache.memory import journal, journal_form
from sglcache.memory.journal import Journal
from sglcache.memory.journal_form import Shape
from sglcache.testing import lives
from sglcache.testing.hybrid_programs import Program, settings
from sglcache.testing.lives import Lives, map_new, run
from sglcache.testing.programs import SeededChooser
from sglcache.units import Tier

pytestmark = pytest.mark.survive

DEEP = int(os.environ.get("SGLCACHE_DEEP", "0"))

VARIANTS: dict[str, dict[str, Any]] = {
    "full KV": {"kind": "full"},
    "a window": {"kind": "swa"},
    "a state": {"kind": "mamba"},
    "both": {"kind": "unified"},
    "both, bigrams": {"kind": "unified", "bigram": True},
    "full KV, in slices": {"kind": "full", "evict_slice": 1, "cut_slice": 8},
    "full KV, without events": {"kind": "full", "events": False},
}


@pytest.mark.timeout(0 if DEEP else 120)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_next_life_has_what_the_host_had(variant: str) -> None:
    first = random.randrange(1 << 40) if DEEP else 0
    came = 0
    for seed in range(first, first + 6 * max(1, DEEP)):
        try:
            came += run(seed, **VARIANTS[variant]).num_hits.get("pages that came back", 0)
        except Exception as exc:
            exc.add_note(f"sglcache.testing.lives.run({seed}, **{VARIANTS[variant]})")
            raise
    assert came > 10, "else nothing was looked at"


@pytest.mark.parametrize("kind", ["full", "unified"])
def test_what_is_spoilt_is_not_taken_and_what_is_taken_is_right(kind: str) -> None:
    """Bytes anywhere in the journal are overwritten, as by a torn store: less comes back, and nothing wrong."""
    for seed in range(10):
        choose = SeededChooser(seed)
        config = settings(choose, kind=kind, tiers=2)
        program = Program(Lives(**config))
        program.open(choose)
        for _ in range(60):
            program.step(choose)
        world = program.world
        assert isinstance(world, Lives)
        world.killed()
        world = world.again(harm=spoil(random.Random(seed), choose.integer(1, 200)))
        program = Program(world)
        program.open(choose)
        for _ in range(20):
            program.step(choose)
        world.settle()


def spoil(rng: random.Random, count: int) -> Callable[[memoryview], None]:
    def harm(region: memoryview) -> None:
        words = np.frombuffer(region, "<u4")
        used = np.flatnonzero(words)
        beyond = used[used > journal.HEAD.size // 4].tolist() or [journal.HEAD_BYTES // 4]
        for place in rng.choices(beyond, k=count):
            words[place] = rng.getrandbits(32)

    return harm


@pytest.mark.parametrize(
    "command", ["put", "acquire", "release", "clear", "settle", "end", "grow", "ack", "unpin", "step_long"]
)
def test_a_command_whose_effects_were_not_drained_was_not(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kill comes between the index and the world: the journal is as it was before, and so is memory."""
    for seed in range(6):
        choose = SeededChooser(seed)
        program = Program(Lives(**settings(choose, kind="full", tiers=2)))
        program.open(choose)
        for _ in range(40):
            program.step(choose)
        world = program.world
        assert isinstance(world, Lives)

        class KilledError(Exception):
            pass

        def stop() -> Any:
            raise KilledError

        with monkeypatch.context() as patch:
            patch.setattr(world, "_drain", stop)
            with contextlib.suppress(KilledError):
                program.actions[command][1](choose)
        world.killed()
        world.again().settle()


# -- planted bugs --------------------------------------------------------------------------------------------------


def caught(**fixed: Any) -> bool:
    for seed in range(100):
        try:
            run(seed, **fixed)
        except Exception:
            return True
    return False


def forget_absences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Journal, "_clear", lambda self, absent: None)


def note_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn late: a slot is another's before it is said that its page went."""

    def noted(self: Lives, effect: Any) -> None:
        before, self.late = getattr(self, "late", []), effect.entries  # type: ignore[attr-defined]
        self.journal.note(before)

    monkeypatch.setattr(Lives, "noted", noted)


def keep_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Journal,
        "note",
        lambda self, entries, note=Journal.note: note(self, [it for it in entries if type(it).__name__ != "Cleared"]),  # type: ignore[misc]
    )


def take_what_hangs_on_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal.Journal, "taken", lambda self, survivors, restored: None)


def forget_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore, "_settle", lambda index, nodes: None)


def tell_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglcache.core.index.Index.change", quietly)


def quietly(self: Any, c: int, node: Any, present: bool, session_id: str | None = None) -> None:
    self.version += 1
    if self.journal is not None:
        self.tell(c, node, present, session_id)


def no_cuts_at_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run goes on behind a state, which then is of another end."""

    def plan(index: Any, them: restore.Survivors, whole: Any = restore._plan) -> Any:
        made = whole(index, them)
        kids = np.bincount(made.parents[made.parents >= 0], minlength=len(made.slots))
        starts = [
            start
            for start in made.starts[:-1]
            if start == 0 or made.parents[start] != start - 1 or kids[start - 1] != 1
        ]
        return made._replace(starts=[*starts, made.starts[-1]])

    monkeypatch.setattr(restore, "_plan", plan)


BUGS: dict[Callable[[pytest.MonkeyPatch], None], dict[str, Any]] = {
    forget_absences: {"kind": "full"},
    note_late: {"kind": "full"},
    keep_cleared: {"kind": "full"},
    take_what_hangs_on_nothing: {"kind": "full"},
    forget_locks: {"kind": "full"},
    tell_nobody: {"kind": "full"},
    no_cuts_at_states: {"kind": "mamba"},
}


@pytest.mark.pure
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_caught(bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    assert caught(**BUGS[bug])


# -- names of namespaces -------------------------------------------------------------------------------------------


def test_long_names_are_kept_over_many_lives_and_their_places_used_again() -> None:
    shape = Shape(2, [64])
    region = map_new(shape.num_bytes)
    rng = random.Random(0)
    held: dict[int, Namespace] = {}
    for life in range(12):
        book = Journal(region, shape, b"")
        survivors = book.load()
        if life:
            assert survivors is not None
            assert survivors.namespaces == held
            assert survivors.tokens.tolist() == [[slot, slot] for slot in survivors.full.slots]
            book.taken(survivors, restore.Restored([np.array(sorted(held), np.int64)]))
        for _ in range(200):
            slot = rng.randrange(64)
            if slot in held:
                book.note([journal.Absent(0, slot.to_bytes(4, "little"))])
                del held[slot]
            else:
                name = Namespace("x" * rng.choice((0, 1, 200)) or None, None, "é" * rng.choice((0, 30, 900)) or None)
                tokens = slot.to_bytes(4, "little") * 2
                book.note([Present(0, slot.to_bytes(4, "little"), b"", tokens, name)])
                held[slot] = name
    assert book.num_unnamed == 0
    assert book._next_chunk < 64 * 60, "places of names that are gone are used again"


def test_a_name_for_which_there_is_no_place_costs_its_pages_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_form, "FEW_NAMES", 0)
    monkeypatch.setattr(journal_form, "NAMES_PER_SLOT", 1)
    shape = Shape(1, [4])
    region = map_new(shape.num_bytes)
    book = Journal(region, shape, b"")
    assert book.load() is None
    one = (7).to_bytes(4, "little")
    book.note([Present(0, b"\0\0\0\0", b"", one, Namespace(cache_salt="long" * 100))])
    book.note([Present(0, b"\1\0\0\0", b"\0\0\0\0", one)])  # below it
    book.note([Present(0, b"\2\0\0\0", b"", one, ROOT)])
    assert book.num_unnamed == 1
    survivors = Journal(region, shape, b"").load()
    assert survivors is not None
    assert survivors.namespaces == {2: ROOT}


@pytest.mark.parametrize("what", ["identity", "shape", "died while taking", "distrusted", "no journal"])
def test_what_was_written_for_something_else_is_not_taken(what: str) -> None:
    shape = Shape(1, [4])
    region = map_new(shape.num_bytes)
    book = Journal(region, shape, b"one")
    book.load()
    book.note([Present(0, b"\2\0\0\0", b"", b"\7\0\0\0", ROOT)])
    if what == "distrusted":
        book.distrust()
    elif what == "no journal":
        memoryview(region).cast("B")[0] = 7
    elif what == "died while taking":
        assert Journal(region, shape, b"one").load() is not None  # and its life ends here
    again = Journal(
        region, Shape(1, [4], [True]) if what == "shape" else shape, b"two" if what == "identity" else b"one"
    )
    survivors = again.load()
    assert survivors is None or not len(survivors.full.slots)
    # It is as good as new.
    if survivors is not None:
        again.taken(survivors, restore.Restored([np.zeros(0, np.int64)]))
    again.note([Present(0, b"\3\0\0\0", b"", b"\7\0\0\0", ROOT)])
    assert lives is not None
    last = Journal(region, again.shape, b"two" if what == "identity" else b"one").load()
    assert last is not None
    assert last.full.slots.tolist() == [3]


def test_who_pays_for_a_page_on_the_host_is_told_to_the_next_life() -> None:
    """And where that tenant is no longer one, the default pays."""
    limits = {"a": Limits(host_floor=2), "b": Limits(host_ceiling=20)}
    config = IndexConfig(page_size=1, num_pages=64, host_pages=64, tenants=limits, journal=True, events=False)
    index, shape = Index(config), Shape(1, [64])
    region = map_new(shape.num_bytes)
    book = Journal(region, shape, b"")
    book.load()
    session = index.open_session()
    for ticket, (tenant, tokens) in enumerate([("a", [1, 2, 3]), ("b", [1, 2, 4, 5]), (None, [1, 9]), ("b", [7])], 1):
        grant = index.acquire(session, ticket, pack(tokens), tenant=tenant)
        assert grant is not None
        index.commit(session, ticket, grant.lease, ticket)
        index.event_done(session, ticket)
        for effect in index.drain():
            if isinstance(effect, Copy):
                index.copy_done(effect.ticket)
            elif isinstance(effect, effects.Journal):
                book.note(effect.entries)
    for effect in index.drain():
        assert isinstance(effect, effects.Journal)
        book.note(effect.entries)

    def charged(index: Index) -> dict[str, int]:
        assert index.tenants is not None
        return {each.tenant: each.charged for each in index.tenants.stats() if each.tier is Tier.HOST}

    assert charged(index) == {"default": 1, "a": 3, "b": 3}
    survivors = Journal(region, shape, b"").load()
    assert survivors is not None
    for tenants, want in ((limits, {"default": 1, "a": 3, "b": 3}), ({"a": Limits()}, {"default": 4, "a": 3})):
        again = Index(replace(config, tenants=tenants))
        restore.restore(again, survivors)
        assert charged(again) == want
        assert invariants.check(again) == []


def test_a_journal_that_is_not_what_the_index_holds_is_found_out() -> None:
    """Whatever of a row is wrong, or is too much."""
    for seed in range(40):
        choose = SeededChooser(seed)
        program = Program(Lives(proof=False, **settings(choose, kind="unified", tiers=2)))
        program.open(choose)
        while not any(program.world.seen.ready[program.world.cell(r, 1)] for r in (0, 1, 2)):
            program.step(choose)
        world = program.world
        assert isinstance(world, Lives)
        words = np.frombuffer(memoryview(world.region), "<u8")
        used = np.flatnonzero(words)
        place = random.Random(seed).choice(used[used >= journal_form.HEAD_BYTES // 8].tolist())
        words[place] ^= np.uint64(1) << np.uint64(seed)
        found: list[str] = []
        for _ in journal.slices(world.index, world.journal, found):
            pass
        assert bool(found) is _counts(world, place), f"word {place}, seed {seed}: {found}"


def _counts(world: Lives, place: int) -> bool:
    """Whether the word belongs to a row that is there; of names the book has its own memory until its next life."""
    at = journal_form.HEAD_BYTES
    for number, (count, size) in enumerate(world.journal.shape.tables):
        seqs, rows, stop = at, at + 8 * count, at + count * (8 + size)
        if seqs <= 8 * place < rows:
            return number < 3
        if rows <= 8 * place < stop:
            slot = (8 * place - rows) // size
            return number < 3 and world.journal.seq_of(number, slot) > 0
        at = stop
    return False
