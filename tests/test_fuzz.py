"""A little of `make survive`'s bad input for every decoder, and the driver itself: it must notice each way to break."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from sglcache.errors import ProtocolError
from sglcache.fuzzing.decoders import DECODERS
from sglcache.testing import fuzz

INPUTS = 120


@pytest.mark.parametrize("decoder", DECODERS, ids=lambda decoder: decoder.name)
def test_bad_input_is_taken_or_refused(decoder: type[fuzz.Decoder]) -> None:
    report = fuzz.run(decoder, max(4, int(INPUTS * min(1.0, decoder.weight))), seed=1)
    assert report.inputs


def test_every_decoder_is_in_the_table_of_the_threat_model() -> None:
    text = (Path(__file__).parents[1] / "docs" / "security.md").read_text()
    for decoder in DECODERS:
        assert f"`{decoder.name}`" in text, f"docs/security.md has no row for {decoder.name}"


class Sloppy(fuzz.Decoder):
    """It breaks the law at the first input, in a way of its own."""

    name = "sloppy"

    def __init__(self, how: str) -> None:
        super().__init__()
        self.corpus = [b"word"]
        self.how = how
        self.kept: list[object] = []

    def feed(self, data: bytes) -> None:
        match self.how:
            case "raises":
                raise KeyError("field")
            case "hangs":
                while True:
                    pass
            case "grows":
                if self.kept:  # fresh memory: an allocator may keep as much of what others gave back
                    taken = mmap.mmap(-1, fuzz.MAX_GROWTH + (64 << 20))
                    taken.write(bytes([1]) * len(taken))
                    self.kept.append(taken)
                self.kept.append(data)
            case "leaks":
                os.dup(0)
            case "refuses":
                raise ProtocolError("no")

    def check(self) -> None:
        assert self.how != "changes", "something else"


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("raises", "KeyError"),
        ("hangs", "still at it"),
        ("grows", "bytes were taken"),
        ("leaks", "descriptors more"),
        ("changes", "something else"),
    ],
)
def test_a_decoder_that_breaks_the_law_is_told_of_with_how_to_have_it_again(
    monkeypatch: pytest.MonkeyPatch, how: str, why: str
) -> None:
    if how == "hangs":
        monkeypatch.setattr(fuzz, "LIMIT_S", 0.2)
    monkeypatch.setattr(fuzz, "MAX_GROWTH", 16 << 20)
    before = os.dup(0)
    os.close(before)
    with pytest.raises(fuzz.Broken, match=why) as caught:
        fuzz.run(lambda: Sloppy(how), 2, seed=5)
    if how == "leaks":
        os.closerange(before, before + 2)  # the first numbers that were free
    assert "--decoder sloppy --seed 5 --first" in str(caught.value)


def test_one_that_refuses_is_fine_and_inputs_are_the_same_each_time() -> None:
    assert fuzz.run(lambda: Sloppy("refuses"), 5, seed=1).refused == 5
    one, other = (fuzz.Mutator(3, [b"some words", b"others"]) for _ in range(2))
    inputs = [one.input(number) for number in range(50)]
    assert [other.input(number) for number in reversed(range(50))] == inputs[::-1]
    assert len(set(inputs)) > 40
