"""The kernels' source, what is loaded of them, and how they are called, say the same."""

from __future__ import annotations

import re
from pathlib import Path

from sglcache.testing import card

HERE = Path(card.__file__).parent


def test_the_source_has_the_kernels_as_they_are_called() -> None:
    source = re.sub(r"//.*", "", (HERE / "kernels.cu").read_text())
    kernels = re.findall(r'extern "C" __global__ void (\w+)\(([^)]*)\)', source)
    found = {name: tuple(" ".join(each.split()) for each in parameters.split(",")) for name, parameters in kernels}
    assert found == dict(card.KERNELS)


def test_what_is_loaded_was_made_from_that_source() -> None:
    text = (HERE / "kernels.ptx").read_text()
    found = {
        name: len(re.findall(r"\.param \.u64 (?:\.ptr \S+ \S+ )?(\w+)", parameters))
        for name, parameters in re.findall(r"\.visible \.entry (\w+)\(([^)]*)\)", text)
    }
    assert found == {name: len(parameters) for name, parameters in card.KERNELS.items()}
    assert text.count(".param") - text.count("ld.param") == sum(found.values()), "a parameter that is not of 8 bytes"


def test_any_driver_since_cuda_11_compiles_it() -> None:
    text = (HERE / "kernels.ptx").read_text()
    assert re.findall(r"^\.version (.*)$", text, re.MULTILINE) == ["7.0"]
    assert re.findall(r"^\.target (.*)$", text, re.MULTILINE) == ["sm_80"]
