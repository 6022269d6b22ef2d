"""A runner of a hybrid model: windows and states in its leases, over the socket, in pages that are really there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from sglcache.client import Client, Lease, acquire_alike
from sglcache.errors import BadRequest, NoSpace
from sglcache.memory.rings import EventRing
from sglcache.testing.daemon import Daemon, Puppet, until
from sglcache.wire import control

PAGE = 4
WINDOW = 8  # tokens: two pages
TOKENS = list(range(100, 164))  # 16 pages
STATES = [{"name": "conv", "shape": [4, 3], "dtype": "float16"}, {"name": "ssm", "shape": [2, 5], "dtype": "float32"}]
SECTIONS: dict[str, Any] = {
    "pool": {"num_tokens": 256 * PAGE},
    "window": {"size": WINDOW, "num_layers": 3, "num_tokens": 48 * PAGE},
    "mamba": {"num_layers": 2, "states": STATES, "num_slots": 8, "interval": 16},
}


@pytest.fixture
def daemon(lend: Callable[..., Daemon]) -> Daemon:
    return lend(**SECTIONS)


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with daemon.client() as client:
        yield client


class Held(EventRing):
    """A runner's events, each done when the test says so."""

    def __init__(self) -> None:
        super().__init__(64)
        self.held: list[tuple[int, int]] = []

    def record_unrung(self) -> tuple[int, int]:
        self.held.append(self.reserve())
        return self.held[-1]

    def let_go(self) -> None:
        self.complete(*self.held.pop(0))


def window_of(lease: Lease) -> tuple[int, list[int]]:
    assert lease.window is not None
    return lease.window.first_page, lease.window.slots.tolist()


def own(lease: Lease) -> list[int]:
    assert lease.mamba is not None
    return lease.mamba.slots.tolist()


def source(lease: Lease) -> int | None:
    assert lease.mamba is not None
    return lease.mamba.source


def mark(client: Client, slot: int, value: float) -> None:
    """The whole state in a slot."""
    assert client.mamba is not None
    for layers in client.mamba.states.values():
        for layer in layers:
            layer[slot] = value


def marked(client: Client, slot: int) -> set[float]:
    assert client.mamba is not None
    return {float(each) for layers in client.mamba.states.values() for layer in layers for each in layer[slot].ravel()}


def compute(client: Client, tokens: Sequence[int], *ends: int) -> None:
    """Have a prompt cached, and its states at these ends, each marked with its length."""
    with client.acquire(tokens, states=len(ends)) as lease:
        pairs = list(zip(ends, own(lease), strict=True))
        for end, slot in pairs:
            mark(client, slot, end)
        lease.commit(states=pairs)


def free(daemon: Daemon) -> dict[tuple[str, str], int]:
    """By resource and tier."""
    return {(pool["resource"], pool["tier"]): pool["free"] for pool in daemon.settle()["pools"]}


def test_a_lease_has_a_window_of_its_table_and_states_of_its_own(client: Client) -> None:
    assert client.companions == ("window", "mamba")
    with client.acquire(TOKENS, states=2) as lease:
        first, slots = window_of(lease)
        assert (first, len(slots), len(set(slots))) == (0, 16, 16)
        assert len(set(own(lease))) == 2
        assert (source(lease), lease.reaches, lease.matched_tokens) == (None, (0, 0, 0), 0)
        lease.extend([7] * PAGE, reserve=PAGE, states=1)
        assert len(lease.slots) == len(window_of(lease)[1]) == 18
        assert len(set(own(lease))) == 3
        assert window_of(lease)[1][:16] == slots


def test_after_a_commit_the_lease_has_the_windows_last_pages_and_what_lies_beyond(client: Client) -> None:
    with client.acquire(TOKENS, states=1) as lease:
        _, slots = window_of(lease)
        lease.commit(32)
        assert window_of(lease) == (6, slots[6:])
        assert lease.window is not None
        assert lease.window.table.tolist() == [-1] * 6 + slots[6:]
        lease.commit()
        assert window_of(lease) == (14, slots[14:])


def test_a_match_ends_where_a_state_is_and_names_it(client: Client) -> None:
    compute(client, TOKENS, 32, 64)
    longer = [*TOKENS, 1, 2, 3]
    assert client.peek(longer) == (64, 64, (64, 64, 64))
    assert client.peek(TOKENS[:48]) == (32, 32, (48, 48, 32))
    with client.acquire(longer) as lease:
        slot = source(lease)
        assert (lease.matched_tokens, lease.reaches, own(lease)) == (64, (64, 64, 64), [])
        assert slot is not None
        assert marked(client, slot) == {64.0}
        assert window_of(lease)[0] == 14
    with client.acquire(TOKENS[:48], states=1) as lease:
        slot = source(lease)
        assert (lease.matched_tokens, lease.reaches) == (32, (48, 48, 32))
        assert slot is not None
        assert marked(client, slot) == {32.0}
        assert slot not in own(lease), "what is read is not what is written"
        # The branch point: where full KV goes on and no state is.
        mark(client, own(lease)[0], 48)
        lease.commit(states=[(lease.reaches[0], own(lease)[0])])
        assert (own(lease), source(lease)) == ([], None)
    assert client.peek(TOKENS[:50]).matched_tokens == 48


def test_what_a_window_lacks_is_no_match_though_full_kv_has_it(client: Client) -> None:
    with client.acquire(TOKENS, states=1) as lease:
        lease.commit(64, states=[(64, own(lease)[0])], floor=56)
    assert client.peek(TOKENS).reaches == (64, 64, 64)
    assert client.peek(TOKENS[:60]).reaches == (60, 0, 0), "given up before it was committed"


def test_a_state_that_another_has_committed_before_stays_the_leases(client: Client) -> None:
    """So it may be written and used again."""
    with client.acquire(TOKENS, states=2) as late:
        compute(client, TOKENS, 64)
        first, second = own(late)
        late.commit(states=[(64, first)])
        assert own(late) == [first, second]
        late.extend([5] * 4)
        late.commit(states=[(68, first)])
        assert own(late) == [second]


def test_commits_are_taken_in_in_their_order_whatever_is_waited_for_first(daemon: Daemon) -> None:
    ring = Held()
    with daemon.client(ring=ring) as client:
        lease = client.acquire(TOKENS, states=2)
        with daemon.client() as other:
            compute(other, TOKENS[:32], 32)
            better = other.acquire(TOKENS[:33])
            first = lease.commit_begin(32)
            second = lease.commit_begin(48, states=[(48, own(lease)[0])])
            more = lease.extend_begin([9] * 4, states=1)
            more.wait()
            slots, states = window_of(lease)[1], own(lease)
            assert (len(slots), len(states)) == (17, 3)
            ring.let_go()
            ring.let_go()
            second.wait()
            assert window_of(lease) == (10, slots[10:])
            assert own(lease) == states[1:]
            first.wait()
            assert window_of(lease) == (10, slots[10:])
            assert lease.slots[:8].tolist() == better.slots[:8].tolist()
            better.release()
        lease.release()
        ring.let_go()


def test_a_window_page_that_another_committed_before_is_read_from_there(client: Client) -> None:
    with client.acquire(TOKENS[:32], states=1) as late:
        compute(client, TOKENS[:32], 32)
        with client.acquire([*TOKENS[:32], 1]) as there:
            late.commit()
            assert window_of(late) == (6, window_of(there)[1][:2])


def test_bytes_of_every_resource_come_back_from_the_host(daemon: Daemon, client: Client) -> None:
    assert client.window is not None
    with client.acquire(TOKENS, states=1) as lease:
        client.pool.k[0][lease.slots] = 3
        for layer in client.window.v:
            layer[window_of(lease)[1]] = 5
        mark(client, own(lease)[0], 7)
        lease.commit(states=[(64, own(lease)[0])])
    daemon.settle()
    client.clear("DEVICE")
    until(lambda: client.peek(TOKENS).device_tokens == 0)
    for pages in (client.pool.k[0], *client.window.v):
        pages[:] = 0
    for slot in range(8):
        mark(client, slot, 0)
    with client.acquire([*TOKENS, 1]) as lease:
        assert (lease.matched_tokens, lease.host_tokens) == (64, 64)
        lease.wait_loaded()
        slot = source(lease)
        assert slot is not None
        assert marked(client, slot) == {7.0}
        first, slots = window_of(lease)
        assert first == 14
        for layer in client.window.v:
            assert (layer[slots[:2]] == 5).all()
        assert (client.pool.k[0][lease.slots[:16]] == 3).all()


@pytest.mark.parametrize(
    ("resource", "ask"),
    [
        ("window", lambda client: client.acquire(range(49 * PAGE))),
        ("mamba", lambda client: client.acquire(TOKENS, states=9)),
    ],
)
def test_no_space_says_of_which_resource_and_nothing_was_taken(
    daemon: Daemon, client: Client, resource: str, ask: Callable[[Client], Lease]
) -> None:
    before = free(daemon)
    with pytest.raises(NoSpace) as caught:
        ask(client)
    assert caught.value.resource == resource
    assert free(daemon) == before


def test_a_long_prompt_goes_through_a_small_window_chunk_by_chunk(daemon: Daemon, client: Client) -> None:
    prompt = list(range(200 * PAGE))
    with client.acquire(prompt, room=32 * PAGE, states=1) as lease:
        for stop in range(32 * PAGE, len(prompt) + 1, 8 * PAGE):
            lease.extend(upto=stop, states=1 - len(own(lease)))
            assert len(lease.window.table) == len(lease.slots) == stop // PAGE  # type: ignore[union-attr]
            mark(client, own(lease)[0], stop)
            lease.commit(stop, states=[(stop, own(lease)[0])])
    assert client.peek(prompt).matched_tokens == len(prompt)
    assert daemon.settle()["gauges"]["num_leases"] == 0


def test_what_an_extend_lacks_is_its_own_result_and_others_go_on(client: Client) -> None:
    with client.acquire(TOKENS, states=1) as one, client.acquire([7, *TOKENS], states=1) as other:
        refused, done = client.extend([(one, (), 0, None, 8), (other, [5] * 4, 0, None, 2)])
        assert isinstance(refused, NoSpace)
        assert (refused.resource, done) == ("mamba", None)
        assert (len(own(one)), len(own(other)), len(other.tokens)) == (1, 3, 69)
        assert len(window_of(one)[1]) == 16


@pytest.mark.parametrize(
    ("tokens", "slot"),
    [(30, 0), (0, 0), (68, 0), (32, -1), (32, 1)],
    ids=["within a page", "nothing", "beyond the commit", "no slot", "another's"],
)
def test_a_state_that_can_not_be_is_refused_and_nothing_is_committed(client: Client, tokens: int, slot: int) -> None:
    with client.acquire(TOKENS, states=1) as lease, client.acquire(TOKENS, states=1) as other:
        slots = {0: own(lease)[0], 1: own(other)[0], -1: 1 << 20}
        with pytest.raises(BadRequest):
            lease.commit(states=[(tokens, slots[slot])])
        assert client.peek(TOKENS).matched_tokens == 0
        lease.commit(states=[(64, slots[0])])


def test_counts_of_companions_that_are_none_are_refused_and_the_connection_goes_on(client: Client) -> None:
    connection = client._connection
    with client.acquire(TOKENS, states=1) as lease:
        commands = [
            lambda number: control.Acquire(number, bytes(64), spare=(0, 1, 1)),
            lambda number: control.Commit(number, lease.id, 90, 0, ends=((0, 64, 0),)),
            lambda number: control.Commit(number, lease.id, 90, 0, ends=((2, 64, 0),)),
        ]
        for command in commands:
            with connection.lock:
                sent = command(connection.number())
                connection.send(sent)
                with pytest.raises(BadRequest):
                    connection.wait(sent.request)
        with connection.lock:
            extend = control.Extend(connection.number(), [control.Extension(lease.id, spare=(0, 0, 0, 1))])
            connection.send(extend)
            answer = connection.wait(extend.request)
        assert isinstance(answer, control.Extended)
        assert isinstance(answer.results[0], control.Fault)
        assert answer.results[0].code == "bad_request"


def test_who_dies_gives_back_windows_and_states(daemon: Daemon) -> None:
    before = free(daemon)
    with Puppet(daemon.socket) as puppet:
        puppet.do(f"cache = Client(socket); lease = cache.acquire(range(40), states=3); keep = cache.acquire({TOKENS})")
        taken = free(daemon)
        assert before["mamba", "DEVICE"] - taken["mamba", "DEVICE"] == 3
        assert before["window", "DEVICE"] - taken["window", "DEVICE"] == 26
    until(lambda: free(daemon) == before)


def test_workers_are_told_by_their_scheduler_of_both(daemon: Daemon) -> None:
    with daemon.client(role="scheduler") as scheduler, daemon.worker(scheduler.token, 0) as worker:
        lease = scheduler.acquire(TOKENS, states=1)
        assert worker.mamba is not None
        assert worker.window is not None
        worker.mamba.states["ssm"][1][own(lease)[0]] = 4
        worker.window.k[2][window_of(lease)[1]] = 6
        pending = lease.commit_begin(states=[(64, own(lease)[0])])
        worker.record(pending.ticket)
        pending.wait()
        assert own(lease) == []
        end = lease.release_begin()
        worker.record(end.ticket)
        end.wait()
        again = scheduler.acquire([*TOKENS, 1])
        slot = source(again)
        assert slot is not None
        assert float(worker.mamba.states["ssm"][1][slot].sum()) == 40
        again.cancel()


def test_a_status_counts_each_resource(daemon: Daemon, client: Client) -> None:
    before = daemon.settle()["counters"]
    compute(client, TOKENS, 32, 64)
    status = daemon.settle()
    pools = {(pool["resource"], pool["tier"]): pool for pool in status["pools"]}
    assert {key: pool["cached"] for key, pool in pools.items()} == {
        ("full", "DEVICE"): 16,
        ("full", "HOST"): 16,
        ("window", "DEVICE"): 16,
        ("window", "HOST"): 16,
        ("mamba", "DEVICE"): 2,
        ("mamba", "HOST"): 2,
    }
    moved = {key: status["counters"][key] - before[key] for key in before}
    assert (moved["window_committed_slots"], moved["mamba_committed_slots"]) == (16, 2)
    assert (moved["window_backup_slots"], moved["mamba_backup_slots"]) == (16, 2)


# -- stages -------------------------------------------------------------------------------------------------


def test_stages_with_states_at_different_depths_agree_on_one_that_all_have(lend: Callable[..., Daemon]) -> None:
    """What is shorter than a stage's match need not be one there: each is asked again."""
    without = {**SECTIONS, "pool": {"num_tokens": 192 * PAGE}}
    plain = {"pool": {"num_tokens": 128 * PAGE}}
    with ExitStack() as stack:
        one, other, last = stages = [
            stack.enter_context(lend(**sections).client()) for sections in (SECTIONS, without, plain)
        ]
        compute(one, TOKENS, 16, 40, 56)
        compute(other, TOKENS, 16, 32, 48, 64)
        with last.acquire(TOKENS) as lease:
            lease.commit()
        leases = acquire_alike(stages, [*TOKENS, 1], states=1, tries=1)
        assert [lease.matched_tokens for lease in leases] == [16, 16, 16]
        assert [None if lease.mamba is None else len(own(lease)) for lease in leases] == [1, 1, None]
        for lease in leases:
            lease.release(wait=True)
        with pytest.raises(BadRequest, match="states"):
            acquire_alike([last], TOKENS, states=1)


def test_values_in_a_window_are_of_the_pages_that_the_lease_says(client: Client) -> None:
    """Slots of a window are numbers of its own pool."""
    assert client.window is not None
    with client.acquire(TOKENS[:8]), client.acquire(TOKENS, states=1) as lease:
        client.window.k[0][window_of(lease)[1]] = 2
        lease.commit(states=[(64, own(lease)[0])])
    with client.acquire([*TOKENS, 1]) as again:
        first, slots = window_of(again)
        assert np.asarray(client.window.k[0][slots[: 16 - first]]).min() == 2
