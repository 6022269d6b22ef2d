"""Bugs planted in the core, one at a time: the laws of `sglcache.testing` must notice each.

A mutation replaces a line of a method's source; one whose line is no longer there fails, and is to be planted anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import test_l3 as paths
import test_line as in_line
import test_tiering as tiers

from sglcache.core import eventlog, eviction, hashing, index, l3, line, snapshot, tiering, tree
from sglcache.core.eviction import Policy
from sglcache.core.key import ROOT
from sglcache.core.tiering import WritePolicy
from sglcache.errors import NoSpace, UnknownLease
from sglcache.testing.model import LeaseModel
from sglcache.testing.planting import plant
from sglcache.testing.programs import run
from sglcache.testing.rig import Rig, Runner, pack
from sglcache.units import LeaseId, Tier

NUM_PROGRAMS = 250  # most are caught by the first few


class Edit(NamedTuple):
    owner: Any  # a class or a module
    method: str
    old: str
    new: str


class Mutation(NamedTuple):
    name: str
    edits: tuple[Edit, ...]
    by: Callable[[], object] | None  # a program that gets there at once; the random ones do too, later
    seed: int  # of a random program that gets there
    fixed: dict[str, Any]  # of the random programs that are to catch it


def mutation(
    name: str,
    owner: Any,
    method: str,
    old: str,
    new: str,
    *more: Edit,
    by: Callable[[], object] | None = None,
    seed: int = 0,
    **fixed: Any,
) -> Mutation:
    """`seed` saves time, and only that: where it does not notice, all are tried."""
    return Mutation(name, (Edit(owner, method, old, new), *more), by, seed, fixed)


def a_parents_copy_fails() -> None:
    """Two write-throughs, one on top of the other; the first fails while the second is under way."""
    rig = Rig(page_size=4, num_pages=16, host_pages=16)
    runner = rig.open_session()
    lease = rig.acquire(runner, range(16))
    assert isinstance(lease, LeaseModel)
    rig.commit(runner, lease, 8)
    rig.commit(runner, lease, 16)
    first, second = rig.in_flight()
    rig.copy_done(first, ok=False)
    rig.copy_done(second)
    rig.commit(runner, lease)
    rig.settle()


def there_is_room_on_the_host_later() -> None:
    """A lease holds the host's pages until another has been committed."""
    rig = Rig(page_size=4, num_pages=16, host_pages=4)
    runner = rig.open_session()
    put(rig, runner, range(12))
    lease = rig.acquire(runner, range(12))
    put(rig, runner, range(100, 108))
    assert rig.index.counters["backup_pages_skipped"] == 1
    assert isinstance(lease, LeaseModel)
    rig.release(runner, lease)
    rig.steps()
    rig.copies_done()
    assert rig.peek(range(100, 108)) == (8, 8)
    assert len(rig.model.slot[Tier.HOST]) == 4
    rig.settle()
    assert rig.index.counters["backups_retried"] == 1


def writes_back(**config: Any) -> tuple[Rig, Runner]:
    rig = Rig(**{"page_size": 4, "num_pages": 4, "host_pages": 16, "write_policy": WritePolicy("write_back"), **config})
    return rig, rig.open_session()


def put(rig: Rig, runner: Runner, tokens: range) -> None:
    lease = rig.acquire(runner, tokens)
    assert isinstance(lease, LeaseModel)
    rig.commit(runner, lease)
    rig.release(runner, lease)
    rig.copies_done()


def a_page_leaves_with_its_copy() -> None:
    rig, runner = writes_back()
    put(rig, runner, range(16))
    assert rig.acquire(runner, range(100, 116)) is None
    rig.steps()
    (copy,) = rig.in_flight()
    assert rig.peek(range(16)) == (16, 16)
    rig.copy_done(copy)
    assert rig.peek(range(16)) == (0, 16)
    rig.steps()
    assert not rig.waiting
    rig.settle()


def a_child_comes_while_its_parent_is_copied() -> None:
    """By a lease that had its own pages for all of it."""
    rig, runner = writes_back(num_pages=10)
    put(rig, runner, range(16))
    lease = rig.acquire(runner, range(20), limit=0)
    assert isinstance(lease, LeaseModel)
    assert rig.acquire(rig.open_session(), range(100, 116)) is None
    rig.steps()
    (copy,) = rig.in_flight()
    rig.commit(runner, lease)
    rig.read_replies(runner)
    rig.release(runner, lease)
    rig.copy_done(copy)
    assert rig.peek(range(20)) == (20, 20)
    rig.settle()


def the_second_hit_is_copied() -> None:
    rig = Rig(page_size=4, num_pages=16, host_pages=16, write_policy=WritePolicy("write_through_selective", 2))
    runner = rig.open_session()
    put(rig, runner, range(8))
    assert rig.peek(range(8)) == (8, 8)
    assert not rig.copies
    put(rig, runner, range(8))
    assert len(rig.copies) == 1
    rig.settle()


def a_session_ends_with_a_cancel() -> None:
    """Its load is still on its way; it is over later."""
    rig = Rig(page_size=4, num_pages=8, host_pages=16)
    runner = rig.open_session()
    for first in (0, 100):
        lease = rig.acquire(runner, range(first, first + 32))
        assert isinstance(lease, LeaseModel)
        rig.commit(runner, lease)
        rig.copies_done()
        rig.release(runner, lease)
    lease = rig.acquire(runner, range(32))
    assert isinstance(lease, LeaseModel)
    assert rig.cancel(runner, lease) is False
    late = rig.turn(lambda: rig.index.cancel(runner.id, 99, LeaseId(lease.number)))
    assert isinstance(late, UnknownLease)
    rig.end_session(runner)
    rig.settle()


def a_match_that_a_copy_locks() -> None:
    """Nothing but the copy locks it, yet it can't be evicted for who matches it."""
    rig = Rig(page_size=4, num_pages=8, host_pages=16)
    runner = rig.open_session()
    lease = rig.acquire(runner, range(16))
    assert isinstance(lease, LeaseModel)
    rig.commit(runner, lease)
    rig.release(runner, lease)
    assert isinstance(rig.acquire(runner, range(36)), NoSpace)
    assert isinstance(rig.acquire(runner, [*range(8), *[9] * 28]), NoSpace), "half of it"
    assert rig.acquire(runner, [*range(8), *[9] * 24]) is None
    rig.settle()


def a_tier_is_cleared() -> None:
    """For want of nothing."""
    rig = Rig(page_size=4, num_pages=16)
    runner = rig.open_session()
    lease = rig.acquire(runner, range(16))
    assert isinstance(lease, LeaseModel)
    rig.commit(runner, lease)
    rig.release(runner, lease)
    rig.clear(Tier.DEVICE)


def two_requests_one_sequence() -> None:
    """The second goes on where the first ended, within one batch, and is told of by another name."""
    rig = Rig(page_size=4, num_pages=16)
    runner = rig.open_session()
    for tokens, session_id in ((range(8), None), (range(16), "s")):
        lease = rig.acquire(runner, tokens, session_id=session_id)
        assert isinstance(lease, LeaseModel)
        rig.commit(runner, lease)
    rig.cut()


def of(name: str, **fixed: Any) -> dict[str, Any]:
    """A policy of both tiers, whose parameters matter for prompts of a few pages of 4."""
    chosen = Policy(name, next_prompt_estimate=2, threshold=8)
    return {"eviction": chosen, "host_eviction": chosen, "page_size": 4, **fixed}


def whoever_waits_is_refused() -> None:
    """It waits for a copy, and when that is over what it counted on is pinned; what it had matched it did not use."""
    rig = Rig(num_pages=12, host_pages=16, **of("lfu"))
    runner = rig.open_session()
    for first, count in ((1, 8), (2, 4), (3, 16)):
        lease = rig.acquire(runner, [first] * count)
        assert isinstance(lease, LeaseModel)
        rig.commit(runner, lease)
        if first < 3:
            rig.copies_done()
        rig.release(runner, lease)
    assert rig.acquire(runner, [1] * 8 + [9] * 32) is None
    rig.pin(runner, pack([3] * 16), ROOT, "owner", 9.0)
    rig.copies_done()
    rig.steps()
    assert isinstance(rig.wakes[-1].result, NoSpace)
    later = rig.acquire(runner, [2] * 4)
    assert isinstance(later, LeaseModel)
    rig.cancel(runner, later)
    rig.acquire(runner, [4] * 24)


def small_heaps() -> None:
    """A heap that is renewed all the time, slowly."""
    with pytest.MonkeyPatch.context() as patcher:
        patcher.setattr(eviction, "SLACK", 0)
        patcher.setattr(eviction, "SWEEP", 1)
        patcher.setattr(eviction, "DISCARD", 1)
        for seed in range(30):
            run(seed, **of("lfu"))


Index, Tree, EventLog = index.Index, tree.Tree, eventlog.EventLog
Backups = tiering.Backups
Recency, Ranked = eviction.Recency, eviction.Ranked
TWO_POLICIES = {"host_pages": 24, "eviction": Policy("lru"), "host_eviction": Policy("mru")}
LRU_ONLY = {"eviction": Policy(), "host_eviction": Policy()}
IN_LINE: dict[str, Any] = {
    "waits": True,
    "num_pages": 10,
    "host_pages": 0,
    "max_waiting_of_session": 3,
    "max_pinned_fraction": 0.4,
}
STUCK_COPIES: dict[str, Any] = {"waits": True, "num_pages": 10, "host_pages": 24, "l3": None}
TWO_TIERS = {"host_pages": 24}
WRITES_BACK = {"num_pages": 10, "host_pages": 24, "write_policy": WritePolicy("write_back")}
L3, Shelf = l3.L3, l3.Shelf
STORES = {"num_pages": 10, "host_pages": 10, "l3": l3.L3Config(tell=True, part=2, store_quota=100)}
LOADS = {"num_pages": 10, "host_pages": 40}  # what is evicted from the device is still on the host

MUTATIONS = [
    # -- splits
    mutation(
        "a split does not copy pins",
        Tree,
        "split",
        "above = cells.copy()",
        "above = cells.copy(); above[self.C : 2 * self.C] = [0] * self.C",
    ),
    mutation("a split loses the ticket", Tree, "split", "head.writing = node.writing", "head.writing = 0", **TWO_TIERS),
    mutation("a split gives both halves the lower half's slots", index.Full, "split", "run[:cut]", "run[-cut:]"),
    mutation(
        "a split's upper half is evicted first",
        Recency,
        "split",
        "            below[self.fresher] = head\n"
        "            above[self.older] = tail\n"
        "            above[self.fresher] = fresher\n"
        "            fresher.cells[self.older] = head\n",
        "            older = below[self.older]\n"
        "            below[self.older] = head\n"
        "            above[self.fresher] = tail\n"
        "            above[self.older] = older\n"
        "            older.cells[self.fresher] = head\n",
        seed=28,
        **LRU_ONLY,
    ),
    mutation(
        "a split's upper half goes to the fresh end",
        Recency,
        "split",
        "            above = head.cells\n"
        "            below[self.fresher] = head\n"
        "            above[self.older] = tail\n"
        "            above[self.fresher] = fresher\n"
        "            fresher.cells[self.older] = head\n",
        "            last = self.end.cells[self.older]\n"
        "            head.cells[self.older], head.cells[self.fresher] = last, self.end\n"
        "            last.cells[self.fresher] = self.end.cells[self.older] = head\n",
        seed=62,
        num_pages=28,
        host_pages=12,
        **LRU_ONLY,
    ),
    mutation("the ack works on the node, not on the range that was sent", Backups, "sent", "while left:", "if left:"),
    mutation(
        "a prompt that ends inside a page matches it", Tree, "common_pages", "same - same % self.page_bytes", "same"
    ),
    # -- merges
    mutation(
        "nodes of different holders are merged",
        Tree,
        "_alike",
        "above[C + c] != below[C + c]",
        "(above[C + c] > 0) != (below[C + c] > 0)",
    ),
    mutation(
        "nodes apart in the order of eviction are merged",
        Recency,
        "alike",
        "fresher is up or fresher is None",
        "True",
        seed=22,
        **LRU_ONLY,
    ),
    # -- the order of eviction
    mutation(
        "a release does not refresh",
        Recency,
        "unpin",
        "                cells[older] = last\n"
        "                last.cells[fresher] = node\n"
        "                last = node\n",
        "                right, left = end.cells[fresher], end\n"
        "                while right is not end and right.cells[fresher] is not None and node is right.parent:\n"
        "                    left, right = right, right.cells[fresher]\n"
        "                cells[older], cells[fresher] = left, right\n"
        "                left.cells[fresher] = right.cells[older] = node\n"
        "                last = end.cells[older]\n",
        **LRU_ONLY,
    ),
    mutation(
        "peek refreshes",
        Index,
        "peek",
        "        device = matched = 0\n",
        "        device = matched = 0\n"
        "        if path and path[-1].cells[DEVICE] is not None:\n"
        "            self.orders[DEVICE].pin(path[-1])\n"
        "            self.orders[DEVICE].unpin(path[-1])\n",
        seed=27,
    ),
    mutation(
        "what is matched may be evicted to make room for the rest",
        Index,
        "_room",
        "pool.free + pool.evictable - pinned - self.promised(0)",
        "pool.free + pool.evictable - self.promised(0)",
        seed=61,
    ),
    mutation(
        "room is made twice over",
        Index,
        "evict",
        "while pool.free + (backups.demoting if copying else 0) < num_pages:",
        "while pool.free + (backups.demoting if copying else 0) < 2 * num_pages and pool.evictable:",
    ),
    # -- other policies than lru
    mutation("a hit is counted with each commit", Index, "_use", "lease.counted = lease.node", "pass", **of("lfu")),
    mutation("hits are not counted", Tree, "used", "cells[hits] += 1", "pass", **of("lfu")),
    mutation("a cancelled lease is a hit", Index, "cancel", "used=False", "used=True", seed=76, **of("lfu")),
    mutation("the refused are hits", Index, "_shed", "used=False", "used=True", by=whoever_waits_is_refused),
    mutation(
        "a match without a commit is no hit",
        Index,
        "_give_back",
        "if used and self._by_use",
        "if False and self._by_use",
        **of("slru"),
    ),
    mutation(
        "a split's upper half was never used",
        Tree,
        "split",
        "above = cells.copy()",
        "above = cells.copy(); above[self.facts.hits] = 0",
        **of("lfu"),
    ),
    mutation(
        "a split's upper half has the request's priority",
        Tree,
        "split",
        "above = cells.copy()",
        "above = cells.copy(); above[self.facts.priority] = 0",
        seed=51,
        **of("priority"),
    ),
    mutation(
        "the last priority counts", Tree, "used", "if place and cells[place] < priority:", "if place:", **of("priority")
    ),
    mutation("priorities are not heard of", Index, "acquire", "lease.priority = priority", "pass", **of("priority")),
    mutation("protection begins one hit late", Ranked, "_slru", ">= self", "> self", **of("slru")),
    mutation(
        "an access is a creation", Ranked, "unpin", "self.time if self.recent else None", "self.time", **of("fifo")
    ),
    mutation("a release is no access", Ranked, "unpin", "self.time if self.recent else None", "None", **of("mru")),
    mutation("what comes later is as old", Ranked, "pin", "self.clock += 1", "self.clock += 0", **of("filo")),
    mutation("what comes back is as old as it was", Ranked, "unlink", "cells[self.time] = None", "pass", **of("fifo")),
    mutation("tlru looks at a node's end", Ranked, "_tlru", "- node.num_bytes // TOKEN_BYTES", "- 0", **of("tlru")),
    mutation(
        "a branch's history is not its ancestors'",
        Tree,
        "_deepened",
        "up = up.parent",
        "up = None",
        **of("tlru"),
    ),
    mutation(
        "history shrinks with a split",
        Tree,
        "split",
        "            above[depth] -= node.num_bytes // TOKEN_BYTES\n",
        "            above[depth] -= node.num_bytes // TOKEN_BYTES\n"
        "            above[self.facts.history] = above[depth]\n",
        seed=45,
        **of("tlru"),
    ),
    mutation("a tail keeps its rank when it is cut off", Ranked, "split", "self.changed(tail)", "pass", **of("tlru")),
    mutation("a node whose last child went is forgotten", Ranked, "unlink", "self._push(parent)", "pass", **of("fifo")),
    mutation("a locked leaf is still queued", Ranked, "pin", "queued[NODE] = cells[entry] = None", "pass", **of("lfu")),
    mutation("a node with children is queued", Ranked, "unpin", " and not cells[self.kids]", "", **of("mru")),
    mutation("children are not counted", Ranked, "_put", "parent.cells[self.kids] += 1", "pass", **of("mru")),
    mutation("a split's upper half has no child", Ranked, "split", "above[self.kids] = 1", "pass", **of("filo")),
    mutation(
        "what differs in time is joined",
        Ranked,
        "alike",
        "above == below",
        "True",
        **of("mru"),
    ),
    mutation("what differs in hits is joined", Tree, "_alike", "self.facts.alike(up, low)", "True", **of("slru")),
    mutation(
        "a hit counts only where it locks", Tree, "_changed", "order.changed(node)", "pass", host_pages=24, **of("lfu")
    ),
    mutation(
        "the host has the device's policy",
        Index,
        "__init__",
        "config.host_eviction]",
        "config.eviction]",
        **TWO_POLICIES,
    ),
    mutation(
        "an old heap's leaves are not looked at", Ranked, "victim", "if old and (", "if False and (", by=small_heaps
    ),
    mutation(
        "a renewed heap loses leaves",
        Ranked,
        "_push",
        "if entry[NODE] is not None",
        "if entry[NODE] is None",
        by=small_heaps,
    ),
    mutation(
        "an old heap is taken from its top",
        Ranked,
        "_push",
        "entry = old.pop()",
        "entry = old.pop(0)",
        by=small_heaps,
    ),
    # -- bigram keys
    mutation(
        "a page matches whatever is behind it", Tree, "common_pages", " - self.over", "", bigram=True, page_size=4
    ),
    mutation(
        "a page's child is found by its own tokens", Index, "_match", "self.tree.span", "self.page_bytes", bigram=True
    ),
    mutation("a run ends with its pages", tree.Node, "lie_in", "end += self.space.over", "pass", bigram=True),
    mutation("a cut loses the token behind it", Tree, "split", "key[: at + self.over]", "key[:at]", bigram=True),
    mutation("joined runs say a token twice", Tree, "merge", "if self.over:", "if False:", bigram=True),
    mutation(
        "pages without a name are committed",
        Index,
        "commit",
        "min(num_pages, ",
        "max(num_pages, ",
        bigram=True,
    ),
    mutation(
        "a match may be all tokens",
        Index,
        "acquire",
        "min(length - over, limit",
        "min(length, limit",
        bigram=True,
    ),
    mutation(
        "bigrams are hashed as tokens",
        eventlog.Chain,
        "resolve",
        "keys.words(run), keys.word_bytes",
        "run, keys.page_bytes",
        bigram=True,
    ),
    mutation(
        "a slice of hashes ends with its pages",
        eventlog.Chain,
        "resolve",
        "text[done : stop + keys.over]",
        "text[done:stop]",
        bigram=True,
        cut_slice=1,
    ),
    mutation(
        "a part of an event ends with its pages",
        EventLog,
        "_add",
        "take * keys.page_bytes + keys.over))",
        "take * keys.page_bytes))",
        bigram=True,
        max_batch_blocks=3,
    ),
    mutation("bigrams are told of as tokens", EventLog, "_pack", "if self.keys.bigram:", "if False:", bigram=True),
    # -- events
    mutation(
        "a match emits",
        Index,
        "acquire",
        'counters["requests"] += 1',
        'counters["requests"] += 1\n        [self._change(DEVICE, node, True) for node in path[:on_device]]',
    ),
    mutation(
        "a duplicate is announced",
        Index,
        "_adopt",
        "better.append((at, run))",
        "better.append((at, run)); changed.append(child)",
    ),
    mutation("an eviction is not announced", Index, "drop", "self.change(c, node, False)", "self.version += 1"),
    mutation("a page is handed on before its removal is told", Index, "drain", "if log.removals:", "if False:"),
    mutation("a clear is not told", Index, "clear", "self.log.cleared()", "pass", seed=22),
    mutation("a digest starts anew at each node", EventLog, "_behind", "if before is None:", "if True:"),
    mutation("a removal is cut from its start", EventLog, "_add", "start if stored else count - start - take", "start"),
    mutation(
        "stores of two requests are joined",
        EventLog,
        "_add",
        "run.extras == extras and ",
        "",
        by=two_requests_one_sequence,
    ),
    mutation("stores that are no chain are joined", EventLog, "_add", " and run.digests[-1][-size:] == parent", ""),
    mutation("a batch's number is given twice", EventLog, "_close_batch", "self.next_seq += 1", "self.next_seq += 0"),
    mutation("unpublished namespaces are published", Index, "tell", "node.space.extras is None", "False"),
    mutation(
        "zero bytes at a page's end are not hashed", hashing.Hasher, "chain", 'f"V{page_bytes}"', 'f"S{page_bytes}"'
    ),
    mutation(
        "namespaces are joined strings in the hash",
        hashing,
        "seed",
        "_tagged(extra_key) + _tagged(cache_salt)",
        '((extra_key or "") + (cache_salt or "")).encode()',
    ),
    mutation(
        "namespaces are joined strings in the tree",
        Index,
        "acquire",
        "s = self._session(session)",
        "s = self._session(session)\n"
        '        namespace = type(namespace)(cache_salt="".join(part or "" for part in namespace) or None)',
    ),
    # -- commits and leases
    mutation("a commit does not wait for every shard", Index, "_pump", "!= s.all_shards", "== 0"),
    mutation(
        "a commit does not wait for its event",
        Index,
        "_pump",
        "if s.events.get(op.ticket, 0) != s.all_shards:",
        "s.events.setdefault(op.ticket, 0)\n            if False:",
    ),
    mutation(
        "a commit does not wait for its load",
        Index,
        "_pump",
        "if lease is not None and lease.load is not None:",
        "if False:",
        seed=35,
        **LOADS,
    ),
    mutation("what hangs on a failed load is committed", Index, "_pump", "if lease.failed:", "if False:", **LOADS),
    mutation(
        "a duplicate is freed at once",
        Index,
        "_commit",
        "            lease.duplicates.append((reply, duplicates))",
        "            self.pools[DEVICE].leased -= len(duplicates) // SLOT_BYTES\n"
        "            self.pools[DEVICE].give(duplicates)",
    ),
    mutation(
        "a duplicate is freed before its answer was read", Index, "_drop_duplicates", "0 < number <= seen", "number > 0"
    ),
    mutation("a load's duplicates are not told", Index, "_commit", "lost += len(slots)", "pass", seed=236, **LOADS),
    mutation("a tree's page is replaced by the newcomer's", Index, "_adopt", "if run is None:", "if True:"),
    mutation(
        "a discard does not let go of the lock",
        Index,
        "release",
        "        if discard:\n",
        "        if discard:\n            held.node = None\n",
    ),
    mutation("a discarded commit takes effect", Index, "release", "        if discard:\n", "        if False:\n"),
    mutation(
        "a lease can be released twice",
        Index,
        "_lease",
        "held is None or held.releasing or held.waiting",
        "held is None",
        seed=41,
    ),
    mutation(
        "another session's lease can be released",
        Index,
        "_lease",
        "s.leases.get(lease)",
        "self.leases.get(lease)",
        seed=19,
    ),
    # -- death
    mutation(
        "fenced pages are freed at the session's end",
        Index,
        "end_session",
        "        self._settle(s)",
        "        [self._give_back(lease) for lease in list(s.leases.values()) if lease.load is None]",
    ),
    mutation(
        "pages that the dead may still read are unlocked at the session's end",
        Index,
        "end_session",
        "            pool.leased -= own\n",
        "            pool.leased -= own\n"
        "            if lease.node is not None:\n"
        "                self.orders[DEVICE].unpin(lease.node)\n"
        "                lease.node = None\n",
    ),
    mutation(
        "one shard's death is the death of all",
        Index,
        "_settle",
        "if s.gone == s.all_shards:\n            s.queue",
        "if s.gone:\n            s.queue",
    ),
    mutation(
        "a release of the dead does not wait for every shard",
        Index,
        "_settle",
        "if done == s.all_shards and",
        "if done and",
    ),
    mutation(
        "pages that a load still fills come back",
        Index,
        "_settle",
        "if lease.load is None:",
        "if True:",
        seed=225,
        **LOADS,
    ),
    mutation(
        "pins outlive their session", Index, "end_session", "            self._unpin(s, owner)", "            pass"
    ),
    mutation(
        "an unpin lets go of everybody's",
        Index,
        "unpin",
        "self._unpin(s, owner)",
        "sum(self._unpin(t, owner) for t in self.sessions.values())",
        seed=28,
    ),
    # -- the second tier
    mutation(
        "the host's pin is dropped when the load is sent",
        Index,
        "_grant",
        "        self.loads[load.id] = load\n",
        "        self.loads[load.id] = load\n"
        "        self.orders[HOST].unpin(lease.host_node)\n"
        "        lease.host_node = None\n",
        host_pages=8,
    ),
    mutation(
        "a write-through does not lock its source",
        Backups,
        "_send",
        "        orders[DEVICE].pin(last)\n",
        "",
        Edit(Backups, "_written", "        orders[DEVICE].unpin(ticket.end)\n", ""),
        host_pages=24,
    ),
    mutation(
        "a write-through is told when it is sent",
        Backups,
        "_send",
        "            each.writing |= WRITING\n",
        "            index.change(HOST, each, True)\n",
        **TWO_TIERS,
    ),
    mutation("a write-through that failed is told", Backups, "_written", "elif ticket.ok:", "elif True:", **TWO_TIERS),
    mutation(
        "what hangs on a failed write-through stays",
        Backups,
        "_written",
        "if not later.cancelled and self._hangs_on(later, nodes):",
        "if False:",
        by=a_parents_copy_fails,
        **TWO_TIERS,
    ),
    mutation(
        "targets of a cancelled copy are handed on while it is written",
        Backups,
        "_written",
        "                    later.fenced = self._unwrite(later)\n",
        "                    pool.give(self._unwrite(later))\n",
        by=a_parents_copy_fails,
        **TWO_TIERS,
    ),
    mutation(
        "write-throughs take effect as their acks come",
        Backups,
        "done",
        "                write.ok = ok\n",
        "                write.ok = ok\n"
        "                self.writes.remove(write)\n"
        "                self._written(write)\n",
        seed=110,
        **TWO_TIERS,
    ),
    mutation("a load takes effect though it failed", Index, "_loaded", "if not ok:", "if False:", **LOADS),
    mutation(
        "nothing is written through a second time",
        Backups,
        "_send",
        "        if not chain:\n",
        "        if not chain or len(chain) > 1:\n",
        **TWO_TIERS,
    ),
    mutation(
        "a lease pins a host copy that is still written",
        Index,
        "host_end",
        " and not node.writing & bit",
        "",
        **TWO_TIERS,
    ),
    mutation(
        "the host makes room by evicting what a copy hangs on",
        Backups,
        "_send",
        "            orders[HOST].pin(backed)",
        "            pass",
        Edit(Backups, "_send", "                    orders[HOST].unpin(backed)\n", ""),
        Edit(Backups, "_send", "orders[HOST].pin(last, backed)", "orders[HOST].pin(last)"),
        host_pages=8,
    ),
    mutation(
        "what found no room on the host is forgotten",
        Backups,
        "_send",
        "self._skipped[chain[-1]] = None",
        "pass",
        by=there_is_room_on_the_host_later,
    ),
    mutation("nobody hears that there is room", Backups, "let_go", "bool(self._skipped)", "False", host_pages=8),
    mutation(
        "what is copied on eviction goes before it is copied",
        Index,
        "evict",
        "            elif not (copying and node.cells[HOST] is None and backups.demote(node)):\n",
        "            else:\n                copying and node.cells[HOST] is None and backups.demote(node)\n",
        **WRITES_BACK,
    ),
    mutation(
        "what is copied on eviction stays",
        Backups,
        "_demoted",
        "            index.drop(DEVICE, node)\n",
        "            pass\n",
        by=a_page_leaves_with_its_copy,
        **WRITES_BACK,
    ),
    mutation(
        "what is copied on eviction goes though somebody has come to it",
        Backups,
        "_demoted",
        " and not node.cells[lock]",
        "",
        **WRITES_BACK,
    ),
    mutation(
        "a parent leaves the device before its child",
        Backups,
        "_demoted",
        " and self._is_leaf(node)",
        "",
        by=a_child_comes_while_its_parent_is_copied,
        **WRITES_BACK,
    ),
    mutation(
        "pages on their way are not counted",
        Backups,
        "_demoted",
        "self.demoting -= ticket.demote",
        "pass",
        **WRITES_BACK,
    ),
    mutation(
        "a first hit is enough",
        Backups,
        "_send",
        "chain[first].cells[place] < least",
        "chain[first].cells[place] < least - 1",
        by=the_second_hit_is_copied,
    ),
    mutation(
        "a host hit is loaded, few as it is",
        Index,
        "_worth_loading",
        "return False\n        quota",
        "pass\n        quota",
        load_back_threshold=8,
        **LOADS,
    ),
    mutation(
        "loads beyond the quota",
        Index,
        "_worth_loading",
        "<= quota",
        "<= 9 * quota",
        load_back_quota=2,
        **LOADS,
    ),
    # -- the rest
    mutation("a limit is not kept", Index, "acquire", "min(length - over, limit * TOKEN_BYTES)", "length - over"),
    mutation("pins outlive their time", Index, "expire", "pin.expires_at <= now", "pin.expires_at < now", seed=54),
    mutation(
        "the version does not say that a page came",
        Index,
        "change",
        "self.version += 1",
        "self.version += not present",
    ),
    mutation("a process that dies does not end its session", Index, "shard_gone", "self.end_session(session)", "pass"),
    mutation(
        "a promised page is promised again", Index, "_room", " - pinned - self.promised(0)", " - pinned", evict_slice=1
    ),
    mutation(
        "the last to wait is served first",
        Index,
        "_serve_waiting",
        "= self._waiting[0]",
        "= self._waiting[-1]",
        evict_slice=1,
    ),
    mutation(
        "a session's end leaves those who wait waiting",
        Index,
        "end_session",
        "self._leave_queue(waiting)",
        "pass",
        evict_slice=1,
    ),
    # -- matches that were agreed on, and pages for a part
    mutation(
        "less is matched than was agreed", Index, "acquire", "if exact is not None and matched_bytes", "if 0 and 0"
    ),
    mutation("more is matched than was agreed", Index, "acquire", "            limit = exact\n", ""),
    mutation("pages are taken for all", Index, "acquire", "min(have, matched_bytes + room * TOKEN_BYTES)", "have"),
    mutation(
        "room counts what is matched", Index, "acquire", "matched_bytes + room * TOKEN_BYTES", "room * TOKEN_BYTES"
    ),
    mutation("upto is not kept", Index, "_growth", "min(have, upto * TOKEN_BYTES)", "have"),
    mutation("what has no page is committed", Index, "commit", "tokens = min(have, room)", "tokens = have"),
    mutation("more than has pages can be committed", Index, "commit", "<= min(have, room)", "<= have"),
    # -- extends of many
    mutation(
        "one that finds no room fails all",
        Index,
        "extend",
        "                growths.append(error)\n                continue\n",
        "                raise\n",
    ),
    mutation(
        "a batch is promised a page twice",
        Index,
        "_refuse_growth",
        "need + num_fresh > sum(looked)",
        "num_fresh > sum(looked)",
        seed=97,
    ),
    mutation("a lease is extended twice at once", Index, "extend", "lease.extending = True", "pass"),
    mutation(
        "an extend of what was released takes pages",
        Index,
        "_take_no_more",
        "if lease.extending:",
        "if False:",
        seed=45,
        evict_slice=1,
    ),
    # -- waiting for our own copies
    mutation(
        "who is locked out by a copy is refused",
        Index,
        "_refuse",
        " and num_fresh > room + self._in_copies(path, partial, at)",
        "",
        seed=23,
        **TWO_TIERS,
    ),
    mutation(
        "locks of others go with a copy",
        Index,
        "_locked_by_copies",
        "node.cells[lock] == count",
        "node.cells[lock]",
        **LOADS,
    ),
    mutation(
        "a match is counted as a copy's",
        Index,
        "_locked_by_copies",
        " and node not in matched",
        "",
        by=a_match_that_a_copy_locks,
    ),
    mutation(
        "half a match is counted as a copy's",
        Index,
        "_locked_by_copies",
        "pages -= at // self.page_bytes",
        "pass",
        seed=92,
        **LOADS,
    ),
    mutation(
        "who waits for a copy spins",
        Index,
        "_serve_waiting",
        "self._stuck = self.revision\n                return",
        "return",
        **LOADS,
    ),
    mutation(
        "the end of a copy wakes nobody",
        Index,
        "busy",
        "self._stuck != self.revision",
        "self._stuck is None",
        Edit(Index, "step", "self._stuck != self.revision", "self._stuck is None"),
        **LOADS,
    ),
    mutation(
        "who is refused in the end keeps those behind waiting",
        Index,
        "_leave_queue",
        "self._stuck = None",
        "self._stuck = self.revision",
        evict_slice=1,
    ),
    # -- in line for room
    mutation(
        "who comes later overtakes who waits",
        Index,
        "acquire",
        "if not in_turn and (num_fresh or any(more)) and self.line.holds_up(number):",
        "if False:",
        **IN_LINE,
    ),
    mutation(
        "an extend overtakes one that waits",
        Index,
        "extend",
        "if line.extends.size and line.extends_hold_up(lease.tenant):",
        "if False:",
        by=in_line.test_an_extend_does_not_overtake_an_extend,
        **IN_LINE,
    ),
    mutation("a session is served again and again", line.Rota, "remove", "served or not row", "not row", **IN_LINE),
    mutation(
        "acquires go before the extends they wait for",
        line.Line,
        "firsts",
        "return extends + acquires",
        "return acquires + extends",
        Edit(line.Line, "firsts", "if extends and acquires:", "if False:"),
        **IN_LINE,
    ),
    mutation(
        "what is given back wakes nobody in line",
        Index,
        "busy",
        "self._tried != self.revision",
        "self._tried is None",
        Edit(Index, "step", "self._tried != self.revision", "self._tried is None"),
        **IN_LINE,
    ),
    mutation(
        "who needs less now is not tried again",
        Index,
        "_fail_growth",
        "self._stuck = self._tried = None",
        "self._stuck = None",
        **IN_LINE,
    ),
    mutation("a deadline comes late", line.Line, "late", "<= now", "< now", **IN_LINE),
    mutation(
        "the last in line is not told",
        Index,
        "_expire_waiting",
        "for standing in late:",
        "for standing in late[:1]:",
        **IN_LINE,
    ),
    mutation(
        "an extend out of turn takes what is left at its deadline",
        Index,
        "_turn_away",
        "if not first and (",
        "if False and (",
        by=in_line.test_an_extend_out_of_turn_takes_nothing_at_its_deadline,
        **IN_LINE,
    ),
    mutation(
        "what there never is is waited for",
        Index,
        "_never",
        "count > pool.total",
        "count > 2 * pool.total",
        by=in_line.test_what_there_never_is_is_refused_at_once,
    ),
    mutation(
        "who goes back in line goes to its end",
        Index,
        "_back_in_line",
        "self.line.stand(standing, first=True)",
        "self.line.stand(standing)",
        by=in_line.test_who_goes_back_in_line_is_before_those_who_came_to_it_meanwhile,
    ),
    mutation(
        "who goes back in line keeps what it has pinned",
        Index,
        "_back_in_line",
        "        self._give_back(lease, used=False)\n",
        "",
        by=in_line.test_who_waits_for_a_copy_that_others_then_profit_from_goes_to_the_head_of_the_line,
    ),
    mutation(
        "who goes back in line is counted twice",
        Index,
        "_back_in_line",
        'self.counters["requests"] -= 1',
        "pass",
        by=in_line.test_who_waits_for_a_copy_that_others_then_profit_from_goes_to_the_head_of_the_line,
    ),
    mutation(
        "there is no end to those who may wait",
        line.Line,
        "stand",
        "len(self) >= self.max_in_all or mine >= self.max_of_session or",
        "",
        by=in_line.test_a_bounded_number_may_wait_and_what_is_beyond_is_busy,
    ),
    mutation(
        "a session's end leaves it in line",
        Index,
        "end_session",
        "            self._leave_line(standing)\n",
        "",
        **IN_LINE,
    ),
    mutation(
        "who is withdrawn keeps its pins",
        Index,
        "withdraw",
        "self._give_back(waiting.lease, used=False)",
        "pass",
        **{**IN_LINE, "evict_slice": 1},
    ),
    mutation(
        "a lease whose extend was withdrawn can't be extended",
        Index,
        "_let_grow",
        "growth.lease.extending = False",
        "pass",
        **IN_LINE,
    ),
    mutation(
        "a copy that does not end is waited for again",
        Index,
        "_distrusts",
        "return",
        "return False and",
        **STUCK_COPIES,
    ),
    mutation(
        "who waits for a copy that does not end has no deadline",
        Index,
        "_expire_waiting",
        "waiting.deadline <= now",
        "waiting.deadline < 0",
        **STUCK_COPIES,
    ),
    mutation("pins keep all there is", Index, "_refuse_pin", "pinned + more > most", "False", **IN_LINE),
    mutation("a pin of what is pinned counts again", Index, "_refuse_pin", "if more and pinned", "if bound", **IN_LINE),
    # -- cancel
    mutation(
        "a cancel does not wait for the load", Index, "cancel", "held.load is not None", "False", seed=22, **LOADS
    ),
    mutation(
        "a cancelled lease goes on",
        Index,
        "cancel",
        "self._take_no_more(held)",
        "pass",
        by=a_session_ends_with_a_cancel,
    ),
    mutation(
        "a cancel is not answered at the session's end",
        Index,
        "end_session",
        "if lease.cancelling is not None:",
        "if False:",
        by=a_session_ends_with_a_cancel,
    ),
    # -- L3: down
    mutation(
        "a page is told of before it is stored",
        L3,
        "_store",
        "self.stores[ticket] = storing, part",
        "self.stores[ticket] = storing, part; self._add(part, bytes([1]) * (stop - start))",
        **STORES,
    ),
    mutation(
        "what is being stored may be evicted",
        L3,
        "_offer",
        "index.orders[HOST].pin(end)",
        "pass",
        Edit(L3, "_stored", "index.orders[HOST].unpin(storing.end)", "pass"),
        **STORES,
    ),
    mutation("what was stored stays locked", L3, "_stored", "index.orders[HOST].unpin(storing.end)", "pass", **STORES),
    mutation("stores keep their share", L3, "_stored", "self.held_by_stores -= storing.num_pages", "pass", **STORES),
    mutation(
        "what found no room among the stores is never stored",
        L3,
        "_stored",
        "self._retry()",
        "pass",
        by=paths.test_stores_beyond_their_share_are_counted_and_stored_once_there_is_room,
    ),
    mutation("what a store did not take is told of", L3, "_add", "mask[i] == 1", "mask[i] >= 0", **STORES),
    mutation("what was there is told of again", L3, "_add", " and not (exact and digest in self.shelf)", "", **STORES),
    mutation("what went for a store is not told of", L3, "stored", "self.removed(removed)", "pass", **STORES),
    mutation("what is gone is not told of", L3, "_remove", "told.append(digest)", "pass", **STORES),
    mutation(
        "what is gone is told of parents first",
        L3,
        "_remove",
        "told[::-1]",
        "told",
        by=paths.test_what_goes_goes_as_a_path_of_which_a_cut_takes_the_end_first,
    ),
    mutation(
        "a store is of the slots before",
        L3,
        "_store",
        "slots[start * SLOT_BYTES : stop * SLOT_BYTES]",
        "slots[: (stop - start) * SLOT_BYTES]",
        **STORES,
    ),
    mutation(
        "a page comes back behind its children",
        Shelf,
        "add",
        "self._places.pop(digest, self._next)",
        "self._next",
        by=paths.test_a_bad_page_goes_from_under_its_children_and_comes_back_to_its_place,
    ),
    # -- L3: up
    mutation(
        "a page under a late fetch is given away",
        L3,
        "_break",
        "part.fenced = True\n                pool.leased -= part.num_pages\n"
        "                pool.fenced += part.num_pages",
        "self._give(part.slots); part.slots = b''",
        **STORES,
    ),
    mutation("fetches keep their share", L3, "_give", "self.fetching -= count", "pass", **STORES),
    mutation(
        "fetches have no share",
        L3,
        "_fetch",
        "self.prefetch_quota - self.fetching",
        "self.prefetch_quota",
        by=paths.test_fetches_hold_no_more_of_the_host_than_their_share,
    ),
    mutation(
        "the anchor is not held on the host",
        L3,
        "want",
        "index.orders[HOST].pin(host)",
        "pass",
        Edit(L3, "_end", "index.orders[HOST].unpin(prefetch.host_end)", "pass"),
        **STORES,
    ),
    mutation(
        "the anchor is not held on the device",
        L3,
        "want",
        "index.orders[DEVICE].pin(device)",
        "pass",
        Edit(L3, "_end", "index.orders[DEVICE].unpin(prefetch.device_end)", "pass"),
        **STORES,
    ),
    mutation("a prefetch keeps its locks", L3, "_end", "index.orders[HOST].unpin(prefetch.host_end)", "pass", **STORES),
    mutation(
        "a page behind a gap is taken",
        L3,
        "fetched",
        "if prefetch.gap:\n                right = 0",
        "if False:\n                right = 0",
        by=paths.test_a_gap_in_the_middle_ends_it_there,
    ),
    mutation(
        "what came last is taken first",
        L3,
        "fetched",
        "while prefetch.parts and (right := prefetch.parts[0].right) is not None:\n"
        "            part = prefetch.parts.popleft()",
        "while (part := next((it for it in prefetch.parts if it.right is not None), None)) is not None:\n"
        "            right = part.right; prefetch.parts.remove(part)",
        **STORES,
    ),
    mutation(
        "other tokens are taken for the same",
        L3,
        "_adopt",
        "tokens.startswith(child.key, start)",
        "True",
        by=paths.test_what_begins_alike_and_goes_on_otherwise_is_not_taken_for_what_was_fetched,
    ),
    mutation(
        "a page hangs on one that is being written", L3, "_adopt", "if child.writing & WRITING:", "if False:", **STORES
    ),
    mutation(
        "what hangs on a copy that failed waits for ever",
        L3,
        "_adopt",
        "if not anchor.writing & WRITING:",
        "if False:",
        by=paths.test_if_that_copy_fails_what_was_fetched_goes_back,
    ),
    mutation("the end of a copy lets nobody on", L3, "unblocked", "if prefetch.slots:", "if False:", **STORES),
    mutation("pages that came twice are kept twice", L3, "_adopt", "self._give(prefetch, lost)", "pass", **STORES),
    mutation("what was adopted is fetched for ever", L3, "_adopt", "self.fetching -= count", "pass", **STORES),
    mutation(
        "nobody hears that what was fetched is on the host",
        L3,
        "_adopt",
        "index.change(HOST, each, True)",
        "index.version += 1",
        **STORES,
    ),
    mutation(
        "a page of the device alone is no anchor to be copied",
        L3,
        "_fetch",
        "elif not index.backups.send(anchor, whole=True):",
        "elif False:",
        by=paths.test_what_hangs_on_the_device_alone_is_copied_to_the_host_first,
    ),
    # -- L3: who waits
    mutation("a deadline is none", L3, "expire", "waiter.until <= now", "False", **STORES),
    mutation(
        "who waits outlives the session",
        L3,
        "session_ended",
        "waiter.session is session",
        "False",
        by=lambda: paths.test_the_end_of_a_session_is_the_end_of_its_waiting("asked"),
    ),
    mutation(
        "nobody waits and it is fetched",
        L3,
        "_leave",
        "if count and self._forsaken(prefetch):",
        "if False:",
        by=paths.test_at_its_deadline_a_request_goes_on_with_what_has_come,
    ),
    mutation(
        "those behind are forgotten",
        L3,
        "_forsaken",
        " or prefetch.behind",
        "",
        by=paths.test_what_somebody_waits_behind_goes_on_without_its_own,
    ),
    mutation(
        "those behind do not look for the rest",
        L3,
        "_go_on",
        "self._look(each)",
        "self._go_on(each)",
        by=paths.test_two_requests_that_begin_alike_fetch_what_is_alike_once_and_each_its_own,
    ),
    mutation(
        "those behind fetch it again",
        L3,
        "_go_on",
        "self._pass(each)",
        "pass",
        by=paths.test_two_requests_for_the_same_pages_fetch_them_once,
    ),
    mutation(
        "those behind hold nothing of what came",
        L3,
        "_pass",
        "index.orders[HOST].pin(node, prefetch.host_end)",
        "pass",
        **STORES,
    ),
    mutation(
        "who goes on from behind follows the wrong page",
        L3,
        "_less",
        "prefetch.before = prefetch.digests[(num_pages - 1) * size : num_pages * size]",
        "pass",
        by=paths.test_two_requests_that_begin_alike_fetch_what_is_alike_once_and_each_its_own,
    ),
    # -- L3: told of
    mutation(
        "a clear does not wait for L3",
        Index,
        "clear",
        "self.l3.num_busy if self.l3 is not None else 0",
        "0",
        by=paths.test_a_clear_says_that_l3_is_at_work_and_changes_nothing,
    ),
    mutation(
        "a clear forgets what L3 has",
        Index,
        "clear",
        "self._telling_again = self.l3.tell_again()",
        "pass",
        by=paths.test_a_clear_of_all_tells_again_what_l3_has_all_the_same,
    ),
    mutation(
        "what comes while all is told again is told twice",
        L3,
        "_add",
        "<= self._retold",
        "<= ALL",
        by=paths.test_what_changes_while_all_is_told_again_is_told_once,
    ),
    mutation(
        "what goes untold while all is told again is told",
        L3,
        "_remove",
        " and segment <= self._retold",
        "",
        by=paths.test_what_changes_while_all_is_told_again_is_told_once,
    ),
    mutation(
        "a snapshot tells of what is gone",
        snapshot.Snapshot,
        "_tell_below",
        "if digest in self._l3.shelf:",
        "if True:",
        by=paths.test_what_goes_while_a_snapshot_is_told_is_not_in_it,
    ),
    mutation("a dump leaves L3 out", Index, "walk", "self._told_below, 0", "None, 0", **STORES),
    mutation(
        "what is tried again makes room for a part of it, for ever",
        tiering.Backups,
        "_send",
        "if again and count < len(chain):",
        "if False:",
        by=tiers.test_what_is_tried_again_takes_no_room_from_others_for_a_part_of_it,
        **TWO_TIERS,
    ),
    # -- slots
    mutation("an evicted slot is freed twice", Index, "drop", "pool.give(run)", "pool.give(run), pool.give(run)"),
    mutation(
        "what the host still has counts as lost",
        Index,
        "drop",
        "cells[1 - c] is not None",
        "cells[c] is not None",
        **TWO_TIERS,
    ),
    mutation(
        "what a clear takes counts as evicted for want of room",
        Index,
        "_clear_slice",
        "cleared=True",
        "cleared=False",
        by=a_tier_is_cleared,
    ),
    mutation(
        "an evicted page is freed in halves",
        Index,
        "drop",
        "pool.give(run)",
        "pool.give(run[: -len(run) // 8 * 4 or None])",
    ),
]


def caught(planted: Mutation) -> tuple[int, BaseException] | None:
    """The first program that notices, and how."""
    if planted.by is not None:
        try:
            planted.by()
        except Exception as exc:
            return -1, exc
    for seed in (planted.seed, *range(NUM_PROGRAMS)):
        try:
            run(seed, **planted.fixed)
        except Exception as exc:
            return seed, exc
    return None


@pytest.mark.pure
@pytest.mark.parametrize("planted", MUTATIONS, ids=lambda m: m.name.replace(" ", "-"))
def test_planted_bug_is_caught(planted: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    for edit in planted.edits:
        plant(monkeypatch, *edit)
    found = caught(planted)
    assert found is not None, f"{NUM_PROGRAMS} programs did not notice that {planted.name}"


def test_the_same_programs_pass_without_a_bug() -> None:
    a_parents_copy_fails()
    a_session_ends_with_a_cancel()
    a_match_that_a_copy_locks()
    two_requests_one_sequence()
    a_tier_is_cleared()
    small_heaps()
    whoever_waits_is_refused()
    for fixed in (TWO_TIERS, TWO_POLICIES):  # of the others, test_laws runs the same
        for seed in range(30):
            run(seed, **fixed)
