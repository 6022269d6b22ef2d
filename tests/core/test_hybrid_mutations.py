"""Bugs planted in what the core does about companions, one at a time: `sglcache.testing.hybrid` must notice each.

A mutation replaces a line of a method's source; one whose line is no longer there fails, and is to be planted anew.
"""

from __future__ import annotations

import pytest
import test_hybrid_cases as cases
from test_mutations import Edit, Mutation, mutation

from sglcache.core.companions import Companions
from sglcache.core.eviction import Places
from sglcache.core.index import Index
from sglcache.core.resources import MambaState, _ByPage
from sglcache.core.tiering import Backups
from sglcache.core.tree import Tree
from sglcache.testing.hybrid_programs import run
from sglcache.testing.planting import plant

NUM_PROGRAMS = 120

WINDOW = {"kind": "swa", "tiers": 1}
STATE = {"kind": "mamba", "tiers": 1}
LOADS = {"kind": "unified", "tiers": 2, "roomy": True}
CROWDED = {"kind": "unified", "tiers": 2, "roomy": False}

MUTATIONS = [
    # -- matching
    mutation(
        "a match ignores a companion",
        Companions,
        "agree",
        "all_agree = all_agree and may_end",
        "pass",
        seed=8,
        **WINDOW,
    ),
    mutation(
        "the device alone matches what only the host has",
        Companions,
        "agree",
        "device_agrees = device_agrees and may_end",
        "pass",
        seed=3,
        **LOADS,
    ),
    mutation("a window is a page shorter", _ByPage, "step", "run >= min", "run + 1 >= min", seed=62, **WINDOW),
    mutation(
        "a gap in a window is passed over",
        _ByPage,
        "step",
        "if present else 0",
        "if present else run",
        seed=8,
        **WINDOW,
    ),
    mutation(
        "a state is good for the middle of its node",
        MambaState,
        "step",
        "present and whole",
        "present",
        seed=1,
        **STATE,
    ),
    mutation(
        "who reaches how far is told of all together",
        Companions,
        "agree",
        "if may_end:",
        "if all_agree:",
        by=cases.test_each_companion_tells_how_far_it_alone_would_reach,
        **LOADS,
    ),
    # -- splits and joins
    mutation(
        "a node with a state is joined with what is below it",
        Tree,
        "_alike",
        "if above[c] is not None or above[C + c]:",
        "if False:",
        seed=8,
        **STATE,
    ),
    mutation(
        "nodes are joined of which one is a tombstone",
        Tree,
        "_alike",
        " or (above[c] is None) is not (below[c] is None)",
        "",
        seed=8,
        **WINDOW,
    ),
    mutation(
        "a split leaves the state with the upper half",
        Tree,
        "split",
        "above[c], above[self.C + c] = None, 0",
        "above[c], cells[c], above[self.C + c] = cells[c], None, 0",
        seed=3,
        **STATE,
    ),
    mutation(
        "a split gives both halves the state's lock",
        Tree,
        "split",
        "above[c], above[self.C + c] = None, 0",
        "above[c] = None",
        seed=14,
        **STATE,
    ),
    mutation(
        "those of one extend are promised the same slots",
        Index,
        "_refuse_growth",
        "self._refuse_slots(i, Need(count, 0, {}), beside.more[i])",
        "self._refuse_slots(i, Need(count, 0, {}))",
        by=cases.test_each_of_many_extends_is_for_itself,
        **WINDOW,
    ),
    mutation(
        "the window of a match on the host is not locked",
        Companions,
        "open",
        "if far is not None and host > window.first:",
        "if False:",
        by=lambda: cases.test_what_is_being_loaded_stays_on_the_host_until_it_is_there("window"),
        **LOADS,
    ),
    mutation(
        "the state of a match on the host is not locked",
        Companions,
        "open",
        "if far is not None and host == matched:",
        "if False:",
        by=lambda: cases.test_what_is_being_loaded_stays_on_the_host_until_it_is_there("mamba"),
        **LOADS,
    ),
    mutation(
        "too many states on a path",
        Companions,
        "_thin",
        "- kind.resource.max_per_path",
        "- kind.resource.max_per_path - 1",
        by=cases.test_a_path_keeps_so_many_states_and_the_deepest_of_them,
        **STATE,
    ),
    mutation(
        "a load brings a window's pages to one another's places",
        Companions,
        "grant",
        "targets.append(run)",
        "targets.insert(0, run)",
        seed=31,
        **LOADS,
    ),
    # -- eviction
    mutation("a tombstone's slot is nobody's", Companions, "drop", "pool.give(run)", "pass", seed=1, **WINDOW),
    mutation("a tombstone keeps its slot", Companions, "drop", "node.cells[c] = None", "pass", seed=7, **WINDOW),
    mutation("Full goes and its companions stay", Companions, "drop_with", "is not None", "is ...", seed=3, **STATE),
    mutation(
        "Full leaves the host and its companions stay there",
        Companions,
        "drop_with",
        "self.T + tier, self",
        "self.T + tier + tier, self",
        seed=1,
        **CROWDED,
    ),
    mutation("a leaf of no use stays", Companions, "_useless", "return True", "return False", seed=3, **WINDOW),
    mutation(
        "a leaf whose window's other pages went stays",
        Companions,
        "_useless",
        "left = 1 if resource.by_end else resource.reach",
        "left = 1",
        seed=8,
        **WINDOW,
    ),
    mutation(
        "a leaf that somebody holds goes", Companions, "prune", "any(cells[C : 2 * C]) or ", "", seed=88, **WINDOW
    ),
    mutation(
        "who lets go leaves what is of no use",
        Index,
        "_give_back",
        "companions.prune(lease.node)",
        "pass",
        seed=2,
        **STATE,
    ),
    mutation(
        "an evicted companion is counted as cached",
        Companions,
        "drop",
        "pool.cached -= len(run) // SLOT_BYTES",
        "pass",
        seed=1,
        **STATE,
    ),
    # -- room
    mutation(
        "one resource's lack is no reason to refuse",
        Index,
        "acquire",
        "self._refuse_slots(i, need)",
        "pass",
        seed=5,
        **STATE,
    ),
    mutation(
        "what a match locks of a window counts as room",
        Companions,
        "needs",
        "pinned += 0 if node.cells[C + near] else stop - low",
        "pass",
        seed=12,
        **WINDOW,
    ),
    mutation(
        "room is made for Full alone", Index, "_make_room", "self.companions.make_room(more)", "True", seed=5, **STATE
    ),
    mutation(
        "an extend is not refused for want of a companion",
        Index,
        "_refuse_growth",
        "self._refuse_slots(i, Need(count, 0, {}), beside.more[i])",
        "pass",
        seed=8,
        **WINDOW,
    ),
    # -- what a lease holds
    mutation(
        "the window of a match is not locked",
        Companions,
        "open",
        "if lease.committed > window.first:",
        "window.pinned = lease.committed\n            if False:",
        seed=2,
        **WINDOW,
    ),
    mutation(
        "the state of a match is not locked",
        Companions,
        "open",
        "state.source = end",
        "pass",
        Edit(Companions, "open", "self.order(near).hold(end, 1)", "pass"),
        seed=2,
        **STATE,
    ),
    mutation(
        "a window slides a page too far",
        Companions,
        "slide",
        "lease.committed - kind.resource.reach",
        "lease.committed - kind.resource.reach + 1",
        seed=2,
        **WINDOW,
    ),
    mutation(
        "what is locked of a window is let go of a page early",
        Companions,
        "_slide",
        "if stop > held.pinned:",
        "stop = min(stop + 1, lease.committed)\n        if stop > held.pinned:",
        seed=2,
        **WINDOW,
    ),
    mutation("a window never slides", Companions, "_slide", "if first <= held.first:", "if True:", seed=2, **WINDOW),
    mutation(
        "the state that was read stays locked",
        Companions,
        "_read",
        "held.source = None",
        "pass",
        Edit(Companions, "_read", "self.order(kind.device).let_go(held.source, 1)", "pass"),
        seed=2,
        **STATE,
    ),
    mutation(
        "a pin leaves companions alone",
        Companions,
        "pin",
        "for c, node, num_bytes in places:",
        "for c, node, num_bytes in places[:0]:",
        Edit(Companions, "unpin", "for c, node, num_bytes in places:", "for c, node, num_bytes in places[:0]:"),
        seed=6,
        **LOADS,
    ),
    # -- commits
    mutation(
        "the books stand still over a commit that only slides",
        Index,
        "_commit",
        "self._moves += 1",
        "pass",
        seed=6,
        **STATE,
    ),
    mutation(
        "a state is taken that the tree has",
        Companions,
        "put_ends",
        "if node.cells[kind.device] is not None:",
        "if False:",
        seed=4,
        **STATE,
    ),
    mutation(
        "a state is the tree's and the lease's",
        Companions,
        "put_ends",
        "del held.slots[at : at + SLOT_BYTES]",
        "pass",
        seed=1,
        **STATE,
    ),
    mutation("one slot is two states", Companions, "check_ends", " or (i, packed) in taken", "", seed=4, **STATE),
    mutation(
        "a window's page is taken that the tree has",
        Companions,
        "adopt",
        "if there is None:",
        "if True:",
        seed=9,
        **WINDOW,
    ),
    mutation(
        "a page that comes is counted twice",
        Companions,
        "_put",
        "pool.cached += count",
        "pool.cached += 2 * count",
        seed=1,
        **STATE,
    ),
    mutation(
        "no tombstone is filled",
        Companions,
        "adopt",
        "there = node.cells[c]",
        "there = node.cells[c] or slots",
        seed=2,
        **WINDOW,
    ),
    mutation("nobody is told of the better page", Companions, "adopt", "held.renamed = True", "pass", seed=9, **WINDOW),
    mutation(
        "a duplicate is given back before anyone has read of it",
        Companions,
        "drop_duplicates",
        "if 0 < number <= seen:",
        "if True:",
        Edit(Companions, "drop_duplicates", "if not 0 < each[0] <= seen", "if False"),
        seed=1,
        **WINDOW,
    ),
    mutation("what is before the floor is nobody's", Companions, "give_up", "pool.give(lost)", "pass", **WINDOW),
    mutation(
        "a page of the tree's is given up for a floor",
        Companions,
        "give_up",
        "for start, stop in held.owned:",
        "for start, stop in [(held.first, lease.num_pages)] if lease.num_pages > held.first else []:",
        seed=2,
        **WINDOW,
    ),
    mutation(
        "a state that somebody reads makes place for another",
        Companions,
        "_thin",
        " or node.cells[lock]",
        "",
        seed=3,
        **STATE,
    ),
    # -- giving back
    mutation(
        "states of a lease are not given back",
        Companions,
        "give_back",
        "self._give(kind, lease, bytes(held.slots))",
        "pass",
        seed=1,
        **STATE,
    ),
    mutation(
        "a window's pages are not given back",
        Companions,
        "give_back",
        "self._give(kind, lease, held.own)",
        "pass",
        seed=1,
        **WINDOW,
    ),
    mutation(
        "the dead's companions are free at once",
        Index,
        "end_session",
        "self.companions.fence(lease)",
        "self.companions.give_back(lease)",
        seed=12,
        **STATE,
    ),
    mutation(
        "what the dead held is not counted as fenced",
        Index,
        "end_session",
        "self.companions.fence(lease)",
        "pass",
        seed=12,
        **STATE,
    ),
    # -- the host
    mutation(
        "a copy does not hold what it reads",
        Companions,
        "send_along",
        "self.order(kind.device).hold(node, amount)",
        "pass",
        Edit(Companions, "written", "self.order(c - HOST).let_go(node, amount)", "pass"),
        Edit(Companions, "unwrite", "self.order(c - HOST).let_go(node, amount)", "pass"),
        Edit(Companions, "unwrite", "self.order(c - HOST).hold(ticket.end, ticket.depth - start)", "pass"),
        Edit(Companions, "let_go", "self.order(c).let_go(node, num_bytes)", "pass"),
        seed=1,
        **CROWDED,
    ),
    mutation(
        "a cell that comes to a locked place is not counted as locked",
        Places,
        "put",
        "if node.cells[self.lock]:",
        "if node.cells[self.lock] and not node.cells[self.older]:",
        Edit(Places, "put", "self.pool.locked += len(node.cells[self.cell]) // SLOT_BYTES", "pass"),
        seed=17,
        **CROWDED,
    ),
    mutation(
        "what is on its way to the host is there for good",
        Companions,
        "written",
        "node.writing &= ~(1 << c)",
        "pass",
        seed=1,
        **LOADS,
    ),
    mutation(
        "a copy that failed leaves its companions there",
        Companions,
        "unwrite",
        "node.cells[c] = None",
        "pass",
        seed=35,
        **LOADS,
    ),
    mutation(
        "a copy that failed keeps its companions' slots",
        Backups,
        "_written",
        "for c, slots in companions.unwrite(ticket):",
        "for c, slots in companions.unwrite(ticket)[:0]:",
        seed=7,
        **LOADS,
    ),
    mutation(
        "a state of the tree's is taken for one that was loaded",
        Companions,
        "loaded",
        "if node.cells[kind.device] is None:",
        "if True:",
        by=cases.test_two_that_load_the_same_state_end_with_one,
        **LOADS,
    ),
    mutation(
        "a loaded state is not held for who loaded it",
        Companions,
        "loaded",
        "if held.source is None:",
        "if False:",
        seed=18,
        **LOADS,
    ),
    mutation(
        "a load leaves the state behind",
        Companions,
        "grant",
        "if slot is None:",
        "if slot is None and on_host:",
        seed=4,
        **LOADS,
    ),
    mutation(
        "a late state is not copied",
        Companions,
        "back_up",
        "if self.T <= HOST:",
        "if True:",
        by=cases.test_a_state_that_comes_late_is_copied_alone,
        **LOADS,
    ),
    # -- the stream, where companions are told of as groups
    mutation(
        "nobody is told of a companion that comes",
        Companions,
        "_put",
        "self.index.tell(kind.device, node, True)",
        "pass",
        seed=6,
        **STATE,
    ),
    mutation(
        "nobody is told of a companion that goes",
        Companions,
        "drop",
        "self.index.tell(c, node, False)",
        "pass",
        seed=6,
        **STATE,
    ),
    mutation(
        "nobody is told of a companion that comes to the host",
        Companions,
        "written",
        "self.index.tell(c, node, True)",
        "pass",
        seed=4,
        **LOADS,
    ),
    mutation(
        "on the host a companion is told of before its full KV",
        Backups,
        "_written",
        "for node in self.sent(ticket.end, ticket.num_pages):",
        "if companions is not None:\n"
        "                companions.written(ticket)\n"
        "            for node in self.sent(ticket.end, ticket.num_pages):",
        Edit(
            Backups,
            "_written",
            "    companions.written(ticket)\n            if index.l3",
            "    pass\n            if index.l3",
        ),
        seed=13,
        **LOADS,
    ),
]


def caught(planted: Mutation) -> BaseException | None:
    """How it was noticed."""
    if planted.by is not None:
        try:
            planted.by()
        except Exception as exc:
            return exc
    for seed in (planted.seed, *range(NUM_PROGRAMS)):
        try:
            run(seed, **planted.fixed)
        except Exception as exc:
            return exc
    return None


@pytest.mark.pure
@pytest.mark.parametrize("planted", MUTATIONS, ids=lambda m: m.name.replace(" ", "-"))
def test_planted_bug_is_caught(planted: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    for edit in planted.edits:
        plant(monkeypatch, *edit)
    assert caught(planted) is not None, f"{NUM_PROGRAMS} programs did not notice that {planted.name}"
