"""Copies that race with what is written, split and evicted, while others work: cases A11 and A12."""

from __future__ import annotations

from pathlib import Path

import pytest
from load import P, Work, check, prompt, put, value_of

from sglcache.client import Client
from sglcache.client.mirror import Mirror
from sglcache.memory.rings import EventRing
from sglcache.testing import copies
from sglcache.testing.daemon import Daemon, until

pytestmark = pytest.mark.survive

ROUNDS = 500


class Late(EventRing):
    """Events of a runner whose kernel is still at it when the commit is sent."""

    def __init__(self) -> None:
        super().__init__(64)
        self.held: list[tuple[int, int]] = []

    def record_unrung(self) -> tuple[int, int]:
        event = self.reserve()
        self.held.append(event)
        return event

    def let_go(self) -> None:
        for event in self.held:
            self.complete(*event)
        self.held.clear()


def test_a11_what_is_written_after_the_commit_was_sent_is_what_the_host_has_while_others_copy(tmp_path: Path) -> None:
    """500 of 500: the copy begins after the runner's event, however busy the copy threads are."""
    events, pages = Late(), 4
    with Daemon(
        tmp_path,
        pool={"num_tokens": P * 64},
        host={"num_tokens": P * (pages * ROUNDS + 200)},
    ) as daemon:
        with daemon.client(ring=events) as client, Work(daemon.socket, clients=3, prompts=20):
            pool = client.pool.array
            for number in range(ROUNDS):
                lease = client.acquire(prompt(number + 10_000, pages), wait_s=10.0)
                assert lease.matched_tokens == 0
                pool[lease.slots] = 255  # what was there before the kernel was over
                pending = lease.commit_begin()
                assert client.peek(prompt(number + 10_000, pages))[:2] == (0, 0), "no tier has what is not written"
                for page, slot in enumerate(lease.slots):
                    pool[slot] = value_of(number + 10_000, page)
                events.let_go()
                pending.wait()
                lease.release()
                events.let_go()
        daemon.settle()
        from_host = 0
        with daemon.client() as client:
            for number in range(ROUNDS):
                lease = client.acquire(prompt(number + 10_000, pages))
                assert lease.matched_tokens == pages * P, f"prompt {number} is on no tier"
                from_host += lease.host_tokens > 0
                check(client, lease, number + 10_000)
                lease.release(wait=True)
        assert from_host > ROUNDS * 0.9


@pytest.mark.parametrize("below", [False, True], ids=["two tiers", "three tiers"])
def test_a12_a_prompt_that_is_cut_in_two_while_it_is_copied_loses_nothing_while_others_work(
    tmp_path: Path, below: bool
) -> None:
    """Both halves are backed, told of once with the right parents, found again, and nothing stays locked."""
    gate = tmp_path / "gate"
    sections = (
        {"storage": {"kind": "file", "path": str(tmp_path / "l3"), "size": "64 MB", "prefetch_threshold": 4}}
        if below
        else {}
    )
    with Daemon(
        tmp_path / "daemon",
        prelude=copies.gate(gate, "backup"),
        pool={"num_tokens": P * 96},
        host={"num_tokens": P * 400},
        **sections,
    ) as daemon:
        stream = daemon.status()["stream"]
        with Mirror(stream["endpoint"], stream["replay_endpoint"]) as mirror:
            gate.touch()
            with Work(daemon.socket, clients=2, prompts=10) as work, daemon.client() as client:
                for turn in range(20):
                    base = 20_000 + 2 * turn
                    gate.unlink()
                    put(client, base, 8, wait_s=10.0)
                    other = [*prompt(base, 4), *prompt(base + 1, 4)]
                    with client.acquire(other, wait_s=10.0) as lease:  # it splits what is being copied
                        assert lease.matched_tokens == 4 * P
                        write_other(client, lease.slots.tolist()[4:], base + 1)
                        lease.commit()
                    gate.touch()
                    before = sum(work.done)
                    until(lambda before=before: sum(work.done) > before + 20)  # type: ignore[misc]
                daemon.settle()
            until(lambda: not daemon.status(prove=False)["sessions"])
            status = daemon.settle()
            assert all(pool["locked"] == pool["fenced"] == pool["leased"] == 0 for pool in status["pools"])
            if below:
                until(lambda: daemon.status(prove=False)["third"]["num_pages"] == 20 * 12 + 10 * 2)
            with daemon.admin() as admin:

                def same() -> bool:
                    digest = admin.digest()
                    assert mirror.catch_up(digest["seq"], 10.0)
                    return mirror.check_digest(digest["seq"], digest["tiers"]) == []

                until(same)
                until(lambda: _cleared(admin, "DEVICE"))
                if below:
                    until(lambda: _cleared(admin, "HOST"))
        with daemon.client() as client:
            for turn in range(20):
                base = 20_000 + 2 * turn
                how = {"prefetch": "wait_complete"} if below else {}
                with client.acquire(prompt(base, 8), **how) as lease:
                    assert lease.matched_tokens == 8 * P
                    check(client, lease, base)
                with client.acquire([*prompt(base, 4), *prompt(base + 1, 4)], **how) as lease:
                    assert lease.matched_tokens == 8 * P
                    lease.wait_loaded()
                    for page, slot in enumerate(lease.slots.tolist()[4:]):
                        assert (client.pool.array[slot] == value_of(base + 1, page)).all()


def write_other(client: Client, slots: list[int], number: int) -> None:
    for page, slot in enumerate(slots):
        client.pool.array[slot] = value_of(number, page)


def _cleared(admin: Client, tier: str) -> bool:
    from sglcache.errors import Busy

    try:
        admin.clear(tier)
    except Busy:
        return False
    return True
