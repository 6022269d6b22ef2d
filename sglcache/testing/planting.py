"""Bugs planted on purpose: a test that can't notice them is no test."""

from __future__ import annotations

import inspect
import textwrap
from types import FunctionType
from typing import Any, Protocol


class Patcher(Protocol):
    """pytest's MonkeyPatch, or what undoes as well."""

    def setattr(self, target: Any, name: str, value: object) -> None: ...


def plant(patcher: Patcher, owner: Any, name: str, old: str, new: str) -> None:
    """Have function `name` of a class or module read `new` where its source says `old`, which it must say once.

    It is compiled anew in its module's own globals, with its decorators; planted twice, it has both.
    """
    source: str = getattr(_function(owner, name), "planted_source", None) or inspect.getsource(_function(owner, name))
    assert source.count(old) == 1, f"{name}: {source.count(old)} times {old!r}"
    source = source.replace(old, new)
    scope: dict[str, Any] = {}
    code = compile(f"from __future__ import annotations\n{textwrap.dedent(source)}", f"<{name}>", "exec")
    exec(code, _function(owner, name).__globals__, scope)
    patcher.setattr(owner, name, scope[name])
    _function(owner, name).planted_source = source  # type: ignore[attr-defined]


def _function(owner: Any, name: str) -> FunctionType:
    found = inspect.getattr_static(owner, name)
    if isinstance(found, property):
        found = found.fget
    elif isinstance(found, staticmethod | classmethod):
        found = found.__func__
    assert isinstance(found, FunctionType), f"{name} is {found!r}"
    return found
