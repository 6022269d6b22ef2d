"""Tenants of an index: who pays, whose page goes, who is refused, and what floors promise where prefixes are shared."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from sglcache.core.index import Index, IndexConfig
from sglcache.core.limits import MAX_TENANTS, Limits
from sglcache.core.tiering import WritePolicy
from sglcache.errors import BadRequest, ConfigError, NoSpace
from sglcache.testing.model import DEVICE, HOST, LeaseModel
from sglcache.testing.programs import run
from sglcache.testing.rig import Rig, Runner

P = 4  # tokens in a page


def rig_of(num_pages: int = 16, host_pages: int = 0, **limits: Limits) -> tuple[Rig, Runner]:
    rig = Rig(page_size=P, num_pages=num_pages, host_pages=host_pages, tenants=limits)
    return rig, rig.open_session()


def pages(first: int, count: int) -> range:
    """So many pages of tokens that nobody else has."""
    return range(first, first + count * P)


def hold(rig: Rig, runner: Runner, tokens: Iterable[int], tenant: str | None) -> LeaseModel:
    lease = rig.acquire(runner, tokens, tenant=tenant)
    assert isinstance(lease, LeaseModel), f"{lease!r}"
    rig.commit(runner, lease)
    return lease


def put(rig: Rig, runner: Runner, tokens: Iterable[int], tenant: str | None) -> None:
    lease = hold(rig, runner, tokens, tenant)
    rig.read_replies(runner)
    rig.copies_done()
    rig.release(runner, lease)


def charged(rig: Rig, tenant: str, tier: int = DEVICE) -> int:
    (count,) = (each.charged for each in rig.index.stats().tenants if (each.tenant, each.tier) == (tenant, tier))
    return count


def told(rig: Rig, tenant: str, what: str, tier: int = DEVICE) -> int:
    (count,) = (getattr(each, what) for each in rig.index.stats().tenants if (each.tenant, each.tier) == (tenant, tier))
    assert isinstance(count, int)
    return count


def test_a_noisy_tenant_takes_no_page_of_a_quiet_one_that_is_at_its_floor() -> None:
    rig, runner = rig_of(quiet=Limits(device_floor=4))
    put(rig, runner, pages(0, 4), "quiet")
    for turn in range(100):
        put(rig, runner, pages(1000 + 100 * turn, 6), "noisy")
    assert rig.peek(pages(0, 4)) == (4 * P, 4 * P)
    assert charged(rig, "quiet") == 4
    assert told(rig, "quiet", "taken") == 0
    rig.settle()


def test_what_is_above_a_floor_goes_by_the_policy_and_to_the_page() -> None:
    rig, runner = rig_of(quiet=Limits(device_floor=4))
    put(rig, runner, pages(0, 10), "quiet")
    put(rig, runner, pages(1000, 10), "noisy")
    assert charged(rig, "quiet") == 4, "a run of pages goes as a whole, as far as it is spare"
    put(rig, runner, pages(2000, 12), "noisy")
    assert rig.peek(pages(0, 10)) == (4 * P, 4 * P), "the first of its pages, since leaves go first"
    assert (told(rig, "quiet", "taken"), told(rig, "quiet", "broken")) == (6, 0)
    rig.settle()


def test_without_floors_tenants_share_as_one() -> None:
    rig, runner = rig_of(a=Limits(), b=Limits())
    put(rig, runner, pages(0, 8), "a")
    put(rig, runner, pages(1000, 8), "b")
    put(rig, runner, pages(0, 8), "a")
    put(rig, runner, pages(2000, 8), None)
    assert rig.peek(pages(1000, 8)) == (0, 0), "it was used least recently"
    assert (charged(rig, "a"), charged(rig, "b"), charged(rig, "default")) == (8, 0, 8)
    rig.settle()


def test_a_tenant_at_its_ceiling_evicts_its_own_though_others_pages_are_older() -> None:
    rig, runner = rig_of(num_pages=32, small=Limits(device_ceiling=8))
    put(rig, runner, pages(0, 8), "other")
    put(rig, runner, pages(1000, 6), "small")
    put(rig, runner, pages(2000, 6), "small")
    assert charged(rig, "small") == 6
    assert rig.peek(pages(1000, 6)) == (0, 0)
    assert rig.peek(pages(0, 8)) == (8 * P, 8 * P)
    rig.settle()


def test_who_asks_for_more_than_its_ceiling_leaves_is_refused_with_its_numbers_and_nothing_changes() -> None:
    rig, runner = rig_of(num_pages=32, small=Limits(device_ceiling=8))
    lease = hold(rig, runner, pages(0, 5), "small")
    error = rig.acquire(runner, pages(1000, 4), tenant="small")
    assert isinstance(error, NoSpace)
    assert (error.tenant, error.ceiling, error.charged, error.tenant_locked, error.need) == ("small", 8, 5, 5, 4)
    assert error.resource == "full"
    assert "ceiling" in error.message
    never = rig.acquire(runner, pages(1000, 9), tenant="small")
    assert isinstance(never, NoSpace)
    assert "never" in never.message
    assert isinstance(rig.acquire(runner, pages(1000, 9), tenant="other"), LeaseModel)
    rig.release(runner, lease)
    assert isinstance(rig.acquire(runner, pages(3000, 8), tenant="small"), LeaseModel)
    rig.settle()


def test_floors_of_others_refuse_a_tenant_that_could_have_had_their_pages() -> None:
    rig, runner = rig_of(quiet=Limits(device_floor=6))
    put(rig, runner, pages(0, 6), "quiet")
    error = rig.acquire(runner, pages(1000, 11), tenant="noisy")
    assert isinstance(error, NoSpace)
    assert error.kept_by_floors == 6
    assert isinstance(rig.acquire(runner, pages(1000, 10), tenant="noisy"), LeaseModel)
    rig.settle()


def test_pages_that_hang_on_anothers_go_with_it_when_nothing_else_can() -> None:
    """The case that floors do not promise: they are counted, and no page goes that need not."""
    rig, runner = rig_of(quiet=Limits(device_floor=4), noisy=Limits())
    put(rig, runner, pages(0, 8), "noisy")
    put(rig, runner, [*pages(0, 8), *pages(500, 4)], "quiet")
    assert (charged(rig, "noisy"), charged(rig, "quiet")) == (8, 4)
    put(rig, runner, pages(2000, 4), "noisy")
    assert charged(rig, "quiet") == 4, "there were free pages"
    lease = hold(rig, runner, pages(3000, 8), "other")
    assert charged(rig, "quiet") == 0
    assert (told(rig, "quiet", "taken"), told(rig, "quiet", "broken")) == (4, 4)
    rig.release(runner, lease)
    rig.settle()


def test_a_closed_page_is_no_victim_while_a_leaf_of_somebody_can_go() -> None:
    rig, runner = rig_of(quiet=Limits(device_floor=4))
    put(rig, runner, pages(0, 2), "noisy")
    put(rig, runner, [*pages(0, 2), *pages(500, 4)], "quiet")
    for turn in range(20):
        put(rig, runner, pages(1000 + 100 * turn, 8), "other")
    assert rig.peek([*pages(0, 2), *pages(500, 4)]) == (6 * P, 6 * P)
    rig.settle()


def test_who_matches_anothers_pages_does_not_pay_for_them() -> None:
    rig, runner = rig_of(a=Limits(), b=Limits(device_ceiling=2))
    put(rig, runner, pages(0, 8), "a")
    lease = hold(rig, runner, [*pages(0, 8), *pages(500, 2)], "b")
    assert (charged(rig, "a"), charged(rig, "b")) == (8, 2)
    rig.release(runner, lease)
    rig.settle()


def test_a_tenant_that_is_not_configured_is_the_default_one() -> None:
    rig, runner = rig_of(default=Limits(device_ceiling=4), a=Limits())
    for turn in range(50):
        put(rig, runner, pages(100 * turn, 3), f"made up {turn}")
    assert [each.tenant for each in rig.index.stats().tenants] == ["default", "a"]
    assert charged(rig, "default") == 3
    rig.settle()


def test_a_ceiling_that_is_lowered_takes_what_nobody_holds_in_slices() -> None:
    rig = Rig(page_size=P, num_pages=64, tenants={"a": Limits()}, evict_slice=1)
    runner = rig.open_session()
    for turn in range(10):
        put(rig, runner, pages(100 * turn, 4), "a")
    lease = hold(rig, runner, pages(900, 4), "a")
    assert charged(rig, "a") == 40
    rig.set_tenant("a", device_ceiling=10)
    assert charged(rig, "a") == 40, "nothing of it in the command"
    assert rig.step()
    assert 10 < charged(rig, "a") < 40, "a slice"
    rig.steps()
    assert charged(rig, "a") == 8
    rig.set_tenant("a", device_ceiling=2)
    rig.steps()
    assert charged(rig, "a") == 4, "what a lease holds stays"
    rig.release(runner, lease)
    rig.steps()
    assert charged(rig, "a") == 0, "until that lets go of it"
    rig.settle()


def test_who_waits_goes_on_when_its_ceiling_is_raised() -> None:
    """Its own pages are locked by a copy; the end of that would serve it, too."""
    rig = Rig(page_size=P, num_pages=32, host_pages=32, tenants={"a": Limits(device_ceiling=8)})
    runner = rig.open_session()
    lease = hold(rig, runner, pages(0, 8), "a")
    rig.release(runner, lease)
    assert rig.acquire(runner, pages(1000, 4), tenant="a") is None
    rig.set_tenant("a", device_ceiling=12)
    rig.steps()
    assert not rig.waiting
    rig.settle()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("a", {"device_floor": 9}),
        ("new", {"device_floor": 9}),
        ("a", {"device_ceiling": 7}),
        ("a", {"host_floor": 3, "host_ceiling": 2}),
        ("a", {"host_floor": -1}),
    ],
)
def test_limits_that_can_not_be_are_refused_and_nothing_changes(name: str, changes: dict[str, int]) -> None:
    rig = Rig(
        page_size=P, num_pages=16, host_pages=8, tenants={"a": Limits(device_floor=8), "b": Limits(device_floor=8)}
    )
    before = rig.index.stats().tenants
    error = rig.set_tenant(name, **changes)
    assert isinstance(error, BadRequest)
    assert rig.index.stats().tenants == before
    rig.settle()


def test_a_configuration_whose_floors_are_more_than_there_is_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="add up to 17 pages, and there are 16"):
        rig_of(a=Limits(device_floor=9), b=Limits(device_floor=8))
    with pytest.raises(ConfigError, match="ceiling on DEVICE, 3 pages, is below its floor, 4"):
        rig_of(a=Limits(device_floor=4, device_ceiling=3))


def test_there_are_so_many_tenants_and_no_more() -> None:
    index = Index(
        IndexConfig(page_size=P, num_pages=16, tenants={str(number): Limits() for number in range(MAX_TENANTS - 1)})
    )
    with pytest.raises(BadRequest, match="there can be 64"):
        index.set_tenant("one more", {})
    index.set_tenant("7", {"device_ceiling": 3})


def test_without_tenants_a_limit_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"\[tenants\]"):
        Index(IndexConfig(page_size=P, num_pages=16)).set_tenant("a", {"device_ceiling": 3})


# -- the host ----------------------------------------------------------------------------------------------------


def test_on_the_host_a_tenant_at_its_ceiling_evicts_its_own_and_the_rest_is_skipped_and_counted() -> None:
    rig, runner = rig_of(64, 64, small=Limits(host_ceiling=4))
    put(rig, runner, pages(0, 4), "other")
    put(rig, runner, pages(1000, 4), "small")
    assert (charged(rig, "small", HOST), charged(rig, "default", HOST)) == (4, 4)
    put(rig, runner, pages(2000, 3), "small")
    assert charged(rig, "small", HOST) == 3, "its own went"
    lease = hold(rig, runner, pages(2000, 3), "small")
    put(rig, runner, pages(3000, 2), "small")
    assert charged(rig, "small", HOST) == 3
    assert told(rig, "small", "skipped", HOST) == 2
    rig.release(runner, lease)
    rig.steps()
    rig.copies_done()
    assert rig.peek(pages(3000, 2)) == (2 * P, 2 * P)
    assert charged(rig, "small", HOST) == 2, "it was tried again"
    rig.settle()


def test_on_the_host_floors_hold() -> None:
    rig, runner = rig_of(16, 12, quiet=Limits(host_floor=4))
    put(rig, runner, pages(0, 4), "quiet")
    for turn in range(30):
        put(rig, runner, pages(1000 + 100 * turn, 6), "noisy")
    assert charged(rig, "quiet", HOST) == 4
    assert rig.peek(pages(0, 4)) == (0, 4 * P)
    rig.settle()


def test_a_load_back_is_charged_to_whose_request_it_is() -> None:
    rig, runner = rig_of(8, 64, a=Limits(), b=Limits())
    put(rig, runner, pages(0, 4), "a")
    put(rig, runner, pages(1000, 8), "a")
    assert rig.peek(pages(0, 4)) == (0, 4 * P)
    lease = rig.acquire(runner, pages(0, 4), tenant="b")
    assert isinstance(lease, LeaseModel)
    rig.copies_done()
    assert (charged(rig, "b"), charged(rig, "b", HOST), charged(rig, "a", HOST)) == (4, 0, 12)
    rig.release(runner, lease)
    rig.settle()


def test_a_path_that_several_pay_for_goes_to_the_host_by_a_copy_for_each() -> None:
    rig, runner = rig_of(16, 16, a=Limits(host_ceiling=0), b=Limits())
    put(rig, runner, pages(0, 2), "a")
    put(rig, runner, [*pages(0, 2), *pages(500, 2)], "b")
    assert not rig.copies, "a's pages may not, so what hangs on them can't"
    rig.set_tenant("a", host_ceiling=2)
    rig.steps()
    rig.copies_done()
    assert [len(copy.dst_slots) // 4 for copy in rig.copies] == [2, 2]
    assert (charged(rig, "a", HOST), charged(rig, "b", HOST)) == (2, 2)
    rig.settle()


def test_pages_that_leave_with_a_copy_keep_no_floor() -> None:
    """Under write_back they are there until it is over; the floor is of those that stay."""
    rig = Rig(
        page_size=P,
        num_pages=16,
        host_pages=64,
        write_policy=WritePolicy("write_back"),
        tenants={"quiet": Limits(device_floor=4)},
    )
    runner = rig.open_session()
    put(rig, runner, pages(0, 4), "quiet")
    put(rig, runner, pages(1000, 4), "quiet")
    assert rig.acquire(runner, pages(2000, 10), tenant="noisy") is None
    rig.steps()
    assert isinstance(rig.acquire(runner, pages(3000, 5), tenant="noisy"), NoSpace)
    rig.copies_done()
    rig.steps()
    assert charged(rig, "quiet") >= 4
    rig.settle()


# -- any program -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fixed", [{"num_pages": 10}, {"num_pages": 8, "page_size": 1, "l3": None}], ids=["any", "tight"]
)
def test_any_program_of_several_tenants(fixed: dict[str, int]) -> None:
    for seed in range(12):
        try:
            run(seed, tenants="any", **fixed)
        except Exception as exc:
            exc.add_note(f"sglcache.testing.programs.run({seed}, tenants='any', **{fixed})")
            raise
