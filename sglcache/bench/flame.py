"""A flame graph as a small SVG: folded stacks in, boxes out.

py-spy draws its own, of a quarter of a megabyte with a script in it. These are pictures for a document: what is too
narrow to see is left out, and what the harness does around a path is grey. A box says on hover what it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from zlib import crc32

WIDTH, ROW = 1000, 17
NARROWEST = 0.003  # share of all samples
CHAR = 6.2  # a letter's width, about
FRAME = re.compile(r"(?P<name>.*) \((?P<file>[^()]*?)(?::\d+)?\)")
GREY = ("sglcache/bench/", "<frozen")


@dataclass
class Node:
    """A function where it was called from, with what it called."""

    frame: str
    samples: int = 0
    children: dict[str, Node] = field(default_factory=dict)


def fold(text: str, root: str | None = None) -> Node:
    """Lines `a;b;c samples` of py-spy's `raw`, as a tree. With `root`, how a frame begins: what is below it alone."""
    top = Node("all")
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        if root is not None:
            below = [number for number, frame in enumerate(frames) if frame.startswith(root)]
            if not below:
                continue
            frames = frames[below[-1] + 1 :]
        node = top
        node.samples += int(count)
        for frame in frames:
            node = node.children.setdefault(frame, Node(frame))
            node.samples += int(count)
    return top


def svg(top: Node, title: str) -> str:
    """Root at the top; of equal trees the same text."""
    boxes = list(_boxes(top, 0, 0.0, top.samples or 1))
    height = (2 + max((depth for depth, *_ in boxes), default=0)) * ROW + 4
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="monospace" '
        f'font-size="10"><rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="3" y="12">{escape(title)}: {top.samples:,} samples</text>',
    ]
    for depth, start, share, frame in boxes:
        x, width, y = start * WIDTH, share * WIDTH, (depth + 1) * ROW
        name, file = _words(frame)
        shown = name if len(name) * CHAR < width - 4 else name[: max(0, int((width - 4) / CHAR) - 1)] + "…"
        parts.append(
            f"<g><title>{escape(name)} ({escape(file)}): {share:.1%}</title>"
            f'<rect x="{x:.1f}" y="{y}" width="{max(width - 0.5, 0.5):.1f}" height="{ROW - 1}" fill="{_color(frame)}"/>'
            + (f'<text x="{x + 2:.1f}" y="{y + 12}">{escape(shown)}</text>' if width > 3 * CHAR else "")
            + "</g>"
        )
    return "\n".join([*parts, "</svg>\n"])


def _boxes(node: Node, depth: int, start: float, total: int) -> Iterator[tuple[int, float, float, str]]:
    """Depth, where it begins, how wide, what; a caller before what it calls, the widest first."""
    for child in sorted(node.children.values(), key=lambda each: (-each.samples, each.frame)):
        share = child.samples / total
        if share < NARROWEST:
            continue
        yield depth, start, share, child.frame
        yield from _boxes(child, depth + 1, start, total)
        start += share


def _words(frame: str) -> tuple[str, str]:
    found = FRAME.fullmatch(frame)
    return (found["name"], found["file"]) if found else (frame, "")


def _color(frame: str) -> str:
    """A module has one; the harness is grey."""
    file = _words(frame)[1]
    if not file or file.startswith(GREY):
        return "#d0d0d0"
    number = crc32(file.encode())
    return f"hsl({number % 60 + 5},{60 + number // 60 % 30}%,{62 + number // 1800 % 16}%)"
