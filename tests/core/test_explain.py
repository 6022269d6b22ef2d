"""`explain`: each reason in a case of its own, and in random programs against what became of each page."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

import pytest

from sglcache.core import explain as explaining
from sglcache.core.asked import Asked
from sglcache.core.departures import Departures
from sglcache.core.explain import Question, explain
from sglcache.core.index import DEVICE, HOST
from sglcache.core.key import ROOT, Namespace
from sglcache.core.l3 import L3Config
from sglcache.core.limits import Limits
from sglcache.core.resources import Companion, SlidingWindow
from sglcache.core.tiering import WritePolicy
from sglcache.testing.hybrid import Hybrid
from sglcache.testing.hybrid_model import Lease
from sglcache.testing.model import LeaseModel
from sglcache.testing.pages import Page
from sglcache.testing.programs import Program, SeededChooser, settings
from sglcache.testing.rig import Rig, Runner, pack
from sglcache.units import Tier

P = 4  # tokens in a page


def rig_of(num_pages: int = 16, host_pages: int = 0, **config: Any) -> tuple[Rig, Runner]:
    rig = Rig(page_size=P, num_pages=num_pages, host_pages=host_pages, **{"departures": 100, **config})
    return rig, rig.open_session()


def pages(first: int, count: int) -> list[int]:
    """So many pages of tokens that nobody else has."""
    return list(range(first, first + count * P))


def hold(
    rig: Rig, runner: Runner, tokens: Iterable[int], tenant: str | None = None, namespace: Namespace = ROOT
) -> LeaseModel:
    lease = rig.acquire(runner, tokens, namespace, tenant=tenant)
    assert isinstance(lease, LeaseModel), f"{lease!r}"
    rig.commit(runner, lease)
    rig.read_replies(runner)
    return lease


def put(
    rig: Rig, runner: Runner, tokens: Iterable[int], tenant: str | None = None, namespace: Namespace = ROOT
) -> None:
    lease = hold(rig, runner, tokens, tenant, namespace)
    rig.copies_done()
    rig.release(runner, lease)


def finished(steps: Generator[None, None, dict[str, Any]]) -> dict[str, Any]:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            facts: dict[str, Any] = end.value
            return facts


def ask(rig: Rig, tokens: Iterable[int] | bytes, namespace: Namespace = ROOT, **more: Any) -> dict[str, Any]:
    key = tokens if isinstance(tokens, bytes) else pack(tokens)
    before = rig.index.revision
    facts = finished(explain(rig.index, Question(key, namespace, **more)))
    assert rig.index.revision == before, "it changes nothing"
    assert 0 < len(facts["words"]) <= 12
    return facts


def said(facts: dict[str, Any]) -> str:
    return "\n".join(facts["words"])


def test_a_page_that_was_evicted_says_when_and_for_whom() -> None:
    rig, runner = rig_of(16)
    put(rig, runner, pages(0, 8))
    came = rig.index.now
    other = rig.open_session()
    put(rig, other, pages(1000, 12))
    left = rig.index.now
    rig.index.now += 3.25
    facts = ask(rig, [*pages(0, 8), 7])
    assert facts["matched"] == {"tokens": 0, "device": 0, "host": 0}
    missing = facts["missing"]
    assert (missing["page"], missing["first_token"], missing["last_token"], missing["why"]) == (1, 0, 3, "left")
    (entry,) = missing["left"]
    assert (entry["tier"], entry["reason"], entry["policy"], entry["pages"]) == ("DEVICE", "evicted", "lru", 8)
    assert entry["for"] == {"what": "acquire", "session": other.id, "tenant": None}
    assert 3.25 <= entry["ago_s"] <= 3.25 + left - came
    assert entry["idle_s"] < entry["age_s"] < left
    assert missing["not_on_host"] == {"why": "no_host_tier"}
    assert facts["advice"] == ["a host tier would have kept it: set host.pool_ratio"]
    assert "never backed up: there is no host tier" in said(facts)
    rig.settle()


def test_the_first_missing_page_is_behind_what_is_there() -> None:
    rig, runner = rig_of(16)
    held = hold(rig, runner, pages(0, 4))
    put(rig, runner, pages(0, 10))
    put(rig, runner, pages(1000, 12))
    facts = ask(rig, pages(0, 10))
    assert facts["matched"]["tokens"] == 4 * P
    assert (facts["missing"]["page"], facts["missing"]["why"]) == (5, "left")
    assert ask(rig, pages(0, 4) + pages(50, 6))["missing"]["why"] == "never"  # another that goes on otherwise
    rig.release(runner, held)
    rig.settle()


def test_equal_pages_of_another_prefix_are_not_confounded() -> None:
    rig, runner = rig_of(16, events=False)
    put(rig, runner, pages(0, 2) + pages(40, 4))
    put(rig, runner, pages(1000, 16))
    assert ask(rig, pages(0, 2) + pages(40, 4))["missing"]["why"] == "left"
    facts = ask(rig, pages(20, 2) + pages(40, 4))
    assert (facts["missing"]["page"], facts["missing"]["why"]) == (1, "never")
    assert ask(rig, pages(40, 4))["missing"]["why"] == "never"
    assert ask(rig, pages(0, 2) + pages(40, 4), Namespace(lora="x"))["missing"]["why"] == "never"


def test_what_is_all_there_says_where_pages_end() -> None:
    rig, runner = rig_of()
    put(rig, runner, pages(0, 4))
    assert said(ask(rig, pages(0, 4))).endswith("that is all of it")
    facts = ask(rig, [*pages(0, 4), 1, 2])
    assert (facts["missing"], facts["rest_tokens"]) == (None, 2)
    assert "the last 2 of 18 tokens fill none" in said(facts)
    limited = ask(rig, pages(0, 4), limit=9)
    assert (limited["matched"]["tokens"], limited["missing"]["why"], limited["missing"]["page"]) == (8, "limit", 3)
    assert ask(rig, [1])["missing"] is None


def test_bigrams_name_a_page_with_the_token_behind_it() -> None:
    rig, runner = rig_of(bigram=True)
    put(rig, runner, [*pages(0, 4), 99])
    facts = ask(rig, pages(0, 4))
    assert (facts["whole_pages"], facts["matched"]["tokens"], facts["missing"]) == (3, 12, None)
    assert "and the token behind them" in said(facts)
    put(rig, runner, pages(1000, 16))
    assert ask(rig, [*pages(0, 4), 99])["missing"]["why"] == "left"
    assert ask(rig, [*pages(0, 1), 99, 98])["missing"]["why"] == "never"  # the token behind is another


def test_what_left_the_device_and_then_the_host() -> None:
    rig, runner = rig_of(8, 16)
    put(rig, runner, pages(0, 4))
    put(rig, runner, pages(100, 8))
    facts = ask(rig, pages(0, 4), page_bytes=1 << 20)
    assert facts["matched"] == {"tokens": 16, "device": 0, "host": 16}
    assert facts["load_back"] == {"pages": 4, "bytes": 4 << 20}
    assert facts["device_missing"]["left"]["kept"] is True
    assert "(the host kept it)" in said(facts)
    for n in range(2, 5):
        put(rig, runner, pages(n * 100, 8))
    facts = ask(rig, pages(0, 4))
    missing = facts["missing"]
    assert [(each["tier"], each["kept"]) for each in missing["left"]] == [("DEVICE", True), ("HOST", False)]
    assert missing["left"][1]["for"]["what"] == "backup"
    assert "not_on_host" not in missing
    assert facts["advice"] == ["a larger host tier: raise host.pool_ratio"]


def test_why_it_was_never_on_the_host() -> None:
    selective = WritePolicy("write_through_selective", 2)
    rig, runner = rig_of(8, 16, write_policy=selective)
    put(rig, runner, pages(0, 4))
    put(rig, runner, pages(100, 8))
    facts = ask(rig, pages(0, 4))
    assert facts["missing"]["not_on_host"] == {"why": "too_few_hits", "hits": 1, "threshold": 2}
    assert 'host.write_policy = "write_through"' in said(facts)

    rig, runner = rig_of(16, 4)
    held = hold(rig, runner, pages(0, 4))  # it holds the host
    rig.copies_done()
    keeper = rig.acquire(runner, pages(0, 4))
    assert isinstance(keeper, LeaseModel)
    put(rig, runner, pages(100, 4))
    put(rig, runner, pages(200, 12))
    assert ask(rig, pages(100, 4))["missing"]["not_on_host"]["why"] == "no_room"
    rig.release(runner, held)
    rig.release(runner, keeper)

    rig, runner = rig_of(8, 16)
    lease = hold(rig, runner, pages(0, 4))
    for copy in rig.in_flight():
        rig.copy_done(copy, ok=False)
    rig.release(runner, lease)
    put(rig, runner, pages(100, 8))
    assert ask(rig, pages(0, 4))["missing"]["not_on_host"]["why"] == "failed"


def test_a_host_copy_that_left_first_is_told() -> None:
    rig, runner = rig_of(16, 8)
    put(rig, runner, pages(0, 4))
    rig.clear(Tier.HOST)
    rig.steps()
    put(rig, runner, pages(100, 16))
    missing = ask(rig, pages(0, 4))["missing"]
    assert [(each["tier"], each["reason"]) for each in missing["left"]] == [("HOST", "cleared"), ("DEVICE", "evicted")]
    assert missing["not_on_host"]["why"] == "left_the_host_before"


def test_a_clear_of_all_forgets_and_says_so() -> None:
    rig, runner = rig_of()
    put(rig, runner, pages(0, 4))
    put(rig, runner, pages(100, 16))
    assert ask(rig, pages(0, 4))["missing"]["why"] == "left"
    rig.clear()
    facts = ask(rig, pages(0, 4))
    assert facts["missing"]["why"] == "never_or_forgotten"
    assert "the whole cache was cleared" in said(facts)
    assert facts["remembered"]["departures"] == 0
    rig.steps()
    put(rig, runner, pages(0, 4))
    put(rig, runner, pages(100, 16))
    assert ask(rig, pages(0, 4))["missing"]["why"] == "left"


def test_the_ring_is_bounded_and_says_how_far_back_it_reaches() -> None:
    rig, runner = rig_of(8, departures=3)
    for n in range(12):
        put(rig, runner, pages(n * 100, 8))
    ring = rig.index.departures
    assert ring is not None
    assert len(ring.entries) == 3
    assert ask(rig, pages(1000, 8))["missing"]["why"] == "left"
    facts = ask(rig, pages(100, 8))
    assert facts["missing"]["why"] == "never_or_forgotten"
    assert facts["remembered"]["all"] is False
    assert facts["remembered"]["known_s"] == rig.index.now - ring.known_since

    rig, runner = rig_of(8, departed_bytes=1500)
    for n in range(12):
        put(rig, runner, pages(n * 100, 8))
    ring = rig.index.departures
    assert ring is not None
    assert len(ring.entries) == 2
    assert ring.num_bytes <= 1500


@pytest.mark.pure
def test_off_nothing_of_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object) -> None:
        raise AssertionError("called, and it is off")

    for name in ("left", "not_copied", "sent", "copied", "cleared"):
        monkeypatch.setattr(Departures, name, never)
    rig, runner = rig_of(8, 8, departures=0)
    for n in range(6):
        put(rig, runner, pages(n * 100, 6))
    assert rig.index.departures is None
    assert not any(hasattr(node, "was") for node in rig.index.tree.nodes())
    facts = ask(rig, pages(0, 6))
    assert facts["missing"]["why"] == "unknown"
    assert "observe.departures is 0" in said(facts)


def test_another_namespace_is_told_of_and_not_what_it_is() -> None:
    rig, runner = rig_of(32)
    secret = Namespace(lora="secret-lora", cache_salt="secret-salt")
    put(rig, runner, pages(0, 6), namespace=secret)
    facts = ask(rig, pages(0, 6), Namespace(cache_salt="mine"))
    assert facts["missing"]["elsewhere"] == {"tokens": 24, "differs": ["lora", "cache_salt"]}
    assert "secret" not in repr(facts)
    assert "elsewhere" not in ask(rig, pages(0, 6), Namespace(cache_salt="mine"), elsewhere=False)["missing"]
    assert ask(rig, pages(0, 6), secret)["missing"] is None
    assert "elsewhere" not in ask(rig, pages(500, 6), Namespace(cache_salt="mine"))["missing"]


def test_whose_pressure_and_which_floor_would_have_helped() -> None:
    rig, runner = rig_of(16, tenants={"a": Limits(), "b": Limits()})
    put(rig, runner, pages(0, 8), "a")
    put(rig, runner, pages(100, 12), "b")
    facts = ask(rig, pages(0, 8))
    entry = facts["missing"]["left"][-1]
    assert (entry["tenant"], entry["for"]["tenant"], entry["for"]["what"]) == ("a", "b", "acquire")
    assert "a device_floor for tenant a: it has none, and b took the page" in facts["advice"]
    assert "for an acquire of tenant b (session" in said(facts)


def test_what_is_computed_just_now_is_no_mystery() -> None:
    rig, runner = rig_of(32)
    put(rig, runner, pages(0, 4))
    lease = rig.acquire(runner, pages(0, 10))
    assert isinstance(lease, LeaseModel)
    facts = ask(rig, pages(0, 8))
    assert facts["missing"]["under_way"] == {"what": "computed", "session": runner.id}
    assert ask(rig, pages(0, 4) + pages(90, 4))["missing"]["why"] == "never"
    assert ask(rig, pages(0, 8), Namespace(lora="x"))["missing"]["why"] == "never"
    rig.release(runner, lease)
    assert ask(rig, pages(0, 8))["missing"]["why"] == "never"


def test_a_hit_that_is_too_small_to_load() -> None:
    rig, runner = rig_of(8, 16, load_back_threshold=5 * P)
    put(rig, runner, pages(0, 4))
    put(rig, runner, pages(100, 8))
    facts = ask(rig, pages(0, 4))
    assert facts["matched"]["tokens"] == 0
    assert (facts["missing"]["why"], facts["missing"]["host_tokens"]) == ("load_back_threshold", 16)
    assert facts["advice"] == ["lower host.load_back_threshold"]


def test_an_exact_third_tier_says_how_much_of_the_rest_it_has() -> None:
    rig, runner = rig_of(8, 8, l3=L3Config(tell=True))
    put(rig, runner, pages(0, 6))
    rig.all_l3_done()
    for n in (1, 2):
        put(rig, runner, pages(n * 100, 8))
        rig.all_l3_done()
    facts = ask(rig, pages(0, 7))
    assert facts["missing"]["why"] == "left"
    assert facts["missing"]["third"] == {"tier": "DISK", "tokens": 24}
    assert "the third tier (disk) has it, and 24 tokens from there on" in said(facts)


def test_a_request_of_before_is_explained_as_of_then() -> None:
    rig, runner = rig_of(16)
    put(rig, runner, pages(0, 8))
    put(rig, runner, pages(100, 12))
    ring = rig.index.departures
    assert ring is not None
    asked = Asked(7, "mine", runner.id, None, ROOT, pack(pages(0, 8)), None, rig.index.now, departures=ring.total)
    asked.outcome = "granted"
    asked.answered_at = asked.at
    put(rig, runner, pages(0, 8))  # that is it: it evicts the others, and its own pages are there again
    rig.index.now += 10
    put(rig, runner, pages(200, 16))  # and go once more
    now = ask(rig, pages(0, 8))
    assert now["missing"]["left"][0]["ago_s"] < 10
    facts = ask(rig, asked.tokens, asked=asked)
    assert facts["missing"]["why"] == "left"
    assert facts["missing"]["left"][0]["ago_s"] > 10
    assert facts["request"]["id"] == "mine"
    assert said(facts).startswith("request mine (#7): ")
    before = Asked(8, None, runner.id, None, ROOT, pack(pages(0, 8)), None, 0.0, departures=0, outcome="granted")
    assert ask(rig, before.tokens, asked=before)["missing"]["why"] == "never"


# -- any program ------------------------------------------------------------------------------------------------------


def held_against_history(rig: Rig, namespace: Namespace, key: bytes) -> str | None:
    """Ask, and hold the answer against what became of each page; why the first missing page is missing."""
    now, stamps = rig.index.now, rig.index.stamps
    facts = ask(rig, key, namespace)
    device, matched = rig.peek(key, namespace)
    assert (facts["matched"]["device"], facts["matched"]["tokens"]) == (device, matched)
    path = rig.book.path(namespace, key)
    missing = facts["missing"]
    if missing is None:
        assert matched == len(path) * rig.page_size
        return None
    assert missing["page"] - 1 == matched // rig.page_size
    page: Page = path[missing["page"] - 1]
    why: str = missing["why"]
    there = page in rig.model.slot[DEVICE] or page in rig.model.slot[HOST]
    assert there is (why == "load_back_threshold")
    if there:
        return why
    if "elsewhere" in missing:
        assert missing["elsewhere"]["tokens"] > matched
    history = {tier: stamps.gone[tier][page] for tier in (DEVICE, HOST) if page in stamps.gone[tier]}
    if why == "under_way":
        assert missing["under_way"]["what"] == "fetched" or any(
            page in lease.path for runner in rig.runners.values() for lease in runner.session.leases
        )
    elif why == "left":
        told = {Tier[each["tier"]]: (now - each["ago_s"], each["kept"]) for each in missing["left"]}
        assert told == history, f"{page} left {history}, and {told} was told"
        *_, last = missing["left"]
        assert last["kept"] is False
    else:
        assert why in ("never", "never_or_forgotten")
        assert not history, f"{page} left {history}, and {why} was told"
    return why


@pytest.mark.parametrize("seed", range(24))
def test_what_is_said_of_any_prompt_is_true(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = SeededChooser(seed)
    monkeypatch.setattr(explaining, "SLICE", choose.item((1, 3, 1000)))
    fixed: dict[str, Any] = {"departures": 1 << 20, "tenants": "any" if seed % 4 == 3 else None}
    program = Program(Rig(**settings(choose, **fixed)))
    rig = program.rig
    if rig.config.l3 is not None:
        program.earlier_life(choose)
    whys: set[str | None] = set()
    for turn in range(160):
        program.step(choose)
        if turn % 4 == 3 and program.prompts:
            namespace, key = choose.item(program.prompts)
            whys.add(held_against_history(rig, namespace, key))
    rig.settle()
    assert whys - {None, "limit"}, "no prompt had a page that is missing"


@pytest.mark.parametrize("events", [True, False])
def test_what_left_is_found_below_nodes_that_were_joined_and_split_since(events: bool) -> None:
    rig, runner = rig_of(16, events=events)
    shared = pages(0, 4)
    put(rig, runner, shared + pages(100, 3))
    put(rig, runner, shared + pages(200, 3))
    rig.cut()
    put(rig, runner, pages(1000, 9))  # the first branch goes, and the node it hung on is joined to the other
    assert rig.index.tree.num_merges > 0
    assert rig.index.stats().num_nodes == 2
    for told in range(2):
        facts = ask(rig, shared + pages(100, 3))
        assert (facts["matched"]["tokens"], facts["missing"]["page"]) == (16, 5)
        (entry,) = facts["missing"]["left"]
        assert entry["pages"] == 3
        assert ask(rig, shared + pages(300, 3))["missing"]["why"] == "never"
        assert ask(rig, pages(0, 3) + pages(100, 3))["missing"]["why"] == "never"
        if not told:
            held = hold(rig, runner, shared[: 2 * P])  # a split above, and one more below
            other = rig.acquire(runner, shared + pages(200, 1))
            assert isinstance(other, LeaseModel)
            assert rig.index.stats().num_nodes == 4
            rig.release(runner, held)
            rig.release(runner, other)


def test_what_left_the_device_is_known_in_whatever_node_the_host_has_it() -> None:
    rig, runner = rig_of(8, 64)
    put(rig, runner, pages(0, 8))
    put(rig, runner, pages(100, 8))
    left_at = rig.index.now - ask(rig, pages(0, 8))["device_missing"]["left"]["ago_s"]
    assert rig.pin(runner, pages(0, 4), ROOT, "me", 1e9) == 16  # it splits the node
    entry = ask(rig, pages(0, 4) + pages(50, 2))["device_missing"]["left"]
    assert (entry["pages"], rig.index.now - entry["ago_s"]) == (8, left_at)
    rig.unpin(runner, "me")

    rig, runner = rig_of(8, 16)
    shared = pages(0, 2)
    put(rig, runner, shared + pages(100, 3))
    put(rig, runner, shared + pages(200, 3))
    put(rig, runner, pages(300, 8))  # all of these are on the host alone
    before = ask(rig, shared + pages(200, 3))["device_missing"]["left"]
    assert before["pages"] == 2
    left_at = rig.index.now - before["ago_s"]
    rig.cut()
    merges = rig.index.tree.num_merges
    rig.index.evict(HOST, 1)  # the first branch goes there, too, and what it hung on is joined to the other
    assert rig.index.tree.num_merges > merges
    facts = ask(rig, shared + pages(200, 3))
    assert facts["matched"]["host"] == 20
    assert rig.index.now - facts["device_missing"]["left"]["ago_s"] == left_at
    assert facts["device_missing"]["left"]["pages"] == 2


def test_nodes_that_are_joined_while_it_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explaining, "SLICE", 1)
    rig, runner = rig_of(24, events=False)
    shared = pages(0, 4)
    put(rig, runner, shared + pages(100, 3))
    put(rig, runner, pages(500, 1))
    for n in (200, 300):
        put(rig, runner, shared + pages(n, 3))
    put(rig, runner, pages(1000, 12))  # the first branch goes
    put(rig, runner, pages(2000, 2))  # and the page after it
    index = rig.index
    assert index.departures is not None
    assert [entry.num_pages for entry in index.departures.entries] == [3, 1]
    steps = explain(index, Question(pack(shared + pages(100, 3)), ROOT))
    next(steps)
    merges = index.tree.num_merges
    index.evict(DEVICE, index.pools[DEVICE].free + 3)  # one of two branches goes
    assert index.tree.num_merges > merges
    missing = finished(steps)["missing"]
    assert (missing["page"], missing["why"]) == (5, "left")


def test_a_window_that_is_gone_is_told_by_its_name() -> None:
    window = Companion(SlidingWindow(2), 8)
    world = Hybrid(page_size=1, num_pages=64, companions=(window,), departures=100)
    runner = world.open_session()

    def put(tokens: Iterable[int]) -> None:
        lease = world.acquire(runner, tokens)
        assert isinstance(lease, Lease), f"{lease!r}"
        world.commit(runner, lease)
        world.read_replies(runner)
        world.release(runner, lease)
        world.cut()

    put(range(6))
    put(range(100, 107))  # takes its window, and then it is of no use
    steps = explain(world.index, Question(pack(range(6)), ROOT))
    facts = finished(steps)
    assert facts["missing"]["left"][-1]["reason"] == "pruned"
    [entry] = facts["missing"]["companions"]
    assert (entry["resource"], entry["reason"], entry["for"]["what"]) == ("window", "evicted", "acquire")
    assert "  window was evicted from the device" in said(facts)
    assert facts["advice"] == []
