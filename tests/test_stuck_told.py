"""What the commands say of a rank that gives no sign of life."""

from __future__ import annotations

import pytest

from sglcache.cli import _show_ranks
from sglcache.commands.sessions import _silent

ROW = {"rank": 3, "dp_rank": 3, "pp_rank": 0, "pid": 4711, "restarts": 0, "silent_s": 12.3}
POOLS = [{"tier": tier, "resource": "full", "cached": 0, "total": 64} for tier in ("DEVICE", "HOST")]


@pytest.mark.parametrize(("state", "shares"), [("stuck", 0), ("ok", 2)])
def test_status_says_nothing_of_pools_that_a_rank_could_not_be_asked_of(
    capsys: pytest.CaptureFixture[str], state: str, shares: int
) -> None:
    _show_ranks([{**ROW, "state": state, "pools": POOLS}])
    assert capsys.readouterr().out.count("0 %") == shares


def test_sessions_names_the_rank_its_process_and_what_to_do() -> None:
    told = _silent({**ROW, "state": "stuck"})
    assert told.startswith("rank 3 (pid 4711) is stuck")
    assert "no sign of life for 12.3 s" in told
    assert "kill -CONT 4711" in told
    assert "kill -9 4711" in told
    assert "sglcache status" in _silent({**ROW, "state": "waiting"})
