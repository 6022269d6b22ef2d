"""What a torture does is a function of its seed, and can be done again from what it wrote down."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from sglcache.config import parse
from sglcache.errors import BadRequest
from sglcache.torture import daemon, faults, schedule
from sglcache.torture.schedule import Done
from sglcache.torture.work import NAMESPACES, Work, named

WEIGHTS = {"a": 1, "b": 2, "c": 3}


def first(seed: int, count: int = 60, rate: float = 2.0) -> list[schedule.Planned]:
    return list(islice(schedule.plan(seed, WEIGHTS, rate, 4), count))


def test_a_schedule_is_a_function_of_its_seed() -> None:
    assert first(1) == first(1)
    assert first(1) != first(2)
    assert [each.at for each in first(1)] == sorted(each.at for each in first(1))


def test_every_kind_comes_as_often_as_its_weight_says_in_every_round() -> None:
    kinds = [each.kind for each in first(3)]
    for start in range(0, 60, 6):
        assert sorted(kinds[start : start + 6]) == ["a", "b", "b", "c", "c", "c"]


def test_a_higher_rate_is_fewer_operations_between_two_faults() -> None:
    slow, fast = first(4, 200, 1.0), first(4, 200, 10.0)
    assert slow[-1].at == pytest.approx(10 * fast[-1].at, rel=0.01)


def test_what_was_done_can_be_read_again(tmp_path: Path) -> None:
    planned = first(5, 4)
    done = [Done(each, each.at + 3, 1.5, 0.25, "rank 0") for each in planned]
    path = tmp_path / "schedule.json"
    path.write_text(schedule.written({"seed": 5}, done))
    options, again = schedule.read(path)
    assert options == {"seed": 5}
    assert [(each.at, each.kind, each.seed) for each in again] == [(e.at + 3, e.kind, e.seed) for e in planned]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"options": {}, "faults": [{"at": 1}]}', json.dumps({"faults": 3})])
def test_what_is_no_schedule_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "schedule.json"
    path.write_text(text)
    with pytest.raises(BadRequest, match="is no schedule"):
        schedule.read(path)


def test_faults_are_chosen_by_name() -> None:
    known = tuple(WEIGHTS)
    assert schedule.chosen("all", known) == ["a", "b", "c"]
    assert schedule.chosen("all,-b", known) == ["a", "c"]
    assert schedule.chosen("c, a", known) == ["c", "a"]
    assert schedule.chosen("none", known) == []
    with pytest.raises(BadRequest, match="there is no fault 'd'; use all, none, or some of a, b, c"):
        schedule.chosen("d", known)


def test_every_fault_has_a_name_of_its_own_and_says_what_it_is() -> None:
    assert len(faults.BY_NAME) == len(faults.FAULTS)
    assert all(fault.__doc__ for fault in faults.FAULTS)


def test_prompts_are_a_function_of_the_seed_and_share_their_beginnings() -> None:
    def draw(seed: int) -> list[tuple[bytes, str]]:
        work, rng = Work(seed, page_size=8, pool_tokens=2048, share=9), random.Random(1)
        return [(prompt.tokens.tobytes(), prompt.session_id) for prompt in (work.draw(rng) for _ in range(100))]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    starts = [tokens[:64] for tokens, _ in draw(1)]
    assert len(set(starts)) < 60


def test_a_page_is_named_by_its_namespace_and_by_every_token_up_to_its_end() -> None:
    tokens = np.arange(64, dtype=np.uint32)
    names = named(tokens, {}, 8)
    assert all(len(set(names[at : at + 8])) == 1 for at in range(0, 64, 8))
    assert len(set(names)) == 8
    for namespace in NAMESPACES[1:]:
        assert not set(names) & set(named(tokens, namespace, 8))
    other = tokens.copy()
    other[0] += 1
    assert not set(names) & set(named(other, {}, 8))
    assert list(names[:32]) == list(named(tokens[:32], {}, 8))


@pytest.mark.parametrize("kind", daemon.KINDS)
def test_every_form_of_a_small_daemon_is_sound_and_keeps_to_its_folder(kind: str, tmp_path: Path) -> None:
    for seed in range(40):
        data = daemon.varied(kind, seed)
        assert data == daemon.varied(kind, seed)
        storage = "file" if kind == "hiradix" else None
        config = parse(daemon.at_home(data, tmp_path, storage))
        assert config.control.socket == tmp_path / "rank.sock"
        assert config.state.dir == tmp_path / "state"
        assert config.host.keep_path in (None, tmp_path / "kept")
        assert config.storage.path == (tmp_path / "store" if storage else None)
        assert not config.http.enabled
