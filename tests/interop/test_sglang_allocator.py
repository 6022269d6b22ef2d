"""Our token-to-KV allocator beside SGLang's own, of the versions that `make interop` fetched: the same slots and lists.

Its modules are taken from the wheel alone. Where it would launch a kernel, the same module's function for devices
without one is called.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from consumers import PYTHON
from torch import Tensor

from sglcache.testing.allocator import run, tensor

pytestmark = pytest.mark.interop

FOLDER = PYTHON.parents[1] / "sglang"  # MODULE-VERSION.py, as scripts/interop.sh lays them out
PACKAGE = "sglang.srt.mem_cache.allocator"


class Kernel:
    """Launched as `kernel[grid](...)`."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.function


@pytest.fixture(params=["0.5.19", "0.5.23"])
def sglang(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Its two allocators, of that version."""
    version = request.param
    source = {name: FOLDER / f"{name}-{version}.py" for name in ("base", "token", "paged")}
    if not all(map(Path.exists, source.values())):
        pytest.skip(f"SGLang {version} was not to be had when {FOLDER.parent} was made")

    def extend(prefix: Tensor, seq: Tensor, last: Tensor, free: Tensor, out: Tensor, _: int, page_size: int) -> None:
        if new_pages(seq_lens=seq, prefix_lens=prefix, page_size=page_size) <= len(free):  # else nobody reads `out`
            paged.alloc_extend_naive(prefix, seq, last, free, out, page_size, "cpu")

    def decode(seq: Tensor, last: Tensor, free: Tensor, out: Tensor, _: int, page_size: int) -> None:
        extend(seq - 1, seq, last, free, out, _, page_size)

    stand_ins: dict[str, dict[str, Any]] = {
        "sglang.kernels.ops.memory.allocator": {
            "alloc_extend_kernel": Kernel(extend),
            "alloc_decode_kernel": Kernel(decode),
        },
        "sglang.srt.platforms": {
            "current_platform": SimpleNamespace(capabilities=SimpleNamespace(supports_triton=False))
        },
        "sglang.srt.utils": {
            # Its debug mode: it looks at itself; that of 0.5.19 also at what a shortage left unwritten.
            "get_bool_env_var": lambda name: version != "0.5.19",
            "get_num_new_pages": new_pages,
            "is_hip": lambda: False,
            "next_power_of_2": lambda number: number,
        },
        PACKAGE: {},
    }
    for name, attributes in stand_ins.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            module = ".".join(parts[:depth])
            monkeypatch.setitem(sys.modules, module, ModuleType(module))
        vars(sys.modules[name]).update(attributes)

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"{PACKAGE}.{name}", source[name])
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    load("base")
    token, paged = load("token"), load("paged")
    return SimpleNamespace(
        token=token.TokenToKVPoolAllocator, paged=paged.PagedTokenToKVPoolAllocator, whole=version != "0.5.19"
    )


def new_pages(*, seq_lens: Tensor, page_size: int, prefix_lens: Tensor | None = None, decode: bool = False) -> int:
    prefix = seq_lens - 1 if prefix_lens is None else prefix_lens
    assert decode == (prefix_lens is None)
    return int(((seq_lens + page_size - 1) // page_size - (prefix + page_size - 1) // page_size).sum())


class Original:
    """SGLang's, to be driven as ours is."""

    def __init__(self, sglang: SimpleNamespace, size: int, page_size: int) -> None:
        options = {"dtype": torch.float16, "device": "cpu", "kvcache": None, "need_sort": False}
        kind = sglang.token if page_size == 1 else sglang.paged
        self.page_size = page_size
        self.whole_segments = sglang.whole
        self.its = kind(size, **options) if page_size == 1 else kind(size, page_size, **options)

    def do(self, call: str, *arguments: Any) -> list[int] | None:
        if call in ("alloc_extend", "alloc_decode") and self.page_size == 1:
            # Nothing goes on in a page then: its callers ask for so many tokens.
            count = sum(arguments[1]) - sum(arguments[0]) if call == "alloc_extend" else len(arguments[0])
            return self.listed(self.its.alloc(count))
        if call == "alloc_extend":
            prefix, seq, last = map(tensor, arguments)
            return self.listed(self.its.alloc_extend(prefix, prefix, seq, seq, last, int((seq - prefix).sum())))
        if call == "alloc_decode":
            seq, last = map(tensor, arguments)
            return self.listed(self.its.alloc_decode(seq, seq, last))
        if call == "free_segments":
            self.its.free_segments([(tensor(slots), start) for slots, start in arguments[0]])
        elif call == "free_page_ids" and not hasattr(self.its, call):
            pages = tensor(arguments[0])
            slots = (pages[:, None] * self.page_size + torch.arange(self.page_size)).flatten()
            self.its.free_segment(slots, start_pos=0)
        else:
            made = [tensor(each) if isinstance(each, list) else each for each in arguments]
            return self.listed(getattr(self.its, call)(*made))
        return None

    def free_pages(self) -> list[int]:
        return self.its.free_pages.tolist()

    @staticmethod
    def listed(slots: Tensor | None) -> list[int] | None:
        return None if slots is None else slots.tolist()


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_any_program_gives_what_sglang_gives(sglang: SimpleNamespace, page_size: int) -> None:
    for seed in range(100):
        run(
            seed,
            twin=lambda size, page_size: Original(sglang, size, page_size),
            page_size=page_size,
            need_sort=False,
            own_pages=False,
            strict=False,
        )
