"""One thing that was looked at, and what is to be done about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Finding:
    check: str
    state: str  # ok, warning, failed, skipped
    detail: str  # what was found, or why it was not looked at
    remedy: str = ""  # of what failed, or may

    def __str__(self) -> str:
        mark = {"ok": "ok", "warning": "warn", "failed": "FAILED", "skipped": "-"}[self.state]
        return f"{mark:<7}{self.check}: {self.detail}" + (f"; {self.remedy}" if self.remedy else "")

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def ok(check: str, detail: str) -> Finding:
    return Finding(check, "ok", detail)


def warning(check: str, detail: str, remedy: str) -> Finding:
    """It works, and may be a mistake, or will not work for long."""
    return Finding(check, "warning", detail, remedy)


def failed(check: str, detail: str, remedy: str) -> Finding:
    return Finding(check, "failed", detail, remedy)


def skipped(check: str, detail: str) -> Finding:
    return Finding(check, "skipped", detail)
