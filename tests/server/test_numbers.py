from __future__ import annotations

from pathlib import Path

import pytest

from sglcache.errors import ConfigError
from sglcache.server.numbers import Numbers


def test_the_first_number_is_the_clocks_microseconds(tmp_path: Path) -> None:
    assert Numbers(tmp_path / "state" / "rank-0.json", lambda: 1_000).first == 1_000


def test_a_clock_that_steps_back_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.json"
    highest = 0
    for clock in (5_000, 5_001, 4_000, 0, 10):
        numbers = Numbers(path, lambda clock=clock: clock, stride=100)  # type: ignore[misc]
        assert numbers.first > highest
        for seq in range(numbers.first, numbers.first + 250):  # a life that uses more than it bought at first
            if numbers.low(seq):
                numbers.reserve(seq)
            assert seq <= numbers.reserved
            highest = seq
        numbers.close()
    # and when the clock is right again, it is believed
    assert Numbers(path, lambda: 1 << 40, stride=100).first == 1 << 40


def test_a_file_that_was_lost_does_no_harm_while_the_supervisor_lives(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.json"
    numbers = Numbers(path, lambda: 5_000, stride=100)
    numbers.close()
    path.unlink()
    assert Numbers(path, lambda: 4_000, floor=numbers.reserved, stride=100).first == numbers.reserved + 1


def test_numbers_are_reserved_on_disk_before_they_are_used(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.json"
    numbers = Numbers(path, lambda: 1_000, stride=100)
    numbers.reserve(1_050)
    numbers.close()
    # Killed here: the next life begins above everything that this one may have used.
    assert Numbers(path, lambda: 0, stride=100).first > numbers.reserved == 1_150


def test_the_disk_is_written_once_in_half_a_stride(tmp_path: Path) -> None:
    numbers = Numbers(tmp_path / "rank-0.json", lambda: 1_000, stride=100)
    assert [seq for seq in range(1_000, 1_060) if numbers.low(seq)] == list(range(1_051, 1_060))


def test_a_second_process_is_refused_for_as_long_as_the_first_counts(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.json"
    one = Numbers(path, lambda: 1_000)
    with pytest.raises(ConfigError, match=r"another folder with state\.dir") as caught:
        Numbers(path, lambda: 1_000)
    assert caught.value.path == "state.dir"
    Numbers(tmp_path / "rank-1.json", lambda: 1_000).close()
    one.close()
    one.close()
    Numbers(path, lambda: 1_000).close()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"reserved": "7"}', '{"reserved": 7.5}', '{"reserved": true}'])
def test_a_file_that_says_nothing_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rank-0.json"
    path.write_text(text)
    for _ in range(2):  # the refused one holds nothing
        with pytest.raises(ConfigError, match="remove it"):
            Numbers(path, lambda: 1_000)
    assert path.read_text() == text


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="state file"):
        Numbers(tmp_path / "file" / "rank-0.json", lambda: 1_000)


@pytest.mark.parametrize("folder", ["/proc/x", "/dev/null"])
def test_a_folder_that_cannot_be_is_told_by_its_key_and_with_a_remedy(folder: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^state\.dir: the state file {folder}/a can't be written: .*; name a folder"
    ):
        Numbers(Path(folder) / "a", lambda: 1)
