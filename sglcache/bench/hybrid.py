"""What trees of more than full KV are measured with: their kinds, and where a prompt is cut into parts.

Needs nothing but the standard library: a peer's driver runs it in an environment that has no more of ours than this.
"""

from __future__ import annotations

# Whether its layers keep a window, and whether they keep a state, beside full KV.
KINDS = {"full": (False, False), "swa": (True, False), "mamba": (False, True), "unified": (True, True)}


def parts(matched: int, reach: int, end: int, chunk_tokens: int, page_size: int) -> list[int]:
    """Where the parts end in which a prompt is computed and committed, in tokens, rising; the last is `end`.

    At multiples of `chunk_tokens` (0: there are none), and at `reach`: so far full KV alone would have matched, so that
    is where others have branched off, and where a window and a state are of use to whoever comes next. All are
    multiples of the page size.
    """
    ends = {end}
    if chunk_tokens:
        step = max(1, chunk_tokens // page_size) * page_size
        ends.update(range((matched // step + 1) * step, end, step))
    reach -= reach % page_size
    if matched < reach < end:
        ends.add(reach)
    return sorted(ends)


def floor(end: int, window: int, page_size: int) -> int:
    """Behind a part that ends at `end`: so many tokens before it, whole pages, are given up, and their windows free.

    As SGLang has it: a whole window stays in front of the last token, in whole pages.
    """
    keep = -(-max(window, page_size) // page_size) * page_size
    return max(0, (end - 1 - keep) // page_size * page_size)
