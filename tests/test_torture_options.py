"""`sglcache torture` refuses options of which one says what the other may not, before it starts anything."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from sglcache.commands.torture import torture


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--replay", "FILE", "--seed", "3"], "does what its file says; leave --seed out"),
        (["--replay", "FILE", "--runners", "4", "--rate", "2"], "leave --runners, --rate out"),
        (["--kills", "5", "--operations", "4"], "--operations says when it ends; leave --kills out"),
        (["--seconds", "5", "--kills", "5", "--operations", "4"], "leave --seconds and --kills out"),
        (["--ranks", "3"], "--ranks 3: write DPxPP"),
        (["--ranks", "x3"], "--ranks x3: write DPxPP"),
    ],
)
def test_what_contradicts_is_refused(tmp_path: Path, options: list[str], told: str) -> None:
    options = [str(tmp_path / "none.json") if each == "FILE" else each for each in options]
    with pytest.raises(click.UsageError) as refused:
        torture.main(options, standalone_mode=False)
    assert told in refused.value.message
