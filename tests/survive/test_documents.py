"""What docs/integrate.md says of a daemon that dies is what a runner can copy: it goes on, and says the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sglcache.testing.daemon import Daemon

pytestmark = pytest.mark.survive

PAGE = Path(__file__).parents[2] / "docs" / "integrate.md"
POOL = {"page_size": 16, "num_tokens": 4096, "num_layers": 2, "num_kv_heads": 1, "head_dim": 32, "dtype": "float16"}
PROMPTS = [list((f"A long text that many questions share. {number}" * 3).encode()) for number in range(3)]


def test_the_pages_loop_outlives_its_daemon_between_prompts_and_amid_one(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    sources = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    [loop] = [source for source in sources if "DaemonRestarted" in source]
    scope: dict[str, Any] = {"__name__": "a runner"}
    exec(sources[0], scope)
    exec(loop, scope)
    forward, steps, deaths = scope["ToyModel"].forward, 0, {3, 12, 30}
    with Daemon(tmp_path, timing={"first_wait": 0.01, "longest_wait": 0.01}, pool=POOL) as daemon:

        def dying(*arguments: Any) -> int:
            nonlocal steps
            steps += 1
            if steps in deaths:
                daemon.next_life(daemon.kill_rank())
            word: int = forward(*arguments)
            return word

        with daemon.client() as cache:
            want = [answer for answer, _ in scope["answers"](cache, PROMPTS, num_new=8)]
        scope["ToyModel"].forward = dying
        with daemon.client() as cache:
            epoch, told = cache.epoch, []
            for answer, _ in scope["answers"](cache, PROMPTS, num_new=8):
                told.append(answer)
                daemon.next_life(daemon.kill_rank())
            assert told == want
            assert steps > 3 * 8, "some of it was computed again"
            assert cache.epoch > epoch
        assert daemon.settle()["gauges"]["num_leases"] == 0
